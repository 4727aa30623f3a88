//! Devices, streams, events, graphs: what all operations run on.
//!
//! A [`Device`] is an NVIDIA GPU or the SIMT device. Work goes to a [`Stream`] of it, in order. On the SIMT device
//! a stream runs its work at once, on the calling thread and the emulator's (on the calling thread alone, if that is one of a rayon pool); everything else is the same.

#[cfg_attr(not(feature = "_driver"), allow(dead_code, reason = "on the SIMT device nothing is left to wait for"))]
mod capturing;
#[cfg(feature = "_driver")]
mod cuda;
mod graph;
mod simt;
mod stream;

use crate::borrow::{Hold, Lease};
use crate::error::{Error, Result};
use cuda_std::Arch;
use std::fmt;
use std::sync::Arc;

pub use self::simt::SimtOptions;
pub use cuda_std::tma::{Swizzle, TensorMap, TensorMapDescription};
pub use graph::Graph;
pub(crate) use stream::Using;
pub use stream::{Event, Pinned, Stream};

/// Shared memory of a block of the GPUs of compute capability 8.6, 8.9 and 12.0: of 100 KiB all but one.
const SHARED_BYTES_8_6: usize = 99 * 1024;

/// What a GPU of less than `arch` is told that has asked for `what`.
#[cold]
fn too_old(device: String, (major, minor): (u32, u32), what: String, arch: Arch) -> Error {
    let needed = if arch == Arch::Sm80 { "8.0" } else { "9.0" };
    Error::TooOldGpu { device, found: format!("{major}.{minor}"), what, needed: needed.into() }
}

#[cold]
fn too_much_shared(kernel: &'static str, bytes: u32, device: &str, most: usize) -> Error {
    let what = format!("a block needs {bytes} bytes of shared memory, and {device} has {most}");
    Error::Unsupported { op: kernel, what }
}

/// An NVIDIA GPU or the SIMT device. Cheap to clone; clones are the same device.
#[derive(Clone)]
pub struct Device(Arc<Backend>);

pub(crate) enum Backend {
    Simt(self::simt::SimtDevice),
    #[cfg(feature = "_driver")]
    Cuda(cuda::CudaDevice),
}

/// What a device can do, for choosing kernels and sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Properties {
    /// Compute capability; (9, 0) on the SIMT device, which runs every kernel, or (8, 6) with [`SimtOptions::portable`].
    pub compute_capability: (u32, u32),
    /// Streaming multiprocessors. The SIMT device says 4, so that grids stay small, or what [`SimtOptions::multiprocessors`] says.
    pub multiprocessors: u32,
    /// Dynamic shared memory that a block may have.
    pub max_shared_bytes: usize,
    /// Memory in bytes; 0 where unknown.
    pub memory_bytes: u64,
}

/// Memory of a GPU, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryInfo {
    /// What is left, for all processes.
    pub free: u64,
    /// All there is.
    pub total: u64,
}

impl Device {
    /// A SIMT device with default options. Without the feature `simt` it has memory, and launches fail with [`Error::NoSimt`].
    pub fn simt() -> Self {
        Self::simt_with(SimtOptions::default())
    }

    /// A SIMT device: kernels run on the CPU, checked as `options` say. Each has memory of its own.
    pub fn simt_with(options: SimtOptions) -> Self {
        Self(Arc::new(Backend::Simt(self::simt::SimtDevice::new(options))))
    }

    /// Several SIMT devices whose kernels use each other's memory at the same time, each launched by a host thread of its
    /// own, as the GPUs of one machine: the ranks of [expert parallelism](crate::ep). With
    /// [`race`](SimtOptions::race) the race detector looks at all of them together. As on GPUs, the host reads what a peer's kernel
    /// may be writing in whatever state it is in: buffers that peers write, after the operation that they belong to and before the next.
    pub fn simt_peers(count: usize, options: SimtOptions) -> Vec<Self> {
        let peers = ::simt::Peers::new(count);
        let device = |n| self::simt::SimtDevice::peer(options, peers.clone(), n);
        (0..count).map(|n| Self(Arc::new(Backend::Simt(device(n))))).collect()
    }

