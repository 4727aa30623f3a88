//! Ranks in processes of their own: this test binary, started again as each rank, which talk over sockets of this machine.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Barrier, Mutex};
use std::time::Duration;
use warploom::ep::{Arrangement, CombineOptions, Communicator, Config, DispatchOptions, Exchange, Fault, Phase};
use warploom::{Device, Error, SimtOptions, Stream, Tensor, bf16};

type Failure = Box<dyn std::error::Error + Send + Sync>;

/// What a child is to be: `rank ranks port scenario`.
const CHILD: &str = "WARPLOOM_TEST_EP_CHILD";
const PATIENCE: Duration = Duration::from_secs(20);
const TOKENS: usize = 6;

fn send(mut to: &TcpStream, message: &[u8]) -> std::io::Result<()> {
    to.write_all(&[&(message.len() as u32).to_le_bytes(), message].concat())
}

fn receive(mut from: &TcpStream) -> std::io::Result<Vec<u8>> {
    let mut len = [0; 4];
    from.read_exact(&mut len)?;
    let mut message = vec![0; u32::from_le_bytes(len) as usize];
    from.read_exact(&mut message)?;
    Ok(message)
}

/// A child's way to the others: the parent gathers and hands out.
#[derive(Clone)]
struct Socket {
    stream: Arc<Mutex<TcpStream>>,
    ranks: usize,
}

impl Exchange for Socket {
    fn all_gather(&self, own: &[u8]) -> Result<Vec<Vec<u8>>, Failure> {
        let stream = self.stream.lock().map_err(|e| e.to_string())?;
        send(&stream, own)?;
        Ok((0..self.ranks).map(|_| receive(&stream)).collect::<Result<_, _>>()?)
    }
}

/// Starts a process for each rank, and carries messages until all have ended. Whether each did well.
fn run(ranks: usize, scenario: &str) -> Vec<bool> {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let start = |rank: usize| -> Child {
        Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "ep::processes::child", "--nocapture"])
            .env(CHILD, format!("{rank} {ranks} {port} {scenario}"))
            .stdout(Stdio::null())
            .spawn()
            .unwrap()
    };
    let mut children: Vec<Child> = (0..ranks).map(start).collect();
    listener.set_nonblocking(true).unwrap();
    let mut streams: Vec<Option<TcpStream>> = (0..ranks).map(|_| None).collect();
    let until = std::time::Instant::now() + PATIENCE;
    while streams.iter().any(Option::is_none) && std::time::Instant::now() < until {
        let Ok((stream, _)) = listener.accept() else {
            std::thread::sleep(Duration::from_millis(2));
            continue;
        };
        stream.set_nonblocking(false).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let rank = receive(&stream).unwrap()[0] as usize;
        streams[rank] = Some(stream);
    }
    let streams: Vec<TcpStream> = streams.into_iter().map(|s| s.expect("every child calls")).collect();
    // Until a child has no more to say.
    while let Ok(messages) = streams.iter().map(receive).collect::<Result<Vec<_>, _>>() {
        for stream in &streams {
            for message in &messages {
                // A child that is gone needs none.
                let _ = send(stream, message);
            }
        }
    }
    drop(streams);
    children.iter_mut().map(|c| c.wait().unwrap().success()).collect()
}

fn fault(result: warploom::Result<impl std::fmt::Debug>) -> Fault {
    match result {
        Err(Error::Ep(fault)) => fault,
        other => panic!("{other:?}"),
    }
}

/// Each token goes to one rank, and so comes back as it was.
fn there_and_back(rank: &mut Communicator, stream: &Stream) {
    let (d, experts) = (rank.device().clone(), rank.config().experts);
    let values: Vec<bf16> = (0..TOKENS * 64).map(|i| bf16::from_f32((i % 99 + rank.rank()) as f32)).collect();
    let x = Tensor::from_slice(&d, &values, &[TOKENS, 64]).unwrap();
    let ids: Vec<i32> = (0..TOKENS).map(|t| ((t * 5 + rank.rank()) % experts) as i32).collect();
    let ids = Tensor::from_slice(&d, &ids, &[TOKENS, 1]).unwrap();
    let mut routing = rank.routing().unwrap();
    for arrangement in [Arrangement::Compact, Arrangement::Slots, Arrangement::Compact] {
        let mut out = Tensor::<bf16>::zeros(&d, &[TOKENS, 64]).unwrap();
        let options = DispatchOptions::default().arrangement(arrangement);
        let received = rank.dispatch(stream, &mut routing, &x, &ids, None, &options).unwrap();
        let rows = received.rows.bf16().unwrap();
        rank.combine(stream, &mut out, &routing, Some(rows), &CombineOptions::default()).unwrap();
        rank.check(stream).unwrap();
        assert_eq!(out.to_vec().unwrap(), values);
    }
}

