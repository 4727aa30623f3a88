//! `y = epilogue(x · wᵀ + bias)` on Hopper for few tokens: a stream of weights through the copy engine and `wgmma`.
//!
//! With few tokens the time is that of reading `w` once. The weights are the 64-row side of `m64nNk16` and the tokens the N side, which
//! follows their number. A block has up to [`ROWS`] rows of weights for each of its consumer warpgroups (`GROUPS`) and a part of K: a producer warp has
//! the copy engine bring steps of 128 bytes of K into a ring ([`pipeline`](crate::pipeline)), the consumers multiply them. Rows are fewer where all
//! multiprocessors then get equally many: the tensor cores have time for those that nobody needs.
//!
//! **Tiles of tokens**: more than `TOKENS` are divided evenly; blocks with the same rows of weights are neighbours.
//!
//! **Parts of K** (`SPLIT`): so many blocks of a cluster have the same rows. Each owns as many of the tokens, whose sums the others send to its shared memory
//! by stores that its mbarrier counts (a barrier of the cluster that publishes stores waits for `MEMBAR.ALL.GPU`). It adds the parts in their order. The
//! order of summation depends on `k` and `SPLIT` only.
//!
//! **The store** is by 16 bytes of a token's outputs. Sums of many tokens are scaled, rounded and transposed by `stmatrix` ([`rounds_first`]); those of an epilogue are
//! transposed first, in f32, so that the epilogue is one piece of code.
//!
//! **Scales** ([`Scales`]) of 8-bit operands are either those of a row of `x` and a row of `w`, which are fetched at the beginning and
//! multiply finished sums; or they change every 128 elements of K, which is a step. Then products of a step have accumulators of their
//! own, and are added to the sums in f32, multiplied with their scales. The consumers fetch those for [`CHUNK`] steps at once.
//!
//! **Sharing tokens** (`SHARE`): of many tokens a block with 64 rows of weights reads as much as of weights, from the L2 cache, which then is what takes the
//! time. So many blocks of a cluster have neighbouring rows and the same part of K; each loads some of the tokens for all.
//!
//! **Before the wait** for what came before a block asks for its first weights in the second-level cache ([`ask`]): memory would stand still until the first loads come back. That is
//! right whoever wrote the weights, as nothing is read.
//!
//! **The next launch** may start when a block has asked for all but half a ring of its weights. Its blocks then are ready when the last of
//! this launch end: two fit on a multiprocessor, except where the ring needs all of its memory. Earlier, they would be there before
//! the blocks of this launch are, and take places from them.
//!
//! Entries of 128 and 192 rows with all of K have the body of [`linear_rounds`](super::linear_rounds): blocks take one tile after another. Those called `pair` have that of
//! [`linear_pair`](super::linear_pair).

use super::linear_pair::linear_pair;
use super::linear_rounds::linear_rounds;
use super::rough;
use crate::TensorFloat;
use crate::pipeline::{Ring, Stages, div_rem, part};
use crate::row::GROUP;
use crate::scales::{BLOCKS, NONE, ROWS as ROW_SCALES, Scales};
use cuda_std::shared::Carver;
use cuda_std::tma::{self, TensorMap};
use cuda_std::vec::{B64, B128};
use cuda_std::wgmma::{self, Accumulator, Descriptor, Input, K, Sum};
use cuda_std::{
    Global, GlobalMut, Shared, bf16, cluster, cp_async, dependent_launch, entries, f16, float, mbarrier, mma, thread,
    unroll, warp,
};

/// Rows of weights of a consumer warpgroup.
pub const ROWS: usize = 64;
/// Elements of 16 bits of K in a stage: a line of the 128-byte swizzle.
pub const STEP: usize = 64;
/// Threads of a consumer warpgroup.
pub(super) const GROUP_THREADS: u32 = 128;
/// The first of the named barriers of consumer warpgroups.
pub(super) const BARRIER: u32 = 3;
/// Bytes of a line of the swizzle.
pub(super) const LINE: u32 = 128;
/// Words between a token's sums and the next's: more than there are rows, so that lanes with other tokens are in other banks.
const WIDTH: usize = ROWS + 4;

/// Threads: so many consumer warpgroups and a producer warp.
pub const fn threads(groups: u32) -> u32 {
    groups * GROUP_THREADS + 32
}

/// Zeroes what boxes leave of the stages' tiles of so many bytes, by the first `threads` of a block, and says whether they leave anything: then those who multiply meet before they do. (Nobody needs the products of such rows, but there
/// are some.)
#[inline(always)]
pub(super) unsafe fn clear<const STAGES: usize>(tiles: Shared<u8>, bytes: u32, filled: u32, threads: u32) -> bool {
    if filled < bytes && thread::thread_idx_x() < threads {
        for stage in 0..STAGES as u32 {
            let mut at = filled + thread::thread_idx_x() * 16;
            while at < bytes {
                tiles.set_as(stage * bytes + at, B128([0u32; 4]));
                at += 16 * threads;
            }
        }
        tma::fence_async();
    }
    filled < bytes
}

