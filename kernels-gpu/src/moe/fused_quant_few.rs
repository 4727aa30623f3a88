//! Products of the fused block with 8-bit weights and few pairs of an expert, on Hopper: what
//! [`fused_quant_wgmma`](super::fused_quant_wgmma) computes, where all that takes time is reading weights.
//!
//! # Quantising
//! The products read rows of `x`, or `h`, as they are and quantise them on the way to the tensor cores, with the same bits as
//! [`fused_quant_rows`](super::fused_quant_rows): for one token a launch that only quantises takes 2 to 3 µs of 90, and there would be two.
//! A row is quantised by every block that reads it, for each of its items, which costs nothing as long as rows are few: a stage holds 512
//! elements of K, 32 KiB of weights, which take a multiprocessor 0.9 µs to come by, and of rows as many as there are pairs, at most 16. But
//! what a warp loads comes 1 to 2 µs later while weights stream in, so teams of two warps have stages of their own, and the loads of a chunk of
//! rows are under way before the last one is quantised.
//!
//! # Scales of rows
//! A scale of blocks follows from the 128 elements that a piece of a row has. One of a row covers all of it, so every block finds those of all rows for itself, while its first
//! weights are on their way: of tokens from the tokens, of `h` from numbers that the first product stores with it, the largest magnitude of each pair in the 32 outputs of an item.
//! Consumers do that, who have nothing else to do yet; then rows are quantised on their way into the stages, and sums stay in the tensor cores' accumulators until the end of an item.
//! The code for it is short and there once: with copies for consumers and for the warps that quantise, eight loads at a time, two launches took 4 µs longer.
//!
//! # Pipeline
//! A ring of stages as elsewhere. One warp has the copy engine fetch weights, and brings their scales, two for each 16 rows (a gate's and its
//! value's) and 128 elements of K, by `cp.async`; some warps quantise; two consumer warpgroups multiply 64 rows of weights by 8 or 16 pairs,
//! items in turn, so that one finishes an item while the other multiplies. Small items suit few tokens, where all multiprocessors should have
//! equally much to read, and 512 bytes of a row at a time suit memory. With scales of blocks products of 128 elements of K start from zero and are added
//! up in f32 with their scales, in the order of K.
//!
//! Columns of a stage beyond the pairs of an item hold what was there before, and nobody reads what comes of them.
//!
//! # Launches
//! Weights and their scales depend on no launch of the chain, so those of the second product fill the ring while the first one ends; only
//! who reads rows waits for `h`. Where there is a sorted list items are [drawn](Drawn), further ahead than elsewhere. The kernel does not move registers from producers to consumers: it needs few.

use super::fused::PLAIN;
use super::fused_quant_wgmma::{Job, STEP};
use super::fused_wgmma::{F32, coordinates};
use super::items::{DIRECT_PAIRS, Drawn, Item, Items, Sorted};
use super::pairs::{Pairs, existing_tokens};
use crate::pipeline::{Ring, Stages};
use crate::row::quantise::{amax, group_amax, scale_for, warp_amax};
use crate::row::{GROUP, elements};
use crate::scales::{BLOCKS, ROWS};
use crate::tensor_byte::TensorByte;
use crate::tensor_float::TensorFloat;
use cuda_std::atomic::{Block, Relaxed};
use cuda_std::shared::Carver;
use cuda_std::tma::{self, Swizzle, TensorMap};
use cuda_std::vec::{B64, B128};
use cuda_std::wgmma::{self, Accumulator, Descriptor, Input, K, Sum as _};
use cuda_std::{
    E4M3, Global, GlobalMut, Shared, apart, bf16, cp_async, dependent_launch, entries, f16, float, integer, mbarrier,
    thread, unroll, vec, warp,
};

/// Consumer warpgroups, which take items in turn.
const GROUPS: usize = 2;
/// Teams that quantise the rows of stages, in turn, and warps of a team. A team that waits for a stage is less than a round ahead of the consumers.
const TEAMS: usize = 4;
/// See [`TEAMS`].
const TEAM: usize = 2;
/// Threads that quantise rows.
const QUANTISERS: usize = TEAMS * TEAM * 32;
/// Threads of a block: consumers, those that quantise, and a warp for weights.
pub const THREADS: usize = GROUPS * 128 + QUANTISERS + 32;
/// The most pairs of an item.
pub const PAIRS: usize = 16;
/// Rows of weights of an item.
pub const TILE_ROWS: usize = 64;
/// Outputs of the first product of an item.
pub const OUTPUTS: usize = TILE_ROWS / 2;
/// Lines of 128 elements of K of a stage, and stages.
pub const LINES: usize = 4;
/// See [`LINES`].
pub const STAGES: usize = 5;
/// Scales of weights of 128 elements of K: of a gate and its value, for each warp of a consumer.
const FACTORS: usize = 8;

/// Items of a block that are dealt, where others are drawn: numbers are drawn as far ahead, since quantising warps ask for rows four stages ahead of the one they are at.
const DEALT: u32 = 4;
const _: () = assert!(DEALT >= GROUPS as u32, "consumers know their first items");

/// The barrier at which those that quantise wait until consumers have found rows' largest magnitudes.
const FOUND: u32 = 1;
/// The barrier at which consumers wait for what the others have found. Each consumer's own barrier has one of the numbers from 2 on before it.
const FOUND_BY_ALL: u32 = 2 + GROUPS as u32;

/// Words in which consumers tell each other the largest magnitudes of an item: of each warp and pair, of an item and of the one before.
const TOLD: usize = GROUPS * 2 * 4 * PAIRS;

