//! Mixture of experts.

pub(crate) mod fused_host;
pub mod fused;
pub mod gate;
pub mod sort;

pub use fused::{ExpertActivation, FusedOptions, FusedPath, FusedShape, GateUp, SharedExperts, fused};
pub use gate::{Bias, GateOptions, Scoring, gate};

use crate::{Float, Result, Stream, Tensor};

/// Stand-in until `moe::fused` is there.
#[doc(hidden)]
pub fn fused_on_host<T: Float>(
    stream: &Stream,
    out: &mut Tensor<T>,
    x: &Tensor<T>,
    w13: &Tensor<T>,
    w2: &Tensor<T>,
    weights: &Tensor<f32>,
    ids: &Tensor<i32>,
) -> Result<()> {
    let args = fused_host::HostArgs {
        out: out.as_mut_ptr(),
        x: x.as_ptr(),
        w13: w13.as_ptr(),
        w2: w2.as_ptr(),
        weights: weights.as_ptr(),
        ids: ids.as_ptr(),
        tokens: x.dim(0),
        hidden: x.dim(1),
        inter: w2.dim(2),
        slots: ids.dim(1),
        experts: w13.dim(0),
    };
    // SAFETY: temporary.
    unsafe { fused_host::fused_host(stream, args) }
}
pub use sort::{Local, SortConvention, SortInput, SortOptions, SortOutput, sort, sort_and_zero};
