//! The runtime of the example `generate`, against the reference that came with its model.

#[path = "../../host/examples/generate/runtime/mod.rs"]
#[allow(dead_code, reason = "the example uses the rest")]
mod runtime;

mod engine;
mod files;
mod model;
