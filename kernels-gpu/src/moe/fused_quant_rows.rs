//! Rows of the fused block quantised on the way: tokens before the first product, `h` before the second.
//!
//! * Scales of groups, e4m3: one for each row and 128 columns. A thread has 8 neighbouring columns, and 16 of them agree on the largest
//!   magnitude. Groups are dealt out to threads whatever their rows, so that blocks are whole however wide rows are.
//! * Scales of rows, e4m3 or int8: one for each row, perhaps after a multiplication with its expert's smoothing vector; then a token's row is quantised for each of
//!   its pairs. A block for each row, or a warp,
//!   whose threads keep four pieces of 8 columns (of f32 two); what there is beyond, with 16-bit elements from column 16384 on, is read twice, the second time from a cache.
//!
//! Where results lie in the order of a sorted list (`positions`; scales of groups), a token's row goes to the place of each of its pairs, quantised once. Rows that nobody will read, of pairs
//! without an expert here, are left alone.

use super::fused_reduce::LINE;
use super::pairs::{INVALID, NOWHERE, Pairs, existing_tokens};
use crate::row::quantise::{Quantised, amax, group_amax, scale_for};
use crate::row::team::{Op, scratch};
use crate::row::{GROUP, Piece, Team, elements};
use cuda_std::shared::Carver;
use cuda_std::vec::{B128, Streaming};
use cuda_std::{
    E4M3, Float, Global, GlobalMut, bf16, dependent_launch, entries, f16, float, integer, second_level, thread, unroll,
    warp,
};

/// Columns of a thread.
pub const COLUMNS: usize = 8;
/// Threads of a block for groups.
pub const GROUP_THREADS: usize = 256;
/// Groups of such a block.
pub const GROUPS: usize = GROUP_THREADS * COLUMNS / GROUP;
/// The most threads of a block with a row of its own.
pub const ROW_THREADS: usize = 512;
/// Pieces of [`COLUMNS`] columns that a thread of it keeps.
const KEPT: usize = 4;
/// Those of a row of `n` columns: as many as keep all of them.
pub const fn row_threads(n: usize) -> usize {
    let threads = n.div_ceil(COLUMNS * KEPT).next_multiple_of(32);
    if threads < ROW_THREADS { threads } else { ROW_THREADS }
}
/// Whether they keep all of a row of 16-bit elements.
pub const fn keeps(n: usize) -> bool {
    n <= row_threads(n) * COLUMNS * KEPT
}
/// Rows of a block: those of a warp each are several, or more time would go by with blocks that start than with what they do.
pub const fn block_rows(n: usize) -> usize {
    if row_threads(n) == 32 { 8 } else { 1 }
}

/// Its shared memory.
pub const SHARED_BYTES: usize = 32 * 4;

/// Rows are tokens.
pub const TOKENS: u32 = 0;
/// Rows are tokens, once for each pair.
pub const TOKENS_OF_PAIRS: u32 = 1;
/// Rows are those of `h`.
pub const PAIRS: u32 = 2;
/// Rows are tokens, which the launch before neither reads nor writes, nor what is written here: they are quantised beside it. All before it has ended when it lets
/// this one start.
pub const TOKENS_BESIDE: u32 = 3;

/// A row to be quantised.
#[derive(Clone, Copy)]
struct Row {
    /// Where it comes from.
    source: u32,
    /// Where it goes to: places of so many pairs from `first` on, or as they are.
    first: u32,
    count: u32,
}

/// Which rows there are.
#[derive(Clone, Copy)]
struct Rows {
    pairs: Pairs,
    tokens: u32,
    num_tokens: *const i32,
    positions: Global<i32>,
    sorted: bool,
}

impl Rows {
    /// Row number `row`, if it is needed.
    #[inline(always)]
    #[track_caller]
    unsafe fn row(self, row: u32, from: u32) -> Option<Row> {
        let (tokens, slots) = (existing_tokens(self.tokens, self.num_tokens), self.pairs.slots);
        if from == TOKENS || from == TOKENS_BESIDE {
            let (first, count) = if self.sorted { (row * slots, slots) } else { (row, 1) };
            return if row < tokens { Some(Row { source: row, first, count }) } else { None };
        }
        if row >= tokens * slots {
            return None;
        }
        let place = self.place(row);
        if place == u32::MAX || !self.sorted && matches!(self.pairs.bin(row), NOWHERE | INVALID) {
            return None;
        }
        // SAFETY: there are pairs.
        core::hint::assert_unchecked(slots != 0);
        Some(Row { source: if from == PAIRS { place } else { row / slots }, first: row, count: 1 })
    }

