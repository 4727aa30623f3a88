//! Ranking and weights in integers, so that results depend on nothing but the row.
//!
//! Sums of floats depend on their order, and then the token that is drawn depends on how a row was split among blocks.
//! Here the weight of a token, `exp((x - max) / temperature)`, is an integer of [`Weights::bits`] binary places. Sums
//! are exact and associative; every kernel gets the same ones, down to the last bit. The exponential is a polynomial of
//! fused multiply-adds rather than the GPU's approximation, so the SIMT device gets them as well.
//!
//! Tokens are ranked by an integer key that orders as the logits do. A logit of NaN counts as -inf.

use cuda_std::float;

/// What `adjust` stores for a token that is not allowed: a NaN that ranks below all others.
pub const BANNED: u32 = 0xffda_dbad;

/// Key of -inf and of NaN. Tokens above it have a probability.
pub const KEY_NEG_INF: u32 = 0x007f_ffff;

/// Binary places of a weight, in rows of up to 2^23 tokens.
pub const MAX_BITS: u32 = 39;

/// Orders as logits do; 0 for [`BANNED`]. Both zeros are one.
#[inline(always)]
pub fn key(x: f32) -> u32 {
    if x.is_nan() {
        if x.to_bits() == BANNED { 0 } else { KEY_NEG_INF }
    } else {
        // -0.0 + 0.0 is 0.0.
        float::sortable(x + 0.0)
    }
}

/// The logit of a key.
#[inline(always)]
pub fn value(key: u32) -> f32 {
    if key <= KEY_NEG_INF { f32::NEG_INFINITY } else { float::from_sortable(key) }
}

/// Bits of an index.
const INDEX_BITS: u32 = 31;

/// Key and index of a candidate as one number below 2^63: larger keys first, then lower indices. Never 0 for a key above 0.
#[inline(always)]
pub fn candidate(key: u32, index: u32) -> u64 {
    (key as u64) << INDEX_BITS | (!index << 1 >> 1) as u64
}

/// Of a [`candidate`].
#[inline(always)]
pub fn key_of(candidate: u64) -> u32 {
    (candidate >> INDEX_BITS) as u32
}

/// Of a [`candidate`].
#[inline(always)]
pub fn index_of(candidate: u64) -> u32 {
    !(candidate as u32) << 1 >> 1
}

/// Fewer places for larger vocabularies, so that a sum of all weights stays below 2^63.
#[inline(always)]
pub fn bits_of(vocab: u32) -> u32 {
    let bits = 31 + vocab.leading_zeros();
    if bits < MAX_BITS { bits } else { MAX_BITS }
}

/// The weights of a row's tokens.
#[derive(Clone, Copy)]
pub struct Weights {
    /// Key of the row's largest logit.
    pub max_key: u32,
    /// `log2(e) / temperature`.
    pub scale: f32,
    /// Binary places.
    pub bits: u32,
}

impl Weights {
    /// `exp((x - max) / temperature)` with [`bits`](Self::bits) binary places: 1.0 for the largest logit, 0 at -inf.
    #[inline(always)]
    pub fn of(&self, key: u32) -> u64 {
        if key <= KEY_NEG_INF {
            return 0;
        }
        // Also where the difference is no number: +inf - +inf, or 0 times an infinite scale.
        if key == self.max_key {
            return 1 << self.bits;
        }
        exp2(self.half_distance(key) * (2.0 * self.scale), self.bits)
    }

    /// The same of a logit, without branches. 0 of NaN as well.
    #[inline(always)]
    pub fn of_value(&self, x: f32) -> u64 {
        let max = value(self.max_key);
        let t = if x == max { 0.0 } else { half_difference(x, max) * (2.0 * self.scale) };
        // Not NaN, and at least where the weight is 0.
        let t = float::max(t, -1.0 - self.bits as f32);
        let whole = float::add_up(t, UNITS);
        let mantissa = exp2_of_fraction(t - (whole - (UNITS + 1.0)));
        let shift = (UNITS.to_bits() + 1).wrapping_sub(whole.to_bits());
        // SAFETY: 1 to `MAX_BITS + 2`.
        unsafe { core::hint::assert_unchecked(shift < u64::BITS) };
        ((mantissa as u64) << (self.bits - 23)) >> shift
    }

    /// Whether [`Adder`] serves for these: largest logit and scale are finite.
    #[inline(always)]
    pub fn is_finite(&self) -> bool {
        value(self.max_key).is_finite() && (2.0 * self.scale).is_finite()
    }

    /// Half of `x - max`, of which f32 may not hold the whole. Where it does, the half has the same digits, and takes no instruction more.
    #[inline(always)]
    pub fn half_distance(&self, key: u32) -> f32 {
        half_difference(value(key), value(self.max_key))
    }
}

/// 1.5 * 2^23: the last place of sums of it is 1, so that they have a whole number in their last bits.
const UNITS: f32 = 12_582_912.0;

