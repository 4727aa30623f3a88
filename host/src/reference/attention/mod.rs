//! Attention over a paged KV cache.

pub mod decode;
pub use decode::{Decoded, Query, decode};
