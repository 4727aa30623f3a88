//! What outlives what, and what is of which group.

use super::ranks::{on_every_setup, run};
use std::time::Duration;
use warploom::ep::{Blocks, Communicator, Config, DispatchOptions, ExpertMap, Routing, eplb::Placement};
use warploom::{Device, Error, Event, Graph, SimtOptions, Stream, Tensor, bf16};

/// Of another group, which may lie where its own one was, a routing is refused: it has places for fewer tokens.
#[test]
fn a_routing_of_a_group_that_is_gone() {
    let devices = Device::simt_peers(2, SimtOptions::default());
    let config = |tokens| Config::new(64, 1, 4, tokens).time_out(Duration::from_secs(2));
    for _ in 0..20 {
        let few = Communicator::new(&devices, &config(2)).unwrap();
        let routings: Vec<Routing> = few.iter().map(|rank| rank.routing().unwrap()).collect();
        drop(few);
        let many = Communicator::new(&devices, &config(256)).unwrap();
        for (mut rank, mut routing) in many.into_iter().zip(routings) {
            let d = rank.device().clone();
            let stream = Stream::new(&d).unwrap();
            let x = Tensor::<bf16>::zeros(&d, &[256, 64]).unwrap();
            let ids = Tensor::from_slice(&d, &[2; 256], &[256, 1]).unwrap();
            let e = rank.dispatch(&stream, &mut routing, &x, &ids, None, &DispatchOptions::default());
            assert!(matches!(e, Err(Error::Value { arg: "routing", .. })), "{:?}", e.map(drop));
        }
    }
}

/// A check in a capture is an error, and leaves nothing in the graph, which may outlive the group.
#[test]
fn a_check_in_a_capture() {
    on_every_setup(&[1], |devices| {
        let stream = Stream::new(&devices[0]).unwrap();
        let rank = Communicator::new(devices, &Config::new(64, 1, 4, 2)).unwrap().pop().unwrap();
        let captured = Graph::capture(&stream, |s| {
            let e = rank.check(s);
            assert!(matches!(e, Err(Error::Capture(_))), "{e:?}");
            Ok(())
        });
        drop(rank);
        // What is now where the group's memory was.
        let canaries: Vec<Vec<u32>> = (0..64).map(|_| vec![0xdead_beef; 4]).collect();
        if let Ok(graph) = captured {
            graph.launch(&stream).unwrap();
            stream.synchronize().unwrap();
        }
        assert!(canaries.iter().flatten().all(|&word| word == 0xdead_beef), "memory of others was overwritten");
    });
}

/// One rank has nobody to send to, however many blocks would.
#[test]
fn one_rank_with_blocks_of_its_own() {
    on_every_setup(&[1], |devices| {
        run(devices, &Config::new(64, 1, 4, 2), |rank, stream, _| {
            let d = rank.device().clone();
            let x = Tensor::from_slice(&d, &[bf16::ONE; 128], &[2, 64]).unwrap();
            let ids = Tensor::from_slice(&d, &[0, 3], &[2, 1]).unwrap();
            let mut routing = rank.routing().unwrap();
            let options = DispatchOptions::default().blocks(Blocks::count(2)).own_blocks(1);
            let received = rank.dispatch(stream, &mut routing, &x, &ids, None, &options).unwrap();
            rank.check(stream).unwrap();
            let rows = received.rows.bf16().unwrap().narrow(0, 0, 2).unwrap();
            assert_eq!(rows.to_vec().unwrap(), [bf16::ONE; 128]);
        });
    });
}

/// Errors say whose device is another one, and name arguments that there are.
#[test]
fn what_errors_say() {
    let device = Device::simt();
    let (stream, other) = (Stream::new(&device).unwrap(), Stream::new(&Device::simt()).unwrap());
    let rank = Communicator::new(std::slice::from_ref(&device), &Config::new(64, 1, 4, 2)).unwrap().pop().unwrap();
    let e = rank.check(&other).unwrap_err();
    assert!(matches!(&e, Error::WrongDevice { arg: "stream", .. }) && !e.to_string().contains("like"), "{e}");
    let exchange = |own: &[u8]| Ok(vec![own.to_vec(); 9]);
    let e = Communicator::connect(&device, 0, 9, &Config::new(64, 1, 9, 2), exchange).unwrap_err();
    assert!(matches!(&e, Error::Value { arg: "ranks", .. }), "{e}");
    let e = Communicator::new(&[], &Config::new(64, 1, 9, 2)).unwrap_err();
    assert!(matches!(&e, Error::Value { arg: "devices", .. }), "{e}");
    // Events.
    let (a, b, c) = (Event::new(&device).unwrap(), Event::new(&device).unwrap(), Event::new(other.device()).unwrap());
    stream.record_event(&a).unwrap();
    other.record_event(&c).unwrap();
    assert!(matches!(b.seconds_since(&a), Err(Error::Value { .. })));
    assert!(matches!(c.seconds_since(&a), Err(Error::WrongDevice { arg: "earlier", .. })));
}

/// Turns are numbered with 32 bits.
#[test]
fn turns_wrap() {
    let device = Device::simt();
    let stream = Stream::new(&device).unwrap();
    let map = ExpertMap::new(&device, &Placement::new(vec![0, 0, 0], 1, 3, 1).unwrap(), 0).unwrap();
    let ids = Tensor::from_slice(&device, &[0; 4], &[4, 1]).unwrap();
    let mut out = Tensor::<i32>::zeros(&device, &[4, 1]).unwrap();
    map.apply(&stream, &mut out, &ids, u32::MAX).unwrap();
    assert_eq!(out.to_vec().unwrap(), (0..4u32).map(|t| (t.wrapping_add(u32::MAX) % 3) as i32).collect::<Vec<_>>());
}