    /// Whether kernels of the two can wait for each other: for SIMT devices, made by one call of [`simt_peers`](Self::simt_peers).
    pub(crate) fn runs_beside(&self, other: &Device) -> bool {
        match (&*self.0, &*other.0) {
            (Backend::Simt(a), Backend::Simt(b)) => a.is_peer(b),
            #[cfg(feature = "_driver")]
            _ => true,
        }
    }

    /// Kernels of a SIMT device may wait for those of its peers for so long, and then say so themselves.
    pub(crate) fn be_patient(&self, time: std::time::Duration) {
        match &*self.0 {
            Backend::Simt(d) => d.be_patient(time),
            #[cfg(feature = "_driver")]
            Backend::Cuda(_) => {}
        }
    }

    /// For the race detector: what is launched next here follows all that the other SIMT device did.
    fn wait_for(&self, other: &Self) {
        match (&*self.0, &*other.0) {
            (Backend::Simt(d), Backend::Simt(other)) => d.waits_for(other),
            #[cfg(feature = "_driver")]
            _ => {}
        }
    }

    /// Tells the race detector that the host has waited for this SIMT device and all its peers.
    pub(crate) fn forget_races(&self) {
        match &*self.0 {
            Backend::Simt(d) => d.forget_races(),
            #[cfg(feature = "_driver")]
            Backend::Cuda(_) => {}
        }
    }

    /// The `ordinal`-th NVIDIA GPU, with its primary context. The variable `WARPLOOM_AS_IF` of the environment (`sm_80`, `sm_86`, `sm_89`) has
    /// it used as one of less compute capability and shared memory.
    ///
    /// # Errors
    /// [`Error::Value`] for another value of that variable;
    /// [`Error::NoCuda`] without the features `cuda` and `cudarc`; [`Error::NoDriver`], [`Error::NoDevice`],
    /// [`Error::DriverTooOld`], [`Error::TooOldGpu`] (below compute capability 8.0).
    pub fn cuda(ordinal: usize) -> Result<Self> {
        #[cfg(feature = "_driver")]
        return Ok(Self(Arc::new(Backend::Cuda(cuda::CudaDevice::new(ordinal)?))));
        #[cfg(not(feature = "_driver"))]
        {
            let _ = ordinal;
            Err(Error::NoCuda)
        }
    }

    /// The GPU of the CUDA context that is current on this thread: for use beside another CUDA library. Makes no
    /// context.
    ///
    /// That is the GPU's primary context with the CUDA runtime and what builds on that, and the result is the same device as
    /// [`cuda`](Self::cuda)'s. For any other context there is [`cuda_current_context`](Self::cuda_current_context).
    ///
    /// # Errors
    /// As for [`cuda`](Self::cuda), [`Error::Driver`] when no context is current, and [`Error::Unsupported`] for one that is not
    /// primary.
    pub fn cuda_current() -> Result<Self> {
        #[cfg(feature = "_driver")]
        return Ok(Self(Arc::new(Backend::Cuda(cuda::CudaDevice::current()?))));
        #[cfg(not(feature = "_driver"))]
        Err(Error::NoCuda)
    }

    /// [`cuda_current`](Self::cuda_current) with a context that need not be the primary one. Of another keep the device: calls give the
    /// same one while it, or something made from it, is there, and the next one loads kernels of its own, which live as long as the
    /// context.
    ///
    /// # Errors
    /// As for [`cuda`](Self::cuda), and [`Error::Driver`] when no context is current.
    ///
    /// # Safety
    /// The context outlives the device and all that is made from it. A primary one does.
    pub unsafe fn cuda_current_context() -> Result<Self> {
        #[cfg(feature = "_driver")]
        return Ok(Self(Arc::new(Backend::Cuda(cuda::CudaDevice::current_context()?))));
        #[cfg(not(feature = "_driver"))]
        Err(Error::NoCuda)
    }

    /// How many NVIDIA GPUs there are: 0 without a driver or without the features `cuda` and `cudarc`.
    pub fn cuda_count() -> usize {
        #[cfg(feature = "_driver")]
        return cuda::count().unwrap_or(0);
        #[cfg(not(feature = "_driver"))]
        0
    }

