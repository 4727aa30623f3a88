//! `y = epilogue(x · wᵀ + bias)` for many tokens on the tensor cores of sm_80 and later.
//!
//! A block of eight warps computes `TILE` tokens by `TILE` outputs, each warp a half by a quarter of them with `m16n8k16` products: 128, or 64
//! where that makes too few blocks. Tiles of 32 or 64 along K come by `cp.async` in [`STAGES`] stages. Two rows of 64 bytes share a line of 128, rows
//! of 128 bytes have one each; the 16-byte chunks of a line are permuted by `chunk ^ line % 8`, which spreads both the copies and the eight rows
//! that `ldmatrix` reads at once over all banks.
//!
//! The sums pass through shared memory at the end, so that neighbouring threads finish and store neighbouring outputs, and
//! the epilogue is written once. Every element is summed in ascending K whatever the tile and the grid: results do not depend on how a batch is
//! composed.

use super::rough;
use crate::TensorFloat;
use crate::pipeline::Raster;
use cuda_std::vec::B64;
use cuda_std::{Global, GlobalMut, bf16, cp_async, dependent_launch, entries, f16, mma, shared, thread, unroll, warp};

/// Threads of a block.
pub const THREADS: usize = 256;
/// Stages in flight.
const STAGES: usize = 4;
/// Rows of tiles that run side by side.
const BAND: u32 = 8;

/// Bytes of a row of a stage for tiles of this size: about as many products between two barriers.
const fn step(tile: usize) -> usize {
    if tile == 128 { 64 } else { 128 }
}

/// Sums of a token in shared memory: padded, so that the warps' stores spread over the banks.
pub(super) const fn sums_row(tile: usize) -> usize {
    tile + 8
}

/// Dynamic shared memory for tiles of this size: the stages, which make way for the sums.
pub const fn shared_bytes(tile: usize) -> usize {
    let (stages, sums) = (STAGES * 2 * tile * step(tile), tile * sums_row(tile) * 4);
    if stages > sums { stages } else { sums }
}

/// Where 16-byte chunk `chunk` of a row of `BYTES`, 64 or 128, lies in a tile, in bytes.
#[inline(always)]
pub(super) fn swizzled<const BYTES: usize>(row: u32, chunk: u32) -> u32 {
    if BYTES == 128 {
        return row * 128 + (chunk ^ (row % 8)) * 16;
    }
    let line = row / 2;
    line * 128 + ((row % 2 * 4 + chunk) ^ (line % 8)) * 16
}

