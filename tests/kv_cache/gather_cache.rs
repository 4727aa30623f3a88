//! Any layout, any type, any mixture of lengths; tables that are wrong; and what is refused.

use super::{INPUTS, cache_of, new_cache_at, rows_of, scales_of};
use cuda_std::Float;
use proptest::prelude::*;
use warploom::kv_cache::GatherCacheOptions;
use warploom::kv_cache::{CacheElement, CacheLayout, CacheShape, KvCache, StoreAs};
use warploom::{Device, E4M3, E5M2, Error, Graph, Stream, Tensor, bf16, f16, kv_cache, reference};
use warploom_tests::{assert_close, noise_of, on_every_device, property};

#[derive(Clone, Debug)]
struct Case {
    layout: CacheLayout,
    shape: CacheShape,
    lengths: Vec<usize>,
    per_head: bool,
    pad: usize,
    /// Rows of the output behind the last sequence.
    spare: usize,
    /// Elements before the cache's keys and values.
    cache_at: [usize; 2],
    seed: usize,
}

fn case() -> impl Strategy<Value = Case> {
    let layout = prop::sample::select(vec![CacheLayout::XSplit, CacheLayout::Nhd, CacheLayout::Hnd]);
    let dims = prop::sample::select(vec![46usize, 64, 80, 128, 16]);
    let sizes = prop::sample::select(vec![8usize, 16, 5, 128]);
    let lengths = proptest::collection::vec(0usize..20, 0..5);
    (layout, dims, sizes, 1usize..4, lengths, (any::<bool>(), 0usize..3, 0usize..3, 0usize..1000)).prop_map(
        |(layout, head_dim, block_size, heads, lengths, (per_head, pad, spare, seed))| {
            let head_dim = if layout == CacheLayout::XSplit { head_dim.next_multiple_of(16) } else { head_dim };
            let shape = CacheShape::new(23, block_size, heads, head_dim);
            let cache_at = [[0, 0], [0, 0], [1, 0], [0, 1]][seed / 7 % 4];
            Case { layout, shape, lengths, per_head, pad: [0, 1, 16][pad], spare, cache_at, seed }
        },
    )
}

fn check_case<T: Float + StoreAs<S>, S: CacheElement>(device: &Device, stream: &Stream, case: &Case) {
    let CacheShape { blocks, block_size, heads, head_dim, .. } = case.shape;
    let scaled = T::SCALED;
    let n = if case.per_head { heads } else { 1 };
    let scales_host = scales_of(n);
    let [key_scale, value_scale] = [0, 1].map(|i| Tensor::from_slice(device, &scales_host[i], &[n]).unwrap());
    // A cache with something in every slot.
    let mut cache = new_cache_at::<S>(device, case.layout, case.shape, case.cache_at);
    let slots: Vec<i64> = (0..case.shape.slots() as i64).collect();
    let slots = Tensor::from_slice(device, &slots, &[slots.len()]).unwrap();
    let (k, _) = rows_of::<T>(device, case.shape.slots(), heads, head_dim, 0, 1);
    let (v, _) = rows_of::<T>(device, case.shape.slots(), heads, head_dim, 0, 2);
    let mut options = kv_cache::ReshapeAndCacheOptions::default();
    if scaled {
        options = options.scales(&key_scale, &value_scale);
    }
    kv_cache::reshape_and_cache(stream, &mut cache, None, &k, &v, &slots, &options).unwrap();

    let tokens: usize = case.lengths.iter().sum();
    let rows = tokens + case.spare;
    let table_len = case.lengths.iter().map(|l| l.div_ceil(block_size)).max().unwrap_or(0);
    let tables: Vec<i32> = (0..case.lengths.len() * table_len).map(|i| ((i * 7 + case.seed) % blocks) as i32).collect();
    let starts: Vec<i32> = std::iter::once(0)
        .chain(case.lengths.iter().scan(0, |sum, l| {
            *sum += *l as i32;
            Some(*sum)
        }))
        .collect();
    let device_tables = Tensor::from_slice(device, &tables, &[case.lengths.len(), table_len]).unwrap();
    let device_starts = Tensor::from_slice(device, &starts, &[starts.len()]).unwrap();
    let (mut key, unwritten) = rows_of::<T>(device, rows, heads, head_dim, case.pad, 3);
    let (mut value, _) = rows_of::<T>(device, rows, heads, head_dim, case.pad, 3);
    let mut status = Tensor::<u32>::zeros(device, &[1]).unwrap();
    let mut options = GatherCacheOptions::default();
    if scaled {
        options = options.scales(&key_scale, &value_scale);
    }
    kv_cache::gather_cache(
        stream,
        &mut key,
        &mut value,
        Some(&mut status),
        &cache,
        &device_tables,
        &device_starts,
        &options,
    )
    .unwrap();

    let of_heads = |scales: &[f32]| -> Vec<f64> {
        (0..heads).map(|h| if scaled { scales[if case.per_head { h } else { 0 }] as f64 } else { 1.0 }).collect()
    };
    for (got, tensor, strides, scale) in [
        (&key, cache.key(), cache.key_strides(), of_heads(&scales_host[0])),
        (&value, cache.value(), cache.value_strides(), of_heads(&scales_host[1])),
    ] {
        let stored: Vec<f64> = tensor.to_vec().unwrap().into_iter().map(|x| S::widen_all([x])[0] as f64).collect();
        let mut want = vec![];
        for (s, &len) in case.lengths.iter().enumerate() {
            let table: Vec<usize> = tables[s * table_len..].iter().take(table_len).map(|b| *b as usize).collect();
            want.extend(reference::kv_cache::gather_cache(&stored, strides, case.shape, &table, len, &scale));
        }
        let got = got.to_vec().unwrap();
        assert_close(&got[..want.len()], &want, if scaled { 1e-7 } else { 0.0 }, 1.0);
        let same = |a: &T, b: &T| a.to_f32().to_bits() == b.to_f32().to_bits();
        assert!(got[want.len()..].iter().zip(&unwritten[want.len()..]).all(|(a, b)| same(a, b)), "{case:?}");
    }
    assert_eq!(status.to_vec().unwrap(), [0]);
}

