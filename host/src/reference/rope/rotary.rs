//! Rotation of one head.

/// The head with the pairs in `offset .. offset + angles.len()` turned; `angles` is a row of the cos/sin cache, and
/// `interleaved` pairs neighbours.
pub fn rotary(head: &[f64], angles: &[f64], offset: usize, interleaved: bool, inverse: bool) -> Vec<f64> {
    let mut out = head.to_vec();
    let half = angles.len() / 2;
    for pair in 0..half {
        let (i, j) = if interleaved { (2 * pair, 2 * pair + 1) } else { (pair, half + pair) };
        let (x, y) = (head[offset + i], head[offset + j]);
        let (cos, sin) = (angles[pair], if inverse { -angles[half + pair] } else { angles[half + pair] });
        out[offset + i] = x * cos - y * sin;
        out[offset + j] = y * cos + x * sin;
    }
    out
}
