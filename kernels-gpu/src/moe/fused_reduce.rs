//! The last step of the fused block: a token's weighted results added up in the order of its slots.
//!
//! A thread for four neighbouring columns of a token, or for one where rows are not multiples of four. Slots whose expert
//! lives elsewhere, or is none, have no result and count as zero.

use super::pairs::{INVALID, NOWHERE, Pairs, existing_tokens};
use cuda_std::vec::B128;
use cuda_std::{Float, Global, GlobalMut, bf16, dependent_launch, entries, f16, thread, vec};

/// Threads of a block.
pub const THREADS: usize = 256;
/// Columns of a thread.
pub const COLUMNS: usize = 4;

/// `out`: `[tokens, n]`, rows `out_row` apart; `partial`: `[tokens * slots, n]`; the others as in
/// [`fused::Args`](super::fused::Args). Rows of `num_tokens` and beyond are left alone. Grid: (tokens, columns in
/// steps of `COLUMNS THREADS`); block: [`THREADS`].
#[inline(always)]
pub unsafe fn fused_reduce<T: Float>(
    out: *mut T,
    partial: *const f32,
    topk_ids: *const i32,
    expert_map: *const i32,
    num_tokens: *const i32,
    out_row: usize,
    tokens: u32,
    top_k: u32,
    slots: u32,
    experts: u32,
    local: u32,
    shared_experts: u32,
    n: u32,
) {
    dependent_launch::wait();
    let pairs = Pairs {
        topk_ids: Global::new(topk_ids),
        expert_map: Global::new(expert_map),
        mapped: !expert_map.is_null(),
        top_k,
        slots,
        experts,
        local,
        shared: shared_experts,
    };
    let (out, partial) = (GlobalMut::new(out), Global::new(partial));
    let token = thread::block_idx_x();
    let column = (thread::block_idx_y() * THREADS as u32 + thread::thread_idx_x()) * COLUMNS as u32;
    if token >= existing_tokens(tokens, num_tokens) || column >= n {
        return;
    }
    let whole = n.is_multiple_of(COLUMNS as u32);
    let mut sum = [0f32; COLUMNS];
    for slot in 0..slots {
        let bin = pairs.bin_of(token, slot);
        if bin != NOWHERE && bin != INVALID {
            let at = (token as usize * slots as usize + slot as usize) * n as usize + column as usize;
            if whole {
                let B128(v) = partial.get_as::<B128<f32, COLUMNS>>(at);
                for i in 0..COLUMNS {
                    sum[i] += v[i];
                }
            } else {
                for i in 0..COLUMNS {
                    if column + (i as u32) < n {
                        sum[i] += partial.get(at + i);
                    }
                }
            }
        }
    }
    let values = vec::from_f32::<T, COLUMNS>(sum);
    for i in 0..COLUMNS {
        if column + (i as u32) < n {
            out.set(token as usize * out_row + column as usize + i, values[i]);
        }
    }
}

entries! {
    /// Arguments of every `moe_fused_reduce_*` entry; see [`fused_reduce`].
    pub struct Args<T>(
        out: *mut T, partial: *const f32, topk_ids: *const i32, expert_map: *const i32, num_tokens: *const i32,
        out_row: usize, tokens: u32, top_k: u32, slots: u32, experts: u32, local: u32, shared_experts: u32, n: u32,
    );
    moe_fused_reduce_f32 { type T = f32; } [256] => fused_reduce::<T>;
    moe_fused_reduce_f16 { type T = f16; } [256] => fused_reduce::<T>;
    moe_fused_reduce_bf16 { type T = bf16; } [256] => fused_reduce::<T>;
}
