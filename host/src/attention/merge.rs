//! Merge of partial attention results, as of a shared prefix and of each sequence's own keys.

use crate::check::Call;
use crate::device::{Geometry, Stream};
use crate::error::Result;
use crate::kernels::attention::merge as kernel;
use crate::pieces;
use crate::tensor::Tensor;
use cuda_std::{DType, Entry, Float};

pub use kernel::{Args, MAX_PARTS, Parts};

const OP: &str = "merge";

/// The entry for an element type, if there is one. `aligned`: rows can be moved in pieces of 16 bytes.
pub const fn entry(dtype: DType, aligned: bool) -> Option<Entry<Args>> {
    pieces::instance(dtype, if aligned { 0 } else { 3 })
}

/// How to launch it for `rows` rows of `dim` elements.
pub const fn geometry(dtype: DType, aligned: bool, rows: u32, dim: u32) -> Geometry {
    pieces::elementwise(rows, dim, dtype, aligned, false)
}

/// Launches on raw pointers (layer L1).
///
/// # Errors
/// [`Error::Unsupported`](crate::Error::Unsupported) for an element type without an entry, and those of
/// [`Stream::launch`].
///
/// # Safety
/// The pointers are device memory of the sizes that [`Args`] and [`Parts`] say, aligned to their element type, until the
/// launch is done; outputs overlap nothing else; `count` is 1 to [`MAX_PARTS`].
pub unsafe fn launch(stream: &Stream, dtype: DType, args: &Args) -> Result<()> {
    let mut places = [(std::ptr::null(), 0, dtype.size()); MAX_PARTS + 1];
    places[MAX_PARTS] = (args.out.cast_const(), args.out_stride, dtype.size());
    for (i, place) in places.iter_mut().enumerate().take(args.count as usize) {
        (place.0, place.1) = (args.parts.out[i], args.parts.stride[i]);
    }
    let aligned = pieces::aligned(dtype, args.dim, &places);
    let (entry, geometry) = (entry(dtype, aligned), geometry(dtype, aligned, args.rows, args.dim));
    // SAFETY: forwarded to the caller; the entry fits the alignment.
    unsafe { pieces::launch(stream, OP, dtype, entry, &geometry, args) }
}

/// The attention over the union of the keys that the parts saw, which must be different ones.
///
/// * `parts`: outputs `[.., head_dim]`, rows at one distance from each other, and the logarithms of their softmaxes'
///   denominators `[..]`, as [`decode`](super::decode()) gives both. 1 to [`MAX_PARTS`] of them. A part that saw no keys
///   has -inf there, and its output is ignored.
/// * `out`, `lse`: as the parts. A row that no part saw keys for becomes 0, with -inf.
///
/// If a sink took part in the softmax of one part, it counts once; it must not take part in two. Source: Juravsky et
/// al., *Hydragen*, 2024.
///
/// # Errors
/// [`Shape`](crate::Error::Shape), [`Stride`](crate::Error::Stride), [`Value`](crate::Error::Value) (number of parts, `lse` of heads of nothing),
/// [`Overlap`](crate::Error::Overlap), [`WrongDevice`](crate::Error::WrongDevice), [`Unsupported`](crate::Error::Unsupported) for 8-bit tensors.
pub fn merge<T: Float>(
    stream: &Stream,
    out: &mut Tensor<T>,
    lse: Option<&mut Tensor<f32>>,
    parts: &[(&Tensor<T>, &Tensor<f32>)],
) -> Result<()> {
    let mut call = Call::new(OP, stream);
    let to = call.rows("out", out)?;
    call.distinct("out", out)?;
    call.value((1..=MAX_PARTS).contains(&parts.len()), "parts", format!("1 to {MAX_PARTS}"), parts.len())?;
    let outer = out.shape()[..out.shape().len() - 1].to_vec();
    let null = std::ptr::null();
    let mut pointers = Parts { out: [null; MAX_PARTS], lse: [std::ptr::null(); MAX_PARTS], stride: [0; MAX_PARTS] };
    for (i, (part, logs)) in parts.iter().enumerate() {
        call.same_shape("parts", part.shape(), out.shape())?;
        call.same_shape("parts", logs.shape(), &outer)?;
        call.contiguous("parts", logs)?;
        pointers.stride[i] = call.rows("parts", part)?.stride;
        pointers.out[i] = call.read("parts", part)?;
        pointers.lse[i] = call.read("parts", logs)?.cast();
    }
    if let Some(lse) = &lse {
        // Threads with results of a row write its logarithm.
        call.value(to.width > 0 || to.rows == 0, "out", "wider than nothing, to have `lse`", to.width)?;
        call.same_shape("lse", lse.shape(), &outer)?;
        call.contiguous("lse", lse)?;
    }
    let args = Args {
        out: call.write("out", out)?,
        lse: call.write_opt("lse", lse)?.cast(),
        parts: pointers,
        count: parts.len() as u32,
        rows: call.count("out", to.rows)?,
        dim: call.count("out", to.width)?,
        out_stride: to.stride,
    };
    call.check_overlap()?;
    // SAFETY: shapes, device and overlap were checked above, and tensors are aligned to their elements.
    unsafe { launch(stream, T::DTYPE, &args) }
}
