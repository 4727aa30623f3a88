//! Barriers in shared memory that count arrivals and bytes (`mbarrier`).

/// Runs PTX with the shared-window address of an mbarrier in `%b`.
#[cfg(target_arch = "nvptx64")]
macro_rules! on_shared {
    ($ptx:literal, $bar:ident $(, $arg:ident)*) => {
        core::arch::asm!(
            concat!("{{ .reg .u64 %b; cvta.to.shared.u64 %b, {b}; ", $ptx, " }}"),
            b = in(reg64) $bar $(, $arg = in(reg32) $arg)*
        )
    };
}
/// `mbarrier.init`: phases of `count` arrivals.
///
/// # Safety
/// `bar` is an aligned word of shared memory used for nothing else.
#[inline(always)]
#[track_caller]
pub unsafe fn init(bar: *mut u64, count: u32) {
    #[cfg(target_arch = "nvptx64")]
    // SAFETY: forwarded to the caller.
    unsafe {
        on_shared!("mbarrier.init.shared::cta.b64 [%b], {count};", bar, count)
    }
    #[cfg(not(target_arch = "nvptx64"))]
    simt::mbarrier_init(bar, count);
}

/// `mbarrier.arrive.expect_tx`
///
/// # Safety
/// `bar` was initialised, and the initialisation is ordered before.
#[inline(always)]
#[track_caller]
pub unsafe fn arrive_expect_tx(bar: *mut u64, bytes: u32) {
    #[cfg(target_arch = "nvptx64")]
    // SAFETY: forwarded to the caller.
    unsafe {
        on_shared!("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%b], {bytes};", bar, bytes)
    }
    #[cfg(not(target_arch = "nvptx64"))]
    simt::mbarrier_arrive(bar, bytes);
}

/// `mbarrier.arrive`
///
/// # Safety
/// As for [`arrive_expect_tx`].
#[inline(always)]
#[track_caller]
pub unsafe fn arrive(bar: *mut u64) {
    #[cfg(target_arch = "nvptx64")]
    // SAFETY: forwarded to the caller.
    unsafe {
        on_shared!("mbarrier.arrive.shared::cta.b64 _, [%b];", bar)
    }
    #[cfg(not(target_arch = "nvptx64"))]
    simt::mbarrier_arrive(bar, 0);
}

/// Waits for the end of the phase with this parity.
///
/// # Safety
/// As for [`arrive_expect_tx`].
#[inline(always)]
#[track_caller]
pub unsafe fn wait_parity(bar: *mut u64, parity: u32) {
    #[cfg(target_arch = "nvptx64")]
    loop {
        let done: u32;
        // SAFETY: forwarded to the caller.
        unsafe {
            core::arch::asm!(
                "{{ .reg .u64 %b; .reg .pred %p; cvta.to.shared.u64 %b, {b}; mbarrier.try_wait.parity.shared::cta.b64 %p, [%b], {q}; selp.u32 {o}, 1, 0, %p; }}",
                o = out(reg32) done, b = in(reg64) bar, q = in(reg32) parity,
            );
        }
        if done != 0 {
            return;
        }
    }
    #[cfg(not(target_arch = "nvptx64"))]
    while !simt::mbarrier_try_wait(bar, parity) {}
}
