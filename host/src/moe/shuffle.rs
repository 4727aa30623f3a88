//! Weights of experts in the order in which the fused block reads them on Hopper.

use super::fused::GateUp;
use crate::check::Call;
use crate::device::{Geometry, Stream};
use crate::error::{Error, Result};
use crate::kernels::moe::fused::PLAIN;
use crate::kernels::moe::shuffle as kernel;
use crate::tensor::Tensor;
use cuda_std::tma::{Swizzle, TensorMapDescription};
use cuda_std::{DType, Element};
use std::ffi::c_void;

pub use kernel::Args;

const OP: &str = "moe::shuffle_weights";

/// Rows of a tile of the first product's weights, or without `gate_up` of the second's.
pub const fn tile_rows(gate_up: Option<GateUp>) -> usize {
    match gate_up {
        Some(GateUp::GateOnly) => 32,
        _ => 64,
    }
}

/// The widest rows of shuffled weights: a strip's elements are numbered by an `i32`.
pub const MAX_WIDTH: usize = i32::MAX as usize / 64;

/// Whether a block of these widths takes shuffled weights of an element type: both are multiples of 128 bytes, up to [`MAX_WIDTH`].
pub const fn takes(dtype: DType, hidden: usize, intermediate: usize) -> bool {
    let unit = kernel::LINE / dtype.size();
    let most = if hidden > intermediate { hidden } else { intermediate };
    hidden.is_multiple_of(unit) && intermediate.is_multiple_of(unit) && most <= MAX_WIDTH
}

/// How to launch `moe_shuffle` for so many tiles.
pub const fn geometry(tiles: u32) -> Geometry {
    Geometry::linear(tiles, kernel::THREADS as u32).dependent()
}

/// Launches on raw pointers (layer L1), for so many experts.
///
/// # Errors
/// Those of [`Stream::launch`].
///
/// # Safety
/// The pointers are device memory as [`shuffle`](kernel::shuffle()) documents until the launch is done, and do not overlap.
pub unsafe fn launch(stream: &Stream, experts: u32, args: &Args) -> Result<()> {
    let tiles = experts.saturating_mul(args.rows / args.tile_rows).saturating_mul(args.lines);
    // SAFETY: forwarded to the caller.
    unsafe { stream.launch(&kernel::moe_shuffle::ENTRY, &geometry(tiles), args) }
}

/// The map of shuffled weights of `experts` matrices for an output of `n` and an inner dimension of `k` elements; a box has `rows` of
/// the rows that the products take, and 128 bytes of each.
pub(super) fn map(
    base: *const c_void,
    dtype: DType,
    [experts, n, k]: [usize; 3],
    gate_up: Option<GateUp>,
    rows: usize,
) -> TensorMapDescription {
    let line = kernel::LINE as u64;
    let tile_rows = tile_rows(gate_up) as u64;
    // The innermost dimension runs through a strip, from the row of a tile on that the next dimension says, so that a step along K is a tile. It
    // ends with the first row of the last tile, which the last row is as far from as the strip's end. Dimensions of one element take no notice of
    // their strides.
    let step = (kernel::LINE / dtype.size()) as u64;
    let strip = tile_rows * k as u64;
    let (experts, n, bytes) = (experts.max(1) as u64, n as u64, strip * dtype.size() as u64);
    let (step, along, strips) = (step as u32, strip - (tile_rows - 1) * step, rows as u32 / 64);
    let (dims, strides, box_dims) = match gate_up {
        None => {
            let of_expert = n / 64 * bytes;
            ([along, 64, n / 64, experts, 1], [line, bytes, of_expert, of_expert], [step, 64, strips, 1, 1])
        }
        // 8 rows, gates without values, 4 times: the values lie outside, and are zeroes.
        Some(GateUp::GateOnly) => {
            ([along, 8, 1, 4, experts * n / 32], [line, 8 * line, 8 * line, bytes], [step, 8, 2, 4, strips])
        }
        Some(_) => ([along, 64, 1, 1, experts * n / 32], [line, line, line, bytes], [step, 64, 1, 1, strips]),
    };
    TensorMapDescription { base: base as u64, dtype, rank: 5, dims, strides, box_dims, swizzle: Swizzle::B128 }
}

