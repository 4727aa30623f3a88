mod capacity;
mod fused;
mod gate;
mod permute;
mod sort;
