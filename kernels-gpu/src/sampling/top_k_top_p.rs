//! Samples one token a row from the best k logits: `batched`, a block a row, and `split_k`, several blocks a row, the
//! last of which merges their lists.
//!
//! Blocks read their part of the row once, find its best k ([`Scratch::best_of_row`]), and need nothing else of it: min-p
//! compares with the largest logit, and top-p counts among the k. A warp then turns the sorted list into weights, sums
//! them in order, cuts, and finds where the random number falls. `split_k` hands lists of `k` candidates over through
//! the workspace, in one launch.
//!
//! Rows that keep more than [`Job::quick_limit`] tokens belong to `radix`; of those only the `top_n` best are listed.

use super::job::{Job, LogProbs, Settings};
use super::logit::{Logit, Row};
use super::top_k::{CAPACITY, MAX_K, Ring, Scratch, THREADS, own_index};
use super::weights::{index_of, key, key_of, scaled, scaled_up};
use cuda_std::atomic::{Block, Relaxed};
use cuda_std::integer::opaque;
use cuda_std::shared::Carver;
use cuda_std::{GlobalMut, Shared, entries, thread, unroll, warp};

/// How many of a row's best are needed; 0 if the row is nothing to these kernels.
#[inline(always)]
unsafe fn needed(job: &Job, row: u32) -> u32 {
    let k = job.settings(row).k;
    if k > job.quick_limit || k < job.top_n { job.top_n } else { k }
}

/// Grid: rows.
#[inline(always)]
pub unsafe fn batched<T: Logit>(logits: *const T, job: Job) {
    let mut carver = Carver::new();
    let (ring, scratch) = (Ring::new(&mut carver), Scratch::new(&mut carver));
    let row = thread::block_idx_x();
    let need = needed(&job, row);
    if need > 0 {
        let len = scratch.best_of_row(ring, job.row(logits, row), 0, 1, need);
        finish(&scratch, logits, &job, row, len);
    }
}

/// Grid: `splits` blocks for each row, rows one after another; `splits` times the most that a row needs is at most
/// [`CAPACITY`].
#[inline(always)]
pub unsafe fn split_k<T: Logit>(logits: *const T, job: Job, splits: u32) {
    let mut carver = Carver::new();
    let (ring, scratch) = (Ring::new(&mut carver), Scratch::new(&mut carver));
    core::hint::assert_unchecked(splits != 0);
    let (row, split) = (thread::block_idx_x() / splits, thread::block_idx_x() % splits);
    let need = needed(&job, row);
    if need == 0 {
        return;
    }
    let len = scratch.best_of_row(ring, job.row(logits, row), split, splits, need);

    let tid = own_index();
    let lists = GlobalMut::new(job.lists).offset(row as usize * CAPACITY as usize);
    if tid < need {
        lists.set(split * need + tid, if tid < len { scratch.best.get(tid) } else { 0 });
    }
    if !job.last_of_row(row, splits, scratch.flag) {
        return;
    }
    // All loads are under way before the first is waited for.
    const EACH: usize = CAPACITY.div_ceil(THREADS) as usize;
    let mut held = [0; EACH];
    unroll::<EACH>(|i| {
        let at = i as u32 * THREADS + tid;
        if at < splits * need {
            held[i] = lists.get(at);
        }
    });
    unroll::<EACH>(|i| {
        let at = i as u32 * THREADS + tid;
        if at < splits * need {
            scratch.candidates.set(at, held[i]);
        }
    });
    thread::sync_threads();
    let len = scratch.keep_best(splits * need, need);
    finish(&scratch, logits, &job, row, len);
}

/// Samples from the first `len` of `scratch.best`, which are all that is needed.
#[inline(always)]
#[track_caller]
unsafe fn finish<T: Logit>(scratch: &Scratch, logits: *const T, job: &Job, row: u32, len: u32) {
    // Parameters are looked up again rather than kept in registers all the time.
    let (row, tid) = (opaque(row), own_index());
    let settings = job.settings(row);
    if settings.k > job.quick_limit {
        if tid < job.top_n {
            let at = row as usize * MAX_K as usize + tid as usize;
            GlobalMut::new(job.best).set(at, if tid < len { scratch.best.get(tid) } else { 0 });
        }
    } else if len == 0 {
        let token = lowest_allowed(job.row(logits, row), scratch.flag);
        if tid == 0 {
            write_token(job, row, token, 0, None);
            job.reset_sum(row);
        }
        if tid < job.top_n {
            write_top(job, row, tid, 0, false, None);
        }
    } else if tid < 32 {
        sample(scratch, job, row, &settings, len);
    }
}

