//! Products of the fused block by ordinary multiply-adds: any shape, any float type.
//!
//! The path for f32, and for rows that are no multiples of 16 bytes. A block computes [`PAIRS`] pairs by [`COLUMNS`] rows of
//! weights, gates and values side by side in a thread; tiles of 16 along K pass through shared memory as f32. Every sum is
//! in ascending K with one `fma` a term.

use super::fused::{Fused, Kernel, tile};
use cuda_std::vec::B128;
use cuda_std::{Float, dependent_launch, float, shared, thread};

/// Pairs of a block: the block size of the sorted list.
pub const PAIRS: usize = 16;
/// Rows of weights of a block: as many outputs, or half as many if they have a gate and a value.
pub const COLUMNS: usize = 64;
/// Threads of a block.
pub const THREADS: usize = 256;
/// Depth of a step along K.
const STEP: usize = 16;
/// Rows in shared memory: padded, so that the transposing stores spread over the banks.
const X_ROW: usize = PAIRS + 1;
const W_ROW: usize = COLUMNS + 4;
/// Dynamic shared memory.
pub const SHARED_BYTES: usize = (STEP * X_ROW + STEP * W_ROW) * 4;

/// The first product, or the second.
pub struct Fma<const UP: bool>;

impl<T: Float, const UP: bool> Kernel<T> for Fma<UP> {
    #[inline(always)]
    unsafe fn run(a: Fused<T>) {
        dependent_launch::wait();
        dependent_launch::launch_dependents();
        let (column_tile, block) = tile();
        let bin = a.expert_ids.get(block);
        if bin < 0 {
            return;
        }
        let expert = a.expert(bin as u32);
        let mut carver = shared::Carver::new();
        let (ws, xs) = (carver.take::<f32>(STEP * W_ROW), carver.take::<f32>(STEP * X_ROW));
        let tid = thread::thread_idx_x();
        // Loading: thread `i` takes column `i % 16` of row `i / 16` of x, and of rows `i / 16 + 16 j` of the weights.
        // Computing: pair `i / 16`, columns `4 (i % 16)` and the three after.
        let (low, high) = (tid % 16, tid / 16);
        let pair = a.sorted_pair(block, PAIRS as u32, high);
        let operand = a.operand::<UP>(pair.unwrap_or(0));
        let outputs = if a.gated() { COLUMNS / 2 } else { COLUMNS } as u32;
        let first = column_tile * outputs;
        // Of a thread's four columns two are gates and two their values, if there are any.
        let output_of = |c: u32| if a.gated() { (first + c / 4 * 2 + c % 2, c % 4 >= 2) } else { (first + c, false) };

        let mut acc = [0f32; 4];
        let mut k0 = 0;
        while k0 < a.k {
            let at = k0 + low;
            let v = if at < a.k && pair.is_some() {
                let at = operand + at as usize;
                if UP { a.x.get(at) } else { a.h.get(at) }.to_f32()
            } else {
                0.0
            };
            xs.set(low as usize * X_ROW + high as usize, v);
            for j in 0..COLUMNS as u32 / 16 {
                let c = high + 16 * j;
                let (output, up) = output_of(c);
                let v = if at < a.k && output < a.n {
                    expert.weights.get(a.weight_row(output, up) as usize * a.k as usize + at as usize).to_f32()
                } else {
                    0.0
                };
                ws.set(low as usize * W_ROW + c as usize, v);
            }
            thread::sync_threads();
            for s in 0..STEP {
                let v = xs.get(s * X_ROW + high as usize);
                let B128(w) = ws.get_as::<B128<f32, 4>>(s * W_ROW + 4 * low as usize);
                for i in 0..4 {
                    acc[i] = float::fma(v, w[i], acc[i]);
                }
            }
            thread::sync_threads();
            k0 += STEP as u32;
        }

        let Some(pair) = pair else { return };
        for i in 0..4 {
            let (output, up) = output_of(4 * low + i as u32);
            if output < a.n && !up {
                if UP {
                    a.store_up(expert, pair, output, acc[i], acc[(i + 2) % 4]);
                } else {
                    a.store_down(expert, pair, output, acc[i]);
                }
            }
        }
    }
}
