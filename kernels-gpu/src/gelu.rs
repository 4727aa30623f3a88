//! GELU and its tanh approximation, as accurate as the type of the results needs: activations of their own, and epilogues of products.

use cuda_std::{DType, Float, float};

/// Whether `T` shows the difference between accurate and approximate functions.
#[inline(always)]
pub const fn accurate<T: Float>() -> bool {
    matches!(T::DTYPE, DType::F32)
}

/// `x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))`, where `(1 + tanh u) / 2 = sigmoid(2 u)`.
#[inline(always)]
pub fn gelu_tanh<T: Float>(x: f32) -> f32 {
    const SLOPE: f32 = 1.595_769_2; // 2 sqrt(2 / pi)
    const CUBE: f32 = 0.071_354_814; // 0.044715 of that
    let u = x * float::fma(CUBE, x * x, SLOPE);
    x * if accurate::<T>() { float::sigmoid(u) } else { float::fast::sigmoid(u) }
}

/// `x Phi(x)` with the normal distribution function `Phi(x) = erfc(-x / sqrt(2)) / 2`.
///
/// `Phi(-a) = e^(-a^2 / 2) t h(t)`, with `h` a polynomial in `t = 1 / (1 + c a)` (minimax, relative error 2^-21.7 for f32 and 2^-17.7 otherwise), so
/// the far negative side keeps its relative accuracy, which `1 + erf` would lose.
#[inline(always)]
pub fn gelu<T: Float>(x: f32) -> f32 {
    // Beyond, the tail is zero in f32; and NaN comes in by `x` below.
    let a = float::min(float::abs(x), 20.0);
    let s = a * a;
    let tail = if accurate::<T>() {
        const H: [f32; 9] = [
            0.139_621_3,
            0.139_863_54,
            0.119_821_18,
            0.105_552_93,
            -0.023_213_392,
            0.159_321_25,
            -0.255_840_4,
            0.144_031_61,
            -0.029_158_03,
        ];
        let t = float::recip(float::fma(0.35, a, 1.0));
        // What the square lost, which the exponential would magnify.
        let lost = float::fma(a, a, -s);
        let e = float::exp(-0.5 * s);
        float::fma(e, -0.5 * lost, e) * t * float::poly(t, H)
    } else {
        const H: [f32; 6] = [0.123_860_71, 0.120_441_16, 0.133_430_29, 0.015_743_721, 0.180_451_24, -0.073_929_44];
        let t = float::fast::recip(float::fma(0.31, a, 1.0));
        float::fast::exp2(const { -0.5 * core::f32::consts::LOG2_E } * s) * t * float::poly(t, H)
    };
    x * if x < 0.0 { tail } else { 1.0 - tail }
}
