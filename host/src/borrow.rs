//! Tensors over memory that somebody else owns, for as long as a closure runs.
//!
//! [`scope`] lends memory to tensors: host memory to the SIMT device ([`Scope::slice`]), or any device memory by its address
//! ([`Scope::raw`]). The tensors are ordinary [`Tensor`]s, so every operation takes them, and nothing is copied. As with
//! [`std::thread::scope`], what is lent outlives the scope. A tensor may be cloned and moved away all the same; when the
//! scope ends, its *lease* does, and whoever uses it afterwards gets [`Error::Expired`].
//!
//! ```
//! use warploom::{Device, Stream, borrow, norm};
//!
//! let (x, mut y) = (vec![3.0f32, 4.0], vec![0.0; 2]);
//! let stream = Stream::new(&Device::simt())?;
//! borrow::scope(&stream, |s| norm::rms_norm(&stream, &mut s.slice_mut(&mut y, &[1, 2])?, &s.slice(&x, &[1, 2])?, None, 0.0))?;
//! assert_eq!(y.iter().map(|v| v * v).sum::<f32>().round(), 2.0);
//! # Ok::<(), warploom::Error>(())
//! ```
//!
//! Memory that does not outlive the scope, or is lent twice, one of them to be written, does not compile:
//!
//! ```compile_fail,E0597
//! # use warploom::{Device, Stream, borrow};
//! # let stream = Stream::new(&Device::simt())?;
//! borrow::scope(&stream, |s| {
//!     let short_lived = vec![0.0f32; 4];
//!     s.slice(&short_lived, &[4]).map(drop)
//! })?;
//! # Ok::<(), warploom::Error>(())
//! ```
//! ```compile_fail,E0499
//! # use warploom::{Device, Stream, borrow};
//! # let stream = Stream::new(&Device::simt())?;
//! let mut x = vec![0.0f32; 4];
//! borrow::scope(&stream, |s| s.slice_mut(&mut x, &[4]).and(s.slice_mut(&mut x, &[2, 2])).map(drop))?;
//! # Ok::<(), warploom::Error>(())
//! ```
//!
//! **Leases.** All tensors of a scope share one. An operation holds it from its checks to the end of the launch, and the end of
//! the scope waits for that, so no thread can launch anything once the scope has ended. Work that was launched may still run
//! then: it is in the scope's stream, and the tensors are taken on no other ([`Error::WrongStream`]), so whoever owns
//! the memory need only order what comes next after that stream. Graphs may outlive a scope, so
//! [`Graph::capture`](crate::Graph::capture) refuses the tensors; a capture by the stream's owner takes them, as
//! it takes raw pointers.

use crate::device::{Device, Foreign, Storage, Stream};
use crate::error::{Error, Result};
use crate::tensor::{Tensor, wrong_number};
use cuda_std::Element;
use std::cell::RefCell;
use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// While borrowed memory may be used, and on which stream.
pub(crate) struct Lease {
    /// The [stream's](Stream::identity).
    stream: usize,
    /// Twice the number of holds, plus 1 once the lease has ended.
    state: AtomicUsize,
}

const ENDED: usize = 1;
const HOLD: usize = 2;

impl Lease {
    /// Keeps the lease from ending, unless it has.
    pub(crate) fn hold(self: &Arc<Self>) -> Option<Hold> {
        // Acquire: what was done before the last end of another hold has happened.
        if self.state.fetch_add(HOLD, Ordering::Acquire) & ENDED != 0 {
            self.state.fetch_sub(HOLD, Ordering::Release);
            return None;
        }
        Some(Hold(self.clone()))
    }

    /// Whether the memory may be used on this stream.
    pub(crate) fn is_for(&self, stream: &Stream) -> bool {
        self.stream == stream.identity()
    }

    /// Ends the lease once nobody holds it.
    fn end(&self) {
        let mut state = self.state.fetch_or(ENDED, Ordering::AcqRel) | ENDED;
        while state != ENDED {
            std::thread::yield_now();
            state = self.state.load(Ordering::Acquire);
        }
    }
}

/// Keeps a [`Lease`] from ending.
pub(crate) struct Hold(Arc<Lease>);

impl Drop for Hold {
    fn drop(&mut self) {
        self.0.state.fetch_sub(HOLD, Ordering::Release);
    }
}

/// Where memory is lent to tensors; [`scope`] makes one.
pub struct Scope<'env> {
    stream: Stream,
    lease: Arc<Lease>,
    /// Dropped when the lease has ended. What is lent must live as long as these may, and not be lent twice.
    guards: RefCell<Vec<Box<dyn Guard + 'env>>>,
    env: PhantomData<&'env mut &'env ()>,
}

impl std::fmt::Debug for Scope<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Scope").field("stream", &self.stream).finish_non_exhaustive()
    }
}

/// Whatever has a destructor.
pub(crate) trait Guard {}
impl<T> Guard for T {}

/// Runs `f` with a [`Scope`] in which memory that outlives it can be lent to tensors, for work on `stream`.
pub fn scope<'env, R>(stream: &Stream, f: impl FnOnce(&Scope<'env>) -> R) -> R {
    f(&Scope::new(stream))
}

