//! [`radix_cluster`](super::radix_cluster) of f32.
//!
//! Tokens are counted by the leading 16 bits of their keys, which needs neither the largest logit nor an exponential. From the counts, and the least and the
//! largest weight of each bin, follow *windows*: the few bins where the token at the position of top-k, of top-p and of the draw can be. A second pass over
//! the row adds up all weights and those above each window, exactly, and lists the tokens of the windows, which the first block then searches. Where the
//! lists have no room for them (thousands of tokens of a key) further passes search a window by digits of ten bits.

use super::counters::{self, Counters};
use super::job::{Job, LogProbs, PARAMETERS, Settings};
use super::logit::Words;
use super::part::{COUNTS, MAX_BLOCKS, Part, THREADS, WARPS};
use super::radix_cluster::{Drawn, Search, TOP_K, TOP_P, begin_if, of_blocks, write_nothing, write_row};
use super::top_k::own_index;
use super::totals::{
    self, Bin, CHUNK, Found, MAX_CHUNKS, Occupied, Totals, find_in, from_lane, get, scan, set, warp_sum,
};
use super::weights::{BANNED, KEY_NEG_INF, Weights, bits_of, key, scaled, scaled_up, value};
use cuda_std::atomic::{Block, Relaxed};
use cuda_std::integer::opaque;
use cuda_std::shared::Carver;
use cuda_std::vec::B128;
use cuda_std::{GlobalMut, Shared, cluster, float, thread, unroll, warp};

/// Bits of a key that [`Counters`] do not tell apart.
const SHIFT: u32 = 16;
/// Bits of a digit of a window.
const DIGIT: u32 = 10;
const DIGIT_BINS: u32 = 1 << DIGIT;
const DIGIT_CHUNKS: u32 = DIGIT_BINS / CHUNK;
/// Goals, and so windows at most.
const GOALS: usize = 3;
/// Key of 0.
const ZERO: u32 = 1 << 31;

/// Of each bin of a digit the tokens; the lower words of their masses; the higher ones; their largest key; and the largest complement of one.
#[derive(Clone, Copy)]
struct Histogram {
    words: Shared<u32>,
}

/// Words of each bin.
const PLANES: u32 = 5;

impl Histogram {
    /// Clears some that lie one after another. By all threads.
    #[inline(always)]
    #[track_caller]
    unsafe fn clear(&self, histograms: u32) {
        let mut i = 4 * own_index();
        while i < histograms * PLANES * DIGIT_BINS {
            self.words.set_as(i, B128([0u32; 4]));
            i += 4 * THREADS;
        }
    }

    /// Adds a token.
    #[inline(always)]
    #[track_caller]
    unsafe fn add(&self, bin: u32, key: u32, mass: u64) {
        // One address, and constants.
        let words = self.words.offset(bin);
        let base = words.address(0u32);
        words.reduce_add(base, 0, 1);
        let (low, mut high) = (mass as u32, (mass >> 32) as u32);
        if low != 0 {
            high += words.fetch_add(DIGIT_BINS, low, Block, Relaxed).overflowing_add(low).1 as u32;
        }
        if high != 0 {
            words.reduce_add(base, 2 * DIGIT_BINS, high);
        }
        words.reduce_max(base, 3 * DIGIT_BINS, key);
        words.reduce_max(base, 4 * DIGIT_BINS, !key);
    }

    /// This lane's bins of a chunk, the higher one first.
    #[inline(always)]
    #[track_caller]
    unsafe fn of_chunk(&self, chunk: u32) -> [Bin; 2] {
        let first = chunk * CHUNK + CHUNK - 1 - 2 * warp::lane_id();
        [first, first - 1].map(|bin| {
            let [count, low, high] = [0, 1, 2].map(|w: u32| self.words.get(w * DIGIT_BINS + bin));
            Bin { count, mass: low as u64 | (high as u64) << 32 }
        })
    }

    /// How many tokens a bin has, and their key if they have the same one.
    #[inline(always)]
    #[track_caller]
    unsafe fn bucket(&self, bin: u32) -> (u32, Option<u32>) {
        let [count, largest, least] = [0, 3, 4].map(|w: u32| self.words.get(w * DIGIT_BINS + bin));
        (count, if largest == !least { Some(largest) } else { None })
    }

    /// Adds those of the other blocks to this lane's bins of a chunk. By the first block.
    #[inline(always)]
    #[track_caller]
    unsafe fn merge_chunk(&self, blocks: u32, chunk: u32) {
        let first = chunk * CHUNK + CHUNK - 1 - 2 * warp::lane_id();
        unroll::<2>(|h| {
            let bin = first - h as u32;
            let of = |w: u32| of_blocks(blocks, self.words.ptr(w * DIGIT_BINS + bin));
            let (mut count, mut mass, mut largest, mut least) = (0, 0, 0, 0);
            let (counts, low, high) = (of(0), of(1), of(2));
            unroll::<{ MAX_BLOCKS as usize }>(|b| {
                count += counts[b];
                mass += low[b] as u64 | (high[b] as u64) << 32;
            });
            let [a, b] = [of(3), of(4)];
            unroll::<{ MAX_BLOCKS as usize }>(|i| (largest, least) = (largest.max(a[i]), least.max(b[i])));
            let words = [count, mass as u32, (mass >> 32) as u32, largest, least];
            unroll::<{ PLANES as usize }>(|w| self.words.set(w as u32 * DIGIT_BINS + bin, words[w]));
        });
    }

    /// Leaves the sum of a chunk. By one warp.
    #[inline(always)]
    #[track_caller]
    unsafe fn add_up(&self, chunk: u32, totals: [Shared<u32>; 3], i: u32) {
        let bins = self.of_chunk(chunk);
        let both = bins[0].and(bins[1]);
        let total = Bin { count: warp::warp_reduce_add_u32(warp::FULL, both.count), mass: warp_sum(both.mass) };
        if warp::lane_id() == 0 {
            set(totals, i, total);
        }
    }

