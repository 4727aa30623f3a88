use cuda_std::Float;
use proptest::prelude::*;
use warploom::moe::{Bias, GateOptions, Scoring, gate};
use warploom::{Device, Error, Graph, Stream, Tensor, bf16, f16, reference};
use warploom_tests::{noise, on_every_device, property, widen};

/// What one call reads beside the options' numbers, and where.
struct Input<T> {
    logits: Vec<T>,
    tokens: usize,
    /// Elements before the first row and between rows.
    offset: usize,
    gap: usize,
    bias: Option<HostBias>,
}

#[derive(Clone)]
enum HostBias {
    F32(Vec<f32>),
    F16(Vec<f16>),
    Bf16(Vec<bf16>),
}

impl HostBias {
    fn new(kind: usize, values: &[f32]) -> Option<Self> {
        match kind {
            0 => None,
            1 => Some(Self::F32(values.to_vec())),
            2 => Some(Self::F16(values.iter().map(|&v| f16::from_f32(v)).collect())),
            _ => Some(Self::Bf16(values.iter().map(|&v| bf16::from_f32(v)).collect())),
        }
    }

    fn widen(&self) -> Vec<f64> {
        match self {
            Self::F32(v) => widen(v),
            Self::F16(v) => widen(v),
            Self::Bf16(v) => widen(v),
        }
    }
}

impl<T: Float> Input<T> {
    /// Dense rows, no bias.
    fn dense(logits: &[f32], tokens: usize) -> Self {
        let logits = logits.iter().map(|&v| T::from_f32(v)).collect();
        Self { logits, tokens, offset: 0, gap: 0, bias: None }
    }

    fn bias(mut self, kind: usize, values: &[f32]) -> Self {
        self.bias = HostBias::new(kind, values);
        self
    }

    fn experts(&self) -> usize {
        self.logits.len() / self.tokens
    }

    fn row(&self, token: usize) -> Vec<f64> {
        widen(&self.logits[token * self.experts()..][..self.experts()])
    }

    /// The logits on a device, with gaps that hold NaN.
    fn upload(&self, device: &Device) -> Tensor<T> {
        let (experts, stride) = (self.experts(), self.experts() + self.gap);
        let mut all = vec![T::from_f32(f32::NAN); self.offset + self.tokens * stride];
        for t in 0..self.tokens {
            all[self.offset + t * stride..][..experts].copy_from_slice(&self.logits[t * experts..][..experts]);
        }
        let flat = Tensor::from_slice(device, &all, &[all.len()]).unwrap();
        flat.as_strided(&[self.tokens, experts], &[stride, 1], self.offset).unwrap()
    }

    /// Runs the gate on poisoned outputs; without padding and map.
    fn run(&self, device: &Device, stream: &Stream, topk: usize, options: &GateOptions<'_>) -> Output {
        let slots = [self.tokens, topk + options.shared_experts];
        let (mut weights, mut ids, mut packed) = outputs(device, stream, slots);
        let logits = self.upload(device);
        let mut go = |o: &GateOptions<'_>| {
            gate(stream, &mut ids, &mut weights, Some(&mut packed), &logits, topk, o).unwrap();
        };
        match &self.bias {
            None => go(options),
            Some(HostBias::F32(b)) => go(&options.bias(&Tensor::from_slice(device, b, &[b.len()]).unwrap())),
            Some(HostBias::F16(b)) => go(&options.bias(&Tensor::from_slice(device, b, &[b.len()]).unwrap())),
            Some(HostBias::Bf16(b)) => go(&options.bias(&Tensor::from_slice(device, b, &[b.len()]).unwrap())),
        }
        Output::new(&weights, &ids, Some(&packed))
    }

    /// Runs the gate and compares every row with the reference.
    fn check(&self, device: &Device, stream: &Stream, topk: usize, options: &GateOptions<'_>) {
        let out = self.run(device, stream, topk, options);
        let bias = self.bias.as_ref().map(HostBias::widen);
        let width = topk + options.shared_experts;
        for t in 0..self.tokens {
            let logits = self.row(t);
            let want = reference::moe::gate(&logits, bias.as_deref(), topk, options);
            let ids: Vec<usize> = out.ids[t * width..][..width].iter().map(|&id| id as usize).collect();
            if ids != want.ids {
                assert!(
                    near_tie(&logits, bias.as_deref(), topk, options),
                    "token {t}: {ids:?}, expected {:?}, {options:?}",
                    want.ids
                );
                continue;
            }
            for (r, (&got, &want)) in out.weights[t * width..][..width].iter().zip(&want.weights).enumerate() {
                let error = (got as f64 - want).abs();
                assert!(error <= 2e-6 * want.abs() + 1e-36, "token {t}, rank {r}: {got:e}, expected {want:e}");
            }
        }
        for (i, &word) in out.packed.iter().enumerate() {
            let weight = bf16::from_f32(out.weights[i]).to_bits() as u32;
            assert_eq!(word, (out.ids[i] as u32) << 16 | weight, "packed word {i}");
        }
    }
}

