//! `y = epilogue(x · wᵀ + bias)` on Hopper's tensor cores, for many tokens.
//!
//! A block computes tiles of [`ROWS`] tokens by `N` outputs. Its first warpgroup is the producer: one thread has the copy
//! engine bring tiles of `x` and `w`, 64 elements deep, into a ring of stages ([`pipeline`](crate::pipeline)). The two
//! others are consumers: each multiplies 64 of the tokens by all `N` outputs with `wgmma`, both operands in shared memory,
//! the sums in registers that the producer gave up. A finished tile is rounded, laid out in shared memory by `stmatrix`, and
//! stored by the copy engine, which also clips what lies outside of `y`; what lies outside of `x` and `w` it reads as zeros.
//! So no shape needs padding.
//!
//! **Many tiles** (`SPLIT` of 1): the grid is persistent. While consumers store a tile the producer is already loading the
//! next. With `PAIR` of 2, two blocks of a cluster have neighbouring rows of tiles and the same columns, and each loads half
//! of the tile of `w` for both.
//!
//! **Few tiles**: `SPLIT` blocks of a cluster share a tile, each a part of K. Their sums meet in shared memory: the tile is
//! divided among the blocks by columns, each block sends what it has to the owner's shared memory (where the ring was), and
//! the owner adds the parts in their order. No workspace, no atomics, and the same bits always; the order of summation
//! depends on `k`, `N` and `SPLIT` only.
//!
//! **Epilogues** other than none would be `N / 2` copies of themselves in code, and those of GELU do not fit in registers
//! beside the sums. They run as a loop over values that a thread puts into shared memory for itself.

use super::epilogue;
use crate::TensorFloat;
use crate::pipeline::{Raster, Ring, Stages, part};
use cuda_std::shared::Carver;
use cuda_std::tma::{self, Swizzle, TensorMap};
use cuda_std::wgmma::{self, Accumulator, Descriptor, Input, K};
use cuda_std::{Global, Shared, bf16, cluster, entries, f16, integer, mma, thread, unroll, warp};

/// Tokens of a tile.
pub const ROWS: usize = 128;
/// Elements of K in a stage: a line of the 128-byte swizzle.
pub const STEP: usize = 64;
/// Threads: a producer and two consumer warpgroups.
pub const THREADS: usize = 384;
/// Tokens of a consumer warpgroup.
pub const GROUP_ROWS: usize = 64;
/// Threads of the consumers.
const CONSUMERS: u32 = 256;
/// Rows of tiles that run side by side.
const BAND: u32 = 16;
/// Bytes of a line of the swizzle.
const LINE: u32 = 128;

/// Outputs that a consumer rounds and stores at once, which must divide the tile and be shared evenly if K is split.
pub const fn chunk(n: usize, split: usize) -> usize {
    if n.is_multiple_of(64 * split) { 64 } else { 32 }
}

/// Chunks of a tile.
pub const fn chunks(n: usize, split: usize) -> u32 {
    (n / chunk(n, split)) as u32
}

/// How a chunk lies in shared memory.
pub const fn chunk_swizzle(n: usize, split: usize) -> Swizzle {
    if chunk(n, split) == 64 { Swizzle::B128 } else { Swizzle::B64 }
}

/// Dynamic shared memory for tiles of `n` outputs: the ring, two chunks for each consumer, the mbarriers.
pub const fn shared_bytes(n: usize, stages: usize, split: usize) -> usize {
    stages * (ROWS + n) * STEP * 2 + 4 * GROUP_ROWS * chunk(n, split) * 2 + 2 * stages * 8
}

/// `x`: `[m, k]` in boxes of [`STEP`] by [`ROWS`]; `w`: `[n, k]` in boxes of [`STEP`] by `N / PAIR`; both with the 128-byte
/// swizzle. `y`: `[m, n]` in boxes of [`chunk`] by [`GROUP_ROWS`] with [`chunk_swizzle`]. `bias`: `[n]` or null.
///
/// Grid: `SPLIT` blocks for each tile if K is split, otherwise any number of blocks in clusters of `PAIR`; block:
/// [`THREADS`]; shared memory: [`shared_bytes`].
#[inline(always)]
pub unsafe fn linear_wgmma<
    T: TensorFloat + Input,
    A: Accumulator + AsRef<[f32]>,
    const N: usize,
    const STAGES: usize,
    const PAIR: u32,
    const SPLIT: u32,
