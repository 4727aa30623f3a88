//! The path of linear layers on Hopper for few tokens: its kernels, tensor maps and launch.

use super::linear_wgmma::map;
use crate::device::{Geometry, Stream, Swizzle};
use crate::error::{Error, Result};
use crate::kernels::gemm::linear_few::{self as kernel, *};
use crate::kernels::gemm::linear_fma;
use cuda_std::{DType, Entry};

const OP: &str = "linear";

/// The most tokens of [`LinearPath::Few`](super::LinearPath::Few).
pub const TOKENS: u32 = 64;

/// Clusters of four blocks, two to a multiprocessor, that run at the same time on an H200.
const FOURS: u32 = 60;

/// Whether blocks share more than 32 tokens: where that leaves few places of the last round of clusters empty. Otherwise they share K.
const fn shares(n: u32) -> bool {
    let clusters = n.div_ceil(4 * kernel::ROWS as u32);
    clusters * 10 >= clusters.next_multiple_of(FOURS) * 9
}

/// What the launch of a kernel needs to know.
#[derive(Clone, Copy)]
struct Shape {
    tokens: u32,
    stages: usize,
    split: u32,
    share: u32,
}

/// For `[m, n]` results.
const fn shape(m: u32, n: u32) -> Shape {
    let (tokens, stages, split, share) = match m {
        0..=8 => (8, 10, 2, 1),
        9..=16 => (16, 10, 2, 1),
        17..=32 => (32, 8, 2, 1),
        _ if shares(n) => (64, 5, 1, 4),
        _ => (64, 12, 2, 1),
    };
    Shape { tokens, stages, split, share }
}

/// The entry for `[m, n]` results of at most [`TOKENS`] tokens.
pub const fn entry(dtype: DType, m: u32, n: u32) -> Option<Entry<kernel::Args>> {
    let (bf16, f16) = match shape(m, n) {
        _ if m > TOKENS => return None,
        Shape { tokens: 8, .. } => (linear_few_t8_bf16::ENTRY, linear_few_t8_f16::ENTRY),
        Shape { tokens: 16, .. } => (linear_few_t16_bf16::ENTRY, linear_few_t16_f16::ENTRY),
        Shape { tokens: 32, .. } => (linear_few_t32_bf16::ENTRY, linear_few_t32_f16::ENTRY),
        Shape { share: 1, .. } => (linear_few_t64_bf16::ENTRY, linear_few_t64_f16::ENTRY),
        _ => (linear_few_t64_x4_bf16::ENTRY, linear_few_t64_x4_f16::ENTRY),
    };
    match dtype {
        DType::Bf16 => Some(bf16),
        DType::F16 => Some(f16),
        _ => None,
    }
}

/// How to launch it for `[m, n]` results.
pub const fn geometry(m: u32, n: u32) -> Geometry {
    let Shape { tokens, stages, split, share } = shape(m, n);
    let clusters = n.div_ceil(kernel::ROWS as u32 * share);
    Geometry::linear(clusters * split * share, kernel::THREADS as u32)
        .shared_bytes(kernel::shared_bytes(tokens as usize, stages) as u32)
        .cluster(split * share)
        .dependent()
}

/// Launches it on raw pointers (layer L1). Makes the tensor maps on the host; allocates nothing.
///
/// # Errors
/// [`Error::Unsupported`] for an element type or a number of tokens without an entry, those of [`Device::tensor_map`](crate::Device::tensor_map) and
/// [`Stream::launch`].
///
/// # Safety
/// As for [`linear_wgmma::launch`](super::linear_wgmma::launch).
pub unsafe fn launch(stream: &Stream, dtype: DType, args: &linear_fma::Args) -> Result<()> {
    let linear_fma::Args { y, x, w, bias, m, n, k, y_row, x_row, w_row, kind } = *args;
    let entry = entry(dtype, m, n).ok_or_else(|| Error::Unsupported {
        op: OP,
        what: format!("the path Few has no kernel for {m} tokens of {dtype}; there are f16 and bf16 for {TOKENS}"),
    })?;
    let (device, Shape { tokens, share, .. }) = (stream.device(), shape(m, n));
    let (x_box, w_box) = ([kernel::x_rows(m, tokens, share) as usize, kernel::STEP], [kernel::ROWS, kernel::STEP]);
    let args = kernel::Args {
        x: map(device, dtype, x as usize, [m, k], x_row, x_box, Swizzle::B128)?,
        w: map(device, dtype, w as usize, [n, k], w_row, w_box, Swizzle::B128)?,
        y,
        bias,
        m,
        n,
        k,
        y_row,
        kind,
    };
    // SAFETY: forwarded to the caller.
    unsafe { stream.launch(&entry, &geometry(m, n), &args) }
}
