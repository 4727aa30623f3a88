//! Kernels with deliberate bugs: each must be reported, precisely and without
//! a hang, and the emulator must work afterwards.
#![allow(unsafe_op_in_unsafe_fn, clippy::if_same_then_else, clippy::undocumented_unsafe_blocks)]

use cuda_std::shared::Carver;
use cuda_std::{Global, GlobalMut, atomic, cp_async, dependent_launch, mbarrier, mma, thread, tma, warp};
use simt::{Access, Buffer, Dim3, ErrorKind, Launch, LaunchError, Order, ThreadState};

fn launch() -> Launch<'static> {
    Launch::new("buggy").order(Order::InOrder).race(false)
}

fn run(launch: Launch<'_>, kernel: impl Fn()) -> Result<(), LaunchError> {
    let result = unsafe { launch.run(kernel) };
    // Whatever happened, the next launch on this thread is unharmed.
    unsafe { self::launch().block(96).run(thread::sync_threads) }.unwrap();
    result
}

/// The error of a kernel that must fail, printed for the reader of the log.
fn error(launch: Launch<'_>, kernel: impl Fn()) -> LaunchError {
    let e = run(launch, kernel).expect_err("the kernel has a bug");
    eprintln!("{e}\n");
    e
}

fn line(loc: simt::Loc) -> u32 {
    assert_eq!(loc.file(), file!());
    loc.line()
}

// --- barriers --------------------------------------------------------------

/// Rotates 64 values by one through shared memory.
unsafe fn rotate(out: *mut f32, barrier: bool) {
    let s = Carver::new().take::<f32>(64);
    let t = thread::thread_idx_x();
    s.set(t, t as f32);
    if barrier {
        thread::sync_threads();
    }
    GlobalMut::new(out).set(t, s.get((t + 1) % 64));
}

#[test]
fn missing_barrier_gives_nan() {
    let out = Buffer::<f32>::poisoned(64);
    let p = out.as_mut_ptr();
    run(launch().block(64).shared_bytes(256), || unsafe { rotate(p, false) }).unwrap();
    assert!(out.to_vec().iter().any(|v| v.is_nan()), "poison shows");
    run(launch().block(64).shared_bytes(256).race(true), || unsafe { rotate(p, true) }).unwrap();
    assert!((0..64).all(|t| out.to_vec()[t] == ((t + 1) % 64) as f32));
}

#[test]
fn missing_barrier_is_a_race() {
    let out = Buffer::<f32>::poisoned(64);
    let p = out.as_mut_ptr();
    // In order, thread 0 reads slot 1 before anything wrote it.
    let e = error(launch().block(64).shared_bytes(256).race(true), || unsafe { rotate(p, false) });
    assert!(matches!(e.kind, ErrorKind::Uninitialised { offset: 4, .. }));
}

#[test]
fn race_is_found_even_if_the_values_are_right() {
    let out = Buffer::<u32>::poisoned(64);
    let p = out.as_mut_ptr();
    // In the default order the writer always comes first.
    let kernel = || unsafe {
        let s = Carver::new().take::<u32>(64);
        let t = thread::thread_idx_x();
        s.set(t, t);
        GlobalMut::new(p).set(t, s.get(t / 2));
    };
    run(launch().block(64).shared_bytes(256), kernel).unwrap();
    assert!((0..64).all(|t| out.to_vec()[t as usize] == t / 2));
    let e = error(launch().block(64).shared_bytes(256).race(true), kernel);
    let ErrorKind::Race { first: Access::Write, second: Access::Read, first_at, second_at, .. } = e.kind else {
        panic!("{e}")
    };
    assert_eq!(line(second_at), line(first_at) + 1);
}

#[test]
fn missing_second_barrier_in_a_loop() {
    let e = error(launch().block(64).shared_bytes(256).race(true), || unsafe {
        let s = Carver::new().take::<u32>(64);
        let t = thread::thread_idx_x();
        let mut v = t;
        for _ in 0..3 {
            s.set(t, v);
            thread::sync_threads();
            v = s.get((t + 1) % 64);
            // missing: sync_threads() before the next write
        }
    });
    assert!(matches!(e.kind, ErrorKind::Race { first: Access::Read, second: Access::Write, .. }));
}

#[test]
fn warp_sync_orders_lanes_of_its_mask_only() {
    let kernel = |mask: u32| {
        move || unsafe {
            let s = Carver::new().take::<u32>(32);
            let lane = warp::lane_id();
            s.set(lane, lane);
            if mask >> lane & 1 != 0 {
                warp::sync_warp(mask);
            }
            let _: u32 = s.get(lane ^ 16);
        }
    };
    let l = launch().block(32).shared_bytes(128).race(true);
    run(l.clone(), kernel(u32::MAX)).unwrap();
    assert!(matches!(error(l.clone(), kernel(0xffff)).kind, ErrorKind::Race { .. } | ErrorKind::Uninitialised { .. }));
    // A shuffle is no substitute.
    let e = error(l, || unsafe {
        let s = Carver::new().take::<u32>(32);
        let lane = warp::lane_id();
        s.set(lane, lane);
        warp::shfl_xor(lane, 1);
        let _: u32 = s.get(lane ^ 1);
    });
    assert!(matches!(e.kind, ErrorKind::Race { first: Access::Write, second: Access::Read, .. }));
}

#[test]
fn neighbouring_halves_are_not_a_race() {
    run(launch().block(64).shared_bytes(128).race(true), || unsafe {
        let s = Carver::new().take::<u16>(64);
        let t = thread::thread_idx_x();
        s.set(t, t as u16);
        let _: u16 = s.get(t);
        thread::sync_threads();
        let _: u16 = s.get(63 - t);
    })
    .unwrap();
}

