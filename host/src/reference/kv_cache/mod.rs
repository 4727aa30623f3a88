//! The paged key/value cache.

pub mod advance;
pub mod copy_blocks;
pub mod gather_cache;
pub mod reshape_and_cache;

pub use advance::advance;
pub use copy_blocks::copy_blocks;
pub use gather_cache::gather_cache;
pub use reshape_and_cache::reshape_and_cache;
