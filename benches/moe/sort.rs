//! Sorting by expert: tokens x experts a token of experts, blocks of 64.

use crate::moe::fused::routing;
use warploom::Tensor;
use warploom::moe::sort::{capacity, workspace_bytes};
use warploom::moe::{SortInput, SortOptions, SortOutput, sort};
use warploom_benches::{Cost, Harness};

pub fn benches(harness: &mut Harness) {
    let tokens = harness.pick(&[1, 64, 512, 4096, 16384][..], &[16]);
    for (experts, top_k) in [(8, 2), (128, 8), (256, 8)] {
        for &tokens in tokens {
            case(harness, tokens, experts, top_k);
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
