//! Sorting of (token, slot) pairs by expert, padded to blocks: what grouped matrix products start from.
//!
//! One launch up to a thousand pairs, on Hopper up to eight thousand, of up to 512 experts (some hundred pairs of more), two beyond; stable, so deterministic.

use crate::check::{Call, least, most, product};
use crate::device::{Geometry, Stream};
use crate::error::{Error, Result};
use crate::kernels::moe::{sort as kernel, sort_block as block};
use crate::tensor::Tensor;
use cuda_std::Element;
use std::ffi::c_void;

pub use kernel::{Args, CountArgs};

const OP: &str = "moe::sort";

/// The most experts that a device can have, shared ones included: limited by shared memory.
pub const MAX_EXPERTS: usize = 2048;

/// What the sorted lists look like.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum SortConvention {
    /// Flat indices `token · slots + slot`, padded with their number: vLLM's `moe_align_block_size`.
    #[default]
    Flat,
    /// Token in the low 24 bits and slot in the high 8, padded with the token count and the slot count: CK Tile's
    /// `moe_sorting`.
    Packed,
}

/// Which experts live on this device.
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
pub enum Local<'a> {
    /// All.
    #[default]
    All,
    /// `[experts]`: the number of each on this device, below the count given, or -1.
    Map(&'a Tensor<i32>, usize),
    /// `[experts]`: 0 for those that live elsewhere; the others are numbered consecutively.
    Mask(&'a Tensor<i32>),
}

/// What is sorted.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
#[must_use]
pub struct SortInput<'a> {
    /// `[tokens, top_k]`: experts by their global number; -1 for none. Others out of range are ignored and counted.
    pub topk_ids: &'a Tensor<i32>,
    /// `[tokens, top_k]`, for `sorted_weights`.
    pub topk_weights: Option<&'a Tensor<f32>>,
    /// Routed experts on all devices.
    pub experts: usize,
    /// Those of this device.
    pub local: Local<'a>,
    /// `[1]`: how many tokens there are, if fewer than `topk_ids` has room for.
    pub num_tokens: Option<&'a Tensor<i32>>,
}

impl<'a> SortInput<'a> {
    /// Pairs of `experts` experts, all on this device.
    pub const fn new(topk_ids: &'a Tensor<i32>, experts: usize) -> Self {
        Self { topk_ids, topk_weights: None, experts, local: Local::All, num_tokens: None }
    }

    /// With weights.
    pub const fn topk_weights(mut self, weights: &'a Tensor<f32>) -> Self {
        self.topk_weights = Some(weights);
        self
    }

    /// With only some of the experts on this device.
    pub const fn local(mut self, local: Local<'a>) -> Self {
        self.local = local;
        self
    }

    /// With a token count in device memory.
    pub const fn num_tokens(mut self, num_tokens: &'a Tensor<i32>) -> Self {
        self.num_tokens = Some(num_tokens);
        self
    }

    /// Names the tensors to the call of an operation that sorts first.
    pub(super) fn name(&self, call: &mut Call<'_>) -> Result<()> {
        call.read("topk_ids", self.topk_ids)?;
        call.read_opt("input.topk_weights", self.topk_weights)?;
        if let Local::Map(map, _) | Local::Mask(map) = self.local {
            call.read("input.local", map)?;
        }
        call.read_opt("input.num_tokens", self.num_tokens).map(drop)
    }

    /// Routed experts that pairs of this device are counted for.
    fn bins(&self) -> usize {
        match self.local {
            Local::Map(_, local) => local,
            _ => self.experts,
        }
    }
}

/// Options of [`sort`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
#[must_use]
pub struct SortOptions {
    /// Every expert's share is padded to a multiple of this.
    pub block_size: usize,
    /// What the lists look like.
    pub convention: SortConvention,
    /// Experts without pairs get one block of padding instead of none.
    pub keep_empty: bool,
    /// Shared experts. Their ids follow the routed ones', here and in the output.
    pub shared_experts: usize,
    /// Every token goes to every shared expert, in slots after its `top_k`, with weight 1. Otherwise `topk_ids` lists them. (Their ids are in range
    /// either way: what lists one all the same is a pair of its own.)
    pub append_shared: bool,
    /// Waits for the result and reports ids out of range as an error. Allocates; cannot be captured.
    pub checked: bool,
}

