//! Tokens to the ranks of their experts: one copy for each rank, stored straight into its memory.
//!
//! What a rank receives is rows of hidden values with, for each, its experts' numbers on that rank (-1 for those of other ranks)
//! and their weights. Two arrangements:
//!
//! * *compact*: the rows of rank 0, then those of rank 1, ..., each in the order of its tokens, without gaps. Where a row goes
//!   follows from how many tokens all ranks send to all. Each block counts a slice of the rank's tokens ([`Slice`]) and tells all ranks, and
//!   the other blocks which they are; all blocks add up what all blocks of all ranks tell. No row is moved twice.
//! * *slots*: token `t` of rank `s` is row `s slots + t`, and rows that nobody sent have no experts. Nothing is known before and
//!   nothing is waited for (unless a rank may still read what came before): for few tokens, where time is latency.
//!
//! Warps take pieces of [`DEPTH`] vectors a lane, loading all of them before the first is stored; each is loaded once and stored
//! to all its ranks. In e4m3, eight lanes hold the 128 values of a scale, 16 each, which are one store afterwards. In compact dispatch pieces
//! or whole rows are handed out as warps ask for them ([`Work`]): multiprocessors are not equally fast at storing to a peer.

use super::layout::Routes;
use super::{Deal, Link, MAX_BLOCKS, MAX_RANKS, Session, Unit, Walk, fault, phase, slot, token_count};
use crate::row::quantise::scale_for;
use cuda_std::atomic::{Device, Relaxed};
use cuda_std::integer::Divisor;
use cuda_std::shared::{Carver, Shared};
use cuda_std::vec::{B64, B128, Reused, Streaming};
use cuda_std::{
    E4M3, Global, GlobalMut, bf16, convert, cp_async, entries, float, integer, struct_param, thread, unroll, vec, warp,
};

/// Vectors of eight values that a lane has under way.
pub const DEPTH: usize = 4;

/// Pieces of a row, each of which a warp moves at once.
pub const fn pieces(hidden: u32) -> u32 {
    (hidden / 8).div_ceil(32 * DEPTH as u32)
}

/// Dynamic shared memory of a block in compact dispatch of so many tokens, with so many threads. None in slots.
pub const fn shared_bytes(tokens: u32, threads: u32, quantise: bool) -> u32 {
    let ring = if quantise { (threads / 32).saturating_mul(STAGES * PIECE) } else { 0 };
    let fixed = (64 + ((MAX_RANKS + MAX_BLOCKS) * MAX_RANKS * 4) as u32).saturating_add(ring);
    tokens.div_ceil(32).saturating_mul((MAX_RANKS * 8) as u32).saturating_add(fixed)
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
    /// Blocks that copy the rank's own rows and nothing else, while the others send, fewer than the launch has; 0 if all do both, as where there is one rank. Compact only.
    pub own_blocks: u32,
    /// `[max_tokens / 32, 2, MAX_RANKS]`, rounded up: for each 32 tokens which go to a rank, and how many of those before that the same block
    /// counted; each with the epoch above.
    pub votes: *mut u64,
    /// Rows, the last, that warps get a piece at a time; the others they get whole. Compact only.
    pub singles: u32,
    /// [`pieces`] of a row.
    pub pieces: Divisor,
}
struct_param!(Job);

/// The ranks' buffers that dispatch writes to: lane `r` has the addresses of rank `r`'s, loaded before a wait, after which (an acquire
/// empties the first-level cache) the table would have to come from the second level again.
#[derive(Clone, Copy)]
struct Peers {
    bases: [u64; 4],
}

impl Peers {
    #[inline(always)]
    #[track_caller]
    unsafe fn new(link: &Link) -> Self {
        let mut bases = [0; 4];
        if warp::lane_id() < link.ranks {
            unroll::<4>(|i| bases[i] = link.buffer::<u8>(warp::lane_id(), slot::ROWS + i).ptr(0usize) as u64);
        }
        Self { bases }
    }

    /// One of the four. All lanes take part.
    #[inline(always)]
    #[track_caller]
    unsafe fn buffer<T: Copy>(&self, rank: u32, slot: usize) -> GlobalMut<T> {
        GlobalMut::new(warp::shfl_idx(self.bases[slot - slot::ROWS], rank) as *mut T)
    }
}

/// The part of a row that a warp moves at once, loaded.
#[derive(Clone, Copy)]
struct Piece {
    vectors: [[u32; 4]; DEPTH],
}

impl Piece {
    /// The lane's first vector of a piece of a row, and how many there are from there to the row's end.
    #[inline(always)]
    fn span<const QUANTISED: bool>(job: &Job, piece: u32) -> (u32, u32) {
        let first = piece * (32 * DEPTH as u32) + warp::lane_id() * if QUANTISED { 2 } else { 1 };
        (first, (job.hidden / 8).saturating_sub(first))
    }

    /// The `j`-th vector of a lane, from its first: in e4m3 pairs, which are 16 bytes afterwards.
    #[inline(always)]
    const fn step<const QUANTISED: bool>(j: usize) -> usize {
        if QUANTISED { 64 * (j / 2) + j % 2 } else { 32 * j }
    }

