use cuda_std::{Entry, Float};
use proptest::prelude::*;
use warploom::gemm::Epilogue;
use warploom::moe::fused::plan;
use warploom::moe::{
    ExpertActivation, FusedOptions, FusedPath, FusedShape, GateUp, SharedExperts, fused, shuffle_weights,
};
use warploom::reference::gemm::linear;
use warploom::reference::moe::{Block, FusedResult, fused as reference};
use warploom::{DType, Device, Error, Geometry, Graph, Stream, Tensor, bf16, f16};
use warploom_tests::{
    epsilon, gpu, is_hopper, noise, noise_of, on_every_device, on_every_order, on_every_small_device, property,
    racechecking, sanitizing, skipped_without_hopper, smallest, widen,
};

const ACTIVATIONS: [ExpertActivation; 5] = [
    ExpertActivation::Silu,
    ExpertActivation::Gelu,
    ExpertActivation::GeluTanh,
    ExpertActivation::Relu2,
    ExpertActivation::SwigluOai { alpha: 1.702, limit: 1.5 },
];
const LAYOUTS: [GateUp; 3] = [GateUp::Halves, GateUp::Interleaved, GateUp::GateOnly];
/// All that run on a GPU.
const PATHS: [FusedPath; 11] = [
    FusedPath::Fma,
    FusedPath::Direct,
    FusedPath::Stream8,
    FusedPath::Stream16,
    FusedPath::Tile32,
    FusedPath::Tile64,
    FusedPath::Tile128,
    FusedPath::Wgmma16,
    FusedPath::Wgmma64,
    FusedPath::Wgmma176,
    FusedPath::Vector,
];

/// Whether the device has the kernels of a path.
fn has(d: &Device, path: FusedPath) -> bool {
    use FusedPath::{Vector, Wgmma16, Wgmma64, Wgmma176};
    !matches!(path, Vector | Wgmma16 | Wgmma64 | Wgmma176) || !skipped_without_hopper(d)
}

/// Those of [`PATHS`] that the device has.
fn paths(d: &Device) -> impl Iterator<Item = FusedPath> {
    PATHS.into_iter().filter(|&path| has(d, path))
}

#[derive(Clone, Debug)]
struct Case {
    tokens: usize,
    top_k: usize,
    experts: usize,
    hidden: usize,
    inter: usize,
    ids: Vec<i32>,
    shared: usize,
    listed: bool,
    biased: bool,
    gate_up: GateUp,
    activation: ExpertActivation,
    map: Option<Vec<i32>>,
    /// Tokens that exist.
    present: usize,
    unordered: bool,
    rounded: bool,
    f32_slots: bool,
    shuffled: bool,
    path: FusedPath,
}

impl Case {
    fn new(tokens: usize, top_k: usize, experts: usize, hidden: usize, inter: usize) -> Self {
        let ids = noise(tokens * top_k, 5).iter().map(|x| ((x + 1.0) / 2.0 * experts as f32) as i32).collect();
        Self {
            tokens,
            top_k,
            experts,
            hidden,
            inter,
            ids,
            shared: 0,
            listed: false,
            biased: false,
            gate_up: GateUp::Halves,
            activation: ExpertActivation::Silu,
            map: None,
            present: tokens,
            unordered: false,
            rounded: false,
            f32_slots: false,
            shuffled: false,
            path: FusedPath::Auto,
        }
    }

    /// Whether results of slots lie between the second product and the sum in 16 bits and powers of two.
    fn packs<T: Float>(&self, d: &Device) -> bool {
        let of_hopper = is_hopper(d) && self.activation != ExpertActivation::Gelu;
        let multiprocessors = d.properties().multiprocessors;
        let plan = plan(T::DTYPE, &self.shape(), self.path, true, of_hopper, self.shuffled, multiprocessors);
        let path = plan.map(|plan| plan.path);
        T::DTYPE == DType::Bf16
            && (path == Some(FusedPath::Wgmma176) || path == Some(FusedPath::Wgmma64) && self.path == FusedPath::Auto)
            && !(self.unordered || self.rounded || self.f32_slots)
            && self.top_k + if self.listed { 0 } else { self.shared } > 1
    }

    fn shape(&self) -> FusedShape {
        let mut shape =
            FusedShape::new(self.tokens, self.top_k, self.local(), self.hidden, self.inter).shared_experts(self.shared);
        shape.append_shared = !self.listed;
        shape
    }

    fn path(mut self, path: FusedPath) -> Self {
        self.path = path;
        self
    }

    /// Experts of the device: routed ones.
    fn local(&self) -> usize {
        self.map.as_ref().map_or(self.experts, |m| m.iter().filter(|&&e| e >= 0).count())
    }

    /// A token's experts as the device numbers them, with their weights.
    fn slots(&self, token: usize, weights: &[f32]) -> Vec<(usize, f64)> {
        let local = self.local();
        let row = token * self.top_k..(token + 1) * self.top_k;
        let mut slots: Vec<_> = self.ids[row.clone()]
            .iter()
            .zip(&weights[row])
            .filter_map(|(&id, &w)| {
                let id = usize::try_from(id).ok()?;
                let expert = match &self.map {
                    _ if id >= self.experts => {
                        (id < self.experts + self.shared).then_some(local + id - self.experts)?
                    }
                    Some(map) => usize::try_from(map[id]).ok()?,
                    None => id,
                };
                Some((expert, w as f64))
            })
            .collect();
        if !self.listed {
            slots.extend((0..self.shared).map(|s| (local + s, 1.0)));
        }
        slots
    }
}

/// Tensors of a case.
struct Inputs<T: Float> {
    x: Tensor<T>,
    w13: Tensor<T>,
    w2: Tensor<T>,
    bias13: Tensor<T>,
    bias2: Tensor<T>,
    shared: [Tensor<T>; 4],
    ids: Tensor<i32>,
    weights: Tensor<f32>,
    map: Tensor<i32>,
    present: Tensor<i32>,
}

impl<T: Float> Inputs<T> {
    fn new(d: &Device, case: &Case, seed: u64) -> Self {
        let (e, s, h, i) = (case.local(), case.shared, case.hidden, case.inter);
        let rows = case.gate_up.rows() * i;
        let t = |seed: u64, shape: &[usize]| {
            Tensor::from_slice(d, &noise_of::<T>(shape.iter().product(), seed), shape).unwrap()
        };
        let map = case.map.clone().unwrap_or_default();
        Self {
            x: t(seed, &[case.tokens, h]),
            w13: t(2, &[e, rows, h]),
            w2: t(3, &[e, h, i]),
            bias13: t(4, &[e, rows]),
            bias2: t(5, &[e, h]),
            shared: [t(6, &[s, rows, h]), t(7, &[s, h, i]), t(8, &[s, rows]), t(9, &[s, h])],
            ids: Tensor::from_slice(d, &case.ids, &[case.tokens, case.top_k]).unwrap(),
            weights: Tensor::from_slice(d, &noise(case.tokens * case.top_k, 10), &[case.tokens, case.top_k]).unwrap(),
            map: Tensor::from_slice(d, &map, &[map.len()]).unwrap(),
            present: Tensor::from_slice(d, &[case.present as i32], &[1]).unwrap(),
        }
    }

    fn options<'a>(&'a self, case: &Case) -> FusedOptions<'a, T> {
        let mut o = FusedOptions::default()
            .activation(case.activation)
            .gate_up(case.gate_up)
            .shared_listed(case.listed)
            .unordered(case.unordered)
            .rounded_slots(case.rounded)
            .f32_slots(case.f32_slots)
            .shuffled(case.shuffled)
            .path(case.path);
        if case.biased {
            o = o.biases(Some(&self.bias13), Some(&self.bias2));
        }
        if case.shared > 0 {
            let [w13, w2, b13, b2] = &self.shared;
            let (bias13, bias2) = if case.biased { (Some(b13), Some(b2)) } else { (None, None) };
            o = o.shared_experts(SharedExperts::new(w13, w2).biases(bias13, bias2));
        }
        if case.map.is_some() {
            o = o.expert_map(&self.map);
        }
        if case.present != case.tokens {
            o = o.num_tokens(&self.present);
        }
        o
    }

    /// The same with shuffled weights.
    fn shuffle(self, d: &Device, s: &Stream, case: &Case) -> Self {
        let shuffled = |w: &Tensor<T>, gate_up: Option<GateUp>| {
            let mut out = Tensor::uninit(d, w.shape()).unwrap();
            shuffle_weights(s, &mut out, w, gate_up).unwrap();
            out
        };
        let gate_up = Some(case.gate_up);
        let (w13, w2) = (shuffled(&self.w13, gate_up), shuffled(&self.w2, None));
        let [s13, s2, bias13, bias2] = self.shared;
        let shared = [shuffled(&s13, gate_up), shuffled(&s2, None), bias13, bias2];
        Self { w13, w2, shared, ..self }
    }

    fn workspace(&self, d: &Device, s: &Stream, case: &Case) -> Tensor<u8> {
        let mut workspace = Tensor::uninit(d, &[case.shape().workspace_bytes(T::DTYPE)]).unwrap();
        s.fill_bytes(&mut workspace, 0xff).unwrap();
        workspace
    }

    fn run(&self, s: &Stream, case: &Case, out: &mut Tensor<T>, workspace: &mut Tensor<u8>) -> Result<(), Error> {
        fused(s, out, &self.x, &self.w13, &self.w2, &self.ids, &self.weights, &self.options(case), workspace)
    }
}

/// How results of slots are kept until they are added up.
#[derive(Clone, Copy, Debug)]
pub(super) enum Kept {
    F32,
    /// So many of them rounded to elements.
    Rounded(usize),
    /// So many of them rounded to elements and added up as those.
    Added(usize),
    /// In 11 bits.
    Packed,
}

/// How far a result may be from the reference's: what comes before the last rounding, that, and those of slots.
pub(super) fn allowed<T: Float>(want: &FusedResult, kept: Kept) -> f64 {
    let (slot, roundings) = match kept {
        Kept::F32 => (0.0, 1),
        Kept::Rounded(slots) => (epsilon::<T>() * want.slots, slots + 1),
        // Nothing is added to the first of them; no sum on the way is larger than all of them together.
        Kept::Added(slots) => (epsilon::<T>() * want.slots * slots.max(1) as f64, 2 * slots + 1),
        Kept::Packed => (2f64.powi(-12) * want.slots, 1),
    };
    // Roundings act on what is off already.
    1.01 * (epsilon::<T>() * want.value.abs() + slot + want.error) + roundings as f64 * smallest::<T>()
}