>(
    x: *const TensorMap,
    w: *const TensorMap,
    y: *const TensorMap,
    bias: *const T,
    m: u32,
    n: u32,
    k: u32,
    kind: u32,
) {
    const { assert!(A::N == N && (PAIR == 1 || SPLIT == 1)) };
    let blocks = const { PAIR * SPLIT };
    if blocks > 1 {
        match blocks {
            2 => cluster::dims::<2>(),
            4 => cluster::dims::<4>(),
            _ => cluster::dims::<8>(),
        }
    }
    let width = const { chunk(N, SPLIT as usize) };
    let (x_bytes, w_bytes) = (ROWS as u32 * LINE, N as u32 * LINE);
    let mut carver = Carver::new();
    let xs = carver.take_aligned::<T>(STAGES * ROWS * STEP, 1024);
    let ws = carver.take_aligned::<T>(STAGES * N * STEP, 1024);
    let staging = carver.take_aligned::<u32>(2 * GROUP_ROWS * width, 1024);
    let bars = carver.take::<u64>(const { Stages::<STAGES, 1>::WORDS });
    let stages = Stages::<STAGES, PAIR>::new(bars.address(0u32));

    let (warp_id, lane) = (warp::warp_id(), warp::lane_id());
    let rank = if blocks > 1 { cluster::rank() } else { 0 };
    let raster = Raster { rows: m.div_ceil(ROWS as u32 * PAIR), columns: n.div_ceil(N as u32), band: BAND / PAIR };
    let (first, stride) = (thread::block_idx_x() / blocks, thread::grid_dim_x() / blocks);
    let pair_rank = if PAIR > 1 { rank } else { 0 };
    let (k0, steps) = part(k.div_ceil(STEP as u32), if SPLIT > 1 { rank } else { 0 }, SPLIT);

    if thread::thread_idx_x() == 0 {
        tma::prefetch_map(x);
        tma::prefetch_map(w);
        tma::prefetch_map(y);
        stages.init(CONSUMERS / 32);
    }
    if blocks > 1 {
        cluster::sync()
    } else {
        thread::sync_threads()
    }

    if warp_id < 4 {
        wgmma::decrease_registers::<24>();
        if warp_id == 0 && warp::elect_one() {
            let (xs, ws) = (xs.address(0u32), ws.address(0u32));
            let mut ring = Ring::<STAGES>::new();
            let mut tile = first;
            while tile < raster.count() {
                let (row, column) = raster.place(tile);
                let row = ((row * PAIR + pair_rank) * ROWS as u32) as i32;
                let column = (column * N as u32) as i32;
                let mut step = 0;
                while step < steps {
                    let (stage, at) = (ring.stage, ((k0 + step) * STEP as u32) as i32);
                    stages.acquire(ring, x_bytes + w_bytes);
                    let full = stages.full(stage);
                    tma::load_tensor::<2>(xs + stage * x_bytes, x, [at, row], full);
                    if PAIR > 1 {
                        let part = N as u32 / PAIR;
                        let to = ws + stage * w_bytes + rank * part * LINE;
                        let from = [at, column + (rank * part) as i32];
                        tma::load_tensor_multicast::<2>(to, w, from, full, (1 << PAIR) - 1);
                    } else {
                        tma::load_tensor::<2>(ws + stage * w_bytes, w, [at, column], full);
                    }
                    ring.advance();
                    step += 1;
                }
                tile += stride;
            }
        }
        warp::sync_warp(!0);
        if SPLIT > 1 {
            cluster::sync();
            cluster::sync();
        }
    } else {
        wgmma::increase_registers::<240>();
        let group = warp_id / 4 - 1;
        let a = Descriptor::<K>::new(xs.address(group * (GROUP_ROWS * STEP) as u32));
        let b = Descriptor::<K>::new(ws.address(0u32));
        let store = Store {
            y,
            bias: Global::new(bias),
            biased: !bias.is_null(),
            staging: staging.offset(group * (GROUP_ROWS * width) as u32),
            n,
            kind,
            group,
        };
        let mut ring = Ring::<STAGES>::new();
        let mut tile = first;
        while tile < raster.count() {
            let (row, column) = raster.place(tile);
            let row = (row * PAIR + pair_rank) * ROWS as u32 + group * GROUP_ROWS as u32;
            let column = column * N as u32;
            let mut acc = A::zero();
            let mut previous = ring.stage;
            let mut step = 0;
            // Written to run at least once; see `cuda_std::wgmma`.
            loop {
                stages.wait_full(ring);
                // The first product of a tile overwrites the sums.
                acc.multiply::<T, 4, K, K>(a.offset(ring.stage * x_bytes), b.offset(ring.stage * w_bytes), step > 0);
                // The product before is complete, and its stage can be filled again.
                wgmma::wait::<1>(&mut acc);
                if step > 0 {
                    stages.release(previous, lane);
                }
                previous = ring.stage;
                ring.advance();
                step += 1;
                if step >= steps {
                    break;
                }
            }
            wgmma::wait::<0>(&mut acc);
            if SPLIT == 1 {
                stages.release(previous, lane);
                let mut sums = [0f32; 128];
                for e in 0..const { N / 2 } {
                    sums[e] = acc.as_ref()[e];
                }
                store.tile::<N, 1>(sums, row, column, 0, const { chunks(N, 1) });
            } else {
                // All blocks are done with their rings, whose place the parts of the sums take.
                cluster::sync();
                let exchange = Exchange::<N, SPLIT>::new(rank);
                exchange.send(acc.as_ref());
                cluster::sync();
                let own = exchange.sum(acc.as_ref());
                let (first, end) = exchange.owned(rank);
                store.tile::<N, SPLIT>(own, row, column, first, end);
            }
            tile += stride;
            if SPLIT > 1 {
                break;
            }
        }
        if store.leads() {
            tma::wait_group_read::<0>();
        }
    }
    if PAIR > 1 {
        warp::sync_warp(!0);
        // No block may end while the other can still signal its mbarriers.
        cluster::sync();
    }
}

