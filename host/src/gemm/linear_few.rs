//! The path of linear layers on Hopper for few tokens: its kernels, which of them suits a shape, tensor maps and launch.

use super::linear_wgmma::{WgmmaTile, map};
use crate::device::{Geometry, Stream, Swizzle};
use crate::error::{Error, Result};
use crate::kernels::gemm::linear_few as kernel;
use crate::kernels::gemm::linear_fma;
use crate::kernels::gemm::linear_pair;
use crate::kernels::gemm::linear_rounds;
use crate::kernels::scales::NONE;
use cuda_std::{DType, Entry};
use std::cell::Cell;

const OP: &str = "linear";

/// The most tokens of [`LinearPath::Few`](super::LinearPath::Few).
pub const TOKENS: u32 = 512;

/// The most that always go this way, of what it takes.
pub const ALWAYS: u32 = 64;

/// Multiprocessors of an H200. On others the work is divided less evenly.
pub(super) const MULTIPROCESSORS: u32 = 132;

/// Clusters of four blocks, two to a multiprocessor, that run at the same time on an H200.
const FOURS: u32 = 60;

/// Whether blocks share more than 32 tokens: where that leaves few places of the last round of clusters empty. Otherwise they share K.
const fn shares(n: u32) -> bool {
    let clusters = n.div_ceil(4 * kernel::ROWS as u32);
    clusters * 10 >= clusters.next_multiple_of(FOURS) * 9
}

/// Whether [`linear_pair`] is the fastest way for 33 to 64 tokens: where there is one block for each multiprocessor, or nearly so. With fewer, each needs more bytes under way.
pub(super) const fn pairs(n: u32) -> bool {
    2304 <= n && n <= kernel::ROWS as u32 * MULTIPROCESSORS / 2
}

/// What the launch of a kernel needs to know.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    /// Consumer warpgroups, each with up to 64 rows of weights.
    pub(super) groups: u32,
    /// Tokens that a tile has room for.
    pub(super) tokens: u32,
    /// Stages of the ring.
    pub(super) stages: usize,
    /// Blocks that share K.
    pub(super) split: u32,
    /// Blocks with neighbouring rows of weights, which share tokens.
    pub(super) share: u32,
    /// Tiles of tokens.
    pub(super) tiles: u32,
    /// Whether it is [`linear_pair`].
    pub(super) pair: bool,
}

