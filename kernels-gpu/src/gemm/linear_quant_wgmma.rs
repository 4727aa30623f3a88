//! `y = epilogue(x · wᵀ + bias)` of e4m3 or int8 tokens and weights on Hopper's tensor cores: [`linear_wgmma`] with scales.
//!
//! With scales of rows the sums of all of K stay in the tensor cores' accumulators, as cuBLAS does it by default: those keep some
//! 14 bits of what is added to them; those of int8 are exact, and rounded to f32 once. Scales of blocks:
//! [`linear_quant_blocks`](mod@super::linear_quant_blocks).

use super::linear_quant_blocks::linear_quant_blocks;
use super::linear_wgmma;
use crate::TensorFloat;
use crate::scales::{ROWS, Scales};
use cuda_std::tma::TensorMap;
use cuda_std::wgmma::{Accumulator, Input, Sum};
use cuda_std::{E4M3, bf16, entries, f16};

/// Elements of K in a stage.
pub const STEP: usize = 128;

/// As [`linear_wgmma`](linear_wgmma::linear_wgmma), with boxes of [`STEP`] columns; scales as [`Scales::new`] takes them.
#[inline(always)]
pub unsafe fn linear_quant_wgmma<
    X: Input<S>,
    S: Sum,
    T: TensorFloat,
    P: Accumulator<S> + AsRef<[S]>,
    const SCALES: u32,
    const N: usize,
    const GROUPS: u32,
    const STAGES: usize,
    const DOWN: u32,
    const ACROSS: u32,
    const SPLIT: u32,
>(
    x: *const TensorMap,
    x_last: *const TensorMap,
    w: *const TensorMap,
    w_last: *const TensorMap,
    y: *const TensorMap,
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
    kind: u32,
) {
    let scales = Scales::new(x_scales, x_scale_row, x_scale_group, w_scales, w_scale_row, w_scale_group);
    linear_wgmma::scaled::<X, S, T, P, SCALES, { linear_wgmma::ROWS }, N, GROUPS, STAGES, DOWN, ACROSS, SPLIT>(
        x, x_last, w, w_last, y, bias, scales, m, n, k, kind,
    )
}