/// 16 bytes have one list of accesses: what touches none of the same bytes is no race, what touches one is, and names it; of many readers none is
/// forgotten.
#[test]
fn accesses_within_sixteen_bytes() {
    let kernel = |byte: u32| {
        run(launch().block(64).shared_bytes(64).race(true), move || unsafe {
            let (t, s) = (thread::thread_idx_x(), Carver::new().take::<u32>(16));
            if t < 16 {
                s.set(t, t);
            }
            thread::sync_threads();
            // All of them read three words of the four.
            let _ = (0..3).fold(0, |sum, i| sum + s.get(i));
            if t == 40 {
                Carver::new().take::<u8>(64).set(byte, 1);
            }
        })
    };
    kernel(12).unwrap();
    kernel(16).unwrap();
    for byte in 0..12 {
        let e = kernel(byte).expect_err("all read the word");
        let ErrorKind::Race { first: Access::Read, second: Access::Write, offset, first_thread, .. } = e.kind else {
            panic!("{e}")
        };
        // The last to come to the barrier goes on first.
        assert_eq!((offset, first_thread.x), (byte as usize, 63));
    }
    let e = error(launch().block(64).shared_bytes(64).race(true), || unsafe {
        let s = Carver::new().take::<u16>(32);
        s.set(thread::thread_idx_x() / 2, 0);
    });
    assert!(matches!(e.kind, ErrorKind::Race { offset: 0, first: Access::Write, second: Access::Write, .. }), "{e}");
}

#[test]
fn named_barriers_order_producer_and_consumer() {
    let kernel = |wait: bool| {
        move || unsafe {
            let s = Carver::new().take::<u32>(32);
            let t = thread::thread_idx_x();
            if t < 32 {
                s.set(t, t);
                thread::arrive_named(1, 64);
            } else {
                if wait {
                    thread::sync_named(1, 64);
                }
                let _: u32 = s.get(t - 32);
            }
        }
    };
    let l = launch().block(64).shared_bytes(128).race(true);
    run(l.clone(), kernel(true)).unwrap();
    assert!(matches!(error(l, kernel(false)).kind, ErrorKind::Race { .. }));
}

#[test]
fn divergent_barrier() {
    let e = error(launch().block(64), || {
        if thread::thread_idx_x() < 40 {
            thread::sync_threads();
        }
    });
    let ErrorKind::Stuck { why, threads } = &e.kind else { panic!("{e}") };
    assert!(why.contains("40 of 64 threads"), "{why}");
    assert!(matches!(threads[0].state, ThreadState::Barrier { id: 0, .. }));
    assert_eq!(threads[63].state, ThreadState::Exited);
}

#[test]
fn two_different_barriers() {
    let e = error(launch().grid(3).block((8, 8)), || {
        if thread::thread_idx_y().is_multiple_of(2) {
            thread::sync_threads();
        } else {
            thread::sync_threads();
        }
    });
    let ErrorKind::Stuck { why, threads } = &e.kind else { panic!("{e}") };
    assert!(why.contains("different sync_threads calls"), "{why}");
    let at = |i: usize| match threads[i].state {
        ThreadState::Barrier { at, .. } => line(at),
        s => panic!("{s:?}"),
    };
    assert_eq!(at(8), at(0) + 2);
}

// --- warp collectives ------------------------------------------------------

#[test]
fn full_mask_in_a_branch() {
    let e = error(launch().block(64), || {
        if warp::lane_id() < 16 {
            warp::shfl_xor(1u32, 1);
        }
    });
    let ErrorKind::Stuck { why, .. } = &e.kind else { panic!("{e}") };
    assert!(why.contains("lane 16-31, which exited"), "{why}");
}

#[test]
fn lanes_at_different_collectives() {
    let e = error(launch().block(32), || {
        if warp::lane_id().is_multiple_of(2) {
            warp::warp_vote_ballot(warp::FULL, true);
        } else {
            warp::reduce_sum(1.0);
        }
    });
    let ErrorKind::Stuck { why, threads } = &e.kind else { panic!("{e}") };
    assert!(why.contains("waits elsewhere"), "{why}");
    assert!(matches!(threads[0].state, ThreadState::Warp { op: "warp_vote_ballot", .. }));
    assert!(matches!(threads[1].state, ThreadState::Warp { op: "reduce", .. }));
}

#[test]
fn masks_that_disagree() {
    let e = error(launch().block(32), || {
        let mask = if warp::lane_id() == 5 { 0xffff } else { warp::FULL };
        warp::warp_vote_any(mask, false);
    });
    assert!(matches!(e.kind, ErrorKind::Stuck { .. }));
}

#[test]
fn lane_outside_its_own_mask() {
    let e = error(launch().block(32), || {
        warp::warp_vote_any(0xffff, false);
    });
    let ErrorKind::Trap { thread, message, .. } = &e.kind else { panic!("{e}") };
    assert_eq!(thread.x, 16);
    assert!(message.contains("lane 16 is not in its own mask"));
}

#[test]
fn one_line_of_generic_code_with_two_types() {
    fn all<T: warp::Shuffle>(v: T) {
        warp::shfl_xor(v, 1);
    }
    let e = error(launch().block(32), || if warp::lane_id() < 7 { all(1u32) } else { all(1u64) });
    assert!(matches!(e.kind, ErrorKind::Stuck { .. }));
}

#[test]
fn mask_beyond_a_partial_warp() {
    let e = error(launch().block(40), || {
        warp::warp_vote_any(warp::FULL, false);
    });
    assert!(matches!(&e.kind, ErrorKind::Trap { message, .. } if message.contains("lacks")));
}

#[test]
fn shuffle_from_a_lane_outside_the_mask() {
    let e = error(launch().block(32), || {
        if warp::lane_id() < 16 {
            warp::warp_shuffle_idx(0xffff, 1.0f32, 20, 32);
        }
    });
    let ErrorKind::Trap { message, at, .. } = &e.kind else { panic!("{e}") };
    assert!(message.contains("reads from lane 20"));
    line(at);
}

#[test]
fn correct_divergence_is_fine() {
    run(launch().block(64), || {
        let lane = warp::lane_id();
        let mask = if lane < 16 { 0xffff } else { 0xffff_0000 };
        // The same call site, two masks, and then both halves together.
        let sum = warp::warp_reduce_add_u32(mask, lane);
        assert_eq!(sum, if lane < 16 { 120 } else { 376 });
        if lane < 16 {
            warp::sync_warp(0xffff);
        }
        assert_eq!(warp::warp_vote_ballot(warp::FULL, lane < 16), 0xffff);
    })
    .unwrap();
}

