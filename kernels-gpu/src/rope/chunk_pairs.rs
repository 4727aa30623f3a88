//! What the kernels of [`rotary_and_cache`](super::rotary_and_cache) share, with one head a thread and with [two](super::rotary_and_cache_twos): how blocks and threads share
//! the pairs of chunks, where the two chunks of a pair are, and how they come to the cache.
//!
//! Each function is what ptxas makes the same of in both. What it does not, loads and their order above all, is in the kernels (docs/elementwise.md).

use crate::kv_cache::CacheElement;
use crate::rope::rotation::{INVERSE, angle_part};
use cuda_std::{Float, dependent_launch};

/// Pairs are neighbours (GPT-J).
pub const INTERLEAVED: u32 = 8;
/// `slots` holds 64-bit numbers rather than 32-bit ones.
pub const SLOTS_I64: u32 = 16;
/// There is a scale for each head rather than one for all.
pub const SCALE_PER_HEAD: u32 = 32;

/// Chunk pairs of a head: those that turn, and those that do not.
pub const fn pairs(head_dim: u32, rot_dim: u32, n: u32) -> u32 {
    (rot_dim / 2).div_ceil(n) + (head_dim - rot_dim).div_ceil(n).div_ceil(2)
}

/// Rounds a chunk for the cache.
#[inline(always)]
pub fn quantised<S: CacheElement, const N: usize>(mut values: [f32; N], inverse_scale: f32) -> [S; N] {
    let mut j = 0;
    while j < N {
        values[j] *= inverse_scale;
        j += 1;
    }
    S::round_all(values)
}

/// Chunk pairs of a head that turn.
pub const fn turning(rot_dim: u32, n: u32) -> u32 {
    (rot_dim / 2).div_ceil(n)
}

/// How blocks share the chunk pairs, `items` for each token, of a group of tokens.
#[derive(Clone, Copy)]
pub struct Share {
    /// A block has `1 << wide` neighbouring items of each of its tokens.
    wide: u32,
    /// `1 << tokens` blocks have the same items of different tokens.
    tokens: u32,
    /// How many blocks.
    pub blocks: u32,
}

impl Share {
    /// `1 << threads` threads in a block, `1 << group` tokens in a group; as many items of a token as there are, or as leave threads
    /// for all tokens if `tokens_first`.
    #[inline(always)]
    pub const fn new(items: u32, threads: u32, group: u32, tokens_first: bool) -> Self {
        let whole = if items > 1 { 32 - (items - 1).leading_zeros() } else { 0 };
        let most = if tokens_first { threads.saturating_sub(group) } else { threads };
        let wide = if whole < most && !tokens_first { whole } else { most };
        let tokens = (group + wide).saturating_sub(threads);
        Self { wide, tokens, blocks: ((items >> wide) + (items & ((1 << wide) - 1) != 0) as u32) << tokens }
    }

    /// The token in the group and the item of thread `thread` of block `block`.
    #[inline(always)]
    pub const fn of(self, block: u32, thread: u32, threads: u32, tokens_first: bool) -> (u32, u32) {
        let (first, own) = (block & ((1 << self.tokens) - 1), block >> self.tokens);
        let (token, item) = if tokens_first {
            (thread & ((1 << (threads - self.wide)) - 1), thread >> (threads - self.wide))
        } else {
            (thread >> self.wide, thread & ((1 << self.wide) - 1))
        };
        ((first << (threads - self.wide)) + token, (own << self.wide) + item)
    }
}

/// Up to so many blocks compute places before they wait for the kernels before. Measured on an H200.
pub const FEW_BLOCKS: u32 = 1024;

/// The beginning of the kernel in launches of `few` blocks, with places that are computed before.
#[inline(always)]
pub fn begin<const P: usize>(few: bool, places: [usize; P]) -> [usize; P] {
    if !few {
        return places;
    }
    // Numbers, not addresses: the compiler knows of the tensors that they are in global memory.
    dependent_launch::begin_at(places.map(core::ptr::without_provenance), []).0.map(<*const u8>::addr)
}

/// `i / by` and the rest; a shift for powers of two, which numbers of chunks mostly are.
#[inline(always)]
pub unsafe fn split(i: u32, by: u32) -> (u32, u32) {
    // SAFETY: the caller's promise: an item of none does not exist.
    unsafe { core::hint::assert_unchecked(by != 0) };
    if by.is_power_of_two() { (i >> by.trailing_zeros(), i & (by - 1)) } else { (i / by, i % by) }
}

/// Which elements pair `pair` is, counted in what turns, and the cosine and sine of its angle.
#[inline(always)]
#[track_caller]
pub unsafe fn single<T: Float>(
    angles: *const u8,
    row: usize,
    half: u32,
    pair: u32,
    flags: u32,
) -> ((u32, u32), f32, f32) {
    let places = if flags & INTERLEAVED != 0 { (2 * pair, 2 * pair + 1) } else { (pair, half + pair) };
    let sign = if flags & INVERSE != 0 { -1.0 } else { 1.0 };
    let cos = angle_part::<T>(angles, row + pair as usize, flags);
    (places, cos, sign * angle_part::<T>(angles, row + half as usize + pair as usize, flags))
}
