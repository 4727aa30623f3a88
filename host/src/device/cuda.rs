//! NVIDIA GPUs through the CUDA driver.
//!
//! Everything belongs to a [`Context`]: the primary context of a GPU, which the CUDA runtime and other libraries use as
//! well, or one that was current when [`CudaDevice::current`] was called. Primary contexts are retained once and kept
//! until the process ends, as the CUDA runtime does, so that all `Device`s of a GPU share loaded modules.
//!
//! **Current contexts.** Each call looks at the calling thread's current context, which costs some 20 ns, and changes it
//! only if it is another one; afterwards a thread that had one gets it back.
//!
//! **Modules** hold one entry each and are loaded at its first launch, or by `preload`, from the PTX for the GPU: `sm_90a`
//! on compute capability 9.0, `sm_80` on all others. The driver takes 35 to 1100 ms to compile an entry and up to most
//! of a minute for a family, so a program waits only for what it launches. A launch finds its function by the address of
//! the entry's name, in a map behind a lock that only loading writes to.
//!
//! **Copies from and to the host** run on a stream of the context's own, after a wait for everything before. They are
//! complete when they return: a synchronous copy by the driver may leave the last transfer from pageable memory pending,
//! which streams that do not wait for the default stream would overtake.
//!
//! **Captures.** While any stream of a context is captured, the driver refuses to wait for the whole context, and the
//! capture is void if somebody tries. So a wait for all work waits for each stream that is not being captured, and for what the others had
//! before, which the stream of copies waits for, as it does for what streams had that were dropped; and `capturing` keeps captures from starting, and streams from joining one, in the midst of a wait. It counts the
//! streams of its own context: one that joins a capture of another GPU's counts here, not there. Captures are in relaxed mode: tensors may be made and dropped meanwhile.
//!
//! **Captures of others.** Of streams that this crate works with, the driver is asked. What their owner captures cannot be waited for, and nobody has ordered what it had before: memory
//! of somebody else that was to be given back after a wait is [kept](Context::release) until one succeeds. In another thread's capture of global mode, calls that allocate, free or wait would void it: they are made in
//! relaxed mode ([`Context::bind_beside_captures`]).
//!
//! **Threads.** Handles of the driver may be used from any thread; CUDA's manual exempts graphs, which are used
//! under a lock here.

use super::capturing::{Capturing, Counted};
use super::stream::Captures;
use super::{Geometry, Properties, SHARED_BYTES_8_6};
use crate::driver::sys::{
    CUcontext, CUdevice, CUdevice_attribute_enum as Attribute, CUdeviceptr, CUevent, CUevent_flags_enum as EventFlags,
    CUfunction, CUfunction_attribute_enum as FunctionAttribute, CUgraph, CUgraphExec, CUjit_option_enum as JitOption,
    CUmodule, CUstream, CUstream_flags_enum as StreamFlags, CUstreamCaptureMode_enum as CaptureMode,
    CUstreamCaptureStatus_enum as CaptureStatus,
};
use crate::driver::{self, CUDA_ERROR_INVALID_HANDLE, Driver, LaunchAttribute, LaunchConfig};
use crate::error::{Error, Result};
use crate::ptx;
use cuda_std::tma::{TensorMap, TensorMapDescription};
use cuda_std::{Arch, DType, Entry, KernelArgs};
use std::collections::HashMap;
use std::ffi::{CString, c_int, c_uint, c_void};
use std::ptr::{NonNull, null, null_mut};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, Weak};

/// Dynamic shared memory that every kernel may ask for without further ado.
const FREE_SHARED_BYTES: u32 = 48 * 1024;
/// What a multiprocessor lends to blocks that are to be spread [evenly](Geometry::evenly), in KiB: what each of them may have where so many fit that
/// no multiprocessor gets too many. The rest is left to the first-level cache, through which loads come. Every GPU from sm_80 on has this choice.
const SHARED_EVENLY: u32 = 100;
/// Blocks of a cluster that every GPU with clusters takes.
const PORTABLE_CLUSTER: u32 = 8;
/// What the driver says where there is not enough memory.
const NO_MEMORY: i32 = driver::CUDA_ERROR_OUT_OF_MEMORY;
/// What it may say of a size that no address space holds: the only argument of an allocation that can be wrong.
const TOO_MUCH: i32 = driver::CUDA_ERROR_INVALID_VALUE;
/// What an allocation of no bytes has for an address, which is never read.
const EMPTY: CUdeviceptr = crate::tensor::EMPTY as CUdeviceptr;

