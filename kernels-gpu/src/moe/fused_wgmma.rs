//! Products of the fused block on Hopper: a persistent, warp-specialised grouped product with `wgmma` and the copy engine.
//!
//! # Orientation
//! The weights are the 64-row side of `m64nNk16` and the pairs of an expert the N side, so that N follows the number of
//! pairs: 8 for one of them, up to 176, and no weight is multiplied with padding that a classic tile of 128 rows of tokens
//! would have. The consumer warpgroups of a block take `GROUPS · TILES · 64` rows of weights together, or `TILES · 64` in turn
//! (`ALTERNATE`): small items suit few tokens, where what counts is that all multiprocessors have equally much to read.
//!
//! Of every 16 rows of weights 8 are gates and 8 the values that belong to them: the copy engine does that with a tensor
//! map of five dimensions (`[experts, outputs / 8, gate or value, 8, k]`, a box takes both of a number of groups of 8).
//! `wgmma` gives a thread rows `g` and `g + 8` of 16, which then are a gate and its value: the activation is element by
//! element, in registers. Where there are no values the boxes reach beyond the tensor, and the copy engine puts zeroes there.
//! For the second product the map is `[experts, 1, outputs / 8, 8, k]`, with boxes of as many rows.
//!
//! # Pipeline
//! A ring of stages of `LINES` times 64 elements of K in shared memory, 128-byte swizzle. A producer warpgroup fills it: one thread has
//! the copy engine fetch the weights, all of them gather the rows of `x` or `h` by 16-byte `cp.async`, which take each row
//! from where it is and fill what is not there with zeroes; both are counted by one mbarrier a stage. Two consumer
//! warpgroups multiply, half of the rows each, and give stages back: when the next stage's products are under way, or at once
//! (`NOW`), which is better where the products are short and reading is what takes time. If they alternate, each
//! multiplies a whole item while the other finishes its last; mbarriers hand over, because a group that is more than one
//! round of the ring behind could not tell the phases of a stage apart.
//!
//! The second product waits for `h` only when the ring is full of weights already ([`dependent_launch`]), so the stream of
//! weights does not end between the two.
//!
//! # Work
//! Blocks of threads stay, one a multiprocessor, and take items `blockIdx + i · gridDim`. An item is a tile of rows of an
//! expert and a share of its pairs. An expert's `c` pairs are dealt out to `ceil(c / PAIRS)` shares of equal size, rounded
//! up to 8. Items are ordered by expert, tile, share: shares that read the same weights run side by side, and the weights
//! come from memory once. Which item is which follows from a prefix sum over experts that every block makes for itself;
//! the routing stays on the device.
//!
//! The sum over K runs in one order whatever N is, so a pair's result depends on nothing else in the batch.

use super::fused::{HALVES, PLAIN};
use super::pairs::{NOWHERE, Pairs, existing_tokens};
use crate::tensor_float::TensorFloat;
use cuda_std::shared::Carver;
use cuda_std::tma::{self, Swizzle, TensorMap};
use cuda_std::vec::B128;
use cuda_std::wgmma::{self, Accumulator, Descriptor, Input, K};
use cuda_std::{
    Global, GlobalMut, Shared, atomic, bf16, cp_async, dependent_launch, entries, f16, float, mbarrier, mma, thread,
    unroll, warp,
};

/// Consumer warpgroups.
pub const GROUPS: usize = 2;
/// Threads that fill the ring.
const PRODUCERS: usize = 128;
/// Threads of a block.
pub const THREADS: usize = PRODUCERS + GROUPS * 128;
/// Elements of K of a stage: a line of the swizzle.
pub const STEP: usize = 64;
/// The most experts of a device.
pub const MAX_BINS: usize = 1024;
/// What Hopper has of shared memory for a block.
pub const MAX_SHARED_BYTES: usize = 227 << 10;
/// The place in the sorted list of an expert's first pair is a multiple of this.
pub const SORT_BLOCK: usize = 8;

/// The most pairs without a sorted list.
pub const DIRECT_PAIRS: usize = 128;

/// Rows of weights of an item.
pub const fn rows(tiles: usize, alternate: bool) -> usize {
    if alternate { tiles * 64 } else { GROUPS * tiles * 64 }
}

/// Dynamic shared memory; every part may begin at the next multiple of 16.
pub const fn shared_bytes(rows: usize, pairs: usize, lines: usize, stages: usize, bins: usize) -> usize {
    stages * ((rows + pairs) * lines * STEP * 2 + 2 * 8)
        + GROUPS * 8
        + GROUPS * pairs * 8
        + 16 * 4
        + 3 * (bins + 4) * 4
        + DIRECT_PAIRS * 12
        + 12 * 16
}

