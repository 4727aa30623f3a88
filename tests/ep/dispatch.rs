use super::ranks::{Dice, Meeting, on_every_setup, run, run_as};
use std::time::Duration;
use warploom::ep::{Arrangement, Blocks, CombineOptions, Communicator, Config, DispatchOptions, Received};
use warploom::{Device, Error, Graph, Stream, Tensor, bf16, reference};
use warploom_tests::{assert_close, initchecking, noise, noise_of, widen};

/// What one round sends, for all ranks.
#[derive(Clone)]
struct Round {
    ids: Vec<Vec<i32>>,
    x: Vec<Vec<bf16>>,
    weights: Vec<Vec<f32>>,
}

impl Round {
    fn new(dice: &mut Dice, ranks: usize, config: &Config) -> Self {
        let counts: Vec<usize> =
            (0..ranks).map(|_| if dice.below(4) == 0 { 0 } else { dice.below(config.max_tokens + 1) }).collect();
        let seed = dice.below(1000) as u64;
        Self {
            ids: counts.iter().map(|&n| dice.experts(n, config.top_k, config.experts)).collect(),
            x: (0u64..).zip(&counts).map(|(r, &n)| noise_of(n * config.hidden, seed + r)).collect(),
            weights: (9u64..).zip(&counts).map(|(r, &n)| noise(n * config.top_k, seed + r)).collect(),
        }
    }

    fn tokens(&self, rank: usize, config: &Config) -> usize {
        self.ids[rank].len() / config.top_k
    }
}

/// A rank's inputs on its device.
struct Inputs {
    x: Tensor<bf16>,
    ids: Tensor<i32>,
    weights: Tensor<f32>,
}

impl Inputs {
    fn new(rank: &Communicator, round: &Round) -> Self {
        let (r, d, c) = (rank.rank(), rank.device(), rank.config());
        let n = round.tokens(r, c);
        Self {
            x: Tensor::from_slice(d, &round.x[r], &[n, c.hidden]).unwrap(),
            ids: Tensor::from_slice(d, &round.ids[r], &[n, c.top_k]).unwrap(),
            weights: Tensor::from_slice(d, &round.weights[r], &[n, c.top_k]).unwrap(),
        }
    }
}

/// Compares what a rank received with the reference.
fn check_received(rank: &Communicator, received: &Received, round: &Round, slots: bool, weighted: bool) {
    let c = *rank.config();
    let (ranks, k, hidden) = (rank.ranks(), c.top_k, c.hidden);
    let slots = slots.then_some(c.max_tokens);
    let (rows, _) = reference::ep::dispatch(&round.ids, k, rank.local_experts(), slots);
    let rows = &rows[rank.rank()];
    let mut ids = vec![-1; rank.capacity() * k];
    for row in rows {
        ids[row.row * k..][..k].copy_from_slice(&row.ids);
    }
    assert_eq!(received.topk_ids.to_vec().unwrap(), ids);
    let begins = |s: usize| match slots {
        Some(slots) => (s * slots) as i32,
        None => rows.iter().filter(|row| row.source < s).count() as i32,
    };
    assert_eq!(received.offsets.to_vec().unwrap(), (0..=ranks).map(begins).collect::<Vec<_>>());
    let got_weights = received.topk_weights.to_vec().unwrap();
    for row in rows {
        for j in 0..k {
            let weight = if weighted { round.weights[row.source][row.token * k + j] } else { 1.0 };
            let want = if row.ids[j] >= 0 { weight } else { 0.0 };
            assert_eq!(got_weights[row.row * k + j], want, "weight {j} of row {}", row.row);
        }
    }
    if let Some(got) = received.rows.bf16() {
        let got = got.to_vec().unwrap();
        for row in rows {
            let want = &round.x[row.source][row.token * hidden..][..hidden];
            assert!(got[row.row * hidden..][..hidden] == *want, "row {} is not token {}", row.row, row.token);
        }
    } else {
        let (got, scales) = received.rows.e4m3().unwrap();
        let (got, scales) = (widen(&got.to_vec().unwrap()), scales.to_vec().unwrap());
        for row in rows {
            let want = widen(&round.x[row.source][row.token * hidden..][..hidden]);
            for (g, want) in want.chunks(128).enumerate() {
                let scale = scales[row.row * (hidden / 128) + g];
                let amax = want.iter().fold(0.0f64, |m, v| m.max(v.abs()));
                assert_eq!(scale, (amax as f32).max(1e-10) * (1.0 / 448.0), "scale {g} of row {}", row.row);
                for (i, &want) in want.iter().enumerate() {
                    let got = got[row.row * hidden + g * 128 + i] * scale as f64;
                    let bound = want.abs() * 0.0626 + scale as f64 * 0.001;
                    assert!((got - want).abs() <= bound, "value {i} of group {g}: {got}, expected {want}");
                }
            }
        }
    }
}

