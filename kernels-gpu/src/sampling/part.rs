//! A block's part of a row that a cluster of blocks shares, in the order of indices.

use super::logit::{Logit, Row, Words};
use super::top_k::own_index;
use cuda_std::integer::opaque;
use cuda_std::{Shared, cluster, thread, unroll, warp};

/// Threads of a block.
pub const THREADS: u32 = 1024;
/// Warps of a block, as many as lanes of a warp.
pub const WARPS: u32 = THREADS / 32;

/// The most blocks of a cluster.
pub const MAX_BLOCKS: u32 = 8;

/// Vectors of a part that a thread holds, if it holds them.
const HELD: usize = 8;

/// Vectors of a part that is held, at most. Two fewer than would fit: tokens of a part, with up to 14 outside of the vectors, are counted in 16 bits.
const MOST: u32 = HELD as u32 * THREADS - 2;

/// Blocks that are needed to hold a row of `vocab` logits of 16 bits, and to count those of any type in 16 bits.
pub const fn least_blocks(vocab: u32) -> u32 {
    let blocks = (vocab / 8).div_ceil(MOST);
    if blocks > 1 { blocks } else { 1 }
}

/// What this warp has of the block's part: vectors in one piece, which neighbours read as neighbours. The first warp of the first block has what is before the first vector of the row, too, and that of the last block
/// what is behind the last.
pub struct Part<T> {
    row: Row<T>,
    /// The first vector, and the one after the last.
    first: u32,
    end: u32,
}

impl<T> Clone for Part<T> {
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Part<T> {}

impl<T: Logit> Part<T> {
    /// Of this row.
    #[inline(always)]
    pub fn new(row: Row<T>) -> Self {
        let (rank, blocks) = (cluster::rank(), cluster::size());
        // SAFETY: a cluster has a block.
        unsafe { core::hint::assert_unchecked(blocks != 0) };
        let share = row.vectors.div_ceil(blocks);
        let begin = if rank * share < row.vectors { rank * share } else { row.vectors };
        let end = if row.vectors - begin < share { row.vectors } else { begin + share };
        let piece = share.div_ceil(THREADS) * 32;
        let first = begin + thread::thread_idx_x() / 32 * piece;
        let first = if first < end { first } else { end };
        let end = if end - first < piece { end } else { first + piece };
        Self { row, first, end }
    }

    /// Calls `f` with `N` vectors of this lane at a time, and the index of the first element; the other vectors are 32 vectors apart. What is not there is `absent`.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn for_each<const N: usize>(&self, absent: u32, mut f: impl FnMut(u32, [Words; N])) {
        let mut at = self.first;
        while at < self.end {
            f(self.row.index(at + warp::lane_id(), 0), self.load(at, absent));
            at += 32 * N as u32;
        }
    }

    /// The same with one vector at a time, the next one of which is on its way.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn for_each_ahead(&self, absent: u32, mut f: impl FnMut(u32, Words)) {
        let mut at = self.first;
        let mut next = self.load::<1>(at, absent);
        while at < self.end {
            let [words] = next;
            next = self.load(at + 32, absent);
            f(self.row.index(at + warp::lane_id(), 0), words);
            at += 32;
        }
    }

    /// This lane's vectors of those from `at` on. All are under way before the first is used.
    #[inline(always)]
    #[track_caller]
    unsafe fn load<const N: usize>(&self, at: u32, absent: u32) -> [Words; N] {
        let mut vectors = [[absent; 4]; N];
        unroll::<N>(|i| {
            let v = at + i as u32 * 32 + warp::lane_id();
            if v < self.end {
                vectors[i] = self.row.words(v);
            }
        });
        vectors
    }

    /// Words of a logit before the vectors, and of one behind them, or else `absent`.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn outside(&self, absent: u32) -> [u32; 2] {
        let mut outside = [absent; 2];
        if thread::thread_idx_x() < 32 {
            let lane = warp::lane_id();
            let behind = self.row.index(self.row.vectors, lane);
            if cluster::rank() == 0 && lane < self.row.head {
                outside[0] = self.row.word(lane);
            }
            if cluster::rank() + 1 == cluster::size() && behind < self.row.vocab {
                outside[1] = self.row.word(behind);
            }
        }
        outside
    }

    /// Calls `f` with each of these, and its index, in the first warp.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn for_each_outside(&self, absent: u32, mut f: impl FnMut(u32, u32)) {
        if thread::thread_idx_x() < 32 {
            let outside = self.outside(absent);
            let mut first = warp::lane_id();
            // Hardly anything is there, so the code is small rather than fast.
            let mut i = 0;
            while i < opaque(2) {
                f(first, if i == 0 { outside[0] } else { outside[1] });
                first = self.row.index(self.row.vectors, warp::lane_id());
                i += 1;
            }
        }
    }

    /// Calls `found` with the index of the logit at `position` among those of the block for which `matches` has a bit, one for each element of
    /// a vector, but not for `absent`: by one thread. By all threads; `counts` has [`COUNTS`] words.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn find(
        &self,
        counts: Shared<u32>,
        position: u32,
        absent: u32,
        matches: impl Fn(Words) -> u32,
        found: impl FnOnce(u32),
    ) {
        const AT_ONCE: usize = 4;
        let mut hits = 0;
        self.for_each::<AT_ONCE>(absent, |_, vectors| {
            unroll::<AT_ONCE>(|i| hits += matches(vectors[i]).count_ones());
        });
        let outside = self.outside(absent).map(|word| matches([word, absent, absent, absent]) & 1 != 0);
        let (mut place, left) = self.place(counts, hits, outside, position);
        if let Some(mut left) = left {
            let mut at = self.first;
            'search: loop {
                let vectors = self.load::<AT_ONCE>(at, absent);
                let mut i = 0;
                while i < AT_ONCE {
                    match self.step(at, matches(vectors[i]), left) {
                        Ok(here) => {
                            place = here;
                            break 'search;
                        }
                        Err(rest) => left = rest,
                    }
                    at += 32;
                    i += 1;
                }
            }
        }
        if let Some(place) = place {
            found(place);
        }
    }

    /// The index of the logit at `position` if it is outside of the vectors and this thread is to know it, and how many matching vectors' elements of this warp are before it if it is one of those. `hits` are
    /// the matching elements of this lane's vectors.
    #[inline(always)]
    #[track_caller]
    unsafe fn place(
        &self,
        counts: Shared<u32>,
        hits: u32,
        outside: [bool; 2],
        position: u32,
    ) -> (Option<u32>, Option<u32>) {
        let (warp_id, lane) = (own_index() / 32, own_index() % 32);
        let of_warp = warp::warp_reduce_add_u32(warp::FULL, hits);
        let [head, tail] = outside.map(|there| warp::warp_vote_ballot(warp::FULL, there));
        if lane == 0 {
            counts.set(warp_id, of_warp);
            if warp_id == 0 {
                counts.set(WARPS, head.count_ones());
            }
        }
        thread::sync_threads();
        let of_warps = counts.get(lane);
        let upto = warp::scan(of_warps, |a, b| a + b);
        let before = counts.get(WARPS) + warp::shfl_idx(upto - of_warps, warp_id);
        let behind = counts.get(WARPS) + warp::shfl_idx(upto, 31);
        let mut place = None;
        if warp_id == 0 && lane == 0 {
            if position < head.count_ones() {
                place = Some(nth_bit(head, position));
            } else if position >= behind {
                place = Some(self.row.index(self.row.vectors, nth_bit(tail, position - behind)));
            }
        }
        let left = if position >= before && position - before < of_warp { Some(position - before) } else { None };
        (place, left)
    }

    /// Where the logit with `left` matching ones before it is among the 32 vectors from `at` on, if this lane has it; or else how many are left. `hits` are bits of this lane's.
    #[inline(always)]
    #[track_caller]
    fn step(&self, at: u32, hits: u32, left: u32) -> Result<Option<u32>, u32> {
        let mine = hits.count_ones();
        let all = warp::warp_reduce_add_u32(warp::FULL, mine);
        if left >= all {
            return Err(left - all);
        }
        let own = left.wrapping_sub(warp::scan(mine, |a, b| a + b) - mine);
        Ok(if own < mine { Some(self.row.index(at + warp::lane_id(), nth_bit(hits, own))) } else { None })
    }
}

