use proptest::prelude::*;
use warploom::kernels::philox::normals;
use warploom::moe::{NoisyTopKOptions, noisy_top_k};
use warploom::{Device, Error, Float, Graph, Stream, Tensor, bf16, f16, reference};
use warploom_tests::{noise, on_every_device, property, widen};

/// Weights, ids, noisy logits.
type Got = (Vec<f32>, Vec<i32>, Vec<f32>);

fn run<T: Float>(
    d: &Device,
    s: &Stream,
    logits: &[T],
    experts: usize,
    top_k: usize,
    noise: Option<&[T]>,
    options: NoisyTopKOptions<'_, T>,
) -> Got {
    let tokens = logits.len() / experts;
    let logits = Tensor::from_slice(d, logits, &[tokens, experts]).unwrap();
    let noise = noise.map(|n| Tensor::from_slice(d, n, &[tokens, experts]).unwrap());
    let mut weights = Tensor::uninit(d, &[tokens, top_k]).unwrap();
    let mut ids = Tensor::uninit(d, &[tokens, top_k]).unwrap();
    let mut noisy = Tensor::uninit(d, &[tokens, experts]).unwrap();
    s.fill_bytes(&mut weights, 0xff).unwrap();
    s.fill_bytes(&mut ids, 0xff).unwrap();
    s.fill_bytes(&mut noisy, 0xff).unwrap();
    let options = match &noise {
        Some(n) => options.noise_logits(n),
        None => options,
    };
    noisy_top_k(s, &mut ids, &mut weights, Some(&mut noisy), &logits, &options).unwrap();
    (weights.to_vec().unwrap(), ids.to_vec().unwrap(), noisy.to_vec().unwrap())
}

fn check<T: Float>(d: &Device, s: &Stream, tokens: usize, experts: usize, top_k: usize, noisy: bool, random: [u64; 3]) {
    let logits: Vec<T> = noise(tokens * experts, random[0] + 1).iter().map(|x| T::from_f32(3.0 * x)).collect();
    let spread: Vec<T> = noise(tokens * experts, random[0] + 2).iter().map(|x| T::from_f32(4.0 * x)).collect();
    let spread = noisy.then_some(&spread[..]);
    let scale = 0.75;
    let options = NoisyTopKOptions::default().scale(scale).random(random[0], random[1], random[2]);
    let (weights, ids, got) = run(d, s, &logits, experts, top_k, spread, options);
    for t in 0..tokens {
        let row = t * experts..(t + 1) * experts;
        let wide = spread.map(|n| widen(&n[row.clone()]));
        let want = reference::moe::noisy_top_k::noisy(
            &widen(&logits[row.clone()]),
            wide.as_deref(),
            f64::from(scale),
            random,
            t,
        );
        for (e, (&got, want)) in got[row.clone()].iter().zip(want).enumerate() {
            assert!((f64::from(got) - want).abs() <= 2e-5, "token {t}, expert {e}: {got}, expected {want}");
        }
        // The choice is exactly that of the noisy logits that came out.
        let (want_ids, want_weights) = reference::moe::noisy_top_k::keep_top_k(&got[row], top_k);
        assert_eq!(ids[t * top_k..][..top_k], want_ids, "token {t}");
        for (got, want) in weights[t * top_k..][..top_k].iter().zip(want_weights) {
            assert!((f64::from(*got) - want).abs() <= 2e-6 * want + 1e-36, "token {t}: {got}, expected {want}");
        }
    }
}

#[test]
fn matches_the_reference() {
    let shape = (0usize..9, 1usize..80, 1usize..33, any::<bool>(), 0u64..1 << 60, any::<u64>(), any::<u64>());
    property(10, shape, |d, s, (tokens, experts, top_k, noisy, seed, sequence, offset)| {
        let (top_k, random) = (top_k.min(experts), [seed, sequence, offset]);
        check::<f32>(d, s, tokens, experts, top_k, noisy, random);
        check::<bf16>(d, s, tokens, experts, top_k, noisy, random);
        check::<f16>(d, s, tokens, experts, top_k, noisy, random);
        Ok(())
    });
}

#[test]
fn many_experts() {
    on_every_device(|d, s| {
        check::<f32>(d, s, 5, 2048, 32, true, [1, 2, 3]);
        check::<bf16>(d, s, 7, 257, 8, false, [4, 0, 0]);
    });
}

