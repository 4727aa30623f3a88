//! Operands of [`linear_quant`](super::linear_quant()): activations on the way, weights ahead of time.
//!
//! A result is `x` times the reciprocal of the scale (good to a few units in its last place), rounded to the nearest e4m3 number or integer
//! (ties to even). A scale is the largest magnitude that it
//! covers, at least 10⁻¹⁰, divided by the largest number of the format: 448 or 127. NaN has no say in a scale and becomes NaN, or 0 in
//! int8; an infinity makes its scale infinite. The quantising norms and activations do the same.

use crate::check::Call;
use crate::device::{Device, Geometry, Stream};
use crate::error::Result;
use crate::kernels::gemm::quantise as kernel;
use crate::kernels::row::GROUP;
use crate::kernels::row::team::SPREAD;
use crate::pieces::{self, Held, Variant};
use crate::tensor::Tensor;
use cuda_std::{DType, E4M3, Element, Entry, Float};
use std::ffi::c_void;

pub use kernel::e4m3::blocks::Args as E4m3BlockArgs;
pub use kernel::e4m3::groups::Args as E4m3GroupArgs;
pub use kernel::e4m3::rows::Args as E4m3RowArgs;
pub use kernel::int8::blocks::Args as I8BlockArgs;
pub use kernel::int8::groups::Args as I8GroupArgs;
pub use kernel::int8::rows::Args as I8RowArgs;

const ROWS: &str = "quantise_rows";
const GROUPS: &str = "quantise_groups";
const BLOCKS: &str = "quantise_blocks";
/// From so many results on, two pieces a thread are faster. Measured on an H200.
const MANY: u64 = 1 << 19;
/// From so many elements on, four pieces a thread are faster where each row has a scale. Measured on an H200.
const MANY_IN_ROWS: u64 = 3 << 19;
/// The least pieces of 16 bytes of a row, and the most rows, for a cluster of blocks for each. Measured in bf16 on an H200, 1 to 48 rows: 8192 columns take 7 to 17 % less, 14336 18 to 36, 28672, which a block of
/// its own read twice then, 48 to 71 and with 64 rows 44; 7168 4 to 14, which stay as they are, since on an H100 clusters take longer.
const LEAST_CLUSTER_PIECES: u32 = 1024;
/// See there.
const MOST_CLUSTER_ROWS: u32 = 48;
/// As many of rows of more than [`LEAST_LONG_PIECES`]: 64 and 80 rows of 18432 to 32768 columns take 22 to 25 % less, 96 as long as in blocks of their own (28672) or 21 % less (18432), 132 7 to 13 % more.
const MOST_LONG_CLUSTER_ROWS: u32 = 80;
/// See there: what four pieces a thread do not hold.
const LEAST_LONG_PIECES: u32 = 2048;
/// From so many rows on that four pieces a thread make a warp each, so many of them share a block.
const SHARED_FROM: u32 = 512;
/// See [`SHARED_FROM`].
const TOGETHER: u32 = 4;

mod sealed {
    pub trait Sealed {}
    impl Sealed for cuda_std::E4M3 {}
    impl Sealed for i8 {}
}

/// What numbers are quantised to: [`E4M3`] or `i8`.
pub trait QuantisedElement: Element + sealed::Sealed {
    #[doc(hidden)]
    unsafe fn launch_rows(stream: &Stream, dtype: DType, rows: u32, args: &E4m3RowArgs) -> Result<()>;
    #[doc(hidden)]
    unsafe fn launch_groups(stream: &Stream, dtype: DType, args: &E4m3GroupArgs) -> Result<()>;
    #[doc(hidden)]
    unsafe fn launch_blocks(stream: &Stream, dtype: DType, matrices: u32, args: &E4m3BlockArgs) -> Result<()>;
}

/// How to launch [`quantise_blocks`] for matrices of `rows` rows of `n` elements.
pub const fn block_geometry(matrices: u32, rows: u32, n: u32) -> Geometry {
    let group = GROUP as u32;
    Geometry::new([n.div_ceil(group), rows.div_ceil(group), matrices], [kernel::BLOCK_THREADS as u32, 1, 1])
        .dependent()
        .shared_bytes(kernel::SHARED_BYTES as u32)
}

