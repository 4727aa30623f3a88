//! Blocks that wait for each other, and devices that share memory.
#![allow(unsafe_op_in_unsafe_fn, clippy::undocumented_unsafe_blocks)]

use cuda_std::atomic::{Acquire, Ordering, Relaxed, Release, System};
use cuda_std::{GlobalMut, thread};
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