/// What both products need to know.
struct Job<T> {
    h: GlobalMut<T>,
    partial: GlobalMut<f32>,
    x: Global<T>,
    map: *const TensorMap,
    shared_map: *const TensorMap,
    bias: Global<T>,
    biased: bool,
    shared_bias: Global<T>,
    shared_biased: bool,
    sorted_ids: Global<i32>,
    sorted_weights: Global<f32>,
    /// Whether results are added up where they belong as they come, instead of being kept apart.
    unordered: bool,
    slots: u32,
    /// The same without sorting.
    direct: bool,
    own_ids: Shared<u32>,
    own_weights: Shared<f32>,
    local: u32,
    n: u32,
    k: u32,
    layout: u32,
    activation: Activation,
    /// For each expert the shares up to its last; its pairs, and where they start in the sorted list.
    ends: Shared<u32>,
    counts: Shared<u32>,
    starts: Shared<u32>,
    bins: u32,
    /// Tiles of rows of an expert.
    tiles: u32,
}

/// An activation as `g' · sigmoid(g' · (a + b g'²)) · (u' + c)`, with bounds on `g'` and `u'`; or with `g'` for the sigmoid.
/// That is silu, swiglu_oai, relu² and, as `(1 + tanh y) / 2 = sigmoid(2 y)`, gelu_tanh: a formula small enough to be
/// unrolled over all sums of a thread.
#[derive(Clone, Copy)]
pub(super) struct Activation {
    a: f32,
    b: f32,
    least: f32,
    most: f32,
    /// All ones if so.
    squared: u32,
    bound: f32,
    c: f32,
}

impl Activation {
    #[inline(always)]
    pub(super) fn new(kind: u32, alpha: f32, limit: f32, gated: bool) -> Self {
        let inf = f32::INFINITY;
        let oai = kind == 4;
        Self {
            a: if kind == 2 {
                1.595_769
            } else if oai {
                alpha
            } else {
                1.0
            },
            b: if kind == 2 { 0.071_354_814 } else { 0.0 },
            least: if kind == 3 { 0.0 } else { -inf },
            most: if oai { limit } else { inf },
            squared: if kind == 3 { u32::MAX } else { 0 },
            bound: if oai { limit } else { inf },
            c: if oai || !gated { 1.0 } else { 0.0 },
        }
    }

    /// Without a branch, so that the chains of many sums overlap.
    #[inline(always)]
    pub(super) fn gated(self, gate: f32, up: f32) -> f32 {
        let g = float::max_propagate(least(gate, self.most), self.least);
        let s = float::fast::sigmoid(g * float::fma(self.b * g, g, self.a));
        let s = f32::from_bits(s.to_bits() & !self.squared | g.to_bits() & self.squared);
        let up = float::max_propagate(least(up, self.bound), -self.bound);
        g * s * (up + self.c)
    }
}

/// The smaller one, or NaN.
#[inline(always)]
fn least(a: f32, b: f32) -> f32 {
    -float::max_propagate(-a, -b)
}

/// A place in the ring.
#[derive(Clone, Copy)]
struct Ring<const STAGES: usize> {
    stage: u32,
    phase: u32,
}

impl<const STAGES: usize> Ring<STAGES> {
    #[inline(always)]
    fn new() -> Self {
        Self { stage: 0, phase: 0 }
    }

    #[inline(always)]
    fn advance(&mut self) {
        self.stage += 1;
        if self.stage == STAGES as u32 {
            self.stage = 0;
            self.phase ^= 1;
        }
    }

    /// Past so many stages, which are another warpgroup's.
    #[inline(always)]
    fn skip(&mut self, stages: u32) {
        let to = self.stage + stages;
        self.stage = to % STAGES as u32;
        self.phase ^= (to / STAGES as u32) & 1;
    }
}

/// An item of work.
#[derive(Clone, Copy)]
struct Work {
    bin: u32,
    /// The tile of rows.
    tile: u32,
    /// Where the share starts in the sorted list, and its pairs.
    first: u32,
    count: u32,
}

impl<T: TensorFloat + Input> Job<T> {
    /// The last share's end: how many there are.
    #[inline(always)]
    unsafe fn shares(&self) -> u32 {
        if self.bins == 0 { 0 } else { self.ends.get(self.bins - 1) }
    }

