//! Attention of chunks of query tokens of a ragged batch over a paged KV cache.
//!
//! Three kernels. [`PrefillPath::Wgmma`] is Hopper's: warpgroup products fed by the copy engine. [`PrefillPath::Mma`] does the
//! same on every GPU since sm_80. [`PrefillPath::Plain`] takes every layout, element type
//! and head size. Where chunks begin, how long sequences are and which pages they own is read on the device, and the
//! grid does not depend on it: a captured graph serves every step with as many query tokens.

use super::{check_soft_cap, map_stride, no_kernel};
use crate::check::{Call, most, product};
use crate::device::{Device, Geometry, Stream, TensorMap, TensorMapDescription};
use crate::error::{Error, Result};
use crate::kernels::attention::{narrow, prefill as mma, prefill_plain as plain, prefill_wgmma as wgmma};
use crate::kv_cache::layout::{Scales, check_scales};
use crate::kv_cache::{CacheElement, CacheLayout, CacheShape, KvCache, PageStrides};
use crate::tensor::Tensor;
use cuda_std::tma::Swizzle;
use cuda_std::{DType, Entry, Float};

pub use plain::Args;

const OP: &str = "prefill";

/// The kernels of [`prefill`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum PrefillPath {
    /// By element type, layout, sizes, options, device, addresses and strides, never by lengths.
    #[default]
    Auto,
    /// Hopper's warpgroup products: f16 and bf16 over a cache of the same type, head sizes 64, 96, 128 and 256, or of 8
    /// bits, head sizes up to 128 that are multiples of 16; NHD and HND, blocks of 8 tokens or more, a power of two; a positive scale; all at multiples of 16 bytes.
    Wgmma,
    /// Tensor cores of every GPU: f16 and bf16 over a cache of the same type, head sizes that are multiples of 8, or of 8 bits, head sizes
    /// that are multiples of 16; every layout, blocks of 8 tokens or more, a power of two, of 16 or more where 8-bit elements are x-split; keys and
    /// values at multiples of 16 bytes.
    Mma,
    /// A warp for each query token and head: everything.
    Plain,
}

/// Options of [`prefill`].
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
#[must_use]
pub struct PrefillOptions<'a> {
    /// Multiplies the scores; `1 / sqrt(head_dim)` if `None`. Below 2^127 in magnitude, since exponents are of 2.
    pub scale: Option<f32>,
    /// Scores become `cap · tanh(score / cap)`, within some 2^-18 of it; 0 for none.
    pub soft_cap: f32,
    /// How many of the latest keys a query token sees, itself included; 0 for all. Keys before the first that any query token of a
    /// sequence sees have no part in anything: they may be NaN, and blocks wholly before it are not read, whatever number the
    /// table has for them. What some of a sequence's query tokens see and others do not must be numbers for these others,
    /// since 0 times NaN is NaN.
    pub window: usize,
    /// Whether a query token sees no later keys; otherwise it sees all of its sequence, or the last `window` of it.
    pub causal: bool,
    /// ALiBi slopes, `[q_heads]`: `slope · (key position - query position)` is added to scores.
    pub alibi: Option<&'a Tensor<f32>>,
    /// Attention sinks, `[q_heads]`: scores without keys that take part in the softmax, below 2^127 in magnitude.
    pub sinks: Option<&'a Tensor<f32>>,
    /// Scales of a cache of 8-bit elements, which needs them; not negative.
    pub scales: Option<Scales<'a>>,
    /// Which kernel.
    pub path: PrefillPath,
}

impl Default for PrefillOptions<'_> {
    fn default() -> Self {
        Self {
            scale: None,
            soft_cap: 0.0,
            window: 0,
            causal: true,
            alibi: None,
            sinks: None,
            scales: None,
            path: PrefillPath::Auto,
        }
    }
}

impl<'a> PrefillOptions<'a> {
    /// With this factor for the scores.
    pub fn scale(mut self, scale: f32) -> Self {
        self.scale = Some(scale);
        self
    }
    /// With this soft cap.
    pub fn soft_cap(mut self, cap: f32) -> Self {
        self.soft_cap = cap;
        self
    }
    /// With this sliding window.
    pub fn window(mut self, window: usize) -> Self {
        self.window = window;
        self
    }
    /// Causal or not.
    pub fn causal(mut self, causal: bool) -> Self {
        self.causal = causal;
        self
    }
    /// With these ALiBi slopes.
    pub fn alibi(mut self, slopes: &'a Tensor<f32>) -> Self {
        self.alibi = Some(slopes);
        self
    }
    /// With these sinks.
    pub fn sinks(mut self, sinks: &'a Tensor<f32>) -> Self {
        self.sinks = Some(sinks);
        self
    }
    /// With these scales of the cache.
    pub fn scales(mut self, key: &'a Tensor<f32>, value: &'a Tensor<f32>) -> Self {
        self.scales = Some(Scales::new(key, value));
        self
    }
    /// With this kernel.
    pub fn path(mut self, path: PrefillPath) -> Self {
        self.path = path;
        self
    }
}

/// Scratch memory of [`prefill`]: counters from which blocks draw their work, and perhaps room for results of parts of the
/// keys. One workspace serves one stream at a time, for any shapes.
#[derive(Debug)]
pub struct PrefillWorkspace {
    tickets: Tensor<u32>,
    partial: Option<Tensor<f32>>,
}

impl PrefillWorkspace {
    /// The scratch memory, some words.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub fn new(device: &Device) -> Result<Self> {
        Ok(Self { tickets: Tensor::zeros(device, &[TICKETS])?, partial: None })
    }

    /// The scratch memory with which [`PrefillPath::Wgmma`] and [`PrefillPath::Mma`] divide the keys of long sequences among blocks where a
    /// call has tiles of query tokens for half of them or fewer: a short chunk of a long prompt takes a fraction of the time. Then results differ in their
    /// last bits with what else is in the batch. 139 KB for each multiprocessor, 18.4 MB for an H200.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub fn splitting(device: &Device) -> Result<Self> {
        let multiprocessors = device.properties().multiprocessors;
        let tickets = Tensor::zeros(device, &[split_tickets(multiprocessors)])?;
        Ok(Self { tickets, partial: Some(Tensor::uninit(device, &[split_floats(multiprocessors)])?) })
    }
}

