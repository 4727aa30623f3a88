//! Products of the fused block with 8-bit weights and activations on the tensor cores of sm_80 and later: any size that is a multiple of 16.
//!
//! A block of eight warps computes [`ROWS`] rows of weights for `16 PAIR_TILES` pairs of an expert, as [`fused_tile`] does it,
//! and in its order, so that weights of an expert with many pairs are seldom fetched again:
//! weights are the 16-row side of `m16n8k32` products ([`TensorByte`]; e4m3 by way of f16), of 16 rows 8 are gates and 8 their
//! values, stages of 128 bytes of K come by `cp.async`. A stage is also what scales of blocks cover: then its sums are multiplied with
//! their scales and added up in f32. Scales of rows are applied at the end; int8 sums are exact until then.

use super::expert_activation::ExpertActivation;
use super::fused::{HALVES, PLAIN};
use super::fused_tile::{self, place};
use super::pairs::NOWHERE;
use crate::row::GROUP;
use crate::tensor_byte::TensorByte;
use cuda_std::vec::B64;
use cuda_std::wgmma::Sum as _;
use cuda_std::{
    E4M3, Float, Global, GlobalMut, bf16, cp_async, dependent_launch, entries, f16, float, mma, shared, thread, unroll,
    warp,
};

/// Rows of weights of a block: as many outputs, or half as many if they have a gate and a value.
pub const ROWS: usize = 128;
/// Threads of a block.
pub const THREADS: usize = 256;
/// Bytes of K in a stage.
const STEP: usize = 128;
/// 16-byte chunks of a row in a stage.
const CHUNKS: u32 = 8;
/// Sums of a pair in shared memory: padded, so that the warps' stores spread over the banks.
const SUMS_ROW: usize = ROWS + 4;

/// Dynamic shared memory: the stages, of which the sums take part at the end, and the pairs' ids, weights and rows.
pub const fn shared_bytes(pair_tiles: usize) -> usize {
    let pairs = fused_tile::pairs(pair_tiles);
    let stages = stages(pair_tiles) * (ROWS + pairs) * STEP;
    assert!(pairs * SUMS_ROW * 4 <= stages);
    stages + pairs * 12
}

/// Stages in flight: what fits the 99 KiB that every GPU gives a block.
const fn stages(pair_tiles: usize) -> usize {
    if pair_tiles > 2 { 3 } else { 4 }
}

/// Where a chunk lies in a tile of rows of [`STEP`] bytes.
#[inline(always)]
fn swizzled(row: u32, chunk: u32) -> u32 {
    row * STEP as u32 + 16 * (chunk ^ (row % CHUNKS))
}

