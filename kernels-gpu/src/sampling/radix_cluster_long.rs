//! [`radix_cluster`](super::radix_cluster) of f32.
//!
//! A histogram of the first digit, counts and masses, is made once; what its bins have in all blocks is added up in the first. From then on a warp of the first
//! block drives: it looks for the first digit of a position, tells the others to list the tokens that have it, and searches those by
//! histograms of the second digit and the third. They are few, or else (flat rows have thousands of a key) the blocks make these histograms themselves.

use super::job::{Job, LogProbs, PARAMETERS, Settings};
use super::logit::Words;
use super::part::{COUNTS, MAX_BLOCKS, Part, THREADS, WARPS};
use super::radix_cluster::{Drawn, Search, leave_sum, of_blocks, sum_of, write_nothing, write_row};
use super::top_k::own_index;
use super::totals::{self, Bin, CHUNK, Found, Occupied, Totals, find_in, from_lane, get, scan, set, warp_sum};
use super::weights::{BANNED, KEY_NEG_INF, Weights, key, value};
use cuda_std::atomic::{Block, Relaxed};
use cuda_std::shared::Carver;
use cuda_std::vec::B128;
use cuda_std::{GlobalMut, Shared, cluster, dependent_launch, float, thread, unroll, warp};

/// Bits of the first digit: sign, exponent, and four of the mantissa.
const FIRST: u32 = 13;
/// Bits of the others.
const SECOND: u32 = 10;
const THIRD: u32 = 32 - FIRST - SECOND;
const FIRST_BINS: u32 = 1 << FIRST;
const FURTHER_BINS: u32 = 1 << SECOND;
const FIRST_CHUNKS: u32 = FIRST_BINS / CHUNK;
const FURTHER_CHUNKS: u32 = FURTHER_BINS / CHUNK;

/// Tokens of each bin, then the lower words of their masses, then the higher ones.
#[derive(Clone, Copy)]
struct Histogram<const BINS: u32> {
    words: Shared<u32>,
}

impl<const BINS: u32> Histogram<BINS> {
    #[inline(always)]
    unsafe fn new(carver: &mut Carver) -> Self {
        Self { words: carver.take(3 * BINS as usize) }
    }

    /// By all threads.
    #[inline(always)]
    #[track_caller]
    unsafe fn clear(&self) {
        let mut i = 4 * own_index();
        while i < 3 * BINS {
            self.words.set_as(i, B128([0u32; 4]));
            i += 4 * THREADS;
        }
    }

    /// Adds a mass, and a count if there is one.
    #[inline(always)]
    #[track_caller]
    unsafe fn add(&self, bin: u32, own: Bin) {
        // One address, and constants.
        let words = self.words.offset(bin);
        if own.count != 0 {
            words.fetch_add(0u32, own.count, Block, Relaxed);
        }
        let (low, mut high) = (own.mass as u32, (own.mass >> 32) as u32);
        if low != 0 {
            high += words.fetch_add(BINS, low, Block, Relaxed).overflowing_add(low).1 as u32;
        }
        if high != 0 {
            words.fetch_add(2 * BINS, high, Block, Relaxed);
        }
    }

    /// Tokens of a bin.
    #[inline(always)]
    #[track_caller]
    unsafe fn count(&self, bin: u32) -> u32 {
        self.words.get(bin)
    }

    /// This lane's bins of a chunk, the higher one first: those of all blocks.
    #[inline(always)]
    #[track_caller]
    unsafe fn of_chunk(&self, blocks: u32, chunk: u32) -> [Bin; 2] {
        /// Blocks whose loads are under way before the first is waited for.
        const AT_ONCE: u32 = 4;
        let first = chunk * CHUNK + CHUNK - 1 - 2 * warp::lane_id();
        let mut bins = [Bin::default(); 2];
        let mut block = 0;
        while block < blocks {
            let mut words = [[[0; 3]; 2]; AT_ONCE as usize];
            unroll::<{ AT_ONCE as usize }>(|b| {
                if block + (b as u32) < blocks {
                    unroll::<2>(|h| {
                        unroll::<3>(|w| {
                            let word = self.words.ptr(w as u32 * BINS + first - h as u32);
                            let place = cluster::map(word, block + b as u32);
                            words[b][h][w] = cluster::load_u32(place);
                        });
                    });
                }
            });
            unroll::<{ AT_ONCE as usize }>(|b| {
                unroll::<2>(|h| {
                    let [count, low, high] = words[b][h];
                    bins[h] = bins[h].and(Bin { count, mass: low as u64 | (high as u64) << 32 });
                });
            });
            block += AT_ONCE;
        }
        bins
    }

