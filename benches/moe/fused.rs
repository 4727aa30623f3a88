//! The fused block in bf16, sorting to output, with random balanced routing: the models of targets.md.

use warploom::moe::{FusedOptions, FusedPath, FusedShape, fused};
use warploom::{DType, Tensor, bf16};
use warploom_benches::{Cost, Harness, noise};

/// Name, experts, experts a token, hidden and intermediate width.
const MODELS: [(&str, usize, usize, usize, usize); 3] =
    [("mixtral", 8, 2, 4096, 14336), ("qwen3-30b", 128, 8, 2048, 768), ("deepseek-v3", 256, 8, 7168, 2048)];

pub fn benches(harness: &mut Harness) {
    let models = harness.pick(&MODELS[..], &[("tiny", 16, 4, 256, 64)]);
    let tokens = harness.pick(&[1, 8, 64, 512, 4096][..], &[1, 16]);
    for &model in models {
        for &tokens in tokens {
            case(harness, model, tokens, FusedPath::Auto);
        }
    }
    // What else might have been chosen, where that is a question.
    use FusedPath::{Stream8, Stream16, Tile32, Tile64, Tile128};
    for &model in models.iter().filter(|m| m.0 != "deepseek-v3") {
        for &tokens in tokens.iter().filter(|&&t| t > 8) {
            for path in [Stream8, Stream16, Tile32, Tile64, Tile128] {
                case(harness, model, tokens, path);
            }
        }
    }
}

/// Distinct experts for each token, all equally likely.
pub fn routing(tokens: usize, experts: usize, top_k: usize, seed: usize) -> Vec<i32> {
    let mut state = (seed as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut order: Vec<i32> = (0..experts as i32).collect();
    let mut ids = Vec::with_capacity(tokens * top_k);
    for _ in 0..tokens {
        for slot in 0..top_k {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            order.swap(slot, slot + (state >> 33) as usize % (experts - slot));
        }
        ids.extend_from_slice(&order[..top_k]);
    }
    ids
}

fn case(
    harness: &mut Harness,
    (name, experts, top_k, hidden, inter): (&str, usize, usize, usize, usize),
    tokens: usize,
    path: FusedPath,
) {
    // Weights of the experts that the first set names, read once, and activations.
    let mut used = routing(tokens, experts, top_k, 0);
    used.sort_unstable();
    used.dedup();
    let cost = Cost::bytes((used.len() * 3 * hidden * inter + tokens * hidden) * 2, tokens * hidden * 2)
        .flops(tokens * top_k * 6 * hidden * inter);
    harness.case(&format!("moe/fused/{path:?}/{name}/{tokens}").to_lowercase(), cost, |device, stream, set| {
        let x = noise::<bf16>(device, stream, &[tokens, hidden], set)?;
        let w13 = noise::<bf16>(device, stream, &[experts, 2 * inter, hidden], set + 100)?;
        let w2 = noise::<bf16>(device, stream, &[experts, hidden, inter], set + 200)?;
        let ids = Tensor::from_slice(device, &routing(tokens, experts, top_k, set), &[tokens, top_k])?;
        let weights = noise::<f32>(device, stream, &[tokens, top_k], set)?;
        let bytes = FusedShape::new(tokens, top_k, experts, hidden, inter).workspace_bytes(DType::Bf16);
        let mut workspace = Tensor::uninit(device, &[bytes])?;
        let mut out = Tensor::<bf16>::uninit(device, &[tokens, hidden])?;
        let options = FusedOptions::default().path(path);
        Ok(move |s: &_| fused(s, &mut out, &x, &w13, &w2, &ids, &weights, &options, &mut workspace))
    });
}
