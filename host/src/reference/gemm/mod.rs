//! Matrix products, and rows of a table.

pub mod embedding;
pub mod linear;
pub use embedding::embedding;
pub use linear::linear;
