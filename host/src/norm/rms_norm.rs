//! Root-mean-square normalisation: `x / sqrt(mean(x²) + eps) * weight`, of `x` or of a sum with a residual.
//!
//! Sources: Zhang and Sennrich, *Root Mean Square Layer Normalization*, 2019. The fused form rounds the sum to the
//! element type before it normalises it, as vLLM's `fused_add_rms_norm` does, so that what was normalised is what the
//! next layer adds to. Gemma's form multiplies by `1 + weight`.

use crate::check::Call;
use crate::device::{Device, Geometry, Stream};
use crate::error::Result;
use crate::kernels::norm::{rms_norm as kernel, rms_norm_any_ring as any_ring, rms_norm_cluster as spread};
use crate::kernels::row::team::SPREAD;
use crate::pieces::{self, Held, Variant, Work};
use crate::tensor::Tensor;
use cuda_std::{DType, Entry, Float, KernelArgs};

pub use kernel::alone::Args;
pub use kernel::fused_add::Args as FusedAddArgs;

/// The entry for an element type and a [`Variant`], if there is one.
pub const fn entry(dtype: DType, variant: Variant) -> Option<Entry<Args>> {
    pieces::instance(dtype, variant.first())
}

/// The entry that adds a residual.
pub const fn fused_add_entry(dtype: DType, variant: Variant) -> Option<Entry<FusedAddArgs>> {
    pieces::instance(dtype, variant.first())
}

/// Where the instances begin.
const fn held_first(how: Held) -> usize {
    match how {
        Held::AnyX4 => 12,
        Held::X8 => 18,
    }
}

/// The entry for rows that are [`Held`], if there is one for the element type. The results are the bits of [`entry`], launched as this one.
pub const fn held_entry(dtype: DType, how: Held) -> Option<Entry<Args>> {
    pieces::instance(dtype, held_first(how))
}

/// As [`held_entry`], adding a residual.
pub const fn fused_add_held_entry(dtype: DType, how: Held) -> Option<Entry<FusedAddArgs>> {
    pieces::instance(dtype, held_first(how))
}

/// The entry for rows that have a [`narrow_geometry`], if there is one for the element type. The results are the same bits.
pub const fn narrow_entry(dtype: DType) -> Option<Entry<Args>> {
    pieces::instance(dtype, 15)
}

/// As [`narrow_entry`], adding a residual.
pub const fn fused_add_narrow_entry(dtype: DType) -> Option<Entry<FusedAddArgs>> {
    pieces::instance(dtype, 15)
}

/// How to launch [`held_entry`] and [`fused_add_held_entry`] for `rows` rows of `n` elements.
pub const fn held_geometry(dtype: DType, how: Held, rows: u32, n: u32) -> Geometry {
    let geometry = how.geometry(dtype, rows, n, false, kernel::SHARED_BYTES);
    // Rows that are not aligned take long: where there are a few for each multiprocessor, none should have one more than its part.
    if matches!(how, Held::AnyX4) { geometry.evenly() } else { geometry }
}

/// [`held_entry`] of [`Held::AnyX4`] for many rows that have an [`any_ring_geometry`], on Hopper: blocks take rows in turns, which the copy engine moves. The results are the same bits.
pub const fn any_ring_entry(dtype: DType) -> Option<Entry<Args>> {
    pieces::instance(dtype, 21)
}

/// As [`any_ring_entry`], adding a residual.
pub const fn fused_add_any_ring_entry(dtype: DType) -> Option<Entry<FusedAddArgs>> {
    pieces::instance(dtype, 21)
}

/// Threads of a row of `n` elements, where those entries can take it: of more than a warp and at most 8192 elements.
const fn any_ring_threads(dtype: DType, n: u32) -> Option<u32> {
    match Held::AnyX4.geometry(dtype, 1, n, true, 0).block[0] {
        0..=32 => None,
        threads if threads > any_ring::MOST_THREADS => None,
        threads => Some(threads),
    }
}

