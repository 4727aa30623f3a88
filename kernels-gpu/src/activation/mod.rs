//! Activation functions, and the kernels that apply them.
//!
//! A function is a type without values that implements [`Gated`] or [`Plain`]; [`gated`], [`plain`] and
//! [`silu_and_mul_quant`] hold one generic kernel each way of storing the result.
//!
//! For f32 the functions are built from the accurate primitives of [`float`]: silu is within 4 units in the last place and
//! gelu within 8; those of a product `u` (gelu_tanh, gelu_quick, swiglu_oai) within `4 + 2 |u|`, since the exponential
//! magnifies the rounding of its argument. For f16 and bf16 the special-function unit is enough: relative errors stay below
//! 2^-15 before the one rounding of the store. Both hold while the gate's factor, a sigmoid or gelu's tail, is 2^-126 or
//! more. A smaller one has an absolute error of up to the smallest number besides, which gate and value magnify; from the
//! special-function unit it may be zero.

pub mod gated;
pub mod plain;
pub mod silu_and_mul_quant;

use crate::gelu::{accurate, gelu, gelu_tanh};
use cuda_std::{Float, float};

/// The two scalars that some functions take.
#[derive(Clone, Copy)]
pub struct Params {
    /// Slope of the sigmoid, or threshold.
    pub alpha: f32,
    /// Bound of the arguments.
    pub limit: f32,
}

/// A function of a gate and a value (`up`).
pub trait Gated {
    /// Whether gate and value alternate in memory, gate first; otherwise all gates come before all values.
    const INTERLEAVED: bool = false;
    /// The result, as accurate as `T` needs.
    fn apply<T: Float>(gate: f32, up: f32, params: Params) -> f32;
}

/// A function of one number.
pub trait Plain {
    /// The result, as accurate as `T` needs.
    fn apply<T: Float>(x: f32) -> f32;
}

/// `x / (1 + e^-(a x))`
#[inline(always)]
fn swish<T: Float>(x: f32, a: f32) -> f32 {
    x * if accurate::<T>() { float::sigmoid(a * x) } else { float::fast::sigmoid(a * x) }
}

/// `min(x, limit)`, NaN staying NaN.
#[inline(always)]
fn at_most(x: f32, limit: f32) -> f32 {
    if x > limit { limit } else { x }
}

/// `x` within `-limit ..= limit`, NaN staying NaN.
#[inline(always)]
fn clamp(x: f32, limit: f32) -> f32 {
    let x = at_most(x, limit);
    if x < -limit { -limit } else { x }
}

macro_rules! gated {
    ($($(#[$m:meta])* $name:ident $($interleaved:literal)?, |$gate:ident, $up:ident, $params:pat_param| $result:expr;)*) => { $(
        $(#[$m])*
        pub struct $name;
        impl Gated for $name {
            $(const INTERLEAVED: bool = $interleaved;)?
            #[inline(always)]
            fn apply<T: Float>($gate: f32, $up: f32, $params: Params) -> f32 {
                $result
            }
        }
    )* };
}
gated! {
    /// `gate sigmoid(gate) up`
    SiluAndMul, |gate, up, _| swish::<T>(gate, 1.0) * up;
    /// `gelu(gate) up`, by the error function.
    GeluAndMul, |gate, up, _| gelu::<T>(gate) * up;
    /// `gelu(gate) up`, by the approximation with the hyperbolic tangent.
    GeluTanhAndMul, |gate, up, _| gelu_tanh::<T>(gate) * up;
    /// `gate up` where `gate > alpha`, elsewhere `0 up`.
    FatreluAndMul, |gate, up, Params { alpha, .. }| (if gate <= alpha { 0.0 } else { gate }) * up;
    /// `gate sigmoid(gate) up` of the gate clamped from above and the value clamped on both sides.
    SiluAndMulClamp, |gate, up, Params { limit, .. }| swish::<T>(at_most(gate, limit), 1.0) * clamp(up, limit);
    /// `gate sigmoid(alpha gate) (up + 1)`, clamped as before.
    SwigluOai true, |gate, up, Params { alpha, limit }| {
        swish::<T>(at_most(gate, limit), alpha) * (clamp(up, limit) + 1.0)
    };
}

macro_rules! plain {
    ($($(#[$m:meta])* $name:ident, |$x:ident| $result:expr;)*) => { $(
        $(#[$m])*
        pub struct $name;
        impl Plain for $name {
            #[inline(always)]
            fn apply<T: Float>($x: f32) -> f32 {
                $result
            }
        }
    )* };
}
plain! {
    /// `x sigmoid(x)`
    Silu, |x| swish::<T>(x, 1.0);
    /// `x Phi(x)`
    Gelu, |x| gelu::<T>(x);
    /// The approximation of `x Phi(x)` with the hyperbolic tangent.
    GeluTanh, |x| gelu_tanh::<T>(x);
    /// `x sigmoid(1.702 x)`
    GeluQuick, |x| swish::<T>(x, 1.702);
    /// `max(x, 0)^2`
    Relu2, |x| if x < 0.0 { 0.0 } else { x * x };
}
