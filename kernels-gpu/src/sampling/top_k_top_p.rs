//! Samples one token a row from the best k logits: `batched`, a block a row, and `split_k`, several blocks a row, the
//! last of which merges their lists.
//!
//! Blocks read their part of the row once, find its best k ([`Scratch::best_of_row`]), and need nothing else of it: min-p
//! compares with the largest logit, and top-p counts among the k. A warp then turns the sorted list into weights, sums
//! them in order, cuts, and finds where the random number falls. `split_k` hands lists of candidates over through the
//! workspace, in one launch: unsorted, with some that are not among the best, where there is room for those.
//!
//! Rows that keep more than [`Job::quick_limit`] tokens belong to `radix`; of those only the `top_n` best are listed.

use super::job::{Job, LogProbs, Settings};
use super::logit::{Logit, Row};
use super::top_k::{CAPACITY, MAX_K, PRUNED, Ring, Scratch, THREADS, own_index};
use super::weights::{index_of, key, key_of, scaled, scaled_up};
use cuda_std::atomic::{Block, Relaxed};
use cuda_std::integer::opaque;
use cuda_std::shared::Carver;
use cuda_std::{GlobalMut, Shared, dependent_launch, entries, thread, unroll, warp};

/// How many of a row's best are needed; 0 if the row is nothing to these kernels.
#[inline(always)]
unsafe fn needed(job: &Job, row: u32) -> u32 {
    let k = job.settings(row).k;
    if k > job.quick_limit || k < job.top_n { job.top_n } else { k }
}

/// Grid: rows.
#[inline(always)]
pub unsafe fn batched<T: Logit>(logits: *const T, job: Job) {
    dependent_launch::begin();
    let mut carver = Carver::new();
    let (ring, scratch) = (Ring::new(&mut carver), Scratch::new(&mut carver));
    let row = thread::block_idx_x();
    let need = needed(&job, row);
    if need > 0 {
        let (len, _) = scratch.best_of_row(ring, job.row(logits, row), 0, 1, need, 0, || look_up(&scratch, &job, row));
        finish(&scratch, logits, &job, row, len);
    }
}

/// Leaves the parameters of the row and its random bits where [`finish`] finds them after a barrier: by one thread, of a warp
/// that has nothing else to do.
#[inline(always)]
#[track_caller]
unsafe fn look_up(scratch: &Scratch, job: &Job, row: u32) {
    if own_index() == 32 {
        job.look_up(row, scratch.parameters);
    }
}

/// Grid: `splits` blocks for each row, rows one after another; `splits` times the most that a row needs is at most
/// [`CAPACITY`].
#[inline(always)]
pub unsafe fn split_k<T: Logit>(logits: *const T, job: Job, splits: u32) {
    dependent_launch::begin();
    let mut carver = Carver::new();
    let (ring, scratch) = (Ring::new(&mut carver), Scratch::new(&mut carver));
    core::hint::assert_unchecked(splits != 0);
    let (row, split) = (thread::block_idx_x() / splits, thread::block_idx_x() % splits);
    let need = needed(&job, row);
    if need == 0 {
        return;
    }
    // Of two rounds, the second finds about as many as the first has kept.
    let room = CAPACITY / splits;
    let room = if room < 3 * need { room } else { 3 * need };
    let (len, from) =
        scratch.best_of_row(ring, job.row(logits, row), split, splits, need, room, || look_up(&scratch, &job, row));

    let tid = own_index();
    // The lists' entries in turn: where they are in order, the best ones go to different threads, which makes for a good bound.
    let lists = GlobalMut::new(job.lists).offset(row as usize * CAPACITY as usize);
    let mut i = tid;
    while i < room {
        lists.set(i * splits + split, if i < len { from.get(i) } else { 0 });
        i += THREADS;
    }
    if !job.last_of_row(row, splits, scratch.flag) {
        return;
    }
    // All loads are under way before the first is waited for.
    let mut held = [0; PRUNED];
    unroll::<PRUNED>(|i| {
        let at = i as u32 * THREADS + tid;
        if at < splits * room {
            held[i] = lists.get(at);
        }
    });
    let len = scratch.keep_best_of(held, need);
    finish(&scratch, logits, &job, row, len);
}

