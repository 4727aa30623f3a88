//! Pieces of Hopper's pipelined matrix products: the ring of stages between the copy engine and the tensor cores, the
//! order in which blocks take tiles, and the split of K.
//!
//! A producer warp has the copy engine fill stages of shared memory; consumer warpgroups multiply what is in them. Two
//! mbarriers for each stage keep them in step: `full` completes when all bytes of a stage have come, `empty` when every
//! consumer is done with it. Both sides walk the same [`Ring`], so neither needs to tell the other where it is.
//!
//! Used by kernels of several families, so it lies outside of all of them.

use cuda_std::wgmma::{self, Accumulator, Descriptor, Input, K, Sum};
use cuda_std::{mbarrier, warp};

/// A position in a ring of `STAGES` stages, and the parity of the round.
#[derive(Clone, Copy, Debug)]
pub struct Ring<const STAGES: usize> {
    /// The stage.
    pub stage: u32,
    /// 0 in the first round, 1 in the second, then 0 again.
    pub parity: u32,
}

impl<const STAGES: usize> Ring<STAGES> {
    /// The first stage of the first round.
    #[inline(always)]
    #[allow(clippy::new_without_default)]
    pub fn new() -> Self {
        Self { stage: 0, parity: 0 }
    }

    /// On to the next stage.
    #[inline(always)]
    pub fn advance(&mut self) {
        self.stage += 1;
        if self.stage == STAGES as u32 {
            self.stage = 0;
            self.parity ^= 1;
        }
    }

    /// Past so many stages, which are somebody else's.
    #[inline(always)]
    pub fn skip(&mut self, stages: u32) {
        let to = self.stage + stages;
        self.stage = to % STAGES as u32;
        self.parity ^= (to / STAGES as u32) & 1;
    }
}

/// The mbarriers of a ring: `STAGES` words of shared memory for `full`, and as many behind them for `empty`.
///
/// Blocks of a cluster may share stages by multicast: then consumers release a stage in all of them.
#[derive(Clone, Copy, Debug)]
pub struct Stages<const STAGES: usize> {
    /// Address of the first.
    bars: u32,
    /// How many blocks share stages, and the number in the cluster of their first.
    blocks: u32,
    first: u32,
}

impl<const STAGES: usize> Stages<STAGES> {
    /// Words of shared memory.
    pub const WORDS: usize = 2 * STAGES;

    /// The mbarriers at this address in shared memory, of a block that shares its stages with none.
    #[inline(always)]
    pub fn new(bars: u32) -> Self {
        Self { bars, blocks: 1, first: 0 }
    }

    /// That shares stages in a group of `blocks` (a constant), of which `first` is the first's number in the cluster.
    #[inline(always)]
    pub fn shared_by(self, blocks: u32, first: u32) -> Self {
        Self { blocks, first, ..self }
    }

    /// By one thread, before the block's (or cluster's) first barrier. `consumers`: how many warps of a block release each
    /// stage.
    ///
    /// # Safety
    /// The words are aligned, and nobody uses them yet.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn init(self, consumers: u32) {
        self.init_counted(1, consumers);
    }

    /// [`init`](Self::init) for stages that are full after so many arrivals of `producers`, that of
    /// [`acquire`](Self::acquire) among them.
    ///
    /// # Safety
    /// As for [`init`](Self::init).
    #[inline(always)]
    #[track_caller]
    pub unsafe fn init_counted(self, producers: u32, consumers: u32) {
        let mut stage = 0;
        while stage < STAGES as u32 {
            mbarrier::init(self.full(stage), producers);
            mbarrier::init(self.empty(stage), consumers * self.blocks);
            stage += 1;
        }
        mbarrier::fence_init();
    }

    /// What a copy into the stage signals.
    #[inline(always)]
    pub fn full(self, stage: u32) -> u32 {
        self.bars + 8 * stage
    }

    #[inline(always)]
    fn empty(self, stage: u32) -> u32 {
        // In these words, so that the machine code has an address for `full` and a distance for this one: racecheck does not see the
        // distance of `cp.async`'s arrivals, and takes what they count for races.
        self.full(stage) + const { 8 * STAGES as u32 }
    }

    /// The producer: waits until the stage may be filled, and expects `bytes`.
    ///
    /// # Safety
    /// After [`init`](Self::init) and a barrier, by one thread, which then has so many bytes copied.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn acquire(self, ring: Ring<STAGES>, bytes: u32) {
        self.wait_empty(ring);
        mbarrier::arrive_expect_tx(self.full(ring.stage), bytes);
    }

    /// A producer: waits until the stage may be filled.
    ///
    /// # Safety
    /// After [`init`](Self::init) and a barrier.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn wait_empty(self, ring: Ring<STAGES>) {
        // In the first round the phase before the first counts as over.
        mbarrier::wait_parity(self.empty(ring.stage), ring.parity ^ 1);
    }

    /// A consumer: waits until the stage is full.
    ///
    /// # Safety
    /// After [`init`](Self::init) and a barrier.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn wait_full(self, ring: Ring<STAGES>) {
        mbarrier::wait_parity(self.full(ring.stage), ring.parity);
    }

    /// A consumer, ahead of [`wait_full`](Self::wait_full): whether that would not have to wait. Then it may be left out.
    ///
    /// # Safety
    /// After [`init`](Self::init) and a barrier.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn is_full(self, ring: Ring<STAGES>) -> bool {
        mbarrier::test_wait_parity(self.full(ring.stage), ring.parity)
    }

    /// A consumer warp, all of whose lanes are here with their `lane`: it has read the stage.
    ///
    /// # Safety
    /// After [`wait_full`](Self::wait_full) of that stage, once.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn release(self, stage: u32, lane: u32) {
        // One lane speaks for all.
        warp::sync_warp(!0);
        if self.blocks > 1 {
            if lane < self.blocks {
                mbarrier::arrive_cluster_relaxed(self.empty(stage), self.first + lane);
            }
        } else if lane == 0 {
            mbarrier::arrive(self.empty(stage));
        }
    }

    /// A lane of a consumer, of which each counts for itself: it has read the stage, which it does not share with other blocks. For ordinary
    /// loads from what `cp.async` writes: racecheck does not see who speaks for a warp in [`release`](Self::release).
    ///
    /// # Safety
    /// As for [`release`](Self::release).
    #[inline(always)]
    #[track_caller]
    pub unsafe fn release_lane(self, stage: u32) {
        mbarrier::arrive(self.empty(stage));
    }
}

