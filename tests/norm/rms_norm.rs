use super::{HELD, LONG, widths};
use crate::far::FAR;
use crate::rows::{Place, Rows, WIDTHS, all_bytes, assert_rounded, vector};
use cuda_std::Float;
use proptest::sample::select;
use warploom::norm::{self, Held, Variant, rms_norm};
use warploom::reference::norm as reference;
use warploom::{DType, Device, Entry, Error, Geometry, Graph, Result, Stream, Tensor, bf16, f16};
use warploom_tests::{
    large_gpu, noise_of, on_every_device, property, sanitizing, skipped_under_synccheck, skipped_without_hopper, widen,
};

/// Error of the sum and of the root before the result is rounded.
const RELATIVE: f64 = 1.0 / (1 << 19) as f64;

fn expected<T: Float>(x: &[T], n: usize, weight: Option<&[f64]>, eps: f64) -> Vec<f64> {
    x.chunks(n).flat_map(|row| reference::rms_norm(&widen(row), weight, eps)).collect()
}

fn weights<T: Float>(device: &Device, n: usize) -> (Tensor<T>, Vec<f64>) {
    let w = noise_of::<T>(n, 2);
    (Tensor::from_slice(device, &w, &[n]).unwrap(), widen(&w))
}

/// Compares the results and sums of `x + r` with the reference, row by row.
#[track_caller]
fn assert_added<T: Float>([got, sums]: [&[T]; 2], [x, r]: [&[T]; 2], n: usize, weight: &[f64], eps: f64) {
    assert_eq!([got.len(), sums.len()], [x.len(); 2]);
    let rows = got.chunks(n).zip(sums.chunks(n)).zip(x.chunks(n).zip(r.chunks(n)));
    for ((got, sums), (x, r)) in rows {
        let (want, sum) = reference::fused_add_rms_norm(x, r, Some(weight), eps);
        assert_eq!(all_bytes(sums), all_bytes(&sum), "the sum is rounded once");
        assert_rounded(got, &want, RELATIVE, 0.0);
    }
}

fn check<T: Float>() {
    let place = || select(Place::ALL.to_vec());
    property(
        24,
        (0usize..5, widths(), place(), place(), 0usize..3),
        |device, stream, (rows, n, from, to, weighted)| {
            let x = noise_of::<T>(rows * n, n as u64);
            let (input, out) = (Rows::new(device, &x, rows, n, from), Rows::<T>::poisoned(device, rows, n, to));
            let (dw, w) = weights::<T>(device, n);
            let w = match weighted {
                0 => None,
                1 => Some(w),
                _ => Some(w.iter().map(|w| 1.0 + w).collect()),
            };
            match weighted {
                2 => norm::gemma_rms_norm(stream, &mut out.view(), &input.view(), &dw, 1e-5).unwrap(),
                _ => norm::rms_norm(stream, &mut out.view(), &input.view(), w.as_ref().map(|_| &dw), 1e-5).unwrap(),
            }
            // `1 + w` is a sum of exact numbers, so its one rounding is a relative error near zero, too.
            assert_rounded(&out.take(), &expected(&x, n, w.as_deref(), 1e-5), RELATIVE, 0.0);
            Ok(())
        },
    );
}

#[test]
fn matches_the_reference() {
    check::<f32>();
    check::<f16>();
    check::<bf16>();
}

fn check_fused_add<T: Float>() {
    let place = || select(Place::ALL.to_vec());
    property(24, (0usize..5, widths(), place(), place(), 0usize..3), |device, stream, (rows, n, at, other, how)| {
        let (x, r) = (noise_of::<T>(rows * n, 3), noise_of::<T>(rows * n, 4));
        let (dx, dr) = (Rows::new(device, &x, rows, n, at), Rows::new(device, &r, rows, n, other));
        let (dw, w) = weights::<T>(device, n);
        let w = if how == 1 { w.iter().map(|w| 1.0 + w).collect() } else { w };
        let (out, sum) = match how {
            0 => {
                norm::fused_add_rms_norm(stream, &mut dx.view(), &mut dr.view(), Some(&dw), 1e-6).unwrap();
                (dx.take(), dr.take())
            }
            1 => {
                norm::gemma_fused_add_rms_norm(stream, &mut dx.view(), &mut dr.view(), &dw, 1e-6).unwrap();
                (dx.take(), dr.take())
            }
            _ => {
                let out = Rows::<T>::poisoned(device, rows, n, other);
                let sum = Rows::<T>::poisoned(device, rows, n, at);
                let (mut o, mut s) = (out.view(), sum.view());
                norm::fused_add_rms_norm_to(stream, &mut o, &mut s, &dx.view(), &dr.view(), Some(&dw), 1e-6).unwrap();
                assert_eq!(all_bytes(&dx.take()), all_bytes(&x));
                assert_eq!(all_bytes(&dr.take()), all_bytes(&r));
                (out.take(), sum.take())
            }
        };
        assert_added([&out, &sum], [&x, &r], n, &w, 1e-6);
        Ok(())
    });
}

