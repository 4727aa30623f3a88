//! A simulator of expert loads, for clusters larger than any at hand.
//!
//! Time goes in steps (of the size of a batch or of a second). In each step the routers of all layers send tokens to
//! experts by a popularity law ([`LoadModel`]) with sampling noise. Every `interval` steps each [`Strategy`] plans
//! anew from the loads of the interval that has just passed, and its plan is judged by the loads of the next one, which
//! it does not know: a plan may be perfect for the past and poor for the present. Everything follows from the seed.

use std::time::{Duration, Instant};

use super::error::nonzero;
use super::{
    Balance, Cluster, EplbError, IncrementalOptions, Loads, Placement, RebalanceOptions, Report,
    rebalance_experts_with, rebalance_incremental,
};

/// How popular experts are, and how that changes. Experts are ranked in each layer; the one of rank `r` (from 1) gets
/// tokens in proportion to `r` to the power of `-exponent`, and at most every token. Exponent 0 is uniform.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum LoadModel {
    /// A random ranking that stays.
    Zipf {
        /// Skew.
        exponent: f64,
    },
    /// A ranking that drifts slowly: ranks follow a value of each expert that forgets its past.
    Drift {
        /// Skew.
        exponent: f64,
        /// Share of the value that is new in each step: 0 stays, 1 is a new ranking each step.
        rate: f64,
    },
    /// A ranking that is drawn anew from time to time: the workload changes.
    Shift {
        /// Skew.
        exponent: f64,
        /// Steps between changes.
        every: usize,
    },
}

/// What is simulated.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
#[must_use]
pub struct Scenario {
    /// Slots, groups, nodes and GPUs.
    pub cluster: Cluster,
    /// Layers of experts.
    pub num_layers: usize,
    /// Logical experts in a layer.
    pub num_experts: usize,
    /// Tokens of all GPUs in a step.
    pub tokens: usize,
    /// Experts that each token goes to.
    pub top_k: usize,
    /// Steps that are judged. Before them lies one interval, in which all strategies are round robin.
    pub steps: usize,
    /// Steps between plans.
    pub interval: usize,
    /// The law of the loads.
    pub model: LoadModel,
    /// Everything random follows from it.
    pub seed: u64,
}

impl Scenario {
    /// 40 steps of 4096 tokens a GPU, each of which goes to 8 experts, with a plan every 8 steps and loads that drift.
    pub const fn new(cluster: Cluster, num_layers: usize, num_experts: usize) -> Self {
        Self {
            cluster,
            num_layers,
            num_experts,
            tokens: 4096usize.saturating_mul(cluster.num_gpus),
            top_k: 8,
            steps: 40,
            interval: 8,
            model: LoadModel::Drift { exponent: 0.8, rate: 0.001 },
            seed: 0,
        }
    }

    /// With this many tokens in a step, of all GPUs together, each of which goes to `top_k` experts.
    pub const fn tokens(mut self, tokens: usize, top_k: usize) -> Self {
        (self.tokens, self.top_k) = (tokens, top_k);
        self
    }

    /// With this many steps, and a plan every `interval` of them.
    pub const fn steps(mut self, steps: usize, interval: usize) -> Self {
        (self.steps, self.interval) = (steps, interval);
        self
    }

    /// With loads by this law.
    pub const fn model(mut self, model: LoadModel) -> Self {
        self.model = model;
        self
    }

    /// With other random numbers.
    pub const fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }
}

/// How plans are made.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum Strategy {
    /// Never: [`Placement::round_robin`] stays.
    Static,
    /// A full plan each time.
    Full(RebalanceOptions),
    /// From the plan in force.
    Incremental(IncrementalOptions),
}

/// How one strategy did.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct Outcome {
    /// The strategy.
    pub strategy: Strategy,
    /// The mean imbalance (highest GPU load divided by the mean) over steps and layers.
    pub mean_imbalance: f64,
    /// The highest imbalance of a layer in a step.
    pub worst_imbalance: f64,
    /// Experts moved in one layer by one plan, on average over the plans after the first.
    pub moves: f64,
    /// Duplicates on a GPU in one layer, on average over the plans.
    pub duplicates: f64,
    /// Time to make a plan for all layers, on average. The only number that differs from run to run.
    pub planning: Duration,
}

impl Outcome {
    /// The share of the cluster's time in experts that is spent working: mean load over highest load.
    pub fn utilisation(&self) -> f64 {
        1.0 / self.mean_imbalance
    }
}

/// Runs every strategy on the same loads.
///
/// # Errors
/// Counts of zero, more experts a token than there are, a skew or rate out of range, or a cluster that a strategy
/// refuses.
pub fn simulate(scenario: &Scenario, strategies: &[Strategy]) -> Result<Vec<Outcome>, EplbError> {
    check(scenario)?;
    let &Scenario { cluster, num_layers, num_experts, steps, interval, .. } = scenario;
    let start = Placement::round_robin(num_layers, num_experts, cluster.num_replicas, cluster.num_gpus)?;
    let mut runs: Vec<Run> = strategies.iter().map(|&strategy| Run::new(strategy, start.clone())).collect();
    let mut routers: Vec<Router> = (0..num_layers).map(|layer| Router::new(scenario, layer)).collect();
    let mut known = vec![0f32; num_layers * num_experts];
    for step in 0..interval.saturating_add(steps) {
        if step > 0 && step % interval == 0 {
            let loads = Loads::new(num_layers, num_experts, &known)?;
            for run in &mut runs {
                run.plan(&loads, &cluster)?;
            }
            known.fill(0.0);
        }
        let current: Vec<f32> = routers.iter_mut().flat_map(|router| router.step(scenario, step)).collect();
        for (known, current) in known.iter_mut().zip(&current) {
            *known += current;
        }
        if step >= interval {
            let loads = Loads::new(num_layers, num_experts, &current)?;
            for run in &mut runs {
                run.judge(&loads)?;
            }
        }
    }
    Ok(runs.into_iter().map(|run| run.outcome(steps, num_layers)).collect())
}

