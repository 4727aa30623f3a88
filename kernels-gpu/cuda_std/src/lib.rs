//! The device side of a kernel library: one API, two implementations.
//!
//! * `target_arch = "nvptx64"`: PTX instructions; everything is `inline(always)` and `no_std`.
//! * anywhere else: calls into the [`simt`] device, which runs each GPU thread as a fiber. What is one instruction of a GPU and many of a CPU is
//!   `inline(always)` on the GPU only: in thousands of kernels, each with dozens of them, it would be most of what there is to compile.
//!
//! Names follow Rust-CUDA's `cuda_std` where it has a counterpart.
//!
//! Two layers for memory. Raw pointers always work. [`Shared`], [`Global`] and [`GlobalMut`] are the checked
//! layer: on the GPU they are the raw pointer, on the SIMT device they check bounds and alignment, feed the race
//! detector and give the scheduler places to preempt. Kernels use the checked layer.
//!
//! # Two rules behind the collectives
//!
//! rustc does not mark `asm!` as convergent, so LLVM may duplicate it or sink it across a divergent branch. So
//! collectives use LLVM's own intrinsics, which are convergent; what has none is `sync_ptx!`, inline assembly
//! that is pinned to its basic block by a convergent intrinsic. And collective assembly is never `pure`.
#![cfg_attr(target_arch = "nvptx64", no_std)]
#![cfg_attr(
    target_arch = "nvptx64",
    feature(stdarch_nvptx, asm_experimental_arch, core_intrinsics, gpu_intrinsics, gpu_launch_sized_workgroup_mem)
)]
#![cfg_attr(
    target_arch = "nvptx64",
    feature(abi_unadjusted, link_llvm_intrinsics),
    allow(improper_ctypes, clashing_extern_declarations),
    // Instructions that turn an address into another do not access what it points to.
    allow(clippy::pointers_in_nomem_asm_block)
)]
// That compiler's clippy is another version than the one for the CPU, which sees to style.
#![cfg_attr(target_arch = "nvptx64", allow(clippy::pedantic))]
#![allow(internal_features)]
// Every function here that touches memory or synchronises has the contract of the PTX instruction that it stands
// for; see the module documentation.
#![allow(clippy::missing_safety_doc)]

// Before the modules, which see them by textual scope: `ptx` is a module as well.

/// Per-thread PTX.
#[cfg(target_arch = "nvptx64")]
macro_rules! ptx {
    ($($t:tt)*) => { ::core::arch::asm!($($t)*) };
}

/// Warp-, warpgroup- or block-collective PTX (`.sync`, `.aligned`), pinned to its basic block.
#[cfg(target_arch = "nvptx64")]
macro_rules! sync_ptx {
    ($($t:tt)*) => {{ $crate::ptx::convergence_anchor(); ::core::arch::asm!($($t)*) }};
}

pub mod atomic;
pub mod cluster;
pub mod convert;
pub mod cp_async;
pub mod dependent_launch;
mod element;
mod entry;
pub mod float;
mod float8;
pub mod global;
pub mod integer;
pub mod mbarrier;
pub mod mma;
#[cfg(not(target_arch = "nvptx64"))]
mod ordinary;
#[cfg(target_arch = "nvptx64")]
mod ptx;
pub mod second_level;
pub mod shared;
pub mod thread;
pub mod tma;
pub mod vec;
pub mod warp;
pub mod wgmma;

pub use element::{DType, Element, Float};
#[cfg(not(target_arch = "nvptx64"))]
#[doc(hidden)]
pub use entry::family_of;
pub use entry::{Arch, Pod};
#[cfg(not(target_arch = "nvptx64"))]
pub use entry::{Entry, KernelArgs};
#[doc(hidden)]
pub use entry::{Param as __Param, param_index as __param_index};
pub use float8::{E4M3, E5M2};
pub use global::{Global, GlobalMut};
pub use half::{bf16, f16};
pub use shared::Shared;

/// For the macros of this crate.
#[doc(hidden)]
pub mod __private {
    pub use core::ffi::c_void;
}

/// What may index an accessor: kernels compute in `u32` or `usize`, hosts in `usize`.
pub trait Index: Copy {
    /// The index as an offset of elements.
    fn index(self) -> usize;
}
impl Index for usize {
    #[inline(always)]
    fn index(self) -> usize {
        self
    }
}
impl Index for u32 {
    #[inline(always)]
    fn index(self) -> usize {
        self as usize
    }
}
impl Index for i32 {
    /// Negative values wrap to addresses below the base, as on the GPU.
    #[inline(always)]
    fn index(self) -> usize {
        self as isize as usize
    }
}

/// `apart!(expression)` is the expression. On the SIMT device it is compiled as a function of its own.
///
/// For the arms of a `match` that are alike but for a constant, each as large as a kernel: all in one function take a compiler many times as
/// long as one by one. It must not leave by itself (`return`, `break`, `?`), which would end that function only.
#[macro_export]
macro_rules! apart {
    ($expression:expr) => {
        $crate::__apart!($expression)
    };
}
#[cfg(target_arch = "nvptx64")]
#[doc(hidden)]
#[macro_export]
macro_rules! __apart {
    ($expression:expr) => {
        $expression
    };
}
#[cfg(not(target_arch = "nvptx64"))]
#[doc(hidden)]
#[macro_export]
macro_rules! __apart {
    ($expression:expr) => {
        $crate::__call_apart(|| $expression)
    };
}
#[cfg(not(target_arch = "nvptx64"))]
#[doc(hidden)]
#[inline(never)]
pub fn __call_apart<R>(f: impl FnOnce() -> R) -> R {
    f()
}

/// Calls `f(0) .. f(N - 1)`; unrolled completely, so that `f` may index register arrays.
#[inline(always)]
pub fn unroll<const N: usize>(mut f: impl FnMut(usize)) {
    let mut i = 0;
    while i < N {
        f(i);
        i += 1;
    }
}
