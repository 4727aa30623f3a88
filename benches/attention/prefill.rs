//! Causal prefill in bf16 over pages of 16 tokens in a shuffled order, most with 32 query and 8 KV heads of 128.

use cuda_std::{E4M3, Float};
use warploom::attention::{PrefillOptions, PrefillPath, PrefillWorkspace, prefill};
use warploom::kv_cache::{CacheElement, CacheLayout, CacheShape, KvCache, Scales};
use warploom::{Tensor, bf16};
use warploom_benches::{Cost, Harness, cache_shapes, noise};

pub fn benches(harness: &mut Harness) {
    let auto = ("", PrefillPath::Auto);
    if harness.device().is_simt() {
        return case(harness, auto, [2, 40, 40], (4, 2), 64);
    }
    for (batch, len) in [(1, 4096), (8, 4096), (1, 32768)] {
        case(harness, auto, [batch, len, len], (32, 8), 128);
    }
    // Chunks of a long prompt.
    case(harness, auto, [8, 512, 8192], (32, 8), 128);
    case(harness, auto, [32, 1024, 1024], (32, 8), 128);
    for heads in [(32, 32), (64, 8), (16, 1)] {
        case(harness, auto, [8, 4096, 4096], heads, 128);
    }
    for dim in [64, 96, 256] {
        case(harness, auto, [8, 4096, 4096], (32, 8), dim);
    }
    // Short prompts, and a short chunk of a long one.
    for shape in [[1, 128, 128], [1, 512, 512], [8, 256, 256]] {
        case(harness, auto, shape, (32, 8), 128);
    }
    for shape in [[1, 4096, 4096], [8, 4096, 4096], [8, 512, 8192]] {
        case_over::<E4M3>(harness, auto, shape, (32, 8), 128);
    }
    let mma = ("mma-", PrefillPath::Mma);
    for (shape, dim) in [
        ([8, 4096, 4096], 128),
        ([32, 1024, 1024], 128),
        ([1, 512, 512], 128),
        ([8, 4096, 4096], 64),
        ([8, 4096, 4096], 96),
        ([8, 4096, 4096], 256),
    ] {
        case(harness, mma, shape, (32, 8), dim);
    }
    for (shape, dim) in [
        ([1, 4096, 4096], 128),
        ([8, 4096, 4096], 128),
        ([32, 1024, 1024], 128),
        ([8, 4096, 4096], 64),
        ([8, 4096, 4096], 256),
    ] {
        case_over::<E4M3>(harness, mma, shape, (32, 8), dim);
    }
    for batch in [1, 8] {
        case_in::<bf16>(harness, CacheLayout::XSplit, mma, [batch, 4096, 4096], (32, 8), 128);
    }
    case_in::<E4M3>(harness, CacheLayout::XSplit, mma, [1, 4096, 4096], (32, 8), 128);
    // Short chunks whose keys are divided among blocks.
    let split = ("split-", PrefillPath::Auto);
    for (shape, heads) in [
        ([1, 64, 8192], (32, 8)),
        ([4, 64, 8192], (32, 8)),
        ([1, 256, 8192], (32, 8)),
        ([1, 64, 1024], (32, 8)),
        ([1, 16, 32768], (32, 8)),
        ([1, 512, 8192], (8, 1)),
    ] {
        case(harness, auto, shape, heads, 128);
        case(harness, split, shape, heads, 128);
    }
    for name in ["mma-", "mma-split-"] {
        case(harness, (name, PrefillPath::Mma), [1, 64, 8192], (32, 8), 128);
    }
}

fn case(harness: &mut Harness, path: (&str, PrefillPath), shape: [usize; 3], heads: (usize, usize), dim: usize) {
    case_over::<bf16>(harness, path, shape, heads, dim);
}

/// Over an NHD cache of `S`.
fn case_over<S: CacheElement + Float>(
    harness: &mut Harness,
    path: (&str, PrefillPath),
    shape: [usize; 3],
    heads: (usize, usize),
    dim: usize,
) {
    case_in::<S>(harness, CacheLayout::Nhd, path, shape, heads, dim);
}

/// `[batch, chunk, len]`: query tokens and keys of each sequence, over a cache of `S`.
fn case_in<S: CacheElement + Float>(
    harness: &mut Harness,
    layout: CacheLayout,
    (name, path): (&str, PrefillPath),
    [batch, chunk, len]: [usize; 3],
    (q_heads, kv_heads): (usize, usize),
    dim: usize,
) {
    const PAGE: usize = 16;
    let rows = batch * chunk * q_heads;
    let kv = batch * len * kv_heads * dim;
    // Keys that are seen: half of the chunk's own, up to the diagonal.
    let seen = len as f64 - chunk as f64 / 2.0;
    let cost = Cost::bytes(2 * rows * dim + 2 * size_of::<S>() * kv, 2 * rows * dim)
        .flops((4.0 * seen * (rows * dim) as f64) as usize);
    let shape = if chunk == len { format!("{batch}x{len}") } else { format!("{batch}x{chunk}of{len}") };
    let heads = format!("{q_heads}-{kv_heads}-{dim}");
    let narrow = size_of::<S>() == 1;
    let types = if narrow { format!("bf16-{}", S::DTYPE) } else { "bf16".into() };
    let of_layout = if layout == CacheLayout::XSplit { "-xsplit" } else { "" };
    harness.case(
        &format!("attention/prefill/{name}{types}{of_layout}/{heads}/{shape}"),
        cost,
        |device, stream, set| {
            let pages = (batch * len).div_ceil(PAGE);
            let (key, value) = cache_shapes(layout, CacheShape::new(pages, PAGE, kv_heads, dim), size_of::<S>());
            let key = noise::<S>(device, stream, &key, set)?;
            let value = noise::<S>(device, stream, &value, set + 100)?;
            let cache = KvCache::from_tensors(layout, key, value)?;
            // A multiplier without a common factor scatters the pages.
            let table: Vec<i32> = (0..batch * len.div_ceil(PAGE)).map(|i| (i * 7919 % pages) as i32).collect();
            let table = Tensor::from_slice(device, &table, &[batch, len.div_ceil(PAGE)])?;
            let starts: Vec<i32> = (0..=batch).map(|i| (i * chunk) as i32).collect();
            let starts = Tensor::from_slice(device, &starts, &[batch + 1])?;
            let lens = Tensor::from_slice(device, &vec![len as i32; batch], &[batch])?;
            let q = noise::<bf16>(device, stream, &[batch * chunk, q_heads, dim], set + 200)?;
            let mut out = Tensor::<bf16>::uninit(device, &[batch * chunk, q_heads, dim])?;
            let one = Tensor::from_slice(device, &[1.0f32], &[1])?;
            let splitting = name.ends_with("split-");
            let mut workspace =
                if splitting { PrefillWorkspace::splitting(device)? } else { PrefillWorkspace::new(device)? };
            Ok(move |s: &_| {
                let mut options = PrefillOptions::default().path(path);
                options.scales = narrow.then_some(Scales::new(&one, &one));
                prefill(s, &mut out, None, &q, &cache, &table, &starts, &lens, &options, &mut workspace)
            })
        },
    );
}
