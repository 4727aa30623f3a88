//! `y = (x - mean) / sqrt(mean((x - mean)^2) + eps) * w + b`.
//!
//! Mean and variance are two reductions over the registers: the variance of differences does not cancel, as the
//! difference of `mean(x^2)` and `mean(x)^2` would, and costs one barrier more.

use super::rms_norm::{inverse, inverse_rms};
use super::{MAX_WARPS, Row};
use crate::row::team::{Op, scratch};
use crate::row::{Team, packed, zero};
use cuda_std::shared::Carver;
use cuda_std::{Float, Global, GlobalMut, dependent_launch, entries, float, thread, vec};

/// Dynamic shared memory of a block: a scratch for each reduction.
pub const SHARED_BYTES: usize = 2 * MAX_WARPS * 4;

#[inline(always)]
fn add<T: Float, const V: usize>(total: &mut f32, piece: [T; V]) {
    let x = vec::to_f32(piece);
    cuda_std::unroll::<V>(|j| *total += x[j]);
}

#[inline(always)]
#[track_caller]
unsafe fn normalise<T: Float, const V: usize, const N: usize, const VEC: bool>(
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

    let mut values = [[zero(); V]; N];
    cuda_std::unroll::<N>(|i| values[i] = row.piece(i).load_mutable(x));
    let (mut w, mut b) = (values, values);
    cuda_std::unroll::<N>(|i| {
        w[i] = row.piece(i).load_optional(weight, true);
        b[i] = row.piece(i).load_optional(bias, false);
    });
    cuda_std::unroll::<N>(|i| add(&mut total, values[i]));
    if N == 0 {
        let mut i = 0;
        while i < row.rounds() {
            add(&mut total, row.piece(i).load_mutable(x));
            i += 1;
        }
    }
    let [total] = row.reduce([total], [Op::Sum], scratch_sum);
    let mean = total * inverse_n;

    // Columns outside of the row are not zeros any more once the mean is taken off.
    let add_squares = |squares: &mut f32, i: usize, piece: [T; V]| {
        let x = vec::to_f32(piece);
        cuda_std::unroll::<V>(|j| {
            let d = if row.piece(i).has(j) { x[j] - mean } else { 0.0 };
            *squares = float::fma(d, d, *squares);
        });
    };
    let mut squares = 0.0;
    cuda_std::unroll::<N>(|i| add_squares(&mut squares, i, packed::<T, V, VEC>(values[i])));
    if N == 0 {
        let mut i = 0;
        while i < row.rounds() {
            add_squares(&mut squares, i, row.piece(i).load_mutable(x));
            i += 1;
        }
    }
    let [squares] = row.reduce([squares], [Op::Sum], scratch_squares);
    let scale = inverse_rms(squares, inverse_n, eps);

    let store = |i: usize, x: [T; V], w: [T; V], b: [T; V]| {
        let (mut x, w, b) = (vec::to_f32(x), vec::to_f32(w), vec::to_f32(b));
        cuda_std::unroll::<V>(|j| x[j] = float::fma((x[j] - mean) * scale, w[j], b[j]));
        row.piece(i).store(out, vec::from_f32(x));
    };
    cuda_std::unroll::<N>(|i| store(i, packed::<T, V, VEC>(values[i]), w[i], b[i]));
    if N == 0 {
        let mut i = 0;
        while i < row.rounds() {
            let p = row.piece(i);
            store(i, p.load_mutable(x), p.load_optional(weight, true), p.load_optional(bias, false));
            i += 1;
        }
    }
}

/// `x`, `out`: `[rows, n]`, rows `x_stride` and `out_stride` elements apart; `weight`, `bias`: `[n]` or null for ones
/// and zeros. Blocks: `(team, rows)`, the team as [`Team`] demands.
#[inline(always)]
pub unsafe fn layer_norm<T: Float, const V: usize, const N: usize, const VEC: bool>(
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
    dependent_launch::begin();
    let row = (thread::block_idx_x() * thread::block_dim_y() + thread::thread_idx_y()) as usize;
    let live = row < rows as usize;
    let (x, out) = (Global::new(x).offset(row * x_stride), GlobalMut::new(out).offset(row * out_stride));
    let (weight, bias, team) = (Global::new(weight), Global::new(bias), Team::current());
    normalise::<T, V, N, VEC>(x, weight, bias, out, team, n, live, eps);
}

entries! {
    pub struct Args<T>(
        x: *const T, weight: *const T, bias: *const T, out: *mut T, rows: u32, n: u32, x_stride: usize,
        out_stride: usize, eps: f32,
    );
    layer_norm_x2_f32 { type T = f32; } [512, 2] => layer_norm::<T, 4, 2, true>;
    layer_norm_x2_f16 { type T = half::f16; } [512, 2] => layer_norm::<T, 8, 2, true>;
    layer_norm_x2_bf16 { type T = half::bf16; } [512, 2] => layer_norm::<T, 8, 2, true>;
    layer_norm_x4_f32 { type T = f32; } [512] => layer_norm::<T, 4, 4, true>;
    layer_norm_x4_f16 { type T = half::f16; } [512] => layer_norm::<T, 8, 4, true>;
    layer_norm_x4_bf16 { type T = half::bf16; } [512] => layer_norm::<T, 8, 4, true>;
    layer_norm_loop_f32 { type T = f32; } [1024] => layer_norm::<T, 4, 0, true>;
    layer_norm_loop_f16 { type T = half::f16; } [1024] => layer_norm::<T, 8, 0, true>;
    layer_norm_loop_bf16 { type T = half::bf16; } [1024] => layer_norm::<T, 8, 0, true>;
    layer_norm_any_f32 { type T = f32; } [1024] => layer_norm::<T, 4, 0, false>;
    layer_norm_any_f16 { type T = half::f16; } [1024] => layer_norm::<T, 4, 0, false>;
    layer_norm_any_bf16 { type T = half::bf16; } [1024] => layer_norm::<T, 4, 0, false>;
}
