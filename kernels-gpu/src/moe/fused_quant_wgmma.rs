//! Products of the fused block with e4m3 weights, activations and scales of blocks on Hopper: [`fused_wgmma`](super::fused_wgmma) with scales. Those with scales of rows:
//! [`fused_quant_rows_wgmma`](super::fused_quant_rows_wgmma).
//!
//! # Scales
//! Weights have a scale for each block of 128 × 128, rows of `x` and `h` one for each 128 elements (DeepSeek-AI,
//! *DeepSeek-V3 Technical Report*, 2024, section 3.3). A step of the pipeline is 128 elements of K, one line of the swizzle. Its products
//! have accumulators of their own, and are then multiplied with their scales and added to the sums in f32; meanwhile the other consumer
//! warpgroup keeps the tensor cores busy.
//!
//! # Orientation
//! As in [`fused_wgmma`](super::fused_wgmma) weights are the 64-row side of `m64nNk32` and the pairs of an expert the N side; of every 16 rows
//! of weights 8 are gates and 8 the values that belong to them, so a thread has a gate and its value, of at most two blocks of weights.
//!
//! With many pairs the sides change ([`Consumer::tall`]): pairs are the 64-row side, 256 of them an item, and a tile of 128 rows of weights the other. Then a thread's sums belong to
//! two rows of `x` or `h`, which have a scale each, and to columns that have one or two: so a step multiplies and loads a handful of scales, where the other way each pair of columns has its own.
//!
//! # What comes into the stages
//! Quantising sorts: rows of `x` and of `h` lie in the order of the sorted list, so the copy engine brings those of a share in boxes, and
//! their scales, which lie group by group, as one line. (Rows gathered by `cp.async` came at 5 TB/s at most in all of an H200.) Rows beyond the
//! share's last are those of other pairs or none; they fill columns that nobody reads. Few rows have [`fused_quant_few`](super::fused_quant_few). Blocks of a cluster (`SHARE`) take neighbouring tiles of weights for the same pairs, and each has a part of their
//! rows brought for all. Scales of blocks of weights are two words a thread and step, on their way during the products.
//!
//! # What lies between the products
//! A scale of blocks covers 128 outputs of the first product: two neighbouring tiles, which the two blocks of a cluster have for the same pairs. So the first product quantises its results
//! itself ([`Quantiser`]): consumers lay them out in shared memory, rounded to `T`, and go on with the next item; the producer's other three warps exchange the largest magnitudes with the
//! other block by `st.async`, quantise and store.
//!
//! # Results
//! Of many pairs the second product's results go by way of the last two stages of an item, one for each consumer, and are stored 256 bytes of a pair at a time; of few they go from registers to
//! memory. Where it is allowed (`ROUNDED`, `ADDED`) they are rounded to the element type, which is half of it, or added to a token's own row.
//!
//! Of few pairs the second product computes [stripes](Stripes) of columns where that is asked for, so that the sum begins with a stripe while the next ones are computed. Its
//! consumers take items [in turn](in_turn).

use super::fused::{HALVES, PLAIN};
use super::fused_wgmma::{ADDED, Activation, F32, ROUNDED, coordinates};
use super::items::{Drawn, Found, Item, Items, Sorted};
use super::pairs::Pairs;
use super::progress::{Progress, Stripes};
use crate::pipeline::{Ring, Stages};
use crate::row::GROUP;
use crate::row::quantise::{Quantised as _, amax, scale_for};
use crate::scales::BLOCKS;
use crate::tensor_float::TensorFloat;
use cuda_std::second_level::Policy;
use cuda_std::shared::Carver;
use cuda_std::tma::{self, TensorMap};
use cuda_std::vec::{B64, B128};
use cuda_std::wgmma::{self, Accumulator, Descriptor, K, Registers as _};
use cuda_std::{
    E4M3, Global, GlobalMut, Shared, apart, bf16, cluster, dependent_launch, entries, f16, float, integer, mbarrier,
    mma, thread, unroll, vec, warp,
};

/// Consumer warpgroups.
const GROUPS: usize = 2;
/// Threads of the warpgroup of which a warp fills the ring.
const PRODUCERS: usize = 128;
/// Which of them draws items: a lane that brings neither weights, rows nor scales.
const DRAWER: u32 = 30;
/// Items of which it tells consumers before one is overwritten: more than the stages, of which each has one at least.
const FOUND: usize = 8;
/// Threads of a block.
pub const THREADS: usize = PRODUCERS + GROUPS * 128;
/// Elements of K of a stage: a line of the swizzle, and what a scale of blocks covers.
pub const STEP: usize = 128;
/// The most experts of a device.
pub const MAX_BINS: usize = 1024;
/// The place in the sorted list of an expert's first pair is a multiple of this.
pub const SORT_BLOCK: usize = 8;
/// Columns that a product may have more than there are places in the sorted list: so many scales may be read beyond the last.
pub const BEYOND: usize = 160;

/// Threads of a block as the compiler is told, where consumers take items in turn: so few registers a thread that blocks of the sum have room beside this one.
pub const ROOMY: usize = 512;

/// Whether the second product computes stripes of columns, of so many pairs at most.
const fn is_striped(pairs: usize) -> bool {
    pairs == 64
}

/// Whether consumers have items of their own, in turn, of so many pairs at most: one finishes an item while the other multiplies, so there is time for a fence at the end of a stripe.
const fn in_turn(pairs: usize, up: bool) -> bool {
    is_striped(pairs) && !up
}

/// Rows of weights of an item, of which each consumer warpgroup has so many tiles if they share it.
pub const fn rows(tiles: usize) -> usize {
    GROUPS * tiles * 64
}

/// The same of an instance whose consumers have so many tiles of an item.
const fn item_rows(tiles: usize, pairs: usize, up: bool) -> usize {
    if in_turn(pairs, up) { tiles * 64 } else { rows(tiles) }
}

/// Rows of a box of `x` or `h`, for at most so many pairs.
pub const fn box_rows(pairs: usize) -> usize {
    if pairs > 64 { 16 } else { 8 }
}

/// Whether pairs are the 64-row side of the products, for so many at most; see [`Consumer::tall`].
const fn is_tall(pairs: usize) -> bool {
    pairs > 160
}

/// Rows of weights of an item.
pub const TILE_ROWS: usize = 128;

/// Pairs of an item for which both consumers have 64 rows: a wave.
const WAVE: usize = GROUPS * 64;

/// Pairs whose results are quantised at a time.
const fn quantised_pairs(pairs: usize) -> usize {
    if is_tall(pairs) { WAVE } else { pairs }
}

/// Dynamic shared memory of the first product (`up`) or the second; every part may begin at the next multiple of 16.
pub const fn shared_bytes([tiles, pairs, lines, stages]: [usize; 4], up: bool, bins: usize) -> usize {
    stages * (lines * ((rows(tiles) + pairs) * STEP + pairs * 4) + 2 * 8)
        + if in_turn(pairs, up) { GROUPS * 8 + 16 } else { 0 }
        + if up { quantiser_bytes(quantised_pairs(pairs)) } else { GROUPS * pairs * 8 }
        + super::items::DRAWN_BYTES
        + if in_turn(pairs, up) { 0 } else { super::items::found_bytes(FOUND) }
        + super::items::sorted_shared_bytes(bins)
        + 8 * 16
}

/// What the products of this file need to know.
type Blocks<T> = Job<T, BLOCKS, false>;

/// What both products need to know.
pub(super) struct Job<T, const SCALES: u32, const DIRECT: bool> {
    pub(super) h: GlobalMut<T>,
    pub(super) partial: GlobalMut<f32>,
    pub(super) x_scales: Global<f32>,
    /// Pairs that have a row of `x` in common.
    pub(super) x_divisor: u32,
    pub(super) w_scales: Global<f32>,
    pub(super) shared_w_scales: Global<f32>,
    /// Scales of an expert, and from row to row, where they are of rows.
    pub(super) w_scale_expert: u32,
    pub(super) w_scale_row: u32,
    pub(super) bias: Global<f32>,
    pub(super) biased: bool,
    pub(super) shared_bias: Global<f32>,
    pub(super) shared_biased: bool,
    /// Routed experts of this device.
    pub(super) local: u32,
    pub(super) items: Items<DIRECT>,
    pub(super) n: u32,
    pub(super) k: u32,
    /// Rows of an expert's weights.
    pub(super) rows: u32,
    pub(super) layout: u32,
    /// Number of the activation, and its scalars.
    pub(super) activation: (u32, f32, f32),
    /// Whether `partial` may stay in the second-level cache; see [`fused_wgmma`](super::fused_wgmma).
    pub(super) kept: bool,
    /// Pairs of a token.
    pub(super) slots: u32,
    /// Blocks that share rows, which take neighbouring tiles, and the place of this one.
    pub(super) share: u32,
    pub(super) rank: u32,
}

impl<T: TensorFloat, const SCALES: u32, const DIRECT: bool> Job<T, SCALES, DIRECT> {
    /// Item number `number`.
    #[inline(always)]
    pub(super) unsafe fn find(&self, number: u32) -> Item {
        let item = self.items.find(number, 0);
        Item { tile: item.tile * self.share + self.rank, ..item }
    }

    /// The same, or `striped`: of a block that shares nothing.
    #[inline(always)]
    unsafe fn find_of(&self, striped: bool, number: u32) -> Item {
        if striped { self.items.find_in_stripes(number, self.items.shares_before(number)) } else { self.find(number) }
    }

