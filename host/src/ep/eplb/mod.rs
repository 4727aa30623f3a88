//! Expert-parallel load balancing: which GPU holds which expert, and how often.
//!
//! The router of a mixture-of-experts model sends far more tokens to some experts than to others, so GPUs that hold one
//! expert each finish at different times. A plan has `num_replicas` slots, the same number on every GPU, so that busy
//! experts can be held several times; a token goes to any one replica of its expert. [`rebalance_experts`] makes the
//! plan from measured loads, layer by layer, on the host:
//!
//! 1. *groups to nodes*: whole groups of experts are packed onto the nodes, so that group-limited routing keeps most
//!    traffic on the fast network inside a node ([`balanced_packing`]);
//! 2. *replication*: within a node, each spare slot goes to the expert whose replicas are the busiest at that moment
//!    ([`replicate_experts`]);
//! 3. *replicas to GPUs*: the replicas are packed onto the GPUs of the node, again with [`balanced_packing`].
//!
//! This is the *hierarchical* policy, for prefill. If the groups do not divide over the nodes, or if asked to, the
//! *global* policy treats the cluster as one node with one group, for large decode clusters.
//!
//! The algorithm, its three tables and its rounding are those of DeepSeek's EPLB
//! (<https://github.com/deepseek-ai/EPLB>), with a stable sort: loads are `f32`; the busiest expert is the first one
//! that attains the maximum; packing takes items in descending order, equal items in index order, each into the
//! lightest pack with room, ties to the lowest pack. Heaps replace its linear searches, and layers run in parallel.
//! Results depend on neither.
//!
//! Beyond it: [`RebalanceOptions::avoid_duplicates`], [`rebalance_incremental`], [`Balance`] and [`Report`], and [`simulate`].
//!
//! ```
//! use warploom::ep::eplb::{Cluster, Loads, rebalance_experts};
//!
//! let loads = Loads::from_rows(&[[90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86]])?;
//! let placement = rebalance_experts(&loads, &Cluster::new(16, 8).num_groups(4).num_nodes(2))?;
//! assert_eq!(placement.phy2log(0), [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1]);
//! assert_eq!(placement.replicas(0, 5), [0, 2]); // expert 5 lies in slots 0 and 2, that is on GPUs 0 and 1
//! # Ok::<(), warploom::ep::eplb::EplbError>(())
//! ```

mod assignment;
mod balance;
mod error;
mod incremental;
mod loads;
mod placement;
mod report;
pub mod simulate;

pub use balance::{
    Packing, Replication, balanced_packing, rebalance_experts, rebalance_experts_with, replicate_experts,
};
pub use error::EplbError;
pub use incremental::{IncrementalOptions, rebalance_incremental};
pub use loads::{Load, Loads};
pub use placement::Placement;
pub use report::{Balance, LayerBalance, Report};

use error::{divides, nonzero};

/// The slots and machines to plan for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
#[must_use]
pub struct Cluster {
    /// Slots for experts in a layer, over all GPUs: the logical experts and their redundant replicas. A multiple of
    /// `num_gpus`, at least the number of logical experts.
    pub num_replicas: usize,
    /// Groups of consecutive logical experts, as in group-limited routing; 1 if the model has none.
    pub num_groups: usize,
    /// Nodes: GPUs of one node talk over a faster network. Counts only under the hierarchical policy.
    pub num_nodes: usize,
    /// GPUs over all nodes. Node `n` holds the consecutive GPUs `n * num_gpus / num_nodes ..`; GPU `g` holds the
    /// consecutive slots `g * num_replicas / num_gpus ..`.
    pub num_gpus: usize,
}

impl Cluster {
    /// These many slots on these many GPUs of one node, for a model without groups.
    pub const fn new(num_replicas: usize, num_gpus: usize) -> Self {
        Self { num_replicas, num_groups: 1, num_nodes: 1, num_gpus }
    }

    /// With this many groups.
    pub const fn num_groups(mut self, num_groups: usize) -> Self {
        self.num_groups = num_groups;
        self
    }

    /// With this many nodes.
    pub const fn num_nodes(mut self, num_nodes: usize) -> Self {
        self.num_nodes = num_nodes;
        self
    }
}

/// Whether groups of experts are kept together on nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Policy {
    /// Hierarchical if the groups divide over the nodes, otherwise global; the behaviour of DeepSeek's EPLB.
    #[default]
    Auto,
    /// Groups to nodes, then replicas to the GPUs of each node. An error if the groups do not divide over the nodes.
    Hierarchical,
    /// Replicas to all GPUs, whatever their groups and nodes.
    Global,
}

/// How to plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
#[must_use]
pub struct RebalanceOptions {
    /// Whether groups of experts are kept together on nodes.
    pub policy: Policy,
    /// Never put two replicas of an expert on one GPU, where they share what they were made to relieve, unless GPUs
    /// have more slots than there are experts for them (under the hierarchical policy: experts of their node). Then
    /// the number of such duplicates is the least possible. With `false` the plan is that of DeepSeek's EPLB.
    pub avoid_duplicates: bool,
}

impl RebalanceOptions {
    /// With this policy.
    pub const fn policy(mut self, policy: Policy) -> Self {
        self.policy = policy;
        self
    }

    /// With or without duplicates.
    pub const fn avoid_duplicates(mut self, avoid: bool) -> Self {
        self.avoid_duplicates = avoid;
        self
    }
}

/// A checked [`Cluster`] under a settled policy: global is one node with one group.
#[derive(Debug, Clone, Copy)]
struct Plan {
    num_replicas: usize,
    num_gpus: usize,
    /// Nodes that the plan knows of: 1 under the global policy.
    num_nodes: usize,
    num_groups: usize,
    group_size: usize,
}

impl Plan {
    fn new(num_experts: usize, cluster: &Cluster, policy: Policy) -> Result<Self, EplbError> {
        let &Cluster { num_replicas, num_groups, num_nodes, num_gpus } = cluster;
        nonzero("num_replicas", num_replicas)?;
        nonzero("num_groups", num_groups)?;
        nonzero("num_nodes", num_nodes)?;
        nonzero("num_gpus", num_gpus)?;
        let hierarchical = match policy {
            Policy::Auto => num_groups.is_multiple_of(num_nodes),
            Policy::Hierarchical => true,
            Policy::Global => false,
        };
        let (num_groups, num_nodes) = if hierarchical { (num_groups, num_nodes) } else { (1, 1) };
        divides("the number of experts", num_experts, "num_groups", num_groups)?;
        divides("num_groups", num_groups, "num_nodes", num_nodes)?;
        divides("num_gpus", num_gpus, "num_nodes", num_nodes)?;
        divides("num_replicas", num_replicas, "num_gpus", num_gpus)?;
        if num_replicas < num_experts {
            return Err(EplbError::TooFewReplicas { num_replicas, num_experts });
        }
        Ok(Plan { num_replicas, num_gpus, num_nodes, num_groups, group_size: num_experts / num_groups })
    }

    fn slots_per_gpu(&self) -> usize {
        self.num_replicas / self.num_gpus
    }

    fn gpus_per_node(&self) -> usize {
        self.num_gpus / self.num_nodes
    }
}
