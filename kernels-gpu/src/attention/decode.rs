//! Attention of a few query tokens a sequence over a paged KV cache (decode), with split KV.
//!
//! # Work
//! A sequence of `len` keys is cut into chunks whose size depends on `len` alone ([`chunk_keys`]), never on the batch
//! or the grid: so a sequence's result does not depend on what it is batched with. An item is (sequence, chunk, KV
//! head), KV heads running fastest, because neighbouring heads are neighbours in memory. The grid is fixed; block `b`
//! takes items `b`, `b + grid`, …, and finds them by a running prefix sum over the lengths, which live on the device.
//! One captured graph therefore serves every step.
//!
//! # An item
//! Four warps, each with a pipeline of its own: 16 keys a stage, copied by `cp.async` into the warp's part of shared
//! memory, so that the loop needs no block barrier. All query rows that share the KV head (GQA group × query tokens)
//! are served by one read of K and V. Rows are the narrow side of the tensor-core products, in tiles of 8:
//!
//! * `Sᵀ[16 keys, 8 rows] = K[16 keys, D] · Qᵀ[D, 8 rows]`, K from shared memory by `ldmatrix`, Q held in registers;
//! * softmax over keys, online; a thread's columns of `Sᵀ` and of `Oᵀ` are the same rows, so rescaling needs no shuffle;
//! * `Oᵀ[D, 8 rows] += Vᵀ[D, 16 keys] · Pᵀ[16 keys, 8 rows]`, V transposed on the way by `ldmatrix.trans`, P turned
//!   into an operand by `movmatrix`.
//!
//! The four warps merge in shared memory. If the sequence has one chunk the block writes the output, otherwise a
//! partial result (unnormalised O, maximum, sum); the last block of a (sequence, KV head), known by a ticket, merges
//! the chunks in their order. Sources: FlashDecoding (Dao et al., 2023); paged attention (Kwon et al., 2023).

use super::soft_capped;
use crate::tensor_float::TensorFloat;
use core::f32::consts::{LN_2, LOG2_E};
use cuda_std::vec::B32;
use cuda_std::{
    Global, GlobalMut, Shared, atomic, bf16, cp_async, entries, f16, float, mma, shared, thread, unroll, warp,
};

/// Threads of a block: four warps.
pub const THREADS: usize = 128;
/// Warps of a block.
const WARPS: usize = THREADS / 32;
/// Keys of one stage of a warp's pipeline.
const KEYS: usize = 16;
/// Stages of a warp's pipeline: few, so that three blocks of heads of 128 share a multiprocessor.
const STAGES: usize = 2;

/// Elements of a row of K or V in shared memory: padded by 16 bytes, so that eight rows fall into different banks.
const fn row_elements(head_dim: usize) -> usize {
    head_dim + 8
}

/// Dynamic shared memory of a block of the kernel for heads of up to `head_dim` elements.
pub const fn shared_bytes(head_dim: usize) -> usize {
    WARPS * STAGES * 2 * KEYS * row_elements(head_dim) * 2 + WARPS * 2 * 32 * 4
}

/// Keys of a chunk of a sequence of `len` keys: at most 64 chunks up to 65536 keys, and few enough partial results that
/// they cost a few percent of the traffic.
#[inline(always)]
pub const fn chunk_keys(len: u32) -> u32 {
    if len <= 1024 {
        64
    } else if len <= 2048 {
        128
    } else if len <= 8192 {
        256
    } else if len <= 32768 {
        512
    } else {
        1024
    }
}

/// Chunks of a sequence of `len` keys; an empty one has one, which writes zeros.
#[inline(always)]
pub const fn chunks(len: u32) -> u32 {
    if len == 0 { 1 } else { len.div_ceil(chunk_keys(len)) }
}

/// The most chunks of any sequence of at most `max_len` keys.
pub const fn max_chunks(max_len: u32) -> u32 {
    let mut most = chunks(max_len);
    let mut edges = [1024, 2048, 8192, 32768];
    let mut i = 0;
    while i < edges.len() {
        if edges[i] > max_len {
            edges[i] = max_len;
        }
        if chunks(edges[i]) > most {
            most = chunks(edges[i]);
        }
        i += 1;
    }
    most
}

/// Where a work item lies.
#[derive(Clone, Copy)]
struct Item {
    sequence: u32,
    len: u32,
    /// The first chunk that the sliding window leaves.
    first_chunk: u32,
    /// Chunks that the window leaves.
    chunks: u32,
    chunk: u32,
    kv_head: u32,
}

