//! Barriers in shared memory that count arrivals and bytes (`mbarrier`).
//!
//! An mbarrier goes through phases. A phase ends when `count` arrivals and all expected bytes have come; waiting
//! threads name the phase by its parity: 0 for the first. sm_80 has them without bytes; expecting bytes needs sm_90.
//!
//! One thread calls [`init`], then [`fence_init`] for what other units or blocks will signal, then the block passes a
//! barrier.

use crate::shared::SharedAddress;

/// `mbarrier.init`: phases of `count` arrivals.
///
/// # Safety
/// `bar` is an aligned 64-bit word of shared memory used for nothing else.
#[inline(always)]
#[track_caller]
pub unsafe fn init(bar: impl SharedAddress, count: u32) {
    #[cfg(target_arch = "nvptx64")]
    // SAFETY: forwarded to the caller.
    unsafe {
        ptx!("mbarrier.init.shared.b64 [{b}], {c};", b = in(reg32) bar.shared_address(), c = in(reg32) count,
            options(nostack, preserves_flags))
    };
    #[cfg(not(target_arch = "nvptx64"))]
    simt::mbarrier_init(bar.shared_address(), count);
}

/// `mbarrier.inval`: ends the use of the word as an mbarrier.
///
/// # Safety
/// `bar` was initialised, and nobody uses it any more.
#[inline(always)]
#[track_caller]
pub unsafe fn invalidate(bar: impl SharedAddress) {
    #[cfg(target_arch = "nvptx64")]
    // SAFETY: forwarded to the caller.
    unsafe {
        ptx!("mbarrier.inval.shared.b64 [{b}];", b = in(reg32) bar.shared_address(),
            options(nostack, preserves_flags))
    };
    #[cfg(not(target_arch = "nvptx64"))]
    simt::mbarrier_invalidate(bar.shared_address());
}

/// Makes initialisations visible to the copy engine and to the cluster (sm_90).
#[inline(always)]
pub fn fence_init() {
    #[cfg(target_arch = "nvptx64")]
    // SAFETY: a fence.
    unsafe {
        ptx!("fence.mbarrier_init.release.cluster;", options(nostack, preserves_flags))
    };
}

/// `mbarrier.arrive`
///
/// # Safety
/// `bar` was initialised, and the initialisation is ordered before.
#[inline(always)]
#[track_caller]
pub unsafe fn arrive(bar: impl SharedAddress) {
    #[cfg(target_arch = "nvptx64")]
    // SAFETY: forwarded to the caller.
    unsafe {
        ptx!("{{ .reg .b64 %s; mbarrier.arrive.shared.b64 %s, [{b}]; }}", b = in(reg32) bar.shared_address(),
            options(nostack, preserves_flags))
    };
    #[cfg(not(target_arch = "nvptx64"))]
    simt::mbarrier_arrive(bar.shared_address(), 1, 0);
}

/// `mbarrier.arrive` `count` times at once (sm_90).
///
/// # Safety
/// As for [`arrive`].
#[inline(always)]
#[track_caller]
pub unsafe fn arrive_many(bar: impl SharedAddress, count: u32) {
    #[cfg(target_arch = "nvptx64")]
    // SAFETY: forwarded to the caller.
    unsafe {
        ptx!("{{ .reg .b64 %s; mbarrier.arrive.shared.b64 %s, [{b}], {c}; }}", b = in(reg32) bar.shared_address(),
            c = in(reg32) count, options(nostack, preserves_flags))
    };
    #[cfg(not(target_arch = "nvptx64"))]
    simt::mbarrier_arrive(bar.shared_address(), count, 0);
}

/// `mbarrier.arrive.expect_tx`: an arrival; the phase also waits for `bytes` more bytes (sm_90).
///
/// # Safety
/// As for [`arrive`].
#[inline(always)]
#[track_caller]
pub unsafe fn arrive_expect_tx(bar: impl SharedAddress, bytes: u32) {
    #[cfg(target_arch = "nvptx64")]
    // SAFETY: forwarded to the caller.
    unsafe {
        ptx!("mbarrier.arrive.expect_tx.shared::cta.b64 _, [{b}], {n};", b = in(reg32) bar.shared_address(),
            n = in(reg32) bytes, options(nostack, preserves_flags))
    };
    #[cfg(not(target_arch = "nvptx64"))]
    simt::mbarrier_arrive(bar.shared_address(), 1, bytes);
}

