//! `y = epilogue(x · wᵀ + bias)` on Hopper's tensor cores, for many tokens.
//!
//! A block computes tiles of `TOKENS` tokens ([`ROWS`], or twice as many) by `N` outputs. Its first warpgroup is the producer: one thread has the copy
//! engine bring tiles of `x` and `w`, 64 elements deep, into a ring of stages ([`pipeline`](crate::pipeline)). The two
//! others are consumers: each multiplies 64 of the tokens, or twice 64, by all `N` outputs with `wgmma`, both operands in shared memory,
//! the sums in registers that the producer gave up. A finished tile is rounded, laid out in shared memory by `stmatrix`, and
//! stored by the copy engine, which also clips what lies outside of `y`; what lies outside of `x` and `w` it reads as zeros.
//! So no shape needs padding.
//!
//! **Many tiles** (`SPLIT` of 1): the grid is persistent. While consumers store a tile the producer is already loading the
//! next. Blocks of a cluster may have neighbouring tiles, `DOWN` of them below one another and `ACROSS` beside one another,
//! and then share what they load: each loads a part of the common tile of `w` or of `x` for all.
//!
//! **Turns** (`GROUPS` of 1): consumers have tiles of their own, a warpgroup all tokens of one, 64 after another with the same outputs. While one stores
//! its tile the other multiplies; so only the last tile of a block is stored with nothing else to do.
//!
//! **Few tiles**: `SPLIT` blocks of a cluster share a tile, each a part of K. Their sums meet in shared memory: the tile is
//! divided among the blocks by columns, each block sends what it has to the owner's shared memory (where the ring was), and
//! the owner adds the parts in their order. No workspace, no atomics, and the same bits always; the order of summation
//! depends on `k`, `N` and `SPLIT` only.
//!
//! **Scales** ([`Scales`]) of 8-bit operands are those of a row of `x` and a row of `w`, which a finished sum is multiplied with. For those that change every 128
//! elements of K see [`linear_quant_blocks`](super::linear_quant_blocks).
//!
//! **Bias and epilogues** would be `N / 2` copies of themselves in code if written out for a tile. They are written for one
//! chunk of columns, in a loop whose every round takes the first registers and moves the others down.

use super::rough;
use crate::TensorFloat;
use crate::pipeline::{Raster, Ring, Staged, Stages, multiply, part};
use crate::scales::{NONE, ROWS as ROW_SCALES, Scales};
use cuda_std::shared::Carver;
use cuda_std::tma::{self, Swizzle, TensorMap};
use cuda_std::vec::B128;
use cuda_std::wgmma::{self, Accumulator, Input, Sum};
use cuda_std::{
    Global, Shared, bf16, cluster, dependent_launch, entries, f16, float, integer, mbarrier, mma, thread, warp,
};

/// Tokens of most tiles.
pub const ROWS: usize = 128;
/// 16-bit elements of K in a stage: a line of the 128-byte swizzle.
pub const STEP: usize = 64;
/// Threads: a producer and two consumer warpgroups.
pub const THREADS: usize = 384;
/// Tokens of a consumer warpgroup.
pub const GROUP_ROWS: usize = 64;
/// Threads of the consumers.
pub(super) const CONSUMERS: u32 = 256;
/// Rows of tiles that run side by side.
pub(super) const BAND: u32 = 16;
/// The first of two named barriers by which consumers with tiles of their own take turns.
const ORDER: u32 = 3;
/// Bytes of a line of the swizzle.
pub(super) const LINE: u32 = 128;
/// Outputs that a consumer rounds and stores at once, which must divide the tile and be shared evenly if K is split.
pub const fn chunk(n: usize, split: usize) -> usize {
    if n.is_multiple_of(64 * split) {
        64
    } else if n.is_multiple_of(32 * split) {
        32
    } else {
        16
    }
}

/// Chunks that are stored at once: 64 columns, or 32 beside a ring with more tokens, unless K is split.
pub const fn batch(tokens: usize, n: usize, split: u32) -> usize {
    let columns = if tokens > ROWS { 32 } else { 64 };
    if split == 1 && chunk(n, 1) < columns { columns / chunk(n, 1) } else { 1 }
}

/// Rows of the boxes for the last of the tiles of `tile` rows that `rows` have: no more than there are, rounded up to 8, as rows outside of a tensor
/// cost the copy engine more time than others (an H200 took 11.9 µs for 1 token where it took 8.4 for 128, and 30 for 320 where it took 21 for 384).
pub const fn last_rows(rows: u32, tile: u32) -> u32 {
    let rest = rows % tile;
    if rest == 0 { tile } else { rest.next_multiple_of(8) }
}

/// One of the operands in global memory.
#[derive(Clone, Copy)]
pub(super) struct Operand {
    /// In boxes of a tile's rows, and in boxes of [`last_rows`].
    pub(super) map: *const TensorMap,
    pub(super) last: *const TensorMap,
    pub(super) rows: u32,
    pub(super) tile: u32,
}

impl Operand {
    /// How many rows the tile from row `row` on is loaded with, and the map for that.
    #[inline(always)]
    pub(super) fn boxes(self, row: u32) -> (u32, *const TensorMap) {
        if row + self.tile <= self.rows {
            (self.tile, self.map)
        } else {
            (if row < self.rows { last_rows(self.rows, self.tile) } else { 0 }, self.last)
        }
    }

