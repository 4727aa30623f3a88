//! Attention of chunks of query tokens of a ragged batch over a paged KV cache, by the tensor-core products of every GPU
//! since sm_80.
//!
//! # Work
//! A tile is 64 or 128 query rows of one sequence and one KV head: the query heads of the group, packed, so that row `r` is
//! head `r % group` of token `r / group`. A fixed grid of blocks works through the tiles, longest first
//! ([`ragged`](super::ragged)). A result depends on its own sequence and chunk only, but for instances named `_split`, which divide the
//! keys of few tiles: a warp leaves its rows' sums, and the last of those with these rows adds up all.
//!
//! # A tile
//! Four warps with 16 or 32 rows each walk the keys from right to left, so that the masked blocks come first. K and V of a block of
//! keys are in shared memory, twice: `cp.async` brings the next block's while one is used, with a barrier for each block.
//! Q stays in shared memory, `S = Q Kᵀ` becomes P in registers without a shuffle, as its accumulators are laid out like an
//! A operand; maxima, sums and O are in f32. Maxima follow the scores with slack: O is rescaled only once a row's maximum has grown
//! by a factor of 2^8. Sources: Dao, *FlashAttention-2*, 2023; FlashAttention-4 (slack).
//!
//! # Caches of 8 bits
//! Products are in f16, which holds the elements exactly. `cp.async` brings a block's bytes two blocks ahead; each thread turns those that
//! it has copied itself into operands, a block ahead, which needs no barrier more. Rows of Q in bf16 are scaled by a power of two
//! into the range of f16 first, and their scores by its inverse.
//!
//! # Caches in the x-split layout
//! There 16 bytes of K belong to one key, and pieces of neighbouring keys are neighbours, as they are in shared memory.
//! 16 bytes of V are a dimension of 8 keys, or of 16 keys of 8 bits: shared memory has V with a row for each dimension, whose pieces
//! are B operands as they are, without being transposed. What is beside one another in memory stays so in both: two pieces of 16 bytes come
//! together, and are stored together if their places are neighbours. Products and their order are those of other layouts, bit by bit.
//! A piece of V may have keys that nobody sees: those behind the sequence's end are not read; those before the first that somebody
//! sees the thread that has copied them overwrites with zeros when they are there, in one block of a tile only.

use super::decode::CacheOperand;
use super::ragged::{Batch, Schedule, draw, finish, last_of_parts, weight_of_part};
use super::{fit_factors, narrow, soft_capped};
use crate::tensor_float::TensorFloat;
use core::f32::consts::{LN_2, LOG2_E};
use cuda_std::shared::Shared;
use cuda_std::vec::{B32, B128};
use cuda_std::{
    E4M3, E5M2, Global, GlobalMut, bf16, cp_async, dependent_launch, entries, f16, float, integer, mma, shared, thread,
    unroll, warp,
};

/// Threads of a block: four warps.
pub const THREADS: usize = 128;
/// Query rows of a tile, if each warp has so many times 16.
pub const fn rows(tiles: usize) -> usize {
    THREADS / 32 * 16 * tiles
}

/// Floats of a block's partial result: of each thread the sums of its columns, and of two rows a maximum and a denominator each,
/// for 16 rows a warp; as often as a warp has them.
pub const fn partial_floats(head_dim: usize, tiles: usize) -> usize {
    THREADS * tiles * (head_dim / 2 + 4)
}

/// By how much (as an exponent of 2) a maximum may be exceeded.
const SLACK: f32 = 8.0;

/// Elements of a row of K or V in shared memory: padded by 16 bytes, so that eight rows fall into different banks.
const fn row_elements(head_dim: usize) -> usize {
    head_dim + 8
}

/// Sums that each score is computed in, so that eight products are under way at one time at least.
const fn chains(keys: usize, tiles: usize) -> usize {
    let sums = tiles * keys / 8;
    if sums < 8 { 8 / sums } else { 1 }
}

/// Elements of K, or of V, of a block of keys in shared memory.
const fn block_elements(head_dim: usize, keys: usize, x_split: bool) -> usize {
    keys * if x_split { head_dim } else { row_elements(head_dim) }
}

/// Dynamic shared memory of a block of the kernel for heads of up to `head_dim` elements, blocks of `keys` keys and `tiles`
/// times 16 rows a warp; `narrow`: over a cache of 8 bits; `x_split`: of that layout.
pub const fn shared_bytes(head_dim: usize, keys: usize, tiles: usize, narrow: bool, x_split: bool) -> usize {
    let bytes_of_keys = if narrow { 2 * keys * head_dim + rows(tiles) * 4 } else { 0 };
    let operands = rows(tiles) * row_elements(head_dim) + 4 * block_elements(head_dim, keys, x_split);
    operands * 2 + bytes_of_keys + 16 + rows(tiles) * 4
}

/// What a thread copies of an x-split cache: pieces of 16 bytes, one of K and one of V in each step.
///
/// Lanes run over the keys of a piece of K, over the pieces of V that a dimension has in a row: memory is read in its order.
#[derive(Clone, Copy)]
struct XPieces<const KEYS: usize, const NARROW: bool> {
    tid: u32,
}

impl<const KEYS: usize, const NARROW: bool> XPieces<KEYS, NARROW> {
    /// Elements of a piece.
    const ELEMENTS: usize = if NARROW { 16 } else { 8 };
    /// Keys that are copied together: all, or as many as divide the threads.
    const GROUP: usize = if KEYS.is_power_of_two() { KEYS } else { 16 };
    /// Pieces of V that a dimension has in a group.
    const V_PIECES: usize = Self::GROUP / Self::ELEMENTS;

    /// Steps of a group.
    const fn steps(head_dim: usize) -> usize {
        Self::GROUP * head_dim / Self::ELEMENTS / THREADS
    }

    /// The thread's key in a group, of which it copies pieces.
    #[inline(always)]
    fn key(self, group: u32) -> u32 {
        group * Self::GROUP as u32 + self.tid % Self::GROUP as u32
    }

    /// Which piece of the key it copies in a step.
    #[inline(always)]
    fn k_piece(self, step: u32) -> u32 {
        step * (THREADS / Self::GROUP) as u32 + self.tid / Self::GROUP as u32
    }

