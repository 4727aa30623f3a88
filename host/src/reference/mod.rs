//! What each operation means: plain, slow definitions in `f64`, used as oracles by the tests.
//!
//! Inputs are what the kernel reads, widened exactly; results are `f64`, before the kernel's one rounding.

pub mod activation;
pub mod attention;
pub mod ep;
pub mod gemm;
pub mod kv_cache;
pub mod moe;
pub mod norm;
pub mod quantise;
pub mod rope;
pub mod sampling;
