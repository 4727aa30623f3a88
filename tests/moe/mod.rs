mod fused;
mod gate;
mod sort;
