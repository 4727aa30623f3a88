//! Attention over a paged KV cache.

pub mod decode;
pub use decode::{DecodeOptions, DecodePath, DecodeWorkspace, decode};