#[derive(Debug, PartialEq)]
struct Output {
    weights: Vec<f32>,
    ids: Vec<i32>,
    packed: Vec<u32>,
}

impl Output {
    fn new(weights: &Tensor<f32>, ids: &Tensor<i32>, packed: Option<&Tensor<u32>>) -> Self {
        Self {
            weights: weights.to_vec().unwrap(),
            ids: ids.to_vec().unwrap(),
            packed: packed.map_or(vec![], |p| p.to_vec().unwrap()),
        }
    }
}

fn outputs(device: &Device, stream: &Stream, shape: [usize; 2]) -> (Tensor<f32>, Tensor<i32>, Tensor<u32>) {
    fn poisoned<E: cuda_std::Element>(device: &Device, stream: &Stream, shape: [usize; 2]) -> Tensor<E> {
        let mut t = Tensor::uninit(device, &shape).unwrap();
        stream.fill_bytes(&mut t, 0xff).unwrap();
        t
    }
    (poisoned(device, stream, shape), poisoned(device, stream, shape), poisoned(device, stream, shape))
}

/// Whether the choice hangs on scores that are not the same but closer than the kernel's arithmetic can tell apart.
fn near_tie(logits: &[f64], bias: Option<&[f64]>, topk: usize, options: &GateOptions<'_>) -> bool {
    let scores = reference::moe::gate::scores(logits, options.scoring);
    let bias = |e: usize| bias.map_or(0.0, |b| b[e]);
    let biased: Vec<f64> = (0..logits.len()).map(|e| scores[e] + bias(e)).collect();
    let close =
        |a: f64, b: f64| a != b && a.is_finite() && b.is_finite() && (a - b).abs() <= 1e-6 * a.abs().max(b.abs());
    let mut order: Vec<usize> = (0..logits.len()).filter(|&e| !biased[e].is_nan()).collect();
    order.sort_by(|&a, &b| biased[b].total_cmp(&biased[a]));
    let experts = order.windows(2).take(topk * options.groups + 1).any(|w| close(biased[w[0]], biased[w[1]]));
    let mut worths: Vec<f64> = biased
        .chunks(logits.len() / options.groups)
        .map(|g| {
            let mut g: Vec<f64> = g.iter().copied().filter(|v| !v.is_nan()).collect();
            g.sort_by(f64::total_cmp);
            g.iter().rev().take(2).sum()
        })
        .collect();
    worths.sort_by(f64::total_cmp);
    experts || worths.windows(2).any(|w| close(w[0], w[1]))
}

/// Experts, groups, groups kept, experts a token: fixed sizes, and what is beside or between them.
const SHAPES: [(usize, usize, usize, usize); 32] = [
    (256, 8, 4, 8),
    (256, 8, 3, 5),
    (256, 1, 1, 8),
    (128, 4, 2, 8),
    (128, 8, 4, 6),
    (128, 1, 1, 8),
    (384, 1, 1, 8),
    (512, 1, 1, 8),
    (512, 1, 1, 10),
    (512, 1, 1, 11),
    (64, 8, 3, 8),
    (64, 1, 1, 6),
    // Corner cases that are known to go wrong elsewhere: 16 groups, all groups kept, one group and 6 experts a token.
    (256, 16, 4, 8),
    (256, 8, 8, 8),
    (256, 1, 1, 6),
    // More experts a token than the fixed sizes take.
    (256, 8, 4, 9),
    (512, 1, 1, 32),
    (64, 8, 4, 32),
    // Anything.
    (1, 1, 1, 1),
    (6, 3, 2, 4),
    (60, 1, 1, 4),
    (60, 4, 2, 7),
    (72, 9, 5, 6),
    (160, 8, 3, 6),
    (96, 96, 11, 11),
    (257, 1, 1, 8),
    (288, 9, 4, 8),
    (320, 40, 33, 10),
    (1000, 5, 2, 12),
    (1024, 1, 1, 32),
    (1024, 32, 32, 8),
    (1022, 511, 40, 24),
];

