//! Rebalancing that moves few experts.
//!
//! A full plan ignores where experts lie now, so putting it into force may copy almost every expert's weights over the
//! network. Here a goal is set first, the full plan's highest GPU load plus some slack, layer by layer; then of three
//! ways to it the one with the fewest moves is taken:
//!
//! * the old placement as it is;
//! * the old placement with *steps*, each of which takes load from the busiest GPU without making another one as busy:
//!   a *swap* of two replicas on different GPUs (two moves), or a *replacement* of a replica of an expert that has
//!   several by a replica of another expert (one move). The step with the greatest relief per move is taken, until the
//!   goal is reached or no step helps;
//! * the full plan, with its nodes, GPUs and slots renumbered so that most experts stay ([`assignment`](super::assignment)).
//!
//! The last one always reaches the goal, so a result is never worse than that on both counts. Under the hierarchical
//! policy steps keep every expert on its node; only the full plan changes that.

use rayon::prelude::*;

use super::assignment::assign;
use super::balance::place;
use super::error::{same, table};
use super::report::{LayerBalance, moved};
use super::{Cluster, EplbError, Loads, Placement, Plan, RebalanceOptions};

/// How much balance to give up for fewer moves.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
#[must_use]
pub struct IncrementalOptions {
    /// Policy and duplicates, as for a full plan. With `avoid_duplicates` no step makes a duplicate.
    pub options: RebalanceOptions,
    /// By how much the highest GPU load of a layer may exceed that of the full plan: 0.05 is 5 %. 0 or more.
    pub slack: f64,
    /// The most experts to move in each layer. If the goal cannot be reached within it, the most even placement that
    /// was found within it is taken.
    pub max_moves: Option<usize>,
}

impl Default for IncrementalOptions {
    fn default() -> Self {
        IncrementalOptions { options: RebalanceOptions::default(), slack: 0.05, max_moves: None }
    }
}

impl IncrementalOptions {
    /// With this policy, and with or without duplicates.
    pub const fn options(mut self, options: RebalanceOptions) -> Self {
        self.options = options;
        self
    }

    /// With this slack.
    pub const fn slack(mut self, slack: f64) -> Self {
        self.slack = slack;
        self
    }

    /// With at most this many moves in a layer.
    pub const fn max_moves(mut self, moves: usize) -> Self {
        self.max_moves = Some(moves);
        self
    }
}

/// How many GPUs, the least busy ones, the busiest one looks for exchange on: bounds the cost of a step.
const PARTNERS: usize = 64;

/// Plans for new loads, starting from the placement in force. Experts that stay on a GPU also stay in their slot, so
/// the slots that differ between `old` and the result are the moves. Replicas are numbered in the order of slots.
///
/// # Errors
/// As [`rebalance_experts_with`](super::rebalance_experts_with); also an `old` placement with another number of layers, experts, replicas or GPUs, and
/// a slack that is negative or NaN.
pub fn rebalance_incremental(
    old: &Placement,
    loads: &Loads,
    cluster: &Cluster,
    options: &IncrementalOptions,
) -> Result<Placement, EplbError> {
    let plan = Plan::new(loads.num_experts(), cluster, options.options.policy)?;
    old.check_loads(loads)?;
    same("the old placement's num_replicas", plan.num_replicas, old.num_replicas())?;
    same("the old placement's num_gpus", plan.num_gpus, old.num_gpus())?;
    if options.slack.is_nan() || options.slack < 0.0 {
        return Err(EplbError::Option { option: "slack", expected: "0 or more", got: options.slack });
    }
    let layers: Vec<Vec<usize>> = (0..loads.num_layers())
        .into_par_iter()
        .map(|layer| replan(old.phy2log(layer), loads.layer(layer), &plan, options))
        .collect::<Result<_, _>>()?;
    Placement::new(layers.concat(), loads.num_experts(), plan.num_replicas, plan.num_gpus)
}

