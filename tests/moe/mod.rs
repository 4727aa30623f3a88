mod balance;
mod capacity;
mod fused;
mod gate;
mod noisy_top_k;
mod permute;
mod sort;
mod statistics;