    /// The bin at a position, with `totals` from `i` on those of its chunks; `None` if the position is behind all. By a warp.
    #[inline(always)]
    #[track_caller]
    unsafe fn find(&self, totals: [Shared<u32>; 3], i: u32, position: u64, by_mass: bool) -> Option<Found> {
        let lane = warp::lane_id();
        let own = if lane < DIGIT_CHUNKS { get(totals, i + DIGIT_CHUNKS - 1 - lane) } else { Bin::default() };
        let upto = scan(own);
        let there = warp::warp_vote_ballot(warp::FULL, position < upto.len(by_mass));
        if there == 0 {
            return None;
        }
        let place = there.trailing_zeros();
        let before = if place > 0 { from_lane(upto, place - 1) } else { Bin::default() };
        let chunk = DIGIT_CHUNKS - 1 - place;
        Some(find_in(chunk, before, self.of_chunk(chunk), position, by_mass))
    }
}

/// Shared memory of a block.
#[derive(Clone, Copy)]
struct Block32 {
    /// This block's tokens by the leading bits of their keys. In the first block later the keys of what all blocks have listed.
    counts: Counters,
    /// Of each warp, a bit for each of its chunks in which there is anything; and the same of all blocks.
    occupied: [Shared<u32>; 2],
    /// In the first block, of chunks: tokens, and the least and the largest mass they can have.
    bounds: [Totals; 2],
    /// In the first block, of both ends of the windows of top-p and the draw, and of that of top-k: the bin, or [`NONE`], and the tokens above.
    ends: Shared<u32>,
    /// Keys and indices of this block's tokens in windows. There may be more than there is room for.
    listed: [Shared<u32>; 2],
    /// How many of them.
    length: Shared<u32>,
    /// In the first block, where those of each block begin among all, or [`FULL`].
    from: Shared<u32>,
    /// Of each warp: mass of all its tokens, of those above each window, and the sum of weights that no filter applies to, if that is another.
    of_warps: Shared<u64>,
    /// In the first block, the same of each block, then of all.
    of_blocks: Shared<u64>,
    sums: Shared<u64>,
    /// Of a digit.
    histogram: Histogram,
    /// In the first block, of the chunks of a digit, or of the first digits of all windows.
    totals: [Shared<u32>; 3],
    /// The largest key of this block, that of what is allowed where there is none above -inf, the largest of all blocks, and the scale of [`Weights`].
    largest: Shared<u32>,
    /// What the first block tells the others: see [`WINDOWS`].
    told: Shared<u32>,
    parameters: Shared<u32>,
    /// In the first block, what the driver has the others do.
    task: Shared<u32>,
    /// Indices of tokens of the key that is drawn, or of many how many each block has.
    equals: Shared<u32>,
    hits: Shared<u32>,
}

/// Sums of [`Block32::sums`].
const SUMS: u32 = GOALS as u32 + 2;

/// Words of [`Block32::told`]: what is to be done,
///
/// * to make the histogram of a digit: the least and the largest key, and by how much keys are shifted;
/// * once all is done: the key, the block that has the token if it is not known yet, and which of those of that key it is there;
///
/// from [`WINDOWS`] on the least and the largest key of each window, and from [`LOGITS`] on the same as logits.
const WINDOWS: u32 = 4;
const LOGITS: u32 = WINDOWS + 2 * GOALS as u32;
const DONE: u32 = 0;
const LIST: u32 = 1;
const HISTOGRAM: u32 = 2;
/// No block, as the token is known; and the block whose list has the only token of the key.
const NOBODY: u32 = u32::MAX;
const WHO_LISTS: u32 = NOBODY - 1;

/// Tasks of the first block: none; to make the histogram of a further digit (the least and the largest key, the shift) of what is listed; to rank tokens of a key (the key, how many).
const NOTHING: u32 = 0;
const REFINE: u32 = 1;
const RANK: u32 = 2;

/// No bin.
const NONE: u32 = u32::MAX;
/// Instead of the keys of a window, where a goal has none.
const NO_WINDOW: u32 = u32::MAX;
/// Instead of where a list begins, where there is no room for all.
const FULL: u32 = u32::MAX;
/// Tokens of a list.
const LISTED: u32 = 4096;
/// Tokens of all lists, for whose keys there is room in half of the counters; the histograms of first digits have the other half.
const ALL_LISTED: u32 = counters::WORDS as u32 / 2;
const _: () = assert!(GOALS as u32 * PLANES * DIGIT_BINS <= ALL_LISTED);
/// Of tokens of one key that are ranked by comparing them.
const EQUALS: u32 = 32;

/// Bytes of shared memory.
pub const SHARED_BYTES: usize = 4 * counters::WORDS
    + 2 * totals::bytes(MAX_CHUNKS)
    + 4 * (2 * LISTED + 2 * WARPS + PLANES * DIGIT_BINS + 3 * GOALS as u32 * DIGIT_CHUNKS) as usize
    + 8 * (SUMS * (WARPS + MAX_BLOCKS + 1) + 1) as usize
    + 4 * (12 + 4 + 12 + 4 + 16 + 4 + EQUALS) as usize
    + 4 * (PARAMETERS + COUNTS);

/// Tokens, with the least and the largest mass that they can have.
type Bounds = [Bin; 2];

#[inline(always)]
fn and(a: Bounds, b: Bounds) -> Bounds {
    [a[0].and(b[0]), a[1].and(b[1])]
}

/// A bin at an end of a window.
#[derive(Clone, Copy)]
struct End {
    bin: u32,
    above: Bounds,
    own: Bounds,
}

/// Keys from `least` to `largest`, of which bins have `1 << shift`, and what is above them.
#[derive(Clone, Copy)]
struct Digits {
    least: u32,
    largest: u32,
    shift: u32,
    above: Bin,
}

impl Digits {
    #[inline(always)]
    fn new(least: u32, largest: u32, above: Bin) -> Self {
        let bits = 32 - (largest - least).leading_zeros();
        Self { least, largest, shift: bits.saturating_sub(DIGIT), above }
    }

    /// The same, of nothing but a bin.
    #[inline(always)]
    fn within(self, bin: u32, above: Bin) -> Self {
        let least = self.least + (bin << self.shift);
        Self { least, largest: least + ((1 << self.shift) - 1), shift: self.shift.saturating_sub(DIGIT), above }
    }

    /// The bin of a key, if it has one.
    #[inline(always)]
    fn bin(self, key: u32) -> Option<u32> {
        if key >= self.least && key <= self.largest { Some((key - self.least) >> self.shift) } else { None }
    }
}

