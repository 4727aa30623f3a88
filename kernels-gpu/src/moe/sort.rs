//! Sorting of (token, slot) pairs by expert, padded to blocks: what grouped matrix products start from.
//!
//! A stable counting sort. Each warp counts its consecutive pairs by expert in counters of its own, 32 pairs at a time:
//! `match_any` finds the lanes with the same expert, so that a pair's rank among the warp's is a counter's value plus the
//! number of equal lanes below. Counters are summed over warps, then scanned over experts with every expert's share
//! rounded up to whole blocks, and each pair goes to start + ranks. Nothing depends on timing: within an expert pairs
//! stay in ascending order.
//!
//! Up to some thousand pairs are sorted in one launch by [`sort_block`](super::sort_block). More are split into chunks, a block each, which must
//! know each other's counters: `moe_sort_count` writes those of each chunk to a table, and `moe_sort_scatter`, which has
//! counted its own pairs meanwhile, sums the rows above its own. With very many experts it sorts few pairs by itself.
//!
//! The lists are filled with padding first, and pairs overwrite it. Further blocks zero a buffer on the side.
//!
//! Two conventions of output: flat pair indices, sentinel the number of pairs (vLLM's `moe_align_block_size`); or the token in
//! the low 24 bits and the slot in the high 8, sentinel token count and slot count (CK Tile's `moe_sorting`).

use super::pairs::{INVALID, NOWHERE, Pairs, existing_tokens};
use super::sort_block::{CLUSTER, sort_block};
use cuda_std::vec::B128;
use cuda_std::{Global, GlobalMut, Shared, dependent_launch, entries, shared, thread, unroll, warp};

/// Pairs that a lane keeps in registers, at most.
pub const ITEMS: usize = 8;
/// Warps of a block, at most.
pub const MAX_WARPS: usize = 32;

/// `flags`: packed ids and totals (CK Tile's convention).
pub const PACKED: u32 = 1;
/// `flags`: experts without pairs get one block of padding.
pub const KEEP_EMPTY: u32 = 2;
/// `flags`: `expert_map` holds 0 for experts that live elsewhere, and local ones are numbered consecutively.
pub const MASK: u32 = 4;

/// Columns of counters: the bins, the invalid ids, and what makes rows of 16 bits a multiple of 16 bytes.
pub const fn columns(bins: usize) -> usize {
    (bins + 1).next_multiple_of(8)
}

/// Dynamic shared memory for `bins` experts and `warps` warps.
pub const fn shared_bytes(bins: usize, warps: usize) -> usize {
    MAX_WARPS * 8 + columns(bins) * (4 * 4 + 2 * warps)
}

/// What a block knows about its chunk after counting.
#[derive(Clone, Copy)]
struct Chunk {
    /// Counters of each warp, `[warps][columns]`.
    counts: Shared<u16>,
    columns: u32,
    bins: u32,
    /// The warp's first pair.
    first: u32,
    /// Pairs of all chunks.
    pairs: u32,
}

/// Counts the warp's `items` pairs a lane. Returns for each of them its bin in the low half and its rank in the
/// warp in the high half, or [`NOWHERE`].
#[inline(always)]
unsafe fn count(map: Pairs, c: Chunk, mask: bool, items: u32, meanwhile: impl FnOnce()) -> [u32; ITEMS] {
    let (tid, lane) = (thread::thread_idx_x(), warp::lane_id());
    // All ids are on their way before the first is looked at.
    let mut ids = [-1i32; ITEMS];
    unroll::<ITEMS>(|i| {
        let pair = c.first + i as u32 * 32 + lane;
        if (i as u32) < items && pair < c.pairs {
            ids[i] = map.id(pair);
        }
    });
    meanwhile();
    let warps = thread::block_dim_x() / 32;
    let mut i = tid;
    while i < warps * c.columns / 2 {
        c.counts.set_as::<u32>(2 * i, 0);
        i += thread::block_dim_x();
    }
    thread::sync_threads();
    let mine = c.counts.offset(tid / 32 * c.columns);
    let mut keys = [NOWHERE; ITEMS];
    unroll::<ITEMS>(|i| {
        if (i as u32) < items {
            let mut bin = map.bin_of_id(ids[i]);
            if mask && bin < map.local && map.expert_map.get(bin) == 0 {
                bin = NOWHERE;
            }
            if bin == INVALID {
                bin = c.bins;
            }
            let peers = warp::warp_match_any_32(warp::FULL, bin);
            let below = (peers & ((1 << lane) - 1)).count_ones();
            let before = if bin != NOWHERE { mine.get(bin) as u32 } else { 0 };
            warp::sync_warp(warp::FULL);
            if bin != NOWHERE && below == 0 {
                mine.set(bin, (before + peers.count_ones()) as u16);
            }
            warp::sync_warp(warp::FULL);
            if bin < c.bins {
                keys[i] = bin | (before + below) << 16;
            }
        }
    });
    thread::sync_threads();
    keys
}

