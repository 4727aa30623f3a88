//! The fused operation against the references of its two parts: any layout, type, part of a head and strides.

use super::Rows;
use crate::far::FAR;
use crate::kv_cache::{cache_of, exact_round, new_cache_at, scales_of, value_of};
use crate::rows::vector;
use cuda_std::Float;
use proptest::prelude::*;
use warploom::kv_cache::{CacheElement, CacheLayout, CacheShape, KvCache, StoreAs};
use warploom::rope::RotaryAndCacheOptions;
use warploom::rope::{self, Pairing, Scaling};
use warploom::{Device, E4M3, E5M2, Error, Graph, Stream, Tensor, bf16, f16, reference};
use warploom_tests::{assert_close, noise_of, on_every_device, property, widen};

#[derive(Clone, Debug)]
struct Case {
    layout: CacheLayout,
    shape: CacheShape,
    tokens: usize,
    query_heads: usize,
    rot_dim: usize,
    offset: usize,
    pad: usize,
    pairing: Pairing,
    per_head: bool,
    two_heads: bool,
    /// Elements before the table of angles, and before the cache's keys and values.
    at: [usize; 3],
    seed: u64,
}

const POSITIONS: usize = 23;

fn case() -> impl Strategy<Value = Case> {
    let layout = prop::sample::select(vec![CacheLayout::XSplit, CacheLayout::Nhd, CacheLayout::Hnd]);
    let dims = prop::sample::select(vec![46usize, 64, 80, 128, 16]);
    let sizes = prop::sample::select(vec![8usize, 16, 5, 128]);
    let pairing = prop::sample::select(vec![Pairing::Neox, Pairing::Gptj]);
    (layout, dims, sizes, (1usize..4, 1usize..5, 0usize..20), any::<[u8; 3]>(), (pairing, any::<bool>()), any::<u64>())
        .prop_map(
            |(
                layout,
                head_dim,
                block_size,
                (heads, query_heads, tokens),
                [part, place, pad],
                (pairing, per_head),
                seed,
            )| {
                let head_dim = if layout == CacheLayout::XSplit { head_dim.next_multiple_of(16) } else { head_dim };
                let rot_dim = match part % 4 {
                    0 | 1 => head_dim,
                    2 => (head_dim / 2).next_multiple_of(16).min(head_dim),
                    _ => 2 * (1 + part as usize / 4 % (head_dim / 2)),
                };
                let rest = head_dim - rot_dim;
                let offset = match place % 4 {
                    0 => 0,
                    1 => rest,
                    2 => rest & !15,
                    _ => place as usize / 4 % (rest + 1),
                };
                let shape = CacheShape::new(7, block_size, heads, head_dim);
                let pad = [0, 1, 16, 0][pad as usize % 4];
                let at = [[0; 3], [0; 3], [1, 0, 0], [0, 1, 0], [0, 0, 1]][(seed >> 9) as usize % 5];
                let two_heads = false;
                Case {
                    layout,
                    shape,
                    tokens,
                    query_heads,
                    rot_dim,
                    offset,
                    pad,
                    pairing,
                    per_head,
                    two_heads,
                    at,
                    seed,
                }
            },
        )
}

