//! Expert capacity: who gets a place, who goes on to the next choice, who is dropped.
//!
//! Sources: Lepikhin et al., *GShard*, 2020; Fedus et al., *Switch Transformers*, 2021.

use crate::check::Call;
use crate::device::{Geometry, Stream};
use crate::error::Result;
use crate::kernels::moe::capacity as kernel;
use crate::tensor::Tensor;

pub use kernel::Args;

/// The most experts: counters are in shared memory, 72 KiB, which every GPU from sm_80 on gives a block that asks for it.
pub const MAX_EXPERTS: usize = 2048;

/// How to launch it. For more than [`MAX_EXPERTS`] no launch takes it.
pub const fn geometry(experts: u32) -> Geometry {
    let experts = experts as usize;
    let shared = if experts > MAX_EXPERTS { u32::MAX } else { kernel::shared_bytes(experts) as u32 };
    Geometry::linear(1, kernel::THREADS as u32).shared_bytes(shared).dependent()
}

/// Launches on raw pointers (layer L1).
///
/// # Errors
/// Those of [`Stream::launch`], which has no room for more than [`MAX_EXPERTS`].
///
/// # Safety
/// The pointers are device memory as [`capacity`](kernel::capacity()) documents, until the launch is done; outputs overlap no
/// other argument.
pub unsafe fn launch(stream: &Stream, args: &Args) -> Result<()> {
    // SAFETY: forwarded to the caller.
    unsafe { stream.launch(&kernel::moe_capacity::ENTRY, &geometry(args.experts), args) }
}

/// Grants tokens their choices of experts, `capacity` tokens an expert at most.
///
/// `topk_ids` is `[tokens, choices]`, best first; a token wants `wanted` experts. Every token's first choice is served first, in
/// the order of the tokens, then the second ones, and so on; a choice is granted if the token has fewer than `wanted` and the
/// expert fewer than `capacity`. With `wanted == choices` what finds no room is dropped; with more choices it goes to the next.
///
/// `kept` is `topk_ids` with -1 for what was not granted: what [`moe::sort`](super::sort()), [`moe::permute`](super::permute())
/// and [`moe::fused`](super::fused()) skip. `loads` is `[experts]`: tokens of each expert. Ids of -1 and out of range are not
/// granted. All are contiguous.
///
/// # Errors
/// [`Shape`](crate::Error::Shape), [`Stride`](crate::Error::Stride), [`Value`](crate::Error::Value),
/// [`Overlap`](crate::Error::Overlap), [`WrongDevice`](crate::Error::WrongDevice).
///
/// ```
/// use warploom::{Device, Stream, Tensor, moe};
/// let device = Device::simt();
/// let stream = Stream::new(&device)?;
/// let ids = Tensor::from_slice(&device, &[0, 1, 0, 2, 0, 1], &[3, 2])?; // three tokens, two choices, one expert wanted
/// let mut kept = Tensor::zeros(&device, &[3, 2])?;
/// moe::capacity(&stream, &mut kept, None, &ids, 3, 1, 1)?;
/// assert_eq!(kept.to_vec()?, [0, -1, -1, 2, -1, 1]);
/// # Ok::<(), warploom::Error>(())
/// ```
pub fn capacity(
    stream: &Stream,
    kept: &mut Tensor<i32>,
    loads: Option<&mut Tensor<i32>>,
    topk_ids: &Tensor<i32>,
    experts: usize,
    wanted: usize,
    capacity: usize,
) -> Result<()> {
    let mut call = Call::new("moe::capacity", stream);
    let [tokens, choices] = *topk_ids.shape() else {
        return Err(call.bad_shape("topk_ids", topk_ids.shape(), "[tokens, choices]"));
    };
    call.same_shape("kept", kept.shape(), &[tokens, choices])?;
    call.contiguous("kept", kept)?;
    call.contiguous("topk_ids", topk_ids)?;
    if let Some(loads) = &loads {
        call.same_shape("loads", loads.shape(), &[experts])?;
        call.contiguous("loads", loads)?;
    }
    call.value(experts <= MAX_EXPERTS, "experts", format!("at most {MAX_EXPERTS}"), experts)?;
    // Without tokens there is nothing to choose, however many choices each would have.
    let choices = if tokens == 0 { 0 } else { choices };
    // What asks for one expert is counted in 32 bits.
    call.count("topk_ids", tokens.saturating_mul(choices))?;
    let args = Args {
        kept: call.write("kept", kept)?.cast(),
        loads: call.write_opt("loads", loads)?.cast(),
        topk_ids: call.read("topk_ids", topk_ids)?.cast(),
        tokens: call.count("topk_ids", tokens)?,
        choices: call.count("topk_ids", choices)?,
        wanted: call.count("wanted", wanted)?,
        experts: experts as u32,
        capacity: call.count("capacity", capacity)?,
    };
    call.check_overlap()?;
    // SAFETY: shapes, device and overlap were checked above.
    unsafe { launch(stream, &args) }
}