/// How many GPUs there are.
pub(super) fn count() -> Result<usize> {
    let mut count = 0;
    // SAFETY: the address is that of an integer.
    unsafe { driver::get()?.device_count(&raw mut count)? };
    Ok(usize::try_from(count).unwrap_or(0))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing that is done under these locks can leave their contents half-changed.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A CUDA context and what this crate has in it.
struct Context {
    driver: &'static Driver,
    raw: CUcontext,
    device: CUdevice,
    ordinal: usize,
    name: String,
    properties: Properties,
    /// Which PTX the GPU gets.
    arch: Arch,
    /// For copies from and to the host.
    copies: CUstream,
    /// Recorded in a stream for which copies are to wait, and waited for while nobody else records it.
    before_copies: Mutex<CUevent>,
    /// What is to be dropped after the next wait for all work that succeeds.
    kept: Mutex<Vec<Box<dyn Send + Sync>>>,
    /// Streams that this crate works with, by address; one may be there several times.
    streams: Mutex<Vec<(CUstream, Weak<Captures>)>>,
    /// Streams that are being captured.
    capturing: Arc<Capturing>,
    /// What is loaded or being loaded, by the entry's name.
    loaded: Mutex<HashMap<&'static str, Arc<Loading>>>,
    /// By address and length of the entry's name.
    functions: RwLock<HashMap<(usize, usize), Arc<Function>>>,
}

// SAFETY: contexts, streams, modules and functions are handles that the driver lets every thread use.
unsafe impl Send for Context {}
// SAFETY: as above; what is ours is behind locks.
unsafe impl Sync for Context {}

/// An entry's function, once it is loaded; locked while it is being loaded. Its module is unloaded with its context.
type Loading = Mutex<Option<Arc<Function>>>;

struct Function {
    raw: CUfunction,
    /// Whether it waits for the kernels before it, as one that may start before they are done must.
    waits: bool,
    /// Whether the limits of dynamic shared memory and cluster size have been lifted.
    unlimited: AtomicBool,
}

// SAFETY: a function is a handle that the driver lets every thread use.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

/// A GPU.
pub(crate) struct CudaDevice(Arc<Context>);

/// While this lives, the context is current on this thread.
struct Bound {
    driver: &'static Driver,
    /// The context to go back to; null for none.
    before: CUcontext,
    /// The thread's mode of capture to go back to, if it was changed.
    mode: Option<c_int>,
}

impl Drop for Bound {
    fn drop(&mut self) {
        if let Some(mode) = &mut self.mode {
            // SAFETY: the address is that of an integer.
            let _ = unsafe { self.driver.thread_exchange_capture_mode(mode) };
        }
        if !self.before.is_null() {
            // SAFETY: it was current before. An error would come back from the next call that matters.
            let _ = unsafe { self.driver.ctx_set_current(self.before) };
        }
    }
}

impl Context {
    /// The parts of `raw`, a context of `device` that is current.
    fn new(driver: &'static Driver, raw: CUcontext, device: CUdevice, ordinal: usize) -> Result<Self> {
        let attribute = |attribute: Attribute| -> Result<u32> {
            let mut value = 0;
            // SAFETY: the address is that of an integer.
            unsafe { driver.device_attribute(&raw mut value, attribute as c_int, device)? };
            Ok(u32::try_from(value).unwrap_or(0))
        };
        let mut name = [0u8; 128];
        // SAFETY: the buffer is as long as said; the driver terminates what it writes.
        unsafe { driver.device_name(name.as_mut_ptr().cast(), name.len() as c_int, device)? };
        let name = name.split(|&b| b == 0).next().map(String::from_utf8_lossy).unwrap_or_default();
        let name = format!("cuda:{ordinal} ({name})");

        let capability = (
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        );
        let shared = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)? as usize;
        let told = std::env::var(AS_IF).unwrap_or_default();
        let (capability, max_shared_bytes) = as_if(&told, capability, shared)?;
        let name = if told.is_empty() { name } else { format!("{name} as {told}") };
        let too_old = || super::too_old(name.clone(), capability, "every kernel".into(), Arch::Sm80);
        let arch = arch_of(capability).ok_or_else(too_old)?;
        check_ptx(driver, ptx::version(arch))?;

        let mut memory = 0;
        // SAFETY: the address is that of an integer.
        unsafe { driver.device_memory(&raw mut memory, device)? };
        let properties = Properties {
            compute_capability: capability,
            multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            max_shared_bytes,
            memory_bytes: memory as u64,
        };
        let mut copies = null_mut();
        // SAFETY: the address is that of a handle, and the context is current.
        unsafe { driver.stream_create(&raw mut copies, StreamFlags::CU_STREAM_NON_BLOCKING as c_uint)? };
        let mut before_copies = null_mut();
        // SAFETY: as above.
        unsafe { driver.event_create(&raw mut before_copies, EventFlags::CU_EVENT_DISABLE_TIMING as c_uint)? };
        Ok(Self {
            driver,
            raw,
            device,
            ordinal,
            name,
            properties,
            arch,
            copies,
            before_copies: Mutex::new(before_copies),
            kept: Mutex::default(),
            streams: Mutex::default(),
            capturing: Arc::default(),
            loaded: Mutex::default(),
            functions: RwLock::default(),
        })
    }

    /// The primary context of a GPU, retained for the life of the process.
    fn primary(ordinal: usize) -> Result<Arc<Self>> {
        static PRIMARY: Mutex<Vec<Arc<Context>>> = Mutex::new(Vec::new());
        let mut primary = lock(&PRIMARY);
        if let Some(context) = primary.iter().find(|c| c.ordinal == ordinal) {
            return Ok(context.clone());
        }
        let driver = driver::get().map_err(|e| match e {
            Error::NoDevice { found, .. } => Error::NoDevice { ordinal, found },
            e => e,
        })?;
        let found = count()?;
        if ordinal >= found {
            return Err(Error::NoDevice { ordinal, found });
        }
        let (mut device, mut raw, mut before) = (0, null_mut(), null_mut());
        // SAFETY: the addresses are those of an integer and handles.
        unsafe {
            driver.ctx_get_current(&raw mut before)?;
            driver.device_get(&raw mut device, ordinal as c_int)?;
            driver.primary_ctx_retain(&raw mut raw, device)?;
        }
        let context = bind(driver, raw).and_then(|_bound| Self::new(driver, raw, device, ordinal));
        if context.is_err() {
            // SAFETY: retained above, and nobody has it; what was current before may be none.
            let _ = unsafe { driver.ctx_set_current(before).and_then(|()| driver.primary_ctx_release(device)) };
        }
        let context = Arc::new(context?);
        primary.push(context.clone());
        Ok(context)
    }

    /// The context that is current on this thread; `any`: one that is not the GPU's primary one, too.
    fn current(any: bool) -> Result<Arc<Self>> {
        let driver = driver::get()?;
        let (mut raw, mut device, mut primary) = (null_mut(), 0, null_mut());
        let (mut flags, mut active) = (0, 0);
        // SAFETY: the addresses are those of integers and handles.
        unsafe {
            driver.ctx_get_current(&raw mut raw)?;
            // Without a current context this fails with the driver's word for it.
            driver.ctx_get_device(&raw mut device)?;
            driver.primary_ctx_state(device, &raw mut flags, &raw mut active)?;
            if active != 0 {
                // Only to learn its handle. It stays alive, since whoever made it active holds it.
                driver.primary_ctx_retain(&raw mut primary, device)?;
                driver.primary_ctx_release(device)?;
            }
        }
        let ordinal = usize::try_from(device).unwrap_or(0);
        if raw == primary {
            Self::primary(ordinal)
        } else if any {
            Self::other(driver, raw, device, ordinal)
        } else {
            let what = "the current context is not the GPU's primary one; see Device::cuda_current_context".into();
            Err(Error::Unsupported { op: "Device::cuda_current", what })
        }
    }

    /// A context that is no primary one. As long as it is used it is one `Context`: waits must know of all that is captured in it.
    fn other(driver: &'static Driver, raw: CUcontext, device: CUdevice, ordinal: usize) -> Result<Arc<Self>> {
        static OTHERS: Mutex<Vec<Weak<Context>>> = Mutex::new(Vec::new());
        let mut others = lock(&OTHERS);
        others.retain(|c| c.strong_count() > 0);
        if let Some(context) = others.iter().filter_map(Weak::upgrade).find(|c| c.raw == raw) {
            return Ok(context);
        }
        let context = Arc::new(Self::new(driver, raw, device, ordinal)?);
        others.push(Arc::downgrade(&context));
        Ok(context)
    }

    /// Makes the context current on this thread, if it is not.
    #[inline]
    fn bind(&self) -> Result<Bound> {
        bind(self.driver, self.raw)
    }

    /// As [`bind`](Self::bind), for calls that are refused, and void the capture, while another thread captures a stream in global mode, but in relaxed mode.
    fn bind_beside_captures(&self) -> Result<Bound> {
        let mut bound = self.bind()?;
        let mut mode = CaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED as c_int;
        // SAFETY: the address is that of an integer.
        unsafe { self.driver.thread_exchange_capture_mode(&raw mut mode)? };
        bound.mode = Some(mode);
        Ok(bound)
    }

    /// Waits for all work in the context; what is being captured is none.
    fn synchronize(&self) -> Result<()> {
        let kept = std::mem::take(&mut *lock(&self.kept));
        let waited = self.wait_for_all();
        if !matches!(waited, Ok(true)) {
            lock(&self.kept).extend(kept);
        }
        waited.map(drop)
    }

    /// Drops `owner`, whose memory kernels may still use, when all work in the context is done: after the next wait that succeeds if one now does not.
    fn release(&self, owner: Box<dyn Send + Sync>) {
        if !matches!(self.wait_for_all(), Ok(true)) {
            lock(&self.kept).push(owner);
        }
    }

    /// Waits for all work in the context, and says whether nothing was left out: what a stream had before its owner captured it.
    fn wait_for_all(&self) -> Result<bool> {
        let _bound = self.bind_beside_captures()?;
        let waiting = self.capturing.wait();
        let streams = lock(&self.streams);
        let captured = |stream: CUstream| {
            let mut status = 0;
            // The default stream cannot be asked while a stream that waits for it is being captured.
            // SAFETY: streams are in the list as long as they live, and the address is that of an integer.
            let asked = unsafe { self.driver.stream_is_capturing(stream, &raw mut status) };
            asked.is_err() || status != CaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE as c_int
        };
        if !waiting.captured && !streams.iter().any(|&(stream, _)| captured(stream)) {
            drop(streams);
            // SAFETY: the context is current.
            return unsafe { self.driver.ctx_synchronize() }.map(|()| true);
        }
        // They come after all that was submitted to a stream before this crate captured it, or dropped it.
        // SAFETY: the stream lives as long as the context, and nobody captures it.
        unsafe { self.driver.stream_synchronize(self.copies)? };
        let mut all = true;
        for (stream, captures) in streams.iter() {
            if captured(*stream) {
                all &= captures.upgrade().is_some_and(|captures| captures.capturing());
            } else {
                // SAFETY: streams are in the list as long as they live.
                unsafe { self.driver.stream_synchronize(*stream)? };
            }
        }
        Ok(all)
    }

    /// The function of an entry, loaded if it is not. The lock is that entry's alone, so that nothing is compiled twice.
    fn load(&self, family: &'static str, name: &'static str) -> Result<Arc<Function>> {
        let loading = lock(&self.loaded).entry(name).or_default().clone();
        let mut loaded = lock(&loading);
        if let Some(function) = &*loaded {
            return Ok(function.clone());
        }
        let text = ptx::entry(self.arch, family, name).ok_or_else(|| Error::Unsupported {
            op: name,
            what: format!(
                "the PTX of `{family}` for {} has no such entry; `cargo xtask ptx` rebuilds it",
                self.arch.name()
            ),
        })?;
        let newer = self.arch == Arch::Sm80
            && self.properties.compute_capability >= (8, 9)
            && driver::oldest_for_ptx((8, 1)) <= self.driver.version();
        let text = if newer { ptx::with_e4m3(&text).unwrap_or(text) } else { text };
        let _bound = self.bind_beside_captures()?;
        let function = Arc::new(Function::load(self.driver, text, name).map_err(|e| of_kernel(e, name))?);
        *loaded = Some(function.clone());
        Ok(function)
    }

    #[inline]
    fn function<A: KernelArgs>(&self, entry: &Entry<A>) -> Result<Arc<Function>> {
        let key = (entry.name.as_ptr() as usize, entry.name.len());
        let known = self.functions.read().unwrap_or_else(PoisonError::into_inner).get(&key).cloned();
        known.map_or_else(|| self.find_function(key, entry.name, entry.family, entry.arch), Ok)
    }

    #[cold]
    fn find_function(
        &self,
        key: (usize, usize),
        name: &'static str,
        family: &'static str,
        arch: Arch,
    ) -> Result<Arc<Function>> {
        if arch > self.arch {
            return Err(self.too_old(name));
        }
        let function = self.load(family, name)?;
        self.functions.write().unwrap_or_else(PoisonError::into_inner).insert(key, function.clone());
        Ok(function)
    }

    fn too_old(&self, kernel: &str) -> Error {
        let capability = self.properties.compute_capability;
        super::too_old(self.name.clone(), capability, format!("kernel {kernel}"), Arch::Sm90a)
    }

    /// Lets a function have as much shared memory and as large clusters as the GPU can give.
    #[cold]
    fn lift_limits(&self, function: &Function) -> Result<()> {
        use FunctionAttribute::{
            CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES as DYNAMIC, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES as STATIC,
        };
        /// `CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED`.
        const NON_PORTABLE_CLUSTER: c_int = 14;
        let mut fixed = 0;
        // SAFETY: the function is of this context, which is current.
        unsafe {
            self.driver.func_get_attribute(&raw mut fixed, STATIC as c_int, function.raw)?;
            let dynamic = self.properties.max_shared_bytes as c_int - fixed;
            self.driver.func_set_attribute(function.raw, DYNAMIC as c_int, dynamic)?;
            if self.arch == Arch::Sm90a {
                self.driver.func_set_attribute(function.raw, NON_PORTABLE_CLUSTER, 1)?;
            }
        }
        function.unlimited.store(true, Ordering::Release);
        Ok(())
    }
}

