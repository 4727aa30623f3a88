//! The fused block of experts: `out[t] = Σ w · down(act(gate_up(x[t])))`.
//!
//! One operation, several kernels; [`FusedPath`] says which, and [`FusedPath::Auto`] chooses by shape, element type,
//! alignment and device, never by the contents. Every path is deterministic unless [`FusedOptions::unordered`] allows
//! otherwise, and by one path a token's result depends on no other token; `Auto` chooses by their number, too.

use super::block::{self, Block, Description, dense, first_weights};
use super::fused_host::fused_host;
use super::{shuffle, sort};
use crate::check::{Call, after, least, most, product};
use crate::device::{Device, Geometry, Stream};
use crate::error::{Error, Result};
use crate::kernels::moe::{
    fused as kernel, fused_fma, fused_reduce, fused_stream, fused_tile, fused_vector, fused_wgmma, items, progress,
};
use crate::tensor::Tensor;
use cuda_std::tma::{Swizzle, TensorMap, TensorMapDescription};
use cuda_std::{DType, Element, Entry, Float};
use std::ffi::c_void;
use std::hash::{BuildHasher, RandomState};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};

pub use fused_reduce::Args as ReduceArgs;
pub use fused_vector::Args as VectorArgs;
pub use fused_wgmma::Args as WgmmaArgs;
pub use kernel::Args;

const OP: &str = "moe::fused";

/// What happens between the two products, to a gate `g` and a value `u` in f32. Without values, `u` is 1.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub enum ExpertActivation {
    /// `g · sigmoid(g) · u`.
    #[default]
    Silu,
    /// `g · Φ(g) · u`, exactly.
    Gelu,
    /// GELU's tanh approximation.
    GeluTanh,
    /// `max(g, 0)² · u`.
    Relu2,
    /// `g' · sigmoid(alpha · g') · (u' + 1)` with `g' = min(g, limit)` and `u'` within `-limit ..= limit`: gpt-oss. Without
    /// values, `g' · sigmoid(alpha · g')`.
    SwigluOai {
        /// Slope of the sigmoid; 1.702 in gpt-oss.
        alpha: f32,
        /// Bound; 7 in gpt-oss.
        limit: f32,
    },
}

impl ExpertActivation {
    /// The kernels' number for it, with `alpha` and `limit`.
    pub const fn parts(self) -> (u32, f32, f32) {
        match self {
            ExpertActivation::Silu => (0, 0.0, 0.0),
            ExpertActivation::Gelu => (1, 0.0, 0.0),
            ExpertActivation::GeluTanh => (2, 0.0, 0.0),
            ExpertActivation::Relu2 => (3, 0.0, 0.0),
            ExpertActivation::SwigluOai { alpha, limit } => (4, alpha, limit),
        }
    }
}

/// What the rows of `w13` are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum GateUp {
    /// `2 I`: all gates, then all values.
    #[default]
    Halves,
    /// `2 I`: gate and value alternate, gate first.
    Interleaved,
    /// `I`: gates only.
    GateOnly,
}

impl GateUp {
    /// Rows of `w13` for each output.
    pub const fn rows(self) -> usize {
        match self {
            GateUp::GateOnly => 1,
            _ => 2,
        }
    }

    pub(super) const fn layout(self) -> u32 {
        match self {
            GateUp::Halves => kernel::HALVES,
            GateUp::Interleaved => kernel::INTERLEAVED,
            GateUp::GateOnly => kernel::PLAIN,
        }
    }
}

/// The kernels of the fused block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum FusedPath {
    /// By shape, element type, alignment and device.
    #[default]
    Auto,
    /// Ordinary multiply-adds in f32: takes everything.
    Fma,
    /// Weights streamed through the tensor cores, without sorting: at most 64 pairs, 16-bit floats, rows of multiples of 16
    /// bytes.
    Direct,
    /// The same after sorting, for any number of pairs, 8 of an expert at a time.
    Stream8,
    /// [`Stream8`](Self::Stream8), 16 at a time.
    Stream16,
    /// Tiles in shared memory and tensor cores, 32 pairs of an expert at a time; types and rows as for streaming.
    Tile32,
    /// [`Tile32`](Self::Tile32), 64 at a time.
    Tile64,
    /// [`Tile32`](Self::Tile32), 128 at a time.
    Tile128,
    /// [`Wgmma64`](Self::Wgmma64) without sorting, at most 128 pairs, up to 16 of an expert at a time.
    Wgmma16,
    /// Hopper's matrix products and copy engine, up to 64 pairs of an expert at a time. On Hopper and the SIMT device; types
    /// and rows as for streaming, at most 1024 experts on the device, any activation but [`ExpertActivation::Gelu`].
    Wgmma64,
    /// [`Wgmma64`](Self::Wgmma64), up to 176 at a time; at most 653 experts.
    Wgmma176,
    /// Everything in one launch, for very few pairs: one stream of weights for both products, without sorting. On Hopper and the SIMT device; at
    /// most 32 pairs and as many tokens, types and rows as for streaming, any activation but [`ExpertActivation::Gelu`], and what is kept in shared memory (`x`, then what lies between the products) about 64 Ki
    /// elements in all.
    Vector,
    /// Plain loops on the CPU, on the SIMT device only: what [`Auto`](Self::Auto) means where
    /// [`SimtOptions::host_products`](crate::SimtOptions::host_products) is on.
    Host,
}

impl FusedPath {
    /// Pairs of an expert that a block of threads takes: the block size of sorting.
    pub const fn block(self) -> usize {
        match self {
            FusedPath::Auto | FusedPath::Fma | FusedPath::Host => fused_fma::PAIRS,
            FusedPath::Direct | FusedPath::Stream8 | FusedPath::Vector => 8,
            FusedPath::Stream16 => 16,
            FusedPath::Tile32 => 32,
            FusedPath::Tile64 => 64,
            FusedPath::Tile128 => 128,
            FusedPath::Wgmma16 | FusedPath::Wgmma64 | FusedPath::Wgmma176 => fused_wgmma::SORT_BLOCK,
        }
    }

    /// The path that suits so many pairs of so many experts of such widths, all of which tensor cores take.
    const fn choose(shape: &FusedShape, wgmma: bool, shuffled: bool) -> Self {
        let (pairs, bins) = (shape.pairs(), shape.bins());
        // Blocks should hold what an expert has on average, with something to spare: then its weights are read once.
        // Measured on an H200: without sorting up to 64 pairs, and where little is to be read, several blocks of threads for
        // each tile of rows start faster than a pipeline.
        if pairs <= fused_stream::DIRECT_PAIRS {
            if wgmma && (shuffled || product(&[pairs, shape.hidden, shape.intermediate]) >= 3 << 22) {
                FusedPath::Wgmma16
            } else {
                FusedPath::Direct
            }
        } else if wgmma && pairs <= product(&[8, bins]) && pairs <= unsorted_pairs(shape.intermediate) {
            FusedPath::Wgmma16
        } else if wgmma && (pairs <= product(&[48, bins]) || !FusedPath::Wgmma176.has_room_for(bins, false)) {
            FusedPath::Wgmma64
        } else if wgmma {
            FusedPath::Wgmma176
        } else if pairs <= product(&[4, bins]) {
            FusedPath::Stream8
        } else if pairs <= product(&[8, bins]) {
            FusedPath::Stream16
        } else if pairs <= product(&[24, bins]) {
            FusedPath::Tile32
        } else if pairs <= product(&[96, bins]) {
            FusedPath::Tile64
        } else {
            FusedPath::Tile128
        }
    }

    const fn is_wgmma(self) -> bool {
        matches!(self, FusedPath::Wgmma16 | FusedPath::Wgmma64 | FusedPath::Wgmma176)
    }

    /// Rows of weights and pairs of an item, and the ring: elements of K of a stage in units of [`fused_wgmma::STEP`], and how many
    /// there are. As in the table of instances.
    pub(super) const fn wgmma_tile(self) -> [usize; 4] {
        match self {
            FusedPath::Wgmma16 => [fused_wgmma::rows(1, true), 16, 4, 5],
            FusedPath::Wgmma64 => [fused_wgmma::rows(1, false), 64, 2, 4],
            _ => [fused_wgmma::rows(2, false), 176, 1, 4],
        }
    }

    /// Shared memory of a path on Hopper, whose operands have scales of rows (`scaled`) or none, for so many experts.
    const fn wgmma_bytes(self, bins: usize, scaled: bool) -> usize {
        let [rows, pairs, lines, stages] = self.wgmma_tile();
        fused_wgmma::shared_bytes(rows, pairs, lines, stages, bins, scaled)
    }

    /// Whether that has room for a table of so many experts.
    pub(super) const fn has_room_for(self, bins: usize, scaled: bool) -> bool {
        bins <= fused_wgmma::MAX_BINS && self.wgmma_bytes(bins, scaled) <= fused_wgmma::MAX_SHARED_BYTES
    }

    /// Blocks of a cluster of its products: two where experts have more pairs on average than a share.
    pub(super) const fn cluster(self, shape: &FusedShape, multiprocessors: u32) -> usize {
        let two = matches!(self, FusedPath::Wgmma176)
            && shape.pairs() > product(&[self.wgmma_tile()[1], shape.bins()])
            && multiprocessors as usize >= fused_wgmma::PAIR;
        if two { fused_wgmma::PAIR } else { 1 }
    }

    /// How to launch a product of such a path, in clusters of so many blocks.
    pub(super) const fn wgmma_geometry(
        self,
        cluster: usize,
        bins: usize,
        scaled: bool,
        multiprocessors: u32,
    ) -> Geometry {
        let blocks = cluster as u32;
        Geometry::linear(multiprocessors / blocks * blocks, fused_wgmma::THREADS as u32)
            .shared_bytes(self.wgmma_bytes(bins, scaled) as u32)
            .cluster(blocks)
    }

