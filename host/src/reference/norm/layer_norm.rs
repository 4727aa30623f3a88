//! Layer normalisation.

/// `(x - mean) / sqrt(mean((x - mean)²) + eps) * weight + bias` for one row.
pub fn layer_norm(x: &[f64], weight: Option<&[f64]>, bias: Option<&[f64]>, eps: f64) -> Vec<f64> {
    let n = x.len() as f64;
    let mean = x.iter().sum::<f64>() / n;
    let scale = 1.0 / (x.iter().map(|v| (v - mean) * (v - mean)).sum::<f64>() / n + eps).sqrt();
    let at = |v: Option<&[f64]>, i: usize, absent| v.map_or(absent, |v| v[i]);
    x.iter().enumerate().map(|(i, v)| (v - mean) * scale * at(weight, i, 1.0) + at(bias, i, 0.0)).collect()
}