    /// Zeros beyond the last of `rows`.
    #[inline(always)]
    #[track_caller]
    unsafe fn load<const QUANTISED: bool>(job: &Job, at: Unit, rows: u32) -> Self {
        let mut vectors = [[0; 4]; DEPTH];
        if at.row < rows {
            let (first, left) = Self::span::<QUANTISED>(job, at.piece);
            // One address, and steps that instructions hold.
            let row = Global::new(job.x).offset(at.row as usize * job.x_stride + first as usize * 8);
            unroll::<DEPTH>(|j| {
                if (Self::step::<QUANTISED>(j) as u32) < left {
                    let at = 8 * Self::step::<QUANTISED>(j);
                    // The second of a pair finds its sectors in the first-level cache.
                    let B128(v) = if QUANTISED {
                        row.get_hinted::<B128<u32, 4>>(at, Reused)
                    } else {
                        row.get_hinted::<B128<u32, 4>>(at, Streaming)
                    };
                    unroll::<4>(|w| vectors[j][w] = v[w]);
                }
            });
        }
        Self { vectors }
    }

    /// In e4m3: the values in the first two words of each vector. Returns what [`scale`](Self::scale) finds scales in.
    #[inline(always)]
    #[track_caller]
    unsafe fn quantise(&mut self) -> f32 {
        const { assert!(DEPTH == 4) };
        // The largest magnitude of each pair's two halves, as eight lanes have it.
        let mut halves = [0; 2];
        unroll::<2>(|s| {
            let word = |i: usize| self.vectors[2 * s + i / 4][i % 4];
            let pair = |i: usize| convert::max_magnitude_bf16x2(word(i), word(i + 4));
            let (a, b) =
                (convert::max_magnitude_bf16x2(pair(0), pair(1)), convert::max_magnitude_bf16x2(pair(2), pair(3)));
            halves[s] = convert::max_magnitude_bf16x2(a, b);
        });
        // Of both pairs in a word.
        let low = integer::permute(halves[0], halves[1], 0x5410);
        let high = integer::permute(halves[0], halves[1], 0x7632);
        let mut most = convert::max_magnitude_bf16x2(low, high);
        unroll::<3>(|i| most = convert::max_magnitude_bf16x2(most, warp::shfl_xor(most, 1 << i)));
        let mut scales = [0.0; 2];
        unroll::<2>(|s| {
            let most = f32::from_bits(if s == 0 { most << 16 } else { most & 0xffff_0000 });
            scales[s] = scale_for::<E4M3>(float::abs(most));
            let factor = float::fast::recip(scales[s]);
            unroll::<2>(|h| {
                let mut v = [0.0; 8];
                unroll::<4>(|w| {
                    let word = self.vectors[2 * s + h][w];
                    v[2 * w] = f32::from_bits(word << 16) * factor;
                    v[2 * w + 1] = f32::from_bits(word & 0xffff_0000) * factor;
                });
                unroll::<2>(|w| {
                    let two = |i: usize| convert::pack_e4m3x2(v[4 * w + 2 * i], v[4 * w + 2 * i + 1]);
                    self.vectors[2 * s + h][w] = convert::join_halves(two(0), two(1));
                });
            });
        });
        if warp::lane_id().is_multiple_of(2) { scales[0] } else { scales[1] }
    }

    /// The scale of a group of the piece, one of eight, in what [`quantise`](Self::quantise) returned. All lanes take part.
    #[inline(always)]
    #[track_caller]
    unsafe fn scale(scales: f32, group: u32) -> f32 {
        warp::shfl_idx(scales, group % 4 * 8 + group / 4)
    }

    /// To a row.
    #[inline(always)]
    #[track_caller]
    unsafe fn store<const QUANTISED: bool>(&self, job: &Job, row: GlobalMut<u8>, piece: u32) {
        let bytes = if QUANTISED { 8 } else { 16 };
        let (first, left) = Self::span::<QUANTISED>(job, piece);
        let to = row.offset(first as usize * bytes);
        unroll::<DEPTH>(|j| {
            if (Self::step::<QUANTISED>(j) as u32) < left {
                let v = self.vectors[j];
                if !QUANTISED {
                    to.set_hinted(Self::step::<false>(j) * bytes, B128(v), Streaming);
                } else if j % 2 == 0 {
                    let w = self.vectors[j + 1 - j % 2];
                    to.set_hinted(Self::step::<true>(j) * bytes, B128([v[0], v[1], w[0], w[1]]), Streaming);
                }
            }
        });
    }
}

/// The experts of a token, one for each lane, in dispatch in slots.
#[derive(Clone, Copy)]
struct Experts {
    id: i32,
    weight: f32,
}

impl Experts {
    #[inline(always)]
    #[track_caller]
    unsafe fn load(job: &Job, token: u32, tokens: u32) -> Self {
        let lane = warp::lane_id();
        let mut this = Self { id: -1, weight: 0.0 };
        if lane < job.top_k && token < tokens {
            let at = token as usize * job.top_k as usize + lane as usize;
            this.id = Global::new(job.ids).get(at);
            this.weight = if job.weights.is_null() { 1.0 } else { Global::new(job.weights).get(at) };
        }
        this
    }

