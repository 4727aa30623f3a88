//! Attention of a few query tokens a sequence over a paged KV cache.
//!
//! Three kernels. [`DecodePath::Tma`] and [`DecodePath::Split`] cut long sequences into chunks, share one read of K and V among
//! all query rows of a KV head, and use the tensor cores, the former with Hopper's copy engine; [`DecodePath::Plain`] is
//! vLLM's first kernel without its tuning and takes every layout, storage type and head size. Lengths and block tables are read on the device, and the grid does not depend
//! on them: a captured graph serves every step of a growing batch.

use super::{check_soft_cap, map_stride, no_kernel};
use crate::check::{Call, least, product};
use crate::device::{Device, Geometry, Stream};
use crate::error::{Error, Result};
use crate::kernels::attention::{decode as split, decode_tma as tma, plain};
use crate::kv_cache::layout::{Scales, check_scales};
use crate::kv_cache::{CacheElement, CacheLayout, CacheShape, KvCache, PageStrides};
use crate::tensor::Tensor;
use cuda_std::tma::{Swizzle, TensorMap, TensorMapDescription};
use cuda_std::{DType, Entry, Float};

pub use plain::Args;

const OP: &str = "decode";

/// The most query tokens of a sequence.
pub const MAX_QUERY_TOKENS: usize = 16;

/// The kernels of [`decode`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum DecodePath {
    /// By element types, layout, sizes of heads, groups and blocks, addresses and strides; never by lengths or by how many sequences there are: a sequence
    /// gives the same bits in any batch.
    #[default]
    Auto,
    /// As `Split` for a Hopper GPU, keys and values brought by its copy engine. Heads of 128; over 16-bit caches also of 64
    /// (up to 8 query rows a KV head) and 256, whose heads are a multiple of 128 bytes apart.
    Tma,
    /// Chunks of keys through the tensor cores: f16 and bf16 over a cache of the same type or of 8 bits, in any layout;
    /// head sizes that are multiples of 16 bytes, blocks of 8 tokens or more (16, x-split with 8 bits), a power of two; queries, keys and values at multiples of 16 bytes.
    Split,
    /// A block for each query and head: everything, of at most 65535 sequences.
    Plain,
}

/// How [`DecodePath::Tma`] divides the chunks of a sequence's keys among blocks. The result has the same bits either way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum DecodeSplit {
    /// By the lengths of the batch, on the device: whole where that keeps all blocks busy, by chunks otherwise.
    #[default]
    Auto,
    /// As many keys to each block, sequences being divided between chunks where need be.
    Chunks,
    /// All chunks of a sequence by one block: the least work.
    Whole,
}

/// Options of [`decode`].
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
#[must_use]
pub struct DecodeOptions<'a> {
    /// Multiplies the scores; `1 / sqrt(head_dim)` if `None`. Below 2^127 in magnitude, since exponents are of 2.
    pub scale: Option<f32>,
    /// Scores become `cap · tanh(score / cap)`, within some 2^-18 of it; 0 for none.
    pub soft_cap: f32,
    /// How many of the latest keys a query token sees, itself included; 0 for all. Keys before the first that any query token of a
    /// sequence sees have no part in anything: they may be NaN, and blocks wholly before it are not read, whatever number the
    /// table has for them. What some of a sequence's query tokens see and others do not must be numbers for these others,
    /// since 0 times NaN is NaN.
    pub window: usize,
    /// ALiBi slopes, `[q_heads]`: `slope · (key position - query position)` is added to scores.
    pub alibi: Option<&'a Tensor<f32>>,
    /// Attention sinks, `[q_heads]`: scores without keys that take part in the softmax, below 2^127 in magnitude.
    pub sinks: Option<&'a Tensor<f32>>,
    /// Scales of a quantised cache.
    pub scales: Option<Scales<'a>>,
    /// Which kernel.
    pub path: DecodePath,
    /// How the work is divided; a matter of speed only.
    pub split: DecodeSplit,
}

impl<'a> DecodeOptions<'a> {
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
    pub fn path(mut self, path: DecodePath) -> Self {
        self.path = path;
        self
    }
    /// With the work divided like this.
    pub fn split(mut self, split: DecodeSplit) -> Self {
        self.split = split;
        self
    }
}

/// The logarithm of the fewest keys of a chunk.
const MIN_CHUNK_SHIFT: u32 = 6;

/// Scratch memory of [`decode`] for sequences of up to a length: the partial results of long ones. One workspace serves one
/// stream at a time.
#[derive(Debug)]
pub struct DecodeWorkspace {
    partial: Tensor<f32>,
    tickets: Tensor<u32>,
    shape: DecodeShape,
}

impl DecodeWorkspace {
    /// For calls of this shape.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], or [`Error::Tensor`] for sizes beyond any memory; [`Error::Value`] if `max_len` is not below 2^31,
    /// for a chunk that is not a power of two from 64 to 1024, and for KV heads that do not divide the query heads.
    pub fn new(device: &Device, shape: DecodeShape) -> Result<Self> {
        let DecodeShape { q_heads, kv_heads, max_len, chunk, .. } = shape;
        if q_heads.checked_rem(kv_heads).unwrap_or(q_heads) != 0 {
            let expected = format!("a divisor of the number of query heads, {q_heads}");
            return Err(Error::Value { op: "DecodeWorkspace", arg: "kv_heads", expected, got: kv_heads.to_string() });
        }
        let chunks = 1 << MIN_CHUNK_SHIFT..=1 << split::MAX_CHUNK_SHIFT;
        if let Some(chunk) = chunk.filter(|chunk| !chunk.is_power_of_two() || !chunks.contains(chunk)) {
            let expected = format!("a power of two from {} to {}", chunks.start(), chunks.end());
            return Err(Error::Value { op: "DecodeWorkspace", arg: "chunk", expected, got: chunk.to_string() });
        }
        if i32::try_from(max_len).is_err() {
            let (expected, got) = ("below 2^31".into(), max_len.to_string());
            return Err(Error::Value { op: "DecodeWorkspace", arg: "max_len", expected, got });
        }
        let partial = Tensor::uninit(device, &[shape.partial_floats().max(1)])?;
        let tickets = Tensor::zeros(device, &[shape.tickets().max(1)])?;
        Ok(Self { partial, tickets, shape })
    }
}

