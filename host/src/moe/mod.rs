//! Mixture of experts.

pub mod balance;
mod block;
pub mod capacity;
pub mod check_ids;
pub mod fused;
mod fused_host;
pub mod fused_quant;
pub mod gate;
pub mod noisy_top_k;
pub mod permute;
pub mod shuffle;
pub mod sort;
pub mod statistics;

pub use balance::{Loads, histogram, update_bias};
pub use capacity::capacity;
pub use check_ids::check_ids;
pub use fused::{ExpertActivation, FusedOptions, FusedPath, FusedShape, GateUp, SharedExperts, fused};
pub use fused_quant::{FusedQuantOptions, FusedQuantPath, QuantScales, SharedQuantExperts, fused_quant};
pub use gate::{Bias, GateOptions, Scoring, gate};
pub use noisy_top_k::{NoisyTopKOptions, noisy_top_k};
pub use permute::{permute, unpermute};
pub use shuffle::shuffle_weights;
pub use sort::{Local, SortConvention, SortInput, SortOptions, SortOutput, sort, sort_and_zero};
pub use statistics::{StatisticsOutput, statistics};
