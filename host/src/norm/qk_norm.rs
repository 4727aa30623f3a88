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
pub const fn geometry(tokens: u32, heads: u32, head_dim: u32, dtype: DType, aligned: bool) -> Geometry {
    let lanes = if aligned {
        // Two pieces a thread of 16-bit elements, four of f32.
        let pieces = head_dim.div_ceil(pieces::piece(dtype, true));
        let threads = pieces.div_ceil(if matches!(dtype, DType::F32) { 4 } else { 2 });
        if threads == 0 { 1 } else { threads.next_power_of_two() }
    } else {
        32
    };
    let heads_of_block = 128 / lanes;
    Geometry::new([tokens, heads.div_ceil(heads_of_block), 1], [lanes, heads_of_block, 1])
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
    let size = dtype.size();
    let places = [
        (args.q.cast_const(), args.q_stride | args.q_head_stride, size),
        (args.k.cast_const(), args.k_stride | args.k_head_stride, size),
        (args.q_weight, 0, size),
        (args.k_weight, 0, size),
    ];
    let aligned = pieces::aligned(dtype, args.n, &places);
    let geometry = geometry(tokens, args.q_heads + args.k_heads, args.n, dtype, aligned);
    // SAFETY: forwarded to the caller; the entry fits the alignment.
    unsafe { pieces::launch(stream, "qk_norm", dtype, entry(dtype, aligned), &geometry, args) }
}

/// Where the heads of a tensor lie.
struct Heads {
    start: usize,
    heads: usize,
    stride: usize,
    head_stride: usize,
}

impl Heads {
    /// `[tokens, heads, head_dim]` with dense heads that do not overlap each other.
    fn new<T: Float>(call: &Call<'_>, arg: &'static str, x: &Tensor<T>) -> Result<Self> {
        let &[tokens, heads, n] = x.shape() else {
            return Err(call.bad_shape(arg, x.shape(), "[tokens, heads, head_dim]"));
        };
        let &[stride, head_stride, element] = x.strides() else { unreachable!("as many strides as dimensions") };
        let stride = if tokens > 1 { stride } else { 0 };
        let head_stride = if heads > 1 { head_stride } else { n };
        let width = heads.saturating_sub(1).saturating_mul(head_stride).saturating_add(n);
        if x.is_empty() || ((n <= 1 || element == 1) && head_stride >= n && (tokens <= 1 || stride >= width)) {
            return Ok(Self { start: x.as_ptr() as usize / size_of::<T>(), heads, stride, head_stride });
        }
        let expected = "dense in its last dimension, heads and tokens apart from each other".into();
        Err(Error::Stride { op: "qk_norm", arg, expected, got: x.strides().to_vec() })
    }

    /// From the first element of a token to one past the last.
    fn width(&self, n: usize) -> usize {
        self.heads.saturating_sub(1) * self.head_stride + if self.heads == 0 { 0 } else { n }
    }

    /// Whether no element is in both, for tensors of `tokens` tokens.
    fn apart(&self, other: &Self, tokens: usize, n: usize) -> bool {
        let (low, high) = if self.start <= other.start { (self, other) } else { (other, self) };
        let end = low.start + tokens.saturating_sub(1) * low.stride + low.width(n);
        if tokens == 0 || n == 0 || end <= high.start {
            return true;
        }
        // Tokens that alternate: one distance from token to token, and each token's heads between the other's.
        let between = high.start - low.start;
        low.stride == high.stride && low.width(n) <= between && (tokens == 1 || between + high.width(n) <= low.stride)
    }
}

