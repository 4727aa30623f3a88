//! Activation functions.

pub mod gated;
pub mod plain;

pub use gated::gated;
pub use plain::plain;