/// How to launch [`any_ring_entry`] and its like with so many blocks, where it can be done.
pub const fn any_ring_geometry(dtype: DType, n: u32, fused_add: bool, blocks: u32) -> Option<Geometry> {
    let Some(threads) = any_ring_threads(dtype, n) else { return None };
    let shared = any_ring::shared_bytes(threads, dtype.size(), fused_add);
    Some(Geometry::linear(blocks, threads + any_ring::MOVERS).shared_bytes(shared as u32).dependent())
}

/// How many blocks of them a multiprocessor has room for.
pub const fn any_ring_blocks(dtype: DType, n: u32, fused_add: bool) -> Option<u32> {
    match any_ring_threads(dtype, n) {
        Some(threads) => Some(any_ring::blocks(threads, dtype.size(), fused_add)),
        None => None,
    }
}

/// How to launch [`any_ring_entry`] and its like for `rows` rows, held as `how` otherwise, if they serve better there: from as many rows as there are blocks then. Rows of two
/// warps without a residual, of which 4096 were measured and no fewer, from twice as many on. Measured on an H200 in bf16.
pub(super) fn in_turns(
    device: &Device,
    dtype: DType,
    how: Held,
    rows: u32,
    n: u32,
    fused_add: bool,
) -> Option<Geometry> {
    let properties = device.properties();
    if how != Held::AnyX4 || properties.compute_capability != (9, 0) {
        return None;
    }
    let blocks = properties.multiprocessors * any_ring_blocks(dtype, n, fused_add)?;
    let least = if any_ring_threads(dtype, n)? <= 64 && !fused_add { 2 * blocks } else { blocks };
    if rows < least { None } else { any_ring_geometry(dtype, n, fused_add, blocks) }
}

/// Where an instance for rows spread over a cluster is among those: with two, four or eight pieces a thread.
pub(super) const fn spread_instance(variant: Variant, how: Option<Held>) -> Option<usize> {
    match (variant, how) {
        (Variant::X2, _) => Some(0),
        (Variant::X4, _) => Some(3),
        (_, Some(Held::X8)) => Some(6),
        _ => None,
    }
}

/// The instance for a few rows of `n` elements, if there is one.
const fn cluster_instance<A: KernelArgs>(dtype: DType, variant: Variant, n: u32) -> Option<Entry<A>> {
    match spread_instance(variant, Held::new(dtype, variant, n)) {
        Some(instance) => pieces::instance(dtype, 24 + instance),
        None => None,
    }
}

/// The entry for a few of the rows that have a [`cluster_geometry`], on Hopper: a cluster of blocks for each. The results are the same bits.
pub const fn cluster_entry(dtype: DType, variant: Variant, n: u32) -> Option<Entry<Args>> {
    cluster_instance(dtype, variant, n)
}

/// As [`cluster_entry`], adding a residual.
pub const fn fused_add_cluster_entry(dtype: DType, variant: Variant, n: u32) -> Option<Entry<FusedAddArgs>> {
    cluster_instance(dtype, variant, n)
}

/// How to launch [`cluster_entry`] and its like for `rows` rows of `n` elements, where it can be done: aligned rows that are held in registers.
pub const fn cluster_geometry(dtype: DType, variant: Variant, rows: u32, n: u32) -> Option<Geometry> {
    let how = Held::new(dtype, variant, n);
    if spread_instance(variant, how).is_none() || rows > i32::MAX as u32 / SPREAD {
        return None;
    }
    let threads = match how {
        Some(how) => how.geometry(dtype, rows, n, true, 0).block[0],
        None => variant.geometry(dtype, rows, n, true, 0).block[0],
    };
    let block = threads.div_ceil(SPREAD).next_multiple_of(32);
    let geometry = Geometry::linear(rows * SPREAD, block).shared_bytes(spread::SHARED_BYTES as u32);
    Some(geometry.cluster(SPREAD).dependent())
}

