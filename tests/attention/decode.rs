use cuda_std::{E4M3, E5M2, Float};
use proptest::prelude::*;
use warploom::attention::decode::{Args, Scratch, launch};
use warploom::attention::{DecodeOptions, DecodePath, DecodeShape, DecodeSplit, DecodeWorkspace, decode};
use warploom::kv_cache::layout::Scales;
use warploom::kv_cache::{CacheElement, CacheLayout, CacheShape, KvCache};
use warploom::reference::attention as reference;
use warploom::{DType, Device, Error, Graph, Stream, Tensor, bf16, f16};
use warploom_tests::{
    assert_close, large_gpu, noise, noise_of, on_every_device, on_every_order, property, skipped_without_hopper, widen,
};

/// A batch to decode: its cache with NaN in every slot that no sequence owns, and what the cache means.
struct Case<T, S> {
    q: Tensor<T>,
    cache: KvCache<S>,
    table: Tensor<i32>,
    lens: Tensor<i32>,
    query: Vec<f64>,
    /// By sequence, KV head and position.
    keys: Vec<Vec<Vec<Vec<f64>>>>,
    values: Vec<Vec<Vec<Vec<f64>>>>,
    workspace: DecodeWorkspace,
}

#[derive(Clone, Debug)]
struct Shape {
    lens: Vec<usize>,
    q_len: usize,
    kv_heads: usize,
    group: usize,
    dim: usize,
    page: usize,
    layout: CacheLayout,
}

fn case<T: Float, S: CacheElement>(d: &Device, shape: &Shape) -> Case<T, S> {
    let Shape { lens, q_len, kv_heads, group, dim, page, layout } = shape.clone();
    let batch = lens.len();
    let max_pages = lens.iter().map(|l| l.div_ceil(page)).max().unwrap_or(0).max(1);
    // Pages are handed out from the highest number down, so that neighbours in a sequence are not neighbours in memory.
    let pages = lens.iter().map(|l| l.div_ceil(page)).sum::<usize>() + 2;
    let cs = CacheShape::new(pages, page, kv_heads, dim);
    let mut cache = KvCache::<S>::zeros(d, layout, cs).unwrap();
    let (ks, vs) = (cache.key_strides(), cache.value_strides());
    let nan = S::round(f32::NAN);
    let (mut k, mut v) = (vec![nan; pages * cs.block_len()], vec![nan; pages * cs.block_len()]);
    let mut table = vec![i32::MAX; batch * max_pages];
    let (mut keys, mut values) = (vec![], vec![]);
    let mut free = pages - 1;
    for (b, &len) in lens.iter().enumerate() {
        let (kn, vn) = (noise(len * kv_heads * dim, 7 + b as u64), noise(len * kv_heads * dim, 99 + b as u64));
        for p in 0..len.div_ceil(page) {
            table[b * max_pages + p] = free as i32;
            free -= 1;
        }
        let mut heads = (vec![], vec![]);
        for h in 0..kv_heads {
            let (mut hk, mut hv) = (vec![], vec![]);
            for i in 0..len {
                let block = table[b * max_pages + i / page] as usize;
                let at = (i * kv_heads + h) * dim;
                let store = |x: f32| S::round(if size_of::<S>() == 1 { 8.0 * x } else { x });
                for x in 0..dim {
                    k[ks.index(block, h, i % page, x)] = store(kn[at + x]);
                    v[vs.index(block, h, i % page, x)] = store(vn[at + x]);
                }
                let read = |n: &[f32]| (0..dim).map(|x| store(n[at + x]).widen() as f64).collect::<Vec<_>>();
                hk.push(read(&kn));
                hv.push(read(&vn));
            }
            heads.0.push(hk);
            heads.1.push(hv);
        }
        keys.push(heads.0);
        values.push(heads.1);
    }
    let fill = |t: &Tensor<S>, data: &[S]| t.clone().copy_from_slice(data).unwrap();
    fill(cache.key(), &k);
    fill(cache.value(), &v);
    cache = KvCache::from_tensors(layout, cache.key().clone(), cache.value().clone()).unwrap();
    let q = noise_of::<T>(batch * q_len * kv_heads * group * dim, 3);
    let lens32: Vec<i32> = lens.iter().map(|&l| l as i32).collect();
    Case {
        q: Tensor::from_slice(d, &q, &[batch, q_len, kv_heads * group, dim]).unwrap(),
        cache,
        table: Tensor::from_slice(d, &table, &[batch, max_pages]).unwrap(),
        lens: Tensor::from_slice(d, &lens32, &[batch]).unwrap(),
        query: widen(&q),
        keys,
        values,
        workspace: DecodeWorkspace::new(
            d,
            DecodeShape::new(batch, kv_heads * group, kv_heads, dim, max_pages * page).q_len(q_len),
        )
        .unwrap(),
    }
}

impl<T, S: CacheElement> Case<T, S> {
    /// Keys and values before what the first query token of a sequence sees become this, and pages that lie wholly there
    /// somebody else's: a page of NaN.
    fn forget(&mut self, shape: &Shape, window: usize, fill: f32) {
        let (page, width) = (shape.page, self.table.shape()[1]);
        let mut table = self.table.to_vec().unwrap();
        let (ks, vs) = (self.cache.key_strides(), self.cache.value_strides());
        let (mut k, mut v) = (self.cache.key().to_vec().unwrap(), self.cache.value().to_vec().unwrap());
        for (b, &len) in shape.lens.iter().enumerate() {
            let unseen = (len + 1).saturating_sub(shape.q_len + window);
            for i in 0..unseen {
                let block = table[b * width + i / page] as usize;
                for (h, x) in (0..shape.kv_heads).flat_map(|h| (0..shape.dim).map(move |x| (h, x))) {
                    k[ks.index(block, h, i % page, x)] = S::round(fill);
                    v[vs.index(block, h, i % page, x)] = S::round(fill);
                }
            }
            table[b * width..][..unseen / page].fill(0);
        }
        self.cache.key().clone().copy_from_slice(&k).unwrap();
        self.cache.value().clone().copy_from_slice(&v).unwrap();
        self.table.copy_from_slice(&table).unwrap();
    }
}

/// Whether the device has the kernels of a path.
fn has(d: &Device, path: DecodePath) -> bool {
    path != DecodePath::Tma || !skipped_without_hopper(d)
}

/// Those of both kernels that split which the device has.
fn splitting(d: &Device) -> impl Iterator<Item = DecodePath> {
    [DecodePath::Split, DecodePath::Tma].into_iter().filter(|&path| has(d, path))
}

/// All that the device has.
fn paths(d: &Device) -> impl Iterator<Item = DecodePath> {
    splitting(d).chain([DecodePath::Plain])
}

/// These over flat caches, and the portable one over an x-split one.
fn paths_of_layouts(d: &Device) -> impl Iterator<Item = (CacheLayout, DecodePath)> {
    paths(d).map(|path| (CacheLayout::Nhd, path)).chain([(CacheLayout::XSplit, DecodePath::Split)])
}

/// What bends the scores, in plain numbers, and how chunks are dealt to blocks.
#[derive(Clone, Copy, Debug, Default)]
struct Bend {
    soft_cap: f32,
    window: usize,
    alibi: bool,
    sinks: bool,
    split: DecodeSplit,
}

