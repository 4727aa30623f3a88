//! 8-bit results with scales: `value = element * scale`.
//!
//! A dynamic scale is the largest magnitude that it covers, divided by the largest number of the format, so nothing
//! saturates. Magnitudes below [`EPSILON`] count as that much, which keeps scales and their reciprocals finite; rows of
//! zeros stay zeros. NaN has no say in a scale and becomes the format's NaN, or zero for integers; an infinity makes the
//! scale infinite, so that its row reads back as NaN.

use super::{GROUP, Piece};
use cuda_std::vec::{B64, StoreStreaming};
use cuda_std::{E4M3, Element, GlobalMut, convert, float, warp};

/// The least magnitude that a dynamic scale is made for.
pub const EPSILON: f32 = 1e-10;

/// An 8-bit element type that results are quantised to.
pub trait Quantised: Element {
    /// The largest number.
    const MAX: f32;
    /// Rounds to the nearest, ties to even, saturating.
    fn one(v: f32) -> Self;
    /// Four values in a word, the first in the lowest bits.
    fn four(v: [f32; 4]) -> u32;
}

impl Quantised for E4M3 {
    const MAX: f32 = E4M3::MAX;
    #[inline(always)]
    fn one(v: f32) -> Self {
        convert::f32_to_e4m3(v)
    }
    #[inline(always)]
    fn four([a, b, c, d]: [f32; 4]) -> u32 {
        convert::pack_e4m3x4([a, b, c, d])
    }
}

impl Quantised for i8 {
    const MAX: f32 = 127.0;
    #[inline(always)]
    fn one(v: f32) -> Self {
        convert::f32_to_i8(v)
    }
    #[inline(always)]
    fn four(v: [f32; 4]) -> u32 {
        convert::pack_i8x4(v)
    }
}

/// The scale for values up to `amax` in magnitude.
#[inline(always)]
pub fn scale_for<Q: Quantised>(amax: f32) -> f32 {
    float::max(amax, EPSILON) * (1.0 / Q::MAX)
}

/// The largest magnitude.
#[inline(always)]
pub fn amax<const V: usize>(values: [f32; V]) -> f32 {
    let mut largest = 0.0;
    cuda_std::unroll::<V>(|j| largest = float::max(largest, float::abs(values[j])));
    largest
}

/// The largest magnitude in the group of [`GROUP`] columns that the piece belongs to. Every lane of the warp takes part.
#[inline(always)]
#[track_caller]
pub fn group_amax<const V: usize>(values: [f32; V]) -> f32 {
    const { assert!(V == 4 || V == 8) };
    let own = amax(values);
    if V == 8 {
        warp::reduce_segments::<16, f32>(own, float::max)
    } else {
        warp::reduce_segments::<32, f32>(own, float::max)
    }
}

impl<const V: usize, const VEC: bool> Piece<V, VEC> {
    /// Stores `values * factor`, quantised.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn store_quantised<Q: Quantised>(self, y: GlobalMut<Q>, values: [f32; V], factor: f32) {
        let mut v = values;
        cuda_std::unroll::<V>(|j| v[j] *= factor);
        if VEC {
            if self.first < self.n {
                let low = Q::four([v[0], v[1], v[2], v[3]]);
                if V == 8 {
                    let high = Q::four([v[4 % V], v[5 % V], v[6 % V], v[7 % V]]);
                    y.set_hinted(self.first, B64([low, high]), StoreStreaming);
                } else {
                    y.set_hinted(self.first, low, StoreStreaming);
                }
            }
        } else {
            let y = y.offset(self.first);
            cuda_std::unroll::<V>(|j| {
                if self.has(j) {
                    y.set(j * Self::STEP, Q::one(v[j]));
                }
            });
        }
    }
}

/// Where group scales are: `[rows, groups]`, in any order.
#[derive(Clone, Copy)]
pub struct GroupScales {
    /// The row's first scale.
    pub scales: GlobalMut<f32>,
    /// Distance from group to group, in elements.
    pub stride: usize,
}

impl GroupScales {
    /// Stores the scale of the group of piece number `index`, once for each group of a row of `n` elements.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn store<const V: usize>(self, index: u32, n: u32, scale: f32) {
        let lanes = (GROUP / V) as u32;
        if index.is_multiple_of(lanes) && index * (V as u32) < n {
            self.scales.set((index / lanes) as usize * self.stride, scale);
        }
    }
}
