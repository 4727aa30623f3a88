//! Attention over a paged KV cache.

pub mod decode;
pub mod prefill;
pub use decode::{DecodeOptions, DecodePath, DecodeShape, DecodeSplit, DecodeWorkspace, decode};
pub use prefill::{PrefillOptions, PrefillPath, PrefillWorkspace, prefill};
pub mod merge;
pub use merge::merge;

use crate::check::Call;
use crate::error::{Error, Result};
use cuda_std::DType;

/// The stride of a dimension in a tensor map: of a single element it is of no interest, but it must be one.
const fn map_stride(extent: usize, bytes: u64) -> u64 {
    if extent <= 1 { 16 } else { bytes }
}

/// That kernels can divide by a soft cap, if there is one: the reciprocals of others are subnormal or infinite.
fn check_soft_cap(call: &Call<'_>, cap: f32) -> Result<()> {
    let caps = f32::MIN_POSITIVE..=1.0 / f32::MIN_POSITIVE;
    call.value(cap == 0.0 || caps.contains(&cap), "soft_cap", "0 or from 2^-126 to 2^126", cap)
}

/// Of queries and a cache that no kernel takes, which of both is to blame.
fn no_kernel(op: &'static str, query: DType, cache: DType) -> Error {
    match query {
        DType::F32 | DType::F16 | DType::Bf16 => {
            Error::DType { op, arg: "cache", expected: format!("{query}, e4m3, e5m2 or i8"), got: cache }
        }
        _ => Error::DType { op, arg: "query", expected: "f32, f16 or bf16".into(), got: query },
    }
}
