//! Rows back from the ranks of their experts, added up.

use super::{Arrangement, Blocks, Communicator, Routing, aligned};
use crate::check::Call;
use crate::device::{Geometry, Stream};
use crate::error::Result;
use crate::kernels::ep::combine as kernel;
use crate::tensor::Tensor;
use cuda_std::Entry;
use half::bf16;

pub use kernel::{Args, Job};

const OP: &str = "ep::combine";

/// Options of [`Communicator::combine`].
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
#[must_use]
pub struct CombineOptions<'a> {
    /// `[tokens, ranks]`: what the rows of each rank are multiplied by.
    pub weights: Option<&'a Tensor<f32>>,
    /// `[tokens, hidden]`, contiguous: added after the rows, one after the other.
    pub biases: [Option<&'a Tensor<bf16>>; 2],
    /// `[1]`: how many of the tokens there are, read by the kernel.
    pub count: Option<&'a Tensor<u32>>,
    /// How many blocks.
    pub blocks: Blocks,
}

impl<'a> CombineOptions<'a> {
    /// With weights.
    pub const fn weights(mut self, weights: &'a Tensor<f32>) -> Self {
        self.weights = Some(weights);
        self
    }

    /// With something to add.
    pub const fn biases(mut self, biases: [Option<&'a Tensor<bf16>>; 2]) -> Self {
        self.biases = biases;
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
}

/// The entry.
pub const ENTRY: Entry<Args> = kernel::ep_combine_bf16::ENTRY;
/// The most threads of a block.
const MAX_THREADS: u32 = ENTRY.max_threads;

/// How to launch it.
pub const fn geometry(blocks: u32, threads: u32) -> Geometry {
    Geometry::linear(blocks, threads).resident().dependent()
}

/// Launches combine (layer L1).
///
/// # Errors
/// Those of [`Stream::launch`].
///
/// # Safety
/// The link is that of a rank on the stream's device, and the job's pointers are what [`Job`] documents, until the launch is done;
/// places are of a dispatch of the same ranks. As many blocks are resident at the same time.
pub unsafe fn launch(stream: &Stream, [blocks, threads]: [u32; 2], args: &Args) -> Result<()> {
    // SAFETY: forwarded to the caller.
    unsafe { stream.launch(&ENTRY, &geometry(blocks, threads), args) }
}

impl Communicator {
    /// `out[t] = Σ weight · row` over the ranks that token `t` went to, in their order, `+ biases`: in f32, with one rounding.
    ///
    /// `out`: `[tokens, hidden]`, as many as were dispatched with `routing`; `results`: `[rows, hidden]` in the order of what was
    /// received, contiguous, which are copied to [`results`](Self::results); `None` if they were written there. A token that
    /// went nowhere becomes the biases, or zeros.
    ///
    /// # Errors
    /// [`Shape`](crate::Error::Shape), [`Stride`](crate::Error::Stride), [`Alignment`](crate::Error::Alignment) (16 bytes),
    /// [`WrongDevice`](crate::Error::WrongDevice), [`Overlap`](crate::Error::Overlap); [`Value`](crate::Error::Value) for a routing of
    /// another communicator, or blocks that do not fit. [`check`](Self::check) tells what goes wrong between the ranks.
    pub fn combine(
        &mut self,
        stream: &Stream,
        out: &mut Tensor<bf16>,
        routing: &Routing,
        results: Option<&Tensor<bf16>>,
        options: &CombineOptions<'_>,
    ) -> Result<()> {
        self.on_own_device(OP, stream)?;
        self.own_routing(OP, routing)?;
        let mut call = Call::new(OP, stream);
        let hidden = self.config().hidden;
        let tokens = routing.tokens;
        call.same_shape("out", out.shape(), &[tokens, hidden])?;
        let out_stride = call.rows("out", out)?.stride;
        call.value(out_stride.is_multiple_of(8), "out", "rows a multiple of 8 apart", out_stride)?;
        if let Some(w) = options.weights {
            call.same_shape("weights", w.shape(), &[tokens, self.ranks()])?;
            call.contiguous("weights", w)?;
        }
        for bias in options.biases.iter().flatten() {
            call.same_shape("biases", bias.shape(), &[tokens, hidden])?;
            call.contiguous("biases", bias)?;
        }
        if let Some(n) = options.count {
            call.same_shape("count", n.shape(), &[1])?;
        }
        let mut own = self.results();
        let copied = results.filter(|r| r.as_ptr() != own.as_ptr());
        if let Some(results) = results {
            match *results.shape() {
                [rows, h] if h == hidden && rows <= self.capacity() => {}
                _ => {
                    let expected = format!("[at most {}, {hidden}]", self.capacity());
                    return Err(call.bad_shape("results", results.shape(), expected));
                }
            }
            call.contiguous("results", results)?;
        }
        let job = Job {
            out: call.write("out", out)?.cast(),
            places: call.read("routing", &routing.places)?.cast(),
            weights: call.read_opt("weights", options.weights)?.cast(),
            bias: call.read_opt("biases", options.biases[0])?.cast(),
            bias2: call.read_opt("biases", options.biases[1])?.cast(),
            count: call.read_opt("count", options.count)?.cast(),
            out_stride,
            tokens: tokens as u32,
            hidden: hidden as u32,
        };
        call.read_opt("results", copied)?;
        if copied.is_some() {
            call.write("the communicator's results", &mut own)?;
        } else {
            call.read("the communicator's results", &own)?;
        }
        // Peers may write to it as soon as this is done.
        let rows = self.own(|b| b.rows.clone());
        call.read("the communicator's rows", &rows)?;
        call.check_overlap()?;
        aligned(OP, "out", job.out.cast_const().cast())?;
        aligned(OP, "biases", job.bias.cast())?;
        aligned(OP, "biases", job.bias2.cast())?;
        // As many blocks as for dispatch, or more for few tokens, which are all latency. How many tokens a rank has, others do not
        // know, and blocks are the same on all.
        let slots = routing.arrangement == Some(Arrangement::Slots);
        let few = slots || self.config().max_tokens * hidden <= 4 << 20;
        let default = [if few { 64 } else { 24 }, MAX_THREADS];
        let [blocks, threads] = self.blocks(OP, options.blocks, default, MAX_THREADS, |_| 0)?;
        if let Some(results) = copied {
            stream.copy(&mut own.narrow(0, 0, results.dim(0))?, results)?;
        }
        let args = Args { link: self.link(stream, &[5, blocks, threads]), job };
        #[cfg(feature = "nccl")]
        if self.nccl.is_some() {
            self.nccl_begin(OP, stream, args.link.signature)?;
            // Counts that did not fit were not sent either; the fault is in the device's state, where the kernel sees it.
            if self.nccl_fits(&routing.counts) {
                self.nccl_get_results(stream, &routing.counts)?;
            }
        }
        self.together(|| {
            // SAFETY: shapes, devices and overlap were checked above; buffers live as long as the group.
            unsafe { launch(stream, [blocks, threads], &args) }
        })
    }
}