/// Dynamic shared memory with scales of this kind; every part may begin at the next multiple of 16.
pub const fn shared_bytes(lines: usize, stages: usize, scales: u32, bins: usize) -> usize {
    let factors = if scales == BLOCKS { stages * lines * (PAIRS + FACTORS) } else { DIRECT_PAIRS + TOLD };
    stages * (lines * (TILE_ROWS + PAIRS) * STEP + 2 * 8)
        + factors * 4
        + GROUPS * 8
        + super::items::DRAWN_BYTES
        + super::items::shared_bytes(bins)
        + 5 * 16
}

/// One of the products; see [`Args`]. `UP`: the first. Grid: any number of blocks; block: [`THREADS`]; shared memory: [`shared_bytes`].
#[inline(always)]
unsafe fn fused_quant_few<
    T: TensorFloat,
    Q: TensorByte + Input<<Q as TensorByte>::Sum>,
    const SCALES: u32,
    const UP: bool,
    const LINES: usize,
    const STAGES: usize,
    const DIRECT: bool,
>(
    h: *mut T,
    partial: *mut f32,
    x: *const T,
    x_row: usize,
    x_divisor: u32,
    map: *const TensorMap,
    shared_map: *const TensorMap,
    w_scales: *const f32,
    shared_w_scales: *const f32,
    bias: *const f32,
    shared_bias: *const f32,
    sorted_ids: *const i32,
    sorted_weights: *const f32,
    offsets: *const i32,
    expert_counts: *const i32,
    topk_ids: *const i32,
    topk_weights: *const f32,
    expert_map: *const i32,
    num_tokens: *const i32,
    tokens: u32,
    top_k: u32,
    slots: u32,
    experts: u32,
    local: u32,
    bins: u32,
    n: u32,
    k: u32,
    layout: u32,
    shuffled: u32,
    activation: u32,
    alpha: f32,
    limit: f32,
    kept: u32,
    words: *mut u64,
    launch: u64,
    w_scale_expert: u32,
    w_scale_row: u32,
    maxima: *mut f32,
) where
    [Q::Sum; 4]: Accumulator<Q::Sum>,
    [Q::Sum; 8]: Accumulator<Q::Sum>,
{
    // Without a list pairs are few enough for a table.
    const { assert!(SCALES == BLOCKS || DIRECT) };
    let (tid, warp_id, lane) = (thread::thread_idx_x(), warp::warp_id(), warp::lane_id());
    let mut carver = Carver::new();
    let weights = carver.take_aligned::<u8>(STAGES * LINES * TILE_ROWS * STEP, 1024);
    let operands = carver.take_aligned::<u8>(STAGES * LINES * PAIRS * STEP, 1024);
    let lines = const { if SCALES == BLOCKS { STAGES * LINES } else { 0 } };
    let x_factors = carver.take::<f32>(lines * PAIRS);
    let w_factors = carver.take::<f32>(lines * FACTORS);
    let magnitudes = carver.take::<u32>(const { if SCALES == ROWS { DIRECT_PAIRS } else { 0 } });
    let told = carver.take::<f32>(const { if SCALES == ROWS { TOLD } else { 0 } });
    let bars = carver.take::<u64>(const { Stages::<STAGES>::WORDS });
    let turns = carver.take::<u64>(GROUPS);
    // Few items are dealt, all of them.
    let drawn = Drawn::new(&mut carver, !DIRECT, if UP { words } else { words.wrapping_add(1) }, launch);
    let stages = Stages::<STAGES>::new(bars.address(0u32));
    if tid == 0 {
        if !DIRECT {
            drawn.init();
        }
        for g in 0..GROUPS {
            mbarrier::init(turns.address(g), 4);
        }
        if SCALES == BLOCKS {
            // Weights, the lanes that fetch their scales, and those of a team that quantises; every lane of the consumer.
            stages.init_counted(1 + 32 + 32 * TEAM as u32, 128);
        } else {
            stages.init_counted(1 + 32 * TEAM as u32, 4);
        }
        tma::prefetch_map(map);
        tma::prefetch_map(shared_map);
    }
    // Columns without a pair are zeroes, or what was there for another item: products take them, and nobody reads what comes of them.
    let mut at = tid;
    while at < const { (STAGES * LINES * PAIRS * STEP / 16) as u32 } {
        operands.set_as(16 * at, B128([0u32; 4]));
        at += THREADS as u32;
    }
    if SCALES == BLOCKS {
        if tid < const { (STAGES * LINES * PAIRS) as u32 } {
            x_factors.set(tid, 0.0);
        }
    } else if tid < DIRECT_PAIRS as u32 {
        magnitudes.set(tid, 0);
    }
    const { assert!(STAGES * LINES * PAIRS <= THREADS) };
    tma::fence_async();
    let tiles = n.div_ceil(const { if UP { OUTPUTS as u32 } else { TILE_ROWS as u32 } });
    if UP && !DIRECT && tid == 0 && tokens * slots >= 4 * bins {
        // As in `fused_wgmma`: the first item if every expert has one share.
        // SAFETY: there are outputs, hence tiles.
        core::hint::assert_unchecked(tiles != 0);
        let (bin, tile) = (thread::block_idx_x() / tiles, thread::block_idx_x() % tiles);
        let mut at = 0;
        while bin < local && at < k.min(const { (STAGES * LINES * STEP) as u32 }) {
            let to = coordinates::<UP>(shuffled, n, at, tile * TILE_ROWS as u32, bin as i32);
            tma::prefetch_tensor::<5>(map, to);
            at += STEP as u32;
        }
    }
    if UP {
        dependent_launch::wait();
    }
    dependent_launch::launch_dependents();
    let sorted = Sorted {
        ids: Global::new(sorted_ids),
        weights: Global::new(sorted_weights),
        offsets: Global::new(offsets),
        counts: Global::new(expert_counts),
        topk_weights: Global::new(topk_weights),
    };
    let pairs = Pairs {
        topk_ids: Global::new(topk_ids),
        expert_map: Global::new(expert_map),
        mapped: !expert_map.is_null(),
        top_k,
        slots,
        experts,
        local,
        shared: bins - local,
    };
    let count = if DIRECT { (existing_tokens(tokens, num_tokens) * slots).min(DIRECT_PAIRS as u32) } else { 0 };
    // SAFETY: it is the number of slots, or 1.
    core::hint::assert_unchecked(x_divisor != 0);
    let tokens = count / x_divisor;
    let rows = RowScales::<T> { magnitudes, x: Global::new(x), x_row, maxima: Global::new(maxima), tokens };
    let items = Items::<DIRECT>::new(&mut carver, sorted, pairs, count, bins, tiles, PAIRS as u32, false);
    let job = Job::<T, SCALES, DIRECT> {
        h: GlobalMut::new(h),
        partial: GlobalMut::new(partial),
        x_scales: Global::new(core::ptr::null()),
        x_divisor,
        w_scales: Global::new(w_scales),
        shared_w_scales: Global::new(shared_w_scales),
        w_scale_expert,
        w_scale_row,
        bias: Global::new(bias),
        biased: !bias.is_null(),
        shared_bias: Global::new(shared_bias),
        shared_biased: !shared_bias.is_null(),
        local,
        items,
        n,
        k,
        rows: if UP && layout != PLAIN { 2 * n } else { n },
        layout,
        activation: (activation, alpha, limit),
        kept: kept != 0,
        slots,
        share: 1,
        rank: 0,
    };
    let (all, grid) = (items.count(), thread::grid_dim_x());
    let steps = k.div_ceil((LINES * STEP) as u32);
    let mut ring = Ring::<STAGES>::new();
    // The block's item number `index`, counted from 0, which is `by` items after `before`.
    let number = |before: u32, index: u32, by: u32| {
        if DIRECT {
            before + by * grid
        } else if index < DEALT {
            thread::block_idx_x() + index * grid
        } else {
            drawn.hear(index - DEALT)
        }
    };
    let mut index = 0;
    let mut next = thread::block_idx_x();

    if warp_id >= ((GROUPS * 128 + QUANTISERS) / 32) as u32 {
        // Weights are written by nobody in this chain of launches, and the first one has waited for all before it.
        let (line, warp, half) = (lane / FACTORS as u32, lane % FACTORS as u32 / 2, lane % 2);
        while next < all {
            let item = job.find(next);
            // For scales of blocks.
            let [gate, value] = job.weight_rows_of::<UP>(item.tile * TILE_ROWS as u32 + 16 * warp, 0);
            let row = if half == 0 { gate } else { value };
            let scales = job.scales_of(item.bin).offset((row / GROUP as u32 * job.groups()) as usize);
            let (map, bin) = if item.bin < local { (map, item.bin) } else { (shared_map, item.bin - local) };
            let mut taken = 0;
            if !DIRECT && lane == 0 {
                // In the second product nothing that still runs knows of the word.
                taken = drawn.take(index);
            }
            let mut step = 0;
            while step < steps {
                stages.wait_empty(ring);
                let bar = stages.full(ring.stage);
                if lane == 0 {
                    mbarrier::arrive_expect_tx(bar, const { (LINES * TILE_ROWS * STEP) as u32 });
                    unroll::<LINES>(|l| {
                        let k0 = (step * LINES as u32 + l as u32) * STEP as u32;
                        let at = coordinates::<UP>(shuffled, n, k0, item.tile * TILE_ROWS as u32, bin as i32);
                        let to = (ring.stage * LINES as u32 + l as u32) * (TILE_ROWS * STEP) as u32;
                        // Beyond the end of K come zeroes.
                        tma::load_tensor_for::<5>(weights.address(to), map, at, bar, job.policy::<UP>(item));
                    });
                }
                if SCALES == BLOCKS && line < LINES as u32 {
                    let group = step * LINES as u32 + line;
                    let there = group < job.groups();
                    let to = (ring.stage * LINES as u32 + line) * FACTORS as u32 + lane % FACTORS as u32;
                    let from = scales.ptr(if there { group } else { 0 });
                    cp_async::copy::<4, _>(w_factors.address(to), from, if there { 4 } else { 0 });
                }
                if SCALES == BLOCKS {
                    cp_async::arrive(bar);
                }
                ring.advance();
                step += 1;
            }
            if !DIRECT && lane == 0 {
                drawn.settle(index, taken, DEALT * grid, all);
            }
            index += 1;
            next = number(next, index, 1);
        }
        // All copies have landed when the consumers end, who wait for each stage.
    } else if warp_id >= (GROUPS * 4) as u32 {
        if !UP {
            dependent_launch::wait();
        }
        quantise::<T, Q, SCALES, LINES, STAGES, DIRECT>(
            &job,
            stages,
            Source { x: Global::new(x), x_row, operands, factors: x_factors, rows },
            all,
            steps,
            number,
        );
    } else {
        if SCALES == ROWS {
            if !UP {
                dependent_launch::wait();
            }
            rows.find::<UP, DIRECT>(&job.items, k);
        }
        let group = warp_id / 4;
        let consumer = Consumer {
            weights: Descriptor::<K>::new(weights.address(0u32)),
            operands: Descriptor::<K>::new(operands.address(0u32)),
            x_factors,
            w_factors,
            rows,
            told: told.offset(const { if SCALES == ROWS { TOLD / GROUPS } else { 0 } } * group as usize),
            maxima: GlobalMut::new(maxima),
            group,
        };
        index = group;
        next += group * grid;
        ring.skip(group * steps);
        let mut round = 0;
        while next < all {
            let item = job.find(next);
            // The parity of a stage says nothing to who is more than one round behind. The first turn is the first group's.
            mbarrier::wait_parity(turns.address(group), (round & 1) ^ (group == 0) as u32);
            round += 1;
            let done = || {
                warp::sync_warp(warp::FULL);
                if warp::lane_id() == 0 {
                    mbarrier::arrive(turns.address(1 - group));
                }
            };
            macro_rules! product {
                ($half:literal) => {
                    if SCALES == BLOCKS {
                        apart!(consumer.blocks::<[f32; $half], SCALES, UP, LINES, STAGES, DIRECT>(
                            &job, stages, &mut ring, item, steps, done,
                        ))
                    } else {
                        apart!(consumer.rows::<Q, [Q::Sum; $half], SCALES, UP, LINES, STAGES, DIRECT>(
                            &job, stages, &mut ring, item, steps, round, done,
                        ))
                    }
                };
            }
            if item.count <= 8 {
                product!(4);
            } else {
                product!(8);
            }
            ring.skip(steps);
            index += GROUPS as u32;
            next = number(next, index, GROUPS as u32);
        }
    }
}

