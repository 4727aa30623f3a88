//! Samples one token a row whatever the number of tokens it keeps, in one launch: the search of [`super::radix`], by a cluster of blocks for each row,
//! which see each other's histograms.
//!
//! Logits of 16 bits ([`radix_cluster_short`](super::radix_cluster_short)) have 65536 keys at most, few enough for a bin each. So blocks count their logits in shared memory, which needs neither the largest
//! logit nor an exponential, and only then is a weight computed for each key that occurs. That one histogram has the answer to everything: top-k,
//! top-p and the draw are searched one after another by a warp of the first block. What is left is to find the token among those of its key:
//! the block is known from the counts, and reads its part once more.
//!
//! Of f32 ([`radix_cluster_long`](super::radix_cluster_long)) the same counters take the leading 16 bits. They tell where each answer can be, mostly among a few hundred tokens, which blocks list in a second pass, and
//! the first block goes on with those alone.
//!
//! Kernels with `BEHIND` follow `top_k_top_p` in the same call, which has waited for what wrote the logits, and writes nothing that is read here but the best of a row. So
//! they wait for it only before they write: both work at the same time.

use super::job::{Job, LogProbs, Settings};
use super::part::MAX_BLOCKS;
use super::radix_cluster_long::long;
use super::radix_cluster_short::short;
use super::top_k::MAX_K;
use super::top_k_top_p::{write_log_probs, write_top};
use super::totals::{Bin, Found, warp_sum};
use super::weights::{key_of, scaled, scaled_up};
use cuda_std::{Global, GlobalMut, Shared, cluster, dependent_launch, entries, unroll, warp};

/// The same word of the shared memory of each block; 0 for those that the cluster has not. All loads are under way before the first is waited for.
#[inline(always)]
#[track_caller]
pub(super) unsafe fn of_blocks(blocks: u32, word: *const u32) -> [u32; MAX_BLOCKS as usize] {
    let mut words = [0; MAX_BLOCKS as usize];
    unroll::<{ MAX_BLOCKS as usize }>(|b| {
        if (b as u32) < blocks {
            words[b] = cluster::load_u32(cluster::map(word, b as u32));
        }
    });
    words
}

/// What was drawn.
#[derive(Clone, Copy)]
pub(super) struct Drawn {
    /// The key.
    pub bin: u32,
    /// Place among the tokens of that key.
    pub among: u32,
    /// What top-k and top-p keep.
    pub kept: Bin,
}

/// The way from top-k by top-p to the draw.
pub(super) struct Search {
    goal: u32,
    /// What is kept so far.
    kept: Bin,
    /// Where the goal is.
    position: u64,
}

/// Goals, in this order.
pub(super) const TOP_K: u32 = 0;
pub(super) const TOP_P: u32 = 1;
pub(super) const DRAW: u32 = 2;

impl Search {
    /// Among `total` tokens above -inf.
    #[inline(always)]
    pub(super) fn new(job: &Job, settings: &Settings, total: Bin) -> Self {
        Self { goal: if settings.k < job.vocab { TOP_K } else { TOP_P }, kept: total, position: 0 }
    }

    /// Among nothing.
    #[inline(always)]
    pub(super) fn nothing() -> Self {
        Self { goal: TOP_K, kept: Bin { count: 0, mass: 0 }, position: 0 }
    }

    /// Of the position that is to be found.
    #[inline(always)]
    pub(super) fn goal(&self) -> u32 {
        self.goal
    }

    /// The position that is to be found next, and whether it counts mass.
    #[inline(always)]
    pub(super) fn next(&mut self, settings: &Settings, random: u32) -> (u64, bool) {
        if self.goal == TOP_P && settings.top_p.is_none() {
            self.goal = DRAW;
        }
        self.position = match self.goal {
            TOP_K => settings.k as u64 - 1,
            TOP_P => scaled_up(self.kept.mass, settings.top_p.unwrap_or(0)).max(1) - 1,
            _ => scaled(self.kept.mass, random),
        };
        (self.position, self.goal != TOP_K)
    }

