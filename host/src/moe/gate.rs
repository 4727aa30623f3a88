//! The gate of a mixture of experts: from router logits to experts and weights.
//!
//! For each token, with its logits `x[0 .. experts]`:
//!
//! 1. *Score*: `s[e] = f(x[e])` by one of three [functions](Scoring), in f32 whatever the logits' type.
//! 2. *Bias*: `b[e] = s[e] + bias[e]`. It has a say in what is chosen, not in the weights.
//! 3. *Groups*: experts `g n .. (g + 1) n` are group `g`, which is worth the sum of its two largest `b` (of its only one
//!    if `n` is 1). The `topk_group` groups worth most stay, the experts of the others are out.
//! 4. *Choice*: the `top_k` experts with the largest `b`, in descending order.
//! 5. *Weights*: `w[r] = s[expert of rank r]`, divided by their sum with [`renormalize`](GateOptions::renormalize), and
//!    multiplied by the [routed scaling factor](GateOptions::routed_scaling_factor) if that
//!    [applies to the output](GateOptions::scale_output).
//! 6. *Shared experts* take the places behind: `experts`, `experts + 1`, …, each with a weight that is 1 once the routed
//!    scaling factor has been applied: 1 if it is applied here, `1 / routed_scaling_factor` if the caller does it later.
//!
//! Ties go to the lower expert and the lower group. A NaN ranks as -inf, and its weight, if it must be chosen because
//! there is nothing better, is 0 (its score's, where only its bias is NaN). (A logit of -inf has a score of 0, which ranks above that.) So is everything in a row whose scores sum up to 0, such as one of -inf only or of NaN only:
//! the lowest experts, if there is no bias, with weights 0. Exponentials below 2^-126.5 count as 0 (of the softplus below 2^-126). The root of the softplus of +inf is that of
//! the largest number; several +inf in a softmax share it evenly. A token's result depends on its logits only.
//!
//! *Padding*: a row that is not below `valid_rows`, or whose mask is 0, gets id -1 and weight 0 everywhere.
//!
//! Sources: sigmoid with bias and groups, DeepSeek-AI, *DeepSeek-V3 Technical Report*, 2024, section 2.1.2; softmax
//! gates, Shazeer et al., *Outrageously Large Neural Networks*, 2017.

use crate::check::Call;
use crate::device::{Geometry, Stream};
use crate::error::{Error, Result};
use crate::kernels::moe::gate as kernel;
use crate::tensor::Tensor;
use cuda_std::{DType, Entry, Float};
use half::{bf16, f16};
use std::ffi::c_void;

pub use kernel::Args;

const OP: &str = "moe::gate";

/// How a logit becomes a score.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Scoring {
    /// `1 / (1 + e^-x)`, as in DeepSeek-V3.
    #[default]
    Sigmoid,
    /// `e^x` divided by the sum of it over all experts, as in Mixtral and Qwen3.
    Softmax,
    /// `sqrt(ln(1 + e^x))`.
    SqrtSoftplus,
}

impl Scoring {
    /// The value of [`Args::scoring`].
    pub const fn code(self) -> u32 {
        match self {
            Self::Sigmoid => kernel::SIGMOID,
            Self::Softmax => kernel::SOFTMAX,
            Self::SqrtSoftplus => kernel::SQRT_SOFTPLUS,
        }
    }
}

/// A correction bias, `[experts]`, of any of the types that logits may have, whichever they have.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Bias<'a> {
    /// In single precision.
    F32(&'a Tensor<f32>),
    /// In half precision.
    F16(&'a Tensor<f16>),
    /// As brain floats.
    Bf16(&'a Tensor<bf16>),
}

impl<'a> From<&'a Tensor<f32>> for Bias<'a> {
    fn from(tensor: &'a Tensor<f32>) -> Self {
        Self::F32(tensor)
    }
}
impl<'a> From<&'a Tensor<f16>> for Bias<'a> {
    fn from(tensor: &'a Tensor<f16>) -> Self {
        Self::F16(tensor)
    }
}
impl<'a> From<&'a Tensor<bf16>> for Bias<'a> {
    fn from(tensor: &'a Tensor<bf16>) -> Self {
        Self::Bf16(tensor)
    }
}

