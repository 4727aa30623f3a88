//! The best k of a block's candidates: bounds, ranks by counting, and a sorted list in the registers of a warp.
//!
//! A candidate is key and index in one `u64` ([`candidate`]): no two are equal, larger is
//! better. The way to few candidates is a *bound*: each thread offers the best of what it holds; those are
//! combined into a few times k groups; the k-th best group is a lower bound of the k-th best of all, as k groups hold at
//! least one that is as good. Of `n` in random order about `-groups * ln(1 - k / groups)` are above it, 24 for k = 20.
//! These few are ranked by counting, for each, those that are better.
//!
//! Where that leaves too many, because thousands are equal or because all the good ones are in a few groups, each warp
//! goes through its part in the order of indices and keeps a sorted list, by insertion, in its registers.

use super::job::PARAMETERS;
use super::logit::{Logit, Row, Words, for_each, largest};
use super::weights::{candidate, key, key_of};
use cuda_std::atomic::{Block, Relaxed};
use cuda_std::integer::opaque;
use cuda_std::shared::Carver;
use cuda_std::vec::B128;
use cuda_std::{Shared, cp_async, float, thread, unroll, warp};

/// Threads of a block.
pub const THREADS: u32 = 256;
const WARPS: u32 = THREADS / 32;

/// The largest k. A list of one warp has four registers a lane.
pub const MAX_K: u32 = 128;
const LIST_REGISTERS: usize = 4;

/// The most candidates at a time: at least a running list and one of each warp.
pub const CAPACITY: u32 = 12 * MAX_K;
const _: () = assert!(CAPACITY >= (WARPS + 1) * MAX_K);

/// Enough for a number of each group.
const GROUP_BITS: u32 = 8;

/// Candidates of a thread, if all have as many.
pub const PRUNED: usize = CAPACITY.div_ceil(THREADS) as usize;

/// Vectors of a tile for each thread.
const HELD: usize = 4;

/// Vectors of a tile.
const TILE: u32 = HELD as u32 * THREADS;

/// Tiles in shared memory.
const STAGES: u32 = 4;

/// The stage `n <= STAGES` after one.
#[inline(always)]
fn following(stage: u32, n: u32) -> u32 {
    let to = stage + n;
    if to < STAGES { to } else { to - STAGES }
}

/// Tiles of a row on their way to where they are looked at. Threads see only what they requested themselves, so nobody
/// waits for anybody else.
pub struct Ring<T> {
    slots: Shared<T>,
}

/// Bytes of [`Ring`].
const RING_BYTES: usize = (STAGES * TILE) as usize * 16;

impl<T> Clone for Ring<T> {
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Ring<T> {}

impl<T: Logit> Ring<T> {
    /// From shared memory.
    #[inline(always)]
    pub unsafe fn new(carver: &mut Carver) -> Self {
        Self { slots: carver.take_aligned(RING_BYTES / size_of::<T>(), 16) }
    }

    /// Where the first vector of this thread in a stage is; the others are `THREADS` vectors apart.
    #[inline(always)]
    fn slot(self, stage: u32) -> u32 {
        (stage * TILE + own_index()) * Row::<T>::WIDTH
    }

    /// Requests the tile that starts with vector `at`, as far as it is before `end`. One group of copies.
    #[inline(always)]
    #[track_caller]
    unsafe fn request(self, stage: u32, row: Row<T>, at: u32, end: u32) {
        if at < end {
            let (slot, first) = (self.slot(stage), at + own_index());
            unroll::<HELD>(|u| {
                let step = u as u32 * THREADS;
                if first + step < end {
                    cp_async::copy_16(self.slots.ptr(slot + step * Row::<T>::WIDTH), row.vector(first + step));
                }
            });
        }
        cp_async::commit_group();
    }

    /// Requests the first tiles.
    #[inline(always)]
    #[track_caller]
    unsafe fn fill(self, row: Row<T>, at: u32, end: u32) {
        let mut stage = 0;
        while stage < STAGES {
            self.request(stage, row, at + stage * TILE, end);
            stage += 1;
        }
    }

    /// This thread's vectors of the tile that starts with vector `at`, once they are there.
    #[inline(always)]
    #[track_caller]
    unsafe fn load(self, stage: u32, at: u32, end: u32) -> [Words; HELD] {
        let (slot, first) = (self.slot(stage), at + own_index());
        let mut held = [[T::ABSENT; 4]; HELD];
        unroll::<HELD>(|u| {
            let step = u as u32 * THREADS;
            if first + step < end {
                held[u] = self.slots.get_as::<B128<u32, 4>>(slot + step * Row::<T>::WIDTH).0;
            }
        });
        held
    }

