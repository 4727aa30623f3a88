//! `silu_and_mul` with e4m3 results: the down projection's input, quantised on the way.
//!
//! * With a given scale for the whole tensor: one piece a thread, as [`gated`](super::gated); few rows (`few`) as below.
//! * With a scale for each group of 128 columns: the same; a group is 16 lanes (32 for f32), which agree on its
//!   largest magnitude. Few rows take pieces of half the size (`few`): a group is a warp then, which agrees in one instruction,
//!   and a thread has half as much to do after its loads have come. Their addresses are computed before it waits for the kernels before.
//! * With a scale for each row: a block for each row keeps the results in registers, `N` pieces a thread, until it
//!   knows the largest; one piece a thread if that is enough (`short`). Rows too long for that (`N = 0`) are computed twice, the second time from the second-level
//!   cache. Few long rows take a cluster of blocks each instead: one multiprocessor reads 64 bytes a cycle, which for a
//!   row of 14336 is twice the time of all the rest.
//!
//! Results are quantised from f32; they are not rounded to the input's type before.

use super::gated::{MAX_THREADS, begin, piece};
use super::{Gated, Params, SiluAndMul};
use crate::row::quantise::{self, GroupScales, Quantised};
use crate::row::team::{Op, scratch};
use crate::row::{Piece, Team};
use cuda_std::shared::Carver;
use cuda_std::{
    E4M3, Float, Global, GlobalMut, Shared, cluster, dependent_launch, entries, float, mbarrier, thread, warp,
};

/// The most warps of a block with a row of its own.
pub const MAX_WARPS: usize = 32;
/// Its shared memory.
pub const SHARED_BYTES: usize = MAX_WARPS * 4;

/// The most threads of a block with a short row of its own.
pub const SHORT_THREADS: u32 = 512;

const NONE: Params = Params { alpha: 0.0, limit: 0.0 };

/// As [`gated`](super::gated::gated); `scale`: one f32, which results are divided by.
#[inline(always)]
pub unsafe fn per_tensor<T: Float, A: Gated, Q: Quantised, const V: usize, const VEC: bool>(
    gate: *const T,
    up: *const T,
    out: *mut Q,
    scale: *const f32,
    rows: u32,
    d: u32,
    in_stride: usize,
    out_stride: usize,
) {
    let (row, index) = begin();
    if row >= rows as usize {
        return;
    }
    let (gate, up) = (Global::new(gate).offset(row * in_stride), Global::new(up).offset(row * in_stride));
    let out = GlobalMut::new(out).offset(row * out_stride);
    let p = Piece::<V, VEC>::new(index, d);
    let y = piece::<T, A, V, VEC>(p, gate, up, NONE);
    p.store_quantised(out, y, quantise::factor_of(Global::new(scale).get(0usize)));
}

/// As [`gated`](super::gated::gated) with `(n, 1)` threads, `n` a multiple of 32; `scales`: `[rows, groups]`, strides in
/// elements.
#[inline(always)]
pub unsafe fn per_group<T: Float, A: Gated, Q: Quantised, const V: usize, const VEC: bool>(
    gate: *const T,
    up: *const T,
    out: *mut Q,
    scales: *mut f32,
    rows: u32,
    d: u32,
    in_stride: usize,
    out_stride: usize,
    scale_row_stride: usize,
    scale_group_stride: usize,
) {
    let (row, index) = begin();
    if row >= rows as usize {
        return;
    }
    let (gate, up) = (Global::new(gate).offset(row * in_stride), Global::new(up).offset(row * in_stride));
    let out = GlobalMut::new(out).offset(row * out_stride);
    let scales =
        GroupScales { scales: GlobalMut::new(scales).offset(row * scale_row_stride), stride: scale_group_stride };
    let p = Piece::<V, VEC>::new(index, d);
    let y = piece::<T, A, V, VEC>(p, gate, up, NONE);
    let (scale, factor) = quantise::scale_and_factor::<Q>(quantise::group_amax(y), 1.0);
    p.store_quantised(out, y, factor);
    scales.store::<V>(index, d, scale);
}

