//! Rows back from the ranks of their experts, added up.
//!
//! A token's rows are read from the memory of the ranks that have them, in the order of the ranks, added in f32, and rounded once.
//! Reading needs no buffer and no second pass. Before, all ranks must have written their rows (the entry); after, all must have
//! read them, so that they may be overwritten (the exit).
//!
//! Warps take pieces of [`DEPTH`] vectors a lane. What counts is how many bytes are under way, which registers must hold: of two
//! rows both are loaded before they are added; of more, and with biases, the next is under way while the one before is added to
//! sums, [`FEW`] vectors at a time.

use super::{Link, Session, Walk, slot, token_count};
use cuda_std::shared::Carver;
use cuda_std::vec::{B128, SecondLevel, Streaming};
use cuda_std::{Global, GlobalMut, bf16, entries, float, integer, mbarrier, struct_param, thread, tma, unroll, warp};

/// Vectors of eight values that a lane has under way from each of two ranks, if there are no more.
pub const DEPTH: usize = 7;
/// As many, if there are more, or biases: sums stay in registers, too.
const FEW: usize = 3;

/// The most bytes of a row that the copy engine moves at once.
pub const CHUNK: usize = 16384;
/// Chunks of rows in shared memory, if the copy engine loads them; at least as many as ranks.
pub const STAGES: usize = 12;
/// Dynamic shared memory of `ep_combine_bf16_bulk`.
pub const BULK_SHARED_BYTES: u32 = (STAGES * (CHUNK + 16)) as u32;

/// What is added up, and how.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Job {
    /// `[tokens, hidden]`, rows `out_stride` apart.
    pub out: *mut bf16,
    /// `[max_tokens, ranks]`, as dispatch wrote it.
    pub places: *const i32,
    /// `[tokens, ranks]`, what a rank's row is multiplied by; or null.
    pub weights: *const f32,
    /// `[tokens, hidden]`, contiguous, added after the rows; or null.
    pub bias: *const bf16,
    /// Another, added after it; or null.
    pub bias2: *const bf16,
    /// How many tokens there are, if not `tokens`; or null.
    pub count: *const u32,
    /// In elements.
    pub out_stride: usize,
    /// At most `max_tokens`.
    pub tokens: u32,
    /// A multiple of 8.
    pub hidden: u32,
}
struct_param!(Job);

type Words<const D: usize> = [[u32; 4]; D];

/// Vectors of a row, `first` and every 32nd after it, before `end`.
#[inline(always)]
#[track_caller]
unsafe fn load<const D: usize, const PEER: bool>(row: Global<bf16>, first: u32, end: u32) -> Words<D> {
    let mut words = [[0; 4]; D];
    unroll::<D>(|j| {
        let i = first + 32 * j as u32;
        if i < end {
            // What peers wrote is not read-only for the life of the launch.
            let B128(v) = if PEER {
                row.get_hinted::<B128<u32, 4>>(i as usize * 8, SecondLevel)
            } else {
                row.get_hinted::<B128<u32, 4>>(i as usize * 8, Streaming)
            };
            unroll::<4>(|w| words[j][w] = v[w]);
        }
    });
    words
}

#[inline(always)]
fn add_vector(sums: &mut [f32; 8], words: [u32; 4], weight: f32) {
    unroll::<4>(|w| {
        let (low, high) = (f32::from_bits(words[w] << 16), f32::from_bits(words[w] & 0xffff_0000));
        sums[2 * w] = float::fma(weight, low, sums[2 * w]);
        sums[2 * w + 1] = float::fma(weight, high, sums[2 * w + 1]);
    });
}

#[inline(always)]
fn add(sums: &mut [[f32; 8]; FEW], words: Words<FEW>, weight: f32) {
    unroll::<FEW>(|j| add_vector(&mut sums[j], words[j], weight));
}

/// The blocks must all be resident; the threads of a block are a multiple of 32, with `BULK` at least 64.
#[inline(always)]
pub unsafe fn combine<const BULK: bool>(link: Link, job: Job) {
    let Some(session) = Session::begin(link) else { return };
    if BULK {
        let ok = sum_bulk(&session, &job);
        session.finish(ok, true);
    } else {
        let ok = session.enter();
        if ok {
            sum(&link, &job);
        }
        session.finish(ok, true);
    }
}

/// How a row is cut into chunks for the copy engine.
#[derive(Clone, Copy)]
struct Chunks {
    count: u32,
    /// In vectors, but for the last.
    size: u32,
}

impl Chunks {
    #[inline(always)]
    unsafe fn new(vectors: u32) -> Self {
        let count = vectors.div_ceil(const { (CHUNK / 16) as u32 });
        Self { count, size: integer::div(vectors + count - 1, count) }
    }
}

