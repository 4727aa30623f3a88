//! Merge of partial attention results: softmax over the union of what each of them saw.
//!
//! A part is a normalised output and the logarithm of its softmax's denominator (LSE), as
//! [`decode`](super::decode) and prefill give them. With `w_i = exp(lse_i - max lse)` the union's output is
//! `Σ w_i out_i / Σ w_i` and its LSE `max lse + ln Σ w_i`. One piece of 16 bytes a thread; a part's LSE is one address for
//! all threads of a row. A part whose weight is 0 in f32, without keys (LSE of -inf) or with an LSE more than 104 below the largest, is not looked at, so that its output may be
//! anything. Source: Juravsky et al., *Hydragen*, 2024; Ye et al., *Cascade Inference*, 2024.

use crate::row::Piece;
use core::ffi::c_void;
use cuda_std::vec::Reused;
use cuda_std::{Float, Global, GlobalMut, bf16, dependent_launch, entries, f16, float, thread, unroll, vec};

/// The most threads of a block.
pub const MAX_THREADS: u32 = 256;
/// The most parts of a launch.
pub const MAX_PARTS: usize = 8;

/// The parts: outputs of `[rows, dim]`, rows `stride` elements apart, and LSEs of `[rows]`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Parts {
    /// Outputs, of the element type of the launch.
    pub out: [*const c_void; MAX_PARTS],
    /// LSEs.
    pub lse: [*const f32; MAX_PARTS],
    /// Elements from one row of an output to the next.
    pub stride: [usize; MAX_PARTS],
}

// Addresses and plain numbers, laid out alike by host and device.
cuda_std::struct_param!(Parts);

/// Merges `count` of the parts, 1 to [`MAX_PARTS`].
///
/// `out`: `[rows, dim]`, rows `out_stride` elements apart; `lse`: `[rows]` or null. See [`row`](crate::row) for `V` and
/// `VEC`. Grid and block: a thread for each piece along x, for each row along y and z.
#[inline(always)]
pub unsafe fn merge<T: Float, const V: usize, const VEC: bool>(
    out: *mut T,
    lse: *mut f32,
    parts: Parts,
    count: u32,
    rows: u32,
    dim: u32,
    out_stride: usize,
) {
    dependent_launch::begin();
    let row = (thread::block_idx_z() * thread::grid_dim_y() + thread::block_idx_y()) * thread::block_dim_y()
        + thread::thread_idx_y();
    let index = thread::block_idx_x() * thread::block_dim_x() + thread::thread_idx_x();
    if row >= rows {
        return;
    }
    let piece = Piece::<V, VEC>::new(index, dim);
    let mut logs = [f32::NEG_INFINITY; MAX_PARTS];
    unroll::<MAX_PARTS>(|i| {
        if (i as u32) < count {
            logs[i] = Global::new(parts.lse[i]).get_hinted(row, Reused);
        }
    });
    let mut top = f32::NEG_INFINITY;
    unroll::<MAX_PARTS>(|i| top = float::max(top, logs[i]));
    let reference = if top == f32::NEG_INFINITY { 0.0 } else { top };
    let (mut total, mut sum) = (0f32, [0f32; V]);
    unroll::<MAX_PARTS>(|i| {
        let weight = float::exp(logs[i] - reference);
        // A NaN is not dropped.
        if (i as u32) < count && weight != 0.0 {
            let part = Global::new(parts.out[i].cast::<T>()).offset(row as usize * parts.stride[i]);
            let part: [f32; V] = vec::to_f32(piece.load(part));
            total += weight;
            unroll::<V>(|j| sum[j] = float::fma(weight, part[j], sum[j]));
        }
    });
    let by = if total == 0.0 { 0.0 } else { 1.0 / total };
    unroll::<V>(|j| sum[j] *= by);
    piece.store(GlobalMut::new(out).offset(row as usize * out_stride), vec::from_f32(sum));
    if index == 0 && !lse.is_null() {
        let value = if total == 0.0 { f32::NEG_INFINITY } else { reference + float::log(total) };
        GlobalMut::new(lse).set(row, value);
    }
}

entries! {
    /// Arguments of every `merge_*` entry; see [`merge`].
    pub struct Args<T>(
        out: *mut T, lse: *mut f32, parts: Parts, count: u32, rows: u32, dim: u32, out_stride: usize,
    );
    merge_f32 { type T = f32; } [MAX_THREADS] => merge::<T, 4, true>;
    merge_f16 { type T = f16; } [MAX_THREADS] => merge::<T, 8, true>;
    merge_bf16 { type T = bf16; } [MAX_THREADS] => merge::<T, 8, true>;
    merge_any_f32 { type T = f32; } [MAX_THREADS] => merge::<T, 4, false>;
    merge_any_f16 { type T = f16; } [MAX_THREADS] => merge::<T, 4, false>;
    merge_any_bf16 { type T = bf16; } [MAX_THREADS] => merge::<T, 4, false>;
}