// --- memory ----------------------------------------------------------------

#[test]
fn shared_out_of_bounds() {
    let e = error(launch().block(64).shared_bytes(1024), || unsafe {
        let s = Carver::new().take::<f32>(63);
        s.set(thread::thread_idx_x(), 0.0);
    });
    let ErrorKind::Trap { thread, message, at } = &e.kind else { panic!("{e}") };
    assert_eq!(thread.x, 63);
    assert!(message.contains("element 63 of a part of 63"), "{message}");
    line(at);
}

#[test]
fn more_shared_memory_than_launched() {
    let e = error(launch().block(64).shared_bytes(100), || unsafe {
        Carver::new().take::<f32>(64);
    });
    assert!(matches!(&e.kind, ErrorKind::Trap { message, .. } if message.contains("uses 256 bytes")));
}

#[test]
fn raw_pointer_past_shared_memory() {
    let e = error(launch().block(64).shared_bytes(252), || unsafe {
        *cuda_std::shared::dynamic_shared_mem::<f32>().add(thread::thread_idx_x() as usize) = 0.0;
    });
    assert!(matches!(e.kind, ErrorKind::RedzoneHit { offset: 252, len: 252, .. }));
}

#[test]
fn global_out_of_bounds() {
    let (x, y) = (Buffer::from_slice(&[1.0f32; 100]), Buffer::<f32>::poisoned(100));
    let (px, py) = (x.as_ptr(), y.as_mut_ptr());
    let e = error(launch().grid(2).block(64).buffers(&[&x, &y]), || unsafe {
        let i = thread::index_1d(); // missing: if i < 100
        GlobalMut::new(py).set(i, Global::new(px).get(i));
    });
    let ErrorKind::OutOfBounds { thread, access: Access::Read, offset: 400, len: 400, .. } = e.kind else {
        panic!("{e}")
    };
    assert_eq!((e.block.x, thread.x), (1, 36));
}

#[test]
fn raw_pointer_past_a_buffer() {
    let y = Buffer::<f32>::poisoned(10);
    let p = y.as_mut_ptr();
    let e = error(launch().block(11).buffers(&[&y]), || unsafe {
        *p.add(thread::thread_idx_x() as usize) = 1.0;
    });
    assert!(matches!(e.kind, ErrorKind::RedzoneHit { offset: 40, len: 40, .. }));
}

#[test]
fn pointer_outside_all_buffers() {
    let (x, other) = (Buffer::from_slice(&[1.0f32; 8]), Buffer::from_slice(&[1.0f32; 8]));
    let p = other.as_ptr();
    let e = error(launch().buffers(&[&x]), || unsafe {
        Global::new(p).get(0u32);
    });
    assert!(matches!(e.kind, ErrorKind::OutOfBounds { .. }));
}

#[test]
fn raw_pointers_resolve_to_live_buffers() {
    let (x, y) = (Buffer::from_slice(&[1.0f32; 8]), Buffer::<f32>::poisoned(8));
    let (px, py) = (x.as_ptr(), y.as_mut_ptr());
    let copy = |n: u32| {
        move || unsafe {
            let t = thread::thread_idx_x();
            if t < n {
                GlobalMut::new(py).set(t, Global::new(px).get(t));
            }
        }
    };
    run(launch().block(32), copy(8)).unwrap();
    assert_eq!(y.to_vec(), x.to_vec());
    // No buffer was named, and yet the bounds of each are known.
    let e = error(launch().block(32), copy(9));
    assert!(matches!(e.kind, ErrorKind::OutOfBounds { access: Access::Read, offset: 32, len: 32, .. }), "{e}");
    // A buffer that is gone is no buffer.
    drop(x);
    let e = error(launch().block(32), copy(1));
    assert!(matches!(e.kind, ErrorKind::OutOfBounds { len: 0, .. }), "{e}");
}

#[test]
fn foreign_memory_must_be_allowed() {
    let data = [1.0f32, 2.0];
    let p = data.as_ptr();
    let kernel = move || assert_eq!(unsafe { Global::new(p).get(1u32) }, 2.0);
    let e = error(launch(), kernel);
    assert!(e.to_string().contains("outside all registered buffers"), "{e}");
    run(launch().foreign_memory(true), kernel).unwrap();
}

#[test]
fn unused_null_pointers_are_fine() {
    let kernel = |read: bool| {
        move || unsafe {
            let x = Global::new(std::ptr::null::<f32>());
            if read {
                x.get(0u32);
            }
        }
    };
    run(launch(), kernel(false)).unwrap();
    assert!(matches!(error(launch(), kernel(true)).kind, ErrorKind::OutOfBounds { len: 0, .. }));
}

#[test]
fn raw_write_past_a_buffer_that_the_launch_does_not_name() {
    let y = Buffer::<f32>::poisoned(10);
    let p = y.as_mut_ptr();
    let e = error(launch(), || unsafe {
        *GlobalMut::new(p).ptr(10u32) = 1.0;
    });
    assert!(matches!(e.kind, ErrorKind::RedzoneHit { offset: 40, len: 40, .. }));
}

#[test]
fn misaligned_atomic() {
    let x = Buffer::from_slice(&[0u32; 4]);
    let p = x.as_mut_ptr();
    let e = error(launch(), || unsafe {
        atomic::fetch_add(p.cast::<u8>().add(2).cast::<u32>(), 1, atomic::Device, atomic::Relaxed);
    });
    assert!(matches!(e.kind, ErrorKind::Misaligned { align: 4, .. }));
}

#[test]
fn misaligned_vector_access() {
    #[derive(Clone, Copy)]
    #[repr(C, align(16))]
    struct Vec4([f32; 4]);
    let x = Buffer::from_slice(&[1.0f32; 16]);
    let p = x.as_ptr();
    let e = error(launch().buffers(&[&x]), || unsafe {
        let v: Vec4 = Global::new(p).get_as(2u32);
        assert_eq!(v.0[0], 1.0);
    });
    assert!(matches!(e.kind, ErrorKind::Misaligned { align: 16, .. }));
}