/// `x = x / sqrt(mean(x²) + eps) * weight` for each head `x` of each token of `q` and of `k`, in place.
///
/// `q` is `[tokens, q_heads, head_dim]` and `k` is `[tokens, k_heads, head_dim]`, at most [`MAX_HEAD_DIM`] wide; views
/// of one fused tensor are fine. `q_weight` and `k_weight` are `[head_dim]`, ones if `None`.
///
/// # Errors
/// [`Shape`](Error::Shape), [`Stride`](Error::Stride), [`Overlap`](Error::Overlap), [`WrongDevice`](Error::WrongDevice);
/// [`Value`](Error::Value) for an `eps` that is negative or NaN; [`Unsupported`](Error::Unsupported) for larger heads.
pub fn qk_norm<T: Float>(
    stream: &Stream,
    q: &mut Tensor<T>,
    k: &mut Tensor<T>,
    q_weight: Option<&Tensor<T>>,
    k_weight: Option<&Tensor<T>>,
    eps: f32,
) -> Result<()> {
    run("qk_norm", stream, q, k, q_weight, k_weight, 0.0, eps)
}

/// [`qk_norm`] with the factors `1 + weight`, as Gemma has it.
///
/// # Errors
/// As for [`qk_norm`].
pub fn gemma_qk_norm<T: Float>(
    stream: &Stream,
    q: &mut Tensor<T>,
    k: &mut Tensor<T>,
    q_weight: &Tensor<T>,
    k_weight: &Tensor<T>,
    eps: f32,
) -> Result<()> {
    run("gemma_qk_norm", stream, q, k, Some(q_weight), Some(k_weight), 1.0, eps)
}

#[allow(clippy::too_many_arguments, reason = "two tensors and their weights")]
fn run<T: Float>(
    op: &'static str,
    stream: &Stream,
    q: &mut Tensor<T>,
    k: &mut Tensor<T>,
    q_weight: Option<&Tensor<T>>,
    k_weight: Option<&Tensor<T>>,
    weight_offset: f32,
    eps: f32,
) -> Result<()> {
    // Alternating views share a range of memory without sharing elements: what overlaps is found tensor by tensor.
    let (mut call, mut call_k) = (Call::new(op, stream), Call::new(op, stream));
    let (heads_q, heads_k) = (Heads::new(&call, "q", q)?, Heads::new(&call, "k", k)?);
    let (tokens, n) = (q.dim(0), q.dim(2));
    call.same_shape("k", k.shape(), &[tokens, heads_k.heads, n])?;
    check_vector(&call, "q_weight", q_weight, n)?;
    check_vector(&call, "k_weight", k_weight, n)?;
    check_eps(&call, eps)?;
    if n > MAX_HEAD_DIM {
        return Err(Error::Unsupported { op, what: format!("heads of {n} elements; at most {MAX_HEAD_DIM}") });
    }
    let args = Args {
        q: call.write("q", q)?,
        k: call_k.write("k", k)?,
        q_weight: call.read_opt("q_weight", q_weight)?,
        k_weight: call_k.read_opt("k_weight", k_weight)?,
        q_heads: call.count("q_heads", heads_q.heads)?,
        k_heads: call.count("k_heads", heads_k.heads)?,
        n: call.count("head_dim", n)?,
        q_stride: heads_q.stride,
        q_head_stride: heads_q.head_stride,
        k_stride: heads_k.stride,
        k_head_stride: heads_k.head_stride,
        weight_offset,
        eps,
    };
    call.read_opt("k_weight", k_weight)?;
    call_k.read_opt("q_weight", q_weight)?;
    call.check_overlap()?;
    call_k.check_overlap()?;
    if !heads_q.apart(&heads_k, tokens, n) {
        return Err(Error::Overlap { op, first: "q", second: "k" });
    }
    let tokens = call.count("tokens", tokens)?;
    // The grid's second extent.
    call.value(heads_q.heads + heads_k.heads <= 65536, "heads", "at most 65536", heads_q.heads + heads_k.heads)?;
    if n == 0 {
        return Ok(());
    }
    // SAFETY: shapes, device and overlap were checked above, and tensors are aligned to their elements.
    unsafe { launch(stream, T::DTYPE, tokens, &args) }
}
