//! Fused head normalisation and rotary embedding of bf16 queries and keys.

use super::{HEADS, POSITIONS, positions};
use warploom::bf16;
use warploom::rope::{QkNormRotaryOptions, qk_norm_rotary};
use warploom_benches::{Cost, Harness, noise};

pub fn benches(harness: &mut Harness) {
    let (heads, kv_heads, dim) = HEADS;
    for &tokens in harness.pick(&[1, 16, 256, 4096][..], &[1]) {
        let moved = tokens * (heads + kv_heads) * dim * 2;
        let cost = Cost::bytes(moved + tokens * (dim * 4 + 8), moved);
        let name = format!("rope/qk_norm_rotary/neox_bf16/{tokens}x{heads}+{kv_heads}x{dim}");
        harness.case(&name, cost, |device, stream, set| {
            let mut query = noise::<bf16>(device, stream, &[tokens, heads, dim], set)?;
            let mut key = noise::<bf16>(device, stream, &[tokens, kv_heads, dim], set + 50)?;
            let weight = noise::<bf16>(device, stream, &[dim], set + 150)?;
            let angles = noise::<f32>(device, stream, &[POSITIONS, dim], set + 100)?;
            let positions = positions(device, tokens)?;
            Ok(move |s: &_| {
                let options = QkNormRotaryOptions::default().weights(&weight, &weight);
                qk_norm_rotary(s, &mut query, Some(&mut key), None, &positions, &angles, 1e-6, &options)
            })
        });
    }
}
