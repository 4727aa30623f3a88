//! Tokens to the ranks of their experts.

use super::communicator::GROUP;
use super::{Blocks, Communicator, aligned};
use crate::check::Call;
use crate::device::{Geometry, Stream};
use crate::error::Result;
use crate::kernels::ep::MAX_RANKS;
use crate::kernels::ep::dispatch as kernel;
use crate::tensor::Tensor;
use cuda_std::integer::Divisor;
use cuda_std::{E4M3, Entry};
use half::bf16;

pub use kernel::{Args, Job};

const OP: &str = "ep::dispatch";

/// How received rows are arranged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Arrangement {
    /// One after another, by source rank and token: for many tokens. Ranks exchange counts before.
    #[default]
    Compact,
    /// Token `t` of rank `s` is row `s max_tokens + t`, and rows that nobody sent have no experts: for few tokens. Nothing is
    /// exchanged before. Needs room for the worst case.
    Slots,
}

/// Options of [`Communicator::dispatch`].
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
#[must_use]
pub struct DispatchOptions<'a> {
    /// How rows are arranged.
    pub arrangement: Arrangement,
    /// Sends e4m3 with a scale for each 128 values instead of bf16.
    pub quantise: bool,
    /// Keeps the routing of the dispatch before, a compact one that did not fail, which all ranks must do: the same tokens, and as many of them by `count`, to the same ranks;
    /// ids are not looked at again. Compact only.
    pub cached: bool,
    /// `[1]`: how many of the tokens there are, read by the kernel.
    pub count: Option<&'a Tensor<u32>>,
    /// How many blocks.
    pub blocks: Blocks,
    /// How many of these copy the rank's own rows and nothing else; 0 if all blocks do both. What suits if `None`. Compact only.
    pub own_blocks: Option<u32>,
}

impl<'a> DispatchOptions<'a> {
    /// Arranged so.
    pub const fn arrangement(mut self, arrangement: Arrangement) -> Self {
        self.arrangement = arrangement;
        self
    }

    /// In e4m3.
    pub const fn quantise(mut self, quantise: bool) -> Self {
        self.quantise = quantise;
        self
    }

    /// With the routing of before.
    pub const fn cached(mut self, cached: bool) -> Self {
        self.cached = cached;
        self
    }

    /// With the number of tokens in device memory.
    pub const fn count(mut self, count: &'a Tensor<u32>) -> Self {
        self.count = Some(count);
        self
    }

    /// With so many blocks.
    pub const fn blocks(mut self, blocks: Blocks) -> Self {
        self.blocks = blocks;
        self
    }

    /// With so many of the blocks for the own rows.
    pub const fn own_blocks(mut self, own_blocks: u32) -> Self {
        self.own_blocks = Some(own_blocks);
        self
    }
}

/// Where the tokens of a dispatch went: what [`Communicator::combine`] needs to get them back.
#[derive(Debug)]
pub struct Routing {
    /// `[max_tokens, ranks]`
    pub(super) places: Tensor<i32>,
    /// The same memory, for others: kernels take the rows in it as they are, so nobody else may write to it.
    shown: Tensor<i32>,
    pub(super) totals: Tensor<u32>,
    offsets: Tensor<i32>,
    pub(super) tokens: usize,
    /// That of the last dispatch.
    pub(super) arrangement: Option<Arrangement>,
    /// How often the rank had recovered then.
    recoveries: u64,
    /// Not its address alone, which another group may have once this one is gone.
    pub(super) group: std::sync::Weak<super::communicator::Group>,
    pub(super) rank: usize,
    /// Over NCCL, what the host knows of it.
    #[cfg(feature = "nccl")]
    pub(super) counts: super::nccl::Counts,
}

impl Routing {
    /// `[max_tokens, ranks]`: the row of each token on each rank, or -1. To read only: [`Communicator::combine`] finds rows by it.
    #[expect(clippy::misnamed_getters, reason = "what is shown shares the memory, and cannot be written")]
    pub fn places(&self) -> &Tensor<i32> {
        &self.shown
    }
}

/// Rows as they were sent.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Rows {
    /// `[capacity, hidden]`.
    Bf16(Tensor<bf16>),
    /// `[capacity, hidden]`, and `[capacity, hidden / 128]` scales: a value is their product.
    E4m3(Tensor<E4M3>, Tensor<f32>),
}

impl Rows {
    /// The rows if they are in bf16.
    pub fn bf16(&self) -> Option<&Tensor<bf16>> {
        match self {
            Rows::Bf16(rows) => Some(rows),
            Rows::E4m3(..) => None,
        }
    }

