//! The path of linear layers on Hopper for few tokens: its kernels, tensor maps and launch.

use super::linear_wgmma::map;
use crate::device::{Geometry, Stream, Swizzle};
use crate::error::{Error, Result};
use crate::kernels::gemm::linear_few::{self as kernel, *};
use crate::kernels::gemm::linear_fma;
use crate::kernels::scales::NONE;
use cuda_std::{DType, Entry};

const OP: &str = "linear";

/// The most tokens of [`LinearPath::Few`](super::LinearPath::Few).
pub const TOKENS: u32 = 64;

/// Multiprocessors of an H200. On others the work is divided less evenly.
pub(super) const MULTIPROCESSORS: u32 = 132;

/// Clusters of four blocks, two to a multiprocessor, that run at the same time on an H200.
const FOURS: u32 = 60;

/// Whether blocks share more than 32 tokens: where that leaves few places of the last round of clusters empty. Otherwise they share K.
const fn shares(n: u32) -> bool {
    let clusters = n.div_ceil(4 * kernel::ROWS as u32);
    clusters * 10 >= clusters.next_multiple_of(FOURS) * 9
}

/// What the launch of a kernel needs to know.
#[derive(Clone, Copy)]
pub(super) struct Shape {
    pub(super) tokens: u32,
    pub(super) stages: usize,
    pub(super) split: u32,
    pub(super) share: u32,
}

/// For `[m, n]` results.
pub(super) const fn shape(m: u32, n: u32) -> Shape {
    let (tokens, stages, split, share) = match m {
        0..=8 => (8, 10, 2, 1),
        9..=16 => (16, 10, 2, 1),
        17..=32 => (32, 8, 2, 1),
        _ if shares(n) => (64, 5, 1, 4),
        _ => (64, 12, 2, 1),
    };
    Shape { tokens, stages, split, share }
}

impl Shape {
    /// Rows of weights of a block: fewer than there is room for where multiprocessors then get equally many. Results do not depend on it. (Not
    /// with K in parts and only one block at a time, where it was slower.)
    pub(super) const fn rows(self, n: u32) -> u32 {
        let (most, all) = (kernel::ROWS as u32, n as u64 * self.split as u64);
        let each = all.div_ceil((most * MULTIPROCESSORS) as u64);
        if self.share > 1 || self.split > 1 && (each <= 1 || self.stages > 10) {
            most
        } else {
            (all.div_ceil(each * MULTIPROCESSORS as u64) as u32).next_multiple_of(8)
        }
    }

    /// How to launch it for `n` outputs, with scales of a kind of [`scales`](crate::kernels::scales).
    pub(super) const fn geometry(self, n: u32, scales: u32) -> Geometry {
        let Self { tokens, stages, split, share } = self;
        let clusters = n.div_ceil(self.rows(n) * share);
        Geometry::linear(clusters * split * share, kernel::THREADS as u32)
            .shared_bytes(kernel::shared_bytes(tokens as usize, stages, scales) as u32)
            .cluster(split * share)
            .dependent()
    }
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
    shape(m, n).geometry(n, NONE)
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
    let (device, shape) = (stream.device(), shape(m, n));
    let (x_rows, rows) = (kernel::x_rows(m, shape.tokens, shape.share), shape.rows(n));
    let (x_box, w_box) = ([x_rows as usize, kernel::STEP], [rows as usize, kernel::STEP]);
    let args = kernel::Args {
        x: map(device, dtype, x as usize, [m, k], x_row, x_box, Swizzle::B128)?,
        w: map(device, dtype, w as usize, [n, k], w_row, w_box, Swizzle::B128)?,
        y,
        bias,
        m,
        n,
        k,
        y_row,
        rows,
        kind,
    };
    // SAFETY: forwarded to the caller.
    unsafe { stream.launch(&entry, &geometry(m, n), &args) }
}
