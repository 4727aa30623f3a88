//! Linear layers: `y = epilogue(x · wᵀ + bias)`.
//!
//! One operation, several kernels; [`LinearPath`] says which, and [`LinearPath::Auto`] chooses by shape, element type,
//! alignment and device, never by the contents.

use super::linear_few;
use super::linear_host::linear_host;
use super::linear_wgmma::{self, WgmmaTile};
use crate::check::Call;
use crate::device::{Device, Geometry, Stream};
use crate::error::{Error, Result};
use crate::kernels::gemm::{linear_dot, linear_fma, linear_stream, linear_tile};
use crate::tensor::Tensor;
use cuda_std::{DType, Entry, Float};

/// What happens to each element before it is stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Epilogue {
    /// Nothing.
    #[default]
    None,
    /// `x · sigmoid(x)`.
    Silu,
    /// `x · Φ(x)` with the normal distribution function, not its approximation by tanh.
    Gelu,
    /// GELU's tanh approximation.
    GeluTanh,
    /// `max(x, 0)`; NaN of NaN.
    Relu,
    /// `max(x, 0)²`; NaN of NaN.
    Relu2,
}

impl Epilogue {
    /// The kernels' number for it, an index into [`kernels::gemm::EPILOGUES`](crate::kernels::gemm::EPILOGUES).
    pub const fn kind(self) -> u32 {
        match self {
            Epilogue::None => 0,
            Epilogue::Silu => 1,
            Epilogue::Gelu => 2,
            Epilogue::GeluTanh => 3,
            Epilogue::Relu => 4,
            Epilogue::Relu2 => 5,
        }
    }
}

/// The kernels of a linear layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum LinearPath {
    /// By shape, element type, alignment and device.
    #[default]
    Auto,
    /// Ordinary multiply-adds in f32: takes everything of one type.
    Fma,
    /// Weights streamed through the tensor cores: at most 64 tokens, 16-bit floats, rows of multiples of 16 bytes.
    Stream,
    /// Tiles on the tensor cores of sm_80 and later: 16-bit floats, rows of multiples of 16 bytes. For many tokens.
    Tile,
    /// Hopper's tensor cores and copy engine (sm_90a): 16-bit floats, rows that begin at multiples of 16 bytes, rows of the
    /// output that end there as well. For many tokens, with [`LinearOptions::tile`].
    Wgmma,
    /// Weights streamed through Hopper's tensor cores by the copy engine (sm_90a): at most [`linear_few::TOKENS`] tokens, otherwise what
    /// [`Wgmma`](Self::Wgmma) takes. The order of sums depends on `k`, for more than 32 tokens on `n`, and for more than [`linear_few::ALWAYS`] on their number.
    Few,
    /// A warp for each element: for few columns, such as a router's; also f16 or bf16 times f32 weights.
    Dot,
    /// Plain loops on the CPU, on the SIMT device only: what [`Auto`](Self::Auto) means where
    /// [`SimtOptions::host_products`](crate::SimtOptions::host_products) is on.
    Host,
}

/// Options of [`linear_with`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
#[must_use]
pub struct LinearOptions {
    /// What happens to each element before it is stored.
    pub epilogue: Epilogue,
    /// Which kernel.
    pub path: LinearPath,
    /// Which tile, where the path is [`LinearPath::Wgmma`]; `None` chooses by shape.
    pub tile: Option<WgmmaTile>,
}

impl LinearOptions {
    /// With this epilogue.
    pub const fn epilogue(mut self, epilogue: Epilogue) -> Self {
        self.epilogue = epilogue;
        self
    }

    /// With this kernel.
    pub const fn path(mut self, path: LinearPath) -> Self {
        self.path = path;
        self
    }

    /// With [`LinearPath::Wgmma`] and this tile.
    pub const fn tile(mut self, tile: WgmmaTile) -> Self {
        self.path = LinearPath::Wgmma;
        self.tile = Some(tile);
        self
    }
}

const OP: &str = "linear";

/// The most tokens of [`LinearPath::Stream`].
pub const STREAM_TOKENS: u32 = 64;
/// The most tokens for which that is [`LinearPath::Auto`]'s choice: of more, tiles read each weight once as well, and multiply twice as fast.
const STREAMED: u32 = 32;

