use crate::rows::{Place, Rows, all_bytes, assert_rounded};
use cuda_std::Float;
use proptest::prelude::*;
use proptest::sample::select;
use warploom::gemm::{QuantisedElement, quantise_blocks, quantise_groups, quantise_rows};
use warploom::reference::quantise;
use warploom::{DType, Device, E4M3, Error, Graph, Stream, Tensor, bf16, f16};
use warploom_tests::{noise_of, on_every_device, on_every_order, property, widen};

const GROUP: usize = 128;

/// The largest number of the format.
fn largest<Q: QuantisedElement>() -> f64 {
    if Q::DTYPE == DType::I8 { 127.0 } else { 448.0 }
}

/// Elements as numbers; both formats have 8 bits.
fn numbers<Q: QuantisedElement>(values: &[Q]) -> Vec<f64> {
    // SAFETY: plain bytes.
    let bytes = unsafe { std::slice::from_raw_parts(values.as_ptr().cast::<u8>(), values.len()) };
    let number = |b: u8| if Q::DTYPE == DType::I8 { b as i8 as f64 } else { E4M3(b).to_f32() as f64 };
    bytes.iter().map(|b| number(*b)).collect()
}

/// `got · scale` is `values` within half a step of the format, and the scale is the one for `values`.
#[track_caller]
fn check_part<Q: QuantisedElement>(got: &[f64], values: &[f64], scale: f32) {
    let want = quantise::scale(values, largest::<Q>());
    assert!((scale as f64 / want - 1.0).abs() < 2f64.powi(-20), "scale {scale:e}, expected {want:e}");
    let ratios: Vec<f64> = values.iter().map(|v| (v / scale as f64).clamp(-largest::<Q>(), largest::<Q>())).collect();
    if Q::DTYPE == DType::I8 {
        for (g, r) in got.iter().zip(&ratios) {
            assert!((g - r).abs() <= 0.5 + 1e-4, "{g}, expected {r}");
        }
    } else {
        let got: Vec<E4M3> = got.iter().map(|g| E4M3::from_f32(*g as f32)).collect();
        assert_rounded(&got, &ratios, 2f64.powi(-20), 0.0);
    }
}

fn widths() -> impl Strategy<Value = usize> {
    prop_oneof![select(vec![1usize, 7, 80, 128, 129, 256, 768, 1024]), 1usize..400]
}