/// What [`decode`] is called with at most: the size of its [workspace](DecodeWorkspace).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[must_use]
pub struct DecodeShape {
    /// Sequences.
    pub batch: usize,
    /// Query heads.
    pub q_heads: usize,
    /// Heads of the cache.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Keys of a sequence: as many as the block table can hold.
    pub max_len: usize,
    /// Query tokens of a sequence; 1.
    pub q_len: usize,
    /// Keys of a chunk of a sequence that is split. By default that depends on the sequence's length alone.
    pub chunk: Option<usize>,
}

impl DecodeShape {
    /// For up to `batch` sequences of up to `max_len` keys, one query token each.
    pub const fn new(batch: usize, q_heads: usize, kv_heads: usize, head_dim: usize, max_len: usize) -> Self {
        Self { batch, q_heads, kv_heads, head_dim, max_len, q_len: 1, chunk: None }
    }

    /// With up to this many query tokens of a sequence.
    pub const fn q_len(mut self, q_len: usize) -> Self {
        self.q_len = q_len;
        self
    }

    /// Split into chunks of `chunk` keys, a power of two from 64 to 1024, but no smaller than the kernel's steps, which are 64
    /// or 128 keys. Results with another chunk differ in their last bits.
    pub const fn chunk(mut self, chunk: usize) -> Self {
        self.chunk = Some(chunk);
        self
    }

    /// The `hint` of [`split::Args`] and of [`Scratch`] (layers L0 and L1), those of 64 and 1024 keys for smaller and larger chunks. That
    /// of [`tma::Args`] is [`TmaTile::hint`].
    pub const fn chunk_shift(&self) -> u32 {
        match self.chunk {
            Some(chunk) if chunk > 1 << split::MAX_CHUNK_SHIFT => split::MAX_CHUNK_SHIFT,
            Some(chunk) if chunk >= 1 << MIN_CHUNK_SHIFT => chunk.ilog2(),
            Some(chunk) if chunk > 0 => MIN_CHUNK_SHIFT,
            _ => 0,
        }
    }

    /// Floats of [`split::Args`]' `partial` (layer L1); the largest number if there would be more, or `max_len` is not below
    /// 2^31.
    pub const fn partial_floats(&self) -> usize {
        let &Self { batch, q_len, q_heads, kv_heads, head_dim, max_len, .. } = self;
        if max_len > i32::MAX as usize {
            return usize::MAX;
        }
        partial_floats(batch, q_len, q_heads, kv_heads, head_dim, max_len as u32, self.chunk_shift())
    }

    /// Words of [`tma::Args`]' `tickets` (layer L1), which are zero before the first launch; the largest number if there would
    /// be more.
    pub const fn tickets(&self) -> usize {
        tickets(self.batch, self.q_len, self.q_heads, self.kv_heads, self.head_dim)
    }
}

impl std::fmt::Display for DecodeShape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let &Self { batch, q_heads, kv_heads, head_dim, max_len, q_len, .. } = self;
        write!(f, "DecodeShape::new({batch}, {q_heads}, {kv_heads}, {head_dim}, {max_len}) of {q_len} query tokens")
    }
}

/// Query rows of a KV head that one block serves; more rows are served as several heads.
pub const fn block_rows(head_dim: usize, rows: usize) -> usize {
    if rows <= 8 || head_dim > 128 { 8 } else { 16 }
}

/// [`DecodeShape::partial_floats`].
const fn partial_floats(
    batch: usize,
    q_len: usize,
    q_heads: usize,
    kv_heads: usize,
    head_dim: usize,
    max_len: u32,
    chunk_shift: u32,
) -> usize {
    if kv_heads == 0 {
        return 0;
    }
    let rows = product(&[q_heads / kv_heads, q_len]);
    let block = block_rows(head_dim, rows);
    let pairs = tickets(batch, q_len, q_heads, kv_heads, head_dim);
    // No kernel that leaves partial results has larger heads; a block of rows of this size stays far from any overflow.
    let head_dim = if head_dim > i32::MAX as usize { i32::MAX as usize } else { head_dim };
    let slot = split::partial_floats(head_dim, if rows < block { rows } else { block });
    // By default as many as any kernel's.
    match tma::max_chunks(max_len, if chunk_shift == 0 { tma::SHORT } else { chunk_shift }) {
        1 => 0,
        chunks => product(&[pairs, chunks as usize, slot]),
    }
}

/// [`DecodeShape::tickets`].
const fn tickets(batch: usize, q_len: usize, q_heads: usize, kv_heads: usize, head_dim: usize) -> usize {
    match q_heads.checked_div(kv_heads) {
        Some(group) => {
            let rows = product(&[group, q_len]);
            product(&[batch, kv_heads, rows.div_ceil(block_rows(head_dim, rows))])
        }
        None => 0,
    }
}

/// What there is of [`DecodePath::Split`] for some element types, head size, number of rows and memory of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SplitTile {
    /// Dynamic shared memory of a block.
    pub shared_bytes: usize,
    /// Blocks of a multiprocessor.
    pub blocks: u32,
}

