//! Copying blocks of 32 KiB of keys and as many of values, in one layer and in 32.

use super::SHAPE;
use warploom::kv_cache::{CacheLayers, CacheLayout, CacheShape, copy_blocks};
use warploom::{Tensor, bf16};
use warploom_benches::{Cost, Harness};

pub fn benches(harness: &mut Harness) {
    let (heads, head_dim, block_size) = SHAPE;
    for &(layers, pairs) in harness.pick(&[(1, 16), (1, 256), (1, 2048), (32, 64)][..], &[(1, 4)]) {
        let shape = CacheShape::new(2 * pairs, block_size, heads, head_dim);
        let bytes = layers * pairs * 2 * shape.block_len() * 2;
        let name = format!("kv_cache/copy_blocks/bf16/{layers}_layers_{pairs}_pairs");
        harness.case(&name, Cost::bytes(bytes, bytes), |device, _, _| {
            let mut caches = CacheLayers::<bf16>::zeros(device, layers, CacheLayout::Nhd, shape)?;
            // Even blocks to odd ones, out of order.
            let pairs_host: Vec<i64> =
                (0..pairs as i64).flat_map(|i| [i * 7919 % pairs as i64 * 2, i * 2 + 1]).collect();
            let pairs = Tensor::from_slice(device, &pairs_host, &[pairs, 2])?;
            Ok(move |s: &_| copy_blocks(s, &mut caches, None, &pairs))
        });
    }
}
