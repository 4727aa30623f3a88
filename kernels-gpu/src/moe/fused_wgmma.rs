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
//! For the second product the map is `[experts, 1, outputs / 8, 8, k]`, with boxes of as many rows. Weights that were [shuffled](super::shuffle)
//! have another map and other coordinates, and arrive in the same order.
//!
//! # Operands
//! The body is that of 8-bit operands with scales of rows as well ([`fused_quant_rows_wgmma`](super::fused_quant_rows_wgmma)): in bytes their products are those of 16 bits with half of K. Only the ends
//! differ: finished sums are multiplied with the scales of their rows ([`RowScales`]), which are asked for while the last products run. And the second product waits for all of `h`, which is quantised
//! between the two.
//!
//! # Pipeline
//! A ring of stages of `LINES` times 128 bytes of K in shared memory, 128-byte swizzle. A producer warpgroup fills it: one thread has
//! the copy engine fetch the weights, others gather the rows of `x` or `h` by 16-byte `cp.async`, which take each row
//! from where it is and fill what is not there with zeroes; both are counted by one mbarrier a stage. Of many pairs all of its threads gather. Of few the thread that fetches has
//! a warp of its own, and two warps gather: whoever asks for more than memory gives is held up, and the first rows waited behind the weights of a whole ring. Two consumer
//! warpgroups multiply, half of the rows each, and give stages back: when the next stage's products are under way (or, if the next stage is not there yet, when this one's are done), or at once
//! (`NOW`), which is better where the products are short and reading is what takes time. If they alternate, each
//! multiplies a whole item while the other finishes its last, so that stages are given back all the time; mbarriers hand over, because a group that is more than one
//! round of the ring behind could not tell the phases of a stage apart.
//!
//! Of few pairs the time until the first weights are asked for counts. Without a list the producer's warps count pairs, one a thread, and the warp that fetches adds up which items there are, while another warp makes the barriers. Registers are 128 a thread at the start, so that blocks of the sum over
//! slots are beside those of the second product from the start of that, on all multiprocessors, and wait there.
//!
//! The second product waits for `h` only when the ring is full of weights already ([`dependent_launch`]), or where it gathers rows, so the stream of
//! weights does not end between the two. Nor does it wait for the end of the first, if that has long got beyond the experts it begins with ([`Progress`]).
//!
//! # Results
//! Of few pairs they go from registers to memory. Of many (`STAGED`) that takes longer than the products of a short K: a product of
//! 768 elements of K took 314 µs, and 166 when it kept its results to itself. So each of the two consumers keeps one of an item's
//! last two stages back from the producer, lays its results out there, a pair's outputs side by side, and stores them from there, neighbouring
//! lanes 16 bytes each: 512 bytes of a pair in the second product, 128 in the first. The copy engine does that slower: its bulk copies write
//! 3.2 TB/s where ordinary stores write 4.1.
//!
//! # Two blocks
//! Shares of an expert that read the same weights should read them at the same time: blocks that each went their own way had Mixtral's first product
//! read its weights more than twice from memory, and that costs power, which is what limits it. So where experts have more than one share on average two
//! blocks are a cluster (`PAIRED`), take two shares of a tile, and each brings half of the weights to both. An expert with an odd number of shares has
//! the two blocks take neighbouring tiles instead.
//! They release stages in each other without publishing anything: what a consumer did with a stage `wgmma` has read since, or
//! it has read itself and sent on.
//!
//! Results of the second product lie between it and the sum over slots, written and read once, in f32: what is most of the traffic of small
//! experts. Where it is allowed (`SLOTS`) they are rounded to the element type, or to f16 with a power of two for each pair and 128 outputs, which is half of it.
//!
//! # Work
//! Blocks of threads stay, one a multiprocessor, and draw [`items`](super::items) when they have fetched what they had ([`Drawn`]). Of many pairs consumers do not look for an item's place:
//! the producer tells them ([`Found`]).
//!
//! The second product starts where blocks of the first have no more items. While it asks for its first weights it looks how far the others have come ([`Progress`]): mostly
//! the last experts are what they are at, so it begins with the first ones at once, and when it comes to those last ones the first product has ended. Otherwise, as with one expert, it
//! waits for that end. What it must not do is wait for words: a fence takes 1 to 2 µs while weights stream, so a block that said that it is done with all would
//! end, and make room, that much later.
//!
//! Of few pairs the second product computes all experts' columns of a stripe, then the next stripe. The sum's blocks, which are there, begin with a stripe when the last consumer has
//! left it ([`Stripes`]): a fence a stripe, while the other consumer has its turn. Of small matrices the order by itself is better than that of experts.
//!
//! # The second-level cache
//! Weights that no other item reads, but for the one that the other block of two has at the same time, leave it first, so that what is read again
//! stays: `x`, `h`, and `partial` if it has room (`kept`; only then weights of the second product, too). The sum discards lines of both. On its way to memory and back it was 90 of 1300 MB of Qwen3's 512 tokens.
//!
//! Where there are few pairs an expert blocks of the first product that have had all fetched ask for what the second begins with.
//! While sorting runs, they ask for what would be their first item's weights if every expert had one share. Most of it is
//! read soon whichever way pairs go, since the first items are those of the first experts. Nothing is written, so nothing has to be waited for.
//!
//! The sum over K runs in one order whatever N is, so a pair's result depends on nothing else in the batch.

use super::fused::{HALVES, PLAIN};
pub use super::items::DIRECT_PAIRS;
use super::items::{Drawn, Found, Item, Items, Sorted};
use super::pairs::{Pairs, existing_tokens};
use super::progress::{self, Stripes};
use super::shuffle;
use crate::tensor_float::TensorFloat;
use cuda_std::second_level::Policy;
use cuda_std::shared::Carver;
use cuda_std::tma::{self, Swizzle, TensorMap};
use cuda_std::vec::{B64, B128};
use cuda_std::wgmma::{self, Accumulator, Descriptor, Input, K, Sum};
use cuda_std::{
    E4M3, Float, Global, GlobalMut, Shared, apart, atomic, bf16, cluster, cp_async, dependent_launch, entries, f16,
    float, integer, mbarrier, mma, thread, unroll, vec, warp,
};

/// Consumer warpgroups.
pub const GROUPS: usize = 2;
/// Each consumer is a writer.
type Progress = progress::Progress<GROUPS>;
/// Threads that fill the ring.
const PRODUCERS: usize = 128;
/// Which of them draws items where the one that fetches weights copies rows besides.
const DRAWER: u32 = PRODUCERS as u32 - 32;
/// Rows of shuffled weights of the second product in a tile.
const TILE_ROWS: u32 = 64;
/// Items of which the producer of many pairs tells before one is overwritten. Each has two of four stages at least, so it is two ahead at most.
const FOUND: usize = 4;
/// Threads of a block.
pub const THREADS: usize = PRODUCERS + GROUPS * 128;
/// For how many threads a multiprocessor's registers are divided among those of a block of few pairs: 128 each, so that blocks of the sum find room beside it.
pub const ROOMY: usize = 512;
/// Of many pairs: the barrier at which those who gather rows wait until consumers have looked at the progress.
const LOOKED: u32 = 3 + GROUPS as u32;
/// Bytes of K of a stage's line: one of the swizzle.
pub const LINE: usize = 128;
/// Elements of 16 bits of it.
pub const STEP: usize = LINE / 2;
/// From so many steps on weights come two steps at a time.
pub const IN_TWOS: u32 = 64;
/// Rows of pairs that a thread copies, at most.
const MOST_ROWS: usize = 176 / 16;
/// The most experts of a device.
pub const MAX_BINS: usize = 1024;
/// What Hopper has of shared memory for a block.
pub const MAX_SHARED_BYTES: usize = 227 << 10;
/// Blocks of a cluster if they are paired.
pub const PAIR: usize = 2;
/// The place in the sorted list of an expert's first pair is a multiple of this.
pub const SORT_BLOCK: usize = 8;

/// Threads that copy rows of pairs. Of many it takes all of the producer's; of few the first warp does nothing but fetch weights: whoever asks for more
/// of them than memory can give is held up, and with it all that it has to do besides, as the first rows of pairs.
const fn gatherers(staged: bool) -> usize {
    if staged { PRODUCERS } else { 64 }
}

/// Elements of K of a stage's line.
const fn of_line<Q>() -> usize {
    LINE / size_of::<Q>()
}

/// Elements of 16 bytes of it.
const fn of_piece<Q>() -> usize {
    16 / size_of::<Q>()
}

/// Rows of weights of an item.
pub const fn rows(tiles: usize, alternate: bool) -> usize {
    if alternate { tiles * 64 } else { GROUPS * tiles * 64 }
}

/// Dynamic shared memory, of operands with scales or without; what follows the mbarriers of stages, which may be odd in number, begins at the next multiple of 16.
pub const fn shared_bytes(rows: usize, pairs: usize, lines: usize, stages: usize, bins: usize, scaled: bool) -> usize {
    stages * ((rows + pairs) * lines * LINE + 2 * 8)
        + GROUPS * 8
        + GROUPS * pairs * if scaled { 12 } else { 8 }
        + if pairs == 64 && !scaled { GROUPS * magnitudes_bytes(pairs) } else { 0 }
        + super::items::DRAWN_BYTES
        + super::items::found_bytes(FOUND)
        + if pairs == 16 { super::items::shared_bytes(bins) } else { super::items::sorted_shared_bytes(bins) }
        + 2 * 16
}

/// Bytes of the magnitudes of a consumer's results before they are packed: upper halves of two pairs' a word, a line for each row of a tile, 16 bytes longer than a multiple of 32, so that no two lanes that
/// store together meet in a bank.
const fn magnitudes_bytes(pairs: usize) -> usize {
    32 * (pairs / 2 + 4) * 4
}

/// What the products multiply.
pub(super) trait Operand: Input<<Self as Operand>::Sum> {
    /// Of products.
    type Sum: Sum;
    /// Of biases.
    type Bias: Float;
    /// Sums of 136 and of 168 columns, or where there are no such products of 8 more.
    type Sums136: Accumulator<Self::Sum> + AsRef<[Self::Sum]>;
    /// See there.
    type Sums168: Accumulator<Self::Sum> + AsRef<[Self::Sum]>;
    /// Whether rows have scales.
    const SCALED: bool;
}

