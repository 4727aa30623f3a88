//! Operands of 8-bit products: rows of numbers to e4m3 or int8 with scales (see [`quantise`]).
//!
//! * A scale for each row, optionally after a multiplication with a factor for each column (smoothing): a block for each row keeps it in
//!   registers, `N` pieces a thread (eight up to 64 KiB of 16 bits), until the largest magnitude is known; longer rows (`N = 0`) are read twice. Few long rows have
//!   a cluster of blocks each on Hopper.
//! * A scale for each row and group of 128 columns: one piece a thread; a group is 16 lanes (32 for f32), which agree on its largest
//!   magnitude. Many rows take two pieces a thread (`many`), of the same group: fewer steps for it, and more bytes under way.
//! * A scale for each block of 128 by 128: for weights, ahead of time. A block of threads reads its part twice.

use crate::row::quantise::{self, Quantised, amax, scale_for};
use crate::row::team::{Op, SPREAD, Spread, scratch, spread_bytes};
use crate::row::{GROUP, Mine, Piece, Team, packed, zero};
use cuda_std::shared::Carver;
use cuda_std::vec::StoreStreaming;
use cuda_std::{E4M3, Float, Global, GlobalMut, dependent_launch, entries, float, shared, thread};

/// The most warps of a block with a row of its own.
pub const MAX_WARPS: usize = 32;
/// Its shared memory.
pub const SHARED_BYTES: usize = MAX_WARPS * 4;
/// The most threads of a block of a cluster with a row of its own, and its shared memory.
pub const CLUSTER_THREADS: u32 = MAX_WARPS as u32 * 32 / SPREAD;
/// See there.
pub const CLUSTER_SHARED_BYTES: usize = spread_bytes(1, MAX_WARPS);
/// The most threads of a block with a row of its own, eight pieces each: two blocks hold their rows at a time.
pub const X8_THREADS: u32 = 512;
/// Up to so many rows start at once on a GPU, and the wait for the kernels before is what takes time: addresses are known before it.
const FEW_ROWS: u32 = 264;
/// The most threads of a block where each has one piece.
pub const MAX_THREADS: usize = 256;
/// Threads of a block for a block of weights.
pub const BLOCK_THREADS: usize = 256;

/// A team of a multiple of 32 threads for each row: a block, or a warp of several. `x`, `out`: `[rows, n]`; `smooth`: `[n]` or null; `scales`: `[rows]`.
#[inline(always)]
pub unsafe fn rows<T: Float, Q: Quantised, const V: usize, const N: usize, const VEC: bool>(
    x: *const T,
    smooth: *const f32,
    out: *mut Q,
    scales: *mut f32,
    n: u32,
    x_stride: usize,
    out_stride: usize,
) {
    // Two pieces a thread are for few rows, where every number that has to be read counts.
    let number = match N {
        2 => thread::block_idx_x(),
        _ => thread::block_idx_x() * thread::block_dim_y() + thread::thread_idx_y(),
    } as usize;
    let (x, smooth) = (Global::new(x).offset(number * x_stride), Global::new(smooth));
    // Where registers are few they are not for what is needed last.
    let of_row = || if N > 4 { thread::block_idx_x() as usize } else { number };
    let row = || GlobalMut::new(out).offset(of_row() * out_stride);
    let early_row = if N > 4 { GlobalMut::new(out) } else { row() };
    let scales = GlobalMut::new(scales);
    let team = Team::current();
    let scratch = scratch::<1, MAX_WARPS>(&mut Carver::new());
    let piece = |i: usize| Piece::<V, VEC>::new(i as u32 * team.size + team.rank, n);
    let mut at = [[core::ptr::null::<u8>(); 1]; N];
    // (Eight addresses have no registers.)
    let early = const { VEC && N > 0 && N <= 4 };
    if early {
        cuda_std::unroll::<N>(|i| at[i] = [x.ptr(piece(i).first()).cast()]);
        let word = shared::address(scratch.ptr(0usize).cast_const());
        at = dependent_launch::known_here_if(thread::grid_dim_x() <= FEW_ROWS, at, [word]);
    }
    dependent_launch::begin();
    let mut held = [[zero::<T>(); V]; N];
    cuda_std::unroll::<N>(|i| {
        let here = Piece::<V, VEC>::new(0, if piece(i).has(0) { V as u32 } else { 0 });
        held[i] = if early { here.load(Global::new(at[i][0].cast())) } else { piece(i).load(x) };
    });
    let widened = |at: Piece<V, VEC>, values: [T; V]| {
        let factors = at.load_factors(smooth);
        let mut v = [0f32; V];
        cuda_std::unroll::<V>(|j| v[j] = values[j].to_f32() * factors[j]);
        v
    };
    // Where a row is held, it stays packed, so that there are registers for more threads.
    let own = |i: usize| widened(piece(i), packed::<T, V, VEC>(held[i]));
    let again = |i: usize| widened(piece(i), piece(i).load(x));
    let rounds = n.div_ceil(V as u32).div_ceil(team.size) as usize;
    let mut largest = 0.0;
    cuda_std::unroll::<N>(|i| largest = float::max(largest, amax(own(i))));
    if N == 0 {
        let mut i = 0;
        while i < rounds {
            largest = float::max(largest, amax(again(i)));
            i += 1;
        }
    }
    let [largest] = team.reduce::<1, MAX_WARPS>([largest], [Op::Max], scratch);
    let scale = scale_for::<Q>(largest);
    let factor = float::recip(scale);
    scales.set_streaming_if(team.rank == 0, of_row(), scale);
    let out = if N > 4 { row() } else { early_row };
    cuda_std::unroll::<N>(|i| piece(i).store_quantised_at_once(out, own(i), factor));
    if N == 0 {
        let mut i = 0;
        while i < rounds {
            piece(i).store_quantised(out, again(i), factor);
            i += 1;
        }
    }
}