#[test]
fn fused_add_matches_the_reference() {
    check_fused_add::<f32>();
    check_fused_add::<f16>();
    check_fused_add::<bf16>();
}

/// Each way that a row is held, with and without a residual.
#[test]
fn rows_of_every_length() {
    on_every_device(|device, stream| {
        for n in LONG.into_iter().chain([65544]) {
            let (x, r) = (noise_of::<bf16>(n, 1), noise_of::<bf16>(n, 7));
            let (dx, mut dr) =
                (Tensor::from_slice(device, &x, &[1, n]).unwrap(), Tensor::from_slice(device, &r, &[1, n]).unwrap());
            let (dw, w) = weights::<bf16>(device, n);
            let mut out = Tensor::<bf16>::uninit(device, &[1, n]).unwrap();
            norm::rms_norm(stream, &mut out, &dx, Some(&dw), 1e-5).unwrap();
            assert_rounded(&out.to_vec().unwrap(), &expected(&x, n, Some(&w), 1e-5), RELATIVE, 0.0);
            let mut out = dx;
            norm::fused_add_rms_norm(stream, &mut out, &mut dr, Some(&dw), 1e-5).unwrap();
            let (got, sums) = (out.to_vec().unwrap(), dr.to_vec().unwrap());
            assert_added([&got, &sums], [&x, &r], n, &w, 1e-5);
        }
    });
}

fn check_held<T: Float>() {
    on_every_device(|device, stream| {
        for (n, rows) in HELD {
            let (x, r) = (noise_of::<T>(rows * n, 1), noise_of::<T>(rows * n, 7));
            // Aligned rows as they are; others neither at an aligned address nor at such a distance.
            let place = if n.is_multiple_of(8) { Place::DENSE } else { Place { offset: 3, gap: 6 } };
            let (dx, dr) = (Rows::new(device, &x, rows, n, place), Rows::new(device, &r, rows, n, place));
            let (dw, w) = weights::<T>(device, n);
            let out = Rows::<T>::poisoned(device, rows, n, place);
            norm::rms_norm(stream, &mut out.view(), &dx.view(), Some(&dw), 1e-5).unwrap();
            assert_rounded(&out.take(), &expected(&x, n, Some(&w), 1e-5), RELATIVE, 0.0);
            norm::fused_add_rms_norm(stream, &mut dx.view(), &mut dr.view(), Some(&dw), 1e-5).unwrap();
            let (got, sums) = (dx.take(), dr.take());
            assert_added([&got, &sums], [&x, &r], n, &w, 1e-5);
        }
    });
}

/// Rows that are held where they were read again once, in each element type.
#[test]
fn held_rows_match_the_reference() {
    check_held::<f32>();
    check_held::<f16>();
    check_held::<bf16>();
}

fn named_widths<T: Float>(device: &Device, stream: &Stream) {
    for n in WIDTHS {
        let (x, r) = (noise_of::<T>(2 * n, 1), noise_of::<T>(2 * n, 7));
        let [mut dx, mut dr] = [&x, &r].map(|v| Tensor::from_slice(device, v, &[2, n]).unwrap());
        let (dw, w) = weights::<T>(device, n);
        let mut out = Tensor::<T>::uninit(device, &[2, n]).unwrap();
        norm::rms_norm(stream, &mut out, &dx, Some(&dw), 1e-5).unwrap();
        assert_rounded(&out.to_vec().unwrap(), &expected(&x, n, Some(&w), 1e-5), RELATIVE, 0.0);
        norm::fused_add_rms_norm(stream, &mut dx, &mut dr, Some(&dw), 1e-5).unwrap();
        let (got, sums) = (dx.to_vec().unwrap(), dr.to_vec().unwrap());
        assert_added([&got, &sums], [&x, &r], n, &w, 1e-5);
    }
}

#[test]
fn widths_that_peers_get_wrong() {
    on_every_device(|device, stream| {
        named_widths::<f32>(device, stream);
        named_widths::<bf16>(device, stream);
    });
}

/// Everything in whole pieces but for where the weights begin.
#[test]
fn weights_that_begin_off_a_piece() {
    on_every_device(|device, stream| {
        for n in [256, 768, 4096, 8200] {
            let (x, r, w) = (noise_of::<bf16>(2 * n, 1), noise_of::<bf16>(2 * n, 7), noise_of::<bf16>(n, 2));
            let [mut dx, mut dr] = [&x, &r].map(|v| Tensor::from_slice(device, v, &[2, n]).unwrap());
            let (dw, w) = (vector(device, &w, 1), widen(&w));
            let mut out = Tensor::<bf16>::uninit(device, &[2, n]).unwrap();
            norm::rms_norm(stream, &mut out, &dx, Some(&dw), 1e-5).unwrap();
            assert_rounded(&out.to_vec().unwrap(), &expected(&x, n, Some(&w), 1e-5), RELATIVE, 0.0);
            norm::fused_add_rms_norm(stream, &mut dx, &mut dr, Some(&dw), 1e-5).unwrap();
            let got = dx.to_vec().unwrap();
            for row in [0..n, n..2 * n] {
                let (want, _) = reference::fused_add_rms_norm(&x[row.clone()], &r[row.clone()], Some(&w), 1e-5);
                assert_rounded(&got[row], &want, RELATIVE, 0.0);
            }
        }
    });
}

