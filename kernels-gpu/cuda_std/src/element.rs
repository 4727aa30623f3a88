//! Element types of tensors.

use crate::convert;
use crate::float8::{E4M3, E5M2};
use half::{bf16, f16};

/// The element types that tensors can have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[allow(missing_docs)]
pub enum DType {
    F32,
    F16,
    Bf16,
    E4m3,
    E5m2,
    U8,
    I8,
    I32,
    U32,
    I64,
    U64,
}

impl DType {
    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            DType::E4m3 | DType::E5m2 | DType::U8 | DType::I8 => 1,
            DType::F16 | DType::Bf16 => 2,
            DType::F32 | DType::I32 | DType::U32 => 4,
            DType::I64 | DType::U64 => 8,
        }
    }

    /// The name used in entry names and messages: `f32`, `bf16`, `e4m3`, …
    pub const fn name(self) -> &'static str {
        match self {
            DType::F32 => "f32",
            DType::F16 => "f16",
            DType::Bf16 => "bf16",
            DType::E4m3 => "e4m3",
            DType::E5m2 => "e5m2",
            DType::U8 => "u8",
            DType::I8 => "i8",
            DType::I32 => "i32",
            DType::U32 => "u32",
            DType::I64 => "i64",
            DType::U64 => "u64",
        }
    }
}

impl core::fmt::Display for DType {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(self.name())
    }
}

/// A type that tensors may hold: plain bits, of which every pattern is a value.
///
/// # Safety
/// [`DTYPE`](Self::DTYPE) names a type of the same size and alignment, of whose bits the same is meant: kernels are chosen by it.
pub unsafe trait Element: crate::Pod {
    /// Its name at run time.
    const DTYPE: DType;
}

macro_rules! elements {
    ($($t:ty => $dtype:ident,)*) => { $(
        // SAFETY: it is what is named.
        unsafe impl Element for $t {
            const DTYPE: DType = DType::$dtype;
        }
    )* };
}
elements! {
    f32 => F32, f16 => F16, bf16 => Bf16, E4M3 => E4m3, E5M2 => E5m2,
    u8 => U8, i8 => I8, i32 => I32, u32 => U32, i64 => I64, u64 => U64,
}

/// A floating-point storage type, computed on in `f32`.
pub trait Float: Element {
    /// Exact.
    fn to_f32(self) -> f32;
    /// Rounds to the nearest, ties to even; the 8-bit types saturate at their largest finite value.
    fn from_f32(v: f32) -> Self;
    /// [`to_f32`](Self::to_f32) of two values, by one instruction where there is one.
    #[inline(always)]
    fn pair_to_f32([a, b]: [Self; 2]) -> [f32; 2] {
        [a.to_f32(), b.to_f32()]
    }
    /// [`from_f32`](Self::from_f32) of two values, by one instruction where there is one.
    #[inline(always)]
    fn pair_from_f32([a, b]: [f32; 2]) -> [Self; 2] {
        [Self::from_f32(a), Self::from_f32(b)]
    }
    /// The sums `a[i] + b[i]`, each rounded once; of 16-bit types by one instruction.
    #[inline(always)]
    fn pair_add(a: [Self; 2], b: [Self; 2]) -> [Self; 2] {
        let ([a0, a1], [b0, b1]) = (Self::pair_to_f32(a), Self::pair_to_f32(b));
        Self::pair_from_f32([a0 + b0, a1 + b1])
    }
}

/// The packed conversions of a type of `$width` bits, for its `impl Float`.
macro_rules! pairs {
    ($bits:ident / $width:literal, $new:expr, $raw:expr, $unpack:ident, $pack:ident) => {
        #[inline(always)]
        fn pair_to_f32([a, b]: [Self; 2]) -> [f32; 2] {
            convert::$unpack($raw(a) as $bits | ($raw(b) as $bits) << $width)
        }
        #[inline(always)]
        fn pair_from_f32([a, b]: [f32; 2]) -> [Self; 2] {
            let word = convert::$pack(a, b);
            [$new(word as _), $new((word >> $width) as _)]
        }
    };
}

impl Float for f32 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }
    #[inline(always)]
    fn from_f32(v: f32) -> Self {
        v
    }
}
impl Float for bf16 {
    pairs! { u32 / 16, bf16::from_bits, bf16::to_bits, unpack_bf16x2, pack_bf16x2 }
    #[inline(always)]
    fn pair_add(a: [Self; 2], b: [Self; 2]) -> [Self; 2] {
        let word = |[lo, hi]: [Self; 2]| lo.to_bits() as u32 | (hi.to_bits() as u32) << 16;
        let sum = convert::add_bf16x2(word(a), word(b));
        [Self::from_bits(sum as u16), Self::from_bits((sum >> 16) as u16)]
    }
    #[inline(always)]
    fn to_f32(self) -> f32 {
        f32::from_bits((self.to_bits() as u32) << 16)
    }
    #[inline(always)]
    fn from_f32(v: f32) -> Self {
        convert::f32_to_bf16(v)
    }
}
impl Float for f16 {
    pairs! { u32 / 16, f16::from_bits, f16::to_bits, unpack_f16x2, pack_f16x2 }
    #[inline(always)]
    fn pair_add(a: [Self; 2], b: [Self; 2]) -> [Self; 2] {
        let word = |[lo, hi]: [Self; 2]| lo.to_bits() as u32 | (hi.to_bits() as u32) << 16;
        let sum = convert::add_f16x2(word(a), word(b));
        [Self::from_bits(sum as u16), Self::from_bits((sum >> 16) as u16)]
    }
    #[inline(always)]
    fn to_f32(self) -> f32 {
        convert::f16_to_f32(self)
    }
    #[inline(always)]
    fn from_f32(v: f32) -> Self {
        convert::f32_to_f16(v)
    }
}
impl Float for E4M3 {
    pairs! { u16 / 8, E4M3, |v: E4M3| v.0, unpack_e4m3x2, pack_e4m3x2 }
    #[inline(always)]
    fn to_f32(self) -> f32 {
        convert::e4m3_to_f32(self)
    }
    #[inline(always)]
    fn from_f32(v: f32) -> Self {
        convert::f32_to_e4m3(v)
    }
}
impl Float for E5M2 {
    pairs! { u16 / 8, E5M2, |v: E5M2| v.0, unpack_e5m2x2, pack_e5m2x2 }
    #[inline(always)]
    fn to_f32(self) -> f32 {
        convert::e5m2_to_f32(self)
    }
    #[inline(always)]
    fn from_f32(v: f32) -> Self {
        convert::f32_to_e5m2(v)
    }
}
