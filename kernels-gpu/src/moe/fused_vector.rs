//! The fused block for very few pairs, in one launch: two products of matrices with vectors, and the sum over slots.
//!
//! All that takes time is reading weights, so nothing may stop their stream: not the launch of a second kernel, not the wait for `h`,
//! not the end of a block's share. Each warp has a ring of stages in shared memory of its own, which its first lane has the copy engine
//! fill with pieces of rows of weights, as they lie in memory. Which pieces those are follows from the ids alone; so while the last rows of
//! the first product are multiplied, all of the ring (some 200 KiB a multiprocessor, 5 µs at the rate of memory) is already under way to hold the
//! second product's weights, and goes on arriving while the blocks exchange `h`.
//!
//! # Shares
//! A unit of the first product is an output of a pair: a row of gates and a row of values; of the second two rows of weights of a pair. A block takes
//! the same rows of the second product for all pairs, so that it has all there is to add up for its outputs: no partial results leave it. Rows come in
//! whole numbers; whoever has one more of the second product has less of the first, so that all read equally much ([`Share`]). Within a block
//! pieces of [`STEPS`] times 256 elements of two rows go to warps in turn.
//!
//! # Products
//! Tensor cores, with one product of which most is thrown away: a warp's lanes read 16 bytes each of a row, of another row and of the vector, all at
//! the same place, and call them the fragments of a product of two times eight rows by eight columns. A sum on the diagonal is then one of
//! what four lanes have read, of a row with the vector, and all of them together are the row's product. That takes 5 instructions for 1 KiB of
//! weights where multiply-adds take 50. Sums of a piece go to shared memory, and are added up in the order of K.
//!
//! # Blocks that wait for each other
//! Each share has a word in the workspace. Who begins it claims the word, who has stored all of its `h` says so there; a block goes on to the second product when
//! all words say so. Blocks need not run at the same time for that: who has waited for long claims shares that nobody began and computes
//! them, from memory without the ring. Thus blocks wait only for such as run. A claim is a number that no other launch has, so what the words hold before does
//! not matter; replays of a graph repeat it, so the last block to see all shares done zeroes the words.

use super::fused::{Expert, HALVES, PLAIN, Weights};
use super::fused_wgmma::Activation;
use super::pairs::{INVALID, NOWHERE, Pairs, existing_tokens};
use crate::tensor_float::TensorFloat;
use cuda_std::atomic::{AcqRel, Acquire, Block, Device, Relaxed, Release};
use cuda_std::shared::Carver;
use cuda_std::vec::B128;
use cuda_std::{
    Global, GlobalMut, Shared, bf16, dependent_launch, entries, f16, float, mbarrier, thread, tma, unroll, warp,
};

/// Warps of a block that multiply.
pub const WARPS: usize = 16;
/// Elements of a row of a piece, in units of 256: a warp's lanes take 8 each.
pub const STEPS: usize = 4;
/// Threads of a block: the warps that multiply, and one more.
pub const THREADS: usize = WARPS * 32 + 32;
/// The most pairs.
pub const MAX_PAIRS: usize = 32;
/// The most blocks.
pub const MAX_BLOCKS: usize = 256;
/// Words of the workspace: one for each share, how many blocks have seen all of them done, whether the number of chunks that are drawn is there, and it.
pub const WORDS: usize = MAX_BLOCKS + 3;
/// The most chunks that a block draws for its warps.
pub const MAX_CHUNKS: usize = 128;
/// Chunks that a block draws before its warps come to them.
const AHEAD: u32 = 2;
/// In place of a chunk's first unit: not known yet; there is none.
const UNKNOWN: u32 = u32::MAX;
const NONE: u32 = u32::MAX - 1;
/// The most stages of a warp's ring.
pub const MAX_STAGES: usize = 8;
/// How often a block looks for words before it helps out: about 100 µs.
const PATIENCE: u32 = 100;

