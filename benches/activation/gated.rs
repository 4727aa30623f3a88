//! Gated activations of bf16 rows.

use warploom::{Result, Stream, Tensor, activation, bf16};
use warploom_benches::{Cost, Harness, noise};

type Function = fn(&Stream, &mut Tensor<bf16>, &Tensor<bf16>) -> Result<()>;

pub fn benches(harness: &mut Harness) {
    let swiglu_oai: Function = |s, out, x| activation::swiglu_oai(s, out, x, 1.702, 7.0);
    // 5125 cannot be moved in pieces of 16 bytes.
    let cases: [(&str, Function, &[usize]); 4] = [
        ("silu_and_mul", activation::silu_and_mul, &[4096, 14336, 5125]),
        ("gelu_tanh_and_mul", activation::gelu_tanh_and_mul, &[11008]),
        ("gelu_and_mul", activation::gelu_and_mul, &[11008]),
        ("swiglu_oai", swiglu_oai, &[2880]),
    ];
    let tokens = harness.pick(&[1, 16, 256, 4096][..], &[1, 16]);
    for (op, function, widths) in cases {
        for &d in widths {
            for &tokens in tokens {
                let cost = Cost::bytes(tokens * 2 * d * 2, tokens * d * 2);
                harness.case(&format!("activation/{op}/bf16/{tokens}x{d}"), cost, |device, stream, set| {
                    let x = noise::<bf16>(device, stream, &[tokens, 2 * d], set)?;
                    let mut out = Tensor::<bf16>::uninit(device, &[tokens, d])?;
                    Ok(move |s: &_| function(s, &mut out, &x))
                });
            }
        }
    }
}