/// The first product, or the second: results of type `T` for the first (`h`), weighted and in f32 for the second (`partial`). See
/// [`e4m3::Args`]. `PAIR_TILES` is 2, 4, .., 8. Grid: tiles of rows × blocks of pairs; block: [`THREADS`]; shared memory: [`shared_bytes`].
#[inline(always)]
pub unsafe fn fused_quant_tile<Q: TensorByte, T: Float, const UP: bool, const PAIR_TILES: usize>(
    out: *mut T,
    x: *const Q,
    x_row: usize,
    x_scales: *const f32,
    x_scale_row: usize,
    x_divisor: u32,
    w: *const Q,
    shared_w: *const Q,
    w_scales: *const f32,
    shared_w_scales: *const f32,
    w_scale_expert: usize,
    w_scale_row: usize,
    bias: *const f32,
    shared_bias: *const f32,
    local: u32,
    sorted_ids: *const i32,
    sorted_weights: *const f32,
    expert_ids: *const i32,
    pairs: u32,
    n: u32,
    k: u32,
    layout: u32,
    activation: u32,
    alpha: f32,
    limit: f32,
    blocks: u32,
) {
    dependent_launch::wait();
    dependent_launch::launch_dependents();
    let (tid, lane) = (thread::thread_idx_x(), warp::lane_id());
    let warp_id = warp::shfl_idx(tid / 32, 0);
    let (gated, blocks) = (UP && layout != PLAIN, blocks != 0);
    let (outputs, rows) = if gated { (ROWS as u32 / 2, 2 * n) } else { (ROWS as u32, n) };
    let (column_tile, block) = place(n.div_ceil(outputs));
    let (count, most) = const { (fused_tile::pairs(PAIR_TILES), stages(PAIR_TILES)) };
    let bin = Global::new(expert_ids).get(block);
    if bin < 0 {
        return;
    }
    // Routed experts and shared ones.
    let routed = (bin as u32) < local;
    let bin = if routed { bin as u32 } else { bin as u32 - local } as usize;
    let (w, w_scales, bias) = if routed { (w, w_scales, bias) } else { (shared_w, shared_w_scales, shared_bias) };
    let first_output = column_tile * outputs;
    let mut carver = shared::Carver::new();
    let ws = carver.take::<u8>(most * ROWS * STEP);
    let xs = carver.take::<u8>(most * count * STEP);
    let ids = carver.take::<u32>(count);
    let weights_of = carver.take::<f32>(count);
    // Rows of `x`, in memory as registers are short.
    let x_rows = carver.take::<u32>(count);
    let groups = k.div_ceil(GROUP as u32);
    // The row of weights behind a row of the tile. Rows beyond the last repeat it.
    let weight_row = |row: u32| {
        if !gated {
            return (first_output + row).min(n - 1);
        }
        let (output, up) = ((first_output + row / 16 * 8 + row % 8).min(n - 1), row % 16 >= 8);
        if layout == HALVES { output + if up { n } else { 0 } } else { 2 * output + up as u32 }
    };

    // Copying: thread `i` takes chunk `i % 8` of rows `i / 8 + 32 j`.
    let (chunk, low) = (tid % CHUNKS, tid / CHUNKS);
    let w = Global::new(w).offset(bin * rows as usize * k as usize);
    let mut weights = [w; ROWS / 32];
    unroll::<{ ROWS / 32 }>(|j| weights[j] = w.offset(weight_row(low + 32 * j as u32) as usize * k as usize));
    // SAFETY: it is the number of slots, or 1.
    core::hint::assert_unchecked(x_divisor != 0);
    // Rows of pairs are copied 32 at a time as well, so half of the `PAIR_TILES` places are used.
    let mut operands = [Global::new(x); PAIR_TILES];
    let mut there = [false; PAIR_TILES];
    unroll::<PAIR_TILES>(|j| {
        if j < PAIR_TILES / 2 {
            let (row, at) = (low + 32 * j as u32, block * count as u32 + low + 32 * j as u32);
            let pair = Global::new(sorted_ids).get(at) as u32;
            there[j] = pair < pairs;
            if chunk == 0 {
                ids.set(row, if there[j] { pair } else { NOWHERE });
                x_rows.set(row, if there[j] { pair / x_divisor } else { 0 });
                if !UP {
                    weights_of.set(row, if there[j] { Global::new(sorted_weights).get(at) } else { 0.0 });
                }
            }
            operands[j] = operands[j].offset(if there[j] { (pair / x_divisor) as usize * x_row } else { 0 });
        }
    });
    let copy = |stage: u32, step: u32| {
        let at = step * STEP as u32 + 16 * chunk;
        let bytes = if at < k { 16 } else { 0 };
        let at = if at < k { at } else { 0 };
        unroll::<{ ROWS / 32 }>(|j| {
            let to = stage * (ROWS * STEP) as u32 + swizzled(low + 32 * j as u32, chunk);
            cp_async::copy_16_zfill(ws.address(to), weights[j].ptr(at), bytes);
        });
        unroll::<PAIR_TILES>(|j| {
            if j < PAIR_TILES / 2 {
                let to = stage * (count * STEP) as u32 + swizzled(low + 32 * j as u32, chunk);
                cp_async::copy_16_zfill(xs.address(to), operands[j].ptr(at), if there[j] { bytes } else { 0 });
            }
        });
    };
    let ahead = const { stages(PAIR_TILES) as u32 - 1 };
    for s in 0..ahead {
        copy(s, s);
        cp_async::commit_group();
    }
    thread::sync_threads();

    let (warp_row, warp_pair) = (warp_id % 4 * 32, warp_id / 4 * (count as u32 / 2));
    let (matrix, row) = (lane / 8, lane % 8);
    let (g, t) = (lane / 4, lane % 4);
    // Where the scales are of this thread's rows of weights and of its pairs.
    let w_scales = Global::new(w_scales);
    let mut w_scale = [w_scales; 4];
    unroll::<4>(|i| {
        let row = weight_row(warp_row + 8 * i as u32 + g) as usize;
        let all = rows as usize;
        w_scale[i] = if blocks {
            w_scales.offset((bin * all.div_ceil(GROUP) + row / GROUP) * groups as usize)
        } else {
            w_scales.offset(bin * w_scale_expert + row * w_scale_row)
        };
    });
    let x_scales = Global::new(x_scales);
    let mut acc = [[[0f32; 4]; PAIR_TILES]; 2];
    let mut sums = [[[Q::ZERO; 4]; PAIR_TILES]; 2];
    let (mut stage, mut step) = (0, 0);
    while step < groups {
        // All but the latest groups have landed, and everybody is done with the stage before.
        if PAIR_TILES > 2 {
            cp_async::wait_group::<1>();
        } else {
            cp_async::wait_group::<2>();
        }
        thread::sync_threads();
        if step + ahead < groups {
            copy(if stage == 0 { ahead } else { stage - 1 }, step + ahead);
        }
        cp_async::commit_group();
        let (ws, xs) = (ws.address(stage * (ROWS * STEP) as u32), xs.address(stage * (count * STEP) as u32));
        unroll::<{ STEP / 32 }>(|kk| {
            let kk = 2 * kk as u32;
            let mut a = [[0u32; 4]; 2];
            unroll::<2>(|r| {
                let at = swizzled(warp_row + r as u32 * 16 + matrix % 2 * 8 + row, kk + matrix / 2);
                a[r] = mma::ldmatrix_x4(ws + at);
            });
            let mut p = 0;
            while p < PAIR_TILES {
                let at = swizzled(warp_pair + p as u32 * 8 + matrix / 2 * 8 + row, kk + matrix % 2);
                let x = mma::ldmatrix_x4(xs + at);
                unroll::<2>(|half| {
                    unroll::<2>(|r| {
                        let b = [x[2 * half], x[2 * half + 1]];
                        sums[r][p + half] = Q::mma(a[r], b, sums[r][p + half]);
                    });
                });
                p += 2;
            }
        });
        let last = step + 1 == groups;
        if blocks || last {
            let at = if blocks { step } else { 0 };
            let (mut by_row, mut by_pair) = ([0f32; 4], [[0f32; 2]; PAIR_TILES]);
            unroll::<4>(|i| by_row[i] = w_scale[i].get(at));
            unroll::<PAIR_TILES>(|p| {
                let B64(rows) = x_rows.get_as::<B64<u32, 2>>(warp_pair + p as u32 * 8 + 2 * t);
                by_pair[p] = rows.map(|row: u32| x_scales.get(row as usize * x_scale_row + at as usize));
            });
            unroll::<2>(|r| {
                unroll::<PAIR_TILES>(|p| {
                    unroll::<4>(|e| {
                        let scale = by_row[2 * r + e / 2] * by_pair[p][e % 2];
                        acc[r][p][e] = float::fma(sums[r][p][e].to_f32(), scale, acc[r][p][e]);
                        sums[r][p][e] = Q::ZERO;
                    });
                });
            });
        }
        stage = if stage == ahead { 0 } else { stage + 1 };
        step += 1;
    }
    cp_async::wait_group::<0>();
    thread::sync_threads();

    // Through shared memory, so that neighbouring threads finish neighbouring outputs, and a gate meets its value.
    // Element `e` of a tile is row `g + 8 (e / 2)`, pair `2 t + e % 2`.
    let all = shared::Carver::new().take::<f32>(count * SUMS_ROW);
    unroll::<2>(|r| {
        unroll::<PAIR_TILES>(|p| {
            unroll::<4>(|e| {
                let row = warp_row + r as u32 * 16 + g + 8 * (e as u32 / 2);
                let pair = warp_pair + p as u32 * 8 + 2 * t + e as u32 % 2;
                all.set(pair * SUMS_ROW as u32 + row, acc[r][p][e]);
            });
        });
    });
    thread::sync_threads();
    let activation = ExpertActivation { kind: activation, alpha, limit };
    let out = GlobalMut::new(out);
    let (bias, biased) = (Global::new(bias), !bias.is_null());
    let bias = |row: u32| if biased { bias.get(bin * rows as usize + row as usize) } else { 0.0 };
    let mut i = tid;
    while i < count as u32 * outputs {
        let (column, o) = (i / outputs, i % outputs);
        let (pair, output) = (ids.get(column), first_output + o);
        if pair != NOWHERE && output < n {
            let row = column * SUMS_ROW as u32;
            let value = if gated {
                let row = row + o / 8 * 16 + o % 8;
                let (gate, up) = if layout == HALVES { (output, output + n) } else { (2 * output, 2 * output + 1) };
                activation.gated(all.get(row) + bias(gate), all.get(row + 8) + bias(up))
            } else if UP {
                activation.apply(all.get(row + o) + bias(output))
            } else {
                (all.get(row + o) + bias(output)) * weights_of.get(column)
            };
            out.set(pair as usize * n as usize + output as usize, T::from_f32(value));
        }
        i += THREADS as u32;
    }
}