/// Rounds and stores chunks of a tile.
struct Store<T> {
    y: *const TensorMap,
    bias: Global<T>,
    biased: bool,
    /// Two chunks of this warpgroup.
    staging: Shared<u32>,
    n: u32,
    kind: u32,
    group: u32,
}

impl<T> Clone for Store<T> {
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Store<T> {}

impl<T: TensorFloat> Store<T> {
    /// Whether this thread is the one of its warpgroup that has the copy engine store. All lanes of its warp are here.
    #[inline(always)]
    fn leads(self) -> bool {
        (thread::thread_idx_x() / 32).is_multiple_of(4) && warp::elect_one()
    }

    #[inline(always)]
    fn sync(self) {
        thread::sync_named(1 + self.group, 128);
    }

    #[inline(always)]
    fn pack(a: f32, b: f32) -> u32 {
        let [low, high] = T::pair_from_f32([a, b]);
        T::pack(low, high)
    }

    /// The chunks from `first` to `end` of the tile at (`row`, `column`), of which this thread has these sums.
    #[inline(always)]
    unsafe fn tile<const N: usize, const SPLIT: u32>(
        self,
        mut sums: [f32; 128],
        row: u32,
        column: u32,
        first: u32,
        end: u32,
    ) {
        let elements = const { chunk(N, SPLIT as usize) / 2 };
        if !self.biased && self.kind == 0 {
            for c in 0..const { chunks(N, SPLIT as usize).div_ceil(SPLIT) as usize } {
                if first + (c as u32) < end {
                    let mut words = [0u32; 16];
                    for i in 0..const { chunk(N, SPLIT as usize) / 4 } {
                        words[i] = Self::pack(sums[c * elements + 2 * i], sums[c * elements + 2 * i + 1]);
                    }
                    // The chunk before the last is read.
                    if self.leads() {
                        tma::wait_group_read::<1>();
                    }
                    self.sync();
                    self.chunk::<N, SPLIT>(words, c as u32 & 1, row, column, first + c as u32);
                }
            }
            return;
        }
        let mut c = first;
        while c < integer::opaque(end) {
            // Both buffers, as values of the threads, each thread its own.
            if self.leads() {
                tma::wait_group_read::<0>();
            }
            self.sync();
            let mine = thread::thread_idx_x() % 128;
            for e in 0..const { chunk(N, SPLIT as usize) / 2 } {
                self.staging.set(mine + 128 * e as u32, sums[e].to_bits());
            }
            self.transform(mine, column + c * 2 * elements as u32, elements as u32);
            let mut words = [0u32; 16];
            for i in 0..const { chunk(N, SPLIT as usize) / 4 } {
                words[i] = self.staging.get(mine + 128 * i as u32);
            }
            self.sync();
            self.chunk::<N, SPLIT>(words, 0, row, column, c);
            // What the next round takes moves down, so that the rounds are one piece of code.
            for e in 0..const { 128 - chunk(N, SPLIT as usize) / 2 } {
                sums[e] = sums[e + elements];
            }
            c += 1;
        }
    }

