//! Expert-parallel load balancing on the host: DeepSeek-V3's prefill and decode units, incremental plans, and a cluster
//! of 2,048 GPUs. 58 layers, 256 experts in 8 groups, loads skewed like r^-0.8 over the ranks r.

use criterion::{BenchmarkId, Criterion};
use warploom::ep::eplb::{
    Cluster, IncrementalOptions, Loads, RebalanceOptions, rebalance_experts, rebalance_experts_with,
    rebalance_incremental,
};

const LAYERS: usize = 58;
const EXPERTS: usize = 256;

/// A permuted power law in each layer, and the same with every load changed by up to 20 %.
fn loads() -> [Loads; 2] {
    let mut state = 1u64;
    let mut random = move |bound: usize| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) as usize % bound
    };
    let (mut now, mut later) = (Vec::new(), Vec::new());
    for _ in 0..LAYERS {
        let mut layer: Vec<f64> = (1..=EXPERTS).map(|rank| (1e6 * (rank as f64).powf(-0.8)).round()).collect();
        for i in (1..EXPERTS).rev() {
            layer.swap(i, random(i + 1));
        }
        later.extend(layer.iter().map(|load| (load * (0.8 + 0.0004 * random(1000) as f64)).round()));
        now.extend(layer);
    }
    [now, later].map(|values| Loads::new(LAYERS, EXPERTS, &values).expect("loads are finite"))
}

/// Times the planning of all layers.
pub fn benches(c: &mut Criterion) {
    let [now, later] = loads();
    let mut group = c.benchmark_group("eplb");
    group.sample_size(20);
    for (name, num_replicas, num_nodes, num_gpus) in
        [("prefill-32", 288, 4, 32), ("decode-144", 288, 18, 144), ("decode-2048", 4096, 256, 2048)]
    {
        let cluster = Cluster::new(num_replicas, num_gpus).num_groups(8).num_nodes(num_nodes);
        group.bench_function(BenchmarkId::new("full", name), |b| {
            b.iter(|| rebalance_experts(&now, &cluster).expect("a valid cluster"));
        });
        let distinct = RebalanceOptions::default().avoid_duplicates(true);
        group.bench_function(BenchmarkId::new("no-duplicates", name), |b| {
            b.iter(|| rebalance_experts_with(&now, &cluster, &distinct).expect("a valid cluster"));
        });
        if num_gpus <= 144 {
            let old = rebalance_experts(&now, &cluster).expect("a valid cluster");
            let options = IncrementalOptions::default();
            group.bench_function(BenchmarkId::new("incremental", name), |b| {
                b.iter(|| rebalance_incremental(&old, &later, &cluster, &options).expect("a valid cluster"));
            });
        }
    }
    group.finish();
}
