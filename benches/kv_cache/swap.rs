//! Copying blocks of a cache to pinned host memory and back, waiting for it: runs of neighbours, and single blocks, of 32 KiB and of 4 KiB,
//! by copy engines and by the kernel.

use super::SHAPE;
use criterion::{Criterion, Throughput};
use warploom::kv_cache::{CacheLayers, CacheLayout, CacheShape, HostCache, SwapPath, swap_in, swap_out};
use warploom::{Stream, bf16};
use warploom_benches::Harness;

/// Layers of the caches.
const LAYERS: usize = 4;

pub fn benches(harness: &mut Harness) {
    let (heads, head_dim, block_size) = SHAPE;
    let (device, blocks) = (harness.device().clone(), harness.pick(256, 16));
    harness.host("kv_cache/swap", |criterion: &mut Criterion| {
        let mut group = criterion.benchmark_group("kv_cache/swap");
        for (size, heads) in [("32k", heads), ("4k", heads / 8)] {
            let shape = CacheShape::new(blocks, block_size, heads, head_dim);
            let stream = Stream::new(&device).expect("a stream");
            let mut caches = CacheLayers::<bf16>::zeros(&device, LAYERS, CacheLayout::Nhd, shape).expect("a cache");
            let mut host = HostCache::zeros(&caches, blocks).expect("host memory");
            for (name, pairs) in [
                ("runs", (0..blocks / 2).map(|b| (b, b)).collect::<Vec<_>>()),
                ("single", (0..blocks / 2).map(|b| (2 * b, b)).collect()),
            ] {
                group.throughput(Throughput::Bytes((LAYERS * 2 * pairs.len() * shape.block_len() * 2) as u64));
                let back: Vec<_> = pairs.iter().map(|&(a, b)| (b, a)).collect();
                for (by, path) in
                    [("auto", None), ("engine", Some(SwapPath::CopyEngine)), ("kernel", Some(SwapPath::Kernel))]
                {
                    host.set_path(path);
                    group.bench_function(format!("out/{size}/{name}/{by}"), |b| {
                        b.iter(|| {
                            swap_out(&stream, &mut host, &caches, &pairs).expect("a swap");
                            stream.synchronize().expect("copies");
                        });
                    });
                    group.bench_function(format!("in/{size}/{name}/{by}"), |b| {
                        b.iter(|| {
                            swap_in(&stream, &mut caches, &host, &back).expect("a swap");
                            stream.synchronize().expect("copies");
                        });
                    });
                }
            }
        }
        group.finish();
    });
}
