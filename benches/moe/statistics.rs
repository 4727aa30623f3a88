//! Routing statistics, counts of experts, biases, and noisy top-k: tokens x experts a token of experts.

use crate::moe::fused::routing;
use warploom::moe::{
    NoisyTopKOptions, StatisticsOutput, histogram, noisy_top_k, statistics, statistics::workspace_bytes, update_bias,
};
use warploom::{Tensor, bf16};
use warploom_benches::{Cost, Harness, noise};

pub fn benches(harness: &mut Harness) {
    let tokens = harness.pick(&[1, 64, 4096, 16384][..], &[16]);
    for (experts, top_k) in [(8, 2), (128, 8), (256, 8)] {
        for &tokens in tokens {
            case(harness, tokens, experts, top_k);
        }
        harness.case(
            &format!("moe/update_bias/{experts}"),
            Cost::bytes(experts * 12, experts * 4),
            |device, _, set| {
                let loads = Tensor::from_slice(device, &routing(1, experts, experts, set), &[experts])?;
                let mut bias = Tensor::<f32>::zeros(device, &[experts])?;
                Ok(move |s: &_| update_bias(s, &mut bias, &loads, 0.001))
            },
        );
    }
}

fn case(harness: &mut Harness, tokens: usize, experts: usize, top_k: usize) {
    let (pairs, name) = (tokens * top_k, format!("{tokens}x{top_k}-{experts}"));
    let cost = Cost::bytes(tokens * experts * 2 + pairs * 8, experts * 12);
    harness.case(&format!("moe/statistics/{name}"), cost, |device, stream, set| {
        let logits = noise::<bf16>(device, stream, &[tokens, experts], set)?;
        let ids = Tensor::from_slice(device, &routing(tokens, experts, top_k, set), &[tokens, top_k])?;
        let weights = noise::<f32>(device, stream, &[tokens, top_k], set)?;
        let mut summary = Tensor::uninit(device, &[5])?;
        let mut loads = Tensor::uninit(device, &[experts])?;
        let mut importance = Tensor::uninit(device, &[experts])?;
        let mut workspace = Tensor::uninit(device, &[workspace_bytes(tokens, experts)])?;
        Ok(move |s: &_| {
            let mut out = StatisticsOutput::new(&mut summary).loads(&mut loads).importance(&mut importance);
            statistics(s, &mut out, &logits, &ids, &weights, &mut workspace)
        })
    });
    harness.case(&format!("moe/histogram/{name}"), Cost::bytes(pairs * 4, experts * 8), |device, _, set| {
        let ids = Tensor::from_slice(device, &routing(tokens, experts, top_k, set), &[tokens, top_k])?;
        let mut counts = Tensor::zeros(device, &[experts])?;
        Ok(move |s: &_| histogram(s, &mut counts, &ids))
    });
    let cost = Cost::bytes(2 * tokens * experts * 2, pairs * 8);
    harness.case(&format!("moe/noisy_top_k/{name}"), cost, |device, stream, set| {
        let logits = noise::<bf16>(device, stream, &[tokens, experts], set)?;
        let spread = noise::<bf16>(device, stream, &[tokens, experts], set + 1000)?;
        let mut weights = Tensor::uninit(device, &[tokens, top_k])?;
        let mut ids = Tensor::uninit(device, &[tokens, top_k])?;
        Ok(move |s: &_| {
            let options = NoisyTopKOptions::default().noise_logits(&spread).random(set as u64, 0, 0);
            noisy_top_k(s, &mut ids, &mut weights, None, &logits, &options)
        })
    });
}
