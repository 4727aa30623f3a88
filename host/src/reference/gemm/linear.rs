//! Linear layers.

use crate::gemm::Epilogue;

/// An epilogue's function.
pub fn epilogue(kind: Epilogue, x: f64) -> f64 {
    match kind {
        Epilogue::None => x,
        Epilogue::Silu => x / (1.0 + (-x).exp()),
        Epilogue::Gelu => 0.5 * x * (1.0 + erf(x * std::f64::consts::FRAC_1_SQRT_2)),
        Epilogue::GeluTanh => {
            0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x)).tanh())
        }
        Epilogue::Relu | Epilogue::Relu2 if x.is_nan() => x,
        Epilogue::Relu => x.max(0.0),
        Epilogue::Relu2 => x.max(0.0).powi(2),
    }
}

/// The error function to about 1e-15: its Taylor series near zero, the continued fraction of `erfc` elsewhere.
fn erf(x: f64) -> f64 {
    let a = x.abs();
    let value = if a < 3.0 {
        let (mut term, mut sum) = (a, a);
        for n in 1..200 {
            term *= -a * a / n as f64;
            sum += term / (2 * n + 1) as f64;
        }
        sum * 2.0 / std::f64::consts::PI.sqrt()
    } else {
        let fraction = (1..60).rev().fold(0.0, |f, n| n as f64 / 2.0 / (a + f));
        1.0 - (-a * a).exp() / ((a + fraction) * std::f64::consts::PI.sqrt())
    };
    value.copysign(x)
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
