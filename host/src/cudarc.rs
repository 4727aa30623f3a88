//! Use with [cudarc](https://docs.rs/cudarc): every operation on buffers and a stream that cudarc owns.
//!
//! A [`Stream`] wraps a `CudaStream`. It shares the GPU's primary context with cudarc, and is a [`warploom::Stream`](crate::Stream)
//! for every operation. In its [`scope`](Stream::scope) a [`Scope`] lends `CudaSlice`s and views of them to tensors, without a
//! copy:
//!
//! ```no_run
//! use cudarc::driver::CudaContext;
//! use warploom::norm;
//!
//! let context = CudaContext::new(0)?;
//! let cuda_stream = context.new_stream()?;
//! let x = cuda_stream.clone_htod(&vec![1.0f32; 4 * 4096])?;
//! let mut y = cuda_stream.alloc_zeros::<f32>(4 * 4096)?;
//!
//! let stream = warploom::cudarc::Stream::new(&cuda_stream)?;
//! stream.scope(|s| {
//!     let x = s.view(x.as_view(), &[4, 4096])?;
//!     let mut y = s.view_mut(y.as_view_mut(), &[4, 4096])?;
//!     norm::rms_norm(&stream, &mut y, &x, None, 1e-6)
//! })?;
//! let y = cuda_stream.clone_dtoh(&y)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! **Order.** cudarc keeps events for each slice, by which its own operations on several streams wait for each other. Lending a
//! slice makes the scope's stream wait for them as cudarc's operations do, and the end of the scope records in
//! them what the scope launched. That a slice is freed only after that follows from it, too.
//!
//! **Graphs.** Between `begin_capture` and `end_capture` of cudarc's stream, scopes submit to the capture. A captured stream
//! cannot wait for events recorded outside of the capture, which is what event tracking does as soon as a context has
//! streams of its own. So turn it off first (`CudaContext::disable_event_tracking`), as for cudarc's own operations; while it is
//! on, lending is refused with [`Error::Capture`]. Load the kernels before ([`Device::preload`]).
//!
//! **Loading.** The feature depends on cudarc with `fallback-dynamic-loading` and a CUDA version from the build system, or the
//! latest where there is none. Whatever else the program asks of cudarc takes precedence. Without the feature `cuda` nothing
//! links libcuda.

use crate::borrow;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::tensor::Tensor;
use ::cudarc::driver::{CudaContext, CudaStream, CudaView, CudaViewMut, DeviceSlice, DriverError, sys};
use cuda_std::Element;
use std::ops::Deref;
use std::sync::Arc;

/// `CU_STREAM_PER_THREAD`.
const PER_THREAD: usize = 2;

/// The device of a context, which it shares.
///
/// # Errors
/// [`Error::Unsupported`] for a context that is not the GPU's primary one, and those of [`Device::cuda`].
pub fn device(context: &CudaContext) -> Result<Device> {
    if !context.is_primary() {
        let what = "the context is not the GPU's primary one; make it with CudaContext::new".into();
        return Err(Error::Unsupported { op: "cudarc::device", what });
    }
    Device::cuda(context.ordinal())
}

/// A stream of cudarc's, for this crate's operations. Cheap to clone; keeps the stream alive.
#[derive(Clone, Debug)]
pub struct Stream {
    stream: crate::Stream,
    cuda: Arc<CudaStream>,
}

impl Stream {
    /// Wraps a stream.
    ///
    /// # Errors
    /// As for [`device`], and [`Error::Unsupported`] for the per-thread stream, which is another one on each thread.
    pub fn new(stream: &Arc<CudaStream>) -> Result<Self> {
        let device = device(stream.context())?;
        if stream.cu_stream() as usize == PER_THREAD {
            let what = "the per-thread stream, which is another one on each thread; make one with new_stream".into();
            return Err(Error::Unsupported { op: "cudarc::Stream::new", what });
        }
        // SAFETY: a stream of the primary context, which is the device's; the owner keeps it alive.
        let wrapped = unsafe { crate::Stream::from_raw_owned(&device, stream.cu_stream().cast(), stream.clone()) };
        Ok(Self { stream: wrapped, cuda: stream.clone() })
    }