/// Asks for the weights of the first `early` of so many steps in the second-level cache: boxes of rows `rows` and on, from step `first` on. By one thread.
#[inline(always)]
pub(super) unsafe fn ask<const BOXES: usize>(
    w: *const TensorMap,
    rows: [u32; BOXES],
    first: u32,
    steps: u32,
    early: u32,
    step_size: u32,
) {
    let mut step = 0;
    while step < early.min(steps) {
        let at = ((first + step) * step_size) as i32;
        unroll::<BOXES>(|i| tma::prefetch_tensor::<2>(w, [at, rows[i] as i32]));
        step += 1;
    }
}

/// Steps whose scales of blocks are brought at once.
const CHUNK: u32 = 16;

/// Words of shared memory for scales of this kind.
const fn scale_words(tokens: usize, scales: u32) -> usize {
    match scales {
        NONE => 0,
        BLOCKS => 2 * CHUNK as usize * slot_words(tokens),
        _ => ROWS + tokens,
    }
}

/// Words for the scales of a step: those of tokens, and those of the first and of the last row of weights, which may lie in two blocks.
const fn slot_words(tokens: usize) -> usize {
    tokens + 2
}

/// Groups of 8 tokens whose sums a part of K owns.
const fn owned(tokens: usize, split: u32) -> usize {
    (tokens / 8).div_ceil(split as usize)
}

/// Whether sums without an epilogue are rounded before they are transposed. Where a block owns few tokens, or has registers for nothing else, that is no faster.
const fn rounds_first(tokens: usize, scales: u32) -> bool {
    tokens >= 32 && scales != BLOCKS
}

/// Bytes of the sums of 8 tokens of a consumer warpgroup, four of each thread.
const SUMS: u32 = 16 * GROUP_THREADS;

/// Dynamic shared memory: the rings, sums of other blocks, scales of a kind of [`scales`](crate::scales), mbarriers.
pub const fn shared_bytes(groups: usize, tokens: usize, stages: usize, split: u32, scales: u32) -> usize {
    let sums = (split as usize - 1) * groups * owned(tokens, split) * SUMS as usize;
    stages * (groups * ROWS + tokens) * LINE as usize + sums + scale_words(tokens, scales) * 4 + (2 * stages + 1) * 8
}

/// `x`: `[m, k]` in `tiles` tiles of `tokens`, a multiple of 8 up to `TOKENS` and no more than `m` if there are several, in boxes of [`STEP`] by
/// `tokens / SHARE`; `w`: `[n, k]` in boxes of [`STEP`] by `rows`, a multiple of 8 up to [`ROWS`] of each consumer; both with the 128-byte swizzle.
/// `y`: `[m, n]`, rows `y_row` apart; `n` and `y_row` are multiples of 8, `y` is aligned to 16 bytes. `bias`: `[n]` or null. `early`: steps whose weights a block asks for before it waits.
///
/// Clusters: of `SPLIT * SHARE` blocks. Grid: a cluster for each `SHARE` tiles of `rows` and each tile of tokens; block: [`threads`]; shared memory:
/// [`shared_bytes`].
#[inline(always)]
pub unsafe fn linear_few<
    T: TensorFloat + Input,
    A: Accumulator + AsRef<[f32]> + AsMut<[f32]>,
    const GROUPS: u32,
    const TOKENS: usize,
    const STAGES: usize,
    const SPLIT: u32,
    const SHARE: u32,
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
    early: u32,
) {
    scaled::<T, f32, T, A, A, NONE, GROUPS, TOKENS, STAGES, SPLIT, SHARE>(
        x,
        w,
        y,
        bias,
        Scales::none(),
        m,
        n,
        k,
        y_row,
        rows,
        tokens,
        tiles,
        kind,
        early,
    )
}

