//! Sorting by expert: tokens x experts a token of experts, blocks of 64; flat, packed (CK Tile's convention, with weights), and flat with the zeroing of an f32 row of 4096 for each token.

use crate::moe::fused::routing;
use warploom::Tensor;
use warploom::moe::sort::{capacity, workspace_bytes};
use warploom::moe::{SortConvention, SortInput, SortOptions, SortOutput, sort, sort_and_zero};
use warploom_benches::{Cost, Harness, noise};

/// Columns of what is zeroed.
const ZEROED: usize = 4096;

pub fn benches(harness: &mut Harness) {
    let tokens = harness.pick(&[1, 64, 512, 4096, 16384][..], &[16]);
    for (experts, top_k) in [(8, 2), (128, 8), (256, 8)] {
        for &tokens in tokens {
            case(harness, tokens, experts, top_k);
            packed(harness, tokens, experts, top_k);
            zeroing(harness, tokens, experts, top_k);
        }
    }
}

fn case(harness: &mut Harness, tokens: usize, experts: usize, top_k: usize) {
    let (pairs, block) = (tokens * top_k, 64);
    let length = capacity(pairs, experts, block, false);
    let cost = Cost::bytes(pairs * 4, length * 4 + length / block * 4);
    harness.case(&format!("moe/sort/flat/{tokens}x{top_k}-{experts}"), cost, |device, _, set| {
        let ids = routing(tokens, experts, top_k, set);
        let ids = Tensor::from_slice(device, &ids, &[tokens, top_k])?;
        let mut sorted = Tensor::zeros(device, &[length])?;
        let mut expert_ids = Tensor::zeros(device, &[length / block])?;
        let mut totals = Tensor::zeros(device, &[1])?;
        let mut workspace = Tensor::zeros(device, &[workspace_bytes(pairs, experts)])?;
        let options = SortOptions::default().block_size(block);
        Ok(move |s: &_| {
            let mut out = SortOutput::new(&mut sorted, &mut expert_ids, &mut totals);
            sort(s, &mut out, &SortInput::new(&ids, experts), &options, &mut workspace)
        })
    });
}

fn packed(harness: &mut Harness, tokens: usize, experts: usize, top_k: usize) {
    let (pairs, block) = (tokens * top_k, 64);
    let length = capacity(pairs, experts, block, false);
    let cost = Cost::bytes(pairs * 8, length * 8 + length / block * 4);
    harness.case(&format!("moe/sort/packed/{tokens}x{top_k}-{experts}"), cost, |device, stream, set| {
        let ids = Tensor::from_slice(device, &routing(tokens, experts, top_k, set), &[tokens, top_k])?;
        let weights = noise::<f32>(device, stream, &[tokens, top_k], set)?;
        let mut sorted = Tensor::zeros(device, &[length])?;
        let mut expert_ids = Tensor::zeros(device, &[length / block])?;
        let mut totals = Tensor::zeros(device, &[2])?;
        let mut sorted_weights = Tensor::zeros(device, &[length])?;
        let mut workspace = Tensor::zeros(device, &[workspace_bytes(pairs, experts)])?;
        let options = SortOptions::default().block_size(block).convention(SortConvention::Packed);
        Ok(move |s: &_| {
            let out = SortOutput::new(&mut sorted, &mut expert_ids, &mut totals);
            let input = SortInput::new(&ids, experts).topk_weights(&weights);
            sort(s, &mut out.sorted_weights(&mut sorted_weights), &input, &options, &mut workspace)
        })
    });
}

fn zeroing(harness: &mut Harness, tokens: usize, experts: usize, top_k: usize) {
    let (pairs, block) = (tokens * top_k, 64);
    let length = capacity(pairs, experts, block, false);
    let cost = Cost::bytes(pairs * 4, length * 4 + length / block * 4 + tokens * ZEROED * 4);
    harness.case(&format!("moe/sort_and_zero/{tokens}x{top_k}-{experts}x{ZEROED}"), cost, |device, _, set| {
        let ids = Tensor::from_slice(device, &routing(tokens, experts, top_k, set), &[tokens, top_k])?;
        let mut sorted = Tensor::zeros(device, &[length])?;
        let mut expert_ids = Tensor::zeros(device, &[length / block])?;
        let mut totals = Tensor::zeros(device, &[1])?;
        let mut zero = Tensor::<f32>::uninit(device, &[tokens, ZEROED])?;
        let mut workspace = Tensor::zeros(device, &[workspace_bytes(pairs, experts)])?;
        let options = SortOptions::default().block_size(block);
        Ok(move |s: &_| {
            let mut out = SortOutput::new(&mut sorted, &mut expert_ids, &mut totals);
            sort_and_zero(s, &mut out, &mut zero, &SortInput::new(&ids, experts), &options, &mut workspace)
        })
    });
}
