//! Any pairing, part of a head, strides and types; positions outside of the cache; and what is refused.

use super::Rows;
use crate::far::FAR;
use crate::rows::vector;
use cuda_std::{Element, Float};
use proptest::prelude::*;
use warploom::rope::RotaryOptions;
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
    /// Extra elements of a token, before the queries and after the keys.
    pad: usize,
    pairing: Pairing,
    inverse: bool,
    /// Elements before the table of angles.
    angles_at: usize,
    seed: u64,
}

const POSITIONS: usize = 37;

fn case() -> impl Strategy<Value = Case> {
    let dims = prop::sample::select(vec![46usize, 64, 80, 128, 2, 48]);
    let pairing = prop::sample::select(vec![Pairing::Neox, Pairing::Gptj]);
    (0usize..7, 1usize..6, prop::option::of(1usize..4), dims, any::<[u8; 3]>(), pairing, any::<bool>(), any::<u64>())
        .prop_map(|(tokens, query_heads, key_heads, head_dim, [part, place, pad], pairing, inverse, seed)| {
            let rot_dim = match part % 4 {
                0 | 1 => head_dim,
                2 => (head_dim / 2).next_multiple_of(2),
                _ => 2 * (1 + part as usize / 4 % (head_dim / 2)),
            };
            let rest = head_dim - rot_dim;
            let offset = match place % 3 {
                0 => 0,
                1 => rest,
                _ => place as usize / 3 % (rest + 1),
            };
            let pad = [0, 1, 16, 5][pad as usize % 4];
            let angles_at = (seed >> 9) as usize % 2;
            Case { tokens, query_heads, key_heads, head_dim, rot_dim, offset, pad, pairing, inverse, angles_at, seed }
        })
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
    // Any number will do as an angle's cosine and sine.
    let angles_host = noise_of::<C>(POSITIONS * rot_dim, case.seed + 1);
    let angles = vector(device, &angles_host, case.angles_at).reshape(&[POSITIONS, rot_dim]).unwrap();
    let at: Vec<i64> = (0..tokens as i64)
        .map(|t| match (t + case.seed as i64 % 5).rem_euclid(5) {
            0 => [-1, POSITIONS as i64, i32::MAX as i64, i32::MIN as i64][t as usize % 4],
            1 => POSITIONS as i64 - 1,
            _ => (t * 13 + case.seed as i64 % 3) % POSITIONS as i64,
        })
        .collect();
    let narrow: Vec<I> = at.iter().map(|&p| I::try_from(p).unwrap()).collect();
    let positions = Tensor::from_slice(device, &narrow, &[tokens]).unwrap();
    let mut status = Tensor::<u32>::zeros(device, &[1]).unwrap();

    let mut options = RotaryOptions::default().offset(offset);
    if case.inverse {
        options = options.inverse();
    }
    rope::rotary(
        stream,
        &mut query,
        key.as_mut(),
        Some(&mut status),
        &positions,
        &angles,
        &options.pairing(case.pairing),
    )
    .unwrap();

    let got = fused.to_vec().unwrap();
    let mut untouched = vec![true; rows.len];
    for t in 0..tokens {
        let known = (0..POSITIONS as i64).contains(&at[t]);
        for h in (0..query_heads + key_heads).filter(|_| known) {
            let start = if h < query_heads { rows.at(t, 0, h) } else { rows.at(t, 1, h - query_heads) };
            let row = widen(&angles_host[at[t] as usize * rot_dim..][..rot_dim]);
            let head = widen(&host[start..start + head_dim]);
            let want = reference::rope::rotary(&head, &row, offset, case.pairing == Pairing::Gptj, case.inverse);
            assert_close(&got[start..start + head_dim], &want, 2f64.powi(-22), 2.0);
            untouched[start + offset..][..rot_dim].fill(false);
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
        check_case::<bf16, bf16, i64>(device, stream, &case);
        Ok(())
    });
    property(20, case(), |device, stream, case| {
        check_case::<bf16, f32, i32>(device, stream, &case);
        check_case::<f16, f16, i32>(device, stream, &case);
        check_case::<f16, f32, i64>(device, stream, &case);
        Ok(())
    });
}