    /// The place of a pair, or the pair itself; `u32::MAX` if it has none.
    #[inline(always)]
    #[track_caller]
    unsafe fn place(self, pair: u32) -> u32 {
        if self.sorted { self.positions.get(pair) as u32 } else { pair }
    }
}

#[inline(always)]
fn listed(
    topk_ids: *const i32,
    expert_map: *const i32,
    num_tokens: *const i32,
    positions: *const i32,
    tokens: u32,
    top_k: u32,
    slots: u32,
    experts: u32,
    local: u32,
    shared: u32,
) -> Rows {
    let pairs = Pairs {
        topk_ids: Global::new(topk_ids),
        expert_map: Global::new(expert_map),
        mapped: !expert_map.is_null(),
        top_k,
        slots,
        experts,
        local,
        shared,
    };
    Rows { pairs, tokens, num_tokens, positions: Global::new(positions), sorted: !positions.is_null() }
}

/// [`COLUMNS`] columns of a row, piece number `index`; zeros where it has ended.
#[inline(always)]
#[track_caller]
unsafe fn load<T: Float>(x: Global<T>, index: u32, n: u32) -> [f32; COLUMNS] {
    let mut v = [0f32; COLUMNS];
    if size_of::<T>() == 2 {
        let piece = Piece::<COLUMNS, true>::new(index, n).load(x);
        unroll::<COLUMNS>(|j| v[j] = piece[j].to_f32());
    } else if index * (COLUMNS as u32) < n {
        unroll::<COLUMNS>(|j| v[j] = x.get(index as usize * COLUMNS + j).to_f32());
    }
    v
}

/// Scales of groups. Rows of `x` are `n` columns wide, a multiple of 8, and `x_row` apart; `from` says which they are: [`TOKENS`] or [`PAIRS`].
/// `out`: dense rows; `scales`: from row to row and from group to group. With `positions`, `[tokens, slots]` of
/// [`sort`](super::sort), rows of `out` and `h` are those of places, otherwise those of tokens or pairs. Grid: all rows' groups in
/// steps of [`GROUPS`]; block: [`GROUP_THREADS`].
#[inline(always)]
pub unsafe fn groups<T: Float>(
    x: *const T,
    out: *mut u8,
    scales: *mut f32,
    scale_row: usize,
    scale_group: usize,
    smooth: *const f32,
    shared_smooth: *const f32,
    positions: *const i32,
    topk_ids: *const i32,
    expert_map: *const i32,
    num_tokens: *const i32,
    tokens: u32,
    top_k: u32,
    slots: u32,
    experts: u32,
    local: u32,
    shared: u32,
    n: u32,
    x_row: usize,
    from: u32,
    dead: u32,
) {
    let _ = (smooth, shared_smooth, dead);
    // As below.
    dependent_launch::launch_dependents();
    dependent_launch::wait();
    let rows = listed(topk_ids, expert_map, num_tokens, positions, tokens, top_k, slots, experts, local, shared);
    let lanes = const { (GROUP / COLUMNS) as u32 };
    let group = thread::block_idx_x() * GROUPS as u32 + thread::thread_idx_x() / lanes;
    // Not zero, or there would be nothing to do.
    let each = n.div_ceil(GROUP as u32).max(1);
    let found = rows.row(group / each, from);
    let index = group % each * lanes + thread::thread_idx_x() % lanes;
    // All lanes take part in what follows.
    let row = found.unwrap_or(Row { source: 0, first: 0, count: 0 });
    let mut v = [0f32; COLUMNS];
    if found.is_some() {
        v = load(Global::new(x).offset(row.source as usize * x_row), index, n);
    }
    let scale = scale_for::<E4M3>(group_amax(v));
    let first = index.is_multiple_of(lanes);
    let factor = float::recip(scale);
    for i in 0..row.count {
        // A token's row is its own place without a list.
        let place = rows.place(row.first + i);
        if place == u32::MAX {
            continue;
        }
        if first {
            let at = place as usize * scale_row + (index / lanes) as usize * scale_group;
            GlobalMut::new(scales).set(at, scale);
        }
        let out = GlobalMut::new(out.cast::<E4M3>()).offset(place as usize * n as usize);
        Piece::<COLUMNS, true>::new(index, n).store_quantised(out, v, factor);
    }
}

