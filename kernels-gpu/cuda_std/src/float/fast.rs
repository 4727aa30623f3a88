//! Approximations: the GPU's special-function unit.
//!
//! Errors are those of the PTX ISA. Subnormal arguments and results are flushed to zero (`.ftz`), except by [`tanh`].

macro_rules! approximate {
    ($($(#[$m:meta])* $name:ident($x:ident) = $ptx:literal, $host:expr;)*) => { $(
        $(#[$m])*
        #[cfg_attr(target_arch = "nvptx64", inline(always))]
        pub fn $name($x: f32) -> f32 {
            #[cfg(target_arch = "nvptx64")]
            {
                let out: f32;
                // SAFETY: register arithmetic.
                unsafe {
                    ptx!(concat!($ptx, " {o}, {x};"), o = lateout(reg32) out, x = in(reg32) $x,
                        options(pure, nomem, nostack))
                };
                out
            }
            #[cfg(not(target_arch = "nvptx64"))]
            {
                $host
            }
        }
    )* };
}

/// A function with `.ftz`.
#[cfg(not(target_arch = "nvptx64"))]
#[inline(always)]
fn ftz(x: f32, f: impl Fn(f32) -> f32) -> f32 {
    flushed(f(flushed(x)))
}

/// What `.ftz` makes of a number.
#[cfg(not(target_arch = "nvptx64"))]
#[inline(always)]
fn flushed(x: f32) -> f32 {
    if x.is_subnormal() { f32::from_bits(x.to_bits() & 0x8000_0000) } else { x }
}

approximate! {
    /// `2^x`, relative error 2^-22 (`ex2.approx.ftz`).
    exp2(x) = "ex2.approx.ftz.f32", ftz(x, f32::exp2);
    /// `log2(x)`: absolute error 2^-22 for `x` in (0.5, 2), relative error 2^-22 elsewhere (`lg2.approx.ftz`).
    log2(x) = "lg2.approx.ftz.f32", ftz(x, f32::log2);
    /// `1 / sqrt(x)`, relative error 2^-22.9 (`rsqrt.approx.ftz`).
    rsqrt(x) = "rsqrt.approx.ftz.f32", ftz(x, |x| 1.0 / x.sqrt());
    /// `sqrt(x)`, relative error 2^-22 (`sqrt.approx.ftz`).
    sqrt(x) = "sqrt.approx.ftz.f32", ftz(x, f32::sqrt);
    /// `1 / x`, at most 1 unit in the last place off (`rcp.approx.ftz`).
    recip(x) = "rcp.approx.ftz.f32", ftz(x, f32::recip);
    /// `tanh(x)`, relative error 2^-11 (`tanh.approx`); subnormal numbers stay what they are, as an H200 was seen to leave them.
    tanh(x) = "tanh.approx.f32", x.tanh();
    /// `sin(x)`, absolute error 2^-20.5 in [-pi, pi], useless far outside (`sin.approx.ftz`).
    sin(x) = "sin.approx.ftz.f32", ftz(x, f32::sin);
    /// `cos(x)`, absolute error 2^-20.5 in [-pi, pi], useless far outside (`cos.approx.ftz`).
    cos(x) = "cos.approx.ftz.f32", ftz(x, f32::cos);
}

/// `e^x`: a multiplication and [`exp2`], so the relative error grows with `|x|` (2^-21 near 0, 2^-17 near 80).
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn exp(x: f32) -> f32 {
    exp2(x * core::f32::consts::LOG2_E)
}

/// The natural logarithm: [`log2`] and a multiplication.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn log(x: f32) -> f32 {
    log2(x) * core::f32::consts::LN_2
}

/// `a / b`, at most 2 units in the last place off, for `|b|` in [2^-126, 2^126] (`div.approx.ftz`).
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn div(a: f32, b: f32) -> f32 {
    #[cfg(target_arch = "nvptx64")]
    {
        let out: f32;
        // SAFETY: register arithmetic.
        unsafe {
            ptx!("div.approx.ftz.f32 {o}, {a}, {b};", o = lateout(reg32) out, a = in(reg32) a, b = in(reg32) b,
                options(pure, nomem, nostack))
        };
        out
    }
    #[cfg(not(target_arch = "nvptx64"))]
    flushed(flushed(a) / flushed(b))
}

/// `1 / (1 + e^-x)`: two special-function instructions.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn sigmoid(x: f32) -> f32 {
    recip(1.0 + exp(-x))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_subnormal_numbers() {
        let tiny = 3e-40f32;
        for x in [tiny, -tiny] {
            assert_eq!(tanh(x).to_bits(), x.to_bits());
            assert_eq!(sin(x).to_bits(), (x * 0.0).to_bits());
            assert_eq!(recip(x), f32::INFINITY.copysign(x));
        }
        assert_eq!((exp2(-130.0), recip(3e38), div(tiny, tiny).is_nan()), (0.0, 0.0, true));
    }
}