fn check<T: Float, S: CacheElement>(d: &Device, s: &Stream, shape: &Shape, bend: Bend, path: DecodePath) {
    if !has(d, path) {
        return;
    }
    let mut c = case::<T, S>(d, shape);
    if bend.window > 0 {
        c.forget(shape, bend.window, f32::NAN);
    }
    let q_heads = shape.kv_heads * shape.group;
    let batch = shape.lens.len();
    let slopes: Vec<f32> = (0..q_heads).map(|h| 0.5f32.powi(h as i32 + 1)).collect();
    let sinks: Vec<f32> = (0..q_heads).map(|h| h as f32 * 0.25 - 0.5).collect();
    let (alibi, sink) =
        (Tensor::from_slice(d, &slopes, &[q_heads]).unwrap(), Tensor::from_slice(d, &sinks, &[q_heads]).unwrap());
    let quantised = T::DTYPE != S::DTYPE;
    let (kf, vf): (Vec<f32>, Vec<f32>) = (0..shape.kv_heads)
        .map(|h| if quantised { (0.1 + 0.05 * h as f32, 0.2 - 0.03 * h as f32) } else { (1.0, 1.0) })
        .unzip();
    let key_scale = Tensor::from_slice(d, &kf, &[shape.kv_heads]).unwrap();
    let value_scale = Tensor::from_slice(d, &vf, &[shape.kv_heads]).unwrap();

    let scale = 0.17f32;
    let mut options = DecodeOptions::default().scale(scale).soft_cap(bend.soft_cap).window(bend.window).path(path);
    options.split = bend.split;
    options.alibi = bend.alibi.then_some(&alibi);
    options.sinks = bend.sinks.then_some(&sink);
    options.scales = quantised.then_some(Scales::new(&key_scale, &value_scale));
    let shape4 = [batch, shape.q_len, q_heads, shape.dim];
    let mut out = Tensor::<T>::uninit(d, &shape4).unwrap();
    let mut lse = Tensor::<f32>::uninit(d, &shape4[..3]).unwrap();
    s.fill_bytes(&mut out, 0xff).unwrap();
    decode(s, &mut out, Some(&mut lse), &c.q, &c.cache, &c.table, &c.lens, &options, &mut c.workspace).unwrap();
    let (out, lse) = (out.to_vec().unwrap(), lse.to_vec().unwrap());
    for (b, &len) in shape.lens.iter().enumerate() {
        for i in 0..shape.q_len {
            for h in 0..q_heads {
                let kv = h / shape.group;
                let seen = (len + i + 1).saturating_sub(shape.q_len);
                let row = (b * shape.q_len + i) * q_heads + h;
                let q: Vec<f64> = c.query[row * shape.dim..][..shape.dim].to_vec();
                let scaled = |rows: &[Vec<f64>], by: f32| {
                    rows[..seen].iter().map(|r| r.iter().map(|v| v * by as f64).collect()).collect::<Vec<Vec<f64>>>()
                };
                let query = reference::Query {
                    q: &q,
                    scale: scale as f64,
                    soft_cap: bend.soft_cap as f64,
                    slope: if bend.alibi { slopes[h] as f64 } else { 0.0 },
                    sink: bend.sinks.then(|| sinks[h] as f64),
                    window: bend.window,
                };
                let want = reference::decode(query, &scaled(&c.keys[b][kv], kf[kv]), &scaled(&c.values[b][kv], vf[kv]));
                // Probabilities are rounded to T before they meet V, whose elements are below 2.
                let rounding = if T::DTYPE == cuda_std::DType::F32 { 4e-6 } else { warploom_tests::epsilon::<T>() };
                assert_close(&out[row * shape.dim..][..shape.dim], &want.out, rounding, 2.0);
                assert_close(&lse[row..=row], &[want.lse], 1e-5, 4.0);
            }
        }
    }
}

fn shapes() -> impl Strategy<Value = Shape> {
    let lens = prop::collection::vec(prop_oneof![0usize..3, 1usize..150, Just(64), Just(65), Just(128)], 1..4);
    let heads = (1usize..3, 1usize..9);
    let dim = prop::sample::select(vec![32usize, 64, 80, 96, 112, 120, 128, 192, 256]);
    let page = prop::sample::select(vec![8usize, 16, 32, 64, 128]);
    let layout = prop::sample::select(vec![CacheLayout::Nhd, CacheLayout::Hnd, CacheLayout::XSplit]);
    (lens, 1usize..5, heads, dim, page, layout).prop_map(|(lens, q_len, (kv_heads, group), dim, page, layout)| Shape {
        lens,
        q_len,
        kv_heads,
        group,
        dim,
        page,
        layout,
    })
}

impl Shape {
    /// As it is, or in a layout that [`DecodePath::Tma`] takes.
    fn flat(self) -> Self {
        let layout = if self.layout == CacheLayout::XSplit { CacheLayout::Nhd } else { self.layout };
        Self { layout, ..self }
    }

    /// With blocks that [`DecodePath::Split`] takes of elements of 8 bits.
    fn narrow(self) -> Self {
        let least = if self.layout == CacheLayout::XSplit { 16 } else { 8 };
        Self { page: self.page.max(least), ..self }
    }
}

fn bends() -> impl Strategy<Value = Bend> {
    (any::<bool>(), prop_oneof![Just(0usize), 1usize..100], any::<bool>(), any::<bool>()).prop_map(
        |(cap, window, alibi, sinks)| {
            let soft_cap = if cap { 2.5 } else { 0.0 };
            Bend { soft_cap, window, alibi, sinks, ..Bend::default() }
        },
    )
}

/// Caps from far below the scores to far above them, the largest and the smallest among them.
#[test]
fn soft_caps_of_any_size() {
    on_every_device(|d, s| {
        let layout = CacheLayout::Nhd;
        let shape = Shape { lens: vec![70, 3], q_len: 2, kv_heads: 1, group: 2, dim: 64, page: 16, layout };
        for soft_cap in [f32::MIN_POSITIVE, 0.01, 1.0, 30.0, 1e3, 1e5, 1e9, 1.0 / f32::MIN_POSITIVE] {
            for path in paths(d) {
                check::<f16, f16>(d, s, &shape, Bend { soft_cap, ..Bend::default() }, path);
            }
        }
    });
}

/// Windows that begin in the middle of a page, at a page, within the keys of a step and at the border of two, in the first chunk and
/// a later one: the bits are those of a cache of zeros there. Infinity is a number in caches that have none.
#[test]
fn keys_before_all_windows_may_be_anything() {
    fn bits<T: Float, S: CacheElement>(d: &Device, s: &Stream, shape: &Shape, window: usize, path: DecodePath) {
        let q_heads = shape.kv_heads * shape.group;
        let factor = Tensor::from_slice(d, &[0.1], &[1]).unwrap();
        let run = |fill: f32| {
            let mut c = case::<T, S>(d, shape);
            c.forget(shape, window, fill);
            let mut options = DecodeOptions::default().scale(0.17).window(window).path(path);
            options.scales = (T::DTYPE != S::DTYPE).then_some(Scales::new(&factor, &factor));
            let mut out = Tensor::<T>::uninit(d, &[shape.lens.len(), shape.q_len, q_heads, shape.dim]).unwrap();
            let mut lse = Tensor::<f32>::uninit(d, &out.shape()[..3]).unwrap();
            decode(s, &mut out, Some(&mut lse), &c.q, &c.cache, &c.table, &c.lens, &options, &mut c.workspace).unwrap();
            let out = out.to_vec().unwrap().into_iter().map(Float::to_f32);
            out.chain(lse.to_vec().unwrap()).map(f32::to_bits).collect::<Vec<_>>()
        };
        let zeros = run(0.0);
        assert!(zeros.iter().all(|&x| f32::from_bits(x).is_finite()), "{path:?} {shape:?} {window}");
        for fill in [f32::NAN, f32::INFINITY] {
            assert!(run(fill) == zeros, "{path:?} {:?} over {:?}, {shape:?} {window} {fill}", T::DTYPE, S::DTYPE);
        }
    }
    type Bits = fn(&Device, &Stream, &Shape, usize, DecodePath);
    const ALL: [DecodePath; 3] = [DecodePath::Split, DecodePath::Tma, DecodePath::Plain];
    let kinds: [(Bits, usize, usize, &[DecodePath]); 10] = [
        (bits::<f32, f32>, 64, 2, &[DecodePath::Plain]),
        (bits::<f16, f16>, 64, 2, &ALL),
        (bits::<bf16, bf16>, 128, 3, &ALL),
        (bits::<f16, f16>, 128, 4, &ALL),
        (bits::<f16, f16>, 128, 8, &ALL),
        (bits::<bf16, bf16>, 256, 1, &ALL),
        (bits::<bf16, E4M3>, 128, 2, &ALL),
        (bits::<f16, E4M3>, 128, 8, &ALL),
        (bits::<f16, E5M2>, 128, 2, &ALL),
        (bits::<bf16, E5M2>, 128, 8, &ALL),
    ];
    on_every_order(|d, s| {
        for (i, (bits, dim, group, paths)) in kinds.into_iter().enumerate() {
            let [nhd, hnd, x_split] = [CacheLayout::Nhd, CacheLayout::Hnd, CacheLayout::XSplit];
            let windows = [
                (8, hnd, 2, 17),
                (64, nhd, 1, 45),
                (256, nhd, 1, 70),
                (32, hnd, 2, 1),
                (16, x_split, 2, 13),
                (32, x_split, 1, 45),
                (16, x_split, 1, 23),
            ];
            for (j, (page, layout, q_len, window)) in windows.into_iter().enumerate() {
                // One of them for each kind, where they take long.
                if d.is_simt() && (i + j) % 3 != 0 {
                    continue;
                }
                let shape = Shape { lens: vec![301, 70], q_len, kv_heads: 2, group, dim, page, layout };
                let takes = |path| has(d, path) && (layout != x_split || path != DecodePath::Tma);
                for &path in paths.iter().filter(|&&path| takes(path)) {
                    bits(d, s, &shape, window, path);
                }
            }
        }
    });
}