    /// The first NVIDIA GPU if there is one that works, otherwise the SIMT device.
    ///
    /// # Errors
    /// Only if there is a GPU that should work but cannot be set up, for example for want of memory; without the feature `simt` all
    /// those of [`cuda`](Self::cuda).
    pub fn auto() -> Result<Self> {
        match Self::cuda(0) {
            Err(
                Error::NoCuda
                | Error::NoDriver(_)
                | Error::NoDevice { .. }
                | Error::DriverTooOld { .. }
                | Error::TooOldGpu { .. },
            ) if cfg!(feature = "simt") => Ok(Self::simt()),
            other => other,
        }
    }

    /// From a name: `simt`, `cuda:N`, `cuda` (the first) or `auto`.
    ///
    /// # Errors
    /// [`Error::Value`] for another name, and those of [`cuda`](Self::cuda).
    pub fn from_name(name: &str) -> Result<Self> {
        match name {
            "simt" => Ok(Self::simt()),
            "auto" => Self::auto(),
            "cuda" => Self::cuda(0),
            _ => match name.strip_prefix("cuda:").and_then(|n| n.parse().ok()) {
                Some(ordinal) => Self::cuda(ordinal),
                None => Err(Error::Value {
                    op: "Device::from_name",
                    arg: "name",
                    expected: "`simt`, `auto`, `cuda` or `cuda:N`".into(),
                    got: format!("`{name}`"),
                }),
            },
        }
    }

    /// Whether this is the SIMT device.
    pub fn is_simt(&self) -> bool {
        matches!(*self.0, Backend::Simt(_))
    }

    /// How this SIMT device runs kernels; `None` for a GPU.
    pub fn simt_options(&self) -> Option<SimtOptions> {
        match &*self.0 {
            Backend::Simt(d) => Some(d.options()),
            #[cfg(feature = "_driver")]
            Backend::Cuda(_) => None,
        }
    }

    /// What the device can do.
    pub fn properties(&self) -> Properties {
        match &*self.0 {
            Backend::Simt(d) => d.properties(),
            #[cfg(feature = "_driver")]
            Backend::Cuda(d) => d.properties(),
        }
    }

    /// The device's name, such as `SIMT 0` or `cuda:0 (NVIDIA H200)`.
    pub fn name(&self) -> String {
        match &*self.0 {
            Backend::Simt(d) => d.name(),
            #[cfg(feature = "_driver")]
            Backend::Cuda(d) => d.name(),
        }
    }

    /// Compiles and loads the PTX of these families or kernels now, so that no later launch has to: before a
    /// latency-critical phase, and before capturing graphs. Without it each kernel is loaded at its first launch.
    ///
    /// `names` are families ([`ptx::FAMILIES`](crate::ptx::FAMILIES)) or single entries
    /// ([`ptx::entries`](crate::ptx::entries)). Unless it finds it in its cache, the driver takes 35 to 1100 ms for an entry, one thread
    /// at a time; a family, which has every instance of its kernels (8 to 353), takes from a second to most of a minute. To load
    /// just what a program uses, run it once.
    ///
    /// # Errors
    /// [`Error::Value`] for a name that is neither, [`Error::Driver`] with the JIT log.
    pub fn preload(&self, names: &[&str]) -> Result<()> {
        use crate::ptx;
        let arch = match &*self.0 {
            Backend::Simt(d) => d.arch(),
            #[cfg(feature = "_driver")]
            Backend::Cuda(d) => d.arch(),
        };
        let mut wanted: Vec<(&str, &str)> = vec![];
        for &name in names {
            if let Some(&family) = ptx::FAMILIES.iter().find(|&&family| family == name) {
                wanted.extend(ptx::entries(arch, family).map(|entry| (family, entry)));
                continue;
            }
            let of = |&family: &&'static str| ptx::entries(arch, family).find(|e| *e == name).map(|e| (family, e));
            wanted.push(ptx::FAMILIES.iter().find_map(of).ok_or_else(|| Error::Value {
                op: "Device::preload",
                arg: "names",
                expected: format!("kernels or families, which are {:?}", ptx::FAMILIES),
                got: format!("`{name}`"),
            })?);
        }
        match &*self.0 {
            Backend::Simt(_) => Ok(()),
            #[cfg(feature = "_driver")]
            Backend::Cuda(d) => d.preload(&wanted),
        }
    }

