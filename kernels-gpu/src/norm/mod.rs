//! Normalisation of rows.
//!
//! A row is read once wherever it fits: [`Row`] keeps it in registers, `N` pieces of 16 bytes a thread with all loads
//! issued before anything else. Teams of threads and rows are shaped by the row's length alone, so a row's bits do not
//! depend on how many others are in the launch:
//!
//! * `x2`: two pieces a thread. Short rows (a head) take some lanes of a warp and share blocks with others; longer ones
//!   a block of up to 512 threads.
//! * `x4`: four pieces a thread: rows up to 32 KiB. `layer_norm`, which computes more for each warp, takes it from 4 KiB on.
//! * `narrow`: two pieces a thread as well, for rows of one to four warps, of which a block may have several. A block starts every 1.2 ns on the
//!   whole GPU, so many rows of 1024 columns would take longer to start than to read.
//! * `narrow_x3`: one warp for what two warps do in `narrow`, for rows of three pieces a thread then; no barrier.
//! * `few`, `many`: other instances for launches of few or many rows, in which every sum is added up in the same order.
//! * `x8`: eight pieces a thread, up to 1024 threads: rows up to 128 KiB, of which most weights come after the reduction, since the row takes half of
//!   the registers there are. With 8-bit results up to 640 threads and 80 KiB.
//! * `ring`, `ring_long`: many rows of `x8` with 8-bit results, on Hopper; see [`rms_norm_quant_ring`]. The same bits.
//! * `cluster_x2`, `cluster_x4`, `cluster_x8`: few of those rows of RMS norms, on Hopper, by a cluster of blocks each; see [`rms_norm_cluster`]. The same bits.
//! * `loop`: longer rows are read twice, the second time from the second-level cache; up to 1024 threads.
//! * `any`: as `loop`, for rows that cannot be moved in pieces of 16 bytes (see [`row`](crate::row)). `any_x4`: held in registers, four pieces of four
//!   elements a thread, rows up to 16384 elements; the same bits. `any_ring`: many of up to 8192, on Hopper; see [`rms_norm_any_ring`] and
//!   [`layer_norm_any_ring`].

pub mod layer_norm;
pub mod layer_norm_any_ring;
pub mod layer_norm_cluster;
pub mod qk_norm;
pub mod rms_norm;
pub mod rms_norm_any_ring;
pub mod rms_norm_cluster;
pub mod rms_norm_quant;
pub mod rms_norm_quant_ring;

use crate::row::team::Op;
use crate::row::{Piece, Team, quantise};
use cuda_std::{Shared, dependent_launch, float, integer, thread};

/// Up to so many rows start at once on a GPU, and the wait for the kernels before is what takes time. In longer launches every instruction before
/// a block's first load is in line. Measured on an H200.
pub const FEW_ROWS: u32 = 264;

/// When the addresses of a thread's pieces are computed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Early {
    /// Where they are used.
    No,
    /// Before the wait for the kernels before, in launches of up to [`FEW_ROWS`] blocks.
    InFew,
    /// Before that wait.
    Yes,
}

/// The most warps of a block.
pub const MAX_WARPS: usize = 32;

/// How many pieces of weights a thread with eight pieces of a row has registers for at a time.
pub(crate) const RING: usize = 2;

/// The most warps of a row in the `narrow` instances.
pub const NARROW_WARPS: usize = 4;

/// The number of the row of the caller's team. `shared`: whether blocks may have several.
#[inline(always)]
pub(crate) fn row_number(shared: bool) -> u32 {
    if shared { thread::block_idx_x() * thread::block_dim_y() + thread::thread_idx_y() } else { thread::block_idx_x() }
}

/// A thread's share of a row: `N` pieces, or any number of them if `N` is 0.
#[derive(Clone, Copy)]
pub(crate) struct Row<const V: usize, const N: usize, const VEC: bool> {
    pub(crate) team: Team,
    n: u32,
    /// Whether pieces `2 i` and `2 i + 1` of a thread belong to the same group of columns.
    paired: bool,
}

impl<const V: usize, const N: usize, const VEC: bool> Row<V, N, VEC> {
    /// Whether the team may have more than half of [`MAX_WARPS`].
    const LONG: bool = N == 0 || N > 4 || !VEC;

    /// A row of `n` elements: 0 for a team that has no row but must take part in reductions.
    #[inline(always)]
    pub(crate) fn new(team: Team, n: u32) -> Self {
        Self { team, n, paired: false }
    }

