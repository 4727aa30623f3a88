//! Dispatch and combine between the GPUs of this machine, 2, 4 and 8 of them as far as there are; between two simulated ranks
//! where there is no GPU.
//!
//! A time is that of one operation in a graph of many, each rank's launched by a thread of its own at about the same time: the
//! slowest rank's, the median over the replays. GB/s are what a GPU sends to its peers (dispatch) or gets from them (combine).
//! Routing is that of a DeepSeek-V3 gate with random scores: eight of 256 experts in four of eight groups. What every rank has
//! received, and what comes back, is compared with the host's reference before anything is timed.

use std::sync::{Barrier, Mutex};
use warploom::ep::{Arrangement, Blocks, CombineOptions, Communicator, Config, DispatchOptions};
use warploom::{Device, Event, Float, Graph, SimtOptions, Stream, Tensor, bf16, reference};
use warploom_benches::{Cost, Harness, noise};

const TOP_K: usize = 8;
const EXPERTS: usize = 256;
const REPLAYS: usize = 25;

#[derive(Clone, Copy, PartialEq)]
enum What {
    Dispatch,
    Combine,
    /// One after the other, as in a layer without experts.
    Both,
}

#[derive(Clone, Copy)]
struct Case {
    what: What,
    tokens: usize,
    hidden: usize,
    slots: bool,
    quantise: bool,
    blocks: Blocks,
    launches: usize,
    sets: usize,
}

/// Experts of random tokens: the best eight of four groups, which are those with the best expert.
fn experts(tokens: usize, seed: u64) -> Vec<i32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state >> 20
    };
    let mut ids = vec![];
    for _ in 0..tokens {
        let scores: Vec<u64> = (0..EXPERTS).map(|_| next()).collect();
        let mut groups: Vec<usize> = (0..8).collect();
        groups.sort_by_key(|g| std::cmp::Reverse(scores[g * 32..][..32].iter().max().copied()));
        let mut chosen: Vec<usize> = groups[..4].iter().flat_map(|g| g * 32..g * 32 + 32).collect();
        chosen.sort_by_key(|&e| std::cmp::Reverse(scores[e]));
        ids.extend(chosen[..TOP_K].iter().map(|&e| e as i32));
    }
    ids
}

