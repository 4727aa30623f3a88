//! Products of the fused block with e4m3 weights and activations on Hopper: [`fused_wgmma`](super::fused_wgmma) with scales.
//!
//! Weights have a scale for each block of 128 × 128, rows of `x` and `h` one for each 128 elements (DeepSeek-AI, *DeepSeek-V3 Technical
//! Report*, 2024, section 3.3). A step of the pipeline is 128 elements of K, one line of the swizzle. Its products have accumulators of
//! their own, and are then multiplied with their scales and added to the sums in f32; meanwhile the other consumer warpgroup
//! keeps the tensor cores busy. Where a warpgroup has 128 rows of weights and many pairs, registers do not suffice for sums and
//! products of all columns: then it multiplies half of the columns of 64 rows at a time.
//!
//! As there, weights are the 64-row side of `m64nNk32` and the pairs of an expert the N side; of every 16 rows of weights 8 are gates and 8
//! the values that belong to them, so a thread has a gate and its value, of at most two blocks of weights. Scales of pairs come
//! into the stages along with the rows, 4 bytes each; those of weights are two words a thread and step, on their way during the products.
//!
//! `h` is stored as `T`, and quantised by [`fused_quant_rows`](super::fused_quant_rows) for the second product: a scale covers 128 outputs,
//! which are two tiles.

use super::fused::{HALVES, PLAIN};
use super::fused_wgmma::Activation;
use super::items::{DIRECT_PAIRS, Item, Items, Sorted};
use super::pairs::{Pairs, existing_tokens};
use crate::pipeline::{Ring, Stages};
use crate::row::GROUP;
use crate::tensor_float::TensorFloat;
use cuda_std::shared::Carver;
use cuda_std::tma::{self, Swizzle, TensorMap};
use cuda_std::vec::{B64, B128};
use cuda_std::wgmma::{self, Accumulator, Descriptor, K};
use cuda_std::{
    E4M3, Global, GlobalMut, Shared, bf16, cp_async, dependent_launch, entries, f16, float, mbarrier, mma, thread,
    unroll, warp,
};

/// Consumer warpgroups.
const GROUPS: usize = 2;
/// Threads that fill the ring.
const PRODUCERS: usize = 128;
/// Threads of a block.
pub const THREADS: usize = PRODUCERS + GROUPS * 128;
/// Elements of K of a stage: a line of the swizzle, and what a scale covers.
pub const STEP: usize = 128;
/// The most experts of a device.
pub const MAX_BINS: usize = 1024;
/// The place in the sorted list of an expert's first pair is a multiple of this.
pub const SORT_BLOCK: usize = 8;

/// Rows of weights of an item.
pub const fn rows(tiles: usize) -> usize {
    GROUPS * tiles * 64
}

/// Dynamic shared memory; every part may begin at the next multiple of 16.
pub const fn shared_bytes(tiles: usize, pairs: usize, stages: usize, bins: usize) -> usize {
    stages * ((rows(tiles) + pairs) * STEP + pairs * 4 + 2 * 8)
        + GROUPS * pairs * 8
        + super::items::shared_bytes(bins)
        + 5 * 16
}

/// What both products need to know.
struct Job<T, const DIRECT: bool> {
    h: GlobalMut<T>,
    partial: GlobalMut<f32>,
    w_scales: Global<f32>,
    items: Items<DIRECT>,
    n: u32,
    k: u32,
    /// Rows of an expert's weights, and of their blocks.
    rows: u32,
    layout: u32,
    /// Number of the activation, and its scalars.
    activation: (u32, f32, f32),
}

impl<T: TensorFloat, const DIRECT: bool> Job<T, DIRECT> {
    /// Groups of columns.
    #[inline(always)]
    fn groups(&self) -> u32 {
        self.k.div_ceil(GROUP as u32)
    }

