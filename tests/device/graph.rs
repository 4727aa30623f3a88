//! Capture and replay.

use super::stream::Busy;
use std::sync::atomic::{AtomicBool, Ordering};
use warploom::check::Call;
use warploom::kv_cache::{CacheShape, advance};
use warploom::{Device, Error, Event, Graph, Result, Stream, Tensor, activation, borrow, norm};
use warploom_tests::{devices, noise, on_every_device};

#[test]
fn captured_work_runs_when_launched_and_not_before() {
    on_every_device(|device, stream| {
        device.preload(&["norm"]).unwrap();
        let mut x = Tensor::from_slice(device, &[3.0f32, 4.0], &[1, 2]).unwrap();
        let mut y = Tensor::<f32>::zeros(device, &[1, 2]).unwrap();
        let mut z = Tensor::<f32>::zeros(device, &[1, 2]).unwrap();
        let graph = Graph::capture(stream, |s| {
            assert!(s.is_capturing());
            norm::rms_norm(s, &mut y, &x, None, 0.0)?;
            s.copy(&mut z, &y)?;
            s.fill_bytes(&mut y, 0)
        })
        .unwrap();
        assert!(!stream.is_capturing());
        assert_eq!(z.to_vec().unwrap(), [0.0, 0.0]);
        graph.upload(stream).unwrap();
        for v in [1.0f32, 2.0] {
            x.copy_from_slice(&[0.0, v]).unwrap();
            stream.fill_bytes(&mut z, 0xff).unwrap();
            graph.launch(stream).unwrap();
            assert!((z.to_vec().unwrap()[1] - 2.0f32.sqrt()).abs() < 1e-6);
            assert_eq!(y.to_vec().unwrap(), [0.0, 0.0]);
        }
        // On another stream as well.
        x.copy_from_slice(&[7.0, 0.0]).unwrap();
        let other = Stream::new(device).unwrap();
        graph.launch(&other).unwrap();
        assert!((z.to_vec().unwrap()[0] - 2.0f32.sqrt()).abs() < 1e-6);
    });
}

#[test]
fn a_graph_keeps_its_tensors_alive() {
    on_every_device(|device, stream| {
        device.preload(&["norm"]).unwrap();
        let mut out = Tensor::<f32>::zeros(device, &[16, 64]).unwrap();
        let graph = {
            let x = Tensor::from_slice(device, &[2.0f32; 1024], &[16, 64]).unwrap();
            Graph::capture(stream, |s| {
                // Made and dropped while capturing.
                let mut y = Tensor::<f32>::uninit(device, &[16, 64])?;
                norm::rms_norm(s, &mut y, &x, None, 0.0)?;
                // Of ones; not a copy, which compute-sanitizer's initcheck looks at before the graph runs.
                norm::rms_norm(s, &mut out, &y, None, 0.0)
            })
            .unwrap()
        };
        // Would overwrite memory that had been freed.
        let others: Vec<_> = (0..8).map(|_| Tensor::<f32>::zeros(device, &[16, 64]).unwrap()).collect();
        graph.launch(stream).unwrap();
        assert!(out.to_vec().unwrap().iter().all(|&v| (v - 1.0).abs() < 1e-6));
        assert!(others.iter().all(|t| t.to_vec().unwrap().iter().all(|&v| v == 0.0)));
    });
}

#[test]
fn graphs_within_graphs() {
    on_every_device(|device, stream| {
        let mut out = Tensor::<u8>::zeros(device, &[64]).unwrap();
        let outer = {
            let inner = {
                let x = Tensor::from_slice(device, &[9u8; 64], &[64]).unwrap();
                Graph::capture(stream, |s| s.copy(&mut out, &x)).unwrap()
            };
            Graph::capture(stream, |s| inner.launch(s)).unwrap()
        };
        assert_eq!(out.to_vec().unwrap(), [0; 64]);
        outer.launch(stream).unwrap();
        assert_eq!(out.to_vec().unwrap(), [9; 64]);
    });
}

#[test]
fn reading_is_possible_while_another_stream_is_captured() {
    on_every_device(|device, stream| {
        let x = Tensor::from_slice(device, &[1u8; 64], &[64]).unwrap();
        let mut y = Tensor::<u8>::zeros(device, &[64]).unwrap();
        let mut z = Tensor::<u8>::zeros(device, &[64]).unwrap();
        let other = Stream::new(device).unwrap();
        let mut busy = Busy::new(device);
        let graph = Graph::capture(stream, |s| {
            s.copy(&mut y, &x)?;
            busy.submit(&other)?;
            other.fill_bytes(&mut z, 5)?;
            assert_eq!(z.to_vec()?, [5; 64]);
            let fresh = Tensor::<u8>::from_slice(device, &[3; 8], &[8])?;
            assert_eq!(fresh.to_vec()?, [3; 8]);
            device.synchronize()
        })
        .unwrap();
        assert_eq!(y.to_vec().unwrap(), [0; 64]);
        graph.launch(stream).unwrap();
        assert_eq!(y.to_vec().unwrap(), [1; 64]);
    });
}

