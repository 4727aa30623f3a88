//! Root-mean-square normalisation.

use crate::lend::{Kernel, Lent, Operation, apply, apply_one, custom_op, pair};
use candle_core::{DType, Error, Layout, Result, Shape, Tensor};
use warploom::{Stream, norm};

/// `x / sqrt(mean(x²) + eps) · weight` along the last dimension; a `CustomOp2` of `x` and `weight`.
#[derive(Clone, Copy, Debug)]
pub struct RmsNorm {
    eps: f32,
}

impl RmsNorm {
    /// With this `eps`.
    pub const fn new(eps: f32) -> Self {
        Self { eps }
    }

    /// Normalises `x` `[.., n]`; `weight` is `[n]`.
    ///
    /// # Errors
    /// candle's `Error::Wrapped` with warploom's word for shapes, strides, types and devices that do not go together.
    pub fn forward(&self, x: &Tensor, weight: &Tensor) -> Result<Tensor> {
        apply_one(self, &[x, weight])
    }
}

impl Operation for RmsNorm {
    const NAME: &'static str = "rms_norm";

    fn outputs(&self, inputs: &[&Layout], dtype: DType) -> Result<Vec<(DType, Shape)>> {
        Ok(vec![(dtype, inputs[0].shape().clone())])
    }

    fn run<T: Kernel>(&self, stream: &Stream, outputs: &mut [Lent], inputs: &[Lent]) -> Result<()> {
        let (x, weight) = (inputs[0].get::<T>()?, inputs[1].get::<T>()?);
        norm::rms_norm(stream, outputs[0].get_mut()?, x, Some(weight), self.eps).map_err(Error::wrap)
    }
}
custom_op!(RmsNorm: CustomOp2(s1 l1, s2 l2));

/// [`RmsNorm`] of `x + residual`, rounded to the element type before it is normalised.
#[derive(Clone, Copy, Debug)]
pub struct FusedAddRmsNorm {
    eps: f32,
}

impl FusedAddRmsNorm {
    /// With this `eps`.
    pub const fn new(eps: f32) -> Self {
        Self { eps }
    }

    /// The normalised sum and the sum, which is the next layer's residual. `x` and `residual` are `[.., n]`, `weight` `[n]`.
    ///
    /// # Errors
    /// As for [`RmsNorm::forward`].
    pub fn forward(&self, x: &Tensor, residual: &Tensor, weight: &Tensor) -> Result<(Tensor, Tensor)> {
        let mut outputs = apply(self, &[x, residual, weight])?.into_iter();
        outputs.next().zip(outputs.next()).ok_or_else(|| Error::msg("fused_add_rms_norm: no outputs"))
    }
}

impl Operation for FusedAddRmsNorm {
    const NAME: &'static str = "fused_add_rms_norm";

    fn outputs(&self, inputs: &[&Layout], dtype: DType) -> Result<Vec<(DType, Shape)>> {
        Ok(vec![(dtype, inputs[0].shape().clone()); 2])
    }

    fn run<T: Kernel>(&self, stream: &Stream, outputs: &mut [Lent], inputs: &[Lent]) -> Result<()> {
        let (x, residual, weight) = (inputs[0].get::<T>()?, inputs[1].get::<T>()?, inputs[2].get::<T>()?);
        let (out, sum) = pair(outputs)?;
        let (out, sum) = (out.get_mut()?, sum.get_mut()?);
        norm::fused_add_rms_norm_to(stream, out, sum, x, residual, Some(weight), self.eps).map_err(Error::wrap)
    }
}