const SCORINGS: [Scoring; 3] = [Scoring::Sigmoid, Scoring::Softmax, Scoring::SqrtSoftplus];

/// Logits in [-6, 6): noise, noise on a coarse grid (many ties), or with NaN and infinities among them.
fn logits(kind: usize, n: usize, seed: u64) -> Vec<f32> {
    let mut x: Vec<f32> = noise(n, seed).iter().map(|v| v * 6.0).collect();
    match kind {
        0 => {}
        1 => x.iter_mut().for_each(|v| *v = v.round()),
        _ => {
            for (v, n) in x.iter_mut().zip(noise(n, seed ^ 0x55)) {
                *v = match (n * 32.0) as i32 {
                    1..=6 => f32::NAN,
                    -2..=-1 => f32::NEG_INFINITY,
                    -4..=-3 => -110.0,
                    // Its exponential is below the normal numbers, of which some count.
                    -6..=-5 => -87.5,
                    8 => f32::INFINITY,
                    9 => 60.0,
                    _ => v.round(),
                };
            }
        }
    }
    x
}

/// Biases in [-0.5, 0.5), on a grid if the logits are.
fn biases(kind: usize, n: usize, seed: u64) -> Vec<f32> {
    let mut b: Vec<f32> = noise(n, seed ^ 0xb1a5).iter().map(|v| v * 0.5).collect();
    if kind > 0 {
        b.iter_mut().for_each(|v| *v = (*v * 4.0).round() / 4.0);
    }
    if kind > 1 {
        b.iter_mut().step_by(7).for_each(|v| *v = f32::NEG_INFINITY);
        b.iter_mut().skip(3).step_by(31).for_each(|v| *v = f32::NAN);
    }
    b
}

fn matches_the_reference<T: Float>(cases: u32) {
    let shape = (0..SHAPES.len(), 1usize..4, 0usize..3, 0usize..4, any::<u64>());
    let options = (0usize..3, any::<bool>(), 0usize..3, 0usize..3, (0usize..3, 0usize..4));
    property(cases, (shape, options), |device, stream, (shape, options)| {
        let (shape, tokens, kind, bias, seed) = shape;
        let (scoring, renormalize, scaling, shared, (offset, gap)) = options;
        let (experts, groups, topk_group, topk) = SHAPES[shape];
        let options = GateOptions::default()
            .scoring(SCORINGS[scoring])
            .groups(groups, topk_group)
            .renormalize(renormalize)
            .routed_scaling_factor([1.0, 2.5, 0.3][scaling])
            .scale_output(seed & 1 == 0)
            .shared_experts(shared);
        let mut input = Input::<T>::dense(&logits(kind, tokens * experts, seed), tokens);
        // Every other case is aligned, for the fixed sizes.
        (input.offset, input.gap) = if seed & 2 == 0 { (0, 16 * gap) } else { (offset, gap) };
        input.bias(bias, &biases(kind, experts, seed)).check(device, stream, topk, &options);
        Ok(())
    });
}

#[test]
fn matches_the_reference_f32() {
    matches_the_reference::<f32>(250);
}

#[test]
fn matches_the_reference_f16() {
    matches_the_reference::<f16>(150);
}

#[test]
fn matches_the_reference_bf16() {
    matches_the_reference::<bf16>(250);
}

/// Every size once, with every kind of input, so that no case depends on what a property happens to draw.
#[test]
fn every_size() {
    on_every_device(|device, stream| {
        for (i, &(experts, groups, topk_group, topk)) in SHAPES.iter().enumerate() {
            let options = GateOptions::default().groups(groups, topk_group).scoring(SCORINGS[i % 3]);
            let kind = i / 3 % 3;
            let tokens = 2;
            let input = Input::<bf16>::dense(&logits(kind, tokens * experts, i as u64 + 1), tokens);
            input.bias(1 + i % 3, &biases(kind, experts, i as u64)).check(device, stream, topk, &options);
        }
    });
}

