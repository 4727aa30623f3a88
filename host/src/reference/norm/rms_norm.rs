//! Root-mean-square normalisation.

/// `x / sqrt(mean(x²) + eps) * weight` for one row.
pub fn rms_norm(x: &[f64], weight: Option<&[f64]>, eps: f64) -> Vec<f64> {
    let mean = x.iter().map(|v| v * v).sum::<f64>() / x.len() as f64;
    let scale = 1.0 / (mean + eps).sqrt();
    x.iter().enumerate().map(|(i, v)| v * scale * weight.map_or(1.0, |w| w[i])).collect()
}