/// The weights of a case as the reference takes them.
fn block_of<T: Float>(inputs: &Inputs<T>, case: &Case) -> Block {
    let both = |a: &Tensor<T>, b: &Tensor<T>| {
        let mut v = widen(&a.to_vec().unwrap());
        v.extend(widen(&b.to_vec().unwrap()));
        v
    };
    let none = |v: Vec<f64>| if case.biased { v } else { vec![] };
    Block {
        hidden: case.hidden,
        intermediate: case.inter,
        w13: both(&inputs.w13, &inputs.shared[0]),
        w2: both(&inputs.w2, &inputs.shared[1]),
        bias13: none(both(&inputs.bias13, &inputs.shared[2])),
        bias2: none(both(&inputs.bias2, &inputs.shared[3])),
        gate_up: case.gate_up,
        activation: case.activation,
    }
}

/// One token by the definition.
pub(super) fn wanted<T: Float>(block: &Block, x: &[f64], slots: &[(usize, f64)]) -> Vec<FusedResult> {
    reference(block, x, slots, [epsilon::<T>(), smallest::<T>()])
}

/// Runs a case on poisoned memory, twice, and compares with the reference.
fn check<T: Float>(d: &Device, s: &Stream, case: &Case) {
    if !has(d, case.path) {
        return;
    }
    let inputs = Inputs::<T>::new(d, case, 1);
    let mut workspace = inputs.workspace(d, s, case);
    let mut out = Tensor::<T>::uninit(d, &[case.tokens, case.hidden]).unwrap();
    s.fill_bytes(&mut out, 0xff).unwrap();
    inputs.run(s, case, &mut out, &mut workspace).unwrap();
    let got = out.to_vec().unwrap();
    s.fill_bytes(&mut workspace, 0x7f).unwrap();
    inputs.run(s, case, &mut out, &mut workspace).unwrap();
    let again = out.to_vec().unwrap();
    let slots = case.top_k + if case.listed { 0 } else { case.shared };
    // Sums of two come to the same in any order.
    let sorts = matches!(case.path, FusedPath::Auto | FusedPath::Wgmma64 | FusedPath::Wgmma176);
    if !(case.unordered && sorts && slots > 2) {
        let bits = |v: &[T]| v.iter().map(|v| v.to_f32().to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&got), bits(&again), "two runs");
    }

    let block = block_of(&inputs, case);
    let (x, weights) = (widen(&inputs.x.to_vec().unwrap()), inputs.weights.to_vec().unwrap());
    let kept = match case {
        Case { rounded: true, unordered: true, .. } => Kept::Added(slots),
        Case { rounded: true, .. } => Kept::Rounded(slots),
        case if case.packs::<T>(d) => Kept::Packed,
        _ => Kept::F32,
    };
    let (mut worst, mut nonzero, mut large) = (0.0f64, 0, 0);
    for token in 0..case.tokens {
        let row = |v: &[T]| widen(&v[token * case.hidden..][..case.hidden]);
        let (got, again) = (row(&got), row(&again));
        if token >= case.present {
            assert!(got.iter().all(|v| v.is_nan()), "token {token} does not exist");
            continue;
        }
        let want = wanted::<T>(&block, &x[token * case.hidden..][..case.hidden], &case.slots(token, &weights));
        for (c, want) in want.iter().enumerate() {
            let allowed = allowed::<T>(want, kept);
            for got in [got[c], again[c]] {
                let error = (got - want.value).abs();
                assert!(
                    error <= allowed,
                    "token {token}, column {c}: {got}, expected {} within {allowed:e}, {case:?}",
                    want.value
                );
                worst = worst.max(error / allowed);
            }
            nonzero += (want.value != 0.0) as usize;
            large += (want.value.abs() > allowed) as usize;
        }
    }
    // Shown if something fails later, or with `--nocapture`.
    let Case { tokens, top_k, experts, hidden, inter, path, .. } = case;
    println!("{} {path:?} {tokens}x{top_k}-{experts}x{hidden}x{inter}: {worst:.3} of what is allowed", T::DTYPE);
    assert!(nonzero < 32 || 2 * large > nonzero, "zeros would pass for {} of {nonzero} results", nonzero - large);
}

/// The bound of [`check`] at the widths of its longest products: nearly everything is outside of it if nothing was computed, most if the last eight elements of either inner dimension or a slot
/// are missing.
#[test]
fn what_is_missing_shows() {
    let tokens = 8;
    for (top_k, hidden, inter) in [
        (2, 2880, 40),
        (1, 2080, 512),
        (2, 96, 1408),
        (1, 4104, 24),
        (2, 2080, 24),
        (3, 1032, 40),
        (2, 584, 320),
        (1, 328, 136),
        (1, 40, 2064),
        (9, 72, 40),
    ] {
        let d = Device::simt();
        let case = Case::new(tokens, top_k, 3, hidden, inter);
        let inputs = Inputs::<bf16>::new(&d, &case, 1);
        let whole = block_of(&inputs, &case);
        // Without the last columns of a matrix with rows of so many.
        let without = |w: &[f64], k: usize| {
            let mut w = w.to_vec();
            w.chunks_mut(k).for_each(|row| row[k - 8..].fill(0.0));
            w
        };
        let first = Block { w13: without(&whole.w13, hidden), ..whole.clone() };
        let second = Block { w2: without(&whole.w2, inter), ..whole.clone() };
        let (x, weights) = (widen(&inputs.x.to_vec().unwrap()), inputs.weights.to_vec().unwrap());
        let mut seen = [0; 4];
        for token in 0..tokens {
            let (x, slots) = (&x[token * hidden..][..hidden], case.slots(token, &weights));
            let want = wanted::<bf16>(&whole, x, &slots);
            let others = [(&first, &slots[..]), (&second, &slots), (&whole, &slots[1..])]
                .map(|(block, slots)| wanted::<bf16>(block, x, slots));
            for (c, want) in want.iter().enumerate() {
                let got = [0.0, others[0][c].value, others[1][c].value, others[2][c].value];
                for (seen, got) in seen.iter_mut().zip(got) {
                    *seen += ((got - want.value).abs() > allowed::<bf16>(want, Kept::F32)) as usize;
                }
            }
        }
        let parts = seen.map(|n| n as f64 / (tokens * hidden) as f64);
        println!("{hidden} x {inter}: nothing, less of either product, a slot less: {parts:.2?}");
        assert!(parts[0] > 0.9 && parts[1..].iter().all(|&p| p > 0.5), "{hidden} x {inter}: {parts:.2?}");
    }
}

prop_compose! {
    fn cases()(
        tokens in 0usize..24, spare in 0usize..3, top_k in 1usize..5, experts in 1usize..9, hidden in 1usize..12,
        inter in 1usize..12, shared in 0usize..3, listed in any::<bool>(), biased in any::<bool>(), layout in 0usize..3,
        activation in 0usize..5, odd in any::<bool>(), mapped in any::<bool>(),
    ) -> Case {
        let mut case = Case::new(tokens + spare, top_k, experts, 8 * hidden, 8 * inter);
        (case.present, case.shared, case.listed, case.biased) = (tokens, shared, listed, biased);
        (case.gate_up, case.activation) = (LAYOUTS[layout], ACTIVATIONS[activation]);
        if odd {
            let extra = [-1, experts as i32, -7, i32::MAX, experts as i32 + 1];
            case.ids.iter_mut().step_by(3).zip(extra.iter().cycle()).for_each(|(id, &e)| *id = e);
        }
        if mapped {
            // Every other expert, in descending order.
            let local = experts.div_ceil(2);
            case.map = Some((0..experts).map(|e| if e % 2 == 0 { (local - 1 - e / 2) as i32 } else { -1 }).collect());
        }
        case
    }
}

#[test]
fn fma_matches_the_reference() {
    property(4, (cases(), 0usize..8, 0usize..8), |d, s, (mut case, h, i)| {
        // Any width, not only multiples of 8.
        (case.hidden, case.inter) = (case.hidden - h, case.inter - i);
        let case = case.path(FusedPath::Fma);
        check::<f32>(d, s, &case);
        check::<f16>(d, s, &case);
        check::<bf16>(d, s, &case);
        Ok(())
    });
}

#[test]
fn host_matches_the_reference() {
    property(12, (cases(), 0usize..8, 0usize..8), |d, s, (mut case, h, i)| {
        (case.hidden, case.inter) = (case.hidden - h, case.inter - i);
        let case = case.path(FusedPath::Host);
        if d.is_simt() {
            check::<f32>(d, s, &case);
            check::<f16>(d, s, &case);
            check::<bf16>(d, s, &case);
        } else {
            let inputs = Inputs::<bf16>::new(d, &case, 1);
            let (mut out, mut workspace) =
                (Tensor::zeros(d, &[case.tokens, case.hidden]).unwrap(), inputs.workspace(d, s, &case));
            let e = inputs.run(s, &case, &mut out, &mut workspace);
            prop_assert!(case.tokens == 0 || matches!(e, Err(Error::Unsupported { .. })), "{:?}", e);
        }
        Ok(())
    });
}

#[test]
fn stream_matches_the_reference() {
    property(5, (cases(), any::<bool>()), |d, s, (case, wide)| {
        let case = case.path(if wide { FusedPath::Stream16 } else { FusedPath::Stream8 });
        check::<f16>(d, s, &case);
        check::<bf16>(d, s, &case);
        Ok(())
    });
}

#[test]
fn tiles_match_the_reference() {
    property(3, cases(), |d, s, case| {
        check::<f16>(d, s, &case.clone().path(FusedPath::Tile32));
        check::<bf16>(d, s, &case.clone().path(FusedPath::Tile64));
        check::<bf16>(d, s, &case.path(FusedPath::Tile128));
        Ok(())
    });
}

/// What Hopper's kernels take: every activation but the exact GELU.
fn for_wgmma(mut case: Case, wide: bool) -> Case {
    if wide {
        case.path = FusedPath::Wgmma176;
    } else {
        case.path = FusedPath::Wgmma64;
    }
    if case.activation == ExpertActivation::Gelu {
        case.activation = ExpertActivation::GeluTanh;
    }
    case
}

#[test]
fn wgmma_matches_the_reference() {
    property(4, (cases(), any::<bool>()), |d, s, (case, wide)| {
        let mut case = for_wgmma(case, wide);
        check::<f16>(d, s, &case);
        check::<bf16>(d, s, &case);
        case.unordered = true;
        check::<bf16>(d, s, &case);
        case.unordered = false;
        case.rounded = true;
        check::<f16>(d, s, &case);
        check::<bf16>(d, s, &case);
        case.rounded = false;
        let slots = case.top_k + if case.listed { 0 } else { case.shared };
        case.tokens = case.tokens.min(128 / slots);
        case.present = case.present.min(case.tokens);
        case.ids.truncate(case.tokens * case.top_k);
        check::<bf16>(d, s, &case.path(FusedPath::Wgmma16));
        Ok(())
    });
}

