//! `cargo xtask check`: everything that CI runs, step by step.

use crate::{ptx, repo, stub, tool};
use anyhow::{Context as _, Result, bail, ensure};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// Runs everything that CI runs: formatting, lints, tests, PTX, documentation, CUDA build, packages, licences, MSRV
///
/// Stops at the first step that fails. Needs nothing but rustup, a C compiler, and a network for what is missing. Steps that wait for no other's
/// lock run beside the others; what they print comes when they are done, and is in target/check/STEP.log before.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Args {
    /// Go on after a step that failed
    #[arg(long)]
    keep_going: bool,
    /// Only this step (repeatable)
    #[arg(long, value_name = "STEP")]
    only: Vec<String>,
    /// Not this step (repeatable)
    #[arg(long, value_name = "STEP")]
    skip: Vec<String>,
    /// Print the steps and stop
    #[arg(long)]
    list: bool,
    /// Fail where no ptxas is to be had
    #[arg(long)]
    require_ptxas: bool,
    /// A tar archive of the standard library's source, for machines that can fetch it from nowhere
    #[arg(long, value_name = "FILE", env = "WARPLOOM_RUST_SRC")]
    rust_src: Option<PathBuf>,
}

struct Step {
    name: &'static str,
    what: &'static str,
    run: fn(&Args) -> Result<()>,
}

/// The steps that build in folders of their own: beside the others, whose compilers often leave a core idle.
const BESIDE: [&str; 4] = ["clippy-device", "ptx", "guide", "deny"];

/// The steps, the quick ones first.
const STEPS: &[Step] = &[
    Step { name: "fmt", what: "rustfmt changes nothing", run: fmt },
    Step {
        name: "clippy",
        what: "clippy on everything but device code, libraries without features as well",
        run: clippy,
    },
    Step { name: "clippy-device", what: "clippy on the kernels as the GPU's compiler sees them", run: clippy_device },
    Step {
        name: "test",
        what: "all tests, on the SIMT device as most GPUs are, with the race detector, at random",
        run: test,
    },
    Step {
        name: "ptx",
        what: "the committed PTX is what the source gives, of what changed since it was compiled, and ptxas takes it",
        run: check_ptx,
    },
    Step { name: "doc", what: "documentation without warnings", run: doc },
    Step { name: "guide", what: "mdBook builds the guide, whose links lead somewhere", run: |_| crate::guide::check() },
    Step { name: "cuda", what: "documentation and tests with the feature `cuda`, without a driver", run: cuda },
    Step { name: "readme", what: "the commands that the README says to run", run: readme },
    Step { name: "package", what: "what is published builds from its packages", run: |_| crate::package::check() },
    Step { name: "deny", what: "licences and sources of all dependencies are on the list", run: deny },
    Step { name: "msrv", what: "the published crates promise a Rust version, and build with it", run: msrv },
];

/// Runs `cargo xtask check`.
pub(crate) fn run(args: &Args) -> Result<()> {
    for name in args.only.iter().chain(&args.skip) {
        ensure!(STEPS.iter().any(|s| s.name == name), "no step `{name}`; there are {}", names());
    }
    if args.list {
        for step in STEPS {
            println!("{:14} {}", step.name, step.what);
        }
        return Ok(());
    }
    let chosen = |s: &&Step| {
        let name = s.name.to_string();
        (args.only.is_empty() || args.only.contains(&name)) && !args.skip.contains(&name)
    };
    let chosen: Vec<&Step> = STEPS.iter().filter(chosen).collect();
    ensure!(!chosen.is_empty(), "--skip leaves no step of --only");
    let (beside, here): (Vec<&Step>, Vec<&Step>) =
        chosen.iter().partition(|s| chosen.len() > 1 && BESIDE.contains(&s.name));
    let program = if beside.is_empty() { PathBuf::new() } else { copy_of_this_program()? };
    let stop = AtomicBool::new(false);
    let all = |steps: Vec<&Step>, run: &dyn Fn(&Step) -> Result<()>| -> Vec<Outcome> {
        let mut outcomes = vec![];
        for step in steps {
            if stop.load(Relaxed) {
                break;
            }
            let start = Instant::now();
            let result = run(step);
            if let Err(error) = &result {
                println!("error: {}: {error:#}", step.name);
                stop.fetch_or(!args.keep_going, Relaxed);
            }
            outcomes.push((step.name, start.elapsed(), result));
        }
        outcomes
    };
    let results = std::thread::scope(|scope| {
        let beside = scope.spawn(|| all(beside, &|step| run_beside(step, args, &program, &stop)));
        let mut results = all(here, &|step| {
            println!("\n== {}: {}", step.name, step.what);
            (step.run)(args)
        });
        results.extend(beside.join().expect("no panics"));
        results
    });
    println!();
    for (name, time, result) in &results {
        println!("{} {name:14} {:6.1} s", if result.is_ok() { "passed" } else { "FAILED" }, time.as_secs_f64());
    }
    let failed = results.iter().filter(|r| r.2.is_err()).count();
    println!("{} passed, {failed} failed", results.len() - failed);
    ensure!(failed == 0, "not everything passed");
    Ok(())
}

