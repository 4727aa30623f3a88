//! `y = (x - mean) / sqrt(mean((x - mean)^2) + eps) * w + b`.
//!
//! Mean and variance are two reductions over the registers: the variance of differences does not cancel, as the
//! difference of `mean(x^2)` and `mean(x)^2` would, and costs one barrier more.

use super::rms_norm::inverse_rms;
use super::{MAX_WARPS, Row};
use crate::row::team::{Op, scratch};
use crate::row::{Team, misalignment};
use cuda_std::shared::Carver;
use cuda_std::vec::B128;
use cuda_std::{Float, Global, GlobalMut, entries, float, thread};

/// Dynamic shared memory of a block: a scratch for each reduction.
pub const SHARED_BYTES: usize = 2 * MAX_WARPS * 4;

#[inline(always)]
fn add<T: Float, const V: usize>(total: &mut f32, piece: B128<T, V>) {
    let x = piece.to_f32();
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
    n: usize,
    live: bool,
    eps: f32,
) {
    let mut shared = Carver::new();
    let (scratch_sum, scratch_squares) = (scratch::<1, MAX_WARPS>(&mut shared), scratch::<1, MAX_WARPS>(&mut shared));
    let row = Row::<V, N, VEC>::new(team, team.lanes(), if live { n } else { 0 });
    let mut total = 0.0;

    let mut values = [B128([T::from_f32(0.0); V]); N];
    cuda_std::unroll::<N>(|i| values[i] = row.piece(i).load_mutable(x));
    let (mut w, mut b) = (values, values);
    cuda_std::unroll::<N>(|i| {
        w[i] = row.piece(i).load_optional(weight, 1.0);
        b[i] = row.piece(i).load_optional(bias, 0.0);
    });
    cuda_std::unroll::<N>(|i| add(&mut total, values[i]));
    if N == 0 {
        let mut i = 0;
        while i < row.rounds() {
            add(&mut total, row.piece(i).load_mutable(x));
            i += 1;
        }
    }
    let [total] = team.reduce::<1, MAX_WARPS>([total], [Op::Sum], scratch_sum);
    let mean = float::fast::div(total, n as f32);

    // Columns outside of the row are not zeros any more once the mean is taken off.
    let add_squares = |squares: &mut f32, i: usize, piece: B128<T, V>| {
        let x = piece.to_f32();
        cuda_std::unroll::<V>(|j| {
            let d = if row.piece(i).has(j) { x[j] - mean } else { 0.0 };
            *squares = float::fma(d, d, *squares);
        });
    };
    let mut squares = 0.0;
    cuda_std::unroll::<N>(|i| add_squares(&mut squares, i, values[i]));
    if N == 0 {
        let mut i = 0;
        while i < row.rounds() {
            add_squares(&mut squares, i, row.piece(i).load_mutable(x));
            i += 1;
        }
    }
    let [squares] = team.reduce::<1, MAX_WARPS>([squares], [Op::Sum], scratch_squares);
    let scale = inverse_rms(squares, n, eps);

    let store = |i: usize, x: B128<T, V>, w: B128<T, V>, b: B128<T, V>| {
        let (mut x, w, b) = (x.to_f32(), w.to_f32(), b.to_f32());
        cuda_std::unroll::<V>(|j| x[j] = float::fma((x[j] - mean) * scale, w[j], b[j]));
        row.piece(i).store(out, B128::from_f32(x));
    };
    cuda_std::unroll::<N>(|i| store(i, values[i], w[i], b[i]));
    if N == 0 {
        let mut i = 0;
        while i < row.rounds() {
            let p = row.piece(i);
            store(i, p.load_mutable(x), p.load_optional(weight, 1.0), p.load_optional(bias, 0.0));
            i += 1;
        }
    }
}

/// `x`, `out`: `[rows, n]`, rows `x_stride` and `out_stride` elements apart; `weight`, `bias`: `[n]` or null for ones
/// and zeros. Blocks: `(team, rows)`, the team as [`Team`] demands.
#[inline(always)]
pub unsafe fn layer_norm<T: Float, const V: usize, const N: usize>(
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
    let row = (thread::block_idx_x() * thread::block_dim_y() + thread::thread_idx_y()) as usize;
    let (live, n) = (row < rows as usize, n as usize);
    let off = misalignment::<T, V>(x, x_stride) | misalignment::<T, V>(weight, 0);
    let off = off | misalignment::<T, V>(bias, 0) | misalignment::<T, V>(out, out_stride);
    let (x, out) = (Global::new(x).offset(row * x_stride), GlobalMut::new(out).offset(row * out_stride));
    let (weight, bias, team) = (Global::new(weight), Global::new(bias), Team::current());
    if off.is_multiple_of(16) && n.is_multiple_of(V) {
        normalise::<T, V, N, true>(x, weight, bias, out, team, n, live, eps);
    } else {
        normalise::<T, V, N, false>(x, weight, bias, out, team, n, live, eps);
    }
}

entries! {
    pub struct Args<T>(
        x: *const T, weight: *const T, bias: *const T, out: *mut T, rows: u32, n: u32, x_stride: usize,
        out_stride: usize, eps: f32,
    );
    layer_norm_x2_f32 { type T = f32; } [512, 2] => layer_norm::<T, 4, 2>;
    layer_norm_x2_f16 { type T = half::f16; } [512, 2] => layer_norm::<T, 8, 2>;
    layer_norm_x2_bf16 { type T = half::bf16; } [512, 2] => layer_norm::<T, 8, 2>;
    layer_norm_x4_f32 { type T = f32; } [1024] => layer_norm::<T, 4, 4>;
    layer_norm_x4_f16 { type T = half::f16; } [1024] => layer_norm::<T, 8, 4>;
    layer_norm_x4_bf16 { type T = half::bf16; } [1024] => layer_norm::<T, 8, 4>;
    layer_norm_loop_f32 { type T = f32; } [1024] => layer_norm::<T, 4, 0>;
    layer_norm_loop_f16 { type T = half::f16; } [1024] => layer_norm::<T, 8, 0>;
    layer_norm_loop_bf16 { type T = half::bf16; } [1024] => layer_norm::<T, 8, 0>;
}