    /// Waits until all work on all streams of the device is done.
    ///
    /// # Errors
    /// [`Error::Driver`] if any of that work failed.
    pub fn synchronize(&self) -> Result<()> {
        match &*self.0 {
            Backend::Simt(d) => {
                d.host_waits();
                Ok(())
            }
            #[cfg(feature = "_driver")]
            Backend::Cuda(d) => d.synchronize(),
        }
    }

    /// Lets kernels of this device use memory of `peer` (by address: safe operations take tensors of one device only).
    /// Kernels of a SIMT device always can. Once for each direction; more often does no harm.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the GPUs are not connected in a way that allows it, [`Error::WrongDevice`] for a GPU and
    /// a SIMT device.
    pub fn enable_peer_access(&self, peer: &Device) -> Result<()> {
        match (&*self.0, &*peer.0) {
            (Backend::Simt(_), Backend::Simt(_)) => Ok(()),
            #[cfg(feature = "_driver")]
            (Backend::Cuda(d), Backend::Cuda(peer)) => d.enable_peer_access(peer),
            #[cfg(feature = "_driver")]
            _ => Err(Error::WrongDevice {
                op: "Device::enable_peer_access",
                arg: "peer",
                expected: "a device of its kind".into(),
                got: peer.name(),
            }),
        }
    }

    /// The number by which the CUDA driver knows the GPU; `None` for the SIMT device.
    pub fn cuda_ordinal(&self) -> Option<usize> {
        match &*self.0 {
            Backend::Simt(_) => None,
            #[cfg(feature = "_driver")]
            Backend::Cuda(d) => Some(d.ordinal()),
        }
    }

    /// A tensor map, for kernels that copy boxes of a tensor with the copy engine (layer L1). Nothing is read from the
    /// tensor, which only must be there when a kernel uses the map.
    ///
    /// # Errors
    /// [`Error::Value`] for a description that the copy engine cannot follow, [`Error::TooOldGpu`] for a GPU without
    /// Hopper's instructions, [`Error::DriverTooOld`], [`Error::Driver`].
    pub fn tensor_map(&self, description: &TensorMapDescription) -> Result<TensorMap> {
        let invalid = |expected: &str| Error::Value {
            op: "Device::tensor_map",
            arg: "description",
            expected: format!("such that {expected}"),
            got: format!("{description:?}"),
        };
        match &*self.0 {
            Backend::Simt(d) => {
                let map = TensorMap::for_simt(description).map_err(invalid)?;
                d.needs(Arch::Sm90a, || "kernel with tensor maps".into())?;
                Ok(map)
            }
            #[cfg(feature = "_driver")]
            Backend::Cuda(d) => {
                description.validate().map_err(invalid)?;
                d.tensor_map(description)
            }
        }
    }

    /// Memory of the GPU, free and in all, in bytes; `None` for the SIMT device, which uses the host's.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn memory_info(&self) -> Result<Option<MemoryInfo>> {
        match &*self.0 {
            Backend::Simt(_) => Ok(None),
            #[cfg(feature = "_driver")]
            Backend::Cuda(d) => d.memory().map(|(free, total)| Some(MemoryInfo { free, total })),
        }
    }

    /// What no other GPU of the machine is called; nothing for the SIMT device.
    pub(crate) fn uuid(&self) -> Result<[u8; 16]> {
        match &*self.0 {
            Backend::Simt(_) => Ok([0; 16]),
            #[cfg(feature = "_driver")]
            Backend::Cuda(d) => d.uuid(),
        }
    }

    /// A name for an allocation (by its first address), by which another process finds it.
    pub(crate) fn export(&self, op: &'static str, storage: &Storage) -> Result<[u8; 64]> {
        match &*self.0 {
            Backend::Simt(_) => {
                let _ = storage;
                let what =
                    "memory of a SIMT device is of its process alone; Device::simt_peers are ranks of one".into();
                Err(Error::Unsupported { op, what })
            }
            #[cfg(feature = "_driver")]
            Backend::Cuda(d) => d.export(storage.address),
        }
    }

    /// Runs `f`, which touches memory of this SIMT device in place of a kernel, while nobody else does.
    fn exclusive<R>(&self, f: impl FnOnce() -> R) -> R {
        match &*self.0 {
            Backend::Simt(d) => d.in_stream(f),
            #[cfg(feature = "_driver")]
            Backend::Cuda(_) => f(),
        }
    }

    pub(crate) fn backend(&self) -> &Backend {
        &self.0
    }
}

