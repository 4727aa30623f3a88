//! Items of work of a persistent grouped product: a tile of rows of an expert's weights, and a share of its pairs.
//!
//! An expert's `c` pairs are dealt out to `ceil(c / most)` shares of equal size, rounded up to 8 (or, if there are more than `most`, to `ceil(c / cut)` with a smaller `cut`). Items are ordered by expert, tile, share:
//! shares that read the same weights run side by side, and the weights come from memory once, as long as blocks keep abreast of each other. Which
//! item is which follows from a prefix sum over experts that every block, or one warp of it, makes for itself, from the counts of sorting or, without a sorted list, from at most
//! [`DIRECT_PAIRS`] pairs; the routing stays on the device.
//!
//! Or items are for two blocks: two shares of a tile, or where shares are odd in number a share of two tiles. Then pairs are dealt out 8 at a time, and no
//! share is smaller than another by more than that.

use super::pairs::{NOWHERE, Pairs};
use cuda_std::atomic::{Block, Device, Relaxed};
use cuda_std::shared::Carver;
use cuda_std::vec::B128;
use cuda_std::{Global, GlobalMut, Shared, cluster, mbarrier, thread, unroll, warp};

/// The most pairs without a sorted list.
pub const DIRECT_PAIRS: usize = 128;
/// Of those a lane has so many.
const ROUNDS: usize = DIRECT_PAIRS / 32;
/// The most warps of a block but the last, whose sum nobody asks for.
const MAX_WARPS: usize = 16;

/// Shared memory for so many experts; every part may begin at the next multiple of 16.
pub const fn shared_bytes(bins: usize) -> usize {
    MAX_WARPS * 4 + 3 * (bins + 4) * 4 + DIRECT_PAIRS * 12 + 7 * 16
}

/// The same for items of a sorted list, without the three parts that hold pairs.
pub const fn sorted_shared_bytes(bins: usize) -> usize {
    shared_bytes(bins) - DIRECT_PAIRS * 12 - 3 * 16
}

/// Numbers that a block keeps; see [`Drawn`].
const KEPT: usize = 16;
/// Bits of a word that count items.
const COUNT: u32 = 28;
/// The most items that can be drawn.
pub const MAX_DRAWN: usize = 1 << COUNT;
/// Words of the workspace: one for each product.
pub const WORDS: usize = 2;
/// Shared memory of [`Drawn`]; its two parts may begin at the next multiple of 16.
pub const DRAWN_BYTES: usize = KEPT * 12 + 2 * 16;

/// Items that blocks draw when they have done what they had, instead of being dealt every so manyth: multiprocessors do not go at the same pace, and
/// of equally many items some blocks had done theirs when a sixth of the time was left. The first item of a block is dealt.
///
/// A word of the workspace counts what has been drawn. It begins with a number of the launch, so what is there before does not matter; whoever draws
/// the last number zeroes it for replays of a graph. A thread of the producer draws while it has an item fetched, for the next one, and tells the others by an
/// mbarrier: in the order of a block's items, `sequence` counts those after the first.
///
/// A number is overwritten [`KEPT`] items later. When the producer draws it has had all items before the one it is at fetched, so whoever gives stages back
/// has heard all numbers but those of two items more than there are stages, of which there are at most eight. Nor are others of a producer further behind, who
/// have a part in filling each stage.
///
/// Blocks of a cluster that have items together are told by `st.async`: that of block 0 draws for all of them.
#[derive(Clone, Copy)]
pub struct Drawn {
    word: GlobalMut<u64>,
    /// The word before anything is drawn.
    claim: u64,
    told: Shared<u64>,
    numbers: Shared<u32>,
}

impl Drawn {
    /// Takes no room if it is not `used`. `word`: any contents; `launch`: a number whose lower 36 bits are not 0 and no other launch's, unless it repeats this one.
    #[inline(always)]
    pub unsafe fn new(carver: &mut Carver, used: bool, word: *mut u64, launch: u64) -> Self {
        let kept = if used { KEPT } else { 0 };
        let (told, numbers) = (carver.take::<u64>(kept), carver.take::<u32>(kept));
        Self { word: GlobalMut::new(word), claim: launch << COUNT, told, numbers }
    }

