//! `y = x / sqrt(mean(x^2) + eps) * w`, a block for each row.

use cuda_std::shared::Carver;
use cuda_std::{Float, Global, GlobalMut, entries, float, thread, warp};

/// Dynamic shared memory: a float for each of up to 32 warps.
pub const SHARED_BYTES: usize = 32 * 4;

/// `x`, `y`: `[rows, n]`; `w`: `[n]`. Grid: rows; block: a multiple of 32.
#[inline(always)]
pub unsafe fn rms_norm<T: Float>(x: *const T, weight: *const T, y: *mut T, n: u32, eps: f32) {
    let row = thread::block_idx_x() as usize * n as usize;
    let (x, y) = (Global::new(x).offset(row), GlobalMut::new(y).offset(row));
    let weighted = !weight.is_null();
    let weight = Global::new(weight);
    let (tid, threads) = (thread::thread_idx_x(), thread::block_dim_x());
    let partial = Carver::new().take::<f32>(32);

    let mut sum = 0.0;
    let mut i = tid;
    while i < n {
        let v = x.get(i).to_f32();
        sum += v * v;
        i += threads;
    }

    let sum = warp::reduce_sum(sum);
    let (lane, warp_id, warps) = (warp::lane_id(), tid / 32, threads / 32);
    if lane == 0 {
        partial.set(warp_id, sum);
    }
    thread::sync_threads();
    let total = warp::reduce_sum(if lane < warps { partial.get(lane) } else { 0.0 });
    let scale = float::rsqrt(total / n as f32 + eps);

    let mut i = tid;
    while i < n {
        let w = if weighted { weight.get(i).to_f32() } else { 1.0 };
        y.set(i, T::from_f32(x.get(i).to_f32() * scale * w));
        i += threads;
    }
}

entries! {
    pub struct Args<T>(x: *const T, weight: *const T, y: *mut T, n: u32, eps: f32);
    rms_norm_f32 { type T = f32; } [1024] => rms_norm::<T>;
    rms_norm_f16 { type T = half::f16; } [1024] => rms_norm::<T>;
    rms_norm_bf16 { type T = half::bf16; } [1024] => rms_norm::<T>;
}
