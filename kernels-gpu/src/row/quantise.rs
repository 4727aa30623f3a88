//! 8-bit results with scales: `value = element * scale`.
//!
//! A dynamic scale is the largest magnitude that it covers, divided by the largest number of the format, so nothing
//! saturates. Magnitudes below [`EPSILON`] count as that much, which keeps scales and their reciprocals finite; rows of
//! zeros stay zeros. NaN has no say in a scale and becomes the format's NaN, or zero for integers; an infinity makes the
//! scale infinite, so that its row reads back as NaN. (Norms take what they quantise by a factor of the row, which is zero for a row with an infinity: see them.)

use super::{GROUP, Piece};
use cuda_std::vec::{B64, StoreStreaming};
use cuda_std::{E4M3, Element, GlobalMut, convert, float, warp};

/// The least magnitude that a dynamic scale is made for.
pub const EPSILON: f32 = 1e-10;

/// An 8-bit element type that results are quantised to.
pub trait Quantised: Element {
    /// The largest number.
    const MAX: f32;
    /// Rounds a number to the nearest, ties to even; what is beyond the format's numbers to the last of them.
    fn one(v: f32) -> Self;
    /// Four values, as [`one`](Self::one) has them, in a word, the first in the lowest bits.
    fn four(v: [f32; 4]) -> u32;
}

impl Quantised for E4M3 {
    const MAX: f32 = E4M3::MAX;
    #[inline(always)]
    fn one(v: f32) -> Self {
        convert::f32_to_e4m3(v)
    }
    #[inline(always)]
    fn four(v: [f32; 4]) -> u32 {
        convert::pack_e4m3x4(v)
    }
}