/// Where a thread reads piece number `index` of a row of at least one, all of it aligned; beyond the end the last piece.
///
/// Where all time is latency, a load under a condition is late: its address takes a slower path, and what it brings has to be merged
/// with zeros.
#[inline(always)]
fn near<T: Float, const V: usize>(
    index: u32,
    row: u32,
    gate: *const T,
    up: *const T,
    d: u32,
    in_stride: usize,
) -> [*const T; 2] {
    let first = row as usize * in_stride + index.min(d / V as u32 - 1) as usize * V;
    [gate.wrapping_add(first), up.wrapping_add(first)]
}

/// The results of a piece at an address of [`near`].
#[inline(always)]
#[track_caller]
unsafe fn near_piece<T: Float, A: Gated, const V: usize>([gate, up]: [*const T; 2]) -> [f32; V] {
    piece::<T, A, V, true>(Piece::new(0, V as u32), Global::new(gate), Global::new(up), NONE)
}

/// As [`per_tensor`] for few rows of 16-bit elements, as [`per_group_few`].
#[inline(always)]
pub unsafe fn per_tensor_few<T: Float, A: Gated, Q: Quantised>(
    gate: *const T,
    up: *const T,
    out: *mut Q,
    scale: *const f32,
    _rows: u32,
    d: u32,
    in_stride: usize,
    out_stride: usize,
) {
    let [row, index] = [thread::block_idx_y(), thread::block_idx_x() * thread::block_dim_x() + thread::thread_idx_x()];
    let near = near::<T, 4>(index, row, gate, up, d, in_stride);
    let (near, [row, index]) = dependent_launch::begin_at(near, [row, index]);
    let scale = Global::new(scale).get(0usize);
    let y = near_piece::<T, A, 4>(near);
    let out = GlobalMut::new(out).offset(row as usize * out_stride);
    Piece::<4, true>::new(index, d).store_quantised(out, y, quantise::factor_of(scale));
}

/// As [`per_group`] for few rows of 16-bit elements, aligned and not empty: the second number of a block is the
/// row's. `rows` is not read.
#[inline(always)]
pub unsafe fn per_group_few<T: Float, A: Gated, Q: Quantised>(
    gate: *const T,
    up: *const T,
    out: *mut Q,
    scales: *mut f32,
    _rows: u32,
    d: u32,
    in_stride: usize,
    out_stride: usize,
    scale_row_stride: usize,
    scale_group_stride: usize,
) {
    let [row, index] = [thread::block_idx_y(), thread::block_idx_x() * thread::block_dim_x() + thread::thread_idx_x()];
    let near = near::<T, 4>(index, row, gate, up, d, in_stride);
    let (near, [row, index]) = dependent_launch::begin_at(near, [row, index]);
    let row = row as usize;
    // Whole warps beyond the end.
    if (index - index % 32) * 4 >= d {
        return;
    }
    let (p, y) = (Piece::<4, true>::new(index, d), near_piece::<T, A, 4>(near));
    let largest = quantise::warp_amax(quantise::amax_from_epsilon(y));
    let (scale, factor) = quantise::scale_and_factor_from_epsilon::<Q>(largest);
    p.store_quantised(GlobalMut::new(out).offset(row * out_stride), y, factor);
    let scales =
        GroupScales { scales: GlobalMut::new(scales).offset(row * scale_row_stride), stride: scale_group_stride };
    scales.store::<4>(index, d, scale);
}

/// As [`per_token`] for short rows, aligned and not empty: one piece a thread.
#[inline(always)]
pub unsafe fn per_token_short<T: Float, A: Gated, Q: Quantised, const V: usize>(
    gate: *const T,
    up: *const T,
    out: *mut Q,
    scales: *mut f32,
    d: u32,
    in_stride: usize,
    out_stride: usize,
) {
    let team = Team::current();
    let near = near::<T, V>(team.rank, thread::block_idx_x(), gate, up, d, in_stride);
    let (near, [row, rank]) = dependent_launch::begin_at(near, [thread::block_idx_x(), team.rank]);
    let (row, team) = (row as usize, Team { rank, ..team });
    let (warp_id, lane, warps) = (team.rank / 32, team.rank % 32, team.size / 32);
    let scratch = scratch::<1, MAX_WARPS>(&mut Carver::new());
    let (p, y) = (Piece::<V, true>::new(team.rank, d), near_piece::<T, A, V>(near));
    let own = quantise::warp_amax(quantise::amax_from_epsilon(y));
    // As `Team::reduce_warps`, but of single warps too: behind a branch the address of shared memory would be asked for now.
    if lane == 0 {
        scratch.set(warp_id, own);
    }
    thread::sync_threads();
    let largest = quantise::warp_amax(scratch.get(if lane < warps { lane } else { 0 }));
    let (scale, factor) = quantise::scale_and_factor_from_epsilon::<Q>(largest);
    p.store_quantised(GlobalMut::new(out).offset(row * out_stride), y, factor);
    if team.rank == 0 {
        GlobalMut::new(scales).set(row, scale);
    }
}