    /// By one thread, before [`mbarrier::fence_init`].
    #[inline(always)]
    pub unsafe fn init(self) {
        for i in 0..KEPT {
            mbarrier::init(self.told.address(i), 1);
        }
    }

    /// By one thread, in order, if there has been an item: asks for a number. The answer is on its way until it is used, by [`settle`](Self::settle) or
    /// [`settle_together`](Self::settle_together).
    #[inline(always)]
    pub unsafe fn take(self, sequence: u32) -> u32 {
        if sequence == 0 {
            let found = self.word.load(0u32, Device, Relaxed);
            if found >> COUNT << COUNT != self.claim {
                // Or somebody else has.
                self.word.compare_exchange(0u32, found, self.claim, Device, Relaxed);
            }
        }
        self.word.fetch_add(0u32, 1, Device, Relaxed) as u32
    }

    /// By the same thread: tells which of `items` that number is, of which each of `blocks` blocks has its first.
    #[inline(always)]
    pub unsafe fn settle(self, sequence: u32, taken: u32, blocks: u32, items: u32) {
        self.tell(sequence, self.number(taken, blocks, items));
    }

    /// The same where the blocks of a cluster of `BLOCKS` have items together, of which there are so many for `clusters`: by one thread of each block, whose place
    /// in the cluster is `rank`; what counts is what that of block 0 has taken.
    #[inline(always)]
    pub unsafe fn settle_together<const BLOCKS: u32>(
        self,
        sequence: u32,
        taken: u32,
        rank: u32,
        clusters: u32,
        items: u32,
    ) {
        let place = sequence % KEPT as u32;
        mbarrier::arrive_expect_tx(self.told.address(place), 4);
        if rank == 0 {
            let number = self.number(taken, clusters, items);
            for to in 0..BLOCKS {
                let told = cluster::map(self.told.address(place), to);
                cluster::store_async_u32(cluster::map(self.numbers.address(place), to), number, told);
            }
        }
    }

    #[inline(always)]
    unsafe fn number(self, taken: u32, blocks: u32, items: u32) -> u32 {
        let drawn = taken.wrapping_sub(self.claim as u32);
        // Every block with an item draws until it gets none: as often, all together, as there are items.
        if drawn + 1 == items {
            self.word.store(0u32, 0, Device, Relaxed);
        }
        blocks + drawn
    }

    /// By the same thread: what the next number is. One that no item has is the end.
    #[inline(always)]
    pub unsafe fn tell(self, sequence: u32, number: u32) {
        self.numbers.set(sequence % KEPT as u32, number);
        mbarrier::arrive(self.told.address(sequence % KEPT as u32));
    }

    /// By a warp that has heard those before, or has no use for them: the number, once it is told. It is read by the first lane, the one that gives stages back.
    #[inline(always)]
    pub unsafe fn hear(self, sequence: u32) -> u32 {
        mbarrier::wait_parity(self.told.address(sequence % KEPT as u32), (sequence / KEPT as u32) & 1);
        let number = if warp::lane_id() == 0 { self.numbers.get(sequence % KEPT as u32) } else { 0 };
        warp::shfl_idx(number, 0)
    }
}

/// Shared memory of a [`Found`], behind [`Drawn`], whose parts like its own are multiples of 16 bytes.
pub const fn found_bytes(places: usize) -> usize {
    places * 24
}

/// What the producer has found for who has no time to search: between two items of a consumer nothing is multiplied, and several divisions and looks at tables one after another
/// took some 0.2 µs of each of Qwen3's items (docs/fused-moe.md).
///
/// In the order of a block's items, from the one that is dealt. An item is overwritten `PLACES` items later. When the producer tells of one it has had all before fetched, so
/// who gives stages back has heard of all but as many as stages hold.
/// It may do so without releasing anything: where its operands are and whether there is an item it had to know before.
#[derive(Clone, Copy)]
pub struct Found<const PLACES: usize> {
    told: Shared<u64>,
    items: Shared<u32>,
}

