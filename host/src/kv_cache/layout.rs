//! Layouts of a paged cache, and the pair of tensors that is one.
//!
//! A cache is `blocks` blocks of `block_size` tokens. The *slot* `block * block_size + i` is the place of the `i`-th
//! token in a block. Keys and values of a layer are two tensors:
//!
//! | layout | keys | values | used by |
//! | --- | --- | --- | --- |
//! | [`Nhd`](CacheLayout::Nhd) | `[blocks, block_size, heads, dim]` | the same | FlashAttention, FlashInfer |
//! | [`Hnd`](CacheLayout::Hnd) | `[blocks, heads, block_size, dim]` | the same | FlashInfer, TensorRT-LLM |
//! | [`XSplit`](CacheLayout::XSplit) | `[blocks, heads, dim / x, block_size, x]` | `[blocks, heads, dim, block_size]` | vLLM's first kernels |
//!
//! with `x` as many elements as 16 bytes hold. Kernels see strides ([`PageStrides`]), so the tensors may be views, for
//! example the two halves of one `[blocks, 2, ..]` tensor.

use crate::check::{Call, product, shares_elements};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::tensor::Tensor;
use cuda_std::DType;

pub use crate::kernels::kv_cache::{CacheElement, StoreAs};

/// Where the elements of a block lie; see the [module](self).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum CacheLayout {
    /// Keys `[blocks, heads, dim / x, block_size, x]`, values `[blocks, heads, dim, block_size]`.
    XSplit,
    /// `[blocks, block_size, heads, dim]`.
    Nhd,
    /// `[blocks, heads, block_size, dim]`.
    Hnd,
}

/// Extents of a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[must_use]
pub struct CacheShape {
    /// Blocks (pages).
    pub blocks: usize,
    /// Tokens of a block.
    pub block_size: usize,
    /// Key/value heads.
    pub heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
}

impl CacheShape {
    /// `blocks` blocks of `block_size` tokens, of `heads` heads of `head_dim` elements.
    pub const fn new(blocks: usize, block_size: usize, heads: usize, head_dim: usize) -> Self {
        Self { blocks, block_size, heads, head_dim }
    }

    /// Slots of the cache: `blocks * block_size`; the largest number if there would be more.
    pub const fn slots(&self) -> usize {
        product(&[self.blocks, self.block_size])
    }

    /// Elements of a block of keys, or of values; the largest number if there would be more.
    pub const fn block_len(&self) -> usize {
        product(&[self.block_size, self.heads, self.head_dim])
    }
}

/// The place of an element of a cache tensor, in elements:
/// `block * b + head * h + token * t + (dim / run) * r + dim % run`.
///
/// ```
/// use warploom::DType;
/// use warploom::kv_cache::{CacheLayout, CacheShape, PageStrides};
///
/// let shape = CacheShape::new(4, 16, 2, 32);
/// let keys = PageStrides::keys(CacheLayout::XSplit, shape, DType::Bf16);
/// assert_eq!((keys.block, keys.head, keys.token, keys.run, keys.run_stride), (1024, 512, 8, 8, 128));
/// assert_eq!(keys.index(3, 1, 5, 10), 3 * 1024 + 512 + 5 * 8 + 128 + 2);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PageStrides {
    /// From block to block.
    pub block: usize,
    /// From head to head.
    pub head: usize,
    /// From token to token.
    pub token: usize,
    /// Elements along the head dimension that lie next to each other.
    pub run: usize,
    /// From run to run.
    pub run_stride: usize,
}

impl PageStrides {
    /// Of a layout in which a token's elements of a head lie next to each other.
    pub(crate) const fn of_dense_heads(block: usize, token: usize, head: usize, head_dim: usize) -> Self {
        Self { block, head, token, run: head_dim, run_stride: head_dim }
    }

    /// Of the keys of a dense cache. Distances that no memory holds are the largest number.
    pub const fn keys(layout: CacheLayout, shape: CacheShape, dtype: DType) -> Self {
        match layout {
            CacheLayout::XSplit => {
                let x = 16 / dtype.size();
                let page = product(&[shape.head_dim, shape.block_size]);
                let run_stride = product(&[shape.block_size, x]);
                Self { block: shape.block_len(), head: page, token: x, run: x, run_stride }
            }
            _ => Self::flat(layout, shape),
        }
    }