#[test]
fn an_empty_graph_does_nothing() {
    on_every_device(|_, stream| {
        let graph = Graph::capture(stream, |_| Ok(())).unwrap();
        graph.launch(stream).unwrap();
        stream.synchronize().unwrap();
    });
}

#[test]
fn a_failed_capture_leaves_the_stream_usable() {
    on_every_device(|device, stream| {
        let mut x = Tensor::<u8>::zeros(device, &[4]).unwrap();
        let error = Graph::capture(stream, |s| {
            s.fill_bytes(&mut x, 1)?;
            s.synchronize()
        })
        .map(|_| ())
        .unwrap_err();
        assert!(matches!(error, Error::Capture(_)), "{error}");

        let error = Graph::capture(stream, |s| Graph::capture(s, |_| Ok(())).map(|_| ())).map(|_| ()).unwrap_err();
        assert!(matches!(error, Error::Capture(_)), "{error}");

        let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            Graph::capture(stream, |_| -> warploom::Result<()> { std::panic::resume_unwind(Box::new(7)) }).map(|_| ())
        }));
        assert_eq!(panic.unwrap_err().downcast_ref(), Some(&7));

        assert!(!stream.is_capturing());
        assert_eq!(x.to_vec().unwrap(), [0; 4]);
        let graph = Graph::capture(stream, |s| s.fill_bytes(&mut x, 2)).unwrap();
        graph.launch(stream).unwrap();
        assert_eq!(x.to_vec().unwrap(), [2; 4]);
    });
}

#[test]
fn a_capture_spans_streams_that_events_join() {
    on_every_device(|device, stream| {
        let other = Stream::new(device).unwrap();
        let (forked, joined) = (Event::new(device).unwrap(), Event::new(device).unwrap());
        let mut x = Tensor::<u8>::zeros(device, &[32]).unwrap();
        let graph = Graph::capture(stream, |s| {
            s.record_event(&forked)?;
            other.wait_event(&forked)?;
            other.fill_bytes(&mut x, 6)?;
            other.record_event(&joined)?;
            s.wait_event(&joined)
        })
        .unwrap();
        assert_eq!(x.to_vec().unwrap(), [0; 32]);
        graph.launch(stream).unwrap();
        assert_eq!(x.to_vec().unwrap(), [6; 32]);
    });
}

/// The captured stream must wait for the last work of each other one, whether by itself or by way of one that it waits for.
#[test]
fn a_stream_that_does_not_join_back_is_an_error() {
    on_every_device(|device, stream| {
        let others = [0; 2].map(|_| Stream::new(device).unwrap());
        let events: Vec<_> = (0..4).map(|_| Event::new(device).unwrap()).collect();
        let mut x = Tensor::<u8>::zeros(device, &[3, 32]).unwrap();
        // Which of two works by the first other stream are waited for, by way of the second one, and whether that works itself behind it.
        for (waits, works, joined) in [(0, false, false), (1, false, false), (2, false, true), (2, true, false)] {
            let mut rows: Vec<_> = (0..3).map(|i| x.narrow(0, i, 1).unwrap()).collect();
            let result = Graph::capture(stream, |s| {
                s.record_event(&events[0])?;
                others[0].wait_event(&events[0])?;
                others[1].wait_event(&events[0])?;
                others[0].fill_bytes(&mut rows[0], 1)?;
                others[0].record_event(&events[1])?;
                others[0].fill_bytes(&mut rows[1], 2)?;
                others[0].record_event(&events[2])?;
                if waits > 0 {
                    others[1].wait_event(&events[waits])?;
                }
                others[1].record_event(&events[3])?;
                if works {
                    others[1].fill_bytes(&mut rows[2], 3)?;
                }
                s.wait_event(&events[3])
            });
            assert!(!stream.is_capturing() && others.iter().all(|s| !s.is_capturing()));
            let Err(error) = result else {
                assert!(joined, "{waits} {works}");
                continue;
            };
            assert!(!joined && matches!(error, Error::Capture(_)), "{waits} {works}: {error}");
        }
        // All are as before, and nothing ran.
        others[0].synchronize().unwrap();
        assert_eq!(x.to_vec().unwrap(), [0; 96]);
        Graph::capture(stream, |s| s.fill_bytes(&mut x, 4)).unwrap().launch(stream).unwrap();
        assert_eq!(x.to_vec().unwrap(), [4; 96]);
    });
}

