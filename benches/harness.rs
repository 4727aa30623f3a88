//! Times operations on whatever device there is.
//!
//! **On a GPU** a case is a CUDA graph that launches the operation on up to [`SETS`] sets of inputs in turn, as
//! often as it takes to fill `GRAPH_SECONDS`. Sets take turns so that inputs come from memory where those of a model
//! would: twenty sets of anything that matters are larger than the L2 cache. The graph is replayed between two events; a
//! time is that between the events, divided by the launches of the graph, and the median over the replays is what counts.
//! It includes the gap between two dependent launches of a graph, some 0.7 µs, as the model would see it.
//!
//! **In bursts** (`--burst`) a GPU rests before each replay, and a replay is 1 to 5 ms, or one launch:
//! large products, replayed on and on, bring a GPU to its power limit within some 50 ms, and its clocks down by a quarter.
//! A server that is always busy sees the usual times, one that waits for requests those of bursts.
//!
//! **On the SIMT device** a case is timed by the wall clock, with one set. That says how fast the emulator is, and nothing
//! about GPUs.
//!
//! Every case is measured by these rules first; that is the line printed and the record written. Then, unless in
//! quick mode, criterion samples it as well, to compare with the run before.
//!
//! `cargo bench -p warploom-benches [--features cuda] -- --help` lists the options.

use clap::Parser;
use clap::builder::FalseyValueParser;
use criterion::{Criterion, SamplingMode, Throughput};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::Write as _;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use warploom::kv_cache::{CacheLayout, CacheShape};
use warploom::{Device, Element, Error, Event, Float, Graph, Result, Stream, Tensor};

/// Sets of inputs that take turns on a GPU, if the memory suffices.
pub const SETS: usize = 20;
/// What a graph should take, so that the events around it do not matter.
const GRAPH_SECONDS: f64 = 1e-3;
/// The most launches of a graph.
const MAX_LAUNCHES: usize = 2000;
/// How long a case is replayed, after a tenth of that to warm up.
const SECONDS: f64 = 0.2;
/// What a burst takes at most at the rates of [`Cost::floor_on_h200`], unless that is one launch.
const BURST_SECONDS: f64 = 5e-3;
/// How long a GPU rests before each.
const REST: Duration = Duration::from_millis(100);
/// How many bursts there are.
const BURSTS: usize = 10;

/// What one launch moves and computes.
#[derive(Clone, Copy, Debug, Default)]
#[must_use]
pub struct Cost {
    /// Bytes read, each counted once.
    pub read: u64,
    /// Bytes written.
    pub written: u64,
    /// Floating-point operations of tensor cores; a multiply-add is two.
    pub flops: u64,
    /// Whether they are of 8-bit operands, and not of 16-bit ones.
    pub fp8: bool,
    /// Bytes that a GPU sends to others, or receives.
    pub link: u64,
}

impl Cost {
    /// So many bytes read and written.
    pub const fn bytes(read: usize, written: usize) -> Self {
        Self { read: read as u64, written: written as u64, flops: 0, fp8: false, link: 0 }
    }

    /// So many bytes between GPUs, and nothing else that counts.
    pub const fn link(bytes: usize) -> Self {
        Self { read: 0, written: 0, flops: 0, fp8: false, link: bytes as u64 }
    }

    /// And so many operations on tensor cores.
    pub const fn flops(mut self, flops: usize) -> Self {
        self.flops = flops as u64;
        self
    }

    /// Of 8-bit operands.
    pub const fn fp8(mut self) -> Self {
        self.fp8 = true;
        self
    }

    /// What an H200 needs at the very least, in µs, by what was measured on one: reading 4.64 TB/s, copying 3.9 TB/s read
    /// and written together (so that a byte written takes as long as 1.38 read), 807 TFLOP/s in bf16, 1513 in e4m3, and over
    /// NVLink 364 GB/s each way.
    pub fn floor_on_h200(&self) -> f64 {
        self.memory_on_h200().max(self.products_on_h200()).max(self.link as f64 / 364e3)
    }

    fn memory_on_h200(&self) -> f64 {
        const READ: f64 = 1.0 / 4.64e6;
        const WRITTEN: f64 = 2.0 / 3.9e6 - READ;
        self.read as f64 * READ + self.written as f64 * WRITTEN
    }

    fn products_on_h200(&self) -> f64 {
        self.flops as f64 / if self.fp8 { 1513e6 } else { 807e6 }
    }

    /// Whether products take so much of the time that a GPU may come to its power limit.
    fn takes_power(&self) -> bool {
        self.products_on_h200() > 0.5 * self.memory_on_h200()
    }
}

