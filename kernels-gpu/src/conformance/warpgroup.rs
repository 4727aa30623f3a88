//! `wgmma` in all types and widths. Operands are small integers, so every order of summation is exact.

use super::Words;
use cuda_std::shared::Carver;
use cuda_std::tma::Swizzle;
use cuda_std::wgmma::{self, Accumulator, Descriptor, Input, K, Mn, Sum};
use cuda_std::{E4M3, E5M2, Element, Float, Shared, bf16, convert, entries, f16, thread, tma, warp};

/// Threads of the block: a warpgroup.
pub const THREADS: usize = 128;
/// Words of a thread: a hash of each product's sums, and some sums.
pub const WORDS: usize = 10;
/// Dynamic shared memory: 64 lines of A and 256 of B, and B with its other dimension contiguous.
pub const SHARED_BYTES: usize = 1024 + (64 + 256 + 256) * 128;

/// An element type, of small integers.
pub trait Small: Element {
    /// The integer `v`.
    fn small(v: f32) -> Self;
}
macro_rules! floats {
    ($($t:ty)*) => { $(
        impl Small for $t {
            #[inline(always)]
            fn small(v: f32) -> Self {
                Self::from_f32(v)
            }
        }
    )* };
}
floats!(bf16 f16 E4M3 E5M2);
impl Small for i8 {
    #[inline(always)]
    fn small(v: f32) -> Self {
        v as i32 as i8
    }
}
/// Value `k` of line `i` of an operand.
#[inline(always)]
fn small(i: u32, k: u32) -> f32 {
    ((i * 5 + k * 3) % 7) as f32 - 3.0
}

/// Fills `lines` lines of `128 / size_of::<T>()` values, swizzled as TMA does.
#[inline(always)]
unsafe fn fill<T: Small>(tile: Shared<T>, lines: u32, swizzle: Swizzle, value: impl Fn(u32, u32) -> f32) {
    let bytes = size_of::<T>() as u32;
    let width = swizzle.line_bytes() as u32 / bytes;
    let mut i = thread::thread_idx_x();
    while i < lines * width {
        tile.set(swizzle.apply(i * bytes) / bytes, T::small(value(i / width, i % width)));
        i += THREADS as u32;
    }
}

/// Everything that lies in registers, in one word.
#[inline(always)]
fn hash<S: Sum>(sums: &[S]) -> u32 {
    let mut h = 0u32;
    for &v in sums {
        h = h.rotate_left(5).wrapping_mul(0x9e37_79b1) ^ v.to_f32().to_bits();
    }
    h
}

/// `out`: `[THREADS, WORDS]`. Grid: 1; block: `THREADS`.
#[inline(always)]
pub unsafe fn conformance<S: Sum, T: Input<S> + Small, A: Accumulator<S> + AsRef<[S]>>(out: *mut u32) {
    let mut words = Words::new(out, WORDS);
    let width = 128 / size_of::<T>() as u32;
    let n = A::N as u32;
    let mut carver = Carver::new();
    let tiles = carver.take_aligned::<T>((320 * width) as usize, 1024);
    let (a, b) = (tiles, tiles.offset(64 * width));
    fill(a, 64, Swizzle::B128, small);
    fill(b, n, Swizzle::B128, |i, k| small(i + 2, k + 1));
    tma::fence_async();
    thread::sync_threads();
    let (da, db) = (Descriptor::<K>::new(a.address(0u32)), Descriptor::<K>::new(b.address(0u32)));

    // A whole line, overwriting and adding.
    let mut acc = A::zero();
    acc.multiply::<T, 4, _, _>(da, db, false);
    wgmma::wait::<0>(&mut acc);
    words.put(hash(acc.as_ref()));
    words.put_f32(acc.as_ref()[0].to_f32());
    words.put_f32(acc.as_ref()[3].to_f32());
    acc.multiply::<T, 2, _, _>(da.advance(1), db.advance(2), true);
    acc.multiply::<T, 1, _, _>(da.offset(96), db, true);
    wgmma::wait::<1>(&mut acc);
    wgmma::wait::<0>(&mut acc);
    words.put(hash(acc.as_ref()));

    // A group of single steps.
    acc.pin();
    wgmma::fence();
    acc.step::<T, _, _>(da, db, false);
    acc.step::<T, _, _>(da.advance(3), db.advance(3), true);
    wgmma::commit_group();
    wgmma::wait::<0>(&mut acc);
    words.put(hash(acc.as_ref()));

    // A in registers: the fragment of the first rows, with elements that only depend on the lane.
    let lane = warp::lane_id();
    let element = |r: u32, i: u32| small(lane + r, i);
    let word = |r: u32| {
        let at = |i: u32| bits(T::small(element(r, i)));
        if size_of::<T>() == 2 { at(0) | at(1) << 16 } else { at(0) | at(1) << 8 | at(2) << 16 | at(3) << 24 }
    };
    let fragment = [word(0), word(1), word(2), word(3)];
    acc.multiply_registers::<T, 1, _>([fragment], db, false);
    wgmma::wait::<0>(&mut acc);
    words.put(hash(acc.as_ref()));
    acc.multiply_registers::<T, 4, _>([fragment; 4], db, true);
    acc.multiply_registers::<T, 2, _>([fragment; 2], db.advance(1), true);
    wgmma::wait::<0>(&mut acc);
    words.put(hash(acc.as_ref()));

    // The narrower swizzles: a step or two along K.
    narrow::<S, T, A, { 64 * 64 }>(&mut words, &mut acc, tiles, Swizzle::B64);
    narrow::<S, T, A, { 64 * 32 }>(&mut words, &mut acc, tiles, Swizzle::B32);
    words.put(convert::pack_bf16x2(acc.as_ref()[1].to_f32(), acc.as_ref()[2].to_f32()));
    words.done();
}

