//! The copy engine, mbarriers that count bytes, and `stmatrix`.

use super::Words;
use cuda_std::shared::Carver;
use cuda_std::tma::{self, Swizzle, TensorMap};
use cuda_std::{Global, GlobalMut, entries, mbarrier, mma, thread};

/// Threads of the block.
pub const THREADS: usize = 64;
/// Words of a thread.
pub const WORDS: usize = 22;
/// Dynamic shared memory.
pub const SHARED_BYTES: usize = 20 * 1024;
/// The tensor of `map`: f32, innermost first.
pub const DIMS: [usize; 3] = [40, 12, 5];
/// The box of `map`: lines of 128 bytes, swizzled.
pub const BOX: [usize; 3] = [32, 8, 2];
/// Words of `scratch`, the tensor of `store_map`: f32 `[16, 64]` without swizzle, boxes of `[8, 32]`.
pub const SCRATCH: usize = 16 * 64;

/// `map`: a tensor map of three dimensions over `data`; `line_map`: of one, all of `data`, boxes of 64; `store_map`:
/// over `scratch`, zero; `out`: `[THREADS, WORDS]`. Grid: 1; block: `THREADS`.
#[inline(always)]
pub unsafe fn conformance(
    data: *const f32,
    map: *const TensorMap,
    scratch: *mut f32,
    line_map: *const TensorMap,
    store_map: *const TensorMap,
    out: *mut u32,
) {
    let t = thread::thread_idx_x();
    let input = Global::new(data);
    let mut words = Words::new(out, WORDS);
    let mut carver = Carver::new();
    let tile = carver.take_aligned::<f32>(512, 1024);
    let line = carver.take_aligned::<f32>(256, 1024);
    let source = carver.take_aligned::<f32>(256, 1024);
    let bars = carver.take::<u64>(4);
    let bar = bars.address(0u32);
    if t == 0 {
        mbarrier::init(bar, 1);
        mbarrier::init(bars.ptr(1u32), 3);
        mbarrier::init(bars.ptr(2u32), THREADS as u32);
        mbarrier::fence_init();
        tma::prefetch_map(map);
        tma::prefetch_map(line_map);
    }
    thread::sync_threads();

    // Bytes, and a part that waits for an expectation without an arrival.
    if t == 0 {
        mbarrier::expect_tx(bar, 512);
        mbarrier::arrive_expect_tx(bar, 512);
        tma::copy_bulk(line.ptr(0u32), data, 512, bar);
        tma::copy_bulk(line.ptr(128u32), input.ptr(300u32), 512, bar);
    }
    mbarrier::wait_parity(bar, 0);
    for i in 0..4 {
        words.put_f32(line.get((t ^ 1) + 64 * i));
    }
    thread::sync_threads();

    // A box, partly outside the tensor on every side, swizzled.
    for (phase, coords) in [[0, 0, 0], [16, 7, 4], [-8, -3, -1]].into_iter().enumerate() {
        if t == 0 {
            tma::fence_async();
            mbarrier::arrive_expect_tx(bar, 2048);
            tma::load_tensor::<3>(tile.address(0u32), map, coords, bar);
        }
        mbarrier::wait_parity_or_trap(bar, 1 ^ phase as u32 & 1);
        for i in 0..4 {
            let element = (t + 64 * i) * 2 + i % 2;
            words.put_f32(tile.get(Swizzle::B128.apply(element * 4) / 4));
        }
        thread::sync_threads();
    }
    if t == 0 {
        mbarrier::arrive_expect_tx(bar, 256);
        tma::load_tensor::<1>(line.address(0u32), line_map, [76], bar);
    }
    mbarrier::wait_parity_cluster(bar, 0);
    words.put_f32(line.get(t));

    // Out again: bytes and boxes, stored and added, the last partly outside.
    for i in 0..4 {
        source.set(t + 64 * i, (t + 64 * i) as f32);
    }
    tma::fence_async();
    thread::sync_threads();
    if t == 0 {
        tma::store_bulk(scratch, source.ptr(0u32), 128);
        tma::commit_group();
        tma::store_tensor::<2>(store_map, [32, 4], source.address(0u32));
        tma::commit_group();
        tma::wait_group::<0>();
        tma::add_bulk_f32(scratch.add(16), source.ptr(0u32), 64);
        tma::add_tensor::<2>(store_map, [40, 12], source.address(0u32));
        tma::commit_group();
        tma::wait_group_read::<0>();
        tma::wait_group::<0>();
        thread::device_fence();
    }
    thread::sync_threads();

    // What threads have stored to global memory, by the copy engine.
    GlobalMut::new(scratch).set(64 + t, (3 * t) as f32);
    thread::sync_threads();
    if t == 0 {
        tma::fence_async_global();
        mbarrier::arrive_expect_tx(bar, 256);
        tma::copy_bulk(line.ptr(0u32), scratch.wrapping_add(64).cast_const(), 256, bar);
    }
    mbarrier::wait_parity(bar, 1);
    words.put_f32(line.get(t ^ 1));
    thread::sync_threads();

    // Several arrivals at once, and from the cluster.
    if t == 1 {
        mbarrier::arrive_many(bars.ptr(1u32), 2);
    }
    if t == 33 {
        mbarrier::arrive_cluster(bars.ptr(1u32), 0);
    }
    mbarrier::arrive_cluster(bars.address(2u32), 0);
    mbarrier::wait_parity(bars.ptr(1u32), 0);
    mbarrier::wait_parity_cluster(bars.ptr(2u32), 0);

    // stmatrix: what lanes hold, as memory has it.
    let lane = t % 32;
    let matrix = |w: u32| [lane * 4 + 0x1000, lane * 4 + 0x2001, lane * 4 + 0x3002, w];
    let half = tile.address(t / 32 * 128);
    mma::stmatrix_x4(half + lane * 16, matrix(7 * lane));
    thread::sync_threads();
    words.put(tile.get(t).to_bits());
    words.put(tile.get(t + 128).to_bits());
    thread::sync_threads();
    let [a, b, ..] = matrix(0);
    mma::stmatrix_x2(half + lane * 16, [a, b]);
    mma::stmatrix_x1(half + 256 + lane * 16, [b]);
    thread::sync_threads();
    words.put(tile.get(t / 32 * 128 + t % 32 * 3).to_bits());
    thread::sync_threads();
    mma::stmatrix_x4_trans(half + lane * 16, matrix(3 * lane));
    mma::stmatrix_x2_trans(half + lane * 16, [b, a]);
    thread::sync_threads();
    words.put(tile.get(t / 32 * 128 + t % 32 * 3).to_bits());
    words.done();
}

entries! {
    pub struct Args(
        data: *const f32, map: TensorMap, scratch: *mut f32, line_map: TensorMap, store_map: TensorMap, out: *mut u32,
    );
    conformance_hopper {} [64; Sm90a] => conformance;
}
