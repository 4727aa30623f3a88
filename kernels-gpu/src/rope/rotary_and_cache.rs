//! Rotates queries in place, and writes rotated keys and values to their slots in the paged cache: one launch for
//! [`rotary`](super::rotary) and [`reshape_and_cache`](crate::kv_cache::reshape_and_cache), one read and one write of
//! each element.
//!
//! Queries have blocks of their own: only what turns is touched, and neighbouring threads take neighbouring memory of one token, since
//! that is how queries are read and written. Keys and values follow the order of the layout of the cache, as in `reshape_and_cache`: where neighbouring
//! tokens are neighbours, so are the threads. A thread has a pair of chunks of a head: the two that turn together, as in
//! [`qk_norm_rotary`](super::qk_norm_rotary), or two that do not turn. A launch is cut into groups of tokens, with the blocks for their queries and those for
//! their keys and values next to each other ([`Share`]). What is not aligned goes element by element.

use crate::chunk;
use crate::kv_cache::layout::{Flat, PageLayout, XSplitKey, XSplitValue, split_slot, store};
use crate::kv_cache::{CacheElement, StoreAs};
use crate::operand;
use crate::rope::chunk_pairs::{
    FEW_BLOCKS, INTERLEAVED, Rotated, SCALE_PER_HEAD, SLOTS_I64, Share, begin, chunks, has_place, inverse, pairs,
    quantised, split, store_pair, store_singly, turn_and_store_singly, turn_singly, turning,
};
use crate::rope::rotary_and_cache_twos::rotary_and_cache_twos;
use crate::rope::rotation::{self, Angles, POSITIONS_I64};
use cuda_std::{E4M3, E5M2, Float, Global, GlobalMut, bf16, dependent_launch, entries, f16, thread, vec};

/// Arguments as for [`rotary`](super::rotary::rotary) and
/// [`reshape_and_cache`](crate::kv_cache::reshape_and_cache::reshape_and_cache); keys and values have `kv_heads` heads.
/// Blocks are `(g, n)` threads, both powers of two, for `g` tokens; the grid is (blocks of a group's keys and values, then of its queries; groups; groups).
#[inline(always)]
pub unsafe fn rotary_and_cache<
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
    let kv_items = 2 * kv_heads * parts;
    let kv = Share::new(kv_items, threads, nx, TOKENS_FIRST);
    let group = thread::block_idx_z() * thread::grid_dim_y() + thread::block_idx_y();
    let of_queries = thread::block_idx_x() >= kv.blocks;
    let items = if of_queries { query_heads * turning } else { kv_items };
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
        let (mut a, mut b) = ([T::from_f32(0.0); N], [T::from_f32(0.0); N]);
        if whole {
            a = chunk::load(source, at);
            b = chunk::load(source, pair_at);
        }
        let position = operand::integer(positions, token, flags & POSITIONS_I64 != 0);
        if (position as u64) >= max_positions as u64 {
            return;
        }
        let row = position as usize * rot_dim as usize;
        if whole {
            let (c, d) = (vec::to_f32(a), vec::to_f32(b));
            let (c, d) = if flags & INTERLEAVED != 0 {
                Angles::<N>::load::<T, H, true>(angles, row, half, part, flags).rotate::<H, true>(c, d)
            } else {
                Angles::<N>::load::<T, H, false>(angles, row, half, part, flags).rotate::<H, false>(c, d)
            };
            chunk::store::<T, N>(x, at, vec::from_f32(c));
            chunk::store::<T, N>(x, pair_at, vec::from_f32(d));
            return;
        }
        turn_singly(x.offset(start), source.offset(start), angles, row, half, part, turning, flags);
        return;
    }

    let (head, part) = split(item, parts);
    let is_key = head < kv_heads;
    let (base, token_stride, head_stride, own) = if is_key {
        (key, key_token_stride, key_head_stride, head)
    } else {
        (value, value_token_stride, value_head_stride, head - kv_heads)
    };
    let start = token as usize * token_stride + own as usize * head_stride;
    // Single elements of a run are aligned anyway.
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
    let (mut a, mut b) = ([T::from_f32(0.0); N], [T::from_f32(0.0); N]);
    if whole {
        let x = Global::new(base);
        a = chunk::load(x, first_at);
        if has_second {
            b = chunk::load(x, second_at);
        }
    }
    let x = Global::new(base).offset(start);

    let mut scale = 1.0;
    if T::SCALED {
        let scales = if is_key { key_scale } else { value_scale };
        scale = Global::new(scales).get(if flags & SCALE_PER_HEAD != 0 { own } else { 0 });
    }
    let position = operand::integer(positions, token, flags & POSITIONS_I64 != 0);
    let slot = operand::integer(slots, token, flags & SLOTS_I64 != 0);
    if !has_place(position, max_positions, slot, slot_count, status, item == 0) {
        return;
    }
    let row = position as usize * rot_dim as usize;

    let inverse_scale = inverse::<T, S>(scale);
    let (key_cache, value_cache) = (GlobalMut::new(key_cache), GlobalMut::new(value_cache));
    let key_layout = K::new(key_page_block_stride, key_page_head_stride, key_page_token_stride, block_size);
    let value_layout = V::new(value_page_block_stride, value_page_head_stride, value_page_token_stride, block_size);
    let (block, at) = split_slot(slot as u64, block_size);

    if whole {
        if turns {
            let (c, d) = (vec::to_f32(a), vec::to_f32(b));
            let (c, d) = if flags & INTERLEAVED != 0 {
                Angles::<N>::load::<T, H, true>(angles, row, half, part, flags).rotate::<H, true>(c, d)
            } else {
                Angles::<N>::load::<T, H, false>(angles, row, half, part, flags).rotate::<H, false>(c, d)
            };
            let page = key_cache.offset(key_layout.page(block, own));
            store::<S, K, N>(page, key_layout, at, first, quantised(c, inverse_scale));
            store::<S, K, N>(page, key_layout, at, second, quantised(d, inverse_scale));
        } else if is_key {
            let page = key_cache.offset(key_layout.page(block, own));
            store_pair(page, key_layout, at, first, second, has_second, a, b, inverse_scale);
        } else if first < head_dim {
            let page = value_cache.offset(value_layout.page(block, own));
            store_pair(page, value_layout, at, first, second, has_second, a, b, inverse_scale);
        }
        return;
    }

    if !is_key {
        let page = value_cache.offset(value_layout.page(block, own));
        store_singly(x, page, value_layout, at, head_dim, part, parts, inverse_scale);
        return;
    }
    let page = key_cache.offset(key_layout.page(block, own));
    let head = Rotated { head_dim, offset, rot_dim };
    turn_and_store_singly(x, page, key_layout, at, head, angles, row, part, parts, flags, inverse_scale);
}

