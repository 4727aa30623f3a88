//! The path of 8-bit linear layers on Hopper for few tokens: its kernels, tensor maps and launch.

use super::linear_few::{MULTIPROCESSORS, Shape, pairs};
use super::linear_wgmma::map;
use crate::device::{Device, Geometry, Stream, Swizzle};
use crate::error::{Error, Result};
use crate::kernels::gemm::linear_few as body;
use crate::kernels::gemm::linear_quant_few::{self as kernel, *};
use crate::kernels::gemm::linear_quant_tile::Args;
use crate::kernels::scales::{BLOCKS, ROWS};
use cuda_std::{DType, Entry};

const OP: &str = "linear_quant";

/// The most tokens of [`LinearQuantPath::Few`](super::LinearQuantPath::Few).
pub const TOKENS: u32 = 64;

/// For `[m, n]` results.
const fn shape(blocks: bool, m: u32, n: u32) -> Shape {
    // Outputs of one full block for each multiprocessor.
    let once = body::ROWS as u32 * MULTIPROCESSORS;
    let (tokens, stages) = match m {
        0..=8 => (8, 10),
        9..=16 => (16, 10),
        17..=32 => (32, 8),
        // Two blocks to a multiprocessor: while one waits for its products, which scales of blocks make it do, the other has some.
        _ if blocks || n > once => (64, 6),
        _ if pairs(n) => (64, 8),
        _ => (64, 12),
    };
    // Whole rows of K, one block to a multiprocessor, are faster with many tokens, which each part would load. With few, rows at multiples of 8 KB are
    // much slower then: all blocks read the same columns.
    let parts = if stages == 12 { once / 2 } else { once };
    let pair = tokens == 64 && stages == 8;
    Shape { groups: 1, tokens, stages, split: if n <= parts { 2 } else { 1 }, share: 1, tiles: 1, pair }
}

/// The entry for operands and results of these types, these scales and `[m, n]` results of at most [`TOKENS`] tokens.
pub const fn entry(operands: DType, dtype: DType, blocks: bool, m: u32, n: u32) -> Option<Entry<kernel::Args>> {
    macro_rules! of {
        ($rows_bf16:ident, $rows_f16:ident, $i8_bf16:ident, $i8_f16:ident, $blocks_bf16:ident, $blocks_f16:ident) => {
            match (operands, blocks, dtype) {
                (DType::E4m3, false, DType::Bf16) => $rows_bf16::ENTRY,
                (DType::E4m3, false, DType::F16) => $rows_f16::ENTRY,
                (DType::I8, false, DType::Bf16) => $i8_bf16::ENTRY,
                (DType::I8, false, DType::F16) => $i8_f16::ENTRY,
                (DType::E4m3, true, DType::Bf16) => $blocks_bf16::ENTRY,
                (DType::E4m3, true, DType::F16) => $blocks_f16::ENTRY,
                _ => return None,
            }
        };
    }
    Some(match shape(blocks, m, n) {
        _ if m > TOKENS => return None,
        Shape { tokens: 8, split: 1, .. } => of!(
            linear_quant_few_rows_t8_bf16,
            linear_quant_few_rows_t8_f16,
            linear_quant_few_i8_t8_bf16,
            linear_quant_few_i8_t8_f16,
            linear_quant_few_blocks_t8_bf16,
            linear_quant_few_blocks_t8_f16
        ),
        Shape { tokens: 8, .. } => of!(
            linear_quant_few_rows_t8_split2_bf16,
            linear_quant_few_rows_t8_split2_f16,
            linear_quant_few_i8_t8_split2_bf16,
            linear_quant_few_i8_t8_split2_f16,
            linear_quant_few_blocks_t8_split2_bf16,
            linear_quant_few_blocks_t8_split2_f16
        ),
        Shape { tokens: 16, split: 1, .. } => of!(
            linear_quant_few_rows_t16_bf16,
            linear_quant_few_rows_t16_f16,
            linear_quant_few_i8_t16_bf16,
            linear_quant_few_i8_t16_f16,
            linear_quant_few_blocks_t16_bf16,
            linear_quant_few_blocks_t16_f16
        ),
        Shape { tokens: 16, .. } => of!(
            linear_quant_few_rows_t16_split2_bf16,
            linear_quant_few_rows_t16_split2_f16,
            linear_quant_few_i8_t16_split2_bf16,
            linear_quant_few_i8_t16_split2_f16,
            linear_quant_few_blocks_t16_split2_bf16,
            linear_quant_few_blocks_t16_split2_f16
        ),
        Shape { tokens: 32, split: 1, .. } => of!(
            linear_quant_few_rows_t32_bf16,
            linear_quant_few_rows_t32_f16,
            linear_quant_few_i8_t32_bf16,
            linear_quant_few_i8_t32_f16,
            linear_quant_few_blocks_t32_bf16,
            linear_quant_few_blocks_t32_f16
        ),
        Shape { tokens: 32, .. } => of!(
            linear_quant_few_rows_t32_split2_bf16,
            linear_quant_few_rows_t32_split2_f16,
            linear_quant_few_i8_t32_split2_bf16,
            linear_quant_few_i8_t32_split2_f16,
            linear_quant_few_blocks_t32_split2_bf16,
            linear_quant_few_blocks_t32_split2_f16
        ),
        Shape { pair: true, .. } => of!(
            linear_quant_few_rows_t64_pair_bf16,
            linear_quant_few_rows_t64_pair_f16,
            linear_quant_few_i8_t64_pair_bf16,
            linear_quant_few_i8_t64_pair_f16,
            linear_quant_few_blocks_t64_split2_bf16,
            linear_quant_few_blocks_t64_split2_f16
        ),
        Shape { stages: 12, split: 1, .. } => of!(
            linear_quant_few_rows_t64_bf16,
            linear_quant_few_rows_t64_f16,
            linear_quant_few_i8_t64_bf16,
            linear_quant_few_i8_t64_f16,
            linear_quant_few_blocks_t64_bf16,
            linear_quant_few_blocks_t64_f16
        ),
        Shape { split: 1, .. } => of!(
            linear_quant_few_rows_t64_r6_bf16,
            linear_quant_few_rows_t64_r6_f16,
            linear_quant_few_i8_t64_r6_bf16,
            linear_quant_few_i8_t64_r6_f16,
            linear_quant_few_blocks_t64_bf16,
            linear_quant_few_blocks_t64_f16
        ),
        _ => of!(
            linear_quant_few_rows_t64_split2_bf16,
            linear_quant_few_rows_t64_split2_f16,
            linear_quant_few_i8_t64_split2_bf16,
            linear_quant_few_i8_t64_split2_f16,
            linear_quant_few_blocks_t64_split2_bf16,
            linear_quant_few_blocks_t64_split2_f16
        ),
    })
}

