//! Entry points: the boundary between host and kernel.

use crate::float8::{E4M3, E5M2};
use crate::tma::TensorMap;

/// Types that may be kernel parameters: plain bits with one layout on both sides.
///
/// # Safety
/// The type is `Copy`, has no padding, any bit pattern is a value, and it means the same on host and device.
pub unsafe trait Pod: Copy + Send + Sync + 'static {}

/// Types that kernels take as parameters: [`Pod`], pointers, and tensor maps.
///
/// # Safety
/// As for [`Pod`].
#[doc(hidden)]
pub unsafe trait Param: Copy + 'static {
    /// What the kernel function gets: the value, or the address of what stays in parameter space.
    type Passed;
    /// `address` gives the generic address of the parameter.
    #[cfg(target_arch = "nvptx64")]
    fn pass(self, address: impl FnOnce() -> *const u8) -> Self::Passed;
    /// `field` is the field of `Args`, in which pointers have lost their type.
    #[cfg(not(target_arch = "nvptx64"))]
    fn pass<F: Copy>(field: &F) -> Self::Passed;
}

/// A parameter that is passed as its value.
#[doc(hidden)]
#[macro_export]
macro_rules! __by_value {
    () => {
        type Passed = Self;
        #[cfg(target_arch = "nvptx64")]
        #[inline(always)]
        fn pass(self, _address: impl FnOnce() -> *const u8) -> Self {
            self
        }
        #[cfg(not(target_arch = "nvptx64"))]
        #[inline(always)]
        fn pass<F: Copy>(field: &F) -> Self {
            const { assert!(size_of::<F>() == size_of::<Self>()) };
            // SAFETY: `F` is `Self`, or both are pointers.
            unsafe { core::mem::transmute_copy(field) }
        }
    };
}

/// Lets kernels take a struct as a parameter, by value: `struct_param!(Job)` for a `#[repr(C)]` struct of plain
/// numbers and pointers. Whoever writes it promises what [`Pod`] asks for.
#[macro_export]
macro_rules! struct_param {
    ($t:ty) => {
        // SAFETY: promised by whoever invokes this.
        unsafe impl $crate::__Param for $t {
            $crate::__by_value! {}
        }
    };
}

/// Lets kernels take a struct as a parameter by its address: `constant_param!(Pairs)` for one with arrays, which stay in parameter space
/// whatever their indices are. Otherwise as [`struct_param!`](crate::struct_param).
#[macro_export]
macro_rules! constant_param {
    ($t:ty) => {
        // SAFETY: promised by whoever invokes this.
        unsafe impl $crate::__Param for $t {
            type Passed = *const Self;
            #[cfg(target_arch = "nvptx64")]
            #[inline(always)]
            fn pass(self, address: impl FnOnce() -> *const u8) -> *const Self {
                address().cast()
            }
            #[cfg(not(target_arch = "nvptx64"))]
            #[inline(always)]
            fn pass<F: Copy>(field: &F) -> *const Self {
                const { assert!(size_of::<F>() == size_of::<Self>()) };
                ::core::ptr::from_ref(field).cast()
            }
        }
    };
}

macro_rules! pod {
    ($($t:ty)*) => { $(
        // SAFETY: plain numbers, of the same layout everywhere.
        unsafe impl Pod for $t {}
        // SAFETY: as above.
        unsafe impl Param for $t { crate::__by_value! {} }
    )* };
}
pod! { u8 i8 u16 i16 u32 i32 u64 i64 usize f32 f64 half::bf16 half::f16 E4M3 E5M2 }
// SAFETY: 64-bit addresses on both sides.
unsafe impl<T: 'static> Param for *const T {
    crate::__by_value! {}
}
// SAFETY: as above.
unsafe impl<T: 'static> Param for *mut T {
    crate::__by_value! {}
}
// 128 opaque bytes.
constant_param!(TensorMap);