impl PartialEq for Device {
    /// Whether memory of the one can be used on streams of the other.
    fn eq(&self, other: &Self) -> bool {
        match (&*self.0, &*other.0) {
            (Backend::Simt(_), Backend::Simt(_)) => Arc::ptr_eq(&self.0, &other.0),
            #[cfg(feature = "_driver")]
            (Backend::Cuda(a), Backend::Cuda(b)) => a.same_context(b),
            #[cfg(feature = "_driver")]
            _ => false,
        }
    }
}
impl Eq for Device {}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name())
    }
}

/// Memory of a device, freed on drop.
pub(crate) struct Storage {
    device: Device,
    address: *mut u8,
    bytes: usize,
    /// Whether nothing may write to it.
    read_only: bool,
    /// While it may be used, if it is borrowed.
    lease: Option<Arc<Lease>>,
    memory: Memory,
}

/// The owner of a [`Storage`]'s bytes.
enum Memory {
    Simt(#[allow(dead_code, reason = "held for its destructor")] ::simt::Buffer<u8>),
    #[cfg(feature = "_driver")]
    Cuda(#[allow(dead_code, reason = "held for its destructor")] cuda::CudaMemory),
    #[cfg(feature = "_driver")]
    Import(#[allow(dead_code, reason = "held for its destructor")] cuda::CudaImport),
    Foreign {
        /// What the SIMT device knows it by. Goes before the owner does.
        lent: Option<::simt::Lent>,
        /// What keeps it alive.
        owner: Option<Box<dyn Send + Sync>>,
    },
}

/// Memory that this crate did not allocate: what a [`Storage`] is made of.
pub(crate) struct Foreign {
    pub(crate) address: *mut u8,
    pub(crate) bytes: usize,
    pub(crate) read_only: bool,
    /// Dropped with the storage, when nothing uses the memory any more.
    pub(crate) owner: Option<Box<dyn Send + Sync>>,
    pub(crate) lease: Option<Arc<Lease>>,
}

// SAFETY: device memory is reached only through the device's streams and copies, which are thread-safe.
unsafe impl Send for Storage {}
// SAFETY: as above.
unsafe impl Sync for Storage {}

impl Storage {
    /// `bytes` of device memory, filled with `0xff` on the SIMT device and with anything on a GPU.
    pub(crate) fn new(device: &Device, bytes: usize) -> Result<Arc<Self>> {
        let (address, memory) = match device.backend() {
            Backend::Simt(d) => {
                // What was known of these addresses is not true any more.
                d.forget_launches();
                let buffer = ::simt::Buffer::<u8>::try_poisoned(bytes)
                    .ok_or_else(|| Error::OutOfMemory { device: device.name(), bytes })?;
                (buffer.as_mut_ptr(), Memory::Simt(buffer))
            }
            #[cfg(feature = "_driver")]
            Backend::Cuda(d) => {
                let memory = d.allocate(bytes)?;
                (memory.address(), Memory::Cuda(memory))
            }
        };
        Ok(Arc::new(Self { device: device.clone(), address, bytes, read_only: false, lease: None, memory }))
    }

    /// Memory of somebody else.
    ///
    /// # Safety
    /// It is the device's, initialised where that is the host's, and stays so while the owner or the lease lasts; nobody
    /// else uses it in a way that the operations on it do not expect.
    pub(crate) unsafe fn foreign(device: &Device, foreign: Foreign) -> Arc<Self> {
        let Foreign { address, bytes, read_only, owner, lease } = foreign;
        let lent = match device.backend() {
            Backend::Simt(d) => {
                d.forget_launches();
                (bytes > 0).then(|| ::simt::Lent::new(address, bytes))
            }
            #[cfg(feature = "_driver")]
            Backend::Cuda(_) => None,
        };
        let memory = Memory::Foreign { lent, owner };
        Arc::new(Self { device: device.clone(), address, bytes, read_only, lease, memory })
    }

    /// `bytes` of another process, by the name that [`Device::export`] gave them there.
    pub(crate) fn import(op: &'static str, device: &Device, handle: [u8; 64], bytes: usize) -> Result<Arc<Self>> {
        match device.backend() {
            Backend::Simt(_) => {
                let _ = (handle, bytes);
                Err(Error::Unsupported { op, what: "a SIMT device has no memory of other processes".into() })
            }
            #[cfg(feature = "_driver")]
            Backend::Cuda(d) => {
                let memory = d.import(handle)?;
                let address = memory.address();
                let (device, memory) = (device.clone(), Memory::Import(memory));
                Ok(Arc::new(Self { device, address, bytes, read_only: false, lease: None, memory }))
            }
        }
    }

    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    pub(crate) fn address(&self) -> *mut u8 {
        self.address
    }

    pub(crate) fn read_only(&self) -> bool {
        self.read_only
    }

    pub(crate) fn lease(&self) -> Option<&Arc<Lease>> {
        self.lease.as_ref()
    }

    /// Keeps a borrowed storage usable until the result is dropped.
    fn hold(&self, op: &'static str, write: bool) -> Result<Option<Hold>> {
        if write && self.read_only {
            return Err(Error::ReadOnly { op, arg: "self" });
        }
        self.lease.as_ref().map(|lease| lease.hold().ok_or(Error::Expired { op, arg: "self" })).transpose()
    }

    /// Sets all bytes to zero, after all work on the device, and waits for it.
    pub(crate) fn clear(&self) -> Result<()> {
        let _hold = self.hold("Tensor::zeros", true)?;
        match self.device.backend() {
            Backend::Simt(d) => {
                // SAFETY: in bounds, and nobody else touches the device's memory.
                d.exclusive(|| unsafe { std::ptr::write_bytes(self.address, 0, self.bytes) });
                Ok(())
            }
            #[cfg(feature = "_driver")]
            Backend::Cuda(d) => d.clear(self.address, self.bytes),
        }
    }

    /// Copies from the host, after all work on the device, and waits for it.
    pub(crate) fn write(&self, offset: usize, data: &[u8]) -> Result<()> {
        assert!(offset + data.len() <= self.bytes, "write outside of a storage");
        let _hold = self.hold("Tensor::copy_from_slice", true)?;
        let to = self.address.wrapping_add(offset);
        match self.device.backend() {
            Backend::Simt(d) => {
                // SAFETY: in bounds, and nobody else touches the device's memory.
                d.exclusive(|| unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), to, data.len()) });
                Ok(())
            }
            #[cfg(feature = "_driver")]
            Backend::Cuda(d) => d.write(to, data),
        }
    }

