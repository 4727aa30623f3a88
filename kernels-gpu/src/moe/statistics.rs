//! What routing did: load and importance of each expert, and the losses that training adds to balance them.
//!
//! Two kernels. A block of [`statistics_part`] takes some consecutive tokens. Its warps find each token's largest logit and sum
//! of exponentials; then threads own experts and walk over the block's tokens and pairs, so that no addition needs an atomic
//! and every sum has one order. Logits are read a second time then, from the caches. What comes out is a row of `table`, one
//! for each block; the one block of [`statistics_finish`] adds the rows up in their order.
//!
//! Sources: Shazeer et al., *Outrageously Large Neural Networks*, 2017 (importance and load, squared coefficient of variation);
//! Fedus et al., *Switch Transformers*, 2021 (load-balancing loss); Zoph et al., *ST-MoE*, 2022 (router z-loss).

use cuda_std::{
    Float, Global, GlobalMut, Shared, bf16, dependent_launch, entries, f16, float, shared, thread, unroll, warp,
};

/// Threads of a block of [`statistics_part`].
pub const THREADS: usize = 256;
/// Threads of [`statistics_finish`].
pub const FINISH_THREADS: usize = 512;
/// The most tokens of a block of [`statistics_part`].
pub const MAX_EACH: usize = 128;
/// Pairs that are in shared memory at a time.
const SLAB: usize = 1024;
/// The most experts.
pub const MAX_EXPERTS: usize = 2048;

/// Numbers in `summary`.
pub const SUMMARY: usize = 5;

/// Words in a row of the table: for each expert its load, its importance, its probabilities; and the sum for the z-loss.
pub const fn columns(experts: usize) -> usize {
    3 * experts + 1
}

/// Dynamic shared memory of [`statistics_part`].
pub const fn part_shared_bytes() -> usize {
    SLAB * 8 + MAX_EACH * 12
}

/// Dynamic shared memory of [`statistics_finish`].
pub const fn finish_shared_bytes(experts: usize) -> usize {
    (3 * experts.next_multiple_of(4) + FINISH_THREADS / 32) * 4 + 8 * (FINISH_THREADS / 32)
}

/// Writes row `blockIdx.x` of `table`, `[blocks][columns]`, from tokens `each · blockIdx.x` on, `each` of them.
///
/// `logits`: `[tokens, experts]`, rows `row` apart; `topk_ids`, `topk_weights`: `[tokens, top_k]`, ids out of range count nowhere.
/// Block: [`THREADS`]; shared memory: [`part_shared_bytes`].
#[inline(always)]
pub unsafe fn statistics_part<T: Float>(
    table: *mut f32,
    logits: *const T,
    row: usize,
    topk_ids: *const i32,
    topk_weights: *const f32,
    tokens: u32,
    top_k: u32,
    experts: u32,
    each: u32,
) {
    dependent_launch::begin();
    let (tid, lane, warp_id) = (thread::thread_idx_x(), warp::lane_id(), warp::warp_id());
    let first = thread::block_idx_x() * each;
    let here = (tokens - first).min(each);
    let (logits, ids, weights) = (Global::new(logits), Global::new(topk_ids), Global::new(topk_weights));
    let out = GlobalMut::new(table).offset(thread::block_idx_x() as usize * columns(experts as usize));
    let mut carver = shared::Carver::new();
    let (slab_ids, slab_weights) = (carver.take::<i32>(SLAB), carver.take::<f32>(SLAB));
    let (largest, inverse, squares) =
        (carver.take::<f32>(MAX_EACH), carver.take::<f32>(MAX_EACH), carver.take::<f32>(MAX_EACH));

    let mut t = warp_id;
    while t < here {
        let at = (first + t) as usize * row;
        let (mut most, mut nan) = (f32::NEG_INFINITY, false);
        let mut e = lane;
        while e < experts {
            let x = logits.get(at + e as usize).to_f32();
            nan |= x.is_nan();
            most = float::max(most, x);
            e += 32;
        }
        let most = warp::reduce_max(most);
        let mut sum = 0f32;
        let mut e = lane;
        while e < experts {
            sum += float::exp(logits.get(at + e as usize).to_f32() - most);
            e += 32;
        }
        let sum = warp::reduce_sum(sum);
        let sum = if warp::warp_vote_any(warp::FULL, nan) { f32::NAN } else { sum };
        if lane == 0 {
            let z = most + float::log(sum);
            largest.set(t, most);
            inverse.set(t, 1.0 / sum);
            squares.set(t, z * z);
        }
        t += (THREADS / 32) as u32;
    }

    let pairs = here * top_k;
    let mut base = 0;
    while base < experts {
        let expert = base + tid;
        let (mut load, mut importance, mut probability) = (0u32, 0f32, 0f32);
        let mut start = 0;
        while start < pairs {
            let held = (pairs - start).min(SLAB as u32);
            // Everybody is done with the last slab.
            thread::sync_threads();
            let mut i = tid;
            while i < held {
                let at = first as usize * top_k as usize + (start + i) as usize;
                slab_ids.set(i, ids.get(at));
                slab_weights.set(i, weights.get(at));
                i += THREADS as u32;
            }
            thread::sync_threads();
            for i in 0..held {
                let own = slab_ids.get(i) == expert as i32;
                load += own as u32;
                importance += if own { slab_weights.get(i) } else { 0.0 };
            }
            start += SLAB as u32;
        }
        if pairs == 0 {
            thread::sync_threads();
        }
        if expert < experts {
            for t in 0..here {
                let x = logits.get((first + t) as usize * row + expert as usize).to_f32();
                probability = float::fma(float::exp(x - largest.get(t)), inverse.get(t), probability);
            }
            out.set(expert, f32::from_bits(load));
            out.set(experts + expert, importance);
            out.set(2 * experts + expert, probability);
        }
        base += THREADS as u32;
    }
    if tid == 0 {
        let mut sum = 0f32;
        for t in 0..here {
            sum += squares.get(t);
        }
        out.set(3 * experts, sum);
    }
}

