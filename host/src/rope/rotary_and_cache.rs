//! Rotates queries in place and writes rotated keys, and values, to the paged cache: one launch for
//! [`rotary`](super::rotary()) and [`reshape_and_cache`](crate::kv_cache::reshape_and_cache()).
//!
//! Keys are rounded once, from the rotated f32 numbers to the cache's type. `key` itself stays as it is: it is read
//! from the cache from here on.

use super::rotary::{Pairing, Rotation};
use crate::check::Call;
use crate::device::{Geometry, Stream};
use crate::error::{Error, Result};
use crate::kernels::rope::chunk_pairs::{Share, pairs, turning};
use crate::kernels::rope::rotary_and_cache as kernel;
use crate::kv_cache::layout::{check_scales, write_cache};
use crate::kv_cache::reshape_and_cache::status_word;
use crate::kv_cache::{CacheElement, CacheLayout, KvCache, Scales, StoreAs};
use crate::tensor::Tensor;
use cuda_std::{DType, Element, Entry, Float};

pub use crate::kernels::rope::chunk_pairs::{INTERLEAVED, SCALE_PER_HEAD, SLOTS_I64};
pub use kernel::Args;

/// Whether a thread can have two heads: of an even number of heads of queries, and of keys and values, of 16 bits.
const fn can_have_two_heads(dtype: DType, args: &Args) -> bool {
    dtype.size() == 2 && (args.query_heads | args.kv_heads).is_multiple_of(2)
}

/// Chunk pairs of a head of keys or values. (No head is narrower than its rotation; this layer takes any number.)
const fn kv_pairs(args: &Args, n: u32) -> u32 {
    pairs(if args.head_dim < args.rot_dim { args.rot_dim } else { args.head_dim }, args.rot_dim, n)
}

/// How many heads a thread has: two in large launches where it can, otherwise one.
pub const fn heads_of_a_thread(dtype: DType, cache: DType, layout: CacheLayout, args: &Args) -> u32 {
    let n = 16 / dtype.size() as u32;
    let items =
        2 * args.kv_heads as u64 * kv_pairs(args, n) as u64 + args.query_heads as u64 * turning(args.rot_dim, n) as u64;
    // Pairs of chunks from which it is faster. Measured on an H200.
    let many = match layout {
        CacheLayout::XSplit if cache.size() == 2 => 3 << 9,
        CacheLayout::XSplit => 3 << 14,
        _ => 3 << 17,
    };
    if (args.tokens as u64).saturating_mul(items) >= many && can_have_two_heads(dtype, args) { 2 } else { 1 }
}

