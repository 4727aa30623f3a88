//! Sampling of tokens.

use crate::lend::{Kept, Kernel, Lent, Operation, apply_one, custom_op};
use candle_core::{DType, Layout, Result, Shape, Tensor};
use warploom::Stream;
use warploom::sampling::{SamplingOptions, SamplingWorkspace, top_k_top_p};

/// Draws a token for each row of logits; a `CustomOp1`.
///
/// Keep the value from step to step: it keeps the workspace, and [`offset`](Self::set_offset) tells steps apart.
#[derive(Debug)]
pub struct Sampler {
    temperature: f32,
    top_k: Option<i32>,
    top_p: Option<f32>,
    min_p: Option<f32>,
    seed: u64,
    offset: u64,
    workspace: Kept<SamplingWorkspace>,
}

impl Sampler {
    /// From the whole distribution, at temperature 1.
    pub fn new(seed: u64) -> Self {
        Self { temperature: 1.0, top_k: None, top_p: None, min_p: None, seed, offset: 0, workspace: Kept::default() }
    }

    /// The most likely token, the lower one of equals.
    pub fn greedy() -> Self {
        Self::new(0).temperature(0.0)
    }

    /// Divides the logits; 0 is [`greedy`](Self::greedy).
    pub fn temperature(mut self, temperature: f32) -> Self {
        self.temperature = temperature;
        self
    }

    /// Among the `k` most likely tokens only. The vocabulary is not known before [`forward`](Self::forward), so a larger `k` is all
    /// of it, as in the device arrays of [`top_k_top_p`](top_k_top_p()); 0 is an error there.
    pub fn top_k(mut self, k: u32) -> Self {
        self.top_k = Some(i32::try_from(k).unwrap_or(i32::MAX));
        self
    }

    /// Among the fewest tokens that have a probability of `p` together.
    pub fn top_p(mut self, p: f32) -> Self {
        self.top_p = Some(p);
        self
    }

    /// Among tokens at least `p` times as likely as the most likely one.
    pub fn min_p(mut self, p: f32) -> Self {
        self.min_p = Some(p);
        self
    }

    /// The place in the sequence of random numbers: another one for each step of a generation.
    pub fn set_offset(&mut self, offset: u64) {
        self.offset = offset;
    }

    /// Tokens (`u32`) `[..]` for `logits` `[.., vocab]`.
    ///
    /// # Errors
    /// As for [`RmsNorm::forward`](crate::RmsNorm::forward).
    pub fn forward(&self, logits: &Tensor) -> Result<Tensor> {
        apply_one(self, &[logits])
    }
}

impl Operation for Sampler {
    const NAME: &'static str = "top_k_top_p";

    fn outputs(&self, inputs: &[&Layout], _: DType) -> Result<Vec<(DType, Shape)>> {
        let dims = inputs[0].dims();
        Ok(vec![(DType::U32, dims[..dims.len().saturating_sub(1)].into())])
    }

    fn run<T: Kernel>(&self, stream: &Stream, outputs: &mut [Lent], inputs: &[Lent]) -> Result<()> {
        let logits = inputs[0].get::<T>()?;
        let tokens = outputs[0].get_mut::<u32>()?;
        let vocab = logits.shape().last().copied().unwrap_or(0);
        let rows = tokens.len();
        let mut options = SamplingOptions::default().temperature(self.temperature).seed(self.seed).offset(self.offset);
        if let Some(k) = self.top_k {
            options = options.top_k(k.min(i32::try_from(vocab).unwrap_or(i32::MAX)));
        }
        if let Some(p) = self.top_p {
            options = options.top_p(p);
        }
        if let Some(p) = self.min_p {
            options = options.min_p(p);
        }
        self.workspace.with(
            stream,
            |w| w.layout().rows >= rows && w.layout().vocab >= vocab,
            || SamplingWorkspace::new(stream.device(), rows, vocab),
            |w| top_k_top_p(stream, tokens, None, logits, &options, w),
        )
    }
}
custom_op!(Sampler: CustomOp1(s1 l1));
