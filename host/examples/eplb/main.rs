//! Plans expert placement from measured loads, or simulates plans for clusters of any size.
//!
//! ```sh
//! cargo run --release --example eplb -- --input loads.json --report --plot balance.svg
//! cargo run --release --example eplb -- --simulate --model drift --plot clusters.svg
//! ```

mod plot;

use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{ArgGroup, Args, Parser, ValueEnum};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use warploom::ep::eplb::simulate::{LoadModel, Outcome, Scenario, Strategy, simulate};
use warploom::ep::eplb::{
    Balance, Cluster, EplbError, IncrementalOptions, Load, Loads, Placement, Policy, RebalanceOptions, Report,
    rebalance_experts_with, rebalance_incremental,
};

/// Plan which GPU holds which experts of a mixture-of-experts model.
///
/// With --input: reads cases and prints, for each, the three tables of DeepSeek's EPLB as JSON.
/// With --simulate: compares ways of planning on synthetic loads and prints a table.
#[derive(Parser)]
#[command(name = "eplb", after_long_help = FORMAT)]
#[command(group = ArgGroup::new("mode").required(true).args(["input", "simulate"]))]
struct Arguments {
    /// File with cases (JSON, see below); `-` is standard input
    #[arg(long, value_name = "FILE")]
    input: Option<PathBuf>,
    /// Simulate clusters instead
    #[arg(long)]
    simulate: bool,
    /// Draw an SVG: load of each GPU before and after planning, or the imbalance of simulated clusters
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
    /// Add to each case the balance before and after, overall and for each layer and GPU
    #[arg(long, conflicts_with = "simulate")]
    report: bool,
    #[command(flatten)]
    planning: Planning,
    #[command(flatten)]
    simulation: Simulation,
}

#[derive(Args)]
#[command(next_help_heading = "Planning")]
struct Planning {
    /// Whether groups of experts are kept together on nodes
    #[arg(long, value_enum, default_value_t = PolicyName::Auto)]
    policy: PolicyName,
    /// Put no two replicas of an expert on one GPU if that can be avoided
    #[arg(long)]
    avoid_duplicates: bool,
    /// Incremental plans: by how much a GPU's load may exceed that of a full plan (0.05 is 5 %)
    #[arg(long, default_value_t = 0.05)]
    slack: f64,
    /// Incremental plans: the most experts to move in each layer
    #[arg(long, value_name = "N")]
    max_moves: Option<usize>,
}

#[derive(Args)]
#[command(next_help_heading = "Simulation")]
struct Simulation {
    /// Cluster sizes in GPUs
    #[arg(long, value_delimiter = ',', default_values_t = [32, 64, 128, 256, 512, 1024, 2048])]
    gpus: Vec<usize>,
    /// How the popularity of experts changes with time
    #[arg(long, value_enum, default_value_t = ModelName::Drift)]
    model: ModelName,
    /// Skew: the expert of rank r gets tokens in proportion to r to the power of minus this
    #[arg(long, default_value_t = 0.8)]
    exponent: f64,
    /// Drift: share of an expert's popularity that is new in each step
    #[arg(long, default_value_t = 0.001)]
    rate: f64,
    /// Shift: steps between changes of workload
    #[arg(long, default_value_t = 20)]
    every: usize,
    /// Steps to judge
    #[arg(long, default_value_t = 40)]
    steps: usize,
    /// Steps between plans
    #[arg(long, default_value_t = 8)]
    interval: usize,
    /// Layers of experts
    #[arg(long, default_value_t = 8)]
    layers: usize,
    /// Experts in a layer
    #[arg(long, default_value_t = 256)]
    experts: usize,
    /// Groups of experts
    #[arg(long, default_value_t = 8)]
    groups: usize,
    /// Redundant replicas, at least; every GPU gets the same number of slots, and at least two
    #[arg(long, default_value_t = 32)]
    redundant: usize,
    /// GPUs in a node
    #[arg(long, default_value_t = 8)]
    gpus_per_node: usize,
    /// Tokens a GPU sends in a step
    #[arg(long, default_value_t = 4096)]
    tokens: usize,
    /// Experts that a token goes to
    #[arg(long, default_value_t = 8)]
    top_k: usize,
    /// Everything random follows from it
    #[arg(long, default_value_t = 0)]
    seed: u64,
}

