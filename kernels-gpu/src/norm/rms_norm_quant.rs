//! RMS normalisation with 8-bit results, optionally of a sum with a residual, as [`rms_norm`](super::rms_norm).
//!
//! The largest result of a row (or of a group of columns) is the largest `|x w|` times the row's factor
//! `1 / sqrt(mean(x^2) + eps)`. So it is found together with the sum of squares, at one barrier, and quantising costs
//! nothing but arithmetic. Results are quantised from f32; they are not rounded to the input's type before.

use super::rms_norm::{Source, inverse, inverse_rms, scaled, squares};
use super::{
    FEW_ROWS, MAX_WARPS, NARROW_WARPS, RING, Row, rms_norm_any_ring as any_ring, rms_norm_cluster as spread,
    rms_norm_quant_ring as ring, row_number,
};
use crate::row::quantise::{self, GroupScales, Quantised};
use crate::row::team::{Op, scratch};
use crate::row::{Piece, Team, Words, unpacked, unpacked_again, zero};
use cuda_std::shared::Carver;
use cuda_std::{E4M3, Float, Global, GlobalMut, dependent_launch, entries, float, integer, shared, thread};

/// Dynamic shared memory of a block: a sum and a largest magnitude for each warp.
pub const SHARED_BYTES: usize = 2 * MAX_WARPS * 4;

/// The most threads of a block with eight pieces a thread: more of them have no registers for a residual, factors and results beside the row.
pub const X8_THREADS: u32 = 640;

/// The most threads of a block that takes rows in turns and keeps their results, eight pieces of 16-bit elements a thread.
pub const RING_THREADS: u32 = 512;

/// Up to so many elements results of groups are stored before the row's factor is known. In longer launches the memory is what takes time, and
/// works better on loads by themselves. Measured on an H200.
const MOST_EARLY: u64 = 1 << 20;

/// What the results are multiplied by, besides the row's factor.
#[derive(Clone, Copy)]
pub(super) struct Factors<T> {
    pub(super) weight: Global<T>,
    pub(super) weight_offset: f32,
    pub(super) smooth: Global<f32>,
}

impl<T: Float> Factors<T> {
    /// `x * (w + offset)`
    #[inline(always)]
    pub(super) fn weighted<const V: usize>(self, x: [T; V], w: [T; V]) -> [f32; V] {
        scaled(x, w, 1.0, self.weight_offset)
    }

    /// Whether there is anything else.
    #[inline(always)]
    pub(super) fn smooths(self) -> bool {
        !self.smooth.ptr(0usize).is_null()
    }

    /// `y * smooth`
    #[inline(always)]
    #[track_caller]
    pub(super) unsafe fn smoothed<const V: usize, const VEC: bool>(
        self,
        piece: Piece<V, VEC>,
        mut y: [f32; V],
    ) -> [f32; V] {
        let smooth = piece.load_factors(self.smooth);
        cuda_std::unroll::<V>(|j| y[j] *= smooth[j]);
        y
    }

    /// `x * (w + offset) * smooth`
    #[inline(always)]
    #[track_caller]
    unsafe fn apply<const V: usize, const VEC: bool>(self, piece: Piece<V, VEC>, x: [T; V], w: [T; V]) -> [f32; V] {
        let y = self.weighted(x, w);
        if self.smooths() { self.smoothed(piece, y) } else { y }
    }
}

/// Where scales go.
pub(super) trait Scales: Copy {
    /// Whether each group of columns has one; otherwise each row has.
    const GROUPED: bool;
    /// Stores the scale of the whole row if `first`.
    unsafe fn store_row_if(self, first: bool, scale: f32);
    /// Stores the scale of the group of piece `index`.
    unsafe fn store_group<const V: usize>(self, index: u32, n: u32, scale: f32);
    /// Where the scale of the group of the pair of pieces number `pair` is.
    fn place<const V: usize>(self, pair: u32) -> *const u8;
}

impl Scales for GlobalMut<f32> {
    const GROUPED: bool = false;
    #[inline(always)]
    #[track_caller]
    unsafe fn store_row_if(self, first: bool, scale: f32) {
        self.set_streaming_if(first, 0usize, scale);
    }
    #[inline(always)]
    unsafe fn store_group<const V: usize>(self, _: u32, _: u32, _: f32) {}
    #[inline(always)]
    fn place<const V: usize>(self, _: u32) -> *const u8 {
        core::ptr::null()
    }
}

impl Scales for GroupScales {
    const GROUPED: bool = true;
    #[inline(always)]
    unsafe fn store_row_if(self, _: bool, _: f32) {}
    #[inline(always)]
    #[track_caller]
    unsafe fn store_group<const V: usize>(self, index: u32, n: u32, scale: f32) {
        self.store::<V>(index, n, scale);
    }
    #[inline(always)]
    fn place<const V: usize>(self, pair: u32) -> *const u8 {
        GroupScales::place::<V>(self, pair)
    }
}

/// A thread does what `U` threads with `N / U` pieces each do, and gets the same bits: their sums stay apart until warps are reduced. `FEW`: addresses
/// are known before the wait in any launch. `MANY`: launches are long, so that results of groups wait for the row's factor.
#[inline(always)]
#[track_caller]
unsafe fn normalise<
    T: Float,
    Q: Quantised,
    S: Scales,
    const ADD: bool,
    const V: usize,
    const N: usize,
    const VEC: bool,
    const FEW: bool,
    const MANY: bool,
    const U: usize,
    const NARROW: bool,
