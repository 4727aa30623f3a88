//! Bulk copies by the copy engine (TMA), counted on an [`mbarrier`](crate::mbarrier).

/// `cp.async.bulk`: one thread has the TMA unit copy `bytes` (a multiple of 16)
/// into shared memory and count them on `bar`.
///
/// # Safety
/// As for [`cp_async::copy_16`](crate::cp_async::copy_16), until a wait on `bar`.
#[inline(always)]
#[track_caller]
pub unsafe fn copy_bulk<T>(dst: *mut T, src: *const T, bytes: u32, bar: *mut u64) {
    #[cfg(target_arch = "nvptx64")]
    // SAFETY: forwarded to the caller.
    unsafe {
        core::arch::asm!(
            "{{ .reg .u64 %d, %g, %b; cvta.to.shared.u64 %d, {d}; cvta.to.global.u64 %g, {s}; cvta.to.shared.u64 %b, {b}; cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%d], [%g], {n}, [%b]; }}",
            d = in(reg64) dst, s = in(reg64) src, n = in(reg32) bytes, b = in(reg64) bar,
        )
    }
    #[cfg(not(target_arch = "nvptx64"))]
    simt::cp_async_bulk(dst.cast(), src.cast(), bytes as usize, bar);
}