    /// cudarc's stream.
    pub fn cuda(&self) -> &Arc<CudaStream> {
        &self.cuda
    }

    /// Runs `f` with a [`Scope`] in which slices that outlive it can be lent to tensors, for work on this stream.
    pub fn scope<'env, R>(&'env self, f: impl FnOnce(&Scope<'env>) -> R) -> R {
        f(&Scope { scope: borrow::Scope::new(&self.stream), stream: &self.cuda })
    }
}

impl Deref for Stream {
    type Target = crate::Stream;

    fn deref(&self) -> &crate::Stream {
        &self.stream
    }
}

/// Where slices are lent to tensors; [`Stream::scope`] makes one.
#[derive(Debug)]
pub struct Scope<'env> {
    scope: borrow::Scope<'env>,
    stream: &'env Arc<CudaStream>,
}

impl<'env> Scope<'env> {
    /// A slice as a dense tensor, to read.
    ///
    /// # Errors
    /// [`Error::Tensor`] if `shape` is not that of so many elements; [`Error::WrongDevice`] for a slice of another
    /// context; [`Error::Capture`] while the stream is captured and cudarc tracks events; [`Error::Driver`] for an error of
    /// cudarc's.
    pub fn view<T: Element>(&self, slice: CudaView<'env, T>, shape: &[usize]) -> Result<Tensor<T>> {
        borrow::holds(slice.len(), shape)?;
        self.check("cudarc::Scope::view", slice.stream())?;
        let (address, guard) = slice.view_ptr(self.stream);
        self.scope.keep(guard);
        self.failed()?;
        // SAFETY: the slice is borrowed for longer than the lease lasts, the stream waits for what wrote it, and the guard makes
        // what writes it next wait for the stream.
        unsafe { self.scope.raw(address as *const T, shape, None) }
    }

    /// A slice as a dense tensor, to read and to write.
    ///
    /// # Errors
    /// As for [`view`](Self::view).
    pub fn view_mut<T: Element>(&self, slice: CudaViewMut<'env, T>, shape: &[usize]) -> Result<Tensor<T>> {
        borrow::holds(slice.len(), shape)?;
        self.check("cudarc::Scope::view_mut", slice.stream())?;
        let (address, guard) = slice.view_ptr_mut(self.stream);
        self.scope.keep(guard);
        self.failed()?;
        // SAFETY: as above; nobody else has the slice meanwhile.
        unsafe { self.scope.raw_mut(address as *mut T, shape, None) }
    }

    fn check(&self, op: &'static str, slice: &CudaStream) -> Result<()> {
        let (own, context) = (self.stream.context(), slice.context());
        if own != context {
            let (expected, got) = (self.scope.device().name(), format!("cuda:{}", context.ordinal()));
            return Err(Error::WrongDevice { op, arg: "slice", expected, got });
        }
        if own.is_managing_stream_synchronization() {
            let status = self.stream.capture_status().map_err(of_cudarc)?;
            if status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE {
                let what =
                    "cudarc would wait for events from outside of the capture: turn its event tracking off first";
                return Err(Error::Capture(what.into()));
            }
        }
        Ok(())
    }

    /// What cudarc could not return at once.
    fn failed(&self) -> Result<()> {
        self.stream.context().check_err().map_err(of_cudarc)
    }
}

impl<'env> Deref for Scope<'env> {
    type Target = borrow::Scope<'env>;

    /// For memory that is known by its address only.
    fn deref(&self) -> &Self::Target {
        &self.scope
    }
}

fn of_cudarc(error: DriverError) -> Error {
    let name = error.error_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
    Error::Driver { call: "cudarc", code: error.0 as i32, name, kernel: None, log: String::new() }
}