/// The least weight of what is not below one of weight `w`, and the largest of what is not above: the polynomial of [`Weights`] need not
/// rise everywhere in its last bits.
#[inline(always)]
fn at_least(w: u64) -> u64 {
    w - (w >> 21) - (w != 0) as u64
}
#[inline(always)]
fn at_most(w: u64) -> u64 {
    w + (w >> 21) + (w != 0) as u64
}

impl Block32 {
    #[inline(always)]
    unsafe fn new() -> Self {
        let mut carver = Carver::new();
        Self {
            counts: Counters::new(&mut carver),
            listed: [carver.take(LISTED as usize), carver.take(LISTED as usize)],
            histogram: Histogram { words: carver.take((PLANES * DIGIT_BINS) as usize) },
            bounds: [Totals::new(&mut carver, MAX_CHUNKS), Totals::new(&mut carver, MAX_CHUNKS)],
            occupied: [carver.take(WARPS as usize), carver.take(WARPS as usize)],
            totals: [0; 3].map(|_| carver.take(GOALS * DIGIT_CHUNKS as usize)),
            of_warps: carver.take((SUMS * WARPS) as usize),
            of_blocks: carver.take((SUMS * MAX_BLOCKS) as usize),
            sums: carver.take(SUMS as usize + 1),
            ends: carver.take(12),
            length: carver.take(4),
            from: carver.take(12),
            largest: carver.take(4),
            told: carver.take(16),
            task: carver.take(4),
            equals: carver.take(EQUALS as usize),
            parameters: carver.take(PARAMETERS),
            hits: carver.take(COUNTS),
        }
    }

    /// Looked up again rather than kept in registers all the time.
    #[inline(always)]
    #[track_caller]
    unsafe fn look_up(&self, job: &Job) -> (Settings, Weights) {
        let (settings, _) = Settings::looked_up(self.parameters);
        let scale = f32::from_bits(self.largest.get(3u32));
        (settings, Weights { max_key: self.largest.get(2u32), scale, bits: bits_of(job.vocab) })
    }

    /// Counts this block's tokens; its largest key is that of the largest logit. By all threads.
    #[inline(always)]
    #[track_caller]
    unsafe fn count(&self, part: &Part<f32>) {
        let mut largest = f32::NEG_INFINITY;
        let mut add = |word: u32, tokens: u32| {
            let x = f32::from_bits(word);
            largest = float::max(largest, x);
            // Not NaN. What is at -inf is never looked for. None are added rather than nothing, which would be a branch for each.
            let tokens = if x > f32::NEG_INFINITY { tokens } else { 0 };
            self.counts.add(float::sortable_not_nan(x + 0.0) >> SHIFT, tokens);
        };
        part.for_each::<AT_ONCE>(BANNED, |_, vectors| {
            unroll::<AT_ONCE>(|i| {
                let words = vectors[i];
                if words[0] == words[1] && words[0] == words[2] && words[0] == words[3] {
                    // Flat rows would wait for each other's additions.
                    add(words[0], 4);
                } else {
                    unroll::<4>(|e| add(words[e], 1));
                }
            });
        });
        part.for_each_outside(BANNED, |_, word| add(word, 1));
        self.raise(0, key(largest));
    }

    /// Raises one of the largest keys to the largest of all lanes.
    #[inline(always)]
    #[track_caller]
    unsafe fn raise(&self, i: u32, own: u32) {
        let largest = warp::warp_reduce_max_u32(warp::FULL, own);
        if warp::lane_id() == 0 {
            self.largest.fetch_max(i, largest, Block, Relaxed);
        }
    }

    /// The largest key of all blocks, and the first block that has it. By one warp.
    #[inline(always)]
    #[track_caller]
    unsafe fn largest_of_all(&self, i: u32, blocks: u32) -> (u32, u32) {
        let lane = warp::lane_id();
        let own = if lane < blocks { cluster::load_u32(cluster::map(self.largest.ptr(i), lane)) } else { 0 };
        let largest = warp::warp_reduce_max_u32(warp::FULL, own);
        (largest, warp::warp_vote_ballot(warp::FULL, own == largest).trailing_zeros())
    }

    /// Tokens and bounds of their mass of this lane's bins of a chunk, the higher one first.
    #[inline(always)]
    #[track_caller]
    unsafe fn bounds_of(&self, settings: &Settings, weights: &Weights, blocks: u32, chunk: u32) -> [Bounds; 2] {
        let counts = self.counts.of_chunk(blocks, chunk);
        let first = chunk * CHUNK + CHUNK - 1 - 2 * warp::lane_id();
        // Of the largest key of the higher bin, and of the least ones of both.
        let keys = [first << SHIFT | ((1 << SHIFT) - 1), first << SHIFT, (first - 1) << SHIFT];
        let mut w = [0; 3];
        unroll::<3>(|i| {
            // Of keys that do not occur, too, rather than one after another where they do.
            w[i] = weights.of(if keys[i] < weights.max_key { keys[i] } else { weights.max_key });
        });
        let filtered = |w: u64| if w < settings.least { 0 } else { w };
        let one = 1 << weights.bits;
        let mut bounds = [[Bin::default(); 2]; 2];
        unroll::<2>(|h| {
            let (count, most) = (counts[h], at_most(w[h]));
            let least = filtered(at_least(w[h + 1])) * count as u64;
            let most = filtered(if most < one { most } else { one });
            // The largest is there, with a weight of 1.
            let top = first - h as u32 == weights.max_key >> SHIFT;
            let least = if top { least + one - filtered(at_least(w[h + 1])) } else { least };
            bounds[h] = [Bin { count, mass: least }, Bin { count, mass: most * count as u64 }];
        });
        bounds
    }

    /// Adds up the bounds of all chunks in the first block. By all warps of the cluster, between its barriers.
    #[inline(always)]
    #[track_caller]
    unsafe fn merge(&self, job: &Job, occupied: Occupied<32>, rank: u32, blocks: u32) {
        let (settings, weights) = self.look_up(job);
        let mut n = own_index() / 32 * blocks + rank;
        while n < occupied.count() {
            let [a, b] = self.bounds_of(&settings, &weights, blocks, occupied.get(n));
            unroll::<2>(|i| self.bounds[i].put(n, [a[i], b[i]]));
            n += WARPS * blocks;
        }
    }