    /// How to launch [`Vector`](Self::Vector) on so many multiprocessors, if there is room in shared memory.
    const fn vector_parts(shape: &FusedShape, multiprocessors: usize) -> Option<VectorParts> {
        // Measured on an H200: while there is little to read, what counts is how soon blocks know `h`; then how much of it they read.
        let words = product(&[shape.pairs(), shape.hidden, shape.intermediate]) < LARGE && narrow(shape);
        match Self::vector_parts_of(shape, multiprocessors, words) {
            None if words => Self::vector_parts_of(shape, multiprocessors, false),
            parts => parts,
        }
    }

    /// [`vector_parts`](Self::vector_parts) if `h` is exchanged in `words`, or not.
    const fn vector_parts_of(shape: &FusedShape, multiprocessors: usize, words: bool) -> Option<VectorParts> {
        let blocks =
            if multiprocessors < fused_vector::MAX_BLOCKS { multiprocessors } else { fused_vector::MAX_BLOCKS };
        let FusedShape { tokens, hidden, intermediate, .. } = *shape;
        let (pairs, len, rows) = (shape.pairs(), fused_vector::STEPS * 256, fused_vector::rows(words));
        // A lane looks after each token as well: they are more than the pairs where nobody goes anywhere.
        if blocks == 0 || hidden == 0 || intermediate == 0 || most(pairs, tokens) > fused_vector::MAX_PAIRS {
            return None;
        }
        let (x, h) = (product(&[tokens, hidden]), product(&[pairs, intermediate]));
        let operands = x.saturating_add(h);
        if operands > fused_wgmma::MAX_SHARED_BYTES / 2 {
            return None;
        }
        // A block's units are at most its part of them all and what a row of the second product less is worth, rounded up in both groups.
        let each = if words { fused_vector::OUTPUTS } else { 1 };
        let units = each * (h / each / blocks + h / each / hidden + 5);
        let up = product(&[2, units, hidden.div_ceil(len)]);
        let down = product(&[rows, pairs, (hidden / blocks + 1).div_ceil(rows), intermediate.div_ceil(len)]);
        let sums = up.saturating_add(down);
        let fixed = fused_vector::shared_bytes(operands, sums, 0);
        if fixed > fused_wgmma::MAX_SHARED_BYTES {
            return None;
        }
        // Rings begin at multiples of 128 bytes.
        let room = (fused_wgmma::MAX_SHARED_BYTES - fixed) / (fused_vector::WARPS * 2) / 64 * 64;
        let least_room = if words { most(2 * least(hidden, len), rows * least(intermediate, len)) } else { rows * len };
        if room < least_room {
            return None;
        }
        let shared_bytes = fused_vector::shared_bytes(operands, sums, room);
        Some(VectorParts { words, blocks, operands, sums, room, shared_bytes })
    }

    const fn is_tile(self) -> bool {
        matches!(self, FusedPath::Tile32 | FusedPath::Tile64 | FusedPath::Tile128)
    }
}

/// The sizes of a problem.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
#[must_use]
pub struct FusedShape {
    /// Tokens.
    pub tokens: usize,
    /// Experts listed for each.
    pub top_k: usize,
    /// Routed experts of this device.
    pub experts: usize,
    /// Width of tokens.
    pub hidden: usize,
    /// Width between the products.
    pub intermediate: usize,
    /// Shared experts.
    pub shared_experts: usize,
    /// Whether the shared experts get slots of their own; otherwise `topk_ids` lists them.
    pub append_shared: bool,
}

impl FusedShape {
    /// Without shared experts.
    pub const fn new(tokens: usize, top_k: usize, experts: usize, hidden: usize, intermediate: usize) -> Self {
        Self { tokens, top_k, experts, hidden, intermediate, shared_experts: 0, append_shared: true }
    }

    /// With so many shared experts, which all tokens go to.
    pub const fn shared_experts(mut self, shared_experts: usize) -> Self {
        self.shared_experts = shared_experts;
        self
    }

    /// Slots of a token.
    pub const fn slots(&self) -> usize {
        self.top_k.saturating_add(if self.append_shared { self.shared_experts } else { 0 })
    }

    /// Pairs of tokens and slots.
    pub const fn pairs(&self) -> usize {
        product(&[self.tokens, self.slots()])
    }

    /// Experts whose weights are at hand.
    pub(super) const fn bins(&self) -> usize {
        self.experts.saturating_add(self.shared_experts)
    }

    /// Bytes of workspace, enough for every path and for fewer tokens; the largest number for sizes that none takes.
    pub const fn workspace_bytes(&self, dtype: DType) -> usize {
        let (mut bytes, mut i) = (0, 0);
        while i < BLOCKS.len() {
            bytes = most(bytes, Workspace::new(self, dtype, BLOCKS[i]).bytes);
            i += 1;
        }
        bytes
    }
}

/// Pairs × hidden × intermediate from which on [`FusedPath::Vector`] is the fastest for one token, where tokens are [`narrow`] (otherwise from the half of
/// `LARGE` on), and from which on blocks claim shares there instead of exchanging words.
const SMALL: usize = 1 << 18;
const LARGE: usize = 1 << 26;

/// Up to how many pairs [`FusedPath::Wgmma16`] is best on an H200 where each expert has few: an item of the second product is short with a small
/// `intermediate`, and there is one for each expert and 64 columns.
const fn unsorted_pairs(intermediate: usize) -> usize {
    if intermediate >= 512 { fused_wgmma::DIRECT_PAIRS } else { 96 }
}

/// Whether tokens are at most four times as wide as what is between the products.
const fn narrow(shape: &FusedShape) -> bool {
    shape.hidden / 4 <= shape.intermediate
}

/// Blocks of pairs of all paths, the largest one last.
pub(super) const BLOCKS: [usize; 5] = [8, 16, 32, 64, 128];

/// The beginning of every workspace of this block and of the quantised one, the same for all shapes: words by which launches recognise their number, and which are left without it, since a replay of
/// a graph repeats it. Behind them the sum of some shapes discards lines (`fused_reduce`), and a discarded line may read as anything that was there before: of another shape's words perhaps as they were before they
/// were zeroed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Front;

impl Front {
    /// Claims of [`FusedPath::Vector`].
    const CLAIMS: usize = 0;
    /// Of the products that draw their items.
    pub(super) const DRAWS: usize = after(Self::CLAIMS, fused_vector::CLAIMS * 8);
    /// `h` of [`FusedPath::Vector`] in words.
    const EXCHANGED: usize = after(Self::DRAWS, items::WORDS * 8);
    /// Of as many elements as there is room for in shared memory.
    const EXCHANGED_BYTES: usize = fused_wgmma::MAX_SHARED_BYTES / 2 / fused_vector::OUTPUTS * fused_vector::WORD_BYTES;
    pub(super) const BYTES: usize = after(Self::EXCHANGED, Self::EXCHANGED_BYTES);
}

/// Where the parts of the workspace behind its [`Front`] are, in bytes.
#[derive(Clone, Copy, Debug)]
struct Workspace {
    h: usize,
    partial: usize,
    sorted_ids: usize,
    expert_ids: usize,
    totals: usize,
    sort: usize,
    sorted_weights: usize,
    offsets: usize,
    expert_counts: usize,
    /// How far the blocks of the first product have come.
    progress: usize,
    /// What is left of each stripe of the second one.
    left: usize,
    /// Elements of `sorted_ids`.
    capacity: usize,
    bytes: usize,
}

impl Workspace {
    const fn new(shape: &FusedShape, dtype: DType, block: usize) -> Self {
        let pairs = shape.pairs();
        let capacity = sort::capacity(pairs, shape.bins(), block, false);
        let h = Front::BYTES;
        let partial = after(h, product(&[pairs, shape.intermediate, dtype.size()]));
        let sorted_ids = after(partial, product(&[pairs, shape.hidden, 4]));
        let expert_ids = after(sorted_ids, product(&[capacity, 4]));
        let totals = after(expert_ids, product(&[capacity / block, 4]));
        let sort = after(totals, 4);
        let sorted_weights = after(sort, sort::workspace_bytes(pairs, shape.bins()));
        let offsets = after(sorted_weights, product(&[capacity, 4]));
        let expert_counts = after(offsets, product(&[shape.bins().saturating_add(1), 4]));
        let progress = after(expert_counts, product(&[shape.bins(), 4]));
        let left = after(progress, progress::WORDS * 4);
        let bytes = after(left, progress::MAX_STRIPES * 4);
        Self {
            h,
            partial,
            sorted_ids,
            expert_ids,
            totals,
            sort,
            sorted_weights,
            offsets,
            expert_counts,
            progress,
            left,
            capacity,
            bytes,
        }
    }
}

/// What a path launches for a shape: chosen by [`plan`].
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Plan {
    /// Not `Auto`.
    pub path: FusedPath,
    products: Products,
    /// Blocks of a cluster of the products.
    cluster: usize,
    /// The second product and the sum of [`FusedOptions::rounded_slots`], where the path makes use of it.
    rounded: Option<(Entry<WgmmaArgs>, Entry<ReduceArgs>)>,
    /// The second product that adds what it has rounded up as it comes.
    added: Option<Entry<WgmmaArgs>>,
    /// The second product and the sum without it, unless [`FusedOptions::f32_slots`] are asked for.
    packed: Option<(Entry<WgmmaArgs>, Entry<ReduceArgs>)>,
}

/// The kernels of the first product and the second, or the one for all.
#[derive(Clone, Copy, Debug)]
enum Products {
    Vector(Entry<VectorArgs>, VectorParts),
    Blocks(Entry<Args>, Entry<Args>),
    Wgmma(Entry<WgmmaArgs>, Entry<WgmmaArgs>),
}

/// What a launch of [`FusedPath::Vector`] needs to know; see [`VectorArgs`].
#[derive(Clone, Copy, Debug)]
struct VectorParts {
    /// Whether `h` is exchanged in words.
    words: bool,
    blocks: usize,
    operands: usize,
    sums: usize,
    room: usize,
    shared_bytes: usize,
}