    /// For the weights of an item, if they come to this block only.
    #[inline(always)]
    pub(super) fn policy<const UP: bool>(&self, item: Item) -> Policy {
        if item.alone && (UP || self.kept) { Policy::FIRST } else { Policy::NORMAL }
    }

    /// Groups of columns.
    #[inline(always)]
    pub(super) fn groups(&self) -> u32 {
        self.k.div_ceil(GROUP as u32)
    }

    /// Rows of weights of a thread in 64 of them from `row` on: a gate and its value, or two outputs. Those beyond the last repeat it.
    #[inline(always)]
    pub(super) fn weight_rows<const UP: bool>(&self, row: u32) -> [u32; 2] {
        self.weight_rows_of::<UP>(row, warp::lane_id() / 4)
    }

    /// Rows of weights `g` and `g + 8` of 16 from `row` on.
    #[inline(always)]
    pub(super) fn weight_rows_of<const UP: bool>(&self, row: u32, g: u32) -> [u32; 2] {
        let last = self.n - 1;
        if !UP {
            return [(row + g).min(last), (row + g + 8).min(last)];
        }
        let output = (row / 2 + g).min(last);
        match self.layout {
            HALVES => [output, output + self.n],
            PLAIN => [output, output],
            _ => [2 * output, 2 * output + 1],
        }
    }

    /// The scales of an expert's weights.
    #[inline(always)]
    pub(super) fn scales_of(&self, bin: u32) -> Global<f32> {
        let each =
            if SCALES == BLOCKS { self.rows.div_ceil(GROUP as u32) * self.groups() } else { self.w_scale_expert };
        let (scales, index) =
            if bin < self.local { (self.w_scales, bin) } else { (self.shared_w_scales, bin - self.local) };
        scales.offset(index as usize * each as usize)
    }

    #[inline(always)]
    unsafe fn bias(&self, bin: u32, row: u32) -> f32 {
        let (bias, biased, index) = if bin < self.local {
            (self.bias, self.biased, bin)
        } else {
            (self.shared_bias, self.shared_biased, bin - self.local)
        };
        if biased { bias.get(index as usize * self.rows as usize + row as usize) } else { 0.0 }
    }

    /// The row of `x` or `h` of a place in the order of pairs.
    #[inline(always)]
    pub(super) unsafe fn row(&self, place: u32) -> u32 {
        if !DIRECT {
            return place;
        }
        // SAFETY: it is the number of slots, or 1.
        core::hint::assert_unchecked(self.x_divisor != 0);
        self.items.pair(place) / self.x_divisor
    }

    /// Of 16 rows the first 8 are gates, the others their values. Pairs of sums in a thread belong to neighbouring columns
    /// (tokens); a transposition in registers makes them neighbouring outputs. `pairs` says whose a column is, and `sums` are those of a
    /// group of 8.
    #[inline(always)]
    pub(super) unsafe fn store_up(
        &self,
        item: Item,
        row: u32,
        columns: usize,
        pairs: impl Fn(u32) -> u32,
        sums: impl Fn(usize) -> [f32; 4],
    ) {
        self.store_up_seen(item, row, columns, pairs, sums, |_, _| {});
    }

    /// The same; `see` sees two results, rounded, of a column of each group of 8, if they are stored: four neighbouring lanes have eight of the same column.
    #[inline(always)]
    pub(super) unsafe fn store_up_seen(
        &self,
        item: Item,
        row: u32,
        columns: usize,
        pairs: impl Fn(u32) -> u32,
        sums: impl Fn(usize) -> [f32; 4],
        mut see: impl FnMut(usize, u32),
    ) {
        let (g, t) = (warp::lane_id() / 4, warp::lane_id() % 4);
        let first = row / 2;
        let (kind, alpha, limit) = self.activation;
        let activation = Activation::new(kind, alpha, limit, self.layout != PLAIN);
        let [gate, value] = self.weight_rows::<true>(row);
        let gates = self.bias(item.bin, gate);
        let values = if self.layout == PLAIN { 0.0 } else { self.bias(item.bin, value) };
        for j in 0..columns / 8 {
            let sums = sums(j);
            let v = |c: usize| activation.gated(sums[c] + gates, sums[2 + c] + values);
            let [a, b] = T::pair_from_f32([v(0), v(1)]);
            let word = mma::movmatrix_trans(T::pack(a, b));
            let column = 8 * j as u32 + g;
            let at = pairs(column) as usize * self.n as usize + (first + 2 * t) as usize;
            if first < self.n && column < item.count {
                self.h.set_as::<u32>(at, word);
                see(j, word);
            }
        }
    }

    /// A thread has rows `g` and `g + 8` of two columns. Four lanes with neighbouring `g` swap sums until each has four
    /// neighbouring rows of one column, which are 16 bytes of `partial`, or 8 if they are rounded.
    #[inline(always)]
    pub(super) unsafe fn store_down<const SLOTS: u8>(
        &self,
        item: Item,
        row: u32,
        columns: usize,
        pairs: impl Fn(u32) -> (u32, f32),
        sums: impl Fn(usize) -> [f32; 4],
    ) {
        let lane = warp::lane_id();
        let (odd, high) = (lane & 4 != 0, lane & 8 != 0);
        let row = row + (lane & 8) + (lane & 16) / 4;
        let first = 2 * (lane % 4) + odd as u32;
        let mut bias = [0f32; 4];
        if row < self.n {
            for i in 0..4 {
                bias[i] = self.bias(item.bin, row + i as u32);
            }
        }
        for j in 0..columns / 8 {
            let mut v = sums(j);
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
            let (pair, scale) = pairs(column);
            let at = pair as usize * self.n as usize + row as usize;
            for i in 0..4 {
                v[i] = (v[i] + bias[i]) * scale;
            }
            let stored = row < self.n && column < item.count;
            let policy = if self.kept { Policy::LAST } else { Policy::NORMAL };
            if SLOTS != F32 {
                let rounded = GlobalMut::new(self.partial.ptr(0u32).cast::<T>());
                rounded.set_if_for(stored, at, B64(vec::from_f32::<T, 4>(v)), policy);
            } else {
                self.partial.set_if_for(stored, at, B128(v), policy);
            }
        }
    }
}

/// One of the products; see [`Args`]. `UP`: the first. Clusters: of `SHARE` blocks. Grid: any number of clusters; block: [`THREADS`]; shared
/// memory: [`shared_bytes`].
#[inline(always)]
unsafe fn fused_quant_wgmma<
    T: TensorFloat,
    const UP: bool,
    const TILES: usize,
    const PAIRS: usize,
    const LINES: usize,
    const STAGES: usize,
    const SHARE: u32,
    const SLOTS: u8,
