//! The best k of a block's candidates: bounds, ranks by counting, and a sorted list in the registers of a warp.
//!
//! A candidate is key and index in one `u64` ([`candidate`](super::weights::candidate)): no two are equal, larger is
//! better. The way to few candidates is a *bound*: each thread offers the best of what it holds; those are
//! combined into a few times k groups; the k-th best group is a lower bound of the k-th best of all, as k groups hold at
//! least one that is as good. Of `n` in random order about `-groups * ln(1 - k / groups)` are above it, 24 for k = 20.
//! These few are ranked by counting, for each, those that are better.
//!
//! Where that leaves too many, because thousands are equal or because all the good ones are in a few groups, each warp
//! goes through its part in the order of indices and keeps a sorted list, by insertion, in its registers.

use super::logit::{Logit, Row, for_each};
use super::weights::{candidate, key};
use cuda_std::shared::Carver;
use cuda_std::{Shared, atomic, float, thread, unroll, warp};

/// Threads of a block.
pub const THREADS: u32 = 512;
const WARPS: u32 = THREADS / 32;

/// The largest k. A list of one warp has four registers a lane.
pub const MAX_K: u32 = 128;
const LIST_REGISTERS: usize = 4;

/// The most candidates at a time: a running list and one of each warp.
pub const CAPACITY: u32 = (WARPS + 1) * MAX_K;

/// Candidates of a thread.
const PRUNED: usize = CAPACITY.div_ceil(THREADS) as usize;

/// Vectors that a thread holds at a time.
const HELD: usize = 4;

/// Shared memory of the block.
#[derive(Clone, Copy)]
pub struct Scratch {
    /// Candidates in any order.
    pub candidates: Shared<u64>,
    /// The best, in order.
    pub best: Shared<u64>,
    /// The best of each group.
    groups: Shared<u64>,
    bound: Shared<u64>,
    count: Shared<u32>,
    /// For [`super::job::Job::last_of_row`] and the like.
    pub flag: Shared<u32>,
}

/// Bytes of [`Scratch`].
pub const SCRATCH_BYTES: usize = 8 * (CAPACITY + MAX_K + THREADS / 2 + 2) as usize + 32;

impl Scratch {
    /// At the start of shared memory.
    #[inline(always)]
    pub unsafe fn new() -> Self {
        let mut carver = Carver::new();
        Self {
            candidates: carver.take(CAPACITY as usize),
            best: carver.take(MAX_K as usize),
            groups: carver.take(THREADS as usize / 2),
            bound: carver.take(2),
            count: carver.take(4),
            flag: carver.take(4),
        }
    }

    /// A lower bound of the `k`-th best of everything of which each thread passes its best; 0 if fewer than `k` groups
    /// hold anything. All threads get it. Resets the count of [`reserve`](Self::reserve).
    #[inline(always)]
    #[track_caller]
    unsafe fn bound(&self, k: u32, offer: u64) -> u64 {
        let tid = thread::thread_idx_x();
        // 2^shift lanes make a group.
        let shift = match k {
            0..=16 => 4,
            17..=32 => 3,
            33..=64 => 2,
            _ => 1,
        };
        let mut best = offer;
        let mut i = 0;
        while i < shift {
            best = best.max(warp::shfl_xor(best, 1 << i));
            i += 1;
        }
        if tid & ((1 << shift) - 1) == 0 {
            self.groups.set(tid >> shift, best);
        }
        if tid == 0 {
            self.bound.set(0u32, 0);
        }
        thread::sync_threads();
        if tid == 0 {
            self.count.set(0u32, 0);
        }
        rank(self.groups, THREADS >> shift, |rank, item| {
            if rank == k - 1 && item != 0 {
                self.bound.set(0u32, item);
            }
        });
        thread::sync_threads();
        self.bound.get(0u32)
    }