/// Vectors that end behind the buffer, lie before it, or are larger than it; in order and with the race detector, which take different ways.
#[test]
fn vectors_out_of_bounds() {
    #[derive(Clone, Copy)]
    #[repr(C, align(4))]
    struct Words([f32; 4]);
    for race in [false, true] {
        let launch = || launch().shared_bytes(64).race(race);
        for (len, at, offset) in
            [(16usize, 13i64, 52), (16, 16, 64), (16, -1, -4), (16, 1 << 61, i64::MIN), (3, 0, 0), (0, 0, 0)]
        {
            let x = Buffer::from_slice(&vec![1.0f32; len]);
            let p = x.as_mut_ptr();
            let read = || unsafe { assert_eq!(Global::new(p.cast_const()).get_as::<Words>(at as usize).0[0], 1.0) };
            let e = error(launch().buffers(&[&x]), read);
            let ErrorKind::OutOfBounds { access: Access::Read, bytes: 16, offset: o, .. } = e.kind else {
                panic!("{e}")
            };
            assert_eq!(o, offset, "{e}");
            let e =
                error(launch().buffers(&[&x]), || unsafe { GlobalMut::new(p).set_as(at as usize, Words([0.0; 4])) });
            assert!(matches!(e.kind, ErrorKind::OutOfBounds { access: Access::Write, bytes: 16, .. }), "{e}");
        }
        for i in [0u32, 12] {
            run(launch(), move || unsafe { Carver::new().take::<f32>(16).set_as(i, Words([0.0; 4])) }).unwrap();
        }
        for i in [13usize, 16, 1 << 62, usize::MAX] {
            let e = error(launch(), move || unsafe { Carver::new().take::<f32>(16).set_as(i, Words([0.0; 4])) });
            assert!(matches!(&e.kind, ErrorKind::Trap { message, .. } if message.contains("of a part of 16")), "{e}");
        }
        // After what lies behind the beginning of a part was made one of its own.
        let e = error(launch(), || unsafe { Carver::new().take::<f32>(16).offset(4u32).set(12u32, 0.0) });
        assert!(
            matches!(&e.kind, ErrorKind::Trap { message, .. } if message.contains("element 12 of a part of 12")),
            "{e}"
        );
        let e = error(launch(), || unsafe { Carver::new().take::<u8>(64).set_as(2u32, 0u32) });
        assert!(matches!(e.kind, ErrorKind::Misaligned { align: 4, .. }), "{e}");
    }
}

#[test]
fn asynchronous_copy_without_wait() {
    let x = Buffer::from_slice(&[1.0f32; 4]);
    let y = Buffer::<f32>::poisoned(4);
    let (px, py) = (x.as_ptr(), y.as_mut_ptr());
    let kernel = |wait: bool| {
        move || unsafe {
            let s = Carver::new().take::<f32>(4);
            cp_async::copy_16(s.ptr(0u32), px);
            cp_async::commit_group();
            if wait {
                cp_async::wait_group::<0>();
            }
            GlobalMut::new(py).set(0u32, s.get(1u32));
        }
    };
    let l = launch().shared_bytes(16).buffers(&[&x, &y]);
    run(l.clone().race(true), kernel(true)).unwrap();
    assert_eq!(y.to_vec()[0], 1.0);
    run(l.clone(), kernel(false)).unwrap();
    assert!(y.to_vec()[0].is_nan());
    assert!(matches!(error(l.race(true), kernel(false)).kind, ErrorKind::Uninitialised { .. }));
}

#[test]
fn bulk_copy_with_an_mbarrier() {
    let x = Buffer::from_slice(&(0..256).map(|i| i as f32).collect::<Vec<_>>());
    let y = Buffer::<f32>::poisoned(256);
    let (px, py) = (x.as_ptr(), y.as_mut_ptr());
    // Two stages of 64 floats; one producer thread, 32 consumers.
    let kernel = |wait: bool| {
        move || unsafe {
            let mut carver = Carver::new();
            let tiles = [carver.take::<f32>(64), carver.take::<f32>(64)];
            let bars = carver.take::<u64>(2);
            let t = thread::thread_idx_x();
            if t == 0 {
                mbarrier::init(bars.ptr(0u32), 1);
                mbarrier::init(bars.ptr(1u32), 1);
            }
            thread::sync_threads();
            for step in 0..4u32 {
                let stage = (step % 2) as usize;
                if t == 0 {
                    mbarrier::arrive_expect_tx(bars.ptr(stage), 256);
                    tma::copy_bulk(tiles[stage].ptr(0u32), px.add(step as usize * 64), 256, bars.ptr(stage));
                }
                if wait {
                    mbarrier::wait_parity(bars.ptr(stage), step / 2 % 2);
                }
                for i in [t, t + 32] {
                    GlobalMut::new(py).set(step * 64 + i, tiles[stage].get(i));
                }
                thread::sync_threads();
            }
        }
    };
    let l = launch().block(32).shared_bytes(528).buffers(&[&x, &y]);
    for order in [Order::InOrder, Order::Random { seed: 3, preempt: true }] {
        run(l.clone().order(order).race(true), kernel(true)).unwrap();
        assert_eq!(y.to_vec(), x.to_vec());
    }
    assert!(matches!(error(l.race(true), kernel(false)).kind, ErrorKind::Uninitialised { .. }));
}

#[test]
fn ldmatrix_address_out_of_bounds() {
    let e = error(launch().block(32).shared_bytes(256), || unsafe {
        let s = Carver::new().take::<u16>(128);
        mma::ldmatrix_x4(s.ptr(warp::lane_id() * 8));
    });
    assert!(matches!(e.kind, ErrorKind::OutOfBounds { offset: 256, thread: Dim3 { x: 16, .. }, .. }));
}

// --- races in global memory -------------------------------------------------

