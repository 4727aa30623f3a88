//! The fused block for very few pairs, in one launch: two products of matrices with vectors, and the sum over slots.
//!
//! All that takes time is reading weights, so nothing may stop their stream: not the launch of a second kernel, not the wait for `h`,
//! not the end of a block's share. Each warp has a ring in shared memory of its own, which its first lane has the copy engine
//! fill with pieces of rows of weights, as they lie in memory.
//!
//! # Order
//! Pairs are in two groups. A block takes part in the first product of the first group, then of the second; then in the second product of the
//! first group, and of the second. While it reads weights of one group, the blocks exchange the `h` of the other: warps beside those that multiply
//! make them of the sums that these leave in shared memory, store them, and bring those of all blocks. The warps that multiply find them when they come to them.
//!
//! What is not multiplication is instructions that run once, 5 to 6 cycles each, before the first piece is asked for and after the last `h` is there. So a
//! warp's barriers are its own, experts are asked for first, and where a warp's first piece lies in an expert's matrix is computed meanwhile, as if
//! all pairs existed. If some do not, what is to be done is divided anew.
//!
//! # Shares
//! A unit of the first product is an output of a pair: a row of gates and a row of values; of the second some rows of weights of a pair. A block takes
//! the same rows of the second product for all pairs, so that it has all there is to add up for its outputs: no partial results leave it. Rows come in
//! whole numbers, units in whole words; whoever has one more row of the second product has less of the first, so that all read equally much ([`Borders`]). Within a block
//! pieces of [`STEPS`] times 256 elements of two rows, or of [`rows`] of the second product, go to warps in turn.
//!
//! # Products
//! Tensor cores, with one product of which most is thrown away: a warp's lanes read 16 bytes each of a row, of another row and of the vector, all at
//! the same place, and call them the fragments of a product of two times eight rows by eight columns. A sum on the diagonal is then one of
//! what four lanes have read, of a row with the vector, and all of them together are the row's product. That takes 5 instructions for 1 KiB of
//! weights where multiply-adds take 50. Sums of a piece go to shared memory, and are added up in the order of K.
//!
//! # Blocks that wait for each other
//! Blocks need not run at the same time: who has waited for long computes what nobody has done, from memory without the ring. Thus blocks wait only
//! for such as run. There are two ways to tell each other, which make no difference in the results. Both recognise their launch by a number that no other has, so what the
//! workspace holds before does not matter; replays of a graph repeat the number, so the last block to have found everything leaves zeroes. Warps of their own
//! do all that, because fences of a thread wait for the copies that it has asked for.
//!
//! **Claims** ([`Claims`]), for much `h`. Each share has a word in the workspace. Who begins it claims the word, and says there which `h` are stored, behind a fence. `h` itself
//! comes in one copy.
//!
//! **Words** ([`Words`]), for little. Four `h` and the number of the launch are 16 bytes, which are stored and read at once: whoever finds the number has found
//! the values, and nothing else has to be said or waited for. What is missing for long several blocks may compute and store, the same bits.

use super::fused::{Expert, HALVES, PLAIN, Weights};
use super::fused_wgmma::Activation;
use super::pairs::{INVALID, NOWHERE, Pairs, existing_tokens};
use crate::tensor_float::TensorFloat;
use cuda_std::atomic::{self, AcqRel, Device, Relaxed, Release};
use cuda_std::shared::Carver;
use cuda_std::vec::{B64, B128};
use cuda_std::{
    Global, GlobalMut, Shared, bf16, dependent_launch, entries, f16, float, integer, mbarrier, thread, tma, unroll,
    warp,
};

/// Warps of a block that multiply.
pub const WARPS: usize = 16;
/// Elements of a row of a piece, in units of 256: a warp's lanes take 8 each.
pub const STEPS: usize = 4;
/// The most pairs.
pub const MAX_PAIRS: usize = 32;
/// The most blocks.
pub const MAX_BLOCKS: usize = 256;
/// Words of the workspace that blocks claim: one for each share, and how many blocks have seen all of them done.
pub const CLAIMS: usize = MAX_BLOCKS + 1;
/// Outputs of a pair that are exchanged as one word.
pub const OUTPUTS: usize = 4;
/// Bytes of such a word: the outputs, and the number of the launch.
pub const WORD_BYTES: usize = 16;
/// The most stages of a warp's ring.
pub const MAX_STAGES: usize = 8;
/// Warps that look for words.
const SEEKERS: usize = 3;
/// Words that a thread looks for at once.
const WORDS: usize = 8;
/// How many times as many it keeps in mind.
const BATCHES: usize = 3;
/// How often a block looks for claims, or for words, before it helps out: about 100 µs.
const PATIENCE: [u32; 2] = [100, 500];
/// Of the word that counts blocks, those bits.
const COUNT: u32 = 10;

/// Threads of a block: the warps that multiply, and those that exchange `h`.
pub const fn threads(words: bool) -> usize {
    (WARPS + if words { SEEKERS + 1 } else { 1 }) * 32
}

/// Rows of a piece of the second product.
pub const fn rows(words: bool) -> usize {
    if words { 4 } else { 2 }
}

/// Dynamic shared memory for vectors of so many elements in all (`x`, then `h`), so many sums, and so many elements of each warp's ring.
pub const fn shared_bytes(operands: usize, sums: usize, room: usize) -> usize {
    (WARPS + 1) * MAX_STAGES * 8
        + 2 * MAX_PAIRS * 4
        + sums.next_multiple_of(4) * 4
        + operands.next_multiple_of(8) * 2
        + 128
        + WARPS * room * 2
}