>(
    h: *mut T,
    h_scales: *mut f32,
    partial: *mut f32,
    x_map: *const TensorMap,
    x_scales: *const f32,
    x_scale_group: usize,
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
    progress: *mut u32,
    left: *mut u32,
    stripe: u32,
) {
    let (tid, warp_id, lane) = (thread::thread_idx_x(), warp::warp_id(), warp::lane_id());
    let mut carver = Carver::new();
    let weights = carver.take_aligned::<u8>(STAGES * LINES * item_rows(TILES, PAIRS, UP) * STEP, 1024);
    let operands = carver.take_aligned::<u8>(STAGES * LINES * PAIRS * STEP, 1024);
    let factors = carver.take::<f32>(STAGES * LINES * PAIRS);
    let bars = carver.take::<u64>(const { Stages::<STAGES>::WORDS });
    let turns = carver.take::<u64>(if in_turn(PAIRS, UP) { GROUPS } else { 0 });
    // Two blocks have the 128 outputs of a scale.
    let quantises = const { UP && SHARE == 2 };
    let each = const { if UP && SHARE == 2 { 0 } else { GROUPS * PAIRS } };
    let ids = carver.take::<u32>(each);
    let scales = carver.take::<f32>(each);
    let quantiser = Quantiser::new(&mut carver, if quantises { const { quantised_pairs(PAIRS) } } else { 0 });
    let word = if UP { words } else { words.wrapping_add(1) };
    // Clusters of the second product are dealt theirs: they take 1 to 3 % longer if they draw. Unless some items are much smaller than others.
    let draws = const { UP || SHARE == 1 || is_tall(PAIRS) };
    let drawn = Drawn::new(&mut carver, draws, word, launch);
    // Who has its turn has searched while the other one multiplied.
    let tells = const { !in_turn(PAIRS, UP) };
    let found = Found::<FOUND>::new(&mut carver, tells);
    let stages = Stages::<STAGES>::new(bars.address(0u32)).shared_by(SHARE, 0);
    let rank = if SHARE > 1 { cluster::rank() } else { 0 };
    if SHARE > 1 {
        cluster::dims::<2>();
    }
    if tid == 0 {
        if draws {
            drawn.init();
        }
        if tells {
            found.init();
        }
        if quantises {
            quantiser.init();
        }
        if in_turn(PAIRS, UP) {
            for g in 0..GROUPS {
                mbarrier::init(turns.address(g), 4);
            }
        }
        // What is copied by the copy engine.
        stages.init_counted(1, const { if in_turn(PAIRS, UP) { 4 } else { 4 * GROUPS as u32 } });
        tma::prefetch_map(map);
        tma::prefetch_map(shared_map);
        tma::prefetch_map(x_map);
    }
    let outputs = if UP { item_rows(TILES, PAIRS, UP) as u32 / 2 } else { item_rows(TILES, PAIRS, UP) as u32 };
    let tiles = n.div_ceil(outputs).div_ceil(SHARE);
    if UP && PAIRS <= 64 && tid == 0 && tokens * slots >= 4 * bins {
        // As in `fused_wgmma`: the first item if every expert has one share.
        // SAFETY: there are outputs, hence tiles.
        core::hint::assert_unchecked(tiles != 0);
        let first = thread::block_idx_x() / SHARE;
        let (bin, tile) = (first / tiles, first % tiles * SHARE + rank);
        let mut at = 0;
        while bin < local && at < k.min(const { (STAGES * LINES * STEP) as u32 }) {
            let to = coordinates::<UP>(shuffled, n, at, tile * item_rows(TILES, PAIRS, UP) as u32, bin as i32);
            tma::prefetch_tensor::<5>(map, to);
            at += STEP as u32;
        }
    }
    // One warp speaks for a block.
    let progress =
        Progress::<1>::new(if quantises || !UP { progress } else { core::ptr::null_mut() }, thread::grid_dim_x());
    // SAFETY: see `Args`.
    core::hint::assert_unchecked(stripe != 0);
    let stripes = if is_striped(PAIRS) {
        let all = if UP { k.div_ceil(const { item_rows(TILES, PAIRS, UP) as u32 }) } else { tiles };
        Stripes::new(left, stripe, all)
    } else {
        Stripes::new(core::ptr::null_mut(), 1, 1)
    };
    if UP {
        // The sorted list may still be in the making.
        dependent_launch::wait();
        if stripes.are_kept() && thread::block_idx_x() == 0 && warp_id == 1 && lane < stripes.count {
            // Each consumer says once that it has stored all that it had. One without an item says so at once: before the next launch may start these words are there.
            stripes.begin(lane, thread::grid_dim_x() * GROUPS as u32);
            thread::device_fence();
        }
    }
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
    let items = Items::<false>::carve(&mut carver, sorted, bins, tiles, PAIRS as u32, false).cut_into(cut(PAIRS));
    let items = if is_tall(PAIRS) { items.filled() } else { items };
    let striped = const { in_turn(PAIRS, UP) };
    let items = if striped { items.in_stripes(stripe) } else { items };
    items.fill_together(pairs, 0);
    if UP && !progress.is_kept() {
        // After a barrier, since words for the sum may have been begun.
        dependent_launch::launch_dependents();
    }
    let job = Blocks::<T> {
        h: GlobalMut::new(h),
        partial: GlobalMut::new(partial),
        x_scales: Global::new(x_scales),
        x_divisor: 1,
        w_scales: Global::new(w_scales),
        shared_w_scales: Global::new(shared_w_scales),
        w_scale_expert: 0,
        w_scale_row: 0,
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
        share: SHARE,
        rank,
    };
    if UP && progress.is_kept() && warp_id == 1 {
        // By the warp that speaks for the block later on; nobody else waits for that.
        if lane == 0 {
            progress.begin(0);
        }
        warp::sync_warp(warp::FULL);
        dependent_launch::launch_dependents();
    }
    let (all, grid, groups) = (items.count(), thread::grid_dim_x() / SHARE, job.groups());
    let steps = steps_of::<UP, PAIRS, LINES>(groups);
    let first = thread::block_idx_x() / SHARE;
    if SHARE > 1 {
        // All blocks' mbarriers are there.
        cluster::sync();
    }

    if warp_id < (PRODUCERS / 32) as u32 {
        wgmma::decrease_registers::<40>();
        let mut ring = Ring::<STAGES>::new();
        // Weights, of a share whose products have so many columns.
        let fetch = |ring: Ring<STAGES>, item: Item, step: u32, wide: u32| {
            let (map, bin) = if item.bin < local { (map, item.bin) } else { (shared_map, item.bin - local) };
            let bar = stages.full(ring.stage);
            let bytes = const { (item_rows(TILES, PAIRS, UP) * STEP) as u32 };
            // Rows come in whole boxes.
            let all = bytes + wide.next_multiple_of(const { box_rows(PAIRS) as u32 }) * STEP as u32 + wide * 4;
            mbarrier::arrive_expect_tx(bar, LINES as u32 * all);
            unroll::<LINES>(|l| {
                let k0 = (step * LINES as u32 + l as u32) * STEP as u32;
                let at = coordinates::<UP>(shuffled, n, k0, item.tile * item_rows(TILES, PAIRS, UP) as u32, bin as i32);
                // Beyond the end of K come zeroes.
                let to = weights.address((ring.stage * LINES as u32 + l as u32) * bytes);
                let policy = if PAIRS <= 64 { job.policy::<UP>(item) } else { Policy::NORMAL };
                tma::load_tensor_for::<5>(to, map, at, bar, policy);
            });
        };
        let mut next = first;
        // Stages whose weights are on their way before `h` is there.
        let mut ahead = 0;
        // As in `fused_wgmma`, by a lane that has nothing else to do.
        let mut sequence = 0;
        let ask = (steps - 1).min(STAGES as u32);
        let tell = (ask + 2).min(steps - 1);
        let (mut asked, mut taken) = (false, 0);
        let settle = |sequence: u32, taken: u32| {
            if SHARE > 1 {
                drawn.settle_together::<SHARE>(sequence, taken, rank, grid, all);
            } else {
                drawn.settle(sequence, taken, grid, all);
            }
        };
        if !UP {
            if next < all {
                let item = job.find_of(striped, next);
                ahead = steps.min(STAGES as u32);
                if tid == 0 {
                    let mut at = ring;
                    for s in 0..ahead {
                        fetch(at, item, s, columns(PAIRS as u32, item.count));
                        at.advance();
                    }
                }
                if draws && tid == DRAWER {
                    if rank == 0 {
                        taken = drawn.take(0);
                    }
                    asked = true;
                }
            }
            if !progress.is_kept() {
                dependent_launch::wait();
            }
            dependent_launch::launch_dependents();
        }
        // Experts whose `h` is there.
        let mut there = 0;
        let x_scales = job.x_scales;
        // Each lane has a box of rows brought, one of them the scales.
        let each = const { box_rows(PAIRS) as u32 };
        let mut told = 0;
        while warp_id == 0 && next < all {
            let item = job.find_of(striped, next);
            if tells && tid == DRAWER {
                found.tell(told, Some(item));
                told += 1;
            }
            let wide = columns(PAIRS as u32, item.count);
            if !UP && progress.is_kept() && warp::warp_vote_ballot(warp::FULL, item.bin >= there) != 0 {
                there = progress.wait_beyond(item.bin);
                // What others stored the copy engine reads.
                tma::fence_async_global();
            }
            let mut step = 0;
            while step < steps {
                if draws && tid == DRAWER {
                    if step == ask && !asked && rank == 0 {
                        taken = drawn.take(sequence);
                    }
                    if step == tell {
                        settle(sequence, taken);
                        asked = false;
                    }
                }
                stages.wait_empty(ring);
                if ahead > 0 {
                    ahead -= 1;
                } else if tid == 0 {
                    fetch(ring, item, step, wide);
                }
                // Bytes are expected before they come.
                warp::sync_warp(warp::FULL);
                let bar = stages.full(ring.stage);
                unroll::<LINES>(|l| {
                    let (line, group) = (ring.stage * LINES as u32 + l as u32, step * LINES as u32 + l as u32);
                    if lane * each < wide && lane % SHARE == rank {
                        let to = operands.address(line * (PAIRS * STEP) as u32 + lane * each * STEP as u32);
                        let at = [(group * STEP as u32) as i32, (item.first + lane * each) as i32];
                        if SHARE > 1 {
                            tma::load_tensor_multicast::<2>(to, x_map, at, bar, const { (1u16 << SHARE) - 1 });
                        } else {
                            tma::load_tensor::<2>(to, x_map, at, bar);
                        }
                    }
                    if lane == 31 {
                        // Any will do beyond the end, where those of weights are zeroes.
                        let group = group.min(groups - 1) as usize;
                        let from = x_scales.ptr(group * x_scale_group + item.first as usize);
                        tma::copy_bulk(factors.address(line * PAIRS as u32), from, wide * 4, bar);
                    }
                });
                ring.advance();
                step += 1;
            }
            if draws {
                next = drawn.hear(sequence);
                sequence += 1;
            } else {
                next += grid;
            }
        }
        if in_turn(PAIRS, UP) && tid == DRAWER {
            // The other consumer waits for one more.
            drawn.tell(sequence, u32::MAX);
        }
        if quantises && warp_id > 0 {
            let (out, scales) = (GlobalMut::new(h.cast::<u8>()), GlobalMut::new(h_scales));
            let mut turn = 0;
            while next < all {
                let item = job.find_of(striped, next);
                let wide = columns(PAIRS as u32, item.count);
                let store = |turn: u32, wide: u32, item: Item| {
                    quantiser.store::<T, PAIRS>(out, scales, x_scale_group, n, rank, tid - 32, turn, wide, item)
                };
                if is_tall(PAIRS) {
                    let mut from = 0;
                    while from < item.count {
                        let count = (item.count - from).min(WAVE as u32);
                        let wave = Item { first: item.first + from, count, ..item };
                        store(turn, (wide - from).min(WAVE as u32), wave);
                        from += WAVE as u32;
                        turn += 1;
                    }
                } else {
                    store(sequence, wide, item);
                }
                next = drawn.hear(sequence);
                sequence += 1;
                if progress.is_kept() {
                    // One warp says what all three have stored.
                    thread::sync_named(4, QUANTISERS);
                    if warp_id == 1 {
                        let reached = if next < all { job.find_of(striped, next).bin } else { u32::MAX };
                        if lane == 0 {
                            progress.reach(0, reached);
                        }
                    }
                }
            }
            if tid == 32 && sequence == 0 && progress.is_kept() {
                // Nothing to do.
                progress.reach(0, u32::MAX);
            }
        }
        if !UP && progress.is_kept() {
            // Who waits for the end of this launch waits for that of the one before as well, even if there were no items.
            dependent_launch::wait();
        }
    } else {
        if in_turn(PAIRS, UP) {
            wgmma::increase_registers::<168>();
        } else {
            wgmma::increase_registers::<232>();
        }
        let group = warp_id / 4 - 1;
        // Which part of an item's rows is this consumer's.
        let within = if in_turn(PAIRS, UP) { 0 } else { group };
        let consumer = Consumer {
            weights: Descriptor::<K>::new(weights.address(if is_tall(PAIRS) {
                0
            } else {
                within * (TILES * 64 * STEP) as u32
            })),
            operands: Descriptor::<K>::new(operands.address(if is_tall(PAIRS) {
                group * (64 * STEP) as u32
            } else {
                0
            })),
            factors,
            ids: if quantises { ids } else { ids.offset(group * PAIRS as u32) },
            scales: if quantises { scales } else { scales.offset(group * PAIRS as u32) },
            stages: weights,
            stage_rows: operands,
            quantiser,
            turns,
            group,
            first_row: within * (TILES * 64) as u32 + warp_id % 4 * 16,
        };
        let mut ring = Ring::<STAGES>::new();
        let (mut next, mut sequence, mut turn) = (first, 0, 0);
        if in_turn(PAIRS, UP) && group == 1 {
            // The first item is the other one's.
            next = drawn.hear(0);
            sequence = 1;
            ring.skip(steps);
        }
        // Stripes of the second product all of whose results are stored.
        let mut stored = 0;
        let mut heard = 0;
        while next < all {
            let item = if tells { found.hear(heard) } else { Some(job.find_of(striped, next)) };
            let Some(item) = item else { break };
            heard += 1;
            let wide = columns(PAIRS as u32, item.count);
            if striped && stripes.are_kept() {
                // While the other one's products are under way.
                stored = stripes.leave(1 + group, stored, stripes.of(item.tile));
            }
            macro_rules! blocks {
                ($half:literal) => {
                    apart!(consumer.blocks::<T, [f32; $half], UP, TILES, PAIRS, LINES, STAGES, SHARE, SLOTS>(
                        &job, stages, &mut ring, next, sequence, item,
                    ))
                };
            }
            if is_tall(PAIRS) {
                macro_rules! tall {
                    ($waves:literal) => {
                        apart!(
                            consumer.tall::<T, $waves, UP, PAIRS, STAGES, SHARE, SLOTS>(
                                &job, stages, &mut ring, turn, item
                            )
                        )
                    };
                }
                match (item.count + const { (WAVE - 1) as u32 } - group * 64) / WAVE as u32 {
                    2 => tall!(2),
                    1 => tall!(1),
                    _ => tall!(0),
                }
                turn += item.count.div_ceil(WAVE as u32);
            } else if PAIRS > 64 {
                match wide {
                    32 => blocks!(16),
                    64 => blocks!(32),
                    96 => blocks!(48),
                    128 => blocks!(64),
                    144 => blocks!(72),
                    80 => blocks!(40),
                    112 => blocks!(56),
                    136 => blocks!(68),
                    160 if PAIRS >= 160 => blocks!(80),
                    _ => {}
                }
            } else {
                match wide {
                    8 => blocks!(4),
                    16 => blocks!(8),
                    32 => blocks!(16),
                    _ => blocks!(32),
                }
            }
            if in_turn(PAIRS, UP) {
                // The next item is the other one's.
                ring.skip(steps);
                next = drawn.hear(sequence + 1);
                sequence += 2;
            } else if draws {
                next = drawn.hear(sequence);
                sequence += 1;
            } else {
                next += grid;
            }
        }
        if striped && stripes.are_kept() {
            stripes.leave(1 + group, stored, stripes.count);
        }
    }
    if SHARE > 1 {
        warp::sync_warp(warp::FULL);
        // No block may end while another can still signal its mbarriers, or such a signal is on its way: so not relaxed.
        cluster::arrive();
        cluster::wait();
    }
}

