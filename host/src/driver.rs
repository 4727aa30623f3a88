//! The CUDA driver: what cust leaves to be done.
//!
//! The driver's types and constants are cust's (`cust::sys`), or cudarc's where only the feature `cudarc` is on: both were
//! generated from `cuda.h` and have the same names. Its functions are looked up here at run time, in
//! `libcuda.so.1`, and return plain integers, for three reasons:
//!
//! * A program that calls cust's functions is linked against `libcuda.so.1` and does not even start where there is no
//!   driver. Types alone need nothing at run time: the linker drops a shared library that no symbol comes from. So one
//!   binary runs everywhere, and a missing driver is [`Error::NoDriver`].
//! * cust 0.3.2 declares `CUresult` as a Rust enum of CUDA 11.4's codes. Drivers of today return newer ones, and a
//!   value outside of a Rust enum is undefined behaviour. Here a code is an `i32`, and the driver itself names it.
//! * cust has no graph capture, peer access, large shared memory, launch attributes or tensor maps, strips `NON_BLOCKING`
//!   from new streams, and consumes an event that a stream waits for.
//!
//! `api!` is the table of all functions used. Each becomes a method of [`Driver`] that turns a code other than zero
//! into [`Error::Driver`].
//!
//! A library that has the functions but does nothing, such as a stub made for linking, reports version 0 or
//! `CUDA_ERROR_STUB_LIBRARY`, and is no driver either.

#[cfg(all(feature = "cudarc", not(feature = "cuda")))]
pub(crate) use cudarc::driver::sys;
#[cfg(feature = "cuda")]
pub(crate) use cust::sys;
#[cfg(not(any(feature = "cuda", feature = "cudarc")))]
compile_error!("`_driver` is what the features `cuda` and `cudarc` share: enable one of them");

use self::sys::{
    CUcontext, CUdevice, CUdeviceptr, CUevent, CUfunction, CUgraph, CUgraphExec, CUgraphNode, CUmodule, CUstream,
};
use crate::error::{Error, Result};
use crate::ptx;
use cuda_std::Arch;
use cuda_std::tma::TensorMap;
use libloading::Library;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::fmt;
use std::sync::OnceLock;

/// Where the driver is.
const LIBRARIES: &[&str] = if cfg!(windows) { &["nvcuda.dll"] } else { &["libcuda.so.1", "libcuda.so"] };

/// The oldest driver that has all functions of the table but the optional ones: CUDA 11.4.
const OLDEST: Version = Version(11040);

pub(crate) const CUDA_ERROR_INVALID_VALUE: i32 = 1;
pub(crate) const CUDA_ERROR_OUT_OF_MEMORY: i32 = 2;
const CUDA_ERROR_STUB_LIBRARY: i32 = 34;
const CUDA_ERROR_NO_DEVICE: i32 = 100;
pub(crate) const CUDA_ERROR_UNSUPPORTED_PTX_VERSION: i32 = 222;
pub(crate) const CUDA_ERROR_INVALID_HANDLE: i32 = 400;
pub(crate) const CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED: i32 = 704;
pub(crate) const CUDA_ERROR_STREAM_CAPTURE_UNJOINED: i32 = 904;
pub(crate) const STREAM_SET_CAPTURE_DEPENDENCIES: u32 = 1;

/// A CUDA version as the driver counts it: `1000 * major + 10 * minor`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Version(pub(crate) c_int);

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CUDA {}.{}", self.0 / 1000, self.0 % 1000 / 10)
    }
}

/// `CUlaunchConfig`, since CUDA 11.8.
#[repr(C)]
pub(crate) struct LaunchConfig {
    pub(crate) grid: [c_uint; 3],
    pub(crate) block: [c_uint; 3],
    pub(crate) shared_bytes: c_uint,
    pub(crate) stream: CUstream,
    pub(crate) attributes: *const LaunchAttribute,
    pub(crate) attribute_count: c_uint,
}

/// `CUipcMemHandle`: 64 opaque bytes, passed by value.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct IpcHandle(pub(crate) [u8; 64]);

/// `CUlaunchAttribute`: which, and a union of 64 bytes.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct LaunchAttribute {
    id: c_uint,
    padding: c_uint,
    value: [c_uint; 16],
}

impl LaunchAttribute {
    fn new(id: c_uint, value: [c_uint; 3]) -> Self {
        let mut this = Self { id, padding: 0, value: [0; 16] };
        this.value[..3].copy_from_slice(&value);
        this
    }

