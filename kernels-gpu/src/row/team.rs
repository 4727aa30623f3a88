//! The threads that work on one row, and what they find out together.

use super::quantise::warp_amax;
use cuda_std::shared::{Carver, Shared, SharedAddress};
use cuda_std::vec::B128;
use cuda_std::{cluster, float, mbarrier, thread, warp};

/// An operation to reduce with.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Op {
    /// The sum.
    Sum,
    /// The largest of numbers that are not negative. Of whole warps it may be NaN, which is larger than any.
    Max,
}

impl Op {
    #[inline(always)]
    fn apply(self, a: f32, b: f32) -> f32 {
        match self {
            Op::Sum => a + b,
            Op::Max => float::max(a, b),
        }
    }

    /// Of what four warps have.
    #[inline(always)]
    fn over_quad(self, [a, b, c, d]: [f32; 4]) -> f32 {
        match self {
            Op::Sum => (a + b) + (c + d),
            Op::Max => f32::from_bits(a.to_bits().max(b.to_bits()).max(c.to_bits().max(d.to_bits()))),
        }
    }

    /// Over the warp; every lane gets the result.
    #[inline(always)]
    #[track_caller]
    pub fn over_warp(self, value: f32) -> f32 {
        match self {
            Op::Sum => warp::reduce(value, |a, b| a + b),
            Op::Max => warp_amax(value),
        }
    }
}

/// Some lanes of a warp, or a block: the threads with the same `threadIdx.y`.
///
/// Up to 32 of them are a power of two, share a warp with other teams, and reduce by shuffles. More of them are a multiple of 32, and meet at a
/// barrier of the whole block, which may have several teams with scratch of their own.
#[derive(Clone, Copy)]
pub struct Team {
    /// How many threads.
    pub size: u32,
    /// The caller's number among them.
    pub rank: u32,
}

impl Team {
    /// Of the calling thread.
    #[inline(always)]
    pub fn current() -> Self {
        Self { size: thread::block_dim_x(), rank: thread::thread_idx_x() }
    }

