use super::fused::{enough_to_add, leave_two};
use cuda_std::Float;
use proptest::prelude::*;
use warploom::gemm::{Quantised, QuantisedElement};
use warploom::moe::{
    ExpertActivation, FusedQuantOptions, FusedQuantPath, FusedShape, GateUp, QuantScales, SharedQuantExperts,
    fused_quant, shuffle_weights,
};
use warploom::reference::gemm::dequantise;
use warploom::reference::moe::{QuantBlock, QuantResult, fused_quant as reference};
use warploom::{DType, Device, E4M3, Error, Graph, Stream, Tensor, bf16, f16};
use warploom_tests::{
    epsilon, gpu, is_hopper, noise, noise_of, on_every_device, on_every_order, on_every_small_device, property,
    racechecking, sanitizing, skipped_without_hopper, widen,
};

const ACTIVATIONS: [ExpertActivation; 5] = [
    ExpertActivation::Silu,
    ExpertActivation::GeluTanh,
    ExpertActivation::Relu2,
    ExpertActivation::SwigluOai { alpha: 1.702, limit: 1.5 },
    ExpertActivation::Gelu,
];
const LAYOUTS: [GateUp; 3] = [GateUp::Halves, GateUp::Interleaved, GateUp::GateOnly];
const WGMMA: [FusedQuantPath; 3] = [FusedQuantPath::Wgmma16, FusedQuantPath::Wgmma64, FusedQuantPath::Wgmma160];

/// What every GPU takes.
const TILES: [FusedQuantPath; 2] = [FusedQuantPath::Tile32, FusedQuantPath::Tile128];

/// All that a device takes.
fn paths(d: &Device) -> impl Iterator<Item = FusedQuantPath> {
    let hopper = !skipped_without_hopper(d);
    let wgmma = WGMMA.into_iter().chain([FusedQuantPath::Wgmma256]).filter(move |_| hopper);
    TILES.into_iter().chain(wgmma)
}

/// The scales of weights.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Scales {
    Blocks,
    Rows,
    /// One for each expert, which rows of activations have one of their own with.
    Experts,
}

#[derive(Clone, Debug)]
struct Case {
    tokens: usize,
    top_k: usize,
    experts: usize,
    hidden: usize,
    inter: usize,
    ids: Vec<i32>,
    gate_up: GateUp,
    activation: ExpertActivation,
    scales: Scales,
    smooth: bool,
    biased: bool,
    /// Shared experts, and whether `ids` lists them.
    shared: usize,
    listed: bool,
    map: Option<Vec<i32>>,
    /// Tokens that exist.
    present: usize,
    unordered: bool,
    rounded: bool,
    shuffled: bool,
    path: FusedQuantPath,
}

impl Case {
    fn new(tokens: usize, top_k: usize, experts: usize, hidden: usize, inter: usize, path: FusedQuantPath) -> Self {
        let ids = noise(tokens * top_k, 5).iter().map(|x| ((x + 1.0) / 2.0 * experts as f32) as i32).collect();
        let (gate_up, activation) = (GateUp::Halves, ExpertActivation::Silu);
        let (scales, map, present) = (Scales::Blocks, None, tokens);
        let (smooth, biased, shared, listed) = (false, false, 0, false);
        Self {
            tokens,
            top_k,
            experts,
            hidden,
            inter,
            ids,
            gate_up,
            activation,
            scales,
            smooth,
            biased,
            shared,
            listed,
            map,
            present,
            unordered: false,
            rounded: false,
            shuffled: false,
            path,
        }
    }

    fn shape(&self) -> FusedShape {
        let mut shape = FusedShape::new(self.tokens, self.top_k, self.local(), self.hidden, self.inter);
        (shape.shared_experts, shape.append_shared) = (self.shared, !self.listed);
        shape
    }

    fn rows(&self) -> usize {
        self.gate_up.rows() * self.inter
    }

    /// Experts of the device.
    fn local(&self) -> usize {
        self.map.as_ref().map_or(self.experts, |m| m.iter().filter(|&&e| e >= 0).count())
    }

    /// A token's experts as the device numbers them, shared ones last, with their weights.
    fn slots(&self, token: usize, weights: &[f32]) -> Vec<(usize, f64)> {
        let row = token * self.top_k..(token + 1) * self.top_k;
        let place = |id: i32| {
            let id = usize::try_from(id).ok()?;
            if id >= self.experts {
                return (id - self.experts < self.shared).then(|| self.local() + id - self.experts);
            }
            self.map.as_ref().map_or(Some(id), |map| usize::try_from(map[id]).ok())
        };
        let pairs = self.ids[row.clone()].iter().zip(&weights[row]);
        let appended = if self.listed { 0 } else { self.shared };
        pairs
            .filter_map(|(&id, &w)| Some((place(id)?, w as f64)))
            .chain((0..appended).map(|s| (self.local() + s, 1.0)))
            .collect()
    }
}

/// 8-bit weights `[experts, rows, k]`, their scales, and what they stand for.
struct Weights<Q> {
    values: Tensor<Q>,
    scales: Tensor<f32>,
    meaning: Vec<f64>,
}

impl<Q: QuantisedElement> Weights<Q> {
    fn new(d: &Device, [experts, rows, k]: [usize; 3], kind: Scales, seed: u64, of: impl Fn(f32) -> (Q, f64)) -> Self {
        let (values, numbers): (Vec<Q>, Vec<f64>) = noise(experts * rows * k, seed).into_iter().map(of).unzip();
        let shape = match kind {
            Scales::Blocks => vec![experts, rows.div_ceil(128), k.div_ceil(128)],
            Scales::Rows => vec![experts, rows],
            Scales::Experts => vec![experts],
        };
        let unit = if Q::DTYPE == DType::I8 { 0.25 / 127.0 } else { 0.25 };
        let count = shape.iter().product::<usize>();
        let scales: Vec<f32> = noise(count, seed + 1).into_iter().map(|s| unit * (1.0 + s.abs())).collect();
        let wide = widen(&scales);
        let meaning = numbers
            .chunks((rows * k).max(1))
            .zip(wide.chunks((count / experts.max(1)).max(1)))
            .flat_map(|(n, s)| {
                let (block, group) = match kind {
                    Scales::Blocks => (128, 128),
                    Scales::Rows => (1, k),
                    Scales::Experts => (rows, k),
                };
                dequantise(n, s, k, block, group)
            })
            .collect();
        let values = Tensor::from_slice(d, &values, &[experts, rows, k]).unwrap();
        Self { values, scales: Tensor::from_slice(d, &scales, &shape).unwrap(), meaning }
    }

    fn get(&self) -> Quantised<'_, Q> {
        Quantised::new(&self.values, &self.scales)
    }
}

/// Experts: weights, biases, and smoothing vectors.
struct Experts<Q> {
    w13: Weights<Q>,
    w2: Weights<Q>,
    biases: [Tensor<f32>; 2],
    smooth: [Tensor<f32>; 2],
}

impl<Q: QuantisedElement> Experts<Q> {
    fn new(d: &Device, case: &Case, experts: usize, seed: u64, of: impl Fn(f32) -> (Q, f64) + Copy) -> Self {
        let (h, i, rows) = (case.hidden, case.inter, case.rows());
        let vector = |seed: u64, n: usize, base: f32| {
            let v: Vec<f32> = noise(experts * n, seed).into_iter().map(|v| base + v / 2.0).collect();
            Tensor::from_slice(d, &v, &[experts, n]).unwrap()
        };
        Self {
            w13: Weights::new(d, [experts, rows, h], case.scales, seed, of),
            w2: Weights::new(d, [experts, h, i], case.scales, seed + 2, of),
            biases: [vector(seed + 20, rows, 0.0), vector(seed + 21, h, 0.0)],
            smooth: [vector(seed + 22, h, 1.0), vector(seed + 23, i, 1.0)],
        }
    }
}

/// Tensors of a case.
struct Inputs<T: Float, Q: QuantisedElement> {
    x: Tensor<T>,
    routed: Experts<Q>,
    shared: Experts<Q>,
    ids: Tensor<i32>,
    weights: Tensor<f32>,
    map: Tensor<i32>,
    present: Tensor<i32>,
}

