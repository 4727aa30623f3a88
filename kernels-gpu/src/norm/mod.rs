//! Normalisation of rows.
//!
//! A row is read once wherever it fits: [`Row`] keeps it in registers, `N` pieces of 16 bytes a thread with all loads
//! issued before anything else. Teams of threads and rows are shaped by the row's length alone, so a row's bits do not
//! depend on how many others are in the launch:
//!
//! * `x2`: two pieces a thread. Short rows (a head) take some lanes of a warp and share blocks with others; longer ones
//!   a block of up to 512 threads.
//! * `x4`: four pieces a thread: rows up to 32 KiB.
//! * `loop`: longer rows are read twice, the second time from the second-level cache; up to 1024 threads.
//! * `any`: as `loop`, for rows that cannot be moved in pieces of 16 bytes (see [`row`](crate::row)).

pub mod layer_norm;
pub mod qk_norm;
pub mod rms_norm;
pub mod rms_norm_quant;

use crate::row::team::Op;
use crate::row::{Piece, Team};
use cuda_std::Shared;

/// The most warps of a block.
pub const MAX_WARPS: usize = 32;

/// A thread's share of a row: `N` pieces, or any number of them if `N` is 0.
#[derive(Clone, Copy)]
pub(crate) struct Row<const V: usize, const N: usize, const VEC: bool> {
    pub(crate) team: Team,
    n: u32,
}

impl<const V: usize, const N: usize, const VEC: bool> Row<V, N, VEC> {
    /// A row of `n` elements: 0 for a team that has no row but must take part in reductions.
    #[inline(always)]
    pub(crate) fn new(team: Team, n: u32) -> Self {
        Self { team, n }
    }

    /// The number of the thread's `i`-th piece.
    #[inline(always)]
    pub(crate) fn index(self, i: usize) -> u32 {
        i as u32 * self.team.size + self.team.rank
    }

    /// The thread's `i`-th piece.
    #[inline(always)]
    pub(crate) fn piece(self, i: usize) -> Piece<V, VEC> {
        Piece::new(self.index(i), self.n)
    }

    /// [`Team::reduce`], which has fewer warps to look at where the row fits in registers.
    #[inline(always)]
    #[track_caller]
    pub(crate) unsafe fn reduce<const K: usize>(
        self,
        values: [f32; K],
        ops: [Op; K],
        scratch: Shared<f32>,
    ) -> [f32; K] {
        if N == 0 {
            self.team.reduce::<K, MAX_WARPS>(values, ops, scratch)
        } else {
            self.team.reduce::<K, { MAX_WARPS / 2 }>(values, ops, scratch)
        }
    }

    /// As [`reduce`](Self::reduce), [`Team::reduce_warps`].
    #[inline(always)]
    #[track_caller]
    pub(crate) unsafe fn reduce_warps<const K: usize>(
        self,
        values: [f32; K],
        ops: [Op; K],
        scratch: Shared<f32>,
    ) -> [f32; K] {
        if N == 0 {
            self.team.reduce_warps::<K, MAX_WARPS>(values, ops, scratch)
        } else {
            self.team.reduce_warps::<K, { MAX_WARPS / 2 }>(values, ops, scratch)
        }
    }

    /// How many pieces a thread has, for `N = 0`.
    #[inline(always)]
    pub(crate) fn rounds(self) -> usize {
        (self.n.div_ceil(V as u32)).div_ceil(self.team.size) as usize
    }
}
