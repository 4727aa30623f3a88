//! Any layout, any type, any strides; slots that are padding, wrong, or used twice; and what is refused.

use super::{INPUTS, cache_of, exact_round, new_cache_at, rows_of, scales_of, value_of};
use cuda_std::{DType, E4M3, E5M2, Float};
use proptest::prelude::*;
use warploom::kv_cache::ReshapeAndCacheOptions;
use warploom::kv_cache::{CacheElement, CacheLayout, CacheShape, KvCache, PageStrides, StoreAs};
use warploom::{Device, Error, Graph, Stream, Tensor, bf16, f16, kv_cache, reference};
use warploom_tests::{noise_of, on_every_device, property, widen};

#[derive(Clone, Debug)]
struct Case {
    layout: CacheLayout,
    shape: CacheShape,
    tokens: usize,
    per_head: bool,
    /// Extra elements between rows, and before the first.
    pad: usize,
    wide_slots: bool,
    /// Elements before the cache's keys and values.
    cache_at: [usize; 2],
    seed: u64,
}

fn case() -> impl Strategy<Value = Case> {
    let layout = prop::sample::select(vec![CacheLayout::XSplit, CacheLayout::Nhd, CacheLayout::Hnd]);
    let dims = prop::sample::select(vec![46usize, 64, 80, 128, 1, 16]);
    let sizes = prop::sample::select(vec![8usize, 16, 32, 128, 5]);
    (layout, dims, sizes, 1usize..4, 0usize..24, (any::<bool>(), 0usize..3, any::<bool>()), any::<u64>()).prop_map(
        |(layout, head_dim, block_size, heads, tokens, (per_head, pad, wide_slots), seed)| {
            // x-split needs multiples of 16 bytes, whatever the type.
            let head_dim = if layout == CacheLayout::XSplit { head_dim.next_multiple_of(16) } else { head_dim };
            let shape = CacheShape::new(5, block_size, heads, head_dim);
            // Misaligned by one element, and with rows that are.
            let pad = [0, 1, 16][pad];
            let cache_at = [[0, 0], [0, 0], [1, 0], [0, 1]][(seed >> 20) as usize % 4];
            Case { layout, shape, tokens, per_head, pad, wide_slots, cache_at, seed }
        },
    )
}

/// Neighbouring slots with holes, all different, some -1, some outside.
fn slots(case: &Case) -> Vec<i64> {
    let count = case.shape.slots() as i64;
    let step = [1, 1, 3, 7][case.seed as usize % 4];
    let start = (case.seed >> 8) as i64 % count;
    (0..case.tokens as i64)
        .map(|t| match (t + case.seed as i64 % 11).rem_euclid(9) {
            0 => -1,
            1 => [count, count + 5, -2, i32::MAX as i64][t as usize % 4],
            _ if t >= count => -1,
            _ => (start + t * step) % count,
        })
        .scan(std::collections::HashSet::new(), |seen, s| {
            Some(if seen.insert(s) || s >= count || s < 0 { s } else { -1 })
        })
        .collect()
}

fn check_case<T: Float + StoreAs<S>, S: CacheElement>(device: &Device, stream: &Stream, case: &Case) {
    let CacheShape { heads, head_dim, .. } = case.shape;
    let scaled = T::DTYPE != S::DTYPE;
    let slots = slots(case);
    let (key, key_host) = rows_of::<T>(device, case.tokens, heads, head_dim, case.pad, 1);
    let value_pad = [case.pad, 0, 1, 16][case.seed as usize / 16 % 4];
    let (value, value_host) = rows_of::<T>(device, case.tokens, heads, head_dim, value_pad, 2);
    let n = if case.per_head { heads } else { 1 };
    let scales_host = scales_of(n);
    let [key_scale, value_scale] = [0, 1].map(|i| Tensor::from_slice(device, &scales_host[i], &[n]).unwrap());
    let mut status = Tensor::<u32>::zeros(device, &[1]).unwrap();
    let mut cache = new_cache_at::<S>(device, case.layout, case.shape, case.cache_at);
    let before = cache_of(&cache);

    let mut options = ReshapeAndCacheOptions::default();
    if scaled {
        options = options.scales(&key_scale, &value_scale);
    }
    if case.wide_slots {
        let slots = Tensor::from_slice(device, &slots, &[case.tokens]).unwrap();
        kv_cache::reshape_and_cache(stream, &mut cache, Some(&mut status), &key, &value, &slots, &options).unwrap();
    } else {
        let narrow: Vec<i32> = slots.iter().map(|&s| s as i32).collect();
        let slots = Tensor::from_slice(device, &narrow, &[case.tokens]).unwrap();
        kv_cache::reshape_and_cache(stream, &mut cache, Some(&mut status), &key, &value, &slots, &options).unwrap();
    }

    let of_heads = |scales: &[f32]| (0..heads).map(|h| scales[if case.per_head { h } else { 0 }]).collect();
    let [key_scale, value_scale]: [Vec<f32>; 2] = [0, 1].map(|i| of_heads(&scales_host[i]));
    let after = cache_of(&cache);
    let parts = [
        (&before.0, &after.0, cache.key_strides(), &key_host, &key_scale),
        (&before.1, &after.1, cache.value_strides(), &value_host, &value_scale),
    ];
    for (before, after, strides, rows, scale) in parts {
        // NaN marks what the reference does not write, which must keep its bits.
        let mut want = vec![f64::NAN; before.len()];
        let scale = scaled.then_some(&scale[..]);
        reference::kv_cache::reshape_and_cache(&mut want, strides, case.shape, &widen(rows), &slots, scale);
        for (i, w) in want.iter().enumerate() {
            let expected = if w.is_nan() { before[i] } else { exact_round::<S>(*w) };
            assert_eq!(after[i], expected, "element {i} of {case:?}, slots {slots:?}");
        }
    }
    let wrong = slots.iter().filter(|s| **s != -1 && (**s < 0 || **s >= case.shape.slots() as i64)).count();
    assert_eq!(status.to_vec().unwrap(), [wrong as u32]);
}

