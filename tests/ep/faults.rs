//! What goes wrong between ranks, and what is after that.

use super::ranks::{Meeting, on_every_setup, run};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;
use warploom::ep::{Arrangement, Blocks, CombineOptions, Communicator, Config, DispatchOptions, Fault, Phase, Routing};
use warploom::{Device, Error, SimtOptions, Stream, Tensor, bf16};

const TOKENS: usize = 6;

fn config() -> Config {
    Config::new(64, 1, 12, TOKENS).time_out(Duration::from_millis(300))
}

fn fault(result: warploom::Result<()>) -> Fault {
    match result {
        Err(Error::Ep(fault)) => fault,
        other => panic!("{other:?}"),
    }
}

/// A dispatch and a combine in which each token goes to one rank, and so comes back as it was.
fn there_and_back(rank: &mut Communicator, stream: &Stream, meeting: &Meeting) {
    let d = rank.device().clone();
    let values: Vec<bf16> = (0..TOKENS * 64).map(|i| bf16::from_f32((i % 99 + rank.rank()) as f32)).collect();
    let x = Tensor::from_slice(&d, &values, &[TOKENS, 64]).unwrap();
    let ids: Vec<i32> = (0..TOKENS).map(|t| ((t * 5 + rank.rank()) % 12) as i32).collect();
    let ids = Tensor::from_slice(&d, &ids, &[TOKENS, 1]).unwrap();
    let mut out = Tensor::<bf16>::zeros(&d, &[TOKENS, 64]).unwrap();
    let mut routing = rank.routing().unwrap();
    meeting.wait();
    for arrangement in [Arrangement::Compact, Arrangement::Slots] {
        let options = DispatchOptions::default().arrangement(arrangement);
        let received = rank.dispatch(stream, &mut routing, &x, &ids, None, &options).unwrap();
        let rows = received.rows.bf16().unwrap();
        rank.combine(stream, &mut out, &routing, Some(rows), &CombineOptions::default()).unwrap();
        rank.check(stream).unwrap();
        meeting.wait();
        assert_eq!(out.to_vec().unwrap(), values);
        meeting.wait();
    }
}

/// What a dispatch needs, made before any rank begins: on a GPU that ranks share, that waits for all of them.
struct Call {
    x: Tensor<bf16>,
    ids: Tensor<i32>,
    routing: Routing,
}

impl Call {
    fn new(rank: &Communicator, ids: &[i32]) -> Self {
        let d = rank.device();
        let x = Tensor::zeros(d, &[ids.len(), 64]).unwrap();
        let ids = Tensor::from_slice(d, ids, &[ids.len(), 1]).unwrap();
        Self { x, ids, routing: rank.routing().unwrap() }
    }

    fn go(&mut self, rank: &mut Communicator, stream: &Stream, options: &DispatchOptions<'_>) {
        rank.dispatch(stream, &mut self.routing, &self.x, &self.ids, None, options).unwrap();
    }
}

#[test]
fn a_dead_rank_is_named() {
    on_every_setup(&[2, 4], |devices| {
        for arrangement in [Arrangement::Compact, Arrangement::Slots] {
            run(devices, &config(), |rank, stream, meeting| {
                let dead = rank.ranks() - 1;
                let options = DispatchOptions::default().arrangement(arrangement);
                let mut call = Call::new(rank, &[0, 11]);
                meeting.wait();
                if rank.rank() != dead {
                    call.go(rank, stream, &options);
                    let seen = fault(rank.check(stream));
                    assert_eq!(seen, Fault::TimeOut { rank: rank.rank(), peer: dead, phase: Phase::Entry });
                    // What follows fails at once.
                    let start = std::time::Instant::now();
                    call.go(rank, stream, &options);
                    assert_eq!(fault(rank.check(stream)), seen);
                    assert!(devices[0].is_simt() || start.elapsed() < Duration::from_millis(250));
                }
                meeting.wait();
                rank.recover().unwrap();
                there_and_back(rank, stream, meeting);
                rank.check(stream).unwrap();
            });
        }
    });
}