    /// Item `item`; all lanes of a warp take part.
    #[inline(always)]
    unsafe fn find(&self, item: u32) -> Work {
        // SAFETY: there are outputs, hence tiles.
        core::hint::assert_unchecked(self.tiles != 0);
        let q = item / self.tiles;
        // The first expert whose shares end beyond `q`: 32 candidates at a time.
        let lane = warp::lane_id();
        let (mut bin, mut len) = (0, self.bins);
        while len > 32 {
            let each = len.div_ceil(32);
            let probe = bin + (lane + 1) * each - 1;
            let before = probe < bin + len && self.ends.get(probe) <= q;
            let skipped = warp::warp_vote_ballot(warp::FULL, before).count_ones() * each;
            bin += skipped;
            len = (len - skipped).min(each);
        }
        let before = lane < len && self.ends.get(bin + lane) <= q;
        bin += warp::warp_vote_ballot(warp::FULL, before).count_ones();
        let begin = if bin == 0 { 0 } else { self.ends.get(bin - 1) };
        let shares = self.ends.get(bin) - begin;
        // SAFETY: an expert that holds an item has shares.
        core::hint::assert_unchecked(shares != 0);
        let r = item - begin * self.tiles;
        let (tile, share) = (r / shares, r % shares);
        let count = self.counts.get(bin);
        let size = count.div_ceil(shares).next_multiple_of(8);
        let first = share * size;
        Work { bin, tile, first: self.starts.get(bin) + first, count: (count - first).min(size) }
    }

    /// The pair at a place of the sorted list.
    #[inline(always)]
    unsafe fn pair(&self, at: u32) -> u32 {
        if self.direct { self.own_ids.get(at) } else { self.sorted_ids.get(at) as u32 }
    }

    /// The weight of the pair there.
    #[inline(always)]
    unsafe fn weight(&self, at: u32) -> f32 {
        if self.direct { self.own_weights.get(at) } else { self.sorted_weights.get(at) }
    }

    #[inline(always)]
    fn map(&self, bin: u32) -> (*const TensorMap, i32) {
        if bin < self.local { (self.map, bin as i32) } else { (self.shared_map, (bin - self.local) as i32) }
    }

    /// Where a tile's box starts; see the [module](self).
    #[inline(always)]
    fn coordinates<const UP: bool>(&self, rows: usize, k: u32, tile: u32, bin: i32) -> [i32; 5] {
        let group = (tile * (rows / 16) as u32) as i32;
        if UP { [k as i32, 0, 0, group, bin] } else { [k as i32, 0, 2 * group, 0, bin] }
    }

    #[inline(always)]
    unsafe fn bias(&self, bin: u32, rows: u32, row: u32) -> f32 {
        let (bias, biased, index) = if bin < self.local {
            (self.bias, self.biased, bin)
        } else {
            (self.shared_bias, self.shared_biased, bin - self.local)
        };
        if biased && row < rows { bias.get(index as usize * rows as usize + row as usize).to_f32() } else { 0.0 }
    }
}

/// One of the products; see [`Args`]. `UP`: the first. Grid: any number of blocks; block: [`THREADS`]; shared memory:
/// [`shared_bytes`].
#[inline(always)]
unsafe fn fused_wgmma<
    T: TensorFloat + Input,
    const UP: bool,
    const ALTERNATE: bool,
    const NOW: bool,
    const TILES: usize,
    const PAIRS: usize,
    const LINES: usize,
    const STAGES: usize,
    const DIRECT: bool,
