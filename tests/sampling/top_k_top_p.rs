use cuda_std::{DType, Float};
use proptest::prelude::*;
use warploom::reference::sampling::{self as reference, Adjust, Filters, Ranked, philox};
use warploom::sampling::top_k_top_p::Plan;
use warploom::sampling::{LogProbs, PerRow, SamplingAlgorithm, SamplingOptions, SamplingWorkspace, top_k_top_p};
use warploom::{Device, Error, Graph, Result, Stream, Tensor, bf16, f16};
use warploom_tests::{
    noise, on_every_device, on_every_order, on_every_small_device, property, sanitizing, skipped_without_hopper, widen,
};

/// All of them, with a number of splits that leaves a short last part.
const ALGORITHMS: [SamplingAlgorithm; 5] = [
    SamplingAlgorithm::Auto,
    SamplingAlgorithm::Batched,
    SamplingAlgorithm::SplitK { splits: 3 },
    SamplingAlgorithm::Radix,
    SamplingAlgorithm::RadixCluster,
];

/// One call on new buffers: tokens and log-probabilities.
fn sample<T: Float>(
    stream: &Stream,
    logits: &Tensor<T>,
    n: usize,
    options: &SamplingOptions<'_>,
) -> (Vec<i32>, LogProbs<i32>) {
    let (device, rows, vocab) = (stream.device(), logits.shape()[0], logits.shape()[1]);
    let mut workspace = SamplingWorkspace::with_adjustments(device, rows, vocab).unwrap();
    let mut tokens = Tensor::<i32>::uninit(device, &[rows]).unwrap();
    let mut log_probs = LogProbs::new(device, rows, n).unwrap();
    top_k_top_p(stream, &mut tokens, Some(&mut log_probs), logits, options, &mut workspace).unwrap();
    (tokens.to_vec().unwrap(), log_probs)
}

/// Tokens alone.
fn tokens<T: Float>(stream: &Stream, logits: &Tensor<T>, options: &SamplingOptions<'_>) -> Vec<i32> {
    let (device, rows, vocab) = (stream.device(), logits.shape()[0], logits.shape()[1]);
    let mut workspace = SamplingWorkspace::with_adjustments(device, rows, vocab).unwrap();
    let mut tokens = Tensor::<i32>::uninit(device, &[rows]).unwrap();
    top_k_top_p(stream, &mut tokens, None, logits, options, &mut workspace).unwrap();
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
                temperature: [1.0, 0.0, 0.3, 2.5f32][(seed % 4) as usize].into(),
                top_k: top_k.unwrap_or(vocab),
                top_p: [1.0, 0.9, 0.5, 0.05f32][(seed / 4 % 4) as usize].into(),
                min_p: [0.0, 0.0, 0.01, 0.3f32][(seed / 16 % 4) as usize].into(),
            };
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

fn options_of(case: &Case) -> SamplingOptions<'static> {
    let options = SamplingOptions::default()
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
    matches::<f32>(16);
}
#[test]
fn matches_the_reference_f16() {
    matches::<f16>(16);
}
#[test]
fn matches_the_reference_bf16() {
    matches::<bf16>(16);
}

/// Rows that break assumptions: flat, full of ties at every cut, ascending, mostly out, not numbers.
fn odd_rows(vocab: usize) -> Vec<(&'static str, Vec<f32>)> {
    let row = |f: &dyn Fn(usize) -> f32| (0..vocab).map(f).collect::<Vec<_>>();
    vec![
        ("flat", row(&|_| 1.5)),
        ("two values", row(&|i| if i % 3 == 0 { 2.0 } else { 1.0 })),
        ("ascending", row(&|i| i as f32 * 0.01)),
        ("descending", row(&|i| -(i as f32) * 0.01)),
        ("all in one thread", row(&|i| if (i / 8) % 256 == 7 { 5.0 + (i % 8) as f32 } else { 0.0 })),
        ("block of ties at the end", row(&|i| if i + 3000 > vocab { 4.0 } else { -4.0 })),
        ("mostly -inf", row(&|i| if i % 1000 == 999 % vocab.min(1000) { i as f32 / 1e4 } else { f32::NEG_INFINITY })),
        ("one token", row(&|i| if i == vocab / 2 { -3.0 } else { f32::NEG_INFINITY })),
        ("NaN among numbers", row(&|i| if i % 2 == 0 { f32::NAN } else { (i % 7) as f32 })),
        ("two +inf", row(&|i| if i == 0 || i == vocab - 1 { f32::INFINITY } else { 1.0 })),
        ("zeros of both signs", row(&|i| if i % 2 == 0 { -0.0 } else { 0.0 })),
        ("spread beyond any weight", row(&|i| -(i as f32) * 40.0)),
    ]
}

#[test]
fn odd_rows_give_the_same_token_whatever_the_algorithm() {
    on_every_order(|device, stream| {
        // Two tiles of a block and three chunks of the search, for the large one.
        for (vocab, cuts) in [
            (5, [(1, 0.75), (3, 1.0), (5, 0.6)]),
            (300, [(1, 1.0), (129, 0.75), (50, 0.3)]),
            (9001, [(20, 0.75), (70, 1.0), (9001, 0.75)]),
        ] {
            let (names, rows): (Vec<_>, Vec<_>) = odd_rows(vocab).into_iter().unzip();
            let logits = tensor::<f32>(device, &rows.concat(), &[rows.len(), vocab]);
            for (k, p) in cuts {
                let options = SamplingOptions::default().top_k(k as i32).top_p(p).seed(7);
                let filters = Filters { top_k: k, top_p: p.into(), ..Filters::default() };
                // Above 128 all of them search.
                let all = if k > 128 { &ALGORITHMS[3..] } else { &ALGORITHMS[1..] };
                let all: Vec<_> = all.iter().map(|&a| tokens(stream, &logits, &options.algorithm(a))).collect();
                for (r, name) in names.iter().enumerate() {
                    let got: Vec<_> = all.iter().map(|t| t[r]).collect();
                    assert!(got.iter().all(|&t| t == got[0]), "{name}, k {k}, p {p}: {got:?}");
                    let exact: Vec<f64> = rows[r].iter().map(|&x| x.into()).collect();
                    assert!(may_draw(&exact, &filters, uniform(7, r as u64, 0), got[0] as usize), "{name}: {got:?}");
                }
            }
        }
    });
}