entries! {
    /// See [`rotary_and_cache`]; flags are those of [`rotation`](crate::rope::rotation) and [`chunk_pairs`](crate::rope::chunk_pairs).
    pub struct Args<T, S>(
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
        flags: u32
    );
    rotary_and_cache_flat_f32_f32 { type T = f32; type S = f32; } [256]
        => rotary_and_cache::<T, S, Flat, Flat, 4, 2, false>;
    rotary_and_cache_flat_f32_e4m3 { type T = f32; type S = E4M3; } [256]
        => rotary_and_cache::<T, S, Flat, Flat, 4, 2, false>;
    rotary_and_cache_flat_f32_e5m2 { type T = f32; type S = E5M2; } [256]
        => rotary_and_cache::<T, S, Flat, Flat, 4, 2, false>;
    rotary_and_cache_flat_f32_i8 { type T = f32; type S = i8; } [256]
        => rotary_and_cache::<T, S, Flat, Flat, 4, 2, false>;
    rotary_and_cache_flat_f16_f16 { type T = f16; type S = f16; } [256]
        => rotary_and_cache::<T, S, Flat, Flat, 8, 4, false>;
    rotary_and_cache_flat_f16_e4m3 { type T = f16; type S = E4M3; } [256]
        => rotary_and_cache::<T, S, Flat, Flat, 8, 4, false>;
    rotary_and_cache_flat_f16_e5m2 { type T = f16; type S = E5M2; } [256]
        => rotary_and_cache::<T, S, Flat, Flat, 8, 4, false>;
    rotary_and_cache_flat_f16_i8 { type T = f16; type S = i8; } [256]
        => rotary_and_cache::<T, S, Flat, Flat, 8, 4, false>;
    rotary_and_cache_flat_bf16_bf16 { type T = bf16; type S = bf16; } [256]
        => rotary_and_cache::<T, S, Flat, Flat, 8, 4, false>;
    rotary_and_cache_flat_bf16_e4m3 { type T = bf16; type S = E4M3; } [256]
        => rotary_and_cache::<T, S, Flat, Flat, 8, 4, false>;
    rotary_and_cache_flat_bf16_e5m2 { type T = bf16; type S = E5M2; } [256]
        => rotary_and_cache::<T, S, Flat, Flat, 8, 4, false>;
    rotary_and_cache_flat_bf16_i8 { type T = bf16; type S = i8; } [256]
        => rotary_and_cache::<T, S, Flat, Flat, 8, 4, false>;
    rotary_and_cache_flat_f16_f16_twos { type T = f16; type S = f16; } [256]
        => rotary_and_cache_twos::<T, S, Flat, Flat, 8, 4, false>;
    rotary_and_cache_flat_f16_e4m3_twos { type T = f16; type S = E4M3; } [256]
        => rotary_and_cache_twos::<T, S, Flat, Flat, 8, 4, false>;
    rotary_and_cache_flat_f16_e5m2_twos { type T = f16; type S = E5M2; } [256]
        => rotary_and_cache_twos::<T, S, Flat, Flat, 8, 4, false>;
    rotary_and_cache_flat_f16_i8_twos { type T = f16; type S = i8; } [256]
        => rotary_and_cache_twos::<T, S, Flat, Flat, 8, 4, false>;
    rotary_and_cache_flat_bf16_bf16_twos { type T = bf16; type S = bf16; } [256]
        => rotary_and_cache_twos::<T, S, Flat, Flat, 8, 4, false>;
    rotary_and_cache_flat_bf16_e4m3_twos { type T = bf16; type S = E4M3; } [256]
        => rotary_and_cache_twos::<T, S, Flat, Flat, 8, 4, false>;
    rotary_and_cache_flat_bf16_e5m2_twos { type T = bf16; type S = E5M2; } [256]
        => rotary_and_cache_twos::<T, S, Flat, Flat, 8, 4, false>;
    rotary_and_cache_flat_bf16_i8_twos { type T = bf16; type S = i8; } [256]
        => rotary_and_cache_twos::<T, S, Flat, Flat, 8, 4, false>;
    rotary_and_cache_xsplit_f32_f32 { type T = f32; type S = f32; } [256]
        => rotary_and_cache::<T, S, XSplitKey<4>, XSplitValue, 4, 2, true>;
    rotary_and_cache_xsplit_f32_e4m3 { type T = f32; type S = E4M3; } [256]
        => rotary_and_cache::<T, S, XSplitKey<16>, XSplitValue, 4, 2, true>;
    rotary_and_cache_xsplit_f32_e5m2 { type T = f32; type S = E5M2; } [256]
        => rotary_and_cache::<T, S, XSplitKey<16>, XSplitValue, 4, 2, true>;
    rotary_and_cache_xsplit_f32_i8 { type T = f32; type S = i8; } [256]
        => rotary_and_cache::<T, S, XSplitKey<16>, XSplitValue, 4, 2, true>;
    rotary_and_cache_xsplit_f16_f16 { type T = f16; type S = f16; } [256]
        => rotary_and_cache::<T, S, XSplitKey<8>, XSplitValue, 8, 4, true>;
    rotary_and_cache_xsplit_f16_e4m3 { type T = f16; type S = E4M3; } [256]
        => rotary_and_cache::<T, S, XSplitKey<16>, XSplitValue, 8, 4, true>;
    rotary_and_cache_xsplit_f16_e5m2 { type T = f16; type S = E5M2; } [256]
        => rotary_and_cache::<T, S, XSplitKey<16>, XSplitValue, 8, 4, true>;
    rotary_and_cache_xsplit_f16_i8 { type T = f16; type S = i8; } [256]
        => rotary_and_cache::<T, S, XSplitKey<16>, XSplitValue, 8, 4, true>;
    rotary_and_cache_xsplit_bf16_bf16 { type T = bf16; type S = bf16; } [256]
        => rotary_and_cache::<T, S, XSplitKey<8>, XSplitValue, 8, 4, true>;
    rotary_and_cache_xsplit_bf16_e4m3 { type T = bf16; type S = E4M3; } [256]
        => rotary_and_cache::<T, S, XSplitKey<16>, XSplitValue, 8, 4, true>;
    rotary_and_cache_xsplit_bf16_e5m2 { type T = bf16; type S = E5M2; } [256]
        => rotary_and_cache::<T, S, XSplitKey<16>, XSplitValue, 8, 4, true>;
    rotary_and_cache_xsplit_bf16_i8 { type T = bf16; type S = i8; } [256]
        => rotary_and_cache::<T, S, XSplitKey<16>, XSplitValue, 8, 4, true>;
    rotary_and_cache_xsplit_f16_f16_twos { type T = f16; type S = f16; } [256]
        => rotary_and_cache_twos::<T, S, XSplitKey<8>, XSplitValue, 8, 4, true>;
    rotary_and_cache_xsplit_f16_e4m3_twos { type T = f16; type S = E4M3; } [256]
        => rotary_and_cache_twos::<T, S, XSplitKey<16>, XSplitValue, 8, 4, true>;
    rotary_and_cache_xsplit_f16_e5m2_twos { type T = f16; type S = E5M2; } [256]
        => rotary_and_cache_twos::<T, S, XSplitKey<16>, XSplitValue, 8, 4, true>;
    rotary_and_cache_xsplit_f16_i8_twos { type T = f16; type S = i8; } [256]
        => rotary_and_cache_twos::<T, S, XSplitKey<16>, XSplitValue, 8, 4, true>;
    rotary_and_cache_xsplit_bf16_bf16_twos { type T = bf16; type S = bf16; } [256]
        => rotary_and_cache_twos::<T, S, XSplitKey<8>, XSplitValue, 8, 4, true>;
    rotary_and_cache_xsplit_bf16_e4m3_twos { type T = bf16; type S = E4M3; } [256]
        => rotary_and_cache_twos::<T, S, XSplitKey<16>, XSplitValue, 8, 4, true>;
    rotary_and_cache_xsplit_bf16_e5m2_twos { type T = bf16; type S = E5M2; } [256]
        => rotary_and_cache_twos::<T, S, XSplitKey<16>, XSplitValue, 8, 4, true>;
    rotary_and_cache_xsplit_bf16_i8_twos { type T = bf16; type S = i8; } [256]
        => rotary_and_cache_twos::<T, S, XSplitKey<16>, XSplitValue, 8, 4, true>;
}
