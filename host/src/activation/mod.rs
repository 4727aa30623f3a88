//! Activation functions, gated and plain, with and without quantised results.
//!
//! Input and output are `[.., width]` with any distance between rows, in f32, f16 or bf16. Arithmetic is in f32 with one
//! rounding at the end. NaN stays NaN; `-inf` gives NaN, as `-inf · 0` does (0 in `relu2` and as a gate of
//! `fatrelu_and_mul`).
//!
//! Errors for f32, in 2⁻²³ of the result: silu at most 4, gelu 8, and those with a factor in the exponent `u` (gelu_tanh,
//! gelu_quick, swiglu_oai) `4 + 2 |u|`; `e^-|x|` below 2⁻¹²⁶ is rounded to a multiple of 2⁻¹⁴⁹. For f16 and bf16: below
//! 2⁻¹⁵ of the result before the rounding, and magnitudes below 2⁻¹¹⁹ may become zero.

pub mod gated;
pub mod plain;
pub mod silu_and_mul_quant;

pub use gated::{
    Gated, fatrelu_and_mul, gelu_and_mul, gelu_tanh_and_mul, mul_and_silu, silu_and_mul, silu_and_mul_clamp, swiglu_oai,
};
pub use plain::{Plain, gelu, gelu_fast, gelu_new, gelu_quick, gelu_tanh, relu2, silu};
pub use silu_and_mul_quant::{silu_and_mul_e4m3_per_group, silu_and_mul_e4m3_per_tensor, silu_and_mul_e4m3_per_token};
