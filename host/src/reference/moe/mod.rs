//! Mixture of experts.

mod sort;
pub use sort::{Sorted, sort};
pub mod gate;
pub use gate::gate;