    /// As a rank sees them, to its row.
    #[inline(always)]
    #[track_caller]
    unsafe fn store(self, job: &Job, peers: &Peers, mask: u32, rank: u32, row: usize) {
        let lane = warp::lane_id();
        let (ids, weights) = (peers.buffer::<i32>(rank, slot::IDS), peers.buffer::<f32>(rank, slot::WEIGHTS));
        if lane < job.top_k {
            let at = row * job.top_k as usize + lane as usize;
            let there = mask >> rank & 1 != 0;
            // Of an expert that is elsewhere, or is none, any number.
            let local = self.id.wrapping_sub((rank * job.per_rank.get()) as i32);
            ids.set(at, if there { local } else { -1 });
            weights.set(at, if there { self.weight } else { 0.0 });
        }
    }
}

/// The blocks must all be resident; the threads of a block are a multiple of 32. Shared memory: [`shared_bytes`].
#[inline(always)]
pub unsafe fn dispatch<const QUANTISED: bool, const SLOTS: bool>(link: Link, job: Job) {
    if !SLOTS {
        link.prefetch();
        Slice::new(job.tokens).prefetch(&job);
    }
    cuda_std::dependent_launch::wait();
    let routes = |tokens| Routes {
        ids: Global::new(job.ids),
        tokens,
        top_k: job.top_k,
        per_rank: job.per_rank,
        ranks: link.ranks,
    };
    if SLOTS {
        let Some((session, ())) = Session::begin_with(link, 0, true, || ()) else { return };
        let ok = send_slots::<QUANTISED>(&session, &job, &routes(token_count(job.count, job.tokens)));
        session.finish(ok, false);
    } else {
        let mut carver = Carver::new();
        let counts = carver.take::<u32>(MAX_RANKS * MAX_RANKS);
        let before = carver.take::<u32>(MAX_BLOCKS * MAX_RANKS);
        let ring = carver.take_aligned::<u32>(
            if QUANTISED { (thread::block_dim_x() / 32 * STAGES * PIECE / 4) as usize } else { 0 },
            16,
        );
        let at = if QUANTISED { thread::thread_idx_x() / 32 * STAGES * PIECE / 4 } else { 0 };
        let ring = Ring { words: ring.offset(at), address: ring.address(at) + 16 * warp::lane_id(), stage: 0 };
        let routes = routes(token_count(job.count, job.tokens));
        // How many tokens go where.
        let slice = Slice::new(routes.tokens);
        let groups = carver.take_aligned::<u32>(job.tokens.div_ceil(32) as usize * MAX_RANKS * 2, 8);
        let tables = Tables { counts, before, groups };
        let meanwhile = || {
            let mut i = thread::thread_idx_x();
            while i < const { (MAX_RANKS * MAX_RANKS) as u32 } {
                counts.set(i, 0);
                i += thread::block_dim_x();
            }
            let told = Session::counts_of_peer(&link);
            if job.cached != 0 {
                tables.keep(&job, link.ranks, routes.tokens);
                return (told, None);
            }
            (told, slice.vote(&routes, &tables))
        };
        let Some((session, (told, bad))) = Session::begin_with(link, thread::grid_dim_x() - 1, false, meanwhile) else {
            return;
        };
        if let Some(token) = bad {
            session.fail(fault::BAD_ID, link.rank, phase::WORK, token);
        }
        slice.tell(&session, &job, &tables, told);
        let ok = send_compact::<QUANTISED>(&session, &job, &routes, ring, &slice, &tables);
        session.finish(ok && bad.is_none(), false);
    }
}

#[inline(always)]
#[track_caller]
unsafe fn send_slots<const QUANTISED: bool>(session: &Session, job: &Job, routes: &Routes) -> bool {
    let link = &session.link;
    let (warps, lane) = (thread::block_dim_x() / 32, warp::lane_id());
    let places = GlobalMut::new(job.places);
    // Blocks take turns, so that all are busy with few tokens.
    let first = thread::thread_idx_x() / 32 * thread::grid_dim_x() + thread::block_idx_x();
    let mut walk = Walk::new(first, warps * thread::grid_dim_x(), job.pieces.get());
    let load = |walk: Walk| {
        let piece = Piece::load::<QUANTISED>(job, Unit { row: walk.row, piece: walk.piece }, routes.tokens);
        (piece, Experts::load(job, walk.row, routes.tokens))
    };
    // The first piece is under way while the rank waits for the others, whom it has told that it is here: that would wait for loads.
    let peers = Peers::new(link);
    let (mut piece, mut experts) = load(walk);
    if !session.clean() && !session.wait_entry() {
        return false;
    }
    if thread::block_idx_x() == 0 && thread::thread_idx_x() <= link.ranks {
        GlobalMut::new(job.offsets).set(thread::thread_idx_x(), (thread::thread_idx_x() * job.max_tokens) as i32);
    }
    let rank_of = routes.divide();
    let row_bytes = job.hidden as usize * if QUANTISED { 1 } else { 2 };
    let mut ok = true;
    while walk.row < job.max_tokens {
        let token = walk.row;
        if !rank_of.is_fine(experts.id) {
            session.fail(fault::BAD_ID, link.rank, phase::WORK, token);
            ok = false;
        }
        let rank = rank_of.bit(experts.id);
        let mask = warp::reduce(rank, |a, b| a | b);
        let row = link.rank as usize * job.max_tokens as usize + token as usize;
        if walk.piece == 0 {
            for i in 0..link.ranks {
                let d = link.turn(i);
                experts.store(job, &peers, rank, d, row);
            }
            if lane < link.ranks {
                let place = if mask >> lane & 1 != 0 { row as i32 } else { -1 };
                places.set(token as usize * link.ranks as usize + lane as usize, place);
            }
        }
        if mask != 0 {
            let mut scale = 0.0;
            if QUANTISED {
                scale = Piece::scale(piece.quantise(), lane % 8);
            }
            for i in 0..link.ranks {
                let d = link.turn(i);
                if mask >> d & 1 != 0 {
                    piece.store::<QUANTISED>(
                        job,
                        peers.buffer::<u8>(d, slot::ROWS).offset(row * row_bytes),
                        walk.piece,
                    );
                    if QUANTISED {
                        let (group, groups) = (walk.piece * 8 + lane, job.hidden / GROUP);
                        let scales = peers.buffer::<f32>(d, slot::SCALES).offset(row * groups as usize);
                        if lane < 8 && group < groups {
                            scales.set(group, scale);
                        }
                    }
                }
            }
        }
        walk.advance();
        (piece, experts) = load(walk);
    }
    ok
}