/// One layer: the slots of the best candidate.
fn replan(old: &[usize], loads: &[f32], plan: &Plan, options: &IncrementalOptions) -> Result<Vec<usize>, EplbError> {
    let full = renumber(old, &place(loads, plan, &options.options).phy2log, loads.len(), plan)?;
    let goal = LayerBalance::of_slots(&full, loads, plan.num_gpus).highest() * (1.0 + options.slack);
    let budget = options.max_moves.unwrap_or(usize::MAX);
    let moves = |slots: &[usize]| moved(old, slots, plan.slots_per_gpu());

    let mut candidates = vec![old.to_vec(), full];
    if keeps_groups_on_nodes(old, plan) {
        let mut steps = Steps::new(old, loads, plan, options.options.avoid_duplicates);
        let mut slots = old.to_vec();
        for _ in 0..4 * old.len() {
            if steps.loads[steps.busiest()] <= goal || !steps.improve(goal) {
                break;
            }
            if options.max_moves.is_some() && moves(&steps.slots) > budget {
                break;
            }
            // Every step improves on the one before, so only the last one within the budget counts.
            slots.clone_from(&steps.slots);
        }
        candidates.push(arrange(old, &slots, plan.slots_per_gpu()));
    }
    let rated = candidates.into_iter().map(|slots| {
        let balance = LayerBalance::of_slots(&slots, loads, plan.num_gpus);
        let highest = balance.highest();
        let duplicates = if options.options.avoid_duplicates { balance.duplicates } else { 0 };
        // A margin for the order of summation.
        let excess = if highest <= goal * (1.0 + 1e-9) { 0.0 } else { highest };
        let broken = (moves(&slots) > budget, !keeps_groups_on_nodes(&slots, plan), duplicates);
        (broken, excess, moves(&slots), highest, slots)
    });
    let best =
        rated.min_by(|a, b| a.0.cmp(&b.0).then(a.1.total_cmp(&b.1)).then(a.2.cmp(&b.2)).then(a.3.total_cmp(&b.3)));
    Ok(best.map_or_else(|| old.to_vec(), |(.., slots)| slots))
}

/// Whether every group lies on one node, and every node has the same number of groups.
fn keeps_groups_on_nodes(slots: &[usize], plan: &Plan) -> bool {
    let mut node_of = vec![None; plan.num_groups];
    let mut groups = vec![0; plan.num_nodes];
    for (slot, &expert) in slots.iter().enumerate() {
        let node = slot / (plan.num_replicas / plan.num_nodes);
        match node_of[expert / plan.group_size] {
            None => {
                node_of[expert / plan.group_size] = Some(node);
                groups[node] += 1;
            }
            Some(other) if other != node => return false,
            Some(_) => {}
        }
    }
    groups.iter().all(|&count| count == plan.num_groups / plan.num_nodes)
}

/// Orders the experts of each GPU such that those it has in `old` already lie where they lay.
fn arrange(old: &[usize], new: &[usize], slots_per_gpu: usize) -> Vec<usize> {
    let mut arranged = Vec::with_capacity(new.len());
    for (old, new) in old.chunks_exact(slots_per_gpu).zip(new.chunks_exact(slots_per_gpu)) {
        let mut arriving = new.to_vec();
        let kept: Vec<Option<usize>> = old
            .iter()
            .map(|expert| arriving.iter().position(|other| other == expert).map(|at| arriving.remove(at)))
            .collect();
        let mut arriving = arriving.into_iter();
        arranged.extend(kept.into_iter().map(|kept| kept.or_else(|| arriving.next()).unwrap_or_default()));
    }
    arranged
}

/// The placement `new` with nodes, GPUs of a node and slots of a GPU renumbered such that most experts stay.
fn renumber(old: &[usize], new: &[usize], num_experts: usize, plan: &Plan) -> Result<Vec<usize>, EplbError> {
    let (num_gpus, slots_per_gpu) = (plan.num_gpus, plan.slots_per_gpu());
    let (num_nodes, gpus_per_node) = (plan.num_nodes, plan.gpus_per_node());
    // overlap[new GPU][old GPU]: experts that both have.
    let mut overlap = table("overlap", [1, num_gpus, num_gpus], 0u32)?;
    let (old_gpus, new_gpus) = (holders(old, num_experts, slots_per_gpu), holders(new, num_experts, slots_per_gpu));
    for (old_gpus, new_gpus) in old_gpus.iter().zip(&new_gpus) {
        for &(new_gpu, new_count) in new_gpus {
            for &(old_gpu, old_count) in old_gpus {
                overlap[new_gpu * num_gpus + old_gpu] += new_count.min(old_count);
            }
        }
    }
    // For each pair of a new and an old node the best pairs of their GPUs, then the best pairs of nodes.
    let mut pairs = Vec::with_capacity(num_nodes * num_nodes);
    let mut node_overlap = Vec::with_capacity(num_nodes * num_nodes);
    for new_node in 0..num_nodes {
        for old_node in 0..num_nodes {
            let block: Vec<u32> = (0..gpus_per_node)
                .flat_map(|gpu| {
                    &overlap[(new_node * gpus_per_node + gpu) * num_gpus + old_node * gpus_per_node..][..gpus_per_node]
                })
                .copied()
                .collect();
            let gpus = assign(gpus_per_node, &block);
            node_overlap.push(gpus.iter().enumerate().map(|(row, &column)| block[row * gpus_per_node + column]).sum());
            pairs.push(gpus);
        }
    }
    let mut renumbered = vec![0; new.len()];
    for (new_node, old_node) in assign(num_nodes, &node_overlap).into_iter().enumerate() {
        for (gpu, &target) in pairs[new_node * num_nodes + old_node].iter().enumerate() {
            let from = (new_node * gpus_per_node + gpu) * slots_per_gpu;
            let to = (old_node * gpus_per_node + target) * slots_per_gpu;
            renumbered[to..][..slots_per_gpu].copy_from_slice(&new[from..][..slots_per_gpu]);
        }
    }
    Ok(arrange(old, &renumbered, slots_per_gpu))
}