#[test]
fn blocks_that_write_one_word() {
    let x = Buffer::from_slice(&[0u32; 4]);
    let p = x.as_mut_ptr();
    let kernel = |shared_word: bool| {
        move || unsafe {
            GlobalMut::new(p).set(if shared_word { 2 } else { thread::block_idx_x() }, 7);
        }
    };
    run(launch().grid(4).race(true), kernel(false)).unwrap();
    let e = error(launch().grid(4).race(true), kernel(true));
    let ErrorKind::Race { space: simt::Space::Global, offset: 8, first_block, .. } = e.kind else { panic!("{e}") };
    assert_ne!(first_block, e.block);
    assert!(e.to_string().contains("block ("), "{e}");
}

#[test]
fn neighbouring_bytes_of_blocks_are_no_race() {
    let x = Buffer::from_slice(&[0u8; 64]);
    let p = x.as_mut_ptr();
    run(launch().grid(64).race(true), || unsafe {
        GlobalMut::new(p).set(thread::block_idx_x(), 7);
    })
    .unwrap();
}

#[test]
fn global_memory_needs_barriers_within_a_block_too() {
    let x = Buffer::from_slice(&[0u32; 64]);
    let p = x.as_mut_ptr();
    let kernel = |barrier: bool| {
        move || unsafe {
            let (x, t) = (GlobalMut::new(p), thread::thread_idx_x());
            x.set(t, t);
            if barrier {
                thread::sync_threads();
            }
            x.get(t ^ 1);
        }
    };
    run(launch().block(64).race(true), kernel(true)).unwrap();
    let e = error(launch().block(64).race(true), kernel(false));
    assert!(matches!(e.kind, ErrorKind::Race { space: simt::Space::Global, .. }), "{e}");
}

#[test]
fn flags_between_blocks_must_release() {
    use atomic::{Acquire, Block, Device, Relaxed, Release};
    let x = Buffer::from_slice(&[0u32; 4]);
    let p = x.as_mut_ptr();
    let clear = || unsafe { p.write_bytes(0, 4) };
    // Block 0 writes word 0 and raises the flag in word 1; block 1 waits for it.
    let kernel = |publish: fn(*mut u32)| {
        move || unsafe {
            let x = GlobalMut::new(p);
            if thread::block_idx_x() == 0 {
                x.set(0u32, 4711);
                publish(p.add(1));
            } else {
                while atomic::load(p.add(1), Device, Acquire) == 0 {}
                assert_eq!(x.get(0u32), 4711);
            }
        }
    };
    let race = || launch().grid(2).race(true);
    let good: [fn(*mut u32); 3] = [
        |flag| unsafe { atomic::store(flag, 1, Device, Release) },
        |flag| unsafe {
            thread::device_fence();
            atomic::store(flag, 1, Device, Relaxed);
        },
        |flag| unsafe {
            thread::system_fence();
            atomic::fetch_add(flag, 1, Device, Relaxed);
        },
    ];
    for publish in good {
        clear();
        run(race(), kernel(publish)).unwrap();
    }
    let bad: [fn(*mut u32); 3] = [
        |flag| unsafe { atomic::store(flag, 1, Device, Relaxed) },
        |flag| unsafe { atomic::store(flag, 1, Block, Release) },
        |flag| unsafe {
            thread::block_fence();
            atomic::store(flag, 1, Device, Relaxed);
        },
    ];
    for publish in bad {
        clear();
        let e = error(race(), kernel(publish));
        assert!(matches!(e.kind, ErrorKind::Race { first: Access::Write, second: Access::Read, .. }), "{e}");
    }
}

#[test]
fn the_last_block_sees_what_all_wrote() {
    const BLOCKS: u32 = 20;
    let x = Buffer::from_slice(&[0u32; BLOCKS as usize + 2]);
    let p = x.as_mut_ptr();
    let kernel = |fence: bool| {
        move || unsafe {
            let (x, b) = (GlobalMut::new(p), thread::block_idx_x());
            x.set(b, b);
            if fence {
                thread::device_fence();
            }
            if atomic::fetch_add_u32(p.add(BLOCKS as usize), 1) == BLOCKS - 1 {
                thread::device_fence();
                let sum = (0..BLOCKS).map(|i| x.get(i)).sum();
                x.set(BLOCKS + 1, sum);
                // Atomically: fences order what came before the other blocks' additions, not those themselves.
                atomic::store(p.add(BLOCKS as usize), 0, atomic::Device, atomic::Relaxed);
            }
        }
    };
    run(launch().grid(BLOCKS).race(true), kernel(true)).unwrap();
    assert_eq!(x.to_vec()[BLOCKS as usize..], [0, BLOCKS * (BLOCKS - 1) / 2]);
    assert!(matches!(error(launch().grid(BLOCKS).race(true), kernel(false)).kind, ErrorKind::Race { .. }));
}

#[test]
fn flags_in_shared_memory_order_threads() {
    use atomic::{Acquire, Block, Relaxed, Release};
    let kernel = |release: bool| {
        move || unsafe {
            let s = Carver::new().take::<u32>(2);
            if thread::thread_idx_x() == 0 {
                s.set(1u32, 0);
            }
            thread::sync_threads();
            if thread::thread_idx_x() == 32 {
                s.set(0u32, 5);
                if release { s.store(1u32, 1, Block, Release) } else { s.store(1u32, 1, Block, Relaxed) }
            } else if thread::thread_idx_x() == 0 {
                while s.load(1u32, Block, Acquire) == 0 {}
                assert_eq!(s.get(0u32), 5);
            }
        }
    };
    let l = || launch().block(64).shared_bytes(8).race(true);
    run(l(), kernel(true)).unwrap();
    assert!(matches!(error(l(), kernel(false)).kind, ErrorKind::Race { space: simt::Space::Shared, .. }));
}

// --- dependent launches --------------------------------------------------------

/// What a kernel of these tests does, one after another.
#[derive(Clone, Copy, PartialEq)]
enum Step {
    Read(*const u32),
    Write(*mut u32),
    /// Waits until the word is 1, acquiring if so asked.
    Poll(*const u32, bool),
    Publish(*mut u32),
    Wait,
    /// Thread 0 waits alone.
    OneWaits,
    Barrier,
    Trigger,
}
use Step::{Barrier, OneWaits, Poll, Publish, Read, Trigger, Wait, Write};

