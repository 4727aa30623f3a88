//! Which token goes to which rank, and where in the order of those.
//!
//! A token goes once to every rank that has one of its experts: rank `r` has the experts `r per_rank ..`. Tokens of a rank
//! for another keep their order, so a token's place is the number of tokens before it that go there too. Each thread counts a
//! run of tokens, a block-wide scan of the counts (eight of 16 bits in two words) says what comes before the run, and the
//! thread goes through its run again. Every block of a launch does this for all tokens: they fit in the cache, and a
//! barrier among blocks would take longer.

use super::{Link, MAX_RANKS, fault, phase};
use cuda_std::shared::{Carver, Shared};
use cuda_std::{Global, GlobalMut, entries, integer, thread, unroll, warp};

/// The most tokens of a call: counts have 16 bits.
pub const MAX_TOKENS: usize = u16::MAX as usize;
/// Threads of a block of `ep_layout`.
pub const THREADS: usize = 512;
/// Dynamic shared memory of [`scan`].
pub const SCAN_BYTES: usize = 2 * 32 * 8;

/// Expert ids of tokens.
#[derive(Clone, Copy)]
pub struct Routes {
    /// `[tokens, top_k]`; negative for none.
    pub ids: Global<i32>,
    /// Rows.
    pub tokens: u32,
    /// At most 32.
    pub top_k: u32,
    /// Experts of a rank; not 0.
    pub per_rank: u32,
    /// Ranks.
    pub ranks: u32,
}

impl Routes {
    /// The ranks of a token as a mask, and whether all its experts are there.
    #[inline(always)]
    pub unsafe fn mask(&self, token: u32) -> (u32, bool) {
        let (mut mask, mut ok) = (0, true);
        for k in 0..self.top_k {
            let id = self.ids.get(token as usize * self.top_k as usize + k as usize);
            let (bit, fine) = self.bit(id);
            mask |= bit;
            ok &= fine;
        }
        (mask, ok)
    }

    /// The rank of an expert as a mask, nothing if there is none, and whether that is right.
    #[inline(always)]
    pub unsafe fn bit(&self, id: i32) -> (u32, bool) {
        let rank = integer::div(id as u32, self.per_rank);
        if id < 0 {
            (0, id == -1)
        } else if rank < self.ranks {
            (1 << rank, true)
        } else {
            (0, false)
        }
    }
}

/// Counts by rank, 16 bits each.
#[derive(Clone, Copy, Default)]
pub struct Counts {
    lo: u64,
    hi: u64,
}

impl Counts {
    /// Counts a token that goes to these ranks.
    #[inline(always)]
    pub fn add(&mut self, mask: u32) {
        // One bit of each of four to the lowest of its 16.
        let spread = |m: u64| (m & 1) | (m & 2) << 15 | (m & 4) << 30 | (m & 8) << 45;
        self.lo += spread((mask & 15) as u64);
        self.hi += spread((mask >> 4) as u64);
    }

    /// Tokens for a rank.
    #[inline(always)]
    pub fn of(&self, rank: u32) -> u32 {
        let word = if rank < 4 { self.lo } else { self.hi };
        (word >> (16 * (rank & 3)) & 0xffff) as u32
    }

    #[inline(always)]
    fn plus(self, other: Self) -> Self {
        Self { lo: self.lo + other.lo, hi: self.hi + other.hi }
    }
}

/// A thread's run of tokens.
#[derive(Clone, Copy)]
pub struct Run {
    /// The first token.
    pub first: u32,
    /// One past the last.
    pub last: u32,
    /// What comes before the first.
    pub before: Counts,
    /// All tokens.
    pub total: Counts,
    /// Whether all experts of the run are there; otherwise the fault says which are not.
    pub ok: bool,
}

