//! Blocks that wait for each other, and devices that share memory.
#![allow(unsafe_op_in_unsafe_fn, clippy::undocumented_unsafe_blocks)]

use cuda_std::atomic::{Acquire, Ordering, Relaxed, Release, System};
use cuda_std::shared::Carver;
use cuda_std::{Global, GlobalMut, cluster, mbarrier, thread};
use simt::{Buffer, ErrorKind, Launch, LaunchError, Order, Peers};
use std::time::Duration;

/// Each block says that it is there and waits for the next one.
unsafe fn ring(flags: *mut u32) {
    let (block, blocks) = (thread::block_idx_x(), thread::grid_dim_x());
    let flags = GlobalMut::new(flags);
    if thread::thread_idx_x() == 0 {
        flags.store(block, 1, System, Release);
        while flags.load((block + 1) % blocks, System, Acquire) == 0 {
            thread::spin_hint();
        }
    }
}

#[test]
fn blocks_that_wait_for_each_other_run_together() {
    for order in [Order::InOrder, Order::Random { seed: 3, preempt: true }] {
        for race in [false, true] {
            let flags = Buffer::from_slice(&[0u32; 7]);
            let p = flags.as_mut_ptr();
            let launch = Launch::new("ring").grid(7).block(64).order(order).race(race).parallel(false);
            unsafe { launch.clone().together(true).run(|| ring(p)) }.unwrap();
            assert_eq!(flags.to_vec(), [1; 7]);
            let flags = Buffer::from_slice(&[0u32; 7]);
            let p = flags.as_mut_ptr();
            let alone = unsafe { launch.spin_limit(Duration::from_millis(50)).run(|| ring(p)) };
            assert!(matches!(alone.unwrap_err().kind, ErrorKind::Stuck { .. }));
        }
    }
}

/// One device writes for another, which waits for a flag and reads; orders as they should be, or not.
fn hand_over<S: Ordering + Copy + Sync>(store: S, wait: bool) -> Result<(), LaunchError> {
    let peers = Peers::new(2);
    let (data, flag) = (Buffer::from_slice(&[0u32; 32]), Buffer::from_slice(&[0u32]));
    let (data, flag) = (&data, &flag);
    let launch = || Launch::new("peer").block(32).order(Order::InOrder).race(true).together(true);
    std::thread::scope(|s| {
        let peers = &peers;
        let reader = s.spawn(move || {
            let (p, f) = (data.as_mut_ptr(), flag.as_mut_ptr());
            unsafe {
                launch().peers(peers, 1).run(|| {
                    let (data, flag) = (GlobalMut::new(p), GlobalMut::new(f));
                    while flag.load(0usize, System, Acquire) == 0 {
                        thread::spin_hint();
                    }
                    if wait {
                        thread::sync_threads();
                    }
                    let _ = data.get(thread::thread_idx_x());
                })?;
                // Another launch of the device comes after the first.
                launch().peers(peers, 1).run(|| GlobalMut::new(p).set(thread::thread_idx_x(), 2))
            }
        });
        let (p, f) = (data.as_mut_ptr(), flag.as_mut_ptr());
        unsafe {
            launch().peers(peers, 0).run(|| {
                GlobalMut::new(p).set(thread::thread_idx_x(), 1);
                thread::sync_threads();
                if thread::thread_idx_x() == 0 {
                    GlobalMut::new(f).store(0usize, 1, System, store);
                }
            })
        }
        .unwrap();
        reader.join().unwrap()
    })
}

#[test]
fn races_between_devices_are_found() {
    hand_over(Release, true).unwrap();
    let race = hand_over(Relaxed, true).unwrap_err();
    assert!(matches!(race.kind, ErrorKind::Race { .. }), "{race}");
}