/// [`SHARED_EVENLY`] as a launch asks for it, of what a block can have. The driver of any GPU that PTX for `sm_90a` was loaded on knows the attribute.
fn carveout(max_shared_bytes: usize) -> u32 {
    // In hundredths, rounded down: the driver takes the next larger choice. A block has a kilobyte less than there is.
    (100 * 1024 * SHARED_EVENLY as usize / (max_shared_bytes + 1024)).min(100) as u32
}

/// The shared memory of a block of a launch that is to be spread [evenly](Geometry::evenly), if that is worth it: as much as lets a multiprocessor have its
/// part of the blocks and no more. Narrow blocks are not crowded where there are two for each. Measured on an H200.
fn even_share(geometry: &Geometry, multiprocessors: u32) -> Option<u32> {
    /// The most blocks of a multiprocessor on any GPU.
    const MOST: u64 = 32;
    let (blocks, threads) = (geometry.grid.map(u64::from), geometry.block.map(u64::from));
    let each = (blocks[0] * blocks[1]).saturating_mul(blocks[2]).div_ceil(u64::from(multiprocessors.max(1)));
    let least = if threads[0] * threads[1] * threads[2] < 192 { 3 } else { 2 };
    if !geometry.evenly || each < least || each > MOST {
        return None;
    }
    // The driver takes a kilobyte for each block.
    let bytes = (SHARED_EVENLY * 1024 / each as u32 - 1024) / 128 * 128;
    Some(bytes.min(FREE_SHARED_BYTES))
}

