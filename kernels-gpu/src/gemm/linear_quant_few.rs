//! `y = epilogue(x · wᵀ + bias)` of e4m3 or int8 tokens and weights on Hopper, for few tokens: [`linear_few`] with scales.
//!
//! Sums are those of [`linear_quant_wgmma`](super::linear_quant_wgmma) with as many parts of K, bit by bit: products of a step are added up by the same
//! instructions, which side of them the weights are on makes no difference, and parts in the same order.

use super::{linear_few, linear_pair};
use crate::TensorFloat;
use crate::scales::{BLOCKS, ROWS, Scales};
use cuda_std::tma::TensorMap;
use cuda_std::wgmma::{Accumulator, Input, Sum};
use cuda_std::{E4M3, bf16, entries, f16};

/// Elements of K in a stage.
pub const STEP: usize = 128;

/// As [`linear_few`](linear_few::linear_few), with boxes of [`STEP`] columns; scales as [`Scales::new`] takes them.
#[inline(always)]
pub unsafe fn linear_quant_few<
    X: Input<S>,
    S: Sum,
    T: TensorFloat,
    A: Accumulator + AsRef<[f32]> + AsMut<[f32]>,
    P: Accumulator<S> + AsRef<[S]>,
    const SCALES: u32,
    const TOKENS: usize,
    const STAGES: usize,
    const SPLIT: u32,
    const SHARE: u32,
>(
    x: *const TensorMap,
    w: *const TensorMap,
    y: *mut T,
    bias: *const T,
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
    rows: u32,
    tokens: u32,
    kind: u32,
    early: u32,
) {
    let scales = Scales::new(x_scales, x_scale_row, x_scale_group, w_scales, w_scale_row, w_scale_group);
    linear_few::scaled::<X, S, T, A, P, SCALES, 1, TOKENS, STAGES, SPLIT, SHARE>(
        x, w, y, bias, scales, m, n, k, y_row, rows, tokens, 1, kind, early,
    )
}

/// [`linear_pair`](super::linear_pair::linear_pair) with scales of rows: arguments as for [`linear_quant_few`], in boxes of [`linear_pair::HALF`] rows of `w`.
#[inline(always)]
pub unsafe fn linear_quant_pair<
    X: Input<S>,
    S: Sum,
    T: TensorFloat,
    P: Accumulator<S> + AsRef<[S]>,
    const STAGES: usize,
>(
    x: *const TensorMap,
    w: *const TensorMap,
    y: *mut T,
    bias: *const T,
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
    _rows: u32,
    tokens: u32,
    kind: u32,
    early: u32,
) {
    let scales = Scales::new(x_scales, x_scale_row, x_scale_group, w_scales, w_scale_row, w_scale_group);
    linear_pair::scaled::<X, S, T, P, ROWS, 1, STAGES>(x, w, y, bias, scales, m, n, k, y_row, tokens, kind, early)
}

