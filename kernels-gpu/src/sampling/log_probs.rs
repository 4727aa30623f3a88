//! Log-probabilities before the filters, of rows that [`top_k_top_p`](super::top_k_top_p) has sampled.
//!
//! They need the sum of all weights, and weights need the largest logit, which is known once a row has been sampled. So this kernel comes after that
//! one, which leaves in the workspace what there is to write about ([`Job::later`]). The blocks of a row add up their parts; the last one to be done writes.

use super::job::{Job, LogProbs};
use super::logit::{Logit, Row, Words, for_each};
use super::top_k::MAX_K;
use super::totals::warp_sum;
use super::weights::{Adder, key, key_of};
use cuda_std::atomic::{AcqRel, Device, Relaxed};
use cuda_std::shared::Carver;
use cuda_std::{Global, GlobalMut, dependent_launch, entries, thread, unroll, warp};

/// Threads of a block.
pub const THREADS: u32 = 512;
/// Shared memory of a block.
pub const SHARED_BYTES: usize = 8 * WARPS;
const WARPS: usize = THREADS as usize / 32;

/// Vectors that a thread has on their way at once.
const AT_ONCE: usize = 2;

/// Vectors of this thread of those from `at` on.
#[inline(always)]
#[track_caller]
unsafe fn load<T: Logit>(row: Row<T>, at: u32, end: u32) -> [Words; AT_ONCE] {
    let mut vectors = [[T::ABSENT; 4]; AT_ONCE];
    unroll::<AT_ONCE>(|i| {
        let v = at + i as u32 * THREADS;
        if v < end {
            vectors[i] = row.words(v);
        }
    });
    vectors
}

/// Calls `add` for the logits of this thread's vectors from `at` on, of which the first are loaded. Where it would go on.
#[inline(always)]
#[track_caller]
unsafe fn add_up<T: Logit>(
    row: Row<T>,
    mut at: u32,
    end: u32,
    mut vectors: [Words; AT_ONCE],
    mut add: impl FnMut(f32),
) -> u32 {
    loop {
        unroll::<AT_ONCE>(|i| {
            if at < end {
                for_each::<T>(vectors[i], |_, x| add(x));
                at += THREADS;
            }
        });
        if at >= end {
            return at;
        }
        vectors = load(row, at, end);
    }
}

