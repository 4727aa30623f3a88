use cuda_std::Float;
use proptest::prelude::*;
use warploom::attention::merge;
use warploom::reference::attention as reference;
use warploom::{Device, Error, Stream, Tensor, bf16, f16};
use warploom_tests::{assert_close, epsilon, noise, noise_of, on_every_device, property, widen};

/// Merges `parts` parts of `[tokens, heads, dim]` whose rows are `dim + pad` apart; every fifth row of a part saw nothing,
/// and has NaN to show for it.
fn check<T: Float>(d: &Device, s: &Stream, parts: usize, [tokens, heads, dim]: [usize; 3], pad: usize) {
    let rows = tokens * heads;
    let width = dim + pad;
    let unseen = |part: usize, row: usize| (row + part).is_multiple_of(5);
    let mut data = vec![];
    for part in 0..parts {
        let mut out = noise_of::<T>(rows * width, part as u64);
        let mut lse: Vec<f32> = noise(rows, 50 + part as u64).iter().map(|v| 6.0 * v).collect();
        for row in (0..rows).filter(|&row| unseen(part, row)) {
            lse[row] = f32::NEG_INFINITY;
            out[row * width..][..dim].fill(T::from_f32(f32::NAN));
        }
        data.push((out, lse));
    }
    let tensors: Vec<_> = data
        .iter()
        .map(|(out, lse)| {
            let out = Tensor::from_slice(d, out, &[tokens, heads, width]).unwrap().narrow(2, 0, dim).unwrap();
            (out, Tensor::from_slice(d, lse, &[tokens, heads]).unwrap())
        })
        .collect();
    let tensors: Vec<_> = tensors.iter().map(|(out, lse)| (out, lse)).collect();
    let mut out = Tensor::<T>::uninit(d, &[tokens, heads, dim]).unwrap();
    let mut lse = Tensor::<f32>::uninit(d, &[tokens, heads]).unwrap();
    s.fill_bytes(&mut out, 0xff).unwrap();
    merge(s, &mut out, Some(&mut lse), &tensors).unwrap();
    let (got, got_lse) = (out.to_vec().unwrap(), lse.to_vec().unwrap());
    for row in 0..rows {
        let of = |(out, lse): &(Vec<T>, Vec<f32>)| reference::Decoded {
            out: widen(&out[row * width..][..dim]),
            lse: lse[row] as f64,
        };
        let want = reference::merge(&data.iter().map(of).collect::<Vec<_>>());
        // Weights are exponentials of differences of up to 12, which are rounded to f32 first.
        let arithmetic = if T::DTYPE == cuda_std::DType::F32 { 1e-6 } else { epsilon::<T>() };
        assert_close(&got[row * dim..][..dim], &want.out, arithmetic, 1.0);
        assert_close(&got_lse[row..=row], &[want.lse], 1e-6, 4.0);
    }
    merge(s, &mut out, None, &tensors).unwrap();
    assert_eq!(widen(&out.to_vec().unwrap()), widen(&got));
}

#[test]
fn matches_the_reference() {
    let shapes = (1usize..9, 1usize..5, 1usize..9, prop::sample::select(vec![1usize, 46, 64, 80, 128, 256]), 0usize..9);
    property(12, shapes, |d, s, (parts, tokens, heads, dim, pad)| {
        check::<f32>(d, s, parts, [tokens, heads, dim], pad);
        check::<f16>(d, s, parts, [tokens, heads, dim], pad);
        check::<bf16>(d, s, parts, [tokens, heads, dim], pad & 8);
        Ok(())
    });
}

#[test]
fn one_part_is_itself() {
    on_every_device(|d, s| {
        let part = Tensor::from_slice(d, &noise_of::<bf16>(4 * 64, 1), &[4, 64]).unwrap();
        let lse = Tensor::from_slice(d, &[-30.0f32, 0.0, 1.5, 80.0], &[4]).unwrap();
        let mut out = Tensor::uninit(d, &[4, 64]).unwrap();
        let mut out_lse = Tensor::uninit(d, &[4]).unwrap();
        merge(s, &mut out, Some(&mut out_lse), &[(&part, &lse)]).unwrap();
        assert_eq!(out.to_vec().unwrap(), part.to_vec().unwrap());
        assert_eq!(out_lse.to_vec().unwrap(), lse.to_vec().unwrap());
    });
}

#[test]
fn bad_input() {
    on_every_device(|d, s| {
        let t = |shape: &[usize]| Tensor::<f32>::zeros(d, shape).unwrap();
        let (a, b, l) = (t(&[3, 2, 16]), t(&[3, 2, 16]), t(&[3, 2]));
        let mut out = t(&[3, 2, 16]);
        let mut run = |parts: &[(&Tensor<f32>, &Tensor<f32>)]| merge(s, &mut out, None, parts);
        assert!(run(&[(&a, &l), (&b, &l)]).is_ok());
        assert!(matches!(run(&[]), Err(Error::Value { arg: "parts", .. })));
        assert!(matches!(run(&[(&a, &l); 9]), Err(Error::Value { arg: "parts", .. })));
        assert!(matches!(run(&[(&t(&[3, 2, 8]), &l)]), Err(Error::Shape { arg: "parts", .. })));
        assert!(matches!(run(&[(&a, &t(&[3]))]), Err(Error::Shape { arg: "parts", .. })));
        let mut own = a.clone();
        assert!(matches!(merge(s, &mut own, None, &[(&a, &l)]), Err(Error::Overlap { .. })));
        let mut small = t(&[2]);
        assert!(matches!(merge(s, &mut out, Some(&mut small), &[(&a, &l)]), Err(Error::Shape { arg: "lse", .. })));
        let (none, mut logs) = (t(&[3, 2, 0]), t(&[3, 2]));
        let e = merge(s, &mut t(&[3, 2, 0]), Some(&mut logs), &[(&none, &l)]);
        assert!(matches!(e, Err(Error::Value { arg: "out", .. })), "{e:?}");
        assert!(merge(s, &mut t(&[3, 2, 0]), None, &[(&none, &l)]).is_ok());
        assert!(merge(s, &mut t(&[0, 2, 16]), None, &[(&t(&[0, 2, 16]), &t(&[0, 2]))]).is_ok());
    });
}
