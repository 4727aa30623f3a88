//! Noisy top-k gating: `softmax(KeepTopK(H, k))` with `H = logit + scale · normal · softplus(noise logit)`.
//!
//! Source: Shazeer et al., *Outrageously Large Neural Networks*, 2017, equations 3 to 5.

use crate::check::Call;
use crate::device::{Geometry, Stream};
use crate::error::{Error, Result};
use crate::kernels::moe::noisy_top_k as kernel;
use crate::tensor::Tensor;
use cuda_std::{DType, Element, Entry, Float};

pub use kernel::{Args, MAX_EXPERTS, MAX_TOP_K};

const OP: &str = "moe::noisy_top_k";

/// How to launch it.
pub const fn geometry(tokens: u32, experts: u32) -> Geometry {
    let experts = experts as usize;
    let shared = if experts > MAX_EXPERTS { u32::MAX } else { kernel::shared_bytes(experts) as u32 };
    Geometry::linear(tokens.div_ceil(kernel::WARPS as u32), 32 * kernel::WARPS as u32).dependent().shared_bytes(shared)
}

/// The entry for an element type, if there is one.
pub const fn entry(dtype: DType) -> Option<Entry<Args>> {
    Some(match dtype {
        DType::F32 => kernel::moe_noisy_top_k_f32::ENTRY,
        DType::F16 => kernel::moe_noisy_top_k_f16::ENTRY,
        DType::Bf16 => kernel::moe_noisy_top_k_bf16::ENTRY,
        _ => return None,
    })
}

/// Launches on raw pointers (layer L1).
///
/// # Errors
/// [`Error::Unsupported`] for an element type without an entry, and those of [`Stream::launch`].
///
/// # Safety
/// The pointers are device memory as [`noisy_top_k`](kernel::noisy_top_k) documents, until the launch is done; no output overlaps
/// another argument. `1 <= top_k <= experts`, `top_k <= MAX_TOP_K`, `experts <= MAX_EXPERTS`, and there are tokens.
pub unsafe fn launch(stream: &Stream, dtype: DType, args: &Args) -> Result<()> {
    let entry = entry(dtype).ok_or_else(|| Error::Unsupported {
        op: OP,
        what: format!("no kernel for {dtype}; there are f32, f16 and bf16"),
    })?;
    // SAFETY: forwarded to the caller.
    unsafe { stream.launch(&entry, &geometry(args.tokens, args.experts), args) }
}

/// Options of [`noisy_top_k`].
#[derive(Debug)]
#[non_exhaustive]
#[must_use]
pub struct NoisyTopKOptions<'a, T: Element> {
    /// `[tokens, experts]`, dense in its last dimension: the softplus of these is the standard deviation of the noise. Without
    /// them it is 1.
    pub noise_logits: Option<&'a Tensor<T>>,
    /// Times this. 0 for no noise, as at inference.
    pub scale: f32,
    /// Key of the random numbers.
    pub seed: u64,
    /// Row `t` draws from the sequence `subsequence + t`.
    pub subsequence: u64,
    /// Blocks of four numbers to skip in every sequence. A call uses `experts / 4` blocks, rounded up.
    pub offset: u64,
}

impl<T: Element> Clone for NoisyTopKOptions<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T: Element> Copy for NoisyTopKOptions<'_, T> {}

impl<T: Element> Default for NoisyTopKOptions<'_, T> {
    fn default() -> Self {
        Self { noise_logits: None, scale: 1.0, seed: 0, subsequence: 0, offset: 0 }
    }
}

impl<'a, T: Element> NoisyTopKOptions<'a, T> {
    /// With a standard deviation for each logit.
    pub const fn noise_logits(mut self, noise_logits: &'a Tensor<T>) -> Self {
        self.noise_logits = Some(noise_logits);
        self
    }

    /// With noise of this size.
    pub const fn scale(mut self, scale: f32) -> Self {
        self.scale = scale;
        self
    }

    /// With these random numbers.
    pub const fn random(mut self, seed: u64, subsequence: u64, offset: u64) -> Self {
        (self.seed, self.subsequence, self.offset) = (seed, subsequence, offset);
        self
    }
}