fn check<T: Float, Q: QuantisedElement>() {
    let place = || select(Place::ALL.to_vec());
    property(12, (0usize..4, widths(), place(), place(), 0usize..2), |device, stream, (rows, n, from, to, order)| {
        let x = noise_of::<T>(rows * n, n as u64);
        let (input, want) = (Rows::new(device, &x, rows, n, from), widen(&x));

        let out = Rows::<Q>::poisoned(device, rows, n, to);
        let mut scales = Tensor::<f32>::uninit(device, &[rows]).unwrap();
        let smooth = noise_of::<f32>(n, 5);
        let factors = Tensor::from_slice(device, &smooth, &[n]).unwrap();
        let smoothed = order == 1;
        quantise_rows(stream, &mut out.view(), &mut scales, &input.view(), smoothed.then_some(&factors)).unwrap();
        for ((got, row), scale) in numbers(&out.take()).chunks(n).zip(want.chunks(n)).zip(scales.to_vec().unwrap()) {
            let factor = |i: usize| if smoothed { smooth[i] as f64 } else { 1.0 };
            let row: Vec<f64> = row.iter().enumerate().map(|(i, v)| (v * factor(i)) as f32 as f64).collect();
            check_part::<Q>(got, &row, scale);
        }

        let (out, groups) = (Rows::<Q>::poisoned(device, rows, n, to), n.div_ceil(GROUP));
        // Row- and column-major, the latter with padding.
        let strides = [[groups, 1], [1, rows + 3]][order];
        let all = Tensor::<f32>::zeros(device, &[(groups + 1) * (rows + 4)]).unwrap();
        let mut scales = all.as_strided(&[rows, groups], &strides, 0).unwrap();
        quantise_groups(stream, &mut out.view(), &mut scales, &input.view()).unwrap();
        let scales = scales.to_vec().unwrap();
        for (r, (got, want)) in numbers(&out.take()).chunks(n).zip(want.chunks(n)).enumerate() {
            for (g, (got, want)) in got.chunks(GROUP).zip(want.chunks(GROUP)).enumerate() {
                check_part::<Q>(got, want, scales[r * groups + g]);
            }
        }
        assert_eq!(all.to_vec().unwrap().iter().filter(|s| **s != 0.0).count(), rows * groups);
        Ok(())
    });
    property(3, (1usize..3, 1usize..300, 1usize..300), |device, stream, (matrices, rows, n)| {
        let w = noise_of::<T>(matrices * rows * n, 3);
        let dw = Tensor::from_slice(device, &w, &[matrices, rows, n]).unwrap();
        let mut out = Tensor::<Q>::uninit(device, &[matrices, rows, n]).unwrap();
        let (down, across) = (rows.div_ceil(GROUP), n.div_ceil(GROUP));
        let mut scales = Tensor::<f32>::uninit(device, &[matrices, down, across]).unwrap();
        quantise_blocks(stream, &mut out, &mut scales, &dw).unwrap();
        let (got, scales, w) = (numbers(&out.to_vec().unwrap()), scales.to_vec().unwrap(), widen(&w));
        for (i, scale) in scales.iter().enumerate() {
            let (matrix, r, c) = (i / across / down, i / across % down * GROUP, i % across * GROUP);
            let part = |v: &[f64]| -> Vec<f64> {
                (r..(r + GROUP).min(rows))
                    .flat_map(|r| v[(matrix * rows + r) * n..][c..(c + GROUP).min(n)].to_vec())
                    .collect()
            };
            check_part::<Q>(&part(&got), &part(&w), *scale);
        }
        Ok(())
    });
}

#[test]
fn e4m3_matches_the_reference() {
    check::<f32, E4M3>();
    check::<f16, E4M3>();
    check::<bf16, E4M3>();
}

#[test]
fn int8_matches_the_reference() {
    check::<f32, i8>();
    check::<f16, i8>();
    check::<bf16, i8>();
}

/// All three in one graph, with other numbers for each replay.
fn captured<Q: QuantisedElement>(device: &Device, stream: &Stream) {
    let (rows, n) = (5, 272);
    let mut x = Tensor::<bf16>::zeros(device, &[rows, n]).unwrap();
    let outputs = || {
        let scales = [vec![rows], vec![rows, n.div_ceil(GROUP)], vec![rows.div_ceil(GROUP), n.div_ceil(GROUP)]];
        scales.map(|shape| (Tensor::<Q>::zeros(device, &[rows, n]).unwrap(), Tensor::zeros(device, &shape).unwrap()))
    };
    let run = |stream: &Stream, x: &Tensor<bf16>, [a, b, c]: &mut [(Tensor<Q>, Tensor<f32>); 3]| {
        quantise_rows(stream, &mut a.0, &mut a.1, x, None)?;
        quantise_groups(stream, &mut b.0, &mut b.1, x)?;
        quantise_blocks(stream, &mut c.0, &mut c.1, x)
    };
    let (mut replayed, mut direct) = (outputs(), outputs());
    device.preload(&["gemm"]).unwrap();
    let graph = Graph::capture(stream, |stream| run(stream, &x, &mut replayed)).unwrap();
    for seed in 5..7 {
        x.copy_from_slice(&noise_of::<bf16>(rows * n, seed)).unwrap();
        graph.launch(stream).unwrap();
        run(stream, &x, &mut direct).unwrap();
        for (a, b) in replayed.iter().zip(&direct) {
            assert_eq!(numbers(&a.0.to_vec().unwrap()), numbers(&b.0.to_vec().unwrap()));
            assert_eq!(a.1.to_vec().unwrap(), b.1.to_vec().unwrap());
            assert!(a.1.to_vec().unwrap().iter().all(|&scale| scale > 0.0));
        }
    }
}

