//! Which token goes to which rank, and where in the order of those.
//!
//! A token goes once to every rank that has one of its experts: rank `r` has the experts `r per_rank ..`. Tokens of a rank
//! for another keep their order, so a token's place is the number of tokens before it that go there too. Each warp counts a run of
//! tokens, 32 at a time: a vote for each rank, whose count lane `r` keeps. The warps' counts, added up in shared memory, say what
//! comes before a run, and within it votes say it again. Every block of a launch does this for all tokens: they fit in
//! the cache, and a barrier among blocks would take longer. (With a run of tokens for each thread, every load touched 32 cache lines, and a
//! dispatch of 4096 tokens took some 10 µs longer on an H200.)

use super::{Link, MAX_RANKS, fault, phase};
use cuda_std::integer::Divisor;
use cuda_std::shared::{Carver, Shared};
use cuda_std::vec::B128;
use cuda_std::{Global, GlobalMut, entries, integer, thread, unroll, warp};

/// The most tokens of a call: a block remembers a byte of each.
pub const MAX_TOKENS: usize = 1 << 16;
/// Threads of a block of `ep_layout`.
pub const THREADS: usize = 512;
/// The most warps of a block.
const WARPS: usize = 32;
/// Times 32 tokens that a warp looks at together.
const STEPS: usize = 4;
/// The most experts of all ranks; see [`RankOf`].
pub const MAX_EXPERTS: usize = 1 << 15;

/// Dynamic shared memory of [`scan`].
pub const fn scan_bytes(tokens: u32) -> u32 {
    let tokens = match tokens.checked_next_multiple_of(16) {
        Some(tokens) => tokens,
        None => u32::MAX,
    };
    tokens.saturating_add(((WARPS + 1) * MAX_RANKS * 4) as u32)
}

/// Expert ids of tokens.
#[derive(Clone, Copy)]
pub struct Routes {
    /// `[tokens, top_k]`; -1 for none.
    pub ids: Global<i32>,
    /// Rows.
    pub tokens: u32,
    /// At most 32.
    pub top_k: u32,
    /// Experts of a rank.
    pub per_rank: Divisor,
    /// Ranks.
    pub ranks: u32,
}

impl Routes {
    /// How to find the rank of an expert.
    #[inline(always)]
    pub unsafe fn divide(&self) -> RankOf {
        let experts = self.per_rank.get() * self.ranks;
        RankOf { experts, multiplier: integer::div(u32::MAX, 2 * self.per_rank.get()) + 1 }
    }
}

/// The rank of an expert by one multiplication: `e / n = (2 e + 1) / (2 n)`, which `(2 e + 1) m >> 32` with
/// `m = 2^32 / (2 n) + 1`, rounded down, is as long as `(2 e + 1) (2 n) < 2^32`: with at most [`MAX_EXPERTS`].
#[derive(Clone, Copy)]
pub struct RankOf {
    experts: u32,
    multiplier: u32,
}

impl RankOf {
    /// The rank as a mask, nothing if there is none.
    #[inline(always)]
    pub fn bit(self, id: i32) -> u32 {
        let rank = integer::mul_hi((id as u32).wrapping_mul(2).wrapping_add(1), self.multiplier);
        if (id as u32) < self.experts { 1u32.wrapping_shl(rank) } else { 0 }
    }

    /// Whether there is such an expert, or it is -1 for none.
    #[inline(always)]
    pub fn is_fine(self, id: i32) -> bool {
        id.wrapping_add(1) as u32 <= self.experts
    }
}

/// A warp's run of tokens.
#[derive(Clone, Copy)]
pub struct Run {
    /// The first token.
    pub first: u32,
    /// One past the last.
    pub last: u32,
    /// Lane `r`: tokens before the first that go to rank `r`.
    before: u32,
    /// `[MAX_RANKS]`: all tokens, by rank.
    pub totals: Shared<u32>,
    masks: Shared<u8>,
    ranks: u32,
    /// Whether all experts that the thread has seen are there; otherwise the fault says which are not.
    pub ok: bool,
}

