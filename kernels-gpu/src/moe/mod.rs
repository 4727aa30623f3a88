//! Mixture of experts.
pub mod expert_activation;
pub mod fused;
pub mod fused_fma;
pub mod fused_reduce;
pub mod fused_stream;
pub mod gate;
pub mod pairs;
pub mod sort;