/// By one warp: top-p, min-p, the draw, and what is to be written.
#[inline(always)]
#[track_caller]
unsafe fn sample(scratch: &Scratch, job: &Job, row: u32, settings: &Settings, len: u32) {
    let best = scratch.best;
    let lane = warp::lane_id();
    let sum = if job.wants_before() { GlobalMut::new(job.state).get(row).sum } else { 0 };
    let weights = job.weights(settings, key_of(best.get(0u32)));
    // Mass of each token kept by top-k and min-p and of all before it. The candidates are not needed any more.
    let upto = scratch.candidates;
    let mut total = 0;
    let mut i = lane;
    while i - lane < len {
        let w = if i < len && i < settings.k { weights.of(key_of(best.get(i))) } else { 0 };
        let sum = total + warp::scan(if w < settings.least { 0 } else { w }, |a, b| a + b);
        upto.set(i, sum);
        total = warp::shfl_idx(sum, 31);
        i += 32;
    }
    warp::sync_warp(warp::FULL);
    // A token is kept if those before it have less than this.
    let target = match settings.top_p {
        Some(p) => scaled_up(total, p).max(1),
        None => u64::MAX,
    };
    let is_kept = |i: u32| {
        let before = if i > 0 { upto.get(i - 1) } else { 0 };
        before < target && before < upto.get(i)
    };
    let mut kept_mass = 0;
    let mut i = lane;
    while i - lane < len {
        let kept = warp::warp_vote_ballot(warp::FULL, is_kept(i));
        if kept != 0 {
            kept_mass = warp::shfl_idx(upto.get(i), 31 - kept.leading_zeros());
        }
        i += 32;
    }
    let point = scaled(kept_mass, job.draw(row));
    let mut i = lane;
    let mut place = 0;
    while i - lane < len {
        let beyond = warp::warp_vote_ballot(warp::FULL, upto.get(i) > point);
        if beyond != 0 {
            place = i - lane + beyond.trailing_zeros();
            break;
        }
        i += 32;
    }

    let probs = LogProbs { weights, temperature: settings.temperature, sum, kept_mass };
    if lane == 0 {
        let chosen = best.get(place);
        write_token(job, row, index_of(chosen), key_of(chosen), Some(&probs));
        job.reset_sum(row);
    }
    let mut i = lane;
    while i < job.top_n {
        let entry = if i < len { best.get(i) } else { 0 };
        write_top(job, row, i, entry, i < len && is_kept(i), Some(&probs));
        i += 32;
    }
}

/// The first token that is allowed, of a row without any logit above -inf; 0 if none is. By all threads.
#[inline(always)]
#[track_caller]
unsafe fn lowest_allowed<T: Logit>(data: Row<T>, lowest: Shared<u32>) -> u32 {
    let tid = own_index();
    thread::sync_threads();
    if tid == 0 {
        lowest.set(0u32, data.vocab);
    }
    thread::sync_threads();
    let mut i = tid;
    while i < data.vocab {
        if key(data.get(i)) != 0 {
            lowest.fetch_min(0u32, i, Block, Relaxed);
            break;
        }
        i += THREADS;
    }
    thread::sync_threads();
    let token = lowest.get(0u32);
    if token < data.vocab { token } else { 0 }
}

/// Writes the outputs of a row that are not lists. Without `probs` the log-probabilities are -inf.
#[inline(always)]
#[track_caller]
pub(super) unsafe fn write_token(job: &Job, row: u32, token: u32, key: u32, probs: Option<&LogProbs>) {
    GlobalMut::new(job.tokens).set(row, token as i32);
    if !job.before.is_null() {
        GlobalMut::new(job.before).set(row, probs.map_or(f32::NEG_INFINITY, |p| p.before(key)));
    }
    if !job.after.is_null() {
        GlobalMut::new(job.after).set(row, probs.map_or(f32::NEG_INFINITY, |p| p.after(key)));
    }
}

/// Writes place `i` of the lists of a row; candidate 0 is none.
#[inline(always)]
#[track_caller]
pub(super) unsafe fn write_top(job: &Job, row: u32, i: u32, entry: u64, kept: bool, probs: Option<&LogProbs>) {
    let at = row as usize * job.top_n as usize + i as usize;
    let key = key_of(entry);
    if !job.top_tokens.is_null() {
        let token = if entry == 0 { -1 } else { index_of(entry) as i32 };
        GlobalMut::new(job.top_tokens).set(at, token);
    }
    if !job.top_before.is_null() {
        GlobalMut::new(job.top_before).set(at, probs.map_or(f32::NEG_INFINITY, |p| p.before(key)));
    }
    if !job.top_after.is_null() {
        let probs = if kept { probs } else { None };
        GlobalMut::new(job.top_after).set(at, probs.map_or(f32::NEG_INFINITY, |p| p.after(key)));
    }
}

entries! {
    pub struct BatchedArgs<T>(logits: *const T, job: Job);
    top_k_top_p_batched_f32 { type T = f32; } [THREADS, 2] => batched::<T>;
    top_k_top_p_batched_f16 { type T = half::f16; } [THREADS, 2] => batched::<T>;
    top_k_top_p_batched_bf16 { type T = half::bf16; } [THREADS, 2] => batched::<T>;
}

entries! {
    pub struct SplitKArgs<T>(logits: *const T, job: Job, splits: u32);
    top_k_top_p_split_k_f32 { type T = f32; } [THREADS, 2] => split_k::<T>;
    top_k_top_p_split_k_f16 { type T = half::f16; } [THREADS, 2] => split_k::<T>;
    top_k_top_p_split_k_bf16 { type T = half::bf16; } [THREADS, 2] => split_k::<T>;
}
