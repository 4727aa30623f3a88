//! Copies whole blocks of a cache, of all layers in one launch: what copy-on-write needs.
//!
//! For each pair `(from, to)` and each layer: `key[to] = key[from]` and `value[to] = value[from]`. After vLLM's
//! `copy_blocks`.

use super::layout::{CacheElement, CacheLayout, CacheShape, KvCache, is_dense_from};
use super::reshape_and_cache::status_word;
use crate::check::{Call, in_one_place};
use crate::device::{Device, Geometry, Stream};
use crate::error::{Error, Result};
use crate::kernels::kv_cache::copy_blocks as kernel;
use crate::tensor::Tensor;
use cuda_std::Entry;

pub use kernel::Args;

/// The caches of all layers of a model, alike in everything but their memory.
pub struct CacheLayers<S> {
    layers: Vec<KvCache<S>>,
    /// Addresses of keys and values, layer by layer.
    addresses: Tensor<u64>,
    /// From block to block, in elements.
    block_stride: usize,
}

/// The tensors of all layers are a dimension of a grid.
fn too_many_layers(layers: usize) -> Result<()> {
    if layers <= 32767 {
        return Ok(());
    }
    let (expected, got) = ("at most 32767 layers".into(), layers.to_string());
    Err(Error::Value { op: "CacheLayers::new", arg: "layers", expected, got })
}

impl<S: CacheElement> std::fmt::Debug for CacheLayers<S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CacheLayers").field("layers", &self.layers).finish_non_exhaustive()
    }
}

impl<S: CacheElement> CacheLayers<S> {
    /// New dense caches of zeros.
    ///
    /// # Errors
    /// As for [`new`](Self::new) and [`KvCache::zeros`].
    pub fn zeros(device: &Device, layers: usize, layout: CacheLayout, shape: CacheShape) -> Result<Self> {
        too_many_layers(layers)?;
        let layers = (0..layers).map(|_| KvCache::zeros(device, layout, shape)).collect::<Result<_>>()?;
        Self::new(layers)
    }

