//! Merge of partial attention results.

use super::Decoded;

/// The attention over the union of what the parts saw: each part's output counts by its softmax's denominator.
pub fn merge(parts: &[Decoded]) -> Decoded {
    let top = parts.iter().map(|p| p.lse).fold(f64::NEG_INFINITY, f64::max);
    let dim = parts.first().map_or(0, |p| p.out.len());
    if top == f64::NEG_INFINITY {
        return Decoded { out: vec![0.0; dim], lse: top };
    }
    let total: f64 = parts.iter().map(|p| (p.lse - top).exp()).sum();
    let mut out = vec![0.0; dim];
    for part in parts.iter().filter(|p| p.lse > f64::NEG_INFINITY) {
        let weight = (part.lse - top).exp() / total;
        out.iter_mut().zip(&part.out).for_each(|(o, v)| *o += weight * v);
    }
    Decoded { out, lse: top + total.ln() }
}