/// Stages that consumers keep back at the end of an item: results go through them.
const fn kept_back(up: bool, pairs: usize) -> u32 {
    if !up && pairs > 64 && !is_tall(pairs) { GROUPS as u32 } else { 0 }
}

/// The steps of a product with so many groups of columns: as many as stages that are kept back, at least.
#[inline(always)]
fn steps_of<const UP: bool, const PAIRS: usize, const LINES: usize>(groups: u32) -> u32 {
    groups.div_ceil(LINES as u32).max(const { kept_back(UP, PAIRS) })
}

/// Pairs of a share, at most, of an expert that has several: with shares of 160 Mixtral's 4096 tokens took 2 % longer.
const fn cut(pairs: usize) -> u32 {
    if pairs > 144 && !is_tall(pairs) { 144 } else { pairs as u32 }
}

/// The columns of the products that a share of `count` pairs takes.
#[inline(always)]
const fn columns(pairs: u32, count: u32) -> u32 {
    if is_tall(pairs as usize) {
        count.next_multiple_of(64)
    } else if pairs > 64 {
        match count {
            0..=32 => 32,
            33..=64 => 64,
            65..=80 => 80,
            81..=96 => 96,
            97..=112 => 112,
            113..=128 => 128,
            129..=136 => 136,
            137..=144 => 144,
            _ => 160,
        }
    } else {
        match count {
            0..=8 => 8,
            9..=16 => 16,
            17..=32 => 32,
            _ => 64,
        }
    }
}

/// What a consumer warpgroup works with.
struct Consumer {
    weights: Descriptor<K>,
    operands: Descriptor<K>,
    /// Scales of the pairs, for each stage.
    factors: Shared<f32>,
    /// Pairs of the share, and their weights.
    ids: Shared<u32>,
    scales: Shared<f32>,
    /// Weights of the stages, and their rows.
    stages: Shared<u8>,
    stage_rows: Shared<u8>,
    quantiser: Quantiser,
    /// Of consumers that take items in turn: whose turn it is to multiply.
    turns: Shared<u64>,
    group: u32,
    /// The warp's first row within the tile.
    first_row: u32,
}

/// Where the first product's results wait to be quantised: both blocks of a cluster have the same pairs, and 64 of the 128 outputs of a scale each. Consumers lay
/// them out, a pair's side by side, and go on; warps of the producer that have nothing to fetch tell the other block the largest magnitude of each pair, and quantise and store them.
#[derive(Clone, Copy)]
struct Quantiser {
    /// Results of an item, [`PITCH`] bytes from pair to pair.
    tile: Shared<u8>,
    /// The largest magnitude of each pair in this block.
    own: Shared<f32>,
    /// The largest of the other block, of an item and of the one before.
    other: Shared<u32>,
    /// Whether an item's results are there; whether they are stored; and when `other` has come, twice.
    bars: Shared<u64>,
}

/// Threads that quantise: all of the producer's warps but the first.
const QUANTISERS: u32 = PRODUCERS as u32 - 32;
/// Outputs of an item of the first product whose results are quantised: half of a scale's.
const OUTPUTS: u32 = TILE_ROWS as u32 / 2;
/// From pair to pair of its results, in bytes: 16 more than those of 16 bits take, so lanes that access them together meet in no bank.
const PITCH: u32 = OUTPUTS * 2 + 16;

/// Shared memory of those.
const fn quantiser_bytes(pairs: usize) -> usize {
    pairs * (PITCH as usize + 3 * 4) + 4 * 8
}

impl Quantiser {
    #[inline(always)]
    unsafe fn new(carver: &mut Carver, pairs: usize) -> Self {
        Self {
            tile: carver.take_aligned::<u8>(pairs * PITCH as usize, 16),
            own: carver.take::<f32>(pairs),
            other: carver.take::<u32>(2 * pairs),
            bars: carver.take::<u64>(if pairs == 0 { 0 } else { 4 }),
        }
    }

    /// By one thread, before [`mbarrier::fence_init`].
    #[inline(always)]
    unsafe fn init(self) {
        mbarrier::init(self.bars.address(0u32), GROUPS as u32 * 128);
        mbarrier::init(self.bars.address(1u32), QUANTISERS);
        mbarrier::init(self.bars.address(2u32), 1);
        mbarrier::init(self.bars.address(3u32), 1);
    }

    /// By each consumer, before it lays out results of its `turn`-th item.
    #[inline(always)]
    unsafe fn wait_stored(self, turn: u32) {
        mbarrier::wait_parity(self.bars.address(1u32), (turn & 1) ^ 1);
    }

    /// By each consumer, when it has.
    #[inline(always)]
    unsafe fn laid_out(self) {
        mbarrier::arrive(self.bars.address(0u32));
    }