/// Counts all tokens. Every thread of the block takes part; shared memory: [`scan_bytes`]. `mark`: of a fault.
#[inline(always)]
#[track_caller]
pub unsafe fn scan(routes: Routes, link: &Link, mark: u32, carver: &mut Carver) -> Run {
    let counts = carver.take::<u32>(MAX_RANKS * WARPS);
    let totals = carver.take::<u32>(MAX_RANKS);
    let masks = carver.take::<u8>(routes.tokens as usize);
    let (warps, warp, lane) = (thread::block_dim_x() / 32, thread::thread_idx_x() / 32, warp::lane_id());
    let each = integer::div(routes.tokens + warps - 1, warps).next_multiple_of(32);
    let first = (warp * each).min(routes.tokens);
    let last = (first + each).min(routes.tokens);
    let rank_of = routes.divide();
    let eight = routes.top_k == 8 && (routes.ids.ptr(0usize) as usize).is_multiple_of(16);
    let (mut own, mut bad) = (0, None);
    let mut step = first;
    while step < last {
        // What is loaded for several steps is loaded at once. Beyond the last token it is the last once more.
        let mut masks_of = [0; STEPS];
        if eight {
            let mut ids = [[0; 4]; 2 * STEPS];
            unroll::<STEPS>(|j| {
                let token = (step + 32 * j as u32 + lane).min(last - 1);
                unroll::<2>(|h| {
                    let B128(four) = routes.ids.get_as::<B128<i32, 4>>(token as usize * 8 + 4 * h);
                    unroll::<4>(|i| ids[2 * j + h][i] = four[i]);
                });
            });
            unroll::<STEPS>(|j| {
                let mut fine = true;
                unroll::<8>(|i| {
                    let id: i32 = ids[2 * j + i / 4][i % 4];
                    masks_of[j] |= rank_of.bit(id);
                    fine &= rank_of.is_fine(id);
                });
                if !fine {
                    bad = Some((step + 32 * j as u32 + lane).min(last - 1));
                }
            });
        } else {
            unroll::<STEPS>(|j| {
                let token = (step + 32 * j as u32 + lane).min(last - 1);
                let row = routes.ids.offset(token as usize * routes.top_k as usize);
                for k in 0..routes.top_k {
                    let id = row.get(k);
                    masks_of[j] |= rank_of.bit(id);
                    if !rank_of.is_fine(id) {
                        bad = Some(token);
                    }
                }
            });
        }
        unroll::<STEPS>(|j| {
            let token = step + 32 * j as u32 + lane;
            let mask = if token < last { masks_of[j] } else { 0 };
            if token < last {
                masks.set(token, mask as u8);
            }
            for d in 0..link.ranks {
                let there = warp::warp_vote_ballot(warp::FULL, mask >> d & 1 != 0).count_ones();
                own += if lane == d { there } else { 0 };
            }
        });
        step += const { 32 * STEPS as u32 };
    }
    if let Some(token) = bad {
        link.fail(mark, fault::BAD_ID, link.rank, phase::WORK, token);
    }
    if lane < MAX_RANKS as u32 {
        counts.set(lane * WARPS as u32 + warp, own);
    }
    thread::sync_threads();
    // Lane `w` has what warp `w` counted; what is kept is lane `r`'s.
    let (mut before, mut all) = (0, 0);
    for d in 0..link.ranks {
        let n = if lane < warps { counts.get(d * WARPS as u32 + lane) } else { 0 };
        let total = warp::warp_reduce_add_u32(warp::FULL, n);
        let earlier = warp::warp_reduce_add_u32(warp::FULL, if lane < warp { n } else { 0 });
        before = if lane == d { earlier } else { before };
        all = if lane == d { total } else { all };
    }
    if warp == 0 && lane < MAX_RANKS as u32 {
        totals.set(lane, all);
    }
    thread::sync_threads();
    Run { first, last, before, totals, masks, ranks: link.ranks, ok: bad.is_none() }
}