/// The noise has the moments of the normal distribution, and rows and experts are independent.
#[test]
fn normally_distributed() {
    on_every_device(|d, s| {
        let (tokens, experts) = (32, 512);
        let options = NoisyTopKOptions::default().random(99, 0, 0);
        let (.., h) = run(d, s, &vec![0f32; tokens * experts], experts, 1, None, options);
        let n = h.len() as f64;
        let mean = |f: &dyn Fn(f64) -> f64| h.iter().map(|&x| f(f64::from(x))).sum::<f64>() / n;
        // Standard errors: 1, sqrt 2, sqrt 15, sqrt 96 over sqrt n; five of them.
        assert!(mean(&|x| x).abs() < 5.0 / n.sqrt());
        assert!((mean(&|x| x * x) - 1.0).abs() < 5.0 * 2f64.sqrt() / n.sqrt());
        assert!(mean(&|x| x.powi(3)).abs() < 5.0 * 15f64.sqrt() / n.sqrt());
        assert!((mean(&|x| x.powi(4)) - 3.0).abs() < 5.0 * 96f64.sqrt() / n.sqrt());
        let inside = mean(&|x| f64::from(u8::from(x.abs() < 1.0)));
        assert!((inside - 0.682_689_5).abs() < 5.0 * 0.4655 / n.sqrt(), "{inside}");
        for lag in [1, 2, 4, experts] {
            let product: f64 = h.iter().zip(&h[lag..]).map(|(a, b)| f64::from(a * b)).sum();
            assert!((product / (n - lag as f64)).abs() < 5.0 / n.sqrt(), "lag {lag}");
        }
    });
}

/// From one end of the 32 bits to the other.
#[test]
fn every_kind_of_word() {
    let words = [0, 1, 2, 1 << 20, (1 << 31) - 1, 1 << 31, (1 << 31) + 1, u32::MAX - 1, u32::MAX];
    let more: Vec<u32> = noise(200, 1).iter().map(|x| (f64::from(x + 1.0) * 2f64.powi(31)) as u32).collect();
    for &x in words.iter().chain(&more) {
        for &y in words.iter().chain(&more) {
            for (got, want) in normals(x, y).iter().zip(reference::moe::noisy_top_k::normals(x, y)) {
                let r = (-2.0 * ((f64::from(x) + 0.5) / 2f64.powi(32)).ln()).sqrt();
                assert!((f64::from(*got) - want).abs() <= 1e-6 * r + 1e-30, "{x}, {y}: {got}, expected {want}");
                assert!(got.abs() < 6.77);
            }
        }
    }
}

#[test]
fn ties_nan_and_infinities() {
    on_every_device(|d, s| {
        let quiet = NoisyTopKOptions::default().scale(0.0);
        let (inf, nan) = (f32::INFINITY, f32::NAN);
        let (weights, ids, _) = run(d, s, &[1.0, 3.0, 3.0, nan, 3.0, -inf], 6, 6, None, quiet);
        assert_eq!(ids, [1, 2, 4, 0, 5, 3]);
        assert_eq!(weights[4..], [0.0, 0.0]);
        assert!((weights[..4].iter().sum::<f32>() - 1.0).abs() < 1e-6 && weights[0] == weights[2]);
        let (weights, ids, _) = run(d, s, &[nan; 40], 40, 3, None, quiet);
        assert_eq!((weights, ids), (vec![0.0; 3], vec![0, 1, 2]));
        let (weights, ids, _) = run(d, s, &[0.0, inf, 1.0, inf], 4, 3, None, quiet);
        assert_eq!((weights, ids), (vec![0.5, 0.5, 0.0], vec![1, 3, 2]));
        // Both zeros are one.
        assert_eq!(run(d, s, &[-0.0, 0.0, -1.0], 3, 2, None, quiet).1, [0, 1]);
        // No noise is none of whatever deviation.
        for spread in [inf, -inf, nan] {
            let (weights, ids, noisy) = run(d, s, &[1.0, 2.0, 3.0], 3, 3, Some(&[spread; 3]), quiet);
            assert_eq!((ids, noisy), (vec![2, 1, 0], vec![1.0, 2.0, 3.0]));
            assert!((weights.iter().sum::<f32>() - 1.0).abs() < 1e-6 && weights[0] > weights[1], "{weights:?}");
        }
        let (weights, ids, _) = run(d, s, &[-inf; 5], 5, 2, None, quiet);
        assert_eq!((weights, ids), (vec![0.5, 0.5], vec![0, 1]));
    });
}