/// As [`rows`], of aligned rows, a cluster of [`SPREAD`] blocks for each on Hopper, of at least as many threads together as the row has with `N` pieces a thread, a multiple of 32 each: few long rows take what one
/// multiprocessor takes to read one, 64 bytes a cycle. The same bits.
#[inline(always)]
pub unsafe fn rows_cluster<T: Float, Q: Quantised, const V: usize, const N: usize>(
    x: *const T,
    smooth: *const f32,
    out: *mut Q,
    scales: *mut f32,
    n: u32,
    x_stride: usize,
    out_stride: usize,
) {
    let size = n.div_ceil(const { (V * N) as u32 }).next_multiple_of(32);
    let team = Spread::<1, MAX_WARPS>::new(size, &mut Carver::new());
    let number = (thread::block_idx_x() / SPREAD) as usize;
    let (x, smooth) = (Global::new(x).offset(number * x_stride), Global::new(smooth));
    let (out, scales) = (GlobalMut::new(out).offset(number * out_stride), GlobalMut::new(scales));
    let n = if team.live { n } else { 0 };
    let piece = |i: usize| Piece::<V, true>::new(i as u32 * team.team.size + team.team.rank, n);
    let mut at = [[core::ptr::null::<u8>(); 2]; N];
    cuda_std::unroll::<N>(|i| {
        let column = piece(i).first();
        at[i] = [x.ptr(column).cast(), out.ptr(column).cast_const().cast()];
    });
    team.meet();
    let at = dependent_launch::known_here_if(true, at, team.words());
    dependent_launch::begin();
    let here = |i: usize| Piece::<V, true>::new(0, if piece(i).has(0) { V as u32 } else { 0 });
    let mut held = [[zero::<T>(); V]; N];
    cuda_std::unroll::<N>(|i| held[i] = here(i).load(Global::new(at[i][0].cast())));
    let (mut values, mut largest) = ([[0f32; V]; N], 0.0);
    cuda_std::unroll::<N>(|i| {
        let factors = piece(i).load_factors(smooth);
        cuda_std::unroll::<V>(|j| values[i][j] = held[i][j].to_f32() * factors[j]);
        largest = float::max(largest, amax(values[i]));
    });
    let [largest] = team.reduce_warps([Op::Max.over_warp(largest)], [Op::Max]);
    let scale = scale_for::<Q>(largest);
    let factor = float::recip(scale);
    scales.set_streaming_if(team.team.rank == 0, number, scale);
    cuda_std::unroll::<N>(|i| {
        let out = GlobalMut::new(at[i][1].cast_mut().cast::<Q>());
        here(i).store_quantised_at_once(out, values[i], factor);
    });
}