fn check<T: Float + StoreAs<S>, S: CacheElement>(cases: u32) {
    property(cases, case(), |device, stream, case| {
        check_case::<T, S>(device, stream, &case);
        Ok(())
    });
}

#[test]
fn matches_the_reference() {
    check::<f32, f32>(6);
    check::<f16, f16>(4);
    check::<bf16, bf16>(8);
    check::<f32, i8>(3);
    check::<f32, E4M3>(3);
    check::<f16, E5M2>(4);
    check::<f16, i8>(3);
    check::<bf16, E4M3>(6);
    check::<bf16, E5M2>(3);
    check::<bf16, i8>(4);
}

/// What tiles have to cope with.
#[derive(Clone, Debug)]
struct Tiles {
    shape: CacheShape,
    lengths: Vec<usize>,
    /// Tokens before the first sequence, and behind the last one.
    around: [usize; 2],
    /// Elements between heads, and between tokens.
    gaps: [usize; 2],
    /// One of so many entries of tables is wrong.
    wrong: usize,
    seed: usize,
}

fn tiles_case() -> impl Strategy<Value = Tiles> {
    let dims = prop::sample::select(vec![128usize, 64, 80, 256, 16]);
    let sizes = prop::sample::select(vec![16usize, 8, 32, 24, 128]);
    let lengths = proptest::collection::vec(0usize..60, 1..5);
    let gaps = (prop::sample::select(vec![0usize, 0, 8]), prop::sample::select(vec![0usize, 0, 24]));
    let around = (prop::sample::select(vec![0usize, 0, 3, 18]), 0usize..20);
    (dims, sizes, 1usize..4, lengths, around, gaps, prop::sample::select(vec![1000usize, 1000, 5]), 0usize..1000)
        .prop_map(|(head_dim, block_size, heads, lengths, around, gaps, wrong, seed)| Tiles {
            shape: CacheShape::new(19, block_size, heads, head_dim),
            lengths,
            around: around.into(),
            gaps: gaps.into(),
            wrong,
            seed,
        })
}