/// How many warps of a streaming block share a tile of rows: `1 << split_log2(k)`, so that each has some steps to do.
pub const fn split_log2(k: usize) -> u32 {
    match k {
        2048.. => 3,
        1024.. => 2,
        512.. => 1,
        _ => 0,
    }
}

/// Chooses the kernels. `streams` says whether addresses and strides suit 16-byte loads, `wgmma` whether the device has
/// Hopper's instructions, the activation is one that they are used with, and rows of `x` and of `h` (as many as pairs) end before 2^35 elements, `shuffled` whether the weights are
/// [shuffled](shuffle::shuffle_weights). `multiprocessors`: the device's.
pub const fn plan(
    dtype: DType,
    shape: &FusedShape,
    path: FusedPath,
    streams: bool,
    wgmma: bool,
    shuffled: bool,
    multiprocessors: u32,
) -> Option<Plan> {
    use kernel::*;
    let fits = streams
        && matches!(dtype, DType::F16 | DType::Bf16)
        && shape.hidden.is_multiple_of(8)
        && shape.intermediate.is_multiple_of(8);
    // Maps of tensors have something in them.
    let wgmma = wgmma && shape.hidden > 0 && shape.intermediate > 0 && shape.bins() <= fused_wgmma::MAX_BINS;
    let vector =
        if fits && wgmma && !shuffled { FusedPath::vector_parts(shape, multiprocessors as usize) } else { None };
    let auto = matches!(path, FusedPath::Auto);
    let path = match path {
        FusedPath::Auto if !fits => FusedPath::Fma,
        // What is gained by one launch and one stream of weights is more than the blocks' waiting for each other costs.
        FusedPath::Auto
            if (shape.tokens == 1 || shape.pairs() <= 2)
                && product(&[shape.pairs(), shape.hidden, shape.intermediate])
                    >= if narrow(shape) { SMALL } else { LARGE / 2 }
                && matches!(vector, Some(parts) if parts.room >= 4 * fused_vector::STEPS * 256) =>
        {
            FusedPath::Vector
        }
        FusedPath::Auto => FusedPath::choose(shape, wgmma, shuffled),
        path => path,
    };
    if shuffled && !(path.is_wgmma() && shuffle::takes(dtype, shape.hidden, shape.intermediate)) {
        return None;
    }
    if !matches!(path, FusedPath::Fma) && !fits
        || path.is_wgmma() && !(wgmma && path.has_room_for(shape.bins(), false))
        || matches!(path, FusedPath::Direct) && shape.pairs() > fused_stream::DIRECT_PAIRS
        || matches!(path, FusedPath::Wgmma16) && shape.pairs() > fused_wgmma::DIRECT_PAIRS
        || matches!(path, FusedPath::Vector) && vector.is_none()
    {
        return None;
    }
    if !matches!(dtype, DType::F32 | DType::F16 | DType::Bf16) {
        return None;
    }
    let is_bf16 = matches!(dtype, DType::Bf16);
    if path.is_wgmma() {
        use fused_wgmma::*;
        let cluster = path.cluster(shape, multiprocessors);
        let two = cluster == PAIR;
        let (up, down) = match (path, is_bf16) {
            (_, true) if two => (moe_fused_wgmma_up_t176_two_bf16::ENTRY, moe_fused_wgmma_down_t176_two_bf16::ENTRY),
            (_, false) if two => (moe_fused_wgmma_up_t176_two_f16::ENTRY, moe_fused_wgmma_down_t176_two_f16::ENTRY),
            (FusedPath::Wgmma16, true) => (moe_fused_wgmma_up_t16_bf16::ENTRY, moe_fused_wgmma_down_t16_bf16::ENTRY),
            (FusedPath::Wgmma16, false) => (moe_fused_wgmma_up_t16_f16::ENTRY, moe_fused_wgmma_down_t16_f16::ENTRY),
            (FusedPath::Wgmma64, true) => (moe_fused_wgmma_up_t64_bf16::ENTRY, moe_fused_wgmma_down_t64_bf16::ENTRY),
            (FusedPath::Wgmma64, false) => (moe_fused_wgmma_up_t64_f16::ENTRY, moe_fused_wgmma_down_t64_f16::ENTRY),
            (_, true) => (moe_fused_wgmma_up_t176_bf16::ENTRY, moe_fused_wgmma_down_t176_bf16::ENTRY),
            (_, false) => (moe_fused_wgmma_up_t176_f16::ENTRY, moe_fused_wgmma_down_t176_f16::ENTRY),
        };
        let rounded = match (path, is_bf16) {
            (_, true) if two => Some(moe_fused_wgmma_down_rounded_t176_two_bf16::ENTRY),
            (_, false) if two => Some(moe_fused_wgmma_down_rounded_t176_two_f16::ENTRY),
            (FusedPath::Wgmma64, true) => Some(moe_fused_wgmma_down_rounded_t64_bf16::ENTRY),
            (FusedPath::Wgmma64, false) => Some(moe_fused_wgmma_down_rounded_t64_f16::ENTRY),
            (FusedPath::Wgmma176, true) => Some(moe_fused_wgmma_down_rounded_t176_bf16::ENTRY),
            (FusedPath::Wgmma176, false) => Some(moe_fused_wgmma_down_rounded_t176_f16::ENTRY),
            _ => None,
        };
        let rounded = match rounded {
            Some(down) if is_bf16 => Some((down, fused_reduce::moe_fused_reduce_rounded_bf16::ENTRY)),
            Some(down) => Some((down, fused_reduce::moe_fused_reduce_rounded_f16::ENTRY)),
            None => None,
        };
        let added = match (path, is_bf16) {
            (_, true) if two => Some(moe_fused_wgmma_down_added_t176_two_bf16::ENTRY),
            (_, false) if two => Some(moe_fused_wgmma_down_added_t176_two_f16::ENTRY),
            (FusedPath::Wgmma176, true) => Some(moe_fused_wgmma_down_added_t176_bf16::ENTRY),
            (FusedPath::Wgmma176, false) => Some(moe_fused_wgmma_down_added_t176_f16::ENTRY),
            _ => None,
        };
        // What 16 bits lose is nothing beside the rounding of a bf16 result. Measured on an H200: `Wgmma64` gains 0.2 to 1.5 % where the sum begins early, and loses up to 0.7 % with less to add up. How
        // many tokens there are decides that under `Auto` only, so that by one path none depends on others.
        let packs = auto && striped_bytes(product(&[shape.pairs(), shape.hidden, 2]), multiprocessors);
        let packed = match (path, is_bf16) {
            (_, true) if two => Some(moe_fused_wgmma_down_packed_t176_two_bf16::ENTRY),
            (FusedPath::Wgmma176, true) => Some(moe_fused_wgmma_down_packed_t176_bf16::ENTRY),
            (FusedPath::Wgmma64, true) if packs => Some(moe_fused_wgmma_down_packed_t64_bf16::ENTRY),
            _ => None,
        };
        let packed = match packed {
            Some(down) => Some((down, fused_reduce::moe_fused_reduce_packed_bf16::ENTRY)),
            None => None,
        };
        return Some(Plan { path, products: Products::Wgmma(up, down), cluster, rounded, added, packed });
    }
    if let (FusedPath::Vector, Some(parts)) = (path, vector) {
        use fused_vector::*;
        let entry = match (is_bf16, parts.words) {
            (false, false) => moe_fused_vector_f16::ENTRY,
            (true, false) => moe_fused_vector_bf16::ENTRY,
            (false, true) => moe_fused_vector_words_f16::ENTRY,
            (true, true) => moe_fused_vector_words_bf16::ENTRY,
        };
        return Some(Plan {
            path,
            products: Products::Vector(entry, parts),
            cluster: 1,
            rounded: None,
            added: None,
            packed: None,
        });
    }
    let (f16, bf16) = match path {
        FusedPath::Host | FusedPath::Vector | FusedPath::Wgmma16 | FusedPath::Wgmma64 | FusedPath::Wgmma176 => {
            return None;
        }
        FusedPath::Auto | FusedPath::Fma if matches!(dtype, DType::F32) => {
            let f32 = (moe_fused_fma_up_f32::ENTRY, moe_fused_fma_down_f32::ENTRY);
            (f32, f32)
        }
        FusedPath::Auto | FusedPath::Fma => (
            (moe_fused_fma_up_f16::ENTRY, moe_fused_fma_down_f16::ENTRY),
            (moe_fused_fma_up_bf16::ENTRY, moe_fused_fma_down_bf16::ENTRY),
        ),
        FusedPath::Direct | FusedPath::Stream8 => (
            (moe_fused_stream_up_t8_f16::ENTRY, moe_fused_stream_down_t8_f16::ENTRY),
            (moe_fused_stream_up_t8_bf16::ENTRY, moe_fused_stream_down_t8_bf16::ENTRY),
        ),
        FusedPath::Stream16 => (
            (moe_fused_stream_up_t16_f16::ENTRY, moe_fused_stream_down_t16_f16::ENTRY),
            (moe_fused_stream_up_t16_bf16::ENTRY, moe_fused_stream_down_t16_bf16::ENTRY),
        ),
        FusedPath::Tile32 => (
            (moe_fused_tile_up_t32_f16::ENTRY, moe_fused_tile_down_t32_f16::ENTRY),
            (moe_fused_tile_up_t32_bf16::ENTRY, moe_fused_tile_down_t32_bf16::ENTRY),
        ),
        FusedPath::Tile64 => (
            (moe_fused_tile_up_t64_f16::ENTRY, moe_fused_tile_down_t64_f16::ENTRY),
            (moe_fused_tile_up_t64_bf16::ENTRY, moe_fused_tile_down_t64_bf16::ENTRY),
        ),
        FusedPath::Tile128 => (
            (moe_fused_tile_up_t128_f16::ENTRY, moe_fused_tile_down_t128_f16::ENTRY),
            (moe_fused_tile_up_t128_bf16::ENTRY, moe_fused_tile_down_t128_bf16::ENTRY),
        ),
    };
    let (up, down) = if is_bf16 { bf16 } else { f16 };
    Some(Plan { path, products: Products::Blocks(up, down), cluster: 1, rounded: None, added: None, packed: None })
}

