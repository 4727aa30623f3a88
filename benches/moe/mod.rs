mod fused;
mod fused_quant;
mod gate;
mod permute;
mod sort;
mod statistics;

use warploom_benches::Harness;

pub fn benches(harness: &mut Harness) {
    gate::benches(harness);
    sort::benches(harness);
    permute::benches(harness);
    statistics::benches(harness);
    fused::benches(harness);
    fused_quant::benches(harness);
}