    /// Element `e` of this thread's vector `u`, which is there.
    #[inline(always)]
    #[track_caller]
    unsafe fn get(self, stage: u32, u: u32, e: u32) -> f32 {
        self.slots.get(self.slot(stage) + u * THREADS * Row::<T>::WIDTH + e).to_f32()
    }
}

/// The thread's number in its block. What is computed from it is computed where it is needed: the compiler would
/// rather do all of that once, before a loop, and run out of registers.
#[inline(always)]
pub fn own_index() -> u32 {
    opaque(thread::thread_idx_x())
}

/// Shared memory of the block.
#[derive(Clone, Copy)]
pub struct Scratch {
    /// Candidates in any order, and two zeros.
    pub candidates: Shared<u64>,
    /// The best, in order.
    pub best: Shared<u64>,
    /// The best of each group, and four zeros.
    groups: Shared<u32>,
    bound: Shared<u32>,
    count: Shared<u32>,
    /// For [`super::job::Job::last_of_row`] and the like.
    pub flag: Shared<u32>,
    /// For the parameters of the row.
    pub parameters: Shared<u32>,
}

/// Bytes of [`Scratch`].
const SCRATCH_BYTES: usize = 8 * (CAPACITY + 2 + MAX_K) as usize + 4 * (THREADS as usize + 4 + 12 + PARAMETERS);

/// Shared memory of a block that has a [`Ring`] and a [`Scratch`].
pub const SHARED_BYTES: usize = RING_BYTES + SCRATCH_BYTES;

impl Scratch {
    /// From shared memory.
    #[inline(always)]
    pub unsafe fn new(carver: &mut Carver) -> Self {
        Self {
            candidates: carver.take_aligned(CAPACITY as usize + 2, 16),
            best: carver.take(MAX_K as usize),
            groups: carver.take_aligned(THREADS as usize + 4, 16),
            bound: carver.take(4),
            count: carver.take(4),
            flag: carver.take(4),
            parameters: carver.take(PARAMETERS),
        }
    }

    /// A lower bound of the `k`-th best key of everything of which each thread passes its best; 0 if fewer than `k` groups
    /// hold anything. All threads get it. Resets the count of [`reserve`](Self::reserve).
    #[inline(always)]
    #[track_caller]
    unsafe fn bound(&self, k: u32, offer: u32) -> u32 {
        let tid = own_index();
        // 2^shift lanes make a group; there are at least twice as many groups as are wanted.
        let shift = match k {
            0..=16 => 3,
            17..=32 => 2,
            33..=64 => 1,
            _ => 0,
        };
        const { assert!(THREADS == 2 * MAX_K && THREADS == 1 << GROUP_BITS) };
        let mut best = offer;
        let mut i = 0;
        while i < shift {
            best = best.max(warp::shfl_xor(best, 1 << i));
            i += 1;
        }
        let group = tid >> shift;
        if tid & ((1 << shift) - 1) == 0 {
            // Short of its last bits, which say whose it is: no two are equal.
            let best = best >> (GROUP_BITS + 1) << GROUP_BITS;
            self.groups.set(group, if best == 0 { 0 } else { best | group });
        }
        if tid == 0 {
            self.bound.set(0u32, 0);
        }
        thread::sync_threads();
        if tid == 0 {
            self.count.set(0u32, 0);
        }
        rank::<u32, 4>(self.groups, THREADS >> shift, THREADS, |rank, item| {
            if rank == k - 1 && item != 0 {
                self.bound.set(0u32, item >> GROUP_BITS << (GROUP_BITS + 1));
            }
        });
        thread::sync_threads();
        self.bound.get(0u32)
    }

    /// Room for `mine` candidates of each thread: where this thread's start, of all since the count was reset.
    #[inline(always)]
    #[track_caller]
    unsafe fn reserve(&self, mine: u32) -> u32 {
        let upto = warp::scan(mine, |a, b| a + b);
        let total = warp::shfl_idx(upto, 31);
        let mut start = 0;
        if warp::lane_id() == 0 && total > 0 {
            start = self.count.fetch_add(0u32, total, Block, Relaxed);
        }
        warp::shfl_idx(start, 0) + upto - mine
    }

    /// What was reserved; after a barrier.
    #[inline(always)]
    #[track_caller]
    unsafe fn reserved(&self) -> u32 {
        self.count.get(0u32)
    }

