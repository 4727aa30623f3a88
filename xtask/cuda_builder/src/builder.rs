//! Compiles a crate to PTX.

use crate::error::{Error, Result, at};
use crate::pin::Arch;
use crate::ptx::{self, Module};
use crate::toolchain::DeviceToolchain;
use std::fs;
use std::path::{Path, PathBuf};

/// Builds one crate for one architecture. The methods are those of Rust-CUDA's builder where it has them.
#[derive(Clone, Debug)]
pub struct CudaBuilder {
    path: PathBuf,
    arch: Option<Arch>,
    features: Vec<String>,
    toolchain: Option<DeviceToolchain>,
    target_dir: PathBuf,
    copy_to: Option<PathBuf>,
}

/// What came out.
#[derive(Clone, Debug)]
pub struct Built {
    /// The post-processed text, its entries, and what is wrong with them.
    pub module: Module,
    /// The compiler's warnings.
    pub warnings: String,
    /// What the compiler emitted.
    pub raw: PathBuf,
    /// The source files of the crate and of what it depends on in its workspace, as cargo says.
    pub sources: Vec<PathBuf>,
}

impl CudaBuilder {
    /// A builder for the crate in the folder `path`.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self {
            path: path.into(),
            arch: None,
            features: vec![],
            toolchain: None,
            target_dir: "target/ptx".into(),
            copy_to: None,
        }
    }

    /// The compiler to use.
    #[must_use]
    pub fn toolchain(mut self, toolchain: &DeviceToolchain) -> Self {
        self.toolchain = Some(toolchain.clone());
        self
    }

    /// The target architecture and PTX ISA version.
    #[must_use]
    pub fn arch(mut self, arch: Arch) -> Self {
        self.arch = Some(arch);
        self
    }

    /// The crate's features; its default features are off.
    #[must_use]
    pub fn features<S: Into<String>>(mut self, features: impl IntoIterator<Item = S>) -> Self {
        self.features = features.into_iter().map(Into::into).collect();
        self
    }

    /// Where cargo builds; a folder for each architecture is made below it. `target/ptx` unless told.
    #[must_use]
    pub fn target_dir(mut self, folder: impl Into<PathBuf>) -> Self {
        self.target_dir = folder.into();
        self
    }

    /// Writes the text to a file as well, if nothing is wrong with it.
    #[must_use]
    pub fn copy_to(mut self, file: impl Into<PathBuf>) -> Self {
        self.copy_to = Some(file.into());
        self
    }

    /// Compiles, post-processes and checks.
    ///
    /// # Errors
    /// What is not set, what rustc or ptxas refuses, and what a kernel must not have.
    pub fn build(&self) -> Result<Built> {
        let toolchain = self.toolchain.as_ref().ok_or(Error::Incomplete("toolchain"))?;
        let arch = self.arch.as_ref().ok_or(Error::Incomplete("architecture"))?;
        let manifest = self.path.join("Cargo.toml");
        let package = package_name(&manifest)?;
        let target_dir = std::path::absolute(self.target_dir.join(arch.name())).map_err(at(&self.target_dir))?;
        let features = self.features.join(",");
        let raw = target_dir.join("raw").join(format!("{}.ptx", features.replace([',', '/'], "+")));
        fs::create_dir_all(target_dir.join("raw")).map_err(at(&target_dir))?;
        if !raw.exists() {
            // cargo does not know of this file: make it compile the crate again.
            forget(&target_dir, &package);
        }

        let mut cargo = toolchain.cargo();
        cargo.args(["rustc", "--quiet", "--release", "--lib", "--crate-type", "staticlib"]);
        cargo.args(["--target", "nvptx64-nvidia-cuda", "-Zbuild-std=core", "--color", "never"]);
        cargo.args(["--no-default-features", "--features", &features]);
        cargo.arg("--manifest-path").arg(&manifest).arg("--target-dir").arg(&target_dir);
        cargo.arg("--").arg(format!("--emit=asm={}", raw.display()));
        cargo.env("CARGO_ENCODED_RUSTFLAGS", flags(arch).join("\x1f"));
        for (key, value) in [("OPT_LEVEL", "3"), ("LTO", "true"), ("CODEGEN_UNITS", "1"), ("DEBUG", "false")] {
            cargo.env(format!("CARGO_PROFILE_RELEASE_{key}"), value);
        }
        cargo.env("CARGO_PROFILE_RELEASE_PANIC", "abort").env("CARGO_INCREMENTAL", "0");
        let out = cargo.output().map_err(|source| Error::Start { program: "rustup".into(), source })?;
        let messages = interesting(&String::from_utf8_lossy(&out.stderr));
        if !out.status.success() {
            return Err(Error::Compile { package, arch: arch.name().into(), output: messages });
        }

        let text = fs::read_to_string(&raw).map_err(at(&raw))?;
        let module = ptx::process(&text, arch.name())?;
        if let Some(file) = self.copy_to.as_ref().filter(|_| module.problems.is_empty()) {
            fs::create_dir_all(file.parent().unwrap_or(Path::new("."))).map_err(at(file))?;
            fs::write(file, &module.text).map_err(at(file))?;
        }
        let list = target_dir.join(format!("nvptx64-nvidia-cuda/release/lib{}.d", package.replace('-', "_")));
        let sources = prerequisites(&fs::read_to_string(&list).map_err(at(&list))?);
        Ok(Built { module, warnings: messages, raw, sources })
    }
}