impl<T: Float, Q: QuantisedElement> Inputs<T, Q> {
    fn new(d: &Device, case: &Case, of: impl Fn(f32) -> (Q, f64) + Copy) -> Self {
        let map = case.map.clone().unwrap_or_default();
        Self {
            x: Tensor::from_slice(d, &noise_of::<T>(case.tokens * case.hidden, 1), &[case.tokens, case.hidden])
                .unwrap(),
            routed: Experts::new(d, case, case.local(), 2, of),
            shared: Experts::new(d, case, case.shared, 102, of),
            ids: Tensor::from_slice(d, &case.ids, &[case.tokens, case.top_k]).unwrap(),
            weights: Tensor::from_slice(d, &noise(case.tokens * case.top_k, 10), &[case.tokens, case.top_k]).unwrap(),
            map: Tensor::from_slice(d, &map, &[map.len()]).unwrap(),
            present: Tensor::from_slice(d, &[case.present as i32], &[1]).unwrap(),
        }
    }

    fn options<'a>(&'a self, case: &Case) -> FusedQuantOptions<'a, Q> {
        let mut o = FusedQuantOptions::default()
            .activation(case.activation)
            .gate_up(case.gate_up)
            .unordered(case.unordered)
            .rounded_slots(case.rounded)
            .shuffled(case.shuffled)
            .path(case.path);
        let mut shared = SharedQuantExperts::new(self.shared.w13.get(), self.shared.w2.get());
        if case.smooth {
            o = o.smooth(Some(&self.routed.smooth[0]), Some(&self.routed.smooth[1]));
            (shared.smooth13, shared.smooth2) = (Some(&self.shared.smooth[0]), Some(&self.shared.smooth[1]));
        }
        if case.biased {
            o = o.biases(Some(&self.routed.biases[0]), Some(&self.routed.biases[1]));
            (shared.bias13, shared.bias2) = (Some(&self.shared.biases[0]), Some(&self.shared.biases[1]));
        }
        if case.shared > 0 {
            o = o.shared_experts(shared).shared_listed(case.listed);
        }
        if case.map.is_some() {
            o = o.expert_map(&self.map);
        }
        if case.present < case.tokens {
            o = o.num_tokens(&self.present);
        }
        o
    }

    /// The same with shuffled weights.
    fn shuffle(mut self, d: &Device, s: &Stream, case: &Case) -> Self {
        for experts in [&mut self.routed, &mut self.shared] {
            for (weights, gate_up) in [(&mut experts.w13, Some(case.gate_up)), (&mut experts.w2, None)] {
                let mut out = Tensor::uninit(d, weights.values.shape()).unwrap();
                shuffle_weights(s, &mut out, &weights.values, gate_up).unwrap();
                weights.values = out;
            }
        }
        self
    }

    /// Routed experts' numbers, then the shared ones'.
    fn both(&self, of: impl Fn(&Experts<Q>) -> Vec<f64>) -> Vec<f64> {
        [of(&self.routed), of(&self.shared)].concat()
    }

    /// On a poisoned output and workspace.
    fn run(&self, d: &Device, s: &Stream, case: &Case) -> Vec<T> {
        let bytes = case.shape().quant_workspace_bytes(T::DTYPE);
        let mut workspace = Tensor::<u8>::uninit(d, &[bytes]).unwrap();
        let mut out = Tensor::<T>::uninit(d, &[case.tokens, case.hidden]).unwrap();
        s.fill_bytes(&mut out, 0xff).unwrap();
        if !d.is_simt() {
            s.fill_bytes(&mut workspace, 0xff).unwrap();
        }
        let (w13, w2, options) = (self.routed.w13.get(), self.routed.w2.get(), self.options(case));
        fused_quant(s, &mut out, &self.x, w13, w2, &self.ids, &self.weights, &options, &mut workspace).unwrap();
        out.to_vec().unwrap()
    }
}

/// How far results may be from the reference's.
#[derive(Clone, Copy)]
pub(super) struct Tolerance {
    flips: f64,
    arithmetic: f64,
}

impl Tolerance {
    /// Of products of e4m3 or int8, on Hopper's tensor cores or not, with so many terms in all.
    pub(super) fn new(e4m3: bool, hopper: bool, terms: usize) -> Self {
        // f32 sums; Hopper's tensor cores drop bits of e4m3 sums.
        let hardware = e4m3 && hopper;
        let arithmetic = if hardware { 2f64.powi(-11) } else { terms as f64 * 2f64.powi(-23) };
        Self { flips: if hardware { 8.0 } else { 2.0 }, arithmetic }
    }

    pub(super) fn of<T: Float>(self, want: &QuantResult) -> f64 {
        epsilon::<T>() * (want.value.abs() + want.rounded)
            + self.flips * want.step
            + self.arithmetic * want.magnitude
            + 2f64.powi(-24)
    }
}

/// Runs a case twice and compares so many tokens with the reference.
fn check<T: Float, Q: QuantisedElement>(d: &Device, s: &Stream, case: &Case, of: impl Fn(f32) -> (Q, f64) + Copy) {
    let inputs = Inputs::<T, Q>::new(d, case, of);
    let got = inputs.run(d, s, case);
    let bits = |v: &[T]| v.iter().map(|v| v.to_f32().to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(&got), bits(&inputs.run(d, s, case)), "two runs");
    let int8 = Q::DTYPE == DType::I8;
    let vector = |there: bool, t: &Tensor<f32>| if there { widen(&t.to_vec().unwrap()) } else { vec![] };
    let block = QuantBlock {
        hidden: case.hidden,
        intermediate: case.inter,
        w13: inputs.both(|e| e.w13.meaning.clone()),
        w2: inputs.both(|e| e.w2.meaning.clone()),
        bias13: inputs.both(|e| vector(case.biased, &e.biases[0])),
        bias2: inputs.both(|e| vector(case.biased, &e.biases[1])),
        smooth13: inputs.both(|e| vector(case.smooth, &e.smooth[0])),
        smooth2: inputs.both(|e| vector(case.smooth, &e.smooth[1])),
        gate_up: case.gate_up,
        activation: case.activation,
        int8,
        scales: if case.scales == Scales::Blocks { QuantScales::Blocks } else { QuantScales::Rows },
    };
    let (x, weights) = (widen(&inputs.x.to_vec().unwrap()), inputs.weights.to_vec().unwrap());
    let tolerance =
        Tolerance::new(!int8, !d.is_simt() && is_hopper(d) && !TILES.contains(&case.path), case.hidden + case.inter);
    // Shown if something below fails.
    println!("{} {} {case:?}", T::DTYPE, Q::DTYPE);
    let every = case.tokens.div_ceil(48).max(1);
    for t in (0..case.tokens).filter(|t| t % every == 0 || t + 1 == case.tokens) {
        let row = &got[t * case.hidden..][..case.hidden];
        if t >= case.present {
            assert!(row.iter().all(|v| v.to_f32().is_nan()), "token {t} was written");
            continue;
        }
        let want = reference::<T>(&block, &x[t * case.hidden..][..case.hidden], &case.slots(t, &weights));
        for (c, (got, want)) in row.iter().zip(want).enumerate() {
            let error = (got.to_f32() as f64 - want.value).abs();
            let bound = tolerance.of::<T>(&want);
            assert!(
                error <= bound,
                "token {t}, column {c}: {}, expected {} within {bound:e}",
                got.to_f32(),
                want.value
            );
        }
    }
}

pub(super) fn e4m3(v: f32) -> (E4M3, f64) {
    let q = E4M3::from_f32(v);
    (q, q.to_f32() as f64)
}

fn int8(v: f32) -> (i8, f64) {
    let q = (v * 127.0) as i8;
    (q, q as f64)
}

#[test]
fn tile_matches_the_reference() {
    let shape = (1usize..24, 1usize..4, 3usize..6, 1usize..20, 1usize..12);
    let how = (0usize..5, 0usize..3, any::<[bool; 4]>(), 0usize..3);
    property(2, (shape, how), |d, s, ((tokens, top_k, experts, h, i), (activation, layout, which, shared))| {
        let [smooth, biased, one, listed] = which;
        let case = Case {
            activation: ACTIVATIONS[activation],
            gate_up: LAYOUTS[layout],
            biased,
            shared,
            listed,
            ..Case::new(tokens, top_k, experts, 16 * h, 16 * i, FusedQuantPath::Tile32)
        };
        check::<f32, E4M3>(d, s, &case, e4m3);
        let case = Case { smooth, scales: if one { Scales::Experts } else { Scales::Rows }, ..case };
        check::<bf16, E4M3>(d, s, &case, e4m3);
        check::<f32, i8>(d, s, &case, int8);
        check::<f16, i8>(d, s, &case, int8);
        Ok(())
    });
}