/// How to launch it for `[m, n]` results with these scales.
pub const fn geometry(blocks: bool, m: u32, n: u32) -> Geometry {
    shape(blocks, m, n).geometry(n, if blocks { BLOCKS } else { ROWS }, MULTIPROCESSORS)
}

/// Launches it on raw pointers (layer L1). Makes the tensor maps on the host; allocates nothing.
///
/// # Errors
/// [`Error::Unsupported`] for element types, scales or a number of tokens without an entry, those of [`Device::tensor_map`] and
/// [`Stream::launch`].
///
/// # Safety
/// As for [`linear_quant_wgmma::launch`](super::linear_quant_wgmma::launch).
pub unsafe fn launch(stream: &Stream, operands: DType, dtype: DType, args: &Args) -> Result<()> {
    let &Args { m, n, k, .. } = args;
    let blocks = args.blocks != 0;
    let entry = entry(operands, dtype, blocks, m, n).ok_or_else(|| {
        let scales = if blocks { "blocks" } else { "rows" };
        let what = format!(
            "the path Few has no kernel for {m} tokens of {operands}, results of {dtype} and scales of {scales}; it takes {TOKENS} tokens at most, LinearQuantPath::Auto more"
        );
        Error::Unsupported { op: OP, what }
    })?;
    let (device, shape): (&Device, _) = (stream.device(), shape(blocks, m, n));
    let (tokens, rows) = (shape.tile(m), shape.w_box(n));
    let (x_box, w_box) = ([tokens as usize, kernel::STEP], [rows as usize, kernel::STEP]);
    let launched = kernel::Args {
        x: map(device, DType::U8, args.x as usize, [m, k], args.x_row, x_box, Swizzle::B128)?,
        w: map(device, DType::U8, args.w as usize, [n, k], args.w_row, w_box, Swizzle::B128)?,
        y: args.y,
        bias: args.bias,
        x_scales: args.x_scales,
        x_scale_row: args.x_scale_row,
        x_scale_group: args.x_scale_group,
        w_scales: args.w_scales,
        w_scale_row: args.w_scale_row,
        w_scale_group: args.w_scale_group,
        m,
        n,
        k,
        y_row: args.y_row,
        rows,
        tokens,
        kind: args.kind,
        early: shape.early(n),
    };
    // SAFETY: forwarded to the caller.
    unsafe { stream.launch(&entry, &geometry(blocks, m, n), &launched) }
}
