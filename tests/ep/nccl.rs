//! Ranks over NCCL against ranks that use each other's memory. Skipped where there are not two GPUs, and NCCL.

use super::dispatch::rounds_as;
use super::ranks::{Dice, run_as};
use std::time::Duration;
use warploom::ep::{Arrangement, Blocks, CombineOptions, Communicator, Config, DispatchOptions, Fault, Phase, nccl};
use warploom::{Device, Error, Graph, Tensor, bf16};
use warploom_tests::{noise, noise_of};

/// A GPU for each of 2, 4 and 8 ranks, as far as there are.
fn setups() -> Vec<Vec<Device>> {
    if let Err(e) = nccl::version() {
        eprintln!("NCCL tests are skipped: {e}");
        return vec![];
    }
    // NCCL sets multicast up otherwise, which can put GPUs that others share out of service.
    if std::env::var("NCCL_NVLS_ENABLE").as_deref() != Ok("0") {
        eprintln!("NCCL tests are skipped: NCCL_NVLS_ENABLE is not 0");
        return vec![];
    }
    let counts = [2, 4, 8].into_iter().filter(|&n| n <= Device::cuda_count());
    counts.map(|n| (0..n).map(|r| Device::cuda(r).unwrap()).collect()).collect()
}

#[test]
fn rounds_match_the_reference() {
    for devices in setups() {
        for (config, seed) in [(Config::new(256, 3, devices.len() * 3, 40), 31), (Config::new(1024, 8, 64, 100), 32)] {
            rounds_as(Communicator::with_nccl(&devices, &config).unwrap(), config, seed, 4);
        }
    }
}

/// Everything that a rank gets, as bits.
fn bits(ranks: Vec<Communicator>, slots: bool, quantise: bool) -> Vec<Vec<Vec<u32>>> {
    let config = *ranks[0].config();
    run_as(ranks, |rank, stream, meeting| {
        let (d, r, n) = (rank.device().clone(), rank.rank(), config.max_tokens - rank.rank());
        let ids = Dice(r as u64 + 5).experts(n, config.top_k, config.experts);
        let ids = Tensor::from_slice(&d, &ids, &[n, config.top_k]).unwrap();
        let x = Tensor::from_slice(&d, &noise_of::<bf16>(n * config.hidden, r as u64), &[n, config.hidden]).unwrap();
        let w = Tensor::from_slice(&d, &noise(n * config.top_k, 9), &[n, config.top_k]).unwrap();
        let mut routing = rank.routing().unwrap();
        let mut out = Tensor::zeros(&d, &[n, config.hidden]).unwrap();
        let arrangement = if slots { Arrangement::Slots } else { Arrangement::Compact };
        let mut all = vec![];
        for cached in [false, !slots] {
            let options = DispatchOptions::default().arrangement(arrangement).quantise(quantise).cached(cached);
            let received = rank.dispatch(stream, &mut routing, &x, &ids, Some(&w), &options).unwrap();
            rank.check(stream).unwrap();
            meeting.wait();
            let ids = received.topk_ids.to_vec().unwrap();
            // Rows that nobody sent hold anything.
            let sent: Vec<bool> = ids.chunks(config.top_k).map(|row| row.iter().any(|&id| id >= 0)).collect();
            let kept = |values: Vec<u32>| {
                let width = values.len() / sent.len();
                values.chunks(width).zip(&sent).filter(|(_, s)| **s).flat_map(|(v, _)| v.to_vec()).collect::<Vec<_>>()
            };
            all.push(ids.iter().map(|&i| i as u32).collect());
            all.push(kept(received.topk_weights.to_vec().unwrap().into_iter().map(f32::to_bits).collect()));
            if let Some(rows) = received.rows.bf16() {
                all.push(kept(rows.to_vec().unwrap().into_iter().map(|v| v.to_bits().into()).collect()));
            }
            if let Some((rows, scales)) = received.rows.e4m3() {
                all.push(kept(rows.to_vec().unwrap().into_iter().map(|v| v.0.into()).collect()));
                all.push(kept(scales.to_vec().unwrap().into_iter().map(f32::to_bits).collect()));
            }
            let results = noise_of::<bf16>(rank.capacity() * config.hidden, 50 + r as u64);
            let results = Tensor::from_slice(&d, &results, &[rank.capacity(), config.hidden]).unwrap();
            meeting.wait();
            rank.combine(stream, &mut out, &routing, Some(&results), &CombineOptions::default()).unwrap();
            rank.check(stream).unwrap();
            meeting.wait();
            all.push(out.to_vec().unwrap().into_iter().map(|v| v.to_bits().into()).collect());
        }
        let pieces: Vec<i32> = (0..rank.ranks() as i32 * 64).map(|i| i + 1000 * r as i32).collect();
        let pieces = Tensor::from_slice(&d, &pieces, &[rank.ranks(), 64]).unwrap();
        let got = rank.all_to_all(stream, &pieces, Blocks::default()).unwrap();
        rank.barrier(stream).unwrap();
        rank.check(stream).unwrap();
        all.push(got.to_vec().unwrap().into_iter().map(|v| v as u32).collect());
        meeting.wait();
        all
    })
}

#[test]
fn the_same_bit_for_bit() {
    for devices in setups() {
        let config = Config::new(7168, 8, 256, 130);
        for (slots, quantise) in [(false, false), (false, true), (true, false), (true, true)] {
            let near = bits(Communicator::new(&devices, &config).unwrap(), slots, quantise);
            let far = bits(Communicator::with_nccl(&devices, &config).unwrap(), slots, quantise);
            assert!(near == far, "slots {slots}, quantise {quantise}");
        }
    }
}

#[test]
fn nobody_waits_for_ever() {
    for devices in setups() {
        let config = Config::new(64, 1, 16, 8).time_out(Duration::from_millis(300));
        run_as(Communicator::with_nccl(&devices, &config).unwrap(), |rank, stream, meeting| {
            if rank.rank() == 0 {
                let e = rank.barrier(stream).unwrap_err();
                assert!(matches!(e, Error::Ep(Fault::TimeOut { rank: 0, phase: Phase::Entry, .. })), "{e:?}");
            }
            meeting.wait();
            rank.barrier(stream).unwrap();
            let x = Tensor::<f32>::zeros(rank.device(), &[rank.ranks(), 4]).unwrap();
            let e = match rank.rank() {
                0 => rank.barrier(stream).unwrap_err(),
                _ => rank.all_to_all(stream, &x, Blocks::default()).unwrap_err(),
            };
            assert!(matches!(e, Error::Ep(Fault::Disagree { .. })), "{e:?}");
            meeting.wait();
            let captured = Graph::capture(stream, |s| rank.all_to_all(s, &x, Blocks::default()).map(drop));
            assert!(matches!(captured, Err(Error::Unsupported { .. })));
        });
    }
}
