//! Samples one token a row whatever the number of tokens it keeps: a radix search over the keys of the logits.
//!
//! All that sampling asks is of one kind: in the row sorted by descending key, which token is at a given position, where
//! positions count tokens (top-k) or their mass (top-p, and the random draw)? A histogram of the leading digit of the
//! keys, of the number and the mass of tokens in each of its values, tells the leading digit of the answer; a histogram of
//! the next digit among the tokens that share the leading one tells that, and so on. What shares the whole key
//! has equal weights, so the place among those is a division; the last kernel finds the token at that place in the order
//! of indices. Nothing is sorted, and as sums are integers ([`super::weights`]) the token is that of `top_k_top_p`.
//!
//! [`search`] makes one histogram. It is launched once for the leading digit, which serves all goals, and once for each
//! further digit of each goal ([`passes`]); the last block of a row to finish looks for the digit and sets the
//! next task in [`RowState`]. [`pick`] then counts the tokens of that key by chunks, and the last block looks it up.

use super::job::{BINS, HISTOGRAM_WORDS, HISTOGRAMS, Job, LogProbs, RowState, Settings};
use super::logit::{Logit, for_each};
use super::row_sum::{CHUNK, for_each_vector, place};
use super::top_k::{MAX_K, THREADS};
use super::top_k_top_p::{write_token, write_top};
use super::weights::{KEY_NEG_INF, Weights, candidate, key, key_of, scaled, scaled_up};
use cuda_std::shared::Carver;
use cuda_std::{Global, GlobalMut, Shared, atomic, entries, thread, warp};

/// Bits of a digit, at most.
const DIGIT: u32 = BINS.ilog2();
const WARPS: u32 = THREADS / 32;

/// Low bits of a mass in a histogram in shared memory, where it is two words: a chunk's sums of either do not overflow.
const LOW_BITS: u32 = 20;
const _: () = assert!((CHUNK as u64) << LOW_BITS <= 1 << 32);
const _: () = assert!((CHUNK as u64) << (super::weights::MAX_BITS - LOW_BITS) < 1 << 32);

/// Goals, in the order in which they are reached. Zero is where a row starts.
const TOP_K: u32 = 0;
const TOP_P: u32 = 1;
const DRAW: u32 = 2;
const PICK: u32 = 3;

/// Digits of the keys of `T`.
const fn digits<T: Logit>() -> u32 {
    T::KEY_BITS.div_ceil(DIGIT)
}

/// How often [`search`] must run for keys of so many bits and up to so many goals.
pub const fn passes(key_bits: u32, goals: u32) -> u32 {
    1 + (key_bits.div_ceil(DIGIT) - 1) * goals
}

/// Bits of the key below a digit.
#[inline(always)]
fn below<T: Logit>(digit: u32) -> u32 {
    let used = (digit + 1) * DIGIT;
    32 - if used < T::KEY_BITS { used } else { T::KEY_BITS }
}

/// The key of a full prefix: the bits that values of `T` never use follow the sign.
#[inline(always)]
fn key_of_prefix<T: Logit>(prefix: u32) -> u32 {
    let unused = 32 - T::KEY_BITS;
    if unused == 0 {
        return prefix;
    }
    let key = prefix << unused;
    if key >> 31 == 0 { key | ((1 << unused) - 1) } else { key }
}

/// Shared memory of [`search`].
#[derive(Clone, Copy)]
struct Bins {
    count: Shared<u32>,
    low: Shared<u32>,
    high: Shared<u32>,
    /// Two sums of each warp.
    sums: Shared<u64>,
    /// What was found: bin, count above, mass above.
    found: Shared<u64>,
    flag: Shared<u32>,
}

/// Bytes of it.
pub const SEARCH_SHARED_BYTES: usize = 3 * 4 * BINS as usize + 8 * (2 * WARPS as usize + 4) + 16;