    /// Of the values of a dense cache. Distances that no memory holds are the largest number.
    pub const fn values(layout: CacheLayout, shape: CacheShape) -> Self {
        match layout {
            CacheLayout::XSplit => {
                let page = product(&[shape.head_dim, shape.block_size]);
                Self { block: shape.block_len(), head: page, token: 1, run: 1, run_stride: shape.block_size }
            }
            _ => Self::flat(layout, shape),
        }
    }

    const fn flat(layout: CacheLayout, shape: CacheShape) -> Self {
        let (head, token) = match layout {
            CacheLayout::Nhd => (shape.head_dim, product(&[shape.heads, shape.head_dim])),
            _ => (product(&[shape.block_size, shape.head_dim]), shape.head_dim),
        };
        Self::of_dense_heads(shape.block_len(), token, head, shape.head_dim)
    }

    /// The element of a block, head, token in the block, and dimension, counted from the first element.
    pub const fn index(&self, block: usize, head: usize, token: usize, dim: usize) -> usize {
        block * self.block + head * self.head + token * self.token + dim / self.run * self.run_stride + dim % self.run
    }
}

/// The paged keys and values of one layer.
///
/// Clones share memory, as clones of tensors do.
#[derive(Clone)]
pub struct KvCache<S> {
    layout: CacheLayout,
    shape: CacheShape,
    key: Tensor<S>,
    value: Tensor<S>,
    key_strides: PageStrides,
    value_strides: PageStrides,
}

impl<S: CacheElement> KvCache<S> {
    /// A dense cache of zeros.
    ///
    /// # Errors
    /// As for [`from_tensors`](Self::from_tensors), and those of [`Tensor::zeros`].
    pub fn zeros(device: &Device, layout: CacheLayout, shape: CacheShape) -> Result<Self> {
        check_block("KvCache::zeros", "shape", shape)?;
        let CacheShape { blocks, block_size, heads, head_dim } = shape;
        let x = 16 / size_of::<S>();
        let (key, value) = match layout {
            CacheLayout::XSplit => {
                check_x(head_dim, x, "shape")?;
                (
                    Tensor::zeros(device, &[blocks, heads, head_dim / x, block_size, x])?,
                    Tensor::zeros(device, &[blocks, heads, head_dim, block_size])?,
                )
            }
            CacheLayout::Nhd => {
                let dims = [blocks, block_size, heads, head_dim];
                (Tensor::zeros(device, &dims)?, Tensor::zeros(device, &dims)?)
            }
            CacheLayout::Hnd => {
                let dims = [blocks, heads, block_size, head_dim];
                (Tensor::zeros(device, &dims)?, Tensor::zeros(device, &dims)?)
            }
        };
        Self::from_tensors(layout, key, value)
    }