/// The entry of [`LinearPath::Fma`].
pub const fn fma_entry(dtype: DType) -> Option<Entry<linear_fma::Args>> {
    Some(match dtype {
        DType::F32 => linear_fma::linear_fma_f32::ENTRY,
        DType::F16 => linear_fma::linear_fma_f16::ENTRY,
        DType::Bf16 => linear_fma::linear_fma_bf16::ENTRY,
        _ => return None,
    })
}

/// The entry of [`LinearPath::Dot`] for results, tokens and weights of these types.
pub const fn dot_entry(y: DType, x: DType, w: DType) -> Option<Entry<linear_dot::Args>> {
    Some(match (y, x, w) {
        (DType::F32, DType::F32, DType::F32) => linear_dot::linear_dot_f32::ENTRY,
        (DType::F16, DType::F16, DType::F16) => linear_dot::linear_dot_f16::ENTRY,
        (DType::Bf16, DType::Bf16, DType::Bf16) => linear_dot::linear_dot_bf16::ENTRY,
        (DType::F32, DType::F16, DType::F32) => linear_dot::linear_dot_f16_f32::ENTRY,
        (DType::F32, DType::Bf16, DType::F32) => linear_dot::linear_dot_bf16_f32::ENTRY,
        _ => return None,
    })
}

/// The entry of [`LinearPath::Stream`] for `m` tokens, and its tiles of 8 tokens.
pub const fn stream_entry(dtype: DType, m: u32) -> Option<(Entry<linear_stream::Args>, usize)> {
    use linear_stream::*;
    let (bf16, f16, tiles) = match m {
        0..=8 => (linear_stream_t8_bf16::ENTRY, linear_stream_t8_f16::ENTRY, 1),
        9..=16 => (linear_stream_t16_bf16::ENTRY, linear_stream_t16_f16::ENTRY, 2),
        17..=32 => (linear_stream_t32_bf16::ENTRY, linear_stream_t32_f16::ENTRY, 4),
        33..=STREAM_TOKENS => (linear_stream_t64_bf16::ENTRY, linear_stream_t64_f16::ENTRY, 8),
        _ => return None,
    };
    match dtype {
        DType::Bf16 => Some((bf16, tiles)),
        DType::F16 => Some((f16, tiles)),
        _ => None,
    }
}

/// Tokens and outputs of a tile of [`LinearPath::Tile`] for `m` tokens and `n` outputs on so many multiprocessors: 128, or 64 where tiles of 128 are too few.
/// Results have the same bits.
pub const fn tile_size(m: u32, n: u32, multiprocessors: u32) -> u32 {
    const fn blocks(m: u32, n: u32, tile: u32) -> u64 {
        m.div_ceil(tile) as u64 * n.div_ceil(tile) as u64
    }
    // Times measured on an H200: of a tile alone on its multiprocessor, and of two together.
    const fn time(blocks: u64, multiprocessors: u64, alone: u64, two: u64) -> u64 {
        if blocks <= multiprocessors {
            return alone * 2 * multiprocessors;
        }
        two * if blocks < 2 * multiprocessors { 2 * multiprocessors } else { blocks }
    }
    let multiprocessors = if multiprocessors == 0 { 1 } else { multiprocessors as u64 };
    let large = time(blocks(m, n, 128), multiprocessors, 64, 108);
    let small = time(blocks(m, n, 64), multiprocessors, 26, 46);
    if small < large { 64 } else { 128 }
}

/// The entry of [`LinearPath::Tile`] for tiles of [`tile_size`].
pub const fn tile_entry(dtype: DType, tile: u32) -> Option<Entry<linear_tile::Args>> {
    use linear_tile::*;
    Some(match (dtype, tile) {
        (DType::F16, 128) => linear_tile_f16::ENTRY,
        (DType::Bf16, 128) => linear_tile_bf16::ENTRY,
        (DType::F16, 64) => linear_tile64_f16::ENTRY,
        (DType::Bf16, 64) => linear_tile64_bf16::ENTRY,
        _ => return None,
    })
}

/// How to launch [`LinearPath::Fma`], for at most 65535 · 64 tokens.
pub const fn fma_geometry(m: u32, n: u32) -> Geometry {
    let tile = linear_fma::TILE as u32;
    Geometry::new([n.div_ceil(tile), m.div_ceil(tile), 1], [linear_fma::THREADS as u32, 1, 1])
        .dependent()
        .shared_bytes(linear_fma::SHARED_BYTES as u32)
}