    /// Copies to the host, after all work on the device is done.
    pub(crate) fn read(&self, offset: usize, data: &mut [u8]) -> Result<()> {
        assert!(offset + data.len() <= self.bytes, "read outside of a storage");
        let _hold = self.hold("Tensor::to_vec", false)?;
        let from = self.address.wrapping_add(offset);
        match self.device.backend() {
            Backend::Simt(d) => {
                // SAFETY: in bounds and initialised when allocated; nobody else touches the device's memory.
                d.exclusive(|| unsafe { std::ptr::copy_nonoverlapping(from, data.as_mut_ptr(), data.len()) });
                Ok(())
            }
            #[cfg(feature = "_driver")]
            Backend::Cuda(d) => d.read(from, data),
        }
    }
}

impl Drop for Storage {
    fn drop(&mut self) {
        let Memory::Foreign { lent, owner } = &mut self.memory else { return };
        drop(lent.take());
        let Some(owner) = owner.take() else { return };
        // As freeing memory of our own does: when all work of the device is done.
        match self.device.backend() {
            Backend::Simt(d) => {
                d.host_waits();
                drop(owner);
            }
            #[cfg(feature = "_driver")]
            Backend::Cuda(d) => d.release(owner),
        }
    }
}

/// How a kernel is launched: grid and block, and what comes with them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
#[must_use]
pub struct Geometry {
    /// Blocks in x, y, z. A launch with a zero anywhere does nothing.
    pub grid: [u32; 3],
    /// Threads of a block in x, y, z.
    pub block: [u32; 3],
    /// Dynamic shared memory of a block.
    pub shared_bytes: u32,
    /// Blocks of a cluster (along x); 1 for none.
    pub cluster: u32,
    /// Whether the kernel may start before the one before it in the stream is done (programmatic dependent launch,
    /// `CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION`); it then waits by itself where it needs to. Without effect
    /// for kernels built for `sm_80`; on the SIMT device the race detector reports what it touches before it waits.
    pub dependent: bool,
    /// Whether blocks wait for each other or for other launches, so that the SIMT device must run all of them at the same
    /// time. On a GPU the grid must be small enough for that by itself.
    pub resident: bool,
    /// Whether no multiprocessor should get more than its part of the blocks where all of them run at once. Without, blocks of a
    /// [`dependent`](Self::dependent) launch crowd where the kernel before ends first. A hint: blocks ask for more shared memory then. Without effect
    /// where `dependent` has none.
    pub evenly: bool,
}

