//! [`reshape_and_cache`](super::reshape_and_cache) of many tokens to an x-split cache of their own 16-bit type: by [tiles](super::tile).
//!
//! A warp has a tile of keys or of values, and is a block by itself. It loads rows, all on their way at once: those of the next 16 tokens before it knows their slots, since most tiles begin
//! there. Pieces go to the page by way of shared memory; of pieces of values that have other tokens besides, single elements are stored. Tokens with few neighbours in their part of
//! a page, or none (decoding), go straight to their places, up to 16 at a time.

use crate::kv_cache::layout::split_slot;
use crate::kv_cache::reshape_and_cache::SLOTS_I64;
use crate::kv_cache::tile::{self, CHUNKS, N, NOWHERE, PIECES, Places, TOKENS};
use crate::operand;
use cuda_std::vec::B128;
use cuda_std::{Element, Global, GlobalMut, Shared, dependent_launch, integer, thread, unroll, warp};

/// Arguments as for [`reshape_and_cache`](super::reshape_and_cache::reshape_and_cache), with everything in whole chunks: base addresses are multiples of 16 bytes; strides, `head_dim` and
/// `block_size` of 8 elements. There are fewer than 2^32 - 1 blocks. Blocks are of 32 threads; the grid is (tiles of heads, keys before values; tokens in sixteens; sixteens).
#[inline(always)]
pub unsafe fn reshape_and_cache_tiles<T: Element>(
    key: *const T,
    value: *const T,
    key_cache: *mut T,
    value_cache: *mut T,
    slots: *const u8,
    _key_scale: *const f32,
    _value_scale: *const f32,
    status: *mut u32,
    key_token_stride: usize,
    key_head_stride: usize,
    value_token_stride: usize,
    value_head_stride: usize,
    key_page_block_stride: usize,
    key_page_head_stride: usize,
    _key_page_token_stride: usize,
    value_page_block_stride: usize,
    value_page_head_stride: usize,
    _value_page_token_stride: usize,
    slot_count: usize,
    block_size: u32,
    tokens: u32,
    heads: u32,
    head_dim: u32,
    flags: u32,
) {
    const { assert!(size_of::<T>() == 2) };
    dependent_launch::begin();
    let (lane, unit) = (thread::thread_idx_x(), thread::block_idx_x());
    let tile = thread::block_idx_z() * thread::grid_dim_y() + thread::block_idx_y();
    let first_token = tile * TOKENS;
    if first_token >= tokens {
        return;
    }

    // Which tile of which head. This and what follows from it is worked out anew for each part, of which there is one, mostly, so that it takes no registers in between.
    let what = |unit: u32| {
        let units = heads * tile::panels(head_dim);
        let is_key = unit < units;
        let own = if is_key { unit } else { unit - units };
        let (head, panel) = if units == heads {
            (own, 0)
        } else {
            (integer::div(own, tile::panels(head_dim)), integer::rem(own, tile::panels(head_dim)))
        };
        (is_key, head, panel)
    };
    let page = |unit: u32, block: usize| {
        let (is_key, head, panel) = what(unit);
        let (cache, block_stride, head_stride) = if is_key {
            (key_cache, key_page_block_stride, key_page_head_stride)
        } else {
            (value_cache, value_page_block_stride, value_page_head_stride)
        };
        // Of a token that goes nowhere any number, which is not used: of one block a stride may be one too.
        let at = block.wrapping_mul(block_stride).wrapping_add(head as usize * head_stride);
        (is_key, panel, GlobalMut::new(cache).offset(at))
    };
    let load = |row: usize, wanted: u32| {
        let [unit, lane] = [unit, lane].map(integer::opaque);
        let (is_key, head, panel) = what(unit);
        let (x, token_stride, head_stride) = if is_key {
            (key, key_token_stride, key_head_stride)
        } else {
            (value, value_token_stride, value_head_stride)
        };
        let x = Global::new(x).offset(head as usize * head_stride);
        let dim = tile::chunk_of(lane, panel, head_dim) * N;
        tile::load_rows(x, token_stride, lane, dim, row, wanted, first_token)
    };

    // Most tiles begin with the first token, so its rows are on their way while slots are.
    let in_launch = if tokens - first_token < TOKENS { (1 << (tokens - first_token)) - 1 } else { 0xffff };
    let mut rows = load(first_token as usize, in_launch);
    let mut loaded = true;

    let (mut block, mut at, mut wrong) = (NOWHERE, 0, false);
    if first_token + lane < tokens {
        let slot = operand::integer(slots, first_token + lane, flags & SLOTS_I64 != 0);
        let usable = (slot as u64) < slot_count as u64;
        wrong = !usable && slot != -1;
        if usable {
            let (of, place) = split_slot(slot as u64, block_size);
            (block, at) = (of as u32, place);
        }
    }
    let places = Places::new(lane, block, at, block_size);
    let own = places.own(tile == 0);
    let is_own = own >> lane & 1 != 0;
    operand::count(status, wrong && is_own && unit == 0);
    let mut rest = warp::warp_vote_ballot(warp::FULL, is_own && block != NOWHERE);
    while rest != 0 {
        let part = places.part_or_few(rest);
        rest &= !part.lanes;
        if !(loaded && part.begins_here()) {
            rows = load(part.row(first_token, 0), part.tokens);
        }
        if part.is_part {
            let [unit, lane] = [unit, lane].map(integer::opaque);
            let (is_key, panel, page) = page(unit, part.block);
            let pieces = Shared::<B128<u32, 4>>::at(0, PIECES as usize);
            tile::put_rows(pieces, is_key, lane, rows);
            warp::sync_warp(warp::FULL);
            tile::store_pieces(page, is_key, part, block_size, head_dim, lane, panel, pieces);
        } else {
            unroll::<8>(|i| {
                let [unit, lane] = [unit, lane].map(integer::opaque);
                let t = lane / 16 * N + i as u32;
                let (block, at) = places.of(part.lane(t));
                let (is_key, panel, page) = page(unit, block);
                let dim = (panel * CHUNKS + lane % 16) * N;
                if dim < head_dim && part.tokens >> t & 1 != 0 {
                    tile::store_chunk(page, is_key, block_size, at, dim, rows[i]);
                }
            });
        }
        if rest == 0 {
            break;
        }
        (rows, loaded) = ([[0; 4]; 8], false);
        // The tile has been read before it is filled again.
        warp::sync_warp(warp::FULL);
    }
}
