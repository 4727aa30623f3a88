//! Tensors of other frameworks, in and out, by [DLPack](https://dmlc.github.io/dlpack/latest/)'s C ABI. Nothing is copied.
//!
//! [`export`] hands a tensor out as a [`DLManagedTensorVersioned`], the thing inside of a `dltensor_versioned` capsule;
//! [`import`] takes one in, [`import_legacy`] the struct without a version that older producers make. Whoever has such a struct calls
//! its deleter once: a consumer of [`export`]'s when it is done, this crate when the imported tensor, its clones, views
//! and graphs are gone.
//!
//! ```
//! use warploom::{Device, Tensor, dlpack};
//! let device = Device::simt();
//! let x = Tensor::from_slice(&device, &[1.0f32, 2.0, 3.0, 4.0], &[2, 2])?;
//! let managed = dlpack::export(&x)?; // for a framework; here it comes back
//! // SAFETY: it was exported just now, and nobody else has it.
//! let y: Tensor<f32> = unsafe { dlpack::import(&device, managed)? };
//! assert_eq!((y.as_ptr(), y.to_vec()?), (x.as_ptr(), vec![1.0, 2.0, 3.0, 4.0]));
//! # Ok::<(), warploom::Error>(())
//! ```
//!
//! **Devices.** A GPU takes memory of the types `CUDA` (of its own number) and `CUDAManaged`, the SIMT device `CPU` and `CUDAHost`.
//! The SIMT device uses a producer's host memory where it is: its bounds are checked, but it has no redzones. What the SIMT
//! device exports is host memory of the type `CPU`.
//!
//! **Order.** The protocol leaves it to both sides to order their streams. Before an imported tensor is used, the stream that
//! uses it must wait for what the producer submitted; before a consumer uses an exported one, its stream must wait for ours
//! ([`Stream::record_event`](crate::Stream::record_event)). The deleter of an imported tensor is called after all work of
//! the device is done, on the thread that drops the last use of it.
//!
//! **Layouts.** Strides may be missing (row-major) and of any size that is not negative. The element types are those of
//! [`DType`]; a boolean is a `u8`. Tensors flagged read-only are refused as outputs ([`Error::ReadOnly`]).

use crate::device::{Device, Foreign, Storage};
use crate::error::{Error, Result};
use crate::tensor::Tensor;
use cuda_std::{DType, Element};
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Arc;

/// The version of the ABI that [`export`] makes: 1.1, in which 8-bit floats came. [`import`] takes every minor version of the same
/// major one.
pub const VERSION: DLPackVersion = DLPackVersion { major: 1, minor: 1 };

/// The memory must not be written.
pub const FLAG_READ_ONLY: u64 = 1 << 0;
/// The producer made a copy for this export.
pub const FLAG_IS_COPIED: u64 = 1 << 1;

/// `DLDeviceType` of host memory.
pub const CPU: i32 = 1;
/// `DLDeviceType` of an NVIDIA GPU.
pub const CUDA: i32 = 2;
/// `DLDeviceType` of page-locked host memory.
pub const CUDA_HOST: i32 = 3;
/// `DLDeviceType` of memory that host and GPUs share.
pub const CUDA_MANAGED: i32 = 13;

/// `DLPackVersion`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DLPackVersion {
    /// Changes with the layout of the structs.
    pub major: u32,
    /// Changes with what values mean.
    pub minor: u32,
}

/// `DLDevice`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DLDevice {
    /// Its kind, such as [`CPU`].
    pub device_type: i32,
    /// Its number among those of its kind.
    pub device_id: i32,
}

/// `DLDataType`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DLDataType {
    /// `DLDataTypeCode`.
    pub code: u8,
    /// Of an element.
    pub bits: u8,
    /// Of a vector; 1 for plain elements.
    pub lanes: u16,
}