/// The entry of [`DecodePath::Split`] for tensors of `dtype`, a cache of `cache` in `layout` and `rows` query rows that share a KV head, on a
/// device that gives a block up to `max_shared_bytes` ([`Properties`](crate::device::Properties)): with fewer copies on their way where that is little, and
/// the same bits.
pub const fn split_entry(
    dtype: DType,
    cache: DType,
    layout: CacheLayout,
    head_dim: usize,
    rows: usize,
    max_shared_bytes: usize,
) -> Option<(Entry<split::Args>, SplitTile)> {
    use split::*;
    let (element, block) = (cache.size(), block_rows(head_dim, rows));
    let dim = match head_dim {
        1..=64 if block == 8 && element == 2 => 64,
        1..=128 => 128,
        129..=256 => 256,
        _ => return None,
    };
    let rows = least(rows, block);
    let usual = shared_bytes(dim, element, rows, stages(dim, element));
    // Everything else fits every GPU.
    let one_stage = dim * element > 256 && usual > max_shared_bytes;
    let entry = match (matches!(layout, CacheLayout::XSplit), dtype, cache, dim, block) {
        (false, DType::Bf16, DType::Bf16, 64, _) => decode_d64_r8_bf16::ENTRY,
        (false, DType::Bf16, DType::Bf16, 128, 8) => decode_d128_r8_bf16::ENTRY,
        (false, DType::Bf16, DType::Bf16, 128, _) => decode_d128_r16_bf16::ENTRY,
        (false, DType::Bf16, DType::Bf16, 256, _) if one_stage => decode_d256_r8_s1_bf16::ENTRY,
        (false, DType::Bf16, DType::Bf16, 256, _) => decode_d256_r8_bf16::ENTRY,
        (false, DType::Bf16, DType::E4m3, 128, 8) => decode_d128_r8_bf16_e4m3::ENTRY,
        (false, DType::Bf16, DType::E4m3, 128, _) => decode_d128_r16_bf16_e4m3::ENTRY,
        (false, DType::Bf16, DType::E4m3, 256, _) => decode_d256_r8_bf16_e4m3::ENTRY,
        (false, DType::Bf16, DType::E5m2, 128, 8) => decode_d128_r8_bf16_e5m2::ENTRY,
        (false, DType::Bf16, DType::E5m2, 128, _) => decode_d128_r16_bf16_e5m2::ENTRY,
        (false, DType::Bf16, DType::E5m2, 256, _) => decode_d256_r8_bf16_e5m2::ENTRY,
        (false, DType::Bf16, DType::I8, 128, 8) => decode_d128_r8_bf16_i8::ENTRY,
        (false, DType::Bf16, DType::I8, 128, _) => decode_d128_r16_bf16_i8::ENTRY,
        (false, DType::Bf16, DType::I8, 256, _) => decode_d256_r8_bf16_i8::ENTRY,
        (false, DType::F16, DType::F16, 64, _) => decode_d64_r8_f16::ENTRY,
        (false, DType::F16, DType::F16, 128, 8) => decode_d128_r8_f16::ENTRY,
        (false, DType::F16, DType::F16, 128, _) => decode_d128_r16_f16::ENTRY,
        (false, DType::F16, DType::F16, 256, _) if one_stage => decode_d256_r8_s1_f16::ENTRY,
        (false, DType::F16, DType::F16, 256, _) => decode_d256_r8_f16::ENTRY,
        (false, DType::F16, DType::E4m3, 128, 8) => decode_d128_r8_f16_e4m3::ENTRY,
        (false, DType::F16, DType::E4m3, 128, _) => decode_d128_r16_f16_e4m3::ENTRY,
        (false, DType::F16, DType::E4m3, 256, _) => decode_d256_r8_f16_e4m3::ENTRY,
        (false, DType::F16, DType::E5m2, 128, 8) => decode_d128_r8_f16_e5m2::ENTRY,
        (false, DType::F16, DType::E5m2, 128, _) => decode_d128_r16_f16_e5m2::ENTRY,
        (false, DType::F16, DType::E5m2, 256, _) => decode_d256_r8_f16_e5m2::ENTRY,
        (false, DType::F16, DType::I8, 128, 8) => decode_d128_r8_f16_i8::ENTRY,
        (false, DType::F16, DType::I8, 128, _) => decode_d128_r16_f16_i8::ENTRY,
        (false, DType::F16, DType::I8, 256, _) => decode_d256_r8_f16_i8::ENTRY,
        (true, DType::Bf16, DType::Bf16, 64, _) => decode_d64_r8_x_bf16::ENTRY,
        (true, DType::Bf16, DType::Bf16, 128, 8) => decode_d128_r8_x_bf16::ENTRY,
        (true, DType::Bf16, DType::Bf16, 128, _) => decode_d128_r16_x_bf16::ENTRY,
        (true, DType::Bf16, DType::Bf16, 256, _) if one_stage => decode_d256_r8_s1_x_bf16::ENTRY,
        (true, DType::Bf16, DType::Bf16, 256, _) => decode_d256_r8_x_bf16::ENTRY,
        (true, DType::Bf16, DType::E4m3, 128, 8) => decode_d128_r8_x_bf16_e4m3::ENTRY,
        (true, DType::Bf16, DType::E4m3, 128, _) => decode_d128_r16_x_bf16_e4m3::ENTRY,
        (true, DType::Bf16, DType::E4m3, 256, _) => decode_d256_r8_x_bf16_e4m3::ENTRY,
        (true, DType::Bf16, DType::E5m2, 128, 8) => decode_d128_r8_x_bf16_e5m2::ENTRY,
        (true, DType::Bf16, DType::E5m2, 128, _) => decode_d128_r16_x_bf16_e5m2::ENTRY,
        (true, DType::Bf16, DType::E5m2, 256, _) => decode_d256_r8_x_bf16_e5m2::ENTRY,
        (true, DType::Bf16, DType::I8, 128, 8) => decode_d128_r8_x_bf16_i8::ENTRY,
        (true, DType::Bf16, DType::I8, 128, _) => decode_d128_r16_x_bf16_i8::ENTRY,
        (true, DType::Bf16, DType::I8, 256, _) => decode_d256_r8_x_bf16_i8::ENTRY,
        (true, DType::F16, DType::F16, 64, _) => decode_d64_r8_x_f16::ENTRY,
        (true, DType::F16, DType::F16, 128, 8) => decode_d128_r8_x_f16::ENTRY,
        (true, DType::F16, DType::F16, 128, _) => decode_d128_r16_x_f16::ENTRY,
        (true, DType::F16, DType::F16, 256, _) if one_stage => decode_d256_r8_s1_x_f16::ENTRY,
        (true, DType::F16, DType::F16, 256, _) => decode_d256_r8_x_f16::ENTRY,
        (true, DType::F16, DType::E4m3, 128, 8) => decode_d128_r8_x_f16_e4m3::ENTRY,
        (true, DType::F16, DType::E4m3, 128, _) => decode_d128_r16_x_f16_e4m3::ENTRY,
        (true, DType::F16, DType::E4m3, 256, _) => decode_d256_r8_x_f16_e4m3::ENTRY,
        (true, DType::F16, DType::E5m2, 128, 8) => decode_d128_r8_x_f16_e5m2::ENTRY,
        (true, DType::F16, DType::E5m2, 128, _) => decode_d128_r16_x_f16_e5m2::ENTRY,
        (true, DType::F16, DType::E5m2, 256, _) => decode_d256_r8_x_f16_e5m2::ENTRY,
        (true, DType::F16, DType::I8, 128, 8) => decode_d128_r8_x_f16_i8::ENTRY,
        (true, DType::F16, DType::I8, 128, _) => decode_d128_r16_x_f16_i8::ENTRY,
        (true, DType::F16, DType::I8, 256, _) => decode_d256_r8_x_f16_i8::ENTRY,
        _ => return None,
    };
    let shared_bytes = if one_stage { shared_bytes(dim, element, rows, 1) } else { usual };
    Some((entry, SplitTile { shared_bytes, blocks: blocks(dim, element) }))
}