/// How many counters a block has.
#[inline(always)]
fn counters(map: Pairs) -> usize {
    (thread::block_dim_x() / 32) as usize * columns((map.local + map.shared) as usize)
}

/// Adds two columns of the warps' counters up, `2 word` in the low half and the next in the high one; each becomes the sum of
/// those before it. A chunk has fewer pairs than 16 bits count.
#[inline(always)]
unsafe fn scan_warps(c: Chunk, word: u32) -> u32 {
    let warps = thread::block_dim_x() / 32;
    let mut running = 0;
    let mut w = 0;
    // Eight at a time: reads do not wait for the writes before them.
    while w < warps {
        let mut n = [0u32; 8];
        unroll::<8>(|i| {
            if w + (i as u32) < warps {
                n[i] = c.counts.get_as((w + i as u32) * c.columns + 2 * word);
            }
        });
        unroll::<8>(|i| {
            if w + (i as u32) < warps {
                c.counts.set_as::<u32>((w + i as u32) * c.columns + 2 * word, running);
                running += n[i];
            }
        });
        w += 8;
    }
    running
}

/// Fills a share, `part` of `parts`, of the lists with padding.
#[inline(always)]
pub(super) unsafe fn pad(
    sorted_ids: *mut i32,
    sorted_weights: *mut f32,
    capacity: u32,
    sentinel: i32,
    part: u32,
    parts: u32,
) {
    let weighted = !sorted_weights.is_null();
    let (ids, weights) = (GlobalMut::new(sorted_ids), GlobalMut::new(sorted_weights));
    let (first, step) = (part * thread::block_dim_x() + thread::thread_idx_x(), parts * thread::block_dim_x());
    let aligned = (sorted_ids as usize | sorted_weights as usize).is_multiple_of(16);
    let fours = if aligned { capacity / 4 } else { 0 };
    let mut i = first;
    while i < fours {
        ids.set_as(4 * i, B128([sentinel; 4]));
        if weighted {
            weights.set_as(4 * i, B128([0f32; 4]));
        }
        i += step;
    }
    let mut i = 4 * fours + first;
    while i < capacity {
        ids.set(i, sentinel);
        if weighted {
            weights.set(i, 0.0);
        }
        i += step;
    }
}

/// What padding holds.
#[inline(always)]
pub(super) fn sentinel(flags: u32, tokens: u32, slots: u32, present: u32) -> i32 {
    if flags & PACKED != 0 { (present & 0xff_ffff | slots << 24) as i32 } else { (tokens * slots) as i32 }
}

/// Writes the counters of chunk `blockIdx.x` to its row of `table`, `[chunks][columns / 2]`, two in a word: the bins, and the
/// invalid ids; and fills the lists with padding.
///
/// The arguments are those of [`sort_scatter`]. Block: `32 w` threads; shared memory: [`shared_bytes`].
#[inline(always)]
pub unsafe fn sort_count(
    table: *mut u32,
    sorted_ids: *mut i32,
    sorted_weights: *mut f32,
    topk_ids: *const i32,
    expert_map: *const i32,
    num_tokens: *const i32,
    tokens: u32,
    top_k: u32,
    slots: u32,
    experts: u32,
    local: u32,
    shared_experts: u32,
    items: u32,
    capacity: u32,
    flags: u32,
) {
    dependent_launch::launch_dependents();
    let mask = flags & MASK != 0;
    let map = Pairs {
        topk_ids: Global::new(topk_ids),
        expert_map: Global::new(expert_map),
        mapped: !expert_map.is_null() && !mask,
        top_k,
        slots,
        experts,
        local,
        shared: shared_experts,
    };
    let counts = shared::Carver::new().take(counters(map));
    let present = existing_tokens(tokens, num_tokens);
    let c = chunk(map, present, items, counts);
    let padding = sentinel(flags, tokens, slots, present);
    count(map, c, mask, items, || {
        pad(sorted_ids, sorted_weights, capacity, padding, thread::block_idx_x(), thread::grid_dim_x());
    });
    let table = GlobalMut::new(table);
    let mut word = thread::thread_idx_x();
    while word < c.columns / 2 {
        table.set(thread::block_idx_x() * (c.columns / 2) + word, scan_warps(c, word));
        word += thread::block_dim_x();
    }
}