/// Dynamic shared memory for vectors of so many elements in all (`x`, then `h`), so many sums, and stages of each warp.
pub const fn shared_bytes(operands: usize, sums: usize, stages: usize) -> usize {
    (WARPS * MAX_STAGES + 2) * 8
        + 2 * MAX_PAIRS * 4
        + 16
        + (MAX_CHUNKS + 4) * 4
        + sums.next_multiple_of(4) * 4
        + operands.next_multiple_of(8) * 2
        + 128
        + WARPS * stages * 2 * STEPS * 256 * 2
}

/// What a block does: units of the first product, and rows of the second.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// The first of them.
    pub unit: u32,
    /// How many.
    pub units: u32,
    /// The first of them.
    pub row: u32,
    /// How many.
    pub rows: u32,
}

/// Where a share begins and ends: rows, and units as parts of all.
#[derive(Clone, Copy)]
struct Borders {
    rows: [u32; 2],
    units: [f32; 2],
}

impl Borders {
    /// `lines`: rows of the first product that make a unit.
    #[inline(always)]
    fn new(block: u32, blocks: u32, hidden: u32, lines: u32) -> Self {
        // SAFETY: there are blocks.
        unsafe { core::hint::assert_unchecked(blocks != 0) };
        let rows = [block * hidden / blocks, (block + 1) * hidden / blocks];
        // For each element between the products there are `lines` rows of `hidden` elements, then one: so in all of them are
        // `(lines + 1) · hidden` to be read, of which a row of the second product is one. Rounding is monotonous.
        let even = lines * hidden < blocks;
        let all = if even { blocks } else { blocks * lines * hidden } as f32;
        let units = |at: u32, row: u32| {
            let before = if even { at } else { at * (lines + 1) * hidden - blocks * row };
            float::fast::div(before as f32, all)
        };
        Self { rows, units: [units(block, rows[0]), if block + 1 == blocks { 1.0 } else { units(block + 1, rows[1]) }] }
    }

    /// Of so many units.
    #[inline(always)]
    fn share(self, units: u32) -> Share {
        let at = |part: f32| if part == 1.0 { units } else { ((units as f32 * part) as u32).min(units) };
        let (from, to) = (at(self.units[0]), at(self.units[1]));
        Share { unit: from, units: to - from, row: self.rows[0], rows: self.rows[1] - self.rows[0] }
    }
}

/// Pieces of a product that are a warp's, in turn with the others'.
#[derive(Clone, Copy)]
struct Cursor {
    /// The unit, among the block's.
    unit: u32,
    /// Which piece of it.
    part: u32,
    /// Pieces of a unit.
    parts: u32,
    /// From one piece to the warp's next.
    next_unit: u32,
    next_part: u32,
}

impl Cursor {
    /// From piece `part` of all on.
    #[inline(always)]
    fn new(part: u32, parts: u32, warps: u32) -> Self {
        let mut cursor = Self { unit: 0, part, parts, next_unit: 0, next_part: warps };
        while cursor.next_part >= parts {
            cursor.next_part -= parts;
            cursor.next_unit += 1;
        }
        cursor.carry();
        cursor
    }

    /// No divisions: they are long, and what runs once comes from memory.
    #[inline(always)]
    fn carry(&mut self) {
        while self.part >= self.parts {
            self.part -= self.parts;
            self.unit += 1;
        }
    }

    #[inline(always)]
    fn advance(&mut self) {
        self.part += self.next_part;
        self.unit += self.next_unit;
        self.carry();
    }
}

/// The pair and its output that a unit is, if each has `width`.
#[inline(always)]
fn split(unit: u32, width: u32) -> (u32, u32) {
    let (mut pair, mut output) = (0, unit);
    while output >= width {
        output -= width;
        pair += 1;
    }
    (pair, output)
}

/// What all warps of a block know.
struct Job<T, const STEPS: usize> {
    routed: [Weights<T>; 2],
    shared: [Weights<T>; 2],
    h: GlobalMut<T>,
    local: u32,
    hidden: u32,
    intermediate: u32,
    layout: u32,
    activation: Activation,
    /// For each pair that exists its expert.
    bins: Shared<u32>,
    tokens_of: Shared<u32>,
    sums: Shared<f32>,
}

impl<T: TensorFloat, const STEPS: usize> Job<T, STEPS> {
    const LEN: u32 = STEPS as u32 * 256;

