//! Copying blocks of a cache to pinned host memory and back, waiting for it: runs of neighbours, and single blocks.

use super::SHAPE;
use criterion::{Criterion, Throughput};
use warploom::kv_cache::{CacheLayers, CacheLayout, CacheShape, HostCache, swap_in, swap_out};
use warploom::{Stream, bf16};
use warploom_benches::Harness;

pub fn benches(harness: &mut Harness) {
    let (heads, head_dim, block_size) = SHAPE;
    let (device, blocks) = (harness.device().clone(), harness.pick(256, 16));
    harness.host("kv_cache/swap", |criterion: &mut Criterion| {
        let shape = CacheShape::new(blocks, block_size, heads, head_dim);
        let stream = Stream::new(&device).expect("a stream");
        let mut caches = CacheLayers::<bf16>::zeros(&device, 4, CacheLayout::Nhd, shape).expect("a cache");
        let mut host = HostCache::zeros(&caches, blocks).expect("host memory");
        let mut group = criterion.benchmark_group("kv_cache/swap");
        for (name, pairs) in [
            ("runs", (0..blocks / 2).map(|b| (b, b)).collect::<Vec<_>>()),
            ("single", (0..blocks / 2).map(|b| (2 * b, b)).collect()),
        ] {
            group.throughput(Throughput::Bytes((4 * 2 * pairs.len() * shape.block_len() * 2) as u64));
            group.bench_function(format!("out/{name}"), |b| {
                b.iter(|| {
                    swap_out(&stream, &mut host, &caches, &pairs).expect("a swap");
                    stream.synchronize().expect("copies");
                });
            });
            let back: Vec<_> = pairs.iter().map(|&(a, b)| (b, a)).collect();
            group.bench_function(format!("in/{name}"), |b| {
                b.iter(|| {
                    swap_in(&stream, &mut caches, &host, &back).expect("a swap");
                    stream.synchronize().expect("copies");
                });
            });
        }
        group.finish();
    });
}
