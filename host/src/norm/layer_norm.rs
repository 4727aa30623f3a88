//! Layer normalisation: `(x - mean) / sqrt(mean((x - mean)²) + eps) * weight + bias`.
//!
//! Source: Ba, Kiros and Hinton, *Layer Normalization*, 2016. The variance is that of differences from means, and does not
//! cancel for rows far from zero.

use super::rms_norm::{check_eps, check_vector, in_turns};
use crate::check::Call;
use crate::device::{Device, Geometry, Stream};
use crate::error::Result;
use crate::kernels::norm::{layer_norm as kernel, layer_norm_cluster as spread, rms_norm_any_ring as any_ring};
use crate::kernels::row::team::SPREAD;
use crate::pieces::{self, Held, Variant};
use crate::tensor::Tensor;
use cuda_std::{DType, Entry, Float};

pub use kernel::Args;

/// The variant that is launched for rows of `n` elements: [`Variant::new`], but four pieces a thread from 257 on, since a warp has more to do here.
pub const fn variant(dtype: DType, n: u32, aligned: bool) -> Variant {
    match Variant::new(dtype, n, aligned) {
        Variant::X2 if n.div_ceil(pieces::piece(dtype, true)) > 256 => Variant::X4,
        other => other,
    }
}

/// The entry for an element type and a [`Variant`], if there is one.
pub const fn entry(dtype: DType, variant: Variant) -> Option<Entry<Args>> {
    pieces::instance(dtype, variant.first())
}

/// [`entry`] of [`Variant::X4`] for many rows. The results are the same bits.
pub const fn many_entry(dtype: DType) -> Option<Entry<Args>> {
    pieces::instance(dtype, 12)
}

/// The entry for rows that are [`Held`], if there is one for the element type. The results are the bits of [`entry`], launched as this one.
pub const fn held_entry(dtype: DType, how: Held) -> Option<Entry<Args>> {
    match how {
        Held::AnyX4 => pieces::instance(dtype, 15),
        Held::X8 => pieces::instance(dtype, 18),
    }
}

/// How to launch [`held_entry`] for `rows` rows of `n` elements.
pub const fn held_geometry(dtype: DType, how: Held, rows: u32, n: u32) -> Geometry {
    how.geometry(dtype, rows, n, false, kernel::SHARED_BYTES)
}

/// [`held_entry`] of [`Held::AnyX4`] for many rows, on Hopper, launched as [`any_ring_geometry`](super::rms_norm::any_ring_geometry) says for rows without a residual: blocks take rows in turns,
/// which the copy engine moves. The results are the same bits. Rows of f32 have none.
pub const fn any_ring_entry(dtype: DType) -> Option<Entry<Args>> {
    match dtype {
        DType::F32 => None,
        _ => pieces::instance(dtype, 23),
    }
}

/// How to launch it where it serves better: for more rows than there are at once in blocks of their own, of which a multiprocessor has as many as its registers allow; of two warps, twice as many. Measured in
/// bf16 on an H200.
fn in_turns_better(device: &Device, dtype: DType, how: Held, rows: u32, n: u32) -> Option<Geometry> {
    any_ring_entry(dtype)?;
    let turns = in_turns(device, dtype, how, rows, n, false)?;
    let threads = turns.block[0] - any_ring::MOVERS;
    let at_once = device.properties().multiprocessors * (any_ring::THREADS / threads);
    (rows > if threads > 64 { at_once } else { 2 * at_once }).then_some(turns)
}

/// The entry for a few of the rows that have a [`cluster_geometry`], on Hopper: a cluster of blocks for each. The results are the same bits.
pub const fn cluster_entry(dtype: DType) -> Option<Entry<Args>> {
    pieces::instance(dtype, 21)
}

/// How to launch [`cluster_entry`] for `rows` rows of `n` elements, where it can be done: those of [`Variant::X4`] that take more than a warp.
pub const fn cluster_geometry(dtype: DType, variant: Variant, rows: u32, n: u32) -> Option<Geometry> {
    let block = variant.geometry(dtype, rows, n, false, 0).block;
    if !matches!(variant, Variant::X4) || block[0] <= 32 || rows > i32::MAX as u32 / SPREAD {
        return None;
    }
    let threads = block[0].div_ceil(SPREAD).next_multiple_of(32);
    let geometry = Geometry::linear(rows * SPREAD, threads).shared_bytes(spread::SHARED_BYTES as u32);
    Some(geometry.cluster(SPREAD).dependent())
}

/// The same where it serves better: few rows, so long that one multiprocessor takes longer to read them than blocks of a cluster take to tell each other what they have found.
fn cluster_better(device: &Device, dtype: DType, variant: Variant, rows: u32, n: u32) -> Option<Geometry> {
    let long = n.div_ceil(pieces::piece(dtype, true)) >= LEAST_CLUSTER_PIECES;
    if rows > MOST_CLUSTER_ROWS || !long || device.properties().compute_capability != (9, 0) {
        return None;
    }
    cluster_geometry(dtype, variant, rows, n)
}

