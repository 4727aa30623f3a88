//! What comes before what, and what copies and sums do to memory, by calls as kernels' instructions make them.
#![allow(unsafe_op_in_unsafe_fn, clippy::undocumented_unsafe_blocks)]

use simt::{
    Access, AtomicOrder, Buffer, ErrorKind, Form, Launch, LaunchError, Order, Queue, TensorTile, check_shared,
    cluster_arrive, cluster_arrive_relaxed, cluster_wait, fence, thread_idx,
};

fn launch() -> Launch<'static> {
    Launch::new("kernel").order(Order::InOrder).race(true).shared_bytes(1024)
}

/// The address of a word of shared memory.
fn shared(word: usize) -> *mut u32 {
    simt::shared_memory().0.cast::<u32>().wrapping_add(word)
}

/// A plain access to a word of shared or of global memory.
unsafe fn touch(word: *mut u32, access: Access) {
    let (base, len) = simt::shared_memory();
    if (base as usize..base as usize + len).contains(&(word as usize)) {
        check_shared(word as usize, 4, 4, access);
    } else {
        let region = simt::window_of(word as usize).region;
        simt::global_access(region, word as usize, &Form::of::<u32>(access == Access::Write));
    }
    if access == Access::Write {
        word.write(1);
    }
}

unsafe fn write(word: *mut u32) {
    touch(word, Access::Write);
}

unsafe fn read(word: *mut u32) {
    touch(word, Access::Read);
}

fn is_race(result: Result<(), LaunchError>) -> bool {
    match result {
        Ok(()) => false,
        Err(e) if matches!(e.kind, ErrorKind::Race { .. }) => true,
        Err(e) => panic!("{e}"),
    }
}

// --- one block after another ------------------------------------------------

/// Block 1 runs where block 0 did, whose accesses and order are not its own.
#[test]
fn blocks_begin_anew() {
    let run = |kernel: &(dyn Fn(u32, u32) + Sync)| unsafe {
        launch().grid(2).block(64).parallel(false).run(|| kernel(simt::block_idx().x, thread_idx().x))
    };
    let first_writes = |blocks: u32| {
        run(&|block, thread| unsafe {
            if thread == 0 && block < blocks {
                write(shared(0));
            }
            simt::block_barrier(0, 0, simt::BarrierOp::Sync, false);
            read(shared(0));
        })
    };
    first_writes(2).unwrap();
    let e = first_writes(1).unwrap_err();
    assert!(e.block.x == 1 && matches!(e.kind, ErrorKind::Uninitialised { offset: 0, .. }), "{e}");

    let in_a_warp = |blocks: u32| {
        run(&|block, thread| unsafe {
            if thread == 0 {
                write(shared(0));
            }
            if block < blocks {
                simt::sync_warp(u32::MAX);
            }
            if thread == 1 {
                read(shared(0));
            }
        })
    };
    let across_warps = |blocks: u32| {
        run(&|block, thread| unsafe {
            if thread == 0 {
                simt::mbarrier_init(512, 1);
                write(shared(0));
                simt::mbarrier_arrive(512, 1, 0);
            }
            if thread == 32 {
                while block < blocks && !simt::mbarrier_try_wait(512, 0) {}
                read(shared(0));
            }
        })
    };
    for run in [&in_a_warp as &dyn Fn(u32) -> _, &across_warps] {
        run(2).unwrap();
        let e = run(1).unwrap_err();
        assert!(e.block.x == 1 && matches!(e.kind, ErrorKind::Race { .. }), "{e}");
    }
}

