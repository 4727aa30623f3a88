mod rms_norm;

use warploom_benches::Harness;

pub fn benches(harness: &mut Harness) {
    rms_norm::benches(harness);
}
