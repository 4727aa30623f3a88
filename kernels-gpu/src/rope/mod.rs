//! Rotary position embedding.
//!
//! The arithmetic is here whichever families are built: the cache writes rotated keys.

pub mod rotation;

#[cfg(feature = "rope")]
pub mod chunk_pairs;
#[cfg(feature = "rope")]
pub mod qk_norm_rotary;
#[cfg(feature = "rope")]
pub mod qk_norm_rotary_whole;
#[cfg(feature = "rope")]
pub mod rotary;
#[cfg(feature = "rope")]
pub mod rotary_and_cache;
#[cfg(feature = "rope")]
pub mod rotary_and_cache_twos;
