//! Integer instructions.

use super::Words;
use cuda_std::integer::{self, Divisor};
use cuda_std::{Global, entries, thread};

/// Threads of the block; also the number of arguments.
pub const THREADS: usize = 64;
/// Words of a thread.
pub const WORDS: usize = 17;

/// `data`: `[THREADS + 1]`; `out`: `[THREADS, WORDS]`. `divisor` and `divisor1` come from the host.
#[inline(always)]
pub unsafe fn conformance(data: *const u32, divisor: Divisor, divisor1: Divisor, out: *mut u32) {
    let t = thread::thread_idx_x();
    let data = Global::new(data);
    let (a, b) = (data.get(t), data.get(t + 1));
    let mut words = Words::new(out, WORDS);
    words.put(integer::mul_hi(a, b));
    words.put_u64(integer::mul_hi_u64((a as u64) << 32 | b as u64, (b as u64) << 31 | a as u64));
    words.put(integer::extract(a, t % 20, t % 13));
    words.put(integer::extract(a, 0, 32));
    words.put(integer::insert(a, b, t % 20, t % 13));
    words.put(integer::permute(a, b, 0x5140 + t % 16));
    words.put(integer::funnel_shift_left(a, b, t));
    words.put(integer::funnel_shift_right(a, b, t));
    words.put(integer::dot_i8x4(a, b, t as i32) as u32);
    words.put(integer::div(a, t + 1));
    words.put(integer::rem(a, t + 1));
    let (quotient, rest) = divisor.div_rem(a);
    words.put(quotient);
    words.put(rest);
    words.put(divisor1.div(b) ^ divisor1.get());
    words.put(a.count_ones() | a.leading_zeros() << 8 | a.trailing_zeros() << 16);
    words.put(a.reverse_bits() ^ integer::opaque(a.rotate_left(t % 32)));
    words.done();
}

entries! {
    pub struct Args(data: *const u32, divisor: Divisor, divisor1: Divisor, out: *mut u32);
    conformance_integer {} [64] => conformance;
}
