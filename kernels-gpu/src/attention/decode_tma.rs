//! Decode attention by Hopper's copy engine: [`decode`](super::decode) for a GPU that has one.
//!
//! # Roles
//! Two producer warps and four or eight consumers. The producers find the block's items, look up their pages and have the copy engine
//! bring K and Q (one of them) and V (the other) to rings in shared memory, a step of 64 or 128 keys at a time. They never
//! wait for anything but room in the rings, so the rings are full whatever the consumers are at: the ends of chunks and
//! items cost no bandwidth.
//!
//! A box is a page of one head (or the part of it that a step takes), in atoms of 8 keys × 128 bytes, swizzled, as in
//! [`prefill_wgmma`](super::prefill_wgmma). Boxes of pages that do not exist are outside of the tensor and become zeros, and so are
//! those wholly before the window of a sequence's first query token; what is before that window in its first box, or follows a
//! sequence's end in its last one, may be anything, and V's operands are masked there.
//!
//! What comes before the first copy is a chain of loads that wait for one another, lengths, pages, keys, and of arithmetic by one
//! warp, some five cycles an instruction: for short sequences it is half of the time. So page numbers are fetched for 32 boxes
//! at once (a [`Run`]), a lane each, and stay in registers; blocks go to their part of a large batch without looking at what lies
//! before it; and the producer of K tells the consumers at once if there is no work, and with the last step that it is the last.
//!
//! # A step
//! Each consumer multiplies its share of the keys with Q, as in [`decode`](super::decode), and puts the probabilities into
//! shared memory. Then each multiplies a share of V's *columns* with all of them. So O is spread over the block, eight
//! registers a thread for heads of 128, and there is nothing to merge among the warps but the sums of probabilities, at
//! the end of a chunk.
//!
//! Maxima follow with slack: probabilities are relative to a maximum that all warps know, and may exceed it 2^8 times. So
//! one barrier a step suffices: only if a warp finds more than that do they agree on new maxima, which is seldom. In the first
//! step of a chunk they do so at once. A common factor of numerator and denominator is no error.
//!
//! # Chunks and shares
//! Chunks are by the sequence's length alone, those of [`decode`](super::decode) or somewhat smaller ([`SHORT`]). Each chunk is computed from nothing and then
//! added ([`Total`]) to the chunks before it, in their order. How they are dealt to blocks ([`Share`]) therefore has no say in
//! the result: the chunks of a sequence that are all a block's are added as they come; otherwise each goes to memory, and the
//! block that draws the last ticket of a sequence's head adds them, the same operations on the same numbers (the first ones of a
//! sequence may go there as a sum, since that is how they are added). A block's share is
//! consecutive, so only its first and its last sequence can be in want of a ticket, which costs some microseconds.

use super::decode::{
    self as split_kv, CacheOperand, EDGES, Finisher, Lengths, Total, add_chunks, first_visible, fit_operand, o_dim,
    pack, partial_floats, q_dim,
};
use super::soft_capped;
use crate::tensor_float::TensorFloat;
use core::f32::consts::LOG2_E;
use cuda_std::second_level::Policy;
use cuda_std::shared::Carver;
use cuda_std::tma::TensorMap;
use cuda_std::vec::{self, B32, B64, B128, SecondLevel};
use cuda_std::{
    DType, E4M3, E5M2, Global, GlobalMut, atomic, bf16, dependent_launch, entries, f16, float, integer, mbarrier, mma,
    thread, tma, unroll, warp,
};

/// Threads of a block: the consumers and the producers.
pub const fn threads(consumers: usize) -> usize {
    32 * (consumers + 2)
}
/// Descriptions of steps, from their copies until the consumers are done: more than the stages of any ring.
const RECORDS: u32 = 16;
/// Descriptions that the consumers give back together.
const HALF: u32 = RECORDS / 2;
/// Words of a description.
const WORDS: u32 = 16;
/// Tiles of Q in shared memory.
const Q_SLOTS: u32 = 2;
/// By how much (as an exponent of 2) a maximum may be exceeded.
const SLACK: f32 = 8.0;
/// Bytes of a line of a box.
pub const LINE: usize = 128;
/// Bytes of an atom of a box: 8 lines.
const ATOM: u32 = 8 * LINE as u32;

/// Of the words of a step's description: the flags, then the step's first key, the sequence's keys, and a bit for each box,
/// whether it is of no page.
const FLAGS: u32 = 0;
const SEQUENCE: u32 = 4;
/// The scales of K and V, then the KV head and its first row.
const SCALES: u32 = 8;

/// The first step of an item.
const FIRST: u32 = 1;
/// The last step of a chunk.
const CHUNK_END: u32 = 2;
/// The last step of an item.
const ITEM_END: u32 = 4;
/// The item is a whole sequence.
const WHOLE: u32 = 8;
/// The block's last step.
const LAST: u32 = 16;
/// The item begins a sequence of which others have the rest: its chunks are added as those of a whole sequence, and leave one partial
/// result.
const PREFIX: u32 = 32;
/// The step begins with keys that no query token of the sequence sees.
const UNSEEN: u32 = 64;
/// Where a ticket counts the chunks of the prefix: of longer sequences there is none.
const PREFIX_SHIFT: u32 = 16;
/// Keys of a unit of work, as a power of two, unless there are too many.
const UNIT_SHIFT: u32 = 6;

/// The usual `hint`: chunks as those of [`decode`](super::decode), but of 128 keys for sequences of 257 to 512.
pub const SHORT: u32 = 31;
/// The longest sequences of such chunks.
const SHORT_EDGE: u32 = 512;

/// The chunk of a sequence of `len` keys, as a power of two: `hint` if that is neither 0 nor [`SHORT`].
#[inline(always)]
const fn chunk_shift(len: u32, hint: u32) -> u32 {
    // Without branches: there is one warp to wait for them.
    let longer = (len > EDGES[0]) as u32 + (len > EDGES[1]) as u32;
    let short = (hint == SHORT && len > 256 && len <= SHORT_EDGE) as u32;
    if hint == 0 || hint == SHORT { 8 + longer - short } else { hint }
}

/// The most chunks of any sequence of at most `max_len` keys.
pub const fn max_chunks(max_len: u32, hint: u32) -> u32 {
    if hint != SHORT {
        return split_kv::max_chunks(max_len, hint);
    }
    let short = if max_len < SHORT_EDGE { max_len } else { SHORT_EDGE };
    let (short, long) = (short.div_ceil(1 << chunk_shift(short, hint)), split_kv::max_chunks(max_len, 0));
    if short > long { short } else { long }
}

/// Keys of a step.
pub const fn step_keys(consumers: usize, tall: usize) -> usize {
    16 * consumers * tall
}

/// Bytes from row to row of Q in shared memory: the padding keeps rows in different banks.
const fn q_row_bytes(head_dim: usize) -> usize {
    2 * head_dim + 16
}

/// Bytes from row to row of the probabilities, likewise.
const fn p_row_bytes(keys: usize) -> usize {
    2 * keys + 16
}

/// Dynamic shared memory of a block: heads of `head_dim` elements of `element` bytes, `rows` query rows (8 or 16), steps of
/// `keys` keys.
pub const fn shared_bytes(
    head_dim: usize,
    element: usize,
    rows: usize,
    consumers: usize,
    keys: usize,
    stages: usize,
) -> usize {
    let stage = 2 * keys * head_dim * element;
    let q = Q_SLOTS as usize * rows * q_row_bytes(head_dim);
    let p = 2 * rows * p_row_bytes(keys);
    let words = RECORDS * WORDS + 4 + (2 * consumers * (1 + rows)) as u32;
    stages * stage + q + p + 4 * words as usize + 8 * 4 * stages
}

/// How sequences of several chunks become items, as `decode` takes it.
pub mod split {
    /// By the lengths of the batch.
    pub const AUTO: u32 = 0;
    /// Evenly, whatever the borders of sequences.
    pub const CHUNKS: u32 = 1;
    /// All chunks of a sequence together.
    pub const WHOLE: u32 = 2;
}