    /// Rows of weights of output `output`: its gate and its value, or twice itself.
    #[inline(always)]
    fn weight_rows<const UP: bool>(&self, output: u32) -> [u32; 2] {
        match self.layout {
            HALVES if UP => [output, output + self.n],
            PLAIN => [output, output],
            _ => [2 * output, 2 * output + 1],
        }
    }
}

/// One of the products; see [`Args`]. `UP`: the first. Grid: any number of blocks; block: [`THREADS`]; shared memory:
/// [`shared_bytes`].
#[inline(always)]
unsafe fn fused_quant_wgmma<
    T: TensorFloat,
    const UP: bool,
    const TILES: usize,
    const PAIRS: usize,
    const STAGES: usize,
    const DIRECT: bool,
>(
    h: *mut T,
    partial: *mut f32,
    x: *const E4M3,
    x_row: usize,
    x_scales: *const f32,
    x_scale_row: usize,
    map: *const TensorMap,
    w_scales: *const f32,
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
    experts: u32,
    bins: u32,
    n: u32,
    k: u32,
    layout: u32,
    activation: u32,
    alpha: f32,
    limit: f32,
) {
    let (tid, warp_id) = (thread::thread_idx_x(), warp::warp_id());
    let mut carver = Carver::new();
    let weights = carver.take_aligned::<u8>(STAGES * rows(TILES) * STEP, 1024);
    let operands = carver.take_aligned::<u8>(STAGES * PAIRS * STEP, 1024);
    let factors = carver.take::<f32>(STAGES * PAIRS);
    let bars = carver.take::<u64>(const { Stages::<STAGES>::WORDS });
    let ids = carver.take::<u32>(GROUPS * PAIRS);
    let scales = carver.take::<f32>(GROUPS * PAIRS);
    let stages = Stages::<STAGES>::new(bars.address(0u32));
    if tid == 0 {
        // The weights, and each producer's rows.
        stages.init_counted(1 + PRODUCERS as u32, 4 * GROUPS as u32);
        tma::prefetch_map(map);
    }
    if UP {
        // The sorted list may still be in the making.
        dependent_launch::wait();
        dependent_launch::launch_dependents();
    }
    let outputs = if UP { rows(TILES) as u32 / 2 } else { rows(TILES) as u32 };
    let tiles = n.div_ceil(outputs);
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
        slots: top_k,
        experts,
        local: bins,
        shared: 0,
    };
    let count = if DIRECT { (existing_tokens(tokens, num_tokens) * top_k).min(DIRECT_PAIRS as u32) } else { 0 };
    let items = Items::<DIRECT>::new(&mut carver, sorted, pairs, count, bins, tiles, PAIRS as u32);
    let job = Job {
        h: GlobalMut::new(h),
        partial: GlobalMut::new(partial),
        w_scales: Global::new(w_scales),
        items,
        n,
        k,
        rows: if UP && layout != PLAIN { 2 * n } else { n },
        layout,
        activation: (activation, alpha, limit),
    };
    let (all, grid, groups) = (items.count(), thread::grid_dim_x(), job.groups());

    if warp_id < (PRODUCERS / 32) as u32 {
        wgmma::decrease_registers::<40>();
        let mut ring = Ring::<STAGES>::new();
        let fetch = |ring: Ring<STAGES>, item: Item, step: u32| {
            let group = (item.tile * (rows(TILES) / 16) as u32) as i32;
            let (k0, bin) = ((step * STEP as u32) as i32, item.bin as i32);
            let at = if UP { [k0, 0, 0, group, bin] } else { [k0, 0, 2 * group, 0, bin] };
            let bar = stages.full(ring.stage);
            let bytes = const { (rows(TILES) * STEP) as u32 };
            mbarrier::arrive_expect_tx(bar, bytes);
            // Beyond the end of K come zeroes.
            tma::load_tensor::<5>(weights.address(ring.stage * bytes), map, at, bar);
        };
        let mut next = thread::block_idx_x();
        // Stages whose weights are on their way before `h` is there.
        let mut ahead = 0;
        if !UP {
            if next < all {
                let item = items.find(next);
                ahead = groups.min(STAGES as u32);
                if tid == 0 {
                    let mut at = ring;
                    for s in 0..ahead {
                        fetch(at, item, s);
                        at.advance();
                    }
                }
            }
            dependent_launch::wait();
            dependent_launch::launch_dependents();
        }
        let (x, x_scales) = (Global::new(x), Global::new(x_scales));
        // A thread copies 16 bytes of every 16th row, and the scale of one row or two.
        let (chunk, low) = (tid % 8, tid / 8);
        let to = operands.address(0u32) + Swizzle::B128.apply(low * STEP as u32 + chunk * 16);
        while next < all {
            let item = items.find(next);
            // Rows of zeroes make up for what a product takes more than there is.
            let wide = columns(PAIRS as u32, item.count);
            let row_of = |place: u32| {
                let pair = items.pair(item.first + place);
                // SAFETY: tokens with pairs have slots.
                core::hint::assert_unchecked(top_k != 0);
                if UP { pair / top_k } else { pair }
            };
            let mut source = [0usize; 9];
            unroll::<9>(|i| {
                let row = low + 16 * i as u32;
                if row < item.count {
                    source[i] = row_of(row) as usize * x_row;
                }
            });
            let mut scale = [0usize; 2];
            unroll::<2>(|i| {
                let place = tid + 128 * i as u32;
                if place < item.count {
                    scale[i] = row_of(place) as usize * x_scale_row;
                }
            });
            let mut step = 0;
            while step < groups {
                stages.wait_empty(ring);
                if ahead > 0 {
                    ahead -= 1;
                } else if tid == 0 {
                    fetch(ring, item, step);
                }
                let to = to + ring.stage * (PAIRS * STEP) as u32;
                let column = step * STEP as u32 + 16 * chunk;
                unroll::<9>(|i| {
                    let row = low + 16 * i as u32;
                    if (i as u32 * 16) < PAIRS as u32 && row < wide {
                        let bytes = if row < item.count && column < k { 16 } else { 0 };
                        let at = source[i] + if bytes > 0 { column as usize } else { 0 };
                        cp_async::copy_16_zfill(to + (i * 16 * STEP) as u32, x.ptr(at), bytes);
                    }
                });
                unroll::<2>(|i| {
                    let place = tid + 128 * i as u32;
                    if i * 128 < PAIRS && place < wide {
                        let there = place < item.count;
                        let at = scale[i] + if there { step as usize } else { 0 };
                        let to = factors.address(ring.stage * PAIRS as u32 + place);
                        cp_async::copy::<4, _>(to, x_scales.ptr(at), if there { 4 } else { 0 });
                    }
                });
                cp_async::arrive(stages.full(ring.stage));
                ring.advance();
                step += 1;
            }
            next += grid;
        }
        // The block's shared memory must outlive its copies.
        cp_async::wait_group::<0>();
    } else {
        wgmma::increase_registers::<232>();
        let group = warp_id / 4 - 1;
        let consumer = Consumer {
            weights: Descriptor::<K>::new(weights.address(group * (TILES * 64 * STEP) as u32)),
            operands: Descriptor::<K>::new(operands.address(0u32)),
            factors,
            ids: ids.offset(group * PAIRS as u32),
            scales: scales.offset(group * PAIRS as u32),
            group,
            first_row: group * (TILES * 64) as u32 + warp_id % 4 * 16,
        };
        let mut ring = Ring::<STAGES>::new();
        let mut next = thread::block_idx_x();
        while next < all {
            let item = items.find(next);
            let wide = columns(PAIRS as u32, item.count);
            macro_rules! product {
                ($half:literal) => {
                    consumer.item::<T, [f32; $half], [f32; $half], UP, TILES, PAIRS, STAGES, DIRECT>(
                        &job, stages, &mut ring, next, item,
                    )
                };
                ($half:literal, $part:literal) => {
                    consumer.item::<T, [f32; $half], [f32; $part], UP, TILES, PAIRS, STAGES, DIRECT>(
                        &job, stages, &mut ring, next, item,
                    )
                };
            }
            if TILES > 1 {
                match wide {
                    32 => product!(16, 8),
                    64 => product!(32, 16),
                    96 => product!(48, 24),
                    128 => product!(64, 32),
                    _ => product!(72, 36),
                }
            } else if PAIRS > 64 {
                match wide {
                    32 => product!(16),
                    64 => product!(32),
                    96 => product!(48),
                    128 => product!(64),
                    _ => product!(72),
                }
            } else {
                match wide {
                    8 => product!(4),
                    16 => product!(8),
                    _ if PAIRS == 16 => {}
                    32 => product!(16),
                    _ => product!(32),
                }
            }
            next += grid;
        }
    }
}

