//! Normalises the heads of queries and keys, and rotates them, in place.
//!
//! `y = x / sqrt(mean(x^2) + eps) * (weight + weight_offset)` over a head, then the [rotation](super::rotation) of its
//! rotated part: all in f32 and registers, with one rounding at the end.
//!
//! A head belongs to a group of 2^n lanes of a warp, block (lanes, heads), grid (tokens, heads). A lane holds `ITEMS`
//! pairs of chunks of `N` elements: the two that turn together, or two that do not turn. `N` is 16 bytes and `ITEMS` 1
//! where everything is aligned and the head fits into 32 lanes; otherwise `N` is one element and `ITEMS` 8. Most models' heads have a kernel of their own
//! ([`qk_norm_rotary_whole`](super::qk_norm_rotary_whole)).

use crate::chunk;
use crate::operand;
use crate::rope::qk_norm_rotary_whole::qk_norm_rotary_whole;
use crate::rope::rotation::{Angles, POSITIONS_I64};
use crate::row::{packed, zero};
use cuda_std::{Float, Global, GlobalMut, bf16, dependent_launch, entries, f16, float, thread, vec, warp};

/// Pairs of chunks that a lane of the narrow kernels holds.
pub const NARROW_ITEMS: u32 = 8;

/// Where a pair of chunks lies in a head.
#[derive(Clone, Copy)]
struct Pair {
    first: u32,
    second: u32,
    turns: bool,
    has_first: bool,
    has_second: bool,
}

impl Pair {
    /// The pair `i` of a head: first those that turn, then the chunks before and behind the rotated part, two by two.
    #[inline(always)]
    fn new<const N: usize, const INTERLEAVED: bool>(i: u32, head_dim: u32, offset: u32, rot_dim: u32) -> Self {
        let n = N as u32;
        let half = rot_dim / 2;
        if i < half / n {
            // With whole chunks both pairings read the same places; see `rotation`.
            let (first, second) = if INTERLEAVED && N == 1 { (2 * i, 2 * i + 1) } else { (i * n, half + i * n) };
            return Self {
                first: offset + first,
                second: offset + second,
                turns: true,
                has_first: true,
                has_second: true,
            };
        }
        let chunk = 2 * (i - half / n);
        let chunks = (head_dim - rot_dim) / n;
        let place = |c: u32| if c * n < offset { c * n } else { c * n + rot_dim };
        Self {
            first: place(chunk),
            second: place(chunk + 1),
            turns: false,
            has_first: chunk < chunks,
            has_second: chunk + 1 < chunks,
        }
    }
}

/// As for [`rotary`](super::rotary::rotary), with heads of `head_dim` elements, and `query_weight`, `key_weight`:
/// `[head_dim]` or null for ones. `H` is `N / 2`, or 1 where `N` is.
#[inline(always)]
pub unsafe fn qk_norm_rotary<T: Float, const N: usize, const H: usize, const ITEMS: usize, const INTERLEAVED: bool>(
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
    offset: u32,
    rot_dim: u32,
    flags: u32,
    eps: f32,
    weight_offset: f32,
) {
    dependent_launch::begin();
    let (lane, lanes) = (thread::thread_idx_x(), thread::block_dim_x());
    let token = thread::block_idx_x();
    let slot = thread::block_idx_y() * thread::block_dim_y() + thread::thread_idx_y();
    let heads = query_heads + key_heads;
    // Lanes without a head stay for the shuffles, with zeroes: another one's data is being overwritten.
    let mine = slot < heads;
    let head = if mine { slot } else { heads - 1 };
    let of_query = head < query_heads;
    let (base, weight, token_stride, head_stride) = if of_query {
        (query, query_weight, query_token_stride, query_head_stride)
    } else {
        (key, key_weight, key_token_stride, key_head_stride)
    };
    let head_of_its_own = if of_query { head } else { head - query_heads };
    let x = GlobalMut::new(base).offset(token as usize * token_stride + head_of_its_own as usize * head_stride);
    let source = Global::new(x.ptr(0u32).cast_const());

    // All that is read is on its way before any of it is waited for: the position first, since the angles need it.
    let position = operand::integer(positions, token, flags & POSITIONS_I64 != 0);
    let pair = |it: usize| Pair::new::<N, INTERLEAVED>(lane + it as u32 * lanes, head_dim, offset, rot_dim);
    let (zeros, ones) = ([zero(); N], [T::from_f32(1.0); N]);
    let (mut values, mut factors) = ([[zeros; 2]; ITEMS], [[ones; 2]; ITEMS]);
    let mut it = 0;
    while it < ITEMS {
        let p = pair(it);
        if mine && p.has_first {
            values[it][0] = chunk::load(source, p.first as usize);
        }
        if mine && p.has_second {
            values[it][1] = chunk::load(source, p.second as usize);
        }
        it += 1;
    }
    if !weight.is_null() {
        let weights = Global::new(weight);
        let mut it = 0;
        while it < ITEMS {
            let p = pair(it);
            if p.has_first {
                factors[it][0] = chunk::load(weights, p.first as usize);
            }
            if p.has_second {
                factors[it][1] = chunk::load(weights, p.second as usize);
            }
            it += 1;
        }
    }
    let known = (position as u64) < max_positions as u64;
    operand::count(status, !known && position != -1 && slot == 0 && lane == 0);
    let row = if known { position as usize * rot_dim as usize } else { 0 };
    let mut turns = [Angles::<N>::none(); ITEMS];
    let mut it = 0;
    while it < ITEMS {
        if known && pair(it).turns {
            turns[it] = Angles::load::<T, H, INTERLEAVED>(angles, row, rot_dim / 2, lane + it as u32 * lanes, flags);
        }
        it += 1;
    }

    let mut sum = 0.0;
    let mut it = 0;
    while it < ITEMS {
        let (a, b) = (vec::to_f32(values[it][0]), vec::to_f32(values[it][1]));
        let mut j = 0;
        while j < N {
            sum = float::fma(a[j], a[j], sum);
            sum = float::fma(b[j], b[j], sum);
            j += 1;
        }
        it += 1;
    }
    let mut mask = lanes / 2;
    while mask > 0 {
        sum += warp::shfl_xor(sum, mask);
        mask /= 2;
    }
    let scale = float::rsqrt(sum / head_dim as f32 + eps);
    if !known || !mine {
        return;
    }

    let mut it = 0;
    while it < ITEMS {
        let p = pair(it);
        let [mut a, mut b] = values[it].map(|x| vec::to_f32(if N > 1 { packed::<T, N, true>(x) } else { x }));
        let [u, w] = factors[it].map(vec::to_f32);
        let mut j = 0;
        while j < N {
            a[j] *= scale * (u[j] + weight_offset);
            b[j] *= scale * (w[j] + weight_offset);
            j += 1;
        }
        if p.turns {
            (a, b) = turns[it].rotate::<H, INTERLEAVED>(a, b);
        }
        if p.has_first {
            chunk::store::<T, N>(x, p.first as usize, vec::from_f32(a));
        }
        if p.has_second {
            chunk::store::<T, N>(x, p.second as usize, vec::from_f32(b));
        }
        it += 1;
    }
}