#[test]
fn wgmma_matches_the_reference() {
    on_every_order(|d, s| {
        if skipped_without_hopper(d) {
            return;
        }
        for (i, path) in WGMMA.into_iter().enumerate() {
            // Both sides of a tile and of a group of columns; more pairs of an expert than a share holds.
            for (j, [tokens, top_k, experts, h, inter]) in
                [[1, 2, 3, 272, 144], [30, 3, 4, 144, 208]].into_iter().enumerate()
            {
                let case = Case {
                    activation: ACTIVATIONS[(i + j) % 4],
                    gate_up: LAYOUTS[(i + 2 * j) % 3],
                    biased: j == 1,
                    shared: j,
                    ..Case::new(tokens, top_k, experts, h, inter, path)
                };
                check::<bf16, E4M3>(d, s, &case, e4m3);
                let rows = Case { scales: Scales::Rows, smooth: j == 1, gate_up: LAYOUTS[(i + j) % 3], ..case };
                check::<bf16, E4M3>(d, s, &rows, e4m3);
                check::<bf16, i8>(d, s, &rows, int8);
            }
            let mut case = Case { biased: true, ..Case::new(9, 2, 4, 128, 128, path) };
            check::<f16, E4M3>(d, s, &case, e4m3);
            // Shared experts that are listed.
            (case.scales, case.shared, case.listed) = (Scales::Experts, 2, true);
            (case.ids[1], case.ids[4], case.ids[9]) = (4, 5, 4);
            check::<f16, i8>(d, s, &case, int8);
            check::<f16, E4M3>(d, s, &Case { smooth: true, ..case }, e4m3);
        }
    });
}

#[test]
fn every_width_of_a_product() {
    on_every_device(|d, s| {
        if skipped_without_hopper(d) {
            return;
        }
        // With scales of blocks `Wgmma16` sorts the pairs if they are many.
        for (tokens, path) in [
            (70, FusedQuantPath::Wgmma16),
            (150, FusedQuantPath::Wgmma16),
            (70, FusedQuantPath::Wgmma64),
            (150, FusedQuantPath::Wgmma160),
        ] {
            let mut case = Case::new(tokens, 1, 4, 64, 32, path);
            case.ids = (0..tokens as i32)
                .map(|t| {
                    if t < 8 {
                        1
                    } else if t < 20 {
                        2
                    } else {
                        0
                    }
                })
                .collect();
            check::<bf16, E4M3>(d, s, &case, e4m3);
            if path != FusedQuantPath::Wgmma16 || tokens <= 128 {
                let case = Case { scales: Scales::Rows, ..case };
                check::<bf16, i8>(d, s, &case, int8);
            }
        }
        // The wide ones, and with scales of blocks experts that are cut in two.
        let counts = [66, 105, 120, 130, 140, 150, 165, 170];
        let mut case = Case::new(counts.iter().sum(), 1, counts.len(), 64, 32, FusedQuantPath::Wgmma160);
        case.ids = (0..counts.len()).flat_map(|e| vec![e as i32; counts[e]]).collect();
        check::<bf16, E4M3>(d, s, &case, e4m3);
        check::<bf16, i8>(d, s, &Case { scales: Scales::Rows, ..case }, int8);
    });
}

/// Two blocks that share the weights of an even number of shares, or have a share of an odd number in common.
#[test]
fn shares_in_twos() {
    on_every_device(|d, s| {
        if skipped_without_hopper(d) {
            return;
        }
        let counts = [190, 0, 360, 4];
        let tokens = counts.iter().sum::<usize>() / 2;
        let mut case = Case::new(tokens, 2, 3, 272, 144, FusedQuantPath::Wgmma160);
        case.ids = (0..counts.len()).flat_map(|e| vec![if e == 3 { -1 } else { e as i32 }; counts[e]]).collect();
        let case = Case { scales: Scales::Rows, biased: true, present: tokens - 1, ..case };
        check::<bf16, E4M3>(d, s, &case, e4m3);
        let case = Case { smooth: true, shared: 1, gate_up: GateUp::Interleaved, scales: Scales::Experts, ..case };
        check::<f16, i8>(d, s, &Case { hidden: 80, ..case }, int8);
    });
}

/// Pairs on the 64-row side of the products: none, one or two waves of each consumer, and a share that is full. The same bits as with weights there.
#[test]
fn pairs_in_waves() {
    on_every_device(|d, s| {
        if skipped_without_hopper(d) {
            return;
        }
        let bits = |v: Vec<bf16>| v.into_iter().map(bf16::to_bits).collect::<Vec<_>>();
        for (i, counts) in [vec![270, 60], vec![70, 130, 0, 200], vec![5]].into_iter().enumerate() {
            let ids = (0..counts.len()).flat_map(|e| vec![e as i32; counts[e]]).collect();
            let [hidden, inter] = [[80, 192], [144, 80], [272, 192]][i];
            let gate_up = [GateUp::Halves, GateUp::Interleaved, GateUp::GateOnly][i];
            let (activation, biased) = (ACTIVATIONS[i], i > 0);
            let new = |path| Case::new(counts.iter().sum(), 1, counts.len(), hidden, inter, path);
            let case = Case { ids, gate_up, activation, biased, ..new(FusedQuantPath::Wgmma256) };
            check::<bf16, E4M3>(d, s, &case, e4m3);
            let inputs = Inputs::<bf16, E4M3>::new(d, &case, e4m3);
            let got = bits(inputs.run(d, s, &case));
            let other = Case { path: FusedQuantPath::Wgmma160, ..case.clone() };
            assert_eq!(got, bits(inputs.run(d, s, &other)), "{case:?}");
        }
        // What it does not take.
        for case in [
            Case::new(3, 1, 2, 64, 80, FusedQuantPath::Wgmma256),
            Case { scales: Scales::Rows, ..Case::new(3, 1, 2, 64, 64, FusedQuantPath::Wgmma256) },
        ] {
            let inputs = Inputs::<bf16, E4M3>::new(d, &case, e4m3);
            let mut workspace = Tensor::zeros(d, &[case.shape().quant_workspace_bytes(DType::Bf16)]).unwrap();
            let mut out = Tensor::<bf16>::zeros(d, &[case.tokens, case.hidden]).unwrap();
            let (w13, w2, options) = (inputs.routed.w13.get(), inputs.routed.w2.get(), inputs.options(&case));
            let e =
                fused_quant(s, &mut out, &inputs.x, w13, w2, &inputs.ids, &inputs.weights, &options, &mut workspace);
            assert!(matches!(e, Err(Error::Unsupported { .. })), "{case:?}: {e:?}");
        }
    });
}

/// So much to add up that the sum begins with a stripe of columns while the next ones are computed; and so many items that the second product begins while the first still runs.
#[test]
fn sums_that_begin_early() {
    on_every_small_device(|d, s| {
        if skipped_without_hopper(d) {
            return;
        }
        if racechecking() {
            println!("skipped under racecheck, which takes a lane's arrival for its warp as none");
            return;
        }
        let multiprocessors = d.properties().multiprocessors as usize;
        let tokens = (124 << 10) * multiprocessors / (2 * 1040 * 4) + 1;
        // Many experts are for a device with few multiprocessors.
        for (experts, inter) in [(multiprocessors, 80), (if d.is_simt() { 16 * multiprocessors } else { 8 }, 16)] {
            let mut case = Case::new(tokens, 2, experts, 1040, inter, FusedQuantPath::Wgmma64);
            case.ids[..5].fill(-1);
            check::<bf16, E4M3>(d, s, &case, e4m3);
        }
        // Rounded results, in rows of whole lines.
        let twice = (124 << 10) * multiprocessors / (2 * 1088 * 2) + 1;
        let case = Case::new(twice, 2, multiprocessors, 1088, 80, FusedQuantPath::Wgmma64);
        check::<bf16, E4M3>(d, s, &Case { rounded: true, ..case }, e4m3);
        // With scales of rows there must be more.
        let tokens = (310 << 10) * multiprocessors / (2 * 1920 * 4) + 1;
        let mut case = Case::new(tokens, 2, multiprocessors, 1920, 16, FusedQuantPath::Wgmma64);
        case.ids[..5].fill(-1);
        check::<bf16, E4M3>(d, s, &Case { scales: Scales::Rows, ..case }, e4m3);
    });
}

