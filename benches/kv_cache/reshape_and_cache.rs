//! Writing bf16 keys and values to a cache of the same type or of e4m3.

use super::{SHAPE, slots};
use warploom::kv_cache::ReshapeAndCacheOptions;
use warploom::kv_cache::{CacheElement, CacheLayout, CacheShape, KvCache, StoreAs, reshape_and_cache};
use warploom::{E4M3, Tensor, bf16};
use warploom_benches::{Cost, Harness, noise};

pub fn benches(harness: &mut Harness) {
    with_cache::<bf16>(harness, CacheLayout::Nhd);
    with_cache::<bf16>(harness, CacheLayout::Hnd);
    with_cache::<bf16>(harness, CacheLayout::XSplit);
    with_cache::<E4M3>(harness, CacheLayout::Nhd);
    with_cache::<E4M3>(harness, CacheLayout::XSplit);
}

fn with_cache<S: CacheElement>(harness: &mut Harness, layout: CacheLayout)
where
    bf16: StoreAs<S>,
{
    let (heads, dim, block_size) = SHAPE;
    for &tokens in harness.pick(&[1, 16, 256, 4096][..], &[1]) {
        let n = tokens * 2 * heads * dim;
        let cost = Cost::bytes(2 * n + 8 * tokens, n * size_of::<S>());
        let name = format!("kv_cache/reshape_and_cache/{layout:?}_bf16_{}/{tokens}x{heads}x{dim}", S::DTYPE);
        harness.case(&name.to_lowercase(), cost, |device, stream, set| {
            let key = noise::<bf16>(device, stream, &[tokens, heads, dim], set)?;
            let value = noise::<bf16>(device, stream, &[tokens, heads, dim], set + 50)?;
            let shape = CacheShape::new(tokens.div_ceil(block_size), block_size, heads, dim);
            let mut cache = KvCache::<S>::zeros(device, layout, shape)?;
            let slots = slots(device, tokens, shape)?;
            let scale = Tensor::from_slice(device, &[0.01f32], &[1])?;
            Ok(move |s: &_| {
                let mut options = ReshapeAndCacheOptions::default();
                if bf16::SCALED {
                    options = options.scales(&scale, &scale);
                }
                reshape_and_cache(s, &mut cache, None, &key, &value, &slots, &options)
            })
        });
    }
}