/// An operand of products along a ring: its tile in the first stage, how many bytes further on the next stage's is, and that of the next product of a step.
#[derive(Clone, Copy, Debug)]
pub struct Staged {
    tile: Descriptor<K>,
    stage: u32,
    product: u32,
}

impl Staged {
    /// In the first stage, for the first product, at this address; with these distances.
    #[inline(always)]
    pub fn new(tile: u32, stage: u32, product: u32) -> Self {
        Self { tile: Descriptor::<K>::new(tile), stage, product }
    }

    #[inline(always)]
    fn at(self, stage: u32, product: usize) -> Descriptor<K> {
        self.tile.offset(stage * self.stage + product as u32 * self.product)
    }
}

/// What a consumer does along K for a tile of results: `steps` steps, one or two (`products`) of 128 bytes of K each, the first of which overwrite the sums. Stages are released when
/// their products are complete, except the last, which is returned, and whose products may be under way.
///
/// # Safety
/// By a whole warpgroup, after [`Stages::init`] and a barrier; `steps` is not 0; `a` and `b` are inside of stages that are filled in this order, `products` is a constant.
#[inline(always)]
#[track_caller]
pub unsafe fn multiply<X: Input<S>, S: Sum, P: Accumulator<S>, const STAGES: usize>(
    stages: Stages<STAGES>,
    ring: &mut Ring<STAGES>,
    steps: u32,
    products: usize,
    [a, b]: [Staged; 2],
    sums: &mut [P; 2],
    lane: u32,
) -> u32 {
    let mut previous = ring.stage;
    let mut step = 0;
    // Written to run at least once; see `cuda_std::wgmma`.
    loop {
        stages.wait_full(*ring);
        for i in 0..products {
            sums[i].multiply::<X, 4, K, K>(a.at(ring.stage, i), b.at(ring.stage, i), step > 0);
        }
        // The products before are complete, and their stage can be filled again.
        if products == 1 {
            wgmma::wait::<1>(&mut sums[0]);
        } else {
            wgmma::wait::<2>(&mut sums[0]);
            sums[1].pin();
        }
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
    previous
}

/// Quotient and remainder, without the check for zero, which would leave a panic path in the PTX.
///
/// # Safety
/// `b` is not zero.
#[inline(always)]
pub unsafe fn div_rem(a: u32, b: u32) -> (u32, u32) {
    core::hint::assert_unchecked(b != 0);
    (a / b, a % b)
}

/// The order of a grid of tiles: bands of up to `band` rows, in each column after column, so that blocks that run at the
/// same time share rows of the one operand and columns of the other in the L2 cache.
#[derive(Clone, Copy, Debug)]
pub struct Raster {
    /// Rows of tiles.
    pub rows: u32,
    /// Columns of tiles.
    pub columns: u32,
    /// Rows of a band.
    pub band: u32,
}

impl Raster {
    /// How many tiles.
    #[inline(always)]
    pub fn count(self) -> u32 {
        self.rows * self.columns
    }

    /// Row and column of tile `i`.
    ///
    /// # Safety
    /// `i < self.count()`, and a band has rows.
    #[inline(always)]
    pub unsafe fn place(self, i: u32) -> (u32, u32) {
        let (band, rest) = div_rem(i, self.band * self.columns);
        let first = band * self.band;
        let height = if self.rows - first < self.band { self.rows - first } else { self.band };
        let (column, row) = div_rem(rest, height);
        (first + row, column)
    }
}

/// The steps `[first, first + count)` that part `part` of `parts` does of all `steps`. Parts differ by one step at most; one
/// that would have none gets one beyond the last, which must count as zeros.
#[inline(always)]
pub fn part(steps: u32, part: u32, parts: u32) -> (u32, u32) {
    // `parts` is a constant wherever this is used.
    let (each, more) = if parts <= 1 { (steps, 0) } else { (steps / parts, steps % parts) };
    let first = part * each + if part < more { part } else { more };
    let count = each + (part < more) as u32;
    (first, if count == 0 { 1 } else { count })
}
