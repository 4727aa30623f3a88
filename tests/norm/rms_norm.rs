use super::{LONG, widths};
use crate::rows::{Place, Rows, all_bytes, assert_rounded};
use cuda_std::Float;
use proptest::sample::select;
use warploom::norm::{self, Variant, rms_norm};
use warploom::reference::norm as reference;
use warploom::{DType, Device, Entry, Error, Geometry, Graph, Result, Stream, Tensor, bf16, f16};
use warploom_tests::{large_gpu, noise_of, on_every_device, property, sanitizing, widen};

/// Error of the sum and of the root before the result is rounded.
const RELATIVE: f64 = 1.0 / (1 << 19) as f64;

fn expected<T: Float>(x: &[T], n: usize, weight: Option<&[f64]>, eps: f64) -> Vec<f64> {
    x.chunks(n).flat_map(|row| reference::rms_norm(&widen(row), weight, eps)).collect()
}

fn weights<T: Float>(device: &Device, n: usize) -> (Tensor<T>, Vec<f64>) {
    let w = noise_of::<T>(n, 2);
    (Tensor::from_slice(device, &w, &[n]).unwrap(), widen(&w))
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
            // `1 + w` is rounded once, which shows where it is near zero.
            assert_rounded(&out.take(), &expected(&x, n, w.as_deref(), 1e-5), RELATIVE, 2f64.powi(-21));
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
        for i in 0..rows {
            let row = i * n..(i + 1) * n;
            let (want, rounded) = reference::fused_add_rms_norm(&x[row.clone()], &r[row.clone()], Some(&w), 1e-6);
            assert_eq!(all_bytes(&sum[row.clone()]), all_bytes(&rounded), "the sum is rounded once");
            assert_rounded(&out[row], &want, RELATIVE, 2f64.powi(-21));
        }
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
        for n in LONG.into_iter().chain([40000]) {
            let (x, r) = (noise_of::<bf16>(n, 1), noise_of::<bf16>(n, 7));
            let (dx, mut dr) =
                (Tensor::from_slice(device, &x, &[1, n]).unwrap(), Tensor::from_slice(device, &r, &[1, n]).unwrap());
            let (dw, w) = weights::<bf16>(device, n);
            let mut out = Tensor::<bf16>::uninit(device, &[1, n]).unwrap();
            norm::rms_norm(stream, &mut out, &dx, Some(&dw), 1e-5).unwrap();
            assert_rounded(&out.to_vec().unwrap(), &expected(&x, n, Some(&w), 1e-5), RELATIVE, 0.0);
            let mut out = dx;
            norm::fused_add_rms_norm(stream, &mut out, &mut dr, Some(&dw), 1e-5).unwrap();
            let (want, sum) = reference::fused_add_rms_norm(&x, &r, Some(&w), 1e-5);
            assert_rounded(&out.to_vec().unwrap(), &want, RELATIVE, 0.0);
            assert_eq!(all_bytes(&dr.to_vec().unwrap()), all_bytes(&sum));
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
    assert!(matches!(norm::rms_norm(&stream, &mut bytes.clone(), &bytes, None, 0.0), Err(Error::Unsupported { .. })));
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

/// Rows that go one by one are held in registers where they fit, and read twice elsewhere: the results are the same bits.
#[test]
fn rows_one_by_one_are_the_same_bits() {
    on_every_device(|device, stream| {
        let (rows, n) = (2, 769);
        assert!(rms_norm::is_held_one_by_one(n as u32));
        let x = Tensor::from_slice(device, &noise_of::<bf16>(rows * n, 1), &[rows, n]).unwrap();
        let (w, _) = weights::<bf16>(device, n);
        let mut held = Tensor::<bf16>::zeros(device, &[rows, n]).unwrap();
        norm::rms_norm(stream, &mut held, &x, Some(&w), 1e-5).unwrap();
        let geometry = rms_norm::geometry(DType::Bf16, Variant::Any, rows as u32, n as u32);
        let read_twice = launched(stream, rms_norm::entry(DType::Bf16, Variant::Any), geometry, &x, &w);
        assert_eq!(all_bytes(&held.to_vec().unwrap()), read_twice);
    });
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

            let run = |entry: Option<Entry<rms_norm::FusedAddArgs>>, geometry: Geometry| {
                let mut out = Tensor::<bf16>::zeros(device, &[rows, n]).unwrap();
                let mut sum = Tensor::from_slice(device, &noise_of::<bf16>(rows * n, 2), &[rows, n]).unwrap();
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
            };
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
        assert_eq!(rms_norm::any_x4_entry(dtype).unwrap().name, format!("rms_norm_any_x4_{dtype}"));
        assert_eq!(rms_norm::fused_add_any_x4_entry(dtype).unwrap().name, format!("fused_add_rms_norm_any_x4_{dtype}"));
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
