//! Moves blocks between the cache of a GPU and pinned memory of the host.
//!
//! All layers of all pairs in one call, in the order of the stream, in one of two ways ([`SwapPath`]): by the GPU's copy engines, for which blocks that are neighbours
//! on both sides are one copy, so sequences that were swapped out together cost few; or by a kernel, which reads or writes the host's memory at the rate of the bus, wherever blocks lie.
//! Which of them, the average length of a call's copies decides.

use super::copy_blocks::{CacheLayers, check_pairs};
use super::layout::{CacheElement, CacheLayout, CacheShape};
use crate::device::{Geometry, Pinned, Stream};
use crate::error::{Error, Result};
use crate::kernels::kv_cache::copy_blocks::{PIECE_BYTES, THREADS};
use crate::kernels::kv_cache::swap as kernel;
use crate::tensor::Tensor;
use cuda_std::Entry;
use std::sync::Mutex;

pub use kernel::{Args, MAX_PAIRS, Pairs};

/// How blocks get from the device to the host and back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum SwapPath {
    /// Copy engines, which take nothing from other kernels, but some 2 µs for each run of neighbours in each layer's keys and values.
    CopyEngine,
    /// A kernel, which takes up to 32 blocks of 256 threads for as long as the bus is busy.
    Kernel,
}

/// From so many bytes a copy on, copy engines are as fast as the bus.
const ENGINE_BYTES: usize = 128 << 10;

/// Neighbouring blocks that are copied to neighbouring blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// First block read.
    pub from: usize,
    /// First block written.
    pub to: usize,
    /// Blocks.
    pub len: usize,
}

/// Runs that make up these pairs `(from, to)`: the fewest, where no block is read twice.
///
/// ```
/// use warploom::kv_cache::swap::{Run, runs};
/// assert_eq!(runs(&[(7, 1), (3, 5), (8, 2)]), [Run { from: 3, to: 5, len: 1 }, Run { from: 7, to: 1, len: 2 }]);
/// ```
pub fn runs(pairs: &[(usize, usize)]) -> Vec<Run> {
    let mut pairs = pairs.to_vec();
    pairs.sort_unstable();
    let mut runs: Vec<Run> = vec![];
    for (from, to) in pairs {
        match runs.last_mut() {
            Some(r) if from - r.from == r.len && to.checked_sub(r.to) == Some(r.len) => r.len += 1,
            _ => runs.push(Run { from, to, len: 1 }),
        }
    }
    runs
}

/// Blocks in pinned memory of the host, for as many layers as a [`CacheLayers`] has, in the same layout.
///
/// Dropping it waits for the copies that use it.
pub struct HostCache<S: CacheElement> {
    /// Keys and values, layer by layer.
    memory: Vec<Pinned<S>>,
    /// Addresses of `memory`, so that no reference to it is made while copies are under way.
    addresses: Vec<*mut S>,
    /// The same, for kernels.
    on_device: Tensor<u64>,
    path: Option<SwapPath>,
    shape: CacheShape,
    layout: CacheLayout,
    /// Where copies were submitted since the last wait.
    pending: Mutex<Vec<Stream>>,
}

impl<S: CacheElement> std::fmt::Debug for HostCache<S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let layers = self.addresses.len() / 2;
        f.debug_struct("HostCache").field("layers", &layers).field("shape", &self.shape).finish_non_exhaustive()
    }
}

// SAFETY: the addresses are those of memory that the value owns; it is read only behind `wait`.
unsafe impl<S: CacheElement> Send for HostCache<S> {}
// SAFETY: as above; copies are submitted through `&mut` or to the device only.
unsafe impl<S: CacheElement> Sync for HostCache<S> {}

