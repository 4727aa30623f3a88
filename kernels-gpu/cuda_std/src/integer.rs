//! Integer operations that have an instruction.
//!
//! `count_ones`, `leading_zeros`, `trailing_zeros`, `reverse_bits` and `rotate_left` of core are already one or two
//! instructions (`popc`, `clz`, `brev`, `shf`); here is what core lacks.

/// The same word, of which the compiler knows nothing: what it computed from `word` before, it computes again, instead
/// of keeping the results in registers over a barrier. No instruction.
#[inline(always)]
pub fn opaque(word: u32) -> u32 {
    #[cfg(target_arch = "nvptx64")]
    {
        let mut out = word;
        // SAFETY: no instruction.
        unsafe { ptx!("// {o}", o = inout(reg32) out, options(nomem, nostack, preserves_flags)) };
        out
    }
    #[cfg(not(target_arch = "nvptx64"))]
    word
}

/// As [`opaque`], of an address.
#[inline(always)]
pub fn opaque_address<T>(address: *const T) -> *const T {
    #[cfg(target_arch = "nvptx64")]
    {
        let mut out = address;
        // SAFETY: no instruction.
        unsafe { ptx!("// {o}", o = inout(reg64) out, options(nomem, nostack, preserves_flags)) };
        out
    }
    #[cfg(not(target_arch = "nvptx64"))]
    address
}

/// The high half of the 64-bit product: `mul.hi.u32`.
#[inline(always)]
pub fn mul_hi(a: u32, b: u32) -> u32 {
    ((a as u64 * b as u64) >> 32) as u32
}

/// The high half of the 128-bit product: `mul.hi.u64`.
#[inline(always)]
pub fn mul_hi_u64(a: u64, b: u64) -> u64 {
    ((a as u128 * b as u128) >> 64) as u64
}

/// The larger of either halves of two words, as signed numbers of 16 bits: `max.s16x2`, one instruction from sm_90 on, which it takes.
#[inline(always)]
pub fn max_i16x2(a: u32, b: u32) -> u32 {
    #[cfg(target_arch = "nvptx64")]
    {
        let out: u32;
        // SAFETY: register arithmetic.
        unsafe {
            ptx!("max.s16x2 {o}, {a}, {b};", o = lateout(reg32) out, a = in(reg32) a, b = in(reg32) b,
                options(pure, nomem, nostack))
        };
        out
    }
    #[cfg(not(target_arch = "nvptx64"))]
    {
        let half = |word: u32, shift: u32| (word >> shift) as u16 as i16;
        let larger = |shift: u32| u32::from(half(a, shift).max(half(b, shift)) as u16) << shift;
        larger(16) | larger(0)
    }
}

/// `bits` bits of `word` from bit `start` on: `bfe.u32`. `start + bits` is at most 32.
#[inline(always)]
pub fn extract(word: u32, start: u32, bits: u32) -> u32 {
    #[cfg(target_arch = "nvptx64")]
    {
        let out: u32;
        // SAFETY: register arithmetic.
        unsafe {
            ptx!("bfe.u32 {o}, {w}, {s}, {n};", o = lateout(reg32) out, w = in(reg32) word, s = in(reg32) start,
                n = in(reg32) bits, options(pure, nomem, nostack))
        };
        out
    }
    #[cfg(not(target_arch = "nvptx64"))]
    {
        ((word as u64) >> start) as u32 & ((1u64 << bits) - 1) as u32
    }
}

/// `word` with its `bits` bits from bit `start` on replaced by the lowest ones of `field`: `bfi.b32`.
#[inline(always)]
pub fn insert(word: u32, field: u32, start: u32, bits: u32) -> u32 {
    #[cfg(target_arch = "nvptx64")]
    {
        let out: u32;
        // SAFETY: register arithmetic.
        unsafe {
            ptx!("bfi.b32 {o}, {f}, {w}, {s}, {n};", o = lateout(reg32) out, f = in(reg32) field, w = in(reg32) word,
                s = in(reg32) start, n = in(reg32) bits, options(pure, nomem, nostack))
        };
        out
    }
    #[cfg(not(target_arch = "nvptx64"))]
    {
        let mask = (((1u64 << bits) - 1) << start) as u32;
        word & !mask | ((field as u64) << start) as u32 & mask
    }
}

/// Four bytes picked from eight: byte `i` of the result is byte `selector >> 4 i & 7` of `hi:lo`: `prmt.b32`. Bit 3
/// of a selector replicates the sign of the byte.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn permute(lo: u32, hi: u32, selector: u32) -> u32 {
    #[cfg(target_arch = "nvptx64")]
    {
        let out: u32;
        // SAFETY: register arithmetic.
        unsafe {
            ptx!("prmt.b32 {o}, {a}, {b}, {s};", o = lateout(reg32) out, a = in(reg32) lo, b = in(reg32) hi,
                s = in(reg32) selector, options(pure, nomem, nostack))
        };
        out
    }
    #[cfg(not(target_arch = "nvptx64"))]
    {
        let bytes = (hi as u64) << 32 | lo as u64;
        (0..4).fold(0, |out, i| {
            let select = selector >> (4 * i) & 15;
            let byte = (bytes >> (8 * (select & 7))) as u8;
            let byte = if select & 8 != 0 { (byte as i8 >> 7) as u8 } else { byte };
            out | (byte as u32) << (8 * i)
        })
    }
}

