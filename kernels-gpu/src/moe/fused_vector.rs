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

use super::expert_activation::ExpertActivation;
use super::fused::{Expert, HALVES, PLAIN, Weights};
use super::pairs::{INVALID, NOWHERE, Pairs, existing_tokens};
use crate::tensor_float::TensorFloat;
use cuda_std::atomic::{AcqRel, Acquire, Block, Device, Relaxed, Release};
use cuda_std::shared::Carver;
use cuda_std::vec::B128;
use cuda_std::{
    Global, GlobalMut, Shared, bf16, cp_async, dependent_launch, entries, f16, mbarrier, thread, tma, unroll, warp,
};

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
pub const fn shared_bytes(warps: usize, steps: usize, operands: usize, sums: usize, stages: usize) -> usize {
    (warps * MAX_STAGES + 2) * 8
        + 3 * MAX_PAIRS * 4
        + 16
        + sums.next_multiple_of(4) * 4
        + operands.next_multiple_of(8) * 2
        + 128
        + warps * stages * 2 * steps * 256 * 2
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

/// Where a share begins and ends: rows, and units as parts of 2³² of all.
#[derive(Clone, Copy)]
struct Borders {
    rows: [u32; 2],
    units: [u64; 2],
}

impl Borders {
    /// `lines`: rows of the first product that make a unit.
    #[inline(always)]
    fn new(block: u32, blocks: u32, hidden: u32, lines: u32) -> Self {
        let (blocks, hidden, lines) = (blocks as u64, hidden as u64, lines as u64);
        // SAFETY: there are blocks, and outputs.
        unsafe { core::hint::assert_unchecked(blocks != 0 && hidden != 0 && lines != 0) };
        let at = [block as u64, block as u64 + 1];
        let rows = [at[0] * hidden / blocks, at[1] * hidden / blocks];
        // For each element between the products there are `lines` rows of `hidden` elements, then one: so in all of them are
        // `(lines + 1) · hidden` to be read, of which a row of the second product is one.
        let even = lines * hidden < blocks;
        let all = if even { blocks } else { blocks * lines * hidden };
        let units = |at: u64, row: u64| {
            let before = if even { at } else { at * (lines + 1) * hidden - blocks * row };
            (before << 32) / all
        };
        Self { rows: [rows[0] as u32, rows[1] as u32], units: [units(at[0], rows[0]), units(at[1], rows[1])] }
    }

    /// Of so many units.
    #[inline(always)]
    fn share(self, units: u32) -> Share {
        let [from, to] = [(self.units[0] * units as u64) >> 32, (self.units[1] * units as u64) >> 32];
        Share {
            unit: from as u32,
            units: (to - from) as u32,
            row: self.rows[0],
            rows: self.rows[1] - self.rows[0],
        }
    }
}

impl Share {
    /// Of `pairs` pairs.
    pub fn new(block: u32, blocks: u32, pairs: u32, hidden: u32, intermediate: u32, lines: u32) -> Self {
        Borders::new(block, blocks, hidden, lines).share(pairs * intermediate)
    }
}

/// A piece: of one row of weights or two.
#[derive(Clone, Copy)]
struct Piece {
    /// Whose, among the pairs that exist.
    pair: u32,
    /// The output, or the first of two.
    output: u32,
    both: bool,
    /// Elements of the rows.
    start: u32,
    len: u32,
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
    activation: ExpertActivation,
    /// For each pair that exists its expert.
    bins: Shared<u32>,
    sums: Shared<f32>,
}

impl<T: TensorFloat, const STEPS: usize> Job<T, STEPS> {
    const LEN: u32 = STEPS as u32 * 256;

    #[inline(always)]
    fn lines(&self) -> u32 {
        if self.layout == PLAIN { 1 } else { 2 }
    }

    /// Pieces of a unit of the first product; of the second.
    #[inline(always)]
    fn pieces(&self, down: bool) -> u32 {
        (if down { self.intermediate } else { self.hidden }).div_ceil(Self::LEN).max(1)
    }

    #[inline(always)]
    fn up(&self, share: Share, i: u32) -> Piece {
        let pieces = self.pieces(false);
        let (unit, start) = (share.unit + i / pieces, i % pieces * Self::LEN);
        let width = self.intermediate.max(1);
        Piece {
            pair: unit / width,
            output: unit % width,
            both: self.layout != PLAIN,
            start,
            len: (self.hidden - start).min(Self::LEN),
        }
    }

    #[inline(always)]
    fn down(&self, share: Share, i: u32) -> Piece {
        let pieces = self.pieces(true);
        let (unit, start) = (i / pieces, i % pieces * Self::LEN);
        let each = share.rows.div_ceil(2).max(1);
        let row = 2 * (unit % each);
        Piece {
            pair: unit / each,
            output: share.row + row,
            both: row + 1 < share.rows,
            start,
            len: (self.intermediate - start).min(Self::LEN),
        }
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

    /// Where a piece's rows start; the same twice if there is one.
    #[inline(always)]
    fn weights(&self, piece: Piece, bin: u32, down: bool) -> (Global<T>, Global<T>) {
        let expert = self.expert(bin, down);
        let k = if down { self.intermediate } else { self.hidden };
        let row = |second: bool| {
            let second = second && piece.both;
            let row = if down { piece.output + second as u32 } else { self.row(piece.output, second) };
            expert.weights.offset(row as usize * k as usize + piece.start as usize)
        };
        (row(false), row(true))
    }

    /// Multiplies a piece with the part of the vector that `operand` begins with, and keeps the sums as number `i`.
    #[inline(always)]
    unsafe fn multiply(
        &self,
        piece: Piece,
        i: u32,
        operand: Shared<T>,
        first: impl Fn(u32) -> B128<u32, 4>,
        second: impl Fn(u32) -> B128<u32, 4>,
    ) {
        let lane = warp::lane_id();
        let mut acc = [[0f32; 4]; 2];
        unroll::<STEPS>(|s| {
            let at = s as u32 * 256 + lane * 8;
            let (mut a, mut b, mut x) = ([0u32; 4], [0u32; 4], [0u32; 4]);
            if at < piece.len {
                x = operand.get_as::<B128<u32, 4>>(at).0;
                a = first(at).0;
                if piece.both {
                    b = second(at).0;
                }
            }
            acc[0] = T::mma([a[0], b[0], a[1], b[1]], [x[0], x[1]], acc[0]);
            acc[1] = T::mma([a[2], b[2], a[3], b[3]], [x[2], x[3]], acc[1]);
        });
        // Lane `4 g + t` has columns `2 t` and `2 t + 1` of row `g`, one of which may be `g`.
        let (g, t) = (lane / 4, lane % 4);
        let mine = t == g / 2;
        let on = |row: usize| {
            let (even, odd) = (acc[0][row] + acc[1][row], acc[0][row + 1] + acc[1][row + 1]);
            let v = if g % 2 == 0 { even } else { odd };
            if mine { v } else { 0.0 }
        };
        let (a, b) = (on(0), on(2));
        // The lower half of the warp adds up the first row, the upper half the second.
        let upper = lane >= 16;
        let mut sum = if upper { b } else { a } + warp::shfl_xor(if upper { a } else { b }, 16);
        unroll::<4>(|i| sum += warp::shfl_xor(sum, 8 >> i));
        if lane % 16 == 0 {
            self.sums.set(2 * i + lane / 16, sum);
        }
    }

    /// Adds up pieces of a row.
    #[inline(always)]
    unsafe fn total(&self, unit: u32, second: u32, pieces: u32) -> f32 {
        let mut sum = 0f32;
        for i in 0..pieces {
            sum += self.sums.get(2 * (unit * pieces + i) + second);
        }
        sum
    }

    /// Stores a share's `h`, by all threads, when all have their sums.
    #[inline(always)]
    unsafe fn finish_up(&self, share: Share) {
        let pieces = self.pieces(false);
        let mut unit = thread::thread_idx_x();
        while unit < share.units {
            let Piece { pair, output, .. } = self.up(share, unit * pieces);
            let expert = self.expert(self.bins.get(pair), false);
            let gate = self.total(unit, 0, pieces) + expert.bias(self.row(output, false));
            let v = if self.layout == PLAIN {
                self.activation.apply(gate)
            } else {
                let up = self.total(unit, 1, pieces) + expert.bias(self.row(output, true));
                self.activation.gated(gate, up)
            };
            self.h.set(share.unit + unit, T::from_f32(v));
            unit += thread::block_dim_x();
        }
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

    /// By one thread of each block when all shares are done. The last leaves zeroes.
    #[inline(always)]
    unsafe fn leave(self) {
        if self.words.fetch_add(self.shares, 1, Device, AcqRel) == self.shares as u64 - 1 {
            for i in 0..=self.shares {
                self.words.store(i, 0, Device, Relaxed);
            }
        }
    }
}

/// See the [module](self) and [`Args`]. Grid: at most [`MAX_BLOCKS`]; block: `WARPS` warps; shared memory: [`shared_bytes`].
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
    let bars = carver.take::<u64>(WARPS * MAX_STAGES + 1);
    let bins = carver.take::<u32>(MAX_PAIRS);
    let scales = carver.take::<f32>(MAX_PAIRS);
    let tokens_of = carver.take::<u32>(MAX_PAIRS);
    let notes = carver.take::<u32>(4);
    let sums = carver.take::<f32>(sums as usize);
    let operand = carver.take::<T>(operands as usize);
    let ring = carver.take_aligned::<T>(WARPS * stages as usize * 2 * STEPS * 256, 128);
    let len = const { STEPS as u32 * 256 };
    let ring = ring.offset(warp_id * stages * 2 * len);
    let bar = |stage: u32| bars.address(warp_id * MAX_STAGES as u32 + stage);
    let vector = bars.address(WARPS * MAX_STAGES);
    if lane == 0 {
        for s in 0..stages {
            mbarrier::init(bar(s), 1);
        }
        if warp_id == 0 {
            mbarrier::init(vector, 1);
        }
        mbarrier::fence_init();
    }
    warp::sync_warp(warp::FULL);
    let borders = Borders::new(block, blocks, hidden, if layout == PLAIN { 1 } else { 2 });
    dependent_launch::begin();

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
    let mut rest = there;
    for i in 0..31 {
        if i < lane {
            rest &= rest.wrapping_sub(1);
        }
    }
    let pair = if rest == 0 { 0 } else { rest.trailing_zeros() };
    let (bin, scale) = (warp::shfl_idx(bin, pair), warp::shfl_idx(scale, pair));
    let token = pair / slots.max(1);

    let job = Job::<T, STEPS> {
        routed: [Weights::new(w13, bias13), Weights::new(w2, bias2)],
        shared: [Weights::new(shared13, shared_bias13), Weights::new(shared2, shared_bias2)],
        h: GlobalMut::new(h),
        local,
        hidden,
        intermediate,
        layout,
        activation: ExpertActivation { kind: activation, alpha, limit },
        bins,
        sums,
    };
    let share = borders.share(count * intermediate);
    let first = share.units * job.pieces(false);
    let all = first + count * share.rows.div_ceil(2) * job.pieces(true);
    let fetch = |i: u32, stage: u32| {
        let down = i >= first;
        let piece = if down { job.down(share, i - first) } else { job.up(share, i) };
        let bin = warp::shfl_idx(bin, piece.pair);
        if lane == 0 {
            let (one, two) = job.weights(piece, bin, down);
            let to = ring.address(stage * 2 * len);
            mbarrier::arrive_expect_tx(bar(stage), if piece.both { 4 } else { 2 } * piece.len);
            tma::copy_bulk(to, one.ptr(0u32), 2 * piece.len, bar(stage));
            if piece.both {
                tma::copy_bulk(to + 2 * len, two.ptr(0u32), 2 * piece.len, bar(stage));
            }
        }
    };
    let (mut at, mut next) = (warp_id, warp_id);
    for s in 0..stages {
        if next < all {
            fetch(next, s);
            next += WARPS as u32;
        }
    }
    let words = Words::new(words, blocks, launch);
    if warp_id == 0 {
        if lane < count {
            bins.set(lane, bin);
            scales.set(lane, scale);
            tokens_of.set(lane, token);
        }
        if lane == 0 {
            mbarrier::arrive_expect_tx(vector, tokens * hidden * 2);
            for t in 0..tokens {
                tma::copy_bulk(operand.address(t * hidden), x.wrapping_add(t as usize * x_row), hidden * 2, vector);
            }
        }
    }
    thread::sync_threads();
    if tid == 32 {
        notes.set(0u32, words.claim(block) as u32);
    }
    mbarrier::wait_parity(vector, 0);

    let (mut stage, mut parity) = (0, 0);
    // The next piece of this warp, with the vector for it.
    let mut multiply = |piece: Piece, operand: Shared<T>, i: u32| {
        mbarrier::wait_parity(bar(stage), parity);
        let from = ring.offset(stage * 2 * len);
        job.multiply(piece, i, operand, |at| from.get_as(at), |at| from.get_as(len + at));
        warp::sync_warp(warp::FULL);
        if next < all {
            fetch(next, stage);
            next += WARPS as u32;
        }
        stage += 1;
        if stage == stages {
            (stage, parity) = (0, parity ^ 1);
        }
    };
    while at < first {
        let piece = job.up(share, at);
        let token = warp::shfl_idx(token, piece.pair);
        multiply(piece, operand.offset(token * hidden + piece.start), at);
        at += WARPS as u32;
    }
    thread::sync_threads();
    if notes.get(0u32) != 0 {
        job.finish_up(share);
        thread::sync_threads();
        if tid == 0 {
            words.publish(block);
        }
    }

    loop {
        let (mut polls, mut ok, mut idle) = (0, false, u32::MAX);
        while !ok && polls < PATIENCE {
            (ok, idle) = (true, u32::MAX);
            let mut i = tid;
            while i < blocks {
                let word = words.words.load(i, Device, Acquire);
                ok &= word == words.done;
                if word != words.done && word != words.taken {
                    idle = i;
                }
                i += const { WARPS as u32 * 32 };
            }
            polls += 1;
            thread::spin_hint();
        }
        if thread::sync_threads_and(ok) {
            break;
        }
        if tid == 0 {
            notes.set(1u32, u32::MAX);
        }
        thread::sync_threads();
        if idle != u32::MAX {
            notes.fetch_min(1u32, idle, Block, Relaxed);
        }
        thread::sync_threads();
        let other = notes.get(1u32);
        if other != u32::MAX {
            if tid == 0 {
                notes.set(2u32, words.claim(other) as u32);
            }
            thread::sync_threads();
            if notes.get(2u32) != 0 {
                let share =
                    Share::new(other, blocks, count, hidden, intermediate, if layout == PLAIN { 1 } else { 2 });
                let mut i = warp_id;
                while i < share.units * job.pieces(false) {
                    let piece = job.up(share, i);
                    let (first, second) = job.weights(piece, bins.get(piece.pair), false);
                    let operand = operand.offset(tokens_of.get(piece.pair) * hidden + piece.start);
                    job.multiply(piece, i, operand, |at| first.get_as(at), |at| second.get_as(at));
                    i += WARPS as u32;
                }
                thread::sync_threads();
                job.finish_up(share);
                thread::sync_threads();
                if tid == 0 {
                    words.publish(other);
                }
            }
        }
        thread::sync_threads();
    }

    // All of `h`, in place of `x`.
    let mut i = 8 * tid;
    while i < count * intermediate {
        cp_async::copy_16(operand.address(i), job.h.ptr(i).cast_const());
        i += const { WARPS as u32 * 32 * 8 };
    }
    cp_async::commit_group();
    if tid == 32 {
        words.leave();
    }
    cp_async::wait_group::<0>();
    thread::sync_threads();
    while at < all {
        let piece = job.down(share, at - first);
        multiply(piece, operand.offset(piece.pair * intermediate + piece.start), at - first);
        at += WARPS as u32;
    }
    thread::sync_threads();
    let (pieces, each) = (job.pieces(true), share.rows.div_ceil(2));
    let mut i = tid;
    while i < tokens * share.rows {
        let (token, row) = (i / share.rows.max(1), i % share.rows.max(1));
        let mut sum = 0f32;
        for pair in 0..count {
            if tokens_of.get(pair) == token {
                let v = job.total(pair * each + row / 2, row % 2, pieces);
                let bias = job.expert(bins.get(pair), true).bias(share.row + row);
                sum += (v + bias) * scales.get(pair);
            }
        }
        GlobalMut::new(out).set(token as usize * out_row + (share.row + row) as usize, T::from_f32(sum));
        i += const { WARPS as u32 * 32 };
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
    moe_fused_vector_f16 { type T = f16; } [256, 1; Sm90a] => fused_vector::<T, 8, 4>;
    moe_fused_vector_bf16 { type T = bf16; } [256, 1; Sm90a] => fused_vector::<T, 8, 4>;
    moe_fused_vector_v2_bf16 { type T = bf16; } [512, 1; Sm90a] => fused_vector::<T, 16, 2>;
    moe_fused_vector_v3_bf16 { type T = bf16; } [512, 1; Sm90a] => fused_vector::<T, 16, 4>;
}