/// Results that every rank makes up: its own number is in them.
fn made_up(rank: usize, rows: usize, hidden: usize) -> Vec<bf16> {
    noise_of(rows * hidden, 77 + rank as u64)
}

#[derive(Clone, Copy, Debug)]
struct Way {
    slots: bool,
    quantise: bool,
    weighted: bool,
    biases: usize,
    direct: bool,
    blocks: Blocks,
    own_blocks: Option<u32>,
}

/// One dispatch and one combine of made-up results.
fn go(rank: &mut Communicator, stream: &Stream, meeting: &Meeting, round: &Round, way: Way) {
    let inputs = Inputs::new(rank, round);
    let (r, c, d) = (rank.rank(), *rank.config(), rank.device().clone());
    let n = round.tokens(r, &c);
    let arrangement = if way.slots { Arrangement::Slots } else { Arrangement::Compact };
    let mut routing = rank.routing().unwrap();
    let results = made_up(r, rank.capacity(), c.hidden);
    let results = Tensor::from_slice(&d, &results, &[rank.capacity(), c.hidden]).unwrap();
    let factors = noise(n * rank.ranks(), 5);
    let dfactors = Tensor::from_slice(&d, &factors, &[n, rank.ranks()]).unwrap();
    let biases: Vec<Vec<bf16>> = (0..way.biases as u64).map(|b| noise_of(n * c.hidden, 100 + b)).collect();
    let dbiases: Vec<_> = biases.iter().map(|b| Tensor::from_slice(&d, b, &[n, c.hidden]).unwrap()).collect();
    let mut out = Tensor::<bf16>::uninit(&d, &[n, c.hidden]).unwrap();
    stream.fill_bytes(&mut out, 0xff).unwrap();
    stream.synchronize().unwrap();
    meeting.wait();
    let mut options = DispatchOptions::default().arrangement(arrangement).quantise(way.quantise).blocks(way.blocks);
    options.own_blocks = way.own_blocks;
    let weights = way.weighted.then_some(&inputs.weights);
    let received = rank.dispatch(stream, &mut routing, &inputs.x, &inputs.ids, weights, &options).unwrap();
    rank.check(stream).unwrap();
    meeting.wait();
    check_received(rank, &received, round, way.slots, way.weighted);
    let slots = way.slots.then_some(c.max_tokens);
    let (_, places) = reference::ep::dispatch(&round.ids, c.top_k, rank.local_experts(), slots);
    assert_eq!(routing.places().to_vec().unwrap()[..n * rank.ranks()], places[r]);
    meeting.wait();

    let mut options = CombineOptions::default().blocks(way.blocks);
    options.biases = [dbiases.first(), dbiases.get(1)];
    if way.weighted {
        options = options.weights(&dfactors);
    }
    if way.direct {
        stream.copy(&mut rank.results(), &results).unwrap();
    }
    let results = (!way.direct).then_some(&results);
    rank.combine(stream, &mut out, &routing, results, &options).unwrap();
    rank.check(stream).unwrap();
    meeting.wait();
    let all: Vec<Vec<f64>> = (0..rank.ranks()).map(|q| widen(&made_up(q, rank.capacity(), c.hidden))).collect();
    let factors: Vec<f64> = factors.iter().map(|&w| w as f64).collect();
    let biases: Vec<Vec<f64>> = biases.iter().map(|b| widen(b)).collect();
    let biases: Vec<&[f64]> = biases.iter().map(|b| &b[..]).collect();
    let want = reference::ep::combine(&all, &places[r], way.weighted.then_some(&factors), &biases, c.hidden);
    let terms = (rank.ranks() + way.biases) as f64;
    assert_close(&out.to_vec().unwrap(), &want, terms * 2f64.powi(-24), terms);
    meeting.wait();
}