/// More columns than a block of threads keeps while it finds a row's scale.
#[test]
fn rows_of_many_columns() {
    on_every_order(|d, s| {
        let case = Case { scales: Scales::Rows, ..Case::new(2, 1, 1, 16 * 1056, 16, FusedQuantPath::Tile32) };
        check::<bf16, i8>(d, s, &case, int8);
        check::<bf16, E4M3>(d, s, &Case { smooth: true, ..case }, e4m3);
    });
}

#[test]
fn experts_elsewhere_and_tokens_that_are_none() {
    on_every_order(|d, s| {
        for path in paths(d).chain([FusedQuantPath::Auto]) {
            let mut case = Case::new(7, 3, 6, 64, if path == FusedQuantPath::Wgmma256 { 64 } else { 48 }, path);
            (case.ids[0], case.ids[4], case.ids[7]) = (-1, 99, -7);
            (case.map, case.present) = (Some(vec![2, -1, 0, 1, -1, 3]), 5);
            check::<bf16, E4M3>(d, s, &case, e4m3);
            let rows = Case { smooth: true, shared: 1, scales: Scales::Rows, ..case.clone() };
            if path != FusedQuantPath::Wgmma256 {
                check::<bf16, i8>(d, s, &rows, int8);
            }
            // Nobody goes anywhere, or all go to an expert that is elsewhere; a shared one has them all.
            for id in [-1, 1] {
                let mut case = Case { biased: true, ..case.clone() };
                case.ids.fill(id);
                check::<bf16, E4M3>(d, s, &case, e4m3);
                check::<bf16, E4M3>(d, s, &Case { shared: 1, ..case }, e4m3);
            }
        }
    });
}

/// A rank that all tokens go past.
#[test]
fn no_experts_here() {
    on_every_device(|d, s| {
        for path in paths(d) {
            let case = Case { map: Some(vec![-1; 6]), ..Case::new(5, 2, 6, 64, 64, path) };
            check::<bf16, E4M3>(d, s, &case, e4m3);
            check::<bf16, E4M3>(d, s, &Case { shared: 1, ..case.clone() }, e4m3);
            if path != FusedQuantPath::Wgmma256 {
                check::<bf16, i8>(d, s, &Case { shared: 1, scales: Scales::Rows, ..case }, int8);
            }
        }
    });
}

/// Numbers of experts of models on both sides of a warp's and of a table's size, the last of them among those of the pairs.
#[test]
fn numbers_of_experts() {
    on_every_device(|d, s| {
        for (i, experts) in [60, 256, 257].into_iter().enumerate() {
            // Each path with one of them on the SIMT device, which takes its time.
            for (_, path) in paths(d).enumerate().filter(|(j, _)| !d.is_simt() || (i + j) % 3 == 0) {
                let inter = if path == FusedQuantPath::Wgmma256 { 64 } else { 16 };
                let mut case = Case::new(2, 4, experts, 32, inter, path);
                (case.ids[0], case.ids[5]) = (experts as i32 - 1, 0);
                check::<bf16, E4M3>(d, s, &case, e4m3);
                if path != FusedQuantPath::Wgmma256 {
                    check::<bf16, E4M3>(d, s, &Case { scales: Scales::Rows, ..case }, e4m3);
                }
            }
        }
    });
}

/// Inner dimensions of models that are no multiples of what has a scale, on either side.
#[test]
fn widths() {
    if racechecking() {
        println!("skipped under racecheck, which takes a lane's arrival for its warp as none");
        return;
    }
    // In one mode of the SIMT device only: many steps for each result take their time.
    for d in (!sanitizing()).then(Device::simt).into_iter().chain(gpu()) {
        let (d, s) = (&d, &Stream::new(&d).unwrap());
        for (i, path) in paths(d).enumerate() {
            let least = if path == FusedQuantPath::Wgmma256 { 64 } else { 16 };
            for (j, (hidden, inter)) in [(2880, least), (16, 1408)].into_iter().enumerate() {
                let mut case = Case::new(2, 1, 3, hidden, inter, path);
                case.ids = vec![0, 2];
                // One of both on the SIMT device, which takes its time.
                let (tall, even) = (path == FusedQuantPath::Wgmma256, (i + j) % 2 == 0);
                if tall || even || !d.is_simt() {
                    check::<bf16, E4M3>(d, s, &case, e4m3);
                }
                if !tall && (!even || !d.is_simt()) {
                    check::<bf16, i8>(d, s, &Case { scales: Scales::Rows, ..case }, int8);
                }
            }
        }
    }
}

/// Gates and values far beyond f16's range, with results inside of it.
#[test]
fn f16_does_not_overflow_between_the_products() {
    /// 16, as weights of either type have it.
    fn check<Q: QuantisedElement>(d: &Device, s: &Stream, sixteen: Q, blocks: bool, path: FusedQuantPath) {
        let (hidden, inter) = (64, 128);
        let (w13, w2) = (vec![sixteen; 2 * inter * hidden], vec![sixteen; hidden * inter]);
        let w13 = Tensor::from_slice(d, &w13, &[1, 2 * inter, hidden]).unwrap();
        let w2 = Tensor::from_slice(d, &w2, &[1, hidden, inter]).unwrap();
        // Gate 64 · 100 · 20 = 128000, value 64 · 100 / 25600 = 1/4: 32000 after silu.
        let (gate, value, down) = (20.0 / 16.0, 1.0 / 25600.0 / 16.0, 1.0 / 128.0 / 16.0);
        let t = |v: &[f32], shape: &[usize]| Tensor::from_slice(d, v, shape).unwrap();
        let (s13, s2) = if blocks {
            (t(&[gate, value], &[1, 2, 1]), t(&[down], &[1, 1, 1]))
        } else {
            let each = [vec![gate; inter], vec![value; inter]].concat();
            (t(&each, &[1, 2 * inter]), t(&vec![down; hidden], &[1, hidden]))
        };
        let x = Tensor::from_slice(d, &vec![f16::from_f32(100.0); hidden], &[1, hidden]).unwrap();
        let (ids, weights) = (Tensor::from_slice(d, &[0], &[1, 1]).unwrap(), t(&[0.5], &[1, 1]));
        let bytes = FusedShape::new(1, 1, 1, hidden, inter).quant_workspace_bytes(DType::F16);
        let mut workspace = Tensor::zeros(d, &[bytes]).unwrap();
        let mut out = Tensor::<f16>::zeros(d, &[1, hidden]).unwrap();
        let (w13, w2) = (Quantised::new(&w13, &s13), Quantised::new(&w2, &s2));
        let options = FusedQuantOptions::default().path(path);
        fused_quant(s, &mut out, &x, w13, w2, &ids, &weights, &options, &mut workspace).unwrap();
        for v in out.to_vec().unwrap() {
            assert!((v.to_f32() - 16000.0).abs() < 32.0, "{} {path:?} {blocks}: {v}", Q::DTYPE);
        }
    }
    on_every_device(|d, s| {
        for path in paths(d) {
            check(d, s, E4M3::from_f32(16.0), true, path);
            if path != FusedQuantPath::Wgmma256 {
                check(d, s, E4M3::from_f32(16.0), false, path);
                check(d, s, 16i8, false, path);
            }
        }
    });
}

