//! Linear layers of 8-bit numbers: `y = epilogue(x · wᵀ + bias)` with e4m3 or int8 tokens and weights and their scales.
//!
//! What a tensor stands for is `element · scale`. Scales are
//!
//! * of rows: one for each row of `x` (dynamic, per token) and each row of `w` (per channel), or one for either tensor. They multiply
//!   finished sums.
//! * of blocks: one for each row and 128 columns of `x` and one for each 128 × 128 block of `w` (DeepSeek-AI, *DeepSeek-V3 Technical
//!   Report*, 2024, section 3.3). They multiply sums of 128 products, which are then added up in f32.
//!
//! [`quantise`](super::quantise) makes both, as do the quantising norms and activations.

use super::linear::{Epilogue, misfit, tile_size};
use super::linear_quant_few;
use super::linear_quant_wgmma::{self, LinearQuantTile};
use crate::check::Call;
use crate::device::{Device, Geometry, Stream};
use crate::error::{Error, Result};
use crate::kernels::gemm::linear_quant_tile as kernel;
use crate::kernels::row::GROUP;
use crate::tensor::Tensor;
use cuda_std::{DType, Element, Entry, Float};

pub use kernel::Args;

const OP: &str = "linear_quant";

/// An 8-bit tensor and the scales of its elements.
#[derive(Debug)]
#[non_exhaustive]
#[must_use]
pub struct Quantised<'a, Q: Element> {
    /// e4m3 or int8.
    pub values: &'a Tensor<Q>,
    /// See [`linear_quant`].
    pub scales: &'a Tensor<f32>,
}

impl<Q: Element> Clone for Quantised<'_, Q> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<Q: Element> Copy for Quantised<'_, Q> {}

impl<'a, Q: Element> Quantised<'a, Q> {
    /// `values · scales`.
    pub const fn new(values: &'a Tensor<Q>, scales: &'a Tensor<f32>) -> Self {
        Self { values, scales }
    }
}

/// The kernels of a linear layer of 8-bit numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum LinearQuantPath {
    /// By the number of tokens, element types, alignment and device.
    #[default]
    Auto,
    /// Tiles on the tensor cores of sm_80 and later: takes everything.
    Tile,
    /// Hopper's tensor cores and copy engine (sm_90a): e4m3, or int8 with scales of rows, results of f16 or bf16, rows that begin at multiples of 16 bytes, rows of the
    /// output that end there as well. With scales of rows, sums of e4m3 have the tensor cores' precision over all of K: they drop what is below
    /// some 2⁻¹³ of the largest of what they add at a time.
    Wgmma,
    /// Weights streamed through Hopper's tensor cores by the copy engine (sm_90a): at most [`linear_quant_few::TOKENS`] tokens, otherwise what
    /// [`Wgmma`](Self::Wgmma) takes, with the same precision.
    Few,
}

/// Options of [`linear_quant`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
#[must_use]
pub struct LinearQuantOptions {
    /// What happens to each element before it is stored.
    pub epilogue: Epilogue,
    /// Which kernel.
    pub path: LinearQuantPath,
    /// Which tile, where the path is [`LinearQuantPath::Wgmma`]; `None` chooses by shape.
    pub tile: Option<LinearQuantTile>,
}

impl LinearQuantOptions {
    /// With this epilogue.
    pub const fn epilogue(mut self, epilogue: Epilogue) -> Self {
        self.epilogue = epilogue;
        self
    }

    /// With this kernel.
    pub const fn path(mut self, path: LinearQuantPath) -> Self {
        self.path = path;
        self
    }

    /// With [`LinearQuantPath::Wgmma`] and this tile.
    pub const fn tile(mut self, tile: LinearQuantTile) -> Self {
        self.path = LinearQuantPath::Wgmma;
        self.tile = Some(tile);
        self
    }
}

