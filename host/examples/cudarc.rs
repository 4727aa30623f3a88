//! One layer and the choice of the next token on buffers and a stream of cudarc's, captured in a graph of cudarc's:
//! rms_norm, router, gate, fused MoE, logits, sampling. The same on the SIMT device, to compare.
//!
//! `cargo run --release --features cudarc --example cudarc`

use clap::Parser;
use cudarc::driver::{CudaContext, CudaSlice, CudaStream, sys};
use std::error::Error;
use std::sync::Arc;
use warploom::moe::{FusedOptions, FusedShape, GateOptions};
use warploom::sampling::{SamplingOptions, SamplingWorkspace, top_k_top_p};
use warploom::{DType, Device, Stream, Tensor, bf16, gemm, moe, norm};

const TOKENS: usize = 4;
const HIDDEN: usize = 256;
const EXPERTS: usize = 8;
const TOP_K: usize = 2;
const WIDTH: usize = 128;
const VOCAB: usize = 1000;

/// What the layer reads and writes.
struct Layer {
    x: Tensor<bf16>,
    norm: Tensor<bf16>,
    router: Tensor<bf16>,
    w13: Tensor<bf16>,
    w2: Tensor<bf16>,
    head: Tensor<bf16>,
    normed: Tensor<bf16>,
    scores: Tensor<bf16>,
    ids: Tensor<i32>,
    weights: Tensor<f32>,
    mixed: Tensor<bf16>,
    workspace: Tensor<u8>,
    logits: Tensor<bf16>,
    tokens: Tensor<i32>,
}

/// Every operation is the same call, whoever owns the memory.
fn run(stream: &Stream, t: &mut Layer, sampling: &mut SamplingWorkspace) -> warploom::Result<()> {
    norm::rms_norm(stream, &mut t.normed, &t.x, Some(&t.norm), 1e-6)?;
    gemm::linear(stream, &mut t.scores, &t.normed, &t.router)?;
    moe::gate(stream, &mut t.ids, &mut t.weights, None, &t.scores, TOP_K, &GateOptions::default())?;
    let options = FusedOptions::default();
    moe::fused(stream, &mut t.mixed, &t.normed, &t.w13, &t.w2, &t.ids, &t.weights, &options, &mut t.workspace)?;
    gemm::linear(stream, &mut t.logits, &t.mixed, &t.head)?;
    let options = SamplingOptions::default().temperature(0.8).top_k(20).top_p(0.9).seed(42);
    top_k_top_p(stream, &mut t.tokens, None, &t.logits, &options, sampling)
}

/// Deterministic numbers, uniform in [-scale, scale).
fn noise(n: usize, seed: u64, scale: f32) -> Vec<bf16> {
    let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        bf16::from_f32(scale * ((x >> 40) as f32 / (1u64 << 23) as f32 - 1.0))
    };
    (0..n).map(|_| next()).collect()
}

/// Activations, norm weights, router, experts' weights, head.
fn inputs() -> [Vec<bf16>; 6] {
    let rows = 2 * EXPERTS * WIDTH;
    let norm = noise(HIDDEN, 2, 0.5).into_iter().map(|v| bf16::from_f32(1.0 + v.to_f32())).collect();
    [
        noise(TOKENS * HIDDEN, 1, 2.0),
        norm,
        noise(EXPERTS * HIDDEN, 3, 0.5),
        noise(rows * HIDDEN, 4, 0.25),
        noise(EXPERTS * HIDDEN * WIDTH, 5, 0.25),
        noise(VOCAB * HIDDEN, 6, 0.5),
    ]
}

fn workspace_bytes() -> usize {
    FusedShape::new(TOKENS, TOP_K, EXPERTS, HIDDEN, WIDTH).workspace_bytes(DType::Bf16)
}

/// What comes out: the mixed activations and the tokens.
type Outputs = (Vec<bf16>, Vec<i32>);

fn on_simt() -> warploom::Result<Outputs> {
    let device = Device::simt();
    let [x, norm, router, w13, w2, head] = inputs();
    let mut layer = Layer {
        x: Tensor::from_slice(&device, &x, &[TOKENS, HIDDEN])?,
        norm: Tensor::from_slice(&device, &norm, &[HIDDEN])?,
        router: Tensor::from_slice(&device, &router, &[EXPERTS, HIDDEN])?,
        w13: Tensor::from_slice(&device, &w13, &[EXPERTS, 2 * WIDTH, HIDDEN])?,
        w2: Tensor::from_slice(&device, &w2, &[EXPERTS, HIDDEN, WIDTH])?,
        head: Tensor::from_slice(&device, &head, &[VOCAB, HIDDEN])?,
        normed: Tensor::zeros(&device, &[TOKENS, HIDDEN])?,
        scores: Tensor::zeros(&device, &[TOKENS, EXPERTS])?,
        ids: Tensor::zeros(&device, &[TOKENS, TOP_K])?,
        weights: Tensor::zeros(&device, &[TOKENS, TOP_K])?,
        mixed: Tensor::zeros(&device, &[TOKENS, HIDDEN])?,
        workspace: Tensor::zeros(&device, &[workspace_bytes()])?,
        logits: Tensor::zeros(&device, &[TOKENS, VOCAB])?,
        tokens: Tensor::zeros(&device, &[TOKENS])?,
    };
    run(&Stream::new(&device)?, &mut layer, &mut SamplingWorkspace::new(&device, TOKENS, VOCAB)?)?;
    Ok((layer.mixed.to_vec()?, layer.tokens.to_vec()?))
}