fn check<T: Float + StoreAs<S>, S: CacheElement>(cases: u32) {
    property(cases, case(), |device, stream, case| {
        check_case::<T, S>(device, stream, &case);
        Ok(())
    });
}

#[test]
fn stores_the_same_bits_in_a_cache_of_the_same_type() {
    check::<f32, f32>(30);
    check::<f16, f16>(30);
    check::<bf16, bf16>(40);
}

#[test]
fn quantises_to_8_bit_types() {
    check::<f32, E4M3>(16);
    check::<f32, E5M2>(12);
    check::<f32, i8>(16);
    check::<f16, E4M3>(12);
    check::<f16, E5M2>(16);
    check::<f16, i8>(12);
    check::<bf16, E4M3>(24);
    check::<bf16, E5M2>(12);
    check::<bf16, i8>(16);
}

#[test]
fn forty_heads_and_a_whole_block_of_neighbouring_slots() {
    for layout in [CacheLayout::XSplit, CacheLayout::Nhd, CacheLayout::Hnd] {
        on_every_device(|device, stream| {
            let shape = CacheShape::new(3, 16, 40, 128);
            let cache_at = [0; 2];
            let case = Case { layout, shape, tokens: 20, per_head: false, pad: 0, wide_slots: true, cache_at, seed: 5 };
            check_case::<bf16, bf16>(device, stream, &case);
        });
    }
}

/// Everything in whole chunks but for where the keys or the values of the cache begin.
#[test]
fn caches_that_begin_off_a_chunk() {
    on_every_device(|device, stream| {
        for layout in [CacheLayout::XSplit, CacheLayout::Nhd, CacheLayout::Hnd] {
            for cache_at in [[1, 0], [0, 1], [1, 1]] {
                let shape = CacheShape::new(3, 16, 2, 64);
                let case =
                    Case { layout, shape, tokens: 7, per_head: true, pad: 0, wide_slots: true, cache_at, seed: 16 * 4 };
                check_case::<bf16, bf16>(device, stream, &case);
                check_case::<f16, E4M3>(device, stream, &case);
                check_case::<f32, i8>(device, stream, &case);
            }
        }
    });
}

