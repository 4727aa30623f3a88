use cuda_std::Float;
use proptest::prelude::*;
use warploom::reference::sampling::{self as reference, Adjust, Filters, Ranked, philox};
use warploom::sampling::{Algorithm, LogProbs, Options, PerRow, Workspace, top_k_top_p};
use warploom::{Device, Error, Graph, Result, Stream, Tensor, bf16, f16};
use warploom_tests::{noise, on_every_device, property, widen};

/// All of them, with a number of splits that leaves a short last part.
const ALGORITHMS: [Algorithm; 4] =
    [Algorithm::Auto, Algorithm::Batched, Algorithm::SplitK { splits: 3 }, Algorithm::Radix];

/// One call on new buffers: tokens and log-probabilities.
fn sample<T: Float>(stream: &Stream, logits: &Tensor<T>, n: usize, options: &Options<'_>) -> (Vec<i32>, LogProbs<i32>) {
    let (device, rows, vocab) = (stream.device(), logits.shape()[0], logits.shape()[1]);
    let mut workspace = Workspace::with_adjustments(device, rows, vocab).unwrap();
    let mut tokens = Tensor::<i32>::uninit(device, &[rows]).unwrap();
    let mut log_probs = LogProbs::new(device, rows, n).unwrap();
    top_k_top_p(stream, &mut tokens, Some(&mut log_probs), logits, &mut workspace, options).unwrap();
    (tokens.to_vec().unwrap(), log_probs)
}

/// Tokens alone.
fn tokens<T: Float>(stream: &Stream, logits: &Tensor<T>, options: &Options<'_>) -> Vec<i32> {
    let (device, rows, vocab) = (stream.device(), logits.shape()[0], logits.shape()[1]);
    let mut workspace = Workspace::with_adjustments(device, rows, vocab).unwrap();
    let mut tokens = Tensor::<i32>::uninit(device, &[rows]).unwrap();
    top_k_top_p(stream, &mut tokens, None, logits, &mut workspace, options).unwrap();
    tokens.to_vec().unwrap()
}

fn tensor<T: Float>(device: &Device, values: &[f32], shape: &[usize]) -> Tensor<T> {
    let values: Vec<T> = values.iter().map(|&x| T::from_f32(x)).collect();
    Tensor::from_slice(device, &values, shape).unwrap()
}

/// Whether `u` may draw `token`, up to rounding of weights and of cuts.
fn may_draw(logits: &[f64], filters: &Filters, u: f64, token: usize) -> bool {
    let slack = 2e-5;
    [1.0, 1.0 - slack, 1.0 + slack].into_iter().any(|f| {
        let filters = Filters { top_p: filters.top_p * f, min_p: filters.min_p * f, ..*filters };
        let mut upto = 0.0;
        reference::rank(logits, &filters).into_iter().any(|r| {
            upto += r.after;
            r.token == token && r.after > 0.0 && u >= upto - r.after - slack && u < upto + slack
        })
    })
}

fn uniform(seed: u64, subsequence: u64, offset: u64) -> f64 {
    f64::from(philox::curand(seed, subsequence, offset)) / 2f64.powi(32)
}

fn close(got: f32, probability: f64, slack: f64) -> bool {
    let want = probability.ln();
    (f64::from(got) - want).abs() <= slack * want.abs().max(1.0) || f64::from(got) == want
}

/// Checks the log-probabilities of row `r` against the reference's ranking.
fn check_log_probs(got: &LogProbs<i32>, r: usize, n: usize, token: i32, ranked: &[Ranked]) {
    let of = |t: &Option<Tensor<f32>>| t.as_ref().unwrap().to_vec().unwrap();
    let chosen = ranked.iter().find(|k| k.token == token as usize).unwrap();
    assert!(close(of(&got.before)[r], chosen.before, 1e-4), "before: {} {chosen:?}", of(&got.before)[r]);
    assert!(close(of(&got.after)[r], chosen.after, 1e-4), "after: {} {chosen:?}", of(&got.after)[r]);
    let top = got.top_tokens.as_ref().unwrap().to_vec().unwrap();
    let (before, after) = (of(&got.top_before), of(&got.top_after));
    for i in 0..n {
        let at = r * n + i;
        let Some(want) = ranked.get(i) else {
            assert_eq!((top[at], before[at], after[at]), (-1, f32::NEG_INFINITY, f32::NEG_INFINITY));
            continue;
        };
        assert_eq!(top[at], want.token as i32, "place {i}");
        // Below 2^-39 of the largest the weight is 0, but the logarithm is still known.
        assert!(close(before[at], want.before, 1e-4), "before of place {i}: {} {want:?}", before[at]);
        if want.after > 1e-9 || want.after == 0.0 {
            assert!(close(after[at], want.after, 1e-4), "after of place {i}: {} {want:?}", after[at]);
        }
    }
}

