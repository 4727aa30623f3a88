//! Root-mean-square normalisation: `x / sqrt(mean(x²) + eps) * weight`.
//!
//! A block for each row. Source: Zhang and Sennrich, *Root Mean Square Layer Normalization*, 2019.

use crate::check::Call;
use crate::device::{Geometry, Stream};
use crate::error::Result;
use crate::kernels::norm::rms_norm as kernel;
use crate::tensor::Tensor;
use cuda_std::{DType, Entry, Float};

pub use kernel::Args;

/// The entry for an element type, if there is one.
pub const fn entry(dtype: DType) -> Option<Entry<Args>> {
    Some(match dtype {
        DType::F32 => kernel::rms_norm_f32::ENTRY,
        DType::F16 => kernel::rms_norm_f16::ENTRY,
        DType::Bf16 => kernel::rms_norm_bf16::ENTRY,
        _ => return None,
    })
}

/// How to launch it for `rows` rows.
pub const fn geometry(rows: u32) -> Geometry {
    Geometry::linear(rows, 256).shared_bytes(kernel::SHARED_BYTES as u32)
}

/// Launches on raw pointers (layer L1): `args.x` and `args.y` are `[rows, n]`, dense; `args.weight` is `[n]` or null.
///
/// # Errors
/// [`Error::Unsupported`](crate::Error::Unsupported) for an element type without an entry, and those of
/// [`Stream::launch`].
///
/// # Safety
/// The pointers are device memory of those sizes, aligned to their element type, until the launch is done; `y` overlaps
/// no other.
pub unsafe fn launch(stream: &Stream, dtype: DType, rows: u32, args: &Args) -> Result<()> {
    let entry = entry(dtype).ok_or_else(|| crate::Error::Unsupported {
        op: "rms_norm",
        what: format!("no kernel for {dtype}; there are f32, f16 and bf16"),
    })?;
    // SAFETY: forwarded to the caller.
    unsafe { stream.launch(&entry, &geometry(rows), args) }
}

/// `out[r] = x[r] / sqrt(mean(x[r]²) + eps) * weight`, for each row `r`.
///
/// `x` and `out` are `[.., n]` of the same shape, dense; `weight` is `[n]`, ones if `None`. Arithmetic is in f32 with one
/// rounding at the end.
///
/// # Errors
/// [`Shape`](crate::Error::Shape), [`Stride`](crate::Error::Stride), [`Overlap`](crate::Error::Overlap),
/// [`WrongDevice`](crate::Error::WrongDevice); [`Value`](crate::Error::Value) for an `eps` that is negative or NaN.
pub fn rms_norm<T: Float>(
    stream: &Stream,
    out: &mut Tensor<T>,
    x: &Tensor<T>,
    weight: Option<&Tensor<T>>,
    eps: f32,
) -> Result<()> {
    let mut call = Call::new("rms_norm", stream);
    call.same_shape("out", out.shape(), x.shape())?;
    let rows = call.rows("x", x)?;
    call.contiguous("x", x)?;
    call.contiguous("out", out)?;
    if let Some(w) = weight {
        call.same_shape("weight", w.shape(), &[rows.width])?;
        call.contiguous("weight", w)?;
    }
    call.value(eps >= 0.0 && eps.is_finite(), "eps", "finite and not negative", eps)?;
    let (grid, n) = (call.count("rows", rows.rows)?, call.count("n", rows.width)?);
    let args =
        Args { x: call.read("x", x)?, weight: call.read_opt("weight", weight)?, y: call.write("out", out)?, n, eps };
    call.check_overlap()?;
    if n == 0 {
        return Ok(());
    }
    // SAFETY: shapes, device and overlap were checked above, and tensors are aligned to their elements.
    unsafe { launch(stream, T::DTYPE, grid, &args) }
}