/// Scratch memory of [`launch`] (layer L1).
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Scratch {
    /// [`TICKETS`] words or, with `partial`, [`split_tickets`], which are zeros before the first launch.
    pub tickets: *mut u32,
    /// [`split_floats`] floats at a multiple of 16 bytes, with which the keys of few query tokens are divided as
    /// [`PrefillWorkspace::splitting`] says, or null.
    pub partial: *mut f32,
}

impl Scratch {
    /// Of [`TICKETS`] words, without room for partial results.
    pub const fn new(tickets: *mut u32) -> Self {
        Self { tickets, partial: std::ptr::null_mut() }
    }

    /// Of [`split_tickets`] words and [`split_floats`] floats.
    pub const fn splitting(tickets: *mut u32, partial: *mut f32) -> Self {
        Self { tickets, partial }
    }
}

/// Words of [`mma::Args`]' and [`wgmma::Args`]' `tickets` (layer L1).
pub const TICKETS: usize = 2;

/// Words of [`mma::Args`]' and [`wgmma::Args`]' `tickets` if there is room for partial results (layer L1).
pub const fn split_tickets(multiprocessors: u32) -> usize {
    // Warps of two blocks of `Mma`; `Wgmma` has up to three consumers.
    product(&[multiprocessors as usize, 2 * mma::THREADS / 32]).saturating_add(TICKETS)
}

/// Floats of [`mma::Args`]' and [`wgmma::Args`]' `partial` (layer L1), for heads of any size.
pub const fn split_floats(multiprocessors: u32) -> usize {
    // Of `Mma`'s instances those for heads of 128 need most; `Wgmma` needs most for heads of 256.
    let (portable, hopper) = (2 * mma::partial_floats(128, 2), wgmma::partial_floats(256, 2));
    product(&[multiprocessors as usize, most(portable, hopper)])
}

/// Of K and V together so much should be in use at one time, in bytes: what surely fits into the L2 cache of an A100 (40
/// MB) or H100 (50 MB), beside what else passes through it.
const SECTION_BYTES: usize = 32 << 20;

/// The `section_keys` of [`mma::Args`] and [`wgmma::Args`], for heads of one element at least.
pub const fn section_keys(dtype: DType, head_dim: usize) -> u32 {
    (SECTION_BYTES / product(&[2, most(head_dim, 1), dtype.size()])) as u32
}

/// The entry of [`PrefillPath::Wgmma`] for heads of this size over a cache of `cache` elements, and how it divides the work;
/// `bent`: with a soft cap or ALiBi; `split`: with [`wgmma::Args`]' `partial`.
pub const fn wgmma_entry(
    dtype: DType,
    cache: DType,
    head_dim: usize,
    bent: bool,
    split: bool,
) -> Option<(Entry<wgmma::Args>, wgmma::Shape)> {
    use wgmma::*;
    let narrow = cache.size() == 1;
    let width = match head_dim {
        _ if narrow && !head_dim.is_multiple_of(16) => return None,
        // The copy engine fills rows of 8-bit elements up with zeros.
        1..=64 if narrow => 64,
        65..=128 if narrow => 128,
        64 | 96 | 128 | 256 => head_dim,
        _ => return None,
    };
    if !narrow && dtype as u8 != cache as u8 {
        return None;
    }
    let (whole, parts) = match (dtype, width, narrow, bent) {
        (DType::Bf16, 64, false, false) => (prefill_wgmma_d64_bf16::ENTRY, prefill_wgmma_d64_bf16_split::ENTRY),
        (DType::F16, 64, false, false) => (prefill_wgmma_d64_f16::ENTRY, prefill_wgmma_d64_f16_split::ENTRY),
        (DType::Bf16, 64, false, true) => {
            (prefill_wgmma_d64_bf16_bent::ENTRY, prefill_wgmma_d64_bf16_bent_split::ENTRY)
        }
        (DType::F16, 64, false, true) => (prefill_wgmma_d64_f16_bent::ENTRY, prefill_wgmma_d64_f16_bent_split::ENTRY),
        (DType::Bf16, 64, true, false) => (prefill_wgmma_d64_bf16_8::ENTRY, prefill_wgmma_d64_bf16_8_split::ENTRY),
        (DType::F16, 64, true, false) => (prefill_wgmma_d64_f16_8::ENTRY, prefill_wgmma_d64_f16_8_split::ENTRY),
        (DType::Bf16, 64, true, true) => {
            (prefill_wgmma_d64_bf16_8_bent::ENTRY, prefill_wgmma_d64_bf16_8_bent_split::ENTRY)
        }
        (DType::F16, 64, true, true) => {
            (prefill_wgmma_d64_f16_8_bent::ENTRY, prefill_wgmma_d64_f16_8_bent_split::ENTRY)
        }
        (DType::Bf16, 96, false, false) => (prefill_wgmma_d96_bf16::ENTRY, prefill_wgmma_d96_bf16_split::ENTRY),
        (DType::F16, 96, false, false) => (prefill_wgmma_d96_f16::ENTRY, prefill_wgmma_d96_f16_split::ENTRY),
        (DType::Bf16, 96, false, true) => {
            (prefill_wgmma_d96_bf16_bent::ENTRY, prefill_wgmma_d96_bf16_bent_split::ENTRY)
        }
        (DType::F16, 96, false, true) => (prefill_wgmma_d96_f16_bent::ENTRY, prefill_wgmma_d96_f16_bent_split::ENTRY),
        (DType::Bf16, 128, false, false) => (prefill_wgmma_d128_bf16::ENTRY, prefill_wgmma_d128_bf16_split::ENTRY),
        (DType::F16, 128, false, false) => (prefill_wgmma_d128_f16::ENTRY, prefill_wgmma_d128_f16_split::ENTRY),
        (DType::Bf16, 128, false, true) => {
            (prefill_wgmma_d128_bf16_bent::ENTRY, prefill_wgmma_d128_bf16_bent_split::ENTRY)
        }
        (DType::F16, 128, false, true) => {
            (prefill_wgmma_d128_f16_bent::ENTRY, prefill_wgmma_d128_f16_bent_split::ENTRY)
        }
        (DType::Bf16, 128, true, false) => (prefill_wgmma_d128_bf16_8::ENTRY, prefill_wgmma_d128_bf16_8_split::ENTRY),
        (DType::F16, 128, true, false) => (prefill_wgmma_d128_f16_8::ENTRY, prefill_wgmma_d128_f16_8_split::ENTRY),
        (DType::Bf16, 128, true, true) => {
            (prefill_wgmma_d128_bf16_8_bent::ENTRY, prefill_wgmma_d128_bf16_8_bent_split::ENTRY)
        }
        (DType::F16, 128, true, true) => {
            (prefill_wgmma_d128_f16_8_bent::ENTRY, prefill_wgmma_d128_f16_8_bent_split::ENTRY)
        }
        (DType::Bf16, 256, false, false) => (prefill_wgmma_d256_bf16::ENTRY, prefill_wgmma_d256_bf16_split::ENTRY),
        (DType::F16, 256, false, false) => (prefill_wgmma_d256_f16::ENTRY, prefill_wgmma_d256_f16_split::ENTRY),
        (DType::Bf16, 256, false, true) => {
            (prefill_wgmma_d256_bf16_bent::ENTRY, prefill_wgmma_d256_bf16_bent_split::ENTRY)
        }
        (DType::F16, 256, false, true) => {
            (prefill_wgmma_d256_f16_bent::ENTRY, prefill_wgmma_d256_f16_bent_split::ENTRY)
        }
        _ => return None,
    };
    // As in the table of entries.
    let (keys, consumers, q_stages) = match width {
        64 if !narrow && !bent => (128, 3, 2),
        256 => (64, 2, 1),
        _ => (128, 2, 2),
    };
    let shape = Shape { head_dim: width, keys, consumers, q_stages, stages: 2, narrow };
    Some((if split { parts } else { whole }, shape))
}

