//! Gated activation.

use crate::lend::{Kernel, Lent, Operation, apply_one, custom_op};
use candle_core::{DType, Error, Layout, Result, Shape, Tensor};
use warploom::{Stream, activation};

/// `silu(x[.., ..d]) · x[.., d..]` for `x` `[.., 2 d]`; a `CustomOp1`.
#[derive(Clone, Copy, Debug, Default)]
pub struct SiluAndMul;

impl SiluAndMul {
    /// Applies it.
    ///
    /// # Errors
    /// As for [`RmsNorm::forward`](crate::RmsNorm::forward).
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        apply_one(self, &[x])
    }
}

impl Operation for SiluAndMul {
    const NAME: &'static str = "silu_and_mul";

    fn outputs(&self, inputs: &[&Layout], dtype: DType) -> Result<Vec<(DType, Shape)>> {
        let mut dims = inputs[0].dims().to_vec();
        if let Some(last) = dims.last_mut() {
            *last /= 2;
        }
        Ok(vec![(dtype, dims.into())])
    }

    fn run<T: Kernel>(&self, stream: &Stream, outputs: &mut [Lent], inputs: &[Lent]) -> Result<()> {
        activation::silu_and_mul::<T>(stream, outputs[0].get_mut()?, inputs[0].get()?).map_err(Error::wrap)
    }
}
custom_op!(SiluAndMul: CustomOp1(s1 l1));
