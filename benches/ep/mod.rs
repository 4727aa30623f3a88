mod eplb;
mod exchange;

use warploom_benches::Harness;

pub fn benches(harness: &mut Harness) {
    harness.host("ep/eplb", eplb::benches);
    exchange::benches(harness);
}
