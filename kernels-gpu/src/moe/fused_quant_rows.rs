//! Rows of the fused block quantised on the way: tokens before the first product, `h` before the second.
//!
//! * e4m3, a scale for each row and 128 columns: a thread has 8 neighbouring columns, and 16 of them agree on the largest magnitude by
//!   shuffles.
//! * int8, a scale for each row, after a multiplication with its expert's smoothing vector: a block for each row, which reads it twice, the
//!   second time from a cache. Experts smooth differently, so a token's row becomes one for each of its pairs.
//!
//! Rows that nobody will read, of pairs without an expert here, are left alone.

use super::pairs::{INVALID, NOWHERE, Pairs, existing_tokens};
use crate::row::quantise::{amax, finite, group_amax, scale_for};
use crate::row::team::{Op, scratch};
use crate::row::{GROUP, Piece, Team};
use cuda_std::shared::Carver;
use cuda_std::{E4M3, Float, Global, GlobalMut, bf16, dependent_launch, entries, f16, float, thread, unroll};

/// The most threads of a block for groups.
pub const MAX_THREADS: usize = 256;
/// Columns of a thread.
pub const COLUMNS: usize = 8;
/// Threads of a block with a row of its own.
pub const ROW_THREADS: usize = 256;
/// Its shared memory.
pub const SHARED_BYTES: usize = 32 * 4;

/// Which rows there are.
#[derive(Clone, Copy)]
struct Rows {
    pairs: Pairs,
    tokens: u32,
    num_tokens: *const i32,
}

impl Rows {
    /// The bin of a pair, if its row is needed.
    #[inline(always)]
    #[track_caller]
    unsafe fn bin(self, pair: u32) -> Option<u32> {
        if pair >= existing_tokens(self.tokens, self.num_tokens) * self.pairs.top_k {
            return None;
        }
        let bin = self.pairs.bin(pair);
        if bin == NOWHERE || bin == INVALID { None } else { Some(bin) }
    }
}

#[inline(always)]
fn listed(
    topk_ids: *const i32,
    expert_map: *const i32,
    num_tokens: *const i32,
    tokens: u32,
    top_k: u32,
    experts: u32,
    local: u32,
) -> Rows {
    let pairs = Pairs {
        topk_ids: Global::new(topk_ids),
        expert_map: Global::new(expert_map),
        mapped: !expert_map.is_null(),
        top_k,
        slots: top_k,
        experts,
        local,
        shared: 0,
    };
    Rows { pairs, tokens, num_tokens }
}

/// `x`: `[tokens, n]` if not `by_pair`, else `[tokens * top_k, n]`, rows `x_row` apart; `out`: the same, dense; `scales`: `[.., n / 128]`,
/// dense. `n` is a multiple of 8. Grid: (rows, columns); block: a multiple of 32 threads.
#[inline(always)]
pub unsafe fn groups<T: Float>(
    x: *const T,
    out: *mut E4M3,
    scales: *mut f32,
    topk_ids: *const i32,
    expert_map: *const i32,
    num_tokens: *const i32,
    tokens: u32,
    top_k: u32,
    experts: u32,
    local: u32,
    n: u32,
    x_row: usize,
    by_pair: u32,
) {
    dependent_launch::wait();
    dependent_launch::launch_dependents();
    let row = thread::block_idx_x();
    let rows = listed(topk_ids, expert_map, num_tokens, tokens, top_k, experts, local);
    let needed = if by_pair != 0 { rows.bin(row).is_some() } else { row < existing_tokens(tokens, num_tokens) };
    if !needed {
        return;
    }
    let index = thread::block_idx_y() * thread::block_dim_x() + thread::thread_idx_x();
    let at = Piece::<COLUMNS, true>::new(index, n);
    let row = row as usize;
    let mut v = [0f32; COLUMNS];
    if size_of::<T>() == 2 {
        let piece = at.load(Global::new(x).offset(row * x_row));
        unroll::<COLUMNS>(|j| v[j] = piece[j].to_f32());
    } else {
        let from = Global::new(x).offset(row * x_row);
        unroll::<COLUMNS>(|j| {
            if at.has(j) {
                v[j] = from.get(index as usize * COLUMNS + j).to_f32();
            }
        });
    }
    let scale = scale_for::<E4M3>(group_amax(v));
    let lanes = const { (GROUP / COLUMNS) as u32 };
    if index.is_multiple_of(lanes) && index * (COLUMNS as u32) < n {
        GlobalMut::new(scales).set(row * n.div_ceil(GROUP as u32) as usize + (index / lanes) as usize, scale);
    }
    at.store_quantised(GlobalMut::new(out).offset(row * n as usize), v, float::recip(scale));
}