/// Next to the middle of two numbers the product with the reciprocal decides, which is not always on the side where the quotient is.
#[test]
fn rounds_the_product_with_the_reciprocal() {
    fn check<S: CacheElement>(device: &Device, stream: &Stream, layout: CacheLayout)
    where
        f32: StoreAs<S>,
    {
        let mut numbers: Vec<f64> = (0..=u8::MAX as u32).map(value_of::<S>).filter(|v| v.is_finite()).collect();
        numbers.sort_by(f64::total_cmp);
        numbers.dedup_by(|a, b| a == b);
        let middles: Vec<f64> = numbers.windows(2).map(|w| (w[0] + w[1]) / 2.0).collect();
        // Those that lie next to them once they are divided, and one on either side.
        let around = |scale: f32| -> Vec<f32> {
            let near = |m: &f64| (m * scale as f64) as f32;
            middles.iter().map(near).flat_map(|x| [x, x.next_down(), x.next_up()]).collect()
        };
        let tokens = (3 * middles.len()).div_ceil(16);
        let shape = CacheShape::new(tokens.div_ceil(8), 8, 1, 16);
        let slots: Vec<i64> = (0..tokens as i64).collect();
        let device_slots = Tensor::from_slice(device, &slots, &[tokens]).unwrap();
        let mut other_than_the_quotient = 0;
        for scales in [[0.01f32, 0.3], [1.0 / 3.0, 0.007], [0.0123, 1.7]] {
            let mut rows = scales.map(around);
            rows.iter_mut().for_each(|r| r.resize(16 * tokens, 0.125));
            let [key, value] = [0, 1].map(|i| Tensor::from_slice(device, &rows[i], &[tokens, 1, 16]).unwrap());
            let [key_scale, value_scale] = scales.map(|s| Tensor::from_slice(device, &[s], &[1]).unwrap());
            let mut cache = KvCache::<S>::zeros(device, layout, shape).unwrap();
            let options = ReshapeAndCacheOptions::default().scales(&key_scale, &value_scale);
            kv_cache::reshape_and_cache(stream, &mut cache, None, &key, &value, &device_slots, &options).unwrap();
            let (keys, values) = cache_of(&cache);
            let parts = [(keys, cache.key_strides()), (values, cache.value_strides())];
            for (((got, strides), rows), scale) in parts.into_iter().zip(&rows).zip(scales) {
                let mut want = vec![f64::NAN; got.len()];
                let rows_wide = widen(rows);
                reference::kv_cache::reshape_and_cache(&mut want, strides, shape, &rows_wide, &slots, Some(&[scale]));
                for (i, row) in rows.iter().enumerate() {
                    let (slot, dim) = (i / 16, i % 16);
                    let at = strides.index(slot / 8, 0, slot % 8, dim);
                    assert_eq!(got[at], exact_round::<S>(want[at]), "{row:e} with the scale {scale}");
                    other_than_the_quotient += (got[at] != exact_round::<S>(*row as f64 / scale as f64)) as usize;
                }
            }
        }
        // Otherwise this says nothing.
        assert!(other_than_the_quotient > 0);
    }
    on_every_device(|device, stream| {
        check::<i8>(device, stream, CacheLayout::Nhd);
        check::<E4M3>(device, stream, CacheLayout::XSplit);
        check::<E5M2>(device, stream, CacheLayout::Hnd);
        // 0.125 / 0.01 is above 12.5, for 0.01 is not an f32; 0.125 times the reciprocal is 12.5, and goes to the even number.
        let shape = CacheShape::new(1, 1, 1, 1);
        let (mut cache, key) = (KvCache::<i8>::zeros(device, CacheLayout::Nhd, shape).unwrap(), [0.125f32]);
        let key = Tensor::from_slice(device, &key, &[1, 1, 1]).unwrap();
        let [scale, other] = [0.01f32, 0.02].map(|s| Tensor::from_slice(device, &[s], &[1]).unwrap());
        let slots = Tensor::from_slice(device, &[0i32], &[1]).unwrap();
        let options = ReshapeAndCacheOptions::default().scales(&scale, &other);
        kv_cache::reshape_and_cache(stream, &mut cache, None, &key, &key, &slots, &options).unwrap();
        assert_eq!((cache.key().to_vec().unwrap(), cache.value().to_vec().unwrap()), (vec![12], vec![6]));
    });
}

#[test]
fn saturates_and_keeps_nan() {
    on_every_device(|device, stream| {
        let shape = CacheShape::new(1, 8, 1, 4);
        let x = Tensor::from_slice(device, &[1e9f32, -1e9, f32::NAN, f32::INFINITY], &[1, 1, 4]).unwrap();
        let slots = Tensor::from_slice(device, &[0i64], &[1]).unwrap();
        let one = Tensor::from_slice(device, &[1f32], &[1]).unwrap();
        let options = || ReshapeAndCacheOptions::default().scales(&one, &one);
        let mut a = KvCache::<i8>::zeros(device, CacheLayout::Nhd, shape).unwrap();
        kv_cache::reshape_and_cache(stream, &mut a, None, &x, &x, &slots, &options()).unwrap();
        assert_eq!(a.key().to_vec().unwrap()[..4], [127, -128, 0, 127]);
        let mut b = KvCache::<E4M3>::zeros(device, CacheLayout::Nhd, shape).unwrap();
        kv_cache::reshape_and_cache(stream, &mut b, None, &x, &x, &slots, &options()).unwrap();
        let got: Vec<f32> = b.value().to_vec().unwrap()[..4].iter().map(|v| E4M3::widen_all([*v])[0]).collect();
        assert_eq!((got[0], got[1], got[3]), (448.0, -448.0, 448.0));
        assert!(got[2].is_nan());
    });
}

