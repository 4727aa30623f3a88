//! What routing did: load and importance of each expert, and the losses that training adds to balance them.
//!
//! Sources: Shazeer et al., *Outrageously Large Neural Networks*, 2017; Fedus et al., *Switch Transformers*, 2021; Zoph et al.,
//! *ST-MoE*, 2022.

use crate::check::{Call, least, most, product};
use crate::device::{Geometry, Stream};
use crate::error::{Error, Result};
use crate::kernels::moe::statistics as kernel;
use crate::tensor::Tensor;
use cuda_std::{DType, Entry, Float};
use std::ffi::c_void;

pub use kernel::{FinishArgs, PartArgs};

const OP: &str = "moe::statistics";

/// Numbers of [`StatisticsOutput::summary`].
pub const SUMMARY: usize = kernel::SUMMARY;

/// What [`statistics`] writes; all contiguous.
#[derive(Debug)]
#[non_exhaustive]
#[must_use]
pub struct StatisticsOutput<'a> {
    /// `[5]`, see [`SUMMARY`]:
    /// 0. the coefficient of variation of the loads: their standard deviation (of the population) divided by their mean's magnitude, 0 where that is 0;
    /// 1. that of the importances;
    /// 2. its square, the importance loss of Shazeer et al. without its factor;
    /// 3. the load-balancing loss of Fedus et al. without its factor: `experts · Σ f · P` over the experts, `f` the share of
    ///    the pairs that an expert has and `P` its mean probability; 1 if all is even, at most the number of experts;
    /// 4. the router z-loss of Zoph et al. without its factor: the mean over tokens of `ln(Σ exp(logit))²`.
    ///
    /// Without pairs the first four are 0, without tokens all.
    pub summary: &'a mut Tensor<f32>,
    /// `[experts]`: pairs of each expert.
    pub loads: Option<&'a mut Tensor<i32>>,
    /// `[experts]`: sum of the weights of its pairs.
    pub importance: Option<&'a mut Tensor<f32>>,
    /// `[experts]`: mean over the tokens of the softmax of the logits.
    pub probabilities: Option<&'a mut Tensor<f32>>,
}

impl<'a> StatisticsOutput<'a> {
    /// The summary alone.
    pub const fn new(summary: &'a mut Tensor<f32>) -> Self {
        Self { summary, loads: None, importance: None, probabilities: None }
    }

    /// And the loads.
    pub const fn loads(mut self, loads: &'a mut Tensor<i32>) -> Self {
        self.loads = Some(loads);
        self
    }

    /// And the importances.
    pub const fn importance(mut self, importance: &'a mut Tensor<f32>) -> Self {
        self.importance = Some(importance);
        self
    }

    /// And the mean probabilities.
    pub const fn probabilities(mut self, probabilities: &'a mut Tensor<f32>) -> Self {
        self.probabilities = Some(probabilities);
        self
    }
}

/// A block for each of some hundred multiprocessors, unless there are very many tokens.
const BLOCKS: usize = 128;
/// The fewest tokens of a block: one for each warp.
const LEAST_EACH: usize = 8;

/// How many tokens a block takes, and how many blocks there are.
const fn split(tokens: usize) -> (usize, usize) {
    let each = least(most(tokens.div_ceil(BLOCKS), LEAST_EACH), kernel::MAX_EACH);
    (each, tokens.div_ceil(each))
}

/// Bytes of workspace for as many tokens, and for fewer; the largest number for more experts than [`statistics`] takes.
pub const fn workspace_bytes(tokens: usize, experts: usize) -> usize {
    if experts > kernel::MAX_EXPERTS {
        return usize::MAX;
    }
    // Blocks become more up to that number, and then take more tokens each, so that there may be fewer of them.
    let fewer = least(tokens.div_ceil(LEAST_EACH), BLOCKS);
    product(&[most(split(tokens).1, fewer), kernel::columns(experts), 4])
}

/// How to launch `moe_statistics_part_*`, for at most 2^32 - 1 tokens.
pub const fn part_geometry(tokens: usize) -> Geometry {
    Geometry::linear(split(least(tokens, u32::MAX as usize)).1 as u32, kernel::THREADS as u32)
        .shared_bytes(kernel::part_shared_bytes() as u32)
        .dependent()
}

