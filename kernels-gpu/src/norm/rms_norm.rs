//! `y = x / sqrt(mean(x^2) + eps) * (w + offset)`, optionally of a sum `x + residual`.
//!
//! Squares are summed in f32. With a residual the sum is rounded to the element type first, stored as the new residual
//! and normalised in its rounded form: what the next layer reads is what was normalised here.

use super::{Early, FEW_ROWS, MAX_WARPS, NARROW_WARPS, RING, Row};
use super::{rms_norm_any_ring as any_ring, rms_norm_cluster as spread};
use crate::row::team::{Op, scratch};
use crate::row::{Team, Words, packed, unpacked, unpacked_again, words, zero};
use cuda_std::shared::Carver;
use cuda_std::{Float, Global, GlobalMut, dependent_launch, entries, float, thread, vec};

/// Dynamic shared memory of a block.
pub const SHARED_BYTES: usize = MAX_WARPS * 4;

/// `1 / sqrt(sum / n + eps)` with `1 / n`, which is known before the sum.
#[inline(always)]
pub(crate) fn inverse_rms(sum: f32, inverse_n: f32, eps: f32) -> f32 {
    float::fast::rsqrt(float::fma(sum, inverse_n, eps))
}

/// `1 / n`
#[inline(always)]
pub(crate) fn inverse(n: u32) -> f32 {
    float::fast::recip(n as f32)
}

/// The sum of the squares of a piece: two chains, since latency counts.
#[inline(always)]
pub(crate) fn squares<T: Float, const V: usize>(piece: [T; V]) -> f32 {
    squares_of(vec::to_f32(piece))
}

/// [`squares`] of elements as numbers.
#[inline(always)]
pub(crate) fn squares_of<const V: usize>(x: [f32; V]) -> f32 {
    let mut sums = [0.0; 2];
    cuda_std::unroll::<V>(|j| sums[j % 2] = float::fma(x[j], x[j], sums[j % 2]));
    sums[0] + sums[1]
}

/// `x * scale * (w + offset)`
#[inline(always)]
pub(crate) fn scaled<T: Float, const V: usize>(x: [T; V], w: [T; V], scale: f32, offset: f32) -> [f32; V] {
    let (mut x, w) = (vec::to_f32(x), vec::to_f32(w));
    cuda_std::unroll::<V>(|j| x[j] = x[j] * scale * (w[j] + offset));
    x
}

/// `x + residual`, rounded.
#[inline(always)]
pub(crate) fn sum<T: Float, const V: usize>(mut x: [T; V], residual: [T; V]) -> [T; V] {
    let mut j = 0;
    while j < V {
        [x[j], x[j + 1]] = T::pair_add([x[j], x[j + 1]], [residual[j], residual[j + 1]]);
        j += 2;
    }
    x
}

/// The rows that a team of threads works on: inputs, and the residual that is added and updated.
#[derive(Clone, Copy)]
pub(crate) struct Source<T> {
    pub(crate) x: Global<T>,
    pub(crate) residual: Global<T>,
    pub(crate) residual_out: GlobalMut<T>,
}

impl<T: Float> Source<T> {
    /// The beginning of a kernel: loads pieces `0 .. N` of the inputs, to be added when all other loads have been issued as well.
    #[inline(always)]
    #[track_caller]
    pub(crate) unsafe fn load<const ADD: bool, const V: usize, const N: usize, const VEC: bool>(
        self,
        row: Row<V, N, VEC>,
        weight: Global<T>,
        early: Early,
    ) -> [[[T; V]; N]; 2] {
        let mut x = [[zero(); V]; N];
        let mut r = x;
        if early == Early::No {
            dependent_launch::begin();
            cuda_std::unroll::<N>(|i| x[i] = row.piece(i).load_mutable(self.x));
            if ADD {
                cuda_std::unroll::<N>(|i| r[i] = row.piece(i).load_mutable(self.residual));
            }
        } else {
            let before = early == Early::Yes || thread::grid_dim_x() <= FEW_ROWS;
            let other = if ADD { self.residual } else { weight };
            let at = row.begin(before, |column| [self.x.ptr(column).cast(), other.ptr(column).cast()], []);
            cuda_std::unroll::<N>(|i| x[i] = row.here(i).load_mutable(Global::new(at[i][0].cast())));
            if ADD {
                cuda_std::unroll::<N>(|i| r[i] = row.here(i).load_mutable(Global::new(at[i][1].cast())));
            }
        }
        [x, r]
    }