impl<const PLACES: usize> Found<PLACES> {
    /// Takes no room if it is not `used`.
    #[inline(always)]
    pub unsafe fn new(carver: &mut Carver, used: bool) -> Self {
        let places = if used { PLACES } else { 0 };
        Self { told: carver.take::<u64>(places), items: carver.take::<u32>(4 * places) }
    }

    /// By one thread, before [`mbarrier::fence_init`].
    #[inline(always)]
    pub unsafe fn init(self) {
        for i in 0..PLACES {
            mbarrier::init(self.told.address(i), 1);
        }
    }

    /// By one thread: the next item, or that there is none.
    #[inline(always)]
    pub unsafe fn tell(self, sequence: u32, item: Option<Item>) {
        let place = sequence % PLACES as u32;
        let item = item.map_or([NOWHERE, 0, 0, 0], |item| [item.bin, item.tile, item.first, item.count]);
        self.items.set_as(4 * place, B128(item));
        mbarrier::arrive(self.told.address(place));
    }

    /// By whom an item's place is enough.
    #[inline(always)]
    pub unsafe fn hear(self, sequence: u32) -> Option<Item> {
        let place = sequence % PLACES as u32;
        mbarrier::wait_parity(self.told.address(place), (sequence / PLACES as u32) & 1);
        let B128([bin, tile, first, count]) = self.items.get_as::<B128<u32, 4>>(4 * place);
        (bin != NOWHERE).then_some(Item { bin, tile, first, count, shared: false, alone: false })
    }
}

/// Where pairs are, in the order of their experts.
#[derive(Clone, Copy)]
pub struct Sorted {
    /// From [`sort`](super::sort); not read without a list.
    pub ids: Global<i32>,
    /// Their weights.
    pub weights: Global<f32>,
    /// For each expert where its pairs start, and how many they are.
    pub offsets: Global<i32>,
    /// As many.
    pub counts: Global<i32>,
    /// `[tokens, top_k]`: the weights before sorting.
    pub topk_weights: Global<f32>,
}

/// What the threads of a block know of all items.
#[derive(Clone, Copy)]
pub struct Items<const DIRECT: bool> {
    sorted: Sorted,
    sums: Shared<u32>,
    own_bins: Shared<u32>,
    own_ids: Shared<u32>,
    own_weights: Shared<f32>,
    /// For each expert the shares up to its last, or the items for two blocks; its pairs, and where they start.
    ends: Shared<u32>,
    counts: Shared<u32>,
    starts: Shared<u32>,
    bins: u32,
    /// Tiles of rows of an expert.
    tiles: u32,
    /// Pairs of a share, at most; and of those of an expert that has several.
    most: u32,
    cut: u32,
    /// Whether all shares but an expert's last have as many pairs as there may be.
    filled: bool,
    /// Whether there are items for two blocks.
    paired: bool,
    /// Tiles of a stripe.
    stripe: u32,
}

/// An item.
#[derive(Clone, Copy)]
pub struct Item {
    /// The expert.
    pub bin: u32,
    /// The tile of rows.
    pub tile: u32,
    /// Where the share starts in the order of pairs.
    pub first: u32,
    /// Its pairs.
    pub count: u32,
    /// Whether another block has another share of the same tile at the same time.
    pub shared: bool,
    /// Whether no other item has the same weights, but the one of the other block at the same time.
    pub alone: bool,
}

impl<const DIRECT: bool> Items<DIRECT> {
    /// By all threads of a block: [`carve`](Self::carve) and [`fill_together`](Self::fill_together).
    #[inline(always)]
    pub unsafe fn new(
        carver: &mut Carver,
        sorted: Sorted,
        pairs: Pairs,
        count: u32,
        bins: u32,
        tiles: u32,
        most: u32,
        paired: bool,
    ) -> Self {
        let items = Self::carve(carver, sorted, bins, tiles, most, paired);
        items.fill_together(pairs, count);
        items
    }