fn check(scenario: &Scenario) -> Result<(), EplbError> {
    nonzero("num_layers", scenario.num_layers)?;
    nonzero("tokens", scenario.tokens)?;
    nonzero("steps", scenario.steps)?;
    nonzero("interval", scenario.interval)?;
    let option = |option, expected, got| Err(EplbError::Option { option, expected, got });
    if !(1..=scenario.num_experts).contains(&scenario.top_k) {
        return option("top_k", "from 1 to the number of experts", scenario.top_k as f64);
    }
    let exponent = match scenario.model {
        LoadModel::Zipf { exponent } => exponent,
        LoadModel::Drift { exponent, rate } => {
            if !(0.0..=1.0).contains(&rate) {
                return option("rate", "from 0 to 1", rate);
            }
            exponent
        }
        LoadModel::Shift { exponent, every } => {
            nonzero("every", every)?;
            exponent
        }
    };
    if (0.0..=100.0).contains(&exponent) { Ok(()) } else { option("exponent", "from 0 to 100", exponent) }
}

/// One strategy on its way.
struct Run {
    strategy: Strategy,
    placement: Placement,
    plans: usize,
    sum_imbalance: f64,
    worst_imbalance: f64,
    moved: usize,
    duplicates: usize,
    planning: Duration,
}

impl Run {
    fn new(strategy: Strategy, placement: Placement) -> Self {
        Run {
            strategy,
            placement,
            plans: 0,
            sum_imbalance: 0.0,
            worst_imbalance: 1.0,
            moved: 0,
            duplicates: 0,
            planning: Duration::ZERO,
        }
    }

    fn plan(&mut self, loads: &Loads, cluster: &Cluster) -> Result<(), EplbError> {
        let start = Instant::now();
        let placement = match &self.strategy {
            Strategy::Static => self.placement.clone(),
            Strategy::Full(options) => rebalance_experts_with(loads, cluster, options)?,
            Strategy::Incremental(options) => rebalance_incremental(&self.placement, loads, cluster, options)?,
        };
        self.planning += start.elapsed();
        let report = Report::new(&self.placement, &placement, loads)?;
        if self.plans > 0 {
            self.moved += report.total_moved();
        }
        self.duplicates += report.after.duplicates();
        self.plans += 1;
        self.placement = placement;
        Ok(())
    }

    fn judge(&mut self, loads: &Loads) -> Result<(), EplbError> {
        let balance = Balance::new(&self.placement, loads)?;
        self.sum_imbalance += balance.mean_imbalance();
        self.worst_imbalance = self.worst_imbalance.max(balance.worst_imbalance());
        Ok(())
    }

    fn outcome(self, steps: usize, num_layers: usize) -> Outcome {
        Outcome {
            strategy: self.strategy,
            mean_imbalance: self.sum_imbalance / steps as f64,
            worst_imbalance: self.worst_imbalance,
            moves: self.moved as f64 / ((self.plans - 1).max(1) * num_layers) as f64,
            duplicates: self.duplicates as f64 / (self.plans * num_layers) as f64,
            planning: self.planning.div_f64(self.plans as f64),
        }
    }
}

/// The router of one layer.
struct Router {
    random: Random,
    /// Experts rank by these, which are standard normal at any time.
    values: Vec<f64>,
}

impl Router {
    fn new(scenario: &Scenario, layer: usize) -> Self {
        let mut random = Random(scenario.seed);
        random = Random(random.next().wrapping_add(layer as u64));
        let values = (0..scenario.num_experts).map(|_| random.normal()).collect();
        Router { random, values }
    }

    /// The loads of the experts in a step.
    fn step(&mut self, scenario: &Scenario, step: usize) -> Vec<f32> {
        let (exponent, keep) = match scenario.model {
            LoadModel::Zipf { exponent } => (exponent, 1.0),
            LoadModel::Drift { exponent, rate } => (exponent, 1.0 - rate),
            LoadModel::Shift { exponent, every } => (exponent, if step.is_multiple_of(every) { 0.0 } else { 1.0 }),
        };
        if keep < 1.0 {
            for value in &mut self.values {
                *value = keep * *value + (1.0 - keep * keep).sqrt() * self.random.normal();
            }
        }
        let mut by_rank: Vec<usize> = (0..self.values.len()).collect();
        by_rank.sort_by(|&a, &b| self.values[b].total_cmp(&self.values[a]));
        let popularity = |rank: usize| (rank as f64 + 1.0).powf(-exponent);
        let total: f64 = (0..by_rank.len()).map(popularity).sum();
        let mut loads = vec![0.0; by_rank.len()];
        let tokens = scenario.tokens as f64;
        for (rank, expert) in by_rank.into_iter().enumerate() {
            let mean = (tokens * scenario.top_k as f64 * popularity(rank) / total).min(tokens);
            loads[expert] = (mean + mean.sqrt() * self.random.normal()).round().clamp(0.0, tokens) as f32;
        }
        loads
    }
}

/// SplitMix64 (Steele, Lea, Flood 2014).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// In (0, 1].
    fn uniform(&mut self) -> f64 {
        ((self.next() >> 11) + 1) as f64 / (1u64 << 53) as f64
    }

    /// Standard normal (Box and Muller 1958).
    fn normal(&mut self) -> f64 {
        (-2.0 * self.uniform().ln()).sqrt() * (std::f64::consts::TAU * self.uniform()).cos()
    }
}