/// Which instance serves few long rows better on a device with clusters, and how to launch it: one multiprocessor takes longer to read such a row than blocks of a cluster take to tell each other their
/// largest magnitudes.
fn row_cluster(device: &Device, dtype: DType, rows: u32, n: u32) -> Option<(usize, Geometry)> {
    let pieces = n.div_ceil(pieces::piece(dtype, true));
    let hopper = device.properties().compute_capability == (9, 0);
    let most_rows = if pieces > LEAST_LONG_PIECES { MOST_LONG_CLUSTER_ROWS } else { MOST_CLUSTER_ROWS };
    if !hopper || pieces < LEAST_CLUSTER_PIECES || rows > most_rows {
        return None;
    }
    let most = SPREAD * kernel::CLUSTER_THREADS;
    let (instance, each) = match pieces {
        _ if pieces <= 2 * most => (12, 2),
        _ if pieces <= 4 * most => (15, 4),
        _ => return None,
    };
    let threads = pieces.div_ceil(each).next_multiple_of(32).div_ceil(SPREAD).next_multiple_of(32);
    let geometry = Geometry::linear(rows * SPREAD, threads).shared_bytes(kernel::CLUSTER_SHARED_BYTES as u32);
    Some((instance, geometry.cluster(SPREAD).dependent()))
}

/// How to launch [`quantise_rows`] for `rows` rows of `n` elements. Many have four pieces a thread, so that more is under way, and share blocks where they are short.
fn row_geometry(dtype: DType, rows: u32, n: u32, aligned: bool) -> (Variant, Geometry) {
    let variant = Variant::new(dtype, n, aligned);
    let held = Variant::X4.geometry(dtype, rows, n, true, kernel::SHARED_BYTES);
    if variant == Variant::X2 && held.block[0] == 32 && rows >= SHARED_FROM && rows.is_multiple_of(TOGETHER) {
        // Warps with rows of their own wait for nobody.
        return (Variant::X4, Geometry { grid: [rows / TOGETHER, 1, 1], block: [32, TOGETHER, 1], ..held });
    }
    if variant == Variant::X2 && rows as u64 * n as u64 >= MANY_IN_ROWS {
        return (Variant::X4, held);
    }
    (variant, variant.geometry(dtype, rows, n, true, kernel::SHARED_BYTES))
}

/// Which instance holds rows of 16 bits that would be read twice, and how to launch it, where blocks can be so large. (Those of f32 have none, and are not counted.)
fn held_rows(dtype: DType, variant: Variant, rows: u32, n: u32) -> Option<(usize, Geometry)> {
    if variant != Variant::Loop || dtype.size() != 2 {
        return None;
    }
    let geometry = Held::new(dtype, variant, n)?.geometry(dtype, rows, n, true, kernel::SHARED_BYTES);
    (geometry.block[0] <= kernel::X8_THREADS).then_some((17, geometry))
}