/// What there is of [`PrefillPath::Mma`] for a head size.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct MmaTile {
    /// Rows of a tile: query tokens times the heads that share a KV head.
    pub rows: usize,
    /// Dynamic shared memory of a block.
    pub shared_bytes: usize,
    /// Blocks of a multiprocessor.
    pub blocks: u32,
}

/// The entry of [`PrefillPath::Mma`] for heads of this size over a cache of `cache` elements in this layout, and how it divides the work;
/// `split`: with [`mma::Args`]' `partial`.
pub const fn mma_entry(
    dtype: DType,
    cache: DType,
    layout: CacheLayout,
    head_dim: usize,
    split: bool,
) -> Option<(Entry<mma::Args>, MmaTile)> {
    use mma::*;
    let narrow = cache.size() == 1;
    let x_split = matches!(layout, CacheLayout::XSplit);
    if head_dim == 0 || !head_dim.is_multiple_of(if narrow { 16 } else { 8 }) || (!narrow && dtype as u8 != cache as u8)
    {
        return None;
    }
    // Padded head size, keys of a block, rows of a warp by 16: as in the table of entries.
    let (dim, keys, tiles) = match head_dim {
        0..=64 if narrow => (64, 32, 2),
        0..=64 => (64, 48, 2),
        65..=96 if !narrow && !x_split => (96, 32, 2),
        65..=128 => (128, 32, 2),
        129..=192 if !narrow && !x_split => (192, 32, 1),
        129..=256 => (256, 16, 1),
        _ => return None,
    };
    let (whole, parts) = match (dtype, dim, narrow, x_split) {
        (DType::Bf16, 64, false, false) => (prefill_d64_bf16::ENTRY, prefill_d64_bf16_split::ENTRY),
        (DType::F16, 64, false, false) => (prefill_d64_f16::ENTRY, prefill_d64_f16_split::ENTRY),
        (DType::Bf16, 64, true, false) => (prefill_d64_bf16_8::ENTRY, prefill_d64_bf16_8_split::ENTRY),
        (DType::F16, 64, true, false) => (prefill_d64_f16_8::ENTRY, prefill_d64_f16_8_split::ENTRY),
        (DType::Bf16, 96, _, false) => (prefill_d96_bf16::ENTRY, prefill_d96_bf16_split::ENTRY),
        (DType::F16, 96, _, false) => (prefill_d96_f16::ENTRY, prefill_d96_f16_split::ENTRY),
        (DType::Bf16, 128, false, false) => (prefill_d128_bf16::ENTRY, prefill_d128_bf16_split::ENTRY),
        (DType::F16, 128, false, false) => (prefill_d128_f16::ENTRY, prefill_d128_f16_split::ENTRY),
        (DType::Bf16, 128, true, false) => (prefill_d128_bf16_8::ENTRY, prefill_d128_bf16_8_split::ENTRY),
        (DType::F16, 128, true, false) => (prefill_d128_f16_8::ENTRY, prefill_d128_f16_8_split::ENTRY),
        (DType::Bf16, 192, _, false) => (prefill_d192_bf16::ENTRY, prefill_d192_bf16_split::ENTRY),
        (DType::F16, 192, _, false) => (prefill_d192_f16::ENTRY, prefill_d192_f16_split::ENTRY),
        (DType::Bf16, _, false, false) => (prefill_d256_bf16::ENTRY, prefill_d256_bf16_split::ENTRY),
        (DType::F16, _, false, false) => (prefill_d256_f16::ENTRY, prefill_d256_f16_split::ENTRY),
        (DType::Bf16, _, true, false) => (prefill_d256_bf16_8::ENTRY, prefill_d256_bf16_8_split::ENTRY),
        (DType::F16, _, true, false) => (prefill_d256_f16_8::ENTRY, prefill_d256_f16_8_split::ENTRY),
        (DType::Bf16, 64, false, true) => (prefill_d64_bf16_x::ENTRY, prefill_d64_bf16_x_split::ENTRY),
        (DType::F16, 64, false, true) => (prefill_d64_f16_x::ENTRY, prefill_d64_f16_x_split::ENTRY),
        (DType::Bf16, 128, false, true) => (prefill_d128_bf16_x::ENTRY, prefill_d128_bf16_x_split::ENTRY),
        (DType::F16, 128, false, true) => (prefill_d128_f16_x::ENTRY, prefill_d128_f16_x_split::ENTRY),
        (DType::Bf16, _, false, true) => (prefill_d256_bf16_x::ENTRY, prefill_d256_bf16_x_split::ENTRY),
        (DType::F16, _, false, true) => (prefill_d256_f16_x::ENTRY, prefill_d256_f16_x_split::ENTRY),
        (DType::Bf16, 64, true, true) => (prefill_d64_bf16_8_x::ENTRY, prefill_d64_bf16_8_x_split::ENTRY),
        (DType::F16, 64, true, true) => (prefill_d64_f16_8_x::ENTRY, prefill_d64_f16_8_x_split::ENTRY),
        (DType::Bf16, 128, true, true) => (prefill_d128_bf16_8_x::ENTRY, prefill_d128_bf16_8_x_split::ENTRY),
        (DType::F16, 128, true, true) => (prefill_d128_f16_8_x::ENTRY, prefill_d128_f16_8_x_split::ENTRY),
        (DType::Bf16, _, true, true) => (prefill_d256_bf16_8_x::ENTRY, prefill_d256_bf16_8_x_split::ENTRY),
        (DType::F16, _, true, true) => (prefill_d256_f16_8_x::ENTRY, prefill_d256_f16_8_x_split::ENTRY),
        _ => return None,
    };
    let tile = MmaTile { rows: rows(tiles), shared_bytes: shared_bytes(dim, keys, tiles, narrow, x_split), blocks: 2 };
    Some((if split { parts } else { whole }, tile))
}

