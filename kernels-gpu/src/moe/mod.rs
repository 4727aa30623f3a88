//! Mixture of experts.
pub mod gate;
