//! Matrix products with weights in `[out, in]` layout, as linear layers have them, and rows of a table.

pub mod embedding;
pub mod linear_dot;
pub mod linear_fma;
pub mod linear_stream;
pub mod linear_wgmma;

use cuda_std::float;

/// Epilogues of a linear layer, as the kernels number them.
pub const EPILOGUES: [&str; 6] = ["none", "silu", "gelu", "gelu_tanh", "relu", "relu2"];

/// The epilogue number `kind` (see [`EPILOGUES`]) of a value.
#[inline(always)]
pub fn epilogue(kind: u32, x: f32) -> f32 {
    match kind {
        1 => x * float::sigmoid(x),
        2 => 0.5 * x * (1.0 + float::erf(x * core::f32::consts::FRAC_1_SQRT_2)),
        3 => {
            let inner = 0.797_884_6 * float::fma(0.044_715 * x * x, x, x);
            0.5 * x * (1.0 + float::tanh(inner))
        }
        4 => float::max(x, 0.0),
        5 => {
            let r = float::max(x, 0.0);
            r * r
        }
        _ => x,
    }
}