#[test]
fn forty_heads_of_128() {
    on_every_device(|device, stream| {
        for pairing in [Pairing::Neox, Pairing::Gptj] {
            let base = Case {
                tokens: 3,
                query_heads: 40,
                key_heads: Some(40),
                head_dim: 128,
                rot_dim: 128,
                offset: 0,
                pad: 0,
                pairing,
                inverse: false,
                angles_at: 0,
                seed: 3,
            };
            check_case::<bf16, f32, i64>(device, stream, &base);
            check_case::<f32, f32, i64>(device, stream, &base);
            // Everything in whole chunks but for where the angles begin.
            let off = Case { query_heads: 3, key_heads: Some(2), angles_at: 1, seed: 2, ..base };
            check_case::<bf16, bf16, i32>(device, stream, &off);
            check_case::<f16, f32, i32>(device, stream, &off);
        }
    });
}

#[test]
fn heads_before_tokens_in_memory() {
    on_every_device(|device, stream| {
        let (tokens, heads, dim) = (3, 2, 16);
        let host = noise_of::<f32>(tokens * heads * dim, 1);
        let all = Tensor::from_slice(device, &host, &[heads, tokens, dim]).unwrap();
        let mut query = all.as_strided(&[tokens, heads, dim], &[dim, tokens * dim, 1], 0).unwrap();
        let angles = rope::cache::<f32>(device, 8, dim, 1e4, Scaling::None).unwrap();
        let rows = angles.to_vec().unwrap();
        let positions = Tensor::from_slice(device, &[4i32, 7, 0], &[3]).unwrap();
        rope::rotary(stream, &mut query, None, None, &positions, &angles, &RotaryOptions::default()).unwrap();
        let got = all.to_vec().unwrap();
        for (h, t) in (0..heads).flat_map(|h| (0..tokens).map(move |t| (h, t))) {
            let at = (h * tokens + t) * dim;
            let row = widen(&rows[[4, 7, 0][t] * dim..][..dim]);
            let want = reference::rope::rotary(&widen(&host[at..at + dim]), &row, 0, false, false);
            assert_close(&got[at..at + dim], &want, 2f64.powi(-22), 2.0);
        }
    });
}

#[test]
fn inverse_undoes_it() {
    on_every_device(|device, stream| {
        let host = noise_of::<f32>(5 * 3 * 64, 9);
        let mut query = Tensor::from_slice(device, &host, &[5, 3, 64]).unwrap();
        let angles = rope::cache::<f32>(device, 100, 64, 1e4, Scaling::None).unwrap();
        let positions = Tensor::from_slice(device, &[0i64, 99, 17, 50, 3], &[5]).unwrap();
        for pairing in [Pairing::Neox, Pairing::Gptj] {
            for options in [RotaryOptions::default(), RotaryOptions::default().inverse()] {
                rope::rotary(stream, &mut query, None, None, &positions, &angles, &options.pairing(pairing)).unwrap();
            }
        }
        assert_close(&query.to_vec().unwrap(), &widen(&host), 1e-6, 2.0);
    });
}

#[test]
fn runs_the_same_in_a_graph_and_twice() {
    on_every_device(|device, stream| {
        device.preload(&["rope"]).unwrap();
        let host = noise_of::<bf16>(4 * 6 * 128, 2);
        let angles = rope::cache::<f32>(device, 64, 128, 1e4, Scaling::None).unwrap();
        let mut positions = Tensor::from_slice(device, &[-1i32; 4], &[4]).unwrap();
        let mut captured = Tensor::from_slice(device, &host, &[4, 6, 128]).unwrap();
        let graph = Graph::capture(stream, |s| {
            rope::rotary(s, &mut captured, None, None, &positions, &angles, &RotaryOptions::default())
        })
        .unwrap();
        positions.copy_from_slice(&[0, 9, 63, 31]).unwrap();
        graph.launch(stream).unwrap();
        let bits = |t: &Tensor<bf16>| t.to_vec().unwrap().iter().map(|v| v.to_bits()).collect::<Vec<_>>();
        let once = bits(&captured);
        for _ in 0..2 {
            let mut direct = Tensor::from_slice(device, &host, &[4, 6, 128]).unwrap();
            rope::rotary(stream, &mut direct, None, None, &positions, &angles, &RotaryOptions::default()).unwrap();
            assert_eq!(bits(&direct), once);
        }
        assert_ne!(once, host.iter().map(|v| v.to_bits()).collect::<Vec<_>>());
    });
}

