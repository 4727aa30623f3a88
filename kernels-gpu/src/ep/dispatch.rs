//! Tokens to the ranks of their experts: one copy for each rank, stored straight into its memory.
//!
//! What a rank receives is rows of hidden values with, for each, its experts' numbers on that rank (-1 for those of other ranks)
//! and their weights. Two arrangements:
//!
//! * *compact*: the rows of rank 0, then those of rank 1, ..., each in the order of its tokens, without gaps. Where a row goes
//!   follows from how many tokens all ranks send to all, so every rank counts its tokens ([`scan`]), sends its row of counts with
//!   the entry flag, and waits for those of the others. No row is moved twice.
//! * *slots*: token `t` of rank `s` is row `s slots + t`, and rows that nobody sent have no experts. Nothing is known before and
//!   nothing is waited for (unless a rank may still read what came before): for few tokens, where time is latency.
//!
//! Warps take pieces of [`DEPTH`] vectors a lane, loading all of them before the first is stored; each is loaded once and stored
//! to all its ranks. In e4m3, 16 lanes hold the 128 values of a scale.

use super::layout::{Routes, scan, scan_bytes};
use super::{Link, MAX_RANKS, Session, Walk, fault, phase, slot, token_count};
use crate::row::quantise::{Quantised, group_amax, scale_for};
use cuda_std::integer::Divisor;
use cuda_std::shared::{Carver, Shared};
use cuda_std::vec::{B64, B128, Streaming};
use cuda_std::{E4M3, Global, GlobalMut, bf16, entries, float, integer, struct_param, thread, unroll, warp};

/// Vectors of eight values that a lane has under way.
pub const DEPTH: usize = 4;
/// Dynamic shared memory of a block, for so many tokens that are to be counted.
pub const fn shared_bytes(tokens: u32) -> u32 {
    scan_bytes(tokens) + (2 * MAX_RANKS * 4) as u32
}

/// What is sent, and how.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Job {
    /// `[tokens, hidden]`, rows `x_stride` apart.
    pub x: *const bf16,
    /// `[tokens, top_k]` experts of all ranks together.
    pub ids: *const i32,
    /// The same, or null.
    pub weights: *const f32,
    /// How many tokens there are, if not `tokens`; or null.
    pub count: *const u32,
    /// `[max_tokens, ranks]`: each token's row at each rank, or -1. Written, but for `cached`.
    pub places: *mut i32,
    /// `[MAX_RANKS]`: tokens for each rank. Written, but for `cached`. Compact only.
    pub totals: *mut u32,
    /// `[ranks + 1]`: where each rank's rows begin, and the end. Compact only.
    pub offsets: *mut i32,
    /// In elements.
    pub x_stride: usize,
    /// At most `max_tokens`.
    pub tokens: u32,
    /// Slots of a rank.
    pub max_tokens: u32,
    /// Rows that a rank can receive.
    pub capacity: u32,
    /// A multiple of 8, or of 128 in e4m3.
    pub hidden: u32,
    /// At most 32.
    pub top_k: u32,
    /// Experts of a rank.
    pub per_rank: Divisor,
    /// Not 0: `places` and `totals` are those of an earlier call.
    pub cached: u32,
}
struct_param!(Job);

/// The part of a row that a warp moves at once, loaded.
#[derive(Clone, Copy)]
struct Piece {
    vectors: [[u32; 4]; DEPTH],
    /// The vector of the lane's first.
    first: u32,
    /// Vectors of a row.
    count: u32,
}

impl Piece {
    #[inline(always)]
    #[track_caller]
    unsafe fn load(job: &Job, token: u32, piece: u32) -> Self {
        let count = job.hidden / 8;
        let first = piece * (32 * DEPTH as u32) + warp::lane_id();
        let row = Global::new(job.x).offset(token as usize * job.x_stride);
        let mut vectors = [[0; 4]; DEPTH];
        unroll::<DEPTH>(|j| {
            let i = first + 32 * j as u32;
            if i < count {
                let B128(v) = row.get_hinted::<B128<u32, 4>>(i as usize * 8, Streaming);
                unroll::<4>(|w| vectors[j][w] = v[w]);
            }
        });
        Self { vectors, first, count }
    }

