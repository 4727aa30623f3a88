//! Balance without losses: how often experts are chosen, and the bias that makes those chosen too often less likely.
//!
//! [`histogram`] counts in shared memory, a block for some thousand ids, and adds what it has to the counters in memory, which
//! may run on over many batches. Sums of integers have no order, so the result does not depend on timing.
//!
//! [`update_bias`] moves each expert's bias a fixed step towards the mean load. Source: Wang et al., *Auxiliary-Loss-Free Load
//! Balancing Strategy for Mixture-of-Experts*, 2024, as DeepSeek-V3 (2024) uses it.

use crate::operand;
use cuda_std::atomic::{Block, Device, Relaxed};
use cuda_std::{Global, GlobalMut, dependent_launch, entries, shared, thread, unroll, warp};

/// Threads of a block of [`histogram`].
pub const THREADS: usize = 512;
/// Ids of a thread.
const EACH: usize = 8;
/// Ids of a block.
pub const CHUNK: usize = THREADS * EACH;
/// Threads of [`update_bias`].
pub const BIAS_THREADS: usize = 1024;

/// Adds how often each id below `experts` is among the `n` of `ids` to `counts`, `[experts]`. Grid: a block for every [`CHUNK`]
/// ids; block: [`THREADS`]; shared memory: 4 bytes an expert.
#[inline(always)]
pub unsafe fn histogram(counts: *mut i64, ids: *const i32, n: u32, experts: u32) {
    dependent_launch::begin();
    let tid = thread::thread_idx_x();
    let (counts, ids) = (GlobalMut::new(counts), Global::new(ids));
    let first = thread::block_idx_x() as usize * CHUNK + tid as usize;
    let mut held = [-1i32; EACH];
    unroll::<EACH>(|i| {
        let at = first + i * THREADS;
        if at < n as usize {
            held[i] = ids.get(at);
        }
    });
    let own = shared::Carver::new().take::<u32>(experts as usize);
    let mut e = tid;
    while e < experts {
        own.set(e, 0);
        e += THREADS as u32;
    }
    thread::sync_threads();
    unroll::<EACH>(|i| {
        if (held[i] as u32) < experts {
            own.fetch_add(held[i] as u32, 1, Block, Relaxed);
        }
    });
    thread::sync_threads();
    let mut e = tid;
    while e < experts {
        let count = own.get(e);
        if count > 0 {
            counts.fetch_add(e, count as i64, Device, Relaxed);
        }
        e += THREADS as u32;
    }
}

/// Adds `rate` to the bias of experts with less than the mean load, and subtracts it from those with more.
///
/// `bias`: `[experts]`; `loads`: `[experts]` of `i32`, or of `i64` if `wide`, not negative. Loads are compared as whole numbers:
/// `load · experts` with the sum, in 64 bits. Grid: 1; block: [`BIAS_THREADS`].
#[inline(always)]
pub unsafe fn update_bias(bias: *mut f32, loads: *const u8, rate: f32, experts: u32, wide: u32) {
    dependent_launch::begin();
    let tid = thread::thread_idx_x();
    let sums = shared::Carver::new().take::<i64>(BIAS_THREADS / 32);
    let mut sum = 0i64;
    let mut e = tid;
    while e < experts {
        sum = sum.wrapping_add(operand::integer(loads, e, wide != 0));
        e += BIAS_THREADS as u32;
    }
    let sum = warp::reduce(sum, i64::wrapping_add);
    // Of the whole warp: not to be asked for by one lane.
    let warp_id = warp::warp_id();
    if warp::lane_id() == 0 {
        sums.set(warp_id, sum);
    }
    thread::sync_threads();
    let mut total = 0i64;
    for w in 0..(BIAS_THREADS / 32) as u32 {
        total = total.wrapping_add(sums.get(w));
    }
    let bias = GlobalMut::new(bias);
    let mut e = tid;
    while e < experts {
        let excess = operand::integer(loads, e, wide != 0).wrapping_mul(experts as i64).wrapping_sub(total);
        if excess != 0 {
            bias.set(e, bias.get(e) + if excess > 0 { -rate } else { rate });
        }
        e += BIAS_THREADS as u32;
    }
}

/// Shared memory of [`update_bias`].
pub const BIAS_SHARED_BYTES: usize = BIAS_THREADS / 32 * 8;

entries! {
    /// Arguments of `moe_histogram`; see [`histogram`].
    pub struct HistogramArgs(counts: *mut i64, ids: *const i32, n: u32, experts: u32);
    moe_histogram {} [512] => histogram;
}
entries! {
    /// Arguments of `moe_update_bias`; see [`update_bias`].
    pub struct BiasArgs(bias: *mut f32, loads: *const u8, rate: f32, experts: u32, wide: u32);
    moe_update_bias {} [1024] => update_bias;
}