/// [`linear_few`] for operands of any type, whose products `P` have sums of type `S`, with scales. A step has 128 bytes of K.
#[inline(always)]
pub unsafe fn scaled<
    X: Input<S>,
    S: Sum,
    T: TensorFloat,
    A: Accumulator + AsRef<[f32]> + AsMut<[f32]>,
    P: Accumulator<S> + AsRef<[S]>,
    const SCALES: u32,
    const GROUPS: u32,
    const TOKENS: usize,
    const STAGES: usize,
    const SPLIT: u32,
    const SHARE: u32,
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
    rows: u32,
    tokens: u32,
    tiles: u32,
    kind: u32,
    early: u32,
) {
    const { assert!(A::N == TOKENS && P::N == TOKENS && (GROUPS == 1 || SCALES == NONE)) };
    let step_size = const { LINE / size_of::<X>() as u32 };
    let (blocks, consumers) = const { (SPLIT * SHARE, GROUPS * GROUP_THREADS) };
    match blocks {
        1 => {}
        2 => cluster::dims::<2>(),
        3 => cluster::dims::<3>(),
        _ => cluster::dims::<4>(),
    }
    let (x_bytes, w_bytes) = const { (TOKENS as u32 * LINE, GROUPS * ROWS as u32 * LINE) };
    // Groups of 8 tokens of a part of K, one after the other.
    let each = const { owned(TOKENS, SPLIT) as u32 };
    let mut carver = Carver::new();
    let ws = carver.take_aligned::<u8>(STAGES * w_bytes as usize, 1024);
    let xs = carver.take_aligned::<u8>(STAGES * x_bytes as usize, 1024);
    // What other blocks send, in the order of the registers.
    let parts = carver.take::<u32>(const { ((SPLIT - 1) * GROUPS * owned(TOKENS, SPLIT) as u32 * SUMS / 4) as usize });
    let factors = carver.take::<f32>(const { scale_words(TOKENS, SCALES) });
    let bars = carver.take::<u64>(const { Stages::<STAGES>::WORDS + 1 });
    let (tid, warp_id, lane) = (thread::thread_idx_x(), warp::warp_id(), warp::lane_id());
    let rank = cluster::rank();
    // The part of K, and the place among those that share tokens.
    let (split, place) = (rank / SHARE, rank % SHARE);
    let tile = thread::block_idx_x() / blocks;
    let (tile, tile_of_tokens) = if tiles > 1 { div_rem(tile, tiles) } else { (tile, 0) };
    let row0 = (tile * SHARE + place) * rows;
    // The last tile has all its tokens inside of `x`, and leaves out those of the one before.
    let first = tile_of_tokens * tokens;
    let token0 = if tiles > 1 { first.min(m - tokens) } else { first };
    let m = (m - token0).min(tokens);
    let skipped = first - token0;
    let stages = Stages::<STAGES>::new(bars.address(0u32)).shared_by(SHARE, split * SHARE);
    let (k0, steps) = part(k.div_ceil(step_size), split, SPLIT);
    let x_box = tokens / SHARE;
    // Counts sums that come from other blocks.
    let came = bars.address(const { Stages::<STAGES>::WORDS as u32 });
    let cleared = clear::<STAGES>(ws, w_bytes, rows * LINE, consumers);
    let cleared = clear::<STAGES>(xs, x_bytes, SHARE * x_box * LINE, consumers) || cleared;
    if tid == consumers {
        tma::prefetch_map(w);
        tma::prefetch_map(x);
        ask(w, [row0], k0, steps, early, step_size);
        if SPLIT > 1 {
            mbarrier::init(came, 1);
        }
        stages.init(consumers / 32);
        if SPLIT > 1 {
            let own = m.div_ceil(8).saturating_sub(split * each).min(each);
            mbarrier::arrive_expect_tx(came, own * const { (SPLIT - 1) * GROUPS * SUMS });
        }
    }
    cluster::arrive_relaxed();
    cluster::wait();
    dependent_launch::wait();

    if warp_id == consumers / 32 {
        if warp::elect_one() {
            let (xs, ws) = (xs.address(0u32) + place * x_box * LINE, ws.address(0u32));
            let all = const { (1 << SHARE) - 1 } << (split * SHARE);
            let launch = steps.saturating_sub(const { STAGES as u32 / 2 + 1 });
            let mut ring = Ring::<STAGES>::new();
            let mut step = 0;
            while step < steps {
                let (stage, at) = (ring.stage, ((k0 + step) * step_size) as i32);
                stages.acquire(ring, (SHARE * x_box + rows) * LINE);
                let full = stages.full(stage);
                tma::load_tensor::<2>(ws + stage * w_bytes, w, [at, row0 as i32], full);
                let (to, token) = (xs + stage * x_bytes, (token0 + place * x_box) as i32);
                if SHARE > 1 {
                    tma::load_tensor_multicast::<2>(to, x, [at, token], full, all);
                } else {
                    tma::load_tensor::<2>(to, x, [at, token], full);
                }
                if step == launch {
                    dependent_launch::launch_dependents();
                }
                ring.advance();
                step += 1;
            }
        }
        warp::sync_warp(!0);
        if SHARE > 1 {
            cluster::arrive_relaxed();
            cluster::wait();
        }
        return;
    }

    if cleared {
        // The barrier before, of a cluster, is a relaxed one, which orders no memory.
        thread::sync_named(1, consumers);
    }
    let group = if GROUPS > 1 { warp_id / 4 } else { 0 };
    let (a, b) =
        (Descriptor::<K>::new(ws.address(group * (ROWS as u32 * LINE))), Descriptor::<K>::new(xs.address(0u32)));
    let last = k.div_ceil(step_size) - 1;
    let ahead = Ahead::<SCALES, TOKENS> {
        words: factors,
        scales,
        m,
        rows: [row0.min(n - 1), (row0 + rows - 1).min(n - 1)],
        first: k0.min(last),
        steps,
        // The step of a part of K that has none of its own is nothing, whatever the scales are.
        bytes: if SPLIT == 1 || k0 <= last { 4 } else { 0 },
    };
    if SCALES == ROW_SCALES {
        // Used at the end.
        if tid < ROWS as u32 {
            cp_async::copy::<4, _>(factors.address(tid), scales.w_ptr((row0 + tid).min(n - 1), 0), 4);
        } else if tid < const { (ROWS + TOKENS) as u32 } {
            cp_async::copy::<4, _>(factors.address(tid), scales.x_ptr((tid - ROWS as u32).min(m - 1), 0), 4);
        }
        cp_async::commit_group();
    }
    if SCALES == BLOCKS {
        ahead.bring(0);
    }
    let mut acc = A::zero();
    // Those of a step, or without scales that change all of them.
    let mut partial = P::zero();
    let mut ring = Ring::<STAGES>::new();
    let mut previous = ring.stage;
    let mut step = 0;
    // Whether the stage of a step is filled again. If not, nobody waits for its release, which would still be on its way to a block of the
    // cluster when that one ends.
    let refilled = |step: u32| step + (STAGES as u32) < steps;
    // Written to run at least once; see `cuda_std::wgmma`.
    loop {
        stages.wait_full(ring);
        if SCALES == BLOCKS {
            partial.multiply::<X, 4, K, K>(a.offset(ring.stage * w_bytes), b.offset(ring.stage * x_bytes), false);
            let factors = ahead.factors(step);
            wgmma::wait::<0>(&mut partial);
            if refilled(step) {
                stages.release(ring.stage, lane);
            }
            factors.add(&mut acc, &partial);
            ring.advance();
            step += 1;
            if step >= steps {
                break;
            }
            continue;
        }
        partial.multiply::<X, 4, K, K>(a.offset(ring.stage * w_bytes), b.offset(ring.stage * x_bytes), step > 0);
        // The product before is complete, and its stage can be filled again.
        wgmma::wait::<1>(&mut partial);
        if step > 0 && refilled(step - 1) {
            stages.release(previous, lane);
        }
        previous = ring.stage;
        ring.advance();
        step += 1;
        if step >= steps {
            break;
        }
    }
    if SCALES != BLOCKS {
        wgmma::wait::<0>(&mut partial);
    }
    // A part's sums; with scales of blocks, in `f32` then.
    let part = |j: usize| {
        [0, 1, 2, 3].map(|i| {
            if SCALES == BLOCKS { acc.as_ref()[4 * j + i].to_bits() } else { partial.as_ref()[4 * j + i].to_bits() }
        })
    };
    if SCALES == ROW_SCALES {
        cp_async::wait_group::<0>();
    }

    if SHARE > 1 {
        // Done with what is shared. No block may end while another can still signal its mbarriers, or such a signal is on its way: so not relaxed.
        cluster::arrive();
    }
    // Where a thread's four sums of a group of 8 tokens are, which part `from` sends to their owner.
    let slot = |owner: u32, from: u32, j: u32| {
        let slot = if from > owner { from - 1 } else { from };
        ((slot * each + j % each) * consumers + tid) * 4
    };
    for owner in 0..SPLIT {
        if SPLIT > 1 && owner != split {
            let there = |address| cluster::map(address, owner * SHARE + place);
            let (to, came) = (there(parts.address(slot(owner, split, 0))), there(came));
            for i in 0..const { owned(TOKENS, SPLIT) } {
                let j = owner as usize * const { owned(TOKENS, SPLIT) } + i;
                if j < const { TOKENS / 8 } && j as u32 * 8 < m {
                    cluster::store_async_u32x4(to + i as u32 * const { GROUPS * SUMS }, part(j), came);
                }
            }
        }
    }
    let (bias, y) = (Global::new(bias), GlobalMut::new(y));
    let biased = !bias.ptr(0u32).is_null();
    let in_group = tid % GROUP_THREADS;
    // The first of this thread's two rows of sums; the other is the 8th below.
    let row = in_group / 32 * 16 + lane / 4;
    // On its way while sums come: their bias.
    let mut of_rows = [0f32; 2];
    if const { rounds_first(TOKENS, SCALES) } && biased && kind == 0 {
        for h in 0..2 {
            of_rows[h] = bias.get((row0 + group * ROWS as u32 + row + 8 * h as u32).min(n - 1)).to_f32();
        }
    }
    // All parts of the sums of 8 tokens that this block owns.
    let total = |j: usize| {
        let mut total = [S::default(); 4];
        for from in 0..SPLIT {
            let words = if from == split {
                part(j)
            } else {
                let B128(words): B128<u32, 4> = parts.get_as(slot(split, from, j as u32));
                words
            };
            for i in 0..4 {
                let part = S::from_bits(words[i]);
                total[i] = if from == 0 { part } else { total[i].plus(part) };
            }
        }
        total.map(S::to_f32)
    };
    // All consumers are done with the ring, in which the tokens of this part then lie one after the other.
    thread::sync_named(1, consumers);
    if SPLIT > 1 {
        // Nobody writes to this block after that, which therefore may end.
        mbarrier::wait_parity(came, 0);
    }
    if const { rounds_first(TOKENS, SCALES) } && kind == 0 {
        // Rounded, and transposed 16 tokens at a time, each a line of this consumer's rows.
        let pairs = const { owned(TOKENS, SPLIT).div_ceil(2) };
        let lines =
            Carver::new().take::<u8>(const { GROUPS as usize * owned(TOKENS, SPLIT).div_ceil(2) * 16 * LINE as usize });
        let lines = lines.offset(group * (pairs as u32 * 16 * LINE));
        // Upper and lower half of a warp's rows, of two neighbouring groups of 8 tokens.
        let to = (lane / 16 * 8 + lane % 8) * LINE + (((in_group / 32 * 2 + lane / 8 % 2) ^ (lane % 8)) << 4);
        let mut of_w = [0f32; 2];
        if SCALES == ROW_SCALES {
            of_w = [factors.get(row), factors.get(row + 8)];
        }
        for owner in 0..SPLIT {
            if owner == split {
                for pair in 0..pairs {
                    let mut words = [0u32; 4];
                    for half in 0..2 {
                        let i = 2 * pair + half;
                        let j = owner as usize * const { owned(TOKENS, SPLIT) } + i;
                        if i < const { owned(TOKENS, SPLIT) } && j < const { TOKENS / 8 } && j as u32 * 8 < m {
                            let mut values = total(j);
                            let mut of_x = [0f32; 2];
                            if SCALES == ROW_SCALES {
                                B64(of_x) = factors.get_as(ROWS as u32 + j as u32 * 8 + 2 * (lane % 4));
                            }
                            for e in 0..4 {
                                if SCALES == ROW_SCALES {
                                    values[e] = float::fma(values[e], of_x[e % 2] * of_w[e / 2], of_rows[e / 2]);
                                } else if biased {
                                    values[e] += of_rows[e / 2];
                                }
                            }
                            words[2 * half] = T::pack_f32(values[0], values[1]);
                            words[2 * half + 1] = T::pack_f32(values[2], values[3]);
                        }
                    }
                    mma::stmatrix_x4_trans(lines.address(to + pair as u32 * (16 * LINE)), words);
                }
            }
        }
        thread::sync_named(BARRIER + group, GROUP_THREADS);
        let (line, of_block) = (in_group / 8, group * ROWS as u32 + in_group % 8 * 8);
        let column = row0 + of_block;
        let from = line * LINE + (((in_group ^ line) % 8) << 4);
        let end = if of_block < rows && column < n { m } else { 0 };
        for pair in 0..pairs as u32 {
            let local = pair * 16 + line;
            let token = split * (8 * each) + local;
            if local < 8 * each && token >= skipped && token < end {
                let B128([a, b, c, d]): B128<u32, 4> = lines.get_as(from + pair * (16 * LINE));
                y.set_as((token0 + token) as usize * y_row + column as usize, B128([a, b, c, d]));
            }
        }
    } else {
        let sums = Carver::new().take::<f32>(const { GROUPS as usize * 8 * owned(TOKENS, SPLIT) * WIDTH });
        let sums = sums.offset(group * (8 * each * WIDTH as u32));
        for j in 0..const { TOKENS / 8 } {
            if j as u32 / each == split && j as u32 * 8 < m {
                let total = total(j);
                for i in 0..4 {
                    let token = j as u32 % each * 8 + 2 * (lane % 4) + i as u32 % 2;
                    sums.set(token * WIDTH as u32 + row + 8 * (i as u32 / 2), total[i]);
                }
            }
        }
        thread::sync_named(BARRIER + group, GROUP_THREADS);
        let units = const { ROWS as u32 / 8 };
        let mut unit = in_group;
        while unit < 8 * each * units {
            let (local, row) = (unit / units, unit % units * 8);
            let (token, of_block) = (split * (8 * each) + local, group * ROWS as u32 + row);
            let column = row0 + of_block;
            if token >= skipped && token < m && of_block < rows && column < n {
                let mut values = [0f32; 8];
                let at = local * WIDTH as u32 + row;
                let halves: [B128<f32, 4>; 2] = [sums.get_as(at), sums.get_as(at + 4)];
                for i in 0..8 {
                    values[i] = halves[i / 4].0[i % 4];
                }
                if SCALES == ROW_SCALES {
                    let of_x = factors.get(ROWS as u32 + token);
                    let of_w: [B128<f32, 4>; 2] = [factors.get_as(row), factors.get_as(row + 4)];
                    unroll::<8>(|i| {
                        let bias = if biased { bias.get(column + i as u32).to_f32() } else { 0.0 };
                        values[i] = float::fma(values[i], of_x * of_w[i / 4].0[i % 4], bias);
                    });
                } else if biased {
                    unroll::<8>(|i| values[i] += bias.get(column + i as u32).to_f32());
                }
                rough::epilogues(kind, &mut values);
                let mut words = [0u32; 4];
                for i in 0..4 {
                    words[i] = T::pack_f32(values[2 * i], values[2 * i + 1]);
                }
                y.set_as((token0 + token) as usize * y_row + column as usize, B128(words));
            }
            unit += GROUP_THREADS;
        }
    }
    if SHARE > 1 {
        warp::sync_warp(!0);
        cluster::wait();
    }
}

