//! Products of the fused block for many tokens: tiles in shared memory, tensor cores of sm_80 and later.
//!
//! A block computes [`ROWS`] rows of weights for `16 PAIR_TILES` pairs of an expert. Weights are the 16-row side of `m16n8k16`
//! products and pairs the 8-column side, so that few pairs waste little; tiles of [`STEP`] along K come by `cp.async` in
//! `STAGES` stages, in rows of 128 bytes whose 16-byte chunks are permuted by `chunk ^ row % 8`, so that both the copies and
//! `ldmatrix` spread over the banks. Eight warps, 4 x 2, have 32 rows by half of the pairs each. As in the streaming path, 16
//! rows are 8 gates and the 8 values that belong to them, which meet in one thread.
//!
//! Neighbouring blocks take the same rows of weights for [`GROUP`] neighbouring blocks of pairs, then the next rows: weights of
//! an expert with many pairs are fetched from memory once for the group.

use super::fused::{Fused, Kernel, nothing_to_do};
use super::pairs::NOWHERE;
use crate::tensor_float::TensorFloat;
use cuda_std::{Global, Shared, cp_async, dependent_launch, mma, shared, thread, unroll, warp};

/// Rows of weights of a block: as many outputs, or half as many if they have a gate and a value.
pub const ROWS: usize = 128;
/// Threads of a block.
pub const THREADS: usize = 256;
/// Elements of K in a stage.
const STEP: usize = 64;
/// 16-byte chunks of a row in a stage.
const CHUNKS: u32 = 8;
/// Blocks of pairs that share weights in time.
const GROUP: u32 = 8;
/// Sums of a pair in shared memory: padded, so that the warps' stores spread over the banks.
const SUMS_ROW: usize = ROWS + 4;

/// Pairs of a block.
pub const fn pairs(pair_tiles: usize) -> usize {
    16 * pair_tiles
}

/// Dynamic shared memory: the stages, of which the sums take part at the end, and the pairs' ids.
pub const fn shared_bytes(pair_tiles: usize, stages: usize) -> usize {
    assert!(pairs(pair_tiles) * SUMS_ROW * 4 <= stages * (ROWS + pairs(pair_tiles)) * STEP * 2);
    stages * (ROWS + pairs(pair_tiles)) * STEP * 2 + pairs(pair_tiles) * 4
}

/// The first product, or the second.
pub struct Tile<const UP: bool, const PAIR_TILES: usize, const STAGES: usize>;

/// Column tile and block of pairs of this block.
#[inline(always)]
pub(super) fn place(columns: u32) -> (u32, u32) {
    let (id, columns) = (thread::block_idx_x(), columns.max(1));
    let blocks = thread::grid_dim_x() / columns;
    let group = id / (columns * GROUP);
    let rest = id - group * columns * GROUP;
    let size = (blocks - (group * GROUP).min(blocks)).clamp(1, GROUP);
    (rest / size, group * GROUP + rest % size)
}

/// Element of a chunk in a tile of rows of [`STEP`] elements.
#[inline(always)]
fn swizzled(row: u32, chunk: u32) -> u32 {
    row * STEP as u32 + 8 * (chunk ^ (row % CHUNKS))
}