macro_rules! launches {
    ($($Q:ty: $rows:ident, $RowArgs:ident, $groups:ident, $GroupArgs:ident, $blocks:ident, $BlockArgs:ident,
        |$out:ident| $cast:expr, $name:literal;)*) => { $(
        #[doc = concat!("Launches [`quantise_rows`] to ", $name, " on raw pointers (layer L1), `rows` rows of `dtype`.")]
        ///
        /// # Errors
        /// [`Error::Unsupported`](crate::Error::Unsupported) for an element type without an entry, and those of [`Stream::launch`].
        ///
        /// # Safety
        /// `x` and `out` are `[rows, n]` with the distances in `args`, `smooth` `[n]` or null, `scales` `[rows]`, in device memory until the
        /// launch is done, aligned to their elements; outputs overlap nothing else.
        pub unsafe fn $rows(stream: &Stream, dtype: DType, rows: u32, args: &$RowArgs) -> Result<()> {
            let places = [
                (args.x, args.x_stride, dtype.size()),
                (args.smooth.cast::<c_void>(), 0, 4),
                (args.out.cast_const().cast(), args.out_stride, 1),
            ];
            let aligned = pieces::aligned(dtype, args.n, &places);
            let (variant, usual) = row_geometry(dtype, rows, args.n, aligned);
            let (instance, geometry) = match row_cluster(stream.device(), dtype, rows, args.n) {
                Some(spread) if aligned => spread,
                _ => held_rows(dtype, variant, rows, args.n).unwrap_or((variant.first(), usual)),
            };
            // SAFETY: forwarded to the caller; the entry fits the alignment.
            unsafe { pieces::launch(stream, ROWS, dtype, pieces::instance(dtype, instance), &geometry, args) }
        }

        #[doc = concat!("Launches [`quantise_groups`] to ", $name, " on raw pointers (layer L1).")]
        ///
        /// # Errors
        /// [`Error::Unsupported`](crate::Error::Unsupported) for an element type without an entry, and those of [`Stream::launch`].
        ///
        /// # Safety
        /// `x` and `out` are `[rows, n]`, `scales` `[rows, ceil(n / 128)]`, with the distances in `args`, in device memory until the launch is
        /// done, aligned to their elements; outputs overlap nothing else.
        pub unsafe fn $groups(stream: &Stream, dtype: DType, args: &$GroupArgs) -> Result<()> {
            let places = [(args.x, args.x_stride, dtype.size()), (args.out.cast_const().cast(), args.out_stride, 1)];
            let aligned = pieces::aligned(dtype, args.n, &places);
            let many = aligned && args.rows as u64 * args.n as u64 >= MANY;
            let entry: Option<Entry<$GroupArgs>> = pieces::instance(dtype, if many { 6 } else if aligned { 0 } else { 3 });
            let geometry = if many {
                pieces::spread(args.rows, args.n.div_ceil(2 * pieces::piece(dtype, true)), true, true)
            } else {
                pieces::elementwise(args.rows, args.n, dtype, aligned, true)
            };
            // SAFETY: forwarded to the caller; the entry fits the alignment.
            unsafe { pieces::launch(stream, GROUPS, dtype, entry, &geometry, args) }
        }

        #[doc = concat!("Launches [`quantise_blocks`] to ", $name, " on raw pointers (layer L1).")]
        ///
        /// # Errors
        /// [`Error::Unsupported`](crate::Error::Unsupported) for an element type without an entry, and those of [`Stream::launch`].
        ///
        /// # Safety
        /// `w` and `out` are `[matrices, rows, n]`, `scales` `[matrices, ceil(rows / 128), ceil(n / 128)]`, all dense, in device memory until
        /// the launch is done, aligned to their elements; outputs overlap nothing else.
        pub unsafe fn $blocks(stream: &Stream, dtype: DType, matrices: u32, args: &$BlockArgs) -> Result<()> {
            let geometry = block_geometry(matrices, args.rows, args.n);
            // SAFETY: forwarded to the caller.
            unsafe { pieces::launch(stream, BLOCKS, dtype, pieces::instance(dtype, 0), &geometry, args) }
        }

        impl QuantisedElement for $Q {
            unsafe fn launch_rows(stream: &Stream, dtype: DType, rows: u32, args: &E4m3RowArgs) -> Result<()> {
                let E4m3RowArgs { x, smooth, out: $out, scales, n, x_stride, out_stride } = *args;
                let args = $RowArgs { x, smooth, out: $cast, scales, n, x_stride, out_stride };
                // SAFETY: forwarded to the caller.
                unsafe { $rows(stream, dtype, rows, &args) }
            }
            unsafe fn launch_groups(stream: &Stream, dtype: DType, args: &E4m3GroupArgs) -> Result<()> {
                let E4m3GroupArgs {
                    x, out: $out, scales, rows, n, x_stride, out_stride, scale_row_stride, scale_group_stride,
                } = *args;
                let args = $GroupArgs {
                    x, out: $cast, scales, rows, n, x_stride, out_stride, scale_row_stride, scale_group_stride,
                };
                // SAFETY: forwarded to the caller.
                unsafe { $groups(stream, dtype, &args) }
            }
            unsafe fn launch_blocks(stream: &Stream, dtype: DType, matrices: u32, args: &E4m3BlockArgs) -> Result<()> {
                let E4m3BlockArgs { w, out: $out, scales, rows, n } = *args;
                // SAFETY: forwarded to the caller.
                unsafe { $blocks(stream, dtype, matrices, &$BlockArgs { w, out: $cast, scales, rows, n }) }
            }
        }
    )* };
}
launches! {
    E4M3: launch_e4m3_rows, E4m3RowArgs, launch_e4m3_groups, E4m3GroupArgs, launch_e4m3_blocks, E4m3BlockArgs,
        |out| out, "e4m3";
    i8: launch_i8_rows, I8RowArgs, launch_i8_groups, I8GroupArgs, launch_i8_blocks, I8BlockArgs, |out| out.cast(), "int8";
}

