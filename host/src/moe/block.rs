//! What the operations on a block of experts have in common, [`fused`](super::fused::fused) and [`fused_quant`](super::fused_quant::fused_quant):
//! the description of a block, checked once for both.

use super::fused::{BLOCKS, ExpertActivation, FusedShape, GateUp};
use super::fused_quant::FusedQuantPath;
use super::{check_ids, sort};
use crate::check::{Call, Rows};
use crate::device::Stream;
use crate::error::{Error, Result};
use crate::tensor::Tensor;
use cuda_std::Element;
use std::ffi::c_void;

/// The most columns of a token: the blocks of the sum that have one's least are 512 wide, and a grid is 65535 blocks high.
const MAX_HIDDEN: usize = 65535 * 512;
/// The most pairs of a block of the sorted list, of any path of either operation.
const LARGEST_BLOCK: usize = {
    let largest = BLOCKS[BLOCKS.len() - 1];
    assert!(FusedQuantPath::Tile128.block() <= largest && FusedQuantPath::Wgmma64.block() <= largest);
    largest
};

/// A block of experts and what goes through it, whatever the type of the weights.
pub(super) struct Description<'a, T: Element> {
    pub x: &'a Tensor<T>,
    pub topk_ids: &'a Tensor<i32>,
    pub topk_weights: &'a Tensor<f32>,
    /// Shapes of `w2`, and of the shared experts' if there are any.
    pub w2: &'a [usize],
    pub shared_w2: Option<&'a [usize]>,
    pub shared_listed: bool,
    pub gate_up: GateUp,
    pub activation: ExpertActivation,
    pub expert_map: Option<&'a Tensor<i32>>,
    pub num_tokens: Option<&'a Tensor<i32>>,
    pub checked: bool,
}

/// What follows from a description.
pub(super) struct Block {
    pub shape: FusedShape,
    /// Rows of an expert's `w13`.
    pub rows: usize,
    /// Routed experts of all devices.
    pub global_experts: usize,
    pub x: Rows,
    pub out: Rows,
}

impl<T: Element> Description<'_, T> {
    /// Checks all but the weights, their companions and the workspace.
    pub(super) fn check(&self, call: &Call<'_>, out: &Tensor<T>) -> Result<Block> {
        let (x, topk_ids, topk_weights) = (self.x, self.topk_ids, self.topk_weights);
        call.float("x", T::DTYPE)?;
        let [tokens, hidden] = *x.shape() else {
            return Err(call.bad_shape("x", x.shape(), "[tokens, hidden]"));
        };
        let [experts, _, intermediate] = *self.w2 else {
            return Err(call.bad_shape("w2", self.w2, "[experts, hidden, intermediate]"));
        };
        // Transposed, its width would be taken for that of `w13`, which is right.
        if self.w2[1] != hidden && intermediate == hidden {
            let expected = format!("[experts, {hidden}, intermediate], as `x` is {hidden} wide");
            return Err(call.bad_shape("w2", self.w2, expected));
        }
        let [_, top_k] = *topk_ids.shape() else {
            return Err(call.bad_shape("topk_ids", topk_ids.shape(), "[tokens, top_k]"));
        };
        let shared_experts = match self.shared_w2 {
            None => 0,
            Some(&[experts, _, _]) => experts,
            Some(shape) => return Err(call.bad_shape("shared.w2", shape, "[shared experts, hidden, intermediate]")),
        };
        let shape = FusedShape {
            shared_experts,
            append_shared: !self.shared_listed,
            ..FusedShape::new(tokens, top_k, experts, hidden, intermediate)
        };
        call.same_shape("out", out.shape(), &[tokens, hidden])?;
        call.same_shape("topk_ids", topk_ids.shape(), &[tokens, top_k])?;
        call.same_shape("topk_weights", topk_weights.shape(), &[tokens, top_k])?;
        let (x, out) = (call.rows("x", x)?, call.rows("out", out)?);
        call.contiguous("topk_ids", topk_ids)?;
        call.contiguous("topk_weights", topk_weights)?;
        let global_experts = match self.expert_map {
            Some(map) => {
                let [n] = *map.shape() else {
                    return Err(call.bad_shape("expert_map", map.shape(), "[all experts]"));
                };
                call.contiguous("expert_map", map)?;
                n
            }
            None => experts,
        };
        if let Some(n) = self.num_tokens {
            call.same_shape("num_tokens", n.shape(), &[1])?;
        }
        for (arg, n) in [("w2", shape.bins()), ("expert_map", global_experts)] {
            call.value(n <= sort::MAX_EXPERTS, arg, format!("at most {} experts", sort::MAX_EXPERTS), n)?;
        }
        if let ExpertActivation::SwigluOai { alpha, limit } = self.activation {
            call.value(!alpha.is_nan(), "activation", "an alpha that is a number", alpha)?;
            call.value(limit >= 0.0, "activation", "a limit that is not negative", limit)?;
        }
        // The kernels count pairs, rows and columns in 32 bits.
        let rows = self.gate_up.rows() * intermediate;
        call.count("topk_ids", tokens.saturating_mul(shape.slots()))?;
        call.count("w13", rows)?;
        call.count("x", hidden)?;
        // So many blocks of the sum are beside each other at most.
        call.value(hidden <= MAX_HIDDEN, "x", format!("at most {MAX_HIDDEN} columns"), hidden)?;
        // Of the sorted list, whichever path sorts.
        call.count("topk_ids", sort::capacity(shape.pairs(), shape.bins(), LARGEST_BLOCK, false))?;
        Ok(Block { shape, rows, global_experts, x, out })
    }
}

