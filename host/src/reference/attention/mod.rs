//! Attention over a paged KV cache.

pub mod decode;
pub mod prefill;
pub use decode::{Decoded, Query, decode};
pub use prefill::prefill;
pub mod merge;
pub use merge::merge;