/// Two experts, or all of them, share the first place of a group; the groups tie as well.
#[test]
fn ties_go_to_the_lower_expert_and_group() {
    on_every_device(|device, stream| {
        for (experts, groups) in [(256usize, 8usize), (128, 4), (64, 8), (256, 16), (60, 4)] {
            let size = experts / groups;
            let options = GateOptions::default().groups(groups, 2);
            // Token 0: all equal. Token 1: the first place of each group is shared. Token 2: runs of eight equal ones.
            let x: Vec<f32> = (0..3 * experts)
                .map(|i| match (i / experts, i % experts) {
                    (0, _) => 0.5,
                    (1, e) if e % size < 2 => 1.0 + (e / size % 2) as f32,
                    (1, e) => (e % 5) as f32 * -0.25,
                    (_, e) => (e / 8 % 3) as f32,
                })
                .collect();
            let input = Input::<f32>::dense(&x, 3);
            input.check(device, stream, 8, &options);
            let out = input.run(device, stream, 8, &options);
            assert_eq!(out.ids[..8], [0, 1, 2, 3, 4, 5, 6, 7]);
            assert!(out.weights[..8].iter().all(|&w| w == 0.125));
        }
    });
}

/// Rows without any evidence: the lowest experts, weights 0.
#[test]
fn rows_of_nothing() {
    on_every_device(|device, stream| {
        for value in [f32::NAN, f32::NEG_INFINITY] {
            for scoring in SCORINGS {
                for (experts, groups, topk_group, topk) in [(256, 8, 4, 8), (60, 4, 2, 6)] {
                    let options = GateOptions::default().groups(groups, topk_group).scoring(scoring);
                    let out = Input::<f16>::dense(&vec![value; experts], 1).run(device, stream, topk, &options);
                    assert_eq!(out.ids, (0..topk as i32).collect::<Vec<_>>(), "{value}, {scoring:?}");
                    assert!(out.weights.iter().all(|&w| w.to_bits() == 0), "{value}, {scoring:?}: {:?}", out.weights);
                }
            }
        }
    });
}

/// A NaN neither gets chosen before a number nor spoils the weights of others.
#[test]
fn nan_and_infinities_keep_to_themselves() {
    on_every_device(|device, stream| {
        for scoring in SCORINGS {
            for experts in [256, 100] {
                let mut x = logits(0, experts, 5);
                x[3] = f32::NAN;
                x[experts - 1] = f32::from_bits(0xffff_ffff);
                x[17] = f32::INFINITY;
                x[40] = f32::NEG_INFINITY;
                let out = Input::<f32>::dense(&x, 1).run(device, stream, 8, &GateOptions::default().scoring(scoring));
                assert_eq!(out.ids[0], 17);
                assert!(out.weights.iter().all(|w| w.is_finite()));
                assert!((out.weights.iter().sum::<f32>() - 1.0).abs() < 1e-6);
                assert!(!out.ids.contains(&3) && !out.ids.contains(&(experts as i32 - 1)) && !out.ids.contains(&40));
            }
        }
    });
}

#[test]
fn padding_by_count_and_by_mask() {
    on_every_device(|device, stream| {
        for experts in [256, 60] {
            let (tokens, topk) = (5, 4);
            let input = Input::<bf16>::dense(&logits(0, tokens * experts, 3), tokens);
            let options = GateOptions::default().shared_experts(1);
            let all = input.run(device, stream, topk, &options);
            let logits = input.upload(device);
            let mask = Tensor::from_slice(device, &[1u8, 0, 7, 1, 1], &[tokens]).unwrap();
            for count in [-3, 0, 2, 4, 5, 9] {
                let valid = Tensor::from_slice(device, &[count], &[1]).unwrap();
                for masked in [false, true] {
                    let mut o = options.valid_rows(&valid);
                    if masked {
                        o = o.row_mask(&mask);
                    }
                    let (mut w, mut ids, mut packed) = outputs(device, stream, [tokens, topk + 1]);
                    gate(stream, &mut ids, &mut w, Some(&mut packed), &logits, topk, &o).unwrap();
                    let got = Output::new(&w, &ids, Some(&packed));
                    for i in 0..tokens * (topk + 1) {
                        let t = i / (topk + 1);
                        let live = (t as i32) < count && !(masked && t == 1);
                        let want =
                            if live { (all.ids[i], all.weights[i], all.packed[i]) } else { (-1, 0.0, 0xffff_0000) };
                        assert_eq!((got.ids[i], got.weights[i], got.packed[i]), want, "count {count}, slot {i}");
                    }
                }
            }
        }
    });
}

