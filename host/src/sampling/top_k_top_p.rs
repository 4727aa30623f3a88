//! Samples one token a row: mask, bias, penalties, temperature, min-p, top-k, top-p, draw.
//!
//! # What is computed
//!
//! For each row of logits, in this order:
//!
//! 1. Tokens whose bit in [`allowed`](SamplingOptions::allowed) is 0 are out. [`bias`](SamplingOptions::bias) is added.
//! 2. Tokens of the [`history`](SamplingOptions::history) are penalised: positive logits are divided by the repetition penalty and
//!    others multiplied by it; then `frequency * count + presence` is subtracted, of those generated.
//! 3. The rest are ranked: larger logits first, of equal ones the lower token. `weight = exp((x - max) / temperature)`.
//! 4. min-p keeps tokens of at least `min_p` times the largest weight.
//! 5. top-k keeps those whose rank is below `k`.
//! 6. top-p keeps the shortest prefix of what is left, in order of rank, that has at least `p` of *its* mass: the
//!    probabilities are renormalised after top-k, which FlashInfer calls `top_k_first`.
//! 7. With `u = x / 2^32`, where `x` is the 32-bit number `offset` of Philox4x32-10's sequence (seed, subsequence), as
//!    cuRAND has it, the token is the first in order of rank whose mass and that of all before it exceeds
//!    `u` times the mass that is kept.
//!
//! A temperature of 0 is greedy: the token of rank 0. Weights are integers of 39 binary places (fewer for vocabularies from
//! 2^24 on), so that sums do not depend on their order: the token is the same whatever the algorithm, the number of rows
//! beside it, and the device. Tokens of weight below 2^-39 of the largest count as 0: they are never drawn, and are among what the filters
//! drop. Below a temperature of 8.5e-39 that is all but the largest.
//!
//! NaN logits count as -inf: they have probability 0. Of several +inf each has the same probability and everything else
//! none, whatever the temperature. In a row without any logit above -inf the token is the lowest that is allowed, 0 if none is, and its
//! log-probabilities are -inf.
//!
//! Device arrays cannot be checked by the host, so every value there means something: a temperature that is negative or NaN
//! is greedy and +inf makes all weights equal (but for those below a logit of +inf, which are 0); a `top_k` below 1 or above the vocabulary is off; a `top_p` of at
//! least 1 or NaN is off, and not above 0 keeps the token of rank 0; a `min_p` that is not above 0 or NaN is off, and at
//! least 1 keeps what has the weight of the largest; a repetition penalty that is not positive and finite is off, as are
//! presence and frequency penalties that are not finite; history tokens outside of the vocabulary are skipped, and lengths
//! are cut off at the history's capacity.
//!
//! # Algorithms
//!
//! Up to 128 tokens kept, the best k are found in one pass over the logits: [`SamplingAlgorithm::Batched`] with a block a
//! row, [`SamplingAlgorithm::SplitK`] with several and a merge. Above that, or without top-k, [`SamplingAlgorithm::RadixCluster`] searches by
//! histograms of the logits' bits in one launch, or [`SamplingAlgorithm::Radix`] does so in several.
//!
//! Sources: Fan et al., *Hierarchical neural story generation*, 2018 (top-k); Holtzman et al., *The curious case of neural
//! text degeneration*, 2020 (top-p); Nguyen et al., *Turning up the heat*, 2024 (min-p); Keskar et al., *CTRL*, 2019
//! (repetition penalty); OpenAI's API (presence and frequency); Salmon et al., 2011 (Philox).

use crate::check::{Call, after, product};
use crate::device::{Device, Geometry, Stream};
use crate::error::{Error, Result};
use crate::kernels::sampling::{
    adjust, log_probs, part, radix, radix_cluster, radix_cluster_long, radix_cluster_short, row_sum,
    top_k_top_p as kernel,
};
use crate::tensor::Tensor;
use cuda_std::{DType, Element, Entry, Float};
use std::ffi::c_void;

pub use crate::kernels::sampling::job::{Job, PerRow as RawPerRow, RowState};
pub use crate::kernels::sampling::top_k::{CAPACITY, MAX_K, THREADS};
pub use adjust::Adjustments;

use crate::kernels::sampling::job::{HISTOGRAM_WORDS, HISTOGRAMS};
use crate::kernels::sampling::top_k::SHARED_BYTES;

const OP: &str = "top_k_top_p";

/// A parameter of all rows, or one of each.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum PerRow<'a, T: Element> {
    /// The same for all rows.
    All(T),
    /// `[rows]`, on the device: may be filled there, and changed between launches of a captured graph.
    Each(&'a Tensor<T>),
}

impl<T: Element> From<T> for PerRow<'_, T> {
    fn from(value: T) -> Self {
        Self::All(value)
    }
}
impl<'a, T: Element> From<&'a Tensor<T>> for PerRow<'a, T> {
    fn from(values: &'a Tensor<T>) -> Self {
        Self::Each(values)
    }
}

/// How to find what top-k and top-p keep. All give the same tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum SamplingAlgorithm {
    /// By the number of rows, the vocabulary and `k`.
    #[default]
    Auto,
    /// One block a row. Rows that keep more than 128 tokens go to `RadixCluster`.
    Batched,
    /// Several blocks a row, the last of which merges their lists. Rows that keep more than 128 tokens go to `RadixCluster`.
    SplitK {
        /// Blocks of a row: 1 to `1536 / max(k, n)`, of which `k` is the most that a row may keep (128 if that is unknown; rows that keep
        /// more do not count) and `n` is the number of top log-probabilities.
        splits: usize,
    },
    /// A search by histograms, for any number of tokens kept, in several launches.
    Radix,
    /// The same in one launch, by a cluster of blocks for each row. `Radix` where that is not to be had: on devices without
    /// clusters (those of compute capability 9.0 have them), and for rows of more than some 524,160 logits.
    RadixCluster,
}