impl Run {
    /// For every token of the run within `from .. to` and every rank: `f(token, rank, place)`, where places begin at lane `rank`'s
    /// `base`, and are -1 if the token does not go there. All lanes take part.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn places(&self, base: u32, from: u32, to: u32, mut f: impl FnMut(u32, u32, i32)) {
        if from >= self.last || to <= self.first {
            return;
        }
        let lane = warp::lane_id();
        let below = (1u32 << lane) - 1;
        let mut count = base + self.before;
        let mut step = self.first;
        while step < self.last.min(to) {
            let token = step + lane;
            let mask = if token < self.last { self.masks.get(token) as u32 } else { 0 };
            for d in 0..self.ranks {
                let there = warp::warp_vote_ballot(warp::FULL, mask >> d & 1 != 0);
                let place = warp::shfl_idx(count, d) + (there & below).count_ones();
                if token >= from && token < self.last.min(to) {
                    f(token, d, if mask >> d & 1 != 0 { place as i32 } else { -1 });
                }
                count += if lane == d { there.count_ones() } else { 0 };
            }
            step += 32;
        }
    }
}

/// `places`: `[tokens, ranks]`, the place among the tokens for that rank or -1; `per_rank_tokens`: `[ranks]`; `per_expert`:
/// `[ranks per_rank]`, tokens of each expert; `in_rank`: `[tokens, ranks]`, 0 or 1. All but `places` may be null. `ids`: as
/// [`Routes`]. A grid of any number of blocks of up to 1024 threads; shared memory: [`scan_bytes`] and 4 bytes for each expert.
#[inline(always)]
pub unsafe fn layout(
    link: Link,
    places: *mut i32,
    per_rank_tokens: *mut u32,
    per_expert: *mut u32,
    in_rank: *mut u8,
    ids: *const i32,
    tokens: u32,
    top_k: u32,
    per_rank: Divisor,
) {
    let mut carver = Carver::new();
    let ranks = link.ranks;
    let routes = Routes { ids: Global::new(ids), tokens, top_k, per_rank, ranks };
    let run = scan(routes, &link, fault::ALONE, &mut carver);
    let (block, blocks, tid) = (thread::block_idx_x(), thread::grid_dim_x(), thread::thread_idx_x());
    let (places, in_rank) = (GlobalMut::new(places), GlobalMut::new(in_rank));
    // Each block writes a part: all of them know everything.
    let part = integer::div(tokens + blocks - 1, blocks);
    run.places(0, block * part, (block + 1) * part, |token, d, place| {
        let at = token as usize * ranks as usize + d as usize;
        places.set(at, place);
        if !in_rank.ptr(0usize).is_null() {
            in_rank.set(at, (place >= 0) as u8);
        }
    });
    if block != 0 {
        return;
    }
    if !per_rank_tokens.is_null() && tid < ranks {
        GlobalMut::new(per_rank_tokens).set(tid, run.totals.get(tid));
    }
    if per_expert.is_null() {
        return;
    }
    let experts = ranks * per_rank.get();
    let histogram = carver.take::<u32>(experts as usize);
    let threads = thread::block_dim_x();
    let mut e = tid;
    while e < experts {
        histogram.set(e, 0);
        e += threads;
    }
    thread::sync_threads();
    let mut i = tid;
    while i < tokens * top_k {
        let id = routes.ids.get(i);
        // An expert that a token has twice counts once.
        let mut again = false;
        let start = i - integer::rem(i, top_k);
        for j in start..i {
            again |= routes.ids.get(j) == id;
        }
        if (id as u32) < experts && !again {
            histogram.fetch_add(id, 1, cuda_std::atomic::Block, cuda_std::atomic::Relaxed);
        }
        i += threads;
    }
    thread::sync_threads();
    let mut e = tid;
    while e < experts {
        GlobalMut::new(per_expert).set(e, histogram.get(e));
        e += threads;
    }
}

entries! {
    /// Arguments of `ep_layout`; see [`layout`].
    pub struct Args(
        link: Link, places: *mut i32, per_rank_tokens: *mut u32, per_expert: *mut u32, in_rank: *mut u8, ids: *const i32,
        tokens: u32, top_k: u32, per_rank: Divisor,
    );
    ep_layout {} [512, 2] => layout;
}
