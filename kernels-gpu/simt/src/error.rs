//! What can go wrong in a kernel, with enough context to find it.

use std::fmt;
use std::panic::Location;

/// Source position of a kernel's call into the device library.
pub type Loc = &'static Location<'static>;

/// Three unsigned coordinates or extents, as in CUDA.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Dim3 {
    /// Runs fastest.
    pub x: u32,
    /// In the middle.
    pub y: u32,
    /// Runs slowest.
    pub z: u32,
}

impl Dim3 {
    /// From the three coordinates.
    pub const fn new(x: u32, y: u32, z: u32) -> Self {
        Self { x, y, z }
    }
    /// Product of the three extents.
    pub const fn count(self) -> u64 {
        (self.x as u64 * self.y as u64).saturating_mul(self.z as u64)
    }
    /// Coordinates of the `i`-th point, `x` running fastest.
    pub(crate) fn unflatten(self, i: u64) -> Self {
        let (x, y) = (self.x as u64, self.y as u64);
        Self::new((i % x) as u32, (i / x % y) as u32, (i / (x * y)) as u32)
    }
}

impl fmt::Display for Dim3 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "({},{},{})", self.x, self.y, self.z)
    }
}
impl fmt::Debug for Dim3 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
impl From<u32> for Dim3 {
    fn from(x: u32) -> Self {
        Self::new(x, 1, 1)
    }
}
impl From<(u32, u32)> for Dim3 {
    fn from((x, y): (u32, u32)) -> Self {
        Self::new(x, y, 1)
    }
}
impl From<(u32, u32, u32)> for Dim3 {
    fn from((x, y, z): (u32, u32, u32)) -> Self {
        Self::new(x, y, z)
    }
}

/// Which memory an access went to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Space {
    /// Dynamic shared memory of the block.
    Shared,
    /// The device's memory.
    Global,
}

impl fmt::Display for Space {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Space::Shared => "shared",
            Space::Global => "global",
        })
    }
}

/// How an access touched memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// A plain or vector load, or an asynchronous copy from there.
    Read,
    /// A plain or vector store, or an asynchronous copy to there.
    Write,
    /// An atomic operation, of which two never conflict.
    Atomic,
}

impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Access::Read => "read",
            Access::Write => "write",
            Access::Atomic => "atomic access",
        })
    }
}

/// What one thread was doing when its block could not go on: `op` is the operation, `at` the kernel's call of it.
#[allow(missing_docs)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ThreadState {
    /// Returned from the kernel.
    Exited,
    /// Waits at a warp-wide operation for the lanes of `mask`.
    Warp { op: &'static str, mask: u32, at: Loc },
    /// Waits at a block barrier for `expected` threads.
    Barrier { op: &'static str, id: u32, expected: u32, at: Loc },
    /// Polls something that does not change.
    Spin { op: &'static str, at: Loc },
}

/// One thread of a stuck block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StuckThread {
    /// Its coordinates.
    pub thread: Dim3,
    /// Position in the block, `x` fastest; `/ 32` is the warp, `% 32` the lane.
    pub linear: u32,
    /// What it waits for.
    pub state: ThreadState,
}

/// The ways a launch fails.
///
/// `thread` is the coordinates of the thread to blame in its block, `at` the line of the kernel; `offset` counts bytes from
/// the beginning of a buffer (or of shared memory) of `len` bytes, and may be negative.
#[allow(missing_docs)]
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// The launch configuration is not one a GPU would accept.
    InvalidLaunch(String),
    /// A kernel thread panicked.
    Panic { thread: Dim3, message: String, at: Option<String> },
    /// `cuda_std::thread::trap()` or a failed device-library check.
    Trap { thread: Dim3, message: String, at: Loc },
    /// No thread of the block can make progress.
    Stuck { why: String, threads: Vec<StuckThread> },
    /// A checked access fell outside its buffer.
    OutOfBounds { thread: Dim3, space: Space, access: Access, offset: i64, bytes: usize, len: usize, at: Loc },
    /// A checked access was not aligned to its type.
    Misaligned { thread: Dim3, space: Space, address: usize, align: usize, at: Loc },
    /// A raw pointer wrote outside dynamic shared memory or outside a buffer.
    RedzoneHit { space: Space, offset: i64, len: usize },
    /// Two unordered accesses to one location, at least one a plain write.
    Race {
        space: Space,
        offset: usize,
        first: Access,
        first_block: Dim3,
        first_thread: Dim3,
        first_at: Loc,
        second: Access,
        second_thread: Dim3,
        second_at: Loc,
    },
    /// A dependent launch touched global memory before it waited: `earlier` is the kernel that may still be running, what that did to the
    /// same memory, and where, or nothing if any kernel may have come before.
    BeforeWait { thread: Dim3, offset: usize, access: Access, at: Loc, earlier: Option<(String, Access, Loc)> },
    /// No thread of a dependent launch waited, so who waits for it does not wait for what came before.
    NeverWaited,
    /// Shared memory was read before anything wrote it.
    Uninitialised { thread: Dim3, offset: usize, at: Loc },
}