entries! {
    /// Arguments of every `linear_quant_few_*` entry; see [`linear_quant_few`].
    pub struct Args<T>(
        x: TensorMap, w: TensorMap, y: *mut T, bias: *const T, x_scales: *const f32, x_scale_row: usize,
        x_scale_group: usize, w_scales: *const f32, w_scale_row: usize, w_scale_group: usize, m: u32, n: u32, k: u32,
        y_row: usize, rows: u32, tokens: u32, kind: u32, early: u32,
    );
    linear_quant_few_rows_t8_bf16 { type T = bf16; } [160, 2; Sm90a] => linear_quant_few::<E4M3, f32, T, [f32; 4], [f32; 4], ROWS, 8, 10, 1, 1>;
    linear_quant_few_rows_t8_f16 { type T = f16; } [160, 2; Sm90a] => linear_quant_few::<E4M3, f32, T, [f32; 4], [f32; 4], ROWS, 8, 10, 1, 1>;
    linear_quant_few_rows_t8_split2_bf16 { type T = bf16; } [160, 2; Sm90a] => linear_quant_few::<E4M3, f32, T, [f32; 4], [f32; 4], ROWS, 8, 10, 2, 1>;
    linear_quant_few_rows_t8_split2_f16 { type T = f16; } [160, 2; Sm90a] => linear_quant_few::<E4M3, f32, T, [f32; 4], [f32; 4], ROWS, 8, 10, 2, 1>;
    linear_quant_few_rows_t16_bf16 { type T = bf16; } [160, 2; Sm90a] => linear_quant_few::<E4M3, f32, T, [f32; 8], [f32; 8], ROWS, 16, 10, 1, 1>;
    linear_quant_few_rows_t16_f16 { type T = f16; } [160, 2; Sm90a] => linear_quant_few::<E4M3, f32, T, [f32; 8], [f32; 8], ROWS, 16, 10, 1, 1>;
    linear_quant_few_rows_t16_split2_bf16 { type T = bf16; } [160, 2; Sm90a] => linear_quant_few::<E4M3, f32, T, [f32; 8], [f32; 8], ROWS, 16, 10, 2, 1>;
    linear_quant_few_rows_t16_split2_f16 { type T = f16; } [160, 2; Sm90a] => linear_quant_few::<E4M3, f32, T, [f32; 8], [f32; 8], ROWS, 16, 10, 2, 1>;
    linear_quant_few_rows_t32_bf16 { type T = bf16; } [160, 2; Sm90a] => linear_quant_few::<E4M3, f32, T, [f32; 16], [f32; 16], ROWS, 32, 8, 1, 1>;
    linear_quant_few_rows_t32_f16 { type T = f16; } [160, 2; Sm90a] => linear_quant_few::<E4M3, f32, T, [f32; 16], [f32; 16], ROWS, 32, 8, 1, 1>;
    linear_quant_few_rows_t32_split2_bf16 { type T = bf16; } [160, 2; Sm90a] => linear_quant_few::<E4M3, f32, T, [f32; 16], [f32; 16], ROWS, 32, 8, 2, 1>;
    linear_quant_few_rows_t32_split2_f16 { type T = f16; } [160, 2; Sm90a] => linear_quant_few::<E4M3, f32, T, [f32; 16], [f32; 16], ROWS, 32, 8, 2, 1>;
    linear_quant_few_rows_t64_bf16 { type T = bf16; } [160, 1; Sm90a] => linear_quant_few::<E4M3, f32, T, [f32; 32], [f32; 32], ROWS, 64, 12, 1, 1>;
    linear_quant_few_rows_t64_f16 { type T = f16; } [160, 1; Sm90a] => linear_quant_few::<E4M3, f32, T, [f32; 32], [f32; 32], ROWS, 64, 12, 1, 1>;
    linear_quant_few_rows_t64_r6_bf16 { type T = bf16; } [160, 2; Sm90a] => linear_quant_few::<E4M3, f32, T, [f32; 32], [f32; 32], ROWS, 64, 6, 1, 1>;
    linear_quant_few_rows_t64_r6_f16 { type T = f16; } [160, 2; Sm90a] => linear_quant_few::<E4M3, f32, T, [f32; 32], [f32; 32], ROWS, 64, 6, 1, 1>;
    linear_quant_few_rows_t64_split2_bf16 { type T = bf16; } [160, 1; Sm90a] => linear_quant_few::<E4M3, f32, T, [f32; 32], [f32; 32], ROWS, 64, 12, 2, 1>;
    linear_quant_few_rows_t64_split2_f16 { type T = f16; } [160, 1; Sm90a] => linear_quant_few::<E4M3, f32, T, [f32; 32], [f32; 32], ROWS, 64, 12, 2, 1>;
    linear_quant_few_rows_t64_pair_bf16 { type T = bf16; } [160, 1; Sm90a] => linear_quant_pair::<E4M3, f32, T, [f32; 16], 8>;
    linear_quant_few_rows_t64_pair_f16 { type T = f16; } [160, 1; Sm90a] => linear_quant_pair::<E4M3, f32, T, [f32; 16], 8>;
    linear_quant_few_i8_t8_bf16 { type T = bf16; } [160, 2; Sm90a] => linear_quant_few::<i8, i32, T, [f32; 4], [i32; 4], ROWS, 8, 10, 1, 1>;
    linear_quant_few_i8_t8_f16 { type T = f16; } [160, 2; Sm90a] => linear_quant_few::<i8, i32, T, [f32; 4], [i32; 4], ROWS, 8, 10, 1, 1>;
    linear_quant_few_i8_t8_split2_bf16 { type T = bf16; } [160, 2; Sm90a] => linear_quant_few::<i8, i32, T, [f32; 4], [i32; 4], ROWS, 8, 10, 2, 1>;
    linear_quant_few_i8_t8_split2_f16 { type T = f16; } [160, 2; Sm90a] => linear_quant_few::<i8, i32, T, [f32; 4], [i32; 4], ROWS, 8, 10, 2, 1>;
    linear_quant_few_i8_t16_bf16 { type T = bf16; } [160, 2; Sm90a] => linear_quant_few::<i8, i32, T, [f32; 8], [i32; 8], ROWS, 16, 10, 1, 1>;
    linear_quant_few_i8_t16_f16 { type T = f16; } [160, 2; Sm90a] => linear_quant_few::<i8, i32, T, [f32; 8], [i32; 8], ROWS, 16, 10, 1, 1>;
    linear_quant_few_i8_t16_split2_bf16 { type T = bf16; } [160, 2; Sm90a] => linear_quant_few::<i8, i32, T, [f32; 8], [i32; 8], ROWS, 16, 10, 2, 1>;
    linear_quant_few_i8_t16_split2_f16 { type T = f16; } [160, 2; Sm90a] => linear_quant_few::<i8, i32, T, [f32; 8], [i32; 8], ROWS, 16, 10, 2, 1>;
    linear_quant_few_i8_t32_bf16 { type T = bf16; } [160, 2; Sm90a] => linear_quant_few::<i8, i32, T, [f32; 16], [i32; 16], ROWS, 32, 8, 1, 1>;
    linear_quant_few_i8_t32_f16 { type T = f16; } [160, 2; Sm90a] => linear_quant_few::<i8, i32, T, [f32; 16], [i32; 16], ROWS, 32, 8, 1, 1>;
    linear_quant_few_i8_t32_split2_bf16 { type T = bf16; } [160, 2; Sm90a] => linear_quant_few::<i8, i32, T, [f32; 16], [i32; 16], ROWS, 32, 8, 2, 1>;
    linear_quant_few_i8_t32_split2_f16 { type T = f16; } [160, 2; Sm90a] => linear_quant_few::<i8, i32, T, [f32; 16], [i32; 16], ROWS, 32, 8, 2, 1>;
    linear_quant_few_i8_t64_bf16 { type T = bf16; } [160, 1; Sm90a] => linear_quant_few::<i8, i32, T, [f32; 32], [i32; 32], ROWS, 64, 12, 1, 1>;
    linear_quant_few_i8_t64_f16 { type T = f16; } [160, 1; Sm90a] => linear_quant_few::<i8, i32, T, [f32; 32], [i32; 32], ROWS, 64, 12, 1, 1>;
    linear_quant_few_i8_t64_r6_bf16 { type T = bf16; } [160, 2; Sm90a] => linear_quant_few::<i8, i32, T, [f32; 32], [i32; 32], ROWS, 64, 6, 1, 1>;
    linear_quant_few_i8_t64_r6_f16 { type T = f16; } [160, 2; Sm90a] => linear_quant_few::<i8, i32, T, [f32; 32], [i32; 32], ROWS, 64, 6, 1, 1>;
    linear_quant_few_i8_t64_split2_bf16 { type T = bf16; } [160, 1; Sm90a] => linear_quant_few::<i8, i32, T, [f32; 32], [i32; 32], ROWS, 64, 12, 2, 1>;
    linear_quant_few_i8_t64_split2_f16 { type T = f16; } [160, 1; Sm90a] => linear_quant_few::<i8, i32, T, [f32; 32], [i32; 32], ROWS, 64, 12, 2, 1>;
    linear_quant_few_i8_t64_pair_bf16 { type T = bf16; } [160, 1; Sm90a] => linear_quant_pair::<i8, i32, T, [i32; 16], 8>;
    linear_quant_few_i8_t64_pair_f16 { type T = f16; } [160, 1; Sm90a] => linear_quant_pair::<i8, i32, T, [i32; 16], 8>;
    linear_quant_few_blocks_t8_bf16 { type T = bf16; } [160, 2; Sm90a] => linear_quant_few::<E4M3, f32, T, [f32; 4], [f32; 4], BLOCKS, 8, 10, 1, 1>;
    linear_quant_few_blocks_t8_f16 { type T = f16; } [160, 2; Sm90a] => linear_quant_few::<E4M3, f32, T, [f32; 4], [f32; 4], BLOCKS, 8, 10, 1, 1>;
    linear_quant_few_blocks_t8_split2_bf16 { type T = bf16; } [160, 2; Sm90a] => linear_quant_few::<E4M3, f32, T, [f32; 4], [f32; 4], BLOCKS, 8, 10, 2, 1>;
    linear_quant_few_blocks_t8_split2_f16 { type T = f16; } [160, 2; Sm90a] => linear_quant_few::<E4M3, f32, T, [f32; 4], [f32; 4], BLOCKS, 8, 10, 2, 1>;
    linear_quant_few_blocks_t16_bf16 { type T = bf16; } [160, 2; Sm90a] => linear_quant_few::<E4M3, f32, T, [f32; 8], [f32; 8], BLOCKS, 16, 10, 1, 1>;
    linear_quant_few_blocks_t16_f16 { type T = f16; } [160, 2; Sm90a] => linear_quant_few::<E4M3, f32, T, [f32; 8], [f32; 8], BLOCKS, 16, 10, 1, 1>;
    linear_quant_few_blocks_t16_split2_bf16 { type T = bf16; } [160, 2; Sm90a] => linear_quant_few::<E4M3, f32, T, [f32; 8], [f32; 8], BLOCKS, 16, 10, 2, 1>;
    linear_quant_few_blocks_t16_split2_f16 { type T = f16; } [160, 2; Sm90a] => linear_quant_few::<E4M3, f32, T, [f32; 8], [f32; 8], BLOCKS, 16, 10, 2, 1>;
    linear_quant_few_blocks_t32_bf16 { type T = bf16; } [160, 2; Sm90a] => linear_quant_few::<E4M3, f32, T, [f32; 16], [f32; 16], BLOCKS, 32, 8, 1, 1>;
    linear_quant_few_blocks_t32_f16 { type T = f16; } [160, 2; Sm90a] => linear_quant_few::<E4M3, f32, T, [f32; 16], [f32; 16], BLOCKS, 32, 8, 1, 1>;
    linear_quant_few_blocks_t32_split2_bf16 { type T = bf16; } [160, 2; Sm90a] => linear_quant_few::<E4M3, f32, T, [f32; 16], [f32; 16], BLOCKS, 32, 8, 2, 1>;
    linear_quant_few_blocks_t32_split2_f16 { type T = f16; } [160, 2; Sm90a] => linear_quant_few::<E4M3, f32, T, [f32; 16], [f32; 16], BLOCKS, 32, 8, 2, 1>;
    linear_quant_few_blocks_t64_bf16 { type T = bf16; } [160, 2; Sm90a] => linear_quant_few::<E4M3, f32, T, [f32; 32], [f32; 32], BLOCKS, 64, 6, 1, 1>;
    linear_quant_few_blocks_t64_f16 { type T = f16; } [160, 2; Sm90a] => linear_quant_few::<E4M3, f32, T, [f32; 32], [f32; 32], BLOCKS, 64, 6, 1, 1>;
    linear_quant_few_blocks_t64_split2_bf16 { type T = bf16; } [160, 2; Sm90a] => linear_quant_few::<E4M3, f32, T, [f32; 32], [f32; 32], BLOCKS, 64, 6, 2, 1>;
    linear_quant_few_blocks_t64_split2_f16 { type T = f16; } [160, 2; Sm90a] => linear_quant_few::<E4M3, f32, T, [f32; 32], [f32; 32], BLOCKS, 64, 6, 2, 1>;
}
