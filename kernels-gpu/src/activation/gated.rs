//! `out[r, c] = f(gate[r, c]) * up[r, c]`: the middle of a gated feed-forward layer.
//!
//! Bound by memory, three elements moved for each result. A thread does one piece of 16 bytes: two loads and one
//! store, no loop, so that as many bytes as possible are under way and a single row spreads over many
//! multiprocessors. Blocks are two-dimensional, `(pieces, rows)`, so that narrow rows fill them too; the grid is
//! `(pieces, rows, rows)`, since its second extent ends at 65535.

use super::{FatreluAndMul, Gated, GeluAndMul, GeluTanhAndMul, Params, SiluAndMul, SiluAndMulClamp, SwigluOai};
use crate::row::line::Line;
use crate::row::{Mine, Piece};
use cuda_std::{Float, Global, GlobalMut, entries, vec};

/// The most threads of a block.
pub const MAX_THREADS: u32 = 256;

/// The results of one piece, in f32.
#[inline(always)]
#[track_caller]
pub(super) unsafe fn piece<T: Float, A: Gated, const V: usize, const VEC: bool>(
    piece: Piece<V, VEC>,
    gate: Global<T>,
    up: Global<T>,
    params: Params,
) -> [f32; V] {
    let (gate, up) = if A::INTERLEAVED { piece.load_pairs(gate) } else { (piece.load(gate), piece.load(up)) };
    let (gate, up): ([f32; V], [f32; V]) = (vec::to_f32(gate), vec::to_f32(up));
    let mut out = [0.0; V];
    cuda_std::unroll::<V>(|j| out[j] = A::apply::<T>(gate[j], up[j], params));
    out
}

/// `gate`, `up`: `[rows, d]`, rows `in_stride` elements apart; interleaved functions read `[rows, 2 d]` at `gate` and
/// nothing at `up`. `out`: `[rows, d]`, rows `out_stride` apart. See [`row`](crate::row) for `VEC`.
#[inline(always)]
pub unsafe fn gated<T: Float, A: Gated, const V: usize, const VEC: bool>(
    gate: *const T,
    up: *const T,
    out: *mut T,
    rows: u32,
    d: u32,
    in_stride: usize,
    out_stride: usize,
    alpha: f32,
    limit: f32,
) {
    let step = if A::INTERLEAVED { 2 } else { 1 };
    let (Mine::<V, VEC> { piece: p, .. }, [gate, up, out]) = Mine::begin(rows, d, |row, column, _| {
        let from = row * in_stride + step * column;
        let up = if A::INTERLEAVED { gate } else { up };
        [
            gate.wrapping_add(from).cast(),
            up.wrapping_add(from).cast(),
            out.wrapping_add(row * out_stride + column).cast(),
        ]
    });
    let y = piece::<T, A, V, VEC>(p, Global::new(gate.cast()), Global::new(up.cast()), Params { alpha, limit });
    p.store(GlobalMut::new(out.cast_mut().cast::<T>()), vec::from_f32(y));
}

/// As [`gated`] of 16-bit elements wherever they lie, for many of them: a thread has a [`Line`] of results.
#[inline(always)]
pub unsafe fn lines<T: Float, A: Gated>(
    gate: *const T,
    up: *const T,
    out: *mut T,
    rows: u32,
    d: u32,
    in_stride: usize,
    out_stride: usize,
    alpha: f32,
    limit: f32,
) {
    let (Mine::<8, false> { index, n, .. }, [gate, up, out]) = Mine::begin(rows, d, |row, _, _| {
        let from = row * in_stride;
        let up = if A::INTERLEAVED { gate } else { up };
        [gate.wrapping_add(from).cast(), up.wrapping_add(from).cast(), out.wrapping_add(row * out_stride).cast()]
    });
    let (gate, up, out) =
        (Global::new(gate.cast::<T>()), Global::new(up.cast::<T>()), GlobalMut::new(out.cast_mut().cast()));
    let line = Line::<8>::new::<T>(index, n, out);
    let inputs = if A::INTERLEAVED { line.load_pairs(gate) } else { line.load([gate, up]) };
    let [gate, up]: [[f32; 8]; 2] = inputs.map(vec::to_f32);
    let mut y = [0.0; 8];
    cuda_std::unroll::<8>(|j| y[j] = A::apply::<T>(gate[j], up[j], Params { alpha, limit }));
    line.store(out, vec::from_f32(y));
}

