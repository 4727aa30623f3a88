//! The plan: three tables, as DeepSeek's EPLB returns them.

use super::error::{divides, nonzero, same, table};
use super::{EplbError, Loads};

/// Which slot holds which expert, for every layer. A slot is a physical expert; GPU `g` has the slots
/// `g * slots_per_gpu .. (g + 1) * slots_per_gpu`. Every logical expert has at least one slot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placement {
    num_experts: usize,
    num_replicas: usize,
    num_gpus: usize,
    max_logcnt: usize,
    phy2log: Vec<usize>,
    log2phy: Vec<i64>,
    logcnt: Vec<usize>,
}

/// The slots of one layer, and the order of each expert's replicas.
pub(super) struct LayerPlacement {
    /// Slot to expert.
    pub(super) phy2log: Vec<usize>,
    /// Slot to the number of this replica among those of its expert.
    pub(super) rank: Vec<usize>,
    /// Expert to number of replicas.
    pub(super) logcnt: Vec<usize>,
}

impl Placement {
    /// From the experts in all slots of all layers, `phy2log[layer * num_replicas + slot]`; an expert's replicas are
    /// numbered in the order of their slots. For a placement that is in force already, made elsewhere or by hand.
    ///
    /// # Errors
    /// A zero dimension; slots that do not divide over the GPUs; a length that is no multiple of `num_replicas`; an
    /// expert out of range, or one without any slot.
    pub fn new(
        phy2log: Vec<usize>,
        num_experts: usize,
        num_replicas: usize,
        num_gpus: usize,
    ) -> Result<Self, EplbError> {
        nonzero("the number of experts", num_experts)?;
        nonzero("num_replicas", num_replicas)?;
        nonzero("num_gpus", num_gpus)?;
        nonzero("the number of layers", phy2log.len())?;
        divides("num_replicas", num_replicas, "num_gpus", num_gpus)?;
        divides("the length of phy2log", phy2log.len(), "num_replicas", num_replicas)?;
        let mut layers = Vec::new();
        for (layer, slots) in phy2log.chunks_exact(num_replicas).enumerate() {
            let mut logcnt = table("logcnt", [1, 1, num_experts], 0)?;
            let mut rank = table("rank", [1, 1, num_replicas], 0)?;
            for (slot, (&expert, rank)) in slots.iter().zip(&mut rank).enumerate() {
                let count =
                    logcnt.get_mut(expert).ok_or(EplbError::NoSuchExpert { layer, slot, expert, num_experts })?;
                *rank = *count;
                *count += 1;
            }
            if let Some(expert) = logcnt.iter().position(|&count| count == 0) {
                return Err(EplbError::MissingExpert { layer, expert });
            }
            layers.push(LayerPlacement { phy2log: slots.to_vec(), rank, logcnt });
        }
        Self::from_layers(&layers, num_gpus)
    }

    /// The placement of a model without load balancing: slot `i` holds expert `i` modulo the number of experts.
    ///
    /// # Errors
    /// A zero dimension, slots that do not divide over the GPUs, or fewer slots than experts.
    pub fn round_robin(
        num_layers: usize,
        num_experts: usize,
        num_replicas: usize,
        num_gpus: usize,
    ) -> Result<Self, EplbError> {
        nonzero("the number of experts", num_experts)?;
        let mut phy2log = table("phy2log", [num_layers, num_replicas, 1], 0)?;
        for (i, expert) in phy2log.iter_mut().enumerate() {
            *expert = i % num_replicas % num_experts;
        }
        Self::new(phy2log, num_experts, num_replicas, num_gpus)
    }

    /// Puts layers of the same dimensions together.
    pub(super) fn from_layers(layers: &[LayerPlacement], num_gpus: usize) -> Result<Self, EplbError> {
        let num_replicas = layers[0].phy2log.len();
        let num_experts = layers[0].logcnt.len();
        let max_logcnt = layers.iter().flat_map(|layer| &layer.logcnt).copied().max().unwrap_or(0);
        let mut phy2log = table("phy2log", [layers.len(), num_replicas, 1], 0)?;
        let mut logcnt = table("logcnt", [layers.len(), num_experts, 1], 0)?;
        let mut log2phy = table("log2phy", [layers.len(), num_experts, max_logcnt], -1i64)?;
        for (i, layer) in layers.iter().enumerate() {
            phy2log[i * num_replicas..][..num_replicas].copy_from_slice(&layer.phy2log);
            logcnt[i * num_experts..][..num_experts].copy_from_slice(&layer.logcnt);
            for (slot, (&expert, &rank)) in layer.phy2log.iter().zip(&layer.rank).enumerate() {
                log2phy[(i * num_experts + expert) * max_logcnt + rank] = slot as i64;
            }
        }
        Ok(Placement { num_experts, num_replicas, num_gpus, max_logcnt, phy2log, log2phy, logcnt })
    }

    /// Layers.
    pub fn num_layers(&self) -> usize {
        self.phy2log.len() / self.num_replicas
    }

    /// Logical experts in each layer.
    pub fn num_experts(&self) -> usize {
        self.num_experts
    }

    /// Slots in each layer, over all GPUs.
    pub fn num_replicas(&self) -> usize {
        self.num_replicas
    }

    /// GPUs.
    pub fn num_gpus(&self) -> usize {
        self.num_gpus
    }

    /// Slots of one GPU in each layer.
    pub fn slots_per_gpu(&self) -> usize {
        self.num_replicas / self.num_gpus
    }

    /// The most replicas that any expert of any layer has: the last dimension of [`log2phy`](Self::log2phy).
    pub fn max_logcnt(&self) -> usize {
        self.max_logcnt
    }

    /// The logical expert in each slot of a layer. `[num_replicas]`
    ///
    /// # Panics
    /// If there is no such layer.
    pub fn phy2log(&self, layer: usize) -> &[usize] {
        &self.phy2log[layer * self.num_replicas..][..self.num_replicas]
    }

    /// The slots of each logical expert of a layer, padded with -1. `[num_experts, max_logcnt]`
    ///
    /// # Panics
    /// If there is no such layer.
    pub fn log2phy(&self, layer: usize) -> &[i64] {
        let len = self.num_experts * self.max_logcnt;
        &self.log2phy[layer * len..][..len]
    }

    /// The number of replicas of each logical expert of a layer. `[num_experts]`
    ///
    /// # Panics
    /// If there is no such layer.
    pub fn logcnt(&self, layer: usize) -> &[usize] {
        &self.logcnt[layer * self.num_experts..][..self.num_experts]
    }

    /// The slots of one logical expert.
    ///
    /// # Panics
    /// If there is no such layer or expert.
    pub fn replicas(&self, layer: usize, expert: usize) -> &[i64] {
        &self.log2phy(layer)[expert * self.max_logcnt..][..self.logcnt(layer)[expert]]
    }

    /// The experts on one GPU.
    ///
    /// # Panics
    /// If there is no such layer or GPU.
    pub fn gpu(&self, layer: usize, gpu: usize) -> &[usize] {
        &self.phy2log(layer)[gpu * self.slots_per_gpu()..][..self.slots_per_gpu()]
    }

    /// Refuses loads of another model.
    pub(super) fn check_loads(&self, loads: &Loads) -> Result<(), EplbError> {
        same("the placement's number of layers", loads.num_layers(), self.num_layers())?;
        same("the placement's number of experts", loads.num_experts(), self.num_experts)
    }
}