fn on_cudarc(cuda: &Arc<CudaStream>) -> Result<Outputs, Box<dyn Error>> {
    let [x, norm, router, w13, w2, head] = inputs();
    let (x, norm, router) = (cuda.clone_htod(&x)?, cuda.clone_htod(&norm)?, cuda.clone_htod(&router)?);
    let (w13, w2, head) = (cuda.clone_htod(&w13)?, cuda.clone_htod(&w2)?, cuda.clone_htod(&head)?);
    let mut normed: CudaSlice<bf16> = cuda.alloc_zeros(TOKENS * HIDDEN)?;
    let mut scores: CudaSlice<bf16> = cuda.alloc_zeros(TOKENS * EXPERTS)?;
    let mut ids: CudaSlice<i32> = cuda.alloc_zeros(TOKENS * TOP_K)?;
    let mut weights: CudaSlice<f32> = cuda.alloc_zeros(TOKENS * TOP_K)?;
    let mut mixed: CudaSlice<bf16> = cuda.alloc_zeros(TOKENS * HIDDEN)?;
    let mut workspace: CudaSlice<u8> = cuda.alloc_zeros(workspace_bytes())?;
    let mut logits: CudaSlice<bf16> = cuda.alloc_zeros(TOKENS * VOCAB)?;
    let mut tokens: CudaSlice<i32> = cuda.alloc_zeros(TOKENS)?;

    let stream = warploom::cudarc::Stream::new(cuda)?;
    println!("device: {}", stream.device().name());
    let mut sampling = SamplingWorkspace::new(stream.device(), TOKENS, VOCAB)?;
    let mut launch = || {
        stream.scope(|s| {
            let mut layer = Layer {
                x: s.view(x.as_view(), &[TOKENS, HIDDEN])?,
                norm: s.view(norm.as_view(), &[HIDDEN])?,
                router: s.view(router.as_view(), &[EXPERTS, HIDDEN])?,
                w13: s.view(w13.as_view(), &[EXPERTS, 2 * WIDTH, HIDDEN])?,
                w2: s.view(w2.as_view(), &[EXPERTS, HIDDEN, WIDTH])?,
                head: s.view(head.as_view(), &[VOCAB, HIDDEN])?,
                normed: s.view_mut(normed.as_view_mut(), &[TOKENS, HIDDEN])?,
                scores: s.view_mut(scores.as_view_mut(), &[TOKENS, EXPERTS])?,
                ids: s.view_mut(ids.as_view_mut(), &[TOKENS, TOP_K])?,
                weights: s.view_mut(weights.as_view_mut(), &[TOKENS, TOP_K])?,
                mixed: s.view_mut(mixed.as_view_mut(), &[TOKENS, HIDDEN])?,
                workspace: s.view_mut(workspace.as_view_mut(), &[workspace_bytes()])?,
                logits: s.view_mut(logits.as_view_mut(), &[TOKENS, VOCAB])?,
                tokens: s.view_mut(tokens.as_view_mut(), &[TOKENS])?,
            };
            run(&stream, &mut layer, &mut sampling)
        })
    };
    // Nothing can be loaded or allocated in a capture, and the first launch of a kernel loads it.
    launch()?;
    cuda.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)?;
    let captured = launch();
    let graph = cuda.end_capture(sys::CUgraphInstantiate_flags_enum(0))?;
    captured?;
    let graph = graph.ok_or("nothing was captured")?;
    for _ in 0..3 {
        graph.launch()?;
    }
    Ok((cuda.clone_dtoh(&mixed)?, cuda.clone_dtoh(&tokens)?))
}

/// Runs one layer and the choice of the next token on buffers and a stream of cudarc's, in a graph of cudarc's, and again on
/// the SIMT device. Takes the first GPU; without one it says why it does nothing.
#[derive(Parser)]
#[command(name = "cudarc")]
struct Arguments {}

fn main() -> Result<(), Box<dyn Error>> {
    let Arguments {} = Arguments::parse();
    // Says in one sentence what is missing where cudarc would panic for want of a driver.
    if let Err(e) = Device::cuda(0) {
        eprintln!("skipped: {e}");
        return Ok(());
    }
    let context = CudaContext::new(0)?;
    // SAFETY: everything here is done on one stream.
    unsafe { context.disable_event_tracking() };
    let (mixed, tokens) = on_cudarc(&context.new_stream()?)?;
    let (want, want_tokens) = on_simt()?;
    println!("tokens: {tokens:?}; on the SIMT device: {want_tokens:?}");
    let error = mixed.iter().zip(&want).map(|(a, b)| (a.to_f32() - b.to_f32()).abs()).fold(0.0, f32::max);
    let largest = want.iter().map(|v| v.to_f32().abs()).fold(0.0, f32::max);
    println!("largest difference of the activations: {error:e}, of numbers up to {largest}");
    // The devices add in different orders, so that a bf16 may be rounded the other way, here and before the second product.
    if tokens != want_tokens || error > largest / 64.0 {
        return Err("the devices disagree".into());
    }
    println!("the devices agree");
    Ok(())
}
