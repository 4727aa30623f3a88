//! Mixture of experts.

mod sort;
pub use sort::{Sorted, sort};
