//! The fused block for very few pairs, in one launch: two products of matrices with vectors, and the sum over slots.
//!
//! All that takes time is reading weights, so nothing may stop their stream: not the launch of a second kernel, not the wait for `h`,
//! not the end of a block's share. Each warp has a ring of stages in shared memory of its own, which its first lane has the copy engine
//! fill with pieces of rows of weights, as they lie in memory.
//!
//! # Order
//! Pairs are in two groups. A block takes part in the first product of the first group, then of the second; then in the second product of the
//! first group, and of the second. While it reads weights of one group, the blocks exchange the `h` of the other: a block's last warp
//! makes them of the sums that the others leave in shared memory, says that they are there, waits for those of all blocks, and brings them. The warps that
//! multiply find them when they come to them.
//!
//! A warp's first piece is asked for as soon as the experts are known: where it lies in an expert's matrix is computed before, as if all pairs existed. If some do not, what is to be
//! done is divided anew.
//!
//! # Shares
//! A unit of the first product is an output of a pair: a row of gates and a row of values; of the second two rows of weights of a pair. A block takes
//! the same rows of the second product for all pairs, so that it has all there is to add up for its outputs: no partial results leave it. Rows come in
//! whole numbers; whoever has one more of the second product has less of the first, so that all read equally much ([`Borders`]). Within a block
//! pieces of [`STEPS`] times 256 elements of two rows go to warps in turn.
//!
//! # Products
//! Tensor cores, with one product of which most is thrown away: a warp's lanes read 16 bytes each of a row, of another row and of the vector, all at
//! the same place, and call them the fragments of a product of two times eight rows by eight columns. A sum on the diagonal is then one of
//! what four lanes have read, of a row with the vector, and all of them together are the row's product. That takes 5 instructions for 1 KiB of
//! weights where multiply-adds take 50. Sums of a piece go to shared memory, and are added up in the order of K.
//!
//! # Blocks that wait for each other
//! Each share has a word in the workspace. Who begins it claims the word, and says there which `h` are stored. Blocks need not run at the same
//! time for that: who has waited for long claims shares that nobody began and computes them, from memory without the ring. Thus blocks wait only
//! for such as run. A claim is a number that no other launch has, so what the words hold before does
//! not matter; replays of a graph repeat it, so the last block to see all done zeroes the words. A warp of its own does all that, because fences of
//! a thread wait for the copies that it has asked for.

use super::fused::{Expert, HALVES, PLAIN, Weights};
use super::fused_wgmma::Activation;
use super::pairs::{INVALID, NOWHERE, Pairs, existing_tokens};
use crate::tensor_float::TensorFloat;
use cuda_std::atomic::{AcqRel, Device, Relaxed, Release};
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
/// Words of the workspace: one for each share, and how many blocks have seen all of them done.
pub const WORDS: usize = MAX_BLOCKS + 1;
/// The most stages of a warp's ring.
pub const MAX_STAGES: usize = 8;
/// How often a block looks for words before it helps out: about 100 µs.
const PATIENCE: u32 = 100;

/// Dynamic shared memory for vectors of so many elements in all (`x`, then `h`), so many sums, and stages of each warp.
pub const fn shared_bytes(operands: usize, sums: usize, stages: usize) -> usize {
    (WARPS * MAX_STAGES + 4) * 8
        + 2 * MAX_PAIRS * 4
        + sums.next_multiple_of(4) * 4
        + operands.next_multiple_of(8) * 2
        + 128
        + WARPS * stages * 2 * STEPS * 256 * 2
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
        let (whole, rest) = divided(hidden, blocks);
        let rows = [block, block + 1].map(|block| block * whole + block.min(rest));
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

    /// Of so many units the first one, and how many.
    #[inline(always)]
    fn share(self, units: u32) -> (u32, u32) {
        // SAFETY: parts of one, and the numbers that they are parts of fit into words.
        let cut = |part: f32| unsafe { (units as f32 * part).to_int_unchecked::<u32>() };
        let at = |part: f32| if part == 1.0 { units } else { cut(part).min(units) };
        let (from, to) = (at(self.units[0]), at(self.units[1]));
        (from, to - from)
    }
}