    /// A cache of these tensors, of the shapes that the layout asks for; see the [module](self).
    ///
    /// NHD and HND: dense in the last dimension. x-split: dense within a block and head. The strides of the other
    /// dimensions are free, as long as no two elements share memory.
    ///
    /// # Errors
    /// [`Error::Shape`] and [`Error::Stride`]; [`Error::WrongDevice`] if the two are on different devices;
    /// [`Error::Value`] for an empty block (`block_size`, `heads` or `head_dim` 0), one of more than 2^31 - 1 elements,
    /// or, in the x-split layout, a `head_dim` that is no multiple of `x`.
    pub fn from_tensors(layout: CacheLayout, key: Tensor<S>, value: Tensor<S>) -> Result<Self> {
        const OP: &str = "KvCache::from_tensors";
        let x = 16 / size_of::<S>();
        let ks = key.shape();
        let bad_shape =
            |arg, expected: String, got: &[usize]| Error::Shape { op: OP, arg, expected, got: got.to_vec() };
        let shape = match (layout, ks) {
            (CacheLayout::XSplit, &[blocks, heads, parts, block_size, last]) if last == x => {
                CacheShape { blocks, block_size, heads, head_dim: parts * x }
            }
            (CacheLayout::XSplit, _) => {
                return Err(bad_shape("key", format!("[blocks, heads, dim / {x}, block_size, {x}]"), ks));
            }
            (CacheLayout::Nhd, &[blocks, block_size, heads, head_dim])
            | (CacheLayout::Hnd, &[blocks, heads, block_size, head_dim]) => {
                CacheShape { blocks, block_size, heads, head_dim }
            }
            (CacheLayout::Nhd, _) => return Err(bad_shape("key", "[blocks, block_size, heads, dim]".into(), ks)),
            (CacheLayout::Hnd, _) => return Err(bad_shape("key", "[blocks, heads, block_size, dim]".into(), ks)),
        };
        let CacheShape { blocks, block_size, heads, head_dim } = shape;
        let value_shape = match layout {
            CacheLayout::XSplit => vec![blocks, heads, head_dim, block_size],
            _ => ks.to_vec(),
        };
        if value.shape() != value_shape {
            return Err(bad_shape("value", format!("{value_shape:?}"), value.shape()));
        }
        check_block(OP, "key", shape)?;
        if key.device() != value.device() {
            return Err(Error::WrongDevice {
                op: OP,
                arg: "value",
                expected: key.device().name(),
                got: value.device().name(),
            });
        }
        for (arg, t) in [("key", &key), ("value", &value)] {
            let dense_from = if layout == CacheLayout::XSplit { 2 } else { 3 };
            if !is_dense_from(t, dense_from) {
                let expected =
                    if dense_from == 2 { "dense within a block and head" } else { "dense in its last dimension" };
                return Err(Error::Stride { op: OP, arg, expected: expected.into(), got: t.strides().to_vec() });
            }
            if shares_elements(t) {
                let expected = "without elements that share memory".into();
                return Err(Error::Stride { op: OP, arg, expected, got: t.strides().to_vec() });
            }
        }
        let strides = |t: &Tensor<S>, dense: PageStrides| {
            let s = t.strides();
            match layout {
                CacheLayout::XSplit => PageStrides { block: s[0], head: s[1], ..dense },
                CacheLayout::Nhd => PageStrides { block: s[0], head: s[2], token: s[1], ..dense },
                CacheLayout::Hnd => PageStrides { block: s[0], head: s[1], token: s[2], ..dense },
            }
        };
        let key_strides = strides(&key, PageStrides::keys(layout, shape, S::DTYPE));
        let value_strides = strides(&value, PageStrides::values(layout, shape));
        Ok(Self { layout, shape, key, value, key_strides, value_strides })
    }

    /// Whether each block of keys, and of values, is one piece of memory: what whole-block copies need.
    pub fn has_dense_blocks(&self) -> bool {
        is_dense_from(&self.key, 1) && is_dense_from(&self.value, 1)
    }
}

impl<S> KvCache<S> {
    /// Where elements lie.
    pub fn layout(&self) -> CacheLayout {
        self.layout
    }

    /// Extents.
    pub fn shape(&self) -> CacheShape {
        self.shape
    }

    /// The keys.
    pub fn key(&self) -> &Tensor<S> {
        &self.key
    }

    /// The values.
    pub fn value(&self) -> &Tensor<S> {
        &self.value
    }

    /// Where keys lie.
    pub fn key_strides(&self) -> PageStrides {
        self.key_strides
    }

    /// Where values lie.
    pub fn value_strides(&self) -> PageStrides {
        self.value_strides
    }

    /// Keys and values, to write.
    pub(crate) fn tensors_mut(&mut self) -> (&mut Tensor<S>, &mut Tensor<S>) {
        (&mut self.key, &mut self.value)
    }
}

impl<S: CacheElement> std::fmt::Debug for KvCache<S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (layout, dtype, device) = (self.layout, S::DTYPE, self.key.device().name());
        write!(f, "KvCache<{dtype}> {layout:?} {:?} on {device}", self.shape)
    }
}

/// Whether dimensions from `first` on lie one after another without gaps.
pub(super) fn is_dense_from<T>(t: &Tensor<T>, first: usize) -> bool {
    let mut expected = 1;
    for d in (first..t.shape().len()).rev() {
        if t.dim(d) != 1 && t.strides()[d] != expected {
            return false;
        }
        expected *= t.dim(d);
    }
    true
}

