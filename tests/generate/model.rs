//! The network and the executor, against what the model's authors computed.

use super::runtime::config::Config;
use super::runtime::engine::{Engine, Event, Request};
use super::runtime::executor::{Chunk, ModelExecutor, Sampling, Sizes};
use super::runtime::model::{Cost, Model, Observer, Real};
use super::runtime::problem::Result;
use super::runtime::text::Text;
use super::runtime::tiny_moe;
use super::runtime::weights::Weights;
use serde::Deserialize;
use warploom::{Device, SimtOptions, Stream, Tensor, bf16};
use warploom_tests::sanitizing;

/// A prompt of `reference.json`.
#[derive(Deserialize)]
struct Reference {
    prompt: String,
    prompt_ids: Vec<u32>,
    last_logits_top32: Top,
    routing: Vec<Routing>,
    greedy_ids: Vec<u32>,
    greedy_gaps: Vec<f32>,
}

#[derive(Deserialize)]
struct Top {
    ids: Vec<usize>,
    values: Vec<f32>,
}

/// Experts and weights of a layer, for each token, best first.
#[derive(Deserialize)]
struct Routing {
    ids: Vec<Vec<i32>>,
    weights: Vec<Vec<f32>>,
}

/// All of them; one under a sanitizer.
fn references() -> Vec<Reference> {
    let mut all: Vec<Reference> =
        serde_json::from_slice(&std::fs::read(tiny_moe().join("reference.json")).unwrap()).unwrap();
    all.truncate(if sanitizing() { 1 } else { usize::MAX });
    all
}

/// The SIMT device as the example uses it, and the GPU if there is one: that alone under a sanitizer.
fn devices() -> Vec<Device> {
    let simt = (!sanitizing()).then(|| Device::simt_with(SimtOptions::default().host_products(true)));
    simt.into_iter().chain(warploom_tests::gpu()).collect()
}

fn executor<T: Real>(
    device: &Device,
    rows: usize,
    chunk: usize,
    blocks: usize,
    sampling: Sampling,
) -> ModelExecutor<T> {
    let config = Config::read(&tiny_moe().join("config.json")).unwrap();
    let weights = Weights::open(&tiny_moe().join("model.safetensors")).unwrap();
    let model = Model::load(device, &config, &weights).unwrap();
    let sizes = Sizes { rows, chunk, blocks, block_size: 16, max_len: config.max_position_embeddings };
    ModelExecutor::new(device, model, sizes, sampling).unwrap()
}

/// Generated tokens, by request.
fn generate<T: Real>(engine: &mut Engine<ModelExecutor<T>>, prompts: &[Vec<u32>], tokens: usize) -> Vec<Vec<u32>> {
    let mut texts = vec![vec![]; prompts.len()];
    let first = prompts.iter().map(|p| {
        let request = Request { prompt: p.clone(), tokens, eos: None };
        engine.submit(request).unwrap()
    });
    let first = first.collect::<Vec<_>>()[0];
    for event in engine.run().unwrap() {
        if let Event::Token(id, token) = event {
            texts[id - first].push(token);
        }
    }
    texts
}

/// Collects what each layer chose.
#[derive(Default)]
struct Routes(Vec<(Vec<i32>, Vec<f32>)>);

impl Observer for Routes {
    fn launched(&mut self, _: &Stream, _: &'static str, _: Cost) -> Result<()> {
        Ok(())
    }
    fn routed(&mut self, ids: &Tensor<i32>, weights: &Tensor<f32>) -> Result<()> {
        self.0.push((ids.to_vec()?, weights.to_vec()?));
        Ok(())
    }
}