    /// Zeroes what boxes leave of these stages, for a block whose first tile is at `row` and has so many steps; `absent`: others may have no rows
    /// at all. By all threads, which meet then where all that follows is a cluster's relaxed barrier, which orders no memory (`relaxed`). (Nobody needs the products of such rows, but there are some.)
    #[inline(always)]
    pub(super) unsafe fn clear<const STAGES: usize>(
        self,
        stages: Shared<u8>,
        row: u32,
        steps: u32,
        absent: bool,
        relaxed: bool,
    ) {
        let filled = if steps >= STAGES as u32 {
            // Later tiles find what the first left.
            self.boxes(row).0
        } else if absent {
            0
        } else {
            last_rows(self.rows, self.tile)
        };
        if filled < self.tile {
            for stage in 0..STAGES as u32 {
                let mut at = filled * LINE + thread::thread_idx_x() * 16;
                while at < self.tile * LINE {
                    stages.set_as(stage * (self.tile * LINE) + at, B128([0u32; 4]));
                    at += 16 * THREADS as u32;
                }
            }
            tma::fence_async();
            if relaxed {
                thread::sync_threads();
            }
        }
    }
}

/// Chunks of a tile.
pub const fn chunks(n: usize, split: usize) -> u32 {
    (n / chunk(n, split)) as u32
}

/// The chunks that the block with part `rank` of `split` stores.
#[inline(always)]
pub(super) const fn owned(n: usize, split: u32, rank: u32) -> (u32, u32) {
    let all = chunks(n, split as usize);
    let each = all.div_ceil(split);
    let (first, end) = (rank * each, (rank + 1) * each);
    (if first < all { first } else { all }, if end < all { end } else { all })
}

/// How a chunk lies in shared memory.
pub const fn chunk_swizzle(n: usize, split: usize) -> Swizzle {
    match chunk(n, split) {
        64 => Swizzle::B128,
        32 => Swizzle::B64,
        _ => Swizzle::B32,
    }
}

/// Dynamic shared memory for tiles of `tokens` by `n` outputs: the ring, two batches of chunks for each consumer, the sums of other blocks, the mbarriers.
pub const fn shared_bytes(tokens: usize, n: usize, stages: usize, split: usize) -> usize {
    let staging = 4 * GROUP_ROWS * chunk(n, split) * batch(tokens, n, split as u32) * 2;
    stages * (tokens + n) * STEP * 2 + staging + parts_words(n, split) * 4 + (2 * stages + 1) * 8
}

/// Words of shared memory for the sums that others send to a block.
pub const fn parts_words(n: usize, split: usize) -> usize {
    (split - 1) * owned_elements(n, split) * CONSUMERS as usize
}

/// Elements of a thread in the chunks of an owner.
const fn owned_elements(n: usize, split: usize) -> usize {
    (chunks(n, split) as usize).div_ceil(split) * chunk(n, split) / 2
}

/// `x`: `[m, k]` in boxes of [`STEP`] by `TOKENS / ACROSS`; `w`: `[n, k]` in boxes of [`STEP`] by `N / DOWN`; both with the
/// 128-byte swizzle. `x_last` and `w_last`: the same in boxes of [`last_rows`], for what is not shared. `y`: `[m, n]` in boxes of [`chunk`] by [`GROUP_ROWS`] with [`chunk_swizzle`]. `bias`: `[n]` or null.
///
/// `GROUPS` consumers share a tile: both (2), or one and one (1), with K in one part.
///
/// Clusters: of `DOWN * ACROSS * SPLIT` blocks. Grid: a cluster for each of its tiles if K is split, otherwise any number of
/// clusters; block: [`THREADS`]; shared memory: [`shared_bytes`].
#[inline(always)]
pub unsafe fn linear_wgmma<
    T: TensorFloat + Input,
    A: Accumulator + AsRef<[f32]>,
    const TOKENS: usize,
    const N: usize,
    const GROUPS: u32,
    const STAGES: usize,
    const DOWN: u32,
    const ACROSS: u32,
    const SPLIT: u32,
>(
    x: *const TensorMap,
    x_last: *const TensorMap,
    w: *const TensorMap,
    w_last: *const TensorMap,
    y: *const TensorMap,
    bias: *const T,
    m: u32,
    n: u32,
    k: u32,
    kind: u32,
) {
    scaled::<T, f32, T, A, NONE, TOKENS, N, GROUPS, STAGES, DOWN, ACROSS, SPLIT>(
        x,
        x_last,
        w,
        w_last,
        y,
        bias,
        Scales::none(),
        m,
        n,
        k,
        kind,
    )
}

/// [`linear_wgmma`] for operands of any type, whose products `P` have sums of type `S`, with scales. A step has 128 bytes of K.
#[inline(always)]
pub unsafe fn scaled<
    X: Input<S>,
    S: Sum,
    T: TensorFloat,
    P: Accumulator<S> + AsRef<[S]>,
    const SCALES: u32,
    const TOKENS: usize,
    const N: usize,
    const GROUPS: u32,
    const STAGES: usize,
    const DOWN: u32,
    const ACROSS: u32,
    const SPLIT: u32,
