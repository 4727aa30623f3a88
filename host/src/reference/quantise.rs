//! Dynamic scales of 8-bit results.

/// The least magnitude that a scale is made for.
pub const EPSILON: f64 = 1e-10;

/// The scale for `values` in a format whose largest number is `largest`: NaN has no say.
pub fn scale(values: &[f64], largest: f64) -> f64 {
    values.iter().fold(EPSILON, |a, v| a.max(v.abs())) / largest
}

/// The scales for groups of `group` values, the last one perhaps shorter.
pub fn group_scales(values: &[f64], group: usize, largest: f64) -> Vec<f64> {
    values.chunks(group).map(|g| scale(g, largest)).collect()
}