>(
    from: Source<T>,
    factors: Factors<T>,
    out: GlobalMut<Q>,
    scales: S,
    rows: u32,
    live: bool,
    n: u32,
    eps: f32,
) {
    let team = Team::current();
    let mut scratch = scratch::<2, MAX_WARPS>(&mut Carver::new());
    if NARROW {
        scratch = scratch.offset(thread::thread_idx_y() * 2 * NARROW_WARPS as u32);
    }
    // A team without a row takes part in reductions only.
    let (inverse_n, n) = (inverse(n), if live { n } else { 0 });
    let row = if S::GROUPED { Row::<V, N, VEC>::grouped(team, n) } else { Row::<V, N, VEC>::new(team, n) };
    let (mut totals, mut largest) = ([0.0; U], 0.0);

    let (mut inputs, mut w) = ([[[zero(); V]; N]; 2], [[zero(); V]; N]);
    // Where results go, in groups without a residual. Elsewhere it is faster to find out after the reduction.
    let mut to = [core::ptr::null::<u8>(); N];
    // Whether there are registers to know early what is stored last, and whether it is faster to know nothing early.
    let (soon, late) = (VEC && U == 1 && (ADD || N == 2), U > 1 && MANY);
    // Whether the weights wait for registers.
    let wait = ADD && !VEC;
    // Where scales of groups go, then.
    let (mut scale_to, pair) = ([core::ptr::null::<u8>(); N], |i: usize| row.pair(i));
    if VEC && !late && (ADD || FEW || S::GROUPED) {
        let before = ADD || FEW || thread::grid_dim_x() <= FEW_ROWS;
        let mut word = shared::address(scratch.ptr(0usize).cast_const());
        if S::GROUPED && soon {
            let mut i = 0;
            while i < N.div_ceil(2) {
                scale_to[i] = scales.place::<V>(pair(i));
                word &= scale_to[i] as u32 & (scale_to[i] as u64 >> 32) as u32;
                i += 1;
            }
        }
        if S::GROUPED && !ADD {
            cuda_std::unroll::<N>(|i| {
                to[i] = integer::opaque_address(out.ptr(row.piece(i).first()).cast_const().cast());
                word &= to[i] as u32 & (to[i] as u64 >> 32) as u32;
            });
        }
        let (x, r, weight) = (from.x, from.residual, factors.weight);
        // Where weights stand first, ptxas finds an order that is 2 to 5 % faster; elsewhere it does not.
        let first = ADD != S::GROUPED && (ADD || N == 2);
        let at: [[*const u8; 3]; N] = if first {
            let at = |c: u32| [weight.ptr(c).cast(), x.ptr(c).cast(), if ADD { r } else { x }.ptr(c).cast()];
            row.begin(before, at, [word]).map(|[_, x, r]| [x, r, r])
        } else if ADD {
            row.begin(before, |c| [x.ptr(c).cast(), r.ptr(c).cast(), weight.ptr(c).cast()], [word])
        } else {
            row.begin(before, |c| [x.ptr(c).cast(), weight.ptr(c).cast()], [word]).map(|[x, w]| [x, x, w])
        };
        if first {
            cuda_std::unroll::<N>(|i| w[i] = row.piece(i).load_optional(factors.weight, true));
        }
        cuda_std::unroll::<N>(|i| inputs[0][i] = row.here(i).load_mutable(Global::new(at[i][0].cast())));
        if ADD {
            cuda_std::unroll::<N>(|i| inputs[1][i] = row.here(i).load_mutable(Global::new(at[i][1].cast())));
        }
        if !first {
            cuda_std::unroll::<N>(|i| w[i] = row.piece(i).load_optional(factors.weight, true));
        }
    } else {
        dependent_launch::begin();
        cuda_std::unroll::<N>(|i| inputs[0][i] = row.piece(i).load_mutable(from.x));
        if ADD {
            cuda_std::unroll::<N>(|i| inputs[1][i] = row.piece(i).load_mutable(from.residual));
        }
        if !wait {
            cuda_std::unroll::<N>(|i| w[i] = row.piece(i).load_optional(factors.weight, true));
        }
    }
    // Sums of long rows rather make room for the results.
    let x = from.add::<ADD, NARROW, V, N, VEC>(row, inputs);
    if wait {
        cuda_std::unroll::<N>(|i| w[i] = row.piece(i).load_optional(factors.weight, true));
    }
    cuda_std::unroll::<N>(|i| totals[if S::GROUPED { i / 2 % U } else { i % U }] += squares(x[i]));
    // The shuffles of the sum leave time for what follows; without groups and a residual rather for the largest magnitude, after it.
    if S::GROUPED || ADD {
        cuda_std::unroll::<U>(|u| totals[u] = Op::Sum.over_warp(totals[u]));
    }
    // The largest magnitudes of the groups: that of pieces `2 i` and `2 i + 1` at `i`; see `Row::grouped` for a last one alone. Of single elements
    // each piece has one.
    let (mut y, mut groups) = ([[0.0; V]; N], [0.0; N]);
    cuda_std::unroll::<N>(|i| y[i] = factors.weighted(x[i], w[i]));
    if factors.smooths() {
        cuda_std::unroll::<N>(|i| y[i] = factors.smoothed(row.piece(i), y[i]));
    }
    // Results of groups: pieces `2 i` and `2 i + 1`, if there are two.
    let store_pair = |i: usize, factor: f32| {
        for i in 2 * i..N.min(2 * i + 2) {
            if ADD || late {
                row.piece(i).store_quantised_at_once(out, y[i], factor);
            } else {
                let (piece, out) = (row.here(i), GlobalMut::new(to[i].cast_mut().cast::<Q>()));
                if soon {
                    piece.store_quantised_at_once(out, y[i], factor);
                } else {
                    piece.store_quantised(out, y[i], factor);
                }
            }
        }
    };
    // But for the rarest of groups, scales alone depend on the rest of the row.
    let rows = if NARROW { rows } else { thread::grid_dim_x() };
    let early = S::GROUPED && soon && !MANY && n as u64 * rows as u64 <= MOST_EARLY;
    let total;
    if S::GROUPED {
        if !VEC {
            cuda_std::unroll::<N>(|i| groups[i] = quantise::group_amax(y[i]));
        }
        let mut i = 0;
        while VEC && i < N.div_ceil(2) {
            groups[i] = if 2 * i + 1 < N {
                quantise::pair_amax([y[2 * i], y[(2 * i + 1) % N]])
            } else {
                quantise::half_amax(y[2 * i])
            };
            if early {
                store_pair(i, quantise::factor_up_to::<Q>(groups[i]));
            }
            i += 1;
        }
        [total] = if NARROW && U > 1 {
            Team::combine([totals], [Op::Sum])
        } else if NARROW {
            team.reduce_warps::<1, U, NARROW_WARPS>([totals], [Op::Sum], scratch)
        } else {
            row.reduce_warps([totals], [Op::Sum], scratch)
        };
    } else {
        if !ADD {
            cuda_std::unroll::<U>(|u| totals[u] = Op::Sum.over_warp(totals[u]));
        }
        largest = quantise::amax_of(y);
        let most = [Op::Max.over_warp(largest); U];
        [total, largest] = if NARROW && U > 1 {
            Team::combine([totals, most], [Op::Sum, Op::Max])
        } else if NARROW {
            team.reduce_warps::<2, U, NARROW_WARPS>([totals, most], [Op::Sum, Op::Max], scratch)
        } else {
            row.reduce_warps([totals, most], [Op::Sum, Op::Max], scratch)
        };
    }
    let rms = inverse_rms(total, inverse_n, eps);
    let (scale, row_factor) = quantise::scale_and_factor::<Q>(largest, rms);

    if S::GROUPED && !VEC {
        cuda_std::unroll::<N>(|i| {
            let (scale, factor) = quantise::scale_and_factor::<Q>(groups[i], rms);
            scales.store_group::<V>(row.index(i), n, scale);
            row.piece(i).store_quantised(out, y[i], factor);
        });
    } else if S::GROUPED {
        let mut i = 0;
        while i < N.div_ceil(2) {
            let (scale, factor) = quantise::scale_and_factor::<Q>(groups[i], rms);
            let to = if soon { scale_to[i] } else { scales.place::<V>(pair(i)) };
            GlobalMut::new(to.cast_mut().cast::<f32>()).set_streaming_if(
                quantise::stores_pair::<V>(pair(i), n) && (2 * i + 1 < N || team.rank < 16),
                0usize,
                scale,
            );
            if !early || factor != quantise::factor_up_to::<Q>(groups[i]) {
                store_pair(i, factor);
            }
            i += 1;
        }
    } else {
        // Among other instructions: behind the results, or behind a branch, it would be what everybody waits for.
        scales.store_row_if(live && team.rank == 0, scale);
        cuda_std::unroll::<N>(|i| row.piece(i).store_quantised_at_once(out, y[i], row_factor));
    }
}

/// As [`normalise`] for long rows, which are read again.
#[inline(always)]
#[track_caller]
unsafe fn again<T: Float, Q: Quantised, S: Scales, const ADD: bool, const V: usize, const VEC: bool>(
    from: Source<T>,
    factors: Factors<T>,
    out: GlobalMut<Q>,
    scales: S,
    n: u32,
    eps: f32,
) {
    let row = Row::<V, 0, VEC>::new(Team::current(), n);
    let (mut total, mut largest) = (0.0, 0.0);
    dependent_launch::begin();
    let mut i = 0;
    while i < row.rounds() {
        let x = from.first::<ADD, V, 0, VEC>(row, i);
        total += squares(x);
        if !S::GROUPED {
            let w = row.piece(i).load_optional(factors.weight, true);
            largest = float::max(largest, quantise::amax(factors.apply(row.piece(i), x, w)));
        }
        i += 1;
    }
    let (rms, largest) = row_sums::<S, V, 0, VEC>(row, total, largest, n, eps);
    let (scale, row_factor) = quantise::scale_and_factor::<Q>(largest, rms);
    scales.store_row_if(row.team.rank == 0, scale);
    let mut i = 0;
    while i < row.rounds() {
        let (x, w) = (from.again::<ADD, V, 0, VEC>(row, i), row.piece(i).load_optional(factors.weight, true));
        store_piece::<Q, S, V, 0, VEC>(row, i, factors.apply(row.piece(i), x, w), out, scales, n, rms, row_factor);
        i += 1;
    }
}

/// As [`normalise`] for long rows, held as they came in half of the registers there are. Weights are loaded twice.
#[inline(always)]
#[track_caller]
unsafe fn long<T: Float, Q: Quantised, S: Scales, const ADD: bool, const V: usize, const N: usize>(
    from: Source<T>,
    factors: Factors<T>,
    out: GlobalMut<Q>,
    scales: S,
    n: u32,
    eps: f32,
) {
    let row = Row::<V, N, true>::new(Team::current(), n);
    dependent_launch::begin();
    let held = HeldRow { x: from.hold::<ADD, false, V, N>(row), row: row.anew(1), factors };
    // One branch for all pieces, which their loads need not wait for. What both sides have in common, ptxas would compute before it, for all pieces: so
    // their zeros are not the same.
    let (total, largest) = match (S::GROUPED, factors.smooths()) {
        (true, _) => (held.squares(), 0.0),
        (_, true) => held.squares_and_largest::<true>(row.zeros()[1]),
        _ => held.squares_and_largest::<false>(0),
    };
    let (rms, largest) = row_sums::<S, V, N, true>(row, total, largest, n, eps);
    let (scale, row_factor) = quantise::scale_and_factor::<Q>(largest, rms);
    scales.store_row_if(row.team.rank == 0, scale);
    let held = HeldRow { row: row.anew(2), ..held };
    let store = |i: usize, y| store_piece::<Q, S, V, N, true>(held.row, i, y, out, scales, n, rms, row_factor);
    if factors.smooths() {
        held.results::<true>(row.zeros()[1], |i, _, y| store(i, y));
    } else {
        held.results::<false>(row.zeros()[0], |i, _, y| store(i, y));
    }
}

/// A thread's part of a long row, as it came.
#[derive(Clone, Copy)]
struct HeldRow<T, const V: usize, const N: usize> {
    x: [Words; N],
    row: Row<V, N, true>,
    factors: Factors<T>,
}

impl<T: Float, const V: usize, const N: usize> HeldRow<T, V, N> {
    /// The sum of squares.
    #[inline(always)]
    fn squares(&self) -> f32 {
        let mut total = 0.0;
        cuda_std::unroll::<N>(|i| total += squares::<T, V>(unpacked(self.x[i])));
        total
    }

    /// The sum of squares, and the largest result, but for the row's factor.
    #[inline(always)]
    #[track_caller]
    unsafe fn squares_and_largest<const SMOOTH: bool>(&self, zero: u32) -> (f32, f32) {
        let (mut total, mut largest) = (0.0, 0.0);
        self.results::<SMOOTH>(zero, |_, x, y| {
            total += squares(x);
            largest = float::max(largest, quantise::amax(y));
        });
        (total, largest)
    }

