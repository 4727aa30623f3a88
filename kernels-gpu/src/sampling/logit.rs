//! Rows of logits, read in 16-byte vectors wherever they start.

use cuda_std::vec::B128;
use cuda_std::{Float, Global, bf16, convert, f16, float, unroll};

/// An element type of logits.
pub trait Logit: Float {
    /// Elements in a 32-bit word.
    const PER_WORD: u32;
    /// Leading bits in which the [keys](super::weights::key) of different values differ.
    const KEY_BITS: u32;
    /// A word of -inf.
    const ABSENT: u32;
    /// Element `part` of a word.
    fn unpack(word: u32, part: u32) -> f32;
    /// Of each part the larger; a NaN loses against a number.
    fn larger(a: u32, b: u32) -> u32;
}

impl Logit for f32 {
    const PER_WORD: u32 = 1;
    const KEY_BITS: u32 = 32;
    const ABSENT: u32 = 0xff80_0000;
    #[inline(always)]
    fn unpack(word: u32, _: u32) -> f32 {
        f32::from_bits(word)
    }
    #[inline(always)]
    fn larger(a: u32, b: u32) -> u32 {
        float::max(f32::from_bits(a), f32::from_bits(b)).to_bits()
    }
}

impl Logit for bf16 {
    const PER_WORD: u32 = 2;
    const KEY_BITS: u32 = 16;
    const ABSENT: u32 = 0xff80_ff80;
    #[inline(always)]
    fn unpack(word: u32, part: u32) -> f32 {
        f32::from_bits(if part == 0 { word << 16 } else { word & 0xffff_0000 })
    }
    #[inline(always)]
    fn larger(a: u32, b: u32) -> u32 {
        convert::max_bf16x2(a, b)
    }
}

impl Logit for f16 {
    const PER_WORD: u32 = 2;
    // Sign, eight bits of exponent once widened, ten of mantissa; subnormals become normal numbers of fewer bits.
    const KEY_BITS: u32 = 19;
    const ABSENT: u32 = 0xfc00_fc00;
    #[inline(always)]
    fn unpack(word: u32, part: u32) -> f32 {
        convert::f16_to_f32(f16::from_bits((word >> (16 * part)) as u16))
    }
    #[inline(always)]
    fn larger(a: u32, b: u32) -> u32 {
        convert::max_f16x2(a, b)
    }
}

/// 16 bytes of logits.
pub type Words = [u32; 4];

/// Calls `f(element, value)` for the elements of a vector, unrolled.
#[inline(always)]
pub fn for_each<T: Logit>(words: Words, mut f: impl FnMut(u32, f32)) {
    let mut w = 0;
    while w < 4 {
        let mut part = 0;
        while part < T::PER_WORD {
            f(w as u32 * T::PER_WORD + part, T::unpack(words[w], part));
            part += 1;
        }
        w += 1;
    }
}

/// The largest element of several vectors; -inf if all are NaN.
#[inline(always)]
pub fn largest<T: Logit, const N: usize>(vectors: &[Words; N]) -> f32 {
    let mut word = T::ABSENT;
    unroll::<N>(|v| unroll::<4>(|w| word = T::larger(word, vectors[v][w])));
    float::max(T::unpack(word, 0), T::unpack(word, T::PER_WORD - 1))
}

/// One row: `head` elements up to a 16-byte boundary, whole vectors, and what remains.
pub struct Row<T> {
    data: Global<T>,
    /// Elements.
    pub vocab: u32,
    /// Elements before the first vector.
    pub head: u32,
    /// Vectors.
    pub vectors: u32,
}

impl<T> Clone for Row<T> {
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Row<T> {}

impl<T: Logit> Row<T> {
    /// Elements of a vector.
    pub const WIDTH: u32 = 4 * T::PER_WORD;

    /// `vocab` elements from `data` on.
    #[inline(always)]
    pub fn new(data: Global<T>, vocab: u32) -> Self {
        let elements = data.ptr(0usize) as usize / size_of::<T>();
        let head = elements.wrapping_neg() as u32 % Self::WIDTH;
        let head = if head < vocab { head } else { vocab };
        Self { data, vocab, head, vectors: (vocab - head) / Self::WIDTH }
    }

    /// Index of element `e` of vector `v`.
    #[inline(always)]
    pub fn index(self, v: u32, e: u32) -> u32 {
        self.head + v * Self::WIDTH + e
    }

    /// Where vector `v < vectors` is.
    #[inline(always)]
    pub fn vector(self, v: u32) -> *const T {
        self.data.ptr(self.index(v, 0))
    }

    /// Vector `v < vectors`.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn words(self, v: u32) -> Words {
        self.data.get_as::<B128<u32, 4>>(self.index(v, 0)).0
    }

    /// A word of element `i`, and of -inf if there is room for another.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn word(self, i: u32) -> u32 {
        if T::PER_WORD == 2 {
            self.data.get_as::<u16>(i) as u32 | T::ABSENT & 0xffff_0000
        } else {
            self.data.get_as::<u32>(i)
        }
    }

    /// Element `i`.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn get(self, i: u32) -> f32 {
        self.data.get(i).to_f32()
    }
}
