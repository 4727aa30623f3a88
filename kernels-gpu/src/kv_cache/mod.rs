//! The paged key/value cache.
//!
//! Layout and element types are here whichever families are built: attention and the rotary embedding use them too.

mod element;
pub mod layout;
pub mod tile;

pub use element::{CacheElement, StoreAs};

#[cfg(feature = "rope")]
pub(crate) use element::scaled;

#[cfg(feature = "kv_cache")]
pub mod advance;
#[cfg(feature = "kv_cache")]
pub mod copy_blocks;
#[cfg(feature = "kv_cache")]
pub mod gather_cache;
#[cfg(feature = "kv_cache")]
pub mod gather_cache_tiles;
#[cfg(feature = "kv_cache")]
pub mod reshape_and_cache;
#[cfg(feature = "kv_cache")]
pub mod reshape_and_cache_tiles;
#[cfg(feature = "kv_cache")]
pub mod swap;