impl<'env> Scope<'env> {
    pub(crate) fn new(stream: &Stream) -> Self {
        let lease = Lease { stream: stream.identity(), state: AtomicUsize::new(0) };
        Self { stream: stream.clone(), lease: Arc::new(lease), guards: RefCell::default(), env: PhantomData }
    }

    /// The stream that the tensors may be used on.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// The stream's device.
    pub fn device(&self) -> &Device {
        self.stream.device()
    }

    /// Host memory as a dense tensor of the SIMT device, to read.
    ///
    /// # Errors
    /// [`Error::Tensor`] if `shape` is not that of so many elements, [`Error::Unsupported`] on a GPU.
    pub fn slice<T: Element>(&self, data: &'env [T], shape: &[usize]) -> Result<Tensor<T>> {
        self.host("Scope::slice", data.len(), shape)?;
        // SAFETY: borrowed for longer than the lease lasts, and nothing writes to it.
        unsafe { self.raw(data.as_ptr(), shape, None) }
    }

    /// Host memory as a dense tensor of the SIMT device, to read and to write.
    ///
    /// # Errors
    /// As for [`slice`](Self::slice).
    pub fn slice_mut<T: Element>(&self, data: &'env mut [T], shape: &[usize]) -> Result<Tensor<T>> {
        self.host("Scope::slice_mut", data.len(), shape)?;
        // SAFETY: borrowed for longer than the lease lasts, and nobody else uses it.
        unsafe { self.raw_mut(data.as_mut_ptr(), shape, None) }
    }

    fn host(&self, op: &'static str, len: usize, shape: &[usize]) -> Result<()> {
        if !self.device().is_simt() {
            let what = format!("host memory cannot be lent to {}", self.device().name());
            return Err(Error::Unsupported { op, what });
        }
        holds(len, shape)
    }

    /// Device memory at an address as a tensor, to read. Without `strides` it is dense.
    ///
    /// # Errors
    /// [`Error::Alignment`]; [`Error::Tensor`] for a null pointer, too many dimensions, or strides that do not fit the shape.
    ///
    /// # Safety
    /// The elements are memory of the scope's device, on the SIMT device initialised, and nothing writes to them, from now until all
    /// work that is submitted to the scope's stream before the scope ends is done.
    pub unsafe fn raw<T: Element>(
        &self,
        data: *const T,
        shape: &[usize],
        strides: Option<&[usize]>,
    ) -> Result<Tensor<T>> {
        // SAFETY: forwarded to the caller.
        unsafe { self.tensor(data.cast_mut(), shape, strides, true) }
    }

    /// Device memory at an address as a tensor, to read and to write. Without `strides` it is dense.
    ///
    /// # Errors
    /// As for [`raw`](Self::raw).
    ///
    /// # Safety
    /// As for [`raw`](Self::raw); besides, nothing reads the elements meanwhile.
    pub unsafe fn raw_mut<T: Element>(
        &self,
        data: *mut T,
        shape: &[usize],
        strides: Option<&[usize]>,
    ) -> Result<Tensor<T>> {
        // SAFETY: forwarded to the caller.
        unsafe { self.tensor(data, shape, strides, false) }
    }

    unsafe fn tensor<T: Element>(
        &self,
        data: *mut T,
        shape: &[usize],
        strides: Option<&[usize]>,
        read_only: bool,
    ) -> Result<Tensor<T>> {
        let whose = (if read_only { "Scope::raw" } else { "Scope::raw_mut" }, "data");
        Tensor::over(whose, data, shape, strides, |address, bytes| {
            let foreign = Foreign { address, bytes, read_only, owner: None, lease: Some(self.lease.clone()) };
            // SAFETY: promised by the caller for as long as the lease lasts.
            unsafe { Storage::foreign(self.device(), foreign) }
        })
    }

    /// Drops `guard` when the scope ends.
    #[cfg_attr(not(feature = "cudarc"), expect(dead_code, reason = "cudarc's guards are what there is"))]
    pub(crate) fn keep(&self, guard: impl Guard + 'env) {
        self.guards.borrow_mut().push(Box::new(guard));
    }
}

impl Drop for Scope<'_> {
    fn drop(&mut self) {
        self.lease.end();
        self.guards.get_mut().clear();
    }
}

/// `shape` is that of `len` elements.
pub(crate) fn holds(len: usize, shape: &[usize]) -> Result<()> {
    if shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d)) == Some(len) {
        return Ok(());
    }
    Err(wrong_number(len, shape))
}

impl Stream {
    /// Checks that `op` may read, or write, the memory of a tensor on this stream; what keeps it from going away meanwhile if it is
    /// borrowed.
    pub(crate) fn hold<T>(
        &self,
        op: &'static str,
        arg: &'static str,
        tensor: &Tensor<T>,
        written: bool,
    ) -> Result<Option<Hold>> {
        let storage = tensor.storage();
        if written && storage.read_only() {
            return Err(Error::ReadOnly { op, arg });
        }
        let Some(lease) = storage.lease() else { return Ok(None) };
        if !lease.is_for(self) {
            return Err(Error::WrongStream { op, arg });
        }
        if self.is_capturing() {
            return Err(Error::Capture(format!(
                "{op}: the memory of `{arg}` is borrowed, which a graph could outlive"
            )));
        }
        lease.hold().map(Some).ok_or(Error::Expired { op, arg })
    }
}
