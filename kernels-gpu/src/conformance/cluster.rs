//! Clusters: barriers, each other's shared memory, signals, and copies to all blocks.

use super::Words;
use cuda_std::shared::Carver;
use cuda_std::tma::{self, TensorMap};
use cuda_std::{cluster, entries, mbarrier, thread};

/// Threads of a block.
pub const THREADS: usize = 64;
/// Words of a thread.
pub const WORDS: usize = 7;
/// Dynamic shared memory.
pub const SHARED_BYTES: usize = 1024;

/// `map`: 128 `f32` in boxes of `128 / BLOCKS`; `out`: `[blocks, THREADS, WORDS]`. Grid: a multiple of `BLOCKS`, which is
/// the size of a cluster.
#[inline(always)]
pub unsafe fn conformance<const BLOCKS: u32>(map: *const TensorMap, out: *mut u32) {
    if BLOCKS > 1 {
        cluster::dims::<BLOCKS>();
    }
    let mut words = Words::new(out, WORDS);
    let t = thread::thread_idx_x();
    let mut carver = Carver::new();
    let (tile, shared, bars) = (carver.take_aligned::<f32>(128, 128), carver.take::<u32>(64), carver.take::<u64>(3));
    let (full, empty, came) = (bars.address(0u32), bars.address(1u32), bars.address(2u32));
    let rank = cluster::rank();
    let other = (rank + 1) % BLOCKS;
    shared.set(t, t + 100 * thread::block_idx_x());
    if t == 0 {
        mbarrier::init(full, 1);
        mbarrier::init(empty, BLOCKS);
        mbarrier::init(came, 1);
        mbarrier::fence_init();
    }
    cluster::sync();
    words.put(rank | cluster::size() << 8);
    words.put(cluster::load_u32(cluster::map(shared.ptr(t ^ 1), other)));
    cluster::sync();
    cluster::store_u32(cluster::map(shared.ptr(t), other), 7 * t + rank);
    cluster::arrive();
    cluster::wait();
    words.put(shared.get(t ^ 3));
    words.put(cluster::map(shared.ptr(1u32), 0) - cluster::map(shared.ptr(0u32), 0));

    // Each block loads its part for all of them.
    let part = 128 / BLOCKS * rank;
    if t == 0 {
        mbarrier::arrive_expect_tx(full, 512);
        let (place, coords) = (tile.address(part), [part as i32]);
        // A copy to all blocks needs a cluster that the launch asked for.
        if BLOCKS > 1 {
            tma::load_tensor_multicast::<1>(place, map, coords, full, (1 << BLOCKS) - 1);
        } else {
            tma::load_tensor::<1>(place, map, coords, full);
        }
    }
    mbarrier::wait_parity_cluster(full, 0);
    words.put_f32(tile.get((2 * t) ^ 5));
    thread::sync_threads();
    // All tell all that they have read.
    if t < BLOCKS {
        mbarrier::arrive_cluster_relaxed(empty, t);
    }
    mbarrier::wait_parity_cluster(empty, 0);
    words.put(mbarrier::try_wait_parity_cluster(empty, 0) as u32);
    // Words that an mbarrier counts.
    if t == 0 {
        mbarrier::arrive_expect_tx(came, 4 * THREADS as u32);
    }
    // They need a cluster that the launch asked for as well.
    if BLOCKS > 1 {
        let (to, bar) = (cluster::map(shared.ptr(t), other), cluster::map(came, other));
        if t < THREADS as u32 / 2 {
            cluster::store_async_u32(to, 11 * t + rank, bar);
        } else if t >= THREADS as u32 / 4 * 3 {
            if t.is_multiple_of(2) {
                cluster::store_async_u32x2(to, [0, 11].map(|i| 11 * t + i + rank), bar);
            }
        } else if t.is_multiple_of(4) {
            cluster::store_async_u32x4(to, [0, 11, 22, 33].map(|i| 11 * t + i + rank), bar);
        }
        mbarrier::wait_parity(came, 0);
    } else {
        shared.set(t, 11 * t + rank);
        thread::sync_threads();
    }
    words.put(shared.get(t ^ 2));
    // Nobody leaves while others may still signal.
    cluster::arrive_relaxed();
    cluster::wait();
    words.done();
}

entries! {
    pub struct Args(map: TensorMap, out: *mut u32);
    conformance_cluster_1 { const BLOCKS: u32 = 1; } [64; Sm90a] => conformance::<BLOCKS>;
    conformance_cluster_2 { const BLOCKS: u32 = 2; } [64; Sm90a] => conformance::<BLOCKS>;
    conformance_cluster_4 { const BLOCKS: u32 = 4; } [64; Sm90a] => conformance::<BLOCKS>;
}
