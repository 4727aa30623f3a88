//! Attention over a paged KV cache.

pub mod decode;
pub mod prefill;
pub use decode::{DecodeOptions, DecodePath, DecodeShape, DecodeSplit, DecodeWorkspace, decode};
pub use prefill::{PrefillOptions, PrefillPath, PrefillWorkspace, prefill};
pub mod merge;
pub use merge::merge;

use crate::error::Error;
use cuda_std::DType;

/// The stride of a dimension in a tensor map: of a single element it is of no interest, but it must be one.
const fn map_stride(extent: usize, bytes: u64) -> u64 {
    if extent <= 1 { 16 } else { bytes }
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