/// A product of tiles with lines of 64 or 32 bytes, A in `BYTES`.
#[inline(always)]
unsafe fn narrow<S: Sum, T: Input<S> + Small, A: Accumulator<S> + AsRef<[S]>, const BYTES: usize>(
    words: &mut Words,
    acc: &mut A,
    tiles: Shared<T>,
    swizzle: Swizzle,
) {
    thread::sync_threads();
    let (first, second) = (tiles, tiles.offset(BYTES / size_of::<T>()));
    fill(first, 64, swizzle, small);
    fill(second, A::N as u32, swizzle, |i, k| small(i + 2, k + 1));
    tma::fence_async();
    thread::sync_threads();
    let da = Descriptor::<K>::with_lines(first.address(0u32), swizzle);
    let db = Descriptor::<K>::with_lines(second.address(0u32), swizzle);
    acc.multiply::<T, 1, _, _>(da, db, false);
    if swizzle == Swizzle::B64 {
        acc.multiply::<T, 1, _, _>(da.advance(1), db.advance(1), true);
    }
    wgmma::wait::<0>(acc);
    words.put(hash(acc.as_ref()));
}

/// The bits of a 16- or 8-bit value.
#[inline(always)]
fn bits<T: Small>(v: T) -> u32 {
    // SAFETY: an input has 1 or 2 bytes.
    unsafe {
        if size_of::<T>() == 2 {
            core::mem::transmute_copy::<T, u16>(&v) as u32
        } else {
            core::mem::transmute_copy::<T, u8>(&v) as u32
        }
    }
}

/// Words of a thread of `transposed`.
pub const WORDS_TRANSPOSED: usize = 6;