impl Default for SortOptions {
    fn default() -> Self {
        Self {
            block_size: 64,
            convention: SortConvention::Flat,
            keep_empty: false,
            shared_experts: 0,
            append_shared: false,
            checked: false,
        }
    }
}

impl SortOptions {
    /// With blocks of this many pairs.
    pub const fn block_size(mut self, block_size: usize) -> Self {
        self.block_size = block_size;
        self
    }

    /// With this convention.
    pub const fn convention(mut self, convention: SortConvention) -> Self {
        self.convention = convention;
        self
    }

    /// Whether experts without pairs get a block.
    pub const fn keep_empty(mut self, keep_empty: bool) -> Self {
        self.keep_empty = keep_empty;
        self
    }

    /// With this many shared experts; `append` as in [`append_shared`](Self::append_shared).
    pub const fn shared_experts(mut self, shared_experts: usize, append: bool) -> Self {
        self.shared_experts = shared_experts;
        self.append_shared = append;
        self
    }

    /// Whether ids out of range are an error.
    pub const fn checked(mut self, checked: bool) -> Self {
        self.checked = checked;
        self
    }

    pub(super) const fn slots(&self, top_k: usize) -> usize {
        top_k.saturating_add(if self.append_shared { self.shared_experts } else { 0 })
    }
}

/// What [`sort`] writes. Experts are numbered as on this device, shared ones last; with [`Local::Mask`] those lists that have an element for each expert
/// have one for each of all devices, and `capacity` and workspace are for as many.
#[derive(Debug)]
#[non_exhaustive]
#[must_use]
pub struct SortOutput<'a> {
    /// `[capacity]` with at least [`capacity`] elements: pairs by expert, each expert padded.
    pub sorted_ids: &'a mut Tensor<i32>,
    /// `[capacity / block_size]`: the expert of each block; -1 beyond the last.
    pub expert_ids: &'a mut Tensor<i32>,
    /// `[1]`: length of the padded list; `[2]` in the packed convention: that and the token count.
    pub totals: &'a mut Tensor<i32>,
    /// `[capacity]`: weights in the order of `sorted_ids`, 0 for padding.
    pub sorted_weights: Option<&'a mut Tensor<f32>>,
    /// `[tokens, slots]`: where each pair went, -1 for nowhere.
    pub positions: Option<&'a mut Tensor<i32>>,
    /// `[local + shared + 1]`: where each expert starts.
    pub offsets: Option<&'a mut Tensor<i32>>,
    /// `[local + shared]`: pairs of each expert.
    pub expert_counts: Option<&'a mut Tensor<i32>>,
    /// `[1]`: ids out of range.
    pub invalid: Option<&'a mut Tensor<i32>>,
}

impl<'a> SortOutput<'a> {
    /// The three lists that are always written.
    pub const fn new(
        sorted_ids: &'a mut Tensor<i32>,
        expert_ids: &'a mut Tensor<i32>,
        totals: &'a mut Tensor<i32>,
    ) -> Self {
        Self {
            sorted_ids,
            expert_ids,
            totals,
            sorted_weights: None,
            positions: None,
            offsets: None,
            expert_counts: None,
            invalid: None,
        }
    }

    /// Names the tensors to the call of an operation that sorts first.
    pub(super) fn name(&mut self, call: &mut Call<'_>) -> Result<()> {
        call.write("out.sorted_ids", self.sorted_ids)?;
        call.write("out.expert_ids", self.expert_ids)?;
        call.write("out.totals", self.totals)?;
        call.write_opt("out.sorted_weights", self.sorted_weights.as_deref_mut())?;
        call.write_opt("out.positions", self.positions.as_deref_mut())?;
        call.write_opt("out.offsets", self.offsets.as_deref_mut())?;
        call.write_opt("out.expert_counts", self.expert_counts.as_deref_mut())?;
        call.write_opt("out.invalid", self.invalid.as_deref_mut()).map(drop)
    }