/// A step, how long it took, and what came of it.
type Outcome = (&'static str, Duration, Result<()>);

/// Where logs go, and this program is copied to.
fn folder() -> Result<PathBuf> {
    let folder = repo::target_dir().join("check");
    fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
    Ok(folder)
}

/// A copy of this program, in whose place the tests' build may put another one.
fn copy_of_this_program() -> Result<PathBuf> {
    let (this, copy) = (std::env::current_exe()?, folder()?.join("xtask"));
    fs::copy(&this, &copy).with_context(|| format!("{} to {}", this.display(), copy.display()))?;
    Ok(copy)
}

/// Runs a step as a process of its own, of this `program`, and prints what it says when it has ended. `stop` ends it before.
fn run_beside(step: &Step, args: &Args, program: &Path, stop: &AtomicBool) -> Result<()> {
    let file = folder()?.join(format!("{}.log", step.name));
    let log = File::create(&file).with_context(|| file.display().to_string())?;
    let mut command = Command::new(program);
    command.args(["check", "--only", step.name]).stdout(log.try_clone()?).stderr(log);
    if args.require_ptxas {
        command.arg("--require-ptxas");
    }
    if let Some(source) = &args.rust_src {
        command.arg("--rust-src").arg(source);
    }
    let mut child = command.spawn().context("cannot start a second process of this program")?;
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if stop.load(Relaxed) {
            // What it has started ends by itself, and soon: compilers of one family.
            child.kill()?;
            child.wait()?;
            bail!("ended, since another step failed; {} has what it said", file.display());
        }
        std::thread::sleep(Duration::from_millis(200));
    };
    print!("{}", fs::read_to_string(&file)?);
    ensure!(status.success(), "failed");
    Ok(())
}

fn names() -> String {
    STEPS.iter().map(|s| s.name).collect::<Vec<_>>().join(", ")
}

/// Runs a command that prints for itself.
fn must(mut command: Command) -> Result<()> {
    let words: Vec<_> = command.get_args().map(|a| a.to_string_lossy().into_owned()).collect();
    let program = PathBuf::from(command.get_program());
    let name = program.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let status = command.status().with_context(|| format!("cannot run {name}"))?;
    ensure!(status.success(), "`{name} {}` failed", words.join(" "));
    Ok(())
}

fn cargo(args: &[&str]) -> Command {
    let mut cargo = repo::cargo();
    cargo.args(args);
    cargo
}

fn fmt(_: &Args) -> Result<()> {
    must(cargo(&["fmt", "--all", "--check"]))
}

/// Programs and tests only with all features, where they have nearly all of their code; libraries also as they are without, with the examples, so that dependencies
/// have the features that they had and are not checked again. The bench by its name, since `--benches` would have all kernels checked once more, as a bench of their own.
fn clippy(_: &Args) -> Result<()> {
    let lint = |what: &[&str]| {
        let mut clippy = cargo(&["clippy", "--quiet", "--workspace"]);
        clippy.args(what).args(["--", "-D", "warnings"]);
        clippy
    };
    let targets = ["--lib", "--bins", "--examples", "--tests", "--bench", "warploom"];
    must(beside_stub(lint(&[&targets[..], &["--features", &CUDA.join(",")]].concat()), &stub::build()?))?;
    must(lint(&["--lib", "--examples"]))
}

fn clippy_device(args: &Args) -> Result<()> {
    let (pin, toolchain) = ptx::toolchain(args.rust_src.clone())?;
    // Machines that have only what rustup calls minimal make do with the compiler's own lints.
    let lint = if toolchain.has("clippy") { "clippy" } else { "rustc" };
    // The newest architecture has everything that the older ones have and more; the step `ptx` compiles all of them.
    let arch = pin.archs().into_iter().next_back().context("no architecture")?;
    for package in ["warploom-cuda-std", "warploom-kernels-gpu"] {
        let mut cargo = toolchain.cargo_for(&arch);
        cargo.current_dir(repo::root()).args([lint, "--quiet", "--release", "--lib", "-p", package]);
        cargo.args(["--target", "nvptx64-nvidia-cuda", "-Zbuild-std=core", "--target-dir"]);
        cargo.arg(repo::target_dir().join("ptx/lint")).args(["--", "-D", "warnings"]);
        if lint == "rustc" {
            cargo.arg("--emit=metadata");
        }
        must(cargo)?;
    }
    Ok(())
}

