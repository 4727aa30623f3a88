//! Attention over a paged KV cache.

pub mod decode;
pub mod merge;
pub use decode::{DecodeOptions, DecodePath, DecodeWorkspace, decode};
pub use merge::merge;