macro_rules! kernels {
    ($($Kernel:ident = $bf16:ident, $f16:ident: $groups:literal, $tokens:literal, $stages:literal, $split:literal, $share:literal;)*) => {
        /// The kernels, by their rows of weights, tokens and parts of K.
        #[derive(Clone, Copy)]
        enum Kernel {
            $($Kernel,)*
        }

        impl Kernel {
            const fn shape(self) -> Shape {
                let (groups, tokens, stages, split, share) = match self {
                    $(Self::$Kernel => ($groups, $tokens, $stages, $split, $share),)*
                };
                Shape { groups, tokens, stages, split, share, tiles: 1, pair: matches!(self, Self::T64Pair | Self::T128Pair) }
            }

            const fn entry(self, dtype: DType) -> Option<Entry<kernel::Args>> {
                let (bf16, f16) = match self {
                    $(Self::$Kernel => (kernel::$bf16::ENTRY, kernel::$f16::ENTRY),)*
                };
                match dtype {
                    DType::Bf16 => Some(bf16),
                    DType::F16 => Some(f16),
                    _ => None,
                }
            }
        }
    };
}
kernels! {
    T8 = linear_few_t8_bf16, linear_few_t8_f16: 1, 8, 10, 2, 1;
    T16 = linear_few_t16_bf16, linear_few_t16_f16: 1, 16, 10, 2, 1;
    T32 = linear_few_t32_bf16, linear_few_t32_f16: 1, 32, 9, 2, 1;
    T64 = linear_few_t64_bf16, linear_few_t64_f16: 1, 64, 12, 2, 1;
    T64Pair = linear_few_t64_pair_bf16, linear_few_t64_pair_f16: 1, 64, 8, 2, 1;
    T64Ring6 = linear_few_t64_r6_bf16, linear_few_t64_r6_f16: 1, 64, 6, 2, 1;
    T64Share4 = linear_few_t64_x4_bf16, linear_few_t64_x4_f16: 1, 64, 5, 1, 4;
    T72 = linear_few_t72_bf16, linear_few_t72_f16: 1, 72, 12, 2, 1;
    T96 = linear_few_t96_bf16, linear_few_t96_f16: 1, 96, 10, 2, 1;
    T128 = linear_few_t128_bf16, linear_few_t128_f16: 1, 128, 8, 2, 1;
    T128Pair = linear_few_t128_pair_bf16, linear_few_t128_pair_f16: 2, 128, 8, 2, 1;
    T160 = linear_few_t160_bf16, linear_few_t160_f16: 1, 160, 7, 2, 1;
    T192 = linear_few_t192_bf16, linear_few_t192_f16: 1, 192, 6, 2, 1;
    R128T72Split2 = linear_few_r128_t72_split2_bf16, linear_few_r128_t72_split2_f16: 2, 72, 8, 2, 1;
    R128T96Split2 = linear_few_r128_t96_split2_bf16, linear_few_r128_t96_split2_f16: 2, 96, 7, 2, 1;
    R128T128Split2 = linear_few_r128_t128_split2_bf16, linear_few_r128_t128_split2_f16: 2, 128, 6, 2, 1;
    R128T160Split2 = linear_few_r128_t160_split2_bf16, linear_few_r128_t160_split2_f16: 2, 160, 5, 2, 1;
    R128T208Split2 = linear_few_r128_t208_split2_bf16, linear_few_r128_t208_split2_f16: 2, 208, 4, 2, 1;
    R128T128Split3 = linear_few_r128_t128_split3_bf16, linear_few_r128_t128_split3_f16: 2, 128, 5, 3, 1;
    R128T128Split4 = linear_few_r128_t128_split4_bf16, linear_few_r128_t128_split4_f16: 2, 128, 5, 4, 1;
    R128T96 = linear_few_r128_t96_bf16, linear_few_r128_t96_f16: 2, 96, 8, 1, 1;
    R128T112 = linear_few_r128_t112_bf16, linear_few_r128_t112_f16: 2, 112, 7, 1, 1;
    R128T128 = linear_few_r128_t128_bf16, linear_few_r128_t128_f16: 2, 128, 7, 1, 1;
    R128T160 = linear_few_r128_t160_bf16, linear_few_r128_t160_f16: 2, 160, 6, 1, 1;
    R128T192 = linear_few_r128_t192_bf16, linear_few_r128_t192_f16: 2, 192, 5, 1, 1;
    R128T208 = linear_few_r128_t208_bf16, linear_few_r128_t208_f16: 2, 208, 5, 1, 1;
    R128T224 = linear_few_r128_t224_bf16, linear_few_r128_t224_f16: 2, 224, 5, 1, 1;
    R128T304 = linear_few_r128_t304_bf16, linear_few_r128_t304_f16: 2, 304, 4, 1, 1;
    R128T320 = linear_few_r128_t320_bf16, linear_few_r128_t320_f16: 2, 320, 4, 1, 1;
    R192T80 = linear_few_r192_t80_bf16, linear_few_r192_t80_f16: 3, 80, 6, 1, 1;
    R192T144 = linear_few_r192_t144_bf16, linear_few_r192_t144_f16: 3, 144, 5, 1, 1;
    R192T160 = linear_few_r192_t160_bf16, linear_few_r192_t160_f16: 3, 160, 5, 1, 1;
    R192T192 = linear_few_r192_t192_bf16, linear_few_r192_t192_f16: 3, 192, 4, 1, 1;
    R192T208 = linear_few_r192_t208_bf16, linear_few_r192_t208_f16: 3, 208, 4, 1, 1;
    R192T224 = linear_few_r192_t224_bf16, linear_few_r192_t224_f16: 3, 224, 4, 1, 1;
    R192T256 = linear_few_r192_t256_bf16, linear_few_r192_t256_f16: 3, 256, 4, 1, 1;
}