>(
    x: *const TensorMap,
    x_last: *const TensorMap,
    w: *const TensorMap,
    w_last: *const TensorMap,
    y: *const TensorMap,
    bias: *const T,
    scales: Scales<SCALES>,
    m: u32,
    n: u32,
    k: u32,
    kind: u32,
) {
    const { assert!(P::N == N && (GROUPS == 2 || GROUPS == 1 && SPLIT == 1)) };
    const { assert!(TOKENS == ROWS || TOKENS == 2 * ROWS && GROUPS == 2 && SPLIT == 1 && ACROSS == 1) };
    // How many times 64 tokens a consumer has.
    let waves = const { TOKENS / GROUP_ROWS / GROUPS as usize };
    let step_size = const { LINE / size_of::<X>() as u32 };
    let (sharing, blocks) = const { (DOWN * ACROSS, DOWN * ACROSS * SPLIT) };
    match blocks {
        1 => {}
        2 => cluster::dims::<2>(),
        3 => cluster::dims::<3>(),
        4 => cluster::dims::<4>(),
        _ => cluster::dims::<8>(),
    }
    let width = const { chunk(N, SPLIT as usize) * batch(TOKENS, N, SPLIT) };
    let (x_bytes, w_bytes) = (TOKENS as u32 * LINE, N as u32 * LINE);
    let mut carver = Carver::new();
    let xs = carver.take_aligned::<u8>(STAGES * TOKENS * LINE as usize, 1024);
    let ws = carver.take_aligned::<u8>(STAGES * N * LINE as usize, 1024);
    let staging = carver.take_aligned::<u32>(2 * GROUP_ROWS * width, 1024);
    let parts = carver.take::<u32>(const { parts_words(N, SPLIT as usize) });
    let bars = carver.take::<u64>(const { Stages::<STAGES>::WORDS + 1 });
    // Counts sums that come from other blocks.
    let came = bars.address(const { Stages::<STAGES>::WORDS as u32 });
    let (warp_id, lane) = (warp::warp_id(), warp::lane_id());
    // The block's place in its cluster: part of K, row, column.
    let rank = if blocks > 1 { cluster::rank() } else { 0 };
    let split = if SPLIT > 1 { rank / sharing } else { 0 };
    let (base, place) = (split * sharing, if sharing > 1 { rank % sharing } else { 0 });
    let (down, across) = (place / ACROSS, place % ACROSS);
    let stages = Stages::<STAGES>::new(bars.address(0u32)).shared_by(sharing, base);
    let raster = Raster {
        rows: m.div_ceil(TOKENS as u32 * DOWN),
        columns: n.div_ceil(N as u32 * ACROSS),
        band: const { BAND / DOWN },
    };
    let (first, stride) = (thread::block_idx_x() / blocks, thread::grid_dim_x() / blocks);
    let (k0, steps) = part(k.div_ceil(step_size), split, SPLIT);

    let of_x = Operand { map: x, last: x_last, rows: m, tile: TOKENS as u32 };
    let of_w = Operand { map: w, last: w_last, rows: n, tile: N as u32 };
    let origin = |tile: u32| {
        let (row, column) = raster.place(tile);
        ((row * DOWN + down) * TOKENS as u32, (column * ACROSS + across) * N as u32)
    };
    // What is shared comes in full boxes.
    // (Opaque, or the consumers would keep what it is computed from.)
    let (row, column) = origin(integer::opaque(first));
    if ACROSS == 1 {
        of_x.clear::<STAGES>(xs, row, steps, DOWN > 1, blocks > 1);
    }
    if DOWN == 1 {
        of_w.clear::<STAGES>(ws, column, steps, ACROSS > 1, blocks > 1);
    }
    if thread::thread_idx_x() == 0 {
        tma::prefetch_map(if ACROSS == 1 { of_x.boxes(row).1 } else { x });
        tma::prefetch_map(if DOWN == 1 { of_w.boxes(column).1 } else { w });
        tma::prefetch_map(y);
        if SPLIT > 1 {
            mbarrier::init(came, 1);
        }
        stages.init(4 * GROUPS);
        if SPLIT > 1 {
            mbarrier::arrive_expect_tx(came, Exchange::<N, SPLIT>::bytes(split));
        }
    }
    if blocks > 1 {
        cluster::arrive_relaxed();
        cluster::wait();
    } else {
        thread::sync_threads()
    }
    // What comes before is done; what comes after may prepare itself.
    dependent_launch::wait();
    dependent_launch::launch_dependents();

    if warp_id < 4 {
        // A producer of a part of K needs more than 24.
        if SPLIT == 1 {
            wgmma::decrease_registers::<24>();
        } else {
            wgmma::decrease_registers::<40>();
        }
        if warp_id == 0 && warp::elect_one() {
            let (xs, ws) = (xs.address(0u32), ws.address(0u32));
            // The blocks that take the same rows of x, and those that take the same rows of w.
            let x_blocks = ((1 << ACROSS) - 1) << (base + down * ACROSS);
            let w_blocks = (if DOWN > 1 { 1 | 1 << ACROSS } else { 1 }) << (base + across);
            let mut ring = Ring::<STAGES>::new();
            let mut tile = first;
            while tile < raster.count() {
                let (row, column) = origin(tile);
                let (x_rows, x) = if ACROSS == 1 { of_x.boxes(row) } else { (TOKENS as u32, x) };
                let (w_rows, w) = if DOWN == 1 { of_w.boxes(column) } else { (N as u32, w) };
                let (row, column) = (row as i32, column as i32);
                let mut step = 0;
                while step < steps {
                    let (stage, at) = (ring.stage, ((k0 + step) * step_size) as i32);
                    stages.acquire(ring, (x_rows + w_rows) * LINE);
                    let full = stages.full(stage);
                    // Of a cluster, one may have no tile.
                    if DOWN == 1 || x_rows > 0 {
                        load::<ACROSS>(xs + stage * x_bytes, x, at, row, TOKENS as u32, across, x_blocks, full);
                    }
                    if ACROSS == 1 || w_rows > 0 {
                        load::<DOWN>(ws + stage * w_bytes, w, at, column, N as u32, down, w_blocks, full);
                    }
                    ring.advance();
                    step += 1;
                }
                tile += stride;
            }
        }
        warp::sync_warp(!0);
    } else {
        if SPLIT == 1 {
            wgmma::increase_registers::<240>();
        } else {
            wgmma::increase_registers::<232>();
        }
        let group = warp_id / 4 - 1;
        // Its first row in its tile.
        let part = if GROUPS == 1 { 0 } else { group * const { TOKENS as u32 / 2 } };
        let a = Staged::new(xs.address(part * LINE), x_bytes, const { GROUP_ROWS as u32 * LINE });
        let b = Staged::new(ws.address(0u32), w_bytes, 0);
        let store = Store {
            y,
            bias: Global::new(bias),
            biased: !bias.is_null(),
            scales,
            staging: staging.offset(group * (GROUP_ROWS * width) as u32),
            n,
            kind,
            group,
            waves: 1,
        };
        let mut turn = 0;
        let mut ring = Ring::<STAGES>::new();
        let mut tile = first;
        if GROUPS == 1 && group > 0 {
            // The other's tile comes first.
            tile += stride;
            ring.skip(steps);
        }
        let corner = |tile: u32| {
            let (row, column) = origin(tile);
            (row + part, column)
        };
        // This thread's first row of a tile; the other is the 8th below.
        let own = warp_id % 4 * 16 + lane / 4;
        while tile < raster.count() {
            let (row, column) = corner(tile);
            if GROUPS == 1 && tile != first {
                // The other has seen all stages of the tile before. Earlier, a stage could be rounds away from the one that is
                // waited for, and parities do not tell those apart.
                thread::sync_named(ORDER + group, CONSUMERS);
            }
            let mut partial = [P::zero(); 2];
            let previous = multiply::<X, S, P, STAGES>(stages, &mut ring, steps, waves, [a, b], &mut partial, lane);
            if GROUPS == 1 && tile + stride < raster.count() {
                thread::arrive_named(ORDER + (group ^ 1), CONSUMERS);
            }
            // On its way during the last products.
            let (first_chunk, end_chunk) = owned(N, SPLIT, split);
            let bias = store.columns::<N, SPLIT>(column, first_chunk);
            let scale = store.column_scales::<N, SPLIT>(column, first_chunk);
            let rows = store.row_scales(row + own, m);
            wgmma::wait::<0>(&mut partial[0]);
            if waves > 1 {
                partial[1].pin();
            }
            if SPLIT == 1 {
                stages.release(previous, lane);
                for wave in 0..waves {
                    let mut sums = [0f32; 128];
                    for e in 0..const { N / 2 } {
                        sums[e] = partial[wave].as_ref()[e].to_f32();
                    }
                    let below = wave as u32 * GROUP_ROWS as u32;
                    let (bias, scale, rows) = if wave == 0 {
                        (bias, scale, rows)
                    } else {
                        (
                            store.columns::<N, 1>(column, 0),
                            store.column_scales::<N, 1>(column, 0),
                            store.row_scales(row + below + own, m),
                        )
                    };
                    turn ^= store.tile::<TOKENS, N, 1>(
                        sums,
                        bias,
                        scale,
                        rows,
                        row + below,
                        column,
                        0,
                        const { chunks(N, 1) },
                        turn,
                    );
                }
            } else {
                let exchange = Exchange::<N, SPLIT>::new(parts, split, sharing, place);
                exchange.send(partial[0].as_ref(), came);
                // Nobody writes to this block after that, which therefore may end.
                mbarrier::wait_parity(came, 0);
                let own = exchange.sum(partial[0].as_ref());
                store.tile::<TOKENS, N, SPLIT>(own, bias, scale, rows, row, column, first_chunk, end_chunk, 0);
            }
            tile += stride;
            if SPLIT > 1 {
                break;
            }
            if GROUPS == 1 {
                tile += stride;
                ring.skip(steps);
            }
        }
        if store.leads() {
            tma::wait_group_read::<0>();
        }
    }
    if sharing > 1 {
        warp::sync_warp(!0);
        // No block may end while another can still signal its mbarriers, or such a signal is on its way: so not relaxed.
        cluster::arrive();
        cluster::wait();
    }
}

