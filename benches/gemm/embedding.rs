//! Rows of a table of a vocabulary in bf16: tokens x width of vocabulary.

use warploom::gemm::embedding;
use warploom::{Tensor, bf16};
use warploom_benches::{Cost, Harness, noise};

pub fn benches(harness: &mut Harness) {
    let tables = harness.pick(&[(128_256, 4096), (129_280, 7168)][..], &[(100, 64)]);
    let tokens = harness.pick(&[1, 64, 512, 4096, 16384][..], &[16]);
    for &(rows, width) in tables {
        // One for all: it is larger than the cache.
        let mut table = None;
        for &tokens in tokens {
            let bytes = tokens * width * 2;
            let name = format!("gemm/embedding/bf16/{tokens}x{width}-{rows}");
            harness.case(&name, Cost::bytes(bytes + tokens * 4, bytes), |device, stream, set| {
                if table.is_none() {
                    table = Some(noise::<bf16>(device, stream, &[rows, width], 1)?);
                }
                let table = table.clone().expect("made above");
                let places = noise::<f32>(device, stream, &[tokens], set)?.to_vec()?;
                let ids: Vec<_> = places.iter().map(|v| ((v + 1.0) / 2.0 * rows as f32) as i32).collect();
                let ids = Tensor::from_slice(device, &ids, &[tokens])?;
                let mut out = Tensor::<bf16>::uninit(device, &[tokens, width])?;
                Ok(move |s: &_| embedding(s, &mut out, &table, &ids))
            });
        }
    }
}