/// Many rounds in one communicator, of all kinds in turn.
fn rounds(devices: &[Device], config: Config, seed: u64, count: usize) {
    rounds_as(Communicator::new(devices, &config).expect("ranks"), config, seed, count);
}

/// The same with these ranks.
pub fn rounds_as(ranks: Vec<Communicator>, config: Config, seed: u64, count: usize) {
    let mut dice = Dice(seed * 2 + 1);
    let count_of_ranks = ranks.len();
    let all: Vec<(Round, Way)> = (0..count)
        .map(|i| {
            let quantise = config.hidden.is_multiple_of(128) && i % 2 == 1;
            let blocks = 1 + dice.below(5) as u32;
            let way = Way {
                slots: dice.below(2) == 0,
                quantise,
                weighted: dice.below(2) == 0,
                biases: dice.below(3),
                direct: dice.below(2) == 0,
                blocks: Blocks::count(blocks).threads(32 * (1 + dice.below(3) as u32)),
                own_blocks: if dice.below(3) > 0 { Some(dice.below(blocks as usize) as u32) } else { None },
            };
            (Round::new(&mut dice, count_of_ranks, &config), way)
        })
        .collect();
    run_as(ranks, |rank, stream, meeting| {
        for (round, way) in &all {
            go(rank, stream, meeting, round, *way);
        }
    });
}

#[test]
fn rounds_match_the_reference() {
    on_every_setup(&[2, 3, 4, 8], |devices| {
        let experts = devices.len() * 3;
        rounds(devices, Config::new(128, 3, experts, 9), 1, 4);
        rounds(devices, Config::new(264, 2, experts, 5), 2, 2);
    });
}

#[test]
fn one_rank_alone() {
    on_every_setup(&[1], |devices| rounds(devices, Config::new(256, 4, 6, 20), 3, 4));
}

#[test]
fn long_rows_and_many_experts() {
    on_every_setup(&[2], |devices| {
        rounds(devices, Config::new(7168, 8, 256, 6), 4, 4);
        rounds(devices, Config::new(8, 32, 64, 70), 5, 2);
        rounds(devices, Config::new(1032, 1, 2, 40), 6, 2);
        // More pieces than scales are stored of at once, of even and odd numbers of scales.
        rounds(devices, Config::new(9216, 3, 8, 5), 7, 8);
        rounds(devices, Config::new(8832, 2, 8, 40), 8, 4);
    });
}

/// The same tokens again, without counting them, with weights, which were not there before.
#[test]
fn cached() {
    on_every_setup(&[3], |devices| {
        let config = Config::new(64, 2, 6, 70);
        let round = Round::new(&mut Dice(11), 3, &config);
        run(devices, &config, |rank, stream, meeting| {
            let inputs = Inputs::new(rank, &round);
            let mut routing = rank.routing().unwrap();
            let mut options = DispatchOptions::default();
            meeting.wait();
            rank.dispatch(stream, &mut routing, &inputs.x, &inputs.ids, None, &options).unwrap();
            rank.check(stream).unwrap();
            meeting.wait();
            let twice: Vec<bf16> = round.x[rank.rank()].iter().map(|v| bf16::from_f32(v.to_f32() * 2.0)).collect();
            let x = Tensor::from_slice(rank.device(), &twice, inputs.x.shape()).unwrap();
            meeting.wait();
            options = options.cached(true);
            let received =
                rank.dispatch(stream, &mut routing, &x, &inputs.ids, Some(&inputs.weights), &options).unwrap();
            rank.check(stream).unwrap();
            meeting.wait();
            let mut doubled = round.clone();
            doubled.x.iter_mut().flatten().for_each(|v| *v = bf16::from_f32(v.to_f32() * 2.0));
            check_received(rank, &received, &doubled, false, true);
            meeting.wait();
        });
    });
}

