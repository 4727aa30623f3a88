//! What can go wrong, with what was expected and what came.

use cuda_std::DType;

/// A result with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why an operation was refused or failed. Everything before [`Error::Launch`] is found before anything is launched.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A tensor has the wrong shape.
    #[error("{op}: `{arg}` must have shape {expected}, but has {got:?}")]
    Shape {
        /// The operation.
        op: &'static str,
        /// The argument.
        arg: &'static str,
        /// What it needs.
        expected: String,
        /// What it got.
        got: Vec<usize>,
    },
    /// A tensor's elements lie in memory in a way that the operation does not take.
    #[error("{op}: `{arg}` must be {expected}, but its strides are {got:?}")]
    Stride {
        /// The operation.
        op: &'static str,
        /// The argument.
        arg: &'static str,
        /// What it needs.
        expected: String,
        /// Strides in elements.
        got: Vec<usize>,
    },
    /// A tensor starts at an address that is not aligned enough.
    #[error("{op}: `{arg}` must be aligned to {expected} bytes, but starts at {address:#x}")]
    Alignment {
        /// The operation.
        op: &'static str,
        /// The argument.
        arg: &'static str,
        /// Bytes.
        expected: usize,
        /// Where it starts.
        address: usize,
    },
    /// A tensor has an element type that the operation does not take.
    #[error("{op}: `{arg}` must be {expected}, but is {got}")]
    DType {
        /// The operation.
        op: &'static str,
        /// The argument.
        arg: &'static str,
        /// What it needs.
        expected: String,
        /// What it got.
        got: DType,
    },
    /// A scalar argument is out of range.
    #[error("{op}: `{arg}` must be {expected}, but is {got}")]
    Value {
        /// The operation.
        op: &'static str,
        /// The argument.
        arg: &'static str,
        /// What it needs.
        expected: String,
        /// What it got.
        got: String,
    },
    /// A tensor lives on another device than the stream, or a stream or tensor on another than the operation's.
    #[error("{op}: `{arg}` must be on {expected}, but is on {got}")]
    WrongDevice {
        /// The operation.
        op: &'static str,
        /// The argument.
        arg: &'static str,
        /// The stream's device, or the operation's.
        expected: String,
        /// The device of the argument.
        got: String,
    },
    /// An output shares memory with another argument.
    #[error("{op}: `{first}` and `{second}` overlap in memory")]
    Overlap {
        /// The operation.
        op: &'static str,
        /// An output.
        first: &'static str,
        /// The other argument.
        second: &'static str,
    },
    /// An output's memory may only be read.
    #[error("{op}: `{arg}` is written, but its memory is read-only")]
    ReadOnly {
        /// The operation.
        op: &'static str,
        /// The argument.
        arg: &'static str,
    },
    /// A tensor's memory was [borrowed](crate::borrow), and the borrow has ended.
    #[error("{op}: the memory of `{arg}` was borrowed, and the borrow has ended; use the tensor inside of its scope")]
    Expired {
        /// The operation.
        op: &'static str,
        /// The argument.
        arg: &'static str,
    },
    /// A tensor's memory was [borrowed](crate::borrow) for another stream.
    #[error("{op}: the memory of `{arg}` was borrowed for another stream; use the stream of its scope")]
    WrongStream {
        /// The operation.
        op: &'static str,
        /// The argument.
        arg: &'static str,
    },
    /// A combination that no kernel covers.
    #[error("{op}: {what}")]
    Unsupported {
        /// The operation.
        op: &'static str,
        /// Which combination, and what would work.
        what: String,
    },
    /// A tensor of another framework comes in a version of [DLPack](crate::dlpack) that is not known here.
    #[error("dlpack: version {}.{} came, and only {supported}.x is known", .found.0, .found.1)]
    DlpackVersion {
        /// Major and minor.
        found: (u32, u32),
        /// Major.
        supported: u32,
    },
    /// The number of elements does not fit the shape, or a view leaves its tensor.
    #[error("tensor: {0}")]
    Tensor(String),
    /// A kernel failed on the SIMT device.
    #[error(transparent)]
    Launch(Box<simt::LaunchError>),
    /// The CUDA driver reported an error.
    #[error("{call} failed: {name} ({code}){}{}", .kernel.map(|k| format!(", kernel {k}")).unwrap_or_default(), log_of(.log))]
    Driver {
        /// The driver's function.
        call: &'static str,
        /// `CUresult`.
        code: i32,
        /// The driver's name for it.
        name: String,
        /// The kernel, if one was being launched or loaded.
        kernel: Option<&'static str>,
        /// What the JIT compiler said, if it ran.
        log: String,
    },
    /// There is no usable CUDA driver.
    #[error("no CUDA driver: {0}; use Device::simt(), or install NVIDIA's driver")]
    NoDriver(String),
    /// There is no such GPU.
    #[error(
        "no CUDA device {ordinal}: {found} found; count from 0, see whether CUDA_VISIBLE_DEVICES hides any, or use Device::simt()"
    )]
    NoDevice {
        /// The device asked for.
        ordinal: usize,
        /// How many there are.
        found: usize,
    },
    /// The driver is too old for the PTX of this crate, or for a function that a launch needs.
    #[error("the CUDA driver {found} is too old: this crate needs {needed} or newer; update NVIDIA's driver")]
    DriverTooOld {
        /// The driver's CUDA version.
        found: String,
        /// The oldest that works.
        needed: String,
    },
    /// The GPU is too old, or lacks what a kernel needs.
    #[error(
        "{device} has compute capability {found}; {what} needs {needed}: leave paths at `Auto`, or use a newer GPU or Device::simt()"
    )]
    TooOldGpu {
        /// The device.
        device: String,
        /// Its compute capability.
        found: String,
        /// What needs more.
        what: String,
        /// What it needs.
        needed: String,
    },
    /// This build has no CUDA support.
    #[error("this build of warploom has no CUDA support: enable the feature `cuda` or `cudarc`")]
    NoCuda,
    /// This build has no kernels for the SIMT device.
    #[error("this build of warploom has no kernels for the SIMT device: enable the feature `simt`")]
    NoSimt,
    /// The device has not enough memory left.
    #[error(
        "{device} cannot allocate {bytes} bytes; ask for less, or drop tensors, caches and workspaces that are not in use"
    )]
    OutOfMemory {
        /// The device.
        device: String,
        /// What was asked for.
        bytes: usize,
    },
    /// Ranks of [expert parallelism](crate::ep) did not get along.
    #[error(transparent)]
    Ep(#[from] crate::ep::Fault),
    /// The allocator of the cache's blocks refused.
    #[error(transparent)]
    Allocator(#[from] crate::kv_cache::AllocatorError),
    /// A plan of experts was refused.
    #[error(transparent)]
    Eplb(#[from] crate::ep::eplb::EplbError),
    /// Ranks in several processes could not bring each other their messages, by the means that they were given.
    #[error("{op}: exchange between processes: {what}")]
    Exchange {
        /// The operation.
        op: &'static str,
        /// What went wrong.
        what: String,
    },
    /// A stream capture was used wrongly.
    #[error("capture: {0}")]
    Capture(String),
}

fn log_of(log: &str) -> String {
    if log.is_empty() { String::new() } else { format!("\n{log}") }
}

impl From<simt::LaunchError> for Error {
    fn from(e: simt::LaunchError) -> Self {
        Error::Launch(Box::new(e))
    }
}
