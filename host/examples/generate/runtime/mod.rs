//! A small runtime for language models with a mixture of experts: from files to tokens.
//!
//! | module | what |
//! | --- | --- |
//! | [`config`], [`weights`] | `config.json` and `model.safetensors`, checked before anything is computed |
//! | [`model`] | the network as launches of this library's kernels: what `train.py` defines |
//! | [`executor`] | batches of sequences on a device: prefill, and decode steps as captured graphs |
//! | [`engine`] | who runs when: continuous batching, chunked prefill, preemption, cancellation |
//! | [`profile`] | where the time of a decode step goes |
//! | [`text`] | ids from text, and text from ids as they come |
//!
//! Nothing is computed on the host between steps but bookkeeping: tokens that one decode step samples are the input of the
//! next without leaving the device, and lengths, positions and slots grow there. The host launches a step ahead and reads
//! tokens one step behind.

pub mod config;
pub mod engine;
pub mod executor;
pub mod model;
pub mod problem;
pub mod profile;
pub mod text;
pub mod weights;

/// Where the model that comes with the example is: beside it where this was built, beside the program or its folder as `cargo xtask bundle` packs them,
/// elsewhere as from the root of a checkout.
pub fn tiny_moe() -> std::path::PathBuf {
    let built = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    let beside = ["examples/generate/tiny-moe", "../host/examples/generate/tiny-moe"].map(|place| built.join(place));
    let program = std::env::current_exe().unwrap_or_default();
    let packed = program.ancestors().skip(1).take(2).map(|folder| folder.join("tiny-moe"));
    let found = beside.into_iter().chain(packed).find(|place| place.is_dir());
    found.unwrap_or_else(|| "host/examples/generate/tiny-moe".into())
}