/// Last logits within `logits`, routing where weights differ by more than `routing`, and greedy tokens up to the first gap
/// below `gap`.
fn compare<T: Real>(device: &Device, logits: f32, gap: f32, routing: Option<f32>, tokens: usize) {
    let tokens = if sanitizing() { 4 } else { tokens };
    let mut e = executor::<T>(device, 1, 64, 70, Sampling::default());
    e.kept_logits = Some(vec![]);
    for r in references() {
        let blocks: Vec<u32> = (0..r.prompt_ids.len().div_ceil(16) as u32).collect();
        let mut routes = Routes::default();
        let chunk = Chunk { tokens: &r.prompt_ids, start: 0, blocks: &blocks, sample: true };
        let next = e.prefill_observed(&[chunk], &mut routes).unwrap();
        let got = e.kept_logits.as_mut().unwrap().pop().unwrap();
        for (&id, &want) in r.last_logits_top32.ids.iter().zip(&r.last_logits_top32.values) {
            assert!((got[id] - want).abs() <= logits, "{:?}, logit {id}: {} for {want}", r.prompt, got[id]);
        }
        if r.greedy_gaps[0] >= gap {
            assert_eq!(next, r.greedy_ids[..1]);
        }
        let Some(tolerance) = routing else { continue };
        for (layer, ((ids, weights), want)) in routes.0.iter().zip(&r.routing).enumerate() {
            let (top_k, slots) = (want.ids[0].len(), ids.len() / want.ids.len());
            for (t, (want_ids, want_weights)) in want.ids.iter().zip(&want.weights).enumerate() {
                let pairs = |ids: &[i32], weights: &[f32]| {
                    let mut pairs: Vec<_> = ids.iter().copied().zip(weights.iter().copied()).collect();
                    pairs.sort_by_key(|p| p.0);
                    pairs
                };
                let got = pairs(&ids[t * slots..][..top_k], &weights[t * slots..][..top_k]);
                let want = pairs(want_ids, want_weights);
                for (g, w) in got.iter().zip(&want) {
                    assert_eq!(g.0, w.0, "{:?}, layer {layer}, token {t}: {got:?} for {want:?}", r.prompt);
                    assert!((g.1 - w.1).abs() < tolerance, "{:?}, layer {layer}, token {t}", r.prompt);
                }
            }
        }
    }
    let mut engine = Engine::new(e).unwrap();
    for r in references() {
        let got = generate(&mut engine, std::slice::from_ref(&r.prompt_ids), tokens);
        let sure = r.greedy_gaps.iter().position(|&g| g < gap).unwrap_or(64).min(tokens);
        assert_eq!(got[0][..sure], r.greedy_ids[..sure], "{:?}", r.prompt);
    }
}

#[test]
fn f32_is_the_reference() {
    for device in devices() {
        compare::<f32>(&device, 2e-3, 0.01, Some(1e-3), 64);
    }
}

#[test]
fn bf16_is_near_the_reference() {
    for device in devices() {
        compare::<bf16>(&device, 0.15, 0.3, None, 64);
    }
}

/// The same with every product in the emulator: a prompt and a few tokens.
#[test]
fn emulated_products_are_near_the_reference() {
    if sanitizing() {
        return;
    }
    let text = Text::read(&tiny_moe().join("tokenizer.json"), "<|file|>", 4096).unwrap();
    let r = references().into_iter().min_by_key(|r| r.prompt_ids.len()).unwrap();
    assert_eq!(text.encode(&r.prompt).unwrap(), r.prompt_ids);
    let run = |device: &Device| {
        let mut e = executor::<bf16>(device, 1, 64, 8, Sampling::default());
        e.kept_logits = Some(vec![]);
        let mut engine = Engine::new(e).unwrap();
        let texts = generate(&mut engine, std::slice::from_ref(&r.prompt_ids), 2);
        (texts, engine.executor().kept_logits.take().unwrap().remove(0))
    };
    let (_, logits) = run(&Device::simt());
    // In chunks, for whose pairs of tokens and experts there are other kernels, it comes to the same bits.
    let prompt =
        text.encode("use std::collections::HashMap;\n\nfn main() { let x = 1; let y = 2; let z = x + y; }").unwrap();
    assert!(prompt.len() > 24, "{} tokens", prompt.len());
    let last = |chunk: usize| {
        let mut e = executor::<bf16>(&Device::simt(), 1, chunk, 8, Sampling::default());
        e.kept_logits = Some(vec![]);
        let mut engine = Engine::new(e).unwrap();
        generate(&mut engine, std::slice::from_ref(&prompt), 1);
        engine.executor().kept_logits.take().unwrap()
    };
    assert!(last(12) == last(24));
    for (&id, &want) in r.last_logits_top32.ids.iter().zip(&r.last_logits_top32.values) {
        assert!((logits[id] - want).abs() <= 0.15, "logit {id}: {} for {want}", logits[id]);
    }
}