/// `x`: `[m, k]`, rows `x_row` apart; `w`: `[n, k]`, rows `w_row` apart; `bias`: `[n]` or null; `y`: `[m, n]`, rows `y_row`
/// apart. `k`, `x_row`, `w_row` are multiples of 8, `x` and `w` aligned to 16 bytes. `TILE` is 128 or 64, `BYTES` those of a row of a stage, its [`step`]. Grid: tiles of n times tiles
/// of m; block: [`THREADS`]; shared memory: [`shared_bytes`].
#[inline(always)]
pub unsafe fn linear_tile<T: TensorFloat, const TILE: usize, const BYTES: usize>(
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
    let warp_id = warp::warp_id();
    let raster = Raster { rows: m.div_ceil(TILE as u32), columns: n.div_ceil(TILE as u32), band: BAND };
    let (row, column) = raster.place(thread::block_idx_x());
    let (row0, col0) = (row * TILE as u32, column * TILE as u32);

    let (tile_bytes, elements) = const { ((TILE * BYTES) as u32, BYTES as u32 / 2) };
    let stages = shared::Carver::new().take::<u8>(STAGES * 2 * TILE * BYTES).address(0u32);

    // Copying: thread `i` takes chunk `i % 4` of rows `i / 4` and `i / 4 + 64`, or `i % 8` of `i / 8` and `i / 8 + 32`. Of rows
    // beyond the last nothing is read: copies that repeat the last one all meet in one place of the second-level cache.
    let (chunks, half) = const { (BYTES as u32 / 16, TILE as u32 / 2) };
    let (chunk, low) = (tid % chunks, tid / chunks);
    let from = |r: u32, rows: u32, stride: usize| r.min(rows - 1) as usize * stride + 8 * chunk as usize;
    let xs = [x.offset(from(row0 + low, m, x_row)), x.offset(from(row0 + low + half, m, x_row))];
    let ws = [w.offset(from(col0 + low, n, w_row)), w.offset(from(col0 + low + half, n, w_row))];
    let there = |first: u32, rows: u32| [first + low < rows, first + low + half < rows];
    let (x_there, w_there) = (there(row0, m), there(col0, n));
    let copy = |stage: u32, step: u32| {
        let k0 = step * elements;
        let inside = k0 + 8 * chunk < k;
        let bytes = |there: bool| if inside && there { 16 } else { 0 };
        let to = stages + stage * 2 * tile_bytes;
        unroll::<2>(|i| {
            let at = to + swizzled::<BYTES>(low + half * i as u32, chunk);
            cp_async::copy_16_zfill(at, xs[i].ptr(k0), bytes(x_there[i]));
            cp_async::copy_16_zfill(at + tile_bytes, ws[i].ptr(k0), bytes(w_there[i]));
        });
    };

    let steps = k.div_ceil(elements);
    let ahead = const { STAGES as u32 - 1 };
    for s in 0..ahead {
        if s < steps {
            copy(s, s);
        }
        cp_async::commit_group();
    }

    // Rows that this lane addresses for `ldmatrix`.
    let (warp_row, warp_col) = (warp_id % 2 * half, warp_id / 2 * (half / 2));
    let (x_line, x_chunk) = (warp_row + lane % 16, lane / 16);
    let (w_line, w_chunk) = (warp_col + lane % 8 + lane / 16 * 8, lane / 8 % 2);
    // 16 tokens by 8 outputs each, of which a tile of 64 has half as many in both directions.
    let mut acc = [[[0f32; 4]; 4]; 4];
    let mut stage = 0;
    let mut step = 0;
    while step < steps {
        // All but the latest groups have landed, and everybody is done with the stage before.
        cp_async::wait_group::<{ STAGES - 2 }>();
        thread::sync_threads();
        if step + ahead < steps {
            copy(if stage == 0 { ahead } else { stage - 1 }, step + ahead);
        }
        cp_async::commit_group();
        let here = stages + stage * 2 * tile_bytes;
        for kk in 0..BYTES / 32 {
            let kk = 2 * kk as u32;
            let mut a = [[0u32; 4]; 4];
            for i in 0..TILE / 32 {
                a[i] = mma::ldmatrix_x4(here + swizzled::<BYTES>(x_line + 16 * i as u32, kk + x_chunk));
            }
            for j in 0..TILE / 64 {
                let at = here + tile_bytes + swizzled::<BYTES>(w_line + 16 * j as u32, kk + w_chunk);
                let [b0, b1, c0, c1] = mma::ldmatrix_x4(at);
                for i in 0..TILE / 32 {
                    acc[i][2 * j] = T::mma(a[i], [b0, b1], acc[i][2 * j]);
                    acc[i][2 * j + 1] = T::mma(a[i], [c0, c1], acc[i][2 * j + 1]);
                }
            }
        }
        stage = if stage == ahead { 0 } else { stage + 1 };
        step += 1;
    }
    cp_async::wait_group::<0>();
    thread::sync_threads();

    // Elements 0 and 1 of a tile are row `g`, columns `2 t` and `2 t + 1`; 2 and 3 are 8 rows below.
    let sums_row = const { sums_row(TILE) as u32 };
    let sums = shared::Carver::new().take::<f32>(TILE * sums_row as usize);
    let (g, t) = (lane / 4, lane % 4);
    for i in 0..TILE / 32 {
        for j in 0..TILE / 32 {
            unroll::<2>(|h| {
                let row = warp_row + 16 * i as u32 + g + 8 * h as u32;
                let at = row * sums_row + warp_col + 8 * j as u32 + 2 * t;
                sums.set_as(at, B64([acc[i][j][2 * h], acc[i][j][2 * h + 1]]));
            });
        }
    }
    thread::sync_threads();
    // A thread keeps its column, and so its bias.
    let (part, first) = (tid % TILE as u32, tid / TILE as u32);
    let column = col0 + part;
    if column < n {
        let add = if biased { bias.get(column).to_f32() } else { 0.0 };
        let mut r = first;
        while r < TILE as u32 && row0 + r < m {
            let value = rough::epilogue(kind, sums.get(r * sums_row + part) + add);
            y.set((row0 + r) as usize * y_row + column as usize, T::from_f32(value));
            r += const { (THREADS / TILE) as u32 };
        }
    }
}

entries! {
    /// Arguments of every `linear_tile_*` entry; see [`linear_tile`].
    pub struct Args<T>(
        y: *mut T, x: *const T, w: *const T, bias: *const T, m: u32, n: u32, k: u32, y_row: usize, x_row: usize,
        w_row: usize, kind: u32,
    );
    linear_tile_bf16 { type T = bf16; } [256, 2] => linear_tile::<T, 128, { step(128) }>;
    linear_tile_f16 { type T = f16; } [256, 2] => linear_tile::<T, 128, { step(128) }>;
    linear_tile64_bf16 { type T = bf16; } [256, 2] => linear_tile::<T, 64, { step(64) }>;
    linear_tile64_f16 { type T = f16; } [256, 2] => linear_tile::<T, 64, { step(64) }>;
}
