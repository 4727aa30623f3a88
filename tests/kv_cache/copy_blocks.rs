//! Any block size and alignment, all layers; pairs out of range; and what is refused.

use super::{all_bits, bits, gapped_layers};
use proptest::prelude::*;
use warploom::kv_cache::{CacheElement, CacheLayers, CacheLayout, CacheShape, KvCache, check_pairs};
use warploom::{Device, E4M3, Error, Graph, Stream, Tensor, bf16, kv_cache, reference};
use warploom_tests::{on_every_device, property};

fn flat<S: CacheElement>(caches: &CacheLayers<S>) -> Vec<Vec<u32>> {
    let of = |t: &Tensor<S>| t.to_vec().unwrap().into_iter().map(bits).collect();
    caches.layers().iter().flat_map(|l| [of(l.key()), of(l.value())]).collect()
}

fn check<S: CacheElement>(cases: u32) {
    let dims = (1usize..4, 1usize..40, 1usize..3, prop::sample::select(vec![46usize, 64, 1, 128]));
    let places = (0usize..3, 0usize..3, any::<bool>(), proptest::collection::vec(0i64..20, 0..8));
    property(cases, (dims, places), |device, stream, ((n, block_size, heads, head_dim), (gap, offset, nhd, from))| {
        let shape = CacheShape::new(20, block_size, heads, head_dim);
        let layout = if nhd { CacheLayout::Nhd } else { CacheLayout::Hnd };
        let (gap, offset) = ([0, 3, 16][gap], [0, 1, 16][offset]);
        let (mut caches, memory) = gapped_layers::<S>(device, n, layout, shape, gap, offset);
        let (mut want, mut memory_want) = (flat(&caches), all_bits(&memory));
        // From even blocks to odd ones, and a few that are out of range.
        let mut pairs: Vec<(i64, i64)> = from.iter().enumerate().map(|(i, f)| (f & !1, 2 * i as i64 + 1)).collect();
        pairs.extend([(-1, 3), (0, 20), (i64::MAX, 1), (2, i64::MIN)]);
        let host: Vec<i64> = pairs.iter().flat_map(|&(a, b)| [a, b]).collect();
        let on_device = Tensor::from_slice(device, &host, &[pairs.len(), 2]).unwrap();
        let mut status = Tensor::<u32>::zeros(device, &[1]).unwrap();
        kv_cache::copy_blocks(stream, &mut caches, Some(&mut status), &on_device).unwrap();
        for tensor in &mut want {
            // `to_vec` leaves the gaps out.
            reference::kv_cache::copy_blocks(tensor, &pairs, 20, shape.block_len(), shape.block_len());
        }
        // And nothing between the blocks has changed.
        for tensor in &mut memory_want {
            let (block_len, stride) = (shape.block_len(), shape.block_len() + gap);
            reference::kv_cache::copy_blocks(&mut tensor[offset..], &pairs, 20, block_len, stride);
        }
        prop_assert_eq!(flat(&caches), want);
        prop_assert_eq!(all_bits(&memory), memory_want);
        prop_assert_eq!(status.to_vec().unwrap(), [4]);
        Ok(())
    });
}

#[test]
fn matches_the_reference() {
    check::<bf16>(16);
    check::<E4M3>(16);
    check::<f32>(12);
}

#[test]
fn several_pieces_of_a_block_in_a_graph() {
    on_every_device(|device, stream| {
        device.preload(&["kv_cache"]).unwrap();
        // 40 KiB a block: two pieces and a half.
        let shape = CacheShape::new(4, 16, 10, 128);
        let (mut caches, _) = gapped_layers::<bf16>(device, 2, CacheLayout::XSplit, shape, 0, 0);
        let mut want = flat(&caches);
        let mut pairs = Tensor::from_slice(device, &[-1i64; 4], &[2, 2]).unwrap();
        let graph = Graph::capture(stream, |s| kv_cache::copy_blocks(s, &mut caches, None, &pairs)).unwrap();
        pairs.copy_from_slice(&[0, 3, 1, 2]).unwrap();
        graph.launch(stream).unwrap();
        for tensor in &mut want {
            reference::kv_cache::copy_blocks(tensor, &[(0, 3), (1, 2)], 4, shape.block_len(), shape.block_len());
        }
        assert_eq!(flat(&caches), want);
    });
}

