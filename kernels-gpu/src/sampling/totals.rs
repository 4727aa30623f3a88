//! Positions in a histogram that a cluster of blocks has made: sums over chunks of its bins in the first block, and the search for a position among them.

use super::top_k::own_index;
use cuda_std::shared::Carver;
use cuda_std::{Shared, cluster, unroll, warp};

/// Bins of a chunk: two for each lane of a warp, of which lane 0 has the highest.
pub const CHUNK: u32 = 64;

/// The most chunks: a bit for each in a word of each lane.
pub const MAX_CHUNKS: u32 = 32 * 32;

/// Tokens in a bin and their mass.
#[derive(Clone, Copy, Default)]
pub struct Bin {
    /// Tokens.
    pub count: u32,
    /// Their mass.
    pub mass: u64,
}

impl Bin {
    /// Both together.
    #[inline(always)]
    pub fn and(self, other: Self) -> Self {
        Self { count: self.count + other.count, mass: self.mass + other.mass }
    }

    /// What positions count.
    #[inline(always)]
    pub fn len(self, by_mass: bool) -> u64 {
        if by_mass { self.mass } else { self.count as u64 }
    }
}

/// A bin that has a position.
#[derive(Clone, Copy)]
pub struct Found {
    /// Its number.
    pub bin: u32,
    /// What is in the bins above it.
    pub above: Bin,
}

impl Found {
    /// A bin within this one, of a histogram of the next `bits` bits.
    #[inline(always)]
    pub fn and(self, next: Self, bits: u32) -> Self {
        Self { bin: self.bin << bits | next.bin, above: self.above.and(next.above) }
    }
}

/// Chunks in which there is anything: of each lane a bit for each of its `EACH` chunks.
#[derive(Clone, Copy)]
pub struct Occupied<const EACH: u32> {
    chunks: u32,
    /// Of this lane and those below.
    upto: u32,
}

impl<const EACH: u32> Occupied<EACH> {
    /// From the bits of this lane. By one warp.
    #[inline(always)]
    #[track_caller]
    pub fn new(chunks: u32) -> Self {
        Self { chunks, upto: warp::scan(chunks.count_ones(), |a, b| a + b) }
    }

    /// How many there are.
    #[inline(always)]
    #[track_caller]
    pub fn count(self) -> u32 {
        warp::shfl_idx(self.upto, 31)
    }

    /// The number of chunk `n` of them, in ascending order.
    #[inline(always)]
    #[track_caller]
    pub fn get(self, n: u32) -> u32 {
        let lane = warp::warp_vote_ballot(warp::FULL, n < self.upto).trailing_zeros();
        let before = warp::shfl_idx(self.upto - self.chunks.count_ones(), lane);
        let (chunks, own) = (warp::shfl_idx(self.chunks, lane), warp::lane_id());
        let is_it = chunks >> own & 1 != 0 && (chunks & ((1 << own) - 1)).count_ones() == n - before;
        lane * EACH + warp::warp_vote_ballot(warp::FULL, is_it).trailing_zeros()
    }
}

/// Sums of the chunks in which there is anything, in the shared memory of the first block.
#[derive(Clone, Copy)]
pub struct Totals {
    /// Of each chunk: tokens, and the two words of their mass; then the same of it and those above it in its group of 32, highest first.
    words: [Shared<u32>; 3],
    /// Of each group, the same.
    groups: [Shared<u32>; 3],
}

/// Bytes of it for so many chunks.
pub const fn bytes(chunks: u32) -> usize {
    3 * 4 * (chunks as usize + 32)
}

impl Totals {
    /// For up to `chunks` chunks, a multiple of four.
    #[inline(always)]
    pub unsafe fn new(carver: &mut Carver, chunks: u32) -> Self {
        let mut take = |len: usize| [carver.take(len), carver.take(len), carver.take(len)];
        Self { words: take(chunks as usize), groups: take(32) }
    }

