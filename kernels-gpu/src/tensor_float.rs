//! Element types of the tensor-core kernels.

use cuda_std::{Float, bf16, convert, f16, mma};

/// A 16-bit float that the tensor cores multiply, accumulating in `f32`.
pub trait TensorFloat: Float {
    /// Zero.
    const ZERO: Self;
    /// Two elements as one operand register, `low` in the low half.
    fn pack(low: Self, high: Self) -> u32;
    /// Two numbers rounded to elements, as one operand register, `low` in the low half.
    fn pack_f32(low: f32, high: f32) -> u32;
    /// The numbers of two elements in a register, the low half's first.
    fn unpack_f32(word: u32) -> [f32; 2];
    /// `a · b + c` for `m16n8k16` fragments.
    fn mma(a: [u32; 4], b: [u32; 2], c: [f32; 4]) -> [f32; 4];
}

macro_rules! tensor_floats {
    ($($t:ty => $mma:ident, $pack:ident, $unpack:ident;)*) => { $(
        impl TensorFloat for $t {
            const ZERO: Self = <$t>::ZERO;
            #[inline(always)]
            fn pack(low: Self, high: Self) -> u32 {
                low.to_bits() as u32 | (high.to_bits() as u32) << 16
            }
            #[inline(always)]
            fn pack_f32(low: f32, high: f32) -> u32 {
                convert::$pack(low, high)
            }
            #[inline(always)]
            fn unpack_f32(word: u32) -> [f32; 2] {
                convert::$unpack(word)
            }
            #[inline(always)]
            #[track_caller]
            fn mma(a: [u32; 4], b: [u32; 2], c: [f32; 4]) -> [f32; 4] {
                mma::$mma(a, b, c)
            }
        }
    )* };
}
tensor_floats! {
    bf16 => m16n8k16_bf16, pack_bf16x2, unpack_bf16x2;
    f16 => m16n8k16_f16, pack_f16x2, unpack_f16x2;
}
