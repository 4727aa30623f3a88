//! Attention.

mod decode;
mod merge;
mod prefill;

use warploom_benches::Harness;

pub fn benches(harness: &mut Harness) {
    decode::benches(harness);
    prefill::benches(harness);
    merge::benches(harness);
}
