//! What a cache may hold.

use cuda_std::{E4M3, E5M2, Element, bf16, convert, f16, vec};

/// An element type of a cache. Quantised ones hold `value / scale`.
pub trait CacheElement: Element {
    /// The stored numbers, exactly.
    fn widen_all<const N: usize>(stored: [Self; N]) -> [f32; N];

    /// Rounds to the nearest, ties to even; the 8-bit types saturate. NaN stays NaN where there is one and becomes 0 in
    /// `i8`.
    fn round_all<const N: usize>(values: [f32; N]) -> [Self; N];

    /// [`widen_all`](Self::widen_all) of one.
    #[inline(always)]
    fn widen(self) -> f32 {
        Self::widen_all([self])[0]
    }

    /// [`round_all`](Self::round_all) of one.
    #[inline(always)]
    fn round(v: f32) -> Self {
        Self::round_all([v])[0]
    }
}

macro_rules! floats {
    ($($t:ty)*) => { $(
        impl CacheElement for $t {
            #[inline(always)]
            fn widen_all<const N: usize>(stored: [Self; N]) -> [f32; N] {
                vec::to_f32(stored)
            }
            #[inline(always)]
            fn round_all<const N: usize>(values: [f32; N]) -> [Self; N] {
                vec::from_f32(values)
            }
        }
    )* };
}
floats! { f32 f16 bf16 E4M3 E5M2 }

impl CacheElement for i8 {
    #[inline(always)]
    fn widen_all<const N: usize>(stored: [Self; N]) -> [f32; N] {
        let mut out = [0.0; N];
        let mut j = 0;
        while j < N {
            out[j] = stored[j] as f32;
            j += 1;
        }
        out
    }
    #[inline(always)]
    fn round_all<const N: usize>(values: [f32; N]) -> [Self; N] {
        let mut out = [0; N];
        let mut j = 0;
        while j < N {
            out[j] = convert::f32_to_i8(values[j]);
            j += 1;
        }
        out
    }
}

/// Types of keys and values that a cache of `S` may hold: `f32`, `f16` and `bf16` themselves, bit by bit and without a
/// scale, and rounded to an 8-bit type with one.
pub trait StoreAs<S: CacheElement>: CacheElement {
    /// Whether there is a scale.
    const SCALED: bool;

    /// What is stored for these values.
    fn store<const N: usize>(values: [Self; N], inverse_scale: f32) -> [S; N];

    /// The values that are stored.
    fn restore<const N: usize>(stored: [S; N], scale: f32) -> [Self; N];
}

/// Each number times `by`.
#[inline(always)]
pub(crate) fn scaled<const N: usize>(mut values: [f32; N], by: f32) -> [f32; N] {
    let mut j = 0;
    while j < N {
        values[j] *= by;
        j += 1;
    }
    values
}

macro_rules! store_as {
    ($($t:ty: $($s:ty)*;)*) => { $(
        impl StoreAs<$t> for $t {
            const SCALED: bool = false;

            #[inline(always)]
            fn store<const N: usize>(values: [Self; N], _: f32) -> [$t; N] {
                values
            }
            #[inline(always)]
            fn restore<const N: usize>(stored: [$t; N], _: f32) -> [Self; N] {
                stored
            }
        }
        $(impl StoreAs<$s> for $t {
            const SCALED: bool = true;

            #[inline(always)]
            fn store<const N: usize>(values: [Self; N], inverse_scale: f32) -> [$s; N] {
                <$s>::round_all(scaled(Self::widen_all(values), inverse_scale))
            }
            #[inline(always)]
            fn restore<const N: usize>(stored: [$s; N], scale: f32) -> [Self; N] {
                Self::round_all(scaled(<$s>::widen_all(stored), scale))
            }
        })*
    )* };
}
store_as! {
    f32: E4M3 E5M2 i8;
    f16: E4M3 E5M2 i8;
    bf16: E4M3 E5M2 i8;
}
