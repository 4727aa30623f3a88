//! `y = epilogue(x · wᵀ + bias)` with ordinary multiply-adds: any shape, any strides, any float type.
//!
//! The path for `f32`, and for what the tensor-core kernels do not take (rows that are not multiples of 16 bytes). A
//! block computes a 64 x 64 tile of `y` with 256 threads of 4 x 4 each; tiles of 16 along K pass through shared
//! memory as `f32`, K-major, so that a thread's operands are two 16-byte reads a step. Every element is summed in
//! ascending K with one `fma` a term, whatever the grid: results do not depend on how a batch is composed.

use super::epilogue;
use cuda_std::vec::B128;
use cuda_std::{Float, Global, GlobalMut, bf16, dependent_launch, entries, f16, float, shared, thread};

/// Rows and columns of a block's tile.
pub const TILE: usize = 64;
/// Depth of a step along K.
const STEP: usize = 16;
/// Threads of a block.
pub const THREADS: usize = 256;
/// A row of a tile in shared memory: padded, so that the transposing stores spread over the banks.
const ROW: usize = TILE + 4;
/// Dynamic shared memory.
pub const SHARED_BYTES: usize = 2 * STEP * ROW * 4;

/// `x`: `[m, k]`, rows `x_row` apart; `w`: `[n, k]`, rows `w_row` apart; `bias`: `[n]` or null; `y`: `[m, n]`, rows `y_row`
/// apart. Grid: (tiles of n, tiles of m); block: [`THREADS`]; shared memory: [`SHARED_BYTES`].
#[inline(always)]
pub unsafe fn linear_fma<T: Float>(
    y: *mut T,
    x: *const T,
    w: *const T,
    bias: *const T,
    m: u32,
    n: u32,
    k: u32,
    y_row: usize,
    x_row: usize,
    w_row: usize,
    kind: u32,
) {
    dependent_launch::begin();
    let mut carver = shared::Carver::new();
    let (xs, ws) = (carver.take::<f32>(STEP * ROW), carver.take::<f32>(STEP * ROW));
    let biased = !bias.is_null();
    let (x, w, bias, y) = (Global::new(x), Global::new(w), Global::new(bias), GlobalMut::new(y));
    let tid = thread::thread_idx_x();
    let (row0, col0) = (thread::block_idx_y() * TILE as u32, thread::block_idx_x() * TILE as u32);
    // Loading: thread `i` takes column `i % 16` of rows `i / 16 + 16 j`. Computing: rows `4 (i / 16)`, columns `4 (i % 16)`.
    let (low, high) = (tid % 16, tid / 16);

    let mut acc = [[0f32; 4]; 4];
    let mut k0 = 0;
    while k0 < k {
        for j in 0..TILE as u32 / 16 {
            let r = high + 16 * j;
            let inside = k0 + low < k;
            let at = (k0 + low) as usize;
            let a = if inside && row0 + r < m { x.get((row0 + r) as usize * x_row + at).to_f32() } else { 0.0 };
            let b = if inside && col0 + r < n { w.get((col0 + r) as usize * w_row + at).to_f32() } else { 0.0 };
            xs.set(low as usize * ROW + r as usize, a);
            ws.set(low as usize * ROW + r as usize, b);
        }
        thread::sync_threads();
        for s in 0..STEP {
            let B128(a) = xs.get_as::<B128<f32, 4>>(s * ROW + 4 * high as usize);
            let B128(b) = ws.get_as::<B128<f32, 4>>(s * ROW + 4 * low as usize);
            for i in 0..4 {
                for j in 0..4 {
                    acc[i][j] = float::fma(a[i], b[j], acc[i][j]);
                }
            }
        }
        thread::sync_threads();
        k0 += STEP as u32;
    }

    for i in 0..4 {
        for j in 0..4 {
            let (r, c) = (row0 + 4 * high + i as u32, col0 + 4 * low + j as u32);
            if r < m && c < n {
                let b = if biased { bias.get(c).to_f32() } else { 0.0 };
                y.set(r as usize * y_row + c as usize, T::from_f32(epilogue(kind, acc[i][j] + b)));
            }
        }
    }
}

entries! {
    /// Arguments of every `linear_fma_*` entry; see [`linear_fma`].
    pub struct Args<T>(
        y: *mut T, x: *const T, w: *const T, bias: *const T, m: u32, n: u32, k: u32, y_row: usize, x_row: usize,
        w_row: usize, kind: u32,
    );
    linear_fma_f32 { type T = f32; } [256, 2] => linear_fma::<T>;
    linear_fma_f16 { type T = f16; } [256, 2] => linear_fma::<T>;
    linear_fma_bf16 { type T = bf16; } [256, 2] => linear_fma::<T>;
}