/// As [`gated`](super::gated::gated), a block of a multiple of 32 threads for each row; `scales`: `[rows]`.
#[inline(always)]
pub unsafe fn per_token<T: Float, A: Gated, Q: Quantised, const V: usize, const N: usize, const VEC: bool>(
    gate: *const T,
    up: *const T,
    out: *mut Q,
    scales: *mut f32,
    d: u32,
    in_stride: usize,
    out_stride: usize,
) {
    dependent_launch::begin();
    let (team, row) = (Team::current(), thread::block_idx_x() as usize);
    let (gate, up) = (Global::new(gate).offset(row * in_stride), Global::new(up).offset(row * in_stride));
    let (out, scales) = (GlobalMut::new(out).offset(row * out_stride), GlobalMut::new(scales));
    let scratch = scratch::<1, MAX_WARPS>(&mut Carver::new());
    let at = |i: usize| Piece::<V, VEC>::new(i as u32 * team.size + team.rank, d);
    let rounds = d.div_ceil(V as u32).div_ceil(team.size) as usize;

    let mut y = [[0.0; V]; N];
    let mut largest = 0.0;
    cuda_std::unroll::<N>(|i| y[i] = piece::<T, A, V, VEC>(at(i), gate, up, NONE));
    cuda_std::unroll::<N>(|i| largest = float::max(largest, quantise::amax(y[i])));
    if N == 0 {
        let mut i = 0;
        while i < rounds {
            largest = float::max(largest, quantise::amax(piece::<T, A, V, VEC>(at(i), gate, up, NONE)));
            i += 1;
        }
    }
    let [largest] = team.reduce_warps::<1, MAX_WARPS>([Op::Max.over_warp(largest)], [Op::Max], scratch);
    let (scale, factor) = quantise::scale_and_factor::<Q>(largest, 1.0);
    cuda_std::unroll::<N>(|i| at(i).store_quantised(out, y[i], factor));
    if N == 0 {
        let mut i = 0;
        while i < rounds {
            at(i).store_quantised(out, piece::<T, A, V, VEC>(at(i), gate, up, NONE), factor);
            i += 1;
        }
    }
    if team.rank == 0 {
        scales.set(row, scale);
    }
}

/// Blocks of [`per_token_cluster`] for each row.
pub const CLUSTER: u32 = 8;
/// The most threads of such a block.
pub const CLUSTER_THREADS: u32 = 512;
const CLUSTER_WARPS: u32 = CLUSTER_THREADS / 32;
/// Its shared memory.
pub const CLUSTER_SHARED_BYTES: usize = (CLUSTER_WARPS * CLUSTER) as usize * 4 + 8;