/// A number that no other launch of this process has, and nobody else knows: the first is random.
pub(super) fn launch_number() -> u64 {
    static NEXT: LazyLock<AtomicU64> = LazyLock::new(|| AtomicU64::new(RandomState::new().hash_one(()) >> 2 | 1));
    NEXT.fetch_add(1, Ordering::Relaxed)
}

impl Plan {
    /// How to launch a product of `n` outputs, with or without values, and inner dimension `k`, on a device with so many
    /// multiprocessors; for [`FusedPath::Vector`] the only launch.
    pub const fn geometry(
        &self,
        shape: &FusedShape,
        n: usize,
        k: usize,
        gated: bool,
        multiprocessors: u32,
    ) -> Geometry {
        if self.path.is_wgmma() {
            return self.path.wgmma_geometry(self.cluster, shape.bins(), false, multiprocessors);
        }
        if let Products::Vector(_, parts) = self.products {
            let geometry = Geometry::linear(parts.blocks as u32, fused_vector::threads(parts.words) as u32);
            return geometry.shared_bytes(parts.shared_bytes as u32).resident();
        }
        let block = self.path.block();
        let (rows, threads, bytes) = match self.path {
            FusedPath::Auto | FusedPath::Fma | FusedPath::Host => {
                (fused_fma::COLUMNS, fused_fma::THREADS, fused_fma::SHARED_BYTES)
            }
            FusedPath::Direct | FusedPath::Stream8 | FusedPath::Stream16 => {
                let rows = fused_stream::ROWS * (fused_stream::WARPS >> split_log2(k));
                (rows, fused_stream::THREADS, fused_stream::shared_bytes(block / 8))
            }
            _ => {
                let stages = if block == 128 { 3 } else { 4 };
                (fused_tile::ROWS, fused_tile::THREADS, fused_tile::shared_bytes(block / 16, stages))
            }
        };
        let columns = n.div_ceil(if gated { rows / 2 } else { rows }) as u32;
        let blocks = match self.path {
            FusedPath::Direct => shape.pairs(),
            _ => sort::capacity(shape.pairs(), shape.bins(), block, false) / block,
        } as u32;
        let grid = if self.path.is_tile() { [columns * blocks, 1, 1] } else { [columns, blocks, 1] };
        Geometry::new(grid, [threads as u32, 1, 1]).shared_bytes(bytes as u32)
    }

    /// Whether the second product begins while the first still runs: where blocks of threads have some items each, so that most experts are done when the first of them ends. With
    /// fewer, what it takes to know is lost. Measured on an H200: gains with 5.8 items of the first product for each multiprocessor, none with 3.9. There are words for so many blocks.
    const fn begins_early(&self, shape: &FusedShape, multiprocessors: u32) -> bool {
        let experts = if shape.pairs() < shape.bins() { shape.pairs() } else { shape.bins() };
        let items = product(&[experts, shape.intermediate.div_ceil(self.path.wgmma_tile()[0] / 2)]);
        multiprocessors as usize <= progress::MAX_BLOCKS
            && (matches!(self.path, FusedPath::Wgmma176) || items >= product(&[5, multiprocessors as usize]))
    }

    /// Columns of a stripe of the second product, and whether the sum, of so many `bytes`, begins with the first while the next ones are computed. Measured on an H200, where both products
    /// overlap: with 17 MB and more the sum costs less then (Qwen3-30B, 512 and 768 tokens, 2 and 5 %, DeepSeek-V3, 512 tokens, 1.7 %), until a stripe has 17 MB itself. With less the order
    /// by itself is 0.1 to 1 % better for matrices of 3 MB, and up to 0.3 % worse for those of 29 MB and more.
    const fn stripe(&self, shape: &FusedShape, multiprocessors: u32, bytes: usize) -> (usize, bool) {
        let large = striped_bytes(bytes, multiprocessors);
        if matches!(self.path, FusedPath::Wgmma176) || !self.begins_early(shape, multiprocessors) {
            (shape.hidden, false)
        } else if large && matches!(self.path, FusedPath::Wgmma64) && shape.pairs() <= STRIPED_PAIRS {
            (stripe(shape.hidden), true)
        } else if !large && product(&[shape.hidden, shape.intermediate]) <= 1 << 22 {
            (256, false)
        } else {
            (shape.hidden, false)
        }
    }

    /// How to launch the first product and the second.
    const fn geometries(&self, shape: &FusedShape, gated: bool, multiprocessors: u32) -> (Geometry, Geometry) {
        let FusedShape { hidden, intermediate, .. } = *shape;
        (
            self.geometry(shape, intermediate, hidden, gated, multiprocessors),
            self.geometry(shape, hidden, intermediate, false, multiprocessors),
        )
    }

    const fn sorts(&self) -> bool {
        !matches!(self.path, FusedPath::Direct | FusedPath::Wgmma16 | FusedPath::Vector)
    }
}

/// The map of weights `[experts, rows, k]` of elements of 16 or 8 bits for the copy engine; see [`fused_wgmma`]. `n` outputs; `gate_up`
/// for the first product; so many `rows` of weights at a time.
pub(super) fn weight_map(
    device: &Device,
    base: *const c_void,
    dtype: DType,
    [experts, n, k]: [usize; 3],
    gate_up: Option<GateUp>,
    rows: usize,
    shuffled: bool,
) -> Result<TensorMap> {
    if shuffled {
        return device.tensor_map(&shuffle::map(base, dtype, [experts, n, k], gate_up, rows));
    }
    let (experts, n, k) = (experts.max(1) as u64, n as u64, k as u64);
    let groups = rows as u32 / 16;
    let step = (fused_wgmma::LINE / dtype.size()) as u32;
    let row = k * dtype.size() as u64;
    // From innermost on: elements of a row, 8 rows, gate and value, groups of 8 outputs, experts.
    let (dims, strides, box_dims) = match gate_up {
        Some(GateUp::Halves) => {
            ([k, 8, 2, n / 8, experts], [row, n * row, 8 * row, 2 * n * row], [step, 8, 2, groups, 1])
        }
        Some(GateUp::Interleaved) => {
            ([k, 8, 2, n / 8, experts], [2 * row, row, 16 * row, 2 * n * row], [step, 8, 2, groups, 1])
        }
        // The values lie outside of the tensor: zeroes.
        Some(GateUp::GateOnly) => ([k, 8, 1, n / 8, experts], [row, row, 8 * row, n * row], [step, 8, 2, groups, 1]),
        None => ([k, 8, n / 8, 1, experts], [row, 8 * row, n * row, n * row], [step, 8, 2 * groups, 1, 1]),
    };
    device.tensor_map(&TensorMapDescription {
        base: base as u64,
        dtype,
        rank: 5,
        dims,
        strides,
        box_dims,
        swizzle: Swizzle::B128,
    })
}

/// Pointers and scalars of a call, for [`launch`].
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Operands {
    /// Receives the result: `[tokens, hidden]`, rows `out_row` apart.
    pub out: *mut c_void,
    /// From row to row of `out`, in elements.
    pub out_row: usize,
    /// The tokens: `[tokens, hidden]`, rows `x_row` apart.
    pub x: *const c_void,
    /// From row to row of `x`, in elements.
    pub x_row: usize,
    /// Weights of the first product: `[experts, rows · intermediate, hidden]`.
    pub w13: *const c_void,
    /// Weights of the second product: `[experts, hidden, intermediate]`.
    pub w2: *const c_void,
    /// Bias of the first product, `[experts, rows · intermediate]`, or null.
    pub bias13: *const c_void,
    /// Bias of the second product, `[experts, hidden]`, or null.
    pub bias2: *const c_void,
    /// `w13` of the shared experts; null if there are none.
    pub shared13: *const c_void,
    /// `w2` of the shared experts; null if there are none.
    pub shared2: *const c_void,
    /// `bias13` of the shared experts, or null.
    pub shared_bias13: *const c_void,
    /// `bias2` of the shared experts, or null.
    pub shared_bias2: *const c_void,
    /// Experts of each token: `[tokens, top_k]`.
    pub topk_ids: *const i32,
    /// Their weights: `[tokens, top_k]`.
    pub topk_weights: *const f32,
    /// Places of all experts on this device or -1, `[global_experts]`; null if all are here.
    pub expert_map: *const i32,
    /// How many tokens there are, `[1]`; null for all.
    pub num_tokens: *const i32,
    /// Routed experts of all devices.
    pub global_experts: usize,
    /// What the rows of `w13` are.
    pub gate_up: GateUp,
    /// What happens between the products.
    pub activation: ExpertActivation,
    /// Whether results may be added up in any order; see [`FusedOptions::unordered`].
    pub unordered: bool,
    /// Whether results of slots may be rounded; see [`FusedOptions::rounded_slots`].
    pub rounded_slots: bool,
    /// Whether results of slots stay in f32; see [`FusedOptions::f32_slots`].
    pub f32_slots: bool,
    /// Whether weights are [shuffled](shuffle::shuffle_weights), as the plan was made for.
    pub shuffled: bool,
}

impl Operands {
    /// Null pointers, for the caller to set, with dense rows and all experts here; what may stay null is optional.
    pub const fn new(shape: &FusedShape) -> Self {
        Self {
            out: std::ptr::null_mut(),
            out_row: shape.hidden,
            x: std::ptr::null(),
            x_row: shape.hidden,
            w13: std::ptr::null(),
            w2: std::ptr::null(),
            bias13: std::ptr::null(),
            bias2: std::ptr::null(),
            shared13: std::ptr::null(),
            shared2: std::ptr::null(),
            shared_bias13: std::ptr::null(),
            shared_bias2: std::ptr::null(),
            topk_ids: std::ptr::null(),
            topk_weights: std::ptr::null(),
            expert_map: std::ptr::null(),
            num_tokens: std::ptr::null(),
            global_experts: shape.experts,
            gate_up: GateUp::Halves,
            activation: ExpertActivation::Silu,
            unordered: false,
            rounded_slots: false,
            f32_slots: false,
            shuffled: false,
        }
    }
}