/// The entry for tensors and a cache of these types and so many [heads of a thread](heads_of_a_thread), if there is one.
pub const fn entry(dtype: DType, cache: DType, layout: CacheLayout, heads: u32) -> Option<Entry<Args>> {
    use kernel::*;
    if heads == 2 {
        return Some(match (layout, dtype, cache) {
            (CacheLayout::XSplit, DType::F16, DType::F16) => rotary_and_cache_xsplit_f16_f16_twos::ENTRY,
            (CacheLayout::XSplit, DType::F16, DType::E4m3) => rotary_and_cache_xsplit_f16_e4m3_twos::ENTRY,
            (CacheLayout::XSplit, DType::F16, DType::E5m2) => rotary_and_cache_xsplit_f16_e5m2_twos::ENTRY,
            (CacheLayout::XSplit, DType::F16, DType::I8) => rotary_and_cache_xsplit_f16_i8_twos::ENTRY,
            (CacheLayout::XSplit, DType::Bf16, DType::Bf16) => rotary_and_cache_xsplit_bf16_bf16_twos::ENTRY,
            (CacheLayout::XSplit, DType::Bf16, DType::E4m3) => rotary_and_cache_xsplit_bf16_e4m3_twos::ENTRY,
            (CacheLayout::XSplit, DType::Bf16, DType::E5m2) => rotary_and_cache_xsplit_bf16_e5m2_twos::ENTRY,
            (CacheLayout::XSplit, DType::Bf16, DType::I8) => rotary_and_cache_xsplit_bf16_i8_twos::ENTRY,
            (_, DType::F16, DType::F16) => rotary_and_cache_flat_f16_f16_twos::ENTRY,
            (_, DType::F16, DType::E4m3) => rotary_and_cache_flat_f16_e4m3_twos::ENTRY,
            (_, DType::F16, DType::E5m2) => rotary_and_cache_flat_f16_e5m2_twos::ENTRY,
            (_, DType::F16, DType::I8) => rotary_and_cache_flat_f16_i8_twos::ENTRY,
            (_, DType::Bf16, DType::Bf16) => rotary_and_cache_flat_bf16_bf16_twos::ENTRY,
            (_, DType::Bf16, DType::E4m3) => rotary_and_cache_flat_bf16_e4m3_twos::ENTRY,
            (_, DType::Bf16, DType::E5m2) => rotary_and_cache_flat_bf16_e5m2_twos::ENTRY,
            (_, DType::Bf16, DType::I8) => rotary_and_cache_flat_bf16_i8_twos::ENTRY,
            _ => return None,
        });
    }
    Some(match (layout, dtype, cache) {
        (CacheLayout::XSplit, DType::F32, DType::F32) => rotary_and_cache_xsplit_f32_f32::ENTRY,
        (CacheLayout::XSplit, DType::F32, DType::E4m3) => rotary_and_cache_xsplit_f32_e4m3::ENTRY,
        (CacheLayout::XSplit, DType::F32, DType::E5m2) => rotary_and_cache_xsplit_f32_e5m2::ENTRY,
        (CacheLayout::XSplit, DType::F32, DType::I8) => rotary_and_cache_xsplit_f32_i8::ENTRY,
        (CacheLayout::XSplit, DType::F16, DType::F16) => rotary_and_cache_xsplit_f16_f16::ENTRY,
        (CacheLayout::XSplit, DType::F16, DType::E4m3) => rotary_and_cache_xsplit_f16_e4m3::ENTRY,
        (CacheLayout::XSplit, DType::F16, DType::E5m2) => rotary_and_cache_xsplit_f16_e5m2::ENTRY,
        (CacheLayout::XSplit, DType::F16, DType::I8) => rotary_and_cache_xsplit_f16_i8::ENTRY,
        (CacheLayout::XSplit, DType::Bf16, DType::Bf16) => rotary_and_cache_xsplit_bf16_bf16::ENTRY,
        (CacheLayout::XSplit, DType::Bf16, DType::E4m3) => rotary_and_cache_xsplit_bf16_e4m3::ENTRY,
        (CacheLayout::XSplit, DType::Bf16, DType::E5m2) => rotary_and_cache_xsplit_bf16_e5m2::ENTRY,
        (CacheLayout::XSplit, DType::Bf16, DType::I8) => rotary_and_cache_xsplit_bf16_i8::ENTRY,
        (_, DType::F32, DType::F32) => rotary_and_cache_flat_f32_f32::ENTRY,
        (_, DType::F32, DType::E4m3) => rotary_and_cache_flat_f32_e4m3::ENTRY,
        (_, DType::F32, DType::E5m2) => rotary_and_cache_flat_f32_e5m2::ENTRY,
        (_, DType::F32, DType::I8) => rotary_and_cache_flat_f32_i8::ENTRY,
        (_, DType::F16, DType::F16) => rotary_and_cache_flat_f16_f16::ENTRY,
        (_, DType::F16, DType::E4m3) => rotary_and_cache_flat_f16_e4m3::ENTRY,
        (_, DType::F16, DType::E5m2) => rotary_and_cache_flat_f16_e5m2::ENTRY,
        (_, DType::F16, DType::I8) => rotary_and_cache_flat_f16_i8::ENTRY,
        (_, DType::Bf16, DType::Bf16) => rotary_and_cache_flat_bf16_bf16::ENTRY,
        (_, DType::Bf16, DType::E4m3) => rotary_and_cache_flat_bf16_e4m3::ENTRY,
        (_, DType::Bf16, DType::E5m2) => rotary_and_cache_flat_bf16_e5m2::ENTRY,
        (_, DType::Bf16, DType::I8) => rotary_and_cache_flat_bf16_i8::ENTRY,
        _ => return None,
    })
}

/// How to launch it.
pub const fn geometry(dtype: DType, layout: CacheLayout, heads: u32, args: &Args) -> Geometry {
    /// Up to so many chunk pairs the x-split layout has a warp to a block: values take many stores, of which a multiprocessor does a few at
    /// once, so that few tokens had better take many of them. Beyond, starting blocks takes longer than their work. Measured on an H200.
    const FEW: u64 = 1 << 17;
    let n = 16 / dtype.size() as u32;
    let tokens_first = matches!(layout, CacheLayout::XSplit);
    let heads = if heads == 0 { 1 } else { heads };
    let kv_items = (args.kv_heads / heads).saturating_mul(2).saturating_mul(kv_pairs(args, n));
    let query_items = (args.query_heads / heads).saturating_mul(turning(args.rot_dim, n));
    let few = (args.tokens as u64).saturating_mul(kv_items as u64 + query_items as u64) <= FEW / heads as u64;
    // Threads of a block and tokens of a group, as powers of two.
    let (threads, mut group) = (if tokens_first && few { 5 } else { 7 }, 0);
    while group < 4 && args.tokens > 1 << group {
        group += 1;
    }
    let queries = Share::new(query_items, threads, group, false);
    let blocks = Share::new(kv_items, threads, group, tokens_first).blocks.saturating_add(queries.blocks);
    let groups = args.tokens.div_ceil(1 << group);
    let y = if groups < 65535 { groups } else { 65535 };
    let z = if groups == 0 { 0 } else { groups.div_ceil(y) };
    Geometry::new([blocks, y, z], [1 << group, 1 << (threads - group), 1]).dependent()
}

