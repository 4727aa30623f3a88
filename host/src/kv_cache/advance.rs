//! A step of decoding, on the device: positions, slots and lengths of the next tokens.
//!
//! With it a decode step needs nothing from the host that changes from step to step, and a captured graph of it can be
//! launched again and again: the block table has to be filled ahead, lengths grow by themselves.

use crate::check::{Call, product};
use crate::device::{Geometry, Stream};
use crate::error::Result;
use crate::kernels::kv_cache::advance as kernel;
use crate::kv_cache::CacheShape;
use crate::tensor::Tensor;
use cuda_std::Entry;

pub use kernel::Args;

/// The entry.
pub const fn entry() -> Entry<Args> {
    kernel::kv_cache_advance::ENTRY
}

/// How to launch it for `n` sequences.
pub const fn geometry(n: u32) -> Geometry {
    Geometry::linear(n.div_ceil(256), if n < 256 { n } else { 256 }).dependent()
}

/// Launches on raw pointers (layer L1), as [`kernel::advance`](crate::kernels::kv_cache::advance::advance) documents.
///
/// # Errors
/// Those of [`Stream::launch`].
///
/// # Safety
/// The pointers are device memory of the documented sizes, aligned to their element types, until the launch is done; none
/// overlaps another; `block_size` is not 0, and `max_blocks` times that at most 2^31 - 1.
pub unsafe fn launch(stream: &Stream, args: &Args) -> Result<()> {
    // SAFETY: forwarded to the caller.
    unsafe { stream.launch(&entry(), &geometry(args.n), args) }
}

/// Makes each sequence one token longer: `positions[i] = lens[i]`, `slots[i]` is that position's slot,
/// `counters[i] = positions[i]`, `lens[i] += 1`.
///
/// `lens`, `positions`, `slots` and `counters` (such as [offsets](crate::sampling::SamplingOptions::offset) of random numbers) are
/// `[n]`, dense; `block_table` is `[n, max_blocks]`. `shape` is that of the cache. A row with a length below 1 has no sequence;
/// one whose blocks are all full cannot grow. Both get position -1, slot -1 and counter 0, and keep their length. Where the table
/// names no block of the cache the slot alone is -1: position, counter and length go on. Sequences that get no slot are counted up in
/// `status`, `[1]`, if there is one.
///
/// # Errors
/// [`Shape`](crate::Error::Shape), [`Stride`](crate::Error::Stride), [`Overlap`](crate::Error::Overlap),
/// [`WrongDevice`](crate::Error::WrongDevice); [`Value`](crate::Error::Value) for a block size of 0, or blocks that hold more than
/// 2³¹ - 1 tokens of a sequence.
#[expect(clippy::too_many_arguments, reason = "four outputs of one operation, and what counts its errors")]
pub fn advance(
    stream: &Stream,
    lens: &mut Tensor<i32>,
    positions: &mut Tensor<i32>,
    slots: &mut Tensor<i64>,
    counters: Option<&mut Tensor<u64>>,
    status: Option<&mut Tensor<u32>>,
    block_table: &Tensor<i32>,
    shape: CacheShape,
) -> Result<()> {
    let mut call = Call::new("advance", stream);
    let &[n, max_blocks] = block_table.shape() else {
        return Err(call.bad_shape("block_table", block_table.shape(), "[n, max_blocks]"));
    };
    call.value(shape.block_size > 0, "shape", "a cache of blocks that are not empty", shape.block_size)?;
    call.same_shape("lens", lens.shape(), &[n])?;
    call.contiguous("lens", lens)?;
    call.same_shape("positions", positions.shape(), &[n])?;
    call.contiguous("positions", positions)?;
    call.same_shape("slots", slots.shape(), &[n])?;
    call.contiguous("slots", slots)?;
    if let Some(counters) = &counters {
        call.same_shape("counters", counters.shape(), &[n])?;
        call.contiguous("counters", counters)?;
    }
    if let Some(status) = &status {
        call.same_shape("status", status.shape(), &[1])?;
    }
    let rows = call.rows("block_table", block_table)?;
    // Positions are 32-bit numbers, and so is the length after the last of them.
    call.count("block_table", product(&[max_blocks, shape.block_size]))?;
    let args = Args {
        lens: call.write("lens", lens)?.cast(),
        positions: call.write("positions", positions)?.cast(),
        slots: call.write("slots", slots)?.cast(),
        counters: call.write_opt("counters", counters)?.cast(),
        status: call.write_opt("status", status)?.cast(),
        block_table: call.read("block_table", block_table)?.cast(),
        n: call.count("block_table", n)?,
        max_blocks: call.count("block_table", max_blocks)?,
        block_size: call.count("shape", shape.block_size)?,
        blocks: call.count("shape", shape.blocks)?,
        table_row: rows.stride,
    };
    call.check_overlap()?;
    // SAFETY: shapes, devices and overlap were checked above; lengths and block numbers are checked by the kernel.
    unsafe { launch(stream, &args) }
}