    /// The rows and their scales if they are in e4m3.
    pub fn e4m3(&self) -> Option<(&Tensor<E4M3>, &Tensor<f32>)> {
        match self {
            Rows::Bf16(_) => None,
            Rows::E4m3(rows, scales) => Some((rows, scales)),
        }
    }
}

/// What a rank has received, in the communicator's buffers: good until its next operation.
///
/// [`moe::fused`](crate::moe::fused()) takes the rows with `topk_ids` and `topk_weights` as they are, as the block of this rank's experts;
/// [`moe::permute`](crate::moe::permute()) puts them in the order of the experts.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Received {
    /// The tokens.
    pub rows: Rows,
    /// `[capacity, top_k]`: experts of this rank, from 0; -1 for those of others, and in rows that nobody sent.
    pub topk_ids: Tensor<i32>,
    /// `[capacity, top_k]`: their weights, 1 if none were passed.
    pub topk_weights: Tensor<f32>,
    /// `[ranks + 1]`: where the rows of each rank begin, and the end. In [`Slots`](Arrangement::Slots) the worst case.
    pub offsets: Tensor<i32>,
}

/// The entry of a variant.
pub const fn entry(quantise: bool, arrangement: Arrangement) -> Entry<Args> {
    match (quantise, arrangement) {
        (false, Arrangement::Compact) => kernel::ep_dispatch_bf16_compact::ENTRY,
        (false, Arrangement::Slots) => kernel::ep_dispatch_bf16_slots::ENTRY,
        (true, Arrangement::Compact) => kernel::ep_dispatch_e4m3_compact::ENTRY,
        (true, Arrangement::Slots) => kernel::ep_dispatch_e4m3_slots::ENTRY,
    }
}

/// How to launch any of them, for as many tokens.
pub const fn geometry(quantise: bool, arrangement: Arrangement, blocks: u32, threads: u32, tokens: u32) -> Geometry {
    let bytes = match arrangement {
        Arrangement::Compact => kernel::shared_bytes(tokens, threads, quantise),
        Arrangement::Slots => 0,
    };
    Geometry::linear(blocks, threads).shared_bytes(bytes).resident().dependent()
}

/// Blocks that copy a rank's own rows and nothing else.
///
/// A multiprocessor's stores leave in order, so that those to the own memory wait behind those to peers, and the link for them in
/// turn; blocks of their own keep out of the way. On two H200s eight blocks of 1024 threads copy 4096 rows of 7168 in the time in which
/// NVLink carries as many. With more peers, each of which has blocks of its own, it is as many for each. In e4m3 each row would be quantised
/// twice.
const fn own_blocks(blocks: u32, ranks: u32, quantise: bool) -> u32 {
    if ranks == 1 || quantise {
        return 0;
    }
    let own = match ranks {
        ..=2 if blocks > 20 => 11,
        ..=4 if blocks > 18 => 9,
        ..=4 => 8u32.div_ceil(ranks - 1),
        _ => 3 + blocks.saturating_sub(3) % (ranks - 1),
    };
    if 2 * own < blocks { own } else { 0 }
}

/// Rows that warps get a piece at a time, of so many warps. Whole rows take fewer instructions, which counts in e4m3 if a row goes to one peer;
/// pieces let all warps end together. Two H200s, e4m3, 384 warps: 91.0 µs with 240 to 420; without clusters 91.5 with 540, 91.9 with 360.
const fn singles(warps: u32, ranks: u32, quantise: bool) -> u32 {
    if quantise && ranks <= 2 { warps * 7 / 8 } else { u32::MAX }
}

/// Threads of a block in compact dispatch, at most so many: enough to keep the link busy, and no more, as what they have begun has to be ended.
const fn threads(most: u32, ranks: u32, quantise: bool) -> u32 {
    if quantise && ranks <= 2 { 512 } else { most }
}

/// Launches dispatch (layer L1).
///
/// # Errors
/// Those of [`Stream::launch`].
///
/// # Safety
/// The link is that of a rank on the stream's device, and the job's pointers are what [`Job`] documents, until the launch is done;
/// sizes are those of the ranks' buffers. As many blocks are resident at the same time.
pub unsafe fn launch(
    stream: &Stream,
    quantise: bool,
    arrangement: Arrangement,
    [blocks, threads]: [u32; 2],
    args: &Args,
) -> Result<()> {
    let geometry = geometry(quantise, arrangement, blocks, threads, args.job.tokens);
    // SAFETY: forwarded to the caller.
    unsafe { stream.launch(&entry(quantise, arrangement), &geometry, args) }
}