/// Maps ascending item numbers to items, by a running prefix sum over the sequences.
struct Cursor {
    /// First sequence of the 32 whose item counts the lanes hold.
    base: u32,
    /// Items before `base`.
    before: u32,
}

/// Reach of a sequence: its first visible chunk and how many follow.
#[inline(always)]
fn visible_chunks(len: u32, q_len: u32, window: u32) -> (u32, u32) {
    // The first query token sees furthest back: keys from `len - q_len + 1 - window` on.
    let start = if window == 0 { 0 } else { (len + 1).saturating_sub(q_len + window) };
    let size = chunk_keys(len);
    let first = start / size;
    (first, chunks(len) - first)
}

impl Cursor {
    /// The item of number `index`, which is not below that of the call before; `None` beyond the last. For whole warps.
    #[inline(always)]
    unsafe fn find(
        &mut self,
        lens: Global<i32>,
        max_len: u32,
        batch: u32,
        q_len: u32,
        kv_heads: u32,
        window: u32,
        index: u32,
    ) -> Option<Item> {
        let lane = warp::lane_id();
        while self.base < batch {
            let sequence = self.base + lane;
            let len = if sequence < batch { (lens.get(sequence).max(0) as u32).min(max_len) } else { 0 };
            let (first_chunk, chunks) = visible_chunks(len, q_len, window);
            let mine = if sequence < batch { chunks * kv_heads } else { 0 };
            let mut sum = mine;
            unroll::<5>(|i| {
                let (below, ok) = warp::warp_shuffle_up(warp::FULL, sum, 1 << i, 32);
                sum += if ok { below } else { 0 };
            });
            let found = warp::warp_vote_ballot(warp::FULL, index < self.before + sum);
            if found != 0 {
                let owner = found.trailing_zeros();
                let start = self.before + warp::shfl_idx(sum - mine, owner);
                let within = index - start;
                core::hint::assert_unchecked(kv_heads != 0);
                let first_chunk = warp::shfl_idx(first_chunk, owner);
                return Some(Item {
                    sequence: self.base + owner,
                    len: warp::shfl_idx(len, owner),
                    first_chunk,
                    chunks: warp::shfl_idx(chunks, owner),
                    chunk: first_chunk + within / kv_heads,
                    kv_head: within % kv_heads,
                });
            }
            self.before += warp::shfl_idx(sum, 31);
            self.base += 32;
        }
        None
    }
}

/// One operand of the cache: where a token's vector of a head lies, in elements.
#[derive(Clone, Copy)]
pub struct CacheStrides {
    /// From page to page.
    pub page: usize,
    /// From token to token of a page.
    pub slot: usize,
    /// From head to head.
    pub head: usize,
}