    /// Reduces `values[k]` with `ops[k]` over the team; everybody gets the results. All threads of the block take part.
    ///
    /// `WARPS` is a multiple of 4 and no less than the warps of a block; the scratch has [`scratch_len`] elements and
    /// is used once between barriers. The order of operations depends on the size of the team only.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn reduce<const K: usize, const WARPS: usize>(
        self,
        values: [f32; K],
        ops: [Op; K],
        scratch: Shared<f32>,
    ) -> [f32; K] {
        let mut out = values;
        if self.size < 32 {
            let mut m = self.size / 2;
            while m > 0 {
                cuda_std::unroll::<K>(|k| out[k] = ops[k].apply(out[k], warp::shfl_xor(out[k], m)));
                m /= 2;
            }
            return out;
        }
        cuda_std::unroll::<K>(|k| out[k] = ops[k].over_warp(out[k]));
        self.reduce_warps::<K, 1, WARPS>(out.map(|value| [value]), ops, scratch)
    }

    /// As [`reduce_warps`](Self::reduce_warps) for a team of one warp in place of up to four: nobody else is asked.
    #[inline(always)]
    pub fn combine<const K: usize, const U: usize>(values: [[f32; U]; K], ops: [Op; K]) -> [f32; K] {
        const { assert!(U <= 4) };
        let mut out = [0.0; K];
        cuda_std::unroll::<K>(|k| {
            let mut quad = [0.0; 4];
            cuda_std::unroll::<U>(|u| quad[u] = values[k][u]);
            out[k] = ops[k].over_quad(quad);
        });
        out
    }

    /// The rest of [`reduce`](Self::reduce) for teams of whole warps, after [`Op::over_warp`].
    ///
    /// Value `[k][u]` is what `reduce` has at thread `u * size + rank` of a team `U` times as large, and the result is the same bits. `WARPS` is
    /// no less than that team's warps.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn reduce_warps<const K: usize, const U: usize, const WARPS: usize>(
        self,
        values: [[f32; U]; K],
        ops: [Op; K],
        scratch: Shared<f32>,
    ) -> [f32; K] {
        let out = values.map(|value| value[0]);
        if U == 1 && self.size == 32 {
            return out;
        }
        let (warp, lane, own) = (self.rank / 32, self.rank % 32, self.size / 32);
        let warps = own * U as u32;
        if lane == 0 {
            cuda_std::unroll::<K>(|k| {
                cuda_std::unroll::<U>(|u| {
                    scratch.set(k * WARPS + u * own as usize + warp as usize, values[k][u]);
                });
            });
        }
        if warp == 0 && lane >= warps && lane < WARPS as u32 {
            cuda_std::unroll::<K>(|k| {
                if ops[k] == Op::Sum || WARPS == 4 {
                    scratch.set(k * WARPS + lane as usize, 0.0);
                }
            });
        }
        thread::sync_threads();
        Self::over_warps::<K, WARPS>(ops, scratch, warps, lane)
    }

    /// What `warps` warps have left in `scratch`, where sums are zero beyond them; `lane` is the caller's.
    #[inline(always)]
    #[track_caller]
    unsafe fn over_warps<const K: usize, const WARPS: usize>(
        ops: [Op; K],
        scratch: Shared<f32>,
        warps: u32,
        lane: u32,
    ) -> [f32; K] {
        let mut out = [0.0; K];
        cuda_std::unroll::<K>(|k| {
            out[k] = if ops[k] == Op::Max && WARPS > 4 {
                ops[k].over_warp(if lane < warps { scratch.get(k * WARPS + lane as usize) } else { 0.0 })
            } else {
                // Every thread reads what all warps have, which is faster than another round of shuffles.
                let mut quads = [0.0; 4];
                let mut i = 0;
                while i < WARPS {
                    let B128(q): B128<f32, 4> = scratch.get_as(k * WARPS + i);
                    cuda_std::unroll::<4>(|j| quads[j] = if i == 0 { q[j] } else { ops[k].apply(quads[j], q[j]) });
                    i += 4;
                }
                ops[k].over_quad(quads)
            };
        });
        out
    }
}

/// Blocks of the cluster of a [`Spread`] team.
pub const SPREAD: u32 = 8;

/// Shared memory of a block of a [`Spread`] team of up to so many warps, for `k` values.
pub const fn spread_bytes(k: usize, warps: usize) -> usize {
    scratch_len(k, warps) * 4 + 8
}

/// A [`Team`] whose warps are dealt out to the blocks of a cluster, the first ones to the first block, so that eight multiprocessors read what one would: 64 bytes a cycle each. It
/// reduces as the same team in one block, to the same bits.
///
/// Each warp tells all blocks its values by stores that an mbarrier of each block counts: the only barrier of the cluster is before the first of them, and passes while
/// the kernels before still run.
#[derive(Clone, Copy)]
pub struct Spread<const K: usize, const WARPS: usize> {
    /// The team in one block.
    pub team: Team,
    /// Whether the thread is in it: the last warps may have nothing to do.
    pub live: bool,
    /// Of each warp its values side by side; zeros beyond the last.
    values: Shared<f32>,
    came: u32,
    /// Where the lane tells a block its warp's first value, and what counts it.
    to: u32,
    told: u32,
}