fn check_case<T: Float + StoreAs<S>, S: CacheElement, C: Float>(device: &Device, stream: &Stream, case: &Case) {
    let &Case { tokens, query_heads, rot_dim, offset, pad, .. } = case;
    let CacheShape { heads, head_dim, .. } = case.shape;
    let rows = Rows::new(tokens, &[query_heads, heads, heads], head_dim, pad, case.seed % 2 == 1);
    let host = noise_of::<T>(rows.len, case.seed);
    let fused = Tensor::from_slice(device, &host, &[host.len()]).unwrap();
    let (mut query, key, value) = (rows.view(&fused, 0), rows.view(&fused, 1), rows.view(&fused, 2));
    let angles_host = noise_of::<C>(POSITIONS * rot_dim, case.seed + 1);
    let angles = vector(device, &angles_host, case.at[0]).reshape(&[POSITIONS, rot_dim]).unwrap();
    let at: Vec<i64> = (0..tokens as i64)
        .map(|t| if (t + case.seed as i64 % 7) % 7 == 0 { [-1, POSITIONS as i64][t as usize % 2] } else { t * 5 % 23 })
        .collect();
    let count = case.shape.slots() as i64;
    let slots: Vec<i64> = (0..tokens as i64)
        .map(|t| match (t + case.seed as i64 % 6) % 6 {
            0 => [-1, count, -5][t as usize % 3],
            _ if t >= count => -1,
            _ => (t + case.seed as i64 % count) % count,
        })
        .collect();
    let positions = Tensor::from_slice(device, &at, &[tokens]).unwrap();
    let device_slots = Tensor::from_slice(device, &slots, &[tokens]).unwrap();
    let n = if case.per_head { heads } else { 1 };
    let scales_host = scales_of(n);
    let [key_scale, value_scale] = [0, 1].map(|i| Tensor::from_slice(device, &scales_host[i], &[n]).unwrap());
    let mut cache = new_cache_at::<S>(device, case.layout, case.shape, [case.at[1], case.at[2]]);
    let before = cache_of(&cache);
    let mut status = Tensor::<u32>::zeros(device, &[1]).unwrap();
    let mut options = RotaryAndCacheOptions::default().offset(offset).two_heads(case.two_heads);
    if T::SCALED {
        options = options.scales(&key_scale, &value_scale);
    }
    let pairing = case.pairing;
    rope::rotary_and_cache(
        stream,
        &mut query,
        &mut cache,
        Some(&mut status),
        &key,
        &value,
        &positions,
        &angles,
        &device_slots,
        &options.pairing(pairing),
    )
    .unwrap();

    let got = fused.to_vec().unwrap();
    let known = |t: usize| (0..POSITIONS as i64).contains(&at[t]);
    // Keys and values as the cache should get them; slots of tokens that are left out are -1.
    let (mut keys, mut values) = (vec![], vec![]);
    let mut untouched = vec![true; host.len()];
    for t in 0..tokens {
        let rotated = |start: usize| {
            let row = widen(&angles_host[at[t] as usize * rot_dim..][..rot_dim]);
            reference::rope::rotary(&widen(&host[start..][..head_dim]), &row, offset, pairing == Pairing::Gptj, false)
        };
        for h in (0..query_heads).map(|h| rows.at(t, 0, h)).filter(|_| known(t)) {
            assert_close(&got[h..][..head_dim], &rotated(h), 2f64.powi(-22), 2.0);
            untouched[h + offset..][..rot_dim].fill(false);
        }
        for h in 0..heads {
            keys.extend(if known(t) { rotated(rows.at(t, 1, h)) } else { vec![0.0; head_dim] });
            values.extend(widen(&host[rows.at(t, 2, h)..][..head_dim]));
        }
    }
    let same = |i: &usize| got[*i].to_f32().to_bits() == host[*i].to_f32().to_bits();
    assert!((0..host.len()).filter(|i| untouched[*i]).all(|i| same(&i)), "{case:?}");
    let used: Vec<i64> = (0..tokens).map(|t| if known(t) { slots[t] } else { -1 }).collect();
    let of_heads = |scales: &[f32]| (0..heads).map(|h| scales[if case.per_head { h } else { 0 }]).collect();
    let [key_scale, value_scale]: [Vec<f32>; 2] = [0, 1].map(|i| of_heads(&scales_host[i]));
    // What turns is off by the roundings of two products and a sum; the rest is exact.
    let error: Vec<f64> = (0..keys.len())
        .map(|i| if (offset..offset + rot_dim).contains(&(i % head_dim)) { 2f64.powi(-22) } else { 0.0 })
        .collect();
    let none = vec![0.0; values.len()];
    let after = cache_of(&cache);
    for (before, after, strides, rows, error, scale) in [
        (before.0, after.0, cache.key_strides(), &keys, &error, &key_scale),
        (before.1, after.1, cache.value_strides(), &values, &none, &value_scale),
    ] {
        // NaN marks what is not written, which must keep its bits.
        let bound = |sign: f64| {
            let mut want = vec![f64::NAN; after.len()];
            let rows: Vec<f64> = rows.iter().zip(error).map(|(row, error)| row + sign * error).collect();
            let scale = T::SCALED.then_some(&scale[..]);
            reference::kv_cache::reshape_and_cache(&mut want, strides, case.shape, &rows, &used, scale);
            want
        };
        for (i, (low, high)) in bound(-1.0).into_iter().zip(bound(1.0)).enumerate() {
            if low.is_nan() {
                assert_eq!(after[i], before[i], "element {i} of {case:?} is nobody's");
                continue;
            }
            // Rounding keeps the order; where nothing turns, that is one number.
            let (got, [low, high]) = (value_of::<S>(after[i]), [low, high].map(|v| value_of::<S>(exact_round::<S>(v))));
            assert!((low..=high).contains(&got), "element {i} of {case:?}: {got}, expected {low} to {high}");
        }
    }
    let outside = |s: i64| s != -1 && !(0..count).contains(&s);
    let wrong = (0..tokens).filter(|t| !known(*t) && at[*t] != -1 || outside(slots[*t])).count();
    assert_eq!(status.to_vec().unwrap(), [wrong as u32]);
}