/// How to launch `moe_statistics_finish`. For more than 2048 experts no launch takes it.
pub const fn finish_geometry(experts: usize) -> Geometry {
    let shared = if experts > kernel::MAX_EXPERTS { u32::MAX } else { kernel::finish_shared_bytes(experts) as u32 };
    Geometry::linear(1, kernel::FINISH_THREADS as u32).shared_bytes(shared).dependent()
}

/// The entry of the first kernel for an element type, if there is one.
pub const fn part_entry(dtype: DType) -> Option<Entry<PartArgs>> {
    Some(match dtype {
        DType::F32 => kernel::moe_statistics_part_f32::ENTRY,
        DType::F16 => kernel::moe_statistics_part_f16::ENTRY,
        DType::Bf16 => kernel::moe_statistics_part_bf16::ENTRY,
        _ => return None,
    })
}

/// Launches on raw pointers (layer L1). `part.each` and `part.table` are set here, like `finish.rows` and `finish.table`.
///
/// # Errors
/// [`Error::Unsupported`] for an element type without an entry, and those of [`Stream::launch`].
///
/// # Safety
/// The pointers are device memory as [`statistics_part`](kernel::statistics_part) and
/// [`statistics_finish`](kernel::statistics_finish) document, until the launches are done; `workspace` has
/// [`workspace_bytes`], aligned to 4. No output overlaps another argument. There are experts, as many in both.
pub unsafe fn launch(
    stream: &Stream,
    dtype: DType,
    part: &PartArgs,
    finish: &FinishArgs,
    workspace: *mut c_void,
) -> Result<()> {
    let entry = part_entry(dtype).ok_or_else(|| Error::Unsupported {
        op: OP,
        what: format!("no kernel for {dtype}; there are f32, f16 and bf16"),
    })?;
    let (each, rows) = split(part.tokens as usize);
    let part = PartArgs { table: workspace.cast(), each: each as u32, ..*part };
    let finish = FinishArgs { table: workspace.cast_const().cast(), rows: rows as u32, ..*finish };
    let last = finish_geometry(part.experts as usize);
    if rows == 0 {
        // SAFETY: forwarded to the caller.
        return unsafe { stream.launch(&kernel::moe_statistics_finish::ENTRY, &last, &finish) };
    }
    // SAFETY: forwarded to the caller.
    unsafe {
        stream.launch(&entry, &part_geometry(part.tokens as usize), &part)?;
        stream.launch(&kernel::moe_statistics_finish::ENTRY, &last, &finish)
    }
}