/// One measured case, as written to the JSON file.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Record {
    /// Name and number of the device.
    pub device: String,
    /// The driver's version; empty on the SIMT device.
    pub driver: String,
    /// UTC, `YYYY-MM-DDThh:mm:ssZ`.
    pub date: String,
    /// `family/operation/variant/shape`.
    pub case: String,
    /// Of one launch, or for `overhead` cases of one call.
    pub median_us: f64,
    /// The fastest replay.
    pub min_us: f64,
    /// Nine replays of ten were faster.
    pub p90_us: f64,
    /// Read and written by one launch, or sent.
    pub bytes: u64,
    /// Of one launch.
    pub flops: u64,
    /// Floor on an H200, in µs; 0 if there is none.
    pub floor_us: f64,
    /// Sets of inputs that took turns.
    pub sets: usize,
    /// Launches of a replay.
    pub launches: usize,
    /// Whether the device rested before each replay.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub burst: bool,
}

impl Record {
    /// As one row: median, GB/s, TFLOP/s, share of the ceiling.
    fn columns(&self) -> [String; 4] {
        let rate = |amount: u64, unit: f64| {
            if amount == 0 { "-".into() } else { format!("{:.4}", Figures(amount as f64 / self.median_us / unit)) }
        };
        let share = if self.floor_us > 0.0 && self.device.contains("H200") {
            format!("{:.0} %", 100.0 * self.floor_us / self.median_us)
        } else {
            "-".into()
        };
        [format!("{:.4}", Figures(self.median_us)), rate(self.bytes, 1e3), rate(self.flops, 1e6), share]
    }
}

/// A number with as many significant figures as the precision says, without an exponent.
struct Figures(f64);
impl std::fmt::Display for Figures {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let before = if self.0 >= 1.0 { self.0.log10() as usize + 1 } else { 1 };
        let decimals = f.precision().unwrap_or(4).saturating_sub(before);
        write!(f, "{:.decimals$}", self.0)
    }
}

/// Times operations on a GPU, or on the SIMT device where there is none
#[derive(Default, Parser)]
#[command(
    bin_name = "bench",
    after_help = "Within the repository: cargo bench -p warploom-benches [--features cuda] -- [OPTIONS] [FILTER]..."
)]
struct Options {
    /// Only cases whose name contains one of these
    #[arg(value_name = "FILTER")]
    filters: Vec<String>,

    /// Leave criterion out: each case is measured by the harness's own rules alone
    #[arg(long, env = "WARPLOOM_BENCH_QUICK", value_parser = FalseyValueParser::new())]
    quick: bool,

    /// 1 to 5 ms of work after rests of 0.1 s, without criterion; only cases whose products take half as long as their
    /// memory, or longer
    #[arg(long)]
    burst: bool,

    /// Only print the names of the cases
    #[arg(long)]
    list: bool,

    /// Append a record for each case
    #[arg(long, value_name = "FILE", env = "WARPLOOM_BENCH_JSON")]
    json: Option<String>,

    /// Print the records in FILE as Markdown, and measure nothing
    #[arg(long, value_name = "FILE")]
    table: Option<String>,

    /// simt, cuda:N or auto
    #[arg(long, value_name = "NAME", env = "WARPLOOM_BENCH_DEVICE")]
    device: Option<String>,

    /// Fused MoE for this model instead of those on record (repeatable): experts, experts a token, hidden and
    /// intermediate width, as sharded
    #[arg(long = "model", value_name = "NAME=E,K,H,I")]
    models: Vec<Model>,

    /// Fused MoE for so many tokens instead of those on record
    #[arg(long, value_name = "N,N..", value_delimiter = ',', value_parser = token_count)]
    tokens: Vec<usize>,

    /// Keep criterion's samples under this name
    #[arg(long, value_name = "NAME")]
    save_baseline: Option<String>,

    /// Compare with criterion's samples of this name
    #[arg(long, value_name = "NAME", conflicts_with = "save_baseline")]
    baseline: Option<String>,

    /// What cargo passes
    #[arg(long, hide = true)]
    bench: bool,
}

/// Experts of a mixture: those of a whole model, or what a device has of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Model {
    /// In names of cases.
    pub name: String,
    /// How many there are.
    pub experts: usize,
    /// Experts of a token.
    pub top_k: usize,
    /// Width of tokens.
    pub hidden: usize,
    /// Width between the products.
    pub inter: usize,
}