>(
    h: *mut T,
    partial: *mut f32,
    x: *const T,
    x_row: usize,
    map: *const TensorMap,
    shared_map: *const TensorMap,
    bias: *const T,
    shared_bias: *const T,
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
    activation: u32,
    alpha: f32,
    limit: f32,
    unordered: u32,
) {
    let tid = thread::thread_idx_x();
    let warp_id = warp::warp_id();
    let lane = warp::lane_id();
    let mut carver = Carver::new();
    let weights = carver.take_aligned::<T>(STAGES * LINES * rows(TILES, ALTERNATE) * STEP, 1024);
    let operands = carver.take::<T>(STAGES * LINES * PAIRS * STEP);
    let full = carver.take::<u64>(STAGES);
    let empty = carver.take::<u64>(STAGES);
    let turns = carver.take::<u64>(GROUPS);
    let ids = carver.take::<u32>(GROUPS * PAIRS);
    let scales = carver.take::<f32>(GROUPS * PAIRS);
    let sums = carver.take::<u32>(16);
    let ends = carver.take::<u32>(bins as usize + 4);
    let counts = carver.take::<u32>(bins as usize + 4);
    let starts = carver.take::<u32>(bins as usize + 4);
    let own_bins = carver.take::<u32>(DIRECT_PAIRS);
    let own_ids = carver.take::<u32>(DIRECT_PAIRS);
    let own_weights = carver.take::<f32>(DIRECT_PAIRS);
    let outputs = const { if UP { rows(TILES, ALTERNATE) as u32 / 2 } else { rows(TILES, ALTERNATE) as u32 } };
    let job = Job {
        h: GlobalMut::new(h),
        partial: GlobalMut::new(partial),
        x: Global::new(x),
        map,
        shared_map,
        bias: Global::new(bias),
        biased: !bias.is_null(),
        shared_bias: Global::new(shared_bias),
        shared_biased: !shared_bias.is_null(),
        sorted_ids: Global::new(sorted_ids),
        sorted_weights: Global::new(sorted_weights),
        unordered: unordered != 0,
        slots,
        direct: DIRECT,
        own_ids,
        own_weights,
        local,
        n,
        k,
        layout,
        activation: Activation::new(activation, alpha, limit, layout != PLAIN),
        ends,
        counts,
        starts,
        bins,
        tiles: n.div_ceil(outputs),
    };
    if tid == 0 {
        for s in 0..STAGES {
            // The weights, and each producer's rows.
            mbarrier::init(full.address(s), 1 + PRODUCERS as u32);
            mbarrier::init(empty.address(s), if ALTERNATE { 4 } else { 4 * GROUPS as u32 });
        }
        for g in 0..GROUPS {
            mbarrier::init(turns.address(g), 4);
        }
        mbarrier::fence_init();
        tma::prefetch_map(map);
        tma::prefetch_map(shared_map);
    }
    if UP {
        // The sorted list may still be in the making.
        dependent_launch::wait();
        dependent_launch::launch_dependents();
    }
    let each = bins.div_ceil(THREADS as u32);
    let (from, to) = ((tid * each).min(bins), ((tid + 1) * each).min(bins));
    if DIRECT {
        let map = Pairs {
            topk_ids: Global::new(topk_ids),
            expert_map: Global::new(expert_map),
            mapped: !expert_map.is_null(),
            top_k,
            slots,
            experts,
            local,
            shared: bins - local,
        };
        let count = (existing_tokens(tokens, num_tokens) * slots).min(DIRECT_PAIRS as u32);
        let bin = if tid < count { map.bin(tid) } else { NOWHERE };
        if tid < count {
            own_bins.set(tid, bin);
        }
        for bin in from..to {
            counts.set(bin, 0);
        }
        thread::sync_threads();
        if bin < bins {
            // Pairs of lower experts, those of this one before this pair, and all of this one.
            let (mut start, mut rank, mut all) = (0, 0, 0);
            for other in 0..count {
                let b = own_bins.get(other);
                start += (b < bin) as u32;
                rank += (b == bin && other < tid) as u32;
                all += (b == bin) as u32;
            }
            own_ids.set(start + rank, tid);
            if !UP {
                // SAFETY: tokens with pairs have slots.
                core::hint::assert_unchecked(slots != 0);
                let (token, slot) = (tid / slots, tid % slots);
                let listed = token as usize * top_k as usize + slot as usize;
                own_weights.set(start + rank, if slot < top_k { Global::new(topk_weights).get(listed) } else { 1.0 });
            }
            if rank == 0 {
                counts.set(bin, all);
                starts.set(bin, start);
            }
        }
        thread::sync_threads();
    } else {
        let (expert_counts, offsets) = (Global::new(expert_counts), Global::new(offsets));
        for bin in from..to {
            counts.set(bin, expert_counts.get(bin) as u32);
            starts.set(bin, offsets.get(bin) as u32);
        }
    }

    // Shares of the experts, added up: a thread for some neighbouring ones.
    let mut sum = 0;
    for bin in from..to {
        sum += counts.get(bin).div_ceil(PAIRS as u32);
    }
    let up_to = warp::scan(sum, |a, b| a + b);
    if lane == 31 {
        sums.set(warp_id, up_to);
    }
    thread::sync_threads();
    let mut end = up_to - sum;
    for w in 0..warp_id {
        end += sums.get(w);
    }
    for bin in from..to {
        end += counts.get(bin).div_ceil(PAIRS as u32);
        ends.set(bin, end);
    }
    thread::sync_threads();
    let items = job.shares() * job.tiles;
    let grid = thread::grid_dim_x();

    if warp_id < (PRODUCERS / 32) as u32 {
        wgmma::decrease_registers::<40>();
        let mut ring = Ring::<STAGES>::new();
        let line_bytes = const { (rows(TILES, ALTERNATE) * STEP * 2) as u32 };
        let stage_bytes = LINES as u32 * line_bytes;
        let fetch = |ring: Ring<STAGES>, work: Work, k0: u32| {
            let bar = full.address(ring.stage);
            let (map, bin) = job.map(work.bin);
            mbarrier::arrive_expect_tx(bar, stage_bytes);
            unroll::<LINES>(|l| {
                // Beyond the end of K come zeroes.
                let to = weights.address(0u32) + ring.stage * stage_bytes + l as u32 * line_bytes;
                let at = job.coordinates::<UP>(rows(TILES, ALTERNATE), k0 + (l * STEP) as u32, work.tile, bin);
                tma::load_tensor::<5>(to, map, at, bar);
            });
        };
        let mut item = thread::block_idx_x();
        // Stages whose weights are on their way before `h` is there.
        let mut ahead = 0;
        if !UP {
            if item < items {
                let work = job.find(item);
                ahead = k.div_ceil((LINES * STEP) as u32).min(STAGES as u32);
                if tid == 0 {
                    let mut at = ring;
                    for s in 0..ahead {
                        fetch(at, work, s * (LINES * STEP) as u32);
                        at.advance();
                    }
                }
            }
            dependent_launch::wait();
            dependent_launch::launch_dependents();
        }
        // A thread copies 16 bytes of every 16th row.
        let (chunk, low) = (tid % 8, tid / 8);
        let stride = if UP { x_row } else { k as usize };
        let to = operands.address(0u32) + Swizzle::B128.apply(low * 128 + chunk * 16);
        while item < items {
            let work = job.find(item);
            // Rows of zeroes make up for what a product takes more than there is.
            let wide = columns(PAIRS as u32, work.count);
            let mut source = [0u32; 16];
            unroll::<16>(|i| {
                let row = low + 16 * i as u32;
                if (i as u32 * 16) < PAIRS as u32 && row < work.count {
                    let pair = job.pair(work.first + row);
                    // SAFETY: tokens with pairs have slots.
                    core::hint::assert_unchecked(slots != 0);
                    source[i] = if UP { pair / slots } else { pair };
                }
            });
            let mut k0 = 0;
            while k0 < k {
                mbarrier::wait_parity(empty.address(ring.stage), ring.phase ^ 1);
                if ahead > 0 {
                    ahead -= 1;
                } else if tid == 0 {
                    fetch(ring, work, k0);
                }
                let to = to + ring.stage * (LINES * PAIRS * STEP * 2) as u32;
                unroll::<LINES>(|l| {
                    let column = k0 + (l * STEP) as u32 + 8 * chunk;
                    unroll::<16>(|i| {
                        let row = low + 16 * i as u32;
                        if (i as u32 * 16) < PAIRS as u32 && row < wide {
                            let bytes = if row < work.count && column < k { 16 } else { 0 };
                            let at = source[i] as usize * stride + if bytes > 0 { column as usize } else { 0 };
                            let from = if UP { job.x.ptr(at) } else { job.h.ptr(at).cast_const() };
                            cp_async::copy_16_zfill(to + (l * PAIRS * STEP * 2 + i * 2048) as u32, from, bytes);
                        }
                    });
                });
                cp_async::arrive(full.address(ring.stage));
                ring.advance();
                k0 += (LINES * STEP) as u32;
            }
            item += grid;
        }
        // The block's shared memory must outlive its copies.
        cp_async::wait_group::<0>();
    } else {
        wgmma::increase_registers::<232>();
        let group = warp_id / 4 - 1;
        let within = if ALTERNATE { 0 } else { group };
        let consumer = Consumer {
            weights: Descriptor::<K>::new(weights.address(0u32) + within * (TILES * 64 * STEP * 2) as u32),
            operands: Descriptor::<K>::new(operands.address(0u32)),
            full,
            empty,
            turns,
            ids: ids.offset(group * PAIRS as u32),
            scales: scales.offset(group * PAIRS as u32),
            group,
            first_row: within * (TILES * 64) as u32 + warp_id % 4 * 16,
        };
        let mut ring = Ring::<STAGES>::new();
        let mut item = thread::block_idx_x();
        let (mut stride, steps) = (grid, k.div_ceil((LINES * STEP) as u32));
        if ALTERNATE {
            item += group * grid;
            stride = GROUPS as u32 * grid;
            ring.skip(group * steps);
        }
        let mut round = 0;
        while item < items {
            let work = job.find(item);
            let wide = columns(PAIRS as u32, work.count);
            if ALTERNATE {
                // The phase of a stage says nothing to who is more than one behind. The first turn is the first group's.
                mbarrier::wait_parity(turns.address(group), (round & 1) ^ (group == 0) as u32);
                round += 1;
            }
            macro_rules! products {
                ($($half:literal)*) => {
                    match wide {
                        $(w if w == 2 * $half => consumer
                            .item::<T, [f32; $half], UP, ALTERNATE, NOW, TILES, PAIRS, LINES, STAGES>(
                                &job, &mut ring, work),)*
                        _ => {}
                    }
                };
            }
            match PAIRS {
                16 => products!(4 8),
                64 => products!(4 8 16 32),
                _ => products!(16 32 48 56 64 68 72 80 88),
            }
            if ALTERNATE {
                ring.skip(steps);
            }
            item += stride;
        }
    }
}