/// How to launch them, where they serve better: few rows, so long that one multiprocessor takes longer to read them than blocks of a cluster take to tell each other their sums. A residual is as much again to read.
///
/// Measured in bf16 on an H200, 1 to 32 rows: 8192 columns take 9 to 18 % less without a residual (7168 11, 5120 nothing, which stay), with one 20 to 35 % (7168 16 to 30, 5120 4 to 15), 16384 22 to 53, 32768 36 to 68.
/// What is too many is for 8-bit results: 32 rows of 8192 without a residual took 8 % more. On an H100 a cluster takes 0.3 µs longer to begin: 8192 columns lose 4 to 7 % without a residual, 12 to 15 with 8-bit
/// results, and gain 8 to 14 with one (8-bit results −8 to +3).
pub(super) fn spread_better(
    device: &Device,
    dtype: DType,
    variant: Variant,
    rows: u32,
    n: u32,
    fused_add: bool,
) -> Option<Geometry> {
    let (least, most) = match (variant, fused_add) {
        (Variant::X2, false) => (1024, 16),
        (Variant::X2, true) => (768, 32),
        (Variant::X4, _) => (0, 32),
        _ => (0, 48),
    };
    if rows > most || n.div_ceil(pieces::piece(dtype, true)) < least || device.properties().compute_capability != (9, 0)
    {
        return None;
    }
    cluster_geometry(dtype, variant, rows, n)
}

/// How to launch any of the others but the narrow ones for `rows` rows of `n` elements.
pub const fn geometry(dtype: DType, variant: Variant, rows: u32, n: u32) -> Geometry {
    let geometry = variant.geometry(dtype, rows, n, matches!(variant, Variant::X4), kernel::SHARED_BYTES);
    if matches!(variant, Variant::X2) { geometry.evenly() } else { geometry }
}

/// How to launch the narrow entries, where they serve: rows of more than half a warp and up to four, in two pieces of 16 bytes a thread
/// ([`Variant::X2`]).
pub const fn narrow_geometry(dtype: DType, rows: u32, n: u32) -> Option<Geometry> {
    if n.div_ceil(pieces::piece(dtype, true)) <= 32 {
        return None;
    }
    // Rows of one warp are those with a residual; for others there is no difference.
    pieces::narrow(
        dtype,
        rows,
        n,
        if n.div_ceil(pieces::piece(dtype, true)) <= 64 { Work::Add } else { Work::Plain },
        kernel::SHARED_BYTES,
    )
}

/// Whether the narrow entry that adds a residual is as fast as the other or faster, for rows of `pieces` of 16 bytes, more than a warp of pairs.
/// Measured on an H200.
const fn adds_narrow(rows: u32, n: u32, pieces: u32) -> bool {
    let elements = rows as u64 * n as u64;
    pieces <= 96 || elements <= 1 << 19 || pieces <= 128 && elements <= 1 << 20
}

/// Launches on raw pointers (layer L1): `x` and `out` are `[rows, n]`, rows `x_stride` and `out_stride` elements apart;
/// `weight` is `[n]`, or null for ones, and then `weight_offset` is 0.
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
    let places =
        [(args.x, args.x_stride, size), (args.weight, 0, size), (args.out.cast_const(), args.out_stride, size)];
    let variant = Variant::new(dtype, args.n, pieces::aligned(dtype, args.n, &places));
    let usual = geometry(dtype, variant, args.rows, args.n);
    let spread = spread_better(stream.device(), dtype, variant, args.rows, args.n, false);
    let (entry, geometry) = match narrow_geometry(dtype, args.rows, args.n) {
        _ if let Some(spread) = spread => (cluster_entry(dtype, variant, args.n), spread),
        // Rows of one warp share blocks as it is.
        Some(narrow) if variant == Variant::X2 && usual.block[1] == 1 => (narrow_entry(dtype), narrow),
        _ => match Held::new(dtype, variant, args.n) {
            Some(how) => match in_turns(stream.device(), dtype, how, args.rows, args.n, false) {
                Some(turns) => (any_ring_entry(dtype), turns),
                None => (held_entry(dtype, how), held_geometry(dtype, how, args.rows, args.n)),
            },
            None => (entry(dtype, variant), usual),
        },
    };
    // SAFETY: forwarded to the caller; the entry fits the alignment.
    unsafe { pieces::launch(stream, "rms_norm", dtype, entry, &geometry, args) }
}