    #[inline(always)]
    fn lines(&self) -> u32 {
        if self.layout == PLAIN { 1 } else { 2 }
    }

    /// Pieces of a row.
    #[inline(always)]
    fn parts(&self, down: bool) -> u32 {
        (if down { self.intermediate } else { self.hidden }).div_ceil(Self::LEN).max(1)
    }

    /// An expert's weights of the first product, or of the second.
    #[inline(always)]
    fn expert(&self, bin: u32, down: bool) -> Expert<T> {
        let here = bin < self.local;
        let from = |i: usize| Weights::choose(here, self.routed[i], self.shared[i]);
        let from = Weights::choose(down, from(1), from(0));
        let rows = if down { self.hidden } else { self.lines() * self.intermediate };
        let k = if down { self.intermediate } else { self.hidden };
        from.expert(if here { bin } else { bin - self.local }, rows, k)
    }

    /// The row of the first product's weights with an output's gate, or its value.
    #[inline(always)]
    fn row(&self, output: u32, up: bool) -> u32 {
        match self.layout {
            PLAIN => output,
            HALVES => output + if up { self.intermediate } else { 0 },
            _ => 2 * output + up as u32,
        }
    }

    /// Multiplies up to `LEN` elements of two rows, which may be the same, with the vector at `operand`. Every lane of the warp's lower half gets
    /// the first row's sum, of the upper half the second's.
    #[inline(always)]
    unsafe fn multiply(
        &self,
        len: u32,
        operand: Shared<T>,
        first: impl Fn(u32) -> B128<u32, 4>,
        second: impl Fn(u32) -> B128<u32, 4>,
    ) -> f32 {
        let lane = warp::lane_id();
        let zero = B128([0u32; 4]);
        let (mut a, mut b, mut x) = ([zero; STEPS], [zero; STEPS], [zero; STEPS]);
        unroll::<STEPS>(|s| {
            let at = s as u32 * 256 + lane * 8;
            if at < len {
                (x[s], a[s], b[s]) = (operand.get_as(at), first(at), second(at));
            }
        });
        let mut acc = [[0f32; 4]; 2];
        unroll::<STEPS>(|s| {
            let (B128(a), B128(b), B128(x)) = (a[s], b[s], x[s]);
            acc[0] = T::mma([a[0], b[0], a[1], b[1]], [x[0], x[1]], acc[0]);
            acc[1] = T::mma([a[2], b[2], a[3], b[3]], [x[2], x[3]], acc[1]);
        });
        // Lane `4 g + t` has columns `2 t` and `2 t + 1` of row `g`, one of which may be `g`.
        let (g, t) = (lane / 4, lane % 4);
        let on = |row: usize| {
            let (even, odd) = (acc[0][row] + acc[1][row], acc[0][row + 1] + acc[1][row + 1]);
            let v = if g % 2 == 0 { even } else { odd };
            if t == g / 2 { v } else { 0.0 }
        };
        let (a, b) = (on(0), on(2));
        let upper = lane >= 16;
        let mut sum = if upper { b } else { a } + warp::shfl_xor(if upper { a } else { b }, 16);
        unroll::<4>(|i| sum += warp::shfl_xor(sum, 8 >> i));
        sum
    }

    /// Adds up pieces of a row.
    #[inline(always)]
    unsafe fn total(&self, unit: u32, second: u32, parts: u32) -> f32 {
        let mut sum = 0f32;
        for i in 0..parts {
            sum += self.sums.get(2 * (unit * parts + i) + second);
        }
        sum
    }