/// The entry of [`PrefillPath::Plain`] over a cache of `cache` elements.
pub const fn plain_entry(dtype: DType, cache: DType) -> Option<Entry<plain::Args>> {
    use plain::*;
    Some(match (dtype, narrow_kind(cache)) {
        (DType::F32, Some(_)) => prefill_plain_f32_8::ENTRY,
        (DType::F16, Some(_)) => prefill_plain_f16_8::ENTRY,
        (DType::Bf16, Some(_)) => prefill_plain_bf16_8::ENTRY,
        _ if dtype as u8 != cache as u8 => return None,
        (DType::F32, _) => prefill_plain_f32::ENTRY,
        (DType::F16, _) => prefill_plain_f16::ENTRY,
        (DType::Bf16, _) => prefill_plain_bf16::ENTRY,
        _ => return None,
    })
}

/// The `kind` of the three kernels' arguments for an 8-bit type.
pub const fn narrow_kind(cache: DType) -> Option<u32> {
    Some(match cache {
        DType::E4m3 => narrow::E4M3,
        DType::E5m2 => narrow::E5M2,
        DType::I8 => narrow::I8,
        _ => return None,
    })
}

/// How to launch [`PrefillPath::Wgmma`] on so many multiprocessors.
pub const fn wgmma_geometry(shape: wgmma::Shape, multiprocessors: u32) -> Geometry {
    Geometry::linear(multiprocessors, shape.threads() as u32).shared_bytes(shape.shared_bytes() as u32).dependent()
}

/// How to launch [`PrefillPath::Mma`] with what [`mma_entry`] gave, on so many multiprocessors.
pub const fn mma_geometry(tile: MmaTile, multiprocessors: u32) -> Geometry {
    Geometry::linear(tile.blocks.saturating_mul(multiprocessors), mma::THREADS as u32)
        .shared_bytes(tile.shared_bytes as u32)
        .dependent()
}

/// How to launch [`PrefillPath::Plain`] for so many query tokens times heads.
pub const fn plain_geometry(rows: u32) -> Geometry {
    Geometry::linear(rows.div_ceil(plain::THREADS as u32 / 32), plain::THREADS as u32)
        .dependent()
        .shared_bytes(plain::SHARED_BYTES as u32)
}

/// Query tokens of a tile of `rows` rows if `group` query heads share a KV head.
pub const fn tile_tokens(rows: usize, group: usize) -> usize {
    match rows.checked_div(group) {
        Some(tokens) => tokens,
        None => 0,
    }
}

/// The tensor map of Q for [`PrefillPath::Wgmma`]: `[tokens, heads, head_dim]` at `base`, strides in elements.
///
/// # Errors
/// Those of [`Device::tensor_map`].
pub fn wgmma_query_map(
    device: &Device,
    base: u64,
    dtype: DType,
    tile: wgmma::Shape,
    dims: [usize; 3],
    strides: (usize, usize),
    group: usize,
) -> Result<TensorMap> {
    token_map(device, base, dtype, tile, dims, strides, [group, tile_tokens(tile.rows(), group)])
}

/// The tensor map of the output for [`PrefillPath::Wgmma`], `[tokens, heads, head_dim]` at `base`, strides in elements: a box is what a
/// warp stores of a line, 16 rows. Where they are no whole tokens the kernel uses no boxes.
///
/// # Errors
/// Those of [`Device::tensor_map`].
pub fn wgmma_output_map(
    device: &Device,
    base: u64,
    dtype: DType,
    tile: wgmma::Shape,
    dims: [usize; 3],
    strides: (usize, usize),
    group: usize,
) -> Result<TensorMap> {
    let (box_heads, box_tokens) = if 16_usize.is_multiple_of(group) { (group, 16 / group) } else { (1, 1) };
    token_map(device, base, dtype, tile, dims, strides, [box_heads, box_tokens])
}