/// Load and importance of each expert, and what losses are made of; see [`StatisticsOutput`].
///
/// `logits`: `[tokens, experts]`, dense in its last dimension, before any softmax; `topk_ids` and `topk_weights`: `[tokens, top_k]`,
/// contiguous, as [`moe::gate`](super::gate()) gives them; ids of -1 and out of range count nowhere. `workspace` has
/// [`workspace_bytes`]. Sums are in f32 in one order, whatever the timing. A NaN or +inf among the logits of a token, or no
/// finite one, makes probabilities and the losses of them NaN, and weights whose sum is beyond f32 make the variation of importance NaN. A z-loss is infinite where the sum of the squares is beyond f32, which their mean need not be. At most 2048 experts.
///
/// # Errors
/// [`Shape`](Error::Shape), [`Stride`](Error::Stride), [`Value`](Error::Value), [`DType`](Error::DType),
/// [`Alignment`](Error::Alignment), [`Overlap`](Error::Overlap), [`WrongDevice`](Error::WrongDevice).
///
/// ```
/// use warploom::{Device, Stream, Tensor, moe};
/// let device = Device::simt();
/// let stream = Stream::new(&device)?;
/// // Three tokens choose one of two experts each; the router finds both equally likely.
/// let logits = Tensor::from_slice(&device, &[0.0f32; 6], &[3, 2])?;
/// let ids = Tensor::from_slice(&device, &[0, 1, 0], &[3, 1])?;
/// let weights = Tensor::from_slice(&device, &[0.5f32, 1.0, 0.5], &[3, 1])?;
/// let mut summary = Tensor::zeros(&device, &[5])?;
/// let mut loads = Tensor::zeros(&device, &[2])?;
/// let mut workspace = Tensor::zeros(&device, &[moe::statistics::workspace_bytes(3, 2)])?;
/// let mut out = moe::StatisticsOutput::new(&mut summary).loads(&mut loads);
/// moe::statistics(&stream, &mut out, &logits, &ids, &weights, &mut workspace)?;
/// assert_eq!(loads.to_vec()?, [2, 1]);
/// let summary = summary.to_vec()?;
/// assert!((summary[0] - 1.0 / 3.0).abs() < 1e-6); // 1.5 on average, 0.5 from it
/// assert_eq!(summary[2], 0.0); // equally important
/// assert!((summary[3] - 1.0).abs() < 1e-6);
/// # Ok::<(), warploom::Error>(())
/// ```
pub fn statistics<T: Float>(
    stream: &Stream,
    out: &mut StatisticsOutput<'_>,
    logits: &Tensor<T>,
    topk_ids: &Tensor<i32>,
    topk_weights: &Tensor<f32>,
    workspace: &mut Tensor<u8>,
) -> Result<()> {
    let mut call = Call::new(OP, stream);
    let [tokens, experts] = *logits.shape() else {
        return Err(call.bad_shape("logits", logits.shape(), "[tokens, experts]"));
    };
    let [_, top_k] = *topk_ids.shape() else {
        return Err(call.bad_shape("topk_ids", topk_ids.shape(), "[tokens, top_k]"));
    };
    call.float("logits", T::DTYPE)?;
    let experts_fit = (1..=kernel::MAX_EXPERTS).contains(&experts);
    call.value(experts_fit, "logits", format!("from 1 to {} experts", kernel::MAX_EXPERTS), experts)?;
    let rows = call.rows("logits", logits)?;
    call.same_shape("topk_ids", topk_ids.shape(), &[tokens, top_k])?;
    call.contiguous("topk_ids", topk_ids)?;
    call.same_shape("topk_weights", topk_weights.shape(), &[tokens, top_k])?;
    call.contiguous("topk_weights", topk_weights)?;
    call.same_shape("out.summary", out.summary.shape(), &[SUMMARY])?;
    call.contiguous("out.summary", out.summary)?;
    if let Some(loads) = &out.loads {
        call.same_shape("out.loads", loads.shape(), &[experts])?;
        call.contiguous("out.loads", loads)?;
    }
    for (arg, tensor) in [("out.importance", &out.importance), ("out.probabilities", &out.probabilities)] {
        if let Some(t) = tensor {
            call.same_shape(arg, t.shape(), &[experts])?;
            call.contiguous(arg, t)?;
        }
    }
    // Loads are counted in 32 bits.
    call.count("topk_ids", tokens.saturating_mul(top_k))?;
    let needed = workspace_bytes(tokens, experts);
    call.contiguous("workspace", workspace)?;
    call.value(workspace.len() >= needed, "workspace", format!("at least {needed} bytes"), workspace.len())?;
    let part = PartArgs {
        table: std::ptr::null_mut(),
        logits: call.read("logits", logits)?,
        row: rows.stride,
        topk_ids: call.read("topk_ids", topk_ids)?.cast(),
        topk_weights: call.read("topk_weights", topk_weights)?.cast(),
        tokens: call.count("logits", tokens)?,
        top_k: call.count("topk_ids", top_k)?,
        experts: experts as u32,
        each: 0,
    };
    let finish = FinishArgs {
        loads: call.write_opt("out.loads", out.loads.as_deref_mut())?.cast(),
        importance: call.write_opt("out.importance", out.importance.as_deref_mut())?.cast(),
        probabilities: call.write_opt("out.probabilities", out.probabilities.as_deref_mut())?.cast(),
        summary: call.write("out.summary", out.summary)?.cast(),
        table: std::ptr::null(),
        rows: 0,
        tokens: part.tokens,
        experts: part.experts,
    };
    let workspace = call.write("workspace", workspace)?;
    call.check_overlap()?;
    if needed > 0 && !(workspace as usize).is_multiple_of(4) {
        return Err(Error::Alignment { op: OP, arg: "workspace", expected: 4, address: workspace as usize });
    }
    // SAFETY: shapes, device, alignment and overlap were checked above.
    unsafe { launch(stream, T::DTYPE, &part, &finish, workspace) }
}