/// Texts other than the reference's, some longer than a chunk.
fn prompts() -> Vec<Vec<u32>> {
    let text = Text::read(&tiny_moe().join("tokenizer.json"), "<|file|>", 4096).unwrap();
    let long = "impl<T: Clone> Stack<T> {\n    /// Pushes.\n    pub fn push(&mut self, value: T) {\n        self.0.push(value);\n    }\n";
    ["fn main() {", "", long, "use std::collections::", &long.repeat(2), "fn main() { let x"]
        .iter()
        .map(|p| text.encode(p).unwrap())
        .collect()
}

/// Batched, chunked, preempted and single runs give the same tokens.
fn the_same_however_it_is_run<T: Real>(device: &Device, sampling: Sampling, tokens: usize) {
    let mut prompts = prompts();
    let tokens = if sanitizing() { 3 } else { tokens };
    if sanitizing() {
        // A short one, and one that is longer than a chunk.
        prompts = vec![prompts.swap_remove(0), prompts.swap_remove(2)];
    }
    let alone: Vec<Vec<u32>> = prompts
        .iter()
        .map(|p| {
            let mut engine = Engine::new(executor::<T>(device, 1, 256, 70, sampling)).unwrap();
            generate(&mut engine, std::slice::from_ref(p), tokens).remove(0)
        })
        .collect();
    let longest = prompts.iter().map(Vec::len).max().unwrap() + tokens;
    // Everybody together; in chunks; two at a time; with so few blocks that somebody has to wait. Chunks of 20 have pairs of tokens and experts for which other kernels
    // would be quicker.
    let runs = [(6, 64, longest.div_ceil(16) + 2), (6, 7, 100), (6, 256, 100), (2, 33, 100), (6, 20, 100)];
    for (rows, chunk, blocks) in runs.into_iter().take(if sanitizing() { 2 } else { 5 }) {
        let mut engine = Engine::new(executor::<T>(device, rows, chunk, blocks, sampling)).unwrap();
        let together = generate(&mut engine, &prompts, tokens);
        assert_eq!(together, alone, "{rows} rows, chunks of {chunk}, {blocks} blocks on {device:?}");
        assert_eq!(engine.free_blocks(), blocks);
        // The few tokens of a run under a sanitizer may find room.
        if blocks < 100 && !sanitizing() {
            assert!(engine.counts().preempted > 0, "{:?}", engine.counts());
        }
    }
}

#[test]
fn greedy_runs_are_the_same_however_they_are_run() {
    for device in devices() {
        // `f32_is_the_reference` shows these kernels to a sanitizer.
        if !sanitizing() {
            the_same_however_it_is_run::<f32>(&device, Sampling::default(), 20);
        }
        // On the SIMT device, where it takes long, one type here and the other one below.
        if !device.is_simt() {
            the_same_however_it_is_run::<bf16>(&device, Sampling::default(), 20);
        }
    }
}

#[test]
fn sampled_runs_are_the_same_however_they_are_run() {
    let sampling = Sampling { temperature: 0.9, top_k: 30, top_p: 0.9, min_p: 0.01, seed: 5 };
    for device in devices() {
        if !sanitizing() && !device.is_simt() {
            the_same_however_it_is_run::<f32>(&device, sampling, 20);
        }
        the_same_however_it_is_run::<bf16>(&device, Sampling { top_k: 0, ..sampling }, 20);
    }
}