    /// The first of the keys in a group of which it copies values.
    #[inline(always)]
    fn first_key(self, group: u32) -> u32 {
        group * Self::GROUP as u32 + self.tid % Self::V_PIECES as u32 * Self::ELEMENTS as u32
    }

    /// Which dimension of these it copies in a step.
    #[inline(always)]
    fn dimension(self, step: u32) -> u32 {
        step * (THREADS / Self::V_PIECES) as u32 + self.tid / Self::V_PIECES as u32
    }

    /// Where bytes wait of what it copies in a step, counted through all groups: beside those of other threads.
    #[inline(always)]
    fn own_place(self, step: u32) -> u32 {
        (step * THREADS as u32 + self.tid) * 16
    }

    /// The element of K in shared memory where a piece of eight operands of a key begins: beside those of the keys around it.
    #[inline(always)]
    fn k_place(piece: u32, key: u32) -> u32 {
        (piece * KEYS as u32 + key) * 8
    }

    /// The element of V in shared memory where the row of a dimension has the operands of eight keys from this one on. Rows are not padded:
    /// the order of a row's pieces has those of eight rows in different banks.
    #[inline(always)]
    fn v_place(dimension: u32, key: u32) -> u32 {
        // Rows are so many times 16 bytes.
        let other = match KEYS / 8 {
            2 | 6 => dimension / 4 % 2,
            4 => dimension / 2 % 4,
            _ => dimension % 8,
        };
        dimension * KEYS as u32 + ((key / 8) ^ other) * 8
    }
}

/// Attention of the query tokens of each sequence over its paged keys and values.
///
/// * `q`: `[tokens, q_heads, head_dim]` with strides `q_token`, `q_head`, its vectors at multiples of 4 bytes; `out`
///   likewise with `out_token`, `out_head`. `head_dim` is a multiple of 8.
/// * `k`, `v`: pages of `1 << page_shift` tokens, at least 8; a token's vector is dense and starts at a multiple of 16 bytes.
///   Of 8-bit elements, `NARROW`, which `kind` tells (of [`narrow`]), a vector has a multiple of 16, and there are `k_scales`, `v_scales`:
///   `[kv_heads]` if `scale_per_head` is 1, or `[1]` if it is 0.
/// * `XSPLIT`: `k` and `v` are x-split: of a page and head a piece of 16 bytes of each key, the next piece `k_slot` elements further, and of
///   each dimension the values of the page's keys, the next dimension `v_slot` elements further. All distances are multiples of 16 bytes,
///   pages of 8-bit elements have 16 tokens or more.
/// * `starts`: `[sequences + 1]`, where each sequence's query tokens begin; `lens`: `[sequences]`, keys of each sequence,
///   its query tokens' own (the last ones) among them; `block_table`: `[sequences, max_pages]`.
/// * `lse`: `[tokens, q_heads]` or null; `alibi`, `sinks`: `[q_heads]` or null.
/// * `tickets`: two words, `SPLIT`: besides, one for each warp of the grid; zero before the first launch and after every
///   one. `section_keys`: keys of which K and V fit into the L2 cache.
/// * `partial`: `SPLIT`: [`partial_floats`] for each block, at a multiple of 16 bytes; else not used.
/// * `window`: keys that a token sees, 0 for all; `soft_cap`: 0 for none; `causal`: whether a token sees no later keys.
///
/// `D` is `head_dim` rounded up to an instance; `tile_tokens * (q_heads / kv_heads)` is at most [`rows`] of `M`. `P` is what is
/// multiplied. Block: [`THREADS`]; any grid; shared memory: [`shared_bytes`] of `D`, `KEYS`, `M`, `NARROW` and `XSPLIT`.
#[inline(always)]
pub unsafe fn prefill<
    T: TensorFloat,
    P: TensorFloat,
    const D: usize,
    const KEYS: usize,
    const M: usize,
    const NARROW: bool,
    const XSPLIT: bool,
    const SPLIT: bool,
