//! Experts of the sizes of models, on a GPU: up to 7.5 · 10⁹ weights in a tensor, so that offsets need more than 32 bits. Against the definition, for a few tokens of each batch, whose
//! experts lie all over the tensor. Weights repeat (`cyclic`), but not so that what is a power of two away is the same.

use super::fused::{Kept, allowed, wanted};
use super::fused_quant::{Tolerance, e4m3};
use warploom::gemm::Quantised;
use warploom::moe::{
    ExpertActivation, FusedOptions, FusedPath, FusedQuantOptions, FusedQuantPath, FusedShape, GateUp, QuantScales,
    fused, fused_quant, shuffle_weights,
};
use warploom::reference::moe::{Block, QuantBlock};
use warploom::{DType, Device, E4M3, Stream, Tensor, bf16};
use warploom_tests::{
    PERIOD, cyclic, is_hopper, large_gpu, noise, noise_of, of_cycle, sanitizing, skipped_without_hopper, widen,
};

#[derive(Clone, Copy, Debug)]
struct Model {
    experts: usize,
    top_k: usize,
    hidden: usize,
    inter: usize,
}

const MIXTRAL: Model = Model { experts: 8, top_k: 2, hidden: 4096, inter: 14336 };
const DEEPSEEK: Model = Model { experts: 256, top_k: 8, hidden: 7168, inter: 2048 };

/// Tokens of each batch that are compared.
const SAMPLES: usize = 3;

impl Model {
    /// Experts of a sample, spread over all of them, the last one among those of the first.
    fn ids(self, sample: usize) -> Vec<i32> {
        let apart = self.experts / self.top_k;
        (0..self.top_k).map(|slot| (self.experts - 1 - slot * apart - sample % apart) as i32).collect()
    }

    /// The samples' rows, and weights of their slots.
    fn samples(self) -> (Vec<bf16>, Vec<f32>) {
        (noise_of(SAMPLES * self.hidden, 1), noise(SAMPLES * self.top_k, 10))
    }

