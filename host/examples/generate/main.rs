//! Text from a language model with a mixture of experts, through this library's kernels on any device.
//!
//! ```sh
//! cargo run --release --example generate -- --prompt "fn main() {"
//! cargo run --release --features cuda --example generate -- --prompt "fn main() {" --device cuda:0 --stats
//! ```
//!
//! The model is `tiny-moe`, of 5.2 million parameters, trained on the source of Rust's standard library; `train.py` beside it
//! defines it. The same code runs it on the SIMT device and on GPUs: see the module `runtime`.
#![allow(unreachable_pub, reason = "the modules are written as those of a library, and tests use them as one")]

mod arguments;
mod output;
#[allow(dead_code, reason = "tests and benches use the rest")]
mod runtime;
mod stats;

use arguments::Arguments;
use clap::Parser;
use output::Output;
use runtime::config::Config;
use runtime::engine::{Engine, Event, Request};
use runtime::executor::{ModelExecutor, Sizes};
use runtime::model::{Model, Real};
use runtime::problem::{Problem, Result, input};
use runtime::text::Text;
use runtime::weights::Weights;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;
use warploom::{Device, SimtOptions, bf16};

/// The most sequences that decode together.
const MAX_ROWS: usize = 256;

/// Tokens of a block of the cache.
const BLOCK: usize = 16;

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match run(&arguments) {
        Ok(code) => code,
        Err(problem) => {
            eprintln!("error: {problem}");
            ExitCode::from(problem.exit_code())
        }
    }
}

fn run(arguments: &Arguments) -> Result<ExitCode> {
    let directory = arguments.model_directory();
    if !directory.is_dir() {
        return input(format!("there is no model directory {}", directory.display()));
    }
    let config = Config::read(&directory.join("config.json"))?;
    let text = Text::read(&directory.join("tokenizer.json"), &config.eos_token, config.vocab_size)?;
    let weights = Weights::open(&directory.join("model.safetensors"))?;
    let prompts = arguments.prompts()?;
    let ids: Vec<Vec<u32>> = prompts.iter().map(|p| text.encode(p)).collect::<Result<_>>()?;
    let context = config.max_position_embeddings;
    if let Some((i, ids)) = ids.iter().enumerate().find(|(_, ids)| ids.len() >= context) {
        let which = if prompts.len() == 1 { "the prompt".into() } else { format!("prompt {}", i + 1) };
        let (n, most) = (ids.len(), context - 1);
        return input(format!("{which} has {n} tokens, but the model's context leaves room for at most {most}"));
    }
    let device = device(arguments)?;
    let files = Files { config, text, weights };
    match arguments.dtype {
        arguments::Dtype::Bf16 => generate::<bf16>(arguments, &device, &files, &ids),
        arguments::Dtype::F32 => generate::<f32>(arguments, &device, &files, &ids),
    }
}

/// What was read and checked.
struct Files {
    config: Config,
    text: Text,
    weights: Weights,
}

fn device(arguments: &Arguments) -> Result<Device> {
    let device = Device::from_name(&arguments.device).or_else(|e| input(format!("--device: {e}")))?;
    if !device.is_simt() {
        return Ok(device);
    }
    Ok(Device::simt_with(SimtOptions::default().host_products(!arguments.emulate_products)))
}

fn generate<T: Real>(arguments: &Arguments, device: &Device, files: &Files, prompts: &[Vec<u32>]) -> Result<ExitCode> {
    let Files { config, text, weights } = files;
    let began = Instant::now();
    let mut output = Output::new(arguments, prompts, text);
    let model = Model::<T>::load(device, config, weights)?;
    let longest =
        |ids: &Vec<u32>| ids.len().saturating_add(arguments.tokens).min(config.max_position_embeddings).div_ceil(BLOCK);
    let rows = prompts.len().min(MAX_ROWS);
    let mut needs: Vec<usize> = prompts.iter().map(longest).collect();
    needs.sort_unstable_by(|a, b| b.cmp(a));
    let sizes = Sizes {
        rows,
        chunk: arguments.chunk(),
        blocks: arguments.blocks().unwrap_or(needs[..rows].iter().sum::<usize>() + 1),
        block_size: BLOCK,
        max_len: config.max_position_embeddings,
    };
    let mut executor = ModelExecutor::new(device, model, sizes, arguments.sampling())?;
    executor.kept_logits = arguments.json.then(Vec::new);
    let mut engine = Engine::new(executor)?;
    let loaded = began.elapsed();

    let interrupted = Arc::new(AtomicBool::new(false));
    let flag = interrupted.clone();
    ctrlc::set_handler(move || flag.store(true, Ordering::Relaxed))
        .map_err(|e| Problem::Failure(format!("cannot watch for Ctrl-C: {e}")))?;

    let began = Instant::now();
    let eos = (!arguments.ignore_eos).then_some(text.eos());
    for ids in prompts {
        engine.submit(Request { prompt: ids.clone(), tokens: arguments.tokens, eos })?;
    }
    let mut first = None;
    let mut logits: Vec<Vec<f32>> = vec![vec![]; prompts.len()];
    while !engine.is_idle() && !interrupted.load(Ordering::Relaxed) {
        let events = engine.step()?;
        // Logits are kept in order of these events; those after a preemption are no prompt's.
        let prefilled = events.iter().filter_map(|e| if let Event::Prefilled(id) = e { Some(*id) } else { None });
        let kept = engine.executor().kept_logits.as_mut().map(std::mem::take).unwrap_or_default();
        for (id, row) in prefilled.zip(kept) {
            if logits[id].is_empty() {
                logits[id] = row;
            }
        }
        if !events.is_empty() && first.is_none() {
            first = Some(began.elapsed());
        }
        output.take(&events)?;
    }
    let cancelled = interrupted.load(Ordering::Relaxed);
    if cancelled {
        for id in 0..prompts.len() {
            if let Some(event) = engine.cancel(id)? {
                output.take(&[event])?;
            }
        }
        engine.run()?;
    }
    let taken = began.elapsed();
    output.finish(&logits)?;
    if arguments.stats {
        let run = stats::Run {
            loaded,
            first,
            taken,
            prompts: prompts.iter().map(Vec::len).sum(),
            generated: output.generated(),
        };
        stats::print(&mut engine, &run, device, T::DTYPE)?;
    }
    Ok(if cancelled { ExitCode::from(130) } else { ExitCode::SUCCESS })
}
