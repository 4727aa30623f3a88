//! Copies whole blocks within the caches of all layers, in one launch.
//!
//! A block of threads copies 16 KiB of one tensor's block: each thread four vectors of 16 bytes, all loaded before the
//! first is stored. Grid: (pairs, tensors, pieces of 16 KiB). What is not aligned to 16 bytes goes byte by byte.

use crate::operand;
use cuda_std::vec::{B128, Streaming};
use cuda_std::{Global, GlobalMut, dependent_launch, entries, thread};

/// Threads of a block.
pub const THREADS: u32 = 256;
/// Vectors of a thread.
const VECTORS: usize = 4;
/// Bytes that a block of threads copies.
pub const PIECE_BYTES: usize = THREADS as usize * VECTORS * 16;

/// For each pair `(from, to)` and each tensor: `tensor[to] = tensor[from]`, where block `b` of a tensor is the
/// `block_bytes` bytes from `b * block_stride` on.
#[inline(always)]
pub unsafe fn copy_blocks(
    tensors: *const u64,
    pairs: *const i64,
    status: *mut u32,
    block_bytes: usize,
    block_stride: usize,
    blocks: usize,
) {
    dependent_launch::begin();
    let (pair, tensor, piece) = (thread::block_idx_x(), thread::block_idx_y(), thread::block_idx_z());
    let tid = thread::thread_idx_x() as usize;
    let pairs = Global::new(pairs).offset(2 * pair as usize);
    let (from, to) = (pairs.get(0u32), pairs.get(1u32));
    let base = Global::new(tensors).get(tensor);
    let known = (from as u64) < blocks as u64 && (to as u64) < blocks as u64;
    operand::count(status, !known && tensor == 0 && piece == 0 && tid == 0);
    if !known {
        return;
    }
    let source = Global::new(base as *const u8).offset(from as usize * block_stride);
    let target = GlobalMut::new(base as *mut u8).offset(to as usize * block_stride);
    let aligned = (base as u32 | block_bytes as u32 | block_stride as u32) & 15 == 0;
    copy_piece(source, target, block_bytes, piece as usize * PIECE_BYTES, aligned);
}

/// Copies the block's piece from byte `start` on, by a block of threads.
#[inline(always)]
pub(super) unsafe fn copy_piece(
    source: Global<u8>,
    target: GlobalMut<u8>,
    block_bytes: usize,
    start: usize,
    aligned: bool,
) {
    let tid = thread::thread_idx_x() as usize;
    if aligned {
        let at = |v: usize| start + (v * THREADS as usize + tid) * 16;
        let mut vectors = [B128([0u32; 4]); VECTORS];
        let mut v = 0;
        while v < VECTORS {
            if at(v) < block_bytes {
                vectors[v] = source.get_hinted(at(v), Streaming);
            }
            v += 1;
        }
        let mut v = 0;
        while v < VECTORS {
            if at(v) < block_bytes {
                // An address out of memory is generic to the compiler; the hint says global.
                target.set_hinted(at(v), vectors[v], Streaming);
            }
            v += 1;
        }
    } else {
        let end = if start + PIECE_BYTES < block_bytes { start + PIECE_BYTES } else { block_bytes };
        let mut at = start + tid;
        while at < end {
            target.set(at, source.get(at));
            at += THREADS as usize;
        }
    }
}

entries! {
    /// See [`copy_blocks`]. `tensors`: addresses of all layers' keys and values; `pairs`: `[pairs, 2]`; bytes count
    /// everything; `status`, counted up for pairs out of range, may be null.
    pub struct Args(
        tensors: *const u64,
        pairs: *const i64,
        status: *mut u32,
        block_bytes: usize,
        block_stride: usize,
        blocks: usize
    );
    copy_blocks_bytes {} [THREADS] => copy_blocks;
}