/// Where a share begins and ends: rows, and units as parts of all.
#[derive(Clone, Copy)]
struct Borders {
    rows: [u32; 2],
    units: [f32; 2],
    blocks: u32,
    /// Whether blocks have some rows each.
    many: bool,
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
        let many = hidden >= 4 * blocks;
        Self {
            rows,
            blocks,
            many,
            units: [units(block, rows[0]), if block + 1 == blocks { 1.0 } else { units(block + 1, rows[1]) }],
        }
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

/// What a block does of the first product, in whole words of so many outputs.
#[derive(Clone, Copy)]
struct Share {
    /// Pairs of the first group.
    early: u32,
    /// Words of either group in all.
    groups: [u32; 2],
    /// The block's first unit of either, and how many.
    starts: [u32; 2],
    units: [u32; 2],
}

impl Share {
    #[inline(always)]
    fn new(borders: Borders, each: u32, intermediate: u32, count: u32) -> Self {
        let (words, early) = (intermediate / each, count / 2);
        let groups = [early * words, (count - early) * words];
        let ((a, na), (mut b, mut nb)) = (borders.share(groups[0]), borders.share(groups[1]));
        if borders.many && groups[1] >= 2 * borders.blocks {
            // Both together are a share of all, so that one of them makes up for what the other is rounded by.
            let (start, n) = borders.share(groups[0] + groups[1]);
            (b, nb) = (start - a, n - na);
        }
        let units = |words: u32| words * each;
        Self { early, groups, starts: [units(a), units(groups[0] + b)], units: [units(na), units(nb)] }
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

    /// Products of two or four rows with the vector at `operand`, of `N` times 256 elements or, if not `whole`, of up to so many: of two rows at a time
    /// two products, whose diagonals are to be added up.
    #[inline(always)]
    unsafe fn products<const N: usize, const R: usize>(
        &self,
        whole: bool,
        len: u32,
        operand: Shared<T>,
        rows: [Shared<T>; R],
    ) -> [[[f32; 4]; 2]; 2] {
        let lane = warp::lane_id();
        let mut acc = [[[0f32; 4]; 2]; 2];
        unroll::<N>(|s| {
            let at = s as u32 * 256 + lane * 8;
            let zero = B128([0u32; 4]);
            let (mut x, mut w) = (zero, [zero; R]);
            if whole || at < len {
                x = operand.get_as(at);
                unroll::<R>(|r| w[r] = rows[r].get_as(at));
            }
            unroll::<2>(|i| {
                if 2 * i < R {
                    acc[i] = Self::step([w[2 * i % R], w[(2 * i + 1) % R], x], acc[i]);
                }
            });
        });
        acc
    }

    /// [`products`](Self::products) of up to `LEN` elements.
    #[inline(always)]
    unsafe fn multiply_rows<const R: usize>(
        &self,
        len: u32,
        operand: Shared<T>,
        rows: [Shared<T>; R],
    ) -> [[[f32; 4]; 2]; 2] {
        match len {
            768 => self.products::<3, R>(true, len, operand, rows),
            _ if len == Self::LEN => self.products::<STEPS, R>(true, len, operand, rows),
            _ => self.products::<STEPS, R>(false, len, operand, rows),
        }
    }

    /// Multiplies up to `LEN` elements of two rows, which may be the same, with the vector at `operand`. Every lane of the warp's lower half gets
    /// the first row's sum, of the upper half the second's.
    #[inline(always)]
    unsafe fn multiply(&self, len: u32, operand: Shared<T>, rows: [Shared<T>; 2]) -> f32 {
        Self::diagonal(self.multiply_rows::<2>(len, operand, rows)[0])
    }

    /// The same of four rows, whose sums the first four lanes get; added up in the same order.
    #[inline(always)]
    unsafe fn multiply_four(&self, len: u32, operand: Shared<T>, rows: [Shared<T>; 4]) -> f32 {
        let acc = self.multiply_rows::<4>(len, operand, rows);
        let lane = warp::lane_id();
        let (g, t) = (lane / 4, lane % 4);
        let mut sum = 0f32;
        unroll::<4>(|row| {
            let (acc, i) = (acc[row / 2], row % 2 * 2);
            let (even, odd) = (acc[0][i] + acc[1][i], acc[0][i + 1] + acc[1][i + 1]);
            let v = warp::shfl_idx(if g % 2 == 0 { even } else { odd }, lane / 4 * 4 + g / 2);
            if row as u32 == t {
                sum = v;
            }
        });
        sum += warp::shfl_xor(sum, 4);
        sum += warp::shfl_xor(sum, 16);
        sum + warp::shfl_xor(sum, 8)
    }

    /// [`multiply`](Self::multiply) from anywhere, in little code and few registers: one step after the other.
    #[inline(always)]
    unsafe fn multiply_slowly(
        &self,
        len: u32,
        operand: Shared<T>,
        first: impl Fn(u32) -> B128<u32, 4>,
        second: impl Fn(u32) -> B128<u32, 4>,
    ) -> f32 {
        let zero = B128([0u32; 4]);
        let (mut acc, mut step) = ([[0f32; 4]; 2], 0);
        while step < len {
            let (mut loaded, at) = ([zero; 3], step + warp::lane_id() * 8);
            if at < len {
                loaded = [first(at), second(at), operand.get_as(at)];
            }
            acc = Self::step(loaded, acc);
            // Not several at once.
            step = integer::opaque(step + 256);
        }
        Self::diagonal(acc)
    }

    #[inline(always)]
    unsafe fn step([B128(a), B128(b), B128(x)]: [B128<u32, 4>; 3], acc: [[f32; 4]; 2]) -> [[f32; 4]; 2] {
        [T::mma([a[0], b[0], a[1], b[1]], [x[0], x[1]], acc[0]), T::mma([a[2], b[2], a[3], b[3]], [x[2], x[3]], acc[1])]
    }

    #[inline(always)]
    unsafe fn diagonal(acc: [[f32; 4]; 2]) -> f32 {
        let lane = warp::lane_id();
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

    /// Adds up pieces of two rows, from this one on.
    #[inline(always)]
    unsafe fn totals(&self, first: u32, parts: u32) -> [f32; 2] {
        let mut sums = [0f32; 2];
        for i in 0..parts {
            let B64([a, b]) = self.sums.get_as::<B64<f32, 2>>(2 * (first + i));
            sums = [sums[0] + a, sums[1] + b];
        }
        sums
    }

    /// A unit of the first product, by one warp, from memory; the same in all lanes.
    #[inline(always)]
    unsafe fn alone(&self, unit: u32, operand: Shared<T>) -> f32 {
        let (pair, output) = divided(unit, self.intermediate);
        let (bin, token) = (self.bins.get(pair), self.tokens_of.get(pair));
        let weights = self.expert(bin, false).weights;
        let row = |up: bool| weights.offset(self.row(output, up) as usize * self.hidden as usize);
        let (gates, values) = (row(false), row(self.layout != PLAIN));
        let (mut sum, mut start) = (0f32, 0);
        while start < self.hidden {
            sum += self.multiply_slowly(
                (self.hidden - start).min(Self::LEN),
                operand.offset(token * self.hidden + start),
                |at| gates.get_as(start + at),
                |at| values.get_as(start + at),
            );
            start += Self::LEN;
        }
        self.finish(pair, output, [warp::shfl_idx(sum, 0), warp::shfl_idx(sum, 16)])
    }

    /// An output of the first product.
    #[inline(always)]
    unsafe fn finish(&self, pair: u32, output: u32, [gate, up]: [f32; 2]) -> f32 {
        let expert = self.expert(self.bins.get(pair), false);
        let gate = gate + expert.bias(self.row(output, false));
        let up = if self.layout == PLAIN { 0.0 } else { up + expert.bias(self.row(output, true)) };
        self.activation.gated(gate, up)
    }
}

/// The words through which blocks know of each other.
#[derive(Clone, Copy)]
struct Claims {
    words: GlobalMut<u64>,
    shares: u32,
    /// What a word is if somebody has begun the share; with one more for each group that is done.
    taken: u64,
}

impl Claims {
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
            unroll::<{ CLAIMS.div_ceil(32) }>(|i| {
                let word = lane + 32 * i as u32;
                if word <= self.shares {
                    self.words.store(word, 0, Device, Relaxed);
                }
            });
        }
    }
}

/// The words by which blocks exchange `h`.
#[derive(Clone, Copy)]
struct Words {
    words: GlobalMut<B128<u64, 2>>,
    /// How many blocks have found all of them.
    count: GlobalMut<u64>,
    launch: u64,
}

impl Words {
    /// What the word that counts is before anything is counted.
    #[inline(always)]
    fn claim(self) -> u64 {
        self.launch << COUNT
    }