entries! {
    pub struct Args<T>(
        gate: *const T, up: *const T, out: *mut T, rows: u32, d: u32, in_stride: usize, out_stride: usize, alpha: f32,
        limit: f32,
    );
    silu_and_mul_f32 { type T = f32; } [MAX_THREADS] => gated::<T, SiluAndMul, 4, true>;
    silu_and_mul_f16 { type T = half::f16; } [MAX_THREADS] => gated::<T, SiluAndMul, 8, true>;
    silu_and_mul_bf16 { type T = half::bf16; } [MAX_THREADS] => gated::<T, SiluAndMul, 8, true>;
    silu_and_mul_any_f32 { type T = f32; } [MAX_THREADS] => gated::<T, SiluAndMul, 4, false>;
    silu_and_mul_any_f16 { type T = half::f16; } [MAX_THREADS] => gated::<T, SiluAndMul, 4, false>;
    silu_and_mul_any_bf16 { type T = half::bf16; } [MAX_THREADS] => gated::<T, SiluAndMul, 4, false>;
    gelu_and_mul_f32 { type T = f32; } [MAX_THREADS] => gated::<T, GeluAndMul, 4, true>;
    gelu_and_mul_f16 { type T = half::f16; } [MAX_THREADS] => gated::<T, GeluAndMul, 8, true>;
    gelu_and_mul_bf16 { type T = half::bf16; } [MAX_THREADS] => gated::<T, GeluAndMul, 8, true>;
    gelu_and_mul_any_f32 { type T = f32; } [MAX_THREADS] => gated::<T, GeluAndMul, 4, false>;
    gelu_and_mul_any_f16 { type T = half::f16; } [MAX_THREADS] => gated::<T, GeluAndMul, 4, false>;
    gelu_and_mul_any_bf16 { type T = half::bf16; } [MAX_THREADS] => gated::<T, GeluAndMul, 4, false>;
    gelu_tanh_and_mul_f32 { type T = f32; } [MAX_THREADS] => gated::<T, GeluTanhAndMul, 4, true>;
    gelu_tanh_and_mul_f16 { type T = half::f16; } [MAX_THREADS] => gated::<T, GeluTanhAndMul, 8, true>;
    gelu_tanh_and_mul_bf16 { type T = half::bf16; } [MAX_THREADS] => gated::<T, GeluTanhAndMul, 8, true>;
    gelu_tanh_and_mul_any_f32 { type T = f32; } [MAX_THREADS] => gated::<T, GeluTanhAndMul, 4, false>;
    gelu_tanh_and_mul_any_f16 { type T = half::f16; } [MAX_THREADS] => gated::<T, GeluTanhAndMul, 4, false>;
    gelu_tanh_and_mul_any_bf16 { type T = half::bf16; } [MAX_THREADS] => gated::<T, GeluTanhAndMul, 4, false>;
    fatrelu_and_mul_f32 { type T = f32; } [MAX_THREADS] => gated::<T, FatreluAndMul, 4, true>;
    fatrelu_and_mul_f16 { type T = half::f16; } [MAX_THREADS] => gated::<T, FatreluAndMul, 8, true>;
    fatrelu_and_mul_bf16 { type T = half::bf16; } [MAX_THREADS] => gated::<T, FatreluAndMul, 8, true>;
    fatrelu_and_mul_any_f32 { type T = f32; } [MAX_THREADS] => gated::<T, FatreluAndMul, 4, false>;
    fatrelu_and_mul_any_f16 { type T = half::f16; } [MAX_THREADS] => gated::<T, FatreluAndMul, 4, false>;
    fatrelu_and_mul_any_bf16 { type T = half::bf16; } [MAX_THREADS] => gated::<T, FatreluAndMul, 4, false>;
    silu_and_mul_clamp_f32 { type T = f32; } [MAX_THREADS] => gated::<T, SiluAndMulClamp, 4, true>;
    silu_and_mul_clamp_f16 { type T = half::f16; } [MAX_THREADS] => gated::<T, SiluAndMulClamp, 8, true>;
    silu_and_mul_clamp_bf16 { type T = half::bf16; } [MAX_THREADS] => gated::<T, SiluAndMulClamp, 8, true>;
    silu_and_mul_clamp_any_f32 { type T = f32; } [MAX_THREADS] => gated::<T, SiluAndMulClamp, 4, false>;
    silu_and_mul_clamp_any_f16 { type T = half::f16; } [MAX_THREADS] => gated::<T, SiluAndMulClamp, 4, false>;
    silu_and_mul_clamp_any_bf16 { type T = half::bf16; } [MAX_THREADS] => gated::<T, SiluAndMulClamp, 4, false>;
    swiglu_oai_f32 { type T = f32; } [MAX_THREADS] => gated::<T, SwigluOai, 4, true>;
    swiglu_oai_f16 { type T = half::f16; } [MAX_THREADS] => gated::<T, SwigluOai, 8, true>;
    swiglu_oai_bf16 { type T = half::bf16; } [MAX_THREADS] => gated::<T, SwigluOai, 8, true>;
    swiglu_oai_any_f32 { type T = f32; } [MAX_THREADS] => gated::<T, SwigluOai, 4, false>;
    swiglu_oai_any_f16 { type T = half::f16; } [MAX_THREADS] => gated::<T, SwigluOai, 4, false>;
    swiglu_oai_any_bf16 { type T = half::bf16; } [MAX_THREADS] => gated::<T, SwigluOai, 4, false>;
    silu_and_mul_lines_f16 { type T = half::f16; } [MAX_THREADS] => lines::<T, SiluAndMul>;
    silu_and_mul_lines_bf16 { type T = half::bf16; } [MAX_THREADS] => lines::<T, SiluAndMul>;
    gelu_and_mul_lines_f16 { type T = half::f16; } [MAX_THREADS] => lines::<T, GeluAndMul>;
    gelu_and_mul_lines_bf16 { type T = half::bf16; } [MAX_THREADS] => lines::<T, GeluAndMul>;
    gelu_tanh_and_mul_lines_f16 { type T = half::f16; } [MAX_THREADS] => lines::<T, GeluTanhAndMul>;
    gelu_tanh_and_mul_lines_bf16 { type T = half::bf16; } [MAX_THREADS] => lines::<T, GeluTanhAndMul>;
    fatrelu_and_mul_lines_f16 { type T = half::f16; } [MAX_THREADS] => lines::<T, FatreluAndMul>;
    fatrelu_and_mul_lines_bf16 { type T = half::bf16; } [MAX_THREADS] => lines::<T, FatreluAndMul>;
    silu_and_mul_clamp_lines_f16 { type T = half::f16; } [MAX_THREADS] => lines::<T, SiluAndMulClamp>;
    silu_and_mul_clamp_lines_bf16 { type T = half::bf16; } [MAX_THREADS] => lines::<T, SiluAndMulClamp>;
    swiglu_oai_lines_f16 { type T = half::f16; } [MAX_THREADS] => lines::<T, SwigluOai>;
    swiglu_oai_lines_bf16 { type T = half::bf16; } [MAX_THREADS] => lines::<T, SwigluOai>;
}
