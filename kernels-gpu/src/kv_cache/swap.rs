//! Copies whole blocks between the caches of all layers and pinned memory of the host, in one launch.
//!
//! Pinned memory has addresses that kernels can use: what they read and write there goes over the bus. A copy engine needs some 2 µs a copy, in
//! which the bus carries 100 KB, so blocks that lie apart go faster this way. A fraction of the multiprocessors keeps the bus busy:
//! [`BLOCKS`] blocks of threads at most, each of which takes every so-manieth piece of 16 KiB of a block of the cache. Each
//! thread loads four vectors of 16 bytes before it stores the first; what is not aligned to 16 bytes goes byte by byte. The pairs are
//! in the launch's parameters: nothing has to be copied to the device for them, or to live until the kernel is done.

use super::copy_blocks::{PIECE_BYTES, THREADS, copy_piece};
use cuda_std::{Global, GlobalMut, constant_param, dependent_launch, entries, integer, thread};

/// Blocks of threads at most: what keeps the bus busy when the host is read 4 KiB at a time (docs/experiments/elementwise.md).
pub const BLOCKS: u32 = 32;
/// Pairs of a launch at most: parameters have 4 KB.
pub const MAX_PAIRS: usize = 480;

/// Blocks that are read, and the blocks that they are written to.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Pairs {
    from: [u32; MAX_PAIRS],
    to: [u32; MAX_PAIRS],
    count: u32,
}
constant_param!(Pairs);

impl Pairs {
    /// `(from, to)` each. None if there are more than [`MAX_PAIRS`].
    pub fn new(pairs: &[(u32, u32)]) -> Option<Self> {
        let mut all = Self { from: [0; MAX_PAIRS], to: [0; MAX_PAIRS], count: pairs.len() as u32 };
        for (i, &(from, to)) in pairs.iter().enumerate() {
            *all.from.get_mut(i)? = from;
            all.to[i] = to;
        }
        Some(all)
    }

    /// How many there are.
    pub const fn count(&self) -> u32 {
        self.count
    }
}

/// For each tensor and each pair `(from, to)`: block `to` of `to[tensor]` becomes block `from` of `from[tensor]`. Blocks have `block_bytes`
/// bytes and begin `from_stride` and `to_stride` bytes apart.
#[inline(always)]
pub unsafe fn swap_blocks(
    from: *const u64,
    to: *const u64,
    tensors: u32,
    block_bytes: usize,
    from_stride: usize,
    to_stride: usize,
    pairs: *const Pairs,
) {
    dependent_launch::begin();
    let pairs = &*pairs;
    let pieces = block_bytes.div_ceil(PIECE_BYTES) as u32;
    let each = pairs.count * pieces;
    let (mut tensor, mut item) = (0, thread::block_idx_x());
    loop {
        while tensor < tensors && item >= each {
            item -= each;
            tensor += 1;
        }
        if tensor >= tensors {
            return;
        }
        // Not 0: there is an item.
        let (pair, piece) = (integer::div(item, pieces), integer::rem(item, pieces));
        let source = Global::new(from).get(tensor) as *const u8;
        let target = Global::new(to).get(tensor) as *mut u8;
        let (first, second) = (*pairs.from.get_unchecked(pair as usize), *pairs.to.get_unchecked(pair as usize));
        copy_piece(
            Global::new(source).offset(first as usize * from_stride),
            GlobalMut::new(target).offset(second as usize * to_stride),
            block_bytes,
            piece as usize * PIECE_BYTES,
            (source as u32 | target as u32 | (block_bytes | from_stride | to_stride) as u32) & 15 == 0,
        );
        item += thread::grid_dim_x();
    }
}

entries! {
    /// See [`swap_blocks`]. `from`, `to`: addresses of `[tensors]` tensors each, on the device or of pinned memory; strides and sizes count bytes.
    pub struct Args(
        from: *const u64,
        to: *const u64,
        tensors: u32,
        block_bytes: usize,
        from_stride: usize,
        to_stride: usize,
        pairs: Pairs
    );
    swap_blocks_bytes {} [THREADS] => swap_blocks;
}
