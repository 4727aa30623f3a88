//! The cos/sin cache against numbers from elsewhere and against what each scaling promises.

use cuda_std::Float;
use std::f64::consts::TAU;
use warploom::rope::{self, Scaling};
use warploom::{Device, Error, bf16, f16};
use warploom_tests::assert_close;

fn plain(rot_dim: usize, theta: f64) -> Vec<f64> {
    (0..rot_dim / 2).map(|i| 1.0 / theta.powf(2.0 * i as f64 / rot_dim as f64)).collect()
}

fn check_close(got: &[f64], want: &[f64]) {
    assert_eq!(got.len(), want.len());
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        assert!((g - w).abs() <= 1e-12 * w.abs(), "pair {i}: {g}, expected {w}");
    }
}

#[test]
fn rows_hold_cosines_and_then_sines() {
    fn check<C: Float>() {
        let (positions, rot_dim, theta) = (200, 20, 10000.0);
        for (scaling, factor) in [(Scaling::None, 1.0), (Scaling::yarn(4.0, 32), 0.1 * 4f64.ln() + 1.0)] {
            let cache = rope::cache::<C>(&Device::simt(), positions, rot_dim, theta, scaling).unwrap();
            assert_eq!(cache.shape(), [positions, rot_dim]);
            let frequencies = scaling.frequencies(rot_dim, theta).unwrap();
            let want: Vec<f64> = (0..positions)
                .flat_map(|p| {
                    let angle = |f: &f64| p as f64 * f;
                    let cos: Vec<f64> = frequencies.iter().map(|f| factor * angle(f).cos()).collect();
                    cos.into_iter().chain(frequencies.iter().map(move |f| factor * angle(f).sin())).collect::<Vec<_>>()
                })
                .collect();
            assert_close(&cache.to_vec().unwrap(), &want, 0.0, 0.0);
        }
    }
    check::<f32>();
    check::<f16>();
    check::<bf16>();
}

#[test]
fn rounds_once() {
    // Every element is the nearest number of its type, not the nearest to the nearest f32.
    let cache = rope::cache::<bf16>(&Device::simt(), 3000, 2, 10000.0, Scaling::None).unwrap().to_vec().unwrap();
    for (p, row) in cache.chunks(2).enumerate() {
        for (got, want) in [(row[0], (p as f64).cos()), (row[1], (p as f64).sin())] {
            let error = (got.to_f64() - want).abs();
            for other in [got.to_bits().wrapping_add(1), got.to_bits().wrapping_sub(1)] {
                let other = (bf16::from_bits(other).to_f64() - want).abs();
                assert!(other.is_nan() || error <= other, "position {p}: {got}, expected {want}");
            }
        }
    }
}

#[test]
fn plain_linear_and_ntk() {
    let want = plain(128, 10000.0);
    check_close(&Scaling::None.frequencies(128, 10000.0).unwrap(), &want);
    check_close(&Scaling::Linear { factor: 1.0 }.frequencies(128, 10000.0).unwrap(), &want);
    let quarter: Vec<f64> = want.iter().map(|f| f / 4.0).collect();
    check_close(&Scaling::Linear { factor: 4.0 }.frequencies(128, 10000.0).unwrap(), &quarter);
    let ntk = Scaling::Ntk { factor: 4.0 }.frequencies(128, 10000.0).unwrap();
    assert_eq!(ntk[0], 1.0);
    assert!((ntk[63] * 4.0 / want[63] - 1.0).abs() < 1e-12);
    assert!(ntk.iter().zip(&want).skip(1).all(|(a, b)| a < b));
}

/// The three ranges, written as Meta's code has them.
#[test]
fn llama3() {
    let (factor, low, high, length) = (8.0, 1.0, 4.0, 8192.0);
    let want: Vec<f64> = plain(128, 500000.0)
        .into_iter()
        .map(|f| {
            let wavelength = TAU / f;
            if wavelength < length / high {
                f
            } else if wavelength > length / low {
                f / factor
            } else {
                let smooth = (length / wavelength - low) / (high - low);
                (1.0 - smooth) * f / factor + smooth * f
            }
        })
        .collect();
    let got = Scaling::llama3(8.0).frequencies(128, 500000.0).unwrap();
    check_close(&got, &want);
    // The fastest pair stays; the slowest, 500000^(-126 / 128), is divided by 8.
    assert_eq!(got[0], 1.0);
    assert!((got[63] - 3.0689e-07).abs() < 1e-10, "{}", got[63]);
    assert_eq!(Scaling::llama3(8.0).attention_factor(), 1.0);
}

