//! Any pairing, part of a head, strides, weights and types; wrong positions; and what is refused.

use super::Rows;
use crate::far::FAR;
use crate::rows::vector;
use cuda_std::{Element, Float};
use proptest::prelude::*;
use warploom::rope::QkNormRotaryOptions;
use warploom::rope::qk_norm_rotary::Heads;
use warploom::rope::{self, Pairing, Scaling};
use warploom::{Device, Error, Graph, Stream, Tensor, bf16, f16, reference};
use warploom_tests::{assert_close, noise_of, on_every_device, property, widen};

#[derive(Clone, Debug)]
struct Case {
    tokens: usize,
    query_heads: usize,
    key_heads: Option<usize>,
    head_dim: usize,
    rot_dim: usize,
    offset: usize,
    pad: usize,
    pairing: Pairing,
    inverse: bool,
    weights: (bool, bool),
    weight_offset: f32,
    eps: f32,
    /// Elements before the weights of queries and of keys, and before the table of angles.
    at: [usize; 3],
    seed: u64,
}

const POSITIONS: usize = 23;

fn case() -> impl Strategy<Value = Case> {
    let dims = prop::sample::select(vec![46usize, 64, 80, 128, 2, 96, 256, 512, 257]);
    let pairing = prop::sample::select(vec![Pairing::Neox, Pairing::Gptj]);
    let flags = (pairing, any::<bool>(), any::<(bool, bool)>(), any::<bool>(), any::<bool>());
    (0usize..5, 1usize..6, prop::option::of(1usize..4), dims, any::<[u8; 3]>(), flags, any::<u64>()).prop_map(
        |(
            tokens,
            query_heads,
            key_heads,
            head_dim,
            [part, place, pad],
            (pairing, inverse, weights, one, big),
            seed,
        )| {
            let rot_dim = match part % 4 {
                0 | 1 => head_dim & !1,
                2 => (head_dim / 2).next_multiple_of(16).min(head_dim & !1),
                _ => 2 * (1 + part as usize / 4 % (head_dim / 2)),
            };
            let rest = head_dim - rot_dim;
            let offset = match place % 4 {
                0 => 0,
                1 => rest,
                2 => rest & !15,
                _ => place as usize / 4 % (rest + 1),
            };
            let pad = [0, 1, 16, 0][pad as usize % 4];
            let at = [0, 1, 2].map(|i| (seed >> (9 + i)) as usize % 2);
            let (weight_offset, eps) = (one as u8 as f32, if big { 1.0 } else { 1e-6 });
            Case {
                tokens,
                query_heads,
                key_heads,
                head_dim,
                rot_dim,
                offset,
                pad,
                pairing,
                inverse,
                weights,
                weight_offset,
                eps,
                at,
                seed,
            }
        },
    )
}