impl Communicator {
    /// Room for where the tokens of a dispatch go.
    ///
    /// # Errors
    /// [`OutOfMemory`](crate::Error::OutOfMemory), [`Driver`](crate::Error::Driver).
    pub fn routing(&self) -> Result<Routing> {
        let (device, most, ranks) = (self.device(), self.config().max_tokens, self.ranks());
        let slots: Vec<i32> = (0..=ranks).map(|s| (s * most) as i32).collect();
        let places = Tensor::from_slice(device, &vec![-1; most * ranks], &[most, ranks])?;
        Ok(Routing {
            shown: places.read_only()?,
            places,
            totals: Tensor::zeros(device, &[MAX_RANKS])?,
            offsets: Tensor::from_slice(device, &slots, &[ranks + 1])?,
            tokens: 0,
            arrangement: None,
            recoveries: 0,
            group: std::sync::Arc::downgrade(&self.group),
            rank: self.rank(),
            #[cfg(feature = "nccl")]
            counts: Some(Default::default()),
        })
    }

    /// Sends each token to the ranks of its experts, once to each.
    ///
    /// `x`: `[tokens, hidden]`; `topk_ids`: `[tokens, top_k]`, experts of all ranks together, `experts / ranks` on each; -1 for none;
    /// `topk_weights`: the same. What arrives is in the order of source ranks and tokens, whatever the timing.
    ///
    /// # Errors
    /// [`Shape`](crate::Error::Shape), [`Stride`](crate::Error::Stride), [`Alignment`](crate::Error::Alignment) (16 bytes),
    /// [`WrongDevice`](crate::Error::WrongDevice), [`Overlap`](crate::Error::Overlap); [`Value`](crate::Error::Value) for more tokens than the
    /// communicator's most, `hidden` that is no multiple of 128 in e4m3, a routing of another communicator, no room for the worst
    /// case in slots, or blocks that do not fit. [`check`](Self::check) tells what goes wrong between the ranks.
    pub fn dispatch(
        &mut self,
        stream: &Stream,
        routing: &mut Routing,
        x: &Tensor<bf16>,
        topk_ids: &Tensor<i32>,
        topk_weights: Option<&Tensor<f32>>,
        options: &DispatchOptions<'_>,
    ) -> Result<Received> {
        self.on_own_device(OP, stream)?;
        self.own_routing(OP, routing)?;
        let mut call = Call::new(OP, stream);
        let config = *self.config();
        let tokens = match *x.shape() {
            [tokens, hidden] if hidden == config.hidden => tokens,
            _ => return Err(call.bad_shape("x", x.shape(), format!("[tokens, {}]", config.hidden))),
        };
        call.value(tokens <= config.max_tokens, "x", format!("at most {} tokens", config.max_tokens), tokens)?;
        call.same_shape("topk_ids", topk_ids.shape(), &[tokens, config.top_k])?;
        call.contiguous("topk_ids", topk_ids)?;
        if let Some(w) = topk_weights {
            call.same_shape("topk_weights", w.shape(), &[tokens, config.top_k])?;
            call.contiguous("topk_weights", w)?;
        }
        if let Some(n) = options.count {
            call.same_shape("count", n.shape(), &[1])?;
        }
        let slots = options.arrangement == Arrangement::Slots;
        if options.quantise {
            let fits = config.hidden.is_multiple_of(GROUP);
            call.value(fits, "config.hidden", "a multiple of 128 in e4m3", config.hidden)?;
        }
        if slots {
            let worst = self.ranks() * config.max_tokens;
            call.value(self.capacity() >= worst, "config.capacity", format!("{worst} for slots"), self.capacity())?;
            call.value(!options.cached, "cached", "false for slots", true)?;
        }
        if options.cached {
            let compact = routing.arrangement == Some(Arrangement::Compact) && routing.recoveries == self.recoveries();
            call.value(compact, "cached", "false without a compact dispatch before, since the last recovery", true)?;
            call.value(tokens == routing.tokens, "x", format!("{} tokens, as before", routing.tokens), tokens)?;
        }
        let x_stride = call.rows("x", x)?.stride;
        call.value(x_stride.is_multiple_of(8), "x", "rows a multiple of 8 apart", x_stride)?;
        let mut job = Job {
            x: call.read("x", x)?.cast(),
            ids: call.read("topk_ids", topk_ids)?.cast(),
            weights: call.read_opt("topk_weights", topk_weights)?.cast(),
            count: call.read_opt("count", options.count)?.cast(),
            places: call.write("routing", &mut routing.places)?.cast(),
            totals: call.write("routing", &mut routing.totals)?.cast(),
            offsets: call.write("routing", &mut routing.offsets)?.cast(),
            x_stride,
            tokens: tokens as u32,
            max_tokens: config.max_tokens as u32,
            capacity: self.capacity() as u32,
            hidden: config.hidden as u32,
            top_k: config.top_k as u32,
            per_rank: self.per_rank(),
            cached: options.cached.into(),
            own_blocks: 0,
            votes: self.own(|b| b.votes.as_mut_ptr()),
            singles: 0,
            pieces: Divisor::new(kernel::pieces(config.hidden as u32)),
        };
        self.writes_received(&mut call)?;
        call.check_overlap()?;
        aligned(OP, "x", job.x.cast())?;
        let most = entry(options.quantise, options.arrangement).max_threads;
        let default = if slots { [64, 256] } else { [24, threads(most, self.ranks() as u32, options.quantise)] };
        // Of the most tokens, so that all ranks find room for as many blocks.
        let bytes = |threads| {
            geometry(options.quantise, options.arrangement, 1, threads, config.max_tokens as u32).shared_bytes
        };
        let [blocks, threads] = self.blocks(OP, options.blocks, default, most, bytes)?;
        let fits = options.own_blocks.is_none_or(|own| own < blocks);
        let own = options.own_blocks.unwrap_or_else(|| own_blocks(blocks, self.ranks() as u32, options.quantise));
        call.value(fits, "own_blocks", format!("less than {blocks}"), own)?;
        // Of one rank all rows are its own: the other blocks would have nobody to send to.
        job.own_blocks = if self.ranks() > 1 { own } else { 0 };
        job.singles = singles(blocks * threads / 32, self.ranks() as u32, options.quantise);
        let operation = [4, blocks, threads, slots.into(), options.quantise.into(), options.cached.into()];
        let args = Args { link: self.link(stream, &operation), job };
        #[cfg(feature = "nccl")]
        if self.nccl.is_some() {
            self.nccl_begin(OP, stream, args.link.signature)?;
            routing.counts = if slots { None } else { self.counts_over_nccl(stream, routing, topk_ids, options)? };
        }
        let geometry = geometry(options.quantise, options.arrangement, blocks, threads, tokens as u32);
        let cluster = if options.quantise && !slots { self.cluster(blocks) } else { 1 };
        let (entry, geometry) = (entry(options.quantise, options.arrangement), geometry.cluster(cluster));
        self.together(|| {
            // SAFETY: shapes, devices and overlap were checked above; buffers live as long as the group.
            unsafe { stream.launch(&entry, &geometry, &args) }
        })?;
        routing.tokens = tokens;
        routing.arrangement = Some(options.arrangement);
        routing.recoveries = self.recoveries();
        #[cfg(feature = "nccl")]
        if self.nccl.is_some() && self.nccl_fits(&routing.counts) {
            self.nccl_send_rows(stream, &routing.counts, options.quantise)?;
        }
        Ok(self.own(|b| Received {
            rows: if options.quantise {
                Rows::E4m3(b.rows.reinterpret(b.rows.shape()), b.scales.clone())
            } else {
                Rows::Bf16(b.rows.clone())
            },
            topk_ids: b.ids.clone(),
            topk_weights: b.weights.clone(),
            offsets: routing.offsets.clone(),
        }))
    }