    /// `f` of all pieces, and of their results, but for the row's factor; weights are two pieces ahead. `zero`: as for [`unpacked_again`].
    #[inline(always)]
    #[track_caller]
    unsafe fn results<const SMOOTH: bool>(&self, zero: u32, mut f: impl FnMut(usize, [T; V], [f32; V])) {
        let (row, factors) = (self.row, self.factors);
        let mut w = [[0; 4]; RING];
        let weight = |i: usize| row.piece(i).load_optional_words(factors.weight, true);
        cuda_std::unroll::<RING>(|i| w[i] = weight(i));
        cuda_std::unroll::<N>(|i| {
            let x = unpacked_again::<T, V>(self.x[i], zero);
            let mut y = factors.weighted(x, unpacked(w[i % RING]));
            if i + RING < N {
                w[i % RING] = weight(i + RING);
            }
            if SMOOTH {
                y = factors.smoothed(row.piece(i), y);
            }
            f(i, x, y);
        });
    }
}

/// The factor of a long row of `n` elements, and its largest magnitude if there is a scale for it.
#[inline(always)]
#[track_caller]
pub(super) unsafe fn row_sums<S: Scales, const V: usize, const N: usize, const VEC: bool>(
    row: Row<V, N, VEC>,
    total: f32,
    largest: f32,
    n: u32,
    eps: f32,
) -> (f32, f32) {
    let scratch = scratch::<2, MAX_WARPS>(&mut Carver::new());
    let total = Op::Sum.over_warp(total);
    let [total, largest] = if S::GROUPED {
        let [total] = row.reduce_warps([[total]], [Op::Sum], scratch);
        [total, largest]
    } else {
        row.reduce_warps([[total], [Op::Max.over_warp(largest)]], [Op::Sum, Op::Max], scratch)
    };
    (inverse_rms(total, inverse(n), eps), largest)
}

/// Stores piece `i` of a long row, and the scale of its group if it has one.
#[inline(always)]
#[track_caller]
pub(super) unsafe fn store_piece<Q: Quantised, S: Scales, const V: usize, const N: usize, const VEC: bool>(
    row: Row<V, N, VEC>,
    i: usize,
    y: [f32; V],
    out: GlobalMut<Q>,
    scales: S,
    n: u32,
    rms: f32,
    row_factor: f32,
) {
    if S::GROUPED {
        let (scale, factor) = quantise::scale_and_factor::<Q>(quantise::group_amax(y), rms);
        scales.store_group::<V>(row.index(i), n, scale);
        if N == 0 {
            row.piece(i).store_quantised(out, y, factor);
        } else {
            row.piece(i).store_quantised_at_once(out, y, factor);
        }
    } else if N == 0 {
        row.piece(i).store_quantised(out, y, row_factor);
    } else {
        row.piece(i).store_quantised_at_once(out, y, row_factor);
    }
}

/// The pointers and distances that all kernels here have in common.
pub(super) struct Io<T, Q> {
    pub(super) x: *const T,
    pub(super) residual: *mut T,
    pub(super) weight: *const T,
    pub(super) out: *mut Q,
    pub(super) x_stride: usize,
    pub(super) residual_stride: usize,
    pub(super) out_stride: usize,
}

impl<T: Float, Q: Quantised> Io<T, Q> {
    /// A row's inputs, and its results.
    #[inline(always)]
    pub(super) unsafe fn row(&self, row: usize) -> (Source<T>, GlobalMut<Q>) {
        let from = Source {
            x: Global::new(self.x).offset(row * self.x_stride),
            residual: Global::new(self.residual.cast_const()).offset(row * self.residual_stride),
            residual_out: GlobalMut::new(self.residual).offset(row * self.residual_stride),
        };
        (from, GlobalMut::new(self.out).offset(row * self.out_stride))
    }

    #[inline(always)]
    unsafe fn run<
        S: Scales,
        const ADD: bool,
        const V: usize,
        const N: usize,
        const VEC: bool,
        const FEW: bool,
        const MANY: bool,
        const U: usize,
        const NARROW: bool,
    >(
        self,
        smooth: *const f32,
        scales: S,
        rows: u32,
        n: u32,
        weight_offset: f32,
        eps: f32,
    ) {
        let row = row_number(NARROW);
        let live = !NARROW || row < rows;
        let (from, out) = self.row(row as usize);
        let factors = Factors { weight: Global::new(self.weight), weight_offset, smooth: Global::new(smooth) };
        if N == 0 {
            again::<T, Q, S, ADD, V, VEC>(from, factors, out, scales, n, eps);
        } else if VEC && N > 4 {
            long::<T, Q, S, ADD, V, N>(from, factors, out, scales, n, eps);
        } else {
            normalise::<T, Q, S, ADD, V, N, VEC, FEW, MANY, U, NARROW>(from, factors, out, scales, rows, live, n, eps);
        }
    }
}

/// A multiple of 32 threads for each row; blocks have one row, or `blockDim.y` of them if `NARROW`. `x`, `out`: `[rows, n]`; `residual`: `[rows, n]`, added and
/// replaced by the sum if `ADD`; `weight`: `[n]` or null for ones (then `weight_offset` is 0); `smooth`: `[n]` or null;
/// `scales`: `[rows]`. The results are those of `U` times as many threads with `N / U` pieces each, bit for bit.
#[inline(always)]
pub unsafe fn per_token<
    T: Float,
    Q: Quantised,
    const ADD: bool,
    const V: usize,
    const N: usize,
    const VEC: bool,
    const U: usize,
    const NARROW: bool,
>(
    x: *const T,
    residual: *mut T,
    weight: *const T,
    smooth: *const f32,
    out: *mut Q,
    scales: *mut f32,
    rows: u32,
    n: u32,
    x_stride: usize,
    residual_stride: usize,
    out_stride: usize,
    weight_offset: f32,
    eps: f32,
) {
    let scales = GlobalMut::new(scales).offset(row_number(NARROW));
    let io = Io { x, residual, weight, out, x_stride, residual_stride, out_stride };
    io.run::<_, ADD, V, N, VEC, NARROW, false, U, NARROW>(smooth, scales, rows, n, weight_offset, eps);
}

/// As [`per_token`] without a residual, two pieces a thread, all addresses known before the wait for the kernels before.
#[inline(always)]
pub unsafe fn per_token_few<T: Float, Q: Quantised, const V: usize>(
    x: *const T,
    residual: *mut T,
    weight: *const T,
    smooth: *const f32,
    out: *mut Q,
    scales: *mut f32,
    rows: u32,
    n: u32,
    x_stride: usize,
    residual_stride: usize,
    out_stride: usize,
    weight_offset: f32,
    eps: f32,
) {
    let scales = GlobalMut::new(scales).offset(row_number(false));
    let io = Io { x, residual, weight, out, x_stride, residual_stride, out_stride };
    io.run::<_, false, V, 2, true, true, false, 1, false>(smooth, scales, rows, n, weight_offset, eps);
}

/// As [`per_token`]; `scales`: `[rows, groups]`, strides in elements. `MANY`: for long launches.
#[inline(always)]
pub unsafe fn per_group<
    T: Float,
    Q: Quantised,
    const ADD: bool,
    const V: usize,
    const N: usize,
    const VEC: bool,
    const U: usize,
    const NARROW: bool,
    const MANY: bool,
>(
    x: *const T,
    residual: *mut T,
    weight: *const T,
    out: *mut Q,
    scales: *mut f32,
    rows: u32,
    n: u32,
    x_stride: usize,
    residual_stride: usize,
    out_stride: usize,
    scale_row_stride: usize,
    scale_group_stride: usize,
    weight_offset: f32,
    eps: f32,
) {
    let row = row_number(NARROW) as usize;
    let scales =
        GroupScales { scales: GlobalMut::new(scales).offset(row * scale_row_stride), stride: scale_group_stride };
    let io = Io { x, residual, weight, out, x_stride, residual_stride, out_stride };
    io.run::<_, ADD, V, N, VEC, false, MANY, U, NARROW>(core::ptr::null(), scales, rows, n, weight_offset, eps);
}

