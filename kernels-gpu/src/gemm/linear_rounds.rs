//! [`linear_few`](super::linear_few) for more tokens and more outputs than blocks have room for: blocks take one tile after another.
//!
//! Weights are the 64-row side of `m64nNk16` there as well, tokens the N side. A tile is [`ROWS`] rows of weights for each of `GROUPS` consumer warpgroups by
//! up to `TOKENS` tokens, and all of K, so that whatever a block loads serves as many products as its registers have room for. The grid is persistent: while the
//! consumers store a tile the producer is loading the next.
//!
//! **The store** needs no memory of its own. The last stage of a tile is not given back at once: a consumer's rows of weights in it, which only that one reads, become two
//! buffers. Sums of a chunk are rounded, transposed by `stmatrix`, and go from there to memory by 16 bytes, a token's 64 outputs after one another.
//!
//! The order of summation depends on `k` only, and is that of other kernels with K in one part.

use super::linear_few::{BARRIER, GROUP_THREADS, LINE, ROWS, STEP, clear};
use super::rough;
use crate::TensorFloat;
use crate::pipeline::{Ring, Staged, Stages, div_rem, multiply};
use cuda_std::shared::Carver;
use cuda_std::tma::{self, TensorMap};
use cuda_std::vec::B128;
use cuda_std::wgmma::{self, Accumulator, Input};
use cuda_std::{Global, GlobalMut, Shared, dependent_launch, integer, mma, thread, warp};

/// Threads: so many consumer warpgroups and one whose first warp is the producer, as registers are given away by warpgroups.
pub const fn threads(groups: u32) -> u32 {
    (groups + 1) * GROUP_THREADS
}

/// A thread's sums of the tokens that are stored at once, twice as many: fewer where registers are.
const fn chunk(groups: u32, tokens: usize) -> usize {
    if groups as usize * tokens > 640 { 8 } else { 16 }
}

/// Room for a thread's sums.
const SUMS: usize = 192;

/// Dynamic shared memory: the ring and its mbarriers.
pub const fn shared_bytes(groups: usize, tokens: usize, stages: usize) -> usize {
    stages * (groups * ROWS + tokens) * LINE as usize + 2 * stages * 8
}

/// Boxes in which the tokens of a tile come: a box has no more than 256 rows.
pub const fn boxes(tokens: usize) -> u32 {
    tokens.div_ceil(256) as u32
}

/// Arguments as for [`linear_few`](super::linear_few::linear_few), without clusters; boxes of `x` have `tokens` / [`boxes`] rows, a multiple of 8. `TOKENS` are one or two times those of the accumulators `A`.
///
/// Grid: any number of blocks up to that of tiles, which is that of tiles of `rows` times `tiles`; block: [`threads`]; shared memory: [`shared_bytes`].
#[inline(always)]
pub unsafe fn linear_rounds<
    T: TensorFloat + Input,
    A: Accumulator + AsRef<[f32]> + AsMut<[f32]>,
    const GROUPS: u32,
    const TOKENS: usize,
    const STAGES: usize,