#[derive(Clone, Debug)]
struct Case {
    rows: usize,
    vocab: usize,
    shape: u8,
    top_k: Option<usize>,
    filters: Filters,
    seed: u64,
    n: usize,
}

fn cases() -> impl Strategy<Value = Case> {
    let vocab = prop_oneof![1usize..40, 40usize..700, 4000usize..6000];
    (1usize..3, vocab, 0u8..4, 0usize..5, 0usize..1000, any::<u64>(), 0usize..12).prop_map(
        |(rows, vocab, shape, which, k, seed, n)| {
            let top_k = match which {
                0 => None,
                1 => Some(1 + k % 32),
                2 => Some(1 + k % 128),
                3 => Some(1 + k % vocab),
                _ => Some(20),
            };
            let top_k = top_k.map(|k| k.min(vocab));
            let filters = Filters {
                temperature: [1.0, 0.0, 0.3, 2.5][(seed % 4) as usize],
                top_k: top_k.unwrap_or(vocab),
                top_p: [1.0, 0.9, 0.5, 0.05f32][(seed / 4 % 4) as usize].into(),
                min_p: [0.0, 0.0, 0.01, 0.3f32][(seed / 16 % 4) as usize].into(),
            };
            let filters = Filters { temperature: f64::from(filters.temperature as f32), ..filters };
            Case { rows, vocab, shape, top_k, filters, seed, n }
        },
    )
}

/// Noise, steeper noise, coarse noise full of ties, or noise with a few spikes.
fn logits_of(case: &Case) -> Vec<f32> {
    let noise = noise(case.rows * case.vocab, case.seed);
    let shaped = |(i, x): (usize, f32)| match case.shape {
        0 => 3.0 * x,
        1 => 20.0 * x * x * x,
        2 => (4.0 * x).round(),
        _ if i % 97 == 5 => 8.0 + x,
        _ => x,
    };
    noise.into_iter().enumerate().map(shaped).collect()
}

fn options_of(case: &Case) -> Options<'static> {
    let options = Options::new()
        .temperature(case.filters.temperature as f32)
        .top_p(case.filters.top_p as f32)
        .min_p(case.filters.min_p as f32)
        .seed(case.seed)
        .offset(case.seed % 9);
    match case.top_k {
        Some(k) => options.top_k(k as i32),
        None => options,
    }
}

fn matches<T: Float>(cases_each: u32) {
    property(cases_each, cases(), |device, stream, case| {
        let logits = tensor::<T>(device, &logits_of(&case), &[case.rows, case.vocab]);
        let exact = widen(&logits.to_vec().unwrap());
        let mut first: Option<Vec<i32>> = None;
        for algorithm in ALGORITHMS {
            let (got, log_probs) = sample(stream, &logits, case.n, &options_of(&case).algorithm(algorithm));
            for (r, &token) in got.iter().enumerate() {
                let row = &exact[r * case.vocab..][..case.vocab];
                let u = uniform(case.seed, r as u64, case.seed % 9);
                prop_assert!((token as usize) < case.vocab, "{algorithm:?}: token {token}");
                prop_assert!(
                    may_draw(row, &case.filters, u, token as usize),
                    "{algorithm:?}, row {r}: token {token}, expected {:?}",
                    reference::sample(&reference::rank(row, &case.filters), u)
                );
                let ranked = reference::rank(row, &case.filters);
                if case.n > 0 && ranked.iter().any(|k| k.token == token as usize && k.after > 0.0) {
                    check_log_probs(&log_probs, r, case.n, token, &ranked);
                }
            }
            let first = first.get_or_insert(got.clone());
            prop_assert_eq!(first, &got, "{:?}", algorithm);
        }
        Ok(())
    });
}

#[test]
fn matches_the_reference_f32() {
    matches::<f32>(6);
}
#[test]
fn matches_the_reference_f16() {
    matches::<f16>(6);
}
#[test]
fn matches_the_reference_bf16() {
    matches::<bf16>(6);
}
