//! Writes the keys and values of new tokens to their slots in the paged cache, quantising them if the cache is 8-bit.
//!
//! `cache[slots[t]] = key[t], value[t]`, or `key[t] * (1 / scale)` rounded for an 8-bit cache. After vLLM's
//! `reshape_and_cache` and `reshape_and_cache_flash` (its `csrc/cache_kernels.cu`), which are the x-split and the NHD case
//! here.

use super::layout::{CacheElement, CacheLayout, KvCache, Scales, StoreAs, check_scales, write_cache};
use super::tile::{PageExtents, can_be_tiles, no_tiles};
use crate::check::Call;
use crate::device::{Geometry, Stream};
use crate::error::{Error, Result};
use crate::kernels::kv_cache::reshape_and_cache as kernel;
use crate::tensor::Tensor;
use cuda_std::{DType, Element, Entry};

pub use super::tile::geometry as tiles_geometry;
pub use kernel::{Args, SCALE_PER_HEAD, SLOTS_I64};

/// Whether a launch can go by tiles of 16 tokens, through shared memory: to an x-split cache of the inputs' own 16-bit type, everything in whole chunks of 16 bytes.
fn can_go_by_tiles(dtype: DType, cache: DType, layout: CacheLayout, args: &Args) -> bool {
    let strides = args.key_token_stride | args.key_head_stride | args.value_token_stride | args.value_head_stride;
    let rows = [args.key.cast_mut(), args.value.cast_mut()];
    let pages = PageExtents {
        strides: args.key_page_block_stride
            | args.key_page_head_stride
            | args.value_page_block_stride
            | args.value_page_head_stride,
        blocks: args.slot_count / (args.block_size as usize).max(1),
        block_size: args.block_size,
        head_dim: args.head_dim,
    };
    dtype == cache && can_be_tiles(dtype, layout, rows, strides, [args.key_cache, args.value_cache], pages)
}

/// Whether a launch goes by tiles: a large one that can. The results are the same.
pub fn by_tiles(dtype: DType, cache: DType, layout: CacheLayout, args: &Args) -> bool {
    /// Chunks of keys from which it is faster. Measured on an H200.
    const MANY: u64 = 1 << 18;
    let chunks = args.heads as u64 * args.head_dim.div_ceil(8) as u64;
    (args.tokens as u64).saturating_mul(chunks) >= MANY && can_go_by_tiles(dtype, cache, layout, args)
}