    /// `CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION`.
    pub(crate) fn cluster(blocks: u32) -> Self {
        Self::new(4, [blocks, 1, 1])
    }

    /// `CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION`.
    pub(crate) fn programmatic_stream_serialization() -> Self {
        Self::new(6, [1, 0, 0])
    }

    /// `CU_LAUNCH_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT`, since CUDA 12.5: the part of a multiprocessor's memory that is to be shared memory, in
    /// hundredths.
    pub(crate) fn shared_carveout(percent: u32) -> Self {
        Self::new(14, [percent, 0, 0])
    }
}

/// The driver's functions, by the names they have in the library.
///
/// Those under `since` may be missing; a call of one that is fails with the version that has it.
macro_rules! api {
    (
        always { $($name:ident = $symbol:literal ($($arg:ident: $ty:ty),*);)* }
        since { $($new:ident = $new_symbol:literal in $version:literal ($($new_arg:ident: $new_ty:ty),*);)* }
    ) => {
        struct Api {
            $($name: unsafe extern "C" fn($($ty),*) -> c_int,)*
            $($new: Option<unsafe extern "C" fn($($new_ty),*) -> c_int>,)*
        }

        impl Api {
            /// The name of the missing function if one is.
            ///
            /// # Safety
            /// The library's functions have these signatures.
            unsafe fn load(library: &Library) -> Result<Self, &'static str> {
                Ok(Self {
                    // SAFETY: promised by the caller.
                    $($name: unsafe { symbol(library, $symbol) }.ok_or($symbol)?,)*
                    // SAFETY: promised by the caller.
                    $($new: unsafe { symbol(library, $new_symbol) },)*
                })
            }
        }

        #[allow(clippy::too_many_arguments, reason = "the driver's functions have them")]
        impl Driver {
            $(
                #[doc = concat!("`", $symbol, "`.\n\n# Safety\nAs CUDA's manual demands.")]
                #[inline]
                pub(crate) unsafe fn $name(&self, $($arg: $ty),*) -> Result<()> {
                    // SAFETY: forwarded to the caller.
                    match unsafe { (self.api.$name)($($arg),*) } {
                        0 => Ok(()),
                        code => Err(self.error($symbol, code)),
                    }
                }
            )*
            $(
                #[doc = concat!("`", $new_symbol, "`.\n\n# Safety\nAs CUDA's manual demands.")]
                #[inline]
                pub(crate) unsafe fn $new(&self, $($new_arg: $new_ty),*) -> Result<()> {
                    let Some(f) = self.api.$new else {
                        return Err(too_old(self.version, Version($version)));
                    };
                    // SAFETY: forwarded to the caller.
                    match unsafe { f($($new_arg),*) } {
                        0 => Ok(()),
                        code => Err(self.error($new_symbol, code)),
                    }
                }
            )*
        }
    };
}