/// e4m3, a scale for each row.
pub mod e4m3_per_token {
    use super::*;
    entries! {
        pub struct Args<T>(
            x: *const T, residual: *mut T, weight: *const T, smooth: *const f32, out: *mut E4M3, scales: *mut f32,
            rows: u32, n: u32, x_stride: usize, residual_stride: usize, out_stride: usize, weight_offset: f32, eps: f32,
        );
        rms_norm_e4m3_per_token_x2_f32 { type T = f32; } [512, 3] => per_token::<T, E4M3, false, 4, 2, true, 1, false>;
        rms_norm_e4m3_per_token_x2_f16 { type T = half::f16; } [512, 3] => per_token::<T, E4M3, false, 8, 2, true, 1, false>;
        rms_norm_e4m3_per_token_x2_bf16 { type T = half::bf16; } [512, 3] => per_token::<T, E4M3, false, 8, 2, true, 1, false>;
        rms_norm_e4m3_per_token_x4_f32 { type T = f32; } [512, 2] => per_token::<T, E4M3, false, 4, 4, true, 1, false>;
        rms_norm_e4m3_per_token_x4_f16 { type T = half::f16; } [512, 2] => per_token::<T, E4M3, false, 8, 4, true, 1, false>;
        rms_norm_e4m3_per_token_x4_bf16 { type T = half::bf16; } [512, 2] => per_token::<T, E4M3, false, 8, 4, true, 1, false>;
        rms_norm_e4m3_per_token_loop_f32 { type T = f32; } [1024] => per_token::<T, E4M3, false, 4, 0, true, 1, false>;
        rms_norm_e4m3_per_token_loop_f16 { type T = half::f16; } [1024] => per_token::<T, E4M3, false, 8, 0, true, 1, false>;
        rms_norm_e4m3_per_token_loop_bf16 { type T = half::bf16; } [1024] => per_token::<T, E4M3, false, 8, 0, true, 1, false>;
        rms_norm_e4m3_per_token_any_f32 { type T = f32; } [1024] => per_token::<T, E4M3, false, 4, 0, false, 1, false>;
        rms_norm_e4m3_per_token_any_f16 { type T = half::f16; } [1024] => per_token::<T, E4M3, false, 4, 0, false, 1, false>;
        rms_norm_e4m3_per_token_any_bf16 { type T = half::bf16; } [1024] => per_token::<T, E4M3, false, 4, 0, false, 1, false>;
        fused_add_rms_norm_e4m3_per_token_x2_f32 { type T = f32; } [512, 2] => per_token::<T, E4M3, true, 4, 2, true, 1, false>;
        fused_add_rms_norm_e4m3_per_token_x2_f16 { type T = half::f16; } [512, 2] => per_token::<T, E4M3, true, 8, 2, true, 1, false>;
        fused_add_rms_norm_e4m3_per_token_x2_bf16 { type T = half::bf16; } [512, 2] => per_token::<T, E4M3, true, 8, 2, true, 1, false>;
        fused_add_rms_norm_e4m3_per_token_x4_f32 { type T = f32; } [512, 1] => per_token::<T, E4M3, true, 4, 4, true, 1, false>;
        fused_add_rms_norm_e4m3_per_token_x4_f16 { type T = half::f16; } [512, 1] => per_token::<T, E4M3, true, 8, 4, true, 1, false>;
        fused_add_rms_norm_e4m3_per_token_x4_bf16 { type T = half::bf16; } [512, 1] => per_token::<T, E4M3, true, 8, 4, true, 1, false>;
        fused_add_rms_norm_e4m3_per_token_loop_f32 { type T = f32; } [1024] => per_token::<T, E4M3, true, 4, 0, true, 1, false>;
        fused_add_rms_norm_e4m3_per_token_loop_f16 { type T = half::f16; } [1024] => per_token::<T, E4M3, true, 8, 0, true, 1, false>;
        fused_add_rms_norm_e4m3_per_token_loop_bf16 { type T = half::bf16; } [1024] => per_token::<T, E4M3, true, 8, 0, true, 1, false>;
        fused_add_rms_norm_e4m3_per_token_any_f32 { type T = f32; } [1024] => per_token::<T, E4M3, true, 4, 0, false, 1, false>;
        fused_add_rms_norm_e4m3_per_token_any_f16 { type T = half::f16; } [1024] => per_token::<T, E4M3, true, 4, 0, false, 1, false>;
        fused_add_rms_norm_e4m3_per_token_any_bf16 { type T = half::bf16; } [1024] => per_token::<T, E4M3, true, 4, 0, false, 1, false>;
        rms_norm_e4m3_per_token_few_f32 { type T = f32; } [512, 3] => per_token_few::<T, E4M3, 4>;
        rms_norm_e4m3_per_token_few_f16 { type T = half::f16; } [512, 3] => per_token_few::<T, E4M3, 8>;
        rms_norm_e4m3_per_token_few_bf16 { type T = half::bf16; } [512, 3] => per_token_few::<T, E4M3, 8>;
        rms_norm_e4m3_per_token_many_f32 { type T = f32; } [256, 4] => per_token::<T, E4M3, false, 4, 4, true, 2, false>;
        rms_norm_e4m3_per_token_many_f16 { type T = half::f16; } [256, 4] => per_token::<T, E4M3, false, 8, 4, true, 2, false>;
        rms_norm_e4m3_per_token_many_bf16 { type T = half::bf16; } [256, 4] => per_token::<T, E4M3, false, 8, 4, true, 2, false>;
        rms_norm_e4m3_per_token_narrow_f32 { type T = f32; } [256, 6] => per_token::<T, E4M3, false, 4, 2, true, 1, true>;
        rms_norm_e4m3_per_token_narrow_f16 { type T = half::f16; } [256, 5] => per_token::<T, E4M3, false, 8, 2, true, 1, true>;
        rms_norm_e4m3_per_token_narrow_bf16 { type T = half::bf16; } [256, 6] => per_token::<T, E4M3, false, 8, 2, true, 1, true>;
        fused_add_rms_norm_e4m3_per_token_narrow_f32 { type T = f32; } [256, 4] => per_token::<T, E4M3, true, 4, 2, true, 1, true>;
        fused_add_rms_norm_e4m3_per_token_narrow_f16 { type T = half::f16; } [256, 4] => per_token::<T, E4M3, true, 8, 2, true, 1, true>;
        fused_add_rms_norm_e4m3_per_token_narrow_bf16 { type T = half::bf16; } [256, 4] => per_token::<T, E4M3, true, 8, 2, true, 1, true>;
        rms_norm_e4m3_per_token_narrow_x3_f32 { type T = f32; } [256, 4] => per_token::<T, E4M3, false, 4, 3, true, 2, true>;
        rms_norm_e4m3_per_token_narrow_x3_f16 { type T = half::f16; } [256, 4] => per_token::<T, E4M3, false, 8, 3, true, 2, true>;
        rms_norm_e4m3_per_token_narrow_x3_bf16 { type T = half::bf16; } [256, 4] => per_token::<T, E4M3, false, 8, 3, true, 2, true>;
        rms_norm_e4m3_per_token_any_x4_f32 { type T = f32; } [1024] => per_token::<T, E4M3, false, 4, 4, false, 1, false>;
        rms_norm_e4m3_per_token_any_x4_f16 { type T = half::f16; } [1024] => per_token::<T, E4M3, false, 4, 4, false, 1, false>;
        rms_norm_e4m3_per_token_any_x4_bf16 { type T = half::bf16; } [1024] => per_token::<T, E4M3, false, 4, 4, false, 1, false>;
        fused_add_rms_norm_e4m3_per_token_any_x4_f32 { type T = f32; } [1024] => per_token::<T, E4M3, true, 4, 4, false, 1, false>;
        fused_add_rms_norm_e4m3_per_token_any_x4_f16 { type T = half::f16; } [1024] => per_token::<T, E4M3, true, 4, 4, false, 1, false>;
        fused_add_rms_norm_e4m3_per_token_any_x4_bf16 { type T = half::bf16; } [1024] => per_token::<T, E4M3, true, 4, 4, false, 1, false>;
        rms_norm_e4m3_per_token_x8_f32 { type T = f32; } [X8_THREADS] => per_token::<T, E4M3, false, 4, 8, true, 1, false>;
        rms_norm_e4m3_per_token_x8_f16 { type T = half::f16; } [X8_THREADS] => per_token::<T, E4M3, false, 8, 8, true, 1, false>;
        rms_norm_e4m3_per_token_x8_bf16 { type T = half::bf16; } [X8_THREADS] => per_token::<T, E4M3, false, 8, 8, true, 1, false>;
        fused_add_rms_norm_e4m3_per_token_x8_f32 { type T = f32; } [X8_THREADS] => per_token::<T, E4M3, true, 4, 8, true, 1, false>;
        fused_add_rms_norm_e4m3_per_token_x8_f16 { type T = half::f16; } [X8_THREADS] => per_token::<T, E4M3, true, 8, 8, true, 1, false>;
        fused_add_rms_norm_e4m3_per_token_x8_bf16 { type T = half::bf16; } [X8_THREADS] => per_token::<T, E4M3, true, 8, 8, true, 1, false>;
        rms_norm_e4m3_per_token_ring_f32 { type T = f32; } [X8_THREADS; Sm90a] => ring::per_token::<T, E4M3, false, 4, true>;
        rms_norm_e4m3_per_token_ring_f16 { type T = half::f16; } [RING_THREADS; Sm90a] => ring::per_token::<T, E4M3, false, 8, true>;
        rms_norm_e4m3_per_token_ring_bf16 { type T = half::bf16; } [RING_THREADS; Sm90a] => ring::per_token::<T, E4M3, false, 8, true>;
        rms_norm_e4m3_per_token_ring_long_f16 { type T = half::f16; } [X8_THREADS; Sm90a] => ring::per_token::<T, E4M3, false, 8, false>;
        rms_norm_e4m3_per_token_ring_long_bf16 { type T = half::bf16; } [X8_THREADS; Sm90a] => ring::per_token::<T, E4M3, false, 8, false>;
        fused_add_rms_norm_e4m3_per_token_ring_f32 { type T = f32; } [X8_THREADS; Sm90a] => ring::per_token::<T, E4M3, true, 4, true>;
        fused_add_rms_norm_e4m3_per_token_ring_f16 { type T = half::f16; } [RING_THREADS; Sm90a] => ring::per_token::<T, E4M3, true, 8, true>;
        fused_add_rms_norm_e4m3_per_token_ring_bf16 { type T = half::bf16; } [RING_THREADS; Sm90a] => ring::per_token::<T, E4M3, true, 8, true>;
        fused_add_rms_norm_e4m3_per_token_ring_long_f16 { type T = half::f16; } [X8_THREADS; Sm90a] => ring::per_token::<T, E4M3, true, 8, false>;
        fused_add_rms_norm_e4m3_per_token_ring_long_bf16 { type T = half::bf16; } [X8_THREADS; Sm90a] => ring::per_token::<T, E4M3, true, 8, false>;
        rms_norm_e4m3_per_token_any_ring_f32 { type T = f32; } [any_ring::BLOCK_THREADS, 2; Sm90a] => any_ring::per_token::<T, E4M3, false>;
        rms_norm_e4m3_per_token_any_ring_f16 { type T = half::f16; } [any_ring::BLOCK_THREADS, 2; Sm90a] => any_ring::per_token::<T, E4M3, false>;
        rms_norm_e4m3_per_token_any_ring_bf16 { type T = half::bf16; } [any_ring::BLOCK_THREADS, 2; Sm90a] => any_ring::per_token::<T, E4M3, false>;
        fused_add_rms_norm_e4m3_per_token_any_ring_f32 { type T = f32; } [any_ring::BLOCK_THREADS, 2; Sm90a] => any_ring::per_token::<T, E4M3, true>;
        fused_add_rms_norm_e4m3_per_token_any_ring_f16 { type T = half::f16; } [any_ring::BLOCK_THREADS, 2; Sm90a] => any_ring::per_token::<T, E4M3, true>;
        fused_add_rms_norm_e4m3_per_token_any_ring_bf16 { type T = half::bf16; } [any_ring::BLOCK_THREADS, 2; Sm90a] => any_ring::per_token::<T, E4M3, true>;
        rms_norm_e4m3_per_token_cluster_x2_f32 { type T = f32; } [spread::BLOCK_THREADS, 1; Sm90a] => spread::per_token::<T, E4M3, false, 4, 2, 16>;
        rms_norm_e4m3_per_token_cluster_x2_f16 { type T = half::f16; } [spread::BLOCK_THREADS, 1; Sm90a] => spread::per_token::<T, E4M3, false, 8, 2, 16>;
        rms_norm_e4m3_per_token_cluster_x2_bf16 { type T = half::bf16; } [spread::BLOCK_THREADS, 1; Sm90a] => spread::per_token::<T, E4M3, false, 8, 2, 16>;
        rms_norm_e4m3_per_token_cluster_x4_f32 { type T = f32; } [spread::BLOCK_THREADS, 1; Sm90a] => spread::per_token::<T, E4M3, false, 4, 4, 16>;
        rms_norm_e4m3_per_token_cluster_x4_f16 { type T = half::f16; } [spread::BLOCK_THREADS, 1; Sm90a] => spread::per_token::<T, E4M3, false, 8, 4, 16>;
        rms_norm_e4m3_per_token_cluster_x4_bf16 { type T = half::bf16; } [spread::BLOCK_THREADS, 1; Sm90a] => spread::per_token::<T, E4M3, false, 8, 4, 16>;
        rms_norm_e4m3_per_token_cluster_x8_f32 { type T = f32; } [spread::BLOCK_THREADS, 1; Sm90a] => spread::per_token::<T, E4M3, false, 4, 8, 32>;
        rms_norm_e4m3_per_token_cluster_x8_f16 { type T = half::f16; } [spread::BLOCK_THREADS, 1; Sm90a] => spread::per_token::<T, E4M3, false, 8, 8, 32>;
        rms_norm_e4m3_per_token_cluster_x8_bf16 { type T = half::bf16; } [spread::BLOCK_THREADS, 1; Sm90a] => spread::per_token::<T, E4M3, false, 8, 8, 32>;
        fused_add_rms_norm_e4m3_per_token_cluster_x2_f32 { type T = f32; } [spread::BLOCK_THREADS, 1; Sm90a] => spread::per_token::<T, E4M3, true, 4, 2, 16>;
        fused_add_rms_norm_e4m3_per_token_cluster_x2_f16 { type T = half::f16; } [spread::BLOCK_THREADS, 1; Sm90a] => spread::per_token::<T, E4M3, true, 8, 2, 16>;
        fused_add_rms_norm_e4m3_per_token_cluster_x2_bf16 { type T = half::bf16; } [spread::BLOCK_THREADS, 1; Sm90a] => spread::per_token::<T, E4M3, true, 8, 2, 16>;
        fused_add_rms_norm_e4m3_per_token_cluster_x4_f32 { type T = f32; } [spread::BLOCK_THREADS, 1; Sm90a] => spread::per_token::<T, E4M3, true, 4, 4, 16>;
        fused_add_rms_norm_e4m3_per_token_cluster_x4_f16 { type T = half::f16; } [spread::BLOCK_THREADS, 1; Sm90a] => spread::per_token::<T, E4M3, true, 8, 4, 16>;
        fused_add_rms_norm_e4m3_per_token_cluster_x4_bf16 { type T = half::bf16; } [spread::BLOCK_THREADS, 1; Sm90a] => spread::per_token::<T, E4M3, true, 8, 4, 16>;
        fused_add_rms_norm_e4m3_per_token_cluster_x8_f32 { type T = f32; } [spread::BLOCK_THREADS, 1; Sm90a] => spread::per_token::<T, E4M3, true, 4, 8, 32>;
        fused_add_rms_norm_e4m3_per_token_cluster_x8_f16 { type T = half::f16; } [spread::BLOCK_THREADS, 1; Sm90a] => spread::per_token::<T, E4M3, true, 8, 8, 32>;
        fused_add_rms_norm_e4m3_per_token_cluster_x8_bf16 { type T = half::bf16; } [spread::BLOCK_THREADS, 1; Sm90a] => spread::per_token::<T, E4M3, true, 8, 8, 32>;
    }
}