/// Rows more than 2^31 elements apart: the same bits as in a small tensor.
#[test]
fn rows_far_apart() {
    FAR.on_every_device(10, |device, stream, rows| {
        for n in [256, 769] {
            let (x, r) = (noise_of::<bf16>(rows * n, 1), noise_of::<bf16>(rows * n, 2));
            let [mut near_x, mut near_r] = [&x, &r].map(|v| Tensor::from_slice(device, v, &[rows, n]).unwrap());
            let [far_x, far_r] = [&x, &r].map(|v| FAR.rows(device, v, n));
            let dense = Tensor::<bf16>::uninit(device, &[rows, n]).unwrap();
            norm::rms_norm(stream, &mut dense.clone(), &near_x, None, 1e-5).unwrap();
            norm::fused_add_rms_norm(stream, &mut near_x, &mut near_r, None, 1e-5).unwrap();
            let (mut x, mut r) = (FAR.view(&far_x, n), FAR.view(&far_r, n));
            norm::fused_add_rms_norm(stream, &mut x, &mut r, None, 1e-5).unwrap();
            assert_eq!(FAR.read(&far_x, n), near_x.to_vec().unwrap());
            assert_eq!(FAR.read(&far_r, n), near_r.to_vec().unwrap());
            // From the one, as it was, to the other.
            for (i, row) in noise_of::<bf16>(rows * n, 1).chunks(n).enumerate() {
                x.narrow(0, i, 1).unwrap().copy_from_slice(row).unwrap();
            }
            norm::rms_norm(stream, &mut r, &x, None, 1e-5).unwrap();
            assert_eq!(FAR.read(&far_r, n), dense.to_vec().unwrap());
        }
    });
}

/// In place, and of more dimensions, and of none.
#[test]
fn in_place_and_shapes() {
    on_every_device(|device, stream| {
        let x = noise_of::<f16>(2 * 3 * 80, 1);
        let mut t = Tensor::from_slice(device, &x, &[2, 3, 80]).unwrap();
        norm::rms_norm(stream, &mut t.clone(), &t, None, 1e-5).unwrap();
        assert_rounded(&t.to_vec().unwrap(), &expected(&x, 80, None, 1e-5), RELATIVE, 0.0);
        t.copy_from_slice(&x).unwrap();
        let mut row = t.reshape(&[480]).unwrap();
        norm::rms_norm(stream, &mut row.clone(), &row, None, 1e-5).unwrap();
        assert_rounded(&row.to_vec().unwrap(), &expected(&x, 480, None, 1e-5), RELATIVE, 0.0);
        for shape in [[0, 8], [8, 0]] {
            row = Tensor::uninit(device, &shape).unwrap();
            let mut residual = Tensor::uninit(device, &shape).unwrap();
            norm::rms_norm(stream, &mut row.clone(), &row, None, 1e-5).unwrap();
            norm::fused_add_rms_norm(stream, &mut row, &mut residual, None, 1e-5).unwrap();
        }
    });
}

/// A row has the same bits alone and among others.
#[test]
fn rows_do_not_depend_on_the_batch() {
    on_every_device(|device, stream| {
        for n in [128usize, 769, 3584] {
            let x = Tensor::from_slice(device, &noise_of::<f32>(37 * n, 5), &[37, n]).unwrap();
            let run = |x: &Tensor<f32>| {
                let mut out = Tensor::<f32>::uninit(device, x.shape()).unwrap();
                norm::rms_norm(stream, &mut out, x, None, 1e-5).unwrap();
                all_bytes(&out.to_vec().unwrap())
            };
            let all = run(&x);
            assert_eq!(run(&x), all);
            assert_eq!(run(&x.narrow(0, 36, 1).unwrap()), &all[36 * n * 4..]);
            assert_eq!(run(&x.narrow(0, 4, 9).unwrap()), &all[4 * n * 4..13 * n * 4]);
        }
    });
}

