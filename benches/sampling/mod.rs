mod top_k_top_p;

use warploom_benches::Harness;

pub fn benches(harness: &mut Harness) {
    top_k_top_p::benches(harness);
}
