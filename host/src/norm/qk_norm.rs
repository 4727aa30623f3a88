//! RMS normalisation of each head of queries and keys, in place, in one launch.
//!
//! Queries and keys are `[tokens, heads, head_dim]`, usually views of one fused qkv tensor. Source of the operation:
//! Henry et al., *Query-Key Normalization for Transformers*, 2020; in this form in Qwen3, OLMo 2 and Gemma 3 (which
//! multiplies by `1 + weight`).

use super::rms_norm::{check_eps, check_vector};
use crate::check::Call;
use crate::device::{Geometry, Stream};
use crate::error::{Error, Result};
use crate::kernels::norm::qk_norm as kernel;
use crate::pieces;
use crate::tensor::Tensor;
use cuda_std::{DType, Entry, Float};

pub use kernel::Args;

/// The largest head.
pub const MAX_HEAD_DIM: usize = 512;

/// The entry for an element type, if there is one. `aligned`: all addresses and strides are multiples of 16 bytes, and so
/// is a head; the others take anything.
pub const fn entry(dtype: DType, aligned: bool) -> Option<Entry<Args>> {
    pieces::instance(dtype, if aligned { 0 } else { 3 })
}

/// How to launch it for `tokens` tokens of `heads` heads, queries and keys together, of `head_dim` elements.
pub const fn geometry(dtype: DType, aligned: bool, tokens: u32, heads: u32, head_dim: u32) -> Geometry {
    let lanes = if aligned {
        // Two pieces a thread of 16-bit elements, four of f32.
        let pieces = head_dim.div_ceil(pieces::piece(dtype, true));
        let threads = pieces.div_ceil(if matches!(dtype, DType::F32) { 4 } else { 2 });
        if threads == 0 { 1 } else { threads.next_power_of_two() }
    } else {
        32
    };
    let heads_of_block = if lanes < 128 { 128 / lanes } else { 1 };
    Geometry::new([tokens, heads.div_ceil(heads_of_block), 1], [lanes, heads_of_block, 1])
        .dependent()
        .shared_bytes(kernel::SHARED_BYTES as u32)
}

/// Launches on raw pointers (layer L1): `q` is `[tokens, q_heads, n]` and `k` `[tokens, k_heads, n]` with the strides in
/// `args`; weights are `[n]` or null for ones, and if one is null `weight_offset` is 0. `n` is at most [`MAX_HEAD_DIM`].
///
/// # Errors
/// [`Error::Unsupported`] for an element type without an entry, and those of [`Stream::launch`].
///
/// # Safety
/// The pointers are device memory of those sizes, aligned to their element type, until the launch is done, and no element
/// is in two heads.
pub unsafe fn launch(stream: &Stream, dtype: DType, tokens: u32, args: &Args) -> Result<()> {
    if args.n as usize > MAX_HEAD_DIM {
        let what = format!("heads of {} elements; at most {MAX_HEAD_DIM}", args.n);
        return Err(Error::Unsupported { op: "qk_norm", what });
    }
    let size = dtype.size();
    let places = [
        (args.q.cast_const(), args.q_stride | args.q_head_stride, size),
        (args.k.cast_const(), args.k_stride | args.k_head_stride, size),
        (args.q_weight, 0, size),
        (args.k_weight, 0, size),
    ];
    let aligned = pieces::aligned(dtype, args.n, &places);
    let geometry = geometry(dtype, aligned, tokens, args.q_heads.saturating_add(args.k_heads), args.n);
    // SAFETY: forwarded to the caller; the entry fits the alignment.
    unsafe { pieces::launch(stream, "qk_norm", dtype, entry(dtype, aligned), &geometry, args) }
}