>(
    x: *const TensorMap,
    w: *const TensorMap,
    y: *mut T,
    bias: *const T,
    m: u32,
    n: u32,
    k: u32,
    y_row: usize,
    rows: u32,
    tokens: u32,
    tiles: u32,
    kind: u32,
    _early: u32,
) {
    const { assert!((GROUPS == 2 || GROUPS == 3) && (A::N == TOKENS || 2 * A::N == TOKENS) && TOKENS <= 2 * SUMS) };
    let parts = const { TOKENS / A::N };
    let consumers = const { GROUPS * GROUP_THREADS };
    let (x_bytes, w_bytes) = const { (TOKENS as u32 * LINE, GROUPS * ROWS as u32 * LINE) };
    let mut carver = Carver::new();
    let ws = carver.take_aligned::<u8>(STAGES * w_bytes as usize, 1024);
    let xs = carver.take_aligned::<u8>(STAGES * x_bytes as usize, 1024);
    let bars = carver.take::<u64>(Stages::<STAGES>::WORDS);
    let (tid, warp_id, lane) = (thread::thread_idx_x(), warp::warp_id(), warp::lane_id());
    let stages = Stages::<STAGES>::new(bars.address(0u32));
    let steps = k.div_ceil(STEP as u32);
    let (first, stride) = (thread::block_idx_x(), thread::grid_dim_x());
    let count = div_rem(n + rows - 1, rows).0 * tiles;
    // Its first row of weights, its first token, and the first that is not the tile's before: the last tile of tokens has all of them inside of `x`.
    let place = |tile: u32| {
        let (tile, of_tokens) = if tiles > 1 { div_rem(tile, tiles) } else { (tile, 0) };
        let first = of_tokens * tokens;
        (tile * rows, if tiles > 1 { first.min(m - tokens) } else { first }, first)
    };
    clear::<STAGES>(ws, w_bytes, rows * LINE, const { threads(GROUPS) });
    clear::<STAGES>(xs, x_bytes, tokens * LINE, const { threads(GROUPS) });
    if tid == consumers {
        tma::prefetch_map(w);
        tma::prefetch_map(x);
        stages.init(consumers / 32);
    }
    thread::sync_threads();
    dependent_launch::wait();

    if warp_id >= consumers / 32 {
        wgmma::decrease_registers::<24>();
        if warp_id == consumers / 32 && warp::elect_one() {
            let (xs, ws) = (xs.address(0u32), ws.address(0u32));
            // The next launch may start when all but half a ring is asked for.
            let launch = steps.saturating_sub(const { STAGES as u32 / 2 + 1 });
            let mut ring = Ring::<STAGES>::new();
            let mut tile = first;
            while tile < count {
                let (row, token, _) = place(tile);
                let mut step = 0;
                while step < steps {
                    let (stage, at) = (ring.stage, (step * STEP as u32) as i32);
                    stages.acquire(ring, (tokens + rows) * LINE);
                    let full = stages.full(stage);
                    tma::load_tensor::<2>(ws + stage * w_bytes, w, [at, row as i32], full);
                    for part in 0..const { boxes(TOKENS) } {
                        let first = part * (tokens / const { boxes(TOKENS) });
                        let to = xs + stage * x_bytes + first * LINE;
                        tma::load_tensor::<2>(to, x, [at, (token + first) as i32], full);
                    }
                    if step == launch && tile + stride >= count {
                        dependent_launch::launch_dependents();
                    }
                    ring.advance();
                    step += 1;
                }
                tile += stride;
            }
        }
        return;
    }

    if GROUPS == 2 {
        wgmma::increase_registers::<240>();
    } else {
        wgmma::increase_registers::<160>();
    }
    let group = warp_id / 4;
    let of_group = group * (ROWS as u32 * LINE);
    let a = Staged::new(ws.address(of_group), w_bytes, 0);
    let b = Staged::new(xs.address(0u32), x_bytes, A::N as u32 * LINE);
    let (bias, y) = (Global::new(bias), GlobalMut::new(y));
    let biased = !bias.ptr(0u32).is_null();
    let mut ring = Ring::<STAGES>::new();
    let mut tile = first;
    while tile < count {
        let mut sums = [A::zero(); 2];
        let previous = multiply::<T, f32, A, STAGES>(stages, &mut ring, steps, parts, [a, b], &mut sums, lane);
        let (row0, token0, first) = place(tile);
        // (Opaque, or what is computed from it would be kept in registers.)
        let in_group = integer::opaque(tid) % GROUP_THREADS;
        let lane = in_group % 32;
        // On its way during the last products: the bias of this thread's two rows.
        let mut of_rows = [0f32; 2];
        if biased {
            let row = row0 + group * ROWS as u32 + in_group / 32 * 16 + lane / 4;
            of_rows = [bias.get(row.min(n - 1)).to_f32(), bias.get((row + 8).min(n - 1)).to_f32()];
        }
        wgmma::wait::<0>(&mut sums[0]);
        if parts > 1 {
            sums[1].pin();
        }
        let mut all = [0f32; SUMS];
        for e in 0..const { TOKENS / 2 } {
            all[e] = sums[e / (A::N / 2)].as_ref()[e % (A::N / 2)];
        }
        // The rows that this thread stores.
        let of_block = group * ROWS as u32 + in_group % 8 * 8;
        let column = row0 + of_block;
        let end = if of_block < rows && column < n { (m - token0).min(tokens) } else { 0 };
        let store = Store {
            y,
            y_row,
            kind,
            barrier: BARRIER + group,
            // Upper and lower half of a warp's rows, of two neighbouring groups of 8 tokens.
            to: (lane / 16 * 8 + lane % 8) * LINE + (((in_group / 32 * 2 + lane / 8 % 2) ^ (lane % 8)) << 4),
            from: in_group / 8 * LINE + (((in_group ^ (in_group / 8)) % 8) << 4),
            line: in_group / 8,
        };
        // All warps of the consumer are done with its rows of the stage.
        thread::sync_named(store.barrier, GROUP_THREADS);
        let at = Tile {
            buffers: ws.offset(previous * w_bytes + of_group),
            first: token0 as usize * y_row + column as usize,
            begin: first - token0,
            end,
        };
        if biased || kind != 0 {
            if const { chunk(GROUPS, TOKENS) == 16 } {
                store.finished::<16, TOKENS>(all, of_rows, at);
            } else {
                store.finished::<8, TOKENS>(all, of_rows, at);
            }
        } else if const { chunk(GROUPS, TOKENS) == 16 } {
            store.rounded::<16, TOKENS>(&all, at);
        } else {
            store.rounded::<8, TOKENS>(&all, at);
        }
        // What ordinary stores were made to is the copy engine's again.
        tma::fence_async();
        stages.release(previous, lane);
        tile += stride;
    }
}