/// Pieces of 128 elements that half a warp has under way.
const CHUNK: usize = 4;
/// Of which so many are computed together.
const TOGETHER: usize = 4;

/// Rows to be quantised, and where to.
struct Source<T> {
    x: Global<T>,
    x_row: usize,
    operands: Shared<u8>,
    /// Scales of blocks, for each stage.
    factors: Shared<f32>,
    /// Scales of rows.
    rows: RowScales<T>,
}

/// Loads that a lane has under way while magnitudes are found.
const AT_ONCE: usize = 4;
/// Warps that find them: consumers, who have nothing else to do yet.
const FINDERS: u32 = GROUPS as u32 * 4;
/// Maxima of a load.
const FOUR: u32 = 4;

/// Of each row of `h` so many maxima, one for each [`OUTPUTS`] of its columns, and zeroes.
#[inline(always)]
fn maxima_of(columns: u32) -> u32 {
    columns.div_ceil(OUTPUTS as u32).next_multiple_of(FOUR)
}

/// Scales of rows: of each token, or of each pair's row of `h`, from the largest magnitude in it. Every block finds all of them for itself.
struct RowScales<T> {
    /// Of each row the largest magnitude, as bits, whose order is that of magnitudes.
    magnitudes: Shared<u32>,
    x: Global<T>,
    x_row: usize,
    /// See [`maxima_of`].
    maxima: Global<f32>,
    /// Tokens that exist.
    tokens: u32,
}

