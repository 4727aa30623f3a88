//! The gate of a mixture of experts, as [`moe::gate`](mod@crate::moe::gate) documents it.
//!
//! Scores are computed in `f64` and rounded to `f32` once. From there on the choice is defined by `f32` arithmetic (one
//! addition of the bias, one of two scores for a group), so that ties are ties. Weights come from the scores in `f64`.

use crate::moe::{GateOptions, Scoring};
use std::cmp::Ordering;

/// What the gate gives for one token.
#[derive(Clone, Debug, PartialEq)]
pub struct Routed {
    /// Routed experts by descending biased score, then shared experts.
    pub ids: Vec<usize>,
    /// The weight of each.
    pub weights: Vec<f64>,
}

/// The score of each expert; NaN where the logit is.
pub fn scores(logits: &[f64], scoring: Scoring) -> Vec<f64> {
    // The kernels know no exponentials below that.
    let least = if scoring == Scoring::SqrtSoftplus { -126.0 } else { -126.5 };
    let exp = |y: f64| if y < least * std::f64::consts::LN_2 { 0.0 } else { y.exp() };
    let largest = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let numerator = |x: f64| match (x == largest, largest.is_infinite()) {
        (true, _) if largest > f64::NEG_INFINITY => 1.0,
        (_, true) if !x.is_nan() => 0.0,
        _ => exp(x - largest),
    };
    let sum: f64 = logits.iter().map(|&x| numerator(x)).filter(|e| !e.is_nan()).sum();
    let score = |&x: &f64| match scoring {
        _ if x.is_nan() => f64::NAN,
        Scoring::Sigmoid => {
            let e = exp(-x.abs());
            if x < 0.0 { e / (1.0 + e) } else { 1.0 / (1.0 + e) }
        }
        Scoring::Softmax if sum == 0.0 => 0.0,
        Scoring::Softmax => numerator(x) / sum,
        Scoring::SqrtSoftplus => (x.clamp(0.0, f32::MAX as f64) + exp(-x.abs()).ln_1p()).sqrt(),
    };
    logits.iter().map(score).collect()
}

/// Descending, NaN as -inf, ties by index.
fn descending(values: &[f32]) -> Vec<usize> {
    let rank = |i: usize| if values[i].is_nan() { f32::NEG_INFINITY } else { values[i] };
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|&a, &b| rank(b).partial_cmp(&rank(a)).unwrap_or(Ordering::Equal).then(a.cmp(&b)));
    order
}

/// The sum of the two largest, NaN as -inf.
fn worth(biased: &[f32]) -> f32 {
    let order = descending(biased);
    let value = |i: usize| if biased[i].is_nan() { f32::NEG_INFINITY } else { biased[i] };
    match order[..] {
        [only] => value(only),
        _ => value(order[0]) + value(order[1]),
    }
}

/// The `topk` best experts for one token, and the shared ones. Of `options` only the numbers are looked at, not the
/// tensors: the bias comes separately, and there is no padding and no map.
pub fn gate(logits: &[f64], bias: Option<&[f64]>, topk: usize, options: &GateOptions<'_>) -> Routed {
    let experts = logits.len();
    let scores = scores(logits, options.scoring);
    let biased: Vec<f32> = (0..experts).map(|e| scores[e] as f32 + bias.map_or(0.0, |b| b[e] as f32)).collect();

    let size = experts / options.groups;
    let worths: Vec<f32> = biased.chunks(size).map(worth).collect();
    let kept = &descending(&worths)[..options.topk_group];
    let mut ids: Vec<usize> =
        descending(&biased).into_iter().filter(|e| kept.contains(&(e / size))).take(topk).collect();

    let mut weights: Vec<f64> = ids.iter().map(|&e| if scores[e].is_nan() { 0.0 } else { scores[e] }).collect();
    if options.renormalize {
        let sum: f64 = weights.iter().sum();
        for w in &mut weights {
            *w = if sum > 0.0 { *w / sum } else { 0.0 };
        }
    }
    for w in &mut weights {
        *w *= options.routed_scale() as f64;
    }

    ids.extend((0..options.shared_experts).map(|i| experts + i));
    weights.resize(ids.len(), options.shared_weight() as f64);
    Routed { ids, weights }
}