    /// And weights.
    pub const fn sorted_weights(mut self, sorted_weights: &'a mut Tensor<f32>) -> Self {
        self.sorted_weights = Some(sorted_weights);
        self
    }

    /// And the inverse of `sorted_ids`.
    pub const fn positions(mut self, positions: &'a mut Tensor<i32>) -> Self {
        self.positions = Some(positions);
        self
    }

    /// And where each expert starts.
    pub const fn offsets(mut self, offsets: &'a mut Tensor<i32>) -> Self {
        self.offsets = Some(offsets);
        self
    }

    /// And how many pairs each expert has.
    pub const fn expert_counts(mut self, expert_counts: &'a mut Tensor<i32>) -> Self {
        self.expert_counts = Some(expert_counts);
        self
    }

    /// And how many ids are out of range.
    pub const fn invalid(mut self, invalid: &'a mut Tensor<i32>) -> Self {
        self.invalid = Some(invalid);
        self
    }
}

/// Length of the lists for `pairs` pairs of `bins` experts of this device: enough for any routing, a multiple of `block_size`. The
/// largest such number if that is larger.
pub const fn capacity(pairs: usize, bins: usize, block_size: usize, keep_empty: bool) -> usize {
    let block_size = if block_size == 0 { 1 } else { block_size };
    if keep_empty && bins > 0 {
        // An expert without pairs takes more room than one with pairs wastes: a block. So most is taken where one has all of them.
        let blocks = bins.saturating_add(pairs.saturating_sub(1) / block_size);
        return product(&[blocks, block_size]) / block_size * block_size;
    }
    // Every expert with pairs wastes at most block_size - 1 places.
    let used = if pairs < bins { pairs } else { bins };
    pairs.saturating_add(product(&[used, block_size - 1])) / block_size * block_size
}

/// How the pairs are split.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Split {
    /// Blocks that sort.
    pub chunks: u32,
    /// Warps of a block.
    pub warps: u32,
    /// Pairs of a lane.
    pub items: u32,
}

/// The most pairs that one block sorts: more are faster by several, in two launches that overlap. With many experts a block
/// has more to do beside.
const fn one_chunk(bins: usize) -> usize {
    if bins <= 128 { 1024 } else { 256 }
}

/// Warps of a block: fewer than a block could have, since each brings a row of counters that must be added up.
const WARPS: usize = 8;

/// How `pairs` pairs of `bins` experts are split.
///
/// Measured on an H200 for 8, 128 and 256 experts: the best of 4 to 32 warps and 1 to 8 pairs a lane, or within 3 % of it. More than 2^31 - 1 pairs, or than [`MAX_EXPERTS`], count as so many.
pub const fn split(pairs: usize, bins: usize) -> Split {
    let pairs = if pairs > i32::MAX as usize { i32::MAX as usize } else { pairs };
    let bins = if bins > MAX_EXPERTS { MAX_EXPERTS } else { bins };
    const SHARED: usize = 48 << 10;
    let fixed = kernel::shared_bytes(bins, 0);
    let fit = (SHARED - fixed) / (kernel::shared_bytes(bins, 1) - fixed);
    // Some lanes write padding and scan experts even where there are few pairs.
    let warps = match pairs {
        0..=128 if bins <= 128 => 4,
        // Not measured: so that blocks do not spend their time on adding up a long table.
        262_145.. => kernel::MAX_WARPS,
        _ => WARPS,
    };
    let warps = if fit < warps { fit } else { warps };
    if pairs <= one_chunk(bins) && pairs <= 32 * warps * kernel::ITEMS {
        let items = pairs.div_ceil(32 * warps);
        return Split { chunks: 1, warps: warps as u32, items: if items == 0 { 1 } else { items as u32 } };
    }
    // Few pairs a lane, for parallelism, unless that makes the table of counters long.
    let items = match pairs {
        0..=512 => 1,
        513..=8192 => 2,
        8193..=32_768 => 4,
        _ => kernel::ITEMS,
    };
    Split { chunks: pairs.div_ceil(32 * warps * items) as u32, warps: warps as u32, items: items as u32 }
}

