//! Attention of chunks of query tokens over a paged KV cache, by Hopper's warpgroup products.
//!
//! # Block
//! A producer warpgroup and two or three consumers ([`Shape`]). A warp of the producer finds the block's tiles ([`Schedule`]), one
//! has the copy engine bring Q and K to shared memory and one V; each of these looks up the pages.
//! A consumer has 64 query rows. A tile's rows are the query heads of one KV head, packed: row `r` is head `r % group` of
//! token `r / group`. So all heads of a group share K and V however few tokens there are, a tile spans few tokens, and with
//! causal attention few of its blocks of keys are masked.
//!
//! # Keys in shared memory
//! A block of keys is as many boxes of one tensor map of five dimensions as it has pages: a line of the swizzle (64 columns, or
//! 32 for heads of 96), 8 keys, the lines (parts) of the head, groups of 8 keys of the page, pages. A box is a page (or so
//! many of its keys as a block has), so pages lie one after another as if the cache were contiguous: the atom of 8 keys × a
//! line `(group, part)` is number `group * parts + part`, which the products' descriptors take as a stride. Pages that do not
//! exist are outside of the tensor and become zeros, and so are those before the window of a tile's first token; what is before that
//! window in its first page or follows a sequence's end in its last one is overwritten with zeros.
//!
//! Of a cache of 8-bit elements the boxes are rows, half a block at a time, and a warpgroup of its own widens them to
//! f16 in the layout above, which holds all three types exactly. The consumers bring a Q of bf16 into f16's range first.
//!
//! # Parts of the keys
//! Instances named `_split` divide the keys of few tiles ([`ragged`](super::ragged)). A consumer leaves maxima, denominators and
//! sums as its threads have them; the last one goes on with all parts' as if they were its own.
//!
//! # Schedule
//! A consumer issues `S = Q Kᵀ` of the next block and `O += P V` of the last one together, then does the softmax of the
//! next block while the tensor cores work on the second product; named barriers have the consumers take turns in issuing,
//! so that one's softmax falls into the other's products. P goes from the accumulators of the first product to the A
//! registers of the second without a shuffle. Blocks go from right to left: the masked ones come first. Q and the output
//! share memory, which is there twice: the producer fetches the next tile's Q and first keys during the last blocks of a
//! tile. The copy engine takes the output from there while the next tile's first scores are computed; where a warp's rows
//! are not all of the tile, or no whole tokens, the warp stores them itself.
//!
//! A short tile is as long as what comes once a tile: that is why finding the next one has a warp of its own, why most of the
//! last block's keys are masked 32 at a time, and why rows become tokens by a product.
//!
//! Maxima follow the scores with slack: O is rescaled only once a row's maximum has grown by a factor of 2^8, which seldom
//! happens after the first block; a common factor of numerator and denominator is no error. Sources: Shah et al.,
//! *FlashAttention-3*, 2024 (roles, turns, overlap of softmax and products); FlashAttention-4 (slack). What was measured is
//! in `docs/prefill-attention.md`.

use super::decode::CacheOperand;
use super::ragged::{Batch, Schedule, Tile, draw, finish, last_of_parts, weight_of_part};
use super::{capped, fit_factors, narrow};
use crate::tensor_float::TensorFloat;
use core::f32::consts::{LN_2, LOG2_E};
use cuda_std::shared::Carver;
use cuda_std::tma::{Swizzle, TensorMap};
use cuda_std::vec::B128;
use cuda_std::wgmma::{self, Accumulator, Descriptor, K, Mn};
use cuda_std::{
    E4M3, E5M2, Global, GlobalMut, Shared, bf16, dependent_launch, entries, f16, float, integer, mbarrier, mma, thread,
    tma, unroll, vec, warp,
};

/// How an instance divides the work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Columns of Q, K and V: head sizes up to this.
    pub head_dim: usize,
    /// Keys of a block of keys.
    pub keys: usize,
    /// Consumer warpgroups of a block.
    pub consumers: usize,
    /// Tiles of Q in shared memory.
    pub q_stages: usize,
    /// Blocks of K, and of V, in shared memory.
    pub stages: usize,
    /// Whether the cache is of 8-bit elements.
    pub narrow: bool,
}

impl Shape {
    /// Threads of a block: a producer warpgroup, one of wideners for 8-bit elements, and the consumers.
    pub const fn threads(self) -> usize {
        128 * (1 + self.narrow as usize + self.consumers)
    }

    /// Query rows of a tile.
    pub const fn rows(self) -> usize {
        64 * self.consumers
    }

    /// Columns of a line of the swizzle.
    pub const fn line(self) -> usize {
        if self.head_dim.is_multiple_of(64) { 64 } else { 32 }
    }

    /// How lines are swizzled.
    pub const fn swizzle(self) -> Swizzle {
        if self.line() == 64 { Swizzle::B128 } else { Swizzle::B64 }
    }

    /// Keys that a box has at most: what divides a block, or of 8-bit elements half of one.
    pub const fn box_keys(self) -> usize {
        1 << (self.keys.trailing_zeros() - self.narrow as u32)
    }

    /// Dynamic shared memory of a block.
    pub const fn shared_bytes(self) -> usize {
        // Two blocks of 8-bit elements, of K and of V.
        let narrow = if self.narrow { 2 * self.keys * self.head_dim } else { 0 };
        (self.q_stages * self.rows() + 2 * self.stages * self.keys) * self.head_dim * 2 + narrow + 512
    }
}

/// Floats of a block's [partial result](prefill): of each thread of its consumers the sums of `D / 2` columns, and of two rows maximum and
/// denominator.
pub const fn partial_floats(head_dim: usize, consumers: usize) -> usize {
    consumers * 128 * (head_dim / 2 + 4)
}

/// Halves of a block of 8-bit elements in shared memory, of K and of V.
const RAW_STAGES: u32 = 2;
/// Warps that widen 8-bit elements: a warpgroup.
const WIDENERS: u32 = 4;
/// Words that say what a tile is, ...
const WORDS: usize = 12;
/// ... and of how many tiles there are such words.
const TOLD: u32 = 2;
/// By how much (as an exponent of 2) a maximum may be exceeded.
const SLACK: f32 = 8.0;
/// Exponents of 2 beyond which a unit in the last place is 2 or more.
const FAR: f32 = 16_777_216.0;

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

/// What a widener is told of half a block of 8-bit elements: where the keys that there are end, ...
const KEYS_END: u32 = 0xff;
/// ... by how many bits where they begin is above that, ...
const KEYS_START: u32 = 8;
/// ... whether the block is a tile's last one, ...
const LAST: u32 = 1 << 16;
/// ... or that there is no block.
const OVER: u32 = 1 << 17;

/// A warp's share of widening `KEYS` keys of `PARTS * 64` 8-bit elements, which lie row after row, to lines of 64 elements
/// of 16 bits. Keys but those from `start` to `end` become zeros.
#[inline(always)]
unsafe fn widen<P: TensorFloat, C: CacheOperand, const KEYS: usize, const PARTS: usize>(
    raw: Shared<u8>,
    to: Shared<P>,
    share: u32,
    start: u32,
    end: u32,
) {
    const { assert!(KEYS == 16 * WIDENERS as usize) };
    let lane = warp::lane_id();
    // Eight rows of this warp, then eight of each of the others. A lane takes pieces of 16 elements, here of its first row.
    // Eight lanes take half of the line of two rows each, so that they meet all banks both in reading and writing.
    let (row, piece) = if PARTS == 1 {
        (lane / 4, lane % 4)
    } else {
        let (second, other) = (lane / 4 % 2, lane / 8 % 2);
        (lane / 16 * 2 + second, lane % 4 + 4 * (second ^ other))
    };
    let from = raw.offset((share * 8 + row) * const { PARTS as u32 * 64 } + piece * 16);
    let to = to.offset((share * PARTS as u32 + piece / 4) * 512);
    // A lane's rows of eight are so far apart.
    let apart = const { 8 / PARTS as u32 };
    let mut words = [[[0u32; 4]; PARTS]; 2];
    unroll::<2>(|i| {
        unroll::<PARTS>(|r| {
            let at = (i as u32 * const { 8 * WIDENERS } + r as u32 * apart) * const { PARTS as u32 * 64 };
            let B128(w) = from.get_as::<B128<u32, 4>>(at);
            words[i][r] = w;
        });
    });
    unroll::<PARTS>(|r| {
        let row = row + r as u32 * apart;
        let at = |half: u32| row * 64 + ((piece % 4 * 2 + half) ^ row) * 8;
        let (first, second) = (to.offset(at(0)), to.offset(at(1)));
        unroll::<2>(|i| {
            let mut wide = [0u32; 8];
            unroll::<4>(|j| [wide[2 * j], wide[2 * j + 1]] = C::operands(words[i][r][j]));
            let before = i as u32 * const { 8 * WIDENERS };
            let key = before + share * 8 + row;
            if end - start < const { KEYS as u32 } && key.wrapping_sub(start) >= end - start {
                wide = [0; 8];
            }
            let at = before * const { PARTS as u32 * 64 };
            first.set_as(at, B128([wide[0], wide[1], wide[2], wide[3]]));
            second.set_as(at, B128([wide[4], wide[5], wide[6], wide[7]]));
        });
    });
}