    /// Leaves the best `k` of the first `n` candidates in `best`, in order; how many there are, as 0 is no candidate. By
    /// all threads, after a barrier.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn keep_best(&self, n: u32, k: u32) -> u32 {
        // Ranking takes time with the square of their number.
        let prune = n > THREADS / 2;
        let n = if prune {
            let tid = own_index();
            let mut held = [0; PRUNED];
            unroll::<PRUNED>(|i| {
                let at = i as u32 * THREADS + tid;
                if at < n {
                    held[i] = self.candidates.get(at);
                }
            });
            self.prune(held, k)
        } else {
            n
        };
        self.keep_ranked(n, k, prune)
    }

    /// As [`keep_best`](Self::keep_best), of what the threads hold.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn keep_best_of(&self, held: [u64; PRUNED], k: u32) -> u32 {
        let n = self.prune(held, k);
        self.keep_ranked(n, k, true)
    }

    /// The rest of [`keep_best`](Self::keep_best). `all`: none of the candidates is 0.
    #[inline(always)]
    #[track_caller]
    unsafe fn keep_ranked(&self, n: u32, k: u32, all: bool) -> u32 {
        rank::<u64, 2>(self.candidates, n, CAPACITY, |rank, item| {
            if rank < k && item != 0 {
                self.best.set(rank, item);
            }
        });
        let tid = own_index();
        let some = thread::sync_threads_count(tid < n && self.candidates.get(tid) != 0);
        let some = if all { n } else { some };
        if some < k { some } else { k }
    }

    /// Leaves the candidates above a bound, in any order; how many they are.
    #[inline(always)]
    #[track_caller]
    unsafe fn prune(&self, held: [u64; PRUNED], k: u32) -> u32 {
        let mut best = 0;
        unroll::<PRUNED>(|i| best = held[i].max(best));
        let bound = self.bound(k, key_of(best)).max(1);
        let mut mine = 0;
        unroll::<PRUNED>(|i| mine += (key_of(held[i]) >= bound) as u32);
        let mut slot = self.reserve(mine);
        unroll::<PRUNED>(|i| {
            if key_of(held[i]) >= bound {
                self.candidates.set(slot, held[i]);
                slot += 1;
            }
        });
        thread::sync_threads();
        self.reserved()
    }

    /// The best `k` of one of `parts` parts of a row that are above -inf: how many there are, and where, in order. If these and
    /// some others that the last round could not tell from them are at most `room`, all those, in any order.
    /// `meanwhile` is called while the first tiles are on their way.
    ///
    /// By rounds of tiles. The first round, of as many tiles as the ring holds, finds a bound for itself. From then on
    /// candidates must be better than the `k`-th best so far, which stays as it is for a round, so that warps go through its
    /// tiles without waiting for each other. A round is three times as long as the one before: in random order it finds about
    /// `2k` candidates.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn best_of_row<T: Logit>(
        &self,
        ring: Ring<T>,
        row: Row<T>,
        part: u32,
        parts: u32,
        k: u32,
        room: u32,
        meanwhile: impl FnOnce(),
    ) -> (u32, Shared<u64>) {
        let share = row.vectors.div_ceil(parts);
        let begin = if part * share < row.vectors { part * share } else { row.vectors };
        let end = if row.vectors - begin < share { row.vectors } else { begin + share };
        let mut len = 0;
        let mut at = begin;
        let mut tiles = STAGES;
        let mut stage = 0;
        ring.fill(row, at, end);
        let tid = own_index();
        if tid < 4 {
            self.groups.set(THREADS + tid, 0);
            if tid < 2 {
                self.candidates.set(CAPACITY + tid, 0);
            }
        }
        meanwhile();
        loop {
            let (tid, k) = (own_index(), opaque(k));
            let next = at + tiles * TILE;
            // The first round takes what is before the vectors, the last what is behind, so that indices grow from round
            // to round: a few elements, one for each of the first threads and of those after WIDTH.
            let mut extra = (0, f32::NEG_INFINITY);
            let behind = (row.index(row.vectors, 0) + tid).wrapping_sub(Row::<T>::WIDTH);
            if part == 0 && at == begin && tid < row.head {
                extra = (tid, row.get(tid));
            } else if part + 1 == parts && next >= end && tid >= Row::<T>::WIDTH && behind < row.vocab {
                extra = (behind, row.get(behind));
            }

            // What has been found competes again.
            if tid < len {
                self.candidates.set(tid, self.best.get(tid));
            }
            let least = if len == k {
                // Indices only grow, so an equal logit comes too late.
                let least = float::from_sortable(key_of(self.best.get(k - 1)) + 1);
                if tid == 0 {
                    self.count.set(0u32, 0);
                }
                thread::sync_threads();
                least
            } else {
                // A round without a bound to start from has no more tiles than the ring, and starts with all of them.
                cp_async::wait_group::<0>();
                let mut best = extra.1;
                let mut i = 0;
                while i < tiles && at + i * TILE < end {
                    best = float::max(best, largest::<T, HELD>(&ring.load(following(stage, i), at + i * TILE, end)));
                    i += 1;
                }
                float::from_sortable(self.bound(k, key(best))).max(f32::MIN)
            };

            if extra.1 >= least {
                self.add(len, candidate(key(extra.1), extra.0));
            }
            let mut tile = at;
            while tile < next && tile < end {
                cp_async::wait_group::<{ STAGES as usize - 1 }>();
                let held = ring.load(stage, tile, end);
                if largest::<T, HELD>(&held) >= least {
                    // A bit for each element of those that are read again: they are few.
                    let mut hits = 0u32;
                    unroll::<HELD>(|u| {
                        for_each::<T>(held[u], |e, x| {
                            hits |= ((x >= least) as u32) << (u as u32 * Row::<T>::WIDTH + e);
                        });
                    });
                    while hits != 0 {
                        let bit = hits.trailing_zeros();
                        let (u, e) = (bit / Row::<T>::WIDTH, bit % Row::<T>::WIDTH);
                        let i = row.index(tile + u * THREADS + tid, e);
                        self.add(len, candidate(key(ring.get(stage, u, e)), i));
                        hits &= hits - 1;
                    }
                }
                ring.request(stage, row, tile + STAGES * TILE, end);
                stage = following(stage, 1);
                tile += TILE;
            }
            thread::sync_threads();
            let found = self.reserved();
            let mut n = len + found;
            if n > CAPACITY && tiles > 1 {
                // Again, with less at a time.
                tiles = 1;
                stage = 0;
                cp_async::wait_group::<0>();
                ring.fill(row, at, end);
            } else {
                if n > CAPACITY {
                    n = len + WARPS * k;
                    let first = if part == 0 && at == begin { 0 } else { row.index(at, 0) };
                    let last = if next < end {
                        row.index(next, 0)
                    } else if part + 1 < parts {
                        row.index(end, 0)
                    } else {
                        row.vocab
                    };
                    self.insert_all(row, first, last, least, len, k);
                }
                if next >= end && n <= room {
                    return (n, self.candidates);
                }
                if found > 0 {
                    len = self.keep_best(n, k);
                }
                at = next;
                if at >= end {
                    return (len, self.best);
                }
                tiles = if len == k { 3 * tiles } else { tiles.min(STAGES) };
            }
            // The count is reset above.
            thread::sync_threads();
        }
    }

    /// Adds a candidate after the first `len`, if there is room, and counts it.
    #[inline(always)]
    #[track_caller]
    unsafe fn add(&self, len: u32, candidate: u64) {
        let slot = len + self.count.fetch_add(0u32, 1, Block, Relaxed);
        if slot < CAPACITY {
            self.candidates.set(slot, candidate);
        }
    }

    /// The candidates from `start` on become the sorted lists of the warps, `k` entries each, of tokens `first..last` with
    /// logits of at least `least`.
    #[inline(always)]
    #[track_caller]
    unsafe fn insert_all<T: Logit>(&self, row: Row<T>, first: u32, last: u32, least: f32, start: u32, k: u32) {
        let (warp_id, lane) = (own_index() / 32, warp::lane_id());
        let share = (last - first).div_ceil(WARPS);
        let mut at = first + warp_id * share;
        let end = if at + share < last { at + share } else { last };
        let mut list = SortedList::new();
        while at < end {
            let i = at + lane;
            let x = if i < end { row.get(i) } else { f32::NEG_INFINITY };
            let mine = if x >= least { candidate(key(x), i) } else { 0 };
            let worst = list.get(k - 1);
            let mut better = warp::warp_vote_ballot(warp::FULL, mine > worst);
            while better != 0 {
                let from = better.trailing_zeros();
                list.insert(warp::shfl_idx(mine, from));
                better &= better - 1;
            }
            at += 32;
        }
        unroll::<LIST_REGISTERS>(|r| {
            let i = r as u32 * 32 + lane;
            if i < k {
                self.candidates.set(start + warp_id * k + i, list.entries[r]);
            }
        });
        thread::sync_threads();
    }
}

