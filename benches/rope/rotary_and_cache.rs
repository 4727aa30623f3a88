//! Fused rotary embedding and cache write of bf16 queries, keys and values.

use super::{HEADS, POSITIONS, positions};
use crate::kv_cache::slots;
use warploom::kv_cache::{CacheElement, CacheLayout, CacheShape, KvCache, StoreAs};
use warploom::rope::RotaryAndCacheOptions;
use warploom::rope::{Pairing, rotary_and_cache};
use warploom::{E4M3, Tensor, bf16};
use warploom_benches::{Cost, Harness, noise};

pub fn benches(harness: &mut Harness) {
    with_cache::<bf16>(harness, CacheLayout::Nhd);
    with_cache::<bf16>(harness, CacheLayout::XSplit);
    with_cache::<E4M3>(harness, CacheLayout::Nhd);
}

fn with_cache<S: CacheElement>(harness: &mut Harness, layout: CacheLayout)
where
    bf16: StoreAs<S>,
{
    let (heads, kv_heads, dim) = HEADS;
    for &tokens in harness.pick(&[1, 16, 256, 4096][..], &[1]) {
        let read = tokens * (heads + 2 * kv_heads) * dim * 2 + tokens * (dim * 4 + 16);
        let cost = Cost::bytes(read, tokens * heads * dim * 2 + tokens * 2 * kv_heads * dim * size_of::<S>());
        let cache = S::DTYPE;
        let name = format!("rope/rotary_and_cache/{layout:?}_bf16_{cache}/{tokens}x{heads}+{kv_heads}x{dim}");
        harness.case(&name.to_lowercase(), cost, |device, stream, set| {
            let mut query = noise::<bf16>(device, stream, &[tokens, heads, dim], set)?;
            let key = noise::<bf16>(device, stream, &[tokens, kv_heads, dim], set + 50)?;
            let value = noise::<bf16>(device, stream, &[tokens, kv_heads, dim], set + 70)?;
            let angles = noise::<f32>(device, stream, &[POSITIONS, dim], set + 100)?;
            let shape = CacheShape::new(tokens.div_ceil(16), 16, kv_heads, dim);
            let mut cache = KvCache::<S>::zeros(device, layout, shape)?;
            let (positions, slots) = (positions(device, tokens)?, slots(device, tokens, shape)?);
            let scale = Tensor::from_slice(device, &[0.01f32], &[1])?;
            Ok(move |s: &_| {
                let mut options = RotaryAndCacheOptions::default();
                if bf16::SCALED {
                    options = options.scales(&scale, &scale);
                }
                let p = Pairing::Neox;
                rotary_and_cache(
                    s,
                    &mut query,
                    &mut cache,
                    None,
                    &key,
                    &value,
                    &positions,
                    &angles,
                    &slots,
                    &options.pairing(p),
                )
            })
        });
    }
}