    /// Takes room; shares of at most `most` pairs, a multiple of 8; `tiles` of each expert, not 0. `paired`: items are for two blocks.
    #[inline(always)]
    pub unsafe fn carve(carver: &mut Carver, sorted: Sorted, bins: u32, tiles: u32, most: u32, paired: bool) -> Self {
        let sums = carver.take::<u32>(MAX_WARPS);
        let ends = carver.take::<u32>(bins as usize + 4);
        let counts = carver.take::<u32>(bins as usize + 4);
        let starts = carver.take::<u32>(bins as usize + 4);
        let own = if DIRECT { DIRECT_PAIRS } else { 0 };
        let own_bins = carver.take::<u32>(own);
        let own_ids = carver.take::<u32>(own);
        let own_weights = carver.take::<f32>(own);
        Self {
            sorted,
            sums,
            own_bins,
            own_ids,
            own_weights,
            ends,
            counts,
            starts,
            bins,
            tiles,
            most,
            cut: most,
            filled: false,
            paired,
            stripe: tiles,
        }
    }

    /// The same with an expert's pairs cut into shares of at most `cut`, a multiple of 8, if one share does not hold them.
    #[inline(always)]
    pub fn cut_into(self, cut: u32) -> Self {
        Self { cut, ..self }
    }

    /// The same with as many pairs as a share may have in all of an expert's but the last.
    #[inline(always)]
    pub fn filled(self) -> Self {
        Self { filled: true, ..self }
    }

    /// By all threads of a block, whose number is a multiple of 32: the tables, from `count` pairs in all if there is no list, at most [`DIRECT_PAIRS`]. Slower than
    /// [`fill`](Self::fill), but threads that have few registers keep less in them.
    #[inline(always)]
    pub unsafe fn fill_together(&self, pairs: Pairs, count: u32) {
        let (tid, warp_id, lane) = (thread::thread_idx_x(), warp::warp_id(), warp::lane_id());
        // SAFETY: a block has threads, and a share holds pairs.
        core::hint::assert_unchecked(self.most != 0);
        let each = self.bins.div_ceil(thread::block_dim_x().max(1));
        let (from, to) = ((tid * each).min(self.bins), ((tid + 1) * each).min(self.bins));
        if DIRECT {
            // Both from memory at once.
            let (mut bin, mut weight) = (NOWHERE, 0.0);
            if tid < count {
                weight = pairs.weight(tid, self.sorted.topk_weights);
                bin = pairs.bin(tid);
            }
            // Those that are not there make up for the last eight.
            if tid < DIRECT_PAIRS as u32 {
                self.own_bins.set(tid, bin);
            }
            for bin in from..to {
                self.counts.set(bin, 0);
            }
            thread::sync_threads();
            if bin < self.bins {
                // Pairs of lower experts, those of this one before this pair, and all of this one.
                let (mut start, mut rank, mut all) = (0, 0, 0);
                let mut other = 0;
                while other < count {
                    // Eight at a time: one after the other they took a microsecond of 64.
                    let eight =
                        [self.own_bins.get_as::<B128<u32, 4>>(other), self.own_bins.get_as::<B128<u32, 4>>(other + 4)];
                    unroll::<8>(|i| {
                        let b = eight[i / 4].0[i % 4];
                        start += (b < bin) as u32;
                        rank += (b == bin && other + (i as u32) < tid) as u32;
                        all += (b == bin) as u32;
                    });
                    other += 8;
                }
                self.own_ids.set(start + rank, tid);
                self.own_weights.set(start + rank, weight);
                if rank == 0 {
                    self.counts.set(bin, all);
                    self.starts.set(bin, start);
                }
            }
            thread::sync_threads();
        } else {
            for bin in from..to {
                self.counts.set(bin, self.sorted.counts.get(bin) as u32);
                self.starts.set(bin, self.sorted.offsets.get(bin) as u32);
            }
        }
        // Shares of the experts, added up: a thread for some neighbouring ones.
        let mut sum = 0;
        for bin in from..to {
            sum += self.ends_of(self.counts.get(bin));
        }
        let up_to = warp::scan(sum, |a, b| a + b);
        if lane == 31 && warp_id < MAX_WARPS as u32 {
            self.sums.set(warp_id, up_to);
        }
        thread::sync_threads();
        let mut end = up_to - sum;
        for w in 0..warp_id {
            end += self.sums.get(w);
        }
        for bin in from..to {
            end += self.ends_of(self.counts.get(bin));
            self.ends.set(bin, end);
        }
        thread::sync_threads();
    }