#[test]
fn not_a_number_infinities_and_zeros() {
    on_every_device(|device, stream| {
        let mut x = vec![1.0f32; 5 * 64];
        x[3] = f32::NAN;
        x[64 + 5] = f32::INFINITY;
        x[2 * 64..3 * 64].fill(0.0);
        x[3 * 64..4 * 64].fill(1e-30);
        let dx = Tensor::from_slice(device, &x, &[5, 64]).unwrap();
        for eps in [1e-5, 0.0] {
            let mut out = Tensor::<f32>::uninit(device, &[5, 64]).unwrap();
            norm::rms_norm(stream, &mut out, &dx, None, eps).unwrap();
            let out = out.to_vec().unwrap();
            let mut want = expected(&x, 64, None, eps as f64);
            if eps == 0.0 {
                // The squares of this row are below f32.
                want[3 * 64..4 * 64].fill(f64::INFINITY);
            }
            assert_rounded(&out, &want, RELATIVE, 0.0);
        }
    });
}

#[test]
fn captures_and_repeats_bit_for_bit() {
    on_every_device(|device, stream| {
        device.preload(&["norm"]).unwrap();
        let n = 520;
        let (mut x, mut r) =
            (Tensor::<bf16>::uninit(device, &[3, n]).unwrap(), Tensor::<bf16>::uninit(device, &[3, n]).unwrap());
        let graph = Graph::capture(stream, |s| norm::fused_add_rms_norm(s, &mut x, &mut r, None, 1e-5)).unwrap();
        let mut run = |seed| {
            x.copy_from_slice(&noise_of::<bf16>(3 * n, seed)).unwrap();
            r.copy_from_slice(&noise_of::<bf16>(3 * n, seed + 1)).unwrap();
            graph.launch(stream).unwrap();
            [all_bytes(&x.to_vec().unwrap()), all_bytes(&r.to_vec().unwrap())].concat()
        };
        let (first, second, again) = (run(1), run(5), run(1));
        assert!(first == again && first != second);
    });
}

#[test]
fn refuses_what_it_cannot_do() {
    let (device, other) = (Device::simt(), Device::simt());
    let stream = Stream::new(&device).unwrap();
    let tensor = |shape: &[usize]| Tensor::<f32>::zeros(&device, shape).unwrap();
    let x = tensor(&[4, 32]);
    let refused = |out: &mut Tensor<f32>, x: &Tensor<f32>, w: Option<&Tensor<f32>>, eps| {
        norm::rms_norm(&stream, out, x, w, eps).unwrap_err()
    };
    let mut out = tensor(&[4, 32]);
    assert!(matches!(refused(&mut tensor(&[4, 31]), &x, None, 0.0), Error::Shape { arg: "out", .. }));
    assert!(matches!(refused(&mut tensor(&[]), &tensor(&[]), None, 0.0), Error::Shape { .. }));
    assert!(matches!(refused(&mut out, &x, Some(&tensor(&[31])), 0.0), Error::Shape { arg: "weight", .. }));
    let spread = tensor(&[64]).as_strided(&[32], &[2], 0).unwrap();
    assert!(matches!(refused(&mut out, &x, Some(&spread), 0.0), Error::Stride { arg: "weight", .. }));
    let columns = x.as_strided(&[4, 32], &[1, 4], 0).unwrap();
    assert!(matches!(refused(&mut out, &columns, None, 0.0), Error::Stride { arg: "x", .. }));
    for eps in [-1.0, f32::NAN, f32::INFINITY] {
        assert!(matches!(refused(&mut out, &x, None, eps), Error::Value { arg: "eps", .. }));
    }
    let mut shifted = tensor(&[256]).as_strided(&[4, 32], &[32, 1], 1).unwrap();
    let base = shifted.as_strided(&[3, 32], &[32, 1], 32).unwrap();
    let mut three = shifted.narrow(0, 0, 3).unwrap();
    assert!(matches!(refused(&mut three, &base, None, 0.0), Error::Overlap { first: "out", second: "x", .. }));
    let weight = shifted.as_strided(&[32], &[1], 64).unwrap();
    assert!(matches!(refused(&mut shifted, &x, Some(&weight), 0.0), Error::Overlap { second: "weight", .. }));
    let foreign = Tensor::<f32>::zeros(&other, &[4, 32]).unwrap();
    assert!(matches!(refused(&mut out, &foreign, None, 0.0), Error::WrongDevice { arg: "x", .. }));

    let fused = |x: &mut Tensor<f32>, r: &mut Tensor<f32>| norm::fused_add_rms_norm(&stream, x, r, None, 0.0);
    let shape: Result<()> = fused(&mut tensor(&[4, 32]), &mut tensor(&[4, 16]));
    assert!(matches!(shape, Err(Error::Shape { arg: "residual", .. })));
    let mut same = tensor(&[4, 32]);
    let e = fused(&mut same.clone(), &mut same);
    assert!(matches!(e, Err(Error::Overlap { first: "x", second: "residual", .. })), "{e:?}");
    let (a, b) = (tensor(&[4, 32]), tensor(&[4, 32]));
    let e = norm::fused_add_rms_norm_to(&stream, &mut a.clone(), &mut a.clone(), &a, &b, None, 0.0).unwrap_err();
    assert!(matches!(e, Error::Overlap { .. }), "{e}");
    norm::fused_add_rms_norm_to(&stream, &mut b.clone(), &mut a.clone(), &a, &b, None, 0.0).unwrap();

    let mut bytes = Tensor::<warploom::E4M3>::zeros(&device, &[4, 32]).unwrap();
    let e = norm::rms_norm(&stream, &mut bytes.clone(), &bytes, None, 0.0);
    assert!(matches!(e, Err(Error::DType { arg: "x", .. })), "{e:?}");
    bytes.copy_from_slice(&[warploom::E4M3(0); 128]).unwrap();
}

