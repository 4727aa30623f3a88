//! Matrix products, and rows of a table.

pub mod embedding;
pub mod linear;
pub mod linear_quant;
pub use embedding::embedding;
pub use linear::linear;
pub use linear_quant::dequantise;
