//! Normalisation.

pub mod rms_norm;
pub use rms_norm::rms_norm;
