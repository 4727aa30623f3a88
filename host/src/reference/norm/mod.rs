//! Normalisation.

pub mod layer_norm;
pub mod rms_norm;

pub use layer_norm::layer_norm;
pub use rms_norm::{fused_add_rms_norm, rms_norm};
