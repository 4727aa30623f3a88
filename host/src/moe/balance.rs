//! Balance without losses: how often experts are chosen, and the bias that makes those chosen too often less likely.
//!
//! Source: Wang et al., *Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts*, 2024.

use crate::check::Call;
use crate::device::{Geometry, Stream};
use crate::error::Result;
use crate::kernels::moe::balance as kernel;
use crate::tensor::Tensor;
use std::ffi::c_void;

pub use kernel::{BiasArgs, HistogramArgs};

/// The most experts: counters are in shared memory, within the 48 KiB that every GPU has.
pub const MAX_EXPERTS: usize = 8192;

/// How to launch `moe_histogram` for `n` ids.
pub const fn histogram_geometry(n: u32, experts: u32) -> Geometry {
    Geometry::linear(n.div_ceil(kernel::CHUNK as u32), kernel::THREADS as u32)
        .shared_bytes(experts.saturating_mul(4))
        .dependent()
}

/// How to launch `moe_update_bias`.
pub const fn bias_geometry() -> Geometry {
    Geometry::linear(1, kernel::BIAS_THREADS as u32).shared_bytes(kernel::BIAS_SHARED_BYTES as u32).dependent()
}

/// Launches the count on raw pointers (layer L1).
///
/// # Errors
/// Those of [`Stream::launch`].
///
/// # Safety
/// The pointers are device memory as [`histogram`](kernel::histogram) documents, until the launch is done; `counts` overlaps
/// nothing else, and others change it atomically only. There are ids, and at most [`MAX_EXPERTS`].
pub unsafe fn launch_histogram(stream: &Stream, args: &HistogramArgs) -> Result<()> {
    // SAFETY: forwarded to the caller.
    unsafe { stream.launch(&kernel::moe_histogram::ENTRY, &histogram_geometry(args.n, args.experts), args) }
}

/// Launches the update on raw pointers (layer L1).
///
/// # Errors
/// Those of [`Stream::launch`].
///
/// # Safety
/// The pointers are device memory as [`update_bias`](kernel::update_bias) documents, until the launch is done; they do not
/// overlap.
pub unsafe fn launch_update_bias(stream: &Stream, args: &BiasArgs) -> Result<()> {
    // SAFETY: forwarded to the caller.
    unsafe { stream.launch(&kernel::moe_update_bias::ENTRY, &bias_geometry(), args) }
}

/// Adds how often each expert is chosen to `counts`: zero them first for one batch, or let them run on over many, which is what
/// [`ep::eplb`](crate::ep::eplb) balances by.
///
/// `counts`: `[experts]`, at most 8192; `topk_ids`: of any shape, contiguous, fewer than 2³¹ ids. Ids of -1 and out of range
/// are not counted.
///
/// # Errors
/// [`Shape`](crate::Error::Shape), [`Stride`](crate::Error::Stride), [`Value`](crate::Error::Value),
/// [`Overlap`](crate::Error::Overlap), [`WrongDevice`](crate::Error::WrongDevice).
///
/// ```
/// use warploom::{Device, Stream, Tensor, moe};
/// let device = Device::simt();
/// let stream = Stream::new(&device)?;
/// let ids = Tensor::from_slice(&device, &[0, 2, 2, -1], &[2, 2])?;
/// let mut counts = Tensor::from_slice(&device, &[10i64, 0, 0], &[3])?;
/// moe::histogram(&stream, &mut counts, &ids)?;
/// assert_eq!(counts.to_vec()?, [11, 0, 2]);
/// # Ok::<(), warploom::Error>(())
/// ```
pub fn histogram(stream: &Stream, counts: &mut Tensor<i64>, topk_ids: &Tensor<i32>) -> Result<()> {
    let mut call = Call::new("moe::histogram", stream);
    let [experts] = *counts.shape() else {
        return Err(call.bad_shape("counts", counts.shape(), "[experts]"));
    };
    call.contiguous("counts", counts)?;
    call.contiguous("topk_ids", topk_ids)?;
    call.value(experts <= MAX_EXPERTS, "counts", format!("at most {MAX_EXPERTS} experts"), experts)?;
    let n = call.count("topk_ids", topk_ids.len())?;
    let args = HistogramArgs {
        counts: call.write("counts", counts)?.cast(),
        ids: call.read("topk_ids", topk_ids)?.cast(),
        n,
        experts: experts as u32,
    };
    call.check_overlap()?;
    if n == 0 || experts == 0 {
        return Ok(());
    }
    // SAFETY: shapes, device and overlap were checked above.
    unsafe { launch_histogram(stream, &args) }
}