/// Operands whose M or N dimension is contiguous, for 16-bit types. `out`: `[THREADS, WORDS_TRANSPOSED]`.
#[inline(always)]
pub unsafe fn transposed<T: Input + Small, A: Accumulator + AsRef<[f32]>>(out: *mut u32) {
    let mut words = Words::new(out, WORDS_TRANSPOSED);
    let n = A::N as u32;
    let mut carver = Carver::new();
    // 64 values of K: A as 64 lines of 64 rows, B as 64 lines of each 64 columns.
    let a = carver.take_aligned::<T>(64 * 64, 1024);
    let b = carver.take_aligned::<T>(256 * 64, 1024);
    fill(a, 64, Swizzle::B128, |k, i| small(i, k));
    fill(b, n.next_multiple_of(64), Swizzle::B128, |line, i| small(line / 64 * 64 + i + 2, line % 64 + 1));
    tma::fence_async();
    thread::sync_threads();
    let da = Descriptor::<Mn>::new(a.address(0u32), 0);
    let db = Descriptor::<Mn>::new(b.address(0u32), 64 * 128);
    let mut acc = A::zero();
    acc.multiply::<T, 4, _, _>(da, db, false);
    wgmma::wait::<0>(&mut acc);
    words.put(hash(acc.as_ref()));
    words.put_f32(acc.as_ref()[0]);
    acc.multiply_registers::<T, 2, _>([[0x3c00_3c00; 4]; 2], db.advance(2), true);
    wgmma::wait::<0>(&mut acc);
    words.put(hash(acc.as_ref()));

    // The same product, B's parts of 64 columns taking turns every eight lines.
    let parts = n.div_ceil(64);
    let at = |line: u32, part: u32| (line / 8 * parts + part) * 8 + line % 8;
    thread::sync_threads();
    let mut i = thread::thread_idx_x();
    while i < 64 * parts * 64 {
        let (column, line, part) = (i % 64, i / 64 % 64, i / 4096);
        let to = Swizzle::B128.apply(at(line, part) * 128 + column * 2) / 2;
        b.set(to, T::small(small(part * 64 + column + 2, line + 1)));
        i += THREADS as u32;
    }
    tma::fence_async();
    thread::sync_threads();
    acc.multiply::<T, 4, _, _>(da, Descriptor::<Mn>::new(b.address(0u32), 1024).with_stride(1024 * parts), false);
    wgmma::wait::<0>(&mut acc);
    words.put(hash(acc.as_ref()));
    // And with K contiguous: the columns of B in groups of eight, 2048 bytes apart.
    thread::sync_threads();
    let mut i = thread::thread_idx_x();
    while i < n * 64 {
        let (k, column) = (i % 64, i / 64);
        let to = Swizzle::B128.apply((column / 8 * 16 + column % 8) * 128 + k * 2) / 2;
        b.set(to, T::small(small(column + 2, k + 1)));
        i += THREADS as u32;
    }
    tma::fence_async();
    thread::sync_threads();
    acc.multiply::<T, 4, _, _>(da, Descriptor::<K>::new(b.address(0u32)).with_stride(2048), false);
    wgmma::wait::<0>(&mut acc);
    words.put(hash(acc.as_ref()));

    // Registers are handed about among warpgroups; here there is one.
    wgmma::decrease_registers::<160>();
    wgmma::increase_registers::<168>();
    words.put(thread::sync_threads_count(true));
    words.done();
}

entries! {
    pub struct Args(out: *mut u32);
    conformance_wgmma_n8_bf16 {} [128, 1; Sm90a] => conformance::<f32, bf16, [f32; 4]>;
    conformance_wgmma_n16_f16 {} [128, 1; Sm90a] => conformance::<f32, f16, [f32; 8]>;
    conformance_wgmma_n24_e4m3 {} [128, 1; Sm90a] => conformance::<f32, E4M3, [f32; 12]>;
    conformance_wgmma_n32_e5m2 {} [128, 1; Sm90a] => conformance::<f32, E5M2, [f32; 16]>;
    conformance_wgmma_n48_e4m3 {} [128, 1; Sm90a] => conformance::<f32, E4M3, [f32; 24]>;
    conformance_wgmma_n64_bf16 {} [128, 1; Sm90a] => conformance::<f32, bf16, [f32; 32]>;
    conformance_wgmma_n72_e4m3 {} [128, 1; Sm90a] => conformance::<f32, E4M3, [f32; 36]>;
    conformance_wgmma_n96_f16 {} [128, 1; Sm90a] => conformance::<f32, f16, [f32; 48]>;
    conformance_wgmma_n128_e4m3 {} [128, 1; Sm90a] => conformance::<f32, E4M3, [f32; 64]>;
    conformance_wgmma_n192_bf16 {} [128, 1; Sm90a] => conformance::<f32, bf16, [f32; 96]>;
    conformance_wgmma_n224_f16 {} [128, 1; Sm90a] => conformance::<f32, f16, [f32; 112]>;
    conformance_wgmma_n256_bf16 {} [128, 1; Sm90a] => conformance::<f32, bf16, [f32; 128]>;
    conformance_wgmma_n8_i8 {} [128, 1; Sm90a] => conformance::<i32, i8, [i32; 4]>;
    conformance_wgmma_n16_i8 {} [128, 1; Sm90a] => conformance::<i32, i8, [i32; 8]>;
    conformance_wgmma_n64_i8 {} [128, 1; Sm90a] => conformance::<i32, i8, [i32; 32]>;
    conformance_wgmma_n96_i8 {} [128, 1; Sm90a] => conformance::<i32, i8, [i32; 48]>;
    conformance_wgmma_n256_i8 {} [128, 1; Sm90a] => conformance::<i32, i8, [i32; 128]>;
    conformance_wgmma_transposed_n64_bf16 {} [128, 1; Sm90a] => transposed::<bf16, [f32; 32]>;
    conformance_wgmma_transposed_n128_f16 {} [128, 1; Sm90a] => transposed::<f16, [f32; 64]>;
}
