//! Which token goes to which rank.

use super::Communicator;
use crate::check::Call;
use crate::device::{Geometry, Stream};
use crate::error::Result;
use crate::kernels::ep::layout as kernel;
use crate::tensor::Tensor;
use std::ptr::null_mut;

pub use kernel::Args;

const OP: &str = "ep::layout";

/// How to launch `ep_layout`, for so many tokens and experts of all ranks.
pub const fn geometry(tokens: u32, experts: u32) -> Geometry {
    let blocks = if tokens > 4096 { 8 } else { tokens.div_ceil(1024) };
    Geometry::linear(if blocks == 0 { 1 } else { blocks }, kernel::THREADS as u32)
        .shared_bytes(kernel::scan_bytes(tokens).saturating_add(experts.saturating_mul(4)))
}

/// Launches `ep_layout` (layer L1).
///
/// # Errors
/// Those of [`Stream::launch`].
///
/// # Safety
/// The link is that of a rank on the stream's device, and the pointers are what [`layout`](kernel::layout()) documents, until the
/// launch is done.
pub unsafe fn launch(stream: &Stream, args: &Args) -> Result<()> {
    let geometry = geometry(args.tokens, args.per_rank.get().saturating_mul(args.link.ranks));
    // SAFETY: forwarded to the caller.
    unsafe { stream.launch(&kernel::ep_layout::ENTRY, &geometry, args) }
}

/// What [`Communicator::layout`] writes; what is `None` is left out.
#[derive(Debug, Default)]
#[non_exhaustive]
#[must_use]
pub struct LayoutOutput<'a> {
    /// `[ranks]`: tokens that go to each rank.
    pub per_rank: Option<&'a mut Tensor<u32>>,
    /// `[experts]`: tokens that go to each expert.
    pub per_expert: Option<&'a mut Tensor<u32>>,
    /// `[tokens, ranks]`: 1 where a token goes to a rank, else 0.
    pub in_rank: Option<&'a mut Tensor<u8>>,
}

impl<'a> LayoutOutput<'a> {
    /// With tokens by rank.
    pub fn per_rank(mut self, per_rank: &'a mut Tensor<u32>) -> Self {
        self.per_rank = Some(per_rank);
        self
    }

    /// With tokens by expert.
    pub fn per_expert(mut self, per_expert: &'a mut Tensor<u32>) -> Self {
        self.per_expert = Some(per_expert);
        self
    }

    /// With the mask.
    pub fn in_rank(mut self, in_rank: &'a mut Tensor<u8>) -> Self {
        self.in_rank = Some(in_rank);
        self
    }
}

impl Communicator {
    /// Where tokens go: `places` `[tokens, ranks]` becomes the number of earlier tokens that go to the same rank, or -1 if the
    /// token does not go there. `topk_ids`: `[tokens, top_k]`, of all ranks' experts; -1 for none.
    ///
    /// This involves no other rank, and dispatch does not need it.
    ///
    /// # Errors
    /// [`Shape`](crate::Error::Shape), [`Stride`](crate::Error::Stride), [`Overlap`](crate::Error::Overlap),
    /// [`WrongDevice`](crate::Error::WrongDevice), [`Value`](crate::Error::Value) for more tokens than the communicator's most.
    /// [`check`](Self::check) tells of ids out of range.
    pub fn layout(
        &mut self,
        stream: &Stream,
        places: &mut Tensor<i32>,
        out: &mut LayoutOutput<'_>,
        topk_ids: &Tensor<i32>,
    ) -> Result<()> {
        self.on_own_device(OP, stream)?;
        let mut call = Call::new(OP, stream);
        let (top_k, experts, ranks) = (self.config().top_k, self.config().experts, self.ranks());
        let tokens = match *topk_ids.shape() {
            [tokens, k] if k == top_k => tokens,
            _ => return Err(call.bad_shape("topk_ids", topk_ids.shape(), format!("[tokens, {top_k}]"))),
        };
        let most = self.config().max_tokens;
        call.value(tokens <= most, "topk_ids", format!("at most {most} tokens"), tokens)?;
        call.value(experts <= 32768, "config.experts", "at most 32768 to be counted", experts)?;
        call.contiguous("topk_ids", topk_ids)?;
        call.same_shape("places", places.shape(), &[tokens, ranks])?;
        call.contiguous("places", places)?;
        let LayoutOutput { per_rank, per_expert, in_rank } = &mut *out;
        let mut args = Args {
            link: self.link(stream, &[3]),
            places: call.write("places", places)?.cast(),
            per_rank_tokens: null_mut(),
            per_expert: null_mut(),
            in_rank: null_mut(),
            ids: call.read("topk_ids", topk_ids)?.cast(),
            tokens: tokens as u32,
            top_k: top_k as u32,
            per_rank: self.per_rank(),
        };
        if let Some(t) = per_rank {
            call.same_shape("out.per_rank", t.shape(), &[ranks])?;
            call.contiguous("out.per_rank", t)?;
            args.per_rank_tokens = call.write("out.per_rank", t)?.cast();
        }
        if let Some(t) = per_expert {
            call.same_shape("out.per_expert", t.shape(), &[experts])?;
            call.contiguous("out.per_expert", t)?;
            args.per_expert = call.write("out.per_expert", t)?.cast();
        }
        if let Some(t) = in_rank {
            call.same_shape("out.in_rank", t.shape(), &[tokens, ranks])?;
            call.contiguous("out.in_rank", t)?;
            args.in_rank = call.write("out.in_rank", t)?.cast();
        }
        call.check_overlap()?;
        // SAFETY: shapes, devices and overlap were checked above.
        unsafe { launch(stream, &args) }
    }
}
