//! Attention of chunks of query tokens over a paged KV cache, by Hopper's warpgroup products.
//!
//! # Block
//! A producer warpgroup and two consumers. The producer's first warp finds the block's tiles
//! ([`Schedule`]), looks up their pages and has the copy engine bring Q, K and V to shared memory.
//! A consumer has 64 query rows. A tile's rows are the query heads of one KV head, packed: row `r` is head `r % group` of
//! token `r / group`. So all heads of a group share K and V however few tokens there are, a tile spans few tokens, and with
//! causal attention few of its blocks of keys are masked.
//!
//! # Keys in shared memory
//! A block of 128 keys is `128 / page` boxes of one tensor map of five dimensions: 64 columns (a line of the swizzle),
//! 8 keys, the halves of the head, groups of 8 keys of the page, pages. A box is a page (or 128 of its keys), so pages
//! lie one after another as if the cache were contiguous: the atom of 8 keys × 64 columns `(group, half)` is number
//! `group * halves + half`, which the products' descriptors take as a stride. Pages that do not exist are outside of the
//! tensor and become zeros; what follows a sequence's end in its last page is overwritten with zeros.
//!
//! # Schedule
//! A consumer issues `S = Q Kᵀ` of the next block and `O += P V` of the last one together, then does the softmax of the
//! next block while the tensor cores work on the second product; named barriers have the consumers take turns in issuing,
//! so that one's softmax falls into the other's products. P goes from the accumulators of the first product to the A
//! registers of the second without a shuffle. Blocks go from right to left: the masked ones come first. Q and the output
//! share memory, which is there twice: the producer fetches the next tile's Q and first keys during the last blocks of a
//! tile.
//!
//! Maxima follow the scores with slack: O is rescaled only once a row's maximum has grown by a factor of 2^8, which seldom
//! happens after the first block; a common factor of numerator and denominator is no error. Sources: Shah et al.,
//! *FlashAttention-3*, 2024 (roles, turns, overlap of softmax and products); FlashAttention-4 (slack). What was measured is
//! in `docs/prefill-attention.md`.

use super::ragged::{Batch, Schedule, Tile, draw, finish};
use super::soft_capped;
use crate::tensor_float::TensorFloat;
use core::f32::consts::{LN_2, LOG2_E};
use cuda_std::shared::Carver;
use cuda_std::tma::{Swizzle, TensorMap};
use cuda_std::vec::B128;
use cuda_std::wgmma::{self, Accumulator, Descriptor, K, Mn};
use cuda_std::{Global, GlobalMut, Shared, bf16, entries, f16, float, mbarrier, mma, thread, tma, unroll, warp};

/// Consumer warpgroups of a block.
const CONSUMERS: usize = 2;
/// Threads of a block: the consumers and a producer warpgroup.
pub const THREADS: usize = 128 * (1 + CONSUMERS);
/// Query rows of a tile.
pub const ROWS: usize = 64 * CONSUMERS;
/// Keys of a block of keys.
pub const KEYS: usize = 128;
/// Tiles of Q in shared memory.
const Q_STAGES: u32 = 2;
/// Blocks of K, and of V, in shared memory.
const STAGES: u32 = 2;
/// A consumer thread's scores of a block.
type Scores = [f32; KEYS / 2];
/// Words that say what a tile is.
const WORDS: usize = 8;
/// By how much (as an exponent of 2) a maximum may be exceeded.
const SLACK: f32 = 8.0;

/// Dynamic shared memory of a block.
pub const fn shared_bytes(head_dim: usize) -> usize {
    (Q_STAGES as usize * ROWS + 2 * STAGES as usize * KEYS) * head_dim * 2 + 512
}