/// The bytes of the results of an entry for dense rows.
fn launched(
    stream: &Stream,
    entry: Option<Entry<rms_norm::Args>>,
    geometry: Geometry,
    x: &Tensor<bf16>,
    w: &Tensor<bf16>,
) -> Vec<u8> {
    let (rows, n) = (x.shape()[0], x.shape()[1]);
    let mut out = Tensor::<bf16>::zeros(x.device(), &[rows, n]).unwrap();
    let args = rms_norm::Args {
        x: x.as_ptr().cast(),
        weight: w.as_ptr().cast(),
        out: out.as_mut_ptr().cast(),
        rows: rows as u32,
        n: n as u32,
        x_stride: n,
        out_stride: n,
        weight_offset: 0.0,
        eps: 1e-5,
    };
    // SAFETY: the tensors are as large as the arguments say, and live on.
    unsafe { stream.launch(&entry.unwrap(), &geometry, &args) }.unwrap();
    stream.synchronize().unwrap();
    all_bytes(&out.to_vec().unwrap())
}

/// The bytes of the results of an entry that adds a residual, of dense rows, and of the sums.
fn launched_fused_add(
    stream: &Stream,
    entry: Option<Entry<rms_norm::FusedAddArgs>>,
    geometry: Geometry,
    x: &Tensor<bf16>,
    w: &Tensor<bf16>,
) -> [Vec<u8>; 2] {
    let (rows, n) = (x.shape()[0], x.shape()[1]);
    let mut out = Tensor::<bf16>::zeros(x.device(), &[rows, n]).unwrap();
    let mut sum = Tensor::from_slice(x.device(), &noise_of::<bf16>(rows * n, 2), &[rows, n]).unwrap();
    let args = rms_norm::FusedAddArgs {
        x: x.as_ptr().cast(),
        residual: sum.as_ptr().cast(),
        weight: w.as_ptr().cast(),
        out: out.as_mut_ptr().cast(),
        residual_out: sum.as_mut_ptr().cast(),
        rows: rows as u32,
        n: n as u32,
        x_stride: n,
        residual_stride: n,
        out_stride: n,
        residual_out_stride: n,
        weight_offset: 0.0,
        eps: 1e-5,
    };
    // SAFETY: the tensors are as large as the arguments say, and live on.
    unsafe { stream.launch(&entry.unwrap(), &geometry, &args) }.unwrap();
    stream.synchronize().unwrap();
    [all_bytes(&out.to_vec().unwrap()), all_bytes(&sum.to_vec().unwrap())]
}

/// Rows that are held in registers where others of their variant are read twice: the results are the same bits. Of the shortest several share a block, and
/// the last one has some to spare.
#[test]
fn held_rows_are_the_same_bits() {
    on_every_device(|device, stream| {
        for (rows, n) in [(5usize, 46usize), (2, 769), (1, 9001), (1, 16392), (1, 40000)] {
            let variant = Variant::new(DType::Bf16, n as u32, n.is_multiple_of(8));
            let held = Held::new(DType::Bf16, variant, n as u32).unwrap();
            let geometry = rms_norm::held_geometry(DType::Bf16, held, rows as u32, n as u32);
            let x = Tensor::from_slice(device, &noise_of::<bf16>(rows * n, 1), &[rows, n]).unwrap();
            let (w, _) = weights::<bf16>(device, n);
            let mut out = Tensor::<bf16>::zeros(device, &[rows, n]).unwrap();
            norm::rms_norm(stream, &mut out, &x, Some(&w), 1e-5).unwrap();
            let want = launched(stream, rms_norm::entry(DType::Bf16, variant), geometry, &x, &w);
            assert_eq!(launched(stream, rms_norm::held_entry(DType::Bf16, held), geometry, &x, &w), want);
            assert_eq!(all_bytes(&out.to_vec().unwrap()), want);
            let run = |entry| launched_fused_add(stream, entry, geometry, &x, &w);
            let want = run(rms_norm::fused_add_entry(DType::Bf16, variant));
            assert_eq!(run(rms_norm::fused_add_held_entry(DType::Bf16, held)), want);
        }
    });
}

