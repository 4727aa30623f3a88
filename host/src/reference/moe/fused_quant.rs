//! The fused block of experts with 8-bit weights.

use super::fused::activate;
use crate::moe::{ExpertActivation, GateUp, QuantScales};
use cuda_std::{E4M3, Float};

/// Dequantised weights of experts, shared ones last, `w13` `[experts, rows · I, H]` and `w2` `[experts, H, I]`; biases, `[experts, rows · I]` and
/// `[experts, H]`, and smoothing vectors, `[experts, H]` and `[experts, I]`, perhaps empty.
#[derive(Clone, Debug)]
pub struct QuantBlock {
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
    /// What the first product's input is multiplied with.
    pub smooth13: Vec<f64>,
    /// What the second product's input is multiplied with.
    pub smooth2: Vec<f64>,
    /// What the rows of `w13` are.
    pub gate_up: GateUp,
    /// What happens between the products.
    pub activation: ExpertActivation,
    /// Whether rows are quantised to int8, or to e4m3.
    pub int8: bool,
    /// Whether a quantised row has one scale, or one for each 128 columns.
    pub scales: QuantScales,
}

/// What a row stands for once it is quantised, and the largest step between neighbouring numbers at each element. In f32 as the kernels do
/// it, since a step is too coarse for a tolerance.
pub fn quantised(row: &[f64], int8: bool, scales: QuantScales) -> Vec<(f64, f64)> {
    let largest = if int8 { 127.0f32 } else { 448.0 };
    let group = if scales == QuantScales::Rows { row.len().max(1) } else { 128 };
    row.chunks(group)
        .flat_map(|group| {
            let most = group.iter().fold(1e-10f32, |a, v| a.max(v.abs() as f32));
            let scale = most * (1.0 / largest);
            let factor = 1.0 / scale;
            group.iter().map(move |v| {
                let ratio = *v as f32 * factor;
                let (q, step) = if int8 {
                    (ratio.round_ties_even() as i8 as f64, 1.0)
                } else {
                    let q = E4M3::from_f32(ratio).to_f32() as f64;
                    (q, (q.abs() / 8.0).max(2f64.powi(-9)))
                };
                (q * scale as f64, step * scale as f64)
            })
        })
        .collect()
}

/// A token's result and what it may be off by: `eps` times the second number for the rounding of the intermediate row to `T`; the third if
/// that rounding changes how an element of a slot's row is quantised; and the errors of sums act on the fourth.
#[derive(Clone, Debug, Default)]
pub struct QuantResult {
    /// The result.
    pub value: f64,
    /// What the rounding of the intermediate row acts on.
    pub rounded: f64,
    /// How far one more or less in an element that is quantised takes it.
    pub step: f64,
    /// What the errors of sums act on.
    pub magnitude: f64,
}

/// One token: `slots` are its experts with their weights. `T` is what the intermediate row is rounded to.
pub fn fused_quant<T: Float>(block: &QuantBlock, x: &[f64], slots: &[(usize, f64)]) -> Vec<QuantResult> {
    let (hidden, inter) = (block.hidden, block.intermediate);
    let rows = block.gate_up.rows() * inter;
    let smooth = |row: Vec<f64>, by: &[f64], expert: usize| -> Vec<f64> {
        let n = row.len();
        let factor = |i: usize| by.get(expert * n + i).copied().unwrap_or(1.0);
        row.iter().enumerate().map(|(i, v)| (*v as f32 * factor(i) as f32) as f64).collect()
    };
    let mut out = vec![QuantResult::default(); hidden];
    for &(expert, weight) in slots {
        let x = quantised(&smooth(x.to_vec(), &block.smooth13, expert), block.int8, block.scales);
        let dot = |row: usize| -> f64 {
            let w = &block.w13[(expert * rows + row) * hidden..][..hidden];
            let bias = block.bias13.get(expert * rows + row).copied().unwrap_or(0.0);
            w.iter().zip(&x).map(|(w, x)| w * x.0).sum::<f64>() + bias
        };
        let h = (0..inter).map(|i| {
            let (gate, up) = match block.gate_up {
                GateUp::Halves => (dot(i), Some(dot(inter + i))),
                GateUp::Interleaved => (dot(2 * i), Some(dot(2 * i + 1))),
                GateUp::GateOnly => (dot(i), None),
            };
            T::from_f32(activate(block.activation, gate, up) as f32).to_f32() as f64
        });
        let h = quantised(&smooth(h.collect(), &block.smooth2, expert), block.int8, block.scales);
        for (c, out) in out.iter_mut().enumerate() {
            let w = &block.w2[(expert * hidden + c) * inter..][..inter];
            let terms = || w.iter().zip(&h);
            let bias = block.bias2.get(expert * hidden + c).copied().unwrap_or(0.0);
            let magnitude = weight.abs() * (terms().map(|(w, h)| (w * h.0).abs()).sum::<f64>() + bias.abs());
            out.value += weight * (terms().map(|(w, h)| w * h.0).sum::<f64>() + bias);
            out.rounded += magnitude;
            out.step += weight.abs() * terms().fold(0.0, |a, (w, h)| f64::max(a, w.abs() * h.1));
            out.magnitude += magnitude;
        }
    }
    out
}