    /// As [`load`](Self::load) and [`add`](Self::add) for aligned rows that take half of the registers: the residual comes in halves.
    #[inline(always)]
    #[track_caller]
    pub(crate) unsafe fn hold<const ADD: bool, const KEEP: bool, const V: usize, const N: usize>(
        self,
        row: Row<V, N, true>,
    ) -> [Words; N] {
        let mut x = [[0; 4]; N];
        cuda_std::unroll::<N>(|i| x[i] = row.piece(i).load_mutable_words(self.x));
        if ADD {
            let mut r = x;
            let row = row.anew(1);
            cuda_std::unroll::<2>(|half| {
                cuda_std::unroll::<N>(|i| {
                    if (i < N / 2) == (half == 0) {
                        r[i] = row.piece(i).load_mutable_words(self.residual);
                    }
                });
                cuda_std::unroll::<N>(|i| {
                    if (i < N / 2) == (half == 0) {
                        let added = sum(unpacked::<T, V>(x[i]), unpacked(r[i]));
                        x[i] = words(added).0;
                        row.piece(i).store_or_keep::<T, KEEP>(self.residual_out, added);
                    }
                });
            });
        }
        x
    }

    /// What is normalised: the first input, or the sum, which is stored, for the second-level cache to `KEEP` until it is added to again or not.
    #[inline(always)]
    #[track_caller]
    pub(crate) unsafe fn add<const ADD: bool, const KEEP: bool, const V: usize, const N: usize, const VEC: bool>(
        self,
        row: Row<V, N, VEC>,
        [mut x, r]: [[[T; V]; N]; 2],
    ) -> [[T; V]; N] {
        if ADD {
            cuda_std::unroll::<N>(|i| {
                x[i] = sum(x[i], r[i]);
                row.piece(i).store_or_keep::<T, KEEP>(self.residual_out, x[i]);
            });
        }
        x
    }

    /// Piece `i` of a long row, the first time.
    #[inline(always)]
    #[track_caller]
    pub(crate) unsafe fn first<const ADD: bool, const V: usize, const N: usize, const VEC: bool>(
        self,
        row: Row<V, N, VEC>,
        i: usize,
    ) -> [T; V] {
        let mut x = row.piece(i).load_mutable(self.x);
        if ADD {
            x = sum(x, row.piece(i).load_mutable(self.residual));
            row.piece(i).store(self.residual_out, x);
        }
        x
    }

    /// Piece `i` of a long row, again.
    #[inline(always)]
    #[track_caller]
    pub(crate) unsafe fn again<const ADD: bool, const V: usize, const N: usize, const VEC: bool>(
        self,
        row: Row<V, N, VEC>,
        i: usize,
    ) -> [T; V] {
        if ADD {
            // What this very thread stored.
            row.piece(i).load_mutable(Global::new(self.residual_out.ptr(0usize).cast_const()))
        } else {
            row.piece(i).load_mutable(self.x)
        }
    }
}

#[inline(always)]
#[track_caller]
unsafe fn normalise<T: Float, const ADD: bool, const V: usize, const N: usize, const VEC: bool, const NARROW: bool>(
    from: Source<T>,
    weight: Global<T>,
    out: impl FnOnce() -> GlobalMut<T>,
    team: Team,
    n: u32,
    live: bool,
    weight_offset: f32,
    eps: f32,
) {
    let row = Row::<V, N, VEC>::new(team, if live { n } else { 0 });
    let (mut total, inverse_n) = (0.0, inverse(n));

    let early = match (ADD, N) {
        (true, _) => Early::Yes,
        (false, 2) => Early::InFew,
        _ => Early::No,
    };
    let mut w = [[zero(); V]; N];
    let inputs = from.load::<ADD, V, N, VEC>(row, weight, early);
    // Where sums are single words, the weights wait for registers.
    let late = ADD && !VEC && size_of::<T>() == 4;
    if !late {
        cuda_std::unroll::<N>(|i| w[i] = row.piece(i).load_optional(weight, true));
    }
    let x = from.add::<ADD, true, V, N, VEC>(row, inputs);
    if late {
        cuda_std::unroll::<N>(|i| w[i] = row.piece(i).load_optional(weight, true));
    }
    cuda_std::unroll::<N>(|i| total += squares(x[i]));
    if N == 0 {
        let mut i = 0;
        while i < row.rounds() {
            total += squares(from.first::<ADD, V, N, VEC>(row, i));
            i += 1;
        }
    }
    let scratch = scratch::<1, MAX_WARPS>(&mut Carver::new());
    let [total] = if NARROW {
        let scratch = scratch.offset(thread::thread_idx_y() * NARROW_WARPS as u32);
        team.reduce::<1, NARROW_WARPS>([total], [Op::Sum], scratch)
    } else {
        row.reduce([total], [Op::Sum], scratch)
    };
    let scale = inverse_rms(total, inverse_n, eps);

    let out = out();
    cuda_std::unroll::<N>(|i| {
        // Sums are in place mostly.
        row.piece(i)
            .store_or_keep::<T, ADD>(out, vec::from_f32(scaled(packed::<T, V, VEC>(x[i]), w[i], scale, weight_offset)))
    });
    if N == 0 {
        let mut i = 0;
        while i < row.rounds() {
            let (x, w) = (from.again::<ADD, V, N, VEC>(row, i), row.piece(i).load_optional(weight, true));
            row.piece(i).store(out, vec::from_f32(scaled(x, w, scale, weight_offset)));
            i += 1;
        }
    }
}