/// How to launch [`LinearPath::Dot`], for at most 65535 tokens.
pub const fn dot_geometry(m: u32, n: u32) -> Geometry {
    Geometry::new([n.div_ceil(linear_dot::WARPS), m, 1], [linear_dot::WARPS * 32, 1, 1]).dependent()
}

/// How to launch [`LinearPath::Tile`] with tiles of [`tile_size`].
pub const fn tile_geometry(m: u32, n: u32, tile: u32) -> Geometry {
    let side = if tile == 64 { 64 } else { 128 };
    Geometry::linear(m.div_ceil(side).saturating_mul(n.div_ceil(side)), linear_tile::THREADS as u32)
        .dependent()
        .shared_bytes(linear_tile::shared_bytes(side as usize) as u32)
}

/// How to launch [`LinearPath::Stream`] for tiles of 8 tokens.
pub const fn stream_geometry(n: u32, tiles: usize) -> Geometry {
    Geometry::linear(n.div_ceil(linear_stream::ROWS as u32), linear_stream::THREADS as u32)
        .dependent()
        .shared_bytes(linear_stream::shared_bytes(tiles) as u32)
}

/// The path that [`launch`], [`linear`](fn@linear) and [`linear_with`] take on a device for results of type `Y`, tokens of type `X` and weights of type `W`:
/// never [`LinearPath::Auto`]. Reads addresses, strides and extents, nothing behind them.
///
/// What [`LinearPath::Auto`] comes to for 16-bit floats and `k` above 0, the first that fits:
///
/// * Hopper, `x`, `w` and `y` whose rows begin at multiples of 16 bytes, those of `y` ending there as well: [`LinearPath::Few`] or [`LinearPath::Wgmma`];
/// * rows of `x` and `w` that begin and end at multiples of 16 bytes: [`LinearPath::Stream`] or [`LinearPath::Tile`];
/// * anything else: [`LinearPath::Fma`], many times slower.
///
/// f32 is always [`LinearPath::Fma`], types that differ [`LinearPath::Dot`], and a SIMT device with
/// [`host_products`](crate::SimtOptions::host_products) takes [`LinearPath::Host`].
///
/// # Errors
/// [`Error::Alignment`] and [`Error::Unsupported`] if `path` names a path that does not take addresses, strides or the device. Whether
/// it has a kernel for the types and so many tokens is seen at the launch.
pub fn path_of<Y: Float, X: Float, W: Float>(
    device: &Device,
    path: LinearPath,
    args: &linear_fma::Args,
) -> Result<LinearPath> {
    let (size, same) = (X::DTYPE.size(), same::<Y, X, W>());
    let misaligned = || misaligned(args, size);
    let unfit = || linear_wgmma::misaligned(args, size);
    let wgmma = || args.k > 0 && linear_wgmma::supports(device, X::DTYPE);
    let refused = match path {
        LinearPath::Auto if device.simt_options().is_some_and(|o| o.host_products) => return Ok(LinearPath::Host),
        LinearPath::Auto if !same => return Ok(LinearPath::Dot),
        LinearPath::Auto if wgmma() && unfit().is_none() => {
            let few = linear_few::suits(args.m, args.n, args.k);
            return Ok(if few { LinearPath::Few } else { LinearPath::Wgmma });
        }
        LinearPath::Auto if args.k > 0 && tile_entry(X::DTYPE, 128).is_some() && misaligned().is_none() => {
            return Ok(if args.m <= STREAMED { LinearPath::Stream } else { LinearPath::Tile });
        }
        LinearPath::Auto => return Ok(LinearPath::Fma),
        LinearPath::Stream | LinearPath::Tile if same && args.k > 0 => misaligned(),
        LinearPath::Wgmma | LinearPath::Few if same => {
            if !wgmma() {
                let (k, dtype, name) = (args.k, X::DTYPE, device.name());
                let what = format!(
                    "the path {path:?} takes f16 and bf16 of a depth above 0 on a Hopper GPU, and here is {dtype}, {k} deep, on {name}; use LinearPath::Auto"
                );
                return Err(Error::Unsupported { op: OP, what });
            }
            unfit()
        }
        _ => None,
    };
    match refused {
        Some((arg, address)) => {
            let long = arg == "out" || !matches!(path, LinearPath::Wgmma | LinearPath::Few);
            Err(misfit(OP, format!("{path:?}"), arg, address, [args.x, args.w, args.y.cast_const()], long))
        }
        None => Ok(path),
    }
}