/// Captured once, replayed with other tokens, and other numbers of them.
#[test]
fn captured() {
    on_every_setup(&[2, 4], |devices| {
        let config = Config::new(128, 2, 8, 10);
        let ranks = devices.len();
        let mut dice = Dice(5);
        // The graph is made for the most tokens; the kernels read how many there are.
        let full: Vec<(Round, Vec<u32>)> = (0..4)
            .map(|i| {
                let ids = (0..ranks).map(|_| dice.experts(config.max_tokens, 2, 8)).collect();
                let x = (0..ranks as u64).map(|r| noise_of(config.max_tokens * 128, 10 * i + r)).collect();
                let counts = (0..ranks).map(|_| dice.below(config.max_tokens + 1) as u32).collect();
                (Round { ids, x, weights: vec![vec![]; ranks] }, counts)
            })
            .collect();
        for arrangement in [Arrangement::Slots, Arrangement::Compact] {
            run(devices, &config, |rank, stream, meeting| {
                let (r, d, n) = (rank.rank(), rank.device().clone(), config.max_tokens);
                let mut x = Tensor::<bf16>::zeros(&d, &[n, 128]).unwrap();
                let mut ids = Tensor::<i32>::zeros(&d, &[n, 2]).unwrap();
                let mut count = Tensor::<u32>::zeros(&d, &[1]).unwrap();
                let mut routing = rank.routing().unwrap();
                let mut out = Tensor::<bf16>::zeros(&d, &[n, 128]).unwrap();
                let options = DispatchOptions::default().arrangement(arrangement).count(&count);
                let mut received = None;
                let graph = Graph::capture(stream, |s| {
                    let got = rank.dispatch(s, &mut routing, &x, &ids, None, &options)?;
                    let rows = got.rows.bf16().unwrap().clone();
                    received = Some(got);
                    let options = CombineOptions::default();
                    rank.combine(s, &mut out, &routing, Some(&rows), &options)
                })
                .unwrap();
                let received = received.unwrap();
                for (round, counts) in &full {
                    x.copy_from_slice(&round.x[r]).unwrap();
                    ids.copy_from_slice(&round.ids[r]).unwrap();
                    count.copy_from_slice(&[counts[r]]).unwrap();
                    meeting.wait();
                    graph.launch(stream).unwrap();
                    rank.check(stream).unwrap();
                    meeting.wait();
                    let mut some = round.clone();
                    for (ids, &n) in some.ids.iter_mut().zip(counts) {
                        ids.truncate(n as usize * 2);
                    }
                    check_received(rank, &received, &some, arrangement == Arrangement::Slots, false);
                    let sent = reference::ep::layout(&some.ids[r], 2, rank.local_experts(), ranks);
                    let got = out.to_vec().unwrap();
                    for t in 0..n {
                        // As often as it went somewhere, it comes back.
                        let times = sent.in_rank.chunks(ranks).nth(t).map_or(0, |m| m.iter().sum::<u8>());
                        for i in 0..128 {
                            let want = bf16::from_f32(some.x[r][t * 128 + i].to_f32() * times as f32);
                            assert_eq!(got[t * 128 + i].to_f32(), want.to_f32(), "token {t}, {times} ranks");
                        }
                    }
                    meeting.wait();
                }
            });
        }
    });
}

/// Ranks come late, each in its own way; nothing else may change.
#[test]
fn delays_change_nothing() {
    on_every_setup(&[3], |devices| {
        let config = Config::new(64, 2, 6, 8);
        let mut dice = Dice(23);
        let all: Vec<Round> = (0..6).map(|_| Round::new(&mut dice, 3, &config)).collect();
        for slots in [false, true] {
            let arrangement = if slots { Arrangement::Slots } else { Arrangement::Compact };
            run(devices, &config, |rank, stream, meeting| {
                let inputs: Vec<Inputs> = all.iter().map(|round| Inputs::new(rank, round)).collect();
                let mut routing = rank.routing().unwrap();
                let shape = [rank.capacity(), config.hidden];
                let copy = || Tensor::<bf16>::uninit(rank.device(), &shape).unwrap();
                let mut kept: Vec<_> = inputs.iter().map(|_| copy()).collect();
                meeting.wait();
                let mut dice = Dice(rank.rank() as u64 + 1);
                let options = DispatchOptions::default().arrangement(arrangement);
                for (inputs, copy) in inputs.iter().zip(&mut kept) {
                    std::thread::sleep(Duration::from_millis(dice.below(20) as u64));
                    let received = rank.dispatch(stream, &mut routing, &inputs.x, &inputs.ids, None, &options).unwrap();
                    // Copied by the stream: by the time of the next dispatch, peers may write again.
                    stream.copy(copy, received.rows.bf16().unwrap()).unwrap();
                }
                rank.check(stream).unwrap();
                meeting.wait();
                for (round, kept) in all.iter().zip(&kept) {
                    let slots = slots.then_some(config.max_tokens);
                    let (rows, _) = reference::ep::dispatch(&round.ids, 2, rank.local_experts(), slots);
                    let got = kept.to_vec().unwrap();
                    for row in &rows[rank.rank()] {
                        assert_eq!(got[row.row * 64..][..64], round.x[row.source][row.token * 64..][..64]);
                    }
                }
                meeting.wait();
            });
        }
    });
}

