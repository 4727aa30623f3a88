//! Mixture of experts.

mod capacity;
mod fused;
mod fused_quant;
pub mod gate;
mod permute;
mod sort;
pub use capacity::capacity;
pub use fused::{Block, fused};
pub use fused_quant::{QuantBlock, QuantResult, fused_quant, quantised};
pub use gate::gate;
pub use permute::unpermute;
pub use sort::{Sorted, sort};