/// What there is of [`DecodePath::Tma`] for some element types, head size and number of rows.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct TmaTile {
    /// Threads of a block.
    pub threads: usize,
    /// Keys of a step.
    pub keys: usize,
    /// Dynamic shared memory of a block.
    pub shared_bytes: usize,
    /// Blocks of a multiprocessor.
    pub blocks: u32,
}

impl TmaTile {
    /// The `hint` of [`tma::Args`] (layer L0) for calls of a shape.
    pub const fn hint(&self, shape: &DecodeShape) -> u32 {
        let heads = match shape.q_heads.checked_div(shape.kv_heads) {
            Some(heads) => heads,
            None => 0,
        };
        self.hint_of(shape.chunk_shift(), shape.head_dim, product(&[heads, shape.q_len]))
    }

    /// [`hint`](Self::hint) for chunks of [`DecodeShape::chunk_shift`], and so many query rows of a KV head.
    const fn hint_of(&self, chunk_shift: u32, head_dim: usize, rows: usize) -> u32 {
        // Steps are not cut.
        let least = self.keys.ilog2();
        match chunk_shift {
            // What a chunk costs is more for 16 rows: large batches would take a tenth more time.
            0 if block_rows(head_dim, rows) > 8 => 0,
            0 => tma::SHORT,
            shift if shift < least => least,
            shift => shift,
        }
    }
}

/// The entry of [`DecodePath::Tma`]; arguments as for [`split_entry`], of caches that are not x-split.
pub const fn tma_entry(
    dtype: DType,
    cache: DType,
    head_dim: usize,
    rows: usize,
) -> Option<(Entry<tma::Args>, TmaTile)> {
    use tma::*;
    let (dim, block) = (head_dim, block_rows(head_dim, rows));
    let entry = match (dtype, cache, dim, block) {
        (DType::Bf16, DType::Bf16, 64, 8) => decode_tma_d64_r8_bf16::ENTRY,
        (DType::Bf16, DType::Bf16, 128, 8) if rows < 8 => decode_tma_d128_r7_bf16::ENTRY,
        (DType::Bf16, DType::Bf16, 128, 8) => decode_tma_d128_r8_bf16::ENTRY,
        (DType::Bf16, DType::Bf16, 128, _) => decode_tma_d128_r16_bf16::ENTRY,
        (DType::Bf16, DType::Bf16, 256, _) => decode_tma_d256_r8_bf16::ENTRY,
        (DType::Bf16, DType::E4m3, 128, 8) => decode_tma_d128_r8_bf16_e4m3::ENTRY,
        (DType::Bf16, DType::E4m3, 128, _) => decode_tma_d128_r16_bf16_e4m3::ENTRY,
        (DType::Bf16, DType::E5m2, 128, 8) => decode_tma_d128_r8_bf16_e5m2::ENTRY,
        (DType::Bf16, DType::E5m2, 128, _) => decode_tma_d128_r16_bf16_e5m2::ENTRY,
        (DType::Bf16, DType::I8, 128, 8) => decode_tma_d128_r8_bf16_i8::ENTRY,
        (DType::Bf16, DType::I8, 128, _) => decode_tma_d128_r16_bf16_i8::ENTRY,
        (DType::F16, DType::F16, 64, 8) => decode_tma_d64_r8_f16::ENTRY,
        (DType::F16, DType::F16, 128, 8) if rows < 8 => decode_tma_d128_r7_f16::ENTRY,
        (DType::F16, DType::F16, 128, 8) => decode_tma_d128_r8_f16::ENTRY,
        (DType::F16, DType::F16, 128, _) => decode_tma_d128_r16_f16::ENTRY,
        (DType::F16, DType::F16, 256, _) => decode_tma_d256_r8_f16::ENTRY,
        (DType::F16, DType::E4m3, 128, 8) => decode_tma_d128_r8_f16_e4m3::ENTRY,
        (DType::F16, DType::E4m3, 128, _) => decode_tma_d128_r16_f16_e4m3::ENTRY,
        (DType::F16, DType::E5m2, 128, 8) => decode_tma_d128_r8_f16_e5m2::ENTRY,
        (DType::F16, DType::E5m2, 128, _) => decode_tma_d128_r16_f16_e5m2::ENTRY,
        (DType::F16, DType::I8, 128, 8) => decode_tma_d128_r8_f16_i8::ENTRY,
        (DType::F16, DType::I8, 128, _) => decode_tma_d128_r16_f16_i8::ENTRY,
        _ => return None,
    };
    // As in the table of entries.
    let (consumers, tall, stages, blocks) = match (dim, cache.size(), block) {
        (64, ..) | (128, 1, 8) => (4, 2, 3, 2),
        (128, 1, _) => (4, 2, 6, 1),
        (128, _, 8) => (4, 1, 3, 2),
        (128, ..) => (8, 1, 3, 1),
        _ => (4, 1, 3, 1),
    };
    let keys = step_keys(consumers, tall);
    let shared_bytes = shared_bytes(dim, cache.size(), block, consumers, keys, stages);
    Some((entry, TmaTile { threads: threads(consumers), keys, shared_bytes, blocks }))
}

/// How to launch [`DecodePath::Tma`] with what [`tma_entry`] gave, on so many multiprocessors.
pub const fn tma_geometry(tile: TmaTile, multiprocessors: u32) -> Geometry {
    Geometry::linear(tile.blocks.saturating_mul(multiprocessors), tile.threads as u32)
        .shared_bytes(tile.shared_bytes as u32)
        .dependent()
}

/// The tensor map of K or V for [`DecodePath::Tma`]: a box is up to a page of one head, eight keys of 128 bytes at a time.
///
/// # Errors
/// Those of [`Device::tensor_map`].
pub fn tma_cache_map(
    device: &Device,
    base: u64,
    dtype: DType,
    shape: CacheShape,
    strides: PageStrides,
    tile: TmaTile,
) -> Result<TensorMap> {
    let (size, line) = (dtype.size(), tma::LINE as u64);
    // What is too large for 64 bits is too large for a map.
    let bytes = |elements: usize| (elements as u64).saturating_mul(size as u64);
    let columns = bytes(shape.head_dim) / line;
    device.tensor_map(&TensorMapDescription {
        base,
        dtype,
        rank: 5,
        dims: [
            line / size as u64,
            8,
            (shape.heads as u64).saturating_sub(1).saturating_mul(bytes(strides.head) / line).saturating_add(columns),
            shape.block_size as u64 / 8,
            shape.blocks as u64,
        ],
        strides: [
            bytes(strides.token),
            line,
            bytes(strides.token).saturating_mul(8),
            map_stride(shape.blocks, bytes(strides.block).max(16)),
        ],
        box_dims: [(line / size as u64) as u32, 8, columns as u32, (shape.block_size.min(tile.keys) / 8) as u32, 1],
        swizzle: Swizzle::B128,
    })
}