/// As [`normalise`] for aligned rows of which a thread has so many pieces that they take half of the registers, in a block of their own. The first weights
/// come before the reduction, unless there is a residual.
#[inline(always)]
#[track_caller]
unsafe fn long<T: Float, const ADD: bool, const V: usize, const N: usize>(
    from: Source<T>,
    weight: Global<T>,
    out: impl FnOnce() -> GlobalMut<T>,
    team: Team,
    n: u32,
    weight_offset: f32,
    eps: f32,
) {
    let row = Row::<V, N, true>::new(team, n);
    dependent_launch::begin();
    let (x, row) = (from.hold::<ADD, true, V, N>(row), row.anew(1));
    let mut w = [[0; 4]; RING];
    if !ADD {
        cuda_std::unroll::<RING>(|i| w[i] = row.piece(i).load_optional_words(weight, true));
    }
    let mut total = 0.0;
    cuda_std::unroll::<N>(|i| total += squares::<T, V>(unpacked(x[i])));
    let [total] = row.reduce([total], [Op::Sum], scratch::<1, MAX_WARPS>(&mut Carver::new()));
    let scale = inverse_rms(total, inverse(n), eps);

    let (out, row) = (out(), row.anew(2));
    if ADD {
        cuda_std::unroll::<RING>(|i| w[i] = row.piece(i).load_optional_words(weight, true));
    }
    cuda_std::unroll::<N>(|i| {
        let x = unpacked_again::<T, V>(x[i], row.zeros()[0]);
        let y = scaled(x, unpacked(w[i % RING]), scale, weight_offset);
        row.piece(i).store_or_keep::<T, ADD>(out, vec::from_f32(y));
        if i + RING < N {
            w[i % RING] = row.piece(i + RING).load_optional_words(weight, true);
        }
    });
}

/// `x`, `out`: `[rows, n]`, rows `x_stride` and `out_stride` elements apart; `weight`: `[n]` or null for ones (then
/// `weight_offset` is 0). Blocks: `(team, rows)`, the team as [`Team`] demands; rows of more than a warp have blocks of their own, or are `NARROW`.
#[inline(always)]
pub unsafe fn rms_norm<T: Float, const V: usize, const N: usize, const VEC: bool, const NARROW: bool>(
    x: *const T,
    weight: *const T,
    out: *mut T,
    rows: u32,
    n: u32,
    x_stride: usize,
    out_stride: usize,
    weight_offset: f32,
    eps: f32,
) {
    // Four pieces of 16 bytes a thread are those of a row of its own block.
    let own_block = N > 2 && VEC;
    let in_block = if own_block { 0 } else { thread::thread_idx_y() };
    let row = (thread::block_idx_x() * thread::block_dim_y() + in_block) as usize;
    let live = row < rows as usize;
    let (weight, out) = (Global::new(weight), GlobalMut::new(out));
    let from = Source { x: Global::new(x).offset(row * x_stride), residual: Global::new(x), residual_out: out };
    // Where registers are few they are not for an address that is needed last.
    let known = out.offset(row * out_stride);
    let out = || if own_block { out.offset(thread::block_idx_x() as usize * out_stride) } else { known };
    let team = Team::current();
    if VEC && N > 4 {
        long::<T, false, V, N>(from, weight, out, team, n, weight_offset, eps);
    } else {
        normalise::<T, false, V, N, VEC, NARROW>(from, weight, out, team, n, live, weight_offset, eps);
    }
}

