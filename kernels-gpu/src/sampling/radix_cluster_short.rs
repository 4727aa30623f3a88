//! [`radix_cluster`](super::radix_cluster) of logits of 16 bits: one histogram, with a bin for every key.

use super::counters::{self, Counters};
use super::job::{Job, LogProbs, PARAMETERS, Settings};
use super::logit::{Logit, Words};
use super::part::{COUNTS, Held, MAX_BLOCKS, Part, THREADS, WARPS};
use super::radix_cluster::{Search, begin_if, leave_sum, of_blocks, sum_of, write_nothing, write_row};
use super::top_k::own_index;
use super::totals::{self, Bin, CHUNK, MAX_CHUNKS, Occupied, Totals, from_lane};
use super::weights::{KEY_NEG_INF, key};
use cuda_std::atomic::{Block, Relaxed};
use cuda_std::integer::opaque;
use cuda_std::shared::Carver;
use cuda_std::{GlobalMut, Shared, cluster, thread, unroll, warp};

/// Shared memory of a block.
#[derive(Clone, Copy)]
struct Block16 {
    /// How many tokens of this block's part have each key.
    counts: Counters,
    /// Of each warp, a bit for each of its chunks in which there are any; and the largest key.
    occupied: Shared<u32>,
    /// The same of all blocks.
    of_all: Shared<u32>,
    /// In the first block.
    totals: Totals,
    /// In the first block, of each warp of the cluster: the sum of all weights, by words.
    sums: Shared<u32>,
    /// The block that has the token, the bits of its logit, and which of those it is.
    told: Shared<u32>,
    /// The parameters of the row.
    parameters: Shared<u32>,
    /// For [`Held::find`].
    hits: Shared<u32>,
}

/// The word of [`Block16::counts`] whose first half is +0. The second half of the one before is -0.
const ZERO: u32 = counters::BINS / 4;
/// Words of [`Block16::sums`].
const SUMS: u32 = 2 * WARPS * MAX_BLOCKS;

/// Bytes of shared memory.
pub const SHARED_BYTES: usize = 4 * counters::WORDS
    + totals::bytes(MAX_CHUNKS)
    + 4 * (2 * (WARPS + 4) + SUMS + 4) as usize
    + 4 * (PARAMETERS + COUNTS);

impl Block16 {
    #[inline(always)]
    unsafe fn new() -> Self {
        let mut carver = Carver::new();
        Self {
            counts: Counters::new(&mut carver),
            occupied: carver.take(WARPS as usize + 1),
            of_all: carver.take(WARPS as usize + 1),
            totals: Totals::new(&mut carver, MAX_CHUNKS),
            sums: carver.take(SUMS as usize),
            told: carver.take(4),
            parameters: carver.take(PARAMETERS),
            hits: carver.take(COUNTS),
        }
    }

    /// By all threads; a barrier follows.
    #[inline(always)]
    #[track_caller]
    unsafe fn clear(&self) {
        self.counts.clear();
        if own_index() == 0 {
            self.occupied.set(WARPS, 0);
        }
    }

    /// Counts the logits of a vector.
    #[inline(always)]
    #[track_caller]
    unsafe fn count_vector<T: Logit>(&self, vector: Words) {
        let first = vector[0];
        if first == vector[1] && first == vector[2] && first == vector[3] && first >> 16 == first & 0xffff {
            // Flat rows would wait for each other's additions.
            self.add::<T>(keys(first) & 0xffff, 8);
        } else {
            unroll::<4>(|w| self.count_word::<T>(vector[w]));
        }
    }

    /// Counts the logits of a word.
    #[inline(always)]
    #[track_caller]
    unsafe fn count_word<T: Logit>(&self, word: u32) {
        let keys = keys(word);
        self.add::<T>(keys & 0xffff, 1);
        self.add::<T>(keys >> 16, 1);
    }

    #[inline(always)]
    #[track_caller]
    unsafe fn add<T: Logit>(&self, key: u32, count: u32) {
        if key > lowest::<T>() {
            self.counts.add(key, count);
        }
    }