#[test]
fn experts_are_mapped() {
    on_every_device(|device, stream| {
        for experts in [128, 60] {
            let input = Input::<f16>::dense(&logits(0, 2 * experts, 8), 2);
            let options = GateOptions::default().shared_experts(2);
            let plain = input.run(device, stream, 6, &options);
            let map: Vec<i32> = (0..experts as i32 + 2).map(|e| 100_000 - 7 * e).collect();
            let map = Tensor::from_slice(device, &map, &[map.len()]).unwrap();
            let mapped = input.run(device, stream, 6, &options.expert_map(&map));
            assert_eq!(mapped.weights, plain.weights);
            assert_eq!(mapped.ids, plain.ids.iter().map(|id| 100_000 - 7 * id).collect::<Vec<_>>());
            assert_eq!(mapped.packed[0] >> 16, mapped.ids[0] as u32 & 0xffff);
        }
    });
}

/// Shared experts weigh 1 after the routed scaling factor, wherever that is applied.
#[test]
fn shared_experts_and_scaling() {
    on_every_device(|device, stream| {
        let input = Input::<f32>::dense(&logits(0, 256, 2), 1);
        let options = GateOptions::default().routed_scaling_factor(2.5).shared_experts(40);
        let later = input.run(device, stream, 8, &options);
        let here = input.run(device, stream, 8, &options.scale_output(true));
        assert_eq!(later.ids[8..], (256..296).collect::<Vec<_>>());
        assert!(later.weights[8..].iter().all(|&w| w == 0.4) && here.weights[8..].iter().all(|&w| w == 1.0));
        for (l, h) in later.weights[..8].iter().zip(&here.weights) {
            assert_eq!(l * 2.5, *h);
        }
    });
}

/// The kernels with fixed sizes and the general one choose alike and give the same bits, but for the order in which a
/// softmax is summed up. A row alone gives the same bits as among others.
#[test]
fn neither_alignment_nor_batch_matters() {
    on_every_device(|device, stream| {
        for (i, &(experts, groups, topk_group, topk)) in SHAPES[..12].iter().enumerate() {
            let scoring = SCORINGS[i % 3];
            let options = GateOptions::default().groups(groups, topk_group).scoring(scoring);
            let tokens = 3;
            let mut input = Input::<bf16>::dense(&logits(0, tokens * experts, 40 + i as u64), tokens)
                .bias(1, &biases(0, experts, i as u64));
            let fixed = input.run(device, stream, topk, &options);
            let mut alone = Input::<bf16>::dense(&input.row(1).iter().map(|&v| v as f32).collect::<Vec<_>>(), 1);
            alone.bias = input.bias.clone();
            let alone = alone.run(device, stream, topk, &options);
            assert_eq!(alone.ids, fixed.ids[topk..2 * topk]);
            assert_eq!(alone.weights, fixed.weights[topk..2 * topk]);

            (input.offset, input.gap) = (1, 3);
            let general = input.run(device, stream, topk, &options);
            assert_eq!((general.ids, general.weights), (fixed.ids, fixed.weights));
        }
    });
}

#[test]
fn many_tokens() {
    on_every_device(|device, stream| {
        // A size for each number of warps in a block, with a last block that is not full.
        for (tokens, experts) in [(258, 64), (1030, 64), (259, 12)] {
            let input = Input::<f32>::dense(&logits(0, tokens * experts, 77), tokens);
            input.check(device, stream, 2, &GateOptions::default());
        }
    });
}

