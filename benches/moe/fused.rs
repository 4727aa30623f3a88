//! The fused block in bf16, sorting to output, with random balanced routing: the models of targets.md. In f16, which has kernels of its own, what `Auto` chooses.

use warploom::moe::{FusedOptions, FusedPath, FusedShape, fused};
use warploom::{Float, Tensor, bf16, f16};
use warploom_benches::{Cost, Harness, Model, noise};

pub fn benches(harness: &mut Harness) {
    let (models, all_tokens) = super::models(harness);
    for model in &models {
        for &tokens in &all_tokens {
            case::<bf16>(harness, model, tokens, FusedPath::Auto, "");
            case::<bf16>(harness, model, tokens, FusedPath::Auto, "shuffled/");
            case::<f16>(harness, model, tokens, FusedPath::Auto, "f16/");
            case::<bf16>(harness, model, tokens, FusedPath::Auto, "f32_slots/");
            case::<bf16>(harness, model, tokens, FusedPath::Auto, "rounded/");
        }
        // Half of the pairs go to one expert; sums in any order, in f32 and of what is rounded.
        let many = harness.pick(1024, 16);
        for &tokens in all_tokens.iter().filter(|&&tokens| tokens >= many) {
            case::<bf16>(harness, model, tokens, FusedPath::Auto, "skewed/");
            case::<bf16>(harness, model, tokens, FusedPath::Auto, "unordered/");
            case::<bf16>(harness, model, tokens, FusedPath::Auto, "unordered_rounded/");
        }
    }
    // What else might have been chosen, where that is a question.
    use FusedPath::{Direct, Stream8, Stream16, Tile32, Tile64, Tile128, Vector, Wgmma16, Wgmma64, Wgmma176};
    for model in &models {
        for &tokens in &all_tokens {
            let pairs = tokens * model.top_k;
            let each = pairs.div_ceil(model.experts);
            for path in [Direct, Wgmma16, Vector] {
                if pairs <= 64 && (path != Vector || tokens == 1) {
                    case::<bf16>(harness, model, tokens, path, "");
                }
            }
            for path in [Stream8, Stream16, Tile32, Tile64, Tile128, Wgmma64, Wgmma176] {
                let block = match path {
                    Wgmma64 => 64,
                    Wgmma176 => 176,
                    path => path.block(),
                };
                if (each <= 2 * block || block == 176) && (block <= 64 || 8 * each >= block) {
                    case::<bf16>(harness, model, tokens, path, "");
                }
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

fn case<T: Float>(
    harness: &mut Harness,
    &Model { ref name, experts, top_k, hidden, inter }: &Model,
    tokens: usize,
    path: FusedPath,
    kind: &str,
) {
    let routing = |set: usize| {
        let mut ids = routing(tokens, experts, top_k, set);
        if kind == "skewed/" {
            ids.iter_mut().step_by(2).for_each(|id| *id = 0);
        }
        ids
    };
    // Weights of the experts that the first set names, read once, and activations.
    let mut used = routing(0);
    used.sort_unstable();
    used.dedup();
    let cost = Cost::bytes((used.len() * 3 * hidden * inter + tokens * hidden) * 2, tokens * hidden * 2)
        .flops(tokens * top_k * 6 * hidden * inter);
    // One set of weights for all: they are larger than the cache, or the tokens of each set name others.
    let mut weights = None;
    harness.case(&format!("moe/fused/{path:?}/{kind}{name}/{tokens}").to_lowercase(), cost, |device, stream, set| {
        let x = noise::<T>(device, stream, &[tokens, hidden], set)?;
        if weights.is_none() {
            let w13 = noise::<T>(device, stream, &[experts, 2 * inter, hidden], 100)?;
            let w2 = noise::<T>(device, stream, &[experts, hidden, inter], 200)?;
            weights = Some(std::rc::Rc::new((w13, w2)));
        }
        let experts_weights = weights.clone().expect("made above");
        let ids = Tensor::from_slice(device, &routing(set), &[tokens, top_k])?;
        let topk_weights = noise::<f32>(device, stream, &[tokens, top_k], set)?;
        let bytes = FusedShape::new(tokens, top_k, experts, hidden, inter).workspace_bytes(T::DTYPE);
        let mut workspace = Tensor::uninit(device, &[bytes])?;
        let mut out = Tensor::<T>::uninit(device, &[tokens, hidden])?;
        // Random numbers are as random in any order.
        let options = FusedOptions::default()
            .path(path)
            .unordered(kind.starts_with("unordered"))
            .rounded_slots(kind.ends_with("rounded/"))
            .f32_slots(kind == "f32_slots/")
            .shuffled(kind == "shuffled/");
        Ok(move |s: &_| {
            let (w13, w2) = &*experts_weights;
            fused(s, &mut out, &x, w13, w2, &ids, &topk_weights, &options, &mut workspace)
        })
    });
}
