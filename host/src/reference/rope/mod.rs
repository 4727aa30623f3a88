//! Rotary position embedding.
//!
//! `rotary_and_cache` is [`rotary()`] of queries and keys and
//! [`kv_cache::reshape_and_cache`](super::kv_cache::reshape_and_cache()).

pub mod qk_norm_rotary;
pub mod rotary;

pub use qk_norm_rotary::qk_norm_rotary;
pub use rotary::rotary;
