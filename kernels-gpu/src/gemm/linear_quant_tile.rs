//! `y = epilogue(x · wᵀ + bias)` of 8-bit tokens and weights with scales, on the tensor cores of sm_80 and later: any shape, any
//! strides.
//!
//! A block of eight warps computes `TILE` tokens by `TILE` outputs, each warp a half by a quarter of them with `m16n8k32` products
//! ([`TensorByte`]; e4m3 by way of f16): 128, or 64 where that makes too few blocks. Tiles of `STEP` bytes along K come in [`STAGES`] stages, laid out as in
//! [`linear_tile`](super::linear_tile): by `cp.async` if rows begin at multiples of 16 bytes, byte by byte otherwise.
//!
//! Scales that change along K are constant over 128 elements, which are one or two stages: then what they sum up to is multiplied and added
//! to sums in f32, and the products start again from zero. Scales of rows are applied at the end. int8 has exact sums in between.
//! Every element is summed in ascending K whatever the tile and the grid: results do not depend on how a batch is composed.

use super::epilogue;
use super::linear_tile::{sums_row, swizzled};
use crate::pipeline::Raster;
use crate::row::GROUP;
use crate::scales::{BLOCKS, ROWS, Scales};
use crate::tensor_byte::TensorByte;
use cuda_std::vec::{B64, B128};
use cuda_std::wgmma::Sum as _;
use cuda_std::{
    E4M3, Float, Global, GlobalMut, bf16, cp_async, dependent_launch, entries, f16, float, mma, shared, thread, unroll,
    warp,
};

/// Threads of a block.
pub const THREADS: usize = 256;
/// Stages in flight.
const STAGES: usize = 4;
/// Rows of tiles that run side by side.
const BAND: u32 = 8;

/// Elements of K in a stage for tiles of this size: about as many products between two barriers.
const fn step(tile: usize) -> usize {
    if tile == 128 { 64 } else { 128 }
}

/// Dynamic shared memory for tiles of this size: the stages, which make way for the sums.
pub const fn shared_bytes(tile: usize) -> usize {
    let (stages, sums) = (STAGES * 2 * tile * step(tile), tile * sums_row(tile) * 4);
    if stages > sums { stages } else { sums }
}

/// Rows of an operand that a thread copies 16 bytes of.
#[derive(Clone, Copy)]
struct Rows<Q> {
    rows: [Global<Q>; 2],
    /// Whether there are such rows. Of others nothing is read.
    there: [bool; 2],
}

impl<Q: TensorByte> Rows<Q> {
    /// Copies elements `at .. at + 16` of both rows, which are `low` and `high`, zeros for those beyond `k`.
    #[inline(always)]
    unsafe fn copy<const LINE: usize>(
        self,
        tile: shared::Shared<u8>,
        (low, high): (u32, u32),
        chunk: u32,
        at: u32,
        k: u32,
        aligned: bool,
    ) {
        unroll::<2>(|i| {
            let to = swizzled::<LINE>(if i == 0 { low } else { high }, chunk);
            if aligned {
                let bytes = if at < k && self.there[i] { (k - at).min(16) } else { 0 };
                cp_async::copy_16_zfill(tile.address(to), self.rows[i].ptr(if at < k { at } else { 0 }), bytes);
            } else {
                let from = Global::new(self.rows[i].ptr(0u32).cast::<u8>());
                let mut words = [0u32; 4];
                unroll::<16>(|b| {
                    if at + (b as u32) < k && self.there[i] {
                        words[b / 4] |= (from.get(at + b as u32) as u32) << (8 * (b % 4));
                    }
                });
                tile.set_as(to, B128(words));
            }
        });
    }
}

