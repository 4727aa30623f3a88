//! Operands that many kernels have: integers of either width, and a word to count what was wrong.

use cuda_std::{Global, GlobalMut, atomic};

/// Number `i` of `i32`, or of `i64` if they are `wide`.
///
/// # Safety
/// In bounds.
#[inline(always)]
#[track_caller]
pub unsafe fn integer(numbers: *const u8, i: u32, wide: bool) -> i64 {
    if wide { Global::new(numbers.cast::<i64>()).get(i) } else { Global::new(numbers.cast::<i32>()).get(i) as i64 }
}

/// Adds one to `status`, unless it is null, where something is `wrong`. Does not end the thread: code behind a return
/// that the compiler knows to follow may keep it from loading early.
///
/// # Safety
/// `status` is null or a word that others change atomically only.
#[inline(always)]
#[track_caller]
pub unsafe fn count(status: *mut u32, wrong: bool) {
    if wrong && !status.is_null() {
        GlobalMut::new(status).fetch_add(0u32, 1, atomic::Device, atomic::Relaxed);
    }
}