/// Arguments as for [`prefill`](super::prefill::prefill), except:
///
/// * `q_map`: over `[tokens, q_heads, head_dim]`, boxes of a line × group × `tile_tokens`; `out_map`: over `out`, which has this
///   shape too, boxes of a line × group × `16 / group` if group divides 16, else not used; `k_map`, `v_map`: of 16-bit
///   elements as the module says, in boxes of `min(page, Shape::box_keys)` keys; of 8-bit elements over `[pages, heads, slots,
///   head_dim]`, in boxes of so many slots by `D` elements. `k_head`, `v_head`: of 16-bit elements, lines from head to head.
/// * `k_scales`, `v_scales`: of 8-bit elements, one or, if `scale_per_head`, one for each KV head; not negative; null for 16
///   bits. `kind`: of the 8-bit elements, a constant of [`narrow`].
/// * `out`: its vectors start at multiples of 16 bytes; `head_dim` is `D`, or a smaller multiple of 16 for 8-bit elements.
/// * `tickets`: 2 words; `SPLIT`: besides, one for each consumer of each block. All are zeros, and are left so.
/// * `partial`: `SPLIT`: [`partial_floats`] for each block, at a multiple of 16 bytes; else not used.
/// * `tile_tokens * group` is at most [`Shape::rows`]; `scale` is positive.
///
/// Operands of the products are of type `P`: `T`, or f16 where the cache has 8-bit elements (`NARROW`), which f16 holds
/// exactly; then `Q` is scaled row by row to fit. `S` holds the scores of `KEYS` keys, `O` the sums of `D` columns. `BENT`:
/// whether there are a soft cap or slopes, which need instructions for every score.
/// Block: [`Shape::threads`]; any grid; shared memory: [`Shape::shared_bytes`].
#[inline(always)]
pub unsafe fn prefill<
    T: TensorFloat,
    P: TensorFloat + wgmma::Input,
    S,
    O,
    const D: usize,
    const LINE: usize,
    const PARTS: usize,
    const KEYS: usize,
    const CONSUMERS: usize,
    const Q_STAGES: u32,
    const STAGES: u32,
    const NARROW: bool,
    const BENT: bool,
    const SPLIT: bool,