/// The most pairs that a block, or a cluster of eight, sorts in one launch: what their lanes hold.
const fn one_launch(blocks: usize) -> usize {
    block::THREADS * block::ITEMS * blocks
}

/// How many blocks sort `pairs` pairs of `bins` experts in one launch, on devices that have clusters (compute capability 9.0) or not; `None` if it
/// takes two, or [`split`] says how.
///
/// Measured on an H200: up to 128 pairs a block is 0 to 0.3 µs faster than a cluster.
pub const fn blocks(pairs: usize, bins: usize, clusters: bool) -> Option<usize> {
    if bins > block::MAX_BINS {
        None
    } else if pairs <= if clusters { 128 } else { one_launch(1) } {
        Some(1)
    } else if clusters && pairs <= one_launch(block::CLUSTER) {
        Some(block::CLUSTER)
    } else {
        None
    }
}

/// Bytes of workspace for `pairs` pairs of `bins` experts of this device, shared ones included, and for fewer pairs; 0 for few pairs, the largest
/// number for more experts or pairs than [`sort`] takes.
pub const fn workspace_bytes(pairs: usize, bins: usize) -> usize {
    if bins > MAX_EXPERTS || pairs > i32::MAX as usize {
        return usize::MAX;
    }
    // Where a lane takes more pairs there are fewer chunks: what fewer pairs need is enough for them as well, but must be there for those.
    let (mut chunks, mut i) = (split(pairs, bins).chunks as usize, 0);
    while i < MORE_A_CHUNK.len() {
        chunks = most(chunks, split(least(pairs, MORE_A_CHUNK[i]), bins).chunks as usize);
        i += 1;
    }
    if chunks == 1 { 0 } else { chunks * kernel::columns(bins) * 2 }
}

/// After so many pairs [`split`] makes larger chunks.
const MORE_A_CHUNK: [usize; 5] = [128, 512, 8192, 32_768, 262_144];

/// How to launch `moe_sort_scatter` with `zeroing` blocks on the side; `moe_sort_count` takes the same without them.
pub const fn geometry(split: Split, bins: usize, zeroing: u32) -> Geometry {
    let shared = kernel::shared_bytes(least(bins, i32::MAX as usize), split.warps as usize);
    Geometry::linear(split.chunks.saturating_add(zeroing), split.warps * 32)
        .shared_bytes(least(shared, u32::MAX as usize) as u32)
}

/// How to launch `moe_sort_block`, or with [`CLUSTER`](block::CLUSTER) blocks `moe_sort_cluster`, with at least `zeroing` blocks on the side.
pub const fn block_geometry(blocks: usize, zeroing: u32) -> Geometry {
    let geometry = Geometry::linear(blocks as u32 + zeroing.next_multiple_of(blocks as u32), block::THREADS as u32)
        .shared_bytes(block::shared_bytes(blocks) as u32);
    if blocks > 1 { geometry.cluster(blocks as u32) } else { geometry }
}

