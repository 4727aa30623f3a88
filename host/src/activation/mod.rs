//! Activation functions, gated and plain, with and without quantised results.
//!
//! Input and output are `[.., width]` with any distance between rows, in f32, f16 or bf16. Arithmetic is in f32 with one
//! rounding at the end. For f32 the functions are within 4 units in the last place (gelu: 8); for f16 and bf16 their
//! relative error before the rounding is below 2⁻¹⁶, and magnitudes below 2⁻¹²⁰ may become zero. NaN stays NaN.

pub mod gated;
pub mod plain;
pub mod silu_and_mul_quant;

pub use gated::{
    Gated, fatrelu_and_mul, gelu_and_mul, gelu_tanh_and_mul, mul_and_silu, silu_and_mul, silu_and_mul_clamp, swiglu_oai,
};
pub use plain::{Plain, gelu, gelu_fast, gelu_new, gelu_quick, gelu_tanh, relu2, silu};
pub use silu_and_mul_quant::{silu_and_mul_e4m3_per_group, silu_and_mul_e4m3_per_tensor, silu_and_mul_e4m3_per_token};