#[test]
fn matches_the_references() {
    property(16, case(), |device, stream, case| {
        check_case::<bf16, bf16, f32>(device, stream, &case);
        check_case::<f32, f32, f32>(device, stream, &case);
        Ok(())
    });
    property(8, case(), |device, stream, case| {
        check_case::<bf16, E4M3, bf16>(device, stream, &case);
        check_case::<f16, f16, f16>(device, stream, &case);
        check_case::<f32, E4M3, f32>(device, stream, &case);
        Ok(())
    });
    property(5, case(), |device, stream, case| {
        check_case::<bf16, E5M2, f32>(device, stream, &case);
        check_case::<f16, E4M3, f32>(device, stream, &case);
        check_case::<f16, E5M2, f16>(device, stream, &case);
        check_case::<f32, E5M2, f32>(device, stream, &case);
        check_case::<f32, i8, f32>(device, stream, &case);
        check_case::<f16, i8, f16>(device, stream, &case);
        check_case::<bf16, i8, f32>(device, stream, &case);
        Ok(())
    });
}

/// Even numbers of heads in layouts that two heads a thread are for.
fn even_case() -> impl Strategy<Value = Case> {
    case().prop_map(|case| {
        let CacheShape { blocks, block_size, heads, head_dim, .. } = case.shape;
        let shape = CacheShape::new(blocks, block_size, 2 * heads, head_dim);
        Case { shape, query_heads: 2 * case.query_heads, two_heads: true, ..case }
    })
}

#[test]
fn two_heads_a_thread_match_the_references() {
    property(16, even_case(), |device, stream, case| {
        check_case::<bf16, bf16, f32>(device, stream, &case);
        check_case::<f16, E4M3, f16>(device, stream, &case);
        Ok(())
    });
    property(6, even_case(), |device, stream, case| {
        check_case::<f16, f16, f32>(device, stream, &case);
        check_case::<bf16, E4M3, f32>(device, stream, &case);
        check_case::<bf16, E5M2, bf16>(device, stream, &case);
        check_case::<f16, E5M2, f32>(device, stream, &case);
        check_case::<f16, i8, f16>(device, stream, &case);
        check_case::<bf16, i8, f32>(device, stream, &case);
        Ok(())
    });
}

/// Everything in whole chunks but for where the angles, or the cache's keys or values, begin; a scale for each head; and heads of 46 and 80.
#[test]
fn angles_and_caches_that_begin_off_a_chunk() {
    on_every_device(|device, stream| {
        for layout in [CacheLayout::XSplit, CacheLayout::Nhd, CacheLayout::Hnd] {
            for (head_dim, at) in [(64, [1, 0, 0]), (64, [0, 1, 0]), (64, [0, 0, 1]), (80, [0; 3]), (46, [0; 3])] {
                if layout == CacheLayout::XSplit && head_dim == 46 {
                    continue;
                }
                let (shape, pairing) = (CacheShape::new(3, 16, 2, head_dim), Pairing::Gptj);
                let (tokens, query_heads, rot_dim, offset, pad, per_head, seed) = (5, 3, head_dim, 0, 0, true, 2);
                let two_heads = false;
                let case = Case {
                    layout,
                    shape,
                    tokens,
                    query_heads,
                    rot_dim,
                    offset,
                    pad,
                    pairing,
                    per_head,
                    two_heads,
                    at,
                    seed,
                };
                check_case::<bf16, bf16, bf16>(device, stream, &case);
                let twos = Case { query_heads: 4, two_heads: true, ..case.clone() };
                check_case::<bf16, bf16, bf16>(device, stream, &twos);
                check_case::<f16, E4M3, f16>(device, stream, &twos);
                check_case::<f32, i8, f32>(device, stream, &case);
                check_case::<bf16, i8, f32>(device, stream, &Case { pairing: Pairing::Neox, ..case });
            }
        }
    });
}