>(
    out: *mut T,
    lse: *mut f32,
    q: *const T,
    k: *const T,
    v: *const T,
    starts: *const i32,
    lens: *const i32,
    block_table: *const i32,
    alibi: *const f32,
    sinks: *const f32,
    k_scales: *const f32,
    v_scales: *const f32,
    tickets: *mut u32,
    partial: *mut f32,
    scale_per_head: u32,
    kind: u32,
    sequences: u32,
    tokens: u32,
    q_heads: u32,
    kv_heads: u32,
    head_dim: u32,
    page_shift: u32,
    max_pages: u32,
    pages: u32,
    tile_tokens: u32,
    q_token: usize,
    q_head: usize,
    out_token: usize,
    out_head: usize,
    k_page: usize,
    k_slot: usize,
    k_head: usize,
    v_page: usize,
    v_slot: usize,
    v_head: usize,
    scale: f32,
    soft_cap: f32,
    window: u32,
    causal: u32,
    section_keys: u32,
) {
    dependent_launch::begin();
    const { assert!(D.is_multiple_of(16) && KEYS.is_multiple_of(16) && KEYS <= 64 && (M == 1 || M == 2)) };
    // Elements of a copy.
    let of_copy = const { if NARROW { 16 } else { 8 } };
    // As the copies are written.
    const { assert!((KEYS * D / if NARROW { 16 } else { 8 }).is_multiple_of(THREADS)) };
    // As Q is fitted.
    const { assert!(!NARROW || D.is_power_of_two()) };
    // As x-split pieces are copied, and widened: in one group.
    const {
        assert!(
            !XSPLIT || (XPieces::<KEYS, NARROW>::GROUP * D / XPieces::<KEYS, NARROW>::ELEMENTS).is_multiple_of(THREADS)
        )
    };
    const { assert!(!XSPLIT || !NARROW || KEYS.is_power_of_two()) };
    core::hint::assert_unchecked(kv_heads != 0);
    let group = q_heads / kv_heads;
    core::hint::assert_unchecked(group != 0);
    let batch = Batch {
        starts: Global::new(starts),
        lens: Global::new(lens),
        sequences,
        tokens,
        max_len: max_pages << page_shift,
        tile_tokens,
        kv_heads,
        window,
        causal: causal != 0,
    };
    let (q, k, v) = (Global::new(q), Global::new(k), Global::new(v));
    let fold = scale * LOG2_E;
    let (out, lse_out) = (GlobalMut::new(out), GlobalMut::new(lse));
    let table = Global::new(block_table);

    let (tid, lane) = (thread::thread_idx_x(), warp::lane_id());
    let (g, t) = (lane / 4, lane % 4);
    let own = tid / 32 * const { 16 * M as u32 };
    let width = const { row_elements(D) };
    let mut carver = shared::Carver::new();
    let qs = carver.take::<T>(rows(M) * width);
    // K and V of a block of keys, and of the next.
    let kv = carver.take::<P>(4 * block_elements(D, KEYS, XSPLIT));
    // Of 8-bit elements: their bytes, of K and V of one block.
    let bytes = carver.take::<u8>(if NARROW { 2 * KEYS * D } else { 0 });
    // The number of the next tile or part, ...
    let next = carver.take::<u32>(1);
    // ... and of this one, as registers are short, of how many parts it is, which, and the number of the first of them.
    let now = carver.take::<u32>(2);
    let places = carver.take::<u32>(rows(M));
    // What a row's scores are to be multiplied with besides, over 8-bit elements: in memory, too.
    let factors = carver.take::<f32>(if NARROW { rows(M) } else { 0 });
    // 32-bit addresses: what is added to them becomes part of the instruction.
    let (q0, kv0) = (qs.address(0u32), kv.address(0u32));
    let pitch = const { 2 * row_elements(D) as u32 };
    let (v_after, stage_bytes) =
        const { (2 * block_elements(D, KEYS, XSPLIT) as u32, 4 * block_elements(D, KEYS, XSPLIT) as u32) };
    // Where copies go: to rows as they are multiplied, or a thread's beside one another.
    let copy_v_after = if NARROW { const { (KEYS * D) as u32 } } else { v_after };
    let q_row = q0 + (own + lane % 16) * pitch + lane / 16 * 16;
    let k_row = if XSPLIT {
        kv0 + 2 * XPieces::<KEYS, NARROW>::k_place(lane / 8 % 2, lane % 8 + lane / 16 * 8)
    } else {
        kv0 + (lane % 8 + lane / 16 * 8) * pitch + lane / 8 % 2 * 16
    };
    let v_row = if XSPLIT {
        kv0 + v_after + 2 * XPieces::<KEYS, NARROW>::v_place(lane % 8 + lane / 16 * 8, lane / 8 % 2 * 8)
    } else {
        kv0 + v_after + lane % 16 * pitch + lane / 16 * 16
    };
    core::hint::assert_unchecked(head_dim >= 8);
    // Whether rows of Q lie at multiples of 16 bytes.
    let q_by_16 = ((q.ptr(0u32) as usize / size_of::<T>()) | q_token | q_head).is_multiple_of(8);
    // What lies between the head's size and the instance's is zero.
    let mut i = tid;
    while i < (rows(M) * D / 8) as u32 {
        let (r, piece) = (i / const { D as u32 / 8 }, i % const { D as u32 / 8 });
        if piece * 8 >= head_dim {
            qs.set_as(r as usize * width + piece as usize * 8, B128([0u32; 4]));
        }
        i += THREADS as u32;
    }

    // A row's token in the tile and head in the group, in memory as registers are short.
    let mut r = tid;
    while r < rows(M) as u32 {
        places.set(r, ((r / group) << 16) | (r % group));
        r += THREADS as u32;
    }
    thread::sync_threads();
    let place = |h: usize| {
        let place = places.get(own + g + 8 * h as u32);
        (place >> 16, place & 0xffff)
    };

    let mut schedule = Schedule::new(&batch, section_keys);
    let most_parts = if SPLIT { batch.most_parts() } else { 1 };
    let mut index = thread::block_idx_x();
    while let Some(tile) = schedule.find(&batch, index / most_parts) {
        if tid == 0 {
            next.set(0u32, draw(tickets));
        }
        let Some(part) = batch.part(&tile, KEYS as u32, index % most_parts, most_parts) else {
            thread::sync_threads();
            index = next.get(0u32);
            thread::sync_threads();
            continue;
        };
        if SPLIT && tid == 0 {
            now.set(0u32, part.of | part.number << 8);
            now.set(1u32, index - part.number);
        }
        let table = table.offset(tile.sequence as usize * max_pages as usize);
        // Where the first token's keys begin, or the part's: nobody sees what is before.
        let start = batch.start(batch.end(&tile, 0)).max(part.first * KEYS as u32);
        // Pages of a block, a lane for each eight keys, which a page has at least: looked up a block ahead of the copies.
        let wanted = |block: u32| {
            let key = block * KEYS as u32 + 8 * lane;
            lane < KEYS as u32 / 8 && key < tile.len && key + 8 > start
        };
        let pages_of = |block: u32| {
            let key = block * KEYS as u32 + 8 * lane;
            if wanted(block) { table.get(key >> page_shift) as u32 } else { u32::MAX }
        };
        // Whether a page that there should be is not.
        let wrong_in = |block: u32, found: u32| warp::warp_vote_ballot(warp::FULL, wanted(block) && found >= pages);

        // Copies a block's rows, zeros for those that are not there or that nobody sees: NaN times 0 would be NaN.
        let slot_mask = (1u32 << page_shift) - 1;
        let (k_head_at, v_head_at) = (tile.kv_head as usize * k_head, tile.kv_head as usize * v_head);
        // Addresses of elements, whatever they are.
        let of_bytes = |bytes: *const T, i: usize| bytes.cast::<u8>().wrapping_add(i).cast::<T>();
        let (k, v) = if NARROW {
            (Global::new(of_bytes(k.ptr(0u32), k_head_at)), Global::new(of_bytes(v.ptr(0u32), v_head_at)))
        } else {
            (k.offset(k_head_at), v.offset(v_head_at))
        };
        let element_of = |of: Global<T>, i: usize| if NARROW { of_bytes(of.ptr(0u32), i) } else { of.ptr(i) };
        let copy = |stage: u32, block: u32, found: u32| {
            let to = if NARROW { bytes.address(0u32) } else { kv0 + stage * stage_bytes };
            // Computed anew for each block: kept, it would cost registers where scores need them. Here all steps fit at once.
            let tid = integer::opaque(tid);
            if XSPLIT {
                let mine = XPieces::<KEYS, NARROW> { tid };
                for group in 0..KEYS as u32 / const { XPieces::<KEYS, NARROW>::GROUP as u32 } {
                    let r = mine.key(group);
                    let key = block * KEYS as u32 + r;
                    let page = warp::shfl_idx(found, r / 8);
                    let seen = page < pages && key.wrapping_sub(start) < tile.len - start;
                    let (page, slot) = (if seen { page } else { 0 } as usize, (key & slot_mask) as usize);
                    let k_at = page * k_page + slot * of_copy;
                    let v_r = mine.first_key(group);
                    let key = block * KEYS as u32 + v_r;
                    // Of 16 keys, which are of one page, the first eight may be those that nobody sees.
                    let unseen = NARROW && key + 8 <= start;
                    let page = warp::shfl_idx(found, v_r / 8 + unseen as u32);
                    // Of the values of keys behind the sequence's end nothing is read.
                    let read = if page < pages { tile.len.saturating_sub(key).min(of_copy as u32) } else { 0 };
                    let read = read * const { 16 / if NARROW { 16 } else { 8 } };
                    let (page, slot) = (if page < pages { page } else { 0 } as usize, (key & slot_mask) as usize);
                    let v_at = page * v_page + slot;
                    let steps = const { XPieces::<KEYS, NARROW>::steps(D) as u32 };
                    for step in 0..steps {
                        let piece = mine.k_piece(step);
                        let d = mine.dimension(step);
                        let (k_to, v_to) = if NARROW {
                            let to = to + mine.own_place(group * steps + step);
                            (to, to + copy_v_after)
                        } else {
                            let v_to = 2 * XPieces::<KEYS, NARROW>::v_place(d, v_r);
                            (to + 2 * XPieces::<KEYS, NARROW>::k_place(piece, r), to + copy_v_after + v_to)
                        };
                        let bytes = if seen && piece * (of_copy as u32) < head_dim { 16 } else { 0 };
                        cp_async::copy_16_zfill(k_to, element_of(k, k_at + piece as usize * k_slot), bytes);
                        let bytes = if d < head_dim { read } else { 0 };
                        cp_async::copy_16_zfill(v_to, element_of(v, v_at + d as usize * v_slot), bytes);
                    }
                }
            } else {
                for step in 0..KEYS * D / of_copy / THREADS {
                    let pieces = const { D as u32 / if NARROW { 16 } else { 8 } };
                    // A thread has the same piece of rows that are as far apart, if rows divide the threads.
                    let (r, piece) = if THREADS.is_multiple_of(pieces as usize) {
                        (tid / pieces + step as u32 * (THREADS as u32 / pieces), tid % pieces)
                    } else {
                        let i = tid + step as u32 * THREADS as u32;
                        (i / pieces, i % pieces)
                    };
                    let key = block * KEYS as u32 + r;
                    let page = warp::shfl_idx(found, r / 8);
                    let seen = key.wrapping_sub(start) < tile.len - start;
                    // Of nothing the place does not matter, as long as it is one.
                    let there = page < pages && seen && piece * (of_copy as u32) < head_dim;
                    let (page, bytes) = if there { (page, 16) } else { (0, 0) };
                    let (page, slot) = (page as usize, (key & slot_mask) as usize);
                    let at = |page_stride: usize, slot_stride: usize| {
                        page * page_stride + slot * slot_stride + piece as usize * of_copy
                    };
                    let to =
                        if NARROW { to + (tid + (step * THREADS) as u32) * 16 } else { to + r * pitch + piece * 16 };
                    cp_async::copy_16_zfill(to, element_of(k, at(k_page, k_slot)), bytes);
                    cp_async::copy_16_zfill(to + copy_v_after, element_of(v, at(v_page, v_slot)), bytes);
                }
            }
            cp_async::commit_group();
        };
        // Values that this thread has copied, which are there, become zeros where their keys are before the first that somebody sees: in
        // the block with that key, and of pieces that have both kinds. Others are zeros already.
        let hide = |stage: u32, block: u32| {
            let first = block * KEYS as u32;
            if !XSPLIT || first >= start {
                return;
            }
            // Nothing of this is to be kept from block to block.
            let (mine, start) = (XPieces::<KEYS, NARROW> { tid: integer::opaque(tid) }, integer::opaque(start));
            let group = (start - first) / const { XPieces::<KEYS, NARROW>::GROUP as u32 };
            let r = mine.first_key(group);
            let hidden = (start - first).wrapping_sub(r);
            if hidden < of_copy as u32 {
                let steps = const { XPieces::<KEYS, NARROW>::steps(D) as u32 };
                for step in 0..steps {
                    let mut i = 0;
                    while i < hidden {
                        if NARROW {
                            bytes.set(const { (KEYS * D) as u32 } + mine.own_place(group * steps + step) + i, 0);
                        } else {
                            let at = XPieces::<KEYS, NARROW>::v_place(mine.dimension(step), r);
                            kv.set((stage * stage_bytes + v_after) / 2 + at + i, P::ZERO);
                        }
                        i += 1;
                    }
                }
            }
        };

        // The last block, of which there is one at least, which is then wholly masked.
        let mut block = part.first + part.blocks - 1;
        // Whether there is something to see before a block.
        let more_before = |block: u32| block * KEYS as u32 > start;
        let mut found = pages_of(block);
        // A warp's rows of Q, which only it reads. Rows that the tile does not have repeat its first one; nothing of them is stored.
        let row_of_q = |r: u32| {
            let place = places.get(r);
            let there = (place >> 16) < tile.tokens;
            let (token, head) = if there { (place >> 16, place & 0xffff) } else { (0, 0) };
            (tile.first + token) as usize * q_token + (tile.kv_head * group + head) as usize * q_head
        };
        if q_by_16 {
            let pieces = head_dim / 8;
            let mut i = lane;
            while i < const { 16 * M as u32 } * pieces {
                let (r, piece) = (own + i / pieces, i % pieces);
                cp_async::copy_16(q0 + r * pitch + piece * 16, q.ptr(row_of_q(r) + piece as usize * 8));
                i += 32;
            }
        } else {
            let words = head_dim / 2;
            let mut i = lane;
            while i < const { 16 * M as u32 } * words {
                let (r, d) = (own + i / words, i % words * 2);
                let B32([word]) = q.get_as::<B32<u32, 1>>(row_of_q(r) + d as usize);
                qs.set_as(r as usize * width + d as usize, B32([word]));
                i += 32;
            }
        }
        let mut stage = 0;
        copy(stage, block, found);
        let mut found_next = if more_before(block) { pages_of(block - 1) } else { u32::MAX };
        // Of the block after that, of which bytes come when those of the next one are operands.
        let mut found_then = u32::MAX;
        let to_operands = |stage: u32| {
            let rows = kv.offset(stage as usize * const { 2 * block_elements(D, KEYS, XSPLIT) });
            match kind {
                narrow::E4M3 => widen::<P, E4M3, D, KEYS, XSPLIT>(rows, bytes),
                narrow::E5M2 => widen::<P, E5M2, D, KEYS, XSPLIT>(rows, bytes),
                _ => widen::<P, i8, D, KEYS, XSPLIT>(rows, bytes),
            }
        };
        let scale_at = tile.kv_head * scale_per_head;
        if NARROW {
            cp_async::wait_group::<0>();
            // A warp's rows are its own.
            warp::sync_warp(warp::FULL);
            let k_scale = Global::new(k_scales).get(scale_at);
            if T::DTYPE as u8 != P::DTYPE as u8 {
                fit::<T, P, D, M>(qs, own, factors, k_scale);
            } else if lane < const { 16 * M as u32 } {
                factors.set(own + lane, k_scale);
            }
            warp::sync_warp(warp::FULL);
            hide(stage, block);
            to_operands(stage);
            if more_before(block) {
                copy(stage, block - 1, found_next);
                found_then = if more_before(block - 1) { pages_of(block - 2) } else { u32::MAX };
            }
        }

        let mut ends = [0u32; 4];
        for h in 0..2 * M {
            ends[h] = batch.end(&tile, place(h).0);
        }
        // Blocks that every row of the tile sees all of.
        let whole_end = batch.end(&tile, 0) / KEYS as u32;
        let whole_start = batch.start(batch.end(&tile, tile_tokens - 1)).div_ceil(KEYS as u32);

        let mut o = [[[0f32; 4]; 32]; M];
        let mut top = [f32::NEG_INFINITY; 4];
        let mut sum = [0f32; 4];
        loop {
            // This block is there, and nobody uses the last one any more.
            if !NARROW {
                cp_async::wait_group::<0>();
                hide(stage, block);
            }
            thread::sync_threads();
            let more = more_before(block);
            let wrong = wrong_in(block, found);
            let (k_row, v_row) = (k_row + stage * stage_bytes, v_row + stage * stage_bytes);
            stage ^= 1;
            if more && NARROW {
                cp_async::wait_group::<0>();
                hide(stage, block - 1);
                to_operands(stage);
                if more_before(block - 1) {
                    copy(stage, block - 2, found_then);
                }
                (found, found_next) = (found_next, found_then);
                let further = more_before(block - 1) && more_before(block - 2);
                found_then = if further { pages_of(block - 3) } else { u32::MAX };
            } else if more {
                copy(stage, block - 1, found_next);
                found = found_next;
                found_next = if more_before(block - 1) { pages_of(block - 2) } else { u32::MAX };
            }

            // A product waits for the one before in the same sum: where there are few sums, there are several of each.
            let chains = const { chains(KEYS, M) };
            let mut sums = [[[[0f32; 4]; 8]; M]; 4];
            for step in 0..D / 16 {
                let s = &mut sums[step % chains];
                let mut a = [[0u32; 4]; M];
                for m in 0..M {
                    a[m] = mma::ldmatrix_x4(q_row + (16 * m) as u32 * pitch + 32 * step as u32);
                }
                for j in 0..KEYS / 16 {
                    let b = if XSPLIT {
                        mma::ldmatrix_x4(k_row + 2 * XPieces::<KEYS, NARROW>::k_place(2 * step as u32, 16 * j as u32))
                    } else {
                        mma::ldmatrix_x4(k_row + (16 * j) as u32 * pitch + 32 * step as u32)
                    };
                    for m in 0..M {
                        s[m][2 * j] = P::mma(a[m], [b[0], b[1]], s[m][2 * j]);
                        s[m][2 * j + 1] = P::mma(a[m], [b[2], b[3]], s[m][2 * j + 1]);
                    }
                }
            }
            let mut s = sums[0];
            for other in &sums[1..chains] {
                for m in 0..M {
                    for j in 0..KEYS / 8 {
                        unroll::<4>(|e| s[m][j][e] += other[m][j][e]);
                    }
                }
            }
            let whole = block < whole_end && block >= whole_start && wrong == 0;
            for m in 0..M {
                // Scores in units of log 2.
                let mut by = [if soft_cap > 0.0 { scale } else { fold }; 2];
                if NARROW {
                    unroll::<2>(|i| by[i] *= factors.get(own + g + (16 * m + 8 * i) as u32));
                }
                for j in 0..KEYS / 8 {
                    unroll::<4>(|e| s[m][j][e] *= by[e / 2]);
                }
                if soft_cap > 0.0 {
                    for j in 0..KEYS / 8 {
                        unroll::<4>(|e| s[m][j][e] = soft_capped(s[m][j][e], soft_cap) * LOG2_E);
                    }
                }
                // This thread's keys are this one and constants more.
                let base = (block * KEYS as u32 + 2 * t) as i32;
                if !alibi.is_null() {
                    unroll::<2>(|i| {
                        // Read again each time: it is seldom used, and would cost registers.
                        let (token, head) = place(2 * m + i);
                        let slope = Global::new(alibi).get(tile.kv_head * group + head) * LOG2_E;
                        let distance = base - tile.position_of(token);
                        for j in 0..KEYS / 8 {
                            unroll::<2>(|c| {
                                let distance = (distance + (8 * j + c) as i32) as f32;
                                s[m][j][2 * i + c] = float::fma(slope, distance, s[m][j][2 * i + c]);
                            });
                        }
                    });
                }
                if !whole {
                    unroll::<2>(|i| {
                        let end = ends[2 * m + i] as i32 - base;
                        let start = batch.start(ends[2 * m + i]) as i32 - base;
                        for j in 0..KEYS / 8 {
                            unroll::<2>(|c| {
                                let key = (8 * j + c) as i32;
                                let seen = key < end && key >= start && wrong >> j & 1 == 0;
                                let e = 2 * i + c;
                                s[m][j][e] = if seen { s[m][j][e] } else { f32::NEG_INFINITY };
                            });
                        }
                    });
                }
            }
            let mut new = top;
            for m in 0..M {
                unroll::<2>(|i| {
                    let h = 2 * m + i;
                    for j in 0..KEYS / 8 {
                        unroll::<2>(|c| new[h] = float::max(new[h], s[m][j][2 * i + c]));
                    }
                    new[h] = float::max(new[h], warp::shfl_xor(new[h], 1));
                    new[h] = float::max(new[h], warp::shfl_xor(new[h], 2));
                });
            }
            // Nothing seen yet: any finite reference will do.
            let reference = |top: f32| if top == f32::NEG_INFINITY { 0.0 } else { top };
            let mut grows = false;
            for h in 0..2 * M {
                grows |= new[h] - top[h] > SLACK;
            }
            if warp::warp_vote_any(warp::FULL, grows) {
                for h in 0..2 * M {
                    let factor = float::fast::exp2(top[h] - reference(new[h]));
                    sum[h] *= factor;
                    for j in 0..D / 8 {
                        unroll::<2>(|c| o[h / 2][j][h % 2 * 2 + c] *= factor);
                    }
                }
                top = new;
            }
            for m in 0..M {
                unroll::<2>(|i| {
                    let h = 2 * m + i;
                    let reference = reference(top[h]);
                    let mut part = 0.0;
                    for j in 0..KEYS / 8 {
                        unroll::<2>(|c| {
                            s[m][j][2 * i + c] = float::fast::exp2(s[m][j][2 * i + c] - reference);
                            part += s[m][j][2 * i + c];
                        });
                    }
                    sum[h] += part;
                });
            }
            for step in 0..KEYS / 16 {
                let mut p = [[0u32; 4]; M];
                for m in 0..M {
                    let (a, b) = (s[m][2 * step], s[m][2 * step + 1]);
                    p[m] = [
                        P::pack_f32(a[0], a[1]),
                        P::pack_f32(a[2], a[3]),
                        P::pack_f32(b[0], b[1]),
                        P::pack_f32(b[2], b[3]),
                    ];
                }
                for j in 0..D / 16 {
                    let b = if XSPLIT {
                        // Rows of a power of two begin at multiples of themselves, and their pieces' order is a xor.
                        let row =
                            if KEYS.is_power_of_two() { v_row ^ (32 * step as u32) } else { v_row + 32 * step as u32 };
                        mma::ldmatrix_x4(row + (16 * j) as u32 * const { 2 * KEYS as u32 })
                    } else {
                        mma::ldmatrix_x4_trans(v_row + (16 * step) as u32 * pitch + 32 * j as u32)
                    };
                    for m in 0..M {
                        o[m][2 * j] = P::mma(p[m], [b[0], b[1]], o[m][2 * j]);
                        o[m][2 * j + 1] = P::mma(p[m], [b[2], b[3]], o[m][2 * j + 1]);
                    }
                }
            }
            if !more {
                break;
            }
            block -= 1;
        }

        // Whether this warp has what all keys give.
        let mut whole = true;
        let of = if SPLIT { now.get(0u32) & 0xff } else { 1 };
        if of > 1 {
            let floats = const { partial_floats(D, M) };
            let (number, first_item) = (now.get(0u32) >> 8, now.get(1u32));
            // A warp's results are its own.
            let at = first_item as usize * floats + own as usize * (floats / rows(M)) + 4 * lane as usize;
            let results = GlobalMut::new(partial).offset(at);
            for m in 0..M {
                let mine = results.offset(number as usize * floats + m * const { 16 * (D + 8) });
                for j in 0..D / 8 {
                    mine.set_as(128 * j, B128(o[m][j]));
                }
                mine.set_as(const { 16 * D }, B128([top[2 * m], top[2 * m + 1], sum[2 * m], sum[2 * m + 1]]));
            }
            warp::sync_warp(warp::FULL);
            let mut last = 0;
            if lane == 0 {
                let warps = const { THREADS as u32 / 32 };
                let counter = tickets.wrapping_add((2 + first_item * warps + tid / 32) as usize);
                last = last_of_parts(counter, of) as u32;
            }
            whole = warp::shfl_idx(last, 0) != 0;
            if whole {
                let results = Global::new(results.ptr(0u32).cast_const());
                for m in 0..M {
                    let of_part = |number: u32| results.offset(number as usize * floats + m * const { 16 * (D + 8) });
                    let said = |number: u32| {
                        let B128(said) = of_part(number).get_as::<B128<f32, 4>>(const { 16 * D });
                        said
                    };
                    let (mut new, mut total) = ([f32::NEG_INFINITY; 2], [0f32; 2]);
                    for number in 0..of {
                        let said = said(number);
                        unroll::<2>(|i| new[i] = float::max(new[i], said[i]));
                    }
                    o[m] = [[0f32; 4]; 32];
                    for number in 0..of {
                        let said = said(number);
                        let weights = [0, 1].map(|i: usize| weight_of_part(said[i], new[i], 1.0));
                        unroll::<2>(|i| total[i] = float::fma(said[2 + i], weights[i], total[i]));
                        for j in 0..D / 8 {
                            let B128(other) = of_part(number).get_as::<B128<f32, 4>>(128 * j);
                            unroll::<4>(|e| o[m][j][e] = float::fma(other[e], weights[e / 2], o[m][j][e]));
                        }
                    }
                    unroll::<2>(|i| (top[2 * m + i], sum[2 * m + i]) = (new[i], total[i]));
                }
            }
        }

        for h in 0..2 * M {
            let total = sum[h] + warp::shfl_xor(sum[h], 1);
            let total = total + warp::shfl_xor(total, 2);
            let (token, head) = place(h);
            if whole && token < tile.tokens {
                let head = tile.kv_head * group + head;
                let query = (tile.first + token) as usize;
                let sink = if sinks.is_null() { f32::NEG_INFINITY } else { Global::new(sinks).get(head) * LOG2_E };
                let reference = float::max(float::max(top[h], f32::MIN), sink);
                let shrink = float::fast::exp2(float::max(top[h], f32::MIN) - reference);
                let whole = float::fma(total, shrink, float::fast::exp2(sink - reference));
                let inverse = if whole == 0.0 { 0.0 } else { float::fast::div(shrink, whole) };
                let inverse = if NARROW { inverse * Global::new(v_scales).get(scale_at) } else { inverse };
                let out = out.offset(query * out_token + head as usize * out_head);
                for j in 0..D / 8 {
                    let d = 8 * j as u32 + 2 * t;
                    if d < head_dim {
                        let o = o[h / 2][j];
                        let word = T::pack_f32(o[h % 2 * 2] * inverse, o[h % 2 * 2 + 1] * inverse);
                        out.set_as(d, B32([word]));
                    }
                }
                if !lse.is_null() && t == 0 {
                    let value = if whole == 0.0 { f32::NEG_INFINITY } else { (reference + float::log2(whole)) * LN_2 };
                    lse_out.set(query * q_heads as usize + head as usize, value);
                }
            }
        }
        // The next tile's copies overwrite what this one has read.
        index = next.get(0u32);
        thread::sync_threads();
    }
    if tid == 0 {
        finish(tickets);
    }
}

