//! Root-mean-square normalisation.

use cuda_std::Float;

/// `x / sqrt(mean(x²) + eps) * weight` for one row.
pub fn rms_norm(x: &[f64], weight: Option<&[f64]>, eps: f64) -> Vec<f64> {
    let mean = x.iter().map(|v| v * v).sum::<f64>() / x.len() as f64;
    let scale = 1.0 / (mean + eps).sqrt();
    x.iter().enumerate().map(|(i, v)| v * scale * weight.map_or(1.0, |w| w[i])).collect()
}

/// The sum of one row and its residual, added in f32 and rounded to `T`, and the normalisation of that.
pub fn fused_add_rms_norm<T: Float>(x: &[T], residual: &[T], weight: Option<&[f64]>, eps: f64) -> (Vec<f64>, Vec<T>) {
    let sum: Vec<T> = x.iter().zip(residual).map(|(x, r)| T::from_f32(x.to_f32() + r.to_f32())).collect();
    let wide: Vec<f64> = sum.iter().map(|v| v.to_f32() as f64).collect();
    (rms_norm(&wide, weight, eps), sum)
}