/// The tables of a type of operands: the first product for each element type, and the second.
macro_rules! tables {
    ($($(#[$doc:meta])* $module:ident: $Q:ty, [$($up:ident, $T:ty, $up_tiles:literal;)*], [$($down:ident, $down_tiles:literal;)*];)*) => { $(
        $(#[$doc])*
        pub mod $module {
            use super::*;
            entries! {
                /// Arguments of both products.
                pub struct Args<T>(
                    /// `[pairs, n]`.
                    out: *mut T,
                    /// Row `pair / x_divisor` belongs to a pair; rows `x_row` apart, those of scales `x_scale_row`.
                    x: *const $Q, x_row: usize, x_scales: *const f32, x_scale_row: usize, x_divisor: u32,
                    /// `[local, rows, k]`, and of the shared experts.
                    w: *const $Q, shared_w: *const $Q,
                    /// `[.., rows / 128, k / 128]` if `blocks`, else those of rows, `w_scale_row` apart, of experts, `w_scale_expert` apart.
                    w_scales: *const f32, shared_w_scales: *const f32, w_scale_expert: usize, w_scale_row: usize,
                    /// `[.., rows]` or null.
                    bias: *const f32, shared_bias: *const f32,
                    /// Routed experts of this device.
                    local: u32,
                    /// From [`sort`](crate::moe::sort), in blocks of as many pairs as the instance takes at a time.
                    sorted_ids: *const i32, sorted_weights: *const f32, expert_ids: *const i32, pairs: u32,
                    /// Outputs and inner dimension.
                    n: u32, k: u32,
                    /// See [`fused::Args`](crate::moe::fused::Args).
                    layout: u32, activation: u32, alpha: f32, limit: f32,
                    /// Whether scales are of blocks, and of each 128 columns of `x`.
                    blocks: u32,
                );
                $($up { type T = $T; } [THREADS, 1] => fused_quant_tile::<$Q, T, true, $up_tiles>;)*
                $($down { type T = f32; } [THREADS, 1] => fused_quant_tile::<$Q, T, false, $down_tiles>;)*
            }
        }
    )* };
}
tables! {
    /// e4m3.
    e4m3: E4M3, [
        moe_fused_quant_tile32_up_e4m3_f32, f32, 2;
        moe_fused_quant_tile32_up_e4m3_f16, f16, 2;
        moe_fused_quant_tile32_up_e4m3_bf16, bf16, 2;
        moe_fused_quant_tile128_up_e4m3_f32, f32, 8;
        moe_fused_quant_tile128_up_e4m3_f16, f16, 8;
        moe_fused_quant_tile128_up_e4m3_bf16, bf16, 8;
    ], [moe_fused_quant_tile32_down_e4m3, 2; moe_fused_quant_tile128_down_e4m3, 8;];
    /// int8.
    int8: i8, [
        moe_fused_quant_tile32_up_i8_f32, f32, 2;
        moe_fused_quant_tile32_up_i8_f16, f16, 2;
        moe_fused_quant_tile32_up_i8_bf16, bf16, 2;
        moe_fused_quant_tile128_up_i8_f32, f32, 8;
        moe_fused_quant_tile128_up_i8_f16, f16, 8;
        moe_fused_quant_tile128_up_i8_bf16, bf16, 8;
    ], [moe_fused_quant_tile32_down_i8, 2; moe_fused_quant_tile128_down_i8, 8;];
}