/// What one rank does: microseconds of one operation, for each replay.
fn rank(
    rank: &mut Communicator,
    case: Case,
    barrier: &Barrier,
    sent: &Mutex<Vec<Vec<bf16>>>,
    ids: &[Vec<i32>],
) -> warploom::Result<Vec<f64>> {
    let (d, r, ranks) = (rank.device().clone(), rank.rank(), rank.ranks());
    let stream = Stream::new(&d)?;
    let shape = [case.tokens, case.hidden];
    let x: Vec<Tensor<bf16>> =
        (0..case.sets).map(|s| noise(&d, &stream, &shape, s * ranks + r)).collect::<Result<_, _>>()?;
    let experts = Tensor::from_slice(&d, &ids[r], &[case.tokens, TOP_K])?;
    let weights = Tensor::from_slice(&d, &vec![1.0f32; case.tokens * TOP_K], &[case.tokens, TOP_K])?;
    let mut out = Tensor::<bf16>::zeros(&d, &shape)?;
    let mut routing = rank.routing()?;
    let arrangement = if case.slots { Arrangement::Slots } else { Arrangement::Compact };
    let options = DispatchOptions::default().arrangement(arrangement).quantise(case.quantise);
    let options = if case.what == What::Dispatch { options.blocks(case.blocks) } else { options };
    let back = CombineOptions::default();
    let back = if case.what == What::Combine { back.blocks(case.blocks) } else { back };
    let (start, end) = (Event::new(&d)?, Event::new(&d)?);
    sent.lock().expect("no panic")[r] = x[0].to_vec()?;
    barrier.wait();

    // Once, to be compared with the reference.
    let received = rank.dispatch(&stream, &mut routing, &x[0], &experts, Some(&weights), &options)?;
    rank.check(&stream)?;
    barrier.wait();
    let slots = case.slots.then_some(case.tokens);
    let (rows, places) = reference::ep::dispatch(ids, TOP_K, rank.local_experts(), slots);
    let wrong = |what: &str| warploom::Error::Unsupported { op: "bench", what: format!("rank {r}: wrong {what}") };
    let all = sent.lock().expect("no panic").clone();
    let token = |row: &reference::ep::Arrived| &all[row.source][row.token * case.hidden..][..case.hidden];
    let got_ids = received.topk_ids.to_vec()?;
    if rows[r].iter().any(|row| got_ids[row.row * TOP_K..][..TOP_K] != row.ids) {
        return Err(wrong("experts"));
    }
    if let Some(got) = received.rows.bf16() {
        let values = got.to_vec()?;
        if rows[r].iter().any(|row| values[row.row * case.hidden..][..case.hidden] != *token(row)) {
            return Err(wrong("rows"));
        }
        stream.copy(&mut rank.results(), got)?;
    } else if let Some((got, scales)) = received.rows.e4m3() {
        let (values, scales) = (got.to_vec()?, scales.to_vec()?);
        let far = |row: &reference::ep::Arrived| {
            token(row).iter().enumerate().any(|(i, want)| {
                let scale = scales[row.row * (case.hidden / 128) + i / 128];
                let got = values[row.row * case.hidden + i].to_f32() * scale;
                (got - want.to_f32()).abs() > want.to_f32().abs() * 0.0626 + scale * 0.001
            })
        };
        // Some of them: this is a debug build as often as not.
        if rows[r].iter().step_by(7).any(far) {
            return Err(wrong("e4m3 rows"));
        }
    }
    barrier.wait();
    rank.combine(&stream, &mut out, &routing, None, &back)?;
    rank.check(&stream)?;
    barrier.wait();
    if !case.quantise {
        let got = out.to_vec()?;
        for (t, places) in places[r].chunks(ranks).enumerate() {
            let times = places.iter().filter(|p| **p >= 0).count() as f32;
            let rows = t * case.hidden..(t + 1) * case.hidden;
            if all[r][rows.clone()].iter().zip(&got[rows]).any(|(x, g)| bf16::from_f32(x.to_f32() * times) != *g) {
                return Err(wrong("sums"));
            }
        }
    }
    barrier.wait();

    let graph = Graph::capture(&stream, |s| {
        for i in 0..case.launches {
            if case.what != What::Combine {
                rank.dispatch(s, &mut routing, &x[i % case.sets], &experts, Some(&weights), &options)?;
            }
            if case.what != What::Dispatch {
                rank.combine(s, &mut out, &routing, None, &back)?;
            }
        }
        Ok(())
    })?;
    graph.upload(&stream)?;
    stream.synchronize()?;
    let mut times = vec![];
    for _ in 0..if d.is_simt() { 2 } else { REPLAYS } {
        barrier.wait();
        stream.record_event(&start)?;
        graph.launch(&stream)?;
        stream.record_event(&end)?;
        rank.check(&stream)?;
        times.push(end.seconds_since(&start)? * 1e6 / case.launches as f64);
    }
    barrier.wait();
    Ok(times)
}

fn measure(devices: &[Device], case: Case, ids: &[Vec<i32>]) -> Result<Vec<f64>, String> {
    let config = Config::new(case.hidden, TOP_K, EXPERTS, case.tokens);
    let ranks = Communicator::new(devices, &config).map_err(|e| e.to_string())?;
    let barrier = Barrier::new(ranks.len());
    let sent = Mutex::new(vec![vec![]; ranks.len()]);
    let times: Vec<_> = std::thread::scope(|s| {
        let (barrier, sent) = (&barrier, &sent);
        let threads: Vec<_> = ranks
            .into_iter()
            .map(|mut r| {
                s.spawn(move || {
                    let outcome = rank(&mut r, case, barrier, sent, ids);
                    if let Err(e) = &outcome {
                        // The others wait for this one, and nothing else would end that.
                        eprintln!("{e}");
                        std::process::exit(1);
                    }
                    outcome
                })
            })
            .collect();
        threads.into_iter().map(|t| t.join().expect("a rank that did not panic")).collect()
    });
    let times = times.into_iter().collect::<warploom::Result<Vec<_>>>().map_err(|e| e.to_string())?;
    Ok((0..times[0].len()).map(|i| times.iter().map(|t| t[i]).fold(0.0, f64::max)).collect())
}