fn check_case<T: Float, C: Float, I: Element + TryFrom<i64>>(device: &Device, stream: &Stream, case: &Case)
where
    <I as TryFrom<i64>>::Error: std::fmt::Debug,
{
    let &Case { tokens, query_heads, head_dim, rot_dim, offset, pad, .. } = case;
    let key_heads = case.key_heads.unwrap_or(0);
    let rows = Rows::new(tokens, &[query_heads, key_heads], head_dim, pad, case.seed % 2 == 1);
    let host = noise_of::<T>(rows.len, case.seed);
    let fused = Tensor::from_slice(device, &host, &[rows.len]).unwrap();
    let mut query = rows.view(&fused, 0);
    let mut key = case.key_heads.map(|_| rows.view(&fused, 1));
    let weights = [noise_of::<T>(head_dim, case.seed + 2), noise_of::<T>(head_dim, case.seed + 3)];
    let on_device = |given: bool, i: usize| given.then(|| vector(device, &weights[i], case.at[i]));
    let (query_weight, key_weight) = (on_device(case.weights.0, 0), on_device(case.weights.1, 1));
    let angles_host = noise_of::<C>(POSITIONS * rot_dim, case.seed + 1);
    let angles = vector(device, &angles_host, case.at[2]).reshape(&[POSITIONS, rot_dim]).unwrap();
    let at: Vec<i64> = (0..tokens as i64)
        .map(|t| if (t + case.seed as i64 % 4) % 4 == 0 { [-1, POSITIONS as i64][t as usize % 2] } else { t * 7 % 23 })
        .collect();
    let narrow: Vec<I> = at.iter().map(|&p| I::try_from(p).unwrap()).collect();
    let positions = Tensor::from_slice(device, &narrow, &[tokens]).unwrap();
    let mut status = Tensor::<u32>::zeros(device, &[1]).unwrap();

    let mut options =
        QkNormRotaryOptions::default().offset(offset).weight_offset(case.weight_offset).pairing(case.pairing);
    if case.inverse {
        options = options.inverse();
    }
    (options.query_weight, options.key_weight) = (query_weight.as_ref(), key_weight.as_ref());
    let (key, status_word, eps) = (key.as_mut(), Some(&mut status), case.eps);
    rope::qk_norm_rotary(stream, &mut query, key, status_word, &positions, &angles, eps, &options).unwrap();

    let got = fused.to_vec().unwrap();
    let mut untouched = vec![true; rows.len];
    for t in 0..tokens {
        let known = (0..POSITIONS as i64).contains(&at[t]);
        for h in (0..query_heads + key_heads).filter(|_| known) {
            let of_query = h < query_heads;
            let start = if of_query { rows.at(t, 0, h) } else { rows.at(t, 1, h - query_heads) };
            let weight = widen(&weights[!of_query as usize]);
            let weight = if of_query { case.weights.0 } else { case.weights.1 }.then_some(&weight[..]);
            let row = widen(&angles_host[at[t] as usize * rot_dim..][..rot_dim]);
            let want = reference::rope::qk_norm_rotary(
                &widen(&host[start..start + head_dim]),
                weight,
                case.weight_offset as f64,
                eps as f64,
                &row,
                offset,
                case.pairing == Pairing::Gptj,
                case.inverse,
            );
            // Three approximations of single precision, of numbers up to about 10.
            assert_close(&got[start..start + head_dim], &want, 1e-6, 10.0);
            untouched[start..start + head_dim].fill(false);
        }
    }
    for i in (0..rows.len).filter(|i| untouched[*i]) {
        assert_eq!(got[i].to_f32().to_bits(), host[i].to_f32().to_bits(), "element {i} of {case:?}");
    }
    let wrong = at.iter().filter(|p| **p != -1 && !(0..POSITIONS as i64).contains(p)).count();
    assert_eq!(status.to_vec().unwrap(), [wrong as u32]);
}

#[test]
fn matches_the_reference() {
    property(30, case(), |device, stream, case| {
        check_case::<f32, f32, i32>(device, stream, &case);
        check_case::<bf16, f32, i64>(device, stream, &case);
        Ok(())
    });
    property(15, case(), |device, stream, case| {
        check_case::<bf16, bf16, i32>(device, stream, &case);
        check_case::<f16, f16, i64>(device, stream, &case);
        check_case::<f16, f32, i32>(device, stream, &case);
        Ok(())
    });
}

#[test]
fn forty_heads_of_128() {
    on_every_device(|device, stream| {
        for pairing in [Pairing::Neox, Pairing::Gptj] {
            let case = Case {
                tokens: 3,
                query_heads: 40,
                key_heads: Some(40),
                head_dim: 128,
                rot_dim: 128,
                offset: 0,
                pad: 0,
                pairing,
                inverse: false,
                weights: (true, true),
                weight_offset: 0.0,
                eps: 1e-6,
                at: [0; 3],
                seed: 3,
            };
            check_case::<bf16, f32, i64>(device, stream, &case);
        }
    });
}