/// A failed launch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LaunchError {
    /// Its name.
    pub kernel: String,
    /// The block that failed.
    pub block: Dim3,
    /// How.
    pub kind: ErrorKind,
}

impl std::error::Error for LaunchError {}

impl fmt::Display for LaunchError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "kernel `{}`, block {}: ", self.kernel, self.block)?;
        match &self.kind {
            ErrorKind::InvalidLaunch(m) => write!(f, "invalid launch: {m}"),
            ErrorKind::Panic { thread, message, at } => {
                write!(f, "thread {thread} panicked: {message}")?;
                at.as_ref().map_or(Ok(()), |at| write!(f, "\n    at {at}"))
            }
            ErrorKind::Trap { thread, message, at } => {
                write!(f, "thread {thread} trapped: {message}\n    at {at}")
            }
            ErrorKind::Stuck { why, threads } => {
                write!(f, "{why}")?;
                fmt_stuck(f, threads)
            }
            ErrorKind::OutOfBounds { thread, space, access, bytes, len: 0, at, .. } => write!(
                f,
                "thread {thread}: {space} {access} of {bytes} bytes outside all registered buffers\n    at {at}"
            ),
            ErrorKind::OutOfBounds { thread, space, access, offset, bytes, len, at } => write!(
                f,
                "thread {thread}: {space} {access} of {bytes} bytes at byte offset {offset} of a {len}-byte buffer\n    at {at}"
            ),
            ErrorKind::Misaligned { thread, space, address, align, at } => write!(
                f,
                "thread {thread}: {space} access at {address:#x} is not aligned to {align} bytes\n    at {at}"
            ),
            ErrorKind::RedzoneHit { space, offset, len } => {
                write!(f, "an unchecked {space} write landed at byte offset {offset} of a {len}-byte region")
            }
            ErrorKind::Race {
                space,
                offset,
                first,
                first_block,
                first_thread,
                first_at,
                second,
                second_thread,
                second_at,
            } => {
                write!(f, "data race on {space} memory at byte offset {offset}: nothing orders\n    {first} by ")?;
                if *first_block != self.block {
                    write!(f, "block {first_block}, ")?;
                }
                write!(f, "thread {first_thread} at {first_at}\n    {second} by thread {second_thread} at {second_at}")
            }
            ErrorKind::BeforeWait { thread, offset, access, at, earlier } => {
                write!(
                    f,
                    "thread {thread}: global {access} at byte offset {offset} before dependent_launch::wait(), at {at}\n    "
                )?;
                match earlier {
                    Some((kernel, access, at)) => {
                        write!(f, "while kernel `{kernel}` may still be running, with a {access} at {at}")
                    }
                    None => write!(f, "while the kernel launched before, whichever that is, may still be running"),
                }
            }
            ErrorKind::NeverWaited => write!(f, "a dependent launch of which no thread calls dependent_launch::wait()"),
            ErrorKind::Uninitialised { thread, offset, at } => write!(
                f,
                "thread {thread} reads shared memory at byte offset {offset}, which nothing has written\n    at {at}"
            ),
        }
    }
}

/// Lists the threads: for each warp a line for each distinct state.
fn fmt_stuck(f: &mut fmt::Formatter<'_>, threads: &[StuckThread]) -> fmt::Result {
    for warp in threads.chunk_by(|a, b| a.linear / 32 == b.linear / 32) {
        for (i, first) in warp.iter().enumerate() {
            if warp[..i].iter().any(|t| t.state == first.state) {
                continue;
            }
            let lanes: Vec<u32> = warp.iter().filter(|t| t.state == first.state).map(|t| t.linear % 32).collect();
            write!(f, "\n    warp {} lane {}, from thread {}:", first.linear / 32, ranges(&lanes), first.thread)?;
            match first.state {
                ThreadState::Exited => write!(f, " exited")?,
                ThreadState::Warp { op, mask, at } => write!(f, " at {op}, mask {mask:#010x}, {at}")?,
                ThreadState::Barrier { op, id: 0, at, .. } => write!(f, " at {op}, {at}")?,
                ThreadState::Barrier { op, id, expected, at } => {
                    write!(f, " at {op} (barrier {id}, {expected} threads), {at}")?;
                }
                ThreadState::Spin { op, at } => write!(f, " polling in {op}, {at}")?,
            }
        }
    }
    Ok(())
}

/// Ascending numbers as `0-3, 7`.
pub(crate) fn ranges(numbers: &[u32]) -> String {
    let runs = numbers.chunk_by(|a, b| a + 1 == *b);
    let run = |r: &[u32]| if r.len() == 1 { r[0].to_string() } else { format!("{}-{}", r[0], r[r.len() - 1]) };
    runs.map(run).collect::<Vec<_>>().join(", ")
}