#[test]
fn captured_and_replayed() {
    on_every_device(|device, stream| {
        captured::<E4M3>(device, stream);
        captured::<i8>(device, stream);
    });
}

#[test]
fn rows_of_every_length() {
    on_every_device(|device, stream| {
        for n in [4096usize, 8200, 16392, 16393] {
            let x = noise_of::<bf16>(n, 3);
            let dx = Tensor::from_slice(device, &x, &[1, n]).unwrap();
            let mut out = Tensor::<E4M3>::uninit(device, &[1, n]).unwrap();
            let mut scales = Tensor::<f32>::uninit(device, &[1]).unwrap();
            quantise_rows(stream, &mut out, &mut scales, &dx, None).unwrap();
            check_part::<E4M3>(&numbers(&out.to_vec().unwrap()), &widen(&x), scales.to_vec().unwrap()[0]);
        }
    });
}

/// Many rows take two pieces a thread: the same bits as each row by itself, in rows with and without a narrower last group, and short ones.
fn many_rows_and_few<T: Float, Q: QuantisedElement>() {
    on_every_device(|device, stream| {
        for (rows, n) in [(128usize, 4096usize), (128, 4104), (129, 8 * 512 + 72), (7282, 72)] {
            let x = noise_of::<T>(rows * n, 6);
            let groups = n.div_ceil(GROUP);
            let run = |x: &[T]| {
                let rows = x.len() / n;
                let x = Tensor::from_slice(device, x, &[rows, n]).unwrap();
                let mut out = Tensor::<Q>::uninit(device, &[rows, n]).unwrap();
                let mut scales = Tensor::<f32>::uninit(device, &[rows, groups]).unwrap();
                quantise_groups(stream, &mut out, &mut scales, &x).unwrap();
                (numbers(&out.to_vec().unwrap()), scales.to_vec().unwrap())
            };
            let (many, many_scales) = run(&x);
            for (r, x) in x.chunks(n).enumerate().step_by(rows / 8) {
                let (one, one_scales) = run(x);
                assert!(
                    many[r * n..][..n] == one && many_scales[r * groups..][..groups] == one_scales,
                    "{rows} {n} {r}"
                );
            }
        }
    });
}

#[test]
fn groups_of_many_rows_and_of_few() {
    many_rows_and_few::<f32, E4M3>();
    many_rows_and_few::<bf16, E4M3>();
    many_rows_and_few::<f16, i8>();
}

/// Many rows take four pieces a thread, and short ones share blocks: the same bits as each row by itself.
#[test]
fn many_rows_with_a_scale_each() {
    on_every_device(|device, stream| {
        for (rows, n) in [(384usize, 4104usize), (516, 720), (515, 720)] {
            let x = noise_of::<bf16>(rows * n, 6);
            let run = |x: &[bf16]| {
                let rows = x.len() / n;
                let x = Tensor::from_slice(device, x, &[rows, n]).unwrap();
                let mut out = Tensor::<E4M3>::uninit(device, &[rows, n]).unwrap();
                let mut scales = Tensor::<f32>::uninit(device, &[rows]).unwrap();
                quantise_rows(stream, &mut out, &mut scales, &x, None).unwrap();
                (out.to_vec().unwrap(), scales.to_vec().unwrap())
            };
            let (out, scales) = run(&x);
            for r in [0, 1, rows / 2, rows - 1] {
                let (own, scale) = run(&x[r * n..][..n]);
                assert!(out[r * n..][..n] == own[..] && scales[r] == scale[0], "row {r} of {rows} of {n}");
            }
            // Every one of them.
            for (r, scale) in scales.iter().enumerate() {
                let want = quantise::scale(&widen(&x[r * n..][..n]), 448.0);
                assert!((*scale as f64 / want - 1.0).abs() < 2f64.powi(-20), "row {r} of {rows} of {n}");
            }
        }
    });
}