/// The columns of the products that a share of `count` pairs takes.
#[inline(always)]
const fn columns(pairs: u32, count: u32) -> u32 {
    if pairs > 64 {
        match count {
            0..=32 => 32,
            33..=64 => 64,
            65..=96 => 96,
            97..=128 => 128,
            _ => 144,
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
    group: u32,
    /// The warp's first row within the tile.
    first_row: u32,
}

impl Consumer {
    /// Multiplies an item and finishes it. `P` holds the sums of a step, for all columns or for a part of them at a time.
    #[inline(always)]
    unsafe fn item<
        T: TensorFloat,
        A: Accumulator + AsRef<[f32]> + AsMut<[f32]>,
        P: Accumulator + AsRef<[f32]>,
        const UP: bool,
        const TILES: usize,
        const PAIRS: usize,
        const STAGES: usize,
        const DIRECT: bool,
    >(
        &self,
        job: &Job<T, DIRECT>,
        stages: Stages<STAGES>,
        ring: &mut Ring<STAGES>,
        number: u32,
        item: Item,
    ) {
        let (mine, lane) = (thread::thread_idx_x() % 128, warp::lane_id());
        // Scales of this thread's two rows of weights in each tile. Rows beyond the last repeat it.
        let row = item.tile * rows(TILES) as u32 + self.first_row;
        let groups = job.groups();
        let blocks = job.rows.div_ceil(GROUP as u32);
        let mut at = [[0u32; 2]; TILES];
        unroll::<TILES>(|s| {
            let row = row + 64 * s as u32;
            let output = if UP { row / 2 + lane / 4 } else { row };
            let rows = job.weight_rows::<UP>(output.min(job.n - 1));
            at[s] = rows.map(|row| (item.bin * blocks + row / GROUP as u32) * groups);
        });
        // Rows of the second product lie in one block.
        let load = |at: [u32; 2], step: u32| {
            let first = job.w_scales.get(at[0] as usize + step as usize);
            [first, if UP { job.w_scales.get(at[1] as usize + step as usize) } else { first }]
        };

        let (mut acc, mut partial) = ([A::zero(); TILES], P::zero());
        let mut step = 0;
        loop {
            stages.wait_full(*ring);
            // `cp.async` writes as ordinary instructions do.
            tma::fence_async();
            let a = self.weights.offset(ring.stage * (rows(TILES) * STEP) as u32);
            let b = self.operands.offset(ring.stage * (PAIRS * STEP) as u32);
            for s in 0..TILES {
                // On its way while the products run.
                let now = load(at[s], step);
                for part in 0..const { A::N / P::N } {
                    let columns = b.offset((part * P::N * STEP) as u32);
                    partial.multiply::<E4M3, 4, _, _>(a.offset((s * 64 * STEP) as u32), columns, false);
                    wgmma::wait::<0>(&mut partial);
                    for j in 0..const { P::N / 8 } {
                        let first = ring.stage * PAIRS as u32 + (part * P::N + 8 * j) as u32 + 2 * (lane % 4);
                        let B64(pairs) = self.factors.get_as::<B64<f32, 2>>(first);
                        for e in 0..4 {
                            let (by, i) = (pairs[e % 2] * now[e / 2], part * P::N / 2 + 4 * j + e);
                            let sum = acc[s].as_ref()[i];
                            acc[s].as_mut()[i] = float::fma(partial.as_ref()[4 * j + e], by, sum);
                        }
                    }
                    // Before the next products overwrite them.
                    acc[s].pin();
                }
            }
            stages.release(ring.stage, lane);
            ring.advance();
            step += 1;
            if step >= groups {
                break;
            }
        }

        // Not ahead of time, and found once more: registers are short.
        let item = if TILES > 1 { job.items.find(number) } else { item };
        let row = item.tile * rows(TILES) as u32 + self.first_row;
        let (mut pair, mut scale) = ([0u32; 2], [0f32; 2]);
        unroll::<2>(|i| {
            let column = mine + 128 * i as u32;
            if column < item.count {
                pair[i] = job.items.pair(item.first + column);
                if !UP {
                    scale[i] = job.items.weight(item.first + column);
                }
            }
        });
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
            if UP {
                self.store_up::<T, A, DIRECT>(job, item, row, acc[s].as_ref());
            } else {
                self.store_down::<T, A, DIRECT>(job, item, row, acc[s].as_ref());
            }
        }
    }

    /// Of 16 rows the first 8 are gates, the others their values. Pairs of sums in a thread belong to neighbouring columns
    /// (tokens); a transposition in registers makes them neighbouring outputs.
    #[inline(always)]
    unsafe fn store_up<T: TensorFloat, A: Accumulator, const DIRECT: bool>(
        &self,
        job: &Job<T, DIRECT>,
        item: Item,
        row: u32,
        sums: &[f32],
    ) {
        let (g, t) = (warp::lane_id() / 4, warp::lane_id() % 4);
        let first = row / 2;
        let (kind, alpha, limit) = job.activation;
        let activation = Activation::new(kind, alpha, limit, job.layout != PLAIN);
        for j in 0..A::N / 8 {
            let v = |c: usize| activation.gated(sums[4 * j + c], sums[4 * j + 2 + c]);
            let [a, b] = T::pair_from_f32([v(0), v(1)]);
            let word = mma::movmatrix_trans(T::pack(a, b));
            let column = 8 * j as u32 + g;
            let at = self.ids.get(column) as usize * job.n as usize + (first + 2 * t) as usize;
            if first < job.n && column < item.count {
                job.h.set_as::<u32>(at, word);
            }
        }
    }

    /// A thread has rows `g` and `g + 8` of two columns. Four lanes with neighbouring `g` swap sums until each has four
    /// neighbouring rows of one column, which are 16 bytes of `partial`.
    #[inline(always)]
    unsafe fn store_down<T: TensorFloat, A: Accumulator, const DIRECT: bool>(
        &self,
        job: &Job<T, DIRECT>,
        item: Item,
        row: u32,
        sums: &[f32],
    ) {
        let lane = warp::lane_id();
        let (odd, high) = (lane & 4 != 0, lane & 8 != 0);
        let row = row + (lane & 8) + (lane & 16) / 4;
        let first = 2 * (lane % 4) + odd as u32;
        for j in 0..A::N / 8 {
            let mut v = [sums[4 * j], sums[4 * j + 1], sums[4 * j + 2], sums[4 * j + 3]];
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
                v[i] *= scale;
            }
            if row < job.n && column < item.count {
                job.partial.set_as(at, B128(v));
            }
        }
    }
}

