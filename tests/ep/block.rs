//! A whole block of experts over several ranks: dispatch, the ranks' experts, combine, with replicated experts too.

use super::ranks::{Dice, on_every_setup, run};
use warploom::ep::eplb::{Cluster, Loads, rebalance_experts};
use warploom::ep::{Arrangement, CombineOptions, Config, DispatchOptions, ExpertMap};
use warploom::moe::{FusedOptions, FusedShape, fused};
use warploom::{DType, Tensor, bf16};
use warploom_tests::{noise, noise_of};

const HIDDEN: usize = 64;
const INTER: usize = 32;
const TOP_K: usize = 2;

/// What all experts on one device give, and what they give spread over ranks, differ by a rounding for each rank.
#[test]
fn spread_experts_give_the_same() {
    on_every_setup(&[2, 4], |devices| {
        let ranks = devices.len();
        let logical = 6;
        // Two spare slots: the busiest experts have replicas, on other ranks.
        let loads = Loads::from_rows(&[[9, 1, 80, 3, 40, 5]]).unwrap();
        let cluster = Cluster::new(8, ranks);
        let placement = rebalance_experts(&loads, &cluster).unwrap();
        let w13 = noise_of::<bf16>(logical * 2 * INTER * HIDDEN, 1);
        let w2 = noise_of::<bf16>(logical * HIDDEN * INTER, 2);
        let tokens = 7;
        for arrangement in [Arrangement::Compact, Arrangement::Slots] {
            run(devices, &Config::new(HIDDEN, TOP_K, 8, tokens), |rank, stream, meeting| {
                let (d, r) = (rank.device().clone(), rank.rank());
                let local = rank.local_experts();
                let slice = |all: &[bf16], n: usize| -> Vec<bf16> {
                    let held = &placement.phy2log(0)[r * local..][..local];
                    held.iter().flat_map(|&e| all[e * n..][..n].to_vec()).collect()
                };
                let shape13 = |n| [n, 2 * INTER, HIDDEN];
                let shape2 = |n| [n, HIDDEN, INTER];
                let mine13 = Tensor::from_slice(&d, &slice(&w13, 2 * INTER * HIDDEN), &shape13(local)).unwrap();
                let mine2 = Tensor::from_slice(&d, &slice(&w2, HIDDEN * INTER), &shape2(local)).unwrap();
                let all13 = Tensor::from_slice(&d, &w13, &shape13(logical)).unwrap();
                let all2 = Tensor::from_slice(&d, &w2, &shape2(logical)).unwrap();
                let x = Tensor::from_slice(&d, &noise_of::<bf16>(tokens * HIDDEN, 9 + r as u64), &[tokens, HIDDEN])
                    .unwrap();
                let ids = Dice(r as u64 + 3).experts(tokens, TOP_K, logical);
                let ids = Tensor::from_slice(&d, &ids, &[tokens, TOP_K]).unwrap();
                let weights = Tensor::from_slice(&d, &noise(tokens * TOP_K, 4), &[tokens, TOP_K]).unwrap();
                let workspace = |n, experts| {
                    let bytes = FusedShape::new(n, TOP_K, experts, HIDDEN, INTER).workspace_bytes(DType::Bf16);
                    Tensor::<u8>::zeros(&d, &[bytes]).unwrap()
                };
                let options = FusedOptions::default();
                let mut want = Tensor::<bf16>::zeros(&d, &[tokens, HIDDEN]).unwrap();
                let mut space = workspace(tokens, logical);
                fused(stream, &mut want, &x, &all13, &all2, &ids, &weights, &options, &mut space).unwrap();

                let map = ExpertMap::new(&d, &placement, 0).unwrap();
                let mut slots = Tensor::<i32>::zeros(&d, &[tokens, TOP_K]).unwrap();
                map.apply(stream, &mut slots, &ids, r as u32).unwrap();
                let mut routing = rank.routing().unwrap();
                let mut out = Tensor::<bf16>::zeros(&d, &[tokens, HIDDEN]).unwrap();
                let mut space = workspace(rank.capacity(), local);
                stream.synchronize().unwrap();
                meeting.wait();
                let way = DispatchOptions::default().arrangement(arrangement);
                // Twice, so that the second must wait until the experts have read what the first brought.
                for _ in 0..2 {
                    let got = rank.dispatch(stream, &mut routing, &x, &slots, Some(&weights), &way).unwrap();
                    let (rows, mut results) = (got.rows.bf16().unwrap(), rank.results());
                    fused(
                        stream,
                        &mut results,
                        rows,
                        &mine13,
                        &mine2,
                        &got.topk_ids,
                        &got.topk_weights,
                        &options,
                        &mut space,
                    )
                    .unwrap();
                }
                rank.combine(stream, &mut out, &routing, None, &CombineOptions::default()).unwrap();
                rank.check(stream).unwrap();
                meeting.wait();
                let (got, want) = (out.to_vec().unwrap(), want.to_vec().unwrap());
                let largest = want.iter().fold(0.0f32, |m, v| m.max(v.to_f32().abs()));
                assert!(largest > 0.5, "something came out");
                for (i, (g, w)) in got.iter().zip(&want).enumerate() {
                    let off = (g.to_f32() - w.to_f32()).abs();
                    assert!(off <= largest * 2f32.powi(-6), "element {i}: {g}, expected {w}");
                }
                meeting.wait();
            });
        }
    });
}
