//! Where a paged cache keeps the vector of a token and a head.
//!
//! A cache is a number of blocks (pages) of `block_size` tokens. A *slot* is `block * block_size + token in block`. In
//! all layouts the elements of one head in one block, a *page*, start at `block * block_stride + head * head_stride`:
//!
//! | layout | keys and values | within a page |
//! | --- | --- | --- |
//! | NHD | `[blocks, block_size, heads, dim]` | `token * token_stride + dim` |
//! | HND | `[blocks, heads, block_size, dim]` | the same |
//! | x-split keys | `[blocks, heads, dim / x, block_size, x]` | `(dim / x * block_size + token) * x + dim % x` |
//! | x-split values | `[blocks, heads, dim, block_size]` | `dim * block_size + token` |
//!
//! `x` is as many elements as 16 bytes hold. NHD and HND differ in their strides only, so they are one kernel layout,
//! [`Flat`]. x-split is what vLLM's first attention kernels read: neighbouring threads take neighbouring tokens.
//!
//! Offsets count elements in `usize`: a cache may have more than 2^32 of them. Within a page `u32` would do, but the
//! sum is an address anyway.

use crate::chunk;
use crate::kv_cache::CacheElement;
use cuda_std::{Global, GlobalMut};

/// Addresses within a cache tensor. A value of it is three strides in registers.
pub trait PageLayout: Copy {
    /// How many elements along the head dimension lie next to each other, from multiples of that number on;
    /// `usize::MAX` for all.
    const RUN: usize;

    /// From strides in elements. Layouts that are dense in a page take no `token_stride` but `block_size`.
    fn new(block_stride: usize, head_stride: usize, token_stride: usize, block_size: u32) -> Self;

    /// The first element of the page of a block and a head.
    fn page(self, block: usize, head: u32) -> usize;

    /// An element of a page, from its first one.
    fn within(self, token: u32, dim: u32) -> usize;
}

/// NHD and HND, and any other layout with a dense last dimension.
#[derive(Clone, Copy)]
pub struct Flat {
    block: usize,
    head: usize,
    token: usize,
}

impl PageLayout for Flat {
    const RUN: usize = usize::MAX;

    #[inline(always)]
    fn new(block_stride: usize, head_stride: usize, token_stride: usize, _: u32) -> Self {
        Self { block: block_stride, head: head_stride, token: token_stride }
    }
    #[inline(always)]
    fn page(self, block: usize, head: u32) -> usize {
        block * self.block + head as usize * self.head
    }
    #[inline(always)]
    fn within(self, token: u32, dim: u32) -> usize {
        token as usize * self.token + dim as usize
    }
}

/// Keys in the x-split layout: `X` elements are 16 bytes.
#[derive(Clone, Copy)]
pub struct XSplitKey<const X: usize> {
    block: usize,
    head: usize,
    block_size: u32,
}

impl<const X: usize> PageLayout for XSplitKey<X> {
    const RUN: usize = X;

    #[inline(always)]
    fn new(block_stride: usize, head_stride: usize, _: usize, block_size: u32) -> Self {
        Self { block: block_stride, head: head_stride, block_size }
    }
    #[inline(always)]
    fn page(self, block: usize, head: u32) -> usize {
        block * self.block + head as usize * self.head
    }
    #[inline(always)]
    fn within(self, token: u32, dim: u32) -> usize {
        let x = X as u32;
        (dim / x * self.block_size + token) as usize * X + (dim % x) as usize
    }
}

/// Values in the x-split layout.
#[derive(Clone, Copy)]
pub struct XSplitValue {
    block: usize,
    head: usize,
    block_size: u32,
}

impl PageLayout for XSplitValue {
    const RUN: usize = 1;

    #[inline(always)]
    fn new(block_stride: usize, head_stride: usize, _: usize, block_size: u32) -> Self {
        Self { block: block_stride, head: head_stride, block_size }
    }
    #[inline(always)]
    fn page(self, block: usize, head: u32) -> usize {
        block * self.block + head as usize * self.head
    }
    #[inline(always)]
    fn within(self, token: u32, dim: u32) -> usize {
        dim as usize * self.block_size as usize + token as usize
    }
}

/// A chunk of a page from `dim` on: by one access where the layout keeps it together.
///
/// # Safety
/// In bounds; aligned as [`chunk::load`] asks where it is one access.
#[inline(always)]
#[track_caller]
pub unsafe fn load<S: CacheElement, L: PageLayout, const N: usize>(
    page: Global<S>,
    layout: L,
    token: u32,
    dim: u32,
) -> [S; N] {
    if const { L::RUN >= N } {
        return chunk::load(page, layout.within(token, dim));
    }
    let mut out = [page.get(layout.within(token, dim)); N];
    let mut j = 1;
    while j < N {
        out[j] = page.get(layout.within(token, dim + j as u32));
        j += 1;
    }
    out
}

/// Stores a chunk of a page from `dim` on: by one access where the layout keeps it together.
///
/// # Safety
/// As for [`load`], and nobody else accesses it unordered.
#[inline(always)]
#[track_caller]
pub unsafe fn store<S: CacheElement, L: PageLayout, const N: usize>(
    page: GlobalMut<S>,
    layout: L,
    token: u32,
    dim: u32,
    chunk: [S; N],
) {
    if const { L::RUN >= N } {
        return chunk::store(page, layout.within(token, dim), chunk);
    }
    let mut j = 0;
    while j < N {
        page.set(layout.within(token, dim + j as u32), chunk[j]);
        j += 1;
    }
}

/// Block and token in the block of a slot. A shift for the usual block sizes.
///
/// # Safety
/// `block_size` is not 0.
#[inline(always)]
pub unsafe fn split_slot(slot: u64, block_size: u32) -> (usize, u32) {
    // SAFETY: the caller's promise.
    unsafe { core::hint::assert_unchecked(block_size != 0) };
    if block_size.is_power_of_two() {
        return ((slot >> block_size.trailing_zeros()) as usize, slot as u32 & (block_size - 1));
    }
    if slot >> 32 == 0 {
        let slot = slot as u32;
        return ((slot / block_size) as usize, slot % block_size);
    }
    ((slot / block_size as u64) as usize, (slot % block_size as u64) as u32)
}