/// A map over `[tokens, heads, head_dim]`, boxes of a line × heads × tokens.
fn token_map(
    device: &Device,
    base: u64,
    dtype: DType,
    tile: wgmma::Shape,
    [tokens, heads, head_dim]: [usize; 3],
    (token, head): (usize, usize),
    [box_heads, box_tokens]: [usize; 2],
) -> Result<TensorMap> {
    // What is too large for 64 bits is too large for a map.
    let bytes = |stride: usize| (stride as u64).saturating_mul(dtype.size() as u64);
    device.tensor_map(&TensorMapDescription {
        base,
        dtype,
        rank: 3,
        dims: [head_dim as u64, heads as u64, tokens as u64, 1, 1],
        strides: [map_stride(heads, bytes(head)), map_stride(tokens, bytes(token)), 0, 0],
        box_dims: [tile.line() as u32, box_heads as u32, box_tokens as u32, 1, 1],
        swizzle: tile.swizzle(),
    })
}

/// The tensor map of K or V for [`PrefillPath::Wgmma`]. A box is up to a page of one head: of 16-bit elements eight keys of a
/// line at a time, of 8-bit elements row after row.
///
/// # Errors
/// Those of [`Device::tensor_map`].
pub fn wgmma_cache_map(
    device: &Device,
    base: u64,
    dtype: DType,
    tile: wgmma::Shape,
    shape: CacheShape,
    strides: PageStrides,
) -> Result<TensorMap> {
    let bytes = |stride: usize| (stride as u64).saturating_mul(dtype.size() as u64).max(16);
    let block = map_stride(shape.blocks, bytes(strides.block));
    let (dim, heads, slots, blocks) =
        (shape.head_dim as u64, shape.heads as u64, shape.block_size as u64, shape.blocks as u64);
    let box_slots = shape.block_size.min(tile.box_keys()) as u32;
    device.tensor_map(&if tile.narrow {
        TensorMapDescription {
            base,
            dtype,
            rank: 4,
            dims: [dim, slots, heads, blocks, 1],
            strides: [bytes(strides.token), map_stride(shape.heads, bytes(strides.head)), block, 0],
            box_dims: [tile.head_dim as u32, box_slots, 1, 1, 1],
            swizzle: Swizzle::None,
        }
    } else {
        let line = tile.line() as u64;
        let lines = dim / line;
        TensorMapDescription {
            base,
            dtype,
            rank: 5,
            dims: [
                line,
                8,
                heads.saturating_sub(1).saturating_mul(strides.head as u64 / line).saturating_add(lines),
                slots / 8,
                blocks,
            ],
            strides: [bytes(strides.token), 2 * line, bytes(strides.token).saturating_mul(8), block],
            box_dims: [line as u32, 8, lines as u32, box_slots / 8, 1],
            swizzle: tile.swizzle(),
        }
    })
}

