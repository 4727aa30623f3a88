//! Rows of a table by number: what turns token ids into vectors.

use crate::check::Call;
use crate::device::{Geometry, Stream};
use crate::error::{Error, Result};
use crate::kernels::gemm::embedding as kernel;
use crate::tensor::Tensor;
use cuda_std::{DType, Entry, Float};

pub use kernel::Args;

const OP: &str = "embedding";

/// The entry for an element type, if there is one.
pub const fn entry(dtype: DType) -> Option<Entry<Args>> {
    Some(match dtype {
        DType::F32 => kernel::embedding_f32::ENTRY,
        DType::F16 => kernel::embedding_f16::ENTRY,
        DType::Bf16 => kernel::embedding_bf16::ENTRY,
        _ => return None,
    })
}

/// How to launch it for `n` ids and rows of `width` elements: a thread for each 16 bytes.
pub const fn geometry(dtype: DType, n: u32, width: u32) -> Geometry {
    let pieces = width.div_ceil((kernel::BYTES / dtype.size()) as u32);
    let x = if pieces > 128 {
        128
    } else if pieces == 0 {
        1
    } else {
        pieces
    };
    let y = 128 / x;
    Geometry::new([n.div_ceil(y), pieces.div_ceil(x), 1], [x, y, 1]).dependent()
}

/// Launches on raw pointers (layer L1), as [`kernel::embedding`](crate::kernels::gemm::embedding::embedding) documents.
///
/// # Errors
/// [`Error::Unsupported`] for an element type without an entry, and those of [`Stream::launch`].
///
/// # Safety
/// The pointers are device memory of the documented sizes, aligned to their element types, until the launch is done;
/// `out` overlaps no other.
pub unsafe fn launch(stream: &Stream, dtype: DType, args: &Args) -> Result<()> {
    let entry = entry(dtype).ok_or_else(|| Error::Unsupported {
        op: OP,
        what: format!("no kernel for {dtype}; there are f32, f16 and bf16"),
    })?;
    // SAFETY: forwarded to the caller.
    unsafe { stream.launch(&entry, &geometry(dtype, args.n, args.width), args) }
}

/// `out[t] = table[ids[t]]`, and zeros where `ids[t]` is not a row of the table.
///
/// `table` is `[rows, width]`, `ids` `[n]`, dense, `out` `[n, width]`; rows dense, at any distance. Nothing is rounded.
///
/// # Errors
/// [`Shape`](Error::Shape), [`Stride`](Error::Stride), [`Overlap`](Error::Overlap), [`WrongDevice`](Error::WrongDevice),
/// [`DType`](Error::DType) for 8-bit elements; [`Value`](Error::Value) for rows that are too wide for a launch.
pub fn embedding<T: Float>(stream: &Stream, out: &mut Tensor<T>, table: &Tensor<T>, ids: &Tensor<i32>) -> Result<()> {
    let mut call = Call::new(OP, stream);
    call.float("table", T::DTYPE)?;
    let &[rows, width] = table.shape() else {
        return Err(call.bad_shape("table", table.shape(), "[rows, width]"));
    };
    let &[n] = ids.shape() else {
        return Err(call.bad_shape("ids", ids.shape(), "[n]"));
    };
    call.contiguous("ids", ids)?;
    if out.shape() != [n, width] {
        return Err(call.bad_shape("out", out.shape(), format!("[{n}, {width}], a row of `table` for each of `ids`")));
    }
    let (to, from) = (call.rows("out", out)?, call.rows("table", table)?);
    let args = Args {
        out: call.write("out", out)?,
        table: call.read("table", table)?,
        ids: call.read("ids", ids)?.cast(),
        n: call.count("ids", n)?,
        rows: call.count("table", rows)?,
        width: call.count("table", width)?,
        out_row: to.stride,
        table_row: from.stride,
    };
    call.check_overlap()?;
    call.grid("table", &geometry(T::DTYPE, args.n, args.width))?;
    // SAFETY: shapes, strides, device and overlap were checked above; ids are checked by the kernel.
    unsafe { launch(stream, T::DTYPE, &args) }
}
