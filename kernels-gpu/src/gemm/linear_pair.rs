//! [`linear_few`](super::linear_few) where nearly all multiprocessors have one block: two blocks of a cluster share rows of weights, and have told each
//! other their sums before the last weights come.
//!
//! Each of both has half of K, and owns half of the rows. Of its last steps along K ([`LAST`]) it has the copy engine bring the other's rows first, with the tokens, and its own
//! only after all of those; tokens stay where they are. So the sums that the other owns are finished while own rows are on their way, and travel meanwhile. After the last
//! weights there are their products, a sum of two parts, and the store.
//!
//! Tokens are the 64-row side of `m64n32k16` and rows of weights the N side, so that the products of either half have accumulators of their own. The order of summation is that of
//! other kernels with K in two parts, and so are the bits.

use super::linear_few::{GROUP_THREADS, LINE, ask, clear};
use super::rough;
use crate::TensorFloat;
use crate::pipeline::{Ring, Stages, part};
use crate::scales::{BLOCKS, NONE, ROWS as ROW_SCALES, Scales};
use cuda_std::shared::Carver;
use cuda_std::tma::{self, TensorMap};
use cuda_std::vec::B128;
use cuda_std::wgmma::{self, Accumulator, Descriptor, Input, K, Sum};
use cuda_std::{Global, GlobalMut, cluster, dependent_launch, float, mbarrier, mma, thread, unroll, warp};

/// Tokens of each consumer warpgroup.
pub const TOKENS: usize = 64;
/// Rows of weights of a cluster.
pub const ROWS: usize = 64;
/// Of them, those that a block owns.
pub const HALF: usize = ROWS / 2;
/// A thread's sums of one half.
const SUMS: usize = TOKENS * HALF / GROUP_THREADS as usize;
/// The last steps. (As long as sums are on their way; with more, own rows come later than they could.)
pub const LAST: usize = 3;

/// Dynamic shared memory for so many consumer warpgroups: the ring, the other block's sums, mbarriers.
pub const fn shared_bytes(groups: usize, stages: usize) -> usize {
    let threads = groups * GROUP_THREADS as usize;
    stages * (ROWS + groups * TOKENS) * LINE as usize + threads * SUMS * 4 + (2 * stages + LAST + threads / 32) * 8
}

/// `x`: `[m, k]` in boxes of a line of the 128-byte swizzle by `tokens`, a multiple of 8 from `m` to [`TOKENS`] for each of `GROUPS` consumer warpgroups; `w`: `[n, k]` in boxes of a
/// line by [`HALF`]. `y`: `[m, n]`, rows `y_row` apart; `n` and `y_row` are multiples of 8, `y` is aligned to 16 bytes. `bias`: `[n]` or null. `early`: as for [`linear_few`](super::linear_few::linear_few).
///
/// Clusters of two, one for each [`ROWS`] rows; block: [`linear_few::threads`](super::linear_few::threads); shared memory: [`shared_bytes`].
#[inline(always)]
pub unsafe fn scaled<
    X: Input<S>,
    S: Sum,
    T: TensorFloat,
    P: Accumulator<S> + AsRef<[S]>,
    const SCALES: u32,
    const GROUPS: u32,
    const STAGES: usize,