impl Bias<'_> {
    /// The type of its elements.
    pub fn dtype(&self) -> DType {
        match self {
            Self::F32(_) => DType::F32,
            Self::F16(_) => DType::F16,
            Self::Bf16(_) => DType::Bf16,
        }
    }

    /// Checks it and returns its address.
    fn read(&self, call: &mut Call<'_>, experts: usize) -> Result<*const c_void> {
        fn one<B: Float>(call: &mut Call<'_>, bias: &Tensor<B>, experts: usize) -> Result<*const c_void> {
            call.same_shape("bias", bias.shape(), &[experts])?;
            call.contiguous("bias", bias)?;
            call.read("bias", bias)
        }
        match self {
            Self::F32(t) => one(call, t, experts),
            Self::F16(t) => one(call, t, experts),
            Self::Bf16(t) => one(call, t, experts),
        }
    }
}

/// The value of [`Args::bias_type`] for an element type, if there may be a bias of it.
pub const fn bias_code(dtype: DType) -> Option<u32> {
    Some(match dtype {
        DType::F32 => kernel::BIAS_F32,
        DType::F16 => kernel::BIAS_F16,
        DType::Bf16 => kernel::BIAS_BF16,
        _ => return None,
    })
}

/// What [`gate`] does beside choosing the best; the module's documentation says what each step means.
///
/// By default: sigmoid, no bias, no groups, weights divided by their sum, no scaling, no shared experts, no padding.
///
/// ```
/// use warploom::moe::{GateOptions, Scoring};
/// # use warploom::{Device, Tensor, bf16};
/// # let bias = Tensor::<f32>::zeros(&Device::simt(), &[256])?;
/// let deepseek_v3 = GateOptions::default().bias(&bias).groups(8, 4).routed_scaling_factor(2.5).scale_output(true);
/// let mixtral = GateOptions::default().scoring(Scoring::Softmax);
/// # let _ = (deepseek_v3, mixtral);
/// # Ok::<(), warploom::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
#[must_use]
pub struct GateOptions<'a> {
    /// How logits become scores.
    pub scoring: Scoring,
    /// What is added to the scores for the choice only: `[experts]`, contiguous.
    pub bias: Option<Bias<'a>>,
    /// How many groups the experts are cut into; divides their number.
    pub groups: usize,
    /// How many groups stay.
    pub topk_group: usize,
    /// Whether weights are divided by their sum.
    pub renormalize: bool,
    /// The factor of the routed experts' output; finite and positive.
    pub routed_scaling_factor: f32,
    /// Whether the weights of routed experts are multiplied by the routed scaling factor here; otherwise the caller does
    /// that to the output of the layer, and only the weights of shared experts know of it.
    pub scale_output: bool,
    /// How many shared experts follow the routed ones.
    pub shared_experts: usize,
    /// On the device, `[1]`: rows from this one on are padding. A negative number stands for 0.
    pub valid_rows: Option<&'a Tensor<i32>>,
    /// `[tokens]`, contiguous: rows with 0 are padding.
    pub row_mask: Option<&'a Tensor<u8>>,
    /// `[experts + shared_experts]`, contiguous: what is written instead of each expert's number, such as its place among
    /// physical experts. Padding stays -1.
    pub expert_map: Option<&'a Tensor<i32>>,
}

impl Default for GateOptions<'_> {
    fn default() -> Self {
        Self {
            scoring: Scoring::Sigmoid,
            bias: None,
            groups: 1,
            topk_group: 1,
            renormalize: true,
            routed_scaling_factor: 1.0,
            scale_output: false,
            shared_experts: 0,
            valid_rows: None,
            row_mask: None,
            expert_map: None,
        }
    }
}

impl<'a> GateOptions<'a> {
    /// Sets [`scoring`](Self::scoring).
    pub fn scoring(mut self, scoring: Scoring) -> Self {
        self.scoring = scoring;
        self
    }

    /// Sets [`bias`](Self::bias).
    pub fn bias(mut self, bias: impl Into<Bias<'a>>) -> Self {
        self.bias = Some(bias.into());
        self
    }

    /// Sets [`groups`](Self::groups) and [`topk_group`](Self::topk_group).
    pub fn groups(mut self, groups: usize, topk_group: usize) -> Self {
        (self.groups, self.topk_group) = (groups, topk_group);
        self
    }

    /// Sets [`renormalize`](Self::renormalize).
    pub fn renormalize(mut self, renormalize: bool) -> Self {
        self.renormalize = renormalize;
        self
    }

    /// Sets [`routed_scaling_factor`](Self::routed_scaling_factor).
    pub fn routed_scaling_factor(mut self, factor: f32) -> Self {
        self.routed_scaling_factor = factor;
        self
    }

