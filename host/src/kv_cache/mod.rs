//! The paged key/value cache: layouts, writing, copying, swapping, gathering, and the allocator of its blocks.

pub mod layout;
pub mod reshape_and_cache;

pub use layout::{CacheElement, CacheLayout, CacheShape, KvCache, PageStrides, Scales, StoreAs, check_slots};
pub use reshape_and_cache::reshape_and_cache;