    /// By all threads, without a list: what can be done before anything is known.
    #[inline(always)]
    pub unsafe fn clear(&self) {
        if DIRECT && warp::warp_id() == 0 {
            let mut bin = warp::lane_id() * 4;
            while bin < self.bins {
                self.counts.set_as(bin, B128([0; 4]));
                bin += 4 * 32;
            }
            warp::sync_warp(warp::FULL);
        }
    }

    /// By all threads, with a list: what sorting has found.
    #[inline(always)]
    pub unsafe fn gather(&self) {
        if !DIRECT {
            let mut bin = thread::thread_idx_x();
            while bin < self.bins.next_multiple_of(4) {
                // Zeroes make up for the last four.
                let (mut count, mut start) = (0, 0);
                if bin < self.bins {
                    (count, start) = (self.sorted.counts.get(bin) as u32, self.sorted.offsets.get(bin) as u32);
                }
                self.counts.set(bin, count);
                self.starts.set(bin, start);
                bin += thread::block_dim_x();
            }
            thread::sync_threads();
        }
    }

    /// By all threads of a block, at least [`DIRECT_PAIRS`] without a list: the tables, from what is [gathered](Self::gather); or, without a list, if all is [clear](Self::clear), from
    /// `count` pairs, at most so many. All may use them after a barrier. The first warp goes on to the first weights from
    /// there, so what is done before is little: what is done once takes 5 cycles an instruction, and one warp with all pairs and `match` took 480 of them where this takes 180. The barriers
    /// are the block's, and the same instructions for all threads: of named ones racecheck loses track, and synccheck takes others for a mistake.
    #[inline(always)]
    pub unsafe fn fill(&self, pairs: Pairs, count: u32) {
        let tid = thread::thread_idx_x();
        let (mut bin, mut rank, mut weight) = (NOWHERE, 0, 0.0);
        if DIRECT {
            if tid < DIRECT_PAIRS as u32 {
                let ([id], [w]) = pairs.ids_and_weights::<1>(tid, count, self.sorted.topk_weights);
                (bin, weight) = (pairs.bin_of_id(id), w);
            }
            thread::sync_threads();
            if bin < self.bins {
                // In any order, if one share holds them: it is that of columns of a product, which do not depend on each other.
                rank = self.counts.fetch_add(bin, 1, Block, Relaxed);
            }
            if tid < DIRECT_PAIRS as u32 {
                self.own_bins.set(tid, bin);
            }
            thread::sync_threads();
        }
        if warp::warp_id() == 0 {
            self.add_up();
        }
        if DIRECT {
            thread::sync_threads();
            if bin < self.bins {
                if self.counts.get(bin) > self.cut {
                    // Blocks must agree on the share that a pair is in.
                    rank = 0;
                    for other in 0..tid {
                        rank += (self.own_bins.get(other) == bin) as u32;
                    }
                }
                let place = self.starts.get(bin) + rank;
                self.own_ids.set(place, tid);
                self.own_weights.set(place, weight);
            }
        }
    }