/// One warp lets the copy engine load rows, in chunks, lane `r` those of rank `r`; the others add them up from shared memory.
/// Whether peers came as far.
#[inline(always)]
#[track_caller]
unsafe fn sum_bulk(session: &Session, job: &Job) -> bool {
    let link = &session.link;
    let mut carver = Carver::new();
    let ring = carver.take_aligned::<u8>(STAGES * CHUNK, 128);
    let full = carver.take::<u64>(STAGES);
    let empty = carver.take::<u64>(STAGES);
    let (tid, lane) = (thread::thread_idx_x(), warp::lane_id());
    let (warp, adders) = (tid / 32, thread::block_dim_x() / 32 - 1);
    if tid == 0 {
        unroll::<STAGES>(|i| {
            mbarrier::init(full.address(i), 1);
            mbarrier::init(empty.address(i), adders);
        });
        mbarrier::fence_init();
    }
    let tokens = token_count(job.count, job.tokens);
    let (block, blocks) = (thread::block_idx_x(), thread::grid_dim_x());
    let vectors = job.hidden / 8;
    let chunks = Chunks::new(vectors);
    let (places, ranks) = (Global::new(job.places), link.ranks as usize);
    let place = |token: u32| {
        if lane < link.ranks && token < tokens { places.get(token as usize * ranks + lane as usize) } else { -1 }
    };
    let mut token = block;
    let mut next = place(token);
    if !session.enter() {
        return false;
    }
    // Chunks that were in shared memory so far.
    let mut used = 0;
    if warp == 0 {
        let rows =
            if lane < link.ranks { link.buffer::<u8>(lane, slot::RESULTS).ptr(0usize) } else { core::ptr::null_mut() };
        tma::fence_async_all();
        while token < tokens {
            let row = next;
            next = place(token + blocks);
            let there = warp::warp_vote_ballot(warp::FULL, row >= 0);
            for c in 0..chunks.count {
                if row >= 0 {
                    let begin = c * chunks.size;
                    let bytes = chunks.size.min(vectors - begin) * 16;
                    let n = used + (there & ((1 << lane) - 1)).count_ones();
                    let stage = n % STAGES as u32;
                    mbarrier::wait_parity(empty.address(stage), n / STAGES as u32 % 2 ^ 1);
                    let from =
                        rows.cast_const().wrapping_add(row as usize * job.hidden as usize * 2 + begin as usize * 16);
                    mbarrier::arrive_expect_tx(full.address(stage), bytes);
                    tma::copy_bulk(ring.address(stage * CHUNK as u32), from, bytes, full.address(stage));
                }
                used += there.count_ones();
            }
            token += blocks;
        }
    } else {
        let (weights, out) = (Global::new(job.weights), GlobalMut::new(job.out));
        let weight = |token: u32| {
            let has = lane < link.ranks && token < tokens && !job.weights.is_null();
            if has { weights.get(token as usize * ranks + lane as usize) } else { 1.0 }
        };
        let mut next_weight = weight(token);
        while token < tokens {
            let (row, factor) = (next, next_weight);
            next = place(token + blocks);
            next_weight = weight(token + blocks);
            let there = warp::warp_vote_ballot(warp::FULL, row >= 0);
            for c in 0..chunks.count {
                let begin = c * chunks.size;
                let end = chunks.size.min(vectors - begin);
                let mut v = tid - 32;
                while v - lane < end {
                    let mut sums = [0.0; 8];
                    for d in 0..link.ranks {
                        let factor = warp::shfl_idx(factor, d);
                        if there >> d & 1 != 0 {
                            let n = used + (there & ((1 << d) - 1)).count_ones();
                            let stage = n % STAGES as u32;
                            mbarrier::wait_parity(full.address(stage), n / STAGES as u32 % 2);
                            if v < end {
                                let B128(words) = ring.get_as::<B128<u32, 4>>(stage * CHUNK as u32 + v * 16);
                                add_vector(&mut sums, words, factor);
                            }
                        }
                    }
                    if v < end {
                        let at = (begin + v) as usize * 8;
                        let mut add_bias = |bias: *const bf16| {
                            if !bias.is_null() {
                                let row = Global::new(bias).offset(token as usize * job.hidden as usize);
                                let B128(words) = row.get_hinted::<B128<u32, 4>>(at, Streaming);
                                add_vector(&mut sums, words, 1.0);
                            }
                        };
                        add_bias(job.bias);
                        add_bias(job.bias2);
                        let to = out.offset(token as usize * job.out_stride);
                        to.set_hinted(at, B128::<bf16, 8>::from_f32(sums), Streaming);
                    }
                    v += adders * 32;
                }
                // The warp has read all its vectors. It may have none, but waits for the phase to begin before it ends its part of it.
                warp::sync_warp(warp::FULL);
                if lane < there.count_ones() {
                    let (stage, phase) = ((used + lane) % STAGES as u32, (used + lane) / STAGES as u32);
                    mbarrier::wait_parity(full.address(stage), phase % 2);
                    mbarrier::arrive(empty.address(stage));
                }
                used += there.count_ones();
            }
            token += blocks;
        }
    }
    true
}

