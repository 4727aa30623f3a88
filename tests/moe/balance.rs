use proptest::prelude::*;
use warploom::moe::{histogram, update_bias};
use warploom::{Device, Error, Graph, Stream, Tensor, reference};
use warploom_tests::{noise, on_every_device, property};

/// Ids from -1 to one too many.
fn ids(n: usize, experts: usize, seed: u64) -> Vec<i32> {
    noise(n, seed).iter().map(|x| ((x + 1.0) / 2.0 * (experts + 2) as f32) as i32 - 1).collect()
}

#[test]
fn counts_match_the_reference() {
    let shape = (0usize..9000, 1usize..300, 0u64..99);
    property(8, shape, |d, s, (n, experts, seed)| {
        let ids = ids(n, experts, seed);
        let want = reference::moe::balance::histogram(&ids, experts);
        // Counters go on from large numbers.
        let start = 5_000_000_000i64;
        let mut counts = Tensor::from_slice(d, &vec![start; experts], &[experts]).unwrap();
        let ids = Tensor::from_slice(d, &ids, &[n]).unwrap();
        for round in 1..=2 {
            histogram(s, &mut counts, &ids).unwrap();
            let want: Vec<i64> = want.iter().map(|w| start + round * w).collect();
            prop_assert_eq!(counts.to_vec().unwrap(), want);
        }
        Ok(())
    });
}

#[test]
fn extreme_ids_and_many_experts() {
    on_every_device(|d, s| {
        let ids = Tensor::from_slice(d, &[i32::MIN, -1, 0, 8191, 8191, 8192, i32::MAX], &[7]).unwrap();
        let mut counts = Tensor::zeros(d, &[8192]).unwrap();
        histogram(s, &mut counts, &ids).unwrap();
        let counts = counts.to_vec().unwrap();
        assert_eq!((counts[0], counts[8191], counts.iter().sum::<i64>()), (1, 2, 3));
        histogram(s, &mut Tensor::zeros(d, &[0]).unwrap(), &ids).unwrap();
    });
}

#[test]
fn biases_match_the_reference() {
    let shape = (1usize..1500, 0u64..99, 1i64..5, any::<bool>());
    property(8, shape, |d, s, (experts, seed, most, wide)| {
        let loads: Vec<i64> = noise(experts, seed).iter().map(|x| ((x + 1.0) / 2.0 * most as f32) as i64).collect();
        let start = noise(experts, seed + 1);
        let mut bias = Tensor::from_slice(d, &start, &[experts]).unwrap();
        if wide {
            // Totals beyond 32 bits.
            let loads: Vec<i64> = loads.iter().map(|l| l << 40).collect();
            update_bias(s, &mut bias, &Tensor::from_slice(d, &loads, &[experts]).unwrap(), 0.001).unwrap();
        } else {
            let loads: Vec<i32> = loads.iter().map(|&l| l as i32).collect();
            update_bias(s, &mut bias, &Tensor::from_slice(d, &loads, &[experts]).unwrap(), 0.001).unwrap();
        }
        prop_assert_eq!(bias.to_vec().unwrap(), reference::moe::balance::update_bias(&start, &loads, 0.001));
        Ok(())
    });
}

/// A router whose biases follow its loads comes to balance, as the paper has it.
#[test]
fn leads_to_balance() {
    on_every_device(|d, s| {
        let (tokens, experts) = (64, 8);
        let logits: Vec<f32> =
            noise(tokens * experts, 3).iter().enumerate().map(|(i, x)| x + (i % experts) as f32 * 0.2).collect();
        let mut bias = Tensor::<f32>::zeros(d, &[experts]).unwrap();
        let worst = |bias: &[f32]| {
            let best = |row: &[f32]| (0..experts).max_by(|&a, &b| (row[a] + bias[a]).total_cmp(&(row[b] + bias[b])));
            let ids: Vec<i32> = logits.chunks(experts).map(|row| best(row).unwrap() as i32).collect();
            let counts = reference::moe::balance::histogram(&ids, experts);
            (*counts.iter().max().unwrap(), ids)
        };
        let (before, _) = worst(&[0.0; 8]);
        for _ in 0..100 {
            let (_, ids) = worst(&bias.to_vec().unwrap());
            let mut counts = Tensor::zeros(d, &[experts]).unwrap();
            histogram(s, &mut counts, &Tensor::from_slice(d, &ids, &[tokens]).unwrap()).unwrap();
            update_bias(s, &mut bias, &counts, 0.02).unwrap();
        }
        let (after, _) = worst(&bias.to_vec().unwrap());
        assert!(before >= 20 && after <= 12, "{before} tokens of one expert, then {after}; 8 is balance");
    });
}