#[test]
fn refuses_what_it_cannot_do() {
    let device = &Device::simt();
    let stream = &Stream::new(device).unwrap();
    let t = |dims: &[usize]| Tensor::<f16>::zeros(device, dims).unwrap();
    let angles = Tensor::<f32>::zeros(device, &[10, 64]).unwrap();
    let positions = Tensor::<i32>::zeros(device, &[3]).unwrap();
    let run = |query: &Tensor<f16>, key: Option<&Tensor<f16>>, options| {
        let mut key = key.cloned();
        rope::rotary(stream, &mut query.clone(), key.as_mut(), None, &positions, &angles, &options).unwrap_err()
    };
    let plain = RotaryOptions::default;
    assert!(matches!(run(&t(&[3, 128]), None, plain()), Error::Shape { arg: "query", .. }));
    assert!(matches!(run(&t(&[4, 2, 64]), None, plain()), Error::Shape { arg: "positions", .. }));
    assert!(matches!(run(&t(&[3, 2, 64]), Some(&t(&[4, 2, 64])), plain()), Error::Shape { arg: "key", .. }));
    assert!(matches!(run(&t(&[3, 2, 64]), Some(&t(&[3, 64])), plain()), Error::Shape { arg: "key", .. }));
    assert!(matches!(run(&t(&[3, 2, 32]), None, plain()), Error::Value { arg: "offset", .. }));
    assert!(matches!(run(&t(&[3, 2, 64]), None, plain().offset(2)), Error::Value { arg: "offset", .. }));
    assert!(matches!(run(&t(&[3, 2, 64]), None, plain().offset(usize::MAX)), Error::Value { arg: "offset", .. }));
    assert!(matches!(run(&t(&[3, 2, 64]), Some(&t(&[3, 1, 48])), plain()), Error::Value { arg: "offset", .. }));
    let e = run(&t(&[3, 2, 64]), None, plain().largest_position(10));
    assert!(matches!(e, Error::Value { arg: "largest_position", .. }));
    let all = t(&[3 * 256]);
    let sparse = all.as_strided(&[3, 2, 64], &[256, 128, 2], 0).unwrap();
    assert!(matches!(run(&sparse, None, plain()), Error::Stride { arg: "query", .. }));
    let twice = all.as_strided(&[3, 2, 64], &[256, 32, 1], 0).unwrap();
    assert!(matches!(run(&twice, None, plain()), Error::Stride { arg: "query", .. }));
    // Heads 0 and 1 of the queries, 1 and 2 of the keys.
    let (a, b) = (
        all.as_strided(&[3, 2, 64], &[256, 64, 1], 0).unwrap(),
        all.as_strided(&[3, 2, 64], &[256, 64, 1], 64).unwrap(),
    );
    assert!(matches!(run(&a, Some(&b), plain()), Error::Overlap { .. }));
    let other = Tensor::<f16>::zeros(&Device::simt(), &[3, 2, 64]).unwrap();
    assert!(matches!(run(&other, None, plain()), Error::WrongDevice { arg: "query", .. }));

    let mut q = t(&[3, 2, 64]);
    let odd = Tensor::<f32>::zeros(device, &[10, 63]).unwrap();
    let e = rope::rotary(stream, &mut q, None, None, &positions, &odd, &plain());
    assert!(matches!(e, Err(Error::Shape { arg: "angles", .. })));
    let other = Tensor::<bf16>::zeros(device, &[10, 64]).unwrap();
    let e = rope::rotary(stream, &mut q, None, None, &positions, &other, &plain());
    assert!(matches!(e, Err(Error::DType { arg: "angles", .. })));
    let bytes = Tensor::<u8>::zeros(device, &[3]).unwrap();
    let e = rope::rotary(stream, &mut q, None, None, &bytes, &angles, &plain());
    assert!(matches!(e, Err(Error::DType { arg: "positions", .. })));
}

#[test]
fn an_empty_cache_knows_no_position() {
    on_every_device(|device, stream| {
        let host = noise_of::<f32>(64, 1);
        let mut q = Tensor::from_slice(device, &host, &[1, 1, 64]).unwrap();
        let angles = Tensor::<f32>::zeros(device, &[0, 64]).unwrap();
        let positions = Tensor::from_slice(device, &[0i32], &[1]).unwrap();
        let mut status = Tensor::<u32>::zeros(device, &[1]).unwrap();
        let options = RotaryOptions::default();
        rope::rotary(stream, &mut q, None, Some(&mut status), &positions, &angles, &options).unwrap();
        assert_eq!((q.to_vec().unwrap(), status.to_vec().unwrap()), (host, vec![1]));
    });
}