/// `out = x · smooth / scale`, with a scale for each row, which goes to `scales`: tokens with dynamic scales, or weights per channel.
///
/// `x` and `out` are `[.., n]` of the same shape, the rows of each at one distance; `scales` are dense and have the dimensions of `x` but
/// the last, or `[rows]`, their product; `smooth` is `[n]`: pass reciprocals of SmoothQuant's factors (Xiao et al., 2022), and multiply
/// columns of the weights by the factors. Rows without elements have the scale of rows of zeros.
///
/// # Errors
/// [`Shape`](crate::Error::Shape), [`Stride`](crate::Error::Stride), [`DType`](crate::Error::DType) for 8-bit elements,
/// [`Value`](crate::Error::Value) beyond 2^31 - 1 rows or columns, [`Overlap`](crate::Error::Overlap), [`WrongDevice`](crate::Error::WrongDevice).
pub fn quantise_rows<T: Float, Q: QuantisedElement>(
    stream: &Stream,
    out: &mut Tensor<Q>,
    scales: &mut Tensor<f32>,
    x: &Tensor<T>,
    smooth: Option<&Tensor<f32>>,
) -> Result<()> {
    let mut call = Call::new(ROWS, stream);
    call.float("x", T::DTYPE)?;
    let (to, from) = (call.rows("out", out)?, call.rows("x", x)?);
    call.same_shape("out", out.shape(), x.shape())?;
    // As the leading dimensions of `x`, too: so the weights of experts have them.
    if x.shape().split_last().is_none_or(|(_, leading)| scales.shape() != leading) {
        call.same_shape("scales", scales.shape(), &[from.rows])?;
    }
    call.contiguous("scales", scales)?;
    if let Some(smooth) = smooth {
        call.same_shape("smooth", smooth.shape(), &[from.width])?;
        call.contiguous("smooth", smooth)?;
    }
    let args = E4m3RowArgs {
        x: call.read("x", x)?,
        smooth: call.read_opt("smooth", smooth)?.cast(),
        out: call.write("out", out)?.cast(),
        scales: call.write("scales", scales)?.cast(),
        n: call.count("x", from.width)?,
        x_stride: from.stride,
        out_stride: to.stride,
    };
    let rows = call.count("x", from.rows)?;
    call.check_overlap()?;
    // SAFETY: shapes, device and overlap were checked above, and tensors are aligned to their elements.
    unsafe { Q::launch_rows(stream, T::DTYPE, rows, &args) }
}

/// `out = x / scale`, with a scale for each row and each group of 128 columns, which goes to `scales`: `[rows, ceil(n / 128)]`, with any
/// strides. The last group may be narrower. `x` and `out` as for [`quantise_rows`].
///
/// # Errors
/// As for [`quantise_rows`].
pub fn quantise_groups<T: Float, Q: QuantisedElement>(
    stream: &Stream,
    out: &mut Tensor<Q>,
    scales: &mut Tensor<f32>,
    x: &Tensor<T>,
) -> Result<()> {
    let mut call = Call::new(GROUPS, stream);
    call.float("x", T::DTYPE)?;
    let (to, from) = (call.rows("out", out)?, call.rows("x", x)?);
    call.same_shape("out", out.shape(), x.shape())?;
    let (scale_row_stride, scale_group_stride) = pieces::scale_strides(&call, scales, from.rows, from.width)?;
    let args = E4m3GroupArgs {
        x: call.read("x", x)?,
        out: call.write("out", out)?.cast(),
        scales: call.write("scales", scales)?.cast(),
        rows: call.count("x", from.rows)?,
        n: call.count("x", from.width)?,
        x_stride: from.stride,
        out_stride: to.stride,
        scale_row_stride,
        scale_group_stride,
    };
    call.check_overlap()?;
    // SAFETY: shapes, device and overlap were checked above, and tensors are aligned to their elements.
    unsafe { Q::launch_groups(stream, T::DTYPE, &args) }
}

/// `out = w / scale`, with a scale for each block of 128 × 128, the last of a row or column perhaps smaller: weights, ahead of time.
///
/// `w` and `out` are `[.., rows, n]` of the same shape, `scales` `[.., ceil(rows / 128), ceil(n / 128)]`, all contiguous.
///
/// # Errors
/// As for [`quantise_rows`]; [`Value`](crate::Error::Value) for more than 65535 matrices or rows of blocks.
pub fn quantise_blocks<T: Float, Q: QuantisedElement>(
    stream: &Stream,
    out: &mut Tensor<Q>,
    scales: &mut Tensor<f32>,
    w: &Tensor<T>,
) -> Result<()> {
    let mut call = Call::new(BLOCKS, stream);
    call.float("w", T::DTYPE)?;
    let [outer @ .., rows, n] = w.shape() else {
        return Err(call.bad_shape("w", w.shape(), "[.., rows, n]"));
    };
    let matrices = outer.iter().product::<usize>();
    call.same_shape("out", out.shape(), w.shape())?;
    let mut expected = outer.to_vec();
    expected.extend([rows.div_ceil(GROUP), n.div_ceil(GROUP)]);
    call.same_shape("scales", scales.shape(), &expected)?;
    call.contiguous("w", w)?;
    call.contiguous("out", out)?;
    call.contiguous("scales", scales)?;
    for (what, count) in [("matrices", matrices), ("rows of blocks", rows.div_ceil(GROUP))] {
        call.value(count <= 65535, "w", format!("at most 65535 {what}"), count)?;
    }
    let args = E4m3BlockArgs {
        w: call.read("w", w)?,
        out: call.write("out", out)?.cast(),
        scales: call.write("scales", scales)?.cast(),
        rows: call.count("w", *rows)?,
        n: call.count("w", *n)?,
    };
    call.check_overlap()?;
    // SAFETY: shapes, device and overlap were checked above, and tensors are aligned to their elements.
    unsafe { Q::launch_blocks(stream, T::DTYPE, matrices as u32, &args) }
}