/// The chunk of this block, with its counters in `counts`.
#[inline(always)]
unsafe fn chunk(map: Pairs, tokens: u32, items: u32, counts: Shared<u16>) -> Chunk {
    let bins = map.local + map.shared;
    let warps = thread::block_dim_x() / 32;
    let first = (thread::block_idx_x() * warps + thread::thread_idx_x() / 32) * 32 * items;
    Chunk { counts, columns: columns(bins as usize) as u32, bins, first, pairs: tokens * map.slots }
}

/// Places every pair; see the [module](self).
///
/// `topk_ids`: `[tokens, top_k]`; `topk_weights`: the same, with `sorted_weights` only; `slots = top_k +` appended shared
/// experts. `expert_map`: `[experts]` or null. `table`: from [`sort_count`], null if there is one chunk.
/// Outputs: `sorted_ids` `[capacity]`; `expert_ids` `[capacity / block]`, -1 beyond the last; `totals` `[1]`, or `[2]` if
/// packed; and those that may be null: `sorted_weights` `[capacity]`, `positions` `[tokens, slots]` (where each pair went, -1
/// for nowhere), `offsets` `[bins + 1]` (where each expert starts), `expert_counts` `[bins]`, `invalid` `[1]`.
/// Grid: `chunks` and blocks that zero `zero_bytes` from `zero` on; block: `32 w` threads; shared memory: [`shared_bytes`].
#[inline(always)]
pub unsafe fn sort_scatter(
    sorted_ids: *mut i32,
    expert_ids: *mut i32,
    totals: *mut i32,
    sorted_weights: *mut f32,
    positions: *mut i32,
    offsets: *mut i32,
    expert_counts: *mut i32,
    invalid: *mut i32,
    zero: *mut u8,
    zero_bytes: usize,
    topk_ids: *const i32,
    topk_weights: *const f32,
    expert_map: *const i32,
    num_tokens: *const i32,
    table: *const u32,
    tokens: u32,
    top_k: u32,
    slots: u32,
    experts: u32,
    local: u32,
    shared_experts: u32,
    block: u32,
    items: u32,
    chunks: u32,
    capacity: u32,
    flags: u32,
) {
    let (tid, lane, threads) = (thread::thread_idx_x(), warp::lane_id(), thread::block_dim_x());
    let (warp_id, warps) = (tid / 32, threads / 32);
    let bins = local + shared_experts;
    let width = columns(bins as usize);
    // Words of two counters: of a row, and of those that are looked at. The last counter is that of invalid ids.
    let (row, counted_words) = (width as u32 / 2, (bins + !invalid.is_null() as u32).div_ceil(2));
    let mut carver = shared::Carver::new();
    let chunk_id = thread::block_idx_x();
    if chunks <= 1 {
        // The first launch: it may start before what the caller launched before is done, and what comes next may not.
        dependent_launch::wait();
    }
    dependent_launch::launch_dependents();
    if chunk_id >= chunks {
        return fill_zero(zero, zero_bytes, chunk_id - chunks, thread::grid_dim_x() - chunks);
    }
    // SAFETY: blocks are not empty.
    core::hint::assert_unchecked(block != 0);
    let (mask, packed) = (flags & MASK != 0, flags & PACKED != 0);
    let present = existing_tokens(tokens, num_tokens);
    let map = Pairs {
        topk_ids: Global::new(topk_ids),
        expert_map: Global::new(expert_map),
        mapped: !expert_map.is_null() && !mask,
        top_k,
        slots,
        experts,
        local,
        shared: shared_experts,
    };
    let warp_sums = carver.take::<u64>(MAX_WARPS);
    let (counted, bases) = (carver.take::<u32>(width), carver.take::<u32>(width));
    let (starts, labels) = (carver.take::<u32>(width), carver.take::<u32>(width));
    let c = chunk(map, present, items, carver.take(counters(map)));
    let padding = sentinel(flags, tokens, slots, present);
    let keys = count(map, c, mask, items, || {
        if chunks == 1 {
            pad(sorted_ids, sorted_weights, capacity, padding, 0, 1);
        }
    });
    if chunks > 1 {
        dependent_launch::wait();
    }

    // Pairs of each expert, and those in earlier chunks.
    let table = Global::new(table);
    let mut word = tid;
    while word < counted_words {
        let (mut total, mut before) = ([0u32; 2], [0u32; 2]);
        let mut add = |chunk: u32, sums: u32| {
            let sums = [sums & 0xffff, sums >> 16];
            unroll::<2>(|i| {
                before[i] += if chunk < chunk_id { sums[i] } else { 0 };
                total[i] += sums[i];
            });
        };
        if chunks > 1 {
            scan_warps(c, word);
            let mut g = 0;
            while g < chunks {
                let mut n = [0u32; 8];
                unroll::<8>(|i| {
                    if g + (i as u32) < chunks {
                        n[i] = table.get((g + i as u32) * row + word);
                    }
                });
                unroll::<8>(|i| add(g + i as u32, n[i]));
                g += 8;
            }
        } else {
            add(0, scan_warps(c, word));
        }
        unroll::<2>(|i| {
            counted.set(2 * word + i as u32, total[i]);
            bases.set(2 * word + i as u32, before[i]);
        });
        word += threads;
    }
    thread::sync_threads();

    // Where each expert starts, and its number among the local ones: an exclusive scan, both in one word.
    let per_thread = bins.div_ceil(threads);
    let (from, to) = ((tid * per_thread).min(bins), ((tid + 1) * per_thread).min(bins));
    let room = |bin: u32| {
        if mask && bin < local && map.expert_map.get(bin) == 0 {
            return 0;
        }
        let blocks = counted.get(bin).div_ceil(block);
        let blocks = if flags & KEEP_EMPTY != 0 { blocks.max(1) } else { blocks };
        1 << 32 | (blocks * block) as u64
    };
    let mut sum = 0u64;
    for bin in from..to {
        sum += room(bin);
    }
    let up_to = warp::scan(sum, |a, b| a + b);
    if lane == 31 {
        warp_sums.set(warp_id, up_to);
    }
    thread::sync_threads();
    let (mut at, mut end) = (up_to - sum, 0);
    for w in 0..warps {
        let s = warp_sums.get(w);
        at += if w < warp_id { s } else { 0 };
        end += s;
    }
    let padded = end as u32;
    for bin in from..to {
        let start = at as u32;
        starts.set(bin, start);
        bases.set(bin, start + bases.get(bin));
        labels.set(bin, if mask { (at >> 32) as u32 } else { bin });
        at += room(bin);
    }
    thread::sync_threads();

    // The pairs.
    let (sorted_ids, weights_out) = (GlobalMut::new(sorted_ids), GlobalMut::new(sorted_weights));
    let (positions_out, topk_weights) = (GlobalMut::new(positions), Global::new(topk_weights));
    let (weighted, inverse) = (!sorted_weights.is_null(), !positions.is_null());
    // There are pairs only if tokens have slots.
    let divisor = slots.max(1);
    let divided = packed || slots != top_k;
    unroll::<ITEMS>(|i| {
        let pair = c.first + i as u32 * 32 + lane;
        if (i as u32) < items && pair < tokens * slots {
            let (bin, rank) = (keys[i] & 0xffff, keys[i] >> 16);
            let mut to = u32::MAX;
            if keys[i] != NOWHERE {
                to = bases.get(bin) + c.counts.get(warp_id * c.columns + bin) as u32 + rank;
                let (token, slot) = if divided { (pair / divisor, pair % divisor) } else { (0, 0) };
                sorted_ids.set(to, if packed { token | slot << 24 } else { pair } as i32);
                if weighted {
                    let listed = if divided { token as usize * top_k as usize + slot as usize } else { pair as usize };
                    weights_out.set(to, if slot < top_k { topk_weights.get(listed) } else { 1.0 });
                }
            }
            if inverse {
                positions_out.set(pair, to as i32);
            }
        }
    });

    // What describes the experts; each chunk does its share. A block of the list belongs to the last expert that starts at
    // or before it: those without pairs start where the next one does.
    let expert_ids = GlobalMut::new(expert_ids);
    let label_of = |position: u32| {
        let (mut low, mut high) = (0, bins);
        while high - low > 1 {
            let middle = (low + high) / 2;
            if starts.get(middle) <= position {
                low = middle;
            } else {
                high = middle;
            }
        }
        low
    };
    let mut b = chunk_id * threads + tid;
    while b < capacity / block {
        let position = b * block;
        expert_ids.set(b, if position < padded { labels.get(label_of(position)) as i32 } else { -1 });
        b += chunks * threads;
    }
    let mut bin = chunk_id * threads + tid;
    while bin < bins {
        if !offsets.is_null() {
            GlobalMut::new(offsets).set(bin, starts.get(bin) as i32);
        }
        if !expert_counts.is_null() {
            GlobalMut::new(expert_counts).set(bin, counted.get(bin) as i32);
        }
        bin += chunks * threads;
    }
    if chunk_id == 0 && tid == 0 {
        let totals = GlobalMut::new(totals);
        totals.set(0u32, padded as i32);
        if packed {
            totals.set(1u32, present as i32);
        }
        if !offsets.is_null() {
            GlobalMut::new(offsets).set(bins, padded as i32);
        }
        if !invalid.is_null() {
            GlobalMut::new(invalid).set(0u32, counted.get(bins) as i32);
        }
    }
}