/// Tokens exactly at a border: where those before one have `p` it is out, what is as probable as `min_p` is in.
#[test]
fn exactly_at_a_border() {
    on_every_device(|device, stream| {
        let mut row = [f32::NEG_INFINITY; 300];
        row[120..124].fill(1.0);
        let logits = tensor::<f32>(device, &row, &[1, 300]);
        for algorithm in ALGORITHMS {
            for (p, kept) in [(0.5, 2), (0.50001, 3), (0.25, 1), (1.0, 4)] {
                let options = SamplingOptions::default().top_k(8).top_p(p).algorithm(algorithm);
                let (_, log_probs) = sample(stream, &logits, 5, &options);
                let after = log_probs.top_after.unwrap().to_vec().unwrap();
                let finite = after.iter().filter(|v| v.is_finite()).count();
                assert_eq!(finite, kept, "{algorithm:?}, p {p}: {after:?}");
            }
            // Just above one of 1024, which 32 binary places do not show.
            let p = f32::from_bits((1.0f32 / 1024.0).to_bits() + 1);
            let equal = tensor::<f32>(device, &[0.0; 1024], &[1, 1024]);
            let (_, log_probs) = sample(stream, &equal, 4, &SamplingOptions::default().top_p(p).algorithm(algorithm));
            let after = log_probs.top_after.unwrap().to_vec().unwrap();
            assert_eq!(after.iter().filter(|v| v.is_finite()).count(), 2, "{algorithm:?}: {after:?}");
            // As probable as the best, all of them.
            let options = SamplingOptions::default().top_k(8).min_p(1.0).algorithm(algorithm);
            let (_, log_probs) = sample(stream, &logits, 4, &options);
            let after = log_probs.top_after.unwrap().to_vec().unwrap();
            assert!(after.iter().all(|v| (v - 0.25f32.ln()).abs() < 1e-5), "{algorithm:?}: {after:?}");
        }
    });
}

#[test]
fn rows_without_a_token_give_the_lowest_allowed() {
    on_every_device(|device, stream| {
        let vocab = 4500;
        let rows = [vec![f32::NEG_INFINITY; vocab], vec![f32::NAN; vocab]].concat();
        let logits = tensor::<bf16>(device, &rows, &[2, vocab]);
        let mut bits = vec![u32::MAX; vocab.div_ceil(32)];
        bits[..130].fill(0);
        bits[130] = !0b111;
        let allowed = Tensor::from_slice(device, &bits, &[bits.len()]).unwrap();
        let nothing = Tensor::<u32>::zeros(device, &[bits.len()]).unwrap();
        for algorithm in ALGORITHMS {
            for k in [None, Some(20)] {
                let options = SamplingOptions::default().algorithm(algorithm);
                let options = k.map_or(options, |k| options.top_k(k));
                let (got, log_probs) = sample(stream, &logits, 2, &options);
                assert_eq!(got, [0, 0], "{algorithm:?}");
                assert_eq!(log_probs.before.unwrap().to_vec().unwrap(), [f32::NEG_INFINITY; 2]);
                assert_eq!(log_probs.after.unwrap().to_vec().unwrap(), [f32::NEG_INFINITY; 2]);
                assert_eq!(log_probs.top_tokens.unwrap().to_vec().unwrap(), [-1; 4]);
                assert_eq!(tokens(stream, &logits, &options.allowed(&allowed)), [130 * 32 + 3; 2], "{algorithm:?}");
                assert_eq!(tokens(stream, &logits, &options.allowed(&nothing)), [0, 0], "{algorithm:?}");
            }
        }
        // Whatever the NaN, and be it the one by which kernels know what is not allowed.
        let banned = vec![f32::from_bits(warploom::kernels::sampling::weights::BANNED); vocab];
        let logits = Tensor::from_slice(device, &banned, &[1, vocab]).unwrap();
        let options = SamplingOptions::default().allowed(&allowed);
        assert_eq!(tokens(stream, &logits, &options), [130 * 32 + 3]);
        let mut mixed = banned;
        mixed[9] = f32::NEG_INFINITY;
        let logits = Tensor::from_slice(device, &mixed, &[1, vocab]).unwrap();
        for options in [SamplingOptions::default(), SamplingOptions::default().top_k(20)] {
            let all = ALGORITHMS.map(|a| tokens(stream, &logits, &options.algorithm(a)));
            assert!(all.iter().all(|t| *t == [0]), "{all:?}");
        }
    });
}

/// Logits whose differences are more than f32 holds, and infinite ones, at temperatures up to +inf.
#[test]
fn infinite_logits_and_temperatures() {
    on_every_order(|device, stream| {
        let vocab = 300;
        let (infinity, most) = (f32::INFINITY, f32::MAX);
        let row = |f: &dyn Fn(usize) -> f32| (0..vocab).map(f).collect::<Vec<_>>();
        let rows = [
            row(&|i| [most, -most, 0.0][i % 3]),
            row(&|i| if i == 7 { infinity } else { [most, -most, 1.0][i % 3] }),
            row(&|i| if i % 100 == 7 { infinity } else { i as f32 }),
            row(&|i| [infinity, -infinity, f32::NAN, most, -most][i % 5]),
            row(&|i| if i % 2 == 0 { -infinity } else { f32::NAN }),
        ];
        let logits = tensor::<f32>(device, &rows.concat(), &[rows.len(), vocab]);
        for (temperature, k, p) in [infinity, most, 1.0]
            .into_iter()
            .flat_map(|t| [(300, 1.0), (300, 0.6), (5, 1.0), (5, 0.6)].map(|(k, p)| (t, k, p)))
        {
            let temperatures = Tensor::from_slice(device, &[temperature; 5], &[5]).unwrap();
            let options = SamplingOptions::default().temperature(&temperatures).top_k(k).top_p(p).seed(5);
            let filters = Filters { temperature: temperature.into(), top_k: k as usize, top_p: p.into(), min_p: 0.0 };
            for algorithm in ALGORITHMS {
                let (got, log_probs) = sample(stream, &logits, 12, &options.algorithm(algorithm));
                for (r, row) in rows.iter().enumerate() {
                    let exact: Vec<f64> = row.iter().map(|&x| x.into()).collect();
                    let ranked = reference::rank(&exact, &filters);
                    if ranked.is_empty() {
                        assert_eq!(got[r], 0);
                        continue;
                    }
                    let case = format!("{algorithm:?}, temperature {temperature}, k {k}, p {p}, row {r}");
                    assert!(may_draw(&exact, &filters, uniform(5, r as u64, 0), got[r] as usize), "{case}: {}", got[r]);
                    check_log_probs(&log_probs, r, 12, got[r], &ranked);
                }
            }
        }
    });
}