    /// The first bin, in descending order, with which `reached` is true of it and all above it. `groups` are those of this lane. By one warp of the first block.
    #[inline(always)]
    #[track_caller]
    unsafe fn find_end(
        &self,
        occupied: Occupied<32>,
        groups: Bounds,
        reached: impl Fn(Bounds) -> bool,
        settings: &Settings,
        weights: &Weights,
    ) -> Option<End> {
        let (lane, len) = (warp::lane_id(), occupied.count());
        let there = warp::warp_vote_ballot(warp::FULL, reached(groups));
        if there == 0 {
            return None;
        }
        let group = there.trailing_zeros();
        let before = if group > 0 { groups.map(|g| from_lane(g, group - 1)) } else { Bounds::default() };
        let i = group * 32 + lane;
        let own = and(before, self.bounds.map(|totals| totals.upto(len, if i < len { i } else { len - 1 })));
        let place = warp::warp_vote_ballot(warp::FULL, reached(own)).trailing_zeros();
        let before = if place > 0 { own.map(|o| from_lane(o, place - 1)) } else { before };
        let chunk = occupied.get(len - 1 - (group * 32 + place));
        let own = self.bounds_of(settings, weights, cluster::size(), chunk);
        let both = and(own[0], own[1]);
        let upto = and(before, [scan(both[0]), scan(both[1])]);
        let at = warp::warp_vote_ballot(warp::FULL, reached(upto)).trailing_zeros();
        let mut above = upto;
        unroll::<2>(|i| {
            above[i] = Bin { count: upto[i].count - both[i].count, mass: upto[i].mass - both[i].mass };
        });
        let (mut bin, mut end) = (chunk * CHUNK + CHUNK - 1 - 2 * lane, own[0]);
        if !reached(and(above, own[0])) {
            (above, bin, end) = (and(above, own[0]), bin - 1, own[1]);
        }
        let of = |bounds: Bounds| bounds.map(|b| from_lane(b, at));
        Some(End { bin: warp::shfl_idx(bin, at), above: of(above), own: of(end) })
    }

    /// Leaves one end of a window, and that of top-k which all compute. By four warps of the first block.
    #[inline(always)]
    #[track_caller]
    unsafe fn find_window(&self, job: &Job, occupied: Occupied<32>, warp_id: u32) {
        let (settings, weights) = self.look_up(job);
        let random = self.parameters.get(6u32);
        let groups = self.bounds.map(|totals| totals.groups());
        let mut all = groups.map(|g| from_lane(g, 31));
        let mut of_top_k = [NONE, 0];
        if settings.k < job.vocab
            && let Some(end) = self.find_end(occupied, groups, |b| b[0].count >= settings.k, &settings, &weights)
        {
            of_top_k = [end.bin, end.above[0].count];
            // Of tokens of the last bin as many as are kept.
            let count = settings.k - end.above[0].count;
            // SAFETY: a token of this bin has the position.
            core::hint::assert_unchecked(end.own[0].count != 0 && end.own[1].count != 0);
            unroll::<2>(|i| {
                let each = end.own[i].mass / end.own[i].count as u64;
                all[i] = end.above[i].and(Bin { count, mass: each * count as u64 });
            });
        }
        // The position is `share` of what is kept by top-k, and a little more.
        let (draws, upper) = (warp_id >= 2, warp_id.is_multiple_of(2));
        let (share, more) = match (draws, settings.top_p) {
            (false, top_p) => (top_p.unwrap_or(0), 0),
            (true, None) => (random, !upper as u64),
            (true, Some(top_p)) => {
                // Of what top-p keeps, which is more than asked for by less than one token.
                let share = ((top_p as u64 * random as u64) >> 32) as u32;
                if upper { (share, 0) } else { (share + 1, scaled(1 << weights.bits, random) + 1) }
            }
        };
        let target = if upper { scaled(all[0].mass, share) } else { scaled_up(all[1].mass, share) + more };
        let target = if target > 1 { target } else { 1 };
        // What is above and what is below cannot both be at their bounds for the worse: (1 - share) above >= share below.
        let reached = |b: Bounds| {
            let spread = scaled(b[1].mass - b[0].mass, share);
            (if upper { b[1].mass - spread } else { b[0].mass + spread }) >= target
        };
        let end = self.find_end(occupied, groups, reached, &settings, &weights);
        let [bin, above] = end.map_or([0, 0], |end| [end.bin, end.above[0].count]);
        let bin = if of_top_k[0] != NONE && bin < of_top_k[0] { of_top_k[0] } else { bin };
        let wanted = draws || settings.top_p.is_some();
        if warp::lane_id() == 0 {
            self.ends.set(2 * warp_id, if wanted { bin } else { NONE });
            self.ends.set(2 * warp_id + 1, above);
            if warp_id == 0 {
                unroll::<2>(|i| self.ends.set(8 + i as u32, of_top_k[i]));
            }
        }
    }

    /// Tells all blocks. By one warp of the first.
    #[inline(always)]
    #[track_caller]
    unsafe fn tell<const N: usize>(&self, words: [u32; N]) {
        let lane = warp::lane_id();
        if lane < cluster::size() {
            unroll::<N>(|i| cluster::store_u32(cluster::map(self.told.ptr(i), lane), words[i]));
        }
    }

    /// Tells the windows. By one warp of the first block.
    #[inline(always)]
    #[track_caller]
    unsafe fn tell_windows(&self) {
        let max_key = self.largest.get(2u32);
        let [p_upper, p_lower, d_upper, d_lower, k] = [0u32, 2, 4, 6, 8].map(|i| self.ends.get(i));
        // What is drawn is kept.
        let d_lower = if p_lower != NONE && d_lower < p_lower { p_lower } else { d_lower };
        let window = |lower: u32, upper: u32| {
            if upper == NONE {
                return [NO_WINDOW; 2];
            }
            let (least, largest) = (lower << SHIFT, upper << SHIFT | ((1 << SHIFT) - 1));
            [
                if least > KEY_NEG_INF { least } else { KEY_NEG_INF + 1 },
                if largest < max_key { largest } else { max_key },
            ]
        };
        let windows = [window(k, k), window(p_lower, p_upper), window(d_lower, d_upper)];
        let mut words = [LIST; LOGITS as usize + 2 * GOALS];
        unroll::<GOALS>(|g| {
            let logits = range(windows[g]);
            unroll::<2>(|i| {
                words[WINDOWS as usize + 2 * g + i] = windows[g][i];
                words[LOGITS as usize + 2 * g + i] = logits[i].to_bits();
            });
        });
        self.tell(words);
    }