#[test]
fn forty_heads_of_128() {
    on_every_device(|device, stream| {
        for layout in [CacheLayout::XSplit, CacheLayout::Nhd] {
            let case = Case {
                layout,
                shape: CacheShape::new(2, 16, 40, 128),
                tokens: 5,
                query_heads: 40,
                rot_dim: 128,
                offset: 0,
                pad: 0,
                pairing: Pairing::Neox,
                per_head: false,
                two_heads: false,
                at: [0; 3],
                seed: 1,
            };
            check_case::<bf16, bf16, f32>(device, stream, &case);
        }
    });
}

/// As the two operations one after the other, bit by bit, where the cache has the inputs' type; `i8` besides.
#[test]
fn equals_the_two_operations_and_runs_in_a_graph() {
    use warploom::kv_cache;
    on_every_device(|device, stream| {
        device.preload(&["rope", "kv_cache"]).unwrap();
        let shape = CacheShape::new(2, 16, 2, 64);
        let host = noise_of::<f16>(6 * 8 * 64, 4);
        let new = || Tensor::from_slice(device, &host, &[6, 8, 64]).unwrap();
        let angles = rope::cache::<f32>(device, 50, 64, 1e4, Scaling::None).unwrap();
        let positions = Tensor::from_slice(device, &[0i32, 1, 2, 49, 7, 8], &[6]).unwrap();
        let slots = Tensor::from_slice(device, &[0i32, 1, 2, 31, -1, 8], &[6]).unwrap();
        let bits = |t: &Tensor<f16>| t.to_vec().unwrap().iter().map(|v| v.to_bits()).collect::<Vec<_>>();
        for layout in [CacheLayout::XSplit, CacheLayout::Hnd] {
            let (a, b) = (new(), new());
            let part = |t: &Tensor<f16>, at, n| t.narrow(1, at, n).unwrap();
            let (mut fused, mut apart) = (
                KvCache::<f16>::zeros(device, layout, shape).unwrap(),
                KvCache::<f16>::zeros(device, layout, shape).unwrap(),
            );
            let (mut query, key, value) = (part(&a, 0, 4), part(&a, 4, 2), part(&a, 6, 2));
            let graph = Graph::capture(stream, |s| {
                let (p, o) = (Pairing::Neox, RotaryAndCacheOptions::default());
                rope::rotary_and_cache(
                    s,
                    &mut query,
                    &mut fused,
                    None,
                    &key,
                    &value,
                    &positions,
                    &angles,
                    &slots,
                    &o.pairing(p),
                )
            })
            .unwrap();
            assert_eq!(bits(&a), bits(&b));
            graph.launch(stream).unwrap();
            let (mut query, mut key, value) = (part(&b, 0, 4), part(&b, 4, 2), part(&b, 6, 2));
            let options = rope::RotaryOptions::default();
            rope::rotary(stream, &mut query, Some(&mut key), None, &positions, &angles, &options).unwrap();
            let options = kv_cache::ReshapeAndCacheOptions::default();
            kv_cache::reshape_and_cache(stream, &mut apart, None, &key, &value, &slots, &options).unwrap();
            assert_eq!(bits(&part(&a, 0, 4)), bits(&part(&b, 0, 4)));
            assert_eq!((bits(fused.key()), bits(fused.value())), (bits(apart.key()), bits(apart.value())));

            let scales = [0.02f32, 0.03];
            let [key_scale, value_scale] = scales.map(|s| Tensor::from_slice(device, &[s], &[1]).unwrap());
            let mut small = KvCache::<i8>::zeros(device, layout, shape).unwrap();
            let (c, o) = (new(), RotaryAndCacheOptions::default().scales(&key_scale, &value_scale));
            let (mut query, key, value) = (part(&c, 0, 4), part(&c, 4, 2), part(&c, 6, 2));
            let p = Pairing::Neox;
            rope::rotary_and_cache(
                stream,
                &mut query,
                &mut small,
                None,
                &key,
                &value,
                &positions,
                &angles,
                &slots,
                &o.pairing(p),
            )
            .unwrap();
            // x is another one in a cache of bytes, so element by element.
            // The keys of the other cache are rounded to f16, these are not.
            for (s, e, from, to, scale, error) in [
                (small.key(), fused.key(), small.key_strides(), fused.key_strides(), scales[0], 2f64.powi(-10)),
                (small.value(), fused.value(), small.value_strides(), fused.value_strides(), scales[1], 0.0),
            ] {
                let (s, e) = (s.to_vec().unwrap(), e.to_vec().unwrap());
                for i in 0..shape.blocks * shape.block_len() {
                    let (b, h, t, d) = (i / 2048, i / 1024 % 2, i / 64 % 16, i % 64);
                    let (s, e) = (s[from.index(b, h, t, d)], e[to.index(b, h, t, d)].to_f32() as f64);
                    let stored = |v: f64| exact_round::<i8>((v as f32 * (1.0 / scale)) as f64) as u8 as i8;
                    assert!((stored(e - error)..=stored(e + error)).contains(&s), "{s} for {e}");
                }
            }
        }
    });
}