/// The least pieces of 16 bytes of a row, and the most rows, for [`cluster_entry`]. Measured in bf16, 1 to 32 rows: 5120 columns take 7 to 16 % less on an H200 (0 to 13 on an H100), 8192 17 to 21 (8 to 17), 16384
/// 31 to 42 (26 to 39); 4096 5 % less to 7 more (3 less to 14 more).
const LEAST_CLUSTER_PIECES: u32 = 640;
/// See there.
const MOST_CLUSTER_ROWS: u32 = 32;

/// The least bytes of rows for [`many_entry`]: with fewer, the weights are in time. Measured on an H200.
pub const LEAST_MANY_BYTES: u64 = 5 << 20;

/// How to launch [`entry`] for `rows` rows of `n` elements, and [`many_entry`] if a block has one row by this.
pub const fn geometry(dtype: DType, variant: Variant, rows: u32, n: u32) -> Geometry {
    let geometry = variant.geometry(dtype, rows, n, false, kernel::SHARED_BYTES);
    // Of longer rows, which more of the first-level cache serves better, some lose 2 to 6 %. Measured on an H200.
    if matches!(variant, Variant::X2) { geometry.evenly() } else { geometry }
}

/// Launches on raw pointers (layer L1): `x` and `out` are `[rows, n]`, rows `x_stride` and `out_stride` elements apart;
/// `weight` and `bias` are `[n]`, or null for ones and zeros.
///
/// # Errors
/// [`Error::Unsupported`](crate::Error::Unsupported) for an element type without an entry, and those of
/// [`Stream::launch`].
///
/// # Safety
/// The pointers are device memory of those sizes, aligned to their element type, until the launch is done; `out` overlaps
/// no other, or is the very `x`.
pub unsafe fn launch(stream: &Stream, dtype: DType, args: &Args) -> Result<()> {
    let size = dtype.size();
    let places = [
        (args.x, args.x_stride, size),
        (args.weight, 0, size),
        (args.bias, 0, size),
        (args.out.cast_const(), args.out_stride, size),
    ];
    let variant = variant(dtype, args.n, pieces::aligned(dtype, args.n, &places));
    let usual = geometry(dtype, variant, args.rows, args.n);
    let many =
        (args.rows as u64 * args.n as u64).saturating_mul(size as u64) >= LEAST_MANY_BYTES && usual.block[1] == 1;
    let (entry, geometry) = match Held::new(dtype, variant, args.n) {
        _ if let Some(spread) = cluster_better(stream.device(), dtype, variant, args.rows, args.n) => {
            (cluster_entry(dtype), spread)
        }
        Some(how) => match in_turns_better(stream.device(), dtype, how, args.rows, args.n) {
            Some(turns) => (any_ring_entry(dtype), turns),
            None => (held_entry(dtype, how), held_geometry(dtype, how, args.rows, args.n)),
        },
        None if variant == Variant::X4 && many => (many_entry(dtype), usual),
        None => (entry(dtype, variant), usual),
    };
    // SAFETY: forwarded to the caller; the entry fits the alignment.
    unsafe { pieces::launch(stream, "layer_norm", dtype, entry, &geometry, args) }
}

/// `out[r] = (x[r] - mean) / sqrt(mean((x[r] - mean)²) + eps) * weight + bias`, for each row `r` with its mean.
///
/// `x` and `out` are `[.., n]` of the same shape, the rows of each at one distance from each other; they may be the same
/// memory. `weight` and `bias` are `[n]`, ones and zeros if `None`.
///
/// # Errors
/// [`DType`](crate::Error::DType) for 8-bit inputs, [`Shape`](crate::Error::Shape), [`Stride`](crate::Error::Stride), [`Overlap`](crate::Error::Overlap),
/// [`WrongDevice`](crate::Error::WrongDevice); [`Value`](crate::Error::Value) for an `eps` that is negative, infinite or NaN,
/// and more than 2^31 - 1 rows or columns.
pub fn layer_norm<T: Float>(
    stream: &Stream,
    out: &mut Tensor<T>,
    x: &Tensor<T>,
    weight: Option<&Tensor<T>>,
    bias: Option<&Tensor<T>>,
    eps: f32,
) -> Result<()> {
    let mut call = Call::new("layer_norm", stream);
    call.float("x", T::DTYPE)?;
    let (to, from) = (call.rows("out", out)?, call.rows("x", x)?);
    call.same_shape("out", out.shape(), x.shape())?;
    check_vector(&call, "weight", weight, from.width)?;
    check_vector(&call, "bias", bias, from.width)?;
    check_eps(&call, eps)?;
    let (rows, n) = (call.count("x", from.rows)?, call.count("x", from.width)?);
    let args = Args {
        x: call.read("x", x)?,
        weight: call.read_opt("weight", weight)?,
        bias: call.read_opt("bias", bias)?,
        out: call.write("out", out)?,
        rows,
        n,
        x_stride: from.stride,
        out_stride: to.stride,
        eps,
    };
    call.check_overlap_but(&[("out", "x")])?;
    // Rows of nothing take blocks all the same, and there may be 2^31 of them without any memory.
    if n == 0 {
        return Ok(());
    }
    // SAFETY: shapes, device and overlap were checked above, and tensors are aligned to their elements.
    unsafe { launch(stream, T::DTYPE, &args) }
}
