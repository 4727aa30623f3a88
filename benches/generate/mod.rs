//! Decode steps of the example `generate`: from the launch of one graph to that of the next, tokens read one step behind, as
//! its engine does it. Tokens a second are rows by seconds.

#[path = "../../host/examples/generate/runtime/mod.rs"]
#[allow(dead_code, reason = "the example and its tests use the rest")]
mod runtime;

use runtime::config::Config;
use runtime::executor::{Executor, ModelExecutor, Row, Sampling, Sizes};
use runtime::model::{Model, Real};
use runtime::problem::{Problem, Result};
use runtime::weights::Weights;
use std::time::Instant;
use warploom::{Device, SimtOptions, bf16};
use warploom_benches::{Cost, Harness};

/// Tokens of each sequence before the first step.
const LEN: usize = 128;

pub fn benches(harness: &mut Harness) {
    for rows in harness.pick(&[1usize, 8, 64, 256][..], &[1, 4]) {
        let rows = *rows;
        for (name, sampling) in [
            ("greedy", Sampling::default()),
            ("top_k_top_p", Sampling { temperature: 0.8, top_k: 40, top_p: 0.95, ..Sampling::default() }),
        ] {
            let steps = harness.pick(100, 5);
            harness.measured(&format!("generate/decode/bf16/{name}/{rows}"), Cost::default(), steps, |device| {
                times::<bf16>(device, rows, steps, sampling).map_err(|e: Problem| e.to_string())
            });
        }
    }
}

/// µs of a step, in several runs.
fn times<T: Real>(device: &Device, rows: usize, steps: usize, sampling: Sampling) -> Result<Vec<f64>> {
    // The products as the example has them on the SIMT device.
    let simt = || Device::simt_with(SimtOptions::default().host_products(true));
    let device = if device.is_simt() { simt() } else { device.clone() };
    let directory = runtime::tiny_moe();
    let config = Config::read(&directory.join("config.json"))?;
    let model = Model::<T>::load(&device, &config, &Weights::open(&directory.join("model.safetensors"))?)?;
    let max_len = config.max_position_embeddings;
    let per_row = (LEN + steps + 2).div_ceil(16);
    let sizes = Sizes { rows, chunk: 16, blocks: rows * per_row, block_size: 16, max_len };
    let mut e = ModelExecutor::new(&device, model, sizes, sampling)?;
    let blocks: Vec<Vec<u32>> =
        (0..rows).map(|r| (r * per_row..(r + 1) * per_row).map(|b| b as u32).collect()).collect();
    let mut times = vec![];
    for run in 0..=if device.is_simt() { 3 } else { 12 } {
        let row = |(r, blocks)| Some(Row { token: 7 + r as u32, len: LEN, blocks });
        let blocks = blocks.iter().map(Vec::as_slice).enumerate();
        e.set_rows(&blocks.map(row).collect::<Vec<_>>())?;
        let began = Instant::now();
        e.launch()?;
        for _ in 1..steps {
            e.launch()?;
            e.read()?;
        }
        e.read()?;
        // The first run captures the graph and loads kernels.
        if run > 0 {
            times.push(began.elapsed().as_secs_f64() * 1e6 / steps as f64);
        }
    }
    Ok(times)
}