entries! {
    /// See [`qk_norm_rotary`]. `key` is null if `key_heads` is 0; weights may be null; `status`, counted up, may be null.
    pub struct Args<T>(
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
        offset: u32,
        rot_dim: u32,
        flags: u32,
        eps: f32,
        weight_offset: f32
    );
    qk_norm_rotary_neox_f32 { type T = f32; } [512, 2] => qk_norm_rotary::<T, 4, 2, 1, false>;
    qk_norm_rotary_neox_f16 { type T = f16; } [512, 2] => qk_norm_rotary::<T, 8, 4, 1, false>;
    qk_norm_rotary_neox_bf16 { type T = bf16; } [512, 2] => qk_norm_rotary::<T, 8, 4, 1, false>;
    qk_norm_rotary_gptj_f32 { type T = f32; } [512, 2] => qk_norm_rotary::<T, 4, 2, 1, true>;
    qk_norm_rotary_gptj_f16 { type T = f16; } [512, 2] => qk_norm_rotary::<T, 8, 4, 1, true>;
    qk_norm_rotary_gptj_bf16 { type T = bf16; } [512, 2] => qk_norm_rotary::<T, 8, 4, 1, true>;
    qk_norm_rotary_whole_neox_f32 { type T = f32; } [256, 4] => qk_norm_rotary_whole::<T, 4, 2, false>;
    qk_norm_rotary_whole_neox_f16 { type T = f16; } [256, 4] => qk_norm_rotary_whole::<T, 8, 4, false>;
    qk_norm_rotary_whole_neox_bf16 { type T = bf16; } [256, 4] => qk_norm_rotary_whole::<T, 8, 4, false>;
    qk_norm_rotary_whole_gptj_f32 { type T = f32; } [256, 4] => qk_norm_rotary_whole::<T, 4, 2, true>;
    qk_norm_rotary_whole_gptj_f16 { type T = f16; } [256, 4] => qk_norm_rotary_whole::<T, 8, 4, true>;
    qk_norm_rotary_whole_gptj_bf16 { type T = bf16; } [256, 4] => qk_norm_rotary_whole::<T, 8, 4, true>;
    qk_norm_rotary_narrow_neox_f32 { type T = f32; } [512] => qk_norm_rotary::<T, 1, 1, 8, false>;
    qk_norm_rotary_narrow_neox_f16 { type T = f16; } [512] => qk_norm_rotary::<T, 1, 1, 8, false>;
    qk_norm_rotary_narrow_neox_bf16 { type T = bf16; } [512] => qk_norm_rotary::<T, 1, 1, 8, false>;
    qk_norm_rotary_narrow_gptj_f32 { type T = f32; } [512] => qk_norm_rotary::<T, 1, 1, 8, true>;
    qk_norm_rotary_narrow_gptj_f16 { type T = f16; } [512] => qk_norm_rotary::<T, 1, 1, 8, true>;
    qk_norm_rotary_narrow_gptj_bf16 { type T = bf16; } [512] => qk_norm_rotary::<T, 1, 1, 8, true>;
}