/// The entry of [`LinearQuantPath::Tile`] for operands and results of these types and tiles of [`tile_size`], if there is one.
pub const fn tile_entry(operands: DType, results: DType, tile: u32) -> Option<Entry<Args>> {
    use kernel::*;
    let (large, small) = match (operands, results) {
        (DType::E4m3, DType::F32) => (linear_quant_tile_e4m3_f32::ENTRY, linear_quant_tile64_e4m3_f32::ENTRY),
        (DType::E4m3, DType::F16) => (linear_quant_tile_e4m3_f16::ENTRY, linear_quant_tile64_e4m3_f16::ENTRY),
        (DType::E4m3, DType::Bf16) => (linear_quant_tile_e4m3_bf16::ENTRY, linear_quant_tile64_e4m3_bf16::ENTRY),
        (DType::I8, DType::F32) => (linear_quant_tile_i8_f32::ENTRY, linear_quant_tile64_i8_f32::ENTRY),
        (DType::I8, DType::F16) => (linear_quant_tile_i8_f16::ENTRY, linear_quant_tile64_i8_f16::ENTRY),
        (DType::I8, DType::Bf16) => (linear_quant_tile_i8_bf16::ENTRY, linear_quant_tile64_i8_bf16::ENTRY),
        _ => return None,
    };
    match tile {
        128 => Some(large),
        64 => Some(small),
        _ => None,
    }
}

/// How to launch [`LinearQuantPath::Tile`] with tiles of [`tile_size`].
pub const fn tile_geometry(m: u32, n: u32, tile: u32) -> Geometry {
    let side = if tile == 64 { 64 } else { 128 };
    Geometry::linear(m.div_ceil(side).saturating_mul(n.div_ceil(side)), kernel::THREADS as u32)
        .dependent()
        .shared_bytes(kernel::shared_bytes(side as usize) as u32)
}

/// The path that [`launch`] and [`linear_quant`](fn@linear_quant) take on a device for operands and results of these types: never [`LinearQuantPath::Auto`]. Reads
/// addresses, strides and extents, nothing behind them.
///
/// [`LinearQuantPath::Auto`] is [`LinearQuantPath::Few`] or, for more than [`linear_quant_few::TOKENS`] tokens, [`LinearQuantPath::Wgmma`] where those take the types and the
/// device, `k` is above 0, and rows of `x`, `w` and `y` begin at multiples of 16 bytes, those of `y` ending there as well; otherwise [`LinearQuantPath::Tile`].
///
/// # Errors
/// [`Error::Alignment`] and [`Error::Unsupported`] if `path` names a path that does not take these. Whether
/// it has a kernel for so many tokens is seen at the launch.
pub fn path_of(
    device: &Device,
    operands: DType,
    results: DType,
    path: LinearQuantPath,
    args: &Args,
) -> Result<LinearQuantPath> {
    if path == LinearQuantPath::Tile {
        return Ok(path);
    }
    let unfit = linear_quant_wgmma::misaligned(args, results.size());
    let supported = linear_quant_wgmma::supports(device, operands, results, args.blocks != 0) && args.k > 0;
    match (path, unfit) {
        (LinearQuantPath::Auto, None) if supported => {
            Ok(if args.m <= linear_quant_few::TOKENS { LinearQuantPath::Few } else { LinearQuantPath::Wgmma })
        }
        (LinearQuantPath::Auto, _) => Ok(LinearQuantPath::Tile),
        _ if !supported => {
            let (k, name) = (args.k, device.name());
            let what = format!(
                "the path {path:?} takes e4m3, or int8 with scales of rows, of a depth above 0, and results of 16 bits, on a Hopper GPU; here is {operands}, {k} deep, and results of {results}, on \
                 {name}; use LinearQuantPath::Auto"
            );
            Err(Error::Unsupported { op: OP, what })
        }
        (_, Some((arg, address))) => Err(misfit(
            OP,
            format!("{path:?}"),
            arg,
            address,
            [args.x.cast(), args.w.cast(), args.y.cast_const().cast::<u8>()],
            arg == "out",
        )),
        _ => Ok(path),
    }
}

