//! What can go wrong, one clear sentence each.

use std::path::PathBuf;

/// `Result` with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why no PTX came out.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file could not be read or written.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A program could not be started.
    #[error("cannot run `{program}`: {source}")]
    Start {
        /// Its name.
        program: String,
        /// What the system said.
        source: std::io::Error,
    },
    /// The file with the pinned versions makes no sense.
    #[error("{}: {reason}", path.display())]
    Pin {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// The pin has no PTX ISA version for an architecture.
    #[error("no PTX ISA version is pinned for `{arch}`; known: {known}")]
    Arch {
        /// What was asked for.
        arch: String,
        /// What there is.
        known: String,
    },
    /// No compiler with the pinned commit, and none could be installed.
    #[error(
        "the device compiler {channel} (commit {commit}) is not installed and rustup could not install it: {reason}"
    )]
    Toolchain {
        /// rustup's name for it.
        channel: String,
        /// Its commit, shortened.
        commit: String,
        /// rustup's last words.
        reason: String,
    },
    /// No source of the standard library.
    #[error("no source of the standard library for the device compiler: {}", tried.join("; "))]
    RustSrc {
        /// What was tried, and why each failed.
        tried: Vec<String>,
    },
    /// No toolchain was given to the builder.
    #[error("the builder was given no {0}")]
    Incomplete(&'static str),
    /// The compiler rejected the kernels.
    #[error("compiling {package} for {arch} failed:\n{output}")]
    Compile {
        /// The crate.
        package: String,
        /// The target architecture.
        arch: String,
        /// The compiler's messages.
        output: String,
    },
    /// The PTX is not laid out as LLVM does it.
    #[error("PTX line {line}: {reason}")]
    Parse {
        /// Counted from 1.
        line: usize,
        /// What was expected.
        reason: String,
    },
    /// The assembler rejected the PTX.
    #[error("ptxas rejected {} for {sm}:\n{output}", file.display())]
    Ptxas {
        /// The PTX file.
        file: PathBuf,
        /// The machine architecture.
        sm: String,
        /// The assembler's messages.
        output: String,
    },
    /// A CUDA tool is neither installed nor to be had.
    #[error("{tool} {version} is not on PATH and the wheel {wheel} could not be downloaded: {reason}")]
    Tool {
        /// `ptxas`, `cuobjdump` or `nvdisasm`.
        tool: String,
        /// The pinned version.
        version: String,
        /// The Python package that holds it.
        wheel: String,
        /// pip's last words.
        reason: String,
    },
}

/// Attaches a path to an I/O error.
pub(crate) fn at(path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> Error {
    let path = path.into();
    |source| Error::Io { path, source }
}
