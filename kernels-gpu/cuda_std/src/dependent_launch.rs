//! Programmatic dependent launch (sm_90): a kernel may start while the one before it in the stream still runs.
//!
//! Nothing happens unless the host launches the later kernel with that attribute; on sm_80 and on the SIMT device,
//! where kernels run one after another, both functions do nothing.

/// Lets the next kernel of the stream start, once every block has called this or ended:
/// `griddepcontrol.launch_dependents`.
#[inline(always)]
pub fn launch_dependents() {
    #[cfg(all(target_arch = "nvptx64", target_feature = "sm_90"))]
    // SAFETY: a hint; the next kernel waits for memory itself.
    unsafe {
        sync_ptx!("griddepcontrol.launch_dependents;", options(nostack, preserves_flags))
    };
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
    begin_at::<u8, 0, N>([], words).1
}

/// As [`begin_with`], with addresses besides.
#[inline(always)]
pub fn begin_at<T, const P: usize, const N: usize>(
    mut addresses: [*const T; P],
    mut words: [u32; N],
) -> ([*const T; P], [u32; N]) {
    // Otherwise they would be computed where they are used first.
    crate::unroll::<P>(|i| addresses[i] = crate::integer::opaque_address(addresses[i]));
    crate::unroll::<N>(|i| words[i] = crate::integer::opaque(words[i]));
    begin();
    (addresses, words)
}