/// A kernel that goes from buffer to buffer is checked in each of them, however many it has seen.
#[test]
fn bounds_of_many_buffers() {
    let buffers: Vec<Buffer<u32>> = (0..7).map(|i| Buffer::from_slice(&vec![0; 1 + i])).collect();
    let all: Vec<(usize, usize)> = buffers.iter().zip(1..).map(|(b, len)| (b.as_mut_ptr() as usize, len)).collect();
    let run = |beyond: Option<usize>| unsafe {
        launch().block(1).run(|| {
            for round in 0..3 {
                for (i, &(first, len)) in all.iter().enumerate() {
                    let last = if round == 2 && beyond == Some(i) { len } else { len - 1 };
                    read((first as *mut u32).wrapping_add(last));
                }
            }
        })
    };
    run(None).unwrap();
    for i in 0..7 {
        let e = run(Some(i)).unwrap_err();
        assert!(matches!(e.kind, ErrorKind::OutOfBounds { len, .. } if len == 4 * (i + 1)), "{e}");
    }
    // The next launch may have fewer.
    run(None).unwrap();
    let e = unsafe { launch().buffers(&[&buffers[0]]).run(|| read(all[6].0 as *mut u32)) }.unwrap_err();
    assert!(matches!(e.kind, ErrorKind::OutOfBounds { .. }), "{e}");
    // Memory that is nobody's may be anywhere, but buffers still end.
    let foreign = [0u32; 4];
    let (foreign, (first, len)) = (foreign.as_ptr() as usize, all[3]);
    let run = |past: usize| unsafe {
        launch().foreign_memory(true).run(|| {
            for word in [foreign as *mut u32, (first as *mut u32).wrapping_add(len - 1 + past)] {
                read(word);
            }
        })
    };
    run(0).unwrap();
    let e = run(1).unwrap_err();
    assert!(matches!(e.kind, ErrorKind::OutOfBounds { len: 16, .. }), "{e}");
}

// --- the barrier of a cluster -----------------------------------------------

/// What a thread does with a word at a barrier of the cluster: before it arrives, between that and the wait, and after it.
#[derive(Clone, Copy)]
struct Steps([Option<Access>; 3]);

impl Steps {
    const NONE: Self = Self([None; 3]);
    const WRITES_FIRST: Self = Self([Some(Access::Write), None, None]);
    const WRITES_BETWEEN: Self = Self([None, Some(Access::Write), None]);
    const READS_BETWEEN: Self = Self([None, Some(Access::Read), None]);
    const READS_LAST: Self = Self([None, None, Some(Access::Read)]);

    unsafe fn run(self, word: *mut u32, arrive: fn()) {
        let at = |i: usize| {
            if let Some(access) = self.0[i] {
                touch(word, access);
            }
        };
        at(0);
        arrive();
        at(1);
        cluster_wait();
        at(2);
    }
}

/// Arrivals that publish.
const ARRIVALS: [fn(); 2] = [cluster_arrive, || {
    fence(true);
    cluster_arrive_relaxed();
}];

#[test]
fn halves_of_a_cluster_barrier_order_a_block() {
    let found = |first: Steps, second: Steps, arrive: fn()| {
        is_race(unsafe {
            launch().block(2).run(|| {
                let thread = thread_idx().x;
                if thread == 0 { first.run(shared(0), arrive) } else { second.run(shared(0), arrive) }
            })
        })
    };
    for arrive in ARRIVALS {
        assert!(!found(Steps::WRITES_FIRST, Steps::READS_LAST, arrive));
        assert!(found(Steps::WRITES_BETWEEN, Steps::READS_LAST, arrive));
        assert!(found(Steps::WRITES_FIRST, Steps::READS_BETWEEN, arrive));
        assert!(found(Steps::WRITES_BETWEEN, Steps::READS_BETWEEN, arrive));
    }
    assert!(found(Steps::WRITES_FIRST, Steps::READS_LAST, cluster_arrive_relaxed));
    // A fence publishes what came before it, and no more.
    assert!(found(Steps::WRITES_FIRST, Steps::READS_LAST, || {
        fence(false);
        unsafe { write(shared(0)) };
        cluster_arrive_relaxed();
    }));
}

