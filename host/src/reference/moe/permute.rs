//! Permuted rows back in the order of tokens.

/// `y`: `[places, n]`; `positions` and `weights`: `[tokens, slots]`; `pass`: `[tokens, n]`, for tokens without a position.
pub fn unpermute(y: &[f64], positions: &[i32], weights: &[f64], pass: &[f64], slots: usize, n: usize) -> Vec<f64> {
    let mut out = vec![];
    for (token, pass) in pass.chunks(n).enumerate() {
        let places: Vec<_> = (token * slots..(token + 1) * slots)
            .filter_map(|i| Some((usize::try_from(positions[i]).ok()?, weights[i])))
            .collect();
        for c in 0..n {
            let sum: f64 = places.iter().map(|&(place, weight)| weight * y[place * n + c]).sum();
            out.push(if places.is_empty() { pass[c] } else { sum });
        }
    }
    out
}
