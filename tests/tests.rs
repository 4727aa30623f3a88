//! The test suite: one binary, a file for each operation, each test on every device there is.

mod absurd;
mod activation;
mod attention;
mod conformance;
mod device;
mod ep;
mod far;
mod gemm;
mod generate;
mod kv_cache;
mod moe;
mod norm;
mod rope;
mod rows;
mod sampling;
