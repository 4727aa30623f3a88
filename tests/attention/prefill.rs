use cuda_std::{E4M3, E5M2, Float};
use proptest::prelude::*;
use warploom::attention::prefill::{Args, Scratch, TICKETS, launch, mma_entry, split_floats, split_tickets};
use warploom::attention::{PrefillOptions, PrefillPath, PrefillWorkspace, prefill};
use warploom::kernels::attention::soft_capped;
use warploom::kv_cache::{CacheElement, CacheLayout, CacheShape, KvCache, PageStrides, Scales};
use warploom::reference::attention as reference;
use warploom::{DType, Device, Error, Graph, Stream, Tensor, bf16, f16};
use warploom_tests::{
    assert_close, noise, noise_of, on_every_device, on_every_order, property, sanitizing, skipped_without_hopper, widen,
};

/// Sequences of which `chunk` query tokens are the last of `len` keys.
#[derive(Clone, Debug)]
struct Shape {
    sequences: Vec<(usize, usize)>,
    kv_heads: usize,
    group: usize,
    dim: usize,
    page: usize,
    layout: CacheLayout,
}

impl Shape {
    fn tokens(&self) -> usize {
        self.sequences.iter().map(|s| s.0).sum()
    }
    fn q_heads(&self) -> usize {
        self.kv_heads * self.group
    }
}

/// A batch: its cache with NaN in every slot that no sequence owns, and what the cache means.
struct Case<T, S = T> {
    q: Tensor<T>,
    cache: KvCache<S>,
    /// Of keys and values, head by head, if the cache is of 8 bits.
    scales: Option<[Tensor<f32>; 2]>,
    table: Tensor<i32>,
    pages: Vec<i32>,
    starts: Tensor<i32>,
    lens: Tensor<i32>,
    query: Vec<f64>,
    /// By sequence, KV head and position.
    keys: Vec<Vec<Vec<Vec<f64>>>>,
    values: Vec<Vec<Vec<Vec<f64>>>>,
}

fn case<T: Float + CacheElement>(d: &Device, shape: &Shape) -> Case<T> {
    case_over::<T, T>(d, shape)
}