/// Words of shared memory to find a logit.
pub const COUNTS: usize = WARPS as usize + 1;

/// Place of the bit with `n` others below it, of which there are more than `n`.
#[inline(always)]
fn nth_bit(mut bits: u32, n: u32) -> u32 {
    let mut i = 0;
    while i < n {
        bits &= bits.wrapping_sub(1);
        i += 1;
    }
    bits.trailing_zeros()
}

/// A part in the registers of the block, with [`ABSENT`](Logit::ABSENT) for what is not there.
pub struct Held<T> {
    part: Part<T>,
    vectors: [Words; HELD],
    outside: [u32; 2],
}

impl<T: Logit> Held<T> {
    /// Of a cluster with enough blocks: [`least_blocks`].
    #[inline(always)]
    #[track_caller]
    pub unsafe fn load(part: Part<T>) -> Self {
        Self { part, vectors: part.load(part.first, T::ABSENT), outside: part.outside(T::ABSENT) }
    }

    /// Calls `f` with the vectors.
    #[inline(always)]
    #[track_caller]
    pub fn for_each(&self, mut f: impl FnMut(Words)) {
        unroll::<HELD>(|i| {
            if self.part.first + 32 * (i as u32) < self.part.end {
                f(self.vectors[i]);
            }
        });
    }

    /// Words of a logit before the vectors, and of one behind them.
    #[inline(always)]
    pub fn outside(&self) -> [u32; 2] {
        self.outside
    }

    /// The larger parts of all words.
    #[inline(always)]
    pub fn largest(&self) -> u32 {
        let mut word = T::larger(self.outside[0], self.outside[1]);
        unroll::<HELD>(|i| unroll::<4>(|w| word = T::larger(word, self.vectors[i][w])));
        word
    }

    /// As [`Part::find`].
    #[inline(always)]
    #[track_caller]
    pub unsafe fn find(
        &self,
        counts: Shared<u32>,
        position: u32,
        matches: impl Fn(Words) -> u32,
        found: impl FnOnce(u32),
    ) {
        let width = Row::<T>::WIDTH;
        let mut hits = 0u64;
        unroll::<HELD>(|i| {
            if self.part.first + 32 * (i as u32) < self.part.end {
                hits |= (matches(self.vectors[i]) as u64) << (i as u32 * width);
            }
        });
        let outside = self.outside.map(|word| matches([word, T::ABSENT, T::ABSENT, T::ABSENT]) & 1 != 0);
        let (mut place, left) = self.part.place(counts, hits.count_ones(), outside, position);
        if let Some(mut left) = left {
            let mut i = 0;
            loop {
                let mine = (hits >> (i * width)) as u32 & ((1 << width) - 1);
                match self.part.step(self.part.first + 32 * i, mine, left) {
                    Ok(here) => {
                        place = here;
                        break;
                    }
                    Err(rest) => left = rest,
                }
                i += 1;
            }
        }
        if let Some(place) = place {
            found(place);
        }
    }
}