/// Turns the bytes that this thread has copied into operands in rows of K and V, four to a word.
#[inline(always)]
unsafe fn widen<P: TensorFloat, C: CacheOperand, const D: usize, const KEYS: usize, const XSPLIT: bool>(
    rows: Shared<P>,
    bytes: Shared<u8>,
) {
    let (pieces, width) = const { (D as u32 / 16, row_elements(D)) };
    let tid = integer::opaque(thread::thread_idx_x());
    for step in 0..KEYS * D / 16 / THREADS {
        let i = tid + (step * THREADS) as u32;
        let to = (i / pieces) as usize * width + (i % pieces) as usize * 16;
        let mine = XPieces::<KEYS, true> { tid };
        unroll::<2>(|v| {
            let B128(words) = bytes.get_as::<B128<u32, 4>>(16 * i as usize + v * (KEYS * D));
            let [a, b, c, d] = words.map(|word: u32| C::operands(word));
            let (first, last) = if !XSPLIT {
                (to + v * (KEYS * width), to + v * (KEYS * width) + 8)
            } else if v == 0 {
                let to = |piece: u32| XPieces::<KEYS, true>::k_place(piece, mine.key(0)) as usize;
                (to(2 * mine.k_piece(step as u32)), to(2 * mine.k_piece(step as u32) + 1))
            } else {
                let to = |r: u32| KEYS * D + XPieces::<KEYS, true>::v_place(mine.dimension(step as u32), r) as usize;
                (to(mine.first_key(0)), to(mine.first_key(0) + 8))
            };
            rows.set_as(first, B128([a[0], a[1], b[0], b[1]]));
            rows.set_as(last, B128([c[0], c[1], d[0], d[1]]));
        });
    }
}

