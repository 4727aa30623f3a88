//! `silu(gate) up` with e4m3 results: the next layer's input, quantised on the way.
//!
//! `x` is `[.., 2 d]`, gates first; `out` is `[.., d]`. A result is `silu(gate) up` times the reciprocal of the scale, which is good
//! to a few units in its last place (of scales below 2⁻¹²⁶ it is infinite, beyond 2¹²⁶ 0), in f32, rounded to the nearest
//! e4m3 number (ties to even), saturating at ±448. Dynamic scales are the largest magnitude that they
//! cover, at least 10⁻¹⁰, divided by 448. NaN becomes NaN and has no say in a scale; an infinity makes its scale
//! infinite.

use crate::check::Call;
use crate::device::{Geometry, Stream};
use crate::error::Result;
use crate::kernels::activation::silu_and_mul_quant as kernel;
use crate::pieces::{self, Place};
use crate::tensor::Tensor;
use cuda_std::{DType, E4M3, Entry, Float};
use std::ffi::c_void;

use super::gated::doubled;

pub use crate::pieces::Variant;
pub use kernel::groups::Args as GroupArgs;
pub use kernel::tensor::Args as TensorArgs;
pub use kernel::tokens::Args as TokenArgs;

const PER_TENSOR: &str = "silu_and_mul_e4m3_per_tensor";
const PER_TOKEN: &str = "silu_and_mul_e4m3_per_token";
const PER_GROUP: &str = "silu_and_mul_e4m3_per_group";

/// The entry with one scale for all, if there is one for the element type. `aligned`: as for
/// [`gated::entry`](super::gated::entry), and `out` to as many bytes as 16 bytes of input have elements.
pub const fn per_tensor_entry(dtype: DType, aligned: bool) -> Option<Entry<TensorArgs>> {
    pieces::instance(dtype, if aligned { 0 } else { 3 })
}

/// The entry with one scale for all for few rows of 16-bit elements, aligned.
pub const fn per_tensor_few_entry(dtype: DType) -> Option<Entry<TensorArgs>> {
    few(dtype)
}

/// The instance for few rows, if there is one for the element type.
const fn few<A: cuda_std::KernelArgs>(dtype: DType) -> Option<Entry<A>> {
    // The tables go on with f16 and bf16.
    match dtype {
        DType::F32 => None,
        _ => pieces::instance(dtype, 5),
    }
}

/// The entry with a scale for each group of 128 columns, if there is one for the element type.
pub const fn per_group_entry(dtype: DType, aligned: bool) -> Option<Entry<GroupArgs>> {
    pieces::instance(dtype, if aligned { 0 } else { 3 })
}

/// The entry with a scale for each group of 128 columns for few rows of 16-bit elements, aligned.
pub const fn per_group_few_entry(dtype: DType) -> Option<Entry<GroupArgs>> {
    few(dtype)
}

/// The entry with a scale for each group of 128 columns with one piece of 16-bit elements a thread, aligned, where [`per_group_entry`] has two. It is
/// launched with [`geometry`]; the results are the same bits.
pub const fn per_group_one_entry(dtype: DType) -> Option<Entry<GroupArgs>> {
    // The tables go on with f16 and bf16.
    match dtype {
        DType::F32 => None,
        _ => pieces::instance(dtype, 7),
    }
}

/// Whether a launch had better have more threads that do less each: it runs at once, or nearly, and rows fill blocks. Measured on an H200.
const fn is_for_one(rows: u32, d: u32) -> bool {
    let results = rows as u64 * d as u64;
    results <= FEW || results <= 1 << 22 && (d <= 256 || d > 1024)
}

/// How to launch [`per_tensor_few_entry`] or [`per_group_few_entry`] for at most [`MOST_FEW_ROWS`] rows; `None` where that takes more blocks than start in
/// time.
pub const fn few_geometry(rows: u32, d: u32) -> Option<Geometry> {
    // The smaller ones spread few rows; more of them take longer to start than to run. Measured on an H200.
    let most = if d < 512 { d } else { 512 };
    // Rows of three warps of pairs leave a quarter of two of the smallest blocks.
    let mut threads = if rows > 64 && 512 < d && d <= 768 { 192 } else { 128 };
    while threads <= 256 {
        let columns = d.div_ceil(4).div_ceil(threads);
        if columns as u64 * rows as u64 <= most as u64 {
            return Some(Geometry::new([columns, rows, 1], [threads, 1, 1]).dependent());
        }
        threads += 64;
    }
    None
}

/// The most rows of [`few_geometry`].
pub const MOST_FEW_ROWS: u32 = 65535;

