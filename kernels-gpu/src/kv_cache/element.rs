//! What a cache may hold.

use cuda_std::{E4M3, E5M2, Element, Float, bf16, f16};

/// An element type of a cache. Quantised ones hold `value / scale`.
pub trait CacheElement: Element {
    /// The stored number, exactly.
    fn widen(self) -> f32;
    /// Rounds to the nearest, ties to even; the 8-bit types saturate. NaN stays NaN where there is one and becomes 0 in
    /// `i8`.
    fn round(v: f32) -> Self;
}

macro_rules! floats {
    ($($t:ty)*) => { $(
        impl CacheElement for $t {
            #[inline(always)]
            fn widen(self) -> f32 {
                self.to_f32()
            }
            #[inline(always)]
            fn round(v: f32) -> Self {
                Self::from_f32(v)
            }
        }
    )* };
}
floats! { f32 f16 bf16 E4M3 E5M2 }

impl CacheElement for i8 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self as f32
    }
    #[inline(always)]
    fn round(v: f32) -> Self {
        // Adding 1.5 * 2^23 leaves an integer in the lowest bits, rounded as additions are.
        const MAGIC: f32 = 12_582_912.0;
        let v = if v.is_nan() { 0.0 } else { v.clamp(-128.0, 127.0) };
        (v + MAGIC - MAGIC) as i8
    }
}