    /// Sets [`scale_output`](Self::scale_output).
    pub fn scale_output(mut self, scale_output: bool) -> Self {
        self.scale_output = scale_output;
        self
    }

    /// Sets [`shared_experts`](Self::shared_experts).
    pub fn shared_experts(mut self, shared_experts: usize) -> Self {
        self.shared_experts = shared_experts;
        self
    }

    /// Sets [`valid_rows`](Self::valid_rows).
    pub fn valid_rows(mut self, valid_rows: &'a Tensor<i32>) -> Self {
        self.valid_rows = Some(valid_rows);
        self
    }

    /// Sets [`row_mask`](Self::row_mask).
    pub fn row_mask(mut self, row_mask: &'a Tensor<u8>) -> Self {
        self.row_mask = Some(row_mask);
        self
    }

    /// Sets [`expert_map`](Self::expert_map).
    pub fn expert_map(mut self, expert_map: &'a Tensor<i32>) -> Self {
        self.expert_map = Some(expert_map);
        self
    }

    /// What the weights of routed experts are multiplied by: the value of [`Args::routed_scale`].
    pub fn routed_scale(&self) -> f32 {
        if self.scale_output { self.routed_scaling_factor } else { 1.0 }
    }

    /// The weight of shared experts: the value of [`Args::shared_weight`].
    pub fn shared_weight(&self) -> f32 {
        if self.scale_output { 1.0 } else { 1.0 / self.routed_scaling_factor }
    }
}

/// The kernel with everything in registers for so many experts and groups, if there is one: for up to 8 experts a token
/// (10 of 512), and logits, rows and bias aligned to [`fixed_alignment`].
pub const fn fixed_entry(dtype: DType, experts: u32, groups: u32) -> Option<Entry<Args>> {
    macro_rules! by_type {
        ($f32:ident, $f16:ident, $bf16:ident) => {
            match dtype {
                DType::F32 => kernel::$f32::ENTRY,
                DType::F16 => kernel::$f16::ENTRY,
                DType::Bf16 => kernel::$bf16::ENTRY,
                _ => return None,
            }
        };
    }
    Some(match (experts, groups) {
        (256, 8) => {
            by_type!(gate_256_experts_8_groups_f32, gate_256_experts_8_groups_f16, gate_256_experts_8_groups_bf16)
        }
        (256, 1) => {
            by_type!(gate_256_experts_1_groups_f32, gate_256_experts_1_groups_f16, gate_256_experts_1_groups_bf16)
        }
        (128, 4) => {
            by_type!(gate_128_experts_4_groups_f32, gate_128_experts_4_groups_f16, gate_128_experts_4_groups_bf16)
        }
        (128, 8) => {
            by_type!(gate_128_experts_8_groups_f32, gate_128_experts_8_groups_f16, gate_128_experts_8_groups_bf16)
        }
        (128, 1) => {
            by_type!(gate_128_experts_1_groups_f32, gate_128_experts_1_groups_f16, gate_128_experts_1_groups_bf16)
        }
        (384, 1) => {
            by_type!(gate_384_experts_1_groups_f32, gate_384_experts_1_groups_f16, gate_384_experts_1_groups_bf16)
        }
        (512, 1) => {
            by_type!(gate_512_experts_1_groups_f32, gate_512_experts_1_groups_f16, gate_512_experts_1_groups_bf16)
        }
        (64, 8) => by_type!(gate_64_experts_8_groups_f32, gate_64_experts_8_groups_f16, gate_64_experts_8_groups_bf16),
        (64, 1) => by_type!(gate_64_experts_1_groups_f32, gate_64_experts_1_groups_f16, gate_64_experts_1_groups_bf16),
        _ => return None,
    })
}

/// The kernel for up to 1024 experts, any groups and any alignment.
pub const fn dynamic_entry(dtype: DType) -> Option<Entry<Args>> {
    Some(match dtype {
        DType::F32 => kernel::gate_dynamic_f32::ENTRY,
        DType::F16 => kernel::gate_dynamic_f16::ENTRY,
        DType::Bf16 => kernel::gate_dynamic_bf16::ENTRY,
        _ => return None,
    })
}

/// What logits, the distance between their rows, and a bias of this type must be aligned to for a
/// [`fixed_entry`], in bytes.
pub const fn fixed_alignment(experts: u32, dtype: DType) -> usize {
    kernel::fixed_alignment(experts, dtype.size() as u32) as usize
}

