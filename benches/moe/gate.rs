//! The gate: experts / groups / groups kept / experts a token, and what one call costs the host.

use warploom::moe::gate::{self, gate};
use warploom::moe::{GateOptions, Scoring};
use warploom::{DType, Device, Float, Result, Stream, Tensor, bf16, f16};
use warploom_benches::{Cost, Harness, noise};

/// Experts, groups, groups kept, experts a token.
type Shape = [usize; 4];

/// DeepSeek-V3, Kimi K2, and 128 experts in groups: sigmoid with a bias in f32.
const WITH_BIAS: [Shape; 3] = [[256, 8, 4, 8], [384, 1, 1, 8], [128, 4, 2, 8]];
/// Qwen3, 64 experts, DeepSeek-V2 (on the dynamic kernel), Qwen3-Next: softmax.
const WITHOUT_BIAS: [Shape; 4] = [[128, 1, 1, 8], [64, 1, 1, 6], [160, 8, 3, 6], [512, 1, 1, 10]];

pub fn benches(harness: &mut Harness) {
    for shape in WITH_BIAS {
        cases::<f32>(harness, shape, Scoring::Sigmoid);
        cases::<bf16>(harness, shape, Scoring::Sigmoid);
    }
    cases::<f16>(harness, WITH_BIAS[0], Scoring::Sigmoid);
    cases::<bf16>(harness, WITH_BIAS[0], Scoring::SqrtSoftplus);
    for shape in WITHOUT_BIAS {
        cases::<bf16>(harness, shape, Scoring::Softmax);
    }
    harness.overhead("moe/gate/overhead/L2", |device, stream| {
        let mut call = Call::<bf16>::new(device, stream, 1, WITH_BIAS[0], 0)?;
        Ok(move |s: &_| call.launch(s, Scoring::Sigmoid))
    });
    harness.overhead("moe/gate/overhead/L1", |device, stream| {
        let mut call = Call::<bf16>::new(device, stream, 1, WITH_BIAS[0], 0)?;
        Ok(move |s: &_| {
            let args = call.args();
            // SAFETY: the tensors have the sizes that the arguments say, and live as long as the closure, which
            // outlives the work.
            unsafe { gate::launch(s, DType::Bf16, &args) }
        })
    });
}

fn cases<T: Float>(harness: &mut Harness, shape: Shape, scoring: Scoring) {
    let [experts, groups, topk_group, topk] = shape;
    let name = match scoring {
        Scoring::Sigmoid => "sigmoid",
        Scoring::Softmax => "softmax",
        _ => "sqrtsoftplus",
    };
    let tokens = harness.pick(&[1, 16, 64, 256, 1024, 4096, 16384][..], &[1, 16]);
    for &tokens in tokens {
        let cost = Cost::bytes(tokens * experts * size_of::<T>() + experts * 4, tokens * topk * 8);
        let case = format!("moe/gate/{name}/{}/{experts}-{groups}-{topk_group}-{topk}/{tokens}", T::DTYPE);
        harness.case(&case, cost, |device, stream, set| {
            let mut call = Call::<T>::new(device, stream, tokens, shape, set)?;
            Ok(move |s: &_| call.launch(s, scoring))
        });
    }
}

/// The tensors of a call.
struct Call<T> {
    shape: Shape,
    logits: Tensor<T>,
    bias: Tensor<f32>,
    weights: Tensor<f32>,
    ids: Tensor<i32>,
}

impl<T: Float> Call<T> {
    fn new(device: &Device, stream: &Stream, tokens: usize, shape: Shape, set: usize) -> Result<Self> {
        let [experts, _, _, topk] = shape;
        Ok(Self {
            shape,
            logits: noise(device, stream, &[tokens, experts], set)?,
            bias: noise(device, stream, &[experts], 100)?,
            weights: Tensor::uninit(device, &[tokens, topk])?,
            ids: Tensor::uninit(device, &[tokens, topk])?,
        })
    }

    fn launch(&mut self, stream: &Stream, scoring: Scoring) -> Result<()> {
        let [_, groups, topk_group, topk] = self.shape;
        let mut options = GateOptions::default().scoring(scoring).groups(groups, topk_group);
        if scoring != Scoring::Softmax {
            options = options.bias(&self.bias);
        }
        gate(stream, &mut self.ids, &mut self.weights, None, &self.logits, topk, &options)
    }

    fn args(&mut self) -> gate::Args {
        let [experts, groups, topk_group, topk] = self.shape.map(|n| n as u32);
        gate::Args {
            logits: self.logits.as_ptr().cast(),
            row_stride: experts.into(),
            bias: self.bias.as_ptr().cast(),
            bias_type: gate::bias_code(DType::F32).expect("f32 is one"),
            weights: self.weights.as_mut_ptr(),
            ids: self.ids.as_mut_ptr(),
            packed: std::ptr::null_mut(),
            valid_rows: std::ptr::null(),
            row_mask: std::ptr::null(),
            expert_map: std::ptr::null(),
            tokens: self.logits.dim(0) as u32,
            experts,
            groups,
            topk_group,
            topk,
            shared_experts: 0,
            scoring: Scoring::Sigmoid.code(),
            renormalize: 1,
            routed_scale: 1.0,
            shared_weight: 1.0,
        }
    }
}
