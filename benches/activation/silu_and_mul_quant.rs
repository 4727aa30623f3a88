//! `silu_and_mul` of bf16 rows with e4m3 results, to compare with the unquantised operation.

use warploom::activation::{silu_and_mul_e4m3_per_group, silu_and_mul_e4m3_per_tensor, silu_and_mul_e4m3_per_token};
use warploom::{E4M3, Tensor, bf16};
use warploom_benches::{Cost, Harness, noise};

pub fn benches(harness: &mut Harness) {
    let tokens = harness.pick(&[1, 16, 256, 4096][..], &[1, 16]);
    for d in [4096, 14336] {
        for &tokens in tokens {
            let cost = |scales: usize| Cost::bytes(tokens * 2 * d * 2, tokens * d + 4 * scales);
            let name = |variant: &str| format!("activation/silu_and_mul_e4m3_{variant}/bf16/{tokens}x{d}");
            harness.case(&name("per_tensor"), cost(0), |device, stream, set| {
                let x = noise::<bf16>(device, stream, &[tokens, 2 * d], set)?;
                let scale = Tensor::from_slice(device, &[0.01f32], &[1])?;
                let mut out = Tensor::<E4M3>::uninit(device, &[tokens, d])?;
                Ok(move |s: &_| silu_and_mul_e4m3_per_tensor(s, &mut out, &x, &scale))
            });
            harness.case(&name("per_token"), cost(tokens), |device, stream, set| {
                let x = noise::<bf16>(device, stream, &[tokens, 2 * d], set)?;
                let mut out = Tensor::<E4M3>::uninit(device, &[tokens, d])?;
                let mut scales = Tensor::<f32>::uninit(device, &[tokens])?;
                Ok(move |s: &_| silu_and_mul_e4m3_per_token(s, &mut out, &mut scales, &x))
            });
            harness.case(&name("per_group"), cost(tokens * d / 128), |device, stream, set| {
                let x = noise::<bf16>(device, stream, &[tokens, 2 * d], set)?;
                let mut out = Tensor::<E4M3>::uninit(device, &[tokens, d])?;
                let mut scales = Tensor::<f32>::uninit(device, &[tokens, d / 128])?;
                Ok(move |s: &_| silu_and_mul_e4m3_per_group(s, &mut out, &mut scales, &x))
            });
        }
    }
}
