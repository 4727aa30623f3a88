//! Gated activations.

use super::plain::{gelu, gelu_tanh, swish};
use crate::activation::Gated;

/// `function(gate) * up` for each pair.
pub fn gated(function: Gated, gate: &[f64], up: &[f64]) -> Vec<f64> {
    let at_most = |x: f64, limit: f64| if x > limit { limit } else { x };
    let clamp = |x: f64, limit: f64| if x < -limit { -limit } else { at_most(x, limit) };
    gate.iter()
        .zip(up)
        .map(|(&gate, &up)| match function {
            Gated::SiluAndMul => swish(gate, 1.0) * up,
            Gated::GeluAndMul => gelu(gate) * up,
            Gated::GeluTanhAndMul => gelu_tanh(gate) * up,
            Gated::FatreluAndMul { threshold } => (if gate <= threshold as f64 { 0.0 } else { gate }) * up,
            Gated::SiluAndMulClamp { limit } => swish(at_most(gate, limit as f64), 1.0) * clamp(up, limit as f64),
            Gated::SwigluOai { alpha, limit } => {
                swish(at_most(gate, limit as f64), alpha as f64) * (clamp(up, limit as f64) + 1.0)
            }
        })
        .collect()
}

/// Gate and value of one row of input, as `function` has them in memory.
pub fn split(function: Gated, row: &[f64]) -> (Vec<f64>, Vec<f64>) {
    if function.is_interleaved() {
        row.chunks(2).map(|p| (p[0], p[1])).unzip()
    } else {
        let (gate, up) = row.split_at(row.len() / 2);
        (gate.to_vec(), up.to_vec())
    }
}