fn check_tiles<T: Float + StoreAs<T>>(device: &Device, stream: &Stream, case: &Tiles) {
    let CacheShape { blocks, block_size, heads, head_dim, .. } = case.shape;
    let from = |t: &Tensor<T>, seed| {
        Tensor::from_slice(device, &noise_of::<T>(t.len(), seed), &[t.len()]).unwrap().reshape(t.shape()).unwrap()
    };
    let dense = KvCache::<T>::zeros(device, CacheLayout::XSplit, case.shape).unwrap();
    let (keys, values) = (from(dense.key(), 1), from(dense.value(), 2));
    let cache = KvCache::from_tensors(CacheLayout::XSplit, keys, values).unwrap();
    let longest = case.lengths.iter().map(|l| l.div_ceil(block_size)).max().unwrap().max(1);
    let entry = |i: usize| match (i + case.seed) % case.wrong {
        0 => [-1, blocks as i32, i32::MIN][i % 3],
        _ => ((i * 7 + case.seed) % blocks) as i32,
    };
    let tables: Vec<i32> = (0..case.lengths.len() * longest).map(entry).collect();
    let tables = Tensor::from_slice(device, &tables, &[case.lengths.len(), longest]).unwrap();
    let mut starts = vec![case.around[0] as i32];
    case.lengths.iter().for_each(|l| starts.push(starts[starts.len() - 1] + *l as i32));
    let tokens = starts[starts.len() - 1] as usize + case.around[1];
    let starts = Tensor::from_slice(device, &starts, &[starts.len()]).unwrap();

    let head = head_dim + case.gaps[0];
    let row = heads * head + case.gaps[1];
    let mut gathered = vec![];
    for tiles in [false, true] {
        let memory = [3, 4].map(|seed| {
            let all = noise_of::<T>(tokens * row + 8, seed);
            Tensor::from_slice(device, &all, &[all.len()]).unwrap()
        });
        let [mut key, mut value] =
            memory.each_ref().map(|m| m.as_strided(&[tokens, heads, head_dim], &[row, head, 1], 8).unwrap());
        let mut status = Tensor::<u32>::zeros(device, &[1]).unwrap();
        let options = GatherCacheOptions::default().tiles(tiles);
        let status_out = Some(&mut status);
        kv_cache::gather_cache(stream, &mut key, &mut value, status_out, &cache, &tables, &starts, &options).unwrap();
        let bits = memory.map(|m| m.to_vec().unwrap().into_iter().map(|x| x.to_f32().to_bits()).collect::<Vec<_>>());
        gathered.push((bits, status.to_vec().unwrap()));
    }
    assert!(gathered[0] == gathered[1], "{case:?}: {:?}, {:?}", gathered[0].1, gathered[1].1);
}

/// With all of memory around them: sequences that meet in a tile, tables that are wrong, rows with gaps.
#[test]
fn tiles_leave_the_very_bits_that_chunks_do() {
    property(40, tiles_case(), |device, stream, case| {
        if case.seed % 4 == 0 {
            check_tiles::<f16>(device, stream, &case);
        } else {
            check_tiles::<bf16>(device, stream, &case);
        }
        Ok(())
    });
}

#[test]
fn large_launches_go_by_tiles_if_they_can() {
    use kv_cache::gather_cache::{Args, by_tiles};
    // SAFETY: null pointers and zeros.
    let zeros: Args = unsafe { std::mem::zeroed() };
    let args = |tokens: u32, sequences: u32, block_size: u32, key: usize| Args {
        tokens,
        sequences,
        block_size,
        key: std::ptr::without_provenance_mut(key),
        heads: 8,
        head_dim: 128,
        ..zeros
    };
    let (bf16, e4m3, x) = (cuda_std::DType::Bf16, cuda_std::DType::E4m3, CacheLayout::XSplit);
    assert!(by_tiles(bf16, bf16, x, &args(32768, 8, 16, 256)));
    assert!(!by_tiles(bf16, bf16, x, &args(256, 8, 16, 256)));
    assert!(!by_tiles(bf16, bf16, x, &args(32768, 32768, 16, 256)));
    assert!(!by_tiles(bf16, bf16, x, &args(32768, 8, 5, 256)));
    assert!(!by_tiles(bf16, bf16, x, &args(32768, 8, 16, 2)));
    assert!(!by_tiles(bf16, e4m3, x, &args(32768, 8, 16, 256)));
    assert!(!by_tiles(bf16, bf16, CacheLayout::Nhd, &args(32768, 8, 16, 256)));
}