    /// By [`QUANTISERS`] threads, of which this is number `thread`: quantises and stores the `turn`-th item's results, of which there are `wide` columns. What is rounded, and how, is
    /// what [`fused_quant_rows`](super::fused_quant_rows) does.
    #[inline(always)]
    #[allow(clippy::too_many_arguments)]
    unsafe fn store<T: TensorFloat, const PAIRS: usize>(
        self,
        out: GlobalMut<u8>,
        scales: GlobalMut<f32>,
        scale_group: usize,
        n: u32,
        rank: u32,
        thread: u32,
        turn: u32,
        wide: u32,
        item: Item,
    ) {
        // Four neighbouring lanes have a pair, 16 outputs each.
        let (team, t) = (thread / 4, thread % 4);
        let step = const { QUANTISERS / 4 };
        let told = self.bars.address(2 + turn % 2);
        let (to, others) = (rank ^ 1, self.other.offset(turn % 2 * const { quantised_pairs(PAIRS) } as u32));
        let load = |column: u32| {
            let at = column * PITCH + t * 32;
            let [a, b] = [self.tile.get_as::<B128<u32, 4>>(at), self.tile.get_as::<B128<u32, 4>>(at + 16)];
            let mut v = [0f32; 16];
            unroll::<4>(|i| {
                [v[2 * i], v[2 * i + 1]] = T::unpack_f32(a.0[i]);
                [v[2 * i + 8], v[2 * i + 9]] = T::unpack_f32(b.0[i]);
            });
            v
        };
        if thread == 0 {
            mbarrier::arrive_expect_tx(told, wide * 4);
        }
        mbarrier::wait_parity(self.bars.address(0u32), turn & 1);
        let mut column = team;
        // The same for all lanes of a warp: eight columns.
        while column < wide {
            let mut largest = amax(load(column));
            unroll::<2>(|i| largest = float::max(largest, warp::shfl_xor(largest, 1 << i)));
            if t == 0 {
                self.own.set(column, largest);
                let other = cluster::map(others.address(column), to);
                cluster::store_async_u32(other, largest.to_bits(), cluster::map(told, to));
            }
            column += step;
        }
        // What one lane has found all read.
        warp::sync_warp(warp::FULL);
        mbarrier::wait_parity(told, (turn / 2) & 1);
        let first = item.tile * OUTPUTS + t * 16;
        let mut column = team;
        while column < wide {
            // All of a pair's lanes compute the same.
            let largest = float::max(self.own.get(column), f32::from_bits(others.get(column)));
            let scale = scale_for::<E4M3>(largest);
            let factor = float::recip(scale);
            let v = load(column);
            let four = |i: usize| E4M3::four([v[i] * factor, v[i + 1] * factor, v[i + 2] * factor, v[i + 3] * factor]);
            let words = B128([four(0), four(4), four(8), four(12)]);
            let (there, place) = (column < item.count, (item.first + column) as usize);
            out.set_if(there && first < n, place * n as usize + first as usize, words);
            if there && t == 0 && rank == 0 {
                scales.set((item.tile / 2) as usize * scale_group + place, scale);
            }
            column += step;
        }
        mbarrier::arrive(self.bars.address(1u32));
    }
}

/// Where a thread's scales of weights are in each of its tiles, for the steps of a product.
#[derive(Clone, Copy)]
struct WeightScales<const UP: bool, const TILES: usize> {
    scales: Global<f32>,
    at: [[u32; 2]; TILES],
}

impl<const UP: bool, const TILES: usize> WeightScales<UP, TILES> {
    #[inline(always)]
    unsafe fn new<T: TensorFloat>(job: &Blocks<T>, bin: u32, row: u32) -> Self {
        let mut at = [[0u32; 2]; TILES];
        unroll::<TILES>(|s| {
            at[s] = job.weight_rows::<UP>(row + 64 * s as u32).map(|row| row / GROUP as u32 * job.groups());
        });
        Self { scales: job.scales_of(bin), at }
    }

    /// Of rows from `row` on, 16 in each tile or all 128 of a single one, where a tile's gates lie in one block of scales, and its values.
    #[inline(always)]
    unsafe fn of_tile<T: TensorFloat>(job: &Blocks<T>, bin: u32, row: u32) -> Self {
        let mut at = [[0u32; 2]; TILES];
        unroll::<TILES>(|s| {
            at[s] = job.weight_rows_of::<UP>(row + 64 * s as u32, 0).map(|row| row / GROUP as u32 * job.groups());
        });
        Self { scales: job.scales_of(bin), at }
    }

    #[inline(always)]
    unsafe fn load(self, s: usize, step: u32) -> [f32; 2] {
        let first = self.scales.get(self.at[s][0] + step);
        // Rows of the second product lie in one block.
        [first, if UP { self.scales.get(self.at[s][1] + step) } else { first }]
    }

    /// Zeroes of steps beyond the `last`: products are zeroes there, and an infinite scale would make them NaN.
    #[inline(always)]
    unsafe fn load_or_zero(self, s: usize, step: u32, last: u32) -> [f32; 2] {
        self.load(s, step.min(last)).map(|scale| if step > last { 0.0 } else { scale })
    }
}

/// Scales of weights of a warp's rows in each of its tiles: a gate's and its value's. A lane has those of a group of columns, of 32 groups at a time, and the next ones are on their way long before they
/// are needed: they come from memory, all warps would wait for the same ones at the same time, and weights would come to a halt.
struct LaneScales<const UP: bool, const TILES: usize> {
    scales: WeightScales<UP, TILES>,
    last: u32,
    now: [[f32; 2]; TILES],
    next: [[f32; 2]; TILES],
}

impl<const UP: bool, const TILES: usize> LaneScales<UP, TILES> {
    /// For rows from `row` on, 16 in each tile. Eight outputs lie in one block of scales.
    #[inline(always)]
    unsafe fn new<T: TensorFloat>(job: &Blocks<T>, bin: u32, row: u32) -> Self {
        let none = [[0f32; 2]; TILES];
        let mut this =
            Self { scales: WeightScales::of_tile(job, bin, row), last: job.groups() - 1, now: none, next: none };
        this.next = this.load(0);
        this.advance(0);
        this
    }

    /// From group `first` on; 0 of those beyond the last, see [`WeightScales::load_or_zero`].
    #[inline(always)]
    unsafe fn load(&self, first: u32) -> [[f32; 2]; TILES] {
        let mut scales = [[0f32; 2]; TILES];
        let group = first + warp::lane_id();
        unroll::<TILES>(|s| scales[s] = self.scales.load_or_zero(s, group, self.last));
        scales
    }

    /// Before groups from `group` on, a multiple of 32.
    #[inline(always)]
    unsafe fn advance(&mut self, group: u32) {
        self.now = self.next;
        self.next = self.load(group + 32);
    }

    #[inline(always)]
    unsafe fn of(&self, s: usize, group: u32) -> [f32; 2] {
        let first = warp::shfl_idx(self.now[s][0], group % 32);
        [first, if UP { warp::shfl_idx(self.now[s][1], group % 32) } else { first }]
    }
}

/// What a thread knows of two of the share's columns: their pairs, and the weights of those.
#[derive(Clone, Copy)]
struct Columns {
    pair: [u32; 2],
    scale: [f32; 2],
}

impl Columns {
    #[inline(always)]
    unsafe fn new<T: TensorFloat, const UP: bool, const PAIRS: usize, const SLOTS: u8>(
        job: &Blocks<T>,
        item: Item,
    ) -> Self {
        let mine = thread::thread_idx_x() % 128;
        let (mut pair, mut scale) = ([0u32; 2], [0f32; 2]);
        unroll::<2>(|i| {
            let column = mine + 128 * i as u32;
            if 128 * i < PAIRS && column < item.count {
                let place = item.first + column;
                pair[i] = if UP { place } else { job.items.pair(place) };
                if !UP {
                    scale[i] = job.items.weight(place);
                    if SLOTS == ADDED {
                        // SAFETY: tokens with pairs have slots.
                        core::hint::assert_unchecked(job.slots != 0);
                        pair[i] /= job.slots;
                    }
                }
            }
        });
        Self { pair, scale }
    }
}

impl Consumer {
    /// By a consumer that takes items in turn, the `turn`-th of the block's: until the one before is multiplied. The phase of a stage says nothing to who is more than one behind.
    #[inline(always)]
    unsafe fn wait_turn(&self, turn: u32) {
        // The first turn is the first consumer's.
        mbarrier::wait_parity(self.turns.address(self.group), ((turn / 2) & 1) ^ (self.group == 0) as u32);
    }

    /// When it has multiplied.
    #[inline(always)]
    unsafe fn pass_turn(&self) {
        warp::sync_warp(warp::FULL);
        if warp::lane_id() == 0 {
            mbarrier::arrive(self.turns.address(1 - self.group));
        }
    }

