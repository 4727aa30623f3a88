//! The paged key/value cache: layouts, writing, copying, swapping, gathering, and the allocator of its blocks.

pub mod advance;
pub mod allocator;
pub mod copy_blocks;
pub mod gather_cache;
pub mod layout;
pub mod reshape_and_cache;
pub mod swap;
mod tile;

pub use advance::advance;
pub use allocator::{AllocatorError, BlockAllocator, Sequence, Swap};
pub use copy_blocks::{CacheLayers, check_pairs, copy_blocks};
pub use gather_cache::{GatherCacheOptions, gather_cache};
pub use layout::{
    CacheElement, CacheLayout, CacheShape, KvCache, PageStrides, Scales, StoreAs, check_slots, check_tables,
};
pub use reshape_and_cache::{ReshapeAndCacheOptions, reshape_and_cache};
pub use swap::{HostCache, SwapPath, swap_in, swap_out};