/// Barriers, by number.
const Q_FULL: u32 = 0;
const Q_EMPTY: u32 = Q_FULL + Q_STAGES;
const K_FULL: u32 = Q_EMPTY + Q_STAGES;
const K_EMPTY: u32 = K_FULL + STAGES;
const V_FULL: u32 = K_EMPTY + STAGES;
const V_EMPTY: u32 = V_FULL + STAGES;
const TAIL: u32 = V_EMPTY + STAGES;
const BARRIERS: usize = TAIL as usize + 1;

/// A place in a ring of `N` slots.
#[derive(Clone, Copy)]
struct Ring<const N: u32> {
    slot: u32,
    parity: u32,
}

impl<const N: u32> Ring<N> {
    #[inline(always)]
    fn new() -> Self {
        Self { slot: 0, parity: 0 }
    }

    #[inline(always)]
    fn next(self) -> Self {
        let end = self.slot + 1 == N;
        Self { slot: if end { 0 } else { self.slot + 1 }, parity: self.parity ^ end as u32 }
    }

    /// With its slot known to be that of all lanes.
    #[inline(always)]
    fn uniform(self) -> Self {
        Self { slot: uniform(self.slot), ..self }
    }
}

/// A value that all lanes have, known to be so: matrix descriptors made of it are computed once a warp, not moved from
/// the lanes' registers for each product.
#[inline(always)]
fn uniform(value: u32) -> u32 {
    warp::shfl_idx(value, 0)
}

