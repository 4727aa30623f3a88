//! Where the time of a decode step goes.

use super::executor::{Executor, ModelExecutor, Row};
use super::model::{Cost, Observer, Real};
use super::problem::Result;
use std::time::{Duration, Instant};
use warploom::{Event, Stream, Tensor};

/// A kind of launch in a decode step.
#[derive(Clone, Debug)]
pub struct Line {
    /// What it is.
    pub what: &'static str,
    /// How many of it there are in a step.
    pub launches: usize,
    /// Seconds of all of these together.
    pub seconds: f64,
    /// Of all of these together.
    pub cost: Cost,
}

/// A decode step, measured.
#[derive(Clone, Debug)]
pub struct Profile {
    /// Sequences.
    pub rows: usize,
    /// Tokens of each, on average.
    pub len: usize,
    /// In order of their first launch.
    pub lines: Vec<Line>,
    /// Seconds of a step on the device, as a graph after a graph.
    pub step: f64,
    /// Seconds from step to step with all that the host does, tokens read one step behind.
    pub wall: f64,
}

/// Records an event after each launch.
struct Timeline {
    begin: Event,
    launches: Vec<(&'static str, Cost, Event)>,
}

impl Observer for Timeline {
    fn launched(&mut self, stream: &Stream, what: &'static str, cost: Cost) -> Result<()> {
        let event = Event::new(stream.device())?;
        stream.record_event(&event)?;
        self.launches.push((what, cost, event));
        Ok(())
    }

    fn routed(&mut self, _: &Tensor<i32>, _: &Tensor<f32>) -> Result<()> {
        Ok(())
    }
}

/// Measures decode steps of `rows` sequences of about `len` tokens, for some `budget` of time. Nothing else may run, and what is
/// in the cache is overwritten.
///
/// # Errors
/// Those of the device.
pub fn profile<T: Real>(e: &mut ModelExecutor<T>, rows: usize, len: usize, budget: Duration) -> Result<Profile> {
    let sizes = e.sizes();
    let (rows, len) = (rows.clamp(1, sizes.rows), len.clamp(1, sizes.max_len - 1));
    // Sequences share blocks if there are not enough: the time is the same.
    let per_row = sizes.max_len.div_ceil(sizes.block_size);
    let blocks: Vec<Vec<u32>> =
        (0..rows).map(|r| (0..per_row).map(|b| ((r * per_row + b) % sizes.blocks) as u32).collect()).collect();
    let start = |e: &mut ModelExecutor<T>| {
        let row = |(r, blocks)| Some(Row { token: 7 + r as u32, len, blocks });
        let rows: Vec<_> = blocks.iter().map(Vec::as_slice).enumerate().map(row).collect();
        e.set_rows(&rows)
    };
    // As many steps as the budget and the context allow, by the time of one.
    start(e)?;
    let step = |e: &mut ModelExecutor<T>| -> Result<()> {
        e.launch()?;
        e.read().map(drop)
    };
    step(e)?;
    let began = Instant::now();
    step(e)?;
    let one = began.elapsed().as_secs_f64().max(1e-6);
    let room = sizes.max_len.saturating_sub(len + 4).max(1);
    let steps = ((budget.as_secs_f64() / 3.0 / one) as usize).clamp(1, room.min(400));

    // The whole loop, as the engine runs it.
    start(e)?;
    let began = Instant::now();
    e.launch()?;
    for _ in 1..steps {
        e.launch()?;
        e.read()?;
    }
    e.read()?;
    let wall = began.elapsed().as_secs_f64() / steps as f64;

    // Graph after graph.
    start(e)?;
    let stream = e.stream().clone();
    let (from, to) = (Event::new(stream.device())?, Event::new(stream.device())?);
    stream.record_event(&from)?;
    e.replay(steps)?;
    stream.record_event(&to)?;
    let step = to.seconds_since(&from)? / steps as f64;

    // Launch by launch. On a GPU some replays go first, so that the device is busy while launches are submitted.
    let mut lines: Vec<Line> = vec![];
    let bucket = e.bucket();
    let times = (steps / 8).clamp(1, 16);
    for _ in 0..times {
        start(e)?;
        if !stream.device().is_simt() {
            e.replay(((1e-3 / step) as usize).clamp(2, room / 2 + 2))?;
        }
        let mut timeline = Timeline { begin: Event::new(stream.device())?, launches: vec![] };
        stream.record_event(&timeline.begin)?;
        e.decode_observed(bucket, rows * len, &mut timeline)?;
        stream.synchronize()?;
        let mut before = &timeline.begin;
        for (what, cost, event) in &timeline.launches {
            let seconds = event.seconds_since(before)?;
            before = event;
            let line = if let Some(i) = lines.iter().position(|l| l.what == *what) {
                &mut lines[i]
            } else {
                lines.push(Line { what, launches: 0, seconds: 0.0, cost: Cost::default() });
                lines.last_mut().expect("just pushed")
            };
            line.launches += 1;
            line.seconds += seconds;
            line.cost.bytes += cost.bytes;
            line.cost.flops += cost.flops;
        }
    }
    for line in &mut lines {
        line.launches /= times;
        line.seconds /= times as f64;
        line.cost.bytes /= times;
        line.cost.flops /= times;
    }
    e.set_rows(&[])?;
    Ok(Profile { rows, len: len + steps / 2, lines, step, wall })
}
