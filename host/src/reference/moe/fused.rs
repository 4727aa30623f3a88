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
            // Not `min`, which takes the limit for NaN.
            let gate = if gate > limit { limit } else { gate };
            gate / (1.0 + (-alpha * gate).exp()) * up.map_or(1.0, |u| u.clamp(-limit, limit) + 1.0)
        }
    }
}

/// How far the f32 activation of a gate, times its value, may be off, of the result: 8 units and, since exponentials magnify an error of `u` by it, `2 |u|` of those of `sigmoid(u)`.
fn activation_error(activation: ExpertActivation, gate: f64) -> f64 {
    let u = match activation {
        ExpertActivation::Silu => gate,
        ExpertActivation::GeluTanh => 1.6 * gate + 0.0715 * gate.powi(3),
        ExpertActivation::SwigluOai { alpha, .. } => f64::from(alpha) * gate,
        ExpertActivation::Gelu | ExpertActivation::Relu2 => 0.0,
    };
    (8.0 + 2.0 * u.abs()) * 2f64.powi(-24)
}

/// An element of a token's result and what it may be off by.
#[derive(Clone, Copy, Debug, Default)]
pub struct FusedResult {
    /// The result.
    pub value: f64,
    /// What the slots add up in magnitude: what a rounding of each acts on.
    pub slots: f64,
    /// What all before the last rounding may take it off.
    pub error: f64,
}

/// How far an f32 sum of so many terms may be off, of the sum of their magnitudes. Each addition is off by half a unit of the last place, 2^-24 of what has been added up so far, and that is some √n
/// times less than the magnitudes' sum, since terms are of either sign. The errors are, too, if they are roundings: then less than 2^-24 is left in practice, whatever n is. Tensor cores cut bits off
/// instead, up to 2^-23 each time, always towards zero: with 16 terms at a time √n / 32 times 2^-23. Here is four times that, and 2^-23 for short sums, a bias, and a weight.
fn sum_error(terms: usize) -> f64 {
    ((terms as f64).sqrt() / 8.0 + 1.0) * 2f64.powi(-23)
}

/// A bound of the sum of errors of either sign that do not depend on each other, of their magnitudes' sum and the sum of their squares: magnitudes at worst, but never more than 4 times the
/// root of the squares. Of roundings, which are spread evenly over up to so much, the root is 1.7 standard deviations at least, and 2.4 on average, since few numbers lie next to a power of
/// two: the bound is 7 to 9.5 of them.
fn in_all(magnitudes: f64, squares: f64) -> f64 {
    magnitudes.min(4.0 * squares.sqrt())
}

/// One token: `slots` are its experts with their weights. The intermediate row is rounded with a relative error of up to `relative`, or of up to `absolute` near zero.
///
/// Errors of the first product's sums go through the activation, at most as far as it changes between the ends of what gate and value may be. (A function that turns around in between does so by less
/// than the square of that.) To this come the error of the activation itself (of f32, 8 units and twice those of the sigmoid's argument) and the rounding. What they are in the result is the sum of as many independent errors as there are elements of all intermediate rows; those of an expert that is
/// listed twice are the same ones, though.
pub fn fused(block: &Block, x: &[f64], slots: &[(usize, f64)], [relative, absolute]: [f64; 2]) -> Vec<FusedResult> {
    let (hidden, inter) = (block.hidden, block.intermediate);
    let rows = block.gate_up.rows() * inter;
    let mut out = vec![FusedResult::default(); hidden];
    let (mut magnitudes, mut squares) = (vec![0.0; hidden], vec![0.0; hidden]);
    let mut experts: Vec<usize> = slots.iter().map(|slot| slot.0).collect();
    experts.sort_unstable();
    experts.dedup();
    for expert in experts {
        let dot = |row: usize| {
            let w = &block.w13[(expert * rows + row) * hidden..][..hidden];
            let bias = block.bias13.get(expert * rows + row).copied().unwrap_or(0.0);
            let sum: f64 = w.iter().zip(x).map(|(a, b)| a * b).sum();
            let magnitude: f64 = w.iter().zip(x).map(|(a, b)| (a * b).abs()).sum();
            (sum + bias, sum_error(hidden) * (magnitude + bias.abs()))
        };
        // Elements of the intermediate row, and what they may be off by.
        let h: Vec<(f64, f64)> = (0..inter)
            .map(|i| {
                let (gate, up) = match block.gate_up {
                    GateUp::Halves => (dot(i), Some(dot(inter + i))),
                    GateUp::Interleaved => (dot(2 * i), Some(dot(2 * i + 1))),
                    GateUp::GateOnly => (dot(i), None),
                };
                let of = |sign: f64, up_sign: f64| {
                    activate(block.activation, gate.0 + sign * gate.1, up.map(|u| u.0 + up_sign * u.1))
                };
                let value = of(0.0, 0.0);
                let ends = [(-1.0, -1.0), (-1.0, 1.0), (1.0, -1.0), (1.0, 1.0)];
                let sums = ends.iter().map(|&(a, b)| (of(a, b) - value).abs()).fold(0.0, f64::max);
                let activation = activation_error(block.activation, gate.0);
                (value, sums + (activation + relative) * value.abs() + absolute)
            })
            .collect();
        let of_expert = || slots.iter().filter(|slot| slot.0 == expert).map(|slot| slot.1);
        let (weight, heavy) = (of_expert().sum::<f64>(), of_expert().map(f64::abs).sum::<f64>());
        for c in 0..hidden {
            let w = &block.w2[(expert * hidden + c) * inter..][..inter];
            let bias = block.bias2.get(expert * hidden + c).copied().unwrap_or(0.0);
            let (mut sum, mut magnitude, mut worst, mut square) = (bias, bias.abs(), 0.0, 0.0);
            for (w, h) in w.iter().zip(&h) {
                sum += w * h.0;
                magnitude += (w * h.0).abs();
                worst += (w * h.1).abs();
                square += (w * h.1).powi(2);
            }
            out[c].value += weight * sum;
            out[c].slots += heavy * sum.abs();
            out[c].error += heavy * sum_error(inter + slots.len()) * magnitude;
            magnitudes[c] += heavy * worst;
            squares[c] += heavy.powi(2) * square;
        }
    }
    for c in 0..hidden {
        out[c].error += in_all(magnitudes[c], squares[c]);
    }
    out
}