#[test]
fn equal_slots_hold_one_of_their_tokens() {
    on_every_device(|device, stream| {
        let shape = CacheShape::new(2, 16, 2, 64);
        for layout in [CacheLayout::XSplit, CacheLayout::Nhd] {
            let x: Vec<f32> = (0..20).flat_map(|t| vec![t as f32; 128]).collect();
            let x = Tensor::from_slice(device, &x, &[20, 2, 64]).unwrap();
            let slots = Tensor::from_slice(device, &[7i32; 20], &[20]).unwrap();
            let mut cache = KvCache::<f32>::zeros(device, layout, shape).unwrap();
            match kv_cache::reshape_and_cache(
                stream,
                &mut cache,
                None,
                &x,
                &x,
                &slots,
                &ReshapeAndCacheOptions::default(),
            ) {
                // The one place that may race: the detector is right.
                Err(warploom::Error::Launch(e)) if matches!(e.kind, simt::ErrorKind::Race { .. }) => continue,
                outcome => outcome.unwrap(),
            }
            let (key, strides) = (cache.key().to_vec().unwrap(), cache.key_strides());
            for (head, dim) in (0..2).flat_map(|h| (0..64).map(move |d| (h, d))) {
                let v = key[strides.index(0, head, 7, dim)];
                assert!((0.0..20.0).contains(&v) && v.fract() == 0.0, "{v}");
            }
            assert_eq!(key.iter().filter(|v| **v != 0.0).count(), key.iter().filter(|v| **v >= 1.0).count());
        }
    });
}

#[test]
fn keys_and_values_may_be_halves_of_one_tensor() {
    on_every_device(|device, stream| {
        // FlashInfer's [blocks, 2, block_size, heads, dim].
        let both = Tensor::<f32>::zeros(device, &[3, 2, 8, 2, 16]).unwrap();
        let half = |i: usize| both.as_strided(&[3, 8, 2, 16], &[512, 32, 16, 1], 256 * i).unwrap();
        let mut cache = KvCache::from_tensors(CacheLayout::Nhd, half(0), half(1)).unwrap();
        let (k, v) = (noise_of::<f32>(32, 1), noise_of::<f32>(32, 2));
        let key = Tensor::from_slice(device, &k, &[1, 2, 16]).unwrap();
        let value = Tensor::from_slice(device, &v, &[1, 2, 16]).unwrap();
        let slots = Tensor::from_slice(device, &[13i64], &[1]).unwrap();
        kv_cache::reshape_and_cache(stream, &mut cache, None, &key, &value, &slots, &ReshapeAndCacheOptions::default())
            .unwrap();
        let all = both.to_vec().unwrap();
        let at = 512 + 5 * 32;
        assert_eq!((&all[at..at + 32], &all[at + 256..at + 288]), (&k[..], &v[..]));
        assert_eq!(all.iter().filter(|v| **v != 0.0).count(), 64);
    });
}

#[test]
fn runs_the_same_in_a_graph() {
    on_every_device(|device, stream| {
        device.preload(&["kv_cache"]).unwrap();
        let shape = CacheShape::new(2, 16, 2, 64);
        let (key, _) = rows_of::<bf16>(device, 9, 2, 64, 0, 1);
        let (value, _) = rows_of::<bf16>(device, 9, 2, 64, 0, 2);
        let mut slots = Tensor::from_slice(device, &[-1i64; 9], &[9]).unwrap();
        let mut captured = KvCache::<bf16>::zeros(device, CacheLayout::XSplit, shape).unwrap();
        let graph = Graph::capture(stream, |s| {
            kv_cache::reshape_and_cache(
                s,
                &mut captured,
                None,
                &key,
                &value,
                &slots,
                &ReshapeAndCacheOptions::default(),
            )
        })
        .unwrap();
        slots.copy_from_slice(&[3, 4, 5, 6, 7, -1, 20, 21, 22]).unwrap();
        graph.launch(stream).unwrap();
        graph.launch(stream).unwrap();
        let mut direct = KvCache::<bf16>::zeros(device, CacheLayout::XSplit, shape).unwrap();
        kv_cache::reshape_and_cache(
            stream,
            &mut direct,
            None,
            &key,
            &value,
            &slots,
            &ReshapeAndCacheOptions::default(),
        )
        .unwrap();
        assert_eq!(cache_of(&captured), cache_of(&direct));
        assert!(cache_of(&direct).0.iter().any(|b| *b != 0));
    });
}

/// What tiles have to cope with: runs of neighbouring slots that begin anywhere and end anywhere, with padding and wrong slots between and within them.
#[derive(Clone, Debug)]
struct Tiles {
    shape: CacheShape,
    slots: Vec<i64>,
    /// Elements between heads, and between tokens.
    gaps: [usize; 2],
    wide_slots: bool,
    half: bool,
}