/// A block's share of the work: one head, and from the first of some units of keys up to the last one.
#[derive(Clone, Copy)]
struct Share {
    /// Keys of a unit, as a power of two.
    unit: u32,
    /// Groups of blocks, and this block's.
    groups: u32,
    group: u32,
    /// The most sequences of a group, if they are not divided.
    rounds: u32,
    /// The most groups of which each sequence of the batch can have as many, or 0 if those are much fewer than there are.
    even: u32,
    from: u32,
    to: u32,
    head: u32,
    /// Whether sequences are not divided.
    whole: bool,
    /// Whether each group has a chunk at most: a chunk is a unit.
    single: bool,
}

/// Up to 32 sequences, each lane's one.
#[derive(Clone, Copy)]
struct Window {
    /// Keys, those of a chunk as a power of two, the first chunk that the sliding window leaves, how many it leaves, and their
    /// units.
    len: u32,
    shift: u32,
    first_chunk: u32,
    chunks: u32,
    units: u32,
}

impl Window {
    /// Of a sequence of `len` keys, if it is `there`.
    #[inline(always)]
    fn new(lengths: Lengths, unit: u32, len: u32, there: bool) -> Self {
        let len = len.min(lengths.max_len);
        let shift = chunk_shift(len, lengths.hint);
        // As `Lengths::visible_chunks`.
        let first_chunk = first_visible(len, lengths.q_len, lengths.window) >> shift;
        let chunks = ((len + ((1 << shift) - 1)) >> shift).max(1) - first_chunk;
        let units = Share::units(unit, len - (first_chunk << shift));
        Self { len, shift, first_chunk, chunks: if there { chunks } else { 0 }, units: if there { units } else { 0 } }
    }

    #[inline(always)]
    unsafe fn read(lengths: Lengths, unit: u32, base: u32) -> Self {
        let sequence = base + warp::lane_id();
        Self::new(lengths, unit, lengths.get(sequence), sequence < lengths.batch)
    }
}

impl Share {
    /// As many blocks as there are heads take the same keys at the same time, each those of its head: what they read are
    /// neighbours in memory. All units of the batch, in the order of its sequences, are dealt evenly to such groups of blocks.
    ///
    /// This much is known without the lengths.
    #[inline(always)]
    unsafe fn new(lengths: Lengths) -> Self {
        let Lengths { batch, heads, max_len, .. } = lengths;
        // The sum of all units must fit in 31 bits.
        let most = batch as u64 * (max_len as u64 + 1);
        let unit = (34 - most.leading_zeros().min(34)).max(UNIT_SHIFT);
        let (blocks, block) = (thread::grid_dim_x(), thread::block_idx_x());
        core::hint::assert_unchecked(heads != 0 && blocks != 0);
        let groups = (blocks / heads).max(1);
        core::hint::assert_unchecked(groups != 0);
        let (group, head) = (block / heads, block % heads);
        let even = groups - groups % batch.max(1);
        let even = if even * 16 >= groups * 15 { even } else { 0 };
        Self {
            unit,
            groups,
            group,
            rounds: batch.div_ceil(groups),
            even,
            from: 0,
            to: 0,
            head,
            whole: true,
            single: false,
        }
    }

    /// A group's borders, of `units` in `chunks`, no sequence having more than `longest` units.
    #[inline(always)]
    fn deal(&mut self, batch: u32, splitting: u32, units: u32, chunks: u32, longest: u32) {
        let Self { groups, group, rounds, even, .. } = *self;
        self.whole = match splitting {
            split::CHUNKS => false,
            split::WHOLE => true,
            // Partial results cost a few parts in a hundred of the bandwidth, and adding them up at the end as much as some
            // units.
            _ => (groups * rounds) as u64 * longest as u64 <= units as u64 + (units / 16 + 5 * groups) as u64,
        };
        // Blocks without work are the last ones, so that the others have multiprocessors of their own.
        let mut parts = groups.min(if self.whole { batch } else { chunks }).max(1);
        // Sequences of about the same length are cut alike: a border between two of them saves partial results and tickets.
        if !self.whole && even != 0 && longest as u64 * batch as u64 <= (units + units / 16) as u64 {
            parts = parts.min(even);
        }
        // Any borders would do that rise and end with the last unit.
        let each = units as f32 * float::fast::recip(parts as f32);
        let border = |part: u32| {
            // SAFETY: neither negative nor above the units by more than rounding, and those are below 2^31.
            let border: u32 = unsafe { (part.min(parts) as f32 * each).to_int_unchecked() };
            if part >= parts { units } else { border.min(units) }
        };
        (self.from, self.to) = (border(group), border(group + 1));
    }

    /// The units of a sequence that shows so many keys. One more is for what a sequence costs besides.
    #[inline(always)]
    fn units(unit: u32, keys: u32) -> u32 {
        ((keys + ((1 << unit) - 1)) >> unit) + 1
    }
}

/// Consecutive chunks of a head of a sequence.
#[derive(Clone, Copy)]
struct Item {
    sequence: u32,
    /// The sequence's keys.
    len: u32,
    head: u32,
    /// The first chunk's number among those that the sliding window leaves, and how many those are.
    part: u32,
    parts: u32,
    /// Whether there are no other chunks.
    whole: bool,
    /// Whether they are a sequence's first, there are others, and a ticket can tell how many they are.
    prefix: bool,
    /// The first step's first key, and where the last one ends.
    key: u32,
    end: u32,
    /// There is no item.
    over: bool,
}

/// As many of an item's next steps as the lanes of a warp can look up pages for.
#[derive(Clone, Copy)]
struct Run {
    item: Item,
    kv_head: u32,
    /// The first step's first key.
    key: u32,
    /// The page of this lane's box, of which a step has some.
    page: u32,
    /// Lanes 0 and 1: the scales of K and V.
    scale: f32,
}

/// A block's items, in their order.
struct Walk<const KEYS: u32> {
    share: Share,
    /// The first of the window's sequences, and the units before it.
    base: u32,
    before: u32,
    window: Window,
    /// Units up to this lane's sequence.
    sum: u32,
    /// From and up to which of the chunks of this lane's sequence are the block's.
    start: u32,
    stop: u32,
    /// Whether `window` is read, and its chunks have been dealt.
    read: bool,
    dealt: bool,
    /// Lanes whose sequences are yet to come.
    todo: u32,
    item: Item,
}

impl<const KEYS: u32> Walk<KEYS> {
    /// What is known without the lengths.
    #[inline(always)]
    unsafe fn new(lengths: Lengths) -> Self {
        let window = Window { len: 0, shift: 0, first_chunk: 0, chunks: 0, units: 0 };
        let item = Item {
            sequence: 0,
            len: 0,
            head: 0,
            part: 0,
            parts: 1,
            whole: true,
            prefix: false,
            key: 0,
            end: 0,
            over: false,
        };
        Self {
            share: Share::new(lengths),
            base: 0,
            before: 0,
            window,
            sum: 0,
            start: 0,
            stop: 0,
            read: false,
            dealt: false,
            todo: 0,
            item,
        }
    }

