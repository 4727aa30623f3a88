//! Full rebalancing: packing, replication, and the two policies made of them.
//!
//! Loads are finite and not negative, so their bit patterns order as their values do; heaps of (bits, index) therefore
//! find what the definition's linear searches find, ties included: the busiest expert with the lowest index, the
//! lightest pack with the lowest index. For E experts, R replicas and G GPUs a layer costs O((E + R) log(E + R + G)).

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use rayon::prelude::*;

use super::error::{divides, nonzero};
use super::placement::LayerPlacement;
use super::{Cluster, EplbError, Loads, Placement, Plan, RebalanceOptions};

/// Where [`balanced_packing`] puts each item. Both tables are `[layers, items]`.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Packing {
    /// The pack of each item.
    pub pack_index: Vec<usize>,
    /// How many items were put into that pack before it.
    pub rank_in_pack: Vec<usize>,
}

/// Which experts [`replicate_experts`] gives more than one replica.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Replication {
    /// The logical expert of each replica: first every expert once, then the additional replicas as they were made.
    /// `[layers, replicas]`
    pub phy2log: Vec<usize>,
    /// The number of this replica among those of its expert. `[layers, replicas]`
    pub rank: Vec<usize>,
    /// The number of replicas of each expert. `[layers, experts]`
    pub logcnt: Vec<usize>,
}

/// Packs the items of each layer into `num_packs` packs with the same number of items each, and weights as equal as a
/// greedy choice makes them: items in descending order of weight (equal ones in index order), each into the lightest
/// pack with room, ties to the lowest pack. With one item a pack, item `i` goes to pack `i`. Weights are summed in f32.
///
/// # Errors
/// No packs, or items that do not divide over them.
pub fn balanced_packing(weights: &Loads, num_packs: usize) -> Result<Packing, EplbError> {
    nonzero("num_packs", num_packs)?;
    divides("the number of items", weights.num_experts(), "num_packs", num_packs)?;
    let layers: Vec<_> = weights.layers().map(|layer| pack(layer, num_packs)).collect();
    Ok(Packing {
        pack_index: layers.iter().flatten().map(|&(pack, _)| pack).collect(),
        rank_in_pack: layers.iter().flatten().map(|&(_, rank)| rank).collect(),
    })
}

/// Makes `num_replicas` replicas of the experts of each layer: one of each, then one at a time of the expert with the
/// highest load per replica, ties to the lowest expert. This makes the highest load of a replica as low as possible.
///
/// # Errors
/// Fewer replicas than experts, or more than fit in memory.
pub fn replicate_experts(loads: &Loads, num_replicas: usize) -> Result<Replication, EplbError> {
    let num_experts = loads.num_experts();
    if num_replicas < num_experts {
        return Err(EplbError::TooFewReplicas { num_replicas, num_experts });
    }
    room_for(loads.num_layers(), num_replicas)?;
    let layers: Vec<_> = loads.layers().map(|layer| replicate(layer, num_replicas, usize::MAX)).collect();
    Ok(Replication {
        phy2log: layers.iter().flat_map(|layer| &layer.phy2log).copied().collect(),
        rank: layers.iter().flat_map(|layer| &layer.rank).copied().collect(),
        logcnt: layers.iter().flat_map(|layer| &layer.logcnt).copied().collect(),
    })
}

/// Plans replicas and their GPUs for every layer exactly as DeepSeek's `rebalance_experts` does with a stable sort:
/// the hierarchical policy if the groups divide over the nodes, otherwise the global one, under which groups and nodes
/// do not count.
///
/// # Errors
/// Counts of zero; under the hierarchical policy experts that do not divide into the groups or GPUs over the nodes;
/// replicas that do not divide over the GPUs; fewer replicas than experts; tables that do not fit in memory.
pub fn rebalance_experts(loads: &Loads, cluster: &Cluster) -> Result<Placement, EplbError> {
    rebalance_experts_with(loads, cluster, &RebalanceOptions::default())
}

/// As [`rebalance_experts`], with a choice of policy and without duplicates on a GPU if so wished.
///
/// # Errors
/// As [`rebalance_experts`]; with [`Policy::Hierarchical`](super::Policy::Hierarchical) also groups that do not divide
/// over the nodes.
pub fn rebalance_experts_with(
    loads: &Loads,
    cluster: &Cluster,
    options: &RebalanceOptions,
) -> Result<Placement, EplbError> {
    let plan = Plan::new(loads.num_experts(), cluster, options.policy)?;
    room_for(loads.num_layers(), plan.num_replicas)?;
    let layers: Vec<_> =
        (0..loads.num_layers()).into_par_iter().map(|i| place(loads.layer(i), &plan, options)).collect();
    Placement::from_layers(&layers, plan.num_gpus)
}

/// Refuses at once what would fail after a long while: working tables need about three words a replica.
fn room_for(num_layers: usize, num_replicas: usize) -> Result<(), EplbError> {
    let dimensions = [num_layers, num_replicas, 3];
    let too_large = EplbError::TooLarge { table: "phy2log", dimensions };
    let Some(len) = dimensions.iter().try_fold(1usize, |n, &d| n.checked_mul(d)) else { return Err(too_large) };
    Vec::<usize>::new().try_reserve_exact(len).map_err(|_| too_large)
}