impl Geometry {
    /// A one-dimensional launch.
    pub const fn linear(blocks: u32, threads: u32) -> Self {
        Self::new([blocks, 1, 1], [threads, 1, 1])
    }

    /// A launch of any shape, without dynamic shared memory.
    pub const fn new(grid: [u32; 3], block: [u32; 3]) -> Self {
        Self { grid, block, shared_bytes: 0, cluster: 1, dependent: false, resident: false, evenly: false }
    }

    /// With this much dynamic shared memory.
    pub const fn shared_bytes(mut self, bytes: u32) -> Self {
        self.shared_bytes = bytes;
        self
    }

    /// With clusters of this many blocks.
    pub const fn cluster(mut self, blocks: u32) -> Self {
        self.cluster = blocks;
        self
    }

    /// As a programmatic dependent launch.
    pub const fn dependent(mut self) -> Self {
        self.dependent = true;
        self
    }

    /// As a programmatic dependent launch of what relies on the launch before to have waited: not if nothing runs there.
    pub(crate) const fn dependent_on(self, before: &Self) -> Self {
        if before.is_empty() { self } else { self.dependent() }
    }

    /// With blocks that run at the same time.
    pub const fn resident(mut self) -> Self {
        self.resident = true;
        self
    }

    /// With blocks spread evenly over the multiprocessors.
    pub const fn evenly(mut self) -> Self {
        self.evenly = true;
        self
    }

    /// Whether nothing would run.
    pub const fn is_empty(&self) -> bool {
        self.grid[0] == 0 || self.grid[1] == 0 || self.grid[2] == 0
    }
}

#[cfg(all(test, not(feature = "simt")))]
mod tests {
    use super::*;
    use crate::Tensor;

    #[test]
    fn without_its_kernels_the_simt_device_has_memory_alone() {
        let device = Device::simt();
        let stream = Stream::new(&device).unwrap();
        let x = Tensor::from_slice(&device, &[3.0f32, 4.0], &[1, 2]).unwrap();
        let mut y = Tensor::<f32>::zeros(&device, &[1, 2]).unwrap();
        let error = crate::norm::rms_norm(&stream, &mut y, &x, None, 0.0).unwrap_err();
        assert!(matches!(error, Error::NoSimt), "{error}");
        assert!(error.to_string().contains("feature `simt`"), "{error}");
        stream.copy(&mut y, &x).unwrap();
        assert_eq!(y.to_vec().unwrap(), [3.0, 4.0]);
        device.preload(&["norm", "rms_norm_any_bf16", "moe"]).unwrap();
        let error = device.preload(&["norm", "rms_norm_any_bf"]).unwrap_err();
        assert!(error.to_string().contains("`rms_norm_any_bf`"), "{error}");
        // There is no device that could run kernels, which `auto` says.
        #[cfg(not(feature = "_driver"))]
        assert!(matches!(Device::auto(), Err(Error::NoCuda)));
    }
}