impl<T> Clone for RowScales<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for RowScales<T> {}

impl<T: TensorFloat> RowScales<T> {
    /// By consumers, as soon as there are rows, of `k` columns: tokens as they are, of `h` what the first product says of its parts.
    #[inline(always)]
    unsafe fn find<const UP: bool, const DIRECT: bool>(self, items: &Items<DIRECT>, k: u32) {
        let rows = if UP { self.tokens } else { items.own_pairs() };
        let pieces = if UP { k / 8 } else { maxima_of(k) / FOUR };
        // A warp takes 32 pieces of a row at a time. Not zero, or there would be nothing to do.
        let each = pieces.div_ceil(32).max(1);
        let all = rows * each;
        // Half of 2^32 divided by that.
        let reciprocal = 0x7fff_ffff / each + 1;
        // Blocks begin at different ones: all of them read the same.
        let shift = integer::mul_hi(thread::block_idx_x() << 25, all);
        let mut first = warp::warp_id();
        while first < all {
            let (mut words, mut row_of) = ([B128([0u32; 4]); AT_ONCE], [0; AT_ONCE]);
            unroll::<AT_ONCE>(|i| {
                // The last one, and a row's last piece, once more where there is none: that needs no condition.
                let unit = (first + FINDERS * i as u32).min(all - 1) + shift;
                let unit = unit.min(unit.wrapping_sub(all));
                let row = integer::mul_hi(2 * unit + 1, reciprocal);
                let piece = ((unit - row * each) * 32 + warp::lane_id()).min(pieces - 1);
                // Pairs without an expert here have no row.
                let row = if UP { row } else { items.pair(row) };
                row_of[i] = row;
                words[i] = if UP {
                    self.x.get_as(row as usize * self.x_row + 8 * piece as usize)
                } else {
                    self.maxima.get_as((row * pieces + piece) * FOUR)
                };
            });
            unroll::<AT_ONCE>(|i| {
                let B128(words) = words[i];
                let own = if UP {
                    amax(vec::to_f32(elements::<T, 8>(B128(words.map(integer::opaque)))))
                } else {
                    amax(words.map(f32::from_bits))
                };
                let largest = warp_amax(own).to_bits();
                if warp::lane_id() == 0 {
                    self.magnitudes.fetch_max(row_of[i], largest, Block, Relaxed);
                }
            });
            first += const { FINDERS * AT_ONCE as u32 };
        }
        Self::arrive_found();
        // At a barrier of their own: they need not wait for those that quantise, and synccheck would take it for a mistake that those wait at another instruction.
        thread::sync_named(FOUND_BY_ALL, const { (GROUPS * 128) as u32 });
    }

