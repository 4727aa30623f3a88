//! Merge of partial results of 32 heads of 128 in bf16: two parts (a shared prefix and the rest), and eight.

use warploom::attention::merge;
use warploom::{Tensor, bf16};
use warploom_benches::{Cost, Harness, noise};

pub fn benches(harness: &mut Harness) {
    const HEADS: usize = 32;
    const DIM: usize = 128;
    let tokens = harness.pick(&[1, 128, 4096][..], &[1, 16]);
    for (&tokens, parts) in tokens.iter().flat_map(|t| [(t, 2), (t, 8)]) {
        let rows = tokens * HEADS;
        let cost = Cost::bytes(parts * rows * (DIM * 2 + 4), rows * (DIM * 2 + 4));
        harness.case(&format!("attention/merge/bf16/{parts}x{tokens}"), cost, |device, stream, set| {
            let part = |i: usize| {
                let out = noise::<bf16>(device, stream, &[tokens, HEADS, DIM], set + 100 * i)?;
                Ok((out, noise::<f32>(device, stream, &[tokens, HEADS], set + 100 * i + 50)?))
            };
            let inputs = (0..parts).map(part).collect::<warploom::Result<Vec<_>>>()?;
            let mut out = Tensor::<bf16>::uninit(device, &[tokens, HEADS, DIM])?;
            let mut lse = Tensor::<f32>::uninit(device, &[tokens, HEADS])?;
            Ok(move |s: &_| {
                let parts: Vec<_> = inputs.iter().map(|(out, lse)| (out, lse)).collect();
                merge(s, &mut out, Some(&mut lse), &parts)
            })
        });
    }
}