/// The GPUs of each expert, ascending, with the number of replicas there.
fn holders(slots: &[usize], num_experts: usize, slots_per_gpu: usize) -> Vec<Vec<(usize, u32)>> {
    let mut holders = vec![Vec::<(usize, u32)>::new(); num_experts];
    for (slot, &expert) in slots.iter().enumerate() {
        let gpu = slot / slots_per_gpu;
        match holders[expert].last_mut() {
            Some((last, count)) if *last == gpu => *count += 1,
            _ => holders[expert].push((gpu, 1)),
        }
    }
    holders
}

/// A placement of one layer that improves step by step.
struct Steps<'a> {
    expert_loads: &'a [f32],
    plan: &'a Plan,
    avoid_duplicates: bool,
    slots: Vec<usize>,
    /// The slots of each expert.
    replicas: Vec<Vec<usize>>,
    /// The experts of each node; no step changes them.
    experts: Vec<Vec<usize>>,
    /// The load of each GPU.
    loads: Vec<f64>,
    /// Changes of GPU loads under a replacement being judged: zero but for the GPUs in `touched`.
    change: Vec<f64>,
    touched: Vec<usize>,
}

/// A change of the placement that relieves the busiest GPU.
#[derive(Clone, Copy)]
enum Step {
    /// The experts of two slots change places.
    Swap(usize, usize),
    /// A slot gets a replica of this expert.
    Replace(usize, usize),
}

impl<'a> Steps<'a> {
    fn new(slots: &[usize], expert_loads: &'a [f32], plan: &'a Plan, avoid_duplicates: bool) -> Self {
        let mut replicas = vec![Vec::new(); expert_loads.len()];
        for (slot, &expert) in slots.iter().enumerate() {
            replicas[expert].push(slot);
        }
        let node = |expert: usize| replicas[expert][0] / (plan.num_replicas / plan.num_nodes);
        let mut experts = vec![Vec::new(); plan.num_nodes];
        for expert in 0..expert_loads.len() {
            experts[node(expert)].push(expert);
        }
        Steps {
            expert_loads,
            plan,
            avoid_duplicates,
            slots: slots.to_vec(),
            replicas,
            experts,
            loads: LayerBalance::of_slots(slots, expert_loads, plan.num_gpus).gpu_loads,
            change: vec![0.0; plan.num_gpus],
            touched: Vec::new(),
        }
    }

    /// The GPU with the highest load, the lowest of several.
    fn busiest(&self) -> usize {
        (0..self.loads.len()).fold(0, |best, gpu| if self.loads[gpu] > self.loads[best] { gpu } else { best })
    }

    /// The load of a replica if its expert has `count` of them.
    fn share(&self, expert: usize, count: usize) -> f64 {
        f64::from(self.expert_loads[expert]) / count as f64
    }

    fn slots_of(&self, gpu: usize) -> std::ops::Range<usize> {
        gpu * self.plan.slots_per_gpu()..(gpu + 1) * self.plan.slots_per_gpu()
    }

    /// Whether a replica of `expert` on `gpu` would be a duplicate that is to be avoided.
    fn barred(&self, expert: usize, gpu: usize) -> bool {
        self.avoid_duplicates && self.slots[self.slots_of(gpu)].contains(&expert)
    }