impl<T: Element> Description<'_, T> {
    /// Looks at the ids, if it is asked to: last, when all else is right.
    pub(super) fn check_ids(&self, op: &'static str, stream: &Stream, block: &Block) -> Result<()> {
        if !self.checked {
            return Ok(());
        }
        // Shared experts have ids behind the routed ones, whether they are listed or come by themselves.
        let experts = block.global_experts + block.shape.shared_experts;
        check_ids::check(op, stream, self.topk_ids, experts, self.num_tokens)?;
        match self.expert_map {
            Some(map) => check_ids::check_map(op, stream, map, block.shape.experts),
            None => Ok(()),
        }
    }
}

/// A tensor of this shape without gaps, if there is one.
pub(super) fn dense<T: Element>(
    call: &Call<'_>,
    arg: &'static str,
    tensor: Option<&Tensor<T>>,
    shape: &[usize],
) -> Result<()> {
    match tensor {
        Some(t) => call.same_shape(arg, t.shape(), shape).and_then(|()| call.contiguous(arg, t)),
        None => Ok(()),
    }
}

/// [`dense`] of the first product's weights, whose shape follows from that of `w2`.
pub(super) fn first_weights<T: Element>(
    call: &Call<'_>,
    arg: &'static str,
    weights: &Tensor<T>,
    shape: [usize; 3],
    gate_up: GateUp,
) -> Result<()> {
    if weights.shape() != shape {
        let ([experts, rows, hidden], second) = (shape, arg.replace("w13", "w2"));
        let w2 = [experts, hidden, rows / gate_up.rows()];
        let expected = format!("{shape:?}, since `{second}` has {w2:?} and the layout is GateUp::{gate_up:?}");
        return Err(call.bad_shape(arg, weights.shape(), expected));
    }
    call.contiguous(arg, weights)
}

/// The workspace, of `needed` bytes or more, and that no output overlaps an argument: after all others.
pub(super) fn workspace(
    call: &mut Call<'_>,
    op: &'static str,
    workspace: &mut Tensor<u8>,
    needed: usize,
) -> Result<*mut c_void> {
    call.contiguous("workspace", workspace)?;
    call.value(workspace.len() >= needed, "workspace", format!("at least {needed} bytes"), workspace.len())?;
    let workspace = call.write("workspace", workspace)?;
    call.check_overlap()?;
    if (workspace as usize).is_multiple_of(16) {
        Ok(workspace)
    } else {
        Err(Error::Alignment { op, arg: "workspace", expected: 16, address: workspace as usize })
    }
}