/// `x`: `[m, k]`, rows `x_row` apart; `w`: `[n, k]`, rows `w_row` apart; `bias`: `[n]` or null; `y`: `[m, n]`, rows `y_row`
/// apart; scales as [`Scales::new`] takes them, of blocks if `blocks`. If `aligned`, rows of `x` and `w` begin at multiples of 16 bytes.
/// `TILE` is 128 or 64, `STEP` its [`step`]. Grid: tiles of n times tiles of m; block: [`THREADS`]; shared memory: [`shared_bytes`].
#[inline(always)]
pub unsafe fn linear_quant_tile<Q: TensorByte, Y: Float, const TILE: usize, const STEP: usize>(
    y: *mut Y,
    x: *const Q,
    w: *const Q,
    bias: *const Y,
    x_scales: *const f32,
    x_scale_row: usize,
    x_scale_group: usize,
    w_scales: *const f32,
    w_scale_row: usize,
    w_scale_group: usize,
    m: u32,
    n: u32,
    k: u32,
    y_row: usize,
    x_row: usize,
    w_row: usize,
    kind: u32,
    blocks: u32,
    aligned: u32,
) {
    dependent_launch::begin();
    let (biased, blocks, aligned) = (!bias.is_null(), blocks != 0, aligned != 0);
    let by_row = Scales::<ROWS>::new(x_scales, x_scale_row, x_scale_group, w_scales, w_scale_row, w_scale_group);
    let by_block = Scales::<BLOCKS>::new(x_scales, x_scale_row, x_scale_group, w_scales, w_scale_row, w_scale_group);
    let (x, w, bias, y) = (Global::new(x), Global::new(w), Global::new(bias), GlobalMut::new(y));
    let (tid, lane) = (thread::thread_idx_x(), warp::lane_id());
    let warp_id = warp::warp_id();
    let raster = Raster { rows: m.div_ceil(TILE as u32), columns: n.div_ceil(TILE as u32), band: BAND };
    let (row, column) = raster.place(thread::block_idx_x());
    let (row0, col0) = (row * TILE as u32, column * TILE as u32);

    let tile_bytes = const { (TILE * STEP) as u32 };
    let stages = shared::Carver::new().take::<u8>(STAGES * 2 * TILE * STEP);

    // Copying: as in `linear_tile`.
    let (chunks, half) = const { ((STEP / 16) as u32, TILE as u32 / 2) };
    let (chunk, low) = (tid % chunks, tid / chunks);
    let from = |r: u32, rows: u32, stride: usize| r.min(rows - 1) as usize * stride;
    let there = |first: u32, rows: u32| [first + low < rows, first + low + half < rows];
    let xs = Rows {
        there: there(row0, m),
        rows: [x.offset(from(row0 + low, m, x_row)), x.offset(from(row0 + low + half, m, x_row))],
    };
    let ws = Rows {
        there: there(col0, n),
        rows: [w.offset(from(col0 + low, n, w_row)), w.offset(from(col0 + low + half, n, w_row))],
    };
    let copy = |stage: u32, step: u32| {
        let at = step * STEP as u32 + 16 * chunk;
        let to = stages.offset(stage * 2 * tile_bytes);
        let rows = (low, low + half);
        xs.copy::<STEP>(to, rows, chunk, at, k, aligned);
        ws.copy::<STEP>(to.offset(tile_bytes), rows, chunk, at, k, aligned);
    };

    let steps = k.div_ceil(STEP as u32);
    let ahead = const { STAGES as u32 - 1 };
    for s in 0..ahead {
        if s < steps {
            copy(s, s);
        }
        cp_async::commit_group();
    }

    // Rows that this lane addresses for `ldmatrix`: a matrix is 8 rows of 16 bytes.
    let (warp_row, warp_col) = (warp_id % 2 * half, warp_id / 2 * (half / 2));
    let (x_line, x_chunk) = (warp_row + lane % 16, lane / 16);
    let (w_line, w_chunk) = (warp_col + lane % 8 + lane / 16 * 8, lane / 8 % 2);
    let (g, t) = (lane / 4, lane % 4);
    // 16 tokens by 8 outputs each, of which a tile of 64 has half as many in both directions.
    let mut acc = [[[0f32; 4]; 4]; 4];
    let mut sums = [[[Q::ZERO; 4]; 4]; 4];
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
        let here = stages.address(stage * 2 * tile_bytes);
        for kk in 0..STEP / 32 {
            let kk = 2 * kk as u32;
            let mut a = [[0u32; 4]; 4];
            for i in 0..TILE / 32 {
                a[i] = mma::ldmatrix_x4(here + swizzled::<STEP>(x_line + 16 * i as u32, kk + x_chunk));
            }
            for j in 0..TILE / 64 {
                let at = here + tile_bytes + swizzled::<STEP>(w_line + 16 * j as u32, kk + w_chunk);
                let [b0, b1, c0, c1] = mma::ldmatrix_x4(at);
                for i in 0..TILE / 32 {
                    sums[i][2 * j] = Q::mma(a[i], [b0, b1], sums[i][2 * j]);
                    sums[i][2 * j + 1] = Q::mma(a[i], [c0, c1], sums[i][2 * j + 1]);
                }
            }
        }
        stage = if stage == ahead { 0 } else { stage + 1 };
        step += 1;
        let whole = step % const { (GROUP / STEP) as u32 } == 0 || step == steps;
        if blocks && whole {
            let group = (step - 1) / const { (GROUP / STEP) as u32 };
            // A tile's outputs are of one block of weights.
            let column = by_block.w(col0, group);
            for i in 0..TILE / 32 {
                unroll::<2>(|h| {
                    let row = (row0 + warp_row + 16 * i as u32 + g + 8 * h as u32).min(m - 1);
                    let scale = by_block.x(row, group) * column;
                    for j in 0..TILE / 32 {
                        unroll::<2>(|c| {
                            let e = 2 * h + c;
                            acc[i][j][e] = float::fma(sums[i][j][e].to_f32(), scale, acc[i][j][e]);
                            sums[i][j][e] = Q::ZERO;
                        });
                    }
                });
            }
        }
    }
    cp_async::wait_group::<0>();
    thread::sync_threads();

    // Elements 0 and 1 of a tile are row `g`, columns `2 t` and `2 t + 1`; 2 and 3 are 8 rows below.
    let sums_row = const { sums_row(TILE) as u32 };
    let all = shared::Carver::new().take::<f32>(TILE * sums_row as usize);
    for i in 0..TILE / 32 {
        for j in 0..TILE / 32 {
            unroll::<2>(|h| {
                let row = warp_row + 16 * i as u32 + g + 8 * h as u32;
                let at = row * sums_row + warp_col + 8 * j as u32 + 2 * t;
                // What was added up already has left zeros.
                let v = |c: usize| acc[i][j][2 * h + c] + sums[i][j][2 * h + c].to_f32();
                all.set_as(at, B64([v(0), v(1)]));
            });
        }
    }
    thread::sync_threads();
    // A thread keeps its column, and so its bias.
    let (part, first) = (tid % TILE as u32, tid / TILE as u32);
    let column = col0 + part;
    if column < n {
        let add = if biased { bias.get(column).to_f32() } else { 0.0 };
        let factor = if blocks { 1.0 } else { by_row.w(column, 0) };
        let mut r = first;
        while r < TILE as u32 && row0 + r < m {
            let scale = if blocks { 1.0 } else { by_row.x(row0 + r, 0) * factor };
            let value = float::fma(all.get(r * sums_row + part), scale, add);
            y.set((row0 + r) as usize * y_row + column as usize, Y::from_f32(epilogue(kind, value)));
            r += const { (THREADS / TILE) as u32 };
        }
    }
}