/// `mbarrier.expect_tx`: the phase waits for `bytes` more bytes; no arrival (sm_90).
///
/// # Safety
/// As for [`arrive`].
#[inline(always)]
#[track_caller]
pub unsafe fn expect_tx(bar: impl SharedAddress, bytes: u32) {
    #[cfg(target_arch = "nvptx64")]
    // SAFETY: forwarded to the caller.
    unsafe {
        ptx!("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [{b}], {n};", b = in(reg32) bar.shared_address(),
            n = in(reg32) bytes, options(nostack, preserves_flags))
    };
    #[cfg(not(target_arch = "nvptx64"))]
    simt::mbarrier_expect_tx(bar.shared_address(), bytes);
}

/// Whether the phase with this parity is over. On sm_90 the hardware lets the thread sleep for a short while first.
///
/// # Safety
/// As for [`arrive`].
#[inline(always)]
#[track_caller]
pub unsafe fn try_wait_parity(bar: impl SharedAddress, parity: u32) -> bool {
    #[cfg(target_arch = "nvptx64")]
    {
        let done: u32;
        // SAFETY: forwarded to the caller.
        unsafe {
            #[cfg(target_feature = "sm_90")]
            ptx!(
                "{{ .reg .pred %p; mbarrier.try_wait.parity.shared::cta.b64 %p, [{b}], {q}; selp.u32 {o}, 1, 0, %p; }}",
                o = lateout(reg32) done, b = in(reg32) bar.shared_address(), q = in(reg32) parity,
                options(nostack, preserves_flags)
            );
            #[cfg(not(target_feature = "sm_90"))]
            ptx!(
                "{{ .reg .pred %p; mbarrier.test_wait.parity.shared.b64 %p, [{b}], {q}; selp.u32 {o}, 1, 0, %p; }}",
                o = lateout(reg32) done, b = in(reg32) bar.shared_address(), q = in(reg32) parity,
                options(nostack, preserves_flags)
            );
        }
        done != 0
    }
    #[cfg(not(target_arch = "nvptx64"))]
    simt::mbarrier_try_wait(bar.shared_address(), parity)
}

/// [`try_wait_parity`] that never sleeps: for a look ahead, whose answer is not needed yet.
///
/// # Safety
/// As for [`arrive`].
#[inline(always)]
#[track_caller]
pub unsafe fn test_wait_parity(bar: impl SharedAddress, parity: u32) -> bool {
    #[cfg(target_arch = "nvptx64")]
    {
        let done: u32;
        // SAFETY: forwarded to the caller.
        unsafe {
            ptx!(
                "{{ .reg .pred %p; mbarrier.test_wait.parity.shared.b64 %p, [{b}], {q}; selp.u32 {o}, 1, 0, %p; }}",
                o = lateout(reg32) done, b = in(reg32) bar.shared_address(), q = in(reg32) parity,
                options(nostack, preserves_flags)
            );
        }
        done != 0
    }
    #[cfg(not(target_arch = "nvptx64"))]
    simt::mbarrier_try_wait(bar.shared_address(), parity)
}

/// [`try_wait_parity`] that acquires what threads of the whole cluster released (sm_90).
///
/// # Safety
/// As for [`arrive`].
#[inline(always)]
#[track_caller]
pub unsafe fn try_wait_parity_cluster(bar: impl SharedAddress, parity: u32) -> bool {
    #[cfg(target_arch = "nvptx64")]
    {
        let done: u32;
        // SAFETY: forwarded to the caller.
        unsafe {
            ptx!(
                "{{ .reg .pred %p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p, [{b}], {q}; \
                 selp.u32 {o}, 1, 0, %p; }}",
                o = lateout(reg32) done, b = in(reg32) bar.shared_address(), q = in(reg32) parity,
                options(nostack, preserves_flags)
            );
        }
        done != 0
    }
    #[cfg(not(target_arch = "nvptx64"))]
    simt::mbarrier_try_wait(bar.shared_address(), parity)
}

