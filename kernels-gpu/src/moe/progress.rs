//! How far the blocks of a launch have come, for the one after it, which begins while they still run.
//!
//! Blocks take items in the order of experts. Each of a block's writers (threads that store results together) keeps a word: all that it still stores is of that expert or of later ones. So what is
//! stored of experts before the least of the words is there, and who reads only that need not wait for the end of the launch: blocks that have no more items make room
//! for blocks of the next launch, which begin with what was stored first.
//!
//! Where a word delays nobody, the next launch waits for words ([`Progress::wait_beyond`]); a writer that has done all says so by an expert beyond all. Where writers are what a block waits for at its end,
//! no word says that, and the next launch looks once, when it begins ([`Progress::look`]): for what is not there yet it waits for the end of this one.
//!
//! The words begin with a block's first expert, or 0, before it lets the next launch start; it matters not what they were. The next launch must not end before this one does,
//! or a word could be written when somebody has begun anew: so it waits for that at its own end.
//!
//! [`Left`] is the same for a launch that adds up results, stripe by stripe, while the rest of them is computed.

use cuda_std::atomic::{Acquire, Device, Relaxed};
use cuda_std::{GlobalMut, thread, unroll, warp};

/// The most writers of a block.
pub const MAX_WRITERS: usize = 2;
/// The most blocks.
pub const MAX_BLOCKS: usize = 256;
/// Words in all.
pub const WORDS: usize = MAX_WRITERS * MAX_BLOCKS;

/// See the [module](self).
#[derive(Clone, Copy)]
pub struct Progress<const WRITERS: usize> {
    words: GlobalMut<u32>,
    blocks: u32,
}

impl<const WRITERS: usize> Progress<WRITERS> {
    /// Of a launch of so many blocks; `words`: null, or [`WORDS`].
    #[inline(always)]
    pub fn new(words: *mut u32, blocks: u32) -> Self {
        const { assert!(WRITERS <= MAX_WRITERS) };
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

    /// By one thread of a writer, after a barrier of all of them, in the order of experts: all that they will store is of this expert or of later ones.
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

    /// By all lanes of a warp of the next launch, which has as many blocks: waits until all that is stored of an expert is visible. That holds for all experts before the one that is
    /// returned.
    #[inline(always)]
    pub unsafe fn wait_beyond(self, expert: u32) -> u32 {
        let words = self.blocks * WRITERS as u32;
        loop {
            let mut least = u32::MAX;
            let mut word = warp::lane_id();
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

/// The most stripes.
pub const MAX_STRIPES: usize = 32;

/// How many writers have still to store results of each stripe of columns but the last, for which the next launch waits until this one has ended. That launch has its blocks beside
/// those of this one, all of which run by then, so it may wait for a word.
///
/// The launch before this one begins the words, before it lets this one start.
#[derive(Clone, Copy)]
pub struct Left {
    words: GlobalMut<u32>,
    kept: bool,
}

impl Left {
    /// `words`: null, or [`MAX_STRIPES`].
    #[inline(always)]
    pub fn new(words: *mut u32) -> Self {
        Self { words: GlobalMut::new(words), kept: !words.is_null() }
    }

    /// Whether there are words.
    #[inline(always)]
    pub fn is_kept(self) -> bool {
        self.kept
    }

    /// In the launch before: so many writers there will be. A fence is still to come.
    #[inline(always)]
    pub unsafe fn begin(self, stripe: u32, writers: u32) {
        self.words.store(stripe, writers, Device, Relaxed);
    }

    /// By one thread of each writer, after a barrier of all of them and a fence: it has stored all that it had.
    #[inline(always)]
    pub unsafe fn leave(self, stripe: u32) {
        self.words.fetch_add(stripe, u32::MAX, Device, Relaxed);
    }

    /// By one thread of the next launch, before a barrier: waits until nothing is left.
    #[inline(always)]
    pub unsafe fn wait(self, stripe: u32) {
        while self.words.load(stripe, Device, Acquire) != 0 {
            thread::nanosleep(200);
        }
    }
}

/// A product's columns, a stripe after the other, and what is left of each.
#[derive(Clone, Copy)]
pub struct Stripes {
    left: Left,
    /// Tiles of each.
    tiles: u32,
    /// How many there are.
    pub count: u32,
}

impl Stripes {
    /// Of so many `tiles` each, at least one, of `all`; `words` as for [`Left`].
    #[inline(always)]
    pub fn new(words: *mut u32, tiles: u32, all: u32) -> Self {
        Self { left: Left::new(words), tiles, count: all.div_ceil(tiles.max(1)) }
    }

    /// Whether there are words.
    #[inline(always)]
    pub fn are_kept(self) -> bool {
        self.left.is_kept()
    }

    /// See [`Left::begin`].
    #[inline(always)]
    pub unsafe fn begin(self, stripe: u32, writers: u32) {
        self.left.begin(stripe, writers);
    }

    /// The one of a tile.
    #[inline(always)]
    pub unsafe fn of(self, tile: u32) -> u32 {
        // SAFETY: stripes have tiles.
        core::hint::assert_unchecked(self.tiles != 0);
        tile / self.tiles
    }

    /// By all of a warpgroup, a writer, which meets at `barrier`: it has stored all that it had of the stripes from `stored` up to `next`, which is returned. Nobody waits for the last one.
    #[inline(always)]
    pub unsafe fn leave(self, barrier: u32, stored: u32, next: u32) -> u32 {
        let end = next.min(self.count - 1);
        if stored < end {
            thread::sync_named(barrier, 128);
            if thread::thread_idx_x().is_multiple_of(128) {
                thread::device_fence();
                for stripe in stored..end {
                    self.left.leave(stripe);
                }
            }
        }
        next
    }
}