/// Samples from the first `len` of `scratch.best`, which are all that is needed.
#[inline(always)]
#[track_caller]
unsafe fn finish<T: Logit>(scratch: &Scratch, logits: *const T, job: &Job, row: u32, len: u32) {
    // Looked up again rather than kept in registers all the time.
    let (row, tid) = (opaque(row), own_index());
    let (settings, draw) = Settings::looked_up(scratch.parameters);
    if settings.k > job.quick_limit {
        if tid < job.top_n {
            leave(scratch, job, row, tid, len);
        }
    } else if len == 0 {
        let token = if job.adjusted != 0 { lowest_allowed(job.row(logits, row), scratch.flag) } else { 0 };
        if tid == 0 {
            write_token(job, row, token, 0, None);
            job.reset_sum(row);
        }
        if tid < job.top_n {
            write_top(job, row, tid, 0, false, None);
        }
        if job.later != 0 && tid == 0 {
            leave(scratch, job, row, 0, 0);
        }
    } else if tid < 32 {
        sample(scratch, job, row, &settings, draw, len);
    } else if job.later != 0 {
        // By others than the warp that is waited for. The largest logit at least.
        let (i, most) = (tid - 32, if job.top_n > 1 { job.top_n } else { 1 });
        if i < most {
            leave(scratch, job, row, i, len);
        }
    }
}

const _: () = assert!(THREADS >= 32 + MAX_K);

/// Leaves place `i` of the row's best for the kernel that follows.
#[inline(always)]
#[track_caller]
unsafe fn leave(scratch: &Scratch, job: &Job, row: u32, i: u32, len: u32) {
    let at = row as usize * MAX_K as usize + i as usize;
    GlobalMut::new(job.best).set(at, if i < len { scratch.best.get(i) } else { 0 });
}

/// By one warp: top-p, min-p, the draw, and what is to be written.
#[inline(always)]
#[track_caller]
unsafe fn sample(scratch: &Scratch, job: &Job, row: u32, settings: &Settings, draw: u32, len: u32) {
    /// Candidates of a lane.
    const EACH: usize = MAX_K as usize / 32;
    let best = scratch.best;
    let lane = warp::lane_id();
    let sum = if job.wants_before() { GlobalMut::new(job.state).get(row).sum } else { 0 };
    let weights = job.weights(settings, key_of(best.get(0u32)));
    // Mass of each token kept by top-k and min-p, and of it and all before it.
    let (mut masses, mut upto) = ([0; EACH], [0; EACH]);
    let mut total = 0;
    unroll::<EACH>(|r| {
        if r as u32 * 32 < len {
            let i = r as u32 * 32 + lane;
            let w = if i < len && i < settings.k { weights.of(key_of(best.get(i))) } else { 0 };
            masses[r] = if w < settings.least { 0 } else { w };
            upto[r] = total + warp::scan(masses[r], |a, b| a + b);
            total = warp::shfl_idx(upto[r], 31);
        }
    });
    // A token is kept if those before it have less than this.
    let target = match settings.top_p {
        Some(p) => scaled_up(total, p).max(1),
        None => u64::MAX,
    };
    // The first place up to which there is at least some mass, and how much; the mass of all where there is no such place.
    let first_with = |mass: u64| {
        let mut found = None;
        unroll::<EACH>(|r| {
            if found.is_none() && r as u32 * 32 < len {
                let there = warp::warp_vote_ballot(warp::FULL, upto[r] >= mass);
                if there != 0 {
                    let from = there.trailing_zeros();
                    found = Some((r as u32 * 32 + from, warp::shfl_idx(upto[r], from)));
                }
            }
        });
        found.unwrap_or((0, total))
    };
    let (_, kept_mass) = first_with(target);
    let (place, _) = first_with(scaled(kept_mass, draw) + 1);

    let probs = LogProbs { weights, temperature: settings.temperature, sum, kept_mass };
    // All have read the sum that is reset now.
    warp::sync_warp(warp::FULL);
    if lane == 0 {
        let chosen = best.get(place);
        write_token(job, row, index_of(chosen), key_of(chosen), Some(&probs));
        job.reset_sum(row);
    }
    let mut i = lane;
    while i < job.top_n {
        let entry = if i < len { best.get(i) } else { 0 };
        let mut kept = false;
        unroll::<EACH>(|r| {
            if i == r as u32 * 32 + lane {
                kept = masses[r] > 0 && upto[r] - masses[r] < target;
            }
        });
        write_top(job, row, i, entry, kept, Some(&probs));
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
    write_log_probs(job, row, key, probs);
}

/// Writes the log-probabilities of the row's token, which has this key.
#[inline(always)]
#[track_caller]
pub(super) unsafe fn write_log_probs(job: &Job, row: u32, key: u32, probs: Option<&LogProbs>) {
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
