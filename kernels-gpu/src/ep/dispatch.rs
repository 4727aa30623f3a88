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
use crate::row::quantise::{Quantised, scale_for};
use cuda_std::convert::max_bf16x2;
use cuda_std::integer::{Divisor, permute};
use cuda_std::shared::{Carver, Shared};
use cuda_std::vec::{B64, B128, Streaming};
use cuda_std::{
    E4M3, Global, GlobalMut, bf16, entries, float, integer, mbarrier, struct_param, thread, tma, unroll, warp,
};

/// Values of eight times 32 lanes that a warp has under way.
const DEPTH: usize = 4;
/// As many in e4m3, and in slots.
const DEEP: usize = 7;
/// The most bytes of a row that the copy engine moves at once.
pub const CHUNK: usize = 8192;
/// Warps that tell the copy engine what to move: one alone is too slow.
const MOVERS: usize = 4;
/// Chunks of each in shared memory.
const STAGES: usize = 4;
/// Of these, chunks whose stores may be under way while others are loaded.
const LAG: usize = 2;
/// Bytes of shared memory for all that.
const RING_BYTES: usize = MOVERS * STAGES * (CHUNK + 8 + MAX_RANKS * 4);

/// Dynamic shared memory of a block, for so many tokens that are to be counted.
pub const fn shared_bytes(tokens: u32) -> u32 {
    scan_bytes(tokens) + (MAX_RANKS * MAX_RANKS * 4) as u32
}

/// The same if the copy engine moves rows.
pub const fn bulk_shared_bytes(tokens: u32, threads: u32, quantise: bool) -> u32 {
    let stages = if quantise { 2 * threads / 32 * DEEP as u32 * 256 } else { RING_BYTES as u32 };
    stages + shared_bytes(tokens)
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
    /// Blocks that copy the rank's own rows and nothing else, while the others send; 0 if all do both. Compact only.
    pub own_blocks: u32,
}
struct_param!(Job);

/// The part of a row that a warp moves at once, loaded.
#[derive(Clone, Copy)]
struct Piece<const N: usize> {
    vectors: [[u32; 4]; N],
    /// The vector of the lane's first.
    first: u32,
    /// Vectors of a row.
    count: u32,
}

impl<const N: usize> Piece<N> {
    /// Pieces of a row.
    #[inline(always)]
    fn count(job: &Job) -> u32 {
        (job.hidden / 8).div_ceil(32 * N as u32)
    }

    #[inline(always)]
    fn none(job: &Job) -> Self {
        Self { vectors: [[0; 4]; N], first: 0, count: job.hidden / 8 }
    }

    #[inline(always)]
    #[track_caller]
    unsafe fn load(job: &Job, token: u32, piece: u32) -> Self {
        let mut this = Self::none(job);
        this.first = piece * (32 * N as u32) + warp::lane_id();
        let row = Global::new(job.x).offset(token as usize * job.x_stride);
        unroll::<N>(|j| {
            let i = this.first + 32 * j as u32;
            if i < this.count {
                let B128(v) = row.get_hinted::<B128<u32, 4>>(i as usize * 8, Streaming);
                unroll::<4>(|w| this.vectors[j][w] = v[w]);
            }
        });
        this
    }

