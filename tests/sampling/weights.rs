use warploom::kernels::sampling::weights::{
    Adder, BANNED, KEY_NEG_INF, MAX_BITS, Weights, bits_of, candidate, index_of, key, key_of, scaled, scaled_up, value,
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

/// One by one and in sums of as many as there may be: the same bits, of rows of any magnitude, also where a difference is beyond f32, is no number, or of subnormals.
#[test]
fn weights_are_added_up_exactly() {
    for (i, max) in [0.0, 7.25, -3e-40, 1e-45, 12_345.678, -1e30, f32::MAX].into_iter().enumerate() {
        for (j, scale) in [0.0, 1e-38, 0.01, std::f32::consts::LOG2_E, 300.0, 1e38].into_iter().enumerate() {
            for bits in [31, 33, MAX_BITS] {
                let weights = Weights { max_key: key(max), scale, bits };
                assert!(weights.is_finite());
                // Differences from those that come to a weight of 1 to those that come to none, and what is beyond.
                let unit = if scale > 0.0 { 1.0 / scale } else { 1.0 };
                let spread = noise(1015, (100 * i + 10 * j) as u64 + u64::from(bits));
                let mut x: Vec<f32> = spread.into_iter().map(|x| max - (x + 1.0) * 22.0 * unit).collect();
                x.extend([
                    max,
                    max,
                    max.next_down(),
                    f32::MIN,
                    f32::NEG_INFINITY,
                    f32::NAN,
                    f32::from_bits(BANNED),
                    (-0.0f32).min(max),
                ]);
                assert_eq!(x.len(), Adder::MOST as usize);
                let adder = Adder::new(weights);
                let (mut sums, mut want) = ([0; 2], 0);
                for &x in &x {
                    let (mut one, weight) = ([0; 2], weights.of_value(x));
                    adder.add(&mut one, x);
                    assert_eq!(adder.total(one, 1), weight, "{x} of {max}, scale {scale}, {bits} bits");
                    adder.add(&mut sums, x);
                    want += weight;
                }
                assert_eq!(adder.total(sums, Adder::MOST), want, "{max}, scale {scale}, {bits} bits");
            }
        }
    }
    // As many as there may be of the largest.
    let weights = Weights { max_key: key(1.5), scale: 1.0, bits: MAX_BITS };
    let (adder, mut sums) = (Adder::new(weights), [0; 2]);
    (0..Adder::MOST).for_each(|_| adder.add(&mut sums, 1.5));
    assert_eq!(adder.total(sums, Adder::MOST), u64::from(Adder::MOST) << MAX_BITS);
    for (max, scale) in [(f32::INFINITY, 1.0), (f32::NEG_INFINITY, 1.0), (1.0, f32::INFINITY), (1.0, f32::MAX)] {
        assert!(!Weights { max_key: key(max), scale, bits: MAX_BITS }.is_finite());
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
