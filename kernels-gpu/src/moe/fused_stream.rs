//! Products of the fused block for few tokens: streams of weights through the tensor cores.
//!
//! As in [`linear_stream`](crate::gemm::linear_stream), the weights are the 16-row side of `m16n8k16` products and go from
//! memory to the tensor cores' registers by 16-byte loads: a thread takes 8 neighbouring elements of every 32 of a row and
//! calls them the elements that a fragment wants, which is fine as long as both operands agree. An expert's pairs are the
//! 8-column side, gathered by their ids. Of the 16 rows of a warp's tile 8 are gates and 8 the values that belong to them, in
//! the same registers of the same threads.
//!
//! A block has eight warps; `1 << split_log2` of them share a tile of rows and split K among them, their sums meet in shared
//! memory and are added in the order of the warps. The split depends on K alone, so neither other tokens nor the order of
//! an expert's pairs have a say in a result.
//!
//! Without a sorted list (at most [`DIRECT_PAIRS`] pairs) block `y` of the grid looks at all pairs, and goes on if pair `y` is
//! its expert's first, or its 9th, 17th, ...

use super::fused::{Expert, Fused, Kernel, nothing_to_do, tile};
use super::pairs::{INVALID, NOWHERE, existing_tokens};
use crate::tensor_float::TensorFloat;
use cuda_std::vec::{self, B128};
use cuda_std::{Global, dependent_launch, shared, thread, unroll, warp};

/// Warps of a block.
pub const WARPS: usize = 8;
/// Threads of a block.
pub const THREADS: usize = WARPS * 32;
/// Rows of weights of a warp's tile.
pub const ROWS: usize = 16;
/// The most pairs without a sorted list.
pub const DIRECT_PAIRS: usize = 64;
/// Elements of K in a step of a warp.
const STEP: u32 = 32;
/// Blocks that are sure to start before the kernel before this one has ended: those fetch weights ahead.
const EARLY_BLOCKS: u32 = 256;

/// Dynamic shared memory for `tiles` tiles of 8 pairs.
pub const fn shared_bytes(tiles: usize) -> usize {
    WARPS * ROWS * tiles * 8 * 4 + tiles * 8 * 4
}

/// The first product, or the second, of `8 TILES` pairs a block. `BATCH`: steps whose loads are in flight together.
pub struct Stream<const UP: bool, const TILES: usize, const BATCH: usize>;

/// What a lane reads: two rows of weights, and a row of operands for each tile of pairs.
struct Lane<T, const TILES: usize> {
    upper: Global<T>,
    lower: Global<T>,
    operands: [Global<T>; TILES],
}

impl<T: TensorFloat, const TILES: usize> Lane<T, TILES> {
    /// `BATCH` steps of 32 along K from element `at` on, each only if it starts below `end`.
    #[inline(always)]
    unsafe fn steps<const BATCH: usize, const CHECK: bool>(&self, acc: &mut [[f32; 4]; TILES], at: u32, end: u32) {
        let zero = B128([0u32; 4]);
        let mut a = [[zero; 2]; BATCH];
        let mut b = [[zero; TILES]; BATCH];
        unroll::<BATCH>(|i| {
            let at = at + i as u32 * STEP;
            if !CHECK || at < end {
                a[i] = [self.upper.get_hinted(at, vec::Streaming), self.lower.get_hinted(at, vec::Streaming)];
                unroll::<TILES>(|tile| b[i][tile] = self.operands[tile].get_as(at));
            }
        });
        unroll::<BATCH>(|i| {
            let (B128(u), B128(l)) = (a[i][0], a[i][1]);
            unroll::<2>(|half| {
                let e = 2 * half;
                let fa = [u[e], l[e], u[e + 1], l[e + 1]];
                unroll::<TILES>(|tile| {
                    let B128(v) = b[i][tile];
                    acc[tile] = T::mma(fa, [v[e], v[e + 1]], acc[tile]);
                });
            });
        });
    }
}

