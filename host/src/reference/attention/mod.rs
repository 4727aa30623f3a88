//! Attention over a paged KV cache.

pub mod decode;
pub mod merge;
pub use decode::{Decoded, Query, decode};
pub use merge::merge;