fn test(_: &Args) -> Result<()> {
    must(cargo(&["test", "--quiet", "--workspace"]))
}

fn check_ptx(args: &Args) -> Result<()> {
    ptx::run(&ptx::Args {
        check: true,
        changed: true,
        require_ptxas: args.require_ptxas,
        rust_src: args.rust_src.clone(),
        ..ptx::Args::default()
    })
}

/// What is documented. With the examples, dependencies have the features that they have for clippy, and are not checked again.
const DOC: [&str; 7] = ["doc", "--quiet", "--workspace", "--no-deps", "--lib", "--bins", "--examples"];

fn doc(_: &Args) -> Result<()> {
    let mut doc = cargo(&DOC);
    doc.env("RUSTDOCFLAGS", "-Dwarnings");
    must(doc)
}

/// The features that need CUDA's driver. With them all of the workspace each time, so that features of dependencies are those of other steps: otherwise the
/// kernels and half of the dependencies would be compiled again.
const CUDA: [&str; 5] =
    ["warploom/cuda", "warploom/cudarc", "warploom/nccl", "warploom-tests/nccl", "warploom-benches/nccl"];

/// The command, with the stub in the driver's place.
fn beside_stub(mut command: Command, stub: &Path) -> Command {
    command.env("CUDA_LIBRARY_PATH", stub).env("LD_LIBRARY_PATH", stub.join("lib64"));
    command
}

/// With the stub in the driver's place, whose every function fails: programs must start and say what is missing.
fn cuda(_: &Args) -> Result<()> {
    let folder = stub::build()?;
    let cargo = |args: &[&str]| beside_stub(cargo(args), &folder);
    let mut docs = cargo(&DOC);
    docs.args(["--features", &CUDA.join(",")]).env("RUSTDOCFLAGS", "-Dwarnings");
    must(docs)?;
    let tests = ["test", "--quiet", "--workspace", "--features", "warploom-tests/cuda,warploom/cudarc"];
    // Whoever asks for tests of libraries gets those of libraries that say they have none, too.
    let own = ["--exclude", "warploom-kernels-gpu", "--lib", "--test", "cudarc", "--example", "cudarc"];
    must(cargo(&[&tests[..], &own].concat()))?;
    // With candle, which asks for the features of dependencies that they have in other steps; in tests it would want a library more.
    let lint = ["clippy", "--lib", "--examples", "-p", "warploom-candle"];
    must(without_cust(&lint, &["--", "-D", "warnings"]))?;
    must(without_cust(&["test", "--lib"], &[]))?;

    // One small test stands for all: they share the code that looks for devices.
    let tests = [&tests[..], &["--test", "devices", "--", "--nocapture"]].concat();
    let mut with_simt = cargo(&tests);
    with_simt.env("WARPLOOM_TEST_DEVICES", "");
    let (passed, said) = listen(with_simt)?;
    ensure!(passed && said.contains("GPU tests are skipped: "), "without a driver the tests do not say so:\n{said}");
    let mut gpu_only = cargo(&tests);
    gpu_only.env("WARPLOOM_TEST_DEVICES", "cuda");
    let (passed, said) = listen(gpu_only)?;
    ensure!(!passed && said.contains("but "), "GPU tests pass without a GPU:\n{said}");
    Ok(())
}

/// A command of cargo's for the feature `cudarc` alone, which needs no libcuda and no SIMT device: without the stub.
fn without_cust(command: &[&str], rest: &[&str]) -> Command {
    let mut cargo = cargo(command);
    cargo.args(["--quiet", "-p", "warploom", "--features", "warploom/cudarc", "--no-default-features"]).args(rest);
    cargo.env_remove("CUDA_LIBRARY_PATH");
    cargo
}

/// Runs a command quietly: whether it succeeded, and what it printed.
fn listen(mut command: Command) -> Result<(bool, String)> {
    let out = command.output().context("cannot run cargo")?;
    Ok((
        out.status.success(),
        String::from_utf8_lossy(&out.stdout).into_owned() + &String::from_utf8_lossy(&out.stderr),
    ))
}

/// The README's `cargo run` commands. Its `cargo test` is the step `test`.
fn readme(_: &Args) -> Result<()> {
    let text = std::fs::read_to_string(repo::root().join("README.md")).context("README.md")?;
    let commands = commands(&text);
    ensure!(!commands.is_empty(), "the README has no command that begins with `cargo run`");
    for command in commands {
        println!("$ cargo {}", command.join(" "));
        let mut run = repo::cargo();
        run.args(&command).stdout(std::process::Stdio::null());
        must(run)?;
    }
    Ok(())
}