/// How to launch for so many tokens, a warp each. Few tokens are spread over the multiprocessors.
pub const fn geometry(fixed: bool, tokens: u32, experts: u32) -> Geometry {
    let warps = match tokens {
        0..=256 => 1,
        257..=1024 => 4,
        _ if fixed => 8,
        _ => 4,
    };
    let shared = if fixed { 0 } else { kernel::dynamic_shared_bytes(experts).saturating_mul(warps) };
    Geometry::linear(tokens.div_ceil(warps), warps * 32).shared_bytes(shared).dependent()
}

/// Launches on raw pointers (layer L1), with the kernel that suits `args`.
///
/// # Errors
/// [`Error::Unsupported`] for logits that are not f32, f16 or bf16, and those of [`Stream::launch`].
///
/// # Safety
/// The pointers are device memory as [`Args`] says, aligned to their element type, until the launch is done, and outputs
/// overlap nothing else. There are at most 1024 experts; `groups` divides `experts`; `1 <= topk_group <= groups`; `1 <= topk <= 32`, and `topk` is at
/// most the number of experts in `topk_group` groups.
pub unsafe fn launch(stream: &Stream, dtype: DType, args: &Args) -> Result<()> {
    let aligned = |address: usize, dtype| address.is_multiple_of(fixed_alignment(args.experts, dtype));
    let row_bytes = args.row_stride as usize * dtype.size();
    let bias_type = match args.bias_type {
        kernel::BIAS_F32 => DType::F32,
        kernel::BIAS_F16 => DType::F16,
        _ => DType::Bf16,
    };
    let fixed = fixed_entry(dtype, args.experts, args.groups).filter(|_| {
        args.topk <= kernel::fixed_topk(args.experts)
            && aligned(args.logits as usize, dtype)
            && (args.tokens <= 1 || aligned(row_bytes, dtype))
            && aligned(args.bias as usize, bias_type)
    });
    let entry = fixed.or(dynamic_entry(dtype)).ok_or_else(|| Error::Unsupported {
        op: OP,
        what: format!("no kernel for {dtype} logits; there are f32, f16 and bf16"),
    })?;
    let geometry = geometry(fixed.is_some(), args.tokens, args.experts);
    // SAFETY: forwarded to the caller.
    unsafe { stream.launch(&entry, &geometry, args) }
}