/// As [`rms_norm`], of `x + residual`, which goes to `residual_out`. Outputs may be inputs.
#[inline(always)]
pub unsafe fn fused_add_rms_norm<T: Float, const V: usize, const N: usize, const VEC: bool, const NARROW: bool>(
    x: *const T,
    residual: *const T,
    weight: *const T,
    out: *mut T,
    residual_out: *mut T,
    rows: u32,
    n: u32,
    x_stride: usize,
    residual_stride: usize,
    out_stride: usize,
    residual_out_stride: usize,
    weight_offset: f32,
    eps: f32,
) {
    // Where registers are few they are not for what all threads of a block have in common.
    let in_block = if N > 4 { 0 } else { thread::thread_idx_y() };
    let row = (thread::block_idx_x() * thread::block_dim_y() + in_block) as usize;
    let live = row < rows as usize;
    let from = Source {
        x: Global::new(x).offset(row * x_stride),
        residual: Global::new(residual).offset(row * residual_stride),
        residual_out: GlobalMut::new(residual_out).offset(row * residual_out_stride),
    };
    let (weight, out) = (Global::new(weight), GlobalMut::new(out).offset(row * out_stride));
    let (team, out) = (Team::current(), || out);
    if VEC && N > 4 {
        long::<T, true, V, N>(from, weight, out, team, n, weight_offset, eps);
    } else {
        normalise::<T, true, V, N, VEC, NARROW>(from, weight, out, team, n, live, weight_offset, eps);
    }
}

