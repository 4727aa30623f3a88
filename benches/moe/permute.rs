//! Rows of tokens in the order of their experts, sorting included, and back with weights: tokens x experts a token - experts x width.

use crate::moe::fused::routing;
use warploom::moe::sort::workspace_bytes;
use warploom::moe::{SortInput, SortOptions, SortOutput, permute, unpermute};
use warploom::{Tensor, bf16};
use warploom_benches::{Cost, Harness, noise};

pub fn benches(harness: &mut Harness) {
    let tokens = harness.pick(&[1, 64, 512, 4096][..], &[16]);
    let models = harness.pick(&[(8, 2, 4096), (128, 8, 2048), (256, 8, 7168)][..], &[(16, 4, 256)]);
    for &(experts, top_k, n) in models {
        for &tokens in tokens {
            there(harness, tokens, experts, top_k, n);
            back(harness, tokens, experts, top_k, n);
        }
    }
}

fn there(harness: &mut Harness, tokens: usize, experts: usize, top_k: usize, n: usize) {
    let pairs = tokens * top_k;
    // Ids are read; the list, its experts and the way back are written.
    let cost = Cost::bytes((tokens * n * 2) + pairs * 4, pairs * n * 2 + pairs * 12);
    harness.case(&format!("moe/permute/bf16/{tokens}x{top_k}-{experts}x{n}"), cost, |device, s, set| {
        let ids = Tensor::from_slice(device, &routing(tokens, experts, top_k, set), &[tokens, top_k])?;
        let x = noise::<bf16>(device, s, &[tokens, n], set)?;
        let mut permuted = Tensor::<bf16>::zeros(device, &[pairs, n])?;
        let mut sorted = Tensor::zeros(device, &[pairs])?;
        let mut expert_ids = Tensor::zeros(device, &[pairs])?;
        let mut totals = Tensor::zeros(device, &[1])?;
        let mut positions = Tensor::zeros(device, &[tokens, top_k])?;
        let mut offsets = Tensor::zeros(device, &[experts + 1])?;
        let mut workspace = Tensor::zeros(device, &[workspace_bytes(pairs, experts)])?;
        let options = SortOptions::default().block_size(1);
        Ok(move |s: &_| {
            let mut out = SortOutput::new(&mut sorted, &mut expert_ids, &mut totals);
            (out.positions, out.offsets) = (Some(&mut positions), Some(&mut offsets));
            permute(s, &mut permuted, &mut out, &x, &SortInput::new(&ids, experts), &options, &mut workspace)
        })
    });
}

fn back(harness: &mut Harness, tokens: usize, experts: usize, top_k: usize, n: usize) {
    let pairs = tokens * top_k;
    let cost = Cost::bytes(pairs * n * 2 + pairs * 8, tokens * n * 2);
    harness.case(&format!("moe/unpermute/bf16/{tokens}x{top_k}-{experts}x{n}"), cost, |device, s, set| {
        // Where pairs are once they are in the order of their experts.
        let ids = routing(tokens, experts, top_k, set);
        let mut order: Vec<usize> = (0..pairs).collect();
        order.sort_by_key(|&pair| ids[pair]);
        let mut positions = vec![0; pairs];
        order.iter().enumerate().for_each(|(place, &pair)| positions[pair] = place as i32);
        let positions = Tensor::from_slice(device, &positions, &[tokens, top_k])?;
        let y = noise::<bf16>(device, s, &[pairs, n], set)?;
        let weights = noise::<f32>(device, s, &[tokens, top_k], 100 + set)?;
        let mut out = Tensor::<bf16>::zeros(device, &[tokens, n])?;
        Ok(move |s: &_| unpermute(s, &mut out, &y, &positions, Some(&weights), None))
    });
}
