//! Mixture of experts.

pub mod sort;

pub use sort::{Local, SortConvention, SortInput, SortOptions, SortOutput, sort, sort_and_zero};
pub mod gate;
pub use gate::{Bias, GateOptions, Scoring, gate};