    /// Units of the first product, by one warp, from memory.
    #[inline(always)]
    unsafe fn alone(&self, first: u32, units: u32, operand: Shared<T>) {
        for unit in first..first + units {
            let (pair, output) = split(unit, self.intermediate);
            let (bin, token) = (self.bins.get(pair), self.tokens_of.get(pair));
            let weights = self.expert(bin, false).weights;
            let row = |up: bool| weights.offset(self.row(output, up) as usize * self.hidden as usize);
            let (gates, values) = (row(false), row(self.layout != PLAIN));
            let (mut sum, mut start) = (0f32, 0);
            while start < self.hidden {
                sum += self.multiply(
                    (self.hidden - start).min(Self::LEN),
                    operand.offset(token * self.hidden + start),
                    |at| gates.get_as(start + at),
                    |at| values.get_as(start + at),
                );
                start += Self::LEN;
            }
            let up = warp::shfl_idx(sum, 16);
            if warp::lane_id() == 0 {
                self.finish(unit, pair, output, sum, up);
            }
        }
    }

    /// Stores an output of the first product.
    #[inline(always)]
    unsafe fn finish(&self, unit: u32, pair: u32, output: u32, gate: f32, up: f32) {
        let expert = self.expert(self.bins.get(pair), false);
        let gate = gate + expert.bias(self.row(output, false));
        let up = if self.layout == PLAIN { 0.0 } else { up + expert.bias(self.row(output, true)) };
        self.h.set(unit, T::from_f32(self.activation.gated(gate, up)));
    }
}

/// The words through which blocks know of each other.
#[derive(Clone, Copy)]
struct Words {
    words: GlobalMut<u64>,
    shares: u32,
    taken: u64,
    done: u64,
}

impl Words {
    #[inline(always)]
    fn new(words: *mut u64, shares: u32, launch: u64) -> Self {
        Self { words: GlobalMut::new(words), shares, taken: launch << 1, done: launch << 1 | 1 }
    }

    /// Whether nobody had begun this share.
    #[inline(always)]
    unsafe fn claim(self, share: u32) -> bool {
        let found = self.words.load(share, Device, Relaxed);
        found != self.taken
            && found != self.done
            && self.words.compare_exchange(share, found, self.taken, Device, Relaxed) == found
    }

    /// By one thread, after a barrier of those that have stored the share's `h`.
    #[inline(always)]
    unsafe fn publish(self, share: u32) {
        if share == 0 {
            // Who has seen this share done finds a number here.
            self.words.store(self.shares, 0, Device, Relaxed);
        }
        self.words.store(share, self.done, Device, Release);
    }

    /// Makes sure that chunks are counted from zero.
    #[inline(always)]
    unsafe fn open(self) {
        let word = self.shares + 1;
        loop {
            let found = self.words.load(word, Device, Acquire);
            if found == self.done {
                break;
            }
            if found != self.taken && self.words.compare_exchange(word, found, self.taken, Device, Relaxed) == found {
                self.words.store(self.shares + 2, 0, Device, Relaxed);
                self.words.store(word, self.done, Device, Release);
                break;
            }
            thread::spin_hint();
        }
    }

    /// The next chunk.
    #[inline(always)]
    unsafe fn draw(self) -> u32 {
        self.words.fetch_add(self.shares + 2, 1, Device, Relaxed) as u32
    }

    /// By a warp of each block when all shares are done. The last leaves zeroes.
    #[inline(always)]
    unsafe fn leave(self) {
        let lane = warp::lane_id();
        let before = if lane == 0 { self.words.fetch_add(self.shares, 1, Device, AcqRel) } else { 0 };
        if warp::shfl_idx(before, 0) == self.shares as u64 - 1 {
            unroll::<{ WORDS.div_ceil(32) }>(|i| {
                let word = lane + 32 * i as u32;
                if word < self.shares + 3 {
                    self.words.store(word, 0, Device, Relaxed);
                }
            });
        }
    }
}

