//! Attention.

mod decode;

use warploom_benches::Harness;

pub fn benches(harness: &mut Harness) {
    decode::benches(harness);
}