    /// By one thread of each block, before it counts itself.
    #[inline(always)]
    unsafe fn begin(self) {
        let found = self.count.load(0u32, Device, Relaxed);
        if found >> COUNT << COUNT != self.claim() {
            // Or somebody else has.
            self.count.compare_exchange(0u32, found, self.claim(), Device, Relaxed);
        }
    }

    #[inline(always)]
    unsafe fn store(self, word: u32, values: u64) {
        atomic::store_pair(self.words.ptr(word), [values, self.launch]);
    }

    /// By a warp of each of so many blocks, which has found all of so many words. The last leaves zeroes.
    #[inline(always)]
    unsafe fn leave(self, blocks: u32, words: u32) {
        let lane = warp::lane_id();
        let before = if lane == 0 { self.count.fetch_add(0u32, 1, Device, AcqRel) } else { 0 };
        if warp::shfl_idx(before, 0) == self.claim() + blocks as u64 - 1 {
            let mut word = lane;
            while word < words {
                atomic::store_pair(self.words.ptr(word), [0; 2]);
                word += 32;
            }
            if lane == 0 {
                self.count.store(0u32, 0, Device, Relaxed);
            }
        }
    }
}

/// Four values rounded to elements, as they lie in memory.
#[inline(always)]
fn packed<T: TensorFloat>([a, b, c, d]: [f32; OUTPUTS]) -> u64 {
    T::pack_f32(a, b) as u64 | (T::pack_f32(c, d) as u64) << 32
}

/// How the warps beside those that multiply exchange `h` with other blocks.
#[derive(Clone, Copy)]
struct Exchange<'a, T, const STEPS: usize> {
    job: &'a Job<T, STEPS>,
    share: Share,
    /// Pieces of the first product of the first group.
    first: u32,
    /// Pairs that exist.
    count: u32,
    blocks: u32,
    launch: u64,
    /// The barriers of `x`, then of `h` of either group.
    bars: Shared<u64>,
    vectors: Shared<T>,
    h_vectors: Shared<T>,
}