/// The arguments of every `cargo run` in fenced code that needs no GPU and no checkout elsewhere.
fn commands(readme: &str) -> Vec<Vec<String>> {
    let mut fenced = false;
    let mut commands = vec![];
    for line in readme.lines().map(str::trim) {
        if line.starts_with("```") {
            fenced = !fenced;
        } else if fenced && line.trim_start_matches("$ ").starts_with("cargo run") && !line.contains("cuda") {
            let line = line.trim_start_matches("$ ").split(" #").next().unwrap_or_default();
            commands.push(words(line).into_iter().skip(1).collect());
        }
    }
    commands
}

/// A command line's words; double quotes hold words together, as in a shell.
fn words(line: &str) -> Vec<String> {
    // Every other part of the line, split at quotes, was quoted: its spaces do not separate.
    let joined: String = line
        .split('"')
        .enumerate()
        .map(|(i, part)| if i % 2 == 1 { part.replace(' ', "\0") } else { part.into() })
        .collect();
    joined.split_whitespace().map(|word| word.replace('\0', " ")).collect()
}

/// The release of cargo-deny that is installed where there is none.
const CARGO_DENY: &str = "0.20.2";

/// Advisories are left out: their database changes from day to day, and a network that has only a registry lacks it.
fn deny(_: &Args) -> Result<()> {
    let mut deny = Command::new(tool::obtain("cargo-deny", CARGO_DENY)?);
    deny.current_dir(repo::root()).args(["--log-level", "error", "check", "licenses", "bans", "sources"]);
    must(deny)
}

/// As long as the promised version is that of `rust-toolchain.toml`, nothing is built here: every other step builds with it, and no older one
/// is promised or tried. What is left is that every published crate makes the promise.
fn msrv(_: &Args) -> Result<()> {
    let manifest = std::fs::read_to_string(repo::root().join("Cargo.toml"))?;
    let manifest: toml::Table = manifest.parse()?;
    let promised = manifest["workspace"]["package"]["rust-version"].as_str().context("no rust-version")?.to_string();
    let published = crate::package::published()?;
    for package in repo::metadata()?["packages"].as_array().into_iter().flatten() {
        let (name, version) = (package["name"].as_str().unwrap_or_default(), package["rust_version"].as_str());
        let ours = published.iter().any(|p| p == name) && package["source"].is_null();
        ensure!(!ours || version == Some(&promised), "{name} promises Rust {version:?} and not {promised}");
    }
    let version = cargo(&["--version"]).output().context("cannot run cargo")?;
    let version = String::from_utf8_lossy(&version.stdout).into_owned();
    if is_version(&version, &promised) {
        println!(
            "nothing to build: all {} published crates promise Rust {promised}, which is the pinned release that the other steps \
             build with; older ones are neither promised nor tried",
            published.len()
        );
        return Ok(());
    }
    let mut check = Command::new("rustup");
    check.current_dir(repo::root()).args(["run", &promised, "cargo", "check", "--quiet"]);
    for name in &published {
        check.args(["-p", name]);
    }
    check.env_remove("RUSTC").env_remove("CARGO").env_remove("RUSTUP_TOOLCHAIN");
    check.arg("--target-dir").arg(repo::target_dir().join("msrv"));
    if let Err(error) = must(check) {
        bail!("{error:#} (is it missing? `rustup toolchain install {promised} --profile minimal`)");
    }
    Ok(())
}

/// Whether `cargo --version` says that it is a release of `promised`.
fn is_version(said: &str, promised: &str) -> bool {
    let minor = |v: &str| v.split('.').take(2).collect::<Vec<_>>().join(".");
    said.split_whitespace().nth(1).is_some_and(|v| minor(v) == minor(promised))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_of_the_readme() {
        let readme = "Run `cargo run`.\n```sh\n$ cargo run --example moe   # routes\ncargo test\n\
            cargo run --features cuda --example moe\n```\ncargo run outside\n```rust\nlet x = 1;\n```\n";
        assert_eq!(commands(readme), [["run", "--example", "moe"]]);
    }

    #[test]
    fn versions_are_compared_by_release() {
        assert!(is_version("cargo 1.95.0 (abc 2026-04-14)", "1.95"));
        assert!(!is_version("cargo 1.97.0-nightly (abc)", "1.95") && !is_version("", "1.95"));
    }

    #[test]
    fn steps_beside_others_are_steps() {
        assert!(BESIDE.iter().all(|name| STEPS.iter().any(|s| s.name == *name)));
    }

    #[test]
    fn steps_have_different_names() {
        let mut names: Vec<_> = STEPS.iter().map(|s| s.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), STEPS.len());
    }
}
