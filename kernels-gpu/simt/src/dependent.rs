//! Programmatic dependent launch: what a kernel touches before it has waited for the kernels before it.
//!
//! Kernels run one after another here, so nothing goes wrong by itself. With the race detector a [`Queue`] keeps what its last launches did to
//! global memory, and an access of a dependent launch is an error
//!
//! * if it conflicts with one of a launch that may still be running, and neither a wait nor an atomic comes between them;
//! * if nothing is known of what was launched before, because the host has looked at memory since, as between tests or before an
//!   operation's first launch: anything may be written by a kernel that is still running, in somebody else's program.
//!
//! Whether a thread has waited: it did so itself, or a thread that did comes before it by what orders shared memory. A launch may begin when
//! all blocks of the one before have called `launch_dependents` or ended. If they all do that before they wait, those before that one may be
//! running as well. A launch of which no thread waits is an error: who waits for its end takes it for the end of all before it.

use crate::error::{Access, ErrorKind};
use crate::global_race::{Conflict, GlobalRace, GlobalView, Touch};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// So many of the launches that may still be running are remembered.
const REMEMBERED: usize = 2;

/// What was launched before on one stream: see [`Launch::after`](crate::Launch::after).
#[derive(Default)]
pub struct Queue(Mutex<Earlier>);

impl Queue {
    /// A queue that nothing is known of.
    pub fn new() -> Self {
        Self::default()
    }

    /// The host has touched memory, or allocated some: what is launched next may follow anything.
    pub fn forget(&self) {
        self.put(Earlier::default());
    }

    /// Something that is no kernel has run, which waits for all before it and which the next launch waits for.
    pub fn done(&self) {
        self.put(Earlier { launches: Vec::new(), unknown: false });
    }

    pub(crate) fn take(&self) -> Earlier {
        std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub(crate) fn put(&self, earlier: Earlier) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = earlier;
    }
}

/// A launch that has run.
pub(crate) struct Finished {
    name: String,
    shadow: GlobalRace,
}

/// What may still be running when a dependent launch begins.
pub(crate) struct Earlier {
    /// The last one first.
    launches: Vec<Arc<Finished>>,
    /// Whether there may be anything else.
    unknown: bool,
}

impl Default for Earlier {
    fn default() -> Self {
        Self { launches: Vec::new(), unknown: true }
    }
}

/// A dependent launch that is running.
pub(crate) struct Dependent {
    earlier: Earlier,
    /// Whether any thread has waited.
    waited: AtomicBool,
    /// Whether a block let the next launch start only when it had waited itself, or ended.
    late: AtomicBool,
}

impl Dependent {
    pub(crate) fn new(earlier: Earlier) -> Self {
        Self { earlier, waited: AtomicBool::new(false), late: AtomicBool::new(false) }
    }

    /// A block has ended.
    pub(crate) fn block_ended(&self, waited: bool, late: bool) {
        // All write the same, so it is only read mostly.
        for (flag, is) in [(&self.waited, waited), (&self.late, late)] {
            if is && !flag.load(Ordering::Relaxed) {
                flag.store(true, Ordering::Relaxed);
            }
        }
    }

    /// Whether it has waited for what was before, as all must.
    pub(crate) fn has_waited(&self) -> bool {
        self.waited.load(Ordering::Relaxed)
    }

    /// An atomic operation at `address` that reads, before the wait: what earlier launches released to it comes before what follows.
    pub(crate) fn acquire(&self, view: &mut GlobalView, address: usize) {
        for (i, launch) in self.earlier.launches.iter().enumerate() {
            launch.shadow.released_to(view.of_earlier(i), address);
        }
    }

    /// Checks an access before the wait.
    pub(crate) fn check(&self, view: &GlobalView, touch: Touch, address: usize, bytes: usize) -> Result<(), Early> {
        for (i, launch) in self.earlier.launches.iter().enumerate() {
            if let Some(conflict) = launch.shadow.conflict(view.with_earlier(i), touch, address, bytes) {
                return Err(Early(Some((launch.name.clone(), conflict))));
            }
        }
        if self.earlier.unknown { Err(Early(None)) } else { Ok(()) }
    }
}

/// An access before the wait, and what it conflicts with, if that is known.
pub(crate) struct Early(Option<(String, Conflict)>);

impl Early {
    pub(crate) fn into_error(self, thread: crate::Dim3, touch: Touch, offset: usize) -> ErrorKind {
        ErrorKind::BeforeWait {
            thread,
            offset,
            access: touch.access(),
            at: touch.at,
            earlier: self.0.map(|(kernel, conflict)| (kernel, conflict.access, conflict.at)),
        }
    }
}

/// What may still be running when what comes after a launch begins, if that is a dependent launch. Without `shadow`, which launches of
/// [`Peers`](crate::Peers) have in common, nothing is held against this one.
pub(crate) fn after(name: &str, shadow: Option<GlobalRace>, before: Option<Dependent>) -> Earlier {
    let finished = shadow.map(|shadow| Arc::new(Finished { name: name.to_string(), shadow }));
    let mut launches: Vec<_> = finished.into_iter().collect();
    let mut unknown = false;
    if let Some(before) = before.filter(|b| !b.late.load(Ordering::Relaxed)) {
        launches.extend(before.earlier.launches);
        launches.truncate(REMEMBERED);
        unknown = before.earlier.unknown;
    }
    Earlier { launches, unknown }
}

impl Touch {
    /// For messages.
    pub(crate) fn access(self) -> Access {
        match (self.atomic, self.writes) {
            (true, _) => Access::Atomic,
            (false, true) => Access::Write,
            (false, false) => Access::Read,
        }
    }
}
