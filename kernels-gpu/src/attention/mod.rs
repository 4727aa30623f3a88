//! Attention over a paged KV cache.

pub mod decode;
pub mod decode_tma;
pub mod merge;
pub mod plain;
pub mod prefill;
pub mod prefill_plain;
pub mod prefill_wgmma;
pub mod ragged;

use core::f32::consts::LOG2_E;
use cuda_std::float;

/// The 8-bit types by number, as the kernels of prefill take them.
pub mod narrow {
    /// [`E4M3`](cuda_std::E4M3).
    pub const E4M3: u32 = 0;
    /// [`E5M2`](cuda_std::E5M2).
    pub const E5M2: u32 = 1;
    /// `i8`.
    pub const I8: u32 = 2;
}

/// The power of two that brings a row of Q whose largest magnitude has these bits (of an f32) into 2^13 .. 2^14, where f16 has all of
/// its digits, and the one that undoes it. Both are normal numbers, whatever the row has.
#[inline(always)]
pub(crate) fn fit_factors(top: u32) -> (f32, f32) {
    let exponent = (top >> 23).clamp(27, 254);
    (f32::from_bits((127 + 127 + 13 - exponent) << 23), f32::from_bits((exponent - 13) << 23))
}

/// `cap · tanh(score / cap)`, within `2^-18` of itself; the score itself if `cap` is 0. Caps are from 2^-126 to 2^126.
#[inline(always)]
pub fn soft_capped(score: f32, cap: f32) -> f32 {
    if cap > 0.0 { capped(score, cap, float::fast::recip(cap)) } else { score }
}

/// As [`soft_capped`] with a cap and its reciprocal, for whom has room to keep it.
///
/// As `1 - 2 / (e^2x + 1)`, whose error is one of the cap, but for scores far below the cap, which have a series of their own:
/// a cap of 1e5 would take their digits. Both are computed: scores of one warp are of both kinds.
#[inline(always)]
fn capped(score: f32, cap: f32, inverse: f32) -> f32 {
    let x = score * inverse;
    let square = x * x;
    // tanh(x) / x for x up to 0.1, within 2^-18.7.
    let series = score * float::fma(square, -0.332_228_7, 1.0);
    let e = float::fast::exp2(x * (2.0 * LOG2_E));
    let bent = float::fma(-cap, float::fast::recip(float::fma(e, 0.5, 0.5)), cap);
    if square < 0.01 { series } else { bent }
}
