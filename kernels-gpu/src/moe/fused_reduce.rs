//! The last step of the fused block: a token's weighted results added up in the order of its slots.
//!
//! A thread for 16 bytes of neighbouring columns of a token's results, which are f32 or, where that is allowed, rounded to elements or packed in f16; one by one
//! where rows are not multiples of that. Slots whose expert lives elsewhere, or is none, have no result and count as zero. Lines that have been
//! read may be given up in the second-level cache without being written to memory (`discard`), or leave it before others where there are far more than it holds. Slots are read four or, if there are more, eight at once.
//! What else nobody reads any more, the rows of `h`, is given up by the blocks of a token's last columns: in a stripe or not, they wait until the second product has ended.
//! Where the second product computes stripes of columns, blocks of a stripe begin when nothing of it is [left](Left), while the next ones are computed.

use super::fused_wgmma::GROUP as EXPONENT_COLUMNS;
use super::pairs::{Pairs, existing_tokens};
use super::progress::Left;
use cuda_std::second_level::Policy;
use cuda_std::vec::{B64, B128};
use cuda_std::{
    Float, Global, GlobalMut, bf16, dependent_launch, entries, f16, float, second_level, thread, unroll, vec, warp,
};

/// Threads of a block.
pub const THREADS: usize = 256;
/// The same for more than four slots, of which eight at once take more registers.
pub const EIGHT_THREADS: usize = 128;
/// The same of results of 16 bits.
pub const ROUNDED_THREADS: usize = 128;
/// Columns of a thread: 16 bytes of `partial`.
pub const COLUMNS: usize = 4;
/// The same of results of 16 bits.
pub const ROUNDED_COLUMNS: usize = 8;
/// Lines that have been read are given up without being written to memory: `partial` and its rows are multiples of 128 bytes.
pub const DISCARDED: u32 = 1;
/// Lines that have been read leave the second-level cache before others.
pub const LAST_READ: u32 = 2;
/// Bytes of a line of the second-level cache.
pub const LINE: usize = 128;

/// `out`: `[tokens, n]`, rows `out_row` apart; `partial`: `[tokens * slots, n]`, of f32 or elements, or if `PACKED` of f16, and behind them `[tokens * slots, ceil(n / 128)]` of f32,
/// by which those of 128 columns are multiplied; the others as in
/// [`fused::Args`](super::fused::Args), `discard` as in [`Args`]. Rows of `num_tokens` and beyond are left alone. Grid: (tokens, columns in
/// steps of a block's, `COLUMNS` a thread); block: up to [`THREADS`], of which 2 to the power of `across` (32 at least) have a token.
#[inline(always)]
pub unsafe fn fused_reduce<T: Float, P: Float, const COLUMNS: usize, const GROUP: usize, const PACKED: bool>(
    out: *mut T,
    partial: *mut P,
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
    discard: u32,
    across: u32,
    left: *mut u32,
    stripe: u32,
    dead: *mut u8,
    dead_bytes: u32,
) {
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
    let (out, lines, partial) = (GlobalMut::new(out), partial, Global::new(partial.cast_const()));
    // All threads wait before they end, so who waits for this launch waits for all before it, too: the next one may have its blocks ready.
    dependent_launch::launch_dependents();
    let tid = thread::thread_idx_x();
    let token = thread::block_idx_x() * (thread::block_dim_x() >> across) + (tid >> across);
    let base = (thread::block_idx_y() << across) * COLUMNS as u32;
    let column = base + (tid & ((1 << across) - 1)) * COLUMNS as u32;
    let exists = token < existing_tokens(tokens, num_tokens) && column < n;
    let there = |first| pairs.are_there::<GROUP>(token, first);
    let mut first = 0;
    let mut are_there = if exists && slots > 0 { there(0) } else { [false; GROUP] };
    let left = Left::new(left);
    // Of the last stripe nobody says that it is done.
    let mut early = u32::MAX;
    if left.is_kept() {
        // SAFETY: see `Args`.
        core::hint::assert_unchecked(stripe != 0);
        if base / stripe < (n - 1) / stripe {
            early = base / stripe;
        }
    }
    if early != u32::MAX {
        if tid == 0 {
            left.wait(early);
        }
        thread::sync_threads();
    } else {
        // Of those that have nothing to do, too: whoever comes next takes the end of this grid for the end of all before it.
        dependent_launch::wait();
    }
    if dead_bytes != 0 && early == u32::MAX && thread::block_idx_y() + 1 == thread::grid_dim_y() {
        // A line for each thread and step, all of the block's tokens.
        let each = thread::block_dim_x() >> across;
        let from = (thread::block_idx_x() * each).min(tokens);
        let bytes = (tokens - from).min(each) as usize * dead_bytes as usize;
        let lines = dead.wrapping_add(from as usize * dead_bytes as usize);
        let mut at = tid as usize * LINE;
        while at < bytes {
            second_level::discard(lines.wrapping_add(at));
            at += thread::block_dim_x() as usize * LINE;
        }
    }
    if !exists {
        return;
    }
    let whole = n.is_multiple_of(COLUMNS as u32);
    let mut sum = [0f32; COLUMNS];
    // Slots in groups, whose reads are in flight together; the sum is still one after the other.
    while first < slots {
        let row = (token as usize * slots as usize + first as usize) * n as usize + column as usize;
        let mut by = [0.0; GROUP];
        if PACKED {
            // Behind the results.
            let exponents = Global::new(partial.ptr(tokens as usize * slots as usize * n as usize).cast::<f32>());
            let (pair, groups) = (token as usize * slots as usize + first as usize, n.div_ceil(EXPONENT_COLUMNS));
            let own = pair * groups as usize + (column / EXPONENT_COLUMNS) as usize;
            unroll::<GROUP>(|s| {
                if are_there[s] {
                    by[s] = exponents.get(own + s * groups as usize);
                }
            });
        }
        if whole {
            let mut v = [B128([P::from_f32(0.0); COLUMNS]); GROUP];
            if discard == LAST_READ {
                unroll::<GROUP>(|s| {
                    v[s] = partial.get_if_for(are_there[s], row + s * n as usize, Policy::FIRST);
                });
            } else {
                unroll::<GROUP>(|s| {
                    if are_there[s] {
                        v[s] = partial.get_as(row + s * n as usize);
                    }
                });
            }
            // Zeroes of those that are not there, too, which change nothing: where both are under a condition they become one, and each read waits for the one before.
            unroll::<GROUP>(|s| {
                let v = v[s].to_f32();
                for i in 0..COLUMNS {
                    sum[i] = if PACKED { float::fma(v[i], by[s], sum[i]) } else { sum[i] + v[i] };
                }
            });
        } else {
            unroll::<GROUP>(|s| {
                if are_there[s] {
                    for i in 0..COLUMNS {
                        if column + (i as u32) < n {
                            let v = partial.get(row + s * n as usize + i).to_f32();
                            sum[i] = if PACKED { float::fma(v, by[s], sum[i]) } else { sum[i] + v };
                        }
                    }
                }
            });
        }
        if discard == DISCARDED {
            // Eight threads have read a line of their own.
            let lane = warp::lane_id();
            warp::sync_warp(0xff << (lane & 24));
            if lane.is_multiple_of(8) {
                unroll::<GROUP>(|s| {
                    if are_there[s] {
                        second_level::discard(lines.wrapping_add(row + s * n as usize));
                    }
                });
            }
        }
        first += GROUP as u32;
        if first < slots {
            are_there = there(first);
        }
    }
    let values = vec::from_f32::<T, COLUMNS>(sum);
    if whole
        && (out_row | n as usize).is_multiple_of(COLUMNS)
        && (out.ptr(0u32) as usize).is_multiple_of(COLUMNS * size_of::<T>())
    {
        let at = token as usize * out_row + column as usize;
        // 8 bytes at least, of which both kinds of rows are multiples.
        if COLUMNS * size_of::<T>() == 8 {
            out.set_as(at, B64(values));
        } else {
            out.set_as(at, B128(values));
        }
        return;
    }
    for i in 0..COLUMNS {
        if column + (i as u32) < n {
            out.set(token as usize * out_row + column as usize + i, values[i]);
        }
    }
}