/// Everything in whole chunks but for where the keys or the values of the cache begin.
#[test]
fn caches_that_begin_off_a_chunk() {
    on_every_device(|device, stream| {
        for layout in [CacheLayout::XSplit, CacheLayout::Nhd, CacheLayout::Hnd] {
            for cache_at in [[1, 0], [0, 1], [1, 1]] {
                let shape = CacheShape::new(23, 8, 2, 64);
                let case =
                    Case { layout, shape, lengths: vec![3, 9], per_head: true, pad: 0, spare: 1, cache_at, seed: 1 };
                check_case::<bf16, bf16>(device, stream, &case);
                check_case::<f16, E4M3>(device, stream, &case);
                check_case::<f32, i8>(device, stream, &case);
            }
        }
    });
}

#[test]
fn tables_that_are_wrong_leave_rows_alone() {
    on_every_device(|device, stream| {
        let shape = CacheShape::new(3, 4, 1, 16);
        let cache = KvCache::<f32>::zeros(device, CacheLayout::Nhd, shape).unwrap();
        let gather = |tables: &[i32], len: usize, starts: &[i32], wrong: u32, written: &[usize]| {
            let tables = Tensor::from_slice(device, tables, &[starts.len() - 1, len]).unwrap();
            let starts = Tensor::from_slice(device, starts, &[starts.len()]).unwrap();
            let ones = vec![1f32; 12 * 16];
            let mut key = Tensor::from_slice(device, &ones, &[12, 1, 16]).unwrap();
            let mut value = Tensor::from_slice(device, &ones, &[12, 1, 16]).unwrap();
            let mut status = Tensor::<u32>::zeros(device, &[1]).unwrap();
            let options = GatherCacheOptions::default();
            kv_cache::gather_cache(stream, &mut key, &mut value, Some(&mut status), &cache, &tables, &starts, &options)
                .unwrap();
            assert_eq!(status.to_vec().unwrap(), [wrong], "{starts:?}");
            let key = key.to_vec().unwrap();
            let zeros: Vec<usize> = (0..12).filter(|t| key[t * 16..][..16] == [0.0; 16]).collect();
            assert_eq!(zeros, written);
        };
        gather(&[0, 1, 2, 0], 2, &[0, 5, 7], 0, &[0, 1, 2, 3, 4, 5, 6]);
        gather(&[0, 3, -1, 0], 2, &[0, 5, 7], 3, &[0, 1, 2, 3]);
        gather(&[i32::MIN, i32::MAX], 2, &[0, 8], 8, &[]);
        // The table is too short for the sequence.
        gather(&[0], 1, &[0, 9], 5, &[0, 1, 2, 3]);
        // Starts that do not start at 0, or go down.
        gather(&[0, 0], 2, &[3, 6], 3, &[3, 4, 5]);
        gather(&[0, 0], 1, &[-2_000_000_000, -1, 2], 0, &[0, 1]);
        gather(&[0], 1, &[i32::MIN, i32::MAX], 12, &[]);
    });
}

#[test]
fn forty_heads_in_a_graph() {
    on_every_device(|device, stream| {
        device.preload(&["kv_cache"]).unwrap();
        let shape = CacheShape::new(3, 16, 40, 128);
        let (lengths, cache_at) = (vec![3, 2], [0; 2]);
        let case = |layout| Case { layout, shape, lengths, per_head: true, pad: 0, spare: 1, cache_at, seed: 1 };
        check_case::<bf16, bf16>(device, stream, &case(CacheLayout::Nhd));
        let cache = KvCache::<bf16>::zeros(device, CacheLayout::XSplit, shape).unwrap();
        let tables = Tensor::from_slice(device, &[1i32], &[1, 1]).unwrap();
        let starts = Tensor::from_slice(device, &[0i32, 2], &[2]).unwrap();
        let (mut key, _) = rows_of::<bf16>(device, 2, 40, 128, 0, 1);
        let (mut value, before) = rows_of::<bf16>(device, 2, 40, 128, 0, 1);
        let graph = Graph::capture(stream, |s| {
            kv_cache::gather_cache(
                s,
                &mut key,
                &mut value,
                None,
                &cache,
                &tables,
                &starts,
                &GatherCacheOptions::default(),
            )
        })
        .unwrap();
        assert_eq!(value.to_vec().unwrap(), before);
        graph.launch(stream).unwrap();
        assert!(key.to_vec().unwrap().iter().chain(&value.to_vec().unwrap()).all(|v| v.to_bits() == 0));
        assert!(cache_of(&cache).0.iter().all(|b| *b == 0));
    });
}

