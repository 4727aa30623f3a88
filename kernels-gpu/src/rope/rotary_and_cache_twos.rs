//! [`rotary_and_cache`](super::rotary_and_cache) with two heads a thread, for large launches.
//!
//! Position, angles and slot serve twice the bytes, twice as many of which are on their way, and there are half as many blocks to start. The heads of a thread
//! are half of all heads apart, so that neighbouring threads still take neighbouring memory. One text for one and two heads was tried: ptxas makes 4 to 15 % less of it
//! for one (docs/experiments/elementwise.md). What makes the same code is in [`chunk_pairs`](super::chunk_pairs).

use crate::chunk;
use crate::kv_cache::layout::{PageLayout, split_slot, store};
use crate::kv_cache::{CacheElement, StoreAs};
use crate::operand;
use crate::rope::chunk_pairs::{
    FEW_BLOCKS, INTERLEAVED, Rotated, SCALE_PER_HEAD, SLOTS_I64, Share, begin, chunks, has_place, inverse, pairs,
    quantised, split, store_pair, store_singly, turn_and_store_singly, turn_singly, turning,
};
use crate::rope::rotation::{self, Angles, POSITIONS_I64};
use cuda_std::{Float, Global, GlobalMut, dependent_launch, thread, vec};

/// Heads of a thread.
pub const HEADS: usize = 2;

/// Chunks of some heads, turned by the angles that they share.
#[inline(always)]
fn turned<const N: usize, const H: usize, const INTERLEAVED: bool>(
    angles: Angles<N>,
    mut c: [[f32; N]; HEADS],
    mut d: [[f32; N]; HEADS],
) -> ([[f32; N]; HEADS], [[f32; N]; HEADS]) {
    let mut h = 0;
    while h < HEADS {
        (c[h], d[h]) = angles.rotate::<H, INTERLEAVED>(c[h], d[h]);
        h += 1;
    }
    (c, d)
}

/// The numbers of some heads' chunks.
#[inline(always)]
fn widened<T: Float, const N: usize>(chunks: [[T; N]; HEADS]) -> [[f32; N]; HEADS] {
    let mut wide = [[0.0; N]; HEADS];
    let mut h = 0;
    while h < HEADS {
        wide[h] = vec::to_f32(chunks[h]);
        h += 1;
    }
    wide
}

/// Arguments, blocks and grid as for [`rotary_and_cache`](super::rotary_and_cache::rotary_and_cache), with half of all heads, whose numbers are even, to share
/// among threads.
#[inline(always)]
pub unsafe fn rotary_and_cache_twos<
    T: Float + StoreAs<S>,
    S: CacheElement,
    K: PageLayout,
    V: PageLayout,
    const N: usize,
    const H: usize,
    const TOKENS_FIRST: bool,
