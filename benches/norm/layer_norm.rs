//! Layer normalisation of bf16 rows, with weight and bias.

use warploom::norm::layer_norm;
use warploom::{Tensor, bf16};
use warploom_benches::{Cost, Harness, noise};

pub fn benches(harness: &mut Harness) {
    let tokens = harness.pick(&[1, 16, 256, 4096][..], &[1, 16]);
    for n in [4096, 5125, 8192, 16384, 32768] {
        for &tokens in tokens {
            let cost = Cost::bytes((tokens + 2) * n * 2, tokens * n * 2);
            harness.case(&format!("norm/layer_norm/bf16/{tokens}x{n}"), cost, |device, stream, set| {
                let x = noise::<bf16>(device, stream, &[tokens, n], set)?;
                let weight = noise::<bf16>(device, stream, &[n], set + 100)?;
                let bias = noise::<bf16>(device, stream, &[n], set + 200)?;
                let mut out = Tensor::<bf16>::uninit(device, &[tokens, n])?;
                Ok(move |s: &_| layer_norm(s, &mut out, &x, Some(&weight), Some(&bias), 1e-5))
            });
        }
    }
}
