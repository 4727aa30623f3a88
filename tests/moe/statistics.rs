use warploom::moe::statistics::workspace_bytes;
use warploom::moe::{StatisticsOutput, statistics};
use warploom::{Device, Error, Float, Graph, Stream, Tensor, bf16, f16, reference};
use warploom_tests::{assert_close, noise, noise_of, on_every_device, property, widen};

/// What a call gives: summary, loads, importance, probabilities.
type Got = (Vec<f32>, Vec<i32>, Vec<f32>, Vec<f32>);

/// Ids from -1 to one too many.
fn ids(n: usize, experts: usize, seed: u64) -> Vec<i32> {
    noise(n, seed).iter().map(|x| ((x + 1.0) / 2.0 * (experts + 2) as f32) as i32 - 1).collect()
}

fn run<T: Float>(
    d: &Device,
    s: &Stream,
    logits: &[T],
    experts: usize,
    ids: &[i32],
    weights: &[f32],
    gap: usize,
) -> Got {
    let tokens = logits.len() / experts;
    let top_k = ids.len().checked_div(tokens).unwrap_or(1);
    // Rows with something between them.
    let wide = experts + gap;
    let mut all = vec![T::from_f32(f32::NAN); tokens * wide];
    for t in 0..tokens {
        all[t * wide..][..experts].copy_from_slice(&logits[t * experts..][..experts]);
    }
    let logits = Tensor::from_slice(d, &all, &[tokens * wide]).unwrap();
    let logits = logits.as_strided(&[tokens, experts], &[wide, 1], 0).unwrap();
    let ids = Tensor::from_slice(d, ids, &[tokens, top_k]).unwrap();
    let weights = Tensor::from_slice(d, weights, &[tokens, top_k]).unwrap();
    let mut summary = Tensor::uninit(d, &[5]).unwrap();
    let mut loads = Tensor::uninit(d, &[experts]).unwrap();
    let [mut importance, mut probabilities] = [0, 1].map(|_| Tensor::uninit(d, &[experts]).unwrap());
    s.fill_bytes(&mut summary, 0xff).unwrap();
    s.fill_bytes(&mut loads, 0xff).unwrap();
    s.fill_bytes(&mut importance, 0xff).unwrap();
    s.fill_bytes(&mut probabilities, 0xff).unwrap();
    let mut workspace = Tensor::uninit(d, &[workspace_bytes(tokens, experts)]).unwrap();
    let mut out = StatisticsOutput::new(&mut summary)
        .loads(&mut loads)
        .importance(&mut importance)
        .probabilities(&mut probabilities);
    statistics(s, &mut out, &logits, &ids, &weights, &mut workspace).unwrap();
    (summary.to_vec().unwrap(), loads.to_vec().unwrap(), importance.to_vec().unwrap(), probabilities.to_vec().unwrap())
}

fn check<T: Float>(d: &Device, s: &Stream, tokens: usize, experts: usize, top_k: usize, seed: u64, gap: usize) {
    let logits: Vec<T> = noise(tokens * experts, seed).iter().map(|x| T::from_f32(8.0 * x)).collect();
    let ids = ids(tokens * top_k, experts, seed + 1);
    let weights: Vec<f32> = noise(tokens * top_k, seed + 2).iter().map(|x| x + 1.0).collect();
    let want = reference::moe::statistics(&widen(&logits), experts, &ids, &weights);
    let got = run(d, s, &logits, experts, &ids, &weights, gap);
    assert_eq!(got.1, want.loads);
    // Sums of f32 over the tokens: the error of each addition is relative to a sum that only grows.
    let rounding = 2f64.powi(-23) * (tokens * top_k + 16) as f64;
    let most = want.importance.iter().copied().fold(0.0, f64::max);
    assert_close(&got.2, &want.importance, rounding, most);
    assert_close(&got.3, &want.probabilities, rounding + 2e-6, 1.0 / experts as f64 + 1e-3);
    // A squared coefficient of variation is the mean of squares of differences, beside 1, that are off by what importances are.
    let relative = rounding + 4e-6;
    let squared = |cv: f64| relative * (2.0 * cv + relative);
    let allowed = [
        relative * want.summary[0],
        relative * (1.0 + want.summary[1]),
        squared(want.summary[1]) + relative * want.summary[2],
        relative * want.summary[3],
        relative * want.summary[4],
    ];
    for (i, (&got, want)) in got.0.iter().zip(want.summary).enumerate() {
        let error = (f64::from(got) - want).abs();
        assert!(error <= 4.0 * allowed[i], "summary {i}: {got}, expected {want} within {:e}", 4.0 * allowed[i]);
    }
}

