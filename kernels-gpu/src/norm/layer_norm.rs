//! `y = (x - mean) / sqrt(mean((x - mean)^2) + eps) * w + b`.
//!
//! The variance is that of differences, which does not cancel, as the difference of `mean(x^2)` and `mean(x)^2` would.
//! In registers a warp takes the mean of its part of the row and the squares of differences from that; one barrier later
//! every thread knows all parts and merges them ([`merge`]). Rows of eight pieces a thread (`x8`) take two barriers, since differences would
//! take twice the registers that the row does as it came. Longer rows are read once for the mean, once for the squares and once for the results.
//! Few long rows have clusters on Hopper ([`layer_norm_cluster`](super::layer_norm_cluster)); many that are not aligned are taken in turns there ([`layer_norm_any_ring`](super::layer_norm_any_ring)).

use super::rms_norm::{inverse, inverse_rms};
use super::{MAX_WARPS, Row, layer_norm_any_ring as any_ring, layer_norm_cluster as spread};
use crate::row::team::{Op, scratch};
use crate::row::{Team, unpacked_again, zero};
use cuda_std::shared::Carver;
use cuda_std::vec::B128;
use cuda_std::{Float, Global, GlobalMut, Shared, dependent_launch, entries, float, thread, vec, warp};

/// Dynamic shared memory of a block.
pub const SHARED_BYTES: usize = 3 * MAX_WARPS * 4;

/// Mean and `1 / sqrt(variance + eps)` of a row, from what its warps know of their parts of it: means, sums of squares of differences from them,
/// and how many columns there are. One barrier.
///
/// Squares are moved to the mean of the first warp's part, which is the largest, summed, and moved to that of the row. That takes off no more than
/// a share of `1 - columns of the first / columns`, so what remains is a sixteenth or more: nothing to speak of cancels, and nothing is negative.
#[inline(always)]
#[track_caller]
unsafe fn merge<const WARPS: usize>(
    team: Team,
    [mean, squares, columns]: [f32; 3],
    inverse_n: f32,
    eps: f32,
    scratch: Shared<f32>,
) -> (f32, f32) {
    if team.size <= 32 {
        return (mean, inverse_rms(squares, inverse_n, eps));
    }
    let (warp, lane, warps) = ((team.rank / 32) as usize, (team.rank % 32) as usize, (team.size / 32) as usize);
    if lane == 0 {
        scratch.set(warp, mean);
        scratch.set(WARPS + warp, squares);
        scratch.set(2 * WARPS + warp, columns);
    }
    if warp == 0 && lane >= warps && lane < WARPS {
        cuda_std::unroll::<3>(|k| scratch.set(k * WARPS + lane, 0.0));
    }
    thread::sync_threads();
    merged::<_, WARPS>(InScratch::<WARPS>(scratch), warps, inverse_n, eps)
}

/// What the warps of a row know of their parts of it, where all threads may read it.
pub(super) trait Parts: Copy {
    /// The first one's mean.
    unsafe fn first(self) -> f32;
    /// Of four warps, from the `i`-th on, means, squares or columns: `k` is 0, 1 or 2.
    unsafe fn four(self, k: usize, i: usize) -> [f32; 4];
}

/// All means, then all squares, then all columns.
#[derive(Clone, Copy)]
struct InScratch<const WARPS: usize>(Shared<f32>);

impl<const WARPS: usize> Parts for InScratch<WARPS> {
    #[inline(always)]
    unsafe fn first(self) -> f32 {
        self.0.get(0usize)
    }

    #[inline(always)]
    unsafe fn four(self, k: usize, i: usize) -> [f32; 4] {
        let B128(four): B128<f32, 4> = self.0.get_as(k * WARPS + i);
        four
    }
}

/// The end of [`merge`], of so many `warps`, up to `WARPS`.
#[inline(always)]
#[track_caller]
pub(super) unsafe fn merged<P: Parts, const WARPS: usize>(
    parts: P,
    warps: usize,
    inverse_n: f32,
    eps: f32,
) -> (f32, f32) {
    let (sum, squares) = if warps <= 4 {
        from_first::<P, 4>(parts)
    } else if warps <= 8 {
        from_first::<P, 8>(parts)
    } else {
        from_first::<P, WARPS>(parts)
    };
    // Where the squares are beyond f32, so may the sum be, and the difference below would be no number: the row becomes zeros, as in the other kernels.
    // (With an infinity in the row the squares are no number already.)
    let sum = if squares == f32::INFINITY { 0.0 } else { sum };
    let distance = sum * inverse_n;
    (parts.first() + distance, inverse_rms(float::fma(-sum, distance, squares), inverse_n, eps))
}

