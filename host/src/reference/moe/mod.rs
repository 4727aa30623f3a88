//! Mixture of experts.

pub mod balance;
mod capacity;
mod fused;
mod fused_quant;
pub mod gate;
pub mod noisy_top_k;
mod permute;
mod sort;
mod statistics;
pub use capacity::capacity;
pub use fused::{Block, FusedResult, fused};
pub use fused_quant::{QuantBlock, QuantResult, fused_quant, quantised};
pub use gate::gate;
pub use permute::unpermute;
pub use sort::{Sorted, sort};
pub use statistics::{Statistics, statistics};