impl Bins {
    #[inline(always)]
    unsafe fn new() -> Self {
        let mut carver = Carver::new();
        Self {
            count: carver.take(BINS as usize),
            low: carver.take(BINS as usize),
            high: carver.take(BINS as usize),
            sums: carver.take(2 * WARPS as usize),
            found: carver.take(4),
            flag: carver.take(4),
        }
    }

    #[inline(always)]
    #[track_caller]
    unsafe fn add(&self, bin: u32, count: u32, mass: u64) {
        atomic::fetch_add_u32(self.count.ptr(bin), count);
        let low = mass as u32 & ((1 << LOW_BITS) - 1);
        if low != 0 {
            atomic::fetch_add_u32(self.low.ptr(bin), low);
        }
        if mass >> LOW_BITS != 0 {
            atomic::fetch_add_u32(self.high.ptr(bin), (mass >> LOW_BITS) as u32);
        }
    }

    /// Sums of two values over this thread and those before it, and over all. By all threads.
    #[inline(always)]
    #[track_caller]
    unsafe fn prefix_sums(&self, a: u64, b: u64) -> [(u64, u64); 2] {
        let (lane, warp_id) = (warp::lane_id(), thread::thread_idx_x() / 32);
        let (mut x, mut y) = (a, b);
        let mut delta = 1;
        while delta < 32 {
            let (p, there) = warp::warp_shuffle_up(warp::FULL, x, delta, 32);
            let (q, _) = warp::warp_shuffle_up(warp::FULL, y, delta, 32);
            if there {
                x += p;
                y += q;
            }
            delta *= 2;
        }
        if lane == 31 {
            self.sums.set(2 * warp_id, x);
            self.sums.set(2 * warp_id + 1, y);
        }
        thread::sync_threads();
        let mut all = (0, 0);
        let mut w = 0;
        while w < WARPS {
            let (p, q) = (self.sums.get(2 * w), self.sums.get(2 * w + 1));
            if w < warp_id {
                x += p;
                y += q;
            }
            all = (all.0 + p, all.1 + q);
            w += 1;
        }
        // The sums may be used again.
        thread::sync_threads();
        [(x, all.0), (y, all.1)]
    }

    /// The bin at `position` of a histogram in global memory, in descending order of bins, positions counting tokens or
    /// mass; and the total mass. By all threads.
    #[inline(always)]
    #[track_caller]
    unsafe fn find(&self, histogram: GlobalMut<u64>, position: u64, by_mass: bool) -> (Found, u64) {
        const EACH: u32 = BINS / THREADS;
        let tid = thread::thread_idx_x();
        let (mut count, mut mass) = (0, 0);
        let mut i = 0;
        while i < EACH {
            let bin = BINS - 1 - (tid * EACH + i);
            count += histogram.get(2 * bin);
            mass += histogram.get(2 * bin + 1);
            i += 1;
        }
        let [(count_upto, _), (mass_upto, total)] = self.prefix_sums(count, mass);
        let (mut count_above, mut mass_above) = (count_upto - count, mass_upto - mass);
        let mut i = 0;
        while i < EACH {
            let bin = BINS - 1 - (tid * EACH + i);
            let (c, m) = (histogram.get(2 * bin), histogram.get(2 * bin + 1));
            let (from, len) = if by_mass { (mass_above, m) } else { (count_above, c) };
            if from <= position && position - from < len {
                self.found.set(0u32, bin as u64);
                self.found.set(1u32, count_above);
                self.found.set(2u32, mass_above);
            }
            count_above += c;
            mass_above += m;
            i += 1;
        }
        thread::sync_threads();
        let found = Found {
            bin: self.found.get(0u32) as u32,
            count_above: self.found.get(1u32),
            mass_above: self.found.get(2u32),
        };
        thread::sync_threads();
        (found, total)
    }
}

#[derive(Clone, Copy)]
struct Found {
    bin: u32,
    count_above: u64,
    mass_above: u64,
}

