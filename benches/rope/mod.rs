mod qk_norm_rotary;
mod rotary;
mod rotary_and_cache;

use warploom::{Device, Result, Tensor};
use warploom_benches::Harness;

/// Query heads, key/value heads, elements of a head.
const HEADS: (usize, usize, usize) = (32, 8, 128);
/// Rows of the cos/sin cache.
const POSITIONS: usize = 8192;

pub fn benches(harness: &mut Harness) {
    rotary::benches(harness);
    qk_norm_rotary::benches(harness);
    rotary_and_cache::benches(harness);
}

/// Positions of a prompt.
fn positions(device: &Device, tokens: usize) -> Result<Tensor<i64>> {
    let positions: Vec<i64> = (0..tokens as i64).map(|t| t % POSITIONS as i64).collect();
    Tensor::from_slice(device, &positions, &[tokens])
}