/// Turns a warp's rows of Q, from `own` on, from `T` to `P`, each multiplied by a power of two. What undoes that, times `factor`, goes
/// to `factors`.
#[inline(always)]
unsafe fn fit<T: TensorFloat, P: TensorFloat, const D: usize, const M: usize>(
    qs: Shared<T>,
    own: u32,
    factors: Shared<f32>,
    factor: f32,
) {
    // Lanes of a row, each with eight elements: a power of two.
    let lanes = const { D as u32 / 8 };
    let lane = warp::lane_id();
    for step in 0..(16 * M * D / 256) as u32 {
        let r = own + step * (32 / lanes) + lane / lanes;
        let at = r as usize * row_elements(D) + (lane % lanes) as usize * 8;
        let B128(words) = qs.get_as::<B128<u32, 4>>(at);
        let values = words.map(|word: u32| T::unpack_f32(word));
        // Magnitudes are in the order of their bits.
        let mut top = 0;
        unroll::<8>(|i| top = top.max(values[i / 2][i % 2].to_bits() & 0x7fff_ffff));
        unroll::<5>(|i| {
            if lanes > 1 << i {
                top = top.max(warp::shfl_xor(top, 1 << i));
            }
        });
        let (up, down) = fit_factors(top);
        qs.set_as(at, B128(values.map(|[low, high]| P::pack_f32(low * up, high * up))));
        if lane.is_multiple_of(lanes) {
            factors.set(r, down * factor);
        }
    }
}