/// Loads a tile of `lines` lines at element `at` of rows from `row` on, alone or as one of `SHARE` blocks that load a part
/// each for all `blocks`.
#[inline(always)]
unsafe fn load<const SHARE: u32>(
    tile: u32,
    map: *const TensorMap,
    at: i32,
    row: i32,
    lines: u32,
    share: u32,
    blocks: u16,
    full: u32,
) {
    if SHARE > 1 {
        let first = share * (lines / SHARE);
        tma::load_tensor_multicast::<2>(tile + first * LINE, map, [at, row + first as i32], full, blocks);
    } else {
        tma::load_tensor::<2>(tile, map, [at, row], full);
    }
}

/// Rounds and stores chunks of a tile.
pub(super) struct Store<T, const SCALES: u32> {
    pub(super) y: *const TensorMap,
    pub(super) bias: Global<T>,
    pub(super) biased: bool,
    pub(super) scales: Scales<SCALES>,
    /// Two chunks of this warpgroup.
    pub(super) staging: Shared<u32>,
    pub(super) n: u32,
    pub(super) kind: u32,
    pub(super) group: u32,
    /// A tile is so many, of [`ROWS`] rows each, below one another: the chunks of one follow those of the other.
    pub(super) waves: u32,
}

impl<T, const SCALES: u32> Clone for Store<T, SCALES> {
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}
impl<T, const SCALES: u32> Copy for Store<T, SCALES> {}

impl<T: TensorFloat, const SCALES: u32> Store<T, SCALES> {
    /// Whether this thread is the one of its warpgroup that has the copy engine store. All lanes of its warp are here.
    #[inline(always)]
    pub(super) fn leads(self) -> bool {
        (thread::thread_idx_x() / 32).is_multiple_of(4) && warp::elect_one()
    }