/// The entry of [`DecodePath::Plain`] for tensors of `dtype` and a cache of `cache`.
pub const fn plain_entry(dtype: DType, cache: DType) -> Option<Entry<plain::Args>> {
    use plain::*;
    Some(match (dtype, cache) {
        (DType::F32, DType::F32) => plain_f32_f32::ENTRY,
        (DType::F32, DType::E4m3) => plain_f32_e4m3::ENTRY,
        (DType::F32, DType::E5m2) => plain_f32_e5m2::ENTRY,
        (DType::F32, DType::I8) => plain_f32_i8::ENTRY,
        (DType::F16, DType::F16) => plain_f16_f16::ENTRY,
        (DType::F16, DType::E4m3) => plain_f16_e4m3::ENTRY,
        (DType::F16, DType::E5m2) => plain_f16_e5m2::ENTRY,
        (DType::F16, DType::I8) => plain_f16_i8::ENTRY,
        (DType::Bf16, DType::Bf16) => plain_bf16_bf16::ENTRY,
        (DType::Bf16, DType::E4m3) => plain_bf16_e4m3::ENTRY,
        (DType::Bf16, DType::E5m2) => plain_bf16_e5m2::ENTRY,
        (DType::Bf16, DType::I8) => plain_bf16_i8::ENTRY,
        _ => return None,
    })
}

/// How to launch [`DecodePath::Split`] with what [`split_entry`] gave, on so many multiprocessors.
pub const fn split_geometry(tile: SplitTile, multiprocessors: u32) -> Geometry {
    Geometry::linear(tile.blocks.saturating_mul(multiprocessors), split::THREADS as u32)
        .shared_bytes(tile.shared_bytes as u32)
        .dependent()
}

/// The entry that merges partial results for tensors of `dtype`; to be launched after [`split_entry`]'s if any sequence may
/// have more than one chunk. Few `heads` (of all sequences, as for [`combine_geometry`]) leave room for more loads in
/// flight, which changes no result.
pub const fn combine_entry(dtype: DType, heads: usize) -> Option<Entry<split::CombineArgs>> {
    match (dtype, heads) {
        (DType::Bf16, 0..=256) => Some(split::combine_long_bf16::ENTRY),
        (DType::F16, 0..=256) => Some(split::combine_long_f16::ENTRY),
        (DType::Bf16, _) => Some(split::combine_bf16::ENTRY),
        (DType::F16, _) => Some(split::combine_f16::ENTRY),
        _ => None,
    }
}

/// How to launch [`combine_entry`] for so many heads (KV heads times blocks of query rows) of all sequences.
pub const fn combine_geometry(heads: u32) -> Geometry {
    Geometry::linear(heads, split::COMBINE_THREADS as u32).dependent()
}

/// How to launch [`DecodePath::Plain`].
pub const fn plain_geometry(q_heads: u32, q_len: u32, batch: u32) -> Geometry {
    Geometry::new([q_heads, q_len, batch], [plain::THREADS as u32, 1, 1])
        .shared_bytes(plain::SHARED_BYTES as u32)
        .dependent()
}

