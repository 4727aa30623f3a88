//! The paged key/value cache.

pub mod reshape_and_cache;
pub use reshape_and_cache::reshape_and_cache;