/// What is optional about [`top_k_top_p`]; the default is to sample from the softmax of the logits with seed 0.
///
/// Random numbers are unsigned, so that no sign is lost on the way to the key:
///
/// ```compile_fail,E0277
/// # use warploom::sampling::SamplingOptions;
/// SamplingOptions::default().seed(-1i64) // `u64`, of all rows or of each
/// # ;
/// ```
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
#[must_use]
pub struct SamplingOptions<'a> {
    /// What the logits are divided by; 0 is greedy.
    pub temperature: PerRow<'a, f32>,
    /// How many of the most probable tokens are kept; all if `None`.
    pub top_k: Option<PerRow<'a, i32>>,
    /// The largest value of a `top_k` array, if it is known.
    pub max_top_k: Option<usize>,
    /// The probability that the kept tokens have together; 1 for all.
    pub top_p: PerRow<'a, f32>,
    /// How probable tokens are that are kept, compared with the most probable; 0 for all.
    pub min_p: PerRow<'a, f32>,
    /// Key of the random numbers.
    pub seed: PerRow<'a, u64>,
    /// Which number of its sequence a row takes.
    pub offset: PerRow<'a, u64>,
    /// The sequence of a row; the row's number if `None`.
    pub subsequence: Option<PerRow<'a, u64>>,
    /// Bits of the tokens that are allowed, `[words]` or `[rows, words]`.
    pub allowed: Option<&'a Tensor<u32>>,
    /// Is added to the logits, `[vocab]` or `[rows, vocab]`.
    pub bias: Option<&'a Tensor<f32>>,
    /// The tokens so far, `[rows, capacity]`, and how many each row has, `[rows]`.
    pub history: Option<(&'a Tensor<i32>, &'a Tensor<i32>)>,
    /// How many tokens of each row's history are its prompt, `[rows]`.
    pub prompt_lengths: Option<&'a Tensor<i32>>,
    /// Divides positive logits of the history's tokens and multiplies others; 1 for none.
    pub repetition_penalty: PerRow<'a, f32>,
    /// Is subtracted from logits of generated tokens.
    pub presence_penalty: PerRow<'a, f32>,
    /// Is subtracted from logits of generated tokens as often as they were generated.
    pub frequency_penalty: PerRow<'a, f32>,
    /// How it is done.
    pub algorithm: SamplingAlgorithm,
}

impl Default for SamplingOptions<'_> {
    fn default() -> Self {
        Self {
            temperature: PerRow::All(1.0),
            top_k: None,
            max_top_k: None,
            top_p: PerRow::All(1.0),
            min_p: PerRow::All(0.0),
            seed: PerRow::All(0),
            offset: PerRow::All(0),
            subsequence: None,
            allowed: None,
            bias: None,
            history: None,
            prompt_lengths: None,
            repetition_penalty: PerRow::All(1.0),
            presence_penalty: PerRow::All(0.0),
            frequency_penalty: PerRow::All(0.0),
            algorithm: SamplingAlgorithm::Auto,
        }
    }
}

impl<'a> SamplingOptions<'a> {
    /// Divides the logits; 0 is greedy. Default 1.
    pub fn temperature(mut self, temperature: impl Into<PerRow<'a, f32>>) -> Self {
        self.temperature = temperature.into();
        self
    }

    /// The most probable token always.
    pub fn greedy(self) -> Self {
        self.temperature(0.0)
    }

    /// Keeps the `k` most probable tokens, 1 up to the vocabulary. Default: all.
    pub fn top_k(mut self, k: impl Into<PerRow<'a, i32>>) -> Self {
        self.top_k = Some(k.into());
        self
    }

    /// Promises that no value of a `top_k` array is above `k`; those that are, or are off, mean `k`. With up to 128 that
    /// spares the launches for rows that keep more.
    pub fn max_top_k(mut self, k: usize) -> Self {
        self.max_top_k = Some(k);
        self
    }

    /// Keeps the most probable tokens that have this much of the probability together, in (0, 1]. Default 1.
    pub fn top_p(mut self, p: impl Into<PerRow<'a, f32>>) -> Self {
        self.top_p = p.into();
        self
    }

    /// Keeps tokens that are at least this probable compared with the most probable, in [0, 1]. Default 0.
    pub fn min_p(mut self, p: impl Into<PerRow<'a, f32>>) -> Self {
        self.min_p = p.into();
        self
    }

    /// Key of the random numbers. Default 0.
    pub fn seed(mut self, seed: impl Into<PerRow<'a, u64>>) -> Self {
        self.seed = seed.into();
        self
    }

    /// Which number of its sequence a row takes: usually the position of the token in its text. Default 0.
    pub fn offset(mut self, offset: impl Into<PerRow<'a, u64>>) -> Self {
        self.offset = offset.into();
        self
    }

    /// The sequence of a row. Default: the row's number, so that rows with one seed draw different numbers. A row with a seed
    /// of its own that should not depend on its place in the batch needs a subsequence of its own as well, such as
    /// `PerRow::All(0)`.
    pub fn subsequence(mut self, subsequence: impl Into<PerRow<'a, u64>>) -> Self {
        self.subsequence = Some(subsequence.into());
        self
    }

    /// Allows the tokens whose bits are 1: bit `i % 32` of word `i / 32` for token `i`. `[words]` for all rows or
    /// `[rows, words]`, with `words = vocab.div_ceil(32)`.
    pub fn allowed(mut self, bitmask: &'a Tensor<u32>) -> Self {
        self.allowed = Some(bitmask);
        self
    }

    /// Is added to the logits: `[vocab]` for all rows or `[rows, vocab]`.
    pub fn bias(mut self, bias: &'a Tensor<f32>) -> Self {
        self.bias = Some(bias);
        self
    }

    /// The tokens so far, `[rows, capacity]`, of which each row has `lengths`, `[rows]`: what penalties are about.
    pub fn history(mut self, tokens: &'a Tensor<i32>, lengths: &'a Tensor<i32>) -> Self {
        self.history = Some((tokens, lengths));
        self
    }

    /// How many tokens of each row's history are its prompt, `[rows]`; presence and frequency do not count those.
    pub fn prompt_lengths(mut self, lengths: &'a Tensor<i32>) -> Self {
        self.prompt_lengths = Some(lengths);
        self
    }

