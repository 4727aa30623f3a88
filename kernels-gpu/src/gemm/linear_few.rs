//! `y = epilogue(x · wᵀ + bias)` on Hopper for few tokens: a stream of weights through the copy engine and `wgmma`.
//!
//! With few tokens the time is that of reading `w` once. The weights are the 64-row side of `m64nNk16` and the tokens the N side, which
//! follows their number. A block has [`ROWS`] rows of weights and a part of K: a producer warp has the copy engine bring steps of 64 elements of K
//! into a ring ([`pipeline`](crate::pipeline)), a consumer warpgroup multiplies them.
//!
//! **Parts of K** (`SPLIT`): so many blocks of a cluster have the same rows. Each owns as many of the tokens, whose sums the others send to its shared memory;
//! it adds the parts in their order, and stores 16 bytes at a time. The order of summation depends on `k` and `SPLIT` only.
//!
//! **Sharing tokens** (`SHARE`): of many tokens a block with 64 rows of weights reads as much as of weights, from the L2 cache, which then is what takes the
//! time. So many blocks of a cluster have neighbouring rows and the same part of K; each loads some of the tokens for all.
//!
//! **The next launch** may start when a block has asked for all but half a ring of its weights. Its blocks then are ready when the last of
//! this launch end: two fit on a multiprocessor, except where the ring needs all of its memory. Earlier, they would be there before
//! the blocks of this launch are, and take places from them.

use super::rough;
use crate::TensorFloat;
use crate::pipeline::{Ring, Stages, part};
use cuda_std::shared::Carver;
use cuda_std::tma::{self, TensorMap};
use cuda_std::vec::B128;
use cuda_std::wgmma::{self, Accumulator, Descriptor, Input, K};
use cuda_std::{Global, GlobalMut, bf16, cluster, dependent_launch, entries, f16, thread, unroll, warp};

/// Rows of weights of a block.
pub const ROWS: usize = 64;
/// Elements of K in a stage: a line of the 128-byte swizzle.
pub const STEP: usize = 64;
/// Threads: the consumers and a producer warp.
pub const THREADS: usize = CONSUMERS as usize + 32;
/// Threads of the consumer warpgroup.
const CONSUMERS: u32 = 128;
/// Bytes of a line of the swizzle.
const LINE: u32 = 128;
/// Words between a token's sums and the next's: more than there are rows, so that lanes with other tokens are in other banks.
const WIDTH: usize = ROWS + 4;

/// Dynamic shared memory: the ring, sums, mbarriers.
pub const fn shared_bytes(tokens: usize, stages: usize) -> usize {
    stages * (ROWS + tokens) * STEP * 2 + tokens * WIDTH * 4 + 2 * stages * 8
}

/// Rows of a box of `x`: not all that the kernel has room for, as rows outside of the tensor cost the copy engine time as well.
pub const fn x_rows(m: u32, tokens: u32, share: u32) -> u32 {
    if share > 1 { tokens / share } else { m.next_multiple_of(8) }
}

