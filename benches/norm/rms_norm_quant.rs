//! Normalisation of bf16 rows with 8-bit results, to compare with the unquantised operations.

use warploom::norm::{RmsNormQuantOptions, rms_norm_e4m3_per_group, rms_norm_e4m3_per_token, rms_norm_i8_per_token};
use warploom::{E4M3, Tensor, bf16};
use warploom_benches::{Cost, Harness, noise};

pub fn benches(harness: &mut Harness) {
    let tokens = harness.pick(&[1, 16, 256, 1024, 4096][..], &[1, 16]);
    // 5125 cannot be moved in pieces of 16 bytes; 32768 are 64 KiB.
    for n in [1024, 4096, 8192, 5125, 32768] {
        for &tokens in tokens {
            for residual in [false, true] {
                let op = if residual { "fused_add_rms_norm" } else { "rms_norm" };
                let rows = tokens * n;
                let cost = |scales: usize| {
                    let sum = if residual { 2 * rows } else { 0 };
                    Cost::bytes(2 * (rows + n) + sum, rows + sum + 4 * scales)
                };
                let name = |variant: &str| format!("norm/{op}_{variant}/bf16/{tokens}x{n}");
                harness.case(&name("e4m3_per_token"), cost(tokens), |device, stream, set| {
                    let x = noise::<bf16>(device, stream, &[tokens, n], set)?;
                    let mut r = noise::<bf16>(device, stream, &[if residual { tokens } else { 0 }, n], set + 50)?;
                    let weight = noise::<bf16>(device, stream, &[n], set + 100)?;
                    let mut out = Tensor::<E4M3>::uninit(device, &[tokens, n])?;
                    let mut scales = Tensor::<f32>::uninit(device, &[tokens])?;
                    Ok(move |s: &_| {
                        let options = RmsNormQuantOptions::default().weight(&weight);
                        rms_norm_e4m3_per_token(
                            s,
                            &mut out,
                            &mut scales,
                            residual.then_some(&mut r),
                            &x,
                            1e-5,
                            &options,
                        )
                    })
                });
                harness.case(&name("e4m3_per_group"), cost(tokens * n.div_ceil(128)), |device, stream, set| {
                    let x = noise::<bf16>(device, stream, &[tokens, n], set)?;
                    let mut r = noise::<bf16>(device, stream, &[if residual { tokens } else { 0 }, n], set + 50)?;
                    let weight = noise::<bf16>(device, stream, &[n], set + 100)?;
                    let mut out = Tensor::<E4M3>::uninit(device, &[tokens, n])?;
                    let mut scales = Tensor::<f32>::uninit(device, &[tokens, n.div_ceil(128)])?;
                    Ok(move |s: &_| {
                        let options = RmsNormQuantOptions::default().weight(&weight);
                        rms_norm_e4m3_per_group(
                            s,
                            &mut out,
                            &mut scales,
                            residual.then_some(&mut r),
                            &x,
                            1e-5,
                            &options,
                        )
                    })
                });
                harness.case(&name("i8_per_token"), cost(tokens), |device, stream, set| {
                    let x = noise::<bf16>(device, stream, &[tokens, n], set)?;
                    let mut r = noise::<bf16>(device, stream, &[if residual { tokens } else { 0 }, n], set + 50)?;
                    let weight = noise::<bf16>(device, stream, &[n], set + 100)?;
                    let mut out = Tensor::<i8>::uninit(device, &[tokens, n])?;
                    let mut scales = Tensor::<f32>::uninit(device, &[tokens])?;
                    Ok(move |s: &_| {
                        let options = RmsNormQuantOptions::default().weight(&weight);
                        rms_norm_i8_per_token(s, &mut out, &mut scales, residual.then_some(&mut r), &x, 1e-5, &options)
                    })
                });
            }
        }
    }
}