/// `DLTensor`: where a tensor's elements are.
#[repr(C)]
#[derive(Debug)]
pub struct DLTensor {
    /// The start of the memory.
    pub data: *mut c_void,
    /// Where it is.
    pub device: DLDevice,
    /// Dimensions.
    pub ndim: i32,
    /// Of the elements.
    pub dtype: DLDataType,
    /// As many extents.
    pub shape: *mut i64,
    /// As many strides, in elements; null for a dense tensor in row-major order.
    pub strides: *mut i64,
    /// From `data` to the first element.
    pub byte_offset: u64,
}

/// `DLManagedTensorVersioned`: a tensor and who frees it.
#[repr(C)]
#[derive(Debug)]
pub struct DLManagedTensorVersioned {
    /// Of this struct. All up to `deleter` is alike in every version.
    pub version: DLPackVersion,
    /// The producer's.
    pub manager_ctx: *mut c_void,
    /// Called once, by whoever has the struct, when it is done; null if there is nothing to do.
    pub deleter: Option<unsafe extern "C" fn(*mut DLManagedTensorVersioned)>,
    /// [`FLAG_READ_ONLY`], [`FLAG_IS_COPIED`].
    pub flags: u64,
    /// The tensor.
    pub dl_tensor: DLTensor,
}

/// `DLManagedTensor`: the same before there were versions.
#[repr(C)]
#[derive(Debug)]
pub struct DLManagedTensor {
    /// The tensor.
    pub dl_tensor: DLTensor,
    /// The producer's.
    pub manager_ctx: *mut c_void,
    /// As [`DLManagedTensorVersioned::deleter`].
    pub deleter: Option<unsafe extern "C" fn(*mut DLManagedTensor)>,
}

/// Codes and bits of element types; the first of a type is what is exported.
const TYPES: &[(DType, u8, u8)] = &[
    (DType::F32, 2, 32),
    (DType::F16, 2, 16),
    (DType::Bf16, 4, 16),
    (DType::E4m3, 10, 8),
    (DType::E5m2, 12, 8),
    (DType::I8, 0, 8),
    (DType::I32, 0, 32),
    (DType::I64, 0, 64),
    (DType::U8, 1, 8),
    (DType::U32, 1, 32),
    (DType::U64, 1, 64),
    (DType::U8, 6, 8),
];

impl DLDataType {
    /// The element type, if this crate has it.
    pub fn dtype(self) -> Option<DType> {
        let same = |t: &&(DType, u8, u8)| (t.1, t.2, 1) == (self.code, self.bits, self.lanes);
        TYPES.iter().find(same).map(|t| t.0)
    }
}

impl From<DType> for DLDataType {
    fn from(dtype: DType) -> Self {
        let (_, code, bits) = *TYPES.iter().find(|t| t.0 == dtype).expect("all are in the table");
        Self { code, bits, lanes: 1 }
    }
}

/// What an exported tensor owns. The struct that goes out is its first field.
struct Exported {
    managed: DLManagedTensorVersioned,
    shape: Vec<i64>,
    strides: Vec<i64>,
    _storage: Arc<Storage>,
}

unsafe extern "C" fn delete_exported(managed: *mut DLManagedTensorVersioned) {
    if !managed.is_null() {
        // SAFETY: made by `export`, and called once, as the protocol demands.
        drop(unsafe { Box::from_raw((*managed).manager_ctx.cast::<Exported>()) });
    }
}