impl<T: TensorFloat, const UP: bool, const PAIR_TILES: usize, const STAGES: usize> Kernel<T>
    for Tile<UP, PAIR_TILES, STAGES>
{
    #[inline(always)]
    unsafe fn run(a: Fused<T>) {
        if UP {
            // The sorted list may still be in the making.
            dependent_launch::wait();
            dependent_launch::launch_dependents();
        }
        let (tid, lane) = (thread::thread_idx_x(), warp::lane_id());
        let warp_id = warp::shfl_idx(tid / 32, 0);
        let outputs = if a.gated() { ROWS / 2 } else { ROWS } as u32;
        let (column_tile, block) = place(a.n.div_ceil(outputs));
        let bin = a.expert_ids.get(block);
        if bin < 0 {
            return nothing_to_do::<UP>();
        }
        let expert = a.expert(bin as u32);
        let first_output = column_tile * outputs;
        let mut carver = shared::Carver::new();
        let count = const { pairs(PAIR_TILES) };
        let ws = carver.take::<T>(STAGES * ROWS * STEP);
        let xs = carver.take::<T>(STAGES * count * STEP);
        let ids = carver.take::<u32>(count);

        // Copying: thread `i` takes chunk `i % 8` of rows `i / 8 + 32 j`. Rows beyond the last repeat it.
        let (chunk, low) = (tid % CHUNKS, tid / CHUNKS);
        let output_of = |row: u32| {
            if a.gated() { (first_output + row / 16 * 8 + row % 8, row % 16 >= 8) } else { (first_output + row, false) }
        };
        let mut weights = [expert.weights; ROWS / 32];
        unroll::<{ ROWS / 32 }>(|j| {
            let (output, up) = output_of(low + 32 * j as u32);
            let row = a.weight_row(output.min(a.n - 1), up);
            weights[j] = expert.weights.offset(row as usize * a.k as usize + 8 * chunk as usize);
        });
        let copy_weights = |stage: u32, k0: u32| {
            let bytes = if k0 + 8 * chunk < a.k { 16 } else { 0 };
            unroll::<{ ROWS / 32 }>(|j| {
                let to = stage * (ROWS * STEP) as u32 + swizzled(low + 32 * j as u32, chunk);
                cp_async::copy_16_zfill(ws.address(to), weights[j].ptr(k0), bytes);
            });
        };
        // Rows of pairs are copied 32 at a time as well, so half of the `PAIR_TILES` places are used.
        let (mut operands, mut there) = ([a.x; PAIR_TILES], [false; PAIR_TILES]);
        unroll::<PAIR_TILES>(|j| {
            let row = low + 32 * j as u32;
            if j < PAIR_TILES / 2 {
                let pair = a.sorted_pair(block, count as u32, row);
                if chunk == 0 {
                    ids.set(row, pair.unwrap_or(NOWHERE));
                }
                there[j] = pair.is_some();
                let offset = a.operand::<UP>(pair.unwrap_or(0)) + 8 * chunk as usize;
                operands[j] = if UP { a.x.offset(offset) } else { Global::new(a.h.ptr(offset).cast_const()) };
            }
        });
        let copy_operands = |stage: u32, k0: u32| {
            unroll::<PAIR_TILES>(|j| {
                let row = low + 32 * j as u32;
                if j < PAIR_TILES / 2 {
                    // Of what is not there nothing is read: all blocks would read the same row.
                    let bytes = if there[j] && k0 + 8 * chunk < a.k { 16 } else { 0 };
                    let to = stage * (count * STEP) as u32 + swizzled(row, chunk);
                    cp_async::copy_16_zfill(xs.address(to), operands[j].ptr(k0), bytes);
                }
            });
        };

        let steps = a.k.div_ceil(STEP as u32);
        let ahead = const { STAGES as u32 - 1 };
        if !UP {
            for s in 0..ahead {
                copy_weights(s, s * STEP as u32);
            }
            dependent_launch::wait();
            dependent_launch::launch_dependents();
        }
        for s in 0..ahead {
            if UP {
                copy_weights(s, s * STEP as u32);
            }
            copy_operands(s, s * STEP as u32);
            cp_async::commit_group();
        }

        let (warp_row, warp_pair) = (warp_id % 4 * 32, warp_id / 4 * (count as u32 / 2));
        let mut acc = [[[0f32; 4]; PAIR_TILES]; 2];
        let mut stage = 0;
        let mut step = 0;
        while step < steps {
            // All but the latest `STAGES - 2` groups have landed, and everybody is done with the stage before.
            match STAGES {
                3 => cp_async::wait_group::<1>(),
                _ => cp_async::wait_group::<2>(),
            }
            thread::sync_threads();
            let next = step + ahead;
            if next < steps {
                let into = if stage == 0 { ahead } else { stage - 1 };
                copy_weights(into, next * STEP as u32);
                copy_operands(into, next * STEP as u32);
            }
            cp_async::commit_group();
            multiply::<T, PAIR_TILES>(
                &mut acc,
                ws.offset(stage * (ROWS * STEP) as u32),
                xs.offset(stage * (count * STEP) as u32),
                warp_row,
                warp_pair,
                lane,
            );
            stage = if stage == ahead { 0 } else { stage + 1 };
            step += 1;
        }
        cp_async::wait_group::<0>();
        thread::sync_threads();

        // Through shared memory, so that neighbouring threads finish neighbouring outputs, and a gate meets its value.
        // Element `e` of a tile is row `g + 8 (e / 2)`, pair `2 t + e % 2`.
        let sums = shared::Carver::new().take::<f32>(count * SUMS_ROW);
        let (g, t) = (lane / 4, lane % 4);
        unroll::<2>(|r| {
            unroll::<PAIR_TILES>(|p| {
                unroll::<4>(|e| {
                    let row = warp_row + r as u32 * 16 + g + 8 * (e as u32 / 2);
                    let pair = warp_pair + p as u32 * 8 + 2 * t + e as u32 % 2;
                    sums.set(pair * SUMS_ROW as u32 + row, acc[r][p][e]);
                });
            });
        });
        thread::sync_threads();
        let mut i = tid;
        while i < count as u32 * outputs {
            let (column, o) = (i / outputs, i % outputs);
            let (pair, output) = (ids.get(column), first_output + o);
            if pair != NOWHERE && output < a.n {
                let row = column * SUMS_ROW as u32 + if a.gated() { o / 8 * 16 + o % 8 } else { o };
                if UP {
                    let up = if a.gated() { sums.get(row + 8) } else { 0.0 };
                    a.store_up(expert, pair, output, sums.get(row), up);
                } else {
                    a.store_down(expert, pair, output, sums.get(row));
                }
            }
            i += THREADS as u32;
        }
    }
}

/// Adds a stage's products to a warp's tile of 32 rows.
#[inline(always)]
unsafe fn multiply<T: TensorFloat, const PAIR_TILES: usize>(
    acc: &mut [[[f32; 4]; PAIR_TILES]; 2],
    ws: Shared<T>,
    xs: Shared<T>,
    warp_row: u32,
    warp_pair: u32,
    lane: u32,
) {
    // `ldmatrix` takes row `lane % 8` of matrix `lane / 8` from each lane.
    let (matrix, row) = (lane / 8, lane % 8);
    unroll::<{ STEP / 16 }>(|k| {
        let k = 2 * k as u32;
        let mut w = [[0u32; 4]; 2];
        unroll::<2>(|r| {
            let at = swizzled(warp_row + r as u32 * 16 + matrix % 2 * 8 + row, k + matrix / 2);
            w[r] = mma::ldmatrix_x4(ws.address(at));
        });
        let mut p = 0;
        while p < PAIR_TILES {
            let at = swizzled(warp_pair + p as u32 * 8 + matrix / 2 * 8 + row, k + matrix % 2);
            let x = mma::ldmatrix_x4(xs.address(at));
            unroll::<2>(|half| {
                unroll::<2>(|r| {
                    acc[r][p + half] = T::mma(w[r], [x[2 * half], x[2 * half + 1]], acc[r][p + half]);
                });
            });
            p += 2;
        }
    });
}
