//! Normalisation of rows and of heads.
//!
//! Rows are `[.., n]` with any distance between them, in f32, f16 or bf16. Arithmetic is in f32 with one rounding at the
//! end: squares are summed in f32, in an order that depends on `n` and on the alignment of the tensors only, so a row's
//! result does not depend on the other rows. A row whose sum of squares exceeds f32 becomes zeros, as does one with an
//! infinity (with NaN at the infinity). Of [`layer_norm()`] a row with an infinity is NaN, and so may be one whose sum, or a difference from whose
//! mean, is beyond f32.

pub mod layer_norm;
pub mod qk_norm;
pub mod rms_norm;
pub mod rms_norm_quant;

pub use crate::pieces::{Held, Variant};
pub use layer_norm::layer_norm;
pub use qk_norm::{gemma_qk_norm, qk_norm};
pub use rms_norm::{fused_add_rms_norm, fused_add_rms_norm_to, gemma_fused_add_rms_norm, gemma_rms_norm, rms_norm};
pub use rms_norm_quant::{
    RmsNormQuantOptions, rms_norm_e4m3_per_group, rms_norm_e4m3_per_token, rms_norm_i8_per_token,
};