/// A rank is lost when its experts have the rows.
#[test]
fn a_rank_that_dies_before_combine() {
    on_every_setup(&[2, 3], |devices| {
        for arrangement in [Arrangement::Compact, Arrangement::Slots] {
            run(devices, &config(), |rank, stream, meeting| {
                let dead = rank.ranks() - 1;
                let mut call = Call::new(rank, &[0, 11, 5]);
                let mut out = Tensor::<bf16>::zeros(rank.device(), &[3, 64]).unwrap();
                let options = CombineOptions::default();
                meeting.wait();
                call.go(rank, stream, &DispatchOptions::default().arrangement(arrangement));
                rank.check(stream).unwrap();
                meeting.wait();
                if rank.rank() != dead {
                    rank.combine(stream, &mut out, &call.routing, None, &options).unwrap();
                    match fault(rank.check(stream)) {
                        Fault::TimeOut { rank: r, peer, phase: Phase::Entry } => {
                            assert_eq!((r, peer), (rank.rank(), dead));
                        }
                        // Somebody else gave up first.
                        Fault::PeerFailed { .. } => assert!(rank.ranks() > 2),
                        other => panic!("{other:?}"),
                    }
                }
                meeting.wait();
                rank.recover().unwrap();
                there_and_back(rank, stream, meeting);
                // What the dispatch before said holds no more after a recovery, but does no harm.
                rank.combine(stream, &mut out, &call.routing, None, &options).unwrap();
                drop(rank.check(stream));
            });
        }
    });
}

#[test]
fn a_rank_that_comes_too_late() {
    on_every_setup(&[2], |devices| {
        run(devices, &config(), |rank, stream, meeting| {
            let mut call = Call::new(rank, &[0, 11]);
            meeting.wait();
            if rank.rank() == 1 {
                std::thread::sleep(Duration::from_millis(900));
            }
            call.go(rank, stream, &DispatchOptions::default());
            let first = rank.check(stream);
            call.go(rank, stream, &DispatchOptions::default());
            let second = rank.check(stream);
            // The one in time gives up; the late one is told so, or waits for it in vain, in one operation or the next.
            assert!(first.is_err() || second.is_err());
            if rank.rank() == 0 {
                assert_eq!(fault(first), Fault::TimeOut { rank: 0, peer: 1, phase: Phase::Entry });
            }
            meeting.wait();
            rank.recover().unwrap();
            there_and_back(rank, stream, meeting);
        });
    });
}

#[test]
fn ranks_that_disagree() {
    on_every_setup(&[2, 3], |devices| {
        run(devices, &config(), |rank, stream, meeting| {
            // One of them dispatches in another arrangement.
            let odd = rank.rank() == 1;
            let arrangement = if odd { Arrangement::Slots } else { Arrangement::Compact };
            let (mut call, mut other) = (Call::new(rank, &[0, 11]), Call::new(rank, &[3]));
            meeting.wait();
            call.go(rank, stream, &DispatchOptions::default().arrangement(arrangement));
            match fault(rank.check(stream)) {
                Fault::Disagree { rank: r, peer, .. } => assert!(r == rank.rank() && (odd || peer == 1)),
                // Somebody else noticed first.
                Fault::PeerFailed { .. } => assert!(rank.ranks() > 2),
                other => panic!("{other:?}"),
            }
            meeting.wait();
            rank.recover().unwrap();
            there_and_back(rank, stream, meeting);
            meeting.wait();
            // Another operation altogether.
            if rank.rank() == 0 {
                rank.barrier(stream).unwrap();
            } else {
                other.go(rank, stream, &DispatchOptions::default());
            }
            assert!(matches!(fault(rank.check(stream)), Fault::Disagree { .. } | Fault::PeerFailed { .. }));
            meeting.wait();
            rank.recover().unwrap();
        });
    });
}