fn tiles_case() -> impl Strategy<Value = Tiles> {
    let dims = prop::sample::select(vec![128usize, 64, 80, 256, 16]);
    let sizes = prop::sample::select(vec![16usize, 8, 32, 24, 128]);
    let gaps = (prop::sample::select(vec![0usize, 0, 8]), prop::sample::select(vec![0usize, 0, 24]));
    // How far each run is from a page's beginning, its length, and what comes behind it.
    let runs = proptest::collection::vec((0usize..20, 0usize..50, 0usize..8), 1..6);
    let aligned = prop::sample::select(vec![true, false]);
    (dims, sizes, 1usize..4, gaps, runs, aligned, any::<(bool, bool, u32)>()).prop_map(
        |(head_dim, block_size, heads, gaps, runs, aligned, (wide_slots, half, seed))| {
            let shape = CacheShape::new(2 * 16 * 5 * 16 / block_size, block_size, heads, head_dim);
            let count = shape.slots() as i64;
            // Blocks in no order; no slot comes twice.
            let order = |slot: usize| {
                let (block, at) = (slot / block_size, slot % block_size);
                ((block * 7 + seed as usize) % shape.blocks * block_size + at) as i64
            };
            let (mut slots, mut free) = (vec![], 0);
            for (i, (skip, len, then)) in runs.into_iter().enumerate() {
                free += if aligned { 0 } else { skip };
                slots.extend((free..free + len).map(order));
                free += len;
                if aligned {
                    free = free.next_multiple_of(block_size);
                }
                match then {
                    0 => slots.push(-1),
                    1 => slots.extend([count, -2, -1, i as i64 + i64::from(i32::MAX) / 2]),
                    // Alone, backwards.
                    2 => {
                        slots.extend((free..free + 5).rev().map(order));
                        free += 5;
                    }
                    3 if slots.len() > 20 => {
                        let last = slots.len() - 6;
                        slots[last] = -1;
                    }
                    _ => {}
                }
            }
            assert!(free <= shape.slots());
            Tiles { shape, slots, gaps: gaps.into(), wide_slots, half }
        },
    )
}

fn check_tiles<T: Float + StoreAs<T>>(device: &Device, stream: &Stream, case: &Tiles) {
    let CacheShape { heads, head_dim, .. } = case.shape;
    let (tokens, head) = (case.slots.len(), head_dim + case.gaps[0]);
    let row = heads * head + case.gaps[1];
    let [key, value] = [1, 2].map(|seed| {
        let all = noise_of::<T>(tokens * row + 8, seed);
        let all = Tensor::from_slice(device, &all, &[all.len()]).unwrap();
        all.as_strided(&[tokens, heads, head_dim], &[row, head, 1], 8).unwrap()
    });
    let stored = [false, true].map(|tiles| {
        let mut cache = new_cache_at::<T>(device, CacheLayout::XSplit, case.shape, [0; 2]);
        let mut status = Tensor::<u32>::zeros(device, &[1]).unwrap();
        let (out, options) = (Some(&mut status), ReshapeAndCacheOptions::default().tiles(tiles));
        if case.wide_slots {
            let slots = Tensor::from_slice(device, &case.slots, &[tokens]).unwrap();
            kv_cache::reshape_and_cache(stream, &mut cache, out, &key, &value, &slots, &options).unwrap();
        } else {
            let narrow: Vec<i32> = case.slots.iter().map(|&s| s as i32).collect();
            let slots = Tensor::from_slice(device, &narrow, &[tokens]).unwrap();
            kv_cache::reshape_and_cache(stream, &mut cache, out, &key, &value, &slots, &options).unwrap();
        }
        (cache_of(&cache), status.to_vec().unwrap())
    });
    assert!(stored[0] == stored[1], "{case:?}: {:?}, {:?}", stored[0].1, stored[1].1);
}

#[test]
fn tiles_leave_the_very_bits_that_chunks_do() {
    property(60, tiles_case(), |device, stream, case| {
        if case.half {
            check_tiles::<f16>(device, stream, &case);
        } else {
            check_tiles::<bf16>(device, stream, &case);
        }
        Ok(())
    });
}