/// See the [module](self) and [`Args`]. Grid: at most [`MAX_BLOCKS`]; block: `WARPS` warps and one more; shared memory: [`shared_bytes`].
#[inline(always)]
unsafe fn fused_vector<T: TensorFloat, const WARPS: usize, const STEPS: usize, const TRACE: bool>(
    out: *mut T,
    out_row: usize,
    h: *mut T,
    words: *mut u64,
    launch: u64,
    x: *const T,
    x_row: usize,
    w13: *const T,
    bias13: *const T,
    w2: *const T,
    bias2: *const T,
    shared13: *const T,
    shared_bias13: *const T,
    shared2: *const T,
    shared_bias2: *const T,
    topk_ids: *const i32,
    topk_weights: *const f32,
    expert_map: *const i32,
    num_tokens: *const i32,
    tokens: u32,
    top_k: u32,
    slots: u32,
    experts: u32,
    local: u32,
    shared_experts: u32,
    hidden: u32,
    intermediate: u32,
    layout: u32,
    activation: u32,
    alpha: f32,
    limit: f32,
    operands: u32,
    sums: u32,
    stages: u32,
    chunk_log2: u32,
    chunks: u32,
) {
    let (tid, lane, warp_id) = (thread::thread_idx_x(), warp::lane_id(), warp::warp_id());
    let (block, blocks) = (thread::block_idx_x(), thread::grid_dim_x());
    let trace = GlobalMut::new(words);
    let mark = |i: u32| {
        if TRACE && lane == 0 {
            trace.set(512 + block * 16 + i, thread::globaltimer());
        }
    };
    let mut carver = Carver::new();
    let bars = carver.take::<u64>(WARPS * MAX_STAGES + 1);
    let bins = carver.take::<u32>(MAX_PAIRS);
    let tokens_of = carver.take::<u32>(MAX_PAIRS);
    let notes = carver.take::<u32>(4);
    let table = carver.take::<u32>(MAX_CHUNKS + 4);
    let sums = carver.take::<f32>(sums as usize);
    let operand = carver.take::<T>(operands as usize);
    let ring = carver.take_aligned::<T>(WARPS * stages as usize * 2 * STEPS * 256, 128);
    let all_threads = const { WARPS as u32 * 32 + 32 };
    let len = const { STEPS as u32 * 256 };
    let vector = bars.address(WARPS * MAX_STAGES);
    if tid < WARPS as u32 * MAX_STAGES as u32 + 1 {
        mbarrier::init(bars.address(tid), 1);
    }
    let mut i = tid;
    while i < MAX_CHUNKS as u32 + 4 {
        table.set(i, UNKNOWN);
        i += const { WARPS as u32 * 32 + 32 };
    }
    if tid == 0 {
        notes.set(1u32, 0);
    }
    mbarrier::fence_init();
    thread::sync_threads();
    let borders = Borders::new(block, blocks, hidden, if layout == PLAIN { 1 } else { 2 });
    if warp_id == 0 {
        mark(0);
    }
    dependent_launch::begin();
    if warp_id == 0 {
        mark(1);
    }

    // Each warp makes itself a list of the pairs that exist, one a lane.
    let pairs = Pairs {
        topk_ids: Global::new(topk_ids),
        expert_map: Global::new(expert_map),
        mapped: !expert_map.is_null(),
        top_k,
        slots,
        experts,
        local,
        shared: shared_experts,
    };
    let tokens = existing_tokens(tokens, num_tokens);
    let (mut bin, mut scale) = (NOWHERE, 0.0);
    if lane < tokens * slots {
        bin = pairs.bin(lane);
        scale = pairs.weight(lane, Global::new(topk_weights));
    }
    let there = warp::warp_vote_ballot(warp::FULL, bin != NOWHERE && bin != INVALID);
    let count = there.count_ones();
    let mut pair = lane;
    if there & there.wrapping_add(1) != 0 {
        let (mut rest, mut i) = (there, 0);
        while i < lane {
            rest &= rest.wrapping_sub(1);
            i += 1;
        }
        pair = if rest == 0 { 0 } else { rest.trailing_zeros() };
        warp::sync_warp(warp::FULL);
        bin = warp::shfl_idx(bin, pair);
        scale = warp::shfl_idx(scale, pair);
    }
    let token = if tokens == 1 { 0 } else { pair / slots.max(1) };

    let job = Job::<T, STEPS> {
        routed: [Weights::new(w13, bias13), Weights::new(w2, bias2)],
        shared: [Weights::new(shared13, shared_bias13), Weights::new(shared2, shared_bias2)],
        h: GlobalMut::new(h),
        local,
        hidden,
        intermediate,
        layout,
        activation: Activation::new(activation, alpha, limit, layout != PLAIN),
        bins,
        tokens_of,
        sums,
    };
    // Half of all units are drawn in chunks, if any.
    let units = count * intermediate;
    let drawn = if chunks == 0 { 0 } else { units >> (chunk_log2 + 1) };
    let dealt = units - (drawn << chunk_log2);
    let share = borders.share(dealt);
    let words = Words::new(words, blocks, launch);
    let width = intermediate.max(1);

    if warp_id == WARPS as u32 {
        if lane < count {
            bins.set(lane, bin);
            tokens_of.set(lane, token);
        }
        if lane == 0 {
            mbarrier::arrive_expect_tx(vector, tokens * hidden * 2);
            for t in 0..tokens {
                tma::copy_bulk(operand.address(t * hidden), x.wrapping_add(t as usize * x_row), hidden * 2, vector);
            }
        }
        warp::sync_warp(warp::FULL);
        if lane == 1 {
            words.open();
        }
        let won = lane == 0 && words.claim(block);
        let own = warp::warp_vote_any(warp::FULL, won);
        mark(8);
        // Chunks for this block's warps, until there are none.
        let (mut known, mut next) = (0, 0);
        while own && known < chunks {
            // By one lane, and for all of them: what it sees may change.
            let mut near = false;
            while !near {
                let seen = if lane == 0 { notes.load(1u32, Block, Relaxed) } else { 0 };
                near = known < warp::shfl_idx(seen, 0) + AHEAD;
                thread::spin_hint();
            }
            let number = if lane == 0 { words.draw() } else { 0 };
            next = warp::shfl_idx(number, 0);
            if next >= drawn {
                break;
            }
            if lane == 0 {
                table.store(known, dealt + (next << chunk_log2), Block, Relaxed);
            }
            known += 1;
        }
        if lane == 0 {
            notes.set(0u32, own as u32);
            table.store(known, NONE, Block, Relaxed);
        }
        mark(9);
        // If that is because there was no room for more:
        while own && next < drawn {
            let number = if lane == 0 { words.draw() } else { 0 };
            next = warp::shfl_idx(number, 0);
            if next < drawn {
                mbarrier::wait_parity(vector, 0);
                job.alone(dealt + (next << chunk_log2), 1 << chunk_log2, operand);
            }
        }
        warp::sync_warp(warp::FULL);
        thread::arrive_named(1, all_threads);
        thread::sync_named(2, all_threads);
        if won {
            words.publish(block);
        }
        mark(10);
        let mut polls = 0;
        loop {
            let (mut ok, mut idle) = (true, u32::MAX);
            unroll::<{ MAX_BLOCKS / 32 }>(|i| {
                let other = lane + 32 * i as u32;
                if other < blocks {
                    let word = words.words.load(other, Device, Relaxed);
                    ok &= word == words.done;
                    if word != words.done && word != words.taken {
                        idle = other;
                    }
                }
            });
            if warp::warp_vote_all(warp::FULL, ok) {
                break;
            }
            polls += 1;
            if polls > PATIENCE {
                let who = warp::warp_vote_ballot(warp::FULL, idle != u32::MAX);
                if who != 0 {
                    let other = warp::shfl_idx(idle, who.trailing_zeros());
                    let won = lane == 0 && words.claim(other);
                    if warp::warp_vote_any(warp::FULL, won) {
                        let lines = if layout == PLAIN { 1 } else { 2 };
                        let share = Borders::new(other, blocks, hidden, lines).share(dealt);
                        mbarrier::wait_parity(vector, 0);
                        job.alone(share.unit, share.units, operand);
                        if won {
                            words.publish(other);
                        }
                    }
                }
            }
            thread::spin_hint();
        }
        thread::device_fence();
        mark(11);
        if lane == 0 {
            // All of `h`, in place of `x`.
            tma::fence_async_global();
            mbarrier::arrive_expect_tx(vector, count * intermediate * 2);
            if count > 0 {
                tma::copy_bulk(operand.address(0u32), job.h.ptr(0u32).cast_const(), count * intermediate * 2, vector);
            }
        }
        words.leave();
        mark(12);
        return;
    }

    let ring = ring.offset(warp_id * stages * 2 * len);
    let bar = |stage: u32| bars.address(warp_id * MAX_STAGES as u32 + stage);
    // Pieces of the first product, when their number is known, and all of them.
    let (mut first, mut all) = (u32::MAX, u32::MAX);
    // Chunks that are known.
    let mut known = 0;
    // What is to come and what is next, in pieces; stages that are filled and which is.
    let (mut at, mut next, mut ahead, mut stage, mut to, mut parity) = (warp_id, warp_id, 0, 0, 0, 0);
    let mut cursor = Cursor::new(warp_id, job.parts(false), WARPS as u32);
    let mut down = false;
    let unit_of = |unit: u32| {
        if unit < share.units {
            share.unit + unit
        } else {
            let drawn = unit - share.units;
            table.load(drawn >> chunk_log2, Block, Relaxed) + (drawn & ((1 << chunk_log2) - 1))
        }
    };
    // Of a stage, in the lane of its number: where its vector starts; the length of its rows, and where the second is, which may be the first.
    let (mut from, mut what) = (0u32, 0u32);
    if warp_id == 0 {
        mark(2);
    }
    loop {
        while ahead < stages && next < all {
            if first == u32::MAX && cursor.unit >= share.units {
                // Whether the chunk is there.
                let wanted = (cursor.unit - share.units) >> chunk_log2;
                let mut value = 0;
                while known <= wanted {
                    value = table.load(known, Block, Relaxed);
                    if value >= NONE {
                        break;
                    }
                    known += 1;
                    if lane == 0 {
                        notes.fetch_max(1u32, known, Block, Relaxed);
                    }
                }
                if value == UNKNOWN {
                    if ahead > 0 {
                        break;
                    }
                    thread::spin_hint();
                    continue;
                }
                if value == NONE {
                    first = (share.units + (known << chunk_log2)) * job.parts(false);
                    all = first + count * share.rows.div_ceil(2) * job.parts(true);
                    cursor = Cursor::new(next - first, job.parts(true), WARPS as u32);
                    continue;
                }
            }
            let fetching_down = first != u32::MAX;
            let (pair, unit) = if fetching_down {
                split(cursor.unit, share.rows.div_ceil(2))
            } else {
                split(unit_of(cursor.unit), width)
            };
            let (k, start) = (if fetching_down { intermediate } else { hidden }, cursor.part * len);
            let n = (k - start).min(len);
            let both = if fetching_down { 2 * unit + 1 < share.rows } else { layout != PLAIN };
            let whose = warp::shfl_idx(bin, pair);
            let vector = if fetching_down { pair } else { warp::shfl_idx(token, pair) };
            // Rows of the second product that are read as a whole come as one.
            let joint = fetching_down && cursor.parts == 1;
            if lane == to {
                from = vector * k + start;
                what = n | if both { if joint { n } else { len } } else { 0 } << 16;
            }
            if lane == 0 {
                let (row, other) = if fetching_down {
                    let row = share.row + 2 * unit;
                    (row, row + 1)
                } else {
                    (job.row(unit, false), job.row(unit, true))
                };
                let weights = job.expert(whose, fetching_down).weights;
                let stage = ring.address(to * 2 * len);
                let bytes = if both { 4 } else { 2 } * n;
                mbarrier::arrive_expect_tx(bar(to), bytes);
                let piece = weights.ptr(row as usize * k as usize + start as usize);
                tma::copy_bulk(stage, piece, if joint { bytes } else { 2 * n }, bar(to));
                if both && !joint {
                    let piece = weights.ptr(other as usize * k as usize + start as usize);
                    tma::copy_bulk(stage + 2 * len, piece, 2 * n, bar(to));
                }
            }
            to = if to + 1 == stages { 0 } else { to + 1 };
            cursor.advance();
            next += WARPS as u32;
            ahead += 1;
        }
        if at >= first && !down {
            down = true;
            if warp_id == 0 {
                mark(5);
            }
            thread::sync_named(1, all_threads);
            if notes.get(0u32) != 0 {
                let (parts, mut unit) = (job.parts(false), tid);
                while unit < share.units + (known << chunk_log2) {
                    let global = unit_of(unit);
                    let (pair, output) = split(global, width);
                    let up = if layout == PLAIN { 0.0 } else { job.total(unit, 1, parts) };
                    job.finish(global, pair, output, job.total(unit, 0, parts), up);
                    unit += const { WARPS as u32 * 32 };
                }
            }
            thread::arrive_named(2, all_threads);
        }
        if at >= all {
            break;
        }
        mbarrier::wait_parity(vector, down as u32);
        if warp_id == 0 {
            if at == 0 {
                mark(3);
            }
            if TRACE && down && at < first + WARPS as u32 {
                mark(6);
            }
        }
        let (start, what) = (warp::shfl_idx(from, stage), warp::shfl_idx(what, stage));
        let rows = ring.offset(stage * 2 * len);
        let second = rows.offset(what >> 16);
        mbarrier::wait_parity(bar(stage), parity);
        if warp_id == 0 && at == 0 {
            mark(4);
        }
        let sum =
            job.multiply(what & 0xffff, operand.offset(start), |at| rows.get_as(at), |at| second.get_as(at));
        if lane % 16 == 0 {
            sums.set(2 * (if down { at - first } else { at }) + lane / 16, sum);
        }
        warp::sync_warp(warp::FULL);
        stage += 1;
        if stage == stages {
            (stage, parity) = (0, parity ^ 1);
        }
        ahead -= 1;
        at += WARPS as u32;
    }
    if warp_id == 0 {
        mark(7);
    }
    thread::sync_named(3, const { WARPS as u32 * 32 });
    // A warp takes a row, a lane a pair; then a lane has a token, and adds up its pairs in their order.
    let (parts, each) = (job.parts(true), share.rows.div_ceil(2));
    let out = GlobalMut::new(out);
    let mut row = warp_id;
    while row < share.rows {
        let mut v = 0f32;
        if lane < count {
            let bias = job.expert(bin, true).bias(share.row + row);
            v = (job.total(lane * each + row / 2, row % 2, parts) + bias) * scale;
        }
        let mut sum = 0f32;
        for pair in 0..count {
            let (v, whose) = (warp::shfl_idx(v, pair), warp::shfl_idx(token, pair));
            sum += if whose == lane { v } else { 0.0 };
        }
        if lane < tokens {
            out.set(lane as usize * out_row + (share.row + row) as usize, T::from_f32(sum));
        }
        row += WARPS as u32;
    }
    if warp_id == 0 {
        mark(13);
    }
}