    /// Adds -0 to +0, and notes which chunks are occupied. By all threads, between barriers.
    #[inline(always)]
    #[track_caller]
    unsafe fn close(&self) {
        let (lane, warp_id) = (warp::lane_id(), own_index() / 32);
        if warp_id * 32 * (CHUNK / 2) == ZERO {
            if lane == 0 {
                let negative = self.counts.words.get(ZERO - 1) >> 16;
                self.counts.words.fetch_add(ZERO, negative, Block, Relaxed);
            }
            warp::sync_warp(warp::FULL);
        }
        let occupied = self.counts.occupied();
        if lane == 0 {
            self.occupied.set(warp_id, occupied);
        }
    }

    /// How many logits of the cluster have the two keys of this lane in a chunk, the higher one first.
    #[inline(always)]
    #[track_caller]
    unsafe fn of_chunk<T: Logit>(&self, blocks: u32, chunk: u32) -> [u32; 2] {
        let word = chunk * (CHUNK / 2) + 31 - warp::lane_id();
        let mut counts = self.counts.of_chunk(blocks, chunk);
        // What was added to +0, and NaNs of positive sign.
        let highest = T::ABSENT & 0xffff;
        if word == ZERO - 1 || 2 * word + 1 > highest {
            counts[0] = 0;
        }
        if 2 * word > highest {
            counts[1] = 0;
        }
        counts
    }
}

/// Keys of a word's two logits.
#[inline(always)]
fn keys(word: u32) -> u32 {
    let signs = (word >> 15) & 0x0001_0001;
    word ^ ((signs * 0x7fff) | 0x8000_8000)
}

/// Key of -inf. Those of NaN are below it, or above that of +inf.
const fn lowest<T: Logit>() -> u32 {
    !T::ABSENT & 0xffff
}

/// The bits of a logit of this key.
#[inline(always)]
fn bits_of_key(key: u32) -> u32 {
    if key & 0x8000 != 0 { key ^ 0x8000 } else { !key & 0xffff }
}

/// The key of [`weights`](super::weights), which orders as this one does.
#[inline(always)]
fn wide<T: Logit>(key16: u32) -> u32 {
    key(T::unpack(bits_of_key(key16), 0))
}