    /// Multiplies an item with scales of blocks and finishes it.
    #[inline(always)]
    unsafe fn blocks<
        T: TensorFloat,
        A: Accumulator + AsRef<[f32]> + AsMut<[f32]>,
        const UP: bool,
        const TILES: usize,
        const PAIRS: usize,
        const LINES: usize,
        const STAGES: usize,
        const SHARE: u32,
        const SLOTS: u8,
    >(
        &self,
        job: &Blocks<T>,
        stages: Stages<STAGES>,
        ring: &mut Ring<STAGES>,
        number: u32,
        turn: u32,
        item: Item,
    ) {
        let (lane, groups) = (warp::lane_id(), job.groups());
        let steps = steps_of::<UP, PAIRS, LINES>(groups);
        // Of each lane, as the assembler must believe: a minimum in uniform registers comes late, and products wait behind it.
        let last_group = groups - 1 + integer::opaque(lane) / 32;
        let quantises = const { UP && SHARE == 2 };
        // What the end needs is on its way while the products run, where there are registers for it.
        let columns = if const { TILES == 1 || in_turn(PAIRS, UP) } && !quantises {
            Some(Columns::new::<T, UP, PAIRS, SLOTS>(job, item))
        } else {
            None
        };
        let row = item.tile * item_rows(TILES, PAIRS, UP) as u32 + self.first_row;
        let scales = WeightScales::<UP, TILES>::new(job, item.bin, row);
        // Of few pairs, which wait for memory and not for instructions.
        let mut lanes = if PAIRS <= 64 { Some(LaneScales::<UP, TILES>::new(job, item.bin, row)) } else { None };
        let (mut acc, mut partial) = ([A::zero(); TILES], [A::zero(); TILES]);
        if in_turn(PAIRS, UP) {
            self.wait_turn(turn);
        }
        // While one tile's are added, the next one's products run; of many pairs both have no room in registers.
        let together = const { A::N <= 32 };
        let mut step = 0u32;
        // Whether the stage to come is known to be full.
        let mut ready = false;
        let mut last = [ring.stage; 2];
        loop {
            if !ready {
                stages.wait_full(*ring);
            }
            if let Some(lanes) = &mut lanes
                && step > 0
                && step.is_multiple_of(const { 32 / LINES as u32 })
            {
                lanes.advance(step * LINES as u32);
            }
            for l in 0..LINES {
                let line = ring.stage * LINES as u32 + l as u32;
                let a = self.weights.offset(line * (item_rows(TILES, PAIRS, UP) * STEP) as u32);
                let b = self.operands.offset(line * (PAIRS * STEP) as u32);
                let group = step * LINES as u32 + l as u32;
                let mut now = [[0f32; 2]; TILES];
                for s in 0..TILES {
                    let from = if together { 0 } else { s };
                    let to = if together { TILES } else { s + 1 };
                    if s == from {
                        for s in from..to {
                            // On its way while the products run.
                            now[s] = match &lanes {
                                Some(lanes) => lanes.of(s, group),
                                // Only the second product of so many pairs has a step beyond the last.
                                None if const { UP && LINES == 1 } => scales.load(s, group.min(last_group)),
                                None => scales.load_or_zero(s, group, last_group),
                            };
                            let a = a.offset((s * 64 * STEP) as u32);
                            partial[s - from].multiply::<E4M3, 4, _, _>(a, b, false);
                        }
                    }
                    let partial = &mut partial[s - from];
                    if s + 1 < to {
                        wgmma::wait::<1>(partial);
                    } else {
                        wgmma::wait::<0>(partial);
                    }
                    if l == LINES - 1 && s == TILES - 1 {
                        // The answer comes while sums are added.
                        let mut next = *ring;
                        next.advance();
                        ready = stages.is_full(next);
                    }
                    // One address, and constants from there on.
                    let factors = self.factors.offset(line * PAIRS as u32 + 2 * (lane % 4));
                    for j in 0..const { A::N / 8 } {
                        let B64(pairs) = factors.get_as::<B64<f32, 2>>(8 * j);
                        for e in 0..4 {
                            let (by, i) = (pairs[e % 2] * now[s][e / 2], 4 * j + e);
                            let sum = acc[s].as_ref()[i];
                            acc[s].as_mut()[i] = float::fma(partial.as_ref()[i], by, sum);
                        }
                    }
                    // Before the next products overwrite them.
                    acc[s].pin();
                }
            }
            last = [last[1], ring.stage];
            ring.advance();
            step += 1;
            if step + const { kept_back(UP, PAIRS) } <= steps {
                // The copy engine writes the next scales by another proxy than that of the loads.
                tma::fence_async();
                stages.release(last[1], lane);
            }
            if step >= steps {
                break;
            }
        }
        if in_turn(PAIRS, UP) {
            self.pass_turn();
        }
        if quantises {
            self.quantiser.wait_stored(turn);
            if job.activation.0 == 0 && job.layout != PLAIN && !job.biased && !job.shared_biased {
                self.lay_out::<T, A, true>(job, item, &acc[0]);
            } else {
                self.lay_out::<T, A, false>(job, item, &acc[0]);
            }
            self.quantiser.laid_out();
        } else if const { kept_back(UP, PAIRS) == 2 } {
            // Each consumer takes one of the last two stages for its results, when both are done with them.
            thread::sync_named(1 + GROUPS as u32, GROUPS as u32 * 128);
            let (own, other) = if self.group == 0 { (last[0], last[1]) } else { (last[1], last[0]) };
            tma::fence_async();
            stages.release(other, lane);
            if let Some(columns) = columns {
                self.stage_down::<T, A, PAIRS, SLOTS>(job, own, item, columns, &acc[0]);
            }
            tma::fence_async();
            stages.release(own, lane);
        } else {
            self.finish::<T, A, UP, TILES, PAIRS, SLOTS>(job, number, item, columns, &acc);
        }
    }

    /// Multiplies an item with scales of blocks and finishes it: pairs are the 64-row side, weights the other. This consumer has 64 of each [`WAVE`] of pairs, `WAVES` in all,
    /// one after another with the same weights.
    #[inline(always)]
    unsafe fn tall<
        T: TensorFloat,
        const WAVES: usize,
        const UP: bool,
        const PAIRS: usize,
        const STAGES: usize,
        const SHARE: u32,
        const SLOTS: u8,
    >(
        &self,
        job: &Blocks<T>,
        stages: Stages<STAGES>,
        ring: &mut Ring<STAGES>,
        mut turn: u32,
        item: Item,
    ) {
        let (lane, groups) = (warp::lane_id(), job.groups());
        let (g, t) = (lane / 4, lane % 4);
        let last_group = groups - 1 + integer::opaque(lane) / 32;
        let quantises = const { UP && SHARE == 2 };
        // What the end needs is on its way while the products run.
        let columns = if quantises { None } else { Some(Columns::new::<T, UP, PAIRS, SLOTS>(job, item)) };
        let scales = WeightScales::<UP, 1>::of_tile(job, item.bin, item.tile * TILE_ROWS as u32);
        // The first of this thread's rows of a wave; another is 8 below.
        let own = self.group * 64 + warp::warp_id() % 4 * 16 + g;
        let mut sums = [[0f32; 64]; WAVES];
        let mut partial = <[f32; 64] as Accumulator>::zero();
        let mut step = 0;
        let mut ready = false;
        loop {
            if !ready {
                stages.wait_full(*ring);
            }
            let stage = ring.stage;
            let b = self.weights.offset(stage * (TILE_ROWS * STEP) as u32);
            let mut by = [[0f32; 2]; 2];
            let mut now = [0f32; 2];
            if WAVES > 0 {
                now = scales.load(0, step.min(last_group));
            }
            let factors = self.factors.offset(stage * PAIRS as u32 + own);
            for wave in 0..WAVES {
                let a = self.operands.offset(stage * (PAIRS * STEP) as u32 + (wave * WAVE * STEP) as u32);
                partial.multiply::<E4M3, 4, _, _>(a, b, false);
                for h in 0..2 {
                    let pair = factors.get((wave * WAVE + 8 * h) as u32);
                    by[h] = now.map(|weight| pair * weight);
                }
                wgmma::wait::<0>(&mut partial);
                if wave == WAVES - 1 {
                    let mut next = *ring;
                    next.advance();
                    ready = stages.is_full(next);
                }
                for e in 0..64 {
                    // Of 16 columns 8 are gates.
                    let by = by[e / 2 % 2][if UP { e / 4 % 2 } else { 0 }];
                    sums[wave][e] = float::fma(partial[e], by, sums[wave][e]);
                }
                // Before the next products overwrite them.
                sums[wave].pin();
            }
            // The copy engine writes the next scales by another proxy than that of the loads.
            tma::fence_async();
            stages.release(stage, lane);
            ring.advance();
            step += 1;
            if step >= groups {
                break;
            }
        }
        if quantises {
            for wave in 0..WAVES {
                let silu = job.activation.0 == 0 && job.layout != PLAIN && !job.biased && !job.shared_biased;
                let words = if silu {
                    self.activated::<T, true>(job, item, &sums[wave])
                } else {
                    self.activated::<T, false>(job, item, &sums[wave])
                };
                self.quantiser.wait_stored(turn);
                for q in 0..8 {
                    for h in 0..2 {
                        let at = (own + 8 * h as u32) * PITCH + (8 * q as u32 + 2 * t) * 2;
                        self.quantiser.tile.set_as::<u32>(at, words[2 * q + h]);
                    }
                }
                self.quantiser.laid_out();
                turn += 1;
            }
            // Of waves in which only the other consumer has pairs.
            if (WAVES * WAVE) < item.count as usize {
                self.quantiser.wait_stored(turn);
                self.quantiser.laid_out();
            }
        } else if let Some(Columns { pair, scale, .. }) = columns {
            let mine = thread::thread_idx_x() % 128;
            // Everybody is done with the last item's.
            thread::sync_named(1 + self.group, 128);
            unroll::<2>(|i| {
                self.ids.set(mine + 128 * i as u32, pair[i]);
                self.scales.set(mine + 128 * i as u32, scale[i]);
            });
            thread::sync_named(1 + self.group, 128);
            let row = item.tile * TILE_ROWS as u32;
            for wave in 0..WAVES {
                for h in 0..2 {
                    let column = own + (wave * WAVE + 8 * h) as u32;
                    let (pair, scale) = (self.ids.get(column), self.scales.get(column));
                    let there = column < item.count;
                    let at = pair as usize * job.n as usize;
                    for q in 0..8 {
                        let mut v = [0f32; 4];
                        for e in 0..4 {
                            let first = row + (16 * q + e / 2 * 8) as u32 + 2 * t + (e % 2) as u32;
                            let bias = if job.biased || job.shared_biased {
                                job.bias(item.bin, first.min(job.n - 1))
                            } else {
                                0.0
                            };
                            v[e] = (sums[wave][4 * (2 * q + e / 2) + 2 * h + e % 2] + bias) * scale;
                        }
                        // Lanes swap halves with their neighbours until each has four outputs side by side.
                        let odd = t % 2 == 1;
                        let first = row + (16 * q) as u32 + t % 2 * 8 + t / 2 * 4;
                        let (stored, at) = (there && first < job.n, at + first as usize);
                        if SLOTS != F32 {
                            let words = [T::pack_f32(v[0], v[1]), T::pack_f32(v[2], v[3])];
                            let got = warp::shfl_xor(if odd { words[0] } else { words[1] }, 1);
                            let two = if odd { [got, words[1]] } else { [words[0], got] };
                            if stored && SLOTS == ADDED {
                                let sums = job.partial.ptr(0u32).cast::<T>();
                                T::reduce_add_v4(sums.wrapping_add(at), two, Policy::LAST);
                            } else if stored {
                                GlobalMut::new(job.partial.ptr(0u32).cast::<T>()).set_as(at, B64(two));
                            }
                        } else {
                            let mut four = [0f32; 4];
                            for e in 0..2 {
                                let got = warp::shfl_xor(if odd { v[e] } else { v[2 + e] }, 1);
                                four[e] = if odd { got } else { v[e] };
                                four[2 + e] = if odd { v[2 + e] } else { got };
                            }
                            job.partial.set_if(stored, at, B128(four));
                        }
                    }
                }
            }
        }
    }