/// The position of a parameter in the list of their names.
#[doc(hidden)]
pub const fn param_index(names: &[&str], name: &str) -> usize {
    let mut i = 0;
    loop {
        let (a, b) = (names[i].as_bytes(), name.as_bytes());
        let mut same = a.len() == b.len();
        let mut j = 0;
        while same && j < a.len() {
            same = a[j] == b[j];
            j += 1;
        }
        if same {
            return i;
        }
        i += 1;
    }
}

/// What PTX an entry needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Arch {
    /// Every GPU from compute capability 8.0 on.
    Sm80,
    /// Hopper only, with its own instructions (wgmma, TMA, clusters).
    Sm90a,
}

impl Arch {
    /// As compilers spell it.
    pub const fn name(self) -> &'static str {
        match self {
            Arch::Sm80 => "sm_80",
            Arch::Sm90a => "sm_90a",
        }
    }
}

/// The arguments of a group of entries, made by [`entries!`](crate::entries).
///
/// # Safety
/// `params` points at the fields in the order of the entries' parameters.
#[cfg(not(target_arch = "nvptx64"))]
pub unsafe trait KernelArgs: Copy + 'static {
    /// Pointers to the parameters.
    type Params: AsMut<[*mut core::ffi::c_void]>;
    /// Pointers to the parameters, for `cuLaunchKernel`. They are valid as long as `self` stays where it is.
    fn params(&self) -> Self::Params;
    /// Every entry that takes these arguments.
    const ENTRIES: &'static [Entry<Self>];
}

/// A kernel entry point: what either device needs to launch it.
///
/// A CUDA device looks [`name`](Self::name) up in the module of its [`family`](Self::family); the SIMT device
/// runs [`call`](Self::call) in every thread.
#[cfg(not(target_arch = "nvptx64"))]
#[derive(Clone, Copy, Debug)]
pub struct Entry<A: 'static> {
    /// Name of the PTX entry.
    pub name: &'static str,
    /// Name of the kernel family, which is the stem of its PTX file.
    pub family: &'static str,
    /// The most threads that a block may have.
    pub max_threads: u32,
    /// What PTX it needs.
    pub arch: Arch,
    #[doc(hidden)]
    pub call: Option<unsafe fn(&A)>,
}

#[cfg(not(target_arch = "nvptx64"))]
impl<A: KernelArgs> Entry<A> {
    /// What runs the kernel as one thread of the SIMT device: to be called inside a launch of that device, and as the kernel demands
    /// of its arguments. None without the feature `simt` of this crate: kernels are not compiled for the CPU then.
    #[inline(always)]
    pub fn on_simt(&self) -> Option<unsafe fn(&A)> {
        self.call
    }
}

