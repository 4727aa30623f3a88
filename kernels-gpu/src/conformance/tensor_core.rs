//! `ldmatrix`, `movmatrix` and `mma.sync`. Operands are small integers, so every order of summation is exact.

use super::Words;
use cuda_std::shared::Carver;
use cuda_std::{E4M3, E5M2, Float, Shared, bf16, entries, f16, mma, thread};

/// Threads of the block: a warp.
pub const THREADS: usize = 32;
/// Words of a thread of `conformance`.
pub const WORDS: usize = 33;
/// Words of a thread of `float8`.
pub const WORDS_FLOAT8: usize = 8;
/// Dynamic shared memory.
pub const SHARED_BYTES: usize = 4096;

/// Value `i` of an operand.
#[inline(always)]
fn small(i: u32) -> f32 {
    (i * 7 % 11) as f32 - 5.0
}

/// A of 16 lines and B of 8 lines (of columns) of `K` values each, in shared memory.
#[inline(always)]
unsafe fn operands<T: Copy>(k: u32, value: impl Fn(u32) -> T) -> (Shared<T>, Shared<T>) {
    let mut carver = Carver::new();
    let (a, b) = (carver.take::<T>(16 * k as usize), carver.take::<T>(8 * k as usize));
    let t = thread::thread_idx_x();
    thread::sync_threads();
    let mut i = t;
    while i < 16 * k {
        a.set(i, value(i));
        if i < 8 * k {
            b.set(i, value(i + 3));
        }
        i += THREADS as u32;
    }
    thread::sync_threads();
    (a, b)
}

/// The fragments: 16 bytes of a line for each of four matrices of A and two of B.
#[inline(always)]
unsafe fn fragments<T: Copy>(a: Shared<T>, b: Shared<T>, k: u32) -> ([u32; 4], [u32; 2]) {
    let lane = thread::thread_idx_x();
    let a = mma::ldmatrix_x4(a.ptr(lane % 16 * k + lane / 16 * (k / 2)));
    let b = mma::ldmatrix_x2(b.ptr(lane % 8 * k + lane / 8 % 2 * (k / 2)));
    (a, b)
}

/// `out`: `[THREADS, WORDS]`. Grid: 1; block: `THREADS`.
#[inline(always)]
pub unsafe fn conformance(out: *mut u32) {
    let lane = thread::thread_idx_x();
    let mut words = Words::new(out, WORDS);

    let (a, b) = operands(16, |i| bf16::from_f32(small(i)));
    let (fa, fb) = fragments(a, b, 16);
    words.put(fa[0] ^ fa[1].rotate_left(3) ^ fa[2].rotate_left(7) ^ fa[3].rotate_left(11));
    words.put(fb[0] ^ fb[1].rotate_left(5));
    let row = a.ptr(lane % 16 * 16 + lane / 16 * 8);
    let v = mma::ldmatrix_x4_trans(row);
    words.put(v[0] ^ v[1].rotate_left(3) ^ v[2].rotate_left(7) ^ v[3].rotate_left(11));
    let v = mma::ldmatrix_x2_trans(row);
    words.put(v[0] ^ v[1].rotate_left(5));
    words.put(mma::ldmatrix_x1(row)[0]);
    words.put(mma::ldmatrix_x1_trans(row)[0]);
    words.put(mma::movmatrix_trans(lane * 0x0003_0001));
    // From the 32-bit address.
    words.put(mma::ldmatrix_x1(a.address(lane % 8 * 16))[0]);
    let sums = [1.0, 2.0, 3.0, lane as f32];
    words.put_all_f32(mma::m16n8k16_bf16(fa, fb, sums));

    let (a, b) = operands(16, |i| f16::from_f32(small(i)));
    let (fa, fb) = fragments(a, b, 16);
    words.put_all_f32(mma::m16n8k16_f16(fa, fb, sums));

    let (a, b) = operands(8, small);
    let (fa, fb) = fragments(a, b, 8);
    // The 13 lowest bits do not count.
    words.put_all_f32(mma::m16n8k8_tf32([fa[0] | lane, fa[1] | lane, fa[2] | lane, fa[3] | lane], fb, sums));

    let (a, b) = operands(32, |i| (i * 37 % 251) as i8);
    let (fa, fb) = fragments(a, b, 32);
    let [v0, v1, v2, v3] = mma::m16n8k32_i8(fa, fb, [1, -2, 3, lane as i32]);
    words.put_all([v0 as u32, v1 as u32, v2 as u32, v3 as u32]);
    // Random bits: integer products are exact whatever they are.
    let noise = |i: u32| (lane + 32 * i).wrapping_mul(0x9e37_79b9);
    let v = mma::m16n8k32_i8([noise(0), noise(1), noise(2), noise(3)], [noise(4), noise(5)], [0; 4]);
    words.put((v[0] ^ v[1] ^ v[2] ^ v[3]) as u32);
    words.put_all(fa);
    words.put_all(fb);
    words.put(thread::sync_threads_count(true));
    words.put(lane);
    words.done();
}

/// Products of 8-bit floats. `out`: `[THREADS, WORDS_FLOAT8]`.
#[inline(always)]
pub unsafe fn float8(out: *mut u32) {
    let mut words = Words::new(out, WORDS_FLOAT8);
    let sums = [1.0, 2.0, 3.0, thread::thread_idx_x() as f32];
    let (a, b) = operands(32, |i| E4M3::from_f32(small(i)));
    let (fa, fb) = fragments(a, b, 32);
    words.put_all_f32(mma::m16n8k32_e4m3(fa, fb, sums));
    let (a, b) = operands(32, |i| E5M2::from_f32((i % 7) as f32 - 3.0));
    let (fa, fb) = fragments(a, b, 32);
    words.put_all_f32(mma::m16n8k32_e5m2(fa, fb, sums));
    words.done();
}

entries! {
    pub struct Args(out: *mut u32);
    conformance_tensor_core {} [32] => conformance;
    conformance_tensor_core_float8 {} [32; Sm90a] => float8;
}