/// Those for more than [`ALWAYS`] tokens, of one tile or several.
const MANY: [Kernel; 28] = [
    Kernel::T72,
    Kernel::T96,
    Kernel::T128,
    Kernel::T160,
    Kernel::T192,
    Kernel::R128T72Split2,
    Kernel::R128T96Split2,
    Kernel::R128T128Split2,
    Kernel::R128T160Split2,
    Kernel::R128T208Split2,
    Kernel::R128T128Split3,
    Kernel::R128T128Split4,
    Kernel::R128T96,
    Kernel::R128T112,
    Kernel::R128T128,
    Kernel::R128T160,
    Kernel::R128T192,
    Kernel::R128T208,
    Kernel::R128T224,
    Kernel::R128T304,
    Kernel::R128T320,
    Kernel::R192T80,
    Kernel::R192T144,
    Kernel::R192T160,
    Kernel::R192T192,
    Kernel::R192T208,
    Kernel::R192T224,
    Kernel::R192T256,
];

impl Shape {
    /// Whether blocks take one tile after another, with all of K ([`linear_rounds`]).
    const fn in_rounds(self) -> bool {
        self.split == 1 && self.groups > 1
    }

    /// Boxes in which a tile's tokens come.
    const fn boxes(self) -> u32 {
        if self.in_rounds() { linear_rounds::boxes(self.tokens as usize) } else { self.share }
    }

    /// Rows of weights of a block: fewer than there is room for where multiprocessors then get equally many. Results do not depend on it. (Not
    /// where it was slower: more blocks load tokens then.)
    pub(super) const fn rows(self, n: u32) -> u32 {
        if self.pair {
            return linear_pair::ROWS as u32;
        }
        let (most, all) = (self.groups * kernel::ROWS as u32, n as u64 * (self.split * self.tiles) as u64);
        let each = all.div_ceil((most * MULTIPROCESSORS) as u64);
        let even = if each > 0 { all.div_ceil(each * MULTIPROCESSORS as u64) } else { 0 };
        let even = (even as u32).next_multiple_of(8);
        let fewer = if self.groups > 1 {
            // What has to wait for products brings tokens for as few blocks as possible.
            self.tiles == 1 && (self.split > 1 || self.tokens <= 160)
        } else {
            self.share == 1 && self.tokens <= ALWAYS && (self.split == 1 || each > 1)
        };
        if fewer { even } else { most }
    }

    /// Rows of a box of weights.
    pub(super) const fn w_box(self, n: u32) -> u32 {
        if self.pair { linear_pair::HALF as u32 } else { self.rows(n) }
    }

    /// Tokens of a tile, of `m` in all.
    pub(super) const fn tile(self, m: u32) -> u32 {
        let unit = 8 * self.boxes();
        if self.share > 1 { self.tokens } else { m.div_ceil(self.tiles * unit) * unit }
    }

    /// Steps whose weights a block asks for in the second-level cache while it waits for the launch before, of `n` outputs. Measured on an H200: four where all blocks are there at once, two of more blocks,
    /// 1 to 3 % less up to 64 tokens; nothing for more.
    pub(super) const fn early(self, n: u32) -> u32 {
        let blocks = n.div_ceil(self.rows(n) * self.share) * self.split * self.share;
        match self.tokens {
            65.. => 0,
            _ if blocks <= MULTIPROCESSORS => 4,
            _ => 2,
        }
    }

    /// How to launch it for `n` outputs, with scales of a kind of [`scales`](crate::kernels::scales), on a GPU with so many multiprocessors.
    pub(super) const fn geometry(self, n: u32, scales: u32, multiprocessors: u32) -> Geometry {
        let Self { groups, tokens, stages, split, share, tiles, .. } = self;
        let clusters = if n == 0 { 0 } else { n.div_ceil(self.rows(n) * share) * tiles };
        if self.in_rounds() {
            let blocks = if clusters < multiprocessors { clusters } else { multiprocessors };
            let shared = linear_rounds::shared_bytes(groups as usize, tokens as usize, stages);
            return Geometry::linear(blocks, linear_rounds::threads(groups)).shared_bytes(shared as u32).dependent();
        }
        let shared = if self.pair {
            linear_pair::shared_bytes(groups as usize, stages)
        } else {
            kernel::shared_bytes(groups as usize, tokens as usize, stages, split, scales)
        };
        Geometry::linear(clusters * split * share, kernel::threads(groups))
            .shared_bytes(shared as u32)
            .cluster(split * share)
            .dependent()
    }