/// The sum over the threads of a value of each, in one order; for all threads, which must all be here.
#[inline(always)]
unsafe fn sum_all(value: f32, scratch: Shared<f32>) -> f32 {
    let sum = warp::reduce_sum(value);
    thread::sync_threads();
    // Of the whole warp: not to be asked for by one lane.
    let warp_id = warp::warp_id();
    if warp::lane_id() == 0 {
        scratch.set(warp_id, sum);
    }
    thread::sync_threads();
    let mut all = 0f32;
    for w in 0..(FINISH_THREADS / 32) as u32 {
        all += scratch.get(w);
    }
    all
}

/// Adds the `rows` rows of `table` up. `loads`, `importance`, `probabilities`: `[experts]` each or null: pairs, sum of their
/// weights, mean of the softmax of the logits. `summary`: `[SUMMARY]`: coefficients of variation of load and importance, the
/// square of the latter, the load-balancing loss, the z-loss. Grid: 1; block: [`FINISH_THREADS`]; shared memory:
/// [`finish_shared_bytes`].
#[inline(always)]
pub unsafe fn statistics_finish(
    loads: *mut i32,
    importance: *mut f32,
    probabilities: *mut f32,
    summary: *mut f32,
    table: *const f32,
    rows: u32,
    tokens: u32,
    experts: u32,
) {
    let tid = thread::thread_idx_x();
    let places = (experts as usize).next_multiple_of(4);
    let mut carver = shared::Carver::new();
    let totals = carver.take::<u64>(FINISH_THREADS / 32);
    let (load_of, importance_of) = (carver.take::<u32>(places), carver.take::<f32>(places));
    let probability_of = carver.take::<f32>(places);
    let scratch = carver.take::<f32>(FINISH_THREADS / 32);
    dependent_launch::wait();
    let table = Global::new(table);
    let width = columns(experts as usize);
    // A column: load, importance or probability of an expert, or the sum for the z-loss.
    let mut column = tid;
    while column < 3 * experts + 1 {
        let (mut count, mut sum) = (0u32, 0f32);
        let mut r = 0;
        while r < rows {
            // Eight at a time are on their way.
            let mut v = [0f32; 8];
            unroll::<8>(|i| {
                if r + (i as u32) < rows {
                    v[i] = table.get((r + i as u32) as usize * width + column as usize);
                }
            });
            unroll::<8>(|i| {
                // One of them is meant, the other's bits mean nothing.
                count = count.wrapping_add(v[i].to_bits());
                sum += v[i];
            });
            r += 8;
        }
        let (kind, expert) = if column < experts {
            (0, column)
        } else if column < 2 * experts {
            (1, column - experts)
        } else {
            (2, column - 2 * experts)
        };
        if kind == 0 {
            load_of.set(expert, count);
        } else if kind == 1 {
            importance_of.set(expert, sum);
        } else if expert < experts {
            probability_of.set(expert, sum / tokens.max(1) as f32);
        } else {
            GlobalMut::new(summary).set(4u32, if tokens == 0 { 0.0 } else { sum / tokens as f32 });
        }
        column += FINISH_THREADS as u32;
    }
    thread::sync_threads();

    // SAFETY: there are experts.
    core::hint::assert_unchecked(experts != 0);
    let n = experts as f32;
    let (mut pairs, mut weight, mut product) = (0u64, 0f32, 0f32);
    let mut e = tid;
    while e < experts {
        let (load, importance_here, probability) = (load_of.get(e), importance_of.get(e), probability_of.get(e));
        pairs += load as u64;
        weight += importance_here;
        product = float::fma(load as f32, probability, product);
        if !loads.is_null() {
            GlobalMut::new(loads).set(e, load as i32);
        }
        if !importance.is_null() {
            GlobalMut::new(importance).set(e, importance_here);
        }
        if !probabilities.is_null() {
            GlobalMut::new(probabilities).set(e, probability);
        }
        e += FINISH_THREADS as u32;
    }
    let pairs_here = warp::reduce(pairs, |a, b| a + b);
    let warp_id = warp::warp_id();
    if warp::lane_id() == 0 {
        totals.set(warp_id, pairs_here);
    }
    thread::sync_threads();
    let mut pairs = 0u64;
    for w in 0..(FINISH_THREADS / 32) as u32 {
        pairs += totals.get(w);
    }
    let mean = sum_all(weight, scratch) / n;
    let product = sum_all(product, scratch);
    // Squared distances from the mean; of loads `experts` times the distance, which is a whole number.
    let (mut load_squares, mut importance_squares) = (0f32, 0f32);
    let mut e = tid;
    while e < experts {
        let d = (load_of.get(e) as i64 * experts as i64 - pairs as i64) as f32 / n;
        load_squares = float::fma(d, d, load_squares);
        // In units of the mean, whose square may be beyond f32.
        let d = if mean == 0.0 { 0.0 } else { (importance_of.get(e) - mean) / mean };
        importance_squares = float::fma(d, d, importance_squares);
        e += FINISH_THREADS as u32;
    }
    let load_squares = sum_all(load_squares, scratch) / n;
    let importance_squares = sum_all(importance_squares, scratch) / n;
    if tid == 0 {
        let summary = GlobalMut::new(summary);
        let mean_load = pairs as f32 / n;
        summary.set(0u32, if pairs == 0 { 0.0 } else { float::sqrt(load_squares) / mean_load });
        summary.set(1u32, float::sqrt(importance_squares));
        summary.set(2u32, importance_squares);
        summary.set(3u32, if pairs == 0 { 0.0 } else { n * product / pairs as f32 });
    }
}

entries! {
    /// Arguments of every `moe_statistics_part_*` entry; see [`statistics_part`].
    pub struct PartArgs<T>(
        table: *mut f32, logits: *const T, row: usize, topk_ids: *const i32, topk_weights: *const f32, tokens: u32,
        top_k: u32, experts: u32, each: u32,
    );
    moe_statistics_part_f32 { type T = f32; } [256] => statistics_part::<T>;
    moe_statistics_part_f16 { type T = f16; } [256] => statistics_part::<T>;
    moe_statistics_part_bf16 { type T = bf16; } [256] => statistics_part::<T>;
}
entries! {
    /// Arguments of `moe_statistics_finish`; see [`statistics_finish`].
    pub struct FinishArgs(
        loads: *mut i32, importance: *mut f32, probabilities: *mut f32, summary: *mut f32, table: *const f32, rows: u32,
        tokens: u32, experts: u32,
    );
    moe_statistics_finish {} [512] => statistics_finish;
}
