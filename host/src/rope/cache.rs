//! The cos/sin cache: `[max_positions, rot_dim]`, in each row the cosines of `rot_dim / 2` angles, then their sines.
//!
//! The angle of pair `i` at position `p` is `p * frequency(i)`, with `frequency(i) = theta^(-2 i / rot_dim)` (Su et al.,
//! *RoFormer*, 2021). Models for contexts longer than those they were trained on first change the frequencies:
//!
//! | scaling | source |
//! | --- | --- |
//! | [`Linear`](Scaling::Linear) | Chen et al., *Extending context window of large language models via positional interpolation*, 2023 |
//! | [`Ntk`](Scaling::Ntk) | "NTK-aware scaled RoPE" (bloc97, 2023), as in section 3.1 of the YaRN paper |
//! | [`Llama3`](Scaling::Llama3) | `apply_scaling` of Meta's Llama 3.1 model code |
//! | [`Yarn`](Scaling::Yarn) | Peng et al., *YaRN: Efficient context window extension of large language models*, 2023 |
//!
//! Built once, on the host, in `f64` with one rounding: angles at positions beyond 2^20 keep all their digits.

use crate::device::Device;
use crate::error::{Error, Result};
use crate::tensor::{Tensor, host_memory};
use cuda_std::Float;
use std::f64::consts::TAU;

/// The most elements of a head that are turned: far beyond any model's, so that the frequencies of a head are little memory.
pub const MAX_ROT_DIM: usize = 1 << 16;

/// How frequencies differ from those that `theta` gives.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub enum Scaling {
    /// Not at all.
    #[default]
    None,
    /// Positions are divided by `factor`.
    Linear {
        /// New length over trained length.
        factor: f64,
    },
    /// `theta` is multiplied by `factor^(rot_dim / (rot_dim - 2))`: the fastest pair stays, the slowest one is divided by
    /// `factor`. For the "dynamic" variant at a length `n`, beyond the trained length `m`, the factor is
    /// `s * n / m - (s - 1)` with the model's `s`.
    Ntk {
        /// New length over trained length.
        factor: f64,
    },
    /// Pairs that turn less than `low_freq_factor` times over the trained length are divided by `factor`, those that turn
    /// more than `high_freq_factor` times stay, those between are blended.
    Llama3 {
        /// What slow pairs are divided by.
        factor: f64,
        /// Turns below which a pair is slow.
        low_freq_factor: f64,
        /// Turns above which a pair is fast.
        high_freq_factor: f64,
        /// The trained length.
        original_max_position: usize,
    },
    /// As [`Llama3`](Self::Llama3), but blended along the pairs' numbers, and all cosines and sines are multiplied. (Where even the last pair turns more often than `beta_fast`, all pairs count as slow, as in the code of
    /// the paper and of Hugging Face.)
    Yarn {
        /// New length over trained length.
        factor: f64,
        /// The trained length.
        original_max_position: usize,
        /// Turns above which a pair is fast; 32 in the paper.
        beta_fast: f64,
        /// Turns below which a pair is slow; 1 in the paper.
        beta_slow: f64,
        /// What cosines and sines are multiplied by. `None` is the paper's `0.1 ln(factor) + 1`; DeepSeek's models use
        /// the quotient of that with their `mscale` and `mscale_all_dim` in place of 1 before the logarithm.
        attention_factor: Option<f64>,
        /// Whether the numbers of the pairs that turn as often as the bounds are rounded to whole pairs, the fast one down and the slow one up: `true` in the paper's
        /// code and in most models, `false` in gpt-oss (`"truncate"` in a model's `rope_scaling`).
        truncate: bool,
    },
}

impl Scaling {
    /// YaRN with the paper's constants.
    pub const fn yarn(factor: f64, original_max_position: usize) -> Self {
        Self::Yarn {
            factor,
            original_max_position,
            beta_fast: 32.0,
            beta_slow: 1.0,
            attention_factor: None,
            truncate: true,
        }
    }

    /// What Llama 3.1 and 3.2 use, with factors of 8 and 32.
    pub const fn llama3(factor: f64) -> Self {
        Self::Llama3 { factor, low_freq_factor: 1.0, high_freq_factor: 4.0, original_max_position: 8192 }
    }

    /// What cosines and sines are multiplied by.
    pub fn attention_factor(&self) -> f64 {
        match *self {
            Self::Yarn { attention_factor: Some(f), .. } => f,
            Self::Yarn { factor, .. } if factor > 1.0 => 0.1 * factor.ln() + 1.0,
            _ => 1.0,
        }
    }

