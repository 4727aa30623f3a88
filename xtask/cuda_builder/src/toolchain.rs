//! The device toolchain: a pinned nightly rustc and the source of the standard library.

use crate::error::{Error, Result};
use crate::pin::Pin;
use crate::rust_src;
use std::path::{Path, PathBuf};
use std::process::Command;

/// How to obtain a toolchain.
#[derive(Clone, Debug)]
pub struct Options {
    pub(crate) folder: PathBuf,
    pub(crate) rust_src: Option<PathBuf>,
}

impl Options {
    /// Whatever rustup cannot hold goes into `folder`.
    pub fn new(folder: impl Into<PathBuf>) -> Self {
        Self { folder: folder.into(), rust_src: None }
    }

    /// A tar archive of the standard library's source (`library/`), for machines without any network.
    pub fn rust_src(mut self, archive: Option<PathBuf>) -> Self {
        self.rust_src = archive;
        self
    }
}

/// A compiler with the pinned commit, and the source to build `core` from.
#[derive(Clone, Debug)]
pub struct DeviceToolchain {
    /// rustup's name.
    name: String,
    /// The folder `library`, if it is not the toolchain's own.
    library: Option<PathBuf>,
    /// Where the library's source comes from, in words.
    origin: String,
}

impl DeviceToolchain {
    /// Finds the pinned toolchain or installs it.
    ///
    /// # Errors
    /// A toolchain that is neither there nor can be had.
    pub fn obtain(pin: &Pin, options: &Options) -> Result<Self> {
        let name = match find(pin)? {
            Some(name) => name,
            None => install(pin)?,
        };
        let source = rust_src::obtain(&name, pin, options)?;
        Ok(Self { name, library: source.library, origin: source.origin })
    }

    /// rustup's name of the compiler.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Where the standard library's source comes from.
    pub fn library_origin(&self) -> &str {
        &self.origin
    }

    /// The toolchain's `cargo`, in an environment without what the calling cargo set.
    pub fn cargo(&self) -> Command {
        let mut cargo = rustup(&["run", &self.name, "cargo"]);
        if let Some(library) = &self.library {
            // Where `-Zbuild-std` looks first. It is cargo's own and undocumented, and the pin keeps it from changing.
            cargo.env("__CARGO_TESTS_ONLY_SRC_ROOT", library);
        }
        cargo
    }

    /// Whether the toolchain has `component`, such as `clippy`.
    pub fn has(&self, component: &str) -> bool {
        let list = output(rustup(&["component", "list", "--installed", "--toolchain", &self.name]));
        list.is_ok_and(|l| l.lines().any(|l| l.starts_with(component)))
    }
}

/// Whether a variable of the environment would change how kernels are compiled.
fn is_foreign(name: &str) -> bool {
    let kept = ["CARGO_HOME", "CARGO_HTTP_", "CARGO_NET_", "CARGO_REGISTR", "CARGO_SOURCE_", "CARGO_TERM_"];
    let foreign = ["CARGO", "RUSTC", "RUSTFLAGS", "RUSTDOC", "RUSTUP_TOOLCHAIN", "__CARGO"];
    foreign.iter().any(|p| name.starts_with(p)) && !kept.iter().any(|p| name.starts_with(p))
}

/// `rustup`, without what the calling cargo set.
pub(crate) fn rustup(args: &[&str]) -> Command {
    let mut command = Command::new("rustup");
    for (name, _) in std::env::vars_os() {
        if name.to_str().is_some_and(is_foreign) {
            command.env_remove(name);
        }
    }
    command.args(args);
    command
}

/// Runs a command: its standard output, or the last line of what it complained about.
pub(crate) fn output(mut command: Command) -> Result<String, String> {
    let program = command.get_program().to_string_lossy().into_owned();
    let out = command.output().map_err(|e| format!("cannot run `{program}`: {e}"))?;
    if out.status.success() {
        return Ok(String::from_utf8_lossy(&out.stdout).into_owned());
    }
    let text = String::from_utf8_lossy(&out.stderr).into_owned() + &String::from_utf8_lossy(&out.stdout);
    Err(format!("`{program}`: {}", last_words(&text)))
}

/// The line that says best why something failed.
fn last_words(text: &str) -> &str {
    let lines = || text.lines().map(str::trim).filter(|l| !l.is_empty());
    let error = lines().find(|l| l.to_ascii_lowercase().starts_with("error") || l.starts_with("E:"));
    error.or_else(|| lines().next_back()).unwrap_or("failed without a message")
}