/// Everything in whole chunks but for where one of the weights, or the angles, begin; and heads of 46 and 80.
#[test]
fn weights_and_angles_that_begin_off_a_chunk() {
    on_every_device(|device, stream| {
        for (head_dim, at) in
            [(128, [1, 0, 0]), (128, [0, 1, 0]), (128, [0, 0, 1]), (64, [1, 1, 1]), (46, [0; 3]), (80, [0; 3])]
        {
            for pairing in [Pairing::Neox, Pairing::Gptj] {
                let (weights, weight_offset, eps) = ((true, true), 0.0, 1e-6);
                let (tokens, query_heads, key_heads, rot_dim, offset, pad) = (3, 3, Some(2), head_dim, 0, 0);
                let (inverse, seed) = (false, 2);
                let case = Case {
                    tokens,
                    query_heads,
                    key_heads,
                    head_dim,
                    rot_dim,
                    offset,
                    pad,
                    pairing,
                    inverse,
                    weights,
                    weight_offset,
                    eps,
                    at,
                    seed,
                };
                check_case::<bf16, bf16, i32>(device, stream, &case);
                check_case::<f16, f32, i64>(device, stream, &case);
                check_case::<f32, f32, i32>(device, stream, &case);
            }
        }
    });
}

/// Tokens more than 2^31 elements apart: the same numbers as in a small tensor.
#[test]
fn tokens_far_apart() {
    FAR.on_every_device(6, |device, stream, rows| {
        let (heads, kv_heads, head_dim) = (4, 2, 128);
        let row = (heads + kv_heads) * head_dim;
        let host = noise_of::<bf16>(rows * row, 1);
        let (near, far) = (Tensor::from_slice(device, &host, &[rows * row]).unwrap(), FAR.rows(device, &host, row));
        let angles = Tensor::from_slice(device, &noise_of::<f32>(3 * head_dim, 2), &[3, head_dim]).unwrap();
        let positions = Tensor::from_slice(device, &[1i32, 0, 2][..rows], &[rows]).unwrap();
        for (tensor, stride) in [(&near, row), (&far, FAR.stride)] {
            let part = |heads, at| tensor.as_strided(&[rows, heads, head_dim], &[stride, head_dim, 1], at).unwrap();
            let (mut query, mut key) = (part(heads, 0), part(kv_heads, heads * head_dim));
            let options = QkNormRotaryOptions::default();
            rope::qk_norm_rotary(stream, &mut query, Some(&mut key), None, &positions, &angles, 1e-6, &options)
                .unwrap();
        }
        let near = near.to_vec().unwrap();
        assert!((0..rows).all(|r| near[r * row..][..row] != host[r * row..][..row]));
        assert_eq!(FAR.read(&far, row), near);
    });
}

/// Strides of dimensions of one element, and of none, are of no consequence, nor is what lanes without a head make of them.
#[test]
fn strides_that_nothing_follows() {
    const FREE: usize = (isize::MAX as usize / 4) & !7;
    on_every_device(|device, stream| {
        let positions = Tensor::from_slice(device, &[3i32], &[1]).unwrap();
        for dim in [16, 64] {
            let host = noise_of::<bf16>(2 * dim, 4);
            let angles = rope::cache::<f32>(device, 8, dim, 1e4, Scaling::None).unwrap();
            for (heads, key_heads) in
                [Heads::Whole, Heads::Wide, Heads::Narrow].into_iter().flat_map(|h| [(h, 1), (h, 0)])
            {
                let run = |stride: usize| {
                    let all = Tensor::from_slice(device, &host, &[2 * dim]).unwrap();
                    let part = |heads, at| all.as_strided(&[1, heads, dim], &[stride, stride, 1], at).unwrap();
                    let (mut query, mut key) = (part(1, 0), part(key_heads, dim));
                    let options = QkNormRotaryOptions::default().heads(heads);
                    rope::qk_norm_rotary(stream, &mut query, Some(&mut key), None, &positions, &angles, 1e-6, &options)
                        .unwrap();
                    all.to_vec().unwrap()
                };
                let want = run(dim);
                assert!((want[..dim] != host[..dim]) && (want[dim..] != host[dim..]) == (key_heads > 0));
                assert_eq!(run(FREE), want, "{heads:?}, {key_heads} heads of keys, {dim}");
            }
        }
    });
}