#[test]
fn halves_of_a_cluster_barrier_order_blocks() {
    let x = Buffer::from_slice(&[0u32]);
    let p = x.as_mut_ptr();
    let found = |first: Steps, second: Steps, arrive: fn()| {
        is_race(unsafe {
            launch().grid(2).block(32).cluster(2).run(|| {
                let steps = match (simt::cluster_rank(), thread_idx().x) {
                    (0, 5) => first,
                    (1, 7) => second,
                    _ => Steps::NONE,
                };
                steps.run(p, arrive);
            })
        })
    };
    for arrive in ARRIVALS {
        assert!(!found(Steps::WRITES_FIRST, Steps::READS_LAST, arrive));
        assert!(found(Steps::WRITES_FIRST, Steps::READS_BETWEEN, arrive));
    }
    assert!(found(Steps::WRITES_FIRST, Steps::READS_LAST, cluster_arrive_relaxed));
    // A block is one as far as others go: it has published what it did before the last of its threads arrived.
    let late = |rank: u32, steps: Steps| {
        is_race(unsafe {
            launch().grid(2).block(1).cluster(2).run(|| {
                let own = if simt::cluster_rank() == rank { steps } else { Steps::READS_LAST };
                own.run(p, cluster_arrive);
            })
        })
    };
    assert!(late(0, Steps::WRITES_BETWEEN) && late(1, Steps::WRITES_BETWEEN));
    assert!(!late(0, Steps::WRITES_FIRST) && !late(1, Steps::WRITES_FIRST));
}

/// A thread that goes on late has learnt of the phase that it waited for, and not of the one in which others have arrived since.
#[test]
fn phases_of_a_cluster_barrier() {
    let found = |before: bool, order: Order| {
        is_race(unsafe {
            launch().block(2).order(order).run(|| {
                let writes = thread_idx().x == 1;
                for _ in 0..3 {
                    if writes && before {
                        write(shared(0));
                    }
                    cluster_arrive();
                    cluster_wait();
                    if !writes {
                        read(shared(0));
                    } else if !before {
                        write(shared(0));
                    }
                    cluster_arrive();
                    cluster_wait();
                }
            })
        })
    };
    assert!(!found(true, Order::InOrder));
    assert!(found(false, Order::InOrder));
    for seed in 0..20 {
        assert!(!found(true, Order::Random { seed, preempt: true }));
    }
}

/// What two lanes come to together.
fn meet() {
    simt::sync_warp(0x300);
}

/// One thread waits for what was launched before, and tells the others of its cluster, before it arrives or too late.
#[test]
fn a_wait_and_a_cluster_barrier() {
    let x = Buffer::from_slice(&[0u32]);
    let p = x.as_mut_ptr();
    for arrive in [cluster_arrive, cluster_arrive_relaxed] {
        let run = |before: bool, reader: (u32, u32)| unsafe {
            launch().grid(2).block(32).cluster(2).after(&Queue::new(), true).run(|| {
                let me = (simt::cluster_rank(), thread_idx().x);
                if me == (0, 3) && before {
                    simt::dependent_wait();
                }
                arrive();
                if me == (0, 3) && !before {
                    simt::dependent_wait();
                }
                // A lane that has waited for the cluster tells another, which has not.
                if me == (1, 9) {
                    meet();
                    if me == reader {
                        read(p);
                    }
                }
                cluster_wait();
                if me == (1, 8) {
                    meet();
                }
                if me == reader {
                    read(p);
                }
            })
        };
        for reader in [(0, 3), (0, 4), (1, 3), (1, 9)] {
            run(true, reader).unwrap();
        }
        run(false, (0, 3)).unwrap();
        for reader in [(0, 4), (1, 3), (1, 9)] {
            let e = run(false, reader).unwrap_err();
            assert!(matches!(e.kind, ErrorKind::BeforeWait { .. }), "{e}");
        }
    }
}

// --- fences -----------------------------------------------------------------