/// int8, a scale for each row.
pub mod i8_per_token {
    use super::*;
    entries! {
        pub struct Args<T>(
            x: *const T, residual: *mut T, weight: *const T, smooth: *const f32, out: *mut i8, scales: *mut f32, rows: u32, n: u32,
            x_stride: usize, residual_stride: usize, out_stride: usize, weight_offset: f32, eps: f32,
        );
        rms_norm_i8_per_token_x2_f32 { type T = f32; } [512, 3] => per_token::<T, i8, false, 4, 2, true, 1, false>;
        rms_norm_i8_per_token_x2_f16 { type T = half::f16; } [512, 3] => per_token::<T, i8, false, 8, 2, true, 1, false>;
        rms_norm_i8_per_token_x2_bf16 { type T = half::bf16; } [512, 3] => per_token::<T, i8, false, 8, 2, true, 1, false>;
        rms_norm_i8_per_token_x4_f32 { type T = f32; } [512, 2] => per_token::<T, i8, false, 4, 4, true, 1, false>;
        rms_norm_i8_per_token_x4_f16 { type T = half::f16; } [512, 2] => per_token::<T, i8, false, 8, 4, true, 1, false>;
        rms_norm_i8_per_token_x4_bf16 { type T = half::bf16; } [512, 2] => per_token::<T, i8, false, 8, 4, true, 1, false>;
        rms_norm_i8_per_token_loop_f32 { type T = f32; } [1024] => per_token::<T, i8, false, 4, 0, true, 1, false>;
        rms_norm_i8_per_token_loop_f16 { type T = half::f16; } [1024] => per_token::<T, i8, false, 8, 0, true, 1, false>;
        rms_norm_i8_per_token_loop_bf16 { type T = half::bf16; } [1024] => per_token::<T, i8, false, 8, 0, true, 1, false>;
        rms_norm_i8_per_token_any_f32 { type T = f32; } [1024] => per_token::<T, i8, false, 4, 0, false, 1, false>;
        rms_norm_i8_per_token_any_f16 { type T = half::f16; } [1024] => per_token::<T, i8, false, 4, 0, false, 1, false>;
        rms_norm_i8_per_token_any_bf16 { type T = half::bf16; } [1024] => per_token::<T, i8, false, 4, 0, false, 1, false>;
        fused_add_rms_norm_i8_per_token_x2_f32 { type T = f32; } [512, 2] => per_token::<T, i8, true, 4, 2, true, 1, false>;
        fused_add_rms_norm_i8_per_token_x2_f16 { type T = half::f16; } [512, 2] => per_token::<T, i8, true, 8, 2, true, 1, false>;
        fused_add_rms_norm_i8_per_token_x2_bf16 { type T = half::bf16; } [512, 2] => per_token::<T, i8, true, 8, 2, true, 1, false>;
        fused_add_rms_norm_i8_per_token_x4_f32 { type T = f32; } [512, 1] => per_token::<T, i8, true, 4, 4, true, 1, false>;
        fused_add_rms_norm_i8_per_token_x4_f16 { type T = half::f16; } [512, 1] => per_token::<T, i8, true, 8, 4, true, 1, false>;
        fused_add_rms_norm_i8_per_token_x4_bf16 { type T = half::bf16; } [512, 1] => per_token::<T, i8, true, 8, 4, true, 1, false>;
        fused_add_rms_norm_i8_per_token_loop_f32 { type T = f32; } [1024] => per_token::<T, i8, true, 4, 0, true, 1, false>;
        fused_add_rms_norm_i8_per_token_loop_f16 { type T = half::f16; } [1024] => per_token::<T, i8, true, 8, 0, true, 1, false>;
        fused_add_rms_norm_i8_per_token_loop_bf16 { type T = half::bf16; } [1024] => per_token::<T, i8, true, 8, 0, true, 1, false>;
        fused_add_rms_norm_i8_per_token_any_f32 { type T = f32; } [1024] => per_token::<T, i8, true, 4, 0, false, 1, false>;
        fused_add_rms_norm_i8_per_token_any_f16 { type T = half::f16; } [1024] => per_token::<T, i8, true, 4, 0, false, 1, false>;
        fused_add_rms_norm_i8_per_token_any_bf16 { type T = half::bf16; } [1024] => per_token::<T, i8, true, 4, 0, false, 1, false>;
        rms_norm_i8_per_token_few_f32 { type T = f32; } [512, 3] => per_token_few::<T, i8, 4>;
        rms_norm_i8_per_token_few_f16 { type T = half::f16; } [512, 3] => per_token_few::<T, i8, 8>;
        rms_norm_i8_per_token_few_bf16 { type T = half::bf16; } [512, 3] => per_token_few::<T, i8, 8>;
        rms_norm_i8_per_token_many_f32 { type T = f32; } [256, 4] => per_token::<T, i8, false, 4, 4, true, 2, false>;
        rms_norm_i8_per_token_many_f16 { type T = half::f16; } [256, 4] => per_token::<T, i8, false, 8, 4, true, 2, false>;
        rms_norm_i8_per_token_many_bf16 { type T = half::bf16; } [256, 4] => per_token::<T, i8, false, 8, 4, true, 2, false>;
        rms_norm_i8_per_token_narrow_f32 { type T = f32; } [256, 6] => per_token::<T, i8, false, 4, 2, true, 1, true>;
        rms_norm_i8_per_token_narrow_f16 { type T = half::f16; } [256, 6] => per_token::<T, i8, false, 8, 2, true, 1, true>;
        rms_norm_i8_per_token_narrow_bf16 { type T = half::bf16; } [256, 6] => per_token::<T, i8, false, 8, 2, true, 1, true>;
        fused_add_rms_norm_i8_per_token_narrow_f32 { type T = f32; } [256, 4] => per_token::<T, i8, true, 4, 2, true, 1, true>;
        fused_add_rms_norm_i8_per_token_narrow_f16 { type T = half::f16; } [256, 4] => per_token::<T, i8, true, 8, 2, true, 1, true>;
        fused_add_rms_norm_i8_per_token_narrow_bf16 { type T = half::bf16; } [256, 4] => per_token::<T, i8, true, 8, 2, true, 1, true>;
        rms_norm_i8_per_token_narrow_x3_f32 { type T = f32; } [256, 4] => per_token::<T, i8, false, 4, 3, true, 2, true>;
        rms_norm_i8_per_token_narrow_x3_f16 { type T = half::f16; } [256, 4] => per_token::<T, i8, false, 8, 3, true, 2, true>;
        rms_norm_i8_per_token_narrow_x3_bf16 { type T = half::bf16; } [256, 4] => per_token::<T, i8, false, 8, 3, true, 2, true>;
        rms_norm_i8_per_token_any_x4_f32 { type T = f32; } [1024] => per_token::<T, i8, false, 4, 4, false, 1, false>;
        rms_norm_i8_per_token_any_x4_f16 { type T = half::f16; } [1024] => per_token::<T, i8, false, 4, 4, false, 1, false>;
        rms_norm_i8_per_token_any_x4_bf16 { type T = half::bf16; } [1024] => per_token::<T, i8, false, 4, 4, false, 1, false>;
        fused_add_rms_norm_i8_per_token_any_x4_f32 { type T = f32; } [1024] => per_token::<T, i8, true, 4, 4, false, 1, false>;
        fused_add_rms_norm_i8_per_token_any_x4_f16 { type T = half::f16; } [1024] => per_token::<T, i8, true, 4, 4, false, 1, false>;
        fused_add_rms_norm_i8_per_token_any_x4_bf16 { type T = half::bf16; } [1024] => per_token::<T, i8, true, 4, 4, false, 1, false>;
        rms_norm_i8_per_token_x8_f32 { type T = f32; } [X8_THREADS] => per_token::<T, i8, false, 4, 8, true, 1, false>;
        rms_norm_i8_per_token_x8_f16 { type T = half::f16; } [X8_THREADS] => per_token::<T, i8, false, 8, 8, true, 1, false>;
        rms_norm_i8_per_token_x8_bf16 { type T = half::bf16; } [X8_THREADS] => per_token::<T, i8, false, 8, 8, true, 1, false>;
        fused_add_rms_norm_i8_per_token_x8_f32 { type T = f32; } [X8_THREADS] => per_token::<T, i8, true, 4, 8, true, 1, false>;
        fused_add_rms_norm_i8_per_token_x8_f16 { type T = half::f16; } [X8_THREADS] => per_token::<T, i8, true, 8, 8, true, 1, false>;
        fused_add_rms_norm_i8_per_token_x8_bf16 { type T = half::bf16; } [X8_THREADS] => per_token::<T, i8, true, 8, 8, true, 1, false>;
        rms_norm_i8_per_token_ring_f32 { type T = f32; } [X8_THREADS; Sm90a] => ring::per_token::<T, i8, false, 4, true>;
        rms_norm_i8_per_token_ring_f16 { type T = half::f16; } [RING_THREADS; Sm90a] => ring::per_token::<T, i8, false, 8, true>;
        rms_norm_i8_per_token_ring_bf16 { type T = half::bf16; } [RING_THREADS; Sm90a] => ring::per_token::<T, i8, false, 8, true>;
        rms_norm_i8_per_token_ring_long_f16 { type T = half::f16; } [X8_THREADS; Sm90a] => ring::per_token::<T, i8, false, 8, false>;
        rms_norm_i8_per_token_ring_long_bf16 { type T = half::bf16; } [X8_THREADS; Sm90a] => ring::per_token::<T, i8, false, 8, false>;
        fused_add_rms_norm_i8_per_token_ring_f32 { type T = f32; } [X8_THREADS; Sm90a] => ring::per_token::<T, i8, true, 4, true>;
        fused_add_rms_norm_i8_per_token_ring_f16 { type T = half::f16; } [RING_THREADS; Sm90a] => ring::per_token::<T, i8, true, 8, true>;
        fused_add_rms_norm_i8_per_token_ring_bf16 { type T = half::bf16; } [RING_THREADS; Sm90a] => ring::per_token::<T, i8, true, 8, true>;
        fused_add_rms_norm_i8_per_token_ring_long_f16 { type T = half::f16; } [X8_THREADS; Sm90a] => ring::per_token::<T, i8, true, 8, false>;
        fused_add_rms_norm_i8_per_token_ring_long_bf16 { type T = half::bf16; } [X8_THREADS; Sm90a] => ring::per_token::<T, i8, true, 8, false>;
        rms_norm_i8_per_token_any_ring_f32 { type T = f32; } [any_ring::BLOCK_THREADS, 2; Sm90a] => any_ring::per_token::<T, i8, false>;
        rms_norm_i8_per_token_any_ring_f16 { type T = half::f16; } [any_ring::BLOCK_THREADS, 2; Sm90a] => any_ring::per_token::<T, i8, false>;
        rms_norm_i8_per_token_any_ring_bf16 { type T = half::bf16; } [any_ring::BLOCK_THREADS, 2; Sm90a] => any_ring::per_token::<T, i8, false>;
        fused_add_rms_norm_i8_per_token_any_ring_f32 { type T = f32; } [any_ring::BLOCK_THREADS, 2; Sm90a] => any_ring::per_token::<T, i8, true>;
        fused_add_rms_norm_i8_per_token_any_ring_f16 { type T = half::f16; } [any_ring::BLOCK_THREADS, 2; Sm90a] => any_ring::per_token::<T, i8, true>;
        fused_add_rms_norm_i8_per_token_any_ring_bf16 { type T = half::bf16; } [any_ring::BLOCK_THREADS, 2; Sm90a] => any_ring::per_token::<T, i8, true>;
        rms_norm_i8_per_token_cluster_x2_f32 { type T = f32; } [spread::BLOCK_THREADS, 1; Sm90a] => spread::per_token::<T, i8, false, 4, 2, 16>;
        rms_norm_i8_per_token_cluster_x2_f16 { type T = half::f16; } [spread::BLOCK_THREADS, 1; Sm90a] => spread::per_token::<T, i8, false, 8, 2, 16>;
        rms_norm_i8_per_token_cluster_x2_bf16 { type T = half::bf16; } [spread::BLOCK_THREADS, 1; Sm90a] => spread::per_token::<T, i8, false, 8, 2, 16>;
        rms_norm_i8_per_token_cluster_x4_f32 { type T = f32; } [spread::BLOCK_THREADS, 1; Sm90a] => spread::per_token::<T, i8, false, 4, 4, 16>;
        rms_norm_i8_per_token_cluster_x4_f16 { type T = half::f16; } [spread::BLOCK_THREADS, 1; Sm90a] => spread::per_token::<T, i8, false, 8, 4, 16>;
        rms_norm_i8_per_token_cluster_x4_bf16 { type T = half::bf16; } [spread::BLOCK_THREADS, 1; Sm90a] => spread::per_token::<T, i8, false, 8, 4, 16>;
        rms_norm_i8_per_token_cluster_x8_f32 { type T = f32; } [spread::BLOCK_THREADS, 1; Sm90a] => spread::per_token::<T, i8, false, 4, 8, 32>;
        rms_norm_i8_per_token_cluster_x8_f16 { type T = half::f16; } [spread::BLOCK_THREADS, 1; Sm90a] => spread::per_token::<T, i8, false, 8, 8, 32>;
        rms_norm_i8_per_token_cluster_x8_bf16 { type T = half::bf16; } [spread::BLOCK_THREADS, 1; Sm90a] => spread::per_token::<T, i8, false, 8, 8, 32>;
        fused_add_rms_norm_i8_per_token_cluster_x2_f32 { type T = f32; } [spread::BLOCK_THREADS, 1; Sm90a] => spread::per_token::<T, i8, true, 4, 2, 16>;
        fused_add_rms_norm_i8_per_token_cluster_x2_f16 { type T = half::f16; } [spread::BLOCK_THREADS, 1; Sm90a] => spread::per_token::<T, i8, true, 8, 2, 16>;
        fused_add_rms_norm_i8_per_token_cluster_x2_bf16 { type T = half::bf16; } [spread::BLOCK_THREADS, 1; Sm90a] => spread::per_token::<T, i8, true, 8, 2, 16>;
        fused_add_rms_norm_i8_per_token_cluster_x4_f32 { type T = f32; } [spread::BLOCK_THREADS, 1; Sm90a] => spread::per_token::<T, i8, true, 4, 4, 16>;
        fused_add_rms_norm_i8_per_token_cluster_x4_f16 { type T = half::f16; } [spread::BLOCK_THREADS, 1; Sm90a] => spread::per_token::<T, i8, true, 8, 4, 16>;
        fused_add_rms_norm_i8_per_token_cluster_x4_bf16 { type T = half::bf16; } [spread::BLOCK_THREADS, 1; Sm90a] => spread::per_token::<T, i8, true, 8, 4, 16>;
        fused_add_rms_norm_i8_per_token_cluster_x8_f32 { type T = f32; } [spread::BLOCK_THREADS, 1; Sm90a] => spread::per_token::<T, i8, true, 4, 8, 32>;
        fused_add_rms_norm_i8_per_token_cluster_x8_f16 { type T = half::f16; } [spread::BLOCK_THREADS, 1; Sm90a] => spread::per_token::<T, i8, true, 8, 8, 32>;
        fused_add_rms_norm_i8_per_token_cluster_x8_bf16 { type T = half::bf16; } [spread::BLOCK_THREADS, 1; Sm90a] => spread::per_token::<T, i8, true, 8, 8, 32>;
    }
}

