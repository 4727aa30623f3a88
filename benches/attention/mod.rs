//! Attention.

mod decode;
mod merge;

use warploom_benches::Harness;

pub fn benches(harness: &mut Harness) {
    decode::benches(harness);
    merge::benches(harness);
}
