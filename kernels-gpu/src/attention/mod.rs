//! Attention over a paged KV cache.

pub mod decode;
pub mod plain;

use cuda_std::{E4M3, E5M2, Element, Float, bf16, f16, mma};

/// Element types of the tensor-core attention kernels.
pub trait AttentionFloat: Float {
    /// Zero.
    const ZERO: Self;
    /// Two elements as one operand register, `low` in the low half.
    fn pack(low: Self, high: Self) -> u32;
    /// `a · b + c` for `m16n8k16` fragments.
    fn mma(a: [u32; 4], b: [u32; 2], c: [f32; 4]) -> [f32; 4];
}

impl AttentionFloat for bf16 {
    const ZERO: Self = bf16::ZERO;
    #[inline(always)]
    fn pack(low: Self, high: Self) -> u32 {
        low.to_bits() as u32 | (high.to_bits() as u32) << 16
    }
    #[inline(always)]
    #[track_caller]
    fn mma(a: [u32; 4], b: [u32; 2], c: [f32; 4]) -> [f32; 4] {
        mma::m16n8k16_bf16(a, b, c)
    }
}

impl AttentionFloat for f16 {
    const ZERO: Self = f16::ZERO;
    #[inline(always)]
    fn pack(low: Self, high: Self) -> u32 {
        low.to_bits() as u32 | (high.to_bits() as u32) << 16
    }
    #[inline(always)]
    #[track_caller]
    fn mma(a: [u32; 4], b: [u32; 2], c: [f32; 4]) -> [f32; 4] {
        mma::m16n8k16_f16(a, b, c)
    }
}

/// Storage types of the cache.
pub trait CacheElement: Element {
    /// Exact, without the cache's scale.
    fn to_f32(self) -> f32;
}

macro_rules! cache_elements {
    ($($t:ty)*) => { $(
        impl CacheElement for $t {
            #[inline(always)]
            fn to_f32(self) -> f32 {
                Float::to_f32(self)
            }
        }
    )* };
}
cache_elements! { f32 f16 bf16 E4M3 E5M2 }

impl CacheElement for i8 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self as f32
    }
}
