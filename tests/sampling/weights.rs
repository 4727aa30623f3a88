use warploom::kernels::sampling::weights::{
    BANNED, KEY_NEG_INF, MAX_BITS, Weights, bits_of, candidate, index_of, key, key_of, scaled, scaled_up, value,
};
use warploom_tests::noise;

#[test]
fn keys_order_as_logits_do() {
    let ascending =
        [f32::NEG_INFINITY, f32::MIN, -1.0, -f32::MIN_POSITIVE, -1e-45, 0.0, 1e-45, 1.0, 1.5, f32::MAX, f32::INFINITY];
    assert!(ascending.windows(2).all(|w| key(w[0]) < key(w[1])));
    assert!(ascending.iter().all(|&x| value(key(x)) == x));
    assert_eq!(key(-0.0), key(0.0));
    assert_eq!((key(f32::NAN), key(-f32::NAN), key(f32::NEG_INFINITY)), (KEY_NEG_INF, KEY_NEG_INF, KEY_NEG_INF));
    assert_eq!(key(f32::from_bits(BANNED)), 0);
}

#[test]
fn candidates_prefer_larger_keys_then_lower_indices() {
    let c = |x: f32, i| candidate(key(x), i);
    assert!(c(2.0, 9) > c(1.0, 3) && c(1.0, 3) > c(1.0, 4) && c(f32::NEG_INFINITY, u32::MAX - 1) > 0);
    assert_eq!((key_of(c(1.5, 77)), index_of(c(1.5, 77))), (key(1.5), 77));
}

#[test]
fn weights_are_exponentials() {
    for temperature in [0.01f32, 0.5, 1.0, 3.0, 1e6] {
        let weights = Weights { max_key: key(7.25), scale: std::f32::consts::LOG2_E / temperature, bits: MAX_BITS };
        for x in noise(2000, 3).into_iter().map(|x| 7.25 - 40.0 * (x + 1.0)) {
            let want = ((f64::from(x) - 7.25) / f64::from(temperature)).exp();
            let got = weights.of(key(x)) as f64 / (1u64 << MAX_BITS) as f64;
            assert!((got - want).abs() <= 4e-6 * want + 2f64.powi(-(MAX_BITS as i32)), "{x}: {got}, expected {want}");
        }
        assert_eq!(weights.of(key(7.25)), 1 << MAX_BITS);
        assert_eq!((weights.of(KEY_NEG_INF), weights.of(0)), (0, 0));
    }
    // Whatever the temperature, equals of the largest weigh 1 and nothing else more.
    for scale in [0.0, f32::INFINITY] {
        let weights = Weights { max_key: key(f32::INFINITY), scale, bits: MAX_BITS };
        assert_eq!(weights.of(key(f32::INFINITY)), 1 << MAX_BITS);
        assert!(weights.of(key(3.0)) == 0);
    }
    // Nor does it matter that f32 does not hold a difference.
    for (scale, want) in [(0.0, 1.0), (std::f32::consts::LOG2_E / f32::MAX, (-2f64).exp())] {
        let weights = Weights { max_key: key(f32::MAX), scale, bits: MAX_BITS };
        let got = weights.of(key(f32::MIN)) as f64 / (1u64 << MAX_BITS) as f64;
        assert!((got - want).abs() <= 1e-6, "{got}, expected {want}");
    }
}

#[test]
fn sums_fit() {
    for vocab in [1, 1000, (1 << 23) - 1, 1 << 23, 1 << 24, (1 << 31) - 1] {
        assert!((vocab as u64) << bits_of(vocab) < 1 << 63, "{vocab}");
    }
    assert_eq!(bits_of(256_000), MAX_BITS);
}

#[test]
fn scaling_is_exact() {
    let totals = [1u64, 2, 0xffff_ffff, 0x1_0000_0000, (1 << 39) + 12345, (1 << 63) - 1];
    for total in totals {
        for x in [0u32, 1, 0x8000_0000, 0xffff_ffff, 123_456_789] {
            let exact = u128::from(total) * u128::from(x);
            assert_eq!(u128::from(scaled(total, x)), exact >> 32);
            assert_eq!(u128::from(scaled_up(total, x)), exact.div_ceil(1 << 32));
        }
    }
}