#[test]
fn split_matches_the_reference() {
    property(10, (shapes(), bends()), |d, s, (shape, bend)| {
        check::<bf16, bf16>(d, s, &shape, bend, DecodePath::Split);
        check::<f16, f16>(d, s, &shape, bend, DecodePath::Split);
        Ok(())
    });
}

#[test]
fn tma_matches_the_reference() {
    property(10, (shapes(), bends()), |d, s, (shape, bend)| {
        if skipped_without_hopper(d) {
            return Ok(());
        }
        // 64 goes with up to eight rows.
        let dim = if shape.dim <= 64 && shape.group * shape.q_len <= 8 { 64 } else { shape.dim.next_multiple_of(128) };
        let shape = Shape { dim, ..shape }.flat();
        check::<bf16, bf16>(d, s, &shape, bend, DecodePath::Tma);
        check::<f16, f16>(d, s, &shape, bend, DecodePath::Tma);
        Ok(())
    });
}

#[test]
fn tma_takes_8_bit_caches() {
    property(6, (shapes(), bends()), |d, s, (shape, bend)| {
        if skipped_without_hopper(d) {
            return Ok(());
        }
        let shape = Shape { dim: 128, ..shape }.flat();
        check::<bf16, E4M3>(d, s, &shape, bend, DecodePath::Tma);
        check::<f16, E5M2>(d, s, &shape, bend, DecodePath::Tma);
        check::<bf16, i8>(d, s, &shape, bend, DecodePath::Tma);
        Ok(())
    });
}

/// A long sequence among such of no key or one: it covers whole shares, in which neither a sequence nor a chunk begins. Their
/// blocks have no work, and must not take another's for theirs. All instances of the kernel.
#[test]
fn shares_in_which_nothing_begins() {
    type Check = fn(&Device, &Stream, &Shape, Bend, DecodePath);
    let sixteen: [(Check, usize, bool); 8] = [
        (check::<bf16, bf16>, 64, false),
        (check::<bf16, bf16>, 128, false),
        (check::<bf16, bf16>, 128, true),
        (check::<bf16, bf16>, 256, false),
        (check::<f16, f16>, 64, false),
        (check::<f16, f16>, 128, false),
        (check::<f16, f16>, 128, true),
        (check::<f16, f16>, 256, false),
    ];
    let eight: [Check; 6] = [
        check::<bf16, E4M3>,
        check::<bf16, E5M2>,
        check::<bf16, i8>,
        check::<f16, E4M3>,
        check::<f16, E5M2>,
        check::<f16, i8>,
    ];
    // More of them than there are blocks: fewer chunks would get a block each.
    let lens = (65usize..270, prop::collection::vec(0usize..2, 8..12), 0usize..12).prop_map(|(long, mut lens, at)| {
        lens.insert(at.min(lens.len()), long);
        lens
    });
    property(2, (lens, 1usize..9, any::<bool>()), |d, s, (lens, group, whole)| {
        if skipped_without_hopper(d) {
            return Ok(());
        }
        let split = if whole { DecodeSplit::Whole } else { DecodeSplit::Chunks };
        let eight = eight.into_iter().flat_map(|check| [(check, 128, false), (check, 128, true)]);
        for (check, dim, tall) in sixteen.into_iter().chain(eight) {
            let group = if tall { group + 8 } else { group };
            let shape =
                Shape { lens: lens.clone(), q_len: 1, kv_heads: 1, group, dim, page: 16, layout: CacheLayout::Nhd };
            check(d, s, &shape, Bend { split, ..Bend::default() }, DecodePath::Tma);
        }
        Ok(())
    });
}

/// However the work is divided among blocks, and whatever else is in the batch, the bits are the same.
#[test]
fn results_do_not_depend_on_the_split() {
    on_every_order(|d, s| {
        if skipped_without_hopper(d) {
            return;
        }
        let lens = if d.is_simt() {
            vec![600, 0, 513, 1, 256, 300]
        } else {
            vec![4096, 0, 1, 511, 512, 513, 9000, 32768, 20000, 2048, 2049]
        };
        for (group, dim, window) in [(8, 128, 0), (9, 128, 0), (2, 64, 310)] {
            let run = |lens: &[usize], split: DecodeSplit| {
                let batch = lens.len();
                let shape = Shape {
                    lens: lens.to_vec(),
                    q_len: 1,
                    kv_heads: 2,
                    group,
                    dim,
                    page: 16,
                    layout: CacheLayout::Nhd,
                };
                let mut c = case::<bf16, bf16>(d, &shape);
                let q_heads = 2 * group;
                let q = c.q.reshape(&[batch, q_heads, dim]).unwrap();
                let mut out = Tensor::<bf16>::uninit(d, &[batch, q_heads, dim]).unwrap();
                let mut lse = Tensor::<f32>::uninit(d, &[batch, q_heads]).unwrap();
                s.fill_bytes(&mut out, 0xff).unwrap();
                let options = DecodeOptions::default().path(DecodePath::Tma).split(split).window(window);
                let (table, work) = (&c.table, &mut c.workspace);
                decode(s, &mut out, Some(&mut lse), &q, &c.cache, table, &c.lens, &options, work).unwrap();
                let bits = |v: Vec<bf16>| v.into_iter().map(bf16::to_bits).collect::<Vec<_>>();
                let lse = lse.to_vec().unwrap().into_iter().map(f32::to_bits).collect::<Vec<_>>();
                (bits(out.to_vec().unwrap()), lse)
            };
            let chunks = run(&lens, DecodeSplit::Chunks);
            for split in [DecodeSplit::Whole, DecodeSplit::Auto] {
                assert!(run(&lens, split) == chunks, "{split:?}, {group} x {dim}, window {window}");
            }
            // The first of them alone.
            for split in [DecodeSplit::Chunks, DecodeSplit::Whole, DecodeSplit::Auto] {
                let (out, lse) = run(&lens[..1], split);
                assert!(out == chunks.0[..out.len()] && lse == chunks.1[..lse.len()], "{split:?}, {group} x {dim}");
            }
        }
    });
}