/// The pieces of a warp in compact dispatch: of whole rows at first, so that what belongs to a row is done once, of others towards the end, so that
/// all warps end together.
#[derive(Clone, Copy)]
struct Work {
    deal: Deal,
    /// Which it is.
    at: Unit,
    /// One past the last of the unit, in its row.
    end: u32,
    /// Rows that are dealt whole.
    whole: u32,
    pieces: Divisor,
}

impl Work {
    #[inline(always)]
    #[track_caller]
    unsafe fn new(link: &Link, part: &Part, rows: u32, job: &Job) -> Self {
        let deal = Deal::new(link, part.to.trailing_zeros(), part.index, part.count);
        let whole = rows.saturating_sub(job.singles);
        let mut this = Self { deal, at: Unit { row: 0, piece: 0 }, end: 0, whole, pieces: job.pieces };
        this.set(deal.first());
        this
    }

    #[inline(always)]
    #[track_caller]
    unsafe fn set(&mut self, unit: u32) {
        if unit < self.whole {
            (self.at, self.end) = (Unit { row: unit, piece: 0 }, self.pieces.get());
        } else {
            let (row, piece) = self.pieces.div_rem(unit - self.whole);
            (self.at, self.end) = (Unit { row: self.whole + row, piece }, piece + 1);
        }
        if self.end - self.at.piece <= LEAD {
            self.deal.ask();
        }
    }

    #[inline(always)]
    #[track_caller]
    unsafe fn advance(&mut self) {
        if self.at.piece + 1 < self.end {
            self.at.piece += 1;
            if self.end - self.at.piece == LEAD {
                self.deal.ask();
            }
        } else {
            let unit = self.deal.take();
            self.set(unit);
        }
    }
}

/// Pieces before the end of a unit at which a warp asks for the next one: in time, but no earlier, as nobody else can have that then.
const LEAD: u32 = 1;

/// Where a warp's next pieces arrive, `[STAGES, 2048]` bytes, in e4m3: so that registers do not have to hold what is under way.
#[derive(Clone, Copy)]
struct Ring {
    words: Shared<u32>,
    /// The lane's.
    address: u32,
    stage: u32,
}

/// Pieces of a ring.
const STAGES: u32 = 2;
/// Bytes of a piece.
const PIECE: u32 = 32 * DEPTH as u32 * 16;

impl Ring {
    /// Begins to load a piece into the present stage; zeros beyond the end of the row, or the last of `rows`.
    #[inline(always)]
    #[track_caller]
    unsafe fn copy(&self, job: &Job, at: Unit, rows: u32) {
        let (first, left) = Piece::span::<false>(job, at.piece);
        let left = if at.row < rows { left } else { 0 };
        let row = Global::new(job.x).offset(at.row as usize * job.x_stride + first as usize * 8);
        let to = self.address + self.stage * PIECE;
        // The whole piece, in nearly all cases, with fewer instructions.
        if at.row < rows && (at.piece + 1) * (32 * DEPTH as u32) <= job.hidden / 8 {
            unroll::<DEPTH>(|j| cp_async::copy_16(to + 512 * j as u32, row.ptr(256 * j)));
        } else {
            unroll::<DEPTH>(|j| {
                let bytes = if 32 * (j as u32) < left { 16 } else { 0 };
                cp_async::copy_16_zfill(to + 512 * j as u32, row.ptr(256 * j), bytes);
            });
        }
        cp_async::commit_group();
    }

    /// What has arrived there.
    #[inline(always)]
    #[track_caller]
    unsafe fn get(&self) -> Piece {
        let mut vectors = [[0; 4]; DEPTH];
        cp_async::wait_group::<{ STAGES as usize - 1 }>();
        warp::sync_warp(warp::FULL);
        let from = self.words.offset(self.stage * (PIECE / 4) + warp::lane_id() * 8);
        unroll::<DEPTH>(|j| {
            let B128(v) = from.get_as::<B128<u32, 4>>(4 * Piece::step::<true>(j));
            unroll::<4>(|w| vectors[j][w] = v[w]);
        });
        warp::sync_warp(warp::FULL);
        Piece { vectors }
    }
}