    /// The least and the largest key of the window of a goal.
    #[inline(always)]
    #[track_caller]
    unsafe fn window(&self, goal: u32) -> [u32; 2] {
        [0, 1].map(|i: u32| self.told.get(WINDOWS + 2 * goal + i))
    }

    /// Adds up weights, all and those above each of the last `N` windows, and lists the tokens of windows. Sums of this thread.
    #[inline(always)]
    #[track_caller]
    unsafe fn sum_up<const N: usize, const MIN_P: bool>(
        &self,
        part: &Part<f32>,
        settings: &Settings,
        weights: &Weights,
    ) -> [u64; SUMS as usize] {
        let first = (GOALS - N) as u32;
        let mut windows = [[0.0; 2]; N];
        unroll::<N>(|g| {
            unroll::<2>(|i| {
                windows[g][i] = f32::from_bits(self.told.get(LOGITS + 2 * (first + g as u32) + i as u32));
            });
        });
        let mut sums = [0u64; SUMS as usize];
        let add = |sums: &mut [u64; SUMS as usize], word: u32| {
            let x = f32::from_bits(word);
            let w = weights.of_value(x);
            let mass = if MIN_P && w < settings.least { 0 } else { w };
            sums[0] += mass;
            unroll::<N>(|g| sums[1 + GOALS - N + g] += if x > windows[g][1] { mass } else { 0 });
        };
        // The lanes stay together.
        let note = |word: u32, index: u32| {
            let (x, lane) = (f32::from_bits(word), warp::lane_id());
            let mut inside = false;
            unroll::<N>(|g| inside |= x >= windows[g][0] && x <= windows[g][1]);
            let there = warp::warp_vote_ballot(warp::FULL, inside);
            if there != 0 {
                let (leader, before) = (there.trailing_zeros(), (there & ((1 << lane) - 1)).count_ones());
                let mut place = 0;
                if lane == leader {
                    place = self.length.fetch_add(0u32, there.count_ones(), Block, Relaxed);
                }
                let place = warp::shfl_idx(place, leader) + before;
                if inside && place < LISTED {
                    self.listed[0].set(place, key(x));
                    self.listed[1].set(place, index);
                }
            }
        };
        part.for_each_ahead(BANNED, |first, words| {
            unroll::<4>(|e| add(&mut sums, words[e]));
            // Sums are made before anybody looks for what is in windows, which does not keep what was found out for them.
            unroll::<{ GOALS + 1 }>(|i| {
                sums[i] = opaque(sums[i] as u32) as u64 | (opaque((sums[i] >> 32) as u32) as u64) << 32;
            });
            let words = words.map(opaque);
            unroll::<4>(|e| note(words[e], first + e as u32));
        });
        part.for_each_outside(BANNED, |index, word| {
            add(&mut sums, word);
            note(word, index);
        });
        sums
    }

    /// Adds up weights, all and those above each window, and lists the tokens of windows. By all threads of the cluster.
    #[inline(always)]
    #[track_caller]
    unsafe fn list(&self, job: &Job, part: &Part<f32>) {
        let (settings, weights) = self.look_up(job);
        let mut sums = match (self.told.get(WINDOWS) != NO_WINDOW, settings.least > 0) {
            (false, false) => self.sum_up::<2, false>(part, &settings, &weights),
            (false, true) => self.sum_up::<2, true>(part, &settings, &weights),
            (true, false) => self.sum_up::<3, false>(part, &settings, &weights),
            (true, true) => self.sum_up::<3, true>(part, &settings, &weights),
        };
        if settings.least > 0 && job.wants_before() {
            let mut sum = 0;
            part.for_each::<1>(BANNED, |_, [words]| {
                unroll::<4>(|e| sum += weights.of(key(f32::from_bits(words[e]))));
            });
            part.for_each_outside(BANNED, |_, word| sum += weights.of(key(f32::from_bits(word))));
            sums[SUMS as usize - 1] = sum;
        }
        let (lane, warp_id) = (warp::lane_id(), own_index() / 32);
        unroll::<{ SUMS as usize }>(|i| {
            let sum = warp_sum(sums[i]);
            if lane == 0 {
                self.of_warps.set(i as u32 * WARPS + warp_id, sum);
            }
        });
        thread::sync_threads();
        if warp_id < SUMS {
            let sum = warp_sum(self.of_warps.get(own_index()));
            if lane < 2 {
                let place = self.of_blocks.ptr(warp_id * MAX_BLOCKS + cluster::rank()).cast::<u32>();
                let place = cluster::map(place.wrapping_add(lane as usize), 0);
                cluster::store_u32(place, (sum >> (32 * lane)) as u32);
            }
        }
    }

    /// Makes the histogram of a digit of keys. By all threads of the cluster.
    #[inline(always)]
    #[track_caller]
    unsafe fn count_digit(&self, job: &Job, part: &Part<f32>) {
        self.histogram.clear(1);
        thread::sync_threads();
        let [first, last, shift] = [1u32, 2, 3].map(|i| self.told.get(i));
        let [least, largest] = range([first, last]);
        let (settings, weights) = self.look_up(job);
        let there = |word: u32| f32::from_bits(word) >= least && f32::from_bits(word) <= largest;
        let add = |word: u32| {
            let key = key(f32::from_bits(word));
            self.histogram.add((key - first) >> shift, key, mass_of(&settings, &weights, key));
        };
        part.for_each_ahead(BANNED, |_, words| {
            let mut hits = 0u32;
            unroll::<4>(|e| hits |= (there(words[e]) as u32) << e);
            while hits != 0 {
                add(select(words, hits.trailing_zeros()));
                hits &= hits - 1;
            }
            warp::sync_warp(warp::FULL);
        });
        part.for_each_outside(BANNED, |_, word| {
            if there(word) {
                add(word);
            }
        });
    }

