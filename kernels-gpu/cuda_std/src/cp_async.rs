//! `cp.async`: copies from global to shared memory that pass registers by (sm_80 and later).
//!
//! A thread issues copies, closes a group of them with [`commit_group`], and waits for groups with [`wait_group`].
//! What landed is visible to the thread itself; others see it after a barrier.

use crate::shared::SharedAddress;

/// Emits `cp.async` of a constant number of bytes with the number of bytes to read.
#[cfg(target_arch = "nvptx64")]
macro_rules! copy {
    ($op:literal, $bytes:literal, $dst:ident, $src:ident, $read:expr) => {
        ptx!(
            concat!("{{ .reg .b64 %g; cvta.to.global.u64 %g, {s}; ", $op, " [{d}], [%g], ", $bytes, ", {n}; }}"),
            d = in(reg32) $dst.shared_address(), s = in(reg64) $src, n = in(reg32) $read,
            options(nostack, preserves_flags)
        )
    };
}

/// `cp.async.cg`: 16 bytes, bypassing registers and the first-level cache.
///
/// # Safety
/// `dst` is in shared memory; both are 16-byte aligned and stay untouched until
/// a [`wait_group`] covers the copy.
#[inline(always)]
#[track_caller]
pub unsafe fn copy_16<T>(dst: impl SharedAddress, src: *const T) {
    // SAFETY: forwarded to the caller.
    unsafe { copy_16_zfill(dst, src, 16) }
}

/// [`copy_16`] that reads `bytes` bytes only, 0 to 16, and writes zeroes for the rest.
///
/// # Safety
/// As for [`copy_16`]; `src` may be anything if `bytes` is 0.
#[inline(always)]
#[track_caller]
pub unsafe fn copy_16_zfill<T>(dst: impl SharedAddress, src: *const T, bytes: u32) {
    #[cfg(target_arch = "nvptx64")]
    // SAFETY: forwarded to the caller.
    unsafe {
        copy!("cp.async.cg.shared.global.L2::128B", 16, dst, src, bytes)
    };
    #[cfg(not(target_arch = "nvptx64"))]
    simt::cp_async(dst.shared_address(), src.cast(), 16, bytes as usize);
}

/// `cp.async.ca`: `BYTES` bytes (4, 8 or 16) through the first-level cache, of which `bytes` are read and the rest is
/// zero.
///
/// # Safety
/// As for [`copy_16`], with an alignment of `BYTES`.
#[inline(always)]
#[track_caller]
pub unsafe fn copy<const BYTES: usize, T>(dst: impl SharedAddress, src: *const T, bytes: u32) {
    const { assert!(BYTES == 4 || BYTES == 8 || BYTES == 16) };
    #[cfg(target_arch = "nvptx64")]
    // SAFETY: forwarded to the caller.
    unsafe {
        match BYTES {
            4 => copy!("cp.async.ca.shared.global", 4, dst, src, bytes),
            8 => copy!("cp.async.ca.shared.global", 8, dst, src, bytes),
            _ => copy!("cp.async.ca.shared.global", 16, dst, src, bytes),
        }
    };
    #[cfg(not(target_arch = "nvptx64"))]
    simt::cp_async(dst.shared_address(), src.cast(), BYTES, bytes as usize);
}

/// `cp.async.commit_group`: ends the group of the copies issued since the last one.
#[inline(always)]
pub fn commit_group() {
    #[cfg(target_arch = "nvptx64")]
    // SAFETY: concerns this thread's copies only.
    unsafe {
        ptx!("cp.async.commit_group;", options(nostack, preserves_flags))
    };
    #[cfg(not(target_arch = "nvptx64"))]
    simt::cp_async_commit();
}

/// `cp.async.wait_group N`: all but the latest `N` groups have landed, for this
/// thread; others see them after a barrier.
#[inline(always)]
#[track_caller]
pub fn wait_group<const N: usize>() {
    #[cfg(target_arch = "nvptx64")]
    // SAFETY: waits.
    unsafe {
        ptx!("cp.async.wait_group {n};", n = const N, options(nostack, preserves_flags))
    };
    #[cfg(not(target_arch = "nvptx64"))]
    simt::cp_async_wait(N);
}

/// `cp.async.mbarrier.arrive.noinc`: arrives on an [`mbarrier`](crate::mbarrier) once all copies that the thread has
/// issued so far have landed; its count includes this arrival.
///
/// # Safety
/// As for [`mbarrier::arrive`](crate::mbarrier::arrive).
#[inline(always)]
#[track_caller]
pub unsafe fn arrive(bar: impl SharedAddress) {
    #[cfg(target_arch = "nvptx64")]
    // SAFETY: forwarded to the caller.
    unsafe {
        ptx!("cp.async.mbarrier.arrive.noinc.shared.b64 [{b}];", b = in(reg32) bar.shared_address(),
            options(nostack, preserves_flags))
    };
    #[cfg(not(target_arch = "nvptx64"))]
    simt::cp_async_mbarrier_arrive(bar.shared_address());
}
