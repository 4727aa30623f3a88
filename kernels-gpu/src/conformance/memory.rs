//! Vector accesses with cache hints, asynchronous copies, and mbarriers as sm_80 has them.

use super::Words;
use cuda_std::shared::Carver;
use cuda_std::vec::{self, B32, B64, B128};
use cuda_std::{Global, GlobalMut, cp_async, dependent_launch, entries, mbarrier, thread};

/// Threads of the block.
pub const THREADS: usize = 64;
/// Words of a thread.
pub const WORDS: usize = 31;
/// Words of `scratch`.
pub const SCRATCH: usize = 8 * 4 * THREADS;
/// Dynamic shared memory.
pub const SHARED_BYTES: usize = 8192;

/// `data`: `[4 THREADS]`; `scratch`: `[SCRATCH]`; `out`: `[THREADS, WORDS]`. Grid: 1; block: `THREADS`.
#[inline(always)]
pub unsafe fn conformance(data: *const u32, scratch: *mut u32, out: *mut u32) {
    let t = thread::thread_idx_x();
    // What is computed before the wait for other kernels stays what it is.
    let ([second, fourth], [seven, sum]) = dependent_launch::begin_at(
        [data.wrapping_add(t as usize).cast(), data.wrapping_add(3 * t as usize).cast()],
        [7 * t, t + 5],
    );
    let [nine] = dependent_launch::begin_with([9 * t]);
    let (input, output) = (Global::new(data), GlobalMut::new(scratch));
    let mut words = Words::new(out, WORDS);
    vec::prefetch_l2(data);
    words.put(Global::new(second.cast::<u32>()).get(1u32) ^ Global::new(fourth.cast::<u32>()).get(2u32));
    words.put(seven ^ sum << 16);
    words.put(nine);

    // Loads: each hint in each width once.
    let B128([a, ..]) = input.get_hinted::<B128<u32, 4>>(4 * t, vec::Reused);
    let B128([_, b, ..]) = input.get_hinted::<B128<u32, 4>>(4 * t, vec::Streaming);
    let B128([_, _, c, _]) = input.get_hinted::<B128<u32, 4>>(4 * t, vec::EvictFirst);
    let B128([_, _, _, d]) = input.get_hinted::<B128<u32, 4>>(4 * t, vec::EvictLast);
    words.put(a ^ b ^ c ^ d);
    let B64([e, f]) = input.get_hinted::<B64<u32, 2>>(2 * t, vec::Streaming);
    words.put(e.wrapping_sub(f));
    let B64([e, f]) = input.get_hinted::<B64<u32, 2>>(2 * t, vec::EvictFirst);
    words.put(e.wrapping_add(f));
    let B32([g, h]) = input.get_hinted::<B32<u16, 2>>(t, vec::Reused);
    words.put(g as u32 * 3 + h as u32);
    words.put(input.get_hinted::<u32>(t, vec::EvictLast));
    words.put(input.get_hinted::<u32>(t, vec::SecondLevel));
    let B128(bytes) = input.get_as::<B128<u8, 16>>(4 * t);
    words.put(bytes[0] as u32 | (bytes[15] as u32) << 8);

    // Stores.
    let four = B128([a, b, c, d]);
    output.set_hinted(4 * t, four, vec::Streaming);
    output.set_hinted(256 + 4 * t, four, vec::EvictFirst);
    output.set_hinted(512 + 4 * t, four, vec::EvictLast);
    output.set_hinted(768 + 4 * t, four, vec::SecondLevel);
    output.set_hinted(1024 + 2 * t, B64([e, f]), vec::StoreStreaming);
    output.set_hinted(1152 + t, t * 7, vec::StoreStreaming);
    output.set_streaming_if(t.is_multiple_of(5), 1024 + 2 * t, B64([t * 3; 2]));
    output.set_streaming_if(t.is_multiple_of(7), 1152 + t, t * 11);
    output.set_hinted(1216 + t, B32([t as u16, 9u16]), vec::Streaming);
    output.set_as(1280 + 4 * t, B128([t, t + 1, t + 2, t + 3]));
    output.set_as(1536 + 4 * t, four);
    output.set_if(t.is_multiple_of(3), 1536 + 4 * t, B128([t * 5; 4]));
    output.set_as(1792 + 4 * t, four);
    vec::store_if((t + 2).is_multiple_of(3), scratch.wrapping_add(1792 + 4 * t as usize).cast(), B128([t * 9; 4]));
    thread::sync_threads();
    let other = t ^ 33;
    let B128(v) = output.get_hinted::<B128<u32, 4>>(256 * (t % 4) + 4 * other, vec::SecondLevel);
    words.put(v[0] ^ v[3]);
    words.put(output.get(1024 + other) ^ output.get(1088 + other));
    words.put(output.get(1152 + other));
    words.put(output.get(1216 + other));
    words.put(output.get(1280 + 4 * other + 3));
    words.put(output.get(1536 + 4 * other + 1));
    words.put(output.get(1792 + 4 * other + 2));

    // cp.async in all widths, with and without a rest of zeroes, in two groups.
    let mut carver = Carver::new();
    let (tile, small, bars) = (carver.take::<u32>(256), carver.take::<u32>(512), carver.take::<u64>(2));
    cp_async::copy_16(tile.ptr(4 * t), input.ptr(4 * t));
    cp_async::commit_group();
    cp_async::copy_16_zfill(small.ptr(4 * t), input.ptr(4 * t), 4 * (t % 5));
    cp_async::copy::<8, _>(small.address(256 + 2 * t), input.ptr(2 * t), t % 9);
    cp_async::copy::<4, _>(small.address(384 + t), input.ptr(t), 4);
    cp_async::commit_group();
    cp_async::wait_group::<1>();
    words.put(tile.get(4 * t + 1));
    thread::sync_threads();
    words.put(tile.get(4 * other + 2));
    cp_async::wait_group::<0>();
    thread::sync_threads();
    words.put(small.get(4 * other));
    words.put(small.get(4 * other + 1) ^ small.get(4 * other + 3));
    words.put(small.get(256 + other));
    words.put(small.get(384 + other));

    // mbarriers: all threads arrive; a phase later copies arrive for them.
    if t == 0 {
        mbarrier::init(bars.ptr(0u32), THREADS as u32);
        mbarrier::init(bars.address(1u32), 1);
    }
    thread::sync_threads();
    small.set(t, t * 11);
    mbarrier::arrive(bars.ptr(0u32));
    mbarrier::wait_parity(bars.ptr(0u32), 0);
    words.put(small.get(other));
    thread::sync_threads();
    cp_async::copy::<16, _>(tile.ptr(4 * t), input.ptr(4 * other), 16);
    cp_async::arrive(bars.ptr(0u32));
    mbarrier::wait_parity_or_trap(bars.ptr(0u32), 1);
    words.put(tile.get(4 * other));
    words.put(mbarrier::try_wait_parity(bars.ptr(0u32), 1) as u32);
    // The first phase of the second barrier is under way, the one before it over.
    words.put(mbarrier::try_wait_parity(bars.ptr(1u32), 1) as u32);
    words.put(mbarrier::test_wait_parity(bars.ptr(0u32), 1) as u32);
    words.put(mbarrier::test_wait_parity(bars.ptr(1u32), 1) as u32);
    words.put(mbarrier::test_wait_parity(bars.ptr(1u32), 0) as u32);
    thread::sync_threads();
    tile.set_as(2 * t, B64([t, t + 100]));
    thread::sync_threads();
    let B64([low, high]) = tile.get_as::<B64<u32, 2>>(2 * other);
    words.put(low << 16 | high);
    if t == 0 {
        mbarrier::invalidate(bars.ptr(0u32));
        mbarrier::invalidate(bars.ptr(1u32));
    }
    words.done();
}

entries! {
    pub struct Args(data: *const u32, scratch: *mut u32, out: *mut u32);
    conformance_memory {} [64, 8] => conformance;
}