    /// A row whose groups of columns are of interest, in pairs of pieces where it is held in registers; see
    /// [`quantise::pair_index`]. A last piece alone is one half of a pair: the upper half of the team, a warp then, has the other halves, so that
    /// sums are those of two warps with a pair a thread, of which the second is half empty.
    #[inline(always)]
    pub(crate) fn grouped(team: Team, n: u32) -> Self {
        Self { team, n, paired: VEC && N > 0 }
    }

    /// The beginning of a kernel, and where the thread's pieces of some rows lie, for [`here`](Self::here): `at` a column. That is computed before
    /// the wait if `before`, which is the same for all threads, and so are `words`; see [`dependent_launch::known_here_if`].
    #[inline(always)]
    pub(crate) fn begin<const P: usize, const K: usize>(
        self,
        before: bool,
        at: impl Fn(u32) -> [*const u8; P],
        words: [u32; K],
    ) -> [[*const u8; P]; N] {
        if !VEC {
            // Single elements are accessed at addresses that the compiler knows to be global.
            dependent_launch::begin();
            return [at(0); N];
        }
        let mut addresses = [[core::ptr::null(); P]; N];
        cuda_std::unroll::<N>(|i| addresses[i] = at(self.piece(i).first()));
        let addresses = dependent_launch::known_here_if(before, addresses, words);
        dependent_launch::begin();
        addresses
    }

    /// The thread's `i`-th piece, to be accessed where [`begin`](Self::begin) says.
    #[inline(always)]
    pub(crate) fn here(self, i: usize) -> Piece<V, VEC> {
        if VEC { Piece::new(0, if self.piece(i).has(0) { V as u32 } else { 0 }) } else { self.piece(i) }
    }

    /// The number of the thread's `i`-th piece.
    #[inline(always)]
    pub(crate) fn index(self, i: usize) -> u32 {
        let i = i as u32;
        if self.paired {
            let half = if i + 1 == N as u32 && i.is_multiple_of(2) { self.team.rank / 16 } else { i % 2 };
            quantise::pair_index::<V>(self.pair(i as usize / 2), half)
        } else {
            i * self.team.size + self.team.rank
        }
    }

    /// The number of the thread's `i`-th pair of pieces of one group, of which it may have but a half.
    #[inline(always)]
    pub(crate) fn pair(self, i: usize) -> u32 {
        let rank = if 2 * i + 1 == N { self.team.rank % 16 } else { self.team.rank };
        i as u32 * self.team.size + rank
    }

    /// The thread's `i`-th piece.
    #[inline(always)]
    pub(crate) fn piece(self, i: usize) -> Piece<V, VEC> {
        Piece::new(self.index(i), self.n)
    }

    /// [`Team::reduce`], which has fewer warps to look at where the row is short.
    #[inline(always)]
    #[track_caller]
    pub(crate) unsafe fn reduce<const K: usize>(
        self,
        values: [f32; K],
        ops: [Op; K],
        scratch: Shared<f32>,
    ) -> [f32; K] {
        if Self::LONG {
            self.team.reduce::<K, MAX_WARPS>(values, ops, scratch)
        } else {
            self.team.reduce::<K, { MAX_WARPS / 2 }>(values, ops, scratch)
        }
    }

    /// As [`reduce`](Self::reduce), [`Team::reduce_warps`].
    #[inline(always)]
    #[track_caller]
    pub(crate) unsafe fn reduce_warps<const K: usize, const U: usize>(
        self,
        values: [[f32; U]; K],
        ops: [Op; K],
        scratch: Shared<f32>,
    ) -> [f32; K] {
        if Self::LONG {
            self.team.reduce_warps::<K, U, MAX_WARPS>(values, ops, scratch)
        } else {
            self.team.reduce_warps::<K, U, { MAX_WARPS / 2 }>(values, ops, scratch)
        }
    }

    /// The same row, for the `time`-th time after the first: places of pieces are computed again, which takes fewer registers than to keep them.
    #[inline(always)]
    pub(crate) fn anew(self, time: usize) -> Self {
        Self { team: Team { rank: integer::opaque(self.team.rank ^ self.zeros()[time - 1]), ..self.team }, ..self }
    }

    /// Zeros that neither LLVM nor ptxas, which sees through [`integer::opaque`], knows to be zeros, or the same: a row has fewer than 2^31 elements,
    /// and `1 / n` is positive.
    #[inline(always)]
    pub(crate) fn zeros(self) -> [u32; 2] {
        [self.n >> 31, float::fast::recip(self.n as f32).to_bits() >> 31]
    }

    /// How many pieces a thread has, for `N = 0`.
    #[inline(always)]
    pub(crate) fn rounds(self) -> usize {
        (self.n.div_ceil(V as u32)).div_ceil(self.team.size) as usize
    }
}
