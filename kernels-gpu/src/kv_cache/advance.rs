//! A step of decoding, on the device: each sequence gets one token longer.
//!
//! What the kernels of a step need to know of a sequence follows from its length and its block table, so that nothing has
//! to come from the host between steps: the new token's position is the length so far, its slot is that position's in
//! the block that the table names, and the length grows by one. A thread for each sequence.

use crate::operand;
use cuda_std::{Global, GlobalMut, dependent_launch, entries, thread};

/// `lens`: `[n]`, keys so far, of which those below 1 belong to rows without a sequence; `positions`, `slots`, `counters`
/// (or null): `[n]`; `block_table`: `[n, max_blocks]`, rows `table_row` apart. A row without a sequence, one that has no
/// room left in the table, or one whose block is not below `blocks`, has slot -1; without a sequence or room its
/// position is -1 and its length stays. `status`, or null: counted up for each sequence that has slot -1.
#[inline(always)]
pub unsafe fn advance(
    lens: *mut i32,
    positions: *mut i32,
    slots: *mut i64,
    counters: *mut u64,
    status: *mut u32,
    block_table: *const i32,
    n: u32,
    max_blocks: u32,
    block_size: u32,
    blocks: u32,
    table_row: usize,
) {
    dependent_launch::begin();
    core::hint::assert_unchecked(block_size != 0);
    let counted = !counters.is_null();
    let i = thread::block_idx_x() * thread::block_dim_x() + thread::thread_idx_x();
    if i >= n {
        return;
    }
    let (lens, positions, slots) = (GlobalMut::new(lens), GlobalMut::new(positions), GlobalMut::new(slots));
    let len = lens.get(i);
    let (mut position, mut slot) = (-1, -1i64);
    if len > 0 {
        let (block, inside) = (len as u32 / block_size, len as u32 % block_size);
        if block < max_blocks {
            position = len;
            lens.set(i, len + 1);
            let page = Global::new(block_table).get(i as usize * table_row + block as usize);
            if page >= 0 && (page as u32) < blocks {
                slot = page as i64 * block_size as i64 + inside as i64;
            }
        }
    }
    operand::count(status, len > 0 && slot < 0);
    positions.set(i, position);
    slots.set(i, slot);
    if counted {
        GlobalMut::new(counters).set(i, if position < 0 { 0 } else { position as u64 });
    }
}

entries! {
    /// Arguments of the entry; see [`advance`].
    pub struct Args(
        lens: *mut i32, positions: *mut i32, slots: *mut i64, counters: *mut u64, status: *mut u32, block_table: *const i32,
        n: u32, max_blocks: u32, block_size: u32, blocks: u32, table_row: usize,
    );
    kv_cache_advance {} [256] => advance;
}
