//! Measured loads of the experts, checked once.

use super::EplbError;
use super::error::{nonzero, same, table};

/// A number type that loads are measured in. All arithmetic is in `f32`, as in DeepSeek's EPLB: counts above 2^24
/// tokens are rounded to nearest.
pub trait Load: Copy {
    /// The load rounded to `f32`.
    fn to_f32(self) -> f32;
    /// The load for an error message.
    fn to_f64(self) -> f64;
}

macro_rules! load {
    ($($T:ty)*) => {$(
        impl Load for $T {
            fn to_f32(self) -> f32 {
                self as f32
            }
            fn to_f64(self) -> f64 {
                self as f64
            }
        }
    )*};
}
load!(f32 f64 i32 i64 u32 u64 usize);

/// The load of every expert of every layer: tokens routed to it, or a moving average of that. `[layers, experts]`,
/// finite, not negative, at least one of each; a layer's total is at most `f32::MAX / 2`.
#[derive(Debug, Clone, PartialEq)]
pub struct Loads {
    num_experts: usize,
    values: Vec<f32>,
}

impl Loads {
    /// From `values[layer * num_experts + expert]`.
    ///
    /// # Errors
    /// A zero dimension, a length other than `num_layers * num_experts`, a load that is negative, infinite or NaN, or a layer whose loads add up
    /// to more than `f32::MAX / 2`.
    pub fn new<T: Load>(num_layers: usize, num_experts: usize, values: &[T]) -> Result<Self, EplbError> {
        nonzero("the number of layers", num_layers)?;
        nonzero("the number of experts", num_experts)?;
        let expected = num_layers
            .checked_mul(num_experts)
            .ok_or(EplbError::TooLarge { table: "the loads", dimensions: [num_layers, num_experts, 1] })?;
        same("the length of the loads", expected, values.len())?;
        let mut checked = table("the loads", [num_layers, num_experts, 1], 0.0)?;
        for (layer, (row, out)) in values.chunks(num_experts).zip(checked.chunks_mut(num_experts)).enumerate() {
            let mut total = 0.0;
            for (expert, (&value, out)) in row.iter().zip(out).enumerate() {
                let load = value.to_f32();
                if !(load.is_finite() && load >= 0.0) {
                    return Err(EplbError::Load { layer, expert, value: value.to_f64() });
                }
                // Adding zero turns -0 into +0: bit patterns then order as values do.
                *out = load + 0.0;
                total += f64::from(load);
            }
            if total > f64::from(f32::MAX / 2.0) {
                return Err(EplbError::LoadOverflow { layer, total });
            }
        }
        Ok(Loads { num_experts, values: checked })
    }

    /// From a row of loads for each layer.
    ///
    /// # Errors
    /// As [`Loads::new`], and rows of different lengths.
    pub fn from_rows<T: Load, R: AsRef<[T]>>(rows: &[R]) -> Result<Self, EplbError> {
        let num_experts = rows.first().map_or(0, |row| row.as_ref().len());
        let mut values = Vec::new();
        for (layer, row) in rows.iter().enumerate() {
            let row = row.as_ref();
            if row.len() != num_experts {
                return Err(EplbError::Ragged { layer, expected: num_experts, got: row.len() });
            }
            values.extend_from_slice(row);
        }
        Self::new(rows.len(), num_experts, &values)
    }

    /// Layers.
    pub fn num_layers(&self) -> usize {
        self.values.len() / self.num_experts
    }

    /// Logical experts in each layer.
    pub fn num_experts(&self) -> usize {
        self.num_experts
    }

    /// The loads of one layer.
    ///
    /// # Panics
    /// If there is no such layer.
    pub fn layer(&self, layer: usize) -> &[f32] {
        &self.values[layer * self.num_experts..(layer + 1) * self.num_experts]
    }

    /// The layers in order.
    pub fn layers(&self) -> std::slice::ChunksExact<'_, f32> {
        self.values.chunks_exact(self.num_experts)
    }
}
