//! Reading from the paged cache.

use crate::kv_cache::{CacheShape, PageStrides};

/// `cache[table[p / block_size], p % block_size] * scale` for the positions `0 .. len` of one sequence, as dense
/// `[len, heads, dim]`; `scale` has one number for each head.
pub fn gather_cache(
    cache: &[f64],
    strides: PageStrides,
    shape: CacheShape,
    table: &[usize],
    len: usize,
    scale: &[f64],
) -> Vec<f64> {
    let CacheShape { block_size, heads, head_dim, .. } = shape;
    let mut out = Vec::with_capacity(len * heads * head_dim);
    for p in 0..len {
        for (h, scale) in scale.iter().enumerate().take(heads) {
            let at = |d| strides.index(table[p / block_size], h, p % block_size, d);
            out.extend((0..head_dim).map(|d| cache[at(d)] * scale));
        }
    }
    out
}