/// Launches two blocks of 64 threads, of which thread 40 of the first touches memory.
fn follow(queue: &simt::Queue, dependent: bool, steps: &[Step]) -> Result<(), LaunchError> {
    run(launch().grid(2).block(64).race(true).after(queue, dependent), || unsafe {
        let touches = thread::block_idx_x() == 0 && thread::thread_idx_x() == 40;
        for &step in steps {
            match step {
                Read(p) if touches => _ = Global::new(p).get(0u32),
                Write(p) if touches => GlobalMut::new(p).set(0u32, 1),
                Poll(p, true) if touches => while atomic::load(p, atomic::Device, atomic::Acquire) == 0 {},
                Publish(p) if touches => atomic::store(p, 1, atomic::Device, atomic::Release),
                Wait => dependent_launch::wait(),
                OneWaits if thread::thread_idx_x() == 0 => dependent_launch::wait(),
                Barrier => thread::sync_threads(),
                Trigger => dependent_launch::launch_dependents(),
                _ => {}
            }
        }
    })
}

/// The kernel that an access before the wait conflicts with, and how.
fn early(result: Result<(), LaunchError>) -> Option<(String, Access)> {
    let e = result.expect_err("the kernel touches memory too early");
    eprintln!("{e}\n");
    let ErrorKind::BeforeWait { thread: Dim3 { x: 40, .. }, offset: 0, at, earlier, .. } = e.kind else {
        panic!("{e}")
    };
    line(at);
    earlier.map(|(kernel, access, at)| {
        line(at);
        (kernel, access)
    })
}

#[test]
fn what_may_follow_anything_waits_first() {
    let x = Buffer::from_slice(&[0u32]);
    let p = x.as_mut_ptr();
    for touch in [Read(p), Write(p), Publish(p)] {
        assert_eq!(early(follow(&simt::Queue::new(), true, &[touch, Wait])), None);
        follow(&simt::Queue::new(), true, &[Wait, touch]).unwrap();
        // Another thread's wait counts if a barrier follows.
        follow(&simt::Queue::new(), true, &[OneWaits, Barrier, touch]).unwrap();
        assert_eq!(early(follow(&simt::Queue::new(), true, &[OneWaits, touch])), None);
        // What is not launched as a dependent, and what follows a copy, has nothing to wait for.
        follow(&simt::Queue::new(), false, &[touch]).unwrap();
        let queue = simt::Queue::new();
        queue.done();
        follow(&queue, true, &[touch, Wait]).unwrap();
        queue.forget();
        assert_eq!(early(follow(&queue, true, &[touch, Wait])), None);
    }
}

#[test]
fn what_follows_a_launch_may_touch_what_that_does_not() {
    let (x, y) = (Buffer::from_slice(&[0u32]), Buffer::from_slice(&[0u32]));
    let (p, q) = (x.as_mut_ptr(), y.as_mut_ptr());
    let then = |first: &[Step], second: &[Step]| {
        let queue = simt::Queue::new();
        follow(&queue, true, first).unwrap();
        follow(&queue, true, second)
    };
    let conflict = |access| Some(("buggy".to_string(), access));
    then(&[Wait, Trigger, Write(p)], &[Read(q), Write(q), Wait, Read(p)]).unwrap();
    assert_eq!(early(then(&[Wait, Trigger, Write(p)], &[Read(p), Wait])), conflict(Access::Write));
    assert_eq!(early(then(&[Wait, Write(p)], &[Write(p), Wait])), conflict(Access::Write));
    assert_eq!(early(then(&[Wait, Read(p)], &[Write(p), Wait])), conflict(Access::Read));
    then(&[Wait, Read(p)], &[Read(p), Wait]).unwrap();
    // Atomics order launches that overlap, too.
    unsafe { q.write(0) };
    then(&[Wait, Write(p), Publish(q)], &[Poll(q, true), Read(p), Wait]).unwrap();
    assert_eq!(early(then(&[Wait, Write(p), Publish(q)], &[Poll(q, false), Read(p), Wait])), conflict(Access::Write));
}

#[test]
fn launches_overlap_with_those_before_the_one_before() {
    let x = Buffer::from_slice(&[0u32]);
    let p = x.as_mut_ptr();
    let third = |second: &[Step]| {
        let queue = simt::Queue::new();
        follow(&queue, true, &[Wait, Write(p)]).unwrap();
        follow(&queue, true, second).unwrap();
        follow(&queue, true, &[Read(p), Wait])
    };
    third(&[Wait, Trigger]).unwrap();
    third(&[Wait]).unwrap();
    assert!(early(third(&[Trigger, Wait])).is_some());
    // Nobody would know when the first has ended.
    let queue = simt::Queue::new();
    let e = follow(&queue, true, &[Trigger]).unwrap_err();
    assert!(matches!(e.kind, ErrorKind::NeverWaited), "{e}");
}

// --- Hopper -------------------------------------------------------------------

#[test]
fn bulk_store_that_nobody_waits_for() {
    let y = Buffer::<f32>::poisoned(4);
    let p = y.as_mut_ptr();
    let kernel = |wait: bool| {
        move || unsafe {
            let s = Carver::new().take::<f32>(4);
            (0..4u32).for_each(|i| s.set(i, i as f32));
            tma::store_bulk(p, s.ptr(0u32), 16);
            tma::commit_group();
            if wait {
                tma::wait_group_read::<0>();
            }
        }
    };
    run(launch().shared_bytes(16), kernel(true)).unwrap();
    assert_eq!(y.to_vec(), [0.0, 1.0, 2.0, 3.0]);
    let e = error(launch().shared_bytes(16), kernel(false));
    assert!(e.to_string().contains("never waited for"), "{e}");
}