/// The columns of the products that a share of `count` pairs takes.
#[inline(always)]
const fn columns(pairs: u32, count: u32) -> u32 {
    match count {
        0..=8 if pairs <= 64 => 8,
        9..=16 if pairs <= 64 => 16,
        0..=32 => 32,
        33..=64 => 64,
        65..=96 => 96,
        97..=112 => 112,
        113..=128 => 128,
        129..=136 => 136,
        137..=144 => 144,
        145..=160 => 160,
        _ => 176,
    }
}

/// What a consumer warpgroup works with.
struct Consumer {
    weights: Descriptor<K>,
    operands: Descriptor<K>,
    full: Shared<u64>,
    empty: Shared<u64>,
    /// Warpgroups that alternate: whose turn it is to multiply.
    turns: Shared<u64>,
    /// Pairs of the share, and their weights.
    ids: Shared<u32>,
    scales: Shared<f32>,
    group: u32,
    /// The warp's first row within the tile.
    first_row: u32,
}

impl Consumer {
    /// The warp is done with a stage.
    #[inline(always)]
    unsafe fn give_back(&self, stage: u32) {
        warp::sync_warp(warp::FULL);
        if warp::lane_id() == 0 {
            mbarrier::arrive(self.empty.address(stage));
        }
    }

    /// Multiplies an item and finishes it.
    #[inline(always)]
    unsafe fn item<
        T: TensorFloat + Input,
        A: Accumulator + AsRef<[f32]>,
        const UP: bool,
        const ALTERNATE: bool,
        const NOW: bool,
        const TILES: usize,
        const PAIRS: usize,
        const LINES: usize,
        const STAGES: usize,
    >(
        &self,
        job: &Job<T>,
        ring: &mut Ring<STAGES>,
        work: Work,
    ) {
        let rows = const { rows(TILES, ALTERNATE) };
        let mine = thread::thread_idx_x() % 128;
        // What the end needs is on its way while the products run.
        let (mut pair, mut scale) = ([0u32; 2], [0f32; 2]);
        unroll::<2>(|i| {
            let column = mine + 128 * i as u32;
            if column < work.count {
                pair[i] = job.pair(work.first + column);
                if !UP {
                    scale[i] = job.weight(work.first + column);
                    if job.unordered {
                        // SAFETY: tokens with pairs have slots.
                        core::hint::assert_unchecked(job.slots != 0);
                        pair[i] /= job.slots;
                    }
                }
            }
        });

        let mut acc = [A::zero(); TILES];
        let mut before = ring.stage;
        let mut k0 = 0;
        loop {
            mbarrier::wait_parity(self.full.address(ring.stage), ring.phase);
            // `cp.async` writes as ordinary instructions do.
            tma::fence_async();
            let a = self.weights.offset(ring.stage * (LINES * rows * STEP * 2) as u32);
            let b = self.operands.offset(ring.stage * (LINES * PAIRS * STEP * 2) as u32);
            unroll::<LINES>(|l| {
                let (a, b) = (a.offset((l * rows * STEP * 2) as u32), b.offset((l * PAIRS * STEP * 2) as u32));
                unroll::<TILES>(|s| {
                    acc[s].multiply::<T, 4, _, _>(a.offset((s * 64 * STEP * 2) as u32), b, l > 0 || k0 > 0);
                });
            });
            // The step before is done: its stage can be filled again.
            match TILES * LINES {
                _ if NOW => wgmma::wait::<0>(&mut acc[0]),
                1 => wgmma::wait::<1>(&mut acc[0]),
                2 => wgmma::wait::<2>(&mut acc[0]),
                _ => wgmma::wait::<4>(&mut acc[0]),
            }
            if NOW {
                self.give_back(ring.stage);
            } else if k0 > 0 {
                self.give_back(before);
            }
            before = ring.stage;
            ring.advance();
            k0 += (LINES * STEP) as u32;
            if k0 >= job.k {
                break;
            }
        }
        if ALTERNATE {
            warp::sync_warp(warp::FULL);
            if warp::lane_id() == 0 {
                mbarrier::arrive(self.turns.address(1 - self.group));
            }
        }
        wgmma::wait::<0>(&mut acc[0]);
        unroll::<TILES>(|s| acc[s].pin());
        if !NOW {
            self.give_back(before);
        }

        // Everybody is done with the last item's.
        thread::sync_named(1 + self.group, 128);
        unroll::<2>(|i| {
            let column = mine + 128 * i as u32;
            if column < PAIRS as u32 {
                self.ids.set(column, pair[i]);
                if !UP {
                    self.scales.set(column, scale[i]);
                }
            }
        });
        thread::sync_named(1 + self.group, 128);
        for s in 0..TILES {
            let row = work.tile * rows as u32 + self.first_row + s as u32 * 64;
            if UP {
                self.store_up::<T, A>(job, work, row, acc[s].as_ref());
            } else {
                self.store_down::<T, A>(job, work, row, acc[s].as_ref());
            }
        }
    }