/// Many rounds there and back in a stream, with nothing but the kernels to keep ranks in step, which come late, each in its own way.
/// Arrangements change.
#[test]
fn back_to_back() {
    on_every_setup(&[2, 3], |devices| {
        if initchecking() && devices.iter().enumerate().any(|(i, device)| devices[..i].contains(device)) {
            println!(
                "ranks on one GPU left out under initcheck, where the late one's launch waits for the other's kernel"
            );
            return;
        }
        let config = Config::new(264, 2, 6, 9);
        let mut dice = Dice(31);
        let all: Vec<(Round, bool)> = (0..8)
            .map(|_| {
                let slots = dice.below(2) == 0;
                (Round::new(&mut dice, devices.len(), &config), slots)
            })
            .collect();
        run(devices, &config, |rank, stream, meeting| {
            let (r, d, ranks) = (rank.rank(), rank.device().clone(), rank.ranks());
            let inputs: Vec<Inputs> = all.iter().map(|(round, ..)| Inputs::new(rank, round)).collect();
            let mut routing = rank.routing().unwrap();
            let mut outs: Vec<Tensor<bf16>> = inputs.iter().map(|i| Tensor::zeros(&d, i.x.shape()).unwrap()).collect();
            meeting.wait();
            let mut dice = Dice(r as u64 + 7);
            for (((_, slots), inputs), out) in all.iter().zip(&inputs).zip(&mut outs) {
                std::thread::sleep(Duration::from_millis(dice.below(12) as u64));
                let arrangement = if *slots { Arrangement::Slots } else { Arrangement::Compact };
                let options = DispatchOptions::default().arrangement(arrangement);
                let received = rank.dispatch(stream, &mut routing, &inputs.x, &inputs.ids, None, &options).unwrap();
                std::thread::sleep(Duration::from_millis(dice.below(12) as u64));
                let options = CombineOptions::default().blocks(Blocks::count(3).threads(64));
                rank.combine(stream, out, &routing, received.rows.bf16(), &options).unwrap();
            }
            rank.check(stream).unwrap();
            meeting.wait();
            for (i, ((round, ..), out)) in all.iter().zip(&outs).enumerate() {
                let sent = reference::ep::layout(&round.ids[r], config.top_k, rank.local_experts(), ranks);
                let got = out.to_vec().unwrap();
                for (t, there) in sent.in_rank.chunks(ranks).enumerate() {
                    let times = there.iter().sum::<u8>() as f32;
                    for (x, got) in round.x[r][t * 264..][..264].iter().zip(&got[t * 264..]) {
                        assert_eq!(got.to_f32(), bf16::from_f32(x.to_f32() * times).to_f32(), "round {i}, token {t}");
                    }
                }
            }
            meeting.wait();
        });
    });
}

/// What suits must be the same on all ranks, however many tokens each has: with few in all, combine takes more blocks.
#[test]
fn many_tokens_on_one_rank_only() {
    on_every_setup(&[2], |devices| {
        let config = Config::new(8192, 1, 2, 600);
        run(devices, &config, |rank, stream, meeting| {
            let (d, r) = (rank.device().clone(), rank.rank());
            let tokens = if r == 0 { 600 } else { 3 };
            let x = Tensor::<bf16>::zeros(&d, &[tokens, 8192]).unwrap();
            let ids = Tensor::<i32>::zeros(&d, &[tokens, 1]).unwrap();
            let mut out = Tensor::<bf16>::zeros(&d, &[tokens, 8192]).unwrap();
            // So that there is little to do.
            let count = Tensor::from_slice(&d, &[2u32], &[1]).unwrap();
            let mut routing = rank.routing().unwrap();
            for arrangement in [Arrangement::Compact, Arrangement::Slots] {
                meeting.wait();
                let options = DispatchOptions::default().arrangement(arrangement).count(&count);
                rank.dispatch(stream, &mut routing, &x, &ids, None, &options).unwrap();
                rank.combine(stream, &mut out, &routing, None, &CombineOptions::default().count(&count)).unwrap();
                rank.check(stream).unwrap();
            }
            meeting.wait();
        });
    });
}