    /// Blocks of a cluster in e4m3, of so many. It does nothing but say where blocks are to be.
    ///
    /// Multiprocessors that share a part of the GPU share what it may send to peers, and one block by itself in such a part sends three times as much as each
    /// of three; clusters of four are spread evenly. Only where they are sure to find room.
    fn cluster(&self, blocks: u32) -> u32 {
        let properties = self.device().properties();
        let alone = self.ranks() <= 2 && self.sharing() == 1 && 4 * blocks <= properties.multiprocessors;
        if alone && properties.compute_capability.0 == 9 && blocks.is_multiple_of(4) { 4 } else { 1 }
    }

    /// Counts this rank's tokens, unless they are known, and learns the other ranks' counts.
    #[cfg(feature = "nccl")]
    fn counts_over_nccl(
        &mut self,
        stream: &Stream,
        routing: &mut Routing,
        topk_ids: &Tensor<i32>,
        options: &DispatchOptions<'_>,
    ) -> Result<super::nccl::Counts> {
        if !options.cached {
            let tokens = match options.count {
                None => topk_ids.dim(0),
                Some(n) => {
                    stream.synchronize()?;
                    topk_ids.dim(0).min(n.to_vec()?[0] as usize)
                }
            };
            let topk_ids = topk_ids.narrow(0, 0, tokens)?;
            let ranks = self.ranks();
            let mut places = routing.places.narrow(0, 0, tokens)?;
            let mut totals = routing.totals.narrow(0, 0, ranks)?;
            self.layout(stream, &mut places, &mut super::LayoutOutput::default().per_rank(&mut totals), &topk_ids)?;
            stream.synchronize()?;
        }
        self.nccl_counts(stream, &routing.totals)
    }
}