/// Attention of `q_len` query tokens a sequence over its paged keys and values.
///
/// * `q`: `[batch, q_len, q_heads, head_dim]` with strides `q_token`, `q_head`; `out` likewise with `out_token`, `out_head`.
/// * `q`: its vectors start at multiples of 4 bytes, and `head_dim` is a multiple of 8.
/// * `k`, `v`: pages of `1 << page_shift` tokens, at least 8; a token's vector is dense and starts at a multiple of 16 bytes.
/// * `block_table`: `[batch, max_pages]`; `lens`: `[batch]`, keys of each sequence, the query tokens'
///   among them; more than `max_pages` hold count as what they hold.
/// * `lse`: `[batch, q_len, q_heads]` or null; `alibi`, `sinks`: `[q_heads]` or null.
/// * `partial`: workspace of `batch * kv_heads * max_chunks * rows * (head_dim + 2)` floats; `tickets`:
///   `[batch * kv_heads]`, zero before the first launch and after every one.
/// * `window`: keys that a query token sees, 0 for all; `soft_cap`: 0 for none.
///
/// `D` is `head_dim` rounded up to an instance; `TILES * 8` is at least `q_heads / kv_heads * q_len`.
/// Block: [`THREADS`]; any grid; shared memory: [`shared_bytes`] of `D`.
#[inline(always)]
pub unsafe fn decode<T: TensorFloat, const D: usize, const TILES: usize>(
    out: *mut T,
    lse: *mut f32,
    q: *const T,
    k: *const T,
    v: *const T,
    block_table: *const i32,
    lens: *const i32,
    alibi: *const f32,
    sinks: *const f32,
    partial: *mut f32,
    tickets: *mut u32,
    batch: u32,
    q_len: u32,
    q_heads: u32,
    kv_heads: u32,
    head_dim: u32,
    page_shift: u32,
    max_pages: u32,
    pages: u32,
    partial_chunks: u32,
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
) {
    let k_strides = CacheStrides { page: k_page, slot: k_slot, head: k_head };
    let v_strides = CacheStrides { page: v_page, slot: v_slot, head: v_head };
    core::hint::assert_unchecked(kv_heads != 0 && head_dim != 0);
    let group = q_heads / kv_heads;
    core::hint::assert_unchecked(group != 0);
    let rows = group * q_len;

    let (q, lens, table) = (Global::new(q), Global::new(lens), Global::new(block_table));
    let (k, v) = (Global::new(k), Global::new(v));
    let (has_alibi, has_sinks, has_lse) = (!alibi.is_null(), !sinks.is_null(), !lse.is_null());
    let (alibi, sinks) = (Global::new(alibi), Global::new(sinks));
    let (out, lse) = (GlobalMut::new(out), GlobalMut::new(lse));
    let (partial, tickets) = (GlobalMut::new(partial), tickets);

    let (tid, lane) = (thread::thread_idx_x(), warp::lane_id());
    let warp_id = warp::shfl_idx(tid / 32, 0);
    let (g, t) = (lane / 4, lane % 4);

    let row = const { row_elements(D) };
    let stage_elements = 2 * KEYS * row;
    let mut carver = shared::Carver::new();
    let stages = carver.take::<T>(WARPS * STAGES * stage_elements);
    let stats = carver.take::<f32>(WARPS * 2 * 32);
    let mine = stages.offset(warp_id as usize * (STAGES * stage_elements));

    let head_chunks = head_dim.div_ceil(8);
    let mut cursor = Cursor { base: 0, before: 0 };
    let mut index = thread::block_idx_x();
    while let Some(item) = cursor.find(lens, max_pages << page_shift, batch, q_len, kv_heads, window, index) {
        index += thread::grid_dim_x();
        let size = chunk_keys(item.len);
        let (start, end) = (item.chunk * size, ((item.chunk + 1) * size).min(item.len));
        let table = table.offset(item.sequence as usize * max_pages as usize);

        // Q as the B operand: register r of step s holds dimensions 16 s + 8 r + 2 t + {0, 1} of row g. Loads come first,
        // without branches: what lies beyond the rows or the head is read from inside and dropped.
        let mut qf = [[[0u32; 2]; 16]; TILES];
        let q_base = item.sequence as usize * q_len as usize * q_token;
        unroll::<TILES>(|tile| {
            let r = tile as u32 * 8 + g;
            let inside = if r < rows { r } else { 0 };
            let token = inside / group;
            let head = item.kv_head * group + (inside - token * group);
            let at = q_base + token as usize * q_token + head as usize * q_head;
            for s in 0..D / 16 {
                unroll::<2>(|half| {
                    let d = (16 * s + 8 * half) as u32 + 2 * t;
                    let B32([word]) = q.get_as::<B32<u32, 1>>(at + (if d < head_dim { d } else { 0 }) as usize);
                    qf[tile][s][half] = if r < rows && d < head_dim { word } else { 0 };
                });
            }
        });

        // What each of this thread's rows (2 t and 2 t + 1 of each tile) may see, and its ALiBi slope.
        let limit = |tile: usize, c: u32| {
            let r = tile as u32 * 8 + 2 * t + c;
            let token = r / group;
            if r < rows { (item.len + token + 1).saturating_sub(q_len) } else { 0 }
        };
        let slope = |tile: usize, c: u32| {
            let r = tile as u32 * 8 + 2 * t + c;
            if has_alibi && r < rows { alibi.get(item.kv_head * group + r % group) * LOG2_E } else { 0.0 }
        };
        let mut limits = [[0u32; 2]; TILES];
        unroll::<TILES>(|tile| {
            limits[tile] = [limit(tile, 0), limit(tile, 1)];
        });

        let mut o = [[[0f32; 4]; TILES]; 16];
        let mut m = [[f32::NEG_INFINITY; 2]; TILES];
        let mut l = [[0f32; 2]; TILES];

        // Groups of 16 keys go round the warps.
        let groups = (end - start).div_ceil(KEYS as u32);
        let own = (groups + (WARPS as u32 - 1) - warp_id) / WARPS as u32;
        let first_key = |i: u32| start + (i * WARPS as u32 + warp_id) * KEYS as u32;
        // Pages of the two halves of group `i`: a page has 8 keys or more. They are looked up a step ahead of their copies.
        // A wrong page number must not become a wrong address: it counts as unseen.
        let pages_of = |i: u32| {
            let page = |key: u32| {
                let page = if i < own && key < end { table.get(key >> page_shift) as u32 } else { u32::MAX };
                if page < pages { page } else { u32::MAX }
            };
            [page(first_key(i)), page(first_key(i) + 8)]
        };
        // Lanes cover rows of `LANES` 16-byte pieces, several rows at a time.
        let lanes = const {
            if D / 8 >= 32 {
                32
            } else if D / 8 > 8 {
                16
            } else {
                8
            }
        };
        let rows_at_once = const {
            32 / if D / 8 >= 32 {
                32
            } else if D / 8 > 8 {
                16
            } else {
                8
            }
        };
        let (piece, row_of_lane) = (lane % lanes, lane / lanes);
        let head_of =
            |s: CacheStrides| item.kv_head as usize * s.head + if piece < head_chunks { piece as usize * 8 } else { 0 };
        let (k_head_at, v_head_at) = (head_of(k_strides), head_of(v_strides));
        let slot_mask = (1u32 << page_shift) - 1;
        let copy = |i: u32, pages: [u32; 2]| {
            if i < own {
                let stage = mine.offset((i % STAGES as u32) as usize * stage_elements);
                let key = first_key(i);
                // Where each half's row of this lane starts; a wrong page reads nothing.
                let half = |s: CacheStrides, head: usize, h: usize| {
                    let page = if pages[h] == u32::MAX { 0 } else { pages[h] };
                    let slot = (key + 8 * h as u32) & slot_mask;
                    page as usize * s.page + slot as usize * s.slot + row_of_lane as usize * s.slot + head
                };
                let k_at = [half(k_strides, k_head_at, 0), half(k_strides, k_head_at, 1)];
                let v_at = [half(v_strides, v_head_at, 0), half(v_strides, v_head_at, 1)];
                for step in 0..KEYS / rows_at_once as usize {
                    let (h, first) = (step * rows_at_once as usize / 8, (step * rows_at_once as usize) % 8);
                    let r = step as u32 * rows_at_once + row_of_lane;
                    let readable = key + r < end && pages[h] != u32::MAX && piece < head_chunks;
                    if (piece as usize) < D / 8 {
                        let to = r as usize * row + piece as usize * 8;
                        let bytes = if readable { 16 } else { 0 };
                        let skip = |s: CacheStrides| if readable { first * s.slot } else { 0 };
                        cp_async::copy_16_zfill(stage.ptr(to), k.ptr(k_at[h] + skip(k_strides)), bytes);
                        cp_async::copy_16_zfill(stage.ptr(KEYS * row + to), v.ptr(v_at[h] + skip(v_strides)), bytes);
                    }
                }
            }
            cp_async::commit_group();
        };

        let mut seen_pages = pages_of(0);
        copy(0, seen_pages);
        let mut next_pages = pages_of(1);
        let mut i = 0;
        while i < own {
            // The copies of the step after this one overwrite what the step before it has read, which `sync_warp` at the
            // end of the loop has waited for.
            copy(i + 1, next_pages);
            let pages_after = pages_of(i + 2);
            cp_async::wait_group::<{ STAGES - 1 }>();
            warp::sync_warp(warp::FULL);

            let stage = mine.offset((i % STAGES as u32) as usize * stage_elements);
            let (ks, vs) = (stage, stage.offset(KEYS * row));
            // Two chains of products, so that one does not wait for the other.
            let mut s = [[[0f32; 4]; 2]; TILES];
            for step in 0..D / 16 {
                let a = mma::ldmatrix_x4(ks.ptr((lane as usize % 16) * row + 16 * step + 8 * (lane as usize / 16)));
                unroll::<TILES>(|tile| s[tile][step % 2] = T::mma(a, qf[tile][step], s[tile][step % 2]));
            }

            let key = first_key(i) + g;
            let mut p = [[0u32; 2]; TILES];
            unroll::<TILES>(|tile| {
                let mut x = [0f32; 4];
                unroll::<4>(|e| {
                    let (c, key) = (e % 2, key + 8 * (e as u32 / 2));
                    let score = (s[tile][0][e] + s[tile][1][e]) * scale;
                    let score = soft_capped(score, soft_cap);
                    let position = limits[tile][c];
                    let there = seen_pages[e / 2] != u32::MAX;
                    let seen = there && key < position && key < end && (window == 0 || key + window >= position);
                    // The slope is read again each time: it is seldom used and would cost registers.
                    let distance = (key as i32 + 1 - position as i32) as f32;
                    let bias = if has_alibi { slope(tile, c as u32) * distance } else { 0.0 };
                    x[e] = if seen { score * LOG2_E + bias } else { f32::NEG_INFINITY };
                });
                let mut rescale = [0f32; 2];
                unroll::<2>(|c| {
                    let mut top = float::max(x[c], x[c + 2]);
                    unroll::<3>(|i| top = float::max(top, warp::shfl_xor(top, 4 << i)));
                    let new = float::max(m[tile][c], top);
                    // Nothing seen yet: any finite reference will do.
                    let reference = if new == f32::NEG_INFINITY { 0.0 } else { new };
                    rescale[c] = float::fast::exp2(m[tile][c] - reference);
                    m[tile][c] = new;
                    x[c] = float::fast::exp2(x[c] - reference);
                    x[c + 2] = float::fast::exp2(x[c + 2] - reference);
                    l[tile][c] = l[tile][c] * rescale[c] + (x[c] + x[c + 2]);
                });
                p[tile] = [
                    mma::movmatrix_trans(T::pack(T::from_f32(x[0]), T::from_f32(x[1]))),
                    mma::movmatrix_trans(T::pack(T::from_f32(x[2]), T::from_f32(x[3]))),
                ];
                for step in 0..D / 16 {
                    unroll::<4>(|e| o[step][tile][e] *= rescale[e % 2]);
                }
            });
            for step in 0..D / 16 {
                let key = (lane % 8 + lane / 16 * 8) as usize;
                let a = mma::ldmatrix_x4_trans(vs.ptr(key * row + 16 * step + 8 * (lane as usize / 8 % 2)));
                unroll::<TILES>(|tile| o[step][tile] = T::mma(a, p[tile], o[step][tile]));
            }
            // The next step's copies overwrite what this one has read.
            warp::sync_warp(warp::FULL);
            seen_pages = next_pages;
            next_pages = pages_after;
            i += 1;
        }
        cp_async::wait_group::<0>();

        // Merge of the four warps. Their stages are drained, so each reuses its own for its O.
        unroll::<TILES>(|tile| {
            unroll::<2>(|c| {
                unroll::<3>(|i| l[tile][c] += warp::shfl_xor(l[tile][c], 4 << i));
                if g == 0 {
                    let r = tile as u32 * 8 + 2 * t + c as u32;
                    stats.set(warp_id * 64 + 2 * r, m[tile][c]);
                    stats.set(warp_id * 64 + 2 * r + 1, l[tile][c]);
                }
            });
        });
        warp::sync_warp(warp::FULL);
        let own_o = Shared::<f32>::at(warp_id as usize * (STAGES * stage_elements * 2), TILES * 8 * D);
        unroll::<TILES>(|tile| {
            for step in 0..D / 16 {
                unroll::<4>(|e| {
                    let (r, d) = (tile as u32 * 8 + 2 * t + e as u32 % 2, step as u32 * 16 + g + 8 * (e as u32 / 2));
                    own_o.set(r as usize * D + d as usize, o[step][tile][e]);
                });
            }
        });
        thread::sync_threads();

        let whole = item.chunks == 1;
        let pair = item.sequence * kv_heads + item.kv_head;
        let slot_floats = rows as usize * (head_dim as usize + 2);
        let slots = partial.offset(pair as usize * partial_chunks as usize * slot_floats);
        let finish = |r: u32, d: u32, top: f32, sum: f32, value: f32| {
            let token = r / group;
            let head = item.kv_head * group + (r - token * group);
            let sink = if has_sinks { sinks.get(head) * LOG2_E } else { f32::NEG_INFINITY };
            let total_top = float::max(top, sink);
            let reference = if total_top == f32::NEG_INFINITY { 0.0 } else { total_top };
            let shrink = float::fast::exp2(top - reference);
            let total = sum * shrink + float::fast::exp2(sink - reference);
            let query = item.sequence as usize * q_len as usize + token as usize;
            let value = if total == 0.0 { 0.0 } else { float::fast::div(value * shrink, total) };
            out.set(query * out_token + head as usize * out_head + d as usize, T::from_f32(value));
            if has_lse && d == 0 {
                let value = if total == 0.0 { f32::NEG_INFINITY } else { (reference + float::log2(total)) * LN_2 };
                lse.set(query * q_heads as usize + head as usize, value);
            }
        };

        let mut e = tid;
        while e < rows * head_dim {
            let (r, d) = (e / head_dim, e % head_dim);
            let mut top = f32::NEG_INFINITY;
            for w in 0..WARPS as u32 {
                top = float::max(top, stats.get(w * 64 + 2 * r));
            }
            let reference = if top == f32::NEG_INFINITY { 0.0 } else { top };
            let (mut sum, mut value) = (0.0, 0.0);
            for w in 0..WARPS as u32 {
                let weight = float::fast::exp2(stats.get(w * 64 + 2 * r) - reference);
                sum += weight * stats.get(w * 64 + 2 * r + 1);
                let o = Shared::<f32>::at(w as usize * (STAGES * stage_elements * 2), TILES * 8 * D);
                value += weight * o.get(r as usize * D + d as usize);
            }
            if whole {
                finish(r, d, top, sum, value);
            } else {
                let slot = slots.offset((item.chunk - item.first_chunk) as usize * slot_floats);
                slot.set(e, value);
                if d == 0 {
                    slot.set(rows * head_dim + 2 * r, top);
                    slot.set(rows * head_dim + 2 * r + 1, sum);
                }
            }
            e += THREADS as u32;
        }
        if !whole {
            // One thread's release covers what the barrier ordered before it, and its acquire what comes after the next.
            thread::sync_threads();
            if tid == 0 {
                let ticket = tickets.add(pair as usize);
                let before = atomic::fetch_add(ticket, 1, atomic::Device, atomic::AcqRel);
                let last = before + 1 == item.chunks;
                if last {
                    atomic::exchange_u32(ticket, 0);
                }
                stats.set(0u32, last as u32 as f32);
            }
            thread::sync_threads();
            if stats.get(0u32) != 0.0 {
                let mut e = tid;
                while e < rows * head_dim {
                    let (r, d) = (e / head_dim, e % head_dim);
                    let (mut top, mut sum, mut value) = (f32::NEG_INFINITY, 0f32, 0f32);
                    let mut chunk = 0;
                    while chunk < item.chunks {
                        let slot = slots.offset(chunk as usize * slot_floats);
                        let (t, s) = (slot.get(rows * head_dim + 2 * r), slot.get(rows * head_dim + 2 * r + 1));
                        let new = float::max(top, t);
                        let reference = if new == f32::NEG_INFINITY { 0.0 } else { new };
                        let (old_weight, weight) =
                            (float::fast::exp2(top - reference), float::fast::exp2(t - reference));
                        sum = sum * old_weight + s * weight;
                        value = value * old_weight + slot.get(e) * weight;
                        top = new;
                        chunk += 1;
                    }
                    finish(r, d, top, sum, value);
                    e += THREADS as u32;
                }
            }
        }
        // The next item's copies and statistics overwrite what the merge has read.
        thread::sync_threads();
    }
}

