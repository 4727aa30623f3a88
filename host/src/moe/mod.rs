//! Mixture of experts.

pub mod gate;
pub use gate::{Bias, GateOptions, Scoring, gate};