/// Few long rows have clusters of blocks on Hopper, more blocks of their own, which hold those of 16 bits: the same bits, in rows without a number, too.
#[test]
fn few_long_rows_are_the_same_bits_as_many() {
    fn check<T: Float, Q: QuantisedElement>(device: &Device, stream: &Stream, n: usize) {
        let mut few = noise_of::<T>(3 * n, n as u64);
        (few[n + 5], few[3 * n - 1]) = (T::from_f32(f32::NAN), T::from_f32(f32::INFINITY));
        let mut many = few.clone();
        many.resize(81 * n, T::from_f32(1.0));
        let smooth = Tensor::from_slice(device, &noise_of::<f32>(n, 5), &[n]).unwrap();
        let run = |x: &[T], smoothed: bool| {
            let rows = x.len() / n;
            let x = Tensor::from_slice(device, x, &[rows, n]).unwrap();
            let mut out = Tensor::<Q>::uninit(device, &[rows, n]).unwrap();
            let mut scales = Tensor::<f32>::uninit(device, &[rows]).unwrap();
            quantise_rows(stream, &mut out, &mut scales, &x, smoothed.then_some(&smooth)).unwrap();
            let scales: Vec<_> = scales.to_vec().unwrap()[..3].iter().map(|s| s.to_bits()).collect();
            (all_bytes(&out.to_vec().unwrap()[..3 * n]), scales)
        };
        for smoothed in [false, true] {
            assert!(run(&few, smoothed) == run(&many, smoothed), "{} {n} {smoothed}", T::DTYPE);
        }
    }
    on_every_order(|device, stream| {
        for n in [8192, 8200, 16384, 16392, 28672, 32768] {
            check::<bf16, E4M3>(device, stream, n);
        }
        check::<bf16, i8>(device, stream, 28672);
        check::<f16, E4M3>(device, stream, 28672);
        check::<f16, i8>(device, stream, 8192);
        check::<f32, E4M3>(device, stream, 4096);
        check::<f32, i8>(device, stream, 14336);
    });
}

#[test]
fn zeros_infinities_and_not_a_number() {
    on_every_device(|device, stream| {
        let x = [[0.0f32, 0.0], [f32::NAN, 8.0], [f32::INFINITY, 8.0]].concat();
        let dx = Tensor::from_slice(device, &x, &[3, 2]).unwrap();
        let mut out = Tensor::<E4M3>::uninit(device, &[3, 2]).unwrap();
        let mut scales = Tensor::<f32>::uninit(device, &[3, 1]).unwrap();
        quantise_groups(stream, &mut out, &mut scales, &dx).unwrap();
        let (got, scales) = (numbers(&out.to_vec().unwrap()), scales.to_vec().unwrap());
        assert_eq!(got[..2], [0.0, 0.0]);
        assert!(scales[0] > 0.0 && scales[0] < 1e-12);
        assert!(got[2].is_nan() && got[3] == 448.0 && scales[1] == 8.0 / 448.0);
        assert!(got[4].is_nan() && got[5] == 0.0 && scales[2] == f32::INFINITY);
        let mut ints = Tensor::<i8>::uninit(device, &[3, 2]).unwrap();
        let mut scales = Tensor::<f32>::uninit(device, &[3]).unwrap();
        quantise_rows(stream, &mut ints, &mut scales, &dx, None).unwrap();
        assert_eq!(ints.to_vec().unwrap(), [0, 0, 0, 127, 0, 0]);
    });
}

