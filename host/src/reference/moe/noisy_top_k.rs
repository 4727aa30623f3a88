//! Noisy top-k gating.

use crate::reference::sampling::philox4x32_10;

/// Two normally distributed numbers from twice 32 bits, by Box and Muller.
pub fn normals(x: u32, y: u32) -> [f64; 2] {
    let part = |bits: u32| (f64::from(bits) + 0.5) / 2f64.powi(32);
    let (r, a) = ((-2.0 * part(x).ln()).sqrt(), std::f64::consts::TAU * part(y));
    [r * a.sin(), r * a.cos()]
}

/// The normally distributed number of an expert.
pub fn noise(seed: u64, sequence: u64, offset: u64, expert: usize) -> f64 {
    let split = |v: u64| [v as u32, (v >> 32) as u32];
    let ([c0, c1], [c2, c3]) = (split(offset.wrapping_add(expert as u64 / 4)), split(sequence));
    let [a, b, c, d] = philox4x32_10([c0, c1, c2, c3], split(seed));
    let ([p, q], [r, s]) = (normals(a, b), normals(c, d));
    [p, q, r, s][expert % 4]
}

/// The noisy logits of row `token`. `random`: seed, sequence and offset.
pub fn noisy(logits: &[f64], noise_logits: Option<&[f64]>, scale: f64, random: [u64; 3], token: usize) -> Vec<f64> {
    let [seed, sequence, offset] = random;
    let softplus = |x: f64| x.max(0.0) + (-x.abs()).exp().ln_1p();
    (0..logits.len())
        .map(|e| {
            let deviation = scale * noise_logits.map_or(1.0, |n| softplus(n[e]));
            logits[e] + deviation * noise(seed, sequence.wrapping_add(token as u64), offset, e)
        })
        .collect()
}

/// The experts with the largest values, best first, ties to the lower index, NaN last; and their softmax, in which NaN has 0.
pub fn keep_top_k(values: &[f32], top_k: usize) -> (Vec<i32>, Vec<f64>) {
    let rank = |e: &usize| if values[*e].is_nan() { (1, 0.0) } else { (0, -values[*e]) };
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|a, b| rank(a).partial_cmp(&rank(b)).expect("no NaN among the ranks").then(a.cmp(b)));
    order.truncate(top_k);
    let largest = f64::from(values[order[0]]);
    let numerator = |&e: &usize| match f64::from(values[e]) {
        x if x.is_nan() => 0.0,
        x if x == largest => 1.0,
        _ if largest.is_infinite() => 0.0,
        x => (x - largest).exp(),
    };
    let numerators: Vec<f64> = order.iter().map(numerator).collect();
    let sum: f64 = numerators.iter().sum();
    let weights = numerators.iter().map(|n| if sum > 0.0 { n / sum } else { 0.0 }).collect();
    (order.iter().map(|&e| e as i32).collect(), weights)
}