    /// Goes on from a key at the position, which has this weight; what was drawn if that was the last. `None` if there are not so many tokens, which is
    /// never the case where positions count mass.
    #[inline(always)]
    pub(super) unsafe fn reached(&mut self, settings: &Settings, found: Option<(Found, u64)>) -> Option<Drawn> {
        if let Some((found, weight)) = found {
            let weight = if weight < settings.least { 0 } else { weight };
            let among = if self.goal == TOP_K {
                self.position as u32 - found.above.count
            } else {
                // Something of weight 0 is never at a position of mass.
                core::hint::assert_unchecked(weight != 0);
                let before = self.position - found.above.mass;
                // Mostly the first.
                if before < weight { 0 } else { (before / weight) as u32 }
            };
            if self.goal == DRAW {
                return Some(Drawn { bin: found.bin, among, kept: self.kept });
            }
            self.kept = found.above.and(Bin { count: among + 1, mass: (among as u64 + 1) * weight });
        }
        self.goal += 1;
        None
    }
}

/// Leaves the sum of what the lanes have in place `i` of `sums` in the first block.
#[inline(always)]
#[track_caller]
pub(super) unsafe fn leave_sum(sums: Shared<u32>, i: u32, own: u64) {
    let (sum, lane) = (warp_sum(own), warp::lane_id());
    if lane < 2 {
        cluster::store_u32(cluster::map(sums.ptr(2 * i + lane), 0), (sum >> (32 * lane)) as u32);
    }
}

/// The sum of the first `n` places. By one warp of the first block.
#[inline(always)]
#[track_caller]
pub(super) unsafe fn sum_of(sums: Shared<u32>, n: u32) -> u64 {
    let mut sum = 0;
    let mut i = warp::lane_id();
    while i < n {
        sum += sums.get(2 * i) as u64 | (sums.get(2 * i + 1) as u64) << 32;
        i += 32;
    }
    warp_sum(sum)
}

/// Writes what does not depend on the place of the token in the row: it has this key, and `kept` tokens are kept. By one warp.
#[inline(always)]
#[track_caller]
pub(super) unsafe fn write_row(job: &Job, row: u32, key: u32, kept: u32, settings: &Settings, probs: &LogProbs) {
    let lane = warp::lane_id();
    if lane == 0 {
        write_log_probs(job, row, key, Some(probs));
    }
    let mut i = lane;
    while i < job.top_n {
        let entry = Global::new(job.best.cast_const()).get(row as usize * MAX_K as usize + i as usize);
        let weight = probs.weights.of(key_of(entry));
        write_top(job, row, i, entry, i < kept && weight > 0 && weight >= settings.least, Some(probs));
        i += 32;
    }
}

/// Writes the outputs of a row without a logit above -inf, but for its token if that is not `0`. By one warp.
#[inline(always)]
#[track_caller]
pub(super) unsafe fn write_nothing(job: &Job, row: u32, token_0: bool) {
    let lane = warp::lane_id();
    if lane == 0 {
        if token_0 {
            GlobalMut::new(job.tokens).set(row, 0);
        }
        write_log_probs(job, row, 0, None);
    }
    let mut i = lane;
    while i < job.top_n {
        write_top(job, row, i, 0, false, None);
        i += 32;
    }
}

/// Waits for the kernels before: at the beginning, or `LATE`, as `BEHIND` says.
#[inline(always)]
pub(super) fn begin_if<const LATE: bool, const BEHIND: bool>() {
    if LATE == BEHIND {
        dependent_launch::begin();
    }
}

entries! {
    pub struct Args<T>(logits: *const T, job: Job);
    sampling_radix_cluster_f32 { type T = f32; } [crate::sampling::part::THREADS, 1; Sm90a] => long::<false>;
    sampling_radix_cluster_f16 { type T = half::f16; } [crate::sampling::part::THREADS; Sm90a] => short::<T, false>;
    sampling_radix_cluster_bf16 { type T = half::bf16; } [crate::sampling::part::THREADS; Sm90a] => short::<T, false>;
    sampling_radix_cluster_behind_f32 { type T = f32; } [crate::sampling::part::THREADS, 1; Sm90a] => long::<true>;
    sampling_radix_cluster_behind_f16 { type T = half::f16; } [crate::sampling::part::THREADS; Sm90a] => short::<T, true>;
    sampling_radix_cluster_behind_bf16 { type T = half::bf16; } [crate::sampling::part::THREADS; Sm90a] => short::<T, true>;
}