/// More experts, wider layers and more tokens than these are a mistake, and what they cost would not be a number of 64 bits.
const MAX_EXPERTS: usize = 1 << 11;
const MAX_WIDTH: usize = 1 << 16;
const MAX_TOKENS: usize = 1 << 18;

impl Model {
    /// A model by name and sizes.
    pub fn new(name: &str, [experts, top_k, hidden, inter]: [usize; 4]) -> Self {
        Self { name: name.into(), experts, top_k, hidden, inter }
    }
}

impl std::str::FromStr for Model {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let sizes = text.split_once('=').and_then(|(name, sizes)| {
            let sizes: Vec<usize> = sizes.split(',').map(number).collect::<Result<_, _>>().ok()?;
            Some((name, <[usize; 4]>::try_from(sizes).ok()?))
        });
        match sizes {
            Some((name, sizes @ [experts, top_k, hidden, inter]))
                if !name.is_empty() && top_k <= experts && experts <= MAX_EXPERTS && hidden.max(inter) <= MAX_WIDTH =>
            {
                Ok(Self::new(name, sizes))
            }
            _ => Err(format!(
                "a model is NAME=E,K,H,I (experts up to {MAX_EXPERTS}, experts a token, hidden and intermediate width up to {MAX_WIDTH}, e.g. mixtral=8,2,4096,14336), and not {text}"
            )),
        }
    }
}

/// A number of at least 1.
fn number(text: &str) -> Result<usize, String> {
    text.trim().parse().ok().filter(|&n| n > 0).ok_or_else(|| format!("{text:?} is not a number of at least 1"))
}

/// A number of tokens.
fn token_count(text: &str) -> Result<usize, String> {
    let tokens = number(text)?;
    if tokens > MAX_TOKENS { Err(format!("more than {MAX_TOKENS} tokens")) } else { Ok(tokens) }
}

impl Options {
    /// Of variables that are set to nothing clap knows no better than that they are set.
    fn without_empty(mut self) -> Self {
        self.json = self.json.filter(|file| !file.is_empty());
        self.device = self.device.filter(|name| !name.is_empty());
        self
    }

    fn selects(&self, case: &str) -> bool {
        self.filters.is_empty() || self.filters.iter().any(|f| case.contains(f.as_str()))
    }
}

/// Runs the cases.
pub struct Harness {
    options: Options,
    device: Device,
    stream: Stream,
    driver: String,
    criterion: Option<Criterion>,
    json: Option<std::fs::File>,
    failures: usize,
    /// Whether there was a case that the filters select.
    found: bool,
}

/// Prints `text`; ends where nobody reads on, as behind a pipe to `head`.
fn show(text: &str) {
    if std::io::stdout().write_all(text.as_bytes()).is_err() {
        std::process::exit(0);
    }
}

/// Runs `benches` as `options` say: how many cases failed.
fn run(options: Options, benches: impl FnOnce(&mut Harness)) -> Result<usize, String> {
    if let Some(file) = &options.table {
        let text = std::fs::read_to_string(file).map_err(|e| e.to_string()).and_then(|json| table(&json));
        show(&text.map_err(|e| format!("{file}: {e}"))?);
        return Ok(0);
    }
    let baselines = options.baseline.is_some() || options.save_baseline.is_some();
    if baselines && (options.quick || options.burst) {
        return Err("--baseline and --save-baseline are for criterion, which --quick and --burst leave out".into());
    }
    let mut harness = Harness::new(options)?;
    benches(&mut harness);
    if !harness.found {
        let (device, filters) = (harness.device.name(), harness.options.filters.join(" or "));
        let (named, bursts) = (!filters.is_empty(), harness.options.burst);
        let named = if named { format!(" with {filters} in its name") } else { String::new() };
        let bursts = if bursts { " whose products take half as long as its memory" } else { "" };
        return Err(format!("no case{named}{bursts} on {device}; --list prints the names"));
    }
    Ok(harness.failures)
}

/// Runs `benches` as the command line says, and exits with 1 if any case failed.
pub fn main(benches: impl FnOnce(&mut Harness)) {
    match run(Options::parse().without_empty(), benches) {
        Ok(0) => {}
        Ok(failures) => {
            eprintln!("{failures} cases failed");
            std::process::exit(1);
        }
        Err(e) => {
            eprintln!("{e}");
            std::process::exit(2);
        }
    }
}

