//! How far the blocks of a launch have come, for the one after it, which begins while they still run.
//!
//! Blocks take items in the order of experts. Each warpgroup that stores results keeps a word: all that it still stores is of that expert or of later ones. So what is stored of experts before the
//! least of the words is there, and who reads only that need not wait for the end of the launch: blocks that have no more items make room
//! for blocks of the next launch, which begin with what was stored first.
//!
//! Nobody waits for a word, and no word says that a block has done all: the next launch looks once, when it begins, and for what is not there yet it waits for the end of this one.
//!
//! The words begin with a block's first expert, before it lets the next launch start; it matters not what they were. The next launch must not end before this one does,
//! or a word could be written when somebody has begun anew: so it waits for that at its own end.

use cuda_std::atomic::{Acquire, Device, Relaxed};
use cuda_std::{GlobalMut, thread, warp};

/// Words of a block.
pub const WRITERS: usize = 2;
/// The most blocks.
pub const MAX_BLOCKS: usize = 256;
/// Words in all.
pub const WORDS: usize = WRITERS * MAX_BLOCKS;

/// See the [module](self).
#[derive(Clone, Copy)]
pub struct Progress {
    words: GlobalMut<u32>,
    blocks: u32,
}

impl Progress {
    /// Of a launch of so many blocks; `words`: null, or [`WORDS`].
    #[inline(always)]
    pub fn new(words: *mut u32, blocks: u32) -> Self {
        Self { words: GlobalMut::new(words), blocks: if words.is_null() { 0 } else { blocks } }
    }

    /// Whether there are words, and enough of them.
    #[inline(always)]
    pub fn is_kept(self) -> bool {
        self.blocks.wrapping_sub(1) < MAX_BLOCKS as u32
    }

    /// By one thread, before the block lets the next launch start: the block stores nothing of experts before this one.
    #[inline(always)]
    pub unsafe fn begin(self, expert: u32) {
        for writer in 0..WRITERS {
            self.words.store(thread::block_idx_x() as usize * WRITERS + writer, expert, Device, Relaxed);
        }
        thread::device_fence();
    }

    /// By one thread of those that store, after a barrier of all of them, in the order of experts: all that they will store is of this expert or of later ones.
    #[inline(always)]
    pub unsafe fn reach(self, writer: u32, expert: u32) {
        thread::device_fence();
        self.words.store(thread::block_idx_x() * WRITERS as u32 + writer, expert, Device, Relaxed);
    }

    /// By so many `threads` of a block of the next launch, which has as many blocks, before a barrier: the least of the words that those of a warp have looked at.
    #[inline(always)]
    pub unsafe fn look(self, thread: u32, threads: u32) -> u32 {
        let mut least = u32::MAX;
        let mut word = thread;
        while word < self.blocks * WRITERS as u32 {
            least = least.min(self.words.load(word, Device, Acquire));
            word += threads;
        }
        warp::warp_reduce_min_u32(warp::FULL, least)
    }
}