    /// In e4m3: the values in the first two words of each vector. Returns the scale that the lane stores: the piece has two for
    /// each vector of a lane, and lane `2 j + h` takes that of half `h` of the warp's `j`-th, so that they go in one store.
    #[inline(always)]
    #[track_caller]
    unsafe fn quantise(&mut self) -> f32 {
        let mut own = 0.0;
        let lane = warp::lane_id();
        unroll::<DEPTH>(|j| {
            let mut v = [0.0; 8];
            unroll::<4>(|w| {
                v[2 * w] = f32::from_bits(self.vectors[j][w] << 16);
                v[2 * w + 1] = f32::from_bits(self.vectors[j][w] & 0xffff_0000);
            });
            let scale = scale_for::<E4M3>(group_amax::<8>(v));
            let factor = float::fast::recip(scale);
            unroll::<8>(|i| v[i] *= factor);
            self.vectors[j][0] = E4M3::four([v[0], v[1], v[2], v[3]]);
            self.vectors[j][1] = E4M3::four([v[4], v[5], v[6], v[7]]);
            let half = warp::shfl_idx(scale, (lane & 1) * 16);
            own = if lane / 2 == j as u32 { half } else { own };
        });
        own
    }

    /// To a row of a rank.
    #[inline(always)]
    #[track_caller]
    unsafe fn store<const QUANTISED: bool>(&self, link: &Link, rank: u32, row: usize, scale: f32) {
        let bytes = if QUANTISED { 8 } else { 16 };
        let to = link.buffer::<u8>(rank, slot::ROWS).offset(row * self.count as usize * bytes);
        let groups = link.buffer::<f32>(rank, slot::SCALES).offset(row * (self.count / 16) as usize);
        if QUANTISED {
            let group = (self.first - self.first % 32) / 16 + warp::lane_id();
            if warp::lane_id() < 2 * DEPTH as u32 && group < self.count / 16 {
                groups.set(group, scale);
            }
        }
        unroll::<DEPTH>(|j| {
            let i = self.first + 32 * j as u32;
            if i < self.count {
                let v = self.vectors[j];
                if QUANTISED {
                    to.set_hinted(i as usize * 8, B64([v[0], v[1]]), Streaming);
                } else {
                    to.set_hinted(i as usize * 16, B128(v), Streaming);
                }
            }
        });
    }
}

/// The experts of a token, one for each lane.
#[derive(Clone, Copy)]
struct Experts {
    id: i32,
    weight: f32,
    /// As a mask, of the lane's expert.
    rank: u32,
}

impl Experts {
    #[inline(always)]
    #[track_caller]
    unsafe fn load(job: &Job, routes: &Routes, token: u32) -> (Self, bool) {
        let lane = warp::lane_id();
        if lane >= job.top_k || token >= routes.tokens {
            return (Self { id: -1, weight: 0.0, rank: 0 }, true);
        }
        let at = token as usize * job.top_k as usize + lane as usize;
        let id = routes.ids.get(at);
        let weight = if job.weights.is_null() { 1.0 } else { Global::new(job.weights).get(at) };
        let (rank, fine) = routes.bit(id);
        (Self { id, weight, rank }, fine)
    }

    /// As a rank sees them, to its row.
    #[inline(always)]
    #[track_caller]
    unsafe fn store(self, job: &Job, link: &Link, rank: u32, row: usize) {
        let lane = warp::lane_id();
        if lane < job.top_k {
            let at = row * job.top_k as usize + lane as usize;
            let there = self.rank >> rank & 1 != 0;
            let local = self.id - (rank * job.per_rank.get()) as i32;
            link.buffer::<i32>(rank, slot::IDS).set(at, if there { local } else { -1 });
            link.buffer::<f32>(rank, slot::WEIGHTS).set(at, if there { self.weight } else { 0.0 });
        }
    }
}