api! {
    always {
        init = "cuInit"(flags: c_uint);

        device_count = "cuDeviceGetCount"(count: *mut c_int);
        device_get = "cuDeviceGet"(device: *mut CUdevice, ordinal: c_int);
        device_name = "cuDeviceGetName"(name: *mut c_char, len: c_int, device: CUdevice);
        device_memory = "cuDeviceTotalMem_v2"(bytes: *mut usize, device: CUdevice);
        device_attribute = "cuDeviceGetAttribute"(value: *mut c_int, attribute: c_int, device: CUdevice);
        device_uuid = "cuDeviceGetUuid_v2"(uuid: *mut [u8; 16], device: CUdevice);
        device_can_access_peer = "cuDeviceCanAccessPeer"(can: *mut c_int, device: CUdevice, peer: CUdevice);

        primary_ctx_retain = "cuDevicePrimaryCtxRetain"(context: *mut CUcontext, device: CUdevice);
        primary_ctx_release = "cuDevicePrimaryCtxRelease_v2"(device: CUdevice);
        primary_ctx_state = "cuDevicePrimaryCtxGetState"(device: CUdevice, flags: *mut c_uint, active: *mut c_int);
        ctx_get_current = "cuCtxGetCurrent"(context: *mut CUcontext);
        ctx_set_current = "cuCtxSetCurrent"(context: CUcontext);
        ctx_get_device = "cuCtxGetDevice"(device: *mut CUdevice);
        ctx_synchronize = "cuCtxSynchronize"();
        ctx_enable_peer_access = "cuCtxEnablePeerAccess"(peer: CUcontext, flags: c_uint);

        module_load_data_ex = "cuModuleLoadDataEx"(
            module: *mut CUmodule, image: *const c_void, options: c_uint, keys: *mut c_int, values: *mut *mut c_void
        );
        module_get_function = "cuModuleGetFunction"(function: *mut CUfunction, module: CUmodule, name: *const c_char);
        func_set_attribute = "cuFuncSetAttribute"(function: CUfunction, attribute: c_int, value: c_int);
        func_get_attribute = "cuFuncGetAttribute"(value: *mut c_int, attribute: c_int, function: CUfunction);
        launch_kernel = "cuLaunchKernel"(
            function: CUfunction, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint, block_y: c_uint,
            block_z: c_uint, shared_bytes: c_uint, stream: CUstream, params: *mut *mut c_void, extra: *mut *mut c_void
        );

        mem_get_info = "cuMemGetInfo_v2"(free: *mut usize, total: *mut usize);
        mem_alloc = "cuMemAlloc_v2"(address: *mut CUdeviceptr, bytes: usize);
        mem_free = "cuMemFree_v2"(address: CUdeviceptr);
        mem_host_alloc = "cuMemHostAlloc"(address: *mut *mut c_void, bytes: usize, flags: c_uint);
        mem_free_host = "cuMemFreeHost"(address: *mut c_void);
        memcpy_async = "cuMemcpyAsync"(dst: CUdeviceptr, src: CUdeviceptr, bytes: usize, stream: CUstream);
        memcpy_htod_async = "cuMemcpyHtoDAsync_v2"(dst: CUdeviceptr, src: *const c_void, bytes: usize, stream: CUstream);
        memcpy_dtoh_async = "cuMemcpyDtoHAsync_v2"(dst: *mut c_void, src: CUdeviceptr, bytes: usize, stream: CUstream);
        memset_d8_async = "cuMemsetD8Async"(dst: CUdeviceptr, byte: u8, bytes: usize, stream: CUstream);

        ipc_get = "cuIpcGetMemHandle"(handle: *mut IpcHandle, address: CUdeviceptr);
        ipc_open = "cuIpcOpenMemHandle_v2"(address: *mut CUdeviceptr, handle: IpcHandle, flags: c_uint);
        ipc_close = "cuIpcCloseMemHandle"(address: CUdeviceptr);

        stream_create = "cuStreamCreate"(stream: *mut CUstream, flags: c_uint);
        stream_destroy = "cuStreamDestroy_v2"(stream: CUstream);
        stream_synchronize = "cuStreamSynchronize"(stream: CUstream);
        stream_wait_event = "cuStreamWaitEvent"(stream: CUstream, event: CUevent, flags: c_uint);
        stream_is_capturing = "cuStreamIsCapturing"(stream: CUstream, status: *mut c_int);
        thread_exchange_capture_mode = "cuThreadExchangeStreamCaptureMode"(mode: *mut c_int);
        stream_begin_capture = "cuStreamBeginCapture_v2"(stream: CUstream, mode: c_int);
        stream_end_capture = "cuStreamEndCapture"(stream: CUstream, graph: *mut CUgraph);
        stream_capture_info = "cuStreamGetCaptureInfo_v2"(
            stream: CUstream, status: *mut c_int, id: *mut u64, graph: *mut CUgraph, nodes: *mut *const CUgraphNode,
            count: *mut usize
        );
        stream_update_capture = "cuStreamUpdateCaptureDependencies"(
            stream: CUstream, nodes: *mut CUgraphNode, count: usize, flags: c_uint
        );

        event_create = "cuEventCreate"(event: *mut CUevent, flags: c_uint);
        event_destroy = "cuEventDestroy_v2"(event: CUevent);
        event_record = "cuEventRecord"(event: CUevent, stream: CUstream);
        event_synchronize = "cuEventSynchronize"(event: CUevent);
        event_elapsed_time = "cuEventElapsedTime"(milliseconds: *mut f32, start: CUevent, end: CUevent);

        graph_instantiate = "cuGraphInstantiateWithFlags"(exec: *mut CUgraphExec, graph: CUgraph, flags: u64);
        graph_destroy = "cuGraphDestroy"(graph: CUgraph);
        graph_add_child = "cuGraphAddChildGraphNode"(
            node: *mut CUgraphNode, graph: CUgraph, after: *const CUgraphNode, count: usize, child: CUgraph
        );
        graph_exec_destroy = "cuGraphExecDestroy"(exec: CUgraphExec);
        graph_upload = "cuGraphUpload"(exec: CUgraphExec, stream: CUstream);
        graph_launch = "cuGraphLaunch"(exec: CUgraphExec, stream: CUstream);
    }
    since {
        tensor_map_encode_tiled = "cuTensorMapEncodeTiled" in 12000(
            map: *mut TensorMap, element: c_int, rank: c_uint, base: *mut c_void, dims: *const u64,
            strides: *const u64, box_dims: *const c_uint, element_strides: *const c_uint, interleave: c_int,
            swizzle: c_int, l2_promotion: c_int, out_of_bounds_fill: c_int
        );
        launch_kernel_ex = "cuLaunchKernelEx" in 11080(
            config: *const LaunchConfig, function: CUfunction, params: *mut *mut c_void, extra: *mut *mut c_void
        );
    }
}