/// Adds up [`Weights::of_value`] of up to [`MOST`](Self::MOST) logits in a fifth fewer instructions, of [finite](Weights::is_finite) ones.
///
/// A weight, still a float, is cut into two whole numbers by sums whose last places they are: of 2^(bits - 22), and of 1. The sums' bits are added up as they
/// are, and what they have in common is taken off in the end. All are negative, so that what is rounded up is cut off.
#[derive(Clone, Copy)]
pub struct Adder {
    weights: Weights,
    /// [`UNITS`] more than the exponent of a weight in units.
    units: f32,
    /// Its last place is 2^(bits - 22).
    upper: f32,
}

impl Adder {
    /// More than these may carry out of a word.
    pub const MOST: u32 = 1023;
    /// Its last place is 1.
    const LOWER: f32 = 8_388_608.0;

    /// For weights that are [finite](Weights::is_finite).
    #[inline(always)]
    pub fn new(weights: Weights) -> Self {
        let (units, upper) = (UNITS + (weights.bits as f32 - 1.0), f32::from_bits((weights.bits + 1 + 127) << 23));
        Self { weights, units, upper }
    }

    /// Adds the weight of `x`.
    #[inline(always)]
    pub fn add(&self, sums: &mut [u32; 2], x: f32) {
        let Self { weights: Weights { max_key, scale, bits }, units, upper } = *self;
        let t = half_difference(x, value(max_key)) * (2.0 * scale);
        // Not NaN, and at least where the weight is 0.
        let t = float::max(t, -1.0 - bits as f32);
        let whole = float::add_up(t, units);
        let power = times_power_of_fraction(-1.0, t - (whole - (units + 1.0)));
        // All but the whole number is shifted out.
        let weight = f32::from_bits(power.to_bits().wrapping_add(whole.to_bits() << 23));
        let high = float::add_up(weight, -upper);
        let low = float::add_up(weight - (high + upper), -Self::LOWER);
        sums[0] = sums[0].wrapping_add(high.to_bits());
        sums[1] = sums[1].wrapping_add(low.to_bits());
    }

    /// The sum of the weights of `n` logits that were added to `sums`, which began with 0.
    #[inline(always)]
    pub fn total(&self, sums: [u32; 2], n: u32) -> u64 {
        let of = |sum: u32, base: f32| sum.wrapping_sub(n.wrapping_mul((-base).to_bits())) as u64;
        (of(sums[0], self.upper) << (self.weights.bits - 22)) + of(sums[1], Self::LOWER)
    }
}

#[inline(always)]
fn half_difference(x: f32, max: f32) -> f32 {
    float::fma(x, 0.5, -0.5 * max)
}

/// `2^t` for `t <= 0` with `bits` binary places, cut off, so 1 at `-bits`; 0 for NaN.
#[inline(always)]
fn exp2(t: f32, bits: u32) -> u64 {
    if t < -(bits as f32) || t.is_nan() {
        return 0;
    }
    // SAFETY: from -bits to 0. The checked conversion would take five more instructions of the thirty.
    let whole = unsafe { t.to_int_unchecked::<i32>() };
    let mantissa = exp2_of_fraction((t - whole as f32) + 1.0);
    ((mantissa as u64) << (bits - 23)) >> (1 - whole)
}

/// `sign * 2^f` for `f` from 0 to 1, where `sign` is a constant 1 or -1.
#[inline(always)]
fn times_power_of_fraction(sign: f32, f: f32) -> f32 {
    // Least squares at Chebyshev nodes: within 2^-23.9, and 2 at 1.
    let mut p = sign * 0.000_218_775_05;
    p = float::fma(p, f, sign * 0.001_238_782_2);
    p = float::fma(p, f, sign * 0.009_684_58);
    p = float::fma(p, f, sign * 0.055_480_428);
    p = float::fma(p, f, sign * 0.240_230_5);
    p = float::fma(p, f, sign * 0.693_146_94);
    float::fma(p, f, sign)
}

/// `2^f * 2^23` for `f` from 0 to 1.
#[inline(always)]
fn exp2_of_fraction(f: f32) -> u32 {
    // An integer of 24 bits: from 1 up to 2 the mantissa below a one; and 2 carries into the exponent.
    times_power_of_fraction(1.0, f).to_bits() - (126 << 23)
}

/// `total * x / 2^32`, cut off: where in a mass of `total` the random bits `x` point.
#[inline(always)]
pub fn scaled(total: u64, x: u32) -> u64 {
    (total >> 32) * x as u64 + (((total & 0xffff_ffff) * x as u64) >> 32)
}

/// `total * p / 2^32`, rounded up: the mass that a `top_p` of `p` asks for.
#[inline(always)]
pub fn scaled_up(total: u64, p: u32) -> u64 {
    scaled(total, p) + (((total & 0xffff_ffff) * p as u64) as u32 != 0) as u64
}
