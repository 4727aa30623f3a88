//! Products of the fused block with 8-bit weights, activations and scales of rows on Hopper: those of [`fused_wgmma`], whose stages hold as many bytes.
//!
//! A scale for each output of an expert, or one for an expert, and one for each row of `x` and `h` multiply finished sums, which stay in the tensor cores' accumulators throughout; those of
//! int8 are exact. `h` is stored as `T` and quantised by [`fused_quant_rows`](super::fused_quant_rows), since a scale covers all outputs; so the second product begins when that has ended.
//! Rows of `x` and of `h` are quantised where they are, a token's once, and gathered.

use super::fused_wgmma::{self, ADDED, F32, Operand, ROUNDED, RowScales, product};
use crate::tensor_float::TensorFloat;
use cuda_std::tma::TensorMap;
use cuda_std::wgmma::Accumulator;
use cuda_std::{E4M3, Global, bf16, entries, f16};

/// Threads of a block; see [`fused_wgmma::THREADS`].
pub const THREADS: usize = fused_wgmma::THREADS;
/// See [`fused_wgmma::ROOMY`].
pub const ROOMY: usize = fused_wgmma::ROOMY;

/// One of the products; see [`Args`] and [`product`].
#[inline(always)]
unsafe fn fused_quant_rows_wgmma<
    T: TensorFloat,
    Q: Operand<Bias = f32>,
    const UP: bool,
    const ALTERNATE: bool,
    const NOW: bool,
    const STAGED: bool,
    const SLOTS: u8,
    const TILES: usize,
    const PAIRS: usize,
    const LINES: usize,
    const STAGES: usize,
    const DIRECT: bool,
    const PAIRED: bool,
>(
    h: *mut T,
    partial: *mut f32,
    x: *const u8,
    x_row: usize,
    x_scales: *const f32,
    x_divisor: u32,
    map: *const TensorMap,
    shared_map: *const TensorMap,
    w_scales: *const f32,
    shared_w_scales: *const f32,
    w_scale_expert: u32,
    w_scale_row: u32,
    bias: *const f32,
    shared_bias: *const f32,
    sorted_ids: *const i32,
    sorted_weights: *const f32,
    offsets: *const i32,
    expert_counts: *const i32,
    topk_ids: *const i32,
    topk_weights: *const f32,
    expert_map: *const i32,
    num_tokens: *const i32,
    tokens: u32,
    top_k: u32,
    slots: u32,
    experts: u32,
    local: u32,
    bins: u32,
    n: u32,
    k: u32,
    layout: u32,
    shuffled: u32,
    activation: u32,
    alpha: f32,
    limit: f32,
    words: *mut u64,
    launch: u64,
    kept: u32,
    left: *mut u32,
    stripe: u32,
) where
    [Q::Sum; 4]: Accumulator<Q::Sum>,
    [Q::Sum; 8]: Accumulator<Q::Sum>,
    [Q::Sum; 16]: Accumulator<Q::Sum>,
    [Q::Sum; 32]: Accumulator<Q::Sum>,
    [Q::Sum; 48]: Accumulator<Q::Sum>,
    [Q::Sum; 56]: Accumulator<Q::Sum>,
    [Q::Sum; 64]: Accumulator<Q::Sum>,
    [Q::Sum; 72]: Accumulator<Q::Sum>,
    [Q::Sum; 80]: Accumulator<Q::Sum>,
    [Q::Sum; 88]: Accumulator<Q::Sum>,
{
    product::<T, Q, UP, ALTERNATE, NOW, STAGED, SLOTS, TILES, PAIRS, LINES, STAGES, DIRECT, PAIRED>(
        h,
        partial,
        x.cast(),
        x_row,
        map,
        shared_map,
        map,
        bias,
        shared_bias,
        sorted_ids,
        sorted_weights,
        offsets,
        expert_counts,
        topk_ids,
        topk_weights,
        expert_map,
        num_tokens,
        tokens,
        top_k,
        slots,
        experts,
        local,
        bins,
        n,
        k,
        layout,
        shuffled,
        activation,
        alpha,
        limit,
        0,
        words,
        launch,
        kept,
        core::ptr::null_mut(),
        left,
        stripe,
        RowScales {
            x: Global::new(x_scales),
            x_divisor,
            w: Global::new(w_scales),
            shared_w: Global::new(shared_w_scales),
            w_expert: w_scale_expert,
            w_row: w_scale_row,
        },
    );
}