/// The kernel family of a module: the second part of its path.
///
/// ```
/// assert_eq!(cuda_std::family_of("warploom_kernels_gpu::norm::rms_norm"), "norm");
/// ```
#[cfg(not(target_arch = "nvptx64"))]
#[doc(hidden)]
pub const fn family_of(module: &'static str) -> &'static str {
    let bytes = module.as_bytes();
    let mut start = 0;
    while start + 1 < bytes.len() && !(bytes[start] == b':' && bytes[start + 1] == b':') {
        start += 1;
    }
    start += 2;
    if start >= bytes.len() {
        return module;
    }
    let mut end = start;
    while end < bytes.len() && bytes[end] != b':' {
        end += 1;
    }
    module.split_at(end).0.split_at(start).1
}

/// Declares the entry points of a generic kernel function: a table of instances.
///
/// ```
/// use cuda_std::{Float, bf16, entries};
///
/// #[inline(always)]
/// pub unsafe fn scale<T: Float>(x: *mut T, n: u32, by: f32) { /* ... */ }
///
/// entries! {
///     /// `x`: `[n]`.
///     pub struct Args<T>(x: *mut T, n: u32, by: f32);
///     scale_f32 { type T = f32; } [256] => scale::<T>;
///     scale_bf16 { type T = bf16; } [256, 4] => scale::<T>;
/// }
/// # fn main() { assert_eq!(scale_f32::ENTRY.name, "scale_f32"); }
/// ```
///
/// Each line becomes a module of that name. On the GPU it holds the `extern "ptx-kernel"` function, elsewhere the
/// constant `ENTRY`, an [`Entry<Args>`]. The braces take any items, so constants work as well:
/// `const K: usize = 20;`. The brackets hold the launch bounds: the most threads of a block, and optionally the
/// least number of blocks that should fit on a multiprocessor, and optionally `; Sm90a` for what needs Hopper.
///
/// `Args` is one struct for all instances. Types that differ among them are its parameters, which default to
/// `c_void`: that is what hosts use.
#[macro_export]
macro_rules! entries {
    (
        $(#[$meta:meta])*
        $vis:vis struct $Args:ident $(<$($erased:ident),+>)? ($($params:tt)*);
        $($rows:tt)*
    ) => {
        $crate::__entries_args! { [$(#[$meta])*] $vis $Args [$($($erased),+)?] ($($params)*) { $($rows)* } }
        $crate::__entries_rows! { $Args ($($params)*) { $($rows)* } }
    };
}

#[doc(hidden)]
#[macro_export]
macro_rules! __entries_args {
    (
        [$($meta:tt)*] $vis:vis $Args:ident [$($erased:ident),*] ($($(#[$am:meta])* $arg:ident : $ty:ty),* $(,)?)
        { $($(#[$em:meta])* $name:ident { $($item:item)* } [$($bounds:tt)*] => $kernel:expr;)* }
    ) => {
        $($meta)*
        #[cfg(not(target_arch = "nvptx64"))]
        #[derive(Debug)]
        #[allow(missing_docs)]
        $vis struct $Args<$($erased = $crate::__private::c_void),*> { $($(#[$am])* pub $arg: $ty),* }

        #[cfg(not(target_arch = "nvptx64"))]
        impl<$($erased),*> Clone for $Args<$($erased),*> {
            fn clone(&self) -> Self {
                *self
            }
        }
        #[cfg(not(target_arch = "nvptx64"))]
        impl<$($erased),*> Copy for $Args<$($erased),*> {}

        // SAFETY: the fields in order, which is the order of the entries' parameters.
        #[cfg(not(target_arch = "nvptx64"))]
        unsafe impl $crate::KernelArgs for $Args {
            type Params = [*mut $crate::__private::c_void; [$(stringify!($arg)),*].len()];
            fn params(&self) -> Self::Params {
                [$(::core::ptr::from_ref(&self.$arg).cast_mut().cast()),*]
            }
            const ENTRIES: &'static [$crate::Entry<Self>] = &[$($name::ENTRY),*];
        }
    };
}

#[doc(hidden)]
#[macro_export]
macro_rules! __entries_rows {
    (
        $Args:ident $params:tt
        {$(
            $(#[$em:meta])* $name:ident { $($item:item)* }
            [$threads:expr $(, $min_blocks:expr)? $(; $arch:ident)?] => $kernel:expr;
        )*}
    ) => { $(
        $crate::__entry! {
            $Args $params [$(#[$em])*] $name { $($item)* }
            [$threads, 0 $(+ $min_blocks)?] [$($arch)? Sm80] $kernel
        }
    )* };
}

#[doc(hidden)]
#[macro_export]
macro_rules! __entry {
    (
        $Args:ident ($($(#[$am:meta])* $arg:ident : $ty:ty),* $(,)?) [$($em:tt)*] $name:ident { $($item:item)* }
        [$threads:expr, $min_blocks:expr] [$arch:ident $($_default:ident)?] $kernel:expr
    ) => {
        $($em)*
        #[allow(missing_docs)]
        pub mod $name {
            #[allow(unused_imports)]
            use super::*;
            $($item)*

            const _: () = {
                const fn param<P: $crate::__Param>() {}
                $( param::<$ty>(); )*
            };

            $crate::__on_gpu! { $arch
                #[unsafe(no_mangle)]
                pub unsafe extern "ptx-kernel" fn $name($($arg: $ty),*) {
                    // SAFETY: forwarded to the host that launches it.
                    unsafe {
                        $crate::__launch_bounds!($threads, $min_blocks, $arch);
                        $crate::__entry_call! { $name ($($arg: $ty),*) [$(stringify!($arg)),*] $kernel }
                    }
                }
                // Where the entry is left out: what it calls is still named, and no compiler says that nothing calls it.
                const _: () = {
                    // SAFETY: never called.
                    let _ = |$($arg: $ty),*| unsafe {
                        $kernel($(<$ty as $crate::__Param>::pass($arg, || ::core::ptr::null())),*)
                    };
                };
            }

            #[cfg(not(target_arch = "nvptx64"))]
            #[allow(missing_docs)]
            pub const ENTRY: $crate::Entry<super::$Args> = $crate::Entry {
                name: stringify!($name),
                family: $crate::family_of(module_path!()),
                max_threads: $threads as u32,
                arch: $crate::Arch::$arch,
                call: $crate::__on_simt! { super::$Args, ($($arg: $ty),*) $kernel },
            };
        }
    };
}

/// Of two items for the GPU the first where machines have what the entry needs, otherwise the second: entries for Hopper are the larger part of
/// what there is to compile, and nothing of them is in other files.
#[doc(hidden)]
#[macro_export]
macro_rules! __on_gpu {
    (Sm80 $entry:item $absent:item) => {
        #[cfg(target_arch = "nvptx64")]
        $entry
    };
    (Sm90a $entry:item $absent:item) => {
        #[cfg(all(target_arch = "nvptx64", target_feature = "sm_90"))]
        $entry
        #[cfg(all(target_arch = "nvptx64", not(target_feature = "sm_90")))]
        $absent
    };
}

/// The kernel as a function that the SIMT device calls.
#[cfg(feature = "simt")]
#[doc(hidden)]
#[macro_export]
macro_rules! __on_simt {
    ($Args:ty, ($($arg:ident : $ty:ty),*) $kernel:expr) => {{
        /// A function rather than a closure, which would be compiled again with every crate that uses the constant.
        #[inline(never)]
        unsafe fn on_simt(args: &$Args) {
            // SAFETY: forwarded to the caller of the function that `Entry::on_simt` returns.
            unsafe { $kernel($(<$ty as $crate::__Param>::pass(&args.$arg)),*) }
        }
        Some(on_simt as unsafe fn(&$Args))
    }};
}

/// The kernel is named in a closure that nothing calls: checked, but not compiled for the CPU, which takes minutes for many.
#[cfg(not(feature = "simt"))]
#[doc(hidden)]
#[macro_export]
macro_rules! __on_simt {
    ($Args:ty, ($($arg:ident : $ty:ty),*) $kernel:expr) => {{
        // SAFETY: never called.
        let _ = |args: &$Args| unsafe { $kernel($(<$ty as $crate::__Param>::pass(&args.$arg)),*) };
        None
    }};
}

/// Calls the kernel from its entry. A `constant_param!` is passed by its address in parameter space, without the copy that
/// Rust's by-value semantics would need (CUDA's `__grid_constant__`); the marker makes the PTX builder align it.
#[doc(hidden)]
#[macro_export]
macro_rules! __entry_call {
    ($name:ident ($($arg:ident : $ty:ty),*) $names:tt $kernel:expr) => {
        $kernel($(<$ty as $crate::__Param>::pass($arg, || {
            let address: u64;
            ::core::arch::asm!(
                "//@param_align {k}_param_{i} 64\n\tmov.b64 {o}, {k}_param_{i}; cvta.param.u64 {o}, {o};",
                o = lateout(reg64) address, k = sym $name,
                i = const $crate::__param_index(&$names, stringify!($arg)),
                options(pure, nomem, nostack, preserves_flags)
            );
            address as *const u8
        })),*)
    };
}

/// Emits only PTX comments, which the PTX builder turns into directives of the entry.
#[doc(hidden)]
#[macro_export]
macro_rules! __launch_bounds {
    ($threads:expr, $min_blocks:expr, $arch:ident) => {
        ::core::arch::asm!(
            concat!("//@launch_bounds {t} {b}\n\t//@arch ", stringify!($arch)),
            t = const $threads, b = const $min_blocks,
            options(nomem, nostack, preserves_flags)
        )
    };
}