    /// Of 16 rows the first 8 are gates, the others their values. Pairs of sums in a thread belong to neighbouring columns
    /// (tokens); a transposition in registers makes them neighbouring outputs.
    #[inline(always)]
    unsafe fn store_up<T: TensorFloat + Input, A: Accumulator>(
        &self,
        job: &Job<T>,
        work: Work,
        row: u32,
        sums: &[f32],
    ) {
        let (g, t) = (warp::lane_id() / 4, warp::lane_id() % 4);
        let first = row / 2;
        let fits = first < job.n;
        let output = (first + g).min(job.n - 1);
        let rows = if job.layout == PLAIN { job.n } else { 2 * job.n };
        let [gate, value] = match job.layout {
            PLAIN => [output, rows],
            HALVES => [output, output + job.n],
            _ => [2 * output, 2 * output + 1],
        };
        let (gates, values) = (job.bias(work.bin, rows, gate), job.bias(work.bin, rows, value));
        for j in 0..A::N / 8 {
            let v = |c: usize| job.activation.gated(sums[4 * j + c] + gates, sums[4 * j + 2 + c] + values);
            let [a, b] = T::pair_from_f32([v(0), v(1)]);
            let word = mma::movmatrix_trans(T::pack(a, b));
            let column = 8 * j as u32 + g;
            let at = self.ids.get(column) as usize * job.n as usize + (first + 2 * t) as usize;
            if fits && column < work.count {
                job.h.set_as::<u32>(at, word);
            }
        }
    }