    /// Leads before the first item: [`next`](Self::next) goes there. For whole warps.
    #[inline(always)]
    unsafe fn begin(&mut self, lengths: Lengths, splitting: u32) {
        let Lengths { batch, .. } = lengths;
        let (unit, lane) = (self.share.unit, warp::lane_id());
        if batch <= 32 {
            self.window = Window::read(lengths, unit, 0);
            let units = warp::warp_reduce_add_u32(warp::FULL, self.window.units);
            let chunks = warp::warp_reduce_add_u32(warp::FULL, self.window.chunks);
            let longest = warp::warp_reduce_max_u32(warp::FULL, self.window.units);
            self.share.deal(batch, splitting, units, chunks, longest);
            let Share { whole, groups, group, .. } = self.share;
            if !whole && chunks <= groups {
                // Units would give two chunks to some of the groups, and none to others.
                self.share.single = true;
                self.window.units = self.window.chunks;
                (self.share.from, self.share.to) = (group.min(chunks), (group + 1).min(chunks));
            }
            self.sum = warp::scan(self.window.units, |a, b| a + b);
            self.read = true;
        } else {
            // A lane for the units of each 32 sequences: the last lane's are all that are left.
            let (mut units, mut chunks, mut longest) = (0u32, 0u32, 0u32);
            let mut base = 0;
            while base < batch {
                // Loads under conditions would wait for one another.
                let mut lens = [0i32; 8];
                unroll::<8>(|i| lens[i] = lengths.lens.get((base + 32 * i as u32 + lane).min(batch - 1)));
                unroll::<8>(|i| {
                    let first = base + 32 * i as u32;
                    let window = Window::new(lengths, unit, lens[i].max(0) as u32, first + lane < batch);
                    chunks += window.chunks;
                    longest = longest.max(window.units);
                    let sum = warp::warp_reduce_add_u32(warp::FULL, window.units);
                    units += if lane == (first / 32).min(31) { sum } else { 0 };
                });
                base += 256;
            }
            let sums = warp::scan(units, |a, b| a + b);
            let units = warp::shfl_idx(sums, 31);
            let chunks = warp::warp_reduce_add_u32(warp::FULL, chunks);
            let longest = warp::warp_reduce_max_u32(warp::FULL, longest);
            self.share.deal(batch, splitting, units, chunks, longest);
            // What lies before the share altogether need not be looked at.
            let before = warp::warp_vote_ballot(warp::FULL, sums <= self.share.from && lane < 31).trailing_ones();
            self.base = 32 * before;
            self.before = if before == 0 { 0 } else { warp::shfl_idx(sums, before - 1) };
        }
        self.item.over = self.share.from == self.share.to;
    }

    /// Deals the chunks of the window's sequences.
    #[inline(always)]
    unsafe fn look(&mut self) {
        let Share { unit, from, to, whole, single, .. } = self.share;
        let Window { shift, chunks, units, .. } = self.window;
        // A chunk belongs to the block that its first unit belongs to.
        let begin = self.before + self.sum - units;
        let bound = |border: u32| {
            let reach = border.saturating_sub(begin);
            let all = if reach != 0 { chunks } else { 0 };
            let some = chunks.min(((reach.min(units) << unit) + ((1 << shift) - 1)) >> shift);
            if whole {
                all
            } else if single {
                chunks.min(reach)
            } else {
                some
            }
        };
        (self.start, self.stop) = (bound(from), bound(to));
        self.todo = warp::warp_vote_ballot(warp::FULL, self.start < self.stop);
        self.dealt = true;
    }

    /// Does nothing behind the last item.
    #[inline(always)]
    unsafe fn next(&mut self, lengths: Lengths) {
        if self.item.over {
            return;
        }
        while self.todo == 0 {
            if self.dealt {
                self.before += warp::shfl_idx(self.sum, 31);
                self.base += 32;
                self.read = false;
                if self.base >= lengths.batch || self.before >= self.share.to {
                    // More heads than blocks.
                    self.share.head += thread::grid_dim_x();
                    if self.share.head >= lengths.heads {
                        self.item.over = true;
                        return;
                    }
                    (self.base, self.before) = (0, 0);
                }
            }
            if !self.read {
                self.window = Window::read(lengths, self.share.unit, self.base);
                self.sum = warp::scan(self.window.units, |a, b| a + b);
            }
            self.look();
        }
        let owner = self.todo.trailing_zeros();
        self.todo &= self.todo - 1;
        let (start, stop) = (warp::shfl_idx(self.start, owner), warp::shfl_idx(self.stop, owner));
        let parts = warp::shfl_idx(self.window.chunks, owner);
        let first_chunk = warp::shfl_idx(self.window.first_chunk, owner);
        let len = warp::shfl_idx(self.window.len, owner);
        let shift = warp::shfl_idx(self.window.shift, owner);
        let visible = first_visible(len, lengths.q_len, lengths.window);
        self.item = Item {
            sequence: self.base + owner,
            len,
            head: self.share.head,
            part: start,
            parts,
            whole: stop - start == parts,
            prefix: start == 0 && stop < parts && parts < 1 << PREFIX_SHIFT,
            key: ((first_chunk + start) << shift).max(visible & !(KEYS - 1)),
            end: ((first_chunk + stop) << shift).min(len),
            over: false,
        };
    }
}

/// As [`add_chunks`], eight dimensions of a row: what is done for the row is done once for both fours. Four chunks are fetched at a time, and not ahead: with
/// twice as many in registers each step of the consumers has over 50 instructions more.
#[inline(always)]
unsafe fn add_wide(
    slots: Global<f32>,
    slot_floats: usize,
    chunks: u32,
    stats_at: u32,
    values_at: [u32; 2],
) -> (Total, [[f32; 4]; 2]) {
    let mut total = Total { top: f32::NEG_INFINITY, sum: 0.0 };
    let (mut all, mut chunk) = ([[-0f32; 4]; 2], 0);
    loop {
        let (mut stats, mut values) = ([[0f32; 2]; 4], [[[0f32; 4]; 2]; 4]);
        unroll::<4>(|j| {
            // Beyond the last it is the last.
            let slot = slots.offset((chunk + j as u32).min(chunks - 1) as usize * slot_floats);
            B64(stats[j]) = slot.get_hinted::<B64<f32, 2>>(stats_at, SecondLevel);
            unroll::<2>(|i| B128(values[j][i]) = slot.get_hinted::<B128<f32, 4>>(values_at[i], SecondLevel));
        });
        unroll::<4>(|j| {
            if chunk + (j as u32) < chunks {
                let (old, new) = total.add(stats[j][0], stats[j][1]);
                unroll::<2>(|i| unroll::<4>(|e| all[i][e] = float::fma(all[i][e], old, values[j][i][e] * new)));
            }
        });
        chunk += 4;
        if chunk >= chunks {
            return (total, all);
        }
    }
}

/// Adds a step's values, times the probabilities, to a warp's columns `o`.
///
/// `p_at`: this lane's address for the probabilities; `v_at`: those for 32 bytes of columns each, less `stage`; `key`: the first
/// key of this lane in an operand. If `EDGE` the step has keys that nobody sees, which may hold anything: `key` is less the first key
/// that somebody sees, those before it being at the end of the numbers, and `keys` are those seen.
#[inline(always)]
unsafe fn multiply<
    C: CacheOperand,
    const D: usize,
    const TILES: usize,
    const CONSUMERS: usize,
    const KEYS: u32,
    const EDGE: bool,
>(
    o: &mut [[[f32; 4]; TILES]; 4],
    p_at: u32,
    stage: u32,
    v_at: [u32; 4],
    key: u32,
    keys: u32,
) {
    let tiles = const { D / 16 / CONSUMERS };
    let p_row = const { p_row_bytes(KEYS as usize) as u32 };
    // Keys 2t, 2t + 1 and 8 more of an operand's 16: NaN times 0 would be NaN.
    let there = |after: u32, bits: u32| if key.wrapping_add(after) < keys { bits } else { 0 };
    let pair = |after: u32| there(after, 0xffff) | there(after + 1, 0xffff_0000);
    // A single tile has two chains of products, so that one does not wait for the other.
    let single = const { TILES * D == 16 * CONSUMERS && size_of::<C>() == 2 };
    let mut odd = [0f32; 4];
    for two in 0..KEYS as usize / 32 {
        let mut p = [[0u32; 4]; TILES];
        unroll::<TILES>(|tile| p[tile] = mma::ldmatrix_x4(p_at + (tile * 8) as u32 * p_row + (64 * two) as u32));
        unroll::<2>(|half| {
            let group = (2 * two + half) as u32;
            let rows = stage + group * const { 2 * 8 * (D * size_of::<C>()) as u32 };
            let keep = if EDGE { [pair(16 * group), pair(16 * group + 8)] } else { [u32::MAX; 2] };
            let kept = |a: [u32; 4]| [a[0] & keep[0], a[1] & keep[0], a[2] & keep[1], a[3] & keep[1]];
            if const { size_of::<C>() == 2 } {
                for i in 0..tiles {
                    let a = kept(mma::ldmatrix_x4_trans(rows + v_at[i]));
                    unroll::<TILES>(|tile| {
                        let p = [p[tile][2 * half], p[tile][2 * half + 1]];
                        if single && half == 1 {
                            odd = <C::Operand>::mma(a, p, odd);
                        } else {
                            o[i][tile] = <C::Operand>::mma(a, p, o[i][tile]);
                        }
                    });
                }
            } else {
                for i in 0..tiles / 2 {
                    let w = mma::ldmatrix_x4_trans(rows + v_at[i]);
                    unroll::<2>(|side| {
                        // Two keys of two dimensions in each word, brought together by dimension.
                        let pairs = |w: u32| C::operands(integer::permute(w, 0, 0x3120));
                        let (low, high) = (pairs(w[2 * side]), pairs(w[2 * side + 1]));
                        let a = kept([low[0], low[1], high[0], high[1]]);
                        let i = 2 * i + side;
                        unroll::<TILES>(|tile| {
                            let p = [p[tile][2 * half], p[tile][2 * half + 1]];
                            o[i][tile] = <C::Operand>::mma(a, p, o[i][tile]);
                        });
                    });
                }
            }
        });
    }
    if single {
        unroll::<4>(|e| o[0][0][e] += odd[e]);
    }
}

