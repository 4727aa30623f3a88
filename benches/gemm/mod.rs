//! Matrix products.

mod embedding;
mod linear;
mod linear_quant;

use warploom_benches::Harness;

pub fn benches(harness: &mut Harness) {
    linear::benches(harness);
    linear_quant::benches(harness);
    embedding::benches(harness);
}
