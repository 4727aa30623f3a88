//! Few long rows of [`layer_norm`](super::layer_norm) on Hopper: a cluster of blocks for each, as [`rms_norm_cluster`](super::rms_norm_cluster).
//!
//! The warps of the block that a row would have are dealt out to eight ([`Spread`]), and each tells all blocks what it knows of its part. The same bits.

use super::MAX_WARPS;
use super::layer_norm::{Parts, held, merged};
use super::rms_norm_cluster::row_number;
use crate::row::team::{SPREAD, Spread, spread_bytes};
use cuda_std::shared::Carver;
use cuda_std::vec::B128;
use cuda_std::{Float, Global, GlobalMut, Shared};

/// The most warps of a team.
const WARPS: usize = MAX_WARPS / 2;
/// The most threads of a block.
pub const BLOCK_THREADS: u32 = WARPS as u32 * 32 / SPREAD;
/// Its shared memory.
pub const SHARED_BYTES: usize = spread_bytes(4, WARPS);

/// Of each warp what it has told: mean, squares and columns, and nothing.
#[derive(Clone, Copy)]
struct Told(Shared<f32>);

impl Parts for Told {
    #[inline(always)]
    unsafe fn first(self) -> f32 {
        self.0.get(0usize)
    }

    #[inline(always)]
    unsafe fn four(self, k: usize, i: usize) -> [f32; 4] {
        let mut four = [0.0; 4];
        cuda_std::unroll::<4>(|j| {
            let B128(part): B128<f32, 4> = self.0.get_as(4 * (i + j));
            four[j] = part[k];
        });
        four
    }
}

/// As [`layer_norm`](super::layer_norm::layer_norm) of aligned rows of more than one warp, a cluster of [`SPREAD`] blocks for each, of at least as many threads together as the row has in one
/// block, a multiple of 32 each.
#[inline(always)]
pub unsafe fn layer_norm<T: Float, const V: usize, const N: usize>(
    x: *const T,
    weight: *const T,
    bias: *const T,
    out: *mut T,
    _rows: u32,
    n: u32,
    x_stride: usize,
    out_stride: usize,
    eps: f32,
) {
    let size = n.div_ceil(const { (V * N) as u32 }).next_multiple_of(32);
    let team = Spread::<4, WARPS>::new(size, &mut Carver::new());
    let x = Global::new(x).offset(row_number() * x_stride);
    let out = GlobalMut::new(out).offset(row_number() * out_stride);
    let (weight, bias) = (Global::new(weight), Global::new(bias));
    let merge = |[mean, squares, columns]: [f32; 3], inverse_n| {
        team.tell([mean, squares, columns, 0.0]);
        merged::<_, WARPS>(Told(team.hear()), (size / 32) as usize, inverse_n, eps)
    };
    team.meet();
    held::<T, V, N, false, 2>(x, weight, bias, || out, team.team, n, team.live, team.words(), merge);
}