impl<const K: usize, const WARPS: usize> Spread<K, WARPS> {
    /// A team of `size` threads, a multiple of 32 and no more than those of the cluster. By all threads of it, before anything else; [`meet`](Self::meet) follows.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn new(size: u32, carver: &mut Carver) -> Self {
        cluster::dims::<SPREAD>();
        let (thread, lane, block) = (thread::thread_idx_x(), warp::lane_id(), cluster::rank());
        let values = carver.take::<f32>(scratch_len(K, WARPS));
        let came = carver.take::<u64>(1).ptr(0u32);
        let warps = size / 32;
        if thread == 0 {
            mbarrier::init(came, 1);
            mbarrier::fence_init();
            mbarrier::arrive_expect_tx(came, warps * const { K as u32 * 4 });
        }
        if thread < 32 && warps <= lane && lane < WARPS as u32 {
            cuda_std::unroll::<K>(|k| values.set(lane * K as u32 + k as u32, 0.0));
        }
        warp::sync_warp(warp::FULL);
        // Nobody may write to a block that does not run yet, or has no mbarrier; and the zeros are for the block's other warps.
        cluster::arrive();
        let rank = block * thread::block_dim_x() + thread;
        let (to, told) = (values.ptr(rank / 32 * K as u32), came);
        let [to, told] = [cluster::map(to, lane % SPREAD), cluster::map(told, lane % SPREAD)];
        Self { team: Team { size, rank }, live: rank < size, values, came: came.shared_address(), to, told }
    }

    /// Words that are to be known before the wait for the kernels before.
    #[inline(always)]
    pub fn words(self) -> [u32; 2] {
        [self.to, self.told]
    }

    /// Waits until all blocks are there.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn meet(self) {
        cluster::wait();
    }

    /// Once, by all threads: tells all blocks what the warp has found.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn tell(self, values: [f32; K]) {
        const { assert!(K == 1 || K == 2 || K == 4) };
        let words = values.map(f32::to_bits);
        if warp::lane_id() < SPREAD && self.live {
            // One message, since of 16 rows in as many clusters there are thousands.
            match K {
                1 => cluster::store_async_u32(self.to, words[0], self.told),
                2 => cluster::store_async_u32x2(self.to, [words[0], words[K - 1]], self.told),
                _ => {
                    cluster::store_async_u32x4(self.to, [words[0], words[1 % K], words[2 % K], words[K - 1]], self.told)
                }
            }
        }
    }

    /// What all warps have told, those of each side by side, zeros beyond the last.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn hear(self) -> Shared<f32> {
        // Blocks that have all of it have been written to for the last time, and may end.
        mbarrier::wait_parity(self.came, 0);
        self.values
    }

    /// As [`Team::reduce_warps`], once, of one or two values, maxima of numbers.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn reduce_warps(self, values: [f32; K], ops: [Op; K]) -> [f32; K] {
        self.tell(values);
        self.reduce_told(ops)
    }

    /// The same of what warps have [told](Self::tell).
    #[inline(always)]
    #[track_caller]
    pub unsafe fn reduce_told(self, ops: [Op; K]) -> [f32; K] {
        const { assert!(K <= 2) };
        self.hear();
        if K == 1 {
            return Team::over_warps::<K, WARPS>(ops, self.values, self.team.size / 32, warp::lane_id());
        }
        // In the order of `Team::over_warps`.
        let (mut quads, mut out) = ([[0.0; 4]; K], [0.0; K]);
        let mut i = 0;
        while i < WARPS {
            let halves: [B128<f32, 4>; 2] = [self.values.get_as(2 * i), self.values.get_as(2 * i + 4)];
            cuda_std::unroll::<K>(|k| {
                cuda_std::unroll::<4>(|j| {
                    let value = halves[j / 2].0[j % 2 * 2 + k];
                    quads[k][j] = if i == 0 { value } else { ops[k].apply(quads[k][j], value) };
                });
            });
            i += 4;
        }
        cuda_std::unroll::<K>(|k| out[k] = ops[k].over_quad(quads[k]));
        out
    }
}

/// Elements of shared memory for one [`Team::reduce`] of `k` values.
pub const fn scratch_len(k: usize, warps: usize) -> usize {
    k * warps
}

/// The scratch of one reduction.
#[inline(always)]
#[track_caller]
pub unsafe fn scratch<const K: usize, const WARPS: usize>(shared: &mut Carver) -> Shared<f32> {
    shared.take::<f32>(scratch_len(K, WARPS))
}