/// Chooses `top_k` experts for each token, and weighs them.
///
/// `logits` is `[tokens, experts]` of f32, f16 or bf16, with dense rows at any distance of at least `experts`. `topk_ids` and `topk_weights` are
/// `[tokens, top_k + shared_experts]`, contiguous. `packed`, of the same shape, gets both in one word, as kernels that
/// sort tokens by expert take them: the lower 16 bits of the id in the upper half, the weight as bf16 in the lower half.
///
/// Up to 1024 experts and 32 of them a token. See the [module](mod@self) for what is computed.
///
/// ```
/// use warploom::moe::{GateOptions, gate};
/// use warploom::{Device, Stream, Tensor};
///
/// let device = Device::auto()?;
/// let stream = Stream::new(&device)?;
/// // One token, four experts in two groups, of which one group stays.
/// let logits = Tensor::from_slice(&device, &[3.0f32, -2.0, 1.0, 1.0], &[1, 4])?;
/// let mut weights = Tensor::zeros(&device, &[1, 2])?;
/// let mut ids = Tensor::zeros(&device, &[1, 2])?;
/// gate(&stream, &mut ids, &mut weights, None, &logits, 2, &GateOptions::default().groups(2, 1))?;
/// assert_eq!(ids.to_vec()?, [2, 3]); // together worth more than the best one and the worst one
/// assert_eq!(weights.to_vec()?, [0.5, 0.5]);
/// # Ok::<(), warploom::Error>(())
/// ```
///
/// # Errors
/// Before anything is launched: [`Shape`](Error::Shape), [`Stride`](Error::Stride), [`Overlap`](Error::Overlap),
/// [`WrongDevice`](Error::WrongDevice) for the tensors; [`Value`](Error::Value) for experts beyond 1024 or not divisible
/// by `groups`, `topk_group` outside `1 ..= groups`, `top_k` outside `1 ..= 32` or above the number of experts that the
/// kept groups hold, a routed scaling factor that is not finite and positive, or whose reciprocal is not, more shared experts than a launch takes; [`DType`](Error::DType) for 8-bit logits.
pub fn gate<T: Float>(
    stream: &Stream,
    topk_ids: &mut Tensor<i32>,
    topk_weights: &mut Tensor<f32>,
    packed: Option<&mut Tensor<u32>>,
    logits: &Tensor<T>,
    top_k: usize,
    options: &GateOptions<'_>,
) -> Result<()> {
    let mut call = Call::new(OP, stream);
    call.float("logits", T::DTYPE)?;
    let &[tokens, experts] = logits.shape() else {
        return Err(call.bad_shape("logits", logits.shape(), "[tokens, experts]"));
    };
    let rows = call.rows("logits", logits)?;
    let max_experts = kernel::MAX_EXPERTS as usize;
    call.value((1..=max_experts).contains(&experts), "logits", format_args!("1 to {max_experts} experts"), experts)?;
    let groups = options.groups;
    call.value(
        groups >= 1 && experts.is_multiple_of(groups),
        "groups",
        format_args!("a divisor of the {experts} experts"),
        groups,
    )?;
    let topk_group = options.topk_group;
    call.value((1..=groups).contains(&topk_group), "topk_group", format_args!("1 to {groups}"), topk_group)?;
    let kept = experts / groups * topk_group;
    let max_topk = kept.min(kernel::MAX_TOPK as usize);
    call.value(
        (1..=max_topk).contains(&top_k),
        "top_k",
        format_args!("1 to {max_topk}: at most {}, and the kept groups hold {kept} experts", kernel::MAX_TOPK),
        top_k,
    )?;
    let factor = options.routed_scaling_factor;
    let usable = factor > 0.0 && factor.is_finite() && factor.recip().is_finite();
    call.value(usable, "routed_scaling_factor", "positive and finite, and so its reciprocal", factor)?;
    let shared_experts = call.count("shared_experts", options.shared_experts)?;

    let slots = [tokens, top_k + options.shared_experts];
    let check_slots = |arg, shape: &[usize]| match options.shared_experts {
        0 => call.same_shape(arg, shape, &slots),
        _ if shape == slots => Ok(()),
        _ => Err(call.bad_shape(arg, shape, format_args!("{slots:?}, of `top_k` and the shared experts"))),
    };
    check_slots("topk_weights", topk_weights.shape())?;
    call.contiguous("topk_weights", topk_weights)?;
    check_slots("topk_ids", topk_ids.shape())?;
    call.contiguous("topk_ids", topk_ids)?;
    if let Some(packed) = &packed {
        check_slots("packed", packed.shape())?;
        call.contiguous("packed", packed)?;
    }
    if let Some(valid_rows) = options.valid_rows {
        call.same_shape("valid_rows", valid_rows.shape(), &[1])?;
    }
    if let Some(row_mask) = options.row_mask {
        call.same_shape("row_mask", row_mask.shape(), &[tokens])?;
        call.contiguous("row_mask", row_mask)?;
    }
    if let Some(expert_map) = options.expert_map {
        call.same_shape("expert_map", expert_map.shape(), &[experts + options.shared_experts])?;
        call.contiguous("expert_map", expert_map)?;
    }

    let args = Args {
        tokens: call.count("logits", tokens)?,
        experts: experts as u32,
        groups: groups as u32,
        topk_group: topk_group as u32,
        topk: top_k as u32,
        shared_experts,
        scoring: options.scoring.code(),
        renormalize: options.renormalize.into(),
        routed_scale: options.routed_scale(),
        shared_weight: options.shared_weight(),
        row_stride: rows.stride as u64,
        bias_type: options.bias.and_then(|b| bias_code(b.dtype())).unwrap_or(kernel::BIAS_F32),
        bias: options.bias.map_or(Ok(std::ptr::null()), |b| b.read(&mut call, experts))?.cast(),
        logits: call.read("logits", logits)?,
        valid_rows: call.read_opt("valid_rows", options.valid_rows)?.cast(),
        row_mask: call.read_opt("row_mask", options.row_mask)?.cast(),
        expert_map: call.read_opt("expert_map", options.expert_map)?.cast(),
        weights: call.write("topk_weights", topk_weights)?.cast(),
        ids: call.write("topk_ids", topk_ids)?.cast(),
        packed: call.write_opt("packed", packed)?.cast(),
    };
    call.check_overlap()?;
    // SAFETY: shapes, strides, device and overlap were checked above, tensors are aligned to their elements, and so were
    // the numbers that the kernel relies on.
    unsafe { launch(stream, T::DTYPE, &args) }
}
