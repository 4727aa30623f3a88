//! Matrix products.

mod linear;

use warploom_benches::Harness;

pub fn benches(harness: &mut Harness) {
    linear::benches(harness);
}
