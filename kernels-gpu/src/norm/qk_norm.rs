//! RMS normalisation of each head of queries and keys, in place, in one launch.
//!
//! Heads lie inside of a fused qkv tensor, so tokens and heads have distances of their own. A team of lanes takes a
//! head; blocks are `(team, heads)` and the grid is `(tokens, heads / heads of a block)`, which spares a division.

use super::rms_norm::{inverse, inverse_rms, scaled, squares};
use super::{MAX_WARPS, Row};
use crate::row::team::{Op, scratch};
use crate::row::{Team, packed, zero};
use cuda_std::shared::Carver;
use cuda_std::{Float, Global, GlobalMut, entries, thread, vec};

/// Dynamic shared memory of a block. Teams of lanes need none, so this is for form's sake of the reduction.
pub const SHARED_BYTES: usize = MAX_WARPS * 4;

#[inline(always)]
#[track_caller]
unsafe fn head<T: Float, const V: usize, const N: usize, const VEC: bool>(
    x: GlobalMut<T>,
    weight: Global<T>,
    n: u32,
    live: bool,
    weight_offset: f32,
    eps: f32,
) {
    let team = Team::current();
    let scratch = scratch::<1, MAX_WARPS>(&mut Carver::new());
    let row = Row::<V, N, VEC>::new(team, if live { n } else { 0 });
    let from = Global::new(x.ptr(0usize).cast_const());
    let mut values = [[zero(); V]; N];
    let at = row.begin(true, |column| [from.ptr(column).cast()], []);
    cuda_std::unroll::<N>(|i| values[i] = row.here(i).load_mutable(Global::new(at[i][0].cast())));
    let mut w = values;
    cuda_std::unroll::<N>(|i| w[i] = row.piece(i).load_optional(weight, true));
    let mut total = 0.0;
    cuda_std::unroll::<N>(|i| total += squares(values[i]));
    let [total] = if VEC {
        row.reduce([total], [Op::Sum], scratch)
    } else {
        // A head has a warp at most; other rows that go one by one may have a whole block.
        team.reduce::<1, { MAX_WARPS / 2 }>([total], [Op::Sum], scratch)
    };
    let scale = inverse_rms(total, inverse(n), eps);
    cuda_std::unroll::<N>(|i| {
        row.piece(i).store(x, vec::from_f32(scaled(packed::<T, V, VEC>(values[i]), w[i], scale, weight_offset)))
    });
}

/// `q`: `[tokens, q_heads, n]`, `k`: `[tokens, k_heads, n]`, strides in elements; weights: `[n]` or null for ones (then
/// `weight_offset` is 0). `n` is at most `32 N V`.
#[inline(always)]
pub unsafe fn qk_norm<T: Float, const V: usize, const N: usize, const VEC: bool>(
    q: *mut T,
    k: *mut T,
    q_weight: *const T,
    k_weight: *const T,
    q_heads: u32,
    k_heads: u32,
    n: u32,
    q_stride: usize,
    q_head_stride: usize,
    k_stride: usize,
    k_head_stride: usize,
    weight_offset: f32,
    eps: f32,
) {
    let token = thread::block_idx_x() as usize;
    let at = thread::block_idx_y() * thread::block_dim_y() + thread::thread_idx_y();
    let live = at < q_heads + k_heads;
    // Of those that have no head the first: nobody's address is computed, which might be none.
    let at = if live { at } else { 0 };
    let (x, weight) = if at < q_heads {
        (q.wrapping_add(token * q_stride + at as usize * q_head_stride), q_weight)
    } else {
        (k.wrapping_add(token * k_stride + (at - q_heads) as usize * k_head_stride), k_weight)
    };
    let (x, weight) = (if live { x } else { q }, Global::new(weight));
    let x = GlobalMut::new(x);
    head::<T, V, N, VEC>(x, weight, n, live, weight_offset, eps);
}

entries! {
    pub struct Args<T>(
        q: *mut T, k: *mut T, q_weight: *const T, k_weight: *const T, q_heads: u32, k_heads: u32, n: u32,
        q_stride: usize, q_head_stride: usize, k_stride: usize, k_head_stride: usize, weight_offset: f32, eps: f32,
    );
    qk_norm_f32 { type T = f32; } [256] => qk_norm::<T, 4, 4, true>;
    qk_norm_f16 { type T = half::f16; } [256] => qk_norm::<T, 8, 2, true>;
    qk_norm_bf16 { type T = half::bf16; } [256] => qk_norm::<T, 8, 2, true>;
    qk_norm_any_f32 { type T = f32; } [256] => qk_norm::<T, 4, 4, false>;
    qk_norm_any_f16 { type T = half::f16; } [256] => qk_norm::<T, 4, 4, false>;
    qk_norm_any_bf16 { type T = half::bf16; } [256] => qk_norm::<T, 4, 4, false>;
}
