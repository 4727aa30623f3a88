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
use super::logit::Logit;
use super::row_sum::{CHUNK, THREADS, for_each_of_chunk, place};
use super::top_k::{MAX_K, own_index};
use super::top_k_top_p::{write_token, write_top};
use super::weights::{KEY_NEG_INF, Weights, candidate, index_of, key, key_of, scaled, scaled_up};
use cuda_std::atomic::{Block, Device, Relaxed};
use cuda_std::integer::opaque;
use cuda_std::shared::Carver;
use cuda_std::vec::B128;
use cuda_std::{Global, GlobalMut, Shared, dependent_launch, entries, thread, unroll, warp};

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
    /// One of each warp.
    sums: Shared<u64>,
    /// What was found: bin, count above, mass above.
    found: Shared<u64>,
    flag: Shared<u32>,
}

/// Bytes of it.
pub const SEARCH_SHARED_BYTES: usize = 3 * 4 * BINS as usize + 8 * (WARPS as usize + 4) + 16;

impl Bins {
    #[inline(always)]
    unsafe fn new() -> Self {
        let mut carver = Carver::new();
        Self {
            count: carver.take(BINS as usize),
            low: carver.take(BINS as usize),
            high: carver.take(BINS as usize),
            sums: carver.take(WARPS as usize),
            found: carver.take(4),
            flag: carver.take(4),
        }
    }

    #[inline(always)]
    #[track_caller]
    unsafe fn add(&self, bin: u32, count: u32, mass: u64) {
        self.count.fetch_add(bin, count, Block, Relaxed);
        let low = mass as u32 & ((1 << LOW_BITS) - 1);
        if low != 0 {
            self.low.fetch_add(bin, low, Block, Relaxed);
        }
        if mass >> LOW_BITS != 0 {
            self.high.fetch_add(bin, (mass >> LOW_BITS) as u32, Block, Relaxed);
        }
    }