/// The installed toolchain with the pinned commit.
fn find(pin: &Pin) -> Result<Option<String>> {
    let list =
        rustup(&["toolchain", "list"]).output().map_err(|source| Error::Start { program: "rustup".into(), source })?;
    let list = String::from_utf8_lossy(&list.stdout).into_owned();
    let found = candidates(&list, &pin.rust.channel).into_iter().find(|name| {
        output(rustup(&["run", name, "rustc", "-vV"])).is_ok_and(|v| commit_of(&v) == Some(&pin.rust.commit))
    });
    Ok(found)
}

/// The installed toolchains that may be the pinned one, the best first.
fn candidates(list: &str, channel: &str) -> Vec<String> {
    let names: Vec<&str> = list.lines().filter_map(|l| l.split_whitespace().next()).collect();
    let of = |channel: &str| {
        let dated = |rest: &str| rest.strip_prefix('-').is_some_and(|r| r.starts_with(|c: char| c.is_ascii_digit()));
        let matching = names.iter().filter(|n| n.strip_prefix(channel).is_some_and(|rest| !dated(rest)));
        matching.map(|n| (*n).to_string()).collect::<Vec<_>>()
    };
    [of(channel), of("nightly")].concat()
}

fn commit_of(version: &str) -> Option<&str> {
    version.lines().find_map(|l| l.strip_prefix("commit-hash: "))
}

fn install(pin: &Pin) -> Result<String> {
    let channel = &pin.rust.channel;
    eprintln!("installing the device compiler {channel} with rustup");
    let args = ["toolchain", "install", channel, "--profile", "minimal", "--component", "rust-src", "--no-self-update"];
    let commit = pin.rust.commit[..9].to_string();
    output(rustup(&args)).map_err(|reason| Error::Toolchain {
        channel: channel.clone(),
        commit: commit.clone(),
        reason,
    })?;
    find(pin)?.ok_or_else(|| Error::Toolchain {
        channel: channel.clone(),
        commit,
        reason: "what it installed has another commit".into(),
    })
}

/// The `lib/rustlib/src/rust/library` of a toolchain, if it is installed.
pub(crate) fn own_library(name: &str) -> Option<PathBuf> {
    let sysroot = output(rustup(&["run", name, "rustc", "--print", "sysroot"])).ok()?;
    let library = Path::new(sysroot.trim()).join("lib/rustlib/src/rust/library");
    library.join("core/src/lib.rs").exists().then_some(library)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pinned_toolchain_goes_before_another_nightly() {
        let list = "stable-x86_64-unknown-linux-gnu (default)\nnightly-x86_64-unknown-linux-gnu\n\
            nightly-2026-05-20-x86_64-unknown-linux-gnu (active)\nnightly-2025-01-01-x86_64-unknown-linux-gnu\n";
        assert_eq!(
            candidates(list, "nightly-2026-05-20"),
            ["nightly-2026-05-20-x86_64-unknown-linux-gnu", "nightly-x86_64-unknown-linux-gnu"]
        );
        assert!(candidates("no installed toolchains\n", "nightly-2026-05-20").is_empty());
    }

    #[test]
    fn commits_are_read() {
        assert_eq!(commit_of("rustc 1.97.0\nbinary: rustc\ncommit-hash: abc\n"), Some("abc"));
        assert_eq!(commit_of("rustc 1.97.0\n"), None);
    }

    #[test]
    fn the_calling_cargo_is_forgotten() {
        for name in [
            "RUSTFLAGS",
            "CARGO_ENCODED_RUSTFLAGS",
            "RUSTC_WRAPPER",
            "RUSTUP_TOOLCHAIN",
            "CARGO",
            "CARGO_TARGET_DIR",
            "CARGO_PROFILE_RELEASE_DEBUG",
            "CARGO_PKG_NAME",
            "RUSTC_BOOTSTRAP",
        ] {
            assert!(is_foreign(name), "{name}");
        }
        for name in ["PATH", "CARGO_HOME", "RUSTUP_HOME", "CARGO_HTTP_PROXY", "CARGO_NET_OFFLINE", "RUST_BACKTRACE"] {
            assert!(!is_foreign(name), "{name}");
        }
    }

    #[test]
    fn failures_have_one_line() {
        assert_eq!(last_words("info: trying\nerror: no network\nhelp: x\n"), "error: no network");
        assert_eq!(last_words("one\ntwo\n\n"), "two");
        assert_eq!(last_words(""), "failed without a message");
    }
}