    /// By one warp: the shares of experts whose pairs are counted, added up.
    #[inline(always)]
    unsafe fn add_up(&self) {
        let lane = warp::lane_id();
        // SAFETY: a share holds pairs.
        core::hint::assert_unchecked(self.most != 0);
        // Without a list pairs as well, which are few, in the lower half of a word.
        let all_of = |count: u32| if DIRECT { self.ends_of(count) << 16 | count } else { self.ends_of(count) };
        // A lane for four neighbouring experts.
        let (mut first, mut before) = (0, 0);
        while first < self.bins {
            let bin = first + 4 * lane;
            let mut all = [0; 4];
            if bin < self.bins {
                let B128(counts) = self.counts.get_as::<B128<u32, 4>>(bin);
                all = counts.map(all_of);
            }
            let sum = all[0] + all[1] + all[2] + all[3];
            let up_to = before + warp::scan(sum, |a, b| a + b);
            let mut end = up_to - sum;
            let (mut ends, mut starts) = ([0; 4], [0; 4]);
            unroll::<4>(|i| {
                starts[i] = end & 0xffff;
                end += all[i];
                ends[i] = if DIRECT { end >> 16 } else { end };
            });
            if bin < self.bins {
                self.ends.set_as(bin, B128(ends));
                if DIRECT {
                    self.starts.set_as(bin, B128(starts));
                }
            }
            first += 4 * 32;
            if first < self.bins {
                before = warp::shfl_idx(up_to, 31);
            }
        }
        warp::sync_warp(warp::FULL);
    }

