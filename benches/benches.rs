//! The benches: one binary, a file for each operation. See `harness.rs` for how they measure and what options there are.

mod ep;
mod norm;

fn main() {
    warploom_benches::main(|harness| {
        norm::benches(harness);
        ep::benches(harness);
    });
}
