//! Normalisation and rotation of one head.

/// `head / sqrt(mean(head²) + eps) * (weight + weight_offset)`, then [`rotary`](super::rotary()).
#[allow(clippy::too_many_arguments, reason = "the numbers of a formula")]
pub fn qk_norm_rotary(
    head: &[f64],
    weight: Option<&[f64]>,
    weight_offset: f64,
    eps: f64,
    angles: &[f64],
    offset: usize,
    interleaved: bool,
    inverse: bool,
) -> Vec<f64> {
    let mean = head.iter().map(|v| v * v).sum::<f64>() / head.len() as f64;
    let scale = 1.0 / (mean + eps).sqrt();
    let weight = |i: usize| weight.map_or(1.0, |w| w[i]) + weight_offset;
    let normalised: Vec<f64> = head.iter().enumerate().map(|(i, v)| v * scale * weight(i)).collect();
    super::rotary(&normalised, angles, offset, interleaved, inverse)
}