impl<T: TensorFloat, const STEPS: usize> Exchange<'_, T, STEPS> {
    /// By one warp, in rows of elements.
    #[inline(always)]
    unsafe fn by_claims(self, h: *mut u8, words: *mut u64) {
        let Self {
            job,
            share: Share { groups, starts, units, .. },
            first,
            count,
            blocks,
            launch,
            bars,
            vectors,
            h_vectors,
        } = self;
        let (lane, up_parts, width) = (warp::lane_id(), job.parts(false), job.intermediate.max(1));
        let there = |i: u32| bars.address(i);
        let (claims, h) = (Claims::new(words, blocks, launch), GlobalMut::new(h.cast::<T>()));
        let block = thread::block_idx_x();
        let won = lane == 0 && claims.claim(block);
        let own = warp::warp_vote_any(warp::FULL, won);
        let mut polls = 0;
        for group in 0..2u32 {
            thread::sync_named(1 + group, const { (WARPS * 32) as u32 + 32 });
            if own {
                let (start, units) = if group == 0 { (starts[0], units[0]) } else { (starts[1], units[1]) };
                let base = if group == 0 { 0 } else { first };
                let mut unit = lane;
                while unit < units {
                    let (pair, output) = divided(start + unit, width);
                    let piece = base + unit * up_parts;
                    let v = job.finish(pair, output, job.totals(piece, up_parts));
                    h.set(start + unit, T::from_f32(v));
                    unit += 32;
                }
                warp::sync_warp(warp::FULL);
                if won {
                    claims.publish(block, group as u64 + 1);
                }
            }
            loop {
                let (mut ok, mut idle) = (true, u32::MAX);
                unroll::<{ MAX_BLOCKS / 32 }>(|i| {
                    let other = lane + 32 * i as u32;
                    if other < blocks {
                        let word = claims.words.load(other, Device, Relaxed);
                        if claims.is_idle(word) {
                            idle = other;
                        }
                        ok &= !claims.is_idle(word) && (word & 3) as u32 > group;
                    }
                });
                if warp::warp_vote_all(warp::FULL, ok) {
                    break;
                }
                polls += 1;
                if polls > PATIENCE[0] {
                    let who = warp::warp_vote_ballot(warp::FULL, idle != u32::MAX);
                    if who != 0 {
                        let other = warp::shfl_idx(idle, who.trailing_zeros());
                        let won = lane == 0 && claims.claim(other);
                        if warp::warp_vote_any(warp::FULL, won) {
                            let borders = Borders::new(other, blocks, job.hidden, job.lines());
                            let Share { starts, units, .. } = Share::new(borders, 1, job.intermediate, count);
                            mbarrier::wait_parity(there(0), 0);
                            for unit in 0..units[0] + units[1] {
                                let late = unit >= units[0];
                                let unit = if late { starts[1] + unit - units[0] } else { starts[0] + unit };
                                let v = job.alone(unit, vectors);
                                if lane == 0 {
                                    h.set(unit, T::from_f32(v));
                                }
                            }
                            warp::sync_warp(warp::FULL);
                            if won {
                                claims.publish(other, 2);
                            }
                        }
                    }
                }
                thread::spin_hint();
            }
            thread::device_fence();
            // What other lanes have seen comes before the copy, too.
            warp::sync_warp(warp::FULL);
            if lane == 0 {
                let (from, n) = if group == 0 { (0, groups[0]) } else { (groups[0], groups[1]) };
                tma::fence_async_global();
                mbarrier::arrive_expect_tx(there(1 + group), n * 2);
                if n > 0 {
                    tma::copy_bulk(h_vectors.address(from), h.ptr(from).cast_const(), n * 2, there(1 + group));
                }
            }
        }
        claims.leave();
    }

    /// By the last warps, in words: the first of them makes the block's own, the others look for those of all blocks.
    #[inline(always)]
    unsafe fn by_words(self, h: *mut u8, words: *mut u64) {
        let Self {
            job,
            share: Share { groups, starts, units, .. },
            first,
            count: _,
            blocks,
            launch,
            bars,
            vectors,
            h_vectors,
        } = self;
        let (lane, up_parts, width) = (warp::lane_id(), job.parts(false), job.intermediate.max(1));
        let there = |i: u32| bars.address(i);
        let words = Words { words: GlobalMut::new(h.cast()), count: GlobalMut::new(words), launch };
        let helpers = const { (SEEKERS * 32) as u32 + 32 };
        let group_of = |late: bool| if late { (starts[1], units[1], first) } else { (starts[0], units[0], 0) };
        let makes = warp::warp_id() == WARPS as u32;
        if makes && lane == 0 {
            words.begin();
        }
        thread::sync_named(3, helpers);
        if makes {
            for group in 0..integer::opaque(2) {
                if (if group == 1 { groups[1] } else { groups[0] }) == 0 {
                    continue;
                }
                let (start, units, base) = group_of(group == 1);
                thread::sync_named(1 + group, const { (WARPS * 32) as u32 + 32 });
                // All lanes of the warp, as four units are in neighbours.
                let mut unit = lane;
                while unit - lane < units {
                    let mut v = 0f32;
                    if unit < units {
                        let (pair, output) = divided(start + unit, width);
                        v = job.finish(pair, output, job.totals(base + unit * up_parts, up_parts));
                    }
                    let mut values = [v; OUTPUTS];
                    unroll::<OUTPUTS>(|i| values[i] = warp::shfl_down(v, i as u32));
                    if unit < units && unit % OUTPUTS as u32 == 0 {
                        words.store((start + unit) / OUTPUTS as u32, packed::<T>(values));
                    }
                    unit += 32;
                }
            }
        } else {
            let seekers = const { (SEEKERS * 32) as u32 };
            let t = thread::thread_idx_x() - const { ((WARPS + 1) * 32) as u32 };
            for group in 0..integer::opaque(2) {
                let late = group == 1;
                let (first_word, n_words) = if late { (groups[0], groups[1]) } else { (0, groups[0]) };
                if n_words == 0 {
                    continue;
                }
                thread::sync_named(5 + group, const { ((WARPS + SEEKERS) * 32) as u32 });
                let mut word = t;
                while word - lane < n_words {
                    // A bit for each, of which the last thread has the fewest.
                    let n = n_words.saturating_sub(word).div_ceil(seekers).min(const { (WORDS * BATCHES) as u32 });
                    let mut missing = (1u32 << n) - 1;
                    let mut looks = 0;
                    loop {
                        let mut batch = 0;
                        // Not written out five times.
                        let batches = integer::opaque(const { (WORDS * BATCHES) as u32 });
                        while batch < batches {
                            let asked = missing >> batch & const { (1 << WORDS) - 1 };
                            if warp::warp_vote_any(warp::FULL, asked != 0) {
                                let from = words.words.offset(first_word + word + batch * seekers);
                                let to = (first_word + word + batch * seekers) as usize * OUTPUTS;
                                let mut found = [[0u64; 2]; WORDS];
                                unroll::<WORDS>(|i| {
                                    found[i] = atomic::load_pair_if(asked >> i & 1 != 0, from.ptr(i * SEEKERS * 32));
                                });
                                // All are asked for before any is looked at.
                                warp::sync_warp(warp::FULL);
                                unroll::<WORDS>(|i| {
                                    if asked >> i & 1 != 0 && found[i][1] == launch {
                                        h_vectors.set_as(to + i * SEEKERS * 32 * OUTPUTS, B64([found[i][0]]));
                                        missing &= !(1 << (batch + i as u32));
                                    }
                                });
                            }
                            batch += WORDS as u32;
                        }
                        if warp::warp_vote_all(warp::FULL, missing == 0) {
                            break;
                        }
                        looks += 1;
                        if looks > PATIENCE[1] {
                            mbarrier::wait_parity(there(0), 0);
                            loop {
                                let who = warp::warp_vote_ballot(warp::FULL, missing != 0);
                                if who == 0 {
                                    break;
                                }
                                let whose = who.trailing_zeros();
                                let i = warp::shfl_idx(missing, whose).trailing_zeros();
                                let at = first_word + word - lane + whose + i * seekers;
                                let (mut unit, mut values) = (integer::opaque(at * OUTPUTS as u32), 0u64);
                                loop {
                                    let v = job.alone(unit, vectors);
                                    values = values >> 16 | (T::pack_f32(v, 0.0) as u64) << 48;
                                    unit += 1;
                                    if unit % OUTPUTS as u32 == 0 {
                                        break;
                                    }
                                }
                                if lane == whose {
                                    h_vectors.set_as(at * OUTPUTS as u32, B64([values]));
                                    words.store(at, values);
                                    missing &= missing - 1;
                                }
                            }
                            break;
                        }
                        thread::spin_hint();
                    }
                    word += const { (SEEKERS * 32 * WORDS * BATCHES) as u32 };
                }
                // Each thread by itself, as it has stored what it found.
                mbarrier::arrive(there(1 + group));
            }
        }
        thread::sync_named(3, helpers);
        let all = groups[0] + groups[1];
        if makes && all > 0 {
            words.leave(blocks, all);
        }
    }
}

