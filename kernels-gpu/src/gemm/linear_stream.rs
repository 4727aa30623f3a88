//! `y = epilogue(x · wᵀ + bias)` for few tokens: a stream of weights through the tensor cores.
//!
//! With few tokens the time is that of reading `w` once, so everything serves a steady stream of 16-byte loads. The
//! weights are the 16-row side of `m16n8k16` products and the tokens the 8-column side. A product does not care in which
//! order its inner dimension runs as long as both operands agree; so thread `t` of a row's four takes 8 neighbouring
//! elements of every 32 (one 16-byte load) and calls them elements `2 t, 2 t + 1, 2 t + 8, 2 t + 9` of two steps of 16.
//! Weights go from memory to tensor-core registers without shared memory, with as many loads in flight as registers
//! allow.
//!
//! A block has eight warps, which share [`ROWS`] rows of `w` and split K among them; their sums meet in shared memory
//! and are added in the order of the warps. The split depends on K alone: results do not depend on how many tokens there are.

use super::epilogue;
use crate::tensor_float::TensorFloat;
use cuda_std::vec::B128;
use cuda_std::{Global, GlobalMut, bf16, dependent_launch, entries, f16, shared, thread, unroll, warp};

/// Rows of `w` that a block computes.
pub const ROWS: usize = 16;
/// Warps of a block.
const WARPS: usize = 8;
/// Threads of a block.
pub const THREADS: usize = WARPS * 32;
/// Elements of K in a step of a warp.
const STEP: usize = 32;

/// Dynamic shared memory of the kernel for `tiles` tiles of 8 tokens.
pub const fn shared_bytes(tiles: usize) -> usize {
    WARPS * ROWS * tiles * 8 * 4
}

/// `x`: `[m, k]` with `m <= 8 TILES`, rows `x_row` apart; `w`: `[n, k]`, rows `w_row` apart; `bias`: `[n]` or null; `y`:
/// `[m, n]`, rows `y_row` apart. `k`, `x_row`, `w_row` are multiples of 8, `x` and `w` aligned to 16 bytes.
/// `BATCH`: steps whose loads are in flight together. Grid: tiles of [`ROWS`] of n; block: [`THREADS`]; shared memory: [`shared_bytes`] of `TILES`.
#[inline(always)]
pub unsafe fn linear_stream<T: TensorFloat, const TILES: usize, const BATCH: usize>(
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
    let biased = !bias.is_null();
    let (x, w, bias, y) = (Global::new(x), Global::new(w), Global::new(bias), GlobalMut::new(y));
    let (tid, lane) = (thread::thread_idx_x(), warp::lane_id());
    let warp_id = warp::shfl_idx(tid / 32, 0);
    let (g, t) = (lane / 4, lane % 4);
    let row0 = thread::block_idx_x() * ROWS as u32;

    // Rows beyond the last repeat it; what they give is not stored.
    let row = |r: u32| (row0 + r).min(n - 1) as usize * w_row;
    let (upper, lower) = (w.offset(row(g)), w.offset(row(g + 8)));
    let steps = k.div_ceil(STEP as u32);
    let per_warp = steps.div_ceil(WARPS as u32);
    let (first, last) = ((warp_id * per_warp).min(steps), ((warp_id + 1) * per_warp).min(steps));

    // Eight elements, as the words that the tensor cores take.
    let zero = B128([0u32; 4]);
    let mut acc = [[0f32; 4]; TILES];
    let mut step = first;
    while step < last {
        let mut a = [[zero; 2]; BATCH];
        let mut b = [[zero; TILES]; BATCH];
        unroll::<BATCH>(|i| {
            let at = (step + i as u32) * STEP as u32 + 8 * t;
            if step + (i as u32) < last && at < k {
                a[i] = [upper.get_as::<B128<u32, 4>>(at), lower.get_as::<B128<u32, 4>>(at)];
                unroll::<TILES>(|tile| {
                    let token = tile as u32 * 8 + g;
                    if token < m {
                        b[i][tile] = x.get_as::<B128<u32, 4>>(token as usize * x_row + at as usize);
                    }
                });
            }
        });
        unroll::<BATCH>(|i| {
            let (B128(u), B128(l)) = (a[i][0], a[i][1]);
            unroll::<2>(|half| {
                let e = 2 * half;
                let fa = [u[e], l[e], u[e + 1], l[e + 1]];
                unroll::<TILES>(|tile| {
                    let B128(v) = b[i][tile];
                    acc[tile] = T::mma(fa, [v[e], v[e + 1]], acc[tile]);
                });
            });
        });
        step += BATCH as u32;
    }

    // Element `e` of a tile is row `g + 8 (e / 2)` of the block's, token `2 t + e % 2` of the tile's.
    let tokens = const { TILES * 8 };
    let sums = shared::Carver::new().take::<f32>(WARPS * ROWS * tokens);
    unroll::<TILES>(|tile| {
        unroll::<4>(|e| {
            let (r, token) = (g + 8 * (e as u32 / 2), tile as u32 * 8 + 2 * t + e as u32 % 2);
            sums.set((warp_id as usize * tokens + token as usize) * ROWS + r as usize, acc[tile][e]);
        });
    });
    thread::sync_threads();
    let mut i = tid;
    while i < m * ROWS as u32 {
        let (token, r) = (i / ROWS as u32, i % ROWS as u32);
        let mut sum = 0f32;
        for warp in 0..WARPS {
            sum += sums.get((warp * tokens) * ROWS + i as usize);
        }
        let column = row0 + r;
        if column < n {
            let b = if biased { bias.get(column).to_f32() } else { 0.0 };
            y.set(token as usize * y_row + column as usize, T::from_f32(epilogue(kind, sum + b)));
        }
        i += THREADS as u32;
    }
}

entries! {
    /// Arguments of every `linear_stream_*` entry; see [`linear_stream`].
    pub struct Args<T>(
        y: *mut T, x: *const T, w: *const T, bias: *const T, m: u32, n: u32, k: u32, y_row: usize, x_row: usize,
        w_row: usize, kind: u32,
    );
    linear_stream_t8_bf16 { type T = bf16; } [256, 2] => linear_stream::<T, 1, 4>;
    linear_stream_t8_f16 { type T = f16; } [256, 2] => linear_stream::<T, 1, 4>;
    linear_stream_t16_bf16 { type T = bf16; } [256, 1] => linear_stream::<T, 2, 4>;
    linear_stream_t16_f16 { type T = f16; } [256, 1] => linear_stream::<T, 2, 4>;
    linear_stream_t32_bf16 { type T = bf16; } [256, 1] => linear_stream::<T, 4, 3>;
    linear_stream_t32_f16 { type T = f16; } [256, 1] => linear_stream::<T, 4, 3>;
    linear_stream_t64_bf16 { type T = bf16; } [256, 1] => linear_stream::<T, 8, 2>;
    linear_stream_t64_f16 { type T = f16; } [256, 1] => linear_stream::<T, 8, 2>;
}