/// Arguments as for [`decode`](super::decode::decode), except:
///
/// * `k_map`, `v_map`: of five dimensions: [`LINE`] bytes, 8 keys, lines of the heads, groups of 8 keys of the page, pages; boxes of
///   a head's lines and `min(page, step)` keys. `k_head`, `v_head`: lines from head to head.
/// * `q`'s vectors start at multiples of 16 bytes. `page` is a power of two from 8 on.
/// * `tickets`: a zero for each head of each sequence, [`partial_floats`]' and `partial`'s pairs; zeros again afterwards.
/// * `hint` is 0, [`SHORT`] or no smaller than a step; `splitting`: how sequences become items, a constant of [`split`].
///
/// `D` is the head size, a row of the cache a multiple of [`LINE`]; a step has `KEYS`, `16 * TALL` a consumer. `WIDE`: chunks are added up eight
/// dimensions a thread, not four; that is for more of them than threads. The first chunks of a divided sequence are then one partial
/// result.
/// Block: [`threads`]; any grid; shared memory: [`shared_bytes`].
#[inline(always)]
pub unsafe fn decode<
    T: TensorFloat,
    C: CacheOperand,
    const D: usize,
    const TILES: usize,
    const CONSUMERS: usize,
    const TALL: usize,
    const KEYS: u32,
    const STAGES: u32,
    const WIDE: bool,