/// Launches on raw pointers (layer L1). `args.items`, `args.chunks` and `args.table` are set here, from `workspace`.
///
/// # Errors
/// Those of [`Stream::launch`].
///
/// # Safety
/// The pointers are device memory as [`sort_scatter`](kernel::sort_scatter) documents, until the launch is done, and
/// `workspace` has [`workspace_bytes`], aligned to 4. No output overlaps another argument. `capacity` is that of [`capacity`] or more; without a map, and with a mask, `local` is
/// `experts`; packed lists have fewer than 2^24 tokens and 2^8 slots.
pub unsafe fn launch(stream: &Stream, args: &Args, workspace: *mut c_void) -> Result<()> {
    let bins = (args.local + args.shared_experts) as usize;
    let pairs = args.tokens as usize * args.slots as usize;
    let clusters = stream.device().properties().compute_capability == (9, 0);
    // A block for every 64 KiB to zero, as many as a GPU has multiprocessors at most.
    let zeroing = args.zero_bytes.div_ceil(64 << 10).min(128) as u32;
    let mut args = *args;
    args.table = std::ptr::null();
    // One launch divides by a reciprocal, which is exact up to there.
    if let Some(blocks) = blocks(pairs, bins, clusters).filter(|_| args.block <= block::MAX_BLOCK) {
        args.items = pairs.div_ceil(one_launch(blocks) / block::ITEMS).max(1) as u32;
        args.chunks = blocks as u32;
        let entry = if blocks > 1 { &kernel::moe_sort_cluster::ENTRY } else { &kernel::moe_sort_block::ENTRY };
        // SAFETY: forwarded to the caller.
        return unsafe { stream.launch(entry, &block_geometry(blocks, zeroing).dependent(), &args) };
    }
    let split = split(pairs, bins);
    args.items = split.items;
    args.chunks = split.chunks;
    if split.chunks > 1 {
        args.table = workspace.cast_const().cast();
        let count = CountArgs {
            table: workspace.cast(),
            sorted_ids: args.sorted_ids,
            sorted_weights: args.sorted_weights,
            topk_ids: args.topk_ids,
            expert_map: args.expert_map,
            num_tokens: args.num_tokens,
            tokens: args.tokens,
            top_k: args.top_k,
            slots: args.slots,
            experts: args.experts,
            local: args.local,
            shared_experts: args.shared_experts,
            items: args.items,
            capacity: args.capacity,
            flags: args.flags,
        };
        // SAFETY: forwarded to the caller.
        unsafe { stream.launch(&kernel::moe_sort_count::ENTRY, &geometry(split, bins, 0), &count) }?;
    }
    // It waits by itself: for the table, or as the first launch for all before.
    let geometry = geometry(split, bins, zeroing).dependent();
    // SAFETY: forwarded to the caller.
    unsafe { stream.launch(&kernel::moe_sort_scatter::ENTRY, &geometry, &args) }
}

/// Sorts pairs by expert. See [`SortInput`], [`SortOutput`] and [`SortOptions`]; all tensors are contiguous.
///
/// Lists may be longer than [`capacity`]; everything beyond the pairs is padding. `workspace` has [`workspace_bytes`], and serves one stream at a time.
///
/// # Errors
/// [`Shape`](Error::Shape), [`Stride`](Error::Stride), [`Value`](Error::Value), [`Alignment`](Error::Alignment),
/// [`Overlap`](Error::Overlap), [`WrongDevice`](Error::WrongDevice). With `options.checked`, a `Value` error for
/// `topk_ids` if an id is out of range, and [`Capture`](Error::Capture) while the stream is captured.
///
/// ```
/// use warploom::{Device, Stream, Tensor, moe};
/// let device = Device::simt();
/// let stream = Stream::new(&device)?;
/// let ids = Tensor::from_slice(&device, &[1, 0, 1, 2], &[2, 2])?; // two tokens, two experts each
/// let [mut sorted, mut experts, mut total] =
///     [6, 3, 1].map(|n| Tensor::zeros(&device, &[n]).unwrap());
/// let mut workspace = Tensor::zeros(&device, &[moe::sort::workspace_bytes(4, 3)])?;
/// moe::sort(
///     &stream,
///     &mut moe::SortOutput::new(&mut sorted, &mut experts, &mut total),
///     &moe::SortInput::new(&ids, 3),
///     &moe::SortOptions::default().block_size(2),
///     &mut workspace,
/// )?;
/// assert_eq!(sorted.to_vec()?, [1, 4, 0, 2, 3, 4]); // 4 is padding
/// assert_eq!(experts.to_vec()?, [0, 1, 2]);
/// assert_eq!(total.to_vec()?, [6]);
/// # Ok::<(), warploom::Error>(())
/// ```
pub fn sort(
    stream: &Stream,
    out: &mut SortOutput<'_>,
    input: &SortInput<'_>,
    options: &SortOptions,
    workspace: &mut Tensor<u8>,
) -> Result<()> {
    sort_impl::<u8>(stream, out, None, input, options, workspace)
}