/// Launches on raw pointers (layer L1): as [`launch`], of `x + residual`, which goes to `residual_out`.
///
/// # Errors
/// As for [`launch`].
///
/// # Safety
/// As for [`launch`]; besides, `out` may be the very `residual`, and `residual_out` the very `x` or `residual`.
pub unsafe fn launch_fused_add(stream: &Stream, dtype: DType, args: &FusedAddArgs) -> Result<()> {
    let size = dtype.size();
    let places = [
        (args.x, args.x_stride, size),
        (args.residual, args.residual_stride, size),
        (args.weight, 0, size),
        (args.out.cast_const(), args.out_stride, size),
        (args.residual_out.cast_const(), args.residual_out_stride, size),
    ];
    let variant = Variant::new(dtype, args.n, pieces::aligned(dtype, args.n, &places));
    let usual = geometry(dtype, variant, args.rows, args.n);
    // Whether each row's sum is as far from a multiple of 16 bytes as what it replaces.
    let apart = args.residual.addr().wrapping_sub(args.residual_out.addr());
    let strides = args.residual_stride.wrapping_sub(args.residual_out_stride).wrapping_mul(size);
    let lie_alike = (apart | strides).is_multiple_of(16);
    let spread = spread_better(stream.device(), dtype, variant, args.rows, args.n, true);
    let (entry, geometry) = match narrow_geometry(dtype, args.rows, args.n) {
        _ if let Some(spread) = spread => (fused_add_cluster_entry(dtype, variant, args.n), spread),
        // Rows of one warp share blocks in the other entry, too.
        Some(narrow) if variant == Variant::X2 && narrow.block[0] == 32 => (fused_add_entry(dtype, variant), narrow),
        Some(narrow)
            if variant == Variant::X2
                && adds_narrow(args.rows, args.n, args.n.div_ceil(pieces::piece(dtype, true))) =>
        {
            (fused_add_narrow_entry(dtype), narrow)
        }
        _ => match Held::new(dtype, variant, args.n) {
            Some(how) => match in_turns(stream.device(), dtype, how, args.rows, args.n, true) {
                Some(turns) if lie_alike => (fused_add_any_ring_entry(dtype), turns),
                _ => (fused_add_held_entry(dtype, how), held_geometry(dtype, how, args.rows, args.n)),
            },
            None => (fused_add_entry(dtype, variant), usual),
        },
    };
    // SAFETY: forwarded to the caller; the entry fits the alignment.
    unsafe { pieces::launch(stream, "fused_add_rms_norm", dtype, entry, &geometry, args) }
}

/// Checks what every operation here takes.
pub(super) fn check_eps(call: &Call<'_>, eps: f32) -> Result<()> {
    call.value(eps >= 0.0 && eps.is_finite(), "eps", "finite and not negative", eps)
}

/// Checks a vector that goes along the rows.
pub(super) fn check_vector<T: cuda_std::Element>(
    call: &Call<'_>,
    arg: &'static str,
    vector: Option<&Tensor<T>>,
    n: usize,
) -> Result<()> {
    let Some(vector) = vector else { return Ok(()) };
    call.same_shape(arg, vector.shape(), &[n])?;
    call.contiguous(arg, vector)
}