    /// Divides positive logits of the history's tokens and multiplies others; above 0. Default 1.
    pub fn repetition_penalty(mut self, penalty: impl Into<PerRow<'a, f32>>) -> Self {
        self.repetition_penalty = penalty.into();
        self
    }

    /// Is subtracted from logits of generated tokens. Default 0.
    pub fn presence_penalty(mut self, penalty: impl Into<PerRow<'a, f32>>) -> Self {
        self.presence_penalty = penalty.into();
        self
    }

    /// Is subtracted from logits of generated tokens as often as they were generated. Default 0.
    pub fn frequency_penalty(mut self, penalty: impl Into<PerRow<'a, f32>>) -> Self {
        self.frequency_penalty = penalty.into();
        self
    }

    /// How to do it. Default: [`SamplingAlgorithm::Auto`].
    pub fn algorithm(mut self, algorithm: SamplingAlgorithm) -> Self {
        self.algorithm = algorithm;
        self
    }

    fn adjusts(&self) -> bool {
        self.allowed.is_some() || self.bias.is_some() || self.history.is_some()
    }
}

/// A type of token numbers: `i32` or `u32`.
pub trait TokenId: Element + private::Sealed {}
impl TokenId for i32 {}
impl TokenId for u32 {}
mod private {
    pub trait Sealed {}
    impl Sealed for i32 {}
    impl Sealed for u32 {}
}

/// Log-probabilities: natural logarithms of softmax. Each may be left out.
///
/// *Before* is before the filters and after everything else: of the adjusted logits divided by the temperature, of all
/// tokens. It costs rows that keep up to 128 tokens one more pass over their logits (two where others of the call are searched by [`SamplingAlgorithm::Radix`]),
/// rows of that algorithm one, and those of [`SamplingAlgorithm::RadixCluster`] none. *After* is of what the filters kept, -inf for the rest (and for weights that
/// count as 0, see the [module](self)).
/// Greedy rows have a temperature of 1 here, and keep one token.
///
/// The top tokens are the most probable in order of rank; places beyond the last token above -inf hold -1 (as `u32`, its
/// largest value) and -inf.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct LogProbs<I: TokenId> {
    /// Of the sampled token: `[rows]`.
    pub before: Option<Tensor<f32>>,
    /// Of the sampled token: `[rows]`.
    pub after: Option<Tensor<f32>>,
    /// `[rows, n]`, `n` up to 128.
    pub top_tokens: Option<Tensor<I>>,
    /// Of `top_tokens`: `[rows, n]`.
    pub top_before: Option<Tensor<f32>>,
    /// Of `top_tokens`: `[rows, n]`.
    pub top_after: Option<Tensor<f32>>,
}

impl<I: TokenId> LogProbs<I> {
    /// Room for all of them, with `n` top tokens a row; for `n` of 0 without these.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub fn new(device: &Device, rows: usize, n: usize) -> Result<Self> {
        let all = Self {
            before: Some(Tensor::zeros(device, &[rows])?),
            after: Some(Tensor::zeros(device, &[rows])?),
            ..Self::none()
        };
        if n == 0 {
            return Ok(all);
        }
        Ok(Self {
            top_tokens: Some(Tensor::zeros(device, &[rows, n])?),
            top_before: Some(Tensor::zeros(device, &[rows, n])?),
            top_after: Some(Tensor::zeros(device, &[rows, n])?),
            ..all
        })
    }

    /// None of them.
    pub fn none() -> Self {
        Self { before: None, after: None, top_tokens: None, top_before: None, top_after: None }
    }
}

impl<I: TokenId> Default for LogProbs<I> {
    fn default() -> Self {
        Self::none()
    }
}

/// How the workspace of so many rows and tokens is laid out. All of it is zeros before its first use, and operations leave
/// zeros where they need them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Layout {
    /// The most rows.
    pub rows: usize,
    /// The largest vocabulary.
    pub vocab: usize,
    /// Whether there is room for adjusted logits: for `allowed`, `bias` and penalties.
    pub adjusted: bool,
}

impl Layout {
    /// Of up to `rows` rows of up to `vocab` tokens.
    pub const fn new(rows: usize, vocab: usize, adjusted: bool) -> Self {
        Self { rows, vocab, adjusted }
    }

    const TICKETS: usize = size_of::<u32>();
    const STATE: usize = size_of::<RowState>();
    const HISTOGRAMS: usize = HISTOGRAMS * HISTOGRAM_WORDS * size_of::<u64>();
    const LISTS: usize = CAPACITY as usize * size_of::<u64>();
    const BEST: usize = MAX_K as usize * size_of::<u64>();

    const fn chunk_counts(&self) -> usize {
        // Beyond what a workspace is made for, at least as many as there would be.
        let vocab = if self.vocab > MAX_VOCAB { u32::MAX } else { self.vocab as u32 };
        product(&[row_sum::chunks(vocab) as usize, size_of::<u32>()])
    }

    /// Elements of a row of adjusted logits.
    const fn adjusted_stride(&self) -> usize {
        match self.vocab.checked_next_multiple_of(8) {
            Some(stride) => stride,
            None => usize::MAX,
        }
    }

    /// Where part `i` starts; its last value is the size of all. The largest number if that is larger.
    const fn start(&self, i: usize) -> usize {
        let rows = [
            Self::STATE,
            Self::HISTOGRAMS,
            Self::LISTS,
            Self::BEST,
            Self::TICKETS,
            self.chunk_counts(),
            if self.adjusted { product(&[self.adjusted_stride(), size_of::<f32>()]) } else { 0 },
        ];
        let mut at = 0;
        let mut part = 0;
        while part < i {
            at = after(at, product(&[rows[part], self.rows]));
            part += 1;
        }
        at
    }

    /// Bytes of the workspace, which is aligned to 16; the largest number if there would be more.
    pub const fn bytes(&self) -> usize {
        self.start(7)
    }

    /// Sets the pointers of a job into the workspace at `base`; returns where adjusted logits go.
    pub fn place(&self, base: *mut c_void, job: &mut Job) -> *mut f32 {
        let at = |i| base.wrapping_byte_add(self.start(i));
        job.state = at(0).cast();
        job.histograms = at(1).cast();
        job.lists = at(2).cast();
        job.best = at(3).cast();
        job.tickets = at(4).cast();
        job.chunk_counts = at(5).cast();
        at(6).cast()
    }
}