    /// Results of 64 pairs in the first product, two neighbouring ones a word: of 8 outputs after another those of this thread's two pairs.
    #[inline(always)]
    unsafe fn activated<T: TensorFloat, const SILU: bool>(
        &self,
        job: &Blocks<T>,
        item: Item,
        sums: &[f32; 64],
    ) -> [u32; 16] {
        let t = warp::lane_id() % 4;
        let (kind, alpha, limit) = job.activation;
        let activation = Activation::new(kind, alpha, limit, job.layout != PLAIN);
        let mut words = [0; 16];
        for q in 0..8 {
            let row = item.tile * TILE_ROWS as u32 + 16 * q as u32;
            let (mut gates, mut values) = ([0f32; 2], [0f32; 2]);
            if !SILU {
                for e in 0..2 {
                    let [gate, value] = job.weight_rows_of::<true>(row, 2 * t + e as u32);
                    gates[e] = job.bias(item.bin, gate);
                    values[e] = if job.layout == PLAIN { 0.0 } else { job.bias(item.bin, value) };
                }
            }
            for h in 0..2 {
                let v = |e: usize| {
                    let (gate, value) = (sums[8 * q + 2 * h + e], sums[8 * q + 4 + 2 * h + e]);
                    if SILU {
                        gate * float::fast::sigmoid(gate) * value
                    } else {
                        activation.gated(gate + gates[e], value + values[e])
                    }
                };
                let [a, b] = T::pair_from_f32([v(0), v(1)]);
                // Outputs beyond the last have no say.
                words[2 * q + h] = if row / 2 < job.n { T::pack(a, b) } else { 0 };
            }
        }
        words
    }

    /// What is done to the sums of an item.
    #[inline(always)]
    unsafe fn finish<
        T: TensorFloat,
        A: Accumulator + AsRef<[f32]>,
        const UP: bool,
        const TILES: usize,
        const PAIRS: usize,
        const SLOTS: u8,
    >(
        &self,
        job: &Blocks<T>,
        number: u32,
        item: Item,
        columns: Option<Columns>,
        acc: &[A; TILES],
    ) {
        let mine = thread::thread_idx_x() % 128;
        // Found once more, unless the columns are known: registers are short.
        let (item, columns) = if let Some(columns) = columns {
            (item, columns)
        } else {
            let item = job.find(number);
            (item, Columns::new::<T, UP, PAIRS, SLOTS>(job, item))
        };
        let Columns { pair, scale } = columns;
        let row = item.tile * item_rows(TILES, PAIRS, UP) as u32 + self.first_row;
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
            let row = row + s as u32 * 64;
            let sums = |j: usize| {
                let sums = acc[s].as_ref();
                [sums[4 * j], sums[4 * j + 1], sums[4 * j + 2], sums[4 * j + 3]]
            };
            if UP {
                job.store_up(item, row, A::N, |column| self.ids.get(column), sums);
            } else {
                let pairs = |column| (self.ids.get(column), self.scales.get(column));
                job.store_down::<SLOTS>(item, row, A::N, pairs, sums);
            }
        }
    }

    /// The end of an item of the second product with many pairs: results go by way of a stage, so that those of a pair are stored side by side, as many columns at a
    /// time as have room in its weights' part and in its rows' part, in turn.
    #[inline(always)]
    unsafe fn stage_down<T: TensorFloat, A: Accumulator + AsRef<[f32]>, const PAIRS: usize, const SLOTS: u8>(
        &self,
        job: &Blocks<T>,
        stage: u32,
        item: Item,
        columns: Columns,
        acc: &A,
    ) {
        let mine = thread::thread_idx_x() % 128;
        let Columns { pair, scale } = columns;
        // Everybody is done with the last item's.
        thread::sync_named(1 + self.group, 128);
        unroll::<2>(|i| {
            let column = mine + 128 * i as u32;
            if column < PAIRS as u32 {
                self.ids.set(column, pair[i]);
                self.scales.set(column, scale[i]);
            }
        });
        thread::sync_named(1 + self.group, 128);
        let row = item.tile * TILE_ROWS as u32 + self.first_row;
        let bias = job.weight_rows::<false>(row).map(|row| job.bias(item.bin, row));
        let buffers = [
            self.stages.offset(stage * (TILE_ROWS * STEP) as u32),
            self.stage_rows.offset(stage * (PAIRS * STEP) as u32),
        ];
        let fit = const {
            let bytes = if SLOTS != F32 { 2 } else { 4 };
            [staged_columns(TILE_ROWS, bytes), staged_columns(PAIRS, bytes)]
        };
        let mut from = 0;
        unroll::<4>(|round| {
            let to = (from + fit[round % 2]).min(A::N);
            if from < to {
                self.stage_round::<T, A, SLOTS>(job, item, [from, to], buffers[round % 2], bias, acc);
            }
            from = to;
        });
    }

    /// Columns `from..to` of [`stage_down`](Self::stage_down).
    #[inline(always)]
    unsafe fn stage_round<T: TensorFloat, A: Accumulator + AsRef<[f32]>, const SLOTS: u8>(
        &self,
        job: &Blocks<T>,
        item: Item,
        [from, to]: [usize; 2],
        buffer: Shared<u8>,
        bias: [f32; 2],
        acc: &A,
    ) {
        let lane = warp::lane_id();
        let (g, t) = (lane / 4, lane % 4);
        let within = self.first_row % 64;
        let bytes = const { if SLOTS != F32 { 2 } else { 4 } };
        let pitch = const { staged_pitch(if SLOTS != F32 { 2 } else { 4 }) } as u32;
        let sums = acc.as_ref();
        let value = |j: usize, e: usize, scale: [f32; 2]| {
            if 8 * j < A::N { (sums[4 * j + e] + bias[e / 2]) * scale[e % 2] } else { 0.0 }
        };
        for j in 0..const { A::N.div_ceil(16) } {
            // Two groups of 8 columns, of which the last may be beyond the end: there is room for it.
            if 16 * j >= from && 16 * j < to {
                let of = |i: usize| {
                    let B64(scale) = self.scales.get_as::<B64<f32, 2>>(8 * (2 * j + i) as u32 + 2 * t);
                    scale
                };
                let scales = [of(0), of(1)];
                let column = (16 * j - from) as u32;
                if SLOTS != F32 {
                    // Lane 8 i + r says where row r of the i-th of four matrices goes, transposed: of 16 rows the upper and the lower 8, of both groups.
                    let place = (column + lane / 16 * 8 + lane % 8) * pitch + (within + lane / 8 % 2 * 8) * bytes;
                    let mut words = [0; 4];
                    for i in 0..4 {
                        let (k, e) = (2 * j + i / 2, i % 2 * 2);
                        words[i] = T::pack_f32(value(k, e, scales[i / 2]), value(k, e + 1, scales[i / 2]));
                    }
                    mma::stmatrix_x4_trans(buffer.address(place), words);
                } else {
                    for i in 0..2 {
                        for e in 0..4 {
                            let column = column + (8 * i + e % 2) as u32 + 2 * t;
                            let place = column * pitch + (within + g + (e / 2 * 8) as u32) * bytes;
                            buffer.set_as::<f32>(place, value(2 * j + i, e, scales[i]));
                        }
                    }
                }
            }
        }
        thread::sync_named(1 + self.group, 128);
        // 16 bytes a lane, those of a pair by neighbouring ones.
        let lanes = const { if SLOTS != F32 { 8 } else { 16 } };
        let part = lane % lanes * 16;
        let first = item.tile * TILE_ROWS as u32 + self.group * 64 + part / bytes;
        let there = first < job.n;
        let step = 4 * (32 / lanes);
        let mut column = from as u32 + warp::warp_id() % 4 * (32 / lanes) + lane / lanes;
        let end = item.count.min(to as u32);
        // The same number of rounds for all lanes.
        let mut base = from as u32;
        while base < end {
            unroll::<4>(|_| {
                let stored = there && column < end;
                let from = column.min(to as u32 - 1) - from as u32;
                let at = self.ids.get(column.min(to as u32 - 1)) as usize * job.n as usize + first as usize;
                let place = from * pitch + part;
                if SLOTS != F32 {
                    let out = GlobalMut::new(job.partial.ptr(0u32).cast::<T>());
                    let values = buffer.get_as::<B128<T, 8>>(place);
                    if SLOTS != ADDED {
                        out.set_if(stored, at, values);
                    } else if stored {
                        T::reduce_add_v8(out.ptr(at), values.0, Policy::LAST);
                    }
                } else {
                    job.partial.set_if(stored, at, buffer.get_as::<B128<f32, 4>>(place));
                }
                column += step;
            });
            base += 4 * step;
        }
    }

    /// The end of an item of the first product whose results are [quantised](Quantiser). `SILU`: that is the activation, and there are no biases.
    #[inline(always)]
    unsafe fn lay_out<T: TensorFloat, A: Accumulator + AsRef<[f32]>, const SILU: bool>(
        &self,
        job: &Blocks<T>,
        item: Item,
        acc: &A,
    ) {
        let (g, t) = (warp::lane_id() / 4, warp::lane_id() % 4);
        let row = item.tile * TILE_ROWS as u32 + self.first_row;
        let (kind, alpha, limit) = job.activation;
        let activation = Activation::new(kind, alpha, limit, job.layout != PLAIN);
        let (mut gates, mut values) = (0.0, 0.0);
        if !SILU {
            let [gate, value] = job.weight_rows::<true>(row);
            gates = job.bias(item.bin, gate);
            values = if job.layout == PLAIN { 0.0 } else { job.bias(item.bin, value) };
        }
        // Outputs beyond the last have no say.
        let there = row / 2 < job.n;
        let first = g * PITCH + (self.first_row / 2 + 2 * t) * 2;
        let sums = acc.as_ref();
        for j in 0..const { A::N / 8 } {
            let v = |c: usize| {
                let (gate, value) = (sums[4 * j + c], sums[4 * j + 2 + c]);
                if SILU {
                    gate * float::fast::sigmoid(gate) * value
                } else {
                    activation.gated(gate + gates, value + values)
                }
            };
            let [a, b] = T::pair_from_f32([v(0), v(1)]);
            let word = mma::movmatrix_trans(T::pack(a, b));
            self.quantiser.tile.set_as::<u32>(first + 8 * j as u32 * PITCH, if there { word } else { 0 });
        }
    }
}