/// Any rows, at any address and distance.
#[test]
fn strided_and_misaligned_rows() {
    property(4, (1usize..4, 1usize..900, 0usize..9, 0usize..9), |device, stream, (rows, vocab, gap, start)| {
        let stride = vocab + gap;
        let flat =
            Tensor::from_slice(device, &noise(start + rows * stride, 5).map_to::<f16>(), &[start + rows * stride]);
        let view = flat.unwrap().as_strided(&[rows, vocab], &[stride, 1], start).unwrap();
        let dense = Tensor::from_slice(device, &view.to_vec().unwrap(), &[rows, vocab]).unwrap();
        for options in [
            SamplingOptions::default().top_k(5.min(vocab as i32)).seed(3),
            SamplingOptions::default().top_p(0.8).seed(4),
        ] {
            for algorithm in ALGORITHMS {
                let options = options.algorithm(algorithm);
                prop_assert_eq!(tokens(stream, &view, &options), tokens(stream, &dense, &options));
            }
        }
        Ok(())
    });
}

trait MapTo {
    fn map_to<T: Float>(&self) -> Vec<T>;
}
impl MapTo for Vec<f32> {
    fn map_to<T: Float>(&self) -> Vec<T> {
        self.iter().map(|&x| T::from_f32(x)).collect()
    }
}

/// Parameters on the device, each row with its own: what each row draws alone with scalars.
#[test]
fn parameters_by_row_and_rows_apart() {
    on_every_device(|device, stream| {
        let (rows, vocab) = (8, 700);
        let values = noise(rows * vocab, 8).into_iter().map(|x| 4.0 * x).collect::<Vec<_>>();
        let logits = tensor::<f32>(device, &values, &[rows, vocab]);
        let temperature = [1.0, 0.0, 0.5, f32::NAN, 2.0, -1.0, f32::INFINITY, 1.0];
        let top_k = [0, 5, 700, 3, 200, -7, 2, 1_000_000];
        let top_p = [0.9, 0.9, 1.0, 0.5, 0.3, 7.0, f32::NAN, 0.0];
        let min_p = [0.0, 0.1, -1.0, 0.0, 0.2, f32::NAN, 0.0, 2.0];
        let seed = [1u64, 2, u64::MAX, 4, 5, 6, 7, 8];
        let offset = [0u64, 1, 2, 3, 1 << 40, 5, 6, 7];
        let f = |v: &[f32]| Tensor::from_slice(device, v, &[rows]).unwrap();
        let u = |v: &[u64]| Tensor::from_slice(device, v, &[rows]).unwrap();
        let (t, p, m) = (f(&temperature), f(&top_p), f(&min_p));
        let (k, s, o) = (Tensor::from_slice(device, &top_k, &[rows]).unwrap(), u(&seed), u(&offset));
        let options = SamplingOptions::default()
            .temperature(&t)
            .top_k(&k)
            .top_p(&p)
            .min_p(&m)
            .seed(&s)
            .offset(&o)
            .subsequence(PerRow::All(3));
        let all = ALGORITHMS.map(|a| tokens(stream, &logits, &options.algorithm(a)));
        for r in 0..rows {
            let alone = logits.narrow(0, r, 1).unwrap();
            // What a value out of range means.
            let filters = Filters {
                temperature: if temperature[r] > 0.0 { temperature[r].into() } else { 0.0 },
                top_k: if top_k[r] < 1 { vocab } else { top_k[r] as usize },
                top_p: if top_p[r] < 1.0 { top_p[r].into() } else { 1.0 },
                min_p: if min_p[r] > 0.0 { f64::from(min_p[r]).min(1.0) } else { 0.0 },
            };
            let exact: Vec<f64> = values[r * vocab..][..vocab].iter().map(|&x| x.into()).collect();
            let got = all.each_ref().map(|t| t[r]);
            assert!(got.iter().all(|&t| t == got[0]), "row {r}: {got:?}");
            assert!(may_draw(&exact, &filters, uniform(seed[r], 3, offset[r]), got[0] as usize), "row {r}: {got:?}");
            if filters.temperature.is_finite() {
                let scalar = SamplingOptions::default()
                    .temperature(filters.temperature as f32)
                    .top_k(filters.top_k.min(vocab) as i32)
                    .top_p(if filters.top_p > 0.0 { filters.top_p as f32 } else { 1e-9 })
                    .min_p(filters.min_p as f32)
                    .seed(seed[r])
                    .offset(offset[r])
                    .subsequence(3);
                assert_eq!(tokens(stream, &alone, &scalar), [got[0]], "row {r}");
            }
        }
        // A bound spares the search, and cuts.
        let bounded = tokens(stream, &logits, &options.max_top_k(4));
        let fours: Vec<i32> = top_k.iter().map(|&k| if (1..4).contains(&k) { k } else { 4 }).collect();
        let k = Tensor::from_slice(device, &fours, &[rows]).unwrap();
        assert_eq!(bounded, tokens(stream, &logits, &options.top_k(&k)));
    });
}

#[test]
fn greedy_is_the_first_of_the_largest() {
    on_every_device(|device, stream| {
        let values = noise(3 * 5000, 2).into_iter().map(|x| (8.0 * x).round()).collect::<Vec<_>>();
        let logits = tensor::<bf16>(device, &values, &[3, 5000]);
        let want: Vec<i32> = values
            .chunks(5000)
            .map(|row| (0..5000).rev().max_by(|&a, &b| row[a].partial_cmp(&row[b]).unwrap()).unwrap() as i32)
            .collect();
        for algorithm in ALGORITHMS {
            assert_eq!(
                tokens(stream, &logits, &SamplingOptions::default().greedy().top_p(0.3).algorithm(algorithm)),
                want
            );
        }
        let (_, log_probs) = sample(stream, &logits, 2, &SamplingOptions::default().greedy());
        assert_eq!(log_probs.after.unwrap().to_vec().unwrap(), [0.0; 3]);
        assert_eq!(log_probs.top_after.unwrap().to_vec().unwrap(), [0.0, f32::NEG_INFINITY].repeat(3));
    });
}

