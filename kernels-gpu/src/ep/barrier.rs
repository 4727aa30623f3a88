//! All ranks meet.

use super::{Link, Session};
use cuda_std::entries;

/// One block of 32 threads or more.
#[inline(always)]
pub unsafe fn barrier(link: Link) {
    if let Some(session) = Session::begin(link, u32::MAX, false) {
        session.finish(true, true);
    }
}

entries! {
    /// Arguments of `ep_barrier`.
    pub struct Args(link: Link);
    ep_barrier {} [256] => barrier;
}