const FORMAT: &str = "\
Input:
  {\"cases\": [{
     \"weight\": [[90, 132, ...], ...],   loads: tokens of each expert (inner) of each layer (outer)
     \"num_replicas\": 16,               slots over all GPUs, a multiple of num_gpus
     \"num_groups\": 4, \"num_nodes\": 2, \"num_gpus\": 8,
     \"name\": \"...\",                    optional, copied to the output
     \"old_phy2log\": [[...], ...]       optional, the placement in force: plan incrementally from it
  }]}
  Other fields are ignored.

Output, a line for each case in the order of the input:
  {\"cases\": [{
     \"name\": \"...\",
     \"phy2log\": [[expert of each slot] of each layer],
     \"log2phy\": [[[slots, padded with -1] of each expert] of each layer],
     \"logcnt\":  [[number of replicas of each expert] of each layer]
  }]}
  A case that is refused gives {\"name\": \"...\", \"error\": \"...\"} in its place.

Exit status: 0, also if cases were refused; 1 if the output cannot be written; 2 if the input cannot be read.";

#[derive(Clone, Copy, ValueEnum)]
enum PolicyName {
    /// Hierarchical if the groups divide over the nodes, otherwise global
    Auto,
    /// Groups of experts stay together on a node
    Hierarchical,
    /// Groups and nodes do not count
    Global,
}

#[derive(Clone, Copy, ValueEnum)]
enum ModelName {
    /// A ranking of experts that stays
    Zipf,
    /// A ranking that changes slowly
    Drift,
    /// A ranking that changes from time to time
    Shift,
}

impl Planning {
    fn options(&self) -> RebalanceOptions {
        let policy = match self.policy {
            PolicyName::Auto => Policy::Auto,
            PolicyName::Hierarchical => Policy::Hierarchical,
            PolicyName::Global => Policy::Global,
        };
        RebalanceOptions::default().policy(policy).avoid_duplicates(self.avoid_duplicates)
    }

    fn incremental(&self) -> IncrementalOptions {
        let options = IncrementalOptions::default().options(self.options()).slack(self.slack);
        self.max_moves.map_or(options, |moves| options.max_moves(moves))
    }
}

/// A load in JSON: rounded to f32 once, whether written as an integer or not.
#[derive(Deserialize, Clone, Copy)]
#[serde(untagged, expecting = "a load must be a number")]
enum Tokens {
    Count(u64),
    Average(f64),
}

impl Load for Tokens {
    fn to_f32(self) -> f32 {
        match self {
            Tokens::Count(count) => count.to_f32(),
            Tokens::Average(average) => average.to_f32(),
        }
    }

    fn to_f64(self) -> f64 {
        match self {
            Tokens::Count(count) => count.to_f64(),
            Tokens::Average(average) => average,
        }
    }
}

#[derive(Deserialize)]
struct Input {
    /// Parsed one at a time, so that a bad one does not spoil the others.
    cases: Vec<Box<RawValue>>,
}

#[derive(Deserialize)]
struct Case {
    weight: Vec<Vec<Tokens>>,
    num_replicas: usize,
    num_groups: usize,
    num_nodes: usize,
    num_gpus: usize,
    old_phy2log: Option<Vec<Vec<usize>>>,
}

#[derive(Deserialize)]
struct Name {
    name: Option<String>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Answer<'a> {
    Planned {
        #[serde(skip_serializing_if = "Option::is_none")]
        name: Option<&'a str>,
        phy2log: Vec<&'a [usize]>,
        log2phy: Vec<Vec<&'a [i64]>>,
        logcnt: Vec<&'a [usize]>,
        #[serde(skip_serializing_if = "Option::is_none")]
        report: Option<Box<ReportAnswer<'a>>>,
    },
    Refused {
        #[serde(skip_serializing_if = "Option::is_none")]
        name: Option<&'a str>,
        error: String,
    },
}

/// The balance before: of the placement in force if there is one, otherwise of each expert once, in order.
#[derive(Serialize)]
struct ReportAnswer<'a> {
    before: BalanceAnswer<'a>,
    after: BalanceAnswer<'a>,
    /// Experts moved in each layer, if there is a placement in force.
    #[serde(skip_serializing_if = "Option::is_none")]
    moved: Option<&'a [usize]>,
}

