//! Matrix products with weights in `[out, in]` layout, and rows of a table.

pub mod embedding;
pub mod linear;
pub(crate) mod linear_host;
pub use embedding::embedding;
pub use linear::{Epilogue, LinearOptions, LinearPath, linear, linear_with};