    /// Blocks that run at the same time on an H200 with one to a multiprocessor: clusters of more than two do not fill it.
    const fn places(self) -> u32 {
        match self.split {
            3 => 39 * 3,
            4 => 30 * 4,
            _ => MULTIPROCESSORS,
        }
    }

    /// Picoseconds on an H200, roughly, for more than [`ALWAYS`] tokens: a model of measured times, whose order is what matters.
    ///
    /// A step along K takes as long as its products, or as bringing it; all steps no less than reading everything once from memory, and each of both slows
    /// the other down. What blocks load from the L2 cache, in all, costs something, and so do further rounds of tiles, the exchange, and the store.
    const fn estimate(self, m: u32, n: u32, k: u32) -> u64 {
        /// The time of so many bytes.
        const fn of(bytes: u64, rate: u64) -> u64 {
            bytes.saturating_mul(10_000) / (rate / 100)
        }
        let Self { groups, tokens, split, tiles, .. } = self;
        let model = if self.in_rounds() { &Model::ROUNDS } else { &Model::ONCE };
        let (rows, tokens) = (self.rows(n), tokens as u64);
        let blocks = (n.div_ceil(rows) * tiles * split) as u64;
        let rounds = blocks.div_ceil(self.places() as u64);
        let steps = k.div_ceil(kernel::STEP as u32).div_ceil(split) as u64;
        let (w, x) = (rows as u64 * 128, self.tile(m) as u64 * 128);
        let brought = of(w, model.weights[groups as usize - 1]) + of(x, model.tokens);
        let products = model.step + model.product[groups as usize - 1] * tokens;
        let work = (rounds * steps).saturating_mul(if brought > products { brought } else { products });
        let cache = of((blocks * steps).saturating_mul(w + x), model.cache);
        let (m, n, k) = (m as u64, n as u64, k as u64);
        let elements = (n * k).saturating_add(m * k + m * n);
        let memory = of(elements.saturating_mul(2), model.memory);
        let (more, less) = if work > memory { (work, memory) } else { (memory, work) };
        let exchange = if split > 1 { rounds * Model::EXCHANGE[split as usize - 2] } else { 0 };
        let store = model.store * groups as u64 * tokens;
        let others = less / 1000 * model.less + cache + model.launch + (rounds - 1) * model.round + exchange + store;
        more.saturating_add(others)
    }

    /// Whether it takes part in the choice for `[m, n]` results. What was never the fastest does not: many tiles of half the rows; or several rounds, with
    /// parts of K, or of blocks with far fewer rows than they have room for; more than two parts of K but for many tokens and a long K.
    const fn fits(self, m: u32, n: u32, k: u32) -> bool {
        let tile = self.tile(m);
        // Most are out by that, and the host has other things to do.
        if tile > self.tokens || 2 * tile < self.tokens || self.groups > 2 && 4 * tile < 3 * self.tokens {
            return false;
        }
        if self.split > 2 && (m <= 256 || n < 1024 || k < 8192) {
            return false;
        }
        let blocks = n.div_ceil(self.rows(n)) * self.tiles * self.split;
        // Room for few tokens beside many rows of weights pays for as many tiles as there may be, in one round or where others have no better room.
        if self.groups > 2 && self.tokens < 144 && (self.tiles != 4 || m <= 288 && blocks > self.places()) {
            return false;
        }
        let full =
            if self.tiles > 1 { self.split == 1 } else { 4 * self.rows(n) >= 3 * self.groups * kernel::ROWS as u32 };
        let few = self.tiles <= 2 * self.groups;
        few && (full || blocks <= self.places())
    }
}

/// Constants of [`Shape::estimate`]: bytes of a microsecond, and picoseconds.
struct Model {
    /// To a multiprocessor, of weights with so many consumers, and of tokens.
    weights: [u64; 3],
    tokens: u64,
    /// From memory, and from the L2 cache.
    memory: u64,
    cache: u64,
    /// Of a step, and of its products with a token and so many consumers.
    step: u64,
    product: [u64; 3],
    /// Thousandths of work or memory, whichever is less.
    less: u64,
    /// Of a launch, of a further round, of storing a column of sums.
    launch: u64,
    round: u64,
    store: u64,
}