fn bind(driver: &'static Driver, raw: CUcontext) -> Result<Bound> {
    let mut current = null_mut();
    // SAFETY: the address is that of a handle.
    unsafe { driver.ctx_get_current(&raw mut current)? };
    if current == raw {
        return Ok(Bound { driver, before: null_mut(), mode: None });
    }
    // SAFETY: the context lives as long as the process, or as its owner promised.
    unsafe { driver.ctx_set_current(raw)? };
    Ok(Bound { driver, before: current, mode: None })
}

/// Which PTX a GPU gets.
fn arch_of(capability: (u32, u32)) -> Option<Arch> {
    match capability {
        (0..=7, _) => None,
        (9, 0) => Some(Arch::Sm90a),
        _ => Some(Arch::Sm80),
    }
}

/// The variable of the environment that has a GPU used as if it were one of another compute capability.
const AS_IF: &str = "WARPLOOM_AS_IF";

/// Compute capability and shared memory of a block as [`AS_IF`] has them, which may take away from what there is.
fn as_if(told: &str, capability: (u32, u32), shared: usize) -> Result<((u32, u32), usize)> {
    let (as_if, most) = match told {
        "" => return Ok((capability, shared)),
        // An A100's.
        "sm_80" => ((8, 0), 163 * 1024),
        "sm_86" => ((8, 6), SHARED_BYTES_8_6),
        "sm_89" => ((8, 9), SHARED_BYTES_8_6),
        _ => {
            return Err(Error::Value {
                op: "Device::cuda",
                arg: AS_IF,
                expected: "`sm_80`, `sm_86` or `sm_89`".into(),
                got: format!("`{told}`"),
            });
        }
    };
    Ok((as_if.min(capability), shared.min(most)))
}

/// The driver is new enough for the PTX.
fn check_ptx(driver: &Driver, version: (u32, u32)) -> Result<()> {
    let needed = driver::oldest_for_ptx(version);
    if needed > driver.version() { Err(driver::too_old(driver.version(), needed)) } else { Ok(()) }
}

/// The same error, naming the kernel.
#[cold]
fn of_kernel(error: Error, name: &'static str) -> Error {
    match error {
        Error::Driver { call, code, name: error, log, .. } => {
            Error::Driver { call, code, name: error, kernel: Some(name), log }
        }
        e => e,
    }
}

impl Function {
    /// Compiles and loads the PTX of one entry. The context is current.
    fn load(driver: &'static Driver, text: String, name: &'static str) -> Result<Self> {
        let version = driver::ptx_version(&text);
        let waits = text.contains("griddepcontrol.wait");
        let no_nul = |_| Error::Unsupported { op: name, what: "PTX with a NUL in the midst of it".into() };
        let image = CString::new(text).map_err(no_nul)?;
        let symbol = CString::new(name).map_err(no_nul)?;
        let mut log = vec![0u8; 16 * 1024];
        let mut keys =
            [JitOption::CU_JIT_ERROR_LOG_BUFFER as c_int, JitOption::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES as c_int];
        // The driver takes numbers in place of pointers.
        let mut values = [log.as_mut_ptr().cast::<c_void>(), log.len() as *mut c_void];
        let mut raw: CUmodule = null_mut();
        // SAFETY: the image ends with a NUL, there are two options, and the buffer is as long as said.
        let loaded = unsafe {
            driver.module_load_data_ex(
                &raw mut raw,
                image.as_ptr().cast(),
                keys.len() as c_uint,
                keys.as_mut_ptr(),
                values.as_mut_ptr(),
            )
        };
        loaded.map_err(|e| match e {
            Error::Driver { code: driver::CUDA_ERROR_UNSUPPORTED_PTX_VERSION, .. } => {
                driver::too_old(driver.version(), driver::oldest_for_ptx(version.unwrap_or((0, 0))))
            }
            Error::Driver { call, code, name, .. } => {
                let end = log.iter().position(|&b| b == 0).unwrap_or(log.len());
                let log = String::from_utf8_lossy(&log[..end]).trim_end().to_string();
                Error::Driver { call, code, name, kernel: None, log }
            }
            e => e,
        })?;
        let mut function: CUfunction = null_mut();
        // Drivers that load lazily load a function when it is looked up.
        // SAFETY: the module was just loaded; the name ends with a NUL.
        unsafe { driver.module_get_function(&raw mut function, raw, symbol.as_ptr())? };
        Ok(Self { raw: function, waits, unlimited: AtomicBool::new(false) })
    }
}

impl CudaDevice {
    pub(super) fn new(ordinal: usize) -> Result<Self> {
        Context::primary(ordinal).map(Self)
    }

    pub(super) fn current() -> Result<Self> {
        Context::current(false).map(Self)
    }

    pub(super) fn current_context() -> Result<Self> {
        Context::current(true).map(Self)
    }

    pub(super) fn properties(&self) -> Properties {
        self.0.properties
    }

    pub(super) fn name(&self) -> String {
        self.0.name.clone()
    }

    pub(super) fn ordinal(&self) -> usize {
        self.0.ordinal
    }

    /// Bytes free and in all.
    pub(super) fn memory(&self) -> Result<(u64, u64)> {
        let _bound = self.0.bind_beside_captures()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: the addresses are those of integers.
        unsafe { self.0.driver.mem_get_info(&raw mut free, &raw mut total)? };
        Ok((free as u64, total as u64))
    }

    /// Loads entries, given as family and name.
    pub(super) fn preload(&self, entries: &[(&'static str, &'static str)]) -> Result<()> {
        // One after the other: the driver compiles for one thread at a time (moe: 9.6 s on one thread, 10.2 on eight).
        entries.iter().try_for_each(|&(family, name)| self.0.load(family, name).map(drop))
    }

    /// Which PTX the GPU gets.
    pub(super) fn arch(&self) -> Arch {
        self.0.arch
    }

    pub(super) fn synchronize(&self) -> Result<()> {
        self.0.synchronize()
    }

    /// Drops what keeps memory alive that kernels may still use, when they are done.
    pub(super) fn release(&self, owner: Box<dyn Send + Sync>) {
        self.0.release(owner);
    }

