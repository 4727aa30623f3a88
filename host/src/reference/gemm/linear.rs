//! Linear layers.

use crate::gemm::Epilogue;
use crate::reference::activation::plain;

/// An epilogue's function.
pub fn epilogue(kind: Epilogue, x: f64) -> f64 {
    match kind {
        Epilogue::None => x,
        Epilogue::Silu => plain::swish(x, 1.0),
        Epilogue::Gelu => plain::gelu(x),
        Epilogue::GeluTanh => plain::gelu_tanh(x),
        Epilogue::Relu | Epilogue::Relu2 if x.is_nan() => x,
        Epilogue::Relu => x.max(0.0),
        Epilogue::Relu2 => x.max(0.0).powi(2),
    }
}

/// `epilogue(x · wᵀ + bias)`: `x` is `[m, k]`, `w` `[n, k]`, `bias` `[n]`, the result `[m, n]`.
pub fn linear(x: &[f64], w: &[f64], bias: Option<&[f64]>, m: usize, n: usize, k: usize, kind: Epilogue) -> Vec<f64> {
    let mut y = Vec::with_capacity(m * n);
    for r in 0..m {
        for c in 0..n {
            let dot: f64 = x[r * k..][..k].iter().zip(&w[c * k..][..k]).map(|(a, b)| a * b).sum();
            y.push(epilogue(kind, dot + bias.map_or(0.0, |b| b[c])));
        }
    }
    y
}
