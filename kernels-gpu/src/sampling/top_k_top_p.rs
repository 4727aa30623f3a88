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
use super::top_k::{CAPACITY, MAX_K, Scratch, THREADS};
use super::weights::{index_of, key, key_of, scaled, scaled_up};
use cuda_std::{GlobalMut, Shared, atomic, entries, thread, unroll, warp};

/// Registers a lane for a list of [`MAX_K`].
const LIST_REGISTERS: usize = (MAX_K / 32) as usize;

/// How many of a row's best are needed; 0 if the row is nothing to these kernels.
#[inline(always)]
fn needed(job: &Job, settings: &Settings) -> u32 {
    if settings.k > job.quick_limit {
        job.top_n
    } else if settings.k > job.top_n {
        settings.k
    } else {
        job.top_n
    }
}

/// Grid: rows.
#[inline(always)]
pub unsafe fn batched<T: Logit>(logits: *const T, job: Job) {
    let scratch = Scratch::new();
    let row = thread::block_idx_x();
    let settings = job.settings(row);
    let need = needed(&job, &settings);
    if need == 0 {
        return;
    }
    let data = job.row(logits, row);
    let len = scratch.best_of_row(data, 0, data.vectors, need);
    finish(&scratch, &job, data, row, &settings, len);
}

/// Grid: `splits` blocks for each row, rows one after another; `splits` times the most that a row needs is at most
/// [`CAPACITY`].
#[inline(always)]
pub unsafe fn split_k<T: Logit>(logits: *const T, job: Job, splits: u32) {
    let scratch = Scratch::new();
    core::hint::assert_unchecked(splits != 0);
    let (row, split) = (thread::block_idx_x() / splits, thread::block_idx_x() % splits);
    let settings = job.settings(row);
    let need = needed(&job, &settings);
    if need == 0 {
        return;
    }
    let data = job.row(logits, row);
    let share = data.vectors.div_ceil(splits);
    let begin = split * share;
    let end = if data.vectors < begin + share { data.vectors } else { begin + share };
    let len = scratch.best_of_row(data, begin, end, need);

    let tid = thread::thread_idx_x();
    let lists = GlobalMut::new(job.lists).offset(row as usize * CAPACITY as usize);
    if tid < need {
        lists.set(split * need + tid, if tid < len { scratch.best.get(tid) } else { 0 });
    }
    if !job.last_of_row(row, splits, scratch.flag) {
        return;
    }
    let mut i = tid;
    while i < splits * need {
        scratch.candidates.set(i, lists.get(i));
        i += THREADS;
    }
    thread::sync_threads();
    let len = scratch.keep_best(splits * need, need);
    finish(&scratch, &job, data, row, &settings, len);
}

/// Samples from the first `len` of `scratch.best`, which are all that is needed.
#[inline(always)]
#[track_caller]
unsafe fn finish<T: Logit>(scratch: &Scratch, job: &Job, data: Row<T>, row: u32, settings: &Settings, len: u32) {
    if settings.k > job.quick_limit {
        let tid = thread::thread_idx_x();
        if tid < job.top_n {
            let at = row as usize * MAX_K as usize + tid as usize;
            GlobalMut::new(job.best).set(at, if tid < len { scratch.best.get(tid) } else { 0 });
        }
        return;
    }
    if len == 0 {
        let token = lowest_allowed(data, scratch.flag);
        if thread::thread_idx_x() == 0 {
            write_token(job, row, token, f32::NEG_INFINITY, f32::NEG_INFINITY);
            job.reset_sum(row);
        }
        if thread::thread_idx_x() < 32 {
            let mut i = warp::lane_id();
            while i < job.top_n {
                write_top(job, row, i, 0, f32::NEG_INFINITY, f32::NEG_INFINITY);
                i += 32;
            }
        }
    } else if thread::thread_idx_x() < 32 {
        sample(scratch.best, job, row, settings, len);
    }
}

