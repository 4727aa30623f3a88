//! Attention over a paged KV cache.

pub mod decode;
pub mod prefill;
pub use decode::{DecodeOptions, DecodePath, DecodeShape, DecodeSplit, DecodeWorkspace, decode};
pub use prefill::{PrefillOptions, PrefillPath, PrefillWorkspace, prefill};
pub mod merge;
pub use merge::merge;
