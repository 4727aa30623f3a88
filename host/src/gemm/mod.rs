//! Matrix products with weights in `[out, in]` layout, and rows of a table.

pub mod embedding;
pub mod linear;
pub(crate) mod linear_host;
pub mod linear_wgmma;
pub use embedding::embedding;
pub use linear::{Epilogue, LinearOptions, LinearPath, linear, linear_with};
pub use linear_wgmma::WgmmaTile;