/// A relaxed store of 1 to a flag.
unsafe fn raise(flag: *mut u32) {
    let order = AtomicOrder { reads: false, writes: true, release: false, block: true };
    simt::atomic_access("atomic store", flag as usize, 4, order);
    flag.write(1);
}

/// Waits for a flag.
unsafe fn await_flag(flag: *mut u32) {
    let order = AtomicOrder { reads: true, writes: false, release: false, block: true };
    loop {
        simt::atomic_access("atomic load", flag as usize, 4, order);
        if flag.read() == 1 {
            return;
        }
        simt::spin("flag");
    }
}

#[test]
fn a_fence_publishes_what_came_before_it() {
    let x = Buffer::from_slice(&[0u32; 2]);
    let p = x.as_mut_ptr();
    let found = |global: bool, producer: fn(*mut u32)| {
        is_race(unsafe {
            launch().block(64).run(|| {
                let (word, flag) = (if global { p } else { shared(0) }, shared(1));
                match thread_idx().x {
                    0 => {
                        producer(word);
                        raise(flag);
                    }
                    32 => {
                        await_flag(flag);
                        read(word);
                    }
                    _ => {}
                }
            })
        })
    };
    for global in [false, true] {
        assert!(!found(global, |word| {
            unsafe { write(word) };
            fence(false);
        }));
        assert!(found(global, |word| unsafe { write(word) }));
        assert!(found(global, |word| {
            fence(false);
            unsafe { write(word) };
        }));
        // The last of them counts.
        assert!(!found(global, |word| {
            fence(false);
            unsafe { write(word) };
            fence(false);
        }));
    }
}

/// What a thread has learnt before a fence goes on with what it has done itself.
#[test]
fn fences_pass_on_what_was_learnt() {
    let found = |fence_late: bool| {
        is_race(unsafe {
            launch().block(96).run(|| match thread_idx().x {
                0 => {
                    write(shared(0));
                    fence(false);
                    raise(shared(1));
                }
                32 => {
                    fence(false);
                    await_flag(shared(1));
                    if fence_late {
                        fence(false);
                    }
                    raise(shared(2));
                }
                64 => {
                    await_flag(shared(2));
                    read(shared(0));
                }
                _ => {}
            })
        })
    };
    assert!(!found(true));
    assert!(found(false));
}

// --- sums -------------------------------------------------------------------

#[test]
fn small_sums_are_flushed_in_global_memory() {
    const TINY: f32 = 3e-40;
    // What is there, what is added, and what that makes in global memory; the smallest normal number is 1.18e-38.
    let sums: [(f32, f32, f32); 7] = [
        (TINY, TINY, 0.0),
        (TINY, 1.0, 1.0),
        (0.0, TINY, 0.0),
        (-TINY, -0.0, -0.0),
        (2e-38, TINY, 2e-38),
        (2e-38, -1.5e-38, 0.0),
        (-2e-38, 1.5e-38, -0.0),
    ];
    let add = |word: *mut f32, value: f32| {
        let order = AtomicOrder { reads: true, writes: true, release: false, block: false };
        simt::atomic_access("fetch_add", word as usize, 4, order);
        unsafe { simt::add_f32(word, value) }
    };
    for (old, value, flushed) in sums {
        let x = Buffer::from_slice(&[old; 6]);
        let p = x.as_mut_ptr();
        unsafe {
            launch().run(|| {
                assert_eq!(add(p, value).to_bits(), old.to_bits());
                let s = shared(0).cast::<f32>();
                check_shared(s as usize, 4, 4, Access::Write);
                s.write(old);
                assert_eq!(add(s, value).to_bits(), old.to_bits());
                assert_eq!(s.read().to_bits(), (old + value).to_bits());
                // The copy engine adds as well.
                for i in 0..4 {
                    check_shared(s.add(i) as usize, 4, 4, Access::Write);
                    s.add(i).write(value);
                }
                simt::store_bulk(p.cast::<u8>(), 0, 16, true);
                simt::bulk_commit();
                simt::bulk_wait(0);
            })
        }
        .unwrap();
        let sums = x.to_vec();
        assert_eq!(sums[1].to_bits(), flushed.to_bits(), "{old} + {value}");
        assert_eq!(sums[4].to_bits(), old.to_bits());
    }
}