entries! {
    /// Arguments of every `linear_quant_tile_*` entry; see [`linear_quant_tile`].
    pub struct Args<Q, Y>(
        y: *mut Y, x: *const Q, w: *const Q, bias: *const Y, x_scales: *const f32, x_scale_row: usize,
        x_scale_group: usize, w_scales: *const f32, w_scale_row: usize, w_scale_group: usize, m: u32, n: u32, k: u32,
        y_row: usize, x_row: usize, w_row: usize, kind: u32, blocks: u32, aligned: u32,
    );
    linear_quant_tile_e4m3_f32 { type Q = E4M3; type Y = f32; } [256, 1] => linear_quant_tile::<Q, Y, 128, { step(128) }>;
    linear_quant_tile_e4m3_f16 { type Q = E4M3; type Y = f16; } [256, 1] => linear_quant_tile::<Q, Y, 128, { step(128) }>;
    linear_quant_tile_e4m3_bf16 { type Q = E4M3; type Y = bf16; } [256, 1] => linear_quant_tile::<Q, Y, 128, { step(128) }>;
    linear_quant_tile_i8_f32 { type Q = i8; type Y = f32; } [256, 1] => linear_quant_tile::<Q, Y, 128, { step(128) }>;
    linear_quant_tile_i8_f16 { type Q = i8; type Y = f16; } [256, 1] => linear_quant_tile::<Q, Y, 128, { step(128) }>;
    linear_quant_tile_i8_bf16 { type Q = i8; type Y = bf16; } [256, 1] => linear_quant_tile::<Q, Y, 128, { step(128) }>;
    linear_quant_tile64_e4m3_f32 { type Q = E4M3; type Y = f32; } [256, 1] => linear_quant_tile::<Q, Y, 64, { step(64) }>;
    linear_quant_tile64_e4m3_f16 { type Q = E4M3; type Y = f16; } [256, 1] => linear_quant_tile::<Q, Y, 64, { step(64) }>;
    linear_quant_tile64_e4m3_bf16 { type Q = E4M3; type Y = bf16; } [256, 1] => linear_quant_tile::<Q, Y, 64, { step(64) }>;
    linear_quant_tile64_i8_f32 { type Q = i8; type Y = f32; } [256, 1] => linear_quant_tile::<Q, Y, 64, { step(64) }>;
    linear_quant_tile64_i8_f16 { type Q = i8; type Y = f16; } [256, 1] => linear_quant_tile::<Q, Y, 64, { step(64) }>;
    linear_quant_tile64_i8_bf16 { type Q = i8; type Y = bf16; } [256, 1] => linear_quant_tile::<Q, Y, 64, { step(64) }>;
}
