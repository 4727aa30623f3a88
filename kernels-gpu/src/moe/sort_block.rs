//! Sorting of pairs by expert, as in [`sort`](super::sort), in one launch: by a block, or by a cluster of eight.
//!
//! What counts is the number of instructions from the moment that the ids are there: nothing waits for memory but at the beginning,
//! and each step needs what the one before it found. So all that does not depend on ids is done before the wait for what came
//! before the launch; there are no sizes but those fixed here, and no divisions; a thread has two experts, counters of 16 bits, as one word, and
//! says itself which blocks of the list are theirs; and options that few callers ask for are out of the way.
//!
//! Warps count their pairs and sum their counters over warps; the blocks of a cluster send them to each other, and each scans all of them over experts,
//! in units of the list's blocks. A cluster pads just the end of each expert's share and the end of the list, since nothing orders one block's
//! padding before another's pairs; a block by itself pads the list while it waits for the ids, and pairs overwrite that.

use super::pairs::{INVALID, NOWHERE, Pairs, existing_tokens};
use super::sort::{KEEP_EMPTY, MASK, PACKED, fill_zero, pad, sentinel};
use cuda_std::shared::Carver;
use cuda_std::vec::{B64, B128};
use cuda_std::{Global, GlobalMut, cluster, dependent_launch, mbarrier, thread, unroll, warp};

/// Warps of a block.
pub const WARPS: usize = 8;
/// Threads of a block.
pub const THREADS: usize = WARPS * 32;
/// Pairs of a lane, at most.
pub const ITEMS: usize = 4;
/// The most experts: two of a thread.
pub const MAX_BINS: usize = THREADS * 2;
/// Blocks of the cluster.
pub const CLUSTER: usize = 8;
/// The largest blocks of the list.
pub const MAX_BLOCK: u32 = 1 << 16;
/// Counters of a warp: those of the experts, of invalid ids, and what makes them a multiple of 16 bytes.
const COLUMNS: usize = MAX_BINS + 8;
/// The same, two in a word.
const WORDS: usize = COLUMNS / 2;

/// Dynamic shared memory.
pub const fn shared_bytes(blocks: usize) -> usize {
    let rows = if blocks > 1 { blocks * WORDS * 4 } else { 0 };
    16 + rows + WARPS * COLUMNS * 2 + WARPS * 4 + MAX_BINS * 4 + MAX_BINS * 8
}