    /// The place of chunk `c` of `all` in its wave, and how many rows below the first wave that is.
    #[inline(always)]
    fn place(self, c: u32, all: u32) -> (u32, u32) {
        if self.waves == 1 {
            (c, 0)
        } else {
            let each = all / self.waves;
            (c % each, c / each * ROWS as u32)
        }
    }

    #[inline(always)]
    pub(super) fn sync(self) {
        thread::sync_named(1 + self.group, 128);
    }

    #[inline(always)]
    pub(super) fn pack(a: f32, b: f32) -> u32 {
        let [low, high] = T::pair_from_f32([a, b]);
        T::pack(low, high)
    }

    /// The chunks from `first` to `end` of the tile at (`row`, `column`), of which this thread has these sums, and this bias and these
    /// scales of the first; `rows` are the scales of its two rows. Batches of chunks take turns with the two buffers; `turn` says where the tile before left off.
    /// Returns whether this one leaves off at the other.
    #[inline(always)]
    pub(super) unsafe fn tile<const TOKENS: usize, const N: usize, const SPLIT: u32>(
        self,
        mut sums: [f32; 128],
        mut bias: [f32; 16],
        mut scale: [f32; 16],
        rows: [f32; 2],
        row: u32,
        column: u32,
        first: u32,
        end: u32,
        turn: u32,
    ) -> u32 {
        let elements = const { chunk(N, SPLIT as usize) / 2 };
        let several = const { batch(TOKENS, N, SPLIT) };
        let (buffer, words_of_chunk) = const {
            let words = (GROUP_ROWS * chunk(N, SPLIT as usize) / 2) as u32;
            (words * batch(TOKENS, N, SPLIT) as u32, words)
        };
        if !self.biased && self.kind == 0 {
            for b in
                0..const { chunks(N, SPLIT as usize).div_ceil(SPLIT).div_ceil(batch(TOKENS, N, SPLIT) as u32) as usize }
            {
                if first + ((b * several) as u32) < end {
                    self.free();
                }
                for c in b * several..(b + 1) * several {
                    if c < const { chunks(N, SPLIT as usize).div_ceil(SPLIT) as usize } && first + (c as u32) < end {
                        let next = self.column_scales::<N, SPLIT>(column, first + c as u32 + 1);
                        let mut words = [0u32; 16];
                        for i in 0..const { chunk(N, SPLIT as usize) / 4 } {
                            let at = c * elements + 2 * i;
                            let by = [rows[i % 2] * scale[i / 2 * 2], rows[i % 2] * scale[i / 2 * 2 + 1]];
                            words[i] = if SCALES == ROW_SCALES {
                                Self::pack(sums[at] * by[0], sums[at + 1] * by[1])
                            } else {
                                Self::pack(sums[at], sums[at + 1])
                            };
                        }
                        scale = next;
                        let place = (b as u32 + turn) % 2 * buffer + (c % several) as u32 * words_of_chunk;
                        self.lay::<N, SPLIT>(words, place);
                    }
                }
                if first + ((b * several) as u32) < end {
                    tma::fence_async();
                    self.sync();
                    if self.leads() {
                        for c in b * several..(b + 1) * several {
                            if c < const { chunks(N, SPLIT as usize).div_ceil(SPLIT) as usize }
                                && first + (c as u32) < end
                            {
                                let place = (b as u32 + turn) % 2 * buffer + (c % several) as u32 * words_of_chunk;
                                self.give::<N, SPLIT>(place, row, column, first + c as u32);
                            }
                        }
                        tma::commit_group();
                    }
                }
            }
            return const { chunks(N, SPLIT as usize).div_ceil(batch(TOKENS, N, SPLIT) as u32) % 2 };
        }
        let mut c = first;
        while c < integer::opaque(end) {
            // On its way while this chunk is worked on.
            let next = self.columns::<N, SPLIT>(column, c + 1);
            let mut values = [0f32; 32];
            for e in 0..const { chunk(N, SPLIT as usize) / 2 } {
                let place = e / 4 * 2 + e % 2;
                values[e] = if SCALES == ROW_SCALES {
                    float::fma(sums[e], rows[e / 2 % 2] * scale[place], bias[place])
                } else {
                    sums[e] + bias[place]
                };
            }
            rough::epilogues(self.kind, &mut values);
            let mut words = [0u32; 16];
            for i in 0..const { chunk(N, SPLIT as usize) / 4 } {
                words[i] = Self::pack(values[2 * i], values[2 * i + 1]);
            }
            self.free();
            let place = (c + turn) % 2 * buffer;
            self.lay::<N, SPLIT>(words, place);
            tma::fence_async();
            self.sync();
            if self.leads() {
                self.give::<N, SPLIT>(place, row, column, c);
                tma::commit_group();
            }
            // What the next round takes moves down, so that the rounds are one piece of code. (What is done moves up: if it
            // went away, LLVM would see that registers no longer change after some rounds, and peel those.)
            let done = sums;
            let count = const { chunks(N, SPLIT as usize).div_ceil(SPLIT) as usize * chunk(N, SPLIT as usize) / 2 };
            for e in 0..const { chunks(N, SPLIT as usize).div_ceil(SPLIT) as usize * chunk(N, SPLIT as usize) / 2 } {
                sums[e] = done[(e + elements) % count];
            }
            bias = next;
            // Not ahead of time: there are no registers for that.
            scale = self.column_scales::<N, SPLIT>(column, c + 1);
            c += 1;
        }
        const { chunks(N, SPLIT as usize) % 2 }
    }

