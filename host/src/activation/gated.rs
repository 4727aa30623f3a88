//! `f(gate) * up`: the middle of a gated feed-forward layer.
//!
//! The input holds gate and value of each token, `[.., 2 d]`, as one projection leaves them: first all gates and then
//! all values (`gate = x[.., ..d]`, `up = x[.., d..]`), or alternating. The result is `[.., d]`.
//!
//! Sources: Shazeer, *GLU Variants Improve Transformer*, 2020; Hendrycks and Gimpel, *Gaussian Error Linear Units*, 2016;
//! Song et al., *ProSparse* (FATReLU), 2024; the reference implementation of gpt-oss (`swiglu`), 2025.

use crate::check::Call;
use crate::device::{Geometry, Stream};
use crate::error::Result;
use crate::kernels::activation::gated as kernel;
use crate::pieces;
use crate::tensor::Tensor;
use cuda_std::{DType, Entry, Float, KernelArgs as _};

pub use kernel::Args;

/// A function of gate and value.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Gated {
    /// `silu(gate) up` with `silu(x) = x / (1 + e⁻ˣ)`.
    SiluAndMul,
    /// `gelu(gate) up` with `gelu(x) = x / 2 (1 + erf(x / √2))`.
    GeluAndMul,
    /// `gelu(gate) up` with `gelu(x) ≈ x / 2 (1 + tanh(√(2/π) (x + 0.044715 x³)))`.
    GeluTanhAndMul,
    /// `0 up` where the gate is at most the threshold, else `gate up`.
    FatreluAndMul {
        /// The threshold.
        threshold: f32,
    },
    /// `silu(min(gate, limit)) clamp(up, -limit, limit)`.
    SiluAndMulClamp {
        /// The limit.
        limit: f32,
    },
    /// `g / (1 + e^(-alpha g)) (u + 1)` with `g = min(gate, limit)` and `u = clamp(up, -limit, limit)`. Gate and value
    /// alternate in memory: `gate = x[.., 0::2]`, `up = x[.., 1::2]`.
    SwigluOai {
        /// Slope of the sigmoid; 1.702 in gpt-oss.
        alpha: f32,
        /// The limit; 7 in gpt-oss.
        limit: f32,
    },
}

impl Gated {
    /// Whether gate and value alternate.
    pub const fn is_interleaved(self) -> bool {
        matches!(self, Gated::SwigluOai { .. })
    }

    /// The kernel's `alpha` and `limit`.
    pub const fn params(self) -> (f32, f32) {
        match self {
            Gated::SiluAndMul | Gated::GeluAndMul | Gated::GeluTanhAndMul => (0.0, 0.0),
            Gated::FatreluAndMul { threshold } => (threshold, 0.0),
            Gated::SiluAndMulClamp { limit } => (0.0, limit),
            Gated::SwigluOai { alpha, limit } => (alpha, limit),
        }
    }

    const fn index(self) -> usize {
        match self {
            Gated::SiluAndMul => 0,
            Gated::GeluAndMul => 1,
            Gated::GeluTanhAndMul => 2,
            Gated::FatreluAndMul { .. } => 3,
            Gated::SiluAndMulClamp { .. } => 4,
            Gated::SwigluOai { .. } => 5,
        }
    }

    /// The name of the operation.
    pub const fn name(self) -> &'static str {
        match self {
            Gated::SiluAndMul => "silu_and_mul",
            Gated::GeluAndMul => "gelu_and_mul",
            Gated::GeluTanhAndMul => "gelu_tanh_and_mul",
            Gated::FatreluAndMul { .. } => "fatrelu_and_mul",
            Gated::SiluAndMulClamp { .. } => "silu_and_mul_clamp",
            Gated::SwigluOai { .. } => "swiglu_oai",
        }
    }
}

/// The entry for a function and an element type, if there is one.
///
/// `aligned`: `gate`, `up` and `out` and the distances of their rows are multiples of 16 bytes, and `d` is one of 16 bytes
/// of elements. The others take anything.
pub const fn entry(dtype: DType, function: Gated, aligned: bool) -> Option<Entry<Args>> {
    pieces::instance(dtype, 6 * function.index() + if aligned { 0 } else { 3 })
}

/// The entry for many results of 16-bit types wherever rows lie: a thread has 16 bytes of results at a multiple of 16, and shifts what it computes
/// them from into place. The results are the same bits.
pub const fn lines_entry(dtype: DType, function: Gated) -> Option<Entry<Args>> {
    match dtype {
        DType::F16 => Some(Args::ENTRIES[36 + 2 * function.index()]),
        DType::Bf16 => Some(Args::ENTRIES[36 + 2 * function.index() + 1]),
        _ => None,
    }
}

/// How to launch [`lines_entry`] for `rows` rows of `d` results.
pub const fn lines_geometry(dtype: DType, rows: u32, d: u32) -> Geometry {
    pieces::lines(rows, d, dtype)
}

/// The least results of a launch of [`lines_entry`]: with fewer, latency is what counts. Measured on an H200.
pub const LEAST_LINES: u64 = 1 << 20;

/// Whether [`lines_entry`] takes so many rows of `d` results, and is meant to: it counts the columns of `x` in 32 bits, with a sign, and of those that alternate there are twice as many.
pub const fn suits_lines(function: Gated, rows: u32, d: u32) -> bool {
    let columns = if function.is_interleaved() { 2 * d as u64 } else { d as u64 };
    rows as u64 * d as u64 >= LEAST_LINES && columns <= i32::MAX as u64
}

/// How to launch it for `rows` rows of `d` results.
pub const fn geometry(dtype: DType, aligned: bool, rows: u32, d: u32) -> Geometry {
    pieces::elementwise(rows, d, dtype, aligned, false)
}