    /// The histogram of the first digit of a window, of what is listed.
    #[inline(always)]
    #[track_caller]
    unsafe fn first(&self, goal: u32) -> Histogram {
        Histogram { words: self.counts.words.offset(ALL_LISTED + goal * (PLANES * DIGIT_BINS)) }
    }

    /// Adds up the chunks of the digit that the histograms of `blocks` blocks have; a barrier follows. By all threads of the first block.
    #[inline(always)]
    #[track_caller]
    unsafe fn add_up(&self, blocks: u32) {
        let chunk = own_index() / 32;
        if chunk < DIGIT_CHUNKS {
            if blocks > 1 {
                self.histogram.merge_chunk(blocks, chunk);
            }
            self.histogram.add_up(chunk, self.totals, chunk);
        }
    }

    /// Adds up the sums of all blocks, brings the keys that they have listed, and makes the histograms of the first digits of windows; whether there is room for all.
    /// By all threads of the first block; a barrier follows.
    #[inline(always)]
    unsafe fn gather(&self, job: &Job) -> bool {
        let (lane, warp_id, blocks) = (warp::lane_id(), own_index() / 32, cluster::size());
        if warp_id == 0 {
            let len = if lane < blocks { cluster::load_u32(cluster::map(self.length.ptr(0u32), lane)) } else { 0 };
            let longest = warp::warp_reduce_max_u32(warp::FULL, len);
            let upto = warp::scan(len, |a, b| a + b);
            let full = longest > LISTED || warp::shfl_idx(upto, 31) > ALL_LISTED;
            if lane <= MAX_BLOCKS {
                self.from.set(lane, if full { FULL } else { upto - len });
            }
        } else if warp_id <= SUMS {
            let own = if lane < blocks { self.of_blocks.get((warp_id - 1) * MAX_BLOCKS + lane) } else { 0 };
            let sum = warp_sum(own);
            if lane == 0 {
                self.sums.set(warp_id - 1, sum);
            }
        }
        self.first(0).clear(GOALS as u32);
        thread::sync_threads();
        if self.from.get(0u32) == FULL {
            return false;
        }
        let (settings, weights) = self.look_up(job);
        let mut windows = [[0; 2]; GOALS];
        unroll::<GOALS>(|g| windows[g] = self.window(g as u32));
        // Warps take turns at the blocks.
        let (block, mut i) = (warp_id % blocks, warp_id / blocks * 32 + lane);
        let (from, end) = (self.from.get(block), self.from.get(block + 1));
        while i < end - from {
            let key = cluster::load_u32(cluster::map(self.listed[0].ptr(i), block));
            self.counts.words.set(from + i, key);
            let mass = mass_of(&settings, &weights, key);
            unroll::<GOALS>(|g| {
                let [least, largest] = windows[g];
                if let Some(bin) = Digits::new(least, largest, Bin { count: 0, mass: 0 }).bin(key) {
                    self.first(g as u32).add(bin, key, mass);
                }
            });
            i += ((WARPS - 1 - block) / blocks + 1) * 32;
        }
        thread::sync_threads();
        let mut i = warp_id;
        while i < GOALS as u32 * DIGIT_CHUNKS {
            self.first(i / DIGIT_CHUNKS).add_up(i % DIGIT_CHUNKS, self.totals, i);
            i += WARPS;
        }
        true
    }

    /// The block that has number `among` of the tokens of a bin of the last digit, and its place among those there: histograms have each block's own
    /// counts, but that of the first, which has those of all. By one warp.
    #[inline(always)]
    #[track_caller]
    unsafe fn owner(&self, bin: u32, among: u32) -> (u32, u32) {
        let (lane, blocks) = (warp::lane_id(), cluster::size());
        let count = self.histogram.words.ptr(bin);
        let count = if lane < blocks { cluster::load_u32(cluster::map(count, lane)) } else { 0 };
        let others = warp::warp_reduce_add_u32(warp::FULL, if lane == 0 { 0 } else { count });
        place_among(if lane == 0 { count - others } else { count }, among)
    }
}

/// The lane that has number `among`, of which each has `count`, and which of its own that is.
#[inline(always)]
#[track_caller]
unsafe fn place_among(count: u32, among: u32) -> (u32, u32) {
    let upto = warp::scan(count, |a, b| a + b);
    let owner = warp::warp_vote_ballot(warp::FULL, among < upto).trailing_zeros();
    (owner, among - warp::shfl_idx(upto - count, owner))
}

/// The weight of a token as the filters see it: nothing below min-p.
#[inline(always)]
fn mass_of(settings: &Settings, weights: &Weights, key: u32) -> u64 {
    let w = weights.of(key);
    if w < settings.least { 0 } else { w }
}

/// The least and the largest logit whose keys are between two.
#[inline(always)]
fn range([least, largest]: [u32; 2]) -> [f32; 2] {
    // NaNs have no keys beside those of the infinities, and -0, which is below +0 as a number of bits, has none of its own.
    let largest = if largest == ZERO - 1 { largest - 1 } else { largest };
    let (lowest, highest) = (KEY_NEG_INF + 1, key(f32::INFINITY));
    [value(if least < lowest { lowest } else { least }), value(if largest > highest { highest } else { largest })]
}