/// Checks that a block has elements, and no more than 31 bits count.
fn check_block(op: &'static str, arg: &'static str, shape: CacheShape) -> Result<()> {
    if (1..=i32::MAX as usize).contains(&shape.block_len()) {
        return Ok(());
    }
    Err(Error::Value { op, arg, expected: "of 1 to 2^31 - 1 elements a block".into(), got: format!("{shape:?}") })
}

fn check_x(head_dim: usize, x: usize, arg: &'static str) -> Result<()> {
    if head_dim.is_multiple_of(x) {
        return Ok(());
    }
    Err(Error::Value {
        op: "KvCache",
        arg,
        expected: format!("with a head_dim that is a multiple of {x} in the x-split layout"),
        got: head_dim.to_string(),
    })
}

/// Checks slots that the host knows: each is -1 or within the cache, and none but -1 comes twice.
///
/// The kernels skip slots outside of the cache and count them (see `status` of the operations), and leave open which of
/// several tokens with one slot is stored, because finding them would cost more than the copy. Call this where slots
/// are made if they may be wrong; [`BlockAllocator`](super::BlockAllocator) makes right ones.
///
/// # Errors
/// [`Error::Value`] that names the first wrong slot.
///
/// ```
/// use warploom::kv_cache::{CacheShape, check_slots};
/// let shape = CacheShape::new(2, 16, 1, 64);
/// assert!(check_slots(&[3, -1, 4, -1, 31], shape).is_ok());
/// assert!(check_slots(&[3, 32], shape).is_err());
/// assert!(check_slots(&[3, 4, 3], shape).is_err());
/// ```
pub fn check_slots(slots: &[i64], shape: CacheShape) -> Result<()> {
    let wrong = |expected: String, i: usize| Error::Value {
        op: "check_slots",
        arg: "slots",
        expected,
        got: format!("{} at position {i}", slots[i]),
    };
    let mut seen = std::collections::HashMap::with_capacity(slots.len());
    for (i, &slot) in slots.iter().enumerate().filter(|(_, s)| **s != -1) {
        if slot < 0 || slot as u64 >= shape.slots() as u64 {
            return Err(wrong(format!("-1 or below {}", shape.slots()), i));
        }
        if let Some(first) = seen.insert(slot, i) {
            return Err(wrong(format!("all different (the first at position {first})"), i));
        }
    }
    Ok(())
}

/// Checks block tables that the host knows, `[sequences, max_blocks]`, and lengths, as [`attention::decode`](crate::attention::decode()) takes
/// them: a table has room for the keys of its sequence, names blocks of the cache for all of them, and no other sequence has the block of the
/// last one, which is that of the token just written.
///
/// The kernels take a block outside of the cache for keys that nobody sees, since finding it would cost more. Call this where tables are made
/// if they may be wrong; [`BlockAllocator`](super::BlockAllocator) makes right ones.
///
/// # Errors
/// [`Error::Value`] that names the first sequence that is wrong.
///
/// ```
/// use warploom::kv_cache::{CacheShape, check_tables};
/// let shape = CacheShape::new(8, 16, 1, 64);
/// // 20 and 33 keys with a beginning in common, and a row without a sequence.
/// assert!(check_tables(&[5, 1, -1, 5, 7, 2, -1, -1, -1], &[20, 33, 0], shape).is_ok());
/// assert!(check_tables(&[5, 8, -1], &[20], shape).is_err()); // no block 8
/// assert!(check_tables(&[5, 1, 2], &[49], shape).is_err()); // room for 48 keys
/// assert!(check_tables(&[5, 1, 6, 1], &[20, 20], shape).is_err()); // both write to block 1
/// ```
pub fn check_tables(tables: &[i32], lens: &[i32], shape: CacheShape) -> Result<()> {
    const OP: &str = "check_tables";
    let value = |arg, expected: String, got: String| Err(Error::Value { op: OP, arg, expected, got });
    if shape.block_size == 0 {
        return value("shape", "a cache of blocks that are not empty".into(), "0".into());
    }
    let max_blocks = tables.len().checked_div(lens.len()).unwrap_or(0);
    if tables.len() != max_blocks * lens.len() {
        let expected = format!("as many blocks for each of {} sequences", lens.len());
        return value("tables", expected, tables.len().to_string());
    }
    let used = |i: usize| {
        let blocks = usize::try_from(lens[i]).unwrap_or(0).div_ceil(shape.block_size);
        (blocks <= max_blocks).then(|| &tables[i * max_blocks..][..blocks])
    };
    // How often a block is read.
    let mut readers = std::collections::HashMap::new();
    for (i, &len) in lens.iter().enumerate() {
        let Some(blocks) = used(i) else {
            let room = max_blocks.saturating_mul(shape.block_size);
            return value(
                "lens",
                format!("at most {room}, for which the table has blocks"),
                format!("{len} of sequence {i}"),
            );
        };
        for (place, &block) in blocks.iter().enumerate() {
            if u32::try_from(block).is_ok_and(|block| (block as usize) < shape.blocks) {
                *readers.entry(block).or_insert(0u32) += 1;
                continue;
            }
            let (expected, blocks) = (format!("blocks below {}", shape.blocks), blocks.len());
            return value("tables", expected, format!("{block} in place {place} of the {blocks} of sequence {i}"));
        }
    }
    for (i, last) in (0..lens.len()).filter_map(|i| Some((i, used(i)?.last()?))) {
        if readers[last] > 1 {
            let expected = "such that nobody else has the block that a sequence writes to".into();
            return value("tables", expected, format!("block {last} of sequence {i}, and of another place"));
        }
    }
    Ok(())
}