/// As [`per_token`] with a cluster of blocks for each row: one piece a thread, a multiple of 32 threads. Every warp tells all
/// blocks its largest result, by stores that an mbarrier of each block counts: the only barrier of the cluster is that before the
/// first of them, and passes while the kernels before still run.
#[inline(always)]
pub unsafe fn per_token_cluster<T: Float, A: Gated, Q: Quantised, const V: usize>(
    gate: *const T,
    up: *const T,
    out: *mut Q,
    scales: *mut f32,
    d: u32,
    in_stride: usize,
    out_stride: usize,
) {
    cluster::dims::<CLUSTER>();
    let team = Team::current();
    let (warp_id, lane, maxima) = (team.rank / 32, team.rank % 32, team.size / 32 * CLUSTER);
    let mut carver = Carver::new();
    let largest: Shared<f32> = carver.take((CLUSTER_WARPS * CLUSTER) as usize);
    let came = carver.take::<u64>(1).ptr(0u32);
    if team.rank == 0 {
        mbarrier::init(came, 1);
        mbarrier::fence_init();
        mbarrier::arrive_expect_tx(came, maxima * 4);
    }
    warp::sync_warp(warp::FULL);
    // Nobody may write to a block that does not run yet, or has no mbarrier. All of this is done while the kernels before still run.
    cluster::arrive_relaxed();
    let (row, rank) = (thread::block_idx_x() / CLUSTER, cluster::rank());
    let index = rank * team.size + team.rank;
    let near = near::<T, V>(index, row, gate, up, d, in_stride);
    cluster::wait();
    let (near, [row, index]) = dependent_launch::begin_at(near, [row, index]);
    let row = row as usize;
    let (p, y) = (Piece::<V, true>::new(index, d), near_piece::<T, A, V>(near));
    let own = quantise::warp_amax(quantise::amax_from_epsilon(y));
    if lane < CLUSTER {
        let to = cluster::map(largest.ptr(warp_id * CLUSTER + rank), lane);
        cluster::store_async_u32(to, own.to_bits(), cluster::map(came, lane));
    }
    // Blocks that have all of it have been written to for the last time, and may end.
    mbarrier::wait_parity(came, 0);
    let mut most = 0.0;
    cuda_std::unroll::<{ (CLUSTER_WARPS * CLUSTER / 32) as usize }>(|i| {
        let i = i as u32 * 32 + lane;
        if i < maxima {
            most = float::max(most, largest.get(i));
        }
    });
    let (scale, factor) = quantise::scale_and_factor_from_epsilon::<Q>(quantise::warp_amax(most));
    p.store_quantised(GlobalMut::new(out).offset(row * out_stride), y, factor);
    if rank == 0 && team.rank == 0 {
        GlobalMut::new(scales).set(row, scale);
    }
}

/// With a given scale.
pub mod tensor {
    use super::*;
    entries! {
        pub struct Args<T>(
            gate: *const T, up: *const T, out: *mut E4M3, scale: *const f32, rows: u32, d: u32, in_stride: usize,
            out_stride: usize,
        );
        silu_and_mul_e4m3_per_tensor_f32 { type T = f32; } [MAX_THREADS] => per_tensor::<T, SiluAndMul, E4M3, 4, true>;
        silu_and_mul_e4m3_per_tensor_f16 { type T = half::f16; } [MAX_THREADS] => per_tensor::<T, SiluAndMul, E4M3, 8, true>;
        silu_and_mul_e4m3_per_tensor_bf16 { type T = half::bf16; } [MAX_THREADS] => per_tensor::<T, SiluAndMul, E4M3, 8, true>;
        silu_and_mul_e4m3_per_tensor_any_f32 { type T = f32; } [MAX_THREADS] => per_tensor::<T, SiluAndMul, E4M3, 4, false>;
        silu_and_mul_e4m3_per_tensor_any_f16 { type T = half::f16; } [MAX_THREADS] => per_tensor::<T, SiluAndMul, E4M3, 4, false>;
        silu_and_mul_e4m3_per_tensor_any_bf16 { type T = half::bf16; } [MAX_THREADS] => per_tensor::<T, SiluAndMul, E4M3, 4, false>;
        silu_and_mul_e4m3_per_tensor_few_f16 { type T = half::f16; } [MAX_THREADS] => per_tensor_few::<T, SiluAndMul, E4M3>;
        silu_and_mul_e4m3_per_tensor_few_bf16 { type T = half::bf16; } [MAX_THREADS] => per_tensor_few::<T, SiluAndMul, E4M3>;
    }
}

/// With a scale for each group of columns.
pub mod groups {
    use super::*;
    entries! {
        pub struct Args<T>(
            gate: *const T, up: *const T, out: *mut E4M3, scales: *mut f32, rows: u32, d: u32, in_stride: usize,
            out_stride: usize, scale_row_stride: usize, scale_group_stride: usize,
        );
        silu_and_mul_e4m3_per_group_f32 { type T = f32; } [MAX_THREADS] => per_group::<T, SiluAndMul, E4M3, 4, true>;
        silu_and_mul_e4m3_per_group_f16 { type T = half::f16; } [MAX_THREADS] => per_group::<T, SiluAndMul, E4M3, 8, true>;
        silu_and_mul_e4m3_per_group_bf16 { type T = half::bf16; } [MAX_THREADS] => per_group::<T, SiluAndMul, E4M3, 8, true>;
        silu_and_mul_e4m3_per_group_any_f32 { type T = f32; } [MAX_THREADS] => per_group::<T, SiluAndMul, E4M3, 4, false>;
        silu_and_mul_e4m3_per_group_any_f16 { type T = half::f16; } [MAX_THREADS] => per_group::<T, SiluAndMul, E4M3, 4, false>;
        silu_and_mul_e4m3_per_group_any_bf16 { type T = half::bf16; } [MAX_THREADS] => per_group::<T, SiluAndMul, E4M3, 4, false>;
        silu_and_mul_e4m3_per_group_few_f16 { type T = half::f16; } [MAX_THREADS] => per_group_few::<T, SiluAndMul, E4M3>;
        silu_and_mul_e4m3_per_group_few_bf16 { type T = half::bf16; } [MAX_THREADS] => per_group_few::<T, SiluAndMul, E4M3>;
    }
}

