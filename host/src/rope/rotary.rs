//! Rotates queries and keys by the angles of their positions, in place.
//!
//! For each pair `(x, y)` of a head: `(x cos - y sin, y cos + x sin)`, with the angle of the pair at the token's
//! position. Pairs are `(x[i], x[i + rot_dim / 2])` ([`Pairing::Neox`], also "rotate half") or `(x[2 i], x[2 i + 1])`
//! ([`Pairing::Gptj`], also "interleaved"). Source: Su et al., *RoFormer: Enhanced transformer with rotary position
//! embedding*, 2021; after vLLM's `rotary_embedding`.

use crate::check::Call;
use crate::device::{Geometry, Stream};
use crate::error::{Error, Result};
use crate::kernels::rope::{rotary as kernel, rotation};
use crate::kv_cache::reshape_and_cache::{chunk_major, status_word};
use crate::tensor::Tensor;
use cuda_std::{DType, Element, Entry, Float};

pub use kernel::Args;
pub use rotation::{ANGLES_F32, INVERSE, POSITIONS_I64};

/// Which elements of a head turn together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Pairing {
    /// `(x[i], x[i + rot_dim / 2])`: Llama, Qwen, NeoX.
    #[default]
    Neox,
    /// `(x[2 i], x[2 i + 1])`: GPT-J, DeepSeek, ChatGLM.
    Gptj,
}

/// The entry for an element type, if there is one.
pub const fn entry(dtype: DType, pairing: Pairing) -> Option<Entry<Args>> {
    Some(match (dtype, pairing) {
        (DType::F32, Pairing::Neox) => kernel::rotary_neox_f32::ENTRY,
        (DType::F16, Pairing::Neox) => kernel::rotary_neox_f16::ENTRY,
        (DType::Bf16, Pairing::Neox) => kernel::rotary_neox_bf16::ENTRY,
        (DType::F32, Pairing::Gptj) => kernel::rotary_gptj_f32::ENTRY,
        (DType::F16, Pairing::Gptj) => kernel::rotary_gptj_f16::ENTRY,
        (DType::Bf16, Pairing::Gptj) => kernel::rotary_gptj_bf16::ENTRY,
        _ => return None,
    })
}

/// How to launch it; `heads` counts those of queries and keys.
pub const fn geometry(dtype: DType, tokens: u32, heads: u32, rot_dim: u32) -> Geometry {
    chunk_major(tokens, heads, (rot_dim / 2).div_ceil(16 / dtype.size() as u32))
}

/// Launches on raw pointers (layer L1), as [`Args`] says.
///
/// # Errors
/// [`Error::Unsupported`] for an element type without an entry, and those of [`Stream::launch`].
///
/// # Safety
/// The pointers are device memory of the sizes that strides and extents imply, aligned to their element types, until
/// the launch is done; no two elements of `query` and `key` share memory, with each other or with the inputs; `rot_dim`
/// is even.
pub unsafe fn launch(stream: &Stream, dtype: DType, pairing: Pairing, args: &Args) -> Result<()> {
    let entry = entry(dtype, pairing).ok_or_else(|| Error::Unsupported {
        op: "rotary",
        what: format!("no kernel for {dtype}; there are f32, f16 and bf16"),
    })?;
    let geometry = geometry(dtype, args.tokens, args.query_heads.saturating_add(args.key_heads), args.rot_dim);
    // SAFETY: forwarded to the caller.
    unsafe { stream.launch(&entry, &geometry, args) }
}

/// What [`rotary`] may be told besides.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
#[must_use]
pub struct RotaryOptions {
    /// Which elements turn together; [`Pairing::Neox`].
    pub pairing: Pairing,
    /// Where in a head the rotated part starts; 0.
    pub offset: usize,
    /// Turns back. Where the table's cosines and sines are scaled ([`Scaling::Yarn`](super::Scaling::Yarn)), so is the result, once more, as a gradient has to be.
    pub inverse: bool,
    /// The largest position, if the caller knows it: checked against the cache.
    pub largest_position: Option<usize>,
}

impl RotaryOptions {
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

    /// Turns back: see [`inverse`](Self::inverse).
    pub fn inverse(mut self) -> Self {
        self.inverse = true;
        self
    }

    /// No position is larger.
    pub fn largest_position(mut self, position: usize) -> Self {
        self.largest_position = Some(position);
        self
    }
}