/// Scales of rows, `scale_row` apart; otherwise as [`groups`], but never in the order of a sorted list. `SMOOTH`: with `smooth`: `[local, n]` or null, and
/// `shared_smooth`: `[shared, n]` or null; then `from` is [`TOKENS_OF_PAIRS`] or [`PAIRS`]. Grid: rows in steps of [`block_rows`]; block: [`row_threads`] for each of those,
/// with the same `y`; shared memory: [`SHARED_BYTES`].
#[inline(always)]
pub unsafe fn rows<T: Float, Q: Quantised, const SMOOTH: bool>(
    x: *const T,
    out: *mut u8,
    scales: *mut f32,
    scale_row: usize,
    scale_group: usize,
    smooth: *const f32,
    shared_smooth: *const f32,
    positions: *const i32,
    topk_ids: *const i32,
    expert_map: *const i32,
    num_tokens: *const i32,
    tokens: u32,
    top_k: u32,
    slots: u32,
    experts: u32,
    local: u32,
    shared: u32,
    n: u32,
    x_row: usize,
    from: u32,
    dead: u32,
) {
    let _ = (scale_group, positions);
    // All threads wait before they end, so who waits for this launch waits for all before it, too: the next one may have its blocks ready.
    dependent_launch::launch_dependents();
    if from != TOKENS_BESIDE {
        dependent_launch::wait();
    }
    let none = core::ptr::null();
    let rows = listed(topk_ids, expert_map, num_tokens, none, tokens, top_k, slots, experts, local, shared);
    let number = thread::block_idx_x() * thread::block_dim_y() + thread::thread_idx_y();
    if let Some(row) = rows.row(number, from) {
        quantise_row::<T, Q, SMOOTH>(x, x_row, n, out, scales, scale_row, smooth, shared_smooth, rows, row, dead != 0);
    }
    if from == TOKENS_BESIDE {
        dependent_launch::wait();
    }
}

/// One of those rows, by its team.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
unsafe fn quantise_row<T: Float, Q: Quantised, const SMOOTH: bool>(
    x: *const T,
    x_row: usize,
    n: u32,
    out: *mut u8,
    scales: *mut f32,
    scale_row: usize,
    smooth: *const f32,
    shared_smooth: *const f32,
    rows: Rows,
    row: Row,
    dead: bool,
) {
    let local = rows.pairs.local;
    let bin = if SMOOTH { rows.pairs.bin(row.first) } else { 0 };
    let (smooth, bin) = if bin < local { (smooth, bin) } else { (shared_smooth, bin - local) };
    let smoothed = SMOOTH && !smooth.is_null();
    let smooth = Global::new(smooth).offset(if smoothed { bin as usize * n as usize } else { 0 });
    let lines = x.cast_mut().wrapping_add(row.source as usize * x_row);
    let x = Global::new(lines.cast_const());
    let team = Team::current();
    let scratch = scratch::<1, 32>(&mut Carver::new());
    let smoothed_by = |index: u32, mut v: [f32; COLUMNS]| {
        if smoothed && index * (COLUMNS as u32) < n {
            unroll::<COLUMNS>(|j| v[j] *= smooth.get(index as usize * COLUMNS + j));
        }
        v
    };
    let load = |index: u32| smoothed_by(index, load(x, index, n));
    let pieces = n / COLUMNS as u32;
    // The first pieces stay in registers, and are asked for together: those of 16 bits as they come, to be widened where they are used.
    // Of f32 they are half as many.
    let keeps = const { if size_of::<T>() == 2 { KEPT } else { KEPT / 2 } };
    let index_of = |i: usize| team.rank + i as u32 * team.size;
    let (mut words, mut wide) = ([B128([0; 4]); KEPT], [[0f32; COLUMNS]; KEPT]);
    unroll::<KEPT>(|i| {
        if size_of::<T>() != 2 {
            if i < keeps {
                wide[i] = load(index_of(i));
            }
        } else if index_of(i) < pieces {
            words[i] = x.get_hinted(index_of(i) as usize * COLUMNS, Streaming);
        }
    });
    let own = |i: usize| {
        if size_of::<T>() != 2 {
            return wide[i];
        }
        let v = elements::<T, COLUMNS>(B128(words[i].0.map(integer::opaque)));
        smoothed_by(index_of(i), v.map(T::to_f32))
    };
    let mut largest = 0f32;
    unroll::<KEPT>(|i| {
        if i < keeps {
            largest = float::max(largest, amax(own(i)));
        }
    });
    let mut index = index_of(keeps);
    while index < pieces {
        largest = float::max(largest, amax(load(index)));
        index += team.size;
    }
    let [largest] = team.reduce::<1, 32>([largest], [Op::Max], scratch);
    if dead {
        // All of a block have passed the reduction's barrier; lanes of a warp with a row of its own pass this one. What they have read is in registers.
        warp::sync_warp(u32::MAX);
        let mut at = team.rank as usize * LINE;
        while at < n as usize * size_of::<T>() {
            second_level::discard(lines.wrapping_byte_add(at));
            at += team.size as usize * LINE;
        }
    }
    let scale = scale_for::<Q>(largest);
    let factor = float::recip(scale);
    if team.rank == 0 {
        GlobalMut::new(scales).set(row.first as usize * scale_row, scale);
    }
    let out = GlobalMut::new(out.cast::<Q>()).offset(row.first as usize * n as usize);
    unroll::<KEPT>(|k| {
        if k < keeps {
            Piece::<COLUMNS, true>::new(index_of(k), n).store_quantised(out, own(k), factor);
        }
    });
    let mut index = index_of(keeps);
    while index < pieces {
        Piece::<COLUMNS, true>::new(index, n).store_quantised(out, load(index), factor);
        index += team.size;
    }
}