/// The 64 bits `hi:lo` shifted left by `shift & 31`, the high half: `shf.l.wrap.b32`.
#[inline(always)]
pub fn funnel_shift_left(lo: u32, hi: u32, shift: u32) -> u32 {
    ((((hi as u64) << 32 | lo as u64) << (shift & 31)) >> 32) as u32
}

/// The 64 bits `hi:lo` shifted right by `shift & 31`, the low half: `shf.r.wrap.b32`.
#[inline(always)]
pub fn funnel_shift_right(lo: u32, hi: u32, shift: u32) -> u32 {
    (((hi as u64) << 32 | lo as u64) >> (shift & 31)) as u32
}

/// `c` and the sum of the products of four signed bytes: `dp4a.s32.s32`.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn dot_i8x4(a: u32, b: u32, c: i32) -> i32 {
    #[cfg(target_arch = "nvptx64")]
    {
        let out: i32;
        // SAFETY: register arithmetic.
        unsafe {
            ptx!("dp4a.s32.s32 {o}, {a}, {b}, {c};", o = lateout(reg32) out, a = in(reg32) a, b = in(reg32) b,
                c = in(reg32) c, options(pure, nomem, nostack))
        };
        out
    }
    #[cfg(not(target_arch = "nvptx64"))]
    {
        let byte = |w: u32, i: u32| (w >> (8 * i)) as i8 as i32;
        (0..4).fold(c, |sum, i| sum.wrapping_add(byte(a, i) * byte(b, i)))
    }
}

/// `a / b` without the check for zero, which would leave a panic in the kernel.
///
/// # Safety
/// `b` is not 0.
#[inline(always)]
pub unsafe fn div(a: u32, b: u32) -> u32 {
    // SAFETY: by the contract.
    unsafe { core::hint::assert_unchecked(b != 0) };
    a / b
}

/// `a % b` without the check for zero.
///
/// # Safety
/// `b` is not 0.
#[inline(always)]
pub unsafe fn rem(a: u32, b: u32) -> u32 {
    // SAFETY: by the contract.
    unsafe { core::hint::assert_unchecked(b != 0) };
    a % b
}

/// Division by a number that stays the same: a multiplication and a shift (Granlund and Montgomery, *Division by
/// invariant integers using multiplication*, 1994). The host makes it and passes it to the kernel as a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Divisor {
    divisor: u32,
    multiplier: u32,
    shift: u32,
}

impl Divisor {
    /// Panics if `divisor` is 0.
    pub const fn new(divisor: u32) -> Self {
        assert!(divisor != 0, "division by zero");
        // The smallest shift with divisor <= 2^shift.
        let shift = 32 - (divisor - 1).leading_zeros();
        // 2^32 (2^shift - divisor) / divisor + 1, which fits into 32 bits.
        let excess = (1u64 << shift) - divisor as u64;
        let multiplier = ((excess << 32) / divisor as u64 + 1) as u32;
        Self { divisor, multiplier, shift }
    }

    /// The divisor.
    #[inline(always)]
    pub const fn get(self) -> u32 {
        self.divisor
    }

    /// `n / divisor` for every `n`.
    #[inline(always)]
    #[allow(clippy::should_implement_trait)]
    pub fn div(self, n: u32) -> u32 {
        ((mul_hi(n, self.multiplier) as u64 + n as u64) >> self.shift) as u32
    }

    /// `n / divisor` and `n % divisor`.
    #[inline(always)]
    pub fn div_rem(self, n: u32) -> (u32, u32) {
        let quotient = self.div(n);
        (quotient, n.wrapping_sub(quotient.wrapping_mul(self.divisor)))
    }
}

// SAFETY: three words without padding, and the same on both sides.
unsafe impl crate::Pod for Divisor {}
// SAFETY: as above.
unsafe impl crate::__Param for Divisor {
    crate::__by_value! {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn divisors() {
        for d in (1..70).chain([1000, 65535, 65536, 65537, 1 << 31, (1 << 31) + 1, u32::MAX - 1, u32::MAX]) {
            let divisor = Divisor::new(d);
            for base in [0, d, d.wrapping_mul(2), d.wrapping_mul(12345), u32::MAX / 2, u32::MAX - 40] {
                for n in (0..40).map(|i| base.wrapping_add(i).wrapping_sub(20)) {
                    assert_eq!(divisor.div_rem(n), (n / d, n % d), "{n} / {d}");
                }
            }
        }
    }

    #[test]
    fn bit_fields() {
        assert_eq!(extract(0x1234_5678, 8, 12), 0x456);
        assert_eq!(extract(u32::MAX, 0, 32), u32::MAX);
        assert_eq!(insert(0x1234_5678, 0xabc, 8, 12), 0x123a_bc78);
        assert_eq!(permute(0x3322_1100, 0x7766_5544, 0x0246), 0x0022_4466);
        assert_eq!(permute(0x0080_0000, 0, 0x000a), 0x0000_00ff);
        assert_eq!(funnel_shift_left(0x8000_0000, 1, 1), 3);
        assert_eq!(funnel_shift_right(0x8000_0000, 1, 31), 3);
        assert_eq!(max_i16x2(0x7fff_8000, 0x8000_0001), 0x7fff_0001);
        assert_eq!(max_i16x2(0xffff_0002, 0xfffe_0003), 0xffff_0003);
        assert_eq!(dot_i8x4(0x01ff_0203, 0x0203_0405, 7), 7 + 2 - 3 + 8 + 15);
    }
}
