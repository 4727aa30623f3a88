//! The benches: one binary, a file for each operation. See `harness.rs` for how they measure and what options there are.


mod attention;









fn main() {
    warploom_benches::main(|harness| {

        attention::benches(harness);








    });
}