#[test]
fn equal_slots_hold_one_of_their_tokens() {
    on_every_device(|device, stream| {
        let shape = CacheShape::new(2, 16, 2, 64);
        // Nothing turns at the only position, and everything of a token is one number.
        let angles = rope::cache::<f32>(device, 1, 64, 1e4, Scaling::None).unwrap();
        let positions = Tensor::from_slice(device, &[0i32; 20], &[20]).unwrap();
        let slots = Tensor::from_slice(device, &[7i32; 20], &[20]).unwrap();
        for layout in [CacheLayout::XSplit, CacheLayout::Nhd] {
            let x: Vec<f32> = (0..20).flat_map(|t| vec![1.0 + t as f32; 128]).collect();
            let x = Tensor::from_slice(device, &x, &[20, 2, 64]).unwrap();
            let mut query = Tensor::<f32>::zeros(device, &[20, 1, 64]).unwrap();
            let mut cache = KvCache::<f32>::zeros(device, layout, shape).unwrap();
            let mut status = Tensor::<u32>::zeros(device, &[1]).unwrap();
            let (q, status_word, options) = (&mut query, Some(&mut status), RotaryAndCacheOptions::default());
            match rope::rotary_and_cache(
                stream,
                q,
                &mut cache,
                status_word,
                &x,
                &x,
                &positions,
                &angles,
                &slots,
                &options,
            ) {
                // The one place that may race: the detector is right.
                Err(Error::Launch(e)) if matches!(e.kind, simt::ErrorKind::Race { .. }) => continue,
                outcome => outcome.unwrap(),
            }
            for (tensor, strides) in [(cache.key(), cache.key_strides()), (cache.value(), cache.value_strides())] {
                let all = tensor.to_vec().unwrap();
                for (head, dim) in (0..2).flat_map(|h| (0..64).map(move |d| (h, d))) {
                    let v = all[strides.index(0, head, 7, dim)];
                    assert!((1.0..=20.0).contains(&v) && v.fract() == 0.0, "{v}");
                }
                assert_eq!(all.iter().filter(|v| **v != 0.0).count(), 128);
            }
            assert_eq!(status.to_vec().unwrap(), [0]);
        }
    });
}