fn run<T: Float>(
    op: &'static str,
    stream: &Stream,
    out: &mut Tensor<T>,
    x: &Tensor<T>,
    weight: Option<&Tensor<T>>,
    weight_offset: f32,
    eps: f32,
) -> Result<()> {
    let mut call = Call::new(op, stream);
    call.float("x", T::DTYPE)?;
    let (to, from) = (call.rows("out", out)?, call.rows("x", x)?);
    call.same_shape("out", out.shape(), x.shape())?;
    check_vector(&call, "weight", weight, from.width)?;
    check_eps(&call, eps)?;
    let (rows, n) = (call.count("x", from.rows)?, call.count("x", from.width)?);
    let args = Args {
        x: call.read("x", x)?,
        weight: call.read_opt("weight", weight)?,
        out: call.write("out", out)?,
        rows,
        n,
        x_stride: from.stride,
        out_stride: to.stride,
        weight_offset,
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

/// `out[r] = x[r] / sqrt(mean(x[r]²) + eps) * weight`, for each row `r`.
///
/// `x` and `out` are `[.., n]` of the same shape, the rows of each at one distance from each other; they may be the same
/// memory. `weight` is `[n]`, ones if `None`.
///
/// # Errors
/// [`DType`](crate::Error::DType) for 8-bit inputs, [`Shape`](crate::Error::Shape), [`Stride`](crate::Error::Stride), [`Overlap`](crate::Error::Overlap),
/// [`WrongDevice`](crate::Error::WrongDevice); [`Value`](crate::Error::Value) for an `eps` that is negative, infinite or NaN,
/// and more than 2^31 - 1 rows or columns.
pub fn rms_norm<T: Float>(
    stream: &Stream,
    out: &mut Tensor<T>,
    x: &Tensor<T>,
    weight: Option<&Tensor<T>>,
    eps: f32,
) -> Result<()> {
    run("rms_norm", stream, out, x, weight, 0.0, eps)
}

/// [`rms_norm`] with the factor `1 + weight`, as Gemma has it.
///
/// # Errors
/// As for [`rms_norm`].
pub fn gemma_rms_norm<T: Float>(
    stream: &Stream,
    out: &mut Tensor<T>,
    x: &Tensor<T>,
    weight: &Tensor<T>,
    eps: f32,
) -> Result<()> {
    run("gemma_rms_norm", stream, out, x, Some(weight), 1.0, eps)
}

/// The tensors of a fused addition: inputs, and outputs unless it is in place.
struct FusedAdd<'a, T> {
    x: &'a Tensor<T>,
    residual: &'a Tensor<T>,
    out: &'a mut Tensor<T>,
    residual_out: &'a mut Tensor<T>,
    /// What the signature calls the outputs.
    names: [&'static str; 2],
    /// Of these pairs of an output and an input both may be the very same memory.
    may_be: &'static [(&'static str, &'static str)],
}

fn run_fused_add<T: Float>(
    op: &'static str,
    stream: &Stream,
    tensors: FusedAdd<'_, T>,
    weight: Option<&Tensor<T>>,
    weight_offset: f32,
    eps: f32,
) -> Result<()> {
    let FusedAdd { x, residual, out, residual_out, names: [out_name, sum_name], may_be } = tensors;
    let mut call = Call::new(op, stream);
    call.float("x", T::DTYPE)?;
    let (from, added) = (call.rows("x", x)?, call.rows("residual", residual)?);
    let (to, sum) = (call.rows(out_name, out)?, call.rows(sum_name, residual_out)?);
    call.same_shape("residual", residual.shape(), x.shape())?;
    call.same_shape(out_name, out.shape(), x.shape())?;
    call.same_shape(sum_name, residual_out.shape(), x.shape())?;
    check_vector(&call, "weight", weight, from.width)?;
    check_eps(&call, eps)?;
    let (rows, n) = (call.count("x", from.rows)?, call.count("x", from.width)?);
    let args = FusedAddArgs {
        x: call.read("x", x)?,
        residual: call.read("residual", residual)?,
        weight: call.read_opt("weight", weight)?,
        out: call.write(out_name, out)?,
        residual_out: call.write(sum_name, residual_out)?,
        rows,
        n,
        x_stride: from.stride,
        residual_stride: added.stride,
        out_stride: to.stride,
        residual_out_stride: sum.stride,
        weight_offset,
        eps,
    };
    call.check_overlap_but(may_be)?;
    // Rows of nothing take blocks all the same, and there may be 2^31 of them without any memory.
    if n == 0 {
        return Ok(());
    }
    // SAFETY: shapes, device and overlap were checked above, and tensors are aligned to their elements.
    unsafe { launch_fused_add(stream, T::DTYPE, &args) }
}

/// Outputs that are the inputs.
fn in_place<'a, T>(
    x_in: &'a Tensor<T>,
    residual_in: &'a Tensor<T>,
    x: &'a mut Tensor<T>,
    residual: &'a mut Tensor<T>,
) -> FusedAdd<'a, T> {
    let (names, may_be) = (["x", "residual"], &[("x", "x"), ("residual", "residual")]);
    FusedAdd { x: x_in, residual: residual_in, out: x, residual_out: residual, names, may_be }
}