/// From column to column of results of so many bytes in a stage: 16 bytes more than a multiple of 128, so lanes that store together meet in no bank.
const fn staged_pitch(bytes: usize) -> usize {
    64 * bytes + 16
}

/// How many columns of those have room in so many lines of a stage, in steps of 16.
const fn staged_columns(lines: usize, bytes: usize) -> usize {
    lines * STEP / staged_pitch(bytes) / 16 * 16
}

entries! {
    /// Arguments of both products.
    pub struct Args<T>(
        /// The first product's results, quantised, `[.., intermediate]`: a row for each place of the sorted list. Not used by the
        /// second.
        h: *mut T,
        /// Their scales, `x_scale_group` from group to group.
        h_scales: *mut f32,
        /// `[tokens * slots, hidden]`: written by the second product; rounded results as elements, from the same place on; by kernels for results that are `added` `[tokens, hidden]` of elements and zeroed, which they are added to in any order.
        partial: *mut f32,
        /// Describes quantised rows of tokens, or for the second product of `h`, in the order of the sorted list, in boxes of [`STEP`] by [`box_rows`].
        x_map: TensorMap,
        /// Their scales, from group to group, a multiple of 4, from a multiple of 16 bytes on; [`BEYOND`] more can be read.
        x_scales: *const f32, x_scale_group: usize,
        /// The weights of the routed experts and of the shared ones; see [`fused_wgmma`](super::fused_wgmma).
        map: TensorMap, shared_map: TensorMap,
        /// Their scales: `[experts, rows / 128, k / 128]`.
        w_scales: *const f32, shared_w_scales: *const f32,
        /// `[local, rows]` or null; `[shared, rows]` or null.
        bias: *const f32, shared_bias: *const f32,
        /// From [`sort`](super::sort), in blocks of [`SORT_BLOCK`].
        sorted_ids: *const i32, sorted_weights: *const f32, offsets: *const i32, expert_counts: *const i32,
        /// See [`fused::Args`](super::fused::Args).
        topk_ids: *const i32, topk_weights: *const f32, expert_map: *const i32, tokens: u32,
        top_k: u32, slots: u32, experts: u32,
        /// Routed experts of this device; those and the shared ones, at most [`MAX_BINS`].
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
        /// [`WORDS`](super::items::WORDS), whatever is in them.
        words: *mut u64,
        /// A number that no other launch has, unless it repeats this one; the two products may have the same.
        launch: u64,
        /// [`WORDS`](super::progress::WORDS) for both products, or null: whatever is in them. With them the second, of as many blocks, starts while the first still
        /// runs; where the first quantises its results.
        progress: *mut u32,
        /// [`MAX_STRIPES`](super::progress::MAX_STRIPES) for both products, of as many blocks, or null: whatever is in them. With them, of few pairs, the sum begins
        /// with the second product's first stripe of columns while the next ones are computed.
        left: *mut u32,
        /// Tiles of a stripe of that second product, at least one: it computes all experts' columns of a stripe, then those of the next one.
        stripe: u32,
    );
    moe_fused_quant_wgmma_up_t64_blocks_e4m3_f16 { type T = f16; } [THREADS, 1; Sm90a] => fused_quant_wgmma::<T, true, 1, 64, 2, 4, 2, F32>;
    moe_fused_quant_wgmma_up_t64_blocks_e4m3_bf16 { type T = bf16; } [THREADS, 1; Sm90a] => fused_quant_wgmma::<T, true, 1, 64, 2, 4, 2, F32>;
    moe_fused_quant_wgmma_up_t160_blocks_e4m3_f16 { type T = f16; } [THREADS, 1; Sm90a] => fused_quant_wgmma::<T, true, 1, 160, 1, 5, 2, F32>;
    moe_fused_quant_wgmma_up_t160_blocks_e4m3_bf16 { type T = bf16; } [THREADS, 1; Sm90a] => fused_quant_wgmma::<T, true, 1, 160, 1, 5, 2, F32>;
    moe_fused_quant_wgmma_down_t64_blocks_e4m3 { type T = bf16; } [ROOMY, 1; Sm90a] => fused_quant_wgmma::<T, false, 2, 64, 2, 4, 1, F32>;
    moe_fused_quant_wgmma_down_rounded_t64_blocks_e4m3_f16 { type T = f16; } [ROOMY, 1; Sm90a] => fused_quant_wgmma::<T, false, 2, 64, 2, 4, 1, ROUNDED>;
    moe_fused_quant_wgmma_down_rounded_t64_blocks_e4m3_bf16 { type T = bf16; } [ROOMY, 1; Sm90a] => fused_quant_wgmma::<T, false, 2, 64, 2, 4, 1, ROUNDED>;
    moe_fused_quant_wgmma_down_t160_blocks_e4m3 { type T = bf16; } [THREADS, 1; Sm90a] => fused_quant_wgmma::<T, false, 1, 160, 1, 5, 2, F32>;
    moe_fused_quant_wgmma_down_added_t160_blocks_e4m3_f16 { type T = f16; } [THREADS, 1; Sm90a] => fused_quant_wgmma::<T, false, 1, 160, 1, 5, 2, ADDED>;
    moe_fused_quant_wgmma_down_rounded_t160_blocks_e4m3_f16 { type T = f16; } [THREADS, 1; Sm90a] => fused_quant_wgmma::<T, false, 1, 160, 1, 5, 2, ROUNDED>;
    moe_fused_quant_wgmma_down_added_t160_blocks_e4m3_bf16 { type T = bf16; } [THREADS, 1; Sm90a] => fused_quant_wgmma::<T, false, 1, 160, 1, 5, 2, ADDED>;
    moe_fused_quant_wgmma_down_rounded_t160_blocks_e4m3_bf16 { type T = bf16; } [THREADS, 1; Sm90a] => fused_quant_wgmma::<T, false, 1, 160, 1, 5, 2, ROUNDED>;
    moe_fused_quant_wgmma_up_t256_blocks_e4m3_f16 { type T = f16; } [THREADS, 1; Sm90a] => fused_quant_wgmma::<T, true, 1, 256, 1, 4, 2, F32>;
    moe_fused_quant_wgmma_up_t256_blocks_e4m3_bf16 { type T = bf16; } [THREADS, 1; Sm90a] => fused_quant_wgmma::<T, true, 1, 256, 1, 4, 2, F32>;
    moe_fused_quant_wgmma_down_t256_blocks_e4m3 { type T = bf16; } [THREADS, 1; Sm90a] => fused_quant_wgmma::<T, false, 1, 256, 1, 4, 2, F32>;
    moe_fused_quant_wgmma_down_added_t256_blocks_e4m3_f16 { type T = f16; } [THREADS, 1; Sm90a] => fused_quant_wgmma::<T, false, 1, 256, 1, 4, 2, ADDED>;
    moe_fused_quant_wgmma_down_rounded_t256_blocks_e4m3_f16 { type T = f16; } [THREADS, 1; Sm90a] => fused_quant_wgmma::<T, false, 1, 256, 1, 4, 2, ROUNDED>;
    moe_fused_quant_wgmma_down_added_t256_blocks_e4m3_bf16 { type T = bf16; } [THREADS, 1; Sm90a] => fused_quant_wgmma::<T, false, 1, 256, 1, 4, 2, ADDED>;
    moe_fused_quant_wgmma_down_rounded_t256_blocks_e4m3_bf16 { type T = bf16; } [THREADS, 1; Sm90a] => fused_quant_wgmma::<T, false, 1, 256, 1, 4, 2, ROUNDED>;
}
