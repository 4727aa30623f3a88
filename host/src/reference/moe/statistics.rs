//! Routing statistics.

/// What [`statistics`] gives.
#[derive(Clone, Debug, PartialEq)]
pub struct Statistics {
    /// Pairs of each expert.
    pub loads: Vec<i32>,
    /// Sum of their weights.
    pub importance: Vec<f64>,
    /// Mean of the softmax.
    pub probabilities: Vec<f64>,
    /// As [`StatisticsOutput::summary`](crate::moe::StatisticsOutput::summary).
    pub summary: [f64; 5],
}

/// Standard deviation of the population over the mean, 0 if that is 0.
fn variation(values: impl Iterator<Item = f64> + Clone) -> f64 {
    let n = values.clone().count() as f64;
    let mean = values.clone().sum::<f64>() / n;
    let variance = values.map(|v| (v - mean) * (v - mean)).sum::<f64>() / n;
    if mean == 0.0 { 0.0 } else { variance.sqrt() / mean.abs() }
}

/// `logits`: `[tokens, experts]`; `ids`, `weights`: `[tokens, top_k]`.
pub fn statistics(logits: &[f64], experts: usize, ids: &[i32], weights: &[f32]) -> Statistics {
    let tokens = logits.len() / experts;
    let (mut loads, mut importance) = (vec![0; experts], vec![0.0; experts]);
    for (&id, &weight) in ids.iter().zip(weights) {
        if let Some(load) = usize::try_from(id).ok().and_then(|id| loads.get_mut(id)) {
            *load += 1;
            importance[id as usize] += f64::from(weight);
        }
    }
    let (mut probabilities, mut z) = (vec![0.0; experts], 0.0);
    for row in logits.chunks(experts) {
        let largest = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = row.iter().map(|x| (x - largest).exp()).sum();
        for (p, x) in probabilities.iter_mut().zip(row) {
            *p += (x - largest).exp() / sum / tokens as f64;
        }
        z += (largest + sum.ln()).powi(2) / tokens as f64;
    }
    let pairs: f64 = loads.iter().map(|&l| f64::from(l)).sum();
    let product: f64 = loads.iter().zip(&probabilities).map(|(&l, p)| f64::from(l) * p).sum();
    let balance = if pairs == 0.0 { 0.0 } else { experts as f64 * product / pairs };
    let cv = variation(importance.iter().copied());
    let summary = [variation(loads.iter().map(|&l| f64::from(l))), cv, cv * cv, balance, z];
    Statistics { loads, importance, probabilities, summary }
}