/// One routing for both arrangements in turn.
#[test]
fn a_routing_is_used_again() {
    on_every_setup(&[2], |devices| {
        let config = Config::new(128, 2, 4, 6);
        let mut dice = Dice(3);
        let all: Vec<Round> = (0..3).map(|_| Round::new(&mut dice, 2, &config)).collect();
        run(devices, &config, |rank, stream, meeting| {
            let mut routing = rank.routing().unwrap();
            for (i, round) in all.iter().enumerate() {
                let inputs = Inputs::new(rank, round);
                let slots = i == 1;
                let arrangement = if slots { Arrangement::Slots } else { Arrangement::Compact };
                let options = DispatchOptions::default().arrangement(arrangement);
                let again = DispatchOptions::default().cached(true);
                meeting.wait();
                if i != 1 {
                    // Nothing that is compact came before.
                    let e = rank.dispatch(stream, &mut routing, &inputs.x, &inputs.ids, None, &again);
                    assert!(matches!(e, Err(Error::Value { arg: "cached", .. })), "{e:?}");
                }
                let received = rank.dispatch(stream, &mut routing, &inputs.x, &inputs.ids, None, &options).unwrap();
                rank.check(stream).unwrap();
                meeting.wait();
                check_received(rank, &received, round, slots, false);
                // What peers write to is no argument.
                let rows = received.rows.bf16().unwrap();
                let (x, ids) = (rows.narrow(0, 0, 1).unwrap(), received.topk_ids.narrow(0, 0, 1).unwrap());
                let e = rank.dispatch(stream, &mut routing, &x, &ids, None, &options);
                assert!(matches!(e, Err(Error::Overlap { .. })), "{e:?}");
                let mut out = rows.narrow(0, 0, inputs.x.dim(0)).unwrap();
                if !out.is_empty() {
                    let e = rank.combine(stream, &mut out, &routing, None, &CombineOptions::default());
                    assert!(matches!(e, Err(Error::Overlap { .. })), "{e:?}");
                }
                let pieces = rows.narrow(0, 0, 2).unwrap();
                let e = rank.all_to_all(stream, &pieces, Blocks::default());
                assert!(matches!(e, Err(Error::Overlap { .. })), "{e:?}");
                meeting.wait();
            }
        });
    });
}

