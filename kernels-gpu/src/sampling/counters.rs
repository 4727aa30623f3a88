//! Counts of a block's tokens by 16 bits of their keys, in the shared memory of a cluster of blocks.

use super::part::{MAX_BLOCKS, THREADS, WARPS};
use super::radix_cluster::of_blocks;
use super::top_k::own_index;
use super::totals::{CHUNK, MAX_CHUNKS};
use cuda_std::integer::opaque;
use cuda_std::shared::Carver;
use cuda_std::vec::B128;
use cuda_std::{Shared, unroll, warp};

/// Bins: one for each value of 16 bits.
pub const BINS: u32 = 1 << 16;
const _: () = assert!(BINS == CHUNK * MAX_CHUNKS && MAX_CHUNKS == 32 * WARPS);

/// Words of shared memory.
pub const WORDS: usize = BINS as usize / 2;

/// Words for each thread to read or clear at once.
const AT_ONCE: u32 = 4;

/// Two bins a word, so up to 65535 tokens of a block.
#[derive(Clone, Copy)]
pub struct Counters {
    /// The words.
    pub words: Shared<u32>,
    /// Their address, in a register.
    base: u32,
}

impl Counters {
    /// Not cleared yet.
    #[inline(always)]
    pub unsafe fn new(carver: &mut Carver) -> Self {
        let words: Shared<u32> = carver.take(WORDS);
        Self { words, base: opaque(words.address(0u32)) }
    }

    /// By all threads; a barrier follows.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn clear(&self) {
        let mut i = AT_ONCE * own_index();
        while i < BINS / 2 {
            self.words.set_as(i, B128([0u32; AT_ONCE as usize]));
            i += AT_ONCE * THREADS;
        }
    }

    /// Counts tokens of a bin.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn add(&self, bin: u32, count: u32) {
        self.words.reduce_add(self.base, bin / 2, count << (16 * (bin & 1)));
    }

    /// A bit for each of this warp's 32 chunks: whether there is anything. By all threads, after a barrier.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn occupied(&self) -> u32 {
        let lane = warp::lane_id();
        let first = own_index() / 32 * 32 * (CHUNK / 2);
        // Eight lanes read a chunk.
        const LANES: u32 = CHUNK / 2 / AT_ONCE;
        let mut occupied = 0;
        unroll::<{ LANES as usize }>(|i| {
            let at = first + (i as u32 * 32 + lane) * AT_ONCE;
            let words = self.words.get_as::<B128<u32, { AT_ONCE as usize }>>(at).0;
            let any = warp::warp_vote_ballot(warp::FULL, words.into_iter().fold(0, |a, b| a | b) != 0);
            unroll::<{ (32 / LANES) as usize }>(|chunk| {
                let there = any >> (chunk as u32 * LANES) & ((1 << LANES) - 1) != 0;
                occupied |= (there as u32) << (i as u32 * (32 / LANES) + chunk as u32);
            });
        });
        occupied
    }

    /// How many tokens of the cluster are in the two bins of this lane in a chunk, the higher one first.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn of_chunk(&self, blocks: u32, chunk: u32) -> [u32; 2] {
        let words = of_blocks(blocks, self.words.ptr(chunk * (CHUNK / 2) + 31 - warp::lane_id()));
        let mut counts = [0; 2];
        unroll::<{ MAX_BLOCKS as usize }>(|b| {
            counts[0] += words[b] >> 16;
            counts[1] += words[b] & 0xffff;
        });
        counts
    }
}