/// Blocks that take rows in turns, which are not aligned, each of them further from a multiple of 16 bytes than the one before, from one row a block to seven, the last of them fewer: the
/// bits of rows that are held, in rows without a number, too, after which a stage of the ring holds numbers again.
#[test]
fn rows_in_turns_are_the_same_bits() {
    if skipped_under_synccheck() {
        return;
    }
    on_every_device(|device, stream| {
        if skipped_without_hopper(device) {
            return;
        }
        for (rows, n, blocks) in [(7usize, 769usize, 1), (9, 1537, 2), (7, 5125, 2), (3, 8191, 3)] {
            let geometry = rms_norm::held_geometry(DType::Bf16, Held::AnyX4, rows as u32, n as u32);
            let turns = |add| rms_norm::any_ring_geometry(DType::Bf16, n as u32, add, blocks).unwrap();
            let mut x = noise_of::<bf16>(rows * n, 1);
            (x[5], x[n + 7], x[2 * n - 1]) = (bf16::NAN, bf16::INFINITY, bf16::NEG_INFINITY);
            let x = Tensor::from_slice(device, &x, &[rows, n]).unwrap();
            let (w, _) = weights::<bf16>(device, n);
            let want = launched(stream, rms_norm::held_entry(DType::Bf16, Held::AnyX4), geometry, &x, &w);
            assert!(launched(stream, rms_norm::any_ring_entry(DType::Bf16), turns(false), &x, &w) == want, "{n}");
            let run = |entry, geometry| launched_fused_add(stream, entry, geometry, &x, &w);
            let want = run(rms_norm::fused_add_held_entry(DType::Bf16, Held::AnyX4), geometry);
            assert!(run(rms_norm::fused_add_any_ring_entry(DType::Bf16), turns(true)) == want, "{n}");
        }
    });
}

/// Clusters of blocks for a row each, of which the last may have nothing to do: the bits of rows of one block, in rows without a number, too.
#[test]
fn rows_in_clusters_are_the_same_bits() {
    on_every_device(|device, stream| {
        let widths = [1032usize, 7168, 8192, 8200, 16384, 16392, 40000, 65536];
        for n in widths.into_iter().filter(|_| !skipped_without_hopper(device)) {
            let (rows, variant) = (3, Variant::new(DType::Bf16, n as u32, true));
            let held = Held::new(DType::Bf16, variant, n as u32);
            let usual = match held {
                Some(how) => rms_norm::held_geometry(DType::Bf16, how, rows as u32, n as u32),
                None => rms_norm::geometry(DType::Bf16, variant, rows as u32, n as u32),
            };
            let clusters = rms_norm::cluster_geometry(DType::Bf16, variant, rows as u32, n as u32).unwrap();
            let mut x = noise_of::<bf16>(rows * n, 1);
            (x[n + 5], x[2 * n + 7]) = (bf16::NAN, bf16::INFINITY);
            let x = Tensor::from_slice(device, &x, &[rows, n]).unwrap();
            let (w, _) = weights::<bf16>(device, n);
            let entry = match held {
                Some(how) => rms_norm::held_entry(DType::Bf16, how),
                None => rms_norm::entry(DType::Bf16, variant),
            };
            let want = launched(stream, entry, usual, &x, &w);
            let entry = rms_norm::cluster_entry(DType::Bf16, variant, n as u32);
            assert!(launched(stream, entry, clusters, &x, &w) == want, "{n}");
            let entry = match held {
                Some(how) => rms_norm::fused_add_held_entry(DType::Bf16, how),
                None => rms_norm::fused_add_entry(DType::Bf16, variant),
            };
            let want = launched_fused_add(stream, entry, usual, &x, &w);
            let entry = rms_norm::fused_add_cluster_entry(DType::Bf16, variant, n as u32);
            assert!(launched_fused_add(stream, entry, clusters, &x, &w) == want, "{n}");
        }
        for (variant, n) in [(Variant::Any, 8191), (Variant::Loop, 65544)] {
            assert!(rms_norm::cluster_geometry(DType::Bf16, variant, 1, n).is_none());
            assert!(rms_norm::cluster_entry(DType::Bf16, variant, n).is_none());
        }
        // As many blocks as a grid has, and more.
        let geometry = |rows| rms_norm::cluster_geometry(DType::Bf16, Variant::X2, rows, 8192);
        assert!(geometry((1 << 28) - 1).is_some() && geometry(1 << 28).is_none() && geometry(u32::MAX / 4).is_none());
    });
}

