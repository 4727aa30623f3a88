//! `out[t] = Σ w · down(act(gate_up(x[t])))` as plain loops on the CPU, in place of kernels on the SIMT device.
//!
//! As [`linear_host`](crate::gemm::linear_host): the emulator is too slow for a model's products. The arithmetic is that of
//! the kernels: products and sums in f32, the intermediate row rounded to `T`, slots weighted and added in their order.

use super::fused::{FusedShape, GateUp, Operands};
use crate::device::Stream;
use crate::error::Result;
use crate::gemm::linear_host::{widen_row, widened};
use crate::kernels::moe::expert_activation::ExpertActivation;
use cuda_std::Float;
use std::ffi::c_void;

/// Addresses that several threads use.
#[derive(Clone, Copy)]
struct Shared {
    shape: FusedShape,
    o: Operands,
}
// SAFETY: tasks write different rows of `out` and only read the rest, as `fused_host` demands.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

/// Weights of an expert, and biases or null.
struct Expert<T> {
    w13: *const T,
    w2: *const T,
    bias13: *const T,
    bias2: *const T,
}

/// Runs it on `stream`, which is one of a SIMT device.
///
/// # Errors
/// [`Error::Unsupported`](crate::Error::Unsupported) on a GPU.
///
/// # Safety
/// As for [`launch`](super::fused::launch), without a workspace.
pub(super) unsafe fn fused_host<T: Float>(stream: &Stream, shape: &FusedShape, operands: &Operands) -> Result<()> {
    let parallel = stream.device().simt_options().is_some_and(|o| o.parallel);
    let all = Shared { shape: *shape, o: *operands };
    stream.run_on_host("moe::fused", move || {
        let Shared { shape, o } = all;
        // SAFETY: one number, if it is there.
        let present = if o.num_tokens.is_null() { i32::MAX } else { unsafe { o.num_tokens.read() } };
        let tokens = shape.tokens.min(present.max(0) as usize);
        // SAFETY: each token has a row of `out` of its own.
        let task = |token: usize| unsafe { one_token::<T>(&all, token) };
        if parallel { simt::for_each(tokens, task) } else { (0..tokens).for_each(task) }
    })
}

/// The expert and weight of a slot, if there is one here.
unsafe fn pair<T: Float>(all: &Shared, token: usize, slot: usize) -> Option<(Expert<T>, f32)> {
    let Shared { shape, o } = all;
    let at = token * shape.top_k + slot;
    let shared = |s: usize| Some(shape.experts + s).filter(|_| s < shape.shared_experts);
    let (expert, weight) = if slot >= shape.top_k {
        (shared(slot - shape.top_k), 1.0)
    } else {
        // SAFETY: element `[token, slot]` of both.
        let (id, weight) = unsafe { (o.topk_ids.add(at).read(), o.topk_weights.add(at).read()) };
        let expert = match usize::try_from(id) {
            Err(_) => None,
            Ok(id) if id >= o.global_experts => shared(id - o.global_experts),
            Ok(id) if o.expert_map.is_null() => Some(id),
            // SAFETY: an element of the map, which has one for every expert.
            Ok(id) => usize::try_from(unsafe { o.expert_map.add(id).read() }).ok().filter(|&e| e < shape.experts),
        };
        (expert, weight)
    };
    let expert = expert?;
    let rows = o.gate_up.rows() * shape.intermediate;
    let own = expert < shape.experts;
    let n = if own { expert } else { expert - shape.experts };
    let [w13, w2, bias13, bias2] =
        if own { [o.w13, o.w2, o.bias13, o.bias2] } else { [o.shared13, o.shared2, o.shared_bias13, o.shared_bias2] };
    let part = |base: *const c_void, len: usize| {
        if base.is_null() { std::ptr::null() } else { base.cast::<T>().wrapping_add(n * len) }
    };
    let (hidden, inter) = (shape.hidden, shape.intermediate);
    let expert = Expert {
        w13: part(w13, rows * hidden),
        w2: part(w2, hidden * inter),
        bias13: part(bias13, rows),
        bias2: part(bias2, hidden),
    };
    Some((expert, weight))
}

unsafe fn one_token<T: Float>(all: &Shared, token: usize) {
    let Shared { shape, o } = all;
    let (hidden, inter) = (shape.hidden, shape.intermediate);
    let (kind, alpha, limit) = o.activation.parts();
    let activation = ExpertActivation { kind, alpha, limit };
    let (mut x, mut sum) = (vec![0f32; hidden], vec![0f32; hidden]);
    let (mut middle, mut wide, mut narrow) = (vec![0f32; inter], vec![0f32; hidden], vec![0f32; inter]);
    // SAFETY: row `token` of `x`.
    unsafe { widen_row(o.x.cast::<T>().add(token * o.x_row), hidden, &mut x) };
    for slot in 0..shape.slots() {
        // SAFETY: forwarded to the caller.
        let Some((expert, weight)) = (unsafe { pair::<T>(all, token, slot) }) else { continue };
        // SAFETY: element `r` of a bias that is there.
        let bias = |of: *const T, r: usize| if of.is_null() { 0.0 } else { unsafe { of.add(r).read() }.to_f32() };
        let mut product = |r: usize| {
            // SAFETY: row `r` of the expert's first matrix.
            let row = unsafe { widened(expert.w13.add(r * hidden), hidden, &mut wide) };
            simt::dot(&x, row) + bias(expert.bias13, r)
        };
        for (r, m) in middle.iter_mut().enumerate() {
            let value = match o.gate_up {
                GateUp::Halves => activation.gated(product(r), product(inter + r)),
                GateUp::Interleaved => activation.gated(product(2 * r), product(2 * r + 1)),
                GateUp::GateOnly => activation.apply(product(r)),
            };
            *m = T::from_f32(value).to_f32();
        }
        for (r, s) in sum.iter_mut().enumerate() {
            // SAFETY: row `r` of the expert's second matrix.
            let row = unsafe { widened(expert.w2.add(r * inter), inter, &mut narrow) };
            *s += weight * (simt::dot(&middle, row) + bias(expert.bias2, r));
        }
    }
    for (c, v) in sum.into_iter().enumerate() {
        // SAFETY: element `[token, c]` of `out`.
        unsafe { o.out.cast::<T>().add(token * o.out_row + c).write(T::from_f32(v)) };
    }
}
