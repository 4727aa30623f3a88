//! Gathers the cached keys and values of sequences to contiguous tensors, widening 8-bit ones.
//!
//! For attention kernels that read contiguous keys and values, such as those for a long prompt behind a cached prefix.
//! `key[starts[s] + p] = cache[block_tables[s][p / block_size], p % block_size] * scale` for each position `p` of each
//! sequence `s`. After vLLM's `gather_cache`.

use super::layout::{CacheElement, CacheLayout, KvCache, Scales, StoreAs, check_scales};
use super::reshape_and_cache::chosen_geometry;
use super::reshape_and_cache::{SCALE_PER_HEAD, status_word};
use super::tile::{PageExtents, can_be_tiles, no_tiles};
use crate::check::Call;
use crate::device::Stream;
use crate::error::{Error, Result};
use crate::kernels::kv_cache::gather_cache as kernel;
use crate::tensor::Tensor;
use cuda_std::{DType, Entry};

pub use super::reshape_and_cache::{geometry, tiles_geometry};
pub use kernel::Args;

/// Whether a launch can go by tiles of 16 tokens, through shared memory: from an x-split cache of the outputs' own 16-bit type, everything in whole chunks of 16 bytes.
fn can_go_by_tiles(dtype: DType, cache: DType, layout: CacheLayout, args: &Args) -> bool {
    let strides = args.key_token_stride | args.key_head_stride | args.value_token_stride | args.value_head_stride;
    let caches = [args.key_cache.cast_mut(), args.value_cache.cast_mut()];
    let pages = PageExtents {
        strides: args.key_page_block_stride
            | args.key_page_head_stride
            | args.value_page_block_stride
            | args.value_page_head_stride,
        blocks: args.blocks,
        block_size: args.block_size,
        head_dim: args.head_dim,
    };
    dtype == cache && can_be_tiles(dtype, layout, [args.key, args.value], strides, caches, pages)
}

/// Whether a launch goes by tiles: a large one that can. The results are the same.
pub fn by_tiles(dtype: DType, cache: DType, layout: CacheLayout, args: &Args) -> bool {
    /// Tokens of a sequence, on average. Where sequences meet, a warp has several parts of tiles one after another.
    const LONG: u32 = 64;
    /// Chunks of keys from which it is faster. Measured on an H200.
    const MANY: u64 = 1 << 18;
    let chunks = args.heads as u64 * args.head_dim.div_ceil(8) as u64;
    (args.tokens as u64).saturating_mul(chunks) >= MANY
        && args.tokens / LONG >= args.sequences
        && can_go_by_tiles(dtype, cache, layout, args)
}

/// The entry for outputs and a cache of these types, if there is one.
pub const fn entry(dtype: DType, cache: DType, layout: CacheLayout) -> Option<Entry<Args>> {
    use kernel::*;
    Some(match (layout, dtype, cache) {
        (CacheLayout::XSplit, DType::F32, DType::F32) => gather_cache_xsplit_f32_f32::ENTRY,
        (CacheLayout::XSplit, DType::F32, DType::E4m3) => gather_cache_xsplit_f32_e4m3::ENTRY,
        (CacheLayout::XSplit, DType::F32, DType::E5m2) => gather_cache_xsplit_f32_e5m2::ENTRY,
        (CacheLayout::XSplit, DType::F32, DType::I8) => gather_cache_xsplit_f32_i8::ENTRY,
        (CacheLayout::XSplit, DType::F16, DType::F16) => gather_cache_xsplit_f16_f16::ENTRY,
        (CacheLayout::XSplit, DType::F16, DType::E4m3) => gather_cache_xsplit_f16_e4m3::ENTRY,
        (CacheLayout::XSplit, DType::F16, DType::E5m2) => gather_cache_xsplit_f16_e5m2::ENTRY,
        (CacheLayout::XSplit, DType::F16, DType::I8) => gather_cache_xsplit_f16_i8::ENTRY,
        (CacheLayout::XSplit, DType::Bf16, DType::Bf16) => gather_cache_xsplit_bf16_bf16::ENTRY,
        (CacheLayout::XSplit, DType::Bf16, DType::E4m3) => gather_cache_xsplit_bf16_e4m3::ENTRY,
        (CacheLayout::XSplit, DType::Bf16, DType::E5m2) => gather_cache_xsplit_bf16_e5m2::ENTRY,
        (CacheLayout::XSplit, DType::Bf16, DType::I8) => gather_cache_xsplit_bf16_i8::ENTRY,
        (_, DType::F32, DType::F32) => gather_cache_flat_f32_f32::ENTRY,
        (_, DType::F32, DType::E4m3) => gather_cache_flat_f32_e4m3::ENTRY,
        (_, DType::F32, DType::E5m2) => gather_cache_flat_f32_e5m2::ENTRY,
        (_, DType::F32, DType::I8) => gather_cache_flat_f32_i8::ENTRY,
        (_, DType::F16, DType::F16) => gather_cache_flat_f16_f16::ENTRY,
        (_, DType::F16, DType::E4m3) => gather_cache_flat_f16_e4m3::ENTRY,
        (_, DType::F16, DType::E5m2) => gather_cache_flat_f16_e5m2::ENTRY,
        (_, DType::F16, DType::I8) => gather_cache_flat_f16_i8::ENTRY,
        (_, DType::Bf16, DType::Bf16) => gather_cache_flat_bf16_bf16::ENTRY,
        (_, DType::Bf16, DType::E4m3) => gather_cache_flat_bf16_e4m3::ENTRY,
        (_, DType::Bf16, DType::E5m2) => gather_cache_flat_bf16_e5m2::ENTRY,
        (_, DType::Bf16, DType::I8) => gather_cache_flat_bf16_i8::ENTRY,
        _ => return None,
    })
}