/// Both in one graph, as after a step of training: counts and biases go on from what they were.
#[test]
fn captured_and_replayed() {
    on_every_device(|d, s| {
        let (n, experts) = (3000, 33);
        let mut input = Tensor::from_slice(d, &ids(n, experts, 1), &[n]).unwrap();
        let mut counts = Tensor::<i64>::zeros(d, &[experts]).unwrap();
        let mut bias = Tensor::<f32>::zeros(d, &[experts]).unwrap();
        d.preload(&["moe"]).unwrap();
        let graph = Graph::capture(s, |s| {
            histogram(s, &mut counts, &input)?;
            update_bias(s, &mut bias, &counts, 0.01)
        })
        .unwrap();
        let (mut want, mut biases) = (vec![0; experts], vec![0.0; experts]);
        for seed in 5..9 {
            let ids = ids(n, experts, seed);
            input.copy_from_slice(&ids).unwrap();
            graph.launch(s).unwrap();
            let more = reference::moe::balance::histogram(&ids, experts);
            want.iter_mut().zip(more).for_each(|(sum, n)| *sum += n);
            biases = reference::moe::balance::update_bias(&biases, &want, 0.01);
            assert_eq!(counts.to_vec().unwrap(), want);
            assert_eq!(bias.to_vec().unwrap(), biases);
        }
    });
}

#[test]
fn bad_input() {
    on_every_device(|d, s| {
        let ids = Tensor::<i32>::zeros(d, &[4]).unwrap();
        let e = histogram(s, &mut Tensor::zeros(d, &[2, 2]).unwrap(), &ids);
        assert!(matches!(e, Err(Error::Shape { arg: "counts", .. })), "{e:?}");
        let e = histogram(s, &mut Tensor::zeros(d, &[8193]).unwrap(), &ids);
        assert!(matches!(e, Err(Error::Value { arg: "counts", .. })), "{e:?}");
        let every_other = Tensor::<i32>::zeros(d, &[8]).unwrap().as_strided(&[4], &[2], 0).unwrap();
        let e = histogram(s, &mut Tensor::zeros(d, &[4]).unwrap(), &every_other);
        assert!(matches!(e, Err(Error::Stride { arg: "topk_ids", .. })), "{e:?}");
        let mut bias = Tensor::<f32>::zeros(d, &[4]).unwrap();
        let e = update_bias(s, &mut bias, &Tensor::<i32>::zeros(d, &[5]).unwrap(), 0.1);
        assert!(matches!(e, Err(Error::Shape { arg: "loads", .. })), "{e:?}");
        let e = update_bias(s, &mut bias, &ids, f32::NAN);
        assert!(matches!(e, Err(Error::Value { arg: "rate", .. })), "{e:?}");
    });
}

/// Numbers that no launch takes make geometries that none takes, not small ones.
#[test]
fn geometries_of_absurd_sizes() {
    use warploom::moe::{balance, capacity, gate, noisy_top_k, permute, shuffle, sort, statistics};
    for experts in [1 << 28, 119_304_648, u32::MAX] {
        for geometry in [
            gate::geometry(false, 1, experts),
            balance::histogram_geometry(u32::MAX, experts),
            capacity::geometry(experts),
            noisy_top_k::geometry(4, experts),
            statistics::finish_geometry(experts as usize),
        ] {
            assert!(geometry.shared_bytes > 1 << 20, "{experts}: {geometry:?}");
        }
    }
    assert!(permute::geometry(1, 1 << 44, 16).grid[1] > 65535 && permute::geometry(1, usize::MAX, 1).grid[1] > 65535);
    for experts in [195_225_791, usize::MAX] {
        assert!(sort::geometry(sort::split(10, 8), experts, u32::MAX).shared_bytes > 1 << 20, "{experts}");
    }
    let (d, mut byte) = (Device::simt(), 0u8);
    let args = shuffle::Args { out: &mut byte, weights: &byte, rows: 1 << 20, lines: 64, order: 0, tile_rows: 64 };
    // SAFETY: no kernel is launched.
    let e = unsafe { shuffle::launch(&Stream::new(&d).unwrap(), 1 << 20, &args) };
    assert!(e.is_err(), "{e:?}");
    assert!(statistics::finish_geometry(usize::MAX).shared_bytes > 1 << 20);
    assert!(statistics::part_geometry(1 << 39).grid[0] >= statistics::part_geometry(u32::MAX as usize).grid[0]);
}