/// A row more than blocks take at once: rows at any place, replaced and not, of sums that lie as what they replace does and of others.
fn check_in_turns<T: Float>() {
    if skipped_under_synccheck() {
        return;
    }
    on_every_device(|device, stream| {
        let [dense, .., apart] = Place::ALL;
        let off = Place { offset: 1, gap: 0 };
        for (n, from, to) in [(1537, dense, dense), (2049, apart, off), (1801, off, apart), (2048, off, dense)] {
            let blocks = |add| rms_norm::any_ring_blocks(T::DTYPE, n as u32, add).unwrap();
            let multiprocessors = device.properties().multiprocessors;
            let rows = (blocks(false).max(blocks(true)) * multiprocessors) as usize + 1;
            let (x, r) = (noise_of::<T>(rows * n, 1), noise_of::<T>(rows * n, 7));
            let (dw, w) = weights::<T>(device, n);

            let (dx, out) = (Rows::new(device, &x, rows, n, from), Rows::<T>::poisoned(device, rows, n, to));
            norm::rms_norm(stream, &mut out.view(), &dx.view(), Some(&dw), 1e-5).unwrap();
            assert_rounded(&out.take(), &expected(&x, n, Some(&w), 1e-5), RELATIVE, 0.0);
            let (out, own) = (dx.view(), dx.view());
            norm::rms_norm(stream, &mut { out }, &own, None, 1e-5).unwrap();
            assert_rounded(&dx.take(), &expected(&x, n, None, 1e-5), RELATIVE, 0.0);

            for replaced in [true, false] {
                let (dx, dr) = (Rows::new(device, &x, rows, n, from), Rows::new(device, &r, rows, n, to));
                let (got, sums) = if replaced {
                    norm::fused_add_rms_norm(stream, &mut dx.view(), &mut dr.view(), Some(&dw), 1e-5).unwrap();
                    (dx.take(), dr.take())
                } else {
                    let (out, sum) = (dr.view(), dx.view());
                    norm::fused_add_rms_norm_to(
                        stream,
                        &mut { out },
                        &mut { sum },
                        &dx.view(),
                        &dr.view(),
                        Some(&dw),
                        1e-5,
                    )
                    .unwrap();
                    (dr.take(), dx.take())
                };
                assert_added([&got, &sums], [&x, &r], n, &w, 1e-5);
            }
        }
    });
}

#[test]
fn rows_in_turns_match_the_reference_in_f32() {
    check_in_turns::<f32>();
}
#[test]
fn rows_in_turns_match_the_reference_in_f16() {
    check_in_turns::<f16>();
}
#[test]
fn rows_in_turns_match_the_reference_in_bf16() {
    check_in_turns::<bf16>();
}

/// What an entry is compiled for, and what a multiprocessor of a Hopper GPU has.
#[test]
fn rows_in_turns_fit() {
    for dtype in [DType::F32, DType::F16, DType::Bf16] {
        for add in [false, true] {
            for n in (1..9000).step_by(61).chain([512, 513, 1024, 1025, 8192, 8193]) {
                let turns = rms_norm::any_ring_geometry(dtype, n, add, 132);
                assert_eq!(turns.is_some(), 512 < n && n <= 8192, "{n} {dtype}");
                let blocks = rms_norm::any_ring_blocks(dtype, n, add);
                assert_eq!(blocks.is_some(), turns.is_some(), "{n} {dtype}");
                let (Some(turns), Some(blocks)) = (turns, blocks) else { continue };
                let [threads, ..] = rms_norm::held_geometry(dtype, Held::AnyX4, 1, n).block;
                assert!(turns.block == [threads + 32, 1, 1] && turns.grid == [132, 1, 1], "{n} {dtype}");
                assert!(blocks > 0 && blocks * (turns.shared_bytes + 1024) <= 228 << 10, "{n} {dtype}");
                assert!(blocks * turns.block[0] <= 2048, "{n} {dtype}");
                assert!(turns.block[0] <= rms_norm::fused_add_any_ring_entry(dtype).unwrap().max_threads);
            }
        }
    }
}

/// Rows of up to four warps, by themselves and with two of them in a block, of which the last has one to spare.
#[test]
fn narrow_rows_are_the_same_bits() {
    on_every_device(|device, stream| {
        for n in [1024usize, 1720] {
            let rows = 3;
            let x = Tensor::from_slice(device, &noise_of::<bf16>(rows * n, 1), &[rows, n]).unwrap();
            let (w, _) = weights::<bf16>(device, n);
            let usual = rms_norm::geometry(DType::Bf16, Variant::X2, rows as u32, n as u32);
            let narrow = rms_norm::narrow_geometry(DType::Bf16, rows as u32, n as u32).unwrap();
            let mut twos = narrow;
            (twos.grid[0], twos.block[1]) = (2, 2);
            let (x2, add_x2) = (Variant::X2, rms_norm::fused_add_entry(DType::Bf16, Variant::X2));

            let run = |entry, geometry| launched(stream, entry, geometry, &x, &w);
            let want = run(rms_norm::entry(DType::Bf16, x2), usual);
            assert_eq!(run(rms_norm::narrow_entry(DType::Bf16), narrow), want);
            assert_eq!(run(rms_norm::narrow_entry(DType::Bf16), twos), want);

            let run = |entry, geometry| launched_fused_add(stream, entry, geometry, &x, &w);
            let want = run(add_x2, usual);
            assert_eq!(run(rms_norm::fused_add_narrow_entry(DType::Bf16), narrow), want);
            assert_eq!(run(rms_norm::fused_add_narrow_entry(DType::Bf16), twos), want);
        }
        assert!([256, 2056].iter().all(|&n| rms_norm::narrow_geometry(DType::Bf16, 1, n).is_none()));
    });
}