    /// By all others that the barrier counts: they need not wait.
    #[inline(always)]
    fn arrive_found() {
        thread::arrive_named(FOUND, const { (GROUPS * 128 + QUANTISERS) as u32 });
    }

    /// By those that quantise: until they are found.
    #[inline(always)]
    fn wait_found() {
        thread::sync_named(FOUND, const { (GROUPS * 128 + QUANTISERS) as u32 });
    }

    /// The scale of a row.
    #[inline(always)]
    unsafe fn of<Q: TensorByte>(self, row: u32) -> f32 {
        scale_for::<Q>(f32::from_bits(self.magnitudes.get(row)))
    }
}

/// By [`QUANTISERS`] threads: rows of every item to stages, quantised. Teams take stages in turn, as loads take longer than a stage may.
#[inline(always)]
unsafe fn quantise<
    T: TensorFloat,
    Q: TensorByte,
    const SCALES: u32,
    const LINES: usize,
    const STAGES: usize,
    const DIRECT: bool,
>(
    job: &Job<T, SCALES, DIRECT>,
    stages: Stages<STAGES>,
    source: Source<T>,
    all: u32,
    steps: u32,
    number_of: impl Fn(u32, u32, u32) -> u32,
) {
    const { assert!(TEAMS <= STAGES) };
    let teams = TEAMS as u32;
    // Sixteen lanes take 128 elements of a row, eight each: pieces of several lines or rows at a time, in chunks of so many.
    let (half, part) = (warp::warp_id() % TEAM as u32 * 2 + warp::lane_id() / 16, warp::lane_id() % 16);
    // Steps of all items of the block, of which every so manyth is this team's.
    let mut step = warp::warp_id() / TEAM as u32 % teams;
    let mut ring = Ring::<STAGES>::new();
    ring.skip(step);
    let mut index = 0;
    let mut number = thread::block_idx_x();
    while step >= steps && number < all {
        step -= steps;
        index += 1;
        number = number_of(number, index, 1);
    }
    if number >= all {
        if SCALES == ROWS {
            RowScales::<T>::arrive_found();
        }
        return;
    }
    const { assert!(LINES.is_multiple_of(2 * TEAM), "rows of a piece are those of all lanes") };
    // The piece number `i` of a chunk: its line, and its row of the item.
    let piece = |chunk: u32, i: usize| {
        let at = const { 2 * TEAM as u32 } * (CHUNK as u32 * chunk + i as u32) + half;
        (at % LINES as u32, at / LINES as u32)
    };
    // The rows of an item, one a lane, and where they begin, in units of 16 bytes.
    let row_of = |item: Item| {
        let row = warp::lane_id().min(item.count - 1);
        // SAFETY: it is the number of slots, or 1.
        core::hint::assert_unchecked(job.x_divisor != 0);
        job.items.pair(item.first + row) / job.x_divisor
    };
    let rows = |item: Item| row_of(item) * (source.x_row / 8) as u32;
    // What they are multiplied by, if their scales are known beforehand.
    let factors = |item: Item| {
        if SCALES == ROWS { float::recip(source.rows.of::<Q>(row_of(item))) } else { 0.0 }
    };
    let load = |item: Item, rows: u32, step: u32, chunk: u32| {
        // As words: as elements each would take a register, and be waited for at once.
        let mut v = [B128([0u32; 4]); CHUNK];
        unroll::<CHUNK>(|i| {
            let (line, row) = piece(chunk, i);
            let column = (step * LINES as u32 + line) * STEP as u32 + 8 * part;
            let from = warp::shfl_idx(rows, row);
            if row < item.count && column < job.k {
                v[i] = source.x.get_as(8 * from as usize + column as usize);
            }
        });
        v
    };
    let chunks = |item: Item| (item.count * LINES as u32).div_ceil(const { (2 * TEAM * CHUNK) as u32 });
    let mut item = job.find(number);
    let mut from = rows(item);
    let mut chunk = 0;
    let mut now = load(item, from, step, 0);
    if SCALES == ROWS {
        RowScales::<T>::wait_found();
    }
    let mut by = factors(item);
    loop {
        // On its way while this chunk is quantised.
        let (here, first, last) = (item, chunk == 0, chunk + 1 == chunks(item));
        let by_here = by;
        let (this_chunk, this_ring) = (chunk, ring);
        let mut ahead = now;
        let mut more = true;
        if last {
            chunk = 0;
            step += teams;
            ring.skip(teams);
            let before = number;
            while step >= steps && number < all {
                step -= steps;
                index += 1;
                number = number_of(number, index, 1);
            }
            more = number < all;
            if number != before && more {
                item = job.find(number);
                from = rows(item);
                by = factors(item);
            }
        } else {
            chunk += 1;
        }
        if more {
            ahead = load(item, from, step, chunk);
        }
        if first {
            stages.wait_empty(this_ring);
        }
        unroll::<{ CHUNK / TOGETHER }>(|group| {
            // All lanes or none.
            if piece(this_chunk, group * TOGETHER).1 < here.count {
                let (mut words, mut scales) = ([B64([0u32; 2]); TOGETHER], [0f32; TOGETHER]);
                unroll::<TOGETHER>(|i| {
                    let B128(loaded) = now[group * TOGETHER + i];
                    let v = vec::to_f32(elements::<T, 8>(B128(loaded.map(integer::opaque))));
                    let factor = if SCALES == BLOCKS {
                        scales[i] = scale_for::<Q>(group_amax(v));
                        float::recip(scales[i])
                    } else {
                        warp::shfl_idx(by_here, piece(this_chunk, group * TOGETHER + i).1)
                    };
                    let four = |j: usize| Q::four([v[j], v[j + 1], v[j + 2], v[j + 3]].map(|v| v * factor));
                    words[i] = B64([four(0), four(4)]);
                });
                unroll::<TOGETHER>(|i| {
                    let (line, row) = piece(this_chunk, group * TOGETHER + i);
                    let place = this_ring.stage * LINES as u32 + line;
                    let at = place * (PAIRS * STEP) as u32 + Swizzle::B128.apply(row * STEP as u32 + 8 * part);
                    if row < here.count {
                        source.operands.set_as(at, words[i]);
                        if SCALES == BLOCKS && part == 0 {
                            source.factors.set(place * PAIRS as u32 + row, scales[i]);
                        }
                    }
                });
            }
        });
        if last {
            // Products read it by another proxy.
            tma::fence_async();
            mbarrier::arrive(stages.full(this_ring.stage));
        }
        if !more {
            break;
        }
        now = ahead;
    }
}