/// Numbers whose highest bit is 0.
trait Ranked: Copy + Default {
    /// 1 if `other` is larger, else 0. The sign of a difference: comparisons would all go through the few predicates that are
    /// free, one after another.
    fn is_below(self, other: Self) -> u32;
}
impl Ranked for u32 {
    #[inline(always)]
    fn is_below(self, other: u32) -> u32 {
        self.wrapping_sub(other) >> 31
    }
}
impl Ranked for u64 {
    #[inline(always)]
    fn is_below(self, other: u64) -> u32 {
        (self.wrapping_sub(other) >> 63) as u32
    }
}

/// Calls `f(rank, item)` once for each of `n` items, which start at a multiple of 16 bytes: its rank is the number of
/// those that are larger. From item `zeros` on, a multiple of `N`, there are `N` that are zero; of `N = 4`, `n` is a multiple.
///
/// As many lanes as there are to spare share the work of one item. All threads take part.
#[inline(always)]
#[track_caller]
unsafe fn rank<I: Ranked, const N: usize>(items: Shared<I>, n: u32, zeros: u32, mut f: impl FnMut(u32, I)) {
    const { assert!(N * size_of::<I>() == 16 && N.is_power_of_two()) };
    const AT_ONCE: u32 = 4;
    let tid = own_index();
    // Lanes of an item: 2^shift.
    let mut shift = 0;
    while shift < 5 && n << (shift + 1) <= THREADS {
        shift += 1;
    }
    let lanes = 1 << shift;
    let (part, step) = (tid & (lanes - 1), THREADS >> shift);
    let whole = n / N as u32;
    let mut first = 0;
    while first < n {
        let i = first + (tid >> shift);
        let item = if i < n { items.get(i) } else { I::default() };
        let mut larger = 0;
        // Behind the whole vectors.
        if N == 2 {
            let last = if n % 2 == 1 { n - 1 } else { zeros };
            let last = item.is_below(items.get(last));
            larger = if part == 0 { last } else { 0 };
        }
        let mut at = part;
        while at - part < whole {
            let mut others = [[I::default(); N]; AT_ONCE as usize];
            unroll::<{ AT_ONCE as usize }>(|u| {
                let from = at + u as u32 * lanes;
                others[u] = items.get_as::<B128<I, N>>(if from < whole { from * N as u32 } else { zeros }).0;
            });
            // All are under way before the first is waited for.
            warp::sync_warp(warp::FULL);
            unroll::<{ AT_ONCE as usize }>(|u| unroll::<N>(|v| larger += item.is_below(others[u][v])));
            at += AT_ONCE * lanes;
        }
        let mut m = 1;
        while m < lanes {
            larger += warp::shfl_xor(larger, m);
            m *= 2;
        }
        if i < n && part == 0 {
            f(larger, item);
        }
        first += step;
    }
}