    /// Leaves this lane's bins of a chunk in the first block.
    #[inline(always)]
    #[track_caller]
    unsafe fn put(&self, chunk: u32, bins: [Bin; 2]) {
        let first = chunk * CHUNK + CHUNK - 1 - 2 * warp::lane_id();
        unroll::<2>(|h| {
            let words = [bins[h].count, bins[h].mass as u32, (bins[h].mass >> 32) as u32];
            unroll::<3>(|w| {
                cluster::store_u32(cluster::map(self.words.ptr(w as u32 * BINS + first - h as u32), 0), words[w]);
            });
        });
    }

    /// The same, in this block.
    #[inline(always)]
    #[track_caller]
    unsafe fn own_of_chunk(&self, chunk: u32) -> [Bin; 2] {
        let first = chunk * CHUNK + CHUNK - 1 - 2 * warp::lane_id();
        [first, first - 1].map(|bin| {
            let [count, low, high] = [0, 1, 2].map(|w: u32| self.words.get(w * BINS + bin));
            Bin { count, mass: low as u64 | (high as u64) << 32 }
        })
    }
}

/// Shared memory of a block.
#[derive(Clone, Copy)]
struct Block32 {
    /// Of the first digit: this block's.
    first: Histogram<FIRST_BINS>,
    /// All blocks', in the first block, of chunks that are not empty.
    merged: Histogram<FIRST_BINS>,
    /// Of each warp, a bit for each of its chunks of the first digit in which there is anything; and the same of all blocks.
    occupied: [Shared<u32>; 2],
    /// Of a further digit, by turns. In the first block that of all blocks in the end.
    further: [Histogram<FURTHER_BINS>; 2],
    /// How many tokens are listed, by turns; in the first block then, where those of each block begin among all, or [`FULL`].
    lengths: Shared<u32>,
    totals: Totals,
    /// Of chunks of a further digit.
    further_totals: [Shared<u32>; 3],
    /// The largest key of this block, that of what is allowed where there is none above -inf, and the largest of all blocks.
    largest: Shared<u32>,
    /// In the first block, of each warp of the cluster: the sum of all weights, by words, if masses are others.
    sums: Shared<u32>,
    /// What the first block tells the others: see [`TOLD`].
    told: Shared<u32>,
    parameters: Shared<u32>,
    /// Of the first block's search among what is listed: the digits that are known, how many tokens have them (0 if no token is drawn yet), how many of those have been collected, and the key of the only one.
    local: Shared<u32>,
    /// Indices of tokens of the key that is drawn, or of many how many each block has.
    equals: Shared<u32>,
    hits: Shared<u32>,
}

/// Words of [`Block32::sums`].
const SUMS: u32 = 2 * WARPS * MAX_BLOCKS;

/// Words of [`Block32::told`]: what is to be done; the digits that are known; then, once that is all, the block that has the token, and which of those of that key it is.
const TOLD: u32 = 4;
/// Nothing more.
const DONE: u32 = 0;
/// To list what has the first digit.
const LIST: u32 = 1;
/// To make a histogram of the second digit, or of the third.
const SECOND_DIGIT: u32 = 2;
const THIRD_DIGIT: u32 = 3;
/// No block, as the token is known.
const NOBODY: u32 = u32::MAX;

/// Instead of a list's length, where there is no room for all.
const FULL: u32 = u32::MAX;
/// Tokens of a list.
const LISTED: u32 = THREADS;
/// Of tokens of one key that are ranked by comparing them.
const EQUALS: u32 = 32;
/// Chunks of the first digit that a warp looks at.
const EACH: u32 = FIRST_CHUNKS / WARPS;