/// Hands a tensor out. It shares the memory, which lives until the deleter is called; whoever gets the pointer calls it once.
/// A lost pointer is a leak, and nothing worse.
///
/// # Errors
/// [`Error::Unsupported`] for a [borrowed](crate::borrow) tensor, whose memory may go before the consumer does.
pub fn export<T: Element>(tensor: &Tensor<T>) -> Result<NonNull<DLManagedTensorVersioned>> {
    let (storage, device) = (tensor.storage(), tensor.device());
    if storage.lease().is_some() {
        let what = "the tensor's memory is borrowed, which a consumer could outlive".into();
        return Err(Error::Unsupported { op: "dlpack::export", what });
    }
    let device = match device.cuda_ordinal() {
        Some(ordinal) => DLDevice { device_type: CUDA, device_id: ordinal as i32 },
        None => DLDevice { device_type: CPU, device_id: 0 },
    };
    let signed = |values: &[usize]| values.iter().map(|&v| v as i64).collect::<Vec<_>>();
    let exported = Box::new(Exported {
        managed: DLManagedTensorVersioned {
            version: VERSION,
            manager_ctx: std::ptr::null_mut(),
            deleter: Some(delete_exported),
            flags: if storage.read_only() { FLAG_READ_ONLY } else { 0 },
            dl_tensor: DLTensor {
                data: if tensor.is_empty() { std::ptr::null_mut() } else { tensor.as_ptr().cast_mut().cast() },
                device,
                ndim: tensor.shape().len() as i32,
                dtype: T::DTYPE.into(),
                shape: std::ptr::null_mut(),
                strides: std::ptr::null_mut(),
                byte_offset: 0,
            },
        },
        shape: signed(tensor.shape()),
        strides: signed(tensor.strides()),
        _storage: storage.clone(),
    });
    let exported = Box::into_raw(exported);
    // SAFETY: just made; the vectors stay where they are until it is deleted.
    unsafe {
        (*exported).managed.manager_ctx = exported.cast();
        (*exported).managed.dl_tensor.shape = (*exported).shape.as_mut_ptr();
        (*exported).managed.dl_tensor.strides = (*exported).strides.as_mut_ptr();
        Ok(NonNull::new_unchecked(&raw mut (*exported).managed))
    }
}

/// Calls the deleter when dropped.
enum Managed {
    Versioned(NonNull<DLManagedTensorVersioned>),
    Legacy(NonNull<DLManagedTensor>),
}

// SAFETY: whoever imported it promised that the deleter may be called on any thread; nothing else is done with it.
unsafe impl Send for Managed {}
// SAFETY: as above.
unsafe impl Sync for Managed {}

impl Drop for Managed {
    fn drop(&mut self) {
        // SAFETY: promised by whoever imported it; once, since nobody else has it.
        unsafe {
            match *self {
                Self::Versioned(managed) => {
                    if let Some(delete) = managed.as_ref().deleter {
                        delete(managed.as_ptr());
                    }
                }
                Self::Legacy(managed) => {
                    if let Some(delete) = managed.as_ref().deleter {
                        delete(managed.as_ptr());
                    }
                }
            }
        }
    }
}

/// Takes a tensor in: shares its memory, and calls the deleter when the tensor, its clones and views are gone; at once if it is
/// refused.
///
/// # Errors
/// [`Error::DlpackVersion`] for another major version; [`Error::DType`] if the elements are no `T`; [`Error::WrongDevice`] for
/// memory that is not `device`'s; [`Error::Unsupported`] for element types unknown here and negative strides;
/// [`Error::Alignment`]; [`Error::Tensor`] for a shape that cannot be.
///
/// # Safety
/// `managed` is a valid struct that the caller owns, whose deleter may be called on any thread. Its tensor is as it says, on
/// the SIMT device initialised; who else uses the memory meanwhile orders that with the work of this crate's streams.
pub unsafe fn import<T: Element>(device: &Device, managed: NonNull<DLManagedTensorVersioned>) -> Result<Tensor<T>> {
    let owner = Managed::Versioned(managed);
    // SAFETY: valid; the version is where it is in all versions.
    let version = unsafe { (*managed.as_ptr()).version };
    if version.major != VERSION.major {
        return Err(Error::DlpackVersion { found: (version.major, version.minor), supported: VERSION.major });
    }
    // SAFETY: valid, and of the layout that is known here.
    let (tensor, flags) =
        unsafe { (std::ptr::read(&raw const (*managed.as_ptr()).dl_tensor), (*managed.as_ptr()).flags) };
    // SAFETY: forwarded to the caller.
    unsafe { take(device, tensor, flags & FLAG_READ_ONLY != 0, owner) }
}

