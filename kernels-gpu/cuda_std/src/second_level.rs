//! What the second-level cache does with lines that nobody asks for any more.
//!
//! On the SIMT device there is no such cache: hints do nothing there, and what is discarded becomes NaN at once.

/// Which lines are given up first: an operand of instructions that take a hint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policy(u64);

// What `createpolicy.fractional.L2::…` returns for all accesses, on sm_90; CUTLASS has the same constants (`cute/arch/copy_sm90_desc.hpp`, `CacheHintSm90`).
impl Policy {
    /// As without a hint.
    pub const NORMAL: Self = Self(0x1000_0000_0000_0000);
    /// Before others: what nobody reads again.
    pub const FIRST: Self = Self(0x12F0_0000_0000_0000);
    /// After others: what is read soon. Lines stay so until they are read with another policy, or [discarded](discard).
    pub const LAST: Self = Self(0x14F0_0000_0000_0000);

    /// The operand.
    #[inline(always)]
    #[cfg(target_arch = "nvptx64")]
    pub(crate) fn bits(self) -> u64 {
        self.0
    }
}

/// Gives up the line of 128 bytes at `ptr` without writing it to memory: `discard.global.L2`. What is read from it is arbitrary until it is written again.
///
/// # Safety
/// `ptr` is a multiple of 128, and all of the line may be written by this thread as if by ordinary stores.
#[inline(always)]
#[track_caller]
pub unsafe fn discard<T>(ptr: *mut T) {
    #[cfg(all(target_arch = "nvptx64", target_feature = "sm_90"))]
    // SAFETY: forwarded to the caller.
    unsafe {
        ptx!("{{ .reg .b64 %a; cvta.to.global.u64 %a, {p}; discard.global.L2 [%a], 128; }}", p = in(reg64) ptr,
            options(nostack, preserves_flags))
    };
    #[cfg(all(target_arch = "nvptx64", not(target_feature = "sm_90")))]
    let _ = ptr;
    #[cfg(not(target_arch = "nvptx64"))]
    {
        /// A line with the alignment that the instruction asks for.
        #[derive(Clone, Copy)]
        #[repr(align(128))]
        struct Line(#[allow(dead_code, reason = "read as elements of other types")] [u32; 32]);
        let line = crate::GlobalMut::new(ptr.cast::<Line>());
        // SAFETY: forwarded to the caller.
        unsafe { line.set(0u32, Line([u32::MAX; 32])) };
    }
}
