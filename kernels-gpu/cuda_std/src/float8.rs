//! The 8-bit floating-point formats of the OCP specification, as the hardware has them.
//!
//! Conversions here are exact integer arithmetic: the SIMT device and the host use them, and they are what the
//! GPU's instructions are tested against.

/// 4 exponent bits (bias 7), 3 mantissa bits; no infinities; largest value 448; NaN is `0x7f` and `0xff`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct E4M3(pub u8);

/// 5 exponent bits (bias 15), 2 mantissa bits; infinities and NaNs as in IEEE 754; largest finite value 57344.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct E5M2(pub u8);

/// Rounds `v` to `mantissa` bits with the given exponent bias, to nearest even, saturating at `largest` (a bit pattern).
const fn round(v: f32, mantissa: u32, bias: u32, largest: u32) -> u8 {
    let sign = (v.to_bits() >> 24) & 0x80;
    let magnitude = v.to_bits() & 0x7fff_ffff;
    if magnitude > 0x7f80_0000 {
        return 0x7f;
    }
    // A carry out of the significand moves on into the exponent by itself.
    let drop = 23 - mantissa;
    let half_less_one = (1 << (drop - 1)) - 1;
    let normal = (magnitude + half_less_one + (magnitude >> drop & 1)) >> drop;
    let normal = normal.wrapping_sub((127 - bias) << mantissa);
    // Adding 2^23 units of the last place of subnormal numbers leaves their count in the low bits.
    let unit = f32::from_bits((127 + 1 - bias - mantissa + 23) << 23);
    let subnormal = (f32::from_bits(magnitude) + unit).to_bits().wrapping_sub(unit.to_bits());
    let code = if magnitude < (128 - bias) << 23 { subnormal } else { normal };
    (sign | if code > largest { largest } else { code }) as u8
}

/// The value of a finite code: its bits as those of an `f32` with a smaller exponent, scaled up.
const fn widen(code: u8, mantissa: u32, bias: u32) -> f32 {
    let magnitude = f32::from_bits(((code & 0x7f) as u32) << (23 - mantissa));
    let scaled = magnitude * f32::from_bits((127 + 127 - bias) << 23);
    f32::from_bits(scaled.to_bits() | ((code & 0x80) as u32) << 24)
}

/// The NaN that the GPU's instructions give.
const NAN: f32 = f32::from_bits(0x7fff_e000);

impl E4M3 {
    /// The largest finite value.
    pub const MAX: f32 = 448.0;

    /// Rounds to the nearest, ties to even; too large values and infinities saturate; NaN becomes `0x7f`.
    pub const fn from_f32_const(v: f32) -> Self {
        Self(round(v, 3, 7, 0x7e))
    }
    /// The exact value.
    pub const fn to_f32_const(self) -> f32 {
        if self.0 & 0x7f == 0x7f { NAN } else { widen(self.0, 3, 7) }
    }
}

impl E5M2 {
    /// The largest finite value.
    pub const MAX: f32 = 57344.0;

    /// Rounds to the nearest, ties to even; too large values and infinities saturate; NaN becomes `0x7f`.
    pub const fn from_f32_const(v: f32) -> Self {
        Self(round(v, 2, 15, 0x7b))
    }
    /// The exact value.
    pub const fn to_f32_const(self) -> f32 {
        match self.0 & 0x7f {
            0x7c => f32::from_bits(((self.0 as u32 & 0x80) << 24) | 0x7f80_0000),
            0x7d.. => NAN,
            _ => widen(self.0, 2, 15),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every code is the nearest to its own value, and values between two codes go to the nearer, ties to even.
    fn check(to: impl Fn(u8) -> f32, from: impl Fn(f32) -> u8, finite: u8) {
        for code in 0..=finite {
            assert_eq!(from(to(code)), code);
            assert_eq!(from(-to(code)), code | 0x80);
            if code < finite {
                let (a, b) = (to(code) as f64, to(code + 1) as f64);
                assert!(a < b);
                let mid = f64::midpoint(a, b) as f32;
                assert_eq!(from(mid), if code % 2 == 0 { code } else { code + 1 }, "tie above {code:#x}");
                assert_eq!(from(f32::from_bits(mid.to_bits() - 1)), code);
                assert_eq!(from(f32::from_bits(mid.to_bits() + 1)), code + 1);
            }
        }
        assert_eq!(from(f32::INFINITY), finite);
        assert_eq!(from(f32::MAX), finite);
        assert_eq!(from(f32::MIN_POSITIVE), 0);
        assert!(to(from(f32::NAN)).is_nan());
    }

    #[test]
    fn all_codes_round_trip() {
        check(|c| E4M3(c).to_f32_const(), |v| E4M3::from_f32_const(v).0, 0x7e);
        check(|c| E5M2(c).to_f32_const(), |v| E5M2::from_f32_const(v).0, 0x7b);
        assert_eq!(E4M3(0x7e).to_f32_const(), E4M3::MAX);
        assert_eq!(E5M2(0x7b).to_f32_const(), E5M2::MAX);
    }
}
