//! Tasks of this repository: `cargo xtask help`.

mod allow;
mod bundle;
mod check;
// As the crate does it when it loads a kernel.
#[path = "../../host/src/ptx/e4m3.rs"]
#[allow(unreachable_pub, reason = "it is public there")]
mod e4m3;
// The crate unfolds what this folds.
#[path = "../../host/src/ptx/folded.rs"]
mod folded;
mod guide;
mod mark;
mod package;
mod ptx;
mod repo;
mod report;
mod sources;
mod stub;
mod table;
mod tool;

use clap::{Parser, Subcommand};

/// Builds kernels, runs everything that CI runs, and packs what a GPU machine needs.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    Ptx(ptx::Args),
    Sass(ptx::SassArgs),
    Check(check::Args),
    Bundle(bundle::Args),
    Report(report::Args),
    CudaStub(stub::Args),
}

fn main() {
    let result = match Cli::parse().task {
        Task::Ptx(args) => ptx::run(&args),
        Task::Sass(args) => ptx::sass(&args),
        Task::Check(args) => check::run(&args),
        Task::Bundle(args) => bundle::run(&args),
        Task::Report(args) => report::run(&args),
        Task::CudaStub(args) => stub::run(&args),
    };
    if let Err(error) = result {
        eprintln!("error: {error:#}");
        std::process::exit(1);
    }
}