impl<S: CacheElement> HostCache<S> {
    /// `blocks` blocks of zeros for each layer of `caches`. Caches of another device may use it, too, by [`SwapPath::CopyEngine`].
    ///
    /// # Errors
    /// [`Error::Value`] for more blocks than memory can hold, and those of [`Pinned::zeros`].
    pub fn zeros(caches: &CacheLayers<S>, blocks: usize) -> Result<Self> {
        let device = caches.layers()[0].key().device();
        let shape = CacheShape { blocks, ..caches.shape() };
        let len = blocks.checked_mul(shape.block_len()).ok_or_else(|| Error::Value {
            op: "HostCache::zeros",
            arg: "blocks",
            expected: format!("as many blocks of {} elements as memory can hold", shape.block_len()),
            got: blocks.to_string(),
        })?;
        let new = |_| Pinned::<S>::zeros(device, len);
        let mut memory = (0..2 * caches.layers().len()).map(new).collect::<Result<Vec<_>>>()?;
        let addresses: Vec<_> = memory.iter_mut().map(|m| m.as_mut_ptr()).collect();
        let words: Vec<_> = addresses.iter().map(|a| *a as u64).collect();
        let on_device = Tensor::from_slice(device, &words, &[words.len()])?;
        let layout = caches.layout();
        Ok(Self { memory, addresses, on_device, path: None, shape, layout, pending: Mutex::default() })
    }

    /// Which way blocks go from now on. `None`, as at first: by [`SwapPath::CopyEngine`] if there are 128 KiB or more a copy on average, if what is
    /// copied is not aligned to 16 bytes, or if the caches are on another device than those this was made for; otherwise by [`SwapPath::Kernel`].
    pub fn set_path(&mut self, path: Option<SwapPath>) {
        self.path = path;
    }

    /// Extents of each layer.
    pub fn shape(&self) -> CacheShape {
        self.shape
    }

    /// Layers.
    pub fn layers(&self) -> usize {
        self.memory.len() / 2
    }

    /// Keys and values of a block, in the cache's layout, after all copies are done.
    ///
    /// # Errors
    /// [`Error::Value`] if there is no such layer or block; those of [`wait`](Self::wait).
    pub fn block(&self, layer: usize, block: usize) -> Result<(&[S], &[S])> {
        if layer >= self.layers() || block >= self.shape.blocks {
            return Err(Error::Value {
                op: "HostCache::block",
                arg: "block",
                expected: format!("one of {} in one of {} layers", self.shape.blocks, self.layers()),
                got: format!("{block} in layer {layer}"),
            });
        }
        self.wait()?;
        let n = self.shape.block_len();
        let of = |m: &'_ Pinned<S>| -> *const [S] { &raw const m[block * n..][..n] };
        // SAFETY: no copy is under way, and the borrow of `self` keeps `swap_out` from submitting one.
        Ok(unsafe { (&*of(&self.memory[2 * layer]), &*of(&self.memory[2 * layer + 1])) })
    }

    /// Waits for all copies from and to this memory.
    ///
    /// # Errors
    /// [`Error::Driver`] if one failed; [`Error::Capture`] while a stream that they were submitted to is captured.
    pub fn wait(&self) -> Result<()> {
        // Whoever asks meanwhile waits as well, and a stream that could not be waited for stays.
        let mut pending = self.pending.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        while let Some(stream) = pending.last() {
            stream.synchronize()?;
            pending.pop();
        }
        Ok(())
    }