/// Pieces of a row.
#[inline(always)]
fn pieces(hidden: u32) -> u32 {
    (hidden / 8).div_ceil(32 * DEPTH as u32)
}

/// The blocks must all be resident; the threads of a block are a multiple of 32. Shared memory:
/// [`shared_bytes`] of as many tokens as are counted: none in slots.
#[inline(always)]
pub unsafe fn dispatch<const QUANTISED: bool, const SLOTS: bool>(link: Link, job: Job) {
    let Some(session) = Session::begin(link) else { return };
    let tokens = token_count(job.count, job.tokens);
    let routes =
        Routes { ids: Global::new(job.ids), tokens, top_k: job.top_k, per_rank: job.per_rank, ranks: link.ranks };
    let ok = if SLOTS {
        send_slots::<QUANTISED>(&session, &job, &routes)
    } else {
        send_compact::<QUANTISED>(&session, &job, &routes)
    };
    session.finish(ok, false);
}

#[inline(always)]
#[track_caller]
unsafe fn send_slots<const QUANTISED: bool>(session: &Session, job: &Job, routes: &Routes) -> bool {
    let link = &session.link;
    if !session.clean() && !session.enter() {
        return false;
    }
    let (warps, lane) = (thread::block_dim_x() / 32, warp::lane_id());
    let places = GlobalMut::new(job.places);
    let pieces = pieces(job.hidden);
    let mut ok = true;
    // Blocks take turns, so that all are busy with few tokens.
    let first = thread::thread_idx_x() / 32 * thread::grid_dim_x() + thread::block_idx_x();
    let mut walk = Walk::new(first, warps * thread::grid_dim_x(), pieces);
    while walk.row < job.max_tokens {
        let token = walk.row;
        let there = token < routes.tokens;
        let mut piece = Piece { vectors: [[0; 4]; DEPTH], first: 0, count: job.hidden / 8 };
        if there {
            piece = Piece::load(job, token, walk.piece);
        }
        let (experts, fine) = Experts::load(job, routes, token);
        if !fine {
            link.fail(fault::BAD_ID, link.rank, phase::WORK, token);
            ok = false;
        }
        let mask = warp::reduce(experts.rank, |a, b| a | b);
        let row = link.rank as usize * job.max_tokens as usize + token as usize;
        if walk.piece == 0 {
            for d in 0..link.ranks {
                experts.store(job, link, d, row);
            }
            if lane < link.ranks {
                let place = if mask >> lane & 1 != 0 { row as i32 } else { -1 };
                places.set(token as usize * link.ranks as usize + lane as usize, place);
            }
        }
        if mask != 0 {
            let mut scale = 0.0;
            if QUANTISED {
                scale = piece.quantise();
            }
            for d in 0..link.ranks {
                if mask >> d & 1 != 0 {
                    piece.store::<QUANTISED>(link, d, row, scale);
                }
            }
        }
        walk.advance();
    }
    ok
}

