//! Element types of the tensor-core kernels.

use cuda_std::second_level::Policy;
use cuda_std::{Float, atomic, bf16, convert, f16, mma};

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
    /// Adds four elements in two words to those in global memory: [`atomic::reduce_add_v4_bf16`].
    ///
    /// # Safety
    /// As for that.
    unsafe fn reduce_add_v4(ptr: *mut Self, words: [u32; 2], policy: Policy);
    /// Adds eight elements to those in global memory: [`atomic::reduce_add_v8_bf16`].
    ///
    /// # Safety
    /// As for that.
    unsafe fn reduce_add_v8(ptr: *mut Self, value: [Self; 8], policy: Policy);
}

macro_rules! tensor_floats {
    ($($t:ty => $mma:ident, $pack:ident, $unpack:ident, $add_4:ident, $add_8:ident;)*) => { $(
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
            #[inline(always)]
            #[track_caller]
            unsafe fn reduce_add_v4(ptr: *mut Self, words: [u32; 2], policy: Policy) {
                let halves = |word: u32| [word as u16, (word >> 16) as u16].map(<$t>::from_bits);
                let ([a, b], [c, d]) = (halves(words[0]), halves(words[1]));
                // SAFETY: forwarded to the caller.
                unsafe { atomic::$add_4(ptr, [a, b, c, d], policy) }
            }
            #[inline(always)]
            #[track_caller]
            unsafe fn reduce_add_v8(ptr: *mut Self, value: [Self; 8], policy: Policy) {
                // SAFETY: forwarded to the caller.
                unsafe { atomic::$add_8(ptr, value, policy) }
            }
        }
    )* };
}
tensor_floats! {
    bf16 => m16n8k16_bf16, pack_bf16x2, unpack_bf16x2, reduce_add_v4_bf16, reduce_add_v8_bf16;
    f16 => m16n8k16_f16, pack_f16x2, unpack_f16x2, reduce_add_v4_f16, reduce_add_v8_f16;
}