#[test]
fn operands_overwritten_under_a_product() {
    use cuda_std::wgmma::{self, Accumulator, Descriptor, K};
    let kernel = |too_early: bool| {
        move || unsafe {
            let s = Carver::new().take_aligned::<half::f16>((64 + 8) * 64, 1024);
            let t = thread::thread_idx_x();
            let fill = |value: f32| (0..36).for_each(|i| s.set(t * 36 + i, half::f16::from_f32(value)));
            fill(1.0);
            tma::fence_async();
            thread::sync_threads();
            let (a, b) = (Descriptor::<K>::new(s.address(0u32)), Descriptor::<K>::new(s.address(64 * 64u32)));
            let mut acc = <[f32; 4]>::zero();
            acc.multiply::<half::f16, 4, _, _>(a, b, false);
            if too_early {
                thread::sync_threads();
                fill(2.0);
            }
            wgmma::wait::<0>(&mut acc);
            assert_eq!(acc, [64.0; 4]);
        }
    };
    let l = || launch().block(128).shared_bytes(72 * 128).race(true);
    run(l(), kernel(false)).unwrap();
    let e = error(l(), kernel(true));
    assert!(e.to_string().contains("under a wgmma in flight"), "{e}");
}

#[test]
fn clusters_of_several_blocks() {
    use cuda_std::cluster;
    let out = Buffer::<u32>::poisoned(256);
    let p = out.as_mut_ptr();
    // Each block reads what its neighbour wrote, then writes into the neighbour's memory.
    let kernel = |barrier: bool| {
        move || unsafe {
            cluster::dims::<4>();
            let s = Carver::new().take::<u32>(64);
            let (t, rank) = (thread::thread_idx_x(), cluster::rank());
            assert_eq!((cluster::size(), rank), (4, thread::block_idx_x() % 4));
            s.set(t, 100 * rank + t);
            cluster::sync();
            let next = (rank + 1) % 4;
            let seen = cluster::load_u32(cluster::map(s.ptr(t ^ 1), next));
            cluster::sync();
            cluster::store_u32(cluster::map(s.ptr(t), next), seen + 1000);
            if barrier || rank != 3 {
                cluster::sync();
            }
            GlobalMut::new(p).set(thread::index_1d(), s.get(t));
        }
    };
    let l = || launch().grid(8).block(32).cluster(4).shared_bytes(256);
    for order in [Order::InOrder, Order::Random { seed: 5, preempt: true }] {
        run(l().order(order).race(true), kernel(true)).unwrap();
        for (i, v) in out.to_vec().into_iter().enumerate() {
            let (rank, t) = (i as u32 / 32 % 4, i as u32 % 32);
            assert_eq!(v, 1000 + 100 * rank + (t ^ 1));
        }
    }
    let e = error(l().spin_limit(std::time::Duration::from_millis(20)), kernel(false));
    assert!(
        matches!(&e.kind, ErrorKind::Stuck { threads, .. }
        if matches!(threads[0].state, ThreadState::Spin { op: "cluster::wait", .. })),
        "{e}"
    );
    // The launch must fit the kernel, and the grid the clusters.
    let e = error(launch(), cluster::dims::<2>);
    assert!(e.to_string().contains("for clusters of 2 blocks, launched with 1"), "{e}");
    let e = error(launch().grid(9).cluster(2), || ());
    assert!(matches!(e.kind, ErrorKind::InvalidLaunch(_)), "{e}");
    let e = error(l(), || {
        cluster::map(0u32, 4);
    });
    assert!(e.to_string().contains("block 4 of a cluster of 4"), "{e}");
}

#[test]
fn multicast_within_a_cluster() {
    use cuda_std::tma::{Swizzle, TensorMap, TensorMapDescription};
    let data = Buffer::from_slice(&(0..64).map(|i| i as f32).collect::<Vec<_>>());
    let out = Buffer::<f32>::poisoned(2 * 64);
    let p = out.as_mut_ptr();
    let map = TensorMap::for_simt(&TensorMapDescription {
        base: data.as_ptr() as u64,
        dtype: cuda_std::DType::F32,
        rank: 1,
        dims: [64, 1, 1, 1, 1],
        strides: [0; 4],
        box_dims: [32, 1, 1, 1, 1],
        swizzle: Swizzle::None,
    })
    .unwrap();
    let map = &raw const map;
    let kernel = || unsafe {
        let mut carver = Carver::new();
        let (tile, bars) = (carver.take_aligned::<f32>(64, 128), carver.take::<u64>(2));
        let (t, rank) = (thread::thread_idx_x(), cuda_std::cluster::rank());
        let (full, empty) = (bars.address(0u32), bars.address(1u32));
        if t == 0 {
            mbarrier::init(full, 1);
            mbarrier::init(empty, 2);
            mbarrier::fence_init();
        }
        cuda_std::cluster::sync();
        // Each block loads a half for both.
        if t == 0 {
            mbarrier::arrive_expect_tx(full, 256);
            tma::load_tensor_multicast::<1>(tile.address(32 * rank), map, [32 * rank as i32], full, 3);
        }
        mbarrier::wait_parity_cluster(full, 0);
        let v = tile.get(t);
        // Both tell both that they have read.
        thread::sync_threads();
        if t < 2 {
            mbarrier::arrive_cluster(empty, t);
        }
        mbarrier::wait_parity_cluster(empty, 0);
        GlobalMut::new(p).set(thread::index_1d(), v);
        cuda_std::cluster::sync();
    };
    for order in [Order::InOrder, Order::Random { seed: 5, preempt: true }] {
        run(launch().grid(2).block(64).cluster(2).shared_bytes(512).order(order).race(true), kernel).unwrap();
        assert!((0..128).all(|i| out.to_vec()[i] == (i % 64) as f32));
    }
}

// --- control ---------------------------------------------------------------

#[test]
fn panic_has_coordinates() {
    let e = error(launch().grid((2, 3)).block((4, 4)), || {
        let table = [0u8; 10];
        let i = thread::thread_idx_x() + 4 * thread::thread_idx_y();
        assert!(thread::block_idx_y() < 2 || table[i as usize] == 0);
    });
    let ErrorKind::Panic { thread, message, at } = &e.kind else { panic!("{e}") };
    assert_eq!((thread.x, thread.y), (2, 2));
    assert_eq!((e.block.x, e.block.y), (0, 2));
    assert!(message.contains("index out of bounds"));
    assert!(at.as_ref().unwrap().contains("bugs.rs"));
}

