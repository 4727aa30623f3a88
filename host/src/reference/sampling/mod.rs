//! Token sampling.

pub mod philox;
pub mod top_k_top_p;
pub use philox::philox4x32_10;
pub use top_k_top_p::{Adjust, Filters, Ranked, adjust, rank, sample};
