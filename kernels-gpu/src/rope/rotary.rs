//! Rotates queries and keys in place by the angles of their tokens' positions.
//!
//! A thread turns `N` pairs, two chunks of 16 bytes, of one head of one token: block (chunks, heads, tokens), no loop and
//! no division. Its data are on their way before it asks for the position, so the time of few tokens is that of two
//! loads after each other, position and angles. Heads of a token share their angles in the first-level cache. Rows
//! that are not aligned go element by element, with the same threads.
//!
//! `x cos - y sin, y cos + x sin` in f32, one rounding. A token whose position is outside of the cache stays as it is
//! and counts in `status`, unless that is -1.

use crate::chunk;
use crate::operand;
use crate::rope::chunk_pairs::begin;
use crate::rope::rotation::{self, Angles, INVERSE, POSITIONS_I64, angle_part, turn};
use cuda_std::{Float, Global, GlobalMut, bf16, dependent_launch, entries, f16, thread, vec};

/// Up to so many blocks compute places before they wait for the kernels before, and leave what they store in the second-level cache. Measured on an H200.
const FEW_BLOCKS: u32 = 512;

/// `query`, `key`: `[tokens, heads, ..]` by strides, rotated in the `rot_dim` elements from `offset` on; `angles`:
/// `[max_positions, rot_dim]`, dense. Grid: (tokens, heads of both, chunks); block: (chunks, heads, tokens).
#[inline(always)]
pub unsafe fn rotary<T: Float, const N: usize, const H: usize, const INTERLEAVED: bool>(
    query: *mut T,
    key: *mut T,
    positions: *const u8,
    angles: *const u8,
    status: *mut u32,
    query_token_stride: usize,
    query_head_stride: usize,
    key_token_stride: usize,
    key_head_stride: usize,
    max_positions: usize,
    tokens: u32,
    query_heads: u32,
    key_heads: u32,
    offset: u32,
    rot_dim: u32,
    flags: u32,
) {
    let (tx, ty, tz) = (thread::thread_idx_x(), thread::thread_idx_y(), thread::thread_idx_z());
    let (nx, ny, nz) = (thread::block_dim_x(), thread::block_dim_y(), thread::block_dim_z());
    let part = thread::block_idx_z() * nx + tx;
    let head = thread::block_idx_y() * ny + ty;
    let token = thread::block_idx_x() * nz + tz;
    let half = rot_dim / 2;
    let parts = half.div_ceil(N as u32);
    let few = thread::grid_dim_x() * thread::grid_dim_y() * thread::grid_dim_z() <= FEW_BLOCKS;
    let idle = token >= tokens || head >= query_heads + key_heads || part >= parts;
    if idle || !few {
        dependent_launch::begin();
    }
    if idle {
        return;
    }
    let of_query = head < query_heads;
    let (base, token_stride, head_stride) = if of_query {
        (query, query_token_stride, query_head_stride)
    } else {
        (key, key_token_stride, key_head_stride)
    };
    let head_of_its_own = if of_query { head } else { head - query_heads };
    let start = token as usize * token_stride + head_of_its_own as usize * head_stride + offset as usize;
    let first = start + part as usize * N;
    let [at, pair_at] = begin(few, [first, first + half as usize]);

    let angles_aligned = rotation::aligned::<T, N>(angles, rot_dim, flags);
    let whole = half.is_multiple_of(N as u32)
        && chunk::aligned::<T, N>(base as usize, token_stride | head_stride | offset as usize)
        && angles_aligned;

    if whole {
        let (x, source) = (GlobalMut::new(base), Global::new(base.cast_const()));
        let a: [T; N] = chunk::load(source, at);
        let b: [T; N] = chunk::load(source, pair_at);
        let position = operand::integer(positions, token, flags & POSITIONS_I64 != 0);
        let known = (position as u64) < max_positions as u64;
        operand::count(status, !known && position != -1 && head == 0 && part == 0);
        if known {
            let row = position as usize * rot_dim as usize;
            let angles = Angles::<N>::load::<T, H, INTERLEAVED>(angles, row, half, part, flags);
            let (a, b) = angles.rotate::<H, INTERLEAVED>(vec::to_f32(a), vec::to_f32(b));
            // What is little had better stay in the second-level cache.
            if few {
                chunk::store::<T, N>(x, at, vec::from_f32(a));
                chunk::store::<T, N>(x, pair_at, vec::from_f32(b));
            } else {
                chunk::store_streaming::<T, N>(x, at, vec::from_f32(a));
                chunk::store_streaming::<T, N>(x, pair_at, vec::from_f32(b));
            }
        }
    } else {
        let position = operand::integer(positions, token, flags & POSITIONS_I64 != 0);
        let known = (position as u64) < max_positions as u64;
        operand::count(status, !known && position != -1 && head == 0 && part == 0);
        if !known {
            return;
        }
        let row = position as usize * rot_dim as usize;
        let sign = if flags & INVERSE != 0 { -1.0 } else { 1.0 };
        let x = GlobalMut::new(base).offset(start);
        let mut pair = part;
        while pair < half {
            let (i, j) = if INTERLEAVED { (2 * pair, 2 * pair + 1) } else { (pair, half + pair) };
            let cos = angle_part::<T>(angles, row + pair as usize, flags);
            let sin = sign * angle_part::<T>(angles, row + half as usize + pair as usize, flags);
            let (a, b) = turn(x.get(i).to_f32(), x.get(j).to_f32(), cos, sin);
            x.set(i, T::from_f32(a));
            x.set(j, T::from_f32(b));
            pair += parts;
        }
    }
}

entries! {
    /// See [`rotary`] and the flags in [`rotation`](crate::rope::rotation). `positions`: `[tokens]` of `i32` or `i64`;
    /// `key` is null if `key_heads` is 0; `status`, counted up, may be null.
    pub struct Args<T>(
        query: *mut T,
        key: *mut T,
        positions: *const u8,
        angles: *const u8,
        status: *mut u32,
        query_token_stride: usize,
        query_head_stride: usize,
        key_token_stride: usize,
        key_head_stride: usize,
        max_positions: usize,
        tokens: u32,
        query_heads: u32,
        key_heads: u32,
        offset: u32,
        rot_dim: u32,
        flags: u32
    );
    rotary_neox_f32 { type T = f32; } [512] => rotary::<T, 4, 2, false>;
    rotary_neox_f16 { type T = f16; } [512] => rotary::<T, 8, 4, false>;
    rotary_neox_bf16 { type T = bf16; } [512] => rotary::<T, 8, 4, false>;
    rotary_gptj_f32 { type T = f32; } [512] => rotary::<T, 4, 2, true>;
    rotary_gptj_f16 { type T = f16; } [512] => rotary::<T, 8, 4, true>;
    rotary_gptj_bf16 { type T = bf16; } [512] => rotary::<T, 8, 4, true>;
}