/// Values of a scale.
const GROUP: u32 = 128;

/// The place of a set bit: the lowest is number 0.
#[inline(always)]
fn nth_bit(bits: u32, number: u32) -> u32 {
    if bits == u32::MAX {
        return number;
    }
    let (mut place, mut rest) = (0, number);
    unroll::<5>(|i| {
        let width = 16 >> i as u32;
        let low = (bits >> place & ((1 << width) - 1)).count_ones();
        if rest >= low {
            (place, rest) = (place + width, rest - low);
        }
    });
    place
}

/// What a block sends in compact dispatch.
#[derive(Clone, Copy)]
struct Part {
    /// As a mask, the ranks that the block sends to.
    to: u32,
    /// Blocks that do the same, and which of them this one is.
    index: u32,
    count: u32,
}

impl Part {
    /// Of blocks that send to peers, each sends to one and the same, if there are enough: stores to several would wait in line for the
    /// slowest of these. In e4m3 each row would be quantised for each peer.
    #[inline(always)]
    unsafe fn new<const QUANTISED: bool>(job: &Job, link: &Link) -> Self {
        let (block, blocks, own) = (thread::block_idx_x(), thread::grid_dim_x(), job.own_blocks);
        let (all, itself) = ((1u32 << link.ranks) - 1, 1u32 << link.rank);
        let (senders, peers) = (blocks - own, link.ranks - 1);
        if own == 0 {
            Self { to: all, index: block, count: blocks }
        } else if block < own {
            Self { to: itself, index: block, count: own }
        } else if QUANTISED || peers < 2 || senders < peers {
            Self { to: all & !itself, index: block - own, count: senders }
        } else {
            let index = integer::div(block - own, peers);
            let peer = block - own - index * peers;
            Self { to: 1 << link.turn(peer), index, count: integer::div(senders - peer + peers - 1, peers) }
        }
    }
}

/// What a block's shared memory holds of who gets which tokens, in compact dispatch.
#[derive(Clone, Copy)]
struct Tables {
    /// `[MAX_RANKS, MAX_RANKS]`: how many tokens each rank has for each.
    counts: Shared<u32>,
    /// `[MAX_BLOCKS, MAX_RANKS]`: how many this rank's blocks have for each, later where the rows of these begin.
    before: Shared<u32>,
    /// `[groups, MAX_RANKS, 2]`: which of each 32 tokens go to each, and the row of the first there; anything if none go. Until the counts are known
    /// only the votes on the block's own tokens.
    groups: Shared<u32>,
}

impl Tables {
    /// Which of 32 tokens go to rank `d`, and the row of the first.
    #[inline(always)]
    #[track_caller]
    unsafe fn group(&self, group: u32, d: u32) -> (u32, u32) {
        let B64([vote, first]) = self.groups.get_as((group * MAX_RANKS as u32 + d) * 2);
        (vote, first)
    }

    #[inline(always)]
    #[track_caller]
    unsafe fn set_group(&self, group: u32, d: u32, vote: u32, first: u32) {
        self.groups.set_as((group * MAX_RANKS as u32 + d) * 2, B64([vote, first]));
    }

    /// The row of a token at rank `d`, or -1.
    #[inline(always)]
    #[track_caller]
    unsafe fn place(&self, token: u32, d: u32) -> i32 {
        let (vote, first) = self.group(token / 32, d);
        let bit = 1u32 << (token % 32);
        if vote & bit != 0 { (first + (vote & (bit - 1)).count_ones()) as i32 } else { -1 }
    }

    /// Fills the groups from the places that an earlier dispatch has kept.
    #[inline(always)]
    #[track_caller]
    unsafe fn keep(&self, job: &Job, ranks: u32, tokens: u32) {
        let lane = warp::lane_id();
        let mut group = thread::thread_idx_x() / 32;
        while 32 * group < tokens {
            let token = 32 * group + lane;
            for d in 0..ranks {
                let mut place = -1;
                if token < tokens {
                    place = GlobalMut::new(job.places).get(token as usize * ranks as usize + d as usize);
                }
                let vote = warp::warp_vote_ballot(warp::FULL, place >= 0);
                let first = warp::shfl_idx(place, vote.trailing_zeros() % 32) as u32;
                if lane == d {
                    self.set_group(group, d, vote, first);
                }
            }
            group += thread::block_dim_x() / 32;
        }
    }
}

/// The tokens that a block counts, and whose experts it tells.
#[derive(Clone, Copy)]
struct Slice {
    /// Of a block, a multiple of 32, not 0.
    each: u32,
    first: u32,
    /// One past the last.
    last: u32,
}

impl Slice {
    #[inline(always)]
    unsafe fn new(tokens: u32) -> Self {
        let (block, blocks) = (thread::block_idx_x(), thread::grid_dim_x());
        let each = integer::div(tokens + blocks - 1, blocks).next_multiple_of(32).max(32);
        let first = (block * each).min(tokens);
        Self { each, first, last: (first + each).min(tokens) }
    }

