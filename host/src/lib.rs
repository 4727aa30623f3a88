//! GPU kernels for LLM inference, every one of them written in Rust.
//!
//! The same kernel source runs on two devices: on NVIDIA GPUs as PTX (feature `cuda` or `cudarc`; the PTX is part of this
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
//!   which may be a raw `CUstream` of yours ([`Stream::from_raw`]). They allocate nothing, never synchronise (a kernel's first
//!   launch loads it; [`Device::preload`] does so earlier), and can be captured in CUDA graphs.
//! * **L2**, safe: functions on typed [`Tensor`]s that check everything before anything is launched.
//!
//! Memory that this crate did not allocate takes part as well: buffers of cudarc's (module `cudarc`, with the feature of that name), tensors of other
//! frameworks ([`dlpack`]), slices and raw pointers ([`borrow`], [`Tensor::from_raw`]).
//!
//! # Order of arguments
//!
//! Stream, outputs (`&mut`; optional ones after the others), inputs, scalars, options (`&`, a struct with defaults), and
//! where an operation needs one, a workspace.
//!
//! # Numerics
//!
//! * **Precision.** Inputs and results are in the tensors' type, everything between in f32: products and sums of [`gemm`], [`moe`] and
//!   [`attention`], squares and means of [`norm`], scores and softmax. Sums of int8 products are exact. Each operation has one definition in
//!   f64, in [`reference`](mod@reference), and tests compare with it.
//! * **Rounding** is once, to the nearest, ties to even, where a result is stored. Operations that stand for several layers round in between
//!   where separate ones would: [`norm::fused_add_rms_norm`] the sum, [`moe::fused()`] the row between its products. Attention's
//!   tensor-core paths multiply probabilities rounded to the type of the values (f16 over 8-bit caches). 8-bit results saturate; a scale is the largest magnitude that
//!   it covers, at least 10⁻¹⁰, by the largest number of the format.
//! * **Determinism.** The same call gives the same bits on the same kind of device: sums have an order that depends on shapes, alignment and the path, never on
//!   timing. ([`moe::FusedOptions::unordered`] and [`moe::FusedQuantOptions::unordered`] give that up.) A row's result depends on that row only (and on whether all rows of its tensor are aligned), whatever else is in the batch,
//!   where paths (in [`gemm`] tiles as well) are named: `Auto` of [`gemm`] and of the blocks of experts chooses a kernel by the number of rows.
//!   (The path `Few` of [`gemm`] has one order of sums for up to 32 rows, and may have others for more.)
//!   Random numbers are Philox4x32-10's, by seed, subsequence and offset. Sampled tokens are the same on GPUs and the SIMT device from the same
//!   logits; other results may differ in their last bits where tensor cores or a GPU's approximations add up otherwise.
//! * **Ties** go to the lower index.
//! * **NaN** ranks last, like -inf, and never becomes an index: a row of logits without a number gives the lowest token that is allowed,
//!   and one of NaN only the lowest experts. Activations, norms and products pass NaN on. It has no say in a scale of 8-bit results, and becomes NaN in
//!   e4m3 and 0 in int8. An infinite token gives NaN, infinity or 0 by a block of experts, depending on the path.
//!
//! # Errors
//!
//! Every operation returns [`Error`]. Those about arguments begin with the operation and name the argument as the signature spells it (an option
//! by its own name, a part of a struct with a dot). When they come:
//!
//! * **Before the launch**, so that no output is changed: [`Shape`](Error::Shape), [`Stride`](Error::Stride),
//!   [`Alignment`](Error::Alignment), [`DType`](Error::DType), [`Value`](Error::Value) for what an argument is;
//!   [`WrongDevice`](Error::WrongDevice), [`Overlap`](Error::Overlap), [`ReadOnly`](Error::ReadOnly),
//!   [`Expired`](Error::Expired), [`WrongStream`](Error::WrongStream) for whose memory it is; [`Unsupported`](Error::Unsupported) for
//!   a combination that no kernel covers; [`Capture`](Error::Capture) for what a graph cannot hold. Layer L1 makes
//!   only those that choosing a kernel needs.
//! * **When something is made**: [`NoDriver`](Error::NoDriver), [`NoDevice`](Error::NoDevice),
//!   [`DriverTooOld`](Error::DriverTooOld), [`TooOldGpu`](Error::TooOldGpu), [`NoCuda`](Error::NoCuda) and
//!   [`NoSimt`](Error::NoSimt) for devices; [`OutOfMemory`](Error::OutOfMemory) and [`Tensor`](Error::Tensor) for
//!   tensors; [`DlpackVersion`](Error::DlpackVersion) for those of others.
//! * **From the launch on**: [`Launch`](Error::Launch), at once, for a fault on the SIMT device; [`Driver`](Error::Driver) for what
//!   the CUDA driver refuses. A GPU's kernels run later, so that a fault of theirs is a `Driver` error of some later call. Safe operations
//!   do not cause any, unless one workspace serves two streams that no event orders.
//! * **Between ranks**: [`Ep`](Error::Ep), which waits for [`Communicator::check`](ep::Communicator::check), and
//!   [`Exchange`](Error::Exchange).
//! * **On the host alone**: [`Allocator`](Error::Allocator) and [`Eplb`](Error::Eplb), with the errors of
//!   [`kv_cache::BlockAllocator`] and [`ep::eplb`].
//!
//! What counts as wrong only in the contents of device memory (a slot, a position, a token's expert) is no error, unless `checked` asks for it
//! or ranks exchange it: it is skipped, and counted in `status` where an operation has one. Operations do not panic; what does says so under
//! *Panics*.
//!
//! The guide in the repository's `docs/guide` has examples of every operation, and says how to port, to extend, and to find
//! out what an error means.
//!
//! # What types prevent
//!
//! Element types that do not go together, outputs that are only shared, layer L1 without `unsafe`, and devices for streams are errors
//! of the compiler's:
//!
//! ```compile_fail,E0308
//! # use warploom::{Device, Stream, Tensor, bf16, norm};
//! # let device = Device::simt();
//! # let stream = Stream::new(&device)?;
//! let x = Tensor::<f32>::zeros(&device, &[1, 4])?;
//! let mut y = Tensor::<bf16>::zeros(&device, &[1, 4])?;
//! norm::rms_norm(&stream, &mut y, &x, None, 0.0)?; // two element types
//! # Ok::<(), warploom::Error>(())
//! ```
//! ```compile_fail,E0308
//! # use warploom::{Device, Stream, Tensor, norm};
//! # let device = Device::simt();
//! # let stream = Stream::new(&device)?;
//! # let (x, y) = (Tensor::<f32>::zeros(&device, &[1, 4])?, Tensor::zeros(&device, &[1, 4])?);
//! norm::rms_norm(&stream, &y, &x, None, 0.0)?; // the output is written
//! # Ok::<(), warploom::Error>(())
//! ```
//! ```compile_fail,E0308
//! # use warploom::{Device, Tensor, norm};
//! # let device = Device::simt();
//! # let (x, mut y) = (Tensor::<f32>::zeros(&device, &[1, 4])?, Tensor::zeros(&device, &[1, 4])?);
//! norm::rms_norm(&device, &mut y, &x, None, 0.0)?; // a stream of the device is needed
//! # Ok::<(), warploom::Error>(())
//! ```
//! ```compile_fail,E0277
//! # use warploom::{Device, Stream, Tensor, norm};
//! # let device = Device::simt();
//! # let stream = Stream::new(&device)?;
//! # let (x, mut y) = (Tensor::<i32>::zeros(&device, &[1, 4])?, Tensor::zeros(&device, &[1, 4])?);
//! norm::rms_norm(&stream, &mut y, &x, None, 0.0)?; // integers cannot be normalised
//! # Ok::<(), warploom::Error>(())
//! ```
//! ```compile_fail,E0133
//! # use warploom::{DType, Device, Stream, norm};
//! # fn f(stream: &Stream, args: &norm::rms_norm::Args) -> warploom::Result<()> {
//! norm::rms_norm::launch(stream, DType::F32, args) // raw pointers: unsafe
//! # }
//! ```
//! ```compile_fail,E0308
//! # use warploom::{Stream, Tensor, moe};
//! # fn f(s: &Stream, ids: &mut Tensor<i32>, weights: &mut Tensor<f32>, logits: &Tensor<f32>) -> warploom::Result<()> {
//! moe::gate(s, weights, ids, None, logits, 8, &Default::default()) // ids, then weights
//! # }
//! ```
//! ```compile_fail,E0277
//! # use warploom::{Stream, Tensor, kv_cache::{KvCache, reshape_and_cache}, f16};
//! # fn f(s: &Stream, cache: &mut KvCache<f32>, key: &Tensor<f16>, slots: &Tensor<i64>) -> warploom::Result<()> {
//! reshape_and_cache(s, cache, None, key, key, slots, &Default::default()) // f16 is not stored as f32
//! # }
//! ```
//! ```compile_fail,E0639
//! # use warploom::kv_cache::CacheShape;
//! let shape = CacheShape { blocks: 1, block_size: 16, heads: 8, head_dim: 128 }; // `CacheShape::new`: there may be more fields
//! ```
//! ```compile_fail,E0599
//! # use warploom::{Stream, Tensor, bf16, moe};
//! # fn f(s: &Stream, out: &mut Tensor<i32>, table: &Tensor<i32>, x: &Tensor<bf16>) {
//! moe::GateOptions::default().status(out) // options hold no outputs
//! # }
//! ```

#![warn(missing_debug_implementations)]

pub mod activation;
pub mod attention;
pub mod borrow;
pub mod check;
#[cfg(feature = "cudarc")]
pub mod cudarc;
pub mod device;
pub mod dlpack;
#[cfg(feature = "_driver")]
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