/// Counts all tokens. Every thread of the block takes part; `scratch` is [`SCAN_BYTES`].
#[inline(always)]
#[track_caller]
pub unsafe fn scan(routes: Routes, link: &Link, scratch: Shared<u64>) -> Run {
    let (tid, threads) = (thread::thread_idx_x(), thread::block_dim_x());
    let each = integer::div(routes.tokens + threads - 1, threads);
    let first = (tid * each).min(routes.tokens);
    let last = (first + each).min(routes.tokens);
    let mut own = Counts::default();
    let mut ok = true;
    for token in first..last {
        let (mask, fine) = routes.mask(token);
        if !fine {
            link.fail(fault::BAD_ID, link.rank, phase::WORK, token);
            ok = false;
        }
        own.add(mask);
    }
    let upto = Counts { lo: warp::scan(own.lo, |a, b| a + b), hi: warp::scan(own.hi, |a, b| a + b) };
    let (warp, lane) = (tid / 32, warp::lane_id());
    if lane == 31 {
        scratch.set(2 * warp, upto.lo);
        scratch.set(2 * warp + 1, upto.hi);
    }
    thread::sync_threads();
    let (mut before, mut total) = (Counts::default(), Counts::default());
    for w in 0..threads / 32 {
        if w == warp {
            before = total;
        }
        total = total.plus(Counts { lo: scratch.get(2 * w), hi: scratch.get(2 * w + 1) });
    }
    before = before.plus(Counts { lo: upto.lo - own.lo, hi: upto.hi - own.hi });
    Run { first, last, before, total, ok }
}

/// `places`: `[tokens, ranks]`, the place among the tokens for that rank or -1; `per_rank_tokens`: `[ranks]`; `per_expert`:
/// `[ranks per_rank]`, tokens of each expert; `in_rank`: `[tokens, ranks]`, 0 or 1. All but `places` may be null. `ids`: as
/// [`Routes`]. A grid of any number of blocks of up to 1024 threads; shared memory: [`SCAN_BYTES`] and 4 bytes for each expert.
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
    per_rank: u32,
) {
    let mut carver = Carver::new();
    let scratch = carver.take::<u64>(SCAN_BYTES / 8);
    let ranks = link.ranks;
    let routes = Routes { ids: Global::new(ids), tokens, top_k, per_rank, ranks };
    let run = scan(routes, &link, scratch);
    let (block, blocks, tid) = (thread::block_idx_x(), thread::grid_dim_x(), thread::thread_idx_x());
    let (places, in_rank) = (GlobalMut::new(places), GlobalMut::new(in_rank));
    let mut counts = run.before;
    for token in run.first..run.last {
        let (mask, _) = routes.mask(token);
        // Blocks take turns: all of them know everything.
        if integer::rem(token, blocks) == block {
            for d in 0..ranks {
                let at = token as usize * ranks as usize + d as usize;
                let there = mask >> d & 1 != 0;
                places.set(at, if there { counts.of(d) as i32 } else { -1 });
                if !in_rank.ptr(0usize).is_null() {
                    in_rank.set(at, there as u8);
                }
            }
        }
        counts.add(mask);
    }
    if block != 0 {
        return;
    }
    if !per_rank_tokens.is_null() && tid < ranks {
        GlobalMut::new(per_rank_tokens).set(tid, run.total.of(tid));
    }
    if per_expert.is_null() {
        return;
    }
    let experts = ranks * per_rank;
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

/// The counts as an array.
#[inline(always)]
pub fn by_rank(counts: Counts) -> [u32; MAX_RANKS] {
    let mut out = [0; MAX_RANKS];
    unroll::<MAX_RANKS>(|r| out[r] = counts.of(r as u32));
    out
}

entries! {
    /// Arguments of `ep_layout`; see [`layout`].
    pub struct Args(
        link: Link, places: *mut i32, per_rank_tokens: *mut u32, per_expert: *mut u32, in_rank: *mut u8, ids: *const i32,
        tokens: u32, top_k: u32, per_rank: u32,
    );
    ep_layout {} [512] => layout;
}
