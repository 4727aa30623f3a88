//! Streams, events, pinned host memory.

use super::capturing::Counted;
use super::graph::{Capture, Follows};
use super::{Backend, Device, Geometry, Storage};
use crate::error::{Error, Result};
use crate::tensor::{Tensor, host_zeros};
use cuda_std::{Element, Entry, KernelArgs};
use std::ffi::c_void;
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// A queue of work on a device. Cheap to clone; clones are the same queue.
///
/// Work of one stream runs in order; streams run beside each other. Nothing here synchronises unless it says so.
#[derive(Clone)]
pub struct Stream(Arc<Inner>);

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stream").field("device", self.device()).field("raw", &self.as_raw()).finish()
    }
}

struct Inner {
    device: Device,
    backend: StreamBackend,
    captures: Arc<Captures>,
    /// What the raw stream belongs to. Goes last.
    _owner: Option<Box<dyn Send + Sync>>,
}

/// Whether a queue is being captured. All streams that are made of one raw stream share it.
#[derive(Default)]
pub(super) struct Captures {
    /// [`CAPTURING`], and [`CALL`] for each operation that is being submitted.
    state: AtomicUsize,
    capture: Mutex<Option<Arc<Capture>>>,
    /// On the SIMT device, held while work of the queue runs: one launch after the other, a graph's as one.
    turn: Mutex<()>,
}

const CAPTURING: usize = 1;
const CALL: usize = 2;

impl Captures {
    /// Whether it is being captured by this crate.
    pub(super) fn capturing(&self) -> bool {
        self.state.load(Ordering::Acquire) & CAPTURING != 0
    }
}

/// Keeps captures of a stream from beginning between the checks of an operation and its launch, which they would collect without
/// what it needs.
pub(crate) struct Using<'a>(&'a Stream);

impl Drop for Using<'_> {
    fn drop(&mut self) {
        self.0.state().fetch_sub(CALL, Ordering::Release);
    }
}

pub(super) enum StreamBackend {
    Simt,
    #[cfg(feature = "_driver")]
    Cuda(super::cuda::CudaStream),
}

