//! Few long rows of [`rms_norm`](super::rms_norm) and [`rms_norm_quant`](super::rms_norm_quant) on Hopper: a cluster of blocks for each.
//!
//! A row's team is that of the block that it would have, with two, four or eight pieces a thread, but its warps are dealt out to eight blocks ([`Spread`]). What few rows take
//! is one multiprocessor's time to read one: 64 bytes a cycle, of a row, a residual and weights. The exchange costs some 0.1 µs more than a barrier of one block. A thread may have all of what it needs in
//! registers, since a block has 128 threads at most. The same bits.

use super::rms_norm::{Source, inverse, inverse_rms, scaled, squares};
use super::rms_norm_quant::{Factors, Io, Scales};
use super::{MAX_WARPS, Row};
use crate::row::quantise::{self, GroupScales, Quantised};
use crate::row::team::{Op, SPREAD, Spread, spread_bytes};
use crate::row::zero;
use cuda_std::shared::Carver;
use cuda_std::{Float, Global, GlobalMut, thread, vec};

/// The most threads of a block.
pub const BLOCK_THREADS: u32 = 1024 / SPREAD;
/// Its shared memory.
pub const SHARED_BYTES: usize = spread_bytes(2, MAX_WARPS);

/// Warps of a team, at most, as the reductions of [`Row`] have it.
const fn warps(n: usize) -> usize {
    if n > 4 { MAX_WARPS } else { MAX_WARPS / 2 }
}

/// The threads of a row of `n` elements in a block of its own.
#[inline(always)]
fn team_size<const V: usize, const N: usize>(n: u32) -> u32 {
    n.div_ceil(const { (V * N) as u32 }).next_multiple_of(32)
}

/// The number of the cluster's row.
#[inline(always)]
pub(super) fn row_number() -> usize {
    (thread::block_idx_x() / SPREAD) as usize
}

/// What a thread has of its row: what is normalised, its weights, and where results go.
struct Part<T, R, const V: usize, const N: usize> {
    x: [[T; V]; N],
    w: [[T; V]; N],
    to: [GlobalMut<R>; N],
}

/// The beginning: a thread's part of its row. Where results go is computed before the wait for the kernels before, as `words` are.
#[inline(always)]
#[track_caller]
unsafe fn load<T: Float, R: Copy, const ADD: bool, const V: usize, const N: usize>(
    from: Source<T>,
    weight: Global<T>,
    out: GlobalMut<R>,
    row: Row<V, N, true>,
    words: [u32; 2],
) -> Part<T, R, V, N> {
    let other = if ADD { from.residual } else { weight };
    let at = |column| -> [*const u8; 3] {
        [from.x.ptr(column).cast(), other.ptr(column).cast(), out.ptr(column).cast_const().cast()]
    };
    let at = row.begin(true, at, words);
    let (mut x, mut r, mut w) = ([[zero(); V]; N], [[zero(); V]; N], [[zero(); V]; N]);
    cuda_std::unroll::<N>(|i| x[i] = row.here(i).load_mutable(Global::new(at[i][0].cast())));
    if ADD {
        cuda_std::unroll::<N>(|i| r[i] = row.here(i).load_mutable(Global::new(at[i][1].cast())));
    }
    cuda_std::unroll::<N>(|i| w[i] = row.piece(i).load_optional(weight, true));
    let to = at.map(|[_, _, to]| GlobalMut::new(to.cast_mut().cast()));
    Part { x: from.add::<ADD, true, V, N, true>(row, [x, r]), w, to }
}

#[inline(always)]
unsafe fn normalise<T: Float, const ADD: bool, const V: usize, const N: usize, const WARPS: usize>(
    from: impl FnOnce(usize) -> Source<T>,
    weight: *const T,
    out: *mut T,
    n: u32,
    out_stride: usize,
    weight_offset: f32,
    eps: f32,
) {
    const { assert!(WARPS == warps(N)) };
    let team = Spread::<1, WARPS>::new(team_size::<V, N>(n), &mut Carver::new());
    let (from, out) = (from(row_number()), GlobalMut::new(out).offset(row_number() * out_stride));
    let row = Row::<V, N, true>::new(team.team, if team.live { n } else { 0 });
    let inverse_n = inverse(n);
    team.meet();
    let Part { x, w, to } = load::<T, T, ADD, V, N>(from, Global::new(weight), out, row, team.words());
    let mut total = 0.0;
    cuda_std::unroll::<N>(|i| total += squares(x[i]));
    let [total] = team.reduce_warps([Op::Sum.over_warp(total)], [Op::Sum]);
    let scale = inverse_rms(total, inverse_n, eps);
    cuda_std::unroll::<N>(|i| {
        let y = vec::from_f32(scaled(x[i], w[i], scale, weight_offset));
        if ADD {
            // Sums are in place mostly. Such a store wants an address that is known to be global.
            row.piece(i).store_or_keep::<T, true>(out, y);
        } else {
            row.here(i).store(to[i], y);
        }
    });
}