/// What a consumer warpgroup works with.
struct Consumer<T> {
    weights: Descriptor<K>,
    operands: Descriptor<K>,
    /// Scales of blocks, for each stage.
    x_factors: Shared<f32>,
    w_factors: Shared<f32>,
    /// Scales of rows.
    rows: RowScales<T>,
    /// What warps tell each other of results of the first product, and where it is stored for the second.
    told: Shared<f32>,
    maxima: GlobalMut<f32>,
    group: u32,
}

impl<T: TensorFloat> Consumer<T> {
    /// What the end of an item needs, asked for before its products: of a lane's columns, which are the one in every eight, their pairs, and the weights of those.
    #[inline(always)]
    unsafe fn columns<const SCALES: u32, const UP: bool, const DIRECT: bool>(
        &self,
        job: &Job<T, SCALES, DIRECT>,
        item: Item,
    ) -> ([u32; 2], [f32; 2]) {
        let lane = warp::lane_id();
        let column = if UP { lane / 4 } else { 2 * (lane % 4) + lane / 4 % 2 };
        let (mut pair, mut weight) = ([0u32; 2], [0f32; 2]);
        unroll::<2>(|j| {
            let column = column + 8 * j as u32;
            if column < item.count {
                pair[j] = job.items.pair(item.first + column);
                if !UP {
                    weight[j] = job.items.weight(item.first + column);
                }
            }
        });
        (pair, weight)
    }

    /// Multiplies an item with scales of blocks and finishes it; calls `done` between.
    #[inline(always)]
    unsafe fn blocks<
        A: Accumulator + AsRef<[f32]> + AsMut<[f32]>,
        const SCALES: u32,
        const UP: bool,
        const LINES: usize,
        const STAGES: usize,
        const DIRECT: bool,
    >(
        &self,
        job: &Job<T, SCALES, DIRECT>,
        stages: Stages<STAGES>,
        ring: &mut Ring<STAGES>,
        item: Item,
        steps: u32,
        done: impl Fn(),
    ) {
        let (lane, warp) = (warp::lane_id(), warp::warp_id() % 4);
        let (pair, scale) = self.columns::<SCALES, UP, DIRECT>(job, item);
        let (mut acc, mut partial) = (A::zero(), [A::zero(); LINES]);
        let mut step = 0;
        loop {
            stages.wait_full(*ring);
            let first = ring.stage * LINES as u32;
            unroll::<LINES>(|l| {
                let line = first + l as u32;
                let (a, b) = (line * (TILE_ROWS * STEP) as u32, line * (PAIRS * STEP) as u32);
                partial[l].multiply::<E4M3, 4, _, _>(self.weights.offset(a), self.operands.offset(b), false);
            });
            wgmma::wait::<0>(&mut partial[0]);
            unroll::<LINES>(|l| {
                partial[l].pin();
                let line = first + l as u32;
                let B64(by) = self.w_factors.get_as::<B64<f32, 2>>(line * FACTORS as u32 + 2 * warp);
                for j in 0..const { A::N / 8 } {
                    let column = 8 * j as u32 + 2 * (lane % 4);
                    let B64(pairs) = self.x_factors.get_as::<B64<f32, 2>>(line * PAIRS as u32 + column);
                    for e in 0..4 {
                        let i = 4 * j + e;
                        let sum = acc.as_ref()[i];
                        acc.as_mut()[i] = float::fma(partial[l].as_ref()[i], pairs[e % 2] * by[e / 2], sum);
                    }
                }
            });
            stages.release_lane(ring.stage);
            ring.advance();
            step += 1;
            if step >= steps {
                break;
            }
        }
        done();
        let row = item.tile * TILE_ROWS as u32 + 16 * warp;
        let sums = |j: usize| {
            let mut v = [0f32; 4];
            for e in 0..4 {
                v[e] = acc.as_ref()[4 * j + e];
            }
            v
        };
        if UP {
            job.store_up(item, row, A::N, |column| if column < 8 { pair[0] } else { pair[1] }, sums);
        } else {
            let of = |column| if column < 8 { (pair[0], scale[0]) } else { (pair[1], scale[1]) };
            job.store_down::<F32>(item, row, A::N, of, sums);
        }
    }