/// What a block does of the first product.
struct Share {
    /// Pairs of the first group.
    early: u32,
    /// Units of either group in all.
    groups: [u32; 2],
    /// The block's first unit of either, and how many.
    starts: [u32; 2],
    units: [u32; 2],
}

impl Share {
    #[inline(always)]
    fn new(borders: Borders, intermediate: u32, count: u32) -> Self {
        let early = count / 2;
        let groups = [early * intermediate, (count - early) * intermediate];
        let ((a, na), (b, nb)) = (borders.share(groups[0]), borders.share(groups[1]));
        Self { early, groups, starts: [a, groups[0] + b], units: [na, nb] }
    }
}

/// Pieces of a product that are a warp's, in turn with the others'.
#[derive(Clone, Copy)]
struct Cursor {
    /// The unit, among the group's or the product's.
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
        let ((unit, part), (next_unit, next_part)) = (divided(part, parts), divided(warps, parts));
        Self { unit, part, parts, next_unit, next_part }
    }

    #[inline(always)]
    fn advance(&mut self) {
        self.part += self.next_part;
        self.unit += self.next_unit;
        if self.part >= self.parts {
            self.part -= self.parts;
            self.unit += 1;
        }
    }
}

/// Quotient and rest of numbers below 2²⁰, of which the second is not 0. A division of integers is long, and what runs once comes from memory.
#[inline(always)]
fn divided(a: u32, b: u32) -> (u32, u32) {
    // In the middle between two multiples of the divisor's inverse, so that rounding reaches neither.
    // SAFETY: neither negative nor too large.
    let quotient: u32 = unsafe { float::fast::div(a as f32 + 0.5, b as f32).to_int_unchecked() };
    (quotient, a - quotient * b)
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

    /// Adds up pieces of a row, from this one on.
    #[inline(always)]
    unsafe fn total(&self, first: u32, second: u32, parts: u32) -> f32 {
        let mut sum = 0f32;
        for i in 0..parts {
            sum += self.sums.get(2 * (first + i) + second);
        }
        sum
    }

    /// A unit of the first product, by one warp, from memory.
    #[inline(always)]
    unsafe fn alone(&self, unit: u32, operand: Shared<T>) {
        let (pair, output) = divided(unit, self.intermediate);
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
    /// What a word is if somebody has begun the share; with one more for each group that is done.
    taken: u64,
}

impl Words {
    #[inline(always)]
    fn new(words: *mut u64, shares: u32, launch: u64) -> Self {
        Self { words: GlobalMut::new(words), shares, taken: launch << 2 }
    }

    /// Whether a word says that nobody has begun its share.
    #[inline(always)]
    fn is_idle(self, word: u64) -> bool {
        word & !3 != self.taken
    }

    /// Whether nobody had begun this share.
    #[inline(always)]
    unsafe fn claim(self, share: u32) -> bool {
        let found = self.words.load(share, Device, Relaxed);
        self.is_idle(found) && self.words.compare_exchange(share, found, self.taken, Device, Relaxed) == found
    }

    /// By one thread, after a barrier of those that have stored the share's `h` of so many groups.
    #[inline(always)]
    unsafe fn publish(self, share: u32, groups: u64) {
        if share == 0 {
            // Who has seen this share done finds a number here.
            self.words.store(self.shares, 0, Device, Relaxed);
        }
        self.words.store(share, self.taken + groups, Device, Release);
    }

    /// By a warp of each block when all shares are done. The last leaves zeroes.
    #[inline(always)]
    unsafe fn leave(self) {
        let lane = warp::lane_id();
        let before = if lane == 0 { self.words.fetch_add(self.shares, 1, Device, AcqRel) } else { 0 };
        if warp::shfl_idx(before, 0) == self.shares as u64 - 1 {
            unroll::<{ WORDS.div_ceil(32) }>(|i| {
                let word = lane + 32 * i as u32;
                if word <= self.shares {
                    self.words.store(word, 0, Device, Relaxed);
                }
            });
        }
    }
}

/// See the [module](self) and [`Args`]. Grid: at most [`MAX_BLOCKS`]; block: `WARPS` warps and one more; shared memory: [`shared_bytes`].
#[inline(always)]
unsafe fn fused_vector<T: TensorFloat, const WARPS: usize, const STEPS: usize>(
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
) {
    let (tid, lane, warp_id) = (thread::thread_idx_x(), warp::lane_id(), warp::warp_id());
    let (block, blocks) = (thread::block_idx_x(), thread::grid_dim_x());
    let mut carver = Carver::new();
    let bars = carver.take::<u64>(WARPS * MAX_STAGES + 3);
    let bins = carver.take::<u32>(MAX_PAIRS);
    let tokens_of = carver.take::<u32>(MAX_PAIRS);
    let sums = carver.take::<f32>(sums as usize);
    let vectors = carver.take::<T>(operands as usize);
    let ring = carver.take_aligned::<T>(WARPS * stages as usize * 2 * STEPS * 256, 128);
    let all_threads = const { WARPS as u32 * 32 + 32 };
    let len = const { STEPS as u32 * 256 };
    // `x`, then `h` of either group.
    let there = |i: u32| bars.address(const { (WARPS * MAX_STAGES) as u32 } + i);
    if tid < const { (WARPS * MAX_STAGES) as u32 + 3 } {
        mbarrier::init(bars.address(tid), 1);
    }
    mbarrier::fence_init();
    thread::sync_threads();
    let borders = Borders::new(block, blocks, hidden, if layout == PLAIN { 1 } else { 2 });
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
    let (up_parts, width) = (job.parts(false), intermediate.max(1));
    let divide = |count: u32| Share::new(borders, intermediate, count);
    // A warp's first piece, if all pairs exist: then only the expert is still to be known.
    let all = tokens * slots;
    let share = divide(all);
    let middle = share.units[0] * up_parts;
    let late = warp_id >= middle;
    let cursor = Cursor::new(warp_id - if late { middle } else { 0 }, up_parts, WARPS as u32);
    let (own, output) = divided(cursor.unit + if late { share.starts[1] } else { share.starts[0] }, width);
    let begin = cursor.part * len;
    let row = |up: bool| w13.wrapping_add(job.row(output, up) as usize * hidden as usize + begin as usize);
    let exists = (warp_id < middle + share.units[1] * up_parts) as u32;
    let ([gates, values], [own, exists]) =
        dependent_launch::begin_at([row(false).cast(), row(layout != PLAIN).cast()], [own, exists]);

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
    if tid == const { (WARPS * 32) as u32 } {
        mbarrier::arrive_expect_tx(there(0), tokens * hidden * 2);
        for t in 0..tokens {
            tma::copy_bulk(vectors.address(t * hidden), x.wrapping_add(t as usize * x_row), hidden * 2, there(0));
        }
    }
    let (ids, [mut scale]) = pairs.ids_and_weights::<1>(lane, tokens * slots, Global::new(topk_weights));
    let [mut bin] = pairs.bins_of_ids(ids);
    let exist = warp::warp_vote_ballot(warp::FULL, bin != NOWHERE && bin != INVALID);
    let count = exist.count_ones();
    let mut pair = lane;
    if exist & exist.wrapping_add(1) != 0 {
        let (mut rest, mut i) = (exist, 0);
        while i < lane {
            rest &= rest.wrapping_sub(1);
            i += 1;
        }
        pair = if rest == 0 { 0 } else { rest.trailing_zeros() };
        warp::sync_warp(warp::FULL);
        bin = warp::shfl_idx(bin, pair);
        scale = warp::shfl_idx(scale, pair);
    }
    let token = if tokens == 1 { 0 } else { divided(pair, slots.max(1)).0 };

    let ring = ring.offset(warp_id % WARPS as u32 * stages * 2 * len);
    let bar = |stage: u32| bars.address(warp_id * MAX_STAGES as u32 + stage);
    // Fetches a piece of a row, and of another one, which comes with it if they are `joint`.
    let fetch = |to: u32, n: u32, row: *const T, other: Option<*const T>, joint: bool| {
        let (stage, bytes) = (ring.address(to * 2 * len), if other.is_some() { 4 } else { 2 } * n);
        mbarrier::arrive_expect_tx(bar(to), bytes);
        tma::copy_bulk(stage, row, if joint { bytes } else { 2 * n }, bar(to));
        if let Some(other) = other {
            if !joint {
                tma::copy_bulk(stage + 2 * len, other, 2 * n, bar(to));
            }
        }
    };
    let mut fetched = count == all && exists != 0 && warp_id < WARPS as u32;
    if fetched {
        let whose = warp::shfl_idx(bin, own);
        if lane == 0 {
            let of = job.expert(whose, false).weights.ptr(0u32);
            let place = |at: *const u8| of.wrapping_byte_add(at.addr() - w13.addr());
            let other = if layout == PLAIN { None } else { Some(place(values)) };
            fetch(0, (hidden - begin).min(len), place(gates), other, false);
        }
    }
    let Share { early, groups, starts, units } = divide(count);
    let (first_row, rows) = (borders.rows[0], borders.rows[1] - borders.rows[0]);
    // Pieces up to the end of the first product of either group, and of all.
    let middle = units[0] * up_parts;
    let first = middle + units[1] * up_parts;
    let h_vectors = vectors.offset(tokens * hidden);
    let words = Words::new(words, blocks, launch);

    if warp_id == WARPS as u32 {
        if lane < count {
            bins.set(lane, bin);
            tokens_of.set(lane, token);
        }
        let won = lane == 0 && words.claim(block);
        let own = warp::warp_vote_any(warp::FULL, won);
        let mut polls = 0;
        for group in 0..2u32 {
            thread::sync_named(1 + group, all_threads);
            if own {
                let (start, units) = if group == 0 { (starts[0], units[0]) } else { (starts[1], units[1]) };
                let base = if group == 0 { 0 } else { middle };
                let mut unit = lane;
                while unit < units {
                    let (pair, output) = divided(start + unit, width);
                    let piece = base + unit * up_parts;
                    let up = if layout == PLAIN { 0.0 } else { job.total(piece, 1, up_parts) };
                    job.finish(start + unit, pair, output, job.total(piece, 0, up_parts), up);
                    unit += 32;
                }
                warp::sync_warp(warp::FULL);
                if won {
                    words.publish(block, group as u64 + 1);
                }
            }
            loop {
                let (mut ok, mut idle) = (true, u32::MAX);
                unroll::<{ MAX_BLOCKS / 32 }>(|i| {
                    let other = lane + 32 * i as u32;
                    if other < blocks {
                        let word = words.words.load(other, Device, Relaxed);
                        if words.is_idle(word) {
                            idle = other;
                        }
                        ok &= !words.is_idle(word) && (word & 3) as u32 > group;
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
                            let share = Share::new(Borders::new(other, blocks, hidden, lines), intermediate, count);
                            let (starts, units) = (share.starts, share.units);
                            mbarrier::wait_parity(there(0), 0);
                            for unit in 0..units[0] + units[1] {
                                let late = unit >= units[0];
                                let unit = if late { starts[1] + unit - units[0] } else { starts[0] + unit };
                                job.alone(unit, vectors);
                            }
                            warp::sync_warp(warp::FULL);
                            if won {
                                words.publish(other, 2);
                            }
                        }
                    }
                }
                thread::spin_hint();
            }
            thread::device_fence();
            if lane == 0 {
                let (from, n) = if group == 0 { (0, groups[0]) } else { (groups[0], groups[1]) };
                tma::fence_async_global();
                mbarrier::arrive_expect_tx(there(1 + group), n * 2);
                if n > 0 {
                    tma::copy_bulk(h_vectors.address(from), job.h.ptr(from).cast_const(), n * 2, there(1 + group));
                }
            }
        }
        words.leave();
        return;
    }

    let (each, down_parts) = (rows.div_ceil(2), job.parts(true));
    let late = first + early * each * down_parts;
    let all = first + count * each * down_parts;
    // What is to come and what is next, in pieces; stages that are filled and which is; where what is to come is in the order of the groups, and of what is next.
    let (mut at, mut next, mut ahead, mut stage, mut to, mut parity) = (warp_id, warp_id, 0, 0, 0, 0);
    let mut cursor = Cursor::new(warp_id, up_parts, WARPS as u32);
    let (mut fetching, mut phase) = (0u32, 0u32);
    // Of a stage, in the lane of its number: where its vector starts; the length of its rows, and where the second is, which may be the first.
    let (mut from, mut what) = (0u32, 0u32);
    loop {
        while ahead < stages && next < all {
            if fetching == 0 && next >= middle {
                fetching = 1;
                cursor = Cursor::new(next - middle, up_parts, WARPS as u32);
            }
            if fetching == 1 && next >= first {
                fetching = 2;
                cursor = Cursor::new(next - first, down_parts, WARPS as u32);
            }
            let fetching_down = fetching == 2;
            let (pair, unit) = if fetching_down {
                divided(cursor.unit, each)
            } else {
                divided(cursor.unit + if fetching == 0 { starts[0] } else { starts[1] }, width)
            };
            let (k, start) = (if fetching_down { intermediate } else { hidden }, cursor.part * len);
            let n = (k - start).min(len);
            let both = if fetching_down { 2 * unit + 1 < rows } else { layout != PLAIN };
            let whose = warp::shfl_idx(bin, pair);
            let vector = if fetching_down { pair } else { warp::shfl_idx(token, pair) };
            // Rows of the second product that are read as a whole come as one.
            let joint = fetching_down && cursor.parts == 1;
            if lane == to {
                from = vector * k + start + if fetching_down { tokens * hidden } else { 0 };
                what = n | if both { if joint { n } else { len } } else { 0 } << 16;
            }
            if lane == 0 && !fetched {
                let (row, other) = if fetching_down {
                    let row = first_row + 2 * unit;
                    (row, row + 1)
                } else {
                    (job.row(unit, false), job.row(unit, true))
                };
                let weights = job.expert(whose, fetching_down).weights;
                let piece = |row: u32| weights.ptr(row as usize * k as usize + start as usize);
                fetch(to, n, piece(row), if both { Some(piece(other)) } else { None }, joint);
            }
            fetched = false;
            to = if to + 1 == stages { 0 } else { to + 1 };
            cursor.advance();
            next += WARPS as u32;
            ahead += 1;
        }
        // The sums of a group are complete as far as this warp is concerned.
        if phase == 0 && at >= middle {
            phase = 1;
            warp::sync_warp(warp::FULL);
            thread::arrive_named(1, all_threads);
        }
        if phase == 1 && at >= first {
            phase = 2;
            warp::sync_warp(warp::FULL);
            thread::arrive_named(2, all_threads);
        }
        if at >= all {
            break;
        }
        mbarrier::wait_parity(
            there(if at < first {
                0
            } else if at < late {
                1
            } else {
                2
            }),
            0,
        );
        let (start, what) = (warp::shfl_idx(from, stage), warp::shfl_idx(what, stage));
        let rows = ring.offset(stage * 2 * len);
        let second = rows.offset(what >> 16);
        mbarrier::wait_parity(bar(stage), parity);
        let sum = job.multiply(what & 0xffff, vectors.offset(start), |at| rows.get_as(at), |at| second.get_as(at));
        if lane % 16 == 0 {
            sums.set(2 * at + lane / 16, sum);
        }
        warp::sync_warp(warp::FULL);
        stage += 1;
        if stage == stages {
            (stage, parity) = (0, parity ^ 1);
        }
        ahead -= 1;
        at += WARPS as u32;
    }
    thread::sync_named(3, const { WARPS as u32 * 32 });
    // A warp takes a row, a lane a pair; then a lane has a token, and adds up its pairs in their order.
    let out = GlobalMut::new(out);
    let mut row = warp_id;
    while row < rows {
        let mut v = 0f32;
        if lane < count {
            let bias = job.expert(bin, true).bias(first_row + row);
            v = (job.total(first + (lane * each + row / 2) * down_parts, row % 2, down_parts) + bias) * scale;
        }
        let mut sum = 0f32;
        for pair in 0..count {
            let (v, whose) = (warp::shfl_idx(v, pair), warp::shfl_idx(token, pair));
            sum += if whose == lane { v } else { 0.0 };
        }
        if lane < tokens {
            out.set(lane as usize * out_row + (first_row + row) as usize, T::from_f32(sum));
        }
        row += WARPS as u32;
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
    );
    moe_fused_vector_f16 { type T = f16; } [THREADS, 1; Sm90a] => fused_vector::<T, WARPS, STEPS>;
    moe_fused_vector_bf16 { type T = bf16; } [THREADS, 1; Sm90a] => fused_vector::<T, WARPS, STEPS>;
}