/// Bytes that the busiest rank sends.
fn sent(ids: &[Vec<i32>], row: usize) -> usize {
    let ranks = ids.len();
    let rows = |(r, ids): (usize, &Vec<i32>)| {
        let layout = reference::ep::layout(ids, TOP_K, EXPERTS / ranks, ranks);
        layout.per_rank.iter().enumerate().filter(|(d, _)| *d != r).map(|(_, n)| *n as usize).sum::<usize>()
    };
    ids.iter().enumerate().map(rows).max().unwrap_or_default() * row
}

pub fn benches(harness: &mut Harness) {
    let simt = harness.device().is_simt();
    let setups: Vec<Vec<Device>> = if simt {
        vec![Device::simt_peers(2, SimtOptions::default())]
    } else {
        let gpus = |n: usize| (0..n).map(Device::cuda).collect::<Result<Vec<_>, _>>().unwrap_or_default();
        [2, 4, 8].into_iter().filter(|&n| n <= Device::cuda_count()).map(gpus).collect()
    };
    // Other numbers of blocks than the defaults, for tuning: `count:threads,...`.
    let tuning = std::env::var("WARPLOOM_BENCH_EP_BLOCKS").unwrap_or_default();
    let tuning: Vec<(u32, u32)> = tuning
        .split(',')
        .filter_map(|b| b.split_once(':').and_then(|(c, t)| Some((c.parse().ok()?, t.parse().ok()?))))
        .collect();
    for devices in &setups {
        let n = devices.len();
        for (tokens, slots) in if simt { [(16, false), (4, true)] } else { [(4096, false), (128, true)] } {
            let hidden = harness.pick(7168, 256);
            let ids: Vec<Vec<i32>> = (0..n).map(|r| experts(tokens, r as u64 + 1)).collect();
            let (launches, sets) = harness.pick(if slots { (200, 20) } else { (20, 4) }, (2, 2));
            for (name, what, quantise) in [
                ("dispatch/bf16", What::Dispatch, false),
                ("dispatch/e4m3", What::Dispatch, true),
                ("combine/bf16", What::Combine, false),
                ("both/bf16", What::Both, false),
                ("both/e4m3", What::Both, true),
            ] {
                let row = if quantise { hidden + hidden / 128 * 4 } else { hidden * 2 };
                let bytes = match what {
                    What::Both => sent(&ids, row) + sent(&ids, hidden * 2),
                    _ => sent(&ids, row),
                };
                let form = if slots { "slots" } else { "compact" };
                let base = format!("ep/{name}/{form}/{n}x{tokens}x{hidden}");
                let case = Case { what, tokens, hidden, slots, quantise, blocks: Blocks::default(), launches, sets };
                harness.measured(&base, Cost::link(bytes), launches, |_| measure(devices, case, &ids));
                if what != What::Both {
                    for &(count, threads) in &tuning {
                        let most = match (what, slots) {
                            (What::Combine, _) => 512,
                            (_, true) => 512,
                            _ if quantise => 768,
                            _ => 1024,
                        };
                        let case = Case { blocks: Blocks::count(count).threads(threads.min(most)), ..case };
                        let name = format!("{base}/b{count}t{threads}");
                        harness.measured(&name, Cost::link(bytes), launches, |_| measure(devices, case, &ids));
                    }
                }
            }
        }
    }
}
