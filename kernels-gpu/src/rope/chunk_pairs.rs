//! What both kernels of [`rotary_and_cache`](super::rotary_and_cache) do, with one head a thread and with [two](super::rotary_and_cache_twos): how blocks and threads
//! share the pairs of chunks, where the two chunks of a pair are, and how they come to the cache. How they begin, other rotations do as well ([`begin`]).
//!
//! Each function makes the same machine code as its text in both kernels did. What did not is there twice: a thread's token and item, the loads, which scale a head
//! has, the rotation of whole chunks (docs/experiments/elementwise.md).

use crate::kv_cache::layout::{PageLayout, store};
use crate::kv_cache::{CacheElement, StoreAs, scaled};
use crate::operand;
use crate::rope::rotation::{INVERSE, angle_part, turn};
use cuda_std::{Float, Global, GlobalMut, dependent_launch, float};

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
pub fn quantised<S: CacheElement, const N: usize>(values: [f32; N], inverse_scale: f32) -> [S; N] {
    S::round_all(scaled(values, inverse_scale))
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

/// Stores a head that does not turn where chunks are not whole: the elements from `d` on, each `by` apart.
///
/// # Safety
/// In bounds, and nobody else accesses those of the page unordered.
#[inline(always)]
#[track_caller]
pub unsafe fn store_singly<T: StoreAs<S>, S: CacheElement, L: PageLayout>(
    x: Global<T>,
    page: GlobalMut<S>,
    layout: L,
    at: u32,
    head_dim: u32,
    mut d: u32,
    by: u32,
    inverse_scale: f32,
) {
    while d < head_dim {
        let [v] = T::store([x.get(d)], inverse_scale);
        page.set(layout.within(at, d), v);
        d += by;
    }
}

/// What of a head turns.
#[derive(Clone, Copy)]
pub struct Rotated {
    /// Elements of the head.
    pub head_dim: u32,
    /// The first one that turns.
    pub offset: u32,
    /// How many turn.
    pub rot_dim: u32,
}

/// Turns a head and stores it where chunks are not whole: of the pairs and of what does not turn, those from `part` on, each `by` apart.
///
/// # Safety
/// In bounds, and nobody else accesses those of the page unordered.
#[inline(always)]
#[track_caller]
pub unsafe fn turn_and_store_singly<T: Float + StoreAs<S>, S: CacheElement, L: PageLayout>(
    x: Global<T>,
    page: GlobalMut<S>,
    layout: L,
    at: u32,
    head: Rotated,
    angles: *const u8,
    row: usize,
    part: u32,
    by: u32,
    flags: u32,
    inverse_scale: f32,
) {
    let Rotated { head_dim, offset, rot_dim } = head;
    let half = rot_dim / 2;
    let mut pair = part;
    while pair < half {
        let ((i, j), cos, sin) = single::<T>(angles, row, half, pair, flags);
        let (i, j) = (offset + i, offset + j);
        let (c, d) = turn(x.get(i).to_f32(), x.get(j).to_f32(), cos, sin);
        let [c, d] = quantised::<S, 2>([c, d], inverse_scale);
        page.set(layout.within(at, i), c);
        page.set(layout.within(at, j), d);
        pair += by;
    }
    let mut rest = part;
    while rest < head_dim - rot_dim {
        let d = if rest < offset { rest } else { rest + rot_dim };
        let [k] = T::store([x.get(d)], inverse_scale);
        page.set(layout.within(at, d), k);
        rest += by;
    }
}

/// The first elements of the two chunks of part `part` of a key or a value, and whether there is a second one; `turns` of a part that does.
#[inline(always)]
pub const fn chunks<const N: usize>(
    is_key: bool,
    turns: bool,
    part: u32,
    head_dim: u32,
    offset: u32,
    rot_dim: u32,
) -> (u32, u32, bool) {
    let (half, n) = (rot_dim / 2, N as u32);
    if !is_key {
        // Values do not turn.
        (2 * part * n, (2 * part + 1) * n, (2 * part + 1) * n < head_dim)
    } else if turns {
        (offset + part * n, offset + half + part * n, true)
    } else {
        let chunk = 2 * (part - half / n);
        let (first, second) = (chunk * n, (chunk + 1) * n);
        (
            if first < offset { first } else { first + rot_dim },
            if second < offset { second } else { second + rot_dim },
            second < head_dim - rot_dim,
        )
    }
}

/// Whether a token has a place, among the angles and in the cache. It counts in `status` if its numbers are wrong, which -1 is not, for `one` thread.
#[inline(always)]
#[track_caller]
pub unsafe fn has_place(
    position: i64,
    max_positions: usize,
    slot: i64,
    slot_count: usize,
    status: *mut u32,
    one: bool,
) -> bool {
    let known = (position as u64) < max_positions as u64;
    let usable = (slot as u64) < slot_count as u64;
    operand::count(status, (!known && position != -1 || !usable && slot != -1) && one);
    known && usable
}

/// What numbers of this scale are multiplied by.
#[inline(always)]
pub fn inverse<T: StoreAs<S>, S: CacheElement>(scale: f32) -> f32 {
    if T::SCALED { float::recip(scale) } else { 1.0 }
}

/// Stores the chunks of a pair that does not turn, the second one if there is one.
///
/// # Safety
/// As for [`store`].
#[inline(always)]
#[track_caller]
pub unsafe fn store_pair<T: StoreAs<S>, S: CacheElement, L: PageLayout, const N: usize>(
    page: GlobalMut<S>,
    layout: L,
    at: u32,
    first: u32,
    second: u32,
    has_second: bool,
    a: [T; N],
    b: [T; N],
    inverse_scale: f32,
) {
    store::<S, L, N>(page, layout, at, first, T::store(a, inverse_scale));
    if has_second {
        store::<S, L, N>(page, layout, at, second, T::store(b, inverse_scale));
    }
}

/// Turns a head in place where chunks are not whole: the pairs from `pair` on, each `by` apart.
///
/// # Safety
/// In bounds, and nobody else accesses them unordered. `source` is `x`.
#[inline(always)]
#[track_caller]
pub unsafe fn turn_singly<T: Float>(
    x: GlobalMut<T>,
    source: Global<T>,
    angles: *const u8,
    row: usize,
    half: u32,
    mut pair: u32,
    by: u32,
    flags: u32,
) {
    while pair < half {
        let ((i, j), cos, sin) = single::<T>(angles, row, half, pair, flags);
        let (c, d) = turn(source.get(i).to_f32(), source.get(j).to_f32(), cos, sin);
        x.set(i, T::from_f32(c));
        x.set(j, T::from_f32(d));
        pair += by;
    }
}
