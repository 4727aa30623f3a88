//! `y = epilogue(x · wᵀ + bias)` of e4m3 tokens and weights with scales of blocks on Hopper's tensor cores: [`linear_wgmma`](super::linear_wgmma)
//! whose products of 128 elements of K, a step, are multiplied with their scales and added up in f32 (DeepSeek-AI, *DeepSeek-V3 Technical Report*, 2024,
//! section 3.3).
//!
//! Ring, tiles, split of K and stores are those of `linear_wgmma`. Products of a step start from zero in accumulators of their own; a consumer waits for them
//! and adds them, while the other keeps the tensor cores busy. What a consumer does beside its multiply-adds is time in which the tensor cores may have nothing
//! to do, so there is little of it:
//!
//! * *Scales of four steps at once.* Each lane of four, which have the same rows, loads one of four steps' scales, four steps ahead, and multiplies those of rows with
//!   those of columns. A step then only shuffles its lane's products.
//! * *A look at the next stage* before the sums are added, whose answer is there when they are.
//! * *Two waves.* A consumer may have 128 tokens, 64 after another with the same weights (`ALL` is twice `N`): products of half the registers, scales and
//!   addresses once for both.

use super::linear_wgmma::{
    BAND, CONSUMERS, Exchange, GROUP_ROWS, LINE, Operand, ROWS, Store, chunk, chunks, owned, parts_words,
};
use crate::TensorFloat;
use crate::pipeline::{Raster, Ring, Stages, part};
use crate::row::GROUP;
use crate::scales::{BLOCKS, Scales};
use cuda_std::shared::Carver;
use cuda_std::tma::{self, TensorMap};
use cuda_std::wgmma::{self, Accumulator, Descriptor, K, Registers};
use cuda_std::{E4M3, Global, cluster, dependent_launch, float, integer, mbarrier, thread, warp};

/// Steps whose scales are loaded at once, one by each lane with the same rows.
const CHUNK: u32 = 4;

/// Tokens of a tile with `all / n` waves.
pub const fn rows(all: usize, n: usize) -> u32 {
    (ROWS * (all / n)) as u32
}

/// Dynamic shared memory for tiles of `n` outputs of `waves` times [`ROWS`] tokens: the ring, two chunks for each consumer, the sums of other blocks, the mbarriers.
pub const fn shared_bytes(n: usize, waves: usize, stages: usize, split: usize) -> usize {
    let staging = 4 * GROUP_ROWS * chunk(n, split) * 2;
    stages * (ROWS * waves + n) * LINE as usize + staging + parts_words(n, split) * 4 + (2 * stages + 1) * 8
}

/// As [`linear_wgmma`](super::linear_wgmma::linear_wgmma), with boxes of 128 columns; tiles have `N` outputs of `ALL / N` times [`ROWS`] tokens, and `w` boxes of
/// `N` rows. Scales as [`Scales::new`] takes them.
///
/// Clusters: of `SPLIT` blocks, with one wave. Grid and block: as for that.
#[inline(always)]
pub unsafe fn linear_quant_blocks<
    T: TensorFloat,
    P: Accumulator + AsRef<[f32]> + AsMut<[f32]>,
    const ALL: usize,
    const N: usize,
    const STAGES: usize,
    const SPLIT: u32,
