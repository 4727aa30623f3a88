//! The command line.

use super::runtime::executor::Sampling;
use super::runtime::problem::{Result, input};
use super::runtime::tiny_moe;
use clap::{Parser, ValueEnum};
use std::path::PathBuf;

/// Write text with a small language model, on a GPU or on none.
#[derive(Parser)]
#[command(name = "generate")]
#[command(group = clap::ArgGroup::new("input").required(true).args(["prompt", "batch"]))]
pub struct Arguments {
    /// Text to go on from
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    prompt: Option<String>,
    /// File with a prompt on each line; all are continued together
    #[arg(long, value_name = "FILE")]
    batch: Option<PathBuf>,
    /// Directory with config.json, model.safetensors and tokenizer.json [default: the example's tiny-moe]
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// How many tokens to write at most, for each prompt
    #[arg(long, value_name = "N", default_value_t = 128)]
    pub tokens: usize,
    /// Go on beyond the end of a text
    #[arg(long)]
    pub ignore_eos: bool,
    /// simt, cuda:N or auto: a GPU if there is one
    #[arg(long, value_name = "DEVICE", default_value = "auto")]
    pub device: String,
    /// Type of weights and activations
    #[arg(long, value_enum, default_value_t = Dtype::Bf16)]
    pub dtype: Dtype,
    /// Print one JSON object instead, or a list of them with --batch: prompt_ids, ids, text, last_logits_top32, and what ended it (finish)
    #[arg(long)]
    pub json: bool,
    /// Say where the time went, on standard error
    #[arg(long)]
    pub stats: bool,
    /// Always the most probable token
    #[arg(long, help_heading = "Sampling", conflicts_with_all = ["temperature", "top_k", "top_p", "min_p"])]
    greedy: bool,
    /// Divides the logits; 0 is greedy
    #[arg(long, value_name = "T", default_value_t = 0.8, value_parser = temperature, help_heading = "Sampling")]
    temperature: f32,
    /// Draw from this many most probable tokens; 0 for all
    #[arg(long, value_name = "K", default_value_t = 40, help_heading = "Sampling")]
    top_k: usize,
    /// Draw from the most probable tokens that have this much of the probability together
    #[arg(long, value_name = "P", default_value_t = 0.95, value_parser = positive_probability, help_heading = "Sampling")]
    top_p: f32,
    /// Draw from tokens at least this probable, compared with the most probable one
    #[arg(long, value_name = "P", default_value_t = 0.0, value_parser = probability, help_heading = "Sampling")]
    min_p: f32,
    /// Seed of the random numbers
    #[arg(long, value_name = "SEED", default_value_t = 0, help_heading = "Sampling")]
    seed: u64,
    /// Blocks of 16 tokens in the KV cache [default: enough for everything]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..), help_heading = "Running")]
    blocks: Option<u32>,
    /// The most tokens of prompts in a step
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=4096), help_heading = "Running")]
    chunk: u32,
    /// On the SIMT device, run matrix products in the emulator as well, not as plain loops: slow
    #[arg(long, help_heading = "Running")]
    pub emulate_products: bool,
}

/// Types that the model can be run in.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Dtype {
    /// As the weights are stored.
    Bf16,
    /// Weights widened.
    F32,
}

fn number(text: &str, ok: impl Fn(f32) -> bool, expected: &str) -> std::result::Result<f32, String> {
    text.parse().ok().filter(|&v| ok(v)).ok_or_else(|| format!("expected {expected}"))
}

fn temperature(text: &str) -> std::result::Result<f32, String> {
    number(text, |t| t >= 0.0 && t.is_finite(), "a number that is not negative")
}

fn probability(text: &str) -> std::result::Result<f32, String> {
    number(text, |p| (0.0..=1.0).contains(&p), "a number from 0 to 1")
}

fn positive_probability(text: &str) -> std::result::Result<f32, String> {
    number(text, |p| p > 0.0 && p <= 1.0, "a number above 0 and at most 1")
}

impl Arguments {
    /// Where the model is.
    pub fn model_directory(&self) -> PathBuf {
        self.model.clone().unwrap_or_else(tiny_moe)
    }

    /// All prompts, at least one.
    ///
    /// # Errors
    /// [`Problem::Input`](super::runtime::problem::Problem::Input) for a file that is not there, not text, or empty.
    pub fn prompts(&self) -> Result<Vec<String>> {
        let Some(path) = &self.batch else {
            return Ok(self.prompt.iter().cloned().collect());
        };
        let shown = path.display();
        let text = std::fs::read_to_string(path).or_else(|e| input(format!("cannot read {shown}: {e}")))?;
        let prompts: Vec<String> = text.lines().map(String::from).collect();
        if prompts.is_empty() { input(format!("{shown} has no prompts: it is empty")) } else { Ok(prompts) }
    }

    /// Whether there is a list of prompts.
    pub fn is_batch(&self) -> bool {
        self.batch.is_some()
    }

    /// How tokens are drawn.
    pub fn sampling(&self) -> Sampling {
        let temperature = if self.greedy { 0.0 } else { self.temperature };
        Sampling { temperature, top_k: self.top_k, top_p: self.top_p, min_p: self.min_p, seed: self.seed }
    }

    /// The most tokens of a prefill step.
    pub fn chunk(&self) -> usize {
        self.chunk as usize
    }

    /// Blocks of the cache, if they were given.
    pub fn blocks(&self) -> Option<usize> {
        self.blocks.map(|n| n as usize)
    }
}
