//! Writing to the paged cache.

use crate::kv_cache::CacheShape;
use crate::kv_cache::PageStrides;

/// `cache[slots[t]] = rows[t]` for the keys or the values, before they are rounded to the cache's type: `rows` is `[tokens, heads, dim]`,
/// dense. With `scale`, one number for each head, it is `rows[t] * (1 / scale)`, of which row, reciprocal and product are in `f32`.
/// Slots outside of the cache are skipped; of equal slots the last one stays.
pub fn reshape_and_cache(
    cache: &mut [f64],
    strides: PageStrides,
    shape: CacheShape,
    rows: &[f64],
    slots: &[i64],
    scale: Option<&[f32]>,
) {
    let CacheShape { block_size, heads, head_dim, .. } = shape;
    for (t, &slot) in slots.iter().enumerate() {
        if slot < 0 || slot as usize >= shape.slots() {
            continue;
        }
        let (block, at) = (slot as usize / block_size, slot as usize % block_size);
        for h in 0..heads {
            for d in 0..head_dim {
                let row = rows[(t * heads + h) * head_dim + d];
                let scaled = scale.map_or(row, |scale| f64::from(row as f32 * (1.0 / scale[h])));
                cache[strides.index(block, h, at, d)] = scaled;
            }
        }
    }
}