/// `x`, `out`: `[rows, n]`; `scales`: `[rows, groups]`, strides in elements. Block: `(pieces, rows)`, the first a multiple of 32; grid:
/// `(pieces, rows, rows)`.
#[inline(always)]
pub unsafe fn groups<T: Float, Q: Quantised, const V: usize, const VEC: bool>(
    x: *const T,
    out: *mut Q,
    scales: *mut f32,
    rows: u32,
    n: u32,
    x_stride: usize,
    out_stride: usize,
    scale_row_stride: usize,
    scale_group_stride: usize,
) {
    let (Mine::<V, VEC> { piece: at, index, n }, [x, out, scale_place]) = Mine::begin(rows, n, |row, column, index| {
        let group = (index / const { (GROUP / V) as u32 }) as usize;
        let scales = scales.wrapping_add(row * scale_row_stride + group * scale_group_stride);
        let out = out.wrapping_add(row * out_stride + column);
        [x.wrapping_add(row * x_stride + column).cast(), out.cast(), scales.cast()]
    });
    let piece = at.load(Global::new(x.cast::<T>()));
    let mut v = [0f32; V];
    cuda_std::unroll::<V>(|j| v[j] = piece[j].to_f32());
    let scale = scale_for::<Q>(quantise::group_amax(v));
    if index % const { (GROUP / V) as u32 } == 0 && index * (V as u32) < n {
        GlobalMut::new(scale_place.cast_mut().cast::<f32>()).set_hinted(0usize, scale.to_bits(), StoreStreaming);
    }
    at.store_quantised(GlobalMut::new(out.cast_mut().cast::<Q>()), v, float::recip(scale));
}

/// As [`groups`] for many rows: two pieces a thread, of the same group.
#[inline(always)]
pub unsafe fn groups_many<T: Float, Q: Quantised, const V: usize>(
    x: *const T,
    out: *mut Q,
    scales: *mut f32,
    rows: u32,
    n: u32,
    x_stride: usize,
    out_stride: usize,
    scale_row_stride: usize,
    scale_group_stride: usize,
) {
    let row = (thread::block_idx_z() * thread::grid_dim_y() + thread::block_idx_y()) * thread::block_dim_y()
        + thread::thread_idx_y();
    let pair = thread::block_idx_x() * thread::block_dim_x() + thread::thread_idx_x();
    let first = quantise::pair_index::<V>(pair, 0) * V as u32;
    let left = if row < rows { n.saturating_sub(first) } else { 0 };
    let (line, column, lanes) = (row as usize, first as usize, const { quantise::pair_lanes(V) });
    let x = x.wrapping_add(line * x_stride + column);
    let out = out.wrapping_add(line * out_stride + column);
    let scales = scales.wrapping_add(line * scale_row_stride + (pair / lanes) as usize * scale_group_stride);
    let ([x, out, scales], [pair, left]) =
        dependent_launch::begin_at([x.cast(), out.cast_const().cast(), scales.cast_const().cast()], [pair, left]);
    let (x, out) = (Global::new(x.cast::<T>()), GlobalMut::new(out.cast_mut().cast::<Q>()));
    let at = |i: u32| Piece::<V, true>::new(i * lanes, left);
    let pieces = [at(0).load(x), at(1).load(x)];
    let mut v = [[0f32; V]; 2];
    cuda_std::unroll::<2>(|i| cuda_std::unroll::<V>(|j| v[i][j] = pieces[i][j].to_f32()));
    let scale = scale_for::<Q>(quantise::pair_amax(v));
    if pair.is_multiple_of(lanes) && left > 0 {
        GlobalMut::new(scales.cast_mut().cast::<f32>()).set_hinted(0usize, scale.to_bits(), StoreStreaming);
    }
    let factor = float::recip(scale);
    cuda_std::unroll::<2>(|i| at(i as u32).store_quantised(out, v[i], factor));
}