#[test]
fn runs_the_same_in_a_graph_and_twice() {
    on_every_device(|device, stream| {
        device.preload(&["rope"]).unwrap();
        let host = noise_of::<bf16>(4 * 6 * 128, 2);
        let new = || Tensor::from_slice(device, &host, &[4, 6, 128]).unwrap();
        let weight = Tensor::from_slice(device, &noise_of::<bf16>(128, 1), &[128]).unwrap();
        let angles = rope::cache::<f32>(device, 64, 128, 1e4, Scaling::None).unwrap();
        let positions = Tensor::from_slice(device, &[0, 9, 63, 31], &[4]).unwrap();
        let run = |s: &Stream, q: &mut Tensor<bf16>| {
            let mut options = QkNormRotaryOptions::default();
            options.query_weight = Some(&weight);
            rope::qk_norm_rotary(s, q, None, None, &positions, &angles, 1e-6, &options)
        };
        let bits = |t: &Tensor<bf16>| t.to_vec().unwrap().iter().map(|v| v.to_bits()).collect::<Vec<_>>();
        let mut captured = new();
        let graph = Graph::capture(stream, |s| run(s, &mut captured)).unwrap();
        assert_eq!(bits(&captured), host.iter().map(|v| v.to_bits()).collect::<Vec<_>>());
        graph.launch(stream).unwrap();
        for _ in 0..2 {
            let mut direct = new();
            run(stream, &mut direct).unwrap();
            assert_eq!(bits(&direct), bits(&captured));
        }
    });
}

#[test]
fn refuses_what_it_cannot_do() {
    let device = &Device::simt();
    let stream = &Stream::new(device).unwrap();
    let t = |dims: &[usize]| Tensor::<f16>::zeros(device, dims).unwrap();
    let angles = Tensor::<f32>::zeros(device, &[10, 64]).unwrap();
    let positions = Tensor::<i32>::zeros(device, &[3]).unwrap();
    let run = |query: &Tensor<f16>, key: Option<&Tensor<f16>>, weight: Option<&Tensor<f16>>, eps| {
        let mut key = key.cloned();
        let (q, mut o) = (&mut query.clone(), QkNormRotaryOptions::default());
        (o.query_weight, o.key_weight) = (weight, weight);
        rope::qk_norm_rotary(stream, q, key.as_mut(), None, &positions, &angles, eps, &o).unwrap_err()
    };
    let q = || t(&[3, 2, 64]);
    assert!(matches!(run(&t(&[3, 64]), None, None, 0.0), Error::Shape { arg: "query", .. }));
    assert!(matches!(run(&q(), Some(&t(&[3, 2, 80])), None, 0.0), Error::Shape { arg: "key", .. }));
    assert!(matches!(run(&q(), None, Some(&t(&[63])), 0.0), Error::Shape { arg: "query_weight", .. }));
    assert!(matches!(run(&q(), None, Some(&q()), 0.0), Error::Shape { arg: "query_weight", .. }));
    assert!(matches!(run(&q(), None, None, -1.0), Error::Value { arg: "eps", .. }));
    assert!(matches!(run(&q(), None, None, f32::NAN), Error::Value { arg: "eps", .. }));
    assert!(matches!(run(&t(&[3, 2, 32]), None, None, 0.0), Error::Value { arg: "offset", .. }));
    assert!(matches!(run(&t(&[3, 2, 1000]), None, None, 0.0), Error::Unsupported { .. }));
    let o = QkNormRotaryOptions::default();
    let far = |options| rope::qk_norm_rotary(stream, &mut q(), None, None, &positions, &angles, 0.0, &options);
    assert!(matches!(far(o.largest_position(10)), Err(Error::Value { arg: "largest_position", .. })));
    far(o.largest_position(9)).unwrap();
    // More heads than the blocks of a launch.
    let mut heads = t(&[1, 4 * 65535 + 1, 512]);
    let (position, turns) =
        (Tensor::<i32>::zeros(device, &[1]).unwrap(), Tensor::<f32>::zeros(device, &[1, 512]).unwrap());
    let o = QkNormRotaryOptions::default();
    let e = rope::qk_norm_rotary(stream, &mut heads, None, None, &position, &turns, 0.0, &o);
    assert!(matches!(e, Err(Error::Unsupported { .. })), "{e:?}");
    let weight = q();
    let part = weight.as_strided(&[64], &[1], 0).unwrap();
    assert!(matches!(run(&weight, None, Some(&part), 0.0), Error::Overlap { .. }));
}

