//! Atomic operations: every one, and every ordering and scope. Results that depend on the order of threads are not
//! written; the final contents of memory are.

use super::Words;
use cuda_std::atomic::{
    self, AcqRel, Acquire, Block, Device, Relaxed, Release, System, compare_exchange, exchange, fetch_add, fetch_and,
    fetch_max, fetch_min, fetch_or, fetch_xor,
};
use cuda_std::second_level::Policy;
use cuda_std::shared::Carver;
use cuda_std::{GlobalMut, bf16, entries, f16, thread};

/// Threads of the block.
pub const THREADS: usize = 64;
/// Words of a thread: it writes one word of the final contents, and one of shared memory.
pub const WORDS: usize = 3;
/// Words of `scratch`: `THREADS`, of which each thread reports one, and as many more.
pub const SCRATCH: usize = 2 * THREADS;
/// Dynamic shared memory.
pub const SHARED_BYTES: usize = 256;

/// `scratch`: `[SCRATCH]`, zero; `out`: `[THREADS, WORDS]`. Grid: 1; block: `THREADS`.
#[inline(always)]
pub unsafe fn conformance(scratch: *mut u32, out: *mut u32) {
    let t = thread::thread_idx_x();
    let mut words = Words::new(out, WORDS);
    let global = GlobalMut::new(scratch);
    let at = |i: usize| scratch.add(i);
    // Words that minima and conjunctions start from.
    if t < 4 {
        global.set(16 + t, u32::MAX);
    }
    thread::sync_threads();

    // One type after another.
    fetch_add(at(0), t, Device, Relaxed);
    fetch_add(at(1).cast::<i32>(), -(t as i32), Device, Acquire);
    fetch_add(at(2).cast::<u64>(), 1 << 33, Device, Release);
    fetch_add(at(4).cast::<i64>(), -1, Device, AcqRel);
    fetch_add(at(6).cast::<f32>(), 0.25, System, Relaxed);
    fetch_add(at(8).cast::<f64>(), 0.125, System, AcqRel);
    fetch_max(at(10), t ^ 9, Block, Relaxed);
    fetch_max(at(11).cast::<i32>(), 5 - t as i32, Block, Acquire);
    fetch_max(at(12).cast::<u64>(), (t as u64) << 40, Block, Release);
    fetch_max(at(14).cast::<f32>(), t as f32 * 0.5 - 3.0, Block, AcqRel);
    fetch_min(at(15).cast::<f32>(), t as f32 * 0.5 - 3.0, Device, Relaxed);
    fetch_min(at(16), t + 3, System, Acquire);
    fetch_min(at(17).cast::<i32>(), 20 - t as i32, System, Release);
    fetch_and(at(18), !(1 << (t % 7)), Device, Relaxed);
    fetch_and(at(19).cast::<i32>(), !(1 << (t % 5)), Device, AcqRel);
    fetch_or(at(20), 1 << (t % 7), Device, Relaxed);
    fetch_or(at(22).cast::<u64>(), 1 << (t % 50), Device, Relaxed);
    fetch_xor(at(24), t * t, Device, Relaxed);
    compare_exchange(at(25), 0, 77, Device, AcqRel);
    compare_exchange(at(26).cast::<u64>(), 0, 1 << 40, Device, Relaxed);
    if t == 0 {
        exchange(at(28), 88, Device, Relaxed);
        exchange(at(29).cast::<f32>(), 1.5, Device, AcqRel);
        exchange(at(30).cast::<i64>(), -7, System, Relaxed);
    }
    compare_exchange(at(32).cast::<u16>().add(1), 0, 7, Device, Relaxed);

    // By their short names.
    atomic::fetch_add_u32(at(33), 1);
    atomic::fetch_add_i32(at(34).cast(), -2);
    atomic::fetch_add_u64(at(36).cast(), 3);
    atomic::fetch_add_f32(at(38).cast(), 0.5);
    atomic::fetch_max_u32(at(39), t);
    atomic::fetch_max_u64(at(40).cast(), t as u64);
    atomic::fetch_min_u32(at(42), t);
    atomic::fetch_or_u32(at(43), t);
    atomic::exchange_u32(at(44), 5);
    atomic::compare_exchange_u32(at(45), 0, 6);

    // Through the accessor, which knows the state space.
    global.fetch_add(46u32, 2, Device, Relaxed);
    global.fetch_xor(47u32, t, Block, AcqRel);
    global.fetch_min(48u32, t, System, Relaxed);

    // Vectors: the same addends by every thread, exact in every order.
    atomic::reduce_add_v2_f32(at(50).cast(), [0.5, 1.0], Policy::NORMAL);
    atomic::reduce_add_v4_f32(at(52).cast(), [0.25, 0.5, 1.0, 2.0], Policy::NORMAL);
    atomic::reduce_add_bf16x2(at(56).cast(), [bf16::ONE; 2], Policy::NORMAL);
    atomic::reduce_add_f16x2(at(57).cast(), [f16::ONE, f16::from_f32_const(0.5)], Policy::NORMAL);
    atomic::reduce_add_v8_bf16(at(64).cast(), [bf16::ONE; 8], Policy::NORMAL);
    atomic::reduce_add_v4_bf16(at(64).cast(), [bf16::ONE; 4], Policy::LAST);
    atomic::reduce_add_v4_f16(at(70).cast(), [f16::from_f32_const(0.25); 4], Policy::LAST);
    atomic::reduce_add_v8_f16(at(68).cast(), [f16::from_f32_const(0.25); 8], Policy::NORMAL);

    // Flags: one thread publishes, the others wait.
    if t == 7 {
        global.set(72u32, 4711);
        atomic::store(at(73), 1, Device, Release);
        atomic::store(at(74).cast::<u64>(), 9, System, Relaxed);
        atomic::store_release_u32(at(76), 2);
        atomic::store_volatile(at(77).cast::<f32>(), 2.5);
    }
    while atomic::load(at(73), Device, Acquire) == 0 || atomic::load_acquire_u32(at(76)) == 0 {}
    let seen = global.get(72u32);
    thread::device_fence();
    thread::sync_threads();
    words.put(
        seen + atomic::load(at(74).cast::<u64>(), Block, Relaxed) as u32
            + atomic::load_volatile(at(77).cast::<f32>()) as u32,
    );
    words.put(global.load(t + (t >= 58) as u32 * 6, Device, Relaxed));

    let shared = Carver::new().take::<u32>(64);
    shared.set(t, t);
    thread::sync_threads();
    shared.fetch_add(t / 4, 5, Block, Relaxed);
    shared.fetch_max(t / 8 + 20, t * 3, Block, AcqRel);
    shared.reduce_add(shared.address(0u32), t / 4, 2);
    shared.reduce_max(shared.address(0u32), t / 8 + 20, t * 4);
    shared.fetch_or(40u32, 1 << (t % 32), Block, Acquire);
    shared.exchange(41u32, 3, Block, Release);
    if t == 0 {
        shared.store(42u32, 17, Block, Release);
        shared.compare_exchange(43u32, 43, 99, Block, Relaxed);
    }
    thread::sync_threads();
    words.put(shared.load(t, Block, Acquire));
    words.done();
}

entries! {
    pub struct Args(scratch: *mut u32, out: *mut u32);
    conformance_atomic {} [64] => conformance;
}