/// Launches on raw pointers (layer L1): operands of type `operands`, results of type `results`, by the path that [`path_of`] gives.
///
/// `args` are as [`linear_quant_tile`](kernel::linear_quant_tile) documents; `aligned` is set here.
///
/// # Errors
/// Those of [`path_of`], [`Error::Unsupported`] for element types or a shape that the path does not take, and those of [`Stream::launch`].
///
/// # Safety
/// The pointers are device memory of the documented sizes, aligned to their element types, until the launch is done; `y` overlaps no other.
/// (Of int8 `k` is below 2^17, or sums in 32 bits wrap around.)
pub unsafe fn launch(
    stream: &Stream,
    operands: DType,
    results: DType,
    path: LinearQuantPath,
    args: &Args,
) -> Result<()> {
    if args.m == 0 || args.n == 0 {
        return Ok(());
    }
    let path = path_of(stream.device(), operands, results, path, args)?;
    let unsupported = || Error::Unsupported {
        op: OP,
        what: format!("the path {path:?} has no kernel for {operands} and results of {results}"),
    };
    match path {
        LinearQuantPath::Wgmma => {
            let multiprocessors = stream.device().properties().multiprocessors;
            let tile = LinearQuantTile::choose(args.m, args.n, args.k, args.blocks != 0, multiprocessors);
            // SAFETY: forwarded to the caller.
            unsafe { linear_quant_wgmma::launch(stream, operands, results, tile, args) }
        }
        // SAFETY: forwarded to the caller.
        LinearQuantPath::Few => unsafe { linear_quant_few::launch(stream, operands, results, args) },
        LinearQuantPath::Auto | LinearQuantPath::Tile => {
            let tile = tile_size(args.m, args.n, stream.device().properties().multiprocessors);
            let entry = tile_entry(operands, results, tile).ok_or_else(unsupported)?;
            let begins = |address: usize, rows: u32, stride: usize| {
                address.is_multiple_of(16) && (rows == 1 || stride.is_multiple_of(16))
            };
            let aligned = begins(args.x as usize, args.m, args.x_row) && begins(args.w as usize, args.n, args.w_row);
            let args = Args { aligned: aligned as u32, ..*args };
            // SAFETY: forwarded to the caller.
            unsafe { stream.launch(&entry, &tile_geometry(args.m, args.n, tile), &args) }
        }
    }
}

/// Distances between scales: from row to row, and from group to group.
type Strides = (usize, usize);

/// The strides of both operands' scales, and whether they are of blocks.
fn scale_strides<Q: Element>(
    call: &Call<'_>,
    x: Quantised<'_, Q>,
    w: Quantised<'_, Q>,
    m: usize,
    [n, k]: [usize; 2],
) -> Result<(Strides, Strides, bool)> {
    let groups = k.div_ceil(GROUP);
    let one = |arg: &'static str, scales: &Tensor<f32>, rows: usize| match *scales.shape() {
        [1] => Ok((0, 0)),
        [all] if all == rows => Ok((scales.strides()[0], 0)),
        ref shape => Err(call.bad_shape(arg, shape, format!("[1] or [{rows}]"))),
    };
    if x.scales.shape().len() == 2 {
        call.same_shape("x.scales", x.scales.shape(), &[m, groups])?;
        call.same_shape("w.scales", w.scales.shape(), &[n.div_ceil(GROUP), groups])?;
        let strides = |t: &Tensor<f32>| (t.strides()[0], t.strides()[1]);
        return Ok((strides(x.scales), strides(w.scales), true));
    }
    Ok((one("x.scales", x.scales, m)?, one("w.scales", w.scales, n)?, false))
}

/// Sums of `k` products of int8, of up to 2^14 each, fit 32 bits.
pub(crate) fn check_depth(call: &Call<'_>, dtype: DType, arg: &'static str, k: usize) -> Result<()> {
    call.value(dtype != DType::I8 || k < 1 << 17, arg, "fewer than 2^17 columns of int8, whose sums have 32 bits", k)
}

