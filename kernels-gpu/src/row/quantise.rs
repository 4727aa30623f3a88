//! 8-bit results with scales: `value = element * scale`.
//!
//! A dynamic scale is the largest magnitude that it covers, divided by the largest number of the format, so nothing
//! saturates. Magnitudes below [`EPSILON`] count as that much, which keeps scales and their reciprocals finite; rows of
//! zeros stay zeros. NaN has no say in a scale and becomes the format's NaN, or zero for integers; an infinity makes the
//! scale infinite, so that its row reads back as NaN.

use super::{GROUP, Piece};
use cuda_std::vec::{B64, StoreStreaming};
use cuda_std::{E4M3, Element, GlobalMut, convert, float, integer, warp};

/// The least magnitude that a dynamic scale is made for.
pub const EPSILON: f32 = 1e-10;

/// An 8-bit element type that results are quantised to.
pub trait Quantised: Element {
    /// The largest number.
    const MAX: f32;
    /// Whether NaN can be told. Otherwise [`finite`] or [`finite_amax`] must have made zeros of what is no number.
    const HAS_NAN: bool;
    /// Rounds `v * factor`, which is at most [`MAX`](Self::MAX) but for the last places, to the nearest, ties to even.
    fn one(v: f32, factor: f32) -> Self;
    /// Four values times `factor`, as [`one`](Self::one) has them, in a word, the first in the lowest bits.
    fn four_times(v: [f32; 4], factor: f32) -> u32;
    /// As [`four_times`](Self::four_times) with 1.
    #[inline(always)]
    fn four(v: [f32; 4]) -> u32 {
        Self::four_times(v, 1.0)
    }
}

impl Quantised for E4M3 {
    const MAX: f32 = E4M3::MAX;
    const HAS_NAN: bool = true;
    /// Saturates.
    #[inline(always)]
    fn one(v: f32, factor: f32) -> Self {
        convert::f32_to_e4m3(v * factor)
    }
    #[inline(always)]
    fn four_times(v: [f32; 4], factor: f32) -> u32 {
        convert::pack_e4m3x4(v.map(|v| v * factor))
    }
}

impl Quantised for i8 {
    const MAX: f32 = 127.0;
    const HAS_NAN: bool = false;
    #[inline(always)]
    fn one(v: f32, factor: f32) -> Self {
        // An instruction on integers between sum and store: ptxas takes the register of a sum for a number, and converts it to
        // u8, saturating, when a byte of it is stored (F2IP.U8 in the machine code; 255 on an H200).
        integer::permute(nearest(v, factor), 0, 0x4440) as i8
    }
    #[inline(always)]
    fn four_times(v: [f32; 4], factor: f32) -> u32 {
        let [a, b, c, d] = v.map(|v| nearest(v, factor));
        integer::permute(integer::permute(a, b, 0x0040), integer::permute(c, d, 0x0040), 0x5410)
    }
}

/// A word whose lowest byte is the integer nearest to `v * factor`, which is at most 2^22 in magnitude.
///
/// Adding 1.5 * 2^23 leaves the integer in the low bits. Conversions take four times as long.
#[inline(always)]
fn nearest(v: f32, factor: f32) -> u32 {
    float::fma(v, factor, 12_582_912.0).to_bits()
}

/// The scale for values up to `amax` in magnitude.
#[inline(always)]
pub fn scale_for<Q: Quantised>(amax: f32) -> f32 {
    float::max(amax, EPSILON) * (1.0 / Q::MAX)
}

/// The reciprocal of a scale, within 2 units in the last place; of subnormal ones infinity.
#[inline(always)]
pub fn factor_of(scale: f32) -> f32 {
    float::fast::recip(scale)
}

/// The scale for magnitudes up to `amax * common`, and `common` divided by it, which do not wait for each other.
#[inline(always)]
pub fn scale_and_factor<Q: Quantised>(amax: f32, common: f32) -> (f32, f32) {
    let (factor, most) = (Q::MAX * float::fast::recip(amax), common * (Q::MAX / EPSILON));
    let factor = if !Q::HAS_NAN {
        // 0 where `common` is NaN.
        float::min(factor, float::max(most, 0.0))
    } else if factor < most {
        factor
    } else {
        most
    };
    (scale_for::<Q>(amax * common), factor)
}

/// The largest magnitude of several pieces, in which NaN has no say and becomes zero, as infinities do, where the format
/// cannot tell it.
#[inline(always)]
pub fn finite_amax<Q: Quantised, const V: usize, const N: usize>(pieces: &mut [[f32; V]; N]) -> f32 {
    let mut largest = 0.0;
    if Q::HAS_NAN {
        cuda_std::unroll::<N>(|i| largest = float::max(largest, amax(pieces[i])));
        return largest;
    }
    cuda_std::unroll::<N>(|i| largest = float::max_propagate(largest, tree(pieces[i], float::max_propagate)));
    // Which NaN is not.
    let finite = largest < f32::INFINITY;
    if !finite {
        largest = 0.0;
        cuda_std::unroll::<N>(|i| {
            // As if they were new: otherwise magnitudes are kept for this from above, which takes an instruction each.
            pieces[i] = pieces[i].map(|y| f32::from_bits(integer::opaque(y.to_bits())));
            largest = float::max(largest, amax(pieces[i]));
            cuda_std::unroll::<V>(|j| {
                let finite = float::abs(pieces[i][j]) < f32::INFINITY;
                pieces[i][j] = if finite { pieces[i][j] } else { 0.0 };
            });
        });
    }
    largest
}