/// What a stage has beyond the end of K adds nothing, whatever the scales are: where their product is infinite it would make NaN of an infinity.
#[test]
fn padding_adds_nothing() {
    on_every_device(|d, s| {
        let (hidden, inter, tokens) = (64, 64, 9);
        let t = |v: f32, shape: &[usize]| Tensor::from_slice(d, &vec![v; shape.iter().product()], shape).unwrap();
        for (sign, x, scales, want) in [
            (-1.0f32, 2f32.powi(120), [2f32.powi(30), 1.0], 0.0),
            (1.0, 2f32.powi(50), [1.0, 2f32.powi(40)], f32::INFINITY),
        ] {
            let weights = |v: f32| vec![E4M3::from_f32(v); hidden * inter];
            let w13 = Tensor::from_slice(d, &weights(sign), &[1, inter, hidden]).unwrap();
            let w2 = Tensor::from_slice(d, &weights(1.0), &[1, hidden, inter]).unwrap();
            let [s13, s2] = scales.map(|scale| t(scale, &[1, 1, 1]));
            let mut rows = vec![bf16::from_f32(0.0); tokens * hidden];
            rows.iter_mut().step_by(hidden).for_each(|v| *v = bf16::from_f32(x));
            let x = Tensor::from_slice(d, &rows, &[tokens, hidden]).unwrap();
            let (ids, weights) = (Tensor::from_slice(d, &[0; 9], &[tokens, 1]).unwrap(), t(1.0, &[tokens, 1]));
            let bytes = FusedShape::new(tokens, 1, 1, hidden, inter).quant_workspace_bytes(DType::Bf16);
            let mut workspace = Tensor::zeros(d, &[bytes]).unwrap();
            for path in paths(d) {
                let mut out = Tensor::<bf16>::zeros(d, &[tokens, hidden]).unwrap();
                let (w13, w2) = (Quantised::new(&w13, &s13), Quantised::new(&w2, &s2));
                let options = FusedQuantOptions::default().path(path).activation(ExpertActivation::Relu2);
                let options = options.gate_up(GateUp::GateOnly);
                fused_quant(s, &mut out, &x, w13, w2, &ids, &weights, &options, &mut workspace).unwrap();
                let out = out.to_vec().unwrap();
                assert!(out.iter().all(|v| v.to_f32() == want), "{path:?}: {}, expected {want}", out[0]);
            }
        }
    });
}

/// Sums in which every term shows, of numbers that the tensor cores add up exactly, at widths whose last groups and tiles are parts of some: a lost column of K takes 4 off a result, where half of one is allowed.
#[test]
fn every_term_shows() {
    on_every_device(|d, s| {
        for (hidden, inter) in [(144, 208), (80, 144), (208, 80), (400, 272)] {
            for path in paths(d) {
                let case = Case::new(20, 1, 1, hidden, inter, path);
                let case = Case { gate_up: GateUp::GateOnly, activation: ExpertActivation::Relu2, ..case };
                let mut inputs = Inputs::<f16, E4M3>::new(d, &case, e4m3);
                let one = |t: &Tensor<f32>| Tensor::from_slice(d, &vec![1.0; t.len()], t.shape()).unwrap();
                (inputs.routed.w13.scales, inputs.weights) = (one(&inputs.routed.w13.scales), one(&inputs.weights));
                inputs.routed.w2.scales = one(&inputs.routed.w2.scales);
                // A token has 448 first in each group of 128, so that its scales are 1, and ones behind it. Each output of the first product is the sum of two of the ones, so that `h`
                // is 4 everywhere.
                let token = |at: usize| if at.is_multiple_of(128) { 448.0 } else { 1.0 };
                let x: Vec<f16> = (0..20 * hidden).map(|i| f16::from_f32(token(i % hidden))).collect();
                inputs.x.copy_from_slice(&x).unwrap();
                let w13: Vec<E4M3> = (0..inter * hidden)
                    .map(|i| {
                        let (output, at) = (i / hidden, i % hidden);
                        // Two columns that are no first ones.
                        let two = [1 + output % 64, hidden - 1 - output % 8];
                        E4M3::from_f32(if two.contains(&at) { 1.0 } else { 0.0 })
                    })
                    .collect();
                inputs.routed.w13.values.copy_from_slice(&w13).unwrap();
                inputs.routed.w2.values.copy_from_slice(&vec![E4M3::from_f32(1.0); inter * hidden]).unwrap();
                let got = inputs.run(d, s, &case);
                let want = 4.0 * inter as f32;
                for (i, got) in got.iter().enumerate() {
                    let error = (got.to_f32() - want).abs();
                    assert!(error <= 0.5, "{path:?}, {hidden} x {inter}, result {i}: {got}, expected {want}");
                }
            }
        }
    });
}

#[test]
fn at_model_sizes() {
    let Some(d) = gpu() else { return };
    let s = Stream::new(&d).unwrap();
    // Pairs enough for a whole tile and a part of one; more would keep the reference busy for minutes.
    for (tokens, top_k, experts, path) in [
        (1, 8, 16, FusedQuantPath::Wgmma16),
        (16, 8, 16, FusedQuantPath::Wgmma16),
        (100, 1, 1, FusedQuantPath::Wgmma64),
        (200, 1, 1, FusedQuantPath::Wgmma160),
        (300, 1, 1, FusedQuantPath::Wgmma256),
        (100, 1, 3, FusedQuantPath::Tile32),
        (300, 1, 2, FusedQuantPath::Tile128),
    ] {
        if !TILES.contains(&path) && skipped_without_hopper(&d) {
            continue;
        }
        if sanitizing() && tokens > 16 {
            check::<bf16, E4M3>(&d, &s, &Case::new(tokens, top_k, experts, 512, 384, path), e4m3);
            continue;
        }
        check::<bf16, E4M3>(&d, &s, &Case::new(tokens, top_k, experts, 2048, 768, path), e4m3);
        let mut case = Case::new(tokens, top_k, experts, 704, 1440, path);
        if path == FusedQuantPath::Wgmma256 {
            // Halves would have to be multiples of 64, and there are no kernels for scales of rows.
            case.gate_up = GateUp::Interleaved;
        }
        check::<f16, E4M3>(&d, &s, &case, e4m3);
        if path == FusedQuantPath::Wgmma256 {
            continue;
        }
        let case = Case { scales: Scales::Rows, biased: true, ..case };
        check::<bf16, E4M3>(&d, &s, &case, e4m3);
        check::<bf16, i8>(&d, &s, &case, int8);
    }
    let case = Case::new(60, 2, 8, 2048, 768, FusedQuantPath::Auto);
    check::<bf16, i8>(&d, &s, &Case { smooth: true, shared: 1, scales: Scales::Rows, ..case }, int8);
}

#[test]
fn nothing_to_do() {
    on_every_device(|d, s| {
        for (tokens, top_k) in [(0, 2), (3, 0)] {
            let mut case = Case::new(tokens, top_k, 2, 32, 16, FusedQuantPath::Auto);
            let got = Inputs::<bf16, E4M3>::new(d, &case, e4m3).run(d, s, &case);
            assert!(got.iter().all(|v| v.to_f32() == 0.0));
            // How many tokens there are is read by the first launch, whichever that is.
            case.present = tokens.min(2);
            let got = Inputs::<bf16, E4M3>::new(d, &case, e4m3).run(d, s, &case);
            assert!(got.iter().take(2 * 32).all(|v| v.to_f32() == 0.0));
        }
        // Where nothing begins does not matter.
        let case = Case::new(0, 2, 2, 32, 16, FusedQuantPath::Auto);
        let mut inputs = Inputs::<bf16, E4M3>::new(d, &case, e4m3);
        inputs.x = Tensor::zeros(d, &[3, 40]).unwrap().narrow(1, 3, 32).unwrap().narrow(0, 1, 0).unwrap();
        assert!(inputs.run(d, s, &case).is_empty());
        // SAFETY: there is nothing at the address.
        let nothing = || unsafe { Tensor::<E4M3>::from_raw(d, std::ptr::null_mut(), &[0, 64, 128], None, ()) };
        shuffle_weights(s, &mut nothing().unwrap(), &nothing().unwrap(), None).unwrap();
    });
}