    /// Turns this thread's `count` sums in the staging memory, of columns from `column` on, into results, two to a word.
    #[inline(always)]
    unsafe fn transform(self, mine: u32, column: u32, count: u32) {
        let lane = warp::lane_id();
        let mut e = 0;
        while e < integer::opaque(count) {
            // Two columns of two rows.
            let at = column + 2 * e + 2 * (lane % 4);
            let mut add = [0f32; 2];
            unroll::<2>(|i| {
                if self.biased && at + (i as u32) < self.n {
                    add[i] = self.bias.get(at + i as u32).to_f32();
                }
            });
            let mut values = [0f32; 4];
            unroll::<4>(|i| {
                values[i] = f32::from_bits(self.staging.get(mine + 128 * (e + i as u32))) + add[i % 2];
            });
            unroll::<4>(|i| values[i] = epilogue(self.kind, values[i]));
            // These elements and those before have been read.
            self.staging.set(mine + 64 * e, Self::pack(values[0], values[1]));
            self.staging.set(mine + 64 * e + 128, Self::pack(values[2], values[3]));
            e += 4;
        }
    }

    /// Stores chunk `c` of a tile by way of this buffer, which is free: this thread's results, two to a word.
    #[inline(always)]
    unsafe fn chunk<const N: usize, const SPLIT: u32>(
        self,
        words: [u32; 16],
        buffer: u32,
        row: u32,
        column: u32,
        c: u32,
    ) {
        let width = const { chunk(N, SPLIT as usize) } as u32;
        let swizzle = const { chunk_swizzle(N, SPLIT as usize) };
        let lane = warp::lane_id();
        let buffer = self.staging.address(buffer * (GROUP_ROWS as u32 * width / 2));
        // Four 8x8 matrices: upper and lower half of a warp's rows, of two neighbouring groups of 8 columns.
        let line = warp::warp_id() % 4 * 16 + lane % 16;
        for j in 0..const { chunk(N, SPLIT as usize) / 16 } {
            let place = swizzle.apply(line * (2 * width) + (2 * j as u32 + lane / 16) * 16);
            mma::stmatrix_x4(buffer + place, [words[4 * j], words[4 * j + 1], words[4 * j + 2], words[4 * j + 3]]);
        }
        tma::fence_async();
        self.sync();
        if self.leads() {
            tma::store_tensor::<2>(self.y, [(column + c * width) as i32, row as i32], buffer);
            tma::commit_group();
        }
    }
}

/// The parts of a tile's sums on their way between the blocks of a cluster.
#[derive(Clone, Copy)]
struct Exchange<const N: usize, const SPLIT: u32> {
    rank: u32,
    /// This thread's place.
    mine: u32,
}

impl<const N: usize, const SPLIT: u32> Exchange<N, SPLIT> {
    /// Elements of a thread in the chunks of an owner.
    const OWNED: usize = chunks(N, SPLIT as usize).div_ceil(SPLIT) as usize * chunk(N, SPLIT as usize) / 2;

    #[inline(always)]
    fn new(rank: u32) -> Self {
        Self { rank, mine: thread::thread_idx_x() - 128 }
    }

    /// The chunks of an owner.
    #[inline(always)]
    fn owned(self, owner: u32) -> (u32, u32) {
        let all = chunks(N, SPLIT as usize);
        let each = all.div_ceil(SPLIT);
        (owner * each, if (owner + 1) * each < all { (owner + 1) * each } else { all })
    }

    /// Where element `e` of the owner's, from block `from`, is in the owner's shared memory.
    #[inline(always)]
    fn place(self, owner: u32, from: u32, e: usize) -> u32 {
        let slot = if from > owner { from - 1 } else { from };
        (slot * Self::OWNED as u32 + e as u32) * CONSUMERS + self.mine
    }

