//! How evenly a placement spreads the loads, before and after rebalancing.
//!
//! A GPU's load is the sum over its slots of the expert's load divided by the number of its replicas. All GPUs wait for
//! the one with the highest load, so the imbalance of a layer is the highest load divided by the mean: 1 is perfect,
//! 2 means that half of the cluster's time in experts is spent waiting.

use super::error::{nonzero, same, table};
use super::{EplbError, Loads, Placement};

/// The loads of the GPUs in one layer.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct LayerBalance {
    /// The load of each GPU, in the unit of the expert loads.
    pub gpu_loads: Vec<f64>,
    /// The highest load of a GPU divided by the mean; 1 if there is no load.
    pub imbalance: f64,
    /// Slots with an expert that an earlier slot of the same GPU has already.
    pub duplicates: usize,
}

/// The loads of the GPUs in every layer.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Balance {
    /// The layers in order.
    pub layers: Vec<LayerBalance>,
}

impl LayerBalance {
    fn new(gpu_loads: Vec<f64>, duplicates: usize) -> Self {
        let highest = gpu_loads.iter().copied().fold(0.0, f64::max);
        let mean = gpu_loads.iter().sum::<f64>() / gpu_loads.len() as f64;
        let imbalance = if highest > 0.0 { highest / mean } else { 1.0 };
        LayerBalance { gpu_loads, imbalance, duplicates }
    }

    /// The highest load of a GPU.
    pub fn highest(&self) -> f64 {
        self.gpu_loads.iter().copied().fold(0.0, f64::max)
    }

    /// The balance of a layer of `phy2log` slots, the same number on each of `num_gpus` GPUs.
    pub(super) fn of_slots(phy2log: &[usize], loads: &[f32], num_gpus: usize) -> Self {
        let mut count = vec![0usize; loads.len()];
        for &expert in phy2log {
            count[expert] += 1;
        }
        let mut duplicates = 0;
        let gpu_loads = phy2log
            .chunks_exact(phy2log.len() / num_gpus)
            .map(|slots| {
                duplicates += slots.iter().enumerate().filter(|&(i, expert)| slots[..i].contains(expert)).count();
                slots.iter().map(|&expert| f64::from(loads[expert]) / count[expert] as f64).sum()
            })
            .collect();
        Self::new(gpu_loads, duplicates)
    }
}

impl Balance {
    /// The balance of a placement under the given loads, which need not be those it was planned for.
    ///
    /// # Errors
    /// A placement with another number of layers or experts.
    pub fn new(placement: &Placement, loads: &Loads) -> Result<Self, EplbError> {
        placement.check_loads(loads)?;
        let layer = |i| LayerBalance::of_slots(placement.phy2log(i), loads.layer(i), placement.num_gpus());
        Ok(Balance { layers: (0..loads.num_layers()).map(layer).collect() })
    }

    /// The balance without redundancy and without any plan: each expert once, in order, GPU `e * num_gpus / experts`.
    ///
    /// # Errors
    /// No GPUs, or more than there is memory for.
    pub fn without_redundancy(loads: &Loads, num_gpus: usize) -> Result<Self, EplbError> {
        nonzero("num_gpus", num_gpus)?;
        let layer = |loads: &[f32]| {
            let mut gpu_loads = table("gpu_loads", [1, 1, num_gpus], 0.0)?;
            for (expert, &load) in loads.iter().enumerate() {
                // In u128: the product of two counts may exceed 64 bits.
                gpu_loads[(expert as u128 * num_gpus as u128 / loads.len() as u128) as usize] += f64::from(load);
            }
            Ok(LayerBalance::new(gpu_loads, 0))
        };
        Ok(Balance { layers: loads.layers().map(layer).collect::<Result<_, _>>()? })
    }

    /// The mean of the layers' imbalances.
    pub fn mean_imbalance(&self) -> f64 {
        self.layers.iter().map(|layer| layer.imbalance).sum::<f64>() / self.layers.len() as f64
    }

    /// The highest of the layers' imbalances.
    pub fn worst_imbalance(&self) -> f64 {
        self.layers.iter().map(|layer| layer.imbalance).fold(0.0, f64::max)
    }

    /// Duplicates on a GPU, summed over the layers.
    pub fn duplicates(&self) -> usize {
        self.layers.iter().map(|layer| layer.duplicates).sum()
    }
}

/// What a rebalancing achieves and costs.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Report {
    /// The balance of the old placement under the new loads.
    pub before: Balance,
    /// The balance of the new placement.
    pub after: Balance,
    /// Experts that a GPU must receive because it does not hold them yet, or not as often; for each layer.
    pub moved: Vec<usize>,
}

impl Report {
    /// Compares two placements for the same loads and cluster.
    ///
    /// # Errors
    /// Placements with other numbers of layers or experts than the loads, or that differ in their replicas or GPUs.
    pub fn new(old: &Placement, new: &Placement, loads: &Loads) -> Result<Self, EplbError> {
        let (before, after) = (Balance::new(old, loads)?, Balance::new(new, loads)?);
        same("the new placement's num_replicas", old.num_replicas(), new.num_replicas())?;
        same("the new placement's num_gpus", old.num_gpus(), new.num_gpus())?;
        let layer = |i| moved(old.phy2log(i), new.phy2log(i), old.slots_per_gpu());
        Ok(Report { before, after, moved: (0..loads.num_layers()).map(layer).collect() })
    }

    /// Experts moved, summed over the layers.
    pub fn total_moved(&self) -> usize {
        self.moved.iter().sum()
    }
}

/// Slots of `new` with an expert that their GPU does not have in `old`, or not as often.
pub(super) fn moved(old: &[usize], new: &[usize], slots_per_gpu: usize) -> usize {
    let gpus = old.chunks_exact(slots_per_gpu).zip(new.chunks_exact(slots_per_gpu));
    gpus.map(|(old, new)| slots_per_gpu - common(old, new)).sum()
}

/// The size of the intersection of two multisets of experts.
fn common(old: &[usize], new: &[usize]) -> usize {
    let (mut old, mut new) = (old.to_vec(), new.to_vec());
    old.sort_unstable();
    new.sort_unstable();
    let (mut i, mut j, mut common) = (0, 0, 0);
    while i < old.len() && j < new.len() {
        common += usize::from(old[i] == new[j]);
        let step = old[i].cmp(&new[j]);
        i += usize::from(step.is_le());
        j += usize::from(step.is_ge());
    }
    common
}