>(
    out: *mut T,
    lse: *mut f32,
    q: *const T,
    k_map: *const TensorMap,
    v_map: *const TensorMap,
    block_table: *const i32,
    lens: *const i32,
    alibi: *const f32,
    sinks: *const f32,
    k_scales: *const f32,
    v_scales: *const f32,
    partial: *mut f32,
    tickets: *mut u32,
    scale_per_head: u32,
    batch: u32,
    q_len: u32,
    q_heads: u32,
    kv_heads: u32,
    page_shift: u32,
    max_pages: u32,
    pages: u32,
    partial_chunks: u32,
    hint: u32,
    splitting: u32,
    q_token: usize,
    q_head: usize,
    out_token: usize,
    out_head: usize,
    k_head: u32,
    v_head: u32,
    scale: f32,
    soft_cap: f32,
    window: u32,
) {
    const { assert!(KEYS as usize == step_keys(CONSUMERS, TALL)) };
    let element = const { size_of::<C>() };
    // Lines of a row; bytes of eight rows and of a step.
    let columns = const { (D * size_of::<C>() / LINE) as u32 };
    let group_bytes = const { 8 * (D * size_of::<C>()) as u32 };
    let kv_bytes = const { KEYS * (D * size_of::<C>()) as u32 };
    let head_dim = const { D as u32 };
    let block_rows = const { 8 * TILES as u32 };
    let (q_row, p_row) = const { (q_row_bytes(D) as u32, p_row_bytes(KEYS as usize) as u32) };
    let converts = const { !matches!((T::DTYPE, C::DTYPE), (DType::Bf16, DType::Bf16) | (DType::F16, _)) };

    core::hint::assert_unchecked(kv_heads != 0);
    let group = q_heads / kv_heads;
    core::hint::assert_unchecked(group != 0);
    let all_rows = group * q_len;
    let row_blocks = all_rows.div_ceil(block_rows);
    core::hint::assert_unchecked(row_blocks != 0);
    let slot_rows = all_rows.min(block_rows);
    let heads = kv_heads * row_blocks;
    let max_len = max_pages << page_shift;
    let lengths = Lengths { lens: Global::new(lens), max_len, batch, q_len, heads, window, hint };

    let mut carver = Carver::new();
    let k_ring = carver.take_aligned::<C>(STAGES as usize * KEYS as usize * D, 1024);
    let v_ring = carver.take_aligned::<C>(STAGES as usize * KEYS as usize * D, 1024);
    let q_slots = carver.take::<u8>(const { Q_SLOTS as usize * 8 * TILES * q_row_bytes(D) });
    let p_slots = carver.take::<u8>(const { 2 * 8 * TILES * p_row_bytes(KEYS as usize) });
    let records = carver.take::<u32>(const { (RECORDS * WORDS) as usize });
    // Whether a warp wants other maxima, in steps of even and of odd number; maxima and sums of its keys.
    let votes = carver.take::<u32>(const { 2 * CONSUMERS });
    // The first partial result that this block adds, plus 1, or 0; whether the block has no work.
    let adds = carver.take::<u32>(4);
    let tops = carver.take::<f32>(const { CONSUMERS * 8 * TILES });
    let own_sums = carver.take::<f32>(const { CONSUMERS * 8 * TILES });
    let barriers = carver.take::<u64>(const { 4 * STAGES as usize });
    let (k0, v0) = (k_ring.address(0u32), v_ring.address(0u32));
    let barrier0 = barriers.address(0u32);
    let k_full = |slot: u32| barrier0 + 8 * slot;
    let k_empty = |slot: u32| barrier0 + 8 * (STAGES + slot);
    let v_full = |slot: u32| barrier0 + 8 * (2 * STAGES + slot);
    let v_empty = |slot: u32| barrier0 + 8 * (3 * STAGES + slot);
    // Named barriers of the consumers and of the producer that waits for room: all lanes have read there.
    let q_empty = |slot: u32| 2 + slot;
    let records_empty = |half: u32| 2 + Q_SLOTS + half;
    let with_producer = const { 32 * (CONSUMERS as u32 + 1) };

    let (tid, lane) = (thread::thread_idx_x(), warp::lane_id());
    let warp_id = warp::shfl_idx(tid / 32, 0);
    let (g, t) = (lane / 4, lane % 4);

    if tid == 0 {
        for slot in 0..STAGES {
            mbarrier::init(k_full(slot), 1);
            mbarrier::init(v_full(slot), 1);
            mbarrier::init(k_empty(slot), 1);
            mbarrier::init(v_empty(slot), 1);
        }
        mbarrier::fence_init();
        tma::prefetch_map(k_map);
        tma::prefetch_map(v_map);
        // What is needed soon: the first access to a page of memory takes long.
        vec::prefetch_l2(lens);
        vec::prefetch_l2(block_table);
        vec::prefetch_l2(q);
        vec::prefetch_l2(partial.cast_const());
        vec::prefetch_l2(out.cast_const());
    }
    // Of the first warp and the producers: the barriers in shared memory may be used. Of the consumers and the producer of K: it is
    // known whether there is work. Two, since all that wait at a named barrier must do so at one place in the code.
    let ready = const { 2 + Q_SLOTS + 2 };
    let known = const { 2 + Q_SLOTS + 3 };
    let first_and_producers = const { 32 * (1 + 2) };
    let box_shift = page_shift.min(const { KEYS.ilog2() });
    let box_keys = 1u32 << box_shift;

    if warp_id >= CONSUMERS as u32 {
        let brings_k = warp_id == CONSUMERS as u32;
        let (q, table) = (Global::new(q), Global::new(block_table));
        let has_scale = if lane == 0 { !k_scales.is_null() } else { !v_scales.is_null() };
        let scales = Global::new(if lane == 0 { k_scales } else { v_scales });
        let boxes_shift = const { KEYS.ilog2() } - box_shift;
        let boxes = 1u32 << boxes_shift;
        let mut walk = Walk::<KEYS>::new(lengths);
        // What was launched before may still be running until here, and what comes next may begin to wait for this.
        dependent_launch::launch_dependents();
        dependent_launch::wait();
        walk.begin(lengths, splitting);
        let (mut run_key, none) = (0, walk.item);

        // The next run: its page numbers are fetched, which nobody waits for before its turn.
        let mut look = || {
            run_key += 32 << box_shift;
            if run_key >= walk.item.end {
                walk.next(lengths);
                run_key = walk.item.key;
            }
            let item = walk.item;
            let key = run_key + (lane << box_shift);
            let visible = first_visible(item.len, q_len, window);
            // Nothing is done with the number yet: it would have to be waited for.
            let page = if !item.over && key < item.end && key + box_keys > visible {
                table.get(item.sequence as usize * max_pages as usize + (key >> page_shift) as usize) as u32
            } else {
                u32::MAX
            };
            let kv_head = if row_blocks == 1 { item.head } else { item.head / row_blocks };
            let scale = if brings_k && lane < 2 && has_scale && !item.over {
                scales.get(kv_head * scale_per_head)
            } else {
                1.0
            };
            Run { item, kv_head, key: run_key, page, scale }
        };
        // One place in the code to look from: it is long, and what is run once for each place would come from far.
        let (mut coming, mut begun) = (Run { item: none, kv_head: 0, key: 0, page: 0, scale: 1.0 }, false);
        let (mut step, mut slot, mut parity, mut items) = (0u32, 0u32, 1u32, 0u32);
        loop {
            let Run { item, kv_head, key: first_key, page: own_page, scale } = coming;
            coming = look();
            if !begun {
                begun = true;
                // Only now: no sequence or chunk may begin in a share, though it has units.
                if brings_k {
                    if lane == 0 {
                        adds.set(1u32, coming.item.over as u32);
                    }
                    thread::arrive_named(known, with_producer);
                }
                thread::sync_named(ready, first_and_producers);
                if coming.item.over {
                    return;
                }
                continue;
            }
            let Item { sequence, len, head, .. } = item;
            let first_row = (head - kv_head * row_blocks) * block_rows;
            let rows = (all_rows - first_row).min(block_rows);
            let chunk_mask = (1u32 << chunk_shift(len, hint)) - 1;
            let mut key = first_key;
            loop {
                let (full, empty) =
                    if brings_k { (k_full(slot), k_empty(slot)) } else { (v_full(slot), v_empty(slot)) };
                let first = key == item.key;
                let next_key = key + KEYS;
                let item_end = next_key >= item.end;
                let page = warp::shfl_idx(own_page, (((key - first_key) >> box_shift) + lane) % 32);
                let q_slot = items % Q_SLOTS;
                if brings_k {
                    if step >= RECORDS && step.is_multiple_of(HALF) {
                        thread::sync_named(records_empty(step / HALF % 2), with_producer);
                    }
                    if first {
                        if items >= Q_SLOTS {
                            thread::sync_named(q_empty(q_slot), with_producer);
                        }
                        items += 1;
                    }
                    // Only keys that somebody wants are missed.
                    let own = key + (lane << box_shift);
                    let visible = first_visible(len, q_len, window);
                    let missing = own < item.end && own + box_keys > visible && lane < boxes && page >= pages;
                    let wrong = warp::warp_vote_ballot(warp::FULL, missing);
                    let record = records.offset(step % RECORDS * WORDS);
                    let v_scale = warp::shfl_idx(scale, 1);
                    // All by the lane that arrives.
                    if lane == 0 {
                        let flag = |on: bool, flag: u32| if on { flag } else { 0 };
                        let flags = flag(first, FIRST)
                            | flag(item_end || next_key & chunk_mask == 0, CHUNK_END)
                            | flag(item_end, ITEM_END)
                            | flag(item.whole, WHOLE)
                            | flag(WIDE && item.prefix, PREFIX)
                            | flag(key < visible, UNSEEN)
                            | flag(item_end && coming.item.over, LAST);
                        record.set_as(FLAGS, B128([flags, key, len, wrong]));
                        record.set_as(SEQUENCE, B128([sequence, head, item.part, item.parts]));
                        record.set_as(SCALES, B128([scale.to_bits(), v_scale.to_bits(), kv_head, first_row]));
                    }
                }
                mbarrier::wait_parity(empty, parity);
                if lane == 0 {
                    let q_bytes = if brings_k && first { rows * (head_dim * 2) } else { 0 };
                    mbarrier::arrive_expect_tx(full, kv_bytes + q_bytes);
                }
                warp::sync_warp(warp::FULL);
                if lane < boxes {
                    let page = if page < pages { page as i32 } else { -1 };
                    let group = ((key + (lane << box_shift)) & ((1 << page_shift) - 1)) / 8;
                    let (map, ring0, head) = if brings_k { (k_map, k0, k_head) } else { (v_map, v0, v_head) };
                    let to = ring0 + slot * kv_bytes + (lane << box_shift) * (columns * LINE as u32);
                    // Partial results stay in the second-level cache longer than what is read once.
                    tma::load_tensor_for::<5>(
                        to,
                        map,
                        [0, 0, (kv_head * head) as i32, group as i32, page],
                        full,
                        Policy::FIRST,
                    );
                }
                if brings_k && first && lane < rows {
                    let r = first_row + lane;
                    let token = if q_len == 1 { 0 } else { r / group };
                    let head = kv_head * group + (r - token * group);
                    let at = (sequence as usize * q_len as usize + token as usize) * q_token + head as usize * q_head;
                    let to = q_slots.address((q_slot * block_rows + lane) * q_row);
                    tma::copy_bulk(to, q.ptr(at), head_dim * 2, full);
                }
                step += 1;
                slot += 1;
                (slot, parity) = if slot == STAGES { (0, parity ^ 1) } else { (slot, parity) };
                key = next_key;
                if key >= item.end || key - first_key >= 32 << box_shift {
                    break;
                }
            }
            if key >= item.end && coming.item.over {
                break;
            }
        }
        return;
    }

    if warp_id == 0 {
        thread::arrive_named(ready, first_and_producers);
    }
    dependent_launch::launch_dependents();
    dependent_launch::wait();
    thread::sync_named(known, with_producer);
    if warp::shfl_idx(adds.get(1u32), 0) != 0 {
        return;
    }

    let (has_alibi, has_sinks, has_lse) = (!alibi.is_null(), !sinks.is_null(), !lse.is_null());
    let (alibi, sinks) = (Global::new(alibi), Global::new(sinks));
    let (out, lse) = (GlobalMut::new(out), GlobalMut::new(lse));
    let partial = GlobalMut::new(partial);

    // 16-dimension tiles of Oᵀ of this warp, and their first.
    let tiles = const { D / 16 / CONSUMERS };
    let first_tile = warp_id as usize * tiles;
    // Operands: where this lane's rows of K and V lie in a stage. The exclusive or changes three bits only.
    let k_lane = k0 + (warp_id * (2 * TALL as u32) + lane / 8 % 2) * group_bytes + lane % 8 * LINE as u32;
    let k_piece = (lane / 16) ^ (lane % 8);
    let (v_group, v_piece) = if element == 2 { (lane / 16, lane / 8 % 2) } else { (lane / 8 % 2, lane / 16) };
    let v_lane = v0 + v_group * group_bytes + lane % 8 * LINE as u32;
    let v_piece = v_piece ^ (lane % 8);
    // Of 32 bytes of a row, the `s`-th.
    let piece_at = |piece: u32, s: usize| (piece ^ (2 * (s % 4) as u32)) * 16 + (s / 4) as u32 * ATOM;
    let mut v_at = [0u32; 4];
    for i in 0..D * element / 32 / CONSUMERS {
        v_at[i] = v_lane + piece_at(v_piece, warp_id as usize * (D * element / 32 / CONSUMERS) + i);
    }
    // Probabilities: where this lane's go, and its rows as an operand.
    let p_to = g * p_row + (warp_id * (16 * TALL as u32) + 2 * t) * 2;
    let p_from = lane % 8 * p_row + lane / 8 * 16;
    let p0 = p_slots.address(0u32);

    let finisher = Finisher { out, lse, sinks, has_lse, has_sinks, q_len, q_heads, group, out_token, out_head };
    let slot_floats = partial_floats(head_dim as usize, slot_rows as usize);

    let mut qf = [[[0u32; 2]; 16]; TILES];
    let mut factor = [[0f32; 2]; TILES];
    let (mut k_scale, mut v_scale) = (1f32, 1f32);
    let mut m = [[f32::NEG_INFINITY; 2]; TILES];
    // Sums of the probabilities of this thread's keys.
    let mut l = [[0f32; 2]; TILES];
    let mut o = [[[0f32; 4]; TILES]; 4];
    let mut total = [[Total { top: f32::NEG_INFINITY, sum: 0.0 }; 2]; TILES];
    // −0 plus anything is just that: a prefix that is added again has the same bits.
    let zero = if WIDE { -0f32 } else { 0.0 };
    let mut all = [[[zero; 4]; TILES]; 4];
    let (mut sequence, mut kv_head, mut first_row, mut pair) = (0u32, 0u32, 0u32, 0u32);
    // The chunk's number and how many there are; the chunks that this item has put into memory.
    let (mut part, mut parts, mut stored) = (0u32, 1u32, 0u32);
    let (mut step, mut slot, mut parity, mut items) = (0u32, 0u32, 0u32, 0u32);
    // Whether it is a chunk's first step, for which there are no maxima yet.
    let mut fresh = true;
    loop {
        let record = records.offset(step % RECORDS * WORDS);
        mbarrier::wait_parity(k_full(slot), parity);
        let B128([flags, key, len, wrong]) = record.get_as::<B128<u32, 4>>(FLAGS);
        let flags = warp::shfl_idx(flags, 0);
        if flags & FIRST != 0 {
            let B128([of_sequence, head, of_part, of_parts]) = record.get_as::<B128<u32, 4>>(SEQUENCE);
            let B128([k_bits, v_bits, of_kv_head, of_first_row]) = record.get_as::<B128<u32, 4>>(SCALES);
            (sequence, part, parts, stored) = (of_sequence, of_part, of_parts, 0);
            (kv_head, first_row) = (of_kv_head, of_first_row);
            pair = sequence * heads + head;
            (k_scale, v_scale) = (f32::from_bits(k_bits), f32::from_bits(v_bits));
            let rows = q_slots.offset(items % Q_SLOTS * block_rows * q_row);
            unroll::<TILES>(|tile| {
                let r = tile as u32 * 8 + g;
                for s in 0..D / 16 {
                    unroll::<2>(|half| {
                        let d = q_dim(element, s, half, t as usize) as u32;
                        // What lies beyond the rows is not Q.
                        let inside = first_row + r < all_rows;
                        let B32([word]) = if inside { rows.get_as::<B32<u32, 1>>(r * q_row + 2 * d) } else { B32([0]) };
                        qf[tile][s][half] = word;
                    });
                }
                let undo = if converts { fit_operand::<T, C, D>(&mut qf[tile]) } else { 1.0 };
                unroll::<2>(|c| {
                    let undo = if converts { warp::shfl_idx(undo, (2 * t + c as u32) * 4) } else { 1.0 };
                    factor[tile][c] = scale * k_scale * undo;
                });
            });
            items += 1;
        }

        // Scores. A single tile has two chains of products, so that one does not wait for the other.
        let chains = const { if TILES * TALL == 1 { 2 } else { 1 } };
        let mut s = [[[[0f32; 4]; 2]; TILES]; TALL];
        unroll::<TALL>(|tall| {
            let from = k_lane + slot * kv_bytes + tall as u32 * (2 * group_bytes);
            if element == 2 {
                for step in 0..D / 16 {
                    let a = mma::ldmatrix_x4(from + piece_at(k_piece, step));
                    unroll::<TILES>(|tile| {
                        let chain = step % chains;
                        s[tall][tile][chain] = <C::Operand>::mma(a, qf[tile][step], s[tall][tile][chain]);
                    });
                }
            } else {
                for step in 0..D / 32 {
                    let w = mma::ldmatrix_x4(from + piece_at(k_piece, step));
                    unroll::<2>(|half| {
                        let (low, high) = (C::operands(w[2 * half]), C::operands(w[2 * half + 1]));
                        let a = [low[0], high[0], low[1], high[1]];
                        unroll::<TILES>(|tile| {
                            let chain = half % chains;
                            s[tall][tile][chain] =
                                <C::Operand>::mma(a, qf[tile][2 * step + half], s[tall][tile][chain]);
                        });
                    });
                }
            }
        });

        let mut x = [[[0f32; 4]; TILES]; TALL];
        // Whether all rows see the same keys: all of them.
        let simple = wrong == 0 && q_len == 1 && window == 0 && !has_alibi;
        unroll::<TALL>(|tall| {
            let first_key = key + (warp_id * TALL as u32 + tall as u32) * 16;
            // Whether every row sees all of the keys.
            let clear = wrong == 0
                && first_key + 16 + q_len <= len + 1
                && (window == 0 || first_key + window >= len)
                && !has_alibi;
            unroll::<TILES>(|tile| {
                let x = &mut x[tall][tile];
                unroll::<4>(|e| {
                    let s = s[tall][tile];
                    let sum = if chains == 1 { s[0][e] } else { s[0][e] + s[1][e] };
                    x[e] = sum * if converts { factor[tile][e % 2] } else { scale * k_scale };
                });
                if soft_cap > 0.0 {
                    unroll::<4>(|e| x[e] = soft_capped(x[e], soft_cap));
                }
                unroll::<4>(|e| x[e] *= LOG2_E);
                if clear {
                } else if simple {
                    // Rows beyond the last are nobody's.
                    unroll::<4>(|e| {
                        if first_key + g + 8 * (e as u32 / 2) >= len {
                            x[e] = f32::NEG_INFINITY;
                        }
                    });
                } else {
                    unroll::<2>(|c| {
                        let r = first_row + tile as u32 * 8 + 2 * t + c as u32;
                        // How many keys the row sees: not kept, since it is seldom asked for.
                        let token = if q_len == 1 { 0 } else { r / group };
                        let position = if r < all_rows { (len + token + 1).saturating_sub(q_len) } else { 0 };
                        let slope = if has_alibi && r < all_rows {
                            alibi.get(kv_head * group + (r - token * group)) * LOG2_E
                        } else {
                            0.0
                        };
                        unroll::<2>(|h| {
                            let (e, key) = (2 * h + c, first_key + g + 8 * h as u32);
                            let seen = wrong >> ((key % KEYS) >> box_shift) & 1 == 0
                                && key < position
                                && (window == 0 || key + window >= position);
                            let bias = if has_alibi { slope * (key as i32 + 1 - position as i32) as f32 } else { 0.0 };
                            x[e] = if seen { x[e] + bias } else { f32::NEG_INFINITY };
                        });
                    });
                }
            });
        });

        // Probabilities relative to the maxima so far go to shared memory; perhaps in vain.
        let p_slot = p0 + step % 2 * const { (8 * TILES) as u32 * p_row_bytes(KEYS as usize) as u32 };
        let probabilities = |m: &[[f32; 2]; TILES]| {
            let mut sums = [[0f32; 2]; TILES];
            unroll::<TILES>(|tile| {
                // Nothing seen yet: any finite reference will do.
                let reference = |c: usize| if m[tile][c] == f32::NEG_INFINITY { 0.0 } else { m[tile][c] };
                let reference = [reference(0), reference(1)];
                unroll::<TALL>(|tall| {
                    unroll::<2>(|half| {
                        let p = |c: usize| float::fast::exp2(x[tall][tile][2 * half + c] - reference[c]);
                        let p = [p(0), p(1)];
                        unroll::<2>(|c| sums[tile][c] += p[c]);
                        let word = mma::movmatrix_trans(pack::<C::Operand>(p[0], p[1]));
                        let to = p_to + (tile * 8) as u32 * p_row + (32 * tall + 16 * half) as u32;
                        p_slots.set_as(step % 2 * (8 * TILES as u32 * p_row) + to, B32([word]));
                    });
                });
            });
            sums
        };
        let share_tops = || {
            unroll::<TILES>(|tile| {
                unroll::<2>(|c| {
                    let mut top = f32::NEG_INFINITY;
                    unroll::<TALL>(|tall| {
                        top = float::max(top, float::max(x[tall][tile][c], x[tall][tile][c + 2]));
                    });
                    unroll::<3>(|i| top = float::max(top, warp::shfl_xor(top, 4 << i)));
                    if g == 0 {
                        tops.set(warp_id * block_rows + tile as u32 * 8 + 2 * t + c as u32, top);
                    }
                });
            });
        };
        let mut sums = [[0f32; 2]; TILES];
        if fresh {
            share_tops();
        } else {
            let mut more = false;
            unroll::<TILES>(|tile| {
                unroll::<TALL>(|tall| unroll::<4>(|e| more |= x[tall][tile][e] > m[tile][e % 2] + SLACK));
            });
            let more = warp::warp_vote_any(warp::FULL, more);
            if lane == 0 {
                votes.set(step % 2 * CONSUMERS as u32 + warp_id, more as u32);
            }
            sums = probabilities(&m);
        }
        thread::sync_named(1, const { 32 * CONSUMERS as u32 });
        // Behind the barrier all words of K and Q have been used, and those of V in the step before: the copy engine may have
        // their places. Arriving where the loads are issued would not do, since they are not over by then.
        if tid == 0 {
            mbarrier::arrive(k_empty(slot));
            if step > 0 {
                mbarrier::arrive(v_empty(if slot == 0 { STAGES - 1 } else { slot - 1 }));
            }
        }
        if flags & FIRST != 0 {
            thread::arrive_named(q_empty((items - 1) % Q_SLOTS), with_producer);
        }
        if step % HALF == HALF - 1 {
            thread::arrive_named(records_empty(step / HALF % 2), with_producer);
        }
        let vote = || votes.get(step % 2 * CONSUMERS as u32 + lane % CONSUMERS as u32) != 0;
        if fresh || warp::warp_vote_any(warp::FULL, vote()) {
            if !fresh {
                share_tops();
                thread::sync_named(1, const { 32 * CONSUMERS as u32 });
            }
            unroll::<TILES>(|tile| {
                unroll::<2>(|c| {
                    let (old, mut top) = (m[tile][c], f32::NEG_INFINITY);
                    unroll::<CONSUMERS>(|w| {
                        let at = w as u32 * block_rows + tile as u32 * 8 + 2 * t + c as u32;
                        top = float::max(top, tops.get(at));
                    });
                    // Only rows that need it: a row's rounding is no business of the other rows.
                    let new = if top > old + SLACK { top } else { old };
                    let reference = if new == f32::NEG_INFINITY { 0.0 } else { new };
                    let rescale = float::fast::exp2(old - reference);
                    m[tile][c] = new;
                    l[tile][c] *= rescale;
                    unroll::<2>(|h| {
                        for i in 0..tiles {
                            o[i][tile][c + 2 * h] *= rescale;
                        }
                    });
                });
            });
            sums = probabilities(&m);
            thread::sync_named(1, const { 32 * CONSUMERS as u32 });
        }
        unroll::<TILES>(|tile| unroll::<2>(|c| l[tile][c] += sums[tile][c]));
        fresh = flags & CHUNK_END != 0;
        if fresh {
            unroll::<TILES>(|tile| {
                unroll::<2>(|c| {
                    unroll::<3>(|i| l[tile][c] += warp::shfl_xor(l[tile][c], 4 << i));
                    if g == 0 {
                        own_sums.set(warp_id * block_rows + tile as u32 * 8 + 2 * t + c as u32, l[tile][c]);
                    }
                });
            });
        }

        // This warp's columns of V, all keys.
        mbarrier::wait_parity(v_full(slot), parity);
        let beyond = len.wrapping_sub(key);
        let tail = beyond < KEYS && beyond % box_keys != 0;
        // No branch between the two: it would lead the usual way around the other.
        #[allow(clippy::needless_bitwise_bool)]
        let edge = tail | (flags & UNSEEN != 0);
        if edge {
            let start = first_visible(len, q_len, window);
            multiply::<C, D, TILES, CONSUMERS, KEYS, true>(
                &mut o,
                p_slot + p_from,
                slot * kv_bytes,
                v_at,
                (key + 2 * t).wrapping_sub(start),
                len - start,
            );
        } else {
            multiply::<C, D, TILES, CONSUMERS, KEYS, false>(&mut o, p_slot + p_from, slot * kv_bytes, v_at, 0, 0);
        }
        step += 1;
        slot += 1;
        (slot, parity) = if slot == STAGES { (0, parity ^ 1) } else { (slot, parity) };

        if fresh {
            (part, stored) = (part + 1, stored + 1);
            thread::sync_named(1, const { 32 * CONSUMERS as u32 });
            unroll::<TILES>(|tile| {
                unroll::<2>(|c| {
                    let mut sum = 0f32;
                    unroll::<CONSUMERS>(|w| {
                        sum += own_sums.get(w as u32 * block_rows + tile as u32 * 8 + 2 * t + c as u32);
                    });
                    let (old, new) = total[tile][c].add(m[tile][c], sum);
                    for i in 0..tiles {
                        unroll::<2>(|h| {
                            let e = c + 2 * h;
                            all[i][tile][e] = float::fma(all[i][tile][e], old, o[i][tile][e] * v_scale * new);
                        });
                    }
                });
                m[tile] = [f32::NEG_INFINITY; 2];
                l[tile] = [0.0; 2];
                unroll::<4>(|i| o[i][tile] = [0.0; 4]);
            });
        }
        let whole = flags & WHOLE != 0;
        let joined = if WIDE { flags & (WHOLE | PREFIX) != 0 } else { whole };
        if flags & (if joined { ITEM_END } else { CHUNK_END }) == 0 {
            continue;
        }
        // One thread of all that have parts of a row.
        let speaks = warp_id == 0 && g == 0;
        let d = |i: usize, h: usize| o_dim(element, first_tile + i, h, g as usize) as u32;
        if whole {
            unroll::<TILES>(|tile| {
                // Both rows' at once: what there is to wait for is waited for once.
                let mut to = [(0f32, out); 2];
                unroll::<2>(|c| {
                    let r = first_row + tile as u32 * 8 + 2 * t + c as u32;
                    let Total { top, sum } = total[tile][c];
                    to[c] = finisher.row(sequence, kv_head, r.min(all_rows - 1), top, sum, speaks && r < all_rows);
                });
                unroll::<2>(|c| {
                    let (weight, to) = to[c];
                    if first_row + tile as u32 * 8 + 2 * t + (c as u32) < all_rows {
                        for i in 0..tiles {
                            unroll::<2>(|h| to.set(d(i, h), T::from_f32(all[i][tile][c + 2 * h] * weight)));
                        }
                    }
                });
            });
        } else {
            let slot = partial.offset((pair as usize * partial_chunks as usize + part as usize - 1) * slot_floats);
            unroll::<TILES>(|tile| {
                unroll::<2>(|c| {
                    let r = tile as u32 * 8 + 2 * t + c as u32;
                    if first_row + r < all_rows {
                        for i in 0..tiles {
                            unroll::<2>(|h| slot.set(r * head_dim + d(i, h), all[i][tile][c + 2 * h]));
                        }
                        if speaks {
                            let Total { top, sum } = total[tile][c];
                            slot.set_as(slot_rows * head_dim + 2 * r, B64::<f32, 2>([top, sum]));
                        }
                    }
                });
            });
        }
        unroll::<TILES>(|tile| {
            total[tile] = [Total { top: f32::NEG_INFINITY, sum: 0.0 }; 2];
            unroll::<4>(|i| all[i][tile] = [zero; 4]);
        });
        if flags & ITEM_END == 0 {
            continue;
        }
        if !whole {
            // The block that comes last has all chunks' results before it, and leaves the tickets as they were.
            thread::sync_named(1, const { 32 * CONSUMERS as u32 });
            if tid == 0 {
                let ticket = tickets.wrapping_add(pair as usize);
                let counts = if WIDE && flags & PREFIX != 0 { stored + (stored << PREFIX_SHIFT) } else { stored };
                let counts = counts + atomic::fetch_add(ticket, counts, atomic::Device, atomic::AcqRel);
                let (count, prefix) = if WIDE && parts < 1 << PREFIX_SHIFT {
                    (counts % (1 << PREFIX_SHIFT), counts >> PREFIX_SHIFT)
                } else {
                    (counts, 1)
                };
                let last = count == parts;
                if last {
                    atomic::exchange_u32(ticket, 0);
                }
                adds.set(0u32, if last { prefix } else { 0 });
            }
            thread::sync_named(1, const { 32 * CONSUMERS as u32 });
            let prefix = warp::shfl_idx(adds.get(0u32), 0);
            if prefix != 0 {
                let begin = if WIDE { prefix - 1 } else { 0 };
                let parts = parts - begin;
                let rows = (all_rows - first_row).min(block_rows);
                let quads = const { D as u32 / 4 };
                let slots = partial.offset((pair as usize * partial_chunks as usize + begin as usize) * slot_floats);
                let slots = Global::new(slots.ptr(0u32).cast_const());
                if WIDE {
                    let mut e = tid;
                    while e < rows * (quads / 2) {
                        let (r, d) = (e / (quads / 2), e % (quads / 2) * 4);
                        let values_at = [r * head_dim + d, r * head_dim + d + 2 * quads];
                        let (Total { top, sum }, values) =
                            add_wide(slots, slot_floats, parts, slot_rows * head_dim + 2 * r, values_at);
                        let (weight, to) = finisher.row(sequence, kv_head, first_row + r, top, sum, d == 0);
                        unroll::<2>(|i| {
                            to.set_as(d + 2 * quads * i as u32, B64::<T, 4>::from_f32(values[i].map(|v| v * weight)));
                        });
                        e += const { 32 * CONSUMERS as u32 };
                    }
                } else {
                    let mut e = tid;
                    while e < rows * quads {
                        let (r, d) = (e / quads, e % quads * 4);
                        let at = (slot_rows * head_dim + 2 * r, r * head_dim + d);
                        let (Total { top, sum }, value) = add_chunks::<4, true>(slots, slot_floats, parts, at);
                        finisher.finish(sequence, kv_head, first_row + r, d, top, sum, value);
                        e += const { 32 * CONSUMERS as u32 };
                    }
                }
            }
        }
        if flags & LAST != 0 {
            break;
        }
    }
}

