//! warploom's kernels as operations on [candle](https://docs.rs/candle-core) tensors.
//!
//! Each operation is a struct of its options. Those with one new output are candle's `CustomOp`s, for `apply_op1_no_bwd` and its
//! like; every one has a method `forward` besides. Tensors are used where they are: a kernel reads candle's memory and writes
//! into the result's, or, for [`ReshapeAndCache`], into that of tensors that are there.
//!
//! ```
//! use candle_core::{Device, Tensor};
//! use warploom_candle::RmsNorm;
//!
//! let x = Tensor::new(&[[3f32, 4.0], [6.0, 8.0]], &Device::Cpu)?;
//! let weight = Tensor::ones(2, candle_core::DType::F32, &Device::Cpu)?;
//! let y = RmsNorm::new(0.0).forward(&x, &weight)?;
//! assert_eq!(y.get(0)?.to_vec1::<f32>()?, y.get(1)?.to_vec1::<f32>()?);
//! # Ok::<(), candle_core::Error>(())
//! ```
//!
//! A cache is written in place, and read through its pages:
//!
//! ```
//! use candle_core::{DType, Device, Tensor};
//! use warploom_candle::{PagedDecode, PagedPrefill, ReshapeAndCache};
//!
//! let cpu = &Device::Cpu;
//! // Keys and values, 4 blocks of 16 tokens, 2 heads of 64.
//! let cache = Tensor::zeros((2, 4, 16, 2, 64), DType::F32, cpu)?;
//! let (keys, values) = (cache.get(0)?, cache.get(1)?);
//! // A prompt of 3 tokens, in blocks 2 and 0.
//! let table = Tensor::new(&[[2u32, 0]], cpu)?;
//! let new = Tensor::randn(0f32, 1.0, (3, 2, 64), cpu)?;
//! ReshapeAndCache::new().forward(&new, &new, &keys, &values, &Tensor::new(&[32i64, 33, 34], cpu)?)?;
//! let query = Tensor::randn(0f32, 1.0, (3, 8, 64), cpu)?;
//! let lengths = Tensor::new(&[3u32], cpu)?;
//! let prefill = PagedPrefill::new(&table, &Tensor::new(&[0u32, 3], cpu)?, &lengths);
//! let out = prefill.forward(&query, &keys, &values)?;
//! // The last of them sees what a decode step with it would.
//! let step = PagedDecode::new(&table, &lengths).forward(&query.narrow(0, 2, 1)?, &keys, &values)?;
//! let apart = (out.narrow(0, 2, 1)? - step)?.abs()?.max_all()?.to_scalar::<f32>()?;
//! assert!(apart < 1e-5);
//! # Ok::<(), candle_core::Error>(())
//! ```
//!
//! | operation | inputs | outputs |
//! | --- | --- | --- |
//! | [`RmsNorm`] | `x`, `weight` | like `x` |
//! | [`FusedAddRmsNorm`] | `x`, `residual`, `weight` | normalised sum, sum |
//! | [`Linear`] | `x` `[.., k]`, `w` `[n, k]` | `[.., n]` |
//! | [`SiluAndMul`] | `x` `[.., 2 d]` | `[.., d]` |
//! | [`Rotary`] | `query`, `key`, positions, angles | turned `query` and `key` |
//! | [`Gate`] | logits `[tokens, experts]` | weights `f32`, experts `u32`, both `[tokens, top_k]` |
//! | [`FusedMoe`] | `x`, `w13`, `w2`, experts, weights | like `x` |
//! | [`Sampler`] | logits `[.., vocab]` | tokens `[..]`, `u32` |
//! | [`ReshapeAndCache`] | `key`, `value`, key and value cache, slots | none: writes into the caches |
//! | [`PagedPrefill`] | `query`, key and value cache, block table, starts, lengths | like `query` |
//! | [`PagedDecode`] | `query`, key and value cache, block table, lengths | like `query` |
//!
//! **Where they run.** Tensors of candle's CPU device run on warploom's SIMT device, which emulates a GPU thread by thread: right
//! to test a model without a GPU, and hundreds of times slower than loops for the CPU. [`FusedMoe`] takes such loops instead. With the
//! feature `cuda` CUDA tensors run on candle's stream, through cudarc, whose order of streams is kept. Metal is an error. Kernels for the CPU take minutes
//! to compile: who has CUDA tensors alone leaves them out by `default-features = false`; a kernel for CPU tensors is an error then.
//!
//! **Types.** Floating-point inputs are `f32`, `f16` or `bf16`, all of one type unless said otherwise; indices are `u32` or `i32`.
//! Strides are taken as far as the kernels do; an error says where a tensor must be contiguous.
//!
//! **Gradients.** None: the operations are for inference.

mod activation;
mod attention;
mod kv_cache;
mod lend;
mod linear;
mod moe;
mod norm;
mod rope;
mod sampling;

pub use activation::SiluAndMul;
pub use attention::{PagedDecode, PagedPrefill};
pub use kv_cache::ReshapeAndCache;
pub use linear::Linear;
pub use moe::{FusedMoe, Gate};
pub use norm::{FusedAddRmsNorm, RmsNorm};
pub use rope::Rotary;
pub use sampling::Sampler;
pub use warploom::gemm::Epilogue;
pub use warploom::kv_cache::CacheLayout;
pub use warploom::moe::{ExpertActivation, GateUp, Scoring};
pub use warploom::rope::Pairing;
