//! Activation functions, gated and plain, with and without quantised results.
//!
//! Input and output are `[.., width]` with any distance between rows, in f32, f16 or bf16. Arithmetic is in f32 with one
//! rounding at the end. NaN stays NaN; `-inf` gives NaN, as `-inf · 0` does (0 in `relu2` and as a gate of
//! `fatrelu_and_mul`; an infinity as a gate of `swiglu_oai` with a negative `alpha`).
//!
//! Errors for f32, in 2⁻²³ of the result, or half of 2⁻¹⁴⁹ if that is more: silu at most 4, gelu 8, and those with a factor in the exponent `u` (gelu_tanh,
//! gelu_quick, swiglu_oai) `4 + 2 |u|`. For f16 and bf16: below 2⁻¹⁵ of the result before the rounding. Both hold while what the
//! gate, or `x`, is multiplied by is 2⁻¹²⁶ or more: with silu for gates down to -87, with swiglu_oai and gelu_quick while the gate
//! times their factor is above -87, with gelu down to -13, with gelu_tanh to -10. Below, f32 is off by up to 2⁻¹⁴⁹ of `gate · up`
//! besides, and the result may be zero for f16 and bf16, however large `up` is.

pub mod gated;
pub mod plain;
pub mod silu_and_mul_quant;

pub use gated::{
    Gated, fatrelu_and_mul, gelu_and_mul, gelu_tanh_and_mul, mul_and_silu, silu_and_mul, silu_and_mul_clamp, swiglu_oai,
};
pub use plain::{Plain, gelu, gelu_fast, gelu_new, gelu_quick, gelu_tanh, relu2, silu};
pub use silu_and_mul_quant::{silu_and_mul_e4m3_per_group, silu_and_mul_e4m3_per_tensor, silu_and_mul_e4m3_per_token};
