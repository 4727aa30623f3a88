//! Decode attention with heads of 128, pages of 16 tokens in a shuffled order: bf16 queries over bf16 and e4m3 caches, NHD
//! and x-split.

use cuda_std::E4M3;
use warploom::attention::{DecodeOptions, DecodeShape, DecodeWorkspace, decode};
use warploom::kv_cache::{CacheElement, CacheLayout, CacheShape, KvCache, Scales};
use warploom::{Device, Result, Stream, Tensor, bf16};
use warploom_benches::{Cost, Harness, cache_shapes, noise, tiled};

pub fn benches(harness: &mut Harness) {
    let shapes = harness.pick(
        &[(1, 512), (8, 512), (128, 512), (1, 4096), (32, 4096), (1, 32768), (128, 32768)][..],
        &[(1, 64), (4, 128)],
    );
    for &(batch, context) in shapes {
        case(harness, "bf16/32-8", CacheLayout::Nhd, batch, context, [32, 8], noise::<bf16>);
        case(harness, "bf16/32-8/xsplit", CacheLayout::XSplit, batch, context, [32, 8], noise::<bf16>);
    }
    if harness.device().is_simt() {
        return;
    }
    for (name, q_heads, kv_heads) in [("32-32", 32, 32), ("64-8", 64, 8), ("16-1", 16, 1)] {
        case(harness, &format!("bf16/{name}"), CacheLayout::Nhd, 32, 4096, [q_heads, kv_heads], noise::<bf16>);
    }
    // As many bytes as 32 x 4096 of 8 KV heads.
    case(harness, "bf16/16-1", CacheLayout::Nhd, 256, 4096, [16, 1], noise::<bf16>);
    for (batch, context) in [(1, 4096), (32, 4096), (1, 32768), (128, 32768)] {
        case(harness, "e4m3/32-8", CacheLayout::Nhd, batch, context, [32, 8], e4m3_noise);
        case(harness, "e4m3/32-8/xsplit", CacheLayout::XSplit, batch, context, [32, 8], e4m3_noise);
    }
}

/// As [`noise`].
fn e4m3_noise(device: &Device, stream: &Stream, shape: &[usize], seed: usize) -> Result<Tensor<E4M3>> {
    let mut state = (seed as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        E4M3::round((state >> 40) as f32 / (1u64 << 23) as f32 - 1.0)
    };
    tiled(device, stream, &(0..65_521).map(|_| next()).collect::<Vec<_>>(), shape)
}

/// Makes a tensor of a shape, other contents for another number.
type Fill<S> = fn(&Device, &Stream, &[usize], usize) -> Result<Tensor<S>>;

fn case<S: CacheElement>(
    harness: &mut Harness,
    name: &str,
    layout: CacheLayout,
    batch: usize,
    context: usize,
    [q_heads, kv_heads]: [usize; 2],
    fill: Fill<S>,
) {
    const DIM: usize = 128;
    const PAGE: usize = 16;
    let tokens = batch * context;
    let rows = batch * q_heads * DIM * 2;
    let cost = Cost::bytes(tokens * kv_heads * DIM * 2 * size_of::<S>() + rows, rows).flops(4 * tokens * q_heads * DIM);
    harness.case(&format!("attention/decode/{name}/{batch}x{context}"), cost, move |device, stream, set| {
        let pages = tokens / PAGE;
        let (keys, values) = cache_shapes(layout, CacheShape::new(pages, PAGE, kv_heads, DIM), size_of::<S>());
        let key = fill(device, stream, &keys, set)?;
        let value = fill(device, stream, &values, set + 100)?;
        let cache = KvCache::from_tensors(layout, key, value)?;
        // A multiplier without a common factor scatters the pages.
        let table: Vec<i32> = (0..pages).map(|i| (i * 7919 % pages) as i32).collect();
        let table = Tensor::from_slice(device, &table, &[batch, context / PAGE])?;
        let lens = Tensor::from_slice(device, &vec![context as i32; batch], &[batch])?;
        let q = noise::<bf16>(device, stream, &[batch, q_heads, DIM], set + 200)?;
        let mut out = Tensor::<bf16>::uninit(device, &[batch, q_heads, DIM])?;
        let mut workspace = DecodeWorkspace::new(device, DecodeShape::new(batch, q_heads, kv_heads, DIM, context))?;
        let scale = Tensor::from_slice(device, &[1.0f32], &[1])?;
        Ok(move |s: &_| {
            let scaled = size_of::<S>() == 1;
            let mut options = DecodeOptions::default();
            options.scales = scaled.then_some(Scales::new(&scale, &scale));
            decode(s, &mut out, None, &q, &cache, &table, &lens, &options, &mut workspace)
        })
    });
}