/// `x = x / sqrt(mean(x²) + eps) * weight` for each head `x` of each token of `query` and of `key`, in place.
///
/// `query` is `[tokens, q_heads, head_dim]` and `key` is `[tokens, k_heads, head_dim]`, at most [`MAX_HEAD_DIM`] wide; views
/// of one fused tensor are fine. `query_weight` and `key_weight` are `[head_dim]`, ones if `None`.
///
/// # Errors
/// [`DType`](Error::DType) for 8-bit inputs, [`Shape`](Error::Shape), [`Stride`](Error::Stride), [`Overlap`](Error::Overlap), [`WrongDevice`](Error::WrongDevice);
/// [`Value`](Error::Value) for an `eps` that is negative, infinite or NaN, or more than 65535 heads of both; [`Unsupported`](Error::Unsupported) for larger heads.
pub fn qk_norm<T: Float>(
    stream: &Stream,
    query: &mut Tensor<T>,
    key: &mut Tensor<T>,
    query_weight: Option<&Tensor<T>>,
    key_weight: Option<&Tensor<T>>,
    eps: f32,
) -> Result<()> {
    run("qk_norm", stream, query, key, query_weight, key_weight, 0.0, eps)
}

/// [`qk_norm`] with the factors `1 + weight`, as Gemma has it.
///
/// # Errors
/// As for [`qk_norm`].
pub fn gemma_qk_norm<T: Float>(
    stream: &Stream,
    query: &mut Tensor<T>,
    key: &mut Tensor<T>,
    query_weight: &Tensor<T>,
    key_weight: &Tensor<T>,
    eps: f32,
) -> Result<()> {
    run("gemma_qk_norm", stream, query, key, Some(query_weight), Some(key_weight), 1.0, eps)
}

#[allow(clippy::too_many_arguments, reason = "two tensors and their weights")]
fn run<T: Float>(
    op: &'static str,
    stream: &Stream,
    query: &mut Tensor<T>,
    key: &mut Tensor<T>,
    query_weight: Option<&Tensor<T>>,
    key_weight: Option<&Tensor<T>>,
    weight_offset: f32,
    eps: f32,
) -> Result<()> {
    let mut call = Call::new(op, stream);
    call.float("query", T::DTYPE)?;
    for (arg, x) in [("query", &*query), ("key", &*key)] {
        if x.shape().len() != 3 {
            return Err(call.bad_shape(arg, x.shape(), "[tokens, heads, head_dim]"));
        }
        call.dense_last(arg, x)?;
        call.distinct(arg, x)?;
    }
    let &[tokens, q_heads, n] = query.shape() else { unreachable!("three dimensions") };
    let k_heads = key.dim(1);
    call.same_shape("key", key.shape(), &[tokens, k_heads, n])?;
    check_vector(&call, "query_weight", query_weight, n)?;
    check_vector(&call, "key_weight", key_weight, n)?;
    check_eps(&call, eps)?;
    if n > MAX_HEAD_DIM {
        return Err(Error::Unsupported { op, what: format!("heads of {n} elements; at most {MAX_HEAD_DIM}") });
    }
    let args = Args {
        q: call.write("query", query)?,
        k: call.write("key", key)?,
        q_weight: call.read_opt("query_weight", query_weight)?,
        k_weight: call.read_opt("key_weight", key_weight)?,
        q_heads: call.count("query", q_heads)?,
        k_heads: call.count("key", k_heads)?,
        n: call.count("query", n)?,
        q_stride: query.strides()[0],
        q_head_stride: query.strides()[1],
        k_stride: key.strides()[0],
        k_head_stride: key.strides()[1],
        weight_offset,
        eps,
    };
    call.check_overlap()?;
    let tokens = call.count("query", tokens)?;
    // The grid's second extent.
    let (heads, larger) = (q_heads.saturating_add(k_heads), if k_heads > q_heads { "key" } else { "query" });
    call.value(heads <= 65535, larger, "at most 65535 heads, those of `query` and `key` together", heads)?;
    if n == 0 {
        return Ok(());
    }
    // SAFETY: shapes, device and overlap were checked above, and tensors are aligned to their elements.
    unsafe { launch(stream, T::DTYPE, tokens, &args) }
}
