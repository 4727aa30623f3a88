//! The fused block of experts.

use crate::moe::{ExpertActivation, GateUp};
use crate::reference::gemm::linear::epilogue;

/// Weights of experts, shared ones last: `w13` `[experts, rows · I, H]`, `w2` `[experts, H, I]`, biases `[experts, rows · I]` and
/// `[experts, H]`, perhaps empty.
#[derive(Clone, Debug)]
pub struct Block {
    /// Width of tokens, `H`.
    pub hidden: usize,
    /// Width between the products, `I`.
    pub intermediate: usize,
    /// Weights of the first product.
    pub w13: Vec<f64>,
    /// Weights of the second product.
    pub w2: Vec<f64>,
    /// Bias of the first product.
    pub bias13: Vec<f64>,
    /// Bias of the second product.
    pub bias2: Vec<f64>,
    /// What the rows of `w13` are.
    pub gate_up: GateUp,
    /// What happens between the products.
    pub activation: ExpertActivation,
}

pub(super) fn activate(activation: ExpertActivation, gate: f64, up: Option<f64>) -> f64 {
    use crate::gemm::Epilogue;
    let plain = |kind| epilogue(kind, gate) * up.unwrap_or(1.0);
    match activation {
        ExpertActivation::Silu => plain(Epilogue::Silu),
        ExpertActivation::Gelu => plain(Epilogue::Gelu),
        ExpertActivation::GeluTanh => plain(Epilogue::GeluTanh),
        ExpertActivation::Relu2 => plain(Epilogue::Relu2),
        ExpertActivation::SwigluOai { alpha, limit } => {
            let (alpha, limit) = (alpha as f64, limit as f64);
            let gate = gate.min(limit);
            gate / (1.0 + (-alpha * gate).exp()) * up.map_or(1.0, |u| u.clamp(-limit, limit) + 1.0)
        }
    }
}

/// One token: `slots` are its experts with their weights. Returns the result; for each element the sum of the magnitudes that
/// the rounding of the intermediate row to `T` acts on, which includes 2^-14 for subnormal numbers of f16; and a bound of the
/// magnitudes that errors of f32 sums act on.
pub fn fused(block: &Block, x: &[f64], slots: &[(usize, f64)]) -> (Vec<f64>, Vec<f64>, Vec<f64>) {
    let (hidden, inter) = (block.hidden, block.intermediate);
    let rows = block.gate_up.rows() * inter;
    let (mut out, mut rounded, mut bound) = (vec![0.0; hidden], vec![0.0; hidden], vec![0.0; hidden]);
    for &(expert, weight) in slots {
        let dot = |row: usize| {
            let w = &block.w13[(expert * rows + row) * hidden..][..hidden];
            let bias = block.bias13.get(expert * rows + row).copied().unwrap_or(0.0);
            let sum: f64 = w.iter().zip(x).map(|(a, b)| a * b).sum();
            let magnitude: f64 = w.iter().zip(x).map(|(a, b)| (a * b).abs()).sum();
            (sum + bias, magnitude + bias.abs())
        };
        let h: Vec<(f64, f64)> = (0..inter)
            .map(|i| {
                let (gate, up) = match block.gate_up {
                    GateUp::Halves => (dot(i), Some(dot(inter + i))),
                    GateUp::Interleaved => (dot(2 * i), Some(dot(2 * i + 1))),
                    GateUp::GateOnly => (dot(i), None),
                };
                let steep = if block.activation == ExpertActivation::Relu2 { 2.0 * gate.1 } else { 2.0 };
                (activate(block.activation, gate.0, up.map(|u| u.0)), steep * gate.1 * up.map_or(1.0, |u| 1.0 + u.1))
            })
            .collect();
        for c in 0..hidden {
            let w = &block.w2[(expert * hidden + c) * inter..][..inter];
            let bias = block.bias2.get(expert * hidden + c).copied().unwrap_or(0.0);
            let sum: f64 = w.iter().zip(&h).map(|(w, h)| w * h.0).sum();
            out[c] += weight * (sum + bias);
            rounded[c] +=
                weight.abs() * w.iter().zip(&h).map(|(w, h)| w.abs() * (h.0.abs() + 2f64.powi(-14))).sum::<f64>();
            let magnitude: f64 = w.iter().zip(&h).map(|(w, h)| w.abs() * (h.0.abs() + h.1)).sum();
            bound[c] += weight.abs() * (magnitude + bias.abs());
        }
    }
    (out, rounded, bound)
}