    /// What `of` gives for each sample, from its row and the weights of its slots, all samples at once.
    fn each<R: Send>(self, of: impl Fn(usize, &[f64], &[f32]) -> R + Sync) -> Vec<R> {
        let (x, weights) = self.samples();
        let (x, of) = (widen(&x), &of);
        let (x, weights) = (&x, &weights);
        std::thread::scope(|scope| {
            let sample = |i: usize| {
                let weights = &weights[i * self.top_k..][..self.top_k];
                scope.spawn(move || of(i, &x[i * self.hidden..][..self.hidden], weights))
            };
            let all: Vec<_> = (0..SAMPLES).map(sample).collect();
            all.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    /// Slots of a sample whose experts are numbered as it lists them.
    fn slots(self, weights: &[f32]) -> Vec<(usize, f64)> {
        weights.iter().map(|&w| w as f64).enumerate().collect()
    }

    fn shape(self, tokens: usize) -> FusedShape {
        FusedShape::new(tokens, self.top_k, self.experts, self.hidden, self.inter)
    }
}

/// So many tokens with the samples among them: their places, and tokens, ids and weights on the device.
struct Batch {
    places: Vec<usize>,
    x: Tensor<bf16>,
    ids: Tensor<i32>,
    weights: Tensor<f32>,
}

impl Batch {
    fn new(d: &Device, model: Model, tokens: usize) -> Self {
        let Model { experts, top_k, hidden, .. } = model;
        let mut places = vec![0, tokens / 2, tokens - 1];
        places.dedup();
        let mut x = noise_of::<bf16>(tokens * hidden, 77);
        let mut weights = noise(tokens * top_k, 78);
        // Neighbours of any expert.
        let mut ids: Vec<i32> = noise(tokens, 79)
            .iter()
            .flat_map(|v| {
                let first = ((v + 1.0) / 2.0 * experts as f32) as usize;
                (0..top_k).map(move |slot| ((first + slot) % experts) as i32)
            })
            .collect();
        let (sample_x, sample_weights) = model.samples();
        for (sample, &place) in places.iter().enumerate() {
            x[place * hidden..][..hidden].copy_from_slice(&sample_x[sample * hidden..][..hidden]);
            weights[place * top_k..][..top_k].copy_from_slice(&sample_weights[sample * top_k..][..top_k]);
            ids[place * top_k..][..top_k].copy_from_slice(&model.ids(sample));
        }
        Self {
            places,
            x: Tensor::from_slice(d, &x, &[tokens, hidden]).unwrap(),
            ids: Tensor::from_slice(d, &ids, &[tokens, top_k]).unwrap(),
            weights: Tensor::from_slice(d, &weights, &[tokens, top_k]).unwrap(),
        }
    }

    /// A poisoned output.
    fn out(&self, d: &Device, s: &Stream) -> Tensor<bf16> {
        let mut out = Tensor::uninit(d, self.x.shape()).unwrap();
        s.fill_bytes(&mut out, 0xff).unwrap();
        out
    }
}

/// Whether it would take too long.
fn skipped() -> bool {
    if sanitizing() {
        eprintln!("skipped under a sanitizer: sizes of models");
    }
    sanitizing()
}

/// Compares the samples of batches of so many tokens by each path that there is, on Hopper also with shuffled weights if there is room for both.
fn check_model(d: &Device, model: Model, shuffles: bool, batches: &[(usize, &[FusedPath])]) {
    let s = Stream::new(d).unwrap();
    let Model { experts, hidden, inter, .. } = model;
    let (first, second) = (noise_of::<bf16>(PERIOD, 2), noise_of::<bf16>(PERIOD, 3));
    let w13 = cyclic(d, &s, &first, &[experts, 2 * inter, hidden]);
    let w2 = cyclic(d, &s, &second, &[experts, hidden, inter]);
    let hopper = !skipped_without_hopper(d);
    let shuffled = (shuffles && hopper).then(|| {
        let [mut a, mut b] = [&w13, &w2].map(|w| Tensor::<bf16>::uninit(d, w.shape()).unwrap());
        shuffle_weights(&s, &mut a, &w13, Some(GateUp::Halves)).unwrap();
        shuffle_weights(&s, &mut b, &w2, None).unwrap();
        (a, b)
    });
    let (first, second) = (widen(&first), widen(&second));
    let want = model.each(|sample, x, weights| {
        let of = |period: &[f64], n: usize| {
            let mut all = Vec::with_capacity(model.top_k * n);
            model.ids(sample).iter().for_each(|&e| all.extend(of_cycle(period, e as usize * n, n)));
            all
        };
        let block = Block {
            hidden,
            intermediate: inter,
            w13: of(&first, 2 * inter * hidden),
            w2: of(&second, hidden * inter),
            bias13: vec![],
            bias2: vec![],
            gate_up: GateUp::Halves,
            activation: ExpertActivation::Silu,
        };
        wanted::<bf16>(&block, x, &model.slots(weights))
    });
    for &(tokens, paths) in batches {
        let batch = Batch::new(d, model, tokens);
        let mut workspace = Tensor::<u8>::uninit(d, &[model.shape(tokens).workspace_bytes(DType::Bf16)]).unwrap();
        for &path in paths {
            let wide = matches!(path, FusedPath::Wgmma64 | FusedPath::Wgmma176);
            let wgmma = wide || path == FusedPath::Wgmma16;
            if !hopper && (wgmma || path == FusedPath::Vector) {
                continue;
            }
            // Shuffled weights, sums in any order, slots rounded, slots in f32, rounded and in any order.
            for which in 0..6 {
                let [shuffle, f32_slots] = [1, 4].map(|option| which == option);
                let [unordered, rounded] = [2, 3].map(|option| which == option || which == 5);
                if shuffle && !(wgmma && shuffled.is_some()) || (unordered || rounded || f32_slots) && !wide {
                    continue;
                }
                let kept = match path {
                    _ if rounded && unordered => Kept::Added(model.top_k),
                    _ if rounded => Kept::Rounded(model.top_k),
                    FusedPath::Auto | FusedPath::Wgmma176 if hopper && !(unordered || f32_slots) => Kept::Packed,
                    _ => Kept::F32,
                };
                let (w13, w2) = shuffled.as_ref().filter(|_| shuffle).map_or((&w13, &w2), |(a, b)| (a, b));
                let options = FusedOptions::default().path(path).shuffled(shuffle);
                let options = options.unordered(unordered).rounded_slots(rounded).f32_slots(f32_slots);
                let (mut out, Batch { x, ids, weights, .. }) = (batch.out(d, &s), &batch);
                s.fill_bytes(&mut workspace, 0xff).unwrap();
                fused(&s, &mut out, x, w13, w2, ids, weights, &options, &mut workspace).unwrap();
                let case = format!("{model:?}, {tokens} tokens, {options:?}");
                for (want, &place) in want.iter().zip(&batch.places) {
                    let got = widen(&out.narrow(0, place, 1).unwrap().to_vec().unwrap());
                    for (c, (got, want)) in got.iter().zip(want).enumerate() {
                        let allowed = allowed::<bf16>(want, kept);
                        let error = (got - want.value).abs();
                        assert!(
                            error <= allowed,
                            "{place}, {c}: {got}, expected {} within {allowed:e}, {case}",
                            want.value
                        );
                    }
                }
            }
        }
    }
}

const MIXTRAL_BATCHES: [(usize, &[FusedPath]); 5] = {
    use FusedPath::*;
    [
        (1, &[Auto, Vector, Direct, Wgmma16, Fma]),
        (8, &[Direct, Stream8, Wgmma16, Wgmma64]),
        (64, &[Wgmma16, Wgmma64, Stream16, Tile32]),
        (600, &[Wgmma64, Wgmma176, Tile64, Tile128]),
        // More pairs of an expert than a share has, so that blocks are in twos.
        (4096, &[Auto, Wgmma176]),
    ]
};
const DEEPSEEK_BATCHES: [(usize, &[FusedPath]); 5] = {
    use FusedPath::*;
    [
        (1, &[Auto, Vector, Direct, Wgmma16, Fma]),
        (16, &[Wgmma16, Wgmma64, Stream8]),
        (64, &[Wgmma64, Stream16, Tile32]),
        (1024, &[Auto, Wgmma64, Wgmma176, Tile64, Tile128]),
        (6000, &[Wgmma176]),
    ]
};
const FEW: (usize, &[FusedQuantPath]) = (1, &[FusedQuantPath::Auto, FusedQuantPath::Wgmma16, FusedQuantPath::Tile32]);
/// With scales of blocks and of rows.
const QUANT_MIXTRAL_BATCHES: [&[(usize, &[FusedQuantPath])]; 2] = {
    use FusedQuantPath::*;
    const SOME: (usize, &[FusedQuantPath]) = (64, &[Wgmma16, Wgmma64, Tile32, Tile128]);
    const MANY: (usize, &[FusedQuantPath]) = (600, &[Wgmma64, Wgmma160, Tile128]);
    [&[FEW, SOME, MANY, (4096, &[Auto, Wgmma256])], &[FEW, SOME, MANY]]
};
const QUANT_DEEPSEEK_BATCHES: [&[(usize, &[FusedQuantPath])]; 2] = {
    use FusedQuantPath::*;
    const SOME: (usize, &[FusedQuantPath]) = (64, &[Wgmma64, Tile32, Tile128]);
    [&[FEW, SOME, (4096, &[Auto, Wgmma160, Wgmma256])], &[FEW, SOME, (4096, &[Auto, Wgmma160])]]
};
const SCALES: [QuantScales; 2] = [QuantScales::Blocks, QuantScales::Rows];

/// What a GPU is asked for below is something that there is, for as many multiprocessors as an H100 has.
#[test]
fn all_batches_have_kernels() {
    let d = Device::simt();
    for (model, batches) in [(MIXTRAL, MIXTRAL_BATCHES), (DEEPSEEK, DEEPSEEK_BATCHES)] {
        for (tokens, &path) in batches.iter().flat_map(|(tokens, paths)| paths.iter().map(move |path| (*tokens, path)))
        {
            let shape = model.shape(tokens);
            assert!(fused::plan(DType::Bf16, &shape, path, true, true, false, 132).is_some(), "{tokens} {path:?}");
            // Blocks of pairs can be numbered; for `Vector` the SIMT device has too few multiprocessors.
            if path != FusedPath::Vector {
                fused::plan_of(&d, DType::Bf16, &shape, path, &fused::Operands::new(&shape)).unwrap();
            }
        }
    }
    for (model, batches) in [(MIXTRAL, QUANT_MIXTRAL_BATCHES), (DEEPSEEK, QUANT_DEEPSEEK_BATCHES)] {
        for (scales, batches) in SCALES.into_iter().zip(batches) {
            for (tokens, &path) in batches.iter().flat_map(|(t, paths)| paths.iter().map(move |path| (*t, path))) {
                let shape = model.shape(tokens);
                let o = fused_quant::Operands::new(&shape, scales);
                fused_quant::path_of(&d, DType::Bf16, DType::E4m3, path, &shape, &o).unwrap();
            }
        }
    }
}

#[test]
fn mixtral_on_a_gpu() {
    let Some((d, _turn)) = large_gpu(12).filter(|_| !skipped()) else { return };
    check_model(&d, MIXTRAL, true, &MIXTRAL_BATCHES);
}

#[test]
fn deepseek_v3_on_a_gpu() {
    let Some((d, _turn)) = large_gpu(40).filter(|_| !skipped()) else { return };
    check_model(&d, DEEPSEEK, false, &DEEPSEEK_BATCHES);
}

/// [`check_model`] for e4m3 weights, with scales of blocks or of rows.
fn check_quant_model(d: &Device, model: Model, scales: QuantScales, batches: &[(usize, &[FusedQuantPath])]) {
    let s = Stream::new(d).unwrap();
    let Model { experts, hidden, inter, .. } = model;
    let blocks = scales == QuantScales::Blocks;
    let period = |seed: u64| -> (Vec<E4M3>, Vec<f64>) { noise(PERIOD, seed).into_iter().map(e4m3).unzip() };
    let ((first, first_numbers), (second, second_numbers)) = (period(2), period(3));
    let w13 = cyclic(d, &s, &first, &[experts, 2 * inter, hidden]);
    let w2 = cyclic(d, &s, &second, &[experts, hidden, inter]);
    let [mut a, mut b] = [&w13, &w2].map(|w| Tensor::<E4M3>::uninit(d, w.shape()).unwrap());
    shuffle_weights(&s, &mut a, &w13, Some(GateUp::Halves)).unwrap();
    shuffle_weights(&s, &mut b, &w2, None).unwrap();
    let scales_of = |rows: usize, k: usize, seed: u64| -> (Vec<f32>, Tensor<f32>) {
        let shape = if blocks { vec![experts, rows.div_ceil(128), k.div_ceil(128)] } else { vec![experts, rows] };
        let scales: Vec<f32> = noise(shape.iter().product(), seed).iter().map(|s| 0.25 * (1.0 + s.abs())).collect();
        let tensor = Tensor::from_slice(d, &scales, &shape).unwrap();
        (scales, tensor)
    };
    let ((first_scales, s13), (second_scales, s2)) = (scales_of(2 * inter, hidden, 4), scales_of(hidden, inter, 5));
    let want = model.each(|sample, x, weights| {
        let of = |numbers: &[f64], scales: &[f32], rows: usize, k: usize| {
            let mut all = Vec::with_capacity(model.top_k * rows * k);
            let (block, group) = if blocks { (128, 128) } else { (1, k) };
            let (down, across) = (rows.div_ceil(block), k.div_ceil(group));
            for e in model.ids(sample).into_iter().map(|e| e as usize) {
                for (row, column) in (0..rows).flat_map(|row| (0..k).step_by(group).map(move |column| (row, column))) {
                    let scale = scales[(e * down + row / block) * across + column / group] as f64;
                    let from = (e * rows + row) * k + column;
                    all.extend(of_cycle(numbers, from, group.min(k - column)).map(|v| v * scale));
                }
            }
            all
        };
        let block = QuantBlock {
            hidden,
            intermediate: inter,
            w13: of(&first_numbers, &first_scales, 2 * inter, hidden),
            w2: of(&second_numbers, &second_scales, hidden, inter),
            bias13: vec![],
            bias2: vec![],
            smooth13: vec![],
            smooth2: vec![],
            gate_up: GateUp::Halves,
            activation: ExpertActivation::Silu,
            int8: false,
            scales,
        };
        warploom::reference::moe::fused_quant::<bf16>(&block, x, &model.slots(weights))
    });
    for &(tokens, paths) in batches {
        let batch = Batch::new(d, model, tokens);
        let mut workspace = Tensor::<u8>::uninit(d, &[model.shape(tokens).quant_workspace_bytes(DType::Bf16)]).unwrap();
        for &path in paths {
            let tile = matches!(path, FusedQuantPath::Tile32 | FusedQuantPath::Tile128);
            let plain = tile || path == FusedQuantPath::Auto;
            if !plain && skipped_without_hopper(d) {
                continue;
            }
            let mut run = |w13: &Tensor<E4M3>, w2: &Tensor<E4M3>, shuffled: bool| {
                let (mut out, Batch { x, ids, weights, .. }) = (batch.out(d, &s), &batch);
                s.fill_bytes(&mut workspace, 0xff).unwrap();
                let (w13, w2) = (Quantised::new(w13, &s13), Quantised::new(w2, &s2));
                let options = FusedQuantOptions::default().path(path).shuffled(shuffled);
                fused_quant(&s, &mut out, x, w13, w2, ids, weights, &options, &mut workspace).unwrap();
                out
            };
            let out = run(&w13, &w2, false);
            let case = format!("{model:?}, {tokens} tokens, {path:?}, {scales:?}");
            for (want, &place) in want.iter().zip(&batch.places) {
                let got = out.narrow(0, place, 1).unwrap().to_vec().unwrap();
                let tolerance = Tolerance::new(true, is_hopper(d) && !tile, hidden + inter);
                for (c, (got, want)) in got.iter().zip(want).enumerate() {
                    let (error, allowed) = ((got.to_f32() as f64 - want.value).abs(), tolerance.of::<bf16>(want));
                    assert!(
                        error <= allowed,
                        "{place}, {c}: {got}, expected {} within {allowed:e}, {case}",
                        want.value
                    );
                }
            }
            if !plain {
                let bits = |t: Tensor<bf16>| t.to_vec().unwrap().into_iter().map(bf16::to_bits).collect::<Vec<_>>();
                assert_eq!(bits(run(&a, &b, true)), bits(out), "shuffled: {case}");
            }
        }
    }
}

#[test]
fn quantised_mixtral_on_a_gpu() {
    let Some((d, _turn)) = large_gpu(8).filter(|_| !skipped()) else { return };
    for (scales, batches) in SCALES.into_iter().zip(QUANT_MIXTRAL_BATCHES) {
        check_quant_model(&d, MIXTRAL, scales, batches);
    }
}

#[test]
fn quantised_deepseek_v3_on_a_gpu() {
    let Some((d, _turn)) = large_gpu(40).filter(|_| !skipped()) else { return };
    for (scales, batches) in SCALES.into_iter().zip(QUANT_DEEPSEEK_BATCHES) {
        check_quant_model(&d, DEEPSEEK, scales, batches);
    }
}