/// One slot for all of them, by way of shared memory and past it.
#[test]
fn tiles_of_equal_slots_hold_one_of_their_tokens() {
    on_every_device(|device, stream| {
        let shape = CacheShape::new(4, 16, 2, 64);
        let x: Vec<bf16> = (0..40).flat_map(|t| vec![bf16::from_f32(t as f32); 128]).collect();
        let x = Tensor::from_slice(device, &x, &[40, 2, 64]).unwrap();
        for of in [|_| 7, |t: i64| 16 + t % 10] {
            let slots: Vec<i64> = (0..40).map(of).collect();
            let slots = Tensor::from_slice(device, &slots, &[40]).unwrap();
            let mut cache = KvCache::<bf16>::zeros(device, CacheLayout::XSplit, shape).unwrap();
            let options = ReshapeAndCacheOptions::default().tiles(true);
            match kv_cache::reshape_and_cache(stream, &mut cache, None, &x, &x, &slots, &options) {
                // May race: the detector is right.
                Err(warploom::Error::Launch(e)) if matches!(e.kind, simt::ErrorKind::Race { .. }) => continue,
                outcome => outcome.unwrap(),
            }
            for t in 0..40 {
                for (tensor, strides) in [(cache.key(), cache.key_strides()), (cache.value(), cache.value_strides())] {
                    let (all, slot) = (tensor.to_vec().unwrap(), of(t) as usize);
                    let v = all[strides.index(slot / 16, 1, slot % 16, 63)].to_f32();
                    assert!((0..40).any(|t| t as f32 == v && of(t) as usize == slot), "{v}");
                }
            }
        }
    });
}

/// Strides of dimensions of one element are of no consequence, such as that of blocks where there is one, nor is what tokens without a place make of them.
#[test]
fn strides_that_nothing_follows() {
    const FREE: usize = (isize::MAX as usize / 4) & !7;
    on_every_device(|device, stream| {
        use CacheLayout::{Hnd, Nhd, XSplit};
        for (layout, tiles) in [(XSplit, true), (XSplit, false), (Nhd, false), (Hnd, false)] {
            for (slots, heads) in [(vec![4i64, -1, 5], 2), (vec![4, -1, 5], 1), (vec![7], 1)] {
                let (tokens, dim) = (slots.len(), 64);
                let device_slots = Tensor::from_slice(device, &slots, &[tokens]).unwrap();
                let run = |free: Option<usize>| {
                    let loose = |t: &Tensor<bf16>| {
                        let strides = t.strides().iter().zip(t.shape());
                        let strides: Vec<_> = strides.map(|(s, n)| free.filter(|_| *n == 1).unwrap_or(*s)).collect();
                        t.as_strided(t.shape(), &strides, 0).unwrap()
                    };
                    let [key, value] = [1, 2].map(|seed| {
                        let host = noise_of::<bf16>(tokens * heads * dim, seed);
                        loose(&Tensor::from_slice(device, &host, &[tokens, heads, dim]).unwrap())
                    });
                    let dense = KvCache::<bf16>::zeros(device, layout, CacheShape::new(1, 16, heads, dim)).unwrap();
                    let mut cache = KvCache::from_tensors(layout, loose(dense.key()), loose(dense.value())).unwrap();
                    let options = ReshapeAndCacheOptions::default().tiles(tiles);
                    kv_cache::reshape_and_cache(stream, &mut cache, None, &key, &value, &device_slots, &options)
                        .unwrap();
                    cache_of(&dense)
                };
                let want = run(None);
                assert!(want.0.iter().chain(&want.1).any(|bits| *bits != 0));
                for stride in [1 << 40, FREE] {
                    assert!(run(Some(stride)) == want, "{layout:?}, tiles {tiles}, {slots:?}, {heads} heads, {stride}");
                }
            }
        }
    });
}

#[test]
fn large_launches_go_by_tiles_if_they_can() {
    use kv_cache::reshape_and_cache::{Args, by_tiles};
    // SAFETY: null pointers and zeros.
    let zeros: Args = unsafe { std::mem::zeroed() };
    let args = |tokens: u32, block_size: u32, key: usize| Args {
        tokens,
        block_size,
        key: std::ptr::without_provenance(key),
        slot_count: 1 << 20,
        heads: 8,
        head_dim: 128,
        ..zeros
    };
    let (bf16, e4m3, x) = (DType::Bf16, DType::E4m3, CacheLayout::XSplit);
    assert!(by_tiles(bf16, bf16, x, &args(4096, 16, 256)));
    assert!(!by_tiles(bf16, bf16, x, &args(256, 16, 256)));
    assert!(!by_tiles(bf16, bf16, x, &args(4096, 5, 256)));
    assert!(!by_tiles(bf16, bf16, x, &args(4096, 16, 2)));
    assert!(!by_tiles(bf16, e4m3, x, &args(4096, 16, 256)));
    assert!(!by_tiles(bf16, bf16, CacheLayout::Nhd, &args(4096, 16, 256)));
}