/// Sequences and heads of any number, dealt to blocks in three manners. All of it with one workspace: each launch leaves it
/// fit for the next.
#[test]
fn any_division_gives_the_same_bits() {
    let lens = prop::collection::vec(prop_oneof![0usize..3, 1usize..600, Just(256), Just(512), Just(513)], 1..7);
    let window = prop_oneof![Just(0usize), 1usize..400];
    property(6, (lens, 1usize..7, 1usize..3, window), |d, s, (lens, kv_heads, q_len, window)| {
        if skipped_without_hopper(d) {
            return Ok(());
        }
        let batch = lens.len();
        let shape = Shape { lens, q_len, kv_heads, group: 2, dim: 64, page: 16, layout: CacheLayout::Nhd };
        let mut c = case::<bf16, bf16>(d, &shape);
        let mut first = None;
        for split in [DecodeSplit::Chunks, DecodeSplit::Whole, DecodeSplit::Auto, DecodeSplit::Chunks] {
            let mut out = Tensor::<bf16>::uninit(d, &[batch, q_len, 2 * kv_heads, 64]).unwrap();
            let mut lse = Tensor::<f32>::uninit(d, &[batch, q_len, 2 * kv_heads]).unwrap();
            s.fill_bytes(&mut out, 0xff).unwrap();
            let options = DecodeOptions::default().path(DecodePath::Tma).split(split).window(window);
            let (table, work) = (&c.table, &mut c.workspace);
            decode(s, &mut out, Some(&mut lse), &c.q, &c.cache, table, &c.lens, &options, work).unwrap();
            let bits: Vec<u16> = out.to_vec().unwrap().into_iter().map(bf16::to_bits).collect();
            let all = (bits, lse.to_vec().unwrap().into_iter().map(f32::to_bits).collect::<Vec<_>>());
            prop_assert!(*first.get_or_insert_with(|| all.clone()) == all, "{split:?}");
        }
        Ok(())
    });
}

/// Long sequences divided between many blocks, again and again: blocks that add up results hold up their neighbours on the multiprocessor, and what
/// is read from shared memory must still be read before it is filled anew.
#[test]
fn divided_again_and_again() {
    on_every_device(|d, s| {
        if skipped_without_hopper(d) {
            return;
        }
        let (lens, times) = match d.is_simt() || warploom_tests::sanitizing() {
            true => (vec![600, 300], 1),
            false => ([vec![20000; 12], vec![9000; 5], vec![3000; 20], vec![0, 1, 1]].concat(), 200),
        };
        let batch = lens.len();
        let shape = Shape { lens, q_len: 1, kv_heads: 2, group: 4, dim: 128, page: 16, layout: CacheLayout::Nhd };
        let mut c = case::<bf16, bf16>(d, &shape);
        let q = c.q.reshape(&[batch, 8, 128]).unwrap();
        let mut out = Tensor::<bf16>::uninit(d, &[batch, 8, 128]).unwrap();
        let mut run = |split| {
            let options = DecodeOptions::default().path(DecodePath::Tma).split(split);
            decode(s, &mut out, None, &q, &c.cache, &c.table, &c.lens, &options, &mut c.workspace).unwrap();
            out.to_vec().unwrap().into_iter().map(bf16::to_bits).collect::<Vec<_>>()
        };
        let whole = run(DecodeSplit::Whole);
        for time in 0..times {
            assert!(run(DecodeSplit::Chunks) == whole, "the {time}-th time");
        }
    });
}

/// A sequence gives the same bits alone and among others by the kernel that `Auto` takes, too.
#[test]
fn auto_does_not_depend_on_the_batch() {
    on_every_device(|d, s| {
        let shape = Shape {
            lens: vec![300, 17, 500, 64],
            q_len: 1,
            kv_heads: 2,
            group: 4,
            dim: 128,
            page: 16,
            layout: CacheLayout::Nhd,
        };
        let mut c = case::<bf16, bf16>(d, &shape);
        let q = c.q.reshape(&[4, 8, 128]).unwrap();
        let mut run = |batch: usize| {
            let mut out = Tensor::<bf16>::uninit(d, &[batch, 8, 128]).unwrap();
            let first = |t: &Tensor<i32>| t.narrow(0, 0, batch).unwrap();
            let (q, table, lens) = (q.narrow(0, 0, batch).unwrap(), first(&c.table), first(&c.lens));
            decode(s, &mut out, None, &q, &c.cache, &table, &lens, &DecodeOptions::default(), &mut c.workspace)
                .unwrap();
            out.to_vec().unwrap().into_iter().map(bf16::to_bits).collect::<Vec<_>>()
        };
        let all = run(4);
        for batch in 1..4 {
            assert!(run(batch) == all[..batch * 8 * 128], "{batch}");
        }
    });
}

/// Scores that rise from step to step, so that the maxima must follow, and such as overflow a careless exponential.
#[test]
fn maxima_follow_rising_scores() {
    on_every_device(|d, s| {
        let (len, dim, page) = (300, 64, 16);
        let shape = CacheShape::new(19, page, 1, dim);
        let cache = KvCache::<bf16>::zeros(d, CacheLayout::Hnd, shape).unwrap();
        let (mut keys, mut values) = (vec![bf16::ZERO; 19 * page * dim], vec![bf16::ZERO; 19 * page * dim]);
        for i in 0..len {
            // Scores: a saw whose teeth grow.
            keys[i * dim] = bf16::from_f32((i % 37) as f32 * (i / 37) as f32);
            values[i * dim..][..dim].fill(bf16::from_f32((i % 11) as f32 - 5.0));
        }
        cache.key().clone().copy_from_slice(&keys).unwrap();
        cache.value().clone().copy_from_slice(&values).unwrap();
        let mut query = vec![bf16::ZERO; 2 * dim];
        (query[0], query[dim]) = (bf16::ONE, bf16::from_f32(-3.0));
        let q = Tensor::from_slice(d, &query, &[1, 2, dim]).unwrap();
        let table = Tensor::from_slice(d, &(0..19).collect::<Vec<i32>>(), &[1, 19]).unwrap();
        let lens = Tensor::from_slice(d, &[len as i32], &[1]).unwrap();
        let rows = |n: &[bf16]| (0..len).map(|i| widen(&n[i * dim..][..dim])).collect::<Vec<_>>();
        for path in splitting(d) {
            let mut work = DecodeWorkspace::new(d, DecodeShape::new(1, 2, 1, dim, 19 * page)).unwrap();
            let mut out = Tensor::<bf16>::uninit(d, &[1, 2, dim]).unwrap();
            let options = DecodeOptions::default().scale(1.0).path(path);
            decode(s, &mut out, None, &q, &cache, &table, &lens, &options, &mut work).unwrap();
            let out = out.to_vec().unwrap();
            for h in 0..2 {
                let q = widen(&query[h * dim..][..dim]);
                let query = reference::Query { q: &q, scale: 1.0, soft_cap: 0.0, slope: 0.0, sink: None, window: 0 };
                let want = reference::decode(query, &rows(&keys), &rows(&values));
                assert_close(&out[h * dim..][..dim], &want.out, warploom_tests::epsilon::<bf16>(), 6.0);
            }
        }
    });
}

#[test]
fn split_takes_8_bit_caches() {
    property(8, (shapes(), bends()), |d, s, (shape, bend)| {
        // A row of an 8-bit cache must be a multiple of 16 bytes.
        let shape = Shape { dim: shape.dim.next_multiple_of(16), ..shape }.narrow();
        check::<bf16, E4M3>(d, s, &shape, bend, DecodePath::Split);
        check::<f16, E5M2>(d, s, &shape, bend, DecodePath::Split);
        check::<bf16, i8>(d, s, &shape, bend, DecodePath::Split);
        Ok(())
    });
}

#[test]
fn sixteen_query_tokens_of_large_groups() {
    on_every_order(|d, s| {
        let (nhd, x_split) = (CacheLayout::Nhd, CacheLayout::XSplit);
        for (group, dim, q_len, layout) in
            [(8, 64, 16, nhd), (3, 256, 16, x_split), (16, 128, 1, nhd), (12, 128, 2, nhd), (12, 128, 2, x_split)]
        {
            let shape = Shape { lens: vec![70, 16, 5, 300], q_len, kv_heads: 2, group, dim, page: 16, layout };
            let bend = Bend { window: 50, ..Bend::default() };
            check::<bf16, bf16>(d, s, &shape, bend, DecodePath::Split);
            check::<f16, E4M3>(d, s, &shape, Bend::default(), DecodePath::Split);
            if layout == x_split {
                continue;
            }
            if dim >= 128 {
                check::<bf16, bf16>(d, s, &shape, bend, DecodePath::Tma);
            }
            if dim == 128 {
                check::<f16, E4M3>(d, s, &shape, Bend::default(), DecodePath::Tma);
            }
        }
    });
}

