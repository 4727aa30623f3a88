//! Normalises the heads of queries and keys and rotates them, in place: one launch instead of three.
//!
//! `rotate(x / sqrt(mean(x²) + eps) * (weight + weight_offset))` for each head, in f32 with one rounding at the end. What
//! Qwen3 and Gemma 3 do between projection and attention. Sources: [`norm::rms_norm`](crate::norm::rms_norm()) and
//! [`rotary`](super::rotary()).

use super::rotary::{Pairing, Rotation, more};
use crate::check::Call;
use crate::device::{Geometry, Stream};
use crate::error::{Error, Result};
use crate::kernels::rope::qk_norm_rotary as kernel;
use crate::kernels::rope::rotation::{ANGLES_F32, INVERSE};
use crate::kv_cache::reshape_and_cache::{share, status_word};
use crate::tensor::Tensor;
use cuda_std::{DType, Element, Entry, Float};

pub use kernel::Args;

/// Which kernel there is for a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Heads {
    /// Any heads, element by element.
    Narrow,
    /// Heads of whole chunks of 16 bytes, up to 32 pairs of them ([`wide`]).
    Wide,
    /// [`Wide`](Self::Wide) heads that turn as a whole, with a power of two of pairs.
    Whole,
}

/// The entry for an element type, if there is one.
pub const fn entry(dtype: DType, pairing: Pairing, heads: Heads) -> Option<Entry<Args>> {
    use kernel::*;
    Some(match (dtype, pairing, heads) {
        (DType::F32, Pairing::Neox, Heads::Wide) => qk_norm_rotary_neox_f32::ENTRY,
        (DType::F16, Pairing::Neox, Heads::Wide) => qk_norm_rotary_neox_f16::ENTRY,
        (DType::Bf16, Pairing::Neox, Heads::Wide) => qk_norm_rotary_neox_bf16::ENTRY,
        (DType::F32, Pairing::Gptj, Heads::Wide) => qk_norm_rotary_gptj_f32::ENTRY,
        (DType::F16, Pairing::Gptj, Heads::Wide) => qk_norm_rotary_gptj_f16::ENTRY,
        (DType::Bf16, Pairing::Gptj, Heads::Wide) => qk_norm_rotary_gptj_bf16::ENTRY,
        (DType::F32, Pairing::Neox, Heads::Whole) => qk_norm_rotary_whole_neox_f32::ENTRY,
        (DType::F16, Pairing::Neox, Heads::Whole) => qk_norm_rotary_whole_neox_f16::ENTRY,
        (DType::Bf16, Pairing::Neox, Heads::Whole) => qk_norm_rotary_whole_neox_bf16::ENTRY,
        (DType::F32, Pairing::Gptj, Heads::Whole) => qk_norm_rotary_whole_gptj_f32::ENTRY,
        (DType::F16, Pairing::Gptj, Heads::Whole) => qk_norm_rotary_whole_gptj_f16::ENTRY,
        (DType::Bf16, Pairing::Gptj, Heads::Whole) => qk_norm_rotary_whole_gptj_bf16::ENTRY,
        (DType::F32, Pairing::Neox, Heads::Narrow) => qk_norm_rotary_narrow_neox_f32::ENTRY,
        (DType::F16, Pairing::Neox, Heads::Narrow) => qk_norm_rotary_narrow_neox_f16::ENTRY,
        (DType::Bf16, Pairing::Neox, Heads::Narrow) => qk_norm_rotary_narrow_neox_bf16::ENTRY,
        (DType::F32, Pairing::Gptj, Heads::Narrow) => qk_norm_rotary_narrow_gptj_f32::ENTRY,
        (DType::F16, Pairing::Gptj, Heads::Narrow) => qk_norm_rotary_narrow_gptj_f16::ENTRY,
        (DType::Bf16, Pairing::Gptj, Heads::Narrow) => qk_norm_rotary_narrow_gptj_bf16::ENTRY,
        _ => return None,
    })
}

/// Elements of a chunk: 16 bytes of them, or one.
const fn chunk(dtype: DType, narrow: bool) -> u32 {
    if narrow { 1 } else { 16 / dtype.size() as u32 }
}