#[inline(always)]
#[track_caller]
unsafe fn send_compact<const QUANTISED: bool>(session: &Session, job: &Job, routes: &Routes) -> bool {
    let link = &session.link;
    let (tid, lane) = (thread::thread_idx_x(), warp::lane_id());
    let (block, blocks) = (thread::block_idx_x(), thread::grid_dim_x());
    let mut carver = Carver::new();
    let base: Shared<u32> = carver.take::<u32>(MAX_RANKS);
    let ends: Shared<u32> = carver.take::<u32>(MAX_RANKS);
    let cached = job.cached != 0;

    // How many tokens go where.
    let run = scan(Routes { tokens: if cached { 0 } else { routes.tokens }, ..*routes }, link, &mut carver);
    let totals = run.totals;
    let ok = run.ok;
    let kept = GlobalMut::new(job.totals);
    if cached {
        if tid < MAX_RANKS as u32 {
            totals.set(tid, kept.get(tid));
        }
        thread::sync_threads();
    } else if block == 0 && tid < MAX_RANKS as u32 {
        kept.set(tid, totals.get(tid));
    }
    session.send_entry(Some(totals));
    if !session.wait_entry() {
        return false;
    }

    // Where this rank's rows begin at each.
    let counts = link.buffer::<u32>(link.rank, slot::COUNTS);
    let mut fits = true;
    if tid < link.ranks {
        let (mut before, mut all) = (0, 0);
        let own = totals.get(tid);
        for s in 0..link.ranks {
            let n = if s == link.rank { own } else { counts.get(s as usize * MAX_RANKS + tid as usize) };
            before = if s == link.rank { all } else { before };
            all += n;
        }
        base.set(tid, before);
        ends.set(tid, all);
        fits = all <= job.capacity;
        if !fits {
            link.fail(fault::OVERFLOW, tid, phase::WORK, all);
        }
    }
    if thread::sync_threads_or(!fits) {
        return false;
    }
    let end = ends.get(link.rank);
    if block == 0 && tid == 0 {
        let offsets = GlobalMut::new(job.offsets);
        let own = totals.get(link.rank);
        let mut all = 0;
        for s in 0..link.ranks {
            offsets.set(s, all as i32);
            all += if s == link.rank { own } else { counts.get(s as usize * MAX_RANKS + link.rank as usize) };
        }
        offsets.set(link.ranks, all as i32);
    }

    // The block's tokens, and their rows.
    let each = integer::div(routes.tokens + blocks - 1, blocks);
    let first = (block * each).min(routes.tokens);
    let last = (first + each).min(routes.tokens);
    let places = GlobalMut::new(job.places);
    if !cached {
        run.places(first, last, |token, d, place| {
            let place = if place >= 0 { base.get(d) as i32 + place } else { -1 };
            places.set(token as usize * link.ranks as usize + d as usize, place);
        });
        // Nothing goes anywhere from beyond the last token, should somebody combine more.
        let mut i = routes.tokens * link.ranks + block * thread::block_dim_x() + tid;
        while i < job.max_tokens * link.ranks {
            places.set(i, -1);
            i += blocks * thread::block_dim_x();
        }
        thread::sync_threads();
    }

    // Rows beyond the last have no experts.
    let ids = link.buffer::<i32>(link.rank, slot::IDS);
    let mut i = end * job.top_k + block * thread::block_dim_x() + tid;
    while i < job.capacity * job.top_k {
        ids.set(i, -1);
        i += blocks * thread::block_dim_x();
    }

    let pieces = pieces(job.hidden);
    let mut walk = Walk::new(tid / 32, thread::block_dim_x() / 32, pieces);
    while first + walk.row < last {
        let token = first + walk.row;
        let mut piece = Piece::load(job, token, walk.piece);
        let place =
            if lane < link.ranks { places.get(token as usize * link.ranks as usize + lane as usize) } else { -1 };
        if walk.piece == 0 {
            let (experts, _) = Experts::load(job, routes, token);
            for d in 0..link.ranks {
                let row = warp::shfl_idx(place, d);
                if row >= 0 {
                    experts.store(job, link, d, row as usize);
                }
            }
        }
        let mut scale = 0.0;
        if QUANTISED {
            scale = piece.quantise();
        }
        for d in 0..link.ranks {
            let row = warp::shfl_idx(place, d);
            if row >= 0 {
                piece.store::<QUANTISED>(link, d, row as usize, scale);
            }
        }
        walk.advance();
    }
    ok
}

entries! {
    /// Arguments of every `ep_dispatch_*` entry; see [`dispatch`].
    pub struct Args(link: Link, job: Job);
    ep_dispatch_bf16_compact {} [1024] => dispatch::<false, false>;
    ep_dispatch_bf16_slots {} [1024] => dispatch::<false, true>;
    ep_dispatch_e4m3_compact {} [768] => dispatch::<true, false>;
    ep_dispatch_e4m3_slots {} [768] => dispatch::<true, true>;
}
