//! Writing to the paged cache.

use crate::kv_cache::CacheShape;
use crate::kv_cache::PageStrides;

/// `cache[slots[t]] = rows[t] / scale` for the keys or the values: `rows` is `[tokens, heads, dim]`, dense; `scale` has
/// one number for each head. Slots outside of the cache are skipped; of equal slots the last one stays.
pub fn reshape_and_cache(
    cache: &mut [f64],
    strides: PageStrides,
    shape: CacheShape,
    rows: &[f64],
    slots: &[i64],
    scale: &[f64],
) {
    let CacheShape { block_size, heads, head_dim, .. } = shape;
    for (t, &slot) in slots.iter().enumerate() {
        if slot < 0 || slot as usize >= shape.slots() {
            continue;
        }
        let (block, at) = (slot as usize / block_size, slot as usize % block_size);
        for h in 0..heads {
            for d in 0..head_dim {
                cache[strides.index(block, h, at, d)] = rows[(t * heads + h) * head_dim + d] / scale[h];
            }
        }
    }
}