/// Bytes of shared memory.
pub const SHARED_BYTES: usize = 12 * (2 * FIRST_BINS + 2 * FURTHER_BINS + FURTHER_CHUNKS) as usize
    + 4 * (2 * WARPS + 12 + EQUALS + 4) as usize
    + totals::bytes(FIRST_CHUNKS)
    + 4 * (4 + SUMS + TOLD) as usize
    + 4 * (PARAMETERS + COUNTS);

impl Block32 {
    #[inline(always)]
    unsafe fn new() -> Self {
        let mut carver = Carver::new();
        Self {
            first: Histogram::new(&mut carver),
            merged: Histogram::new(&mut carver),
            occupied: [carver.take(WARPS as usize), carver.take(WARPS as usize)],
            further: [Histogram::new(&mut carver), Histogram::new(&mut carver)],
            lengths: carver.take(12),
            totals: Totals::new(&mut carver, FIRST_CHUNKS),
            further_totals: [0; 3].map(|_| carver.take(FURTHER_CHUNKS as usize)),
            largest: carver.take(4),
            sums: carver.take(SUMS as usize),
            told: carver.take(TOLD as usize),
            parameters: carver.take(PARAMETERS),
            local: carver.take(4),
            equals: carver.take(EQUALS as usize),
            hits: carver.take(COUNTS),
        }
    }

    /// Tokens of a first digit, keys and indices; then, in the first block, the keys of all blocks: where the histogram of that digit was, which is merged by then. There may be more tokens than there is room for.
    #[inline(always)]
    #[track_caller]
    unsafe fn listed(&self) -> [Shared<u32>; 3] {
        const { assert!(MAX_BLOCKS * LISTED <= FIRST_BINS) };
        [0, FIRST_BINS, 2 * FIRST_BINS].map(|i| self.first.words.offset(i))
    }

    /// Tells all blocks.
    #[inline(always)]
    #[track_caller]
    unsafe fn tell(&self, blocks: u32, words: [u32; TOLD as usize]) {
        let lane = warp::lane_id();
        if lane < blocks {
            unroll::<{ TOLD as usize }>(|i| {
                cluster::store_u32(cluster::map(self.told.ptr(i), lane), words[i]);
            });
        }
    }

    /// What the first block has told to be done, which is done then: a list, or a histogram, which take turns. By all threads of the cluster.
    #[inline(always)]
    unsafe fn pass(&self, job: &Job, part: &Part<f32>, turn: u32) -> u32 {
        cluster::sync();
        let [what, prefix] = [0u32, 1].map(|i| self.told.get(i));
        if what == DONE {
            return DONE;
        }
        let histogram = self.turn(turn);
        self.turn(turn + 1).clear();
        if own_index() == 0 {
            self.lengths.set((turn + 1) % 2, 0);
        }
        let (settings, weights) = self.look_up(job);
        let high = if what == THIRD_DIGIT { THIRD } else { 32 - FIRST };
        let [least, most] = range(prefix, high);
        let there = |word: u32| f32::from_bits(word) >= least && f32::from_bits(word) <= most;
        let add = |x: f32, index: u32| {
            let key = key(x);
            if what == LIST {
                let place = self.lengths.fetch_add(turn % 2, 1, Block, Relaxed);
                if place < LISTED {
                    self.listed()[0].set(place, key);
                    self.listed()[1].set(place, index);
                }
            } else {
                histogram.add(further_bin(what, key), mass_of(&settings, &weights, key));
            }
        };
        part.for_each::<AT_ONCE>(BANNED, |first, vectors| {
            // Few are there.
            let mut hits = 0u32;
            unroll::<AT_ONCE>(|i| unroll::<4>(|e| hits |= (there(vectors[i][e]) as u32) << (4 * i + e)));
            while hits != 0 {
                let bit = hits.trailing_zeros();
                add(f32::from_bits(select(&vectors, bit)), first + bit / 4 * 128 + bit % 4);
                hits &= hits - 1;
            }
        });
        part.for_each_outside(BANNED, |index, word| {
            if there(word) {
                add(f32::from_bits(word), index);
            }
        });
        cluster::sync();
        what
    }