entries! {
    /// Arguments of every `moe_fused_vector_*` entry.
    pub struct Args<T>(
        /// `[tokens, hidden]`, rows `out_row` apart.
        out: *mut T, out_row: usize,
        /// `[tokens * slots, intermediate]`.
        h: *mut T,
        /// [`WORDS`], whatever is in them.
        words: *mut u64,
        /// A number that no other launch has, unless it repeats this one.
        launch: u64,
        /// See [`fused::Args`](super::fused::Args).
        x: *const T, x_row: usize, w13: *const T, bias13: *const T, w2: *const T, bias2: *const T,
        shared13: *const T, shared_bias13: *const T, shared2: *const T, shared_bias2: *const T,
        topk_ids: *const i32, topk_weights: *const f32, expert_map: *const i32, num_tokens: *const i32, tokens: u32,
        top_k: u32, slots: u32, experts: u32, local: u32, shared_experts: u32, hidden: u32, intermediate: u32,
        layout: u32, activation: u32, alpha: f32, limit: f32,
        /// Room in shared memory for vectors and sums, in elements, and the stages of each warp.
        operands: u32, sums: u32, stages: u32,
        /// Units of a chunk, and how many of these a block draws at most.
        chunk_log2: u32, chunks: u32,
    );
    moe_fused_vector_f16 { type T = f16; } [THREADS, 1; Sm90a] => fused_vector::<T, WARPS, STEPS, false>;
    moe_fused_vector_bf16 { type T = bf16; } [THREADS, 1; Sm90a] => fused_vector::<T, WARPS, STEPS, false>;
}