    /// Multiplies an item with scales of rows and finishes it, the block's number `round` of this consumer; calls `done` between.
    #[inline(always)]
    unsafe fn rows<
        Q: TensorByte + Input<Q::Sum>,
        A: Accumulator<Q::Sum> + AsRef<[Q::Sum]>,
        const SCALES: u32,
        const UP: bool,
        const LINES: usize,
        const STAGES: usize,
        const DIRECT: bool,
    >(
        &self,
        job: &Job<T, SCALES, DIRECT>,
        stages: Stages<STAGES>,
        ring: &mut Ring<STAGES>,
        item: Item,
        steps: u32,
        round: u32,
        done: impl Fn(),
    ) {
        let (lane, warp) = (warp::lane_id(), warp::warp_id() % 4);
        let row = item.tile * TILE_ROWS as u32 + 16 * warp;
        let (pair, weight) = self.columns::<SCALES, UP, DIRECT>(job, item);
        let scales = job.scales_of(item.bin);
        let by = job.weight_rows::<UP>(row).map(|row| scales.get(row * job.w_scale_row));
        let mut pairs_by = [[0f32; 2]; 2];
        for j in 0..const { A::N / 8 } {
            for e in 0..2 {
                let column = 8 * j as u32 + 2 * (lane % 4) + e as u32;
                if column < item.count {
                    pairs_by[j][e] = self.rows.of::<Q>(job.row(item.first + column));
                }
            }
        }
        let mut acc = A::zero();
        let mut step = 0;
        loop {
            stages.wait_full(*ring);
            unroll::<LINES>(|l| {
                let line = ring.stage * LINES as u32 + l as u32;
                let (a, b) = (line * (TILE_ROWS * STEP) as u32, line * (PAIRS * STEP) as u32);
                acc.multiply::<Q, 4, _, _>(self.weights.offset(a), self.operands.offset(b), l > 0 || step > 0);
            });
            // At once: the next stage's weights come much later, and until then this one can be filled again.
            wgmma::wait::<0>(&mut acc);
            stages.release(ring.stage, lane);
            ring.advance();
            step += 1;
            if step >= steps {
                break;
            }
        }
        done();
        let sums = |j: usize| {
            let mut v = [0f32; 4];
            for e in 0..4 {
                v[e] = acc.as_ref()[4 * j + e].to_f32() * (by[e / 2] * pairs_by[j][e % 2]);
            }
            v
        };
        if UP {
            let mut largest = [0f32; 2];
            let pairs = |column| if column < 8 { pair[0] } else { pair[1] };
            job.store_up_seen(item, row, A::N, pairs, sums, |j, word| largest[j] = amax(T::unpack_f32(word)));
            self.tell::<A, Q, SCALES, DIRECT>(job, item, largest, round % 2);
        } else {
            let of = |column| if column < 8 { (pair[0], weight[0]) } else { (pair[1], weight[1]) };
            job.store_down::<F32>(item, row, A::N, of, sums);
        }
    }

    /// The largest magnitude of each pair in the item's [`OUTPUTS`], of which a warp has 8 and a lane 2. Items in turn have words of their own, so that a barrier an
    /// item is enough.
    #[inline(always)]
    unsafe fn tell<A: Accumulator<Q::Sum>, Q: TensorByte, const SCALES: u32, const DIRECT: bool>(
        &self,
        job: &Job<T, SCALES, DIRECT>,
        item: Item,
        largest: [f32; 2],
        turn: u32,
    ) {
        let (lane, warp) = (warp::lane_id(), warp::warp_id() % 4);
        let told = self.told.offset(turn * (4 * PAIRS) as u32);
        for j in 0..const { A::N / 8 } {
            let two = float::max(largest[j], warp::shfl_xor(largest[j], 1));
            let eight = float::max(two, warp::shfl_xor(two, 2));
            if lane % 4 == 0 {
                told.set(warp * PAIRS as u32 + 8 * j as u32 + lane / 4, eight);
            }
        }
        thread::sync_named(2 + self.group, 128);
        if warp == 0 && lane < item.count {
            let mut largest = 0f32;
            unroll::<4>(|w| largest = float::max(largest, told.get(w as u32 * PAIRS as u32 + lane)));
            let pair = job.items.pair(item.first + lane);
            let (tile, all) = (item.tile, maxima_of(job.n));
            self.maxima.set(pair as usize * all as usize + tile as usize, largest);
            if tile + 1 == job.n.div_ceil(OUTPUTS as u32) {
                for zero in tile + 1..all {
                    self.maxima.set(pair as usize * all as usize + zero as usize, 0.0);
                }
            }
        }
    }
}