impl<T: TensorFloat, const UP: bool, const TILES: usize, const BATCH: usize> Kernel<T> for Stream<UP, TILES, BATCH> {
    #[inline(always)]
    unsafe fn run(a: Fused<T>) {
        let (tid, lane) = (thread::thread_idx_x(), warp::lane_id());
        let warp_id = warp::shfl_idx(tid / 32, 0);
        let (g, t) = (lane / 4, lane % 4);
        let (column_tile, block) = tile();
        if UP {
            // The sorted list may still be in the making; `x` is not.
            dependent_launch::wait();
            dependent_launch::launch_dependents();
        }
        let mut pairs = [NOWHERE; TILES];
        let bin = if a.sorted {
            let bin = a.expert_ids.get(block);
            if bin < 0 {
                return nothing_to_do::<UP>();
            }
            unroll::<TILES>(|tile| {
                pairs[tile] = a.sorted_pair(block, TILES as u32 * 8, tile as u32 * 8 + g).unwrap_or(NOWHERE);
            });
            bin as u32
        } else {
            let (bin, mine) = direct_pairs(&a, block, g);
            pairs[0] = mine;
            if bin == NOWHERE {
                return nothing_to_do::<UP>();
            }
            bin
        };
        let expert = a.expert(bin);

        // This warp's rows and its part of K. Rows beyond the last repeat it; what they give is not stored.
        let split = 1 << a.split_log2;
        let (part, group) = (warp_id & (split - 1), warp_id >> a.split_log2);
        let per_log2 = if a.gated() { 3 } else { 4 };
        let first_output = (column_tile * (WARPS as u32 >> a.split_log2) + group) << per_log2;
        let row = |output: u32, up: bool| {
            let output = (first_output + output).min(a.n - 1);
            expert.weights.offset(a.weight_row(output, up) as usize * a.k as usize + 8 * t as usize)
        };
        let rows = [row(g, false), if a.gated() { row(g, true) } else { row(g + 8, false) }];
        let steps = a.k.div_ceil(STEP);
        let each = steps.div_ceil(split);
        let (start, end) = (part * each * STEP, ((part + 1) * each * STEP).min(a.k));
        if !UP {
            if column_tile + block * thread::grid_dim_x() < EARLY_BLOCKS {
                let mut at = start;
                while at < end {
                    vec::prefetch_l2(rows[0].ptr(at));
                    vec::prefetch_l2(rows[1].ptr(at));
                    at += 4 * STEP;
                }
            }
            dependent_launch::wait();
            dependent_launch::launch_dependents();
        }

        // Pairs that are not there read what the first one does.
        let mut operands = [a.x; TILES];
        unroll::<TILES>(|tile| {
            let first = warp::shfl_idx(pairs[0], 0);
            let offset = a.operand::<UP>(if pairs[tile] == NOWHERE { first } else { pairs[tile] }) + 8 * t as usize;
            operands[tile] = if UP { a.x.offset(offset) } else { Global::new(a.h.ptr(offset).cast_const()) };
        });
        let reads = Lane { upper: rows[0], lower: rows[1], operands };
        let mut acc = [[0f32; 4]; TILES];
        let mut at = start;
        let whole = BATCH as u32 * STEP;
        while at + whole <= end {
            reads.steps::<BATCH, false>(&mut acc, at, end);
            at += whole;
        }
        if at < end {
            // A lane's 8 elements of the last step may lie beyond the end.
            reads.steps::<BATCH, true>(&mut acc, at, end - (8 * t).min(end - at));
        }

        finish::<T, UP, TILES>(&a, expert, &pairs, acc, warp_id, first_output - (group << per_log2));
    }
}

/// Adds the warps' sums up and stores the results.
#[inline(always)]
unsafe fn finish<T: TensorFloat, const UP: bool, const TILES: usize>(
    a: &Fused<T>,
    expert: Expert<T>,
    pairs: &[u32; TILES],
    acc: [[f32; 4]; TILES],
    warp_id: u32,
    block_output: u32,
) {
    let lane = warp::lane_id();
    let (g, t) = (lane / 4, lane % 4);
    let columns = const { TILES * 8 };
    let mut carver = shared::Carver::new();
    let sums = carver.take::<f32>(WARPS * ROWS * columns);
    let ids = carver.take::<u32>(columns);
    // Element `e` of a tile is row `g + 8 (e / 2)` of the warp's, pair `2 t + e % 2` of the tile's.
    unroll::<TILES>(|tile| {
        unroll::<4>(|e| {
            let (r, column) = (g + 8 * (e as u32 / 2), tile as u32 * 8 + 2 * t + e as u32 % 2);
            sums.set((warp_id * columns as u32 + column) * ROWS as u32 + r, acc[tile][e]);
        });
        if warp_id == 0 && t == 0 {
            ids.set(tile as u32 * 8 + g, pairs[tile]);
        }
    });
    thread::sync_threads();
    let split = 1 << a.split_log2;
    let total = |group: u32, column: u32, r: u32| {
        let mut sum = 0f32;
        for part in 0..split {
            sum += sums.get((((group << a.split_log2) + part) * columns as u32 + column) * ROWS as u32 + r);
        }
        sum
    };
    // Results are dealt out with neighbouring outputs to neighbouring threads.
    let (groups_log2, per_log2) = (WARPS.trailing_zeros() - a.split_log2, if a.gated() { 3 } else { 4 });
    let mut i = thread::thread_idx_x();
    while i < (columns as u32) << (groups_log2 + per_log2) {
        let r = i & ((1 << per_log2) - 1);
        let group = i >> per_log2 & ((1 << groups_log2) - 1);
        let column = i >> (per_log2 + groups_log2);
        let (pair, output) = (ids.get(column), block_output + (i & ((1 << (per_log2 + groups_log2)) - 1)));
        if pair != NOWHERE && output < a.n {
            let sum = total(group, column, r);
            if UP {
                let up = if a.gated() { total(group, column, r + 8) } else { 0.0 };
                a.store_up(expert, pair, output, sum, up);
            } else {
                a.store_down(expert, pair, output, sum);
            }
        }
        i += THREADS as u32;
    }
}

/// The bin of pair `leader` and the pair of that bin for column `g` of the block's tile, without a sorted list. The bin is
/// [`NOWHERE`] if this block has nothing to do.
#[inline(always)]
unsafe fn direct_pairs<T: TensorFloat>(a: &Fused<T>, leader: u32, g: u32) -> (u32, u32) {
    let lane = warp::lane_id();
    let count = existing_tokens(a.tokens, a.num_tokens) * a.pairs.slots;
    let bin = |pair: u32| if pair < count { a.pairs.bin(pair) } else { NOWHERE };
    let bins = [bin(lane), bin(lane + 32)];
    let wanted = warp::shfl_idx(if leader < 32 { bins[0] } else { bins[1] }, leader % 32);
    let same = [0, 1].map(|i| warp::warp_vote_ballot(warp::FULL, bins[i] == wanted) as u64);
    let same = same[0] | same[1] << 32;
    let rank = (same & ((1 << leader) - 1)).count_ones();
    if wanted == NOWHERE || wanted == INVALID || !rank.is_multiple_of(8) {
        return (NOWHERE, NOWHERE);
    }
    let mut rest = same >> leader << leader;
    for i in 0..7 {
        if i < g {
            rest &= rest.wrapping_sub(1);
        }
    }
    (wanted, if rest == 0 { NOWHERE } else { rest.trailing_zeros() })
}