    /// This thread's two columns of each group of 8 of the bias for chunk `c`, zeros without one.
    #[inline(always)]
    pub(super) unsafe fn columns<const N: usize, const SPLIT: u32>(self, column: u32, c: u32) -> [f32; 16] {
        let mut bias = [0f32; 16];
        if self.biased {
            let c = self.place(c, const { chunks(N, SPLIT as usize) }).0;
            let at = column + c * const { chunk(N, SPLIT as usize) as u32 } + 2 * (warp::lane_id() % 4);
            // Or with chunks of several waves each of these would be kept in a register.
            let at = if self.waves > 1 { integer::opaque(at) } else { at };
            // Columns beyond the last repeat it, and are not stored: loads behind a branch would wait for one another.
            for i in 0..const { chunk(N, SPLIT as usize) / 4 } {
                let at = at + (i as u32 / 2 * 8 + i as u32 % 2);
                bias[i] = self.bias.get(at.min(self.n - 1)).to_f32();
            }
        }
        bias
    }

    /// The scales of the columns that [`columns`](Self::columns) has the bias of.
    #[inline(always)]
    pub(super) unsafe fn column_scales<const N: usize, const SPLIT: u32>(self, column: u32, c: u32) -> [f32; 16] {
        let mut scales = [0f32; 16];
        if SCALES == ROW_SCALES {
            let at = column + c * const { chunk(N, SPLIT as usize) as u32 } + 2 * (warp::lane_id() % 4);
            for i in 0..const { chunk(N, SPLIT as usize) / 4 } {
                let at = at + (i as u32 / 2 * 8 + i as u32 % 2);
                scales[i] = self.scales.w(at.min(self.n - 1), 0);
            }
        }
        scales
    }

    /// The scales of row `row` and the 8th below, of `m`.
    #[inline(always)]
    pub(super) unsafe fn row_scales(self, row: u32, m: u32) -> [f32; 2] {
        if SCALES == ROW_SCALES {
            [self.scales.x(row.min(m - 1), 0), self.scales.x((row + 8).min(m - 1), 0)]
        } else {
            [1.0; 2]
        }
    }

    /// Waits until the buffer of the chunk before the last has been read.
    #[inline(always)]
    pub(super) unsafe fn free(self) {
        if self.leads() {
            tma::wait_group_read::<1>();
        }
        self.sync();
    }

    /// Lays this thread's results of a chunk, two to a word, in the staging's words from `place` on, which are free.
    #[inline(always)]
    pub(super) unsafe fn lay<const N: usize, const SPLIT: u32>(self, words: [u32; 16], place: u32) {
        let width = const { chunk(N, SPLIT as usize) } as u32;
        let swizzle = const { chunk_swizzle(N, SPLIT as usize) };
        let lane = warp::lane_id();
        let buffer = self.staging.address(place);
        // Four 8x8 matrices: upper and lower half of a warp's rows, of two neighbouring groups of 8 columns.
        let line = warp::warp_id() % 4 * 16 + lane % 16;
        for j in 0..const { chunk(N, SPLIT as usize) / 16 } {
            let at = swizzle.apply(line * (2 * width) + (2 * j as u32 + lane / 16) * 16);
            mma::stmatrix_x4(buffer + at, [words[4 * j], words[4 * j + 1], words[4 * j + 2], words[4 * j + 3]]);
        }
    }

    /// Has the copy engine store chunk `c` from there, by one thread, after a fence and a barrier.
    #[inline(always)]
    pub(super) unsafe fn give<const N: usize, const SPLIT: u32>(self, place: u32, row: u32, column: u32, c: u32) {
        let width = const { chunk(N, SPLIT as usize) } as u32;
        let buffer = self.staging.address(place);
        let (c, below) = self.place(c, const { chunks(N, SPLIT as usize) });
        tma::store_tensor::<2>(self.y, [(column + c * width) as i32, (row + below) as i32], buffer);
    }
}

/// The parts of a tile's sums on their way between the blocks of a cluster.
#[derive(Clone, Copy)]
pub(super) struct Exchange<const N: usize, const SPLIT: u32> {
    /// What the others send to this block, in the same place of all.
    parts: Shared<u32>,
    /// This block's part.
    rank: u32,
    /// Blocks with the same part, and this one's number among them.
    sharing: u32,
    place: u32,
    /// This thread.
    mine: u32,
}

impl<const N: usize, const SPLIT: u32> Exchange<N, SPLIT> {
    const OWNED: usize = owned_elements(N, SPLIT as usize);

    #[inline(always)]
    pub(super) fn new(parts: Shared<u32>, rank: u32, sharing: u32, place: u32) -> Self {
        Self { parts, rank, sharing, place, mine: thread::thread_idx_x() - 128 }
    }

    /// Where element `e` of the owner's, from block `from`, is in the owner's shared memory.
    #[inline(always)]
    pub(super) fn index(self, owner: u32, from: u32, e: usize) -> u32 {
        let slot = if from > owner { from - 1 } else { from };
        (slot * Self::OWNED as u32 + e as u32) * CONSUMERS + self.mine
    }

    /// How many bytes the others send to the block with part `rank`.
    #[inline(always)]
    pub(super) fn bytes(rank: u32) -> u32 {
        let left = (N as u32 / 2).saturating_sub(rank * Self::OWNED as u32);
        left.min(Self::OWNED as u32) * const { (SPLIT - 1) * CONSUMERS * 4 }
    }

