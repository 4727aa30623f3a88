//! Rotary position embedding.
//!
//! The arithmetic is here whichever families are built: the cache writes rotated keys.

pub mod rotation;

#[cfg(feature = "rope")]
pub mod rotary;