entries! {
    /// Arguments of every `linear_quant_wgmma_*` entry; see [`linear_quant_wgmma`].
    pub struct Args<T>(
        x: TensorMap, x_last: TensorMap, w: TensorMap, w_last: TensorMap, y: TensorMap, bias: *const T,
        x_scales: *const f32, x_scale_row: usize, x_scale_group: usize, w_scales: *const f32, w_scale_row: usize,
        w_scale_group: usize, m: u32, n: u32, k: u32, kind: u32,
    );
    linear_quant_wgmma_rows_n256_bf16 { type T = bf16; } [384, 1; Sm90a] => linear_quant_wgmma::<E4M3, f32, T, [f32; 128], ROWS, 256, 2, 4, 1, 1, 1>;
    linear_quant_wgmma_rows_n256_f16 { type T = f16; } [384, 1; Sm90a] => linear_quant_wgmma::<E4M3, f32, T, [f32; 128], ROWS, 256, 2, 4, 1, 1, 1>;
    linear_quant_wgmma_rows_n256_w2_bf16 { type T = bf16; } [384, 1; Sm90a] => linear_quant_wgmma::<E4M3, f32, T, [f32; 128], ROWS, 256, 2, 4, 2, 1, 1>;
    linear_quant_wgmma_rows_n256_w2_f16 { type T = f16; } [384, 1; Sm90a] => linear_quant_wgmma::<E4M3, f32, T, [f32; 128], ROWS, 256, 2, 4, 2, 1, 1>;
    linear_quant_wgmma_rows_n192_bf16 { type T = bf16; } [384, 1; Sm90a] => linear_quant_wgmma::<E4M3, f32, T, [f32; 96], ROWS, 192, 2, 4, 1, 1, 1>;
    linear_quant_wgmma_rows_n192_f16 { type T = f16; } [384, 1; Sm90a] => linear_quant_wgmma::<E4M3, f32, T, [f32; 96], ROWS, 192, 2, 4, 1, 1, 1>;
    linear_quant_wgmma_rows_n128_bf16 { type T = bf16; } [384, 1; Sm90a] => linear_quant_wgmma::<E4M3, f32, T, [f32; 64], ROWS, 128, 2, 6, 1, 1, 1>;
    linear_quant_wgmma_rows_n128_f16 { type T = f16; } [384, 1; Sm90a] => linear_quant_wgmma::<E4M3, f32, T, [f32; 64], ROWS, 128, 2, 6, 1, 1, 1>;
    linear_quant_wgmma_rows_n128_split2_bf16 { type T = bf16; } [384, 1; Sm90a] => linear_quant_wgmma::<E4M3, f32, T, [f32; 64], ROWS, 128, 2, 5, 1, 1, 2>;
    linear_quant_wgmma_rows_n128_split2_f16 { type T = f16; } [384, 1; Sm90a] => linear_quant_wgmma::<E4M3, f32, T, [f32; 64], ROWS, 128, 2, 5, 1, 1, 2>;
    linear_quant_wgmma_rows_n96_bf16 { type T = bf16; } [384, 1; Sm90a] => linear_quant_wgmma::<E4M3, f32, T, [f32; 48], ROWS, 96, 2, 6, 1, 1, 1>;
    linear_quant_wgmma_rows_n96_f16 { type T = f16; } [384, 1; Sm90a] => linear_quant_wgmma::<E4M3, f32, T, [f32; 48], ROWS, 96, 2, 6, 1, 1, 1>;
    linear_quant_wgmma_rows_n64_bf16 { type T = bf16; } [384, 1; Sm90a] => linear_quant_wgmma::<E4M3, f32, T, [f32; 32], ROWS, 64, 2, 8, 1, 1, 1>;
    linear_quant_wgmma_rows_n64_f16 { type T = f16; } [384, 1; Sm90a] => linear_quant_wgmma::<E4M3, f32, T, [f32; 32], ROWS, 64, 2, 8, 1, 1, 1>;
    linear_quant_wgmma_rows_n64_split2_bf16 { type T = bf16; } [384, 1; Sm90a] => linear_quant_wgmma::<E4M3, f32, T, [f32; 32], ROWS, 64, 2, 8, 1, 1, 2>;
    linear_quant_wgmma_rows_n64_split2_f16 { type T = f16; } [384, 1; Sm90a] => linear_quant_wgmma::<E4M3, f32, T, [f32; 32], ROWS, 64, 2, 8, 1, 1, 2>;
    linear_quant_wgmma_rows_n64_split4_bf16 { type T = bf16; } [384, 1; Sm90a] => linear_quant_wgmma::<E4M3, f32, T, [f32; 32], ROWS, 64, 2, 8, 1, 1, 4>;
    linear_quant_wgmma_rows_n64_split4_f16 { type T = f16; } [384, 1; Sm90a] => linear_quant_wgmma::<E4M3, f32, T, [f32; 32], ROWS, 64, 2, 8, 1, 1, 4>;
    linear_quant_wgmma_i8_n256_bf16 { type T = bf16; } [384, 1; Sm90a] => linear_quant_wgmma::<i8, i32, T, [i32; 128], ROWS, 256, 2, 4, 1, 1, 1>;
    linear_quant_wgmma_i8_n256_f16 { type T = f16; } [384, 1; Sm90a] => linear_quant_wgmma::<i8, i32, T, [i32; 128], ROWS, 256, 2, 4, 1, 1, 1>;
    linear_quant_wgmma_i8_n256_w2_bf16 { type T = bf16; } [384, 1; Sm90a] => linear_quant_wgmma::<i8, i32, T, [i32; 128], ROWS, 256, 2, 4, 2, 1, 1>;
    linear_quant_wgmma_i8_n256_w2_f16 { type T = f16; } [384, 1; Sm90a] => linear_quant_wgmma::<i8, i32, T, [i32; 128], ROWS, 256, 2, 4, 2, 1, 1>;
    linear_quant_wgmma_i8_n192_bf16 { type T = bf16; } [384, 1; Sm90a] => linear_quant_wgmma::<i8, i32, T, [i32; 96], ROWS, 192, 2, 4, 1, 1, 1>;
    linear_quant_wgmma_i8_n192_f16 { type T = f16; } [384, 1; Sm90a] => linear_quant_wgmma::<i8, i32, T, [i32; 96], ROWS, 192, 2, 4, 1, 1, 1>;
    linear_quant_wgmma_i8_n128_bf16 { type T = bf16; } [384, 1; Sm90a] => linear_quant_wgmma::<i8, i32, T, [i32; 64], ROWS, 128, 2, 6, 1, 1, 1>;
    linear_quant_wgmma_i8_n128_f16 { type T = f16; } [384, 1; Sm90a] => linear_quant_wgmma::<i8, i32, T, [i32; 64], ROWS, 128, 2, 6, 1, 1, 1>;
    linear_quant_wgmma_i8_n128_split2_bf16 { type T = bf16; } [384, 1; Sm90a] => linear_quant_wgmma::<i8, i32, T, [i32; 64], ROWS, 128, 2, 5, 1, 1, 2>;
    linear_quant_wgmma_i8_n128_split2_f16 { type T = f16; } [384, 1; Sm90a] => linear_quant_wgmma::<i8, i32, T, [i32; 64], ROWS, 128, 2, 5, 1, 1, 2>;
    linear_quant_wgmma_i8_n96_bf16 { type T = bf16; } [384, 1; Sm90a] => linear_quant_wgmma::<i8, i32, T, [i32; 48], ROWS, 96, 2, 6, 1, 1, 1>;
    linear_quant_wgmma_i8_n96_f16 { type T = f16; } [384, 1; Sm90a] => linear_quant_wgmma::<i8, i32, T, [i32; 48], ROWS, 96, 2, 6, 1, 1, 1>;
    linear_quant_wgmma_i8_n64_bf16 { type T = bf16; } [384, 1; Sm90a] => linear_quant_wgmma::<i8, i32, T, [i32; 32], ROWS, 64, 2, 8, 1, 1, 1>;
    linear_quant_wgmma_i8_n64_f16 { type T = f16; } [384, 1; Sm90a] => linear_quant_wgmma::<i8, i32, T, [i32; 32], ROWS, 64, 2, 8, 1, 1, 1>;
    linear_quant_wgmma_i8_n64_split2_bf16 { type T = bf16; } [384, 1; Sm90a] => linear_quant_wgmma::<i8, i32, T, [i32; 32], ROWS, 64, 2, 8, 1, 1, 2>;
    linear_quant_wgmma_i8_n64_split2_f16 { type T = f16; } [384, 1; Sm90a] => linear_quant_wgmma::<i8, i32, T, [i32; 32], ROWS, 64, 2, 8, 1, 1, 2>;
    linear_quant_wgmma_i8_n64_split4_bf16 { type T = bf16; } [384, 1; Sm90a] => linear_quant_wgmma::<i8, i32, T, [i32; 32], ROWS, 64, 2, 8, 1, 1, 4>;
    linear_quant_wgmma_i8_n64_split4_f16 { type T = f16; } [384, 1; Sm90a] => linear_quant_wgmma::<i8, i32, T, [i32; 32], ROWS, 64, 2, 8, 1, 1, 4>;
    linear_quant_wgmma_blocks_n192_bf16 { type T = bf16; } [384, 1; Sm90a] => linear_quant_blocks::<T, [f32; 96], 192, 192, 4, 1>;
    linear_quant_wgmma_blocks_n192_f16 { type T = f16; } [384, 1; Sm90a] => linear_quant_blocks::<T, [f32; 96], 192, 192, 4, 1>;
    linear_quant_wgmma_blocks_n128_t256_bf16 { type T = bf16; } [384, 1; Sm90a] => linear_quant_blocks::<T, [f32; 64], 256, 128, 4, 1>;
    linear_quant_wgmma_blocks_n128_t256_f16 { type T = f16; } [384, 1; Sm90a] => linear_quant_blocks::<T, [f32; 64], 256, 128, 4, 1>;
    linear_quant_wgmma_blocks_n128_bf16 { type T = bf16; } [384, 1; Sm90a] => linear_quant_blocks::<T, [f32; 64], 128, 128, 6, 1>;
    linear_quant_wgmma_blocks_n128_f16 { type T = f16; } [384, 1; Sm90a] => linear_quant_blocks::<T, [f32; 64], 128, 128, 6, 1>;
    linear_quant_wgmma_blocks_n128_split2_bf16 { type T = bf16; } [384, 1; Sm90a] => linear_quant_blocks::<T, [f32; 64], 128, 128, 5, 2>;
    linear_quant_wgmma_blocks_n128_split2_f16 { type T = f16; } [384, 1; Sm90a] => linear_quant_blocks::<T, [f32; 64], 128, 128, 5, 2>;
    linear_quant_wgmma_blocks_n64_bf16 { type T = bf16; } [384, 1; Sm90a] => linear_quant_blocks::<T, [f32; 32], 64, 64, 8, 1>;
    linear_quant_wgmma_blocks_n64_f16 { type T = f16; } [384, 1; Sm90a] => linear_quant_blocks::<T, [f32; 32], 64, 64, 8, 1>;
    linear_quant_wgmma_blocks_n64_split2_bf16 { type T = bf16; } [384, 1; Sm90a] => linear_quant_blocks::<T, [f32; 32], 64, 64, 8, 2>;
    linear_quant_wgmma_blocks_n64_split2_f16 { type T = f16; } [384, 1; Sm90a] => linear_quant_blocks::<T, [f32; 32], 64, 64, 8, 2>;
    linear_quant_wgmma_blocks_n64_split4_bf16 { type T = bf16; } [384, 1; Sm90a] => linear_quant_blocks::<T, [f32; 32], 64, 64, 8, 4>;
    linear_quant_wgmma_blocks_n64_split4_f16 { type T = f16; } [384, 1; Sm90a] => linear_quant_blocks::<T, [f32; 32], 64, 64, 8, 4>;
}
