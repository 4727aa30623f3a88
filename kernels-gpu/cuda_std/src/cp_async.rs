//! `cp.async`: copies from global to shared memory that pass registers by.

/// `cp.async.cg.shared.global`: 16 bytes, bypassing registers.
///
/// # Safety
/// `dst` is in shared memory; both are 16-byte aligned and stay untouched until
/// a [`wait_group`] covers the copy.
#[inline(always)]
#[track_caller]
pub unsafe fn copy_16<T>(dst: *mut T, src: *const T) {
    #[cfg(target_arch = "nvptx64")]
    // SAFETY: forwarded to the caller.
    unsafe {
        core::arch::asm!(
            "{{ .reg .u64 %d, %g; cvta.to.shared.u64 %d, {d}; cvta.to.global.u64 %g, {s}; cp.async.cg.shared.global [%d], [%g], 16; }}",
            d = in(reg64) dst, s = in(reg64) src,
        )
    }
    #[cfg(not(target_arch = "nvptx64"))]
    simt::cp_async(dst.cast(), src.cast(), 16, 16);
}

/// As [`copy_16`], but reads only `bytes` bytes (0 or 16) and zeroes the rest.
///
/// # Safety
/// As for [`copy_16`]; `src` may be anything if `bytes` is 0.
#[inline(always)]
#[track_caller]
pub unsafe fn copy_16_zfill<T>(dst: *mut T, src: *const T, bytes: u32) {
    #[cfg(target_arch = "nvptx64")]
    // SAFETY: forwarded to the caller.
    unsafe {
        core::arch::asm!(
            "{{ .reg .u64 %d, %g; cvta.to.shared.u64 %d, {d}; cvta.to.global.u64 %g, {s}; cp.async.cg.shared.global [%d], [%g], 16, {n}; }}",
            d = in(reg64) dst, s = in(reg64) src, n = in(reg32) bytes,
        )
    }
    #[cfg(not(target_arch = "nvptx64"))]
    simt::cp_async(dst.cast(), src.cast(), 16, bytes as usize);
}

/// `cp.async.commit_group`
#[inline(always)]
pub fn commit_group() {
    #[cfg(target_arch = "nvptx64")]
    unsafe {
        core::arch::asm!("cp.async.commit_group;")
    }
    #[cfg(not(target_arch = "nvptx64"))]
    simt::cp_async_commit();
}

/// `cp.async.wait_group N`: all but the latest `N` groups have landed, for this
/// thread; others see them after a barrier.
#[inline(always)]
#[track_caller]
pub fn wait_group<const N: usize>() {
    #[cfg(target_arch = "nvptx64")]
    unsafe {
        core::arch::asm!("cp.async.wait_group {n};", n = const N)
    }
    #[cfg(not(target_arch = "nvptx64"))]
    simt::cp_async_wait(N);
}
