//! [`qk_norm_rotary`](super::qk_norm_rotary) of aligned heads that turn as a whole, with a power of two of pairs of chunks: most models' heads.
//!
//! Every lane has two chunks that turn together, so nothing is asked of them, and what is read goes to registers without branches: a fifth fewer instructions, which are
//! what the general kernel takes its time for, with few tokens (one after the other) as with many. The same bits as the general kernel's.

use crate::chunk;
use crate::operand;
use crate::rope::chunk_pairs::{FEW_BLOCKS, begin};
use crate::rope::rotation::{Angles, POSITIONS_I64};
use crate::row::{Words, unpacked, words};
use cuda_std::vec::B128;
use cuda_std::{Float, Global, GlobalMut, dependent_launch, float, thread, unroll, vec, warp};

/// As [`qk_norm_rotary`](super::qk_norm_rotary::qk_norm_rotary) with `rot_dim` = `head_dim` = `2 N` times the lanes of a head, which are a block's `x`; `offset` is 0.
#[inline(always)]
pub unsafe fn qk_norm_rotary_whole<T: Float, const N: usize, const H: usize, const INTERLEAVED: bool>(
    query: *mut T,
    key: *mut T,
    query_weight: *const T,
    key_weight: *const T,
    positions: *const u8,
    angles: *const u8,
    status: *mut u32,
    query_token_stride: usize,
    query_head_stride: usize,
    key_token_stride: usize,
    key_head_stride: usize,
    max_positions: usize,
    query_heads: u32,
    key_heads: u32,
    head_dim: u32,
    _offset: u32,
    _rot_dim: u32,
    flags: u32,
    eps: f32,
    weight_offset: f32,
) {
    let (lane, lanes) = (thread::thread_idx_x(), thread::block_dim_x());
    let token = thread::block_idx_x();
    let slot = thread::block_idx_y() * thread::block_dim_y() + thread::thread_idx_y();
    // Lanes without a head stay for the shuffles, with zeroes: another one's data is being overwritten.
    let mine = slot < query_heads + key_heads;
    let of_query = slot < query_heads;
    let (base, weight, token_stride, head_stride) = if of_query {
        (query, query_weight, query_token_stride, query_head_stride)
    } else {
        (key, key_weight, key_token_stride, key_head_stride)
    };
    let head = if of_query { slot } else { slot - query_heads };
    let (of_lane, half) = (lane as usize * N, head_dim as usize / 2);
    // Of lanes without a head any number, which is not used: where nothing follows, a stride may be one too.
    let to_head = (head as usize).wrapping_mul(head_stride);
    let first = (token as usize * token_stride).wrapping_add(to_head).wrapping_add(of_lane);
    let few = thread::grid_dim_x() * thread::grid_dim_y() <= FEW_BLOCKS;
    if !few {
        dependent_launch::begin();
    }
    let [first, of_lane] = begin(few, [first, of_lane]);
    let piece = |from: Global<T>, at: usize| -> Words {
        let B128(words) = from.get_as::<B128<u32, 4>>(at);
        words
    };

    // All that is read is on its way before any of it is waited for: the position first, since the angles need it.
    let position = operand::integer(positions, token, flags & POSITIONS_I64 != 0);
    let mut values = [[0; 4]; 2];
    if mine {
        let x = Global::new(base.cast_const());
        values = [piece(x, first), piece(x, first + half)];
    }
    let mut factors = [words([T::from_f32(1.0); N]).0; 2];
    if !weight.is_null() {
        let weights = Global::new(weight);
        factors = [piece(weights, of_lane), piece(weights, of_lane + half)];
    }
    let known = (position as u64) < max_positions as u64;
    operand::count(status, !known && position != -1 && slot == 0 && lane == 0);
    let mut turns = Angles::<N>::none();
    if known {
        let row = position as usize * head_dim as usize;
        turns = Angles::load::<T, H, INTERLEAVED>(angles, row, half as u32, lane, flags);
    }

    let mut sum = 0.0;
    let [a, b] = values.map(|words| vec::to_f32(unpacked::<T, N>(words)));
    unroll::<N>(|j| {
        sum = float::fma(a[j], a[j], sum);
        sum = float::fma(b[j], b[j], sum);
    });
    let mut mask = lanes / 2;
    while mask > 0 {
        sum += warp::shfl_xor(sum, mask);
        mask /= 2;
    }
    let scale = float::rsqrt(sum / head_dim as f32 + eps);
    if !known || !mine {
        return;
    }

    let [u, w] = factors.map(|words| vec::to_f32(unpacked::<T, N>(words)));
    let [mut a, mut b] = values.map(|words| vec::to_f32(unpacked::<T, N>(words)));
    unroll::<N>(|j| {
        a[j] *= scale * (u[j] + weight_offset);
        b[j] *= scale * (w[j] + weight_offset);
    });
    let (a, b) = turns.rotate::<H, INTERLEAVED>(a, b);
    let x = GlobalMut::new(base);
    // As in `rotary`; what is little had better stay.
    if few {
        chunk::store::<T, N>(x, first, vec::from_f32(a));
        chunk::store::<T, N>(x, first + half, vec::from_f32(b));
    } else {
        chunk::store_streaming::<T, N>(x, first, vec::from_f32(a));
        chunk::store_streaming::<T, N>(x, first + half, vec::from_f32(b));
    }
}