entries! {
    /// Arguments of every `moe_fused_reduce_*` entry; see [`fused_reduce`].
    pub struct Args<T, P>(
        out: *mut T, partial: *mut P, topk_ids: *const i32, expert_map: *const i32, num_tokens: *const i32,
        out_row: usize, tokens: u32, top_k: u32, slots: u32, experts: u32, local: u32, shared_experts: u32, n: u32,
        /// What becomes of lines of `partial` that have been read: 0, [`DISCARDED`] or [`LAST_READ`].
        discard: u32,
        /// See [`fused_reduce`].
        across: u32,
        /// Of a second product that computes stripes of so many columns, a multiple of a block's: what is left of each, or null.
        left: *mut u32, stripe: u32,
        /// What nobody reads after the launch before, so many bytes of each token, or 0: lines of 128 bytes.
        dead: *mut u8, dead_bytes: u32,
    );
    moe_fused_reduce_f32 { type T = f32; type P = f32; } [256] => fused_reduce::<T, P, COLUMNS, 4, false>;
    moe_fused_reduce_f16 { type T = f16; type P = f32; } [256] => fused_reduce::<T, P, COLUMNS, 4, false>;
    moe_fused_reduce_bf16 { type T = bf16; type P = f32; } [256] => fused_reduce::<T, P, COLUMNS, 4, false>;
    moe_fused_reduce_eight_f32 { type T = f32; type P = f32; } [256, 4] => fused_reduce::<T, P, COLUMNS, 8, false>;
    moe_fused_reduce_eight_f16 { type T = f16; type P = f32; } [256, 4] => fused_reduce::<T, P, COLUMNS, 8, false>;
    moe_fused_reduce_eight_bf16 { type T = bf16; type P = f32; } [256, 4] => fused_reduce::<T, P, COLUMNS, 8, false>;
    moe_fused_reduce_packed_bf16 { type T = bf16; type P = f16; } [128] => fused_reduce::<T, P, ROUNDED_COLUMNS, 4, true>;
    moe_fused_reduce_rounded_f16 { type T = f16; type P = f16; } [128, 8] => fused_reduce::<T, P, ROUNDED_COLUMNS, 4, false>;
    moe_fused_reduce_rounded_bf16 { type T = bf16; type P = bf16; } [128, 8] => fused_reduce::<T, P, ROUNDED_COLUMNS, 4, false>;
}
