//! The accurate functions against `f64`, and the corners of their domains. What the SIMT device computes here is what
//! a GPU computes, bit for bit; the conformance kernels compare the two.

use cuda_std::float;

/// Distance of `got` from `want` in units of the last place of `want`.
fn ulps(got: f32, want: f64) -> f64 {
    let rounded = want as f32;
    if got.is_nan() && want.is_nan() || got == rounded {
        return 0.0;
    }
    let exponent = (want.abs().log2().floor() as i32).clamp(-126, 127);
    (got as f64 - want).abs() / 2f64.powi(exponent - 23)
}

/// Between the numbers that are looked at, of each sign: a prime, and not so large that a function's worst arguments are stepped over.
const STRIDE: usize = 997;

/// The worst of a stride through every `f32` in `lo ..= hi` (by bit pattern) and of its negatives if `both`.
fn worst(name: &str, f: fn(f32) -> f32, exact: fn(f64) -> f64, lo: f32, hi: f32, both: bool) -> f64 {
    let mut worst = (0.0, 0.0);
    for bits in (lo.to_bits()..=hi.to_bits()).step_by(STRIDE) {
        for x in [f32::from_bits(bits), -f32::from_bits(bits)].into_iter().take(1 + both as usize) {
            let e = ulps(f(x), exact(x as f64));
            if e > worst.0 {
                worst = (e, x);
            }
        }
    }
    println!("{name}: {:.3} ulp at {:e}", worst.0, worst.1);
    worst.0
}

/// The error function by its Taylor series or continued fraction, in `f64`.
fn erf(x: f64) -> f64 {
    let a = x.abs();
    let value = if a < 2.5 {
        let (mut term, mut sum, mut n) = (a, a, 0.0);
        while term.abs() > 1e-18 * sum {
            n += 1.0;
            term *= -a * a / n;
            sum += term / (2.0 * n + 1.0);
        }
        sum * std::f64::consts::FRAC_2_SQRT_PI
    } else {
        let fraction = (1..80).rev().fold(a, |f, k| a + k as f64 / 2.0 / f);
        1.0 - (-a * a).exp() / fraction / std::f64::consts::PI.sqrt()
    };
    value.copysign(x)
}

#[test]
fn as_accurate_as_it_says() {
    let tiny = f32::from_bits(1);
    let max = f32::MAX;
    let bounds = [
        worst("exp", float::exp, f64::exp, tiny, 88.72, true),
        worst("exp2", float::exp2, f64::exp2, tiny, 127.99, true),
        worst("log", float::log, f64::ln, tiny, max, false),
        worst("log2", float::log2, f64::log2, tiny, max, false),
        worst("log1p", float::log1p, f64::ln_1p, tiny, 0.999, true),
        worst("log1p", float::log1p, f64::ln_1p, 0.999, max, false),
        worst("tanh", float::tanh, f64::tanh, tiny, 20.0, true),
        worst("erf", float::erf, erf, 1e-30, 10.0, true),
        worst("sin", float::sin, f64::sin, tiny, 1e7, true),
        worst("cos", float::cos, f64::cos, tiny, 1e7, true),
        worst("sin, large", float::sin, f64::sin, 1e7, max, true),
        worst("cos, large", float::cos, f64::cos, 1e7, max, true),
        worst("sqrt", float::sqrt, f64::sqrt, tiny, max, false) + 0.99,
        worst("rsqrt", float::rsqrt, |x| 1.0 / x.sqrt(), tiny, max, false),
    ];
    assert!(bounds.iter().all(|&b| b <= 1.5), "{bounds:?}");
    let sigmoid = worst("sigmoid", float::sigmoid, |x| 1.0 / (1.0 + (-x).exp()), tiny, 88.0, true);
    assert!(sigmoid <= 2.5, "{sigmoid}");
}

#[test]
fn edges() {
    let (inf, nan) = (f32::INFINITY, f32::NAN);
    for f in [
        float::exp,
        float::exp2,
        float::log,
        float::log2,
        float::log1p,
        float::tanh,
        float::sigmoid,
        float::erf,
        float::sin,
        float::cos,
        float::sqrt,
        float::rsqrt,
        float::recip,
    ] {
        assert!(f(nan).is_nan());
    }
    assert_eq!(
        [float::exp(inf), float::exp(-inf), float::exp(0.0), float::exp(1000.0), float::exp(-1000.0)],
        [inf, 0.0, 1.0, inf, 0.0]
    );
    assert_eq!(
        [float::exp2(inf), float::exp2(-inf), float::exp2(-149.0), float::exp2(3.0)],
        [inf, 0.0, f32::from_bits(1), 8.0]
    );
    assert_eq!([float::log(inf), float::log(0.0), float::log(-0.0), float::log(1.0)], [inf, -inf, -inf, 0.0]);
    assert!(float::log(-1.0).is_nan() && float::log2(-inf).is_nan() && float::log1p(-1.5).is_nan());
    assert_eq!([float::log1p(-1.0), float::log1p(inf)], [-inf, inf]);
    for e in -149..128 {
        assert_eq!(float::log2(2f64.powi(e) as f32), e as f32);
    }
    assert_eq!(
        [float::tanh(inf), float::tanh(-inf), float::tanh(-0.0).to_bits() as f32],
        [1.0, -1.0, 0x8000_0000u32 as f32]
    );
    assert_eq!([float::sigmoid(inf), float::sigmoid(-inf), float::sigmoid(0.0)], [1.0, 0.0, 0.5]);
    assert_eq!([float::erf(inf), float::erf(-inf), float::erf(4.0)], [1.0, -1.0, 1.0]);
    assert!(float::sin(inf).is_nan() && float::cos(-inf).is_nan());
}

#[test]
fn extremes_choose_numbers() {
    let bits = |x: f32| x.to_bits();
    for (a, b) in [(0.0, -0.0), (-0.0, 0.0)] {
        assert_eq!((bits(float::max(a, b)), bits(float::min(a, b))), (bits(0.0), bits(-0.0)));
    }
    for (a, b) in [(f32::NAN, 3.0), (3.0, f32::NAN)] {
        assert_eq!((float::max(a, b), float::min(a, b)), (3.0, 3.0));
        assert!(float::max_propagate(a, b).is_nan());
    }
    assert_eq!((float::max(1.0, 2.0), float::min(1.0, 2.0)), (2.0, 1.0));
}

#[test]
fn sortable_keys() {
    let values =
        [f32::NEG_INFINITY, -f32::MAX, -1.0, -f32::from_bits(1), -0.0, 0.0, f32::from_bits(1), 1.0, f32::INFINITY];
    for pair in values.windows(2) {
        assert!(float::sortable(pair[0]) < float::sortable(pair[1]));
    }
    for v in values {
        assert_eq!(float::from_sortable(float::sortable(v)).to_bits(), v.to_bits());
        let half = half::bf16::from_f32(v).to_bits();
        assert_eq!(float::sortable_16(half, 0x7f80) as u32, float::sortable(f32::from_bits((half as u32) << 16)) >> 16);
    }
    for nan in [0x7fc0_0000, 0x7f80_0001, 0xffc0_0000, 0xff80_0001, u32::MAX] {
        assert_eq!(float::sortable(f32::from_bits(nan)), 0);
    }
    assert!(float::from_sortable(0).is_nan() && float::sortable(f32::NEG_INFINITY) > 0);
    assert_eq!(float::sortable_16(0x7fc0, 0x7f80), 0);
}
