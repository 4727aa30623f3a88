//! Token sampling.

pub mod top_k_top_p;
pub use top_k_top_p::{LogProbs, PerRow, SamplingAlgorithm, SamplingOptions, SamplingWorkspace, TokenId, top_k_top_p};