/// Up to so many results the entries for few rows are faster. Measured on an H200.
const FEW: u64 = 1 << 20;

/// How to launch the entries for few rows, if they are.
fn as_few(aligned: bool, rows: u32, d: u32) -> Option<Geometry> {
    let few = aligned && d > 0 && rows <= MOST_FEW_ROWS && rows as u64 * d as u64 <= FEW;
    if few { few_geometry(rows, d) } else { None }
}

/// The entry with a scale for each row, if there is one for the element type. [`Variant::X2`] is for rows that are not empty.
pub const fn per_token_entry(dtype: DType, variant: Variant) -> Option<Entry<TokenArgs>> {
    pieces::instance(dtype, variant.first())
}

/// How to launch [`per_tensor_entry`] for `rows` rows of `d` results.
pub const fn geometry(dtype: DType, aligned: bool, rows: u32, d: u32) -> Geometry {
    pieces::elementwise(rows, d, dtype, aligned, true).evenly()
}

/// How to launch [`per_group_entry`] for `rows` rows of `d` results.
pub const fn per_group_geometry(dtype: DType, aligned: bool, rows: u32, d: u32) -> Geometry {
    let piece = pieces::piece(dtype, aligned);
    pieces::spread(rows, d.div_ceil(if aligned { 2 * piece } else { piece }), aligned, true).evenly()
}

/// How to launch [`per_token_entry`].
pub const fn per_token_geometry(dtype: DType, variant: Variant, rows: u32, d: u32) -> Geometry {
    let geometry = variant.geometry(dtype, rows, d, true, kernel::SHARED_BYTES);
    if matches!(variant, Variant::X2) { geometry.evenly() } else { geometry }
}

/// The entry with a scale for each row, for devices of compute capability 9.0: a cluster of blocks for each row.
pub const fn per_token_cluster_entry(dtype: DType) -> Option<Entry<TokenArgs>> {
    pieces::instance(dtype, 12)
}

/// How to launch [`per_token_cluster_entry`]; `None` where a row has more pieces than a cluster has threads, or none, and for more clusters than a grid has.
pub const fn per_token_cluster_geometry(dtype: DType, rows: u32, d: u32) -> Option<Geometry> {
    let threads = d.div_ceil(pieces::piece(dtype, true)).div_ceil(kernel::CLUSTER).next_multiple_of(32);
    if threads > kernel::CLUSTER_THREADS || rows > i32::MAX as u32 / kernel::CLUSTER || d == 0 {
        return None;
    }
    let geometry = Geometry::linear(rows * kernel::CLUSTER, threads);
    Some(geometry.shared_bytes(kernel::CLUSTER_SHARED_BYTES as u32).cluster(kernel::CLUSTER).dependent())
}

/// The entry with a scale for each row, for short rows, aligned.
pub const fn per_token_short_entry(dtype: DType) -> Option<Entry<TokenArgs>> {
    pieces::instance(dtype, 15)
}

/// How to launch [`per_token_short_entry`]; `None` where a row has more pieces than a block has threads, or none.
pub const fn per_token_short_geometry(dtype: DType, rows: u32, d: u32) -> Option<Geometry> {
    let threads = d.div_ceil(pieces::piece(dtype, true)).next_multiple_of(32);
    if threads > kernel::SHORT_THREADS || d == 0 {
        return None;
    }
    Some(Geometry::linear(rows, threads).shared_bytes(kernel::SHARED_BYTES as u32).dependent().evenly())
}

/// The entry with a scale for each row, for rows that have a [`per_token_narrow_geometry`]. The results are the same bits.
pub const fn per_token_narrow_entry(dtype: DType) -> Option<Entry<TokenArgs>> {
    pieces::instance(dtype, 18)
}

/// How to launch [`per_token_narrow_entry`], where it serves: short rows of up to four warps, so many that several of them share a block.
pub const fn per_token_narrow_geometry(dtype: DType, rows: u32, d: u32) -> Option<Geometry> {
    let threads = d.div_ceil(pieces::piece(dtype, true)).next_multiple_of(32);
    // A block for each multiprocessor, if that will do; otherwise so few that their start takes no longer than the rest. Measured on an H200.
    let y = match (threads, rows) {
        (32..=128, 0..=64) => 1,
        (32, 2048..) => 8,
        (32 | 64, 265..=528 | 2048..) => 4,
        (32 | 64, _) | (96, 133..) | (128, 133..=264 | 2048..) => 2,
        _ => 1,
    };
    if y == 1 {
        return None;
    }
    let geometry = Geometry::new([rows.div_ceil(y), 1, 1], [threads, y, 1]).shared_bytes(kernel::SHARED_BYTES as u32);
    Some(geometry.dependent().evenly())
}