    /// Sends what others own; their mbarriers at `came` count it. (A barrier of the cluster that publishes ordinary stores would wait for
    /// `MEMBAR.ALL.GPU`.)
    #[inline(always)]
    pub(super) unsafe fn send<S: Sum>(self, sums: &[S], came: u32) {
        for owner in 0..SPLIT {
            if owner != self.rank {
                let there = |address| cluster::map(address, owner * self.sharing + self.place);
                let (to, came) = (there(self.parts.address(self.index(owner, self.rank, 0))), there(came));
                for e in 0..const { chunks(N, SPLIT as usize).div_ceil(SPLIT) as usize * chunk(N, SPLIT as usize) / 2 }
                {
                    let i = owner as usize * Self::OWNED + e;
                    if i < N / 2 {
                        cluster::store_async_u32(to + 4 * CONSUMERS * e as u32, sums[i].to_bits(), came);
                    }
                }
            }
        }
    }

    /// The sums that this block owns, all parts added in their order.
    #[inline(always)]
    pub(super) unsafe fn sum<S: Sum>(self, sums: &[S]) -> [f32; 128] {
        let mut own = [0f32; 128];
        for owner in 0..SPLIT {
            if owner == self.rank {
                for e in 0..const { chunks(N, SPLIT as usize).div_ceil(SPLIT) as usize * chunk(N, SPLIT as usize) / 2 }
                {
                    let i = owner as usize * Self::OWNED + e;
                    if i < N / 2 {
                        let mut total = S::default();
                        for from in 0..SPLIT {
                            let value = if from == owner {
                                sums[i]
                            } else {
                                S::from_bits(self.parts.get(self.index(owner, from, e)))
                            };
                            total = if from == 0 { value } else { total.plus(value) };
                        }
                        own[e] = total.to_f32();
                    }
                }
            }
        }
        own
    }
}