/// Launches on raw pointers (layer L1): results of type `Y`, tokens of type `X`, weights of type `W`, by the path that [`path_of`] gives.
///
/// `args` are as [`linear_fma::linear_fma`] documents.
///
/// # Errors
/// Those of [`path_of`], [`Error::Unsupported`] for element types or a shape that the path does not take, and those of [`Stream::launch`].
///
/// # Safety
/// The pointers are device memory of the documented sizes, aligned to their element types, until the launch is done; `y` overlaps no other.
pub unsafe fn launch<Y: Float, X: Float, W: Float>(
    stream: &Stream,
    path: LinearPath,
    args: &linear_fma::Args,
) -> Result<()> {
    if args.m == 0 || args.n == 0 {
        return Ok(());
    }
    let path = path_of::<Y, X, W>(stream.device(), path, args)?;
    let linear_fma::Args { y, x, w, bias, m, n, k, y_row, x_row, w_row, kind } = *args;
    let unsupported = || {
        let types = if same::<Y, X, W>() {
            Y::DTYPE.to_string()
        } else {
            format!("{} with weights of {} and results of {}", X::DTYPE, W::DTYPE, Y::DTYPE)
        };
        Error::Unsupported {
            op: OP,
            what: match path {
                LinearPath::Stream if m > STREAM_TOKENS => {
                    format!(
                        "the path Stream takes {STREAM_TOKENS} tokens at most, and here are {m}; use LinearPath::Auto"
                    )
                }
                _ => format!("the path {path:?} has no kernel for {m} tokens of {types}; use LinearPath::Auto"),
            },
        }
    };
    match path {
        LinearPath::Dot => {
            let entry = dot_entry(Y::DTYPE, X::DTYPE, W::DTYPE).ok_or_else(unsupported)?;
            in_parts::<Y, X>(args, 1, |&linear_fma::Args { y, x, m, .. }| {
                let args = linear_dot::Args { y, x, w, bias, m, n, k, y_row, x_row, w_row, kind };
                // SAFETY: forwarded to the caller.
                unsafe { stream.launch(&entry, &dot_geometry(m, n), &args) }
            })
        }
        LinearPath::Stream => {
            let (entry, tiles) = stream_entry(Y::DTYPE, m).filter(|_| same::<Y, X, W>()).ok_or_else(unsupported)?;
            let args = linear_stream::Args { y, x, w, bias, m, n, k, y_row, x_row, w_row, kind };
            // SAFETY: forwarded to the caller.
            unsafe { stream.launch(&entry, &stream_geometry(n, tiles), &args) }
        }
        LinearPath::Tile => {
            let tile = tile_size(m, n, stream.device().properties().multiprocessors);
            let entry = tile_entry(Y::DTYPE, tile).filter(|_| same::<Y, X, W>()).ok_or_else(unsupported)?;
            let args = linear_tile::Args { y, x, w, bias, m, n, k, y_row, x_row, w_row, kind };
            // SAFETY: forwarded to the caller.
            unsafe { stream.launch(&entry, &tile_geometry(m, n, tile), &args) }
        }
        LinearPath::Wgmma if same::<Y, X, W>() => {
            let sms = stream.device().properties().multiprocessors;
            // SAFETY: forwarded to the caller.
            unsafe { linear_wgmma::launch(stream, Y::DTYPE, WgmmaTile::choose(m, n, k, sms), args) }
        }
        // SAFETY: forwarded to the caller.
        LinearPath::Few if same::<Y, X, W>() => unsafe { linear_few::launch(stream, Y::DTYPE, args) },
        LinearPath::Wgmma | LinearPath::Few => Err(unsupported()),
        LinearPath::Host => {
            dot_entry(Y::DTYPE, X::DTYPE, W::DTYPE).ok_or_else(unsupported)?;
            // SAFETY: forwarded to the caller.
            unsafe { linear_host::<Y, X, W>(stream, args) }
        }
        LinearPath::Auto | LinearPath::Fma => {
            let entry = fma_entry(Y::DTYPE).filter(|_| same::<Y, X, W>()).ok_or_else(unsupported)?;
            in_parts::<Y, X>(args, linear_fma::TILE as u32, |args| {
                // SAFETY: forwarded to the caller.
                unsafe { stream.launch(&entry, &fma_geometry(args.m, n), args) }
            })
        }
    }
}