/// The largest magnitude of several pieces; NaN if there is one where the format cannot tell it, otherwise NaN has no say.
#[inline(always)]
pub fn amax_or_nan<Q: Quantised, const V: usize, const N: usize>(pieces: [[f32; V]; N]) -> f32 {
    let mut largest = 0.0;
    cuda_std::unroll::<N>(|i| {
        largest = if Q::HAS_NAN {
            float::max(largest, amax(pieces[i]))
        } else {
            float::max_propagate(largest, tree(pieces[i], float::max_propagate))
        };
    });
    largest
}

/// The values, with zeros for what is no number where the format cannot tell it.
#[inline(always)]
pub fn finite<Q: Quantised, const V: usize>(mut values: [f32; V]) -> [f32; V] {
    if !Q::HAS_NAN {
        cuda_std::unroll::<V>(|j| {
            values[j] = if float::abs(values[j]) < f32::INFINITY { values[j] } else { 0.0 };
        });
    }
    values
}

/// The largest magnitude; NaN has no say.
#[inline(always)]
pub fn amax<const V: usize>(values: [f32; V]) -> f32 {
    float::max(tree(values, float::max), 0.0)
}

/// [`amax`], and [`EPSILON`] at least, which comes in where nothing waits for it.
#[inline(always)]
pub fn amax_from_epsilon<const V: usize>(values: [f32; V]) -> f32 {
    const { assert!(V == 4 || V == 8) };
    let at = |i: usize| values[i % V];
    let mut largest = float::max(tree([at(0), at(1)], float::max), EPSILON);
    largest = float::max(largest, tree([at(2), at(3)], float::max));
    if V == 8 {
        largest = float::max(largest, tree([at(4), at(5), at(6), at(7)], float::max));
    }
    largest
}

/// The scale for magnitudes up to one of [`amax_from_epsilon`], and its reciprocal, which do not wait for each other.
#[inline(always)]
pub fn scale_and_factor_from_epsilon<Q: Quantised>(amax: f32) -> (f32, f32) {
    (amax * (1.0 / Q::MAX), Q::MAX * float::fast::recip(amax))
}

/// Magnitudes combined in pairs, then the results in pairs, and so on: latency counts.
#[inline(always)]
fn tree<const V: usize>(values: [f32; V], op: impl Fn(f32, f32) -> f32) -> f32 {
    const { assert!(V.is_power_of_two()) };
    let mut largest = values;
    let mut half = V / 2;
    while half > 0 {
        let mut j = 0;
        while j < half {
            largest[j] = op(float::abs(largest[j]), float::abs(largest[j + half]));
            j += 1;
        }
        half /= 2;
    }
    float::abs(largest[0])
}

/// The largest magnitude in the group of [`GROUP`] columns that the piece belongs to. Every lane of the warp takes part.
///
/// Magnitudes are ordered as their bits are, so that one instruction does what takes shuffles five steps.
#[inline(always)]
#[track_caller]
pub fn group_amax<const V: usize>(values: [f32; V]) -> f32 {
    const { assert!(V == 4 || V == 8) };
    let own = amax(values);
    if V == 4 {
        return warp_amax(own);
    }
    let low = warp::lane_id() < 16;
    let (first, second) = (warp_amax(if low { own } else { 0.0 }), warp_amax(if low { 0.0 } else { own }));
    if low { first } else { second }
}

/// Lanes that hold a group of [`GROUP`] columns, two pieces each.
pub const fn pair_lanes(v: usize) -> u32 {
    (GROUP / 2 / v) as u32
}

/// The number of the `half`-th piece of thread `rank`, where threads have pairs of pieces of the same group.
#[inline(always)]
pub fn pair_index<const V: usize>(rank: u32, half: u32) -> u32 {
    let lanes = const { pair_lanes(V) };
    (rank / lanes * 2 + half) * lanes + rank % lanes
}

/// As [`group_amax`], where each lane has a pair of pieces of its group: fewer steps, and for twice as much.
#[inline(always)]
#[track_caller]
pub fn pair_amax<const V: usize>(pair: [[f32; V]; 2]) -> f32 {
    let mut largest = float::max(float::max(tree(pair[0], float::max), tree(pair[1], float::max)), 0.0);
    let mut distance = const { pair_lanes(V) / 2 };
    while distance > 0 {
        largest = float::max(largest, warp::shfl_xor(largest, distance));
        distance /= 2;
    }
    largest
}

/// The largest over the warp of numbers that are not negative; NaN is larger than any.
#[inline(always)]
#[track_caller]
pub fn warp_amax(magnitude: f32) -> f32 {
    f32::from_bits(warp::warp_reduce_max_u32(warp::FULL, magnitude.to_bits()))
}

impl<const V: usize, const VEC: bool> Piece<V, VEC> {
    /// Stores `v * factor`, quantised.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn store_quantised<Q: Quantised>(self, y: GlobalMut<Q>, v: [f32; V], factor: f32) {
        if VEC {
            if self.first < self.n {
                let low = Q::four_times([v[0], v[1], v[2], v[3]], factor);
                if V == 8 {
                    let high = Q::four_times([v[4 % V], v[5 % V], v[6 % V], v[7 % V]], factor);
                    y.set_hinted(self.first, B64([low, high]), StoreStreaming);
                } else {
                    y.set_hinted(self.first, low, StoreStreaming);
                }
            }
        } else {
            let y = y.offset(self.first);
            cuda_std::unroll::<V>(|j| {
                if self.has(j) {
                    y.set(j * Self::STEP, Q::one(v[j], factor));
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

    /// As [`store`](Self::store), of the pair of pieces number `pair`.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn store_pair<const V: usize>(self, pair: u32, n: u32, scale: f32) {
        let lanes = const { pair_lanes(V) };
        if pair.is_multiple_of(lanes) && pair * (2 * V as u32) < n {
            self.scales.set((pair / lanes) as usize * self.stride, scale);
        }
    }
}