>(
    x: *const TensorMap,
    x_last: *const TensorMap,
    w: *const TensorMap,
    w_last: *const TensorMap,
    y: *const TensorMap,
    bias: *const T,
    x_scales: *const f32,
    x_scale_row: usize,
    x_scale_group: usize,
    w_scales: *const f32,
    w_scale_row: usize,
    w_scale_group: usize,
    m: u32,
    n: u32,
    k: u32,
    kind: u32,
) {
    let waves = const { ALL / N };
    const {
        assert!(P::N == N && N <= 192 && (ALL == N || ALL == 2 * N && N <= GROUP) && ALL <= 256);
        assert!(SPLIT == 1 || ALL == N);
    };
    match SPLIT {
        1 => {}
        2 => cluster::dims::<2>(),
        _ => cluster::dims::<4>(),
    }
    let scales = Scales::<BLOCKS>::new(x_scales, x_scale_row, x_scale_group, w_scales, w_scale_row, w_scale_group);
    let rows = const { rows(ALL, N) };
    let width = const { chunk(N, SPLIT as usize) };
    let (x_bytes, w_bytes) = (rows * LINE, N as u32 * LINE);
    let mut carver = Carver::new();
    let xs = carver.take_aligned::<u8>(STAGES * x_bytes as usize, 1024);
    let ws = carver.take_aligned::<u8>(STAGES * w_bytes as usize, 1024);
    let staging = carver.take_aligned::<u32>(2 * GROUP_ROWS * width, 1024);
    let parts = carver.take::<u32>(const { parts_words(N, SPLIT as usize) });
    let bars = carver.take::<u64>(const { Stages::<STAGES>::WORDS + 1 });
    // Counts sums that come from other blocks.
    let came = bars.address(const { Stages::<STAGES>::WORDS as u32 });
    let (warp_id, lane) = (warp::warp_id(), warp::lane_id());
    let split = if SPLIT > 1 { cluster::rank() } else { 0 };
    let stages = Stages::<STAGES>::new(bars.address(0u32));
    let raster =
        Raster { rows: m.div_ceil(rows), columns: n.div_ceil(N as u32), band: const { BAND / (ALL / N) as u32 } };
    let (first, stride) = (thread::block_idx_x() / SPLIT, thread::grid_dim_x() / SPLIT);
    let (k0, steps) = part(k.div_ceil(LINE), split, SPLIT);

    let of_x = Operand { map: x, last: x_last, rows: m, tile: rows };
    let of_w = Operand { map: w, last: w_last, rows: n, tile: N as u32 };
    let place = |tile: u32| {
        let (row, column) = raster.place(tile);
        (row * rows, column * N as u32)
    };
    let (row, column) = place(first);
    of_x.clear::<STAGES>(xs, row, steps, false, SPLIT > 1);
    of_w.clear::<STAGES>(ws, column, steps, false, SPLIT > 1);
    if thread::thread_idx_x() == 0 {
        tma::prefetch_map(of_x.boxes(row).1);
        tma::prefetch_map(of_w.boxes(column).1);
        tma::prefetch_map(y);
        if SPLIT > 1 {
            mbarrier::init(came, 1);
        }
        stages.init(CONSUMERS / 32);
        if SPLIT > 1 {
            mbarrier::arrive_expect_tx(came, Exchange::<N, SPLIT>::bytes(split));
        }
    }
    if SPLIT > 1 {
        cluster::arrive_relaxed();
        cluster::wait();
    } else {
        thread::sync_threads()
    }
    // What comes before is done; what comes after may prepare itself.
    dependent_launch::wait();
    dependent_launch::launch_dependents();

    if warp_id < 4 {
        wgmma::decrease_registers::<24>();
        if warp_id == 0 && warp::elect_one() {
            let (xs, ws) = (xs.address(0u32), ws.address(0u32));
            let mut ring = Ring::<STAGES>::new();
            let mut tile = first;
            while tile < raster.count() {
                let (row, column) = place(tile);
                let ((x_rows, x), (w_rows, w)) = (of_x.boxes(row), of_w.boxes(column));
                let (row, column) = (row as i32, column as i32);
                let mut step = 0;
                while step < steps {
                    let (stage, at) = (ring.stage, ((k0 + step) * LINE) as i32);
                    stages.acquire(ring, (x_rows + w_rows) * LINE);
                    let full = stages.full(stage);
                    tma::load_tensor::<2>(xs + stage * x_bytes, x, [at, row], full);
                    tma::load_tensor::<2>(ws + stage * w_bytes, w, [at, column], full);
                    ring.advance();
                    step += 1;
                }
                tile += stride;
            }
        }
        warp::sync_warp(!0);
    } else {
        wgmma::increase_registers::<240>();
        let group = warp_id / 4 - 1;
        let a = Descriptor::<K>::new(xs.address(group * (GROUP_ROWS as u32 * LINE)));
        let b = Descriptor::<K>::new(ws.address(0u32));
        let store = Store {
            y,
            bias: Global::new(bias),
            biased: !bias.is_null(),
            scales,
            staging: staging.offset(group * (GROUP_ROWS * width) as u32),
            n,
            kind,
            group,
            waves: waves as u32,
        };
        let mut turn = 0;
        let mut ring = Ring::<STAGES>::new();
        let mut tile = first;
        let corner = |tile: u32| {
            let (row, column) = place(tile);
            (row + group * GROUP_ROWS as u32, column)
        };
        let groups = k.div_ceil(LINE);
        // The step of a part of K that has none of its own is nothing, whatever the scales are.
        let live = SPLIT == 1 || k0 < groups;
        // Where this lane's scales of a tile are, those of its rows and of the first and last columns. (What is opaque is not kept in registers from tile to tile.)
        let scales_of = |tile: u32| {
            let (row, column) = corner(tile);
            let own = integer::opaque(warp_id % 4 * 16 + lane / 4);
            let mut of_rows = [x_scales; 4];
            for i in 0..const { 2 * (ALL / N) } {
                // The first row, the 8th below, and of a second wave both again.
                let row = row + own + i as u32 / 2 * ROWS as u32 + i as u32 % 2 * 8;
                of_rows[i] = scales.x_ptr(row.min(m - 1), 0);
            }
            let last = if N > GROUP { column + N as u32 - 64 } else { column };
            (of_rows, [column, last].map(|column| scales.w_ptr(column.min(n - 1), 0)))
        };
        // What it loads for the chunk from `step` on.
        let fetch = |(of_rows, of_columns): ([*const f32; 4], [*const f32; 2]), step: u32| {
            let at = (k0 + step + integer::opaque(lane) % CHUNK).min(groups - 1) as usize;
            let (of_x, of_w) = (at * x_scale_group, at * w_scale_group);
            let mut rows = [0f32; 4];
            for i in 0..const { 2 * (ALL / N) } {
                rows[i] = Global::new(of_rows[i]).get(of_x);
            }
            let first = Global::new(of_columns[0]).get(of_w);
            (rows, [first, if N > GROUP { Global::new(of_columns[1]).get(of_w) } else { first }])
        };
        // Whether the stage to come is known to be full.
        let mut ready = false;
        while tile < raster.count() {
            let (row, column) = corner(tile);
            let places = scales_of(tile);
            let (mut of_rows, mut of_columns) = fetch(places, 0);
            let mut sums = [0f32; 128];
            let mut partial = P::zero();
            // Scales of a chunk: of two rows and two blocks of columns, or of up to four rows and one block.
            let mut products = [0f32; 4];
            let mut step = 0;
            // Written to run at least once; see `cuda_std::wgmma`.
            loop {
                if !ready {
                    stages.wait_full(ring);
                }
                let stage = ring.stage;
                let mut factors = [[0f32; 4]; 4];
                for wave in 0..const { ALL / N } {
                    let below = wave as u32 * (ROWS as u32 * LINE);
                    partial.multiply::<E4M3, 4, K, K>(
                        a.offset(stage * x_bytes + below),
                        b.offset(stage * w_bytes),
                        false,
                    );
                    if wave == 0 {
                        if step % CHUNK == 0 {
                            for i in 0..4 {
                                let (row, block) = if N > GROUP { (i / 2, i % 2) } else { (i, 0) };
                                products[i] = if live { of_rows[row] * of_columns[block] } else { 0.0 };
                            }
                            if ALL == N {
                                (of_rows, of_columns) = fetch(places, step + CHUNK);
                            }
                        }
                        let from = (lane & !(CHUNK - 1)) | (step % CHUNK);
                        if N > GROUP {
                            for h in 0..2 {
                                let of = [products[2 * h], products[2 * h + 1]].map(|p| warp::shfl_idx(p, from));
                                factors[h] = Scales::<BLOCKS>::spread::<N>(column, of);
                            }
                        } else {
                            for h in 0..const { 2 * (ALL / N) } {
                                factors[h] = [warp::shfl_idx(products[h], from); 4];
                            }
                        }
                    }
                    wgmma::wait::<0>(&mut partial);
                    if wave == const { ALL / N - 1 } {
                        stages.release(stage, lane);
                        ring.advance();
                        ready = stages.is_full(ring);
                    }
                    for e in 0..const { N / 2 } {
                        let scale = factors[2 * wave + e / 2 % 2][e / 4 * 8 / 64];
                        let sum = &mut sums[wave * (N / 2) + e];
                        *sum = float::fma(partial.as_ref()[e], scale, *sum);
                    }
                    if ALL > N && wave == 0 {
                        // Between the waves, so that the products of both take the same registers: ptxas would start those of the second in others, and have too few.
                        sums.pin();
                        if step % CHUNK == 0 {
                            (of_rows, of_columns) = fetch(places, step + CHUNK);
                        }
                    }
                }
                step += 1;
                if step >= steps {
                    break;
                }
            }
            let (first_chunk, end_chunk) = owned(N, SPLIT, split);
            let bias = store.columns::<N, SPLIT>(column, first_chunk);
            let (scale, ones) = ([0f32; 16], [1f32; 2]);
            if SPLIT == 1 {
                turn ^=
                    store.tile::<ROWS, ALL, 1>(sums, bias, scale, ones, row, column, 0, const { chunks(ALL, 1) }, turn);
            } else {
                let exchange = Exchange::<N, SPLIT>::new(parts, split, 1, 0);
                exchange.send(&sums, came);
                // Nobody writes to this block after that, which therefore may end.
                mbarrier::wait_parity(came, 0);
                let own = exchange.sum(&sums);
                store.tile::<ROWS, N, SPLIT>(own, bias, scale, ones, row, column, first_chunk, end_chunk, 0);
                break;
            }
            tile += stride;
        }
        if store.leads() {
            tma::wait_group_read::<0>();
        }
    }
}
