//! Matrix products.

pub mod linear;
pub use linear::linear;
