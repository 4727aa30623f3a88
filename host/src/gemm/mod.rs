//! Matrix products with weights in `[out, in]` layout, and rows of a table.

pub mod embedding;
pub mod linear;
pub mod linear_few;
pub(crate) mod linear_host;
pub mod linear_quant;
pub mod linear_quant_few;
pub mod linear_quant_wgmma;
pub mod linear_wgmma;
pub mod quantise;
pub use embedding::embedding;
pub use linear::{Epilogue, LinearOptions, LinearPath, linear, linear_with};
pub use linear_quant::{LinearQuantOptions, LinearQuantPath, Quantised, linear_quant};
pub use linear_quant_wgmma::LinearQuantTile;
pub use linear_wgmma::WgmmaTile;
pub use quantise::{QuantisedElement, quantise_blocks, quantise_groups, quantise_rows};
