mod gated;
mod plain;
mod silu_and_mul_quant;

use warploom_benches::Harness;

pub fn benches(harness: &mut Harness) {
    gated::benches(harness);
    plain::benches(harness);
    silu_and_mul_quant::benches(harness);
}