/// Copies weights of experts into the order in which [`fused`](super::fused()) and [`fused_quant`](super::fused_quant()) read them on Hopper.
///
/// `weights`: `[experts, rows, k]` of 1 or 2 bytes an element, contiguous: `w13` with its [`GateUp`], or `w2` with `None`; `out`: as many, of the
/// same shape, which stands for the weights where options say [`shuffled`](super::FusedOptions::shuffled). To be done once, when weights are
/// loaded; scales and biases stay as they are.
///
/// The order: *tiles* of 64 rows by 128 bytes (64 or 128 elements) one after the other, row by row; first along `k`, then along the rows, then
/// expert by expert. Of every 16 rows of a tile of `w13` 8 are gates, and 8 the values that belong to them: tile `i` of [`GateUp::Halves`]
/// has outputs `32 i ..`, first the gates of 8 of them. With [`GateUp::GateOnly`] tiles have 32 rows, as they come; so do the 64 of `w2`.
///
/// # Errors
/// [`Shape`](crate::Error::Shape) also where `rows` is no multiple of the rows of a tile, or `k` of 128 bytes;
/// [`Stride`](crate::Error::Stride), [`Alignment`](crate::Error::Alignment) to 16 bytes, [`Overlap`](crate::Error::Overlap),
/// [`WrongDevice`](crate::Error::WrongDevice), [`DType`](crate::Error::DType).
///
/// ```
/// use warploom::{Device, Stream, Tensor, bf16, moe};
/// let device = Device::simt();
/// let stream = Stream::new(&device)?;
/// // One expert, 64 outputs of 128 inputs: two tiles.
/// let w2: Vec<bf16> = (0..64 * 128).map(|i| bf16::from_f32((i % 128) as f32)).collect();
/// let w2 = Tensor::from_slice(&device, &w2, &[1, 64, 128])?;
/// let mut shuffled = Tensor::uninit(&device, &[1, 64, 128])?;
/// moe::shuffle_weights(&stream, &mut shuffled, &w2, None)?;
/// // The second row of the first tile.
/// assert_eq!(shuffled.to_vec()?[64..128], w2.to_vec()?[128..192]);
/// # Ok::<(), warploom::Error>(())
/// ```
pub fn shuffle_weights<T: Element>(
    stream: &Stream,
    out: &mut Tensor<T>,
    weights: &Tensor<T>,
    gate_up: Option<GateUp>,
) -> Result<()> {
    let mut call = Call::new(OP, stream);
    call.dtype_among("weights", T::DTYPE, &[DType::F16, DType::Bf16, DType::E4m3, DType::I8])?;
    let tile_rows = tile_rows(gate_up);
    let step = kernel::LINE / size_of::<T>();
    let [experts, rows, k] = *weights.shape() else {
        return Err(call.bad_shape("weights", weights.shape(), "[experts, rows, k]"));
    };
    if !rows.is_multiple_of(tile_rows) || !k.is_multiple_of(step) {
        let expected = format!("[experts, a multiple of {tile_rows}, a multiple of {step}]");
        return Err(call.bad_shape("weights", weights.shape(), expected));
    }
    call.same_shape("out", out.shape(), weights.shape())?;
    call.contiguous("out", out)?;
    call.contiguous("weights", weights)?;
    let args = Args {
        out: call.write("out", out)?.cast(),
        weights: call.read("weights", weights)?.cast(),
        rows: call.count("weights", rows)?,
        lines: call.count("weights", k / step)?,
        order: gate_up.map_or(PLAIN, GateUp::layout),
        tile_rows: tile_rows as u32,
    };
    call.check_overlap()?;
    call.count("weights", experts * (rows / tile_rows) * (k / step))?;
    for (arg, address) in [("out", args.out as usize), ("weights", args.weights as usize)] {
        if !address.is_multiple_of(16) {
            return Err(Error::Alignment { op: OP, arg, expected: 16, address });
        }
    }
    if weights.is_empty() {
        return Ok(());
    }
    // SAFETY: shapes, device, alignment and overlap were checked above.
    unsafe { launch(stream, experts as u32, &args) }
}