/// Scales of a quantised cache: a number, or one for each head. What is stored is `value * (1 / scale)`, both in `f32`, rounded to the nearest
/// (ties to even).
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
#[must_use]
pub struct Scales<'a> {
    /// Of the keys: `[1]` or `[heads]`.
    pub key: &'a Tensor<f32>,
    /// Of the values: the same shape.
    pub value: &'a Tensor<f32>,
}

impl<'a> Scales<'a> {
    /// Of the keys and of the values: `[1]` for all heads or `[heads]`.
    pub const fn new(key: &'a Tensor<f32>, value: &'a Tensor<f32>) -> Self {
        Self { key, value }
    }
}

/// Scales checked against the cache: addresses, and whether there is one for each head.
pub(crate) struct CheckedScales {
    pub(crate) key: *const f32,
    pub(crate) value: *const f32,
    pub(crate) per_head: bool,
}

/// Scales must be there for a cache of another type than the operation's, and only then.
pub(crate) fn check_scales(
    call: &mut Call<'_>,
    scales: Option<Scales<'_>>,
    heads: usize,
    dtype: DType,
    cache: DType,
) -> Result<CheckedScales> {
    let Some(scales) = scales else {
        call.value(dtype == cache, "scales", format!("given for a cache of {cache} and tensors of {dtype}"), "none")?;
        return Ok(CheckedScales { key: std::ptr::null(), value: std::ptr::null(), per_head: false });
    };
    call.value(dtype != cache, "scales", format!("absent for a cache of {cache} and tensors of {dtype}"), "given")?;
    let per_head = scales.key.shape() != [1];
    let expected = if per_head { heads } else { 1 };
    for (arg, t) in [("scales.key", scales.key), ("scales.value", scales.value)] {
        if t.shape() != [expected] {
            let what = if per_head {
                format!("[1] or [{heads}], keys and values alike")
            } else {
                "[1], like `scales.key`".into()
            };
            return Err(call.bad_shape(arg, t.shape(), what));
        }
        call.contiguous(arg, t)?;
    }
    Ok(CheckedScales {
        key: call.read("scales.key", scales.key)?.cast(),
        value: call.read("scales.value", scales.value)?.cast(),
        per_head,
    })
}

/// Adds a cache's tensors to those of a call that writes it; their addresses.
pub(crate) fn write_cache<S: CacheElement>(
    call: &mut Call<'_>,
    cache: &mut KvCache<S>,
) -> Result<(*mut std::ffi::c_void, *mut std::ffi::c_void)> {
    let (key, value) = cache.tensors_mut();
    Ok((call.write("cache.key", key)?, call.write("cache.value", value)?))
}
