mod capacity;
mod fused;
mod fused_quant;
mod gate;
mod permute;
mod sort;
