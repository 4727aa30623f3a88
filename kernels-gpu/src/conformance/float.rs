//! Accurate functions, bit for bit, and whether the approximations are as good as documented.

use super::Words;
use cuda_std::float::{self, fast};
use cuda_std::{Global, entries, thread};

/// Threads of a block.
pub const THREADS: usize = 128;
/// Words of a thread.
pub const WORDS: usize = 38;

/// `data`: `[n + 1]`; `out`: `[n, WORDS]`, with `n` a multiple of `THREADS`. Grid: `n / THREADS`.
#[inline(always)]
pub unsafe fn conformance(data: *const f32, out: *mut u32) {
    let i = thread::index_1d();
    let data = Global::new(data);
    let (x, y) = (data.get(i), data.get(i + 1));
    let mut words = Words::new(out, WORDS);
    // All NaNs are one here.
    let mut put = |v: f32| words.put(if v.is_nan() { 0x7fc0_0000 } else { v.to_bits() });
    put(float::sqrt(x));
    put(float::recip(x));
    put(float::rsqrt(x));
    put(float::div(x, y));
    put(float::fma(x, y, 0.1));
    put(x * y + 0.1);
    put(float::add_up(x, y));
    put(float::add_up(x, 12_582_912.0));
    put(float::add_up(-x, x * y));
    put(float::round(x));
    put(float::floor(x));
    put(float::ceil(x));
    put(float::trunc(x));
    put(float::abs(x));
    put(float::copysign(x, y));
    put(float::max(x, y));
    put(float::min(x, y));
    put(float::max_propagate(x, y));
    put(float::exp(x));
    put(float::exp2(x));
    put(float::log(x));
    put(float::log2(x));
    put(float::log1p(x));
    put(float::tanh(x));
    put(float::sigmoid(x));
    put(float::erf(x));
    let (sin, cos) = float::sin_cos(x);
    put(sin);
    put(cos);
    put(float::sin(x) + float::cos(x));
    put(float::from_sortable(float::sortable(x)));
    words.put(float::sortable(x));
    words.put(float::sortable_not_nan(x));
    words.put(float::sortable_16((x.to_bits() >> 16) as u16, 0x7f80) as u32);

    // The approximations, on arguments that are neither subnormal nor have such results.
    let a = float::abs(x);
    let normal = a > 1e-30 && a < 1e30;
    let close = |got: f32, want: f32, bound: f32| !normal || float::abs(got - want) <= bound * float::abs(want);
    words.put(
        close(fast::sqrt(a), float::sqrt(a), 1e-6) as u32 | (close(fast::rsqrt(a), float::rsqrt(a), 1e-6) as u32) << 1,
    );
    words.put(
        close(fast::recip(x), float::recip(x), 1e-6) as u32 | (close(fast::div(1.5, x), 1.5 / x, 1e-6) as u32) << 1,
    );
    let small = float::min(a, 80.0);
    words.put(
        close(fast::exp2(small), float::exp2(small), 1e-6) as u32
            | (close(fast::exp(-small), float::exp(-small), 1e-5) as u32) << 1
            | (close(fast::sigmoid(small), float::sigmoid(small), 1e-6) as u32) << 2,
    );
    let log_bound = |got: f32, want: f32| !normal || float::abs(got - want) <= 1e-6 + 1e-6 * float::abs(want);
    words.put(log_bound(fast::log2(a), float::log2(a)) as u32 | (log_bound(fast::log(a), float::log(a)) as u32) << 1);
    let angle = float::min(a, 3.0);
    words.put(
        close(fast::tanh(x), float::tanh(x), 1e-3) as u32
            | ((x.is_nan() || float::abs(fast::sin(angle) - float::sin(angle)) < 2e-6) as u32) << 1
            | ((x.is_nan() || float::abs(fast::cos(angle) - float::cos(angle)) < 2e-6) as u32) << 2,
    );
    words.done();
}

entries! {
    pub struct Args(data: *const f32, out: *mut u32);
    conformance_float {} [128] => conformance;
}
