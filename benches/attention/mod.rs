//! Attention.

mod decode;
mod prefill;
mod merge;

use warploom_benches::Harness;

pub fn benches(harness: &mut Harness) {
    decode::benches(harness);
    prefill::benches(harness);
    merge::benches(harness);
}