/// Launches on raw pointers (layer L1), as [`Args`] says, with as many heads a thread as [`heads_of_a_thread`] says.
///
/// # Errors
/// [`Error::Unsupported`] for types without an entry, and those of [`Stream::launch`].
///
/// # Safety
/// As for [`rotary::launch`](super::rotary::launch) and
/// [`reshape_and_cache::launch`](crate::kv_cache::reshape_and_cache::launch).
pub unsafe fn launch(stream: &Stream, dtype: DType, cache: DType, layout: CacheLayout, args: &Args) -> Result<()> {
    // SAFETY: forwarded to the caller.
    unsafe { launch_with(stream, dtype, cache, layout, heads_of_a_thread(dtype, cache, layout, args), args) }
}

/// [`launch`] with so many heads a thread, which can have two.
unsafe fn launch_with(
    stream: &Stream,
    dtype: DType,
    cache: DType,
    layout: CacheLayout,
    heads: u32,
    args: &Args,
) -> Result<()> {
    let entry = entry(dtype, cache, layout, heads).ok_or_else(|| Error::Unsupported {
        op: "rotary_and_cache",
        what: format!(
            "no kernel from {dtype} to {cache}; there are f32, f16 and bf16 to themselves, e4m3, e5m2 and i8"
        ),
    })?;
    // SAFETY: forwarded to the caller.
    unsafe { stream.launch(&entry, &geometry(dtype, layout, heads, args), args) }
}

/// What [`rotary_and_cache`] may be told besides.
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
#[must_use]
pub struct RotaryAndCacheOptions<'a> {
    /// Which elements turn together; [`Pairing::Neox`].
    pub pairing: Pairing,
    /// Where in a head the rotated part starts; 0.
    pub offset: usize,
    /// The largest position, if the caller knows it: checked against the rows of `angles`.
    pub largest_position: Option<usize>,
    /// Scales of an 8-bit cache.
    pub scales: Option<Scales<'a>>,
    /// Whether a thread has two heads rather than one; by the size of the launch. The results are the same.
    pub two_heads: Option<bool>,
}

impl<'a> RotaryAndCacheOptions<'a> {
    /// With these elements turning together.
    pub fn pairing(mut self, pairing: Pairing) -> Self {
        self.pairing = pairing;
        self
    }

    /// Rotates the elements from `offset` on.
    pub fn offset(mut self, offset: usize) -> Self {
        self.offset = offset;
        self
    }

    /// No position is larger.
    pub fn largest_position(mut self, position: usize) -> Self {
        self.largest_position = Some(position);
        self
    }

    /// With these scales.
    pub fn scales(mut self, key: &'a Tensor<f32>, value: &'a Tensor<f32>) -> Self {
        self.scales = Some(Scales::new(key, value));
        self
    }

    /// Two heads a thread, or one, however large the launch is.
    pub fn two_heads(mut self, two: bool) -> Self {
        self.two_heads = Some(two);
        self
    }
}