/// The first tokens of a case, so few that there are at most 32 pairs.
fn for_vector(mut case: Case) -> Case {
    let slots = case.top_k + if case.listed { 0 } else { case.shared };
    case.tokens = case.tokens.min(32 / slots);
    case.present = case.present.min(case.tokens);
    case.ids.truncate(case.tokens * case.top_k);
    if case.activation == ExpertActivation::Gelu {
        case.activation = ExpertActivation::GeluTanh;
    }
    case.path(FusedPath::Vector)
}

#[test]
fn vector_matches_the_reference() {
    property(5, (cases(), any::<bool>()), |d, s, (mut case, one)| {
        if one {
            case.tokens = case.tokens.min(1);
        }
        let case = for_vector(case);
        check::<f16>(d, s, &case);
        check::<bf16>(d, s, &case);
        Ok(())
    });
}

/// Rows of several pieces, shares of several rounds of the ring, and blocks with nothing to do.
#[test]
fn vector_of_long_rows() {
    on_every_order(|d, s| {
        for (gate_up, tokens, top_k, hidden, inter) in [
            (GateUp::Halves, 1, 2, 2080, 24),
            (GateUp::Interleaved, 2, 3, 1032, 40),
            (GateUp::GateOnly, 1, 3, 40, 2064),
            (GateUp::Halves, 1, 1, 8, 8),
            (GateUp::Halves, 3, 1, 16, 1032),
            (GateUp::Halves, 1, 32, 24, 16),
        ] {
            let mut case = Case { gate_up, biased: true, ..Case::new(tokens, top_k, 4, hidden, inter) };
            check::<bf16>(d, s, &case.clone().path(FusedPath::Vector));
            case.ids[0] = -1;
            check::<bf16>(d, s, &case.clone().path(FusedPath::Vector));
            case.ids.fill(-1);
            check::<f16>(d, s, &case.path(FusedPath::Vector));
        }
        check::<bf16>(d, s, &Case::new(0, 2, 3, 8, 8).path(FusedPath::Vector));
        // Tokens that go nowhere: as many as there may be pairs, and one more, which another path takes.
        check::<bf16>(d, s, &Case::new(3, 0, 3, 8, 8).path(FusedPath::Vector));
        check::<bf16>(d, s, &Case::new(32, 0, 3, 8, 8).path(FusedPath::Vector));
        check::<bf16>(d, s, &Case::new(33, 0, 3, 8, 8));
    });
}

/// Either way to exchange what lies between the products, by blocks that run one after the other, so that the first has to do what it would wait for
/// and those that begin later find it done, and by blocks that run together: the same bits.
#[test]
fn vector_by_claims_and_by_words() {
    use warploom::kernels::moe::fused_vector::*;
    if sanitizing() {
        return;
    }
    let d = Device::simt();
    let s = Stream::new(&d).unwrap();
    for (hidden, inter) in [(40usize, 48usize), (1032, 16), (24, 1032)] {
        let case = Case::new(1, 3, 4, hidden, inter).path(FusedPath::Vector);
        let inputs = Inputs::<bf16>::new(&d, &case, 1);
        let want = bits_of(&d, &s, &inputs, &case);
        // The least room that a ring of words takes, and some more, so that pieces end at its end, before it, and not far behind it.
        let least = (2 * hidden.min(1024)).max(rows(true) * inter.min(1024));
        for (words, blocks, together, room) in [
            (false, 1, false, 4096),
            (false, 3, false, 4096),
            (false, 3, true, 4096),
            (true, 1, false, 4096),
            (true, 3, false, 4096),
            (true, 3, true, 4096),
            (true, 5, false, 4096),
            (true, 1, false, least),
            (true, 1, false, least + hidden.min(1024)),
            (true, 2, true, least + 64),
        ] {
            let mut out = Tensor::<bf16>::zeros(&d, &[hidden]).unwrap();
            // `h`, then the words that blocks claim, or the one that counts them.
            let n = 3 * inter / OUTPUTS * WORD_BYTES / 8;
            let mut workspace = Tensor::<u64>::uninit(&d, &[n + CLAIMS]).unwrap();
            s.fill_bytes(&mut workspace, 0x7f).unwrap();
            let none = std::ptr::null();
            let (operands, sums) = (hidden + 3 * inter, 8000);
            let args = fused::VectorArgs {
                out: out.as_mut_ptr().cast(),
                out_row: hidden,
                h: workspace.as_mut_ptr().cast(),
                words: workspace.as_mut_ptr().wrapping_add(n),
                launch: 12345,
                x: inputs.x.as_ptr().cast(),
                x_row: hidden,
                w13: inputs.w13.as_ptr().cast(),
                bias13: none,
                w2: inputs.w2.as_ptr().cast(),
                bias2: none,
                shared13: none,
                shared_bias13: none,
                shared2: none,
                shared_bias2: none,
                topk_ids: inputs.ids.as_ptr(),
                topk_weights: inputs.weights.as_ptr(),
                expert_map: std::ptr::null(),
                num_tokens: std::ptr::null(),
                tokens: 1,
                top_k: 3,
                slots: 3,
                experts: 4,
                local: 4,
                shared_experts: 0,
                hidden: hidden as u32,
                intermediate: inter as u32,
                layout: 1,
                activation: 0,
                alpha: 0.0,
                limit: 0.0,
                operands: operands as u32,
                sums: sums as u32,
                room: room as u32,
            };
            let entry = if words { moe_fused_vector_words_bf16::ENTRY } else { moe_fused_vector_bf16::ENTRY };
            let bytes = shared_bytes(operands, sums, room) as u32;
            let geometry = Geometry::linear(blocks, threads(words) as u32).shared_bytes(bytes);
            let geometry = if together { geometry.resident() } else { geometry };
            // SAFETY: the arguments are tensors of the sizes that they say.
            unsafe { s.launch(&entry, &geometry, &args).unwrap() };
            let got: Vec<_> = out.to_vec().unwrap().iter().map(|v| v.to_f32().to_bits()).collect();
            assert_eq!(got, want, "{hidden} x {inter}, words {words}, {blocks} blocks, {room}");
            let left = workspace.to_vec().unwrap();
            let left = if words { &left[..n + 1] } else { &left[n..n + blocks as usize + 1] };
            assert!(left.iter().all(|&w| w == 0), "zeroes are left");
        }
    }
}

/// A case's results, as bits.
fn bits_of<T: Float>(d: &Device, s: &Stream, inputs: &Inputs<T>, case: &Case) -> Vec<u32> {
    let mut out = Tensor::<T>::uninit(d, &[case.tokens, case.hidden]).unwrap();
    s.fill_bytes(&mut out, 0xff).unwrap();
    inputs.run(s, case, &mut out, &mut inputs.workspace(d, s, case)).unwrap();
    out.to_vec().unwrap().iter().map(|v| v.to_f32().to_bits()).collect()
}

/// Weights in the order in which they are read, and as they come: the same bits on every path.
fn check_shuffled<T: Float>(d: &Device, s: &Stream, case: &Case) {
    if skipped_without_hopper(d) {
        return;
    }
    let plain = Inputs::<T>::new(d, case, 1);
    let shuffled = Inputs::<T>::new(d, case, 1).shuffle(d, s, case);
    for path in [FusedPath::Wgmma16, FusedPath::Wgmma64, FusedPath::Wgmma176] {
        let case = case.clone().path(path);
        let want = bits_of(d, s, &plain, &case);
        let case = Case { shuffled: true, ..case };
        assert_eq!(bits_of(d, s, &shuffled, &case), want, "{case:?}");
        let few = case.tokens * (case.top_k + case.shared) <= 64;
        if few && path == FusedPath::Wgmma16 {
            assert_eq!(bits_of(d, s, &shuffled, &case.path(FusedPath::Auto)), want);
        }
    }
}

#[test]
fn shuffled_weights() {
    property(2, (cases(), 1usize..3, 1usize..3), |d, s, (case, hidden, inter)| {
        let mut case = for_wgmma(case, false);
        (case.hidden, case.inter) = (64 * hidden, 64 * inter);
        let slots = case.top_k + if case.listed { 0 } else { case.shared };
        case.tokens = case.tokens.min(128 / slots);
        case.present = case.present.min(case.tokens);
        case.ids.truncate(case.tokens * case.top_k);
        check_shuffled::<f16>(d, s, &case);
        check_shuffled::<bf16>(d, s, &case);
        Ok(())
    });
    // Several strips, and rounds of the ring.
    on_every_order(|d, s| {
        for gate_up in LAYOUTS {
            let case = Case { gate_up, biased: true, shared: 1, ..Case::new(5, 2, 3, 192, 320) };
            check_shuffled::<bf16>(d, s, &case);
        }
    });
}

#[test]
fn shuffled_weights_that_nothing_takes() {
    on_every_device(|d, s| {
        for (path, hidden, inter) in [
            (FusedPath::Direct, 64, 64),
            (FusedPath::Tile32, 64, 64),
            (FusedPath::Fma, 64, 64),
            (FusedPath::Host, 64, 64),
            (FusedPath::Auto, 96, 64),
            (FusedPath::Wgmma64, 64, 72),
        ] {
            let case = Case { shuffled: true, ..Case::new(3, 2, 4, hidden, inter).path(path) };
            let inputs = Inputs::<bf16>::new(d, &case, 1);
            let mut out = Tensor::zeros(d, &[3, hidden]).unwrap();
            let e = inputs.run(s, &case, &mut out, &mut inputs.workspace(d, s, &case));
            assert!(matches!(e, Err(Error::Unsupported { .. })), "{case:?}: {e:?}");
        }
        let case = Case { activation: ExpertActivation::Gelu, shuffled: true, ..Case::new(3, 2, 4, 64, 64) };
        let inputs = Inputs::<bf16>::new(d, &case, 1);
        let e = inputs.run(s, &case, &mut Tensor::zeros(d, &[3, 64]).unwrap(), &mut inputs.workspace(d, s, &case));
        assert!(matches!(e, Err(Error::Unsupported { .. })), "{e:?}");
    });
}

/// All widths of products, experts with several shares, several tiles of rows, several rounds of the ring.
#[test]
fn wgmma_of_many_pairs() {
    on_every_order(|d, s| {
        for (tokens, wide) in [(7, false), (14, false), (30, false), (150, false), (31, true), (95, true)] {
            let mut case = for_wgmma(Case::new(tokens, 1, 2, 328, 136), wide);
            case.ids.iter_mut().for_each(|id| *id = 1);
            check::<bf16>(d, s, &case);
            if tokens <= 128 {
                check::<bf16>(d, s, &case.path(FusedPath::Wgmma16));
            }
        }
        // Every width of the widest tile.
        for tokens in [105, 120, 130, 144, 150, 170, 200, 300] {
            let mut case = for_wgmma(Case::new(tokens, 1, 3, 72, 72), true);
            case.gate_up = GateUp::Interleaved;
            case.ids.iter_mut().skip(5).for_each(|id| *id = 2);
            check::<f16>(d, s, &case);
        }
        // Weights of two steps at once, and of a last one alone.
        check::<bf16>(d, s, &Case::new(20, 1, 2, 4104, 24).path(FusedPath::Wgmma176));
    });
}