    /// Sends what others own.
    #[inline(always)]
    unsafe fn send(self, sums: &[f32]) {
        let parts = Carver::new().take::<u32>(1);
        for owner in 0..SPLIT {
            if owner != self.rank {
                let to = cluster::map(parts.address(self.place(owner, self.rank, 0)), owner);
                for e in 0..const { chunks(N, SPLIT as usize).div_ceil(SPLIT) as usize * chunk(N, SPLIT as usize) / 2 }
                {
                    let i = owner as usize * Self::OWNED + e;
                    if i < N / 2 {
                        cluster::store_u32(to + 4 * CONSUMERS * e as u32, sums[i].to_bits());
                    }
                }
            }
        }
    }

    /// The sums that this block owns, all parts added in their order.
    #[inline(always)]
    unsafe fn sum(self, sums: &[f32]) -> [f32; 128] {
        let parts = Carver::new().take::<f32>(const { (SPLIT as usize - 1) * Self::OWNED * CONSUMERS as usize });
        let mut own = [0f32; 128];
        for owner in 0..SPLIT {
            if owner == self.rank {
                for e in 0..const { chunks(N, SPLIT as usize).div_ceil(SPLIT) as usize * chunk(N, SPLIT as usize) / 2 }
                {
                    let i = owner as usize * Self::OWNED + e;
                    if i < N / 2 {
                        let mut total = 0f32;
                        for from in 0..SPLIT {
                            let value = if from == owner { sums[i] } else { parts.get(self.place(owner, from, e)) };
                            total = if from == 0 { value } else { total + value };
                        }
                        own[e] = total;
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
        x: TensorMap, w: TensorMap, y: TensorMap, bias: *const T, m: u32, n: u32, k: u32, kind: u32,
    );
    linear_wgmma_n256_bf16 { type T = bf16; } [384, 1; Sm90a] => linear_wgmma::<T, [f32; 128], 256, 4, 1, 1>;
    linear_wgmma_n256_f16 { type T = f16; } [384, 1; Sm90a] => linear_wgmma::<T, [f32; 128], 256, 4, 1, 1>;
    linear_wgmma_n256_pair_bf16 { type T = bf16; } [384, 1; Sm90a] => linear_wgmma::<T, [f32; 128], 256, 4, 2, 1>;
    linear_wgmma_n256_pair_f16 { type T = f16; } [384, 1; Sm90a] => linear_wgmma::<T, [f32; 128], 256, 4, 2, 1>;
    linear_wgmma_n256_split2_bf16 { type T = bf16; } [384, 1; Sm90a] => linear_wgmma::<T, [f32; 128], 256, 4, 1, 2>;
    linear_wgmma_n256_split2_f16 { type T = f16; } [384, 1; Sm90a] => linear_wgmma::<T, [f32; 128], 256, 4, 1, 2>;
    linear_wgmma_n224_bf16 { type T = bf16; } [384, 1; Sm90a] => linear_wgmma::<T, [f32; 112], 224, 4, 1, 1>;
    linear_wgmma_n224_f16 { type T = f16; } [384, 1; Sm90a] => linear_wgmma::<T, [f32; 112], 224, 4, 1, 1>;
    linear_wgmma_n224_split2_bf16 { type T = bf16; } [384, 1; Sm90a] => linear_wgmma::<T, [f32; 112], 224, 4, 1, 2>;
    linear_wgmma_n224_split2_f16 { type T = f16; } [384, 1; Sm90a] => linear_wgmma::<T, [f32; 112], 224, 4, 1, 2>;
    linear_wgmma_n128_bf16 { type T = bf16; } [384, 1; Sm90a] => linear_wgmma::<T, [f32; 64], 128, 6, 1, 1>;
    linear_wgmma_n128_f16 { type T = f16; } [384, 1; Sm90a] => linear_wgmma::<T, [f32; 64], 128, 6, 1, 1>;
    linear_wgmma_n128_split2_bf16 { type T = bf16; } [384, 1; Sm90a] => linear_wgmma::<T, [f32; 64], 128, 6, 1, 2>;
    linear_wgmma_n128_split2_f16 { type T = f16; } [384, 1; Sm90a] => linear_wgmma::<T, [f32; 64], 128, 6, 1, 2>;
    linear_wgmma_n128_split4_bf16 { type T = bf16; } [384, 1; Sm90a] => linear_wgmma::<T, [f32; 64], 128, 6, 1, 4>;
    linear_wgmma_n128_split4_f16 { type T = f16; } [384, 1; Sm90a] => linear_wgmma::<T, [f32; 64], 128, 6, 1, 4>;
}