/// The [`Plan`] with which [`fused`](fn@fused) launches these operands on a device, from addresses, strides and extents, nothing behind them: `plan.path` is the path taken.
///
/// [`FusedPath::Auto`] uses the tensor cores for f16 and bf16 if `hidden` and `intermediate` are multiples of 8, weights and `x` lie at multiples of 16 bytes and
/// rows of `x` as well; anything else is [`FusedPath::Fma`], many times slower. [`FusedPath::Host`] is for the checked function only, which takes it under `Auto` where
/// [`host_products`](crate::SimtOptions::host_products) is on.
///
/// # Errors
/// [`Error::Unsupported`] if `path` names one that does not take these, and [`Error::Value`] for more pairs than it can number.
pub fn plan_of(device: &Device, dtype: DType, shape: &FusedShape, path: FusedPath, o: &Operands) -> Result<Plan> {
    let aligned = |p: *const c_void| (p as usize).is_multiple_of(16);
    let streams = [o.x, o.w13, o.w2, o.shared13, o.shared2].into_iter().all(aligned)
        && (shape.tokens == 1 || (o.x_row * dtype.size()).is_multiple_of(16));
    let properties = device.properties();
    let wgmma = properties.compute_capability == (9, 0)
        && o.activation != ExpertActivation::Gelu
        && numbers_rows(shape, o.x_row);
    let plan = plan(dtype, shape, path, streams, wgmma, o.shuffled, properties.multiprocessors);
    let plan = plan.ok_or_else(|| {
        let what = format!(
            "the path {path:?} does not take {}; all but `Fma` take 16-bit floats in rows and at addresses of multiples of 16 bytes, `Direct` up to {} pairs, `Wgmma16` up to {}, \
             `Vector` up to {}, with some 64 Ki elements of `x` and between the products, `Wgmma..` and `Vector` on Hopper, with any activation but `Gelu`, up to {} experts (`Wgmma176` 653), and rows of `x` and \
             between the products that end before 2^35 elements; shuffled weights take a `Wgmma..` path and widths of multiples of 64; use FusedPath::Auto",
            refused(device, dtype, shape, path, o),
            fused_stream::DIRECT_PAIRS,
            fused_wgmma::DIRECT_PAIRS,
            fused_vector::MAX_PAIRS,
            fused_wgmma::MAX_BINS,
        );
        Error::Unsupported { op: OP, what }
    })?;
    // Grids are limited in height, and in all.
    let block = plan.path.block();
    let blocks = sort::capacity(shape.pairs(), shape.bins(), block, false) / block;
    let rows = product(&[o.gate_up.rows(), shape.intermediate]);
    let columns = rows.max(shape.hidden).div_ceil(fused_tile::ROWS).max(1);
    let most = match plan.path {
        path if path.is_wgmma() => items::MAX_DRAWN / (2 * columns),
        path if path.is_tile() => i32::MAX as usize / columns,
        _ => 65535,
    };
    check_blocks(OP, blocks, most, block)?;
    Ok(plan)
}

/// The first thing for which [`plan`] gives nothing.
fn refused(device: &Device, dtype: DType, shape: &FusedShape, path: FusedPath, o: &Operands) -> String {
    let FusedShape { tokens, hidden, intermediate, .. } = *shape;
    let (pairs, bins, size) = (shape.pairs(), shape.bins(), dtype.size());
    let hopper = device.properties().compute_capability == (9, 0);
    // What `Auto` comes to where it is refused, which it is with shuffled weights alone.
    let wgmma = path.is_wgmma() || matches!(path, FusedPath::Auto);
    let fast = !matches!(path, FusedPath::Fma);
    let ours = wgmma || matches!(path, FusedPath::Vector);
    let starts = [("x", o.x), ("w13", o.w13), ("w2", o.w2), ("shared.w13", o.shared13), ("shared.w2", o.shared2)];
    let misaligned = starts.into_iter().find(|(_, start)| !start.addr().is_multiple_of(16));
    let most = match path {
        FusedPath::Direct => fused_stream::DIRECT_PAIRS,
        FusedPath::Wgmma16 => fused_wgmma::DIRECT_PAIRS,
        FusedPath::Vector => fused_vector::MAX_PAIRS,
        _ => usize::MAX,
    };
    let conditions: [(bool, &dyn Fn() -> String); 11] = [
        (!o.shuffled || wgmma, &|| "shuffled weights".into()),
        (!o.shuffled || shuffle::takes(dtype, hidden, intermediate), &|| {
            format!("shuffled weights of {dtype}, {hidden} and {intermediate} wide")
        }),
        (!fast || dtype != DType::F32, &|| "f32".into()),
        (!fast || hidden.is_multiple_of(8) && intermediate.is_multiple_of(8), &|| {
            format!("rows of {hidden} and {intermediate} elements")
        }),
        (!fast || misaligned.is_none(), &|| {
            misaligned.map_or_else(String::new, |(arg, start)| format!("`{arg}` at {start:p}"))
        }),
        (!fast || tokens < 2 || (o.x_row * size).is_multiple_of(16), &|| format!("rows of `x` {} apart", o.x_row)),
        (pairs <= most, &|| format!("{pairs} pairs")),
        (!ours || hopper, &|| device.name()),
        (!ours || o.activation != ExpertActivation::Gelu, &|| "the activation `Gelu`".into()),
        (!ours || hidden > 0 && intermediate > 0 && numbers_rows(shape, o.x_row), &|| {
            format!("{tokens} rows of {hidden} elements, {} apart, and {pairs} of {intermediate}", o.x_row)
        }),
        (!wgmma || path.has_room_for(bins, false), &|| format!("{bins} experts")),
    ];
    let first = conditions.iter().find(|(holds, _)| !holds);
    first.map_or_else(
        || format!("{tokens} tokens of {pairs} pairs, {hidden} and {intermediate} wide"),
        |(_, what)| what(),
    )
}

/// Whether 32 bits number where rows of `x`, `x_row` elements apart, and of `h` start, in units of 16 bytes: as kernels for Hopper keep it.
pub(super) const fn numbers_rows(shape: &FusedShape, x_row: usize) -> bool {
    most(product(&[shape.tokens, x_row]), product(&[shape.pairs(), shape.intermediate])) < 1 << 35
}

/// The error for more blocks of pairs than can be numbered.
pub(super) fn check_blocks(op: &'static str, blocks: usize, most: usize, block: usize) -> Result<()> {
    if blocks <= most {
        return Ok(());
    }
    let (expected, got) = (format!("at most {most} blocks of {block} pairs"), blocks.to_string());
    Err(Error::Value { op, arg: "topk_ids", expected, got })
}