    /// Room for `mine` candidates of each thread: where this thread's start, of all since the count was reset.
    #[inline(always)]
    #[track_caller]
    unsafe fn reserve(&self, mine: u32) -> u32 {
        let lane = warp::lane_id();
        let mut upto = mine;
        let mut delta = 1;
        while delta < 32 {
            let (below, there) = warp::warp_shuffle_up(warp::FULL, upto, delta, 32);
            upto += if there { below } else { 0 };
            delta *= 2;
        }
        let total = warp::shfl_idx(upto, 31);
        let mut start = 0;
        if lane == 0 && total > 0 {
            start = atomic::fetch_add_u32(self.count.ptr(0u32), total);
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
        let prune = n > THREADS / 4;
        let n = if prune { self.prune(n, k) } else { n };
        rank(self.candidates, n, |rank, item| {
            if rank < k && item != 0 {
                self.best.set(rank, item);
            }
        });
        let tid = thread::thread_idx_x();
        let some = thread::sync_threads_count(tid < n && self.candidates.get(tid) != 0);
        let some = if prune { n } else { some };
        if some < k { some } else { k }
    }

    /// Drops candidates below a bound; how many are left.
    #[inline(always)]
    #[track_caller]
    unsafe fn prune(&self, n: u32, k: u32) -> u32 {
        let mut held = [0; PRUNED];
        let mut best = 0;
        unroll::<PRUNED>(|i| {
            let at = i as u32 * THREADS + thread::thread_idx_x();
            if at < n {
                held[i] = self.candidates.get(at);
                best = held[i].max(best);
            }
        });
        let bound = self.bound(k, best).max(1);
        let mut mine = 0;
        unroll::<PRUNED>(|i| mine += (held[i] >= bound) as u32);
        let mut slot = self.reserve(mine);
        unroll::<PRUNED>(|i| {
            if held[i] >= bound {
                self.candidates.set(slot, held[i]);
                slot += 1;
            }
        });
        thread::sync_threads();
        self.reserved()
    }

    /// The best `k` of vectors `begin..end` of a row that are above -inf, to `best`; how many there are.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn best_of_row<T: Logit>(&self, row: Row<T>, begin: u32, end: u32, k: u32) -> u32 {
        let tid = thread::thread_idx_x();
        let mut len = 0;
        let mut at = begin;
        while at < end {
            let mut held = [[T::ABSENT; 4]; HELD];
            unroll::<HELD>(|u| {
                let v = at + u as u32 * THREADS + tid;
                if v < end {
                    held[u] = row.load(v);
                }
            });
            // What has been found competes again.
            if tid < len {
                self.candidates.set(tid, self.best.get(tid));
            }
            let least = if len == k {
                // Indices only grow, so an equal logit comes too late.
                let least = float::from_sortable((self.best.get(k - 1) >> 32) as u32 + 1);
                if tid == 0 {
                    self.count.set(0u32, 0);
                }
                thread::sync_threads();
                least
            } else {
                let mut largest = f32::NEG_INFINITY;
                unroll::<HELD>(|u| for_each::<T>(held[u], |_, x| largest = largest.max(x)));
                let bound = self.bound(k, candidate(key(largest), tid));
                float::from_sortable((bound >> 32) as u32).max(f32::MIN)
            };

            let mut mine = 0;
            unroll::<HELD>(|u| for_each::<T>(held[u], |_, x| mine += (x >= least) as u32));
            let mut slot = len + self.reserve(mine);
            if mine > 0 {
                unroll::<HELD>(|u| {
                    let v = at + u as u32 * THREADS + tid;
                    for_each::<T>(held[u], |e, x| {
                        if x >= least {
                            if slot < CAPACITY {
                                self.candidates.set(slot, candidate(key(x), row.index(v, e)));
                            }
                            slot += 1;
                        }
                    });
                });
            }
            thread::sync_threads();
            let found = self.reserved();
            let next = at + HELD as u32 * THREADS;
            if found > 0 {
                let mut n = len + found;
                if n > CAPACITY {
                    n = len + WARPS * k;
                    self.insert_all(row, at, if next < end { next } else { end }, least, len, k);
                }
                len = self.keep_best(n, k);
            } else if next < end {
                // The count is reset above.
                thread::sync_threads();
            }
            at = next;
        }
        len
    }

    /// The candidates from `start` on become the sorted lists of the warps, `k` entries each, of vectors `begin..end`
    /// and logits of at least `least`.
    #[inline(always)]
    #[track_caller]
    unsafe fn insert_all<T: Logit>(&self, row: Row<T>, begin: u32, end: u32, least: f32, start: u32, k: u32) {
        let (warp_id, lane) = (thread::thread_idx_x() / 32, warp::lane_id());
        let share = (end - begin).div_ceil(WARPS) * Row::<T>::WIDTH;
        let first = begin * Row::<T>::WIDTH + warp_id * share;
        let last = first + share;
        let last = if last < end * Row::<T>::WIDTH { last } else { end * Row::<T>::WIDTH };
        let mut list = SortedList::new();
        let mut at = first;
        while at < last {
            let i = row.index(0, at + lane);
            let x = if at + lane < last && i < row.vocab { row.get(i) } else { f32::NEG_INFINITY };
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

/// Calls `f(rank, item)` once for each of `n` items: its rank is the number of those that are larger.
///
/// As many lanes as there are to spare share the work of one item. All threads take part.
#[inline(always)]
#[track_caller]
unsafe fn rank(items: Shared<u64>, n: u32, mut f: impl FnMut(u32, u64)) {
    let tid = thread::thread_idx_x();
    // Lanes of an item: 2^shift.
    let mut shift = 0;
    while shift < 5 && n << (shift + 1) <= THREADS {
        shift += 1;
    }
    let lanes = 1 << shift;
    let (part, step) = (tid & (lanes - 1), THREADS >> shift);
    let mut first = 0;
    while first < n {
        let i = first + (tid >> shift);
        let item = if i < n { items.get(i) } else { 0 };
        let mut larger = 0;
        let mut j = part;
        while j < n {
            larger += (items.get(j) > item) as u32;
            j += lanes;
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