/// Scales of blocks, which the consumers bring to shared memory for [`CHUNK`] steps at once, while those before are used.
struct Ahead<const SCALES: u32, const TOKENS: usize> {
    /// Two chunks of slots.
    words: Shared<f32>,
    scales: Scales<SCALES>,
    m: u32,
    /// The first and the last row of weights: all others have the scales of one of them.
    rows: [u32; 2],
    /// The first step along K, and how many there are.
    first: u32,
    steps: u32,
    /// Bytes of a scale that are read: none make it zero.
    bytes: u32,
}

impl<const SCALES: u32, const TOKENS: usize> Ahead<SCALES, TOKENS> {
    /// The words of a step.
    #[inline(always)]
    fn slot(&self, step: u32) -> u32 {
        step % (2 * CHUNK) * const { slot_words(TOKENS) as u32 }
    }

    /// Has the scales of the chunk from step `step` on brought, by all consumers. Neighbouring threads have neighbouring groups of a row.
    #[inline(always)]
    unsafe fn bring(&self, step: u32) {
        for i in 0..const { (CHUNK * slot_words(TOKENS) as u32).div_ceil(GROUP_THREADS) } {
            let unit = i * GROUP_THREADS + thread::thread_idx_x();
            let (step, word) = (step + unit % CHUNK, unit / CHUNK);
            let (tokens, words) = const { (TOKENS as u32, slot_words(TOKENS) as u32) };
            if step < self.steps && word < words {
                let from = if word < tokens {
                    self.scales.x_ptr(word.min(self.m - 1), self.first + step)
                } else {
                    self.scales.w_ptr(if word == tokens { self.rows[0] } else { self.rows[1] }, self.first + step)
                };
                cp_async::copy::<4, _>(self.words.address(self.slot(step) + word), from, self.bytes);
            }
        }
        cp_async::commit_group();
    }