/// Of the first `N` warps' parts, what columns are off the mean of the first part, and their squares: sums.
#[inline(always)]
#[track_caller]
unsafe fn from_first<P: Parts, const N: usize>(parts: P) -> (f32, f32) {
    let first = parts.first();
    let (mut sums, mut squares) = ([0.0; 4], [0.0; 4]);
    let mut i = 0;
    while i < N {
        let (m, s, c) = (parts.four(0, i), parts.four(1, i), parts.four(2, i));
        cuda_std::unroll::<4>(|j| {
            let d = m[j] - first;
            let sum = c[j] * d;
            sums[j] += sum;
            squares[j] += float::fma(sum, d, s[j]);
        });
        i += 4;
    }
    ((sums[0] + sums[1]) + (sums[2] + sums[3]), (squares[0] + squares[1]) + (squares[2] + squares[3]))
}

/// The sum over the team if it is part of a warp, otherwise over the warp.
#[inline(always)]
#[track_caller]
fn over_lanes(team: Team, [a, b, c, d]: [f32; 4]) -> f32 {
    let mut total = (a + b) + (c + d);
    if team.size >= 32 {
        return Op::Sum.over_warp(total);
    }
    let mut m = team.size / 2;
    while m > 0 {
        total += warp::shfl_xor(total, m);
        m /= 2;
    }
    total
}

/// A row that is held in registers. `words` are to be known before the wait for the kernels before. From what the thread's warp knows of its part (mean, sum of squares of differences from that, columns) and `1 / n`,
/// `merge` makes mean and `1 / sqrt(variance + eps)` of the row.
#[inline(always)]
#[track_caller]
pub(super) unsafe fn held<T: Float, const V: usize, const N: usize, const MANY: bool, const K: usize>(
    x: Global<T>,
    weight: Global<T>,
    bias: Global<T>,
    out: impl FnOnce() -> GlobalMut<T>,
    team: Team,
    n: u32,
    live: bool,
    words: [u32; K],
    merge: impl FnOnce([f32; 3], f32) -> (f32, f32),
) {
    let row = Row::<V, N, true>::new(team, if live { n } else { 0 });
    let inverse_n = inverse(n);
    let (mut w, mut b) = ([[zero(); V]; N], [[zero(); V]; N]);
    let mut values = w;
    if !MANY {
        let at = |c: u32| [x.ptr(c).cast::<u8>(), weight.ptr(c).cast(), bias.ptr(c).cast()];
        let at = row.begin(true, at, words);
        cuda_std::unroll::<N>(|i| values[i] = row.here(i).load_mutable(Global::new(at[i][0].cast())));
        cuda_std::unroll::<N>(|i| {
            w[i] = row.piece(i).load_optional(weight, true);
            b[i] = row.piece(i).load_optional(bias, false);
        });
    } else {
        dependent_launch::begin();
        cuda_std::unroll::<N>(|i| values[i] = row.piece(i).load_mutable(x));
    }

    // Of the warp's part of the row; of the row if that is no more.
    let mut columns = 0;
    cuda_std::unroll::<N>(|i| {
        let (first, end) = (i as u32 * team.size + team.rank / 32 * 32, if live { n / V as u32 } else { 0 });
        columns += end.saturating_sub(first).min(32);
    });
    let columns = if team.size >= 32 { (columns * V as u32) as f32 } else { n as f32 };
    let mut d = [[0.0; V]; N];
    let mut sums = [0.0; 4];
    cuda_std::unroll::<N>(|i| {
        d[i] = vec::to_f32(values[i]);
        cuda_std::unroll::<V>(|j| sums[j % 4] += d[i][j]);
    });
    let columns_or_one = float::max(columns, 1.0);
    let own = quotient(over_lanes(team, sums), columns_or_one, float::fast::recip(columns_or_one));
    let mut sums = [0.0; 4];
    cuda_std::unroll::<N>(|i| {
        // Columns outside of the row are not zeros any more once the mean is taken off.
        if row.piece(i).has(0) {
            cuda_std::unroll::<V>(|j| {
                d[i][j] -= own;
                sums[j % 4] = float::fma(d[i][j], d[i][j], sums[j % 4]);
            });
        }
    });
    let squares = over_lanes(team, sums);
    let (mean, scale) = merge([own, squares, columns], inverse_n);
    // That of the warp's part is off by no more than four deviations or so, which is no loss beside a difference from it.
    let (shift, out) = ((own - mean) * scale, out());
    cuda_std::unroll::<N>(|i| {
        if MANY {
            w[i] = row.piece(i).load_optional(weight, true);
            b[i] = row.piece(i).load_optional(bias, false);
        }
        let (w, b) = (vec::to_f32(w[i]), vec::to_f32(b[i]));
        let mut y = d[i];
        cuda_std::unroll::<V>(|j| y[j] = float::fma(float::fma(y[j], scale, shift), w[j], b[j]));
        row.piece(i).store(out, vec::from_f32(y));
    });
}