impl Harness {
    fn new(options: Options) -> Result<Self, String> {
        let name = options.device.as_deref().unwrap_or("auto");
        let device = Device::from_name(name).map_err(|e| e.to_string())?;
        let stream = Stream::new(&device).map_err(|e| e.to_string())?;
        let driver = driver_version();
        let json = match &options.json {
            Some(file) => Some(
                std::fs::OpenOptions::new().append(true).create(true).open(file).map_err(|e| format!("{file}: {e}"))?,
            ),
            None => None,
        };
        let (warm_up, seconds) = if device.is_simt() { (0.05, 0.2) } else { (0.1, 0.5) };
        let mut criterion = Criterion::default()
            .warm_up_time(Duration::from_secs_f64(warm_up))
            .measurement_time(Duration::from_secs_f64(seconds))
            .sample_size(10)
            .nresamples(2000);
        if let Some(name) = &options.save_baseline {
            criterion = criterion.save_baseline(name.clone());
        }
        if let Some(name) = &options.baseline {
            criterion = criterion.retain_baseline(name.clone(), true);
        }
        let driver = if device.is_simt() { String::new() } else { driver };
        if !options.list {
            if device.is_simt() {
                show(&format!("device: {}, an emulator: wall time, which says nothing about GPUs\n", device.name()));
                if let Err(e) = Device::cuda(0) {
                    show(&format!("no GPU: {e}\n"));
                }
            } else {
                show(&format!(
                    "device: {}, driver {driver}: replays of a graph, up to {SETS} input sets{}\n",
                    device.name(),
                    if options.burst { ", in bursts" } else { "" }
                ));
            }
            show(&format!("{:<52} {:>10} {:>10} {:>10} {:>8}\n", "case", "µs", "GB/s", "TFLOP/s", "ceiling"));
        }
        let criterion = (!options.quick && !options.burst).then_some(criterion);
        Ok(Self { options, device, stream, driver, criterion, json, failures: 0, found: false })
    }

    /// The device that is measured.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// `gpu` on a GPU; `simt`, which should be small, on the SIMT device.
    pub fn pick<T>(&self, gpu: T, simt: T) -> T {
        if self.device.is_simt() { simt } else { gpu }
    }

    /// The models that the command line names, or these.
    pub fn models(&self, or: impl FnOnce() -> Vec<Model>) -> Vec<Model> {
        if self.options.models.is_empty() { or() } else { self.options.models.clone() }
    }

    /// The numbers of tokens that the command line names, or these; for [`models`](Self::models).
    pub fn tokens(&self, or: &[usize]) -> Vec<usize> {
        if self.options.tokens.is_empty() { or.to_vec() } else { self.options.tokens.clone() }
    }

    /// Times an operation.
    ///
    /// `name` is `family/operation/variant/shape`. `make` allocates and fills the `set`-th set of inputs and outputs and
    /// returns a closure that launches once with them; it must not wait for the device or copy from or to the host.
    pub fn case<F>(&mut self, name: &str, cost: Cost, make: impl FnMut(&Device, &Stream, usize) -> Result<F>)
    where
        F: FnMut(&Stream) -> Result<()>,
    {
        if self.options.burst && !cost.takes_power() || !self.starts(name) {
            return;
        }
        let outcome = self.measure(name, cost, make);
        self.finish(name, outcome);
    }

    /// Times how long the host takes for one call that launches, without graphs and without waiting for the device. Does
    /// nothing on the SIMT device, where a call is the work itself.
    pub fn overhead<F>(&mut self, name: &str, make: impl FnOnce(&Device, &Stream) -> Result<F>)
    where
        F: FnMut(&Stream) -> Result<()>,
    {
        if !self.options.burst && !self.device.is_simt() && self.starts(name) {
            let outcome = self.measure_overhead(name, make);
            self.finish(name, outcome);
        }
    }

    /// Records times that `measure` takes itself, in µs of one unit of work, `launches` of which make up each: for what is
    /// more than launches.
    pub fn measured(
        &mut self,
        name: &str,
        cost: Cost,
        launches: usize,
        measure: impl FnOnce(&Device) -> Result<Vec<f64>, String>,
    ) {
        if self.options.burst || !self.starts(name) {
            return;
        }
        let outcome = measure(&self.device).map(|times| self.record(name, cost, times, 1, launches));
        self.finish(name, outcome);
    }

    /// Benches of work on the host only, which criterion does alone. In quick mode on a GPU only if `name` is asked for.
    pub fn host(&mut self, name: &str, benches: impl FnOnce(&mut Criterion)) {
        if self.options.burst {
            return;
        }
        let asked = self.options.filters.iter().any(|f| name.contains(f.as_str()) || f.contains(name));
        self.found |= asked || self.options.filters.is_empty();
        if self.options.list {
            if asked || self.options.filters.is_empty() {
                show(&format!("{name}\n"));
            }
        } else if asked || (self.options.filters.is_empty() && (self.criterion.is_some() || self.device.is_simt())) {
            let quick = || {
                Criterion::default()
                    .warm_up_time(Duration::from_millis(20))
                    .measurement_time(Duration::from_millis(100))
                    .nresamples(1000)
                    .sample_size(10)
            };
            benches(self.criterion.get_or_insert_with(quick));
            if self.options.quick {
                self.criterion = None;
            }
        }
    }

