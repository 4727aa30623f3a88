//! Attention of a few query tokens a sequence over a paged KV cache, the plain way: the kernel to read first.
//!
//! This is vLLM's `single_query_cached_kv_attention` (Kwon et al., 2023) without its tuning: a block for each
//! (sequence, query token, head); scores of a tile of keys in shared memory; a softmax over the tile; then each
//! thread sums its dimensions of V over the tile. The maximum and the sum are carried from tile to tile, so that any
//! length works. It takes every layout and storage type, at any head size, which makes it the fallback for what the
//! tensor-core kernel ([`decode`](super::decode)) does not cover, and its second oracle.

use super::soft_capped;
use crate::kv_cache::CacheElement;
use cuda_std::{
    E4M3, E5M2, Float, Global, GlobalMut, bf16, dependent_launch, entries, f16, float, shared, thread, warp,
};

/// Threads of a block.
pub const THREADS: usize = 128;
/// Keys of a tile.
pub const TILE: usize = 256;
/// The largest head: each thread keeps this many dimensions over [`THREADS`].
pub const MAX_HEAD_DIM: usize = 256;
/// Dynamic shared memory: the query, the tile's scores, and a word for each warp.
pub const SHARED_BYTES: usize = (MAX_HEAD_DIM + TILE + THREADS / 32) * 4;

/// The sum or maximum of a value over the block; `slots` is a word for each warp.
#[inline(always)]
unsafe fn block_reduce(value: f32, slots: shared::Shared<f32>, op: impl Fn(f32, f32) -> f32 + Copy) -> f32 {
    let value = warp::reduce(value, op);
    let (tid, lane) = (thread::thread_idx_x(), warp::lane_id());
    if lane == 0 {
        slots.set(tid / 32, value);
    }
    thread::sync_threads();
    let mut all = slots.get(0u32);
    for w in 1..THREADS as u32 / 32 {
        all = op(all, slots.get(w));
    }
    thread::sync_threads();
    all
}

/// `out[b, i, h] = softmax(scale · q[b, i, h] · K[b]ᵀ + bias) · V[b]`.
///
/// Arguments as for [`decode`](super::decode::decode), and: the element of dimension `d` of a key lies at
/// `d / k_run * k_run_stride + d % k_run` of its vector, of a value likewise; `k_scales`, `v_scales` are null, or
/// `[kv_heads]` if `scale_per_head` is 1, or `[1]` if it is 0. Grid: (q_heads, q_len, batch); block: [`THREADS`]; shared memory: [`SHARED_BYTES`].
#[inline(always)]
pub unsafe fn plain<T: Float, C: CacheElement>(
    out: *mut T,
    lse: *mut f32,
    q: *const T,
    k: *const C,
    v: *const C,
    block_table: *const i32,
    lens: *const i32,
    alibi: *const f32,
    sinks: *const f32,
    k_scales: *const f32,
    v_scales: *const f32,
    scale_per_head: u32,
    q_heads: u32,
    kv_heads: u32,
    head_dim: u32,
    page_size: u32,
    max_pages: u32,
    pages: u32,
    q_token: usize,
    q_head: usize,
    out_token: usize,
    out_head: usize,
    k_page: usize,
    k_slot: usize,
    k_head: usize,
    k_run: u32,
    k_run_stride: usize,
    v_page: usize,
    v_slot: usize,
    v_head: usize,
    v_run: u32,
    v_run_stride: usize,
    scale: f32,
    soft_cap: f32,
    window: u32,
) {
    dependent_launch::begin();
    core::hint::assert_unchecked(kv_heads != 0 && page_size != 0 && k_run != 0 && v_run != 0 && q_heads >= kv_heads);
    let (head, token, sequence) = (thread::block_idx_x(), thread::block_idx_y(), thread::block_idx_z());
    let q_len = thread::grid_dim_y();
    let kv_head = head / (q_heads / kv_heads);
    let query = sequence as usize * q_len as usize + token as usize;

    let has = (!alibi.is_null(), !sinks.is_null(), !lse.is_null(), !k_scales.is_null(), !v_scales.is_null());
    let (k, v) = (Global::new(k), Global::new(v));
    let q = Global::new(q).offset(query * q_token + head as usize * q_head);
    let table = Global::new(block_table).offset(sequence as usize * max_pages as usize);
    let slope = if has.0 { Global::new(alibi).get(head) } else { 0.0 };
    let k_scale = if has.3 { Global::new(k_scales).get(kv_head * scale_per_head) } else { 1.0 };
    let v_scale = if has.4 { Global::new(v_scales).get(kv_head * scale_per_head) } else { 1.0 };
    let len = (Global::new(lens).get(sequence).max(0) as u32).min(max_pages * page_size);
    // Causal among the query tokens, which are the last of the sequence's keys.
    let end = (len + token + 1).saturating_sub(q_len);
    let start = if window == 0 { 0 } else { end.saturating_sub(window) };

    let mut carver = shared::Carver::new();
    let query_row = carver.take::<f32>(MAX_HEAD_DIM);
    let scores = carver.take::<f32>(TILE);
    let slots = carver.take::<f32>(THREADS / 32);
    let (tid, lane) = (thread::thread_idx_x(), warp::lane_id());
    let mut d = tid;
    while d < head_dim {
        query_row.set(d, q.get(d).to_f32());
        d += THREADS as u32;
    }
    thread::sync_threads();

    const OWN: usize = MAX_HEAD_DIM / THREADS;
    let mut o = [0f32; OWN];
    let (mut top, mut sum) = (f32::NEG_INFINITY, 0f32);
    let mut first = start;
    while first < end {
        let keys = (end - first).min(TILE as u32);
        // A warp for each key: scores.
        let mut i = tid / 32;
        while i < keys {
            let key = first + i;
            let page = table.get(key / page_size) as u32;
            let mut dot = 0f32;
            if page < pages {
                let k =
                    k.offset(page as usize * k_page + (key % page_size) as usize * k_slot + kv_head as usize * k_head);
                let mut d = lane;
                while d < head_dim {
                    let at = (d / k_run) as usize * k_run_stride + (d % k_run) as usize;
                    dot = float::fma(query_row.get(d), k.get(at).widen(), dot);
                    d += 32;
                }
            }
            let score = warp::reduce_sum(dot) * (scale * k_scale);
            let score = soft_capped(score, soft_cap);
            if lane == 0 {
                let score = score + slope * (key as i32 + 1 - end as i32) as f32;
                scores.set(i, if page < pages { score } else { f32::NEG_INFINITY });
            }
            i += THREADS as u32 / 32;
        }
        thread::sync_threads();

        // Softmax over the tile, relative to the largest score so far.
        let mut tile_top = f32::NEG_INFINITY;
        let mut i = tid;
        while i < keys {
            tile_top = float::max(tile_top, scores.get(i));
            i += THREADS as u32;
        }
        let new = float::max(top, block_reduce(tile_top, slots, float::max));
        let reference = if new == f32::NEG_INFINITY { 0.0 } else { new };
        let mut tile_sum = 0.0;
        let mut i = tid;
        while i < keys {
            let p = float::exp(scores.get(i) - reference);
            scores.set(i, p);
            tile_sum += p;
            i += THREADS as u32;
        }
        let rescale = float::exp(top - reference);
        sum = sum * rescale + block_reduce(tile_sum, slots, |a, b| a + b);
        top = new;

        // A thread for each of its dimensions: P · V.
        o = o.map(|o| o * rescale);
        let mut i = 0;
        while i < keys {
            let key = first + i;
            let page = table.get(key / page_size) as u32;
            if page < pages {
                let v =
                    v.offset(page as usize * v_page + (key % page_size) as usize * v_slot + kv_head as usize * v_head);
                for (j, o) in o.iter_mut().enumerate() {
                    let d = tid + (j * THREADS) as u32;
                    if d < head_dim {
                        let at = (d / v_run) as usize * v_run_stride + (d % v_run) as usize;
                        *o = float::fma(scores.get(i), v.get(at).widen(), *o);
                    }
                }
            }
            i += 1;
        }
        thread::sync_threads();
        first += keys;
    }

    let sink = if has.1 { Global::new(sinks).get(head) } else { f32::NEG_INFINITY };
    let new = float::max(top, sink);
    let reference = if new == f32::NEG_INFINITY { 0.0 } else { new };
    let shrink = float::exp(top - reference);
    let total = sum * shrink + float::exp(sink - reference);
    let out = GlobalMut::new(out).offset(query * out_token + head as usize * out_head);
    for (j, o) in o.iter().enumerate() {
        let d = tid + (j * THREADS) as u32;
        if d < head_dim {
            out.set(d, T::from_f32(if total == 0.0 { 0.0 } else { float::fast::div(o * (v_scale * shrink), total) }));
        }
    }
    if has.2 && tid == 0 {
        let value = if total == 0.0 { f32::NEG_INFINITY } else { reference + float::log(total) };
        GlobalMut::new(lse).set(query * q_heads as usize + head as usize, value);
    }
}

