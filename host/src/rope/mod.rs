//! Rotary position embedding: rotating queries and keys, and the cos/sin cache that says by how much.

pub mod cache;
pub mod rotary;

pub use cache::{Scaling, cache};
pub use rotary::{Pairing, rotary};
