//! A row's largest logit, then the sum of its weights: for `radix`, and log-probabilities before the filters in calls that launch it.
//!
//! Two kernels, since weights are relative to the largest logit: [`row_max`] and [`row_sum`], each with several blocks a
//! row that meet in one atomic word of [`RowState`](super::job::RowState).

use super::job::Job;
use super::logit::{Logit, Row};
use super::weights::key;
use cuda_std::shared::Carver;
use cuda_std::{Global, atomic, dependent_launch, entries, thread, unroll, warp};

/// Threads of a block of these kernels and of those of `radix` and `adjust`.
pub const THREADS: u32 = 512;

/// Elements of a block of these kernels and of those of `radix`.
pub const CHUNK: u32 = 4096;

/// Blocks of a row.
pub const fn chunks(vocab: u32) -> u32 {
    vocab.div_ceil(CHUNK)
}

/// Calls `f` with the logits of chunk `index` that this thread reads: neighbours are read by neighbours.
#[inline(always)]
#[track_caller]
pub(super) unsafe fn for_each_of_chunk<T: Logit>(row: Row<T>, index: u32, mut f: impl FnMut(f32)) {
    const EACH: usize = (CHUNK / THREADS) as usize;
    let first = index * CHUNK + thread::thread_idx_x();
    // All are under way before the first is used.
    let mut held = [0.0; EACH];
    unroll::<EACH>(|j| {
        let i = first + j as u32 * THREADS;
        if i < row.vocab {
            held[j] = row.get(i);
        }
    });
    unroll::<EACH>(|j| {
        if first + j as u32 * THREADS < row.vocab {
            f(held[j]);
        }
    });
}

/// Shared memory of [`row_max`].
pub const MAX_SHARED_BYTES: usize = 4 * WARPS;
const WARPS: usize = THREADS as usize / 32;

/// Row and chunk of this block.
#[inline(always)]
pub(super) fn place(vocab: u32) -> (u32, u32, u32) {
    let chunks = chunks(vocab);
    // SAFETY: there is a token, so there is a chunk.
    unsafe { core::hint::assert_unchecked(chunks != 0) };
    (thread::block_idx_x() / chunks, thread::block_idx_x() % chunks, chunks)
}

/// Grid: [`chunks`] blocks for each row, rows one after another.
#[inline(always)]
pub unsafe fn row_max<T: Logit>(logits: *const T, job: Job) {
    dependent_launch::begin();
    let (row, index, _) = place(job.vocab);
    if !job.wants_before() && job.settings(row).k <= job.quick_limit {
        return;
    }
    let mut largest = 0;
    for_each_of_chunk(job.row(logits, row), index, |x| largest = largest.max(key(x)));
    let largest = warp::warp_reduce_max_u32(warp::FULL, largest);
    // One access to the row's word for each block: they wait for each other.
    let of_warps = Carver::new().take::<u32>(WARPS);
    let (warp_id, lane) = (thread::thread_idx_x() / 32, warp::lane_id());
    if lane == 0 {
        of_warps.set(warp_id, largest);
    }
    thread::sync_threads();
    if warp_id == 0 {
        let largest = if lane < WARPS as u32 { of_warps.get(lane) } else { 0 };
        let largest = warp::warp_reduce_max_u32(warp::FULL, largest);
        if lane == 0 {
            atomic::fetch_max_u32(&raw mut (*job.state.wrapping_add(row as usize)).max_key, largest);
        }
    }
}

/// Grid: as [`row_max`], which runs before.
#[inline(always)]
pub unsafe fn row_sum<T: Logit>(logits: *const T, job: Job) {
    dependent_launch::begin();
    let (row, index, _) = place(job.vocab);
    // The field alone: other blocks add to the sum beside it.
    let max_key = Global::new(&raw const (*job.state.wrapping_add(row as usize)).max_key).get(0u32);
    let weights = job.weights(&job.settings(row), max_key);
    let mut sum = 0;
    for_each_of_chunk(job.row(logits, row), index, |x| sum += weights.of(key(x)));
    let sum = warp::reduce(sum, |a: u64, b| a + b);
    if warp::lane_id() == 0 && sum > 0 {
        atomic::fetch_add_u64(&raw mut (*job.state.wrapping_add(row as usize)).sum, sum);
    }
}

entries! {
    pub struct Args<T>(logits: *const T, job: Job);
    sampling_row_max_f32 { type T = f32; } [THREADS] => row_max::<T>;
    sampling_row_max_f16 { type T = half::f16; } [THREADS] => row_max::<T>;
    sampling_row_max_bf16 { type T = half::bf16; } [THREADS] => row_max::<T>;
    sampling_row_sum_f32 { type T = f32; } [THREADS] => row_sum::<T>;
    sampling_row_sum_f16 { type T = half::f16; } [THREADS] => row_sum::<T>;
    sampling_row_sum_bf16 { type T = half::bf16; } [THREADS] => row_sum::<T>;
}