/// Without a residual.
pub mod alone {
    use super::*;
    entries! {
        pub struct Args<T>(
            x: *const T, weight: *const T, out: *mut T, rows: u32, n: u32, x_stride: usize, out_stride: usize,
            weight_offset: f32, eps: f32,
        );
        rms_norm_x2_f32 { type T = f32; } [512, 3] => rms_norm::<T, 4, 2, true, false>;
        rms_norm_x2_f16 { type T = half::f16; } [512, 3] => rms_norm::<T, 8, 2, true, false>;
        rms_norm_x2_bf16 { type T = half::bf16; } [512, 3] => rms_norm::<T, 8, 2, true, false>;
        rms_norm_x4_f32 { type T = f32; } [512, 2] => rms_norm::<T, 4, 4, true, false>;
        rms_norm_x4_f16 { type T = half::f16; } [512, 2] => rms_norm::<T, 8, 4, true, false>;
        rms_norm_x4_bf16 { type T = half::bf16; } [512, 2] => rms_norm::<T, 8, 4, true, false>;
        rms_norm_loop_f32 { type T = f32; } [1024] => rms_norm::<T, 4, 0, true, false>;
        rms_norm_loop_f16 { type T = half::f16; } [1024] => rms_norm::<T, 8, 0, true, false>;
        rms_norm_loop_bf16 { type T = half::bf16; } [1024] => rms_norm::<T, 8, 0, true, false>;
        rms_norm_any_f32 { type T = f32; } [1024] => rms_norm::<T, 4, 0, false, false>;
        rms_norm_any_f16 { type T = half::f16; } [1024] => rms_norm::<T, 4, 0, false, false>;
        rms_norm_any_bf16 { type T = half::bf16; } [1024] => rms_norm::<T, 4, 0, false, false>;
        rms_norm_any_x4_f32 { type T = f32; } [1024] => rms_norm::<T, 4, 4, false, false>;
        rms_norm_any_x4_f16 { type T = half::f16; } [1024] => rms_norm::<T, 4, 4, false, false>;
        rms_norm_any_x4_bf16 { type T = half::bf16; } [1024] => rms_norm::<T, 4, 4, false, false>;
        rms_norm_narrow_f32 { type T = f32; } [256, 6] => rms_norm::<T, 4, 2, true, true>;
        rms_norm_narrow_f16 { type T = half::f16; } [256, 6] => rms_norm::<T, 8, 2, true, true>;
        rms_norm_narrow_bf16 { type T = half::bf16; } [256, 6] => rms_norm::<T, 8, 2, true, true>;
        rms_norm_x8_f32 { type T = f32; } [1024] => rms_norm::<T, 4, 8, true, false>;
        rms_norm_x8_f16 { type T = half::f16; } [1024] => rms_norm::<T, 8, 8, true, false>;
        rms_norm_x8_bf16 { type T = half::bf16; } [1024] => rms_norm::<T, 8, 8, true, false>;
        rms_norm_any_ring_f32 { type T = f32; } [any_ring::BLOCK_THREADS, 2; Sm90a] => any_ring::rms_norm::<T>;
        rms_norm_any_ring_f16 { type T = half::f16; } [any_ring::BLOCK_THREADS, 2; Sm90a] => any_ring::rms_norm::<T>;
        rms_norm_any_ring_bf16 { type T = half::bf16; } [any_ring::BLOCK_THREADS, 2; Sm90a] => any_ring::rms_norm::<T>;
        rms_norm_cluster_x2_f32 { type T = f32; } [spread::BLOCK_THREADS, 1; Sm90a] => spread::rms_norm::<T, 4, 2, 16>;
        rms_norm_cluster_x2_f16 { type T = half::f16; } [spread::BLOCK_THREADS, 1; Sm90a] => spread::rms_norm::<T, 8, 2, 16>;
        rms_norm_cluster_x2_bf16 { type T = half::bf16; } [spread::BLOCK_THREADS, 1; Sm90a] => spread::rms_norm::<T, 8, 2, 16>;
        rms_norm_cluster_x4_f32 { type T = f32; } [spread::BLOCK_THREADS, 1; Sm90a] => spread::rms_norm::<T, 4, 4, 16>;
        rms_norm_cluster_x4_f16 { type T = half::f16; } [spread::BLOCK_THREADS, 1; Sm90a] => spread::rms_norm::<T, 8, 4, 16>;
        rms_norm_cluster_x4_bf16 { type T = half::bf16; } [spread::BLOCK_THREADS, 1; Sm90a] => spread::rms_norm::<T, 8, 4, 16>;
        rms_norm_cluster_x8_f32 { type T = f32; } [spread::BLOCK_THREADS, 1; Sm90a] => spread::rms_norm::<T, 4, 8, 32>;
        rms_norm_cluster_x8_f16 { type T = half::f16; } [spread::BLOCK_THREADS, 1; Sm90a] => spread::rms_norm::<T, 8, 8, 32>;
        rms_norm_cluster_x8_bf16 { type T = half::bf16; } [spread::BLOCK_THREADS, 1; Sm90a] => spread::rms_norm::<T, 8, 8, 32>;
    }
}