    /// Whether the command line asks for this case, and not just for its name.
    fn starts(&mut self, name: &str) -> bool {
        let selected = self.options.selects(name);
        self.found |= selected;
        if selected && self.options.list {
            show(&format!("{name}\n"));
        }
        selected && !self.options.list
    }

    fn finish(&mut self, name: &str, outcome: Result<Record, impl std::fmt::Display>) {
        match outcome {
            Ok(record) => {
                let [us, bytes, flops, share] = record.columns();
                show(&format!("{name:<52} {us:>10} {bytes:>10} {flops:>10} {share:>8}\n"));
                if let Some(file) = &mut self.json {
                    let line = serde_json::to_string(&record).expect("a record is JSON");
                    if let Err(e) = writeln!(file, "{line}") {
                        eprintln!("{}: {e}", self.options.json.as_deref().unwrap_or_default());
                        std::process::exit(2);
                    }
                }
            }
            Err(e) => {
                self.failures += 1;
                show(&format!("{name:<52} failed: {e}\n"));
            }
        }
    }

    fn record(&self, case: &str, cost: Cost, mut us: Vec<f64>, sets: usize, launches: usize) -> Record {
        us.sort_by(f64::total_cmp);
        let at = |share: f64| us[((us.len() - 1) as f64 * share).round() as usize];
        Record {
            device: self.device.name(),
            driver: self.driver.clone(),
            date: date(SystemTime::now()),
            case: case.into(),
            median_us: at(0.5),
            min_us: at(0.0),
            p90_us: at(0.9),
            bytes: cost.read + cost.written + cost.link,
            flops: cost.flops,
            floor_us: cost.floor_on_h200(),
            sets,
            launches,
            burst: self.options.burst,
        }
    }

    fn measure<F>(
        &mut self,
        name: &str,
        cost: Cost,
        mut make: impl FnMut(&Device, &Stream, usize) -> Result<F>,
    ) -> Result<Record>
    where
        F: FnMut(&Stream) -> Result<()>,
    {
        let mut wanted = match self.device.memory_info()? {
            None => 1,
            Some(memory) => (memory.free / 2 / (cost.read + cost.written).max(1)).clamp(1, SETS as u64) as usize,
        };
        if self.options.burst {
            wanted = wanted.min((BURST_SECONDS * 1e6 / cost.floor_on_h200()) as usize).max(1);
        }
        let mut sets = vec![make(&self.device, &self.stream, 0)?];
        while sets.len() < wanted {
            match make(&self.device, &self.stream, sets.len()) {
                Ok(set) => sets.push(set),
                Err(Error::OutOfMemory { .. }) => break,
                Err(e) => return Err(e),
            }
        }
        // Loads the kernels, and shows errors where they come from.
        sets.iter_mut().try_for_each(|launch| launch(&self.stream))?;
        self.device.synchronize()?;

        let mut timer = if self.device.is_simt() {
            Timer::Wall { stream: &self.stream, launch: &mut sets[0] }
        } else {
            Timer::graph(&self.device, &self.stream, &mut sets)?
        };
        let launches = timer.launches();
        let first = timer.seconds()?;
        let until = Instant::now() + Duration::from_secs_f64(SECONDS / 10.0);
        while Instant::now() < until {
            timer.seconds()?;
        }
        let replays = if self.options.burst { BURSTS } else { (SECONDS / first.max(1e-9)).clamp(3.0, 100.0) as usize };
        let mut times = Vec::with_capacity(replays);
        for _ in 0..replays {
            if self.options.burst {
                std::thread::sleep(REST);
            }
            times.push(timer.seconds()? * 1e6 / launches as f64);
        }

        if let Some(criterion) = &mut self.criterion {
            let (family, rest) = name.split_once('/').unwrap_or(("other", name));
            // So that a run is never compared with one on another kind of device.
            let kind = if self.device.is_simt() { "simt" } else { "cuda" };
            let mut group = criterion.benchmark_group(format!("{kind}/{family}"));
            if self.device.is_simt() {
                // Ten launches and not fifty-five, where one takes long.
                group.sampling_mode(SamplingMode::Flat);
            }
            if cost.read + cost.written > 0 {
                group.throughput(Throughput::Bytes(cost.read + cost.written));
            }
            let mut failure = None;
            group.bench_function(rest, |bencher| {
                bencher.iter_custom(|iterations| {
                    let replays = iterations.div_ceil(launches as u64);
                    let seconds: Result<f64> = (0..replays).map(|_| timer.seconds()).sum();
                    let seconds = seconds.unwrap_or_else(|e| {
                        failure = Some(e);
                        1.0
                    });
                    Duration::from_secs_f64(seconds * iterations as f64 / (replays * launches as u64) as f64)
                });
            });
            group.finish();
            if let Some(e) = failure {
                return Err(e);
            }
        }
        Ok(self.record(name, cost, times, sets.len(), launches))
    }