#[test]
fn bad_input() {
    on_every_setup(&[2], |devices| {
        let config = Config::new(64, 2, 4, 8).capacity(12);
        run(devices, &config, |rank, stream, meeting| {
            let d = rank.device().clone();
            let mut routing = rank.routing().unwrap();
            let x = |shape: &[usize]| Tensor::<bf16>::zeros(&d, shape).unwrap();
            let ids = |shape: &[usize]| Tensor::<i32>::zeros(&d, shape).unwrap();
            let none = DispatchOptions::default();
            let e = rank.dispatch(stream, &mut routing, &x(&[3, 65]), &ids(&[3, 2]), None, &none);
            assert!(matches!(e, Err(Error::Shape { arg: "x", .. })), "{e:?}");
            let e = rank.dispatch(stream, &mut routing, &x(&[9, 64]), &ids(&[9, 2]), None, &none);
            assert!(matches!(e, Err(Error::Value { arg: "x", .. })), "{e:?}");
            let e = rank.dispatch(stream, &mut routing, &x(&[3, 64]), &ids(&[3, 3]), None, &none);
            assert!(matches!(e, Err(Error::Shape { arg: "topk_ids", .. })), "{e:?}");
            let slots = none.arrangement(Arrangement::Slots);
            let e = rank.dispatch(stream, &mut routing, &x(&[3, 64]), &ids(&[3, 2]), None, &slots);
            assert!(matches!(e, Err(Error::Value { arg: "config.capacity", .. })), "{e:?}");
            let quantise = none.quantise(true);
            let e = rank.dispatch(stream, &mut routing, &x(&[3, 64]), &ids(&[3, 2]), None, &quantise);
            assert!(matches!(e, Err(Error::Value { arg: "config.hidden", .. })), "{e:?}");
            let odd = x(&[3, 68]).narrow(1, 4, 64).unwrap();
            let e = rank.dispatch(stream, &mut routing, &odd, &ids(&[3, 2]), None, &none);
            assert!(matches!(e, Err(Error::Value { arg: "x", .. })), "{e:?}");
            let odd = x(&[3, 72]).narrow(1, 4, 64).unwrap();
            let e = rank.dispatch(stream, &mut routing, &odd, &ids(&[3, 2]), None, &none);
            assert!(matches!(e, Err(Error::Alignment { arg: "x", .. })), "{e:?}");
            let many = none.blocks(Blocks::count(300));
            let e = rank.dispatch(stream, &mut routing, &x(&[3, 64]), &ids(&[3, 2]), None, &many);
            assert!(matches!(e, Err(Error::Value { arg: "blocks.count", .. })), "{e:?}");
            let many = none.blocks(Blocks::count(1).threads(48));
            let e = rank.dispatch(stream, &mut routing, &x(&[3, 64]), &ids(&[3, 2]), None, &many);
            assert!(matches!(e, Err(Error::Value { arg: "blocks.threads", .. })), "{e:?}");
            let many = none.own_blocks(2).blocks(Blocks::count(2));
            let e = rank.dispatch(stream, &mut routing, &x(&[3, 64]), &ids(&[3, 2]), None, &many);
            assert!(matches!(e, Err(Error::Value { arg: "own_blocks", .. })), "{e:?}");
            let results = rank.results();
            let overlapping = results.narrow(0, 0, 3).unwrap();
            let three = ids(&[3, 2]);
            meeting.wait();
            let e = rank.dispatch(stream, &mut routing, &overlapping, &three, None, &none);
            // Results are not where rows arrive, so that this is fine.
            assert!(e.is_ok(), "{e:?}");
            rank.check(stream).unwrap();
            meeting.wait();
            let e = rank.combine(stream, &mut x(&[2, 64]), &routing, None, &CombineOptions::default());
            assert!(matches!(e, Err(Error::Shape { arg: "out", .. })), "{e:?}");
            let some = results.narrow(0, 1, 3).unwrap();
            let e = rank.combine(stream, &mut x(&[3, 64]), &routing, Some(&some), &CombineOptions::default());
            assert!(matches!(e, Err(Error::Overlap { .. })), "{e:?}");
            let e = rank.combine(stream, &mut overlapping.clone(), &routing, None, &CombineOptions::default());
            assert!(matches!(e, Err(Error::Overlap { .. })), "{e:?}");
            // Places are rows that kernels read: only dispatch writes them.
            let mut places = routing.places().clone();
            let e = stream.fill_bytes(&mut places, 0x7f);
            assert!(matches!(e, Err(Error::ReadOnly { .. })), "{e:?}");
            let e = places.copy_from_slice(&vec![i32::MAX; places.len()]);
            assert!(matches!(e, Err(Error::ReadOnly { .. })), "{e:?}");
            rank.check(stream).unwrap();
        });
        let e = Communicator::new(devices, &Config::new(60, 2, 4, 8));
        assert!(matches!(e, Err(Error::Value { arg: "config.hidden", .. })), "{e:?}");
        let e = Communicator::new(devices, &Config::new(64, 33, 4, 8));
        assert!(matches!(e, Err(Error::Value { arg: "config.top_k", .. })), "{e:?}");
        let e = Communicator::new(devices, &Config::new(64, 2, 5, 8));
        assert!(matches!(e, Err(Error::Value { arg: "config.experts", .. })), "{e:?}");
        let e = Communicator::new(devices, &Config::new(64, 2, 4, 70000));
        assert!(matches!(e, Err(Error::Value { arg: "config.max_tokens", .. })), "{e:?}");
        let e = Communicator::new(devices, &Config::new(64, 2, 32770, 8));
        assert!(matches!(e, Err(Error::Value { arg: "config.experts", .. })), "{e:?}");
        let e = Communicator::new(&[], &Config::new(64, 2, 4, 8));
        assert!(matches!(e, Err(Error::Value { arg: "devices", .. })), "{e:?}");
        let twice = vec![Device::simt(); 2];
        let e = Communicator::new(&twice, &Config::new(64, 2, 4, 8));
        assert!(matches!(e, Err(Error::Unsupported { .. })), "{e:?}");
    });
}
