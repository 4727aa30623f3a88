//! Every rank sends each rank a piece of the same size.

use super::{Link, Session, slot};
use cuda_std::vec::{B128, SecondLevel, Streaming};
use cuda_std::{Global, entries, integer, thread, unroll};

/// The most threads of a block.
pub const THREADS: u32 = 512;
/// 16-byte vectors that a thread has under way.
const DEPTH: usize = 4;

/// Piece `d` of `x` (`vectors` 16-byte vectors each) goes to rank `d`, as piece number `rank` of its rows. The blocks must all be
/// resident; the threads of a block are a multiple of 32.
#[inline(always)]
pub unsafe fn all_to_all(link: Link, x: *const u8, vectors: u32) {
    let Some(session) = Session::begin(link, 0, false) else { return };
    let ok = session.wait_entry();
    if ok {
        let x = Global::new(x);
        let (threads, blocks) = (thread::block_dim_x(), thread::grid_dim_x());
        let step = threads * DEPTH as u32;
        let steps = integer::div(vectors + step - 1, step);
        let mut unit = thread::block_idx_x();
        while unit < steps * link.ranks {
            // Everybody begins with another peer.
            let shift = integer::div(unit, steps);
            let d = integer::rem(link.rank + 1 + shift, link.ranks);
            let first = (unit - shift * steps) * step + thread::thread_idx_x();
            let to = link.buffer::<u8>(d, slot::ROWS).offset(link.rank as usize * vectors as usize * 16);
            let mut words = [B128([0u32; 4]); DEPTH];
            unroll::<DEPTH>(|j| {
                let i = first + j as u32 * threads;
                if i < vectors {
                    words[j] = x.get_hinted((d as usize * vectors as usize + i as usize) * 16, Streaming);
                }
            });
            unroll::<DEPTH>(|j| {
                let i = first + j as u32 * threads;
                if i < vectors {
                    to.set_hinted(i as usize * 16, words[j], SecondLevel);
                }
            });
            unit += blocks;
        }
    }
    session.finish(ok, false);
}

entries! {
    /// Arguments of `ep_all_to_all`; see [`all_to_all`].
    pub struct Args(link: Link, x: *const u8, vectors: u32);
    ep_all_to_all {} [512] => all_to_all;
}
