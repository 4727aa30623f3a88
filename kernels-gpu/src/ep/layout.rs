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
use cuda_std::{Global, GlobalMut, entries, integer, thread, warp};

/// The most tokens of a call: a block remembers a byte of each.
pub const MAX_TOKENS: usize = 1 << 16;
/// Threads of a block of `ep_layout`.
pub const THREADS: usize = 512;
/// The most warps of a block.
const WARPS: usize = 32;

/// Dynamic shared memory of [`scan`].
pub const fn scan_bytes(tokens: u32) -> u32 {
    ((WARPS + 1) * MAX_RANKS * 4) as u32 + tokens.next_multiple_of(16)
}

/// Expert ids of tokens.
#[derive(Clone, Copy)]
pub struct Routes {
    /// `[tokens, top_k]`; negative for none.
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
    /// The ranks of a token as a mask, and whether all its experts are there.
    #[inline(always)]
    #[track_caller]
    unsafe fn mask(&self, token: u32) -> (u32, bool) {
        let (mut mask, mut ok) = (0, true);
        let row = self.ids.offset(token as usize * self.top_k as usize);
        let mut add = |id: i32| {
            let (bit, fine) = self.bit(id);
            mask |= bit;
            ok &= fine;
        };
        if self.top_k.is_multiple_of(4) && (self.ids.ptr(0usize) as usize).is_multiple_of(16) {
            for k in 0..self.top_k / 4 {
                let B128([a, b, c, d]) = row.get_as::<B128<i32, 4>>(4 * k);
                add(a);
                add(b);
                add(c);
                add(d);
            }
        } else {
            for k in 0..self.top_k {
                add(row.get(k));
            }
        }
        (mask, ok)
    }

    /// The rank of an expert as a mask, nothing if there is none, and whether that is right.
    #[inline(always)]
    pub fn bit(&self, id: i32) -> (u32, bool) {
        let rank = self.per_rank.div(id as u32);
        if id < 0 {
            (0, id == -1)
        } else if rank < self.ranks {
            (1 << rank, true)
        } else {
            (0, false)
        }
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

/// Counts all tokens. Every thread of the block takes part; shared memory: [`scan_bytes`].
#[inline(always)]
#[track_caller]
pub unsafe fn scan(routes: Routes, link: &Link, carver: &mut Carver) -> Run {
    let counts = carver.take::<u32>(WARPS * MAX_RANKS);
    let totals = carver.take::<u32>(MAX_RANKS);
    let masks = carver.take::<u8>(routes.tokens as usize);
    let (warps, warp, lane) = (thread::block_dim_x() / 32, thread::thread_idx_x() / 32, warp::lane_id());
    let each = integer::div(routes.tokens + warps - 1, warps).next_multiple_of(32);
    let first = (warp * each).min(routes.tokens);
    let last = (first + each).min(routes.tokens);
    let (mut own, mut ok) = (0, true);
    let mut step = first;
    while step < last {
        let token = step + lane;
        let mut mask = 0;
        if token < last {
            let (to, fine) = routes.mask(token);
            mask = to;
            masks.set(token, to as u8);
            if !fine {
                link.fail(fault::BAD_ID, link.rank, phase::WORK, token);
                ok = false;
            }
        }
        for d in 0..link.ranks {
            let there = warp::warp_vote_ballot(warp::FULL, mask >> d & 1 != 0).count_ones();
            own += if lane == d { there } else { 0 };
        }
        step += 32;
    }
    if lane < MAX_RANKS as u32 {
        counts.set(warp * MAX_RANKS as u32 + lane, own);
    }
    thread::sync_threads();
    let (mut before, mut all) = (0, 0);
    if lane < MAX_RANKS as u32 {
        for w in 0..warps {
            before = if w == warp { all } else { before };
            all += counts.get(w * MAX_RANKS as u32 + lane);
        }
        if warp == 0 {
            totals.set(lane, all);
        }
    }
    thread::sync_threads();
    Run { first, last, before, totals, masks, ranks: link.ranks, ok }
}

impl Run {
    /// For every token of the run within `from .. to` and every rank: `f(token, rank, place)`, where the place is -1 if the token
    /// does not go there. All lanes take part.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn places(&self, from: u32, to: u32, mut f: impl FnMut(u32, u32, i32)) {
        if from >= self.last || to <= self.first {
            return;
        }
        let lane = warp::lane_id();
        let below = (1u32 << lane) - 1;
        let mut count = self.before;
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
    let run = scan(routes, &link, &mut carver);
    let (block, blocks, tid) = (thread::block_idx_x(), thread::grid_dim_x(), thread::thread_idx_x());
    let (places, in_rank) = (GlobalMut::new(places), GlobalMut::new(in_rank));
    // Each block writes a part: all of them know everything.
    let part = integer::div(tokens + blocks - 1, blocks);
    run.places(block * part, (block + 1) * part, |token, d, place| {
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
    ep_layout {} [512] => layout;
}