#[test]
fn a_graph_keeps_the_tensors_of_streams_that_events_join() {
    on_every_device(|device, stream| {
        let other = Stream::new(device).unwrap();
        let (forked, joined) = (Event::new(device).unwrap(), Event::new(device).unwrap());
        let mut x = Tensor::<u8>::zeros(device, &[32]).unwrap();
        let mut lent = [0u8; 32];
        let graph = borrow::scope(&other, |scope| {
            Graph::capture(stream, |s| {
                s.record_event(&forked)?;
                other.wait_event(&forked)?;
                assert!(other.is_capturing());
                // As in the stream that the capture began with: what could go before the graph does is refused, and there is nothing to wait for.
                if device.is_simt() {
                    let e = other.fill_bytes(&mut scope.slice_mut(&mut lent, &[32])?, 1);
                    assert!(matches!(e, Err(Error::Capture(_))), "{e:?}");
                }
                let e = other.synchronize();
                assert!(matches!(e, Err(Error::Capture(_))), "{e:?}");
                let e = Graph::capture(&other, |_| Ok(())).map(drop);
                assert!(matches!(e, Err(Error::Capture(_))), "{e:?}");
                // Made and dropped while capturing.
                let mut fives = Tensor::<u8>::uninit(device, &[32])?;
                other.fill_bytes(&mut fives, 5)?;
                other.copy(&mut x, &fives)?;
                other.record_event(&joined)?;
                s.wait_event(&joined)
            })
            .unwrap()
        });
        assert!(!stream.is_capturing() && !other.is_capturing());
        // Would be overwritten if memory had been freed.
        let others: Vec<_> = (0..8).map(|_| Tensor::<u8>::zeros(device, &[32]).unwrap()).collect();
        graph.launch(stream).unwrap();
        assert_eq!(x.to_vec().unwrap(), [5; 32]);
        assert!(others.iter().all(|t| t.to_vec().unwrap() == [0; 32]));
        // Both are as before, and the events belong to no capture any more.
        other.record_event(&forked).unwrap();
        stream.wait_event(&forked).unwrap();
        stream.synchronize().unwrap();
        other.fill_bytes(&mut x, 7).unwrap();
        other.synchronize().unwrap();
        assert_eq!(x.to_vec().unwrap(), [7; 32]);
    });
}

/// Two devices of one kind: SIMT devices, and the first two GPUs, if there are so many.
fn pairs() -> Vec<[Device; 2]> {
    let names: Vec<_> = devices().into_iter().map(|(name, _)| name).collect();
    let mut pairs = vec![];
    if names.iter().any(|name| name.starts_with("simt")) {
        pairs.push([0; 2].map(|_| Device::simt()));
    }
    if names.contains(&"cuda") {
        if Device::cuda_count() > 1 {
            pairs.push([0, 1].map(|i| Device::cuda(i).unwrap()));
        } else {
            eprintln!("skipped on GPUs: it takes two of them");
        }
    }
    pairs
}