#[test]
fn two_runs_and_a_replay_are_the_same() {
    on_every_device(|device, stream| {
        for experts in [256, 200] {
            let input = Input::<f32>::dense(&logits(0, 3 * experts, 9), 3);
            let options = GateOptions::default().groups(8, 4);
            let first = input.run(device, stream, 8, &options);
            assert_eq!(input.run(device, stream, 8, &options), first);

            let (mut w, mut ids, mut packed) = outputs(device, stream, [3, 8]);
            let mut logits = Tensor::<f32>::zeros(device, &[3, experts]).unwrap();
            device.preload(&["moe"]).unwrap();
            let graph =
                Graph::capture(stream, |s| gate(s, &mut ids, &mut w, Some(&mut packed), &logits, 8, &options)).unwrap();
            logits.copy_from_slice(&input.logits).unwrap();
            for _ in 0..2 {
                stream.fill_bytes(&mut ids, 0xff).unwrap();
                graph.launch(stream).unwrap();
                stream.synchronize().unwrap();
                assert_eq!(Output::new(&w, &ids, Some(&packed)), first);
            }
        }
    });
}

#[test]
fn no_tokens_no_work() {
    on_every_device(|device, stream| {
        let logits = Tensor::<f32>::zeros(device, &[0, 256]).unwrap();
        let (mut w, mut ids, _) = outputs(device, stream, [0, 8]);
        gate(stream, &mut ids, &mut w, None, &logits, 8, &GateOptions::default()).unwrap();
    });
}

/// What is wrong with a call.
struct Wrong<'a> {
    tokens: usize,
    experts: usize,
    width: usize,
    topk: usize,
    options: GateOptions<'a>,
}

#[test]
fn bad_values_are_refused() {
    on_every_device(|device, stream| {
        let right = || Wrong { tokens: 2, experts: 64, width: 4, topk: 4, options: GateOptions::default() };
        let call = |w: Wrong<'_>| {
            let logits = Tensor::<f32>::zeros(device, &[w.tokens, w.experts]).unwrap();
            let (mut weights, mut ids, _) = outputs(device, stream, [w.tokens, w.width]);
            gate(stream, &mut ids, &mut weights, None, &logits, w.topk, &w.options)
        };
        call(right()).unwrap();
        let refused = |arg: &str, change: &dyn Fn(&mut Wrong<'_>)| {
            let mut wrong = right();
            change(&mut wrong);
            match call(wrong) {
                Err(Error::Value { op: "moe::gate", arg: got, .. }) => assert_eq!(got, arg),
                other => panic!("{arg}: {other:?}"),
            }
        };
        refused("logits", &|w| w.experts = 0);
        refused("logits", &|w| w.experts = 1025);
        refused("groups", &|w| w.options = w.options.groups(0, 0));
        refused("groups", &|w| w.options = w.options.groups(7, 1));
        refused("groups", &|w| w.options = w.options.groups(128, 1));
        refused("topk_group", &|w| w.options = w.options.groups(8, 0));
        refused("topk_group", &|w| w.options = w.options.groups(8, 9));
        refused("top_k", &|w| (w.topk, w.width) = (0, 0));
        refused("top_k", &|w| (w.topk, w.width) = (33, 33));
        refused("top_k", &|w| (w.topk, w.width, w.options) = (9, 9, w.options.groups(8, 1)));
        refused("top_k", &|w| (w.experts, w.topk, w.width) = (3, 4, 4));
        for factor in [f32::NAN, f32::INFINITY, 0.0, -1.0, 1e-40] {
            refused("routed_scaling_factor", &|w| w.options = w.options.routed_scaling_factor(factor));
        }
        refused("shared_experts", &|w| w.options = w.options.shared_experts(1 << 40));
    });
}