/// More pairs on average than a share has: blocks in twos. Even and odd numbers of shares, tiles that the second block of two does not find, experts of nobody,
/// weights that are shuffled; the same bits as with shares of 64.
#[test]
fn wgmma_blocks_in_twos() {
    on_every_order(|d, s| {
        if skipped_without_hopper(d) {
            return;
        }
        for (tokens, top_k, experts, hidden, inter, skewed) in [
            (180, 1, 1, 72, 40, false),
            (300, 2, 2, 136, 72, false),
            (410, 1, 2, 328, 40, true),
            (540, 1, 3, 264, 40, true),
            (720, 1, 4, 40, 24, false),
        ] {
            let mut case = Case::new(tokens, top_k, experts, hidden, inter).path(FusedPath::Wgmma176);
            if skewed {
                case.ids.iter_mut().skip(9).for_each(|id| *id = 1);
            }
            case.biased = top_k == 2;
            check::<bf16>(d, s, &case);
            let inputs = Inputs::<bf16>::new(d, &case, 1);
            let want = bits_of(d, s, &inputs, &case.clone().path(FusedPath::Wgmma64));
            let whole = Case { f32_slots: true, ..case.clone() };
            check::<bf16>(d, s, &whole);
            assert_eq!(bits_of(d, s, &inputs, &whole), want, "{case:?}");
            if skewed {
                case.unordered = true;
                check::<bf16>(d, s, &case);
            } else {
                check_rounded::<f16>(d, s, &case);
            }
        }
        let case = Case { biased: true, ..Case::new(190, 2, 2, 192, 320).path(FusedPath::Wgmma176) };
        let plain = Inputs::<bf16>::new(d, &case, 1);
        let shuffled = Inputs::<bf16>::new(d, &case, 1).shuffle(d, s, &case);
        let want = bits_of(d, s, &plain, &case);
        assert_eq!(bits_of(d, s, &shuffled, &Case { shuffled: true, ..case }), want);
    });
}

/// So many items for each multiprocessor that the second product of the paths for few tokens begins while the first still runs.
#[test]
fn second_products_that_begin_early() {
    on_every_small_device(|d, s| {
        if skipped_without_hopper(d) {
            return;
        }
        let tiles = (5 * d.properties().multiprocessors as usize).div_ceil(8);
        for (path, outputs) in [(FusedPath::Wgmma16, 32), (FusedPath::Wgmma64, 64)] {
            check::<bf16>(d, s, &Case::new(12, 2, 8, 72, tiles * outputs).path(path));
            // Several stripes of columns, the last of which is not whole; experts of nobody.
            let mut case = Case::new(12, 2, 8, 584, tiles * outputs).path(path);
            case.ids[..3].fill(-1);
            check::<bf16>(d, s, &case);
        }
        // So much to add up that the sum begins with a stripe while the next ones are computed.
        let experts = d.properties().multiprocessors as usize;
        let tokens = (124 << 10) * experts / (2 * 1096 * 4) + 1;
        let mut case = Case::new(tokens, 2, experts, 1096, 5 * 64).path(FusedPath::Wgmma64);
        case.ids[..5].fill(-1);
        check::<bf16>(d, s, &case);
        // Of half of the bytes, in rows of whole lines.
        let tokens = (124 << 10) * experts / (2 * 1088 * 2) + 1;
        let mut case = Case::new(tokens, 2, experts, 1088, 5 * 64).path(FusedPath::Wgmma64);
        (case.rounded, case.ids[9]) = (true, -1);
        check::<bf16>(d, s, &case);
    });
}

/// Results that are added up as they come, where there are more tokens than one chunk of sorting has, and where the
/// path has no use for the permission.
#[test]
fn unordered() {
    on_every_order(|d, s| {
        for path in [FusedPath::Wgmma64, FusedPath::Wgmma176, FusedPath::Wgmma16, FusedPath::Direct, FusedPath::Fma] {
            let mut case = Case::new(9, 4, 5, 72, 40).path(path);
            case.unordered = true;
            case.ids[3] = -1;
            case.ids[4..8].fill(-1);
            case.present = 8;
            check::<bf16>(d, s, &case);
            check::<f16>(d, s, &case);
        }
        // As many experts as there is room for, and more, where `Auto` takes narrower shares.
        for (experts, path) in [(653, FusedPath::Wgmma176), (1024, FusedPath::Wgmma64), (1024, FusedPath::Wgmma16)] {
            check::<bf16>(d, s, &Case::new(20, 2, experts, 16, 8).path(path));
        }
        let mut case = Case::new(530, 2, 3, 16, 8).path(FusedPath::Wgmma64);
        case.unordered = true;
        check::<bf16>(d, s, &case);
        // Nobody goes anywhere, which takes no workspace to add up in.
        let mut case = Case::new(33, 0, 3, 64, 8).path(FusedPath::Wgmma64);
        case.unordered = true;
        check::<bf16>(d, s, &case);
    });
}

/// Each slot's result rounded: exactly what the slots give by themselves, added up. Widths of shares from 8 to 176 columns, tiles of rows that are not
/// whole; where sums come in any order, and on paths that have no use for the permission, it makes no difference.
fn check_rounded<T: Float>(d: &Device, s: &Stream, case: &Case) {
    if !has(d, case.path) {
        return;
    }
    let case = &Case { f32_slots: true, ..case.clone() };
    let plain = Inputs::<T>::new(d, case, 1);
    let whole = bits_of(d, s, &plain, case);
    let rounded = Case { rounded: true, ..case.clone() };
    let got = bits_of(d, s, &plain, &rounded);
    check::<T>(d, s, &rounded);
    if !matches!(case.path, FusedPath::Wgmma64 | FusedPath::Wgmma176) {
        assert_eq!(got, whole, "{case:?}");
        return;
    }
    let mut sums = vec![0f32; case.tokens * case.hidden];
    let weights = plain.weights.to_vec().unwrap();
    for slot in 0..case.top_k {
        let column = |v: &mut dyn Iterator<Item = usize>| v.skip(slot).step_by(case.top_k).collect::<Vec<_>>();
        let places = column(&mut (0..case.tokens * case.top_k));
        let ids: Vec<_> = places.iter().map(|&i| case.ids[i]).collect();
        let weights: Vec<_> = places.iter().map(|&i| weights[i]).collect();
        let one = Case { top_k: 1, ids, ..case.clone() };
        let weights = Tensor::from_slice(d, &weights, &[case.tokens, 1]).unwrap();
        let inputs = Inputs { weights, ..Inputs::<T>::new(d, &one, 1) };
        for (sum, bits) in sums.iter_mut().zip(bits_of(d, s, &inputs, &one)) {
            *sum += f32::from_bits(bits);
        }
    }
    let want: Vec<_> = sums.iter().map(|&v| T::from_f32(v).to_f32().to_bits()).collect();
    assert_eq!(got, want, "{case:?}");
    assert!(case.top_k == 1 || got != whole, "a rounding more");
}

#[test]
fn rounded_slots() {
    on_every_order(|d, s| {
        for (path, tokens, top_k) in [
            (FusedPath::Wgmma64, 5, 2),
            (FusedPath::Wgmma64, 40, 3),
            (FusedPath::Wgmma176, 9, 9),
            (FusedPath::Wgmma176, 60, 2),
            (FusedPath::Wgmma176, 130, 2),
            (FusedPath::Wgmma16, 9, 2),
            (FusedPath::Stream8, 9, 2),
        ] {
            let mut case = Case::new(tokens, top_k, 3, 328, 72).path(path);
            case.biased = top_k == 2;
            check_rounded::<bf16>(d, s, &case);
            if top_k != 2 {
                (case.hidden, case.inter) = (72, 40);
                check_rounded::<f16>(d, s, &case);
            }
        }
        // Every width of the widest tile, or some where they take long.
        let widths: &[_] = if d.is_simt() { &[95, 130, 170] } else { &[95, 105, 120, 130, 144, 150, 170] };
        for &tokens in widths {
            let mut case = Case::new(tokens, 1, 2, 72, 40).path(FusedPath::Wgmma176);
            case.ids.fill(1);
            check_rounded::<bf16>(d, s, &case);
        }
        // So little to add up is added up in order.
        for path in [FusedPath::Wgmma64, FusedPath::Wgmma176].into_iter().filter(|&path| has(d, path)) {
            let case = Case { rounded: true, ..Case::new(9, 4, 5, 72, 40).path(path) };
            let inputs = Inputs::<f16>::new(d, &case, 1);
            let both = Case { unordered: true, ..case.clone() };
            assert_eq!(bits_of(d, s, &inputs, &both), bits_of(d, s, &inputs, &case));
        }
        // Nobody and some of nobody.
        let mut case = Case { rounded: true, ..Case::new(9, 4, 5, 72, 40).path(FusedPath::Wgmma64) };
        case.ids[..6].fill(-1);
        check::<bf16>(d, s, &case);
        case.ids.fill(-1);
        check::<bf16>(d, s, &case);
        check::<bf16>(d, s, &Case { rounded: true, ..Case::new(0, 2, 3, 8, 8).path(FusedPath::Wgmma176) });
        check::<bf16>(d, s, &Case { rounded: true, ..Case::new(3, 0, 3, 8, 8).path(FusedPath::Wgmma176) });
    });
}

/// So many tokens of so many slots that rounded results are added up as they come, where they may be.
pub(super) fn enough_to_add(d: &Device, slots: usize, hidden: usize) -> usize {
    (124 << 10) * d.properties().multiprocessors as usize / (2 * slots * hidden) + 1
}

/// Leaves each token at most two of three experts, whose results come to the same in any order, the first and the last token none.
pub(super) fn leave_two(ids: &mut [i32]) {
    ids.chunks_mut(3).enumerate().for_each(|(token, ids)| ids[token % 3] = -1);
    let last = ids.len() - 3;
    ids[..3].fill(-1);
    ids[last..].fill(-1);
}

