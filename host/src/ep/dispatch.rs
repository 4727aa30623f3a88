//! Tokens to the ranks of their experts.

use super::communicator::GROUP;
use super::{Blocks, Communicator, Mover, aligned};
use crate::check::Call;
use crate::device::{Geometry, Stream};
use crate::error::Result;
use crate::kernels::ep::dispatch as kernel;
use crate::kernels::ep::{MAX_RANKS, slot};
use crate::tensor::Tensor;
use cuda_std::{E4M3, Entry};
use half::bf16;

pub use kernel::{Args, Job};

const OP: &str = "ep::dispatch";
// Addresses of rows fit in what kernels compute.
const _: () = assert!(slot::COUNT == 7);

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
pub struct DispatchOptions<'a> {
    /// How rows are arranged.
    pub arrangement: Arrangement,
    /// Sends e4m3 with a scale for each 128 values instead of bf16.
    pub quantise: bool,
    /// Keeps the routing of the dispatch before, which all ranks must do: the same tokens to the same ranks. Compact only.
    pub cached: bool,
    /// `[1]`: how many of the tokens there are, read by the kernel.
    pub count: Option<&'a Tensor<u32>>,
    /// How many blocks.
    pub blocks: Blocks,
    /// How many of these copy the rank's own rows and nothing else; 0 if all blocks do both. Compact only.
    pub own_blocks: u32,
    /// What moves rows. Threads in slots.
    pub mover: Mover,
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
        self.own_blocks = own_blocks;
        self
    }

    /// With this to move rows.
    pub const fn mover(mut self, mover: Mover) -> Self {
        self.mover = mover;
        self
    }
}

/// Where the tokens of a dispatch went: what [`Communicator::combine`] needs to get them back.
#[derive(Debug)]
pub struct Routing {
    /// `[max_tokens, ranks]`
    pub(super) places: Tensor<i32>,
    pub(super) totals: Tensor<u32>,
    offsets: Tensor<i32>,
    pub(super) tokens: usize,
    pub(super) group: usize,
    pub(super) rank: usize,
    /// Over NCCL, what the host knows of it.
    #[cfg(feature = "nccl")]
    pub(super) counts: super::nccl::Counts,
}

impl Routing {
    /// `[max_tokens, ranks]`: the row of each token on each rank, or -1.
    pub fn places(&self) -> &Tensor<i32> {
        &self.places
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
/// [`moe::fused`](crate::moe::fused()) takes the rows with `ids` and `weights` as they are, as the block of this rank's experts;
/// [`moe::permute`](crate::moe::permute()) puts them in the order of the experts.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Received {
    /// The tokens.
    pub rows: Rows,
    /// `[capacity, top_k]`: experts of this rank, from 0; -1 for those of others, and in rows that nobody sent.
    pub ids: Tensor<i32>,
    /// `[capacity, top_k]`: their weights, 1 if none were passed.
    pub weights: Tensor<f32>,
    /// `[ranks + 1]`: where the rows of each rank begin, and the end. In [`Slots`](Arrangement::Slots) the worst case.
    pub offsets: Tensor<i32>,
}

/// A kernel of dispatch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Variant {
    /// In e4m3.
    pub quantise: bool,
    /// How rows are arranged.
    pub arrangement: Arrangement,
    /// The copy engine moves rows: compact only, on Hopper.
    pub bulk: bool,
}

impl Variant {
    /// Its entry.
    pub const fn entry(self) -> Entry<Args> {
        match (self.quantise, self.arrangement, self.bulk) {
            (false, Arrangement::Compact, false) => kernel::ep_dispatch_bf16_compact::ENTRY,
            (true, Arrangement::Compact, false) => kernel::ep_dispatch_e4m3_compact::ENTRY,
            (false, Arrangement::Compact, true) => kernel::ep_dispatch_bf16_bulk::ENTRY,
            (true, Arrangement::Compact, true) => kernel::ep_dispatch_e4m3_bulk::ENTRY,
            (false, Arrangement::Slots, _) => kernel::ep_dispatch_bf16_slots::ENTRY,
            (true, Arrangement::Slots, _) => kernel::ep_dispatch_e4m3_slots::ENTRY,
        }
    }

    /// How to launch it, for so many tokens.
    pub const fn geometry(self, blocks: u32, threads: u32, tokens: u32) -> Geometry {
        let bytes = match (self.arrangement, self.bulk) {
            (Arrangement::Slots, _) => 0,
            (Arrangement::Compact, false) => kernel::shared_bytes(tokens),
            (Arrangement::Compact, true) => kernel::bulk_shared_bytes(tokens, threads, self.quantise),
        };
        Geometry::linear(blocks, threads).shared_bytes(bytes).resident()
    }
}

/// Launches dispatch (layer L1).
///
/// # Errors
/// Those of [`Stream::launch`].
///
/// # Safety
/// The link is that of a rank on the stream's device, and the job's pointers are what [`Job`] documents, until the launch is done;
/// sizes are those of the ranks' buffers. As many blocks are resident at the same time.
pub unsafe fn launch(stream: &Stream, variant: Variant, [blocks, threads]: [u32; 2], args: &Args) -> Result<()> {
    // SAFETY: forwarded to the caller.
    unsafe { stream.launch(&variant.entry(), &variant.geometry(blocks, threads, args.job.tokens), args) }
}

