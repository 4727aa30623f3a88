//! Rotary position embedding: rotating queries and keys, and the cos/sin cache that says by how much.

pub mod cache;
pub mod qk_norm_rotary;
pub mod rotary;
pub mod rotary_and_cache;

pub use cache::{Scaling, cache};
pub use qk_norm_rotary::{QkNormRotaryOptions, qk_norm_rotary};
pub use rotary::{Pairing, RotaryOptions, rotary};
pub use rotary_and_cache::{RotaryAndCacheOptions, rotary_and_cache};
