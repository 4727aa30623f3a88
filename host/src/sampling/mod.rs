//! Token sampling.

pub mod top_k_top_p;
pub use top_k_top_p::{Algorithm, LogProbs, Options, PerRow, TokenId, Workspace, top_k_top_p};
