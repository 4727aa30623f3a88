//! Captured work that can be launched again and again.

use super::capturing::Counted;
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
    /// Those that take part, and what counts them in their contexts until it is over.
    streams: Vec<(Stream, Option<Counted>)>,
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
    pub(super) fn add(&self, stream: &Stream, counted: Option<Counted>) -> bool {
        let mut collected = self.lock();
        if !collected.over {
            collected.streams.push((stream.clone(), counted));
        }
        !collected.over
    }

    /// Ends it, once the driver's is over: work, and what the graph is to keep. The streams are as before.
    fn finish(&self) -> (Vec<Work>, Vec<Arc<Storage>>) {
        let mut collected = self.lock();
        let Collected { work, kept, streams, .. } =
            std::mem::replace(&mut *collected, Collected { over: true, ..Default::default() });
        // A stream that wants to take part asks with a lock of its own held.
        drop(collected);
        for (stream, _) in &streams {
            stream.leave_capture();
        }
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
    Simt(Arc<SimtGraph>),
    #[cfg(feature = "_driver")]
    Cuda(super::cuda::CudaGraph),
}

/// What the SIMT device runs for a graph, once at a time.
struct SimtGraph {
    work: Vec<Work>,
    turn: Mutex<()>,
}

impl SimtGraph {
    fn run(&self) -> Result<()> {
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        self.work.iter().try_for_each(|work| work())
    }
}

impl Graph {
    /// Captures what `f` submits to `stream`, without running it. Another stream takes part once it
    /// [waits](Stream::wait_event) for an event that was recorded in the capture; `stream` must wait for it in turn before `f` ends.
    ///
    /// Whoever [waits for a device](super::Device::synchronize) of those streams meanwhile, or copies from or to the host, waits for all its work but
    /// what is being captured. A capture begins when those are done who are in the midst of such a wait.
    ///
    /// # Errors
    /// What `f` returns; [`Error::Capture`] if the stream is being captured already, or another thread is submitting to it;
    /// [`Error::Driver`] if something in `f` cannot be captured. Load the kernels before ([`Device::preload`](super::Device::preload)): loading
    /// a module while capturing is refused by some drivers.
    pub fn capture(stream: &Stream, f: impl FnOnce(&Stream) -> Result<()>) -> Result<Self> {
        let capture = stream.start_capture()?;
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
            None => GraphBackend::Simt(Arc::new(SimtGraph { work, turn: Mutex::default() })),
            #[cfg(feature = "_driver")]
            Some(graph) => GraphBackend::Cuda(graph?),
            #[cfg(not(feature = "_driver"))]
            Some(()) => unreachable!("only GPUs have graphs of their own"),
        };
        Ok(Self { device: stream.device().clone(), backend, kept })
    }

    /// Runs the captured work on `stream`, and after what earlier launches of the graph still run. If the stream is being captured itself, the work becomes part of the outer graph.
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
            GraphBackend::Simt(graph) if stream.is_capturing() => {
                let graph = graph.clone();
                stream.record(move || graph.run())
            }
            GraphBackend::Simt(graph) => stream.in_turn(|| graph.run()),
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

#[cfg(test)]
mod tests {
    use super::super::capturing::Capturing;
    use super::*;

    /// Begins, or joins, as a GPU's stream does.
    fn join(stream: &Stream, capture: &Arc<Capture>, context: &Arc<Capturing>) -> Result<bool> {
        stream.join_capture(capture, || context.begin(|| Ok(())).map(Some))
    }

    #[test]
    fn streams_count_in_their_contexts_until_the_capture_is_over() {
        let device = Device::simt();
        let streams: Vec<_> = (0..4).map(|_| Stream::new(&device).unwrap()).collect();
        let [here, there] = [0; 2].map(|_| Arc::new(Capturing::default()));
        let counts = || [&here, &there].map(|context| context.count());
        let capture = Arc::new(Capture::default());
        for (stream, context, expected) in
            [(0, &here, [1, 0]), (1, &here, [2, 0]), (2, &there, [2, 1]), (3, &there, [2, 2])]
        {
            assert!(join(&streams[stream], &capture, context).unwrap());
            // Once only, and in one capture only.
            assert!(!join(&streams[stream], &capture, context).unwrap());
            join(&streams[stream], &Arc::default(), context).unwrap_err();
            assert_eq!(counts(), expected);
        }
        // The capture keeps those that are dropped meanwhile.
        let first = streams[0].clone();
        drop(streams);
        assert_eq!(counts(), [2, 2]);
        capture.finish();
        assert_eq!(counts(), [0, 0]);
        capture.finish();
        assert_eq!(counts(), [0, 0]);
        assert!(!first.is_capturing());
    }

    #[test]
    fn what_does_not_come_to_take_part_does_not_count() {
        let stream = Stream::new(&Device::simt()).unwrap();
        let context = Arc::new(Capturing::default());
        let capture = Arc::new(Capture::default());
        let refused = || Err(Error::Capture("refused".into()));
        stream.join_capture(&capture, || context.begin(refused).map(Some)).unwrap_err();
        assert!(!stream.is_capturing() && context.count() == 0);
        assert!(join(&stream, &capture, &context).unwrap());
        capture.finish();
        // The capture ends while the driver is told.
        let capture = Arc::new(Capture::default());
        let begin = || {
            let counted = context.begin(|| Ok(()))?;
            capture.finish();
            assert_eq!(context.count(), 1);
            Ok(Some(counted))
        };
        assert!(stream.join_capture(&capture, begin).unwrap());
        assert!(!stream.is_capturing() && context.count() == 0);
    }
}