>(
    out: *mut T,
    lse: *mut f32,
    out_map: *const TensorMap,
    q_map: *const TensorMap,
    k_map: *const TensorMap,
    v_map: *const TensorMap,
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
    S: Accumulator + AsRef<[f32]> + AsMut<[f32]>,
    O: Accumulator + AsRef<[f32]> + AsMut<[f32]>,
{
    const { assert!(O::N == D && S::N == KEYS && D == LINE * PARTS && (LINE == 64 || LINE == 32)) };
    // As the wideners are written.
    const { assert!(!NARROW || KEYS == 128 && LINE == 64 && PARTS <= 2) };
    let shape = const {
        let (q_stages, stages) = (Q_STAGES as usize, STAGES as usize);
        Shape { head_dim: D, keys: KEYS, consumers: CONSUMERS, q_stages, stages, narrow: NARROW }
    };
    let parts = PARTS as u32;
    // Warpgroups before the consumers.
    let helpers = const { 1 + NARROW as u32 };
    let tile_rows = const { 64 * CONSUMERS as u32 };
    let swizzle = shape.swizzle();
    // Bytes of a line, of eight lines, of the tile's rows in one part.
    let line_bytes = const { 2 * LINE as u32 };
    let (atom, q_part) = (8 * line_bytes, tile_rows * line_bytes);
    let (q_bytes, kv_bytes) = (parts * q_part, const { (2 * KEYS * D) as u32 });
    // Barriers, by number.
    let q_full = 0;
    let q_empty = q_full + Q_STAGES;
    let k_full = q_empty + Q_STAGES;
    let k_empty = k_full + STAGES;
    let v_full = k_empty + STAGES;
    let v_empty = v_full + STAGES;
    let edge_full = v_empty + STAGES;
    // What the tile is.
    let told = edge_full + 1;
    let told_empty = told + TOLD;
    let raw_k_full = told_empty + TOLD;
    let raw_k_empty = raw_k_full + RAW_STAGES;
    let raw_v_full = raw_k_empty + RAW_STAGES;
    let raw_v_empty = raw_v_full + RAW_STAGES;
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
    let q_tiles = carver.take_aligned::<P>(Q_STAGES as usize * 64 * CONSUMERS * D, 1024);
    let k_tiles = carver.take_aligned::<P>(STAGES as usize * KEYS * D, 1024);
    let v_tiles = carver.take_aligned::<P>(STAGES as usize * KEYS * D, 1024);
    let raw_tiles = carver.take_aligned::<u8>(if NARROW { 2 * KEYS * D } else { 0 }, 128);
    let barriers = carver.take::<u64>((raw_v_empty + RAW_STAGES) as usize);
    let tile_words = carver.take::<u32>(TOLD as usize * WORDS);
    let raw_words = carver.take::<u32>(4 * RAW_STAGES as usize);
    let bad_pages = carver.take::<u32>(STAGES as usize);
    let arrived = carver.take::<u32>(CONSUMERS);
    let (q0, k0, v0) = (q_tiles.address(0u32), k_tiles.address(0u32), v_tiles.address(0u32));
    let raw0 = raw_tiles.address(0u32);
    let bar0 = barriers.address(0u32);
    let bar = |kind: u32, slot: u32| bar0 + 8 * (kind + slot);

    let (tid, lane) = (thread::thread_idx_x(), warp::lane_id());
    let warp_id = warp::shfl_idx(tid / 32, 0);
    if tid == 0 {
        // Full: an arrival of the producer, or of each widener for each half. Empty: one of each consumer warp, or widener.
        let full_count = if NARROW { 2 * WIDENERS } else { 1 };
        for slot in 0..Q_STAGES {
            mbarrier::init(bar(q_full, slot), 1);
            mbarrier::init(bar(q_empty, slot), const { 4 * CONSUMERS as u32 });
        }
        for slot in 0..TOLD {
            mbarrier::init(bar(told, slot), 1);
            mbarrier::init(bar(told_empty, slot), const { 4 * CONSUMERS as u32 });
        }
        for slot in 0..STAGES {
            mbarrier::init(bar(k_full, slot), full_count);
            mbarrier::init(bar(v_full, slot), full_count);
            mbarrier::init(bar(k_empty, slot), const { 4 * CONSUMERS as u32 });
            mbarrier::init(bar(v_empty, slot), const { 4 * CONSUMERS as u32 });
        }
        mbarrier::init(bar(edge_full, 0), 1);
        for slot in 0..RAW_STAGES {
            mbarrier::init(bar(raw_k_full, slot), 1);
            mbarrier::init(bar(raw_v_full, slot), 1);
            mbarrier::init(bar(raw_k_empty, slot), WIDENERS);
            mbarrier::init(bar(raw_v_empty, slot), WIDENERS);
        }
        mbarrier::fence_init();
        tma::prefetch_map(q_map);
        tma::prefetch_map(k_map);
        tma::prefetch_map(v_map);
        tma::prefetch_map(out_map);
        // What is needed soon: the first access to a page of memory takes long.
        vec::prefetch_l2(starts);
        vec::prefetch_l2(lens);
        vec::prefetch_l2(block_table);
    }
    // Rows that no box fills are read by the products, though nothing of them is stored.
    let filled = tile_tokens * group;
    let mut line = tid;
    while line < Q_STAGES * parts * tile_rows {
        if line % tile_rows >= filled {
            for i in 0..const { LINE as u32 / 8 } {
                q_tiles.set_as(line * LINE as u32 + 8 * i, B128([0u32; 4]));
            }
        }
        line += shape.threads() as u32;
    }
    tma::fence_async();
    // Until here nothing was read that others write.
    dependent_launch::begin();
    thread::sync_threads();

    // What the producer wrote, read by the lane that says when it may be overwritten: compute-sanitizer's racecheck does
    // not see that the others are ordered by the barrier of the warp.
    let by_one = |words: Shared<u32>, i: u32| warp::shfl_idx(if lane == 0 { words.get(i) } else { 0 }, 0);
    if warp_id < 4 {
        match (CONSUMERS, NARROW) {
            (3, _) => wgmma::decrease_registers::<32>(),
            (_, true) => wgmma::decrease_registers::<40>(),
            _ => wgmma::decrease_registers::<56>(),
        }
        // How blocks are cut into boxes.
        let page_size = 1u32 << page_shift;
        let most = shape.box_keys() as u32;
        let box_keys = if page_size < most { page_size } else { most };
        let box_shift = if page_size < most { page_shift } else { most.ilog2() };
        let boxes = KEYS as u32 >> box_shift;
        let box_bytes = box_keys * if NARROW { D as u32 } else { D as u32 * 2 };
        // A lane for each box of a block, which somebody sees from the key `start` on. Its page: -1 if there is none, which is
        // outside of the tensor.
        let key_of = |block: u32| block * KEYS as u32 + (lane << box_shift);
        let wanted = |start: u32, len: u32, block: u32| {
            let key = key_of(block);
            lane < boxes && key < len && key + box_keys > start
        };
        let page_of = |table: Global<i32>, start: u32, len: u32, block: u32| {
            if wanted(start, len, block) { table.get(key_of(block) >> page_shift) } else { -1 }
        };
        let checked = |page: i32| if (page as u32) < pages { page } else { -1 };
        // Has the copy engine bring a block.
        let load = |to: u32, map: *const TensorMap, kv_head: u32, line: u32, block: u32, page: i32, full: u32| {
            warp::sync_warp(warp::FULL);
            if lane < boxes {
                let group = ((key_of(block) & (page_size - 1)) / 8) as i32;
                let at = [0, 0, (kv_head * line) as i32, group, checked(page)];
                tma::load_tensor::<5>(to + lane * box_bytes, map, at, full);
            }
        };
        // Has it bring a block of 8-bit elements, in halves, for the wideners.
        let load_raw = |ring: u32,
                        map: *const TensorMap,
                        kv_head: u32,
                        block: u32,
                        page: i32,
                        count: u32,
                        start: u32,
                        len: u32,
                        word: u32,
                        wrong: u32| {
            let (is_v, round) = (ring, count % 2);
            for half in 0..2u32 {
                let slot = half;
                let full = if is_v != 0 { bar(raw_v_full, slot) } else { bar(raw_k_full, slot) };
                let empty = if is_v != 0 { bar(raw_v_empty, slot) } else { bar(raw_k_empty, slot) };
                mbarrier::wait_parity(empty, round ^ 1);
                let from = block * KEYS as u32 + half * const { KEYS as u32 / 2 };
                let inside = |key: u32| key.saturating_sub(from).min(const { KEYS as u32 / 2 });
                let place = 2 * is_v + slot;
                if lane == 0 {
                    raw_words.set(2 * place, word | inside(start) << KEYS_START | inside(len));
                    raw_words.set(2 * place + 1, wrong);
                    mbarrier::arrive_expect_tx(full, kv_bytes / 4);
                }
                warp::sync_warp(warp::FULL);
                if lane < boxes && lane / (boxes / 2) == half {
                    let slot = (key_of(block) & (page_size - 1)) as i32;
                    let to = raw0 + is_v * (kv_bytes / 2) + lane * box_bytes;
                    tma::load_tensor::<4>(to, map, [0, slot, kv_head as i32, checked(page)], full);
                }
            }
        };
        core::hint::assert_unchecked(boxes >= 2 || !NARROW);
        if warp_id == 2 {
            // Finds tiles, one ahead of those that bring them.
            let mut schedule = Schedule::new(&batch, section_keys);
            let most_parts = if SPLIT { batch.most_parts() } else { 1 };
            let mut index = thread::block_idx_x();
            let mut tiles = Ring::<TOLD>::new();
            let next = || {
                let drawn = if lane == 0 { draw(tickets) } else { 0 };
                warp::shfl_idx(drawn, 0)
            };
            loop {
                core::hint::assert_unchecked(most_parts != 0);
                let found = schedule.find(&batch, index / most_parts);
                let part = found.and_then(|tile| batch.part(&tile, KEYS as u32, index % most_parts, most_parts));
                if SPLIT && found.is_some() && part.is_none() {
                    index = next();
                    continue;
                }
                let slot = tiles.slot;
                let words = tile_words.offset(slot * WORDS as u32);
                mbarrier::wait_parity(bar(told_empty, slot), tiles.parity ^ 1);
                tiles = tiles.next();
                let (Some(tile), Some(part)) = (found, part) else {
                    if lane == 0 {
                        words.set(5u32, 0);
                        mbarrier::arrive(bar(told, slot));
                        finish(tickets);
                    }
                    break;
                };
                if lane == 0 {
                    let start = batch.start(batch.end(&tile, 0)).max(part.first * KEYS as u32);
                    words.set(0u32, tile.first);
                    words.set(1u32, tile.tokens);
                    words.set(2u32, tile.len);
                    words.set(3u32, tile.position as u32);
                    words.set(4u32, start);
                    words.set(5u32, part.blocks);
                    words.set(6u32, tile.kv_head);
                    words.set(7u32, tile.sequence);
                    if NARROW {
                        let at = if scale_per_head != 0 { tile.kv_head } else { 0 };
                        words.set(8u32, Global::new(k_scales).get(at).to_bits());
                        words.set(9u32, Global::new(v_scales).get(at).to_bits());
                    }
                    if SPLIT {
                        words.set(10u32, part.of | part.number << 8);
                        words.set(11u32, index - part.number);
                    }
                    mbarrier::arrive(bar(told, slot));
                }
                index = next();
            }
        } else if warp_id == 0 {
            // Brings Q and K.
            let (mut tiles, mut k_ring) = (Ring::<Q_STAGES>::new(), Ring::<STAGES>::new());
            let (mut count, mut known) = (0, Ring::<TOLD>::new());
            loop {
                let slot = tiles.slot;
                mbarrier::wait_parity(bar(told, known.slot), known.parity);
                let word = |i: u32| by_one(tile_words, known.slot * WORDS as u32 + i);
                let blocks = word(5);
                if blocks == 0 {
                    mbarrier::wait_parity(bar(q_empty, slot), tiles.parity ^ 1);
                    if NARROW {
                        mbarrier::wait_parity(bar(raw_k_empty, 0), (count % 2) ^ 1);
                    }
                    if lane == 0 {
                        mbarrier::arrive(bar(q_full, slot));
                        if NARROW {
                            raw_words.set(0u32, OVER);
                            mbarrier::arrive(bar(raw_k_full, 0));
                        }
                    }
                    break;
                }
                let (first_token, len, start, kv_head) = (word(0), word(2), word(4), word(6));
                let first = start / KEYS as u32;
                let last = first + blocks - 1;
                let table = Global::new(block_table).offset(word(7) as usize * max_pages as usize);
                known = known.next();
                // Pages are looked up a block ahead of the copies.
                let mut page = page_of(table, start, len, last);
                let load_k = |block: u32, at: Ring<STAGES>, count: u32, page: i32| {
                    let wrong = wanted(start, len, block) && checked(page) < 0;
                    let wrong = warp::warp_vote_ballot(warp::FULL, wrong);
                    if NARROW {
                        let word = if block == first { LAST } else { 0 };
                        load_raw(0, k_map, kv_head, block, page, count, 0, u32::MAX, word, wrong);
                        return;
                    }
                    mbarrier::wait_parity(bar(k_empty, at.slot), at.parity ^ 1);
                    if lane == 0 {
                        bad_pages.set(at.slot, wrong);
                        mbarrier::arrive_expect_tx(bar(k_full, at.slot), kv_bytes);
                    }
                    load(k0 + at.slot * kv_bytes, k_map, kv_head, k_head, block, page, bar(k_full, at.slot));
                };
                // With a single tile of Q in memory, the one before may still be in use.
                if Q_STAGES == 1 {
                    load_k(last, k_ring, count, page);
                }
                mbarrier::wait_parity(bar(q_empty, slot), tiles.parity ^ 1);
                if lane == 0 {
                    mbarrier::arrive_expect_tx(bar(q_full, slot), filled * (D as u32 * 2));
                    for part in 0..parts {
                        let to = q0 + slot * q_bytes + part * q_part;
                        let at = [(LINE as u32 * part) as i32, (kv_head * group) as i32, first_token as i32];
                        tma::load_tensor::<3>(to, q_map, at, bar(q_full, slot));
                    }
                }
                tiles = tiles.next();
                if Q_STAGES > 1 {
                    load_k(last, k_ring, count, page);
                }
                k_ring = k_ring.next();
                count += 1;
                let mut block = last;
                page = if blocks > 1 { page_of(table, start, len, block - 1) } else { -1 };
                while block > first {
                    block -= 1;
                    let next = if block > first { page_of(table, start, len, block - 1) } else { -1 };
                    load_k(block, k_ring, count, page);
                    k_ring = k_ring.next();
                    count += 1;
                    page = next;
                }
            }
        } else if warp_id == 1 {
            // Brings V.
            let (mut known, mut v_ring) = (Ring::<TOLD>::new(), Ring::<STAGES>::new());
            let (mut count, mut edges) = (0, 0);
            loop {
                let slot = known.slot;
                mbarrier::wait_parity(bar(told, slot), known.parity);
                known = known.next();
                let word = |i: u32| by_one(tile_words, slot * WORDS as u32 + i);
                let blocks = word(5);
                if blocks == 0 {
                    break;
                }
                let (start, len, kv_head) = (word(4), word(2), word(6));
                let first = start / KEYS as u32;
                let table = Global::new(block_table).offset(word(7) as usize * max_pages as usize);
                let mut block = first + blocks;
                let mut next = page_of(table, start, len, block - 1);
                while block > first {
                    block -= 1;
                    let page = next;
                    next = if block > first { page_of(table, start, len, block - 1) } else { -1 };
                    if NARROW {
                        load_raw(1, v_map, kv_head, block, page, count, start, len, 0, 0);
                        count += 1;
                        continue;
                    }
                    let stage = v_ring.slot;
                    mbarrier::wait_parity(bar(v_empty, stage), v_ring.parity ^ 1);
                    v_ring = v_ring.next();
                    // Keys of the first page before the window and of the last one behind the sequence's end may hold anything,
                    // NaN times 0 among it. Boxes are powers of two, so these are those of which bits are left.
                    let inside = |key: u32| key.saturating_sub(block * KEYS as u32).min(KEYS as u32);
                    let (before, beyond) = (inside(start), inside(len));
                    let rest = box_keys - 1;
                    let edge = (before | beyond) & rest != 0;
                    let full = if edge { bar(edge_full, 0) } else { bar(v_full, stage) };
                    if lane == 0 {
                        mbarrier::arrive_expect_tx(full, kv_bytes);
                    }
                    load(v0 + stage * kv_bytes, v_map, kv_head, v_head, block, page, full);
                    if edge {
                        mbarrier::wait_parity(full, edges % 2);
                        edges += 1;
                        let pieces = const { LINE as u32 / 8 };
                        let first_keys = before & rest;
                        let mut i = lane;
                        while i < (first_keys + (beyond.wrapping_neg() & rest)) * parts * pieces {
                            let (nth, part) = (i / pieces / parts, i / pieces % parts);
                            let key =
                                if nth < first_keys { (before & !rest) + nth } else { beyond + (nth - first_keys) };
                            let at = ((key / 8 * parts + part) * 8 + key % 8) * LINE as u32 + i % pieces * 8;
                            v_tiles.offset(stage * (kv_bytes / 2)).set_as(at, B128([0u32; 4]));
                            i += 32;
                        }
                        tma::fence_async();
                        warp::sync_warp(warp::FULL);
                        if lane == 0 {
                            mbarrier::arrive(bar(v_full, stage));
                        }
                    }
                }
            }
        }
    } else if NARROW && warp_id < 8 {
        wgmma::decrease_registers::<40>();
        // Wideners: the blocks in the order in which they are needed, K of the next block before V of this one.
        let (mut k_ring, mut v_ring) = (Ring::<STAGES>::new(), Ring::<STAGES>::new());
        let (mut k_round, mut v_round) = (0, 0);
        let share = warp_id - 4;
        // Of the tile: blocks of K less blocks of V, and whether there is no more of K.
        let (mut ahead, mut last) = (0, false);
        loop {
            let is_v = last || ahead == 2;
            let (ring, round) = if is_v { (v_ring, v_round) } else { (k_ring, k_round) };
            let (full, empty) = if is_v { (v_full, v_empty) } else { (k_full, k_empty) };
            let (raw_full, raw_empty) = if is_v { (raw_v_full, raw_v_empty) } else { (raw_k_full, raw_k_empty) };
            let (tile0, which) = if is_v { (v_tiles.offset(0u32), 1) } else { (k_tiles.offset(0u32), 0) };
            let mut word = 0;
            for half in 0..2u32 {
                mbarrier::wait_parity(bar(raw_full, half), round);
                word = by_one(raw_words, 4 * which + 2 * half);
                if word & OVER != 0 {
                    break;
                }
                let wrong = by_one(raw_words, 4 * which + 2 * half + 1);
                if half == 0 {
                    mbarrier::wait_parity(bar(empty, ring.slot), ring.parity ^ 1);
                }
                let to = tile0.offset(ring.slot * (kv_bytes / 2) + half * (kv_bytes / 4));
                let from = raw_tiles.offset(which * (kv_bytes / 2) + half * (kv_bytes / 4));
                let (start, end) = (word >> KEYS_START & KEYS_END, word & KEYS_END);
                match kind {
                    narrow::E4M3 => widen::<P, E4M3, 64, PARTS>(from, to, share, start, end),
                    narrow::E5M2 => widen::<P, E5M2, 64, PARTS>(from, to, share, start, end),
                    _ => widen::<P, i8, 64, PARTS>(from, to, share, start, end),
                }
                tma::fence_async();
                warp::sync_warp(warp::FULL);
                if lane == 0 {
                    if !is_v && share == 0 {
                        bad_pages.set(ring.slot, wrong);
                    }
                    mbarrier::arrive(bar(full, ring.slot));
                    mbarrier::arrive(bar(raw_empty, half));
                }
            }
            if word & OVER != 0 {
                break;
            }
            if is_v {
                (v_ring, v_round) = (v_ring.next(), v_round ^ 1);
                ahead -= 1;
                last &= ahead != 0;
            } else {
                (k_ring, k_round) = (k_ring.next(), k_round ^ 1);
                ahead += 1;
                last = word & LAST != 0;
            }
        }
    } else {
        match (CONSUMERS, NARROW) {
            (3, _) => wgmma::increase_registers::<160>(),
            (2, true) => wgmma::increase_registers::<216>(),
            (2, _) => wgmma::increase_registers::<224>(),
            _ => wgmma::increase_registers::<200>(),
        }
        let me = warp_id / 4 - helpers;
        let (g, t) = (lane / 4, lane % 4);
        // This thread's rows of the tile: this one and eight further.
        let row = me * 64 + warp_id % 4 * 16 + g;
        let (q, k, v) = (
            Descriptor::<K>::with_lines(q0 + me * (64 * line_bytes), swizzle),
            Descriptor::<K>::with_lines(k0, swizzle).with_stride(atom * parts),
            Descriptor::<Mn>::with_lines(v0, atom, swizzle).with_stride(atom * parts),
        );
        // After what all lanes have read.
        let release = |kind: u32, slot: u32| {
            warp::sync_warp(warp::FULL);
            if lane == 0 {
                mbarrier::arrive(bar(kind, slot));
            }
        };
        // The consumers issue in turn; the first begins.
        let turn_after = if me + 1 == CONSUMERS as u32 { 1 } else { 2 + me };
        if CONSUMERS > 1 && turn_after == 1 {
            thread::arrive_named(1, 256);
        }
        let own_barrier = const { 1 + CONSUMERS as u32 } + me;
        let (mut tiles, mut k_ring) = (Ring::<Q_STAGES>::new(), Ring::<STAGES>::new());
        // Token and head of a row, by a product that is exact for as many rows as a tile has.
        let inverse_group = 65536 / group + 1;
        let place = |row: u32| {
            let token = (row * inverse_group) >> 16;
            (token, row - token * group)
        };
        let places = [place(row), place(row + 8)];
        // The tokens of this warp's rows, and whether they are whole ones.
        let warp_row = me * 64 + warp_id % 4 * 16;
        let warp_tokens = [place(warp_row).0, place(warp_row + 15).0];
        let whole_tokens = 16 % group == 0;
        // Gives the memory of a tile's Q back, from which the copy engine may still be reading the output.
        let release_q = |slot: u32| {
            if lane == 0 {
                tma::wait_group_read::<0>();
                mbarrier::arrive(bar(q_empty, slot));
            }
            warp::sync_warp(warp::FULL);
        };
        let mut last_slot = u32::MAX;
        let mut told_ring = Ring::<TOLD>::new();
        loop {
            let Ring { slot, parity } = tiles.uniform();
            tiles = tiles.next();
            mbarrier::wait_parity(bar(q_full, slot), parity);
            let told_slot = told_ring.slot;
            told_ring = told_ring.next();
            let word = |i: u32| by_one(tile_words, told_slot * WORDS as u32 + i);
            let blocks = word(5);
            if blocks == 0 {
                break;
            }
            let first_block = word(4) / KEYS as u32;
            let tile = Tile {
                sequence: 0,
                kv_head: word(6),
                first: word(0),
                tokens: word(1),
                len: word(2),
                position: word(3) as i32,
            };
            let rows = q_tiles.offset(slot * (q_bytes / 2) + (me * 64 + warp_id % 4 * 16) * LINE as u32);
            // What scores are multiplied with, row by row, and sums of values.
            let (mut scales, mut v_scale) = ([scale; 2], 1.0);
            if NARROW {
                let k_scale = f32::from_bits(word(8));
                v_scale = f32::from_bits(word(9));
                let mut undo = [1.0; 2];
                if T::DTYPE as u8 != P::DTYPE as u8 {
                    undo = fit::<P, PARTS>(rows, q_part / 2);
                    tma::fence_async();
                    thread::sync_named(own_barrier, 128);
                }
                // Of a head of zeros the scale may be 0, but -inf must stay -inf, and NaN be seen.
                scales = undo.map(|undo| float::max_propagate(scale * k_scale * undo, 1e-37));
            }
            // What makes scores exponents of 2; those that were bent already are.
            let fold = if BENT { [1.0; 2] } else { scales.map(|s| s * LOG2_E) };
            let q = q.offset(slot * q_bytes);
            let ends = places.map(|(token, _)| batch.end(&tile, token));
            // Other rows, perhaps of the next sequence, must not decide when these are rescaled, which shows in roundings.
            let there = places.map(|(token, _)| token < tile.tokens);
            // Blocks that every row of the tile sees all of.
            let whole_end = batch.end(&tile, 0) / KEYS as u32;
            let whole_start = batch.start(batch.end(&tile, tile_tokens - 1)).div_ceil(KEYS as u32);

            let mut s = S::zero();
            let mut o = O::zero();
            let mut top = [f32::NEG_INFINITY; 2];
            let mut sum = [0f32; 2];

            let scores = |s: &mut S, stage: u32| {
                let k = k.offset(stage * kv_bytes);
                unroll::<PARTS>(|part| {
                    let (q, k) = (q.offset(part as u32 * q_part), k.offset(part as u32 * atom));
                    if LINE == 64 {
                        s.multiply::<P, 4, _, _>(q, k, part > 0);
                    } else {
                        s.multiply::<P, 2, _, _>(q, k, part > 0);
                    }
                });
            };
            let values = |o: &mut O, p: &[[u32; 4]; 12], stage: u32| {
                let v = v.offset(stage * kv_bytes);
                o.multiply_registers::<P, 4, _>([p[0], p[1], p[2], p[3]], v, true);
                if KEYS > 64 {
                    o.multiply_registers::<P, 4, _>([p[4], p[5], p[6], p[7]], v.advance(4), true);
                }
                if KEYS > 128 {
                    o.multiply_registers::<P, 4, _>([p[8], p[9], p[10], p[11]], v.advance(8), true);
                }
            };
            // Slopes of this thread's rows, as exponents of 2, and the positions of their tokens.
            let (mut slopes, mut positions) = ([0f32; 2], [0i32; 2]);
            if BENT {
                unroll::<2>(|h| {
                    let (token, head) = places[h];
                    positions[h] = tile.position_of(token);
                    if !alibi.is_null() && there[h] {
                        slopes[h] = Global::new(alibi).get(tile.kv_head * group + head) * LOG2_E;
                    }
                });
            }
            // Scores become exponents of 2.
            let bend = |s: &mut [f32], block: u32| {
                // Of use only if there is a cap, but computed once for all scores.
                let inverse_cap = float::fast::recip(soft_cap);
                unroll::<2>(|h| {
                    let distance = (block * KEYS as u32 + 2 * t) as i32 - positions[h];
                    for j in 0..KEYS / 8 {
                        unroll::<2>(|c| {
                            let e = 4 * j + 2 * h + c;
                            let bias = slopes[h] * (distance + (8 * j + c) as i32) as f32;
                            let score = s[e] * scales[h];
                            let score = if soft_cap > 0.0 { capped(score, soft_cap, inverse_cap) } else { score };
                            s[e] = float::fma(score, LOG2_E, bias);
                        });
                    }
                });
            };
            // What a row does not see becomes -inf. 32 keys at a time: most are seen by all rows of the warp, or by none.
            let warp_ends = warp_tokens.map(|token| batch.end(&tile, token));
            let warp_starts = warp_ends.map(|end| batch.start(end));
            let mask = |s: &mut [f32], block: u32, wrong: u32| {
                // Not known to be a constant: the scores would be moved about.
                let unseen = f32::from_bits(integer::opaque(f32::NEG_INFINITY.to_bits()));
                for part in 0..KEYS / 32 {
                    let from = block * KEYS as u32 + 32 * part as u32;
                    if from >= warp_ends[1] || from + 32 <= warp_starts[0] {
                        unroll::<16>(|e| s[16 * part + e] = float::min(s[16 * part + e], unseen));
                    } else if from + 32 > warp_ends[0] || from < warp_starts[1] {
                        let base = (from + 2 * t) as i32;
                        unroll::<2>(|h| {
                            let end = ends[h] as i32 - base;
                            let start = batch.start(ends[h]) as i32 - base;
                            unroll::<4>(|j| {
                                unroll::<2>(|c| {
                                    let (key, e) = ((8 * j + c) as i32, 16 * part + 4 * j + 2 * h + c);
                                    s[e] = if key < end && key >= start { s[e] } else { f32::NEG_INFINITY };
                                });
                            });
                        });
                    }
                }
                if wrong != 0 {
                    let box_shift = page_shift.min(shape.box_keys().ilog2());
                    for j in 0..KEYS / 8 {
                        let unseen = wrong >> ((8 * j as u32) >> box_shift) & 1 != 0;
                        unroll::<4>(|e| s[4 * j + e] = if unseen { f32::NEG_INFINITY } else { s[4 * j + e] });
                    }
                }
            };
            // V takes the slots that K took a block before.
            let mut v_ring = k_ring.uniform();
            mbarrier::wait_parity(bar(k_full, v_ring.slot), v_ring.parity);
            scores(&mut s, v_ring.slot);
            let mut wrong = by_one(bad_pages, v_ring.slot);
            // Meanwhile the output of the tile before has left the memory of its Q.
            if Q_STAGES > 1 && last_slot != u32::MAX {
                release_q(last_slot);
            }
            last_slot = slot;
            wgmma::wait::<0>(&mut s);
            release(k_empty, v_ring.slot);
            k_ring = v_ring.next();
            let last_block = first_block + blocks - 1;
            let mut block = last_block;
            let mut p = [[0u32; 4]; 12];
            let from_top = |top: [f32; 2]| {
                [0, 1].map(|h: usize| if top[h] == f32::NEG_INFINITY { 0.0 } else { -(top[h] * fold[h]) })
            };
            // What is added to exponents, and whether any row's scores are so large that it is added to scores instead.
            let (mut reference, mut huge) = ([0f32; 2], false);
            // Its loop begins behind the products, so that what they need is known to be uniform long before them.
            loop {
                let (k_slot, v_slot) = (uniform(k_ring.slot), uniform(v_ring.slot));
                if BENT {
                    bend(s.as_mut(), block);
                }
                if block >= whole_end || block < whole_start || wrong != 0 {
                    mask(s.as_mut(), block, wrong);
                }
                // Four chains at a time: one would wait for each of its links.
                let mut m = [[f32::NEG_INFINITY; 2]; 2];
                for j in 0..KEYS / 8 {
                    let s = s.as_ref();
                    unroll::<4>(|e| m[e / 2][e % 2] = float::max(m[e / 2][e % 2], s[4 * j + e]));
                }
                let mut new = [0f32; 2];
                unroll::<2>(|h| new[h] = float::max(m[h][0], m[h][1]));
                unroll::<2>(|h| new[h] = float::max(new[h], warp::shfl_xor(new[h], 1)));
                unroll::<2>(|h| new[h] = float::max(float::max(new[h], warp::shfl_xor(new[h], 2)), top[h]));
                let grows = |h: usize| there[h] && (new[h] - top[h]) * fold[h] > SLACK;
                let rescale = warp::warp_vote_any(warp::FULL, grows(0) || grows(1));
                let fresh = block == last_block;
                // The last block's second product, which ran meanwhile.
                wgmma::wait::<0>(&mut o);
                if !fresh {
                    release(v_empty, (v_slot + (STAGES - 1)) % STAGES);
                }
                if fresh || rescale || huge {
                    // At first there is nothing of O.
                    if !fresh {
                        let o = o.as_mut();
                        unroll::<2>(|h| {
                            // Nothing seen yet: 0 times anything finite.
                            let old = top[h];
                            let factor = if old == f32::NEG_INFINITY {
                                0.0
                            } else {
                                float::fast::exp2((old - new[h]) * fold[h])
                            };
                            sum[h] *= factor;
                            for j in 0..D / 8 {
                                unroll::<2>(|c| o[4 * j + 2 * h + c] *= factor);
                            }
                        });
                    }
                    top = new;
                    // What rounding takes from a reference shows in all exponents, as a factor that is far from 1 where scores are huge: such
                    // rows' scores are made relative first, of every block, by this way, since a branch of its own takes 2 % of all the time.
                    // (Bent scores are exponents already.)
                    if !BENT {
                        reference = from_top(top);
                        // As above, only of rows that there are.
                        let far = [0, 1].map(|h: usize| there[h] && float::abs(reference[h]) > FAR);
                        huge = warp::warp_vote_any(warp::FULL, far[0] || far[1]);
                        if huge {
                            let s = s.as_mut();
                            unroll::<2>(|h| {
                                if far[h] {
                                    for j in 0..KEYS / 8 {
                                        unroll::<2>(|c| s[4 * j + 2 * h + c] -= top[h]);
                                    }
                                    reference[h] = 0.0;
                                }
                            });
                        }
                    }
                }
                if BENT {
                    // Not kept, since registers are short.
                    reference = from_top(top);
                }
                // Scores become probabilities, relative to the maximum so far.
                let mut part = [[0f32; 2]; 2];
                for step in 0..KEYS / 16 {
                    let s = s.as_ref();
                    unroll::<4>(|i| {
                        let e = 8 * step + 2 * i;
                        let exponent = |s: f32| float::fma(s, fold[i % 2], reference[i % 2]);
                        let (x, y) = (float::fast::exp2(exponent(s[e])), float::fast::exp2(exponent(s[e + 1])));
                        part[i % 2][0] += x;
                        part[i % 2][1] += y;
                        p[step][i] = P::pack_f32(x, y);
                    });
                }
                unroll::<2>(|h| sum[h] += part[h][0] + part[h][1]);
                if block == first_block {
                    break;
                }
                block -= 1;

                mbarrier::wait_parity(bar(k_full, k_slot), k_ring.parity);
                wrong = by_one(bad_pages, k_slot);
                if CONSUMERS > 1 {
                    thread::sync_named(1 + me, 256);
                }
                scores(&mut s, k_slot);
                mbarrier::wait_parity(bar(v_full, v_slot), v_ring.parity);
                values(&mut o, &p, v_slot);
                if CONSUMERS > 1 {
                    thread::arrive_named(turn_after, 256);
                }
                v_ring = k_ring;
                k_ring = k_ring.next();
                // The second product's groups may go on.
                match KEYS / 64 {
                    1 => wgmma::wait::<1>(&mut s),
                    2 => wgmma::wait::<2>(&mut s),
                    _ => wgmma::wait::<3>(&mut s),
                }
                release(k_empty, k_slot);
            }
            let stage = uniform(v_ring.slot);
            mbarrier::wait_parity(bar(v_full, stage), v_ring.parity);
            values(&mut o, &p, stage);

            // What sums are multiplied with, and the logarithms of denominators.
            let finished = |top: [f32; 2], sum: [f32; 2], write: bool| {
                let mut inverse = [0f32; 2];
                unroll::<2>(|h| {
                    let total = sum[h] + warp::shfl_xor(sum[h], 1);
                    let total = total + warp::shfl_xor(total, 2);
                    let seen = float::max(top[h] * fold[h], f32::MIN);
                    let (mut reference, mut shrink, mut whole) = (seen, 1.0, total);
                    let (token, head) = places[h];
                    let head = tile.kv_head * group + head;
                    if !sinks.is_null() && there[h] {
                        let sink = Global::new(sinks).get(head) * LOG2_E;
                        reference = float::max(seen, sink);
                        shrink = float::fast::exp2(seen - reference);
                        whole = float::fma(total, shrink, float::fast::exp2(sink - reference));
                    }
                    // Not of NaN, which is not nothing.
                    inverse[h] = if whole == 0.0 { 0.0 } else { float::fast::div(shrink, whole) * v_scale };
                    if write && !lse.is_null() && there[h] && t == 0 {
                        let value =
                            if whole == 0.0 { f32::NEG_INFINITY } else { (reference + float::log2(whole)) * LN_2 };
                        GlobalMut::new(lse)
                            .set((tile.first + token) as usize * q_heads as usize + head as usize, value);
                    }
                });
                inverse
            };
            // Of how many parts this is which one, and where their results are.
            let (parts_of, first_item) = if SPLIT { (word(10), word(11)) } else { (1, 0) };
            let (parts_of, part) = (parts_of & 0xff, parts_of >> 8);
            // While the last product runs.
            let mut inverse = finished(top, sum, parts_of == 1);
            wgmma::wait::<0>(&mut o);
            release(v_empty, stage);
            release(told_empty, told_slot);

            if parts_of > 1 {
                let floats = const { partial_floats(D, CONSUMERS) };
                let thread = tid % 128;
                let at = first_item as usize * floats + me as usize * (floats / CONSUMERS) + 4 * thread as usize;
                let results = GlobalMut::new(partial).offset(at);
                let mine = results.offset(part as usize * floats);
                for j in 0..D / 8 {
                    let o = o.as_ref();
                    mine.set_as(512 * j, B128([o[4 * j], o[4 * j + 1], o[4 * j + 2], o[4 * j + 3]]));
                }
                mine.set_as(const { 64 * D }, B128([top[0], top[1], sum[0], sum[1]]));
                thread::sync_named(own_barrier, 128);
                if thread == 0 {
                    let counter = tickets.wrapping_add((2 + first_item * CONSUMERS as u32 + me) as usize);
                    arrived.set(me, last_of_parts(counter, parts_of) as u32);
                }
                thread::sync_named(own_barrier, 128);
                if by_one(arrived, me) == 0 {
                    if Q_STAGES == 1 {
                        release_q(slot);
                    }
                    continue;
                }
                let results = Global::new(results.ptr(0u32).cast_const());
                let said_of = |part: u32| {
                    let part = part.min(parts_of - 1) as usize;
                    let B128(said) = results.get_as::<B128<f32, 4>>(part * floats + const { 64 * D });
                    said
                };
                top = [f32::NEG_INFINITY; 2];
                for four in 0..parts_of.div_ceil(4) {
                    unroll::<4>(|i| {
                        let said = said_of(4 * four + i as u32);
                        unroll::<2>(|h| top[h] = float::max(top[h], said[h]));
                    });
                }
                sum = [0.0; 2];
                o = O::zero();
                // As many columns as there are registers for, a part ahead.
                let columns = const { if D > 128 { 128 } else { D } };
                for pass in 0..D / columns {
                    let load = |part: u32, j: usize| {
                        let part = part.min(parts_of - 1) as usize;
                        let at = part * floats + 512 * (pass * (columns / 8) + j);
                        let B128(words) = results.get_as::<B128<f32, 4>>(at);
                        words
                    };
                    let mut ahead = [[0f32; 4]; 16];
                    for j in 0..columns / 8 {
                        ahead[j] = load(0, j);
                    }
                    let mut next = said_of(0);
                    for part in 0..parts_of {
                        let said = next;
                        next = said_of(part + 1);
                        let factor = [0, 1].map(|h: usize| weight_of_part(said[h], top[h], fold[h]));
                        if pass == 0 {
                            unroll::<2>(|h| sum[h] = float::fma(said[2 + h], factor[h], sum[h]));
                        }
                        for j in 0..columns / 8 {
                            let o = o.as_mut();
                            unroll::<4>(|e| {
                                let e_of = 4 * (pass * (columns / 8) + j) + e;
                                o[e_of] = float::fma(ahead[j][e], factor[e / 2], o[e_of]);
                            });
                            ahead[j] = load(part + 1, j);
                        }
                    }
                }
                inverse = finished(top, sum, true);
            }

            // Out through the memory of Q, which a consumer's warps have read: each its own rows.
            thread::sync_named(own_barrier, 128);
            let o = o.as_ref();
            // Pieces of eight columns in a line.
            let pieces = const { LINE as u32 / 8 };
            for pair in 0..D / 16 {
                let at = |i: usize| 8 * pair + 2 * i;
                let word = |i: usize| T::pack_f32(o[at(i)] * inverse[i % 2], o[at(i) + 1] * inverse[i % 2]);
                // Matrices: rows, rows + 8, then the next eight columns.
                let (r, column) = (lane % 16, (2 * pair as u32) % pieces + lane / 16);
                let to = swizzle.apply(r * line_bytes + column * 16);
                let part = rows.address((2 * pair as u32) / pieces * (q_part / 2));
                mma::stmatrix_x4(part + to, [word(0), word(1), word(2), word(3)]);
            }
            tma::fence_async();
            warp::sync_warp(warp::FULL);
            if whole_tokens && warp_tokens[1] < tile.tokens {
                if lane == 0 {
                    for part in 0..parts {
                        let at = [
                            (LINE as u32 * part) as i32,
                            (tile.kv_head * group) as i32,
                            (tile.first + warp_tokens[0]) as i32,
                        ];
                        tma::store_tensor::<3>(out_map, at, rows.address(part * (q_part / 2)));
                    }
                    tma::commit_group();
                }
            } else if warp_tokens[0] < tile.tokens {
                // Rows of the tile and, perhaps, of the next sequence, or half a token's. What follows from the lane is not to
                // be kept in registers all along.
                let (lane, inverse_group) = (integer::opaque(lane), integer::opaque(inverse_group));
                let out = GlobalMut::new(out);
                let all = const { D as u32 / 8 };
                for i in 0..D / 16 {
                    let at = i as u32 * 32 + lane;
                    let (r, column) = (at / all, at % all);
                    let from =
                        swizzle.apply(r * line_bytes + column % pieces * 16) / 2 + column / pieces * (q_part / 2);
                    let value = rows.get_as::<B128<u32, 4>>(from);
                    let token = ((warp_row + r) * inverse_group) >> 16;
                    let head = tile.kv_head * group + (warp_row + r - token * group);
                    if token < tile.tokens && column * 8 < head_dim {
                        let to = (tile.first + token) as usize * out_token + head as usize * out_head;
                        out.set_as(to + column as usize * 8, value);
                    }
                }
                tma::fence_async();
                warp::sync_warp(warp::FULL);
            }
            if Q_STAGES == 1 {
                release_q(slot);
            }
        }
        // A block may not end while the copy engine reads its memory.
        if lane == 0 {
            tma::wait_group_read::<0>();
        }
        // Every arrival is waited for.
        if CONSUMERS > 1 && me == 0 {
            thread::sync_named(1, 256);
        }
    }
}

/// Turns a warp's 16 rows of Q from bf16 to f16, each scaled by the power of two that brings its largest element to
/// 2^13 .. 2^14: what the lane's two rows' scores are to be multiplied with.
#[inline(always)]
unsafe fn fit<P: TensorFloat, const PARTS: usize>(rows: Shared<P>, part: u32) -> [f32; 2] {
    let lane = warp::lane_id();
    let mut undo = [0f32; 4];
    unroll::<4>(|step| {
        // Eight lanes a row; where in its line an element is does not matter.
        let at = (4 * step as u32 + lane / 8) * 64 + lane % 8 * 8;
        let mut words = [[0u32; 4]; PARTS];
        let mut top = 0;
        unroll::<PARTS>(|i| {
            let B128(w) = rows.get_as::<B128<u32, 4>>(at + i as u32 * part);
            words[i] = w;
            // Magnitudes are in the order of their bits.
            unroll::<4>(|j| top = top.max(w[j] & 0x7fff_0000).max(w[j] << 16 & 0x7fff_0000));
        });
        unroll::<3>(|i| top = top.max(warp::shfl_xor(top, 1 << i)));
        let (up, down) = fit_factors(top);
        undo[step] = down;
        unroll::<PARTS>(|i| {
            let mut w = [0u32; 4];
            unroll::<4>(|j| {
                let (low, high) = (f32::from_bits(words[i][j] << 16), f32::from_bits(words[i][j] & 0xffff_0000));
                w[j] = P::pack_f32(low * up, high * up);
            });
            rows.set_as(at + i as u32 * part, B128(w));
        });
    });
    // Row `g` of the lane's was in the hands of lanes `8 (g % 4)` and on.
    let g = lane / 4;
    let of = |a: f32, b: f32| {
        let (a, b) = (warp::shfl_idx(a, g % 4 * 8), warp::shfl_idx(b, g % 4 * 8));
        if g < 4 { a } else { b }
    };
    [of(undo[0], undo[1]), of(undo[2], undo[3])]
}

entries! {
    /// Arguments of every `prefill_wgmma_*` entry; see [`prefill`].
    pub struct Args<T>(
        out: *mut T, lse: *mut f32, out_map: TensorMap, q_map: TensorMap, k_map: TensorMap, v_map: TensorMap, starts: *const i32, lens: *const i32,
        block_table: *const i32, alibi: *const f32, sinks: *const f32, k_scales: *const f32, v_scales: *const f32, tickets: *mut u32, partial: *mut f32,
        scale_per_head: u32, kind: u32, sequences: u32, tokens: u32, q_heads: u32, kv_heads: u32, head_dim: u32, page_shift: u32,
        max_pages: u32, pages: u32, tile_tokens: u32, out_token: usize, out_head: usize, k_head: u32, v_head: u32, scale: f32, soft_cap: f32, window: u32,
        causal: u32, section_keys: u32,
    );
    prefill_wgmma_d64_bf16 { type T = bf16; } [512, 1; Sm90a] => prefill::<T, T, [f32; 64], [f32; 32], 64, 64, 1, 128, 3, 2, 2, false, false, false>;
    prefill_wgmma_d64_f16 { type T = f16; } [512, 1; Sm90a] => prefill::<T, T, [f32; 64], [f32; 32], 64, 64, 1, 128, 3, 2, 2, false, false, false>;
    prefill_wgmma_d64_bf16_bent { type T = bf16; } [384, 1; Sm90a] => prefill::<T, T, [f32; 64], [f32; 32], 64, 64, 1, 128, 2, 2, 2, false, true, false>;
    prefill_wgmma_d64_f16_bent { type T = f16; } [384, 1; Sm90a] => prefill::<T, T, [f32; 64], [f32; 32], 64, 64, 1, 128, 2, 2, 2, false, true, false>;
    prefill_wgmma_d64_bf16_8 { type T = bf16; } [512, 1; Sm90a] => prefill::<T, f16, [f32; 64], [f32; 32], 64, 64, 1, 128, 2, 2, 2, true, false, false>;
    prefill_wgmma_d64_f16_8 { type T = f16; } [512, 1; Sm90a] => prefill::<T, f16, [f32; 64], [f32; 32], 64, 64, 1, 128, 2, 2, 2, true, false, false>;
    prefill_wgmma_d64_bf16_8_bent { type T = bf16; } [512, 1; Sm90a] => prefill::<T, f16, [f32; 64], [f32; 32], 64, 64, 1, 128, 2, 2, 2, true, true, false>;
    prefill_wgmma_d64_f16_8_bent { type T = f16; } [512, 1; Sm90a] => prefill::<T, f16, [f32; 64], [f32; 32], 64, 64, 1, 128, 2, 2, 2, true, true, false>;
    prefill_wgmma_d96_bf16 { type T = bf16; } [384, 1; Sm90a] => prefill::<T, T, [f32; 64], [f32; 48], 96, 32, 3, 128, 2, 2, 2, false, false, false>;
    prefill_wgmma_d96_f16 { type T = f16; } [384, 1; Sm90a] => prefill::<T, T, [f32; 64], [f32; 48], 96, 32, 3, 128, 2, 2, 2, false, false, false>;
    prefill_wgmma_d96_bf16_bent { type T = bf16; } [384, 1; Sm90a] => prefill::<T, T, [f32; 64], [f32; 48], 96, 32, 3, 128, 2, 2, 2, false, true, false>;
    prefill_wgmma_d96_f16_bent { type T = f16; } [384, 1; Sm90a] => prefill::<T, T, [f32; 64], [f32; 48], 96, 32, 3, 128, 2, 2, 2, false, true, false>;
    prefill_wgmma_d128_bf16 { type T = bf16; } [384, 1; Sm90a] => prefill::<T, T, [f32; 64], [f32; 64], 128, 64, 2, 128, 2, 2, 2, false, false, false>;
    prefill_wgmma_d128_f16 { type T = f16; } [384, 1; Sm90a] => prefill::<T, T, [f32; 64], [f32; 64], 128, 64, 2, 128, 2, 2, 2, false, false, false>;
    prefill_wgmma_d128_bf16_bent { type T = bf16; } [384, 1; Sm90a] => prefill::<T, T, [f32; 64], [f32; 64], 128, 64, 2, 128, 2, 2, 2, false, true, false>;
    prefill_wgmma_d128_f16_bent { type T = f16; } [384, 1; Sm90a] => prefill::<T, T, [f32; 64], [f32; 64], 128, 64, 2, 128, 2, 2, 2, false, true, false>;
    prefill_wgmma_d128_bf16_8 { type T = bf16; } [512, 1; Sm90a] => prefill::<T, f16, [f32; 64], [f32; 64], 128, 64, 2, 128, 2, 2, 2, true, false, false>;
    prefill_wgmma_d128_f16_8 { type T = f16; } [512, 1; Sm90a] => prefill::<T, f16, [f32; 64], [f32; 64], 128, 64, 2, 128, 2, 2, 2, true, false, false>;
    prefill_wgmma_d128_bf16_8_bent { type T = bf16; } [512, 1; Sm90a] => prefill::<T, f16, [f32; 64], [f32; 64], 128, 64, 2, 128, 2, 2, 2, true, true, false>;
    prefill_wgmma_d128_f16_8_bent { type T = f16; } [512, 1; Sm90a] => prefill::<T, f16, [f32; 64], [f32; 64], 128, 64, 2, 128, 2, 2, 2, true, true, false>;
    prefill_wgmma_d256_bf16 { type T = bf16; } [384, 1; Sm90a] => prefill::<T, T, [f32; 32], [f32; 128], 256, 64, 4, 64, 2, 1, 2, false, false, false>;
    prefill_wgmma_d256_f16 { type T = f16; } [384, 1; Sm90a] => prefill::<T, T, [f32; 32], [f32; 128], 256, 64, 4, 64, 2, 1, 2, false, false, false>;
    prefill_wgmma_d256_bf16_bent { type T = bf16; } [384, 1; Sm90a] => prefill::<T, T, [f32; 32], [f32; 128], 256, 64, 4, 64, 2, 1, 2, false, true, false>;
    prefill_wgmma_d256_f16_bent { type T = f16; } [384, 1; Sm90a] => prefill::<T, T, [f32; 32], [f32; 128], 256, 64, 4, 64, 2, 1, 2, false, true, false>;
    prefill_wgmma_d64_bf16_split { type T = bf16; } [512, 1; Sm90a] => prefill::<T, T, [f32; 64], [f32; 32], 64, 64, 1, 128, 3, 2, 2, false, false, true>;
    prefill_wgmma_d64_f16_split { type T = f16; } [512, 1; Sm90a] => prefill::<T, T, [f32; 64], [f32; 32], 64, 64, 1, 128, 3, 2, 2, false, false, true>;
    prefill_wgmma_d64_bf16_bent_split { type T = bf16; } [384, 1; Sm90a] => prefill::<T, T, [f32; 64], [f32; 32], 64, 64, 1, 128, 2, 2, 2, false, true, true>;
    prefill_wgmma_d64_f16_bent_split { type T = f16; } [384, 1; Sm90a] => prefill::<T, T, [f32; 64], [f32; 32], 64, 64, 1, 128, 2, 2, 2, false, true, true>;
    prefill_wgmma_d64_bf16_8_split { type T = bf16; } [512, 1; Sm90a] => prefill::<T, f16, [f32; 64], [f32; 32], 64, 64, 1, 128, 2, 2, 2, true, false, true>;
    prefill_wgmma_d64_f16_8_split { type T = f16; } [512, 1; Sm90a] => prefill::<T, f16, [f32; 64], [f32; 32], 64, 64, 1, 128, 2, 2, 2, true, false, true>;
    prefill_wgmma_d64_bf16_8_bent_split { type T = bf16; } [512, 1; Sm90a] => prefill::<T, f16, [f32; 64], [f32; 32], 64, 64, 1, 128, 2, 2, 2, true, true, true>;
    prefill_wgmma_d64_f16_8_bent_split { type T = f16; } [512, 1; Sm90a] => prefill::<T, f16, [f32; 64], [f32; 32], 64, 64, 1, 128, 2, 2, 2, true, true, true>;
    prefill_wgmma_d96_bf16_split { type T = bf16; } [384, 1; Sm90a] => prefill::<T, T, [f32; 64], [f32; 48], 96, 32, 3, 128, 2, 2, 2, false, false, true>;
    prefill_wgmma_d96_f16_split { type T = f16; } [384, 1; Sm90a] => prefill::<T, T, [f32; 64], [f32; 48], 96, 32, 3, 128, 2, 2, 2, false, false, true>;
    prefill_wgmma_d96_bf16_bent_split { type T = bf16; } [384, 1; Sm90a] => prefill::<T, T, [f32; 64], [f32; 48], 96, 32, 3, 128, 2, 2, 2, false, true, true>;
    prefill_wgmma_d96_f16_bent_split { type T = f16; } [384, 1; Sm90a] => prefill::<T, T, [f32; 64], [f32; 48], 96, 32, 3, 128, 2, 2, 2, false, true, true>;
    prefill_wgmma_d128_bf16_split { type T = bf16; } [384, 1; Sm90a] => prefill::<T, T, [f32; 64], [f32; 64], 128, 64, 2, 128, 2, 2, 2, false, false, true>;
    prefill_wgmma_d128_f16_split { type T = f16; } [384, 1; Sm90a] => prefill::<T, T, [f32; 64], [f32; 64], 128, 64, 2, 128, 2, 2, 2, false, false, true>;
    prefill_wgmma_d128_bf16_bent_split { type T = bf16; } [384, 1; Sm90a] => prefill::<T, T, [f32; 64], [f32; 64], 128, 64, 2, 128, 2, 2, 2, false, true, true>;
    prefill_wgmma_d128_f16_bent_split { type T = f16; } [384, 1; Sm90a] => prefill::<T, T, [f32; 64], [f32; 64], 128, 64, 2, 128, 2, 2, 2, false, true, true>;
    prefill_wgmma_d128_bf16_8_split { type T = bf16; } [512, 1; Sm90a] => prefill::<T, f16, [f32; 64], [f32; 64], 128, 64, 2, 128, 2, 2, 2, true, false, true>;
    prefill_wgmma_d128_f16_8_split { type T = f16; } [512, 1; Sm90a] => prefill::<T, f16, [f32; 64], [f32; 64], 128, 64, 2, 128, 2, 2, 2, true, false, true>;
    prefill_wgmma_d128_bf16_8_bent_split { type T = bf16; } [512, 1; Sm90a] => prefill::<T, f16, [f32; 64], [f32; 64], 128, 64, 2, 128, 2, 2, 2, true, true, true>;
    prefill_wgmma_d128_f16_8_bent_split { type T = f16; } [512, 1; Sm90a] => prefill::<T, f16, [f32; 64], [f32; 64], 128, 64, 2, 128, 2, 2, 2, true, true, true>;
    prefill_wgmma_d256_bf16_split { type T = bf16; } [384, 1; Sm90a] => prefill::<T, T, [f32; 32], [f32; 128], 256, 64, 4, 64, 2, 1, 2, false, false, true>;
    prefill_wgmma_d256_f16_split { type T = f16; } [384, 1; Sm90a] => prefill::<T, T, [f32; 32], [f32; 128], 256, 64, 4, 64, 2, 1, 2, false, false, true>;
    prefill_wgmma_d256_bf16_bent_split { type T = bf16; } [384, 1; Sm90a] => prefill::<T, T, [f32; 32], [f32; 128], 256, 64, 4, 64, 2, 1, 2, false, true, true>;
    prefill_wgmma_d256_f16_bent_split { type T = f16; } [384, 1; Sm90a] => prefill::<T, T, [f32; 32], [f32; 128], 256, 64, 4, 64, 2, 1, 2, false, true, true>;
}
