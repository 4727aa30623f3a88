//! Gated activations of bf16 rows, and of f16 ones for the first.

use warploom::{Float, Result, Stream, Tensor, activation, bf16, f16};
use warploom_benches::{Cost, Harness, noise};

type Function<T> = fn(&Stream, &mut Tensor<T>, &Tensor<T>) -> Result<()>;

pub fn benches(harness: &mut Harness) {
    let swiglu_oai: Function<bf16> = |s, out, x| activation::swiglu_oai(s, out, x, 1.702, 7.0);
    let silu_and_mul_clamp: Function<bf16> = |s, out, x| activation::silu_and_mul_clamp(s, out, x, 7.0);
    let fatrelu_and_mul: Function<bf16> = |s, out, x| activation::fatrelu_and_mul(s, out, x, 0.01);
    // 5125 cannot be moved in pieces of 16 bytes.
    let cases: [(&str, Function<bf16>, &[usize]); 7] = [
        ("silu_and_mul", activation::silu_and_mul, &[4096, 14336, 5125]),
        ("gelu_tanh_and_mul", activation::gelu_tanh_and_mul, &[11008]),
        ("gelu_and_mul", activation::gelu_and_mul, &[11008]),
        ("swiglu_oai", swiglu_oai, &[2880]),
        ("mul_and_silu", activation::mul_and_silu, &[11008]),
        ("silu_and_mul_clamp", silu_and_mul_clamp, &[11008]),
        ("fatrelu_and_mul", fatrelu_and_mul, &[11008]),
    ];
    for (op, function, widths) in cases {
        of(harness, op, function, widths);
    }
    of::<f16>(harness, "silu_and_mul", activation::silu_and_mul, &[14336]);
}

fn of<T: Float>(harness: &mut Harness, op: &str, function: Function<T>, widths: &[usize]) {
    for &d in widths {
        for &tokens in harness.pick(&[1, 16, 256, 4096][..], &[1, 16]) {
            let cost = Cost::bytes(tokens * 2 * d * 2, tokens * d * 2);
            harness.case(&format!("activation/{op}/{}/{tokens}x{d}", T::DTYPE), cost, |device, stream, set| {
                let x = noise::<T>(device, stream, &[tokens, 2 * d], set)?;
                let mut out = Tensor::<T>::uninit(device, &[tokens, d])?;
                Ok(move |s: &_| function(s, &mut out, &x))
            });
        }
    }
}