/// `w`, `out`: `[matrices, rows, n]`, dense; `scales`: `[matrices, rows / 128, n / 128]`, dense, the last of each perhaps a smaller block.
/// Grid: `(blocks of columns, blocks of rows, matrices)`; block: [`BLOCK_THREADS`]; shared memory: [`SHARED_BYTES`].
#[inline(always)]
pub unsafe fn blocks<T: Float, Q: Quantised>(w: *const T, out: *mut Q, scales: *mut f32, rows: u32, n: u32) {
    dependent_launch::begin();
    let (column, row, matrix) = (thread::block_idx_x(), thread::block_idx_y(), thread::block_idx_z() as usize);
    let first = (matrix * rows as usize + row as usize * GROUP) * n as usize + column as usize * GROUP;
    let (w, out) = (Global::new(w).offset(first), GlobalMut::new(out).offset(first));
    let (width, height) =
        ((n - column * GROUP as u32).min(GROUP as u32), (rows - row * GROUP as u32).min(GROUP as u32));
    let team = Team::current();
    let scratch = scratch::<1, MAX_WARPS>(&mut Carver::new());
    // A thread keeps its column.
    let (own, low) = (team.rank % GROUP as u32, team.rank / GROUP as u32);
    let high = if own < width { height } else { 0 };
    let step = const { (BLOCK_THREADS / GROUP) as u32 };
    let mut largest = 0f32;
    let mut r = low;
    while r < high {
        largest = float::max(largest, float::abs(w.get(r as usize * n as usize + own as usize).to_f32()));
        r += step;
    }
    let [largest] = team.reduce::<1, MAX_WARPS>([largest], [Op::Max], scratch);
    let scale = scale_for::<Q>(largest);
    if team.rank == 0 {
        let place = (matrix * thread::grid_dim_y() as usize + row as usize) * thread::grid_dim_x() as usize;
        GlobalMut::new(scales).set(place + column as usize, scale);
    }
    let factor = float::recip(scale);
    let mut r = low;
    while r < high {
        let at = r as usize * n as usize + own as usize;
        out.set(at, Q::one(w.get(at).to_f32() * factor));
        r += step;
    }
}

