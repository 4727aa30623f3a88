//! Expert capacity: tokens x choices of experts, of which each token wants two and each expert takes what it has on average.

use crate::moe::fused::routing;
use warploom::Tensor;
use warploom::moe::capacity;
use warploom_benches::{Cost, Harness};

pub fn benches(harness: &mut Harness) {
    let tokens = harness.pick(&[1, 64, 512, 4096, 16384][..], &[16]);
    for (experts, choices) in [(8, 2), (128, 8), (256, 8)] {
        for &tokens in tokens {
            case(harness, tokens, experts, choices);
        }
    }
}

fn case(harness: &mut Harness, tokens: usize, experts: usize, choices: usize) {
    let (pairs, wanted) = (tokens * choices, 2);
    let most = (tokens * wanted).div_ceil(experts);
    let cost = Cost::bytes(pairs * 4, pairs * 4 + experts * 4);
    harness.case(&format!("moe/capacity/{tokens}x{choices}-{experts}"), cost, |device, _, set| {
        let ids = Tensor::from_slice(device, &routing(tokens, experts, choices, set), &[tokens, choices])?;
        let mut kept = Tensor::uninit(device, &[tokens, choices])?;
        let mut loads = Tensor::uninit(device, &[experts])?;
        Ok(move |s: &_| capacity(s, &mut kept, Some(&mut loads), &ids, experts, wanted, most))
    });
}