>(
    query: *mut T,
    key: *const T,
    value: *const T,
    key_cache: *mut S,
    value_cache: *mut S,
    positions: *const u8,
    angles: *const u8,
    slots: *const u8,
    key_scale: *const f32,
    value_scale: *const f32,
    status: *mut u32,
    query_token_stride: usize,
    query_head_stride: usize,
    key_token_stride: usize,
    key_head_stride: usize,
    value_token_stride: usize,
    value_head_stride: usize,
    key_page_block_stride: usize,
    key_page_head_stride: usize,
    key_page_token_stride: usize,
    value_page_block_stride: usize,
    value_page_head_stride: usize,
    value_page_token_stride: usize,
    max_positions: usize,
    slot_count: usize,
    block_size: u32,
    tokens: u32,
    query_heads: u32,
    kv_heads: u32,
    head_dim: u32,
    offset: u32,
    rot_dim: u32,
    flags: u32,
) {
    let (nx, ny) = (thread::block_dim_x().trailing_zeros(), thread::block_dim_y().trailing_zeros());
    let (threads, thread) = (nx + ny, (thread::thread_idx_y() << nx) + thread::thread_idx_x());
    let (parts, turning) = (pairs(head_dim, rot_dim, N as u32), turning(rot_dim, N as u32));
    // A thread's heads are so far apart.
    let (query_step, kv_step) = (query_heads / HEADS as u32, kv_heads / HEADS as u32);
    let kv_items = 2 * kv_step * parts;
    let kv = Share::new(kv_items, threads, nx, TOKENS_FIRST);
    let group = thread::block_idx_z() * thread::grid_dim_y() + thread::block_idx_y();
    let of_queries = thread::block_idx_x() >= kv.blocks;
    let items = if of_queries { query_step * turning } else { kv_items };
    let (in_group, item) = if of_queries {
        Share::new(items, threads, nx, false).of(thread::block_idx_x() - kv.blocks, thread, threads, false)
    } else {
        kv.of(thread::block_idx_x(), thread, threads, TOKENS_FIRST)
    };
    let few = thread::grid_dim_x() * thread::grid_dim_y() <= FEW_BLOCKS;
    let token = (group << nx) + in_group;
    let idle = in_group >> nx != 0 || token >= tokens || item >= items;
    if idle || !few {
        dependent_launch::begin();
    }
    if idle {
        return;
    }
    let (half, n) = (rot_dim / 2, N as u32);
    let angles_aligned = rotation::aligned::<T, N>(angles, rot_dim, flags);

    if of_queries {
        let (head, part) = split(item, turning);
        let start = token as usize * query_token_stride + head as usize * query_head_stride + offset as usize;
        let whole = (half | offset).is_multiple_of(n)
            && chunk::aligned::<T, N>(query as usize, query_token_stride | query_head_stride)
            && angles_aligned;
        let (at, pair_at) = (start + (part * n) as usize, start + (half + part * n) as usize);
        let [at, pair_at] = begin(few, [at, pair_at]);
        let x = GlobalMut::new(query);
        let source = Global::new(query.cast_const());
        let step = query_step as usize * query_head_stride;
        let (mut a, mut b) = ([[T::from_f32(0.0); N]; HEADS], [[T::from_f32(0.0); N]; HEADS]);
        if whole {
            let mut h = 0;
            while h < HEADS {
                a[h] = chunk::load(source, at + h * step);
                b[h] = chunk::load(source, pair_at + h * step);
                h += 1;
            }
        }
        let position = operand::integer(positions, token, flags & POSITIONS_I64 != 0);
        if (position as u64) >= max_positions as u64 {
            return;
        }
        let row = position as usize * rot_dim as usize;
        if whole {
            let (c, d) = if flags & INTERLEAVED != 0 {
                let angles = Angles::<N>::load::<T, H, true>(angles, row, half, part, flags);
                turned::<N, H, true>(angles, widened(a), widened(b))
            } else {
                let angles = Angles::<N>::load::<T, H, false>(angles, row, half, part, flags);
                turned::<N, H, false>(angles, widened(a), widened(b))
            };
            let mut h = 0;
            while h < HEADS {
                chunk::store::<T, N>(x, at + h * step, vec::from_f32(c[h]));
                chunk::store::<T, N>(x, pair_at + h * step, vec::from_f32(d[h]));
                h += 1;
            }
            return;
        }
        let mut h = 0;
        while h < HEADS {
            let (x, source) = (x.offset(start + h * step), source.offset(start + h * step));
            turn_singly(x, source, angles, row, half, part, turning, flags);
            h += 1;
        }
        return;
    }

    let (head, part) = split(item, parts);
    let is_key = head < kv_step;
    let (base, token_stride, head_stride, own) = if is_key {
        (key, key_token_stride, key_head_stride, head)
    } else {
        (value, value_token_stride, value_head_stride, head - kv_step)
    };
    let step = kv_step as usize * head_stride;
    let start = token as usize * token_stride + own as usize * head_stride;
    let (key_pages, value_pages) = (
        key_page_block_stride | key_page_head_stride | key_page_token_stride,
        value_page_block_stride | value_page_head_stride | value_page_token_stride,
    );
    let whole = (half | offset | head_dim).is_multiple_of(n)
        && chunk::aligned::<T, N>(base as usize, token_stride | head_stride)
        && angles_aligned
        && (K::RUN < N || chunk::aligned::<S, N>(key_cache as usize, key_pages))
        && (V::RUN < N || chunk::aligned::<S, N>(value_cache as usize, value_pages));

    // Whole chunks: where they are, and their data under way before anything is asked.
    let turns = part < half / n && is_key;
    let (first, second, has_second) = chunks::<N>(is_key, turns, part, head_dim, offset, rot_dim);
    let [first_at, second_at] = begin(few, [start + first as usize, start + second as usize]);
    let (mut a, mut b) = ([[T::from_f32(0.0); N]; HEADS], [[T::from_f32(0.0); N]; HEADS]);
    if whole {
        let x = Global::new(base);
        let mut h = 0;
        while h < HEADS {
            a[h] = chunk::load(x, first_at + h * step);
            if has_second {
                b[h] = chunk::load(x, second_at + h * step);
            }
            h += 1;
        }
    }

    let mut scale = [1.0; HEADS];
    if T::SCALED {
        let scales = Global::new(if is_key { key_scale } else { value_scale });
        let mut h = 0;
        while h < HEADS {
            scale[h] = scales.get(if flags & SCALE_PER_HEAD != 0 { own + h as u32 * kv_step } else { 0 });
            h += 1;
        }
    }
    let position = operand::integer(positions, token, flags & POSITIONS_I64 != 0);
    let slot = operand::integer(slots, token, flags & SLOTS_I64 != 0);
    if !has_place(position, max_positions, slot, slot_count, status, item == 0) {
        return;
    }
    let row = position as usize * rot_dim as usize;

    let (key_cache, value_cache) = (GlobalMut::new(key_cache), GlobalMut::new(value_cache));
    let key_layout = K::new(key_page_block_stride, key_page_head_stride, key_page_token_stride, block_size);
    let value_layout = V::new(value_page_block_stride, value_page_head_stride, value_page_token_stride, block_size);
    let (block, at) = split_slot(slot as u64, block_size);
    // The page of one of the thread's heads, and what its numbers are multiplied by.
    let key_page = |h: usize| key_cache.offset(key_layout.page(block, own + h as u32 * kv_step));
    let value_page = |h: usize| value_cache.offset(value_layout.page(block, own + h as u32 * kv_step));
    let inverse_scale = |h: usize| inverse::<T, S>(scale[h]);

    if whole {
        if turns {
            let (c, d) = if flags & INTERLEAVED != 0 {
                let angles = Angles::<N>::load::<T, H, true>(angles, row, half, part, flags);
                turned::<N, H, true>(angles, widened(a), widened(b))
            } else {
                let angles = Angles::<N>::load::<T, H, false>(angles, row, half, part, flags);
                turned::<N, H, false>(angles, widened(a), widened(b))
            };
            let mut h = 0;
            while h < HEADS {
                let (page, inverse_scale) = (key_page(h), inverse_scale(h));
                store::<S, K, N>(page, key_layout, at, first, quantised(c[h], inverse_scale));
                store::<S, K, N>(page, key_layout, at, second, quantised(d[h], inverse_scale));
                h += 1;
            }
        } else if is_key {
            let mut h = 0;
            while h < HEADS {
                let (page, inverse_scale) = (key_page(h), inverse_scale(h));
                store_pair(page, key_layout, at, first, second, has_second, a[h], b[h], inverse_scale);
                h += 1;
            }
        } else if first < head_dim {
            let mut h = 0;
            while h < HEADS {
                let (page, inverse_scale) = (value_page(h), inverse_scale(h));
                store_pair(page, value_layout, at, first, second, has_second, a[h], b[h], inverse_scale);
                h += 1;
            }
        }
        return;
    }

    let mut h = 0;
    while h < HEADS {
        let (x, inverse_scale) = (Global::new(base).offset(start + h * step), inverse_scale(h));
        if !is_key {
            let page = value_page(h);
            store_singly(x, page, value_layout, at, head_dim, part, parts, inverse_scale);
        } else {
            let page = key_page(h);
            let head = Rotated { head_dim, offset, rot_dim };
            turn_and_store_singly(x, page, key_layout, at, head, angles, row, part, parts, flags, inverse_scale);
        }
        h += 1;
    }
}