/// Rounded results that are added up where they belong: of two slots the bits that they come to in order. Also in rows with a gap between them, and where the number of tokens is on the device.
fn check_added<T: Float>(d: &Device, s: &Stream, case: &Case) {
    let inputs = Inputs::<T>::new(d, case, 1);
    let want = bits_of(d, s, &inputs, case);
    let added = Case { unordered: true, ..case.clone() };
    assert_eq!(bits_of(d, s, &inputs, &added), want, "{case:?}");
    let row = case.hidden;
    let mut wide = Tensor::<T>::uninit(d, &[case.tokens, row + 16]).unwrap();
    s.fill_bytes(&mut wide, 0xff).unwrap();
    let mut out = wide.narrow(1, 8, row).unwrap();
    inputs.run(s, &added, &mut out, &mut inputs.workspace(d, s, &added)).unwrap();
    let wide = wide.to_vec().unwrap();
    for (token, wide) in wide.chunks(row + 16).enumerate() {
        let bits: Vec<_> = wide.iter().map(|v| v.to_f32().to_bits()).collect();
        assert_eq!(bits[8..][..row], want[token * row..][..row], "token {token}, {case:?}");
        assert!(wide[..8].iter().chain(&wide[row + 8..]).all(|v| v.to_f32().is_nan()), "token {token}");
    }
    let few = Case { present: case.tokens - 3, ..added };
    let inputs = Inputs::<T>::new(d, &few, 1);
    let got = bits_of(d, s, &inputs, &few);
    let (there, beyond) = got.split_at(few.present * row);
    assert_eq!(there, &want[..there.len()], "{few:?}");
    assert!(beyond.iter().all(|&v| f32::from_bits(v).is_nan()));
}

#[test]
fn rounded_slots_in_any_order() {
    on_every_small_device(|d, s| {
        if skipped_without_hopper(d) {
            return;
        }
        let rounded = |tokens, top_k, experts, hidden| Case {
            rounded: true,
            ..Case::new(tokens, top_k, experts, hidden, 16).path(FusedPath::Wgmma176)
        };
        // Columns that are not whole tiles; few experts, which blocks take in twos, and many.
        let tokens = enough_to_add(d, 3, 1032);
        let mut case = Case { biased: true, ..rounded(tokens, 3, 3, 1032) };
        leave_two(&mut case.ids);
        check_added::<bf16>(d, s, &case);
        check_added::<f16>(d, s, &case);
        let mut case = rounded(tokens, 3, tokens / 10, 1032);
        leave_two(&mut case.ids);
        check_added::<bf16>(d, s, &case);
        // Of more slots each addition rounds.
        let five = rounded(enough_to_add(d, 5, 1024), 5, 6, 1024);
        let added = Case { unordered: true, ..five.clone() };
        check::<bf16>(d, s, &added);
        let inputs = Inputs::<bf16>::new(d, &five, 1);
        assert_ne!(bits_of(d, s, &inputs, &added), bits_of(d, s, &inputs, &five));
        // Replayed, over what was there.
        let case = Case { unordered: true, ..case };
        let inputs = Inputs::<bf16>::new(d, &case, 1);
        let want = bits_of(d, s, &inputs, &case);
        let mut out = Tensor::<bf16>::zeros(d, &[case.tokens, case.hidden]).unwrap();
        let mut workspace = inputs.workspace(d, s, &case);
        let graph = Graph::capture(s, |s| inputs.run(s, &case, &mut out, &mut workspace)).unwrap();
        for _ in 0..3 {
            s.fill_bytes(&mut out, 0xff).unwrap();
            graph.launch(s).unwrap();
            assert!(out.to_vec().unwrap().iter().map(|v| v.to_f32().to_bits()).eq(want.iter().copied()));
        }
    });
}

/// The same bits, or the next number to either side: what results of one slot kept in 11 bits may make of those kept in f32. How many are not the same.
fn assert_neighbours(got: &[u32], want: &[u32], case: &Case) -> usize {
    let number = |bits: u32| if f32::from_bits(bits).is_nan() { None } else { Some(bits as i32 >> 16) };
    let mut other = 0;
    for (i, (&got, &want)) in got.iter().zip(want).enumerate() {
        match (number(got), number(want)) {
            (None, None) => {}
            (Some(g), Some(w)) if (g - w).abs() <= 1 => other += (g != w) as usize,
            // To either side of zero.
            (Some(_), Some(_)) if f32::from_bits(got) == 0.0 && f32::from_bits(want) == 0.0 => {}
            _ => panic!("result {i}: {}, expected {}, {case:?}", f32::from_bits(got), f32::from_bits(want)),
        }
    }
    other
}

/// Results of slots in 11 bits: those of f32 but for a few neighbours, whatever else is among the columns that have a power of two in common. Columns that are not whole groups, widths of shares from 8 to 176
/// columns, blocks in twos.
#[test]
fn packed_slots() {
    on_every_small_device(|d, s| {
        if skipped_without_hopper(d) {
            return;
        }
        let sizes =
            [(5, 3, 72, false), (60, 3, 328, true), (130, 2, 264, false), (170, 1, 128, true), (400, 1, 520, false)];
        for (i, (tokens, experts, hidden, biased)) in sizes.into_iter().enumerate() {
            // Two slots, of which one has nobody: a result is that of the other.
            let mut case = Case::new(tokens, 2, experts, hidden, 72).path(FusedPath::Wgmma176);
            (case.biased, case.ids[0]) = (biased, -1);
            case.ids.iter_mut().skip(1).step_by(2).for_each(|id| *id = -1);
            check::<bf16>(d, s, &case);
            let whole = Case { f32_slots: true, ..case.clone() };
            let mut inputs = Inputs::<bf16>::new(d, &case, 1);
            let w2 = inputs.w2.to_vec().unwrap();
            let (mut others, mut results) = (0, 0);
            // Rows of the last weights that make columns much larger and smaller than others, none a number, and all so small or large that their squares have no number.
            for change in 0..5 {
                // Of the changes one for each size, where they take long.
                if d.is_simt() && change != 0 && change != 1 + i % 4 {
                    continue;
                }
                let mut w2 = w2.clone();
                for (i, w) in w2.iter_mut().enumerate() {
                    let factor = match (change, i / case.inter % hidden) {
                        (1, 3) => 4096.0,
                        (1, 5) => 1.0 / 4096.0,
                        // Of one term alone, or they would come to no number.
                        (2, 3) if i % case.inter == 0 => f32::INFINITY,
                        (2, 9) => f32::NAN,
                        (3, _) => 2f32.powi(-90),
                        (4, _) => 2f32.powi(100),
                        _ => 1.0,
                    };
                    *w = bf16::from_f32(w.to_f32() * factor);
                }
                inputs.w2.copy_from_slice(&w2).unwrap();
                let (got, want) = (bits_of(d, s, &inputs, &case), bits_of(d, s, &inputs, &whole));
                others += assert_neighbours(&got, &want, &case);
                results += got.len();
            }
            // One in sixteen would be one that is halfway between two numbers with five more bits.
            assert!(16 * others < results && (results < 20000 || others > 0), "{others} of {results}, {case:?}");
        }
        // `Auto` packs results of `Wgmma64`, too, where there are 124 KiB of them for each multiprocessor: the bits of `Wgmma176`.
        let experts = 2 * d.properties().multiprocessors as usize;
        let tokens = (62 << 10) * experts / (2 * 1096 * 2) + 1;
        let mut case = Case::new(tokens, 2, experts, 1096, 72);
        case.ids.iter_mut().skip(1).step_by(2).for_each(|id| *id = -1);
        let inputs = Inputs::<bf16>::new(d, &case, 1);
        let got = bits_of(d, s, &inputs, &case);
        let whole = bits_of(d, s, &inputs, &Case { f32_slots: true, ..case.clone() });
        let others = assert_neighbours(&got, &whole, &case);
        assert!(others > 0 && 16 * others < got.len(), "{others} of {}", got.len());
        assert_eq!(bits_of(d, s, &inputs, &case.clone().path(FusedPath::Wgmma64)), whole);
        if racechecking() {
            println!("Wgmma176 left out under racecheck, which takes a lane's arrival for its warp as none");
        } else {
            assert_eq!(bits_of(d, s, &inputs, &case.path(FusedPath::Wgmma176)), got);
        }
        // Several slots, shared experts, nobody and some of nobody.
        for (tokens, top_k, shared) in [(9, 9, 0), (60, 2, 1), (130, 3, 0), (0, 2, 0), (3, 0, 0)] {
            let mut case = Case::new(tokens, top_k, 3, 328, 72).path(FusedPath::Wgmma176);
            case.shared = shared;
            case.ids.iter_mut().take(3).for_each(|id| *id = -1);
            check::<bf16>(d, s, &case);
        }
    });
}

/// Sizes of models, where the definition would take too long: against the path of ordinary multiply-adds.
#[test]
fn wgmma_at_the_sizes_of_models() {
    let Some(d) = gpu().filter(|d| !skipped_without_hopper(d)) else { return };
    {
        let s = Stream::new(&d).unwrap();
        for (tokens, top_k, experts, hidden, inter) in [
            (1, 8, 128, 2048, 768),
            (100, 8, 128, 2048, 768),
            (600, 4, 9, 2880, 1408),
            (333, 2, 8, 1024, 96),
            (300, 1, 3, 96, 2880),
        ] {
            if sanitizing() && tokens * top_k * hidden * inter > 20_000_000 {
                continue;
            }
            for path in [FusedPath::Wgmma16, FusedPath::Wgmma64, FusedPath::Wgmma176, FusedPath::Vector] {
                let most = match path {
                    FusedPath::Wgmma16 => 128,
                    FusedPath::Vector => 32,
                    _ => usize::MAX,
                };
                if tokens * top_k > most {
                    continue;
                }
                let mut case = Case::new(tokens, top_k, experts, hidden, inter);
                // Expert 1 has nobody, expert 0 half of all.
                case.ids.iter_mut().filter(|id| **id == 1).for_each(|id| *id = -1);
                case.ids.iter_mut().step_by(2).for_each(|id| *id = 0);
                let inputs = Inputs::<bf16>::new(&d, &case, 1);
                let run = |path: FusedPath, poison: u8| {
                    let case = case.clone().path(path);
                    let mut workspace = inputs.workspace(&d, &s, &case);
                    s.fill_bytes(&mut workspace, poison).unwrap();
                    let mut out = Tensor::<bf16>::uninit(&d, &[tokens, hidden]).unwrap();
                    s.fill_bytes(&mut out, 0xff).unwrap();
                    inputs.run(&s, &case, &mut out, &mut workspace).unwrap();
                    widen(&out.to_vec().unwrap())
                };
                let (want, got) = (run(FusedPath::Fma, 0xff), run(path, 0xff));
                assert!(got == run(path, 0x7f), "two runs");
                let norm = |v: &mut dyn Iterator<Item = f64>| v.map(|v| v * v).sum::<f64>().sqrt();
                let error = norm(&mut got.iter().zip(&want).map(|(a, b)| a - b)) / norm(&mut want.iter().copied());
                assert!(error < 4e-3, "{path:?}, {tokens} tokens: {error}");
                let mean = norm(&mut want.iter().copied()) / (want.len() as f64).sqrt();
                let most = got.iter().zip(&want).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
                assert!(most < 0.1 * mean, "{path:?}, {tokens} tokens: {most}, of {mean} on average");
            }
        }
    }
}