/// Rotates `query`, and `key` if there is one, in place.
///
/// `query` is `[tokens, heads, head_dim]` and `key` `[tokens, kv_heads, head_dim]` (their head dimensions may differ),
/// dense in the last dimension, otherwise of any strides, such as views of one `[tokens, q | k | v]` tensor. `positions`
/// is `[tokens]` of `i32` or `i64`, dense. `angles` is `[max_positions, rot_dim]` of `f32` or `T`, dense, as
/// [`rope::cache`](super::cache()) makes it: `rot_dim` elements of each head turn, from [`RotaryOptions::offset`] on.
///
/// A token whose position is negative or not in the cache is left as it is. Those of any position but -1 are counted up in
/// `status`, `[1]`, if there is one (and there are heads).
///
/// # Errors
/// [`Shape`](Error::Shape), [`Stride`](Error::Stride), [`DType`](Error::DType), [`Overlap`](Error::Overlap),
/// [`WrongDevice`](Error::WrongDevice); [`Value`](Error::Value) for a rotated part that does not fit into a head, a [`largest_position`](RotaryOptions::largest_position) outside of the cache, extents beyond 2^31 - 1, and more heads
/// than a launch takes.
pub fn rotary<T: Float, C: Float, I: Element>(
    stream: &Stream,
    query: &mut Tensor<T>,
    key: Option<&mut Tensor<T>>,
    status: Option<&mut Tensor<u32>>,
    positions: &Tensor<I>,
    angles: &Tensor<C>,
    options: &RotaryOptions,
) -> Result<()> {
    let mut call = Call::new("rotary", stream);
    call.float("query", T::DTYPE)?;
    let &[tokens, query_heads, _] = query.shape() else {
        return Err(call.bad_shape("query", query.shape(), "[tokens, heads, head_dim]"));
    };
    let mut key_heads = 0;
    let (mut key_token_stride, mut key_head_stride) = (0, 0);
    let rotation = Rotation::check(&mut call, positions, angles, T::DTYPE, tokens, options.largest_position)?;
    rotation.check_head(&call, "query", query, options.offset)?;
    if let Some(key) = &key {
        let &[n, heads, _] = key.shape() else {
            return Err(call.bad_shape("key", key.shape(), "[tokens, kv_heads, head_dim]"));
        };
        if n != tokens {
            return Err(call.bad_shape("key", key.shape(), format!("[{tokens}, kv_heads, head_dim], as `query`")));
        }
        rotation.check_head(&call, "key", key, options.offset)?;
        key_heads = heads;
        (key_token_stride, key_head_stride) = (key.strides()[0], key.strides()[1]);
    }
    let heads = call.count(more(query_heads, key_heads), query_heads.saturating_add(key_heads))?;
    let query_heads = call.count("query", query_heads)?;
    let (query_token_stride, query_head_stride) = (query.strides()[0], query.strides()[1]);
    let args = Args {
        query: call.write("query", query)?,
        key: call.write_opt("key", key)?,
        positions: rotation.positions,
        angles: rotation.angles,
        status: status_word(&mut call, status)?,
        query_token_stride,
        query_head_stride,
        key_token_stride,
        key_head_stride,
        max_positions: rotation.max_positions,
        tokens: call.count("query", tokens)?,
        query_heads,
        key_heads: heads - query_heads,
        offset: call.count("offset", options.offset)?,
        rot_dim: rotation.rot_dim,
        flags: rotation.flags | if options.inverse { INVERSE } else { 0 },
    };
    call.check_overlap()?;
    if tokens == 0 || heads == 0 {
        return Ok(());
    }
    call.grid(more(query_heads as usize, key_heads), &geometry(T::DTYPE, args.tokens, heads, args.rot_dim))?;
    // SAFETY: shapes, devices and overlap were checked above; tensors are aligned to their elements; positions are
    // checked by the kernel.
    unsafe { launch(stream, T::DTYPE, options.pairing, &args) }
}

/// Whose heads are more.
pub(super) const fn more(query_heads: usize, key_heads: usize) -> &'static str {
    if key_heads > query_heads { "key" } else { "query" }
}

/// Positions and angles, checked.
pub(crate) struct Rotation {
    pub(crate) positions: *const u8,
    pub(crate) angles: *const u8,
    pub(crate) max_positions: usize,
    pub(crate) rot_dim: u32,
    pub(crate) flags: u32,
}

impl Rotation {
    pub(crate) fn check<C: Float, I: Element>(
        call: &mut Call<'_>,
        positions: &Tensor<I>,
        angles: &Tensor<C>,
        dtype: DType,
        tokens: usize,
        largest_position: Option<usize>,
    ) -> Result<Self> {
        call.dtype_among("positions", I::DTYPE, &[DType::I32, DType::I64])?;
        call.same_shape("positions", positions.shape(), &[tokens])?;
        call.contiguous("positions", positions)?;
        call.dtype_among("angles", C::DTYPE, &[DType::F32, dtype])?;
        let &[max_positions, rot_dim] = angles.shape() else {
            return Err(call.bad_shape("angles", angles.shape(), "[max_positions, rot_dim]"));
        };
        if rot_dim == 0 || !rot_dim.is_multiple_of(2) {
            return Err(call.bad_shape(
                "angles",
                angles.shape(),
                "[max_positions, rot_dim] with an even rot_dim, not 0",
            ));
        }
        call.contiguous("angles", angles)?;
        if let Some(largest) = largest_position {
            let expected = format!("below {max_positions}, the rows of `angles`");
            call.value(largest < max_positions, "largest_position", expected, largest)?;
        }
        let wide = if I::DTYPE == DType::I64 { POSITIONS_I64 } else { 0 };
        let f32_angles = if C::DTYPE == DType::F32 { ANGLES_F32 } else { 0 };
        Ok(Self {
            positions: call.read("positions", positions)?.cast(),
            angles: call.read("angles", angles)?.cast(),
            max_positions,
            rot_dim: call.count("angles", rot_dim)?,
            flags: wide | f32_angles,
        })
    }

    /// A tensor of heads that the rotated part must fit into.
    pub(crate) fn check_head<T: Element>(
        &self,
        call: &Call<'_>,
        arg: &'static str,
        x: &Tensor<T>,
        offset: usize,
    ) -> Result<()> {
        let (rot_dim, head_dim) = (self.rot_dim as usize, x.dim(2));
        call.value(
            offset.checked_add(rot_dim).is_some_and(|end| end <= head_dim),
            "offset",
            format!("such that the {rot_dim} elements that `angles` turns fit from there on into the {head_dim} of a head of `{arg}`"),
            offset,
        )?;
        call.dense_last(arg, x)?;
        call.distinct(arg, x)
    }
}
