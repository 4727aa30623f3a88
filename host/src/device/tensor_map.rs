//! Tensor maps: how a tensor lies in memory, in the form that the copy engine reads.

use super::{Backend, Device};
use crate::error::{Error, Result};
use cuda_std::tma::{TensorMap, TensorMapDescription};

impl Device {
    /// Encodes a tensor map for kernels of this device, which take it by value. It refers to the memory at
    /// `description.base` and costs no device memory.
    ///
    /// # Errors
    /// [`Error::Value`] if the hardware cannot have such a map, [`Error::Driver`].
    pub fn tensor_map(&self, description: &TensorMapDescription) -> Result<TensorMap> {
        description.validate().map_err(|rule| Error::Value {
            op: "Device::tensor_map",
            arg: "description",
            expected: rule.into(),
            got: format!("{description:?}"),
        })?;
        match &*self.0 {
            Backend::Simt(_) => Ok(TensorMap::for_simt(description)),
            #[cfg(feature = "cuda")]
            Backend::Cuda(_) => encode(description),
        }
    }
}

/// `cuTensorMapEncodeTiled`.
#[cfg(feature = "cuda")]
fn encode(d: &TensorMapDescription) -> Result<TensorMap> {
    use cuda_std::DType;
    use std::ffi::c_void;
    // `CUtensorMapDataType`.
    let data_type = match d.dtype {
        DType::U32 => 2,
        DType::I32 => 3,
        DType::U64 => 4,
        DType::I64 => 5,
        DType::F16 => 6,
        DType::F32 => 7,
        DType::Bf16 => 9,
        _ => 0,
    };
    let element_strides = [1u32; 5];
    /// `CU_TENSOR_MAP_L2_PROMOTION_L2_128B`.
    const PROMOTE_TO_128_BYTES: i32 = 2;
    let mut map = TensorMap([0; 16]);
    // SAFETY: the arrays have five or, for strides, four elements, of which the driver reads `rank` and `rank - 1`; the
    // result has the size and the alignment of a `CUtensorMap`.
    unsafe {
        crate::driver::get()?.tensor_map_encode_tiled(
            (&raw mut map).cast::<c_void>(),
            data_type,
            d.rank,
            d.base as *mut c_void,
            d.dims.as_ptr(),
            d.strides.as_ptr(),
            d.box_dims.as_ptr(),
            element_strides.as_ptr(),
            0,
            d.swizzle as i32,
            PROMOTE_TO_128_BYTES,
            0,
        )?;
    }
    Ok(map)
}