entries! {
    /// Arguments of every `linear_wgmma_*` entry; see [`linear_wgmma`].
    pub struct Args<T>(
        x: TensorMap, x_last: TensorMap, w: TensorMap, w_last: TensorMap, y: TensorMap, bias: *const T, m: u32, n: u32, k: u32, kind: u32,
    );
    linear_wgmma_n256_bf16 { type T = bf16; } [384, 1; Sm90a] => linear_wgmma::<T, [f32; 128], 128, 256, 2, 4, 1, 1, 1>;
    linear_wgmma_n256_f16 { type T = f16; } [384, 1; Sm90a] => linear_wgmma::<T, [f32; 128], 128, 256, 2, 4, 1, 1, 1>;
    linear_wgmma_n256_w2_bf16 { type T = bf16; } [384, 1; Sm90a] => linear_wgmma::<T, [f32; 128], 128, 256, 2, 4, 2, 1, 1>;
    linear_wgmma_n256_w2_f16 { type T = f16; } [384, 1; Sm90a] => linear_wgmma::<T, [f32; 128], 128, 256, 2, 4, 2, 1, 1>;
    linear_wgmma_n224_bf16 { type T = bf16; } [384, 1; Sm90a] => linear_wgmma::<T, [f32; 112], 128, 224, 2, 4, 1, 1, 1>;
    linear_wgmma_n224_f16 { type T = f16; } [384, 1; Sm90a] => linear_wgmma::<T, [f32; 112], 128, 224, 2, 4, 1, 1, 1>;
    linear_wgmma_n192_bf16 { type T = bf16; } [384, 1; Sm90a] => linear_wgmma::<T, [f32; 96], 128, 192, 2, 4, 1, 1, 1>;
    linear_wgmma_n192_f16 { type T = f16; } [384, 1; Sm90a] => linear_wgmma::<T, [f32; 96], 128, 192, 2, 4, 1, 1, 1>;
    linear_wgmma_turns_n176_bf16 { type T = bf16; } [384, 1; Sm90a] => linear_wgmma::<T, [f32; 88], 128, 176, 1, 5, 1, 1, 1>;
    linear_wgmma_turns_n176_f16 { type T = f16; } [384, 1; Sm90a] => linear_wgmma::<T, [f32; 88], 128, 176, 1, 5, 1, 1, 1>;
    linear_wgmma_turns_n160_bf16 { type T = bf16; } [384, 1; Sm90a] => linear_wgmma::<T, [f32; 80], 128, 160, 1, 5, 1, 1, 1>;
    linear_wgmma_turns_n160_f16 { type T = f16; } [384, 1; Sm90a] => linear_wgmma::<T, [f32; 80], 128, 160, 1, 5, 1, 1, 1>;
    linear_wgmma_turns_n144_bf16 { type T = bf16; } [384, 1; Sm90a] => linear_wgmma::<T, [f32; 72], 128, 144, 1, 5, 1, 1, 1>;
    linear_wgmma_turns_n144_f16 { type T = f16; } [384, 1; Sm90a] => linear_wgmma::<T, [f32; 72], 128, 144, 1, 5, 1, 1, 1>;
    linear_wgmma_t256_n144_bf16 { type T = bf16; } [384, 1; Sm90a] => linear_wgmma::<T, [f32; 72], 256, 144, 2, 4, 1, 1, 1>;
    linear_wgmma_t256_n144_f16 { type T = f16; } [384, 1; Sm90a] => linear_wgmma::<T, [f32; 72], 256, 144, 2, 4, 1, 1, 1>;
    linear_wgmma_n192_split2_bf16 { type T = bf16; } [384, 1; Sm90a] => linear_wgmma::<T, [f32; 96], 128, 192, 2, 4, 1, 1, 2>;
    linear_wgmma_n192_split2_f16 { type T = f16; } [384, 1; Sm90a] => linear_wgmma::<T, [f32; 96], 128, 192, 2, 4, 1, 1, 2>;
    linear_wgmma_n128_bf16 { type T = bf16; } [384, 1; Sm90a] => linear_wgmma::<T, [f32; 64], 128, 128, 2, 6, 1, 1, 1>;
    linear_wgmma_n128_f16 { type T = f16; } [384, 1; Sm90a] => linear_wgmma::<T, [f32; 64], 128, 128, 2, 6, 1, 1, 1>;
    linear_wgmma_n128_x4_bf16 { type T = bf16; } [384, 1; Sm90a] => linear_wgmma::<T, [f32; 64], 128, 128, 2, 6, 1, 4, 1>;
    linear_wgmma_n128_x4_f16 { type T = f16; } [384, 1; Sm90a] => linear_wgmma::<T, [f32; 64], 128, 128, 2, 6, 1, 4, 1>;
    linear_wgmma_n128_split2_bf16 { type T = bf16; } [384, 1; Sm90a] => linear_wgmma::<T, [f32; 64], 128, 128, 2, 5, 1, 1, 2>;
    linear_wgmma_n128_split2_f16 { type T = f16; } [384, 1; Sm90a] => linear_wgmma::<T, [f32; 64], 128, 128, 2, 5, 1, 1, 2>;
    linear_wgmma_n96_bf16 { type T = bf16; } [384, 1; Sm90a] => linear_wgmma::<T, [f32; 48], 128, 96, 2, 6, 1, 1, 1>;
    linear_wgmma_n96_f16 { type T = f16; } [384, 1; Sm90a] => linear_wgmma::<T, [f32; 48], 128, 96, 2, 6, 1, 1, 1>;
    linear_wgmma_n96_split2_bf16 { type T = bf16; } [384, 1; Sm90a] => linear_wgmma::<T, [f32; 48], 128, 96, 2, 6, 1, 1, 2>;
    linear_wgmma_n96_split2_f16 { type T = f16; } [384, 1; Sm90a] => linear_wgmma::<T, [f32; 48], 128, 96, 2, 6, 1, 1, 2>;
    linear_wgmma_n144_split2_bf16 { type T = bf16; } [384, 1; Sm90a] => linear_wgmma::<T, [f32; 72], 128, 144, 2, 5, 1, 1, 2>;
    linear_wgmma_n144_split2_f16 { type T = f16; } [384, 1; Sm90a] => linear_wgmma::<T, [f32; 72], 128, 144, 2, 5, 1, 1, 2>;
    linear_wgmma_n160_split2_bf16 { type T = bf16; } [384, 1; Sm90a] => linear_wgmma::<T, [f32; 80], 128, 160, 2, 4, 1, 1, 2>;
    linear_wgmma_n160_split2_f16 { type T = f16; } [384, 1; Sm90a] => linear_wgmma::<T, [f32; 80], 128, 160, 2, 4, 1, 1, 2>;
    linear_wgmma_n96_split3_bf16 { type T = bf16; } [384, 1; Sm90a] => linear_wgmma::<T, [f32; 48], 128, 96, 2, 6, 1, 1, 3>;
    linear_wgmma_n96_split3_f16 { type T = f16; } [384, 1; Sm90a] => linear_wgmma::<T, [f32; 48], 128, 96, 2, 6, 1, 1, 3>;
    linear_wgmma_n128_split3_bf16 { type T = bf16; } [384, 1; Sm90a] => linear_wgmma::<T, [f32; 64], 128, 128, 2, 5, 1, 1, 3>;
    linear_wgmma_n128_split3_f16 { type T = f16; } [384, 1; Sm90a] => linear_wgmma::<T, [f32; 64], 128, 128, 2, 5, 1, 1, 3>;
    linear_wgmma_n144_split3_bf16 { type T = bf16; } [384, 1; Sm90a] => linear_wgmma::<T, [f32; 72], 128, 144, 2, 5, 1, 1, 3>;
    linear_wgmma_n144_split3_f16 { type T = f16; } [384, 1; Sm90a] => linear_wgmma::<T, [f32; 72], 128, 144, 2, 5, 1, 1, 3>;
    linear_wgmma_n96_split4_bf16 { type T = bf16; } [384, 1; Sm90a] => linear_wgmma::<T, [f32; 48], 128, 96, 2, 6, 1, 1, 4>;
    linear_wgmma_n96_split4_f16 { type T = f16; } [384, 1; Sm90a] => linear_wgmma::<T, [f32; 48], 128, 96, 2, 6, 1, 1, 4>;
    linear_wgmma_n64_bf16 { type T = bf16; } [384, 1; Sm90a] => linear_wgmma::<T, [f32; 32], 128, 64, 2, 8, 1, 1, 1>;
    linear_wgmma_n64_f16 { type T = f16; } [384, 1; Sm90a] => linear_wgmma::<T, [f32; 32], 128, 64, 2, 8, 1, 1, 1>;
    linear_wgmma_n64_split2_bf16 { type T = bf16; } [384, 1; Sm90a] => linear_wgmma::<T, [f32; 32], 128, 64, 2, 8, 1, 1, 2>;
    linear_wgmma_n64_split2_f16 { type T = f16; } [384, 1; Sm90a] => linear_wgmma::<T, [f32; 32], 128, 64, 2, 8, 1, 1, 2>;
    linear_wgmma_n64_split4_bf16 { type T = bf16; } [384, 1; Sm90a] => linear_wgmma::<T, [f32; 32], 128, 64, 2, 8, 1, 1, 4>;
    linear_wgmma_n64_split4_f16 { type T = f16; } [384, 1; Sm90a] => linear_wgmma::<T, [f32; 32], 128, 64, 2, 8, 1, 1, 4>;
}