/// A consumer's part of a tile: the buffers, and what this thread stores of it.
#[derive(Clone, Copy)]
struct Tile {
    buffers: Shared<u8>,
    /// The place in `y` of its outputs of the tile's first token.
    first: usize,
    /// Tokens of the tile.
    begin: u32,
    end: u32,
}

/// Rounds and stores a consumer's part of a tile.
#[derive(Clone, Copy)]
struct Store<T> {
    y: GlobalMut<T>,
    y_row: usize,
    kind: u32,
    barrier: u32,
    /// Where in a buffer this lane's row of four 8x8 matrices goes, and what this thread stores.
    to: u32,
    from: u32,
    line: u32,
}

impl<T: TensorFloat> Store<T> {
    /// [`chunk`](Self::chunk) of all sums.
    #[inline(always)]
    unsafe fn rounded<const CHUNK: usize, const TOKENS: usize>(self, sums: &[f32; SUMS], at: Tile) {
        for c in 0..const { (TOKENS / 2).div_ceil(CHUNK) } {
            let mut values = [0f32; CHUNK];
            for e in 0..CHUNK {
                values[e] = if c * CHUNK + e < TOKENS / 2 { sums[c * CHUNK + e] } else { 0.0 };
            }
            self.chunk(values, at, c as u32);
        }
    }

    /// [`chunk`](Self::chunk) of all sums, with bias and epilogue.
    #[inline(always)]
    unsafe fn finished<const CHUNK: usize, const TOKENS: usize>(self, mut sums: [f32; SUMS], bias: [f32; 2], at: Tile) {
        let mut c = 0;
        while c < integer::opaque(const { (TOKENS / 2).div_ceil(CHUNK) as u32 }) {
            let mut values = [0f32; CHUNK];
            for e in 0..CHUNK {
                values[e] = sums[e] + bias[e / 2 % 2];
            }
            rough::epilogues(self.kind, &mut values);
            self.chunk(values, at, c);
            // What the next round takes moves down, so that the rounds are one piece of code; see `linear_wgmma`.
            let done = sums;
            let count = const { (TOKENS / 2).next_multiple_of(CHUNK) };
            for e in 0..const { (TOKENS / 2).next_multiple_of(CHUNK) } {
                sums[e] = done[(e + CHUNK) % count];
            }
            c += 1;
        }
    }

    /// Chunk `c` of a tile, by a consumer. Two buffers in turn: the barrier of a chunk is passed when all have stored the one before.
    #[inline(always)]
    unsafe fn chunk<const CHUNK: usize>(self, values: [f32; CHUNK], at: Tile, c: u32) {
        let buffer = at.buffers.offset(c % 2 * const { 2 * CHUNK as u32 * LINE });
        for pair in 0..CHUNK / 8 {
            let words = [0, 1, 2, 3].map(|i| T::pack_f32(values[8 * pair + 2 * i], values[8 * pair + 2 * i + 1]));
            mma::stmatrix_x4_trans(buffer.address(self.to + pair as u32 * (16 * LINE)), words);
        }
        thread::sync_named(self.barrier, GROUP_THREADS);
        for half in 0..CHUNK as u32 / 8 {
            // (Opaque, or the distances of all chunks would be kept in registers.)
            let token = integer::opaque(c * const { 2 * CHUNK as u32 } + half * 16 + self.line);
            if token >= at.begin && token < at.end {
                let B128([a, b, c, d]): B128<u32, 4> = buffer.get_as(self.from + half * (16 * LINE));
                self.y.set_as(at.first + token as usize * self.y_row, B128([a, b, c, d]));
            }
        }
    }
}
