//! `cargo xtask bundle`: the GPU tests and benches as programs, for a GPU machine that has no cargo.

use crate::{repo, stub};
use anyhow::{Context as _, Result, ensure};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Packs the tests, benches and examples with a script that runs them on a GPU machine without cargo
///
/// They are built with the feature `cuda` and linked with a stub of libcuda, and have the model of the example `generate` beside them. The folder
/// holds run.sh, whose help says how to use it.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Args {
    /// The cargo profile
    #[arg(long, default_value = "release", value_name = "NAME")]
    profile: String,
    /// Where to
    #[arg(long, default_value = "bundle", value_name = "FOLDER")]
    out: PathBuf,
    /// Leave the benches out
    #[arg(long)]
    no_benches: bool,
    /// Leave the examples out
    #[arg(long)]
    no_examples: bool,
    /// Keep the debug information
    #[arg(long)]
    keep_debug: bool,
}

/// A program that cargo built: the tests, the benches, or an example.
#[derive(Debug, PartialEq, Eq)]
struct Program {
    name: String,
    kind: String,
    file: PathBuf,
}

impl Program {
    /// Where in the bundle it goes.
    fn place(&self) -> PathBuf {
        match self.kind.as_str() {
            "example" => Path::new("examples").join(&self.name),
            "test" if self.name != "warploom" => Path::new("tests").join(&self.name),
            kind => kind.into(),
        }
    }
}

/// How the script of a bundle begins.
const HEAD: &str = "#!/bin/sh\n# Runs what `cargo xtask bundle` packed";

/// Removes the bundle that was packed into a folder before. A folder with anything else is an error, and left alone.
fn make_room(out: &Path) -> Result<()> {
    if out.join("version.txt").exists() && fs::read(out.join("run.sh")).is_ok_and(|s| s.starts_with(HEAD.as_bytes())) {
        fs::remove_dir_all(out)?;
    }
    let foreign = fs::read_dir(out).is_ok_and(|mut files| files.next().is_some());
    ensure!(!foreign, "{} is not empty, and no bundle: name another folder by --out, or remove it", out.display());
    Ok(())
}

/// Runs `cargo xtask bundle`.
pub(crate) fn run(args: &Args) -> Result<()> {
    let cuda = stub::build()?;
    let out = repo::root().join(&args.out);
    make_room(&out)?;
    fs::create_dir_all(out.join("examples")).with_context(|| format!("{} cannot be a folder", out.display()))?;
    fs::create_dir_all(out.join("tests"))?;
    // First, so that a bundle that was interrupted is known as one.
    fs::write(out.join("version.txt"), version()?)?;
    let script = out.join("run.sh");
    fs::write(&script, include_str!("run.sh"))?;
    make_executable(&script)?;

    // Of the whole workspace as in other steps: the features of dependencies depend on what is built together, and the kernels would be
    // compiled once for each set of them.
    let features = "warploom/cuda,warploom-tests/cuda,warploom-benches/cuda";
    let shared = ["--workspace", "--features", features, "--profile", &args.profile];
    let mut tests = vec!["test", "--no-run", "--test", "warploom", "--test", "cudarc", "--test", "dlpack"];
    if !args.no_benches {
        tests.extend(["--bench", "warploom"]);
    }
    let mut programs = build(&cuda, &[&tests[..], &shared].concat())?;
    if !args.no_examples {
        // `cargo test` would make tests of them.
        programs.extend(build(&cuda, &[&["build", "--examples"], &shared[..]].concat())?);
    }
    for kind in ["test", "bench"].iter().take(if args.no_benches { 1 } else { 2 }) {
        ensure!(programs.iter().any(|p| p.kind == *kind), "cargo built no program of the kind `{kind}`");
    }

    for program in &programs {
        let to = out.join(program.place());
        let stripped = !args.keep_debug
            && Command::new("strip")
                .arg("--strip-all")
                .arg("-o")
                .args([&to, &program.file])
                .status()
                .is_ok_and(|s| s.success());
        if !stripped {
            fs::copy(&program.file, &to)?;
        }
    }
    // The model of the example `generate`, of which there are tests as well.
    let model = out.join("tiny-moe");
    fs::create_dir_all(&model)?;
    for file in ["config.json", "model.safetensors", "tokenizer.json", "reference.json"] {
        let from = repo::root().join("host/examples/generate/tiny-moe").join(file);
        fs::copy(&from, model.join(file)).with_context(|| from.display().to_string())?;
    }
    if !args.no_benches {
        fs::create_dir_all(out.join("peers"))?;
        for file in ["peers.py", "kernels.py"] {
            fs::copy(repo::root().join("benches/peers").join(file), out.join("peers").join(file))?;
        }
    }
    let bytes = size(&out)?;
    let listed: Vec<_> = programs.iter().map(Program::place).collect();
    println!("{}: {listed:?}, {:.1} MiB", out.display(), bytes as f64 / (1 << 20) as f64);
    Ok(())
}