/// The entry for inputs and a cache of these types, if there is one: a cache has the inputs' type, or `e4m3`, `e5m2` or
/// `i8`.
pub const fn entry(dtype: DType, cache: DType, layout: CacheLayout) -> Option<Entry<Args>> {
    use kernel::*;
    Some(match (layout, dtype, cache) {
        (CacheLayout::XSplit, DType::F32, DType::F32) => reshape_and_cache_xsplit_f32_f32::ENTRY,
        (CacheLayout::XSplit, DType::F32, DType::E4m3) => reshape_and_cache_xsplit_f32_e4m3::ENTRY,
        (CacheLayout::XSplit, DType::F32, DType::E5m2) => reshape_and_cache_xsplit_f32_e5m2::ENTRY,
        (CacheLayout::XSplit, DType::F32, DType::I8) => reshape_and_cache_xsplit_f32_i8::ENTRY,
        (CacheLayout::XSplit, DType::F16, DType::F16) => reshape_and_cache_xsplit_f16_f16::ENTRY,
        (CacheLayout::XSplit, DType::F16, DType::E4m3) => reshape_and_cache_xsplit_f16_e4m3::ENTRY,
        (CacheLayout::XSplit, DType::F16, DType::E5m2) => reshape_and_cache_xsplit_f16_e5m2::ENTRY,
        (CacheLayout::XSplit, DType::F16, DType::I8) => reshape_and_cache_xsplit_f16_i8::ENTRY,
        (CacheLayout::XSplit, DType::Bf16, DType::Bf16) => reshape_and_cache_xsplit_bf16_bf16::ENTRY,
        (CacheLayout::XSplit, DType::Bf16, DType::E4m3) => reshape_and_cache_xsplit_bf16_e4m3::ENTRY,
        (CacheLayout::XSplit, DType::Bf16, DType::E5m2) => reshape_and_cache_xsplit_bf16_e5m2::ENTRY,
        (CacheLayout::XSplit, DType::Bf16, DType::I8) => reshape_and_cache_xsplit_bf16_i8::ENTRY,
        (_, DType::F32, DType::F32) => reshape_and_cache_flat_f32_f32::ENTRY,
        (_, DType::F32, DType::E4m3) => reshape_and_cache_flat_f32_e4m3::ENTRY,
        (_, DType::F32, DType::E5m2) => reshape_and_cache_flat_f32_e5m2::ENTRY,
        (_, DType::F32, DType::I8) => reshape_and_cache_flat_f32_i8::ENTRY,
        (_, DType::F16, DType::F16) => reshape_and_cache_flat_f16_f16::ENTRY,
        (_, DType::F16, DType::E4m3) => reshape_and_cache_flat_f16_e4m3::ENTRY,
        (_, DType::F16, DType::E5m2) => reshape_and_cache_flat_f16_e5m2::ENTRY,
        (_, DType::F16, DType::I8) => reshape_and_cache_flat_f16_i8::ENTRY,
        (_, DType::Bf16, DType::Bf16) => reshape_and_cache_flat_bf16_bf16::ENTRY,
        (_, DType::Bf16, DType::E4m3) => reshape_and_cache_flat_bf16_e4m3::ENTRY,
        (_, DType::Bf16, DType::E5m2) => reshape_and_cache_flat_bf16_e5m2::ENTRY,
        (_, DType::Bf16, DType::I8) => reshape_and_cache_flat_bf16_i8::ENTRY,
        _ => return None,
    })
}

/// How to launch it.
pub const fn geometry(dtype: DType, layout: CacheLayout, tokens: u32, heads: u32, head_dim: u32) -> Geometry {
    let chunks = head_dim.div_ceil(16 / dtype.size() as u32);
    match layout {
        CacheLayout::XSplit => token_major(tokens, heads, chunks),
        _ => chunk_major(tokens, heads, chunks),
    }
}

/// Blocks of (chunks, heads, tokens), of 128 threads or as many as a token needs.
pub(crate) const fn chunk_major(tokens: u32, heads: u32, chunks: u32) -> Geometry {
    let x = share(chunks, 512);
    let y = share(heads, 512 / x);
    let z = share(tokens, at_most(128 / (x * y), 64));
    Geometry::new([tokens.div_ceil(z), heads.div_ceil(y), chunks.div_ceil(x)], [x, y, z]).dependent()
}

/// Blocks of (tokens, chunks, heads), of 256 threads, for layouts in which neighbouring tokens are neighbours. Few tokens take blocks of
/// a warp: their values are many accesses of one element, of which a multiprocessor does a few at once.
pub(crate) const fn token_major(tokens: u32, heads: u32, chunks: u32) -> Geometry {
    /// Measured on an H200.
    const FEW: u64 = 1 << 13;
    let most = if (tokens as u64 * heads as u64).saturating_mul(chunks as u64) <= FEW { 32 } else { 256 };
    let x = at_most(tokens, 16);
    let y = share(chunks, most / x);
    let z = share(heads, at_most(most / (x * y), 64));
    Geometry::new([tokens.div_ceil(x), heads.div_ceil(z), chunks.div_ceil(y)], [x, y, z]).dependent()
}

/// `n` things in as few equal shares as possible, of at most `most` (or 1): how many there are in a share.
pub(crate) const fn share(n: u32, most: u32) -> u32 {
    if n == 0 || most < 2 {
        return 1;
    }
    n.div_ceil(n.div_ceil(most))
}

/// The smaller one, but not 0.
const fn at_most(n: u32, most: u32) -> u32 {
    if n == 0 || most == 0 {
        1
    } else if n < most {
        n
    } else {
        most
    }
}