    /// The scales of this thread's sums of a step. By all consumers, for one step after the other.
    #[inline(always)]
    unsafe fn factors(&self, step: u32) -> Factors<TOKENS> {
        if step.is_multiple_of(CHUNK) {
            cp_async::wait_group::<0>();
            // This chunk is there, and nobody uses the one before any more.
            thread::sync_named(2, GROUP_THREADS);
            self.bring(step + CHUNK);
        }
        let (slot, row) = (self.slot(step), self.rows[0] + warp::warp_id() * 16);
        let last = |row: u32| (row / GROUP as u32 != self.rows[0] / GROUP as u32) as u32;
        let w = [last(row), last(row + 8)].map(|last| self.words.get(slot + TOKENS as u32 + last));
        let mut x = [[0f32; 2]; 8];
        for j in 0..const { TOKENS / 8 } {
            B64(x[j]) = self.words.get_as(slot + j as u32 * 8 + 2 * (warp::lane_id() % 4));
        }
        Factors { x, w }
    }
}

/// The scales of a thread's sums of a step: of two neighbouring tokens of each eight, of two rows of weights.
struct Factors<const TOKENS: usize> {
    x: [[f32; 2]; 8],
    w: [f32; 2],
}

impl<const TOKENS: usize> Factors<TOKENS> {
    /// Adds the products of a step, multiplied with their scales.
    #[inline(always)]
    fn add<A: AsMut<[f32]>, S: Sum, P: AsRef<[S]>>(&self, acc: &mut A, products: &P) {
        for j in 0..const { TOKENS / 8 } {
            for h in 0..2 {
                for c in 0..2 {
                    let e = 4 * j + 2 * h + c;
                    let sum = products.as_ref()[e].to_f32();
                    acc.as_mut()[e] = float::fma(sum, self.x[j][c] * self.w[h], acc.as_mut()[e]);
                }
            }
        }
    }
}