impl Model {
    /// Of two, three and four parts of K.
    const EXCHANGE: [u64; 3] = [2_139_000, 2_500_000, 3_300_000];
    /// Blocks with one tile each.
    const ONCE: Self = Self {
        weights: [240_000, 73_800, 73_800],
        tokens: 590_000,
        memory: 4_856_000,
        cache: 66_500_000,
        step: 19_100,
        product: [1060, 2120, 3180],
        less: 135,
        launch: 1_022_000,
        round: 1_434_000,
        store: 355,
    };
    /// Blocks that take one tile after another.
    const ROUNDS: Self = Self {
        weights: [115_300; 3],
        tokens: 3_624_000,
        memory: 5_345_000,
        cache: 63_683_000,
        step: 100,
        product: [983, 1965, 3062],
        less: 240,
        launch: 2_046_000,
        round: 913_000,
        store: 80,
    };
}

/// The kernel for `[m, n]` results of depth `k`, and its number of tiles of tokens.
const fn choose(m: u32, n: u32, k: u32) -> (Kernel, Shape) {
    paired(modelled(m, n, k), m, n, k)
}

/// [`linear_pair`] instead of what has its work for 89 to 128 tokens, where it was the faster.
const fn paired(choice: (Kernel, Shape), m: u32, n: u32, k: u32) -> (Kernel, Shape) {
    match choice {
        (Kernel::T96 | Kernel::T128, Shape { tiles: 1, .. })
            if m > if k < 4096 { 112 } else { 88 } && n >= 3072 && pairs(n) =>
        {
            (Kernel::T128Pair, Kernel::T128Pair.shape())
        }
        _ => choice,
    }
}

/// [`choose`] by [`Shape::estimate`]. No outputs are as one.
const fn modelled(m: u32, n: u32, k: u32) -> (Kernel, Shape) {
    let n = if n == 0 { 1 } else { n };
    let few = match m {
        0..=8 => Kernel::T8,
        9..=16 => Kernel::T16,
        17..=32 => Kernel::T32,
        33..=64 if shares(n) => Kernel::T64Share4,
        33..=64 if pairs(n) => Kernel::T64Pair,
        // One block to a multiprocessor, or two.
        33..=64 if n < 2304 => Kernel::T64,
        _ => Kernel::T64Ring6,
    };
    let mut best = (few, few.shape());
    if m > ALWAYS && m <= TOKENS {
        let (mut least, mut i) = (u64::MAX, 0);
        while i < MANY.len() {
            let mut shape = MANY[i].shape();
            while shape.tiles <= 4 {
                if shape.fits(m, n, k) {
                    let time = shape.estimate(m, n, k);
                    if time < least {
                        (least, best) = (time, (MANY[i], shape));
                    }
                }
                shape.tiles += 1;
            }
            i += 1;
        }
    }
    best
}

/// What was found out about a shape.
#[derive(Clone, Copy)]
struct Choice {
    of: [u32; 3],
    kernel: Kernel,
    shape: Shape,
    suits: bool,
}

impl Choice {
    fn new(m: u32, n: u32, k: u32) -> Self {
        let n = n.max(1);
        let (kernel, shape) = modelled(m, n, k);
        let tile = || WgmmaTile::choose(m, n, k, MULTIPROCESSORS).estimate(m, n, k, MULTIPROCESSORS);
        // How long it may take beside what the model says of tiles, as both were measured.
        let most = match (m, shape.groups) {
            // A few blocks with few rows of weights each and a long way along K, for which tiles have more parts.
            (..=256, 1) if n <= 1536 && k >= 7168 => 0.92,
            (_, 1) if n <= 1536 && k >= 7168 => 1.0,
            // Rows of 16 KiB, as for tiles.
            (193.., 2) if shape.split == 2 && n <= 4096 && k.is_multiple_of(8192) => 0.87,
            // Enough work for power to be the limit.
            (241.., _) if n >= 16384 && k >= 4096 => 0.94,
            (..=256, _) if n >= 65536 => 1.04,
            (..=192, 1) => 1.2,
            (..=256, _) => 1.15,
            (_, 1) | (..=384, 3) => 1.09,
            (_, 3) => 0.94,
            _ => 1.04,
        };
        let suits = m <= ALWAYS || m <= TOKENS && (shape.estimate(m, n, k) as f64) < most * 1000.0 * tile();
        let (kernel, shape) = paired((kernel, shape), m, n, k);
        Self { of: [m, n, k], kernel, shape, suits }
    }