/// Tokens more than 2^31 elements apart, and positions whose angles are: the same numbers as from small tensors.
#[test]
fn tokens_and_angles_far_apart() {
    FAR.on_every_device(10, |device, stream, rows| {
        let (heads, head_dim) = (4, 128);
        let row = heads * head_dim;
        let host = noise_of::<bf16>(rows * row, 1);
        let (near, far) = (Tensor::from_slice(device, &host, &[rows * row]).unwrap(), FAR.rows(device, &host, row));
        // So many positions of 128 angles in bf16, of which all but the last few are never read.
        let positions = FAR.stride / head_dim + 2;
        let table = Tensor::from_slice(device, &noise_of::<bf16>(3 * head_dim, 2), &[3, head_dim]).unwrap();
        let last = FAR.memory::<bf16>(device, 2, 3 * head_dim);
        let all = last.narrow(0, 0, positions * head_dim).unwrap().reshape(&[positions, head_dim]).unwrap();
        for (i, p) in [0, 1, positions - 1].into_iter().enumerate() {
            let of = table.narrow(0, i, 1).unwrap().to_vec().unwrap();
            all.narrow(0, p, 1).unwrap().copy_from_slice(&of).unwrap();
        }
        let which = &[2usize, 1, 0][..rows];
        let far_positions: Vec<i32> = which.iter().map(|&i| [0, 1, positions as i32 - 1][i]).collect();
        let near_positions: Vec<i32> = which.iter().map(|&i| i as i32).collect();
        for (tensor, stride, angles, at) in
            [(&near, row, &table, near_positions), (&far, FAR.stride, &all, far_positions)]
        {
            let mut query = tensor.as_strided(&[rows, heads, head_dim], &[stride, head_dim, 1], 0).unwrap();
            let at = Tensor::from_slice(device, &at, &[rows]).unwrap();
            rope::rotary(stream, &mut query, None, None, &at, angles, &RotaryOptions::default()).unwrap();
        }
        let near = near.to_vec().unwrap();
        assert!((0..rows).all(|r| near[r * row..][..row] != host[r * row..][..row]));
        assert_eq!(FAR.read(&far, row), near);
    });
}

/// Queries, keys and values of a head side by side, as GPT-NeoX has them: views whose largest strides are larger than the distance at which they take turns.
#[test]
fn heads_of_three() {
    on_every_device(|d, s| {
        for tokens in [1, 2, 5] {
            let data = noise_of::<f32>(tokens * 2 * 3 * 8, 1);
            let all = Tensor::from_slice(d, &data, &[tokens, 2, 3, 8]).unwrap();
            let view = |i: usize| all.as_strided(&[tokens, 2, 8], &[48, 24, 1], 8 * i).unwrap();
            let dense = |i: usize| Tensor::from_slice(d, &view(i).to_vec().unwrap(), &[tokens, 2, 8]).unwrap();
            let angles = rope::cache::<f32>(d, 8, 8, 1e4, Scaling::None).unwrap();
            let positions = Tensor::from_slice(d, &vec![3i32; tokens], &[tokens]).unwrap();
            let run = |q: &mut Tensor<f32>, k: &mut Tensor<f32>| {
                rope::rotary(s, q, Some(&mut *k), None, &positions, &angles, &RotaryOptions::default())?;
                warploom::norm::qk_norm(s, q, k, None, None, 1e-5)
            };
            let (mut q, mut k, v) = (dense(0), dense(1), dense(2));
            run(&mut q, &mut k).unwrap();
            run(&mut view(0), &mut view(1)).unwrap();
            for (i, want) in [q, k, v].iter().enumerate() {
                assert_eq!(view(i).to_vec().unwrap(), want.to_vec().unwrap(), "{i} of {tokens} tokens");
            }
            // Those that do meet are found.
            let mut shifted = all.as_strided(&[tokens, 2, 8], &[48, 24, 1], 4).unwrap();
            assert!(matches!(run(&mut view(0), &mut shifted), Err(Error::Overlap { .. })));
        }
    });
}
