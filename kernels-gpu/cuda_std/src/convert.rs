//! Conversions between number formats, one PTX instruction each where there is one.
//!
//! All round to the nearest, ties to even. The 8-bit floating-point formats saturate at their largest finite value,
//! infinities included; NaN becomes `0x7f`. Their instructions need sm_89, so on sm_80 they are integer arithmetic
//! with the same results. Functions named `…x2` and `…x4` work on elements that lie in one word, the first in the
//! lowest bits.

use crate::float8::{E4M3, E5M2};
use half::{bf16, f16};

/// Declares `fn name(v: In) -> Out` by one instruction, with its equal on the host.
macro_rules! conversions {
    ($($(#[$m:meta])* $name:ident($v:ident: $in:ty as $inreg:ident = $to:expr) -> $out:ty as $raw:ty, $outreg:ident,
        |$o:ident| $from:expr; $ptx:literal; $host:expr;)*) => { $(
        $(#[$m])*
        #[cfg_attr(target_arch = "nvptx64", inline(always))]
        pub fn $name($v: $in) -> $out {
            #[cfg(target_arch = "nvptx64")]
            {
                let $o: $raw;
                // SAFETY: register arithmetic.
                unsafe {
                    ptx!(concat!($ptx, " {o}, {v};"), o = lateout($outreg) $o, v = in($inreg) $to,
                        options(pure, nomem, nostack))
                };
                $from
            }
            #[cfg(not(target_arch = "nvptx64"))]
            $host
        }
    )* };
}

conversions! {
    /// Rounds to bf16.
    f32_to_bf16(v: f32 as reg32 = v) -> bf16 as u16, reg16, |o| bf16::from_bits(o); "cvt.rn.bf16.f32";
        if v.is_nan() { bf16::from_bits(0x7fff) } else { bf16::from_f32(v) };
    /// Rounds to f16; too large values become infinite.
    f32_to_f16(v: f32 as reg32 = v) -> f16 as u16, reg16, |o| f16::from_bits(o); "cvt.rn.f16.f32";
        if v.is_nan() { f16::from_bits(0x7fff) } else { f16::from_f32(v) };
    /// Exact.
    f16_to_f32(v: f16 as reg16 = v.to_bits()) -> f32 as f32, reg32, |o| o; "cvt.f32.f16";
        v.to_f32();
    /// Rounds to an integer and clamps it; NaN becomes 0.
    f32_to_i32(v: f32 as reg32 = v) -> i32 as i32, reg32, |o| o; "cvt.rni.s32.f32";
        v.round_ties_even() as i32;
    /// Rounds to an integer and clamps it; NaN becomes 0.
    f32_to_u32(v: f32 as reg32 = v) -> u32 as u32, reg32, |o| o; "cvt.rni.u32.f32";
        v.round_ties_even() as u32;
    /// Rounds to an integer and clamps it to -128 ..= 127; NaN becomes 0.
    f32_to_i8(v: f32 as reg32 = v) -> i8 as i32, reg32, |o| o as i8; "cvt.rni.sat.s8.f32";
        v.round_ties_even() as i8;
    /// Rounds to an integer and clamps it to 0 ..= 255; NaN becomes 0.
    f32_to_u8(v: f32 as reg32 = v) -> u8 as u32, reg32, |o| o as u8; "cvt.rni.sat.u8.f32";
        v.round_ties_even() as u8;
}

/// Rounds to tf32, ties away from zero: an `f32` whose 13 lowest bits are zero, as its bits.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn f32_to_tf32(v: f32) -> u32 {
    #[cfg(target_arch = "nvptx64")]
    {
        let o: u32;
        // SAFETY: register arithmetic.
        unsafe {
            ptx!("cvt.rna.tf32.f32 {o}, {v};", o = lateout(reg32) o, v = in(reg32) v, options(pure, nomem, nostack))
        };
        o & !0x1fff
    }
    #[cfg(not(target_arch = "nvptx64"))]
    if v.is_nan() { 0x7fff_e000 } else { v.to_bits().wrapping_add(0x1000) & !0x1fff }
}

/// Exact.
#[inline(always)]
pub fn bf16_to_f32(v: bf16) -> f32 {
    f32::from_bits((v.to_bits() as u32) << 16)
}

/// Two values to one word by one instruction.
macro_rules! packs {
    ($($(#[$m:meta])* $name:ident = $ptx:literal, $one:ident;)*) => { $(
        $(#[$m])*
        #[cfg_attr(target_arch = "nvptx64", inline(always))]
        pub fn $name(lo: f32, hi: f32) -> u32 {
            #[cfg(target_arch = "nvptx64")]
            {
                let o: u32;
                // The first source of the instruction is the high half.
                // SAFETY: register arithmetic.
                unsafe {
                    ptx!(concat!($ptx, " {o}, {h}, {l};"), o = lateout(reg32) o, h = in(reg32) hi, l = in(reg32) lo,
                        options(pure, nomem, nostack))
                };
                o
            }
            #[cfg(not(target_arch = "nvptx64"))]
            {
                $one(lo).to_bits() as u32 | ($one(hi).to_bits() as u32) << 16
            }
        }
    )* };
}
packs! {
    /// Rounds two values to bf16.
    pack_bf16x2 = "cvt.rn.bf16x2.f32", f32_to_bf16;
    /// Rounds two values to f16.
    pack_f16x2 = "cvt.rn.f16x2.f32", f32_to_f16;
}

/// The larger of each half, by one instruction.
macro_rules! larger_halves {
    ($($(#[$m:meta])* $name:ident = $ptx:literal, $unpack:ident, $pack:ident;)*) => { $(
        $(#[$m])*
        #[cfg_attr(target_arch = "nvptx64", inline(always))]
        pub fn $name(a: u32, b: u32) -> u32 {
            #[cfg(target_arch = "nvptx64")]
            {
                let o: u32;
                // SAFETY: register arithmetic.
                unsafe {
                    ptx!(concat!($ptx, " {o}, {a}, {b};"), o = lateout(reg32) o, a = in(reg32) a, b = in(reg32) b,
                        options(pure, nomem, nostack))
                };
                o
            }
            #[cfg(not(target_arch = "nvptx64"))]
            {
                let ([a, c], [b, d]) = ($unpack(a), $unpack(b));
                $pack(crate::float::max(a, b), crate::float::max(c, d))
            }
        }
    )* };
}
larger_halves! {
    /// The larger of two bf16 values, twice; a NaN loses against a number, and -0 against +0.
    max_bf16x2 = "max.bf16x2", unpack_bf16x2, pack_bf16x2;
    /// The larger of two f16 values, twice; a NaN loses against a number, and -0 against +0.
    max_f16x2 = "max.f16x2", unpack_f16x2, pack_f16x2;
}

/// Sums of halves by one instruction, `a * 1 + b`, which sm_80 has for both.
macro_rules! sum_halves {
    ($($(#[$m:meta])* $name:ident = $ptx:literal, $one:literal, $unpack:ident, $pack:ident;)*) => { $(
        $(#[$m])*
        #[cfg_attr(target_arch = "nvptx64", inline(always))]
        pub fn $name(a: u32, b: u32) -> u32 {
            #[cfg(target_arch = "nvptx64")]
            {
                let o: u32;
                // SAFETY: register arithmetic.
                unsafe {
                    ptx!(concat!($ptx, " {o}, {a}, {n}, {b};"), o = lateout(reg32) o, a = in(reg32) a,
                        n = in(reg32) $one, b = in(reg32) b, options(pure, nomem, nostack))
                };
                o
            }
            #[cfg(not(target_arch = "nvptx64"))]
            {
                // The sum in f32 may be rounded, but has more than twice the bits: rounded again it is the sum rounded once.
                let ([a, c], [b, d]) = ($unpack(a), $unpack(b));
                $pack(a + b, c + d)
            }
        }
    )* };
}
sum_halves! {
    /// The sum of two bf16 values, rounded, twice.
    add_bf16x2 = "fma.rn.bf16x2", 0x3f80_3f80u32, unpack_bf16x2, pack_bf16x2;
    /// The sum of two f16 values, rounded, twice.
    add_f16x2 = "fma.rn.f16x2", 0x3c00_3c00u32, unpack_f16x2, pack_f16x2;
}

/// The larger magnitude of each half of two words of bf16 values, by one instruction from sm_86 on (`max.xorsign.abs`). The signs of the
/// result mean nothing; a NaN loses against a number.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn max_magnitude_bf16x2(a: u32, b: u32) -> u32 {
    #[cfg(all(target_arch = "nvptx64", target_feature = "sm_86"))]
    {
        let o: u32;
        // SAFETY: register arithmetic.
        unsafe {
            ptx!("max.xorsign.abs.bf16x2 {o}, {a}, {b};", o = lateout(reg32) o, a = in(reg32) a, b = in(reg32) b,
                options(pure, nomem, nostack))
        };
        o
    }
    #[cfg(not(all(target_arch = "nvptx64", target_feature = "sm_86")))]
    {
        max_bf16x2(a & 0x7fff_7fff, b & 0x7fff_7fff)
    }
}

/// A word of two halves, by a `mov` that `ptxas` knows how to make part of the conversions that gave the halves.
#[inline(always)]
pub fn join_halves(lo: u16, hi: u16) -> u32 {
    #[cfg(target_arch = "nvptx64")]
    {
        let o: u32;
        // SAFETY: register arithmetic.
        unsafe {
            ptx!("mov.b32 {o}, {{{l}, {h}}};", o = lateout(reg32) o, l = in(reg16) lo, h = in(reg16) hi,
                options(pure, nomem, nostack))
        };
        o
    }
    #[cfg(not(target_arch = "nvptx64"))]
    {
        lo as u32 | (hi as u32) << 16
    }
}

/// Widens two bf16 values. Exact.
#[inline(always)]
pub fn unpack_bf16x2(word: u32) -> [f32; 2] {
    [f32::from_bits(word << 16), f32::from_bits(word & 0xffff_0000)]
}

/// Widens two f16 values. Exact.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn unpack_f16x2(word: u32) -> [f32; 2] {
    [f16_to_f32(f16::from_bits(word as u16)), f16_to_f32(f16::from_bits((word >> 16) as u16))]
}

/// The same conversions for both 8-bit formats.
macro_rules! float8 {
    ($($t:ident $name:literal, $to:ident, $from:ident, $pack2:ident, $pack4:ident, $unpack2:ident, $unpack4:ident,
        $halves:ident, $halves4:ident, $in:literal, $out:literal, $software:path;)*) => { $(
        #[doc = concat!("Rounds to ", $name, ".")]
        #[inline(always)]
        pub fn $to(v: f32) -> $t {
            $t($pack2(v, 0.0) as u8)
        }

        #[doc = concat!("Widens ", $name, ". Exact.")]
        #[cfg_attr(target_arch = "nvptx64", inline(always))]
        pub fn $from(v: $t) -> f32 {
            #[cfg(target_arch = "nvptx64")]
            return $unpack2(v.0 as u16)[0];
            #[cfg(not(target_arch = "nvptx64"))]
            v.to_f32_const()
        }

        #[doc = concat!("Rounds two values to ", $name, ".")]
        #[cfg_attr(target_arch = "nvptx64", inline(always))]
        pub fn $pack2(lo: f32, hi: f32) -> u16 {
            #[cfg(all(target_arch = "nvptx64", target_feature = "sm_89"))]
            {
                let o: u16;
                // SAFETY: register arithmetic.
                unsafe {
                    ptx!(concat!($in, " {o}, {h}, {l};"), o = lateout(reg16) o, h = in(reg32) hi, l = in(reg32) lo,
                        options(pure, nomem, nostack))
                };
                o
            }
            #[cfg(not(all(target_arch = "nvptx64", target_feature = "sm_89")))]
            {
                $t::from_f32_const(lo).0 as u16 | ($t::from_f32_const(hi).0 as u16) << 8
            }
        }

        #[doc = concat!("Rounds four values to ", $name, ".")]
        #[cfg_attr(target_arch = "nvptx64", inline(always))]
        pub fn $pack4(v: [f32; 4]) -> u32 {
            $pack2(v[0], v[1]) as u32 | ($pack2(v[2], v[3]) as u32) << 16
        }

        #[doc = concat!("Widens two ", $name, " values to a word of two f16. Exact.")]
        #[cfg_attr(target_arch = "nvptx64", inline(always))]
        pub fn $halves(word: u16) -> u32 {
            #[cfg(all(target_arch = "nvptx64", target_feature = "sm_89"))]
            {
                let o: u32;
                // SAFETY: register arithmetic.
                unsafe {
                    ptx!(concat!($out, " {o}, {v};"), o = lateout(reg32) o, v = in(reg16) word,
                        options(pure, nomem, nostack))
                };
                o
            }
            #[cfg(not(all(target_arch = "nvptx64", target_feature = "sm_89")))]
            {
                $software(word as u32)
            }
        }

        #[doc = concat!("Widens two ", $name, " values. Exact.")]
        #[cfg_attr(target_arch = "nvptx64", inline(always))]
        pub fn $unpack2(word: u16) -> [f32; 2] {
            #[cfg(target_arch = "nvptx64")]
            return unpack_f16x2($halves(word));
            #[cfg(not(target_arch = "nvptx64"))]
            [$from($t(word as u8)), $from($t((word >> 8) as u8))]
        }

        #[doc = concat!("Widens four ", $name, " values. Exact.")]
        #[cfg_attr(target_arch = "nvptx64", inline(always))]
        pub fn $unpack4(word: u32) -> [f32; 4] {
            #[cfg(target_arch = "nvptx64")]
            let [[a, b], [c, d]] = $halves4(word).map(unpack_f16x2);
            #[cfg(not(target_arch = "nvptx64"))]
            let ([a, b], [c, d]) = ($unpack2(word as u16), $unpack2((word >> 16) as u16));
            [a, b, c, d]
        }
    )* };
}
float8! {
    E4M3 "e4m3", f32_to_e4m3, e4m3_to_f32, pack_e4m3x2, pack_e4m3x4, unpack_e4m3x2, unpack_e4m3x4, e4m3x2_to_f16x2, e4m3x4_to_f16x2,
        "cvt.rn.satfinite.e4m3x2.f32", "cvt.rn.f16x2.e4m3x2", e4m3_pair_to_f16x2;
    E5M2 "e5m2", f32_to_e5m2, e5m2_to_f32, pack_e5m2x2, pack_e5m2x4, unpack_e5m2x2, unpack_e5m2x4, e5m2x2_to_f16x2, e5m2x4_to_f16x2,
        "cvt.rn.satfinite.e5m2x2.f32", "cvt.rn.f16x2.e5m2x2", e5m2_pair_to_f16x2;
}

/// Widens four e4m3 values to two words of two f16 each. Exact.
///
/// Without an instruction for it: exponent and mantissa moved to their places mean a 256th of the value, whose product with 256 is exact,
/// subnormal ones included. NaN is 480 then, the only one that overflows when it is multiplied by 143 besides, and infinity times 0 is NaN.
/// The names in the block are known to `warploom::ptx`, which puts the instruction in its place for GPUs that have it.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn e4m3x4_to_f16x2(word: u32) -> [u32; 2] {
    #[cfg(all(target_arch = "nvptx64", not(target_feature = "sm_89")))]
    {
        let (low, high): (u32, u32);
        // SAFETY: register arithmetic.
        unsafe {
            ptx!("{{ .reg .b32 %e4m3, %low, %high, %nan, %by_256, %by_36608, %zero; mov.b32 %e4m3, {w}; \
                mov.b32 %by_256, 0x5c005c00; mov.b32 %by_36608, 0x78787878; mov.b32 %zero, 0; \
                prmt.b32 %low, %e4m3, 0, 0x1404; and.b32 %nan, %low, 0x7f007f00; shr.u32 %nan, %nan, 1; \
                and.b32 %low, %low, 0x80008000; or.b32 %low, %low, %nan; mul.rn.f16x2 %nan, %low, %by_36608; \
                mul.rn.f16x2 %low, %low, %by_256; fma.rn.f16x2 %low, %nan, %zero, %low; \
                prmt.b32 %high, %e4m3, 0, 0x3424; and.b32 %nan, %high, 0x7f007f00; shr.u32 %nan, %nan, 1; \
                and.b32 %high, %high, 0x80008000; or.b32 %high, %high, %nan; mul.rn.f16x2 %nan, %high, %by_36608; \
                mul.rn.f16x2 %high, %high, %by_256; fma.rn.f16x2 %high, %nan, %zero, %high; \
                mov.b32 {l}, %low; mov.b32 {h}, %high; }}",
                l = lateout(reg32) low, h = lateout(reg32) high, w = in(reg32) word, options(pure, nomem, nostack))
        };
        [low, high]
    }
    #[cfg(not(all(target_arch = "nvptx64", not(target_feature = "sm_89"))))]
    [e4m3x2_to_f16x2(word as u16), e4m3x2_to_f16x2((word >> 16) as u16)]
}

/// Widens four e5m2 values to two words of two f16 each. Exact.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn e5m2x4_to_f16x2(word: u32) -> [u32; 2] {
    [e5m2x2_to_f16x2(word as u16), e5m2x2_to_f16x2((word >> 16) as u16)]
}

/// Two e4m3 values in the low half of a word, to f16.
#[cfg(not(all(target_arch = "nvptx64", target_feature = "sm_89")))]
#[inline(always)]
fn e4m3_pair_to_f16x2(pair: u32) -> u32 {
    #[cfg(target_arch = "nvptx64")]
    return e4m3x4_to_f16x2(pair)[0];
    #[cfg(not(target_arch = "nvptx64"))]
    {
        let one = |code: u32| {
            // A 256th of the value; see `e4m3x4_to_f16x2`.
            let scaled =
                f16::from_f32(f16::from_bits(((code & 0x80) << 8 | (code & 0x7f) << 7) as u16).to_f32() * 256.0);
            if code & 0x7f == 0x7f { 0x7fff } else { scaled.to_bits() as u32 }
        };
        one(pair & 0xff) | one(pair >> 8) << 16
    }
}

/// Two e5m2 values in the low half of a word, to f16, whose upper half they are; NaNs become the one that the instruction gives.
#[cfg(not(all(target_arch = "nvptx64", target_feature = "sm_89")))]
#[inline(always)]
fn e5m2_pair_to_f16x2(pair: u32) -> u32 {
    let one = |half: u32| if half & 0x7fff > 0x7c00 { 0x7fff } else { half };
    one((pair & 0xff) << 8) | one(pair & 0xff00) << 16
}

/// Rounds four values to integers, clamped to -128 ..= 127; NaN becomes 0.
///
/// `ptxas` makes two instructions of it (`F2IP`), each of which rounds, clamps and packs two values.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn pack_i8x4(v: [f32; 4]) -> u32 {
    #[cfg(target_arch = "nvptx64")]
    {
        let o: u32;
        // SAFETY: register arithmetic.
        unsafe {
            ptx!("{{ .reg .b32 %a, %b, %c, %d; cvt.rni.s32.f32 %a, {a}; cvt.rni.s32.f32 %b, {b}; \
                cvt.rni.s32.f32 %c, {c}; cvt.rni.s32.f32 %d, {d}; cvt.pack.sat.s8.s32.b32 %c, %d, %c, 0; \
                cvt.pack.sat.s8.s32.b32 {o}, %b, %a, %c; }}",
                o = lateout(reg32) o, a = in(reg32) v[0], b = in(reg32) v[1], c = in(reg32) v[2], d = in(reg32) v[3],
                options(pure, nomem, nostack))
        };
        o
    }
    #[cfg(not(target_arch = "nvptx64"))]
    {
        let byte = |v: f32| f32_to_i8(v) as u8 as u32;
        byte(v[0]) | byte(v[1]) << 8 | byte(v[2]) << 16 | byte(v[3]) << 24
    }
}

/// Widens four signed bytes. Exact.
#[inline(always)]
pub fn unpack_i8x4(word: u32) -> [f32; 4] {
    let byte = |i: u32| ((word >> (8 * i)) as i8) as f32;
    [byte(0), byte(1), byte(2), byte(3)]
}

/// Widens four signed bytes to two words of two f16 each. Exact.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn i8x4_to_f16x2(word: u32) -> [u32; 2] {
    // A byte `b + 128` below the byte 0x64 is the f16 `1024 + b + 128`.
    let biased = word ^ 0x8080_8080;
    let high = 0x6464_6464;
    let pairs = [crate::integer::permute(biased, high, 0x4140), crate::integer::permute(biased, high, 0x4342)];
    pairs.map(|pair| {
        #[cfg(target_arch = "nvptx64")]
        {
            let o: u32;
            // SAFETY: register arithmetic.
            unsafe {
                ptx!("sub.rn.f16x2 {o}, {p}, {b};", o = lateout(reg32) o, p = in(reg32) pair,
                    b = in(reg32) 0x6480_6480u32, options(pure, nomem, nostack))
            };
            o
        }
        #[cfg(not(target_arch = "nvptx64"))]
        {
            let one = |bits: u32| (f16::from_bits(bits as u16).to_f32() - 1152.0) as i32;
            f32_to_f16(one(pair) as f32).to_bits() as u32 | (f32_to_f16(one(pair >> 16) as f32).to_bits() as u32) << 16
        }
    })
}