    /// [`Self::new`], or what it was: it takes more than a microsecond, and programs launch few shapes again and again.
    fn of(m: u32, n: u32, k: u32) -> Self {
        const SLOTS: usize = 64;
        thread_local! {
            static RECENT: [Cell<Option<Choice>>; SLOTS] = const { [const { Cell::new(None) }; SLOTS] };
        }
        RECENT.with(|recent| {
            let slot = &recent[(m ^ (n / 8) ^ (n >> 10) ^ (k >> 7)) as usize % SLOTS];
            match slot.get() {
                Some(choice) if choice.of == [m, n, k] => choice,
                _ => {
                    let choice = Self { of: [m, n, k], ..Self::new(m, n, k) };
                    slot.set(Some(choice));
                    choice
                }
            }
        })
    }
}

/// Whether `[m, n]` results of depth `k` should be faster this way than with any [`WgmmaTile`]: up to [`ALWAYS`] tokens, and up to [`TOKENS`] where
/// models of their times on an H200 say so.
pub fn suits(m: u32, n: u32, k: u32) -> bool {
    m <= ALWAYS || m <= TOKENS && Choice::of(m, n, k).suits
}

/// The entry for `[m, n]` results of depth `k` of at most [`TOKENS`] tokens.
pub const fn entry(dtype: DType, m: u32, n: u32, k: u32) -> Option<Entry<kernel::Args>> {
    if m > TOKENS { None } else { choose(m, n, k).0.entry(dtype) }
}

/// How to launch it for `[m, n]` results of depth `k` of at most [`TOKENS`] tokens, on an H200.
pub const fn geometry(m: u32, n: u32, k: u32) -> Geometry {
    choose(m, n, k).1.geometry(n, NONE, MULTIPROCESSORS)
}

/// Launches it on raw pointers (layer L1). Makes the tensor maps on the host; allocates nothing.
///
/// # Errors
/// [`Error::Unsupported`] for an element type or a number of tokens without an entry, those of [`Device::tensor_map`](crate::Device::tensor_map) and
/// [`Stream::launch`].
///
/// # Safety
/// As for [`linear_wgmma::launch`](super::linear_wgmma::launch).
pub unsafe fn launch(stream: &Stream, dtype: DType, args: &linear_fma::Args) -> Result<()> {
    let linear_fma::Args { y, x, w, bias, m, n, k, y_row, x_row, w_row, kind } = *args;
    let Choice { kernel, shape, .. } = Choice::of(m, n, k);
    let entry = if m > TOKENS { None } else { kernel.entry(dtype) };
    let entry = entry.ok_or_else(|| Error::Unsupported {
        op: OP,
        what: format!("the path Few takes {TOKENS} tokens of f16 or bf16 at most, and here are {m} of {dtype}; use LinearPath::Auto"),
    })?;
    let device = stream.device();
    let (tokens, rows) = (shape.tile(m), shape.w_box(n));
    let (x_box, w_box) = ([(tokens / shape.boxes()) as usize, kernel::STEP], [rows as usize, kernel::STEP]);
    let args = kernel::Args {
        x: map(device, dtype, x as usize, [m, k], x_row, x_box, Swizzle::B128)?,
        w: map(device, dtype, w as usize, [n, k], w_row, w_box, Swizzle::B128)?,
        y,
        bias,
        m,
        n,
        k,
        y_row,
        rows,
        tokens,
        tiles: shape.tiles,
        kind,
        early: shape.early(n),
    };
    // SAFETY: forwarded to the caller.
    unsafe { stream.launch(&entry, &shape.geometry(n, NONE, device.properties().multiprocessors), &args) }
}