fn case_over<T: Float + CacheElement, S: CacheElement>(d: &Device, shape: &Shape) -> Case<T, S> {
    let Shape { sequences, kv_heads, dim, page, layout, .. } = shape.clone();
    let lens: Vec<usize> = sequences.iter().map(|s| s.1).collect();
    let max_pages = lens.iter().map(|l| l.div_ceil(page)).max().unwrap_or(0).max(1) + 1;
    // Pages are handed out from the highest number down, so that neighbours in a sequence are not neighbours in memory.
    let pages = lens.iter().map(|l| l.div_ceil(page)).sum::<usize>() + 2;
    let cs = CacheShape::new(pages, page, kv_heads, dim);
    let cache = KvCache::<S>::zeros(d, layout, cs).unwrap();
    let (ks, vs) = (cache.key_strides(), cache.value_strides());
    let narrow = size_of::<S>() == 1;
    let scales = [0.02, 0.03]
        .map(|first| (0..kv_heads).map(|h| if narrow { first + 0.01 * h as f32 } else { 1.0 }).collect::<Vec<f32>>());
    let nan = S::round(f32::NAN);
    let (mut k, mut v) = (vec![nan; pages * cs.block_len()], vec![nan; pages * cs.block_len()]);
    // Behind a sequence's pages there may be anything: a page of NaN here.
    let mut table = vec![pages as i32 - 1; sequences.len() * max_pages];
    let (mut keys, mut values) = (vec![], vec![]);
    let mut free = pages - 2;
    for (b, &len) in lens.iter().enumerate() {
        let round = |n: Vec<f32>, scales: &[f32]| {
            n.chunks(dim)
                .enumerate()
                .flat_map(|(i, n)| n.iter().map(move |v| S::round(v / scales[i % kv_heads])))
                .collect()
        };
        let kn: Vec<S> = round(noise(len * kv_heads * dim, 7 + b as u64), &scales[0]);
        let vn: Vec<S> = round(noise(len * kv_heads * dim, 99 + b as u64), &scales[1]);
        let meant = |n: &[S], scale: f32| n.iter().map(|v| v.widen() as f64 * scale as f64).collect::<Vec<_>>();
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
                for x in 0..dim {
                    k[ks.index(block, h, i % page, x)] = kn[at + x];
                    v[vs.index(block, h, i % page, x)] = vn[at + x];
                }
                hk.push(meant(&kn[at..at + dim], scales[0][h]));
                hv.push(meant(&vn[at..at + dim], scales[1][h]));
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
    let q = noise_of::<T>(shape.tokens() * shape.q_heads() * dim, 3);
    let mut starts = vec![0];
    sequences.iter().for_each(|s| starts.push(starts[starts.len() - 1] + s.0 as i32));
    let lens: Vec<i32> = lens.iter().map(|&l| l as i32).collect();
    Case {
        q: Tensor::from_slice(d, &q, &[shape.tokens(), shape.q_heads(), dim]).unwrap(),
        cache,
        scales: narrow.then(|| scales.map(|s| Tensor::from_slice(d, &s, &[kv_heads]).unwrap())),
        table: Tensor::from_slice(d, &table, &[lens.len(), max_pages]).unwrap(),
        pages: table,
        starts: Tensor::from_slice(d, &starts, &[starts.len()]).unwrap(),
        lens: Tensor::from_slice(d, &lens, &[lens.len()]).unwrap(),
        query: widen(&q),
        keys,
        values,
    }
}

impl<T: Float + CacheElement, S: CacheElement> Case<T, S> {
    /// What no query token of a sequence sees becomes NaN, and pages that lie wholly before its windows somebody else's.
    fn forget(&mut self, shape: &Shape, window: usize, causal: bool) {
        let (page, width) = (shape.page, self.table.shape()[1]);
        let (ks, vs) = (self.cache.key_strides(), self.cache.value_strides());
        let (mut k, mut v) = (self.cache.key().to_vec().unwrap(), self.cache.value().to_vec().unwrap());
        let foreign = self.cache.shape().blocks as i32 - 1;
        for (b, &(chunk, len)) in shape.sequences.iter().enumerate() {
            let end = if causal { (len + 1).saturating_sub(chunk) } else { len };
            for i in 0..end.saturating_sub(window) {
                let block = self.pages[b * width + i / page] as usize;
                for (h, x) in (0..shape.kv_heads).flat_map(|h| (0..shape.dim).map(move |x| (h, x))) {
                    k[ks.index(block, h, i % page, x)] = S::round(f32::NAN);
                    v[vs.index(block, h, i % page, x)] = S::round(f32::NAN);
                }
            }
            self.pages[b * width..][..end.saturating_sub(window) / page].fill(foreign);
        }
        self.cache.key().clone().copy_from_slice(&k).unwrap();
        self.cache.value().clone().copy_from_slice(&v).unwrap();
        self.table.copy_from_slice(&self.pages).unwrap();
    }

    fn run(&self, s: &Stream, options: &PrefillOptions<'_>) -> (Vec<T>, Vec<f32>) {
        self.run_in(s, options, &mut PrefillWorkspace::new(s.device()).unwrap())
    }

    fn run_in(&self, s: &Stream, options: &PrefillOptions<'_>, work: &mut PrefillWorkspace) -> (Vec<T>, Vec<f32>) {
        let d = s.device();
        let mut out = Tensor::<T>::uninit(d, self.q.shape()).unwrap();
        let mut lse = Tensor::<f32>::uninit(d, &self.q.shape()[..2]).unwrap();
        s.fill_bytes(&mut out, 0xff).unwrap();
        s.fill_bytes(&mut lse, 0xff).unwrap();
        let (table, starts, lens) = (&self.table, &self.starts, &self.lens);
        let mut options = *options;
        options.scales = self.scales.as_ref().map(|[key, value]| Scales::new(key, value));
        prefill(s, &mut out, Some(&mut lse), &self.q, &self.cache, table, starts, lens, &options, work).unwrap();
        (out.to_vec().unwrap(), lse.to_vec().unwrap())
    }
}

/// What `Wgmma` takes, and what `Mma` does.
const BY_TOKEN: &[CacheLayout] = &[CacheLayout::Nhd, CacheLayout::Hnd];
const EVERY: &[CacheLayout] = &[CacheLayout::Nhd, CacheLayout::Hnd, CacheLayout::XSplit];

/// With pages of 16 tokens at least if they are x-split: what `Mma` takes of 8 bits.
fn of_8_bits(mut shape: Shape) -> Shape {
    if shape.layout == CacheLayout::XSplit {
        shape.page = shape.page.max(16);
    }
    shape
}

/// Which of these the device has.
fn there<const N: usize>(d: &Device, paths: [PrefillPath; N]) -> impl Iterator<Item = PrefillPath> + use<N> {
    let without = paths.contains(&PrefillPath::Wgmma) && skipped_without_hopper(d);
    paths.into_iter().filter(move |path| !without || *path != PrefillPath::Wgmma)
}

/// The tensor-core kernels that the device has, each with a layout of its kind.
fn there_by_layout(d: &Device) -> impl Iterator<Item = (PrefillPath, CacheLayout)> {
    let paths = there(d, [PrefillPath::Wgmma, PrefillPath::Mma]).map(|path| (path, CacheLayout::Nhd));
    paths.chain([(PrefillPath::Mma, CacheLayout::XSplit)])
}

/// What bends the scores, in plain numbers.
#[derive(Clone, Copy, Debug)]
struct Bend {
    soft_cap: f32,
    window: usize,
    alibi: bool,
    sinks: bool,
    causal: bool,
}

const STRAIGHT: Bend = Bend { soft_cap: 0.0, window: 0, alibi: false, sinks: false, causal: true };

/// Compares with the reference every `step`th query token of each sequence, its first and its last one.
fn check<T: Float + CacheElement>(d: &Device, s: &Stream, shape: &Shape, bend: Bend, path: PrefillPath, step: usize) {
    check_over::<T, T>(d, s, shape, bend, path, step);
}

fn check_over<T: Float + CacheElement, S: CacheElement>(
    d: &Device,
    s: &Stream,
    shape: &Shape,
    bend: Bend,
    path: PrefillPath,
    step: usize,
) {
    check_in::<T, S>(d, s, shape, bend, path, step, &mut PrefillWorkspace::new(d).unwrap());
}

fn check_in<T: Float + CacheElement, S: CacheElement>(
    d: &Device,
    s: &Stream,
    shape: &Shape,
    bend: Bend,
    path: PrefillPath,
    step: usize,
    work: &mut PrefillWorkspace,
) {
    if there(d, [path]).next().is_none() {
        return;
    }
    let mut c = case_over::<T, S>(d, shape);
    if bend.window > 0 {
        c.forget(shape, bend.window, bend.causal);
    }
    let q_heads = shape.q_heads();
    let slopes: Vec<f32> = (0..q_heads).map(|h| 0.5f32.powi(h as i32 + 1)).collect();
    let sinks: Vec<f32> = (0..q_heads).map(|h| h as f32 * 0.25 - 0.5).collect();
    let (alibi, sink) =
        (Tensor::from_slice(d, &slopes, &[q_heads]).unwrap(), Tensor::from_slice(d, &sinks, &[q_heads]).unwrap());
    let scale = 0.17f32;
    let mut options = PrefillOptions::default().scale(scale).soft_cap(bend.soft_cap).window(bend.window).path(path);
    options.causal = bend.causal;
    options.alibi = bend.alibi.then_some(&alibi);
    options.sinks = bend.sinks.then_some(&sink);
    let (out, lse) = c.run_in(s, &options, work);
    let mut first = 0;
    for (b, &(chunk, len)) in shape.sequences.iter().enumerate() {
        for i in (0..chunk).filter(|i| i % step == 0 || i + 1 == chunk) {
            for h in 0..q_heads {
                let row = (first + i) * q_heads + h;
                let query = reference::Query {
                    q: &c.query[row * shape.dim..][..shape.dim],
                    scale: scale as f64,
                    soft_cap: bend.soft_cap as f64,
                    slope: if bend.alibi { slopes[h] as f64 } else { 0.0 },
                    sink: bend.sinks.then(|| sinks[h] as f64),
                    window: bend.window,
                };
                let kv = h / shape.group;
                let position = (len + i) as i64 - chunk as i64;
                let want = reference::prefill(query, position, bend.causal, &c.keys[b][kv], &c.values[b][kv]);
                // Probabilities are rounded to T before they meet V, whose elements are below 1.
                let rounding = if T::DTYPE == cuda_std::DType::F32 { 4e-6 } else { warploom_tests::epsilon::<T>() };
                assert_close(&out[row * shape.dim..][..shape.dim], &want.out, rounding, 2.0);
                assert_close(&lse[row..=row], &[want.lse], 1e-5, 4.0);
            }
        }
        first += chunk;
    }
}

fn shapes(
    dims: &'static [usize],
    pages: &'static [usize],
    layouts: &'static [CacheLayout],
) -> impl Strategy<Value = Shape> {
    let sequence =
        (prop_oneof![0usize..3, 1usize..70, Just(33)], prop_oneof![Just(0usize), 0usize..150, Just(95), Just(128)]);
    // Now and then more query tokens than keys: the first see nothing.
    let sequence = (sequence, 0usize..8)
        .prop_map(|((chunk, before), odd)| (chunk, if odd == 0 { before.min(chunk / 2) } else { chunk + before }));
    let page = prop::sample::select(pages);
    let (dim, layout) = (prop::sample::select(dims), prop::sample::select(layouts));
    (prop::collection::vec(sequence, 1..4), 1usize..3, 1usize..9, dim, page, layout).prop_map(
        |(sequences, kv_heads, group, dim, page, layout)| Shape { sequences, kv_heads, group, dim, page, layout },
    )
}

fn bends() -> impl Strategy<Value = Bend> {
    let window = prop_oneof![Just(0usize), 1usize..200];
    (any::<bool>(), window, any::<bool>(), any::<bool>(), 0usize..4).prop_map(|(cap, window, alibi, sinks, all)| Bend {
        soft_cap: if cap { 2.5 } else { 0.0 },
        window,
        alibi,
        sinks,
        causal: all > 0,
    })
}

#[test]
fn wgmma_matches_the_reference() {
    property(6, (shapes(&[64, 96, 128, 256], &[8, 16, 32, 128], BY_TOKEN), bends()), |d, s, (shape, bend)| {
        let straight = Bend { soft_cap: 0.0, alibi: false, ..bend };
        check::<bf16>(d, s, &shape, straight, PrefillPath::Wgmma, 5);
        check::<f16>(d, s, &shape, bend, PrefillPath::Wgmma, 5);
        Ok(())
    });
}

#[test]
fn wgmma_takes_8_bit_caches() {
    property(4, (shapes(&[48, 64, 128], &[8, 16, 64, 128], BY_TOKEN), bends()), |d, s, (shape, bend)| {
        let straight = Bend { soft_cap: 0.0, alibi: false, ..bend };
        check_over::<bf16, E4M3>(d, s, &shape, straight, PrefillPath::Wgmma, 5);
        check_over::<f16, E5M2>(d, s, &shape, bend, PrefillPath::Wgmma, 5);
        check_over::<bf16, i8>(d, s, &shape, bend, PrefillPath::Wgmma, 5);
        Ok(())
    });
}

#[test]
fn mma_takes_8_bit_caches() {
    let shapes = shapes(&[16, 64, 80, 96, 128, 192, 256], &[8, 16, 32, 64], EVERY).prop_map(of_8_bits);
    property(8, (shapes, bends(), any::<[bool; 2]>()), |d, s, (shape, bend, which)| {
        // The GPUs that have no other kernel for them take it by themselves.
        let path = if which[0] || shape.dim > 128 || shape.layout == CacheLayout::XSplit {
            PrefillPath::Auto
        } else {
            PrefillPath::Mma
        };
        check_over::<bf16, E4M3>(d, s, &shape, bend, PrefillPath::Mma, 5);
        if which[1] {
            check_over::<f16, E5M2>(d, s, &shape, bend, path, 5);
            check_over::<f16, i8>(d, s, &shape, bend, PrefillPath::Mma, 5);
        } else {
            check_over::<bf16, i8>(d, s, &shape, bend, path, 5);
            check_over::<f16, E4M3>(d, s, &shape, bend, PrefillPath::Mma, 5);
        }
        Ok(())
    });
}

#[test]
fn mma_matches_the_reference() {
    property(
        10,
        (shapes(&[32, 64, 80, 96, 112, 120, 128, 192, 256], &[8, 16, 32, 64], EVERY), bends()),
        |d, s, (shape, bend)| {
            check::<bf16>(d, s, &shape, bend, PrefillPath::Mma, 5);
            check::<f16>(d, s, &shape, bend, PrefillPath::Mma, 5);
            Ok(())
        },
    );
}

#[test]
fn plain_matches_the_reference() {
    property(4, (shapes(&[32, 80], &[8, 16], BY_TOKEN), bends()), |d, s, (shape, bend)| {
        let split = Shape { layout: CacheLayout::XSplit, ..shape.clone() };
        let odd = Shape { dim: 46, page: 12, ..shape };
        check::<f32>(d, s, &split, bend, PrefillPath::Auto, 5);
        check::<bf16>(d, s, &split, bend, PrefillPath::Plain, 5);
        check::<f16>(d, s, &odd, bend, PrefillPath::Auto, 5);
        check::<f32>(d, s, &odd, bend, PrefillPath::Plain, 5);
        check_over::<f32, E4M3>(d, s, &split, bend, PrefillPath::Auto, 5);
        check_over::<f16, E5M2>(d, s, &odd, bend, PrefillPath::Auto, 5);
        check_over::<bf16, i8>(d, s, &odd, bend, PrefillPath::Plain, 5);
        Ok(())
    });
}

#[test]
fn lengths_around_pages_and_blocks() {
    on_every_device(|d, s| {
        let gpu = !d.is_simt();
        let mut sequences =
            vec![(0, 0), (1, 1), (15, 15), (16, 16), (17, 17), (1, 512), (3, 513), (2, 511), (0, 40), (129, 129)];
        if gpu && sanitizing() {
            sequences.extend([(511, 511), (513, 513), (100, 2048), (1, 8192), (300, 1000)]);
        } else if gpu {
            sequences.extend([(511, 511), (512, 512), (513, 513), (4096, 4096), (100, 4096), (1, 32768), (1000, 3000)]);
        }
        let step = if gpu { 97 } else { 40 };
        for (path, layout) in there_by_layout(d) {
            let shape = Shape { sequences: sequences.clone(), kv_heads: 2, group: 4, dim: 128, page: 16, layout };
            check::<bf16>(d, s, &shape, STRAIGHT, path, step);
            if gpu {
                check::<f16>(d, s, &shape, Bend { window: 700, sinks: true, ..STRAIGHT }, path, step);
                let shape = Shape { group: 3, kv_heads: 3, dim: 64, page: 64, ..shape };
                check::<bf16>(d, s, &shape, Bend { causal: false, ..STRAIGHT }, path, step);
                let shape = Shape { sequences: sequences.clone(), dim: 128, page: 16, ..shape };
                check_over::<bf16, E4M3>(d, s, &shape, STRAIGHT, path, step);
                check_over::<f16, i8>(d, s, &shape, Bend { window: 700, ..STRAIGHT }, path, step);
                for dim in [96, 256] {
                    check::<bf16>(d, s, &Shape { dim, ..shape.clone() }, STRAIGHT, path, step);
                }
            }
        }
    });
}

/// Windows that begin in the middle of a page, at a page, and in another block of keys than the chunk.
#[test]
fn keys_before_all_windows_may_be_anything() {
    on_every_order(|d, s| {
        for (i, page) in [8, 64, 256].into_iter().enumerate() {
            let sequences = vec![(3, 300), (40, 301), (1, 129)];
            let shape = Shape { sequences, kv_heads: 2, group: 2, dim: 64, page, layout: CacheLayout::Nhd };
            for (j, (window, causal)) in [(1, true), (17, true), (173, true), (50, false)].into_iter().enumerate() {
                // Every other one, where they take long.
                if d.is_simt() && (i + j) % 2 == 1 {
                    continue;
                }
                let bend = Bend { window, causal, ..STRAIGHT };
                check::<bf16>(d, s, &shape, bend, PrefillPath::Plain, 13);
                for (path, layout) in there_by_layout(d) {
                    let shape = Shape { layout, ..shape.clone() };
                    check::<bf16>(d, s, &shape, bend, path, 13);
                    check_over::<bf16, E4M3>(d, s, &of_8_bits(shape), bend, path, 13);
                }
            }
        }
    });
}

/// Products and their order are the same in every layout.
#[test]
fn layouts_give_the_same_bits() {
    fn same<T: Float + CacheElement, S: CacheElement>(d: &Device, s: &Stream, shape: &Shape, window: usize) {
        let mut works = [PrefillWorkspace::new(d).unwrap(), PrefillWorkspace::splitting(d).unwrap()];
        let [by_token, x_split] = [CacheLayout::Nhd, CacheLayout::XSplit].map(|layout| {
            let shape = Shape { layout, ..shape.clone() };
            let mut c = case_over::<T, S>(d, &shape);
            if window > 0 {
                c.forget(&shape, window, true);
            }
            let options = PrefillOptions::default().window(window).path(PrefillPath::Mma);
            works.each_mut().map(|work| {
                let (out, lse) = c.run_in(s, &options, work);
                (out.iter().map(|v| v.to_f32().to_bits()).collect::<Vec<_>>(), lse)
            })
        });
        assert!(!by_token[0].1.iter().any(|v| v.is_nan()));
        for (by_token, x_split) in by_token.iter().zip(&x_split) {
            assert_eq!(by_token, x_split, "{shape:?} over {} {window}", S::DTYPE);
        }
    }
    on_every_order(|d, s| {
        for dim in [64, 128, 256] {
            // The last query tokens of a sequence of parts, and of one that ends in the middle of a piece.
            let sequences = vec![(5, 613), (21, 83)];
            let shape = Shape { sequences, kv_heads: 2, group: 3, dim, page: 16, layout: CacheLayout::Nhd };
            same::<bf16, bf16>(d, s, &shape, 0);
            same::<f16, f16>(d, s, &Shape { page: 8, ..shape.clone() }, 77);
            same::<bf16, E4M3>(d, s, &shape, 77);
            same::<f16, i8>(d, s, &Shape { page: 64, ..shape.clone() }, 0);
        }
    });
}

/// Caps from far below the scores to far above them, the largest and the smallest among them.
#[test]
fn soft_caps_of_any_size() {
    on_every_device(|d, s| {
        let sequences = vec![(3, 70)];
        let shape = Shape { sequences, kv_heads: 1, group: 2, dim: 64, page: 16, layout: CacheLayout::Nhd };
        for soft_cap in [f32::MIN_POSITIVE, 0.01, 1.0, 30.0, 1e3, 1e5, 1e9, 1.0 / f32::MIN_POSITIVE] {
            for path in there(d, [PrefillPath::Wgmma, PrefillPath::Mma, PrefillPath::Plain]) {
                check::<f16>(d, s, &shape, Bend { soft_cap, ..STRAIGHT }, path, 1);
            }
        }
    });
}

/// The function itself, from scores that the cap leaves alone to those that it replaces.
#[test]
fn soft_caps_keep_the_digits_of_scores() {
    for cap in [1e-20, 0.3, 30.0, 50.0, 1e5, 3e7, 1.0 / f32::MIN_POSITIVE] {
        for i in -2000..400 {
            // Ratios of 2^-20 to 2^4.
            let score = cap * (i as f32 / 100.0).exp2();
            let want = cap as f64 * (score as f64 / cap as f64).tanh();
            for sign in [1.0, -1.0] {
                let got = sign * soft_capped(sign * score, cap);
                assert!((got as f64 - want).abs() <= want / (1 << 18) as f64, "{score} of {cap}: {got}, not {want}");
            }
        }
        assert_eq!([0.0, f32::INFINITY, f32::NEG_INFINITY].map(|x| soft_capped(x, cap)), [0.0, cap, -cap]);
        assert!(soft_capped(f32::NAN, cap).is_nan());
    }
}

/// Tiles that reach beyond 2^31 keys, though their sequence does not.
#[test]
fn lengths_up_to_2_to_the_31() {
    on_every_device(|d, s| {
        let (page, dim, tokens) = (64, 64, 3);
        // As many pages as a sequence can have, of which all but the last few are nobody's.
        let max_pages = (1 << 31) / page - 1;
        let owned = 4;
        let cache = KvCache::<bf16>::zeros(d, CacheLayout::Nhd, CacheShape::new(owned, page, 1, dim)).unwrap();
        let (k, v) = (noise_of::<bf16>(owned * page * dim, 1), noise_of::<bf16>(owned * page * dim, 2));
        cache.key().clone().copy_from_slice(&k).unwrap();
        cache.value().clone().copy_from_slice(&v).unwrap();
        let mut table = Tensor::<i32>::uninit(d, &[1, max_pages]).unwrap();
        s.fill_bytes(&mut table, 0xff).unwrap();
        s.synchronize().unwrap();
        let mut last = table.narrow(1, max_pages - owned, owned).unwrap();
        last.copy_from_slice(&[0, 1, 2, 3]).unwrap();
        let q = noise_of::<bf16>(tokens * dim, 3);
        let c = Case {
            q: Tensor::from_slice(d, &q, &[tokens, 1, dim]).unwrap(),
            cache,
            scales: None,
            table,
            pages: vec![],
            starts: Tensor::from_slice(d, &[0, tokens as i32], &[2]).unwrap(),
            lens: Tensor::from_slice(d, &[(max_pages * page) as i32], &[1]).unwrap(),
            query: widen(&q),
            keys: vec![],
            values: vec![],
        };
        let rows = |n: &[bf16]| n.chunks(dim).map(widen).collect::<Vec<_>>();
        let slope = Tensor::from_slice(d, &[0.25], &[1]).unwrap();
        for path in there(d, [PrefillPath::Wgmma, PrefillPath::Mma, PrefillPath::Plain]) {
            for slopes in [None, Some(&slope)] {
                let mut options = PrefillOptions::default().window(100).path(path);
                options.alibi = slopes;
                let (out, lse) = c.run(s, &options);
                for i in 0..tokens {
                    let query = reference::Query {
                        q: &c.query[i * dim..][..dim],
                        scale: 0.125,
                        soft_cap: 0.0,
                        slope: if slopes.is_some() { 0.25 } else { 0.0 },
                        sink: None,
                        window: 100,
                    };
                    let position = (owned * page - tokens + i) as i64;
                    let want = reference::prefill(query, position, true, &rows(&k), &rows(&v));
                    assert_close(&out[i * dim..][..dim], &want.out, warploom_tests::epsilon::<bf16>(), 2.0);
                    assert_close(&lse[i..=i], &[want.lse], 1e-5, 4.0);
                }
            }
        }
    });
}

/// Sequences and heads in more than one section of the schedule.
#[test]
fn more_sequences_than_lanes() {
    on_every_device(|d, s| {
        let sequences = (0..23).map(|i| (1 + i % 2, 2 + 5 * i % 19)).collect();
        let shape = Shape { sequences, kv_heads: 3, group: 2, dim: 64, page: 16, layout: CacheLayout::Nhd };
        for path in there(d, [PrefillPath::Wgmma, PrefillPath::Mma, PrefillPath::Plain]) {
            check::<bf16>(d, s, &shape, STRAIGHT, path, 1);
        }
    });
}

#[test]
fn chunks_are_the_whole() {
    on_every_device(|d, s| {
        let n = if d.is_simt() { 150 } else { 1500 };
        for path in there(d, [PrefillPath::Wgmma, PrefillPath::Mma]) {
            let shape =
                Shape { sequences: vec![(n, n)], kv_heads: 1, group: 4, dim: 64, page: 16, layout: CacheLayout::Hnd };
            let c = case::<f16>(d, &shape);
            let options = PrefillOptions::default().path(path);
            let (whole, _) = c.run(s, &options);
            let mut parts = vec![];
            for (from, to) in [(0, 7), (7, 64), (64, 101), (101, n)] {
                let q: Vec<f16> = c.q.to_vec().unwrap()[from * 256..to * 256].to_vec();
                let part = Case {
                    q: Tensor::from_slice(d, &q, &[to - from, 4, 64]).unwrap(),
                    starts: Tensor::from_slice(d, &[0, (to - from) as i32], &[2]).unwrap(),
                    lens: Tensor::from_slice(d, &[to as i32], &[1]).unwrap(),
                    cache: c.cache.clone(),
                    scales: None,
                    table: c.table.clone(),
                    pages: vec![],
                    query: vec![],
                    keys: vec![],
                    values: vec![],
                };
                parts.extend(part.run(s, &options).0);
            }
            // Blocks of keys fall differently, so roundings of probabilities do.
            let want: Vec<f64> = widen(&whole);
            assert_close(&parts, &want, 2.0 * warploom_tests::epsilon::<f16>(), 1.0);
        }
    });
}

/// One query for all tokens or heads, which the copy engine cannot follow, and strides of one token or head, which are of no interest.
#[test]
fn queries_of_any_stride() {
    on_every_device(|d, s| {
        let layout = CacheLayout::Nhd;
        for (tokens, token, head) in [(3, 0, 64), (3, 128, 0), (3, 0, 0), (1, 1 << 45, 64), (1, 0, 64)] {
            let shape = Shape { sequences: vec![(tokens, 40)], kv_heads: 1, group: 2, dim: 64, page: 8, layout };
            let mut c = case::<bf16>(d, &shape);
            let few = if token == 0 || tokens == 1 { 1 } else { tokens };
            let q = Tensor::from_slice(d, &noise_of::<bf16>(few * 128, 3), &[few * 128]).unwrap();
            c.q = q.as_strided(&[tokens, 2, 64], &[token, head, 1], 0).unwrap();
            let run = |path| c.run(s, &PrefillOptions::default().path(path));
            let (want, want_lse) = run(PrefillPath::Plain);
            let followed = tokens == 1 || token > 0 && head > 0;
            let paths = there(d, [PrefillPath::Auto, PrefillPath::Mma, PrefillPath::Wgmma]);
            for path in paths.filter(|path| followed || *path != PrefillPath::Wgmma) {
                let (got, lse) = run(path);
                assert_close(&got, &widen(&want), 2.0 * warploom_tests::epsilon::<bf16>(), 1.0);
                assert_close(&lse, &widen(&want_lse), 1e-5, 4.0);
            }
            if !followed {
                let mut out = Tensor::<bf16>::zeros(d, &[tokens, 2, 64]).unwrap();
                let mut work = PrefillWorkspace::new(d).unwrap();
                let options = PrefillOptions::default().path(PrefillPath::Wgmma);
                let e = prefill(s, &mut out, None, &c.q, &c.cache, &c.table, &c.starts, &c.lens, &options, &mut work);
                assert!(matches!(e, Err(Error::Unsupported { .. })), "{e:?}");
            }
        }
    });
}

/// Scores that are no numbers are seen in the results and in what parts are merged by, on every path.
#[test]
fn what_is_not_a_number_shows() {
    on_every_device(|d, s| {
        let layout = CacheLayout::Nhd;
        let shape = Shape { sequences: vec![(2, 40)], kv_heads: 1, group: 1, dim: 64, page: 8, layout };
        let mut c = case::<bf16>(d, &shape);
        let mut q = c.q.to_vec().unwrap();
        q[3] = bf16::NAN;
        c.q = Tensor::from_slice(d, &q, &[2, 1, 64]).unwrap();
        for path in there(d, [PrefillPath::Plain, PrefillPath::Mma, PrefillPath::Wgmma]) {
            let (out, lse) = c.run(s, &PrefillOptions::default().path(path));
            assert!(out[..64].iter().all(|v| v.is_nan()) && !out[64..].iter().any(|v| v.is_nan()), "{path:?}");
            assert!(lse[0].is_nan() && lse[1].is_finite(), "{path:?}: {lse:?}");
        }
        let mut c = case_over::<bf16, E4M3>(d, &shape);
        c.scales = Some([f32::NAN, 0.5].map(|scale| Tensor::from_slice(d, &[scale], &[1]).unwrap()));
        for path in there(d, [PrefillPath::Plain, PrefillPath::Mma, PrefillPath::Wgmma]) {
            let (out, lse) = c.run(s, &PrefillOptions::default().path(path));
            assert!(out.iter().all(|v| v.is_nan()) && lse.iter().all(|v| v.is_nan()), "{path:?}: {lse:?}");
        }
    });
}

#[test]
fn a_sequence_does_not_depend_on_its_batch() {
    on_every_order(|d, s| {
        let cases = [(70, 50.0, 4), (1, 50.0, 4), (1, 3e9, 4), (70, f32::INFINITY, 4), (70, 1.0, 3), (42, 3e9, 3)];
        for (path, (chunk, factor, group)) in
            there(d, [PrefillPath::Wgmma, PrefillPath::Mma]).flat_map(|path| cases.map(|case| (path, case)))
        {
            let run = |others: &[(usize, usize)]| {
                let sequences = [&[(chunk, 300)], others].concat();
                let shape = Shape { sequences, kv_heads: 2, group, dim: 64, page: 16, layout: CacheLayout::Nhd };
                let mut c = case::<bf16>(d, &shape);
                // The other sequences' scores are far apart, so that their maxima change often, or huge, and this one's are not.
                let mut q = c.q.to_vec().unwrap();
                q[chunk * 2 * group * 64..].iter_mut().for_each(|v| *v = bf16::from_f32(v.to_f32() * factor));
                c.q.copy_from_slice(&q).unwrap();
                if group == 3 {
                    // Outputs that would make huge scores where they took a query's place.
                    let mut v = c.cache.value().to_vec().unwrap();
                    v.iter_mut().for_each(|v| *v = bf16::from_f32(v.to_f32() * 1e12));
                    c.cache.value().clone().copy_from_slice(&v).unwrap();
                }
                c.run(s, &PrefillOptions::default().path(path))
            };
            let alone = run(&[]);
            let among = run(&[(1, 30), (40, 40), (0, 0), (33, 64), (100, 300), (60, 300)]);
            let what = format!("{path:?}, {chunk} tokens beside {factor}, groups of {group}");
            assert_eq!(alone.0, among.0[..alone.0.len()], "{what}");
            assert_eq!(alone.1, among.1[..alone.1.len()], "{what}");
        }
    });
}

#[test]
fn sequences_share_pages() {
    on_every_device(|d, s| {
        for path in there(d, [PrefillPath::Wgmma, PrefillPath::Mma, PrefillPath::Plain]) {
            let shape = Shape {
                sequences: vec![(10, 100), (10, 100)],
                kv_heads: 1,
                group: 2,
                dim: 64,
                page: 16,
                layout: CacheLayout::Nhd,
            };
            let mut c = case::<bf16>(d, &shape);
            let width = c.pages.len() / 2;
            let (first, second) = c.pages.split_at_mut(width);
            second.copy_from_slice(first);
            c.table.copy_from_slice(&c.pages).unwrap();
            let mut q = c.q.to_vec().unwrap();
            let half = q.len() / 2;
            q.copy_within(..half, half);
            c.q.copy_from_slice(&q).unwrap();
            let (out, lse) = c.run(s, &PrefillOptions::default().path(path));
            assert_eq!(out[..half], out[half..]);
            assert_eq!(lse[..lse.len() / 2], lse[lse.len() / 2..]);
        }
    });
}

/// A graph captured once does what a call does, for each of these starts and lengths.
fn one_graph_serves(
    d: &Device,
    s: &Stream,
    shape: &Shape,
    path: PrefillPath,
    mut work: PrefillWorkspace,
    steps: &[(&[i32], &[i32])],
) {
    let mut c = case::<f16>(d, shape);
    let tensor = || Tensor::<f16>::zeros(d, c.q.shape()).unwrap();
    let (mut graphed, mut direct) = (tensor(), tensor());
    let options = PrefillOptions::default().path(path);
    d.preload(&["attention"]).unwrap();
    let graph = Graph::capture(s, |s| {
        prefill(s, &mut graphed, None, &c.q, &c.cache, &c.table, &c.starts, &c.lens, &options, &mut work)
    })
    .unwrap();
    for (starts, lens) in steps {
        c.starts.copy_from_slice(starts).unwrap();
        c.lens.copy_from_slice(lens).unwrap();
        graph.launch(s).unwrap();
        s.synchronize().unwrap();
        let (table, starts, lens) = (&c.table, &c.starts, &c.lens);
        prefill(s, &mut direct, None, &c.q, &c.cache, table, starts, lens, &options, &mut work).unwrap();
        assert_eq!(graphed.to_vec().unwrap(), direct.to_vec().unwrap(), "{path:?}");
    }
}

#[test]
fn one_graph_serves_changing_lengths() {
    on_every_order(|d, s| {
        for path in there(d, [PrefillPath::Wgmma, PrefillPath::Mma, PrefillPath::Plain]) {
            let sequences = vec![(40, 200), (25, 150)];
            let shape = Shape { sequences, kv_heads: 1, group: 4, dim: 64, page: 16, layout: CacheLayout::Hnd };
            let steps: [(&[i32], &[i32]); 4] = [
                (&[0, 40, 65], &[200, 150]),
                (&[0, 1, 65], &[1, 100]),
                (&[0, 0, 65], &[0, 65]),
                (&[0, 64, 65], &[129, 1]),
            ];
            one_graph_serves(d, s, &shape, path, PrefillWorkspace::new(d).unwrap(), &steps);
        }
    });
}

#[test]
fn wrong_pages_starts_and_lengths_stay_inside() {
    on_every_device(|d, s| {
        for (path, layout) in there_by_layout(d).chain([(PrefillPath::Plain, CacheLayout::Nhd)]) {
            let shape = Shape { sequences: vec![(20, 40)], kv_heads: 1, group: 2, dim: 64, page: 16, layout };
            let mut c = case::<bf16>(d, &shape);
            let good = c.pages.clone();
            let options = PrefillOptions::default().path(path);
            let wrong = [-1, i32::MAX, 1 << 20, -7];
            for (pages, starts, len) in [
                (wrong, [0, 20], 40),
                ([good[0], good[1], good[2], good[2]], [0, 20], i32::MAX),
                ([good[0], good[1], good[2], good[2]], [0, 20], -5),
                ([good[0], good[1], good[2], good[2]], [-9, i32::MAX], 40),
                ([good[0], good[1], good[2], good[2]], [i32::MAX, 3], 40),
            ] {
                c.table.copy_from_slice(&pages).unwrap();
                c.starts.copy_from_slice(&starts).unwrap();
                c.lens.copy_from_slice(&[len]).unwrap();
                let (out, lse) = c.run(s, &options);
                if pages == wrong || len < 0 {
                    assert!(out.iter().all(|v| v.to_f32() == 0.0), "{path:?} {pages:?} {len}");
                    assert!(lse.iter().all(|v| *v == f32::NEG_INFINITY), "{path:?} {pages:?} {len}");
                }
            }
            // The middle page does not exist: its keys count as unseen, as if the others were the sequence.
            c.starts.copy_from_slice(&[0, 20]).unwrap();
            c.lens.copy_from_slice(&[40]).unwrap();
            c.table.copy_from_slice(&[good[0], -1, good[2], -1]).unwrap();
            let (out, lse) = c.run(s, &options);
            for (i, h) in [(0, 0), (11, 1), (12, 0), (19, 1)] {
                let row = i * 2 + h;
                let query = reference::Query {
                    q: &c.query[row * 64..][..64],
                    scale: 0.125,
                    soft_cap: 0.0,
                    slope: 0.0,
                    sink: None,
                    window: 0,
                };
                let seen = |rows: &[Vec<f64>]| {
                    let seen = (0..=20 + i).filter(|i| i / 16 != 1);
                    seen.map(|i| rows[i].clone()).collect::<Vec<_>>()
                };
                let (keys, values) = (seen(&c.keys[0][0]), seen(&c.values[0][0]));
                let want = reference::prefill(query, 1000, true, &keys, &values);
                assert_close(&out[row * 64..][..64], &want.out, warploom_tests::epsilon::<bf16>(), 2.0);
                assert_close(&lse[row..=row], &[want.lse], 1e-5, 4.0);
            }
        }
    });
}

#[test]
fn page_offsets_beyond_32_bits() {
    on_every_device(|d, s| {
        // 5 GiB for K and V each, of which one page is written.
        let (blocks, page, heads, dim) = (5 << 15, 16, 8, 128);
        let shape = CacheShape::new(blocks, page, heads, dim);
        for layout in [CacheLayout::Nhd, CacheLayout::XSplit] {
            let Some(memory) = d.memory_info().unwrap() else { return };
            if memory.free < 12 << 30 {
                return;
            }
            let cache = KvCache::<bf16>::zeros(d, layout, shape).unwrap();
            let strides = [cache.key_strides(), cache.value_strides()];
            let (k, v) = (noise_of::<bf16>(page * heads * dim, 1), noise_of::<bf16>(page * heads * dim, 2));
            let last = |t: &Tensor<bf16>| t.narrow(0, blocks - 1, 1).unwrap();
            last(cache.key()).copy_from_slice(&k).unwrap();
            last(cache.value()).copy_from_slice(&v).unwrap();
            let q = noise_of::<bf16>(page * heads * dim, 3);
            let c = Case {
                q: Tensor::from_slice(d, &q, &[page, heads, dim]).unwrap(),
                cache,
                scales: None,
                table: Tensor::from_slice(d, &[blocks as i32 - 1], &[1, 1]).unwrap(),
                pages: vec![],
                starts: Tensor::from_slice(d, &[0, page as i32], &[2]).unwrap(),
                lens: Tensor::from_slice(d, &[page as i32], &[1]).unwrap(),
                query: widen(&q),
                keys: vec![],
                values: vec![],
            };
            let paths = there_by_layout(d).filter(|(_, other)| *other == layout).map(|(path, _)| path);
            for path in paths.chain([PrefillPath::Plain]) {
                let (out, _) = c.run(s, &PrefillOptions::default().path(path));
                for h in 0..heads {
                    let rows = |n: &[bf16], strides: PageStrides| {
                        let row =
                            |i| (0..dim).map(|x| n[strides.index(0, h, i, x)].to_f32() as f64).collect::<Vec<_>>();
                        (0..page).map(row).collect::<Vec<_>>()
                    };
                    let row = (page - 1) * heads + h;
                    let query = reference::Query {
                        q: &c.query[row * dim..][..dim],
                        scale: 1.0 / (dim as f64).sqrt(),
                        soft_cap: 0.0,
                        slope: 0.0,
                        sink: None,
                        window: 0,
                    };
                    let want =
                        reference::prefill(query, page as i64 - 1, true, &rows(&k, strides[0]), &rows(&v, strides[1]));
                    assert_close(&out[row * dim..][..dim], &want.out, warploom_tests::epsilon::<bf16>(), 2.0);
                }
            }
        }
    });
}

/// A few query tokens of one or two sequences of some hundred keys, whose keys are divided among blocks.
fn few_tokens(dims: &'static [usize], pages: &'static [usize]) -> impl Strategy<Value = Shape> {
    let sequence = (prop_oneof![1usize..9, Just(33)], prop_oneof![Just(0usize), 200usize..1300, Just(512), Just(1024)]);
    let sequences = prop::collection::vec(sequence.prop_map(|(chunk, before)| (chunk, chunk + before)), 1..3);
    let page = prop::sample::select(pages);
    (sequences, 1usize..6, prop::sample::select(dims), page, any::<bool>()).prop_map(
        |(sequences, group, dim, page, hnd)| {
            let layout = if hnd { CacheLayout::Hnd } else { CacheLayout::Nhd };
            Shape { sequences, kv_heads: 1, group, dim, page, layout }
        },
    )
}

#[test]
fn divided_keys_match_the_reference() {
    let layout = prop::sample::select(EVERY);
    let cases = (few_tokens(&[64, 96, 128, 256], &[8, 16, 32, 128]), bends(), layout);
    property(4, cases, |d, s, (shape, bend, layout)| {
        let straight = Bend { soft_cap: 0.0, alibi: false, ..bend };
        let mut work = PrefillWorkspace::splitting(d).unwrap();
        check_in::<bf16, bf16>(d, s, &shape, straight, PrefillPath::Wgmma, 5, &mut work);
        check_in::<f16, f16>(d, s, &shape, bend, PrefillPath::Wgmma, 5, &mut work);
        let other = Shape { dim: if shape.dim == 128 { 112 } else { shape.dim }, layout, ..shape };
        check_in::<bf16, bf16>(d, s, &other, bend, PrefillPath::Mma, 5, &mut work);
        let other = Shape { dim: 192, ..other };
        check_in::<f16, f16>(d, s, &other, bend, PrefillPath::Mma, 5, &mut work);
        Ok(())
    });
}

#[test]
fn divided_keys_of_8_bits_match_the_reference() {
    let layout = prop::sample::select(EVERY);
    property(3, (few_tokens(&[48, 64, 128], &[8, 16, 64, 128]), bends(), layout), |d, s, (shape, bend, layout)| {
        let straight = Bend { soft_cap: 0.0, alibi: false, ..bend };
        let mut work = PrefillWorkspace::splitting(d).unwrap();
        check_in::<bf16, E4M3>(d, s, &shape, straight, PrefillPath::Wgmma, 5, &mut work);
        check_in::<f16, E5M2>(d, s, &shape, bend, PrefillPath::Wgmma, 5, &mut work);
        let shape = of_8_bits(Shape { layout, ..shape });
        check_in::<bf16, i8>(d, s, &shape, bend, PrefillPath::Mma, 5, &mut work);
        let other = Shape { dim: 256, ..shape };
        check_in::<f16, E4M3>(d, s, &other, bend, PrefillPath::Mma, 5, &mut work);
        Ok(())
    });
}

/// Keys are divided where few tiles have many, which shows in last bits, and nowhere else.
#[test]
fn keys_of_many_tiles_and_few_keys_are_not_divided() {
    on_every_order(|d, s| {
        let mut work = PrefillWorkspace::splitting(d).unwrap();
        let multiprocessors = d.properties().multiprocessors as usize;
        for path in there(d, [PrefillPath::Wgmma, PrefillPath::Mma]) {
            let blocks = if path == PrefillPath::Mma { 2 * multiprocessors } else { multiprocessors };
            for (sequences, dim, divided) in [
                (vec![(20, 1100)], 64, true),
                (vec![(3, 700), (1, 40)], 128, true),
                (vec![(20, 1100)], 256, true),
                (vec![(20, 380)], 128, false),
                (vec![(2, 700); blocks / 2 + 1], 64, false),
            ] {
                let shape = Shape { sequences, kv_heads: 1, group: 4, dim, page: 16, layout: CacheLayout::Nhd };
                let c = case::<bf16>(d, &shape);
                let options = PrefillOptions::default().path(path);
                let (whole, whole_lse) = c.run(s, &options);
                let (parts, lse) = c.run_in(s, &options, &mut work);
                assert_eq!(parts != whole, divided, "{path:?} {shape:?}");
                assert_close(&parts, &widen(&whole), 2.0 * warploom_tests::epsilon::<bf16>(), 1.0);
                assert_close(&lse, &widen(&whole_lse), 1e-5, 4.0);
                // The counters are as they were, and parts are added up in one order.
                let (again, lse_again) = c.run_in(s, &options, &mut work);
                assert_eq!((again, lse_again), (parts, lse), "{path:?} {shape:?}");
            }
        }
    });
}

/// The counters and results of parts are inside of what there is for them, whatever the device's memory says.
#[test]
fn wrong_starts_and_lengths_do_not_divide_beyond_the_workspace() {
    on_every_device(|d, s| {
        for path in there(d, [PrefillPath::Wgmma, PrefillPath::Mma]) {
            let sequences = vec![(20, 600), (5, 600), (3, 600)];
            let shape = Shape { sequences, kv_heads: 1, group: 2, dim: 64, page: 16, layout: CacheLayout::Nhd };
            let mut c = case::<bf16>(d, &shape);
            let options = PrefillOptions::default().path(path);
            let mut work = PrefillWorkspace::splitting(d).unwrap();
            let want = c.run_in(s, &options, &mut work);
            let (starts, lens) = (c.starts.to_vec().unwrap(), c.lens.to_vec().unwrap());
            for (bad_starts, bad_lens) in [
                ([0, i32::MAX, i32::MAX, i32::MAX], [600; 3]),
                ([-7, 28, 28, 28], [i32::MAX, -1, 600]),
                ([0, 0, 0, 28], [0, 0, i32::MIN]),
                ([28, 0, 28, 0], [600; 3]),
            ] {
                c.starts.copy_from_slice(&bad_starts).unwrap();
                c.lens.copy_from_slice(&bad_lens).unwrap();
                c.run_in(s, &options, &mut work);
            }
            c.starts.copy_from_slice(&starts).unwrap();
            c.lens.copy_from_slice(&lens).unwrap();
            assert_eq!(c.run_in(s, &options, &mut work), want);
        }
    });
}

#[test]
fn a_graph_divides_keys_by_the_lengths_of_each_launch() {
    on_every_order(|d, s| {
        for path in there(d, [PrefillPath::Wgmma, PrefillPath::Mma]) {
            let sequences = vec![(40, 1200)];
            let shape = Shape { sequences, kv_heads: 1, group: 4, dim: 64, page: 16, layout: CacheLayout::Hnd };
            let steps: [(&[i32], &[i32]); 5] =
                [(&[0, 40], &[1200]), (&[0, 1], &[700]), (&[0, 20], &[300]), (&[0, 0], &[0]), (&[0, 7], &[1150])];
            one_graph_serves(d, s, &shape, path, PrefillWorkspace::splitting(d).unwrap(), &steps);
        }
    });
}

/// The smallest shared memory of any GPU since sm_80 is 99 KB a block, and every head that a layout can have is somebody's.
#[test]
fn mma_fits_every_gpu() {
    for (dtype, other) in [(DType::Bf16, DType::F16), (DType::F16, DType::Bf16)] {
        let caches = [dtype, DType::E4m3, DType::E5m2, DType::I8].into_iter();
        for (cache, layout) in caches.flat_map(|cache| EVERY.iter().map(move |&layout| (cache, layout))) {
            for (dim, split) in (1..=256).flat_map(|dim| [false, true].map(|split| (dim, split))) {
                let found = mma_entry(dtype, cache, layout, dim, split);
                assert_eq!(found.is_some(), dim % (16 / cache.size()) == 0, "{dtype} over {cache} × {dim}, {layout:?}");
                if let Some((entry, tile)) = found {
                    let (name, bytes) = (entry.name, tile.shared_bytes);
                    assert!(bytes <= 99 * 1024, "{name}: {bytes} bytes");
                    let of = (name.ends_with("_split"), name.split('_').any(|part| part == "x"));
                    assert_eq!(of, (split, layout == CacheLayout::XSplit), "{name}");
                }
            }
        }
        assert!(mma_entry(dtype, other, CacheLayout::XSplit, 128, false).is_none());
    }
}

/// Pointers into memory of the caller's give the bits that the checked function gives.
#[test]
fn raw_pointers() {
    on_every_device(|d, s| {
        for (layout, path) in [
            (CacheLayout::Nhd, PrefillPath::Auto),
            (CacheLayout::Hnd, PrefillPath::Mma),
            (CacheLayout::Nhd, PrefillPath::Plain),
            (CacheLayout::XSplit, PrefillPath::Auto),
            (CacheLayout::XSplit, PrefillPath::Mma),
            (CacheLayout::XSplit, PrefillPath::Plain),
        ] {
            let (blocks, heads, dim, page, max_pages) = (40, 2, 64, 16, 38);
            let shape = CacheShape::new(blocks, page, heads, dim);
            let dense = KvCache::<bf16>::zeros(d, layout, shape).unwrap();
            let fill = |t: &Tensor<bf16>, seed| t.clone().copy_from_slice(&noise_of(t.len(), seed)).unwrap();
            fill(dense.key(), 1);
            fill(dense.value(), 2);
            let (tokens, q_heads) = (25, 4);
            let q =
                Tensor::from_slice(d, &noise_of::<bf16>(tokens * q_heads * dim, 3), &[tokens, q_heads, dim]).unwrap();
            let table: Vec<i32> = (0..2 * max_pages as i32).map(|i| i * 7 % blocks as i32).collect();
            let table = Tensor::from_slice(d, &table, &[2, max_pages]).unwrap();
            let starts = Tensor::from_slice(d, &[0i32, 5, 25], &[3]).unwrap();
            let lens = Tensor::from_slice(d, &[600i32, 20], &[2]).unwrap();
            let mut workspace = PrefillWorkspace::new(d).unwrap();
            let mut want = Tensor::<bf16>::zeros(d, q.shape()).unwrap();
            let o = PrefillOptions::default().path(path);
            prefill(s, &mut want, None, &q, &dense, &table, &starts, &lens, &o, &mut workspace).unwrap();

            let mut tickets = Tensor::<u32>::zeros(d, &[TICKETS]).unwrap();
            let mut out = Tensor::<bf16>::zeros(d, q.shape()).unwrap();
            let (ks, vs) = (dense.key_strides(), dense.value_strides());
            let args = Args {
                out: out.as_mut_ptr().cast(),
                lse: std::ptr::null_mut(),
                q: q.as_ptr().cast(),
                k: dense.key().as_ptr().cast(),
                v: dense.value().as_ptr().cast(),
                starts: starts.as_ptr(),
                lens: lens.as_ptr(),
                block_table: table.as_ptr(),
                alibi: std::ptr::null(),
                sinks: std::ptr::null(),
                k_scales: std::ptr::null(),
                v_scales: std::ptr::null(),
                scale_per_head: 0,
                kind: 0,
                sequences: 2,
                tokens: tokens as u32,
                q_heads: q_heads as u32,
                kv_heads: heads as u32,
                head_dim: dim as u32,
                page_size: page as u32,
                max_pages: max_pages as u32,
                pages: blocks as u32,
                q_token: q_heads * dim,
                q_head: dim,
                out_token: q_heads * dim,
                out_head: dim,
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
                scale: 0.125,
                soft_cap: 0.0,
                window: 0,
                causal: 1,
            };
            // SAFETY: tensors of these sizes, which live until their results are read.
            unsafe { launch(s, DType::Bf16, DType::Bf16, layout, path, &args, Scratch::new(tickets.as_mut_ptr())) }
                .unwrap();
            assert_eq!(out.to_vec().unwrap(), want.to_vec().unwrap(), "{layout:?} {path:?}");

            let multiprocessors = d.properties().multiprocessors;
            let mut tickets = Tensor::<u32>::zeros(d, &[split_tickets(multiprocessors)]).unwrap();
            let mut partial = Tensor::<f32>::uninit(d, &[split_floats(multiprocessors)]).unwrap();
            let scratch = Scratch::splitting(tickets.as_mut_ptr(), partial.as_mut_ptr());
            let mut workspace = PrefillWorkspace::splitting(d).unwrap();
            let whole = want.to_vec().unwrap();
            prefill(s, &mut want, None, &q, &dense, &table, &starts, &lens, &o, &mut workspace).unwrap();
            assert_eq!(want.to_vec().unwrap() != whole, path != PrefillPath::Plain, "{layout:?} {path:?}");
            // SAFETY: as above.
            unsafe { launch(s, DType::Bf16, DType::Bf16, layout, path, &args, scratch) }.unwrap();
            assert_eq!(out.to_vec().unwrap(), want.to_vec().unwrap(), "{layout:?} {path:?}");

            if (layout, path) == (CacheLayout::XSplit, PrefillPath::Mma) {
                for other in [
                    Args { k_run: 4, k_run_stride: args.k_run_stride / 2, ..args },
                    Args { v_run: 2, ..args },
                    Args { k_slot: 16, ..args },
                    Args { v_slot: 2, ..args },
                    Args { k_run_stride: args.k_run_stride + 4, ..args },
                    Args { v_run_stride: args.v_run_stride + 4, ..args },
                ] {
                    // SAFETY: nothing is launched.
                    let e = unsafe { launch(s, DType::Bf16, DType::Bf16, layout, path, &other, scratch) };
                    assert!(matches!(e, Err(Error::Unsupported { .. })), "{e:?}");
                }
            }
        }
    });
}

#[test]
fn bad_input() {
    on_every_device(|d, s| {
        let shape = Shape {
            sequences: vec![(5, 20), (4, 9)],
            kv_heads: 2,
            group: 2,
            dim: 64,
            page: 16,
            layout: CacheLayout::Nhd,
        };
        let c = case::<bf16>(d, &shape);
        let run =
            |q: &Tensor<bf16>, out: &[usize], table: &[usize], starts: usize, lens: usize, o: &PrefillOptions<'_>| {
                let mut out = Tensor::<bf16>::zeros(d, out).unwrap();
                let i = |shape: &[usize]| Tensor::<i32>::zeros(d, shape).unwrap();
                prefill(
                    s,
                    &mut out,
                    None,
                    q,
                    &c.cache,
                    &i(table),
                    &i(&[starts]),
                    &i(&[lens]),
                    o,
                    &mut PrefillWorkspace::new(d).unwrap(),
                )
            };
        let t = |shape: &[usize]| Tensor::<bf16>::zeros(d, shape).unwrap();
        let o = PrefillOptions::default();
        let full = [9, 4, 64];
        // Of queries and a cache of 8 bits it is the queries that no kernel takes.
        let narrow = Tensor::<E4M3>::zeros(d, &full).unwrap();
        let cache = KvCache::<E4M3>::zeros(d, CacheLayout::Nhd, CacheShape::new(2, 16, 2, 64)).unwrap();
        let mut out = Tensor::<E4M3>::zeros(d, &full).unwrap();
        let mut work = PrefillWorkspace::new(d).unwrap();
        let [table, starts, lens] = [&[2, 3][..], &[3], &[2]].map(|shape| Tensor::<i32>::zeros(d, shape).unwrap());
        let e = prefill(s, &mut out, None, &narrow, &cache, &table, &starts, &lens, &o, &mut work);
        assert!(matches!(e, Err(Error::DType { arg: "query", got: DType::E4m3, .. })), "{e:?}");
        assert!(run(&c.q, &full, &[2, 3], 3, 2, &o).is_ok());
        assert!(run(&t(&[0, 4, 64]), &[0, 4, 64], &[2, 3], 3, 2, &o).is_ok());
        assert!(matches!(run(&t(&[9, 3, 64]), &[9, 3, 64], &[2, 3], 3, 2, &o), Err(Error::Value { arg: "query", .. })));
        assert!(matches!(run(&t(&[9, 4, 32]), &[9, 4, 32], &[2, 3], 3, 2, &o), Err(Error::Shape { arg: "query", .. })));
        assert!(matches!(run(&t(&[9, 256]), &[9, 256], &[2, 3], 3, 2, &o), Err(Error::Shape { arg: "query", .. })));
        assert!(matches!(run(&c.q, &[9, 4, 32], &[2, 3], 3, 2, &o), Err(Error::Shape { arg: "out", .. })));
        assert!(matches!(run(&c.q, &full, &[6], 3, 2, &o), Err(Error::Shape { arg: "block_table", .. })));
        assert!(matches!(run(&c.q, &full, &[2, 3], 2, 2, &o), Err(Error::Shape { arg: "starts", .. })));
        assert!(matches!(run(&c.q, &full, &[2, 3], 3, 3, &o), Err(Error::Shape { arg: "lens", .. })));
        let nan = o.scale(f32::NAN);
        assert!(matches!(run(&c.q, &full, &[2, 3], 3, 2, &nan), Err(Error::Value { arg: "scale", .. })));
        for cap in [-1.0, f32::NAN, f32::INFINITY, f32::MAX, 1e-40] {
            let cap = o.soft_cap(cap);
            assert!(matches!(run(&c.q, &full, &[2, 3], 3, 2, &cap), Err(Error::Value { arg: "soft_cap", .. })));
        }
        let negative = o.scale(-1.0).path(PrefillPath::Wgmma);
        assert!(matches!(run(&c.q, &full, &[2, 3], 3, 2, &negative), Err(Error::Unsupported { .. })));
        let slopes = Tensor::<f32>::zeros(d, &[3]).unwrap();
        assert!(matches!(run(&c.q, &full, &[2, 3], 3, 2, &o.alibi(&slopes)), Err(Error::Shape { arg: "alibi", .. })));
        let mut over = c.q.clone();
        let (table, starts, lens) = (&c.table, &c.starts, &c.lens);
        let mut work = PrefillWorkspace::new(d).unwrap();
        let overlap = prefill(s, &mut over, None, &c.q, &c.cache, table, starts, lens, &o, &mut work);
        assert!(matches!(overlap, Err(Error::Overlap { .. })));
        let narrow = case_over::<bf16, E4M3>(d, &shape);
        let none = prefill(s, &mut t(&full), None, &c.q, &narrow.cache, table, starts, lens, &o, &mut work);
        assert!(matches!(none, Err(Error::Value { arg: "scales", .. })));
        let [key, value] = narrow.scales.as_ref().unwrap();
        let given = o.scales(key, value);
        assert!(matches!(run(&c.q, &full, &[2, 3], 3, 2, &given), Err(Error::Value { arg: "scales", .. })));
        // Pages of fewer keys than 16 bytes of x-split values are: the plain kernel takes them.
        let split = Shape { layout: CacheLayout::XSplit, page: 8, ..shape };
        let c8 = case_over::<bf16, E4M3>(d, &split);
        let mut run_8 = |path| {
            let [key, value] = c8.scales.as_ref().unwrap();
            let options = o.scales(key, value).path(path);
            let (table, starts, lens) = (&c8.table, &c8.starts, &c8.lens);
            prefill(s, &mut t(&full), None, &c8.q, &c8.cache, table, starts, lens, &options, &mut work)
        };
        let e = run_8(PrefillPath::Mma);
        assert!(
            matches!(&e, Err(Error::Unsupported { what, .. }) if what.contains("blocks of 8 tokens of e4m3 in the layout XSplit")),
            "{e:?}"
        );
        assert!(run_8(PrefillPath::Auto).is_ok());
        let c16 = case::<bf16>(d, &split);
        let (table, starts, lens) = (&c16.table, &c16.starts, &c16.lens);
        let wgmma = o.path(PrefillPath::Wgmma);
        let e = prefill(s, &mut t(&full), None, &c16.q, &c16.cache, table, starts, lens, &wgmma, &mut work);
        assert!(
            matches!(&e, Err(Error::Unsupported { what, .. }) if what.contains("does not take the x-split layout")),
            "{e:?}"
        );
        // A negative factor turns maxima round: another kernel takes it.
        assert!(run(&c.q, &full, &[2, 3], 3, 2, &o.scale(-1.0)).is_ok());
    });
}