/// One layer: groups to nodes, replicas in each node, replicas to the GPUs of the node.
pub(super) fn place(loads: &[f32], plan: &Plan, options: &RebalanceOptions) -> LayerPlacement {
    let &Plan { num_replicas, num_nodes, group_size, .. } = plan;
    let group_loads: Vec<f32> = loads.chunks_exact(group_size).map(sum).collect();
    // The experts of each node, in the order of their groups' ranks there.
    let mut groups = vec![0; plan.num_groups];
    let groups_per_node = plan.num_groups / num_nodes;
    for (group, (node, rank)) in pack(&group_loads, num_nodes).into_iter().enumerate() {
        groups[node * groups_per_node + rank] = group;
    }
    let experts: Vec<usize> = groups.iter().flat_map(|&g| g * group_size..(g + 1) * group_size).collect();

    let experts_per_node = loads.len() / num_nodes;
    let replicas_per_node = num_replicas / num_nodes;
    let mut layer =
        LayerPlacement { phy2log: vec![0; num_replicas], rank: vec![0; num_replicas], logcnt: vec![0; loads.len()] };
    for (node, experts) in experts.chunks_exact(experts_per_node).enumerate() {
        let loads: Vec<f32> = experts.iter().map(|&expert| loads[expert]).collect();
        let limit = if options.avoid_duplicates { plan.gpus_per_node() } else { usize::MAX };
        let replicas = replicate(&loads, replicas_per_node, limit);
        let per_replica: Vec<f32> = replicas.phy2log.iter().map(|&e| loads[e] / replicas.logcnt[e] as f32).collect();
        let places = if options.avoid_duplicates {
            pack_distinct(&per_replica, &replicas.phy2log, plan.gpus_per_node())
        } else {
            pack(&per_replica, plan.gpus_per_node())
        };
        for (replica, (gpu, rank)) in places.into_iter().enumerate() {
            let slot = node * replicas_per_node + gpu * plan.slots_per_gpu() + rank;
            layer.phy2log[slot] = experts[replicas.phy2log[replica]];
            layer.rank[slot] = replicas.rank[replica];
        }
        for (&expert, &count) in experts.iter().zip(&replicas.logcnt) {
            layer.logcnt[expert] = count;
        }
    }
    layer
}

/// The f32 sum of a group, added up in the order of PyTorch's CPU kernel (groups of up to 512 experts), so that
/// rounding cannot change which of two nearly equal groups comes first: from 8 values on, eight lanes, each with four
/// interleaved partial sums, then the values left over, then lane after lane; below 8 values, one such lane.
fn sum(values: &[f32]) -> f32 {
    const LANES: usize = 8;
    /// The sum of a lane with four partial sums for its first, second, third and fourth values.
    fn interleaved(count: usize, value: impl Fn(usize) -> f32) -> f32 {
        let mut partial = [0.0; 4];
        for i in 0..count {
            // Values after the last full four go to the first partial sum.
            partial[if i < count / 4 * 4 { i % 4 } else { 0 }] += value(i);
        }
        partial[0] + partial[1] + partial[2] + partial[3]
    }
    if values.len() < LANES {
        return interleaved(values.len(), |i| values[i]);
    }
    let (rows, rest) = values.as_chunks::<LANES>();
    let lanes = (0..LANES).map(|lane| interleaved(rows.len(), |row| rows[row][lane]));
    rest.iter().copied().chain(lanes).fold(0.0, |sum, value| sum + value)
}

/// The order of packing: by descending weight, equal weights by index.
fn descending(weights: &[f32]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..weights.len()).collect();
    order.sort_by_key(|&item| Reverse(weights[item].to_bits()));
    order
}

/// [`balanced_packing`] of one layer: pack and rank of each item.
fn pack(weights: &[f32], num_packs: usize) -> Vec<(usize, usize)> {
    let capacity = weights.len() / num_packs;
    if capacity == 1 {
        return (0..num_packs).map(|item| (item, 0)).collect();
    }
    let mut places = vec![(0, 0); weights.len()];
    let mut items = vec![0; num_packs];
    // Packs with room, lightest and lowest first.
    let mut open: BinaryHeap<_> = (0..num_packs).map(|pack| Reverse((0f32.to_bits(), pack))).collect();
    for item in descending(weights) {
        let Some(mut lightest) = open.peek_mut() else { break };
        let Reverse((weight, pack)) = *lightest;
        places[item] = (pack, items[pack]);
        items[pack] += 1;
        if items[pack] < capacity {
            lightest.0.0 = (f32::from_bits(weight) + weights[item]).to_bits();
        } else {
            std::collections::binary_heap::PeekMut::pop(lightest);
        }
    }
    places
}

