//! Mixture of experts.
pub mod capacity;
pub mod expert_activation;
pub mod fused;
pub mod fused_fma;
pub mod fused_quant_rows;
pub mod fused_quant_tile;
pub mod fused_quant_wgmma;
pub mod fused_reduce;
pub mod fused_stream;
pub mod fused_tile;
pub mod fused_wgmma;
pub mod gate;
pub mod items;
pub mod pairs;
pub mod permute;
pub mod sort;