/// Device memory that [`top_k_top_p`] needs beside its arguments. One call uses it at a time: calls on one stream may
/// share it, and so may a captured graph that is launched again and again.
#[derive(Debug)]
pub struct SamplingWorkspace {
    layout: Layout,
    memory: Tensor<u8>,
}

impl SamplingWorkspace {
    /// For up to `rows` rows of up to `vocab` tokens, without adjustments: about 79 KB a row.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`]; [`Error::Value`] for a vocabulary beyond 2^31 - 17, and for more than 2^31 - 1 rows.
    pub fn new(device: &Device, rows: usize, vocab: usize) -> Result<Self> {
        Self::with(device, Layout { rows, vocab, adjusted: false })
    }

    /// The same with room for adjusted logits, four bytes for each: for [`allowed`](SamplingOptions::allowed),
    /// [`bias`](SamplingOptions::bias) and [`history`](SamplingOptions::history).
    ///
    /// # Errors
    /// As for [`new`](Self::new).
    pub fn with_adjustments(device: &Device, rows: usize, vocab: usize) -> Result<Self> {
        Self::with(device, Layout { rows, vocab, adjusted: true })
    }

    fn with(device: &Device, layout: Layout) -> Result<Self> {
        // What a launch can have, and so few that nothing overflows.
        for (arg, value, most) in [("rows", layout.rows, i32::MAX as usize), ("vocab", layout.vocab, MAX_VOCAB)] {
            if value > most {
                let (expected, got) = (format!("at most {most}"), value.to_string());
                return Err(Error::Value { op: "SamplingWorkspace::new", arg, expected, got });
            }
        }
        Ok(Self { layout, memory: Tensor::zeros(device, &[layout.bytes()])? })
    }

    /// How it is laid out.
    pub fn layout(&self) -> Layout {
        self.layout
    }
}

/// Of the 50 MB of second-level cache that devices with clusters have, what rows of logits may take.
const CACHED_BYTES: usize = 40_000_000;

/// The largest vocabulary: 2^31 less what alignment may add.
const MAX_VOCAB: usize = i32::MAX as usize - 16;

/// Which kernels a call launches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Plan {
    /// Blocks of a row for `split_k`; 1 for `batched`; 0 for neither.
    pub splits: u32,
    /// Goals of the radix search of rows that keep more than [`Job::quick_limit`] tokens, 0 if there are none: 1, and
    /// one more if any of them has a top-k, and one more for a top-p.
    pub goals: u32,
    /// Whether log-probabilities before the filters are wanted.
    pub sums: bool,
    /// Blocks of the cluster that searches a row, as [`Plan::cluster_blocks`] has it; 0 for the launches of `radix`.
    pub cluster: u32,
}

impl Plan {
    /// These kernels; searches by `radix`.
    pub const fn new(splits: u32, goals: u32, sums: bool) -> Self {
        Self { splits, goals, sums, cluster: 0 }
    }

    /// With searches by clusters of so many blocks.
    pub const fn cluster(mut self, blocks: u32) -> Self {
        self.cluster = blocks;
        self
    }

    /// Blocks of a cluster that searches a row of `vocab` logits of type `dtype` (f32 with [`Adjustments`]), where there are `rows` of them: 1 to 8; 0 where
    /// there is no kernel for that.
    pub fn cluster_blocks(device: &Device, dtype: DType, rows: usize, vocab: u32) -> u32 {
        let properties = device.properties();
        if properties.compute_capability != (9, 0) || radix_cluster_entry(dtype).is_none() {
            return 0;
        }
        let mut least = part::least_blocks(vocab);
        if least > part::MAX_BLOCKS {
            return 0;
        }
        if dtype == DType::F32 {
            // Not more rows at a time than the second-level cache has room for.
            let cached = (CACHED_BYTES / (4 * vocab.max(1) as usize)).max(1);
            let blocks = if rows > cached { properties.multiprocessors.div_ceil(cached as u32) } else { 1 };
            least = least.max(blocks.min(part::MAX_BLOCKS));
        }
        // As many as keep the device busy, but all at once: a cluster lies within one of the device's groups of some 16 multiprocessors, so
        // that those of three blocks and more leave some idle.
        let each = properties.multiprocessors as usize / rows.max(1);
        let at_once = properties.multiprocessors as usize * 3 / 4 / rows.max(1);
        let each = each.min(at_once.max(2));
        // Less than a vector for each thread is not worth a block.
        let useful = vocab.div_ceil(part::THREADS * 16 / dtype.size() as u32);
        (each as u32).min(useful).min(part::MAX_BLOCKS).max(least)
    }

    /// Blocks of a row that keep the device busy without making the merge long.
    pub fn splits(multiprocessors: u32, rows: usize, vocab: usize, need: usize) -> u32 {
        // One block a multiprocessor is fastest where that is several blocks a row; otherwise two, the most that fit.
        let alone = multiprocessors as usize / rows.max(1);
        let wanted = if alone > 2 { alone } else { 2 * multiprocessors as usize / rows.max(1) };
        // Less than a tile is not worth a block.
        let useful = vocab.div_ceil(32 * THREADS as usize);
        // Where there is room for all that a block cannot tell from its best, 1.4 times as many on average, it does not have to
        // sort before the merge.
        wanted.min(useful).min(4 * CAPACITY as usize / need.saturating_mul(7).max(1)).max(1) as u32
    }
}