macro_rules! operands {
    ($($t:ty, $sum:ty, $bias:ty, $of136:literal, $of168:literal, $scaled:literal;)*) => { $(
        impl Operand for $t {
            type Sum = $sum;
            type Bias = $bias;
            type Sums136 = [$sum; $of136];
            type Sums168 = [$sum; $of168];
            const SCALED: bool = $scaled;
        }
    )* };
}
operands! {
    f16, f32, f16, 68, 84, false;
    bf16, f32, bf16, 68, 84, false;
    E4M3, f32, f32, 68, 84, true;
    i8, i32, f32, 72, 88, true;
}

/// Scales of rows, where operands [have them](Operand::SCALED).
#[derive(Clone, Copy)]
pub(super) struct RowScales {
    /// Of rows of `x`.
    pub x: Global<f32>,
    /// Pairs that have a row of `x` in common.
    pub x_divisor: u32,
    /// Of rows of weights, from expert to expert and from row to row.
    pub w: Global<f32>,
    pub shared_w: Global<f32>,
    pub w_expert: u32,
    pub w_row: u32,
}

impl RowScales {
    #[inline(always)]
    fn none() -> Self {
        let none = Global::new(core::ptr::null());
        Self { x: none, x_divisor: 1, w: none, shared_w: none, w_expert: 0, w_row: 0 }
    }
}

/// How the second product leaves results: for the sum in f32; rounded to elements; in f16 with a power of two for each pair and [`GROUP`] outputs, before they are weighted; or rounded, and added to a token's own row in any order.
pub(super) const F32: u8 = 0;
/// See [`F32`].
pub(super) const ROUNDED: u8 = 1;
/// See [`F32`].
pub(super) const PACKED: u8 = 2;
/// See [`F32`].
pub(super) const ADDED: u8 = 3;
/// Outputs that have a power of two in common where results are packed.
pub const GROUP: u32 = 128;