/// Grid: `parts` blocks for each row, rows one after another. It follows a kernel of the same call, which has waited for what wrote the logits.
#[inline(always)]
pub unsafe fn log_probs<T: Logit>(logits: *const T, job: Job, parts: u32) {
    // SAFETY: a row has a block.
    core::hint::assert_unchecked(parts != 0);
    let (row, part) = (thread::block_idx_x() / parts, thread::block_idx_x() % parts);
    let (tid, lane) = (thread::thread_idx_x(), warp::lane_id());
    let data = job.row(logits, row);
    let share = data.vectors.div_ceil(parts);
    let begin = if part * share < data.vectors { part * share } else { data.vectors };
    let end = if data.vectors - begin < share { data.vectors } else { begin + share };
    // On their way while the kernel before still runs.
    let mut at = begin + tid;
    let vectors = load(data, at, end);
    let mut outside = [f32::NEG_INFINITY; 2];
    if part == 0 && tid < 32 {
        if lane < data.head {
            outside[0] = data.get(lane);
        }
        let behind = data.index(data.vectors, lane);
        if behind < data.vocab {
            outside[1] = data.get(behind);
        }
    }
    let settings = job.settings(row);
    let mut weights = job.weights(&settings, 0);
    // The scale is a division of what comes from memory: done while the kernel before runs.
    dependent_launch::known_here_if(true, [[logits.cast()]], [weights.scale.to_bits()]);
    dependent_launch::begin();
    if settings.k > job.quick_limit {
        return;
    }
    let max_key = key_of(best(&job, row, 0));
    // On its way while the weights are added up.
    let mut keys = Keys { token: 0, best: 0 };
    if tid < 32 {
        keys = Keys::load(&job, data, row);
    }
    if max_key == 0 {
        // No logit is above -inf.
        if part == 0 && tid < 32 {
            keys.write(&job, row, |_| f32::NEG_INFINITY);
        }
        return;
    }

    weights.max_key = max_key;
    let mut sum = weights.of_value(outside[0]) + weights.of_value(outside[1]);
    // What it takes to begin and to end is more than what one vector gains.
    let most = Adder::MOST / Row::<T>::WIDTH * THREADS;
    if weights.is_finite() && share > THREADS && share <= most {
        let adder = Adder::new(weights);
        let mut sums = [0; 2];
        at = add_up(data, at, end, vectors, |x| adder.add(&mut sums, x));
        let added = (at - (begin + tid)) / THREADS;
        sum += adder.total(sums, added * Row::<T>::WIDTH);
    } else {
        add_up(data, at, end, vectors, |x| sum += weights.of_value(x));
    }
    warp::sync_warp(warp::FULL);
    let sum = warp_sum(sum);
    let sums = Carver::new().take::<u64>(WARPS);
    if lane == 0 {
        sums.set(tid / 32, sum);
    }
    thread::sync_threads();
    if tid >= 32 {
        return;
    }
    let sum = warp_sum(if lane < WARPS as u32 { sums.get(lane) } else { 0 });
    let mut all = [0; 2];
    if lane == 0 {
        let total = GlobalMut::new(&raw mut (*job.state.wrapping_add(row as usize)).sum);
        total.fetch_add(0u32, sum, Device, Relaxed);
        let tickets = GlobalMut::new(job.tickets);
        if tickets.fetch_add(row, 1, Device, AcqRel) + 1 == parts {
            tickets.set(row, 0);
            let sum = total.get(0u32);
            total.set(0u32, 0);
            all = [sum as u32, (sum >> 32) as u32];
        }
    }
    let [low, high] = all.map(|word| warp::shfl_idx(word, 0));
    let sum = low as u64 | (high as u64) << 32;
    // The largest logit has a weight.
    if sum == 0 {
        return;
    }
    let probs = LogProbs { weights, temperature: settings.temperature, sum, kept_mass: 0 };
    keys.write(&job, row, |key| probs.before(key));
}

/// Place `i` of the row's best.
#[inline(always)]
#[track_caller]
unsafe fn best(job: &Job, row: u32, i: u32) -> u64 {
    Global::new(job.best.cast_const()).get(row as usize * MAX_K as usize + i as usize)
}

/// What there is to write about.
struct Keys {
    /// Of the token, in lane 0.
    token: u32,
    /// Of the best in the place of the lane.
    best: u32,
}

impl Keys {
    /// Of a row that has been sampled. By one warp.
    #[inline(always)]
    #[track_caller]
    unsafe fn load<T: Logit>(job: &Job, data: Row<T>, row: u32) -> Self {
        let lane = warp::lane_id();
        let mut keys = Self { token: 0, best: 0 };
        if lane == 0 {
            keys.token = key(data.get(GlobalMut::new(job.tokens).get(row) as u32));
        }
        if lane < job.top_n {
            keys.best = key_of(best(job, row, lane));
        }
        keys
    }

    /// Writes the outputs of the row: what `before` says of each key. By the same warp.
    #[inline(always)]
    #[track_caller]
    unsafe fn write(&self, job: &Job, row: u32, before: impl Fn(u32) -> f32) {
        let lane = warp::lane_id();
        if lane == 0 && !job.before.is_null() {
            GlobalMut::new(job.before).set(row, before(self.token));
        }
        let mut i = lane;
        while i < job.top_n && !job.top_before.is_null() {
            let key = if i == lane { self.best } else { key_of(best(job, row, i)) };
            GlobalMut::new(job.top_before).set(row as usize * job.top_n as usize + i as usize, before(key));
            i += 32;
        }
    }
}

entries! {
    pub struct Args<T>(logits: *const T, job: Job, parts: u32);
    sampling_log_probs_f32 { type T = f32; } [THREADS, 3] => log_probs::<T>;
    sampling_log_probs_f16 { type T = half::f16; } [THREADS, 3] => log_probs::<T>;
    sampling_log_probs_bf16 { type T = half::bf16; } [THREADS, 3] => log_probs::<T>;
}