entries! {
    /// Arguments of every `linear_few_*` entry; see [`linear_few`].
    pub struct Args<T>(
        x: TensorMap, w: TensorMap, y: *mut T, bias: *const T, m: u32, n: u32, k: u32, y_row: usize,
        rows: u32, tokens: u32, tiles: u32, kind: u32, early: u32,
    );
    linear_few_t8_bf16 { type T = bf16; } [160, 2; Sm90a] => linear_few::<T, [f32; 4], 1, 8, 10, 2, 1>;
    linear_few_t8_f16 { type T = f16; } [160, 2; Sm90a] => linear_few::<T, [f32; 4], 1, 8, 10, 2, 1>;
    linear_few_t16_bf16 { type T = bf16; } [160, 2; Sm90a] => linear_few::<T, [f32; 8], 1, 16, 10, 2, 1>;
    linear_few_t16_f16 { type T = f16; } [160, 2; Sm90a] => linear_few::<T, [f32; 8], 1, 16, 10, 2, 1>;
    linear_few_t32_bf16 { type T = bf16; } [160, 2; Sm90a] => linear_few::<T, [f32; 16], 1, 32, 9, 2, 1>;
    linear_few_t32_f16 { type T = f16; } [160, 2; Sm90a] => linear_few::<T, [f32; 16], 1, 32, 9, 2, 1>;
    linear_few_t64_bf16 { type T = bf16; } [160, 1; Sm90a] => linear_few::<T, [f32; 32], 1, 64, 12, 2, 1>;
    linear_few_t64_f16 { type T = f16; } [160, 1; Sm90a] => linear_few::<T, [f32; 32], 1, 64, 12, 2, 1>;
    linear_few_t64_pair_bf16 { type T = bf16; } [160, 1; Sm90a] => linear_pair::<T, 1, 8>;
    linear_few_t64_pair_f16 { type T = f16; } [160, 1; Sm90a] => linear_pair::<T, 1, 8>;
    linear_few_t64_r6_bf16 { type T = bf16; } [160, 2; Sm90a] => linear_few::<T, [f32; 32], 1, 64, 6, 2, 1>;
    linear_few_t64_r6_f16 { type T = f16; } [160, 2; Sm90a] => linear_few::<T, [f32; 32], 1, 64, 6, 2, 1>;
    linear_few_t64_x4_bf16 { type T = bf16; } [160, 2; Sm90a] => linear_few::<T, [f32; 32], 1, 64, 5, 1, 4>;
    linear_few_t64_x4_f16 { type T = f16; } [160, 2; Sm90a] => linear_few::<T, [f32; 32], 1, 64, 5, 1, 4>;
    linear_few_t72_bf16 { type T = bf16; } [160, 1; Sm90a] => linear_few::<T, [f32; 36], 1, 72, 12, 2, 1>;
    linear_few_t72_f16 { type T = f16; } [160, 1; Sm90a] => linear_few::<T, [f32; 36], 1, 72, 12, 2, 1>;
    linear_few_t96_bf16 { type T = bf16; } [160, 1; Sm90a] => linear_few::<T, [f32; 48], 1, 96, 10, 2, 1>;
    linear_few_t96_f16 { type T = f16; } [160, 1; Sm90a] => linear_few::<T, [f32; 48], 1, 96, 10, 2, 1>;
    linear_few_t128_bf16 { type T = bf16; } [160, 1; Sm90a] => linear_few::<T, [f32; 64], 1, 128, 8, 2, 1>;
    linear_few_t128_f16 { type T = f16; } [160, 1; Sm90a] => linear_few::<T, [f32; 64], 1, 128, 8, 2, 1>;
    linear_few_t128_pair_bf16 { type T = bf16; } [288, 1; Sm90a] => linear_pair::<T, 2, 8>;
    linear_few_t128_pair_f16 { type T = f16; } [288, 1; Sm90a] => linear_pair::<T, 2, 8>;
    linear_few_t160_bf16 { type T = bf16; } [160, 1; Sm90a] => linear_few::<T, [f32; 80], 1, 160, 7, 2, 1>;
    linear_few_t160_f16 { type T = f16; } [160, 1; Sm90a] => linear_few::<T, [f32; 80], 1, 160, 7, 2, 1>;
    linear_few_t192_bf16 { type T = bf16; } [160, 1; Sm90a] => linear_few::<T, [f32; 96], 1, 192, 6, 2, 1>;
    linear_few_t192_f16 { type T = f16; } [160, 1; Sm90a] => linear_few::<T, [f32; 96], 1, 192, 6, 2, 1>;
    linear_few_r128_t72_split2_bf16 { type T = bf16; } [288, 1; Sm90a] => linear_few::<T, [f32; 36], 2, 72, 8, 2, 1>;
    linear_few_r128_t72_split2_f16 { type T = f16; } [288, 1; Sm90a] => linear_few::<T, [f32; 36], 2, 72, 8, 2, 1>;
    linear_few_r128_t96_split2_bf16 { type T = bf16; } [288, 1; Sm90a] => linear_few::<T, [f32; 48], 2, 96, 7, 2, 1>;
    linear_few_r128_t96_split2_f16 { type T = f16; } [288, 1; Sm90a] => linear_few::<T, [f32; 48], 2, 96, 7, 2, 1>;
    linear_few_r128_t128_split2_bf16 { type T = bf16; } [288, 1; Sm90a] => linear_few::<T, [f32; 64], 2, 128, 6, 2, 1>;
    linear_few_r128_t128_split2_f16 { type T = f16; } [288, 1; Sm90a] => linear_few::<T, [f32; 64], 2, 128, 6, 2, 1>;
    linear_few_r128_t160_split2_bf16 { type T = bf16; } [288, 1; Sm90a] => linear_few::<T, [f32; 80], 2, 160, 5, 2, 1>;
    linear_few_r128_t160_split2_f16 { type T = f16; } [288, 1; Sm90a] => linear_few::<T, [f32; 80], 2, 160, 5, 2, 1>;
    linear_few_r128_t208_split2_bf16 { type T = bf16; } [288, 1; Sm90a] => linear_few::<T, [f32; 104], 2, 208, 4, 2, 1>;
    linear_few_r128_t208_split2_f16 { type T = f16; } [288, 1; Sm90a] => linear_few::<T, [f32; 104], 2, 208, 4, 2, 1>;
    linear_few_r128_t128_split3_bf16 { type T = bf16; } [288, 1; Sm90a] => linear_few::<T, [f32; 64], 2, 128, 5, 3, 1>;
    linear_few_r128_t128_split3_f16 { type T = f16; } [288, 1; Sm90a] => linear_few::<T, [f32; 64], 2, 128, 5, 3, 1>;
    linear_few_r128_t128_split4_bf16 { type T = bf16; } [288, 1; Sm90a] => linear_few::<T, [f32; 64], 2, 128, 5, 4, 1>;
    linear_few_r128_t128_split4_f16 { type T = f16; } [288, 1; Sm90a] => linear_few::<T, [f32; 64], 2, 128, 5, 4, 1>;
    linear_few_r128_t96_bf16 { type T = bf16; } [384, 1; Sm90a] => linear_rounds::<T, [f32; 48], 2, 96, 8>;
    linear_few_r128_t96_f16 { type T = f16; } [384, 1; Sm90a] => linear_rounds::<T, [f32; 48], 2, 96, 8>;
    linear_few_r128_t112_bf16 { type T = bf16; } [384, 1; Sm90a] => linear_rounds::<T, [f32; 56], 2, 112, 7>;
    linear_few_r128_t112_f16 { type T = f16; } [384, 1; Sm90a] => linear_rounds::<T, [f32; 56], 2, 112, 7>;
    linear_few_r128_t128_bf16 { type T = bf16; } [384, 1; Sm90a] => linear_rounds::<T, [f32; 64], 2, 128, 7>;
    linear_few_r128_t128_f16 { type T = f16; } [384, 1; Sm90a] => linear_rounds::<T, [f32; 64], 2, 128, 7>;
    linear_few_r128_t160_bf16 { type T = bf16; } [384, 1; Sm90a] => linear_rounds::<T, [f32; 80], 2, 160, 6>;
    linear_few_r128_t160_f16 { type T = f16; } [384, 1; Sm90a] => linear_rounds::<T, [f32; 80], 2, 160, 6>;
    linear_few_r128_t192_bf16 { type T = bf16; } [384, 1; Sm90a] => linear_rounds::<T, [f32; 96], 2, 192, 5>;
    linear_few_r128_t192_f16 { type T = f16; } [384, 1; Sm90a] => linear_rounds::<T, [f32; 96], 2, 192, 5>;
    linear_few_r128_t208_bf16 { type T = bf16; } [384, 1; Sm90a] => linear_rounds::<T, [f32; 104], 2, 208, 5>;
    linear_few_r128_t208_f16 { type T = f16; } [384, 1; Sm90a] => linear_rounds::<T, [f32; 104], 2, 208, 5>;
    linear_few_r128_t224_bf16 { type T = bf16; } [384, 1; Sm90a] => linear_rounds::<T, [f32; 112], 2, 224, 5>;
    linear_few_r128_t224_f16 { type T = f16; } [384, 1; Sm90a] => linear_rounds::<T, [f32; 112], 2, 224, 5>;
    linear_few_r128_t304_bf16 { type T = bf16; } [384, 1; Sm90a] => linear_rounds::<T, [f32; 76], 2, 304, 4>;
    linear_few_r128_t304_f16 { type T = f16; } [384, 1; Sm90a] => linear_rounds::<T, [f32; 76], 2, 304, 4>;
    linear_few_r128_t320_bf16 { type T = bf16; } [384, 1; Sm90a] => linear_rounds::<T, [f32; 80], 2, 320, 4>;
    linear_few_r128_t320_f16 { type T = f16; } [384, 1; Sm90a] => linear_rounds::<T, [f32; 80], 2, 320, 4>;
    linear_few_r192_t80_bf16 { type T = bf16; } [512, 1; Sm90a] => linear_rounds::<T, [f32; 40], 3, 80, 6>;
    linear_few_r192_t80_f16 { type T = f16; } [512, 1; Sm90a] => linear_rounds::<T, [f32; 40], 3, 80, 6>;
    linear_few_r192_t144_bf16 { type T = bf16; } [512, 1; Sm90a] => linear_rounds::<T, [f32; 72], 3, 144, 5>;
    linear_few_r192_t144_f16 { type T = f16; } [512, 1; Sm90a] => linear_rounds::<T, [f32; 72], 3, 144, 5>;
    linear_few_r192_t160_bf16 { type T = bf16; } [512, 1; Sm90a] => linear_rounds::<T, [f32; 80], 3, 160, 5>;
    linear_few_r192_t160_f16 { type T = f16; } [512, 1; Sm90a] => linear_rounds::<T, [f32; 80], 3, 160, 5>;
    linear_few_r192_t192_bf16 { type T = bf16; } [512, 1; Sm90a] => linear_rounds::<T, [f32; 96], 3, 192, 4>;
    linear_few_r192_t192_f16 { type T = f16; } [512, 1; Sm90a] => linear_rounds::<T, [f32; 96], 3, 192, 4>;
    linear_few_r192_t208_bf16 { type T = bf16; } [512, 1; Sm90a] => linear_rounds::<T, [f32; 52], 3, 208, 4>;
    linear_few_r192_t208_f16 { type T = f16; } [512, 1; Sm90a] => linear_rounds::<T, [f32; 52], 3, 208, 4>;
    linear_few_r192_t224_bf16 { type T = bf16; } [512, 1; Sm90a] => linear_rounds::<T, [f32; 56], 3, 224, 4>;
    linear_few_r192_t224_f16 { type T = f16; } [512, 1; Sm90a] => linear_rounds::<T, [f32; 56], 3, 224, 4>;
    linear_few_r192_t256_bf16 { type T = bf16; } [512, 1; Sm90a] => linear_rounds::<T, [f32; 64], 3, 256, 4>;
    linear_few_r192_t256_f16 { type T = f16; } [512, 1; Sm90a] => linear_rounds::<T, [f32; 64], 3, 256, 4>;
}
