//! `out[r, c] = f(x[r, c])`: an activation without a gate.
//!
//! One piece of 16 bytes a thread, in the grid of [`gated`](super::gated).

use super::gated::{MAX_THREADS, position};
use super::{Gelu, GeluQuick, GeluTanh, Plain, Relu2, Silu};
use crate::row::{Piece, misalignment};
use cuda_std::vec::B128;
use cuda_std::{Float, Global, GlobalMut, entries, thread};

#[inline(always)]
#[track_caller]
unsafe fn piece<T: Float, A: Plain, const V: usize, const VEC: bool>(
    piece: Piece<V, VEC>,
    x: Global<T>,
    out: GlobalMut<T>,
) {
    let x: [f32; V] = piece.load(x).to_f32();
    let mut y = [0.0; V];
    cuda_std::unroll::<V>(|j| y[j] = A::apply::<T>(x[j]));
    piece.store(out, B128::from_f32(y));
}

/// `x`, `out`: `[rows, d]`, rows `x_stride` and `out_stride` elements apart.
#[inline(always)]
pub unsafe fn plain<T: Float, A: Plain, const V: usize>(
    x: *const T,
    out: *mut T,
    rows: u32,
    d: u32,
    x_stride: usize,
    out_stride: usize,
) {
    let (row, index) = position();
    if row >= rows as usize {
        return;
    }
    let off = misalignment::<T, V>(x, x_stride) | misalignment::<T, V>(out, out_stride);
    let (x, out) = (Global::new(x).offset(row * x_stride), GlobalMut::new(out).offset(row * out_stride));
    let d = d as usize;
    if off.is_multiple_of(16) && d.is_multiple_of(V) {
        piece::<T, A, V, true>(Piece::new(index, 1, d), x, out);
    } else {
        piece::<T, A, V, false>(Piece::new(index, thread::block_dim_x().min(32) as usize, d), x, out);
    }
}

entries! {
    pub struct Args<T>(x: *const T, out: *mut T, rows: u32, d: u32, x_stride: usize, out_stride: usize);
    silu_f32 { type T = f32; } [MAX_THREADS] => plain::<T, Silu, 4>;
    silu_f16 { type T = half::f16; } [MAX_THREADS] => plain::<T, Silu, 8>;
    silu_bf16 { type T = half::bf16; } [MAX_THREADS] => plain::<T, Silu, 8>;
    gelu_f32 { type T = f32; } [MAX_THREADS] => plain::<T, Gelu, 4>;
    gelu_f16 { type T = half::f16; } [MAX_THREADS] => plain::<T, Gelu, 8>;
    gelu_bf16 { type T = half::bf16; } [MAX_THREADS] => plain::<T, Gelu, 8>;
    gelu_tanh_f32 { type T = f32; } [MAX_THREADS] => plain::<T, GeluTanh, 4>;
    gelu_tanh_f16 { type T = half::f16; } [MAX_THREADS] => plain::<T, GeluTanh, 8>;
    gelu_tanh_bf16 { type T = half::bf16; } [MAX_THREADS] => plain::<T, GeluTanh, 8>;
    gelu_quick_f32 { type T = f32; } [MAX_THREADS] => plain::<T, GeluQuick, 4>;
    gelu_quick_f16 { type T = half::f16; } [MAX_THREADS] => plain::<T, GeluQuick, 8>;
    gelu_quick_bf16 { type T = half::bf16; } [MAX_THREADS] => plain::<T, GeluQuick, 8>;
    relu2_f32 { type T = f32; } [MAX_THREADS] => plain::<T, Relu2, 4>;
    relu2_f16 { type T = half::f16; } [MAX_THREADS] => plain::<T, Relu2, 8>;
    relu2_bf16 { type T = half::bf16; } [MAX_THREADS] => plain::<T, Relu2, 8>;
}