/// `out = epilogue(x · wᵀ + bias)` of e4m3 or int8 tensors.
///
/// `x` is `[.., k]`, `w` `[n, k]`, `bias` `[n]`, `out` `[.., n]` with the leading dimensions of `x`, whose product is `rows`; each dense in its
/// last dimension, rows at any one distance. Scales, of any strides:
///
/// | | of rows | of blocks |
/// | --- | --- | --- |
/// | `x.scales` | `[rows]` or `[1]` | `[rows, ceil(k / 128)]` |
/// | `w.scales` | `[n]` or `[1]` | `[ceil(n / 128), ceil(k / 128)]` |
///
/// Sums are in f32 (of int8: exact, but between blocks; without blocks they fit 32 bits for `k` below 2^17, and more is an error), in an order that depends on `k`, the path and how a tile splits K only (for [`LinearQuantPath::Few`]: on `k`, `n`, and whether there are more than 32 tokens); one rounding
/// at the end. Element types: e4m3 or int8 for both operands; f32, f16 or bf16 for results.
///
/// # Errors
/// [`Shape`](Error::Shape), [`Stride`](Error::Stride), [`DType`](Error::DType), [`Overlap`](Error::Overlap),
/// [`WrongDevice`](Error::WrongDevice), [`Value`](Error::Value); [`Alignment`](Error::Alignment) or [`Unsupported`](Error::Unsupported) if
/// `options.path` asks for a kernel that does not take these tensors.
///
/// ```
/// use warploom::gemm::{self, Quantised};
/// use warploom::{Device, Stream, Tensor};
/// let device = Device::simt();
/// let stream = Stream::new(&device)?;
/// let x = Tensor::from_slice(&device, &[1i8, 2, 3, 4], &[2, 2])?;
/// let x_scales = Tensor::from_slice(&device, &[0.5f32, 1.0], &[2])?;
/// let w = Tensor::from_slice(&device, &[10i8, 0, 5, 5], &[2, 2])?;
/// let w_scales = Tensor::from_slice(&device, &[1.0f32, 2.0], &[2])?;
/// let mut y = Tensor::<f32>::zeros(&device, &[2, 2])?;
/// let (x, w) = (Quantised::new(&x, &x_scales), Quantised::new(&w, &w_scales));
/// gemm::linear_quant(&stream, &mut y, x, w, None, &Default::default())?;
/// assert_eq!(y.to_vec()?, [5.0, 15.0, 30.0, 70.0]);
/// # Ok::<(), warploom::Error>(())
/// ```
pub fn linear_quant<Y: Float, Q: Element>(
    stream: &Stream,
    out: &mut Tensor<Y>,
    x: Quantised<'_, Q>,
    w: Quantised<'_, Q>,
    bias: Option<&Tensor<Y>>,
    options: &LinearQuantOptions,
) -> Result<()> {
    let mut call = Call::new(OP, stream);
    call.dtype_among("x", Q::DTYPE, &[DType::E4m3, DType::I8])?;
    call.float("out", Y::DTYPE)?;
    let [n, k] = *w.values.shape() else {
        return Err(call.bad_shape("w", w.values.shape(), "[n, k]"));
    };
    let xs = call.rows("x", x.values)?;
    if xs.width != k {
        return Err(call.bad_shape("x", x.values.shape(), format!("[.., {k}]")));
    }
    let mut expected = x.values.shape().to_vec();
    *expected.last_mut().expect("`rows` saw a dimension") = n;
    call.same_shape("out", out.shape(), &expected)?;
    let (ys, ws) = (call.rows("out", out)?, call.rows("w", w.values)?);
    if let Some(bias) = bias {
        call.same_shape("bias", bias.shape(), &[n])?;
        call.contiguous("bias", bias)?;
    }
    let (x_strides, w_strides, blocks) = scale_strides(&call, x, w, xs.rows, [n, k])?;
    if !blocks {
        check_depth(&call, Q::DTYPE, "w", k)?;
    }
    let args = Args {
        y: call.write("out", out)?,
        x: call.read("x", x.values)?,
        w: call.read("w", w.values)?,
        bias: call.read_opt("bias", bias)?,
        x_scales: call.read("x.scales", x.scales)?.cast(),
        x_scale_row: x_strides.0,
        x_scale_group: x_strides.1,
        w_scales: call.read("w.scales", w.scales)?.cast(),
        w_scale_row: w_strides.0,
        w_scale_group: w_strides.1,
        m: call.count("x", xs.rows)?,
        n: call.count("w", n)?,
        k: call.count("w", k)?,
        y_row: ys.stride,
        x_row: xs.stride,
        w_row: ws.stride,
        kind: options.epilogue.kind(),
        blocks: blocks as u32,
        aligned: 0,
    };
    call.check_overlap()?;
    if args.m == 0 || args.n == 0 {
        return Ok(());
    }
    let path = path_of(stream.device(), Q::DTYPE, Y::DTYPE, options.path, &args)?;
    if let (LinearQuantPath::Wgmma, Some(tile)) = (path, options.tile) {
        // SAFETY: shapes, device, overlap and alignment were checked above, and that there is a depth.
        return unsafe { linear_quant_wgmma::launch(stream, Q::DTYPE, Y::DTYPE, tile, &args) };
    }
    // SAFETY: shapes, device and overlap were checked above, and tensors are aligned to their elements.
    unsafe { launch(stream, Q::DTYPE, Y::DTYPE, path, &args) }
}