/// The entry with a scale for each row, for rows that [`Variant::X4`] holds, with half as many pieces a thread. The results are the same bits.
pub const fn per_token_wide_entry(dtype: DType) -> Option<Entry<TokenArgs>> {
    pieces::instance(dtype, 21)
}

/// How to launch [`per_token_wide_entry`] for at most [`MOST_WIDE`] rows.
pub const fn per_token_wide_geometry(dtype: DType, rows: u32, d: u32) -> Geometry {
    let threads = d.div_ceil(2 * pieces::piece(dtype, true)).next_multiple_of(32);
    Geometry::linear(rows, threads).shared_bytes(kernel::SHARED_BYTES as u32).dependent().evenly()
}

/// The most rows of [`per_token_wide_entry`], two for each multiprocessor: more of them wait for room. Measured on an H200.
pub const MOST_WIDE: u32 = 264;

/// The entry with a scale for each row, for rows of [`Variant::Any`] that have a [`per_token_any_x4_geometry`]. The results are the same bits.
pub const fn per_token_any_x4_entry(dtype: DType) -> Option<Entry<TokenArgs>> {
    pieces::instance(dtype, 24)
}

/// How to launch [`per_token_any_x4_entry`]; `None` where a row has more elements than a block holds, 16 a thread: f32, of which gates and ups take two
/// registers each, leaves them for 512 threads, others for 1024.
pub const fn per_token_any_x4_geometry(dtype: DType, rows: u32, d: u32) -> Option<Geometry> {
    let most = if matches!(dtype, DType::F32) { 512 } else { 1024 };
    if d > 16 * most {
        return None;
    }
    Some(per_token_geometry(dtype, Variant::Any, rows, d))
}

/// How to launch [`per_token_entry`] of [`Variant::X4`] for rows that [`Variant`] has beyond it; `None` where it cannot hold them: beyond 64 KiB.
pub const fn per_token_long_geometry(dtype: DType, rows: u32, d: u32) -> Option<Geometry> {
    let threads = d.div_ceil(4 * pieces::piece(dtype, true)).next_multiple_of(32);
    if threads > 1024 || threads == 0 {
        return None;
    }
    Some(Geometry::linear(rows, threads).shared_bytes(kernel::SHARED_BYTES as u32).dependent())
}

/// Rows that are worth a cluster each: beyond, blocks wait for each other. Measured on an H200, as what follows.
const MOST_CLUSTERS: u32 = 64;
/// The same of rows that a block can hold with a piece a thread.
const MOST_SHORT_CLUSTERS: u32 = 32;
/// Up to so many pieces a row is not worth a cluster.
const SHORTEST_CLUSTER: u32 = 256;

fn places(
    dtype: DType,
    gate: *const c_void,
    up: *const c_void,
    in_stride: usize,
    out: *const E4M3,
    out_stride: usize,
) -> [Place; 3] {
    [(gate, in_stride, dtype.size()), (up, 0, dtype.size()), (out.cast(), out_stride, 1)]
}

/// Launches on raw pointers (layer L1): inputs and output as for [`gated::launch`](super::gated::launch); `scale` is one
/// f32 in device memory.
///
/// # Errors
/// As for [`gated::launch`](super::gated::launch).
///
/// # Safety
/// As for [`gated::launch`](super::gated::launch).
pub unsafe fn launch_per_tensor(stream: &Stream, dtype: DType, args: &TensorArgs) -> Result<()> {
    let places = places(dtype, args.gate, args.up, args.in_stride, args.out, args.out_stride);
    let aligned = pieces::aligned(dtype, args.d, &places);
    let few = per_tensor_few_entry(dtype).and_then(|_| as_few(aligned, args.rows, args.d));
    let (entry, geometry) = match few {
        Some(geometry) => (per_tensor_few_entry(dtype), geometry),
        None => (per_tensor_entry(dtype, aligned), geometry(dtype, aligned, args.rows, args.d)),
    };
    // SAFETY: forwarded to the caller; the entry fits the alignment.
    unsafe { pieces::launch(stream, PER_TENSOR, dtype, entry, &geometry, args) }
}