#[test]
fn a_device_whose_streams_join_a_capture_of_another_can_be_waited_for() {
    for [a, b] in pairs() {
        let [here, beside] = [0; 2].map(|_| Stream::new(&a).unwrap());
        let [there, too, free] = [0; 3].map(|_| Stream::new(&b).unwrap());
        let forked = Event::new(&a).unwrap();
        let joined = [&a, &b, &b].map(|device| Event::new(device).unwrap());
        let [mut w, mut x] = [0; 2].map(|_| Tensor::<u8>::zeros(&a, &[32]).unwrap());
        let [mut y, mut z, mut live] = [0; 3].map(|_| Tensor::<u8>::zeros(&b, &[32]).unwrap());
        // What is submitted before is waited for.
        there.fill_bytes(&mut y, 1).unwrap();
        let graph = Graph::capture(&here, |s| {
            s.fill_bytes(&mut w, 3)?;
            s.record_event(&forked)?;
            for stream in [&beside, &there, &too] {
                stream.wait_event(&forked)?;
                assert!(stream.is_capturing());
            }
            beside.fill_bytes(&mut x, 4)?;
            there.fill_bytes(&mut y, 5)?;
            too.fill_bytes(&mut z, 6)?;
            let waits = || -> Result<()> {
                b.synchronize()?;
                assert_eq!(y.to_vec()?, [1; 32]);
                free.fill_bytes(&mut live, 7)?;
                b.synchronize()?;
                assert_eq!(live.to_vec()?, [7; 32]);
                assert_eq!(Tensor::from_slice(&b, &[8u8; 4], &[4])?.to_vec()?, [8; 4]);
                a.synchronize()
            };
            std::thread::scope(|scope| scope.spawn(waits).join().unwrap())?;
            for (stream, event) in [&beside, &there, &too].into_iter().zip(&joined) {
                stream.record_event(event)?;
                s.wait_event(event)?;
            }
            b.synchronize()
        })
        .unwrap();
        assert!([&here, &beside, &there, &too].iter().all(|stream| !stream.is_capturing()));
        b.synchronize().unwrap();
        assert_eq!([&w, &x, &y, &z].map(|t| t.to_vec().unwrap()[31]), [0, 0, 1, 0]);
        for _ in 0..2 {
            graph.launch(&here).unwrap();
            here.synchronize().unwrap();
            assert_eq!([&w, &x, &y, &z].map(|t| t.to_vec().unwrap()), [3, 4, 5, 6].map(|v| vec![v; 32]));
            for t in [&mut w, &mut x, &mut y, &mut z] {
                t.copy_from_slice(&[0; 32]).unwrap();
            }
        }
    }
}

/// One thread waits for the second device again and again, while captures of the first are joined by its streams, and end, some in an error.
#[test]
fn captures_of_two_devices_beside_waits() {
    for [a, b] in pairs() {
        let here = Stream::new(&a).unwrap();
        let mut x = Tensor::<u8>::zeros(&b, &[32]).unwrap();
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| {
                while !over.load(Ordering::Acquire) {
                    b.synchronize().unwrap();
                    std::thread::yield_now();
                }
            });
            // Whatever happens, the other thread is to end.
            let rounds = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                for round in 1..=30u8 {
                    let (forked, joined) = (Event::new(&a).unwrap(), Event::new(&b).unwrap());
                    let there = Stream::new(&b).unwrap();
                    let graph = Graph::capture(&here, |s| {
                        s.record_event(&forked)?;
                        there.wait_event(&forked)?;
                        there.fill_bytes(&mut x, round)?;
                        there.record_event(&joined)?;
                        // Dropped while it takes part.
                        drop(there);
                        s.wait_event(&joined)?;
                        if round % 3 == 0 { s.synchronize() } else { Ok(()) }
                    });
                    match graph {
                        Ok(graph) => graph.launch(&here).unwrap(),
                        Err(error) => assert!(matches!(error, Error::Capture(_)), "{error}"),
                    }
                    here.synchronize().unwrap();
                    let last = if round % 3 == 0 { round - 1 } else { round };
                    assert_eq!(x.to_vec().unwrap(), [last; 32]);
                }
            }));
            over.store(true, Ordering::Release);
            waits.join().unwrap();
            rounds.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        });
    }
}

#[test]
fn no_capture_begins_in_the_midst_of_an_operation() {
    on_every_device(|device, stream| {
        let x = Tensor::<u8>::zeros(device, &[4]).unwrap();
        let other = Stream::new(device).unwrap();
        let event = Event::new(device).unwrap();
        let mut call = Call::new("operation", stream);
        // Nothing is captured yet, so that nothing keeps it but the caller.
        call.read("x", &x).unwrap();
        let e = Graph::capture(stream, |_| Ok(())).map(drop);
        assert!(matches!(e, Err(Error::Capture(_))), "{e:?}");
        let joins = Graph::capture(&other, |s| {
            s.record_event(&event)?;
            let e = stream.wait_event(&event);
            assert!(matches!(e, Err(Error::Capture(_))), "{e:?}");
            Ok(())
        });
        joins.unwrap();
        assert!(!stream.is_capturing());
        drop(call);
        Graph::capture(stream, |s| Call::new("operation", s).read("x", &x).map(drop)).unwrap();
    });
}

#[test]
fn a_graph_stays_on_its_device() {
    on_every_device(|device, stream| {
        let graph = Graph::capture(stream, |_| Ok(())).unwrap();
        let elsewhere = Stream::new(&Device::simt()).unwrap();
        assert_ne!(elsewhere.device(), device);
        for error in [graph.launch(&elsewhere).unwrap_err(), graph.upload(&elsewhere).unwrap_err()] {
            assert!(matches!(error, Error::WrongDevice { arg: "graph", .. }), "{error}");
        }
    });
}