#[derive(Serialize)]
struct BalanceAnswer<'a> {
    mean_imbalance: f64,
    worst_imbalance: f64,
    duplicates: usize,
    imbalance: Vec<f64>,
    gpu_loads: Vec<&'a [f64]>,
}

impl<'a> BalanceAnswer<'a> {
    fn new(balance: &'a Balance) -> Self {
        BalanceAnswer {
            mean_imbalance: balance.mean_imbalance(),
            worst_imbalance: balance.worst_imbalance(),
            duplicates: balance.duplicates(),
            imbalance: balance.layers.iter().map(|layer| layer.imbalance).collect(),
            gpu_loads: balance.layers.iter().map(|layer| &layer.gpu_loads[..]).collect(),
        }
    }
}

/// A planned case.
struct Planned {
    placement: Placement,
    before: Balance,
    after: Balance,
    moved: Option<Vec<usize>>,
}

fn plan(case: &RawValue, planning: &Planning) -> Result<Planned, String> {
    let case: Case = serde_json::from_str(case.get()).map_err(|e| e.to_string())?;
    let refused = |e: EplbError| e.to_string();
    let loads = Loads::from_rows(&case.weight).map_err(refused)?;
    let &Case { num_replicas, num_groups, num_nodes, num_gpus, .. } = &case;
    let cluster = Cluster::new(num_replicas, num_gpus).num_groups(num_groups).num_nodes(num_nodes);
    match case.old_phy2log {
        None => {
            let placement = rebalance_experts_with(&loads, &cluster, &planning.options()).map_err(refused)?;
            let before = Balance::without_redundancy(&loads, num_gpus).map_err(refused)?;
            let after = Balance::new(&placement, &loads).map_err(refused)?;
            Ok(Planned { placement, before, after, moved: None })
        }
        Some(old) => {
            if let Some(layer) = old.iter().position(|slots| slots.len() != num_replicas) {
                return Err(format!("old_phy2log: layer {layer} must have num_replicas = {num_replicas} slots"));
            }
            let old = Placement::new(old.concat(), loads.num_experts(), num_replicas, num_gpus).map_err(refused)?;
            let placement = rebalance_incremental(&old, &loads, &cluster, &planning.incremental()).map_err(refused)?;
            let Report { before, after, moved, .. } = Report::new(&old, &placement, &loads).map_err(refused)?;
            Ok(Planned { placement, before, after, moved: Some(moved) })
        }
    }
}

fn answer<'a>(name: Option<&'a str>, planned: &'a Result<Planned, String>, report: bool) -> Answer<'a> {
    match planned {
        Ok(Planned { placement, before, after, moved }) => {
            let layers = 0..placement.num_layers();
            Answer::Planned {
                name,
                phy2log: layers.clone().map(|layer| placement.phy2log(layer)).collect(),
                log2phy: layers
                    .clone()
                    .map(|layer| placement.log2phy(layer).chunks(placement.max_logcnt()).collect())
                    .collect(),
                logcnt: layers.map(|layer| placement.logcnt(layer)).collect(),
                report: report.then(|| {
                    Box::new(ReportAnswer {
                        before: BalanceAnswer::new(before),
                        after: BalanceAnswer::new(after),
                        moved: moved.as_deref(),
                    })
                }),
            }
        }
        Err(error) => Answer::Refused { name, error: error.clone() },
    }
}

fn read(path: &Path) -> Result<Input, String> {
    let mut text = Vec::new();
    let result = if path == Path::new("-") {
        std::io::stdin().read_to_end(&mut text).map(drop)
    } else {
        std::fs::File::open(path).and_then(|mut file| file.read_to_end(&mut text)).map(drop)
    };
    result.map_err(|e| format!("cannot read {}: {e}", path.display()))?;
    serde_json::from_slice(&text).map_err(|e| format!("{} is not a file of cases: {e}", path.display()))
}