/// Several blocks of pairs for an expert, several tiles of rows, several steps along K, none of them whole.
#[test]
fn tiles_of_many_pairs() {
    let simt = (!sanitizing()).then(Device::simt);
    for d in simt.into_iter().chain(gpu()) {
        let s = Stream::new(&d).unwrap();
        for (path, tokens) in [(FusedPath::Tile32, 350), (FusedPath::Tile64, 70), (FusedPath::Tile128, 140)] {
            let mut case = Case::new(tokens, 1, 2, 328, 72).path(path);
            case.ids.iter_mut().skip(10).for_each(|id| *id = 1);
            check::<bf16>(&d, &s, &case);
            case.gate_up = GateUp::Interleaved;
            (case.hidden, case.inter) = (136, 200);
            check::<f16>(&d, &s, &case);
        }
    }
}

#[test]
fn direct_matches_the_reference() {
    property(5, (cases(), 1usize..9), |d, s, (mut case, tokens)| {
        case.tokens = tokens.min(case.tokens);
        case.present = case.present.min(case.tokens);
        case.ids.truncate(case.tokens * case.top_k);
        let case = case.path(FusedPath::Direct);
        check::<f16>(d, s, &case);
        check::<bf16>(d, s, &case);
        Ok(())
    });
}

/// Widths that are no multiples of the tiles, and long enough that all warps of a block share a row.
#[test]
fn widths() {
    on_every_order(|d, s| {
        for (hidden, inter) in [(96, 1408), (2880, 40)] {
            let mut case = Case::new(2, 2, 3, hidden, inter);
            case.ids = vec![0, 2, 1, 2];
            check::<bf16>(d, s, &case);
            check::<bf16>(d, s, &case.clone().path(FusedPath::Stream8));
            check::<bf16>(d, s, &for_wgmma(case, false));
        }
        let mut case = Case::new(2, 1, 3, 2080, 512);
        case.ids = vec![0, 2];
        check::<bf16>(d, s, &case);
        let case = Case::new(2, 1, 2, 1408, 24);
        check::<f32>(d, s, &case);
    });
}

#[test]
fn all_on_one_expert_and_none() {
    on_every_device(|d, s| {
        for path in [
            FusedPath::Fma,
            FusedPath::Direct,
            FusedPath::Stream8,
            FusedPath::Tile32,
            FusedPath::Wgmma16,
            FusedPath::Wgmma64,
        ] {
            for id in [4, -1, 5] {
                let mut case = Case::new(33, 1, 5, 40, 24).path(path);
                case.ids.fill(id);
                check::<bf16>(d, s, &case);
            }
            check::<bf16>(d, s, &Case::new(0, 2, 3, 8, 8).path(path));
            check::<bf16>(d, s, &Case::new(3, 0, 3, 8, 8).path(path));
        }
    });
}

/// Numbers of experts of models on both sides of a warp's and of a table's size, the last of them among those of the pairs.
#[test]
fn numbers_of_experts() {
    on_every_device(|d, s| {
        for (i, experts) in [60, 256, 257].into_iter().enumerate() {
            // Each path with one of them on the SIMT device, which takes its time.
            for (_, path) in PATHS.into_iter().enumerate().filter(|(j, _)| !d.is_simt() || (i + j) % 3 == 0) {
                let mut case = Case::new(6, 4, experts, 16, 8).path(path);
                (case.ids[0], case.ids[9]) = (experts as i32 - 1, 0);
                check::<bf16>(d, s, &case);
            }
        }
    });
}

/// A rank that all tokens go past: zeros, or what shared experts give.
#[test]
fn no_experts_here() {
    on_every_device(|d, s| {
        for path in paths(d) {
            let mut case = Case { map: Some(vec![-1; 6]), ..Case::new(5, 2, 6, 24, 16).path(path) };
            check::<bf16>(d, s, &case);
            case.shared = 1;
            check::<bf16>(d, s, &case);
        }
    });
}

/// Where a product has nothing to do and is not launched, the next launch waits in its place: for how many tokens there are, and for the lists.
#[test]
fn products_of_nothing() {
    on_every_device(|d, s| {
        for (top_k, inter, path) in [
            (0, 8, FusedPath::Direct),
            (0, 8, FusedPath::Tile32),
            (2, 0, FusedPath::Direct),
            (2, 0, FusedPath::Stream8),
            (2, 0, FusedPath::Tile64),
            (2, 0, FusedPath::Fma),
        ] {
            let mut case = Case::new(3, top_k, 3, 24, inter).path(path);
            case.present = 2;
            case.biased = true;
            check::<bf16>(d, s, &case);
        }
    });
}

/// Gates and values on either side of all bounds.
#[test]
fn every_activation() {
    on_every_order(|d, s| {
        for activation in ACTIVATIONS {
            for gate_up in [GateUp::Interleaved, GateUp::GateOnly] {
                let case = Case { activation, gate_up, biased: true, ..Case::new(3, 2, 2, 48, 16) };
                check::<f32>(d, s, &case);
                for path in [FusedPath::Direct, FusedPath::Tile32] {
                    check::<bf16>(d, s, &case.clone().path(path));
                }
                check::<f16>(d, s, &for_vector(case.clone()));
                check::<bf16>(d, s, &for_wgmma(case.clone(), false));
                check::<bf16>(d, s, &for_wgmma(case, true));
            }
        }
    });
}

/// The negative side of GELU keeps the accuracy of its type, which it would lose next to 1.
#[test]
fn the_tail_of_gelu() {
    const GATES: [f32; 8] = [-0.5, -2.0, -4.0, -5.0, -5.5, -6.0, 1.0, 6.0];
    fn check<T: Float>(d: &Device, s: &Stream, path: FusedPath, activation: ExpertActivation, error: f64) {
        let (tokens, width) = (GATES.len(), 8);
        let one_of = |first: &[f32]| {
            let row = |&v: &f32| std::iter::once(v).chain([0.0; 7]).map(T::from_f32);
            first.iter().flat_map(row).collect::<Vec<T>>()
        };
        let x = Tensor::from_slice(d, &one_of(&GATES), &[tokens, width]).unwrap();
        let [w13, w2] = [(); 2].map(|()| Tensor::from_slice(d, &one_of(&[1.0; 8]), &[1, width, width]).unwrap());
        let ids = Tensor::from_slice(d, &[0i32; GATES.len()], &[tokens, 1]).unwrap();
        let weights = Tensor::from_slice(d, &[1.0f32; GATES.len()], &[tokens, 1]).unwrap();
        let options = FusedOptions::default().gate_up(GateUp::GateOnly).activation(activation).path(path);
        let shape = FusedShape::new(tokens, 1, 1, width, width);
        let mut workspace = Tensor::zeros(d, &[shape.workspace_bytes(T::DTYPE)]).unwrap();
        let mut out = Tensor::<T>::uninit(d, &[tokens, width]).unwrap();
        fused(s, &mut out, &x, &w13, &w2, &ids, &weights, &options, &mut workspace).unwrap();
        let kind = match activation {
            ExpertActivation::Gelu => Epilogue::Gelu,
            _ => Epilogue::GeluTanh,
        };
        for (gate, got) in GATES.iter().zip(out.to_vec().unwrap().chunks(width)) {
            let want = linear(&[f64::from(*gate)], &[1.0], None, 1, 1, 1, kind)[0];
            for got in got {
                let got = f64::from(got.to_f32());
                assert!(
                    (got - want).abs() <= error * want.abs(),
                    "{path:?} {activation:?} of {gate}: {got:e} {want:e}"
                );
            }
        }
    }
    on_every_device(|d, s| {
        let paths = paths(d).chain(d.is_simt().then_some(FusedPath::Host));
        for (path, activation) in
            paths.flat_map(|path| [(path, ExpertActivation::Gelu), (path, ExpertActivation::GeluTanh)])
        {
            use FusedPath::{Fma, Host, Vector, Wgmma16, Wgmma64, Wgmma176};
            if activation == ExpertActivation::Gelu && matches!(path, Vector | Wgmma16 | Wgmma64 | Wgmma176) {
                continue;
            }
            // Roundings of `h` and of the result.
            check::<bf16>(d, s, path, activation, 0.004);
            if matches!(path, Fma | Host) {
                check::<f32>(d, s, path, activation, 1e-5);
            }
        }
    });
}

/// What an expert's results are does not depend on the weights of the one behind it, where a box of a stage reaches beyond its own.
#[test]
fn an_expert_does_not_depend_on_the_next() {
    on_every_device(|d, s| {
        if skipped_without_hopper(d) {
            return;
        }
        for (path, hidden) in [(FusedPath::Wgmma176, 192), (FusedPath::Wgmma176, 64), (FusedPath::Wgmma64, 192)] {
            let mut case = Case::new(12, 2, 3, hidden, 64).path(path);
            case.ids = (0..24).map(|i| i % 2 * 2).collect();
            let shuffled = Case { shuffled: true, ..case.clone() };
            let inputs = Inputs::<bf16>::new(d, &case, 1);
            let want = bits_of(d, s, &inputs, &case);
            for odd in [2f32.powi(100), f32::INFINITY, f32::NAN] {
                // Nobody has the second expert.
                let mut inputs = Inputs::<bf16>::new(d, &case, 1);
                let mut w2 = inputs.w2.to_vec().unwrap();
                w2[hidden * case.inter..2 * hidden * case.inter].fill(bf16::from_f32(odd));
                inputs.w2.copy_from_slice(&w2).unwrap();
                assert_eq!(bits_of(d, s, &inputs, &case), want, "{path:?} beside {odd}");
                let inputs = inputs.shuffle(d, s, &case);
                assert_eq!(bits_of(d, s, &inputs, &shuffled), want, "{path:?}, shuffled, beside {odd}");
            }
        }
    });
}

/// More slots than the sum reads at once, shared experts among them, some that are not there, and experts with a second share of pairs.
#[test]
fn sums_of_many_slots() {
    on_every_device(|d, s| {
        let mut case = Case { shared: 2, ..Case::new(3, 9, 12, 40, 24) };
        (case.ids[4], case.ids[25]) = (-1, -1);
        check::<f32>(d, s, &case);
        for path in [FusedPath::Direct, FusedPath::Wgmma16, FusedPath::Wgmma64] {
            check::<bf16>(d, s, &case.clone().path(path));
        }
        let mut case = Case::new(20, 5, 4, 40, 24).path(FusedPath::Wgmma16);
        case.ids.iter_mut().skip(3).step_by(5).for_each(|id| *id = 1);
        check::<f16>(d, s, &case);
    });
}