/// Launches on raw pointers (layer L1): inputs and output as for [`gated::launch`](super::gated::launch); `scales` is
/// `[rows, ceil(d / 128)]` with the distances in `args`.
///
/// # Errors
/// As for [`gated::launch`](super::gated::launch).
///
/// # Safety
/// As for [`gated::launch`](super::gated::launch).
pub unsafe fn launch_per_group(stream: &Stream, dtype: DType, args: &GroupArgs) -> Result<()> {
    let places = places(dtype, args.gate, args.up, args.in_stride, args.out, args.out_stride);
    let aligned = pieces::aligned(dtype, args.d, &places);
    let few = per_group_few_entry(dtype).and_then(|_| as_few(aligned, args.rows, args.d));
    let one = per_group_one_entry(dtype).filter(|_| aligned && is_for_one(args.rows, args.d));
    let (entry, geometry) = match (few, one) {
        (Some(geometry), _) => (per_group_few_entry(dtype), geometry),
        // As with a given scale.
        (_, Some(_)) => (one, geometry(dtype, aligned, args.rows, args.d)),
        _ => (per_group_entry(dtype, aligned), per_group_geometry(dtype, aligned, args.rows, args.d)),
    };
    // SAFETY: forwarded to the caller; the entry fits the alignment.
    unsafe { pieces::launch(stream, PER_GROUP, dtype, entry, &geometry, args) }
}

/// Launches on raw pointers (layer L1): inputs and output as for [`gated::launch`](super::gated::launch); `scales` is `[rows]`.
///
/// # Errors
/// As for [`gated::launch`](super::gated::launch).
///
/// # Safety
/// As for [`gated::launch`](super::gated::launch).
pub unsafe fn launch_per_token(stream: &Stream, dtype: DType, args: &TokenArgs) -> Result<()> {
    let rows = args.rows;
    let places = places(dtype, args.gate, args.up, args.in_stride, args.out, args.out_stride);
    let aligned = pieces::aligned(dtype, args.d, &places);
    // Rows without elements have scales all the same.
    let variant = Variant::new(dtype, args.d, aligned && args.d > 0);
    let short = if aligned { per_token_short_geometry(dtype, rows, args.d) } else { None };
    let most = if short.is_some() { MOST_SHORT_CLUSTERS } else { MOST_CLUSTERS };
    let clusters = aligned
        && args.d > SHORTEST_CLUSTER * pieces::piece(dtype, true)
        && rows <= most
        && stream.device().properties().compute_capability == (9, 0);
    let cluster = if clusters { per_token_cluster_geometry(dtype, rows, args.d) } else { None };
    let narrow = short.and_then(|_| per_token_narrow_geometry(dtype, rows, args.d));
    let held = match variant {
        Variant::Loop => per_token_long_geometry(dtype, rows, args.d).map(|geometry| (Variant::X4, geometry)),
        Variant::Any => per_token_any_x4_geometry(dtype, rows, args.d).map(|geometry| (Variant::Any, geometry)),
        _ => None,
    };
    let (entry, geometry) = match (cluster, narrow, short) {
        (Some(geometry), ..) => (per_token_cluster_entry(dtype), geometry),
        (_, Some(geometry), _) => (per_token_narrow_entry(dtype), geometry),
        (.., Some(geometry)) => (per_token_short_entry(dtype), geometry),
        _ if variant == Variant::X4 && rows <= MOST_WIDE => {
            (per_token_wide_entry(dtype), per_token_wide_geometry(dtype, rows, args.d))
        }
        _ if let Some((held, geometry)) = held => match held {
            Variant::Any => (per_token_any_x4_entry(dtype), geometry),
            _ => (per_token_entry(dtype, held), geometry),
        },
        _ => (per_token_entry(dtype, variant), per_token_geometry(dtype, variant, rows, args.d)),
    };
    // SAFETY: forwarded to the caller; the entry fits the alignment.
    unsafe { pieces::launch(stream, PER_TOKEN, dtype, entry, &geometry, args) }
}

/// `out = e4m3(silu(gate) up / scale)` with the given `scale`, a tensor of one element.
///
/// # Errors
/// [`DType`](crate::Error::DType) for 8-bit inputs, [`Shape`](crate::Error::Shape), [`Stride`](crate::Error::Stride), [`Overlap`](crate::Error::Overlap),
/// [`WrongDevice`](crate::Error::WrongDevice); [`Value`](crate::Error::Value) for more than 2^31 - 1 rows or columns.
pub fn silu_and_mul_e4m3_per_tensor<T: Float>(
    stream: &Stream,
    out: &mut Tensor<E4M3>,
    x: &Tensor<T>,
    scale: &Tensor<f32>,
) -> Result<()> {
    let mut call = Call::new(PER_TENSOR, stream);
    call.float("x", T::DTYPE)?;
    let (to, from) = (call.rows("out", out)?, call.rows("x", x)?);
    call.same_shape("x", x.shape(), &doubled(out.shape()))?;
    if scale.len() != 1 {
        return Err(call.bad_shape("scale", scale.shape(), "[1]"));
    }
    let (gate, out, scale) = (call.read("x", x)?, call.write("out", out)?, call.read("scale", scale)?);
    call.check_overlap()?;
    let args = TensorArgs {
        gate,
        up: gate.cast::<T>().wrapping_add(to.width).cast(),
        out: out.cast(),
        scale: scale.cast(),
        rows: call.count("out", to.rows)?,
        d: call.count("out", to.width)?,
        in_stride: from.stride,
        out_stride: to.stride,
    };
    // SAFETY: shapes, device and overlap were checked above, and tensors are aligned to their elements.
    unsafe { launch_per_tensor(stream, T::DTYPE, &args) }
}