/// Launches on raw pointers (layer L1). `gate` and `up` point at `[rows, d]` with rows `in_stride` elements apart; where
/// they alternate `gate` points at `[rows, 2 d]` and `up` is not looked at. `out` is `[rows, d]`, rows `out_stride`
/// apart. `alpha` and `limit` are [`Gated::params`].
///
/// # Errors
/// [`Error::Unsupported`](crate::Error::Unsupported) for an element type without an entry, and those of
/// [`Stream::launch`].
///
/// # Safety
/// The pointers are device memory of those sizes, aligned to their element type, until the launch is done; `out` overlaps
/// no other.
pub unsafe fn launch(stream: &Stream, dtype: DType, function: Gated, args: &Args) -> Result<()> {
    let up = if function.is_interleaved() { std::ptr::null() } else { args.up };
    let size = dtype.size();
    let places = [(args.gate, args.in_stride, size), (up, 0, size), (args.out.cast_const(), args.out_stride, size)];
    let aligned = pieces::aligned(dtype, args.d, &places);
    let lines = if aligned || !suits_lines(function, args.rows, args.d) { None } else { lines_entry(dtype, function) };
    let (entry, geometry) = match lines {
        Some(_) => (lines, lines_geometry(dtype, args.rows, args.d)),
        None => (entry(dtype, function, aligned), geometry(dtype, aligned, args.rows, args.d)),
    };
    // SAFETY: forwarded to the caller; the entry fits the alignment.
    unsafe { pieces::launch(stream, function.name(), dtype, entry, &geometry, args) }
}

/// `out = function(gate, up)` for each row of `x`, as [`Gated`] says; with `swapped` the halves trade places.
///
/// `x` is `[.., 2 d]` and `out` `[.., d]`, with equal distances between the rows of each.
fn run<T: Float>(
    op: &'static str,
    stream: &Stream,
    out: &mut Tensor<T>,
    x: &Tensor<T>,
    function: Gated,
    swapped: bool,
) -> Result<()> {
    let mut call = Call::new(op, stream);
    call.float("x", T::DTYPE)?;
    let (to, from) = (call.rows("out", out)?, call.rows("x", x)?);
    let d = to.width;
    call.same_shape("x", x.shape(), &doubled(out.shape()))?;
    let (alpha, limit) = function.params();
    if matches!(function, Gated::FatreluAndMul { .. }) {
        call.value(!alpha.is_nan(), "threshold", "a number", alpha)?;
    } else {
        call.value(alpha.is_finite(), "alpha", "finite", alpha)?;
        call.value(limit >= 0.0, "limit", "not negative", limit)?;
    }
    let (first, out) = (call.read("x", x)?, call.write("out", out)?);
    call.check_overlap()?;
    let second = first.cast::<T>().wrapping_add(d).cast();
    let (gate, up) = if swapped { (second, first) } else { (first, second) };
    let (rows, d) = (call.count("out", to.rows)?, call.count("out", d)?);
    let args = Args { gate, up, out, rows, d, in_stride: from.stride, out_stride: to.stride, alpha, limit };
    // SAFETY: shapes, device and overlap were checked above, and tensors are aligned to their elements.
    unsafe { launch(stream, T::DTYPE, function, &args) }
}

/// The shape with twice the last dimension.
pub(super) fn doubled(shape: &[usize]) -> Vec<usize> {
    let mut shape = shape.to_vec();
    if let Some(last) = shape.last_mut() {
        *last *= 2;
    }
    shape
}

macro_rules! gated {
    ($($(#[$m:meta])* $name:ident($($param:ident),*) => $function:expr, $swapped:literal;)*) => { $(
        $(#[$m])*
        ///
        /// `x` is `[.., 2 d]` and `out` is `[.., d]`; the rows of each lie at one distance from each other, which may be
        /// larger than their width.
        ///
        /// # Errors
        /// [`DType`](crate::Error::DType) for 8-bit inputs, [`Shape`](crate::Error::Shape), [`Stride`](crate::Error::Stride), [`Overlap`](crate::Error::Overlap),
        /// [`WrongDevice`](crate::Error::WrongDevice), and [`Value`](crate::Error::Value) for a scalar that is NaN, a
        /// negative limit, an infinite `alpha`, or more than 2^31 - 1 rows or results of a row.
        pub fn $name<T: Float>(stream: &Stream, out: &mut Tensor<T>, x: &Tensor<T>, $($param: f32),*) -> Result<()> {
            run(stringify!($name), stream, out, x, $function, $swapped)
        }
    )* };
}
gated! {
    /// `silu(gate) up`: [`Gated::SiluAndMul`].
    silu_and_mul() => Gated::SiluAndMul, false;
    /// `up silu(gate)` where the values come first: `up = x[.., ..d]`, `gate = x[.., d..]`.
    mul_and_silu() => Gated::SiluAndMul, true;
    /// `gelu(gate) up` by the error function: [`Gated::GeluAndMul`].
    gelu_and_mul() => Gated::GeluAndMul, false;
    /// `gelu(gate) up` by the hyperbolic tangent: [`Gated::GeluTanhAndMul`].
    gelu_tanh_and_mul() => Gated::GeluTanhAndMul, false;
    /// `gate up` above a threshold: [`Gated::FatreluAndMul`].
    fatrelu_and_mul(threshold) => Gated::FatreluAndMul { threshold }, false;
    /// `silu(gate) up` of clamped arguments: [`Gated::SiluAndMulClamp`].
    silu_and_mul_clamp(limit) => Gated::SiluAndMulClamp { limit }, false;
    /// The activation of gpt-oss, with alternating gate and value: [`Gated::SwigluOai`].
    swiglu_oai(alpha, limit) => Gated::SwigluOai { alpha, limit }, false;
}
