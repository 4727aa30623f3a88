//! Dense layers.

use crate::lend::{Kernel, Lent, Operation, apply_one, custom_op};
use candle_core::{DType, Error, Layout, Result, Shape, Tensor};
use warploom::Stream;
use warploom::gemm::{Epilogue, LinearOptions, linear_with};

/// `epilogue(x · wᵀ + bias)`; a `CustomOp2` of `x` and `w`.
#[derive(Clone, Debug, Default)]
pub struct Linear {
    bias: Option<Tensor>,
    epilogue: Epilogue,
}

impl Linear {
    /// The product alone.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds this, `[n]` and of the type of `x`.
    pub fn bias(mut self, bias: &Tensor) -> Self {
        self.bias = Some(bias.clone());
        self
    }

    /// With this function of each element before it is rounded.
    pub fn epilogue(mut self, epilogue: Epilogue) -> Self {
        self.epilogue = epilogue;
        self
    }

    /// `x` is `[.., k]` and `w` `[n, k]`, both dense in their last dimension; the result is `[.., n]`. Sums are in `f32`.
    ///
    /// # Errors
    /// As for [`RmsNorm::forward`](crate::RmsNorm::forward).
    pub fn forward(&self, x: &Tensor, w: &Tensor) -> Result<Tensor> {
        apply_one(self, &[x, w])
    }
}

impl Operation for Linear {
    const NAME: &'static str = "linear";

    fn extra(&self) -> Vec<&Tensor> {
        self.bias.iter().collect()
    }

    fn outputs(&self, inputs: &[&Layout], dtype: DType) -> Result<Vec<(DType, Shape)>> {
        let mut dims = inputs[0].dims().to_vec();
        if let (Some(last), [n, _]) = (dims.last_mut(), inputs[1].dims()) {
            *last = *n;
        }
        Ok(vec![(dtype, dims.into())])
    }

    fn run<T: Kernel>(&self, stream: &Stream, outputs: &mut [Lent], inputs: &[Lent]) -> Result<()> {
        let (x, w) = (inputs[0].get::<T>()?, inputs[1].get::<T>()?);
        let bias = inputs.get(2).map(Lent::get::<T>).transpose()?;
        let options = LinearOptions::default().epilogue(self.epilogue);
        linear_with(stream, outputs[0].get_mut::<T>()?, x, w, bias, &options).map_err(Error::wrap)
    }
}
custom_op!(Linear: CustomOp2(s1 l1, s2 l2));