#[test]
fn memory_that_is_given_out_anew_has_no_past() {
    let peers = Peers::new(2);
    let launch = || Launch::new("peer").block(32).order(Order::InOrder).race(true).together(true);
    for device in [0, 1, 0, 1] {
        let data = Buffer::from_slice(&[0u32; 32]);
        let p = data.as_mut_ptr();
        unsafe { launch().peers(&peers, device).run(|| GlobalMut::new(p).set(thread::thread_idx_x(), 1)) }.unwrap();
    }
    // Without that, it would be a race.
    let data = Buffer::from_slice(&[0u32; 32]);
    let p = data.as_mut_ptr();
    let write =
        |device| unsafe { launch().peers(&peers, device).run(|| GlobalMut::new(p).set(thread::thread_idx_x(), 1)) };
    write(0).unwrap();
    write(0).unwrap();
    assert!(matches!(write(1).unwrap_err().kind, ErrorKind::Race { .. }));
    peers.forget();
    write(1).unwrap();
}

fn is_race(result: &Result<(), LaunchError>) -> bool {
    matches!(result, Err(LaunchError { kind: ErrorKind::Race { .. }, .. }))
}

/// The first access is by a thread that the second launch's blocks do not have.
#[test]
fn races_with_larger_blocks_of_another_device() {
    let (peers, data) = (Peers::new(2), Buffer::from_slice(&[0u32]));
    let p = data.as_mut_ptr();
    let write = |threads, device, by| unsafe {
        let launch = Launch::new("peer").block(threads).order(Order::InOrder).race(true).together(true);
        launch.peers(&peers, device).run(|| {
            if thread::thread_idx_x() == by {
                GlobalMut::new(p).set(0u32, 1);
            }
        })
    };
    write(64, 0, 40).unwrap();
    let result = write(32, 1, 0);
    assert!(is_race(&result), "{result:?}");
}

/// What the host, or another device, has waited for is over.
#[test]
fn waiting_orders_devices() {
    for wait in [None, Some("host"), Some("device")] {
        let (peers, data) = (Peers::new(2), Buffer::from_slice(&[0u32; 32]));
        let p = data.as_mut_ptr();
        let write = |device| unsafe {
            let launch = Launch::new("peer").block(32).order(Order::InOrder).race(true).together(true);
            launch.peers(&peers, device).run(|| GlobalMut::new(p).set(thread::thread_idx_x(), 1))
        };
        write(0).unwrap();
        match wait {
            None => {}
            Some("host") => peers.host_waits(0),
            Some(_) => peers.device_waits(1, 0),
        }
        let result = write(1);
        assert_eq!(is_race(&result), wait.is_none(), "{wait:?}: {result:?}");
        // The other way round nobody has waited.
        if wait.is_some() {
            assert!(is_race(&write(0)), "{wait:?}");
        }
    }
}

/// Barriers of a cluster order global memory among its blocks, and arrivals at another block's mbarrier do.
#[test]
fn clusters_order_global_memory() {
    for how in ["not at all", "barrier", "mbarrier"] {
        let data = Buffer::from_slice(&[0u32]);
        let p = data.as_mut_ptr();
        let launch = Launch::new("cluster").grid(2).cluster(2).block(32).shared_bytes(64).order(Order::InOrder);
        let result = unsafe {
            launch.race(true).run(|| {
                let bar = Carver::new().take::<u64>(1);
                let (rank, first) = (cluster::rank(), thread::thread_idx_x() == 0);
                if first {
                    mbarrier::init(bar, 1);
                    mbarrier::fence_init();
                }
                cluster::sync();
                if rank == 0 && first {
                    GlobalMut::new(p).set(0u32, 1);
                }
                match how {
                    "barrier" => cluster::sync(),
                    "mbarrier" if rank == 0 && first => mbarrier::arrive_cluster(bar, 1),
                    "mbarrier" if first => mbarrier::wait_parity_cluster(bar, 0),
                    _ => {}
                }
                if rank == 1 && first {
                    let _ = Global::new(p).get(0u32);
                }
                cluster::sync();
            })
        };
        assert_eq!(is_race(&result), how == "not at all", "{how}: {result:?}");
    }
}