macro_rules! entry_of {
    ($($(#[$m:meta])* $name:ident -> $args:ty { $f32:ident, $f16:ident, $bf16:ident } in $module:path;)*) => { $(
        $(#[$m])*
        pub const fn $name(dtype: DType) -> Option<Entry<$args>> {
            use $module as m;
            Some(match dtype {
                DType::F32 => m::$f32::ENTRY,
                DType::F16 => m::$f16::ENTRY,
                DType::Bf16 => m::$bf16::ENTRY,
                _ => return None,
            })
        }
    )* };
}
entry_of! {
    /// One block a row.
    batched_entry -> kernel::BatchedArgs { top_k_top_p_batched_f32, top_k_top_p_batched_f16, top_k_top_p_batched_bf16 }
        in crate::kernels::sampling::top_k_top_p;
    /// Several blocks a row.
    split_k_entry -> kernel::SplitKArgs { top_k_top_p_split_k_f32, top_k_top_p_split_k_f16, top_k_top_p_split_k_bf16 }
        in crate::kernels::sampling::top_k_top_p;
    /// The largest logit of each row.
    row_max_entry -> row_sum::Args { sampling_row_max_f32, sampling_row_max_f16, sampling_row_max_bf16 }
        in crate::kernels::sampling::row_sum;
    /// The sum of weights of each row.
    row_sum_entry -> row_sum::Args { sampling_row_sum_f32, sampling_row_sum_f16, sampling_row_sum_bf16 }
        in crate::kernels::sampling::row_sum;
    /// One histogram of the radix search.
    radix_search_entry -> radix::Args { sampling_radix_search_f32, sampling_radix_search_f16, sampling_radix_search_bf16 }
        in crate::kernels::sampling::radix;
    /// The end of the radix search.
    radix_pick_entry -> radix::Args { sampling_radix_pick_f32, sampling_radix_pick_f16, sampling_radix_pick_bf16 }
        in crate::kernels::sampling::radix;
    /// The radix search by clusters.
    radix_cluster_entry -> radix_cluster::Args { sampling_radix_cluster_f32, sampling_radix_cluster_f16, sampling_radix_cluster_bf16 }
        in crate::kernels::sampling::radix_cluster;
    /// The same beside the kernel for few tokens.
    radix_cluster_behind_entry -> radix_cluster::Args {
        sampling_radix_cluster_behind_f32, sampling_radix_cluster_behind_f16, sampling_radix_cluster_behind_bf16
    } in crate::kernels::sampling::radix_cluster;
    /// Log-probabilities before the filters.
    log_probs_entry -> log_probs::Args { sampling_log_probs_f32, sampling_log_probs_f16, sampling_log_probs_bf16 }
        in crate::kernels::sampling::log_probs;
    /// Mask, bias and penalties.
    adjust_entry -> adjust::Args { sampling_adjust_f32, sampling_adjust_f16, sampling_adjust_bf16 }
        in crate::kernels::sampling::adjust;
}

/// Shared memory of a block of the radix search by clusters.
const fn radix_cluster_shared(dtype: DType) -> u32 {
    (if matches!(dtype, DType::F32) { radix_cluster_long::SHARED_BYTES } else { radix_cluster_short::SHARED_BYTES })
        as u32
}

/// Bits of the keys of an element type's logits, which decide how long a radix search takes.
const fn key_bits(dtype: DType) -> u32 {
    match dtype {
        DType::F16 => 19,
        DType::Bf16 => 16,
        _ => 32,
    }
}

/// Launches on raw pointers (layer L1): `rows` rows of logits of type `dtype`, in up to twelve kernels.
///
/// With `adjustments`, these are applied to `logits` and their output is what is sampled from; `job.stride` is of no account then. `job.adjusted` and
/// `job.later` never are.
///
/// # Errors
/// [`Error::Unsupported`] for an element type without kernels, and those of [`Stream::launch`], which has at most 2^31 - 1 blocks: one
/// for every 4096 logits of a row, and `plan.splits` for each row.
///
/// # Safety
/// Pointers are device memory of the sizes that [`Job`] and [`Adjustments`] name, until the launches are done; the
/// workspace is that of a [`Layout`] for this many rows and tokens, was zeros before its first use, and is not in use by other work. The plan is right
/// for the job: `quick_limit` and `top_n` are at most [`MAX_K`], and `plan.splits` times the larger at most [`CAPACITY`]; all
/// rows keep up to `quick_limit` tokens if `plan.goals` is 0, and more if `plan.splits` is 0; `plan.cluster` is 0, or from what
/// [`Plan::cluster_blocks`] has for a million rows up to 8, and that is not 0.
pub unsafe fn launch(
    stream: &Stream,
    dtype: DType,
    rows: u32,
    logits: *const c_void,
    mut job: Job,
    adjustments: Option<&Adjustments>,
    plan: Plan,
) -> Result<()> {
    let unsupported =
        || Error::Unsupported { op: OP, what: format!("no kernel for {dtype}; there are f32, f16 and bf16") };
    let chunks = row_sum::chunks(job.vocab);
    // Too many to number are too many to launch.
    let linear = |blocks: u32, threads: u32| Geometry::linear(rows.saturating_mul(blocks), threads).dependent();
    let by_chunk = |shared: usize| linear(chunks, row_sum::THREADS).shared_bytes(shared as u32);
    let by_row = |blocks: u32| linear(blocks, THREADS).shared_bytes(SHARED_BYTES as u32);
    let (mut dtype, mut logits) = (dtype, logits);
    (job.adjusted, job.later) = (adjustments.is_some() as u32, 0);
    // SAFETY: all of these: forwarded to the caller.
    unsafe {
        if let Some(&args) = adjustments {
            let entry = adjust_entry(dtype).ok_or_else(unsupported)?;
            let geometry = by_chunk(adjust::SHARED_BYTES);
            stream.launch(&entry, &geometry, &adjust::Args { logits, args, chunks })?;
            (dtype, logits, job.stride) = (DType::F32, args.out.cast_const().cast(), args.out_stride);
        }
        let search = plan.goals > 0 && plan.cluster == 0;
        if search {
            let args = row_sum::Args { logits, job };
            stream.launch(
                &row_max_entry(dtype).ok_or_else(unsupported)?,
                &by_chunk(row_sum::MAX_SHARED_BYTES),
                &args,
            )?;
            if plan.sums {
                stream.launch(&row_sum_entry(dtype).ok_or_else(unsupported)?, &by_chunk(0), &args)?;
            }
        }
        // Clusters see to the sums of the rows that are theirs.
        let later = plan.sums && !search && plan.splits > 0 && job.quick_limit > 0;
        let mut quick = job;
        if later {
            (quick.before, quick.top_before, quick.later) = (std::ptr::null_mut(), std::ptr::null_mut(), 1);
        }
        match plan.splits {
            0 => {}
            1 => {
                let args = kernel::BatchedArgs { logits, job: quick };
                stream.launch(&batched_entry(dtype).ok_or_else(unsupported)?, &by_row(1), &args)?;
            }
            splits => {
                let args = kernel::SplitKArgs { logits, job: quick, splits };
                stream.launch(&split_k_entry(dtype).ok_or_else(unsupported)?, &by_row(splits), &args)?;
            }
        }
        if plan.goals > 0 && plan.cluster > 0 {
            let behind = plan.splits > 0;
            let entry = if behind { radix_cluster_behind_entry(dtype) } else { radix_cluster_entry(dtype) };
            let entry = entry.ok_or_else(unsupported)?;
            let geometry = Geometry::linear(rows.saturating_mul(plan.cluster), part::THREADS);
            let geometry = geometry.shared_bytes(radix_cluster_shared(dtype)).cluster(plan.cluster).dependent();
            stream.launch(&entry, &geometry, &radix_cluster::Args { logits, job })?;
        } else if search {
            let args = radix::Args { logits, job };
            let search = radix_search_entry(dtype).ok_or_else(unsupported)?;
            for _ in 0..radix::passes(key_bits(dtype), plan.goals) {
                stream.launch(&search, &by_chunk(radix::SEARCH_SHARED_BYTES), &args)?;
            }
            let pick = radix_pick_entry(dtype).ok_or_else(unsupported)?;
            stream.launch(&pick, &by_chunk(radix::PICK_SHARED_BYTES), &args)?;
        }
        if later {
            let entry = log_probs_entry(dtype).ok_or_else(unsupported)?;
            // Three blocks fit a multiprocessor: all at once. Of more rows some four for each multiprocessor, and two of each row at least; more where there
            // may be rows without work. None has threads without work.
            let multiprocessors = stream.device().properties().multiprocessors;
            let parts = match rows.max(1) {
                rows if rows < multiprocessors => 3 * multiprocessors / rows,
                _ if plan.goals > 0 => 4,
                rows => ((4 * multiprocessors + rows / 2) / rows).max(2),
            };
            let parts = parts.min(chunks);
            let geometry = linear(parts, log_probs::THREADS).shared_bytes(log_probs::SHARED_BYTES as u32);
            stream.launch(&entry, &geometry, &log_probs::Args { logits, job, parts })?;
        }
    }
    Ok(())
}

/// Samples a token for each row of `logits`: see the [module](self) for what exactly.
///
/// `logits` are `[.., vocab]` of f32, f16 or bf16, rows at any distance of at least `vocab`; `tokens` are of its shape without the last
/// dimension, dense. Parameters that differ by row are `[rows]`.
///
/// ```
/// use warploom::sampling::{SamplingOptions, SamplingWorkspace, top_k_top_p};
/// use warploom::{Device, Stream, Tensor};
///
/// let device = Device::simt();
/// let stream = Stream::new(&device)?;
/// let logits = Tensor::from_slice(&device, &[0.0f32, 3.0, 2.9, -1.0], &[1, 4])?;
/// let mut workspace = SamplingWorkspace::new(&device, 1, 4)?;
/// let mut token = Tensor::<i32>::zeros(&device, &[1])?;
/// let options = SamplingOptions::default().top_k(2).top_p(0.9).temperature(0.7).seed(42);
/// top_k_top_p(&stream, &mut token, None, &logits, &options, &mut workspace)?;
/// assert!([1, 2].contains(&token.to_vec()?[0]));
/// # Ok::<(), warploom::Error>(())
/// ```
///
/// # Errors
/// [`Shape`](Error::Shape), [`Stride`](Error::Stride), [`Overlap`](Error::Overlap),
/// [`WrongDevice`](Error::WrongDevice), [`DType`](Error::DType) for 8-bit logits; [`Unsupported`](Error::Unsupported) for more than 128 top
/// log-probabilities; [`Value`](Error::Value) for parameters of all rows that are out of range, penalties without a
/// history, and a workspace that is too small.
pub fn top_k_top_p<T: Float, I: TokenId>(
    stream: &Stream,
    tokens: &mut Tensor<I>,
    log_probs: Option<&mut LogProbs<I>>,
    logits: &Tensor<T>,
    options: &SamplingOptions<'_>,
    workspace: &mut SamplingWorkspace,
) -> Result<()> {
    let call = Call::new(OP, stream);
    if batched_entry(T::DTYPE).is_none() {
        return Err(Error::DType { op: OP, arg: "logits", expected: "f32, f16 or bf16".into(), got: T::DTYPE });
    }
    let shape = call.rows("logits", logits)?;
    let (rows, vocab) = (shape.rows, shape.width);
    if vocab == 0 || vocab > MAX_VOCAB {
        return Err(call.bad_shape("logits", logits.shape(), format!("[.., vocab] with 1 to {MAX_VOCAB} tokens")));
    }
    call.same_shape("tokens", tokens.shape(), &logits.shape()[..logits.shape().len() - 1])?;
    call.contiguous("tokens", tokens)?;

    let mut inputs = Inputs { call, rows, vocab };
    let mut none = LogProbs::none();
    let log_probs = log_probs.unwrap_or(&mut none);
    let top_n = inputs.top_n(log_probs)?;
    let limits = inputs.limits(options)?;
    let subsequence = options.subsequence.unwrap_or(PerRow::All(0));
    let mut job = Job {
        stride: shape.stride as u64,
        vocab: vocab as u32,
        quick_limit: limits.quick,
        max_k: limits.max_k,
        top_n: top_n as u32,
        adjusted: 0,
        later: 0,
        temperature: inputs.per_row(
            "temperature",
            options.temperature,
            |t| t >= 0.0 && t.is_finite(),
            "finite and >= 0",
        )?,
        top_k: match options.top_k {
            None => RawPerRow::all(0),
            Some(k) => inputs.per_row(
                "top_k",
                k,
                |k| k >= 1 && k as usize <= vocab,
                &format!("from 1 to {vocab}, the vocabulary; none keeps all"),
            )?,
        },
        top_p: inputs.per_row("top_p", options.top_p, |p| p > 0.0 && p <= 1.0, "above 0 and at most 1")?,
        min_p: inputs.per_row("min_p", options.min_p, |p| (0.0..=1.0).contains(&p), "from 0 to 1")?,
        seed: inputs.per_row("seed", options.seed, |_| true, "")?,
        offset: inputs.per_row("offset", options.offset, |_| true, "")?,
        subsequence: inputs.per_row("subsequence", subsequence, |_| true, "")?,
        subsequence_step: options.subsequence.is_none() as u64,
        tokens: inputs.call.write("tokens", tokens)?.cast(),
        before: inputs.output("log_probs.before", log_probs.before.as_mut(), None)?.cast(),
        after: inputs.output("log_probs.after", log_probs.after.as_mut(), None)?.cast(),
        top_tokens: inputs.output("log_probs.top_tokens", log_probs.top_tokens.as_mut(), Some(top_n))?.cast(),
        top_before: inputs.output("log_probs.top_before", log_probs.top_before.as_mut(), Some(top_n))?.cast(),
        top_after: inputs.output("log_probs.top_after", log_probs.top_after.as_mut(), Some(top_n))?.cast(),
        tickets: std::ptr::null_mut(),
        state: std::ptr::null_mut(),
        histograms: std::ptr::null_mut(),
        lists: std::ptr::null_mut(),
        best: std::ptr::null_mut(),
        chunk_counts: std::ptr::null_mut(),
    };
    let layout = workspace.layout;
    inputs.call.value(
        layout.rows >= rows && layout.vocab >= vocab && (layout.adjusted || !options.adjusts()),
        "workspace",
        format_args!(
            "for {rows} rows of {vocab} tokens{}",
            if options.adjusts() { " and made by SamplingWorkspace::with_adjustments" } else { "" }
        ),
        format_args!(
            "for {} of {}, {} adjustments",
            layout.rows,
            layout.vocab,
            if layout.adjusted { "with" } else { "without" }
        ),
    )?;
    let base = inputs.call.write("workspace", &mut workspace.memory)?;
    let adjusted = layout.place(base, &mut job);
    let logits = inputs.call.read("logits", logits)?;
    let adjustments = inputs.adjustments(options, &job, adjusted, layout.adjusted_stride())?;
    inputs.call.check_overlap()?;

    let need = top_n.max(limits.quick as usize);
    let splits = match options.algorithm {
        _ if need == 0 => 0,
        SamplingAlgorithm::Batched => 1,
        SamplingAlgorithm::SplitK { splits } => splits as u32,
        SamplingAlgorithm::Auto | SamplingAlgorithm::Radix | SamplingAlgorithm::RadixCluster => {
            Plan::splits(stream.device().properties().multiprocessors, rows, vocab, need)
        }
    };
    if let SamplingAlgorithm::SplitK { splits } = options.algorithm {
        let most = CAPACITY as usize / need.max(1);
        inputs.call.value(splits >= 1 && splits <= most, "splits", format!("from 1 to {most}"), splits)?;
    }
    let cluster = match options.algorithm {
        _ if limits.goals == 0 => 0,
        SamplingAlgorithm::Radix => 0,
        _ => {
            let searched = if adjustments.is_some() { DType::F32 } else { T::DTYPE };
            Plan::cluster_blocks(stream.device(), searched, rows, job.vocab)
        }
    };
    let sums = !job.before.is_null() || !job.top_before.is_null();
    let plan = Plan { splits, goals: limits.goals, sums, cluster };
    let blocks = rows.saturating_mul((row_sum::chunks(job.vocab).max(splits).max(cluster)) as usize);
    inputs.call.value(blocks <= i32::MAX as usize, "logits", "at most 2^31 - 1 blocks of 4096 logits", blocks)?;
    // SAFETY: all tensors were checked above, the workspace is large enough and of this device, and the plan was made
    // for the limits in the job.
    unsafe { launch(stream, T::DTYPE, rows as u32, logits, job, adjustments.as_ref(), plan) }
}

/// What the values of top-k may be.
struct Limits {
    quick: u32,
    max_k: u32,
    goals: u32,
}

/// The checks of a call, with the sizes that they are about.
struct Inputs<'a> {
    call: Call<'a>,
    rows: usize,
    vocab: usize,
}

impl Inputs<'_> {
    fn per_row<V: Element + std::fmt::Display>(
        &mut self,
        arg: &'static str,
        value: PerRow<'_, V>,
        ok: impl Fn(V) -> bool,
        expected: &str,
    ) -> Result<RawPerRow<V>> {
        match value {
            PerRow::All(v) => {
                self.call.value(ok(v), arg, expected, v)?;
                Ok(RawPerRow::all(v))
            }
            PerRow::Each(tensor) => {
                self.call.same_shape(arg, tensor.shape(), &[self.rows])?;
                self.call.contiguous(arg, tensor)?;
                // SAFETY: zero bytes are a value of every element type.
                let all = unsafe { std::mem::zeroed() };
                Ok(RawPerRow { each: self.call.read(arg, tensor)?.cast(), all })
            }
        }
    }

    fn top_n<I: TokenId>(&self, log_probs: &LogProbs<I>) -> Result<usize> {
        let shapes = [
            log_probs.top_tokens.as_ref().map(Tensor::shape),
            log_probs.top_before.as_ref().map(Tensor::shape),
            log_probs.top_after.as_ref().map(Tensor::shape),
        ];
        let names = ["log_probs.top_tokens", "log_probs.top_before", "log_probs.top_after"];
        let Some((arg, &first)) = names.iter().zip(&shapes).find_map(|(arg, shape)| Some((arg, shape.as_ref()?)))
        else {
            return Ok(0);
        };
        let &[_, n] = first else { return Err(self.call.bad_shape(arg, first, "[rows, n]")) };
        if n > MAX_K as usize {
            return Err(Error::Unsupported {
                op: OP,
                what: format!("{n} top log-probabilities a row; there are kernels for up to {MAX_K}"),
            });
        }
        Ok(n)
    }

    fn output<V: Element>(
        &mut self,
        arg: &'static str,
        tensor: Option<&mut Tensor<V>>,
        n: Option<usize>,
    ) -> Result<*mut c_void> {
        let Some(tensor) = tensor else { return Ok(std::ptr::null_mut()) };
        let rows = [self.rows, n.unwrap_or(0)];
        self.call.same_shape(arg, tensor.shape(), &rows[..=n.is_some() as usize])?;
        self.call.contiguous(arg, tensor)?;
        let pointer = self.call.write(arg, tensor)?;
        Ok(if n == Some(0) { std::ptr::null_mut() } else { pointer })
    }

    fn limits(&self, options: &SamplingOptions<'_>) -> Result<Limits> {
        let vocab = self.vocab;
        let mut max_k = vocab;
        if let Some(k) = options.max_top_k {
            self.call.value(k >= 1, "max_top_k", "at least 1", k)?;
            if !matches!(options.top_k, Some(PerRow::Each(_))) {
                return Err(Error::Value {
                    op: OP,
                    arg: "max_top_k",
                    expected: "with an array of top_k".into(),
                    got: "without".into(),
                });
            }
            max_k = max_k.min(k);
        }
        let greedy = matches!(options.temperature, PerRow::All(t) if t <= 0.0);
        // The most that any row keeps, and whether all rows keep as many.
        let (most, known) = match options.top_k {
            _ if greedy => (1, true),
            Some(PerRow::All(k)) => (k.max(0) as usize, true),
            None => (vocab, true),
            Some(PerRow::Each(_)) => (max_k, options.max_top_k.is_some() || vocab <= MAX_K as usize),
        };
        let quick = match options.algorithm {
            SamplingAlgorithm::Radix | SamplingAlgorithm::RadixCluster => 0,
            _ if most <= MAX_K as usize => most,
            _ if known => 0,
            _ => MAX_K as usize,
        };
        let has_top_k = options.top_k.is_some() || !matches!(options.temperature, PerRow::All(_)) || greedy;
        let has_top_p = !matches!(options.top_p, PerRow::All(p) if p >= 1.0);
        let goals = if quick >= most { 0 } else { 1 + has_top_k as u32 + has_top_p as u32 };
        Ok(Limits { quick: quick as u32, max_k: max_k as u32, goals })
    }

    fn adjustments(
        &mut self,
        options: &SamplingOptions<'_>,
        job: &Job,
        out: *mut f32,
        out_stride: usize,
    ) -> Result<Option<Adjustments>> {
        let penalises = |p: PerRow<'_, f32>, none: f32| !matches!(p, PerRow::All(v) if v == none);
        let penalties = penalises(options.repetition_penalty, 1.0)
            || penalises(options.presence_penalty, 0.0)
            || penalises(options.frequency_penalty, 0.0)
            || options.prompt_lengths.is_some();
        self.call.value(
            !penalties || options.history.is_some(),
            "history",
            "given where there are penalties or `prompt_lengths`",
            "none",
        )?;
        let positive = |p: f32| p > 0.0 && p.is_finite();
        let repetition =
            self.per_row("repetition_penalty", options.repetition_penalty, positive, "finite and above 0")?;
        let presence = self.per_row("presence_penalty", options.presence_penalty, f32::is_finite, "finite")?;
        let frequency = self.per_row("frequency_penalty", options.frequency_penalty, f32::is_finite, "finite")?;
        if !options.adjusts() {
            return Ok(None);
        }
        let (allowed, allowed_stride) = self.shared_rows("allowed", options.allowed, self.vocab.div_ceil(32))?;
        let (bias, bias_stride) = self.shared_rows("bias", options.bias, self.vocab)?;
        let mut args = Adjustments {
            stride: job.stride,
            vocab: job.vocab,
            allowed_stride: allowed_stride as u32,
            allowed: allowed.cast(),
            bias: bias.cast(),
            bias_stride: bias_stride as u64,
            history: std::ptr::null(),
            history_stride: 0,
            lengths: std::ptr::null(),
            prompt_lengths: std::ptr::null(),
            history_capacity: 0,
            repetition,
            presence,
            frequency,
            out,
            out_stride: out_stride as u64,
        };
        if let Some((history, lengths)) = options.history {
            let &[of, capacity] = history.shape() else {
                return Err(self.call.bad_shape("history", history.shape(), "[rows, capacity]"));
            };
            self.call.same_shape("history", &[of, capacity], &[self.rows, capacity])?;
            let rows = self.call.rows("history", history)?;
            args.history_capacity = self.call.count("history", capacity)?;
            args.history_stride = rows.stride as u64;
            args.history = self.call.read("history", history)?.cast();
            args.lengths = self.lengths("lengths", lengths)?;
            if let Some(prompt) = options.prompt_lengths {
                args.prompt_lengths = self.lengths("prompt_lengths", prompt)?;
            }
        }
        Ok(Some(args))
    }

    fn lengths(&mut self, arg: &'static str, tensor: &Tensor<i32>) -> Result<*const i32> {
        self.call.same_shape(arg, tensor.shape(), &[self.rows])?;
        self.call.contiguous(arg, tensor)?;
        Ok(self.call.read(arg, tensor)?.cast())
    }

    /// `[width]` or `[rows, width]`: address, and distance of rows.
    fn shared_rows<V: Element>(
        &mut self,
        arg: &'static str,
        tensor: Option<&Tensor<V>>,
        width: usize,
    ) -> Result<(*const c_void, usize)> {
        let Some(tensor) = tensor else { return Ok((std::ptr::null(), 0)) };
        if tensor.shape() != [width] && tensor.shape() != [self.rows, width] {
            return Err(self.call.bad_shape(arg, tensor.shape(), format!("[{width}] or [{}, {width}]", self.rows)));
        }
        let rows = self.call.rows(arg, tensor)?;
        let stride = if tensor.shape().len() == 1 { 0 } else { rows.stride };
        self.call.value(u32::try_from(stride).is_ok(), arg, "rows less than 2^32 elements apart", stride)?;
        Ok((self.call.read(arg, tensor)?, stride))
    }
}