/// Arguments as for [`prefill`](super::prefill::prefill), except:
///
/// * `q_map`: over `[tokens, q_heads, D]`, boxes of 64 × group × `tile_tokens`; `k_map`, `v_map`: as the module says, in
///   boxes of `min(page, KEYS)` keys; `k_head`, `v_head`: distance of heads in units of 64 elements.
/// * `out`: its vectors start at multiples of 16 bytes.
/// * `tile_tokens * group` is at most [`ROWS`]; `scale` is positive.
///
/// `O` holds the sums of `D` columns. `BENT`: whether there are a soft cap or slopes, which need instructions for every score.
/// Block: [`THREADS`]; any grid; shared memory: [`shared_bytes`] of `D`.
#[inline(always)]
pub unsafe fn prefill<T, O, const D: usize, const BENT: bool>(
    out: *mut T,
    lse: *mut f32,
    q_map: *const TensorMap,
    k_map: *const TensorMap,
    v_map: *const TensorMap,
    starts: *const i32,
    lens: *const i32,
    block_table: *const i32,
    alibi: *const f32,
    sinks: *const f32,
    tickets: *mut u32,
    sequences: u32,
    tokens: u32,
    q_heads: u32,
    kv_heads: u32,
    page_shift: u32,
    max_pages: u32,
    pages: u32,
    tile_tokens: u32,
    out_token: usize,
    out_head: usize,
    k_head: u32,
    v_head: u32,
    scale: f32,
    soft_cap: f32,
    window: u32,
    causal: u32,
    section_keys: u32,
) where
    T: TensorFloat + wgmma::Input,
    O: Accumulator + AsRef<[f32]> + AsMut<[f32]>,
{
    const { assert!(O::N == D && (D == 64 || D == 128)) };
    let halves = const { D as u32 / 64 };
    let tile_rows = const { ROWS as u32 };
    // Bytes of the tile's rows in one half.
    let half_bytes = tile_rows * 128;
    let (q_bytes, kv_bytes) = const { ((ROWS * D * 2) as u32, (KEYS * D * 2) as u32) };
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
    core::hint::assert_unchecked(kv_heads != 0);
    let group = q_heads / kv_heads;
    core::hint::assert_unchecked(group != 0);

    let mut carver = Carver::new();
    let q_tiles = carver.take_aligned::<T>(Q_STAGES as usize * ROWS * D, 1024);
    let k_tiles = carver.take_aligned::<T>(STAGES as usize * KEYS * D, 1024);
    let v_tiles = carver.take_aligned::<T>(STAGES as usize * KEYS * D, 1024);
    let barriers = carver.take::<u64>(BARRIERS);
    let tile_words = carver.take::<u32>(Q_STAGES as usize * WORDS);
    let bad_pages = carver.take::<u32>(STAGES as usize);
    let (q0, k0, v0) = (q_tiles.address(0u32), k_tiles.address(0u32), v_tiles.address(0u32));
    let bar0 = barriers.address(0u32);
    let bar = |kind: u32, slot: u32| bar0 + 8 * (kind + slot);

    let (tid, lane) = (thread::thread_idx_x(), warp::lane_id());
    let warp_id = warp::shfl_idx(tid / 32, 0);
    if tid == 0 {
        // Full: an arrival of the producer. Empty: one of each consumer warp.
        for slot in 0..Q_STAGES {
            mbarrier::init(bar(Q_FULL, slot), 1);
            mbarrier::init(bar(Q_EMPTY, slot), const { 4 * CONSUMERS as u32 });
        }
        for slot in 0..STAGES {
            mbarrier::init(bar(K_FULL, slot), 1);
            mbarrier::init(bar(V_FULL, slot), 1);
            mbarrier::init(bar(K_EMPTY, slot), const { 4 * CONSUMERS as u32 });
            mbarrier::init(bar(V_EMPTY, slot), const { 4 * CONSUMERS as u32 });
        }
        mbarrier::init(bar(TAIL, 0), 1);
        mbarrier::fence_init();
        tma::prefetch_map(q_map);
        tma::prefetch_map(k_map);
        tma::prefetch_map(v_map);
    }
    // Rows that no box fills are read by the products, though nothing of them is stored.
    let filled = tile_tokens * group;
    let mut line = tid;
    while line < Q_STAGES * halves * tile_rows {
        if line % tile_rows >= filled {
            for i in 0..8u32 {
                q_tiles.set_as(line * 64 + 8 * i, B128([0u32; 4]));
            }
        }
        line += const { THREADS as u32 };
    }
    tma::fence_async();
    thread::sync_threads();

    if warp_id < 4 {
        wgmma::decrease_registers::<56>();
        if warp_id == 0 {
            let table = Global::new(block_table);
            let page = 1u32 << page_shift;
            let box_keys = if page < KEYS as u32 { page } else { KEYS as u32 };
            let box_shift = if page < KEYS as u32 { page_shift } else { const { KEYS.ilog2() } };
            let boxes = KEYS as u32 >> box_shift;
            let box_bytes = box_keys * (D as u32 * 2);
            let mut schedule = Schedule::new(&batch, section_keys);
            let mut index = thread::block_idx_x();
            let (mut tiles, mut k_ring, mut v_ring) =
                (Ring::<Q_STAGES>::new(), Ring::<STAGES>::new(), Ring::<STAGES>::new());
            let mut tails = 0;
            loop {
                let found = schedule.find(&batch, index);
                let slot = tiles.slot;
                let words = tile_words.offset(slot * WORDS as u32);
                let Some(tile) = found else {
                    mbarrier::wait_parity(bar(Q_EMPTY, slot), tiles.parity ^ 1);
                    if lane == 0 {
                        words.set(5u32, 0);
                        mbarrier::arrive(bar(Q_FULL, slot));
                        finish(tickets);
                    }
                    break;
                };
                let end = batch.end(&tile, tile.tokens - 1);
                let first = batch.start(batch.end(&tile, 0)) / KEYS as u32;
                // At least one block, which is then wholly masked.
                let blocks = end.div_ceil(KEYS as u32).saturating_sub(first).max(1);
                let last = first + blocks - 1;

                // A lane for each box of a block. Its page: -1 if there is none, which is outside of the tensor.
                let group_of = |block: u32| ((block * KEYS as u32) % page / 8) as i32;
                let row = table.offset(tile.sequence as usize * max_pages as usize);
                let page_of = |block: u32| {
                    let key = block * KEYS as u32 + (lane << box_shift);
                    if lane < boxes && key < tile.len { row.get(key >> page_shift) } else { -1 }
                };
                // Pages are looked up a block ahead of the copies.
                let mut page_v = page_of(last);
                let mut page_k = if blocks > 1 { page_of(last - 1) } else { -1 };
                mbarrier::wait_parity(bar(Q_EMPTY, slot), tiles.parity ^ 1);
                if lane == 0 {
                    words.set(0u32, tile.first);
                    words.set(1u32, tile.tokens);
                    words.set(2u32, tile.len);
                    words.set(3u32, tile.position as u32);
                    words.set(4u32, first);
                    words.set(5u32, blocks);
                    words.set(6u32, tile.kv_head);
                    mbarrier::arrive_expect_tx(bar(Q_FULL, slot), filled * (D as u32 * 2));
                    for half in 0..halves {
                        let to = q0 + slot * q_bytes + half * half_bytes;
                        let at = [64 * half as i32, (tile.kv_head * group) as i32, tile.first as i32];
                        tma::load_tensor::<3>(to, q_map, at, bar(Q_FULL, slot));
                    }
                }
                tiles = tiles.next();

                let checked = |page: i32| if (page as u32) < pages { page } else { -1 };
                let load_k = |block: u32, at: Ring<STAGES>, page: i32| {
                    let stage = at.slot;
                    let key = block * KEYS as u32 + (lane << box_shift);
                    let wrong = lane < boxes && key < tile.len && checked(page) < 0;
                    let wrong = warp::warp_vote_ballot(warp::FULL, wrong);
                    mbarrier::wait_parity(bar(K_EMPTY, stage), at.parity ^ 1);
                    if lane == 0 {
                        bad_pages.set(stage, wrong);
                        mbarrier::arrive_expect_tx(bar(K_FULL, stage), kv_bytes);
                    }
                    warp::sync_warp(warp::FULL);
                    if lane < boxes {
                        let to = k0 + stage * kv_bytes + lane * box_bytes;
                        let at = [0, 0, (tile.kv_head * k_head) as i32, group_of(block), checked(page)];
                        tma::load_tensor::<5>(to, k_map, at, bar(K_FULL, stage));
                    }
                };
                let mut block = last;
                load_k(block, k_ring, page_v);
                k_ring = k_ring.next();
                let mut drawn = 0;
                loop {
                    let more = block > first;
                    if more {
                        load_k(block - 1, k_ring, page_k);
                        k_ring = k_ring.next();
                    }
                    let stage = v_ring.slot;
                    mbarrier::wait_parity(bar(V_EMPTY, stage), v_ring.parity ^ 1);
                    v_ring = v_ring.next();
                    // Keys of the last page behind the sequence's end may hold anything, NaN times 0 among it.
                    let beyond = tile.len.wrapping_sub(block * KEYS as u32);
                    let tail = beyond < KEYS as u32 && beyond % box_keys != 0;
                    let full = if tail { bar(TAIL, 0) } else { bar(V_FULL, stage) };
                    if lane == 0 {
                        mbarrier::arrive_expect_tx(full, kv_bytes);
                    }
                    warp::sync_warp(warp::FULL);
                    if lane < boxes {
                        let to = v0 + stage * kv_bytes + lane * box_bytes;
                        let at = [0, 0, (tile.kv_head * v_head) as i32, group_of(block), checked(page_v)];
                        tma::load_tensor::<5>(to, v_map, at, full);
                    }
                    if tail {
                        mbarrier::wait_parity(full, tails % 2);
                        tails += 1;
                        let page_end = (beyond | (box_keys - 1)) + 1;
                        let lines = (page_end - beyond) * halves;
                        let mut i = lane;
                        while i < 8 * lines {
                            let (key, half) = (beyond + i / 8 / halves, i / 8 % halves);
                            let at = ((key / 8 * halves + half) * 8 + key % 8) * 64 + i % 8 * 8;
                            v_tiles.offset(stage * (kv_bytes / 2)).set_as(at, B128([0u32; 4]));
                            i += 32;
                        }
                        tma::fence_async();
                        warp::sync_warp(warp::FULL);
                        if lane == 0 {
                            mbarrier::arrive(bar(V_FULL, stage));
                        }
                    }
                    // The number of the next tile is on its way until it is needed.
                    if block == last && lane == 0 {
                        drawn = draw(tickets);
                    }
                    page_v = page_k;
                    page_k = if block > first + 1 { page_of(block - 2) } else { -1 };
                    if !more {
                        break;
                    }
                    block -= 1;
                }
                index = warp::shfl_idx(drawn, 0);
            }
        }
    } else {
        wgmma::increase_registers::<224>();
        let me = warp_id / 4 - 1;
        let (g, t) = (lane / 4, lane % 4);
        // This thread's rows of the tile: this one and eight further.
        let row = me * 64 + warp_id % 4 * 16 + g;
        // What makes scores exponents of 2; those that were bent already are.
        let fold = if BENT { 1.0 } else { scale * LOG2_E };
        let (q, k, v) = (
            Descriptor::<K>::new(q0 + me * (64 * 128)),
            Descriptor::<K>::new(k0).with_stride(1024 * halves),
            Descriptor::<Mn>::new(v0, 1024).with_stride(1024 * halves),
        );
        // What the producer wrote, read by the lane that says when it may be overwritten: compute-sanitizer's racecheck does
        // not see that the others are ordered by the barrier of the warp.
        let by_one = |words: Shared<u32>, i: u32| warp::shfl_idx(if lane == 0 { words.get(i) } else { 0 }, 0);
        // After what all lanes have read.
        let release = |kind: u32, slot: u32| {
            warp::sync_warp(warp::FULL);
            if lane == 0 {
                mbarrier::arrive(bar(kind, slot));
            }
        };
        // The consumers issue in turn; the first begins.
        let turn_after = if me + 1 == CONSUMERS as u32 { 1 } else { 2 + me };
        if turn_after == 1 {
            thread::arrive_named(1, 256);
        }
        let (mut tiles, mut k_ring) = (Ring::<Q_STAGES>::new(), Ring::<STAGES>::new());
        loop {
            let Ring { slot, parity } = tiles.uniform();
            tiles = tiles.next();
            mbarrier::wait_parity(bar(Q_FULL, slot), parity);
            let word = |i: u32| by_one(tile_words, slot * WORDS as u32 + i);
            let blocks = word(5);
            if blocks == 0 {
                break;
            }
            let first_block = word(4);
            let tile = Tile {
                sequence: 0,
                kv_head: word(6),
                first: word(0),
                tokens: word(1),
                len: word(2),
                position: word(3) as i32,
            };
            let q = q.offset(slot * q_bytes);
            let ends = [batch.end(&tile, row / group), batch.end(&tile, (row + 8) / group)];
            // Other rows, perhaps of the next sequence, must not decide when these are rescaled, which shows in roundings.
            let there = [row / group < tile.tokens, (row + 8) / group < tile.tokens];
            // Blocks that every row of the tile sees all of.
            let whole_end = batch.end(&tile, 0) / KEYS as u32;
            let whole_start = batch.start(batch.end(&tile, tile_tokens - 1)).div_ceil(KEYS as u32);

            let mut s = Scores::zero();
            let mut o = O::zero();
            let mut top = [f32::NEG_INFINITY; 2];
            let mut sum = [0f32; 2];

            let scores = |s: &mut Scores, stage: u32| {
                let k = k.offset(stage * kv_bytes);
                s.multiply::<T, 4, _, _>(q, k, false);
                if D > 64 {
                    s.multiply::<T, 4, _, _>(q.offset(half_bytes), k.offset(1024), true);
                }
            };
            let values = |o: &mut O, p: &[[u32; 4]; KEYS / 16], stage: u32| {
                let v = v.offset(stage * kv_bytes);
                o.multiply_registers::<T, 4, _>([p[0], p[1], p[2], p[3]], v, true);
                o.multiply_registers::<T, 4, _>([p[4], p[5], p[6], p[7]], v.advance(4), true);
            };
            // Slopes of this thread's rows, as exponents of 2, and the places of their tokens.
            let (mut slopes, mut places) = ([0f32; 2], [0i32; 2]);
            if BENT {
                unroll::<2>(|h| {
                    let (token, head) = ((row + 8 * h as u32) / group, (row + 8 * h as u32) % group);
                    places[h] = tile.position + token as i32;
                    if !alibi.is_null() && there[h] {
                        slopes[h] = Global::new(alibi).get(tile.kv_head * group + head) * LOG2_E;
                    }
                });
            }
            // Scores become exponents of 2.
            let bend = |s: &mut Scores, block: u32| {
                unroll::<2>(|h| {
                    let distance = (block * KEYS as u32 + 2 * t) as i32 - places[h];
                    for j in 0..KEYS / 8 {
                        unroll::<2>(|c| {
                            let e = 4 * j + 2 * h + c;
                            let bias = slopes[h] * (distance + (8 * j + c) as i32) as f32;
                            s[e] = float::fma(soft_capped(s[e] * scale, soft_cap), LOG2_E, bias);
                        });
                    }
                });
            };
            // What a row does not see becomes -inf.
            let mask = |s: &mut Scores, block: u32, wrong: u32| {
                let base = (block * KEYS as u32 + 2 * t) as i32;
                unroll::<2>(|h| {
                    let end = ends[h] as i32 - base;
                    let start = batch.start(ends[h]) as i32 - base;
                    for j in 0..KEYS / 8 {
                        unroll::<2>(|c| {
                            let (key, e) = ((8 * j + c) as i32, 4 * j + 2 * h + c);
                            s[e] = if key < end && key >= start { s[e] } else { f32::NEG_INFINITY };
                        });
                    }
                });
                if wrong != 0 {
                    let box_shift = page_shift.min(const { KEYS.ilog2() });
                    for j in 0..KEYS / 8 {
                        let unseen = wrong >> ((8 * j as u32) >> box_shift) & 1 != 0;
                        unroll::<4>(|e| s[4 * j + e] = if unseen { f32::NEG_INFINITY } else { s[4 * j + e] });
                    }
                }
            };
            // V takes the slots that K took a block before.
            let mut v_ring = k_ring.uniform();
            mbarrier::wait_parity(bar(K_FULL, v_ring.slot), v_ring.parity);
            scores(&mut s, v_ring.slot);
            let mut wrong = by_one(bad_pages, v_ring.slot);
            wgmma::wait::<0>(&mut s);
            release(K_EMPTY, v_ring.slot);
            k_ring = v_ring.next();
            let last_block = first_block + blocks - 1;
            let mut block = last_block;
            let mut p = [[0u32; 4]; KEYS / 16];
            // Its loop begins behind the products, so that what they need is known to be uniform long before them.
            loop {
                let (k_slot, v_slot) = (uniform(k_ring.slot), uniform(v_ring.slot));
                if BENT {
                    bend(&mut s, block);
                }
                if block >= whole_end || block < whole_start || wrong != 0 {
                    mask(&mut s, block, wrong);
                }
                let mut new = [0f32; 2];
                unroll::<2>(|h| {
                    let mut m = [f32::NEG_INFINITY; 2];
                    for j in 0..KEYS / 8 {
                        unroll::<2>(|c| m[c] = float::max(m[c], s[4 * j + 2 * h + c]));
                    }
                    let m = float::max(m[0], m[1]);
                    let m = float::max(m, warp::shfl_xor(m, 1));
                    new[h] = float::max(float::max(m, warp::shfl_xor(m, 2)), top[h]);
                });
                let grows = |h: usize| there[h] && (new[h] - top[h]) * fold > SLACK;
                let rescale = warp::warp_vote_any(warp::FULL, grows(0) || grows(1));
                // The last block's second product, which ran meanwhile.
                wgmma::wait::<0>(&mut o);
                if block != last_block {
                    release(V_EMPTY, (v_slot + (STAGES - 1)) % STAGES);
                }
                if rescale {
                    let o = o.as_mut();
                    unroll::<2>(|h| {
                        // Nothing seen yet: 0 times anything finite.
                        let old = top[h];
                        let factor =
                            if old == f32::NEG_INFINITY { 0.0 } else { float::fast::exp2((old - new[h]) * fold) };
                        top[h] = new[h];
                        sum[h] *= factor;
                        for j in 0..D / 8 {
                            unroll::<2>(|c| o[4 * j + 2 * h + c] *= factor);
                        }
                    });
                }
                // Scores become probabilities, relative to the maximum so far.
                let reference = |h: usize| if top[h] == f32::NEG_INFINITY { 0.0 } else { -(top[h] * fold) };
                let reference = [reference(0), reference(1)];
                let mut part = [[0f32; 2]; 2];
                for step in 0..KEYS / 16 {
                    unroll::<4>(|i| {
                        let e = 8 * step + 2 * i;
                        let exponent = |s: f32| float::fma(s, fold, reference[i % 2]);
                        let (x, y) = (float::fast::exp2(exponent(s[e])), float::fast::exp2(exponent(s[e + 1])));
                        part[i % 2][0] += x;
                        part[i % 2][1] += y;
                        p[step][i] = T::pack_f32(x, y);
                    });
                }
                unroll::<2>(|h| sum[h] += part[h][0] + part[h][1]);
                if block == first_block {
                    break;
                }
                block -= 1;

                mbarrier::wait_parity(bar(K_FULL, k_slot), k_ring.parity);
                wrong = by_one(bad_pages, k_slot);
                thread::sync_named(1 + me, 256);
                scores(&mut s, k_slot);
                mbarrier::wait_parity(bar(V_FULL, v_slot), v_ring.parity);
                values(&mut o, &p, v_slot);
                thread::arrive_named(turn_after, 256);
                v_ring = k_ring;
                k_ring = k_ring.next();
                // The second product's two groups may go on.
                wgmma::wait::<2>(&mut s);
                release(K_EMPTY, k_slot);
            }
            let stage = v_ring.slot;
            mbarrier::wait_parity(bar(V_FULL, stage), v_ring.parity);
            values(&mut o, &p, stage);

            // Denominators while the last product runs.
            let mut inverse = [0f32; 2];
            unroll::<2>(|h| {
                let total = sum[h] + warp::shfl_xor(sum[h], 1);
                let total = total + warp::shfl_xor(total, 2);
                let (token, head) = ((row + 8 * h as u32) / group, (row + 8 * h as u32) % group);
                let head = tile.kv_head * group + head;
                let there = token < tile.tokens;
                let sink =
                    if !sinks.is_null() && there { Global::new(sinks).get(head) * LOG2_E } else { f32::NEG_INFINITY };
                let seen = float::max(top[h] * fold, f32::MIN);
                let reference = float::max(seen, sink);
                let shrink = float::fast::exp2(seen - reference);
                let whole = float::fma(total, shrink, float::fast::exp2(sink - reference));
                inverse[h] = if whole > 0.0 { float::fast::div(shrink, whole) } else { 0.0 };
                if !lse.is_null() && there && t == 0 {
                    let value = if whole > 0.0 { (reference + float::log2(whole)) * LN_2 } else { f32::NEG_INFINITY };
                    GlobalMut::new(lse).set((tile.first + token) as usize * q_heads as usize + head as usize, value);
                }
            });
            wgmma::wait::<0>(&mut o);
            release(V_EMPTY, stage);

            // Out through the memory of Q, which both warpgroups have read: each its own rows.
            thread::sync_named(const { 1 + CONSUMERS as u32 } + me, 128);
            let rows = q_tiles.offset(slot * (q_bytes / 2) + me * (64 * 64) + warp_id % 4 * (16 * 64));
            let o = o.as_ref();
            for half in 0..D / 64 {
                unroll::<4>(|pair| {
                    let at = |i: usize| 4 * (8 * half + 2 * pair) + 2 * i;
                    let word = |i: usize| T::pack_f32(o[at(i)] * inverse[i % 2], o[at(i) + 1] * inverse[i % 2]);
                    // Matrices: rows, rows + 8, then the next eight columns.
                    let (r, column) = (lane % 16, 2 * pair as u32 + lane / 16);
                    let to = Swizzle::B128.apply(r * 128 + column * 16);
                    mma::stmatrix_x4(
                        rows.address(half * (half_bytes as usize / 2)) + to,
                        [word(0), word(1), word(2), word(3)],
                    );
                });
            }
            warp::sync_warp(warp::FULL);
            let out = GlobalMut::new(out);
            let pieces = const { D as u32 / 8 };
            for i in 0..D / 16 {
                let at = i as u32 * 32 + lane;
                let (r, column) = (at / pieces, at % pieces);
                let from = Swizzle::B128.apply(r * 128 + column % 8 * 16) / 2 + column / 8 * (half_bytes / 2);
                let value = rows.get_as::<B128<u32, 4>>(from);
                let r = me * 64 + warp_id % 4 * 16 + r;
                let (token, head) = (r / group, tile.kv_head * group + r % group);
                if token < tile.tokens {
                    let to = (tile.first + token) as usize * out_token + head as usize * out_head;
                    out.set_as(to + column as usize * 8, value);
                }
            }
            tma::fence_async();
            release(Q_EMPTY, slot);
        }
        // Every arrival is waited for.
        if me == 0 {
            thread::sync_named(1, 256);
        }
    }
}