    /// Leaves the sum of the bins of chunk `n` of those that are occupied in the first block; each lane has two. By one warp of the cluster for each.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn put(&self, n: u32, bins: [Bin; 2]) {
        let own = bins[0].and(bins[1]);
        let (count, mass) = (warp::warp_reduce_add_u32(warp::FULL, own.count), warp_sum(own.mass));
        let words = [count, mass as u32, (mass >> 32) as u32];
        let lane = warp::lane_id();
        unroll::<3>(|i| {
            if lane == i as u32 {
                cluster::store_u32(cluster::map(self.words[i].ptr(n), 0), words[i]);
            }
        });
    }

    /// Adds the `n` chunks up by groups of 32, which each warp has one of. By all threads of the first block, once all have been put; a barrier follows.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn add_up(&self, n: u32) {
        let (lane, group) = (own_index() % 32, own_index() / 32);
        let i = group * 32 + lane;
        if group * 32 < n {
            let own = if i < n { get(self.words, n - 1 - i) } else { Bin::default() };
            let upto = scan(own);
            // Where it was, in the opposite order.
            if i < n {
                set(self.words, n - 1 - i, upto);
            }
            if lane == 31 {
                set(self.groups, group, upto);
            }
        } else if lane == 0 {
            set(self.groups, group, Bin::default());
        }
    }

    /// Entry `i` of `n` of a group, highest first: that chunk and those above it in the group. After [`add_up`](Self::add_up) and a barrier.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn upto(&self, n: u32, i: u32) -> Bin {
        get(self.words, n - 1 - i)
    }

    /// All tokens, after [`add_up`](Self::add_up) and a barrier.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn total(&self) -> u32 {
        warp::warp_reduce_add_u32(warp::FULL, self.groups[0].get(own_index() % 32))
    }

    /// What the groups up to that of this lane have together. By one warp, after [`add_up`](Self::add_up) and a barrier.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn groups(&self) -> Bin {
        scan(get(self.groups, own_index() % 32))
    }

    /// The bin at `position` in descending order of bins, positions counting tokens or mass; `None` behind the last. `chunk` has the number of the n-th
    /// of `len` chunks; `bins` has two bins of a chunk for each lane, the higher one first. `groups` are [those](Self::groups) of this lane.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn find(
        &self,
        len: u32,
        groups: Bin,
        position: u64,
        by_mass: bool,
        chunk: impl Fn(u32) -> u32,
        bins: impl Fn(u32) -> [Bin; 2],
    ) -> Option<Found> {
        let lane = own_index() % 32;
        let there = warp::warp_vote_ballot(warp::FULL, position < groups.len(by_mass));
        if there == 0 {
            return None;
        }
        let group = there.trailing_zeros();
        let before = if group > 0 { from_lane(groups, group - 1) } else { Bin::default() };
        let i = group * 32 + lane;
        let own = before.and(get(self.words, len - 1 - if i < len { i } else { len - 1 }));
        let place = warp::warp_vote_ballot(warp::FULL, position < own.len(by_mass)).trailing_zeros();
        let before = if place > 0 { from_lane(own, place - 1) } else { before };
        let chunk = chunk(len - 1 - (group * 32 + place));
        Some(find_in(chunk, before, bins(chunk), position, by_mass))
    }
}

/// The bin at `position`, which is in this chunk; `before` is in those above it.
#[inline(always)]
#[track_caller]
pub fn find_in(chunk: u32, before: Bin, own: [Bin; 2], position: u64, by_mass: bool) -> Found {
    let both = own[0].and(own[1]);
    let upto = before.and(scan(both));
    let at = warp::warp_vote_ballot(warp::FULL, position < upto.len(by_mass)).trailing_zeros();
    let mut above = Bin { count: upto.count - both.count, mass: upto.mass - both.mass };
    let mut bin = chunk * CHUNK + CHUNK - 1 - 2 * warp::lane_id();
    if position >= above.and(own[0]).len(by_mass) {
        above = above.and(own[0]);
        bin -= 1;
    }
    Found { bin: warp::shfl_idx(bin, at), above: from_lane(above, at) }
}

/// A bin by words.
#[inline(always)]
#[track_caller]
pub unsafe fn get(words: [Shared<u32>; 3], i: u32) -> Bin {
    let [count, low, high] = words.map(|w| w.get(i));
    Bin { count, mass: low as u64 | (high as u64) << 32 }
}

/// Leaves a bin by words.
#[inline(always)]
#[track_caller]
pub unsafe fn set(words: [Shared<u32>; 3], i: u32, bin: Bin) {
    words[0].set(i, bin.count);
    words[1].set(i, bin.mass as u32);
    words[2].set(i, (bin.mass >> 32) as u32);
}

/// Sums of this lane and those below it.
#[inline(always)]
#[track_caller]
pub fn scan(own: Bin) -> Bin {
    Bin { count: warp::scan(own.count, |a, b| a + b), mass: warp::scan(own.mass, |a, b| a + b) }
}

/// The value of a lane.
#[inline(always)]
#[track_caller]
pub fn from_lane(own: Bin, lane: u32) -> Bin {
    Bin { count: warp::shfl_idx(own.count, lane), mass: warp::shfl_idx(own.mass, lane) }
}

/// The sum over the warp: by parts that do not overflow, each in one instruction.
#[inline(always)]
#[track_caller]
pub fn warp_sum(own: u64) -> u64 {
    const BITS: u32 = 24;
    let mut sum = 0;
    unroll::<3>(|i| {
        let part = (own >> (BITS * i as u32)) as u32 & ((1 << BITS) - 1);
        sum += (warp::warp_reduce_add_u32(warp::FULL, part) as u64) << (BITS * i as u32);
    });
    sum
}
