//! How far the blocks of a launch have come, for the one after it, which begins while they still run.
//!
//! Blocks take items in the order of experts. Each warp that stores results keeps a word: all that it still stores is of that expert or of later ones. So who reads
//! the results of an expert waits until all words are beyond it, instead of waiting for the end of the launch: blocks that have no more items make room
//! for blocks of the next launch, which begin with what was stored first.
//!
//! The words begin as zeroes, which blocks store before they let the next launch start; it matters not what they were. The next launch must not end before this one does,
//! or a word could be written when somebody has begun anew: so it waits for that at its own end.

use cuda_std::atomic::{Device, Relaxed};
use cuda_std::{GlobalMut, thread, unroll, warp};

/// Words of a block.
pub const WARPS: usize = 8;
/// The most blocks.
pub const MAX_BLOCKS: usize = 256;
/// Words in all.
pub const WORDS: usize = WARPS * MAX_BLOCKS;

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

    /// By a thread for each of a block's words, before a barrier and before the block lets the next launch start.
    #[inline(always)]
    pub unsafe fn begin(self, warp: u32) {
        self.words.store(thread::block_idx_x() * WARPS as u32 + warp, 0, Device, Relaxed);
        thread::device_fence();
    }

    /// By all lanes of a warp, in the order of experts: all that it will store is of this expert or of later ones.
    #[inline(always)]
    pub unsafe fn reach(self, warp: u32, expert: u32) {
        warp::sync_warp(warp::FULL);
        if warp::lane_id() == 0 {
            thread::device_fence();
            self.words.store(thread::block_idx_x() * WARPS as u32 + warp, expert, Device, Relaxed);
        }
    }

    /// By all lanes of a warp that speaks for its block, in the order of experts: all that the block will store is of this expert or of later ones. What other warps have
    /// stored it knows from a barrier.
    #[inline(always)]
    pub unsafe fn reach_together(self, expert: u32) {
        warp::sync_warp(warp::FULL);
        let word = warp::lane_id();
        if word < WARPS as u32 {
            thread::device_fence();
            self.words.store(thread::block_idx_x() * WARPS as u32 + word, expert, Device, Relaxed);
        }
    }

    /// By all lanes of a warp of the next launch, which has as many blocks: waits until all that is stored of an expert is visible. That holds for all experts before the one that is
    /// returned.
    #[inline(always)]
    pub unsafe fn wait_beyond(self, expert: u32) -> u32 {
        loop {
            let mut least = u32::MAX;
            let mut word = warp::lane_id();
            let words = self.blocks * WARPS as u32;
            while word < words {
                // Several at once; those beyond the last repeat it.
                let mut found = [0; 8];
                unroll::<8>(|i| found[i] = self.words.load((word + 32 * i as u32).min(words - 1), Device, Relaxed));
                unroll::<8>(|i| least = least.min(found[i]));
                word += 8 * 32;
            }
            // The same in all lanes as the assembler knows, too: otherwise it would not keep in uniform registers what belongs there, 1 to 3 % of a product.
            let least = warp::warp_reduce_min_u32(warp::FULL, least);
            if least > expert {
                thread::device_fence();
                // What one lane has seen all may rely on.
                warp::sync_warp(warp::FULL);
                return least;
            }
            thread::nanosleep(100);
        }
    }
}