    pub(super) fn same_context(&self, other: &Self) -> bool {
        self.0.raw == other.0.raw
    }

    /// Lets kernels of this GPU use the memory of `peer`.
    pub(super) fn enable_peer_access(&self, peer: &Self) -> Result<()> {
        if self.same_context(peer) {
            return Ok(());
        }
        let context = &self.0;
        let _bound = context.bind()?;
        let mut can = 0;
        // SAFETY: the address is that of an integer; both are devices.
        unsafe { context.driver.device_can_access_peer(&raw mut can, context.device, peer.0.device)? };
        if can == 0 {
            return Err(Error::Unsupported {
                op: "Device::enable_peer_access",
                what: format!("{} cannot reach the memory of {}", context.name, peer.0.name),
            });
        }
        // SAFETY: the context is current and the peer's is alive.
        match unsafe { context.driver.ctx_enable_peer_access(peer.0.raw, 0) } {
            Err(Error::Driver { code: driver::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED, .. }) => Ok(()),
            other => other,
        }
    }

    /// What no other GPU is called.
    pub(super) fn uuid(&self) -> Result<[u8; 16]> {
        let mut uuid = [0; 16];
        // SAFETY: the address is that of 16 bytes.
        unsafe { self.0.driver.device_uuid(&raw mut uuid, self.0.device)? };
        Ok(uuid)
    }

    /// A name for an allocation of this GPU, by which another process finds it.
    pub(super) fn export(&self, address: *const u8) -> Result<[u8; 64]> {
        let _bound = self.0.bind()?;
        let mut handle = driver::IpcHandle([0; 64]);
        // SAFETY: the address is that of a handle; a wrong allocation is an error.
        unsafe { self.0.driver.ipc_get(&raw mut handle, address as CUdeviceptr)? };
        Ok(handle.0)
    }

    /// Maps an allocation of another process, of this GPU or another, for this one's kernels.
    pub(super) fn import(&self, handle: [u8; 64]) -> Result<CudaImport> {
        /// `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`.
        const PEER_ACCESS: u32 = 1;
        let _bound = self.0.bind()?;
        let mut address = EMPTY;
        // SAFETY: the address is that of an address; a handle of nothing is an error.
        unsafe { self.0.driver.ipc_open(&raw mut address, driver::IpcHandle(handle), PEER_ACCESS)? };
        Ok(CudaImport { context: self.0.clone(), address })
    }

    /// `description` is valid.
    pub(super) fn tensor_map(&self, description: &TensorMapDescription) -> Result<TensorMap> {
        /// `CU_TENSOR_MAP_L2_PROMOTION_L2_64B`: weights that are read once stream 2 to 8 % faster than with 256.
        const PROMOTION: c_int = 1;
        if self.0.arch != Arch::Sm90a {
            return Err(self.0.too_old("with tensor maps"));
        }
        let d = description;
        // `CU_TENSOR_MAP_DATA_TYPE_UINT8` and so on: types matter only to reductions.
        let element = match d.dtype {
            DType::U32 => 2,
            DType::I32 => 3,
            DType::U64 => 4,
            DType::I64 => 5,
            DType::F16 => 6,
            DType::F32 => 7,
            DType::Bf16 => 9,
            _ => 0,
        };
        let mut map = TensorMap([0; 16]);
        // SAFETY: the arrays have five elements, or four, which is as many as any rank needs; the map is aligned to
        // 64 bytes. Nothing is read from the base.
        unsafe {
            self.0.driver.tensor_map_encode_tiled(
                &raw mut map,
                element,
                d.rank,
                d.base as *mut c_void,
                d.dims.as_ptr(),
                d.strides.as_ptr(),
                d.box_dims.as_ptr(),
                [1; 5].as_ptr(),
                0,
                d.swizzle as c_int,
                PROMOTION,
                0,
            )?;
        }
        Ok(map)
    }

    pub(super) fn allocate(&self, bytes: usize) -> Result<CudaMemory> {
        let mut address = EMPTY;
        if bytes > 0 {
            let _bound = self.0.bind_beside_captures()?;
            // SAFETY: the address is that of an address.
            unsafe { self.0.driver.mem_alloc(&raw mut address, bytes) }.map_err(|e| match e {
                Error::Driver { code: NO_MEMORY | TOO_MUCH, .. } => Error::OutOfMemory { device: self.name(), bytes },
                e => e,
            })?;
        }
        Ok(CudaMemory { context: self.0.clone(), address })
    }

    /// Copies to device memory, after all work on the device; done when it returns.
    pub(super) fn write(&self, to: *mut u8, data: &[u8]) -> Result<()> {
        self.copy_with_host(data.len(), |context| {
            // SAFETY: the storage checked the range.
            unsafe {
                context.driver.memcpy_htod_async(to as CUdeviceptr, data.as_ptr().cast(), data.len(), context.copies)
            }
        })
    }

    /// Sets device memory to zero, after all work on the device; done when it returns.
    pub(super) fn clear(&self, to: *mut u8, bytes: usize) -> Result<()> {
        self.copy_with_host(bytes, |context| {
            // SAFETY: the storage checked the range.
            unsafe { context.driver.memset_d8_async(to as CUdeviceptr, 0, bytes, context.copies) }
        })
    }

    /// Copies from device memory, after all work on the device.
    pub(super) fn read(&self, from: *const u8, data: &mut [u8]) -> Result<()> {
        self.copy_with_host(data.len(), |context| {
            let (to, bytes) = (data.as_mut_ptr().cast(), data.len());
            // SAFETY: the storage checked the range.
            unsafe { context.driver.memcpy_dtoh_async(to, from as CUdeviceptr, bytes, context.copies) }
        })
    }

