//! Writing bf16 keys and values to a cache of the same type, of 8-bit floating-point numbers, or of integers, with a scale for all heads or one
//! for each; and f16 ones.

use super::{SHAPE, slots};
use warploom::kv_cache::ReshapeAndCacheOptions;
use warploom::kv_cache::{CacheElement, CacheLayout, CacheShape, KvCache, StoreAs, reshape_and_cache};
use warploom::{E4M3, E5M2, Float, Tensor, bf16, f16};
use warploom_benches::{Cost, Harness, noise};

pub fn benches(harness: &mut Harness) {
    with_cache::<bf16, bf16>(harness, CacheLayout::Nhd, false);
    with_cache::<bf16, bf16>(harness, CacheLayout::Hnd, false);
    with_cache::<bf16, bf16>(harness, CacheLayout::XSplit, false);
    with_cache::<bf16, E4M3>(harness, CacheLayout::Nhd, false);
    with_cache::<bf16, E4M3>(harness, CacheLayout::XSplit, false);
    with_cache::<bf16, E4M3>(harness, CacheLayout::Nhd, true);
    with_cache::<bf16, E5M2>(harness, CacheLayout::Nhd, false);
    with_cache::<bf16, i8>(harness, CacheLayout::Nhd, false);
    with_cache::<bf16, i8>(harness, CacheLayout::XSplit, false);
    with_cache::<bf16, i8>(harness, CacheLayout::Nhd, true);
    with_cache::<f16, f16>(harness, CacheLayout::Nhd, false);
}

fn with_cache<T: Float + StoreAs<S>, S: CacheElement>(harness: &mut Harness, layout: CacheLayout, per_head: bool) {
    let (heads, dim, block_size) = SHAPE;
    for &tokens in harness.pick(&[1, 16, 256, 4096][..], &[1]) {
        let n = tokens * 2 * heads * dim;
        let cost = Cost::bytes(2 * n + 8 * tokens, n * size_of::<S>());
        let (from, to, scales) = (T::DTYPE, S::DTYPE, if per_head { "_per_head" } else { "" });
        let name = format!("kv_cache/reshape_and_cache/{layout:?}_{from}_{to}{scales}/{tokens}x{heads}x{dim}");
        harness.case(&name.to_lowercase(), cost, |device, stream, set| {
            let key = noise::<T>(device, stream, &[tokens, heads, dim], set)?;
            let value = noise::<T>(device, stream, &[tokens, heads, dim], set + 50)?;
            let shape = CacheShape::new(tokens.div_ceil(block_size), block_size, heads, dim);
            let mut cache = KvCache::<S>::zeros(device, layout, shape)?;
            let slots = slots(device, tokens, shape)?;
            let n = if per_head { heads } else { 1 };
            let scale = Tensor::from_slice(device, &vec![0.01f32; n], &[n])?;
            Ok(move |s: &_| {
                let mut options = ReshapeAndCacheOptions::default();
                if T::SCALED {
                    options = options.scales(&scale, &scale);
                }
                reshape_and_cache(s, &mut cache, None, &key, &value, &slots, &options)
            })
        });
    }
}