entries! {
    /// Arguments of every `plain_*` entry; see [`plain`].
    pub struct Args<T, C>(
        out: *mut T, lse: *mut f32, q: *const T, k: *const C, v: *const C, block_table: *const i32, lens: *const i32,
        alibi: *const f32, sinks: *const f32, k_scales: *const f32, v_scales: *const f32, scale_per_head: u32, q_heads: u32, kv_heads: u32,
        head_dim: u32, page_size: u32, max_pages: u32, pages: u32, q_token: usize, q_head: usize, out_token: usize,
        out_head: usize, k_page: usize, k_slot: usize, k_head: usize, k_run: u32, k_run_stride: usize, v_page: usize,
        v_slot: usize, v_head: usize, v_run: u32, v_run_stride: usize, scale: f32, soft_cap: f32, window: u32,
    );
    plain_f32_f32 { type T = f32; type C = f32; } [128, 8] => plain::<T, C>;
    plain_f32_e4m3 { type T = f32; type C = E4M3; } [128, 8] => plain::<T, C>;
    plain_f32_e5m2 { type T = f32; type C = E5M2; } [128, 8] => plain::<T, C>;
    plain_f32_i8 { type T = f32; type C = i8; } [128, 8] => plain::<T, C>;
    plain_f16_f16 { type T = f16; type C = f16; } [128, 8] => plain::<T, C>;
    plain_f16_e4m3 { type T = f16; type C = E4M3; } [128, 8] => plain::<T, C>;
    plain_f16_e5m2 { type T = f16; type C = E5M2; } [128, 8] => plain::<T, C>;
    plain_f16_i8 { type T = f16; type C = i8; } [128, 8] => plain::<T, C>;
    plain_bf16_bf16 { type T = bf16; type C = bf16; } [128, 8] => plain::<T, C>;
    plain_bf16_e4m3 { type T = bf16; type C = E4M3; } [128, 8] => plain::<T, C>;
    plain_bf16_e5m2 { type T = bf16; type C = E5M2; } [128, 8] => plain::<T, C>;
    plain_bf16_i8 { type T = bf16; type C = i8; } [128, 8] => plain::<T, C>;
}