#[test]
fn bad_tensors_are_refused() {
    on_every_device(|device, stream| {
        let flat = Tensor::<f32>::zeros(device, &[1024]).unwrap();
        let logits = flat.narrow(0, 0, 128).unwrap().reshape(&[2, 64]).unwrap();
        let (weights, ids, packed) = outputs(device, stream, [2, 4]);
        let options = GateOptions::default();
        let call = |w: &Tensor<f32>, i: &Tensor<i32>, p: &Tensor<u32>, l: &Tensor<f32>, o: &GateOptions<'_>| {
            gate(stream, &mut i.clone(), &mut w.clone(), Some(&mut p.clone()), l, 4, o)
        };
        call(&weights, &ids, &packed, &logits, &options).unwrap();

        let shape = |result: Result<(), Error>, name: &str| match result {
            Err(Error::Shape { arg, .. }) => assert_eq!(arg, name),
            other => panic!("{name}: {other:?}"),
        };
        let stride = |result: Result<(), Error>, name: &str| match result {
            Err(Error::Stride { arg, .. }) => assert_eq!(arg, name),
            other => panic!("{name}: {other:?}"),
        };
        let (wide_w, wide_i, wide_p) = outputs(device, stream, [2, 5]);
        shape(call(&wide_w, &ids, &packed, &logits, &options), "topk_weights");
        shape(call(&weights, &wide_i, &packed, &logits, &options), "topk_ids");
        shape(call(&weights, &ids, &wide_p, &logits, &options), "packed");
        shape(call(&weights, &ids, &packed, &flat, &options), "logits");
        stride(call(&wide_w.narrow(1, 0, 4).unwrap(), &ids, &packed, &logits, &options), "topk_weights");
        stride(call(&weights, &wide_i.narrow(1, 0, 4).unwrap(), &packed, &logits, &options), "topk_ids");
        stride(call(&weights, &ids, &wide_p.narrow(1, 0, 4).unwrap(), &logits, &options), "packed");
        let spread = flat.as_strided(&[2, 64], &[256, 2], 0).unwrap();
        stride(call(&weights, &ids, &packed, &spread, &options), "logits");

        // Where there are shared experts, the error says that they are counted.
        let e = call(&weights, &ids, &packed, &logits, &options.shared_experts(3)).unwrap_err();
        assert!(e.to_string().contains("of `top_k` and the shared experts"), "{e}");

        let few = Tensor::<f32>::zeros(device, &[63]).unwrap();
        shape(call(&weights, &ids, &packed, &logits, &options.bias(&few)), "bias");
        stride(
            call(&weights, &ids, &packed, &logits, &options.bias(&flat.as_strided(&[64], &[2], 0).unwrap())),
            "bias",
        );
        let (counts, mask) = (Tensor::zeros(device, &[2]).unwrap(), Tensor::zeros(device, &[3]).unwrap());
        shape(call(&weights, &ids, &packed, &logits, &options.valid_rows(&counts)), "valid_rows");
        shape(call(&weights, &ids, &packed, &logits, &options.row_mask(&mask)), "row_mask");
        let map = Tensor::zeros(device, &[64]).unwrap();
        shape(call(&weights, &ids, &packed, &logits, &options.shared_experts(0).expert_map(&counts)), "expert_map");
        call(&weights, &ids, &packed, &logits, &options.expert_map(&map)).unwrap();

        let overlap = |result: Result<(), Error>, names: [&str; 2]| match result {
            Err(Error::Overlap { first, second, .. }) => {
                assert!(names == [first, second] || names == [second, first], "{first}, {second}");
            }
            other => panic!("{names:?}: {other:?}"),
        };
        let inside = flat.narrow(0, 100, 8).unwrap().reshape(&[2, 4]).unwrap();
        overlap(call(&inside, &ids, &packed, &logits, &options), ["topk_weights", "logits"]);
        let bias = flat.narrow(0, 200, 64).unwrap();
        let inside = flat.narrow(0, 260, 8).unwrap().reshape(&[2, 4]).unwrap();
        overlap(call(&inside, &ids, &packed, &logits, &options.bias(&bias)), ["topk_weights", "bias"]);
        let flat_ids = ids.reshape(&[8]).unwrap();
        let count = flat_ids.narrow(0, 7, 1).unwrap();
        overlap(call(&weights, &ids, &packed, &logits, &options.valid_rows(&count)), ["topk_ids", "valid_rows"]);

        let elsewhere = Tensor::zeros(&Device::simt(), &[2, 64]).unwrap();
        let foreign = call(&weights, &ids, &packed, &elsewhere, &options);
        assert!(matches!(foreign, Err(Error::WrongDevice { arg: "logits", .. })), "{foreign:?}");
        let bytes = Tensor::<warploom::E4M3>::zeros(device, &[2, 64]).unwrap();
        let typed = gate(stream, &mut ids.clone(), &mut weights.clone(), None, &bytes, 4, &options);
        assert!(matches!(typed, Err(Error::DType { arg: "logits", .. })), "{typed:?}");
        let zeros = Tensor::<f16>::zeros(device, &[64]).unwrap();
        assert_eq!(Bias::from(&zeros).dtype(), warploom::DType::F16);
    });
}