entries! {
    /// Arguments of every `prefill_*` entry; see [`prefill`].
    pub struct Args<T>(
        out: *mut T, lse: *mut f32, q: *const T, k: *const T, v: *const T, starts: *const i32, lens: *const i32,
        block_table: *const i32, alibi: *const f32, sinks: *const f32, k_scales: *const f32, v_scales: *const f32, tickets: *mut u32,
        partial: *mut f32, scale_per_head: u32, kind: u32, sequences: u32, tokens: u32,
        q_heads: u32, kv_heads: u32, head_dim: u32, page_shift: u32, max_pages: u32, pages: u32, tile_tokens: u32, q_token: usize,
        q_head: usize, out_token: usize, out_head: usize, k_page: usize, k_slot: usize, k_head: usize, v_page: usize,
        v_slot: usize, v_head: usize, scale: f32, soft_cap: f32, window: u32, causal: u32, section_keys: u32,
    );
    prefill_d64_bf16 { type T = bf16; } [128, 2] => prefill::<T, T, 64, 48, 2, false, false, false>;
    prefill_d64_f16 { type T = f16; } [128, 2] => prefill::<T, T, 64, 48, 2, false, false, false>;
    prefill_d96_bf16 { type T = bf16; } [128, 2] => prefill::<T, T, 96, 32, 2, false, false, false>;
    prefill_d96_f16 { type T = f16; } [128, 2] => prefill::<T, T, 96, 32, 2, false, false, false>;
    prefill_d128_bf16 { type T = bf16; } [128, 2] => prefill::<T, T, 128, 32, 2, false, false, false>;
    prefill_d128_f16 { type T = f16; } [128, 2] => prefill::<T, T, 128, 32, 2, false, false, false>;
    prefill_d192_bf16 { type T = bf16; } [128, 1] => prefill::<T, T, 192, 32, 1, false, false, false>;
    prefill_d192_f16 { type T = f16; } [128, 1] => prefill::<T, T, 192, 32, 1, false, false, false>;
    prefill_d256_bf16 { type T = bf16; } [128, 1] => prefill::<T, T, 256, 16, 1, false, false, false>;
    prefill_d256_f16 { type T = f16; } [128, 1] => prefill::<T, T, 256, 16, 1, false, false, false>;
    prefill_d64_bf16_split { type T = bf16; } [128, 2] => prefill::<T, T, 64, 48, 2, false, false, true>;
    prefill_d64_f16_split { type T = f16; } [128, 2] => prefill::<T, T, 64, 48, 2, false, false, true>;
    prefill_d96_bf16_split { type T = bf16; } [128, 2] => prefill::<T, T, 96, 32, 2, false, false, true>;
    prefill_d96_f16_split { type T = f16; } [128, 2] => prefill::<T, T, 96, 32, 2, false, false, true>;
    prefill_d128_bf16_split { type T = bf16; } [128, 2] => prefill::<T, T, 128, 32, 2, false, false, true>;
    prefill_d128_f16_split { type T = f16; } [128, 2] => prefill::<T, T, 128, 32, 2, false, false, true>;
    prefill_d192_bf16_split { type T = bf16; } [128, 1] => prefill::<T, T, 192, 32, 1, false, false, true>;
    prefill_d192_f16_split { type T = f16; } [128, 1] => prefill::<T, T, 192, 32, 1, false, false, true>;
    prefill_d256_bf16_split { type T = bf16; } [128, 1] => prefill::<T, T, 256, 16, 1, false, false, true>;
    prefill_d256_f16_split { type T = f16; } [128, 1] => prefill::<T, T, 256, 16, 1, false, false, true>;
    prefill_d64_bf16_8 { type T = bf16; } [128, 2] => prefill::<T, f16, 64, 32, 2, true, false, false>;
    prefill_d64_f16_8 { type T = f16; } [128, 2] => prefill::<T, f16, 64, 32, 2, true, false, false>;
    prefill_d128_bf16_8 { type T = bf16; } [128, 2] => prefill::<T, f16, 128, 32, 2, true, false, false>;
    prefill_d128_f16_8 { type T = f16; } [128, 2] => prefill::<T, f16, 128, 32, 2, true, false, false>;
    prefill_d256_bf16_8 { type T = bf16; } [128, 1] => prefill::<T, f16, 256, 16, 1, true, false, false>;
    prefill_d256_f16_8 { type T = f16; } [128, 1] => prefill::<T, f16, 256, 16, 1, true, false, false>;
    prefill_d64_bf16_8_split { type T = bf16; } [128, 2] => prefill::<T, f16, 64, 32, 2, true, false, true>;
    prefill_d64_f16_8_split { type T = f16; } [128, 2] => prefill::<T, f16, 64, 32, 2, true, false, true>;
    prefill_d128_bf16_8_split { type T = bf16; } [128, 2] => prefill::<T, f16, 128, 32, 2, true, false, true>;
    prefill_d128_f16_8_split { type T = f16; } [128, 2] => prefill::<T, f16, 128, 32, 2, true, false, true>;
    prefill_d256_bf16_8_split { type T = bf16; } [128, 1] => prefill::<T, f16, 256, 16, 1, true, false, true>;
    prefill_d256_f16_8_split { type T = f16; } [128, 1] => prefill::<T, f16, 256, 16, 1, true, false, true>;
    prefill_d64_bf16_x { type T = bf16; } [128, 2] => prefill::<T, T, 64, 48, 2, false, true, false>;
    prefill_d64_f16_x { type T = f16; } [128, 2] => prefill::<T, T, 64, 48, 2, false, true, false>;
    prefill_d128_bf16_x { type T = bf16; } [128, 2] => prefill::<T, T, 128, 32, 2, false, true, false>;
    prefill_d128_f16_x { type T = f16; } [128, 2] => prefill::<T, T, 128, 32, 2, false, true, false>;
    prefill_d256_bf16_x { type T = bf16; } [128, 1] => prefill::<T, T, 256, 16, 1, false, true, false>;
    prefill_d256_f16_x { type T = f16; } [128, 1] => prefill::<T, T, 256, 16, 1, false, true, false>;
    prefill_d64_bf16_8_x { type T = bf16; } [128, 2] => prefill::<T, f16, 64, 32, 2, true, true, false>;
    prefill_d64_f16_8_x { type T = f16; } [128, 2] => prefill::<T, f16, 64, 32, 2, true, true, false>;
    prefill_d128_bf16_8_x { type T = bf16; } [128, 2] => prefill::<T, f16, 128, 32, 2, true, true, false>;
    prefill_d128_f16_8_x { type T = f16; } [128, 2] => prefill::<T, f16, 128, 32, 2, true, true, false>;
    prefill_d256_bf16_8_x { type T = bf16; } [128, 1] => prefill::<T, f16, 256, 16, 1, true, true, false>;
    prefill_d256_f16_8_x { type T = f16; } [128, 1] => prefill::<T, f16, 256, 16, 1, true, true, false>;
    prefill_d64_bf16_x_split { type T = bf16; } [128, 2] => prefill::<T, T, 64, 48, 2, false, true, true>;
    prefill_d64_f16_x_split { type T = f16; } [128, 2] => prefill::<T, T, 64, 48, 2, false, true, true>;
    prefill_d128_bf16_x_split { type T = bf16; } [128, 2] => prefill::<T, T, 128, 32, 2, false, true, true>;
    prefill_d128_f16_x_split { type T = f16; } [128, 2] => prefill::<T, T, 128, 32, 2, false, true, true>;
    prefill_d256_bf16_x_split { type T = bf16; } [128, 1] => prefill::<T, T, 256, 16, 1, false, true, true>;
    prefill_d256_f16_x_split { type T = f16; } [128, 1] => prefill::<T, T, 256, 16, 1, false, true, true>;
    prefill_d64_bf16_8_x_split { type T = bf16; } [128, 2] => prefill::<T, f16, 64, 32, 2, true, true, true>;
    prefill_d64_f16_8_x_split { type T = f16; } [128, 2] => prefill::<T, f16, 64, 32, 2, true, true, true>;
    prefill_d128_bf16_8_x_split { type T = bf16; } [128, 2] => prefill::<T, f16, 128, 32, 2, true, true, true>;
    prefill_d128_f16_8_x_split { type T = f16; } [128, 2] => prefill::<T, f16, 128, 32, 2, true, true, true>;
    prefill_d256_bf16_8_x_split { type T = bf16; } [128, 1] => prefill::<T, f16, 256, 16, 1, true, true, true>;
    prefill_d256_f16_8_x_split { type T = f16; } [128, 1] => prefill::<T, f16, 256, 16, 1, true, true, true>;
}
