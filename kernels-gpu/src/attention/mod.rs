//! Attention over a paged KV cache.

pub mod decode;
pub mod decode_tma;
pub mod merge;
pub mod plain;
pub mod prefill;
pub mod prefill_plain;
pub mod prefill_wgmma;
pub mod ragged;

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

/// `cap · tanh(score / cap)`, within about `2^-22 · cap`; the score itself if `cap` is 0.
///
/// As `1 - 2 / (e^2x + 1)`, which is exact enough where it counts: the error of a score is absolute, since scores are
/// exponents.
#[inline(always)]
fn soft_capped(score: f32, cap: f32) -> f32 {
    if cap > 0.0 {
        let e = float::fast::exp(float::fast::div(2.0 * score, cap));
        cap * (1.0 - float::fast::div(2.0, e + 1.0))
    } else {
        score
    }
}