#[inline(always)]
#[track_caller]
unsafe fn sum(link: &Link, job: &Job) {
    let tokens = token_count(job.count, job.tokens);
    let (lane, ranks) = (warp::lane_id(), link.ranks as usize);
    let (blocks, warps) = (thread::grid_dim_x(), thread::block_dim_x() / 32);
    let count = job.hidden / 8;
    let piece = 32 * DEPTH as u32;
    let pieces = count.div_ceil(piece);
    let (places, weights) = (Global::new(job.places), Global::new(job.weights));
    let out = GlobalMut::new(job.out);
    let biased = !job.bias.is_null() || !job.bias2.is_null();
    let mut walk = Walk::new(thread::thread_idx_x() / 32 * blocks + thread::block_idx_x(), blocks * warps, pieces);
    while walk.row < tokens {
        let token = walk.row;
        let begin = walk.piece * piece;
        let end = count.min(begin + piece);
        let mut place = -1;
        let mut weight = 1.0;
        if lane < link.ranks {
            place = places.get(token as usize * ranks + lane as usize);
            if !job.weights.is_null() {
                weight = weights.get(token as usize * ranks + lane as usize);
            }
        }
        let there = warp::warp_vote_ballot(warp::FULL, place >= 0);
        let row = |d: u32| {
            let place = warp::shfl_idx(place, d);
            let rows = link.buffer::<bf16>(d, slot::RESULTS);
            Global::new(rows.ptr(place as usize * job.hidden as usize).cast_const())
        };
        let to = out.offset(token as usize * job.out_stride);
        if there.count_ones() <= 2 && !biased {
            // Both rows are under way before either is looked at, and sums live for a moment only.
            let (a, b) = (there.trailing_zeros() & 31, 31 - (there | 1).leading_zeros());
            let (wa, wb) = (warp::shfl_idx(weight, a), warp::shfl_idx(weight, b));
            let (mut x, mut y) = ([[0; 4]; DEPTH], [[0; 4]; DEPTH]);
            if there != 0 {
                x = load::<DEPTH, true>(row(a), begin + lane, end);
            }
            if a != b && there != 0 {
                y = load::<DEPTH, true>(row(b), begin + lane, end);
            }
            unroll::<DEPTH>(|j| {
                let i = begin + lane + 32 * j as u32;
                if i < end {
                    let mut sums = [0.0; 8];
                    add_vector(&mut sums, x[j], wa);
                    if a != b {
                        add_vector(&mut sums, y[j], wb);
                    }
                    to.set_hinted(i as usize * 8, B128::<bf16, 8>::from_f32(sums), Streaming);
                }
            });
        } else {
            let mut first = begin + lane;
            while first - lane < end {
                let mut sums = [[0.0; 8]; FEW];
                let mut pending = [[0; 4]; FEW];
                let mut factor = 0.0;
                for d in 0..link.ranks {
                    let w = warp::shfl_idx(weight, d);
                    if there >> d & 1 != 0 {
                        let next = load::<FEW, true>(row(d), first, end);
                        // Nothing is pending before the first: zeros, times zero.
                        add(&mut sums, pending, factor);
                        pending = next;
                        factor = w;
                    }
                }
                add(&mut sums, pending, factor);
                let shift = token as usize * job.hidden as usize;
                if !job.bias.is_null() {
                    let bias = Global::new(job.bias).offset(shift);
                    add(&mut sums, load::<FEW, false>(bias, first, end), 1.0);
                }
                if !job.bias2.is_null() {
                    let bias = Global::new(job.bias2).offset(shift);
                    add(&mut sums, load::<FEW, false>(bias, first, end), 1.0);
                }
                unroll::<FEW>(|j| {
                    let i = first + 32 * j as u32;
                    if i < end {
                        to.set_hinted(i as usize * 8, B128::<bf16, 8>::from_f32(sums[j]), Streaming);
                    }
                });
                first += 32 * FEW as u32;
            }
        }
        walk.advance();
    }
}

entries! {
    /// Arguments of `ep_combine`; see [`combine`].
    pub struct Args(link: Link, job: Job);
    ep_combine_bf16 {} [640] => combine::<false>;
    ep_combine_bf16_bulk {} [1024; Sm90a] => combine::<true>;
}
