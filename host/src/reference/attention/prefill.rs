//! Attention of query vectors at given positions.

use super::{Decoded, Query};

/// `softmax(scale · q · Kᵀ + bias) · V` of a query at `position` over the keys that it sees: those up to its own position if
/// attention is `causal`, otherwise all; of these the last `query.window`, if that is not 0. `keys[i]` and `values[i]` belong
/// to position `i`.
pub fn prefill(query: Query<'_>, position: i64, causal: bool, keys: &[Vec<f64>], values: &[Vec<f64>]) -> Decoded {
    let end = if causal { (position + 1).clamp(0, keys.len() as i64) as usize } else { keys.len() };
    let start = if query.window == 0 { 0 } else { end.saturating_sub(query.window) };
    let scores: Vec<f64> = (start..end)
        .map(|i| {
            let score = query.scale * keys[i].iter().zip(query.q).map(|(k, q)| k * q).sum::<f64>();
            let score = if query.soft_cap > 0.0 { query.soft_cap * (score / query.soft_cap).tanh() } else { score };
            score + query.slope * (i as i64 - position) as f64
        })
        .collect();
    let mut out = vec![0.0; query.q.len()];
    let top = scores.iter().copied().chain(query.sink).fold(f64::NEG_INFINITY, f64::max);
    if top == f64::NEG_INFINITY {
        return Decoded { out, lse: f64::NEG_INFINITY };
    }
    let total: f64 = scores.iter().copied().chain(query.sink).map(|s| (s - top).exp()).sum();
    for (score, value) in scores.iter().zip(&values[start..end]) {
        let p = (score - top).exp() / total;
        out.iter_mut().zip(value).for_each(|(o, v)| *o += p * v);
    }
    Decoded { out, lse: top + total.ln() }
}