#[test]
fn plain_matches_the_reference() {
    property(4, (shapes(), bends()), |d, s, (shape, bend)| {
        let split = Shape { dim: 32, layout: CacheLayout::XSplit, ..shape.clone() };
        let shape = shape.flat();
        let odd = Shape { dim: 46, ..shape };
        check::<f32, f32>(d, s, &odd, bend, DecodePath::Auto);
        check::<bf16, bf16>(d, s, &split, bend, DecodePath::Plain);
        check::<f16, E4M3>(d, s, &split, bend, DecodePath::Plain);
        check::<bf16, E5M2>(d, s, &odd, bend, DecodePath::Auto);
        check::<f32, i8>(d, s, &odd, bend, DecodePath::Plain);
        Ok(())
    });
}

#[test]
fn long_sequences_split_into_chunks() {
    on_every_device(|d, s| {
        let lens = if d.is_simt() {
            vec![513, 0, 1, 511, 15, 16, 17, 512, 700]
        } else {
            vec![4096, 0, 1, 511, 15, 16, 17, 512, 513, 32768, 1025, 9000]
        };
        let shape = Shape { lens, q_len: 1, kv_heads: 2, group: 4, dim: 128, page: 16, layout: CacheLayout::Nhd };
        for path in splitting(d) {
            check::<bf16, bf16>(d, s, &shape, Bend::default(), path);
            check::<bf16, bf16>(d, s, &shape, Bend { window: 300, ..Bend::default() }, path);
            check::<bf16, E4M3>(d, s, &shape, Bend::default(), path);
        }
        let shape = Shape { layout: CacheLayout::XSplit, ..shape };
        check::<bf16, bf16>(d, s, &shape, Bend { window: 300, ..Bend::default() }, DecodePath::Split);
        check::<bf16, E4M3>(d, s, &shape, Bend::default(), DecodePath::Split);
    });
}

/// 16-bit caches give the same bits in any layout; `Auto` takes the tensor cores for the x-split one, too.
#[test]
fn layouts_give_the_same_bits() {
    fn bits<T: Float + CacheElement>(d: &Device, s: &Stream, shape: &Shape, path: DecodePath) -> Vec<u32> {
        let mut c = case::<T, T>(d, shape);
        let mut out = Tensor::<T>::uninit(d, c.q.shape()).unwrap();
        let mut lse = Tensor::<f32>::uninit(d, &out.shape()[..3]).unwrap();
        let options = DecodeOptions::default().path(path);
        decode(s, &mut out, Some(&mut lse), &c.q, &c.cache, &c.table, &c.lens, &options, &mut c.workspace).unwrap();
        let out = out.to_vec().unwrap().into_iter().map(Float::to_f32);
        out.chain(lse.to_vec().unwrap()).map(f32::to_bits).collect()
    }
    fn check<T: Float + CacheElement>(d: &Device, s: &Stream, shape: Shape) {
        let [nhd, x_split] = [CacheLayout::Nhd, CacheLayout::XSplit].map(|layout| Shape { layout, ..shape.clone() });
        let want = bits::<T>(d, s, &nhd, DecodePath::Split);
        assert!(bits::<T>(d, s, &x_split, DecodePath::Split) == want, "{shape:?}");
        assert!(bits::<T>(d, s, &x_split, DecodePath::Auto) == want, "{shape:?}");
        assert!(bits::<T>(d, s, &x_split, DecodePath::Plain) != want, "{shape:?}");
    }
    on_every_device(|d, s| {
        for (group, dim, page) in [(4, 64, 8), (8, 128, 16), (5, 80, 32), (12, 128, 16), (2, 256, 16)] {
            let layout = CacheLayout::Nhd;
            let shape = Shape { lens: vec![70, 0, 300, 16], q_len: 1, kv_heads: 2, group, dim, page, layout };
            check::<bf16>(d, s, shape.clone());
            check::<f16>(d, s, Shape { q_len: 2, ..shape });
        }
    });
}

#[test]
fn a_sequence_does_not_depend_on_its_batch() {
    on_every_device(|d, s| {
        let run = |lens: Vec<usize>, path: DecodePath| {
            let shape = Shape { lens, q_len: 1, kv_heads: 2, group: 4, dim: 64, page: 16, layout: CacheLayout::Nhd };
            let mut c = case::<bf16, bf16>(d, &shape);
            let mut out = Tensor::<bf16>::uninit(d, &[shape.lens.len(), 8, 64]).unwrap();
            let q = c.q.reshape(&[shape.lens.len(), 8, 64]).unwrap();
            let options = DecodeOptions::default().path(path);
            decode(s, &mut out, None, &q, &c.cache, &c.table, &c.lens, &options, &mut c.workspace).unwrap();
            out.to_vec().unwrap()
        };
        for path in splitting(d) {
            let alone = run(vec![300], path);
            let among = run(vec![300, 17, 500, 64], path);
            assert_eq!(alone, among[..alone.len()]);
        }
    });
}

#[test]
fn a_hint_changes_the_split_alone() {
    on_every_device(|d, s| {
        let shape = Shape {
            lens: vec![700, 1, 0, 129],
            q_len: 1,
            kv_heads: 2,
            group: 4,
            dim: 64,
            page: 8,
            layout: CacheLayout::Nhd,
        };
        let mut c = case::<f16, f16>(d, &shape);
        let q = c.q.reshape(&[4, 8, 64]).unwrap();
        let run = |workspace: &mut DecodeWorkspace, path: DecodePath| {
            let mut out = Tensor::<f16>::uninit(d, &[4, 8, 64]).unwrap();
            let options = DecodeOptions::default().path(path);
            decode(s, &mut out, None, &q, &c.cache, &c.table, &c.lens, &options, workspace).unwrap();
            widen(&out.to_vec().unwrap())
        };
        let want = run(&mut c.workspace, DecodePath::Split);
        for (chunk, path) in [64, 128, 1024].into_iter().flat_map(|chunk| splitting(d).map(move |path| (chunk, path))) {
            let mut workspace = DecodeWorkspace::new(d, DecodeShape::new(4, 8, 2, 64, 704).chunk(chunk)).unwrap();
            let got = run(&mut workspace, path);
            assert!(got.iter().zip(&want).all(|(g, w)| (g - w).abs() < 2e-3), "{chunk} {path:?}");
        }
        for chunk in [0, 32, 100, 2048] {
            let made = DecodeWorkspace::new(d, DecodeShape::new(4, 8, 2, 64, 704).chunk(chunk));
            assert!(matches!(made, Err(Error::Value { arg: "chunk", .. })), "{chunk}");
        }
        // Heads the wrong way round, and others that are not so many for each.
        for (q_heads, kv_heads) in [(2, 8), (8, 0), (8, 3)] {
            let made = DecodeWorkspace::new(d, DecodeShape::new(4, q_heads, kv_heads, 64, 704));
            assert!(matches!(made, Err(Error::Value { arg: "kv_heads", .. })), "{q_heads} {kv_heads}");
        }
        DecodeWorkspace::new(d, DecodeShape::new(0, 0, 0, 64, 704)).unwrap();
    });
}

#[test]
fn pages_lie_beyond_32_bits() {
    // Two caches of 4.6 GB: for a GPU.
    let Some((d, _turn)) = large_gpu(10) else { return };
    let s = Stream::new(&d).unwrap();
    for (layout, path) in [
        (CacheLayout::Nhd, DecodePath::Split),
        (CacheLayout::Nhd, DecodePath::Tma),
        (CacheLayout::Nhd, DecodePath::Plain),
        (CacheLayout::XSplit, DecodePath::Split),
    ] {
        if has(&d, path) {
            far_pages(&d, &s, layout, path);
        }
    }
}