/// A graph that threads launch at once, on one stream or on two, runs once at a time, and as a whole.
#[test]
fn launches_from_many_threads_run_one_after_the_other() {
    const TIMES: usize = 200;
    on_every_device(|device, stream| {
        let shape = CacheShape::new(1, 1 << 20, 1, 8);
        let table = Tensor::from_slice(device, &[0i32], &[1, 1]).unwrap();
        let (mut positions, mut slots) = (Tensor::zeros(device, &[1]).unwrap(), Tensor::zeros(device, &[1]).unwrap());
        let [mut lens, mut copy] = [1, 0].map(|n| Tensor::from_slice(device, &[n], &[1]).unwrap());
        device.preload(&["kv_cache_advance"]).unwrap();
        let graph = Graph::capture(stream, |s| {
            s.copy(&mut copy, &lens)?;
            advance(s, &mut copy, &mut positions, &mut slots, None, None, &table, shape)?;
            s.copy(&mut lens, &copy)
        });
        let graph = graph.unwrap();
        let other = Stream::new(device).unwrap();
        for streams in [[stream, stream], [stream, &other]] {
            let before = lens.to_vec().unwrap()[0];
            std::thread::scope(|scope| {
                for stream in streams {
                    scope.spawn(|| (0..TIMES).for_each(|_| graph.launch(stream).unwrap()));
                }
            });
            assert_eq!(lens.to_vec().unwrap()[0] - before, 2 * TIMES as i32);
        }
    });
}

/// Launches overlap (programmatic dependent launch), which nobody may see: each reads what the one before it wrote, and writes over
/// what that one read. On one stream, on two that take turns, and captured.
#[test]
fn overlapping_launches_keep_their_order() {
    on_every_device(|device, stream| {
        let (rows, n, rounds) = if device.is_simt() { (2, 64, 2) } else { (300, 2048, 50) };
        let both = Tensor::<f32>::zeros(device, &[rows, 2 * n]).unwrap();
        let [other, residual] = [0; 2].map(|_| Tensor::<f32>::zeros(device, &[rows, n]).unwrap());
        // Where launch `i` goes is what `turn` says, which may do something between two launches.
        let chain = |turn: &dyn Fn(usize) -> Result<Stream>| -> Result<()> {
            let (mut x, mut y, mut z) = (both.narrow(1, 0, n)?, both.narrow(1, n, n)?, other.clone());
            for i in (0..4 * rounds).step_by(4) {
                norm::rms_norm(&turn(i)?, &mut y, &residual, None, 1e-6)?;
                activation::silu_and_mul(&turn(i + 1)?, &mut z, &both)?;
                norm::fused_add_rms_norm(&turn(i + 2)?, &mut z, &mut residual.clone(), None, 1e-6)?;
                norm::rms_norm(&turn(i + 3)?, &mut x, &z, None, 1e-6)?;
            }
            Ok(())
        };
        let result = |run: &dyn Fn() -> Result<()>| {
            both.clone().copy_from_slice(&noise(rows * 2 * n, 1)).unwrap();
            residual.clone().copy_from_slice(&noise(rows * n, 2)).unwrap();
            run().unwrap();
            device.synchronize().unwrap();
            [both.to_vec().unwrap(), residual.to_vec().unwrap()]
        };
        let expected = result(&|| chain(&|_| stream.synchronize().map(|()| stream.clone())));
        assert!(expected.iter().flatten().all(|v| v.is_finite()));
        let same = |how: &str, run: &dyn Fn() -> Result<()>| assert!(result(run) == expected, "{how}");
        let one = || chain(&|_| Ok(stream.clone()));
        same("one stream", &one);
        let graph = Graph::capture(stream, |_| one()).unwrap();
        same("captured", &|| graph.launch(stream));

        let streams = [stream.clone(), Stream::new(device).unwrap()];
        let events: Vec<_> = (0..=4 * rounds).map(|_| Event::new(device).unwrap()).collect();
        let in_turn = || {
            chain(&|i| {
                let [before, now] = [i + 1, i].map(|i| &streams[i % 2]);
                before.record_event(&events[i])?;
                now.wait_event(&events[i])?;
                Ok(now.clone())
            })?;
            streams[1].record_event(&events[4 * rounds])?;
            streams[0].wait_event(&events[4 * rounds])
        };
        same("two streams", &in_turn);
        // The first event is then of a stream that is not captured yet.
        let graph = Graph::capture(stream, |s| {
            s.record_event(&events[0])?;
            streams[1].wait_event(&events[0])?;
            in_turn()
        });
        let graph = graph.unwrap();
        same("two streams, captured", &|| graph.launch(stream));
    });
}