entries! {
    /// Arguments of every `decode_tma_*` entry; see [`decode`].
    pub struct Args<T>(
        out: *mut T, lse: *mut f32, q: *const T, k_map: TensorMap, v_map: TensorMap, block_table: *const i32,
        lens: *const i32, alibi: *const f32, sinks: *const f32, k_scales: *const f32, v_scales: *const f32,
        partial: *mut f32, tickets: *mut u32, scale_per_head: u32, batch: u32, q_len: u32, q_heads: u32, kv_heads: u32,
        page_shift: u32, max_pages: u32, pages: u32, partial_chunks: u32, hint: u32, splitting: u32, q_token: usize,
        q_head: usize, out_token: usize, out_head: usize, k_head: u32, v_head: u32, scale: f32, soft_cap: f32, window: u32,
    );
    decode_tma_d64_r8_bf16 { type T = bf16; type C = bf16; } [threads(4), 2; Sm90a] => decode::<T, C, 64, 1, 4, 2, 128, 3, false>;
    decode_tma_d128_r7_bf16 { type T = bf16; type C = bf16; } [threads(4), 2; Sm90a] => decode::<T, C, 128, 1, 4, 1, 64, 3, false>;
    decode_tma_d128_r8_bf16 { type T = bf16; type C = bf16; } [threads(4), 2; Sm90a] => decode::<T, C, 128, 1, 4, 1, 64, 3, true>;
    decode_tma_d128_r16_bf16 { type T = bf16; type C = bf16; } [threads(8), 1; Sm90a] => decode::<T, C, 128, 2, 8, 1, 128, 3, true>;
    decode_tma_d256_r8_bf16 { type T = bf16; type C = bf16; } [threads(4), 1; Sm90a] => decode::<T, C, 256, 1, 4, 1, 64, 3, true>;
    decode_tma_d128_r8_bf16_e4m3 { type T = bf16; type C = E4M3; } [threads(4), 2; Sm90a] => decode::<T, C, 128, 1, 4, 2, 128, 3, false>;
    decode_tma_d128_r16_bf16_e4m3 { type T = bf16; type C = E4M3; } [threads(4), 1; Sm90a] => decode::<T, C, 128, 2, 4, 2, 128, 6, false>;
    decode_tma_d128_r8_bf16_e5m2 { type T = bf16; type C = E5M2; } [threads(4), 2; Sm90a] => decode::<T, C, 128, 1, 4, 2, 128, 3, false>;
    decode_tma_d128_r16_bf16_e5m2 { type T = bf16; type C = E5M2; } [threads(4), 1; Sm90a] => decode::<T, C, 128, 2, 4, 2, 128, 6, false>;
    decode_tma_d128_r8_bf16_i8 { type T = bf16; type C = i8; } [threads(4), 2; Sm90a] => decode::<T, C, 128, 1, 4, 2, 128, 3, false>;
    decode_tma_d128_r16_bf16_i8 { type T = bf16; type C = i8; } [threads(4), 1; Sm90a] => decode::<T, C, 128, 2, 4, 2, 128, 6, false>;
    decode_tma_d64_r8_f16 { type T = f16; type C = f16; } [threads(4), 2; Sm90a] => decode::<T, C, 64, 1, 4, 2, 128, 3, false>;
    decode_tma_d128_r7_f16 { type T = f16; type C = f16; } [threads(4), 2; Sm90a] => decode::<T, C, 128, 1, 4, 1, 64, 3, false>;
    decode_tma_d128_r8_f16 { type T = f16; type C = f16; } [threads(4), 2; Sm90a] => decode::<T, C, 128, 1, 4, 1, 64, 3, true>;
    decode_tma_d128_r16_f16 { type T = f16; type C = f16; } [threads(8), 1; Sm90a] => decode::<T, C, 128, 2, 8, 1, 128, 3, true>;
    decode_tma_d256_r8_f16 { type T = f16; type C = f16; } [threads(4), 1; Sm90a] => decode::<T, C, 256, 1, 4, 1, 64, 3, true>;
    decode_tma_d128_r8_f16_e4m3 { type T = f16; type C = E4M3; } [threads(4), 2; Sm90a] => decode::<T, C, 128, 1, 4, 2, 128, 3, false>;
    decode_tma_d128_r16_f16_e4m3 { type T = f16; type C = E4M3; } [threads(4), 1; Sm90a] => decode::<T, C, 128, 2, 4, 2, 128, 6, false>;
    decode_tma_d128_r8_f16_e5m2 { type T = f16; type C = E5M2; } [threads(4), 2; Sm90a] => decode::<T, C, 128, 1, 4, 2, 128, 3, false>;
    decode_tma_d128_r16_f16_e5m2 { type T = f16; type C = E5M2; } [threads(4), 1; Sm90a] => decode::<T, C, 128, 2, 4, 2, 128, 6, false>;
    decode_tma_d128_r8_f16_i8 { type T = f16; type C = i8; } [threads(4), 2; Sm90a] => decode::<T, C, 128, 1, 4, 2, 128, 3, false>;
    decode_tma_d128_r16_f16_i8 { type T = f16; type C = i8; } [threads(4), 1; Sm90a] => decode::<T, C, 128, 2, 4, 2, 128, 6, false>;
}
