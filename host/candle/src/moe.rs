//! The mixture of experts: gate, and the fused block of experts.

use crate::lend::{Kept, Kernel, Lent, Operation, apply, apply_one, custom_op, pair};
use candle_core::{DType, Error, Layout, Result, Shape, Tensor};
use warploom::moe::{self, ExpertActivation, FusedOptions, FusedShape, GateOptions, GateUp, Scoring};
use warploom::{Stream, Tensor as Lender};

/// Chooses experts for each token by its logits.
#[derive(Clone, Debug)]
pub struct Gate {
    top_k: usize,
    scoring: Scoring,
    groups: (usize, usize),
    renormalize: bool,
    scale: Option<f32>,
    bias: Option<Tensor>,
}

impl Gate {
    /// The `top_k` experts of the highest scores; weights are divided by their sum.
    pub const fn new(top_k: usize, scoring: Scoring) -> Self {
        Self { top_k, scoring, groups: (1, 1), renormalize: true, scale: None, bias: None }
    }

    /// Experts in so many groups, of which `kept` stay.
    pub const fn groups(mut self, groups: usize, kept: usize) -> Self {
        self.groups = (groups, kept);
        self
    }

    /// Whether weights are divided by their sum.
    pub const fn renormalize(mut self, renormalize: bool) -> Self {
        self.renormalize = renormalize;
        self
    }

    /// Multiplies the weights.
    pub const fn scale(mut self, factor: f32) -> Self {
        self.scale = Some(factor);
        self
    }

    /// Adds this to the scores for the choice only: `[experts]`, `f32`, contiguous.
    pub fn bias(mut self, bias: &Tensor) -> Self {
        self.bias = Some(bias.clone());
        self
    }

    /// Weights (`f32`) and experts (`u32`), both `[tokens, top_k]`, for `logits` `[tokens, experts]`.
    ///
    /// # Errors
    /// As for [`RmsNorm::forward`](crate::RmsNorm::forward).
    pub fn forward(&self, logits: &Tensor) -> Result<(Tensor, Tensor)> {
        let mut outputs = apply(self, &[logits])?.into_iter();
        outputs.next().zip(outputs.next()).ok_or_else(|| Error::msg("gate: no outputs"))
    }
}

impl Operation for Gate {
    const NAME: &'static str = "gate";

    fn extra(&self) -> Vec<&Tensor> {
        self.bias.iter().collect()
    }

    fn outputs(&self, inputs: &[&Layout], _: DType) -> Result<Vec<(DType, Shape)>> {
        let extent = |d: usize| inputs[0].dims().get(d).copied().unwrap_or(0);
        // More experts than there are is `moe::gate`'s error, which needs no memory for them.
        let shape = Shape::from((extent(0), self.top_k.min(extent(1))));
        Ok(vec![(DType::F32, shape.clone()), (DType::U32, shape)])
    }

    fn run<T: Kernel>(&self, stream: &Stream, outputs: &mut [Lent], inputs: &[Lent]) -> Result<()> {
        let (groups, kept) = self.groups;
        let mut options =
            GateOptions::default().scoring(self.scoring).groups(groups, kept).renormalize(self.renormalize);
        if let Some(factor) = self.scale {
            options = options.routed_scaling_factor(factor).scale_output(true);
        }
        if let Some(bias) = inputs.get(1) {
            options = options.bias(bias.get::<f32>()?);
        }
        let (weights, ids) = pair(outputs)?;
        let mut ids = ids.indices()?;
        moe::gate::<T>(stream, &mut ids, weights.get_mut()?, None, inputs[0].get()?, self.top_k, &options)
            .map_err(Error::wrap)
    }
}

/// The experts' block: for each token the weighted sum of what its experts make of it; a `CustomOp3` of `x`, `w13` and `w2`.
///
/// Keep the value from call to call: it keeps the workspace.
#[derive(Debug)]
pub struct FusedMoe {
    experts: Tensor,
    weights: Tensor,
    activation: ExpertActivation,
    gate_up: GateUp,
    workspace: Kept<Lender<u8>>,
}

impl FusedMoe {
    /// For the experts (`u32` or `i32`) and weights (`f32`), both `[tokens, top_k]`, that a [`Gate`] gave. Experts are gated by SiLU.
    pub fn new(experts: &Tensor, weights: &Tensor) -> Self {
        Self {
            experts: experts.clone(),
            weights: weights.clone(),
            activation: ExpertActivation::default(),
            gate_up: GateUp::default(),
            workspace: Kept::default(),
        }
    }

    /// With this activation.
    pub fn activation(mut self, activation: ExpertActivation) -> Self {
        self.activation = activation;
        self
    }

    /// With this order of the rows of `w13`.
    pub fn gate_up(mut self, gate_up: GateUp) -> Self {
        self.gate_up = gate_up;
        self
    }

    /// For other experts and weights, with the same workspace.
    pub fn route(&mut self, experts: &Tensor, weights: &Tensor) {
        (self.experts, self.weights) = (experts.clone(), weights.clone());
    }

    /// `x` is `[tokens, hidden]`, `w13` `[experts, 2 width, hidden]` (gates, then values), `w2` `[experts, hidden, width]`.
    ///
    /// # Errors
    /// As for [`RmsNorm::forward`](crate::RmsNorm::forward).
    pub fn forward(&self, x: &Tensor, w13: &Tensor, w2: &Tensor) -> Result<Tensor> {
        apply_one(self, &[x, w13, w2])
    }
}

impl Operation for FusedMoe {
    const NAME: &'static str = "fused_moe";

    fn extra(&self) -> Vec<&Tensor> {
        vec![&self.experts, &self.weights]
    }

    fn outputs(&self, inputs: &[&Layout], dtype: DType) -> Result<Vec<(DType, Shape)>> {
        Ok(vec![(dtype, inputs[0].shape().clone())])
    }

    fn run<T: Kernel>(&self, stream: &Stream, outputs: &mut [Lent], inputs: &[Lent]) -> Result<()> {
        let (x, w13, w2) = (inputs[0].get::<T>()?, inputs[1].get::<T>()?, inputs[2].get::<T>()?);
        let (ids, weights) = (inputs[3].indices()?, inputs[4].get::<f32>()?);
        let out = outputs[0].get_mut::<T>()?;
        let options = FusedOptions::default().activation(self.activation).gate_up(self.gate_up);
        let shape = FusedShape::new(x.dim(0), ids.dim(1), w2.dim(0), x.dim(1), w2.dim(2));
        // What has no size is refused by the block itself, which says why.
        let bytes = Some(shape.workspace_bytes(T::DTYPE)).filter(|&bytes| bytes < usize::MAX).unwrap_or(0);
        self.workspace.with(
            stream,
            |w| w.len() >= bytes,
            || Lender::uninit(stream.device(), &[bytes]),
            |w| moe::fused(stream, out, x, w13, w2, &ids, weights, &options, w),
        )
    }
}
custom_op!(FusedMoe: CustomOp3(s1 l1, s2 l2, s3 l3));
