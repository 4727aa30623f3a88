//! [`gather_cache`](super::gather_cache) of many tokens from an x-split cache of their own 16-bit type: by [tiles](super::tile).
//!
//! A warp has a tile of keys or of values, and is a block by itself. It finds its tokens, one for each lane, loads the pieces of a part of a page, all on their way at
//! once, and stores rows by way of shared memory. Of a part with few wanted tokens it loads all of the pages' pieces nevertheless.

use crate::kv_cache::gather_cache::{Place, find};
use crate::kv_cache::layout::{PageLayout, XSplitKey, XSplitValue};
use crate::kv_cache::tile::{self, CHUNKS, N, NOWHERE, OF_LANE, PIECES, PITCH, Places, TOKENS};
use crate::operand;
use cuda_std::vec::B128;
use cuda_std::{Element, Global, GlobalMut, Shared, dependent_launch, integer, thread, unroll, warp};

/// Arguments as for [`gather_cache`](super::gather_cache::gather_cache), with everything in whole chunks: base addresses are multiples of 16 bytes; strides, `head_dim` and
/// `block_size` of 8 elements. There are fewer than 2^32 - 1 blocks. Blocks are of 32 threads; the grid is (tiles of heads, keys before values; tokens in sixteens; sixteens).
#[inline(always)]
pub unsafe fn gather_cache_tiles<T: Element>(
    key: *mut T,
    value: *mut T,
    key_cache: *const T,
    value_cache: *const T,
    block_tables: *const i32,
    starts: *const i32,
    _key_scale: *const f32,
    _value_scale: *const f32,
    status: *mut u32,
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
    table_stride: usize,
    blocks: usize,
    block_size: u32,
    sequences: u32,
    table_len: u32,
    tokens: u32,
    heads: u32,
    head_dim: u32,
    _flags: u32,
) {
    const { assert!(size_of::<T>() == 2) };
    dependent_launch::begin();
    let (lane, unit) = (thread::thread_idx_x(), thread::block_idx_x());
    let tile = thread::block_idx_z() * thread::grid_dim_y() + thread::block_idx_y();
    let first_token = tile * TOKENS;
    if first_token >= tokens {
        return;
    }

    let (mut block, mut at, mut wrong) = (NOWHERE, 0, false);
    if first_token + lane < tokens {
        let token = first_token + lane;
        match find(token, starts, block_tables, table_stride, sequences, table_len, blocks, block_size) {
            Place::At(found, place) => (block, at) = (found as u32, place),
            Place::Nowhere => {}
            Place::Wrong => wrong = true,
        }
    }
    let places = Places::new(lane, block, at, block_size);
    let own = places.own(tile == 0);
    let is_own = own >> lane & 1 != 0;
    operand::count(status, wrong && is_own && unit == 0);
    let mut rest = warp::warp_vote_ballot(warp::FULL, is_own && block != NOWHERE);

    while rest != 0 {
        let part = places.part(rest);
        rest &= !part.lanes;

        // There is one part, mostly: what is the same for all of them is not worth registers.
        let [lane, unit] = [lane, unit].map(integer::opaque);
        let (low, high) = (lane % 16, lane / 16);
        let units = heads * tile::panels(head_dim);
        let is_key = unit < units;
        let own = if is_key { unit } else { unit - units };
        let (head, panel) = if units == heads {
            (own, 0)
        } else {
            (integer::div(own, tile::panels(head_dim)), integer::rem(own, tile::panels(head_dim)))
        };
        let (out, token_stride, head_stride, cache, page) = if is_key {
            let layout =
                XSplitKey::<8>::new(key_page_block_stride, key_page_head_stride, key_page_token_stride, block_size);
            (key, key_token_stride, key_head_stride, key_cache, layout.page(part.block, head))
        } else {
            let layout =
                XSplitValue::new(value_page_block_stride, value_page_head_stride, value_page_token_stride, block_size);
            (value, value_token_stride, value_head_stride, value_cache, layout.page(part.block, head))
        };
        let chunks = tile::chunks(head_dim, panel);
        let pieces = Shared::<B128<u32, 4>>::at(0, PIECES as usize);

        // Lanes without a chunk, or a second one, have others' pieces, which nobody wants.
        let (first, _) = tile::first_piece(is_key, if high < chunks { lane } else { low }, panel, part, block_size);
        let left = chunks.saturating_sub(high);
        let next = tile::next_piece(integer::opaque(block_size));
        let mut from = Global::new(cache).ptr(page + first);
        let mut data = [[0; 4]; OF_LANE];
        unroll::<OF_LANE>(|m| {
            let B128([a, b, c, d]) = Global::new(from).get_as::<B128<u32, 4>>(0u32);
            data[m] = [a, b, c, d];
            if 2 * (m as u32 + 1) < left {
                from = from.wrapping_add(next);
            }
        });
        let to = pieces.offset(high * PITCH + low);
        unroll::<OF_LANE>(|m| to.set(m as u32 * (2 * PITCH), B128(data[m])));
        warp::sync_warp(warp::FULL);

        let row = part.row(first_token, high * N);
        let wanted = if low < chunks { part.tokens >> (high * N) & 0xff } else { 0 };
        let column = head as usize * head_stride + ((panel * CHUNKS + low) * N) as usize;
        let mut to = GlobalMut::new(out).ptr(column.wrapping_add(row.wrapping_mul(token_stride)));
        let stride = integer::opaque_address(core::ptr::without_provenance::<u8>(token_stride)).addr();
        let pieces = pieces.offset(low * PITCH);
        if is_key {
            let pieces = pieces.offset(high * N);
            unroll::<8>(|t| {
                if wanted >> t & 1 != 0 {
                    GlobalMut::new(to).set_as(0u32, pieces.get(t));
                }
                to = to.wrapping_add(stride);
            });
        } else if wanted != 0 {
            let pieces = pieces.offset(high);
            let mut elements = [[0; 4]; 8];
            unroll::<8>(|e| elements[e] = pieces.get(2 * e).0);
            let rows = tile::transposed(elements);
            unroll::<8>(|t| {
                if wanted >> t & 1 != 0 {
                    GlobalMut::new(to).set_as(0u32, B128(rows[t]));
                }
                to = to.wrapping_add(stride);
            });
        }
        // The tile has been read before it is filled again.
        warp::sync_warp(warp::FULL);
    }
}