    /// Submits the copies for `pairs` of (device, host) blocks.
    fn copy(
        &self,
        op: &'static str,
        stream: &Stream,
        caches: &CacheLayers<S>,
        pairs: &[(usize, usize)],
        out: bool,
    ) -> Result<()> {
        let (shape, layout) = (caches.shape(), caches.layout());
        let same = CacheShape { blocks: shape.blocks, ..self.shape } == shape && self.layout == layout;
        if !same || self.layers() != caches.layers().len() {
            return Err(Error::Value {
                op,
                arg: "host",
                expected: format!("{} layers of {layout:?} blocks as in {shape:?}", caches.layers().len()),
                got: format!("{} layers of {:?} {:?}", self.layers(), self.layout, self.shape),
            });
        }
        if stream.device() != caches.layers()[0].key().device() {
            let got = caches.layers()[0].key().device().name();
            return Err(Error::WrongDevice { op, arg: "caches", expected: stream.device().name(), got });
        }
        let _using = stream.using();
        if stream.is_capturing() {
            return Err(Error::Capture(format!("{op}: a graph could outlive the host's memory; capture swap::launch")));
        }
        let (from, to) = if out { (shape.blocks, self.shape.blocks) } else { (self.shape.blocks, shape.blocks) };
        check_pairs(pairs, from, to, false).map_err(|e| match e {
            Error::Value { arg, expected, got, .. } => Error::Value { op, arg, expected, got },
            other => other,
        })?;
        // Held until all copies are submitted.
        let tensors = || caches.layers().iter().flat_map(|layer| [layer.key(), layer.value()]);
        let held = tensors().map(|t| stream.hold(op, "caches", t, !out));
        let _held = held.filter_map(Result::transpose).collect::<Result<Vec<_>>>()?;
        let runs = if caches.block_stride() == shape.block_len() {
            runs(pairs)
        } else {
            pairs.iter().map(|&(from, to)| Run { from, to, len: 1 }).collect()
        };
        // The kernel reads where the host's blocks are in memory of the device that they were made for.
        let home = self.on_device.device();
        let path = self.path.unwrap_or_else(|| {
            let together = pairs.len() * shape.block_len() * size_of::<S>() / runs.len().max(1);
            let addresses = tensors().map(|t| t.as_ptr() as usize).chain(self.addresses.iter().map(|a| *a as usize));
            let strides = [caches.block_stride(), shape.block_len()].map(|s| s * size_of::<S>());
            let aligned = addresses.chain(strides).all(|n| n.is_multiple_of(16));
            let at_home = home == stream.device();
            if together < ENGINE_BYTES && aligned && at_home { SwapPath::Kernel } else { SwapPath::CopyEngine }
        });
        if path == SwapPath::Kernel && home != stream.device() {
            return Err(Error::WrongDevice { op, arg: "host", expected: stream.device().name(), got: home.name() });
        }
        // Locked until all copies are submitted: `wait` would forget a stream that has none yet.
        let mut pending = self.pending.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if !pending.iter().any(|s| s.as_raw() == stream.as_raw() && s.device() == stream.device()) {
            pending.push(stream.clone());
        }
        let submitted = match path {
            SwapPath::CopyEngine => self.copy_runs(stream, caches, &runs, out),
            SwapPath::Kernel => self.launch(op, stream, caches, pairs, out),
        };
        drop(pending);
        submitted
    }

    fn copy_runs(&self, stream: &Stream, caches: &CacheLayers<S>, runs: &[Run], out: bool) -> Result<()> {
        let block_len = self.shape.block_len();
        let tensors = caches.layers().iter().flat_map(|layer| [layer.key(), layer.value()]);
        for (tensor, &host) in tensors.zip(&self.addresses) {
            for run in runs {
                let bytes = run.len * block_len * size_of::<S>();
                let (on_device, on_host) = if out { (run.from, run.to) } else { (run.to, run.from) };
                let device = tensor.as_ptr().wrapping_add(on_device * caches.block_stride()).cast_mut().cast::<u8>();
                let host = host.wrapping_add(on_host * block_len).cast::<u8>();
                let (dst, src) = if out { (host, device) } else { (device, host) };
                // SAFETY: both ranges were checked to be in bounds. The device's lives until its copies are done, as all
                // tensors do; the host's because dropping it waits.
                unsafe { stream.copy_raw(dst, src, bytes)? };
            }
        }
        Ok(())
    }

