//! Mixture of experts.

pub mod gate;
pub use gate::gate;
