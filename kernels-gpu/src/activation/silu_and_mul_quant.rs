//! `silu_and_mul` with e4m3 results: the down projection's input, quantised on the way.
//!
//! * With a given scale for the whole tensor: one piece a thread, as [`gated`](super::gated); few rows (`few`) as below.
//! * With a scale for each group of 128 columns: two pieces a thread, of the same group, so that a group is 8 lanes (16 for f32), which agree
//!   on its largest magnitude in three steps (four). Few rows take pieces of half the size, one a thread (`few`): a group is a warp then, which
//!   agrees in one instruction, and a thread has less to do after its loads have come. Addresses are computed before the wait for the kernels
//!   before. Launches in between take one whole piece a thread (`one`).
//! * With a scale for each row: a block for each row keeps the results in registers, `N` pieces a thread, until it
//!   knows the largest; one piece a thread if that is enough (`short`; `narrow`, with several rows a block, since blocks start one by one). Long rows
//!   take two (`x2`; `wide`, with up to 1024 threads, while two blocks a multiprocessor are enough) or four (`x4`, with up to 1024 threads; `any_x4`
//!   element by element). Rows too long for that (`N = 0`) are computed twice, the second time from the second-level cache. Few long rows take a cluster of blocks each instead: one multiprocessor reads 64 bytes a cycle, which for a
//!   row of 14336 is twice the time of all the rest.
//!
//! Results are quantised from f32; they are not rounded to the input's type before.

use super::gated::{MAX_THREADS, piece};
use super::{Gated, Params, SiluAndMul};
use crate::row::quantise::{self, Quantised};
use crate::row::team::{Op, scratch};
use crate::row::{GROUP, Mine, Piece, Team, zero};
use cuda_std::shared::Carver;
use cuda_std::vec::{B128, Reused, StoreStreaming};
use cuda_std::{
    E4M3, Float, Global, GlobalMut, Shared, cluster, dependent_launch, entries, float, integer, mbarrier, thread, vec,
    warp,
};

/// The most warps of a block with a row of its own.
pub const MAX_WARPS: usize = 32;
/// Its shared memory.
pub const SHARED_BYTES: usize = MAX_WARPS * 4;

/// The most threads of a block with a short row of its own.
pub const SHORT_THREADS: u32 = 512;

/// The most threads of a block of `narrow` rows.
pub const NARROW_THREADS: u32 = 256;

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
    let (Mine::<V, VEC> { piece: p, .. }, [gate, up, out]) = Mine::begin(rows, d, |row, column, _| {
        let from = row * in_stride + column;
        [
            gate.wrapping_add(from).cast(),
            up.wrapping_add(from).cast(),
            out.wrapping_add(row * out_stride + column).cast(),
        ]
    });
    let y = piece::<T, A, V, VEC>(p, Global::new(gate.cast()), Global::new(up.cast()), NONE);
    let out = GlobalMut::new(out.cast_mut().cast::<Q>());
    p.store_quantised(out, y, quantise::factor_of(Global::new(scale).get(0usize)));
}

/// As [`gated`](super::gated::gated) with `(n, 1)` threads, `n` a multiple of 32; `scales`: `[rows, groups]`, strides in
/// elements. One piece a thread: rows that are not aligned, and launches that run at once.
#[inline(always)]
pub unsafe fn per_group_one<T: Float, A: Gated, Q: Quantised, const V: usize, const VEC: bool>(
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
    let lanes = const { (GROUP / V) as u32 };
    let (Mine::<V, VEC> { piece: p, index, n: d }, [gate, up, out, scales]) =
        Mine::begin(rows, d, |row, column, index| {
            let from = row * in_stride + column;
            let scales = scales.wrapping_add(row * scale_row_stride + (index / lanes) as usize * scale_group_stride);
            let (gate, up) = (gate.wrapping_add(from), up.wrapping_add(from));
            [gate.cast(), up.cast(), out.wrapping_add(row * out_stride + column).cast(), scales.cast()]
        });
    let y = piece::<T, A, V, VEC>(p, Global::new(gate.cast()), Global::new(up.cast()), NONE);
    let (scale, factor) = quantise::scale_and_factor_of::<Q>(quantise::group_amax(y));
    p.store_quantised(GlobalMut::new(out.cast_mut().cast::<Q>()), y, factor);
    if index.is_multiple_of(lanes) && index * (V as u32) < d {
        GlobalMut::new(scales.cast_mut().cast::<f32>()).set_hinted(0usize, scale.to_bits(), StoreStreaming);
    }
}

