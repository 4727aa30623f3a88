//! What the tests of the cache share.

use cuda_std::{DType, Float};
use warploom::kv_cache::{CacheElement, CacheLayers, CacheLayout, CacheShape, KvCache};
use warploom::{Device, Tensor};
use warploom_tests::noise_of;

mod advance;
mod allocator;
mod copy_blocks;
mod gather_cache;
mod large;
mod layout;
mod reshape_and_cache;
mod swap;

/// Types of keys and values before they are cached.
const INPUTS: [DType; 3] = [DType::F32, DType::F16, DType::Bf16];

/// Dense rows `[tokens, heads, dim]` on the host, and the same on a device with `pad` elements before the first one and
/// between tokens.
fn rows_of<T: Float>(
    device: &Device,
    tokens: usize,
    heads: usize,
    dim: usize,
    pad: usize,
    seed: u64,
) -> (Tensor<T>, Vec<T>) {
    let rows = noise_of::<T>(tokens * heads * dim, seed);
    let stride = heads * dim + pad;
    let mut padded = vec![T::from_f32(f32::NAN); pad + tokens * stride + heads * dim];
    for t in 0..tokens {
        padded[pad + t * stride..][..heads * dim].copy_from_slice(&rows[t * heads * dim..][..heads * dim]);
    }
    let all = Tensor::from_slice(device, &padded, &[padded.len()]).unwrap();
    (all.as_strided(&[tokens, heads, dim], &[stride, dim, 1], pad).unwrap(), rows)
}

/// A cache filled with 0x55 bytes.
fn new_cache<S: CacheElement>(device: &Device, layout: CacheLayout, shape: CacheShape) -> KvCache<S> {
    new_cache_at(device, layout, shape, [0; 2])
}

/// [`new_cache`] with so many elements before the keys and before the values: one, and they begin where no chunk does.
pub(crate) fn new_cache_at<S: CacheElement>(
    device: &Device,
    layout: CacheLayout,
    shape: CacheShape,
    [key, value]: [usize; 2],
) -> KvCache<S> {
    let dense = KvCache::<S>::zeros(device, layout, shape).unwrap();
    let fill = |t: &Tensor<S>, before: usize| {
        // SAFETY: every bit pattern is an element.
        let value: S = unsafe { std::mem::transmute_copy(&[0x55u8; 8]) };
        let all = Tensor::from_slice(device, &vec![value; before + t.len()], &[before + t.len()]).unwrap();
        all.as_strided(t.shape(), t.strides(), before).unwrap()
    };
    KvCache::from_tensors(layout, fill(dense.key(), key), fill(dense.value(), value)).unwrap()
}

/// Scales of keys and of values, `n` of each: no two alike, so that none can stand in for another, and none a power of two, so that a
/// division by them is not what the kernels do.
pub(crate) fn scales_of(n: usize) -> [Vec<f32>; 2] {
    [0.0123f32, 0.0217].map(|first| (0..n).map(|h| first * 1.37f32.powi(h as i32)).collect())
}

/// Layers in which every element has different bits, whose blocks are `gap` elements apart and begin `offset` elements from where their memory
/// does; and all of that memory, keys and values of one layer after the other.
fn gapped_layers<S: CacheElement>(
    device: &Device,
    layers: usize,
    layout: CacheLayout,
    shape: CacheShape,
    gap: usize,
    offset: usize,
) -> (CacheLayers<S>, Vec<Tensor<S>>) {
    let stride = shape.block_len() + gap;
    let dense = new_cache::<S>(device, layout, shape);
    let tensor = |seed: usize| {
        let n = offset + shape.blocks * stride;
        let values: Vec<S> = (0..n)
            .map(|i| {
                let word = ((i + seed * 7919) as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 17;
                // SAFETY: every bit pattern is an element, of at most 8 bytes.
                unsafe { std::mem::transmute_copy(&word) }
            })
            .collect();
        Tensor::from_slice(device, &values, &[n]).unwrap()
    };
    let view = |dense: &Tensor<S>, all: &Tensor<S>| {
        let mut strides = dense.strides().to_vec();
        strides[0] = stride;
        all.as_strided(dense.shape(), &strides, offset).unwrap()
    };
    let memory: Vec<_> = (0..2 * layers).map(tensor).collect();
    let layers = memory
        .chunks(2)
        .map(|m| KvCache::from_tensors(layout, view(dense.key(), &m[0]), view(dense.value(), &m[1])).unwrap())
        .collect();
    (CacheLayers::new(layers).unwrap(), memory)
}

/// The bits of all tensors.
fn all_bits<S: CacheElement>(tensors: &[Tensor<S>]) -> Vec<Vec<u32>> {
    tensors.iter().map(|t| t.to_vec().unwrap().into_iter().map(bits).collect()).collect()
}

fn bits<S: CacheElement>(x: S) -> u32 {
    let mut bytes = [0u8; 4];
    // SAFETY: elements of caches are at most 4 bytes of plain bits.
    unsafe { std::ptr::copy_nonoverlapping((&raw const x).cast::<u8>(), bytes.as_mut_ptr(), size_of::<S>()) };
    u32::from_le_bytes(bytes)
}

/// The bits of all keys and values.
pub(crate) fn cache_of<S: CacheElement>(cache: &KvCache<S>) -> (Vec<u32>, Vec<u32>) {
    let of = |t: &Tensor<S>| t.to_vec().unwrap().into_iter().map(bits).collect();
    (of(cache.key()), of(cache.value()))
}

/// The bits of the nearest element to `v`, by search through all of an 8-bit type: no kernel's rounding is used.
pub(crate) fn exact_round<S: CacheElement>(v: f64) -> u32 {
    if size_of::<S>() > 1 {
        // The value came from this type.
        return bits(S::round_all([v as f32])[0]);
    }
    let value = |code: u8| value_of::<S>(code as u32);
    let mut best: Option<u8> = None;
    for code in 0..=u8::MAX {
        let d = (value(code) - v).abs();
        let better = |b: u8| {
            let best = (value(b) - v).abs();
            // A tie goes to the even code; zeros keep the sign of the value.
            d < best
                || d == best && value(code) != value(b) && code % 2 == 0
                || d == best && value(code) == value(b) && (code >= 0x80) == v.is_sign_negative()
        };
        if value(code).is_finite() && best.is_none_or(better) {
            best = Some(code);
        }
    }
    best.expect("a finite code") as u32
}

/// The number that these bits of an element are.
pub(crate) fn value_of<S: CacheElement>(bits: u32) -> f64 {
    assert!(size_of::<S>() <= 4);
    // SAFETY: an element of at most 4 bytes, the lower ones, of which every pattern is a value.
    let element: S = unsafe { std::mem::transmute_copy(&bits) };
    S::widen_all([element])[0] as f64
}