    /// The bin at `position` of a histogram in global memory, in descending order of bins, positions counting tokens or
    /// mass; and the total mass. By all threads, which have no use for the histogram in shared memory any more.
    #[inline(always)]
    #[track_caller]
    unsafe fn find(&self, histogram: GlobalMut<u64>, position: u64, by_mass: bool) -> (Found, u64) {
        const EACH: u32 = BINS / THREADS;
        let tid = own_index();
        // All loads are under way before the first is waited for. Between two looks at them they are in shared memory.
        let mut bins = [[0; 2]; EACH as usize];
        unroll::<{ EACH as usize }>(|i| {
            bins[i] = histogram.get_as::<B128<u64, 2>>(2 * (BINS - 1 - (tid * EACH + i as u32))).0;
        });
        let (mut count, mut mass) = (0, 0);
        unroll::<{ EACH as usize }>(|i| {
            let ([c, m], own) = (bins[i], i as u32 * THREADS + tid);
            // A row has fewer than 2^31 tokens.
            self.count.set(own, c as u32);
            self.low.set(own, m as u32);
            self.high.set(own, (m >> 32) as u32);
            (count, mass) = (count + c, mass + m);
        });
        let (count_upto, _) = prefix_sum(self.sums, count);
        let (mass_upto, total) = prefix_sum(self.sums, mass);
        let (mut count_above, mut mass_above) = (count_upto - count, mass_upto - mass);
        unroll::<{ EACH as usize }>(|i| {
            let (bin, own) = (BINS - 1 - (tid * EACH + i as u32), i as u32 * THREADS + tid);
            let (c, m) = (self.count.get(own) as u64, self.low.get(own) as u64 | (self.high.get(own) as u64) << 32);
            let (from, len) = if by_mass { (mass_above, m) } else { (count_above, c) };
            if from <= position && position - from < len {
                self.found.set(0u32, bin as u64);
                self.found.set(1u32, count_above);
                self.found.set(2u32, mass_above);
            }
            count_above += c;
            mass_above += m;
        });
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
    dependent_launch::begin();
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
    let tid = own_index();
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
    // Flat rows share few bins: one addition for a run of logits in one.
    let (mut bin, mut count, mut mass) = (0, 0, 0);
    for_each_of_chunk(job.row(logits, row), index, |x| {
        let key = key(x);
        if (key as u64 >> high) as u32 == state.prefix {
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
    if count > 0 {
        bins.add(bin, count, mass);
    }
    thread::sync_threads();

    let histograms = GlobalMut::new(job.histograms).offset(row as usize * HISTOGRAMS * HISTOGRAM_WORDS);
    let histogram = if state.digit == 0 { histograms } else { histograms.offset(HISTOGRAM_WORDS) };
    let mut bin = tid;
    while bin < BINS {
        let count = bins.count.get(bin);
        if count > 0 {
            histogram.fetch_add(2 * bin, count as u64, Device, Relaxed);
            let mass = bins.low.get(bin) as u64 + ((bins.high.get(bin) as u64) << LOW_BITS);
            if mass > 0 {
                histogram.fetch_add(2 * bin + 1, mass, Device, Relaxed);
            }
        }
        bin += THREADS;
    }
    if job.last_of_row(row, chunks, bins.flag) {
        // Everything is looked up again rather than kept in registers all the time.
        let row = opaque(row);
        let next = advance::<T>(&job, row, &bins, GlobalMut::new(job.state).get(row));
        if own_index() == 0 {
            GlobalMut::new(job.state).set(row, next);
        }
    }
}

/// Looks for the digit in the histogram that is complete now, and goes from goal to goal as long as that needs no other
/// histogram.
#[inline(always)]
#[track_caller]
unsafe fn advance<T: Logit>(job: &Job, row: u32, bins: &Bins, mut state: RowState) -> RowState {
    let settings = job.settings(row);
    let leading = GlobalMut::new(job.histograms).offset(row as usize * HISTOGRAMS * HISTOGRAM_WORDS);
    let further = leading.offset(HISTOGRAM_WORDS);
    let last = digits::<T>() - 1;
    loop {
        let mut all = false;
        if state.digit == 0 {
            if state.goal == TOP_K {
                // Without top-k the leading digits say enough: the mass of all.
                all = settings.k >= job.vocab;
                state.position = if all { 0 } else { settings.k as u64 - 1 };
            } else if state.goal == TOP_P && settings.top_p.is_none() {
                state.goal = DRAW;
            }
            if state.goal == TOP_P {
                let p = settings.top_p.unwrap_or(0);
                state.position = scaled_up(state.kept_mass, p).max(1) - 1;
            } else if state.goal == DRAW {
                state.position = scaled(state.kept_mass, job.draw(row));
            }
        }

        let by_mass = state.goal != TOP_K;
        let offset = if by_mass { state.mass_above } else { state.count_above };
        let histogram = if state.digit == 0 { leading } else { further };
        let (found, total) = bins.find(histogram, state.position - offset, by_mass);
        if all {
            state.kept = job.vocab as u64;
            state.kept_mass = total;
            state.goal = TOP_P;
            continue;
        }
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
        let w = filtered(&job.weights(&settings, state.max_key), &settings, key);
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
        state.kept = state.count_above + among + 1;
        state.kept_mass = state.mass_above + (among + 1) * w;
        state.goal += 1;
        (state.digit, state.prefix, state.count_above, state.mass_above) = (0, 0, 0, 0);
    }
}

/// Zeros a histogram for its next use. By all threads.
#[inline(always)]
#[track_caller]
unsafe fn clear(histogram: GlobalMut<u64>) {
    let mut i = own_index();
    while i < HISTOGRAM_WORDS as u32 {
        histogram.set(i, 0);
        i += THREADS;
    }
}

/// Bytes of shared memory of [`pick`].
pub const PICK_SHARED_BYTES: usize = 8 * WARPS as usize + 4 * 8;

/// Sum over this thread and those before it, and over all threads. By all threads.
#[inline(always)]
#[track_caller]
unsafe fn prefix_sum(sums: Shared<u64>, value: u64) -> (u64, u64) {
    let (lane, warp_id) = (warp::lane_id(), own_index() / 32);
    let upto = warp::scan(value, |a, b| a + b);
    if lane == 31 {
        sums.set(warp_id, upto);
    }
    thread::sync_threads();
    let warps = warp::scan(if lane < WARPS { sums.get(lane) } else { 0 }, |a, b| a + b);
    let before = warp::shfl_idx(warps, warp_id.wrapping_sub(1) % 32);
    // The sums may be used again.
    thread::sync_threads();
    (upto + if warp_id > 0 { before } else { 0 }, warp::shfl_idx(warps, 31))
}

/// Grid: as [`search`], after the last of them.
#[inline(always)]
pub unsafe fn pick<T: Logit>(logits: *const T, job: Job) {
    dependent_launch::begin();
    let (row, index, chunks) = place(job.vocab);
    let settings = job.settings(row);
    if settings.k <= job.quick_limit {
        return;
    }
    let mut carver = Carver::new();
    let sums = carver.take::<u64>(WARPS as usize);
    let flag = carver.take::<u32>(4);
    let result = carver.take::<u32>(4);
    let states = GlobalMut::new(job.state);
    let state = states.get(row);
    // Of a row without a logit above -inf it is the first that is allowed.
    let none = state.max_key <= KEY_NEG_INF;
    let (wanted, position) = if none { (state.max_key, 0) } else { (key_of_prefix::<T>(state.prefix), state.position) };
    let data = job.row(logits, row);
    let tid = own_index();

    let mut mine = 0;
    for_each_of_chunk(data, index, |x| mine += (key(x) == wanted) as u64);
    let (_, here) = prefix_sum(sums, mine);
    let counts = GlobalMut::new(job.chunk_counts).offset(row as usize * chunks as usize);
    if tid == 0 {
        counts.set(index, here as u32);
    }
    if !job.last_of_row(row, chunks, flag) {
        return;
    }

    // The chunk, then the thread that has it among its neighbours. `position` is below the number of tokens of that key.
    let lane = warp::lane_id();
    let mut position = position;
    let mut chunk = 0;
    loop {
        let count = if chunk + lane < chunks { counts.get(chunk + lane) as u64 } else { 0 };
        let upto = warp::scan(count, |a, b| a + b);
        let beyond = warp::warp_vote_ballot(warp::FULL, position < upto);
        if beyond != 0 {
            let at = beyond.trailing_zeros();
            position -= warp::shfl_idx(upto - count, at);
            chunk += at;
            break;
        }
        if chunk + 32 >= chunks {
            // Nothing is at the position.
            chunk = chunks - 1;
            break;
        }
        position -= warp::shfl_idx(upto, 31);
        chunk += 32;
    }
    const EACH: u32 = CHUNK / THREADS;
    let first = chunk * CHUNK + tid * EACH;
    let mut held = [0.0; EACH as usize];
    unroll::<{ EACH as usize }>(|e| {
        if first + (e as u32) < job.vocab {
            held[e] = data.get(first + e as u32);
        }
    });
    let mut hits = 0u32;
    unroll::<{ EACH as usize }>(|e| {
        hits |= ((first + (e as u32) < job.vocab && key(held[e]) == wanted) as u32) << e;
    });
    let found = hits.count_ones() as u64;
    let (upto, _) = prefix_sum(sums, found);
    let mut before = upto - found;
    while hits != 0 {
        if before == position {
            result.set(0u32, first + hits.trailing_zeros());
        }
        before += 1;
        hits &= hits - 1;
    }
    thread::sync_threads();
    let token = if none && job.adjusted == 0 { 0 } else { result.get(0u32) };
    write(&job, row, &settings, state, candidate(wanted, token));

    clear(GlobalMut::new(job.histograms).offset(row as usize * HISTOGRAMS * HISTOGRAM_WORDS));
    if tid == 0 {
        states.set(row, RowState::default());
    }
}

/// Writes the outputs of a row. By all threads.
#[inline(always)]
#[track_caller]
unsafe fn write(job: &Job, row: u32, settings: &Settings, state: RowState, chosen: u64) {
    let tid = own_index();
    let weights = job.weights(settings, state.max_key);
    let (sum, kept_mass) = (state.sum, state.kept_mass);
    let probs = LogProbs { weights, temperature: settings.temperature, sum, kept_mass };
    if tid == 0 {
        write_token(job, row, index_of(chosen), key_of(chosen), Some(&probs));
    }
    if tid < job.top_n {
        let entry = Global::new(job.best.cast_const()).get(row as usize * MAX_K as usize + tid as usize);
        let kept = (tid as u64) < state.kept && filtered(&weights, settings, key_of(entry)) > 0;
        write_top(job, row, tid, entry, kept, Some(&probs));
    }
}

entries! {
    pub struct Args<T>(logits: *const T, job: Job);
    sampling_radix_search_f32 { type T = f32; } [THREADS, 2] => search::<T>;
    sampling_radix_search_f16 { type T = half::f16; } [THREADS, 2] => search::<T>;
    sampling_radix_search_bf16 { type T = half::bf16; } [THREADS, 2] => search::<T>;
    sampling_radix_pick_f32 { type T = f32; } [THREADS] => pick::<T>;
    sampling_radix_pick_f16 { type T = half::f16; } [THREADS] => pick::<T>;
    sampling_radix_pick_bf16 { type T = half::bf16; } [THREADS] => pick::<T>;
}