/// `frequency * count + presence` is one number with one rounding: neither part is subtracted by itself, nor overflows.
#[test]
fn penalties_are_one_sum() {
    on_every_device(|device, stream| {
        // Where it is 0 the first token has what the second has, and comes before it. To 2^24 nothing is added that is 1, but 1 can be subtracted.
        let even = (1u32 << 24) as f32;
        let logits = [[even, even, 0.0, 0.0], [even, even, 0.0, 0.0], [3.2e38, 1e37, 0.0, 0.0]];
        let logits = tensor::<f32>(device, logits.as_flattened(), &[3, 4]);
        let of = |values: [f32; 3]| Tensor::from_slice(device, &values, &[3]).unwrap();
        let (presence, frequency) = (of([1.0, -1.0, -3e38]), of([-1.0, 1.0, 3e38]));
        let history = Tensor::from_slice(device, &[0; 6], &[3, 2]).unwrap();
        let lengths = Tensor::from_slice(device, &[1, 1, 2], &[3]).unwrap();
        let options = SamplingOptions::default().greedy().history(&history, &lengths);
        let options = options.presence_penalty(&presence).frequency_penalty(&frequency);
        assert_eq!(tokens(stream, &logits, &options), [0; 3]);
        // One of them by itself makes it the second.
        let alone = of([1.0, 1.0, 3e38]);
        assert_eq!(tokens(stream, &logits, &options.presence_penalty(0.0).frequency_penalty(&alone)), [1; 3]);
    });
}

#[test]
fn adjustments_match_the_reference() {
    let shapes = (1usize..4, prop_oneof![3usize..200, 4090usize..4300], any::<u64>());
    property(8, shapes, |device, stream, (rows, vocab, seed)| {
        let values = noise(rows * vocab, seed).into_iter().map(|x| 5.0 * x).collect::<Vec<_>>();
        let bias = noise(vocab, seed ^ 1);
        let random = |n: usize, salt: u64| noise(n, seed ^ salt).into_iter().map(|x| f64::from(x) / 2.0 + 0.5);
        let words = vocab.div_ceil(32);
        let bits: Vec<u32> = random(rows * words, 2).map(|x| (x * 4e9) as u32 | 1).collect();
        let capacity = 12;
        // Some are no tokens.
        let history: Vec<i32> =
            random(rows * capacity, 3).map(|x| (x * (vocab + 4) as f64) as i32 % (vocab as i32 + 2) - 1).collect();
        let lengths: Vec<i32> = random(rows, 4).map(|x| (x * 20.0) as i32 - 2).collect();
        let prompts: Vec<i32> = random(rows, 5).map(|x| (x * 8.0) as i32).collect();
        let (repetition, presence, frequency) = (1.3f32, 0.4f32, -0.2f32);

        let logits = tensor::<f32>(device, &values, &[rows, vocab]);
        let dbias = Tensor::from_slice(device, &bias, &[vocab]).unwrap();
        let dbits = Tensor::from_slice(device, &bits, &[rows, words]).unwrap();
        let dhistory = Tensor::from_slice(device, &history, &[rows, capacity]).unwrap();
        let (dlengths, dprompts) = (
            Tensor::from_slice(device, &lengths, &[rows]).unwrap(),
            Tensor::from_slice(device, &prompts, &[rows]).unwrap(),
        );
        let penalty = Tensor::from_slice(device, &vec![repetition; rows], &[rows]).unwrap();
        let options = SamplingOptions::default()
            .allowed(&dbits)
            .bias(&dbias)
            .history(&dhistory, &dlengths)
            .prompt_lengths(&dprompts)
            .repetition_penalty(&penalty)
            .presence_penalty(presence)
            .frequency_penalty(frequency)
            .seed(seed);
        let n = 6;
        let (radix, log_probs) = sample(stream, &logits, n, &options);
        let quick = tokens(stream, &logits, &options.top_k(3.min(vocab as i32)));
        for r in 0..rows {
            let len = lengths[r].clamp(0, capacity as i32) as usize;
            let (prompt, generated) = history[r * capacity..][..len].split_at(len.min(prompts[r] as usize));
            let adjusted = reference::adjust(
                &values[r * vocab..][..vocab].iter().map(|&x| x.into()).collect::<Vec<f64>>(),
                &Adjust {
                    allowed: &(0..vocab).map(|i| bits[r * words + i / 32] >> (i % 32) & 1 == 1).collect::<Vec<_>>(),
                    bias: &bias.iter().map(|&x| x.into()).collect::<Vec<_>>(),
                    prompt,
                    generated,
                    repetition: repetition.into(),
                    presence: presence.into(),
                    frequency: frequency.into(),
                },
            );
            let u = uniform(seed, r as u64, 0);
            let ranked = reference::rank(&adjusted, &Filters::default());
            check_log_probs(&log_probs, r, n, radix[r], &ranked);
            prop_assert!(may_draw(&adjusted, &Filters::default(), u, radix[r] as usize));
            let three = Filters { top_k: 3, ..Filters::default() };
            prop_assert!(may_draw(&adjusted, &three, u, quick[r] as usize));
        }
        Ok(())
    });
}

/// Draws follow the distribution: total variation, and nothing outside of the support.
#[test]
fn draws_follow_the_distribution() {
    // The order of threads has no say in it, and other tests try that.
    for device in [(!sanitizing()).then(Device::simt), warploom_tests::gpu()].into_iter().flatten() {
        let (device, stream) = (&device, &Stream::new(&device).unwrap());
        let vocab = 300;
        let flat: Vec<f32> = vec![0.0; vocab];
        let peaky: Vec<f32> = (0..vocab).map(|i| -(i as f32) * 0.6).collect();
        let spiked: Vec<f32> = (0..vocab).map(|i| if i % 60 == 7 { 6.0 + (i % 5) as f32 } else { 0.0 }).collect();
        // Few where they take long, which shows what is outside of the support; how often what is in it comes shows on a GPU.
        let draws = if device.is_simt() || sanitizing() { 100 } else { 20_000 };
        let all = Filters::default();
        let split = SamplingAlgorithm::SplitK { splits: 3 };
        for (name, row) in [("flat", flat), ("peaky", peaky), ("spiked", spiked)] {
            for (algorithm, filters) in [
                (SamplingAlgorithm::Auto, Filters { top_k: 6, top_p: 0.9f32.into(), ..all }),
                (SamplingAlgorithm::Radix, Filters { top_k: 8, temperature: 2.0, ..all }),
                (split, Filters { top_k: 20, temperature: 1.5, ..all }),
                (SamplingAlgorithm::Batched, Filters { top_k: 8, min_p: 0.1f32.into(), ..all }),
                (SamplingAlgorithm::Auto, Filters { top_p: 0.9f32.into(), ..all }),
                (SamplingAlgorithm::Auto, Filters { min_p: 0.1f32.into(), ..all }),
            ] {
                let batch = 50;
                let logits = tensor::<bf16>(device, &row.repeat(batch), &[batch, vocab]);
                let options = SamplingOptions::default()
                    .top_p(filters.top_p as f32)
                    .min_p(filters.min_p as f32)
                    .temperature(filters.temperature as f32)
                    .seed(11)
                    .algorithm(algorithm);
                let options = if filters.top_k < vocab { options.top_k(filters.top_k as i32) } else { options };
                let mut counts = vec![0usize; vocab];
                for offset in 0..draws / batch {
                    let drawn = tokens(stream, &logits, &options.offset(offset as u64));
                    drawn.into_iter().for_each(|t| counts[t as usize] += 1);
                }
                let exact = widen(&logits.narrow(0, 0, 1).unwrap().to_vec().unwrap());
                let (mut distance, mut support) = (0.0, 0);
                for r in reference::rank(&exact, &filters) {
                    assert!(r.after > 0.0 || counts[r.token] == 0, "{name}, {filters:?}: {r:?} was drawn");
                    distance += (counts[r.token] as f64 / draws as f64 - r.after).abs() / 2.0;
                    support += (r.after > 0.0) as usize;
                }
                // Of n draws among m tokens about 0.4 * sqrt(m / n) is expected; of few tokens it varies more.
                let expected = 0.4 * (support.max(8) as f64 / draws as f64).sqrt();
                let what = format!("{name}, {algorithm:?}, {filters:?}");
                assert!(distance < 2.0 * expected, "{what}: {distance}, expected about {expected}");
            }
        }
    }
}