/// Some say nothing when they begin: a barrier, and slots after a combine.
#[test]
fn ranks_at_other_operations_after_a_combine() {
    #[derive(Clone, Copy, Debug)]
    enum Op {
        Barrier,
        Dispatch(Arrangement),
        Combine,
        AllToAll,
    }
    let (compact, slots) = (Op::Dispatch(Arrangement::Compact), Op::Dispatch(Arrangement::Slots));
    let pairs = [
        (Op::Barrier, slots),
        (slots, Op::Barrier),
        (Op::Barrier, compact),
        (compact, Op::Barrier),
        (Op::Combine, Op::Barrier),
        (Op::AllToAll, Op::Barrier),
        (slots, compact),
        (compact, slots),
        (slots, Op::Combine),
        (Op::Combine, slots),
        (slots, Op::AllToAll),
    ];
    on_every_setup(&[2, 3], |devices| {
        let noticed: [AtomicU32; 11] = Default::default();
        run(devices, &config(), |rank, stream, meeting| {
            let mut call = Call::new(rank, &[0, 11]);
            let pieces = Tensor::<f32>::zeros(rank.device(), &[rank.ranks(), 4]).unwrap();
            let mut out = Tensor::<bf16>::zeros(rank.device(), &[2, 64]).unwrap();
            for ((theirs, odd), noticed) in pairs.into_iter().zip(&noticed) {
                there_and_back(rank, stream, meeting);
                // On one GPU a rank that still copies or frees waits for whoever is at an operation already.
                meeting.wait();
                let op = if rank.rank() == 1 { odd } else { theirs };
                match op {
                    Op::Barrier => rank.barrier(stream).unwrap(),
                    Op::Dispatch(arrangement) => {
                        call.go(rank, stream, &DispatchOptions::default().arrangement(arrangement));
                    }
                    Op::Combine => {
                        rank.combine(stream, &mut out, &call.routing, None, &CombineOptions::default()).unwrap();
                    }
                    Op::AllToAll => drop(rank.all_to_all(stream, &pieces, Blocks::default()).unwrap()),
                }
                match fault(rank.check(stream)) {
                    Fault::Disagree { rank: r, peer, .. } => {
                        assert!(r == rank.rank() && (r == 1 || peer == 1), "{theirs:?} {odd:?}");
                        noticed.fetch_add(1, Ordering::Relaxed);
                    }
                    // Somebody else noticed first: on one GPU ranks begin one after the other.
                    Fault::PeerFailed { .. } => {}
                    other => panic!("{theirs:?} {odd:?}: {other:?}"),
                }
                meeting.wait();
                assert_ne!(noticed.load(Ordering::Relaxed), 0, "{theirs:?} {odd:?}");
                rank.recover().unwrap();
            }
        });
    });
}

/// The same operation, but other shapes or options.
#[test]
fn ranks_that_disagree_on_shapes() {
    on_every_setup(&[2, 3], |devices| {
        run(devices, &Config::new(128, 1, 12, TOKENS).time_out(Duration::from_millis(300)), |rank, stream, meeting| {
            let (d, odd) = (rank.device().clone(), rank.rank() == 1);
            let pieces = Tensor::<f32>::zeros(&d, &[rank.ranks(), if odd { 8 } else { 4 }]).unwrap();
            let x = Tensor::<bf16>::zeros(&d, &[2, 128]).unwrap();
            let ids = Tensor::from_slice(&d, &[0, 11], &[2, 1]).unwrap();
            let mut routing = rank.routing().unwrap();
            let mut out = Tensor::<bf16>::zeros(&d, &[2, 128]).unwrap();
            let plain = DispatchOptions::default();
            let blocks = Blocks::count(if odd { 1 } else { 2 });
            for case in 0..5 {
                meeting.wait();
                match case {
                    0 => drop(rank.all_to_all(stream, &pieces, Blocks::default()).unwrap()),
                    1 | 2 => {
                        let slots = if case == 2 { Arrangement::Slots } else { Arrangement::Compact };
                        let options = plain.arrangement(slots).quantise(odd);
                        drop(rank.dispatch(stream, &mut routing, &x, &ids, None, &options).unwrap());
                    }
                    3 => drop(rank.dispatch(stream, &mut routing, &x, &ids, None, &plain.blocks(blocks)).unwrap()),
                    _ => {
                        let options = CombineOptions::default().blocks(blocks);
                        rank.combine(stream, &mut out, &routing, None, &options).unwrap();
                    }
                }
                match fault(rank.check(stream)) {
                    Fault::Disagree { rank: r, peer, .. } => assert!(r == rank.rank() && (odd || peer == 1), "{case}"),
                    // Somebody else noticed first.
                    Fault::PeerFailed { .. } => assert!(rank.ranks() > 2, "{case}"),
                    other => panic!("{case}: {other:?}"),
                }
                meeting.wait();
                rank.recover().unwrap();
                meeting.wait();
                // Usable again.
                rank.dispatch(stream, &mut routing, &x, &ids, None, &plain).unwrap();
                rank.check(stream).unwrap();
            }
        });
    });
}