    /// From the layers' caches, which must have one layout, shape and device, and blocks that are each one piece of
    /// memory, at one distance.
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::Stride`], [`Error::WrongDevice`]; [`Error::Value`] for different layouts, no layers, or keys and values
    /// that have memory in common;
    /// those of [`Tensor::from_slice`].
    pub fn new(layers: Vec<KvCache<S>>) -> Result<Self> {
        const OP: &str = "CacheLayers::new";
        let value =
            |expected: &str, got: String| Error::Value { op: OP, arg: "layers", expected: expected.into(), got };
        let Some(first) = layers.first() else {
            return Err(value("not empty", "0 layers".into()));
        };
        too_many_layers(layers.len())?;
        let device = first.key().device();
        let block_stride = first.key_strides().block;
        for (i, layer) in layers.iter().enumerate() {
            if layer.layout() != first.layout() {
                return Err(value(&format!("all {:?}", first.layout()), format!("{:?} in layer {i}", layer.layout())));
            }
            if layer.shape() != first.shape() {
                let (expected, got) = (format!("{:?}", first.key().shape()), layer.key().shape().to_vec());
                return Err(Error::Shape { op: OP, arg: "layers", expected, got });
            }
            if layer.key().device() != device {
                let (expected, got) = (device.name(), layer.key().device().name());
                return Err(Error::WrongDevice { op: OP, arg: "layers", expected, got });
            }
            let stride = |s: usize| s == block_stride || first.shape().blocks == 1;
            let keys = ("keys", layer.key(), layer.key_strides().block);
            let values = ("values", layer.value(), layer.value_strides().block);
            for (what, tensor, apart) in [keys, values] {
                if !is_dense_from(tensor, 1) || !stride(apart) {
                    let expected = format!(
                        "dense in each block, and {block_stride} elements from block to block ({what} of layer {i} are not)"
                    );
                    return Err(Error::Stride { op: OP, arg: "layers", expected, got: tensor.strides().to_vec() });
                }
            }
        }
        let tensors = layers.iter().flat_map(|layer| [layer.key(), layer.value()]);
        if let Some((a, b)) = in_one_place(tensors) {
            let got = format!("some of layer {} in that of layer {}", b / 2, a / 2);
            return Err(value("keys and values in memory of their own", got));
        }
        let addresses: Vec<u64> =
            layers.iter().flat_map(|l| [l.key().as_ptr() as u64, l.value().as_ptr() as u64]).collect();
        // Kernels follow them: nobody may write others, through a clone either.
        let addresses = Tensor::from_slice(device, &addresses, &[layers.len(), 2])?.read_only()?;
        Ok(Self { layers, addresses, block_stride })
    }

    /// The layers.
    pub fn layers(&self) -> &[KvCache<S>] {
        &self.layers
    }

    /// A layer, to write: it shares the memory, and cannot be exchanged for another, which the addresses on the device would not
    /// follow.
    pub fn layer_mut(&mut self, layer: usize) -> Option<KvCache<S>> {
        self.layers.get(layer).cloned()
    }

    /// Extents of each layer.
    pub fn shape(&self) -> CacheShape {
        self.layers[0].shape()
    }

    /// Layout of each layer.
    pub fn layout(&self) -> CacheLayout {
        self.layers[0].layout()
    }

    /// From block to block, in elements, in keys and values alike.
    pub fn block_stride(&self) -> usize {
        self.block_stride
    }

    /// Addresses of keys and values, layer by layer: `[layers, 2]`, on the device. What [`launch`] takes, and that of `swap`.
    pub fn addresses(&self) -> &Tensor<u64> {
        &self.addresses
    }
}

/// The entry: one for all element types, since it copies bytes.
pub const fn entry() -> Entry<Args> {
    kernel::copy_blocks_bytes::ENTRY
}

/// How to launch it for as many pairs and tensors (two a layer).
pub const fn geometry(pairs: u32, tensors: u32, block_bytes: usize) -> Geometry {
    let pieces = block_bytes.div_ceil(kernel::PIECE_BYTES);
    // More than a launch takes, and not fewer.
    let pieces = if pieces > u32::MAX as usize { u32::MAX } else { pieces as u32 };
    Geometry::new([pairs, tensors, pieces], [kernel::THREADS, 1, 1]).dependent()
}

/// Launches on raw pointers (layer L1), as [`Args`] says.
///
/// # Errors
/// Those of [`Stream::launch`].
///
/// # Safety
/// `args.tensors` holds the addresses of `tensors` tensors of `args.blocks` blocks, `args.pairs` `pairs` pairs; all of it
/// is device memory until the launch is done.
pub unsafe fn launch(stream: &Stream, pairs: u32, tensors: u32, args: &Args) -> Result<()> {
    // SAFETY: forwarded to the caller.
    unsafe { stream.launch(&entry(), &geometry(pairs, tensors, args.block_bytes), args) }
}

/// Copies block `from` to block `to` in the keys and values of all layers, for each pair `(from, to)`.
///
/// `pairs` is `[n, 2]`, dense, on the device, so that the launch can be captured; [`check_pairs`] checks them on the
/// host. Pairs with a block outside of the cache are skipped and counted in `status` (`[1]`). The pairs are copied at
/// the same time: a block that one pair writes and another one reads or writes has unspecified contents afterwards. (A SIMT device that
/// looks for data races reports one there: [`Launch`](Error::Launch).)
///
/// # Errors
/// [`Shape`](Error::Shape), [`Stride`](Error::Stride), [`WrongDevice`](Error::WrongDevice), [`Overlap`](Error::Overlap);
/// [`Value`](Error::Value) for blocks that are too large for a launch.
pub fn copy_blocks<S: CacheElement>(
    stream: &Stream,
    caches: &mut CacheLayers<S>,
    status: Option<&mut Tensor<u32>>,
    pairs: &Tensor<i64>,
) -> Result<()> {
    let mut call = Call::new("copy_blocks", stream);
    let &[n, 2] = pairs.shape() else {
        return Err(call.bad_shape("pairs", pairs.shape(), "[n, 2]"));
    };
    call.contiguous("pairs", pairs)?;
    let shape = caches.shape();
    let args = Args {
        tensors: call.read("caches", &caches.addresses)?.cast(),
        pairs: call.read("pairs", pairs)?.cast(),
        status: status_word(&mut call, status)?,
        block_bytes: shape.block_len() * size_of::<S>(),
        block_stride: caches.block_stride * size_of::<S>(),
        blocks: shape.blocks,
    };
    call.check_overlap()?;
    let (n, tensors) = (call.count("pairs", n)?, 2 * caches.layers.len() as u32);
    for layer in &caches.layers {
        for tensor in [layer.key(), layer.value()] {
            call.check_apart("caches", tensor)?;
            call.keep("caches", tensor, true)?;
        }
    }
    call.grid("caches", &geometry(n, tensors, args.block_bytes))?;
    // SAFETY: addresses, extents and strides are those of live tensors on the stream's device; the kernel checks pairs.
    unsafe { launch(stream, n, tensors, &args) }
}

/// Checks pairs that the host knows: within caches of these many blocks, and no block written that another pair writes
/// or reads.
///
/// # Errors
/// [`Error::Value`] that names the first wrong pair.
pub fn check_pairs(pairs: &[(usize, usize)], from_blocks: usize, to_blocks: usize, within_one: bool) -> Result<()> {
    let wrong = |expected: String, i: usize| Error::Value {
        op: "check_pairs",
        arg: "pairs",
        expected,
        got: format!("{:?} at position {i}", pairs[i]),
    };
    let read: std::collections::HashSet<usize> = pairs.iter().map(|p| p.0).collect();
    let mut written = std::collections::HashSet::with_capacity(pairs.len());
    for (i, &(from, to)) in pairs.iter().enumerate() {
        if from >= from_blocks || to >= to_blocks {
            return Err(wrong(format!("from below {from_blocks} and to below {to_blocks}"), i));
        }
        if !written.insert(to) {
            return Err(wrong("to different blocks".into(), i));
        }
        if within_one && read.contains(&to) {
            return Err(wrong("to blocks that no pair reads".into(), i));
        }
    }
    Ok(())
}