entries! {
    /// Arguments of both products.
    pub struct Args<T>(
        /// `[tokens * top_k, intermediate]`: written by the first product.
        h: *mut T,
        /// `[tokens * top_k, hidden]`: written by the second product.
        partial: *mut f32,
        /// `[tokens, hidden]`, or for the second product the quantised `h`; rows `x_row` apart. Their scales, `[.., k / 128]`.
        x: *const E4M3, x_row: usize, x_scales: *const f32, x_scale_row: usize,
        /// The weights; see [`fused_wgmma`](super::fused_wgmma). Their scales, `[experts, rows / 128, k / 128]`.
        map: TensorMap, w_scales: *const f32,
        /// From [`sort`](super::sort), in blocks of [`SORT_BLOCK`].
        sorted_ids: *const i32, sorted_weights: *const f32, offsets: *const i32, expert_counts: *const i32,
        /// See [`fused::Args`](super::fused::Args); read where there is no sorted list.
        topk_ids: *const i32, topk_weights: *const f32, expert_map: *const i32, num_tokens: *const i32, tokens: u32,
        top_k: u32, experts: u32,
        /// Experts of this device, at most [`MAX_BINS`].
        bins: u32,
        /// Outputs and inner dimension, multiples of 16.
        n: u32, k: u32,
        /// See [`fused::Args`](super::fused::Args).
        layout: u32, activation: u32, alpha: f32, limit: f32,
    );
    moe_fused_quant_wgmma_up_t16_f16 { type T = f16; } [THREADS, 1; Sm90a] => fused_quant_wgmma::<T, true, 1, 16, 11, true>;
    moe_fused_quant_wgmma_up_t64_f16 { type T = f16; } [THREADS, 1; Sm90a] => fused_quant_wgmma::<T, true, 1, 64, 8, false>;
    moe_fused_quant_wgmma_up_t144_f16 { type T = f16; } [THREADS, 1; Sm90a] => fused_quant_wgmma::<T, true, 1, 144, 6, false>;
    moe_fused_quant_wgmma_up_r256_f16 { type T = f16; } [THREADS, 1; Sm90a] => fused_quant_wgmma::<T, true, 2, 144, 4, false>;
    moe_fused_quant_wgmma_up_t16_bf16 { type T = bf16; } [THREADS, 1; Sm90a] => fused_quant_wgmma::<T, true, 1, 16, 11, true>;
    moe_fused_quant_wgmma_up_t64_bf16 { type T = bf16; } [THREADS, 1; Sm90a] => fused_quant_wgmma::<T, true, 1, 64, 8, false>;
    moe_fused_quant_wgmma_up_t144_bf16 { type T = bf16; } [THREADS, 1; Sm90a] => fused_quant_wgmma::<T, true, 1, 144, 6, false>;
    moe_fused_quant_wgmma_up_r256_bf16 { type T = bf16; } [THREADS, 1; Sm90a] => fused_quant_wgmma::<T, true, 2, 144, 4, false>;
    moe_fused_quant_wgmma_down_t16_f16 { type T = f16; } [THREADS, 1; Sm90a] => fused_quant_wgmma::<T, false, 1, 16, 11, true>;
    moe_fused_quant_wgmma_down_t64_f16 { type T = f16; } [THREADS, 1; Sm90a] => fused_quant_wgmma::<T, false, 1, 64, 8, false>;
    moe_fused_quant_wgmma_down_t144_f16 { type T = f16; } [THREADS, 1; Sm90a] => fused_quant_wgmma::<T, false, 1, 144, 6, false>;
    moe_fused_quant_wgmma_down_r256_f16 { type T = f16; } [THREADS, 1; Sm90a] => fused_quant_wgmma::<T, false, 2, 144, 4, false>;
    moe_fused_quant_wgmma_down_t16_bf16 { type T = bf16; } [THREADS, 1; Sm90a] => fused_quant_wgmma::<T, false, 1, 16, 11, true>;
    moe_fused_quant_wgmma_down_t64_bf16 { type T = bf16; } [THREADS, 1; Sm90a] => fused_quant_wgmma::<T, false, 1, 64, 8, false>;
    moe_fused_quant_wgmma_down_t144_bf16 { type T = bf16; } [THREADS, 1; Sm90a] => fused_quant_wgmma::<T, false, 1, 144, 6, false>;
    moe_fused_quant_wgmma_down_r256_bf16 { type T = bf16; } [THREADS, 1; Sm90a] => fused_quant_wgmma::<T, false, 2, 144, 4, false>;
}