>(
    x: *const TensorMap,
    w: *const TensorMap,
    y: *mut T,
    bias: *const T,
    scales: Scales<SCALES>,
    m: u32,
    n: u32,
    k: u32,
    y_row: usize,
    tokens: u32,
    kind: u32,
    early: u32,
) {
    const { assert!(P::N == HALF && LAST < STAGES && SCALES != BLOCKS) };
    cluster::dims::<2>();
    let step_size = const { LINE / size_of::<X>() as u32 };
    let consumers = const { GROUPS * GROUP_THREADS };
    let (x_bytes, w_bytes, half) = const { (GROUPS * TOKENS as u32 * LINE, ROWS as u32 * LINE, HALF as u32 * LINE) };
    let mut carver = Carver::new();
    let ws = carver.take_aligned::<u8>(STAGES * w_bytes as usize, 1024);
    let xs = carver.take_aligned::<u8>(STAGES * x_bytes as usize, 1024);
    // What the other sends, 16 bytes of a thread after another thread's.
    let parts = carver.take::<u32>(const { (GROUPS * GROUP_THREADS) as usize * SUMS });
    let bars = carver.take::<u64>(const { Stages::<STAGES>::WORDS + LAST + 4 * GROUPS as usize });
    let (tid, warp_id, lane) = (thread::thread_idx_x(), warp::warp_id(), warp::lane_id());
    let rank = cluster::rank();
    let row0 = thread::block_idx_x() / 2 * ROWS as u32;
    let (own, others) = (row0 + rank * HALF as u32, row0 + (rank ^ 1) * HALF as u32);
    let stages = Stages::<STAGES>::new(bars.address(0u32));
    let (k0, steps) = part(k.div_ceil(step_size), rank, 2);
    let last = steps.min(LAST as u32);
    // Full: own rows of a stage of the last steps. Came: a warp's sums, from the other block.
    let full_own = |step: u32| bars.address(const { Stages::<STAGES>::WORDS as u32 } + step);
    let came = |warp: u32| bars.address(const { (Stages::<STAGES>::WORDS + LAST) as u32 } + warp);
    let cleared = clear::<STAGES>(xs, x_bytes, tokens * LINE, consumers);
    if tid == consumers {
        tma::prefetch_map(w);
        tma::prefetch_map(x);
        ask(w, [others, own], k0, steps, early, step_size);
        for step in 0..LAST as u32 {
            mbarrier::init(full_own(step), 1);
        }
        for warp in 0..const { 4 * GROUPS } {
            mbarrier::init(came(warp), 1);
        }
        stages.init(consumers / 32);
        for warp in 0..const { 4 * GROUPS } {
            mbarrier::arrive_expect_tx(came(warp), const { 32 * SUMS as u32 * 4 });
        }
    }
    cluster::arrive_relaxed();
    cluster::wait();
    dependent_launch::wait();

    if warp_id == consumers / 32 {
        if warp::elect_one() {
            let (xs, ws) = (xs.address(0u32), ws.address(0u32));
            let launch = steps.saturating_sub(const { STAGES as u32 / 2 + 1 });
            let at = |step: u32| ((k0 + step) * step_size) as i32;
            let mut ring = Ring::<STAGES>::new();
            // Where the last steps begin.
            let mut begin = ring.stage;
            let mut step = 0;
            while step < steps {
                let is_last = step + last >= steps;
                if step + last == steps {
                    begin = ring.stage;
                }
                let (stage, at) = (ring.stage, at(step));
                stages.acquire(ring, tokens * LINE + if is_last { half } else { w_bytes });
                let full = stages.full(stage);
                tma::load_tensor::<2>(ws + stage * w_bytes, w, [at, others as i32], full);
                if !is_last {
                    tma::load_tensor::<2>(ws + stage * w_bytes + half, w, [at, own as i32], full);
                }
                tma::load_tensor::<2>(xs + stage * x_bytes, x, [at, 0], full);
                if step == launch {
                    dependent_launch::launch_dependents();
                }
                ring.advance();
                step += 1;
            }
            let mut i = 0;
            while i < last {
                let stage = if begin + i < STAGES as u32 { begin + i } else { begin + i - STAGES as u32 };
                mbarrier::arrive_expect_tx(full_own(i), half);
                tma::load_tensor::<2>(ws + stage * w_bytes + half, w, [at(steps - last + i), own as i32], full_own(i));
                i += 1;
            }
        }
        return;
    }

    if cleared {
        // The barrier before, of the cluster, is a relaxed one, which orders no memory.
        thread::sync_named(1, consumers);
    }
    // This thread's outputs are eight by eight two neighbouring ones.
    let column = own + lane % 4 * 2;
    let token = warp_id * 16 + lane / 4;
    let (bias, y) = (Global::new(bias), GlobalMut::new(y));
    let biased = !bias.ptr(0u32).is_null();
    // (Of what is added to a sum only this zero leaves its sign.)
    let mut of_columns = [[if SCALES == ROW_SCALES { 0f32 } else { -0f32 }; 2]; HALF / 8];
    let mut of_w = [[0f32; 2]; HALF / 8];
    let mut of_x = [0f32; 2];
    for j in 0..const { HALF / 8 } {
        for c in 0..2 {
            let column = (column + j as u32 * 8 + c as u32).min(n - 1);
            if biased {
                of_columns[j][c] = bias.get(column).to_f32();
            }
            if SCALES == ROW_SCALES {
                of_w[j][c] = Global::new(scales.w_ptr(column, 0)).get(0u32);
            }
        }
    }
    if SCALES == ROW_SCALES {
        for h in 0..2 {
            of_x[h] = Global::new(scales.x_ptr((token + 8 * h as u32).min(m - 1), 0)).get(0u32);
        }
    }
    let group = if GROUPS > 1 { warp_id / 4 } else { 0 };
    let a = Descriptor::<K>::new(xs.address(group * const { TOKENS as u32 * LINE }));
    let b = Descriptor::<K>::new(ws.address(0u32));
    let (mut sums, mut theirs) = (P::zero(), P::zero());
    let mut ring = Ring::<STAGES>::new();
    let mut step = 0;
    if steps > last {
        let mut previous = ring.stage;
        // Written to run at least once; see `cuda_std::wgmma`.
        loop {
            stages.wait_full(ring);
            let (a, b) = (a.offset(ring.stage * x_bytes), b.offset(ring.stage * w_bytes));
            theirs.multiply::<X, 4, K, K>(a, b, step > 0);
            sums.multiply::<X, 4, K, K>(a, b.offset(half), step > 0);
            // The products before are complete, and their stage can be filled again.
            wgmma::wait::<2>(&mut theirs);
            sums.pin();
            if step > 0 {
                stages.release(previous, lane);
            }
            previous = ring.stage;
            ring.advance();
            step += 1;
            if step + last >= steps {
                break;
            }
        }
        wgmma::wait::<0>(&mut theirs);
        sums.pin();
    }
    // The last steps, whose stages nobody fills again: first with the other's rows.
    let mut begin = ring.stage;
    loop {
        stages.wait_full(ring);
        theirs.multiply::<X, 4, K, K>(a.offset(ring.stage * x_bytes), b.offset(ring.stage * w_bytes), step > 0);
        ring.advance();
        step += 1;
        if step >= steps {
            break;
        }
    }
    wgmma::wait::<0>(&mut theirs);
    {
        let there = |address| cluster::map(address, rank ^ 1);
        let (to, came) = (there(parts.address(tid * 4)), there(came(warp_id)));
        for j in 0..const { SUMS / 4 } {
            let sums = [0, 1, 2, 3].map(|i| theirs.as_ref()[4 * j + i].to_bits());
            cluster::store_async_u32x4(to + j as u32 * const { 16 * GROUPS * GROUP_THREADS }, sums, came);
        }
    }
    let mut i = 0;
    loop {
        mbarrier::wait_parity(full_own(i), 0);
        let from = begin * w_bytes + half;
        sums.multiply::<X, 4, K, K>(a.offset(begin * x_bytes), b.offset(from), steps > last || i > 0);
        begin = if begin + 1 < STAGES as u32 { begin + 1 } else { 0 };
        i += 1;
        if i >= last {
            break;
        }
    }
    // Nobody writes to what this warp reads after that, and when all have waited the block may end.
    mbarrier::wait_parity(came(warp_id), 0);
    let mut came = [S::default(); SUMS];
    for j in 0..const { SUMS / 4 } {
        let B128(words): B128<u32, 4> = parts.get_as((j as u32 * consumers + tid) * 4);
        for i in 0..4 {
            came[4 * j + i] = S::from_bits(words[i]);
        }
    }
    wgmma::wait::<0>(&mut sums);
    let mut values = [0f32; SUMS];
    for e in 0..SUMS {
        let total = sums.as_ref()[e].plus(came[e]).to_f32();
        let (j, h, c) = (e / 4, e / 2 % 2, e % 2);
        values[e] = if SCALES == ROW_SCALES {
            float::fma(total, of_x[h] * of_w[j][c], of_columns[j][c])
        } else {
            total + of_columns[j][c]
        };
    }
    rough::epilogues(kind, &mut values);
    // All lanes have read what came, in whose place 8 tokens' outputs come to lie, and 8 more.
    warp::sync_warp(!0);
    let place =
        |h: usize, token: u32, j: u32| ((h as u32 * consumers + warp_id * 32) + token * 4 + (j ^ (token / 2))) * 4;
    for h in 0..2 {
        let words = [0, 1, 2, 3].map(|j| T::pack_f32(values[4 * j + 2 * h], values[4 * j + 2 * h + 1]));
        mma::stmatrix_x4(parts.address(place(h, lane % 8, lane / 8)), words);
    }
    warp::sync_warp(!0);
    let column = own + lane % 4 * 8;
    unroll::<2>(|h| {
        let token = token + 8 * h as u32;
        if token < m && column < n {
            let B128([a, b, c, d]): B128<u32, 4> = parts.get_as(place(h, lane / 4, lane % 4));
            y.set_as(token as usize * y_row + column as usize, B128([a, b, c, d]));
        }
    });
}

/// Arguments as for [`linear_few`](super::linear_few::linear_few), with one tile of tokens, and boxes of [`HALF`] rows of `w`: see [`scaled`].
#[inline(always)]
pub unsafe fn linear_pair<T: TensorFloat + Input, const GROUPS: u32, const STAGES: usize>(
    x: *const TensorMap,
    w: *const TensorMap,
    y: *mut T,
    bias: *const T,
    m: u32,
    n: u32,
    k: u32,
    y_row: usize,
    _rows: u32,
    tokens: u32,
    _tiles: u32,
    kind: u32,
    early: u32,
) {
    let none = Scales::none();
    scaled::<T, f32, T, [f32; SUMS], NONE, GROUPS, STAGES>(x, w, y, bias, none, m, n, k, y_row, tokens, kind, early)
}