/// Launches on raw pointers (layer L1): sorting unless the path does without, two products, and the sum over slots. [`plan_of`] makes the plan.
///
/// # Errors
/// Those of [`Stream::launch`].
///
/// # Safety
/// The pointers are device memory of the documented sizes until the launches are done, for the streaming paths aligned to
/// 16 bytes like every row; `workspace` has [`FusedShape::workspace_bytes`], aligned to 16. No output overlaps another
/// argument. `plan` is that of [`plan_of`] for these operands; one of [`plan`] is for their alignment and device, and blocks of pairs times blocks of outputs
/// stay below what grids and items can number: 2^28 for `Wgmma..`, and no more than 65535 blocks of pairs for the paths without tiles; and for `Wgmma..` rows of `x` and of `h` end before 2^35 elements.
pub unsafe fn launch(
    stream: &Stream,
    dtype: DType,
    plan: &Plan,
    shape: &FusedShape,
    o: &Operands,
    workspace: *mut c_void,
) -> Result<()> {
    let at = Workspace::new(shape, dtype, plan.path.block());
    let part = |offset: usize| workspace.wrapping_byte_add(offset);
    let (tokens, top_k, slots) = (shape.tokens as u32, shape.top_k as u32, shape.slots() as u32);
    let (experts, local, shared_experts) = (o.global_experts as u32, shape.experts as u32, shape.shared_experts as u32);
    let (mut sorted_ids, mut expert_ids) = (std::ptr::null(), std::ptr::null());
    let multiprocessors = stream.device().properties().multiprocessors;
    let wgmma = plan.path.is_wgmma();
    let rounds = o.rounded_slots && plan.rounded.is_some();
    // Rounded results where that pays.
    let added = plan.added.filter(|_| o.unordered && rounds && adds_rounded(shape, dtype, multiprocessors));
    // Without slots there is nothing to add up, nor room to do it in.
    let unordered = added.is_some() || o.unordered && wgmma && plan.sorts() && slots > 0 && !rounds;
    // The second product and the sum of results of 16 bits.
    let halved = match o {
        _ if rounds => plan.rounded,
        _ if unordered => None,
        // One alone is not added to anything: a sum of half as much takes longer (rounded, 6 % of the block with 4096 tokens of Llama 4 Scout).
        o if o.f32_slots || slots < 2 => None,
        _ => plan.packed,
    };
    let size = if halved.is_some() { dtype.size() } else { 4 };
    // They are in their type and place then: there is nothing left to do.
    let at_once = added.is_some() && takes_sums(o.out, o.out_row, shape.hidden, o.num_tokens);
    // Where the second product leaves its results.
    let results = if at_once { o.out } else { part(at.partial) };
    if plan.sorts() {
        (sorted_ids, expert_ids) = (part(at.sorted_ids).cast::<i32>(), part(at.expert_ids).cast::<i32>());
        let args = sort::Args {
            sorted_ids: sorted_ids.cast_mut(),
            expert_ids: expert_ids.cast_mut(),
            totals: part(at.totals).cast(),
            sorted_weights: if wgmma { part(at.sorted_weights).cast() } else { std::ptr::null_mut() },
            positions: std::ptr::null_mut(),
            offsets: if wgmma { part(at.offsets).cast() } else { std::ptr::null_mut() },
            expert_counts: if wgmma { part(at.expert_counts).cast() } else { std::ptr::null_mut() },
            invalid: std::ptr::null_mut(),
            zero: if unordered { results.cast() } else { std::ptr::null_mut() },
            zero_bytes: if unordered { shape.tokens * shape.hidden * size } else { 0 },
            topk_ids: o.topk_ids,
            topk_weights: if wgmma { o.topk_weights } else { std::ptr::null() },
            expert_map: o.expert_map,
            num_tokens: o.num_tokens,
            table: std::ptr::null(),
            tokens,
            top_k,
            slots,
            experts,
            local,
            shared_experts,
            block: plan.path.block() as u32,
            items: 0,
            chunks: 0,
            capacity: at.capacity as u32,
            flags: 0,
        };
        // SAFETY: forwarded to the caller.
        unsafe { sort::launch(stream, &args, part(at.sort)) }?;
    }
    let (activation, alpha, limit) = o.activation.parts();
    let up = Args {
        h: part(at.h),
        partial: results.cast(),
        x: o.x,
        x_row: o.x_row,
        weights: o.w13,
        bias: o.bias13,
        shared_weights: o.shared13,
        shared_bias: o.shared_bias13,
        topk_ids: o.topk_ids,
        topk_weights: o.topk_weights,
        expert_map: o.expert_map,
        num_tokens: o.num_tokens,
        sorted_ids,
        expert_ids,
        tokens,
        top_k,
        slots,
        experts,
        local,
        shared_experts,
        n: shape.intermediate as u32,
        k: shape.hidden as u32,
        layout: o.gate_up.layout(),
        activation,
        alpha,
        limit,
        split_log2: split_log2(shape.hidden),
    };
    let down = Args {
        weights: o.w2,
        bias: o.bias2,
        shared_weights: o.shared2,
        shared_bias: o.shared_bias2,
        n: up.k,
        k: up.n,
        layout: kernel::PLAIN,
        split_log2: split_log2(shape.intermediate),
        ..up
    };
    let bytes = product(&[shape.pairs(), shape.hidden, size]);
    let kept = wgmma && !matches!(plan.path, FusedPath::Wgmma176) && !unordered && bytes <= KEPT_BYTES;
    let (stripe, early) =
        if wgmma && !unordered { plan.stripe(shape, multiprocessors, bytes) } else { (shape.hidden, false) };
    let left = if early { part(at.left).cast() } else { std::ptr::null_mut() };
    // A row for each token where results are added up as they come.
    let summed = if unordered { product(&[shape.tokens, shape.hidden, size]) } else { bytes };
    let kept = kept || early;
    let h_row = product(&[slots as usize, shape.intermediate, dtype.size()]);
    let wide = matches!(plan.path, FusedPath::Wgmma176);
    // By the sum, if there is one.
    let dead = wgmma && !at_once && given_up(up.h, shape.tokens, h_row);
    let once = kept || wide && dead && !unordered && bytes < LAST_READ_BYTES;
    // Not where weights of the second product come two steps at a time: those that leave first cost 0.4 % there.
    let steps = shape.intermediate.div_ceil(fused_wgmma::STEP);
    // Sums are added to again and again: 4096 tokens of Qwen3-30B and DeepSeek-V3 take 0.5 % less where they stay.
    let kept = kept || at_once || once && bytes <= KEPT_WIDE_BYTES && steps < fused_wgmma::IN_TWOS as usize;
    let mut reduce = ReduceArgs {
        out: o.out,
        partial: up.partial.cast(),
        topk_ids: o.topk_ids,
        expert_map: o.expert_map,
        num_tokens: o.num_tokens,
        out_row: o.out_row,
        tokens,
        top_k,
        slots,
        experts,
        local,
        shared_experts,
        n: up.k,
        discard: once_read(once, part(at.partial), summed, bytes / shape.pairs().max(1)),
        across: 0,
        left,
        stripe: stripe as u32,
        dead: if dead { up.h.cast() } else { std::ptr::null_mut() },
        dead_bytes: if dead { h_row as u32 } else { 0 },
    };
    if unordered {
        // One row for each token, as if there were one expert, which all go to.
        (reduce.top_k, reduce.slots) = (0, 1);
    }
    // Whatever follows one of these kernels may start early: each waits where it has to, and the first of them at once.
    let gated = o.gate_up != GateUp::GateOnly;
    let device = stream.device();
    let (first, second) = plan.geometries(shape, gated, multiprocessors);
    let (first, second) = (first.dependent(), second.dependent_on(&first));
    match plan.products {
        Products::Vector(entry, parts) => {
            let args = VectorArgs {
                out: o.out,
                out_row: o.out_row,
                h: if parts.words { part(Front::EXCHANGED) } else { up.h }.cast(),
                words: part(Front::CLAIMS).cast(),
                launch: launch_number(),
                x: o.x,
                x_row: o.x_row,
                w13: o.w13,
                bias13: o.bias13,
                w2: o.w2,
                bias2: o.bias2,
                shared13: o.shared13,
                shared_bias13: o.shared_bias13,
                shared2: o.shared2,
                shared_bias2: o.shared_bias2,
                topk_ids: o.topk_ids,
                topk_weights: o.topk_weights,
                expert_map: o.expert_map,
                num_tokens: o.num_tokens,
                tokens,
                top_k,
                slots,
                experts,
                local,
                shared_experts,
                hidden: up.k,
                intermediate: up.n,
                layout: up.layout,
                activation,
                alpha,
                limit,
                operands: parts.operands as u32,
                sums: parts.sums as u32,
                room: parts.room as u32,
            };
            // SAFETY: forwarded to the caller. Sums over slots are part of it.
            return unsafe { stream.launch(&entry, &first, &args) };
        }
        // SAFETY: forwarded to the caller.
        Products::Blocks(first_product, second_product) => unsafe {
            stream.launch(&first_product, &first, &up)?;
            stream.launch(&second_product, &second, &down)?;
        },
        Products::Wgmma(first_product, second_product) => {
            // Each block of a cluster brings a part.
            let rows = plan.path.wgmma_tile()[0] / plan.cluster;
            let maps = |routed: *const c_void, shared: *const c_void, n: usize, k: usize, gate_up: Option<GateUp>| {
                let of =
                    |base, experts| weight_map(device, base, DType::Bf16, [experts, n, k], gate_up, rows, o.shuffled);
                let map = of(routed, shape.experts)?;
                let shared = if shape.shared_experts == 0 { map } else { of(shared, shape.shared_experts)? };
                Ok::<_, Error>((map, shared))
            };
            let (map, shared_map) = maps(o.w13, o.shared13, shape.intermediate, shape.hidden, Some(o.gate_up))?;
            let (next_map, shared_next_map) = maps(o.w2, o.shared2, shape.hidden, shape.intermediate, None)?;
            let up = WgmmaArgs {
                h: up.h,
                partial: up.partial,
                x: o.x,
                x_row: o.x_row,
                map,
                shared_map,
                next_map,
                bias: up.bias,
                shared_bias: up.shared_bias,
                sorted_ids,
                sorted_weights: part(at.sorted_weights).cast(),
                offsets: part(at.offsets).cast(),
                expert_counts: part(at.expert_counts).cast(),
                topk_ids: o.topk_ids,
                topk_weights: o.topk_weights,
                expert_map: o.expert_map,
                num_tokens: o.num_tokens,
                tokens,
                top_k,
                slots,
                experts,
                local,
                bins: shape.bins() as u32,
                n: up.n,
                k: up.k,
                layout: up.layout,
                shuffled: if o.shuffled { shuffle::tile_rows(Some(o.gate_up)) as u32 } else { 0 },
                activation,
                alpha,
                limit,
                unordered: (unordered && added.is_none()) as u32,
                words: part(Front::DRAWS).cast(),
                launch: launch_number(),
                kept: dead as u32,
                progress: if plan.begins_early(shape, multiprocessors) {
                    part(at.progress).cast()
                } else {
                    std::ptr::null_mut()
                },
                left,
                stripe: stripe.div_ceil(plan.path.wgmma_tile()[0]) as u32,
            };
            let down = WgmmaArgs {
                map: next_map,
                shared_map: shared_next_map,
                bias: down.bias,
                shared_bias: down.shared_bias,
                n: down.n,
                k: down.k,
                layout: down.layout,
                shuffled: if o.shuffled { shuffle::tile_rows(None) as u32 } else { 0 },
                kept: kept as u32,
                ..up
            };
            // SAFETY: forwarded to the caller.
            unsafe {
                stream.launch(&first_product, &first, &up)?;
                let in_order = halved.map_or(second_product, |(down, _)| down);
                stream.launch(&added.unwrap_or(in_order), &second, &down)?;
            }
        }
    }
    if at_once {
        // Who waits for the second product waits for all before it.
        return Ok(());
    }
    let (entry, threads, columns) = match halved {
        Some((_, reduce)) => (reduce, fused_reduce::ROUNDED_THREADS, fused_reduce::ROUNDED_COLUMNS),
        None => reduce_entry(dtype, reduce.slots as usize),
    };
    reduce.across = sum_across(threads, columns, early);
    let geometry = sum_geometry(shape, threads, columns, early).dependent_on(&second);
    // SAFETY: forwarded to the caller.
    unsafe { stream.launch(&entry, &geometry, &reduce) }
}

/// As many bytes of results between the second product and the sum have room in Hopper's second-level cache beside the weights that stream by. Measured: 34 MB do,
/// 117 MB do not.
pub(super) const KEPT_BYTES: usize = 40 << 20;

/// The same for [`FusedPath::Wgmma176`]: with 24 and 47 MB 1 to 1.7 % less for the block, with 67 MB and more up to 1 % more.
const KEPT_WIDE_BYTES: usize = 48 << 20;

/// So many bytes and more leave the second-level cache as soon as the sum has read them. Measured on an H200: 0.2 to 1 % less for the block with 134 to 940 MB, 2 % more with 67 MB.
const LAST_READ_BYTES: usize = 128 << 20;

