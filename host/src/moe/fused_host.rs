//! `out[t] = Σ w · down(silu(gate(x[t])) · up(x[t]))` as plain loops on the CPU, in place of kernels on the SIMT device.
//!
//! As [`linear_host`](crate::gemm::linear_host): the emulator is too slow for a model's products. Everything is in f32 with
//! one rounding at the end, and slots are added in their order.

use crate::device::Stream;
use crate::error::Result;
use crate::gemm::linear_host::{dot, widen_row};
use cuda_std::{Float, float};
use rayon::prelude::*;

/// Addresses and extents: `out`, `x` `[tokens, hidden]`, `w13` `[experts, 2 inter, hidden]` (gates first), `w2`
/// `[experts, hidden, inter]`, `weights` and `ids` `[tokens, slots]`; all dense.
#[derive(Clone, Copy)]
pub(crate) struct HostArgs<T> {
    pub(crate) out: *mut T,
    pub(crate) x: *const T,
    pub(crate) w13: *const T,
    pub(crate) w2: *const T,
    pub(crate) weights: *const f32,
    pub(crate) ids: *const i32,
    pub(crate) tokens: usize,
    pub(crate) hidden: usize,
    pub(crate) inter: usize,
    pub(crate) slots: usize,
    pub(crate) experts: usize,
}
// SAFETY: tasks write different rows of `out` and only read the rest, as `fused_host` demands.
unsafe impl<T> Send for HostArgs<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for HostArgs<T> {}

/// Runs it on `stream`, which is one of a SIMT device. Slots whose id is no expert add nothing.
///
/// # Errors
/// [`Error::Unsupported`](crate::Error::Unsupported) on a GPU.
///
/// # Safety
/// The addresses are of memory of those sizes, aligned to their elements, until the work (or the graph that captures it)
/// is done; `out` overlaps nothing.
pub(crate) unsafe fn fused_host<T: Float>(stream: &Stream, args: HostArgs<T>) -> Result<()> {
    let parallel = stream.device().simt_options().is_some_and(|o| o.parallel);
    stream.run_on_host("moe::fused", move || {
        // SAFETY: each token has a row of `out` of its own.
        let task = |token: usize| unsafe { one_token(&args, token) };
        if parallel { (0..args.tokens).into_par_iter().for_each(task) } else { (0..args.tokens).for_each(task) }
    })
}

unsafe fn one_token<T: Float>(args: &HostArgs<T>, token: usize) {
    let &HostArgs { hidden, inter, slots, .. } = args;
    let mut x = vec![0f32; hidden];
    // SAFETY: row `token` of `x`.
    unsafe { widen_row(args.x.add(token * hidden), hidden, &mut x) };
    let pair = |slot: usize| {
        // SAFETY: element `[token, slot]` of both.
        unsafe { (args.ids.add(token * slots + slot).read(), args.weights.add(token * slots + slot).read()) }
    };
    // One slot's share, with its weight.
    let share = |slot: usize| -> Option<Vec<f32>> {
        let (id, weight) = pair(slot);
        let expert = usize::try_from(id).ok().filter(|&e| e < args.experts)?;
        let mut row = vec![0f32; hidden];
        let mut middle = vec![0f32; inter];
        let mut product = |from: usize, r: usize| {
            // SAFETY: row `r` of the expert's gate and up.
            unsafe { widen_row(args.w13.add((expert * 2 * inter + from + r) * hidden), hidden, &mut row) };
            dot(&x, &row)
        };
        for (r, m) in middle.iter_mut().enumerate() {
            let (gate, up) = (product(0, r), product(inter, r));
            *m = gate * float::sigmoid(gate) * up * weight;
        }
        let mut row = vec![0f32; inter];
        let mut out = vec![0f32; hidden];
        for (r, o) in out.iter_mut().enumerate() {
            // SAFETY: row `r` of the expert's down.
            unsafe { widen_row(args.w2.add((expert * hidden + r) * inter), inter, &mut row) };
            *o = dot(&middle, &row);
        }
        Some(out)
    };
    let mut sum = vec![0f32; hidden];
    for one in (0..slots).filter_map(share) {
        sum.iter_mut().zip(one).for_each(|(s, v)| *s += v);
    }
    for (c, v) in sum.into_iter().enumerate() {
        // SAFETY: element `[token, c]` of `out`.
        unsafe { args.out.add(token * hidden + c).write(T::from_f32(v)) };
    }
}