/// What rustc needs to know for every crate of the build.
pub(crate) fn flags(arch: &Arch) -> Vec<String> {
    vec![
        format!("-Ctarget-cpu={}", arch.name()),
        format!("-Ctarget-feature=+ptx{}", arch.isa()),
        // Loops of constant length over register arrays must unroll completely.
        "-Cllvm-args=-unroll-threshold=20000 -unroll-runtime=false".into(),
        // A panic is a `trap`: no message, no formatting code.
        "-Zunstable-options".into(),
        "-Cpanic=immediate-abort".into(),
    ]
}

impl DeviceToolchain {
    /// The toolchain's `cargo`, set up for `arch`: for `check` and `clippy` of device code.
    pub fn cargo_for(&self, arch: &Arch) -> std::process::Command {
        let mut cargo = self.cargo();
        cargo.env("CARGO_ENCODED_RUSTFLAGS", flags(arch).join("\x1f"));
        cargo
    }
}

fn package_name(manifest: &Path) -> Result<String> {
    let text = fs::read_to_string(manifest).map_err(at(manifest))?;
    let table: toml::Table =
        text.parse().map_err(|e: toml::de::Error| Error::Pin { path: manifest.into(), reason: e.to_string() })?;
    let name = table.get("package").and_then(|p| p.get("name")).and_then(|n| n.as_str());
    name.map(String::from).ok_or_else(|| Error::Pin { path: manifest.into(), reason: "no package name".into() })
}

/// What the rules of a makefile, of a line each, are for: cargo writes one beside what it builds.
fn prerequisites(makefile: &str) -> Vec<PathBuf> {
    let files = makefile.lines().filter_map(|rule| rule.split_once(": ")).flat_map(|(_, files)| {
        // A space in a name has a backslash before it.
        files.replace("\\ ", "\0").split(' ').map(|name| name.replace('\0', " ")).collect::<Vec<_>>()
    });
    files.filter(|name| !name.is_empty()).map(PathBuf::from).collect()
}

/// Makes cargo forget that it built `package`.
fn forget(target_dir: &Path, package: &str) {
    let folder = target_dir.join("nvptx64-nvidia-cuda/release/.fingerprint");
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        if entry.file_name().to_str().and_then(|n| n.strip_prefix(package)).is_some_and(|r| r.starts_with('-')) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

/// The compiler's messages without what every build says.
fn interesting(messages: &str) -> String {
    let mut out = String::new();
    for paragraph in messages.split_inclusive("\n\n") {
        let line = paragraph.trim_start().lines().next().unwrap_or_default();
        let noise = line.contains("unstable feature specified for `-Ctarget-feature`")
            || (line.starts_with("warning: ") && line.contains("warning") && line.ends_with("emitted"))
            || (line.starts_with("warning: `") && line.contains("generated"));
        if !noise && !line.is_empty() {
            out += paragraph;
        }
    }
    out.trim_end().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_news_is_printed() {
        let text = "warning: unstable feature specified for `-Ctarget-feature`: `ptx86`\n  |\n  = note: x\n\n\
            warning: unused variable: `x`\n --> a.rs:1:1\n\nwarning: `k` (lib) generated 1 warning\n\
            warning: 1 warning emitted\n\n";
        assert_eq!(interesting(text), "warning: unused variable: `x`\n --> a.rs:1:1");
        assert_eq!(interesting(""), "");
    }

    #[test]
    fn sources_are_read() {
        let files = prerequisites("/t/libk.a: /my\\ crate/src/lib.rs /std/src/warp.rs\n");
        assert_eq!(files, [Path::new("/my crate/src/lib.rs"), Path::new("/std/src/warp.rs")]);
        assert!(prerequisites("/t/libk.a:\n").is_empty());
    }

    #[test]
    fn flags_name_architecture_and_version() {
        let flags = flags(&Arch::new("sm_90a", 86));
        assert_eq!(flags[..2], ["-Ctarget-cpu=sm_90a", "-Ctarget-feature=+ptx86"]);
        assert!(flags.iter().any(|f| f == "-Cpanic=immediate-abort"));
    }

    #[test]
    fn a_builder_without_its_parts_says_so() {
        let error = CudaBuilder::new("nowhere").build().unwrap_err();
        assert_eq!(error.to_string(), "the builder was given no toolchain");
    }
}
