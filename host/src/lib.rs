//! GPU kernels for LLM inference, every one of them written in Rust.
//!
//! The same kernel source runs on two devices: on NVIDIA GPUs as PTX (feature `cuda`; the PTX is part of this
//! crate, so neither nvcc nor a nightly toolchain is needed), and on any CPU on the SIMT device, which runs each
//! GPU thread as a fiber and finds races and out-of-bounds accesses on the way.
//!
//! ```
//! use warploom::{Device, Stream, Tensor, norm};
//!
//! let device = Device::auto()?; // an NVIDIA GPU if there is one, otherwise the SIMT device
//! let stream = Stream::new(&device)?;
//! let x = Tensor::from_slice(&device, &[1.0f32, 2.0, 2.0, 4.0], &[1, 4])?;
//! let mut y = Tensor::zeros(&device, &[1, 4])?;
//! norm::rms_norm(&stream, &mut y, &x, None, 0.0)?;
//! assert_eq!(y.to_vec()?, [0.4, 0.8, 0.8, 1.6]);
//! # Ok::<(), warploom::Error>(())
//! ```
//!
//! # Three layers
//!
//! * **L0**, data: the PTX text by architecture and family ([`ptx`]), entry names and argument structs
//!   ([`kernels`]), launch geometry (`geometry` functions beside each operation). Usable from any CUDA binding.
//! * **L1**, `unsafe`: `launch` functions in each operation's module take raw device pointers and a [`Stream`],
//!   which may be a raw `CUstream` of yours ([`Stream::from_raw`]). They allocate nothing, never synchronise, and can
//!   be captured in CUDA graphs.
//! * **L2**, safe: functions on typed [`Tensor`]s that check everything before anything is launched.
//!
//! # Order of arguments
//!
//! Stream, outputs (`&mut`), inputs, scalars, options as a struct with defaults, and where an operation needs one, a
//! workspace (in [`sampling`] before the options).
//!
//! The guide in the repository's `docs/guide` has examples of every operation, and says how to port, to extend, and to find
//! out what an error means.

pub mod activation;
pub mod attention;
mod check;
pub mod device;
#[cfg(feature = "cuda")]
mod driver;
pub mod ep;
mod error;
pub mod gemm;
pub mod kv_cache;
pub mod moe;
pub mod norm;
mod pieces;
pub mod ptx;
pub mod reference;
pub mod rope;
pub mod sampling;
mod tensor;

pub use cuda_std::{Arch, DType, E4M3, E5M2, Element, Entry, Float, KernelArgs};
pub use device::{Device, Event, Geometry, Graph, Pinned, SimtOptions, Stream};
pub use error::{Error, Result};
pub use half::{bf16, f16};
pub use tensor::Tensor;

/// The kernels themselves: argument structs and entry tables, by family (layer L0).
pub use warploom_kernels_gpu as kernels;