/// What the sum does with lines it has read of so many bytes of results at `partial`, in rows of `row` bytes. Those that may have been `kept` it discards: whole lines, and enough of them for it to be worth while.
pub(super) fn once_read(kept: bool, partial: *const c_void, bytes: usize, row: usize) -> u32 {
    if kept && bytes >= 1 << 18 && (partial as usize | row).is_multiple_of(128) {
        fused_reduce::DISCARDED
    } else if bytes >= LAST_READ_BYTES {
        fused_reduce::LAST_READ
    } else {
        0
    }
}

/// Up to how many bytes of `h` stay in the second-level cache and are given up by the sum: 0 to 4 % less for the block with 0.1 to 29 MB, nothing with 59 MB. Measured on an H200.
const GIVEN_UP_BYTES: usize = 32 << 20;

/// Whether the sum gives up `h`, rows of so many bytes for each token, in the second-level cache, from where it would be written to memory during the next launches: whole lines.
pub(super) fn given_up(h: *const c_void, tokens: usize, row: usize) -> bool {
    (h as usize | row).is_multiple_of(fused_reduce::LINE) && product(&[tokens, row]) <= GIVEN_UP_BYTES
}

/// The sum over so many slots, into f32, f16 or bf16, threads of a block, and columns of each.
pub(super) const fn reduce_entry(dtype: DType, slots: usize) -> (Entry<ReduceArgs>, usize, usize) {
    use fused_reduce::*;
    let eight = slots > 4;
    let entry = match (dtype, eight) {
        (DType::F32, true) => moe_fused_reduce_eight_f32::ENTRY,
        (DType::F16, true) => moe_fused_reduce_eight_f16::ENTRY,
        (_, true) => moe_fused_reduce_eight_bf16::ENTRY,
        (DType::F32, false) => moe_fused_reduce_f32::ENTRY,
        (DType::F16, false) => moe_fused_reduce_f16::ENTRY,
        (_, false) => moe_fused_reduce_bf16::ENTRY,
    };
    (entry, if eight { EIGHT_THREADS } else { THREADS }, COLUMNS)
}

/// A stripe that is summed up early has a number of so many columns.
const STRIPE: usize = 512;
/// From how many bytes of `partial` for each multiprocessor on sums begin early.
const STRIPED_BYTES: usize = 124 << 10;
/// Up to how many pairs.
pub(super) const STRIPED_PAIRS: usize = 6144;

/// Whether the results of slots, which may be rounded to `dtype` and added up in any order, are: where there are so many of them that the sum takes long, more of a token than two, and the second-level cache
/// holds the sums. Measured on an H200, in bursts and replayed on and on: 4096 tokens of Qwen3-30B (134 MB to 17 MB) take 6 and 5 % less; of Mixtral (two) 0.4 % less and 2 % more, of DeepSeek-V3 (59 MB of sums)
/// 1.3 % less and 2 % more.
const fn adds_rounded(shape: &FusedShape, dtype: DType, multiprocessors: u32) -> bool {
    adds_up(shape, dtype, multiprocessors) && product(&[shape.tokens, shape.hidden, dtype.size()]) <= KEPT_BYTES
}

/// The same wherever the sums are.
pub(super) const fn adds_up(shape: &FusedShape, dtype: DType, multiprocessors: u32) -> bool {
    striped_bytes(product(&[shape.pairs(), shape.hidden, dtype.size()]), multiprocessors) && shape.slots() > 2
}

/// Whether rounded results can be added up in `out` itself, 16 bytes at a time, which sorting zeroes: all of it, since it does not know how many tokens there are.
pub(super) fn takes_sums(out: *mut c_void, out_row: usize, hidden: usize, num_tokens: *const i32) -> bool {
    num_tokens.is_null() && out_row == hidden && (out as usize).is_multiple_of(16)
}

/// Columns of a stripe of so many that is summed up early.
pub(super) const fn stripe(hidden: usize) -> usize {
    product(&[STRIPE, hidden.div_ceil(STRIPE * progress::MAX_STRIPES)])
}

/// Whether there are enough bytes to be added up for that to pay.
pub(super) const fn striped_bytes(bytes: usize, multiprocessors: u32) -> bool {
    bytes >= product(&[STRIPED_BYTES, multiprocessors as usize])
}

/// Of how many threads, as a power of two, a token's columns are in a block of so many threads, each with so many `columns`; in stripes if the sum begins `early`.
pub(super) const fn sum_across(threads: usize, columns: usize, early: bool) -> u32 {
    let most = if early && STRIPE / columns < threads { STRIPE / columns } else { threads };
    most.ilog2()
}

pub(super) const fn sum_geometry(shape: &FusedShape, threads: usize, columns: usize, early: bool) -> Geometry {
    let across = sum_across(threads, columns, early);
    let tokens = shape.tokens.div_ceil(threads >> across) as u32;
    let blocks = shape.hidden.div_ceil(columns << across) as u32;
    Geometry::new([tokens, blocks, 1], [threads as u32, 1, 1])
}

/// Weights of shared experts.
#[derive(Debug)]
#[non_exhaustive]
#[must_use]
pub struct SharedExperts<'a, T: Element> {
    /// `[shared, rows · I, H]`, laid out as `w13`.
    pub w13: &'a Tensor<T>,
    /// `[shared, H, I]`.
    pub w2: &'a Tensor<T>,
    /// `[shared, rows · I]`.
    pub bias13: Option<&'a Tensor<T>>,
    /// `[shared, H]`.
    pub bias2: Option<&'a Tensor<T>>,
}

impl<T: Element> Clone for SharedExperts<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T: Element> Copy for SharedExperts<'_, T> {}

impl<'a, T: Element> SharedExperts<'a, T> {
    /// Without biases.
    pub const fn new(w13: &'a Tensor<T>, w2: &'a Tensor<T>) -> Self {
        Self { w13, w2, bias13: None, bias2: None }
    }

    /// With these biases.
    pub const fn biases(mut self, bias13: Option<&'a Tensor<T>>, bias2: Option<&'a Tensor<T>>) -> Self {
        (self.bias13, self.bias2) = (bias13, bias2);
        self
    }
}

/// Options of [`fused`].
#[derive(Debug)]
#[non_exhaustive]
#[must_use]
pub struct FusedOptions<'a, T: Element> {
    /// What happens between the products.
    pub activation: ExpertActivation,
    /// What the rows of `w13` are.
    pub gate_up: GateUp,
    /// `[experts, rows · I]`.
    pub bias13: Option<&'a Tensor<T>>,
    /// `[experts, H]`.
    pub bias2: Option<&'a Tensor<T>>,
    /// Experts that take every token, with weight 1. They have the width of the others; a wider one is several of them.
    pub shared: Option<SharedExperts<'a, T>>,
    /// Whether `topk_ids` lists the shared experts, with ids after those of the routed ones, and `topk_weights` their weights. Otherwise every token
    /// has them, and what lists one all the same has it besides.
    pub shared_listed: bool,
    /// `[all experts]`: the place in `w13` and `w2` of each expert that `topk_ids` may name, or -1 if it lives on another
    /// device. Without it they are all here.
    pub expert_map: Option<&'a Tensor<i32>>,
    /// `[1]`: how many tokens there are, if fewer than `x` has rows; rows of `out` beyond are left alone.
    pub num_tokens: Option<&'a Tensor<i32>>,
    /// Allows results to be added up in the order in which they come: less memory is written and read, but the last bits may
    /// differ from run to run. All is still in f32, with one rounding at the end, unless `rounded_slots` allow more. `Wgmma64` and `Wgmma176` make use of it.
    pub unordered: bool,
    /// Allows the weighted result of each slot to be rounded to `T` before those of a token are added up, in f32 and in their order as without: half as
    /// much lies between the second product and the sum. Results are as reproducible as without. `Wgmma64` and `Wgmma176` make use of it.
    ///
    /// With `unordered` as well, `Wgmma176` adds rounded results up in `T`, where a token has more than two, there are 124 KiB of them for each multiprocessor and more (16 MB on an H200), and `out` has 40 MiB at most: there is no sum then, each addition rounds, and the last bits may differ from run to run, as
    /// with `index_add_` in PyTorch. Others are added up in order.
    pub rounded_slots: bool,
    /// Keeps the result of each slot in f32 until those of a token are added up, unless `rounded_slots` allows less. Otherwise `Wgmma176`, and `Auto` with `Wgmma64` where that makes 124 KiB for each multiprocessor and more (16 MB on an H200), keep two results or more that become bf16, before they are weighted, in 11 bits: as
    /// f16 times a power of two that each slot has for 128 columns, so that the largest of them is about 2^14 in f16; half as much lies between the second product and the sum. Beside results' own
    /// rounding, to 8 bits, that is next to nothing. What loses more bits is smaller than 2^-27 of the largest of its 128 columns, or than 2^-126; where one of them is infinite, the slot's others are as f16 has them, and where its weight takes that power of two beyond f32
    /// a 0 beside what overflows becomes NaN.
    pub f32_slots: bool,
    /// Whether `w13` and `w2`, those of shared experts too, come from [`shuffle_weights`](super::shuffle_weights()): for the `Wgmma` paths, one
    /// of which [`FusedPath::Auto`] then is; widths are multiples of 128 bytes.
    pub shuffled: bool,
    /// Waits for `topk_ids` before anything is launched, and reports ids out of range as an error ([`check_ids`](super::check_ids())), and entries of `expert_map`: for debugging. Cannot be captured.
    pub checked: bool,
    /// Which kernels.
    pub path: FusedPath,
}

impl<T: Element> Clone for FusedOptions<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T: Element> Copy for FusedOptions<'_, T> {}

impl<T: Element> Default for FusedOptions<'_, T> {
    fn default() -> Self {
        Self {
            activation: ExpertActivation::default(),
            gate_up: GateUp::default(),
            bias13: None,
            bias2: None,
            shared: None,
            shared_listed: false,
            expert_map: None,
            num_tokens: None,
            unordered: false,
            rounded_slots: false,
            f32_slots: false,
            shuffled: false,
            checked: false,
            path: FusedPath::Auto,
        }
    }
}