    /// A thread has rows `g` and `g + 8` of two columns. Four lanes with neighbouring `g` swap sums until each has four
    /// neighbouring rows of one column, which are 16 bytes of `partial`.
    #[inline(always)]
    unsafe fn store_down<T: TensorFloat + Input, A: Accumulator>(
        &self,
        job: &Job<T>,
        work: Work,
        row: u32,
        sums: &[f32],
    ) {
        let lane = warp::lane_id();
        let (odd, high) = (lane & 4 != 0, lane & 8 != 0);
        let row = row + (lane & 8) + (lane & 16) / 4;
        let fits = row < job.n;
        let mut bias = [0f32; 4];
        if fits {
            for i in 0..4 {
                bias[i] = job.bias(work.bin, job.n, row + i as u32);
            }
        }
        let first = 2 * (lane % 4) + odd as u32;
        for j in 0..A::N / 8 {
            let mut v = [sums[4 * j], sums[4 * j + 1], sums[4 * j + 2], sums[4 * j + 3]];
            unroll::<2>(|p| {
                let got = warp::shfl_xor(if odd { v[2 * p] } else { v[2 * p + 1] }, 4);
                v[2 * p] = if odd { got } else { v[2 * p] };
                v[2 * p + 1] = if odd { v[2 * p + 1] } else { got };
            });
            unroll::<2>(|p| {
                let got = warp::shfl_xor(if high { v[p] } else { v[2 + p] }, 8);
                v[p] = if high { got } else { v[p] };
                v[2 + p] = if high { v[2 + p] } else { got };
            });
            let column = 8 * j as u32 + first;
            let (pair, scale) = (self.ids.get(column), self.scales.get(column));
            let at = pair as usize * job.n as usize + row as usize;
            for i in 0..4 {
                v[i] = (v[i] + bias[i]) * scale;
            }
            if fits && column < work.count {
                if job.unordered {
                    atomic::reduce_add_v4_f32(job.partial.ptr(at), v);
                } else {
                    job.partial.set_as(at, B128(v));
                }
            }
        }
    }
}

