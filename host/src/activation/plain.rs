//! Activations of one argument, element by element.
//!
//! Sources: Hendrycks and Gimpel, *Gaussian Error Linear Units*, 2016; Elfwing et al., *Sigmoid-Weighted Linear Units*,
//! 2017; So et al., *Primer* (squared ReLU), 2021.

use crate::check::Call;
use crate::device::{Geometry, Stream};
use crate::error::Result;
use crate::kernels::activation::plain as kernel;
use crate::pieces;
use crate::tensor::Tensor;
use cuda_std::{DType, Entry, Float};

pub use kernel::Args;

/// A function of one argument.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Plain {
    /// `x / (1 + e⁻ˣ)`
    Silu,
    /// `x / 2 (1 + erf(x / √2))`
    Gelu,
    /// `x / 2 (1 + tanh(√(2/π) (x + 0.044715 x³)))`; others call it gelu_new, gelu_fast or gelu_tanh.
    GeluTanh,
    /// `x / (1 + e^(-1.702 x))`
    GeluQuick,
    /// `max(x, 0)²`
    Relu2,
}

impl Plain {
    /// The name of the operation.
    pub const fn name(self) -> &'static str {
        match self {
            Plain::Silu => "silu",
            Plain::Gelu => "gelu",
            Plain::GeluTanh => "gelu_tanh",
            Plain::GeluQuick => "gelu_quick",
            Plain::Relu2 => "relu2",
        }
    }
}

/// The entry for a function and an element type, if there is one. `aligned`: as for [`gated::entry`](super::gated::entry).
pub const fn entry(dtype: DType, function: Plain, aligned: bool) -> Option<Entry<Args>> {
    pieces::instance(dtype, 6 * function as usize + if aligned { 0 } else { 3 })
}

/// How to launch it for `rows` rows of `d` elements.
pub const fn geometry(dtype: DType, aligned: bool, rows: u32, d: u32) -> Geometry {
    pieces::elementwise(rows, d, dtype, aligned, false)
}

/// Launches on raw pointers (layer L1): `x` and `out` are `[rows, d]`, rows `x_stride` and `out_stride` elements apart.
///
/// # Errors
/// [`Error::Unsupported`](crate::Error::Unsupported) for an element type without an entry, and those of
/// [`Stream::launch`].
///
/// # Safety
/// The pointers are device memory of those sizes, aligned to their element type, until the launch is done, and do not
/// overlap.
pub unsafe fn launch(stream: &Stream, dtype: DType, function: Plain, args: &Args) -> Result<()> {
    let size = dtype.size();
    let places = [(args.x, args.x_stride, size), (args.out.cast_const(), args.out_stride, size)];
    let aligned = pieces::aligned(dtype, args.d, &places);
    let (entry, geometry) = (entry(dtype, function, aligned), geometry(dtype, aligned, args.rows, args.d));
    // SAFETY: forwarded to the caller; the entry fits the alignment.
    unsafe { pieces::launch(stream, function.name(), dtype, entry, &geometry, args) }
}

fn run<T: Float>(op: &'static str, stream: &Stream, out: &mut Tensor<T>, x: &Tensor<T>, function: Plain) -> Result<()> {
    let mut call = Call::new(op, stream);
    call.float("x", T::DTYPE)?;
    let (to, from) = (call.rows("out", out)?, call.rows("x", x)?);
    call.same_shape("x", x.shape(), out.shape())?;
    let (x, out) = (call.read("x", x)?, call.write("out", out)?);
    call.check_overlap()?;
    let (mut rows, mut d) = (call.count("out", to.rows)?, call.count("out", to.width)?);
    let (mut x_stride, mut out_stride) = (from.stride, to.stride);
    let dense = out_stride == to.width && x_stride == from.width;
    if let (true, Ok(all)) = (dense, call.count("out", to.rows * to.width)) {
        // One long row fills its blocks better than many, and nothing is at its distance.
        (rows, d, x_stride, out_stride) = (1, all, 0, 0);
    }
    let args = Args { x, out, rows, d, x_stride, out_stride };
    // SAFETY: shapes, device and overlap were checked above, and tensors are aligned to their elements.
    unsafe { launch(stream, T::DTYPE, function, &args) }
}

macro_rules! plain {
    ($($(#[$m:meta])* $name:ident => $function:ident;)*) => { $(
        $(#[$m])*
        ///
        /// `x` and `out` are `[.., d]`; the rows of each lie at one distance from each other, which may be larger than
        /// their width.
        ///
        /// # Errors
        /// [`DType`](crate::Error::DType) for 8-bit inputs, [`Shape`](crate::Error::Shape), [`Stride`](crate::Error::Stride), [`Overlap`](crate::Error::Overlap),
        /// [`WrongDevice`](crate::Error::WrongDevice); [`Value`](crate::Error::Value) for more than 2^31 - 1 rows or elements of a row.
        pub fn $name<T: Float>(stream: &Stream, out: &mut Tensor<T>, x: &Tensor<T>) -> Result<()> {
            run(stringify!($name), stream, out, x, Plain::$function)
        }
    )* };
}
plain! {
    /// `x / (1 + e⁻ˣ)`
    silu => Silu;
    /// `x / 2 (1 + erf(x / √2))`
    gelu => Gelu;
    /// `x / 2 (1 + tanh(√(2/π) (x + 0.044715 x³)))`
    gelu_tanh => GeluTanh;
    /// The name of [`gelu_tanh`] in GPT-2's checkpoints.
    gelu_new => GeluTanh;
    /// [`gelu_tanh`] with the argument factored as `0.7978845608 x (1 + 0.044715 x²)`: the same function.
    gelu_fast => GeluTanh;
    /// `x / (1 + e^(-1.702 x))`
    gelu_quick => GeluQuick;
    /// `max(x, 0)²`
    relu2 => Relu2;
}
