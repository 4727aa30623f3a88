//! `--stats`: rates, and where the time of a decode step goes, against what the device can do.

use super::runtime::engine::Engine;
use super::runtime::executor::{Executor, ModelExecutor};
use super::runtime::model::Real;
use super::runtime::problem::Result;
use super::runtime::profile::profile;
use std::time::Duration;
use warploom::{DType, Device};

/// A finished run.
pub struct Run {
    /// From the start until everything was on the device.
    pub loaded: Duration,
    /// From the first submission to the first token.
    pub first: Option<Duration>,
    /// From the first submission to the end.
    pub taken: Duration,
    /// Tokens of prompts.
    pub prompts: usize,
    /// Tokens generated.
    pub generated: usize,
}

/// Memory bandwidth in bytes and dense bf16 products in operations, per second, by name: vendors' numbers.
const LIMITS: [(&str, f64, f64); 5] = [
    ("H200", 4.8e12, 989e12),
    ("H100 PCIe", 2.0e12, 756e12),
    ("H100", 3.35e12, 989e12),
    ("A100", 2.0e12, 312e12),
    ("L40S", 0.86e12, 362e12),
];

/// A number with its unit.
fn scaled(value: f64, unit: &str) -> String {
    let (value, prefix) = match value {
        v if v >= 1e12 => (v / 1e12, "T"),
        v if v >= 1e9 => (v / 1e9, "G"),
        v if v >= 1e6 => (v / 1e6, "M"),
        v if v >= 1e3 => (v / 1e3, "k"),
        v => (v, ""),
    };
    format!("{value:.2} {prefix}{unit}")
}

/// Writes it to standard error.
///
/// # Errors
/// Those of the device.
pub fn print<T: Real>(engine: &mut Engine<ModelExecutor<T>>, run: &Run, device: &Device, dtype: DType) -> Result<()> {
    let (counts, sizes) = (engine.counts(), engine.executor().sizes());
    let (weights, cache) = engine.executor().memory();
    eprintln!("\n{}, {dtype}", device.name());
    match device.simt_options() {
        Some(o) if o.host_products => {
            eprintln!("  matrix products and experts ran as plain loops on the CPU, everything else in the emulator");
        }
        Some(_) => eprintln!("  everything ran in the emulator"),
        None => eprintln!("  every decode step was one captured graph"),
    }
    eprintln!(
        "  weights {}, cache {}, loaded in {:.2} s",
        scaled(weights as f64, "B"),
        scaled(cache as f64, "B"),
        run.loaded.as_secs_f64()
    );
    eprintln!(
        "  {} prompt tokens in {} prefill steps ({} shared), {} tokens in {} decode steps of up to {} sequences, {} preempted",
        run.prompts, counts.prefills, counts.shared, run.generated, counts.steps, counts.most, counts.preempted
    );
    let first = run.first.unwrap_or(run.taken).as_secs_f64();
    let rest = run.taken.as_secs_f64() - first;
    let rate = run.generated as f64 / run.taken.as_secs_f64().max(1e-9);
    eprint!("  first token after {:.1} ms, {rate:.1} tokens/s", 1e3 * first);
    if counts.steps > 0 {
        eprint!(", {:.3} ms a decode step", 1e3 * rest / counts.steps as f64);
    }
    eprintln!();

    let rows = counts.most.max(1);
    let len = (run.prompts + run.generated) / rows.max(1) / 2;
    let budget = Duration::from_millis(1500);
    let p = profile(engine.executor(), rows, len.min(sizes.max_len / 2).max(1), budget)?;
    let limits = LIMITS.iter().find(|(name, ..)| device.name().contains(name));
    eprintln!("\nA decode step of {} sequences of about {} tokens, measured apart:", p.rows, p.len);
    eprintln!("  {:22} {:>8} {:>11} {:>8} {:>14} {:>16}", "kernel", "launches", "time", "share", "bytes/s", "FLOP/s");
    let total: f64 = p.lines.iter().map(|l| l.seconds).sum();
    for l in &p.lines {
        let share = |amount: f64, limit: Option<f64>| match limit {
            Some(limit) => format!(" ({:.0} %)", 100.0 * amount / limit),
            None => String::new(),
        };
        let rate = |amount: usize, unit: &str, limit: Option<f64>| match amount {
            0 => "-".to_string(),
            n => scaled(n as f64 / l.seconds, unit) + &share(n as f64 / l.seconds, limit),
        };
        eprintln!(
            "  {:22} {:>8} {:>8.1} us {:>6.1} % {:>14} {:>16}",
            l.what,
            l.launches,
            1e6 * l.seconds,
            100.0 * l.seconds / total,
            rate(l.cost.bytes, "B/s", limits.map(|l| l.1)),
            rate(l.cost.flops, "FLOP/s", limits.map(|l| l.2)),
        );
    }
    let launches: usize = p.lines.iter().map(|l| l.launches).sum();
    eprintln!("  {launches} launches, one by one {:.1} us", 1e6 * total);
    eprintln!(
        "  as a graph {:.1} us; with the host {:.1} us, so the device is busy {:.0} % of a step: {:.0} tokens/s",
        1e6 * p.step,
        1e6 * p.wall,
        100.0 * (p.step / p.wall).min(1.0),
        p.rows as f64 / p.wall,
    );
    if let Some((name, bytes, flops)) = limits {
        let cost = p.lines.iter().fold((0.0, 0.0), |c, l| (c.0 + l.cost.bytes as f64, c.1 + l.cost.flops as f64));
        let floor = (cost.0 / bytes).max(cost.1 / flops);
        eprintln!(
            "  an {name}'s limits allow {:.1} us: {} and {}",
            1e6 * floor,
            scaled(cost.0, "B"),
            scaled(cost.1, "FLOP")
        );
    }
    Ok(())
}
