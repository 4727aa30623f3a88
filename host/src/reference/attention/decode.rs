//! Attention of one query vector over the keys and values it sees.

/// A query and what shapes its scores.
#[derive(Clone, Copy, Debug)]
pub struct Query<'a> {
    /// The query vector.
    pub q: &'a [f64],
    /// Multiplies the scores.
    pub scale: f64,
    /// Scores become `cap · tanh(score / cap)`; 0 for none.
    pub soft_cap: f64,
    /// Added for each key of distance to the query's own position: `slope · (key - position)`.
    pub slope: f64,
    /// A score without a key that takes part in the softmax.
    pub sink: Option<f64>,
    /// How many of the latest keys are seen; 0 for all.
    pub window: usize,
}

/// The result, and the logarithm of the softmax's denominator.
#[derive(Clone, Debug, PartialEq)]
pub struct Decoded {
    /// Weighted mean of the values.
    pub out: Vec<f64>,
    /// `ln Σ exp(score)`, the sink among them; -inf without any.
    pub lse: f64,
}

/// `softmax(scale · q · Kᵀ) · V` over the keys and values that are seen: `keys[i]` and `values[i]` belong to position `i`,
/// and the query is at the last position.
pub fn decode(query: Query<'_>, keys: &[Vec<f64>], values: &[Vec<f64>]) -> Decoded {
    let first = if query.window == 0 { 0 } else { keys.len().saturating_sub(query.window) };
    let position = keys.len() as f64 - 1.0;
    let scores: Vec<f64> = (first..keys.len())
        .map(|i| {
            let score = query.scale * keys[i].iter().zip(query.q).map(|(k, q)| k * q).sum::<f64>();
            let score = if query.soft_cap > 0.0 { query.soft_cap * (score / query.soft_cap).tanh() } else { score };
            score + query.slope * (i as f64 - position)
        })
        .collect();
    let top = scores.iter().copied().chain(query.sink).fold(f64::NEG_INFINITY, f64::max);
    let dim = query.q.len();
    if top == f64::NEG_INFINITY {
        return Decoded { out: vec![0.0; dim], lse: f64::NEG_INFINITY };
    }
    let total: f64 = scores.iter().copied().chain(query.sink).map(|s| (s - top).exp()).sum();
    let mut out = vec![0.0; dim];
    for (score, value) in scores.iter().zip(&values[first..]) {
        let p = (score - top).exp() / total;
        out.iter_mut().zip(value).for_each(|(o, v)| *o += p * v);
    }
    Decoded { out, lse: top + total.ln() }
}