impl<'a, T: Element> FusedOptions<'a, T> {
    /// With this activation.
    pub const fn activation(mut self, activation: ExpertActivation) -> Self {
        self.activation = activation;
        self
    }

    /// With this layout of `w13`.
    pub const fn gate_up(mut self, gate_up: GateUp) -> Self {
        self.gate_up = gate_up;
        self
    }

    /// With biases of the first and second product.
    pub const fn biases(mut self, bias13: Option<&'a Tensor<T>>, bias2: Option<&'a Tensor<T>>) -> Self {
        self.bias13 = bias13;
        self.bias2 = bias2;
        self
    }

    /// With shared experts `w13` and `w2`, without biases.
    pub const fn shared(mut self, w13: &'a Tensor<T>, w2: &'a Tensor<T>) -> Self {
        self.shared = Some(SharedExperts { w13, w2, bias13: None, bias2: None });
        self
    }

    /// With shared experts.
    pub const fn shared_experts(mut self, shared: SharedExperts<'a, T>) -> Self {
        self.shared = Some(shared);
        self
    }

    /// Whether `topk_ids` lists the shared experts.
    pub const fn shared_listed(mut self, listed: bool) -> Self {
        self.shared_listed = listed;
        self
    }

    /// With some experts elsewhere.
    pub const fn expert_map(mut self, map: &'a Tensor<i32>) -> Self {
        self.expert_map = Some(map);
        self
    }

    /// With a token count in device memory.
    pub const fn num_tokens(mut self, num_tokens: &'a Tensor<i32>) -> Self {
        self.num_tokens = Some(num_tokens);
        self
    }

    /// With results added up in any order, or not.
    pub const fn unordered(mut self, unordered: bool) -> Self {
        self.unordered = unordered;
        self
    }

    /// With each slot's result rounded, or not.
    pub const fn rounded_slots(mut self, rounded_slots: bool) -> Self {
        self.rounded_slots = rounded_slots;
        self
    }

    /// With each slot's result in f32, or not.
    pub const fn f32_slots(mut self, f32_slots: bool) -> Self {
        self.f32_slots = f32_slots;
        self
    }

    /// With shuffled weights, or not.
    pub const fn shuffled(mut self, shuffled: bool) -> Self {
        self.shuffled = shuffled;
        self
    }

    /// Whether ids out of range are an error.
    pub const fn checked(mut self, checked: bool) -> Self {
        self.checked = checked;
        self
    }

    /// With these kernels.
    pub const fn path(mut self, path: FusedPath) -> Self {
        self.path = path;
        self
    }
}

/// `out[t] = Σ w · down(act(gate_up(x[t])))` over the slots of token `t`.
///
/// `x` and `out`: `[tokens, H]`, each dense in its last dimension; `w13`: `[experts, 2 I, H]` ([`GateUp`]); `w2`: `[experts, H,
/// I]`; `topk_ids` and `topk_weights`: `[tokens, top_k]`; all but `x` and `out` contiguous. Ids of -1, of experts that live
/// elsewhere and out of range contribute nothing, nor do those to which `expert_map` gives a place out of range. `workspace` has [`FusedShape::workspace_bytes`]; what is in it does not matter.
/// It serves one stream at a time: another one waits for an event first.
///
/// Products and sums are in f32; the intermediate row is rounded to `T` after the activation; results are weighted and added
/// over the slots in their order in f32 (unless `options.unordered`), with one rounding at the end (and one of each slot's with
/// `options.rounded_slots`, and one to 11 bits where many tokens become bf16, without `options.f32_slots`). Element types: f32, f16, bf16.
///
/// # Errors
/// [`Shape`](Error::Shape), [`Stride`](Error::Stride), [`Value`](Error::Value), [`Alignment`](Error::Alignment),
/// [`Overlap`](Error::Overlap), [`WrongDevice`](Error::WrongDevice), [`DType`](Error::DType);
/// [`Value`](Error::Value) also for more than 2048 experts (shared ones included, or listed by `expert_map`), for tokens wider than 65535 · 512, and for more blocks of pairs than a grid numbers (of f32 and with
/// other paths without tiles 65535 of 16 pairs or of the path's);
/// with `options.checked` [`Value`](Error::Value) for `topk_ids` if an id is out of range, and [`Capture`](Error::Capture) while the stream is captured;
/// [`Unsupported`](Error::Unsupported) if `options.path` asks for kernels that do not take these tensors.
///
/// ```
/// use warploom::{DType, Device, Stream, Tensor, moe};
/// let device = Device::simt();
/// let stream = Stream::new(&device)?;
/// // Two experts of widths 2 and 1, with gates only and the activation max(g, 0)²: the first squares the sum of its
/// // inputs, the second twice that.
/// let w13 = Tensor::from_slice(&device, &[1.0f32, 1.0, 2.0, 2.0], &[2, 1, 2])?;
/// let w2 = Tensor::from_slice(&device, &[1.0f32, 0.0, 0.0, 1.0], &[2, 2, 1])?;
/// let x = Tensor::from_slice(&device, &[1.0f32, 2.0], &[1, 2])?;
/// let ids = Tensor::from_slice(&device, &[1, 0], &[1, 2])?;
/// let weights = Tensor::from_slice(&device, &[0.25f32, 0.75], &[1, 2])?;
/// let bytes = moe::FusedShape::new(1, 2, 2, 2, 1).workspace_bytes(DType::F32);
/// let (mut out, mut workspace) = (Tensor::zeros(&device, &[1, 2])?, Tensor::zeros(&device, &[bytes])?);
/// let options = moe::FusedOptions::default()
///     .activation(moe::ExpertActivation::Relu2)
///     .gate_up(moe::GateUp::GateOnly);
/// moe::fused(&stream, &mut out, &x, &w13, &w2, &ids, &weights, &options, &mut workspace)?;
/// assert_eq!(out.to_vec()?, [0.75 * 9.0, 0.25 * 36.0]);
/// # Ok::<(), warploom::Error>(())
/// ```
#[allow(clippy::too_many_arguments)]
pub fn fused<T: Float>(
    stream: &Stream,
    out: &mut Tensor<T>,
    x: &Tensor<T>,
    w13: &Tensor<T>,
    w2: &Tensor<T>,
    topk_ids: &Tensor<i32>,
    topk_weights: &Tensor<f32>,
    options: &FusedOptions<'_, T>,
    workspace: &mut Tensor<u8>,
) -> Result<()> {
    let mut call = Call::new(OP, stream);
    let shared = options.shared;
    let description = Description {
        x,
        topk_ids,
        topk_weights,
        w2: w2.shape(),
        shared_w2: shared.map(|s| s.w2.shape()),
        shared_listed: options.shared_listed,
        gate_up: options.gate_up,
        activation: options.activation,
        expert_map: options.expert_map,
        num_tokens: options.num_tokens,
        checked: options.checked,
    };
    let block = description.check(&call, out)?;
    let Block { shape, rows, global_experts, x: xs, out: outs } = block;
    let FusedShape { tokens, experts, hidden, intermediate, shared_experts, .. } = shape;
    first_weights(&call, "w13", w13, [experts, rows, hidden], options.gate_up)?;
    dense(&call, "w2", Some(w2), &[experts, hidden, intermediate])?;
    dense(&call, "bias13", options.bias13, &[experts, rows])?;
    dense(&call, "bias2", options.bias2, &[experts, hidden])?;
    if let Some(s) = shared {
        first_weights(&call, "shared.w13", s.w13, [shared_experts, rows, hidden], options.gate_up)?;
    }
    dense(&call, "shared.w2", shared.map(|s| s.w2), &[shared_experts, hidden, intermediate])?;
    dense(&call, "shared.bias13", shared.and_then(|s| s.bias13), &[shared_experts, rows])?;
    dense(&call, "shared.bias2", shared.and_then(|s| s.bias2), &[shared_experts, hidden])?;
    let operands = Operands {
        out: call.write("out", out)?,
        out_row: outs.stride,
        x: call.read("x", x)?,
        x_row: xs.stride,
        w13: call.read("w13", w13)?,
        w2: call.read("w2", w2)?,
        bias13: call.read_opt("bias13", options.bias13)?,
        bias2: call.read_opt("bias2", options.bias2)?,
        shared13: call.read_opt("shared.w13", shared.map(|s| s.w13))?,
        shared2: call.read_opt("shared.w2", shared.map(|s| s.w2))?,
        shared_bias13: call.read_opt("shared.bias13", shared.and_then(|s| s.bias13))?,
        shared_bias2: call.read_opt("shared.bias2", shared.and_then(|s| s.bias2))?,
        topk_ids: call.read("topk_ids", topk_ids)?.cast(),
        topk_weights: call.read("topk_weights", topk_weights)?.cast(),
        expert_map: call.read_opt("expert_map", options.expert_map)?.cast(),
        num_tokens: call.read_opt("num_tokens", options.num_tokens)?.cast(),
        global_experts,
        gate_up: options.gate_up,
        activation: options.activation,
        unordered: options.unordered,
        rounded_slots: options.rounded_slots,
        f32_slots: options.f32_slots,
        shuffled: options.shuffled,
    };
    let workspace = block::workspace(&mut call, OP, workspace, shape.workspace_bytes(T::DTYPE))?;
    description.check_ids(OP, stream, &block)?;
    if tokens == 0 || hidden == 0 {
        return Ok(());
    }
    let host_products = stream.device().simt_options().is_some_and(|o| o.host_products) && !options.shuffled;
    if options.path == FusedPath::Host && !options.shuffled || (options.path == FusedPath::Auto && host_products) {
        // SAFETY: shapes, device and overlap were checked above.
        return unsafe { fused_host::<T>(stream, &shape, &operands) };
    }
    let plan = plan_of(stream.device(), T::DTYPE, &shape, options.path, &operands)?;
    // SAFETY: shapes, device, overlap, and the path's alignment were checked above.
    unsafe { launch(stream, T::DTYPE, &plan, &shape, &operands, workspace) }
}
