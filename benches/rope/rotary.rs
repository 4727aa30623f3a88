//! Rotary embedding of bf16 queries and keys, in both pairings and with angles of both types; and of f16 ones.

use super::{HEADS, POSITIONS, positions};
use warploom::rope::RotaryOptions;
use warploom::rope::{Pairing, rotary};
use warploom::{Float, bf16, f16};
use warploom_benches::{Cost, Harness, noise};

pub fn benches(harness: &mut Harness) {
    for pairing in [Pairing::Neox, Pairing::Gptj] {
        with_angles::<bf16, bf16>(harness, pairing);
        with_angles::<bf16, f32>(harness, pairing);
    }
    with_angles::<f16, f32>(harness, Pairing::Neox);
}

fn with_angles<T: Float, C: Float>(harness: &mut Harness, pairing: Pairing) {
    let (heads, kv_heads, dim) = HEADS;
    for &tokens in harness.pick(&[1, 16, 256, 4096][..], &[1]) {
        let moved = tokens * (heads + kv_heads) * dim * 2;
        let cost = Cost::bytes(moved + tokens * (dim * size_of::<C>() + 8), moved);
        let (rows, angles) = (T::DTYPE, C::DTYPE);
        let name = format!("rope/rotary/{pairing:?}_{rows}_angles_{angles}/{tokens}x{heads}+{kv_heads}x{dim}");
        harness.case(&name.to_lowercase(), cost, |device, stream, set| {
            let mut query = noise::<T>(device, stream, &[tokens, heads, dim], set)?;
            let mut key = noise::<T>(device, stream, &[tokens, kv_heads, dim], set + 50)?;
            // Not true angles: numbers that shrink whatever is rotated, so that nothing overflows.
            let angles = noise::<C>(device, stream, &[POSITIONS, dim], set + 100)?;
            let positions = positions(device, tokens)?;
            Ok(move |s: &_| {
                rotary(
                    s,
                    &mut query,
                    Some(&mut key),
                    None,
                    &positions,
                    &angles,
                    &RotaryOptions::default().pairing(pairing),
                )
            })
        });
    }
}