#[test]
fn refuses_what_it_cannot_do() {
    let device = &Device::simt();
    let stream = &Stream::new(device).unwrap();
    let shape = CacheShape::new(3, 4, 2, 16);
    let cache = KvCache::<bf16>::zeros(device, CacheLayout::Hnd, shape).unwrap();
    let t = |dims: &[usize]| Tensor::<bf16>::zeros(device, dims).unwrap();
    let i = |dims: &[usize]| Tensor::<i32>::zeros(device, dims).unwrap();
    let run = |key: &Tensor<bf16>, value: &Tensor<bf16>, tables: &Tensor<i32>, starts: &Tensor<i32>| {
        let (mut key, mut value) = (key.clone(), value.clone());
        kv_cache::gather_cache(
            stream,
            &mut key,
            &mut value,
            None,
            &cache,
            tables,
            starts,
            &GatherCacheOptions::default(),
        )
    };
    let good = || t(&[5, 2, 16]);
    assert!(run(&good(), &good(), &i(&[1, 2]), &i(&[2])).is_ok());
    assert!(matches!(run(&t(&[5, 3, 16]), &good(), &i(&[1, 2]), &i(&[2])), Err(Error::Shape { arg: "key", .. })));
    assert!(matches!(run(&good(), &t(&[4, 2, 16]), &i(&[1, 2]), &i(&[2])), Err(Error::Shape { arg: "value", .. })));
    assert!(matches!(run(&good(), &good(), &i(&[2]), &i(&[2])), Err(Error::Shape { arg: "block_table", .. })));
    assert!(matches!(run(&good(), &good(), &i(&[1, 2]), &i(&[1])), Err(Error::Shape { arg: "starts", .. })));
    let same = good();
    assert!(matches!(run(&same, &same, &i(&[1, 2]), &i(&[2])), Err(Error::Overlap { .. })));
    let again = good().as_strided(&[5, 2, 16], &[32, 0, 1], 0).unwrap();
    assert!(matches!(run(&again, &good(), &i(&[1, 2]), &i(&[2])), Err(Error::Stride { arg: "key", .. })));
    let one = Tensor::<f32>::zeros(device, &[1]).unwrap();
    let tiles = GatherCacheOptions::default().tiles(true);
    let e = kv_cache::gather_cache(stream, &mut good(), &mut good(), None, &cache, &i(&[1, 2]), &i(&[2]), &tiles);
    assert!(matches!(e, Err(Error::Unsupported { .. })));
    let options = GatherCacheOptions::default().scales(&one, &one);
    let e = kv_cache::gather_cache(stream, &mut good(), &mut good(), None, &cache, &i(&[1, 2]), &i(&[2]), &options);
    assert!(matches!(e, Err(Error::Value { arg: "scales", .. })));
}

#[test]
fn every_output_type_has_every_cache_type() {
    use kv_cache::gather_cache::{entry, tiles_entry};
    for layout in [CacheLayout::XSplit, CacheLayout::Nhd, CacheLayout::Hnd] {
        for output in INPUTS {
            for cache in [output, cuda_std::DType::E4m3, cuda_std::DType::E5m2, cuda_std::DType::I8] {
                let name = if layout == CacheLayout::XSplit { "xsplit" } else { "flat" };
                let name = format!("gather_cache_{name}_{output}_{cache}");
                assert_eq!(entry(output, cache, layout).unwrap().name, name);
                let tiles = layout == CacheLayout::XSplit && output == cache && output.size() == 2;
                assert_eq!(
                    tiles_entry(output, cache, layout).map(|e| e.name),
                    tiles.then(|| name + "_tiles").as_deref()
                );
            }
        }
    }
}