    /// In e4m3: the values in the first two words of each vector. Lane `2 j + 16 h`, for `j` below `N`, gets the scale of half `h`
    /// of the warp's `j`-th vectors.
    ///
    /// Magnitudes are compared as pairs of bf16. Lanes of a half warp do so in turn for fewer and fewer vectors: of eight each
    /// keeps four, two, one, so that a scale and its reciprocal are computed twice, not sixteen times.
    #[inline(always)]
    #[track_caller]
    unsafe fn quantise(&mut self) -> f32 {
        const { assert!(N <= 8) };
        let lane = warp::lane_id();
        let mut largest = [0u32; 8];
        unroll::<N>(|j| {
            let v = self.vectors[j];
            let m = |w: usize| v[w] & 0x7fff_7fff;
            largest[j] = max_bf16x2(max_bf16x2(m(0), m(1)), max_bf16x2(m(2), m(3)));
        });
        // Both halves of a vector in one, two vectors in a word.
        let mut pair = [0u32; 4];
        unroll::<4>(|i| {
            let (a, b) = (largest[2 * i], largest[2 * i + 1]);
            pair[i] = max_bf16x2(permute(a, b, 0x5410), permute(a, b, 0x7632));
        });
        let choose = |bit: u32, a: u32, b: u32| if lane & bit != 0 { (b, a) } else { (a, b) };
        let (keep0, give0) = choose(8, pair[0], pair[2]);
        let (keep1, give1) = choose(8, pair[1], pair[3]);
        let first = max_bf16x2(keep0, warp::shfl_xor(give0, 8));
        let second = max_bf16x2(keep1, warp::shfl_xor(give1, 8));
        let (keep, give) = choose(4, first, second);
        let mut word = max_bf16x2(keep, warp::shfl_xor(give, 4));
        word = max_bf16x2(word, warp::shfl_xor(word, 2));
        word = max_bf16x2(word, warp::shfl_xor(word, 1));
        let amax = f32::from_bits(if lane & 2 != 0 { word & 0xffff_0000 } else { word << 16 });
        let scale = scale_for::<E4M3>(amax);
        let factor = float::fast::recip(scale);
        unroll::<N>(|j| {
            let factor = warp::warp_shuffle_idx(warp::FULL, factor, 2 * j as u32, 16).0;
            let mut v = [0.0; 8];
            unroll::<4>(|w| {
                v[2 * w] = f32::from_bits(self.vectors[j][w] << 16) * factor;
                v[2 * w + 1] = f32::from_bits(self.vectors[j][w] & 0xffff_0000) * factor;
            });
            self.vectors[j][0] = E4M3::four([v[0], v[1], v[2], v[3]]);
            self.vectors[j][1] = E4M3::four([v[4], v[5], v[6], v[7]]);
        });
        scale
    }

    /// The scales of [`quantise`](Self::quantise) to a row of a rank.
    #[inline(always)]
    #[track_caller]
    unsafe fn store_scales(&self, link: &Link, rank: u32, row: usize, scale: f32) {
        let lane = warp::lane_id();
        let (j, half) = (lane % 16 / 2, lane / 16);
        let group = (self.first - lane) / 16 + 2 * j + half;
        if lane.is_multiple_of(2) && j < N as u32 && group < self.count / 16 {
            link.buffer::<f32>(rank, slot::SCALES).offset(row * (self.count / 16) as usize).set(group, scale);
        }
    }

