//! Noisy top-k gating: `softmax(KeepTopK(H, k))` with `H = logit + scale · normal · softplus(noise logit)`.
//!
//! Source: Shazeer et al., *Outrageously Large Neural Networks*, 2017, equations 3 to 5. The normally distributed numbers are a
//! function of (seed, sequence, offset), by Philox and Box-Muller ([`philox`]): experts `4 q` to `4 q + 3` of row `t` have the four
//! numbers of block `offset + q` of the sequence `sequence + t`, the first two words of the block giving the first two.
//!
//! A warp for each token. Noisy logits lie in shared memory; a lane holds the best of those it owns, and looks for the next
//! only when its best was taken. Ties go to the lower index, NaN ranks last. Lane `r` keeps what has rank `r`, so
//! the softmax over the chosen is a reduction over the warp.

use crate::philox;
use cuda_std::{Float, Global, GlobalMut, Shared, bf16, dependent_launch, entries, f16, float, shared, thread, warp};

/// Warps of a block, each with a token.
pub const WARPS: usize = 4;
/// The most experts of a token.
pub const MAX_TOP_K: usize = 32;
/// The most experts.
pub const MAX_EXPERTS: usize = 2048;

/// Dynamic shared memory.
pub const fn shared_bytes(experts: usize) -> usize {
    WARPS * experts.next_multiple_of(4) * 4
}

/// The best of a lane's experts that was not taken: its key, and its number; key 0 and [`NONE`] if there is none left. A NaN has
/// key 0 too.
#[derive(Clone, Copy)]
struct Best {
    key: u32,
    expert: u32,
}

const NONE: u32 = u32::MAX;

#[inline(always)]
unsafe fn best(values: Shared<f32>, experts: u32, lane: u32, taken: u64) -> Best {
    let mut best = Best { key: 0, expert: NONE };
    let (mut e, mut i) = (lane, 0);
    while e < experts {
        if taken >> i & 1 == 0 {
            // -0.0 + 0.0 is 0.0: both zeros are one.
            let key = float::sortable(values.get(e) + 0.0);
            if key > best.key || best.expert == NONE {
                best = Best { key, expert: e };
            }
        }
        e += 32;
        i += 1;
    }
    best
}

/// `ln(1 + e^x)`.
#[inline(always)]
fn softplus(x: f32) -> f32 {
    float::max_propagate(x, 0.0) + float::log1p(float::exp(-float::abs(x)))
}

/// `weights`, `ids`: `[tokens, top_k]`; `noisy`: `[tokens, experts]` or null: `H`; `logits`: `[tokens, experts]`, rows `row` apart;
/// `noise`: the same, rows `noise_row` apart, or null for a softplus of 1. Block: 32 [`WARPS`]; grid: a block for every [`WARPS`]
/// tokens; shared memory: [`shared_bytes`].
#[inline(always)]
pub unsafe fn noisy_top_k<T: Float>(
    weights: *mut f32,
    ids: *mut i32,
    noisy: *mut f32,
    logits: *const T,
    row: usize,
    noise: *const T,
    noise_row: usize,
    seed: u64,
    sequence: u64,
    offset: u64,
    scale: f32,
    tokens: u32,
    experts: u32,
    top_k: u32,
) {
    dependent_launch::begin();
    let (lane, warp_id) = (warp::lane_id(), warp::warp_id());
    let token = thread::block_idx_x() * WARPS as u32 + warp_id;
    let values = shared::Carver::new().take::<f32>(WARPS * (experts as usize).next_multiple_of(4));
    let values = values.offset(warp_id as usize * (experts as usize).next_multiple_of(4));
    if token >= tokens {
        return;
    }
    let (logits, noise_logits) = (Global::new(logits), Global::new(noise));
    let mut quad = lane;
    while 4 * quad < experts {
        let words = philox::draw_four(seed, sequence.wrapping_add(token as u64), offset.wrapping_add(quad as u64));
        let [a, b] = philox::normals(words[0], words[1]);
        let [c, d] = philox::normals(words[2], words[3]);
        let normals = [a, b, c, d];
        for i in 0..4 {
            let e = 4 * quad + i as u32;
            if e < experts {
                let x = logits.get(token as usize * row + e as usize).to_f32();
                let mut deviation = scale;
                if !noise.is_null() {
                    deviation *= softplus(noise_logits.get(token as usize * noise_row + e as usize).to_f32());
                }
                // Without noise the logits stay what they are, even where its deviation is infinite or none.
                let h = if scale == 0.0 || deviation == 0.0 { x } else { float::fma(normals[i], deviation, x) };
                values.set(e, h);
                if !noisy.is_null() {
                    GlobalMut::new(noisy).set(token as usize * experts as usize + e as usize, h);
                }
            }
        }
        quad += 32;
    }
    warp::sync_warp(warp::FULL);

    let mut taken = 0u64;
    let mut own = best(values, experts, lane, taken);
    // Of the rank that is this lane's number.
    let (mut id, mut value) = (0u32, f32::NEG_INFINITY);
    for rank in 0..top_k {
        let key = warp::warp_reduce_max_u32(warp::FULL, own.key);
        let candidate = if own.key == key { own.expert } else { NONE };
        let expert = warp::warp_reduce_min_u32(warp::FULL, candidate);
        if expert % 32 == lane {
            taken |= 1 << (expert / 32);
            own = best(values, experts, lane, taken);
        }
        if rank == lane {
            id = expert;
            value = values.get(expert);
        }
    }
    // The first is the largest, unless all are NaN.
    let largest = warp::shfl_idx(value, 0);
    let mut numerator = 0f32;
    if lane < top_k && !value.is_nan() {
        numerator = if value == largest {
            1.0
        } else if float::abs(largest) == f32::INFINITY {
            0.0
        } else {
            float::exp(value - largest)
        };
    }
    let sum = warp::reduce_sum(numerator);
    if lane < top_k {
        let at = token as usize * top_k as usize + lane as usize;
        GlobalMut::new(ids).set(at, id as i32);
        GlobalMut::new(weights).set(at, if sum > 0.0 { numerator / sum } else { 0.0 });
    }
}

entries! {
    /// Arguments of every `moe_noisy_top_k_*` entry; see [`noisy_top_k`].
    pub struct Args<T>(
        weights: *mut f32, ids: *mut i32, noisy: *mut f32, logits: *const T, row: usize, noise: *const T,
        noise_row: usize, seed: u64, sequence: u64, offset: u64, scale: f32, tokens: u32, experts: u32, top_k: u32,
    );
    moe_noisy_top_k_f32 { type T = f32; } [128] => noisy_top_k::<T>;
    moe_noisy_top_k_f16 { type T = f16; } [128] => noisy_top_k::<T>;
    moe_noisy_top_k_bf16 { type T = bf16; } [128] => noisy_top_k::<T>;
}