    fn measure_overhead<F>(&self, name: &str, make: impl FnOnce(&Device, &Stream) -> Result<F>) -> Result<Record>
    where
        F: FnMut(&Stream) -> Result<()>,
    {
        /// Fewer than a stream queues before it makes the host wait.
        const CALLS: usize = 200;
        let mut launch = make(&self.device, &self.stream)?;
        let mut batch = || -> Result<f64> {
            let start = Instant::now();
            (0..CALLS).try_for_each(|_| launch(&self.stream))?;
            let seconds = start.elapsed().as_secs_f64();
            self.stream.synchronize()?;
            Ok(seconds * 1e6 / CALLS as f64)
        };
        batch()?;
        let times: Result<Vec<f64>> = (0..50).map(|_| batch()).collect();
        Ok(self.record(name, Cost::default(), times?, 1, CALLS))
    }
}

/// How the launches of a case are timed.
enum Timer<'a, F> {
    Wall { stream: &'a Stream, launch: &'a mut F },
    Graph { stream: &'a Stream, graph: Graph, launches: usize, start: Event, end: Event },
}

impl<'a, F: FnMut(&Stream) -> Result<()>> Timer<'a, F> {
    fn graph(device: &Device, stream: &'a Stream, sets: &mut [F]) -> Result<Self> {
        let (start, end) = (Event::new(device)?, Event::new(device)?);
        let capture = |passes: usize, sets: &mut [F]| {
            Graph::capture(stream, |s| (0..passes).try_for_each(|_| sets.iter_mut().try_for_each(|launch| launch(s))))
        };
        let once = capture(1, sets)?;
        let mut timer = Self::Graph { stream, graph: once, launches: 1, start, end };
        timer.seconds()?;
        let seconds = timer.seconds()?.max(1e-6);
        let count = sets.len();
        let passes = (GRAPH_SECONDS / seconds).ceil().min((MAX_LAUNCHES / count) as f64).max(1.0) as usize;
        if let Self::Graph { graph, launches, .. } = &mut timer {
            *launches = passes * count;
            if passes > 1 {
                *graph = capture(passes, sets)?;
            }
            graph.upload(stream)?;
        }
        Ok(timer)
    }

    /// Launches that [`seconds`](Self::seconds) times at once.
    fn launches(&self) -> usize {
        match self {
            Self::Wall { .. } => 1,
            Self::Graph { launches, .. } => *launches,
        }
    }

    /// What all of them took.
    fn seconds(&mut self) -> Result<f64> {
        match self {
            Self::Wall { stream, launch } => {
                let start = Instant::now();
                launch(stream)?;
                stream.synchronize()?;
                Ok(start.elapsed().as_secs_f64())
            }
            Self::Graph { stream, graph, start, end, .. } => {
                stream.record_event(start)?;
                graph.launch(stream)?;
                stream.record_event(end)?;
                end.seconds_since(start)
            }
        }
    }
}

/// A tensor that repeats `data`, copied on the device: quick for any size.
pub fn tiled<T: Element>(device: &Device, stream: &Stream, data: &[T], shape: &[usize]) -> Result<Tensor<T>> {
    let tensor = Tensor::<T>::uninit(device, shape)?;
    let flat = tensor.reshape(&[tensor.len()])?;
    let mut filled = data.len().min(flat.len());
    flat.narrow(0, 0, filled)?.copy_from_slice(&data[..filled])?;
    while filled < flat.len() {
        let len = filled.min(flat.len() - filled);
        stream.copy(&mut flat.narrow(0, filled, len)?, &flat.narrow(0, 0, len)?)?;
        filled += len;
    }
    stream.synchronize()?;
    Ok(tensor)
}