// --- the copy engine --------------------------------------------------------

/// Boxes of a matrix of `f32` with rows of 64.
fn boxes(base: *const f32, rows: u64, columns: u32, swizzle: u32) -> TensorTile {
    TensorTile {
        base: base as usize,
        element: 4,
        rank: 2,
        dims: [64, rows, 1, 1, 1],
        strides: [4, 256, 0, 0, 0],
        box_dims: [columns, 2, 1, 1, 1],
        swizzle,
    }
}

#[test]
fn swizzled_boxes_fill_their_lines() {
    let x = Buffer::from_slice(&[1f32; 128]);
    let p = x.as_mut_ptr();
    let message = |columns: u32, swizzle: u32, load: bool| {
        let tile = boxes(p, 2, columns, swizzle);
        let result = unsafe {
            launch().run(|| {
                if load {
                    simt::mbarrier_init(512, 1);
                    simt::mbarrier_arrive(512, 1, tile.box_bytes() as u32);
                    simt::cp_async_bulk_tensor(0, &tile, [0; 5], 512);
                    while !simt::mbarrier_try_wait(512, 0) {}
                } else {
                    check_shared(shared(0) as usize, tile.box_bytes(), 4, Access::Write);
                    shared(0).write_bytes(0, tile.box_bytes() / 4);
                    simt::store_bulk_tensor(&tile, [0; 5], 0, false);
                    simt::bulk_commit();
                    simt::bulk_wait(0);
                }
            })
        };
        result.err().map(|e| e.to_string())
    };
    for load in [false, true] {
        for (swizzle, line) in [(1, 8), (2, 16), (3, 32)] {
            assert_eq!(message(line, swizzle, load), None);
            assert_eq!(message(line - 4, 0, load), None);
            for columns in [line - 4, line + 4] {
                let message = message(columns, swizzle, load).expect("rows that are no line");
                assert!(message.contains("which do not fill a line"), "{message}");
            }
        }
    }
}

/// A copy to other blocks is checked as one to the own is.
#[test]
fn multicast_copies_read_what_they_may() {
    let x = Buffer::from_slice(&[1f32; 128]);
    let p = x.as_mut_ptr();
    let run = |blocks: u16, rows: u64, written: bool| unsafe {
        launch().grid(2).block(64).cluster(2).run(|| {
            let tile = boxes(p, rows, 32, 3);
            let (rank, thread) = (simt::cluster_rank(), thread_idx().x);
            let gets = blocks >> rank & 1 != 0;
            if thread == 0 {
                simt::mbarrier_init(512, 1);
                simt::mbarrier_arrive(512, 1, if gets { 256 } else { 0 });
            }
            cluster_arrive();
            cluster_wait();
            if rank == 0 && thread == 0 {
                simt::cp_async_bulk_tensor_multicast(0, &tile, [32, 0, 0, 0, 0], 512, blocks);
            }
            while gets && !simt::mbarrier_try_wait(512, 0) {}
            if gets {
                read(shared(63));
                assert_eq!(shared(63).cast::<f32>().read(), 1.0);
            }
            if written && rank == 0 && thread == 1 {
                write(p.add(40).cast());
            }
        })
    };
    for blocks in [1, 2, 3] {
        run(blocks, 2, false).unwrap();
        let e = run(blocks, 3, false).unwrap_err();
        assert!(matches!(e.kind, ErrorKind::OutOfBounds { access: Access::Read, len: 512, .. }), "{e}");
        // In the own block the thread has waited for the copy; otherwise nothing orders the two.
        assert_eq!(is_race(run(blocks, 2, true)), blocks == 2);
    }
}
