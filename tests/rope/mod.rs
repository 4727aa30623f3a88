mod cache;
mod qk_norm_rotary;
mod rotary;
mod rotary_and_cache;