/// The tables of [`rows`] and [`groups`]: each variant for each element type, f32, f16 and bf16; eight pieces a thread for the latter two.
macro_rules! tables {
    ($($(#[$doc:meta])* $module:ident: $Q:ty,
        [$($x2:ident, $x4:ident, $looped:ident, $any:ident, $cluster_x2:ident, $cluster_x4:ident, $T:ty, $v:literal;)*], [$($x8:ident, $H:ty;)*],
        [$($vec:ident, $odd:ident, $many:ident, $G:ty, $gv:literal;)*], [$($block:ident, $B:ty;)*];)*) => { $(
        $(#[$doc])*
        pub mod $module {
            use super::*;
            /// A scale for each row.
            pub mod rows {
                use super::*;
                entries! {
                    pub struct Args<T>(
                        x: *const T, smooth: *const f32, out: *mut $Q, scales: *mut f32, n: u32, x_stride: usize,
                        out_stride: usize,
                    );
                    $($x2 { type T = $T; } [512, 3] => super::super::rows::<T, $Q, $v, 2, true>;)*
                    $($x4 { type T = $T; } [512, 2] => super::super::rows::<T, $Q, $v, 4, true>;)*
                    $($looped { type T = $T; } [1024] => super::super::rows::<T, $Q, $v, 0, true>;)*
                    $($any { type T = $T; } [1024] => super::super::rows::<T, $Q, 4, 0, false>;)*
                    $($cluster_x2 { type T = $T; } [CLUSTER_THREADS, 1; Sm90a] => super::super::rows_cluster::<T, $Q, $v, 2>;)*
                    $($cluster_x4 { type T = $T; } [CLUSTER_THREADS, 1; Sm90a] => super::super::rows_cluster::<T, $Q, $v, 4>;)*
                    $($x8 { type T = $H; } [X8_THREADS, 2] => super::super::rows::<T, $Q, 8, 8, true>;)*
                }
            }
            /// A scale for each row and group of columns.
            pub mod groups {
                use super::*;
                entries! {
                    pub struct Args<T>(
                        x: *const T, out: *mut $Q, scales: *mut f32, rows: u32, n: u32, x_stride: usize,
                        out_stride: usize, scale_row_stride: usize, scale_group_stride: usize,
                    );
                    $($vec { type T = $G; } [MAX_THREADS] => super::super::groups::<T, $Q, $gv, true>;)*
                    $($odd { type T = $G; } [MAX_THREADS] => super::super::groups::<T, $Q, 4, false>;)*
                    $($many { type T = $G; } [MAX_THREADS] => super::super::groups_many::<T, $Q, $gv>;)*
                }
            }
            /// A scale for each block.
            pub mod blocks {
                use super::*;
                entries! {
                    pub struct Args<T>(w: *const T, out: *mut $Q, scales: *mut f32, rows: u32, n: u32);
                    $($block { type T = $B; } [BLOCK_THREADS] => super::super::blocks::<T, $Q>;)*
                }
            }
        }
    )* };
}
tables! {
    /// To e4m3.
    e4m3: E4M3, [
        quantise_rows_e4m3_x2_f32, quantise_rows_e4m3_x4_f32, quantise_rows_e4m3_loop_f32, quantise_rows_e4m3_any_f32,
        quantise_rows_e4m3_cluster_x2_f32, quantise_rows_e4m3_cluster_x4_f32, f32, 4;
        quantise_rows_e4m3_x2_f16, quantise_rows_e4m3_x4_f16, quantise_rows_e4m3_loop_f16, quantise_rows_e4m3_any_f16,
        quantise_rows_e4m3_cluster_x2_f16, quantise_rows_e4m3_cluster_x4_f16, half::f16, 8;
        quantise_rows_e4m3_x2_bf16, quantise_rows_e4m3_x4_bf16, quantise_rows_e4m3_loop_bf16, quantise_rows_e4m3_any_bf16,
        quantise_rows_e4m3_cluster_x2_bf16, quantise_rows_e4m3_cluster_x4_bf16, half::bf16, 8;
    ], [quantise_rows_e4m3_x8_f16, half::f16; quantise_rows_e4m3_x8_bf16, half::bf16;], [
        quantise_groups_e4m3_f32, quantise_groups_e4m3_any_f32, quantise_groups_e4m3_many_f32, f32, 4;
        quantise_groups_e4m3_f16, quantise_groups_e4m3_any_f16, quantise_groups_e4m3_many_f16, half::f16, 8;
        quantise_groups_e4m3_bf16, quantise_groups_e4m3_any_bf16, quantise_groups_e4m3_many_bf16, half::bf16, 8;
    ], [quantise_blocks_e4m3_f32, f32; quantise_blocks_e4m3_f16, half::f16; quantise_blocks_e4m3_bf16, half::bf16;];
    /// To int8.
    int8: i8, [
        quantise_rows_i8_x2_f32, quantise_rows_i8_x4_f32, quantise_rows_i8_loop_f32, quantise_rows_i8_any_f32,
        quantise_rows_i8_cluster_x2_f32, quantise_rows_i8_cluster_x4_f32, f32, 4;
        quantise_rows_i8_x2_f16, quantise_rows_i8_x4_f16, quantise_rows_i8_loop_f16, quantise_rows_i8_any_f16,
        quantise_rows_i8_cluster_x2_f16, quantise_rows_i8_cluster_x4_f16, half::f16, 8;
        quantise_rows_i8_x2_bf16, quantise_rows_i8_x4_bf16, quantise_rows_i8_loop_bf16, quantise_rows_i8_any_bf16,
        quantise_rows_i8_cluster_x2_bf16, quantise_rows_i8_cluster_x4_bf16, half::bf16, 8;
    ], [quantise_rows_i8_x8_f16, half::f16; quantise_rows_i8_x8_bf16, half::bf16;], [
        quantise_groups_i8_f32, quantise_groups_i8_any_f32, quantise_groups_i8_many_f32, f32, 4;
        quantise_groups_i8_f16, quantise_groups_i8_any_f16, quantise_groups_i8_many_f16, half::f16, 8;
        quantise_groups_i8_bf16, quantise_groups_i8_any_bf16, quantise_groups_i8_many_bf16, half::bf16, 8;
    ], [quantise_blocks_i8_f32, f32; quantise_blocks_i8_f16, half::f16; quantise_blocks_i8_bf16, half::bf16;];
}