/// [`sort`], and zeroes `zero` with blocks that have nothing else to do: the output of what adds to it afterwards.
///
/// # Errors
/// As for [`sort`].
pub fn sort_and_zero<T: Element>(
    stream: &Stream,
    out: &mut SortOutput<'_>,
    zero: &mut Tensor<T>,
    input: &SortInput<'_>,
    options: &SortOptions,
    workspace: &mut Tensor<u8>,
) -> Result<()> {
    sort_impl(stream, out, Some(zero), input, options, workspace)
}

fn sort_impl<T: Element>(
    stream: &Stream,
    out: &mut SortOutput<'_>,
    zero: Option<&mut Tensor<T>>,
    input: &SortInput<'_>,
    options: &SortOptions,
    workspace: &mut Tensor<u8>,
) -> Result<()> {
    let mut call = Call::new(OP, stream);
    let [tokens, top_k] = *input.topk_ids.shape() else {
        return Err(call.bad_shape("topk_ids", input.topk_ids.shape(), "[tokens, top_k]"));
    };
    call.contiguous("topk_ids", input.topk_ids)?;
    let block = options.block_size;
    call.value((1..=1 << 16).contains(&block), "block_size", "from 1 to 65536", block)?;
    let (slots, local) = (options.slots(top_k), input.bins());
    let bins = local.saturating_add(options.shared_experts);
    if options.checked && stream.is_capturing() {
        return Err(Error::Capture(format!("{OP}: `checked` waits for the result, which a graph does not have yet")));
    }
    call.value(input.experts <= MAX_EXPERTS, "input.experts", format!("at most {MAX_EXPERTS}"), input.experts)?;
    call.value(local <= MAX_EXPERTS, "input.local", format!("at most {MAX_EXPERTS} experts here"), local)?;
    call.value(bins <= MAX_EXPERTS, "shared_experts", format!("at most {MAX_EXPERTS} in all"), bins)?;
    let packed = options.convention == SortConvention::Packed;
    if packed {
        call.value(tokens < 1 << 24, "topk_ids", "fewer than 2^24 tokens for packed ids", tokens)?;
        call.value(slots < 1 << 8, "topk_ids", "fewer than 2^8 slots for packed ids", slots)?;
    }
    let pairs = call.count("topk_ids", tokens.saturating_mul(slots))? as usize;

    let (expert_map, is_mask) = match input.local {
        Local::All => (None, false),
        Local::Map(map, _) => (Some(map), false),
        Local::Mask(mask) => (Some(mask), true),
    };
    if let Some(map) = expert_map {
        call.same_shape("input.local", map.shape(), &[input.experts])?;
        call.contiguous("input.local", map)?;
    }
    if let Some(n) = input.num_tokens {
        call.same_shape("input.num_tokens", n.shape(), &[1])?;
    }
    if let Some(w) = input.topk_weights {
        call.same_shape("input.topk_weights", w.shape(), &[tokens, top_k])?;
        call.contiguous("input.topk_weights", w)?;
    }
    let least = capacity(pairs, bins, block, options.keep_empty);
    let [length] = *out.sorted_ids.shape() else {
        return Err(call.bad_shape("out.sorted_ids", out.sorted_ids.shape(), "[capacity]"));
    };
    call.value(length >= least, "out.sorted_ids", format!("at least {least} long"), length)?;
    call.contiguous("out.sorted_ids", out.sorted_ids)?;
    call.same_shape("out.expert_ids", out.expert_ids.shape(), &[length / block])?;
    call.contiguous("out.expert_ids", out.expert_ids)?;
    call.same_shape("out.totals", out.totals.shape(), &[1 + packed as usize])?;
    call.contiguous("out.totals", out.totals)?;
    if let Some(w) = &out.sorted_weights {
        call.same_shape("out.sorted_weights", w.shape(), &[length])?;
        call.contiguous("out.sorted_weights", w)?;
        call.value(input.topk_weights.is_some(), "input.topk_weights", "there, for `out.sorted_weights`", "None")?;
    }
    let optional = [
        ("out.positions", &out.positions, &[tokens, slots][..]),
        ("out.offsets", &out.offsets, &[bins + 1]),
        ("out.expert_counts", &out.expert_counts, &[bins]),
        ("out.invalid", &out.invalid, &[1]),
    ];
    for (arg, tensor, shape) in optional {
        if let Some(t) = tensor {
            call.same_shape(arg, t.shape(), shape)?;
            call.contiguous(arg, t)?;
        }
    }
    let zero_bytes = match &zero {
        Some(z) => {
            call.contiguous("zero", z)?;
            z.len() * size_of::<T>()
        }
        None => 0,
    };
    let needed = workspace_bytes(pairs, bins);
    call.contiguous("workspace", workspace)?;
    call.value(workspace.len() >= needed, "workspace", format!("at least {needed} bytes"), workspace.len())?;
    if needed > 0 && !(workspace.as_ptr() as usize).is_multiple_of(4) {
        let address = workspace.as_ptr() as usize;
        return Err(Error::Alignment { op: OP, arg: "workspace", expected: 4, address });
    }

    let mut counter = match (options.checked, &out.invalid) {
        (true, None) => Some(Tensor::<i32>::zeros(stream.device(), &[1])?),
        _ => None,
    };
    let args = Args {
        sorted_ids: call.write("out.sorted_ids", out.sorted_ids)?.cast(),
        expert_ids: call.write("out.expert_ids", out.expert_ids)?.cast(),
        totals: call.write("out.totals", out.totals)?.cast(),
        sorted_weights: call.write_opt("out.sorted_weights", out.sorted_weights.as_deref_mut())?.cast(),
        positions: call.write_opt("out.positions", out.positions.as_deref_mut())?.cast(),
        offsets: call.write_opt("out.offsets", out.offsets.as_deref_mut())?.cast(),
        expert_counts: call.write_opt("out.expert_counts", out.expert_counts.as_deref_mut())?.cast(),
        invalid: call.write_opt("out.invalid", out.invalid.as_deref_mut().or(counter.as_mut()))?.cast(),
        zero: call.write_opt("zero", zero)?.cast(),
        zero_bytes,
        topk_ids: call.read("topk_ids", input.topk_ids)?.cast(),
        topk_weights: call.read_opt("input.topk_weights", input.topk_weights)?.cast(),
        expert_map: call.read_opt("input.local", expert_map)?.cast(),
        num_tokens: call.read_opt("input.num_tokens", input.num_tokens)?.cast(),
        table: std::ptr::null(),
        tokens: call.count("topk_ids", tokens)?,
        top_k: call.count("topk_ids", top_k)?,
        slots: slots as u32,
        experts: input.experts as u32,
        local: call.count("input.local", local)?,
        shared_experts: options.shared_experts as u32,
        block: block as u32,
        items: 0,
        chunks: 0,
        capacity: call.count("out.sorted_ids", length)?,
        flags: if packed { kernel::PACKED } else { 0 }
            | if options.keep_empty { kernel::KEEP_EMPTY } else { 0 }
            | if is_mask { kernel::MASK } else { 0 },
    };
    let workspace = call.write("workspace", workspace)?;
    call.check_overlap()?;
    // SAFETY: shapes, device, alignment and overlap were checked above.
    unsafe { launch(stream, &args, workspace) }?;
    if options.checked {
        let counter = out.invalid.as_deref().or(counter.as_ref()).expect("one of them");
        let invalid = counter.to_vec()?[0];
        let expected = "-1 or below the number of experts, and mapped to -1 or to one of those that are here";
        call.value(invalid == 0, "topk_ids", expected, format!("{invalid} others"))?;
    }
    Ok(())
}
