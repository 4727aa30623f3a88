//! Attention of chunks of query tokens over a paged KV cache without tensor cores: every layout, type and head size.
//!
//! A warp takes one query row (token and head) and walks its keys 32 at a time, a lane for each: scores, one online
//! softmax step for all 32, then the values, each lane with its own dimensions. What the tensor-core kernels do not cover
//! comes here, and it is their second oracle.

use super::{narrow, soft_capped};
use crate::kv_cache::CacheElement;
use cuda_std::{
    E4M3, E5M2, Float, Global, GlobalMut, bf16, dependent_launch, entries, f16, float, shared, thread, warp,
};

/// Threads of a block: a row for each warp.
pub const THREADS: usize = 128;
/// The largest head.
pub const MAX_HEAD_DIM: usize = 256;
/// Dynamic shared memory: the queries.
pub const SHARED_BYTES: usize = THREADS / 32 * MAX_HEAD_DIM * 4;

/// Arguments as for [`prefill`](super::prefill::prefill), and: any `head_dim` up to [`MAX_HEAD_DIM`] and any `page_size`;
/// the element of dimension `d` of a key lies at `d / k_run * k_run_stride + d % k_run` of its vector, of a value likewise.
/// `NARROW`: the cache has elements of 8 bits, of which `kind` says the type ([`narrow`]) and `k_scales`, `v_scales` the scales: one,
/// or one for each KV head if `scale_per_head`.
/// Grid: a block for each four of `tokens * q_heads` rows; block: [`THREADS`]; shared memory: [`SHARED_BYTES`].
#[inline(always)]
pub unsafe fn plain<T: Float + CacheElement, const NARROW: bool>(
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
    scale_per_head: u32,
    kind: u32,
    sequences: u32,
    tokens: u32,
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
    causal: u32,
) {
    dependent_launch::begin();
    core::hint::assert_unchecked(kv_heads != 0 && page_size != 0 && k_run != 0 && v_run != 0 && q_heads != 0);
    let group = q_heads / kv_heads;
    core::hint::assert_unchecked(group != 0);
    let (warp_id, lane) = (thread::thread_idx_x() / 32, warp::lane_id());
    let row = thread::block_idx_x() * (THREADS as u32 / 32) + warp_id;
    let (token, head) = (row / q_heads, row % q_heads);
    let kv_head = head / group;
    let mut carver = shared::Carver::new();
    let query = carver.take::<f32>(THREADS / 32 * MAX_HEAD_DIM).offset(warp_id as usize * MAX_HEAD_DIM);

    // The first sequence whose chunk has the token.
    let starts = Global::new(starts);
    let inside = |v: i32| (v.max(0) as u32).min(tokens);
    let mut base = 0;
    let mut sequence = sequences;
    while base < sequences && sequence == sequences {
        let mine = base + lane;
        let there = mine < sequences && token >= inside(starts.get(mine)) && token < inside(starts.get(mine + 1));
        let found = warp::warp_vote_ballot(warp::FULL, there);
        if found != 0 {
            sequence = base + found.trailing_zeros();
        }
        base += 32;
    }
    if token >= tokens || sequence == sequences {
        return;
    }
    let (start, chunk_end) = (inside(starts.get(sequence)), inside(starts.get(sequence + 1)));
    let len = (Global::new(lens).get(sequence).max(0) as u32).min(max_pages * page_size);
    let position = len as i32 - (chunk_end - start) as i32 + (token - start) as i32;
    let end = if causal != 0 { ((position + 1).max(0) as u32).min(len) } else { len };
    let first = if window == 0 { 0 } else { end.saturating_sub(window) };

    let q = Global::new(q).offset(token as usize * q_token + head as usize * q_head);
    let mut d = lane;
    while d < head_dim {
        query.set(d, q.get(d).to_f32());
        d += 32;
    }
    warp::sync_warp(warp::FULL);

    let (mut k_scale, mut v_scale) = (1.0, 1.0);
    if NARROW {
        let at = if scale_per_head != 0 { kv_head } else { 0 };
        (k_scale, v_scale) = (Global::new(k_scales).get(at), Global::new(v_scales).get(at));
    }
    let element = |of: *const T, at: usize| {
        if NARROW {
            let byte = Global::new(of.cast::<u8>()).get(at);
            match kind {
                narrow::E4M3 => E4M3(byte).widen(),
                narrow::E5M2 => E5M2(byte).widen(),
                _ => CacheElement::widen(byte as i8),
            }
        } else {
            Global::new(of).get(at).widen()
        }
    };
    let table = Global::new(block_table).offset(sequence as usize * max_pages as usize);
    let slope = if alibi.is_null() { 0.0 } else { Global::new(alibi).get(head) };
    const OWN: usize = MAX_HEAD_DIM / 32;
    let mut o = [0f32; OWN];
    let (mut top, mut sum) = (f32::NEG_INFINITY, 0f32);
    let mut block = first;
    while block < end {
        let key = block + lane;
        let page = if key < end { table.get(key / page_size) as u32 } else { u32::MAX };
        let mut score = f32::NEG_INFINITY;
        if page < pages {
            let at = page as usize * k_page + (key % page_size) as usize * k_slot + kv_head as usize * k_head;
            let first = at;
            let mut dot = 0f32;
            let mut d = 0;
            while d < head_dim {
                let at = (d / k_run) as usize * k_run_stride + (d % k_run) as usize;
                dot = float::fma(query.get(d), element(k, first + at), dot);
                d += 1;
            }
            score = float::fma(slope, (key as i32 - position) as f32, soft_capped(dot * (scale * k_scale), soft_cap));
        }
        let new = float::max(top, warp::reduce(score, float::max));
        let reference = if new == f32::NEG_INFINITY { 0.0 } else { new };
        let p = float::exp(score - reference);
        let rescale = float::exp(top - reference);
        sum = sum * rescale + warp::reduce_sum(p);
        top = new;
        o = o.map(|o| o * rescale);
        let mut i = 0;
        while i < 32 {
            let (p, page) = (warp::shfl_idx(p, i), warp::shfl_idx(page, i));
            if page < pages {
                let key = block + i;
                let at = page as usize * v_page + (key % page_size) as usize * v_slot + kv_head as usize * v_head;
                let first = at;
                for (j, o) in o.iter_mut().enumerate() {
                    let d = lane + 32 * j as u32;
                    if d < head_dim {
                        let at = (d / v_run) as usize * v_run_stride + (d % v_run) as usize;
                        *o = float::fma(p, element(v, first + at), *o);
                    }
                }
            }
            i += 1;
        }
        block += 32;
    }

    let sink = if sinks.is_null() { f32::NEG_INFINITY } else { Global::new(sinks).get(head) };
    let all = float::max(top, sink);
    let reference = if all == f32::NEG_INFINITY { 0.0 } else { all };
    let shrink = float::exp(top - reference);
    let total = sum * shrink + float::exp(sink - reference);
    let out = GlobalMut::new(out).offset(token as usize * out_token + head as usize * out_head);
    for (j, o) in o.iter().enumerate() {
        let d = lane + 32 * j as u32;
        if d < head_dim {
            out.set(d, T::from_f32(if total == 0.0 { 0.0 } else { float::fast::div(o * (shrink * v_scale), total) }));
        }
    }
    if !lse.is_null() && lane == 0 {
        let value = if total == 0.0 { f32::NEG_INFINITY } else { reference + float::log(total) };
        GlobalMut::new(lse).set(token as usize * q_heads as usize + head as usize, value);
    }
}