/// Tokens, and blocks of the cache, more than 2^31 elements apart: the same numbers as from small tensors.
#[test]
fn tokens_and_blocks_far_apart() {
    FAR.on_every_device(10, |device, stream, rows| {
        let (heads, kv_heads, head_dim) = (4, 2, 64);
        let row = (heads + 2 * kv_heads) * head_dim;
        let host = noise_of::<bf16>(rows * row, 1);
        let angles = Tensor::from_slice(device, &noise_of::<f32>(3 * head_dim, 2), &[3, head_dim]).unwrap();
        let positions = Tensor::from_slice(device, &[1i32, 0, 2][..rows], &[rows]).unwrap();
        // The last slot of each block, the last block first.
        let slots: Vec<i64> = (0..rows as i64).rev().map(|block| 8 * block + 7).collect();
        let slots = Tensor::from_slice(device, &slots, &[rows]).unwrap();
        for layout in [CacheLayout::XSplit, CacheLayout::Nhd, CacheLayout::Hnd] {
            let (near, far) = (Tensor::from_slice(device, &host, &[rows * row]).unwrap(), FAR.rows(device, &host, row));
            let dense = KvCache::<bf16>::zeros(device, layout, CacheShape::new(rows, 8, kv_heads, head_dim)).unwrap();
            // Keys and values of a block next to each other.
            let block_len = dense.shape().block_len();
            let blocks = FAR.rows(device, &vec![bf16::ZERO; rows * 2 * block_len], 2 * block_len);
            let part = |t: &Tensor<bf16>, at| {
                let mut strides = t.strides().to_vec();
                strides[0] = FAR.stride;
                blocks.as_strided(t.shape(), &strides, at).unwrap()
            };
            let spread = KvCache::from_tensors(layout, part(dense.key(), 0), part(dense.value(), block_len)).unwrap();
            for (tensor, stride, mut cache) in [(&near, row, dense.clone()), (&far, FAR.stride, spread)] {
                let part = |heads, at| {
                    let (shape, strides) = ([rows, heads, head_dim], [stride, head_dim, 1]);
                    tensor.as_strided(&shape, &strides, at * head_dim).unwrap()
                };
                let (mut query, key, value) = (part(heads, 0), part(kv_heads, heads), part(kv_heads, heads + kv_heads));
                let options = RotaryAndCacheOptions::default();
                rope::rotary_and_cache(
                    stream, &mut query, &mut cache, None, &key, &value, &positions, &angles, &slots, &options,
                )
                .unwrap();
            }
            assert_eq!(FAR.read(&far, row), near.to_vec().unwrap(), "{layout:?}");
            let got = FAR.read(&blocks, 2 * block_len);
            let of_block = |t: &Tensor<bf16>, b| t.narrow(0, b, 1).unwrap().to_vec().unwrap();
            let want = (0..rows).flat_map(|b| [of_block(dense.key(), b), of_block(dense.value(), b)].concat());
            assert_eq!(got, want.collect::<Vec<_>>(), "{layout:?}");
            let written = got.iter().filter(|v| v.to_bits() != 0).count();
            assert!(written > rows * 2 * kv_heads * head_dim - 10, "{written}");
        }
    });
}

/// Strides of dimensions of one element are of no consequence: of a single token, a single head, a cache of one block.
#[test]
fn strides_that_nothing_follows() {
    const FREE: usize = (isize::MAX as usize / 4) & !7;
    on_every_device(|device, stream| {
        let dim = 64;
        let angles = rope::cache::<f32>(device, 8, dim, 1e4, Scaling::None).unwrap();
        let [positions, slots] = [3i32, 5].map(|i| Tensor::from_slice(device, &[i], &[1]).unwrap());
        for layout in [CacheLayout::XSplit, CacheLayout::Nhd, CacheLayout::Hnd] {
            for heads in [1, 2] {
                let run = |free: bool| {
                    let host = noise_of::<bf16>(3 * heads * dim, 4);
                    let all = Tensor::from_slice(device, &host, &[3, 1, heads, dim]).unwrap();
                    let dense = KvCache::<bf16>::zeros(device, layout, CacheShape::new(1, 16, heads, dim)).unwrap();
                    let view = |t: &Tensor<bf16>, shape: &[usize], at| {
                        let strides = t.strides()[t.strides().len() - shape.len()..].iter().zip(shape);
                        let strides: Vec<_> = strides.map(|(s, n)| if free && *n == 1 { FREE } else { *s }).collect();
                        t.as_strided(shape, &strides, at).unwrap()
                    };
                    let [mut query, key, value] = [0, 1, 2].map(|i| view(&all, &[1, heads, dim], i * heads * dim));
                    let [keys, values] = [dense.key(), dense.value()].map(|t| view(t, t.shape(), 0));
                    let mut cache = KvCache::from_tensors(layout, keys, values).unwrap();
                    let options = RotaryAndCacheOptions::default().two_heads(heads == 2);
                    rope::rotary_and_cache(
                        stream, &mut query, &mut cache, None, &key, &value, &positions, &angles, &slots, &options,
                    )
                    .unwrap();
                    (all.to_vec().unwrap(), cache_of(&dense))
                };
                let want = run(false);
                assert!(want.1.0.iter().chain(&want.1.1).any(|bits| *bits != 0));
                assert!(run(true) == want, "{layout:?}, {heads} heads");
            }
        }
    });
}