/// The best candidates of a warp in descending order, spread over its registers: entry `i` is in lane `i % 32`.
///
/// Insertion sort without a loop over positions: every entry becomes the larger of itself and the smaller of its
/// predecessor and the newcomer, which keeps it, moves it down, or puts the newcomer in its place.
struct SortedList {
    entries: [u64; LIST_REGISTERS],
}

impl SortedList {
    #[inline(always)]
    fn new() -> Self {
        Self { entries: [0; LIST_REGISTERS] }
    }

    /// By all lanes with the same candidate.
    #[inline(always)]
    #[track_caller]
    fn insert(&mut self, new: u64) {
        let lane = warp::lane_id();
        let mut carry = u64::MAX;
        unroll::<LIST_REGISTERS>(|r| {
            let entry = self.entries[r];
            let above = warp::warp_shuffle_up(warp::FULL, entry, 1, 32).0;
            let above = if lane == 0 { carry } else { above };
            carry = warp::shfl_idx(entry, 31);
            self.entries[r] = entry.max(above.min(new));
        });
    }

    /// Entry `i`, to all lanes.
    #[inline(always)]
    #[track_caller]
    fn get(&self, i: u32) -> u64 {
        let mut entry = 0;
        unroll::<LIST_REGISTERS>(|r| {
            if i / 32 == r as u32 {
                entry = self.entries[r];
            }
        });
        warp::shfl_idx(entry, i % 32)
    }
}
