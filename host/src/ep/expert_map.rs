//! From the experts that a router knows to those that GPUs hold.

use super::eplb::Placement;
use crate::check::Call;
use crate::device::{Device, Geometry, Stream};
use crate::error::{Error, Result};
use crate::kernels::ep::expert_map as kernel;
use crate::tensor::Tensor;

pub use kernel::Args;

const OP: &str = "ep::ExpertMap::apply";
const THREADS: u32 = 256;

/// How to launch `ep_expert_map`.
pub const fn geometry(pairs: u32) -> Geometry {
    Geometry::linear(pairs.div_ceil(THREADS), THREADS)
}

/// Launches `ep_expert_map` (layer L1).
///
/// # Errors
/// Those of [`Stream::launch`].
///
/// # Safety
/// The pointers are what [`expert_map`](kernel::expert_map()) documents, until the launch is done.
pub unsafe fn launch(stream: &Stream, args: &Args) -> Result<()> {
    // SAFETY: forwarded to the caller.
    unsafe { stream.launch(&kernel::ep_expert_map::ENTRY, &geometry(args.pairs), args) }
}

/// Where the replicas of each expert are, on a device: a layer of a [`Placement`].
#[derive(Debug)]
pub struct ExpertMap {
    replicas: Tensor<i32>,
    counts: Tensor<i32>,
}

impl ExpertMap {
    /// Of one layer of a placement. Dispatch takes the result's experts: the placement's slots, as many on each rank.
    ///
    /// # Errors
    /// [`Error::Value`] if there is no such layer, [`Error::OutOfMemory`], [`Error::Driver`].
    pub fn new(device: &Device, placement: &Placement, layer: usize) -> Result<Self> {
        if layer >= placement.num_layers() {
            return Err(Error::Value {
                op: "ep::ExpertMap::new",
                arg: "layer",
                expected: format!("less than {}", placement.num_layers()),
                got: layer.to_string(),
            });
        }
        let replicas: Vec<i32> = placement.log2phy(layer).iter().map(|&p| p as i32).collect();
        let counts: Vec<i32> = placement.logcnt(layer).iter().map(|&n| n as i32).collect();
        let experts = placement.num_experts();
        Ok(Self {
            replicas: Tensor::from_slice(device, &replicas, &[experts, replicas.len() / experts.max(1)])?,
            counts: Tensor::from_slice(device, &counts, &[experts])?,
        })
    }

    /// Replaces each expert of `topk_ids` `[tokens, top_k]` by a replica of it: token `t` takes number `t + turn` (modulo 2^32), modulo as many as
    /// there are, so that replicas share the load whatever the tokens. Ranks should pass different turns. Negative ids stay.
    /// An expert that is not there becomes one that dispatch reports.
    ///
    /// # Errors
    /// [`Shape`](Error::Shape), [`Stride`](Error::Stride), [`Overlap`](Error::Overlap), [`WrongDevice`](Error::WrongDevice).
    pub fn apply(&self, stream: &Stream, out: &mut Tensor<i32>, topk_ids: &Tensor<i32>, turn: u32) -> Result<()> {
        let mut call = Call::new(OP, stream);
        let [tokens, top_k] = *topk_ids.shape() else {
            return Err(call.bad_shape("topk_ids", topk_ids.shape(), "[tokens, top_k]"));
        };
        call.contiguous("topk_ids", topk_ids)?;
        call.same_shape("out", out.shape(), topk_ids.shape())?;
        call.contiguous("out", out)?;
        let args = Args {
            out: call.write("out", out)?.cast(),
            ids: call.read("topk_ids", topk_ids)?.cast(),
            replicas: call.read("the map's replicas", &self.replicas)?.cast(),
            counts: call.read("the map's counts", &self.counts)?.cast(),
            pairs: call.count("topk_ids", tokens * top_k)?,
            top_k: call.count("topk_ids", top_k)?,
            experts: call.count("the map", self.counts.len())?,
            stride: call.count("the map", self.replicas.dim(1))?,
            turn,
        };
        call.check_overlap_but(&[("out", "topk_ids")])?;
        // SAFETY: shapes, devices and overlap were checked above.
        unsafe { launch(stream, &args) }
    }
}
