//! Normalisation of the heads of queries and keys in a fused bf16 tensor, in place.

use warploom::bf16;
use warploom::norm::qk_norm;
use warploom_benches::{Cost, Harness, noise};

pub fn benches(harness: &mut Harness) {
    let tokens = harness.pick(&[1, 16, 256, 4096][..], &[1, 16]);
    for (q_heads, kv_heads, n) in [(32, 8, 128), (40, 40, 128), (32, 8, 80)] {
        for &tokens in tokens {
            let (heads, all) = ((q_heads + kv_heads) * n, (q_heads + 2 * kv_heads) * n);
            let cost = Cost::bytes(2 * (tokens * heads + 2 * n), 2 * tokens * heads);
            let name = format!("norm/qk_norm/bf16/{tokens}x{q_heads}+{kv_heads}x{n}");
            harness.case(&name, cost, |device, stream, set| {
                let qkv = noise::<bf16>(device, stream, &[tokens, all], set)?;
                let mut q = qkv.as_strided(&[tokens, q_heads, n], &[all, n, 1], 0)?;
                let mut k = qkv.as_strided(&[tokens, kv_heads, n], &[all, n, 1], q_heads * n)?;
                let q_weight = noise::<bf16>(device, stream, &[n], set + 100)?;
                let k_weight = noise::<bf16>(device, stream, &[n], set + 200)?;
                Ok(move |s: &_| qk_norm(s, &mut q, &mut k, Some(&q_weight), Some(&k_weight), 1e-6))
            });
        }
    }
}