/// [`import`] of a struct without a version, as a `dltensor` capsule has it.
///
/// # Errors
/// As for [`import`].
///
/// # Safety
/// As for [`import`].
pub unsafe fn import_legacy<T: Element>(device: &Device, managed: NonNull<DLManagedTensor>) -> Result<Tensor<T>> {
    let owner = Managed::Legacy(managed);
    // SAFETY: forwarded to the caller.
    unsafe { take(device, std::ptr::read(&raw const (*managed.as_ptr()).dl_tensor), false, owner) }
}

/// # Safety
/// As for [`import`]; `tensor` is a copy of `owner`'s, whose deleter may take the struct itself back before this returns.
unsafe fn take<T: Element>(device: &Device, tensor: DLTensor, read_only: bool, owner: Managed) -> Result<Tensor<T>> {
    const OP: &str = "dlpack::import";
    let DLTensor { device: place, dtype, .. } = tensor;
    let known = dtype.dtype().ok_or_else(|| Error::Unsupported {
        op: OP,
        what: format!("elements of type code {}, {} bits, {} lanes", dtype.code, dtype.bits, dtype.lanes),
    })?;
    if known != T::DTYPE {
        return Err(Error::DType { op: OP, arg: "managed", expected: T::DTYPE.to_string(), got: known });
    }
    let fits = match (place.device_type, device.cuda_ordinal()) {
        (CUDA, Some(ordinal)) => usize::try_from(place.device_id) == Ok(ordinal),
        (CUDA_MANAGED, Some(_)) | (CPU | CUDA_HOST, None) => true,
        _ => false,
    };
    if !fits {
        let got = format!("DLPack's device {} of type {}", place.device_id, place.device_type);
        return Err(Error::WrongDevice { op: OP, arg: "managed", expected: device.name(), got });
    }
    let ndim = usize::try_from(tensor.ndim)
        .map_err(|_| Error::Tensor(format!("{} dimensions; there are none below 0", tensor.ndim)))?;
    let list = |values: *mut i64| match ndim {
        0 => &[][..],
        // SAFETY: not null, and as many values as there are dimensions.
        _ => unsafe { std::slice::from_raw_parts(values, ndim) },
    };
    if ndim > 0 && tensor.shape.is_null() {
        return Err(Error::Tensor(format!("{ndim} dimensions without a shape; only a scalar has none")));
    }
    let extents = list(tensor.shape);
    let shape = extents.iter().map(|&n| usize::try_from(n)).collect::<Result<Vec<_>, _>>();
    let shape = shape.map_err(|_| Error::Tensor(format!("shape {extents:?}; extents are not negative")))?;
    let strides = if tensor.strides.is_null() {
        None
    } else {
        // The stride of a dimension of one element says nothing, and may be anything.
        let stride = |(&n, &s): (&i64, &i64)| if n == 1 { Ok(1) } else { usize::try_from(s) };
        let strides = extents.iter().zip(list(tensor.strides)).map(stride).collect::<Result<Vec<_>, _>>();
        let what = || format!("strides {:?}, of which some are negative", list(tensor.strides));
        Some(strides.map_err(|_| Error::Unsupported { op: OP, what: what() })?)
    };
    let data = tensor.data.cast::<u8>().wrapping_add(tensor.byte_offset as usize).cast::<T>();
    let data = if tensor.data.is_null() { std::ptr::null_mut() } else { data };
    Tensor::over((OP, "managed"), data, &shape, strides.as_deref(), |address, bytes| {
        let foreign = Foreign { address, bytes, read_only, owner: Some(Box::new(owner)), lease: None };
        // SAFETY: promised by the caller, until the owner is dropped.
        unsafe { Storage::foreign(device, foreign) }
    })
}
