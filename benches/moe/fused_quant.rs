//! The fused block with 8-bit weights, tokens in bf16, sorting to output, with random balanced routing: the models of targets.md.

use super::fused::routing;
use warploom::gemm::{Quantised, QuantisedElement};
use warploom::moe::{FusedQuantOptions, FusedQuantPath, FusedShape, fused_quant};
use warploom::{DType, Device, E4M3, Result, Stream, Tensor, bf16};
use warploom_benches::{Cost, Harness, Model, noise};

pub fn benches(harness: &mut Harness) {
    let (models, all_tokens) = super::models(harness);
    for model in &models {
        for &tokens in &all_tokens {
            case(harness, model, tokens, FusedQuantPath::Auto, Kind::Blocks, noise::<E4M3>);
            case(harness, model, tokens, FusedQuantPath::Auto, Kind::Rounded, noise::<E4M3>);
            case(harness, model, tokens, FusedQuantPath::Auto, Kind::Rows, noise::<E4M3>);
            case(harness, model, tokens, FusedQuantPath::Auto, Kind::Rows, constant);
        }
        // Half of the pairs go to one expert; slots rounded, and in any order; smoothed for each expert.
        let tokens = harness.pick(4096, 16);
        case(harness, model, tokens, FusedQuantPath::Auto, Kind::Skewed, noise::<E4M3>);
        case(harness, model, tokens, FusedQuantPath::Auto, Kind::Unordered, noise::<E4M3>);
        case(harness, model, tokens, FusedQuantPath::Auto, Kind::UnorderedRows, noise::<E4M3>);
        for tokens in [harness.pick(64, 4), tokens] {
            case(harness, model, tokens, FusedQuantPath::Auto, Kind::Smoothed, constant);
            case(harness, model, tokens, FusedQuantPath::Auto, Kind::RoundedRows, noise::<E4M3>);
        }
    }
    use FusedQuantPath::{Tile32, Tile128, Wgmma16, Wgmma64, Wgmma160, Wgmma256};
    for model in &models {
        for &tokens in &all_tokens {
            for path in [Wgmma16, Wgmma64, Wgmma160, Wgmma256] {
                if path != Wgmma16 || tokens <= 64 {
                    case(harness, model, tokens, path, Kind::Blocks, noise::<E4M3>);
                }
            }
        }
        for (path, tokens) in
            [(Tile32, harness.pick(512, 16)), (Tile128, harness.pick(512, 16)), (Tile128, harness.pick(4096, 16))]
        {
            case(harness, model, tokens, path, Kind::Blocks, noise::<E4M3>);
            case(harness, model, tokens, path, Kind::Rows, constant);
        }
    }
}

/// What scales are of.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Blocks,
    /// Of blocks, with `rounded_slots`.
    Rounded,
    /// Of blocks, half of the pairs going to one expert.
    Skewed,
    Rows,
    /// Of rows, with `rounded_slots`.
    RoundedRows,
    /// Of blocks or of rows, with `rounded_slots` and `unordered`.
    Unordered,
    UnorderedRows,
    /// Of rows, both products' inputs smoothed.
    Smoothed,
}

/// Makes weights of a shape from a seed.
type Weights<Q> = fn(&Device, &Stream, &[usize], usize) -> Result<Tensor<Q>>;

/// int8 weights, all the same.
fn constant(device: &Device, stream: &Stream, shape: &[usize], _seed: usize) -> Result<Tensor<i8>> {
    let mut w = Tensor::uninit(device, shape)?;
    stream.fill_bytes(&mut w, 0x35)?;
    Ok(w)
}

fn case<Q: QuantisedElement>(
    harness: &mut Harness,
    &Model { ref name, experts, top_k, hidden, inter }: &Model,
    tokens: usize,
    path: FusedQuantPath,
    kind: Kind,
    of: Weights<Q>,
) {
    // Weights of the experts that the first set names, read once, and activations.
    let routing = |set: usize| {
        let mut ids = routing(tokens, experts, top_k, set);
        if kind == Kind::Skewed {
            ids.iter_mut().step_by(2).for_each(|id| *id = 0);
        }
        ids
    };
    let mut used = routing(0);
    used.sort_unstable();
    used.dedup();
    let cost = Cost::bytes(used.len() * 3 * hidden * inter + tokens * hidden * 2, tokens * hidden * 2)
        .flops(tokens * top_k * 6 * hidden * inter)
        .fp8();
    let mut weights = None;
    let blocks = matches!(kind, Kind::Blocks | Kind::Rounded | Kind::Unordered | Kind::Skewed);
    let scales = match kind {
        Kind::Blocks => "blocks",
        Kind::Rounded => "blocks/rounded",
        Kind::Unordered => "blocks/unordered_rounded",
        Kind::UnorderedRows => "rows/unordered_rounded",
        Kind::Skewed => "blocks/skewed",
        Kind::Rows => "rows",
        Kind::RoundedRows => "rows/rounded",
        Kind::Smoothed => "rows/smoothed",
    };
    let case = format!("moe/fused_quant/{path:?}/{}/{scales}/{name}/{tokens}", Q::DTYPE);
    let case = case.to_lowercase();
    harness.case(&case, cost, |device, stream, set| {
        let x = noise::<bf16>(device, stream, &[tokens, hidden], set)?;
        if weights.is_none() {
            let scales = |n: usize, k: usize, seed: usize| {
                let of_blocks = vec![experts, n.div_ceil(128), k.div_ceil(128)];
                noise::<f32>(device, stream, &if blocks { of_blocks } else { vec![experts, n] }, seed)
            };
            let w13 = (of(device, stream, &[experts, 2 * inter, hidden], 100)?, scales(2 * inter, hidden, 300)?);
            let w2 = (of(device, stream, &[experts, hidden, inter], 200)?, scales(hidden, inter, 400)?);
            let smooth = |n: usize| noise::<f32>(device, stream, &[experts, n], 500 + n);
            let smooth = [smooth(hidden)?, smooth(inter)?];
            weights = Some(std::rc::Rc::new((w13, w2, smooth)));
        }
        let experts_weights = weights.clone().expect("made above");
        let ids = Tensor::from_slice(device, &routing(set), &[tokens, top_k])?;
        let topk_weights = noise::<f32>(device, stream, &[tokens, top_k], set)?;
        let bytes = FusedShape::new(tokens, top_k, experts, hidden, inter).quant_workspace_bytes(DType::Bf16);
        let mut workspace = Tensor::uninit(device, &[bytes])?;
        let mut out = Tensor::<bf16>::uninit(device, &[tokens, hidden])?;
        Ok(move |s: &Stream| {
            let (w13, w2, [smooth13, smooth2]) = &*experts_weights;
            let (w13, w2) = (Quantised::new(&w13.0, &w13.1), Quantised::new(&w2.0, &w2.1));
            let unordered = matches!(kind, Kind::Unordered | Kind::UnorderedRows);
            let rounded = unordered || matches!(kind, Kind::Rounded | Kind::RoundedRows);
            let mut options = FusedQuantOptions::default().path(path).unordered(unordered).rounded_slots(rounded);
            if kind == Kind::Smoothed {
                options = options.smooth(Some(smooth13), Some(smooth2));
            }
            fused_quant(s, &mut out, &x, w13, w2, &ids, &topk_weights, &options, &mut workspace)
        })
    });
}
