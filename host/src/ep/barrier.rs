//! All ranks meet.

use super::Communicator;
use crate::device::{Geometry, Stream};
use crate::error::Result;
use crate::kernels::ep::barrier as kernel;

pub use kernel::Args;

/// How to launch `ep_barrier`.
pub const fn geometry() -> Geometry {
    Geometry::linear(1, 32).resident().dependent()
}

/// Launches the barrier (layer L1).
///
/// # Errors
/// Those of [`Stream::launch`].
///
/// # Safety
/// The link is that of a rank on the stream's device, and its buffers live until the launch is done.
pub unsafe fn launch(stream: &Stream, args: &Args) -> Result<()> {
    // SAFETY: forwarded to the caller.
    unsafe { stream.launch(&kernel::ep_barrier::ENTRY, &geometry(), args) }
}

impl Communicator {
    /// Later work of the stream waits until all ranks have come as far on theirs.
    ///
    /// # Errors
    /// [`WrongDevice`](crate::Error::WrongDevice), [`Ep`](crate::Error::Ep) if an operation could not be launched before, and those of [`Stream::launch`];
    /// [`check`](Self::check) tells the rest.
    pub fn barrier(&mut self, stream: &Stream) -> Result<()> {
        self.on_own_device("ep::barrier", stream)?;
        let args = Args { link: self.link(stream, &[1]) };
        #[cfg(feature = "nccl")]
        if self.nccl.is_some() {
            stream.synchronize()?;
            return self.nccl_begin("ep::barrier", stream, args.link.signature);
        }
        self.together(|| {
            // SAFETY: the group's buffers, which live as long as any rank, and the graph if there is one.
            unsafe { launch(stream, &args) }
        })
    }
}