/// A batch can be split, repeated and replayed.
#[test]
fn the_same_numbers_again() {
    on_every_device(|d, s| {
        let (experts, top_k) = (37, 4);
        let logits = noise(10 * experts, 1);
        let options = NoisyTopKOptions::default().random(5, 100, 7);
        let all = run(d, s, &logits, experts, top_k, None, options);
        let tail = run(d, s, &logits[6 * experts..], experts, top_k, None, options.random(5, 106, 7));
        assert_eq!((&all.0[6 * top_k..], &all.1[6 * top_k..]), (&tail.0[..], &tail.1[..]));
        assert_ne!(run(d, s, &logits, experts, top_k, None, options.random(6, 100, 7)).2, all.2);
        assert_ne!(run(d, s, &logits, experts, top_k, None, options.random(5, 100, 8)).2, all.2);

        let tensor = Tensor::from_slice(d, &logits, &[10, experts]).unwrap();
        let (mut w, mut i) = (Tensor::zeros(d, &[10, top_k]).unwrap(), Tensor::zeros(d, &[10, top_k]).unwrap());
        let graph = Graph::capture(s, |s| noisy_top_k(s, &mut i, &mut w, None, &tensor, &options)).unwrap();
        graph.launch(s).unwrap();
        assert_eq!((w.to_vec().unwrap(), i.to_vec().unwrap()), (all.0, all.1));
    });
}

#[test]
fn bad_input() {
    on_every_device(|d, s| {
        let f = |shape: &[usize]| Tensor::<f32>::zeros(d, shape).unwrap();
        let i = |shape: &[usize]| Tensor::<i32>::zeros(d, shape).unwrap();
        let plain = NoisyTopKOptions::default();
        assert!(noisy_top_k(s, &mut i(&[3, 2]), &mut f(&[3, 2]), None, &f(&[3, 4]), &plain).is_ok());
        let e = noisy_top_k(s, &mut i(&[3, 2]), &mut f(&[3, 1]), None, &f(&[3, 4]), &plain);
        assert!(matches!(e, Err(Error::Shape { arg: "topk_weights", .. })), "{e:?}");
        let e = noisy_top_k(s, &mut i(&[3, 5]), &mut f(&[3, 5]), None, &f(&[3, 4]), &plain);
        assert!(matches!(e, Err(Error::Value { arg: "topk_ids", .. })), "{e:?}");
        let e = noisy_top_k(s, &mut i(&[3, 33]), &mut f(&[3, 33]), None, &f(&[3, 40]), &plain);
        assert!(matches!(e, Err(Error::Value { arg: "topk_ids", .. })), "{e:?}");
        let e = noisy_top_k(s, &mut i(&[3, 2]), &mut f(&[3, 2]), None, &f(&[3, 2049]), &plain);
        assert!(matches!(e, Err(Error::Value { arg: "logits", .. })), "{e:?}");
        let e = noisy_top_k(s, &mut i(&[3, 2]), &mut f(&[3, 2]), Some(&mut f(&[3, 3])), &f(&[3, 4]), &plain);
        assert!(matches!(e, Err(Error::Shape { arg: "noisy", .. })), "{e:?}");
        let other = f(&[2, 4]);
        let e = noisy_top_k(s, &mut i(&[3, 2]), &mut f(&[3, 2]), None, &f(&[3, 4]), &plain.noise_logits(&other));
        assert!(matches!(e, Err(Error::Shape { arg: "noise_logits", .. })), "{e:?}");
        for scale in [-1.0, f32::NAN, f32::INFINITY] {
            let e = noisy_top_k(s, &mut i(&[3, 2]), &mut f(&[3, 2]), None, &f(&[3, 4]), &plain.scale(scale));
            assert!(matches!(e, Err(Error::Value { arg: "scale", .. })), "{e:?}");
        }
    });
}
