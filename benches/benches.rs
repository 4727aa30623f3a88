//! The benches: one binary, a file for each operation. See `harness.rs` for how they measure and what options there are.

mod activation;
mod attention;
mod ep;
mod gemm;
mod generate;
mod kv_cache;
mod moe;
mod norm;
mod rope;
mod sampling;

fn main() {
    warploom_benches::main(|harness| {
        activation::benches(harness);
        attention::benches(harness);
        gemm::benches(harness);
        norm::benches(harness);
        rope::benches(harness);
        kv_cache::benches(harness);
        moe::benches(harness);
        sampling::benches(harness);
        ep::benches(harness);
        generate::benches(harness);
    });
}