/// The weight as the filters see it: nothing below min-p.
#[inline(always)]
fn filtered(weights: &Weights, settings: &Settings, key: u32) -> u64 {
    let w = weights.of(key);
    if w < settings.least { 0 } else { w }
}

/// Grid: [`super::row_sum::chunks`] blocks for each row, rows one after another. After `row_max`, [`passes`] times.
#[inline(always)]
pub unsafe fn search<T: Logit>(logits: *const T, job: Job) {
    let (row, index, chunks) = place(job.vocab);
    let settings = job.settings(row);
    if settings.k <= job.quick_limit {
        return;
    }
    let states = GlobalMut::new(job.state);
    let state = states.get(row);
    if state.max_key <= KEY_NEG_INF || state.goal == PICK {
        return;
    }
    let weights = job.weights(&settings, state.max_key);
    let bins = Bins::new();
    let tid = thread::thread_idx_x();
    let mut bin = tid;
    while bin < BINS {
        bins.count.set(bin, 0);
        bins.low.set(bin, 0);
        bins.high.set(bin, 0);
        bin += THREADS;
    }
    thread::sync_threads();

    let low = below::<T>(state.digit);
    let high = if state.digit == 0 { 32 } else { below::<T>(state.digit - 1) };
    // Neighbours often share a bin: one addition for a run of them.
    let (mut bin, mut count, mut mass) = (0, 0, 0);
    let data = job.row(logits, row);
    for_each_vector(data, index, |v, words| {
        for_each::<T>(words, |e, x| {
            let key = key(x);
            let inside = data.index(v, e) < job.vocab;
            if inside && (key as u64 >> high) as u32 == state.prefix {
                let this = (key >> low) & ((1u64 << (high - low)) - 1) as u32;
                if this != bin {
                    if count > 0 {
                        bins.add(bin, count, mass);
                    }
                    (bin, count, mass) = (this, 0, 0);
                }
                count += 1;
                mass += filtered(&weights, &settings, key);
            }
        });
    });
    if count > 0 {
        bins.add(bin, count, mass);
    }
    thread::sync_threads();

    let histograms = GlobalMut::new(job.histograms).offset(row as usize * HISTOGRAMS * HISTOGRAM_WORDS);
    let leading = histograms;
    let further = histograms.offset(HISTOGRAM_WORDS);
    let histogram = if state.digit == 0 { leading } else { further };
    let mut bin = tid;
    while bin < BINS {
        let count = bins.count.get(bin);
        if count > 0 {
            atomic::fetch_add_u64(histogram.ptr(2 * bin), count as u64);
            let mass = bins.low.get(bin) as u64 + ((bins.high.get(bin) as u64) << LOW_BITS);
            if mass > 0 {
                atomic::fetch_add_u64(histogram.ptr(2 * bin + 1), mass);
            }
        }
        bin += THREADS;
    }
    if job.last_of_row(row, chunks, bins.flag) {
        let next = advance::<T>(&job, row, &settings, &weights, &bins, state, leading, further);
        if tid == 0 {
            states.set(row, next);
        }
    }
}