#[test]
fn every_input_type_has_every_cache_type() {
    use cuda_std::DType;
    use rope::rotary_and_cache::entry;
    for layout in [CacheLayout::XSplit, CacheLayout::Nhd, CacheLayout::Hnd] {
        for input in [DType::F32, DType::F16, DType::Bf16] {
            for cache in [input, DType::E4m3, DType::E5m2, DType::I8] {
                let name = if layout == CacheLayout::XSplit { "xsplit" } else { "flat" };
                let want = format!("rotary_and_cache_{name}_{input}_{cache}");
                assert_eq!(entry(input, cache, layout, 1).unwrap().name, want);
                let two = (input != DType::F32).then(|| format!("{want}_twos"));
                assert_eq!(entry(input, cache, layout, 2).map(|e| e.name), two.as_deref());
            }
            assert!(entry(input, DType::I32, layout, 1).is_none());
        }
        assert!(entry(DType::F32, DType::F16, layout, 1).is_none());
    }
}

#[test]
fn refuses_what_it_cannot_do() {
    let device = &Device::simt();
    let stream = &Stream::new(device).unwrap();
    let t = |dims: &[usize]| Tensor::<f16>::zeros(device, dims).unwrap();
    let shape = CacheShape::new(2, 16, 2, 64);
    let cache = KvCache::<f16>::zeros(device, CacheLayout::Nhd, shape).unwrap();
    let angles = Tensor::<f32>::zeros(device, &[10, 64]).unwrap();
    let positions = Tensor::<i32>::zeros(device, &[3]).unwrap();
    let slots = Tensor::<i32>::zeros(device, &[3]).unwrap();
    let run = |query: &Tensor<f16>, key: &Tensor<f16>, value: &Tensor<f16>, slots: &Tensor<i32>, options| {
        let (q, c) = (&mut query.clone(), &mut cache.clone());
        rope::rotary_and_cache(stream, q, c, None, key, value, &positions, &angles, slots, &options).unwrap_err()
    };
    let (q, k, plain) = (|| t(&[3, 4, 64]), || t(&[3, 2, 64]), RotaryAndCacheOptions::default);
    assert!(matches!(run(&t(&[3, 4, 32]), &k(), &k(), &slots, plain()), Error::Shape { arg: "query", .. }));
    assert!(matches!(run(&q(), &t(&[3, 3, 64]), &k(), &slots, plain()), Error::Shape { arg: "key", .. }));
    assert!(matches!(run(&q(), &k(), &t(&[2, 2, 64]), &slots, plain()), Error::Shape { arg: "value", .. }));
    let few = Tensor::<i32>::zeros(device, &[2]).unwrap();
    assert!(matches!(run(&q(), &k(), &k(), &few, plain()), Error::Shape { arg: "slots", .. }));
    assert!(matches!(run(&q(), &k(), &k(), &slots, plain().offset(1)), Error::Value { arg: "offset", .. }));
    let far = plain().largest_position(10);
    assert!(matches!(run(&q(), &k(), &k(), &slots, far), Error::Value { arg: "largest_position", .. }));
    let one = Tensor::<f32>::zeros(device, &[1]).unwrap();
    assert!(matches!(run(&q(), &k(), &k(), &slots, plain().scales(&one, &one)), Error::Value { arg: "scales", .. }));
    let odd = run(&t(&[3, 3, 64]), &k(), &k(), &slots, plain().two_heads(true));
    assert!(matches!(odd, Error::Unsupported { .. }), "{odd:?}");
    let both = q();
    let part = both.narrow(1, 1, 2).unwrap();
    assert!(matches!(run(&both, &part, &k(), &slots, plain()), Error::Overlap { .. }));
}
