//! Rows back from the ranks of their experts, added up.
//!
//! A token's rows are read from the memory of the ranks that have them, in the order of the ranks, added in f32, and rounded once.
//! Reading needs no buffer and no second pass. Before, all ranks must have written their rows (the entry); after, all must have
//! read them, so that they may be overwritten (the exit).
//!
//! Warps take pieces of [`DEPTH`] vectors a lane. The rows of the next rank are under way while those of the one before are
//! added.

use super::{Link, Session, slot, token_count};
use cuda_std::vec::{B128, SecondLevel, Streaming};
use cuda_std::{Global, GlobalMut, bf16, entries, float, integer, struct_param, thread, unroll, warp};

/// Vectors of eight values that a lane has under way from each of two ranks.
pub const DEPTH: usize = 4;

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

type Words = [[u32; 4]; DEPTH];

/// Vectors of a row, `first` and every 32nd after it, of `count`.
#[inline(always)]
#[track_caller]
unsafe fn load<const PEER: bool>(row: Global<bf16>, first: u32, count: u32) -> Words {
    let mut words = [[0; 4]; DEPTH];
    unroll::<DEPTH>(|j| {
        let i = first + 32 * j as u32;
        if i < count {
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
fn add(sums: &mut [[f32; 8]; DEPTH], words: Words, weight: f32) {
    unroll::<DEPTH>(|j| {
        unroll::<4>(|w| {
            let (low, high) = (f32::from_bits(words[j][w] << 16), f32::from_bits(words[j][w] & 0xffff_0000));
            sums[j][2 * w] = float::fma(weight, low, sums[j][2 * w]);
            sums[j][2 * w + 1] = float::fma(weight, high, sums[j][2 * w + 1]);
        });
    });
}

/// The blocks must all be resident; the threads of a block are a multiple of 32.
#[inline(always)]
pub unsafe fn combine(link: Link, job: Job) {
    let Some(session) = Session::begin(link) else { return };
    let ok = session.enter();
    if ok {
        sum(&link, &job);
    }
    session.finish(ok, true);
}

#[inline(always)]
#[track_caller]
unsafe fn sum(link: &Link, job: &Job) {
    let tokens = token_count(job.count, job.tokens);
    let (lane, ranks) = (warp::lane_id(), link.ranks as usize);
    let (blocks, warps) = (thread::grid_dim_x(), thread::block_dim_x() / 32);
    let count = job.hidden / 8;
    let pieces = count.div_ceil(32 * DEPTH as u32);
    let (places, weights) = (Global::new(job.places), Global::new(job.weights));
    let out = GlobalMut::new(job.out);
    let mut unit = thread::thread_idx_x() / 32 * blocks + thread::block_idx_x();
    while unit < tokens * pieces {
        let token = integer::div(unit, pieces);
        let first = (unit - token * pieces) * (32 * DEPTH as u32) + lane;
        let mut place = -1;
        let mut weight = 1.0;
        if lane < link.ranks {
            place = places.get(token as usize * ranks + lane as usize);
            if !job.weights.is_null() {
                weight = weights.get(token as usize * ranks + lane as usize);
            }
        }
        let mut sums = [[0.0; 8]; DEPTH];
        let mut pending = [[0; 4]; DEPTH];
        let mut factor = 0.0;
        let mut some = false;
        for d in 0..link.ranks {
            let row = warp::shfl_idx(place, d);
            let w = warp::shfl_idx(weight, d);
            if row >= 0 {
                let rows = link.buffer::<bf16>(d, slot::RESULTS);
                let next = load::<true>(Global::new(rows.ptr(row as usize * job.hidden as usize)), first, count);
                if some {
                    add(&mut sums, pending, factor);
                }
                pending = next;
                factor = w;
                some = true;
            }
        }
        if some {
            add(&mut sums, pending, factor);
        }
        if !job.bias.is_null() {
            add(&mut sums, load::<false>(Global::new(job.bias).offset(token as usize * job.hidden as usize), first, count), 1.0);
        }
        if !job.bias2.is_null() {
            add(&mut sums, load::<false>(Global::new(job.bias2).offset(token as usize * job.hidden as usize), first, count), 1.0);
        }
        unroll::<DEPTH>(|j| {
            let i = first + 32 * j as u32;
            if i < count {
                let v = B128::<bf16, 8>::from_f32(sums[j]);
                out.set_hinted(token as usize * job.out_stride + i as usize * 8, v, Streaming);
            }
        });
        unit += blocks * warps;
    }
}

entries! {
    /// Arguments of `ep_combine`; see [`combine`].
    pub struct Args(link: Link, job: Job);
    ep_combine_bf16 {} [512] => combine;
}
