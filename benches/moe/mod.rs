mod gate;

use warploom_benches::Harness;

pub fn benches(harness: &mut Harness) {
    gate::benches(harness);
}