    /// Has experts and weights brought into the second-level cache, a line by each thread: nothing is read, so that the kernel before may still be
    /// writing them.
    #[inline(always)]
    unsafe fn prefetch(&self, job: &Job) {
        let line = self.first * job.top_k / 32 + thread::thread_idx_x();
        if 32 * line < self.last * job.top_k {
            vec::prefetch_l2(job.ids.wrapping_add(32 * line as usize));
            if !job.weights.is_null() {
                vec::prefetch_l2(job.weights.wrapping_add(32 * line as usize));
            }
        }
    }

    /// 32 tokens each.
    #[inline(always)]
    fn groups(&self) -> u32 {
        (self.last - self.first).div_ceil(32)
    }

    /// Which tokens of each group go to which rank, as the votes say after a barrier. One whose experts are not all there, if the thread saw any.
    #[inline(always)]
    #[track_caller]
    unsafe fn vote(&self, routes: &Routes, tables: &Tables) -> Option<u32> {
        let lane = warp::lane_id();
        let rank_of = routes.divide();
        let eight = routes.top_k == 8 && (routes.ids.ptr(0usize) as usize).is_multiple_of(16);
        let mut bad = None;
        let mut group = thread::thread_idx_x() / 32;
        while group < self.groups() {
            let token = self.first + 32 * group + lane;
            let at = token.min(self.last - 1);
            let (mut mask, mut fine) = (0, true);
            if eight {
                unroll::<2>(|h| {
                    let B128(four) = routes.ids.get_as::<B128<i32, 4>>(at as usize * 8 + 4 * h);
                    unroll::<4>(|i| {
                        let id: i32 = four[i];
                        mask |= rank_of.bit(id);
                        fine &= rank_of.is_fine(id);
                    });
                });
            } else {
                for k in 0..routes.top_k {
                    let id = routes.ids.get(at as usize * routes.top_k as usize + k as usize);
                    mask |= rank_of.bit(id);
                    fine &= rank_of.is_fine(id);
                }
            }
            if !fine {
                bad = Some(at);
            }
            let mut vote = 0;
            for d in 0..routes.ranks {
                let there = warp::warp_vote_ballot(warp::FULL, token < self.last && mask >> d & 1 != 0);
                vote = if lane == d { there } else { vote };
            }
            if lane < MAX_RANKS as u32 {
                tables.set_group(self.first / 32 + group, lane, vote, 0);
            }
            group += thread::block_dim_x() / 32;
        }
        bad
    }

    /// Tells the other blocks, and all ranks how many they are. In a dispatch that keeps its routing block 0 tells what was kept.
    #[inline(always)]
    #[track_caller]
    unsafe fn tell(&self, session: &Session, job: &Job, tables: &Tables, counts: GlobalMut<u64>) {
        let lane = warp::lane_id();
        let words = GlobalMut::new(job.votes).offset(self.first / 32 * 16);
        let mut d = thread::thread_idx_x() / 32;
        while d < session.link.ranks {
            let (mut first, mut sum) = (0, 0);
            while first < self.groups() && job.cached == 0 {
                let group = first + lane;
                let vote = if group < self.groups() { tables.group(self.first / 32 + group, d).0 } else { 0 };
                let with = sum + warp::scan(vote.count_ones(), |a, b| a + b);
                if group < self.groups() {
                    words.store(group * 16 + d, session.flag(vote), Device, Relaxed);
                    words.store(group * 16 + 8 + d, session.flag(with - vote.count_ones()), Device, Relaxed);
                }
                sum = warp::shfl_idx(with, 31);
                first += 32;
            }
            if job.cached != 0 && thread::block_idx_x() == 0 {
                sum = GlobalMut::new(job.totals).get(d);
            }
            session.tell_count(counts, d, sum);
            d += thread::block_dim_x() / 32;
        }
    }

    /// Experts and weights, to the ranks that get the tokens. Rows of a group lie one after another, so that this is a stream, stored 32 values at a
    /// time from where a line begins: each line that is stored to has a header on the link, which for one row's values is as long as they.
    #[inline(always)]
    #[track_caller]
    unsafe fn experts<const LINES: usize>(
        &self,
        job: &Job,
        link: &Link,
        routes: &Routes,
        tables: &Tables,
        peers: &Peers,
    ) {
        let (lane, warps, ranks, top_k) = (warp::lane_id(), thread::block_dim_x() / 32, link.ranks, job.top_k);
        let rank_of = routes.divide();
        let (rows_of_32, rest_of_32) = (integer::div(32, top_k), integer::rem(32, top_k));
        // The first warps write places.
        let mut task = warps - 1 - thread::thread_idx_x() / 32;
        while task < self.groups() * ranks {
            let group = integer::div(task, ranks);
            let d = link.turn(task - group * ranks);
            task += warps;
            let begin = self.first + 32 * group;
            let (vote, first) = tables.group(begin / 32, d);
            let (ids, weights) = (peers.buffer::<i32>(d, slot::IDS), peers.buffer::<f32>(d, slot::WEIGHTS));
            let from = first as usize * top_k as usize;
            let end = vote.count_ones() * top_k;
            // Which value the lane has, from the first row's, before which it may begin; and of which row and expert it or, then, the next is.
            let mut at = lane as i32 - (from % 32) as i32;
            let start = if at < 0 { at + 32 } else { at } as u32;
            let mut row = integer::div(start, top_k);
            let mut k = start - row * top_k;
            while (at - lane as i32) < end as i32 {
                let mut values = [(0, 0.0); LINES];
                let mut ats = [0; LINES];
                unroll::<LINES>(|i| {
                    ats[i] = at;
                    if at >= 0 && (at as u32) < end {
                        let token = begin + nth_bit(vote, row);
                        let from = token as usize * top_k as usize + k as usize;
                        let weight = if job.weights.is_null() { 1.0 } else { Global::new(job.weights).get(from) };
                        values[i] = (Global::new(job.ids).get(from), weight);
                    }
                    if at >= 0 {
                        (row, k) = (row + rows_of_32, k + rest_of_32);
                        if k >= top_k {
                            (row, k) = (row + 1, k - top_k);
                        }
                    }
                    at += 32;
                });
                unroll::<LINES>(|i| {
                    if ats[i] >= 0 && (ats[i] as u32) < end {
                        let (id, weight) = values[i];
                        let there = rank_of.bit(id) >> d & 1 != 0;
                        let to = from + ats[i] as usize;
                        ids.set(to, if there { id - (d * job.per_rank.get()) as i32 } else { -1 });
                        weights.set(to, if there { weight } else { 0.0 });
                    }
                });
            }
        }
    }

