//! `y = epilogue(x · wᵀ + bias)` with a warp for each element: for few columns, and for weights of another type.
//!
//! A router has some ten to a few hundred rows: too few to fill a GPU with tiles, and often in `f32` where the tokens are
//! `bf16`. The lanes of a warp take pieces of eight neighbouring elements in turn, and their sums meet by shuffles. The
//! order of summation depends on `k` alone.

use super::epilogue;
use crate::chunk;
use cuda_std::{Float, Global, GlobalMut, bf16, dependent_launch, entries, f16, float, thread, unroll, warp};

/// Warps of a block: neighbouring columns of a token.
pub const WARPS: u32 = 4;

/// Elements of a piece.
const PIECE: usize = 8;

/// `x`: `[m, k]`, rows `x_row` apart; `w`: `[n, k]`, rows `w_row` apart; `bias`: `[n]` or null; `y`: `[m, n]`, rows `y_row`
/// apart. Grid: (columns by [`WARPS`], tokens); block: `32` [`WARPS`].
#[inline(always)]
pub unsafe fn linear_dot<Y: Float, X: Float, W: Float>(
    y: *mut Y,
    x: *const X,
    w: *const W,
    bias: *const Y,
    m: u32,
    n: u32,
    k: u32,
    y_row: usize,
    x_row: usize,
    w_row: usize,
    kind: u32,
) {
    dependent_launch::begin();
    let biased = !bias.is_null();
    let x_places = x as usize as u32 | (x_row * size_of::<X>()) as u32;
    let w_places = w as usize as u32 | (w_row * size_of::<W>()) as u32;
    let whole = (x_places | w_places).is_multiple_of(16);
    let pieces = k / PIECE as u32;
    let (x, w, bias, y) = (Global::new(x), Global::new(w), Global::new(bias), GlobalMut::new(y));
    let (lane, row) = (warp::lane_id(), thread::block_idx_y());
    let column = thread::block_idx_x() * WARPS + thread::thread_idx_x() / 32;
    if column >= n || row >= m {
        return;
    }
    let (x, w) = (x.offset(row as usize * x_row), w.offset(column as usize * w_row));
    let mut sum = 0f32;
    let mut piece = lane;
    while piece < pieces {
        let at = piece as usize * PIECE;
        if whole {
            let (a, b) = (chunk::load::<X, PIECE>(x, at), chunk::load::<W, PIECE>(w, at));
            unroll::<PIECE>(|i| sum = float::fma(a[i].to_f32(), b[i].to_f32(), sum));
        } else {
            // In the same order, so that a token's bits do not depend on where its row lies.
            unroll::<PIECE>(|i| sum = float::fma(x.get(at + i).to_f32(), w.get(at + i).to_f32(), sum));
        }
        piece += 32;
    }
    let mut at = pieces * PIECE as u32 + lane;
    while at < k {
        sum = float::fma(x.get(at).to_f32(), w.get(at).to_f32(), sum);
        at += 32;
    }
    let sum = warp::reduce_sum(sum);
    if lane == 0 {
        let add = if biased { bias.get(column).to_f32() } else { 0.0 };
        y.set(row as usize * y_row + column as usize, Y::from_f32(epilogue(kind, sum + add)));
    }
}

entries! {
    /// Arguments of every `linear_dot_*` entry; see [`linear_dot`].
    pub struct Args<Y, X, W>(
        y: *mut Y, x: *const X, w: *const W, bias: *const Y, m: u32, n: u32, k: u32, y_row: usize, x_row: usize,
        w_row: usize, kind: u32,
    );
    linear_dot_f32 { type Y = f32; type X = f32; type W = f32; } [128, 8] => linear_dot::<Y, X, W>;
    linear_dot_f16 { type Y = f16; type X = f16; type W = f16; } [128, 8] => linear_dot::<Y, X, W>;
    linear_dot_bf16 { type Y = bf16; type X = bf16; type W = bf16; } [128, 8] => linear_dot::<Y, X, W>;
    linear_dot_f16_f32 { type Y = f32; type X = f16; type W = f32; } [128, 8] => linear_dot::<Y, X, W>;
    linear_dot_bf16_f32 { type Y = f32; type X = bf16; type W = f32; } [128, 8] => linear_dot::<Y, X, W>;
}