/// A row in two sums, mean first, after [`dependent_launch::begin`]: read again for each, or with `N` held in registers, which gives the same bits.
#[inline(always)]
#[track_caller]
unsafe fn twice<T: Float, const V: usize, const N: usize, const VEC: bool>(
    x: Global<T>,
    weight: Global<T>,
    bias: Global<T>,
    out: GlobalMut<T>,
    team: Team,
    n: u32,
    live: bool,
    eps: f32,
) {
    let mut shared = Carver::new();
    let (scratch_sum, scratch_squares) = (scratch::<1, MAX_WARPS>(&mut shared), scratch::<1, MAX_WARPS>(&mut shared));
    let row = Row::<V, N, VEC>::new(team, if live { n } else { 0 });
    let (mut total, inverse_n) = (0.0, inverse(n));
    let (mut held, mut words) = ([[zero(); V]; N], [[0; 4]; N]);
    if VEC && N > 0 {
        cuda_std::unroll::<N>(|i| words[i] = row.piece(i).load_mutable_words(x));
    } else {
        cuda_std::unroll::<N>(|i| held[i] = row.piece(i).load_mutable(x));
    }
    // `zeros`: a 0 that is not known as such, of another making each time.
    let piece = |i: usize, zeros: u32| {
        vec::to_f32(match (N, VEC) {
            (0, _) => row.piece(i).load_mutable(x),
            (_, true) => unpacked_again(words[i], zeros),
            _ => held[i],
        })
    };
    each::<N>(row.rounds(), |i| {
        let x = piece(i, 0);
        cuda_std::unroll::<V>(|j| total += x[j]);
    });
    let [total] = row.reduce([total], [Op::Sum], scratch_sum);
    let mean = quotient(total, n as f32, inverse_n);
    let row = if N > 4 { row.anew(1) } else { row };

    let mut squares = 0.0;
    each::<N>(row.rounds(), |i| {
        let x = piece(i, row.zeros()[0]);
        cuda_std::unroll::<V>(|j| {
            let d = if row.piece(i).has(j) { x[j] - mean } else { 0.0 };
            squares = float::fma(d, d, squares);
        });
    });
    let [squares] = row.reduce([squares], [Op::Sum], scratch_squares);
    let scale = inverse_rms(squares, inverse_n, eps);

    let row = if N > 4 { row.anew(2) } else { row };
    each::<N>(row.rounds(), |i| {
        let p = row.piece(i);
        let (w, b) = (p.load_optional(weight, true), p.load_optional(bias, false));
        let (mut x, w, b) = (piece(i, row.zeros()[1]), vec::to_f32(w), vec::to_f32(b));
        cuda_std::unroll::<V>(|j| x[j] = float::fma((x[j] - mean) * scale, w[j], b[j]));
        p.store(out, vec::from_f32(x));
    });
}

/// `a / b` from the reciprocal of `b`, rounded once where the quotient has few digits: rows all of whose elements are the same are zeroes then, if their sum is exact.
#[inline(always)]
pub(super) fn quotient(a: f32, b: f32, inverse: f32) -> f32 {
    let near = a * inverse;
    float::fma(float::fma(-near, b, a), inverse, near)
}

/// `f` of the numbers of a thread's pieces: `N`, or `rounds` if `N` is 0.
#[inline(always)]
#[track_caller]
fn each<const N: usize>(rounds: usize, mut f: impl FnMut(usize)) {
    if N > 0 {
        return cuda_std::unroll::<N>(f);
    }
    let mut i = 0;
    while i < rounds {
        f(i);
        i += 1;
    }
}