/// Looks for the digit in the histogram that is complete now, and goes from goal to goal as long as that needs no other
/// histogram.
#[inline(always)]
#[track_caller]
unsafe fn advance<T: Logit>(
    job: &Job,
    row: u32,
    settings: &Settings,
    weights: &Weights,
    bins: &Bins,
    mut state: RowState,
    leading: GlobalMut<u64>,
    further: GlobalMut<u64>,
) -> RowState {
    let last = digits::<T>() - 1;
    loop {
        if state.digit == 0 && state.goal == TOP_K {
            state.position = settings.k as u64 - 1;
            if settings.k >= job.vocab {
                let (_, total) = bins.find(leading, 0, false);
                set_kept(&mut state, job.vocab as u64, total);
                state.goal = TOP_P;
            }
        }
        if state.digit == 0 && state.goal == TOP_P {
            match settings.top_p {
                Some(p) => state.position = scaled_up(state.kept_mass, p).max(1) - 1,
                None => state.goal = DRAW,
            }
        }
        if state.digit == 0 && state.goal == DRAW {
            state.position = scaled(state.kept_mass, job.draw(row));
        }

        let by_mass = state.goal != TOP_K;
        let offset = if by_mass { state.mass_above } else { state.count_above };
        let histogram = if state.digit == 0 { leading } else { further };
        let (found, _) = bins.find(histogram, state.position - offset, by_mass);
        if state.digit > 0 {
            clear(further);
        }
        let high = if state.digit == 0 { 32 } else { below::<T>(state.digit - 1) };
        state.prefix = ((state.prefix as u64) << (high - below::<T>(state.digit))) as u32 | found.bin;
        state.count_above += found.count_above;
        state.mass_above += found.mass_above;
        if state.digit < last {
            state.digit += 1;
            return state;
        }

        let key = key_of_prefix::<T>(state.prefix);
        let w = filtered(weights, settings, key);
        let among = if by_mass {
            // Something of weight 0 is never at a position of mass.
            core::hint::assert_unchecked(w != 0);
            (state.position - state.mass_above) / w
        } else {
            state.position - state.count_above
        };
        if state.goal == DRAW {
            state.goal = PICK;
            state.position = among;
            return state;
        }
        let (count, mass) = (state.count_above + among + 1, state.mass_above + (among + 1) * w);
        set_kept(&mut state, count, mass);
        state.goal += 1;
        (state.digit, state.prefix, state.count_above, state.mass_above) = (0, 0, 0, 0);
    }
}

#[inline(always)]
fn set_kept(state: &mut RowState, count: u64, mass: u64) {
    state.kept = count;
    state.kept_mass = mass;
}

/// Zeros a histogram for its next use. By all threads.
#[inline(always)]
#[track_caller]
unsafe fn clear(histogram: GlobalMut<u64>) {
    let mut i = thread::thread_idx_x();
    while i < HISTOGRAM_WORDS as u32 {
        histogram.set(i, 0);
        i += THREADS;
    }
}

/// Bytes of shared memory of [`pick`].
pub const PICK_SHARED_BYTES: usize = 4 * (WARPS as usize + 8);

/// Sum over this thread and those before it, and over all threads. By all threads.
#[inline(always)]
#[track_caller]
unsafe fn prefix_count(sums: Shared<u32>, value: u32) -> (u32, u32) {
    let (lane, warp_id) = (warp::lane_id(), thread::thread_idx_x() / 32);
    let mut upto = value;
    let mut delta = 1;
    while delta < 32 {
        let (below, there) = warp::warp_shuffle_up(warp::FULL, upto, delta, 32);
        upto += if there { below } else { 0 };
        delta *= 2;
    }
    if lane == 31 {
        sums.set(warp_id, upto);
    }
    thread::sync_threads();
    let mut all = 0;
    let mut w = 0;
    while w < WARPS {
        let sum = sums.get(w);
        upto += if w < warp_id { sum } else { 0 };
        all += sum;
        w += 1;
    }
    // The sums may be used again.
    thread::sync_threads();
    (upto, all)
}