#[test]
fn refuses_what_it_cannot_do() {
    let device = &Device::simt();
    let stream = &Stream::new(device).unwrap();
    let shape = CacheShape::new(2, 16, 2, 64);
    let mut cache = KvCache::<f16>::zeros(device, CacheLayout::Nhd, shape).unwrap();
    let x = Tensor::<f16>::zeros(device, &[3, 2, 64]).unwrap();
    let slots = Tensor::<i64>::zeros(device, &[3]).unwrap();
    let one = Tensor::<f32>::zeros(device, &[1]).unwrap();
    let run = |cache: &mut KvCache<f16>, key: &Tensor<f16>, value: &Tensor<f16>, options| {
        kv_cache::reshape_and_cache(stream, cache, None, key, value, &slots, &options).unwrap_err()
    };
    let y = Tensor::<f16>::zeros(device, &[3, 3, 64]).unwrap();
    assert!(matches!(run(&mut cache, &y, &x, ReshapeAndCacheOptions::default()), Error::Shape { arg: "key", .. }));
    assert!(matches!(run(&mut cache, &x, &y, ReshapeAndCacheOptions::default()), Error::Shape { arg: "value", .. }));
    let wide = CacheShape::new(0, 1, 65536, 4096);
    let mut none = KvCache::<f16>::zeros(device, CacheLayout::Nhd, wide).unwrap();
    let head = Tensor::<f16>::zeros(device, &[4096]).unwrap();
    let heads = head.as_strided(&[3, 65536, 4096], &[0, 0, 1], 0).unwrap();
    let e = run(&mut none, &heads, &heads, ReshapeAndCacheOptions::default());
    assert!(matches!(e, Error::Value { arg: "key", .. }), "{e}");
    let flat = x.reshape(&[384]).unwrap();
    assert!(matches!(run(&mut cache, &flat, &x, ReshapeAndCacheOptions::default()), Error::Shape { arg: "key", .. }));
    let sparse = Tensor::<f16>::zeros(device, &[768]).unwrap().as_strided(&[3, 2, 64], &[256, 128, 2], 0).unwrap();
    assert!(matches!(
        run(&mut cache, &sparse, &x, ReshapeAndCacheOptions::default()),
        Error::Stride { arg: "key", .. }
    ));
    let scaled = ReshapeAndCacheOptions::default().scales(&one, &one);
    assert!(matches!(run(&mut cache, &x, &x, scaled), Error::Value { arg: "scales", .. }));
    let inside = cache.key().as_strided(&[3, 2, 64], &[128, 64, 1], 0).unwrap();
    assert!(matches!(run(&mut cache, &inside, &x, ReshapeAndCacheOptions::default()), Error::Overlap { .. }));
    let other = Tensor::<f16>::zeros(&Device::simt(), &[3, 2, 64]).unwrap();
    assert!(matches!(
        run(&mut cache, &x, &other, ReshapeAndCacheOptions::default()),
        Error::WrongDevice { arg: "value", .. }
    ));

    let bytes = Tensor::<u8>::zeros(device, &[3]).unwrap();
    let e = kv_cache::reshape_and_cache(stream, &mut cache, None, &x, &x, &bytes, &ReshapeAndCacheOptions::default());
    assert!(matches!(e, Err(Error::DType { arg: "slots", .. })));
    assert!(matches!(
        run(&mut cache, &x, &x, ReshapeAndCacheOptions::default().tiles(true)),
        Error::Unsupported { .. }
    ));
    let few = Tensor::<i64>::zeros(device, &[2]).unwrap();
    let e = kv_cache::reshape_and_cache(stream, &mut cache, None, &x, &x, &few, &ReshapeAndCacheOptions::default());
    assert!(matches!(e, Err(Error::Shape { arg: "slots", .. })));

    let mut small = KvCache::<E4M3>::zeros(device, CacheLayout::Nhd, shape).unwrap();
    let e = kv_cache::reshape_and_cache(stream, &mut small, None, &x, &x, &slots, &ReshapeAndCacheOptions::default());
    assert!(matches!(e, Err(Error::Value { arg: "scales", .. })));
    let three = Tensor::<f32>::zeros(device, &[3]).unwrap();
    let e = kv_cache::reshape_and_cache(
        stream,
        &mut small,
        None,
        &x,
        &x,
        &slots,
        &ReshapeAndCacheOptions::default().scales(&three, &three),
    );
    assert!(matches!(e, Err(Error::Shape { arg: "scales.key", .. })));
}

