//! `out[r, c] = f(x[r, c])`: an activation without a gate.
//!
//! One piece of 16 bytes a thread, in the grid of [`gated`](super::gated).

use super::gated::MAX_THREADS;
use super::{Gelu, GeluQuick, GeluTanh, Plain, Relu2, Silu};
use crate::row::Mine;
use cuda_std::{Float, Global, GlobalMut, entries, vec};

/// `x`, `out`: `[rows, d]`, rows `x_stride` and `out_stride` elements apart. See [`row`](crate::row) for `VEC`.
#[inline(always)]
pub unsafe fn plain<T: Float, A: Plain, const V: usize, const VEC: bool>(
    x: *const T,
    out: *mut T,
    rows: u32,
    d: u32,
    x_stride: usize,
    out_stride: usize,
) {
    let (Mine::<V, VEC> { piece: p, .. }, [x, out]) = Mine::begin(rows, d, |row, column, _| {
        [x.wrapping_add(row * x_stride + column).cast(), out.wrapping_add(row * out_stride + column).cast()]
    });
    let mut y: [f32; V] = vec::to_f32(p.load(Global::new(x.cast::<T>())));
    cuda_std::unroll::<V>(|j| y[j] = A::apply::<T>(y[j]));
    p.store(GlobalMut::new(out.cast_mut().cast::<T>()), vec::from_f32(y));
}

entries! {
    pub struct Args<T>(x: *const T, out: *mut T, rows: u32, d: u32, x_stride: usize, out_stride: usize);
    silu_f32 { type T = f32; } [MAX_THREADS] => plain::<T, Silu, 4, true>;
    silu_f16 { type T = half::f16; } [MAX_THREADS] => plain::<T, Silu, 8, true>;
    silu_bf16 { type T = half::bf16; } [MAX_THREADS] => plain::<T, Silu, 8, true>;
    silu_any_f32 { type T = f32; } [MAX_THREADS] => plain::<T, Silu, 4, false>;
    silu_any_f16 { type T = half::f16; } [MAX_THREADS] => plain::<T, Silu, 4, false>;
    silu_any_bf16 { type T = half::bf16; } [MAX_THREADS] => plain::<T, Silu, 4, false>;
    gelu_f32 { type T = f32; } [MAX_THREADS] => plain::<T, Gelu, 4, true>;
    gelu_f16 { type T = half::f16; } [MAX_THREADS] => plain::<T, Gelu, 8, true>;
    gelu_bf16 { type T = half::bf16; } [MAX_THREADS] => plain::<T, Gelu, 8, true>;
    gelu_any_f32 { type T = f32; } [MAX_THREADS] => plain::<T, Gelu, 4, false>;
    gelu_any_f16 { type T = half::f16; } [MAX_THREADS] => plain::<T, Gelu, 4, false>;
    gelu_any_bf16 { type T = half::bf16; } [MAX_THREADS] => plain::<T, Gelu, 4, false>;
    gelu_tanh_f32 { type T = f32; } [MAX_THREADS] => plain::<T, GeluTanh, 4, true>;
    gelu_tanh_f16 { type T = half::f16; } [MAX_THREADS] => plain::<T, GeluTanh, 8, true>;
    gelu_tanh_bf16 { type T = half::bf16; } [MAX_THREADS] => plain::<T, GeluTanh, 8, true>;
    gelu_tanh_any_f32 { type T = f32; } [MAX_THREADS] => plain::<T, GeluTanh, 4, false>;
    gelu_tanh_any_f16 { type T = half::f16; } [MAX_THREADS] => plain::<T, GeluTanh, 4, false>;
    gelu_tanh_any_bf16 { type T = half::bf16; } [MAX_THREADS] => plain::<T, GeluTanh, 4, false>;
    gelu_quick_f32 { type T = f32; } [MAX_THREADS] => plain::<T, GeluQuick, 4, true>;
    gelu_quick_f16 { type T = half::f16; } [MAX_THREADS] => plain::<T, GeluQuick, 8, true>;
    gelu_quick_bf16 { type T = half::bf16; } [MAX_THREADS] => plain::<T, GeluQuick, 8, true>;
    gelu_quick_any_f32 { type T = f32; } [MAX_THREADS] => plain::<T, GeluQuick, 4, false>;
    gelu_quick_any_f16 { type T = half::f16; } [MAX_THREADS] => plain::<T, GeluQuick, 4, false>;
    gelu_quick_any_bf16 { type T = half::bf16; } [MAX_THREADS] => plain::<T, GeluQuick, 4, false>;
    relu2_f32 { type T = f32; } [MAX_THREADS] => plain::<T, Relu2, 4, true>;
    relu2_f16 { type T = half::f16; } [MAX_THREADS] => plain::<T, Relu2, 8, true>;
    relu2_bf16 { type T = half::bf16; } [MAX_THREADS] => plain::<T, Relu2, 8, true>;
    relu2_any_f32 { type T = f32; } [MAX_THREADS] => plain::<T, Relu2, 4, false>;
    relu2_any_f16 { type T = half::f16; } [MAX_THREADS] => plain::<T, Relu2, 4, false>;
    relu2_any_bf16 { type T = half::bf16; } [MAX_THREADS] => plain::<T, Relu2, 4, false>;
}