/// Pairs of chunks of a head.
const fn pairs(args: &Args, n: u32) -> u32 {
    args.rot_dim / 2 / n + (args.head_dim.saturating_sub(args.rot_dim) / n).div_ceil(2)
}

/// Whether heads can be read and written 16 bytes at a time, each by at most 32 lanes.
pub fn wide(dtype: DType, args: &Args) -> bool {
    let (n, size) = (chunk(dtype, false), dtype.size());
    let addresses = [args.query.cast_const(), args.key.cast_const(), args.query_weight, args.key_weight];
    let places = addresses.iter().fold(0, |p, a| p | *a as usize)
        | (size * (args.query_token_stride | args.query_head_stride | args.key_token_stride | args.key_head_stride));
    let angle_size = if args.flags & ANGLES_F32 != 0 { 4 } else { size };
    places.is_multiple_of(16)
        && (args.angles as usize | (angle_size * args.rot_dim as usize)).is_multiple_of(16)
        && ((args.rot_dim / 2) | args.offset | args.head_dim).is_multiple_of(n)
        && pairs(args, n) <= 32
}

/// Whether there is this kernel for these arguments.
pub fn suits(dtype: DType, heads: Heads, args: &Args) -> bool {
    match heads {
        Heads::Narrow => pairs(args, 1) <= 32 * kernel::NARROW_ITEMS,
        Heads::Wide => wide(dtype, args),
        Heads::Whole => {
            let all = args.offset == 0 && args.rot_dim == args.head_dim;
            all && pairs(args, chunk(dtype, false)).is_power_of_two() && wide(dtype, args)
        }
    }
}

/// The kernel that is fastest. The results of [`Heads::Whole`] and [`Heads::Wide`] are the same bits.
pub fn choose(dtype: DType, args: &Args) -> Heads {
    if suits(dtype, Heads::Whole, args) {
        Heads::Whole
    } else if wide(dtype, args) {
        Heads::Wide
    } else {
        Heads::Narrow
    }
}

/// Of the multiples of `unit` up to `most` the one by which shares of `n` things have the least room left over; of several, the largest.
const fn evenly(n: u32, unit: u32, most: u32) -> u32 {
    let (mut best, mut least, mut share) = (unit, u64::MAX, unit);
    while share <= most {
        let left = n.div_ceil(share) as u64 * share as u64 - n as u64;
        if left <= least {
            (best, least) = (share, left);
        }
        share += unit;
    }
    best
}

/// How to launch it.
pub const fn geometry(dtype: DType, heads: Heads, tokens: u32, args: &Args) -> Geometry {
    let narrow = matches!(heads, Heads::Narrow);
    let items = if narrow { kernel::NARROW_ITEMS } else { 1 };
    // A head has lanes of one warp, since they are combined by shuffles; a block has whole warps. Heads with more pairs than that are none to launch.
    let pairs = pairs(args, chunk(dtype, narrow)).div_ceil(items);
    let lanes = if pairs < 32 { pairs.next_power_of_two() } else { 32 };
    let all = args.query_heads.saturating_add(args.key_heads);
    // Whole warps, and few tokens spread over more blocks. Measured on an H200.
    let whole = matches!(heads, Heads::Whole);
    let few = if whole { 2048 } else { 1024 };
    let threads = if tokens <= few { 128 } else { 256 };
    let (unit, most) = (32 / lanes, threads / lanes);
    let y = if whole { evenly(all, unit, most) } else { share(all, most).next_multiple_of(unit) };
    Geometry::new([tokens, all.div_ceil(y), 1], [lanes, y, 1]).dependent()
}

/// Launches on raw pointers (layer L1), as [`Args`] says, the kernel that [`choose`] says.
///
/// # Errors
/// [`Error::Unsupported`] for an element type without an entry, heads of more than 512 elements (256 pairs that turn), or more heads
/// than a launch takes; those of [`Stream::launch`].
///
/// # Safety
/// As for [`rotary::launch`](super::rotary::launch); the weights are `[head_dim]` or null.
pub unsafe fn launch(stream: &Stream, dtype: DType, pairing: Pairing, tokens: u32, args: &Args) -> Result<()> {
    // SAFETY: forwarded to the caller.
    unsafe { launch_with(stream, dtype, pairing, choose(dtype, args), tokens, args) }
}