/// A function of the library.
///
/// # Safety
/// `F` is the type of a function pointer, and the function's.
unsafe fn symbol<F: Copy>(library: &Library, name: &str) -> Option<F> {
    // SAFETY: promised by the caller. The library is never closed, so that the copy stays valid.
    unsafe { library.get::<F>(name.as_bytes()) }.ok().map(|f| *f)
}

/// The driver, loaded and initialised.
pub(crate) struct Driver {
    api: Api,
    get_error_name: unsafe extern "C" fn(c_int, *mut *const c_char) -> c_int,
    version: Version,
    _library: Library,
}

/// Why there is no driver.
enum Absent {
    Missing(String),
    TooOld(Version),
    NoDevice,
}

impl Absent {
    fn error(&self) -> Error {
        match self {
            Self::Missing(why) => Error::NoDriver(why.clone()),
            &Self::TooOld(found) => {
                // One that has all functions may still be too old for a GPU's PTX.
                let needs = |arch| oldest_for_ptx(ptx::version(arch)).max(OLDEST);
                let (any, hopper) = (needs(Arch::Sm80), needs(Arch::Sm90a));
                let needed = format!("a driver for {any} (for a Hopper GPU {hopper})");
                Error::DriverTooOld { found: format!("(for {found})"), needed }
            }
            Self::NoDevice => Error::NoDevice { ordinal: 0, found: 0 },
        }
    }
}

pub(crate) fn too_old(found: Version, needed: Version) -> Error {
    Error::DriverTooOld { found: format!("(for {found})"), needed: format!("a driver for {needed}") }
}

/// The driver of this machine. Loaded at the first call; what that found stays for the life of the process.
///
/// # Errors
/// [`Error::NoDriver`], [`Error::DriverTooOld`], [`Error::NoDevice`].
pub(crate) fn get() -> Result<&'static Driver> {
    static DRIVER: OnceLock<Result<Driver, Absent>> = OnceLock::new();
    DRIVER.get_or_init(|| Driver::load(LIBRARIES)).as_ref().map_err(Absent::error)
}

impl Driver {
    fn load(names: &[&str]) -> Result<Self, Absent> {
        let mut failures = Vec::new();
        let library = names
            .iter()
            // SAFETY: the driver's library may be loaded at any time by any thread.
            .find_map(|name| unsafe { Library::new(name) }.map_err(|e| failures.push(e.to_string())).ok())
            .ok_or_else(|| Absent::Missing(failures.swap_remove(0)))?;
        let lacks = |name: &str| Absent::Missing(format!("{} lacks {name}, so it is a stub", names[0]));

        let mut version = Version(0);
        // SAFETY: the signature is that of CUDA's manual.
        let get_version: unsafe extern "C" fn(*mut c_int) -> c_int =
            unsafe { symbol(&library, "cuDriverGetVersion") }.ok_or_else(|| lacks("cuDriverGetVersion"))?;
        // SAFETY: as above.
        let get_error_name = unsafe { symbol(&library, "cuGetErrorName") }.ok_or_else(|| lacks("cuGetErrorName"))?;
        // SAFETY: the address is that of an integer.
        let code = unsafe { get_version(&raw mut version.0) };
        if code == CUDA_ERROR_STUB_LIBRARY || version.0 <= 0 {
            return Err(Absent::Missing(format!("{} is a stub for linking, not a driver", names[0])));
        }
        if version < OLDEST {
            return Err(Absent::TooOld(version));
        }
        // SAFETY: the signatures are those of CUDA's manual.
        let api = unsafe { Api::load(&library) }.map_err(lacks)?;
        let driver = Self { api, get_error_name, version, _library: library };
        // SAFETY: needs nothing.
        match unsafe { driver.init(0) } {
            Ok(()) => Ok(driver),
            Err(Error::Driver { code: CUDA_ERROR_NO_DEVICE, .. }) => Err(Absent::NoDevice),
            Err(e) => Err(Absent::Missing(e.to_string())),
        }
    }