entries! {
    /// Arguments of both products.
    pub struct Args<T>(
        /// `[tokens * slots, intermediate]`: written by the first product, read by the second.
        h: *mut T,
        /// `[tokens * slots, hidden]`: written by the second product.
        partial: *mut f32,
        /// `[tokens, hidden]`, rows `x_row` apart.
        x: *const T, x_row: usize,
        /// The weights of the routed experts and of the shared ones; see the [module](self).
        map: TensorMap, shared_map: TensorMap,
        /// `[local, rows]` or null; `[shared, rows]` or null.
        bias: *const T, shared_bias: *const T,
        /// From [`sort`](super::sort), in blocks of [`SORT_BLOCK`].
        sorted_ids: *const i32, sorted_weights: *const f32, offsets: *const i32, expert_counts: *const i32,
        /// See [`fused::Args`](super::fused::Args); read where there is no sorted list.
        topk_ids: *const i32, topk_weights: *const f32, expert_map: *const i32, num_tokens: *const i32, tokens: u32,
        top_k: u32, slots: u32, experts: u32,
        /// Routed experts of this device; those and the shared ones, at most [`MAX_BINS`].
        local: u32, bins: u32,
        /// Outputs and inner dimension, multiples of 8.
        n: u32, k: u32,
        /// See [`fused::Args`](super::fused::Args).
        layout: u32, activation: u32, alpha: f32, limit: f32,
        /// 1 if results of the second product are added to `partial`, then `[tokens, hidden]` and zeroed, in any order.
        unordered: u32,
    );
    moe_fused_wgmma_up_t16_f16 { type T = f16; } [THREADS, 1; Sm90a] => fused_wgmma::<T, true, true, true, 1, 16, 4, 5, true>;
    moe_fused_wgmma_up_t64_f16 { type T = f16; } [THREADS, 1; Sm90a] => fused_wgmma::<T, true, false, true, 1, 64, 2, 4, false>;
    moe_fused_wgmma_up_t176_f16 { type T = f16; } [THREADS, 1; Sm90a] => fused_wgmma::<T, true, false, false, 2, 176, 1, 4, false>;
    moe_fused_wgmma_up_t16_bf16 { type T = bf16; } [THREADS, 1; Sm90a] => fused_wgmma::<T, true, true, true, 1, 16, 4, 5, true>;
    moe_fused_wgmma_up_t64_bf16 { type T = bf16; } [THREADS, 1; Sm90a] => fused_wgmma::<T, true, false, true, 1, 64, 2, 4, false>;
    moe_fused_wgmma_up_t176_bf16 { type T = bf16; } [THREADS, 1; Sm90a] => fused_wgmma::<T, true, false, false, 2, 176, 1, 4, false>;
    moe_fused_wgmma_down_t16_f16 { type T = f16; } [THREADS, 1; Sm90a] => fused_wgmma::<T, false, true, true, 1, 16, 4, 5, true>;
    moe_fused_wgmma_down_t64_f16 { type T = f16; } [THREADS, 1; Sm90a] => fused_wgmma::<T, false, false, true, 1, 64, 2, 4, false>;
    moe_fused_wgmma_down_t176_f16 { type T = f16; } [THREADS, 1; Sm90a] => fused_wgmma::<T, false, false, false, 2, 176, 1, 4, false>;
    moe_fused_wgmma_down_t16_bf16 { type T = bf16; } [THREADS, 1; Sm90a] => fused_wgmma::<T, false, true, true, 1, 16, 4, 5, true>;
    moe_fused_wgmma_down_t64_bf16 { type T = bf16; } [THREADS, 1; Sm90a] => fused_wgmma::<T, false, false, true, 1, 64, 2, 4, false>;
    moe_fused_wgmma_down_t176_bf16 { type T = bf16; } [THREADS, 1; Sm90a] => fused_wgmma::<T, false, false, false, 2, 176, 1, 4, false>;
}