/// Waits for the end of the phase with this parity, forever if need be. A protocol error hangs the GPU; while a kernel
/// is young, [`wait_parity_or_trap`] is the better choice.
///
/// # Safety
/// As for [`arrive`].
#[inline(always)]
#[track_caller]
pub unsafe fn wait_parity(bar: impl SharedAddress, parity: u32) {
    let bar = bar.shared_address();
    // SAFETY: forwarded to the caller.
    while !unsafe { try_wait_parity(bar, parity) } {}
}

/// How long [`wait_parity_or_trap`] waits, in nanoseconds.
pub const PATIENCE: u64 = 4_000_000_000;

/// [`wait_parity`] that ends the launch with an error after [`PATIENCE`]. The first poll costs nothing more.
///
/// # Safety
/// As for [`arrive`].
#[inline(always)]
#[track_caller]
pub unsafe fn wait_parity_or_trap(bar: impl SharedAddress, parity: u32) {
    let bar = bar.shared_address();
    // SAFETY: forwarded to the caller.
    unsafe {
        if try_wait_parity(bar, parity) {
            return;
        }
        let start = crate::thread::globaltimer();
        while !try_wait_parity(bar, parity) {
            if crate::thread::globaltimer().wrapping_sub(start) > PATIENCE {
                crate::thread::trap();
            }
        }
    }
}

/// [`wait_parity`] with [`try_wait_parity_cluster`].
///
/// # Safety
/// As for [`arrive`].
#[inline(always)]
#[track_caller]
pub unsafe fn wait_parity_cluster(bar: impl SharedAddress, parity: u32) {
    let bar = bar.shared_address();
    // SAFETY: forwarded to the caller.
    while !unsafe { try_wait_parity_cluster(bar, parity) } {}
}

/// Arrives on the mbarrier at the same place in block `rank` of the cluster (sm_90).
///
/// # Safety
/// As for [`arrive`]; the block exists and has not ended.
#[inline(always)]
#[track_caller]
pub unsafe fn arrive_cluster(bar: impl SharedAddress, rank: u32) {
    #[cfg(target_arch = "nvptx64")]
    // SAFETY: forwarded to the caller.
    unsafe {
        ptx!(
            "{{ .reg .b32 %r; mapa.shared::cluster.u32 %r, {b}, {c}; \
             mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r]; }}",
            b = in(reg32) bar.shared_address(), c = in(reg32) rank, options(nostack, preserves_flags)
        )
    };
    #[cfg(not(target_arch = "nvptx64"))]
    simt::mbarrier_arrive_at(rank, bar.shared_address(), 1, 0);
}

/// [`arrive_cluster`] that publishes nothing: `mbarrier.arrive.relaxed.cluster`. For a thread that has read what others are
/// going to overwrite, by asynchronous operations whose end it waited for. The release of [`arrive_cluster`] is a fence of all
/// its memory accesses, which takes most of a microsecond.
///
/// # Safety
/// As for [`arrive_cluster`].
#[inline(always)]
#[track_caller]
pub unsafe fn arrive_cluster_relaxed(bar: impl SharedAddress, rank: u32) {
    #[cfg(target_arch = "nvptx64")]
    // SAFETY: forwarded to the caller.
    unsafe {
        ptx!(
            "{{ .reg .b32 %r; mapa.shared::cluster.u32 %r, {b}, {c}; \
             mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%r]; }}",
            b = in(reg32) bar.shared_address(), c = in(reg32) rank, options(nostack, preserves_flags)
        )
    };
    #[cfg(not(target_arch = "nvptx64"))]
    simt::mbarrier_arrive_at(rank, bar.shared_address(), 1, 0);
}
