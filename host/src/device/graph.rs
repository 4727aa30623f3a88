//! Captured work that can be launched again and again.

use super::stream::StreamBackend;
use super::{Device, Storage, Stream};
use crate::error::{Error, Result};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub(super) type Work = Box<dyn Fn() -> Result<()> + Send + Sync>;

/// A capture under way, of one stream or of several that events joined.
#[derive(Default)]
pub(super) struct Capture(Mutex<Collected>);

/// What a capture has collected so far.
#[derive(Default)]
struct Collected {
    /// On the SIMT device, what to run; on a GPU the driver keeps that.
    work: Vec<Work>,
    kept: Vec<Arc<Storage>>,
    /// Those that take part.
    streams: Vec<Stream>,
    over: bool,
}

impl Capture {
    fn lock(&self) -> MutexGuard<'_, Collected> {
        // Nothing that is done under the lock can leave it half-changed.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds work; gives it back if the capture is over.
    pub(super) fn push(&self, work: Work) -> Option<Work> {
        let mut collected = self.lock();
        if collected.over {
            return Some(work);
        }
        collected.work.push(work);
        None
    }

    pub(super) fn keep(&self, storage: &Arc<Storage>) {
        let kept = &mut self.lock().kept;
        if !kept.iter().any(|s| Arc::ptr_eq(s, storage)) {
            kept.push(storage.clone());
        }
    }

    /// Adds a stream, unless the capture is over.
    pub(super) fn add(&self, stream: &Stream) -> bool {
        let mut collected = self.lock();
        if !collected.over {
            collected.streams.push(stream.clone());
        }
        !collected.over
    }

    /// Takes a stream back out that did not come to take part.
    pub(super) fn remove(&self, stream: &Stream) {
        self.lock().streams.retain(|s| !s.is(stream));
    }

    /// Ends it: work, and what the graph is to keep. The streams are as before.
    fn finish(&self) -> (Vec<Work>, Vec<Arc<Storage>>) {
        let mut collected = self.lock();
        let Collected { work, kept, streams, .. } =
            std::mem::replace(&mut *collected, Collected { over: true, ..Default::default() });
        // A stream that wants to take part asks with a lock of its own held.
        drop(collected);
        streams.iter().for_each(Stream::leave_capture);
        (work, kept)
    }
}

/// A sequence of launches and copies, captured once and launched as one: a CUDA graph, or on the SIMT device a list.
///
/// The tensors that safe operations used while it was captured live as long as the graph.
///
/// ```
/// use warploom::{Device, Graph, Stream, Tensor, norm};
/// let device = Device::simt();
/// let stream = Stream::new(&device)?;
/// let mut x = Tensor::from_slice(&device, &[3.0f32, 4.0], &[1, 2])?;
/// let mut y = Tensor::zeros(&device, &[1, 2])?;
/// let graph = Graph::capture(&stream, |s| norm::rms_norm(s, &mut y, &x, None, 0.0))?;
/// assert_eq!(y.to_vec()?, [0.0, 0.0]); // nothing has run yet
/// x.copy_from_slice(&[0.0, 2.0])?;
/// graph.launch(&stream)?;
/// assert_eq!(y.to_vec()?[0], 0.0);
/// # Ok::<(), warploom::Error>(())
/// ```
pub struct Graph {
    device: Device,
    backend: GraphBackend,
    kept: Vec<Arc<Storage>>,
}

impl std::fmt::Debug for Graph {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Graph").field("device", &self.device).finish_non_exhaustive()
    }
}

enum GraphBackend {
    Simt(Arc<[Work]>),
    #[cfg(feature = "_driver")]
    Cuda(super::cuda::CudaGraph),
}

impl Graph {
    /// Captures what `f` submits to `stream`, without running it. Another stream takes part once it
    /// [waits](Stream::wait_event) for an event that was recorded in the capture; `stream` must wait for it in turn before `f` ends.
    ///
    /// # Errors
    /// What `f` returns; [`Error::Capture`] if the stream is being captured already, or another thread is submitting to it;
    /// [`Error::Driver`] if something in `f` cannot be captured. Load the kernels before ([`Device::preload`](super::Device::preload)): loading
    /// a module while capturing is refused by some drivers.
    pub fn capture(stream: &Stream, f: impl FnOnce(&Stream) -> Result<()>) -> Result<Self> {
        let capture = stream.start_capture()?;
        #[cfg(feature = "_driver")]
        if let StreamBackend::Cuda(s) = stream.backend()
            && let Err(e) = s.begin_capture()
        {
            capture.finish();
            return Err(e);
        }
        // A panic in `f` must not leave the stream capturing.
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| f(stream)));
        let backend = match stream.backend() {
            StreamBackend::Simt => None,
            #[cfg(feature = "_driver")]
            StreamBackend::Cuda(s) => Some(s.end_capture()),
        };
        let (work, kept) = capture.finish();
        match outcome {
            Ok(result) => result?,
            Err(panic) => std::panic::resume_unwind(panic),
        }
        let backend = match backend {
            None => GraphBackend::Simt(work.into()),
            #[cfg(feature = "_driver")]
            Some(graph) => GraphBackend::Cuda(graph?),
            #[cfg(not(feature = "_driver"))]
            Some(()) => unreachable!("only GPUs have graphs of their own"),
        };
        Ok(Self { device: stream.device().clone(), backend, kept })
    }

    /// Runs the captured work on `stream`. If that is being captured itself, the work becomes part of the outer graph.
    ///
    /// # Errors
    /// [`Error::WrongDevice`], and those of the work itself.
    pub fn launch(&self, stream: &Stream) -> Result<()> {
        self.check_device("Graph::launch", stream)?;
        let _using = stream.using();
        for storage in &self.kept {
            stream.retain(storage);
        }
        match &self.backend {
            GraphBackend::Simt(work) => {
                let work = work.clone();
                let run = move || work.iter().try_for_each(|w| w());
                if stream.is_capturing() { stream.record(run) } else { run() }
            }
            #[cfg(feature = "_driver")]
            GraphBackend::Cuda(graph) => graph.launch(stream.as_raw()),
        }
    }

    /// Prepares the first launch, which then takes no longer than later ones. The SIMT device needs no preparation.
    ///
    /// # Errors
    /// [`Error::WrongDevice`], [`Error::Driver`].
    pub fn upload(&self, stream: &Stream) -> Result<()> {
        self.check_device("Graph::upload", stream)?;
        match &self.backend {
            GraphBackend::Simt(_) => Ok(()),
            #[cfg(feature = "_driver")]
            GraphBackend::Cuda(graph) => graph.upload(stream.as_raw()),
        }
    }

    fn check_device(&self, op: &'static str, stream: &Stream) -> Result<()> {
        if self.device == *stream.device() {
            return Ok(());
        }
        Err(Error::WrongDevice { op, arg: "graph", expected: stream.device().name(), got: self.device.name() })
    }
}