/// As [`rms_norm`](super::rms_norm::rms_norm) of aligned rows, a cluster of [`SPREAD`] blocks for each, of at least as many threads together as the row has in one block, a multiple of 32 each.
#[inline(always)]
pub unsafe fn rms_norm<T: Float, const V: usize, const N: usize, const WARPS: usize>(
    x: *const T,
    weight: *const T,
    out: *mut T,
    _rows: u32,
    n: u32,
    x_stride: usize,
    out_stride: usize,
    weight_offset: f32,
    eps: f32,
) {
    let from = |row: usize| {
        let x = Global::new(x).offset(row * x_stride);
        Source { x, residual: x, residual_out: GlobalMut::new(out) }
    };
    normalise::<T, false, V, N, WARPS>(from, weight, out, n, out_stride, weight_offset, eps);
}

/// As [`rms_norm`], of `x + residual`, which goes to `residual_out`. Outputs may be inputs.
#[inline(always)]
pub unsafe fn fused_add_rms_norm<T: Float, const V: usize, const N: usize, const WARPS: usize>(
    x: *const T,
    residual: *const T,
    weight: *const T,
    out: *mut T,
    residual_out: *mut T,
    _rows: u32,
    n: u32,
    x_stride: usize,
    residual_stride: usize,
    out_stride: usize,
    residual_out_stride: usize,
    weight_offset: f32,
    eps: f32,
) {
    let from = |row: usize| Source {
        x: Global::new(x).offset(row * x_stride),
        residual: Global::new(residual).offset(row * residual_stride),
        residual_out: GlobalMut::new(residual_out).offset(row * residual_out_stride),
    };
    normalise::<T, true, V, N, WARPS>(from, weight, out, n, out_stride, weight_offset, eps);
}

#[inline(always)]
unsafe fn quantise_row<
    T: Float,
    Q: Quantised,
    S: Scales,
    const ADD: bool,
    const V: usize,
    const N: usize,
    const WARPS: usize,
    const K: usize,