/// One row of a real vocabulary's size, not a multiple of any vector.
#[test]
fn large_vocabularies() {
    let device = Device::simt();
    let stream = Stream::new(&device).unwrap();
    let vocab = 151_643;
    let values = noise(vocab, 21).into_iter().map(|x| 12.0 * x * x * x).collect::<Vec<_>>();
    let logits = tensor::<bf16>(&device, &values, &[1, vocab]);
    let exact = widen(&logits.to_vec().unwrap());
    for (k, p) in [(20, 0.9f32), (50, 1.0), (1000, 0.99), (vocab, 0.9)] {
        let options = SamplingOptions::default().top_k(k as i32).top_p(p).seed(9);
        let got = [
            SamplingAlgorithm::Auto,
            SamplingAlgorithm::Batched,
            SamplingAlgorithm::SplitK { splits: 17 },
            SamplingAlgorithm::Radix,
            SamplingAlgorithm::RadixCluster,
        ]
        .map(|a| tokens(&stream, &logits, &options.algorithm(a))[0]);
        assert!(got.iter().all(|&t| t == got[0]), "{got:?}");
        let filters = Filters { top_k: k, top_p: p.into(), ..Filters::default() };
        assert!(may_draw(&exact, &filters, uniform(9, 0, 0), got[0] as usize));
    }
}

/// What a cluster draws, and log-probabilities bit by bit, of f32 rows of any magnitude and spread around any logit, whose windows are narrow, wide, or full
/// of ties: what the search in several launches gives.
#[test]
fn clusters_draw_what_the_search_draws() {
    let vocab = prop_oneof![1usize..40, 300usize..700, 5000usize..9000];
    let base = prop_oneof![Just(0.0f32), -30.0f32..30.0, Just(1e30), Just(-1e30), Just(1e-30)];
    let parameters = (vocab, base, -6.0f32..6.0, -3.0f32..3.0, 0u8..4, any::<u64>());
    property(30, parameters, |device, stream, (vocab, base, spread, temperature, shape, seed)| {
        if skipped_without_hopper(device) {
            return Ok(());
        }
        let unit = base.abs().max(1.0);
        let values: Vec<f32> = noise(vocab, seed)
            .into_iter()
            .enumerate()
            .map(|(i, x)| {
                let x = match shape {
                    0 => x,
                    1 => x * x * x,
                    2 => (4.0 * x).round(),
                    // Hardly anything but ties, and what is left far away.
                    _ if i % 61 == 7 => 3.0 * x,
                    _ => 1.0,
                };
                base + x * 10f32.powf(spread) * unit
            })
            .collect();
        let logits = tensor::<f32>(device, &values, &[1, vocab]);
        let options = SamplingOptions::default().temperature(10f32.powf(temperature) * unit).seed(seed);
        let pick = |n: usize, i: u32| (seed >> i) as usize % n;
        let options = options.top_p([1.0, 0.9, 0.5, 1e-10, 1.0 - f32::EPSILON / 2.0, 0.999][pick(6, 0)]);
        let options = options.min_p([0.0, 0.0, 0.0, 1e-6, 0.5, 1.0][pick(6, 8)]);
        let options = if pick(2, 16) == 0 { options } else { options.top_k(1 + pick(vocab, 20) as i32) };
        let run = |algorithm| sample(stream, &logits, 3, &options.algorithm(algorithm));
        let ((want, before), (got, after)) = (run(SamplingAlgorithm::Radix), run(SamplingAlgorithm::RadixCluster));
        prop_assert_eq!(got, want);
        prop_assert_eq!(bits(&after), bits(&before));
        Ok(())
    });
}

/// More tokens of one bin than lists have room for, of many keys and of few: what the search in several launches gives.
#[test]
fn windows_that_lists_have_no_room_for() {
    on_every_order(|device, stream| {
        if skipped_without_hopper(device) {
            return;
        }
        let vocab = 17_501;
        for keys in [40_000, 300, 3] {
            let near_one = |x: f32| 1.0 + ((x + 1.0) * 0.5 * keys as f32).floor() * f32::EPSILON;
            let values: Vec<f32> = noise(vocab, keys).into_iter().map(near_one).collect();
            let logits = tensor::<f32>(device, &values, &[1, vocab]);
            let new = SamplingOptions::default().seed(keys);
            for options in
                [new, new.top_p(0.4), new.top_k(9000).top_p(0.7).min_p(0.5), new.temperature(1e-4).top_p(0.9)]
            {
                let run = |algorithm| sample(stream, &logits, 3, &options.algorithm(algorithm));
                let ((want, before), (got, after)) =
                    (run(SamplingAlgorithm::Radix), run(SamplingAlgorithm::RadixCluster));
                assert_eq!(got, want, "{keys} keys");
                assert_eq!(bits(&after), bits(&before), "{keys} keys");
            }
        }
    });
}

/// The bits of all log-probabilities.
fn bits(log_probs: &LogProbs<i32>) -> [Vec<u32>; 4] {
    [&log_probs.before, &log_probs.after, &log_probs.top_before, &log_probs.top_after]
        .map(|t| t.as_ref().unwrap().to_vec().unwrap().into_iter().map(f32::to_bits).collect())
}