/// The path of a raw launch, by sizes and types alone.
#[test]
fn paths_of_raw_launches() {
    use warploom::moe::fused_quant::{Operands, path_of};
    on_every_device(|d, _| {
        let path = |tokens, dtype, activation, path| {
            let shape = FusedShape::new(tokens, 2, 4, 128, 128);
            let mut o = Operands::new(&shape, QuantScales::Blocks);
            o.activation = activation;
            path_of(d, dtype, DType::E4m3, path, &shape, &o)
        };
        let (auto, silu, gelu) = (FusedQuantPath::Auto, ExpertActivation::Silu, ExpertActivation::Gelu);
        let hopper = is_hopper(d);
        for tokens in [1, 3, 100] {
            let best = path(tokens, DType::Bf16, silu, auto).unwrap();
            assert_ne!(best, auto);
            // 50 pairs an expert in the last case.
            let tile = TILES[(tokens == 100) as usize];
            assert_eq!(best != tile, hopper);
            assert_eq!(path(tokens, DType::Bf16, silu, best).unwrap(), best);
            for (dtype, activation) in [(DType::F32, silu), (DType::Bf16, gelu)] {
                assert_eq!(path(tokens, dtype, activation, auto).unwrap(), tile);
                let e = path(tokens, dtype, activation, FusedQuantPath::Wgmma64);
                assert!(matches!(e, Err(Error::Unsupported { .. })), "{e:?}");
            }
        }
        for (path_of, tokens) in [(FusedQuantPath::Tile32, 1 << 24), (FusedQuantPath::Tile128, 1 << 26)] {
            let e = path(tokens, DType::Bf16, silu, path_of);
            assert!(matches!(e, Err(Error::Value { arg: "topk_ids", .. })), "{e:?}");
        }
        // Rows of tokens that 32 bits do not number are for kernels that have them quantised before.
        let far = |x_row: usize, scales, path| {
            let shape = FusedShape::new(2, 1, 4, 2048, 768);
            let mut o = Operands::new(&shape, scales);
            o.x_row = x_row;
            path_of(d, DType::Bf16, DType::E4m3, path, &shape, &o)
        };
        for scales in [QuantScales::Blocks, QuantScales::Rows] {
            let few = if hopper { FusedQuantPath::Wgmma16 } else { FusedQuantPath::Tile32 };
            assert_eq!(far((1 << 34) - 8, scales, auto).unwrap(), few);
            let other = if hopper { FusedQuantPath::Wgmma64 } else { FusedQuantPath::Tile32 };
            assert_eq!(far(1 << 34, scales, auto).unwrap(), other);
            assert_eq!(far(1 << 34, scales, other).unwrap(), other);
            let e = far(1 << 34, scales, FusedQuantPath::Wgmma16);
            assert!(matches!(e, Err(Error::Unsupported { .. })), "{e:?}");
        }
        // Pieces of rows that a reciprocal does not number exactly, as well.
        let wide = |hidden: usize, scales, path| {
            let shape = FusedShape::new(128, 1, 128, hidden, 16);
            path_of(d, DType::Bf16, DType::E4m3, path, &shape, &Operands::new(&shape, scales))
        };
        let few = FusedQuantPath::Wgmma16;
        assert_eq!(wide(741_376, QuantScales::Rows, few).is_ok(), hopper);
        let e = wide(741_392, QuantScales::Rows, few);
        assert!(matches!(e, Err(Error::Unsupported { .. })), "{e:?}");
        assert_eq!(wide(741_392, QuantScales::Blocks, few).is_ok(), hopper);
        assert_ne!(wide(741_392, QuantScales::Rows, auto).unwrap(), few);
    });
}

/// Replays of other tokens, ids, and numbers of tokens, which leave rows of tokens that do not exist alone.
fn check_replays<Q: QuantisedElement>(d: &Device, s: &Stream, case: &Case, of: impl Fn(f32) -> (Q, f64) + Copy) {
    let (tokens, hidden) = (case.tokens, case.hidden);
    let mut inputs = Inputs::<bf16, Q>::new(d, case, of);
    let bytes = case.shape().quant_workspace_bytes(DType::Bf16);
    let mut workspace = Tensor::<u8>::zeros(d, &[bytes]).unwrap();
    let mut out = Tensor::<bf16>::zeros(d, &[tokens, hidden]).unwrap();
    // Loads the kernels, which nobody may in a capture.
    inputs.run(d, s, case);
    let graph = Graph::capture(s, |s| {
        let (w13, w2, options) = (inputs.routed.w13.get(), inputs.routed.w2.get(), inputs.options(case));
        fused_quant(s, &mut out, &inputs.x, w13, w2, &inputs.ids, &inputs.weights, &options, &mut workspace)
    })
    .unwrap();
    let bits = |v: Vec<bf16>| v.into_iter().map(bf16::to_bits).collect::<Vec<_>>();
    for (seed, present) in [(5, tokens), (6, 2)] {
        inputs.x.copy_from_slice(&noise_of::<bf16>(tokens * hidden, seed)).unwrap();
        let ids: Vec<_> = case.ids.iter().map(|id| (id + seed as i32) % case.experts as i32).collect();
        inputs.ids.copy_from_slice(&ids).unwrap();
        inputs.present.copy_from_slice(&[present as i32]).unwrap();
        s.fill_bytes(&mut out, 0xff).unwrap();
        graph.launch(s).unwrap();
        let once = bits(out.to_vec().unwrap());
        graph.launch(s).unwrap();
        assert_eq!(once, bits(out.to_vec().unwrap()));
        assert_eq!(once, bits(inputs.run(d, s, case)), "{case:?}");
        let (there, beyond) = once.split_at(hidden * present);
        assert!(there.iter().all(|&v| v != 0xffff) && beyond.iter().all(|&v| v == 0xffff), "{case:?}");
    }
}

#[test]
fn captured_and_replayed() {
    // In one mode of the SIMT device only, as there are many cases.
    for d in (!sanitizing()).then(Device::simt).into_iter().chain(gpu()) {
        let (d, s) = (&d, &Stream::new(&d).unwrap());
        for path in paths(d).chain([FusedQuantPath::Auto]) {
            // Some number of tokens, so that it is read from the device.
            let case = Case { present: 7, ..Case::new(9, 2, 4, 64, 64, path) };
            check_replays(d, s, &case, e4m3);
            if path == FusedQuantPath::Wgmma160 || path == FusedQuantPath::Wgmma256 {
                check_replays(d, s, &Case { rounded: true, ..case.clone() }, e4m3);
            }
            if path != FusedQuantPath::Wgmma256 {
                let rows = Case { scales: Scales::Rows, ..case };
                check_replays(d, s, &rows, e4m3);
                check_replays(d, s, &Case { smooth: true, shared: 1, ..rows }, int8);
            }
        }
    }
}

/// Each slot's result rounded: exactly what the slots give by themselves, added up; on paths that have no use for the permission it makes no difference.
fn check_rounded<T: Float, Q: QuantisedElement>(
    d: &Device,
    s: &Stream,
    case: &Case,
    of: impl Fn(f32) -> (Q, f64) + Copy,
) {
    let bits = |v: &[T]| v.iter().map(|v| v.to_f32().to_bits()).collect::<Vec<_>>();
    let plain = Inputs::<T, Q>::new(d, case, of);
    let whole = bits(&plain.run(d, s, case));
    let got = bits(&plain.run(d, s, &Case { rounded: true, ..case.clone() }));
    let blocks = matches!(case.path, FusedQuantPath::Wgmma64 | FusedQuantPath::Wgmma256);
    if !(blocks && case.scales == Scales::Blocks) && case.path != FusedQuantPath::Wgmma160 {
        assert_eq!(got, whole, "{case:?}");
        return;
    }
    let mut sums = vec![0f32; case.tokens * case.hidden];
    let weights = plain.weights.to_vec().unwrap();
    for slot in 0..case.top_k {
        let column = |v: &[i32]| v.iter().skip(slot).step_by(case.top_k).copied().collect::<Vec<_>>();
        let one = Case { top_k: 1, ids: column(&case.ids), ..case.clone() };
        let weights: Vec<_> = weights.iter().skip(slot).step_by(case.top_k).copied().collect();
        let weights = Tensor::from_slice(d, &weights, &[case.tokens, 1]).unwrap();
        let inputs = Inputs { weights, ..Inputs::<T, Q>::new(d, &one, of) };
        for (sum, v) in sums.iter_mut().zip(inputs.run(d, s, &one)) {
            *sum += v.to_f32();
        }
    }
    let want: Vec<_> = sums.iter().map(|&v| T::from_f32(v).to_f32().to_bits()).collect();
    assert_eq!(got, want, "{case:?}");
    assert!(got != whole, "a rounding more");
}