/// [`launch`] by a kernel that there is for the arguments, but for the widths of heads.
unsafe fn launch_with(
    stream: &Stream,
    dtype: DType,
    pairing: Pairing,
    heads: Heads,
    tokens: u32,
    args: &Args,
) -> Result<()> {
    let unsupported = |what| Error::Unsupported { op: "qk_norm_rotary", what };
    if !suits(dtype, heads, args) {
        return Err(unsupported(format!("heads of {} elements; at most 512", args.head_dim)));
    }
    let entry = entry(dtype, pairing, heads)
        .ok_or_else(|| unsupported(format!("no kernel for {dtype}; there are f32, f16 and bf16")))?;
    let geometry = geometry(dtype, heads, tokens, args);
    if geometry.grid[1] > 65535 {
        let (heads, most) = (args.query_heads.saturating_add(args.key_heads), 65535 * geometry.block[1]);
        return Err(unsupported(format!("{heads} heads of {} elements; at most {most}", args.head_dim)));
    }
    // SAFETY: forwarded to the caller.
    unsafe { stream.launch(&entry, &geometry, args) }
}

/// What [`qk_norm_rotary`] may be told besides.
#[derive(Debug)]
#[non_exhaustive]
#[must_use]
pub struct QkNormRotaryOptions<'a, T: Element> {
    /// Of the queries' norm, `[head_dim]`; ones if absent.
    pub query_weight: Option<&'a Tensor<T>>,
    /// Of the keys' norm, `[head_dim]`; ones if absent.
    pub key_weight: Option<&'a Tensor<T>>,
    /// Which elements turn together; [`Pairing::Neox`].
    pub pairing: Pairing,
    /// Added to the weights: 1 for Gemma's.
    pub weight_offset: f32,
    /// Where in a head the rotated part starts; 0.
    pub offset: usize,
    /// Turns back, after the normalisation; see [`RotaryOptions::inverse`](super::RotaryOptions::inverse).
    pub inverse: bool,
    /// The largest position, if the caller knows it: checked against the cache.
    pub largest_position: Option<usize>,
    /// The kernel; the one that [`choose`] says.
    pub heads: Option<Heads>,
}

impl<T: Element> Clone for QkNormRotaryOptions<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T: Element> Copy for QkNormRotaryOptions<'_, T> {}

impl<T: Element> Default for QkNormRotaryOptions<'_, T> {
    fn default() -> Self {
        Self {
            query_weight: None,
            key_weight: None,
            pairing: Pairing::default(),
            weight_offset: 0.0,
            offset: 0,
            inverse: false,
            largest_position: None,
            heads: None,
        }
    }
}

impl<'a, T: Element> QkNormRotaryOptions<'a, T> {
    /// With these weights of the norms.
    pub fn weights(mut self, query: &'a Tensor<T>, key: &'a Tensor<T>) -> Self {
        (self.query_weight, self.key_weight) = (Some(query), Some(key));
        self
    }

    /// With these elements turning together.
    pub fn pairing(mut self, pairing: Pairing) -> Self {
        self.pairing = pairing;
        self
    }

    /// Adds this to the weights.
    pub fn weight_offset(mut self, offset: f32) -> Self {
        self.weight_offset = offset;
        self
    }

    /// Rotates the elements from `offset` on.
    pub fn offset(mut self, offset: usize) -> Self {
        self.offset = offset;
        self
    }

    /// Turns back.
    pub fn inverse(mut self) -> Self {
        self.inverse = true;
        self
    }

    /// No position is larger.
    pub fn largest_position(mut self, position: usize) -> Self {
        self.largest_position = Some(position);
        self
    }

    /// By this kernel.
    pub fn heads(mut self, heads: Heads) -> Self {
        self.heads = Some(heads);
        self
    }
}