/// Attention of the query tokens of each sequence over its keys, its own query tokens' among them.
///
/// * `query`, `out`: `[tokens, q_heads, head_dim]`, the chunks of all sequences one after another; dense in the last dimension.
/// * `cache`: the layer's pages, where the chunks' own keys and values already are, of the type of `query` or of 8 bits with
///   `scales`; `q_heads` is a multiple of its heads,
///   and head `h` reads KV head `h / (q_heads / kv_heads)`.
/// * `block_table`: `[sequences, max_blocks]`, the pages of each sequence in order. A page number outside of the cache
///   counts as unseen keys.
/// * `starts`: `[sequences + 1]`, ascending: the first query token of each sequence, and the end of the last. (Of a token that two sequences have by starts
///   that do not ascend the result is that of one of them, or a mixture.) Tokens of no sequence
///   get no output.
/// * `lens`: `[sequences]`, keys of each sequence. The query tokens are the last of them: query token `i` of `n` is at
///   position `len - n + i`. A token that sees no key gets zeros.
/// * `lse`: `[tokens, q_heads]`, receives the logarithm of each softmax's denominator.
///
/// Scores, softmax and the sum over values are in f32; the tensor-core paths multiply rounded probabilities, as
/// FlashAttention does. A result depends on its own sequence's chunk only, unless `workspace` is [splitting](PrefillWorkspace::splitting). Source: Dao et al., *FlashAttention* 1 to 3,
/// 2022 to 2024.
///
/// # Errors
/// [`Shape`](Error::Shape), [`Stride`](Error::Stride), [`Value`](Error::Value) (head ratio, head size, options),
/// [`DType`](Error::DType), [`Overlap`](Error::Overlap), [`WrongDevice`](Error::WrongDevice),
/// [`Unsupported`](Error::Unsupported) if `options.path` does not take these tensors.
#[expect(clippy::too_many_arguments, reason = "outputs, inputs and workspace of one operation")]
pub fn prefill<T: Float + CacheElement, S: CacheElement>(
    stream: &Stream,
    out: &mut Tensor<T>,
    lse: Option<&mut Tensor<f32>>,
    query: &Tensor<T>,
    cache: &KvCache<S>,
    block_table: &Tensor<i32>,
    starts: &Tensor<i32>,
    lens: &Tensor<i32>,
    options: &PrefillOptions<'_>,
    workspace: &mut PrefillWorkspace,
) -> Result<()> {
    let mut call = Call::new(OP, stream);
    let cs = cache.shape();
    let (head_dim, kv_heads) = (cs.head_dim, cs.heads);
    let &[tokens, q_heads, q_dim] = query.shape() else {
        return Err(call.bad_shape("query", query.shape(), "[tokens, q_heads, head_dim]"));
    };
    if q_dim != head_dim {
        return Err(call.bad_shape("query", query.shape(), format!("[.., {head_dim}], like the cache")));
    }
    call.same_shape("out", out.shape(), query.shape())?;
    call.value(
        q_heads.is_multiple_of(kv_heads),
        "query",
        format!("of a multiple of the cache's {kv_heads} heads"),
        format!("{q_heads} heads"),
    )?;
    let max_dim = plain::MAX_HEAD_DIM;
    call.value(head_dim <= max_dim, "cache", format!("of heads of 1 to {max_dim}"), head_dim)?;
    call.dense_last("query", query)?;
    call.dense_last("out", out)?;
    call.distinct("out", out)?;
    let &[sequences, max_pages] = block_table.shape() else {
        return Err(call.bad_shape("block_table", block_table.shape(), "[sequences, max_blocks]"));
    };
    call.contiguous("block_table", block_table)?;
    call.same_shape("starts", starts.shape(), &[sequences + 1])?;
    call.contiguous("starts", starts)?;
    call.same_shape("lens", lens.shape(), &[sequences])?;
    call.contiguous("lens", lens)?;
    if let Some(lse) = &lse {
        call.same_shape("lse", lse.shape(), &[tokens, q_heads])?;
        call.contiguous("lse", lse)?;
    }
    for (arg, t) in [("alibi", options.alibi), ("sinks", options.sinks)] {
        if let Some(t) = t {
            call.same_shape(arg, t.shape(), &[q_heads])?;
            call.contiguous(arg, t)?;
        }
    }
    let scale = options.scale.unwrap_or(1.0 / (head_dim as f32).sqrt());
    call.value(scale.is_finite(), "scale", "finite", scale)?;
    let soft_cap = options.soft_cap;
    check_soft_cap(&call, soft_cap)?;
    call.count("block_table", max_pages.saturating_mul(cs.block_size))?;

    let (q_token, q_head) = (query.strides()[0], query.strides()[1]);
    let (out_token, out_head) = (out.strides()[0], out.strides()[1]);
    let (ks, vs) = (cache.key_strides(), cache.value_strides());
    if plain_entry(T::DTYPE, S::DTYPE).is_none() {
        return Err(no_kernel(OP, T::DTYPE, S::DTYPE));
    }
    let scales = check_scales(&mut call, options.scales, kv_heads, T::DTYPE, S::DTYPE)?;
    let args = plain::Args {
        out: call.write("out", out)?,
        lse: call.write_opt("lse", lse)?.cast(),
        q: call.read("query", query)?,
        k: call.read("cache.key", cache.key())?,
        v: call.read("cache.value", cache.value())?,
        starts: call.read("starts", starts)?.cast(),
        lens: call.read("lens", lens)?.cast(),
        block_table: call.read("block_table", block_table)?.cast(),
        alibi: call.read_opt("alibi", options.alibi)?.cast(),
        sinks: call.read_opt("sinks", options.sinks)?.cast(),
        k_scales: scales.key,
        v_scales: scales.value,
        scale_per_head: scales.per_head as u32,
        kind: narrow_kind(S::DTYPE).unwrap_or_default(),
        sequences: call.count("block_table", sequences)?,
        tokens: call.count("query", tokens)?,
        q_heads: call.count("query", q_heads)?,
        kv_heads: call.count("cache", kv_heads)?,
        head_dim: call.count("cache", head_dim)?,
        page_size: call.count("cache", cs.block_size)?,
        max_pages: call.count("block_table", max_pages)?,
        pages: call.count("cache", cs.blocks)?,
        q_token,
        q_head,
        out_token,
        out_head,
        k_page: ks.block,
        k_slot: ks.token,
        k_head: ks.head,
        k_run: call.count("cache", ks.run)?,
        k_run_stride: ks.run_stride,
        v_page: vs.block,
        v_slot: vs.token,
        v_head: vs.head,
        v_run: call.count("cache", vs.run)?,
        v_run_stride: vs.run_stride,
        scale,
        soft_cap,
        window: u32::try_from(options.window).unwrap_or(u32::MAX / 2).min(u32::MAX / 2),
        causal: options.causal as u32,
    };
    call.count("query", tokens.saturating_mul(q_heads))?;
    // The kernels number pairs of sequence and KV head.
    call.count("block_table", sequences.saturating_mul(kv_heads))?;
    let tickets = call.write("workspace", &mut workspace.tickets)?.cast();
    let scratch = Scratch { tickets, partial: call.write_opt("workspace", workspace.partial.as_mut())?.cast() };
    call.check_overlap()?;
    if tokens == 0 || q_heads == 0 || sequences == 0 {
        return Ok(());
    }

    // SAFETY: shapes, strides, alignment, device and overlap were checked above; starts, lengths and page numbers are clamped by the
    // kernels.
    unsafe { launch(stream, T::DTYPE, S::DTYPE, cache.layout(), options.path, &args, scratch) }
}