fn far_pages(d: &Device, s: &Stream, layout: CacheLayout, path: DecodePath) {
    let [page, heads, dim, pages] = [16, 8, 128, 140_000];
    // A page is 2^15 bytes: offsets around 2^31 and 2^32, and the last page.
    let far = [0, 65_535, 65_536, 65_537, 131_071, 131_072, 139_999];
    let near = CacheShape::new(far.len(), page, heads, dim);
    let small = KvCache::<bf16>::zeros(d, layout, near).unwrap();
    let large = KvCache::<bf16>::zeros(d, layout, CacheShape::new(pages, page, heads, dim)).unwrap();
    for (seed, tensor) in [(1, small.key()), (2, small.value())] {
        tensor.clone().copy_from_slice(&noise_of::<bf16>(tensor.len(), seed)).unwrap();
    }
    for (i, &at) in far.iter().enumerate() {
        for (to, from) in [(large.key(), small.key()), (large.value(), small.value())] {
            s.copy(&mut to.narrow(0, at, 1).unwrap(), &from.narrow(0, i, 1).unwrap()).unwrap();
        }
    }
    let len = far.len() * page - 3;
    let lens = Tensor::from_slice(d, &[len as i32], &[1]).unwrap();
    let q = Tensor::from_slice(d, &noise_of::<bf16>(32 * dim, 3), &[1, 32, dim]).unwrap();
    let run = |cache: &KvCache<bf16>, table: &[usize]| {
        let table: Vec<i32> = table.iter().map(|&p| p as i32).collect();
        let table = Tensor::from_slice(d, &table, &[1, table.len()]).unwrap();
        let mut workspace = DecodeWorkspace::new(d, DecodeShape::new(1, 32, heads, dim, far.len() * page)).unwrap();
        let mut out = Tensor::<bf16>::uninit(d, &[1, 32, dim]).unwrap();
        let options = DecodeOptions::default().path(path);
        decode(s, &mut out, None, &q, cache, &table, &lens, &options, &mut workspace).unwrap();
        out.to_vec().unwrap()
    };
    let want = run(&small, &[0, 1, 2, 3, 4, 5, 6]);
    assert_eq!(run(&large, &far), want, "{layout:?} {path:?}");
    assert!(want.iter().any(|v| v.to_f32() != 0.0));
}

#[test]
fn one_graph_serves_growing_sequences() {
    on_every_device(|d, s| {
        let shape = Shape {
            lens: vec![300, 260],
            q_len: 1,
            kv_heads: 1,
            group: 4,
            dim: 64,
            page: 16,
            layout: CacheLayout::Hnd,
        };
        let mut c = case::<f16, f16>(d, &shape);
        let q = c.q.reshape(&[2, 4, 64]).unwrap();
        d.preload(&["attention"]).unwrap();
        let (chunks, whole) = (DecodeSplit::Chunks, DecodeSplit::Whole);
        let ways = [(DecodePath::Split, chunks), (DecodePath::Plain, chunks)];
        let ways = ways.into_iter().chain([chunks, whole].map(|split| (DecodePath::Tma, split)));
        for (path, split) in ways.filter(|&(path, _)| has(d, path)) {
            let (mut graphed, mut direct) =
                (Tensor::uninit(d, &[2, 4, 64]).unwrap(), Tensor::uninit(d, &[2, 4, 64]).unwrap());
            let options = DecodeOptions::default().path(path).split(split);
            c.lens.copy_from_slice(&[200, 150]).unwrap();
            let graph = Graph::capture(s, |s| {
                decode(s, &mut graphed, None, &q, &c.cache, &c.table, &c.lens, &options, &mut c.workspace)
            })
            .unwrap();
            for lens in [[1, 150], [65, 0], [200, 149], [300, 260]] {
                c.lens.copy_from_slice(&lens).unwrap();
                // The second launch finds what the first has left in the workspace.
                for _ in 0..2 {
                    s.fill_bytes(&mut graphed, 0xff).unwrap();
                    graph.launch(s).unwrap();
                    s.synchronize().unwrap();
                    let mut work = DecodeWorkspace::new(d, DecodeShape::new(2, 4, 1, 64, 304)).unwrap();
                    decode(s, &mut direct, None, &q, &c.cache, &c.table, &c.lens, &options, &mut work).unwrap();
                    assert_eq!(graphed.to_vec().unwrap(), direct.to_vec().unwrap(), "{path:?} {split:?} {lens:?}");
                }
            }
        }
    });
}

#[test]
fn wrong_pages_and_lengths_stay_inside() {
    on_every_device(|d, s| {
        for (layout, path) in paths_of_layouts(d) {
            let shape = Shape { lens: vec![40], q_len: 1, kv_heads: 1, group: 2, dim: 64, page: 16, layout };
            let mut c = case::<bf16, bf16>(d, &shape);
            let q = c.q.reshape(&[1, 2, 64]).unwrap();
            for (pages, len) in [([-1, i32::MAX, 1 << 20], 40), ([3, 2, 1], i32::MAX), ([3, 2, 1], -5)] {
                c.table.copy_from_slice(&pages).unwrap();
                c.lens.copy_from_slice(&[len]).unwrap();
                let mut out = Tensor::<bf16>::uninit(d, &[1, 2, 64]).unwrap();
                let options = DecodeOptions::default().path(path);
                decode(s, &mut out, None, &q, &c.cache, &c.table, &c.lens, &options, &mut c.workspace).unwrap();
                s.synchronize().unwrap();
                if pages[0] < 0 || len < 0 {
                    assert!(out.to_vec().unwrap().iter().all(|v| v.to_f32() == 0.0), "{path:?} {pages:?} {len}");
                }
            }
        }
    });
}

/// As if the keys of a page that is none were not in the sequence.
#[test]
fn a_hole_among_the_pages() {
    on_every_device(|d, s| {
        for (layout, path) in paths_of_layouts(d) {
            let shape = Shape { lens: vec![40], q_len: 1, kv_heads: 1, group: 2, dim: 64, page: 16, layout };
            let mut c = case::<bf16, bf16>(d, &shape);
            let q = c.q.reshape(&[1, 2, 64]).unwrap();
            let pages = c.table.to_vec().unwrap();
            let rest = |rows: &[Vec<f64>]| [&rows[..16], &rows[32..]].concat();
            let (keys, values) = (rest(&c.keys[0][0]), rest(&c.values[0][0]));
            for hole in [-1, i32::MAX] {
                c.table.copy_from_slice(&[pages[0], hole, pages[2]]).unwrap();
                let mut out = Tensor::<bf16>::uninit(d, &[1, 2, 64]).unwrap();
                let options = DecodeOptions::default().path(path).scale(0.5);
                decode(s, &mut out, None, &q, &c.cache, &c.table, &c.lens, &options, &mut c.workspace).unwrap();
                for (q, out) in c.query.chunks(64).zip(out.to_vec().unwrap().chunks(64)) {
                    let query = reference::Query { q, scale: 0.5, soft_cap: 0.0, slope: 0.0, sink: None, window: 0 };
                    let want = reference::decode(query, &keys, &values);
                    assert_close(out, &want.out, warploom_tests::epsilon::<bf16>(), 2.0);
                }
            }
        }
    });
}