/// Attention of the last `q_len` tokens of each sequence over all its keys.
///
/// * `query`, `out`: `[batch, q_heads, head_dim]` for one query token a sequence, or `[batch, q_len, q_heads, head_dim]` for up
///   to 16 (causal among them); dense in the last dimension.
/// * `cache`: the layer's pages; `q_heads` is a multiple of its heads, and head `h` reads KV head
///   `h / (q_heads / kv_heads)`.
/// * `block_table`: `[batch, max_blocks]`, the pages of each sequence in order. A page number outside of the cache counts
///   as unseen keys.
/// * `lens`: `[batch]`, keys of each sequence including the query tokens' own; 0 (or less) gives zeros.
/// * `lse`: `[batch, q_heads]` or `[batch, q_len, q_heads]`, receives the logarithm of each softmax's denominator.
///
/// Scores, softmax and the sum over values are in f32; the split path multiplies rounded probabilities, as FlashAttention
/// does. A result depends on its own sequence only, and on the kernel ([`DecodePath`]). Source: Kwon et al., *PagedAttention*, 2023; Dao et al.,
/// *Flash-Decoding*, 2023.
///
/// # Errors
/// [`Shape`](Error::Shape), [`Stride`](Error::Stride), [`Value`](Error::Value) (head ratio, head size, options, a workspace
/// that is too small), [`DType`](Error::DType), [`Overlap`](Error::Overlap), [`WrongDevice`](Error::WrongDevice),
/// [`Unsupported`](Error::Unsupported) if `options.path` does not take these tensors.
#[expect(clippy::too_many_arguments, reason = "outputs, inputs and workspace of one operation")]
pub fn decode<T: Float, S: CacheElement>(
    stream: &Stream,
    out: &mut Tensor<T>,
    lse: Option<&mut Tensor<f32>>,
    query: &Tensor<T>,
    cache: &KvCache<S>,
    block_table: &Tensor<i32>,
    lens: &Tensor<i32>,
    options: &DecodeOptions<'_>,
    workspace: &mut DecodeWorkspace,
) -> Result<()> {
    let mut call = Call::new(OP, stream);
    let cs = cache.shape();
    let (batch, q_len, q_heads) = match *query.shape() {
        [batch, heads, _] => (batch, 1, heads),
        [batch, q_len, heads, _] => (batch, q_len, heads),
        _ => {
            return Err(call.bad_shape(
                "query",
                query.shape(),
                "[batch, q_heads, head_dim] or [batch, q_len, q_heads, head_dim]",
            ));
        }
    };
    let (head_dim, kv_heads) = (cs.head_dim, cs.heads);
    if query.shape().last() != Some(&head_dim) {
        return Err(call.bad_shape("query", query.shape(), format!("[.., {head_dim}], like the cache")));
    }
    call.same_shape("out", out.shape(), query.shape())?;
    call.value(
        q_len <= MAX_QUERY_TOKENS,
        "query",
        format!("of at most {MAX_QUERY_TOKENS} query tokens a sequence"),
        q_len,
    )?;
    call.value(
        kv_heads > 0 && q_heads.is_multiple_of(kv_heads),
        "query",
        format!("of a multiple of the cache's {kv_heads} heads"),
        format!("{q_heads} heads"),
    )?;
    call.count("query", product(&[q_len, q_heads]))?;
    let max_dim = plain::MAX_HEAD_DIM;
    call.value((1..=max_dim).contains(&head_dim), "cache", format!("of heads of 1 to {max_dim}"), head_dim)?;
    for (arg, t) in [("query", query), ("out", &*out)] {
        if head_dim > 1 && t.strides().last() != Some(&1) {
            let expected = "dense in its last dimension".into();
            return Err(Error::Stride { op: OP, arg, expected, got: t.strides().to_vec() });
        }
    }
    call.distinct("out", out)?;
    let &[table_batch, max_pages] = block_table.shape() else {
        return Err(call.bad_shape("block_table", block_table.shape(), format!("[{batch}, max_blocks]")));
    };
    call.same_shape("block_table", block_table.shape(), &[batch, max_pages])?;
    debug_assert_eq!(table_batch, batch);
    call.contiguous("block_table", block_table)?;
    call.same_shape("lens", lens.shape(), &[batch])?;
    call.contiguous("lens", lens)?;
    if let Some(lse) = &lse {
        call.same_shape("lse", lse.shape(), &query.shape()[..query.shape().len() - 1])?;
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
    let capacity = max_pages.saturating_mul(cs.block_size);
    call.value(
        capacity <= workspace.shape.max_len,
        "workspace",
        format!("for the {capacity} keys that the block table can hold"),
        format!("for {}", workspace.shape.max_len),
    )?;

    // Strides of [batch, q_len, heads]: tokens of a batch must follow each other evenly.
    let tokens = |t: &Tensor<T>, arg| {
        let s = t.strides();
        // Of one query token a sequence it is sequences that are apart; the distance between tokens says nothing.
        let (token, head) = match *s {
            [sequence, _, head, _] if q_len == 1 => (sequence, head),
            [_, token, head, _] | [token, head, ..] => (token, head),
            _ => unreachable!("three or four dimensions"),
        };
        if q_len > 1 && batch > 1 && s[0] != q_len * token {
            let expected = "tokens at one distance from each other".into();
            return Err(Error::Stride { op: OP, arg, expected, got: s.to_vec() });
        }
        Ok((token, head))
    };
    let ((q_token, q_head), (out_token, out_head)) = (tokens(query, "query")?, tokens(out, "out")?);
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
        block_table: call.read("block_table", block_table)?.cast(),
        lens: call.read("lens", lens)?.cast(),
        alibi: call.read_opt("alibi", options.alibi)?.cast(),
        sinks: call.read_opt("sinks", options.sinks)?.cast(),
        k_scales: scales.key,
        v_scales: scales.value,
        scale_per_head: scales.per_head as u32,
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
    };
    let (floats, tickets_there) = (workspace.partial.len(), workspace.tickets.len());
    let scratch = Scratch {
        partial: call.write("workspace", &mut workspace.partial)?.cast(),
        tickets: call.write("workspace", &mut workspace.tickets)?.cast(),
        hint: workspace.shape.chunk_shift(),
    };
    let extents = [call.count("query", batch)?, call.count("query", q_len)?];
    call.check_overlap()?;
    if batch == 0 || q_len == 0 || q_heads == 0 {
        return Ok(());
    }

    let kernel = choose(stream.device(), T::DTYPE, S::DTYPE, cache.layout(), options.path, extents[1], &args)?;
    let shape = DecodeShape::new(batch, q_heads, kv_heads, head_dim, capacity).q_len(q_len);
    let made = workspace.shape;
    if !matches!(kernel, Kernel::Plain(_)) {
        let need = partial_floats(batch, q_len, q_heads, kv_heads, head_dim, capacity as u32, scratch.hint);
        let expected = format_args!("for a {shape}: {need} floats");
        call.value(floats >= need, "workspace", expected, format_args!("{floats}, for a {made}"))?;
    }
    match kernel {
        Kernel::Tma(..) => {
            let heads = tickets(batch, q_len, q_heads, kv_heads, head_dim);
            let expected = format_args!("for a {shape}: {heads} heads");
            call.value(tickets_there >= heads, "workspace", expected, format_args!("{tickets_there}, for a {made}"))?;
        }
        Kernel::Split(..) => {
            call.count("query", tickets(batch, q_len, q_heads, kv_heads, head_dim))?;
        }
        Kernel::Plain(_) => {
            call.value(batch <= 65535, "query", "of at most 65535 sequences for DecodePath::Plain", batch)?;
        }
    }
    // SAFETY: shapes, strides, device, overlap and the workspace were checked above; lengths and page numbers are clamped by the
    // kernels.
    unsafe { launch_kernel(stream, T::DTYPE, S::DTYPE, cache.layout(), kernel, options.split, extents, &args, scratch) }
}

/// Scratch memory of [`launch`].
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Scratch {
    /// [`DecodeShape::partial_floats`], aligned to 16 bytes, whatever is in them.
    pub partial: *mut f32,
    /// [`DecodeShape::tickets`] words, which are zeros before the first launch.
    pub tickets: *mut u32,
    /// [`DecodeShape::chunk_shift`].
    pub hint: u32,
}

impl Scratch {
    /// Of as much memory as `shape` says.
    pub const fn new(shape: &DecodeShape, partial: *mut f32, tickets: *mut u32) -> Self {
        Self { partial, tickets, hint: shape.chunk_shift() }
    }
}

