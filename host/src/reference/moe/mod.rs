//! Mixture of experts.

mod fused;
pub mod gate;
mod sort;
pub use fused::{Block, fused};
pub use gate::gate;
pub use sort::{Sorted, sort};