/// By one warp: top-p, min-p, the draw, and what is to be written.
#[inline(always)]
#[track_caller]
unsafe fn sample(best: Shared<u64>, job: &Job, row: u32, settings: &Settings, len: u32) {
    let lane = warp::lane_id();
    let sum = if job.wants_before() { GlobalMut::new(job.state).get(row).sum } else { 0 };
    let weights = job.weights(settings, key_of(best.get(0u32)));
    let mut entries = [0; LIST_REGISTERS];
    let mut own = [0; LIST_REGISTERS];
    let mut upto = [0; LIST_REGISTERS];
    let mut total = 0;
    unroll::<LIST_REGISTERS>(|r| {
        let i = r as u32 * 32 + lane;
        if (r as u32 * 32) < len {
            entries[r] = if i < len { best.get(i) } else { 0 };
            let w = if i < settings.k { weights.of(key_of(entries[r])) } else { 0 };
            own[r] = if w < settings.least { 0 } else { w };
            upto[r] = total + prefix_sum(own[r]);
            total = warp::shfl_idx(upto[r], 31);
        }
    });
    // A token is kept if those before it have less than this.
    let target = match settings.top_p {
        Some(p) => scaled_up(total, p).max(1),
        None => u64::MAX,
    };
    let is_kept = |own: u64, upto: u64| own > 0 && upto - own < target;
    let mut kept_mass = 0;
    unroll::<LIST_REGISTERS>(|r| {
        if (r as u32 * 32) < len {
            let kept = warp::warp_vote_ballot(warp::FULL, is_kept(own[r], upto[r]));
            if kept != 0 {
                kept_mass = warp::shfl_idx(upto[r], 31 - kept.leading_zeros());
            }
        }
    });
    let point = scaled(kept_mass, job.draw(row));
    let mut chosen = 0;
    let mut found = false;
    unroll::<LIST_REGISTERS>(|r| {
        if (r as u32 * 32) < len {
            let beyond = warp::warp_vote_ballot(warp::FULL, upto[r] > point);
            if beyond != 0 && !found {
                found = true;
                chosen = warp::shfl_idx(entries[r], beyond.trailing_zeros());
            }
        }
    });

    let probs = LogProbs { weights, temperature: settings.temperature, sum, kept_mass };
    if lane == 0 {
        let key = key_of(chosen);
        write_token(job, row, index_of(chosen), probs.before(key), probs.after(key));
        job.reset_sum(row);
    }
    unroll::<LIST_REGISTERS>(|r| {
        let i = r as u32 * 32 + lane;
        if i < job.top_n {
            let key = key_of(entries[r]);
            let after = if is_kept(own[r], upto[r]) { probs.after(key) } else { f32::NEG_INFINITY };
            write_top(job, row, i, entries[r], probs.before(key), after);
        }
    });
}

/// Sum of the values of this lane and those below.
#[inline(always)]
#[track_caller]
fn prefix_sum(value: u64) -> u64 {
    let mut sum = value;
    let mut delta = 1;
    while delta < 32 {
        let (below, there) = warp::warp_shuffle_up(warp::FULL, sum, delta, 32);
        sum += if there { below } else { 0 };
        delta *= 2;
    }
    sum
}

/// The first token that is allowed, of a row without any logit above -inf; 0 if none is. By all threads.
#[inline(always)]
#[track_caller]
unsafe fn lowest_allowed<T: Logit>(data: Row<T>, lowest: Shared<u32>) -> u32 {
    let tid = thread::thread_idx_x();
    thread::sync_threads();
    if tid == 0 {
        lowest.set(0u32, data.vocab);
    }
    thread::sync_threads();
    let mut i = tid;
    while i < data.vocab {
        if key(data.get(i)) != 0 {
            atomic::fetch_min_u32(lowest.ptr(0u32), i);
            break;
        }
        i += THREADS;
    }
    thread::sync_threads();
    let token = lowest.get(0u32);
    if token < data.vocab { token } else { 0 }
}

/// Writes the outputs of a row that are not lists.
#[inline(always)]
#[track_caller]
pub(super) unsafe fn write_token(job: &Job, row: u32, token: u32, before: f32, after: f32) {
    GlobalMut::new(job.tokens).set(row, token as i32);
    if !job.before.is_null() {
        GlobalMut::new(job.before).set(row, before);
    }
    if !job.after.is_null() {
        GlobalMut::new(job.after).set(row, after);
    }
}

/// Writes place `i` of the lists of a row; candidate 0 is none.
#[inline(always)]
#[track_caller]
pub(super) unsafe fn write_top(job: &Job, row: u32, i: u32, entry: u64, before: f32, after: f32) {
    let at = row as usize * job.top_n as usize + i as usize;
    if !job.top_tokens.is_null() {
        let token = if entry == 0 { -1 } else { index_of(entry) as i32 };
        GlobalMut::new(job.top_tokens).set(at, token);
    }
    if !job.top_before.is_null() {
        GlobalMut::new(job.top_before).set(at, before);
    }
    if !job.top_after.is_null() {
        GlobalMut::new(job.top_after).set(at, after);
    }
}

entries! {
    pub struct BatchedArgs<T>(logits: *const T, job: Job);
    top_k_top_p_batched_f32 { type T = f32; } [THREADS] => batched::<T>;
    top_k_top_p_batched_f16 { type T = half::f16; } [THREADS] => batched::<T>;
    top_k_top_p_batched_bf16 { type T = half::bf16; } [THREADS] => batched::<T>;
}

entries! {
    pub struct SplitKArgs<T>(logits: *const T, job: Job, splits: u32);
    top_k_top_p_split_k_f32 { type T = f32; } [THREADS] => split_k::<T>;
    top_k_top_p_split_k_f16 { type T = half::f16; } [THREADS] => split_k::<T>;
    top_k_top_p_split_k_bf16 { type T = half::bf16; } [THREADS] => split_k::<T>;
}