    /// The newest CUDA that the driver supports.
    pub(crate) fn version(&self) -> Version {
        self.version
    }

    /// The error for a code that a function returned, with the driver's name for it.
    #[cold]
    pub(crate) fn error(&self, call: &'static str, code: c_int) -> Error {
        let mut name = std::ptr::null();
        // SAFETY: the address is that of a pointer; any code may be asked for.
        let known = unsafe { (self.get_error_name)(code, &raw mut name) } == 0 && !name.is_null();
        let name = if known {
            // SAFETY: the driver's names are constant C strings.
            unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
        } else {
            "an error without a name".into()
        };
        Error::Driver { call, code, name, kernel: None, log: String::new() }
    }
}

/// The PTX version of a text: `(8, 6)` from its `.version 8.6`. `None` for a text without one.
pub(crate) fn ptx_version(ptx: &str) -> Option<(u32, u32)> {
    let rest = ptx.lines().find_map(|line| line.trim_start().strip_prefix(".version"))?;
    let (major, minor) = rest.split_whitespace().next()?.split_once('.')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

/// The oldest CUDA whose driver takes PTX of this version: "PTX ISA release history" of the PTX manual.
pub(crate) fn oldest_for_ptx((major, minor): (u32, u32)) -> Version {
    let (major, minor) = match (major, minor) {
        (..=6, _) => (11, 0),
        (7, _) => (11, minor),
        (8, 0..=5) => (12, minor),
        (8, _) => (12, minor + 1),
        _ => (major + 4, minor),
    };
    Version(i32::try_from(1000 * major + 10 * minor).unwrap_or(i32::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_is_no_driver() {
        let Err(absent) = Driver::load(&["libcuda-that-is-nowhere.so.1"]) else { panic!("it is nowhere") };
        let text = absent.error().to_string();
        assert!(text.starts_with("no CUDA driver: libcuda-that-is-nowhere.so.1: "), "{text}");
    }

    #[test]
    fn a_library_without_the_functions_is_no_driver() {
        let Err(absent) = Driver::load(&["libc.so.6"]) else { panic!("libc is no driver") };
        let text = absent.error().to_string();
        assert!(text.contains("lacks cuDriverGetVersion"), "{text}");
    }

    #[test]
    fn an_old_driver_and_no_device_are_one_sentence_each() {
        let old = Absent::TooOld(Version(11040)).error();
        let text = old.to_string();
        assert!(
            matches!(old, Error::DriverTooOld { .. }) && text.contains("CUDA 11.4") && !text.contains('\n'),
            "{text}"
        );
        let none = Absent::NoDevice.error();
        assert!(matches!(none, Error::NoDevice { .. }) && !none.to_string().contains('\n'), "{none}");
    }

    #[test]
    fn versions_of_ptx() {
        let ptx = "//\n// comment\n\n.version 8.6\n.target sm_90a\n.visible .entry rms_norm_f32(\n)\n";
        assert_eq!(ptx_version(ptx), Some((8, 6)));
        assert_eq!(ptx_version(""), None);
        for (ptx, cuda) in [((7, 0), "11.0"), ((7, 8), "11.8"), ((8, 0), "12.0"), ((8, 5), "12.5"), ((8, 6), "12.7")] {
            assert_eq!(oldest_for_ptx(ptx).to_string(), format!("CUDA {cuda}"));
        }
        assert_eq!(oldest_for_ptx((8, 8)).to_string(), "CUDA 12.9");
        assert_eq!(oldest_for_ptx((9, 0)).to_string(), "CUDA 13.0");
    }

    /// The layouts of `cuda.h`, for 64-bit targets.
    #[test]
    fn launch_attributes_are_laid_out_as_in_cuda() {
        use std::mem::offset_of;
        assert_eq!(size_of::<LaunchAttribute>(), 72);
        assert_eq!(offset_of!(LaunchAttribute, value), 8);
        assert_eq!(size_of::<LaunchConfig>(), 56);
        assert_eq!(offset_of!(LaunchConfig, stream), 32);
        assert_eq!(offset_of!(LaunchConfig, attributes), 40);
    }
}
