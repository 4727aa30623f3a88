//! Scales of 8-bit operands of a matrix product: `x[i, k] · a[i, k] · w[j, k] · b[j, k]`, where `a` and `b` are constant over a row,
//! or over 128 elements of it.
//!
//! All layouts are one here, by distances that may be 0: a scale for the whole tensor, for each row, for each row and 128 columns of `x`,
//! for each 128 rows and 128 columns of `w`.

use crate::row::GROUP;
use cuda_std::Global;

/// No scales.
pub const NONE: u32 = 0;
/// Of rows of `x` and rows of `w`.
pub const ROWS: u32 = 1;
/// Of each 128 elements of a row of `x`, and of blocks of 128 by 128 elements of `w`.
pub const BLOCKS: u32 = 2;

/// The scales of both operands: [`NONE`], [`ROWS`] or [`BLOCKS`].
#[derive(Clone, Copy)]
pub struct Scales<const KIND: u32> {
    x: Global<f32>,
    x_row: usize,
    x_group: usize,
    w: Global<f32>,
    w_row: usize,
    w_group: usize,
}

impl Scales<NONE> {
    /// None.
    #[inline(always)]
    pub fn none() -> Self {
        Self::new(core::ptr::null(), 0, 0, core::ptr::null(), 0, 0)
    }
}

impl<const KIND: u32> Scales<KIND> {
    /// `x`: `[m, groups]`; `w`: `[n, groups]`, or `[n / 128, groups]` for [`BLOCKS`], with distances in elements.
    #[inline(always)]
    pub fn new(x: *const f32, x_row: usize, x_group: usize, w: *const f32, w_row: usize, w_group: usize) -> Self {
        Self { x: Global::new(x), x_row, x_group, w: Global::new(w), w_row, w_group }
    }

    /// The scale of a row of `x` in a group of columns.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn x(self, row: u32, group: u32) -> f32 {
        self.x.get(row as usize * self.x_row + group as usize * self.x_group)
    }

    /// Where [`x`](Self::x) reads.
    #[inline(always)]
    pub fn x_ptr(self, row: u32, group: u32) -> *const f32 {
        self.x.ptr(row as usize * self.x_row + group as usize * self.x_group)
    }

    /// Where [`w`](Self::w) reads.
    #[inline(always)]
    pub fn w_ptr(self, row: u32, group: u32) -> *const f32 {
        let row = if KIND == BLOCKS { row / GROUP as u32 } else { row };
        self.w.ptr(row as usize * self.w_row + group as usize * self.w_group)
    }

    /// The scale of a row of `w` in a group of columns.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn w(self, row: u32, group: u32) -> f32 {
        let row = if KIND == BLOCKS { row / GROUP as u32 } else { row };
        self.w.get(row as usize * self.w_row + group as usize * self.w_group)
    }

    /// The scales of each 64 of `N` rows of `w` from `row` on, a multiple of 64, of those of the first and of the last. Not where they are loaded: it would wait for
    /// them.
    #[inline(always)]
    pub fn spread<const N: usize>(row: u32, [first, last]: [f32; 2]) -> [f32; 4] {
        const { assert!(N <= 192) };
        // Of 192 rows the middle third is in the block of the first or of the last.
        let middle = if N > GROUP && !row.is_multiple_of(GROUP as u32) { last } else { first };
        [first, middle, last, last]
    }
}