/// The same bits where lines that have been read leave the second-level cache first, or are given up, for which products of this size have too few.
#[test]
fn sums_that_read_for_the_last_time() {
    use warploom::kernels::moe::fused_reduce::*;
    fn check<P: Float>(d: &Device, s: &Stream, entry: Entry<Args>, columns: usize, [slots, n]: [usize; 2]) {
        let tokens = 3;
        // As many behind them, which some results are multiplied by.
        let mut partial =
            Tensor::from_slice(d, &noise_of::<P>(2 * tokens * slots * n, 7), &[2 * tokens * slots, n]).unwrap();
        let mut ids: Vec<i32> = (0..tokens * slots).map(|i| (i % 8) as i32).collect();
        (ids[1], ids[slots]) = (-1, 9);
        let ids = Tensor::from_slice(d, &ids, &[tokens, slots]).unwrap();
        let of = |discard: u32, dead_bytes: usize, partial: &mut Tensor<P>| {
            let mut out = Tensor::<bf16>::zeros(d, &[tokens, n]).unwrap();
            // What nobody reads any more, and a line of somebody else.
            let mut dead =
                Tensor::from_slice(d, &vec![7u8; tokens * dead_bytes + LINE], &[tokens * dead_bytes + LINE]).unwrap();
            let args = Args {
                out: out.as_mut_ptr().cast(),
                partial: partial.as_mut_ptr().cast(),
                topk_ids: ids.as_ptr().cast(),
                expert_map: std::ptr::null(),
                num_tokens: std::ptr::null(),
                out_row: n,
                tokens: tokens as u32,
                top_k: slots as u32,
                slots: slots as u32,
                experts: 8,
                local: 8,
                shared_experts: 0,
                n: n as u32,
                discard,
                across: 7,
                left: std::ptr::null_mut(),
                stripe: 0,
                dead: dead.as_mut_ptr().cast(),
                dead_bytes: dead_bytes as u32,
            };
            let geometry = Geometry::new([tokens as u32, n.div_ceil(columns << 7) as u32, 1], [128, 1, 1]);
            // SAFETY: the tensors are as large as the arguments say, and live on.
            unsafe { s.launch(&entry, &geometry, &args) }.unwrap();
            s.synchronize().unwrap();
            assert_eq!(dead.narrow(0, tokens * dead_bytes, LINE).unwrap().to_vec().unwrap(), [7; LINE]);
            out.to_vec().unwrap().iter().map(|v| v.to_bits()).collect::<Vec<_>>()
        };
        let want = of(0, 0, &mut partial);
        assert_eq!(of(LAST_READ, 0, &mut partial), want);
        assert_eq!(of(0, LINE, &mut partial), want);
        // More lines than threads.
        assert_eq!(of(0, 131 * LINE, &mut partial), want);
        if (n * size_of::<P>()).is_multiple_of(LINE) {
            assert_eq!(of(DISCARDED, LINE, &mut partial), want);
        }
    }
    on_every_device(|d, s| {
        for n in [24, 520, 27, 544, 576] {
            check::<f32>(d, s, moe_fused_reduce_bf16::ENTRY, COLUMNS, [3, n]);
            check::<f32>(d, s, moe_fused_reduce_eight_bf16::ENTRY, COLUMNS, [9, n]);
            check::<bf16>(d, s, moe_fused_reduce_rounded_bf16::ENTRY, ROUNDED_COLUMNS, [6, n]);
            check::<f16>(d, s, moe_fused_reduce_packed_bf16::ENTRY, ROUNDED_COLUMNS, [6, n]);
        }
    });
}

/// Whatever else is in the batch, and whatever the order of an expert's tokens.
#[test]
fn a_token_does_not_depend_on_others() {
    on_every_order(|d, s| {
        let ways = PATHS.map(|path| (path, false)).into_iter().chain([(FusedPath::Wgmma176, true)]);
        for (path, rounded) in ways.filter(|&(path, _)| has(d, path)) {
            let mut case = Case::new(16, 2, 4, 72, 40).path(path);
            case.rounded = rounded;
            let inputs = Inputs::<bf16>::new(d, &case, 1);
            let run_of = |x: &Tensor<bf16>, first: usize, tokens: usize| {
                let ids = case.ids[2 * first..][..2 * tokens].to_vec();
                let part = Case { tokens, present: tokens, ids, ..case.clone() };
                let mut out = Tensor::uninit(d, &[tokens, case.hidden]).unwrap();
                let inputs = Inputs {
                    x: x.narrow(0, first, tokens).unwrap(),
                    weights: inputs.weights.narrow(0, first, tokens).unwrap(),
                    ..Inputs::new(d, &part, 1)
                };
                let mut workspace = inputs.workspace(d, s, &part);
                inputs.run(s, &part, &mut out, &mut workspace).unwrap();
                out.to_vec().unwrap()
            };
            let run = |first, tokens| run_of(&inputs.x, first, tokens);
            let all = run(0, 16);
            for (first, tokens) in [(0, 1), (15, 1), (3, 10)] {
                assert_eq!(run(first, tokens), all[first * case.hidden..][..tokens * case.hidden], "{path:?}");
            }
            // Nor on one that is no number, or so large that its results are none.
            for odd in [f32::NAN, f32::INFINITY, 1e38] {
                let mut x = inputs.x.to_vec().unwrap();
                x[7 * case.hidden..][..case.hidden].fill(bf16::from_f32(odd));
                let x = Tensor::from_slice(d, &x, inputs.x.shape()).unwrap();
                let mut beside = run_of(&x, 0, 16);
                let own = 7 * case.hidden..8 * case.hidden;
                assert!(beside[own.clone()].iter().any(|v| v.is_nan()), "{path:?} of {odd}");
                beside[own.clone()].copy_from_slice(&all[own]);
                assert_eq!(beside, all, "{path:?} beside {odd}");
            }
        }
    });
}

/// Gates and values far beyond f16's range, with results inside of it.
#[test]
fn f16_does_not_overflow_between_the_products() {
    on_every_device(|d, s| {
        for path in paths(d) {
            let (hidden, inter) = (64, 16);
            let t = |v: f32, shape: &[usize]| {
                Tensor::from_slice(d, &vec![f16::from_f32(v); shape.iter().product()], shape).unwrap()
            };
            let x = t(100.0, &[1, hidden]);
            // Gate 64 · 100 · 20 = 128000, value 64 · 100 / 25600 = 1/4: 32000 after silu.
            let mut w13 = vec![f16::from_f32(20.0); 2 * inter * hidden];
            w13[inter * hidden..].fill(f16::from_f32(1.0 / 25600.0));
            let w13 = Tensor::from_slice(d, &w13, &[1, 2 * inter, hidden]).unwrap();
            let w2 = t(1.0 / 16.0, &[1, hidden, inter]);
            let ids = Tensor::from_slice(d, &[0], &[1, 1]).unwrap();
            let weights = Tensor::from_slice(d, &[0.5f32], &[1, 1]).unwrap();
            let bytes = FusedShape::new(1, 1, 1, hidden, inter).workspace_bytes(warploom::DType::F16);
            let mut workspace = Tensor::zeros(d, &[bytes]).unwrap();
            let mut out = Tensor::zeros(d, &[1, hidden]).unwrap();
            let options = FusedOptions::default().path(path);
            fused(s, &mut out, &x, &w13, &w2, &ids, &weights, &options, &mut workspace).unwrap();
            for v in out.to_vec().unwrap() {
                assert!((v.to_f32() - 16000.0).abs() < 32.0, "{path:?}: {v}");
            }
        }
    });
}

/// What overflowed before is infinite behind the block too, by every path: neither values that there are not nor terms that an activation has not make it none.
#[test]
fn infinite_tokens() {
    on_every_device(|d, s| {
        let (width, infinity) = (8, f32::INFINITY);
        let tensor = |v: &[f32], shape: &[usize]| {
            Tensor::from_slice(d, &v.iter().copied().map(bf16::from_f32).collect::<Vec<_>>(), shape).unwrap()
        };
        let ids = Tensor::from_slice(d, &[0], &[1, 1]).unwrap();
        let weights = Tensor::from_slice(d, &[1f32], &[1, 1]).unwrap();
        let bytes = FusedShape::new(1, 1, 1, width, width).workspace_bytes(warploom::DType::Bf16);
        let mut workspace = Tensor::zeros(d, &[bytes]).unwrap();
        for (gate_up, activation, x, want) in [
            (GateUp::GateOnly, ExpertActivation::Silu, infinity, infinity),
            (GateUp::Halves, ExpertActivation::Silu, infinity, infinity),
            (GateUp::GateOnly, ExpertActivation::GeluTanh, infinity, infinity),
            (GateUp::Halves, ExpertActivation::GeluTanh, infinity, infinity),
            (GateUp::GateOnly, ExpertActivation::Relu2, infinity, infinity),
            (GateUp::GateOnly, ExpertActivation::Relu2, -infinity, 0.0),
        ] {
            let rows = gate_up.rows() * width;
            let first = |n: usize, v: f32| (0..n).map(|i| if i % width == 0 { v } else { 0.0 }).collect::<Vec<_>>();
            let x = tensor(&first(width, x), &[1, width]);
            let w13 = tensor(&first(rows * width, 1.0), &[1, rows, width]);
            let w2 = tensor(&[1.0; 64], &[1, width, width]);
            for path in paths(d) {
                let mut out = Tensor::zeros(d, &[1, width]).unwrap();
                let options = FusedOptions::default().path(path).gate_up(gate_up).activation(activation);
                fused(s, &mut out, &x, &w13, &w2, &ids, &weights, &options, &mut workspace).unwrap();
                let got = out.to_vec().unwrap();
                assert!(got.iter().all(|v| v.to_f32() == want), "{path:?} {gate_up:?} {activation:?}: {got:?}");
            }
        }
    });
}

#[test]
fn views_and_misaligned_tensors() {
    on_every_device(|d, s| {
        let case = Case::new(3, 2, 4, 16, 8);
        let inputs = Inputs::<bf16>::new(d, &case, 1);
        let mut workspace = inputs.workspace(d, s, &case);
        let mut plain = Tensor::zeros(d, &[3, 16]).unwrap();
        inputs.run(s, &case, &mut plain, &mut workspace).unwrap();
        let plain = plain.to_vec().unwrap();
        let x = inputs.x.to_vec().unwrap();
        // Rows apart by what suits 16-byte loads, by what does not, and a start that does not.
        for (offset, row) in [(0, 24), (8, 16), (0, 17), (1, 16)] {
            let mut flat = vec![bf16::NAN; 100];
            for (r, values) in x.chunks(16).enumerate() {
                flat[offset + r * row..][..16].copy_from_slice(values);
            }
            let base = Tensor::from_slice(d, &flat, &[100]).unwrap();
            let x = base.as_strided(&[3, 16], &[row, 1], offset).unwrap();
            let inputs = Inputs { x, ..Inputs::new(d, &case, 1) };
            let mut out = Tensor::zeros(d, &[3, 50]).unwrap().narrow(1, 20, 16).unwrap();
            inputs.run(s, &case, &mut out, &mut workspace).unwrap();
            for (a, b) in out.to_vec().unwrap().iter().zip(&plain) {
                assert!((a.to_f32() - b.to_f32()).abs() <= 0.02 * b.to_f32().abs() + 0.02, "{a} {b}");
            }
            let streamed = inputs.run(s, &case.clone().path(FusedPath::Stream8), &mut out, &mut workspace);
            assert_eq!(streamed.is_ok(), offset % 8 == 0 && row % 8 == 0, "{streamed:?}");
        }
    });
}