/// As [`per_group_one`] for aligned rows: two pieces a thread, of the same group.
#[inline(always)]
pub unsafe fn per_group<T: Float, A: Gated, Q: Quantised, const V: usize>(
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
    let row = (thread::block_idx_z() * thread::grid_dim_y() + thread::block_idx_y()) * thread::block_dim_y()
        + thread::thread_idx_y();
    let pair = thread::block_idx_x() * thread::block_dim_x() + thread::thread_idx_x();
    let first = quantise::pair_index::<V>(pair, 0) * V as u32;
    let left = if row < rows { d.saturating_sub(first) } else { 0 };
    let (line, column, lanes) = (row as usize, first as usize, const { quantise::pair_lanes(V) });
    let from = line * in_stride + column;
    let (gate, up) = (gate.wrapping_add(from), up.wrapping_add(from));
    let out = out.wrapping_add(line * out_stride + column);
    let scales = scales.wrapping_add(line * scale_row_stride + (pair / lanes) as usize * scale_group_stride);
    let ([gate, up, out, scales], [pair, left]) = dependent_launch::begin_at(
        [gate.cast(), up.cast(), out.cast_const().cast(), scales.cast_const().cast()],
        [pair, left],
    );
    let (gate, up) = (Global::new(gate.cast::<T>()), Global::new(up.cast::<T>()));
    let at = |i: usize| Piece::<V, true>::new(i as u32 * lanes, left);
    let gates: [[T; V]; 2] = [at(0).load(gate), at(1).load(gate)];
    let ups: [[T; V]; 2] = [at(0).load(up), at(1).load(up)];
    let mut y = [[0f32; V]; 2];
    cuda_std::unroll::<2>(|i| {
        let (gate, up) = (vec::to_f32(gates[i]), vec::to_f32(ups[i]));
        cuda_std::unroll::<V>(|j| y[i][j] = A::apply::<T>(gate[j], up[j], NONE));
    });
    let (scale, factor) = quantise::scale_and_factor_of::<Q>(quantise::pair_amax(y));
    if pair.is_multiple_of(lanes) && left > 0 {
        GlobalMut::new(scales.cast_mut().cast::<f32>()).set_hinted(0usize, scale.to_bits(), StoreStreaming);
    }
    let out = GlobalMut::new(out.cast_mut().cast::<Q>());
    cuda_std::unroll::<2>(|i| at(i).store_quantised(out, y[i], factor));
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

/// Piece number `index` of a row of `d` elements, to be accessed at its own address.
#[inline(always)]
fn at_its_address<const V: usize>(index: u32, d: u32) -> Piece<V, true> {
    Piece::new(0, if index * (V as u32) < d { V as u32 } else { 0 })
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
    let [gate, up] = near::<T, 4>(index, row, gate, up, d, in_stride);
    let out = out.wrapping_add(row as usize * out_stride + index as usize * 4);
    let ([gate, up, out, scale], [index]) =
        dependent_launch::begin_at([gate.cast(), up.cast(), out.cast_const().cast(), scale.cast()], [index]);
    let scale = f32::from_bits(Global::new(scale.cast::<u32>()).get_hinted(0usize, Reused));
    let y = near_piece::<T, A, 4>([gate.cast(), up.cast()]);
    at_its_address::<4>(index, d).store_quantised(
        GlobalMut::new(out.cast_mut().cast::<Q>()),
        y,
        quantise::factor_of(scale),
    );
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
    let [gate, up] = near::<T, 4>(index, row, gate, up, d, in_stride);
    let out = out.wrapping_add(row as usize * out_stride + index as usize * 4);
    let scales = scales.wrapping_add(row as usize * scale_row_stride + (index / 32) as usize * scale_group_stride);
    let ([gate, up, out, scales], [index]) = dependent_launch::begin_at(
        [gate.cast(), up.cast(), out.cast_const().cast(), scales.cast_const().cast()],
        [index],
    );
    let y = near_piece::<T, A, 4>([gate.cast(), up.cast()]);
    let largest = quantise::warp_amax(quantise::amax_from_epsilon(y));
    let (scale, factor) = quantise::scale_and_factor_from_epsilon::<Q>(largest);
    let piece = at_its_address::<4>(index, d);
    // While the factor's reciprocal is on its way.
    if index % 32 == 0 && piece.has(0) {
        GlobalMut::new(scales.cast_mut().cast::<f32>()).set_hinted(0usize, scale.to_bits(), StoreStreaming);
    }
    piece.store_quantised(GlobalMut::new(out.cast_mut().cast::<Q>()), y, factor);
}

/// As [`per_token`] for short rows, aligned and not empty: one piece a thread.
#[inline(always)]
pub unsafe fn per_token_short<T: Float, A: Gated, Q: Quantised, const V: usize>(
    gate: *const T,
    up: *const T,
    out: *mut Q,
    scales: *mut f32,
    _rows: u32,
    d: u32,
    in_stride: usize,
    out_stride: usize,
) {
    let team = Team::current();
    let row = thread::block_idx_x();
    let [gate, up] = near::<T, V>(team.rank, row, gate, up, d, in_stride);
    let out = out.wrapping_add(row as usize * out_stride + team.rank as usize * V);
    let scales = scales.wrapping_add(row as usize);
    let ([gate, up, out, scales], [rank]) = dependent_launch::begin_at(
        [gate.cast(), up.cast(), out.cast_const().cast(), scales.cast_const().cast()],
        [team.rank],
    );
    let team = Team { rank, ..team };
    let (warp_id, lane, warps) = (team.rank / 32, team.rank % 32, team.size / 32);
    let scratch = scratch::<1, MAX_WARPS>(&mut Carver::new());
    let y = near_piece::<T, A, V>([gate.cast(), up.cast()]);
    let own_largest = quantise::warp_amax(quantise::amax_from_epsilon(y));
    // As `Team::reduce_warps`, but of single warps too: behind a branch the address of shared memory would be asked for now.
    if lane == 0 {
        scratch.set(warp_id, own_largest);
    }
    thread::sync_threads();
    let largest = quantise::warp_amax(scratch.get(if lane < warps { lane } else { 0 }));
    let (scale, factor) = quantise::scale_and_factor_from_epsilon::<Q>(largest);
    if team.rank == 0 {
        GlobalMut::new(scales.cast_mut().cast::<f32>()).set_hinted(0usize, scale.to_bits(), StoreStreaming);
    }
    at_its_address::<V>(team.rank, d).store_quantised(GlobalMut::new(out.cast_mut().cast::<Q>()), y, factor);
}

/// As [`per_token`] for aligned rows that are not empty, with nothing but what all rows have in common after the wait for the kernels before: `N` pieces a
/// thread, all loads on their way before anything else. Blocks have one row, or `blockDim.y` of them if `NARROW`. `SOON`: addresses of
/// results are computed before that wait, too, which takes registers.
#[inline(always)]
pub unsafe fn per_token_held<
    T: Float,
    A: Gated,
    Q: Quantised,
    const V: usize,
    const N: usize,
    const NARROW: bool,
    const SOON: bool,
>(
    gate: *const T,
    up: *const T,
    out: *mut Q,
    scales: *mut f32,
    rows: u32,
    d: u32,
    in_stride: usize,
    out_stride: usize,
) {
    let team = Team::current();
    let (mut row, mut left) = (thread::block_idx_x(), d);
    if NARROW {
        row = row * thread::block_dim_y() + thread::thread_idx_y();
        // A team without a row stores nothing.
        left = if row < rows { d } else { 0 };
        row = row.min(rows - 1);
    }
    let index = |i: usize| i as u32 * team.size + team.rank;
    let to = |i: usize| out.wrapping_add(row as usize * out_stride + index(i) as usize * V);
    let mut at = [[core::ptr::null(); 3]; N];
    cuda_std::unroll::<N>(|i| {
        let [gate, up] = near::<T, V>(index(i), row, gate, up, d, in_stride);
        at[i] = [gate.cast(), up.cast(), if SOON { to(i).cast_const().cast() } else { up.cast() }];
    });
    let mut scale_to: *const u8 = scales.wrapping_add(row as usize).cast_const().cast();
    let mut word = u32::MAX;
    if SOON {
        scale_to = integer::opaque_address(scale_to);
        word = scale_to as u32 & (scale_to as u64 >> 32) as u32;
    }
    let [rank, left] = [team.rank, left].map(integer::opaque);
    let at = dependent_launch::known_here_if(true, at, [word]);
    dependent_launch::begin();

    let (mut gates, mut ups) = ([[zero::<T>(); V]; N], [[zero::<T>(); V]; N]);
    cuda_std::unroll::<N>(|i| {
        let whole = Piece::<V, true>::new(0, V as u32);
        gates[i] = whole.load(Global::new(at[i][0].cast()));
        ups[i] = whole.load(Global::new(at[i][1].cast()));
    });
    let mut y = [[0f32; V]; N];
    cuda_std::unroll::<N>(|i| {
        let (gate, up) = (vec::to_f32(gates[i]), vec::to_f32(ups[i]));
        cuda_std::unroll::<V>(|j| y[i][j] = A::apply::<T>(gate[j], up[j], NONE));
    });
    let mut own_largest = quantise::amax_from_epsilon(y[0]);
    let mut i = 1;
    while i < N {
        own_largest = float::max(own_largest, quantise::amax_from_epsilon(y[i]));
        i += 1;
    }
    let own_largest = quantise::warp_amax(own_largest);
    let (warp_id, lane, warps) = (rank / 32, rank % 32, team.size / 32);
    let mut scratch = scratch::<1, MAX_WARPS>(&mut Carver::new());
    if NARROW {
        scratch = scratch.offset(thread::thread_idx_y() * warps);
    }
    // As `Team::reduce_warps`, but of single warps too: behind a branch the address of shared memory would be asked for now.
    if lane == 0 {
        scratch.set(warp_id, own_largest);
    }
    thread::sync_threads();
    let largest = quantise::warp_amax(scratch.get(if lane < warps { lane } else { 0 }));
    let (scale, factor) = quantise::scale_and_factor_from_epsilon::<Q>(largest);
    GlobalMut::new(scale_to.cast_mut().cast::<f32>()).set_streaming_if(rank == 0 && left > 0, 0usize, scale);
    cuda_std::unroll::<N>(|i| {
        let has = (i as u32 * team.size + rank) * (V as u32) < left;
        let to = if SOON { at[i][2].cast_mut().cast() } else { to(i) };
        Piece::<V, true>::new(0, if has { V as u32 } else { 0 }).store_quantised_at_once(
            GlobalMut::new(to),
            y[i],
            factor,
        );
    });
}

/// As [`gated`](super::gated::gated), a block of a multiple of 32 threads for each row; `scales`: `[rows]`.
#[inline(always)]
pub unsafe fn per_token<T: Float, A: Gated, Q: Quantised, const V: usize, const N: usize, const VEC: bool>(
    gate: *const T,
    up: *const T,
    out: *mut Q,
    scales: *mut f32,
    _rows: u32,
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
    let [largest] = team.reduce_warps::<1, 1, MAX_WARPS>([[Op::Max.over_warp(largest)]], [Op::Max], scratch);
    let (scale, factor) = quantise::scale_and_factor_of::<Q>(largest);
    cuda_std::unroll::<N>(|i| at(i).store_quantised_at_once(out, y[i], factor));
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
    _rows: u32,
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
    let [gate, up] = near::<T, V>(index, row, gate, up, d, in_stride);
    let out = out.wrapping_add(row as usize * out_stride + index as usize * V);
    let scales = scales.wrapping_add(row as usize);
    let peer = lane % CLUSTER;
    let (to, told) = (cluster::map(largest.ptr(warp_id * CLUSTER + rank), peer), cluster::map(came, peer));
    // The two halves of an address, as the instruction takes them.
    let to = core::ptr::without_provenance::<u8>(to as usize | (told as usize) << 32);
    cluster::wait();
    let ([gate, up, out, scales, to], [index]) = dependent_launch::begin_at(
        [gate.cast(), up.cast(), out.cast_const().cast(), scales.cast_const().cast(), to],
        [index],
    );
    let y = near_piece::<T, A, V>([gate.cast(), up.cast()]);
    let own_largest = quantise::warp_amax(quantise::amax_from_epsilon(y));
    if lane < CLUSTER {
        cluster::store_async_u32(to.addr() as u32, own_largest.to_bits(), (to.addr() >> 32) as u32);
    }
    // Blocks that have all of it have been written to for the last time, and may end.
    mbarrier::wait_parity(came, 0);
    // A quad of the largest for each lane, in one instruction.
    let mut quad = [0.0; 4];
    if lane * 4 < maxima {
        B128(quad) = largest.get_as(lane * 4);
    }
    let most = float::max(float::max(quad[0], quad[1]), float::max(quad[2], quad[3]));
    let (scale, factor) = quantise::scale_and_factor_from_epsilon::<Q>(quantise::warp_amax(most));
    if rank == 0 && team.rank == 0 {
        GlobalMut::new(scales.cast_mut().cast::<f32>()).set_hinted(0usize, scale.to_bits(), StoreStreaming);
    }
    at_its_address::<V>(index, d).store_quantised(GlobalMut::new(out.cast_mut().cast::<Q>()), y, factor);
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
        silu_and_mul_e4m3_per_group_f32 { type T = f32; } [MAX_THREADS] => per_group::<T, SiluAndMul, E4M3, 4>;
        silu_and_mul_e4m3_per_group_f16 { type T = half::f16; } [MAX_THREADS] => per_group::<T, SiluAndMul, E4M3, 8>;
        silu_and_mul_e4m3_per_group_bf16 { type T = half::bf16; } [MAX_THREADS] => per_group::<T, SiluAndMul, E4M3, 8>;
        silu_and_mul_e4m3_per_group_any_f32 { type T = f32; } [MAX_THREADS] => per_group_one::<T, SiluAndMul, E4M3, 4, false>;
        silu_and_mul_e4m3_per_group_any_f16 { type T = half::f16; } [MAX_THREADS] => per_group_one::<T, SiluAndMul, E4M3, 4, false>;
        silu_and_mul_e4m3_per_group_any_bf16 { type T = half::bf16; } [MAX_THREADS] => per_group_one::<T, SiluAndMul, E4M3, 4, false>;
        silu_and_mul_e4m3_per_group_few_f16 { type T = half::f16; } [MAX_THREADS] => per_group_few::<T, SiluAndMul, E4M3>;
        silu_and_mul_e4m3_per_group_few_bf16 { type T = half::bf16; } [MAX_THREADS] => per_group_few::<T, SiluAndMul, E4M3>;
        silu_and_mul_e4m3_per_group_one_f16 { type T = half::f16; } [MAX_THREADS] => per_group_one::<T, SiluAndMul, E4M3, 8, true>;
        silu_and_mul_e4m3_per_group_one_bf16 { type T = half::bf16; } [MAX_THREADS] => per_group_one::<T, SiluAndMul, E4M3, 8, true>;
    }
}

