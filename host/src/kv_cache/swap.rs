//! Moves blocks between the cache of a GPU and pinned memory of the host.
//!
//! All layers of all pairs in one call, in the order of the stream, by the GPU's copy engines. Blocks that are neighbours
//! on both sides go as one copy, so sequences that were swapped out together cost few.

use super::copy_blocks::{CacheLayers, check_pairs};
use super::layout::{CacheElement, CacheLayout, CacheShape};
use crate::device::{Pinned, Stream};
use crate::error::{Error, Result};
use std::sync::Mutex;

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

/// The fewest runs that make up these pairs `(from, to)`.
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
    /// `blocks` blocks of zeros for each layer of `caches`.
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
        let addresses = memory.iter_mut().map(|m| m.as_mut_ptr()).collect();
        Ok(Self { memory, addresses, shape, layout: caches.layout(), pending: Mutex::default() })
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
            return Err(Error::Capture(format!("{op}: a graph could outlive the host's memory; capture copy_raw")));
        }
        let (from, to) = if out { (shape.blocks, self.shape.blocks) } else { (self.shape.blocks, shape.blocks) };
        check_pairs(pairs, from, to, false)?;
        // Held until all copies are submitted.
        let tensors = || caches.layers().iter().flat_map(|layer| [layer.key(), layer.value()]);
        let held = tensors().map(|t| stream.hold(op, "caches", t, !out));
        let _held = held.filter_map(Result::transpose).collect::<Result<Vec<_>>>()?;
        let runs = if caches.block_stride() == shape.block_len() {
            runs(pairs)
        } else {
            pairs.iter().map(|&(from, to)| Run { from, to, len: 1 }).collect()
        };
        {
            let mut pending = self.pending.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            if !pending.iter().any(|s| s.as_raw() == stream.as_raw() && s.device() == stream.device()) {
                pending.push(stream.clone());
            }
        }
        for (tensor, &host) in tensors().zip(&self.addresses) {
            for run in &runs {
                let bytes = run.len * shape.block_len() * size_of::<S>();
                let (on_device, on_host) = if out { (run.from, run.to) } else { (run.to, run.from) };
                let device = tensor.as_ptr().wrapping_add(on_device * caches.block_stride()).cast_mut().cast::<u8>();
                let host = host.wrapping_add(on_host * shape.block_len()).cast::<u8>();
                let (dst, src) = if out { (host, device) } else { (device, host) };
                // SAFETY: both ranges were checked to be in bounds. The device's lives until its copies are done, as all
                // tensors do; the host's because dropping it waits.
                unsafe { stream.copy_raw(dst, src, bytes)? };
            }
        }
        Ok(())
    }
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