    /// Takes the step with the greatest relief of the busiest GPU per move, if any step lowers its load without making
    /// another GPU as busy. Load below `goal` does not count as relief. Ties go to the first step found.
    fn improve(&mut self, goal: f64) -> bool {
        let busiest = self.busiest();
        let peak = self.loads[busiest];
        let node = busiest / self.plan.gpus_per_node();
        let gpus = node * self.plan.gpus_per_node()..(node + 1) * self.plan.gpus_per_node();
        let mut partners: Vec<usize> = gpus.filter(|&gpu| gpu != busiest).collect();
        let lighter = |a: &usize, b: &usize| self.loads[*a].total_cmp(&self.loads[*b]).then(a.cmp(b));
        if partners.len() > PARTNERS {
            partners.select_nth_unstable_by(PARTNERS, lighter);
            partners.truncate(PARTNERS);
        }
        partners.sort_unstable_by(lighter);
        let mut best = None;
        // A relief below the rounding of the sums is none, and might be repeated for ever.
        let mut most = peak * 1e-9;
        let mut consider = |step: Step, highest_after: f64, moves: f64| {
            let relief = (peak - highest_after.max(goal)) / moves;
            if relief > most && highest_after < peak {
                (best, most) = (Some(step), relief);
            }
        };
        for slot in self.slots_of(busiest) {
            let expert = self.slots[slot];
            let share = self.share(expert, self.replicas[expert].len());
            for &partner in &partners {
                let crowded = self.barred(expert, partner);
                for other_slot in self.slots_of(partner) {
                    let other = self.slots[other_slot];
                    let less = share - self.share(other, self.replicas[other].len());
                    if less > 0.0 && !crowded && !self.barred(other, busiest) {
                        consider(Step::Swap(slot, other_slot), (peak - less).max(self.loads[partner] + less), 2.0);
                    }
                    // Another replica of the busy expert, elsewhere.
                    if let Some(highest) = self.highest_if_replaced(other_slot, expert) {
                        consider(Step::Replace(other_slot, expert), highest, 1.0);
                    }
                }
            }
            // One replica fewer here, of an expert that has others.
            for i in 0..self.experts[node].len() {
                let other = self.experts[node][i];
                if let Some(highest) = self.highest_if_replaced(slot, other) {
                    consider(Step::Replace(slot, other), highest, 1.0);
                }
            }
        }
        if let Some(step) = best {
            self.take(step);
        }
        best.is_some()
    }

    /// The highest load among the GPUs that would change if `slot` got a replica of `expert`; none if it cannot.
    fn highest_if_replaced(&mut self, slot: usize, expert: usize) -> Option<f64> {
        let dropped = self.slots[slot];
        let gpu = slot / self.plan.slots_per_gpu();
        let (count, dropped_count) = (self.replicas[expert].len(), self.replicas[dropped].len());
        if dropped == expert || dropped_count < 2 || self.barred(expert, gpu) {
            return None;
        }
        let change = self.share(expert, count + 1) - self.share(expert, count);
        let dropped_change = self.share(dropped, dropped_count - 1) - self.share(dropped, dropped_count);
        let own = self.share(expert, count + 1) - self.share(dropped, dropped_count - 1);
        let slots_per_gpu = self.plan.slots_per_gpu();
        let changes = self.replicas[expert].iter().map(|slot| (slot / slots_per_gpu, change));
        let dropped_changes = self.replicas[dropped].iter().map(|slot| (slot / slots_per_gpu, dropped_change));
        for (gpu, change) in changes.chain(dropped_changes).chain([(gpu, own)]) {
            self.change[gpu] += change;
            self.touched.push(gpu);
        }
        let highest = self.touched.iter().map(|&gpu| self.loads[gpu] + self.change[gpu]).fold(0.0, f64::max);
        for gpu in self.touched.drain(..) {
            self.change[gpu] = 0.0;
        }
        Some(highest)
    }

    fn take(&mut self, step: Step) {
        let experts = match step {
            Step::Swap(a, b) => {
                let experts = [self.slots[a], self.slots[b]];
                self.hold(a, experts[1]);
                self.hold(b, experts[0]);
                experts
            }
            Step::Replace(slot, expert) => {
                let experts = [self.slots[slot], expert];
                self.hold(slot, expert);
                experts
            }
        };
        let mut gpus: Vec<usize> =
            experts.iter().flat_map(|&e| &self.replicas[e]).map(|slot| slot / self.plan.slots_per_gpu()).collect();
        if let Step::Replace(slot, _) = step {
            gpus.push(slot / self.plan.slots_per_gpu());
        }
        for gpu in gpus {
            let shares = self.slots[self.slots_of(gpu)].iter().map(|&e| self.share(e, self.replicas[e].len()));
            self.loads[gpu] = shares.sum();
        }
    }

    fn hold(&mut self, slot: usize, expert: usize) {
        let dropped = std::mem::replace(&mut self.slots[slot], expert);
        self.replicas[dropped].retain(|&other| other != slot);
        self.replicas[expert].push(slot);
    }
}
