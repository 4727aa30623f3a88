//! Chunks: the `N` neighbouring elements that one thread moves at once.
//!
//! A chunk is 16 bytes of the wider type of an operation, and so 16, 8 or 4 bytes of a narrower one. It is loaded and
//! stored by one access of that size, which needs that alignment: kernels test it once, with [`aligned`], for all
//! chunks of a tensor, and otherwise go element by element.

use crate::kv_cache::CacheElement;
use cuda_std::vec::{B32, B64, B128};
use cuda_std::{Element, Global, GlobalMut};

/// Whether chunks of `chunk_bytes` can be moved whole: `places` is the bitwise or of the base address and of all
/// strides and offsets, in bytes.
#[inline(always)]
pub fn aligned(places: usize, chunk_bytes: usize) -> bool {
    places & (if chunk_bytes < 16 { chunk_bytes } else { 16 } - 1) == 0
}

/// The chunk at element `i`.
///
/// # Safety
/// In bounds, and aligned to its size or to 16 bytes.
#[inline(always)]
#[track_caller]
pub unsafe fn load<T: Element, const N: usize>(x: Global<T>, i: usize) -> [T; N] {
    if const { (N * size_of::<T>()).is_multiple_of(16) } {
        x.get_as::<B128<T, N>>(i).0
    } else if const { N * size_of::<T>() == 8 } {
        x.get_as::<B64<T, N>>(i).0
    } else if const { N * size_of::<T>() == 4 } {
        x.get_as::<B32<T, N>>(i).0
    } else {
        x.get_as::<[T; N]>(i)
    }
}

/// Stores a chunk at element `i`.
///
/// # Safety
/// As for [`load`], and nobody else accesses it unordered.
#[inline(always)]
#[track_caller]
pub unsafe fn store<T: Element, const N: usize>(x: GlobalMut<T>, i: usize, chunk: [T; N]) {
    if const { (N * size_of::<T>()).is_multiple_of(16) } {
        x.set_as(i, B128(chunk))
    } else if const { N * size_of::<T>() == 8 } {
        x.set_as(i, B64(chunk))
    } else if const { N * size_of::<T>() == 4 } {
        x.set_as(i, B32(chunk))
    } else {
        x.set_as(i, chunk)
    }
}

/// The values of a chunk.
#[inline(always)]
pub fn widen<T: CacheElement, const N: usize>(chunk: [T; N]) -> [f32; N] {
    let mut out = [0.0; N];
    let mut j = 0;
    while j < N {
        out[j] = chunk[j].widen();
        j += 1;
    }
    out
}

/// A chunk of these values, rounded.
#[inline(always)]
pub fn round<T: CacheElement, const N: usize>(values: [f32; N]) -> [T; N] {
    let mut out = [T::round(0.0); N];
    let mut j = 0;
    while j < N {
        out[j] = T::round(values[j]);
        j += 1;
    }
    out
}
