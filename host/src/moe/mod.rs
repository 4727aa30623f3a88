//! Mixture of experts.

pub mod fused;
mod fused_host;
pub mod gate;
pub mod sort;

pub use fused::{ExpertActivation, FusedOptions, FusedPath, FusedShape, GateUp, SharedExperts, fused};
pub use gate::{Bias, GateOptions, Scoring, gate};
pub use sort::{Local, SortConvention, SortInput, SortOptions, SortOutput, sort, sort_and_zero};