/// Rows that keep few tokens beside rows that keep many, and one without any, call after call in one workspace: log-probabilities as the search in several
/// launches has them, bit by bit.
#[test]
fn log_probs_are_the_same_bits_whatever_the_algorithm() {
    fn compare<T: Float>(device: &Device, stream: &Stream, rows: usize, vocab: usize) {
        let len = rows * (vocab + 3) + 5;
        let mut values: Vec<f32> = noise(len, vocab as u64).into_iter().map(|x| 9.0 * x * x * x).collect();
        values[5 + vocab + 3..][..vocab].fill(f32::NEG_INFINITY);
        let flat = Tensor::from_slice(device, &values.map_to::<T>(), &[len]).unwrap();
        let logits = flat.as_strided(&[rows, vocab], &[vocab + 3, 1], 5).unwrap();
        let top_k: Vec<i32> = (0..rows).map(|r| [5, 20, 200, 128, 1, 0, 129][r % 7]).collect();
        let top_k = Tensor::from_slice(device, &top_k, &[rows]).unwrap();
        let bias = Tensor::from_slice(device, &noise(vocab, 77), &[vocab]).unwrap();
        let mut workspace = SamplingWorkspace::with_adjustments(device, rows, vocab).unwrap();
        let mut run = |options: &SamplingOptions<'_>| {
            let mut tokens = Tensor::<i32>::zeros(device, &[rows]).unwrap();
            let mut log_probs = LogProbs::new(device, rows, 7).unwrap();
            top_k_top_p(stream, &mut tokens, Some(&mut log_probs), &logits, options, &mut workspace).unwrap();
            (tokens.to_vec().unwrap(), bits(&log_probs))
        };
        let new = SamplingOptions::default().seed(vocab as u64).temperature(0.8);
        for options in [new.top_k(&top_k).top_p(0.9), new.top_k(20), new.greedy(), new.top_k(&top_k).bias(&bias)] {
            let want = run(&options.algorithm(SamplingAlgorithm::Radix));
            for algorithm in
                [SamplingAlgorithm::Auto, SamplingAlgorithm::Batched, SamplingAlgorithm::SplitK { splits: 3 }]
            {
                assert_eq!(run(&options.algorithm(algorithm)), want, "{algorithm:?}, {rows} x {vocab} {}", T::DTYPE);
            }
        }
    }
    on_every_small_device(|device, stream| {
        compare::<f32>(device, stream, 3, 9_001);
        compare::<bf16>(device, stream, 3, 9_002);
        compare::<f16>(device, stream, 7, 301);
        if !device.is_simt() && sanitizing() {
            // What follows would take racecheck minutes.
            return;
        }
        // So many rows that a block has several rounds.
        let rows = 3 * device.properties().multiprocessors as usize + 1;
        compare::<bf16>(device, stream, rows, 20_001);
        compare::<f32>(device, stream, rows, 17_003);
    });
}

/// Clusters of one block up to eight, rows at odd addresses: what the search in several launches gives, bit by bit.
#[test]
fn clusters_of_any_size() {
    fn compare<T: Float>(device: &Device, stream: &Stream) {
        let large = !device.is_simt() && !sanitizing();
        // A vector for each thread of eight blocks, and some more.
        let vocab = if large { 66_003 } else { 9_003 };
        for blocks in 1..=8 {
            let of = |rows: &usize| Plan::cluster_blocks(device, T::DTYPE, *rows, vocab as u32) as usize;
            let most = device.properties().multiprocessors as usize;
            let Some(rows) = (1..=most).rev().find(|rows| of(rows) == blocks) else {
                continue;
            };
            // Few where they take long.
            let rows = if large { rows } else { rows.min(4) };
            // Fewer rows may have larger clusters, which have their turn.
            if of(&rows) != blocks || (!large && rows > 2 && T::DTYPE != DType::F32) {
                continue;
            }
            let values = noise(rows * (vocab + 1) + 3, blocks as u64);
            let values =
                values.into_iter().enumerate().map(|(i, x)| if i % 5 == 0 { 9.0 * x * x * x } else { 3.0 * x });
            let flat = Tensor::from_slice(device, &values.collect::<Vec<_>>().map_to::<T>(), &[rows * (vocab + 1) + 3]);
            let logits = flat.unwrap().as_strided(&[rows, vocab], &[vocab + 1, 1], 3).unwrap();
            let new = SamplingOptions::default().seed(blocks as u64);
            for options in [new.top_p(0.9), new.top_k(700).min_p(0.02), new.top_k(5).top_p(0.4).temperature(0.6)] {
                let run = |algorithm| sample(stream, &logits, 3, &options.algorithm(algorithm));
                let ((want, before), (got, after)) =
                    (run(SamplingAlgorithm::Radix), run(SamplingAlgorithm::RadixCluster));
                assert_eq!(got, want, "{blocks} blocks of {}", T::DTYPE);
                assert_eq!(bits(&after), bits(&before), "{blocks} blocks of {}", T::DTYPE);
            }
        }
    }
    on_every_order(|device, stream| {
        if skipped_without_hopper(device) {
            return;
        }
        compare::<f32>(device, stream);
        compare::<f16>(device, stream);
        compare::<bf16>(device, stream);
    });
}

/// Rows of one logit: a cluster of no more blocks than needed counts nearly 2^16 of a key in each, and lists are too short.
#[test]
fn flat_rows_in_small_clusters() {
    on_every_small_device(|device, stream| {
        let (rows, vocab) = (device.properties().multiprocessors as usize, 131_047);
        // Without clusters the search in several launches is what is asked for.
        let blocks = if skipped_without_hopper(device) { 0 } else { 2 };
        for dtype in [DType::Bf16, DType::F32] {
            assert_eq!(Plan::cluster_blocks(device, dtype, rows, vocab as u32), blocks);
        }
        // One of them will do where a token takes its time.
        let logits = if device.is_simt() { &[-0.0][..] } else { &[2.5, 0.0, -0.0] };
        for &logit in logits {
            let short = tensor::<bf16>(device, &vec![logit; rows * vocab], &[rows, vocab]);
            let long = tensor::<f32>(device, &vec![logit; rows * vocab], &[rows, vocab]);
            let options = SamplingOptions::default().top_p(0.75).seed(3).algorithm(SamplingAlgorithm::RadixCluster);
            let kept = (0.75 * vocab as f64).ceil();
            let want: Vec<i32> = (0..rows as u64).map(|r| (uniform(3, r, 0) * kept) as i32).collect();
            assert_eq!(tokens(stream, &short, &options), want, "{logit}");
            assert_eq!(tokens(stream, &long, &options), want, "{logit}");
        }
    });
}