#[test]
fn bad_input() {
    let device = Device::simt();
    let s = &Stream::new(&device).unwrap();
    let x = Tensor::<bf16>::zeros(&device, &[2, 200]).unwrap();
    let out = |shape: &[usize]| Tensor::<E4M3>::zeros(&device, shape).unwrap();
    let scales = |shape: &[usize]| Tensor::<f32>::zeros(&device, shape).unwrap();
    let e = quantise_rows(s, &mut out(&[2, 199]), &mut scales(&[2]), &x, None);
    assert!(matches!(e, Err(Error::Shape { arg: "out", .. })), "{e:?}");
    let e = quantise_rows(s, &mut out(&[2, 200]), &mut scales(&[3]), &x, None);
    assert!(matches!(e, Err(Error::Shape { arg: "scales", .. })), "{e:?}");
    let e = quantise_rows(s, &mut out(&[2, 200]), &mut scales(&[2]), &x, Some(&scales(&[199])));
    assert!(matches!(e, Err(Error::Shape { arg: "smooth", .. })), "{e:?}");
    // Scales of experts' rows have both dimensions, or one.
    let experts = Tensor::from_slice(&device, &[bf16::ONE; 6 * 16], &[2, 3, 16]).unwrap();
    for shape in [&[2, 3][..], &[6]] {
        let mut of_rows = scales(shape);
        quantise_rows(s, &mut out(&[2, 3, 16]), &mut of_rows, &experts, None).unwrap();
        assert_eq!(of_rows.to_vec().unwrap(), [1.0 / 448.0; 6]);
    }
    let e = quantise_rows(s, &mut out(&[2, 3, 16]), &mut scales(&[3, 2]), &experts, None);
    assert!(matches!(e, Err(Error::Shape { arg: "scales", .. })), "{e:?}");
    let e = quantise_groups(s, &mut out(&[2, 200]), &mut scales(&[2, 1]), &x);
    assert!(matches!(e, Err(Error::Shape { arg: "scales", .. })), "{e:?}");
    let mut shared = scales(&[2]).as_strided(&[2, 2], &[0, 1], 0).unwrap();
    let e = quantise_groups(s, &mut out(&[2, 200]), &mut shared, &x);
    assert!(matches!(e, Err(Error::Stride { arg: "scales", .. })), "{e:?}");
    let e = quantise_blocks(s, &mut out(&[2, 200]), &mut scales(&[2, 2]), &x);
    assert!(matches!(e, Err(Error::Shape { arg: "scales", .. })), "{e:?}");
    let part = Tensor::<bf16>::zeros(&device, &[2, 201]).unwrap().narrow(1, 0, 200).unwrap();
    let e = quantise_blocks(s, &mut out(&[2, 200]), &mut scales(&[1, 2]), &part);
    assert!(matches!(e, Err(Error::Stride { arg: "w", .. })), "{e:?}");
    let eight = out(&[2, 200]);
    let e = quantise_rows(s, &mut out(&[2, 200]), &mut scales(&[2]), &eight, None);
    assert!(matches!(e, Err(Error::DType { arg: "x", .. })), "{e:?}");
    let e = quantise_groups(s, &mut out(&[2, 200]), &mut scales(&[2, 2]), &eight);
    assert!(matches!(e, Err(Error::DType { arg: "x", .. })), "{e:?}");
    let e = quantise_blocks(s, &mut out(&[2, 200]), &mut scales(&[1, 2]), &eight);
    assert!(matches!(e, Err(Error::DType { arg: "w", .. })), "{e:?}");
    // More than are numbered, of nothing.
    let (wide, high) = ([0, 1 << 31], [1 << 31, 0]);
    let e = quantise_rows(s, &mut out(&wide), &mut scales(&[0]), &Tensor::<bf16>::zeros(&device, &wide).unwrap(), None);
    assert!(matches!(e, Err(Error::Value { arg: "x", .. })), "{e:?}");
    let many = Tensor::<bf16>::zeros(&device, &high).unwrap();
    let e = quantise_groups(s, &mut out(&high), &mut scales(&high), &many);
    assert!(matches!(e, Err(Error::Value { arg: "x", .. })), "{e:?}");
    let many = Tensor::<bf16>::zeros(&device, &wide).unwrap();
    let e = quantise_blocks(s, &mut out(&wide), &mut scales(&[0, 1 << 24]), &many);
    assert!(matches!(e, Err(Error::Value { arg: "w", .. })), "{e:?}");
    let elsewhere = Tensor::<bf16>::zeros(&Device::simt(), &[2, 200]).unwrap();
    let e = quantise_rows(s, &mut out(&[2, 200]), &mut scales(&[2]), &elsewhere, None);
    assert!(matches!(e, Err(Error::WrongDevice { arg: "x", .. })), "{e:?}");
}