/// Shapes of the keys and the values of a cache of this layout with elements of `size` bytes.
pub fn cache_shapes(layout: CacheLayout, shape: CacheShape, size: usize) -> (Vec<usize>, Vec<usize>) {
    let CacheShape { blocks, block_size, heads, head_dim, .. } = shape;
    let x = 16 / size;
    match layout {
        CacheLayout::XSplit => {
            (vec![blocks, heads, head_dim / x, block_size, x], vec![blocks, heads, head_dim, block_size])
        }
        CacheLayout::Hnd => (vec![blocks, heads, block_size, head_dim], vec![blocks, heads, block_size, head_dim]),
        _ => (vec![blocks, block_size, heads, head_dim], vec![blocks, block_size, heads, head_dim]),
    }
}

/// Numbers that look random, uniform in [-1, 1), the same for the same `seed`. They repeat after 65,521.
pub fn noise<T: Float>(device: &Device, stream: &Stream, shape: &[usize], seed: usize) -> Result<Tensor<T>> {
    let mut state = (seed as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    let data: Vec<T> = (0..65_521).map(|_| T::from_f32(next())).collect();
    tiled(device, stream, &data, shape)
}

/// The version of NVIDIA's kernel driver, if it says.
fn driver_version() -> String {
    let text = std::fs::read_to_string("/proc/driver/nvidia/version").unwrap_or_default();
    // "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27 ..."
    let version = |word: &&str| word.contains('.') && word.chars().all(|c| c.is_ascii_digit() || c == '.');
    text.split_whitespace().find(version).unwrap_or("unknown").into()
}

/// UTC, by Howard Hinnant's `civil_from_days`.
fn date(now: SystemTime) -> String {
    let seconds = now.duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    let (days, time) = (seconds / 86_400, seconds % 86_400);
    let z = days + 719_468;
    let (era, doe) = (z / 146_097, z % 146_097);
    let yoe = (doe - doe / 1_460 + doe / 36_524 - doe / 146_096) / 365;
    let doy = doe - (365 * yoe + yoe / 4 - yoe / 100);
    let mp = (5 * doy + 2) / 153;
    let (day, month) = (doy - (153 * mp + 2) / 5 + 1, if mp < 10 { mp + 3 } else { mp - 9 });
    let year = yoe + era * 400 + u64::from(month <= 2);
    format!("{year}-{month:02}-{day:02}T{:02}:{:02}:{:02}Z", time / 3600, time / 60 % 60, time % 60)
}

/// Records as Markdown: a table for each device, the last record of each case, in the order of their first ones.
fn table(json: &str) -> Result<String, String> {
    let mut devices: BTreeMap<String, Vec<Record>> = BTreeMap::new();
    for (i, line) in json.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let record: Record = serde_json::from_str(line).map_err(|e| format!("line {}: {e}", i + 1))?;
        let records = devices.entry(record.device.clone()).or_default();
        match records.iter_mut().find(|r| r.case == record.case && r.burst == record.burst) {
            Some(old) => *old = record,
            None => records.push(record),
        }
    }
    let mut out = String::new();
    for (device, records) in devices {
        let last = records.iter().max_by_key(|r| &r.date).expect("a device has records");
        let driver = if last.driver.is_empty() { String::new() } else { format!(", driver {}", last.driver) };
        let day = last.date.split('T').next().unwrap_or_default();
        let _ = writeln!(out, "{device}{driver}, {day}\n");
        out.push_str("| case | µs | min | p90 | GB/s | TFLOP/s | of the ceiling |\n");
        out.push_str("| --- | ---: | ---: | ---: | ---: | ---: | ---: |\n");
        for record in records {
            let [us, bytes, flops, share] = record.columns();
            let (min, p90) = (Figures(record.min_us), Figures(record.p90_us));
            let case = format!("{}{}", record.case, if record.burst { ", in bursts" } else { "" });
            let _ = writeln!(out, "| {case} | {us} | {min:.4} | {p90:.4} | {bytes} | {flops} | {share} |");
        }
        out.push('\n');
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates() {
        let at = |seconds| date(UNIX_EPOCH + Duration::from_secs(seconds));
        assert_eq!(at(0), "1970-01-01T00:00:00Z");
        assert_eq!(at(951_782_399), "2000-02-28T23:59:59Z");
        assert_eq!(at(951_782_400), "2000-02-29T00:00:00Z");
        assert_eq!(at(1_795_132_800), "2026-11-20T00:00:00Z");
    }

    #[test]
    fn figures() {
        let text = |x| format!("{:.4}", Figures(x));
        assert_eq!([0.7212, 1.5, 18.804, 807.26, 64_000.4].map(text), ["0.721", "1.500", "18.80", "807.3", "64000"]);
    }

    #[test]
    fn options() {
        let parse = |args: &[&str]| Options::try_parse_from([&["bench"], args].concat());
        let options = parse(&["--bench", "norm", "--quick", "--json", "out.json", "gate"]).unwrap();
        assert!(options.quick && options.json.as_deref() == Some("out.json"));
        assert!(options.selects("norm/rms_norm") && options.selects("moe/gate") && !options.selects("rope"));
        assert!(parse(&[]).unwrap().selects("anything") && !parse(&[]).unwrap().quick);
        assert!(parse(&["--json"]).is_err() && parse(&["--fast"]).is_err());
        let options = parse(&["--model", "a=8,2,64,32", "--model", "b=1,1,8,8", "--tokens", "1,16"]).unwrap();
        assert_eq!(options.models, [Model::new("a", [8, 2, 64, 32]), Model::new("b", [1, 1, 8, 8])]);
        assert_eq!(options.tokens, [1, 16]);
        for wrong in [
            ["--model", "a=8,2,64"],
            ["--model", "a=2,8,64,32"],
            ["--model", "8,2,64,32"],
            ["--model", "a=8,2,64,65537"],
            ["--model", "a=9999999999,2,64,64"],
            ["--tokens", "0"],
            ["--tokens", "1,262145"],
        ] {
            assert!(parse(&wrong).is_err(), "{wrong:?}");
        }
        let set_to_nothing = parse(&["--json", "", "--device", ""]).unwrap().without_empty();
        assert!(set_to_nothing.json.is_none() && set_to_nothing.device.is_none());
        let help = parse(&["--help"]).err().unwrap().to_string();
        for word in ["--quick", "WARPLOOM_BENCH_QUICK", "--burst", "NAME=E,K,H,I", "[FILTER]..."] {
            assert!(help.contains(word), "{word}: {help}");
        }
        assert!(!help.contains("--bench"), "{help}");
    }

    /// Reading alone, copying, and computing take what was measured.
    #[test]
    fn ceilings() {
        assert!((Cost::bytes(4_640_000, 0).floor_on_h200() - 1.0).abs() < 1e-9);
        assert!((Cost::bytes(1_950_000, 1_950_000).floor_on_h200() - 1.0).abs() < 1e-9);
        assert!((Cost::bytes(1, 1).flops(807_000_000).floor_on_h200() - 1.0).abs() < 1e-9);
        assert!((Cost::bytes(1, 1).flops(1_513_000_000).fp8().floor_on_h200() - 1.0).abs() < 1e-9);
    }

    #[test]
    fn tables() {
        let record = |case: &str, median_us: f64| Record {
            device: "cuda:0 (NVIDIA H200)".into(),
            driver: "580.65.06".into(),
            date: "2026-11-20T12:00:00Z".into(),
            case: case.into(),
            median_us,
            min_us: 18.5,
            p90_us: 19.25,
            bytes: 67_108_864,
            flops: 0,
            floor_us: 17.2,
            sets: 20,
            launches: 60,
            burst: false,
        };
        let burst = Record { burst: true, ..record("a", 18.8) };
        let lines = [record("a", 30.0), record("b", 18.8), burst, record("a", 20.0)];
        let json: String = lines.iter().map(|r| serde_json::to_string(r).unwrap() + "\n").collect();
        let expected = [
            "cuda:0 (NVIDIA H200), driver 580.65.06, 2026-11-20",
            "",
            "| case | µs | min | p90 | GB/s | TFLOP/s | of the ceiling |",
            "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
            "| a | 20.00 | 18.50 | 19.25 | 3355 | - | 86 % |",
            "| b | 18.80 | 18.50 | 19.25 | 3570 | - | 91 % |",
            "| a, in bursts | 18.80 | 18.50 | 19.25 | 3570 | - | 91 % |",
            "",
            "",
        ];
        assert_eq!(table(&json).unwrap(), expected.join("\n"));
        assert!(table("{}").unwrap_err().starts_with("line 1: "));
        let file = std::env::temp_dir().join(format!("warploom-bench-table-{}", std::process::id()));
        let file = file.to_str().unwrap();
        std::fs::write(file, "{}").unwrap();
        let read = || run(Options { table: Some(file.into()), ..Options::default() }, |_| ()).unwrap_err();
        assert!(read().starts_with(&format!("{file}: line 1: ")), "{}", read());
        std::fs::remove_file(file).unwrap();
        assert!(read().starts_with(&format!("{file}: ")), "{}", read());
    }
}