/// Grid: for each row a cluster of at least [`least_blocks`](super::part::least_blocks) and up to [`MAX_BLOCKS`] blocks. `BEHIND`: see [`radix_cluster`](super::radix_cluster).
#[inline(always)]
pub unsafe fn short<T: Logit, const BEHIND: bool>(logits: *const T, job: Job) {
    let shared = Block16::new();
    shared.clear();
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
        // While the others wait for their logits. (Beside its own there are not enough registers.)
        job.look_up(row, shared.parameters);
    }
    let held = Held::load(Part::new(job.row(logits, row)));
    thread::sync_threads();

    held.for_each(|vector| shared.count_vector::<T>(vector));
    if own_index() < 32 {
        unroll::<2>(|i| shared.count_word::<T>(held.outside()[i]));
    }
    let (lane, warp_id) = (warp::lane_id(), own_index() / 32);
    let largest = held.largest();
    let largest = key(T::unpack(largest, 0)).max(key(T::unpack(largest, 1)));
    let largest = warp::warp_reduce_max_u32(warp::FULL, largest);
    if lane == 0 {
        shared.occupied.fetch_max(WARPS, largest, Block, Relaxed);
    }
    thread::sync_threads();
    shared.close();
    cluster::sync();

    if warp_id == 0 {
        let occupied = of_blocks(blocks, shared.occupied.ptr(lane));
        let largest = if lane < blocks { cluster::load_u32(cluster::map(shared.occupied.ptr(WARPS), lane)) } else { 0 };
        shared.of_all.set(lane, occupied.into_iter().fold(0, |a, b| a | b));
        let largest = warp::warp_reduce_max_u32(warp::FULL, largest);
        if lane == 0 {
            shared.of_all.set(WARPS, largest);
        }
    }
    thread::sync_threads();
    let (occupied, max_key) = (Occupied::<32>::new(shared.of_all.get(lane)), shared.of_all.get(WARPS));
    if max_key <= KEY_NEG_INF {
        begin_if::<true, BEHIND>();
        // Nobody leaves while others read.
        cluster::arrive_relaxed();
        if rank == 0 && warp_id == 0 {
            write_nothing(&job, row, true);
        }
        cluster::wait();
        return;
    }

    let (settings, random) = Settings::looked_up(shared.parameters);
    let weights = job.weights(&settings, max_key);
    let bins = |counts: [u32; 2], chunk: u32, sum: &mut u64| {
        let mut bins = [Bin::default(); 2];
        unroll::<2>(|h| {
            let (count, key) = (counts[h], wide::<T>(chunk * CHUNK + CHUNK - 1 - 2 * lane - h as u32));
            // Of keys that do not occur, too, rather than one after another where they do.
            let w = weights.of(if key < max_key { key } else { max_key });
            *sum += count as u64 * w;
            bins[h] = Bin { count, mass: if w < settings.least { 0 } else { count as u64 * w } };
        });
        bins
    };
    let mut sum = 0;
    let mut n = warp_id * blocks + rank;
    while n < occupied.count() {
        let chunk = occupied.get(n);
        shared.totals.put(n, bins(shared.of_chunk::<T>(blocks, chunk), chunk, &mut sum));
        n += blocks * WARPS;
    }
    if job.wants_before() {
        leave_sum(shared.sums, rank * WARPS + warp_id, sum);
    }
    cluster::sync();
    begin_if::<true, BEHIND>();

    if rank == 0 {
        shared.totals.add_up(occupied.count());
        thread::sync_threads();
    }
    if rank == 0 && warp_id == 0 {
        let groups = shared.totals.groups();
        let bins = |chunk: u32| bins(shared.of_chunk::<T>(blocks, chunk), chunk, &mut 0);
        let mut search = Search::new(&job, &settings, from_lane(groups, 31));
        let drawn = loop {
            let (position, by_mass) = search.next(&settings, random);
            let chunk = |n: u32| occupied.get(n);
            let found = shared.totals.find(occupied.count(), groups, position, by_mass, chunk, bins);
            if let Some(drawn) = search.reached(&settings, found.map(|f| (f, weights.of(wide::<T>(f.bin))))) {
                break drawn;
            }
        };
        // Which block has it.
        let key16 = drawn.bin;
        let count = if lane < blocks {
            cluster::load_u32(cluster::map(shared.counts.words.ptr(key16 / 2), lane)) >> (16 * (key16 & 1)) & 0xffff
        } else {
            0
        };
        let upto = warp::scan(count, |a, b| a + b);
        let owner = warp::warp_vote_ballot(warp::FULL, drawn.among < upto).trailing_zeros();
        let position = drawn.among - warp::shfl_idx(upto - count, owner);
        if lane < blocks {
            let words = [owner, bits_of_key(key16), position];
            unroll::<3>(|i| cluster::store_u32(cluster::map(shared.told.ptr(i), lane), words[i]));
        }
        cluster::arrive();
        let sum = if job.wants_before() { sum_of(shared.sums, blocks * WARPS) } else { 0 };
        let probs = LogProbs { weights, temperature: settings.temperature, sum, kept_mass: drawn.kept.mass };
        write_row(&job, row, wide::<T>(key16), drawn.kept.count, &settings, &probs);
    } else {
        cluster::arrive();
    }
    // Again, while the first block searches: nothing has kept them so long.
    let held = Held::load(Part::new(job.row(logits, opaque(row))));
    cluster::wait();
    let [owner, bits, position] = [0u32, 1, 2].map(|i| shared.told.get(i));
    if rank == owner {
        let significant = if bits == 0 { 0x7fff_7fff } else { u32::MAX };
        let matches = |vector: Words| {
            let differences = vector.map(|word| (word & significant) ^ (bits * 0x0001_0001));
            // Halves that are 0 borrow into their highest bit. So may one above such a half.
            let maybe = differences.map(|d| d.wrapping_sub(0x0001_0001) & !d).into_iter().fold(0, |a, b| a | b);
            let mut hits = 0;
            if maybe & 0x8000_8000 != 0 {
                unroll::<4>(|w| {
                    let d = differences[w];
                    hits |= ((d & 0xffff == 0) as u32 | ((d >> 16 == 0) as u32) << 1) << (2 * w);
                });
            }
            hits
        };
        held.find(shared.hits, position, matches, |token| GlobalMut::new(job.tokens).set(row, token as i32));
    }
}