/// Devices whose kernels cannot use each other's memory, or not at the same time.
#[test]
fn no_peer_access() {
    let config = config();
    let strangers = [Device::simt(), Device::simt()];
    let e = Communicator::new(&strangers, &config).unwrap_err();
    assert!(matches!(&e, Error::Unsupported { what, .. } if what.contains("cannot reach the memory of")), "{e:?}");
    let mut mixed = Device::simt_peers(2, SimtOptions::default());
    mixed.extend(Device::simt_peers(1, SimtOptions::default()));
    assert!(matches!(Communicator::new(&mixed, &config), Err(Error::Unsupported { .. })));
    if let Some(gpu) = warploom_tests::gpu() {
        let e = Communicator::new(&[gpu, Device::simt()], &config).unwrap_err();
        assert!(matches!(e, Error::WrongDevice { arg: "devices", .. }), "{e:?}");
    }
}

#[test]
fn experts_out_of_range() {
    on_every_setup(&[2, 3], |devices| {
        for arrangement in [Arrangement::Compact, Arrangement::Slots] {
            for bad in [12, i32::MAX, -2, i32::MIN] {
                run(devices, &config(), |rank, stream, meeting| {
                    let ids = if rank.rank() == 0 { [1, 2, bad, -1, 4] } else { [0, 1, 2, 3, 4] };
                    let mut call = Call::new(rank, &ids);
                    meeting.wait();
                    call.go(rank, stream, &DispatchOptions::default().arrangement(arrangement));
                    let seen = fault(rank.check(stream));
                    if rank.rank() == 0 {
                        assert_eq!(seen, Fault::BadId { rank: 0, token: 2 });
                    } else {
                        assert_eq!(seen, Fault::PeerFailed { rank: rank.rank(), peer: 0 });
                    }
                    meeting.wait();
                    rank.recover().unwrap();
                    there_and_back(rank, stream, meeting);
                });
            }
        }
    });
}

#[test]
fn no_room() {
    on_every_setup(&[3], |devices| {
        run(devices, &config().capacity(11), |rank, stream, meeting| {
            // Rank 2 is to get four tokens of each rank.
            let mut calls = [Call::new(rank, &[8, 9, 10, 11]), Call::new(rank, &[8, 9, 4, 0])];
            meeting.wait();
            calls[0].go(rank, stream, &DispatchOptions::default());
            let seen = fault(rank.check(stream));
            assert_eq!(seen, Fault::Overflow { rank: rank.rank(), peer: 2, tokens: 12, capacity: 11 });
            meeting.wait();
            rank.recover().unwrap();
            // What failed has no routing to keep.
            let Call { x, ids, routing } = &mut calls[0];
            let e = rank.dispatch(stream, routing, x, ids, None, &DispatchOptions::default().cached(true));
            assert!(matches!(e, Err(Error::Value { arg: "cached", .. })), "{e:?}");
            calls[1].go(rank, stream, &DispatchOptions::default());
            rank.check(stream).unwrap();
            calls[1].go(rank, stream, &DispatchOptions::default().cached(true));
            rank.check(stream).unwrap();
        });
    });
}

#[test]
fn recovery_needs_everybody() {
    on_every_setup(&[2], |devices| {
        run(devices, &config(), |rank, _, meeting| {
            if rank.rank() == 0 {
                let seen = fault(rank.recover());
                assert_eq!(seen, Fault::TimeOut { rank: 0, peer: 1, phase: Phase::Recovery });
            }
            meeting.wait();
            rank.recover().unwrap();
        });
    });
}