#[test]
fn panic_while_others_wait_runs_destructors() {
    use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
    struct Count<'a>(&'a AtomicU32);
    impl Drop for Count<'_> {
        fn drop(&mut self) {
            self.0.fetch_add(1, Relaxed);
        }
    }
    let dropped = AtomicU32::new(0);
    let e = error(launch().block(64), || {
        let _guard = Count(&dropped);
        assert!(thread::thread_idx_x() != 63, "the last one");
        thread::sync_threads();
    });
    assert!(matches!(e.kind, ErrorKind::Panic { .. }));
    assert_eq!(dropped.load(Relaxed), 64);
}

#[test]
fn trap_is_an_error() {
    let e = error(launch().block(2), || thread::trap());
    assert!(matches!(e.kind, ErrorKind::Trap { .. }));
}

#[test]
fn spinning_on_an_atomic_lets_others_run() {
    let flag = Buffer::from_slice(&[0u32]);
    let p = flag.as_mut_ptr();
    run(launch().block(64).buffers(&[&flag]), || unsafe {
        if thread::thread_idx_x() == 63 {
            atomic::store_release_u32(p, 1);
        }
        while atomic::load_acquire_u32(p) == 0 {}
    })
    .unwrap();
}

#[test]
fn waiting_for_an_earlier_block_works() {
    // A chained scan: each block waits for its predecessor.
    let (n, state) = (200u32, Buffer::from_slice(&[0u32; 201]));
    let p = state.as_mut_ptr();
    unsafe {
        atomic_free_init(p);
        run(launch().grid(n).block(32).buffers(&[&state]), || {
            let b = thread::block_idx_x() as usize;
            if thread::thread_idx_x() == 0 {
                let mut before = 0;
                while before == 0 {
                    before = atomic::load_acquire_u32(p.add(b));
                }
                atomic::store_release_u32(p.add(b + 1), before + 1);
            }
        })
        .unwrap();
    }
    assert_eq!(state.to_vec()[n as usize], n + 1);
}

unsafe fn atomic_free_init(p: *mut u32) {
    *p = 1;
}

#[test]
fn spinning_forever_is_an_error() {
    let e = error(launch().block(33).spin_limit(std::time::Duration::from_millis(50)), || {
        if thread::thread_idx_x() == 32 {
            loop {
                thread::nanosleep(100);
            }
        }
        thread::sync_threads();
    });
    let ErrorKind::Stuck { why, threads } = &e.kind else { panic!("{e}") };
    assert!(why.contains("only polled"), "{why}");
    assert!(matches!(threads[32].state, ThreadState::Spin { op: "nanosleep", .. }));
}

#[test]
fn parallel_blocks_share_atomics() {
    let (count, sum) = (Buffer::from_slice(&[0u32]), Buffer::from_slice(&[0.0f32]));
    let (pc, ps) = (count.as_mut_ptr(), sum.as_mut_ptr());
    run(launch().grid(100).block(96).buffers(&[&count, &sum]), || unsafe {
        atomic::fetch_add_u32(pc, 1);
        atomic::fetch_add_f32(ps, 0.5);
    })
    .unwrap();
    assert_eq!((count.to_vec()[0], sum.to_vec()[0]), (9600, 4800.0));
}

#[test]
fn launch_limits() {
    for l in [launch().block(1025), launch().block(0), launch().grid((1, 70000)), launch().shared_bytes(1 << 20)] {
        assert!(matches!(unsafe { l.run(|| ()) }.unwrap_err().kind, ErrorKind::InvalidLaunch(_)));
    }
}

#[test]
fn launch_inside_a_kernel() {
    let e = error(launch(), || unsafe { launch().run(|| ()) }.unwrap());
    assert!(matches!(&e.kind, ErrorKind::Panic { message, .. } if message.contains("inside a kernel")));
}

#[test]
fn workers_end_with_their_thread() {
    for _ in 0..20 {
        std::thread::spawn(|| {
            run(launch().block(256).parallel(false), thread::sync_threads).unwrap();
            error(launch().block(64).parallel(false), || assert!(thread::thread_idx_x() < 32));
        })
        .join()
        .unwrap();
    }
}

#[test]
fn the_first_failing_block_is_reported() {
    for order in [Order::InOrder, Order::Random { seed: 9, preempt: false }] {
        let failing =
            |l: Launch<'static>| error(l.order(order).grid(50).block(32), || assert!(thread::block_idx_x() % 7 != 3));
        assert_eq!(failing(launch()).block, failing(launch().parallel(false)).block);
    }
}

#[test]
fn device_function_outside_a_launch() {
    assert!(std::panic::catch_unwind(thread::thread_idx_x).is_err());
}

/// A plain read, an atomic that comes after it, and one that does not: found in whichever order they run.
#[test]
fn atomics_race_with_reads_before_other_atomics() {
    for [reader, after, other] in [[0u32, 1, 2], [1, 2, 0], [2, 0, 1], [0, 2, 1], [1, 0, 2], [2, 1, 0]] {
        let e = error(launch().block(32).shared_bytes(16).race(true), || unsafe {
            let s = Carver::new().take::<u32>(4);
            let lane = thread::thread_idx_x();
            if lane == 0 {
                s.set(0u32, 7);
            }
            thread::sync_threads();
            if lane == reader {
                let _ = s.get(0u32);
            }
            if lane == reader || lane == after {
                warp::sync_warp(1 << reader | 1 << after);
            }
            if lane == after || lane == other {
                s.fetch_add(0u32, 1, atomic::Block, atomic::Relaxed);
            }
        });
        assert!(matches!(e.kind, ErrorKind::Race { .. }), "reader {reader}, atomics {after} and {other}: {e}");
    }
}

#[test]
fn absurd_launches() {
    let most = (u32::MAX, u32::MAX, u32::MAX);
    for launch in [launch().grid(most), launch().block(most)] {
        assert!(matches!(error(launch, || ()).kind, ErrorKind::InvalidLaunch(_)));
    }
}
