//! A row's largest logit, then the sum of its weights: for log-probabilities before the filters, and for `radix`.
//!
//! Two kernels, since weights are relative to the largest logit: [`row_max`] and [`row_sum`], each with several blocks a
//! row that meet in one atomic word of [`RowState`](super::job::RowState).

use super::job::Job;
use super::logit::{Logit, Row, for_each};
use super::top_k::THREADS;
use super::weights::key;
use cuda_std::{Global, atomic, entries, thread, warp};

/// Elements of a block of these kernels and of those of `radix`.
pub const CHUNK: u32 = 4096;

/// Blocks of a row.
pub const fn chunks(vocab: u32) -> u32 {
    // A row that starts off a 16-byte boundary reaches into one more vector.
    (vocab + 7).div_ceil(CHUNK)
}

/// The vectors of chunk `index` that this thread reads: `f(vector, words)`.
#[inline(always)]
#[track_caller]
pub(super) unsafe fn for_each_vector<T: Logit>(row: Row<T>, index: u32, mut f: impl FnMut(u32, super::logit::Words)) {
    let first = index * (CHUNK / Row::<T>::WIDTH) + thread::thread_idx_x();
    let mut u = 0;
    while u < CHUNK / Row::<T>::WIDTH / THREADS {
        let v = first + u * THREADS;
        if v < row.vectors {
            f(v, row.load(v));
        }
        u += 1;
    }
}

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
    let (row, index, _) = place(job.vocab);
    if !job.wants_before() && job.settings(row).k <= job.quick_limit {
        return;
    }
    let mut largest = 0;
    for_each_vector(job.row(logits, row), index, |_, words| {
        for_each::<T>(words, |_, x| largest = largest.max(key(x)));
    });
    let largest = warp::warp_reduce_max_u32(warp::FULL, largest);
    if warp::lane_id() == 0 {
        atomic::fetch_max_u32(&raw mut (*job.state.wrapping_add(row as usize)).max_key, largest);
    }
}

/// Grid: as [`row_max`], which runs before.
#[inline(always)]
pub unsafe fn row_sum<T: Logit>(logits: *const T, job: Job) {
    let (row, index, _) = place(job.vocab);
    let max_key = Global::new(job.state.cast_const()).get(row).max_key;
    let weights = job.weights(&job.settings(row), max_key);
    let mut sum = 0;
    for_each_vector(job.row(logits, row), index, |_, words| {
        for_each::<T>(words, |_, x| sum += weights.of(key(x)));
    });
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
