//! Mixture of experts.
pub mod pairs;
pub mod sort;
