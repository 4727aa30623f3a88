//! The kernels of warploom: one source for NVIDIA GPUs and for the SIMT device.
//!
//! A kernel is an `unsafe fn`, generic over element types and constants, written against [`cuda_std`].
//! `entries!` lists its instances. On `nvptx64-nvidia-cuda` each becomes a PTX entry, elsewhere a value that the
//! host crate launches on either device. One file an operation, one module a family; a family is a PTX file.
#![cfg_attr(target_arch = "nvptx64", no_std)]
#![cfg_attr(target_arch = "nvptx64", feature(abi_ptx, asm_experimental_arch))]
// A family that has no kernels yet uses neither.
#![cfg_attr(target_arch = "nvptx64", allow(unused_features))]
// A kernel is unsafe as a whole: its contract is that the arguments describe buffers of the documented sizes.
#![allow(unsafe_op_in_unsafe_fn, clippy::missing_safety_doc, clippy::too_many_arguments)]
// Loops over register arrays go by index, as everything indexed must be seen to be constant after unrolling.
#![allow(clippy::needless_range_loop)]
// Written as it becomes the instructions that are wanted: an average of two small numbers is no midpoint of large ones, and the value of a
// block says what is computed, if it is nothing.
#![allow(clippy::manual_midpoint, clippy::semicolon_if_nothing_returned)]
// The device compiler's clippy is another version. What is a matter of style is that of the compiler for the CPU, which sees all but the
// instructions themselves.
#![cfg_attr(target_arch = "nvptx64", allow(clippy::pedantic))]
// Kernels are documented by their files; what users call is the host crate.
#![allow(clippy::undocumented_unsafe_blocks)]
// The files' essays are for their maintainers, and link to what is private.
#![allow(rustdoc::private_intra_doc_links)]

#[cfg(feature = "activation")]
pub mod activation;
#[cfg(feature = "attention")]
pub mod attention;
pub mod chunk;
#[cfg(feature = "conformance")]
pub mod conformance;
#[cfg(feature = "ep")]
pub mod ep;
pub mod gelu;
#[cfg(feature = "gemm")]
pub mod gemm;
pub mod kv_cache;
#[cfg(feature = "moe")]
pub mod moe;
#[cfg(feature = "norm")]
pub mod norm;
pub mod operand;
pub mod philox;
pub mod pipeline;
pub mod rope;
pub mod row;
pub mod scales;
mod tensor_byte;
mod tensor_float;
pub use tensor_byte::TensorByte;
pub use tensor_float::TensorFloat;
#[cfg(feature = "sampling")]
pub mod sampling;

/// On the GPU a panic is a trap (`-Cpanic=immediate-abort`), so that nothing of this remains.
#[cfg(target_arch = "nvptx64")]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    cuda_std::thread::trap()
}