    fn copy_with_host(&self, bytes: usize, copy: impl FnOnce(&Context) -> Result<()>) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        let context = &*self.0;
        let _bound = context.bind_beside_captures()?;
        context.synchronize()?;
        copy(context)?;
        // SAFETY: the stream lives as long as the context, and nobody captures it.
        unsafe { context.driver.stream_synchronize(context.copies) }
    }

    pub(super) fn new_stream(&self) -> Result<CudaStream> {
        let _bound = self.0.bind_beside_captures()?;
        let mut raw = null_mut();
        // SAFETY: the address is that of a handle.
        unsafe { self.0.driver.stream_create(&raw mut raw, StreamFlags::CU_STREAM_NON_BLOCKING as c_uint)? };
        Ok(self.stream(raw, true))
    }

    /// A stream that somebody else owns.
    pub(super) fn borrowed_stream(&self, raw: *mut c_void) -> CudaStream {
        self.stream(raw.cast(), false)
    }

    fn stream(&self, raw: CUstream, owned: bool) -> CudaStream {
        let mut streams = lock(&self.0.streams);
        let captures = streams.iter().filter(|s| s.0 == raw).find_map(|s| s.1.upgrade()).unwrap_or_default();
        streams.push((raw, Arc::downgrade(&captures)));
        CudaStream { context: self.0.clone(), raw, owned, captures }
    }

    pub(super) fn new_event(&self) -> Result<CudaEvent> {
        let _bound = self.0.bind_beside_captures()?;
        let mut raw = null_mut();
        // SAFETY: the address is that of a handle.
        unsafe { self.0.driver.event_create(&raw mut raw, EventFlags::CU_EVENT_DEFAULT as c_uint)? };
        Ok(CudaEvent { context: self.0.clone(), raw, recorded: AtomicBool::new(false) })
    }

    pub(super) fn allocate_pinned<T: cuda_std::Element>(&self, len: usize) -> Result<CudaPinned<T>> {
        /// `CU_MEMHOSTALLOC_PORTABLE`: pinned for all contexts.
        const PORTABLE: c_uint = crate::driver::sys::CU_MEMHOSTALLOC_PORTABLE;
        let out_of_memory = || Error::OutOfMemory {
            device: "pinned memory of the host".into(),
            bytes: len.saturating_mul(size_of::<T>()),
        };
        let bytes = len.checked_mul(size_of::<T>()).filter(|&n| n <= isize::MAX as usize).ok_or_else(out_of_memory)?;
        let mut data = NonNull::dangling();
        if bytes > 0 {
            let _bound = self.0.bind_beside_captures()?;
            let mut address = null_mut();
            // SAFETY: the address is that of a pointer.
            let result = unsafe { self.0.driver.mem_host_alloc(&raw mut address, bytes, PORTABLE) };
            result.map_err(|e| match e {
                Error::Driver { code: NO_MEMORY | TOO_MUCH, .. } => out_of_memory(),
                e => e,
            })?;
            data = NonNull::new(address.cast::<T>()).ok_or_else(out_of_memory)?;
            // SAFETY: so many bytes were allocated, and zero bytes are a value of every element type.
            unsafe { data.write_bytes(0, len) };
        }
        Ok(CudaPinned { context: self.0.clone(), data, len })
    }

    /// # Safety
    /// As for [`Stream::launch`](super::Stream::launch).
    #[inline]
    pub(super) unsafe fn launch<A: KernelArgs>(
        &self,
        stream: &CudaStream,
        entry: &Entry<A>,
        geometry: &Geometry,
        args: &A,
    ) -> Result<()> {
        let function = self.0.function(entry)?;
        // SAFETY: forwarded to the caller; the parameters live until the driver has copied them.
        unsafe { self.launch_function(stream, &function, entry.name, geometry, args.params().as_mut().as_mut_ptr()) }
    }

    /// # Safety
    /// As for [`Stream::launch`](super::Stream::launch); `params` are pointers to the function's parameters.
    unsafe fn launch_function(
        &self,
        stream: &CudaStream,
        function: &Function,
        name: &'static str,
        geometry: &Geometry,
        params: *mut *mut c_void,
    ) -> Result<()> {
        let context = &*self.0;
        let _bound = context.bind()?;
        if geometry.shared_bytes > FREE_SHARED_BYTES || geometry.cluster > PORTABLE_CLUSTER {
            if geometry.shared_bytes as usize > context.properties.max_shared_bytes {
                let most = context.properties.max_shared_bytes;
                return Err(super::too_much_shared(name, geometry.shared_bytes, &context.name, most));
            }
            if !function.unlimited.load(Ordering::Acquire) {
                context.lift_limits(function).map_err(|e| of_kernel(e, name))?;
            }
        }
        let (grid, block) = (geometry.grid, geometry.block);
        let hopper = context.arch == Arch::Sm90a;
        if geometry.cluster > 1 && !hopper {
            return Err(context.too_old(name));
        }
        // A kernel built for sm_80 has no instruction to wait for the one before it, so it must not start early.
        let dependent = geometry.dependent && function.waits;
        let share = even_share(geometry, context.properties.multiprocessors).filter(|_| dependent);
        let shared_bytes = geometry.shared_bytes.max(share.unwrap_or(0));
        let launched = if geometry.cluster <= 1 && !dependent {
            // SAFETY: forwarded to the caller; the function and the stream are of this context, which is current.
            unsafe {
                context.driver.launch_kernel(
                    function.raw,
                    grid[0],
                    grid[1],
                    grid[2],
                    block[0],
                    block[1],
                    block[2],
                    shared_bytes,
                    stream.raw,
                    params,
                    null_mut(),
                )
            }
        } else {
            let mut attributes = [LaunchAttribute::programmatic_stream_serialization(); 3];
            let mut count = usize::from(dependent);
            if geometry.cluster > 1 {
                attributes[count] = LaunchAttribute::cluster(geometry.cluster);
                count += 1;
            }
            if share.is_some() {
                attributes[count] = LaunchAttribute::shared_carveout(carveout(context.properties.max_shared_bytes));
                count += 1;
            }
            let config = LaunchConfig {
                grid,
                block,
                shared_bytes,
                stream: stream.raw,
                attributes: attributes.as_ptr(),
                attribute_count: count as c_uint,
            };
            // SAFETY: as above; the attributes live until the call returns.
            unsafe { context.driver.launch_kernel_ex(&raw const config, function.raw, params, null_mut()) }
        };
        launched.map_err(|e| of_kernel(e, name))
    }
}

/// Device memory. `cuMemFree` waits for work that is under way, so that it may be dropped at any time.
pub(super) struct CudaMemory {
    context: Arc<Context>,
    address: CUdeviceptr,
}

impl CudaMemory {
    pub(super) fn address(&self) -> *mut u8 {
        self.address as *mut u8
    }
}

impl Drop for CudaMemory {
    fn drop(&mut self) {
        if self.address != EMPTY
            && let Ok(_bound) = self.context.bind_beside_captures()
        {
            // SAFETY: allocated by the same context, and nobody has the address any more.
            let _ = unsafe { self.context.driver.mem_free(self.address) };
        }
    }
}

/// Memory of another process.
pub(super) struct CudaImport {
    context: Arc<Context>,
    address: CUdeviceptr,
}

impl CudaImport {
    pub(super) fn address(&self) -> *mut u8 {
        self.address as *mut u8
    }
}

impl Drop for CudaImport {
    fn drop(&mut self) {
        if let Ok(_bound) = self.context.bind_beside_captures() {
            // SAFETY: opened by the same context, and nobody has the address any more.
            let _ = unsafe { self.context.driver.ipc_close(self.address) };
        }
    }
}