/// Grid: for each row a cluster of at least [`least_blocks`](super::part::least_blocks) and up to [`MAX_BLOCKS`] blocks. `BEHIND`: see [`radix_cluster`](super::radix_cluster).
#[inline(always)]
pub unsafe fn long<const BEHIND: bool>(logits: *const f32, job: Job) {
    let shared = Block32::new();
    shared.counts.clear();
    if own_index() < 2 {
        shared.largest.set(own_index(), 0);
        shared.length.set(own_index(), 0);
    }
    begin_if::<false, BEHIND>();
    let (rank, blocks) = (cluster::rank(), cluster::size());
    // SAFETY: a cluster has a block.
    core::hint::assert_unchecked(blocks != 0);
    let row = thread::block_idx_x() / blocks;
    if job.settings(row).k <= job.quick_limit {
        // These wait as well: whoever comes next takes the end of this grid for the end of all before it.
        begin_if::<true, BEHIND>();
        return;
    }
    if own_index() == THREADS - 1 {
        job.look_up(row, shared.parameters);
    }
    let part = Part::new(job.row(logits, row));
    thread::sync_threads();
    shared.count(&part);
    let (lane, warp_id) = (warp::lane_id(), own_index() / 32);
    thread::sync_threads();
    let occupied = shared.counts.occupied();
    if lane == 0 {
        shared.occupied[0].set(warp_id, occupied);
    }
    cluster::sync();
    if warp_id == 0 {
        let occupied = of_blocks(blocks, shared.occupied[0].ptr(lane));
        shared.occupied[1].set(lane, occupied.into_iter().fold(0, |a, b| a | b));
        let (largest, _) = shared.largest_of_all(0, blocks);
        if lane == 0 {
            shared.largest.set(2u32, largest);
            let (settings, _) = Settings::looked_up(shared.parameters);
            shared.largest.set(3u32, job.weights(&settings, largest).scale.to_bits());
        }
    }
    thread::sync_threads();
    let (occupied, max_key) = (Occupied::<32>::new(shared.occupied[1].get(lane)), shared.largest.get(2u32));
    let write = |token: u32| GlobalMut::new(job.tokens).set(row, token as i32);
    let matches = |wanted: u32| {
        move |words: Words| {
            let mut hits = 0;
            unroll::<4>(|i| hits |= ((key(f32::from_bits(words[i])) == wanted) as u32) << i);
            hits
        }
    };
    if max_key <= KEY_NEG_INF {
        begin_if::<true, BEHIND>();
        // The first that is allowed.
        let mut largest = 0;
        if job.adjusted != 0 {
            part.for_each::<1>(BANNED, |_, [words]| {
                unroll::<4>(|e| largest = largest.max(key(f32::from_bits(words[e]))));
            });
            part.for_each_outside(BANNED, |_, word| largest = largest.max(key(f32::from_bits(word))));
        }
        shared.raise(1, largest);
        cluster::sync();
        let (largest, owner) = shared.largest_of_all(1, blocks);
        // Nobody leaves while others read.
        cluster::arrive_relaxed();
        if rank == 0 && warp_id == 0 {
            write_nothing(&job, row, largest == 0);
        }
        cluster::wait();
        if largest > 0 && rank == owner {
            part.find(shared.hits, 0, BANNED, matches(largest), write);
        }
        return;
    }

    shared.merge(&job, occupied, rank, blocks);
    cluster::sync();
    begin_if::<true, BEHIND>();
    if rank == 0 {
        unroll::<2>(|i| shared.bounds[i].add_up(occupied.count()));
        thread::sync_threads();
        if warp_id < 4 {
            shared.find_window(&job, occupied, warp_id);
        }
        thread::sync_threads();
        if warp_id == 0 {
            shared.tell_windows();
        }
    }
    let mut way = Way::new();
    loop {
        cluster::sync();
        let what = shared.told.get(0u32);
        if what == DONE {
            break;
        }
        if what == LIST {
            shared.list(&job, &part);
        } else {
            shared.count_digit(&job, &part);
        }
        cluster::sync();
        if rank == 0 {
            way.go_on(&shared, &job, row, what == LIST);
        }
    }
    if warp_id == 0
        && let Some(drawn) = way.drawn
    {
        let (settings, weights) = shared.look_up(&job);
        let filtered = settings.least > 0 && job.wants_before();
        let sum = shared.sums.get(if filtered { SUMS - 1 } else { 0 });
        let probs = LogProbs { weights, temperature: settings.temperature, sum, kept_mass: drawn.kept.mass };
        write_row(&job, row, drawn.bin, drawn.kept.count, &settings, &probs);
    }
    let [wanted, owner, position] = [1u32, 2, 3].map(|i| shared.told.get(i));
    if owner == WHO_LISTS {
        let mut i = own_index();
        while i < shared.length.get(0u32) {
            if shared.listed[0].get(i) == wanted {
                write(shared.listed[1].get(i));
            }
            i += THREADS;
        }
    } else if rank == owner {
        part.find(shared.hits, position, BANNED, matches(wanted), write);
    }
}

/// The way to the token, as the first block's first warp, the driver, knows it.
struct Way {
    search: Search,
    /// Whether all tokens of windows are listed.
    listed: bool,
    position: u64,
    by_mass: bool,
    /// Where the position is.
    digits: Digits,
    /// In the end.
    drawn: Option<Drawn>,
}

/// What the driver has found in a histogram: how many tokens have the position's bin, their key if they have the same one, and the bin.
type Looked = (u32, Option<u32>, u32);

impl Way {
    /// Nowhere.
    #[inline(always)]
    fn new() -> Self {
        let nothing = Bin { count: 0, mass: 0 };
        Self {
            search: Search::nothing(),
            listed: false,
            position: 0,
            by_mass: false,
            digits: Digits { least: 0, largest: 0, shift: 0, above: nothing },
            drawn: None,
        }
    }

    /// Goes on behind the list, or a digit, to what is to be done next by all blocks, and tells it. By all threads of the first block.
    #[inline(always)]
    unsafe fn go_on(&mut self, shared: &Block32, job: &Job, row: u32, mut behind_list: bool) {
        let driver = own_index() < 32;
        if behind_list {
            self.listed = shared.gather(job);
        } else {
            shared.add_up(cluster::size());
        }
        thread::sync_threads();
        loop {
            if driver {
                self.drive(shared, job, behind_list);
                behind_list = false;
            }
            thread::sync_threads();
            let [task, least, largest, shift] = [0u32, 1, 2, 3].map(|i| shared.task.get(i));
            let tokens = shared.from.get(MAX_BLOCKS);
            if task == NOTHING {
                return;
            }
            if task == RANK {
                let (key, equals) = (least, largest);
                shared.count_equals(key, equals, tokens);
                thread::sync_threads();
                if let Some(drawn) = self.drawn {
                    shared.rank_equals(job, row, drawn, equals);
                }
                return;
            }
            let digits = Digits { least, largest, shift, above: Bin { count: 0, mass: 0 } };
            shared.histogram.clear(1);
            thread::sync_threads();
            let (settings, weights) = shared.look_up(job);
            let mut i = own_index();
            while i < tokens {
                let key = shared.counts.words.get(i);
                if let Some(bin) = digits.bin(key) {
                    shared.histogram.add(bin, key, mass_of(&settings, &weights, key));
                }
                i += THREADS;
            }
            thread::sync_threads();
            shared.add_up(1);
            thread::sync_threads();
        }
    }

