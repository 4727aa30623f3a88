//! Conversions between floating-point formats, one PTX instruction each.

use crate::float8::{E4M3, E5M2};
use half::{bf16, f16};

/// Nearest, ties to even.
#[inline(always)]
pub fn f32_to_bf16(v: f32) -> bf16 {
    #[cfg(target_arch = "nvptx64")]
    {
        let o: u16;
        // SAFETY: register arithmetic.
        unsafe {
            ptx!("cvt.rn.bf16.f32 {o}, {v};", o = lateout(reg16) o, v = in(reg32) v, options(pure, nomem, nostack))
        };
        bf16::from_bits(o)
    }
    #[cfg(not(target_arch = "nvptx64"))]
    bf16::from_f32(v)
}

/// Nearest, ties to even.
#[inline(always)]
pub fn f32_to_f16(v: f32) -> f16 {
    #[cfg(target_arch = "nvptx64")]
    {
        let o: u16;
        // SAFETY: register arithmetic.
        unsafe {
            ptx!("cvt.rn.f16.f32 {o}, {v};", o = lateout(reg16) o, v = in(reg32) v, options(pure, nomem, nostack))
        };
        f16::from_bits(o)
    }
    #[cfg(not(target_arch = "nvptx64"))]
    f16::from_f32(v)
}

/// Exact.
#[inline(always)]
pub fn f16_to_f32(v: f16) -> f32 {
    #[cfg(target_arch = "nvptx64")]
    {
        let o: f32;
        // SAFETY: register arithmetic.
        unsafe {
            ptx!("cvt.f32.f16 {o}, {v};", o = lateout(reg32) o, v = in(reg16) v.to_bits(), options(pure, nomem, nostack))
        };
        o
    }
    #[cfg(not(target_arch = "nvptx64"))]
    v.to_f32()
}

/// Nearest, ties to even, saturating at 448.
#[inline(always)]
pub fn f32_to_e4m3(v: f32) -> E4M3 {
    E4M3::from_f32_const(v)
}

/// Exact.
#[inline(always)]
pub fn e4m3_to_f32(v: E4M3) -> f32 {
    v.to_f32_const()
}

/// Nearest, ties to even, saturating at 57344.
#[inline(always)]
pub fn f32_to_e5m2(v: f32) -> E5M2 {
    E5M2::from_f32_const(v)
}

/// Exact.
#[inline(always)]
pub fn e5m2_to_f32(v: E5M2) -> f32 {
    v.to_f32_const()
}
