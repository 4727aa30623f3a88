//! What 8-bit tensors with scales stand for.

/// `values` `[rows, k]` times `scales`, one for each row and `group` columns: `[rows / block, ceil(k / group)]`, where `block` rows share theirs.
pub fn dequantise(values: &[f64], scales: &[f64], k: usize, block: usize, group: usize) -> Vec<f64> {
    let groups = k.div_ceil(group);
    let scale = |i: usize| scales[i / k / block * groups + i % k / group];
    values.iter().enumerate().map(|(i, v)| v * scale(i)).collect()
}