entries! {
    /// Arguments of every `prefill_plain_*` entry; see [`plain`].
    pub struct Args<T>(
        out: *mut T, lse: *mut f32, q: *const T, k: *const T, v: *const T, starts: *const i32, lens: *const i32,
        block_table: *const i32, alibi: *const f32, sinks: *const f32, k_scales: *const f32, v_scales: *const f32,
        scale_per_head: u32, kind: u32, sequences: u32, tokens: u32, q_heads: u32,
        kv_heads: u32, head_dim: u32, page_size: u32, max_pages: u32, pages: u32, q_token: usize, q_head: usize,
        out_token: usize, out_head: usize, k_page: usize, k_slot: usize, k_head: usize, k_run: u32, k_run_stride: usize,
        v_page: usize, v_slot: usize, v_head: usize, v_run: u32, v_run_stride: usize, scale: f32, soft_cap: f32,
        window: u32, causal: u32,
    );
    prefill_plain_f32 { type T = f32; } [128, 4] => plain::<T, false>;
    prefill_plain_f32_8 { type T = f32; } [128, 4] => plain::<T, true>;
    prefill_plain_f16 { type T = f16; } [128, 4] => plain::<T, false>;
    prefill_plain_f16_8 { type T = f16; } [128, 4] => plain::<T, true>;
    prefill_plain_bf16 { type T = bf16; } [128, 4] => plain::<T, false>;
    prefill_plain_bf16_8 { type T = bf16; } [128, 4] => plain::<T, true>;
}