/// A stream of a context.
pub(super) struct CudaStream {
    context: Arc<Context>,
    raw: CUstream,
    owned: bool,
    captures: Arc<Captures>,
}

// SAFETY: a stream is a handle that the driver lets every thread use.
unsafe impl Send for CudaStream {}
// SAFETY: as above.
unsafe impl Sync for CudaStream {}

impl CudaStream {
    pub(super) fn captures(&self) -> &Arc<Captures> {
        &self.captures
    }

    pub(super) fn raw(&self) -> *mut c_void {
        self.raw.cast()
    }

    pub(super) fn synchronize(&self) -> Result<()> {
        let _bound = self.context.bind_beside_captures()?;
        // SAFETY: the stream is alive.
        unsafe { self.context.driver.stream_synchronize(self.raw) }
    }

    /// # Safety
    /// As for [`Stream::copy_raw`](super::Stream::copy_raw).
    pub(super) unsafe fn copy(&self, dst: *mut u8, src: *const u8, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        let _bound = self.context.bind()?;
        // SAFETY: forwarded to the caller. Addresses of host and devices are of one space.
        unsafe { self.context.driver.memcpy_async(dst as CUdeviceptr, src as CUdeviceptr, bytes, self.raw) }
    }

    /// # Safety
    /// As for [`Stream::fill_raw`](super::Stream::fill_raw).
    pub(super) unsafe fn fill(&self, dst: *mut u8, byte: u8, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        let _bound = self.context.bind()?;
        // SAFETY: forwarded to the caller.
        unsafe { self.context.driver.memset_d8_async(dst as CUdeviceptr, byte, bytes, self.raw) }
    }

    /// Of an event of the same context.
    pub(super) fn record(&self, event: &CudaEvent) -> Result<()> {
        let _bound = self.context.bind()?;
        // SAFETY: both are alive and of one context.
        unsafe { self.context.driver.event_record(event.raw, self.raw)? };
        event.recorded.store(true, Ordering::Release);
        Ok(())
    }

    /// Of any device: that is how streams of several GPUs wait for each other.
    pub(super) fn wait(&self, event: &CudaEvent) -> Result<()> {
        let _bound = self.context.bind()?;
        // SAFETY: both are alive.
        unsafe { self.context.driver.stream_wait_event(self.raw, event.raw, 0) }
    }

    /// Lets copies from and to the host, and whoever waits for all work, wait for what was submitted so far: once the stream is captured,
    /// it cannot be waited for. The context is current.
    fn precede_copies(&self) -> Result<()> {
        let (driver, copies) = (self.context.driver, self.context.copies);
        let mut status = 0;
        // SAFETY: the streams are alive, the address is that of an integer, and what waits for an event waits for what was recorded when it was told to.
        unsafe {
            driver.stream_is_capturing(self.raw, &raw mut status)?;
            if status != CaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE as c_int {
                // By its owner: the event would be part of that capture, and so would be what waits for it.
                return Ok(());
            }
            let event = lock(&self.context.before_copies);
            driver.event_record(*event, self.raw)?;
            driver.stream_wait_event(copies, *event, 0)
        }
    }

    /// Waits for an event of a capture, of any device, in which the stream takes part from now on.
    pub(super) fn join_capture(&self, event: &CudaEvent) -> Result<Counted> {
        let _bound = self.context.bind()?;
        self.precede_copies()?;
        self.context.capturing.begin(|| self.wait(event))
    }

    /// Every success is followed by [`end_capture`](Self::end_capture).
    pub(super) fn begin_capture(&self) -> Result<Counted> {
        let _bound = self.context.bind()?;
        self.precede_copies()?;
        let mode = CaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED as c_int;
        // SAFETY: the stream is alive.
        self.context.capturing.begin(|| unsafe { self.context.driver.stream_begin_capture(self.raw, mode) })
    }

    pub(super) fn end_capture(&self) -> Result<CudaGraph> {
        let driver = self.context.driver;
        let bound = self.context.bind_beside_captures();
        let mut graph = null_mut();
        // SAFETY: the stream is alive, and its capture was begun.
        let ended =
            bound.and_then(|bound| unsafe { driver.stream_end_capture(self.raw, &raw mut graph) }.map(|()| bound));
        let _bound = ended.map_err(|error| match error {
            Error::Driver { code: driver::CUDA_ERROR_STREAM_CAPTURE_UNJOINED, .. } => super::graph::unjoined(),
            error => error,
        })?;
        let mut exec = null_mut();
        // SAFETY: the graph was just captured.
        if let Err(e) = unsafe { driver.graph_instantiate(&raw mut exec, graph, 0) } {
            // SAFETY: nobody else has it.
            let _ = unsafe { driver.graph_destroy(graph) };
            return Err(e);
        }
        Ok(CudaGraph { context: self.context.clone(), handles: Mutex::new(Handles { exec, graph }) })
    }
}

impl Drop for CudaStream {
    fn drop(&mut self) {
        let bound = self.context.bind();
        {
            let mut streams = lock(&self.context.streams);
            let same = streams.iter().filter(|s| s.0 == self.raw).count();
            if same == 1 && bound.is_ok() {
                // Who waits for all work does not know the stream any more. A failure would come back from the next call that matters.
                let _ = self.precede_copies();
            }
            if let Some(i) = streams.iter().position(|s| s.0 == self.raw) {
                streams.swap_remove(i);
            }
        }
        if self.owned && bound.is_ok() {
            // SAFETY: created by the same context. Work under way is done all the same.
            let _ = unsafe { self.context.driver.stream_destroy(self.raw) };
        }
    }
}

/// A point in a stream.
pub(super) struct CudaEvent {
    context: Arc<Context>,
    raw: CUevent,
    recorded: AtomicBool,
}

// SAFETY: an event is a handle that the driver lets every thread use.
unsafe impl Send for CudaEvent {}
// SAFETY: as above.
unsafe impl Sync for CudaEvent {}

impl CudaEvent {
    pub(super) fn synchronize(&self) -> Result<()> {
        let _bound = self.context.bind_beside_captures()?;
        // SAFETY: the event is alive.
        unsafe { self.context.driver.event_synchronize(self.raw) }
    }