/// `x`: `[tokens, n]` if not `by_pair`, else `[tokens * top_k, n]`, rows `x_row` apart; `smooth`: `[local, n]` or null; `out`: `[tokens *
/// top_k, n]`, dense; `scales`: `[tokens * top_k]`. Grid: pairs; block: [`ROW_THREADS`]; shared memory: [`SHARED_BYTES`].
#[inline(always)]
pub unsafe fn rows<T: Float>(
    x: *const T,
    smooth: *const f32,
    out: *mut i8,
    scales: *mut f32,
    topk_ids: *const i32,
    expert_map: *const i32,
    num_tokens: *const i32,
    tokens: u32,
    top_k: u32,
    experts: u32,
    local: u32,
    n: u32,
    x_row: usize,
    by_pair: u32,
) {
    dependent_launch::wait();
    dependent_launch::launch_dependents();
    let pair = thread::block_idx_x();
    let rows = listed(topk_ids, expert_map, num_tokens, tokens, top_k, experts, local);
    let Some(bin) = rows.bin(pair) else {
        return;
    };
    // SAFETY: there are pairs.
    core::hint::assert_unchecked(top_k != 0);
    let source = if by_pair != 0 { pair } else { pair / top_k };
    let smoothed = !smooth.is_null();
    let (x, smooth) = (Global::new(x).offset(source as usize * x_row), Global::new(smooth));
    let smooth = if smoothed { smooth.offset(bin as usize * n as usize) } else { smooth };
    let out = GlobalMut::new(out).offset(pair as usize * n as usize);
    let team = Team::current();
    let scratch = scratch::<1, 32>(&mut Carver::new());
    let at = |i: u32| Piece::<4, false>::new(i * team.size + team.rank, n);
    let load = |i: u32| {
        let (piece, factors) = (at(i).load(x), at(i).load_factors(smooth));
        let mut v = [0f32; 4];
        unroll::<4>(|j| v[j] = piece[j].to_f32() * factors[j]);
        v
    };
    let rounds = n.div_ceil(4).next_multiple_of(32).div_ceil(team.size);
    let mut largest = 0f32;
    for i in 0..rounds {
        largest = float::max(largest, amax(load(i)));
    }
    let [largest] = team.reduce::<1, 32>([largest], [Op::Max], scratch);
    let scale = scale_for::<i8>(largest);
    if team.rank == 0 {
        GlobalMut::new(scales).set(pair, scale);
    }
    let factor = float::recip(scale);
    for i in 0..rounds {
        at(i).store_quantised(out, finite::<i8, 4>(load(i)), factor);
    }
}

/// To e4m3.
pub mod e4m3 {
    use super::*;
    entries! {
        /// Arguments of [`groups`].
        pub struct Args<T>(
            x: *const T, out: *mut E4M3, scales: *mut f32, topk_ids: *const i32, expert_map: *const i32,
            num_tokens: *const i32, tokens: u32, top_k: u32, experts: u32, local: u32, n: u32, x_row: usize,
            by_pair: u32,
        );
        moe_fused_quant_rows_e4m3_f32 { type T = f32; } [MAX_THREADS] => groups::<T>;
        moe_fused_quant_rows_e4m3_f16 { type T = f16; } [MAX_THREADS] => groups::<T>;
        moe_fused_quant_rows_e4m3_bf16 { type T = bf16; } [MAX_THREADS] => groups::<T>;
    }
}

/// To int8.
pub mod int8 {
    use super::*;
    entries! {
        /// Arguments of [`rows`].
        pub struct Args<T>(
            x: *const T, smooth: *const f32, out: *mut i8, scales: *mut f32, topk_ids: *const i32,
            expert_map: *const i32, num_tokens: *const i32, tokens: u32, top_k: u32, experts: u32, local: u32, n: u32,
            x_row: usize, by_pair: u32,
        );
        moe_fused_quant_rows_i8_f32 { type T = f32; } [ROW_THREADS] => rows::<T>;
        moe_fused_quant_rows_i8_f16 { type T = f16; } [ROW_THREADS] => rows::<T>;
        moe_fused_quant_rows_i8_bf16 { type T = bf16; } [ROW_THREADS] => rows::<T>;
    }
}