/// Launches on raw pointers (layer L1): with the kernel that `path` names, or that suits `args` and the device.
///
/// `args` are those of the plain kernel, which say all that the others need, for `q_len` query tokens of each of `batch` sequences. `lse`,
/// `alibi`, `sinks` and the scales may be null, the latter for 16-bit caches only; `k_run` and its like are those of
/// [`PageStrides`], and `window` is 0 for none (beyond 2^31 - 1 it counts as that). Work is divided as `split` says.
///
/// # Errors
/// [`Error::Unsupported`] and [`Error::DType`] for what the path has no kernel for, and those of [`Stream::launch`].
///
/// # Safety
/// The pointers are device memory of the sizes that strides and extents imply, aligned to their element types, until the launch is
/// done; `out`, `lse` and the scratch memory overlap nothing else. Sequences times query tokens times `q_heads` are fewer than 2^31. `q_len` is at most [`MAX_QUERY_TOKENS`], `q_heads` a multiple of `kv_heads`,
/// `head_dim` from 1 to 256; a table holds fewer than 2^31 keys, `max_pages * page_size`. The scratch memory is that of a [`DecodeShape`] for so
/// many sequences, query tokens and heads, and for at least as many keys as the table holds; it is not in use by other work.
#[allow(clippy::too_many_arguments, reason = "types, variants, extents, arguments and workspace of one operation")]
pub unsafe fn launch(
    stream: &Stream,
    dtype: DType,
    cache: DType,
    layout: CacheLayout,
    path: DecodePath,
    split: DecodeSplit,
    [batch, q_len]: [u32; 2],
    args: &plain::Args,
    scratch: Scratch,
) -> Result<()> {
    if batch == 0 || q_len == 0 || args.q_heads == 0 {
        return Ok(());
    }
    let kernel = choose(stream.device(), dtype, cache, layout, path, q_len, args)?;
    // The kernels add query tokens to it.
    let args = plain::Args { window: args.window.min(u32::MAX / 2), ..*args };
    // SAFETY: forwarded to the caller.
    unsafe { launch_kernel(stream, dtype, cache, layout, kernel, split, [batch, q_len], &args, scratch) }
}

/// What lies between the keys, and the values, of a token and the next; x-split: between pieces of a key, and between dimensions of the values.
const fn steps(layout: CacheLayout, args: &plain::Args) -> (usize, usize) {
    match layout {
        CacheLayout::XSplit => (args.k_run_stride, args.v_run_stride),
        _ => (args.k_slot, args.v_slot),
    }
}

/// What a path comes to.
enum Kernel {
    Tma(Entry<tma::Args>, TmaTile),
    Split(Entry<split::Args>, SplitTile),
    Plain(Entry<plain::Args>),
}

/// The kernel for `path`.
fn choose(
    device: &Device,
    dtype: DType,
    cache: DType,
    layout: CacheLayout,
    path: DecodePath,
    q_len: u32,
    args: &plain::Args,
) -> Result<Kernel> {
    let (head_dim, group_rows) = (args.head_dim as usize, (args.q_heads / args.kv_heads * q_len) as usize);
    let aligned = |to: usize, address: usize, strides: &[usize], size: usize| {
        address.is_multiple_of(to) && strides.iter().all(|s| (s * size).is_multiple_of(to))
    };
    let (size, narrow) = (dtype.size(), cache.size());
    // What the split kernels take, and what to say of what they do not.
    let split = split_entry(dtype, cache, layout, head_dim, group_rows, device.properties().max_shared_bytes);
    let x_split = layout == CacheLayout::XSplit;
    let (k_step, v_step) = steps(layout, args);
    let least_page = if x_split { 16 / narrow as u32 } else { 8 };
    let runs = (args.k_run as usize, args.k_slot, args.v_run as usize, args.v_slot);
    let conditions: [(bool, &dyn Fn() -> String); 9] = [
        (split.is_some(), &|| format!("{dtype} over a cache of {cache} with heads of {head_dim}")),
        (!x_split || runs == (16 / narrow, 16 / narrow, 1, 1), &|| {
            format!(
                "runs of {} elements of keys and {} of values, {} and {} from token to token",
                runs.0, runs.2, runs.1, runs.3
            )
        }),
        ((head_dim * narrow).is_multiple_of(16), &|| format!("heads of {} bytes", head_dim * narrow)),
        (args.page_size >= least_page && args.page_size.is_power_of_two(), &|| {
            format!("blocks of {} tokens", args.page_size)
        }),
        (args.pages > 0 || path != DecodePath::Tma, &|| "a cache of no blocks".into()),
        (aligned(16, args.q as usize, &[args.q_token, args.q_head], size), &|| {
            format!("queries at {:p}, {} and {} elements apart", args.q, args.q_token, args.q_head)
        }),
        (aligned(8, args.out as usize, &[args.out_token, args.out_head], size), &|| {
            format!("outputs at {:p}, {} and {} elements apart", args.out, args.out_token, args.out_head)
        }),
        (aligned(16, args.k as usize, &[args.k_page, k_step, args.k_head], narrow), &|| {
            format!("keys at {:p}, {}, {k_step} and {} elements apart", args.k, args.k_page, args.k_head)
        }),
        (aligned(16, args.v as usize, &[args.v_page, v_step, args.v_head], narrow), &|| {
            format!("values at {:p}, {}, {v_step} and {} elements apart", args.v, args.v_page, args.v_head)
        }),
    ];
    let not = conditions.iter().find(|(holds, _)| !holds).map(|(_, what)| what);
    let hopper = device.properties().compute_capability == (9, 0);
    let tma = tma_entry(dtype, cache, head_dim, group_rows).filter(|_| {
        let lines = |head: usize| {
            let bytes = head * narrow;
            bytes.is_multiple_of(tma::LINE) && bytes / tma::LINE <= i32::MAX as usize / args.kv_heads as usize
        };
        not.is_none() && !x_split && hopper && args.pages > 0 && lines(args.k_head) && lines(args.v_head)
    });
    let split = split.filter(|_| not.is_none());
    // The SIMT device runs either, the portable kernel faster.
    let prefers_tma = path == DecodePath::Tma || path == DecodePath::Auto && !device.is_simt();
    if let Some((entry, tile)) = tma.filter(|_| prefers_tma) {
        return Ok(Kernel::Tma(entry, tile));
    }
    match (path, split) {
        (DecodePath::Auto | DecodePath::Split, Some((entry, tile))) => Ok(Kernel::Split(entry, tile)),
        (DecodePath::Split | DecodePath::Tma, _) => Err(Error::Unsupported {
            op: OP,
            what: format!(
                "the path {path:?} does not take {}; the split kernels take f16 or bf16 over caches of the same type or of 8 \
                 bits, blocks of 8 tokens or more (16 in the x-split layout with 8 bits, a power of two), heads of a multiple of 16 bytes, queries, keys and \
                 values at multiples of 16 bytes, outputs of 8; `Tma` in addition a Hopper GPU, NHD or HND, and heads of 128, over 16-bit caches also 64 and 256, that are a multiple of 128 bytes apart; use \
                 DecodePath::Auto",
                match not {
                    Some(what) => what(),
                    None if x_split => "the x-split layout".into(),
                    None => format!("heads of {head_dim} on {}", device.name()),
                }
            ),
        }),
        _ => plain_entry(dtype, cache).map(Kernel::Plain).ok_or_else(|| no_kernel(OP, dtype, cache)),
    }
}