impl Quantised for i8 {
    const MAX: f32 = 127.0;
    #[inline(always)]
    fn one(v: f32) -> Self {
        convert::pack_i8x4([v; 4]) as i8
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

/// The reciprocal of a scale, within 2 units in the last place; of subnormal ones infinity, of those beyond 2^126 zero.
#[inline(always)]
pub fn factor_of(scale: f32) -> f32 {
    float::fast::recip(scale)
}

/// What magnitudes up to `amax` are multiplied by, unless [`EPSILON`] counts for them; zero beyond 2^126.
#[inline(always)]
pub fn factor_up_to<Q: Quantised>(amax: f32) -> f32 {
    Q::MAX * float::fast::recip(amax)
}

/// The scale for magnitudes up to `amax * common`, and `common` divided by it, which do not wait for each other.
#[inline(always)]
pub fn scale_and_factor<Q: Quantised>(amax: f32, common: f32) -> (f32, f32) {
    let (factor, most) = (factor_up_to::<Q>(amax), common * (Q::MAX / EPSILON));
    // NaN where `common` is.
    let factor = if factor < most { factor } else { most };
    (scale_for::<Q>(amax * common), factor)
}

/// The largest magnitude; NaN has no say.
#[inline(always)]
pub fn amax<const V: usize>(values: [f32; V]) -> f32 {
    amax_of([values])
}

/// The largest magnitude of several pieces, of one at least; NaN has no say.
#[inline(always)]
pub fn amax_of<const V: usize, const N: usize>(pieces: [[f32; V]; N]) -> f32 {
    let mut largest = tree(pieces[0]);
    let mut i = 1;
    while i < N {
        largest = float::max(largest, tree(pieces[i]));
        i += 1;
    }
    float::max(largest, 0.0)
}

/// [`amax`], and [`EPSILON`] at least, which comes in where nothing waits for it.
#[inline(always)]
pub fn amax_from_epsilon<const V: usize>(values: [f32; V]) -> f32 {
    const { assert!(V == 4 || V == 8) };
    let at = |i: usize| values[i % V];
    let mut largest = float::max(tree([at(0), at(1)]), EPSILON);
    largest = float::max(largest, tree([at(2), at(3)]));
    if V == 8 {
        largest = float::max(largest, tree([at(4), at(5), at(6), at(7)]));
    }
    largest
}

/// The scale for magnitudes up to one of [`amax_from_epsilon`], and its reciprocal, which do not wait for each other.
///
/// The reciprocal of a magnitude beyond 2^126 is subnormal, which the instruction makes zero: that of a sixteenth is not.
#[inline(always)]
pub fn scale_and_factor_from_epsilon<Q: Quantised>(amax: f32) -> (f32, f32) {
    (amax * (1.0 / Q::MAX), Q::MAX / 16.0 * float::fast::recip(amax * (1.0 / 16.0)))
}

/// The same for any magnitude that is not negative.
#[inline(always)]
pub fn scale_and_factor_of<Q: Quantised>(amax: f32) -> (f32, f32) {
    scale_and_factor_from_epsilon::<Q>(float::max(amax, EPSILON))
}

/// Magnitudes combined in pairs, then the results in pairs, and so on: latency counts.
#[inline(always)]
fn tree<const V: usize>(values: [f32; V]) -> f32 {
    const { assert!(V.is_power_of_two()) };
    let mut largest = values;
    let mut half = V / 2;
    while half > 0 {
        let mut j = 0;
        while j < half {
            largest[j] = float::max(largest[j].abs(), largest[j + half].abs());
            j += 1;
        }
        half /= 2;
    }
    largest[0].abs()
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
    let mut largest = amax_of(pair);
    let mut distance = const { pair_lanes(V) / 2 };
    while distance > 0 {
        largest = float::max(largest, warp::shfl_xor(largest, distance));
        distance /= 2;
    }
    largest
}

/// As [`pair_amax`], where lanes `l` and `l + 16` have one half of a pair each.
#[inline(always)]
#[track_caller]
pub fn half_amax<const V: usize>(half: [f32; V]) -> f32 {
    let largest = pair_amax([half, half]);
    float::max(largest, warp::shfl_xor(largest, 16))
}

/// The largest over the warp of numbers that are not negative; NaN is larger than any.
#[inline(always)]
#[track_caller]
pub fn warp_amax(magnitude: f32) -> f32 {
    f32::from_bits(warp::warp_reduce_max_u32(warp::FULL, magnitude.to_bits()))
}

/// Eight or four values, quantised: the words of a piece, of which the second may be nothing.
#[inline(always)]
fn words<Q: Quantised, const V: usize>(v: [f32; V], factor: f32) -> [u32; 2] {
    const { assert!(V == 4 || V == 8) };
    let four = |j: usize| Q::four([v[j], v[j + 1], v[j + 2], v[j + 3]].map(|v| v * factor));
    [four(0), if V == 8 { four(4 % V) } else { 0 }]
}

impl<const V: usize, const VEC: bool> Piece<V, VEC> {
    /// Stores `v * factor`, quantised.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn store_quantised<Q: Quantised>(self, y: GlobalMut<Q>, v: [f32; V], factor: f32) {
        if VEC {
            if self.first < self.n {
                let words = words::<Q, V>(v, factor);
                if V == 8 {
                    y.set_hinted(self.first, B64(words), StoreStreaming);
                } else {
                    y.set_hinted(self.first, words[0], StoreStreaming);
                }
            }
        } else {
            let y = y.offset(self.first);
            cuda_std::unroll::<V>(|j| {
                if self.has(j) {
                    y.set(j * Self::STEP, Q::one(v[j] * factor));
                }
            });
        }
    }

    /// As [`store_quantised`](Self::store_quantised) without a branch: what follows does not wait for it. That is faster after a reduction of the
    /// whole row, elsewhere slower.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn store_quantised_at_once<Q: Quantised>(self, y: GlobalMut<Q>, v: [f32; V], factor: f32) {
        if !VEC {
            return self.store_quantised(y, v, factor);
        }
        let (there, words) = (self.first < self.n, words::<Q, V>(v, factor));
        if V == 8 {
            y.set_streaming_if(there, self.first, B64(words));
        } else {
            y.set_streaming_if(there, self.first, words[0]);
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

    /// Where the scale of the pair of pieces number `pair` is.
    #[inline(always)]
    pub fn place<const V: usize>(self, pair: u32) -> *const u8 {
        self.scales.ptr((pair / const { pair_lanes(V) }) as usize * self.stride).cast_const().cast()
    }
}

/// Whether a lane is the one to store the scale of the pair of pieces number `pair` of a row of `n` elements.
#[inline(always)]
pub fn stores_pair<const V: usize>(pair: u32, n: u32) -> bool {
    pair.is_multiple_of(const { pair_lanes(V) }) && pair * (2 * V as u32) < n
}