/// The entry for tiles, where there is one.
pub const fn tiles_entry(dtype: DType, cache: DType, layout: CacheLayout) -> Option<Entry<Args>> {
    Some(match (layout, dtype, cache) {
        (CacheLayout::XSplit, DType::F16, DType::F16) => kernel::gather_cache_xsplit_f16_f16_tiles::ENTRY,
        (CacheLayout::XSplit, DType::Bf16, DType::Bf16) => kernel::gather_cache_xsplit_bf16_bf16_tiles::ENTRY,
        _ => return None,
    })
}

/// Launches on raw pointers (layer L1), as [`Args`] says, [by tiles](by_tiles) where that is faster.
///
/// # Errors
/// [`Error::Unsupported`] for types without an entry, and those of [`Stream::launch`].
///
/// # Safety
/// The pointers are device memory of the sizes that strides and extents imply, aligned to their element types, until
/// the launch is done; the outputs overlap no input and not each other; `block_size` is not 0.
pub unsafe fn launch(stream: &Stream, dtype: DType, cache: DType, layout: CacheLayout, args: &Args) -> Result<()> {
    // SAFETY: forwarded to the caller.
    unsafe { launch_with(stream, dtype, cache, layout, by_tiles(dtype, cache, layout, args), args) }
}

/// [`launch`] by tiles, which can go by them, or not.
unsafe fn launch_with(
    stream: &Stream,
    dtype: DType,
    cache: DType,
    layout: CacheLayout,
    by_tiles: bool,
    args: &Args,
) -> Result<()> {
    let entry = if by_tiles { tiles_entry(dtype, cache, layout) } else { entry(dtype, cache, layout) };
    let entry = entry.ok_or_else(|| Error::Unsupported {
        op: "gather_cache",
        what: format!(
            "no kernel from {cache} to {dtype}; there are f32, f16 and bf16 from themselves, e4m3, e5m2 and i8"
        ),
    })?;
    let geometry = chosen_geometry(dtype, layout, by_tiles, [args.tokens, args.heads, args.head_dim]);
    // SAFETY: forwarded to the caller.
    unsafe { stream.launch(&entry, &geometry, args) }
}

/// What [`gather_cache`] may be told besides.
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
#[must_use]
pub struct GatherCacheOptions<'a> {
    /// Scales of an 8-bit cache.
    pub scales: Option<Scales<'a>>,
    /// Whether tokens go in tiles, through shared memory; by the size of the launch. The results are the same.
    pub tiles: Option<bool>,
}

impl<'a> GatherCacheOptions<'a> {
    /// With these scales.
    pub fn scales(mut self, key: &'a Tensor<f32>, value: &'a Tensor<f32>) -> Self {
        self.scales = Some(Scales::new(key, value));
        self
    }

    /// By tiles, or not, however large the launch is.
    pub fn tiles(mut self, tiles: bool) -> Self {
        self.tiles = Some(tiles);
        self
    }
}