/// Zeroes a share of a buffer: `part` of `parts`.
#[inline(always)]
pub(super) unsafe fn fill_zero(buffer: *mut u8, bytes: usize, part: u32, parts: u32) {
    let head = (buffer as usize).wrapping_neg() % 16;
    let head = head.min(bytes);
    let words = (bytes - head) / 16;
    let tail = head + words * 16;
    let out = GlobalMut::new(buffer);
    let stride = (parts * thread::block_dim_x()) as usize;
    let first = (part * thread::block_dim_x() + thread::thread_idx_x()) as usize;
    let mut i = first;
    while i < words {
        out.set_as(head + 16 * i, B128([0u32; 4]));
        i += stride;
    }
    if first < head {
        out.set(first, 0);
    }
    if first < bytes - tail {
        out.set(tail + first, 0);
    }
}

entries! {
    /// Arguments of `moe_sort_count`; see [`sort_count`].
    pub struct CountArgs(
        table: *mut u32, sorted_ids: *mut i32, sorted_weights: *mut f32, topk_ids: *const i32, expert_map: *const i32,
        num_tokens: *const i32, tokens: u32, top_k: u32, slots: u32, experts: u32, local: u32, shared_experts: u32,
        items: u32, capacity: u32, flags: u32,
    );
    moe_sort_count {} [1024] => sort_count;
}
entries! {
    /// Arguments of `moe_sort_scatter`, `moe_sort_block` and `moe_sort_cluster`; see [`sort_scatter`].
    pub struct Args(
        sorted_ids: *mut i32, expert_ids: *mut i32, totals: *mut i32, sorted_weights: *mut f32, positions: *mut i32,
        offsets: *mut i32, expert_counts: *mut i32, invalid: *mut i32, zero: *mut u8, zero_bytes: usize,
        topk_ids: *const i32, topk_weights: *const f32, expert_map: *const i32, num_tokens: *const i32,
        table: *const u32, tokens: u32, top_k: u32, slots: u32, experts: u32, local: u32, shared_experts: u32,
        block: u32, items: u32, chunks: u32, capacity: u32, flags: u32,
    );
    moe_sort_scatter {} [1024] => sort_scatter;
    moe_sort_block {} [256] => sort_block::<1>;
    moe_sort_cluster {} [256; Sm90a] => sort_block::<{ CLUSTER }>;
}