/// Heads that turn as a whole have a kernel of their own, which gives the bits of the general one.
#[test]
fn whole_heads_are_the_same_bits() {
    fn check<T: Float + PartialEq>(
        d: &Device,
        s: &Stream,
        tokens: usize,
        heads: [usize; 2],
        dim: usize,
        pairing: Pairing,
    ) {
        let angles = rope::cache::<f32>(d, 40, dim, 1e4, Scaling::None).unwrap();
        let positions: Vec<i64> = (0..tokens as i64).map(|t| if t == 2 { 40 } else { t % 40 }).collect();
        let positions = Tensor::from_slice(d, &positions, &[tokens]).unwrap();
        let weights = [1, 2].map(|seed| Tensor::from_slice(d, &noise_of::<T>(dim, seed), &[dim]).unwrap());
        let all = noise_of::<T>(tokens * (heads[0] + heads[1]) * dim, 3);
        let run = |how, weighted: bool| {
            let x = Tensor::from_slice(d, &all, &[tokens, heads[0] + heads[1], dim]).unwrap();
            let (mut q, mut k) = (x.narrow(1, 0, heads[0]).unwrap(), x.narrow(1, heads[0], heads[1]).unwrap());
            let mut status = Tensor::<u32>::zeros(d, &[1]).unwrap();
            let mut options = QkNormRotaryOptions::default().pairing(pairing).weight_offset(0.5);
            options.heads = how;
            if weighted {
                options = options.weights(&weights[0], &weights[1]);
            }
            let key = (heads[1] > 0).then_some(&mut k);
            rope::qk_norm_rotary(s, &mut q, key, Some(&mut status), &positions, &angles, 1e-6, &options).unwrap();
            assert_eq!(status.to_vec().unwrap(), [u32::from(tokens > 2)]);
            x.to_vec().unwrap()
        };
        for weighted in [false, true] {
            let want = run(Some(Heads::Wide), weighted);
            assert!(want != all);
            assert!(run(Some(Heads::Whole), weighted) == want, "{tokens} x {heads:?} x {dim}, {pairing:?}");
            assert!(run(None, weighted) == want);
        }
    }
    on_every_device(|d, s| {
        for pairing in [Pairing::Neox, Pairing::Gptj] {
            for (tokens, heads) in [(1, [32, 8]), (3, [5, 0]), (4, [7, 2]), (2, [1, 1])] {
                for dim in [16, 64, 128, 256] {
                    check::<bf16>(d, s, tokens, heads, dim, pairing);
                }
                check::<f16>(d, s, tokens, heads, 128, pairing);
                check::<f32>(d, s, tokens, heads, 128, pairing);
            }
        }
        if !d.is_simt() {
            check::<bf16>(d, s, 3000, [32, 8], 128, Pairing::Neox);
        }
    });
}

/// Which kernel there is for which heads, and that no other is taken.
#[test]
fn kernels_of_their_own() {
    let d = &Device::simt();
    let s = &Stream::new(d).unwrap();
    let run = |dim: usize, rot_dim: usize, offset: usize, heads: Heads| {
        let mut q = Tensor::<bf16>::zeros(d, &[1, 2, dim]).unwrap();
        let angles = rope::cache::<f32>(d, 8, rot_dim, 1e4, Scaling::None).unwrap();
        let positions = Tensor::from_slice(d, &[3i32], &[1]).unwrap();
        let options = QkNormRotaryOptions::default().offset(offset).heads(heads);
        rope::qk_norm_rotary(s, &mut q, None, None, &positions, &angles, 1e-6, &options)
    };
    for (dim, rot_dim, offset, wide, whole) in [
        (128, 128, 0, true, true),
        (128, 64, 0, true, false),
        (128, 64, 64, true, false),
        (80, 80, 0, true, false),
        (46, 46, 0, false, false),
    ] {
        assert!(run(dim, rot_dim, offset, Heads::Narrow).is_ok());
        for (heads, can) in [(Heads::Wide, wide), (Heads::Whole, whole)] {
            let result = run(dim, rot_dim, offset, heads);
            assert!(matches!(result, Err(Error::Unsupported { .. })) != can, "{dim} {rot_dim} {offset}: {result:?}");
            assert_eq!(result.is_ok(), can);
        }
    }
}
