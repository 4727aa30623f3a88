//! Normalisation of rows.
//!
//! Every kernel here reads its row once: [`Row`] keeps it in registers, `N` pieces of 16 bytes a thread with all loads
//! issued before anything else. Teams of threads and rows are shaped by the row's length alone, so a row's bits do not
//! depend on how many others are in the launch:
//!
//! * `x2`: two pieces a thread. Short rows (a head) take some lanes of a warp and share blocks with others; longer ones
//!   a block of up to 512 threads.
//! * `x4`: four pieces a thread, up to 1024 threads: rows up to 64 KiB.
//! * `loop`: longer rows are read twice, the second time from the second-level cache.

pub mod layer_norm;
pub mod qk_norm;
pub mod rms_norm;
pub mod rms_norm_quant;

use crate::row::{Piece, Team};

/// The most warps of a block.
pub const MAX_WARPS: usize = 32;

/// A thread's share of a row: `N` pieces, or any number of them if `N` is 0.
#[derive(Clone, Copy)]
pub(crate) struct Row<const V: usize, const N: usize, const VEC: bool> {
    pub(crate) team: Team,
    /// How many pieces interleave.
    lanes: usize,
    n: usize,
}

impl<const V: usize, const N: usize, const VEC: bool> Row<V, N, VEC> {
    /// A row of `n` elements: 0 for a team that has no row but must take part in reductions.
    #[inline(always)]
    pub(crate) fn new(team: Team, lanes: usize, n: usize) -> Self {
        Self { team, lanes, n }
    }

    /// The number of the thread's `i`-th piece.
    #[inline(always)]
    pub(crate) fn index(self, i: usize) -> usize {
        i * self.team.size + self.team.rank
    }

    /// The thread's `i`-th piece.
    #[inline(always)]
    pub(crate) fn piece(self, i: usize) -> Piece<V, VEC> {
        Piece::new(self.index(i), self.lanes, self.n)
    }

    /// How many pieces a thread has, for `N = 0`.
    #[inline(always)]
    pub(crate) fn rounds(self) -> usize {
        self.n.div_ceil(V).div_ceil(self.team.size)
    }
}