/// Chooses the `top_k` experts with the largest noisy logits, and gives them the softmax over the chosen as weights.
///
/// `topk_ids` and `topk_weights`: `[tokens, top_k]`, best first, contiguous; `noisy`: `[tokens, experts]`, contiguous: the noisy logits `H`, for
/// what training derives from them; `logits`: `[tokens, experts]`, dense in its last dimension. `top_k` from 1 to 32, at most 2048
/// experts. Ties go to the lower index; NaN ranks last and has weight 0.
///
/// The normally distributed number of expert `e` and row `t` is number `e % 4` of the four that belong to block
/// `offset + e / 4` of Philox4x32-10's sequence (seed, `subsequence + t`): with its words `x, y, z, w` they are `r sin a, r cos a` of
/// `(x, y)`, then of `(z, w)`, where `r = sqrt(-2 ln((x + 1/2) / 2³²))` and `a = 2π (y + 1/2) / 2³²`. So a call can be repeated, and a
/// batch can be split if `subsequence` follows.
///
/// # Errors
/// [`Shape`](Error::Shape), [`Stride`](Error::Stride), [`Value`](Error::Value), [`DType`](Error::DType),
/// [`Overlap`](Error::Overlap), [`WrongDevice`](Error::WrongDevice).
///
/// ```
/// use warploom::{Device, Stream, Tensor, moe};
/// let device = Device::simt();
/// let stream = Stream::new(&device)?;
/// let logits = Tensor::from_slice(&device, &[0.0f32, 2.0, 1.0, 2.0], &[1, 4])?;
/// let mut weights = Tensor::zeros(&device, &[1, 2])?;
/// let mut ids = Tensor::zeros(&device, &[1, 2])?;
/// let options = moe::NoisyTopKOptions::default().scale(0.0);
/// moe::noisy_top_k(&stream, &mut ids, &mut weights, None, &logits, &options)?;
/// assert_eq!(ids.to_vec()?, [1, 3]);
/// assert_eq!(weights.to_vec()?, [0.5, 0.5]);
/// # Ok::<(), warploom::Error>(())
/// ```
pub fn noisy_top_k<T: Float>(
    stream: &Stream,
    topk_ids: &mut Tensor<i32>,
    topk_weights: &mut Tensor<f32>,
    noisy: Option<&mut Tensor<f32>>,
    logits: &Tensor<T>,
    options: &NoisyTopKOptions<'_, T>,
) -> Result<()> {
    let mut call = Call::new(OP, stream);
    let [tokens, experts] = *logits.shape() else {
        return Err(call.bad_shape("logits", logits.shape(), "[tokens, experts]"));
    };
    let [_, top_k] = *topk_ids.shape() else {
        return Err(call.bad_shape("topk_ids", topk_ids.shape(), "[tokens, top_k]"));
    };
    call.float("logits", T::DTYPE)?;
    call.same_shape("topk_ids", topk_ids.shape(), &[tokens, top_k])?;
    call.same_shape("topk_weights", topk_weights.shape(), &[tokens, top_k])?;
    call.contiguous("topk_ids", topk_ids)?;
    call.contiguous("topk_weights", topk_weights)?;
    call.value((1..=MAX_EXPERTS).contains(&experts), "logits", format!("from 1 to {MAX_EXPERTS} experts"), experts)?;
    let most = experts.min(MAX_TOP_K);
    call.value((1..=most).contains(&top_k), "topk_ids", format!("from 1 to {most} experts a token"), top_k)?;
    if let Some(noisy) = &noisy {
        call.same_shape("noisy", noisy.shape(), &[tokens, experts])?;
        call.contiguous("noisy", noisy)?;
    }
    let rows = call.rows("logits", logits)?;
    let noise_row = match options.noise_logits {
        Some(noise) => {
            call.same_shape("noise_logits", noise.shape(), &[tokens, experts])?;
            call.rows("noise_logits", noise)?.stride
        }
        None => 0,
    };
    let finite = options.scale.is_finite() && options.scale >= 0.0;
    call.value(finite, "scale", "a finite number that is not negative", options.scale)?;
    let args = Args {
        weights: call.write("topk_weights", topk_weights)?.cast(),
        ids: call.write("topk_ids", topk_ids)?.cast(),
        noisy: call.write_opt("noisy", noisy)?.cast(),
        logits: call.read("logits", logits)?,
        row: rows.stride,
        noise: call.read_opt("noise_logits", options.noise_logits)?,
        noise_row,
        seed: options.seed,
        sequence: options.subsequence,
        offset: options.offset,
        scale: options.scale,
        tokens: call.count("logits", tokens)?,
        experts: experts as u32,
        top_k: top_k as u32,
    };
    call.check_overlap()?;
    if tokens == 0 {
        return Ok(());
    }
    // SAFETY: shapes, device and overlap were checked above.
    unsafe { launch(stream, T::DTYPE, &args) }
}
