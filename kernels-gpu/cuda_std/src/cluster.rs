//! Thread block clusters (sm_90): blocks that run at the same time and reach each other's shared memory.
//!
//! A kernel launched without clusters is in a cluster of one block. On the SIMT device the blocks of a cluster run
//! together on one OS thread; races are looked for within each block, not in each other's shared memory.

use crate::shared::SharedAddress;

/// Fixes the number of blocks (along `x`) in a cluster of the enclosing kernel: `.reqnctapercluster`. To be called at
/// the top of the kernel.
#[inline(always)]
#[track_caller]
pub fn dims<const BLOCKS: u32>() {
    #[cfg(target_arch = "nvptx64")]
    // SAFETY: a comment, which the PTX builder turns into a directive.
    unsafe {
        ptx!("//@cluster {x}", x = const BLOCKS, options(nomem, nostack, preserves_flags))
    };
    #[cfg(not(target_arch = "nvptx64"))]
    if simt::cluster_size() != BLOCKS {
        simt::trap(format!("a kernel for clusters of {BLOCKS} blocks, launched with {}", simt::cluster_size()));
    }
}

macro_rules! cluster_registers {
    ($($(#[$m:meta])* $name:ident = $reg:literal, $host:ident;)*) => { $(
        $(#[$m])*
        #[inline(always)]
        pub fn $name() -> u32 {
            #[cfg(target_arch = "nvptx64")]
            {
                let out: u32;
                // SAFETY: reads a special register.
                unsafe {
                    ptx!(concat!("mov.u32 {o}, %", $reg, ";"), o = lateout(reg32) out,
                        options(pure, nomem, nostack, preserves_flags))
                };
                out
            }
            #[cfg(not(target_arch = "nvptx64"))]
            simt::$host()
        }
    )* };
}
cluster_registers! {
    /// The block's number in its cluster, `%cluster_ctarank`.
    rank = "cluster_ctarank", cluster_rank;
    /// Blocks in a cluster, `%cluster_nctarank`.
    size = "cluster_nctarank", cluster_size;
}

/// `barrier.cluster.arrive.release`: the first half of [`sync`].
#[inline(always)]
#[track_caller]
pub fn arrive() {
    #[cfg(target_arch = "nvptx64")]
    // SAFETY: counts the thread; `wait` follows.
    unsafe {
        sync_ptx!("barrier.cluster.arrive.release.aligned;", options(nostack, preserves_flags))
    };
    #[cfg(not(target_arch = "nvptx64"))]
    simt::cluster_arrive();
}

/// [`arrive`] that publishes nothing of this thread's ordinary accesses: `barrier.cluster.arrive.relaxed`. Enough after
/// [`mbarrier::fence_init`](crate::mbarrier::fence_init), and where blocks only say that they are done with something.
#[inline(always)]
#[track_caller]
pub fn arrive_relaxed() {
    #[cfg(target_arch = "nvptx64")]
    // SAFETY: counts the thread; `wait` follows.
    unsafe {
        sync_ptx!("barrier.cluster.arrive.relaxed.aligned;", options(nostack, preserves_flags))
    };
    #[cfg(not(target_arch = "nvptx64"))]
    simt::cluster_arrive_relaxed();
}

/// `barrier.cluster.wait.acquire`: waits until every thread of the cluster has arrived.
#[inline(always)]
#[track_caller]
pub fn wait() {
    #[cfg(target_arch = "nvptx64")]
    // SAFETY: waits.
    unsafe {
        sync_ptx!("barrier.cluster.wait.acquire.aligned;", options(nostack, preserves_flags))
    };
    #[cfg(not(target_arch = "nvptx64"))]
    simt::cluster_wait();
}

/// A barrier of all threads of the cluster, which orders memory, shared and global.
#[inline(always)]
#[track_caller]
pub fn sync() {
    arrive();
    wait();
}

/// The address of the same place in the shared memory of block `rank`, for the functions below: `mapa`.
#[inline(always)]
#[track_caller]
pub fn map(place: impl SharedAddress, rank: u32) -> u32 {
    #[cfg(target_arch = "nvptx64")]
    {
        let out: u32;
        // SAFETY: register arithmetic.
        unsafe {
            ptx!("mapa.shared::cluster.u32 {o}, {a}, {c};", o = lateout(reg32) out,
                a = in(reg32) place.shared_address(), c = in(reg32) rank,
                options(pure, nomem, nostack, preserves_flags))
        };
        out
    }
    #[cfg(not(target_arch = "nvptx64"))]
    simt::cluster_address(place.shared_address(), rank)
}

/// `ld.shared::cluster` of 32 bits.
///
/// # Safety
/// `address` came from [`map`], plus multiples of 4 within the block's shared memory, and the block has not ended.
#[inline(always)]
#[track_caller]
pub unsafe fn load_u32(address: u32) -> u32 {
    #[cfg(target_arch = "nvptx64")]
    {
        let out: u32;
        // SAFETY: forwarded to the caller.
        unsafe {
            ptx!("ld.shared::cluster.u32 {o}, [{a}];", o = lateout(reg32) out, a = in(reg32) address,
                options(nostack, preserves_flags))
        };
        out
    }
    #[cfg(not(target_arch = "nvptx64"))]
    // SAFETY: `cluster_access` checks it.
    unsafe {
        simt::cluster_access(address, 4, simt::Access::Read).cast::<u32>().read()
    }
}

/// `st.async` of 32 bits: a store that counts as 4 of the bytes which the mbarrier at `bar` expects
/// ([`mbarrier::expect_tx`](crate::mbarrier::expect_tx)). Who has waited for that phase sees it, without a fence or a barrier of the cluster.
///
/// # Safety
/// As for [`store_u32`], in a cluster that the launch asked for; `bar` came from [`map`] with the same block, of an mbarrier that was
/// initialised, and whose phase does not end before.
#[inline(always)]
#[track_caller]
pub unsafe fn store_async_u32(address: u32, value: u32, bar: u32) {
    #[cfg(target_arch = "nvptx64")]
    // SAFETY: forwarded to the caller.
    unsafe {
        ptx!("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [{a}], {v}, [{b}];", a = in(reg32) address,
            v = in(reg32) value, b = in(reg32) bar, options(nostack, preserves_flags))
    };
    #[cfg(not(target_arch = "nvptx64"))]
    simt::store_async(address, value, bar);
}

/// [`store_async_u32`] of two neighbouring words at once, which count as 8 bytes.
///
/// # Safety
/// As for [`store_async_u32`]; the address is a multiple of 8.
#[inline(always)]
#[track_caller]
pub unsafe fn store_async_u32x2(address: u32, values: [u32; 2], bar: u32) {
    #[cfg(target_arch = "nvptx64")]
    // SAFETY: forwarded to the caller.
    unsafe {
        ptx!("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.u32 [{a}], {{{v0}, {v1}}}, [{b}];",
            a = in(reg32) address, v0 = in(reg32) values[0], v1 = in(reg32) values[1], b = in(reg32) bar,
            options(nostack, preserves_flags))
    };
    #[cfg(not(target_arch = "nvptx64"))]
    for (i, value) in values.into_iter().enumerate() {
        simt::store_async(address + 4 * i as u32, value, bar);
    }
}

/// [`store_async_u32`] of four neighbouring words at once, which count as 16 bytes.
///
/// # Safety
/// As for [`store_async_u32`]; the address is a multiple of 16.
#[inline(always)]
#[track_caller]
pub unsafe fn store_async_u32x4(address: u32, values: [u32; 4], bar: u32) {
    #[cfg(target_arch = "nvptx64")]
    // SAFETY: forwarded to the caller.
    unsafe {
        ptx!("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.u32 [{a}], {{{v0}, {v1}, {v2}, {v3}}}, [{b}];",
            a = in(reg32) address, v0 = in(reg32) values[0], v1 = in(reg32) values[1], v2 = in(reg32) values[2],
            v3 = in(reg32) values[3], b = in(reg32) bar, options(nostack, preserves_flags))
    };
    #[cfg(not(target_arch = "nvptx64"))]
    for (i, value) in values.into_iter().enumerate() {
        simt::store_async(address + 4 * i as u32, value, bar);
    }
}

/// `st.shared::cluster` of 32 bits.
///
/// # Safety
/// As for [`load_u32`], and nobody else accesses the word unordered.
#[inline(always)]
#[track_caller]
pub unsafe fn store_u32(address: u32, value: u32) {
    #[cfg(target_arch = "nvptx64")]
    // SAFETY: forwarded to the caller.
    unsafe {
        ptx!("st.shared::cluster.u32 [{a}], {v};", a = in(reg32) address, v = in(reg32) value,
            options(nostack, preserves_flags))
    };
    #[cfg(not(target_arch = "nvptx64"))]
    // SAFETY: `cluster_access` checks it.
    unsafe {
        simt::cluster_access(address, 4, simt::Access::Write).cast::<u32>().write(value);
    };
}