/// `x`: `[m, k]` with `m <= TOKENS`, in boxes of [`STEP`] by [`x_rows`]; `w`: `[n, k]` in boxes of [`STEP`] by [`ROWS`]; both with the
/// 128-byte swizzle. `y`: `[m, n]`, rows `y_row` apart; `n` and `y_row` are multiples of 8, `y` is aligned to 16 bytes. `bias`: `[n]` or null.
///
/// Clusters: of `SPLIT * SHARE` blocks. Grid: a cluster for each `SHARE` tiles of rows; block: [`THREADS`]; shared memory: [`shared_bytes`].
#[inline(always)]
pub unsafe fn linear_few<
    T: TensorFloat + Input,
    A: Accumulator + AsRef<[f32]>,
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
    kind: u32,
) {
    const { assert!(A::N == TOKENS && TOKENS.is_multiple_of(SPLIT as usize)) };
    let blocks = const { SPLIT * SHARE };
    match blocks {
        2 => cluster::dims::<2>(),
        _ => cluster::dims::<4>(),
    }
    let (x_bytes, w_bytes) = const { (TOKENS as u32 * LINE, ROWS as u32 * LINE) };
    let mut carver = Carver::new();
    let ws = carver.take_aligned::<u8>(STAGES * w_bytes as usize, 1024);
    let xs = carver.take_aligned::<u8>(STAGES * x_bytes as usize, 1024);
    let sums = carver.take::<f32>(TOKENS * WIDTH);
    let bars = carver.take::<u64>(const { Stages::<STAGES>::WORDS });
    let (tid, warp_id, lane) = (thread::thread_idx_x(), warp::warp_id(), warp::lane_id());
    let rank = cluster::rank();
    // The part of K, and the place among those that share tokens.
    let (split, place) = (rank / SHARE, rank % SHARE);
    let row0 = (thread::block_idx_x() / blocks * SHARE + place) * ROWS as u32;
    let stages = Stages::<STAGES>::new(bars.address(0u32)).shared_by(SHARE, split * SHARE);
    let (k0, steps) = part(k.div_ceil(STEP as u32), split, SPLIT);
    let x_box = x_rows(m, TOKENS as u32, SHARE);
    if SHARE == 1 && x_box < TOKENS as u32 {
        // What no box fills.
        let mut at = tid * 16;
        while at < STAGES as u32 * x_bytes {
            if at % x_bytes >= x_box * LINE {
                xs.set_as(at, B128([0u32; 4]));
            }
            at += 16 * THREADS as u32;
        }
        tma::fence_async();
    }
    if tid == CONSUMERS {
        tma::prefetch_map(w);
        tma::prefetch_map(x);
        stages.init(CONSUMERS / 32);
    }
    cluster::arrive_relaxed();
    cluster::wait();
    dependent_launch::wait();

    if warp_id == CONSUMERS / 32 {
        if warp::elect_one() {
            let (xs, ws) = (xs.address(0u32) + place * x_box * LINE, ws.address(0u32));
            let all = const { (1 << SHARE) - 1 } << (split * SHARE);
            let launch = steps.saturating_sub(const { STAGES as u32 / 2 + 1 });
            let mut ring = Ring::<STAGES>::new();
            let mut step = 0;
            while step < steps {
                let (stage, at) = (ring.stage, ((k0 + step) * STEP as u32) as i32);
                stages.acquire(ring, SHARE * x_box * LINE + w_bytes);
                let full = stages.full(stage);
                tma::load_tensor::<2>(ws + stage * w_bytes, w, [at, row0 as i32], full);
                let (to, token) = (xs + stage * x_bytes, (place * x_box) as i32);
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
        cluster::sync();
        return;
    }

    let (a, b) = (Descriptor::<K>::new(ws.address(0u32)), Descriptor::<K>::new(xs.address(0u32)));
    let mut acc = A::zero();
    let mut ring = Ring::<STAGES>::new();
    let mut previous = ring.stage;
    let mut step = 0;
    // Written to run at least once; see `cuda_std::wgmma`.
    loop {
        stages.wait_full(ring);
        acc.multiply::<T, 4, K, K>(a.offset(ring.stage * w_bytes), b.offset(ring.stage * x_bytes), step > 0);
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

    // A part has the tokens of a block, one after the other.
    let each = const { TOKENS as u32 / SPLIT };
    let row = warp_id * 16 + lane / 4;
    for e in 0..const { TOKENS / 2 } {
        let token = (e as u32 / 4) * 8 + 2 * (lane % 4) + e as u32 % 2;
        if token < m {
            let at = (split * each + token % each) * WIDTH as u32 + row + 8 * (e as u32 / 2 % 2);
            let value = acc.as_ref()[e];
            if SPLIT > 1 {
                cluster::store_u32(cluster::map(sums.address(at), token / each * SHARE + place), value.to_bits());
            } else {
                sums.set(at, value);
            }
        }
    }
    // Also: no block ends while another can still signal its mbarriers or send to it.
    cluster::sync();
    let (bias, y) = (Global::new(bias), GlobalMut::new(y));
    let biased = !bias.ptr(0u32).is_null();
    let units = const { ROWS as u32 / 8 };
    let mut unit = tid;
    while unit < each * units {
        let (local, row) = (unit / units, unit % units * 8);
        let (token, column) = (split * each + local, row0 + row);
        if token < m && column < n {
            let mut values = [0f32; 8];
            for from in 0..SPLIT {
                let at = (from * each + local) * WIDTH as u32 + row;
                let parts: [B128<f32, 4>; 2] = [sums.get_as(at), sums.get_as(at + 4)];
                for i in 0..8 {
                    let value = parts[i / 4].0[i % 4];
                    values[i] = if from == 0 { value } else { values[i] + value };
                }
            }
            if biased {
                unroll::<8>(|i| values[i] += bias.get(column + i as u32).to_f32());
            }
            rough::epilogues(kind, &mut values);
            let mut words = [0u32; 4];
            for i in 0..4 {
                words[i] = T::pack_f32(values[2 * i], values[2 * i + 1]);
            }
            y.set_as(token as usize * y_row + column as usize, B128(words));
        }
        unit += CONSUMERS;
    }
}

entries! {
    /// Arguments of every `linear_few_*` entry; see [`linear_few`].
    pub struct Args<T>(
        x: TensorMap, w: TensorMap, y: *mut T, bias: *const T, m: u32, n: u32, k: u32, y_row: usize, kind: u32,
    );
    linear_few_t8_bf16 { type T = bf16; } [160, 2; Sm90a] => linear_few::<T, [f32; 4], 8, 10, 2, 1>;
    linear_few_t8_f16 { type T = f16; } [160, 2; Sm90a] => linear_few::<T, [f32; 4], 8, 10, 2, 1>;
    linear_few_t16_bf16 { type T = bf16; } [160, 2; Sm90a] => linear_few::<T, [f32; 8], 16, 10, 2, 1>;
    linear_few_t16_f16 { type T = f16; } [160, 2; Sm90a] => linear_few::<T, [f32; 8], 16, 10, 2, 1>;
    linear_few_t32_bf16 { type T = bf16; } [160, 2; Sm90a] => linear_few::<T, [f32; 16], 32, 8, 2, 1>;
    linear_few_t32_f16 { type T = f16; } [160, 2; Sm90a] => linear_few::<T, [f32; 16], 32, 8, 2, 1>;
    linear_few_t64_bf16 { type T = bf16; } [160, 1; Sm90a] => linear_few::<T, [f32; 32], 64, 12, 2, 1>;
    linear_few_t64_f16 { type T = f16; } [160, 1; Sm90a] => linear_few::<T, [f32; 32], 64, 12, 2, 1>;
    linear_few_t64_x4_bf16 { type T = bf16; } [160, 2; Sm90a] => linear_few::<T, [f32; 32], 64, 5, 1, 4>;
    linear_few_t64_x4_f16 { type T = f16; } [160, 2; Sm90a] => linear_few::<T, [f32; 32], 64, 5, 1, 4>;
}