/// See the [module](self); arguments are those of [`sort_scatter`](super::sort::sort_scatter), of which `table` is not used, and `chunks` is
/// `BLOCKS`: 1, or [`CLUSTER`], then the grid consists of such clusters. At most [`MAX_BINS`] experts, `items` is at most [`ITEMS`].
/// Block: [`THREADS`]; shared memory: [`shared_bytes`].
#[inline(always)]
pub unsafe fn sort_block<const BLOCKS: usize>(
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
    _table: *const u32,
    tokens: u32,
    top_k: u32,
    slots: u32,
    experts: u32,
    local: u32,
    shared_experts: u32,
    block: u32,
    items: u32,
    _chunks: u32,
    capacity: u32,
    flags: u32,
) {
    let (tid, lane, warp_id) = (thread::thread_idx_x(), warp::lane_id(), warp::warp_id());
    let (chunk, chunks) = (thread::block_idx_x(), BLOCKS as u32);
    let clustered = BLOCKS > 1;
    let bins = local + shared_experts;
    let words = bins.div_ceil(2);
    let mut carver = Carver::new();
    let came = carver.take::<u64>(2);
    let rows = carver.take::<u32>(if clustered { BLOCKS * WORDS } else { 0 });
    let counts = carver.take::<u16>(WARPS * COLUMNS);
    let warp_sums = carver.take::<u32>(WARPS);
    let bases = carver.take::<u32>(MAX_BINS);
    // Of each expert where its padding starts and ends.
    let spans = carver.take::<u32>(if clustered { MAX_BINS * 2 } else { 0 });
    if clustered {
        cluster::dims::<{ CLUSTER as u32 }>();
        if chunk < chunks {
            if tid == 0 {
                mbarrier::init(came.ptr(0u32), 1);
                mbarrier::fence_init();
                // Only the first block says how many ids are invalid.
                let more = !invalid.is_null() && chunk == 0;
                mbarrier::arrive_expect_tx(came.ptr(0u32), chunks * 4 * (words + more as u32));
            }
            warp::sync_warp(warp::FULL);
            // Nobody may send to a block that does not run yet, or has no mbarrier.
            cluster::arrive_relaxed();
        }
    }
    let mut i = tid * 8;
    while i < const { (WARPS * COLUMNS) as u32 } {
        counts.set_as(i, B128([0u32; 4]));
        i += const { THREADS as u32 * 8 };
    }
    // SAFETY: blocks are not empty.
    core::hint::assert_unchecked(block != 0);
    // For divisions by `block` of what is less than 2^13 + `block`: exact up to `MAX_BLOCK`.
    let reciprocal = u32::MAX / block;
    let mine = counts.offset(warp_id * COLUMNS as u32);
    let first = (chunk * WARPS as u32 + warp_id) * 32 * items + lane;
    thread::sync_threads();
    if clustered && chunk < chunks {
        cluster::wait();
    }
    let [reciprocal, first] = dependent_launch::begin_with([reciprocal, first]);
    // Steps of loops that run once or twice, [`THREADS`] by another name: nobody can know them, and unroll those.
    let threads = thread::block_dim_x();
    let (one, warp_step, list_step) = (threads / THREADS as u32, threads / WARPS as u32, threads * chunks);
    if chunk >= chunks {
        return fill_zero(zero, zero_bytes, chunk - chunks, thread::grid_dim_x() - chunks);
    }

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
    let here = present * slots;
    // All ids are on their way before the first is looked at.
    let mut ids = [-1i32; ITEMS];
    if slots == top_k {
        unroll::<ITEMS>(|i| {
            let pair = first + i as u32 * 32;
            if (i as u32) < items && pair < here {
                ids[i] = map.topk_ids.get(pair);
            }
        });
    } else {
        unroll::<ITEMS>(|i| {
            let pair = first + i as u32 * 32;
            if (i as u32) < items && pair < here {
                ids[i] = map.id(pair);
            }
        });
    }
    let padding = sentinel(flags, tokens, slots, present);
    if !clustered {
        pad(sorted_ids, sorted_weights, capacity, padding, 0, 1);
    }

    // The bin of each pair, and the lanes with the same one.
    let (mut own, mut peers) = ([NOWHERE; ITEMS], [0u32; ITEMS]);
    if expert_map.is_null() {
        unroll::<ITEMS>(|i| {
            if (i as u32) < items {
                let id = ids[i] as u32;
                let other = if id.wrapping_sub(experts) < shared_experts {
                    local.wrapping_add(id.wrapping_sub(experts))
                } else {
                    MAX_BINS as u32
                };
                let other = if id == NOWHERE { id } else { other };
                own[i] = if id < experts { id } else { other };
                peers[i] = warp::warp_match_any_32(warp::FULL, own[i]);
            }
        });
    } else {
        unroll::<ITEMS>(|i| {
            if (i as u32) < items {
                let mut bin = map.bin_of_id(ids[i]);
                if mask && bin < local && map.expert_map.get(bin) == 0 {
                    bin = NOWHERE;
                }
                own[i] = if bin == INVALID { MAX_BINS as u32 } else { bin };
                peers[i] = warp::warp_match_any_32(warp::FULL, own[i]);
            }
        });
    }
    let mut ranks = [0u32; ITEMS];
    unroll::<ITEMS>(|i| {
        if (i as u32) < items {
            let bin = own[i];
            let below = (peers[i] & ((1 << lane) - 1)).count_ones();
            let before = if bin != NOWHERE { mine.get(bin) as u32 } else { 0 };
            warp::sync_warp(warp::FULL);
            if bin != NOWHERE && below == 0 {
                mine.set(bin, (before + peers[i].count_ones()) as u16);
            }
            warp::sync_warp(warp::FULL);
            ranks[i] = before + below;
        }
    });
    thread::sync_threads();

    // Two counters in a word, of all warps; each becomes the sum of those before it.
    let mut total = 0;
    if tid < words {
        let mut n = [0u32; WARPS];
        unroll::<WARPS>(|w| n[w] = counts.get_as(w as u32 * COLUMNS as u32 + 2 * tid));
        unroll::<WARPS>(|w| total += n[w]);
        if clustered {
            let place = rows.ptr(chunk * WORDS as u32 + tid);
            unroll::<BLOCKS>(|r| {
                let to = r as u32;
                cluster::store_async_u32(cluster::map(place, to), total, cluster::map(came.ptr(0u32), to));
            });
        }
        let mut running = 0;
        unroll::<WARPS>(|w| {
            counts.set_as::<u32>(w as u32 * COLUMNS as u32 + 2 * tid, running);
            running += n[w];
        });
    }
    let mut bad = 0;
    if !invalid.is_null() && tid == 0 {
        for w in 0..WARPS as u32 {
            bad += counts.get(w * COLUMNS as u32 + MAX_BINS as u32) as u32;
        }
        if clustered {
            let place = rows.ptr(chunk * WORDS as u32 + MAX_BINS as u32 / 2);
            cluster::store_async_u32(cluster::map(place, 0), bad, cluster::map(came.ptr(0u32), 0));
        }
    }
    // Those of earlier blocks.
    let mut before = 0;
    if clustered {
        // Blocks that have all of it have been sent to for the last time, and may end.
        mbarrier::wait_parity(came.ptr(0u32), 0);
        total = 0;
        if tid < words {
            unroll::<BLOCKS>(|g| {
                let sums = rows.get(g as u32 * WORDS as u32 + tid);
                before += if (g as u32) < chunk { sums } else { 0 };
                total += sums;
            });
        }
    }

    // Blocks of each expert in the low half, in the high one whether it has a number; and those of all experts before.
    let bin = |i: usize| 2 * tid + i as u32;
    let count = |i: usize| total >> (16 * i) & 0xffff;
    let mut rooms = [0u32; 2];
    unroll::<2>(|i| {
        let exists = !mask || bin(i) >= local || bin(i) < bins && map.expert_map.get(bin(i)) != 0;
        if bin(i) < bins && exists {
            let n = count(i) + block - 1;
            let blocks = ((n as u64 * reciprocal as u64 + n as u64) >> 32) as u32;
            let blocks = if flags & KEEP_EMPTY != 0 { blocks.max(1) } else { blocks };
            rooms[i] = 1 << 16 | blocks;
        }
    });
    let sum = rooms[0] + rooms[1];
    let up_to = warp::scan(sum, |a, b| a + b);
    if lane == 31 {
        warp_sums.set(warp_id, up_to);
    }
    thread::sync_threads();
    let (mut at, mut end) = (up_to - sum, 0);
    unroll::<{ WARPS / 4 }>(|w| {
        let B128(sums) = warp_sums.get_as::<B128<u32, 4>>(4 * w);
        unroll::<4>(|i| {
            at += if ((4 * w + i) as u32) < warp_id { sums[i] } else { 0 };
            end += sums[i];
        });
    });
    let used = end & 0xffff;
    let padded = used * block;
    let firsts = [at & 0xffff, (at + rooms[0]) & 0xffff];
    let starts = [firsts[0] * block, firsts[1] * block];
    if tid < words {
        bases.set_as(2 * tid, B64([starts[0] + (before & 0xffff), starts[1] + (before >> 16)]));
        if clustered {
            let end = |i: usize| (firsts[i] + (rooms[i] & 0xffff)) * block;
            spans.set_as(4 * tid, B128([starts[0] + count(0), end(0), starts[1] + count(1), end(1)]));
        }
    }
    thread::sync_threads();

    // The pairs.
    let (sorted_ids, weights_out) = (GlobalMut::new(sorted_ids), GlobalMut::new(sorted_weights));
    let (positions_out, topk_weights) = (GlobalMut::new(positions), Global::new(topk_weights));
    let (weighted, inverse) = (!sorted_weights.is_null(), !positions.is_null());
    // There are pairs only if tokens have slots.
    let divisor = slots.max(1);
    let place = |i: usize| {
        if own[i] < bins { bases.get(own[i]) + mine.get(own[i]) as u32 + ranks[i] } else { u32::MAX }
    };
    if packed || slots != top_k || inverse {
        unroll::<ITEMS>(|i| {
            let pair = first + i as u32 * 32;
            if (i as u32) < items && pair < tokens * slots {
                let to = place(i);
                if to != u32::MAX {
                    let (token, slot) = (pair / divisor, pair % divisor);
                    sorted_ids.set(to, if packed { token | slot << 24 } else { pair } as i32);
                    if weighted {
                        let at = token as usize * top_k as usize + slot as usize;
                        weights_out.set(to, if slot < top_k { topk_weights.get(at) } else { 1.0 });
                    }
                }
                if inverse {
                    positions_out.set(pair, to as i32);
                }
            }
        });
    } else {
        let mut weights = [0f32; ITEMS];
        unroll::<ITEMS>(|i| {
            if weighted && (i as u32) < items && own[i] < bins {
                weights[i] = topk_weights.get(first + i as u32 * 32);
            }
        });
        unroll::<ITEMS>(|i| {
            if (i as u32) < items && own[i] < bins {
                let to = place(i);
                sorted_ids.set(to, (first + i as u32 * 32) as i32);
                if weighted {
                    weights_out.set(to, weights[i]);
                }
            }
        });
    }

    // Whose the list's blocks are: the first few of an expert by its own thread, others by a warp together.
    let expert_ids = GlobalMut::new(expert_ids);
    let few = 8;
    let mut many = [false; 2];
    unroll::<2>(|i| {
        let label = if mask { (at + if i > 0 { rooms[0] } else { 0 }) >> 16 } else { bin(i) };
        let blocks = if !clustered || tid % chunks == chunk { rooms[i] & 0xffff } else { 0 };
        let mut b = 0;
        while b < blocks.min(few) {
            expert_ids.set(firsts[i] + b, label as i32);
            b += one;
        }
        many[i] = blocks > few;
    });
    let mut whose = warp::warp_vote_ballot(warp::FULL, many[0] || many[1]);
    while whose != 0 {
        let from = whose.trailing_zeros();
        whose &= whose - 1;
        unroll::<2>(|i| {
            let label = if mask { (at + if i > 0 { rooms[0] } else { 0 }) >> 16 } else { bin(i) };
            let label = warp::shfl_idx(label, from);
            let (start, blocks) = (warp::shfl_idx(firsts[i], from), warp::shfl_idx(rooms[i] & 0xffff, from));
            let mut b = few + lane;
            while b < blocks {
                expert_ids.set(start + b, label as i32);
                b += warp_step;
            }
        });
    }
    // The rest of the list.
    let mut b = used + chunk * THREADS as u32 + tid;
    while (b + 1) * block <= capacity {
        expert_ids.set(b, -1);
        b += list_step;
    }
    if clustered {
        let each = bins.div_ceil(const { (BLOCKS * WARPS) as u32 });
        let from = (chunk * WARPS as u32 + warp_id) * each;
        let to = (from + each).min(bins);
        let mut expert = from;
        while expert < to {
            let B64([start, end]) = spans.get_as::<B64<u32, 2>>(2 * expert);
            let mut i = start + lane;
            while i < end {
                sorted_ids.set(i, padding);
                if weighted {
                    weights_out.set(i, 0.0);
                }
                i += warp_step;
            }
            expert += 1;
        }
        let mut i = padded + chunk * THREADS as u32 + tid;
        while i < capacity {
            sorted_ids.set(i, padding);
            if weighted {
                weights_out.set(i, 0.0);
            }
            i += list_step;
        }
    }
    if chunk == 0 {
        unroll::<2>(|i| {
            if bin(i) < bins {
                if !offsets.is_null() {
                    GlobalMut::new(offsets).set(bin(i), starts[i] as i32);
                }
                if !expert_counts.is_null() {
                    GlobalMut::new(expert_counts).set(bin(i), count(i) as i32);
                }
            }
        });
        if tid == 0 {
            let totals = GlobalMut::new(totals);
            totals.set(0u32, padded as i32);
            if packed {
                totals.set(1u32, present as i32);
            }
            if !offsets.is_null() {
                GlobalMut::new(offsets).set(bins, padded as i32);
            }
            if !invalid.is_null() {
                if clustered {
                    bad = 0;
                    for g in 0..BLOCKS as u32 {
                        bad += rows.get(g * WORDS as u32 + MAX_BINS as u32 / 2);
                    }
                }
                GlobalMut::new(invalid).set(0u32, bad as i32);
            }
        }
    }
}
