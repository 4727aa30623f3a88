//! `y = epilogue(x · wᵀ + bias)` as plain loops on the CPU, in place of a kernel on the SIMT device.
//!
//! The emulator spends its time on fibers and checks; a language model's products are too many for that. Products and
//! sums are in f32 as in the kernels; sixteen partial sums, which vectorise, are added at the end. An element's order of
//! summation depends on `k` alone.

use crate::device::Stream;
use crate::error::Result;
use crate::kernels::gemm::epilogue;
use crate::kernels::gemm::linear_fma::Args;
use cuda_std::{DType, Float};

/// Products below which more threads do not pay.
const PARALLEL: usize = 1 << 16;

/// Rows of `w` that a task takes.
const ROWS: usize = 64;

/// The row of `width` elements that starts at `from`, widened.
///
/// # Safety
/// The elements may be read.
pub(crate) unsafe fn widen_row<T: Float>(from: *const T, width: usize, to: &mut [f32]) {
    // What is empty may be anywhere.
    if width == 0 {
        return;
    }
    // SAFETY: promised by the caller; tensors are aligned to their elements.
    let row = unsafe { std::slice::from_raw_parts(from, width) };
    for (to, from) in to.iter_mut().zip(row) {
        *to = from.to_f32();
    }
}

/// [`widen_row`] into `room`, which is as long, or the row where it is if it is of `f32`.
///
/// # Safety
/// The elements may be read, and nobody writes them as long as the row is in use.
pub(crate) unsafe fn widened<T: Float>(from: *const T, width: usize, room: &mut [f32]) -> &[f32] {
    if T::DTYPE == DType::F32 && width > 0 {
        // SAFETY: promised by the caller; the elements are of this type.
        return unsafe { std::slice::from_raw_parts(from.cast(), width) };
    }
    // SAFETY: promised by the caller.
    unsafe { widen_row(from, width, room) };
    room
}

/// Runs it on `stream`, which is one of a SIMT device.
///
/// # Errors
/// [`Error::Unsupported`](crate::Error::Unsupported) on a GPU.
///
/// # Safety
/// As for [`launch`](super::linear::launch).
pub(super) unsafe fn linear_host<Y: Float, X: Float, W: Float>(stream: &Stream, args: &Args) -> Result<()> {
    let args = Shared(*args);
    let parallel = stream.device().simt_options().is_some_and(|o| o.parallel);
    let op = "linear";
    // SAFETY: forwarded to the caller.
    stream.run_on_host(op, move || unsafe { run::<Y, X, W>(&args, parallel) })
}

/// Addresses that several threads use.
struct Shared(Args);
// SAFETY: threads write different elements of `y` and only read the rest, as `launch` demands.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

unsafe fn run<Y: Float, X: Float, W: Float>(args: &Shared, parallel: bool) {
    let Args { m, n, k, x_row, .. } = args.0;
    let (m, n, k) = (m as usize, n as usize, k as usize);
    let mut x = vec![0f32; m * k];
    for (r, to) in x.chunks_exact_mut(k.max(1)).enumerate() {
        // SAFETY: row `r` of `x`.
        unsafe { widen_row(args.0.x.cast::<X>().add(r * x_row), k, to) };
    }
    // SAFETY: each task has rows of `w`, so columns of `y`, of its own.
    let task = |task: usize| unsafe { columns::<Y, W>(args, &x, task * ROWS..((task + 1) * ROWS).min(n)) };
    let tasks = n.div_ceil(ROWS);
    if parallel && m * n * k >= PARALLEL {
        simt::for_each(tasks, task);
    } else {
        (0..tasks).for_each(task);
    }
}

/// Columns of `y`, for all tokens.
///
/// # Safety
/// Nobody else accesses those columns meanwhile.
unsafe fn columns<Y: Float, W: Float>(args: &Shared, x: &[f32], columns: std::ops::Range<usize>) {
    let Args { y, w, bias, m, k, y_row, w_row, kind, .. } = args.0;
    let k = k as usize;
    let mut room = vec![0f32; k];
    for c in columns {
        // SAFETY: row `c` of `w`, and element `c` of a bias that is there.
        let (row, add) = unsafe {
            let add = if bias.is_null() { 0.0 } else { bias.cast::<Y>().add(c).read().to_f32() };
            (widened(w.cast::<W>().add(c * w_row), k, &mut room), add)
        };
        for t in 0..m as usize {
            let sum = simt::dot(&x[t * k..][..k], row);
            // SAFETY: element `[t, c]` of `y`.
            unsafe { y.cast::<Y>().add(t * y_row + c).write(Y::from_f32(epilogue(kind, sum + add))) };
        }
    }
}