/// Rotates `query` in place, and `cache[slots[t]] = rotated key[t], value[t]` for each token `t`.
///
/// `query` is `[tokens, heads, head_dim]`, `key` and `value` are `[tokens, kv_heads, head_dim]`, dense in the last
/// dimension; `positions` and `angles` are as for [`rotary`](super::rotary()); `slots`, the cache and its
/// scales as for [`reshape_and_cache`](crate::kv_cache::reshape_and_cache()). The head dimension is the cache's.
///
/// A token whose position is not in `angles` is left out altogether; one whose slot is -1 or outside of the cache only
/// has its query rotated. All of these but positions and slots of -1 are counted up in `status`, `[1]`, if there is one.
///
/// # Errors
/// Those of the two operations; [`Unsupported`](Error::Unsupported) for two heads a thread, if asked for, with tensors of `f32`, or an odd number of heads.
#[allow(clippy::too_many_arguments, reason = "tensors, in the order of all operations")]
pub fn rotary_and_cache<T: Float + StoreAs<S>, S: CacheElement, C: Float, I: Element, J: Element>(
    stream: &Stream,
    query: &mut Tensor<T>,
    cache: &mut KvCache<S>,
    status: Option<&mut Tensor<u32>>,
    key: &Tensor<T>,
    value: &Tensor<T>,
    positions: &Tensor<I>,
    angles: &Tensor<C>,
    slots: &Tensor<J>,
    options: &RotaryAndCacheOptions<'_>,
) -> Result<()> {
    let mut call = Call::new("rotary_and_cache", stream);
    call.float("query", T::DTYPE)?;
    let (layout, shape) = (cache.layout(), cache.shape());
    let &[tokens, query_heads, head_dim] = query.shape() else {
        return Err(call.bad_shape("query", query.shape(), "[tokens, heads, head_dim]"));
    };
    if head_dim != shape.head_dim {
        let expected = format!("[tokens, heads, {}], as the cache", shape.head_dim);
        return Err(call.bad_shape("query", query.shape(), expected));
    }
    let expected = [tokens, shape.heads, head_dim];
    call.same_shape("key", key.shape(), &expected)?;
    call.same_shape("value", value.shape(), &expected)?;
    call.dense_last("value", value)?;
    let rotation = Rotation::check(&mut call, positions, angles, T::DTYPE, tokens, options.largest_position)?;
    rotation.check_head(&call, "query", query, options.offset)?;
    call.dense_last("key", key)?;
    call.same_shape("slots", slots.shape(), &[tokens])?;
    call.contiguous("slots", slots)?;
    call.dtype_among("slots", J::DTYPE, &[DType::I32, DType::I64])?;
    let scales = check_scales(&mut call, options.scales, shape.heads, T::DTYPE, S::DTYPE)?;
    let status = status_word(&mut call, status)?;
    let (k, v) = (cache.key_strides(), cache.value_strides());
    let (key_cache, value_cache) = write_cache(&mut call, cache)?;
    let args = Args {
        query_token_stride: query.strides()[0],
        query_head_stride: query.strides()[1],
        query: call.write("query", query)?,
        key: call.read("key", key)?,
        value: call.read("value", value)?,
        key_cache,
        value_cache,
        positions: rotation.positions,
        angles: rotation.angles,
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
        max_positions: rotation.max_positions,
        slot_count: shape.slots(),
        block_size: call.count("cache", shape.block_size)?,
        tokens: call.count("query", tokens)?,
        query_heads: call.count("query", query_heads)?,
        kv_heads: call.count("cache", shape.heads)?,
        head_dim: call.count("cache", head_dim)?,
        offset: call.count("offset", options.offset)?,
        rot_dim: rotation.rot_dim,
        flags: rotation.flags
            | if J::DTYPE == DType::I64 { SLOTS_I64 } else { 0 }
            | if scales.per_head { SCALE_PER_HEAD } else { 0 }
            | if options.pairing == Pairing::Gptj { INTERLEAVED } else { 0 },
    };
    let items = shape.heads.max(query_heads).saturating_mul(2).saturating_mul(head_dim);
    call.count(if shape.heads > query_heads { "cache" } else { "query" }, items)?;
    call.check_overlap()?;
    if tokens == 0 {
        return Ok(());
    }
    if options.two_heads == Some(true) && !can_have_two_heads(T::DTYPE, &args) {
        let what = format!(
            "two heads a thread of {query_heads} and {} of {}: `two_heads` is for even numbers of them, f16 or bf16; leave it out",
            shape.heads,
            T::DTYPE
        );
        return Err(Error::Unsupported { op: "rotary_and_cache", what });
    }
    let heads = options
        .two_heads
        .map_or_else(|| heads_of_a_thread(T::DTYPE, S::DTYPE, layout, &args), |two| 1 + u32::from(two));
    // SAFETY: shapes, devices and overlap were checked above; tensors are aligned to their elements; positions and
    // slots are checked by the kernel; two heads are possible where they are asked for.
    unsafe { launch_with(stream, T::DTYPE, S::DTYPE, layout, heads, &args) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_chunk_of_every_token_has_one_thread() {
        for (items, threads, group, first) in [1u32, 2, 5, 16, 64, 127, 128, 129, 300]
            .into_iter()
            .flat_map(|i| [5, 7, 8].into_iter().flat_map(move |t| (0..=4).map(move |g| (i, t, g))))
            .flat_map(|(i, t, g)| [false, true].map(|f| (i, t, g, f)))
        {
            let share = Share::new(items, threads, group, first);
            let mut seen = vec![0; (items << group) as usize];
            for (block, thread) in (0..share.blocks).flat_map(|b| (0..1 << threads).map(move |t| (b, t))) {
                let (token, item) = share.of(block, thread, threads, first);
                if token < 1 << group && item < items {
                    seen[(item << group | token) as usize] += 1;
                }
            }
            assert!(
                seen.iter().all(|n| *n == 1),
                "{items} items, 2^{threads} threads, 2^{group} tokens, {first}: {seen:?}"
            );
        }
    }
}