    /// Looked up again rather than kept in registers all the time.
    #[inline(always)]
    #[track_caller]
    unsafe fn look_up(&self, job: &Job) -> (Settings, Weights) {
        let (settings, _) = Settings::looked_up(self.parameters);
        (settings, job.weights(&settings, self.largest.get(2u32)))
    }

    /// Adds up the chunks of a further digit, of this block or of all. By all threads of the first block, between barriers.
    #[inline(always)]
    #[track_caller]
    unsafe fn add_up(&self, histogram: Histogram<FURTHER_BINS>, blocks: u32) {
        let chunk = own_index() / 32;
        if chunk < FURTHER_CHUNKS {
            let bins = if blocks > 1 {
                let bins = histogram.of_chunk(blocks, chunk);
                // Each lane its own.
                histogram.put(chunk, bins);
                bins
            } else {
                histogram.own_of_chunk(chunk)
            };
            let both = bins[0].and(bins[1]);
            let total = Bin { count: warp::warp_reduce_add_u32(warp::FULL, both.count), mass: warp_sum(both.mass) };
            if warp::lane_id() == 0 {
                set(self.further_totals, chunk, total);
            }
        }
    }

    /// The histogram whose turn it is.
    #[inline(always)]
    fn turn(&self, turn: u32) -> Histogram<FURTHER_BINS> {
        if turn.is_multiple_of(2) { self.further[0] } else { self.further[1] }
    }

    /// The bin at `position` of a further digit, where there is one. By one warp of the first block, after [`add_up`](Self::add_up) and a barrier.
    #[inline(always)]
    #[track_caller]
    unsafe fn find(&self, histogram: Histogram<FURTHER_BINS>, position: u64, by_mass: bool) -> Found {
        let lane = warp::lane_id();
        let own =
            if lane < FURTHER_CHUNKS { get(self.further_totals, FURTHER_CHUNKS - 1 - lane) } else { Bin::default() };
        let upto = scan(own);
        let place = warp::warp_vote_ballot(warp::FULL, position < upto.len(by_mass)).trailing_zeros();
        let before = if place > 0 { from_lane(upto, place - 1) } else { Bin::default() };
        let chunk = FURTHER_CHUNKS - 1 - place;
        find_in(chunk, before, histogram.own_of_chunk(chunk), position, by_mass)
    }
}

/// Bin of a key in the histogram of a further digit.
#[inline(always)]
fn further_bin(digit: u32, key: u32) -> u32 {
    if digit == SECOND_DIGIT { key >> THIRD & (FURTHER_BINS - 1) } else { key & ((1 << THIRD) - 1) }
}

/// A token of this key, and its weight as the filters see it: nothing below min-p.
#[inline(always)]
fn mass_of(settings: &Settings, weights: &Weights, key: u32) -> Bin {
    let w = weights.of(key);
    Bin { count: 1, mass: if w < settings.least { 0 } else { w } }
}

/// The least and the largest logit whose keys begin with `prefix`, which stands above bit `shift`.
#[inline(always)]
fn range(prefix: u32, shift: u32) -> [f32; 2] {
    let (least, most) = (prefix << shift, prefix << shift | ((1 << shift) - 1));
    // NaNs have no keys beside those of the infinities, and -0, which is below +0 as a number of bits, has none of its own.
    let most = if most == ZERO - 1 { most - 1 } else { most };
    let (lowest, highest) = (KEY_NEG_INF + 1, key(f32::INFINITY));
    [value(if least < lowest { lowest } else { least }), value(if most > highest { highest } else { most })]
}

/// Key of 0.
const ZERO: u32 = 1 << 31;

