mod layer_norm;
mod qk_norm;
mod rms_norm;
mod rms_norm_quant;

use warploom_benches::Harness;

pub fn benches(harness: &mut Harness) {
    rms_norm::benches(harness);
    rms_norm_quant::benches(harness);
    layer_norm::benches(harness);
    qk_norm::benches(harness);
}
