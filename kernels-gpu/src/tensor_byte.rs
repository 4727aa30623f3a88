//! Element types of 8 bits that the tensor cores of sm_80 and later multiply.

use crate::row::Quantised;
use cuda_std::{E4M3, convert, mma, unroll, wgmma};

/// An 8-bit type for `m16n8k32` products, with the fragments of [`mma`].
pub trait TensorByte: Quantised {
    /// The type of sums.
    type Sum: wgmma::Sum;
    /// Zero.
    const ZERO: Self::Sum;
    /// `a · b + c`.
    fn mma(a: [u32; 4], b: [u32; 2], c: [Self::Sum; 4]) -> [Self::Sum; 4];
}

/// By way of f16, which holds every e4m3 number, since sm_80 multiplies none. A product of K = 32 is two of K = 16, and it does not
/// matter which elements of K make up which as long as both operands agree: bytes `4 t .. 4 t + 4` of a thread's word are elements
/// `2 t, 2 t + 1, 2 t + 8, 2 t + 9` of one product.
impl TensorByte for E4M3 {
    type Sum = f32;
    const ZERO: f32 = 0.0;
    #[inline(always)]
    #[track_caller]
    fn mma(a: [u32; 4], b: [u32; 2], c: [f32; 4]) -> [f32; 4] {
        let mut sum = c;
        unroll::<2>(|i| {
            let widen = convert::e4m3x4_to_f16x2;
            let ([upper0, upper1], [lower0, lower1]) = (widen(a[2 * i]), widen(a[2 * i + 1]));
            sum = mma::m16n8k16_f16([upper0, lower0, upper1, lower1], widen(b[i]), sum);
        });
        sum
    }
}

/// Exact sums: fewer than 2^17 products of the largest numbers fit.
impl TensorByte for i8 {
    type Sum = i32;
    const ZERO: i32 = 0;
    #[inline(always)]
    #[track_caller]
    fn mma(a: [u32; 4], b: [u32; 2], c: [i32; 4]) -> [i32; 4] {
        mma::m16n8k32_i8(a, b, c)
    }
}
