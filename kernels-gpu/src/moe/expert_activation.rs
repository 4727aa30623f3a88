//! Activations of experts, of a gate and a value (`up`) in f32.

use crate::gelu::{gelu, gelu_tanh};
use cuda_std::float;

/// An activation with its scalars.
#[derive(Clone, Copy)]
pub struct ExpertActivation {
    /// Index into [`NAMES`].
    pub kind: u32,
    /// Slope of swiglu_oai's sigmoid.
    pub alpha: f32,
    /// Bound of swiglu_oai's arguments.
    pub limit: f32,
}

/// The activations, as the kernels number them.
pub const NAMES: [&str; 5] = ["silu", "gelu", "gelu_tanh", "relu2", "swiglu_oai"];

impl ExpertActivation {
    /// Of a gate alone.
    #[inline(always)]
    pub fn apply(self, gate: f32) -> f32 {
        match self.kind {
            0 => gate * float::sigmoid(gate),
            1 => gelu::<f32>(gate),
            2 => gelu_tanh::<f32>(gate),
            3 => {
                let r = if gate < 0.0 { 0.0 } else { gate };
                r * r
            }
            _ => {
                let gate = if gate > self.limit { self.limit } else { gate };
                gate * float::sigmoid(self.alpha * gate)
            }
        }
    }

    /// Of a gate and a value.
    #[inline(always)]
    pub fn gated(self, gate: f32, up: f32) -> f32 {
        let up = if self.kind < 4 {
            up
        } else {
            let up = if up > self.limit { self.limit } else { up };
            1.0 + if up < -self.limit { -self.limit } else { up }
        };
        self.apply(gate) * up
    }
}