entries! {
    /// Arguments of every `prefill_wgmma_*` entry; see [`prefill`].
    pub struct Args<T>(
        out: *mut T, lse: *mut f32, q_map: TensorMap, k_map: TensorMap, v_map: TensorMap, starts: *const i32,
        lens: *const i32, block_table: *const i32, alibi: *const f32, sinks: *const f32, tickets: *mut u32, sequences: u32, tokens: u32, q_heads: u32,
        kv_heads: u32, page_shift: u32, max_pages: u32, pages: u32, tile_tokens: u32, out_token: usize, out_head: usize, k_head: u32,
        v_head: u32, scale: f32, soft_cap: f32, window: u32, causal: u32, section_keys: u32,
    );
    prefill_wgmma_d128_bf16 { type T = bf16; } [384, 1; Sm90a] => prefill::<T, [f32; 64], 128, false>;
    prefill_wgmma_d128_bf16_bent { type T = bf16; } [384, 1; Sm90a] => prefill::<T, [f32; 64], 128, true>;
    prefill_wgmma_d128_f16 { type T = f16; } [384, 1; Sm90a] => prefill::<T, [f32; 64], 128, false>;
    prefill_wgmma_d128_f16_bent { type T = f16; } [384, 1; Sm90a] => prefill::<T, [f32; 64], 128, true>;
    prefill_wgmma_d64_bf16 { type T = bf16; } [384, 1; Sm90a] => prefill::<T, [f32; 32], 64, false>;
    prefill_wgmma_d64_bf16_bent { type T = bf16; } [384, 1; Sm90a] => prefill::<T, [f32; 32], 64, true>;
    prefill_wgmma_d64_f16 { type T = f16; } [384, 1; Sm90a] => prefill::<T, [f32; 32], 64, false>;
    prefill_wgmma_d64_f16_bent { type T = f16; } [384, 1; Sm90a] => prefill::<T, [f32; 32], 64, true>;
}