#[test]
fn refuses_what_it_cannot_do() {
    let device = &Device::simt();
    let stream = &Stream::new(device).unwrap();
    let shape = CacheShape::new(4, 8, 2, 16);
    let cache = |layout| KvCache::<bf16>::zeros(device, layout, shape).unwrap();
    let mut caches = CacheLayers::new(vec![cache(CacheLayout::Nhd)]).unwrap();
    let mut run = |pairs: &Tensor<i64>| kv_cache::copy_blocks(stream, &mut caches, None, pairs);
    let e = run(&Tensor::zeros(device, &[3, 3]).unwrap());
    assert!(matches!(e, Err(Error::Shape { arg: "pairs", .. })));
    let e = run(&Tensor::zeros(device, &[12]).unwrap().as_strided(&[3, 2], &[4, 2], 0).unwrap());
    assert!(matches!(e, Err(Error::Stride { arg: "pairs", .. })));
    let e = run(&Tensor::zeros(&Device::simt(), &[3, 2]).unwrap());
    assert!(matches!(e, Err(Error::WrongDevice { arg: "pairs", .. })));
    assert!(run(&Tensor::zeros(device, &[0, 2]).unwrap()).is_ok());

    let wide = CacheShape::new(0, 8192, 8, 1 << 13);
    let mut none = CacheLayers::<bf16>::zeros(device, 1, CacheLayout::Nhd, wide).unwrap();
    let e = kv_cache::copy_blocks(stream, &mut none, None, &Tensor::zeros(device, &[1, 2]).unwrap());
    assert!(matches!(e, Err(Error::Value { arg: "caches", .. })), "{e:?}");

    assert!(matches!(CacheLayers::<bf16>::new(vec![]), Err(Error::Value { .. })));
    let e = CacheLayers::new(vec![cache(CacheLayout::Nhd), cache(CacheLayout::Hnd)]);
    assert!(matches!(e, Err(Error::Value { .. })));
    let other = KvCache::zeros(device, CacheLayout::Nhd, CacheShape::new(5, 8, 2, 16)).unwrap();
    assert!(matches!(CacheLayers::new(vec![cache(CacheLayout::Nhd), other]), Err(Error::Shape { .. })));
    let other = KvCache::zeros(&Device::simt(), CacheLayout::Nhd, shape).unwrap();
    assert!(matches!(CacheLayers::new(vec![cache(CacheLayout::Nhd), other]), Err(Error::WrongDevice { .. })));
    let sparse = || {
        let t = Tensor::<bf16>::zeros(device, &[4 * 8 * 2 * 32]).unwrap();
        t.as_strided(&[4, 8, 2, 16], &[512, 64, 32, 1], 0).unwrap()
    };
    let dense = || Tensor::<bf16>::zeros(device, &[4, 8, 2, 16]).unwrap();
    for (key, value, what) in [(sparse(), sparse(), "keys of layer 1"), (dense(), sparse(), "values of layer 1")] {
        let odd = KvCache::from_tensors(CacheLayout::Nhd, key, value).unwrap();
        let e = CacheLayers::new(vec![cache(CacheLayout::Nhd), odd]).unwrap_err();
        assert!(matches!(e, Error::Stride { arg: "layers", .. }) && e.to_string().contains(what), "{e}");
        assert!(e.to_string().contains("[512, 64, 32, 1]"), "{e}");
    }
}

#[test]
fn what_is_copied_lies_in_memory_of_its_own() {
    let device = &Device::simt();
    let stream = &Stream::new(device).unwrap();
    let tensor = || Tensor::<f32>::zeros(device, &[4, 2, 8, 2, 16]).unwrap();
    let of = |key, value| KvCache::from_tensors(CacheLayout::Nhd, key, value).unwrap();
    let part = |t: &Tensor<f32>, i: usize| t.as_strided(&[4, 8, 2, 16], &[512, 32, 16, 1], 256 * i).unwrap();
    // Keys and values of a block beside each other are apart, and so are layers.
    let both = [tensor(), tensor()];
    let layers = || both.iter().map(|t| of(part(t, 0), part(t, 1))).collect::<Vec<_>>();
    let mut caches = CacheLayers::new(layers()).unwrap();
    let e = CacheLayers::new(vec![of(part(&both[0], 0), part(&both[0], 0))]).unwrap_err().to_string();
    let expected = "CacheLayers::new: `layers` must be keys and values in memory of their own, but is some of layer 0 in that of layer 0";
    assert_eq!(e, expected);
    let e = CacheLayers::new(layers().into_iter().chain(layers().pop()).collect()).unwrap_err().to_string();
    assert!(e.ends_with("is some of layer 2 in that of layer 1"), "{e}");
    // Nor is the counter one of the elements.
    let pairs = Tensor::from_slice(device, &[0i64, 1], &[1, 2]).unwrap();
    let inside = both[1].reshape(&[2048]).unwrap().narrow(0, 700, 1).unwrap();
    let e = kv_cache::copy_blocks(stream, &mut caches, Some(&mut inside.cast().unwrap()), &pairs);
    assert!(matches!(e, Err(Error::Overlap { first: "caches", second: "status", .. })), "{e:?}");
    let mut status = Tensor::zeros(device, &[1]).unwrap();
    kv_cache::copy_blocks(stream, &mut caches, Some(&mut status), &pairs).unwrap();
}

#[test]
fn nobody_writes_the_addresses() {
    on_every_device(|device, stream| {
        let caches = CacheLayers::<f32>::zeros(device, 1, CacheLayout::Nhd, CacheShape::new(2, 1, 1, 4)).unwrap();
        let before = caches.addresses().to_vec().unwrap();
        let mut clone = caches.addresses().clone();
        assert!(matches!(clone.copy_from_slice(&[0; 2]), Err(Error::ReadOnly { .. })));
        assert!(matches!(stream.fill_bytes(&mut clone, 0), Err(Error::ReadOnly { .. })));
        let mut view = caches.addresses().narrow(1, 0, 1).unwrap();
        assert!(matches!(stream.fill_bytes(&mut view, 0), Err(Error::ReadOnly { .. })));
        assert_eq!(caches.addresses().to_vec().unwrap(), before);
    });
}

#[test]
fn pairs_are_checked_on_the_host() {
    assert!(check_pairs(&[(0, 1), (0, 2)], 3, 3, true).is_ok());
    for (pairs, within_one) in
        [(vec![(3, 1)], false), (vec![(0, 3)], false), (vec![(0, 1), (2, 1)], false), (vec![(0, 1), (1, 2)], true)]
    {
        assert!(matches!(check_pairs(&pairs, 3, 3, within_one), Err(Error::Value { arg: "pairs", .. })));
    }
    assert!(check_pairs(&[(0, 1), (1, 2)], 3, 3, false).is_ok());
}