/// With a residual.
pub mod fused_add {
    use super::*;
    entries! {
        pub struct Args<T>(
            x: *const T, residual: *const T, weight: *const T, out: *mut T, residual_out: *mut T, rows: u32, n: u32,
            x_stride: usize, residual_stride: usize, out_stride: usize, residual_out_stride: usize, weight_offset: f32,
            eps: f32,
        );
        fused_add_rms_norm_x2_f32 { type T = f32; } [512, 2] => fused_add_rms_norm::<T, 4, 2, true, false>;
        fused_add_rms_norm_x2_f16 { type T = half::f16; } [512, 2] => fused_add_rms_norm::<T, 8, 2, true, false>;
        fused_add_rms_norm_x2_bf16 { type T = half::bf16; } [512, 2] => fused_add_rms_norm::<T, 8, 2, true, false>;
        fused_add_rms_norm_x4_f32 { type T = f32; } [512] => fused_add_rms_norm::<T, 4, 4, true, false>;
        fused_add_rms_norm_x4_f16 { type T = half::f16; } [512] => fused_add_rms_norm::<T, 8, 4, true, false>;
        fused_add_rms_norm_x4_bf16 { type T = half::bf16; } [512] => fused_add_rms_norm::<T, 8, 4, true, false>;
        fused_add_rms_norm_loop_f32 { type T = f32; } [1024] => fused_add_rms_norm::<T, 4, 0, true, false>;
        fused_add_rms_norm_loop_f16 { type T = half::f16; } [1024] => fused_add_rms_norm::<T, 8, 0, true, false>;
        fused_add_rms_norm_loop_bf16 { type T = half::bf16; } [1024] => fused_add_rms_norm::<T, 8, 0, true, false>;
        fused_add_rms_norm_any_f32 { type T = f32; } [1024] => fused_add_rms_norm::<T, 4, 0, false, false>;
        fused_add_rms_norm_any_f16 { type T = half::f16; } [1024] => fused_add_rms_norm::<T, 4, 0, false, false>;
        fused_add_rms_norm_any_bf16 { type T = half::bf16; } [1024] => fused_add_rms_norm::<T, 4, 0, false, false>;
        fused_add_rms_norm_any_x4_f32 { type T = f32; } [1024] => fused_add_rms_norm::<T, 4, 4, false, false>;
        fused_add_rms_norm_any_x4_f16 { type T = half::f16; } [1024] => fused_add_rms_norm::<T, 4, 4, false, false>;
        fused_add_rms_norm_any_x4_bf16 { type T = half::bf16; } [1024] => fused_add_rms_norm::<T, 4, 4, false, false>;
        fused_add_rms_norm_narrow_f32 { type T = f32; } [256, 4] => fused_add_rms_norm::<T, 4, 2, true, true>;
        fused_add_rms_norm_narrow_f16 { type T = half::f16; } [256, 4] => fused_add_rms_norm::<T, 8, 2, true, true>;
        fused_add_rms_norm_narrow_bf16 { type T = half::bf16; } [256, 4] => fused_add_rms_norm::<T, 8, 2, true, true>;
        fused_add_rms_norm_x8_f32 { type T = f32; } [1024] => fused_add_rms_norm::<T, 4, 8, true, false>;
        fused_add_rms_norm_x8_f16 { type T = half::f16; } [1024] => fused_add_rms_norm::<T, 8, 8, true, false>;
        fused_add_rms_norm_x8_bf16 { type T = half::bf16; } [1024] => fused_add_rms_norm::<T, 8, 8, true, false>;
        fused_add_rms_norm_any_ring_f32 { type T = f32; } [any_ring::BLOCK_THREADS, 2; Sm90a] => any_ring::fused_add_rms_norm::<T>;
        fused_add_rms_norm_any_ring_f16 { type T = half::f16; } [any_ring::BLOCK_THREADS, 2; Sm90a] => any_ring::fused_add_rms_norm::<T>;
        fused_add_rms_norm_any_ring_bf16 { type T = half::bf16; } [any_ring::BLOCK_THREADS, 2; Sm90a] => any_ring::fused_add_rms_norm::<T>;
        fused_add_rms_norm_cluster_x2_f32 { type T = f32; } [spread::BLOCK_THREADS, 1; Sm90a] => spread::fused_add_rms_norm::<T, 4, 2, 16>;
        fused_add_rms_norm_cluster_x2_f16 { type T = half::f16; } [spread::BLOCK_THREADS, 1; Sm90a] => spread::fused_add_rms_norm::<T, 8, 2, 16>;
        fused_add_rms_norm_cluster_x2_bf16 { type T = half::bf16; } [spread::BLOCK_THREADS, 1; Sm90a] => spread::fused_add_rms_norm::<T, 8, 2, 16>;
        fused_add_rms_norm_cluster_x4_f32 { type T = f32; } [spread::BLOCK_THREADS, 1; Sm90a] => spread::fused_add_rms_norm::<T, 4, 4, 16>;
        fused_add_rms_norm_cluster_x4_f16 { type T = half::f16; } [spread::BLOCK_THREADS, 1; Sm90a] => spread::fused_add_rms_norm::<T, 8, 4, 16>;
        fused_add_rms_norm_cluster_x4_bf16 { type T = half::bf16; } [spread::BLOCK_THREADS, 1; Sm90a] => spread::fused_add_rms_norm::<T, 8, 4, 16>;
        fused_add_rms_norm_cluster_x8_f32 { type T = f32; } [spread::BLOCK_THREADS, 1; Sm90a] => spread::fused_add_rms_norm::<T, 4, 8, 32>;
        fused_add_rms_norm_cluster_x8_f16 { type T = half::f16; } [spread::BLOCK_THREADS, 1; Sm90a] => spread::fused_add_rms_norm::<T, 8, 8, 32>;
        fused_add_rms_norm_cluster_x8_bf16 { type T = half::bf16; } [spread::BLOCK_THREADS, 1; Sm90a] => spread::fused_add_rms_norm::<T, 8, 8, 32>;
    }
}