/// The entry for tiles, where there is one.
pub const fn tiles_entry(dtype: DType, cache: DType, layout: CacheLayout) -> Option<Entry<Args>> {
    Some(match (layout, dtype, cache) {
        (CacheLayout::XSplit, DType::F16, DType::F16) => kernel::reshape_and_cache_xsplit_f16_f16_tiles::ENTRY,
        (CacheLayout::XSplit, DType::Bf16, DType::Bf16) => kernel::reshape_and_cache_xsplit_bf16_bf16_tiles::ENTRY,
        _ => return None,
    })
}

/// Launches on raw pointers (layer L1), as [`Args`] and the [kernel's layouts](crate::kernels::kv_cache::layout) say, [by tiles](by_tiles) where that is faster.
///
/// # Errors
/// [`Error::Unsupported`] for types without an entry, and those of [`Stream::launch`].
///
/// # Safety
/// The pointers are device memory of the sizes that strides and extents imply, aligned to their element types, until
/// the launch is done; the caches overlap no input and not each other; `block_size` is not 0.
pub unsafe fn launch(stream: &Stream, dtype: DType, cache: DType, layout: CacheLayout, args: &Args) -> Result<()> {
    // SAFETY: forwarded to the caller.
    unsafe { launch_with(stream, dtype, cache, layout, by_tiles(dtype, cache, layout, args), args) }
}

/// [`tiles_geometry`] or [`geometry`]; of so many tokens, heads and elements of a head.
pub(super) const fn chosen_geometry(dtype: DType, layout: CacheLayout, by_tiles: bool, extents: [u32; 3]) -> Geometry {
    let [tokens, heads, head_dim] = extents;
    if by_tiles { tiles_geometry(tokens, heads, head_dim) } else { geometry(dtype, layout, tokens, heads, head_dim) }
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
        op: "reshape_and_cache",
        what: format!(
            "no kernel from {dtype} to {cache}; there are f32, f16 and bf16 to themselves, e4m3, e5m2 and i8"
        ),
    })?;
    let geometry = chosen_geometry(dtype, layout, by_tiles, [args.tokens, args.heads, args.head_dim]);
    // SAFETY: forwarded to the caller.
    unsafe { stream.launch(&entry, &geometry, args) }
}

/// What [`reshape_and_cache`] may be told besides.
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
#[must_use]
pub struct ReshapeAndCacheOptions<'a> {
    /// Scales of an 8-bit cache.
    pub scales: Option<Scales<'a>>,
    /// Whether tokens go in tiles, through shared memory; by the size of the launch. The results are the same.
    pub tiles: Option<bool>,
}

