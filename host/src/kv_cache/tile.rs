//! Which launches can go by tiles of an x-split cache ([`kernels::kv_cache::tile`](crate::kernels::kv_cache::tile)).

use super::layout::CacheLayout;
use crate::device::Geometry;
use crate::error::Error;
use crate::kernels::kv_cache::tile::{BYTES, N, NOWHERE, TOKENS, panels};
use cuda_std::DType;
use std::ffi::c_void;

/// What tiles want to know of a cache.
pub(crate) struct PageExtents {
    /// Strides of blocks and heads, of keys and values, joined by a bitwise or.
    pub(crate) strides: usize,
    pub(crate) blocks: usize,
    pub(crate) block_size: u32,
    pub(crate) head_dim: u32,
}

/// Whether rows of `dtype` and an x-split cache of the same type are whole chunks everywhere. `strides`: of rows, joined by a bitwise or.
pub(crate) fn can_be_tiles(
    dtype: DType,
    layout: CacheLayout,
    rows: [*mut c_void; 2],
    strides: usize,
    caches: [*mut c_void; 2],
    pages: PageExtents,
) -> bool {
    let elements = strides | pages.strides | pages.block_size as usize | pages.head_dim as usize;
    let aligned = |x: *mut c_void| x.addr().is_multiple_of(16);
    layout == CacheLayout::XSplit
        && dtype.size() == 2
        && elements.is_multiple_of(N as usize)
        && pages.blocks < NOWHERE as usize
        && rows.into_iter().chain(caches).all(aligned)
}

/// How to launch tiles: a block for each tile of a head, of keys and of values, of each 16 tokens.
pub const fn geometry(tokens: u32, heads: u32, head_dim: u32) -> Geometry {
    let tiles = tokens.div_ceil(TOKENS);
    let y = if tiles < 65535 { tiles } else { 65535 };
    let z = if tiles == 0 { 0 } else { tiles.div_ceil(y) };
    Geometry::new([heads.saturating_mul(2).saturating_mul(panels(head_dim)), y, z], [32, 1, 1])
        .dependent()
        .shared_bytes(BYTES)
}

/// Tiles were asked for where there are none.
pub(crate) fn no_tiles(op: &'static str, dtype: DType, cache: DType, layout: CacheLayout) -> Error {
    let what = format!(
        "tiles of {dtype} and a cache of {cache} in {layout:?}: `tiles` is for f16 or bf16, a cache of the same in XSplit with blocks of a multiple of 8 \
         tokens, and addresses and strides in multiples of 16 bytes; leave it out"
    );
    Error::Unsupported { op, what }
}