/// Launches a kernel that [`choose`] gave for these arguments.
///
/// # Safety
/// As for [`launch`].
#[allow(clippy::too_many_arguments, reason = "as of `launch`")]
unsafe fn launch_kernel(
    stream: &Stream,
    dtype: DType,
    cache: DType,
    layout: CacheLayout,
    kernel: Kernel,
    splitting: DecodeSplit,
    [batch, q_len]: [u32; 2],
    args: &plain::Args,
    scratch: Scratch,
) -> Result<()> {
    let multiprocessors = stream.device().properties().multiprocessors;
    let (head_dim, q_heads, kv_heads) = (args.head_dim as usize, args.q_heads as usize, args.kv_heads as usize);
    let group_rows = q_heads / kv_heads * q_len as usize;
    let (capacity, hint) = (args.max_pages.saturating_mul(args.page_size), scratch.hint);
    let (k_slot, v_slot) = steps(layout, args);
    let of_split = || split::Args {
        out: args.out,
        lse: args.lse,
        q: args.q,
        k: args.k,
        v: args.v,
        block_table: args.block_table,
        lens: args.lens,
        alibi: args.alibi,
        sinks: args.sinks,
        k_scales: args.k_scales,
        v_scales: args.v_scales,
        partial: scratch.partial,
        scale_per_head: args.scale_per_head,
        batch,
        q_len,
        q_heads: args.q_heads,
        kv_heads: args.kv_heads,
        head_dim: args.head_dim,
        page_shift: args.page_size.ilog2(),
        max_pages: args.max_pages,
        pages: args.pages,
        partial_chunks: split::max_chunks(capacity, hint),
        hint,
        q_token: args.q_token,
        q_head: args.q_head,
        out_token: args.out_token,
        out_head: args.out_head,
        k_page: args.k_page,
        k_slot,
        k_head: args.k_head,
        v_page: args.v_page,
        v_slot,
        v_head: args.v_head,
        scale: args.scale,
        soft_cap: args.soft_cap,
        window: args.window,
    };
    match kernel {
        Kernel::Tma(entry, tile) => {
            let mut args = of_split();
            args.hint = tile.hint_of(hint, head_dim, group_rows);
            args.partial_chunks = tma::max_chunks(capacity, args.hint);
            let args = tma_args(stream.device(), &args, scratch.tickets, cache, tile, splitting)?;
            // SAFETY: forwarded to the caller; the maps describe the cache.
            unsafe { stream.launch(&entry, &tma_geometry(tile, multiprocessors), &args) }
        }
        Kernel::Split(entry, tile) => {
            let args = of_split();
            // SAFETY: forwarded to the caller.
            unsafe { stream.launch(&entry, &split_geometry(tile, multiprocessors), &args) }?;
            let heads = tickets(batch as usize, q_len as usize, q_heads, kv_heads, head_dim);
            let Some(combine) = combine_entry(dtype, heads).filter(|_| args.partial_chunks > 1) else {
                return Ok(());
            };
            let slot_rows = group_rows.min(block_rows(head_dim, group_rows)) as u32;
            let args = split::CombineArgs {
                out: args.out,
                lse: args.lse,
                lens: args.lens,
                sinks: args.sinks,
                partial: args.partial,
                q_len: args.q_len,
                q_heads: args.q_heads,
                kv_heads: args.kv_heads,
                slot_rows,
                head_dim: args.head_dim,
                page_shift: args.page_shift,
                max_pages: args.max_pages,
                partial_chunks: args.partial_chunks,
                hint: args.hint,
                window: args.window,
                out_token: args.out_token,
                out_head: args.out_head,
            };
            // SAFETY: forwarded to the caller; the kernel waits for the launch before it, whose partial results it reads.
            unsafe { stream.launch(&combine, &combine_geometry(heads as u32), &args) }
        }
        Kernel::Plain(entry) => {
            // SAFETY: forwarded to the caller.
            unsafe { stream.launch(&entry, &plain_geometry(args.q_heads, q_len, batch), args) }
        }
    }
}

/// The arguments of [`DecodePath::Tma`] from those of [`DecodePath::Split`].
fn tma_args(
    device: &Device,
    args: &split::Args,
    tickets: *mut u32,
    cache: DType,
    tile: TmaTile,
    splitting: DecodeSplit,
) -> Result<tma::Args> {
    let block_size = 1 << args.page_shift;
    let shape = CacheShape::new(args.pages as usize, block_size, args.kv_heads as usize, args.head_dim as usize);
    let ks = PageStrides::of_dense_heads(args.k_page, args.k_slot, args.k_head, shape.head_dim);
    let vs = PageStrides::of_dense_heads(args.v_page, args.v_slot, args.v_head, shape.head_dim);
    let lines = |head: usize| (head * cache.size() / tma::LINE) as u32;
    Ok(tma::Args {
        out: args.out,
        lse: args.lse,
        q: args.q,
        k_map: tma_cache_map(device, args.k as u64, cache, shape, ks, tile)?,
        v_map: tma_cache_map(device, args.v as u64, cache, shape, vs, tile)?,
        block_table: args.block_table,
        lens: args.lens,
        alibi: args.alibi,
        sinks: args.sinks,
        k_scales: args.k_scales,
        v_scales: args.v_scales,
        partial: args.partial,
        tickets,
        scale_per_head: args.scale_per_head,
        batch: args.batch,
        q_len: args.q_len,
        q_heads: args.q_heads,
        kv_heads: args.kv_heads,
        page_shift: args.page_shift,
        max_pages: args.max_pages,
        pages: args.pages,
        partial_chunks: args.partial_chunks,
        hint: args.hint,
        splitting: match splitting {
            DecodeSplit::Auto => tma::split::AUTO,
            DecodeSplit::Chunks => tma::split::CHUNKS,
            DecodeSplit::Whole => tma::split::WHOLE,
        },
        q_token: args.q_token,
        q_head: args.q_head,
        out_token: args.out_token,
        out_head: args.out_head,
        k_head: lines(ks.head),
        v_head: lines(vs.head),
        scale: args.scale,
        soft_cap: args.soft_cap,
        window: args.window,
    })
}
