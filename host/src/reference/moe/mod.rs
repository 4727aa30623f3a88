//! Mixture of experts.

mod capacity;
mod fused;
pub mod gate;
mod permute;
mod sort;
pub use capacity::capacity;
pub use fused::{Block, fused};
pub use gate::gate;
pub use permute::unpermute;
pub use sort::{Sorted, sort};