/// [`replicate_experts`] of one layer. No expert gets more than `limit` replicas while another one has fewer.
fn replicate(loads: &[f32], num_replicas: usize, limit: usize) -> LayerPlacement {
    let mut logcnt = vec![1; loads.len()];
    let mut phy2log: Vec<usize> = (0..loads.len()).collect();
    let mut rank = vec![0; loads.len()];
    phy2log.reserve_exact(num_replicas - loads.len());
    rank.reserve_exact(num_replicas - loads.len());
    let load_per_replica = |expert: usize, count: usize| (loads[expert] / count as f32).to_bits();
    let mut limit = if limit > 1 { limit } else { usize::MAX };
    // Experts below the limit, busiest and lowest first.
    let mut open: BinaryHeap<_> = (0..loads.len()).map(|e| (load_per_replica(e, 1), Reverse(e))).collect();
    for _ in loads.len()..num_replicas {
        if open.is_empty() {
            limit = usize::MAX;
            open = (0..loads.len()).map(|e| (load_per_replica(e, logcnt[e]), Reverse(e))).collect();
        }
        let Some(mut busiest) = open.peek_mut() else { break };
        let Reverse(expert) = busiest.1;
        phy2log.push(expert);
        rank.push(logcnt[expert]);
        logcnt[expert] += 1;
        if logcnt[expert] < limit {
            busiest.0 = load_per_replica(expert, logcnt[expert]);
        } else {
            std::collections::binary_heap::PeekMut::pop(busiest);
        }
    }
    LayerPlacement { phy2log, rank, logcnt }
}

/// As [`pack`], but keeps items of the same expert apart: each item goes to the lightest pack with room that has no
/// item of its expert. Where only packs that have one are left, an item of another expert makes room (`exchange`), and
/// only if every pack has that expert already is there a duplicate. So an expert with `n` items ends up with
/// `max(0, n - num_packs)` duplicates, which is the least possible.
fn pack_distinct(weights: &[f32], experts: &[usize], num_packs: usize) -> Vec<(usize, usize)> {
    let capacity = weights.len() / num_packs;
    let mut packs = vec![Vec::with_capacity(capacity); num_packs];
    let mut open: BinaryHeap<_> = (0..num_packs).map(|pack| Reverse((0f32.to_bits(), pack))).collect();
    let mut passed_over = Vec::new();
    // With one item a pack no two can meet, and the order is that of `pack`.
    let order = if capacity == 1 { (0..weights.len()).collect() } else { descending(weights) };
    for item in order {
        passed_over.clear();
        let free = loop {
            match open.pop() {
                Some(Reverse((weight, pack))) if has(&packs[pack], experts, experts[item]) => {
                    passed_over.push((weight, pack));
                }
                found => break found,
            }
        };
        let target = if let Some(Reverse((weight, pack))) = free {
            packs[pack].push(item);
            Some((f32::from_bits(weight) + weights[item], pack))
        } else if let Some((weight, pack)) = passed_over.first().copied() {
            passed_over.remove(0);
            let added = exchange(&mut packs, weights, experts, pack, item);
            Some((f32::from_bits(weight) + weights[added], pack))
        } else {
            None
        };
        open.extend(passed_over.iter().copied().map(Reverse));
        if let Some((weight, pack)) = target.filter(|&(_, pack)| packs[pack].len() < capacity) {
            open.push(Reverse((weight.to_bits(), pack)));
        }
    }
    let mut places = vec![(0, 0); weights.len()];
    for (pack, items) in packs.iter().enumerate() {
        for (rank, &item) in items.iter().enumerate() {
            places[item] = (pack, rank);
        }
    }
    places
}

fn has(pack: &[usize], experts: &[usize], expert: usize) -> bool {
    pack.iter().any(|&item| experts[item] == expert)
}

/// Adds `item` to the packs where the only one with room, `open`, has its expert already: some full pack without that
/// expert takes it and hands an item over to `open`, of an expert that `open` lacks or of which the full pack has two.
/// There always is one: a full pack with distinct experts has more of them than `open` has items. Of all such
/// exchanges the one with the lightest heavier pack is taken, ties to the lowest. Returns the item that `open` gets.
fn exchange(packs: &mut [Vec<usize>], weights: &[f32], experts: &[usize], open: usize, item: usize) -> usize {
    let weight = |pack: &[usize]| pack.iter().map(|&item| weights[item]).sum::<f32>();
    let open_weight = weight(&packs[open]);
    let mut best: Option<(f32, usize, usize)> = None;
    for (full, pack) in packs.iter().enumerate().filter(|(_, pack)| !has(pack, experts, experts[item])) {
        let full_weight = weight(pack);
        for (rank, &other) in pack.iter().enumerate() {
            let twice = pack.iter().filter(|&&i| experts[i] == experts[other]).count() > 1;
            if twice || !has(&packs[open], experts, experts[other]) {
                let heavier = (full_weight - weights[other] + weights[item]).max(open_weight + weights[other]);
                if best.is_none_or(|(least, ..)| heavier < least) {
                    best = Some((heavier, full, rank));
                }
            }
        }
    }
    let added = match best {
        Some((_, full, rank)) => std::mem::replace(&mut packs[full][rank], item),
        None => item,
    };
    packs[open].push(added);
    added
}
