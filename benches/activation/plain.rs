//! Plain activations of bf16 rows.

use warploom::{Result, Stream, Tensor, activation, bf16};
use warploom_benches::{Cost, Harness, noise};

type Function = fn(&Stream, &mut Tensor<bf16>, &Tensor<bf16>) -> Result<()>;

pub fn benches(harness: &mut Harness) {
    let cases: [(&str, Function); 7] = [
        ("gelu_new", activation::gelu_new),
        ("gelu_quick", activation::gelu_quick),
        ("gelu", activation::gelu),
        ("relu2", activation::relu2),
        ("silu", activation::silu),
        ("gelu_fast", activation::gelu_fast),
        ("gelu_tanh", activation::gelu_tanh),
    ];
    let tokens = harness.pick(&[1, 16, 256, 4096][..], &[1, 16]);
    for (op, function) in cases {
        // A dense tensor is one row, whatever its rows are.
        let odd = (op == "silu").then_some((tokens[tokens.len() - 1], 5125));
        for (tokens, d) in tokens.iter().map(|&tokens| (tokens, 11008)).chain(odd) {
            let cost = Cost::bytes(tokens * d * 2, tokens * d * 2);
            harness.case(&format!("activation/{op}/bf16/{tokens}x{d}"), cost, |device, stream, set| {
                let x = noise::<bf16>(device, stream, &[tokens, d], set)?;
                let mut out = Tensor::<bf16>::uninit(device, &[tokens, d])?;
                Ok(move |s: &_| function(s, &mut out, &x))
            });
        }
    }
}