/// What is packed: the release, and the commit where git knows it.
fn version() -> Result<String> {
    let git = Command::new("git").current_dir(repo::root()).args(["describe", "--always", "--dirty"]).output();
    let commit =
        git.ok().filter(|out| out.status.success()).map(|out| String::from_utf8_lossy(&out.stdout).into_owned());
    let commit = commit.map(|c| format!(" ({})", c.trim())).unwrap_or_default();
    Ok(format!("{}{commit}\n", repo::version()?))
}

/// Runs cargo; the programs that it made.
fn build(cuda: &Path, command: &[&str]) -> Result<Vec<Program>> {
    let mut cargo = repo::cargo();
    cargo.args(command).arg("--message-format=json-render-diagnostics");
    cargo.env("CUDA_LIBRARY_PATH", cuda).stderr(Stdio::inherit());
    let out = cargo.output().context("cannot run cargo")?;
    ensure!(out.status.success(), "cargo {} failed", command.join(" "));
    Ok(programs(&String::from_utf8_lossy(&out.stdout)))
}

/// The programs in cargo's messages.
fn programs(messages: &str) -> Vec<Program> {
    let parse = |line: &str| {
        let message: serde_json::Value = serde_json::from_str(line).ok()?;
        let file = message.get("executable")?.as_str()?.into();
        let target = message.get("target")?;
        let kind = target.get("kind")?.get(0)?.as_str()?.into();
        Some(Program { name: target.get("name")?.as_str()?.into(), kind, file })
    };
    messages.lines().filter_map(parse).collect()
}

#[cfg(unix)]
fn make_executable(file: &Path) -> Result<()> {
    use std::os::unix::fs::PermissionsExt as _;
    Ok(fs::set_permissions(file, fs::Permissions::from_mode(0o755))?)
}
#[cfg(not(unix))]
fn make_executable(_: &Path) -> Result<()> {
    Ok(())
}

fn size(folder: &Path) -> Result<u64> {
    let mut bytes = 0;
    for entry in fs::read_dir(folder)?.flatten() {
        let meta = entry.metadata()?;
        bytes += if meta.is_dir() { size(&entry.path())? } else { meta.len() };
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_bundles_are_removed() {
        let folder = std::env::temp_dir().join(format!("warploom-bundle-{}", std::process::id()));
        let write = |name: &str, text: &str| fs::write(folder.join(name), text).unwrap();
        make_room(&folder).unwrap();
        fs::create_dir_all(&folder).unwrap();
        make_room(&folder).unwrap();
        for script in ["#!/bin/sh\n# mine", include_str!("run.sh")] {
            write("run.sh", script);
            write("thesis.txt", "");
            assert!(make_room(&folder).is_err() && folder.join("thesis.txt").exists());
        }
        write("version.txt", "");
        make_room(&folder).unwrap();
        assert!(!folder.exists());
    }

    #[test]
    fn programs_are_found_in_cargos_messages() {
        let messages = r#"{"reason":"compiler-artifact","target":{"name":"lib","kind":["lib"]},"executable":null}
{"reason":"compiler-artifact","target":{"name":"warploom","kind":["test"]},"executable":"/t/warploom-1"}
{"reason":"compiler-artifact","target":{"name":"dlpack","kind":["test"]},"executable":"/t/dlpack-3"}
{"reason":"compiler-artifact","target":{"name":"generate","kind":["example"]},"executable":"/t/generate-2"}
no json
{"reason":"build-finished","success":true}"#;
        let places: Vec<_> = programs(messages).iter().map(|p| (p.place(), p.file.clone())).collect();
        assert_eq!(
            places,
            [
                ("test".into(), "/t/warploom-1".into()),
                ("tests/dlpack".into(), "/t/dlpack-3".into()),
                ("examples/generate".into(), "/t/generate-2".into()),
            ]
        );
    }
}