    /// Goes on until others have to do something: leaves a task for this block, or tells all.
    #[inline(always)]
    unsafe fn drive(&mut self, shared: &Block32, job: &Job, behind_list: bool) {
        let (settings, weights) = shared.look_up(job);
        let mut looked = None;
        if behind_list {
            let count = shared.bounds[0].total();
            self.search = Search::new(job, &settings, Bin { count, mass: shared.sums.get(0u32) });
            self.begin(shared, &settings, count);
        } else {
            looked = self.look(shared, shared.histogram, 0);
        }
        let mut begun = behind_list;
        let mut task = [NOTHING, 0, 0, 0];
        loop {
            if begun && self.listed {
                let goal = self.search.goal();
                looked = self.look(shared, shared.first(goal), goal * DIGIT_CHUNKS);
            }
            let Digits { least, largest, shift, .. } = self.digits;
            match looked {
                Some((equals, Some(key), bin)) => {
                    let found = Found { bin: key, above: self.digits.above };
                    self.drawn = self.search.reached(&settings, Some((found, weights.of(key))));
                    if let Some(drawn) = &mut self.drawn {
                        let mut owner = WHO_LISTS;
                        if !self.listed {
                            (owner, drawn.among) = shared.owner(bin, drawn.among);
                        } else if equals > 1 {
                            task = [RANK, key, equals, 0];
                            break;
                        }
                        shared.tell([DONE, key, owner, drawn.among]);
                        break;
                    }
                    self.begin(shared, &settings, u32::MAX);
                    (looked, begun) = (None, true);
                    continue;
                }
                Some(_) if self.listed => {
                    task = [REFINE, least, largest, shift];
                    break;
                }
                Some(_) => {}
                // Behind a list without room; or else the position is in no window, which should not be.
                None if begun && !self.listed => {}
                None => {
                    self.listed = false;
                    self.digits = everywhere(shared);
                }
            }
            let Digits { least, largest, shift, .. } = self.digits;
            shared.tell([HISTOGRAM, least, largest, shift]);
            break;
        }
        if warp::lane_id() == 0 {
            unroll::<4>(|i| shared.task.set(i as u32, task[i]));
        }
    }

    /// Begins with the next goal, of `count` tokens.
    #[inline(always)]
    #[track_caller]
    unsafe fn begin(&mut self, shared: &Block32, settings: &Settings, count: u32) {
        let random = shared.parameters.get(6u32);
        (self.position, self.by_mass) = self.search.next(settings, random);
        if !self.by_mass && self.position >= count as u64 {
            // Top-k keeps all.
            self.search.reached(settings, None);
            (self.position, self.by_mass) = self.search.next(settings, random);
        }
        let goal = self.search.goal();
        let [least, largest] = shared.window(goal);
        let count = shared.ends.get(match goal {
            TOP_K => 9u32,
            TOP_P => 1,
            _ => 5,
        });
        self.digits = Digits::new(least, largest, Bin { count, mass: shared.sums.get(1 + goal) });
    }

    /// Goes into the bin at the position, if the histogram has it.
    #[inline(always)]
    unsafe fn look(&mut self, shared: &Block32, histogram: Histogram, totals: u32) -> Option<Looked> {
        let position = self.position.checked_sub(self.digits.above.len(self.by_mass))?;
        let found = histogram.find(shared.totals, totals, position, self.by_mass)?;
        self.digits = self.digits.within(found.bin, self.digits.above.and(found.above));
        let (count, key) = histogram.bucket(found.bin);
        Some((count, key, found.bin))
    }
}

/// All that can be drawn.
#[inline(always)]
#[track_caller]
unsafe fn everywhere(shared: &Block32) -> Digits {
    Digits::new(KEY_NEG_INF + 1, shared.largest.get(2u32), Bin { count: 0, mass: 0 })
}

impl Block32 {
    /// Finds the listed tokens of a key, of which there are `equals`: few by their indices, many by how many each block has. By all threads of the first block; a barrier follows.
    #[inline(always)]
    unsafe fn count_equals(&self, key: u32, equals: u32, tokens: u32) {
        if own_index() < MAX_BLOCKS {
            self.equals.set(own_index(), 0);
        }
        if own_index() == 0 {
            self.length.set(1u32, 0);
        }
        thread::sync_threads();
        let mut i = own_index();
        while i < tokens {
            if self.counts.words.get(i) == key {
                let mut block = 0;
                unroll::<{ MAX_BLOCKS as usize - 1 }>(|b| block += (i >= self.from.get(b as u32 + 1)) as u32);
                if equals > EQUALS {
                    self.equals.fetch_add(block, 1, Block, Relaxed);
                } else {
                    let index = self.listed[1].ptr(i - self.from.get(block));
                    let index = cluster::load_u32(cluster::map(index, block));
                    self.equals.set(self.length.fetch_add(1u32, 1, Block, Relaxed), index);
                }
            }
            i += THREADS;
        }
    }

    /// Writes the one of them that is drawn, or tells the block that has it to do so. By the first warp.
    #[inline(always)]
    unsafe fn rank_equals(&self, job: &Job, row: u32, drawn: Drawn, equals: u32) {
        let lane = warp::lane_id();
        let (mut owner, mut among) = (NOBODY, drawn.among);
        if equals > EQUALS {
            (owner, among) = place_among(if lane < MAX_BLOCKS { self.equals.get(lane) } else { 0 }, among);
        } else {
            let mut before = 0;
            let mut i = 0;
            while i < equals {
                before += (lane < equals && self.equals.get(i) < self.equals.get(lane)) as u32;
                i += 1;
            }
            if lane < equals && before == among {
                GlobalMut::new(job.tokens).set(row, self.equals.get(lane) as i32);
            }
        }
        self.tell([DONE, drawn.bin, owner, among]);
    }
}

/// Vectors that are counted at once.
const AT_ONCE: usize = 4;

/// Word `i` of a vector in registers.
#[inline(always)]
fn select([a, b, c, d]: Words, i: u32) -> u32 {
    // Of values: the compiler would choose an address otherwise.
    let [a, b, c, d] = [a, b, c, d].map(opaque);
    let either = |bit: u32, [a, b]: [u32; 2]| if i & bit != 0 { b } else { a };
    either(2, [either(1, [a, b]), either(1, [c, d])])
}
