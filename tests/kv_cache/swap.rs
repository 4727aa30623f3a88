//! Blocks go to the host and come back, by copies of runs.

use super::{bits, rows_of};
use proptest::prelude::*;
use warploom::kv_cache::ReshapeAndCacheOptions;
use warploom::kv_cache::swap::{Run, runs};
use warploom::kv_cache::{CacheLayers, CacheLayout, CacheShape, HostCache};
use warploom::{Device, Error, Graph, Stream, Tensor, bf16, kv_cache};
use warploom_tests::on_every_device;

const SHAPE: CacheShape = CacheShape::new(6, 8, 2, 16);

/// Two layers with all slots written.
fn filled(device: &Device, stream: &Stream, layout: CacheLayout) -> CacheLayers<bf16> {
    let mut caches = CacheLayers::<bf16>::zeros(device, 2, layout, SHAPE).unwrap();
    for l in 0..2 {
        let n = SHAPE.slots();
        let (key, _) = rows_of::<bf16>(device, n, 2, 16, 0, 10 + l as u64);
        let (value, _) = rows_of::<bf16>(device, n, 2, 16, 0, 20 + l as u64);
        let slots: Vec<i64> = (0..n as i64).collect();
        let slots = Tensor::from_slice(device, &slots, &[n]).unwrap();
        let mut layer = caches.layer_mut(l).unwrap();
        kv_cache::reshape_and_cache(stream, &mut layer, None, &key, &value, &slots, &ReshapeAndCacheOptions::default())
            .unwrap();
    }
    caches
}

fn block(caches: &CacheLayers<bf16>, layer: usize, block: usize) -> (Vec<u32>, Vec<u32>) {
    let cache = &caches.layers()[layer];
    let of = |t: &Tensor<bf16>| t.narrow(0, block, 1).unwrap().to_vec().unwrap().into_iter().map(bits).collect();
    (of(cache.key()), of(cache.value()))
}

#[test]
fn out_and_in_again() {
    on_every_device(|device, stream| {
        for layout in [CacheLayout::XSplit, CacheLayout::Nhd] {
            let mut caches = filled(device, stream, layout);
            let mut host = HostCache::zeros(&caches, 5).unwrap();
            let before: Vec<_> = (0..6).map(|b| [block(&caches, 0, b), block(&caches, 1, b)]).collect();
            kv_cache::swap_out(stream, &mut host, &caches, &[(4, 2), (1, 0), (5, 3)]).unwrap();
            for (device_block, host_block) in [(4, 2), (1, 0), (5, 3)] {
                for (layer, want) in before[device_block].iter().enumerate() {
                    let (k, v) = host.block(layer, host_block).unwrap();
                    let got = (k.iter().copied().map(bits).collect(), v.iter().copied().map(bits).collect());
                    assert_eq!(got, *want);
                }
            }
            assert!(host.block(0, 1).unwrap().0.iter().all(|v| v.to_bits() == 0));
            kv_cache::swap_in(stream, &mut caches, &host, &[(2, 0), (0, 4)]).unwrap();
            stream.synchronize().unwrap();
            let from = [4, 1, 2, 3, 1, 5];
            for (b, (layer, from)) in (0..6).flat_map(|b| (0..2).map(move |l| (b, (l, from[b])))) {
                assert_eq!(block(&caches, layer, b), before[from][layer], "block {b}");
            }
        }
    });
}

#[test]
fn dropping_the_host_cache_waits() {
    on_every_device(|device, stream| {
        let caches = filled(device, stream, CacheLayout::Nhd);
        for _ in 0..20 {
            let mut host = HostCache::zeros(&caches, 6).unwrap();
            let all: Vec<_> = (0..6).map(|b| (b, b)).collect();
            kv_cache::swap_out(stream, &mut host, &caches, &all).unwrap();
        }
    });
}

#[test]
fn refuses_what_it_cannot_do() {
    on_every_device(|device, stream| {
        let caches = filled(device, stream, CacheLayout::Nhd);
        let mut host = HostCache::zeros(&caches, 3).unwrap();
        let mut out = |pairs: &[(usize, usize)]| kv_cache::swap_out(stream, &mut host, &caches, pairs);
        assert!(matches!(out(&[(6, 0)]), Err(Error::Value { arg: "pairs", .. })));
        assert!(matches!(out(&[(5, 3)]), Err(Error::Value { arg: "pairs", .. })));
        assert!(matches!(out(&[(5, 1), (4, 1)]), Err(Error::Value { arg: "pairs", .. })));
        assert!(out(&[]).is_ok());
        let e = Graph::capture(stream, |s| kv_cache::swap_out(s, &mut host, &caches, &[(0, 0)]));
        assert!(matches!(e, Err(Error::Capture(_))));
        // A stream that cannot be waited for now is waited for later, and until then nothing is shown.
        kv_cache::swap_out(stream, &mut host, &caches, &[(0, 0)]).unwrap();
        let captured = Graph::capture(stream, |_| {
            for _ in 0..2 {
                assert!(matches!(host.wait(), Err(Error::Capture(_))));
                assert!(matches!(host.block(0, 0), Err(Error::Capture(_))));
            }
            Ok(())
        });
        captured.unwrap();
        host.block(0, 0).unwrap();
        let one = CacheLayers::<bf16>::zeros(device, 1, CacheLayout::Nhd, SHAPE).unwrap();
        let e = kv_cache::swap_out(stream, &mut host, &one, &[(0, 0)]);
        assert!(matches!(e, Err(Error::Value { arg: "host", .. })));
        let mut other = CacheLayers::<bf16>::zeros(device, 2, CacheLayout::Hnd, SHAPE).unwrap();
        let e = kv_cache::swap_in(stream, &mut other, &host, &[(0, 0)]);
        assert!(matches!(e, Err(Error::Value { arg: "host", .. })));
        assert!(matches!(host.block(0, 3), Err(Error::Value { .. })));
        // As many blocks as make nothing of 64 bits, and as many as make little.
        for blocks in [1usize << 63, usize::MAX / caches.shape().block_len() + 2, usize::MAX] {
            let e = HostCache::zeros(&caches, blocks).map(drop);
            assert!(matches!(e, Err(Error::Value { arg: "blocks", .. })), "{blocks}: {e:?}");
        }
        let elsewhere = CacheLayers::<bf16>::zeros(&Device::simt(), 2, CacheLayout::Nhd, SHAPE).unwrap();
        let e = kv_cache::swap_out(stream, &mut host, &elsewhere, &[(0, 0)]);
        assert!(matches!(e, Err(Error::WrongDevice { .. })));
    });
}

proptest! {
    #[test]
    fn runs_are_the_pairs(pairs in proptest::collection::btree_map(0usize..30, 0usize..1000, 0..20), shift in 0usize..5) {
        // Some neighbours, some not, in no order.
        let pairs: Vec<(usize, usize)> =
            pairs.into_iter().map(|(f, t)| (f, if t % 3 == 0 { 2000 + 31 * t } else { f + shift })).rev().collect();
        let made = runs(&pairs);
        let mut covered: Vec<_> = made.iter().flat_map(|r| (0..r.len).map(|i| (r.from + i, r.to + i))).collect();
        covered.sort_unstable();
        let mut sorted = pairs.clone();
        sorted.sort_unstable();
        prop_assert_eq!(covered, sorted);
        // No two that would be one.
        let joins = |w: &[Run]| w[0].from + w[0].len == w[1].from && w[0].to + w[0].len == w[1].to;
        prop_assert!(!made.windows(2).any(joins));
    }
}
