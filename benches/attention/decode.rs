//! Decode attention of 32 query and 8 KV heads of 128 in bf16, pages of 16 tokens in a shuffled order.

use warploom::attention::{DecodeOptions, DecodeWorkspace, decode};
use warploom::kv_cache::{CacheLayout, KvCache};
use warploom::{Tensor, bf16};
use warploom_benches::{Cost, Harness, noise};

pub fn benches(harness: &mut Harness) {
    let shapes = harness.pick(
        &[(1, 512), (8, 512), (128, 512), (1, 4096), (32, 4096), (1, 32768), (128, 32768)][..],
        &[(1, 64), (4, 128)],
    );
    for &(batch, context) in shapes {
        case(harness, "32-8", batch, context, 32, 8);
    }
    if !harness.device().is_simt() {
        for (name, q_heads, kv_heads) in [("32-32", 32, 32), ("64-8", 64, 8), ("16-1", 16, 1)] {
            case(harness, name, 32, 4096, q_heads, kv_heads);
        }
    }
}

fn case(harness: &mut Harness, name: &str, batch: usize, context: usize, q_heads: usize, kv_heads: usize) {
    const DIM: usize = 128;
    const PAGE: usize = 16;
    let tokens = batch * context;
    let cost = Cost::bytes(tokens * kv_heads * DIM * 4 + batch * q_heads * DIM * 2, batch * q_heads * DIM * 2)
        .flops(4 * tokens * q_heads * DIM);
    harness.case(&format!("attention/decode/bf16/{name}/{batch}x{context}"), cost, |device, stream, set| {
        let pages = tokens / PAGE;
        let shape = [pages, PAGE, kv_heads, DIM];
        let key = noise::<bf16>(device, stream, &shape, set)?;
        let value = noise::<bf16>(device, stream, &shape, set + 100)?;
        let cache = KvCache::from_tensors(CacheLayout::Nhd, key, value)?;
        // A multiplier without a common factor scatters the pages.
        let table: Vec<i32> = (0..pages).map(|i| (i * 7919 % pages) as i32).collect();
        let table = Tensor::from_slice(device, &table, &[batch, context / PAGE])?;
        let lens = Tensor::from_slice(device, &vec![context as i32; batch], &[batch])?;
        let q = noise::<bf16>(device, stream, &[batch, q_heads, DIM], set + 200)?;
        let mut out = Tensor::<bf16>::uninit(device, &[batch, q_heads, DIM])?;
        let mut workspace = DecodeWorkspace::new(device, batch, 1, q_heads, kv_heads, DIM, context)?;
        let options = DecodeOptions::default();
        Ok(move |s: &_| decode(s, &mut out, None, &q, &cache, &table, &lens, &options, &mut workspace))
    });
}