fn plan_cases(path: &Path, arguments: &Arguments) -> Result<(), (u8, String)> {
    let input = read(path).map_err(|e| (2, e))?;
    let failed = |e: std::io::Error| (1, format!("cannot write the output: {e}"));
    let mut out = std::io::BufWriter::new(std::io::stdout().lock());
    let mut panels = Vec::new();
    write!(out, "{{\"cases\":[").map_err(failed)?;
    for (i, case) in input.cases.iter().enumerate() {
        let name = serde_json::from_str::<Name>(case.get()).ok().and_then(|case| case.name);
        let planned = plan(case, &arguments.planning);
        write!(out, "{}", if i == 0 { "\n" } else { ",\n" }).map_err(failed)?;
        serde_json::to_writer(&mut out, &answer(name.as_deref(), &planned, arguments.report))
            .map_err(|e| failed(e.into()))?;
        if let (Some(_), Ok(planned)) = (&arguments.plot, planned) {
            panels.push(plot::Panel::new(name.unwrap_or_else(|| format!("case {i}")), &planned.before, &planned.after));
        }
    }
    writeln!(out, "\n]}}").and_then(|()| out.flush()).map_err(failed)?;
    match &arguments.plot {
        Some(path) => plot::balance(path, &panels).map_err(|e| (1, e)),
        None => Ok(()),
    }
}

impl Simulation {
    fn scenario(&self, num_gpus: usize) -> Scenario {
        let gpus = num_gpus.max(1);
        let slots_per_gpu = self.experts.saturating_add(self.redundant).div_ceil(gpus).max(2);
        let &Simulation { exponent, rate, every, .. } = self;
        let cluster = Cluster::new(slots_per_gpu.saturating_mul(gpus), num_gpus)
            .num_groups(self.groups)
            .num_nodes(gpus.div_ceil(self.gpus_per_node.max(1)));
        Scenario::new(cluster, self.layers, self.experts)
            .tokens(self.tokens.saturating_mul(gpus), self.top_k)
            .steps(self.steps, self.interval)
            .model(match self.model {
                ModelName::Zipf => LoadModel::Zipf { exponent },
                ModelName::Drift => LoadModel::Drift { exponent, rate },
                ModelName::Shift => LoadModel::Shift { exponent, every },
            })
            .seed(self.seed)
    }
}

fn simulate_clusters(arguments: &Arguments) -> Result<(), (u8, String)> {
    let options = arguments.planning.options();
    let distinct = options.avoid_duplicates(true);
    let incremental = arguments.planning.incremental();
    let strategies = [
        ("static", Strategy::Static),
        ("full", Strategy::Full(options)),
        ("full, no duplicates", Strategy::Full(distinct)),
        ("incremental", Strategy::Incremental(incremental)),
    ];
    let failed = |e: std::io::Error| (1, format!("cannot write the output: {e}"));
    let mut out = std::io::stdout().lock();
    let titles = ["GPUs", "strategy", "imbalance", "worst", "utilised", "moved/layer", "duplicates/layer", "ms/plan"];
    let [gpus, strategy, imbalance, worst, utilised, moved, duplicates, time] = titles;
    writeln!(
        out,
        "{gpus:>5}  {strategy:<20} {imbalance:>9} {worst:>7} {utilised:>8} {moved:>12} {duplicates:>16} {time:>8}"
    )
    .map_err(failed)?;
    let mut series: Vec<(&str, Vec<(usize, f64)>)> = strategies.iter().map(|&(name, _)| (name, Vec::new())).collect();
    for &num_gpus in &arguments.simulation.gpus {
        let scenario = arguments.simulation.scenario(num_gpus);
        let outcomes = simulate(&scenario, &strategies.map(|(_, strategy)| strategy))
            .map_err(|e| (2, format!("{num_gpus} GPUs: {e}")))?;
        for (outcome, (name, points)) in outcomes.iter().zip(&mut series) {
            let &Outcome { mean_imbalance, worst_imbalance, moves, duplicates, planning, .. } = outcome;
            let (utilised, ms) = (100.0 * outcome.utilisation(), planning.as_secs_f64() * 1e3);
            writeln!(
                out,
                "{num_gpus:>5}  {name:<20} {mean_imbalance:>9.3} {worst_imbalance:>7.3} {utilised:>7.1}% {moves:>12.1} \
                 {duplicates:>16.2} {ms:>8.2}"
            )
            .map_err(failed)?;
            points.push((num_gpus, mean_imbalance));
        }
    }
    match &arguments.plot {
        Some(path) => plot::clusters(path, &series).map_err(|e| (1, e)),
        None => Ok(()),
    }
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let result = match &arguments.input {
        Some(path) => plan_cases(path, &arguments),
        None => simulate_clusters(&arguments),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err((code, sentence)) => {
            eprintln!("eplb: {sentence}");
            ExitCode::from(code)
        }
    }
}
