//! Rows of logits, read in 16-byte vectors wherever they start.

use cuda_std::vec::B128;
use cuda_std::{Float, Global, bf16, f16};

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
    /// This element as part `part` of a word, zeros elsewhere.
    fn pack(self, part: u32) -> u32;
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
    fn pack(self, _: u32) -> u32 {
        self.to_bits()
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
    fn pack(self, part: u32) -> u32 {
        (self.to_bits() as u32) << (16 * part)
    }
}

impl Logit for f16 {
    const PER_WORD: u32 = 2;
    // Sign, eight bits of exponent once widened, ten of mantissa; subnormals become normal numbers of fewer bits.
    const KEY_BITS: u32 = 19;
    const ABSENT: u32 = 0xfc00_fc00;
    #[inline(always)]
    fn unpack(word: u32, part: u32) -> f32 {
        f16::from_bits((word >> (16 * part)) as u16).to_f32()
    }
    #[inline(always)]
    fn pack(self, part: u32) -> u32 {
        (self.to_bits() as u32) << (16 * part)
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

/// One row, as vectors at 16-byte boundaries: the first and the last may stick out, and are read element by element.
pub struct Row<T> {
    data: Global<T>,
    /// Elements between the boundary and the row's start.
    shift: u32,
    /// Elements.
    pub vocab: u32,
    /// Vectors that hold them.
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
        let shift = (data.ptr(0usize) as usize / size_of::<T>()) as u32 % Self::WIDTH;
        Self { data, shift, vocab, vectors: (vocab + shift).div_ceil(Self::WIDTH) }
    }

    /// The most vectors that `vocab` elements may take.
    #[inline(always)]
    pub fn max_vectors(vocab: u32) -> u32 {
        (vocab + Self::WIDTH - 1).div_ceil(Self::WIDTH)
    }

    /// Index of element `e` of vector `v`; only those below `vocab` exist.
    #[inline(always)]
    pub fn index(self, v: u32, e: u32) -> u32 {
        (v * Self::WIDTH + e).wrapping_sub(self.shift)
    }

    /// Vector `v < vectors`, with -inf for what is outside of the row.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn load(self, v: u32) -> Words {
        let first = self.index(v, 0);
        if first < self.vocab && self.vocab - first >= Self::WIDTH {
            return self.data.get_as::<B128<u32, 4>>(first).0;
        }
        let mut words = [0; 4];
        let mut w = 0;
        while w < 4 {
            let mut part = 0;
            while part < T::PER_WORD {
                let i = self.index(v, w as u32 * T::PER_WORD + part);
                let x = if i < self.vocab { self.data.get(i) } else { T::from_f32(f32::NEG_INFINITY) };
                words[w] |= x.pack(part);
                part += 1;
            }
            w += 1;
        }
        words
    }

    /// Element `i`.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn get(self, i: u32) -> f32 {
        self.data.get(i).to_f32()
    }
}