/// Calls `launch` for as many tokens at a time as a grid is high, whose rows of blocks have `each`.
fn in_parts<Y, X>(
    args: &linear_fma::Args,
    each: u32,
    mut launch: impl FnMut(&linear_fma::Args) -> Result<()>,
) -> Result<()> {
    let most = 65535 * each;
    let mut first = 0;
    while first < args.m {
        let m = most.min(args.m - first);
        let y = args.y.cast::<Y>().wrapping_add(first as usize * args.y_row).cast();
        let x = args.x.cast::<X>().wrapping_add(first as usize * args.x_row).cast();
        launch(&linear_fma::Args { y, x, m, ..*args })?;
        first += m;
    }
    Ok(())
}

/// Whether all three element types are one.
const fn same<Y: Float, X: Float, W: Float>() -> bool {
    Y::DTYPE as u8 == X::DTYPE as u8 && X::DTYPE as u8 == W::DTYPE as u8
}

/// `out = x · wᵀ`: [`linear_with`] of one element type, without bias and epilogue.
///
/// # Errors
/// As for [`linear_with`].
pub fn linear<T: Float>(stream: &Stream, out: &mut Tensor<T>, x: &Tensor<T>, w: &Tensor<T>) -> Result<()> {
    linear_with(stream, out, x, w, None, &LinearOptions::default())
}

/// `out = epilogue(x · wᵀ + bias)`.
///
/// `x` is `[.., k]`, `w` `[n, k]`, `bias` `[n]`, `out` `[.., n]` with the leading dimensions of `x`; each dense in its last
/// dimension, rows at any one distance. Products and sums are in f32, in an order that depends on `k`, the path and
/// [`WgmmaTile::split`] only (but see [`LinearPath::Few`]); one rounding at the end. [`LinearPath::Auto`] chooses by the number of tokens too: who needs the
/// same bits for a token whatever comes with it fixes path and tile. Element types: f32, f16 or bf16 for all of them; or tokens of f16 or bf16 with weights and
/// results of f32, as routers have them.
///
/// # Errors
/// [`Shape`](Error::Shape), [`Stride`](Error::Stride), [`DType`](Error::DType), [`Overlap`](Error::Overlap),
/// [`WrongDevice`](Error::WrongDevice); [`Alignment`](Error::Alignment) or [`Unsupported`](Error::Unsupported) if
/// `options.path` asks for a kernel that does not take these tensors.
///
/// ```
/// use warploom::{Device, Stream, Tensor, gemm};
/// let device = Device::simt();
/// let stream = Stream::new(&device)?;
/// let x = Tensor::from_slice(&device, &[1.0f32, 2.0], &[1, 2])?;
/// let w = Tensor::from_slice(&device, &[1.0f32, 0.0, 3.0, 1.0, 0.0, 1.0], &[3, 2])?;
/// let mut y = Tensor::zeros(&device, &[1, 3])?;
/// gemm::linear(&stream, &mut y, &x, &w)?;
/// assert_eq!(y.to_vec()?, [1.0, 5.0, 2.0]);
/// # Ok::<(), warploom::Error>(())
/// ```
pub fn linear_with<Y: Float, X: Float, W: Float>(
    stream: &Stream,
    out: &mut Tensor<Y>,
    x: &Tensor<X>,
    w: &Tensor<W>,
    bias: Option<&Tensor<Y>>,
    options: &LinearOptions,
) -> Result<()> {
    let mut call = Call::new(OP, stream);
    if dot_entry(X::DTYPE, X::DTYPE, X::DTYPE).is_none() {
        return Err(Error::DType { op: OP, arg: "x", expected: "f32, f16 or bf16".into(), got: X::DTYPE });
    }
    call.dtype_among("w", W::DTYPE, &[X::DTYPE, DType::F32])?;
    call.dtype_among("out", Y::DTYPE, &[W::DTYPE])?;
    let [n, k] = *w.shape() else {
        return Err(call.bad_shape("w", w.shape(), "[n, k]"));
    };
    let xs = call.rows("x", x)?;
    if xs.width != k {
        return Err(call.bad_shape("x", x.shape(), format!("[.., {k}], since `w`, which is [n, k], is [{n}, {k}]")));
    }
    let mut expected = x.shape().to_vec();
    *expected.last_mut().expect("`rows` saw a dimension") = n;
    call.same_shape("out", out.shape(), &expected)?;
    let (ys, ws) = (call.rows("out", out)?, call.rows("w", w)?);
    if let Some(bias) = bias {
        call.same_shape("bias", bias.shape(), &[n])?;
        call.contiguous("bias", bias)?;
    }
    let args = linear_fma::Args {
        y: call.write("out", out)?,
        x: call.read("x", x)?,
        w: call.read("w", w)?,
        bias: call.read_opt("bias", bias)?,
        m: call.count("x", xs.rows)?,
        n: call.count("w", n)?,
        k: call.count("w", k)?,
        y_row: ys.stride,
        x_row: xs.stride,
        w_row: ws.stride,
        kind: options.epilogue.kind(),
    };
    call.check_overlap()?;
    if args.m == 0 || args.n == 0 {
        return Ok(());
    }
    let path = path_of::<Y, X, W>(stream.device(), options.path, &args)?;
    if let (LinearPath::Wgmma, Some(tile), true) = (path, options.tile, same::<Y, X, W>()) {
        // SAFETY: shapes, device, overlap and alignment were checked above, and that there is a depth.
        return unsafe { linear_wgmma::launch(stream, X::DTYPE, tile, &args) };
    }
    // SAFETY: shapes, device and overlap were checked above, and tensors are aligned to their elements.
    unsafe { launch::<Y, X, W>(stream, path, &args) }
}