    /// Writes where the tokens go.
    #[inline(always)]
    #[track_caller]
    unsafe fn places(&self, job: &Job, link: &Link, tables: &Tables) {
        let lane = warp::lane_id();
        let places = GlobalMut::new(job.places);
        let mut group = thread::thread_idx_x() / 32;
        while group < self.groups() {
            let token = self.first + 32 * group + lane;
            for d in 0..link.ranks {
                if token < self.last {
                    places.set(token as usize * link.ranks as usize + d as usize, tables.place(token, d));
                }
            }
            group += thread::block_dim_x() / 32;
        }
    }
}

#[inline(always)]
#[track_caller]
unsafe fn send_compact<const QUANTISED: bool>(
    session: &Session,
    job: &Job,
    routes: &Routes,
    mut ring: Ring,
    slice: &Slice,
    tables: &Tables,
) -> bool {
    let Tables { counts, before, .. } = *tables;
    let link = &session.link;
    let (tid, lane) = (thread::thread_idx_x(), warp::lane_id());
    let (block, blocks) = (thread::block_idx_x(), thread::grid_dim_x());
    let cached = job.cached != 0;
    let part = Part::new::<QUANTISED>(job, link);
    let mut work = Work::new(link, &part, routes.tokens, job);
    let load = |at: Unit| Piece::load::<QUANTISED>(job, at, routes.tokens);
    let (places, words) = (GlobalMut::new(job.places), GlobalMut::new(job.votes));
    // The votes on all tokens, a group and rank for each thread, the last first: those wait for no counts. Which block has counted it comes with it, as
    // that takes a while.
    let entries = if cached { 0 } else { routes.tokens.div_ceil(32) * link.ranks };
    let look_up = |i: u32| {
        let (mut found, mut group, mut d, mut by) = ([session.flag(0); 2], 0, 0, 0);
        if i < entries {
            group = integer::div(i, link.ranks);
            d = i - group * link.ranks;
            by = integer::div(32 * group, slice.each);
            unroll::<2>(|h| found[h] = words.load(group * 16 + d + 8 * h as u32, Device, Relaxed));
        }
        (found, group, d, by)
    };
    let mut entry = thread::block_dim_x() - 1 - tid;
    let peers = Peers::new(link);
    let mut here = work.at;
    // The first pieces are under way while the rank waits for the others.
    let mut piece = Piece { vectors: [[0; 4]; DEPTH] };
    if QUANTISED {
        ring.copy(job, here, routes.tokens);
        ring.stage = 1;
        work.advance();
        ring.copy(job, work.at, routes.tokens);
        ring.stage = 0;
    }
    if !QUANTISED {
        work.advance();
    }
    let mut ahead = work.at;
    let mut scale = 0.0;
    let mut quantise = || {
        let mut piece = ring.get();
        work.advance();
        ring.copy(job, work.at, routes.tokens);
        scale = piece.quantise();
        piece
    };
    // Those that have no counts to wait for quantise meanwhile.
    let waits = session.waits_for_counts(tid / 32 * 32);
    if QUANTISED && !waits {
        piece = quantise();
    }
    let bad = !session.wait_counts(counts, before);
    let mut looked = look_up(entry);
    if thread::sync_threads_or(bad) {
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
    // Where the rows of each block's tokens begin.
    let mut d = tid / 32;
    while d < link.ranks && !cached {
        let (mut first, mut sum) = (0, warp::shfl_idx(base, d));
        while first < blocks {
            let at = (first + lane) * MAX_RANKS as u32 + d;
            let n = if first + lane < blocks { before.get(at) } else { 0 };
            let with = sum + warp::scan(n, |a, b| a + b);
            if first + lane < blocks {
                before.set(at, with - n);
            }
            sum = warp::shfl_idx(with, 31);
            first += 32;
        }
        d += thread::block_dim_x() / 32;
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

    thread::sync_threads();
    while entry < entries {
        let (found, group, d, by) = looked;
        // The counts were there, so these come.
        if (found[0] >> 32) as u32 != session.epoch() || (found[1] >> 32) as u32 != session.epoch() {
            looked = look_up(entry);
            continue;
        }
        let first = before.get(by * MAX_RANKS as u32 + d);
        tables.set_group(group, d, found[0] as u32, first + found[1] as u32);
        entry += thread::block_dim_x();
        looked = look_up(entry);
    }
    thread::sync_threads();
    // What combine looks at: now, as the end waits for all that was stored, the rows last.
    if !cached {
        slice.places(job, link, tables);
    }
    if QUANTISED {
        slice.experts::<3>(job, link, routes, tables, &peers);
    } else {
        slice.experts::<1>(job, link, routes, tables, &peers);
        piece = load(here);
    }
    if QUANTISED && waits {
        piece = quantise();
    }
    let row_bytes = job.hidden * if QUANTISED { 1 } else { 2 };
    let mut row = u32::MAX;
    // Lane `r`: where rank `r` gets the row and its scales. Which ranks do.
    let (mut targets, mut there) = ([0; 2], 0);
    let groups = job.hidden / GROUP;
    let (mut scales, mut scales_from) = ([0.0; 2], 0);
    while here.row < routes.tokens {
        if here.row != row {
            row = here.row;
            scales_from = here.piece;
            let mut place = -1;
            if lane < link.ranks && part.to >> lane & 1 != 0 {
                place = tables.place(row, lane);
            }
            if place >= 0 {
                targets[0] = peers.bases[0] + place as u64 * row_bytes as u64;
                if QUANTISED {
                    targets[1] = peers.bases[1] + place as u64 * groups as u64 * 4;
                }
            }
            there = warp::warp_vote_ballot(warp::FULL, place >= 0);
        }
        // Scales of eight pieces together, or of as many as there are, two in a lane.
        let mut whole = false;
        if QUANTISED {
            let pair = [Piece::scale(scale, lane % 4 * 2), Piece::scale(scale, lane % 4 * 2 + 1)];
            unroll::<2>(|i| scales[i] = if lane / 4 == here.piece % 8 { pair[i] } else { scales[i] });
            whole = here.piece % 8 == 7 || ahead.row != row || ahead.piece != here.piece + 1;
        }
        for i in 0..link.ranks {
            let d = link.turn(i);
            if there >> d & 1 != 0 {
                piece.store::<QUANTISED>(job, GlobalMut::new(warp::shfl_idx(targets[0], d) as *mut u8), here.piece);
                if whole {
                    let row = GlobalMut::new(warp::shfl_idx(targets[1], d) as *mut f32);
                    let pair = here.piece / 8 * 32 + lane;
                    if pair >= scales_from * 4 && pair < (here.piece + 1) * 4 {
                        if groups.is_multiple_of(2) && 2 * pair < groups {
                            row.set_as(2 * pair, B64(scales));
                        } else {
                            unroll::<2>(|i| {
                                if 2 * pair + (i as u32) < groups {
                                    row.set(2 * pair + i as u32, scales[i]);
                                }
                            });
                        }
                    }
                }
            }
        }
        if whole {
            scales_from = ahead.piece;
        }
        here = ahead;
        if QUANTISED {
            ahead = work.at;
            ring.stage ^= 1;
            piece = ring.get();
            work.advance();
            ring.copy(job, work.at, routes.tokens);
            scale = piece.quantise();
        } else {
            work.advance();
            ahead = work.at;
            piece = load(here);
        }
    }
    if QUANTISED {
        cp_async::wait_group::<0>();
    }
    // All blocks of all ranks run, as they have told their counts, so that nobody needs the room which the next kernel takes.
    cuda_std::dependent_launch::launch_dependents();

    let mut end = 0;
    for s in 0..link.ranks {
        end += counts.get(s * MAX_RANKS as u32 + link.rank);
    }
    if block == 0 && tid == 0 {
        let offsets = GlobalMut::new(job.offsets);
        let mut all = 0;
        for s in 0..link.ranks {
            offsets.set(s, all as i32);
            all += counts.get(s * MAX_RANKS as u32 + link.rank);
        }
        offsets.set(link.ranks, all as i32);
    }
    if block == 0 && tid < link.ranks {
        GlobalMut::new(job.totals).set(tid, counts.get(link.rank * MAX_RANKS as u32 + tid));
    }
    if !cached {
        // Nothing goes anywhere from beyond the last token, should somebody combine more.
        let mut i = routes.tokens * link.ranks + block * thread::block_dim_x() + tid;
        while i < job.max_tokens * link.ranks {
            places.set(i, -1);
            i += blocks * thread::block_dim_x();
        }
    }
    // Rows beyond the last have no experts.
    let ids = link.buffer::<i32>(link.rank, slot::IDS);
    let mut i = end * job.top_k + block * thread::block_dim_x() + tid;
    while i < job.capacity * job.top_k {
        ids.set(i, -1);
        i += blocks * thread::block_dim_x();
    }
    true
}

entries! {
    /// Arguments of every `ep_dispatch_*` entry; see [`dispatch`].
    pub struct Args(link: Link, job: Job);
    ep_dispatch_bf16_compact {} [1024] => dispatch::<false, false>;
    ep_dispatch_bf16_slots {} [512, 1] => dispatch::<false, true>;
    ep_dispatch_e4m3_compact {} [640] => dispatch::<true, false>;
    ep_dispatch_e4m3_slots {} [512, 1] => dispatch::<true, true>;
}
