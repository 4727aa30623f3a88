//! Programs of others that steps of `cargo xtask check` run: the machine's, or one compiled here.

use crate::repo;
use anyhow::{Context as _, Result, ensure};
use std::path::PathBuf;
use std::process::Command;

/// The program `name`: from PATH, or installed by cargo in this `version`, without what it can do without.
///
/// Such programs run for seconds and take minutes to compile, so everything here is about the compiler's time: no optimisation (of what is in C neither), no
/// checks, no unwinding, and one folder in which the next program finds the dependencies that it shares with those before.
pub(crate) fn obtain(name: &str, version: &str) -> Result<PathBuf> {
    if Command::new(name).arg("--version").output().is_ok() {
        return Ok(name.into());
    }
    let root = repo::device_toolchain().join(name);
    let program = root.join("bin").join(name);
    if program.exists() {
        return Ok(program);
    }
    println!("installing {name} {version}, which takes a minute or two");
    let mut install = repo::cargo();
    install.args(["install", "--quiet", "--debug", "--locked", "--no-default-features", name, "--version", version]);
    install.arg("--root").arg(&root).env("CARGO_TARGET_DIR", repo::target_dir().join("tools"));
    for (setting, value) in [
        ("DEBUG", "none"),
        ("OPT_LEVEL", "0"),
        ("DEBUG_ASSERTIONS", "false"),
        ("OVERFLOW_CHECKS", "false"),
        ("PANIC", "abort"),
        ("CODEGEN_UNITS", "1"),
        ("INCREMENTAL", "false"),
    ] {
        install.env(format!("CARGO_PROFILE_DEV_{setting}"), value);
    }
    install.env("CFLAGS", "-O0");
    ensure!(install.status().context("cannot run cargo")?.success(), "{name} cannot be installed");
    Ok(program)
}