#[test]
fn yarn() {
    // DeepSeek-V3: rot_dim 64, theta 10000, factor 40, 4096 trained. Its bounds are pairs 10 and 23.
    let got = Scaling::yarn(40.0, 4096).frequencies(64, 10000.0).unwrap();
    let original = plain(64, 10000.0);
    let want: Vec<f64> = original
        .iter()
        .enumerate()
        .map(|(i, f)| {
            let ramp = ((i as f64 - 10.0) / 13.0).clamp(0.0, 1.0);
            f / 40.0 * ramp + f * (1.0 - ramp)
        })
        .collect();
    check_close(&got, &want);
    assert!((Scaling::yarn(40.0, 4096).attention_factor() - 1.368_887_945).abs() < 1e-9);
    let fixed = Scaling::Yarn {
        factor: 40.0,
        original_max_position: 4096,
        beta_fast: 32.0,
        beta_slow: 1.0,
        attention_factor: Some(1.0),
        truncate: true,
    };
    assert_eq!(fixed.attention_factor(), 1.0);
    check_close(&Scaling::yarn(1.0, 4096).frequencies(64, 10000.0).unwrap(), &original);
    // Both bounds at the same pair: a step, no division by zero.
    assert!(Scaling::yarn(2.0, 1).frequencies(8, 10000.0).unwrap().iter().all(|f| f.is_finite()));
}

/// gpt-oss: bounds between pairs, from its published configuration; figures by hand, of the formula with bounds that are not rounded.
#[test]
fn yarn_between_pairs() {
    let gpt_oss = |truncate| Scaling::Yarn {
        factor: 32.0,
        original_max_position: 4096,
        beta_fast: 32.0,
        beta_slow: 1.0,
        attention_factor: None,
        truncate,
    };
    let got = gpt_oss(false).frequencies(64, 150_000.0).unwrap();
    let pair = |turns: f64| 64.0 * (4096.0 / (turns * TAU)).ln() / (2.0 * 150_000f64.ln());
    let (first, last) = (pair(32.0), pair(1.0));
    assert!((first - 8.0928).abs() < 1e-4 && (last - 17.3980).abs() < 1e-4);
    let want: Vec<f64> = plain(64, 150_000.0)
        .iter()
        .enumerate()
        .map(|(i, f)| {
            let ramp = ((i as f64 - first) / (last - first)).clamp(0.0, 1.0);
            f / 32.0 * ramp + f * (1.0 - ramp)
        })
        .collect();
    check_close(&got, &want);
    assert!((got[12] - 0.006_795).abs() < 1e-6);
    assert!((gpt_oss(true).frequencies(64, 150_000.0).unwrap()[12] - 0.007_016).abs() < 1e-6);
}

#[test]
fn bounds_that_no_pair_reaches() {
    for tiny in [f64::MIN_POSITIVE, 1e-300, 1e-30] {
        let yarn = Scaling::Yarn {
            factor: 4.0,
            original_max_position: 4096,
            beta_fast: tiny,
            beta_slow: tiny,
            attention_factor: None,
            truncate: true,
        };
        let slow: Vec<f64> = Scaling::None.frequencies(8, 1e4).unwrap().iter().map(|f| f / 4.0).collect();
        assert_eq!(yarn.frequencies(8, 1e4).unwrap(), slow);
    }
}

#[test]
fn refuses_numbers_that_make_no_sense() {
    let bad = |rot_dim, theta, scaling: Scaling, name: &str| match scaling.frequencies(rot_dim, theta) {
        Err(Error::Value { arg, .. }) => assert_eq!(arg, name),
        other => panic!("{other:?}"),
    };
    bad(7, 1e4, Scaling::None, "rot_dim");
    bad(0, 1e4, Scaling::None, "rot_dim");
    bad(rope::cache::MAX_ROT_DIM + 2, 1e4, Scaling::None, "rot_dim");
    bad(usize::MAX - 1, 1e4, Scaling::None, "rot_dim");
    bad(64, 1.0, Scaling::None, "theta");
    bad(64, f64::NAN, Scaling::None, "theta");
    bad(2, 1e4, Scaling::Ntk { factor: 2.0 }, "rot_dim");
    bad(64, 1e4, Scaling::Linear { factor: 0.0 }, "scaling");
    bad(64, 1e4, Scaling::Linear { factor: f64::INFINITY }, "scaling");
    bad(64, 1e4, Scaling::yarn(4.0, 0), "scaling");
    let (original_max_position, factor) = (8192, 8.0);
    let swapped = Scaling::Llama3 { factor, low_freq_factor: 4.0, high_freq_factor: 1.0, original_max_position };
    bad(64, 1e4, swapped, "scaling");
    let device = Device::simt();
    assert!(rope::cache::<f32>(&device, 0, 64, 1e4, Scaling::None).unwrap().is_empty());
    for (positions, rot_dim) in [(1 << 62, 4), (1 << 60, 64), (usize::MAX, 2)] {
        let error = rope::cache::<f32>(&device, positions, rot_dim, 1e4, Scaling::None).map(|_| ()).unwrap_err();
        assert!(matches!(error, Error::Value { arg: "max_positions", .. }), "{error}");
    }
    let error = rope::cache::<f32>(&device, 1 << 48, 2, 1e4, Scaling::None).map(|_| ()).unwrap_err();
    assert!(matches!(error, Error::OutOfMemory { .. }), "{error}");
}
