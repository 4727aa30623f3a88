//! Routes tokens to experts and samples from real-size logits, on the GPU if there is one and on the SIMT device
//! otherwise.
//!
//! `cargo run --example route_and_sample -- [--device simt|cuda:N|auto]`

use clap::Parser;
use std::time::Instant;
use warploom::moe::{GateOptions, gate};
use warploom::sampling::{SamplingOptions, SamplingWorkspace, top_k_top_p};
use warploom::{Device, Result, Stream, Tensor, bf16};

const TOKENS: usize = 4;
const EXPERTS: usize = 256;
const VOCAB: usize = 128_256;

/// Deterministic numbers, uniform in [-1, 1).
fn noise(n: usize, seed: u64) -> Vec<f32> {
    let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        (x >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    (0..n).map(|_| next()).collect()
}

fn run(device: &Device) -> Result<()> {
    println!("device: {}", device.name());
    let stream = Stream::new(device)?;

    // DeepSeek-V3's gate: 256 experts in 8 groups, 4 groups kept, 8 experts a token.
    let scores: Vec<bf16> = noise(TOKENS * EXPERTS, 1).into_iter().map(|v| bf16::from_f32(4.0 * v)).collect();
    let scores = Tensor::from_slice(device, &scores, &[TOKENS, EXPERTS])?;
    let mut weights = Tensor::<f32>::zeros(device, &[TOKENS, 8])?;
    let mut experts = Tensor::<i32>::zeros(device, &[TOKENS, 8])?;
    let options = GateOptions::default().groups(8, 4);
    // The first launch of a kernel loads it.
    gate(&stream, &mut experts, &mut weights, None, &scores, 8, &options)?;
    stream.synchronize()?;
    let start = Instant::now();
    gate(&stream, &mut experts, &mut weights, None, &scores, 8, &options)?;
    let (weights, experts) = (weights.to_vec()?, experts.to_vec()?);
    println!("gate: {TOKENS} tokens x {EXPERTS} experts in {:.0?}", start.elapsed());
    for t in 0..TOKENS {
        let row = 8 * t..8 * t + 8;
        let chosen: Vec<String> =
            experts[row.clone()].iter().zip(&weights[row]).map(|(e, w)| format!("{e} ({w:.3})")).collect();
        println!("  token {t}: {}", chosen.join(", "));
    }

    // A peaked distribution over Llama 3's vocabulary.
    let logits: Vec<bf16> = noise(TOKENS * VOCAB, 2).into_iter().map(|v| bf16::from_f32(12.0 * v * v * v)).collect();
    let logits = Tensor::from_slice(device, &logits, &[TOKENS, VOCAB])?;
    let mut tokens = Tensor::<i32>::zeros(device, &[TOKENS])?;
    let mut workspace = SamplingWorkspace::new(device, TOKENS, VOCAB)?;
    let options = SamplingOptions::default().temperature(0.8).top_k(20).top_p(0.9).seed(42);
    top_k_top_p(&stream, &mut tokens, None, &logits, &options, &mut workspace)?;
    stream.synchronize()?;
    let start = Instant::now();
    top_k_top_p(&stream, &mut tokens, None, &logits, &options, &mut workspace)?;
    println!("sampled {:?} from {TOKENS} x {VOCAB} logits in {:.0?}", tokens.to_vec()?, start.elapsed());
    Ok(())
}

/// Routes tokens to experts and samples from real-size logits.
#[derive(Parser)]
#[command(name = "route_and_sample")]
struct Arguments {
    /// simt, cuda:N or auto: a GPU if there is one
    #[arg(long, value_name = "DEVICE", default_value = "auto")]
    device: String,
}

fn main() {
    let arguments = Arguments::parse();
    if let Err(e) = Device::from_name(&arguments.device).and_then(|device| run(&device)) {
        eprintln!("{e}");
        std::process::exit(2);
    }
}