#[test]
fn rounded_slots() {
    on_every_order(|d, s| {
        if skipped_without_hopper(d) {
            return;
        }
        for (path, tokens, inter) in [
            (FusedQuantPath::Wgmma16, 9, 80),
            (FusedQuantPath::Wgmma64, 30, 80),
            (FusedQuantPath::Wgmma160, 9, 80),
            // Three rounds through a stage, and one step of K; an odd number of groups of columns.
            (FusedQuantPath::Wgmma160, 150, 32),
            (FusedQuantPath::Wgmma160, 132, 16),
            (FusedQuantPath::Wgmma256, 9, 64),
        ] {
            let mut case = Case { biased: true, ..Case::new(tokens, 2, 2, 208, inter, path) };
            if tokens == 132 {
                case.ids = (0..2 * tokens as i32).map(|pair| pair % 2).collect();
            }
            check_rounded::<bf16, E4M3>(d, s, &case, e4m3);
            let rows = Case { scales: Scales::Rows, hidden: 80, ..case.clone() };
            if tokens <= 30 {
                check_rounded::<f16, E4M3>(d, s, &Case { hidden: 80, ..case }, e4m3);
            }
            if tokens <= 30 && path != FusedQuantPath::Wgmma256 {
                check_rounded::<f16, E4M3>(d, s, &rows, e4m3);
                check_rounded::<bf16, i8>(d, s, &rows, int8);
            }
        }
    });
}

/// Rounded results that are added up where they belong as they come: of two slots the bits that they come to in order, also where the number of tokens is on the device; of five each addition rounds.
fn check_added<T: Float, Q: QuantisedElement>(
    d: &Device,
    s: &Stream,
    case: &Case,
    of: impl Fn(f32) -> (Q, f64) + Copy,
) {
    let bits = |v: &[T]| v.iter().map(|v| v.to_f32().to_bits()).collect::<Vec<_>>();
    let inputs = Inputs::<T, Q>::new(d, case, of);
    let want = bits(&inputs.run(d, s, case));
    let added = Case { unordered: true, ..case.clone() };
    let got = bits(&inputs.run(d, s, &added));
    if case.top_k > 3 {
        let far = got.iter().zip(&want).map(|(&a, &b)| (f32::from_bits(a) - f32::from_bits(b)).abs());
        let largest = want.iter().map(|&v| f32::from_bits(v).abs()).fold(0.0, f32::max);
        assert!(far.fold(0.0, f32::max) <= 8.0 * epsilon::<T>() as f32 * largest && got != want, "{case:?}");
        return;
    }
    assert_eq!(got, want, "{case:?}");
    let few = Case { present: case.tokens - 3, ..added };
    let got = bits(&Inputs::<T, Q>::new(d, &few, of).run(d, s, &few));
    let (there, beyond) = got.split_at(few.present * case.hidden);
    assert_eq!(there, &want[..there.len()], "{few:?}");
    assert!(beyond.iter().all(|&v| f32::from_bits(v).is_nan()));
}

#[test]
fn rounded_slots_in_any_order() {
    on_every_small_device(|d, s| {
        if skipped_without_hopper(d) {
            return;
        }
        for path in [FusedQuantPath::Wgmma160, FusedQuantPath::Wgmma256] {
            // Columns that are not whole tiles.
            let mut case = Case { rounded: true, ..Case::new(enough_to_add(d, 3, 1040), 3, 3, 1040, 64, path) };
            leave_two(&mut case.ids);
            let five = Case { rounded: true, ..Case::new(enough_to_add(d, 5, 1024), 5, 6, 1024, 64, path) };
            if racechecking() {
                println!(
                    "scales of blocks left out under racecheck, which takes a lane's arrival for its warp as none"
                );
            } else {
                check_added::<bf16, E4M3>(d, s, &case, e4m3);
                check_added::<bf16, E4M3>(d, s, &five, e4m3);
                check_added::<f16, E4M3>(d, s, &case, e4m3);
            }
            if path == FusedQuantPath::Wgmma160 {
                case.scales = Scales::Rows;
                check_added::<f16, E4M3>(d, s, &case, e4m3);
                check_added::<bf16, i8>(d, s, &case, int8);
                check_added::<bf16, i8>(d, s, &Case { scales: Scales::Rows, ..five }, int8);
            }
        }
    });
}

/// Outputs of the first product on both sides of a scale's 128, of two blocks of threads, where one has some or none: as the path that quantises in a launch of its own.
#[test]
fn scales_that_two_blocks_share() {
    on_every_device(|d, s| {
        if skipped_without_hopper(d) {
            return;
        }
        for (i, inter) in [16, 64, 80, 144, 208].into_iter().enumerate() {
            for path in [FusedQuantPath::Wgmma64, FusedQuantPath::Wgmma160] {
                let (gate_up, activation) = (LAYOUTS[i % 3], ACTIVATIONS[i % 4]);
                let case = Case { gate_up, activation, biased: i % 2 == 0, ..Case::new(20, 2, 3, 64, inter, path) };
                check::<bf16, E4M3>(d, s, &case, e4m3);
            }
        }
    });
}

/// Scales of rows that blocks find themselves: as from launches of their own. The largest result of the first product in any of the tiles, the last of which may be a part of one; tokens of
/// zeroes, NaN and infinities.
#[test]
fn scales_that_blocks_find() {
    on_every_device(|d, s| {
        if skipped_without_hopper(d) {
            return;
        }
        let bits =
            |v: Vec<f16>| v.into_iter().map(|v| if v.is_nan() { 0xffff } else { v.to_bits() }).collect::<Vec<_>>();
        for (i, inter) in [16, 80, 96].into_iter().enumerate() {
            let (gate_up, activation) = (LAYOUTS[(i + 2) % 3], ACTIVATIONS[i]);
            let biased = i == 1;
            let new = Case::new(7, 2, 3, 80, inter, FusedQuantPath::Wgmma16);
            let mut case = Case { scales: Scales::Rows, gate_up, activation, biased, shared: i % 2, ..new };
            if i == 1 {
                (case.map, case.present, case.ids[3]) = (Some(vec![1, -1, 0]), 6, -1);
            }
            let mut inputs = Inputs::<f16, E4M3>::new(d, &case, e4m3);
            let mut x = noise_of::<f16>(case.tokens * case.hidden, 1);
            x[..case.hidden].fill(f16::from_f32(0.0));
            x[case.hidden + 3] = f16::NAN;
            x[2 * case.hidden + 70] = f16::INFINITY;
            inputs.x.copy_from_slice(&x).unwrap();
            let scales = inputs.routed.w13.scales.to_vec().unwrap();
            for tile in 0..inter.div_ceil(32) {
                // Of gates in halves or alone these are the rows of a tile; of the others some of its rows.
                let rows = case.rows();
                let large = |row: usize| row % inter / 32 == tile;
                let scales: Vec<_> =
                    scales.iter().enumerate().map(|(at, s)| if large(at % rows) { 16.0 * s } else { *s }).collect();
                inputs.routed.w13.scales.copy_from_slice(&scales).unwrap();
                let want = inputs.run(d, s, &Case { path: FusedQuantPath::Wgmma64, ..case.clone() });
                assert!(want[case.hidden..2 * case.hidden].iter().any(|v| v.is_nan()), "{case:?}");
                assert!(want[3 * case.hidden..4 * case.hidden].iter().all(|v| v.to_f32().is_finite()), "{case:?}");
                assert_eq!(bits(inputs.run(d, s, &case)), bits(want), "tile {tile}, {case:?}");
            }
        }
    });
}

/// Weights in the order in which they are read, and as they come: the same bits on every path.
fn check_shuffled<Q: QuantisedElement>(d: &Device, s: &Stream, case: &Case, of: impl Fn(f32) -> (Q, f64) + Copy) {
    if skipped_without_hopper(d) {
        return;
    }
    let bits = |v: Vec<bf16>| v.into_iter().map(bf16::to_bits).collect::<Vec<_>>();
    let plain = Inputs::<bf16, Q>::new(d, case, of);
    let shuffled = Inputs::<bf16, Q>::new(d, case, of).shuffle(d, s, case);
    let tall = (case.scales == Scales::Blocks).then_some(FusedQuantPath::Wgmma256);
    for path in WGMMA.into_iter().chain(tall) {
        let case = Case { path, ..case.clone() };
        let want = bits(plain.run(d, s, &case));
        assert_eq!(bits(shuffled.run(d, s, &Case { shuffled: true, ..case.clone() })), want, "{case:?}");
    }
}

