//! Vectors that one instruction moves, and loads and stores with cache hints.
//!
//! A plain copy through an aligned pointer becomes one `ld`/`st` of that width:
//!
//! ```ignore
//! let B128(x) = input.get_as::<B128<bf16, 8>>(i);                      // ld.global.v4.b32
//! let B128(w) = weight.get_hinted::<B128<bf16, 8>>(i, vec::Streaming); // ld.global.nc.L1::no_allocate.v4.b32
//! ```
//!
//! Hints change nothing but speed. [`Streaming`] suits what is read once; [`Reused`] what other blocks read soon;
//! [`EvictFirst`] and [`EvictLast`] steer the second-level cache. `ld.global.nc` is only right for memory that no
//! thread writes during the kernel; the SIMT device does not tell the difference.

use crate::Float;
#[cfg(not(target_arch = "nvptx64"))]
use crate::ordinary;
use crate::second_level::Policy;

macro_rules! vectors {
    ($($(#[$m:meta])* $name:ident($align:literal);)*) => { $(
        $(#[$m])*
        #[derive(Clone, Copy, Debug, PartialEq)]
        #[repr(C, align($align))]
        pub struct $name<T, const N: usize>(pub [T; N]);

        impl<T: Copy, const N: usize> $name<T, N> {
            /// `N` times the same value.
            #[inline(always)]
            pub const fn splat(value: T) -> Self {
                const { assert!(N * size_of::<T>() == $align, "elements that fill the vector") };
                Self([value; N])
            }
        }

        impl<T: Float, const N: usize> $name<T, N> {
            /// The elements, widened; pairs by one instruction where there is one.
            #[inline(always)]
            pub fn to_f32(self) -> [f32; N] {
                to_f32(self.0)
            }
            /// Rounds each value; pairs by one instruction where there is one.
            #[inline(always)]
            pub fn from_f32(values: [f32; N]) -> Self {
                Self(from_f32(values))
            }
        }
    )* };
}
vectors! {
    /// 4 bytes: `N * size_of::<T>()` is 4.
    B32(4);
    /// 8 bytes.
    B64(8);
    /// 16 bytes, the widest access of one thread.
    B128(16);
}

/// Widens several values, two at a time.
#[inline(always)]
pub fn to_f32<T: Float, const N: usize>(values: [T; N]) -> [f32; N] {
    let mut out = [0.0; N];
    let mut i = 0;
    while i + 1 < N {
        [out[i], out[i + 1]] = T::pair_to_f32([values[i], values[i + 1]]);
        i += 2;
    }
    if i < N {
        out[i] = values[i].to_f32();
    }
    out
}

/// Rounds several values, two at a time.
#[inline(always)]
pub fn from_f32<T: Float, const N: usize>(values: [f32; N]) -> [T; N] {
    let mut out = [T::from_f32(0.0); N];
    let mut i = 0;
    while i + 1 < N {
        [out[i], out[i + 1]] = T::pair_from_f32([values[i], values[i + 1]]);
        i += 2;
    }
    if i < N {
        out[i] = T::from_f32(values[i]);
    }
    out
}

mod sealed {
    pub trait Sealed: Copy {
        const ID: u32;
    }
    /// As many 32-bit words as a type has.
    pub trait Words: Copy {
        const COUNT: usize;
    }
}

/// How a load uses the caches.
pub trait LoadHint: sealed::Sealed {}
/// How a store uses the caches.
pub trait StoreHint: sealed::Sealed {}

macro_rules! hints {
    ($($(#[$m:meta])* $name:ident = $id:literal: $($trait:ident)*;)*) => { $(
        $(#[$m])*
        #[derive(Clone, Copy, Debug)]
        pub struct $name;
        impl sealed::Sealed for $name {
            const ID: u32 = $id;
        }
        $(impl $trait for $name {})*
    )* };
}
hints! {
    /// Read-only data, kept as usual: `ld.global.nc`.
    Reused = 0: LoadHint;
    /// Touched once: `ld.global.nc.L1::no_allocate`, `st.global.L1::no_allocate`.
    Streaming = 1: LoadHint StoreHint;
    /// Touched once, and the first to leave the second-level cache: [`Streaming`] with an `evict_first` policy.
    EvictFirst = 2: LoadHint StoreHint;
    /// Needed again by other blocks or the next kernel: [`Streaming`] with an `evict_last` policy.
    EvictLast = 3: LoadHint StoreHint;
    /// Bypasses the first level, so sees what other multiprocessors wrote before: `ld.global.cg`, `st.global.cg`.
    SecondLevel = 4: LoadHint StoreHint;
    /// Likely touched once: `st.global.cs`.
    StoreStreaming = 5: StoreHint;
}

/// What one instruction moves: 4, 8 or 16 bytes, aligned to their size.
pub trait Vector: sealed::Words {}

macro_rules! vector_types {
    ($($t:ty = $n:literal;)*) => { $(
        impl sealed::Words for $t {
            const COUNT: usize = $n;
        }
        impl Vector for $t {}
    )* };
}
vector_types! { u32 = 1; i32 = 1; f32 = 1; u64 = 2; i64 = 2; }
macro_rules! vector_structs {
    ($($t:ident = $n:literal;)*) => { $(
        impl<T: Copy, const N: usize> sealed::Words for $t<T, N> {
            const COUNT: usize = {
                assert!(size_of::<Self>() == 4 * $n && N * size_of::<T>() == 4 * $n);
                $n
            };
        }
        impl<T: Copy, const N: usize> Vector for $t<T, N> {}
    )* };
}
vector_structs! { B32 = 1; B64 = 2; B128 = 4; }

/// The L2 eviction policies that [`EvictFirst`] and [`EvictLast`] use.
#[cfg(target_arch = "nvptx64")]
#[inline(always)]
fn policy(id: u32) -> u64 {
    let out: u64;
    // SAFETY: register arithmetic.
    unsafe {
        if id == 2 {
            ptx!("createpolicy.fractional.L2::evict_first.b64 {o}, 1.0;", o = lateout(reg64) out,
                options(pure, nomem, nostack, preserves_flags))
        } else {
            ptx!("createpolicy.fractional.L2::evict_last.b64 {o}, 1.0;", o = lateout(reg64) out,
                options(pure, nomem, nostack, preserves_flags))
        }
    };
    out
}

/// Loads or stores of 1, 2 or 4 words by a list of `ID => opcode`, the ones with a policy marked.
#[cfg(target_arch = "nvptx64")]
macro_rules! load_words {
    ($V:ident, $id:expr, $ptr:ident, $w:ident, $([$($n:literal)|*] $op:literal $tail:tt;)*) => {
        match $id {
            $($($n)|* => match <$V as sealed::Words>::COUNT {
                1 => load_words!(@asm $op, "b32 {a}, [%a]", $tail, $id, $ptr, (a = lateout(reg32) $w[0])),
                2 => load_words!(@asm $op, "v2.b32 {{{a}, {b}}}, [%a]", $tail, $id, $ptr,
                    (a = lateout(reg32) $w[0], b = lateout(reg32) $w[1])),
                _ => load_words!(@asm $op, "v4.b32 {{{a}, {b}, {c}, {d}}}, [%a]", $tail, $id, $ptr,
                    (a = lateout(reg32) $w[0], b = lateout(reg32) $w[1], c = lateout(reg32) $w[2],
                     d = lateout(reg32) $w[3])),
            },)*
            _ => core::hint::unreachable_unchecked(),
        }
    };
    (@asm $op:literal, $args:literal, "", $id:expr, $ptr:ident, ($($regs:tt)*)) => {
        ptx!(concat!("{{ .reg .b64 %a; cvta.to.global.u64 %a, {p}; ", $op, ".", $args, "; }}"),
            p = in(reg64) $ptr, $($regs)*, options(pure, readonly, nostack, preserves_flags))
    };
    (@asm $op:literal, $args:literal, $tail:tt, $id:expr, $ptr:ident, ($($regs:tt)*)) => {
        ptx!(concat!("{{ .reg .b64 %a; cvta.to.global.u64 %a, {p}; ", $op, ".", $args, ", {l}; }}"),
            p = in(reg64) $ptr, l = in(reg64) policy($id), $($regs)*,
            options(pure, readonly, nostack, preserves_flags))
    };
}
#[cfg(target_arch = "nvptx64")]
macro_rules! store_words {
    ($V:ident, $id:expr, $ptr:ident, $w:ident, $([$($n:literal)|*] $op:literal $tail:tt;)*) => {
        match $id {
            $($($n)|* => match <$V as sealed::Words>::COUNT {
                1 => store_words!(@asm $op, "b32 [%a], {a}", $tail, $id, $ptr, (a = in(reg32) $w[0])),
                2 => store_words!(@asm $op, "v2.b32 [%a], {{{a}, {b}}}", $tail, $id, $ptr,
                    (a = in(reg32) $w[0], b = in(reg32) $w[1])),
                _ => store_words!(@asm $op, "v4.b32 [%a], {{{a}, {b}, {c}, {d}}}", $tail, $id, $ptr,
                    (a = in(reg32) $w[0], b = in(reg32) $w[1], c = in(reg32) $w[2], d = in(reg32) $w[3])),
            },)*
            _ => core::hint::unreachable_unchecked(),
        }
    };
    (@asm $op:literal, $args:literal, "", $id:expr, $ptr:ident, ($($regs:tt)*)) => {
        ptx!(concat!("{{ .reg .b64 %a; cvta.to.global.u64 %a, {p}; ", $op, ".", $args, "; }}"),
            p = in(reg64) $ptr, $($regs)*, options(nostack, preserves_flags))
    };
    (@asm $op:literal, $args:literal, $tail:tt, $id:expr, $ptr:ident, ($($regs:tt)*)) => {
        ptx!(concat!("{{ .reg .b64 %a; cvta.to.global.u64 %a, {p}; ", $op, ".", $args, ", {l}; }}"),
            p = in(reg64) $ptr, l = in(reg64) policy($id), $($regs)*, options(nostack, preserves_flags))
    };
}

/// Loads a vector from global memory. The accessors' `get_hinted` checks bounds as well.
///
/// # Safety
/// `ptr` is in global memory, aligned and readable; nobody writes there during the kernel, unless the hint is
/// [`SecondLevel`].
#[inline(always)]
pub unsafe fn load<V: Vector, H: LoadHint>(ptr: *const V, hint: H) -> V {
    let _ = (hint, const { V::COUNT });
    #[cfg(target_arch = "nvptx64")]
    {
        let mut w = [0u32; 4];
        // SAFETY: forwarded to the caller; a `V` is `COUNT` words.
        unsafe {
            load_words!(V, H::ID, ptr, w,
                [0] "ld.global.nc" "";
                [1] "ld.global.nc.L1::no_allocate" "";
                [2 | 3] "ld.global.nc.L1::no_allocate.L2::cache_hint" "policy";
                [4] "ld.global.cg" "";
            );
            core::mem::transmute_copy(&w)
        }
    }
    #[cfg(not(target_arch = "nvptx64"))]
    // SAFETY: forwarded to the caller.
    unsafe {
        ordinary::load(ptr)
    }
}

/// Loads 16 bytes from global memory past the first level, with a policy for the second, if `condition`, otherwise zeroes: one predicated instruction. Not by the path of read-only data: others may
/// have written there when this kernel had begun.
///
/// # Safety
/// `ptr` is in global memory, aligned and readable, if `condition`, and zeroes are a `V`.
#[inline(always)]
pub unsafe fn load_if_for<V: Copy>(condition: bool, ptr: *const V, policy: Policy) -> V {
    const { assert!(size_of::<V>() == 16) };
    #[cfg(target_arch = "nvptx64")]
    // SAFETY: forwarded to the caller; the vector has four words.
    unsafe {
        let mut w = [0u32; 4];
        ptx!("{{ .reg .b64 %a; .reg .pred %p; cvta.to.global.u64 %a, {p}; setp.ne.u32 %p, {c}, 0; mov.b32 {w}, 0; mov.b32 {x}, 0; mov.b32 {y}, 0; mov.b32 {z}, 0; @%p ld.global.L1::no_allocate.L2::cache_hint.v4.b32 {{{w}, {x}, {y}, {z}}}, [%a], {h}; }}",
            p = in(reg64) ptr, c = in(reg32) condition as u32, w = out(reg32) w[0], x = out(reg32) w[1],
            y = out(reg32) w[2], z = out(reg32) w[3], h = in(reg64) policy.bits(), options(readonly, nostack, preserves_flags));
        core::mem::transmute_copy(&w)
    }
    #[cfg(not(target_arch = "nvptx64"))]
    {
        let _ = policy;
        // SAFETY: forwarded to the caller.
        unsafe { if condition { ordinary::load(ptr) } else { core::mem::zeroed() } }
    }
}

/// Stores a vector to global memory. The accessors' `set_hinted` checks bounds as well.
///
/// # Safety
/// `ptr` is in global memory, aligned and writable, and nobody else accesses it unordered.
#[inline(always)]
pub unsafe fn store<V: Vector, H: StoreHint>(ptr: *mut V, value: V, hint: H) {
    let _ = (hint, const { V::COUNT });
    #[cfg(target_arch = "nvptx64")]
    {
        let mut w = [0u32; 4];
        // SAFETY: forwarded to the caller; a `V` is `COUNT` words, at most four.
        unsafe {
            (&raw mut w).cast::<V>().write_unaligned(value);
            store_words!(V, H::ID, ptr, w,
                [1] "st.global.L1::no_allocate" "";
                [2 | 3] "st.global.L1::no_allocate.L2::cache_hint" "policy";
                [4] "st.global.cg" "";
                [5] "st.global.cs" "";
            );
        }
    }
    #[cfg(not(target_arch = "nvptx64"))]
    // SAFETY: forwarded to the caller.
    unsafe {
        ordinary::store(ptr, value);
    }
}

/// Stores 16 bytes to global memory if `condition`, as one predicated instruction: there is no branch that would keep other
/// instructions from moving past it. The accessors' `set_if` checks bounds as well.
///
/// # Safety
/// As for [`store`], if `condition`.
#[inline(always)]
pub unsafe fn store_if<V: Copy>(condition: bool, ptr: *mut V, value: V) {
    const { assert!(size_of::<V>() == 16) };
    #[cfg(target_arch = "nvptx64")]
    // SAFETY: forwarded to the caller; the vector has four words.
    unsafe {
        let w: [u32; 4] = core::mem::transmute_copy(&value);
        ptx!("{{ .reg .b64 %a; .reg .pred %p; cvta.to.global.u64 %a, {p}; setp.ne.u32 %p, {c}, 0; @%p st.global.v4.b32 [%a], {{{w}, {x}, {y}, {z}}}; }}",
            p = in(reg64) ptr, c = in(reg32) condition as u32, w = in(reg32) w[0], x = in(reg32) w[1],
            y = in(reg32) w[2], z = in(reg32) w[3], options(nostack, preserves_flags))
    };
    #[cfg(not(target_arch = "nvptx64"))]
    if condition {
        // SAFETY: forwarded to the caller.
        unsafe { ordinary::store(ptr, value) }
    }
}

/// [`store_if`] of 4 or 8 bytes with the hint [`StoreStreaming`].
///
/// # Safety
/// As for [`store_if`].
#[inline(always)]
pub unsafe fn store_streaming_if<V: Copy>(condition: bool, ptr: *mut V, value: V) {
    const { assert!(matches!(size_of::<V>(), 4 | 8)) };
    #[cfg(target_arch = "nvptx64")]
    {
        let (c, mut w) = (condition as u32, [0u32; 2]);
        // SAFETY: forwarded to the caller; the vector has one word or two.
        unsafe {
            (&raw mut w).cast::<V>().write_unaligned(value);
            if size_of::<V>() == 4 {
                ptx!("{{ .reg .b64 %a; .reg .pred %p; cvta.to.global.u64 %a, {p}; setp.ne.u32 %p, {c}, 0; @%p st.global.cs.b32 [%a], {w}; }}",
                    p = in(reg64) ptr, c = in(reg32) c, w = in(reg32) w[0], options(nostack, preserves_flags))
            } else {
                ptx!("{{ .reg .b64 %a; .reg .pred %p; cvta.to.global.u64 %a, {p}; setp.ne.u32 %p, {c}, 0; @%p st.global.cs.v2.b32 [%a], {{{w}, {x}}}; }}",
                    p = in(reg64) ptr, c = in(reg32) c, w = in(reg32) w[0], x = in(reg32) w[1],
                    options(nostack, preserves_flags))
            }
        }
    }
    #[cfg(not(target_arch = "nvptx64"))]
    if condition {
        // SAFETY: forwarded to the caller.
        unsafe { ordinary::store(ptr, value) }
    }
}

/// [`store_if`] of 4 or 16 bytes with a policy for the second-level cache.
///
/// # Safety
/// As for [`store_if`].
#[inline(always)]
pub unsafe fn store_if_for<V: Copy>(condition: bool, ptr: *mut V, value: V, policy: Policy) {
    const { assert!(size_of::<V>() == 4 || size_of::<V>() == 8 || size_of::<V>() == 16) };
    #[cfg(target_arch = "nvptx64")]
    // SAFETY: forwarded to the caller; the value has one word, two or four.
    unsafe {
        if const { size_of::<V>() == 4 } {
            let w: u32 = core::mem::transmute_copy(&value);
            ptx!("{{ .reg .b64 %a; .reg .pred %p; cvta.to.global.u64 %a, {p}; setp.ne.u32 %p, {c}, 0; @%p st.global.L2::cache_hint.b32 [%a], {w}, {h}; }}",
                p = in(reg64) ptr, c = in(reg32) condition as u32, w = in(reg32) w, h = in(reg64) policy.bits(), options(nostack, preserves_flags))
        } else if const { size_of::<V>() == 8 } {
            let w: u64 = core::mem::transmute_copy(&value);
            ptx!("{{ .reg .b64 %a; .reg .pred %p; cvta.to.global.u64 %a, {p}; setp.ne.u32 %p, {c}, 0; @%p st.global.L2::cache_hint.b64 [%a], {w}, {h}; }}",
                p = in(reg64) ptr, c = in(reg32) condition as u32, w = in(reg64) w, h = in(reg64) policy.bits(), options(nostack, preserves_flags))
        } else {
            let w: [u32; 4] = core::mem::transmute_copy(&value);
            ptx!("{{ .reg .b64 %a; .reg .pred %p; cvta.to.global.u64 %a, {p}; setp.ne.u32 %p, {c}, 0; @%p st.global.L2::cache_hint.v4.b32 [%a], {{{w}, {x}, {y}, {z}}}, {h}; }}",
                p = in(reg64) ptr, c = in(reg32) condition as u32, w = in(reg32) w[0], x = in(reg32) w[1],
                y = in(reg32) w[2], z = in(reg32) w[3], h = in(reg64) policy.bits(), options(nostack, preserves_flags))
        }
    };
    #[cfg(not(target_arch = "nvptx64"))]
    {
        let _ = policy;
        if condition {
            // SAFETY: forwarded to the caller.
            unsafe { ordinary::store(ptr, value) }
        }
    }
}

/// Brings the line around `ptr` into the second-level cache. Any global address is fine.
#[inline(always)]
pub fn prefetch_l2<T>(ptr: *const T) {
    #[cfg(target_arch = "nvptx64")]
    // SAFETY: a hint.
    unsafe {
        ptx!("{{ .reg .b64 %a; cvta.to.global.u64 %a, {p}; prefetch.global.L2 [%a]; }}", p = in(reg64) ptr,
            options(nostack, preserves_flags))
    };
    #[cfg(not(target_arch = "nvptx64"))]
    let _ = ptr;
}
