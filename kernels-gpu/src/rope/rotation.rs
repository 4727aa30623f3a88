//! What the rotary kernels share: angles from the cos/sin cache, and the rotation of a thread's two chunks.
//!
//! A row of the cache is `rot_dim` numbers: the cosines of the `half = rot_dim / 2` pairs, then their sines. A pair is
//! `(x[p], x[half + p])` (NeoX), or `(x[2 p], x[2 p + 1])` (GPT-J, `INTERLEAVED`), counted within the rotated part.
//!
//! A thread holds `N` pairs as two chunks: number `c` of the first and of the second half of the rotated part, in both
//! pairings, so that neighbouring threads always read neighbouring memory. With NeoX they hold the pairs `c N ..`; with
//! GPT-J the first holds the pairs `c N / 2 ..`, the second those from `half / 2 + c N / 2` on.

use crate::chunk;
use cuda_std::{Float, Global, float};

/// `positions` holds 64-bit numbers rather than 32-bit ones.
pub const POSITIONS_I64: u32 = 1;
/// The cos/sin cache is `f32` rather than the element type.
pub const ANGLES_F32: u32 = 2;
/// Turns back.
pub const INVERSE: u32 = 4;

/// Whether chunks of `N` numbers of the cache can be loaded whole.
#[inline(always)]
pub fn aligned<T, const N: usize>(cache: *const u8, rot_dim: u32, flags: u32) -> bool {
    if flags & ANGLES_F32 != 0 {
        chunk::aligned::<f32, N>(cache as usize, rot_dim as usize)
    } else {
        chunk::aligned::<T, N>(cache as usize, rot_dim as usize)
    }
}

/// Cosines and sines of `N` pairs.
#[derive(Clone, Copy)]
pub struct Angles<const N: usize> {
    cos: [f32; N],
    sin: [f32; N],
}

impl<const N: usize> Angles<N> {
    /// Of nothing that turns.
    #[inline(always)]
    pub fn none() -> Self {
        Self { cos: [1.0; N], sin: [0.0; N] }
    }

    /// Of a thread's chunks `c`; `H` is `N / 2`, or 1 where `N` is. `row` is the first number of a row of the cache,
    /// which is aligned to 16 bytes, as `half * size` is.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn load<T: Float, const H: usize, const INTERLEAVED: bool>(
        cache: *const u8,
        row: usize,
        half: u32,
        c: u32,
        flags: u32,
    ) -> Self {
        if flags & ANGLES_F32 != 0 {
            Self::load_as::<f32, H, INTERLEAVED>(Global::new(cache.cast()), row, half, c, flags)
        } else {
            Self::load_as::<T, H, INTERLEAVED>(Global::new(cache.cast()), row, half, c, flags)
        }
    }

    #[inline(always)]
    #[track_caller]
    unsafe fn load_as<C: Float, const H: usize, const INTERLEAVED: bool>(
        cache: Global<C>,
        row: usize,
        half: u32,
        c: u32,
        flags: u32,
    ) -> Self {
        const { assert!(N == 1 && H == 1 || N == 2 * H) };
        let cosines = cache.offset(row);
        let sines = cosines.offset(half);
        let (cos, sin) = if INTERLEAVED && N > 1 {
            let (a, b) = ((c * H as u32) as usize, (half / 2 + c * H as u32) as usize);
            (
                joined::<C, H, N>(chunk::load(cosines, a), chunk::load(cosines, b)),
                joined::<C, H, N>(chunk::load(sines, a), chunk::load(sines, b)),
            )
        } else {
            let at = (c * N as u32) as usize;
            (chunk::load::<C, N>(cosines, at), chunk::load::<C, N>(sines, at))
        };
        let (cos, mut sin) = (cuda_std::vec::to_f32(cos), cuda_std::vec::to_f32(sin));
        let sign = if flags & INVERSE != 0 { -1.0 } else { 1.0 };
        let mut j = 0;
        while j < N {
            sin[j] *= sign;
            j += 1;
        }
        Self { cos, sin }
    }

    /// Rotates the two chunks.
    #[inline(always)]
    pub fn rotate<const H: usize, const INTERLEAVED: bool>(&self, a: [f32; N], b: [f32; N]) -> ([f32; N], [f32; N]) {
        let (mut x, mut y) = (a, b);
        if INTERLEAVED && N > 1 {
            let mut j = 0;
            while j < H {
                (x[2 * j], x[2 * j + 1]) = turn(a[2 * j], a[2 * j + 1], self.cos[j], self.sin[j]);
                (y[2 * j], y[2 * j + 1]) = turn(b[2 * j], b[2 * j + 1], self.cos[H + j], self.sin[H + j]);
                j += 1;
            }
        } else {
            let mut j = 0;
            while j < N {
                (x[j], y[j]) = turn(a[j], b[j], self.cos[j], self.sin[j]);
                j += 1;
            }
        }
        (x, y)
    }
}

#[inline(always)]
fn joined<C: Float, const H: usize, const N: usize>(a: [C; H], b: [C; H]) -> [C; N] {
    let mut out = [C::from_f32(0.0); N];
    let mut j = 0;
    while j < H {
        out[j] = a[j];
        out[H + j] = b[j];
        j += 1;
    }
    out
}

/// `(x, y)` turned by an angle.
#[inline(always)]
pub fn turn(x: f32, y: f32, cos: f32, sin: f32) -> (f32, f32) {
    (float::fma(x, cos, -(y * sin)), float::fma(y, cos, x * sin))
}

/// One number of the cache.
#[inline(always)]
#[track_caller]
pub unsafe fn angle_part<T: Float>(cache: *const u8, at: usize, flags: u32) -> f32 {
    if flags & ANGLES_F32 != 0 {
        Global::new(cache.cast::<f32>()).get(at)
    } else {
        Global::new(cache.cast::<T>()).get(at).to_f32()
    }
}
