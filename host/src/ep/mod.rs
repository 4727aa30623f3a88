//! Expert parallelism: the experts of a mixture-of-experts layer spread over several GPUs.
//!
//! [`eplb`] says which GPU holds which expert. A [`Communicator`] is one of the GPUs of a host at run time: [`dispatch`] sends tokens to
//! where their experts are, [`combine`] gets the results back and adds them up. The GPUs write to and read from each other's
//! memory; see the file of the kernels ([`crate::kernels::ep`]) for the protocol, and `docs/expert-parallelism.md`.
//!
//! [`dispatch`]: Communicator::dispatch
//! [`combine`]: Communicator::combine

pub mod all_to_all;
pub mod barrier;
pub mod combine;
mod communicator;
pub mod dispatch;
pub mod eplb;
pub mod expert_map;
mod fault;
pub mod layout;
#[cfg(feature = "nccl")]
pub mod nccl;
pub mod processes;

pub use combine::CombineOptions;
pub use communicator::{Blocks, Communicator, Config};
pub use dispatch::{Arrangement, DispatchOptions, Received, Routing, Rows};
pub use expert_map::ExpertMap;
pub use fault::{Fault, Phase};
pub use layout::LayoutOutput;
pub use processes::Exchange;

use crate::check::Call;
use crate::device::Stream;
use crate::error::{Error, Result};
use cuda_std::integer::Divisor;
use std::ffi::c_void;
use std::sync::Arc;

/// An address is a multiple of 16.
fn aligned(op: &'static str, arg: &'static str, address: *const c_void) -> Result<()> {
    let address = address as usize;
    if address.is_multiple_of(16) { Ok(()) } else { Err(Error::Alignment { op, arg, expected: 16, address }) }
}

impl Communicator {
    /// The stream is one of this rank's device.
    fn on_own_device(&self, op: &'static str, stream: &Stream) -> Result<()> {
        if stream.device() == self.device() {
            return Ok(());
        }
        let (expected, got) = (self.device().name(), stream.device().name());
        Err(Error::WrongDevice { op, arg: "stream", expected, got })
    }

    /// Peers write to what was received before, which can be no argument.
    fn writes_received(&self, call: &mut Call) -> Result<()> {
        let (mut rows, mut scales, mut ids, mut weights) =
            self.own(|b| (b.rows.clone(), b.scales.clone(), b.ids.clone(), b.weights.clone()));
        call.write("the communicator's rows", &mut rows)?;
        call.write("the communicator's scales", &mut scales)?;
        call.write("the communicator's ids", &mut ids)?;
        call.write("the communicator's weights", &mut weights)?;
        Ok(())
    }

    /// Experts of a rank, as kernels take it.
    fn per_rank(&self) -> Divisor {
        Divisor::new(self.local_experts() as u32)
    }

    /// The routing is one of this rank.
    fn own_routing(&self, op: &'static str, routing: &Routing) -> Result<()> {
        if std::ptr::eq(routing.group.as_ptr(), Arc::as_ptr(&self.group)) && routing.rank == self.rank() {
            return Ok(());
        }
        Err(Error::Value {
            op,
            arg: "routing",
            expected: format!("one of {self:?}"),
            got: "that of another communicator".into(),
        })
    }
}
