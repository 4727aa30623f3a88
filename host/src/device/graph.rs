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
    /// Those that take part, first the one that it began with.
    members: Vec<Member>,
    over: bool,
}

/// A stream that takes part in a capture.
struct Member {
    stream: Stream,
    /// Counts it in its context until the capture is over.
    _counted: Option<Counted>,
    follows: Follows,
}

/// How many pieces of each member's work come before something; none of members that are not in the list. (Kept on the SIMT device alone: a driver keeps its own.)
#[derive(Clone, Default)]
pub(super) struct Follows(Vec<usize>);

impl Follows {
    fn of(&self, member: usize) -> usize {
        self.0.get(member).copied().unwrap_or(0)
    }

    /// Also what `other` follows.
    fn join(&mut self, other: &Self) {
        self.0.resize(self.0.len().max(other.0.len()), 0);
        self.0.iter_mut().zip(&other.0).for_each(|(own, other)| *own = (*own).max(*other));
    }
}

impl Collected {
    fn member(&self, stream: &Stream) -> Option<usize> {
        self.members.iter().position(|m| m.stream.is_same(stream))
    }

    /// Whether all that members did is followed by what the first would do next.
    fn is_joined(&self) -> bool {
        let first = self.members.first().map(|m| &m.follows);
        self.members.iter().enumerate().all(|(i, m)| first.is_none_or(|first| first.of(i) == m.follows.of(i)))
    }
}

/// What a capture comes to.
struct Finished {
    work: Vec<Work>,
    kept: Vec<Arc<Storage>>,
    joined: bool,
}

impl Capture {
    fn lock(&self) -> MutexGuard<'_, Collected> {
        // Nothing that is done under the lock can leave it half-changed.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds work of a stream that takes part; gives it back if the capture is over.
    pub(super) fn push(&self, stream: &Stream, work: Work) -> Option<Work> {
        let mut collected = self.lock();
        if collected.over {
            return Some(work);
        }
        collected.work.push(work);
        if let Some(member) = collected.member(stream) {
            let follows = &mut collected.members[member].follows;
            follows.0.resize(follows.0.len().max(member + 1), 0);
            follows.0[member] += 1;
        }
        None
    }

    /// What work of a stream follows that it would do next.
    pub(super) fn follows(&self, stream: &Stream) -> Follows {
        let collected = self.lock();
        collected.member(stream).map_or_else(Follows::default, |member| collected.members[member].follows.clone())
    }

    /// A stream waits for an event, with all that this follows.
    pub(super) fn wait(&self, stream: &Stream, event: &Follows) {
        let mut collected = self.lock();
        if let Some(member) = collected.member(stream) {
            collected.members[member].follows.join(event);
        }
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
            let follows = Follows::default();
            collected.members.push(Member { stream: stream.clone(), _counted: counted, follows });
        }
        !collected.over
    }

    /// Ends it, once the driver's is over. The streams are as before.
    fn finish(&self) -> Finished {
        let mut collected = self.lock();
        let finished = std::mem::replace(&mut *collected, Collected { over: true, ..Default::default() });
        // A stream that wants to take part asks with a lock of its own held.
        drop(collected);
        for member in &finished.members {
            member.stream.leave_capture();
        }
        Finished { joined: finished.is_joined(), work: finished.work, kept: finished.kept }
    }
}

/// The error of a driver that finds work which nothing waits for, and the SIMT device's.
pub(super) fn unjoined() -> Error {
    Error::Capture("a stream that took part has work that the captured stream did not wait for: record an event behind it, and wait_event".into())
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
    /// [waits](Stream::wait_event) for an event that was recorded in the capture; `stream` must wait for the last of its work in turn before `f` ends.
    ///
    /// Whoever [waits for a device](super::Device::synchronize) of those streams meanwhile, or copies from or to the host, waits for all its work but
    /// what is being captured. A capture begins when those are done who are in the midst of such a wait.
    ///
    /// # Errors
    /// What `f` returns; [`Error::Capture`] if the stream is being captured already, another thread is submitting to it, or it did not wait for the work of another stream;
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
        let Finished { work, kept, joined } = capture.finish();
        match outcome {
            Ok(result) => result?,
            Err(panic) => std::panic::resume_unwind(panic),
        }
        let backend = match backend {
            None if !joined => return Err(unjoined()),
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