/// Gathers sequences `starts[s] .. starts[s + 1]` of the outputs from the blocks `block_table[s]`.
///
/// `key` and `value` are `[tokens, heads, head_dim]`, dense in the last dimension; `block_table` is
/// `[sequences, blocks of the longest]`, with dense rows; `starts` is `[sequences + 1]`, dense, ascending from 0. Rows of
/// the outputs from `starts[sequences]` on are left as they are. So are rows for which the tables name no block of the
/// cache, which are counted up in `status`, `[1]`.
///
/// # Errors
/// [`Shape`](Error::Shape), [`Stride`](Error::Stride), [`Overlap`](Error::Overlap), [`WrongDevice`](Error::WrongDevice);
/// [`Value`](Error::Value) for scales that are missing or not wanted, extents beyond 2^31 - 1, or more heads than a launch takes;
/// [`Unsupported`](Error::Unsupported) for tiles, if asked for, where there are none: they are for an x-split cache of the outputs' own 16-bit type, with
/// blocks of a multiple of 8 tokens, and addresses and strides in multiples of 16 bytes.
#[allow(clippy::too_many_arguments, reason = "tensors, in the order of all operations")]
pub fn gather_cache<T: StoreAs<S>, S: CacheElement>(
    stream: &Stream,
    key: &mut Tensor<T>,
    value: &mut Tensor<T>,
    status: Option<&mut Tensor<u32>>,
    cache: &KvCache<S>,
    block_table: &Tensor<i32>,
    starts: &Tensor<i32>,
    options: &GatherCacheOptions<'_>,
) -> Result<()> {
    let mut call = Call::new("gather_cache", stream);
    let (layout, shape) = (cache.layout(), cache.shape());
    let &[tokens, ..] = key.shape() else {
        return Err(call.bad_shape("key", key.shape(), "[tokens, heads, head_dim]"));
    };
    let expected = [tokens, shape.heads, shape.head_dim];
    call.same_shape("key", key.shape(), &expected)?;
    call.same_shape("value", value.shape(), &expected)?;
    let &[sequences, table_len] = block_table.shape() else {
        return Err(call.bad_shape("block_table", block_table.shape(), "[sequences, blocks]"));
    };
    call.dense_last("block_table", block_table)?;
    call.same_shape("starts", starts.shape(), &[sequences + 1])?;
    call.contiguous("starts", starts)?;
    for (arg, t) in [("key", &*key), ("value", &*value)] {
        call.dense_last(arg, t)?;
        call.distinct(arg, t)?;
    }
    let scales = check_scales(&mut call, options.scales, shape.heads, T::DTYPE, S::DTYPE)?;
    let (k, v) = (cache.key_strides(), cache.value_strides());
    let args = Args {
        key_token_stride: key.strides()[0],
        key_head_stride: key.strides()[1],
        value_token_stride: value.strides()[0],
        value_head_stride: value.strides()[1],
        key: call.write("key", key)?,
        value: call.write("value", value)?,
        key_cache: call.read("cache.key", cache.key())?,
        value_cache: call.read("cache.value", cache.value())?,
        block_tables: call.read("block_table", block_table)?.cast(),
        starts: call.read("starts", starts)?.cast(),
        key_scale: scales.key,
        value_scale: scales.value,
        status: status_word(&mut call, status)?,
        key_page_block_stride: k.block,
        key_page_head_stride: k.head,
        key_page_token_stride: k.token,
        value_page_block_stride: v.block,
        value_page_head_stride: v.head,
        value_page_token_stride: v.token,
        table_stride: block_table.strides()[0],
        blocks: shape.blocks,
        block_size: call.count("cache", shape.block_size)?,
        sequences: call.count("block_table", sequences)?,
        table_len: call.count("block_table", table_len)?,
        tokens: call.count("key", tokens)?,
        heads: call.count("cache", shape.heads)?,
        head_dim: call.count("cache", shape.head_dim)?,
        flags: if scales.per_head { SCALE_PER_HEAD } else { 0 },
    };
    call.check_overlap()?;
    if tokens == 0 || sequences == 0 {
        return Ok(());
    }
    if options.tiles == Some(true) && !can_go_by_tiles(T::DTYPE, S::DTYPE, layout, &args) {
        return Err(no_tiles("gather_cache", T::DTYPE, S::DTYPE, layout));
    }
    let by_tiles = options.tiles.unwrap_or_else(|| by_tiles(T::DTYPE, S::DTYPE, layout, &args));
    call.grid("key", &chosen_geometry(T::DTYPE, layout, by_tiles, [args.tokens, args.heads, args.head_dim]))?;
    // SAFETY: shapes, devices and overlap were checked above; tensors are aligned to their elements; the kernel checks
    // starts and tables; tiles are possible where they are asked for.
    unsafe { launch_with(stream, T::DTYPE, S::DTYPE, layout, by_tiles, &args) }
}