/// Launches on raw pointers (layer L1): with the kernel that `path` names, or that suits `args` and the device.
///
/// `args` are those of the plain kernel, which say all that the others need; `kind` follows from `cache`. `lse`, `alibi`, `sinks` and the
/// scales may be null, the latter for 16-bit caches only; `k_run` and its like are those of [`PageStrides`], and `window` is 0 for none.
///
/// # Errors
/// [`Error::Unsupported`] and [`Error::DType`] for what the path has no kernel for, and those of [`Stream::launch`].
///
/// # Safety
/// The pointers are device memory of the sizes that strides and extents imply, aligned to their element types, until the launch is
/// done; `out`, `lse` and the scratch memory overlap nothing else. Tokens times `q_heads`, and sequences times `kv_heads`, are fewer than 2^31. `q_heads` is a multiple of `kv_heads`, `head_dim` from 1 to 256; a table holds fewer than
/// 2^31 keys, `max_pages * page_size`. The scratch memory is as [`Scratch`] says and not in use by other work.
pub unsafe fn launch(
    stream: &Stream,
    dtype: DType,
    cache: DType,
    layout: CacheLayout,
    path: PrefillPath,
    args: &plain::Args,
    scratch: Scratch,
) -> Result<()> {
    if args.tokens == 0 || args.q_heads == 0 || args.sequences == 0 {
        return Ok(());
    }
    let args = plain::Args { kind: narrow_kind(cache).unwrap_or_default(), ..*args };
    let (q_heads, kv_heads, head_dim) = (args.q_heads as usize, args.kv_heads as usize, args.head_dim as usize);
    let section_keys = section_keys(cache, head_dim);
    // What the tensor-core kernels take.
    let group = q_heads / kv_heads;
    let aligned = |to: usize, address: usize, strides: &[usize], size: usize| {
        address.is_multiple_of(to) && strides.iter().all(|s| (s * size).is_multiple_of(to))
    };
    let size = dtype.size();
    let x_split = layout == CacheLayout::XSplit;
    // Elements of 16 bytes; of x-split values as many keys, which are of one page.
    let x = (16 / cache.size()) as u32;
    let least_page = if x_split { x.max(8) } else { 8 };
    // What the kernels take for given where a token has no place of its own.
    let (runs, tokens_apart) = ([args.k_run, args.v_run], [args.k_slot, args.v_slot]);
    let pieces = !x_split || runs == [x, 1] && tokens_apart == [x as usize, 1];
    // From one place to the next along each dimension.
    let (k_along, v_along) = if x_split { (args.k_run_stride, args.v_run_stride) } else { (args.k_slot, args.v_slot) };
    let (k_strides, v_strides) = ([args.k_page, k_along, args.k_head], [args.v_page, v_along, args.v_head]);
    let paged = args.pages > 0
        && args.page_size.is_power_of_two()
        && args.page_size >= least_page
        && pieces
        && aligned(16, args.k as usize, &k_strides, cache.size())
        && aligned(16, args.v as usize, &v_strides, cache.size());
    let bent = args.soft_cap > 0.0 || !args.alibi.is_null();
    let multiprocessors = stream.device().properties().multiprocessors;
    let wgmma = wgmma_entry(dtype, cache, head_dim, bent, false).filter(|(_, shape)| {
        paged
            && !x_split
            && group <= shape.rows()
            && args.scale > 0.0
            // The copy engine has no stride of 0, as one query for all tokens or heads has.
            && (args.tokens == 1 || args.q_token > 0)
            && (q_heads == 1 || args.q_head > 0)
            && (shape.narrow || aligned(2 * shape.line(), 0, &[args.k_head, args.v_head], size))
            && [args.k_head, args.v_head].iter().all(|head| head / shape.line() <= i32::MAX as usize / kv_heads)
            && aligned(16, args.q as usize, &[args.q_token, args.q_head], size)
            && aligned(16, args.out as usize, &[args.out_token, args.out_head], size)
            && stream.device().properties().compute_capability == (9, 0)
    });
    let mma = mma_entry(dtype, cache, layout, head_dim, false).filter(|(_, tile)| {
        paged
            && group <= tile.rows
            && aligned(4, args.q as usize, &[args.q_token, args.q_head], size)
            && aligned(4, args.out as usize, &[args.out_token, args.out_head], size)
    });
    // Of more tiles than half of the blocks no keys are divided, and the kernels that may are up to 5 % slower.
    let split = |rows: usize, blocks: u32| {
        let tiles = args.tokens.div_ceil(tile_tokens(rows, group) as u32).saturating_mul(args.kv_heads);
        !scratch.partial.is_null() && tiles <= blocks / 2
    };
    // The SIMT device runs either, the portable kernel faster.
    let hopper = !stream.device().is_simt();
    match (path, wgmma, mma) {
        (PrefillPath::Wgmma, Some(wgmma), _) | (PrefillPath::Auto, Some(wgmma), None) => {
            let split = split(wgmma.1.rows(), multiprocessors);
            let wgmma = wgmma_entry(dtype, cache, head_dim, bent, split).unwrap_or(wgmma);
            launch_wgmma(stream, dtype, cache, wgmma, &args, group, scratch)
        }
        (PrefillPath::Auto, Some(wgmma), _) if hopper => {
            let split = split(wgmma.1.rows(), multiprocessors);
            let wgmma = wgmma_entry(dtype, cache, head_dim, bent, split).unwrap_or(wgmma);
            launch_wgmma(stream, dtype, cache, wgmma, &args, group, scratch)
        }
        (PrefillPath::Auto | PrefillPath::Mma, _, Some((whole, tile))) => {
            let split = split(tile.rows, tile.blocks.saturating_mul(multiprocessors));
            let (entry, tile) = mma_entry(dtype, cache, layout, head_dim, split).unwrap_or((whole, tile));
            let args = mma::Args {
                out: args.out,
                lse: args.lse,
                q: args.q,
                k: args.k,
                v: args.v,
                starts: args.starts,
                lens: args.lens,
                block_table: args.block_table,
                alibi: args.alibi,
                sinks: args.sinks,
                k_scales: args.k_scales,
                v_scales: args.v_scales,
                tickets: scratch.tickets,
                partial: scratch.partial,
                scale_per_head: args.scale_per_head,
                kind: args.kind,
                sequences: args.sequences,
                tokens: args.tokens,
                q_heads: args.q_heads,
                kv_heads: args.kv_heads,
                head_dim: args.head_dim,
                page_shift: args.page_size.ilog2(),
                max_pages: args.max_pages,
                pages: args.pages,
                tile_tokens: tile_tokens(tile.rows, group) as u32,
                q_token: args.q_token,
                q_head: args.q_head,
                out_token: args.out_token,
                out_head: args.out_head,
                k_page: args.k_page,
                k_slot: k_along,
                k_head: args.k_head,
                v_page: args.v_page,
                v_slot: v_along,
                v_head: args.v_head,
                scale: args.scale,
                soft_cap: args.soft_cap,
                window: args.window,
                causal: args.causal,
                section_keys,
            };
            let geometry = mma_geometry(tile, multiprocessors);
            // SAFETY: forwarded to the caller.
            unsafe { stream.launch(&entry, &geometry, &args) }
        }
        (PrefillPath::Wgmma | PrefillPath::Mma, _, _) => {
            let rows = match path {
                PrefillPath::Mma => mma_entry(dtype, cache, layout, head_dim, false).map(|(_, tile)| tile.rows),
                _ => wgmma_entry(dtype, cache, head_dim, bent, false).map(|(_, shape)| shape.rows()),
            };
            let wide = path == PrefillPath::Wgmma;
            let to = if wide { 16 } else { 4 };
            let at = |p: *const std::ffi::c_void, strides: &[usize]| format!("at {p:p}, {strides:?} elements apart");
            let (q_strides, out_strides) = ([args.q_token, args.q_head], [args.out_token, args.out_head]);
            let refused = match rows {
                None => format!("{dtype} over a cache of {cache} with heads of {head_dim}"),
                Some(rows) if group > rows => {
                    format!("{group} query heads a KV head, with heads of {head_dim} at most {rows}")
                }
                _ if wide && x_split => "the x-split layout".into(),
                _ if args.pages == 0 => "a cache of no blocks".into(),
                _ if args.page_size < least_page || !args.page_size.is_power_of_two() => {
                    format!("blocks of {} tokens of {cache} in the layout {layout:?}", args.page_size)
                }
                _ if !pieces => format!("an x-split cache of runs of {runs:?} elements, tokens {tokens_apart:?} apart"),
                _ if !aligned(to, args.q as usize, &q_strides, size) => format!("queries {}", at(args.q, &q_strides)),
                _ if !aligned(to, args.out as usize, &out_strides, size) => {
                    format!("outputs {}", at(args.out.cast_const(), &out_strides))
                }
                _ if !aligned(16, args.k as usize, &k_strides, cache.size()) => {
                    format!("keys {}", at(args.k, &k_strides))
                }
                _ if !aligned(16, args.v as usize, &v_strides, cache.size()) => {
                    format!("values {}", at(args.v, &v_strides))
                }
                _ if args.scale <= 0.0 => format!("a scale of {}", args.scale),
                _ if stream.device().properties().compute_capability != (9, 0) => stream.device().name(),
                _ => format!(
                    "queries {}, keys' and values' heads {} and {} elements apart",
                    at(args.q, &q_strides),
                    args.k_head,
                    args.v_head
                ),
            };
            Err(Error::Unsupported {
                op: OP,
                what: format!(
                    "the path {path:?} does not take {refused}; the tensor-core kernels take f16 or bf16 over caches of the same type or of 8 bits, blocks of 8 tokens or more \
                     (a power of two), of 16 where 8-bit elements are x-split, heads of a multiple of 8 elements, over 8-bit caches of 16, keys and values at multiples of 16 bytes, queries and \
                     outputs of 4; `Wgmma` wants a Hopper GPU, NHD or HND, a positive scale, queries and outputs at multiples of 16 bytes and not 0 apart, \
                     and heads of 64, 96, 128 or 256, over 16-bit caches a multiple of 128 bytes apart (64 of heads of 96), or over 8-bit caches a multiple of 16 up to 128; use PrefillPath::Auto"
                ),
            })
        }
        _ => {
            let entry = plain_entry(dtype, cache).ok_or_else(|| no_kernel(OP, dtype, cache))?;
            // SAFETY: forwarded to the caller.
            unsafe { stream.launch(&entry, &plain_geometry(args.tokens.saturating_mul(args.q_heads)), &args) }
        }
    }
}