/// The plan of a raw launch, by addresses alone: nothing behind these is read.
#[test]
fn plans_of_raw_launches() {
    use warploom::moe::fused::{Operands, plan_of};
    on_every_device(|d, _| {
        let plan = |tokens, x: usize, path| {
            let shape = FusedShape::new(tokens, 2, 4, 64, 64);
            let mut o = Operands::new(&shape);
            (o.x, o.w13, o.w2) = (x as *const _, 0x2000 as *const _, 0x3000 as *const _);
            plan_of(d, warploom::DType::Bf16, &shape, path, &o)
        };
        for tokens in [1, 3, 100] {
            let path = plan(tokens, 0x1000, FusedPath::Auto).unwrap().path;
            assert!(!matches!(path, FusedPath::Auto | FusedPath::Fma), "{path:?}");
            assert_eq!(plan(tokens, 0x1000, path).unwrap().path, path);
            assert_eq!(plan(tokens, 0x1002, FusedPath::Auto).unwrap().path, FusedPath::Fma);
            assert!(matches!(plan(tokens, 0x1002, path), Err(Error::Unsupported { .. })));
        }
        let e = plan(1 << 24, 0x1000, FusedPath::Fma);
        assert!(matches!(e, Err(Error::Value { arg: "topk_ids", .. })), "{e:?}");
        // Rows of `x` that 32 bits do not number are for the other kernels.
        let far = |x_row: usize, path| {
            let shape = FusedShape::new(8, 2, 4, 64, 64);
            let mut o = Operands::new(&shape);
            (o.x, o.x_row, o.w13, o.w2) = (0x1000 as *const _, x_row, 0x2000 as *const _, 0x3000 as *const _);
            plan_of(d, warploom::DType::Bf16, &shape, path, &o).map(|plan| plan.path)
        };
        for path in [FusedPath::Wgmma16, FusedPath::Wgmma64, FusedPath::Wgmma176, FusedPath::Vector] {
            if is_hopper(d) {
                assert_eq!(far((1 << 32) - 8, path).unwrap(), path);
            }
            let e = far(1 << 32, path);
            assert!(matches!(e, Err(Error::Unsupported { .. })), "{e:?}");
        }
        assert_eq!(far(1 << 32, FusedPath::Auto).unwrap(), FusedPath::Direct);
    });
}

/// Other tokens, ids and numbers of tokens for each replay, which leaves rows of tokens that do not exist alone.
#[test]
fn captured_and_replayed() {
    on_every_order(|d, s| {
        // Sums in any order are of two slots, which come to the same.
        let plain = PATHS.map(|path| (path, 3, false, false));
        let wide = [FusedPath::Wgmma64, FusedPath::Wgmma176];
        let permitted = wide.into_iter().flat_map(|path| [(path, 1, true, false), (path, 3, false, true)]);
        let ways = plain.into_iter().chain(permitted);
        for (path, top_k, unordered, rounded) in ways.filter(|&(path, ..)| has(d, path)) {
            let case = Case::new(5, top_k, 6, 24, 8).path(path);
            // Some number, so that it is read from the device.
            let case = Case { present: 4, shared: 1, unordered, rounded, ..case };
            let mut inputs = Inputs::<bf16>::new(d, &case, 1);
            let [mut replayed, mut direct] = [0, 1].map(|_| Tensor::<bf16>::zeros(d, &[5, 24]).unwrap());
            let mut workspace = inputs.workspace(d, s, &case);
            // Loads the kernels, which nobody may in a capture.
            inputs.run(s, &case, &mut direct, &mut workspace).unwrap();
            let graph = Graph::capture(s, |s| inputs.run(s, &case, &mut replayed, &mut workspace)).unwrap();
            let bits = |t: &Tensor<bf16>| t.to_vec().unwrap().into_iter().map(bf16::to_bits).collect::<Vec<_>>();
            for (seed, present) in [(20, 5), (21, 2)] {
                inputs.x.copy_from_slice(&noise_of(5 * 24, seed)).unwrap();
                inputs.ids.copy_from_slice(&Case::new(5, top_k, 6, 1, 1).ids.map_ids(seed as i32, 6)).unwrap();
                inputs.present.copy_from_slice(&[present]).unwrap();
                s.fill_bytes(&mut replayed, 0xff).unwrap();
                s.fill_bytes(&mut direct, 0xff).unwrap();
                graph.launch(s).unwrap();
                let once = bits(&replayed);
                graph.launch(s).unwrap();
                assert_eq!(once, bits(&replayed));
                inputs.run(s, &case, &mut direct, &mut workspace).unwrap();
                assert_eq!(once, bits(&direct), "{case:?}");
                let (there, beyond) = once.split_at(24 * present as usize);
                assert!(there.iter().all(|&v| v != 0xffff) && beyond.iter().all(|&v| v == 0xffff), "{case:?}");
            }
        }
    });
}

/// Other ids for another replay.
trait MapIds {
    fn map_ids(self, add: i32, experts: i32) -> Self;
}
impl MapIds for Vec<i32> {
    fn map_ids(self, add: i32, experts: i32) -> Self {
        self.into_iter().map(|id| (id + add) % experts).collect()
    }
}

#[test]
fn bad_input() {
    on_every_device(|d, s| {
        let case = Case::new(3, 2, 4, 16, 8);
        let inputs = || Inputs::<bf16>::new(d, &case, 1);
        let good = inputs();
        let t = |shape: &[usize]| Tensor::<bf16>::zeros(d, shape).unwrap();
        let run = |inputs: &Inputs<bf16>, case: &Case, out: &[usize]| {
            inputs.run(s, case, &mut t(out), &mut good.workspace(d, s, &Case { shared: 2, ..case.clone() }))
        };
        macro_rules! refused {
            ($result:expr, $error:ident $(, $arg:literal)?) => {
                let e = $result;
                assert!(matches!(e, Err(Error::$error { $(arg: $arg,)? .. })), "{e:?}");
            };
        }
        assert!(run(&good, &case, &[3, 16]).is_ok());
        refused!(run(&good, &case, &[3, 17]), Shape, "out");
        refused!(run(&Inputs { w13: t(&[4, 15, 16]), ..inputs() }, &case, &[3, 16]), Shape, "w13");
        refused!(run(&Inputs { w2: t(&[4, 16]), ..inputs() }, &case, &[3, 16]), Shape, "w2");
        refused!(run(&Inputs { w2: t(&[4, 8, 16]), ..inputs() }, &case, &[3, 16]), Shape, "w2");
        refused!(run(&Inputs { x: t(&[3, 24]), ..inputs() }, &case, &[3, 24]), Shape, "w13");
        let biased = Case { biased: true, ..case.clone() };
        refused!(run(&Inputs { bias13: t(&[4, 8]), ..inputs() }, &biased, &[3, 16]), Shape, "bias13");
        refused!(run(&Inputs { bias2: t(&[3, 16]), ..inputs() }, &biased, &[3, 16]), Shape, "bias2");
        let weights = Tensor::zeros(d, &[3, 3]).unwrap();
        refused!(run(&Inputs { weights, ..inputs() }, &case, &[3, 16]), Shape, "topk_weights");
        let swiglu = ExpertActivation::SwigluOai { alpha: 1.0, limit: -1.0 };
        refused!(run(&good, &Case { activation: swiglu, ..case.clone() }, &[3, 16]), Value, "activation");
        let mut small = Tensor::zeros(d, &[100]).unwrap();
        refused!(good.run(s, &case, &mut t(&[3, 16]), &mut small), Value, "workspace");
        let bytes = case.shape().workspace_bytes(DType::Bf16);
        let big = Tensor::<u8>::zeros(d, &[bytes + 8]).unwrap();
        refused!(good.run(s, &case, &mut t(&[3, 16]), &mut big.narrow(0, 8, bytes).unwrap()), Alignment, "workspace");
        let (flat, mut room) = (t(&[16, 8]), good.workspace(d, s, &case));
        let one = good.options(&case).shared_experts(SharedExperts::new(&good.shared[0], &flat));
        let Inputs { x, w13, w2, ids, weights, .. } = &good;
        refused!(fused(s, &mut t(&[3, 16]), x, w13, w2, ids, weights, &one, &mut room), Shape, "shared.w2");
        refused!(good.run(s, &case, &mut good.x.clone(), &mut good.workspace(d, s, &case)), Overlap);
        let odd = Case::new(3, 2, 4, 12, 8).path(FusedPath::Stream8);
        refused!(run(&Inputs::new(d, &odd, 1), &odd, &[3, 12]), Unsupported);
        let many = Case::new(33, 2, 4, 16, 8).path(FusedPath::Direct);
        let inputs = Inputs::<bf16>::new(d, &many, 1);
        refused!(inputs.run(s, &many, &mut t(&[33, 16]), &mut inputs.workspace(d, s, &many)), Unsupported);
        let many = Case::new(17, 2, 4, 16, 8).path(FusedPath::Vector);
        let inputs = Inputs::<bf16>::new(d, &many, 1);
        refused!(inputs.run(s, &many, &mut t(&[17, 16]), &mut inputs.workspace(d, s, &many)), Unsupported);
        let many = Case::new(33, 0, 4, 16, 8).path(FusedPath::Vector);
        let inputs = Inputs::<bf16>::new(d, &many, 1);
        refused!(inputs.run(s, &many, &mut t(&[33, 16]), &mut inputs.workspace(d, s, &many)), Unsupported);
        let exact = Case { activation: ExpertActivation::Gelu, ..Case::new(3, 2, 4, 16, 8).path(FusedPath::Vector) };
        refused!(run(&good, &exact, &[3, 16]), Unsupported);
        let wide = Case::new(3, 2, 654, 16, 8).path(FusedPath::Wgmma176);
        refused!(run(&Inputs::new(d, &wide, 1), &wide, &[3, 16]), Unsupported);
        let stream = Case::new(3, 2, 4, 16, 8).path(FusedPath::Stream8);
        let inputs = Inputs::<f32>::new(d, &stream, 1);
        let mut out = Tensor::zeros(d, &[3, 16]).unwrap();
        refused!(inputs.run(s, &stream, &mut out, &mut inputs.workspace(d, s, &stream)), Unsupported);
    });
}
