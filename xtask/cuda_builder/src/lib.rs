//! Builds Rust kernel crates to PTX.