impl Stream {
    /// A new stream that does not wait for the legacy default stream.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn new(device: &Device) -> Result<Self> {
        let backend = match device.backend() {
            Backend::Simt(_) => StreamBackend::Simt,
            #[cfg(feature = "_driver")]
            Backend::Cuda(d) => StreamBackend::Cuda(d.new_stream()?),
        };
        Ok(Self::with(device, backend, None))
    }

    /// A stream that somebody else owns: a `CUstream` of the device's context (null is the legacy default stream). On
    /// the SIMT device `stream` is not looked at.
    ///
    /// # Safety
    /// `stream` is a stream of `device`'s context, not `CU_STREAM_PER_THREAD` (another one on each thread), and lives as long as the
    /// result and its clones.
    pub unsafe fn from_raw(device: &Device, stream: *mut c_void) -> Self {
        // SAFETY: forwarded to the caller.
        unsafe { Self::foreign(device, stream, None) }
    }

    /// As [`from_raw`](Self::from_raw), with an owner that keeps the stream alive.
    ///
    /// # Safety
    /// As for [`from_raw`](Self::from_raw), but that `stream` lives as long as `owner`.
    pub unsafe fn from_raw_owned(device: &Device, stream: *mut c_void, owner: impl Send + Sync + 'static) -> Self {
        // SAFETY: forwarded to the caller.
        unsafe { Self::foreign(device, stream, Some(Box::new(owner))) }
    }

    unsafe fn foreign(device: &Device, stream: *mut c_void, owner: Option<Box<dyn Send + Sync>>) -> Self {
        let backend = match device.backend() {
            Backend::Simt(_) => {
                let _ = stream;
                StreamBackend::Simt
            }
            #[cfg(feature = "_driver")]
            Backend::Cuda(d) => StreamBackend::Cuda(d.borrowed_stream(stream)),
        };
        Self::with(device, backend, owner)
    }

    fn with(device: &Device, backend: StreamBackend, owner: Option<Box<dyn Send + Sync>>) -> Self {
        let captures = match &backend {
            StreamBackend::Simt => Arc::default(),
            #[cfg(feature = "_driver")]
            StreamBackend::Cuda(s) => s.captures().clone(),
        };
        Self(Arc::new(Inner { device: device.clone(), backend, captures, _owner: owner }))
    }

    /// The device that the stream belongs to.
    pub fn device(&self) -> &Device {
        &self.0.device
    }

    /// The raw `CUstream`; null on the SIMT device.
    pub fn as_raw(&self) -> *mut c_void {
        match &self.0.backend {
            StreamBackend::Simt => std::ptr::null_mut(),
            #[cfg(feature = "_driver")]
            StreamBackend::Cuda(s) => s.raw(),
        }
    }

    /// A number of the raw stream, or on the SIMT device, where there is none, of this one: no other has it while this one lives.
    pub(crate) fn identity(&self) -> usize {
        match &self.0.backend {
            StreamBackend::Simt => Arc::as_ptr(&self.0).addr(),
            #[cfg(feature = "_driver")]
            StreamBackend::Cuda(s) => s.raw().addr(),
        }
    }

    pub(super) fn backend(&self) -> &StreamBackend {
        &self.0.backend
    }

    /// Waits until the work submitted so far is done.
    ///
    /// # Errors
    /// [`Error::Driver`] if any of it failed; [`Error::Capture`] while capturing.
    pub fn synchronize(&self) -> Result<()> {
        self.not_capturing("synchronize")?;
        match &self.0.backend {
            StreamBackend::Simt => Ok(()),
            #[cfg(feature = "_driver")]
            StreamBackend::Cuda(s) => s.synchronize(),
        }
    }

    /// Launches a kernel (layer L0): looks the entry up and hands it to the driver, or runs it on the SIMT device.
    ///
    /// # Errors
    /// [`Error::Driver`] or [`Error::Launch`].
    ///
    /// # Safety
    /// `args` are what the kernel demands, for the whole time until the launch is done, and, if the stream is
    /// being captured, until the graph and its launches are done.
    #[inline]
    pub unsafe fn launch<A: KernelArgs>(&self, entry: &Entry<A>, geometry: &Geometry, args: &A) -> Result<()> {
        if geometry.is_empty() {
            return Ok(());
        }
        match (self.0.device.backend(), &self.0.backend) {
            (Backend::Simt(d), _) => {
                if self.is_capturing() {
                    let (device, entry, geometry, args) = (self.0.device.clone(), *entry, *geometry, AssertSend(*args));
                    return self.record(move || match device.backend() {
                        // SAFETY: promised to `launch` for as long as the graph lives.
                        Backend::Simt(d) => unsafe { d.launch(&entry, &geometry, args.get()) },
                        #[cfg(feature = "_driver")]
                        Backend::Cuda(_) => unreachable!("recorded on the SIMT device"),
                    });
                }
                // SAFETY: forwarded to the caller.
                self.in_turn(|| unsafe { d.launch(entry, geometry, args) })
            }
            #[cfg(feature = "_driver")]
            // SAFETY: forwarded to the caller.
            (Backend::Cuda(d), StreamBackend::Cuda(s)) => unsafe { d.launch(s, entry, geometry, args) },
            #[cfg(feature = "_driver")]
            (Backend::Cuda(_), StreamBackend::Simt) => unreachable!("a stream has its device's backend"),
        }
    }

    /// Copies device memory: all of `src` to `dst`, stream-ordered.
    ///
    /// # Errors
    /// [`Error::Shape`] if the shapes differ, [`Error::Stride`] if either is not contiguous, [`Error::Overlap`], [`Error::WrongDevice`].
    pub fn copy<T: Element>(&self, dst: &mut Tensor<T>, src: &Tensor<T>) -> Result<()> {
        let mut call = crate::check::Call::new("copy", self);
        let (to, from) = (call.write("dst", dst)?, call.read("src", src)?);
        call.same_shape("src", src.shape(), dst.shape())?;
        call.contiguous("dst", dst)?;
        call.contiguous("src", src)?;
        call.check_overlap()?;
        // SAFETY: both ranges are in bounds of live tensors of this device and do not overlap.
        unsafe { self.copy_raw(to.cast(), from.cast(), src.len() * size_of::<T>()) }
    }

    /// Copies `bytes` of device memory, stream-ordered (layer L1).
    ///
    /// # Errors
    /// [`Error::Driver`].
    ///
    /// # Safety
    /// Both ranges are device memory (or, on a GPU, pinned host memory), do not overlap, and live until the copy, or
    /// the graph that captures it, is done.
    pub unsafe fn copy_raw(&self, dst: *mut u8, src: *const u8, bytes: usize) -> Result<()> {
        match &self.0.backend {
            StreamBackend::Simt => {
                let (args, device) = (AssertSend((dst, src)), self.0.device.clone());
                let copy = move || {
                    let &(dst, src) = args.get();
                    // SAFETY: promised to `copy_raw`.
                    device.exclusive(|| unsafe { std::ptr::copy_nonoverlapping(src, dst, bytes) });
                    Ok(())
                };
                if self.is_capturing() { self.record(copy) } else { self.in_turn(copy) }
            }
            #[cfg(feature = "_driver")]
            // SAFETY: forwarded to the caller.
            StreamBackend::Cuda(s) => unsafe { s.copy(dst, src, bytes) },
        }
    }

    /// Runs `work` on the CPU in place of a kernel, stream-ordered: on the SIMT device only.
    ///
    /// # Errors
    /// [`Error::Unsupported`] on a GPU.
    pub(crate) fn run_on_host(&self, op: &'static str, work: impl Fn() + Send + Sync + 'static) -> Result<()> {
        match &self.0.backend {
            StreamBackend::Simt => {
                let _ = op;
                let device = self.0.device.clone();
                let run = move || {
                    device.exclusive(&work);
                    Ok(())
                };
                if self.is_capturing() { self.record(run) } else { self.in_turn(run) }
            }
            #[cfg(feature = "_driver")]
            StreamBackend::Cuda(_) => {
                let _ = work;
                Err(Error::Unsupported { op, what: "plain loops on the CPU are for the SIMT device".into() })
            }
        }
    }

    /// Sets every byte of a contiguous tensor, stream-ordered.
    ///
    /// # Errors
    /// [`Error::Stride`], [`Error::ReadOnly`], [`Error::WrongDevice`].
    pub fn fill_bytes<T: Element>(&self, dst: &mut Tensor<T>, byte: u8) -> Result<()> {
        let mut call = crate::check::Call::new("fill_bytes", self);
        let to = call.write("dst", dst)?;
        call.contiguous("dst", dst)?;
        // SAFETY: in bounds of a live tensor of this device.
        unsafe { self.fill_raw(to.cast(), byte, dst.len() * size_of::<T>()) }
    }

    /// Sets `bytes` of device memory, stream-ordered (layer L1).
    ///
    /// # Errors
    /// [`Error::Driver`].
    ///
    /// # Safety
    /// The range is device memory and lives until the fill, or the graph that captures it, is done.
    pub unsafe fn fill_raw(&self, dst: *mut u8, byte: u8, bytes: usize) -> Result<()> {
        match &self.0.backend {
            StreamBackend::Simt => {
                let (args, device) = (AssertSend(dst), self.0.device.clone());
                let fill = move || {
                    // SAFETY: promised to `fill_raw`.
                    device.exclusive(|| unsafe { std::ptr::write_bytes(*args.get(), byte, bytes) });
                    Ok(())
                };
                if self.is_capturing() { self.record(fill) } else { self.in_turn(fill) }
            }
            #[cfg(feature = "_driver")]
            // SAFETY: forwarded to the caller.
            StreamBackend::Cuda(s) => unsafe { s.fill(dst, byte, bytes) },
        }
    }

    /// Copies from pinned host memory, stream-ordered; the whole of `src` into the contiguous `dst`.
    ///
    /// `src` must not be changed or dropped before the copy is done; that it stays borrowed only for the call is why
    /// this is unsafe. [`Tensor::copy_from_slice`] is the safe, synchronous way.
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::Stride`], [`Error::WrongDevice`].
    ///
    /// # Safety
    /// `src` stays as it is until the copy, or the graph that captures it, is done.
    pub unsafe fn upload<T: Element>(&self, dst: &mut Tensor<T>, src: &Pinned<T>) -> Result<()> {
        let mut call = crate::check::Call::new("upload", self);
        let to = call.write("dst", dst)?;
        call.contiguous("dst", dst)?;
        call.same_shape("src", &[src.len()], &[dst.len()])?;
        // SAFETY: sizes agree; lifetimes are promised by the caller.
        unsafe { self.copy_raw(to.cast(), src.as_ptr().cast(), src.len() * size_of::<T>()) }
    }

    /// Copies the contiguous `src` to pinned host memory, stream-ordered. Read `dst` after a synchronisation.
    ///
    /// # Errors
    /// As for [`upload`](Self::upload).
    ///
    /// # Safety
    /// `dst` is neither accessed nor dropped until the copy, or the graph that captures it, is done.
    pub unsafe fn download<T: Element>(&self, dst: &mut Pinned<T>, src: &Tensor<T>) -> Result<()> {
        let mut call = crate::check::Call::new("download", self);
        let from = call.read("src", src)?;
        call.contiguous("src", src)?;
        call.same_shape("dst", &[dst.len()], &[src.len()])?;
        // SAFETY: sizes agree; lifetimes are promised by the caller.
        unsafe { self.copy_raw(dst.as_mut_ptr().cast(), from.cast(), src.len() * size_of::<T>()) }
    }

    /// Marks a point in the stream.
    ///
    /// # Errors
    /// [`Error::WrongDevice`] for an event of another device; [`Error::Driver`].
    pub fn record_event(&self, event: &Event) -> Result<()> {
        let same = event.device == *self.device();
        match (&self.0.backend, &event.backend) {
            (StreamBackend::Simt, EventBackend::Simt(at)) if same => {
                *at.lock().expect("event") = Some(std::time::Instant::now());
            }
            #[cfg(feature = "_driver")]
            (StreamBackend::Cuda(s), EventBackend::Cuda(e)) if same => s.record(e)?,
            _ => return Err(self.foreign_event("record_event", event)),
        }
        *event.captured() = self.capture().map(|capture| Box::new((Arc::downgrade(&capture), capture.follows(self))));
        Ok(())
    }

    /// Lets later work of this stream wait for `event`, which may be that of another device of the same kind: so do streams of several GPUs wait for each other. If it
    /// was recorded in a [capture](super::Graph::capture), the stream takes part in that from now on, until it ends. Its own device can be
    /// waited for meanwhile, and be copied to and from, as that of the capture's stream can; the call waits for who is in the midst of that.
    ///
    /// # Errors
    /// [`Error::Capture`] if the stream takes part in another capture, or another thread is submitting to it; [`Error::WrongDevice`] for a GPU and a SIMT device; [`Error::Driver`].
    pub fn wait_event(&self, event: &Event) -> Result<()> {
        let captured = event.captured().clone();
        let Some((capture, follows)) = captured.and_then(|c| Some((c.0.upgrade()?, c.1))) else {
            return self.wait(event, false).map(drop);
        };
        if !self.join_capture(&capture, || self.wait(event, true))? {
            self.wait(event, false)?;
        }
        capture.wait(self, &follows);
        Ok(())
    }

    /// `joins`: whether the stream comes to take part in a capture by it.
    fn wait(&self, event: &Event, joins: bool) -> Result<Option<Counted>> {
        match (&self.0.backend, &event.backend) {
            (StreamBackend::Simt, EventBackend::Simt(_)) => {
                let _ = joins;
                self.device().wait_for(&event.device);
                Ok(None)
            }
            #[cfg(feature = "_driver")]
            (StreamBackend::Cuda(s), EventBackend::Cuda(e)) if joins => s.join_capture(e).map(Some),
            #[cfg(feature = "_driver")]
            (StreamBackend::Cuda(s), EventBackend::Cuda(e)) => s.wait(e).map(|()| None),
            #[cfg(feature = "_driver")]
            _ => Err(self.foreign_event("wait_event", event)),
        }
    }

    fn foreign_event(&self, op: &'static str, event: &Event) -> Error {
        Error::WrongDevice { op, arg: "event", expected: self.device().name(), got: event.device.name() }
    }

    /// Whether the stream is being captured into a [`Graph`](super::Graph) by this crate.
    pub fn is_capturing(&self) -> bool {
        self.0.captures.capturing()
    }

    fn not_capturing(&self, what: &str) -> Result<()> {
        if self.is_capturing() {
            Err(Error::Capture(format!("{what} while the stream is being captured")))
        } else {
            Ok(())
        }
    }

    fn state(&self) -> &AtomicUsize {
        &self.0.captures.state
    }

    /// Held from the checks of an operation to the end of its launch.
    pub(crate) fn using(&self) -> Using<'_> {
        self.state().fetch_add(CALL, Ordering::Acquire);
        Using(self)
    }

    fn lock_capture(&self) -> MutexGuard<'_, Option<Arc<Capture>>> {
        self.0.captures.capture.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether both are made of one raw stream.
    pub(super) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0.captures, &other.0.captures)
    }

    /// The capture that the stream takes part in.
    fn capture(&self) -> Option<Arc<Capture>> {
        if self.is_capturing() { self.lock_capture().clone() } else { None }
    }

    /// Keeps a storage alive as long as the graph that is being captured, if one is.
    pub(crate) fn retain(&self, storage: &Arc<Storage>) {
        if let Some(capture) = self.capture() {
            capture.keep(storage);
        }
    }

    /// Runs work of the SIMT device's, which comes from nothing that is in its turn already.
    pub(super) fn in_turn<R>(&self, work: impl FnOnce() -> R) -> R {
        let _turn = self.0.captures.turn.lock().unwrap_or_else(PoisonError::into_inner);
        work()
    }

    pub(super) fn record(&self, work: impl Fn() -> Result<()> + Send + Sync + 'static) -> Result<()> {
        match self.capture() {
            Some(capture) => capture.push(self, Box::new(work)).map_or(Ok(()), |work| self.in_turn(work)),
            None => self.in_turn(work),
        }
    }

    pub(super) fn start_capture(&self) -> Result<Arc<Capture>> {
        let capture = Arc::new(Capture::default());
        let begin = || match &self.0.backend {
            StreamBackend::Simt => Ok(None),
            #[cfg(feature = "_driver")]
            StreamBackend::Cuda(s) => s.begin_capture().map(Some),
        };
        self.join_capture(&capture, begin).map(|_| capture)
    }

    /// Takes part in a capture from now on, which `begin` tells the driver; whether it did not before. Who asks for the capture meanwhile
    /// waits, so that nothing is submitted between the two.
    pub(super) fn join_capture(
        &self,
        capture: &Arc<Capture>,
        begin: impl FnOnce() -> Result<Option<Counted>>,
    ) -> Result<bool> {
        let mut own = self.lock_capture();
        if let Some(own) = &*own {
            if Arc::ptr_eq(own, capture) {
                return Ok(false);
            }
            return Err(Error::Capture("the stream is being captured already".into()));
        }
        if self.state().compare_exchange(0, CAPTURING, Ordering::AcqRel, Ordering::Acquire).is_err() {
            return Err(Error::Capture("another thread is submitting to the stream; capture when it is done".into()));
        }
        // One that ended meanwhile has let go of the stream already.
        let begun = begin().map(|counted| capture.add(self, counted));
        if let Ok(true) = begun {
            *own = Some(capture.clone());
        } else {
            self.state().fetch_and(!CAPTURING, Ordering::Release);
        }
        begun.map(|_| true)
    }

    pub(super) fn leave_capture(&self) {
        let mut own = self.lock_capture();
        *own = None;
        self.state().fetch_and(!CAPTURING, Ordering::Release);
    }
}

/// Kernel arguments in a recorded launch.
struct AssertSend<T>(T);
// SAFETY: kernel arguments are addresses of device memory and plain numbers; whoever recorded them promised that they
// stay valid, on whatever thread the graph is launched.
unsafe impl<T> Send for AssertSend<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for AssertSend<T> {}

impl<T> AssertSend<T> {
    fn get(&self) -> &T {
        &self.0
    }
}

/// A capture, and the work there that an event follows.
type Captured = (Weak<Capture>, Follows);

/// A point in a stream, to wait for or to measure from.
pub struct Event {
    device: Device,
    backend: EventBackend,
    /// Where it was recorded last, if that was in a capture.
    captured: Mutex<Option<Box<Captured>>>,
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Event").finish_non_exhaustive()
    }
}

enum EventBackend {
    Simt(Mutex<Option<std::time::Instant>>),
    #[cfg(feature = "_driver")]
    Cuda(super::cuda::CudaEvent),
}

impl Event {
    /// An event that can measure time.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn new(device: &Device) -> Result<Self> {
        let backend = match device.backend() {
            Backend::Simt(_) => EventBackend::Simt(Mutex::new(None)),
            #[cfg(feature = "_driver")]
            Backend::Cuda(d) => EventBackend::Cuda(d.new_event()?),
        };
        Ok(Self { device: device.clone(), backend, captured: Mutex::default() })
    }

    fn captured(&self) -> MutexGuard<'_, Option<Box<Captured>>> {
        self.captured.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until the event has happened.
    ///
    /// # Errors
    /// [`Error::Driver`] if work before it failed.
    pub fn synchronize(&self) -> Result<()> {
        match &self.backend {
            EventBackend::Simt(_) => Ok(()),
            #[cfg(feature = "_driver")]
            EventBackend::Cuda(e) => e.synchronize(),
        }
    }

    /// Seconds from `earlier` to this event; both must have been recorded, on one device. Waits for this one. If `earlier` is the later
    /// one, 0 on the SIMT device, and what the driver says on a GPU: a negative number.
    ///
    /// # Errors
    /// [`Error::Driver`], [`Error::Value`] if either was not recorded, [`Error::WrongDevice`] if they are of two devices.
    pub fn seconds_since(&self, earlier: &Event) -> Result<f64> {
        let unrecorded = || Error::Value {
            op: "Event::seconds_since",
            arg: "earlier",
            expected: "two recorded events of one device".into(),
            got: "one of the two that was not".into(),
        };
        let same = self.device == earlier.device;
        match (&self.backend, &earlier.backend) {
            (EventBackend::Simt(b), EventBackend::Simt(a)) if same => {
                // One lock after the other: the two may be one event.
                let a = *a.lock().expect("event");
                let b = *b.lock().expect("event");
                Ok(b.ok_or_else(unrecorded)?.saturating_duration_since(a.ok_or_else(unrecorded)?).as_secs_f64())
            }
            #[cfg(feature = "_driver")]
            (EventBackend::Cuda(b), EventBackend::Cuda(a)) if same => b.seconds_since(a)?.ok_or_else(unrecorded),
            _ => Err(Error::WrongDevice {
                op: "Event::seconds_since",
                arg: "earlier",
                expected: self.device.name(),
                got: earlier.device.name(),
            }),
        }
    }
}

/// Host memory that a GPU can copy to and from without the CPU, and whose addresses its kernels can use. Plain memory for the SIMT device.
pub struct Pinned<T> {
    storage: PinnedStorage<T>,
}

impl<T> fmt::Debug for Pinned<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pinned").field("len", &self.len()).finish_non_exhaustive()
    }
}

enum PinnedStorage<T> {
    /// Lent to kernels, which ends before the memory does.
    Simt(#[allow(dead_code, reason = "held for its destructor")] Option<::simt::Lent>, Vec<T>),
    #[cfg(feature = "_driver")]
    Cuda(super::cuda::CudaPinned<T>),
}

impl<T: Element> Pinned<T> {
    /// `len` elements of zero bytes.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::Driver`].
    pub fn zeros(device: &Device, len: usize) -> Result<Self> {
        let storage = match device.backend() {
            Backend::Simt(_) => {
                let memory = host_zeros::<T>(len)?;
                let bytes = size_of_val(&memory[..]);
                let lent = (bytes > 0).then(|| ::simt::Lent::new(memory.as_ptr().cast(), bytes));
                PinnedStorage::Simt(lent, memory)
            }
            #[cfg(feature = "_driver")]
            Backend::Cuda(d) => PinnedStorage::Cuda(d.allocate_pinned(len)?),
        };
        Ok(Self { storage })
    }
}

impl<T> std::ops::Deref for Pinned<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        match &self.storage {
            PinnedStorage::Simt(_, v) => v,
            #[cfg(feature = "_driver")]
            PinnedStorage::Cuda(p) => p.as_slice(),
        }
    }
}
impl<T> std::ops::DerefMut for Pinned<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        match &mut self.storage {
            PinnedStorage::Simt(_, v) => v,
            #[cfg(feature = "_driver")]
            PinnedStorage::Cuda(p) => p.as_mut_slice(),
        }
    }
}