/// With a scale for each row.
pub mod tokens {
    use super::*;
    entries! {
        pub struct Args<T>(
            gate: *const T, up: *const T, out: *mut E4M3, scales: *mut f32, d: u32, in_stride: usize, out_stride: usize,
        );
        silu_and_mul_e4m3_per_token_x2_f32 { type T = f32; } [512] => per_token::<T, SiluAndMul, E4M3, 4, 2, true>;
        silu_and_mul_e4m3_per_token_x2_f16 { type T = half::f16; } [512] => per_token::<T, SiluAndMul, E4M3, 8, 2, true>;
        silu_and_mul_e4m3_per_token_x2_bf16 { type T = half::bf16; } [512] => per_token::<T, SiluAndMul, E4M3, 8, 2, true>;
        silu_and_mul_e4m3_per_token_x4_f32 { type T = f32; } [512] => per_token::<T, SiluAndMul, E4M3, 4, 4, true>;
        silu_and_mul_e4m3_per_token_x4_f16 { type T = half::f16; } [512] => per_token::<T, SiluAndMul, E4M3, 8, 4, true>;
        silu_and_mul_e4m3_per_token_x4_bf16 { type T = half::bf16; } [512] => per_token::<T, SiluAndMul, E4M3, 8, 4, true>;
        silu_and_mul_e4m3_per_token_loop_f32 { type T = f32; } [1024] => per_token::<T, SiluAndMul, E4M3, 4, 0, true>;
        silu_and_mul_e4m3_per_token_loop_f16 { type T = half::f16; } [1024] => per_token::<T, SiluAndMul, E4M3, 8, 0, true>;
        silu_and_mul_e4m3_per_token_loop_bf16 { type T = half::bf16; } [1024] => per_token::<T, SiluAndMul, E4M3, 8, 0, true>;
        silu_and_mul_e4m3_per_token_any_f32 { type T = f32; } [1024] => per_token::<T, SiluAndMul, E4M3, 4, 0, false>;
        silu_and_mul_e4m3_per_token_any_f16 { type T = half::f16; } [1024] => per_token::<T, SiluAndMul, E4M3, 4, 0, false>;
        silu_and_mul_e4m3_per_token_any_bf16 { type T = half::bf16; } [1024] => per_token::<T, SiluAndMul, E4M3, 4, 0, false>;
        silu_and_mul_e4m3_per_token_cluster_f32 { type T = f32; } [CLUSTER_THREADS; Sm90a] => per_token_cluster::<T, SiluAndMul, E4M3, 4>;
        silu_and_mul_e4m3_per_token_cluster_f16 { type T = half::f16; } [CLUSTER_THREADS; Sm90a] => per_token_cluster::<T, SiluAndMul, E4M3, 8>;
        silu_and_mul_e4m3_per_token_cluster_bf16 { type T = half::bf16; } [CLUSTER_THREADS; Sm90a] => per_token_cluster::<T, SiluAndMul, E4M3, 8>;
        silu_and_mul_e4m3_per_token_short_f32 { type T = f32; } [SHORT_THREADS] => per_token_short::<T, SiluAndMul, E4M3, 4>;
        silu_and_mul_e4m3_per_token_short_f16 { type T = half::f16; } [SHORT_THREADS] => per_token_short::<T, SiluAndMul, E4M3, 8>;
        silu_and_mul_e4m3_per_token_short_bf16 { type T = half::bf16; } [SHORT_THREADS] => per_token_short::<T, SiluAndMul, E4M3, 8>;
    }
}