>(
    io: Io<T, Q>,
    smooth: *const f32,
    scales: S,
    n: u32,
    weight_offset: f32,
    eps: f32,
) {
    const { assert!(WARPS == warps(N) && K == if S::GROUPED { 1 } else { 2 }) };
    let team = Spread::<K, WARPS>::new(team_size::<V, N>(n), &mut Carver::new());
    let (from, out) = io.row(row_number());
    let factors = Factors { weight: Global::new(io.weight), weight_offset, smooth: Global::new(smooth) };
    let (inverse_n, n) = (inverse(n), if team.live { n } else { 0 });
    // Of eight pieces a thread those of a group do not belong together, as in one block.
    let paired = S::GROUPED && N <= 4;
    let row = if paired { Row::<V, N, true>::grouped(team.team, n) } else { Row::new(team.team, n) };
    team.meet();
    let Part { x, w, to } = load::<T, Q, ADD, V, N>(from, factors.weight, out, row, team.words());
    let mut total = 0.0;
    cuda_std::unroll::<N>(|i| total += squares(x[i]));
    total = Op::Sum.over_warp(total);
    let mut y = [[0.0; V]; N];
    cuda_std::unroll::<N>(|i| y[i] = factors.weighted(x[i], w[i]));
    if factors.smooths() {
        cuda_std::unroll::<N>(|i| y[i] = factors.smoothed(row.piece(i), y[i]));
    }
    let mut sums = [total; K];
    let mut ops = [Op::Sum; K];
    if !S::GROUPED {
        (sums[K - 1], ops[K - 1]) = (Op::Max.over_warp(quantise::amax_of(y)), Op::Max);
    }
    // Largest magnitudes of pieces `2 i` and `2 i + 1`, or of each.
    let mut groups = [0.0; N];
    if S::GROUPED && !paired {
        // Two reductions a piece, while sums are on their way.
        team.tell(sums);
        cuda_std::unroll::<N>(|i| groups[i] = quantise::group_amax(y[i]));
        sums = team.reduce_told(ops);
    } else {
        cuda_std::unroll::<N>(|i| {
            if S::GROUPED && i % 2 == 0 {
                groups[i] = quantise::pair_amax([y[i], y[(i + 1) % N]]);
            }
        });
        sums = team.reduce_warps(sums, ops);
    }
    let (rms, largest) = (inverse_rms(sums[0], inverse_n, eps), sums[K - 1]);
    if paired {
        cuda_std::unroll::<N>(|i| {
            if i % 2 == 0 {
                let (scale, factor) = quantise::scale_and_factor::<Q>(groups[i], rms);
                let pair = row.pair(i / 2);
                GlobalMut::new(scales.place::<V>(pair).cast_mut().cast::<f32>()).set_streaming_if(
                    quantise::stores_pair::<V>(pair, n),
                    0usize,
                    scale,
                );
                row.here(i).store_quantised_at_once(to[i], y[i], factor);
                row.here(i + 1).store_quantised_at_once(to[(i + 1) % N], y[(i + 1) % N], factor);
            }
        });
    } else {
        let (scale, row_factor) = quantise::scale_and_factor::<Q>(largest, rms);
        scales.store_row_if(team.team.rank == 0, scale);
        cuda_std::unroll::<N>(|i| {
            let mut factor = row_factor;
            if S::GROUPED {
                let (scale, own) = quantise::scale_and_factor::<Q>(groups[i], rms);
                // Without a branch for each of the eight, which took 1 × 32768 0.2 µs. A group is that of pairs of pieces of half as many lanes.
                let pair = row.index(i) / 2;
                let first = row.index(i).is_multiple_of(2) && quantise::stores_pair::<V>(pair, n);
                let place = GlobalMut::new(scales.place::<V>(pair).cast_mut().cast::<f32>());
                place.set_streaming_if(first, 0usize, scale);
                factor = own;
            }
            row.here(i).store_quantised_at_once(to[i], y[i], factor);
        });
    }
}

/// As [`per_token`](super::rms_norm_quant::per_token) of aligned rows, launched as [`rms_norm`].
#[inline(always)]
pub unsafe fn per_token<T: Float, Q: Quantised, const ADD: bool, const V: usize, const N: usize, const WARPS: usize>(
    x: *const T,
    residual: *mut T,
    weight: *const T,
    smooth: *const f32,
    out: *mut Q,
    scales: *mut f32,
    _rows: u32,
    n: u32,
    x_stride: usize,
    residual_stride: usize,
    out_stride: usize,
    weight_offset: f32,
    eps: f32,
) {
    let scales = GlobalMut::new(scales).offset(row_number());
    let io = Io { x, residual, weight, out, x_stride, residual_stride, out_stride };
    quantise_row::<T, Q, _, ADD, V, N, WARPS, 2>(io, smooth, scales, n, weight_offset, eps);
}

/// As [`per_group`](super::rms_norm_quant::per_group) of aligned rows, launched as [`rms_norm`].
#[inline(always)]
pub unsafe fn per_group<T: Float, Q: Quantised, const ADD: bool, const V: usize, const N: usize, const WARPS: usize>(
    x: *const T,
    residual: *mut T,
    weight: *const T,
    out: *mut Q,
    scales: *mut f32,
    _rows: u32,
    n: u32,
    x_stride: usize,
    residual_stride: usize,
    out_stride: usize,
    scale_row_stride: usize,
    scale_group_stride: usize,
    weight_offset: f32,
    eps: f32,
) {
    let scales = GroupScales {
        scales: GlobalMut::new(scales).offset(row_number() * scale_row_stride),
        stride: scale_group_stride,
    };
    let io = Io { x, residual, weight, out, x_stride, residual_stride, out_stride };
    quantise_row::<T, Q, _, ADD, V, N, WARPS, 1>(io, core::ptr::null(), scales, n, weight_offset, eps);
}