/// Which rows have a cluster, and of how many blocks.
#[test]
fn clusters_hold_what_they_are_for() {
    let device = Device::simt();
    let blocks = |dtype, rows, vocab| Plan::cluster_blocks(&device, dtype, rows, vocab);
    assert_eq!(blocks(DType::Bf16, 1, 1), 1);
    assert_eq!(blocks(DType::Bf16, 4, 131_047), 2);
    assert_eq!(blocks(DType::F16, 1, 524_160), 8);
    assert_eq!(blocks(DType::F16, 1, 524_168), 0);
    assert_eq!(blocks(DType::F32, 0, 524_160), 8);
    assert_eq!(blocks(DType::F32, 1000, 524_160), 8);
    assert_eq!(blocks(DType::F32, 1, 65_520), 3);
    assert_eq!(blocks(DType::F32, 2, 65_520), 2);
    assert_eq!(blocks(DType::F32, 1, 524_168), 0);
    assert_eq!(blocks(DType::E4m3, 1, 100), 0);
}

/// Short lists, lists that are merged, and a search.
fn variants(offset: &Tensor<u64>) -> [SamplingOptions<'_>; 3] {
    [
        SamplingOptions::default().top_k(20).top_p(0.9).offset(offset),
        SamplingOptions::default().top_k(20).offset(offset).algorithm(SamplingAlgorithm::SplitK { splits: 2 }),
        SamplingOptions::default().top_p(0.9).offset(offset),
    ]
}

#[test]
fn one_workspace_serves_all_calls_and_graphs() {
    on_every_device(|device, stream| {
        let mut workspace = SamplingWorkspace::with_adjustments(device, 5, 9000).unwrap();
        let (rows, vocab) = (3, 8500);
        let mut logits = tensor::<bf16>(device, &noise(rows * vocab, 1), &[rows, vocab]);
        let small = tensor::<f32>(device, &noise(2 * 100, 3), &[2, 100]);
        let mut got = Tensor::<u32>::uninit(device, &[rows]).unwrap();
        let mut other = Tensor::<u32>::uninit(device, &[2]).unwrap();
        let mut offset = Tensor::<u64>::zeros(device, &[rows]).unwrap();
        let mut log_probs = LogProbs::<u32>::new(device, rows, 3).unwrap();
        device.preload(&["sampling"]).unwrap();
        for i in 0..3 {
            let graph = {
                let options = &variants(&offset)[i];
                Graph::capture(stream, |s| {
                    top_k_top_p(s, &mut got, Some(&mut log_probs), &logits, options, &mut workspace)?;
                    top_k_top_p(s, &mut other, None, &small, &SamplingOptions::default().top_p(0.5), &mut workspace)
                })
                .unwrap()
            };
            for replay in 0..3u64 {
                logits.copy_from_slice(&noise(rows * vocab, 40 + replay).map_to::<bf16>()).unwrap();
                offset.copy_from_slice(&[replay; 3]).unwrap();
                stream.fill_bytes(&mut got, 0xff).unwrap();
                graph.launch(stream).unwrap();
                let got: Vec<i32> = got.to_vec().unwrap().into_iter().map(|t| t as i32).collect();
                let (want, fresh) = sample(stream, &logits, 3, &variants(&offset)[i]);
                assert_eq!(got, want, "variant {i}, replay {replay}");
                let of = |t: &Option<Tensor<f32>>| t.as_ref().unwrap().to_vec().unwrap();
                assert_eq!(of(&log_probs.before), of(&fresh.before), "variant {i}, replay {replay}");
                assert_eq!(of(&log_probs.top_after), of(&fresh.top_after), "variant {i}, replay {replay}");
            }
        }
        assert_eq!(
            other.to_vec().unwrap().into_iter().map(|t| t as i32).collect::<Vec<_>>(),
            tokens(stream, &small, &SamplingOptions::default().top_p(0.5))
        );
    });
}

#[test]
fn no_rows_are_no_work() {
    on_every_device(|device, stream| {
        let logits = Tensor::<f32>::uninit(device, &[0, 10]).unwrap();
        assert_eq!(tokens(stream, &logits, &SamplingOptions::default()), [0; 0]);
        assert_eq!(tokens(stream, &logits, &SamplingOptions::default().top_k(3)), [0; 0]);
    });
}

/// A call on `[2, 10]` f32 logits.
fn call_on(stream: &Stream, options: &SamplingOptions<'_>) -> Result<()> {
    let device = stream.device();
    let logits = Tensor::<f32>::zeros(device, &[2, 10])?;
    let mut workspace = SamplingWorkspace::with_adjustments(device, 2, 10)?;
    let mut tokens = Tensor::<i32>::zeros(device, &[2])?;
    top_k_top_p(stream, &mut tokens, None, &logits, options, &mut workspace)
}

#[test]
fn values_out_of_range() {
    let new = SamplingOptions::default;
    let cases = [
        ("top_k", new().top_k(0)),
        ("top_k", new().top_k(-1)),
        ("top_k", new().top_k(11)),
        ("top_p", new().top_p(0.0)),
        ("top_p", new().top_p(1.5)),
        ("top_p", new().top_p(f32::NAN)),
        ("min_p", new().min_p(-0.1)),
        ("min_p", new().min_p(1.1)),
        ("min_p", new().min_p(f32::NAN)),
        ("temperature", new().temperature(f32::NAN)),
        ("temperature", new().temperature(f32::INFINITY)),
        ("temperature", new().temperature(-1.0)),
        ("max_top_k", new().top_k(3).max_top_k(3)),
        ("max_top_k", new().max_top_k(0)),
        ("history", new().repetition_penalty(1.1)),
        ("history", new().presence_penalty(0.1)),
        ("repetition_penalty", new().repetition_penalty(0.0)),
        ("frequency_penalty", new().frequency_penalty(f32::NAN)),
        ("splits", new().top_k(3).algorithm(SamplingAlgorithm::SplitK { splits: 0 })),
        ("splits", new().top_k(3).algorithm(SamplingAlgorithm::SplitK { splits: 513 })),
    ];
    on_every_device(|device, stream| {
        let history = Tensor::<i32>::zeros(device, &[2, 1]).unwrap();
        let lengths = Tensor::<i32>::zeros(device, &[2]).unwrap();
        for (name, options) in &cases {
            let options = options.seed(1);
            let options = if name.ends_with("_penalty") { options.history(&history, &lengths) } else { options };
            let error = call_on(stream, &options).unwrap_err();
            assert!(matches!(error, Error::Value { arg, .. } if arg == *name), "{name}: {error}");
        }
    });
}

#[test]
fn shapes_strides_devices_and_overlaps() {
    on_every_device(refuses_tensors);
}

