//! Root-mean-square normalisation of bf16 rows (and of f16 ones of one width), alone and with a residual (in place), and what one call costs the host.

use warploom::norm::rms_norm::{self, fused_add_rms_norm, rms_norm};
use warploom::{DType, Float, Tensor, bf16, f16};
use warploom_benches::{Cost, Harness, noise};

pub fn benches(harness: &mut Harness) {
    let tokens = harness.pick(&[1, 16, 256, 1024, 4096][..], &[1, 16]);
    // 5125 cannot be moved in pieces of 16 bytes; 32768 are 64 KiB.
    for n in [1024, 4096, 8192, 5125, 16384, 32768] {
        alone::<bf16>(harness, tokens, n);
    }
    alone::<f16>(harness, tokens, 4096);
    for n in [1024, 4096, 8192, 5125, 32768] {
        for &tokens in tokens {
            let cost = Cost::bytes((2 * tokens + 1) * n * 2, 2 * tokens * n * 2);
            harness.case(&format!("norm/fused_add_rms_norm/bf16/{tokens}x{n}"), cost, |device, stream, set| {
                let mut x = noise::<bf16>(device, stream, &[tokens, n], set)?;
                let mut residual = noise::<bf16>(device, stream, &[tokens, n], set + 50)?;
                let weight = noise::<bf16>(device, stream, &[n], set + 100)?;
                Ok(move |s: &_| fused_add_rms_norm(s, &mut x, &mut residual, Some(&weight), 1e-5))
            });
        }
    }
    harness.overhead("norm/rms_norm/overhead/L2", |device, stream| {
        let x = noise::<bf16>(device, stream, &[1, 256], 0)?;
        let mut out = Tensor::<bf16>::uninit(device, &[1, 256])?;
        Ok(move |s: &_| rms_norm(s, &mut out, &x, None, 1e-5))
    });
    harness.overhead("norm/rms_norm/overhead/L1", |device, stream| {
        let x = noise::<bf16>(device, stream, &[1, 256], 0)?;
        let mut out = Tensor::<bf16>::uninit(device, &[1, 256])?;
        Ok(move |s: &_| {
            let args = rms_norm::Args {
                x: x.as_ptr().cast(),
                weight: std::ptr::null(),
                out: out.as_mut_ptr().cast(),
                rows: 1,
                n: 256,
                x_stride: 256,
                out_stride: 256,
                weight_offset: 0.0,
                eps: 1e-5,
            };
            // SAFETY: both tensors hold one row and live as long as the closure, which outlives the work.
            unsafe { rms_norm::launch(s, DType::Bf16, &args) }
        })
    });
}

fn alone<T: Float>(harness: &mut Harness, tokens: &[usize], n: usize) {
    for &tokens in tokens {
        let cost = Cost::bytes((tokens + 1) * n * 2, tokens * n * 2);
        harness.case(&format!("norm/rms_norm/{}/{tokens}x{n}", T::DTYPE), cost, |device, stream, set| {
            let x = noise::<T>(device, stream, &[tokens, n], set)?;
            let weight = noise::<T>(device, stream, &[n], set + 100)?;
            let mut out = Tensor::<T>::uninit(device, &[tokens, n])?;
            Ok(move |s: &_| rms_norm(s, &mut out, &x, Some(&weight), 1e-5))
        });
    }
}