/// What both products need to know.
struct Job<T, Q: Operand, const DIRECT: bool> {
    h: GlobalMut<T>,
    partial: GlobalMut<f32>,
    tokens: u32,
    x: Global<Q>,
    map: *const TensorMap,
    shared_map: *const TensorMap,
    scales: RowScales,
    bias: Global<Q::Bias>,
    biased: bool,
    shared_bias: Global<Q::Bias>,
    shared_biased: bool,
    /// Whether results in f32 are added up where they belong as they come, instead of being kept apart.
    unordered: bool,
    /// For results that have room in the second-level cache.
    policy: Policy,
    slots: u32,
    local: u32,
    n: u32,
    layout: u32,
    shuffled: u32,
    activation: Activation,
    items: Items<DIRECT>,
    progress: Progress,
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
    /// SiLU of a gate times its value, and nothing else.
    silu: bool,
    /// Whether gates have values. The products have some where they do not, of zeroes, which an infinite token makes NaN.
    has_values: bool,
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
            silu: kind == 0 && gated,
            has_values: gated,
        }
    }

    /// Without a branch, so that the chains of many sums overlap.
    #[inline(always)]
    pub(super) fn gated(self, gate: f32, up: f32) -> f32 {
        let g = float::max_propagate(least(gate, self.most), self.least);
        let cubic = float::fma(self.b * g, g, self.a);
        // Not 0 times infinity.
        let s = float::fast::sigmoid(g * if self.b == 0.0 { self.a } else { cubic });
        let s = f32::from_bits(s.to_bits() & !self.squared | g.to_bits() & self.squared);
        let up = float::max_propagate(least(up, self.bound), -self.bound);
        let up = if self.has_values { up } else { 0.0 };
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

impl<T: TensorFloat, Q: Operand, const DIRECT: bool> Job<T, Q, DIRECT> {
    #[inline(always)]
    fn map(&self, bin: u32) -> (*const TensorMap, i32) {
        if bin < self.local { (self.map, bin as i32) } else { (self.shared_map, (bin - self.local) as i32) }
    }

    /// [`coordinates`] of weights.
    #[inline(always)]
    fn coordinates<const UP: bool>(&self, k: u32, row: u32, bin: i32) -> [i32; 5] {
        coordinates::<UP>(self.shuffled, self.n, k, row, bin)
    }

    /// The rows of weights of an output's gate and of its value, and how many there are: so many is a value's that there is not.
    #[inline(always)]
    fn gate_and_value(&self, output: u32) -> ([u32; 2], u32) {
        let rows = if self.layout == PLAIN { self.n } else { 2 * self.n };
        let of = match self.layout {
            PLAIN => [output, rows],
            HALVES => [output, output + self.n],
            _ => [2 * output, 2 * output + 1],
        };
        (of, rows)
    }

    /// The biases of an output's gate and of its value.
    #[inline(always)]
    unsafe fn biases(&self, bin: u32, output: u32) -> [f32; 2] {
        let ([gate, value], rows) = self.gate_and_value(output);
        [self.bias(bin, rows, gate), self.bias(bin, rows, value)]
    }

    /// The scales of a thread's rows of 16 rows of weights, which begin with `row`; any for those beyond the last.
    #[inline(always)]
    unsafe fn weight_scales<const UP: bool>(&self, bin: u32, row: u32) -> [f32; 2] {
        let (last, g) = (self.n - 1, warp::lane_id() / 4);
        let rows = if UP {
            let ([gate, value], rows) = self.gate_and_value((row / 2 + g).min(last));
            [gate, value.min(rows - 1)]
        } else {
            [(row + g).min(last), (row + g + 8).min(last)]
        };
        let (scales, index) =
            if bin < self.local { (self.scales.w, bin) } else { (self.scales.shared_w, bin - self.local) };
        let scales = scales.offset(index as usize * self.scales.w_expert as usize);
        rows.map(|row| scales.get(row * self.scales.w_row))
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

/// Where the box of rows `row` and on of a stage starts; see the [module](self).
#[inline(always)]
pub(super) fn coordinates<const UP: bool>(shuffled: u32, n: u32, k: u32, row: u32, bin: i32) -> [i32; 5] {
    if shuffled != 0 {
        return shuffle::coordinates::<UP>(shuffled, k, n, row, bin);
    }
    let group = (row / 16) as i32;
    if UP { [k as i32, 0, 0, group, bin] } else { [k as i32, 0, 2 * group, 0, bin] }
}

/// Asks for the first `most` elements of a tile's rows, which begin with `row`, in the second-level cache.
#[inline(always)]
unsafe fn prefetch<Q, const UP: bool>(map: *const TensorMap, shuffled: u32, n: u32, most: u32, row: u32, bin: u32) {
    let mut at = 0;
    while at < most {
        tma::prefetch_tensor::<5>(map, coordinates::<UP>(shuffled, n, at, row, bin as i32));
        at += const { of_line::<Q>() as u32 };
    }
}

/// One of the products of 16-bit floats; see [`Args`] and [`product`].
#[inline(always)]
unsafe fn fused_wgmma<
    T: TensorFloat + Operand<Sum = f32, Bias = T>,
    const UP: bool,
    const ALTERNATE: bool,
    const NOW: bool,
    const STAGED: bool,
    const SLOTS: u8,
    const TILES: usize,
    const PAIRS: usize,
    const LINES: usize,
    const STAGES: usize,
    const DIRECT: bool,
    const PAIRED: bool,
>(
    h: *mut T,
    partial: *mut f32,
    x: *const T,
    x_row: usize,
    map: *const TensorMap,
    shared_map: *const TensorMap,
    next_map: *const TensorMap,
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
    shuffled: u32,
    activation: u32,
    alpha: f32,
    limit: f32,
    unordered: u32,
    words: *mut u64,
    launch: u64,
    kept: u32,
    progress: *mut u32,
    left: *mut u32,
    stripe: u32,
) {
    product::<T, T, UP, ALTERNATE, NOW, STAGED, SLOTS, TILES, PAIRS, LINES, STAGES, DIRECT, PAIRED>(
        h,
        partial,
        x,
        x_row,
        map,
        shared_map,
        next_map,
        bias,
        shared_bias,
        sorted_ids,
        sorted_weights,
        offsets,
        expert_counts,
        topk_ids,
        topk_weights,
        expert_map,
        num_tokens,
        tokens,
        top_k,
        slots,
        experts,
        local,
        bins,
        n,
        k,
        layout,
        shuffled,
        activation,
        alpha,
        limit,
        unordered,
        words,
        launch,
        kept,
        progress,
        left,
        stripe,
        RowScales::none(),
    );
}

/// One of the products; see [`Args`]. `T`: the elements of results, `Q`: what is multiplied; `UP`: the first. Grid: any number of blocks, or of clusters of [`PAIR`] if `PAIRED`, whose maps have boxes of half
/// of an item's rows; block: [`THREADS`]; shared memory: [`shared_bytes`].
#[inline(always)]
pub(super) unsafe fn product<
    T: TensorFloat,
    Q: Operand,
    const UP: bool,
    const ALTERNATE: bool,
    const NOW: bool,
    const STAGED: bool,
    const SLOTS: u8,
    const TILES: usize,
    const PAIRS: usize,
    const LINES: usize,
    const STAGES: usize,
    const DIRECT: bool,
    const PAIRED: bool,
>(
    h: *mut T,
    partial: *mut f32,
    x: *const Q,
    x_row: usize,
    map: *const TensorMap,
    shared_map: *const TensorMap,
    next_map: *const TensorMap,
    bias: *const Q::Bias,
    shared_bias: *const Q::Bias,
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
    unordered: u32,
    words: *mut u64,
    launch: u64,
    kept: u32,
    progress: *mut u32,
    left: *mut u32,
    stripe: u32,
    row_scales: RowScales,
) where
    [Q::Sum; 4]: Accumulator<Q::Sum>,
    [Q::Sum; 8]: Accumulator<Q::Sum>,
    [Q::Sum; 16]: Accumulator<Q::Sum>,
    [Q::Sum; 32]: Accumulator<Q::Sum>,
    [Q::Sum; 48]: Accumulator<Q::Sum>,
    [Q::Sum; 56]: Accumulator<Q::Sum>,
    [Q::Sum; 64]: Accumulator<Q::Sum>,
    [Q::Sum; 72]: Accumulator<Q::Sum>,
    [Q::Sum; 80]: Accumulator<Q::Sum>,
    [Q::Sum; 88]: Accumulator<Q::Sum>,
{
    let tid = thread::thread_idx_x();
    let warp_id = warp::warp_id();
    let mut carver = Carver::new();
    let weights = carver.take_aligned::<T>(STAGES * LINES * rows(TILES, ALTERNATE) * STEP, 1024);
    let operands = carver.take::<T>(STAGES * LINES * PAIRS * STEP);
    let full = carver.take::<u64>(STAGES);
    let empty = carver.take::<u64>(STAGES);
    let turns = carver.take::<u64>(GROUPS);
    let ids = carver.take::<u32>(GROUPS * PAIRS);
    let scales = carver.take::<f32>(GROUPS * PAIRS);
    let scales_of_rows = carver.take::<f32>(if Q::SCALED { GROUPS * PAIRS } else { 0 });
    // Where there are no stages to lay results out in.
    let magnitudes = const { if SLOTS == PACKED && !STAGED { magnitudes_bytes(PAIRS) / size_of::<T>() } else { 0 } };
    let magnitudes_of_groups = carver.take::<T>(GROUPS * magnitudes);
    let word = if UP { words } else { words.wrapping_add(1) };
    let drawn = Drawn::new(&mut carver, true, word, launch);
    let found = Found::<FOUND>::new(&mut carver, STAGED);
    // What warps have seen of the progress, before it is needed for the first item's end.
    let beyond = ids;
    let outputs = const { if UP { rows(TILES, ALTERNATE) as u32 / 2 } else { rows(TILES, ALTERNATE) as u32 } };
    let blocks = const { if PAIRED { PAIR as u32 } else { 1 } };
    // Of few pairs by a warp that has nothing else to do: another barrier comes before the first fetch.
    if tid == const { if STAGED { 0 } else { 32 } } {
        for s in 0..STAGES {
            // The weights, and the rows of each who copies them.
            mbarrier::init(full.address(s), const { 1 + gatherers(STAGED) as u32 });
            mbarrier::init(empty.address(s), if ALTERNATE { 4 } else { 4 * GROUPS as u32 * blocks });
        }
        for g in 0..GROUPS {
            mbarrier::init(turns.address(g), 4);
        }
        drawn.init();
        if STAGED {
            found.init();
        }
        mbarrier::fence_init();
    }
    if tid == 0 {
        tma::prefetch_map(map);
        tma::prefetch_map(shared_map);
    }
    let tiles = n.div_ceil(outputs);
    if UP && NOW && !DIRECT && tid == 0 && tokens * slots >= 4 * bins {
        // SAFETY: there are outputs, hence tiles.
        core::hint::assert_unchecked(tiles != 0);
        let (bin, tile) = (thread::block_idx_x() / tiles, thread::block_idx_x() % tiles);
        if bin < local {
            let row = tile * const { rows(TILES, ALTERNATE) as u32 };
            let most = k.min(const { (STAGES * LINES * of_line::<Q>()) as u32 });
            prefetch::<Q, UP>(map, shuffled, n, most, row, bin);
        }
    }
    let rank = if PAIRED { cluster::rank() } else { 0 };
    let progress = Progress::new(progress, thread::grid_dim_x());
    if PAIRED {
        cluster::dims::<{ PAIR as u32 }>();
        cluster::arrive_relaxed();
        cluster::wait();
    }
    let sorted = Sorted {
        ids: Global::new(sorted_ids),
        weights: Global::new(sorted_weights),
        offsets: Global::new(offsets),
        counts: Global::new(expert_counts),
        topk_weights: Global::new(topk_weights),
    };
    let items = Items::<DIRECT>::carve(&mut carver, sorted, bins, tiles, PAIRS as u32, PAIRED);
    // SAFETY: see `Args`.
    core::hint::assert_unchecked(stripe != 0);
    let stripes = if const { STAGED || DIRECT } {
        // The sum of few results is not worth a fence.
        Stripes::new(core::ptr::null_mut(), 1, 1)
    } else {
        let all = if UP { k.div_ceil(const { rows(TILES, ALTERNATE) as u32 }) } else { tiles };
        Stripes::new(left, stripe, all)
    };
    let items = if UP || STAGED { items } else { items.in_stripes(stripe) };
    if !STAGED {
        items.clear();
    }
    let dealt = thread::block_idx_x() / blocks;
    // A division, while there is time.
    let before = integer::opaque(items.shares_before(dealt));
    if UP {
        // The sorted list may still be in the making.
        dependent_launch::wait();
        if Q::SCALED && stripes.are_kept() && thread::block_idx_x() == 0 && tid < stripes.count {
            // As below, where the next launch is not told of progress. The one after it may read them before this one has ended.
            stripes.begin(tid, thread::grid_dim_x() * GROUPS as u32);
            thread::device_fence();
        }
        if !Q::SCALED && !progress.is_kept() {
            dependent_launch::launch_dependents();
        }
    } else {
        // Blocks of the sum find room beside this one, and wait there.
        dependent_launch::launch_dependents();
    }
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
    let job = Job::<T, Q, DIRECT> {
        h: GlobalMut::new(h),
        partial: GlobalMut::new(partial),
        tokens,
        x: Global::new(x),
        map,
        shared_map,
        scales: row_scales,
        bias: Global::new(bias),
        biased: !bias.is_null(),
        shared_bias: Global::new(shared_bias),
        shared_biased: !shared_bias.is_null(),
        // Of 8 bits only rounded ones are, by kernels of their own.
        unordered: const { !UP && SLOTS == F32 && !Q::SCALED } && unordered != 0,
        policy: if kept != 0 { Policy::LAST } else { Policy::NORMAL },
        slots,
        local,
        n,
        layout,
        shuffled,
        activation: Activation::new(activation, alpha, limit, layout != PLAIN),
        items,
        progress,
    };
    // Two at least if results go by way of stages: there is a stage for each consumer then.
    let steps = k.div_ceil(const { (LINES * of_line::<Q>()) as u32 }).max(if STAGED { 2 } else { 1 });
    let grid = thread::grid_dim_x() / blocks;
    if STAGED {
        items.fill_together(pairs, count);
    } else {
        items.gather();
    }
    if UP && Q::SCALED {
        // After a barrier, since words for the sum may have been begun.
        dependent_launch::launch_dependents();
    }
    // How far the first product has come, by the consumers.
    let look = || {
        let least = progress.look(tid - PRODUCERS as u32, const { 128 * GROUPS as u32 });
        if warp::lane_id() == 0 {
            beyond.set(warp_id - const { PRODUCERS as u32 / 32 }, least);
        }
    };
    if !STAGED {
        if !UP && progress.is_kept() && warp_id >= (PRODUCERS / 32) as u32 {
            look();
        }
        items.fill(pairs, count);
        thread::sync_threads();
    }

    if warp_id < (PRODUCERS / 32) as u32 {
        if STAGED {
            wgmma::decrease_registers::<56>();
        } else {
            wgmma::decrease_registers::<72>();
        }
        let line_bytes = const { (rows(TILES, ALTERNATE) * LINE) as u32 };
        let stage_bytes = LINES as u32 * line_bytes;
        let fetch = |ring: Ring<STAGES>, work: Item, k0: u32| {
            let bar = full.address(ring.stage);
            let (map, bin) = job.map(work.bin);
            // Weights that nobody else reads make room for `h`, or for results.
            let policy = if work.alone && (UP || kept != 0) { Policy::FIRST } else { Policy::NORMAL };
            mbarrier::arrive_expect_tx(bar, stage_bytes);
            unroll::<LINES>(|l| {
                // Beyond the end of K come zeroes.
                let to = weights.address(0u32) + ring.stage * stage_bytes + l as u32 * line_bytes;
                let (k, row) = (k0 + (l * of_line::<Q>()) as u32, work.tile * const { rows(TILES, ALTERNATE) as u32 });
                if !PAIRED {
                    tma::load_tensor_for::<5>(to, map, job.coordinates::<UP>(k, row, bin), bar, policy);
                } else if work.shared {
                    // Half of the rows, to both blocks.
                    let at = job.coordinates::<UP>(k, row + rank * const { rows(TILES, ALTERNATE) as u32 / 2 }, bin);
                    tma::load_tensor_multicast_for::<5>(to + rank * (line_bytes / 2), map, at, bar, 3, policy);
                } else {
                    for half in 0..2 {
                        let at =
                            job.coordinates::<UP>(k, row + half * const { rows(TILES, ALTERNATE) as u32 / 2 }, bin);
                        tma::load_tensor::<5>(to + half * (line_bytes / 2), map, at, bar);
                    }
                }
            });
        };
        // Who copies rows: all, or the last ones, while the first warp fetches and nothing else, and one has nothing to do.
        let gathers = tid >= const { (PRODUCERS - gatherers(STAGED)) as u32 };
        let items = if gathers || warp_id == 0 { job.items.count() } else { 0 };
        let mut ring = Ring::<STAGES>::new();
        let mut item = dealt;
        // Stages whose weights are on their way before `h` is there.
        let mut ahead = 0;
        // Items that have been fetched but for the dealt one. The next is asked for when the ring is full, since then there is time, and two steps later it is told:
        // who waits for the answer holds the others up.
        let mut sequence = 0;
        let full_at = (steps - 1).min(STAGES as u32);
        let tell = if STAGED { (full_at + 2).min(steps - 1) } else { full_at };
        let ask = if STAGED { full_at } else { full_at.saturating_sub(2) };
        // Whether that is done.
        let (mut asked, mut taken) = (false, 0);
        let settle = |sequence: u32, taken: u32| {
            if PAIRED {
                drawn.settle_together::<{ PAIR as u32 }>(sequence, taken, rank, grid, items);
            } else {
                drawn.settle(sequence, taken, grid, items);
            }
        };
        if !UP && STAGED && item < items {
            let work = job.items.find(item, rank);
            ahead = steps.min(STAGES as u32);
            if tid == 0 {
                let mut at = ring;
                for s in 0..ahead {
                    fetch(at, work, s * const { (LINES * of_line::<Q>()) as u32 });
                    at.advance();
                }
            }
            if tid == DRAWER {
                // Nothing that still runs knows of the word.
                if rank == 0 {
                    taken = drawn.take(0);
                }
                asked = true;
            }
        }
        // Experts whose `h` is there.
        let mut there = 0;
        if !UP && gathers && progress.is_kept() {
            // They look while weights are asked for.
            if STAGED {
                thread::sync_named(LOOKED, THREADS as u32);
            }
            there = u32::MAX;
            for w in 0..const { 4 * GROUPS as u32 } {
                there = there.min(beyond.get(w));
            }
        }
        // Weights that no other block reads come two steps at a time, neighbouring pieces of each row together, where items are long: it leaves less of the ring for an item's ends.
        let in_twos = STAGED && !PAIRED && steps >= IN_TWOS;
        // A thread copies 16 bytes of every so manyth row. Where its rows start it keeps in units of 16 bytes.
        let each = const { gatherers(STAGED) / 8 };
        let (chunk, low) = (tid % 8, (tid / 8) % each as u32);
        let stride = if UP { x_row / const { of_piece::<Q>() } } else { k as usize / const { of_piece::<Q>() } };
        let to = operands.address(0u32) + Swizzle::B128.apply(low * 128 + chunk * 16);
        let mut shares = before;
        while item < items {
            let work = if STAGED {
                job.items.find(item, rank)
            } else if UP {
                job.items.find_among(item, shares)
            } else {
                job.items.find_in_stripes(item, shares)
            };
            if STAGED && tid == DRAWER {
                found.tell(sequence, Some(work));
            }
            let wide = columns::<Q>(PAIRS as u32, work.count);
            let twos = in_twos && work.alone;
            let mut source = [u32::MAX; MOST_ROWS];
            if gathers {
                if !UP && warp::warp_vote_ballot(warp::FULL, work.bin >= there) != 0 {
                    dependent_launch::wait();
                    there = u32::MAX;
                }
                // All asked for at once; those beyond the last repeat it.
                let mut pair = [0; MOST_ROWS];
                unroll::<MOST_ROWS>(|i| {
                    if i * each < PAIRS {
                        let row = (low + (each * i) as u32).min(work.count.max(1) - 1);
                        pair[i] = job.items.pair(work.first + row);
                    }
                });
                // Rows of zeroes make up for what a product takes more than there is: fetching any others takes time.
                unroll::<MOST_ROWS>(|i| {
                    let divisor = if Q::SCALED { row_scales.x_divisor } else { slots };
                    // SAFETY: tokens with pairs have slots.
                    core::hint::assert_unchecked(divisor != 0);
                    let from = (if UP { pair[i] / divisor } else { pair[i] }) * stride as u32;
                    let there = i * each < PAIRS && low + ((each * i) as u32) < work.count;
                    source[i] = if there { from } else { u32::MAX };
                });
            }
            let mut step = 0;
            while step < steps {
                if STAGED && tid == DRAWER {
                    if step == ask && !asked && rank == 0 {
                        taken = drawn.take(sequence);
                    }
                    if step == tell {
                        settle(sequence, taken);
                        asked = false;
                    }
                }
                let k0 = step * const { (LINES * of_line::<Q>()) as u32 };
                if !twos || step % 2 == 0 {
                    let mut at = ring;
                    mbarrier::wait_parity(empty.address(at.stage), at.phase ^ 1);
                    let two = twos && step + 1 < steps;
                    if two {
                        at.advance();
                        mbarrier::wait_parity(empty.address(at.stage), at.phase ^ 1);
                        at = ring;
                    }
                    if ahead == 0 && tid == 0 {
                        for i in 0..=two as u32 {
                            fetch(at, work, k0 + i * const { (LINES * of_line::<Q>()) as u32 });
                            at.advance();
                        }
                    }
                }
                ahead = ahead.saturating_sub(1);
                if !STAGED && tid == 0 {
                    // In the second product nothing that still runs knows of the word.
                    if step == ask {
                        taken = drawn.take(sequence);
                    }
                    if step == tell {
                        settle(sequence, taken);
                    }
                }
                if gathers {
                    let to = to + ring.stage * (LINES * PAIRS * LINE) as u32;
                    unroll::<LINES>(|l| {
                        let column = k0 + (l * of_line::<Q>()) as u32 + const { of_piece::<Q>() as u32 } * chunk;
                        // Zeroes beyond the end of K, not just any numbers: those of the weights would not make up for a NaN.
                        let (column, bytes) = if column < k { (column, 16) } else { (0, 0) };
                        let from = if UP || Q::SCALED {
                            job.x.ptr(column).cast::<B128<u32, 4>>()
                        } else {
                            job.h.ptr(column).cast_const().cast()
                        };
                        unroll::<MOST_ROWS>(|i| {
                            if i * each < PAIRS && ((each * i) as u32) < wide {
                                let bytes = if source[i] == u32::MAX { 0 } else { bytes };
                                let from = from.wrapping_add(source[i] as usize);
                                let to = to + (l * PAIRS * LINE + i * each * 128) as u32;
                                cp_async::copy_16_zfill(to, from, bytes);
                            }
                        });
                    });
                    cp_async::arrive(full.address(ring.stage));
                }
                ring.advance();
                step += 1;
            }
            item = drawn.hear(sequence);
            sequence += 1;
            if STAGED {
                // Before the number is overwritten.
                thread::sync_named(const { 2 + GROUPS as u32 }, PRODUCERS as u32);
            } else {
                shares = job.items.shares_before(item);
            }
        }
        if UP && NOW && progress.is_kept() && tokens * slots <= 16 * bins && warp_id == 0 {
            // What the second product begins with is on its way while results are stored and its blocks start.
            let next = job.items.of_tiles(k.div_ceil(const { rows(TILES, ALTERNATE) as u32 }));
            let first = thread::block_idx_x();
            if first < next.count() {
                let work = next.find(first, 0);
                if tid == 0 && work.bin < local {
                    let shuffled = if shuffled != 0 { TILE_ROWS } else { 0 };
                    let row = work.tile * const { rows(TILES, ALTERNATE) as u32 };
                    let most = n.min(const { (STAGES * LINES * of_line::<Q>()) as u32 });
                    prefetch::<Q, false>(next_map, shuffled, k, most, row, work.bin);
                }
            }
        }
        if ALTERNATE && tid == 0 {
            // The other consumer waits for one more.
            drawn.tell(sequence, u32::MAX);
        }
        if STAGED && tid == DRAWER {
            found.tell(sequence, None);
        }
        // All copies have landed when the consumers end, who wait for each stage.
        if !UP && there != u32::MAX {
            // Who waits for the end of this launch waits for that of the one before as well, even if there were no items.
            dependent_launch::wait();
        }
    } else {
        if STAGED {
            wgmma::increase_registers::<224>();
        } else {
            wgmma::increase_registers::<152>();
        }
        if STAGED && !UP && progress.is_kept() {
            look();
            // The next to write there has multiplied what those who wait here gather after they have read it.
            thread::arrive_named(LOOKED, THREADS as u32);
        }
        if !UP && Q::SCALED {
            // These threads read scales of rows of `h` themselves.
            dependent_launch::wait();
        }
        let items = job.items.count();
        let group = warp_id / 4 - 1;
        let within = if ALTERNATE { 0 } else { group };
        let consumer = Consumer {
            stages: [weights, operands],
            weights: Descriptor::<K>::new(weights.address(0u32) + within * (TILES * 64 * LINE) as u32),
            operands: Descriptor::<K>::new(operands.address(0u32)),
            full,
            empty,
            turns,
            ids: ids.offset(group * PAIRS as u32),
            scales: scales.offset(group * PAIRS as u32),
            row_scales: if Q::SCALED { scales_of_rows.offset(group * PAIRS as u32) } else { scales_of_rows },
            magnitudes: magnitudes_of_groups.offset(group * magnitudes as u32),
            group,
            first_row: within * (TILES * 64) as u32 + warp_id % 4 * 16,
        };
        let mut ring = Ring::<STAGES>::new();
        let mut item = dealt;
        if UP && progress.is_kept() && warp_id == const { (PRODUCERS / 32) as u32 } {
            let first = if item < items { job.items.find(item, rank).bin } else { bins };
            if stripes.are_kept() && thread::block_idx_x() == 0 {
                let stripe = warp::lane_id();
                if stripe < stripes.count {
                    // Each consumer says once that it has stored all that it had.
                    let writers = thread::grid_dim_x() * GROUPS as u32;
                    stripes.begin(stripe, writers);
                }
                warp::sync_warp(warp::FULL);
            }
            if warp::lane_id() == 0 {
                progress.begin(first);
                dependent_launch::launch_dependents();
            }
        }
        // Of numbers of items.
        let mut sequence = 0;
        if ALTERNATE && group == 1 {
            item = drawn.hear(0);
            sequence = 1;
            ring.skip(steps);
        }
        let mut round = 0;
        // Stripes of the second product all of whose results are stored.
        let mut stored = 0;
        loop {
            let work = if STAGED {
                found.hear(round)
            } else if item >= items {
                None
            } else if UP {
                Some(job.items.find(item, rank))
            } else {
                Some(job.items.find_in_stripes(item, job.items.shares_before(item)))
            };
            let Some(work) = work else { break };
            let wide = columns::<Q>(PAIRS as u32, work.count);
            if UP && ALTERNATE && progress.is_kept() && round > 0 {
                // The last item's results, while the other one's products are under way.
                consumer.reach(progress, work.bin);
            }
            if !UP && stripes.are_kept() {
                // While the other one's products are under way.
                stored = stripes.leave(1 + group, stored, stripes.of(work.tile));
            }
            if ALTERNATE {
                // The phase of a stage says nothing to who is more than one behind. The first turn is the first group's.
                mbarrier::wait_parity(turns.address(group), (round & 1) ^ (group == 0) as u32);
            }
            macro_rules! products {
                ($($half:literal $sums:ty;)*) => {
                    match wide {
                        $(w if w == 2 * $half && const { <$sums as Accumulator<Q::Sum>>::N == 2 * $half } => apart!(consumer
                            .item::<Q, $sums, UP, ALTERNATE, NOW, STAGED, SLOTS, TILES, PAIRS, LINES, STAGES, DIRECT, PAIRED>(
                                &job, &mut ring, work, steps)),)*
                        _ => {}
                    }
                };
                ($($half:literal)*) => {
                    products!($($half [Q::Sum; $half];)*)
                };
            }
            match PAIRS {
                16 => products!(4 8),
                64 => products!(4 8 16 32),
                _ => products!(
                    16 [Q::Sum; 16];
                    32 [Q::Sum; 32];
                    48 [Q::Sum; 48];
                    56 [Q::Sum; 56];
                    64 [Q::Sum; 64];
                    68 Q::Sums136;
                    72 [Q::Sum; 72];
                    80 [Q::Sum; 80];
                    84 Q::Sums168;
                    88 [Q::Sum; 88];
                ),
            }
            round += 1;
            if ALTERNATE {
                ring.skip(steps);
                // The next is the other one's.
                sequence += 1;
            }
            if !STAGED {
                item = drawn.hear(sequence);
                sequence += 1;
            }
        }
        if !UP && stripes.are_kept() {
            stripes.leave(1 + group, stored, stripes.count);
        }
    }
    if PAIRED {
        // Until the other one has sent and said all that it had to. Not relaxed: what it says goes the way of its results, and behind them;
        // a block that has left by then is a fault.
        cluster::arrive();
        cluster::wait();
    }
}

/// The columns of the products that a share of `count` pairs takes.
#[inline(always)]
fn columns<Q: Operand>(pairs: u32, count: u32) -> u32 {
    let fine = const { <Q::Sums136 as Accumulator<Q::Sum>>::N == 136 };
    match count {
        0..=8 if pairs <= 64 => 8,
        9..=16 if pairs <= 64 => 16,
        0..=32 => 32,
        33..=64 => 64,
        65..=96 => 96,
        97..=112 => 112,
        113..=128 => 128,
        129..=136 if fine => 136,
        129..=144 => 144,
        145..=160 => 160,
        161..=168 if fine => 168,
        _ => 176,
    }
}

/// What a consumer warpgroup works with.
struct Consumer<T> {
    /// The parts of the ring.
    stages: [Shared<T>; 2],
    weights: Descriptor<K>,
    operands: Descriptor<K>,
    full: Shared<u64>,
    empty: Shared<u64>,
    /// Warpgroups that alternate: whose turn it is to multiply.
    turns: Shared<u64>,
    /// Pairs of the share, and their weights.
    ids: Shared<u32>,
    scales: Shared<f32>,
    /// [Scales](RowScales) of their rows.
    row_scales: Shared<f32>,
    /// See [`magnitudes_bytes`]; where results are packed without stages.
    magnitudes: Shared<T>,
    group: u32,
    /// The warp's first row within the tile.
    first_row: u32,
}

impl<T: TensorFloat> Consumer<T> {
    /// The warp is done with a stage.
    #[inline(always)]
    unsafe fn give_back<const PAIRED: bool>(&self, stage: u32) {
        warp::sync_warp(warp::FULL);
        let lane = warp::lane_id();
        if PAIRED {
            if lane < 2 {
                mbarrier::arrive_cluster_relaxed(self.empty.address(stage), lane);
            }
        } else if lane == 0 {
            mbarrier::arrive(self.empty.address(stage));
        }
    }

    /// By all of the warpgroup: all that it still stores is of this expert or of later ones.
    #[inline(always)]
    unsafe fn reach(&self, progress: Progress, expert: u32) {
        thread::sync_named(1 + self.group, 128);
        if thread::thread_idx_x().is_multiple_of(128) {
            progress.reach(self.group, expert);
        }
    }

    /// Multiplies an item and finishes it.
    #[inline(always)]
    unsafe fn item<
        Q: Operand,
        A: Accumulator<Q::Sum> + AsRef<[Q::Sum]>,
        const UP: bool,
        const ALTERNATE: bool,
        const NOW: bool,
        const STAGED: bool,
        const SLOTS: u8,
        const TILES: usize,
        const PAIRS: usize,
        const LINES: usize,
        const STAGES: usize,
        const DIRECT: bool,
        const PAIRED: bool,
    >(
        &self,
        job: &Job<T, Q, DIRECT>,
        ring: &mut Ring<STAGES>,
        work: Item,
        steps: u32,
    ) {
        let rows = const { rows(TILES, ALTERNATE) };
        let mine = thread::thread_idx_x() % 128;
        // What the end needs is on its way while the products run.
        let (mut pair, mut scale) = ([0u32; 2], [0f32; 2]);
        unroll::<2>(|i| {
            let column = mine + 128 * i as u32;
            if column < work.count {
                pair[i] = job.items.pair(work.first + column);
                if !UP {
                    scale[i] = job.items.weight(work.first + column);
                }
            }
        });

        let row = work.tile * rows as u32 + self.first_row;
        let mut end = ([0f32; 2], [[1f32; 2]; TILES]);
        if Q::SCALED && NOW {
            end = self.row_scales::<Q, TILES, UP, DIRECT>(job, work, row, pair);
        }
        let mut acc = [A::zero(); TILES];
        let mut before = ring.stage;
        let mut last;
        let mut step = 0;
        loop {
            // Whether the stage before has been given back.
            let mut given = false;
            if STAGED && step > 0 && step + 1 < steps {
                let ready = mbarrier::test_wait_parity(self.full.address(ring.stage), ring.phase);
                // All of the warpgroup alike, since they wait for products together.
                if !thread::sync_named_and(1 + self.group, 128, ready) {
                    // Nothing to multiply: the stage before will be done before there is.
                    wgmma::wait_operands::<0>();
                    self.give_back::<PAIRED>(before);
                    given = true;
                }
            }
            mbarrier::wait_parity(self.full.address(ring.stage), ring.phase);
            // `cp.async` writes as ordinary instructions do.
            tma::fence_async();
            let a = self.weights.offset(ring.stage * (LINES * rows * LINE) as u32);
            let b = self.operands.offset(ring.stage * (LINES * PAIRS * LINE) as u32);
            unroll::<LINES>(|l| {
                let (a, b) = (a.offset((l * rows * LINE) as u32), b.offset((l * PAIRS * LINE) as u32));
                unroll::<TILES>(|s| {
                    acc[s].multiply::<Q, 4, _, _>(a.offset((s * 64 * LINE) as u32), b, l > 0 || step > 0);
                });
            });
            // The step before is done: its stage can be filled again.
            match TILES * LINES {
                _ if NOW => wgmma::wait::<0>(&mut acc[0]),
                1 => wgmma::wait::<1>(&mut acc[0]),
                2 => wgmma::wait::<2>(&mut acc[0]),
                _ => wgmma::wait::<4>(&mut acc[0]),
            }
            step += 1;
            if NOW {
                self.give_back::<PAIRED>(ring.stage);
            } else if step > 1 && !(STAGED && step == steps) && !given {
                self.give_back::<PAIRED>(before);
            }
            last = [before, ring.stage];
            before = ring.stage;
            ring.advance();
            if UP && !ALTERNATE && step == 1 && job.progress.is_kept() {
                // The last item's results, while products are under way.
                self.reach(job.progress, work.bin);
            }
            if step == steps {
                break;
            }
        }
        if ALTERNATE {
            warp::sync_warp(warp::FULL);
            if warp::lane_id() == 0 {
                mbarrier::arrive(self.turns.address(1 - self.group));
            }
        }
        if Q::SCALED && !NOW {
            // While the last products run: registers are short.
            end = self.row_scales::<Q, TILES, UP, DIRECT>(job, work, row, pair);
        }
        let (row_scale, by) = end;
        wgmma::wait::<0>(&mut acc[0]);
        unroll::<TILES>(|s| acc[s].pin());
        if STAGED {
            // Each consumer takes one of the last two stages for its results, when both are done with them.
            thread::sync_named(1 + GROUPS as u32, GROUPS as u32 * 128);
            self.give_back::<PAIRED>(if self.group == 0 { last[1] } else { last[0] });
        } else if !NOW {
            self.give_back::<PAIRED>(before);
        }

        // Everybody is done with the last item's.
        if !STAGED {
            thread::sync_named(1 + self.group, 128);
        }
        unroll::<2>(|i| {
            let column = mine + 128 * i as u32;
            if column < PAIRS as u32 {
                if !UP && (SLOTS == ADDED || job.unordered) {
                    // SAFETY: tokens with pairs have slots.
                    core::hint::assert_unchecked(job.slots != 0);
                    pair[i] /= job.slots;
                }
                self.ids.set(column, pair[i]);
                if !UP {
                    self.scales.set(column, scale[i]);
                }
                if Q::SCALED {
                    self.row_scales.set(column, row_scale[i]);
                }
            }
        });
        thread::sync_named(1 + self.group, 128);
        if STAGED {
            let stage = if self.group == 0 { last[0] } else { last[1] };
            let buffers = [
                self.stages[0].offset(stage * (LINES * rows * STEP) as u32),
                self.stages[1].offset(stage * (LINES * PAIRS * STEP) as u32),
            ];
            let row = work.tile * rows as u32 + self.group * const { TILES as u32 * 64 };
            if !UP && SLOTS == ADDED {
                self.stage_rounded::<Q, A, T, true, TILES, DIRECT>(job, work, row, buffers, &acc, by);
            } else if !UP && SLOTS == ROUNDED {
                self.stage_rounded::<Q, A, T, false, TILES, DIRECT>(job, work, row, buffers, &acc, by);
            } else if !UP && SLOTS == PACKED {
                self.find_exponents::<Q, A, TILES, PAIRS, STAGED, DIRECT>(job, work, row, buffers[1], &acc, by);
                self.stage_rounded::<Q, A, f16, false, TILES, DIRECT>(job, work, row, buffers, &acc, by);
            } else if !UP {
                self.stage_down::<Q, A, TILES, PAIRS, DIRECT>(job, work, row, buffers, &acc, by);
            } else if job.activation.silu && !job.biased && !job.shared_biased {
                self.stage_up::<Q, A, TILES, true, DIRECT>(job, work, row, buffers[0], &acc, by);
            } else {
                self.stage_up::<Q, A, TILES, false, DIRECT>(job, work, row, buffers[0], &acc, by);
            }
            self.give_back::<PAIRED>(stage);
            return;
        }
        if !UP && SLOTS == PACKED {
            let first = work.tile * rows as u32;
            self.find_exponents::<Q, A, TILES, PAIRS, STAGED, DIRECT>(job, work, first, self.magnitudes, &acc, by);
        }
        for s in 0..TILES {
            let row = work.tile * rows as u32 + self.first_row + s as u32 * 64;
            if UP {
                self.store_up::<Q, A, DIRECT>(job, work, row, acc[s].as_ref(), by[s]);
            } else {
                self.store_down::<Q, A, SLOTS, DIRECT>(job, work, row, acc[s].as_ref(), by[s]);
            }
        }
    }

    /// What finished sums are multiplied with: the scales of the rows of two pairs, and in each tile those of a thread's rows of weights, which begin with `row`.
    #[inline(always)]
    unsafe fn row_scales<Q: Operand, const TILES: usize, const UP: bool, const DIRECT: bool>(
        &self,
        job: &Job<T, Q, DIRECT>,
        work: Item,
        row: u32,
        pair: [u32; 2],
    ) -> ([f32; 2], [[f32; 2]; TILES]) {
        let mine = thread::thread_idx_x() % 128;
        let (mut row_scale, mut by) = ([0f32; 2], [[0f32; 2]; TILES]);
        unroll::<2>(|i| {
            if mine + 128 * (i as u32) < work.count {
                // SAFETY: it is the number of slots, or 1.
                core::hint::assert_unchecked(job.scales.x_divisor != 0);
                row_scale[i] = job.scales.x.get(if UP { pair[i] / job.scales.x_divisor } else { pair[i] });
            }
        });
        unroll::<TILES>(|s| by[s] = job.weight_scales::<UP>(work.bin, row + 64 * s as u32));
        (row_scale, by)
    }

    /// The scales of the rows of two columns from `column` on.
    #[inline(always)]
    unsafe fn scales_of<Q: Operand>(&self, column: u32) -> [f32; 2] {
        if !Q::SCALED {
            return [1.0; 2];
        }
        let B64(scales) = self.row_scales.get_as::<B64<f32, 2>>(column);
        scales
    }

    /// Of 16 rows the first 8 are gates, the others their values. Pairs of sums in a thread belong to neighbouring columns
    /// (tokens); a transposition in registers makes them neighbouring outputs.
    #[inline(always)]
    unsafe fn store_up<Q: Operand, A: Accumulator<Q::Sum>, const DIRECT: bool>(
        &self,
        job: &Job<T, Q, DIRECT>,
        work: Item,
        row: u32,
        sums: &[Q::Sum],
        by: [f32; 2],
    ) {
        let (g, t) = (warp::lane_id() / 4, warp::lane_id() % 4);
        let first = row / 2;
        let fits = first < job.n;
        let output = (first + g).min(job.n - 1);
        let [gates, values] = job.biases(work.bin, output);
        for j in 0..A::N / 8 {
            let scales = self.scales_of::<Q>(8 * j as u32 + 2 * t);
            let sum = |e: usize| scaled::<Q>(sums[4 * j + e], by[e / 2], scales[e % 2]);
            let v = |c: usize| job.activation.gated(sum(c) + gates, sum(2 + c) + values);
            let [a, b] = T::pair_from_f32([v(0), v(1)]);
            let word = mma::movmatrix_trans(T::pack(a, b));
            let column = 8 * j as u32 + g;
            let at = self.ids.get(column) as usize * job.n as usize + (first + 2 * t) as usize;
            job.h.set_if_for(fits && column < work.count, at, word, job.policy);
        }
    }

    /// A thread has rows `g` and `g + 8` of two columns. Four lanes with neighbouring `g` swap sums until each has four
    /// neighbouring rows of one column, which are 16 bytes of `partial`, or 8 if they are rounded or packed.
    #[inline(always)]
    unsafe fn store_down<Q: Operand, A: Accumulator<Q::Sum>, const SLOTS: u8, const DIRECT: bool>(
        &self,
        job: &Job<T, Q, DIRECT>,
        work: Item,
        row: u32,
        sums: &[Q::Sum],
        by: [f32; 2],
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
            let scales = self.scales_of::<Q>(8 * j as u32 + 2 * (lane % 4));
            let sum = |e: usize| scaled::<Q>(sums[4 * j + e], by[e / 2], scales[e % 2]);
            let mut v = [sum(0), sum(1), sum(2), sum(3)];
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
            let stored = fits && column < work.count;
            if SLOTS == ROUNDED {
                let rounded = GlobalMut::new(job.partial.ptr(0u32).cast::<T>());
                rounded.set_if_for(stored, at, B64(vec::from_f32::<T, 4>(v)), job.policy);
            } else if SLOTS == PACKED {
                let packed = GlobalMut::new(job.partial.ptr(0u32).cast::<f16>());
                packed.set_if_for(stored, at, B64(vec::from_f32::<f16, 4>(v)), job.policy);
            } else if job.unordered {
                if stored {
                    atomic::reduce_add_v4_f32(job.partial.ptr(at), v, job.policy);
                }
            } else {
                job.partial.set_if_for(stored, at, B128(v), job.policy);
            }
        }
    }

    /// Results of the first product by way of shared memory, which brings each pair's outputs together. `row`: the
    /// warpgroup's first; `SILU`: that is the activation, and there are no biases.
    #[inline(always)]
    unsafe fn stage_up<
        Q: Operand,
        A: Accumulator<Q::Sum> + AsRef<[Q::Sum]>,
        const TILES: usize,
        const SILU: bool,
        const DIRECT: bool,
    >(
        &self,
        job: &Job<T, Q, DIRECT>,
        work: Item,
        row: u32,
        buffer: Shared<T>,
        acc: &[A; TILES],
        by: [[f32; 2]; TILES],
    ) {
        let lane = warp::lane_id();
        let (g, t) = (lane / 4, lane % 4);
        let first = row / 2;
        let outputs = job.n.saturating_sub(first).min(const { TILES as u32 * 32 });
        // 16 bytes apart from a multiple of 128: no two lanes that store together meet in a bank.
        let pitch = const { TILES as u32 * 32 + 8 };
        let within = warp::warp_id() % 4 * 8;
        // Lane 8 i + r says where row r of the i-th of four matrices goes, transposed: of both tiles the outputs of eight columns, then of the next eight.
        let place = (lane / 16 * 8 + lane % 8) * pitch + within + lane / 8 % 2 * 32;
        let place = buffer.address(place);
        let mut biases = [[0f32; 2]; TILES];
        if !SILU {
            unroll::<TILES>(|s| biases[s] = job.biases(work.bin, (first + within + s as u32 * 32 + g).min(job.n - 1)));
        }
        for twice in 0..A::N.div_ceil(16) {
            let mut words = [0; 4];
            unroll::<4>(|i| {
                let (s, j) = (i % 2, 2 * twice + i / 2);
                if j < A::N / 8 {
                    let sums = acc[s].as_ref();
                    let scales = self.scales_of::<Q>(8 * j as u32 + 2 * t);
                    let sum = |e: usize| scaled::<Q>(sums[4 * j + e], by[s][e / 2], scales[e % 2]);
                    let v = |c: usize| {
                        let (gate, value) = (sum(c), sum(2 + c));
                        if SILU {
                            gate * float::fast::sigmoid(gate) * value
                        } else {
                            job.activation.gated(gate + biases[s][0], value + biases[s][1])
                        }
                    };
                    let [a, b] = T::pair_from_f32([v(0), v(1)]);
                    words[i] = T::pack(a, b);
                }
            });
            let place = place + (twice as u32 * 16 * pitch) * 2;
            if 2 * twice + 1 < A::N / 8 {
                mma::stmatrix_x4_trans(place, words);
            } else {
                mma::stmatrix_x2_trans(place, [words[0], words[1]]);
            }
        }
        // What the copy engine writes there next comes after this.
        tma::fence_async();
        thread::sync_named(1 + self.group, 128);
        let end = work.count.min(A::N as u32);
        self.store_columns::<T, 8, 8, 8>(job.n, first, outputs, [0, end], buffer, pitch, |there, at, value| {
            job.h.set_if_for(there, at, value, job.policy);
        });
    }

    /// Columns `from..end` of a buffer, `pitch` apart, to the rows of their pairs, by all of the warpgroup: `outputs` from `first` on. `LANES`
    /// neighbouring lanes have a column, `E` outputs (16 bytes) each; a lane has `ONCE` columns at once. `store`: whether, at which of all outputs, and what.
    #[inline(always)]
    #[allow(clippy::too_many_arguments)]
    unsafe fn store_columns<V: Copy, const E: usize, const LANES: u32, const ONCE: usize>(
        &self,
        n: u32,
        first: u32,
        outputs: u32,
        [from, end]: [u32; 2],
        buffer: Shared<T>,
        pitch: u32,
        store: impl Fn(bool, usize, B128<V, E>),
    ) {
        let lane = warp::lane_id();
        let (part, low) = (lane % LANES * E as u32, warp::warp_id() % 4 * const { 32 / LANES } + lane / LANES);
        let step = const { 4 * 32 / LANES };
        let mut base = from;
        while base < end {
            let (mut values, mut at, mut there) = ([None; ONCE], [0; ONCE], [false; ONCE]);
            unroll::<ONCE>(|i| {
                let column = base + low + i as u32 * step;
                there[i] = column < end && part < outputs;
                // Any that is there, otherwise.
                let column = column.min(end - 1);
                values[i] = Some(buffer.get_as::<B128<V, E>>(
                    (column - from) * pitch + part * const { (size_of::<V>() / size_of::<T>()) as u32 },
                ));
                at[i] = self.ids.get(column) as usize * n as usize + (first + part) as usize;
            });
            unroll::<ONCE>(|i| {
                if let Some(value) = values[i] {
                    store(there[i], at[i], value);
                }
            });
            base += ONCE as u32 * step;
        }
    }

    /// Results of the second product by way of shared memory, a number of columns at a time in two buffers in turn.
    #[inline(always)]
    unsafe fn stage_down<
        Q: Operand,
        A: Accumulator<Q::Sum> + AsRef<[Q::Sum]>,
        const TILES: usize,
        const PAIRS: usize,
        const DIRECT: bool,
    >(
        &self,
        job: &Job<T, Q, DIRECT>,
        work: Item,
        first: u32,
        buffers: [Shared<T>; 2],
        acc: &[A; TILES],
        by: [[f32; 2]; TILES],
    ) {
        let within = warp::warp_id() % 4 * 16 + warp::lane_id() / 4;
        let mut bias = [[0f32; 2]; TILES];
        if job.biased || job.shared_biased {
            unroll::<TILES>(|s| {
                for h in 0..2 {
                    bias[s][h] = job.bias(work.bin, job.n, first + within + s as u32 * 64 + h as u32 * 8);
                }
            });
        }
        let fit = const { [staged_columns(TILES, GROUPS * TILES * 64, 4), staged_columns(TILES, PAIRS, 4)] };
        // Not a closure: those are not inlined when several kernels have them.
        self.stage_round::<Q, A, TILES, DIRECT>(job, work, first, 0, fit, buffers, acc, bias, by);
        self.stage_round::<Q, A, TILES, DIRECT>(job, work, first, 1, fit, buffers, acc, bias, by);
        self.stage_round::<Q, A, TILES, DIRECT>(job, work, first, 2, fit, buffers, acc, bias, by);
        self.stage_round::<Q, A, TILES, DIRECT>(job, work, first, 3, fit, buffers, acc, bias, by);
    }

    /// A round of [`stage_down`](Self::stage_down): as many columns as `fit` into its buffer.
    #[inline(always)]
    #[allow(clippy::too_many_arguments)]
    unsafe fn stage_round<
        Q: Operand,
        A: Accumulator<Q::Sum> + AsRef<[Q::Sum]>,
        const TILES: usize,
        const DIRECT: bool,
    >(
        &self,
        job: &Job<T, Q, DIRECT>,
        work: Item,
        first: u32,
        round: usize,
        fit: [usize; 2],
        buffers: [Shared<T>; 2],
        acc: &[A; TILES],
        bias: [[f32; 2]; TILES],
        by: [[f32; 2]; TILES],
    ) {
        let lane = warp::lane_id();
        let (g, t) = (lane / 4, lane % 4);
        let within = warp::warp_id() % 4 * 16 + g;
        let rows = job.n.saturating_sub(first).min(const { TILES as u32 * 64 });
        // 16 bytes apart from a multiple of 128: no two lanes that store together meet in a bank.
        let pitch = const { TILES * 64 * 2 + 8 };
        let from = round / 2 * (fit[0] + fit[1]) + round % 2 * fit[0];
        let to = from + fit[round % 2];
        let buffer = buffers[round % 2];
        if from < A::N {
            for j in 0..A::N / 8 {
                if 8 * j >= from && 8 * j < to {
                    let B64(scale) = self.scales.get_as::<B64<f32, 2>>(8 * j as u32 + 2 * t);
                    let scales = self.scales_of::<Q>(8 * j as u32 + 2 * t);
                    for s in 0..TILES {
                        let sums = acc[s].as_ref();
                        for e in 0..4 {
                            // Of a row and the 8th below it two columns each.
                            let (h, c) = (e / 2, e % 2);
                            let place = (8 * j - from + c) * pitch + s * 128 + h * 16;
                            let at = place as u32 + 2 * t * pitch as u32 + 2 * within;
                            let sum = scaled::<Q>(sums[4 * j + e], by[s][h], scales[c]);
                            buffer.set_as::<f32>(at, (sum + bias[s][h]) * scale[c]);
                        }
                    }
                }
            }
            tma::fence_async();
            thread::sync_named(1 + self.group, 128);
            let end = work.count.min(to as u32);
            let (columns, pitch) = ([from as u32, end], pitch as u32);
            if job.unordered {
                self.store_columns::<f32, 4, 32, 4>(
                    job.n,
                    first,
                    rows,
                    columns,
                    buffer,
                    pitch,
                    |there, at, B128(v)| {
                        if there {
                            atomic::reduce_add_v4_f32(job.partial.ptr(at), v, job.policy);
                        }
                    },
                );
                return;
            }
            self.store_columns::<f32, 4, 32, 4>(job.n, first, rows, columns, buffer, pitch, |there, at, value| {
                job.partial.set_if_for(there, at, value, job.policy);
            });
        }
    }

    /// The same of results that are rounded to `R`, of 16 bits: as many of the first columns as have room in one buffer, the others in the other one.
    #[inline(always)]
    unsafe fn stage_rounded<
        Q: Operand,
        A: Accumulator<Q::Sum> + AsRef<[Q::Sum]>,
        R: TensorFloat,
        const ADDED: bool,
        const TILES: usize,
        const DIRECT: bool,
    >(
        &self,
        job: &Job<T, Q, DIRECT>,
        work: Item,
        first: u32,
        buffers: [Shared<T>; 2],
        acc: &[A; TILES],
        by: [[f32; 2]; TILES],
    ) {
        // Code of its own without biases, as nearly all blocks are: an addition less for each result.
        if job.biased || job.shared_biased {
            let within = warp::warp_id() % 4 * 16 + warp::lane_id() / 4;
            let mut bias = [[0f32; 2]; TILES];
            unroll::<TILES>(|s| {
                for h in 0..2 {
                    bias[s][h] = job.bias(work.bin, job.n, first + within + s as u32 * 64 + h as u32 * 8);
                }
            });
            self.lay_rounded::<Q, A, R, TILES, true>(buffers, acc, bias, by);
        } else {
            self.lay_rounded::<Q, A, R, TILES, false>(buffers, acc, [[0.0; 2]; TILES], by);
        }
        // What the copy engine writes there next comes after this.
        tma::fence_async();
        thread::sync_named(1 + self.group, 128);
        let rows = job.n.saturating_sub(first).min(const { TILES as u32 * 64 });
        let pitch = const { TILES as u32 * 64 + 8 };
        let fit = const { staged_columns(TILES, GROUPS * TILES * 64, 2) as u32 };
        let out = GlobalMut::new(job.partial.ptr(0u32).cast::<R>());
        let end = work.count.min(A::N as u32);
        let (low, high) = ([0, end.min(fit)], [fit, end]);
        let leave = |there: bool, at: usize, value: B128<R, 8>| {
            if !ADDED {
                out.set_if_for(there, at, value, job.policy);
            } else if there {
                R::reduce_add_v8(out.ptr(at), value.0, job.policy);
            }
        };
        self.store_columns::<R, 8, 16, 8>(job.n, first, rows, low, buffers[0], pitch, leave);
        if const { A::N > staged_columns(TILES, GROUPS * TILES * 64, 2) } {
            self.store_columns::<R, 8, 16, 4>(job.n, first, rows, high, buffers[1], pitch, leave);
        }
    }

    /// Lays results out for [`stage_rounded`](Self::stage_rounded); two tiles.
    #[inline(always)]
    unsafe fn lay_rounded<
        Q: Operand,
        A: Accumulator<Q::Sum> + AsRef<[Q::Sum]>,
        R: TensorFloat,
        const TILES: usize,
        const BIASED: bool,
    >(
        &self,
        buffers: [Shared<T>; 2],
        acc: &[A; TILES],
        bias: [[f32; 2]; TILES],
        by: [[f32; 2]; TILES],
    ) {
        let lane = warp::lane_id();
        // 16 bytes apart from a multiple of 128: no two lanes that store together meet in a bank.
        let pitch = const { TILES * 64 + 8 };
        let fit = const { staged_columns(TILES, GROUPS * TILES * 64, 2) };
        // Lane 8 i + r says where row r of the i-th of four matrices goes, transposed: of a tile's 16 rows the upper and the lower 8, in both tiles.
        let place = lane % 8 * pitch as u32 + warp::warp_id() % 4 * 16 + lane / 8 % 2 * 8 + lane / 16 * 64;
        let places = buffers.map(|buffer| buffer.address(place));
        for j in 0..A::N / 8 {
            let B64(scale) = self.scales.get_as::<B64<f32, 2>>(8 * j as u32 + 2 * (lane % 4));
            let scales = self.scales_of::<Q>(8 * j as u32 + 2 * (lane % 4));
            let mut words = [0; 4];
            unroll::<4>(|i| {
                let (s, h) = (i / 2, i % 2);
                let sums = acc[s].as_ref();
                let value = |c: usize| {
                    let sum = scaled::<Q>(sums[4 * j + 2 * h + c], by[s][h], scales[c]);
                    if BIASED { (sum + bias[s][h]) * scale[c] } else { sum * scale[c] }
                };
                words[i] = R::pack_f32(value(0), value(1));
            });
            let (place, from) = if 8 * j < fit { (places[0], 0) } else { (places[1], fit) };
            mma::stmatrix_x4_trans(place + ((8 * j - from) * pitch * 2) as u32, words);
        }
    }

    /// For results that are packed, a power of two for each pair and this warpgroup's outputs, which are [`GROUP`]: with it the largest of them is below 2^15 in f16, and 2^13 or more but
    /// for biases. What is below 2^-27 of that loses bits; beside infinity others are as f16 has them. In place of the pairs' weights, which the sum multiplies by, and by what takes it
    /// back. `buffer` is for magnitudes.
    #[inline(always)]
    unsafe fn find_exponents<
        Q: Operand,
        A: Accumulator<Q::Sum> + AsRef<[Q::Sum]>,
        const TILES: usize,
        const PAIRS: usize,
        const STAGED: bool,
        const DIRECT: bool,
    >(
        &self,
        job: &Job<T, Q, DIRECT>,
        work: Item,
        first: u32,
        buffer: Shared<T>,
        acc: &[A; TILES],
        by: [[f32; 2]; TILES],
    ) {
        let (mine, lane) = (thread::thread_idx_x() % 128, warp::lane_id());
        // See `magnitudes_bytes`.
        let line = const { PAIRS as u32 / 2 + 4 };
        let at = |row: u32, word: u32| 2 * (row * line + word);
        let row = mine / 4;
        let mut least = 0f32;
        if job.biased || job.shared_biased {
            let within = row / 8 * 16 + lane / 4;
            unroll::<TILES>(|s| {
                for h in 0..2 {
                    let bias = job.bias(work.bin, job.n, first + within + s as u32 * 64 + h as u32 * 8);
                    least = float::max(least, bias.abs());
                }
            });
        }
        for j in 0..A::N / 8 {
            let scales = self.scales_of::<Q>(8 * j as u32 + 2 * (lane % 4));
            let mut largest = [least; 2];
            unroll::<4>(|i| {
                let (s, h) = (i / 2, i % 2);
                let sums = acc[s].as_ref();
                unroll::<2>(|c| {
                    let sum = scaled::<Q>(sums[4 * j + 2 * h + c], by[s][h], scales[c]);
                    largest[c] = float::max(largest[c], sum.abs());
                });
            });
            let [low, high] = largest.map(f32::to_bits);
            buffer.set_as(at(row, 4 * j as u32 + lane % 4), integer::permute(low, high, 0x7632));
        }
        thread::sync_named(1 + self.group, 128);
        if 2 * mine < work.count {
            let mut largest = 0u32;
            unroll::<32>(|row| largest = integer::max_i16x2(largest, buffer.get_as(at(row as u32, mine))));
            unroll::<2>(|c| {
                let column = 2 * mine + c as u32;
                // Of infinity none.
                let exponent = match largest >> (16 * c + 7) & 0xff {
                    255 => 127 + 13,
                    exponent => exponent.max(15),
                };
                let weight = self.scales.get(column);
                self.scales.set(column, f32::from_bits((2 * 127 + 13 - exponent) << 23));
                if column < work.count && first < job.n {
                    // Behind the results; the address is computed here, since registers are few.
                    let results = job.tokens as usize * job.slots as usize * job.n as usize;
                    let exponents =
                        GlobalMut::new(job.partial.ptr(0u32).cast::<f16>().wrapping_add(results).cast::<f32>());
                    let at = self.ids.get(column) as usize * job.n.div_ceil(GROUP) as usize + (first / GROUP) as usize;
                    let exponent = weight * f32::from_bits((exponent - 13) << 23);
                    if STAGED {
                        exponents.set(at, exponent);
                    } else {
                        // Sectors are written a word at a time, by one tile after another: none should leave half written.
                        exponents.set_if_for(true, at, exponent, job.policy);
                    }
                }
            });
        }
        thread::sync_named(1 + self.group, 128);
    }
}

// The shape of items whose results are packed: a warpgroup's outputs are a group, and there is room for magnitudes.
const _: () = assert!(2 * 64 == GROUP && 176 * STEP * 2 >= magnitudes_bytes(176) && 176 <= 2 * 128);

/// A finished sum, times the scales of its row of weights and of its row of `x` or `h`.
#[inline(always)]
fn scaled<Q: Operand>(sum: Q::Sum, by: f32, scale: f32) -> f32 {
    if Q::SCALED { sum.to_f32() * (by * scale) } else { sum.to_f32() }
}

/// How many columns of `tiles * 64` numbers of so many `bytes`, 16 bytes apart, have room in so many lines of a stage, in steps of 8.
const fn staged_columns(tiles: usize, lines: usize, bytes: usize) -> usize {
    lines * LINE / (tiles * 64 * bytes + 16) / 8 * 8
}

entries! {
    /// Arguments of both products.
    pub struct Args<T>(
        /// `[tokens * slots, intermediate]`: written by the first product, read by the second.
        h: *mut T,
        /// `[tokens * slots, hidden]`: written by the second product; rounded results as elements, packed ones as f16 and behind them
        /// `[tokens * slots, ceil(hidden / GROUP)]` of f32, by which the sum multiplies them, from the same place on.
        partial: *mut f32,
        /// `[tokens, hidden]`, rows `x_row` apart.
        x: *const T, x_row: usize,
        /// The weights of the routed experts and of the shared ones; see the [module](self).
        map: TensorMap, shared_map: TensorMap,
        /// Of the first product: the second one's `map`.
        next_map: TensorMap,
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
        layout: u32,
        /// 0, or for [shuffled](super::shuffle) weights the rows of a tile.
        shuffled: u32,
        /// See [`fused::Args`](super::fused::Args).
        activation: u32, alpha: f32, limit: f32,
        /// 1 if results of the second product in f32 are added to `partial`, then `[tokens, hidden]` and zeroed, in any order. Kernels for results that are `added` do so with elements always.
        unordered: u32,
        /// [`WORDS`](super::items::WORDS), whatever is in them; read and written where items are drawn.
        words: *mut u64,
        /// A number whose lower 36 bits are not 0 and no other launch's, unless it repeats this one; the two products may have the same.
        launch: u64,
        /// 1 if results, `h` or `partial`, may stay in the second-level cache until they have been read for the last time.
        kept: u32,
        /// [`WORDS`](super::progress::WORDS) for both products, or null: whatever is in them. With them the second begins while the first still runs.
        progress: *mut u32,
        /// [`MAX_STRIPES`](super::progress::MAX_STRIPES) for both products, of as many blocks, or null: whatever is in them. With them, which takes `progress` and a sorted list of few pairs
        /// an expert, the sum begins with the second product's first stripe of columns while the next ones are computed.
        left: *mut u32,
        /// Tiles of a stripe of the second product, at least one: it computes all experts' columns of a stripe, then those of the next one. Without effect on many pairs.
        stripe: u32,
    );
    moe_fused_wgmma_up_t16_f16 { type T = f16; } [ROOMY, 1; Sm90a] => fused_wgmma::<T, true, true, true, false, F32, 1, 16, 4, 5, true, false>;
    moe_fused_wgmma_up_t64_f16 { type T = f16; } [ROOMY, 1; Sm90a] => fused_wgmma::<T, true, true, true, false, F32, 2, 64, 2, 4, false, false>;
    moe_fused_wgmma_up_t176_f16 { type T = f16; } [THREADS, 1; Sm90a] => fused_wgmma::<T, true, false, false, true, F32, 2, 176, 1, 4, false, false>;
    moe_fused_wgmma_up_t16_bf16 { type T = bf16; } [ROOMY, 1; Sm90a] => fused_wgmma::<T, true, true, true, false, F32, 1, 16, 4, 5, true, false>;
    moe_fused_wgmma_up_t64_bf16 { type T = bf16; } [ROOMY, 1; Sm90a] => fused_wgmma::<T, true, true, true, false, F32, 2, 64, 2, 4, false, false>;
    moe_fused_wgmma_up_t176_bf16 { type T = bf16; } [THREADS, 1; Sm90a] => fused_wgmma::<T, true, false, false, true, F32, 2, 176, 1, 4, false, false>;
    moe_fused_wgmma_down_t16_f16 { type T = f16; } [ROOMY, 1; Sm90a] => fused_wgmma::<T, false, true, true, false, F32, 1, 16, 4, 5, true, false>;
    moe_fused_wgmma_down_t64_f16 { type T = f16; } [ROOMY, 1; Sm90a] => fused_wgmma::<T, false, true, true, false, F32, 2, 64, 2, 4, false, false>;
    moe_fused_wgmma_down_t176_f16 { type T = f16; } [THREADS, 1; Sm90a] => fused_wgmma::<T, false, false, false, true, F32, 2, 176, 1, 4, false, false>;
    moe_fused_wgmma_down_t16_bf16 { type T = bf16; } [ROOMY, 1; Sm90a] => fused_wgmma::<T, false, true, true, false, F32, 1, 16, 4, 5, true, false>;
    moe_fused_wgmma_down_t64_bf16 { type T = bf16; } [ROOMY, 1; Sm90a] => fused_wgmma::<T, false, true, true, false, F32, 2, 64, 2, 4, false, false>;
    moe_fused_wgmma_down_t176_bf16 { type T = bf16; } [THREADS, 1; Sm90a] => fused_wgmma::<T, false, false, false, true, F32, 2, 176, 1, 4, false, false>;
    moe_fused_wgmma_down_rounded_t64_f16 { type T = f16; } [ROOMY, 1; Sm90a] => fused_wgmma::<T, false, true, true, false, ROUNDED, 2, 64, 2, 4, false, false>;
    moe_fused_wgmma_down_rounded_t64_bf16 { type T = bf16; } [ROOMY, 1; Sm90a] => fused_wgmma::<T, false, true, true, false, ROUNDED, 2, 64, 2, 4, false, false>;
    moe_fused_wgmma_down_added_t176_f16 { type T = f16; } [THREADS, 1; Sm90a] => fused_wgmma::<T, false, false, false, true, ADDED, 2, 176, 1, 4, false, false>;
    moe_fused_wgmma_down_rounded_t176_f16 { type T = f16; } [THREADS, 1; Sm90a] => fused_wgmma::<T, false, false, false, true, ROUNDED, 2, 176, 1, 4, false, false>;
    moe_fused_wgmma_down_added_t176_bf16 { type T = bf16; } [THREADS, 1; Sm90a] => fused_wgmma::<T, false, false, false, true, ADDED, 2, 176, 1, 4, false, false>;
    moe_fused_wgmma_down_rounded_t176_bf16 { type T = bf16; } [THREADS, 1; Sm90a] => fused_wgmma::<T, false, false, false, true, ROUNDED, 2, 176, 1, 4, false, false>;
    moe_fused_wgmma_up_t176_two_f16 { type T = f16; } [THREADS, 1; Sm90a] => fused_wgmma::<T, true, false, false, true, F32, 2, 176, 1, 4, false, true>;
    moe_fused_wgmma_down_t176_two_f16 { type T = f16; } [THREADS, 1; Sm90a] => fused_wgmma::<T, false, false, false, true, F32, 2, 176, 1, 4, false, true>;
    moe_fused_wgmma_down_added_t176_two_f16 { type T = f16; } [THREADS, 1; Sm90a] => fused_wgmma::<T, false, false, false, true, ADDED, 2, 176, 1, 4, false, true>;
    moe_fused_wgmma_down_rounded_t176_two_f16 { type T = f16; } [THREADS, 1; Sm90a] => fused_wgmma::<T, false, false, false, true, ROUNDED, 2, 176, 1, 4, false, true>;
    moe_fused_wgmma_up_t176_two_bf16 { type T = bf16; } [THREADS, 1; Sm90a] => fused_wgmma::<T, true, false, false, true, F32, 2, 176, 1, 4, false, true>;
    moe_fused_wgmma_down_t176_two_bf16 { type T = bf16; } [THREADS, 1; Sm90a] => fused_wgmma::<T, false, false, false, true, F32, 2, 176, 1, 4, false, true>;
    moe_fused_wgmma_down_added_t176_two_bf16 { type T = bf16; } [THREADS, 1; Sm90a] => fused_wgmma::<T, false, false, false, true, ADDED, 2, 176, 1, 4, false, true>;
    moe_fused_wgmma_down_rounded_t176_two_bf16 { type T = bf16; } [THREADS, 1; Sm90a] => fused_wgmma::<T, false, false, false, true, ROUNDED, 2, 176, 1, 4, false, true>;
    moe_fused_wgmma_down_packed_t64_bf16 { type T = bf16; } [ROOMY, 1; Sm90a] => fused_wgmma::<T, false, true, true, false, PACKED, 2, 64, 2, 4, false, false>;
    moe_fused_wgmma_down_packed_t176_bf16 { type T = bf16; } [THREADS, 1; Sm90a] => fused_wgmma::<T, false, false, false, true, PACKED, 2, 176, 1, 4, false, false>;
    moe_fused_wgmma_down_packed_t176_two_bf16 { type T = bf16; } [THREADS, 1; Sm90a] => fused_wgmma::<T, false, false, false, true, PACKED, 2, 176, 1, 4, false, true>;
}