impl Communicator {
    /// Room for where the tokens of a dispatch go.
    ///
    /// # Errors
    /// [`OutOfMemory`](crate::Error::OutOfMemory), [`Driver`](crate::Error::Driver).
    pub fn routing(&self) -> Result<Routing> {
        let (device, most, ranks) = (self.device(), self.config().max_tokens, self.ranks());
        let slots: Vec<i32> = (0..=ranks).map(|s| (s * most) as i32).collect();
        Ok(Routing {
            places: Tensor::from_slice(device, &vec![-1; most * ranks], &[most, ranks])?,
            totals: Tensor::zeros(device, &[MAX_RANKS])?,
            offsets: Tensor::from_slice(device, &slots, &[ranks + 1])?,
            tokens: 0,
            group: self.group_id(),
            rank: self.rank(),
            #[cfg(feature = "nccl")]
            counts: Some(Default::default()),
        })
    }

    /// Sends each token to the ranks of its experts, once to each.
    ///
    /// `x`: `[tokens, hidden]`; `ids`: `[tokens, top_k]`, experts of all ranks together, `experts / ranks` on each; -1 for none;
    /// `weights`: the same. What arrives is in the order of source ranks and tokens, whatever the timing.
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
        ids: &Tensor<i32>,
        weights: Option<&Tensor<f32>>,
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
        call.same_shape("ids", ids.shape(), &[tokens, config.top_k])?;
        call.contiguous("ids", ids)?;
        if let Some(w) = weights {
            call.same_shape("weights", w.shape(), &[tokens, config.top_k])?;
            call.contiguous("weights", w)?;
        }
        if let Some(n) = options.count {
            call.same_shape("options.count", n.shape(), &[1])?;
        }
        let slots = options.arrangement == Arrangement::Slots;
        if options.quantise {
            let fits = config.hidden.is_multiple_of(GROUP);
            call.value(fits, "config.hidden", "a multiple of 128 in e4m3", config.hidden)?;
        }
        if slots {
            let worst = self.ranks() * config.max_tokens;
            call.value(self.capacity() >= worst, "config.capacity", format!("{worst} for slots"), self.capacity())?;
            call.value(!options.cached, "options.cached", "false for slots", true)?;
        }
        if options.cached {
            call.value(tokens == routing.tokens, "x", format!("{} tokens, as before", routing.tokens), tokens)?;
        }
        let x_stride = call.rows("x", x)?.stride;
        call.value(x_stride.is_multiple_of(8), "x", "rows a multiple of 8 apart", x_stride)?;
        let job = Job {
            x: call.read("x", x)?.cast(),
            ids: call.read("ids", ids)?.cast(),
            weights: call.read_opt("weights", weights)?.cast(),
            count: call.read_opt("options.count", options.count)?.cast(),
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
            own_blocks: options.own_blocks,
        };
        let rows = self.own(|b| b.rows.clone());
        call.read("the communicator's rows", &rows)?;
        call.check_overlap()?;
        aligned(OP, "x", job.x.cast())?;
        let bulk = !slots && options.mover.is_bulk(OP, self.device(), true)?;
        let variant = Variant { quantise: options.quantise, arrangement: options.arrangement, bulk };
        let most = variant.entry().max_threads;
        let default = if slots { [64, 256] } else { [24, most] };
        let [blocks, threads] =
            self.blocks(OP, options.blocks, default, most, |t| variant.geometry(1, t, tokens as u32).shared_bytes)?;
        let own = options.own_blocks;
        call.value(own < blocks && (own == 0 || !slots), "options.own_blocks", "fewer than blocks; 0 in slots", own)?;
        let operation = [4, blocks, threads, slots.into(), options.quantise.into(), options.cached.into()];
        let args = Args { link: self.link(stream, &operation), job };
        #[cfg(feature = "nccl")]
        if self.nccl.is_some() {
            self.nccl_begin(OP, stream, args.link.signature)?;
            routing.counts = match slots {
                true => None,
                false => self.counts_over_nccl(stream, routing, ids, options)?,
            };
        }
        // SAFETY: shapes, devices and overlap were checked above; buffers live as long as the group.
        unsafe { launch(stream, variant, [blocks, threads], &args)? };
        routing.tokens = tokens;
        #[cfg(feature = "nccl")]
        if self.nccl.is_some() && self.nccl_fits(&routing.counts) {
            self.nccl_send_rows(stream, &routing.counts, options.quantise)?;
        }
        Ok(self.own(|b| Received {
            rows: match options.quantise {
                false => Rows::Bf16(b.rows.clone()),
                true => Rows::E4m3(b.rows.reinterpret(b.rows.shape()), b.scales.clone()),
            },
            ids: b.ids.clone(),
            weights: b.weights.clone(),
            offsets: routing.offsets.clone(),
        }))
    }

    /// Counts this rank's tokens, unless they are known, and learns the other ranks' counts.
    #[cfg(feature = "nccl")]
    fn counts_over_nccl(
        &mut self,
        stream: &Stream,
        routing: &mut Routing,
        ids: &Tensor<i32>,
        options: &DispatchOptions<'_>,
    ) -> Result<super::nccl::Counts> {
        if !options.cached {
            let tokens = match options.count {
                None => ids.dim(0),
                Some(n) => {
                    stream.synchronize()?;
                    ids.dim(0).min(n.to_vec()?[0] as usize)
                }
            };
            let ids = ids.narrow(0, 0, tokens)?;
            let ranks = self.ranks();
            let mut places = routing.places.narrow(0, 0, tokens)?;
            let mut totals = routing.totals.narrow(0, 0, ranks)?;
            self.layout(stream, &mut places, super::LayoutOutput::default().per_rank(&mut totals), &ids)?;
            stream.synchronize()?;
        }
        self.nccl_counts(stream, &routing.totals)
    }
}