/// Pointers into memory of the caller's give the bits that the checked function gives.
#[test]
fn raw_pointers() {
    on_every_device(|d, s| {
        let (len, some) = if d.is_simt() { (150, 90u32) } else { (700, 600) };
        for (layout, path) in [
            (CacheLayout::Nhd, DecodePath::Auto),
            (CacheLayout::Nhd, DecodePath::Split),
            (CacheLayout::Nhd, DecodePath::Tma),
            (CacheLayout::Hnd, DecodePath::Auto),
            (CacheLayout::Nhd, DecodePath::Plain),
            (CacheLayout::XSplit, DecodePath::Auto),
            (CacheLayout::XSplit, DecodePath::Plain),
        ] {
            if !has(d, path) {
                continue;
            }
            let shape = Shape { lens: vec![20, len, 0], q_len: 2, kv_heads: 2, group: 4, dim: 128, page: 16, layout };
            let mut c = case::<bf16, bf16>(d, &shape);
            let mut safe = |options: DecodeOptions<'_>| {
                let mut out = Tensor::<bf16>::zeros(d, c.q.shape()).unwrap();
                decode(s, &mut out, None, &c.q, &c.cache, &c.table, &c.lens, &options.path(path), &mut c.workspace)
                    .unwrap();
                out.to_vec().unwrap()
            };
            let (windowed, all) =
                (safe(DecodeOptions::default().window(some as usize)), safe(DecodeOptions::default()));
            assert_ne!(windowed, all);

            let max_pages = c.table.dim(1);
            let sizes = DecodeShape::new(3, 8, 2, 128, 16 * max_pages).q_len(2);
            let mut partial = Tensor::<f32>::uninit(d, &[sizes.partial_floats()]).unwrap();
            let mut tickets = Tensor::<u32>::zeros(d, &[sizes.tickets()]).unwrap();
            let mut out = Tensor::<bf16>::zeros(d, c.q.shape()).unwrap();
            let (ks, vs) = (c.cache.key_strides(), c.cache.value_strides());
            let mut args = Args {
                out: out.as_mut_ptr().cast(),
                lse: std::ptr::null_mut(),
                q: c.q.as_ptr().cast(),
                k: c.cache.key().as_ptr().cast(),
                v: c.cache.value().as_ptr().cast(),
                block_table: c.table.as_ptr(),
                lens: c.lens.as_ptr(),
                alibi: std::ptr::null(),
                sinks: std::ptr::null(),
                k_scales: std::ptr::null(),
                v_scales: std::ptr::null(),
                scale_per_head: 0,
                q_heads: 8,
                kv_heads: 2,
                head_dim: 128,
                page_size: 16,
                max_pages: max_pages as u32,
                pages: c.cache.shape().blocks as u32,
                q_token: 1024,
                q_head: 128,
                out_token: 1024,
                out_head: 128,
                k_page: ks.block,
                k_slot: ks.token,
                k_head: ks.head,
                k_run: ks.run as u32,
                k_run_stride: ks.run_stride,
                v_page: vs.block,
                v_slot: vs.token,
                v_head: vs.head,
                v_run: vs.run as u32,
                v_run_stride: vs.run_stride,
                scale: 1.0 / (128.0f32).sqrt(),
                soft_cap: 0.0,
                window: 0,
            };
            let scratch = Scratch::new(&sizes, partial.as_mut_ptr(), tickets.as_mut_ptr());
            // SAFETY: tensors of these sizes, which live until their results are read.
            let run = |path, args: &Args| unsafe {
                launch(s, DType::Bf16, DType::Bf16, layout, path, DecodeSplit::Auto, [3, 2], args, scratch)
            };
            // A window beyond all keys is none, up to the largest number.
            for window in [some, 0, 1024, (1 << 31) - 1, 1 << 31, u32::MAX - 1, u32::MAX] {
                args.window = window;
                run(path, &args).unwrap();
                let want = if window == some { &windowed } else { &all };
                assert!(&out.to_vec().unwrap() == want, "{layout:?} {path:?}, a window of {window}");
            }
            if layout == CacheLayout::XSplit {
                let e = run(DecodePath::Tma, &args).unwrap_err().to_string();
                assert!(e.starts_with("decode: the path Tma does not take the x-split layout; "), "{e}");
                // Values whose tokens do not lie beside one another.
                let e = run(DecodePath::Split, &Args { v_slot: 2, ..args }).unwrap_err().to_string();
                let runs = "runs of 8 elements of keys and 1 of values, 8 and 2 from token to token";
                assert!(e.starts_with(&format!("decode: the path Split does not take {runs}; ")), "{e}");
            }
        }
    });
}

#[test]
fn bad_input() {
    on_every_device(|d, s| {
        let shape =
            Shape { lens: vec![20, 9], q_len: 1, kv_heads: 2, group: 2, dim: 64, page: 16, layout: CacheLayout::Nhd };
        let mut c = case::<bf16, bf16>(d, &shape);
        let good = c.q.reshape(&[2, 4, 64]).unwrap();
        let (cache, table, lens) = (c.cache.clone(), c.table.clone(), c.lens.clone());
        let mut run =
            |q: &Tensor<bf16>, out: &[usize], table: &Tensor<i32>, lens: &Tensor<i32>, options: &DecodeOptions<'_>| {
                let mut out = Tensor::<bf16>::zeros(d, out).unwrap();
                decode(s, &mut out, None, q, &cache, table, lens, options, &mut c.workspace)
            };
        let o = DecodeOptions::default();
        let full = [2, 4, 64];
        assert!(run(&good, &full, &table, &lens, &o).is_ok());
        let t = |shape: &[usize]| Tensor::<bf16>::zeros(d, shape).unwrap();
        let i = |shape: &[usize]| Tensor::<i32>::zeros(d, shape).unwrap();
        assert!(matches!(run(&t(&[2, 3, 64]), &[2, 3, 64], &table, &lens, &o), Err(Error::Value { arg: "query", .. })));
        assert!(matches!(run(&t(&[2, 4, 32]), &[2, 4, 32], &table, &lens, &o), Err(Error::Shape { arg: "query", .. })));
        assert!(matches!(run(&good, &[2, 4, 32], &table, &lens, &o), Err(Error::Shape { arg: "out", .. })));
        assert!(matches!(run(&good, &full, &i(&[3, 2]), &lens, &o), Err(Error::Shape { arg: "block_table", .. })));
        assert!(matches!(run(&good, &full, &table, &i(&[3]), &o), Err(Error::Shape { arg: "lens", .. })));
        let odd = t(&[2 * 4 * 64 + 1]).as_strided(&full, &[256, 64, 1], 1).unwrap();
        assert!(run(&odd, &full, &table, &lens, &o).is_ok());
        let e = run(&odd, &full, &table, &lens, &o.path(DecodePath::Split)).unwrap_err().to_string();
        assert!(e.starts_with("decode: the path Split does not take queries at 0x"), "{e}");
        assert!(matches!(run(&good, &full, &i(&[2, 99]), &lens, &o), Err(Error::Value { arg: "workspace", .. })));
        let nan = o.scale(f32::NAN);
        assert!(matches!(run(&good, &full, &table, &lens, &nan), Err(Error::Value { arg: "scale", .. })));
        for cap in [-1.0, f32::NAN, f32::INFINITY, f32::MAX, 1e-40] {
            let cap = o.soft_cap(cap);
            assert!(matches!(run(&good, &full, &table, &lens, &cap), Err(Error::Value { arg: "soft_cap", .. })));
        }
        let many = t(&[2, 17, 4, 64]);
        assert!(matches!(run(&many, &[2, 17, 4, 64], &table, &lens, &o), Err(Error::Value { arg: "query", .. })));
        let slopes = Tensor::<f32>::zeros(d, &[3]).unwrap();
        assert!(matches!(run(&good, &full, &table, &lens, &o.alibi(&slopes)), Err(Error::Shape { arg: "alibi", .. })));
        assert!(run(&t(&[0, 4, 64]), &[0, 4, 64], &i(&[0, 2]), &i(&[0]), &o).is_ok());
        // More heads of query tokens than 32 bits count, of no sequence.
        let one = KvCache::<bf16>::zeros(d, CacheLayout::Nhd, CacheShape::new(1, 8, 1, 1)).unwrap();
        let many = t(&[0, 16, 1 << 28, 1]);
        let none = (i(&[0, 1]), i(&[0]));
        let e = decode(s, &mut many.clone(), None, &many, &one, &none.0, &none.1, &o, &mut c.workspace);
        assert!(matches!(e, Err(Error::Value { arg: "query", .. })), "{e:?}");
        // A block of 8 tokens has no 16 bytes of a dimension of 8-bit values.
        let of_8 = KvCache::<E4M3>::zeros(d, CacheLayout::XSplit, CacheShape::new(8, 8, 2, 64)).unwrap();
        let scale = Tensor::from_slice(d, &[1.0], &[1]).unwrap();
        let o = o.scales(&scale, &scale);
        let mut of_8 =
            |o: &DecodeOptions<'_>| decode(s, &mut t(&full), None, &good, &of_8, &table, &lens, o, &mut c.workspace);
        assert!(of_8(&o).is_ok());
        let e = of_8(&o.path(DecodePath::Split)).unwrap_err().to_string();
        assert!(e.starts_with("decode: the path Split does not take blocks of 8 tokens; "), "{e}");
        // Heads that share their results' memory.
        let mut out = t(&[64]).as_strided(&full, &[0, 0, 1], 0).unwrap();
        let e = decode(s, &mut out, None, &good, &cache, &table, &lens, &o, &mut c.workspace);
        assert!(matches!(e, Err(Error::Stride { arg: "out", .. })), "{e:?}");
    });
}