#[test]
fn caches_are_checked_when_made() {
    let device = &Device::simt();
    let shape = |head_dim| CacheShape::new(2, 16, 2, head_dim);
    let e = KvCache::<f16>::zeros(device, CacheLayout::XSplit, shape(46));
    assert!(matches!(e, Err(Error::Value { .. })));
    assert!(KvCache::<f16>::zeros(device, CacheLayout::Nhd, shape(0)).is_err());
    let t = |dims: &[usize]| Tensor::<f16>::zeros(device, dims).unwrap();
    let from = KvCache::<f16>::from_tensors;
    let e = from(CacheLayout::Nhd, t(&[2, 16, 2, 64]), t(&[2, 16, 2, 32]));
    assert!(matches!(e, Err(Error::Shape { arg: "value", .. })));
    let e = from(CacheLayout::XSplit, t(&[2, 2, 8, 16, 4]), t(&[2, 2, 64, 16]));
    assert!(matches!(e, Err(Error::Shape { arg: "key", .. })));
    let same = t(&[2, 16, 2, 64]).as_strided(&[2, 16, 2, 64], &[0, 128, 64, 1], 0).unwrap();
    let e = from(CacheLayout::Nhd, same, t(&[2, 16, 2, 64]));
    assert!(matches!(e, Err(Error::Stride { arg: "key", .. })));
    let holes = t(&[2, 2, 8, 32, 8]).as_strided(&[2, 2, 8, 16, 8], &[4096, 2048, 256, 16, 1], 0).unwrap();
    let e = from(CacheLayout::XSplit, holes, t(&[2, 2, 64, 16]));
    assert!(matches!(e, Err(Error::Stride { arg: "key", .. })));
}

#[test]
fn every_input_type_has_every_cache_type() {
    use kv_cache::reshape_and_cache::{entry, tiles_entry};
    for layout in [CacheLayout::XSplit, CacheLayout::Nhd, CacheLayout::Hnd] {
        for input in INPUTS {
            for cache in [input, DType::E4m3, DType::E5m2, DType::I8] {
                let name = if layout == CacheLayout::XSplit { "xsplit" } else { "flat" };
                let name = format!("reshape_and_cache_{name}_{input}_{cache}");
                assert_eq!(entry(input, cache, layout).unwrap().name, name);
                let tiles = layout == CacheLayout::XSplit && input == cache && input.size() == 2;
                assert_eq!(
                    tiles_entry(input, cache, layout).map(|e| e.name),
                    tiles.then(|| name + "_tiles").as_deref()
                );
            }
        }
    }
}

/// Addresses of a cache of more than 2^32 elements, and of a batch of more than 2^31.
#[test]
fn addresses_go_beyond_32_bits() {
    let shape = CacheShape::new(1 << 20, 16, 8, 128);
    let last = shape.blocks - 1;
    for layout in [CacheLayout::XSplit, CacheLayout::Nhd, CacheLayout::Hnd] {
        let keys = PageStrides::keys(layout, shape, DType::Bf16);
        let values = PageStrides::values(layout, shape);
        let end = shape.blocks * 16 * 8 * 128;
        assert_eq!(keys.index(last, 7, 15, 127), end - 1);
        assert_eq!(values.index(last, 7, 15, 127), end - 1);
        assert!(end > u32::MAX as usize / 2 && keys.index(last, 0, 0, 0) > i32::MAX as usize);
    }
}

/// Keys and values side by side in each head of each token.
#[test]
fn a_cache_of_pairs() {
    on_every_device(|d, s| {
        let both = Tensor::<f32>::zeros(d, &[2, 4, 2, 2, 8]).unwrap();
        let view = |i: usize| both.as_strided(&[2, 4, 2, 8], &[128, 32, 16, 1], 8 * i).unwrap();
        let mut pairs = KvCache::from_tensors(CacheLayout::Nhd, view(0), view(1)).unwrap();
        let mut apart = KvCache::<f32>::zeros(d, CacheLayout::Nhd, CacheShape::new(2, 4, 2, 8)).unwrap();
        let of = |seed| Tensor::from_slice(d, &noise_of::<f32>(3 * 16, seed), &[3, 2, 8]).unwrap();
        let (key, value) = (of(1), of(2));
        let slots = Tensor::from_slice(d, &[5i64, 0, 2], &[3]).unwrap();
        for cache in [&mut pairs, &mut apart] {
            kv_cache::reshape_and_cache(s, cache, None, &key, &value, &slots, &ReshapeAndCacheOptions::default())
                .unwrap();
        }
        assert_eq!(pairs.key().to_vec().unwrap(), apart.key().to_vec().unwrap());
        assert_eq!(pairs.value().to_vec().unwrap(), apart.value().to_vec().unwrap());
    });
}

/// Blocks without elements, and with more than are counted, before there is memory for them.
#[test]
fn blocks_that_no_cache_has() {
    let d = &Device::simt();
    for shape in [CacheShape::new(1, 0, 1, 4), CacheShape::new(1, 1 << 16, 1, 1 << 16)] {
        let e = KvCache::<E4M3>::zeros(d, CacheLayout::Nhd, shape).unwrap_err().to_string();
        assert!(e.starts_with("KvCache::zeros: `shape` must be of 1 to 2^31 - 1 elements a block"), "{e}");
    }
}