/// One rank, if this process was started as one.
#[test]
fn child() {
    let Ok(role) = std::env::var(CHILD) else { return };
    let role: Vec<&str> = role.split(' ').collect();
    let [rank, ranks, port] = [0, 1, 2].map(|i| role[i].parse::<usize>().unwrap());
    let stream = TcpStream::connect(("127.0.0.1", port as u16)).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    send(&stream, &[rank as u8]).unwrap();
    let socket = Socket { stream: Arc::new(Mutex::new(stream)), ranks };
    let device = Device::cuda(rank % Device::cuda_count()).unwrap();
    let config = Config::new(64, 1, 12, TOKENS).time_out(Duration::from_secs(4));
    let connect = |config: &Config| Communicator::connect(&device, rank, ranks, config, socket.clone());
    match role[3] {
        "work" => {
            let mut it = connect(&config).unwrap();
            let stream = Stream::new(&device).unwrap();
            there_and_back(&mut it, &stream);
            // A rank that does not come, and all of them after that.
            if rank == 0 {
                it.barrier(&stream).unwrap();
                let seen = fault(it.check(&stream));
                assert!(matches!(seen, Fault::TimeOut { rank: 0, phase: Phase::Exit, .. }), "{seen:?}");
            }
            it.recover().unwrap();
            there_and_back(&mut it, &stream);
        }
        "sizes" => {
            let odd = rank == 1;
            let wider = Config::new(72, 1, 12, TOKENS);
            let seen = fault(connect(if odd { &wider } else { &config }));
            let peer = if odd { 0 } else { 1 };
            assert_eq!(seen, Fault::Disagree { rank, peer, phase: Phase::Setup });
            // Better next time.
            let mut it = connect(&config).unwrap();
            there_and_back(&mut it, &Stream::new(&device).unwrap());
        }
        "failure" => {
            // One cannot take part; it knows why, and the others that it was that one.
            let bad = Config::new(63, 1, 12, TOKENS);
            match connect(if rank == 1 { &bad } else { &config }) {
                Err(Error::Value { arg: "config.hidden", .. }) if rank == 1 => {}
                Err(Error::Ep(Fault::PeerFailed { peer: 1, .. } | Fault::Disagree { peer: 1, .. })) if rank != 1 => {}
                other => panic!("{other:?}"),
            }
        }
        "gone" => {
            if rank != 1 {
                let e = connect(&config).unwrap_err();
                assert!(matches!(e, Error::Exchange { .. }), "{e:?}");
            }
        }
        other => panic!("{other}"),
    }
}

#[test]
fn ranks_of_several_processes() {
    let alone = std::env::var("WARPLOOM_TEST_RANKS").is_ok_and(|v| v == "1");
    let which = std::env::var("WARPLOOM_TEST_DEVICES").unwrap_or_default();
    if which == "simt" || !alone || warploom_tests::gpu().is_none() {
        eprintln!("skipped: ranks of several processes need a GPU, and WARPLOOM_TEST_RANKS=1");
        return;
    }
    // Two, on one GPU if there are no more, and a process for each of four GPUs.
    for ranks in [2, 4].into_iter().filter(|&n| n == 2 || n <= Device::cuda_count()) {
        for scenario in ["work", "sizes", "failure", "gone"] {
            let start = std::time::Instant::now();
            assert_eq!(run(ranks, scenario), vec![true; ranks], "{scenario}");
            eprintln!("{scenario}, {ranks} processes: {:.1} s", start.elapsed().as_secs_f64());
        }
    }
}

/// Memory of simulated ranks is of their process, which every rank is told, not just the first.
#[test]
fn not_for_simulated_ranks() {
    let devices = Device::simt_peers(2, SimtOptions::default());
    let (barrier, messages) = (Barrier::new(2), Mutex::new(vec![vec![]; 2]));
    let shared = Arc::new((barrier, messages));
    std::thread::scope(|s| {
        for (rank, device) in devices.iter().enumerate() {
            let shared = shared.clone();
            s.spawn(move || {
                let exchange = move |own: &[u8]| -> Result<Vec<Vec<u8>>, Failure> {
                    let (barrier, messages) = &*shared;
                    messages.lock().unwrap()[rank] = own.to_vec();
                    barrier.wait();
                    Ok(messages.lock().unwrap().clone())
                };
                let e = Communicator::connect(device, rank, 2, &Config::new(64, 1, 4, 8), exchange).unwrap_err();
                assert!(matches!(&e, Error::Unsupported { what, .. } if what.contains("simt_peers")), "{e:?}");
            });
        }
    });
    let alone = |_: &[u8]| -> Result<Vec<Vec<u8>>, Failure> { Ok(vec![]) };
    let e = Communicator::connect(&devices[0], 3, 2, &Config::new(64, 1, 4, 8), alone).unwrap_err();
    assert!(matches!(e, Error::Value { arg: "rank", .. }), "{e:?}");
    let e = Communicator::connect(&devices[0], 0, 2, &Config::new(64, 1, 3, 8), alone).unwrap_err();
    assert!(matches!(e, Error::Value { arg: "config.experts", .. }), "{e:?}");
}