    /// The angle of each pair at position 1: `rot_dim / 2` of them.
    ///
    /// # Errors
    /// As for [`cache`].
    pub fn frequencies(&self, rot_dim: usize, theta: f64) -> Result<Vec<f64>> {
        self.check(rot_dim, theta)?;
        let d = rot_dim as f64;
        let plain = |theta: f64| (0..rot_dim / 2).map(move |i| theta.powf(-2.0 * i as f64 / d));
        Ok(match *self {
            Self::None => plain(theta).collect(),
            Self::Linear { factor } => plain(theta).map(|f| f / factor).collect(),
            Self::Ntk { factor } => plain(theta * factor.powf(d / (d - 2.0))).collect(),
            Self::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position } => {
                let blend = |f: f64| {
                    let turns = original_max_position as f64 * f / TAU;
                    let fast = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0.0, 1.0);
                    fast * f + (1.0 - fast) * f / factor
                };
                plain(theta).map(blend).collect()
            }
            Self::Yarn { factor, original_max_position, beta_fast, beta_slow, truncate, .. } => {
                // The number of the pair that turns this often over the trained length, not rounded.
                let pair = |turns: f64| d * (original_max_position as f64 / (turns * TAU)).ln() / (2.0 * theta.ln());
                // A bound near 0 lies far beyond the last pair, if not infinitely far.
                let (first, last) = (pair(beta_fast), pair(beta_slow));
                let (first, last) = if truncate { (first.floor(), last.ceil()) } else { (first, last) };
                let (first, last) = (first.clamp(0.0, d), last.min(d - 1.0));
                // The blend is a step if both are the same.
                let width = if last == first { 0.001 } else { last - first };
                let blend = |(i, f): (usize, f64)| {
                    let slow = ((i as f64 - first) / width).clamp(0.0, 1.0);
                    (1.0 - slow) * f + slow * f / factor
                };
                plain(theta).enumerate().map(blend).collect()
            }
        })
    }

    fn check(&self, rot_dim: usize, theta: f64) -> Result<()> {
        let value = |ok: bool, arg: &'static str, expected: &str, got: String| {
            if ok { Ok(()) } else { Err(Error::Value { op: "rope::cache", arg, expected: expected.into(), got }) }
        };
        let even = rot_dim.is_multiple_of(2) && (2..=MAX_ROT_DIM).contains(&rot_dim);
        value(even, "rot_dim", &format!("even, from 2 to {MAX_ROT_DIM}"), rot_dim.to_string())?;
        value(theta > 1.0 && theta.is_finite(), "theta", "finite and above 1", theta.to_string())?;
        let (factor, ordered, trained) = match *self {
            Self::None => return Ok(()),
            Self::Linear { factor } => (factor, true, 1),
            Self::Ntk { factor } => {
                value(rot_dim > 2, "rot_dim", "above 2 for NTK scaling", rot_dim.to_string())?;
                (factor, true, 1)
            }
            Self::Llama3 { factor, low_freq_factor: low, high_freq_factor: high, original_max_position } => {
                (factor, 0.0 <= low && low < high, original_max_position)
            }
            Self::Yarn { factor, original_max_position, beta_fast, beta_slow, attention_factor, .. } => {
                let f = attention_factor.unwrap_or(1.0);
                value(f > 0.0 && f.is_finite(), "scaling", "an attention factor above 0", f.to_string())?;
                (factor, 0.0 < beta_slow && beta_slow <= beta_fast, original_max_position)
            }
        };
        value(factor >= 1.0 && factor.is_finite(), "scaling", "a factor of at least 1", factor.to_string())?;
        value(ordered, "scaling", "bounds of slow and fast pairs in order, and positive", format!("{self:?}"))?;
        value(trained > 0, "scaling", "a trained length above 0", trained.to_string())
    }
}

/// The cos/sin cache `[max_positions, rot_dim]` that [`rotary`](super::rotary()) reads, in `f32` or in the type of the
/// queries.
///
/// # Errors
/// [`Error::Value`] for a `rot_dim` that is odd, 0 or above [`MAX_ROT_DIM`], a `theta` that is not above 1, a scaling whose numbers
/// make no sense, or more positions than memory can hold; [`Error::OutOfMemory`] if the host or the device has no room for so
/// many.
///
/// ```
/// use warploom::rope::{self, Scaling};
/// let device = warploom::Device::simt();
/// let cache = rope::cache::<f32>(&device, 3, 4, 10000.0, Scaling::None)?;
/// let row = &cache.to_vec()?[8..];
/// let expected = [2f32.cos(), 0.02f32.cos(), 2f32.sin(), 0.02f32.sin()];
/// assert!(row.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-6));
/// # Ok::<(), warploom::Error>(())
/// ```
pub fn cache<C: Float>(
    device: &Device,
    max_positions: usize,
    rot_dim: usize,
    theta: f64,
    scaling: Scaling,
) -> Result<Tensor<C>> {
    let frequencies = scaling.frequencies(rot_dim, theta)?;
    let factor = scaling.attention_factor();
    let room = max_positions.checked_mul(rot_dim).filter(|&n| n <= isize::MAX as usize / size_of::<C>());
    let room = room.ok_or_else(|| Error::Value {
        op: "rope::cache",
        arg: "max_positions",
        expected: format!("such that a cache of rows of {rot_dim} elements fits into memory"),
        got: max_positions.to_string(),
    })?;
    let mut rows = host_memory(room)?;
    for p in 0..max_positions {
        let angle = |f: &f64| p as f64 * f;
        rows.extend(frequencies.iter().map(|f| round::<C>(factor * angle(f).cos())));
        rows.extend(frequencies.iter().map(|f| round::<C>(factor * angle(f).sin())));
    }
    Tensor::from_slice(device, &rows, &[max_positions, rot_dim])
}

/// One rounding from `f64`: by way of an `f32` that is odd wherever it is not exact, so that the second rounding sees on
/// which side of a tie the number was (Boldo and Melquiond, *Emulation of FMA and correctly rounded sums*, 2008).
fn round<C: Float>(v: f64) -> C {
    let near = v as f32;
    if C::DTYPE.size() == 4 || f64::from(near) == v || near.to_bits() & 1 == 1 {
        return C::from_f32(near);
    }
    let away = (v.abs() > f64::from(near).abs()) as i32 * 2 - 1;
    C::from_f32(f32::from_bits((near.to_bits() as i32 + away) as u32))
}
