//! Gathering cached keys and values of eight sequences to contiguous bf16.

use super::{SHAPE, block};
use warploom::kv_cache::GatherCacheOptions;
use warploom::kv_cache::{CacheElement, CacheLayout, CacheShape, KvCache, StoreAs, gather_cache};
use warploom::{E4M3, Tensor, bf16};
use warploom_benches::{Cost, Harness};

pub fn benches(harness: &mut Harness) {
    with_cache::<bf16>(harness, CacheLayout::Nhd);
    with_cache::<bf16>(harness, CacheLayout::XSplit);
    with_cache::<E4M3>(harness, CacheLayout::Nhd);
}

fn with_cache<S: CacheElement>(harness: &mut Harness, layout: CacheLayout)
where
    bf16: StoreAs<S>,
{
    const SEQUENCES: usize = 8;
    let (heads, dim, block_size) = SHAPE;
    for &tokens in harness.pick(&[256, 4096, 32768][..], &[64]) {
        let n = tokens * 2 * heads * dim;
        let name = format!("kv_cache/gather_cache/{layout:?}_{}_bf16/{tokens}x{heads}x{dim}", S::DTYPE);
        harness.case(&name.to_lowercase(), Cost::bytes(n * size_of::<S>(), 2 * n), |device, _, _| {
            let len = tokens / SEQUENCES;
            let each = len.div_ceil(block_size);
            let shape = CacheShape::new(SEQUENCES * each, block_size, heads, dim);
            let cache = KvCache::<S>::zeros(device, layout, shape)?;
            let tables: Vec<i32> = (0..shape.blocks).map(|i| block(i, shape.blocks) as i32).collect();
            let tables = Tensor::from_slice(device, &tables, &[SEQUENCES, each])?;
            let starts: Vec<i32> = (0..=SEQUENCES).map(|s| (s * len) as i32).collect();
            let starts = Tensor::from_slice(device, &starts, &[SEQUENCES + 1])?;
            let mut key = Tensor::<bf16>::uninit(device, &[tokens, heads, dim])?;
            let mut value = Tensor::<bf16>::uninit(device, &[tokens, heads, dim])?;
            let scale = Tensor::from_slice(device, &[0.01f32], &[1])?;
            Ok(move |s: &_| {
                let mut options = GatherCacheOptions::default();
                if bf16::SCALED {
                    options = options.scales(&scale, &scale);
                }
                gather_cache(s, &mut key, &mut value, None, &cache, &tables, &starts, &options)
            })
        });
    }
}
