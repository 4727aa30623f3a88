//! Mixture of experts.
pub mod pairs;
pub mod sort;
pub mod gate;