/// [`PrefillPath::Wgmma`] for arguments that it takes.
fn launch_wgmma(
    stream: &Stream,
    dtype: DType,
    cache: DType,
    (entry, shape): (Entry<wgmma::Args>, wgmma::Shape),
    args: &plain::Args,
    group: usize,
    Scratch { tickets, partial }: Scratch,
) -> Result<()> {
    let device = stream.device();
    let (blocks, block_size) = (args.pages as usize, args.page_size as usize);
    let cs = CacheShape::new(blocks, block_size, args.kv_heads as usize, args.head_dim as usize);
    let ks = PageStrides::of_dense_heads(args.k_page, args.k_slot, args.k_head, cs.head_dim);
    let vs = PageStrides::of_dense_heads(args.v_page, args.v_slot, args.v_head, cs.head_dim);
    let q_shape = [args.tokens as usize, args.q_heads as usize, cs.head_dim];
    let q_strides = (args.q_token, args.q_head);
    let out_strides = (args.out_token, args.out_head);
    let args = wgmma::Args {
        out: args.out,
        lse: args.lse,
        out_map: wgmma_output_map(device, args.out as u64, dtype, shape, q_shape, out_strides, group)?,
        q_map: wgmma_query_map(device, args.q as u64, dtype, shape, q_shape, q_strides, group)?,
        k_map: wgmma_cache_map(device, args.k as u64, cache, shape, cs, ks)?,
        v_map: wgmma_cache_map(device, args.v as u64, cache, shape, cs, vs)?,
        starts: args.starts,
        lens: args.lens,
        block_table: args.block_table,
        alibi: args.alibi,
        sinks: args.sinks,
        k_scales: args.k_scales,
        v_scales: args.v_scales,
        tickets,
        partial,
        scale_per_head: args.scale_per_head,
        kind: args.kind,
        sequences: args.sequences,
        tokens: args.tokens,
        q_heads: args.q_heads,
        kv_heads: args.kv_heads,
        head_dim: args.head_dim,
        page_shift: cs.block_size.ilog2(),
        max_pages: args.max_pages,
        pages: args.pages,
        tile_tokens: tile_tokens(shape.rows(), group) as u32,
        out_token: args.out_token,
        out_head: args.out_head,
        k_head: (ks.head / shape.line()) as u32,
        v_head: (vs.head / shape.line()) as u32,
        scale: args.scale,
        soft_cap: args.soft_cap,
        window: args.window,
        causal: args.causal,
        section_keys: section_keys(cache, cs.head_dim),
    };
    let geometry = wgmma_geometry(shape, device.properties().multiprocessors);
    // SAFETY: as for the other kernels; the maps describe the tensors.
    unsafe { stream.launch(&entry, &geometry, &args) }
}
