//! Rotary embedding.

use crate::lend::{Kernel, Lent, Operation, apply, pair};
use candle_core::{DType, Error, Layout, Result, Shape, Tensor};
use warploom::rope::{self, Pairing};
use warploom::{Element, Float, Stream};

/// Turns pairs of each head's elements by angles that grow with the position.
#[derive(Clone, Copy, Debug)]
pub struct Rotary {
    pairing: Pairing,
}

impl Rotary {
    /// With these pairs: halves of a head (GPT-NeoX) or neighbours (GPT-J).
    pub const fn new(pairing: Pairing) -> Self {
        Self { pairing }
    }

    /// Turned copies of `query` `[tokens, heads, dim]` and `key` `[tokens, kv_heads, dim]`, both contiguous.
    ///
    /// `positions` is `[tokens]`, of `u32`, `i32` or `i64`. `angles` is `[max_positions, rot_dim]`, of `f32` or the type of `query`: in each row the
    /// cosines of `rot_dim / 2` angles, then their sines. A token whose position is not in it is left as it is.
    ///
    /// # Errors
    /// As for [`RmsNorm::forward`](crate::RmsNorm::forward).
    pub fn forward(
        &self,
        query: &Tensor,
        key: &Tensor,
        positions: &Tensor,
        angles: &Tensor,
    ) -> Result<(Tensor, Tensor)> {
        let mut outputs = apply(self, &[query, key, positions, angles])?.into_iter();
        outputs.next().zip(outputs.next()).ok_or_else(|| Error::msg("rotary: no outputs"))
    }

    fn turn<T: Kernel, C: Float, I: Element>(
        self,
        stream: &Stream,
        outputs: &mut [Lent],
        positions: &warploom::Tensor<I>,
        angles: &warploom::Tensor<C>,
    ) -> Result<()> {
        let (query, key) = pair(outputs)?;
        let (query, key) = (query.get_mut::<T>()?, key.get_mut::<T>()?);
        let options = rope::RotaryOptions::default();
        rope::rotary(stream, query, Some(key), None, positions, angles, &options.pairing(self.pairing))
            .map_err(Error::wrap)
    }

    fn with_angles<T: Kernel, I: Element>(
        self,
        stream: &Stream,
        outputs: &mut [Lent],
        positions: &warploom::Tensor<I>,
        angles: &Lent,
    ) -> Result<()> {
        match angles.get::<f32>() {
            Ok(angles) => self.turn::<T, f32, I>(stream, outputs, positions, angles),
            Err(_) => self.turn::<T, T, I>(stream, outputs, positions, angles.get()?),
        }
    }
}

impl Operation for Rotary {
    const NAME: &'static str = "rotary";

    fn outputs(&self, inputs: &[&Layout], dtype: DType) -> Result<Vec<(DType, Shape)>> {
        Ok(vec![(dtype, inputs[0].shape().clone()), (dtype, inputs[1].shape().clone())])
    }

    fn run<T: Kernel>(&self, stream: &Stream, outputs: &mut [Lent], inputs: &[Lent]) -> Result<()> {
        let (query, key) = pair(outputs)?;
        stream.copy(query.get_mut::<T>()?, inputs[0].get()?).map_err(Error::wrap)?;
        stream.copy(key.get_mut::<T>()?, inputs[1].get()?).map_err(Error::wrap)?;
        match inputs[2].get::<i64>() {
            Ok(positions) => self.with_angles::<T, i64>(stream, outputs, positions, &inputs[3]),
            Err(_) => self.with_angles::<T, i32>(stream, outputs, &inputs[2].indices()?, &inputs[3]),
        }
    }
}
