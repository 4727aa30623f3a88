//! How many streams of a context are being captured, for whoever waits for all its work.
//!
//! A wait for the whole context voids captures, so it asks first and goes another way if there are any. No stream comes to be captured between
//! its question and its end: whoever begins waits for it, by a lock that waits share. A stream that is captured no longer disturbs no
//! wait, so whoever ends waits for none, and can go on to submit what one in progress depends on.

use crate::error::Result;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};

#[derive(Debug, Default)]
pub(super) struct Capturing {
    streams: AtomicUsize,
    waits: RwLock<()>,
}

/// A stream that is being captured. Dropped once it is not.
#[derive(Debug)]
pub(super) struct Counted(Arc<Capturing>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.streams.fetch_sub(1, Ordering::Release);
    }
}

/// Lasts as long as a wait for all work. No stream comes to be captured meanwhile.
pub(super) struct Waiting<'a> {
    /// Whether any stream was captured when the wait began.
    pub(super) captured: bool,
    _waits: RwLockReadGuard<'a, ()>,
}

impl Capturing {
    /// Counts a stream that `begin` has the driver capture, if that succeeds; not in the midst of a wait.
    pub(super) fn begin(self: &Arc<Self>, begin: impl FnOnce() -> Result<()>) -> Result<Counted> {
        let _alone = self.waits.write().unwrap_or_else(PoisonError::into_inner);
        begin()?;
        self.streams.fetch_add(1, Ordering::Release);
        Ok(Counted(self.clone()))
    }

    #[cfg(test)]
    pub(super) fn count(&self) -> usize {
        self.streams.load(Ordering::Relaxed)
    }

    pub(super) fn wait(&self) -> Waiting<'_> {
        let waits = self.waits.read().unwrap_or_else(PoisonError::into_inner);
        Waiting { captured: self.streams.load(Ordering::Acquire) > 0, _waits: waits }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;
    use std::sync::atomic::AtomicBool;
    use std::time::Duration;

    #[test]
    fn every_stream_counts_until_it_is_let_go() {
        let capturing = Arc::new(Capturing::default());
        assert!(!capturing.wait().captured);
        let first = capturing.begin(|| Ok(())).unwrap();
        let second = capturing.begin(|| Ok(())).unwrap();
        drop(first);
        assert!(capturing.wait().captured);
        capturing.begin(|| Err(Error::Capture("refused".into()))).unwrap_err();
        assert_eq!(capturing.count(), 1);
        drop(second);
        assert!(!capturing.wait().captured);
    }

    #[test]
    fn no_stream_begins_in_the_midst_of_a_wait_and_any_ends() {
        let capturing = Arc::new(Capturing::default());
        let first = capturing.begin(|| Ok(())).unwrap();
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let waiting = capturing.wait();
            assert!(waiting.captured);
            let second = scope.spawn(|| {
                capturing.begin(|| {
                    assert!(done.load(Ordering::Acquire), "in the midst of a wait");
                    Ok(())
                })
            });
            drop(first);
            std::thread::sleep(Duration::from_millis(50));
            assert_eq!(capturing.count(), 0);
            done.store(true, Ordering::Release);
            drop(waiting);
            let second = second.join().unwrap().unwrap();
            assert!(capturing.wait().captured);
            drop(second);
        });
        assert!(!capturing.wait().captured);
    }
}