entries! {
    /// Arguments of both products.
    pub struct Args<T>(
        /// `[tokens * slots, intermediate]`: the first product's results.
        h: *mut T,
        /// `[tokens * slots, hidden]`: written by the second product; rounded results as elements, from the same place on; by kernels for results that are `added` `[tokens, hidden]` of elements and zeroed, which they are added to in any order.
        partial: *mut f32,
        /// Quantised rows of tokens, or for the second product of `h`, `x_row` apart, and their scales: row `pair / x_divisor` belongs to a pair.
        x: *const u8, x_row: usize, x_scales: *const f32, x_divisor: u32,
        /// The weights of the routed experts and of the shared ones; see [`fused_wgmma`].
        map: TensorMap, shared_map: TensorMap,
        /// The scales of their rows, `w_scale_row` apart, of experts, `w_scale_expert` apart.
        w_scales: *const f32, shared_w_scales: *const f32, w_scale_expert: u32, w_scale_row: u32,
        /// `[local, rows]` or null; `[shared, rows]` or null.
        bias: *const f32, shared_bias: *const f32,
        /// From here on see [`fused_wgmma::Args`](super::fused_wgmma::Args).
        sorted_ids: *const i32, sorted_weights: *const f32, offsets: *const i32, expert_counts: *const i32,
        topk_ids: *const i32, topk_weights: *const f32, expert_map: *const i32, num_tokens: *const i32, tokens: u32,
        top_k: u32, slots: u32, experts: u32, local: u32, bins: u32,
        /// Outputs and inner dimension, multiples of 16.
        n: u32, k: u32,
        layout: u32, shuffled: u32, activation: u32, alpha: f32, limit: f32, words: *mut u64, launch: u64, kept: u32, left: *mut u32, stripe: u32,
    );
    moe_fused_quant_rows_wgmma_up_t16_e4m3_f16 { type T = f16; } [ROOMY, 1; Sm90a] => fused_quant_rows_wgmma::<T, E4M3, true, true, true, false, F32, 1, 16, 4, 5, true, false>;
    moe_fused_quant_rows_wgmma_up_t16_e4m3_bf16 { type T = bf16; } [ROOMY, 1; Sm90a] => fused_quant_rows_wgmma::<T, E4M3, true, true, true, false, F32, 1, 16, 4, 5, true, false>;
    moe_fused_quant_rows_wgmma_down_t16_e4m3 { type T = bf16; } [ROOMY, 1; Sm90a] => fused_quant_rows_wgmma::<T, E4M3, false, true, true, false, F32, 1, 16, 4, 5, true, false>;
    moe_fused_quant_rows_wgmma_up_t64_e4m3_f16 { type T = f16; } [ROOMY, 1; Sm90a] => fused_quant_rows_wgmma::<T, E4M3, true, true, true, false, F32, 2, 64, 2, 4, false, false>;
    moe_fused_quant_rows_wgmma_up_t64_e4m3_bf16 { type T = bf16; } [ROOMY, 1; Sm90a] => fused_quant_rows_wgmma::<T, E4M3, true, true, true, false, F32, 2, 64, 2, 4, false, false>;
    moe_fused_quant_rows_wgmma_down_t64_e4m3 { type T = bf16; } [ROOMY, 1; Sm90a] => fused_quant_rows_wgmma::<T, E4M3, false, true, true, false, F32, 2, 64, 2, 4, false, false>;
    moe_fused_quant_rows_wgmma_up_t176_e4m3_f16 { type T = f16; } [THREADS, 1; Sm90a] => fused_quant_rows_wgmma::<T, E4M3, true, false, false, true, F32, 2, 176, 1, 4, false, false>;
    moe_fused_quant_rows_wgmma_up_t176_e4m3_bf16 { type T = bf16; } [THREADS, 1; Sm90a] => fused_quant_rows_wgmma::<T, E4M3, true, false, false, true, F32, 2, 176, 1, 4, false, false>;
    moe_fused_quant_rows_wgmma_down_t176_e4m3 { type T = bf16; } [THREADS, 1; Sm90a] => fused_quant_rows_wgmma::<T, E4M3, false, false, false, true, F32, 2, 176, 1, 4, false, false>;
    moe_fused_quant_rows_wgmma_down_added_t176_e4m3_f16 { type T = f16; } [THREADS, 1; Sm90a] => fused_quant_rows_wgmma::<T, E4M3, false, false, false, true, ADDED, 2, 176, 1, 4, false, false>;
    moe_fused_quant_rows_wgmma_down_rounded_t176_e4m3_f16 { type T = f16; } [THREADS, 1; Sm90a] => fused_quant_rows_wgmma::<T, E4M3, false, false, false, true, ROUNDED, 2, 176, 1, 4, false, false>;
    moe_fused_quant_rows_wgmma_down_added_t176_e4m3_bf16 { type T = bf16; } [THREADS, 1; Sm90a] => fused_quant_rows_wgmma::<T, E4M3, false, false, false, true, ADDED, 2, 176, 1, 4, false, false>;
    moe_fused_quant_rows_wgmma_down_rounded_t176_e4m3_bf16 { type T = bf16; } [THREADS, 1; Sm90a] => fused_quant_rows_wgmma::<T, E4M3, false, false, false, true, ROUNDED, 2, 176, 1, 4, false, false>;
    moe_fused_quant_rows_wgmma_up_t176_two_e4m3_f16 { type T = f16; } [THREADS, 1; Sm90a] => fused_quant_rows_wgmma::<T, E4M3, true, false, false, true, F32, 2, 176, 1, 4, false, true>;
    moe_fused_quant_rows_wgmma_up_t176_two_e4m3_bf16 { type T = bf16; } [THREADS, 1; Sm90a] => fused_quant_rows_wgmma::<T, E4M3, true, false, false, true, F32, 2, 176, 1, 4, false, true>;
    moe_fused_quant_rows_wgmma_down_t176_two_e4m3 { type T = bf16; } [THREADS, 1; Sm90a] => fused_quant_rows_wgmma::<T, E4M3, false, false, false, true, F32, 2, 176, 1, 4, false, true>;
    moe_fused_quant_rows_wgmma_down_added_t176_two_e4m3_f16 { type T = f16; } [THREADS, 1; Sm90a] => fused_quant_rows_wgmma::<T, E4M3, false, false, false, true, ADDED, 2, 176, 1, 4, false, true>;
    moe_fused_quant_rows_wgmma_down_rounded_t176_two_e4m3_f16 { type T = f16; } [THREADS, 1; Sm90a] => fused_quant_rows_wgmma::<T, E4M3, false, false, false, true, ROUNDED, 2, 176, 1, 4, false, true>;
    moe_fused_quant_rows_wgmma_down_added_t176_two_e4m3_bf16 { type T = bf16; } [THREADS, 1; Sm90a] => fused_quant_rows_wgmma::<T, E4M3, false, false, false, true, ADDED, 2, 176, 1, 4, false, true>;
    moe_fused_quant_rows_wgmma_down_rounded_t176_two_e4m3_bf16 { type T = bf16; } [THREADS, 1; Sm90a] => fused_quant_rows_wgmma::<T, E4M3, false, false, false, true, ROUNDED, 2, 176, 1, 4, false, true>;
    moe_fused_quant_rows_wgmma_up_t16_i8_f16 { type T = f16; } [ROOMY, 1; Sm90a] => fused_quant_rows_wgmma::<T, i8, true, true, true, false, F32, 1, 16, 4, 5, true, false>;
    moe_fused_quant_rows_wgmma_up_t16_i8_bf16 { type T = bf16; } [ROOMY, 1; Sm90a] => fused_quant_rows_wgmma::<T, i8, true, true, true, false, F32, 1, 16, 4, 5, true, false>;
    moe_fused_quant_rows_wgmma_down_t16_i8 { type T = bf16; } [ROOMY, 1; Sm90a] => fused_quant_rows_wgmma::<T, i8, false, true, true, false, F32, 1, 16, 4, 5, true, false>;
    moe_fused_quant_rows_wgmma_up_t64_i8_f16 { type T = f16; } [ROOMY, 1; Sm90a] => fused_quant_rows_wgmma::<T, i8, true, true, true, false, F32, 2, 64, 2, 4, false, false>;
    moe_fused_quant_rows_wgmma_up_t64_i8_bf16 { type T = bf16; } [ROOMY, 1; Sm90a] => fused_quant_rows_wgmma::<T, i8, true, true, true, false, F32, 2, 64, 2, 4, false, false>;
    moe_fused_quant_rows_wgmma_down_t64_i8 { type T = bf16; } [ROOMY, 1; Sm90a] => fused_quant_rows_wgmma::<T, i8, false, true, true, false, F32, 2, 64, 2, 4, false, false>;
    moe_fused_quant_rows_wgmma_up_t176_i8_f16 { type T = f16; } [THREADS, 1; Sm90a] => fused_quant_rows_wgmma::<T, i8, true, false, false, true, F32, 2, 176, 1, 4, false, false>;
    moe_fused_quant_rows_wgmma_up_t176_i8_bf16 { type T = bf16; } [THREADS, 1; Sm90a] => fused_quant_rows_wgmma::<T, i8, true, false, false, true, F32, 2, 176, 1, 4, false, false>;
    moe_fused_quant_rows_wgmma_down_t176_i8 { type T = bf16; } [THREADS, 1; Sm90a] => fused_quant_rows_wgmma::<T, i8, false, false, false, true, F32, 2, 176, 1, 4, false, false>;
    moe_fused_quant_rows_wgmma_down_added_t176_i8_f16 { type T = f16; } [THREADS, 1; Sm90a] => fused_quant_rows_wgmma::<T, i8, false, false, false, true, ADDED, 2, 176, 1, 4, false, false>;
    moe_fused_quant_rows_wgmma_down_rounded_t176_i8_f16 { type T = f16; } [THREADS, 1; Sm90a] => fused_quant_rows_wgmma::<T, i8, false, false, false, true, ROUNDED, 2, 176, 1, 4, false, false>;
    moe_fused_quant_rows_wgmma_down_added_t176_i8_bf16 { type T = bf16; } [THREADS, 1; Sm90a] => fused_quant_rows_wgmma::<T, i8, false, false, false, true, ADDED, 2, 176, 1, 4, false, false>;
    moe_fused_quant_rows_wgmma_down_rounded_t176_i8_bf16 { type T = bf16; } [THREADS, 1; Sm90a] => fused_quant_rows_wgmma::<T, i8, false, false, false, true, ROUNDED, 2, 176, 1, 4, false, false>;
}