/// e4m3, a scale for each group of columns.
pub mod e4m3_per_group {
    use super::*;
    entries! {
        pub struct Args<T>(
            x: *const T, residual: *mut T, weight: *const T, out: *mut E4M3, scales: *mut f32, rows: u32, n: u32, x_stride: usize,
            residual_stride: usize, out_stride: usize, scale_row_stride: usize, scale_group_stride: usize,
            weight_offset: f32, eps: f32,
        );
        rms_norm_e4m3_per_group_x2_f32 { type T = f32; } [512, 3] => per_group::<T, E4M3, false, 4, 2, true, 1, false, false>;
        rms_norm_e4m3_per_group_x2_f16 { type T = half::f16; } [512, 3] => per_group::<T, E4M3, false, 8, 2, true, 1, false, false>;
        rms_norm_e4m3_per_group_x2_bf16 { type T = half::bf16; } [512, 3] => per_group::<T, E4M3, false, 8, 2, true, 1, false, false>;
        rms_norm_e4m3_per_group_x4_f32 { type T = f32; } [512, 2] => per_group::<T, E4M3, false, 4, 4, true, 1, false, false>;
        rms_norm_e4m3_per_group_x4_f16 { type T = half::f16; } [512, 2] => per_group::<T, E4M3, false, 8, 4, true, 1, false, false>;
        rms_norm_e4m3_per_group_x4_bf16 { type T = half::bf16; } [512, 2] => per_group::<T, E4M3, false, 8, 4, true, 1, false, false>;
        rms_norm_e4m3_per_group_loop_f32 { type T = f32; } [1024] => per_group::<T, E4M3, false, 4, 0, true, 1, false, false>;
        rms_norm_e4m3_per_group_loop_f16 { type T = half::f16; } [1024] => per_group::<T, E4M3, false, 8, 0, true, 1, false, false>;
        rms_norm_e4m3_per_group_loop_bf16 { type T = half::bf16; } [1024] => per_group::<T, E4M3, false, 8, 0, true, 1, false, false>;
        rms_norm_e4m3_per_group_any_f32 { type T = f32; } [1024] => per_group::<T, E4M3, false, 4, 0, false, 1, false, false>;
        rms_norm_e4m3_per_group_any_f16 { type T = half::f16; } [1024] => per_group::<T, E4M3, false, 4, 0, false, 1, false, false>;
        rms_norm_e4m3_per_group_any_bf16 { type T = half::bf16; } [1024] => per_group::<T, E4M3, false, 4, 0, false, 1, false, false>;
        fused_add_rms_norm_e4m3_per_group_x2_f32 { type T = f32; } [512, 2] => per_group::<T, E4M3, true, 4, 2, true, 1, false, false>;
        fused_add_rms_norm_e4m3_per_group_x2_f16 { type T = half::f16; } [512, 2] => per_group::<T, E4M3, true, 8, 2, true, 1, false, false>;
        fused_add_rms_norm_e4m3_per_group_x2_bf16 { type T = half::bf16; } [512, 2] => per_group::<T, E4M3, true, 8, 2, true, 1, false, false>;
        fused_add_rms_norm_e4m3_per_group_x4_f32 { type T = f32; } [512, 1] => per_group::<T, E4M3, true, 4, 4, true, 1, false, false>;
        fused_add_rms_norm_e4m3_per_group_x4_f16 { type T = half::f16; } [512, 1] => per_group::<T, E4M3, true, 8, 4, true, 1, false, false>;
        fused_add_rms_norm_e4m3_per_group_x4_bf16 { type T = half::bf16; } [512, 1] => per_group::<T, E4M3, true, 8, 4, true, 1, false, false>;
        fused_add_rms_norm_e4m3_per_group_loop_f32 { type T = f32; } [1024] => per_group::<T, E4M3, true, 4, 0, true, 1, false, false>;
        fused_add_rms_norm_e4m3_per_group_loop_f16 { type T = half::f16; } [1024] => per_group::<T, E4M3, true, 8, 0, true, 1, false, false>;
        fused_add_rms_norm_e4m3_per_group_loop_bf16 { type T = half::bf16; } [1024] => per_group::<T, E4M3, true, 8, 0, true, 1, false, false>;
        fused_add_rms_norm_e4m3_per_group_any_f32 { type T = f32; } [1024] => per_group::<T, E4M3, true, 4, 0, false, 1, false, false>;
        fused_add_rms_norm_e4m3_per_group_any_f16 { type T = half::f16; } [1024] => per_group::<T, E4M3, true, 4, 0, false, 1, false, false>;
        fused_add_rms_norm_e4m3_per_group_any_bf16 { type T = half::bf16; } [1024] => per_group::<T, E4M3, true, 4, 0, false, 1, false, false>;
        rms_norm_e4m3_per_group_many_f32 { type T = f32; } [256, 4] => per_group::<T, E4M3, false, 4, 4, true, 2, false, true>;
        rms_norm_e4m3_per_group_many_f16 { type T = half::f16; } [256, 4] => per_group::<T, E4M3, false, 8, 4, true, 2, false, true>;
        rms_norm_e4m3_per_group_many_bf16 { type T = half::bf16; } [256, 4] => per_group::<T, E4M3, false, 8, 4, true, 2, false, true>;
        rms_norm_e4m3_per_group_narrow_f32 { type T = f32; } [256, 5] => per_group::<T, E4M3, false, 4, 2, true, 1, true, false>;
        rms_norm_e4m3_per_group_narrow_f16 { type T = half::f16; } [256, 5] => per_group::<T, E4M3, false, 8, 2, true, 1, true, false>;
        rms_norm_e4m3_per_group_narrow_bf16 { type T = half::bf16; } [256, 5] => per_group::<T, E4M3, false, 8, 2, true, 1, true, false>;
        fused_add_rms_norm_e4m3_per_group_narrow_f32 { type T = f32; } [256, 4] => per_group::<T, E4M3, true, 4, 2, true, 1, true, false>;
        fused_add_rms_norm_e4m3_per_group_narrow_f16 { type T = half::f16; } [256, 4] => per_group::<T, E4M3, true, 8, 2, true, 1, true, false>;
        fused_add_rms_norm_e4m3_per_group_narrow_bf16 { type T = half::bf16; } [256, 4] => per_group::<T, E4M3, true, 8, 2, true, 1, true, false>;
        rms_norm_e4m3_per_group_narrow_many_f32 { type T = f32; } [256, 6] => per_group::<T, E4M3, false, 4, 2, true, 1, true, true>;
        rms_norm_e4m3_per_group_narrow_many_f16 { type T = half::f16; } [256, 6] => per_group::<T, E4M3, false, 8, 2, true, 1, true, true>;
        rms_norm_e4m3_per_group_narrow_many_bf16 { type T = half::bf16; } [256, 6] => per_group::<T, E4M3, false, 8, 2, true, 1, true, true>;
        rms_norm_e4m3_per_group_narrow_x3_f32 { type T = f32; } [256, 4] => per_group::<T, E4M3, false, 4, 3, true, 2, true, false>;
        rms_norm_e4m3_per_group_narrow_x3_f16 { type T = half::f16; } [256, 4] => per_group::<T, E4M3, false, 8, 3, true, 2, true, false>;
        rms_norm_e4m3_per_group_narrow_x3_bf16 { type T = half::bf16; } [256, 4] => per_group::<T, E4M3, false, 8, 3, true, 2, true, false>;
        rms_norm_e4m3_per_group_any_x4_f32 { type T = f32; } [1024] => per_group::<T, E4M3, false, 4, 4, false, 1, false, false>;
        rms_norm_e4m3_per_group_any_x4_f16 { type T = half::f16; } [1024] => per_group::<T, E4M3, false, 4, 4, false, 1, false, false>;
        rms_norm_e4m3_per_group_any_x4_bf16 { type T = half::bf16; } [1024] => per_group::<T, E4M3, false, 4, 4, false, 1, false, false>;
        fused_add_rms_norm_e4m3_per_group_any_x4_f32 { type T = f32; } [1024] => per_group::<T, E4M3, true, 4, 4, false, 1, false, false>;
        fused_add_rms_norm_e4m3_per_group_any_x4_f16 { type T = half::f16; } [1024] => per_group::<T, E4M3, true, 4, 4, false, 1, false, false>;
        fused_add_rms_norm_e4m3_per_group_any_x4_bf16 { type T = half::bf16; } [1024] => per_group::<T, E4M3, true, 4, 4, false, 1, false, false>;
        rms_norm_e4m3_per_group_x8_f32 { type T = f32; } [X8_THREADS] => per_group::<T, E4M3, false, 4, 8, true, 1, false, false>;
        rms_norm_e4m3_per_group_x8_f16 { type T = half::f16; } [X8_THREADS] => per_group::<T, E4M3, false, 8, 8, true, 1, false, false>;
        rms_norm_e4m3_per_group_x8_bf16 { type T = half::bf16; } [X8_THREADS] => per_group::<T, E4M3, false, 8, 8, true, 1, false, false>;
        fused_add_rms_norm_e4m3_per_group_x8_f32 { type T = f32; } [X8_THREADS] => per_group::<T, E4M3, true, 4, 8, true, 1, false, false>;
        fused_add_rms_norm_e4m3_per_group_x8_f16 { type T = half::f16; } [X8_THREADS] => per_group::<T, E4M3, true, 8, 8, true, 1, false, false>;
        fused_add_rms_norm_e4m3_per_group_x8_bf16 { type T = half::bf16; } [X8_THREADS] => per_group::<T, E4M3, true, 8, 8, true, 1, false, false>;
        rms_norm_e4m3_per_group_ring_f32 { type T = f32; } [X8_THREADS; Sm90a] => ring::per_group::<T, E4M3, false, 4, true>;
        rms_norm_e4m3_per_group_ring_f16 { type T = half::f16; } [RING_THREADS; Sm90a] => ring::per_group::<T, E4M3, false, 8, true>;
        rms_norm_e4m3_per_group_ring_bf16 { type T = half::bf16; } [RING_THREADS; Sm90a] => ring::per_group::<T, E4M3, false, 8, true>;
        rms_norm_e4m3_per_group_ring_long_f16 { type T = half::f16; } [X8_THREADS; Sm90a] => ring::per_group::<T, E4M3, false, 8, false>;
        rms_norm_e4m3_per_group_ring_long_bf16 { type T = half::bf16; } [X8_THREADS; Sm90a] => ring::per_group::<T, E4M3, false, 8, false>;
        fused_add_rms_norm_e4m3_per_group_ring_f32 { type T = f32; } [X8_THREADS; Sm90a] => ring::per_group::<T, E4M3, true, 4, true>;
        fused_add_rms_norm_e4m3_per_group_ring_f16 { type T = half::f16; } [RING_THREADS; Sm90a] => ring::per_group::<T, E4M3, true, 8, true>;
        fused_add_rms_norm_e4m3_per_group_ring_bf16 { type T = half::bf16; } [RING_THREADS; Sm90a] => ring::per_group::<T, E4M3, true, 8, true>;
        fused_add_rms_norm_e4m3_per_group_ring_long_f16 { type T = half::f16; } [X8_THREADS; Sm90a] => ring::per_group::<T, E4M3, true, 8, false>;
        fused_add_rms_norm_e4m3_per_group_ring_long_bf16 { type T = half::bf16; } [X8_THREADS; Sm90a] => ring::per_group::<T, E4M3, true, 8, false>;
        rms_norm_e4m3_per_group_any_ring_f32 { type T = f32; } [any_ring::BLOCK_THREADS, 2; Sm90a] => any_ring::per_group::<T, E4M3, false>;
        rms_norm_e4m3_per_group_any_ring_f16 { type T = half::f16; } [any_ring::BLOCK_THREADS, 2; Sm90a] => any_ring::per_group::<T, E4M3, false>;
        rms_norm_e4m3_per_group_any_ring_bf16 { type T = half::bf16; } [any_ring::BLOCK_THREADS, 2; Sm90a] => any_ring::per_group::<T, E4M3, false>;
        fused_add_rms_norm_e4m3_per_group_any_ring_f32 { type T = f32; } [any_ring::BLOCK_THREADS, 2; Sm90a] => any_ring::per_group::<T, E4M3, true>;
        fused_add_rms_norm_e4m3_per_group_any_ring_f16 { type T = half::f16; } [any_ring::BLOCK_THREADS, 2; Sm90a] => any_ring::per_group::<T, E4M3, true>;
        fused_add_rms_norm_e4m3_per_group_any_ring_bf16 { type T = half::bf16; } [any_ring::BLOCK_THREADS, 2; Sm90a] => any_ring::per_group::<T, E4M3, true>;
        rms_norm_e4m3_per_group_cluster_x2_f32 { type T = f32; } [spread::BLOCK_THREADS, 1; Sm90a] => spread::per_group::<T, E4M3, false, 4, 2, 16>;
        rms_norm_e4m3_per_group_cluster_x2_f16 { type T = half::f16; } [spread::BLOCK_THREADS, 1; Sm90a] => spread::per_group::<T, E4M3, false, 8, 2, 16>;
        rms_norm_e4m3_per_group_cluster_x2_bf16 { type T = half::bf16; } [spread::BLOCK_THREADS, 1; Sm90a] => spread::per_group::<T, E4M3, false, 8, 2, 16>;
        rms_norm_e4m3_per_group_cluster_x4_f32 { type T = f32; } [spread::BLOCK_THREADS, 1; Sm90a] => spread::per_group::<T, E4M3, false, 4, 4, 16>;
        rms_norm_e4m3_per_group_cluster_x4_f16 { type T = half::f16; } [spread::BLOCK_THREADS, 1; Sm90a] => spread::per_group::<T, E4M3, false, 8, 4, 16>;
        rms_norm_e4m3_per_group_cluster_x4_bf16 { type T = half::bf16; } [spread::BLOCK_THREADS, 1; Sm90a] => spread::per_group::<T, E4M3, false, 8, 4, 16>;
        rms_norm_e4m3_per_group_cluster_x8_f32 { type T = f32; } [spread::BLOCK_THREADS, 1; Sm90a] => spread::per_group::<T, E4M3, false, 4, 8, 32>;
        rms_norm_e4m3_per_group_cluster_x8_f16 { type T = half::f16; } [spread::BLOCK_THREADS, 1; Sm90a] => spread::per_group::<T, E4M3, false, 8, 8, 32>;
        rms_norm_e4m3_per_group_cluster_x8_bf16 { type T = half::bf16; } [spread::BLOCK_THREADS, 1; Sm90a] => spread::per_group::<T, E4M3, false, 8, 8, 32>;
        fused_add_rms_norm_e4m3_per_group_cluster_x2_f32 { type T = f32; } [spread::BLOCK_THREADS, 1; Sm90a] => spread::per_group::<T, E4M3, true, 4, 2, 16>;
        fused_add_rms_norm_e4m3_per_group_cluster_x2_f16 { type T = half::f16; } [spread::BLOCK_THREADS, 1; Sm90a] => spread::per_group::<T, E4M3, true, 8, 2, 16>;
        fused_add_rms_norm_e4m3_per_group_cluster_x2_bf16 { type T = half::bf16; } [spread::BLOCK_THREADS, 1; Sm90a] => spread::per_group::<T, E4M3, true, 8, 2, 16>;
        fused_add_rms_norm_e4m3_per_group_cluster_x4_f32 { type T = f32; } [spread::BLOCK_THREADS, 1; Sm90a] => spread::per_group::<T, E4M3, true, 4, 4, 16>;
        fused_add_rms_norm_e4m3_per_group_cluster_x4_f16 { type T = half::f16; } [spread::BLOCK_THREADS, 1; Sm90a] => spread::per_group::<T, E4M3, true, 8, 4, 16>;
        fused_add_rms_norm_e4m3_per_group_cluster_x4_bf16 { type T = half::bf16; } [spread::BLOCK_THREADS, 1; Sm90a] => spread::per_group::<T, E4M3, true, 8, 4, 16>;
        fused_add_rms_norm_e4m3_per_group_cluster_x8_f32 { type T = f32; } [spread::BLOCK_THREADS, 1; Sm90a] => spread::per_group::<T, E4M3, true, 4, 8, 32>;
        fused_add_rms_norm_e4m3_per_group_cluster_x8_f16 { type T = half::f16; } [spread::BLOCK_THREADS, 1; Sm90a] => spread::per_group::<T, E4M3, true, 8, 8, 32>;
        fused_add_rms_norm_e4m3_per_group_cluster_x8_bf16 { type T = half::bf16; } [spread::BLOCK_THREADS, 1; Sm90a] => spread::per_group::<T, E4M3, true, 8, 8, 32>;
    }
}