fn refuses_tensors(device: &Device, stream: &Stream) {
    let logits = Tensor::<f32>::zeros(device, &[2, 40]).unwrap();
    let floats = |shape: &[usize]| Tensor::<f32>::zeros(device, shape).unwrap();
    let ints = |shape: &[usize]| Tensor::<i32>::zeros(device, shape).unwrap();
    let words = |shape: &[usize]| Tensor::<u32>::zeros(device, shape).unwrap();
    let run = |logits: &Tensor<f32>, mut tokens: Tensor<i32>, options: &SamplingOptions<'_>| {
        let mut workspace = SamplingWorkspace::with_adjustments(device, 2, 40).unwrap();
        top_k_top_p(stream, &mut tokens, None, logits, options, &mut workspace).unwrap_err()
    };
    let shape = |e: Error, name: &str| assert!(matches!(e, Error::Shape { arg, .. } if arg == name), "{name}: {e}");
    let new = SamplingOptions::default;

    shape(run(&floats(&[2, 0]), ints(&[2]), &new()), "logits");
    shape(run(&logits, ints(&[3]), &new()), "tokens");
    shape(run(&logits, ints(&[2]), &new().temperature(&floats(&[3]))), "temperature");
    shape(run(&logits, ints(&[2]), &new().top_k(&ints(&[1]))), "top_k");
    shape(run(&logits, ints(&[2]), &new().allowed(&words(&[1]))), "allowed");
    shape(run(&logits, ints(&[2]), &new().bias(&floats(&[3, 40]))), "bias");
    let (history, lengths) = (ints(&[2, 5]), ints(&[2]));
    for wrong in [&[3, 5][..], &[2, 1, 5], &[5]] {
        let e = run(&logits, ints(&[2]), &new().history(&ints(wrong), &lengths));
        assert!(matches!(&e, Error::Shape { arg: "history", got, .. } if got == wrong), "{e}");
    }
    shape(run(&logits, ints(&[2]), &new().history(&history, &ints(&[3]))), "lengths");
    shape(run(&logits, ints(&[2]), &new().history(&history, &lengths).prompt_lengths(&ints(&[1]))), "prompt_lengths");

    let spread = floats(&[4]).as_strided(&[2], &[2], 0).unwrap();
    assert!(matches!(run(&logits, ints(&[2]), &new().top_p(&spread)), Error::Stride { arg: "top_p", .. }));
    let crossed = floats(&[80]).as_strided(&[2, 40], &[1, 2], 0).unwrap();
    assert!(matches!(run(&crossed, ints(&[2]), &new()), Error::Stride { arg: "logits", .. }));
    let elsewhere = Tensor::<f32>::zeros(&Device::simt(), &[2, 40]).unwrap();
    assert!(matches!(run(&elsewhere, ints(&[2]), &new()), Error::WrongDevice { arg: "logits", .. }));
    let shared = ints(&[2]);
    let overlap = run(&logits, shared.narrow(0, 0, 2).unwrap(), &new().top_k(&shared));
    assert!(matches!(overlap, Error::Overlap { first: "tokens", second: "top_k", .. }), "{overlap}");

    let with = |mut workspace: SamplingWorkspace, mut log_probs: LogProbs<i32>, options: &SamplingOptions<'_>| {
        top_k_top_p(stream, &mut ints(&[2]), Some(&mut log_probs), &logits, options, &mut workspace).unwrap_err()
    };
    let too_small = |e: Error| assert!(matches!(e, Error::Value { arg: "workspace", .. }), "{e}");
    too_small(with(SamplingWorkspace::new(device, 1, 40).unwrap(), LogProbs::none(), &new()));
    too_small(with(SamplingWorkspace::new(device, 2, 39).unwrap(), LogProbs::none(), &new()));
    too_small(with(SamplingWorkspace::new(device, 2, 40).unwrap(), LogProbs::none(), &new().bias(&floats(&[40]))));
    let enough = || SamplingWorkspace::new(device, 2, 40).unwrap();
    shape(with(enough(), LogProbs::new(device, 3, 0).unwrap(), &new()), "log_probs.before");
    let mut uneven = LogProbs::new(device, 2, 3).unwrap();
    uneven.top_after = Some(floats(&[2, 4]));
    shape(with(enough(), uneven, &new()), "log_probs.top_after");
    let many = with(enough(), LogProbs::new(device, 2, 129).unwrap(), &new());
    assert!(matches!(many, Error::Unsupported { .. }), "{many}");
    assert!(matches!(SamplingWorkspace::new(device, 1, 1 << 31), Err(Error::Value { arg: "vocab", .. })));
    for rows in [1 << 31, 1 << 62, usize::MAX] {
        assert!(matches!(SamplingWorkspace::new(device, rows, 40), Err(Error::Value { arg: "rows", .. })));
        assert!(matches!(SamplingWorkspace::with_adjustments(device, rows, 40), Err(Error::Value { arg: "rows", .. })));
    }

    let eight_bits = Tensor::<warploom::E4M3>::zeros(device, &[2, 40]).unwrap();
    let error = top_k_top_p(stream, &mut ints(&[2]), None, &eight_bits, &new(), &mut enough()).unwrap_err();
    assert!(matches!(error, Error::DType { arg: "logits", .. }), "{error}");
}

/// What no launch could number is an error, not fewer blocks.
#[test]
fn raw_launches_of_too_many_blocks() {
    use std::ptr::{null, null_mut};
    use warploom::sampling::top_k_top_p::{Job, RawPerRow, launch};
    let device = Device::simt();
    let stream = Stream::new(&device).unwrap();
    let vocab = 1 << 24;
    let job = Job {
        stride: vocab as u64,
        vocab,
        quick_limit: 0,
        max_k: vocab,
        top_n: 0,
        adjusted: 0,
        later: 0,
        temperature: RawPerRow::all(1.0),
        top_k: RawPerRow::all(0),
        top_p: RawPerRow::all(1.0),
        min_p: RawPerRow::all(0.0),
        seed: RawPerRow::all(0),
        offset: RawPerRow::all(0),
        subsequence: RawPerRow::all(0),
        subsequence_step: 1,
        tokens: null_mut(),
        before: null_mut(),
        after: null_mut(),
        top_tokens: null_mut(),
        top_before: null_mut(),
        top_after: null_mut(),
        tickets: null_mut(),
        state: null_mut(),
        histograms: null_mut(),
        lists: null_mut(),
        best: null_mut(),
        chunk_counts: null_mut(),
    };
    // SAFETY: nothing is launched, so nothing is read.
    let result = unsafe { launch(&stream, DType::F32, 1 << 20, null(), job, None, Plan::new(0, 1, false)) };
    assert!(result.is_err(), "2^32 blocks");
    assert_eq!(Plan::splits(132, 1, 128_256, usize::MAX), 1);
}