#[test]
fn matches_the_reference() {
    let shape = (0usize..70, 1usize..40, 1usize..6, 0u64..99, 0usize..3);
    property(10, shape, |d, s, (tokens, experts, top_k, seed, gap)| {
        check::<f32>(d, s, tokens, experts, top_k, seed, gap);
        check::<bf16>(d, s, tokens, experts, top_k, seed, gap);
        check::<f16>(d, s, tokens, experts, top_k, seed, gap);
        Ok(())
    });
}

#[test]
fn many() {
    on_every_device(|d, s| {
        // More experts than threads, more pairs than a slab, more blocks than one.
        check::<f32>(d, s, 9, 300, 130, 1, 0);
        check::<bf16>(d, s, 1100, 9, 2, 2, 0);
        check::<f32>(d, s, 3, 2048, 1, 3, 0);
    });
}

#[test]
fn balanced_and_concentrated() {
    on_every_device(|d, s| {
        let experts = 8;
        let ids: Vec<i32> = (0..64).map(|i| i % 8).collect();
        let (summary, loads, ..) = run(d, s, &[0.5f32; 32 * 8], experts, &ids, &[0.25; 64], 0);
        assert_eq!(loads, [8; 8]);
        assert_eq!(summary[..3], [0.0; 3]);
        assert!((summary[3] - 1.0).abs() < 1e-6, "{summary:?}");
        let z = (0.5 + 8f64.ln()).powi(2);
        assert!((f64::from(summary[4]) - z).abs() < 1e-5, "{summary:?}");
        // Importances whose squares f32 does not hold, and 1 and 3 of them.
        for unit in [1.0, 1e-25, 1e22, 1e-38, 1e37] {
            let (summary, ..) = run(d, s, &[0.5f32; 4], 2, &[0, 1], &[unit, 3.0 * unit], 0);
            assert!((summary[1] - 0.5).abs() < 1e-6 && (summary[2] - 0.25).abs() < 1e-6, "{unit}: {summary:?}");
        }
        // All to one expert that has all the probability: the loss is the number of experts, the variation sqrt(7).
        let logits: Vec<f32> = (0..32 * 8).map(|i| if i % 8 == 3 { 50.0 } else { f32::NEG_INFINITY }).collect();
        let (summary, loads, _, probabilities) = run(d, s, &logits, experts, &[3; 64], &[0.25; 64], 0);
        assert_eq!(loads, [0, 0, 0, 64, 0, 0, 0, 0]);
        assert_eq!(probabilities, [0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0]);
        assert_eq!(summary[3], 8.0);
        assert!((summary[0] - 7f32.sqrt()).abs() < 1e-5 && (summary[2] - 7.0).abs() < 1e-5, "{summary:?}");
    });
}

#[test]
fn nan_and_nothing() {
    on_every_device(|d, s| {
        let (summary, loads, _, probabilities) = run(d, s, &[0.0f32, f32::NAN, 0.0, 1.0], 2, &[0, 1], &[1.0, 1.0], 0);
        assert_eq!(loads, [1, 1]);
        assert_eq!(summary[..3], [0.0; 3]);
        assert!(summary[3].is_nan() && summary[4].is_nan() && probabilities.iter().all(|p| p.is_nan()));
        assert_eq!(run::<f32>(d, s, &[], 3, &[], &[], 0), (vec![0.0; 5], vec![0; 3], vec![0.0; 3], vec![0.0; 3]));
    });
}