    /// To a row of a rank.
    #[inline(always)]
    #[track_caller]
    unsafe fn store<const QUANTISED: bool>(&self, link: &Link, rank: u32, row: usize, scale: f32) {
        let bytes = if QUANTISED { 8 } else { 16 };
        let to = link.buffer::<u8>(rank, slot::ROWS).offset(row * self.count as usize * bytes);
        if QUANTISED {
            self.store_scales(link, rank, row, scale);
        }
        unroll::<N>(|j| {
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
    /// And whether there is such an expert.
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
        let rank_of = routes.divide();
        (Self { id, weight, rank: rank_of.bit(id) }, rank_of.is_fine(id))
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

/// How a block sends rows.
pub mod way {
    /// Warps take pieces of rows, at places that nobody has to know of.
    pub const SLOTS: u32 = 0;
    /// Warps take pieces of rows.
    pub const COMPACT: u32 = 1;
    /// The copy engine moves them.
    pub const BULK: u32 = 2;
}

/// The blocks must all be resident; the threads of a block are a multiple of 32. Shared memory:
/// [`shared_bytes`] of as many tokens as are counted: none in slots; [`bulk_shared_bytes`] for [`way::BULK`].
#[inline(always)]
pub unsafe fn dispatch<const QUANTISED: bool, const WAY: u32>(link: Link, job: Job) {
    let Some(session) = Session::begin(link) else { return };
    let tokens = token_count(job.count, job.tokens);
    let routes =
        Routes { ids: Global::new(job.ids), tokens, top_k: job.top_k, per_rank: job.per_rank, ranks: link.ranks };
    let ok = match (WAY, QUANTISED) {
        (way::SLOTS, _) => send_slots::<QUANTISED>(&session, &job, &routes),
        (way::COMPACT, false) => send_compact::<false, DEPTH>(&session, &job, &routes),
        (way::COMPACT, true) => send_compact::<true, DEPTH>(&session, &job, &routes),
        (_, false) => send_bulk(&session, &job, &routes),
        (_, true) => send_bulk_quantised(&session, &job, &routes),
    };
    session.finish(ok, false);
}

#[inline(always)]
#[track_caller]
unsafe fn send_slots<const QUANTISED: bool>(session: &Session, job: &Job, routes: &Routes) -> bool {
    let link = &session.link;
    let (warps, lane) = (thread::block_dim_x() / 32, warp::lane_id());
    let places = GlobalMut::new(job.places);
    // Blocks take turns, so that all are busy with few tokens.
    let first = thread::thread_idx_x() / 32 * thread::grid_dim_x() + thread::block_idx_x();
    let mut walk = Walk::new(first, warps * thread::grid_dim_x(), Piece::<DEEP>::count(job));
    let load = |walk: Walk| {
        if walk.row < routes.tokens { Piece::<DEEP>::load(job, walk.row, walk.piece) } else { Piece::none(job) }
    };
    // The first piece is under way while the rank waits for the others.
    let mut piece = load(walk);
    if !session.clean() && !session.enter() {
        return false;
    }
    let mut ok = true;
    while walk.row < job.max_tokens {
        let token = walk.row;
        let (experts, fine) = Experts::load(job, routes, token);
        if !fine {
            session.fail(fault::BAD_ID, link.rank, phase::WORK, token);
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
        piece = load(walk);
    }
    ok
}

/// What a block sends in compact dispatch.
#[derive(Clone, Copy)]
struct Part {
    first: u32,
    /// One past the last token.
    last: u32,
    /// As a mask, the ranks that the block sends to.
    to: u32,
    /// Whether the thread saw nothing wrong.
    ok: bool,
}

impl Part {
    #[inline(always)]
    unsafe fn new(job: &Job, link: &Link, tokens: u32) -> Self {
        let (block, blocks, own) = (thread::block_idx_x(), thread::grid_dim_x(), job.own_blocks);
        let (all, itself) = ((1u32 << link.ranks) - 1, 1u32 << link.rank);
        let (index, count, to) = if own == 0 {
            (block, blocks, all)
        } else if block < own {
            (block, own, itself)
        } else {
            (block - own, blocks - own, all & !itself)
        };
        let each = integer::div(tokens + count - 1, count);
        let first = (index * each).min(tokens);
        Self { first, last: (first + each).min(tokens), to, ok: true }
    }

    /// The lane's rank's row for a token, -1 if it does not go there, or the block does not send it.
    #[inline(always)]
    #[track_caller]
    unsafe fn place(&self, job: &Job, link: &Link, token: u32) -> i32 {
        let lane = warp::lane_id();
        if self.to >> lane & 1 != 0 {
            GlobalMut::new(job.places).get(token as usize * link.ranks as usize + lane as usize)
        } else {
            -1
        }
    }
}

/// Finds out where the rows of this block's tokens belong; `None` if something is wrong.
#[inline(always)]
#[track_caller]
unsafe fn find_places(session: &Session, job: &Job, routes: &Routes, carver: &mut Carver) -> Option<Part> {
    let link = &session.link;
    let (tid, lane) = (thread::thread_idx_x(), warp::lane_id());
    let (block, blocks) = (thread::block_idx_x(), thread::grid_dim_x());
    let counts: Shared<u32> = carver.take::<u32>(MAX_RANKS * MAX_RANKS);
    let cached = job.cached != 0;
    session.announce();

    // How many tokens go where.
    let run = scan(Routes { tokens: if cached { 0 } else { routes.tokens }, ..*routes }, link, session.mark(), carver);
    let totals = run.totals;
    let kept = GlobalMut::new(job.totals);
    if cached {
        if tid < MAX_RANKS as u32 {
            totals.set(tid, kept.get(tid));
        }
        thread::sync_threads();
    } else if block == 0 && tid < MAX_RANKS as u32 {
        kept.set(tid, totals.get(tid));
    }
    if !session.exchange_counts(totals, counts) {
        return None;
    }

    // Lane `r`: where this rank's rows begin at rank `r`, and how many it gets of all.
    let (mut base, mut all) = (0, 0);
    if lane < MAX_RANKS as u32 {
        for s in 0..link.ranks {
            base = if s == link.rank { all } else { base };
            all += counts.get(s * MAX_RANKS as u32 + lane);
        }
    }
    let full = warp::warp_vote_ballot(warp::FULL, lane < link.ranks && all > job.capacity);
    if full != 0 {
        let d = full.trailing_zeros();
        let all = warp::shfl_idx(all, d);
        if tid == 0 {
            session.fail(fault::OVERFLOW, d, phase::WORK, all);
        }
        return None;
    }
    let end = warp::shfl_idx(all, link.rank);
    if block == 0 && tid == 0 {
        let offsets = GlobalMut::new(job.offsets);
        let mut all = 0;
        for s in 0..link.ranks {
            offsets.set(s, all as i32);
            all += counts.get(s * MAX_RANKS as u32 + link.rank);
        }
        offsets.set(link.ranks, all as i32);
    }

    // The block's tokens, and their rows.
    let part = Part { ok: run.ok, ..Part::new(job, link, routes.tokens) };
    let places = GlobalMut::new(job.places);
    if !cached {
        run.places(base, part.first, part.last, |token, d, place| {
            if part.to >> d & 1 != 0 {
                places.set(token as usize * link.ranks as usize + d as usize, place);
            }
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
    Some(part)
}

#[inline(always)]
#[track_caller]
unsafe fn send_compact<const QUANTISED: bool, const N: usize>(session: &Session, job: &Job, routes: &Routes) -> bool {
    let link = &session.link;
    let Some(part) = find_places(session, job, routes, &mut Carver::new()) else { return false };
    let mut walk = Walk::new(thread::thread_idx_x() / 32, thread::block_dim_x() / 32, Piece::<N>::count(job));
    while part.first + walk.row < part.last {
        let token = part.first + walk.row;
        let place = part.place(job, link, token);
        let mut piece = Piece::<N>::load(job, token, walk.piece);
        if walk.piece == 0 {
            send_experts(link, job, routes, token, place);
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
    part.ok
}

/// The experts of a token to its row (`place`) at each rank.
#[inline(always)]
#[track_caller]
unsafe fn send_experts(link: &Link, job: &Job, routes: &Routes, token: u32, place: i32) {
    let (experts, _) = Experts::load(job, routes, token);
    for d in 0..link.ranks {
        let row = warp::shfl_idx(place, d);
        if row >= 0 {
            experts.store(job, link, d, row as usize);
        }
    }
}

/// A few warps let the copy engine load rows, in chunks, and store them to all their ranks; lane `r` stores to rank `r`. Of a
/// warp's chunks [`LAG`] are stored while the others are loaded. The other warps send experts.
#[inline(always)]
#[track_caller]
unsafe fn send_bulk(session: &Session, job: &Job, routes: &Routes) -> bool {
    let link = &session.link;
    let mut carver = Carver::new();
    let ring = carver.take_aligned::<u8>(MOVERS * STAGES * CHUNK, 128);
    let full = carver.take::<u64>(MOVERS * STAGES);
    let kept = carver.take::<i32>(MOVERS * STAGES * MAX_RANKS);
    let (tid, lane) = (thread::thread_idx_x(), warp::lane_id());
    if tid == 0 {
        unroll::<{ MOVERS * STAGES }>(|i| mbarrier::init(full.address(i), 1));
        mbarrier::fence_init();
    }
    let Some(part) = find_places(session, job, routes, &mut carver) else { return false };
    let (warp, warps) = (tid / 32, thread::block_dim_x() / 32);
    let movers = (MOVERS as u32).min(warps);
    if warp >= movers || movers == warps {
        let (index, others) = if movers == warps { (warp, warps) } else { (warp - movers, warps - movers) };
        let mut token = part.first + index;
        while token < part.last {
            send_experts(link, job, routes, token, part.place(job, link, token));
            token += others;
        }
    }
    if warp >= movers {
        return part.ok;
    }

    let ring = ring.offset(warp * const { (STAGES * CHUNK) as u32 });
    let full = full.offset(warp * STAGES as u32);
    let kept = kept.offset(warp * const { (STAGES * MAX_RANKS) as u32 });
    let row_bytes = job.hidden * 2;
    let chunks = row_bytes.div_ceil(CHUNK as u32);
    let chunk = integer::div(row_bytes, chunks).next_multiple_of(16);
    let total = integer::div((part.last - part.first) * chunks + movers - 1 - warp, movers);
    let at = |n: u32| {
        let n = n * movers + warp;
        let row = integer::div(n, chunks);
        let begin = (n - row * chunks) * chunk;
        (part.first + row, begin, chunk.min(row_bytes - begin))
    };
    let place = |n: u32| if n < total { part.place(job, link, at(n).0) } else { -1 };
    let load = |n: u32, place: i32| {
        let stage = n % STAGES as u32;
        if lane < MAX_RANKS as u32 {
            kept.set(stage * MAX_RANKS as u32 + lane, place);
        }
        if warp::warp_vote_any(warp::FULL, place >= 0) && lane == 0 {
            let (token, begin, bytes) = at(n);
            let from = job.x.wrapping_add(token as usize * job.x_stride).cast::<u8>().wrapping_add(begin as usize);
            mbarrier::arrive_expect_tx(full.address(stage), bytes);
            tma::copy_bulk(ring.address(stage * CHUNK as u32), from, bytes, full.address(stage));
        }
    };
    let rows = if lane < link.ranks { link.buffer::<u8>(lane, slot::ROWS).ptr(0usize) } else { core::ptr::null_mut() };
    tma::fence_async_all();
    let mut first = [-1; STAGES];
    unroll::<STAGES>(|i| first[i] = place(i as u32));
    let mut next = place(STAGES as u32);
    unroll::<STAGES>(|i| {
        if (i as u32) < total {
            load(i as u32, first[i]);
        }
    });
    let (mut n, mut parity) = (0, 0u32);
    while n < total {
        let stage = n % STAGES as u32;
        let to = if lane < MAX_RANKS as u32 { kept.get(stage * MAX_RANKS as u32 + lane) } else { -1 };
        if warp::warp_vote_any(warp::FULL, to >= 0) {
            mbarrier::wait_parity(full.address(stage), parity >> stage & 1);
            parity ^= 1 << stage;
            if to >= 0 {
                let (_, begin, bytes) = at(n);
                let to = rows.wrapping_add(to as usize * row_bytes as usize + begin as usize);
                tma::store_bulk(to, ring.address(stage * CHUNK as u32), bytes);
            }
        }
        tma::commit_group();
        let refill = n + const { (STAGES - LAG) as u32 };
        if n >= LAG as u32 && refill < total {
            tma::wait_group_read::<LAG>();
            warp::sync_warp(warp::FULL);
            load(refill, next);
            next = place(refill + 1);
        }
        n += 1;
    }
    tma::wait_group::<0>();
    part.ok
}

/// Warps take pieces of rows, quantise them into shared memory, and let the copy engine store them from there; lane `r` to
/// rank `r`. Each warp has two places there, and so does not wait until a piece has gone.
#[inline(always)]
#[track_caller]
unsafe fn send_bulk_quantised(session: &Session, job: &Job, routes: &Routes) -> bool {
    const BYTES: u32 = DEEP as u32 * 256;
    let link = &session.link;
    let mut carver = Carver::new();
    let (lane, warp, warps) = (warp::lane_id(), thread::thread_idx_x() / 32, thread::block_dim_x() / 32);
    let stages = carver.take_aligned::<u8>((2 * warps * BYTES) as usize, 128);
    let Some(part) = find_places(session, job, routes, &mut carver) else { return false };
    let rows = if lane < link.ranks { link.buffer::<u8>(lane, slot::ROWS).ptr(0usize) } else { core::ptr::null_mut() };
    let mut walk = Walk::new(warp, warps, Piece::<DEEP>::count(job));
    let stage = stages.offset(2 * warp * BYTES);
    let mut shift = 0;
    tma::fence_async_all();
    while part.first + walk.row < part.last {
        let token = part.first + walk.row;
        let place = part.place(job, link, token);
        let mut piece = Piece::<DEEP>::load(job, token, walk.piece);
        if walk.piece == 0 {
            send_experts(link, job, routes, token, place);
        }
        let scale = piece.quantise();
        tma::wait_group_read::<1>();
        warp::sync_warp(warp::FULL);
        let to = stage.offset(shift);
        unroll::<DEEP>(|j| {
            let v = piece.vectors[j];
            to.set_as(j as u32 * 256 + lane * 8, B64([v[0], v[1]]));
        });
        tma::fence_async();
        warp::sync_warp(warp::FULL);
        let begin = walk.piece * BYTES;
        if place >= 0 {
            let row = rows.wrapping_add(place as usize * job.hidden as usize + begin as usize);
            tma::store_bulk(row, to.address(0u32), BYTES.min(job.hidden - begin));
        }
        tma::commit_group();
        for d in 0..link.ranks {
            let row = warp::shfl_idx(place, d);
            if row >= 0 {
                piece.store_scales(link, d, row as usize, scale);
            }
        }
        shift ^= BYTES;
        walk.advance();
    }
    tma::wait_group::<0>();
    part.ok
}

entries! {
    /// Arguments of every `ep_dispatch_*` entry; see [`dispatch`].
    pub struct Args(link: Link, job: Job);
    ep_dispatch_bf16_compact {} [1024] => dispatch::<false, { way::COMPACT }>;
    ep_dispatch_bf16_slots {} [1024] => dispatch::<false, { way::SLOTS }>;
    ep_dispatch_e4m3_compact {} [768] => dispatch::<true, { way::COMPACT }>;
    ep_dispatch_e4m3_slots {} [768] => dispatch::<true, { way::SLOTS }>;
    ep_dispatch_bf16_bulk {} [1024; Sm90a] => dispatch::<false, { way::BULK }>;
    ep_dispatch_e4m3_bulk {} [768; Sm90a] => dispatch::<true, { way::BULK }>;
}