/// Grid: for each row a cluster of up to [`MAX_BLOCKS`] blocks.
#[inline(always)]
pub unsafe fn long(logits: *const f32, job: Job) {
    let shared = Block32::new();
    shared.first.clear();
    shared.further[0].clear();
    if own_index() < 2 {
        shared.largest.set(own_index(), 0);
        shared.lengths.set(own_index(), 0);
    }
    dependent_launch::begin();
    let (rank, blocks) = (cluster::rank(), cluster::size());
    // SAFETY: a cluster has a block.
    core::hint::assert_unchecked(blocks != 0);
    let row = thread::block_idx_x() / blocks;
    if job.settings(row).k <= job.quick_limit {
        return;
    }
    if own_index() == THREADS - 1 {
        job.look_up(row, shared.parameters);
    }
    let part = Part::new(job.row(logits, row));
    thread::sync_threads();
    let mut largest = f32::NEG_INFINITY;
    part.for_each::<AT_ONCE>(BANNED, |_, vectors| {
        unroll::<AT_ONCE>(|i| unroll::<4>(|e| largest = float::max(largest, f32::from_bits(vectors[i][e]))));
    });
    part.for_each_outside(BANNED, |_, word| largest = float::max(largest, f32::from_bits(word)));
    shared.raise(0, key(largest));
    cluster::sync();
    let (max_key, _) = shared.largest_of_all(0, blocks);

    let warp_id = own_index() / 32;
    let write = |token: u32| GlobalMut::new(job.tokens).set(row, token as i32);
    let matches = |wanted: u32| {
        move |words: Words| {
            let mut hits = 0;
            unroll::<4>(|i| hits |= ((key(f32::from_bits(words[i])) == wanted) as u32) << i);
            hits
        }
    };
    if max_key <= KEY_NEG_INF {
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

    let (settings, _) = Settings::looked_up(shared.parameters);
    shared.count_first(&job, &settings, &part, max_key);
    if own_index() == 0 {
        shared.largest.set(2u32, max_key);
    }
    thread::sync_threads();
    shared.close();
    cluster::sync();
    if warp_id == 0 {
        let occupied = of_blocks(blocks, shared.occupied[0].ptr(own_index()));
        shared.occupied[1].set(own_index(), occupied.into_iter().fold(0, |a, b| a | b));
    }
    thread::sync_threads();
    let occupied = Occupied::<EACH>::new(shared.occupied[1].get(own_index() % 32));
    shared.merge(occupied, rank, blocks);
    cluster::sync();
    if rank == 0 {
        shared.totals.add_up(occupied.count());
        thread::sync_threads();
    }

    let driver = rank == 0 && warp_id == 0;
    let mut way = Way::new(&shared, &job, &settings, driver);
    let mut turn = 0;
    loop {
        if driver {
            way.tell_next(&shared, &job, occupied, turn);
        }
        let done = shared.pass(&job, &part, turn);
        if done == DONE {
            break;
        }
        if rank == 0 && done == LIST {
            way.search_list(&shared, &job, row, turn, driver);
        } else if rank == 0 {
            shared.add_up(shared.turn(turn), blocks);
            thread::sync_threads();
        }
        turn += 1;
    }
    if let Some(drawn) = way.drawn {
        let (settings, weights) = shared.look_up(&job);
        let filtered = settings.least > 0 && job.wants_before();
        let sum = if filtered { sum_of(shared.sums, blocks * WARPS) } else { from_lane(way.groups, 31).mass };
        let probs = LogProbs { weights, temperature: settings.temperature, sum, kept_mass: drawn.kept.mass };
        write_row(&job, row, drawn.bin, drawn.kept.count, &settings, &probs);
    }
    let [wanted, owner, position] = [1u32, 2, 3].map(|i| shared.told.get(i));
    if rank == owner {
        part.find(shared.hits, position, BANNED, matches(wanted), write);
    }
}

/// What the first block's first warp, the driver, knows of the way to the token.
struct Way {
    search: Search,
    /// Tokens and mass of this lane's group of chunks of the first digit, and those before it.
    groups: Bin,
    /// What the blocks were told.
    what: u32,
    position: u64,
    by_mass: bool,
    /// The digits that are known, and what is above them.
    found: Found,
    /// Whether a list has no room for all.
    full: bool,
    /// In the end, and the block that has it, if the token is not known yet.
    drawn: Option<Drawn>,
    owner: u32,
}

impl Way {
    /// Before the first goal. Nothing is known where not by the driver.
    #[inline(always)]
    #[track_caller]
    unsafe fn new(shared: &Block32, job: &Job, settings: &Settings, driver: bool) -> Self {
        let groups = if driver { shared.totals.groups() } else { Bin::default() };
        Self {
            search: Search::new(job, settings, from_lane(groups, 31)),
            groups,
            what: DONE,
            position: 0,
            by_mass: false,
            found: Found { bin: 0, above: Bin::default() },
            full: false,
            drawn: None,
            owner: NOBODY,
        }
    }

    /// Goes on to what is to be done next, and tells it. By the driver; `turn` passes are done.
    #[inline(always)]
    #[track_caller]
    unsafe fn tell_next(&mut self, shared: &Block32, job: &Job, occupied: Occupied<EACH>, turn: u32) {
        let blocks = cluster::size();
        let (settings, weights) = shared.look_up(job);
        let mut what = self.what;
        if what == LIST && self.full {
            what = SECOND_DIGIT;
        } else if what == SECOND_DIGIT || what == THIRD_DIGIT {
            let next = shared.find(shared.turn(turn - 1), self.left(), self.by_mass);
            self.found = self.found.and(next, if what == SECOND_DIGIT { SECOND } else { THIRD });
            if what == THIRD_DIGIT {
                self.drawn = self.search.reached(&settings, Some((self.found, weights.of(self.found.bin))));
                if let Some(drawn) = &mut self.drawn {
                    (self.owner, drawn.among) = shared.owner(blocks, turn - 1, *drawn);
                }
            }
            what = if what == SECOND_DIGIT { THIRD_DIGIT } else { DONE };
        } else {
            what = DONE;
        }
        while what == DONE && self.drawn.is_none() {
            (self.position, self.by_mass) = self.search.next(&settings, shared.parameters.get(6u32));
            let bins = |chunk: u32| shared.merged.own_of_chunk(chunk);
            let chunk = |n: u32| occupied.get(n);
            let (position, by_mass) = (self.position, self.by_mass);
            match shared.totals.find(occupied.count(), self.groups, position, by_mass, chunk, bins) {
                Some(first) => (self.found, what) = (first, LIST),
                None => {
                    self.search.reached(&settings, None);
                }
            }
        }
        self.what = what;
        shared.tell(blocks, [what, self.found.bin, self.owner, self.drawn.map_or(0, |drawn| drawn.among)]);
    }

    /// The position among those that have the digits that are known.
    #[inline(always)]
    fn left(&self) -> u64 {
        self.position - self.found.above.len(self.by_mass)
    }

    /// Searches the lists of all blocks, if they have room for all, and writes the token if it is drawn among few of the same key. By all threads of the first block.
    #[inline(always)]
    #[track_caller]
    unsafe fn search_list(&mut self, shared: &Block32, job: &Job, row: u32, turn: u32, driver: bool) {
        const BLOCKS: usize = MAX_BLOCKS as usize;
        if own_index() < 32 {
            let (lane, lengths) = (own_index(), shared.lengths.ptr(turn % 2));
            let len = if lane < cluster::size() { cluster::load_u32(cluster::map(lengths, lane)) } else { 0 };
            self.full = warp::warp_vote_any(warp::FULL, len > LISTED);
            let from = warp::scan(len, |a, b| a + b) - len;
            if lane <= MAX_BLOCKS {
                shared.lengths.set(2 + lane, if self.full { FULL } else { from });
            }
        }
        // The next pass may need them as well.
        shared.further[0].clear();
        shared.further[1].clear();
        thread::sync_threads();
        if shared.lengths.get(2u32) == FULL {
            return;
        }

        // An entry of each block a thread.
        let [block_keys, block_indices, keys] = shared.listed();
        let from = |block: u32| shared.lengths.get(2 + block);
        let tokens = from(MAX_BLOCKS);
        unroll::<BLOCKS>(|b| {
            if own_index() < from(b as u32 + 1) - from(b as u32) {
                let key = cluster::load_u32(cluster::map(block_keys.ptr(own_index()), b as u32));
                keys.set(from(b as u32) + own_index(), key);
            }
        });
        thread::sync_threads();
        let (mut digit, mut known) = (SECOND_DIGIT, shared.told.get(1u32));
        while digit <= THIRD_DIGIT {
            let histogram = shared.turn(digit);
            let (high, bits) = if digit == SECOND_DIGIT { (32 - FIRST, SECOND) } else { (THIRD, THIRD) };
            let (settings, weights) = shared.look_up(job);
            let mut i = own_index();
            while i < tokens {
                let key = keys.get(i);
                if key >> high == known {
                    histogram.add(further_bin(digit, key), mass_of(&settings, &weights, key));
                }
                i += THREADS;
            }
            thread::sync_threads();
            shared.add_up(histogram, 1);
            thread::sync_threads();
            if driver {
                let next = shared.find(histogram, self.left(), self.by_mass);
                self.found = self.found.and(next, bits);
                let words = [self.found.bin, histogram.count(next.bin), 0];
                if own_index() == 0 {
                    unroll::<3>(|i| shared.local.set(i as u32, words[i]));
                }
            }
            thread::sync_threads();
            known = shared.local.get(0u32);
            if digit == SECOND_DIGIT && shared.local.get(1u32) == 1 {
                // The only one has it.
                let mut i = own_index();
                while i < tokens {
                    if keys.get(i) >> THIRD == known {
                        shared.local.set(3u32, keys.get(i));
                    }
                    i += THREADS;
                }
                thread::sync_threads();
                known = shared.local.get(3u32);
                break;
            }
            digit += 1;
        }
        if driver {
            let (settings, weights) = shared.look_up(job);
            self.found.bin = known;
            self.drawn = self.search.reached(&settings, Some((self.found, weights.of(known))));
            if self.drawn.is_none() && own_index() == 0 {
                shared.local.set(1u32, 0);
            }
        }
        if own_index() < MAX_BLOCKS {
            shared.equals.set(own_index(), 0);
        }
        thread::sync_threads();
        let equals = shared.local.get(1u32);
        let mut i = own_index();
        while equals > 0 && i < tokens {
            if keys.get(i) == known {
                let mut block = 0;
                unroll::<{ BLOCKS - 1 }>(|b| block += (i >= from(b as u32 + 1)) as u32);
                if equals > EQUALS {
                    shared.equals.fetch_add(block, 1, Block, Relaxed);
                } else {
                    let index = cluster::load_u32(cluster::map(block_indices.ptr(i - from(block)), block));
                    shared.equals.set(shared.local.fetch_add(2u32, 1, Block, Relaxed), index);
                }
            }
            i += THREADS;
        }
        thread::sync_threads();
        if equals > EQUALS {
            // Their block looks for it.
            if let Some(drawn) = &mut self.drawn {
                let lane = own_index();
                let here = if lane < MAX_BLOCKS { shared.equals.get(lane) } else { 0 };
                let upto = warp::scan(here, |a, b| a + b);
                self.owner = warp::warp_vote_ballot(warp::FULL, drawn.among < upto).trailing_zeros();
                drawn.among -= warp::shfl_idx(upto - here, self.owner);
            }
        } else if equals > 0
            && let Some(drawn) = self.drawn
        {
            let (lane, mut before) = (own_index(), 0);
            let mut i = 0;
            while i < equals {
                before += (lane < equals && shared.equals.get(i) < shared.equals.get(lane)) as u32;
                i += 1;
            }
            if lane < equals && before == drawn.among {
                GlobalMut::new(job.tokens).set(row, shared.equals.get(lane) as i32);
            }
        }
    }
}

/// Vectors that are read at once.
const AT_ONCE: usize = 4;

/// Word `i` of some vectors in registers.
#[inline(always)]
fn select(vectors: &[Words; AT_ONCE], i: u32) -> u32 {
    let either = |bit: u32, [a, b]: [u32; 2]| if i & bit != 0 { b } else { a };
    let of_vector = |v: Words| either(2, [either(1, [v[0], v[1]]), either(1, [v[2], v[3]])]);
    let [a, b, c, d] = vectors.map(of_vector);
    either(8, [either(4, [a, b]), either(4, [c, d])])
}

impl Block32 {
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

    /// The block that has what was drawn, and its place among the tokens of that key there: the histogram of the last digit has its own counts in
    /// each block, but for the first, which has those of all.
    #[inline(always)]
    #[track_caller]
    unsafe fn owner(&self, blocks: u32, turn: u32, drawn: Drawn) -> (u32, u32) {
        let lane = warp::lane_id();
        let count = self.turn(turn).words.ptr(drawn.bin & ((1 << THIRD) - 1));
        let count = if lane < blocks { cluster::load_u32(cluster::map(count, lane)) } else { 0 };
        let others = warp::warp_reduce_add_u32(warp::FULL, if lane == 0 { 0 } else { count });
        let count = if lane == 0 { count - others } else { count };
        let upto = warp::scan(count, |a, b| a + b);
        let owner = warp::warp_vote_ballot(warp::FULL, drawn.among < upto).trailing_zeros();
        (owner, drawn.among - warp::shfl_idx(upto - count, owner))
    }

    /// The histogram of the first digit, and the sum of all weights if that is wanted. By all threads.
    #[inline(always)]
    #[track_caller]
    unsafe fn count_first(&self, job: &Job, settings: &Settings, part: &Part<f32>, max_key: u32) {
        let weights = job.weights(settings, max_key);
        let counts = settings.k < job.vocab || job.top_n > 0;
        let add = |word: u32, tokens: u32| {
            let x = f32::from_bits(word);
            // Not NaN. What is at -inf is never looked for.
            if x > f32::NEG_INFINITY {
                let w = weights.of_value(x);
                let mass = if w < settings.least { 0 } else { tokens as u64 * w };
                let bin = float::sortable_not_nan(x + 0.0) >> (32 - FIRST);
                self.first.add(bin, Bin { count: if counts { tokens } else { 0 }, mass });
            }
        };
        part.for_each::<1>(BANNED, |_, [words]| {
            if words[0] == words[1] && words[0] == words[2] && words[0] == words[3] {
                // Flat rows would wait for each other's additions.
                add(words[0], 4);
            } else {
                unroll::<4>(|e| add(words[e], 1));
            }
        });
        part.for_each_outside(BANNED, |_, word| add(word, 1));
        if settings.least > 0 && job.wants_before() {
            // Not what the histogram has.
            let mut sum = 0;
            part.for_each::<1>(BANNED, |_, [words]| {
                unroll::<4>(|e| sum += weights.of(key(f32::from_bits(words[e]))));
            });
            part.for_each_outside(BANNED, |_, word| sum += weights.of(key(f32::from_bits(word))));
            leave_sum(self.sums, cluster::rank() * WARPS + own_index() / 32, sum);
        }
    }

    /// Notes which chunks of the first digit are occupied. By all threads, after a barrier.
    #[inline(always)]
    #[track_caller]
    unsafe fn close(&self) {
        let (lane, warp_id) = (warp::lane_id(), own_index() / 32);
        let mut occupied = 0;
        unroll::<{ EACH as usize }>(|i| {
            let first = (warp_id * EACH + i as u32) * CHUNK + lane;
            let any = [0, FIRST_BINS, 2 * FIRST_BINS]
                .map(|w| self.first.words.get(w + first) | self.first.words.get(w + first + 32));
            let any = warp::warp_vote_any(warp::FULL, any[0] | any[1] | any[2] != 0);
            occupied |= (any as u32) << i;
        });
        if lane == 0 {
            self.occupied[0].set(warp_id, occupied);
        }
    }

    /// Merges the histograms of the first digit. By all warps of the cluster, between its barriers.
    #[inline(always)]
    #[track_caller]
    unsafe fn merge(&self, occupied: Occupied<EACH>, rank: u32, blocks: u32) {
        let mut n = own_index() / 32 * blocks + rank;
        while n < occupied.count() {
            let chunk = occupied.get(n);
            let bins = self.first.of_chunk(blocks, chunk);
            self.totals.put(n, bins);
            self.merged.put(chunk, bins);
            n += WARPS * blocks;
        }
    }
}