impl<'a> ReshapeAndCacheOptions<'a> {
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

/// `cache[slots[t]] = key[t], value[t]` for each token `t`.
///
/// `key` and `value` are `[tokens, heads, head_dim]`, dense in the last dimension; `slots` is `[tokens]` of `i32` or
/// `i64`, dense. A cache of the inputs' type holds their very bits; one of `E4M3`, `E5M2` or `i8` holds
/// `value * (1 / scale)`, reciprocal and product in `f32`, rounded to the nearest (ties to even), saturating, with a scale for all
/// heads or one for each ([`ReshapeAndCacheOptions::scales`]).
///
/// Tokens with the slot -1 are skipped (padding). Tokens with another slot outside of the cache are skipped as well and
/// counted up in `status`, `[1]`; [`check_slots`](super::check_slots) finds them on the host. If several tokens have
/// the same slot, each element there is that of one of them; which one is not specified, and may differ between
/// elements. (A SIMT device that looks for data races reports one there: [`Launch`](Error::Launch).)
///
/// # Errors
/// [`Shape`](Error::Shape), [`Stride`](Error::Stride), [`DType`](Error::DType) (of `slots`), [`Overlap`](Error::Overlap), [`WrongDevice`](Error::WrongDevice); [`Value`](Error::Value) for scales
/// that are missing or not wanted, extents beyond 2^31 - 1, or more heads than a launch takes; [`Unsupported`](Error::Unsupported) for tiles, if asked for, where there are
/// none: they are for an x-split cache of the inputs' own 16-bit type, with blocks of a multiple of 8 tokens, and addresses and strides in multiples of 16 bytes.
pub fn reshape_and_cache<T: StoreAs<S>, S: CacheElement, I: Element>(
    stream: &Stream,
    cache: &mut KvCache<S>,
    status: Option<&mut Tensor<u32>>,
    key: &Tensor<T>,
    value: &Tensor<T>,
    slots: &Tensor<I>,
    options: &ReshapeAndCacheOptions<'_>,
) -> Result<()> {
    let mut call = Call::new("reshape_and_cache", stream);
    let (layout, shape) = (cache.layout(), cache.shape());
    let &[tokens, ..] = key.shape() else {
        return Err(call.bad_shape("key", key.shape(), "[tokens, heads, head_dim]"));
    };
    let expected = [tokens, shape.heads, shape.head_dim];
    call.same_shape("key", key.shape(), &expected)?;
    call.same_shape("value", value.shape(), &expected)?;
    call.same_shape("slots", slots.shape(), &[tokens])?;
    call.contiguous("slots", slots)?;
    call.dtype_among("slots", I::DTYPE, &[DType::I32, DType::I64])?;
    for (arg, t) in [("key", key), ("value", value)] {
        call.dense_last(arg, t)?;
    }
    let scales = check_scales(&mut call, options.scales, shape.heads, T::DTYPE, S::DTYPE)?;
    let status = status_word(&mut call, status)?;
    let (k, v) = (cache.key_strides(), cache.value_strides());
    let (key_cache, value_cache) = write_cache(&mut call, cache)?;
    let args = Args {
        key: call.read("key", key)?,
        value: call.read("value", value)?,
        key_cache,
        value_cache,
        slots: call.read("slots", slots)?.cast(),
        key_scale: scales.key,
        value_scale: scales.value,
        status,
        key_token_stride: key.strides()[0],
        key_head_stride: key.strides()[1],
        value_token_stride: value.strides()[0],
        value_head_stride: value.strides()[1],
        key_page_block_stride: k.block,
        key_page_head_stride: k.head,
        key_page_token_stride: k.token,
        value_page_block_stride: v.block,
        value_page_head_stride: v.head,
        value_page_token_stride: v.token,
        slot_count: shape.slots(),
        block_size: call.count("cache", shape.block_size)?,
        tokens: call.count("key", tokens)?,
        heads: call.count("cache", shape.heads)?,
        head_dim: call.count("cache", shape.head_dim)?,
        flags: if I::DTYPE as u32 == DType::I64 as u32 { SLOTS_I64 } else { 0 }
            | if scales.per_head { SCALE_PER_HEAD } else { 0 },
    };
    call.check_overlap()?;
    if tokens == 0 {
        return Ok(());
    }
    if options.tiles == Some(true) && !can_go_by_tiles(T::DTYPE, S::DTYPE, layout, &args) {
        return Err(no_tiles("reshape_and_cache", T::DTYPE, S::DTYPE, layout));
    }
    let by_tiles = options.tiles.unwrap_or_else(|| by_tiles(T::DTYPE, S::DTYPE, layout, &args));
    call.grid("key", &chosen_geometry(T::DTYPE, layout, by_tiles, [args.tokens, args.heads, args.head_dim]))?;
    // SAFETY: shapes, devices and overlap were checked above; tensors are aligned to their elements; slots are checked
    // by the kernel; tiles are possible where they are asked for.
    unsafe { launch_with(stream, T::DTYPE, S::DTYPE, layout, by_tiles, &args) }
}

/// A `status` word: `[1]`; null if absent.
pub(crate) fn status_word(call: &mut Call<'_>, status: Option<&mut Tensor<u32>>) -> Result<*mut u32> {
    let Some(status) = status else {
        return Ok(std::ptr::null_mut());
    };
    call.same_shape("status", status.shape(), &[1])?;
    Ok(call.write("status", status)?.cast())
}
