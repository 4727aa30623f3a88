//! Rotary position embedding.

pub mod rotary;
pub use rotary::rotary;