    /// Shares of an expert with so many pairs.
    #[inline(always)]
    #[allow(
        clippy::manual_div_ceil,
        reason = "`div_ceil` has no overflow, of which pairs are far, for a remainder and a comparison more"
    )]
    fn shares_of(&self, count: u32) -> u32 {
        if self.cut != self.most && count <= self.most {
            return (count > 0) as u32;
        }
        // SAFETY: a share holds pairs.
        unsafe { core::hint::assert_unchecked(self.cut != 0) };
        (count + self.cut - 1) / self.cut
    }

    /// Items of an expert with so many pairs, or for each tile.
    #[inline(always)]
    fn ends_of(&self, count: u32) -> u32 {
        let shares = self.shares_of(count);
        if !self.paired {
            shares
        } else if shares.is_multiple_of(2) {
            shares / 2 * self.tiles
        } else {
            shares * self.tiles.div_ceil(2)
        }
    }

    /// The same in stripes of at most so many tiles, not 0, for [`find_in_stripes`](Self::find_in_stripes): all experts' items of the first tiles, then those of the next ones.
    #[inline(always)]
    pub fn in_stripes(self, stripe: u32) -> Self {
        Self { stripe: stripe.min(self.tiles), ..self }
    }

    /// How many shares there are.
    #[inline(always)]
    pub unsafe fn shares(&self) -> u32 {
        if self.bins == 0 { 0 } else { self.ends.get(self.bins - 1) }
    }

    /// The items of another product of the same pairs, of so many tiles.
    #[inline(always)]
    pub fn of_tiles(&self, tiles: u32) -> Self {
        Self { tiles, stripe: tiles, ..*self }
    }

    /// How many there are.
    #[inline(always)]
    pub unsafe fn count(&self) -> u32 {
        self.shares() * if self.paired { 1 } else { self.tiles }
    }

    /// Item `item`, of items for two blocks that of block `rank`; all lanes of a warp take part.
    #[inline(always)]
    pub unsafe fn find(&self, item: u32, rank: u32) -> Item {
        self.look_up::<false>(item, self.shares_before(item), rank)
    }

    /// How many shares there are at most before the one of an item, if there are such at all: known before the tables are.
    #[inline(always)]
    pub unsafe fn shares_before(&self, item: u32) -> u32 {
        // SAFETY: there are outputs, hence tiles.
        core::hint::assert_unchecked(self.stripe != 0);
        if self.paired { item } else { item / self.stripe }
    }

    /// [`find`](Self::find) with what [`shares_before`](Self::shares_before) says, and without a division where an expert has one share.
    #[inline(always)]
    pub unsafe fn find_among(&self, item: u32, q: u32) -> Item {
        self.look_up::<true>(item, q, 0)
    }

    /// The same in stripes. Without a division in the first of them.
    #[inline(always)]
    pub unsafe fn find_in_stripes(&self, item: u32, q: u32) -> Item {
        let (mut first, mut rest, mut q, mut tiles) = (0, item, q, self.stripe);
        let each = self.shares() * self.stripe;
        if item >= each {
            // SAFETY: where there is an item there is a share, and stripes have tiles.
            core::hint::assert_unchecked(each != 0);
            let stripe = item / each;
            (first, rest) = (stripe * self.stripe, item - stripe * each);
            tiles = self.stripe.min(self.tiles - first);
            core::hint::assert_unchecked(tiles != 0);
            q = rest / tiles;
        }
        let found = Self { tiles, ..*self }.look_up::<true>(rest, q, 0);
        Item { tile: first + found.tile, ..found }
    }

    /// `BRANCH`: around a division, which takes registers.
    #[inline(always)]
    unsafe fn look_up<const BRANCH: bool>(&self, item: u32, q: u32, rank: u32) -> Item {
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
        if self.paired {
            return self.of_two(bin, item - begin, rank);
        }
        let shares = self.ends.get(bin) - begin;
        // SAFETY: an expert that holds an item has shares.
        core::hint::assert_unchecked(shares != 0);
        let r = item - begin * self.tiles;
        let count = self.counts.get(bin);
        let (mut tile, mut share, mut size) = (r, 0, count.next_multiple_of(8));
        if !BRANCH || shares > 1 {
            (tile, share) = (r / shares, r % shares);
            size = if self.filled { self.most } else { count.div_ceil(shares).next_multiple_of(8) };
        }
        let first = share * size;
        Item {
            bin,
            tile,
            first: self.starts.get(bin) + first,
            count: (count - first).min(size),
            shared: false,
            alone: shares == 1,
        }
    }

    /// What block `rank` has of the `r`-th item of an expert.
    #[inline(always)]
    unsafe fn of_two(&self, bin: u32, r: u32, rank: u32) -> Item {
        let count = self.counts.get(bin);
        // SAFETY: a share holds pairs, and an expert that holds an item has shares.
        core::hint::assert_unchecked(self.most != 0);
        let shares = self.shares_of(count);
        core::hint::assert_unchecked(shares != 0);
        // In turn from tile to tile: no block has the smaller shares only, so those that read the same weights stay abreast.
        let shared = shares.is_multiple_of(2);
        let (tile, share) = if shared {
            let (tile, twos) = (r / (shares / 2), shares / 2);
            (tile, (r + tile) % twos * 2 + rank)
        } else {
            let two = r / shares;
            (2 * two + rank, (r + two) % shares)
        };
        let units = count.div_ceil(8);
        let (each, more) = (units / shares, units % shares);
        let first = 8 * (share * each + share.min(more));
        let size = 8 * (each + (share < more) as u32);
        // The second of two tiles may not exist.
        let count = if tile < self.tiles { (count - first).min(size) } else { 0 };
        Item { bin, tile, first: self.starts.get(bin) + first, count, shared, alone: shares <= 2 }
    }

    /// By a whole warp, without a list, after [`fill_together`](Self::fill_together): how many pairs have an expert here.
    #[inline(always)]
    pub unsafe fn own_pairs(&self) -> u32 {
        let mut count = 0;
        unroll::<ROUNDS>(|i| {
            let here = self.own_bins.get(32 * i as u32 + warp::lane_id()) < self.bins;
            count += warp::warp_vote_ballot(warp::FULL, here).count_ones();
        });
        count
    }

    /// The pair at a place of the order.
    #[inline(always)]
    pub unsafe fn pair(&self, at: u32) -> u32 {
        if DIRECT { self.own_ids.get(at) } else { self.sorted.ids.get(at) as u32 }
    }

    /// Its weight.
    #[inline(always)]
    pub unsafe fn weight(&self, at: u32) -> f32 {
        if DIRECT { self.own_weights.get(at) } else { self.sorted.weights.get(at) }
    }
}
