//! Programmatic dependent launch (sm_90): a kernel may start while the one before it in the stream still runs.
//!
//! Nothing happens unless the host launches the later kernel with that attribute, and on sm_80. On the SIMT device kernels run one after
//! another; its race detector reports what a kernel touches too early.

/// Lets the next kernel of the stream start, once every block has called this or ended:
/// `griddepcontrol.launch_dependents`.
#[inline(always)]
pub fn launch_dependents() {
    #[cfg(all(target_arch = "nvptx64", target_feature = "sm_90"))]
    // SAFETY: a hint; the next kernel waits for memory itself.
    unsafe {
        sync_ptx!("griddepcontrol.launch_dependents;", options(nostack, preserves_flags))
    };
    #[cfg(not(target_arch = "nvptx64"))]
    simt::launch_dependents();
}

/// Waits until the kernels before this one have ended and their memory is visible: `griddepcontrol.wait`. To be called
/// before anything that they write is read, or anything that they read is written.
#[inline(always)]
pub fn wait() {
    #[cfg(all(target_arch = "nvptx64", target_feature = "sm_90"))]
    // SAFETY: waits.
    unsafe {
        sync_ptx!("griddepcontrol.wait;", options(nostack, preserves_flags))
    };
    #[cfg(not(target_arch = "nvptx64"))]
    simt::dependent_wait();
}

/// What most kernels begin with: [`wait`], then [`launch_dependents`]. The launch overlaps with the end of the kernel before, 0.3 to
/// 0.5 µs on an H200, and the next kernel's with this one; nothing else does, so whatever is correct without stays correct. Every
/// thread calls it first.
#[inline(always)]
pub fn begin() {
    wait();
    launch_dependents();
}

/// As [`begin`], with words that are computed before the wait, while the kernels before still run: which part of the work a thread has, from
/// its numbers and the arguments. What is computed after the wait is in line. Nothing before may touch global memory.
#[inline(always)]
pub fn begin_with<const N: usize>(words: [u32; N]) -> [u32; N] {
    begin_at([], words).1
}

/// As [`begin_with`], with addresses besides, as for [`known_here`].
#[inline(always)]
pub fn begin_at<const P: usize, const N: usize>(
    addresses: [*const u8; P],
    mut words: [u32; N],
) -> ([*const u8; P], [u32; N]) {
    crate::unroll::<N>(|i| words[i] = crate::integer::opaque(words[i]));
    let [addresses] = known_here([addresses]);
    begin();
    (addresses, words)
}

/// The same addresses, computed before what follows. Otherwise they would be where they are used: the compilers move arithmetic, ptxas even
/// over a wait, but over no end of a thread, and this would be one if all halves of all of the addresses were [`u32::MAX`].
#[inline(always)]
pub fn known_here<const N: usize, const P: usize>(addresses: [[*const u8; P]; N]) -> [[*const u8; P]; N] {
    known_here_if(true, addresses, [])
}

/// As [`known_here`] if `now`, which is the same for all threads; otherwise wherever the compilers see fit. So are `words`, which no thread may
/// all have [`u32::MAX`] for.
#[inline(always)]
pub fn known_here_if<const N: usize, const P: usize, const K: usize>(
    now: bool,
    mut addresses: [[*const u8; P]; N],
    words: [u32; K],
) -> [[*const u8; P]; N] {
    crate::unroll::<N>(|i| {
        crate::unroll::<P>(|j| addresses[i][j] = crate::integer::opaque_address(addresses[i][j]));
    });
    if N * P > 0 && now {
        let mut all = u32::MAX;
        crate::unroll::<N>(|i| {
            crate::unroll::<P>(|j| all &= addresses[i][j] as u32 & (addresses[i][j] as u64 >> 32) as u32);
        });
        crate::unroll::<K>(|j| all &= words[j]);
        before_what_follows(all);
    }
    addresses
}

/// Ends the thread if `all` is [`u32::MAX`], where there is something to wait for.
#[inline(always)]
fn before_what_follows(all: u32) {
    #[cfg(all(target_arch = "nvptx64", target_feature = "sm_90"))]
    // SAFETY: not taken.
    unsafe {
        ptx!("{{ .reg .pred %p; setp.eq.u32 %p, {a}, -1; @%p exit; }}", a = in(reg32) all,
            options(nostack, preserves_flags))
    };
    #[cfg(not(all(target_arch = "nvptx64", target_feature = "sm_90")))]
    let _ = all;
}