/// Loads of experts, `[experts]`, contiguous and not negative: of one batch ([`statistics`](super::statistics()),
/// [`SortOutput::expert_counts`](super::SortOutput::expert_counts)) or of several ([`histogram`]).
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Loads<'a> {
    /// In 32 bits, as the operations on a batch count them.
    I32(&'a Tensor<i32>),
    /// In 64 bits, as sums of many batches.
    I64(&'a Tensor<i64>),
}

impl<'a> From<&'a Tensor<i32>> for Loads<'a> {
    fn from(tensor: &'a Tensor<i32>) -> Self {
        Self::I32(tensor)
    }
}
impl<'a> From<&'a Tensor<i64>> for Loads<'a> {
    fn from(tensor: &'a Tensor<i64>) -> Self {
        Self::I64(tensor)
    }
}

impl Loads<'_> {
    /// Checks them and returns their address.
    fn read(self, call: &mut Call<'_>, experts: usize) -> Result<*const c_void> {
        match self {
            Self::I32(t) => {
                call.same_shape("loads", t.shape(), &[experts])?;
                call.contiguous("loads", t)?;
                call.read("loads", t)
            }
            Self::I64(t) => {
                call.same_shape("loads", t.shape(), &[experts])?;
                call.contiguous("loads", t)?;
                call.read("loads", t)
            }
        }
    }
}

/// Moves the bias of each expert towards balance: `bias += rate · sign(mean load - load)`.
///
/// `bias` (`[experts]`, contiguous) is what [`GateOptions::bias`](super::GateOptions::bias) adds to the scores when it chooses;
/// DeepSeek-V3 was trained with a rate of 0.001. Loads are compared with their mean exactly, if neither their sum nor one of them times the
/// number of experts is beyond 2^63 - 1; an expert that has just the mean keeps its bias.
///
/// # Errors
/// [`Shape`](crate::Error::Shape), [`Stride`](crate::Error::Stride), [`Value`](crate::Error::Value),
/// [`Overlap`](crate::Error::Overlap), [`WrongDevice`](crate::Error::WrongDevice).
///
/// ```
/// use warploom::{Device, Stream, Tensor, moe};
/// let device = Device::simt();
/// let stream = Stream::new(&device)?;
/// let loads = Tensor::from_slice(&device, &[4, 1, 1, 2], &[4])?; // 2 on average
/// let mut bias = Tensor::from_slice(&device, &[0.5f32, 0.0, 0.25, 0.0], &[4])?;
/// moe::update_bias(&stream, &mut bias, &loads, 0.125)?;
/// assert_eq!(bias.to_vec()?, [0.375, 0.125, 0.375, 0.0]);
/// # Ok::<(), warploom::Error>(())
/// ```
pub fn update_bias<'a>(stream: &Stream, bias: &mut Tensor<f32>, loads: impl Into<Loads<'a>>, rate: f32) -> Result<()> {
    let mut call = Call::new("moe::update_bias", stream);
    let loads = loads.into();
    let [experts] = *bias.shape() else {
        return Err(call.bad_shape("bias", bias.shape(), "[experts]"));
    };
    call.contiguous("bias", bias)?;
    call.value(rate.is_finite(), "rate", "a finite number", rate)?;
    let args = BiasArgs {
        bias: call.write("bias", bias)?.cast(),
        loads: loads.read(&mut call, experts)?.cast(),
        rate,
        experts: call.count("bias", experts)?,
        wide: matches!(loads, Loads::I64(_)) as u32,
    };
    call.check_overlap()?;
    if experts == 0 {
        return Ok(());
    }
    // SAFETY: shapes, device and overlap were checked above.
    unsafe { launch_update_bias(stream, &args) }
}
