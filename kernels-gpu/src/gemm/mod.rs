//! Matrix products with weights in `[out, in]` layout, as linear layers have them, and rows of a table.

pub mod embedding;
pub mod linear_dot;
pub mod linear_few;
pub mod linear_fma;
pub mod linear_pair;
pub mod linear_quant_blocks;
pub mod linear_quant_few;
pub mod linear_quant_tile;
pub mod linear_quant_wgmma;
pub mod linear_rounds;
pub mod linear_stream;
pub mod linear_tile;
pub mod linear_wgmma;
pub mod quantise;

use crate::gelu::{gelu, gelu_tanh};
use cuda_std::float;

/// Epilogues of a linear layer, as the kernels number them.
pub const EPILOGUES: [&str; 6] = ["none", "silu", "gelu", "gelu_tanh", "relu", "relu2"];

/// The epilogue number `kind` (see [`EPILOGUES`]) of a value.
#[inline(always)]
pub fn epilogue(kind: u32, x: f32) -> f32 {
    match kind {
        1 => x * float::sigmoid(x),
        2 => gelu::<f32>(x),
        3 => gelu_tanh::<f32>(x),
        4 => float::max_propagate(x, 0.0),
        5 => {
            let r = float::max_propagate(x, 0.0);
            r * r
        }
        _ => x,
    }
}

/// Epilogues for results of 16 bits, by special-function instructions: relative errors below 2^-16, of [`silu`](rough::silu) from -87 on, of [`gelu_tanh`](rough::gelu_tanh) from -10
/// on, of [`gelu`](rough::gelu) from -6 on. Below, the former two soon give zero, since the division does where its denominator is beyond 2^126; `gelu` stays at -6e-9, for -∞
/// as well, which is NaN by the others.
pub mod rough {
    use core::f32::consts::LOG2_E;
    use cuda_std::float::{self, fast};
    use cuda_std::unroll;

    /// [`epilogue`](super::epilogue), by these.
    #[inline(always)]
    pub fn epilogue(kind: u32, x: f32) -> f32 {
        match kind {
            1 => silu(x),
            2 => gelu(x),
            3 => gelu_tanh(x),
            4 | 5 => super::epilogue(kind, x),
            _ => x,
        }
    }

    /// [`epilogue`] of several values, chosen once.
    #[inline(always)]
    pub fn epilogues<const N: usize>(kind: u32, values: &mut [f32; N]) {
        match kind {
            1 => unroll::<N>(|e| values[e] = silu(values[e])),
            2 => unroll::<N>(|e| values[e] = gelu(values[e])),
            3 => unroll::<N>(|e| values[e] = gelu_tanh(values[e])),
            4 => unroll::<N>(|e| values[e] = float::max_propagate(values[e], 0.0)),
            5 => unroll::<N>(|e| {
                values[e] = float::max_propagate(values[e], 0.0);
                values[e] *= values[e];
            }),
            _ => {}
        }
    }

    /// `x · sigmoid(x)`.
    #[inline(always)]
    pub fn silu(x: f32) -> f32 {
        fast::div(x, 1.0 + fast::exp2(-LOG2_E * x))
    }

    /// GELU's tanh approximation, which is `x · sigmoid(2 u)` where the other way to write it has `tanh(u)`.
    #[inline(always)]
    pub fn gelu_tanh(x: f32) -> f32 {
        // -2 log2(e) sqrt(2 / pi), and 0.044715 times it.
        let u = x * float::fma(-0.102_943_24, x * x, -2.302_208_2);
        fast::div(x, 1.0 + fast::exp2(u))
    }

    /// `x · Φ(x)`. The logarithm of `Φ(-|x|)` is close to a polynomial, here interpolated in Chebyshev's nodes of [0, 6],
    /// beyond which `x · Φ(-|x|)` is below 6e-9 and taken to be that.
    #[inline(always)]
    pub fn gelu(x: f32) -> f32 {
        let a = float::min(float::abs(x), 6.0);
        let q = float::fma(-1.991_437e-6, a, 6.487_906e-5);
        let q = float::fma(q, a, -0.000_957_603);
        let q = float::fma(q, a, 0.008_619_216);
        let q = float::fma(q, a, -0.054_196_646);
        let q = float::fma(q, a, -0.458_222_4);
        let q = float::fma(q, a, -1.151_345_5);
        let tail = fast::exp2(float::fma(q, a, -0.999_989_1));
        // Φ(-|x|) of an infinity is not 0 here: `a`, not `x`, is what keeps ∞ - ∞ away.
        float::fma(-a, tail, float::max_propagate(x, 0.0))
    }
}