/// With a scale for each row.
pub mod tokens {
    use super::*;
    entries! {
        pub struct Args<T>(
            gate: *const T, up: *const T, out: *mut E4M3, scales: *mut f32, rows: u32, d: u32, in_stride: usize,
            out_stride: usize,
        );
        silu_and_mul_e4m3_per_token_x2_f32 { type T = f32; } [512, 3] => per_token_held::<T, SiluAndMul, E4M3, 4, 2, false, true>;
        silu_and_mul_e4m3_per_token_x2_f16 { type T = half::f16; } [512, 3] => per_token_held::<T, SiluAndMul, E4M3, 8, 2, false, true>;
        silu_and_mul_e4m3_per_token_x2_bf16 { type T = half::bf16; } [512, 3] => per_token_held::<T, SiluAndMul, E4M3, 8, 2, false, true>;
        silu_and_mul_e4m3_per_token_x4_f32 { type T = f32; } [1024] => per_token::<T, SiluAndMul, E4M3, 4, 4, true>;
        silu_and_mul_e4m3_per_token_x4_f16 { type T = half::f16; } [1024] => per_token::<T, SiluAndMul, E4M3, 8, 4, true>;
        silu_and_mul_e4m3_per_token_x4_bf16 { type T = half::bf16; } [1024] => per_token::<T, SiluAndMul, E4M3, 8, 4, true>;
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
        silu_and_mul_e4m3_per_token_narrow_f32 { type T = f32; } [NARROW_THREADS] => per_token_held::<T, SiluAndMul, E4M3, 4, 1, true, true>;
        silu_and_mul_e4m3_per_token_narrow_f16 { type T = half::f16; } [NARROW_THREADS] => per_token_held::<T, SiluAndMul, E4M3, 8, 1, true, true>;
        silu_and_mul_e4m3_per_token_narrow_bf16 { type T = half::bf16; } [NARROW_THREADS] => per_token_held::<T, SiluAndMul, E4M3, 8, 1, true, true>;
        silu_and_mul_e4m3_per_token_wide_f32 { type T = f32; } [1024, 2] => per_token_held::<T, SiluAndMul, E4M3, 4, 2, false, false>;
        silu_and_mul_e4m3_per_token_wide_f16 { type T = half::f16; } [1024, 2] => per_token_held::<T, SiluAndMul, E4M3, 8, 2, false, false>;
        silu_and_mul_e4m3_per_token_wide_bf16 { type T = half::bf16; } [1024, 2] => per_token_held::<T, SiluAndMul, E4M3, 8, 2, false, false>;
        silu_and_mul_e4m3_per_token_any_x4_f32 { type T = f32; } [512] => per_token::<T, SiluAndMul, E4M3, 4, 4, false>;
        silu_and_mul_e4m3_per_token_any_x4_f16 { type T = half::f16; } [1024] => per_token::<T, SiluAndMul, E4M3, 4, 4, false>;
        silu_and_mul_e4m3_per_token_any_x4_bf16 { type T = half::bf16; } [1024] => per_token::<T, SiluAndMul, E4M3, 4, 4, false>;
    }
}
