//! Coordinates, barriers, fences, clocks.

use super::Words;
use cuda_std::shared::Carver;
use cuda_std::{dependent_launch, entries, thread};

/// Threads of a block, as `[16, 2, 2]`.
pub const THREADS: usize = 64;
/// Blocks, as `[2, 1, 1]`.
pub const BLOCKS: usize = 2;
/// Words of a thread.
pub const WORDS: usize = 19;
/// Dynamic shared memory.
pub const SHARED_BYTES: usize = 1024;

/// `out`: `[BLOCKS, THREADS, WORDS]`.
#[inline(always)]
pub unsafe fn conformance(out: *mut u32) {
    let t = thread::linear_thread_idx();
    let block = thread::block_idx_x() + thread::block_idx_y() + thread::block_idx_z();
    let mut words = Words::of(block * THREADS as u32 + t, out, WORDS);

    words.put(thread::thread_idx_x() | thread::thread_idx_y() << 8 | thread::thread_idx_z() << 16);
    words.put(thread::block_dim_x() | thread::block_dim_y() << 8 | thread::block_dim_z() << 16);
    words.put(thread::grid_dim_x() | thread::grid_dim_y() << 8 | thread::grid_dim_z() << 16);
    words.put(thread::index_1d());
    words.put(t);

    let shared = Carver::new().take::<u32>(128);
    shared.set(t, t * t);
    thread::sync_threads();
    words.put(shared.get(63 - t));
    words.put(thread::sync_threads_count(t.is_multiple_of(3)));
    words.put(thread::sync_threads_and(t < 64) as u32 | (thread::sync_threads_and(t < 63) as u32) << 1);
    words.put(thread::sync_threads_or(t == 5) as u32 | (thread::sync_threads_or(t > 63) as u32) << 1);

    // A warp produces for the other through named barrier 1.
    if t < 32 {
        shared.set(64 + t, t + 1);
        thread::arrive_named(1, 64);
        words.put(0);
    } else {
        thread::sync_named(1, 64);
        words.put(shared.get(32 + t));
    }
    let all = thread::sync_named_and(2, 64, t < 64);
    words.put(all as u32 | (thread::sync_named_and(2, 64, t != 7) as u32) << 1);

    thread::block_fence();
    thread::device_fence();
    thread::system_fence();
    let (clock, timer) = (thread::clock64(), thread::globaltimer());
    thread::nanosleep(100);
    words.put((thread::clock64() >= clock && thread::globaltimer() >= timer) as u32);
    words.put((thread::clock() != 0x1234_5678 || thread::smid() < 4096) as u32);
    words.put(thread::sync_threads_count(thread::elect_one()));

    // What does nothing without a cluster and without a dependent launch, and what never does anything to a result.
    dependent_launch::wait();
    dependent_launch::launch_dependents();
    dependent_launch::begin();
    thread::spin_hint();
    words.put(cuda_std::shared::address(shared.ptr(8u32)) - cuda_std::shared::address(shared.ptr(0u32)));
    words.put(shared.address(3u32) - shared.address(0u32));

    // A struct over the block's shared memory.
    #[repr(C)]
    struct Layout {
        _first: [u32; 128],
        halves: [[u16; 4]; 16],
        last: f32,
    }
    let halves = cuda_std::shared_field!(Layout, halves);
    let last = cuda_std::shared_field!(Layout, last);
    halves.set(t, t as u16 * 3);
    if t == 0 {
        last.set(0u32, 0.75);
    }
    thread::sync_threads();
    words.put(halves.get(t ^ 1) as u32);
    words.put_f32(last.get(0u32));
    words.put((shared.ptr(0u32) == cuda_std::shared::dynamic_shared_mem()) as u32);
    words.done();
}

entries! {
    pub struct Args(out: *mut u32);
    conformance_thread {} [64] => conformance;
}