#[test]
fn the_same_every_time_and_in_a_graph() {
    on_every_device(|d, s| {
        let (tokens, experts, top_k) = (77, 33, 4);
        let logits = Tensor::from_slice(d, &noise_of::<f32>(tokens * experts, 5), &[tokens, experts]).unwrap();
        let ids = Tensor::from_slice(d, &ids(tokens * top_k, experts, 6), &[tokens, top_k]).unwrap();
        let weights = Tensor::from_slice(d, &noise_of::<f32>(tokens * top_k, 7), &[tokens, top_k]).unwrap();
        let mut workspace = Tensor::uninit(d, &[workspace_bytes(tokens, experts)]).unwrap();
        let mut summary = Tensor::uninit(d, &[5]).unwrap();
        statistics(s, &mut StatisticsOutput::new(&mut summary), &logits, &ids, &weights, &mut workspace).unwrap();
        let first: Vec<u32> = summary.to_vec().unwrap().iter().map(|v: &f32| v.to_bits()).collect();
        let graph = Graph::capture(s, |s| {
            statistics(s, &mut StatisticsOutput::new(&mut summary), &logits, &ids, &weights, &mut workspace)
        })
        .unwrap();
        for _ in 0..2 {
            s.fill_bytes(&mut summary, 0xff).unwrap();
            graph.launch(s).unwrap();
            let again: Vec<u32> = summary.to_vec().unwrap().iter().map(|v: &f32| v.to_bits()).collect();
            assert_eq!(first, again);
        }
    });
}

#[test]
fn bad_input() {
    on_every_device(|d, s| {
        let f = |shape: &[usize]| Tensor::<f32>::zeros(d, shape).unwrap();
        let i = |shape: &[usize]| Tensor::<i32>::zeros(d, shape).unwrap();
        let mut workspace = Tensor::zeros(d, &[workspace_bytes(3, 4)]).unwrap();
        let mut call = |summary: &mut Tensor<f32>, logits: &Tensor<f32>, ids: &Tensor<i32>, weights: &Tensor<f32>| {
            statistics(s, &mut StatisticsOutput::new(summary), logits, ids, weights, &mut workspace)
        };
        assert!(call(&mut f(&[5]), &f(&[3, 4]), &i(&[3, 2]), &f(&[3, 2])).is_ok());
        let e = call(&mut f(&[4]), &f(&[3, 4]), &i(&[3, 2]), &f(&[3, 2]));
        assert!(matches!(e, Err(Error::Shape { arg: "out.summary", .. })), "{e:?}");
        let e = call(&mut f(&[5]), &f(&[3, 4]), &i(&[2, 2]), &f(&[3, 2]));
        assert!(matches!(e, Err(Error::Shape { arg: "topk_ids", .. })), "{e:?}");
        let e = call(&mut f(&[5]), &f(&[3, 4]), &i(&[3, 2]), &f(&[3, 3]));
        assert!(matches!(e, Err(Error::Shape { arg: "topk_weights", .. })), "{e:?}");
        let e = call(&mut f(&[5]), &f(&[3, 0]), &i(&[3, 2]), &f(&[3, 2]));
        assert!(matches!(e, Err(Error::Value { arg: "logits", .. })), "{e:?}");
        let e = call(&mut f(&[5]), &f(&[3, 2049]), &i(&[3, 2]), &f(&[3, 2]));
        assert!(matches!(e, Err(Error::Value { arg: "logits", .. })), "{e:?}");
        let e = call(&mut f(&[5]), &f(&[9, 4]), &i(&[9, 2]), &f(&[9, 2]));
        assert!(matches!(e, Err(Error::Value { arg: "workspace", .. })), "{e:?}");
        let both = f(&[5]);
        let (mut summary, mut importance) = (both.clone(), both.as_strided(&[4], &[1], 0).unwrap());
        let mut out = StatisticsOutput::new(&mut summary).importance(&mut importance);
        let e = statistics(s, &mut out, &f(&[3, 4]), &i(&[3, 2]), &f(&[3, 2]), &mut workspace);
        assert!(matches!(e, Err(Error::Overlap { .. })), "{e:?}");
    });
}