/// The first query tokens of sequences that have more: how far tokens are from each other says nothing then.
#[test]
fn first_tokens_of_longer_sequences() {
    on_every_device(|d, s| {
        let shape =
            Shape { lens: vec![20, 9], q_len: 1, kv_heads: 2, group: 2, dim: 64, page: 16, layout: CacheLayout::Nhd };
        let mut c = case::<bf16, bf16>(d, &shape);
        let queries = noise_of::<bf16>(2 * 3 * 4 * 64, 5);
        let q = Tensor::from_slice(d, &queries, &[2, 3, 4, 64]).unwrap().narrow(1, 0, 1).unwrap();
        let apart = Tensor::<bf16>::zeros(d, &[2, 2, 4, 64]).unwrap();
        let (mut out, o) = (apart.narrow(1, 0, 1).unwrap(), DecodeOptions::default());
        decode(s, &mut out, None, &q, &c.cache, &c.table, &c.lens, &o, &mut c.workspace).unwrap();
        let dense = Tensor::from_slice(d, &q.to_vec().unwrap(), &[2, 4, 64]).unwrap();
        let mut want = Tensor::<bf16>::zeros(d, &[2, 4, 64]).unwrap();
        decode(s, &mut want, None, &dense, &c.cache, &c.table, &c.lens, &o, &mut c.workspace).unwrap();
        assert_eq!(out.to_vec().unwrap(), want.to_vec().unwrap());
        assert!(apart.narrow(1, 1, 1).unwrap().to_vec().unwrap().iter().all(|v| *v == bf16::ZERO));
    });
}
/// Rings of one stage, which GPUs with less shared memory have for heads of 256, give the bits of two: also where a block has one item after the
/// other, and warps have no group of some of them.
#[test]
fn one_stage_gives_the_bits_of_two() {
    use warploom::attention::decode::{split_entry, split_geometry};
    use warploom::kernels::attention::decode as split;

    fn check<T: Float + CacheElement>(d: &Device, s: &Stream, shape: &Shape, window: u32) {
        let &Shape { q_len, kv_heads, group, dim, page, .. } = shape;
        let c = case::<T, T>(d, shape);
        let (batch, max_pages, q_heads) = (shape.lens.len(), c.table.dim(1), kv_heads * group);
        let (ks, vs) = (c.cache.key_strides(), c.cache.value_strides());
        let sizes = DecodeShape::new(batch, q_heads, kv_heads, dim, max_pages * page).q_len(q_len);
        let x_split = shape.layout == CacheLayout::XSplit;
        let run = |max_shared_bytes: usize, multiprocessors: u32| {
            let mut out = Tensor::<T>::uninit(d, c.q.shape()).unwrap();
            let mut lse = Tensor::<f32>::uninit(d, &out.shape()[..3]).unwrap();
            let mut partial = Tensor::<f32>::uninit(d, &[sizes.partial_floats()]).unwrap();
            s.fill_bytes(&mut out, 0xff).unwrap();
            s.fill_bytes(&mut lse, 0xff).unwrap();
            s.fill_bytes(&mut partial, 0xff).unwrap();
            let args = split::Args {
                out: out.as_mut_ptr().cast(),
                lse: lse.as_mut_ptr(),
                q: c.q.as_ptr().cast(),
                k: c.cache.key().as_ptr().cast(),
                v: c.cache.value().as_ptr().cast(),
                block_table: c.table.as_ptr(),
                lens: c.lens.as_ptr(),
                alibi: std::ptr::null(),
                sinks: std::ptr::null(),
                k_scales: std::ptr::null(),
                v_scales: std::ptr::null(),
                partial: partial.as_mut_ptr(),
                scale_per_head: 0,
                batch: batch as u32,
                q_len: q_len as u32,
                q_heads: q_heads as u32,
                kv_heads: kv_heads as u32,
                head_dim: dim as u32,
                page_shift: page.ilog2(),
                max_pages: max_pages as u32,
                pages: c.cache.shape().blocks as u32,
                partial_chunks: split::max_chunks((max_pages * page) as u32, 0),
                hint: 0,
                q_token: q_heads * dim,
                q_head: dim,
                out_token: q_heads * dim,
                out_head: dim,
                k_page: ks.block,
                k_slot: if x_split { ks.run_stride } else { ks.token },
                k_head: ks.head,
                v_page: vs.block,
                v_slot: if x_split { vs.run_stride } else { vs.token },
                v_head: vs.head,
                scale: 0.17,
                soft_cap: 0.0,
                window,
            };
            let (entry, tile) =
                split_entry(T::DTYPE, T::DTYPE, shape.layout, dim, group * q_len, max_shared_bytes).unwrap();
            assert!(tile.shared_bytes <= max_shared_bytes);
            // SAFETY: tensors of these sizes, which live until their results are read.
            unsafe { s.launch(&entry, &split_geometry(tile, multiprocessors), &args) }.unwrap();
            let out = out.to_vec().unwrap().into_iter().map(Float::to_f32);
            let all = out.chain(lse.to_vec().unwrap()).chain(partial.to_vec().unwrap());
            (entry.name, all.map(f32::to_bits).collect::<Vec<_>>())
        };
        for multiprocessors in [1, 3] {
            let (two, one) = (run(163 * 1024, multiprocessors), run(99 * 1024, multiprocessors));
            assert_ne!(two.0, one.0);
            assert!(two.1 == one.1, "{} and {}, {multiprocessors} blocks, {shape:?} {window}", two.0, one.0);
        }
    }
    on_every_device(|d, s| {
        if d.properties().max_shared_bytes < 163 * 1024 {
            eprintln!("left out on {}: rings of two stages, for which it has no memory", d.name());
            return;
        }
        let shape = Shape {
            lens: vec![70, 0, 300, 5, 17],
            q_len: 2,
            kv_heads: 2,
            group: 5,
            dim: 256,
            page: 16,
            layout: CacheLayout::Nhd,
        };
        check::<bf16>(d, s, &shape, 0);
        check::<bf16>(d, s, &Shape { layout: CacheLayout::XSplit, ..shape.clone() }, 40);
        check::<f16>(d, s, &Shape { q_len: 1, dim: 144, page: 8, layout: CacheLayout::Hnd, ..shape }, 40);
    });
}

/// GPUs of compute capability 8.6, 8.9 and 12.0 give a block 99 KiB of shared memory: enough for every instance of the portable kernel.
#[test]
fn the_portable_kernel_fits_every_gpu() {
    use warploom::attention::decode::split_entry;
    let kinds = [DType::Bf16, DType::F16]
        .into_iter()
        .flat_map(|dtype| [dtype, DType::E4m3, DType::E5m2, DType::I8].map(|cache| (dtype, cache)));
    let kinds = kinds.flat_map(|kind| [CacheLayout::Nhd, CacheLayout::XSplit].map(|layout| (kind, layout)));
    for ((dtype, cache), layout) in kinds {
        for (dim, rows) in (1..=256).flat_map(|dim| (1..=17).chain([16 * 64]).map(move |rows| (dim, rows))) {
            let of = |max_shared_bytes| split_entry(dtype, cache, layout, dim, rows, max_shared_bytes).unwrap();
            let ((small, fits), (a100, tile)) = (of(99 * 1024), of(163 * 1024));
            assert!(
                fits.shared_bytes <= 99 * 1024,
                "{} bytes for {dtype} over {cache}, {rows} × {dim}",
                fits.shared_bytes
            );
            let differs = dtype == cache && dim > 128;
            assert_eq!(
                (small.name != a100.name, fits != tile),
                (differs, differs),
                "{dtype} over {cache}, {rows} × {dim}"
            );
        }
    }
}