    /// Of two events of one context; `None` if either was not recorded.
    pub(super) fn seconds_since(&self, earlier: &Self) -> Result<Option<f64>> {
        let recorded = |e: &Self| e.recorded.load(Ordering::Acquire);
        if !recorded(self) || !recorded(earlier) {
            return Ok(None);
        }
        let _bound = self.context.bind()?;
        let mut milliseconds = 0.0;
        // SAFETY: both are alive, and the address is that of a number.
        let elapsed = unsafe {
            self.context.driver.event_synchronize(self.raw)?;
            self.context.driver.event_elapsed_time(&raw mut milliseconds, earlier.raw, self.raw)
        };
        match elapsed {
            // Recorded in a capture only.
            Err(Error::Driver { code: CUDA_ERROR_INVALID_HANDLE | driver::CUDA_ERROR_INVALID_VALUE, .. }) => Ok(None),
            other => other.map(|()| Some(f64::from(milliseconds) * 1e-3)),
        }
    }
}

impl Drop for CudaEvent {
    fn drop(&mut self) {
        if let Ok(_bound) = self.context.bind() {
            // SAFETY: created by the same context. What waits for it still does.
            let _ = unsafe { self.context.driver.event_destroy(self.raw) };
        }
    }
}

/// An executable graph. The driver's graphs are not for several threads at a time, hence the lock.
pub(super) struct CudaGraph {
    context: Arc<Context>,
    handles: Mutex<Handles>,
}

struct Handles {
    exec: CUgraphExec,
    /// What `exec` was made from, and what becomes part of an outer graph.
    graph: CUgraph,
}
// SAFETY: a graph may be used by any thread, by one at a time.
unsafe impl Send for Handles {}

impl CudaGraph {
    /// Launches the graph; on a stream that is being captured, by us or by its owner, makes it part of what is collected,
    /// where the driver would refuse a launch.
    pub(super) fn launch(&self, stream: *mut c_void) -> Result<()> {
        let _bound = self.context.bind()?;
        let driver = self.context.driver;
        let handles = lock(&self.handles);
        let stream = stream.cast();
        let (mut status, mut id, mut outer, mut nodes, mut count) = (0, 0, null_mut(), null(), 0);
        let mut child = null_mut();
        // SAFETY: the graphs and the stream are alive and of one context; `nodes` are used before the stream's next call.
        unsafe {
            driver.stream_capture_info(
                stream,
                &raw mut status,
                &raw mut id,
                &raw mut outer,
                &raw mut nodes,
                &raw mut count,
            )?;
            if status == CaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE as i32 {
                return driver.graph_launch(handles.exec, stream);
            }
            driver.graph_add_child(&raw mut child, outer, nodes, count, handles.graph)?;
            driver.stream_update_capture(stream, &raw mut child, 1, driver::STREAM_SET_CAPTURE_DEPENDENCIES)
        }
    }

    pub(super) fn upload(&self, stream: *mut c_void) -> Result<()> {
        let _bound = self.context.bind()?;
        // SAFETY: as for `launch`.
        unsafe { self.context.driver.graph_upload(lock(&self.handles).exec, stream.cast()) }
    }
}

impl Drop for CudaGraph {
    fn drop(&mut self) {
        if let Ok(_bound) = self.context.bind_beside_captures() {
            let handles = lock(&self.handles);
            // SAFETY: of the same context. Launches under way are done all the same.
            unsafe {
                let _ = self.context.driver.graph_exec_destroy(handles.exec);
                let _ = self.context.driver.graph_destroy(handles.graph);
            }
        }
    }
}

/// Page-locked host memory.
pub(super) struct CudaPinned<T> {
    context: Arc<Context>,
    data: NonNull<T>,
    len: usize,
}

// SAFETY: owns its elements like a `Vec`.
unsafe impl<T: Send> Send for CudaPinned<T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for CudaPinned<T> {}

impl<T> CudaPinned<T> {
    pub(super) fn as_slice(&self) -> &[T] {
        // SAFETY: so many initialised elements are allocated.
        unsafe { std::slice::from_raw_parts(self.data.as_ptr(), self.len) }
    }

    pub(super) fn as_mut_slice(&mut self) -> &mut [T] {
        // SAFETY: as above, and borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.data.as_ptr(), self.len) }
    }
}

impl<T> Drop for CudaPinned<T> {
    fn drop(&mut self) {
        if self.len * size_of::<T>() > 0
            && let Ok(_bound) = self.context.bind_beside_captures()
        {
            // SAFETY: allocated by `mem_host_alloc`. Elements need no destructor.
            let _ = unsafe { self.context.driver.mem_free_host(self.data.as_ptr().cast()) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_gpu_gets_its_ptx() {
        assert_eq!(arch_of((7, 5)), None);
        assert_eq!(arch_of((8, 0)), Some(Arch::Sm80));
        assert_eq!(arch_of((8, 9)), Some(Arch::Sm80));
        assert_eq!(arch_of((9, 0)), Some(Arch::Sm90a));
        assert_eq!(arch_of((12, 0)), Some(Arch::Sm80));
    }

    #[test]
    fn a_gpu_can_be_used_as_if_it_were_less() {
        let hopper = ((9, 0), 227 * 1024);
        assert_eq!(as_if("", hopper.0, hopper.1).unwrap(), hopper);
        assert_eq!(as_if("sm_80", hopper.0, hopper.1).unwrap(), ((8, 0), 163 * 1024));
        assert_eq!(as_if("sm_86", hopper.0, hopper.1).unwrap(), ((8, 6), 99 * 1024));
        assert_eq!(as_if("sm_89", hopper.0, hopper.1).unwrap(), ((8, 9), 99 * 1024));
        assert_eq!(as_if("sm_86", (8, 0), 64 * 1024).unwrap(), ((8, 0), 64 * 1024));
        let error = as_if("sm_90", hopper.0, hopper.1).unwrap_err().to_string();
        assert!(error.contains("WARPLOOM_AS_IF") && error.contains("`sm_90`"), "{error}");
    }

    #[test]
    fn shared_memory_lets_a_multiprocessor_have_its_part_of_the_blocks() {
        let share = |blocks, threads| even_share(&Geometry::linear(blocks, threads).evenly(), 132);
        for each in 3..=27 {
            let bytes = share(132 * each, 128).unwrap() + 1024;
            assert_eq!(SHARED_EVENLY * 1024 / bytes, each);
        }
        assert_eq!(share(256, 256), Some(FREE_SHARED_BYTES));
        assert_eq!(carveout(227 * 1024), 43);
        assert!([share(132, 256), share(264, 128), share(132 * 33, 128)].iter().all(Option::is_none));
    }

    #[test]
    fn errors_name_the_kernel() {
        let error =
            Error::Driver { call: "cuX", code: 1, name: "CUDA_ERROR_X".into(), kernel: None, log: String::new() };
        assert_eq!(of_kernel(error, "rms_norm_f32").to_string(), "cuX failed: CUDA_ERROR_X (1), kernel rms_norm_f32");
    }
}