/// A second handle on the same memory.
fn alias<T: Float>(tensor: &Tensor<T>) -> Result<Tensor<T>> {
    tensor.as_strided(tensor.shape(), tensor.strides(), 0)
}

/// `residual = round(x + residual)`, then `x = residual / sqrt(mean(residual²) + eps) * weight`, in place.
///
/// The sum is rounded to the element type, and the rounded sum is normalised. Shapes as for [`rms_norm`].
///
/// # Errors
/// As for [`rms_norm`].
pub fn fused_add_rms_norm<T: Float>(
    stream: &Stream,
    x: &mut Tensor<T>,
    residual: &mut Tensor<T>,
    weight: Option<&Tensor<T>>,
    eps: f32,
) -> Result<()> {
    let (x_in, residual_in) = (alias(x)?, alias(residual)?);
    let tensors = in_place(&x_in, &residual_in, x, residual);
    run_fused_add("fused_add_rms_norm", stream, tensors, weight, 0.0, eps)
}

/// [`fused_add_rms_norm`] with the factor `1 + weight`, as Gemma has it.
///
/// # Errors
/// As for [`rms_norm`].
pub fn gemma_fused_add_rms_norm<T: Float>(
    stream: &Stream,
    x: &mut Tensor<T>,
    residual: &mut Tensor<T>,
    weight: &Tensor<T>,
    eps: f32,
) -> Result<()> {
    let (x_in, residual_in) = (alias(x)?, alias(residual)?);
    let tensors = in_place(&x_in, &residual_in, x, residual);
    run_fused_add("gemma_fused_add_rms_norm", stream, tensors, Some(weight), 1.0, eps)
}

/// [`fused_add_rms_norm`] out of place: `residual_out = round(x + residual)`, and `out` is its normalisation. `out` may be
/// the memory of `x` or of `residual`, and `residual_out` that of the other.
///
/// # Errors
/// As for [`rms_norm`].
pub fn fused_add_rms_norm_to<T: Float>(
    stream: &Stream,
    out: &mut Tensor<T>,
    residual_out: &mut Tensor<T>,
    x: &Tensor<T>,
    residual: &Tensor<T>,
    weight: Option<&Tensor<T>>,
    eps: f32,
) -> Result<()> {
    let names = ["out", "residual_out"];
    let may_be = &[("out", "x"), ("out", "residual"), ("residual_out", "x"), ("residual_out", "residual")];
    let tensors = FusedAdd { x, residual, out, residual_out, names, may_be };
    run_fused_add("fused_add_rms_norm_to", stream, tensors, weight, 0.0, eps)
}