/// `out = e4m3(silu(gate) up / scale)` with a scale for each row, which goes to `scales`: `[rows]`, dense, where `rows` is
/// the product of all dimensions of `x` but the last.
///
/// # Errors
/// [`DType`](crate::Error::DType) for 8-bit inputs, [`Shape`](crate::Error::Shape), [`Stride`](crate::Error::Stride), [`Overlap`](crate::Error::Overlap),
/// [`WrongDevice`](crate::Error::WrongDevice); [`Value`](crate::Error::Value) for more than 2^31 - 1 rows or columns.
pub fn silu_and_mul_e4m3_per_token<T: Float>(
    stream: &Stream,
    out: &mut Tensor<E4M3>,
    scales: &mut Tensor<f32>,
    x: &Tensor<T>,
) -> Result<()> {
    let mut call = Call::new(PER_TOKEN, stream);
    call.float("x", T::DTYPE)?;
    let (to, from) = (call.rows("out", out)?, call.rows("x", x)?);
    call.same_shape("x", x.shape(), &doubled(out.shape()))?;
    call.same_shape("scales", scales.shape(), &[to.rows])?;
    call.contiguous("scales", scales)?;
    let (gate, out, scales) = (call.read("x", x)?, call.write("out", out)?, call.write("scales", scales)?);
    call.check_overlap()?;
    let args = TokenArgs {
        gate,
        up: gate.cast::<T>().wrapping_add(to.width).cast(),
        out: out.cast(),
        scales: scales.cast(),
        rows: call.count("out", to.rows)?,
        d: call.count("out", to.width)?,
        in_stride: from.stride,
        out_stride: to.stride,
    };
    // SAFETY: shapes, device and overlap were checked above, and tensors are aligned to their elements.
    unsafe { launch_per_token(stream, T::DTYPE, &args) }
}

/// `out = e4m3(silu(gate) up / scale)` with a scale for each row and each group of 128 columns, which goes to `scales`:
/// `[rows, ceil(d / 128)]`, with any strides. The last group may be narrower.
///
/// # Errors
/// [`DType`](crate::Error::DType) for 8-bit inputs, [`Shape`](crate::Error::Shape), [`Stride`](crate::Error::Stride), [`Overlap`](crate::Error::Overlap),
/// [`WrongDevice`](crate::Error::WrongDevice); [`Value`](crate::Error::Value) for more than 2^31 - 1 rows or columns.
pub fn silu_and_mul_e4m3_per_group<T: Float>(
    stream: &Stream,
    out: &mut Tensor<E4M3>,
    scales: &mut Tensor<f32>,
    x: &Tensor<T>,
) -> Result<()> {
    let mut call = Call::new(PER_GROUP, stream);
    call.float("x", T::DTYPE)?;
    let (to, from) = (call.rows("out", out)?, call.rows("x", x)?);
    call.same_shape("x", x.shape(), &doubled(out.shape()))?;
    let (scale_row_stride, scale_group_stride) = pieces::scale_strides(&call, scales, to.rows, to.width)?;
    let (gate, out, scales) = (call.read("x", x)?, call.write("out", out)?, call.write("scales", scales)?);
    call.check_overlap()?;
    let args = GroupArgs {
        gate,
        up: gate.cast::<T>().wrapping_add(to.width).cast(),
        out: out.cast(),
        scales: scales.cast(),
        rows: call.count("out", to.rows)?,
        d: call.count("out", to.width)?,
        in_stride: from.stride,
        out_stride: to.stride,
        scale_row_stride,
        scale_group_stride,
    };
    // SAFETY: shapes, device and overlap were checked above, and tensors are aligned to their elements.
    unsafe { launch_per_group(stream, T::DTYPE, &args) }
}