entries! {
    /// Arguments of every `decode_*` entry; see [`decode`].
    pub struct Args<T>(
        out: *mut T, lse: *mut f32, q: *const T, k: *const T, v: *const T, block_table: *const i32, lens: *const i32,
        alibi: *const f32, sinks: *const f32, partial: *mut f32, tickets: *mut u32, batch: u32, q_len: u32, q_heads: u32,
        kv_heads: u32, head_dim: u32, page_shift: u32, max_pages: u32, pages: u32, partial_chunks: u32, q_token: usize,
        q_head: usize, out_token: usize, out_head: usize, k_page: usize, k_slot: usize, k_head: usize, v_page: usize,
        v_slot: usize, v_head: usize, scale: f32, soft_cap: f32, window: u32,
    );
    decode_d64_r8_bf16 { type T = bf16; } [128, 4] => decode::<T, 64, 1>;
    decode_d64_r8_f16 { type T = f16; } [128, 4] => decode::<T, 64, 1>;
    decode_d128_r8_bf16 { type T = bf16; } [128, 3] => decode::<T, 128, 1>;
    decode_d128_r8_f16 { type T = f16; } [128, 3] => decode::<T, 128, 1>;
    decode_d128_r16_bf16 { type T = bf16; } [128, 2] => decode::<T, 128, 2>;
    decode_d128_r16_f16 { type T = f16; } [128, 2] => decode::<T, 128, 2>;
}