#[test]
fn entries_have_the_names_of_what_they_do() {
    for dtype in [DType::F32, DType::F16, DType::Bf16] {
        for (v, name) in [(Variant::X2, "x2"), (Variant::X4, "x4"), (Variant::Loop, "loop"), (Variant::Any, "any")] {
            assert_eq!(rms_norm::entry(dtype, v).unwrap().name, format!("rms_norm_{name}_{dtype}"));
            let fused = rms_norm::fused_add_entry(dtype, v).unwrap();
            assert_eq!(fused.name, format!("fused_add_rms_norm_{name}_{dtype}"));
        }
        assert_eq!(rms_norm::narrow_entry(dtype).unwrap().name, format!("rms_norm_narrow_{dtype}"));
        assert_eq!(rms_norm::fused_add_narrow_entry(dtype).unwrap().name, format!("fused_add_rms_norm_narrow_{dtype}"));
        assert_eq!(rms_norm::any_ring_entry(dtype).unwrap().name, format!("rms_norm_any_ring_{dtype}"));
        let fused = rms_norm::fused_add_any_ring_entry(dtype).unwrap();
        assert_eq!(fused.name, format!("fused_add_rms_norm_any_ring_{dtype}"));
        for (v, bytes, name) in
            [(Variant::X2, 512, "x2"), (Variant::X4, 32 << 10, "x4"), (Variant::Loop, 64 << 10, "x8")]
        {
            let n = (bytes / dtype.size()) as u32;
            let alone = rms_norm::cluster_entry(dtype, v, n).unwrap();
            assert_eq!(alone.name, format!("rms_norm_cluster_{name}_{dtype}"));
            let fused = rms_norm::fused_add_cluster_entry(dtype, v, n).unwrap();
            assert_eq!(fused.name, format!("fused_add_rms_norm_cluster_{name}_{dtype}"));
            let most = rms_norm::cluster_geometry(dtype, v, 1, n).unwrap().block[0];
            assert!(most <= alone.max_threads && most <= fused.max_threads);
        }
        for (held, name) in [(Held::AnyX4, "any_x4"), (Held::X8, "x8")] {
            assert_eq!(rms_norm::held_entry(dtype, held).unwrap().name, format!("rms_norm_{name}_{dtype}"));
            let fused = rms_norm::fused_add_held_entry(dtype, held).unwrap();
            assert_eq!(fused.name, format!("fused_add_rms_norm_{name}_{dtype}"));
        }
    }
    assert!(rms_norm::entry(DType::I32, Variant::X2).is_none());
}

/// More than 2^31 elements, of which the last row is looked at. Under a sanitizer rows are few and lie far apart, and all of them hold
/// something.
#[test]
fn large_tensors_on_a_gpu() {
    let Some((device, _turn)) = large_gpu(9) else { return };
    let stream = Stream::new(&device).unwrap();
    for n in [8192usize, 8191] {
        let (rows, stride) = if sanitizing() { (3, 1 << 30) } else { ((1 << 31) / 8191 + 2, n) };
        let x = Tensor::<bf16>::uninit(&device, &[(rows - 1) * stride + n]).unwrap();
        let x = x.as_strided(&[rows, n], &[stride, 1], 0).unwrap();
        let mut out = Tensor::<bf16>::uninit(&device, &[rows, n]).unwrap();
        let data = noise_of::<bf16>(n, 1);
        for row in if sanitizing() { 0 } else { rows - 1 }..rows {
            x.narrow(0, row, 1).unwrap().copy_from_slice(&data).unwrap();
        }
        norm::rms_norm(&stream, &mut out, &x, None, 1e-5).unwrap();
        let last = out.narrow(0, rows - 1, 1).unwrap().to_vec().unwrap();
        assert_rounded(&last, &expected(&data, n, None, 1e-5), RELATIVE, 0.0);
    }
}

#[test]
fn rows_of_nothing_are_not_gone_through() {
    on_every_device(|device, stream| {
        let none = || Tensor::<f16>::zeros(device, &[i32::MAX as usize, 0]).unwrap();
        norm::rms_norm(stream, &mut none(), &none(), None, 0.0).unwrap();
        norm::fused_add_rms_norm(stream, &mut none(), &mut none(), None, 0.0).unwrap();
        norm::layer_norm(stream, &mut none(), &none(), None, None, 0.0).unwrap();
    });
}