/// `x`, `out`: `[rows, n]`, rows `x_stride` and `out_stride` elements apart; `weight`, `bias`: `[n]` or null for ones
/// and zeros. Blocks: `(team, rows)`, the team as [`Team`] demands. `MANY`: weight and bias are loaded last, which leaves registers for two blocks of
/// 512 threads; a block has one row.
#[inline(always)]
pub unsafe fn layer_norm<T: Float, const V: usize, const N: usize, const VEC: bool, const MANY: bool>(
    x: *const T,
    weight: *const T,
    bias: *const T,
    out: *mut T,
    rows: u32,
    n: u32,
    x_stride: usize,
    out_stride: usize,
    eps: f32,
) {
    let in_block = if MANY || N > 4 { 0 } else { thread::thread_idx_y() };
    let held_whole = N > 0 && N <= 4 && VEC;
    if !held_whole {
        dependent_launch::begin();
    }
    let row = (thread::block_idx_x() * thread::block_dim_y() + in_block) as usize;
    let live = row < rows as usize;
    let (x, out) = (Global::new(x).offset(row * x_stride), GlobalMut::new(out));
    // Where registers are few they are not for an address that is needed last.
    let out = || out.offset(if MANY { thread::block_idx_x() as usize } else { row } * out_stride);
    let (weight, bias, team) = (Global::new(weight), Global::new(bias), Team::current());
    if held_whole {
        let scratch = scratch::<3, MAX_WARPS>(&mut Carver::new());
        let merge = |part, inverse_n| merge::<{ MAX_WARPS / 2 }>(team, part, inverse_n, eps, scratch);
        held::<T, V, N, MANY, 0>(x, weight, bias, out, team, n, live, [], merge);
    } else {
        twice::<T, V, N, VEC>(x, weight, bias, out(), team, n, live, eps);
    }
}

entries! {
    pub struct Args<T>(
        x: *const T, weight: *const T, bias: *const T, out: *mut T, rows: u32, n: u32, x_stride: usize,
        out_stride: usize, eps: f32,
    );
    layer_norm_x2_f32 { type T = f32; } [512] => layer_norm::<T, 4, 2, true, false>;
    layer_norm_x2_f16 { type T = half::f16; } [512] => layer_norm::<T, 8, 2, true, false>;
    layer_norm_x2_bf16 { type T = half::bf16; } [512] => layer_norm::<T, 8, 2, true, false>;
    layer_norm_x4_f32 { type T = f32; } [512] => layer_norm::<T, 4, 4, true, false>;
    layer_norm_x4_f16 { type T = half::f16; } [512] => layer_norm::<T, 8, 4, true, false>;
    layer_norm_x4_bf16 { type T = half::bf16; } [512] => layer_norm::<T, 8, 4, true, false>;
    layer_norm_loop_f32 { type T = f32; } [1024] => layer_norm::<T, 4, 0, true, false>;
    layer_norm_loop_f16 { type T = half::f16; } [1024] => layer_norm::<T, 8, 0, true, false>;
    layer_norm_loop_bf16 { type T = half::bf16; } [1024] => layer_norm::<T, 8, 0, true, false>;
    layer_norm_any_f32 { type T = f32; } [1024] => layer_norm::<T, 4, 0, false, false>;
    layer_norm_any_f16 { type T = half::f16; } [1024] => layer_norm::<T, 4, 0, false, false>;
    layer_norm_any_bf16 { type T = half::bf16; } [1024] => layer_norm::<T, 4, 0, false, false>;
    layer_norm_x4_many_f32 { type T = f32; } [512, 2] => layer_norm::<T, 4, 4, true, true>;
    layer_norm_x4_many_f16 { type T = half::f16; } [512, 2] => layer_norm::<T, 8, 4, true, true>;
    layer_norm_x4_many_bf16 { type T = half::bf16; } [512, 2] => layer_norm::<T, 8, 4, true, true>;
    layer_norm_any_x4_f32 { type T = f32; } [1024] => layer_norm::<T, 4, 4, false, false>;
    layer_norm_any_x4_f16 { type T = half::f16; } [1024] => layer_norm::<T, 4, 4, false, false>;
    layer_norm_any_x4_bf16 { type T = half::bf16; } [1024] => layer_norm::<T, 4, 4, false, false>;
    layer_norm_x8_f32 { type T = f32; } [1024] => layer_norm::<T, 4, 8, true, false>;
    layer_norm_x8_f16 { type T = half::f16; } [1024] => layer_norm::<T, 8, 8, true, false>;
    layer_norm_x8_bf16 { type T = half::bf16; } [1024] => layer_norm::<T, 8, 8, true, false>;
    layer_norm_cluster_x4_f32 { type T = f32; } [spread::BLOCK_THREADS, 1; Sm90a] => spread::layer_norm::<T, 4, 4>;
    layer_norm_cluster_x4_f16 { type T = half::f16; } [spread::BLOCK_THREADS, 1; Sm90a] => spread::layer_norm::<T, 8, 4>;
    layer_norm_cluster_x4_bf16 { type T = half::bf16; } [spread::BLOCK_THREADS, 1; Sm90a] => spread::layer_norm::<T, 8, 4>;
    layer_norm_any_ring_f16 { type T = half::f16; } [crate::norm::rms_norm_any_ring::BLOCK_THREADS, 2; Sm90a] => any_ring::layer_norm::<T>;
    layer_norm_any_ring_bf16 { type T = half::bf16; } [crate::norm::rms_norm_any_ring::BLOCK_THREADS, 2; Sm90a] => any_ring::layer_norm::<T>;
}