/// Grid: as [`search`], after the last of them.
#[inline(always)]
pub unsafe fn pick<T: Logit>(logits: *const T, job: Job) {
    let (row, index, chunks) = place(job.vocab);
    let settings = job.settings(row);
    if settings.k <= job.quick_limit {
        return;
    }
    let mut carver = Carver::new();
    let sums = carver.take::<u32>(WARPS as usize);
    let flag = carver.take::<u32>(4);
    let result = carver.take::<u32>(4);
    let states = GlobalMut::new(job.state);
    let state = states.get(row);
    // Of a row without a logit above -inf it is the first that is allowed.
    let (wanted, position) = if state.max_key <= KEY_NEG_INF {
        (state.max_key, 0)
    } else {
        (key_of_prefix::<T>(state.prefix), state.position)
    };
    let data = job.row(logits, row);
    let tid = thread::thread_idx_x();

    let mut mine = 0;
    for_each_vector(data, index, |v, words| {
        for_each::<T>(words, |e, x| mine += (key(x) == wanted && data.index(v, e) < job.vocab) as u32);
    });
    let (_, here) = prefix_count(sums, mine);
    let counts = GlobalMut::new(job.chunk_counts).offset(row as usize * chunks as usize);
    if tid == 0 {
        counts.set(index, here);
    }
    if !job.last_of_row(row, chunks, flag) {
        return;
    }

    // The chunk, then the vector, then the element. `position` is below the number of tokens of that key.
    let mut position = position;
    let mut chunk = 0;
    loop {
        let count = counts.get(chunk) as u64;
        if position < count || chunk + 1 == chunks {
            break;
        }
        position -= count;
        chunk += 1;
    }
    let mut position = position as u32;
    let first = chunk * (CHUNK / super::logit::Row::<T>::WIDTH) + tid;
    let mut u = 0;
    while u < CHUNK / super::logit::Row::<T>::WIDTH / THREADS {
        let v = first + u * THREADS;
        let mut mine = 0;
        let words = if v < data.vectors { data.load(v) } else { [T::ABSENT; 4] };
        let inside = |e| v < data.vectors && data.index(v, e) < job.vocab;
        for_each::<T>(words, |e, x| mine += (key(x) == wanted && inside(e)) as u32);
        let (upto, all) = prefix_count(sums, mine);
        let mut before = upto - mine;
        for_each::<T>(words, |e, x| {
            if key(x) == wanted && inside(e) {
                if before == position {
                    result.set(0u32, data.index(v, e));
                }
                before += 1;
            }
        });
        // Never found again once it was.
        position = position.wrapping_sub(all);
        u += 1;
    }
    thread::sync_threads();
    write(&job, row, &settings, state, candidate(wanted, result.get(0u32)));

    clear(GlobalMut::new(job.histograms).offset(row as usize * HISTOGRAMS * HISTOGRAM_WORDS));
    if tid == 0 {
        states.set(row, RowState::default());
    }
}

/// Writes the outputs of a row. By all threads.
#[inline(always)]
#[track_caller]
unsafe fn write(job: &Job, row: u32, settings: &Settings, state: RowState, chosen: u64) {
    let tid = thread::thread_idx_x();
    let weights = job.weights(settings, state.max_key);
    let (sum, kept_mass) = (state.sum, state.kept_mass);
    let probs = LogProbs { weights, temperature: settings.temperature, sum, kept_mass };
    if tid == 0 {
        let key = key_of(chosen);
        write_token(job, row, super::weights::index_of(chosen), probs.before(key), probs.after(key));
    }
    if tid < job.top_n {
        let entry = Global::new(job.best.cast_const()).get(row as usize * MAX_K as usize + tid as usize);
        let key = key_of(entry);
        let kept = (tid as u64) < state.kept && filtered(&weights, settings, key) > 0;
        let after = if kept { probs.after(key) } else { f32::NEG_INFINITY };
        write_top(job, row, tid, entry, probs.before(key), after);
    }
}

entries! {
    pub struct Args<T>(logits: *const T, job: Job);
    sampling_radix_search_f32 { type T = f32; } [THREADS] => search::<T>;
    sampling_radix_search_f16 { type T = half::f16; } [THREADS] => search::<T>;
    sampling_radix_search_bf16 { type T = half::bf16; } [THREADS] => search::<T>;
    sampling_radix_pick_f32 { type T = f32; } [THREADS] => pick::<T>;
    sampling_radix_pick_f16 { type T = half::f16; } [THREADS] => pick::<T>;
    sampling_radix_pick_bf16 { type T = half::bf16; } [THREADS] => pick::<T>;
}
