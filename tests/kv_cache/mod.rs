//! What the tests of the cache share.

use cuda_std::{DType, Float};
use warploom::kv_cache::{CacheElement, CacheLayout, CacheShape, KvCache};
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
    let empty = KvCache::<S>::zeros(device, layout, shape).unwrap();
    let fill = |t: &Tensor<S>| {
        // SAFETY: every bit pattern is an element.
        let value: S = unsafe { std::mem::transmute_copy(&[0x55u8; 8]) };
        Tensor::from_slice(device, &vec![value; t.len()], t.shape()).unwrap()
    };
    KvCache::from_tensors(layout, fill(empty.key()), fill(empty.value())).unwrap()
}

fn bits<S: CacheElement>(x: S) -> u32 {
    let mut bytes = [0u8; 4];
    // SAFETY: elements of caches are at most 4 bytes of plain bits.
    unsafe { std::ptr::copy_nonoverlapping((&raw const x).cast::<u8>(), bytes.as_mut_ptr(), size_of::<S>()) };
    u32::from_le_bytes(bytes)
}

/// The bits of all keys and values.
fn cache_of<S: CacheElement>(cache: &KvCache<S>) -> (Vec<u32>, Vec<u32>) {
    let of = |t: &Tensor<S>| t.to_vec().unwrap().into_iter().map(bits).collect();
    (of(cache.key()), of(cache.value()))
}

/// The bits of the nearest element to `v`, by search through all of an 8-bit type: no kernel's rounding is used.
fn exact_round<S: CacheElement>(v: f64) -> u32 {
    if size_of::<S>() > 1 {
        // The value came from this type.
        return bits(S::round_all([v as f32])[0]);
    }
    let value = |code: u8| {
        // SAFETY: an 8-bit element, of which every pattern is a value.
        let element: S = unsafe { std::mem::transmute_copy(&code) };
        S::widen_all([element])[0] as f64
    };
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
