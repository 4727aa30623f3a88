//! Chunks: the `N` neighbouring elements that one thread moves at once.
//!
//! A chunk is 16 bytes of the widest type of an operation, and so 16, 8 or 4 bytes of a narrower one. It is loaded and
//! stored by one access of that size (or several of 16 bytes), which needs that alignment: kernels test it once, with
//! [`aligned`], for all chunks of a tensor, and otherwise go element by element.
//!
//! Accesses are of 32-bit words: LLVM keeps those in registers, where an aggregate of smaller elements that is only
//! moved may end up in local memory.

use core::mem::MaybeUninit;
use cuda_std::vec::{B64, B128, StoreStreaming};
use cuda_std::{Element, Global, GlobalMut};

/// Whether chunks of `N` elements can be moved whole: `addresses` is the bitwise or of base addresses, `places` that of
/// all strides and offsets in elements.
#[inline(always)]
pub fn aligned<T, const N: usize>(addresses: usize, places: usize) -> bool {
    let bytes = const { if N * size_of::<T>() < 16 { N * size_of::<T>() } else { 16 } };
    // The lower halves are enough, and cost half as much.
    let places = addresses as u32 | (size_of::<T>() as u32).wrapping_mul(places as u32);
    places & (bytes as u32 - 1) == 0
}

/// The chunk at element `i`.
///
/// # Safety
/// In bounds, and aligned to its size or to 16 bytes.
#[inline(always)]
#[track_caller]
pub unsafe fn load<T: Element, const N: usize>(x: Global<T>, i: usize) -> [T; N] {
    const { assert!((N * size_of::<T>()).is_multiple_of(16) || N * size_of::<T>() < 16) };
    let mut chunk = MaybeUninit::<[T; N]>::uninit();
    let to = chunk.as_mut_ptr().cast::<u32>();
    match const { N * size_of::<T>() } {
        2 | 1 => return x.get_as::<[T; N]>(i),
        4 => to.write_unaligned(x.get_as::<u32>(i)),
        8 => {
            let B64([a, b]) = x.get_as::<B64<u32, 2>>(i);
            to.write_unaligned(a);
            to.add(1).write_unaligned(b);
        }
        bytes => {
            let mut at = 0;
            while at < bytes {
                let B128([a, b, c, d]) = x.get_as::<B128<u32, 4>>(i + at / size_of::<T>());
                to.add(at / 4).write_unaligned(a);
                to.add(at / 4 + 1).write_unaligned(b);
                to.add(at / 4 + 2).write_unaligned(c);
                to.add(at / 4 + 3).write_unaligned(d);
                at += 16;
            }
        }
    }
    chunk.assume_init()
}

/// Stores a chunk at element `i`.
///
/// # Safety
/// As for [`load`], and nobody else accesses it unordered.
#[inline(always)]
#[track_caller]
pub unsafe fn store<T: Element, const N: usize>(x: GlobalMut<T>, i: usize, chunk: [T; N]) {
    const { assert!((N * size_of::<T>()).is_multiple_of(16) || N * size_of::<T>() < 16) };
    let from = chunk.as_ptr().cast::<u32>();
    match const { N * size_of::<T>() } {
        2 | 1 => x.set_as(i, chunk),
        4 => x.set_as(i, from.read_unaligned()),
        8 => x.set_as(i, B64([from.read_unaligned(), from.add(1).read_unaligned()])),
        bytes => {
            let mut at = 0;
            while at < bytes {
                let word = |j| from.add(at / 4 + j).read_unaligned();
                x.set_as(i + at / size_of::<T>(), B128([word(0), word(1), word(2), word(3)]));
                at += 16;
            }
        }
    }
}

/// As [`store`], for what the kernel does not read again: it makes no room for it in the caches. A chunk has a multiple of 16 bytes.
///
/// # Safety
/// As for [`store`].
#[inline(always)]
#[track_caller]
pub unsafe fn store_streaming<T: Element, const N: usize>(x: GlobalMut<T>, i: usize, chunk: [T; N]) {
    const { assert!((N * size_of::<T>()).is_multiple_of(16)) };
    let from = chunk.as_ptr().cast::<u32>();
    let mut at = 0;
    while at < N * size_of::<T>() {
        let word = |j| from.add(at / 4 + j).read_unaligned();
        x.set_hinted(i + at / size_of::<T>(), B128([word(0), word(1), word(2), word(3)]), StoreStreaming);
        at += 16;
    }
}
