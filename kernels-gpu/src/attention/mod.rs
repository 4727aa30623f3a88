//! Attention over a paged KV cache.

pub mod decode;
pub mod plain;

use cuda_std::{E4M3, E5M2, Element, Float, bf16, f16};

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