/// The error for an operand with something at `address` that does not begin or end at a multiple of 16 bytes: it itself, if that is where one of them `starts`, or its rows. `long`:
/// whether these must end at such multiples, too.
pub(super) fn misfit<T>(
    op: &'static str,
    path: String,
    arg: &'static str,
    address: usize,
    starts: [*const T; 3],
    long: bool,
) -> Error {
    if !address.is_multiple_of(16) && starts.iter().any(|start| start.addr() == address) {
        return Error::Alignment { op, arg, expected: 16, address };
    }
    let rows = if long {
        "a multiple of 16 bytes long, and as far from each other"
    } else {
        "a multiple of 16 bytes from each other"
    };
    let what = format!(
        "the path {path} takes rows of `{arg}` that are {rows} (not 0), and here one would be at {address:#x}; `Auto` takes them"
    );
    Error::Unsupported { op, what }
}

/// The first operand with a row that does not start at a multiple of 16 bytes, and such an address.
fn misaligned(args: &linear_fma::Args, size: usize) -> Option<(&'static str, usize)> {
    let width = args.k as usize * size;
    let check = |arg, address: usize, rows: u32, stride: usize| {
        let row = stride * size;
        if !address.is_multiple_of(16) {
            Some((arg, address))
        } else if rows > 1 && !row.is_multiple_of(16) {
            Some((arg, address + row))
        } else {
            // The last 16 bytes of a row must not reach beyond it.
            (!width.is_multiple_of(16)).then_some((arg, address + width))
        }
    };
    check("x", args.x as usize, args.m, args.x_row).or_else(|| check("w", args.w as usize, args.n, args.w_row))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_no_higher_than_a_grid_and_all_tokens() {
        for (m, each) in
            [(0, 1), (7, 1), (65535, 1), (65536, 1), (3 * 65535, 1), (65535 * 64 + 5, 64), (i32::MAX as u32, 64)]
        {
            let null = std::ptr::null();
            let args = linear_fma::Args {
                y: std::ptr::null_mut(),
                x: null,
                w: null,
                bias: null,
                m,
                n: 1,
                k: 1,
                y_row: 3,
                x_row: 5,
                w_row: 1,
                kind: 0,
            };
            let mut first = 0usize;
            let whole = in_parts::<f32, half::bf16>(&args, each, |part| {
                assert!(part.m > 0 && part.m.div_ceil(each) <= 65535);
                assert_eq!((part.y as usize, part.x as usize), (first * 3 * 4, first * 5 * 2));
                first += part.m as usize;
                Ok(())
            });
            whole.unwrap();
            assert_eq!(first, m as usize);
        }
    }
}
