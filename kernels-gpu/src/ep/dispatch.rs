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
    scan_bytes(tokens) + (MAX_RANKS * MAX_RANKS * 4) as u32
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
    /// `[ranks + 1]`: where each rank's rows begin, and the end; in slots of the worst case.
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

/// The ranks' buffers that dispatch writes to.
///
/// `HELD`: lane `r` has the addresses of rank `r`'s, loaded before a wait, after which (an acquire empties the first-level cache)
/// the table would have to come from the second level again. For few tokens; otherwise registers are worth more.
#[derive(Clone, Copy)]
struct Peers<'a, const HELD: bool> {
    link: &'a Link,
    bases: [u64; 4],
}

impl<'a, const HELD: bool> Peers<'a, HELD> {
    #[inline(always)]
    #[track_caller]
    unsafe fn new(link: &'a Link) -> Self {
        let mut bases = [0; 4];
        if HELD && warp::lane_id() < link.ranks {
            unroll::<4>(|i| bases[i] = link.buffer::<u8>(warp::lane_id(), slot::ROWS + i).ptr(0usize) as u64);
        }
        Self { link, bases }
    }

    /// One of the four. All lanes take part.
    #[inline(always)]
    #[track_caller]
    unsafe fn buffer<T: Copy>(&self, rank: u32, slot: usize) -> GlobalMut<T> {
        if HELD {
            GlobalMut::new(warp::shfl_idx(self.bases[slot - slot::ROWS], rank) as *mut T)
        } else {
            self.link.buffer(rank, slot)
        }
    }
}

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
    /// Pieces of a row.
    #[inline(always)]
    fn count(job: &Job) -> u32 {
        (job.hidden / 8).div_ceil(32 * DEPTH as u32)
    }

    /// Vectors from the lane's first to the end of the row.
    #[inline(always)]
    fn left(&self) -> u32 {
        self.count.saturating_sub(self.first)
    }

    #[inline(always)]
    fn none(job: &Job) -> Self {
        Self { vectors: [[0; 4]; DEPTH], first: 0, count: job.hidden / 8 }
    }

    #[inline(always)]
    #[track_caller]
    unsafe fn load(job: &Job, token: u32, piece: u32) -> Self {
        let mut this = Self::none(job);
        this.first = piece * (32 * DEPTH as u32) + warp::lane_id();
        // One address, and steps that instructions hold.
        let row = Global::new(job.x).offset(token as usize * job.x_stride + this.first as usize * 8);
        let left = this.left();
        unroll::<DEPTH>(|j| {
            if 32 * (j as u32) < left {
                let B128(v) = row.get_hinted::<B128<u32, 4>>(256 * j, Streaming);
                unroll::<4>(|w| this.vectors[j][w] = v[w]);
            }
        });
        this
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

    /// The scales of [`quantise`](Self::quantise) to a row of a rank.
    #[inline(always)]
    #[track_caller]
    unsafe fn store_scales<const HELD: bool>(&self, peers: &Peers<'_, HELD>, rank: u32, row: usize, scale: f32) {
        let scales = peers.buffer::<f32>(rank, slot::SCALES);
        let lane = warp::lane_id();
        let group = (self.first - lane) / 16 + lane;
        if lane < 2 * DEPTH as u32 && group < self.count / 16 {
            scales.offset(row * (self.count / 16) as usize).set(group, scale);
        }
    }

    /// To a row of a rank.
    #[inline(always)]
    #[track_caller]
    unsafe fn store<const QUANTISED: bool, const HELD: bool>(
        &self,
        peers: &Peers<'_, HELD>,
        rank: u32,
        row: usize,
        scale: f32,
    ) {
        let bytes = if QUANTISED { 8 } else { 16 };
        let at = (row * self.count as usize + self.first as usize) * bytes;
        let to = peers.buffer::<u8>(rank, slot::ROWS).offset(at);
        let left = self.left();
        if QUANTISED {
            self.store_scales(peers, rank, row, scale);
        }
        unroll::<DEPTH>(|j| {
            if 32 * (j as u32) < left {
                let v = self.vectors[j];
                if QUANTISED {
                    to.set_hinted(32 * j * bytes, B64([v[0], v[1]]), Streaming);
                } else {
                    to.set_hinted(32 * j * bytes, B128(v), Streaming);
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
    unsafe fn store<const HELD: bool>(self, job: &Job, peers: &Peers<'_, HELD>, rank: u32, row: usize) {
        let lane = warp::lane_id();
        let (ids, weights) = (peers.buffer::<i32>(rank, slot::IDS), peers.buffer::<f32>(rank, slot::WEIGHTS));
        if lane < job.top_k {
            let at = row * job.top_k as usize + lane as usize;
            let there = self.rank >> rank & 1 != 0;
            let local = self.id - (rank * job.per_rank.get()) as i32;
            ids.set(at, if there { local } else { -1 });
            weights.set(at, if there { self.weight } else { 0.0 });
        }
    }
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
    let (warps, lane) = (thread::block_dim_x() / 32, warp::lane_id());
    let places = GlobalMut::new(job.places);
    // Blocks take turns, so that all are busy with few tokens.
    let first = thread::thread_idx_x() / 32 * thread::grid_dim_x() + thread::block_idx_x();
    let mut walk = Walk::new(first, warps * thread::grid_dim_x(), Piece::count(job));
    let load = |walk: Walk| {
        let there = walk.row < routes.tokens;
        let piece = if there { Piece::load(job, walk.row, walk.piece) } else { Piece::none(job) };
        (piece, Experts::load(job, routes, walk.row))
    };
    // The first piece is under way while the rank waits for the others, whom it has told that it is here: that would wait for loads.
    if !session.clean() {
        session.announce(0);
    }
    let peers = Peers::<true>::new(link);
    let (mut piece, (mut experts, mut fine)) = load(walk);
    if !session.clean() && !session.wait_entry() {
        return false;
    }
    if thread::block_idx_x() == 0 && thread::thread_idx_x() <= link.ranks {
        GlobalMut::new(job.offsets).set(thread::thread_idx_x(), (thread::thread_idx_x() * job.max_tokens) as i32);
    }
    let mut ok = true;
    while walk.row < job.max_tokens {
        let token = walk.row;
        if !fine {
            session.fail(fault::BAD_ID, link.rank, phase::WORK, token);
            ok = false;
        }
        let mask = warp::reduce(experts.rank, |a, b| a | b);
        let row = link.rank as usize * job.max_tokens as usize + token as usize;
        if walk.piece == 0 {
            for i in 0..link.ranks {
                let d = link.turn(i);
                experts.store(job, &peers, d, row);
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
            for i in 0..link.ranks {
                let d = link.turn(i);
                if mask >> d & 1 != 0 {
                    piece.store::<QUANTISED, true>(&peers, d, row, scale);
                }
            }
        }
        walk.advance();
        (piece, (experts, fine)) = load(walk);
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
}

impl Part {
    /// Of blocks that send to peers, each sends to one and the same, if there are enough: stores to several would wait in line for the
    /// slowest of these. In e4m3 each row would be quantised for each peer.
    #[inline(always)]
    unsafe fn new<const QUANTISED: bool>(job: &Job, link: &Link, tokens: u32) -> Self {
        let (block, blocks, own) = (thread::block_idx_x(), thread::grid_dim_x(), job.own_blocks);
        let (all, itself) = ((1u32 << link.ranks) - 1, 1u32 << link.rank);
        let (senders, peers) = (blocks - own, link.ranks - 1);
        let (index, count, to) = if own == 0 {
            (block, blocks, all)
        } else if block < own {
            (block, own, itself)
        } else if QUANTISED || peers < 2 || senders < peers {
            (block - own, senders, all & !itself)
        } else {
            let index = integer::div(block - own, peers);
            let peer = block - own - index * peers;
            (index, integer::div(senders - peer + peers - 1, peers), 1 << link.turn(peer))
        };
        let each = integer::div(tokens + count - 1, count);
        let first = (index * each).min(tokens);
        Self { first, last: (first + each).min(tokens), to }
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

#[inline(always)]
#[track_caller]
unsafe fn send_compact<const QUANTISED: bool>(session: &Session, job: &Job, routes: &Routes) -> bool {
    let link = &session.link;
    let (tid, lane) = (thread::thread_idx_x(), warp::lane_id());
    let (block, blocks) = (thread::block_idx_x(), thread::grid_dim_x());
    let mut carver = Carver::new();
    let counts: Shared<u32> = carver.take::<u32>(MAX_RANKS * MAX_RANKS);
    let cached = job.cached != 0;
    // Block 0 has counts to tell.
    session.announce(blocks - 1);

    // How many tokens go where.
    let run =
        scan(Routes { tokens: if cached { 0 } else { routes.tokens }, ..*routes }, link, session.mark(), &mut carver);
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
    // The first piece is under way while the rank waits for the others.
    let part = Part::new::<QUANTISED>(job, link, routes.tokens);
    let mut walk = Walk::new(tid / 32, thread::block_dim_x() / 32, Piece::count(job));
    let load = |walk: Walk| {
        let token = part.first + walk.row;
        if token < part.last { Piece::load(job, token, walk.piece) } else { Piece::none(job) }
    };
    let mut piece = load(walk);
    if !session.exchange_counts(totals, counts) {
        return false;
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
        return false;
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

    let peers = Peers::<false>::new(link);
    while part.first + walk.row < part.last {
        let token = part.first + walk.row;
        let place = part.place(job, link, token);
        if walk.piece == 0 {
            send_experts(&peers, job, routes, token, place);
        }
        let mut scale = 0.0;
        if QUANTISED {
            scale = piece.quantise();
        }
        for i in 0..link.ranks {
            let d = link.turn(i);
            let row = warp::shfl_idx(place, d);
            if row >= 0 {
                piece.store::<QUANTISED, false>(&peers, d, row as usize, scale);
            }
        }
        walk.advance();
        piece = load(walk);
    }
    run.ok
}

/// The experts of a token to its row (`place`) at each rank.
#[inline(always)]
#[track_caller]
unsafe fn send_experts(peers: &Peers<'_, false>, job: &Job, routes: &Routes, token: u32, place: i32) {
    let (experts, _) = Experts::load(job, routes, token);
    for i in 0..peers.link.ranks {
        let d = peers.link.turn(i);
        let row = warp::shfl_idx(place, d);
        if row >= 0 {
            experts.store(job, peers, d, row as usize);
        }
    }
}

entries! {
    /// Arguments of every `ep_dispatch_*` entry; see [`dispatch`].
    pub struct Args(link: Link, job: Job);
    ep_dispatch_bf16_compact {} [1024] => dispatch::<false, false>;
    ep_dispatch_bf16_slots {} [512, 1] => dispatch::<false, true>;
    ep_dispatch_e4m3_compact {} [768] => dispatch::<true, false>;
    ep_dispatch_e4m3_slots {} [512, 1] => dispatch::<true, true>;
}