/// Normalises each head of `query` and `key` and rotates it, in place.
///
/// Tensors, positions, angles and what happens to wrong positions are as for [`rotary`](super::rotary()); `query` and
/// `key` have the same `head_dim`, at most 512. The weights are `[head_dim]`, dense, ones if `None`.
///
/// # Errors
/// As for [`rotary`](super::rotary()); [`Value`](Error::Value) for an `eps` that is negative or not finite;
/// [`Unsupported`](Error::Unsupported) for larger heads, more of them than a launch takes, and a kernel that
/// is not for them.
#[allow(clippy::too_many_arguments, reason = "tensors, in the order of all operations")]
pub fn qk_norm_rotary<T: Float, C: Float, I: Element>(
    stream: &Stream,
    query: &mut Tensor<T>,
    key: Option<&mut Tensor<T>>,
    status: Option<&mut Tensor<u32>>,
    positions: &Tensor<I>,
    angles: &Tensor<C>,
    eps: f32,
    options: &QkNormRotaryOptions<'_, T>,
) -> Result<()> {
    let mut call = Call::new("qk_norm_rotary", stream);
    call.float("query", T::DTYPE)?;
    let &[tokens, query_heads, head_dim] = query.shape() else {
        return Err(call.bad_shape("query", query.shape(), "[tokens, heads, head_dim]"));
    };
    let rotation = Rotation::check(&mut call, positions, angles, T::DTYPE, tokens, options.largest_position)?;
    rotation.check_head(&call, "query", query, options.offset)?;
    let mut key_heads = 0;
    let (mut key_token_stride, mut key_head_stride) = (0, 0);
    if let Some(key) = &key {
        let &[n, heads, dim] = key.shape() else {
            return Err(call.bad_shape("key", key.shape(), "[tokens, kv_heads, head_dim]"));
        };
        if n != tokens || dim != head_dim {
            return Err(call.bad_shape("key", key.shape(), format!("[{tokens}, kv_heads, {head_dim}], as `query`")));
        }
        rotation.check_head(&call, "key", key, options.offset)?;
        key_heads = heads;
        (key_token_stride, key_head_stride) = (key.strides()[0], key.strides()[1]);
    }
    let (query_weight, key_weight) = (options.query_weight, options.key_weight);
    for (arg, weight) in [("query_weight", query_weight), ("key_weight", key_weight)] {
        if let Some(weight) = weight {
            call.same_shape(arg, weight.shape(), &[head_dim])?;
            call.contiguous(arg, weight)?;
        }
    }
    call.value(eps >= 0.0 && eps.is_finite(), "eps", "finite and not negative", eps)?;
    let heads = call.count(more(query_heads, key_heads), query_heads.saturating_add(key_heads))?;
    let query_heads = call.count("query", query_heads)?;
    let (query_token_stride, query_head_stride) = (query.strides()[0], query.strides()[1]);
    let args = Args {
        query: call.write("query", query)?,
        key: call.write_opt("key", key)?,
        query_weight: call.read_opt("query_weight", query_weight)?,
        key_weight: call.read_opt("key_weight", key_weight)?,
        positions: rotation.positions,
        angles: rotation.angles,
        status: status_word(&mut call, status)?,
        query_token_stride,
        query_head_stride,
        key_token_stride,
        key_head_stride,
        max_positions: rotation.max_positions,
        query_heads,
        key_heads: heads - query_heads,
        head_dim: call.count("query", head_dim)?,
        offset: call.count("offset", options.offset)?,
        rot_dim: rotation.rot_dim,
        flags: rotation.flags | if options.inverse { INVERSE } else { 0 },
        eps,
        weight_offset: options.weight_offset,
    };
    let tokens = call.count("query", tokens)?;
    call.check_overlap()?;
    if tokens == 0 || heads == 0 {
        return Ok(());
    }
    let heads = options.heads.unwrap_or_else(|| choose(T::DTYPE, &args));
    if heads != Heads::Narrow && !suits(T::DTYPE, heads, &args) {
        let what = format!(
            "{query_heads} and {} heads of {head_dim} {}, of which {} turn from {} on, as {heads:?}; leave `heads` out",
            args.key_heads,
            T::DTYPE,
            args.rot_dim,
            args.offset
        );
        return Err(Error::Unsupported { op: "qk_norm_rotary", what });
    }
    // SAFETY: shapes, devices and overlap were checked above; tensors are aligned to their elements; positions are
    // checked by the kernel, which there is for the arguments.
    unsafe { launch_with(stream, T::DTYPE, options.pairing, heads, tokens, &args) }
}