    fn launch(
        &self,
        op: &'static str,
        stream: &Stream,
        caches: &CacheLayers<S>,
        pairs: &[(usize, usize)],
        out: bool,
    ) -> Result<()> {
        let block_bytes = self.shape.block_len() * size_of::<S>();
        let (device, host) = (caches.addresses(), &self.on_device);
        let _held = (stream.hold(op, "caches", device, false)?, stream.hold(op, "host", host, false)?);
        let device = (device.as_ptr(), caches.block_stride() * size_of::<S>());
        let host = (host.as_ptr(), block_bytes);
        let ((from, from_stride), (to, to_stride)) = if out { (device, host) } else { (host, device) };
        for pairs in pairs.chunks(MAX_PAIRS) {
            let narrow = |&(from, to): &(usize, usize)| Some((u32::try_from(from).ok()?, u32::try_from(to).ok()?));
            let narrow = pairs.iter().map(narrow).collect::<Option<Vec<_>>>().and_then(|p| Pairs::new(&p));
            let pairs = narrow.filter(|_| block_bytes.div_ceil(PIECE_BYTES) <= u32::MAX as usize / MAX_PAIRS);
            let pairs = pairs.ok_or_else(|| Error::Value {
                op,
                arg: "path",
                expected: "SwapPath::CopyEngine for caches of more than 2^32 blocks, or blocks of more than 2^36 bytes"
                    .into(),
                got: format!("SwapPath::Kernel for {} blocks of {block_bytes} bytes", caches.shape().blocks),
            })?;
            let tensors = self.addresses.len() as u32;
            let args = Args { from, to, tensors, block_bytes, from_stride, to_stride, pairs };
            // SAFETY: addresses, extents and strides are those of live tensors on the stream's device and of the host's memory, which lives until
            // then because dropping it waits; the pairs were checked.
            unsafe { launch(stream, &args)? };
        }
        Ok(())
    }
}

/// The entry: one for all element types and both directions, since it copies bytes.
pub const fn entry() -> Entry<Args> {
    kernel::swap_blocks_bytes::ENTRY
}

/// How to launch it for as many pairs and tensors (two a layer).
pub const fn geometry(pairs: u32, tensors: u32, block_bytes: usize) -> Geometry {
    let items = (pairs as u64 * tensors as u64).saturating_mul(block_bytes.div_ceil(PIECE_BYTES) as u64);
    let blocks = if items < kernel::BLOCKS as u64 { items as u32 } else { kernel::BLOCKS };
    Geometry::new([blocks, 1, 1], [THREADS, 1, 1]).dependent()
}

/// Launches on raw pointers (layer L1), as [`Args`] says: in a stream or a graph, for caches and memory of your own.
///
/// # Errors
/// Those of [`Stream::launch`].
///
/// # Safety
/// `args.from` and `args.to` hold the addresses of `args.tensors` tensors each, of device memory or of pinned memory, which have the blocks that
/// the pairs name; none of them is written twice, or read and written. All of it lives until the launch, or the graph that captures it, is done.
/// A block has fewer than 2^32 / [`MAX_PAIRS`] pieces of 16 KiB.
pub unsafe fn launch(stream: &Stream, args: &Args) -> Result<()> {
    // SAFETY: forwarded to the caller.
    unsafe { stream.launch(&entry(), &geometry(args.pairs.count(), args.tensors, args.block_bytes), args) }
}

impl<S: CacheElement> Drop for HostCache<S> {
    fn drop(&mut self) {
        // A failed copy is reported by whoever waits for the stream. One that is captured by now is waited for with its device.
        while self.wait().is_err() {
            let stream = self.pending.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner).pop();
            let _ = stream.map(|s| s.device().synchronize());
        }
    }
}

/// Copies blocks of the device to the host: for each pair `(from, to)` the device's block `from` to the host's block `to`,
/// in all layers.
///
/// In the order of the stream; nothing waits. What the device's blocks are used for next must come later in the same
/// stream, or wait for an event of it.
///
/// # Errors
/// [`Value`](Error::Value) for blocks out of range, a block that is written twice, or a host cache made for others;
/// [`WrongDevice`](Error::WrongDevice), [`Capture`](Error::Capture), [`Driver`](Error::Driver).
pub fn swap_out<S: CacheElement>(
    stream: &Stream,
    host: &mut HostCache<S>,
    caches: &CacheLayers<S>,
    pairs: &[(usize, usize)],
) -> Result<()> {
    host.copy("swap_out", stream, caches, pairs, true)
}

/// Copies blocks of the host to the device: for each pair `(from, to)` the host's block `from` to the device's block `to`,
/// in all layers; otherwise as [`swap_out`].
///
/// # Errors
/// As for [`swap_out`].
pub fn swap_in<S: CacheElement>(
    stream: &Stream,
    caches: &mut CacheLayers<S>,
    host: &HostCache<S>,
    pairs: &[(usize, usize)],
) -> Result<()> {
    host.copy("swap_in", stream, caches, pairs, false)
}
