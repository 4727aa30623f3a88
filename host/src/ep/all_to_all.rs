//! Every rank sends each rank a piece of the same size.

use super::{Blocks, Communicator};
use crate::check::Call;
use crate::device::{Geometry, Stream};
use crate::error::Result;
use crate::kernels::ep::all_to_all as kernel;
use crate::tensor::Tensor;
use cuda_std::Element;

pub use kernel::Args;

const OP: &str = "ep::all_to_all";

/// How to launch `ep_all_to_all`.
pub const fn geometry(blocks: u32, threads: u32) -> Geometry {
    Geometry::linear(blocks, threads).resident().dependent()
}

/// Launches the exchange (layer L1).
///
/// # Errors
/// Those of [`Stream::launch`].
///
/// # Safety
/// The link is that of a rank on the stream's device; `x` has a piece for each rank, and the ranks' rows have room for as much.
/// All of it lives until the launch is done. As many blocks are resident at the same time.
pub unsafe fn launch(stream: &Stream, blocks: u32, threads: u32, args: &Args) -> Result<()> {
    // SAFETY: forwarded to the caller.
    unsafe { stream.launch(&kernel::ep_all_to_all::ENTRY, &geometry(blocks, threads), args) }
}

impl Communicator {
    /// Sends piece `d` of `x` to rank `d`: `x` is `[ranks, ..]`, contiguous, and so is the result, in which piece `s` is from rank
    /// `s`. Pieces are multiples of 16 bytes. The result lies in the communicator's buffers, until the next operation.
    ///
    /// # Errors
    /// [`Shape`](crate::Error::Shape), [`Stride`](crate::Error::Stride), [`WrongDevice`](crate::Error::WrongDevice),
    /// [`Alignment`](crate::Error::Alignment), [`Overlap`](crate::Error::Overlap) of `x` with what was received, [`Value`](crate::Error::Value) if pieces have a wrong size or there is no room, or
    /// for `blocks`. [`check`](Self::check) tells what goes wrong between the ranks.
    pub fn all_to_all<T: Element>(&mut self, stream: &Stream, x: &Tensor<T>, blocks: Blocks) -> Result<Tensor<T>> {
        self.on_own_device(OP, stream)?;
        let mut call = Call::new(OP, stream);
        if x.shape().first() != Some(&self.ranks()) {
            return Err(call.bad_shape("x", x.shape(), format!("[{}, ..]", self.ranks())));
        }
        call.contiguous("x", x)?;
        let bytes = x.len() / self.ranks() * size_of::<T>();
        call.value(bytes.is_multiple_of(16), "x", "pieces of a multiple of 16 bytes", bytes)?;
        let room = self.capacity() * self.config().hidden * 2 / self.ranks();
        call.value(bytes <= room, "x", format!("pieces of at most {room} bytes"), bytes)?;
        let from = call.read("x", x)?;
        self.writes_received(&mut call)?;
        call.check_overlap()?;
        super::aligned(OP, "x", from)?;
        let [count, threads] = self.blocks(OP, blocks, [32, 512], kernel::THREADS, |_| 0)?;
        let vectors = call.count("x", bytes / 16)?;
        let args = Args { link: self.link(stream, &[2, vectors, count, threads]), x: from.cast(), vectors };
        #[cfg(feature = "nccl")]
        if self.nccl.is_some() {
            self.nccl_begin(OP, stream, args.link.signature)?;
            self.nccl_all_to_all(stream, args.x, bytes)?;
            return Ok(self.own(|b| b.rows.reinterpret(x.shape())));
        }
        self.together(|| {
            // SAFETY: sizes and device were checked above; buffers live as long as the group.
            unsafe { launch(stream, count, threads, &args) }
        })?;
        Ok(self.own(|b| b.rows.reinterpret(x.shape())))
    }
}