entries! {
    /// Arguments of [`groups`] and [`rows`].
    pub struct Args<T>(
        x: *const T, out: *mut u8, scales: *mut f32, scale_row: usize, scale_group: usize, smooth: *const f32,
        shared_smooth: *const f32, positions: *const i32, topk_ids: *const i32, expert_map: *const i32,
        num_tokens: *const i32, tokens: u32, top_k: u32, slots: u32, experts: u32, local: u32, shared: u32, n: u32,
        x_row: usize, from: u32,
        /// Whether lines of `x` are given up when they have been read, of [rows](rows) that [threads keep](keeps): nobody reads them any more, and they are multiples of 128 bytes.
        dead: u32,
    );
    moe_fused_quant_groups_e4m3_f32 { type T = f32; } [GROUP_THREADS] => groups::<T>;
    moe_fused_quant_groups_e4m3_f16 { type T = f16; } [GROUP_THREADS] => groups::<T>;
    moe_fused_quant_groups_e4m3_bf16 { type T = bf16; } [GROUP_THREADS] => groups::<T>;
    moe_fused_quant_rows_e4m3_f32 { type T = f32; } [ROW_THREADS] => rows::<T, E4M3, false>;
    moe_fused_quant_rows_e4m3_f16 { type T = f16; } [ROW_THREADS, 3] => rows::<T, E4M3, false>;
    moe_fused_quant_rows_e4m3_bf16 { type T = bf16; } [ROW_THREADS, 3] => rows::<T, E4M3, false>;
    moe_fused_quant_rows_i8_f32 { type T = f32; } [ROW_THREADS] => rows::<T, i8, false>;
    moe_fused_quant_rows_i8_f16 { type T = f16; } [ROW_THREADS, 3] => rows::<T, i8, false>;
    moe_fused_quant_rows_i8_bf16 { type T = bf16; } [ROW_THREADS, 3] => rows::<T, i8, false>;
    moe_fused_quant_rows_smooth_e4m3_f32 { type T = f32; } [ROW_THREADS] => rows::<T, E4M3, true>;
    moe_fused_quant_rows_smooth_e4m3_f16 { type T = f16; } [ROW_THREADS] => rows::<T, E4M3, true>;
    moe_fused_quant_rows_smooth_e4m3_bf16 { type T = bf16; } [ROW_THREADS] => rows::<T, E4M3, true>;
    moe_fused_quant_rows_smooth_i8_f32 { type T = f32; } [ROW_THREADS] => rows::<T, i8, true>;
    moe_fused_quant_rows_smooth_i8_f16 { type T = f16; } [ROW_THREADS] => rows::<T, i8, true>;
    moe_fused_quant_rows_smooth_i8_bf16 { type T = bf16; } [ROW_THREADS] => rows::<T, i8, true>;
}