/// See the [module](self) and [`Args`]. Grid: at most [`MAX_BLOCKS`]; block: [`threads`]; shared memory: [`shared_bytes`].
#[inline(always)]
unsafe fn fused_vector<T: TensorFloat, const WARPS: usize, const STEPS: usize, const TAGGED: bool>(
    out: *mut T,
    out_row: usize,
    h: *mut u8,
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
    room: u32,
) {
    let (lane, warp_id) = (warp::lane_id(), warp::warp_id());
    let (block, blocks) = (thread::block_idx_x(), thread::grid_dim_x());
    let mut carver = Carver::new();
    let bars = carver.take::<u64>((WARPS + 1) * MAX_STAGES);
    let bins = carver.take::<u32>(MAX_PAIRS);
    let tokens_of = carver.take::<u32>(MAX_PAIRS);
    let sums = carver.take::<f32>(sums as usize);
    let vectors = carver.take::<T>(operands as usize);
    let ring = carver.take_aligned::<T>(WARPS * room as usize, 128);
    let len = const { STEPS as u32 * 256 };
    // `x`, then `h` of either group.
    let there = |i: u32| bars.address(const { (WARPS * MAX_STAGES) as u32 } + i);
    let bar = |stage: u32| bars.address(warp_id * MAX_STAGES as u32 + stage);
    // By the thread that fetches, which need not wait for others then; one address for a warp, as lanes' own would be taken in turn.
    if lane == 0 && warp_id <= WARPS as u32 {
        unroll::<MAX_STAGES>(|i| {
            mbarrier::init(
                bar(i as u32),
                if TAGGED && i > 0 && warp_id == WARPS as u32 { SEEKERS as u32 * 32 } else { 1 },
            );
        });
        mbarrier::fence_init();
    }
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
    // A lane has a pair, whose expert is asked for. With words, what does not depend on experts is computed while they come; otherwise before.
    let all = tokens * slots;
    let ask = || {
        dependent_launch::begin();
        let (token, slot) = if tokens == 1 { (0, lane) } else { divided(lane, slots.max(1)) };
        let (mut id, mut scale) = (experts.wrapping_add(slot.wrapping_sub(top_k)) as i32, 1.0);
        if slot < top_k && lane < all {
            let at = token * top_k + slot;
            (id, scale) = (pairs.topk_ids.get(at), Global::new(topk_weights).get(at));
        }
        let tokens = existing_tokens(tokens, num_tokens);
        warp::sync_warp(warp::FULL);
        (tokens, token, id, scale)
    };
    let mut asked = (0, 0, 0, 0.0);
    if TAGGED {
        asked = ask();
    }
    let borders = Borders::new(block, blocks, hidden, if layout == PLAIN { 1 } else { 2 });
    let job = Job::<T, STEPS> {
        routed: [Weights::new(w13, bias13), Weights::new(w2, bias2)],
        shared: [Weights::new(shared13, shared_bias13), Weights::new(shared2, shared_bias2)],
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
    let outputs = if TAGGED { OUTPUTS as u32 } else { 1 };
    let divide = |count: u32| Share::new(borders, outputs, intermediate, count);
    // A warp's first piece, if all pairs exist: then only the expert is to be known.
    let (share, ring) = (divide(all), ring.offset(warp_id % WARPS as u32 * room));
    let middle = share.units[0] * up_parts;
    let late = (warp_id >= middle) as usize;
    let cursor = Cursor::new(warp_id - if late == 1 { middle } else { 0 }, up_parts, WARPS as u32);
    let (first_pair, output) = divided(cursor.unit + if late == 1 { share.starts[1] } else { share.starts[0] }, width);
    let first_start = cursor.part * len;
    let row = |up: bool| w13.wrapping_add(job.row(output, up) as usize * hidden as usize + first_start as usize);
    let exists = (warp_id < middle + share.units[1] * up_parts) as u32;
    let [[gates, values]] = dependent_launch::known_here([[row(false).cast(), row(layout != PLAIN).cast()]]);

    if !TAGGED {
        asked = ask();
    }

    // Each warp makes itself a list of the pairs that exist.
    let (tokens, mut token, id, mut scale) = asked;
    let mut bin = if lane < tokens * slots { pairs.bin_of_id(id) } else { NOWHERE };
    let exist = warp::warp_vote_ballot(warp::FULL, bin != NOWHERE && bin != INVALID);
    let count = exist.count_ones();
    if exist & exist.wrapping_add(1) != 0 {
        let (mut rest, mut i) = (exist, 0);
        while i < lane {
            rest &= rest.wrapping_sub(1);
            i += 1;
        }
        let pair = if rest == 0 { 0 } else { rest.trailing_zeros() };
        warp::sync_warp(warp::FULL);
        bin = warp::shfl_idx(bin, pair);
        scale = warp::shfl_idx(scale, pair);
        token = warp::shfl_idx(token, pair);
    }

    // Fetches so many elements of a row, and of another one.
    let fetch = |stage: u32, to: u32, n: u32, row: *const T, other: Option<*const T>| {
        mbarrier::arrive_expect_tx(bar(stage), if other.is_some() { 4 } else { 2 } * n);
        tma::copy_bulk(ring.address(to), row, 2 * n, bar(stage));
        if let Some(other) = other {
            tma::copy_bulk(ring.address(to + n), other, 2 * n, bar(stage));
        }
    };
    let mut fetched = count == all && exists != 0 && warp_id < WARPS as u32;
    if fetched {
        let whose = warp::shfl_idx(bin, first_pair);
        if lane == 0 {
            let of = job.expert(whose, false).weights.ptr(0u32);
            let place = |at: *const u8| of.wrapping_byte_add(at.addr() - w13.addr());
            let other = if layout == PLAIN { None } else { Some(place(values)) };
            fetch(0, 0, (hidden - first_start).min(len), place(gates), other);
        }
    }
    thread::sync_threads();
    let share = divide(count);
    let Share { early, groups, starts, units } = share;
    let (first_row, rows) = (borders.rows[0], borders.rows[1] - borders.rows[0]);
    // Pieces up to the end of the first product of either group, and of all.
    let middle = units[0] * up_parts;
    let first = middle + units[1] * up_parts;
    let h_vectors = vectors.offset(tokens * hidden);

    if warp_id == WARPS as u32 {
        if lane == 0 {
            mbarrier::arrive_expect_tx(there(0), tokens * hidden * 2);
            for t in 0..tokens {
                tma::copy_bulk(vectors.address(t * hidden), x.wrapping_add(t as usize * x_row), hidden * 2, there(0));
            }
        }
        if lane < count {
            bins.set(lane, bin);
            tokens_of.set(lane, token);
        }
    }
    if warp_id >= WARPS as u32 {
        let exchange = Exchange {
            job: &job,
            share,
            first: middle,
            count,
            blocks,
            launch,
            bars: bars.offset(const { WARPS * MAX_STAGES }),
            vectors,
            h_vectors,
        };
        if TAGGED {
            exchange.by_words(h, words);
        } else {
            exchange.by_claims(h, words);
        }
        // A block may not end before all has come that it asked for: without a piece of a product nobody has waited for its vectors.
        if warp_id == WARPS as u32 {
            mbarrier::wait_parity(there(0), 0);
            if !TAGGED {
                mbarrier::wait_parity(there(1), 0);
                mbarrier::wait_parity(there(2), 0);
            }
        }
        return;
    }

    let up_lines = if layout == PLAIN { 1 } else { 2 };
    let down_lines = const { self::rows(TAGGED) as u32 };
    let (each, down_parts) = (rows.div_ceil(down_lines), job.parts(true));
    // Stages of a ring. With words each takes as much of it as it needs.
    let stages = if TAGGED { MAX_STAGES as u32 } else { (room / (2 * len)).min(MAX_STAGES as u32) };
    let late = first + early * each * down_parts;
    let all = first + count * each * down_parts;
    // What is to come and what is next, in pieces; stages that are filled, the first and the one after them.
    let (mut at, mut next, mut ahead, mut stage, mut to, mut parity) = (warp_id, warp_id, 0, 0, 0, 0);
    // Elements of the ring that are in use, and where the next stage may begin.
    let (mut used, mut begin) = (0u32, 0u32);
    let mut cursor = Cursor::new(warp_id, up_parts, WARPS as u32);
    let (mut fetching, mut phase) = (0u32, 0u32);
    // Of a stage, in the lane of its number: where its vector starts; the length of its rows, and where the second is, which may be the first; where it begins, and what it takes of the ring.
    let (mut from, mut what, mut takes) = (0u32, 0u32, 0u32);
    loop {
        // The sums of a group are complete as far as this warp is concerned.
        if phase == 0 && at >= middle {
            phase = 1;
            if !TAGGED || groups[0] > 0 {
                warp::sync_warp(warp::FULL);
                thread::arrive_named(1, const { (WARPS * 32) as u32 + 32 });
                if TAGGED {
                    thread::arrive_named(5, const { ((WARPS + SEEKERS) * 32) as u32 });
                }
            }
        }
        if phase == 1 && at >= first {
            phase = 2;
            if !TAGGED || groups[1] > 0 {
                warp::sync_warp(warp::FULL);
                thread::arrive_named(2, const { (WARPS * 32) as u32 + 32 });
                if TAGGED {
                    thread::arrive_named(6, const { ((WARPS + SEEKERS) * 32) as u32 });
                }
            }
        }
        let needed = there(if at < first {
            0
        } else if at < late {
            1
        } else {
            2
        });
        while ahead < (if TAGGED && next < first { 2 } else { stages }) && next < all {
            if fetching == 0 && next >= middle {
                fetching = 1;
                cursor = Cursor::new(next - middle, up_parts, WARPS as u32);
            }
            if fetching == 1 && next >= first {
                fetching = 2;
                cursor = Cursor::new(next - first, down_parts, WARPS as u32);
            }
            let fetching_down = fetching == 2;
            let (k, start) = (if fetching_down { intermediate } else { hidden }, cursor.part * len);
            let n = (k - start).min(len);
            let (size, mut skip, mut wraps) = (if fetching_down { down_lines } else { 2 } * n, 0, false);
            if TAGGED {
                // A piece lies in one.
                if used == 0 {
                    begin = 0;
                }
                wraps = begin + size > room;
                skip = if wraps { room - begin } else { 0 };
                if used + skip + size > room {
                    break;
                }
                // Few pieces are on their way at a time: more would only wait in queues, words behind them.
                let few = if fetching_down { 1 } else { 2 };
                if ahead >= few {
                    let before = next / WARPS as u32 - few;
                    let (before, parity) = (bar(before % stages), before / stages % 2);
                    if at >= first {
                        mbarrier::wait_parity(before, parity);
                    } else if !warp::warp_vote_all(warp::FULL, mbarrier::test_wait_parity(before, parity)) {
                        break;
                    }
                }
            }
            let (pair, unit) = if fetching_down {
                divided(cursor.unit, each)
            } else {
                divided(cursor.unit + if fetching == 0 { starts[0] } else { starts[1] }, width)
            };
            let whose = warp::shfl_idx(bin, pair);
            let vector = if fetching_down { pair } else { warp::shfl_idx(token, pair) };
            // How many rows there are.
            let lines = if fetching_down { (rows - down_lines * unit).min(down_lines) } else { up_lines };
            begin = if !TAGGED {
                to * 2 * len
            } else if wraps {
                0
            } else {
                begin
            };
            if lane == to {
                from = vector * k + start + if fetching_down { tokens * hidden } else { 0 };
                what = n | (lines - 1) << 16;
                takes = begin | (size + skip) << 16;
            }
            if lane == 0 && !fetched {
                let weights = job.expert(whose, fetching_down).weights;
                let piece = |row: u32| weights.ptr(row as usize * k as usize + start as usize);
                if fetching_down {
                    let row = first_row + down_lines * unit;
                    mbarrier::arrive_expect_tx(bar(to), 2 * lines * n);
                    // Rows that are read as a whole come as one.
                    let (copies, each) = if cursor.parts == 1 { (1, lines * n) } else { (lines, n) };
                    for i in 0..integer::opaque(copies) {
                        tma::copy_bulk(ring.address(begin + i * n), piece(row + i), 2 * each, bar(to));
                    }
                } else {
                    let other = if lines == 2 { Some(piece(job.row(unit, true))) } else { None };
                    fetch(to, begin, n, piece(job.row(unit, false)), other);
                }
            }
            fetched = false;
            used += if TAGGED { size + skip } else { 0 };
            begin += size;
            to = if to + 1 == stages { 0 } else { to + 1 };
            cursor.advance();
            next += WARPS as u32;
            ahead += 1;
        }
        if at >= all {
            break;
        }
        mbarrier::wait_parity(needed, 0);
        let (start, what) = (warp::shfl_idx(from, stage), warp::shfl_idx(what, stage));
        let takes = if TAGGED { warp::shfl_idx(takes, stage) } else { stage * 2 * len };
        mbarrier::wait_parity(bar(stage), parity);
        let (n, last) = (what & 0xffff, what >> 16);
        let (operand, piece) = (vectors.offset(start), ring.offset(takes & 0xffff));
        if at < first || !TAGGED {
            let sum = job.multiply(n, operand, [piece, piece.offset(last * n)]);
            if lane % 16 == 0 {
                sums.set(2 * at + lane / 16, sum);
            }
        } else {
            let row = |i: u32| piece.offset(i.min(last) * n);
            let sum = job.multiply_four(n, operand, [row(0), row(1), row(2), row(3)]);
            if lane < down_lines {
                sums.set(2 * first + down_lines * (at - first) + lane, sum);
            }
        }
        warp::sync_warp(warp::FULL);
        stage += 1;
        if stage == stages {
            (stage, parity) = (0, parity ^ 1);
        }
        if TAGGED {
            used -= takes >> 16;
        }
        ahead -= 1;
        at += WARPS as u32;
    }
    // The pairs of the token that is a lane's in the end.
    let mut mine = u32::MAX;
    if tokens > 1 {
        mine = 0;
        for pair in 0..count {
            mine |= ((warp::shfl_idx(token, pair) == lane) as u32) << pair;
        }
    }
    thread::sync_named(4, const { WARPS as u32 * 32 });
    // A warp takes a row, a lane a pair; then a lane has a token, and adds up its pairs in their order.
    let out = GlobalMut::new(out);
    let mut row = warp_id;
    while row < rows {
        let mut v = 0f32;
        if lane < count {
            let bias = job.expert(bin, true).bias(first_row + row);
            let piece = (lane * each + row / down_lines) * down_parts;
            let (mut total, mut i) = (0f32, 0);
            loop {
                total += sums.get(2 * first + down_lines * (piece + i) + row % down_lines);
                // Few: not several at once, as what runs once takes as long as it is.
                i = if TAGGED { integer::opaque(i + 1) } else { i + 1 };
                if i >= down_parts {
                    break;
                }
            }
            v = (total + bias) * scale;
        }
        // Eight at once, as one waits for the one before.
        let (mut sum, mut pair) = (0f32, 0);
        while pair < count {
            let mut found = [0f32; 8];
            unroll::<8>(|i| {
                let v = warp::shfl_idx(v, pair + i as u32);
                found[i] = if mine >> (pair + i as u32) & 1 != 0 { v } else { 0.0 };
            });
            unroll::<8>(|i| sum += found[i]);
            pair = integer::opaque(pair + 8);
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
        /// `[tokens * slots, intermediate]`; with words `[tokens * slots, intermediate / OUTPUTS]` of [`WORD_BYTES`], whatever is in them.
        h: *mut u8,
        /// [`CLAIMS`], whatever is in them; with words one.
        words: *mut u64,
        /// A number that no other launch has, unless it repeats this one; not zero.
        launch: u64,
        /// See [`fused::Args`](super::fused::Args).
        x: *const T, x_row: usize, w13: *const T, bias13: *const T, w2: *const T, bias2: *const T,
        shared13: *const T, shared_bias13: *const T, shared2: *const T, shared_bias2: *const T,
        topk_ids: *const i32, topk_weights: *const f32, expert_map: *const i32, num_tokens: *const i32, tokens: u32,
        top_k: u32, slots: u32, experts: u32, local: u32, shared_experts: u32, hidden: u32, intermediate: u32,
        layout: u32, activation: u32, alpha: f32, limit: f32,
        /// Room in shared memory for vectors and sums, and for each warp's ring, in elements: two rows of a piece at least.
        operands: u32, sums: u32, room: u32,
    );
    moe_fused_vector_f16 { type T = f16; } [threads(false), 1; Sm90a] => fused_vector::<T, WARPS, STEPS, false>;
    moe_fused_vector_bf16 { type T = bf16; } [threads(false), 1; Sm90a] => fused_vector::<T, WARPS, STEPS, false>;
    moe_fused_vector_words_f16 { type T = f16; } [threads(true), 1; Sm90a] => fused_vector::<T, WARPS, STEPS, true>;
    moe_fused_vector_words_bf16 { type T = bf16; } [threads(true), 1; Sm90a] => fused_vector::<T, WARPS, STEPS, true>;
}
