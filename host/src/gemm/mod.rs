//! Matrix products with weights in `[out, in]` layout.

pub mod linear;
pub use linear::{Epilogue, LinearOptions, LinearPath, linear, linear_with};