entries! {
    /// Arguments of both products.
    pub struct Args<T>(
        /// The first product's results, `[tokens * slots, intermediate]`. Not used by the second.
        h: *mut T,
        /// `[tokens * slots, hidden]`: written by the second product.
        partial: *mut f32,
        /// Rows of tokens, or for the second product of `h`, `x_row` elements apart, which begin at multiples of 16 bytes: row
        /// `pair / x_divisor` belongs to a pair.
        x: *const T, x_row: usize, x_divisor: u32,
        /// The weights of the routed experts and of the shared ones; see [`fused_wgmma`](super::fused_wgmma).
        map: TensorMap, shared_map: TensorMap,
        /// Their scales: `[experts, rows / 128, k / 128]`, or of rows.
        w_scales: *const f32, shared_w_scales: *const f32,
        /// `[local, rows]` or null; `[shared, rows]` or null.
        bias: *const f32, shared_bias: *const f32,
        /// From [`sort`](super::sort), in blocks of [`SORT_BLOCK`](super::fused_quant_wgmma::SORT_BLOCK); not read without a sorted list.
        sorted_ids: *const i32, sorted_weights: *const f32, offsets: *const i32, expert_counts: *const i32,
        /// See [`fused::Args`](super::fused::Args); read where there is no sorted list.
        topk_ids: *const i32, topk_weights: *const f32, expert_map: *const i32, num_tokens: *const i32, tokens: u32,
        top_k: u32, slots: u32, experts: u32,
        /// Routed experts of this device; those and the shared ones, at most [`MAX_BINS`](super::fused_quant_wgmma::MAX_BINS).
        local: u32, bins: u32,
        /// Outputs and inner dimension, multiples of 16.
        n: u32, k: u32,
        /// See [`fused::Args`](super::fused::Args).
        layout: u32,
        /// 0, or for [shuffled](super::shuffle) weights the rows of a tile.
        shuffled: u32,
        /// See [`fused::Args`](super::fused::Args).
        activation: u32, alpha: f32, limit: f32,
        /// 1 if `partial` may stay in the second-level cache until the sum has read it.
        kept: u32,
        /// [`WORDS`](super::items::WORDS), whatever is in them; read and written where there is a sorted list.
        words: *mut u64,
        /// A number that no other launch has, unless it repeats this one; the two products may have the same.
        launch: u64,
        /// Where scales of rows of weights are: from expert to expert and from row to row.
        w_scale_expert: u32, w_scale_row: u32,
        /// With scales of rows, for both products: of each pair the largest magnitude in every [`OUTPUTS`] of the first one's results, for which there is room for 4 bytes
        /// for each 32 of `[tokens * slots, intermediate]`, a row rounded up to 16 bytes, whatever is in it.
        maxima: *mut f32,
    );
    moe_fused_quant_few_up_f16 { type T = f16; } [THREADS, 1; Sm90a] => fused_quant_few::<T, E4M3, { BLOCKS }, true, { LINES }, { STAGES }, true>;
    moe_fused_quant_few_up_bf16 { type T = bf16; } [THREADS, 1; Sm90a] => fused_quant_few::<T, E4M3, { BLOCKS }, true, { LINES }, { STAGES }, true>;
    moe_fused_quant_few_up_sorted_f16 { type T = f16; } [THREADS, 1; Sm90a] => fused_quant_few::<T, E4M3, { BLOCKS }, true, { LINES }, { STAGES }, false>;
    moe_fused_quant_few_up_sorted_bf16 { type T = bf16; } [THREADS, 1; Sm90a] => fused_quant_few::<T, E4M3, { BLOCKS }, true, { LINES }, { STAGES }, false>;
    moe_fused_quant_few_down_f16 { type T = f16; } [THREADS, 1; Sm90a] => fused_quant_few::<T, E4M3, { BLOCKS }, false, { LINES }, { STAGES }, true>;
    moe_fused_quant_few_down_bf16 { type T = bf16; } [THREADS, 1; Sm90a] => fused_quant_few::<T, E4M3, { BLOCKS }, false, { LINES }, { STAGES }, true>;
    moe_fused_quant_few_down_sorted_f16 { type T = f16; } [THREADS, 1; Sm90a] => fused_quant_few::<T, E4M3, { BLOCKS }, false, { LINES }, { STAGES }, false>;
    moe_fused_quant_few_down_sorted_bf16 { type T = bf16; } [THREADS, 1; Sm90a] => fused_quant_few::<T, E4M3, { BLOCKS }, false, { LINES }, { STAGES }, false>;
    moe_fused_quant_few_up_rows_e4m3_f16 { type T = f16; } [THREADS, 1; Sm90a] => fused_quant_few::<T, E4M3, { ROWS }, true, { LINES }, { STAGES }, true>;
    moe_fused_quant_few_up_rows_e4m3_bf16 { type T = bf16; } [THREADS, 1; Sm90a] => fused_quant_few::<T, E4M3, { ROWS }, true, { LINES }, { STAGES }, true>;
    moe_fused_quant_few_up_rows_i8_f16 { type T = f16; } [THREADS, 1; Sm90a] => fused_quant_few::<T, i8, { ROWS }, true, { LINES }, { STAGES }, true>;
    moe_fused_quant_few_up_rows_i8_bf16 { type T = bf16; } [THREADS, 1; Sm90a] => fused_quant_few::<T, i8, { ROWS }, true, { LINES }, { STAGES }, true>;
    moe_fused_quant_few_down_rows_e4m3_f16 { type T = f16; } [THREADS, 1; Sm90a] => fused_quant_few::<T, E4M3, { ROWS }, false, { LINES }, { STAGES }, true>;
    moe_fused_quant_few_down_rows_e4m3_bf16 { type T = bf16; } [THREADS, 1; Sm90a] => fused_quant_few::<T, E4M3, { ROWS }, false, { LINES }, { STAGES }, true>;
    moe_fused_quant_few_down_rows_i8_f16 { type T = f16; } [THREADS, 1; Sm90a] => fused_quant_few::<T, i8, { ROWS }, false, { LINES }, { STAGES }, true>;
    moe_fused_quant_few_down_rows_i8_bf16 { type T = bf16; } [THREADS, 1; Sm90a] => fused_quant_few::<T, i8, { ROWS }, false, { LINES }, { STAGES }, true>;
}
