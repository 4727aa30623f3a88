//! Normalisation.
pub mod rms_norm;