#[test]
fn shuffled_weights() {
    on_every_order(|d, s| {
        for (i, gate_up) in LAYOUTS.into_iter().enumerate() {
            let activation = ACTIVATIONS[i];
            let of = |hidden, inter| Case::new(5, 2, 3, hidden, inter, FusedQuantPath::Auto);
            let case = Case { gate_up, activation, biased: i == 1, shared: i, ..of(128, 256) };
            check_shuffled(d, s, &case, e4m3);
            let case = Case { scales: Scales::Rows, smooth: i == 1, ..case };
            check_shuffled(d, s, &case, e4m3);
            check_shuffled(d, s, &Case { hidden: 256, inter: 128, ..case }, int8);
        }
        for (path, hidden) in
            [(FusedQuantPath::Tile32, 128), (FusedQuantPath::Auto, 192), (FusedQuantPath::Wgmma64, 64)]
        {
            let case = Case { shuffled: true, ..Case::new(3, 2, 4, hidden, 128, path) };
            let inputs = Inputs::<bf16, E4M3>::new(d, &case, e4m3);
            let mut workspace = Tensor::zeros(d, &[case.shape().quant_workspace_bytes(DType::Bf16)]).unwrap();
            let mut out = Tensor::<bf16>::zeros(d, &[case.tokens, hidden]).unwrap();
            let (w13, w2, options) = (inputs.routed.w13.get(), inputs.routed.w2.get(), inputs.options(&case));
            let e =
                fused_quant(s, &mut out, &inputs.x, w13, w2, &inputs.ids, &inputs.weights, &options, &mut workspace);
            assert!(matches!(e, Err(Error::Unsupported { .. })), "{case:?}: {e:?}");
        }
    });
}

#[test]
fn bad_input() {
    on_every_device(|d, s| {
        let (t, k, e, h, i) = (3, 2, 4, 32, 16);
        let x = Tensor::<bf16>::zeros(d, &[t, h]).unwrap();
        let q = |shape: &[usize]| Tensor::<E4M3>::zeros(d, shape).unwrap();
        let f = |shape: &[usize]| Tensor::<f32>::zeros(d, shape).unwrap();
        let ids = Tensor::<i32>::zeros(d, &[t, k]).unwrap();
        let blocks = f(&[e, 1, 1]);
        let options = FusedQuantOptions::default();
        let run = |w13: &[usize],
                   s13: &[usize],
                   w2: &[usize],
                   s2: &[usize],
                   bytes: usize,
                   options: &FusedQuantOptions<E4M3>| {
            let mut out = Tensor::<bf16>::zeros(d, &[t, h]).unwrap();
            let mut workspace = Tensor::<u8>::zeros(d, &[bytes]).unwrap();
            let (w13, s13, w2, s2) = (q(w13), f(s13), q(w2), f(s2));
            let (w13, w2) = (Quantised::new(&w13, &s13), Quantised::new(&w2, &s2));
            fused_quant(s, &mut out, &x, w13, w2, &ids, &f(&[t, k]), options, &mut workspace)
        };
        let bytes = FusedShape::new(t, k, e, h, i).shared_experts(1).quant_workspace_bytes(DType::Bf16);
        let least = FusedShape::new(t, k, e, h, i).quant_workspace_bytes(DType::Bf16);
        let (a, b) = ([e, 2 * i, h], [e, h, i]);
        assert!(run(&a, &[e, 1, 1], &b, &[e, 1, 1], bytes, &options).is_ok());
        for (arg, r) in [
            ("w13", run(&[e, i, h], &[e, 1, 1], &b, &[e, 1, 1], bytes, &options)),
            ("w13.scales", run(&a, &[e, 2, 1], &b, &[e, 1, 1], bytes, &options)),
            ("w2.scales", run(&a, &[e, 1, 1], &b, &[e, h], bytes, &options)),
            ("w2", run(&a, &[e, 1, 1], &[e, h], &[e, 1, 1], bytes, &options)),
            ("w2.scales", run(&a, &[e, 2 * i], &b, &[e, 1, 1], bytes, &options)),
            ("w13.scales", run(&a, &[e, i], &b, &[e, h], bytes, &options)),
            ("w13.scales", run(&a, &[], &b, &[e], bytes, &options)),
        ] {
            assert!(matches!(&r, Err(Error::Shape { arg: a, .. }) if *a == arg), "{arg}: {r:?}");
        }
        let r = run(&a, &[e, 1, 1], &b, &[e, 1, 1], least - 1, &options);
        assert!(matches!(r, Err(Error::Value { arg: "workspace", .. })), "{r:?}");
        let r = run(&[e, 2 * 8, h], &[e, 1, 1], &[e, h, 8], &[e, 1, 1], bytes, &options);
        assert!(matches!(r, Err(Error::Value { arg: "w2", .. })), "{r:?}");
        assert!(run(&a, &[e], &b, &[e, h], bytes, &options).is_ok());
        // Companions of other shapes.
        let (bias, other) = (f(&[e, h]), f(&[e, 2 * h]));
        let r = run(&a, &[e], &b, &[e], bytes, &options.biases(Some(&bias), None));
        assert!(matches!(r, Err(Error::Shape { arg: "bias13", .. })) == (2 * i != h), "{r:?}");
        let r = run(&a, &[e], &b, &[e], bytes, &options.biases(None, Some(&other)));
        assert!(matches!(r, Err(Error::Shape { arg: "bias2", .. })), "{r:?}");
        let r = run(&a, &[e], &b, &[e], bytes, &options.smooth(None, Some(&other)));
        assert!(matches!(r, Err(Error::Shape { arg: "smooth2", .. })), "{r:?}");
        // Shared experts with other scales.
        let (w13, w2) = (q(&[1, 2 * i, h]), q(&[1, h, i]));
        let (of_expert, of_rows, of_blocks) = (f(&[1]), f(&[1, h]), f(&[1, 1, 1]));
        let with = |s13, s2| {
            let shared = SharedQuantExperts::new(Quantised::new(&w13, s13), Quantised::new(&w2, s2));
            run(&a, &[e], &b, &[e], bytes, &options.shared_experts(shared))
        };
        assert!(with(&of_expert, &of_expert).is_ok());
        for (arg, r) in
            [("shared.w2.scales", with(&of_expert, &of_rows)), ("shared.w13.scales", with(&of_blocks, &of_expert))]
        {
            assert!(matches!(&r, Err(Error::Shape { arg: a, .. }) if *a == arg), "{arg}: {r:?}");
        }
        // int8 in blocks, and e4m3 in blocks smoothed.
        let (w13, w2) = (Tensor::<i8>::zeros(d, &a).unwrap(), Tensor::<i8>::zeros(d, &b).unwrap());
        let (w13, w2) = (Quantised::new(&w13, &blocks), Quantised::new(&w2, &blocks));
        let mut out = Tensor::<bf16>::zeros(d, &[t, h]).unwrap();
        let mut workspace = Tensor::<u8>::zeros(d, &[bytes]).unwrap();
        let weights = f(&[t, k]);
        let r = fused_quant(s, &mut out, &x, w13, w2, &ids, &weights, &FusedQuantOptions::default(), &mut workspace);
        assert!(matches!(r, Err(Error::Unsupported { .. })), "{r:?}");
        let smooth = f(&[e, h]);
        let r = run(&a, &[e, 1, 1], &b, &[e, 1, 1], bytes, &options.smooth(Some(&smooth), None));
        assert!(matches!(r, Err(Error::Unsupported { .. })), "{r:?}");
        let gelu = options.activation(ExpertActivation::Gelu).path(FusedQuantPath::Wgmma64);
        let r = run(&a, &[e, 1, 1], &b, &[e, 1, 1], bytes, &gelu);
        assert!(matches!(r, Err(Error::Unsupported { .. })), "{r:?}");
    });
}
