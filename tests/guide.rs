//! The guide's examples, each compiled and run: `cargo test -p warploom-tests --doc`. `cargo xtask check` sees to it that no
//! chapter is missing here.

macro_rules! chapters {
    ($($chapter:ident: $file:literal,)*) => {
        $(#[doc = include_str!(concat!("../docs/guide/src/", $file))] pub mod $chapter {})*
    };
}

chapters! {
    quick_start: "quick-start.md",
    devices: "devices.md",
    layers: "layers.md",
    activation: "operations/activation.md",
    norm: "operations/norm.md",
    rope: "operations/rope.md",
    kv_cache: "operations/kv-cache.md",
    attention: "operations/attention.md",
    linear: "operations/linear.md",
    quantised: "operations/quantised.md",
    gate: "operations/gate.md",
    experts: "operations/experts.md",
    routing: "operations/routing.md",
    sampling: "operations/sampling.md",
    expert_parallelism: "operations/expert-parallelism.md",
    eplb: "operations/eplb.md",
    interop: "interop.md",
    new_kernel: "new-kernel.md",
    porting: "porting.md",
    simt: "simt.md",
    troubleshooting: "troubleshooting.md",
}
