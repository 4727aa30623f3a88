use super::{HELD, LONG, widths};
use crate::far::FAR;
use crate::rows::{Place, Rows, WIDTHS, all_bytes, assert_rounded, vector};
use cuda_std::Float;
use proptest::prelude::*;
use proptest::sample::select;
use warploom::kernels::norm::rms_norm_any_ring as any_ring;
use warploom::norm::rms_norm::any_ring_geometry;
use warploom::norm::{self, Held, Variant, layer_norm};
use warploom::reference::norm as reference;
use warploom::{DType, Device, Entry, Error, Geometry, Graph, Stream, Tensor, bf16, f16};
use warploom_tests::{
    noise, noise_of, on_every_device, property, skipped_under_synccheck, skipped_without_hopper, widen,
};

/// Numbers around `centre`.
fn values<T: Float>(n: usize, centre: f32) -> Vec<T> {
    noise(n, 3).into_iter().map(|v| T::from_f32(centre + v)).collect()
}

/// Asserts rows of results. The mean carries the error of its sum, which matters where the row is far from zero.
#[track_caller]
fn check_rows<T: Float>(got: &[T], x: &[T], n: usize, weight: Option<&[f64]>, bias: Option<&[f64]>, centre: f32) {
    for (got, x) in got.chunks(n).zip(x.chunks(n)) {
        let want = reference::layer_norm(&widen(x), weight, bias, 1e-5);
        let spread = reference::layer_norm(&widen(x), None, None, 1e-5)[0].abs()
            / (x[0].to_f32() as f64 - widen(x).iter().sum::<f64>() / n as f64).abs().max(1e-9);
        let absolute = (centre.abs() as f64 + 1.0) * 2f64.powi(-21) * spread.clamp(1.0, 400.0) + 2f64.powi(-20);
        assert_rounded(got, &want, 2f64.powi(-19), absolute);
    }
}

fn check<T: Float>() {
    let place = || select(Place::ALL.to_vec());
    let with = (any::<bool>(), any::<bool>(), select(vec![0.0f32, 20.0]));
    property(24, (0usize..5, widths(), place(), place(), with), |device, stream, (rows, n, from, to, with)| {
        let (weighted, biased, centre) = with;
        let x = values::<T>(rows * n, centre);
        let (input, out) = (Rows::new(device, &x, rows, n, from), Rows::<T>::poisoned(device, rows, n, to));
        let (w, b) = (noise_of::<T>(n, 5), noise_of::<T>(n, 6));
        let vector = |v: &[T]| Tensor::from_slice(device, v, &[n]).unwrap();
        let (dw, db) = (weighted.then(|| vector(&w)), biased.then(|| vector(&b)));
        norm::layer_norm(stream, &mut out.view(), &input.view(), dw.as_ref(), db.as_ref(), 1e-5).unwrap();
        let (w, b) = (weighted.then(|| widen(&w)), biased.then(|| widen(&b)));
        check_rows(&out.take(), &x, n, w.as_deref(), b.as_deref(), centre);
        Ok(())
    });
}

#[test]
fn matches_the_reference() {
    check::<f32>();
    check::<f16>();
    check::<bf16>();
}

#[test]
fn rows_of_every_length() {
    on_every_device(|device, stream| {
        for n in LONG.into_iter().chain([65544]) {
            let (x, w, b) = (values::<bf16>(n, 2.0), noise_of::<bf16>(n, 5), noise_of::<bf16>(n, 6));
            let t = Tensor::from_slice(device, &x, &[1, n]).unwrap();
            let vector = |v: &[bf16]| Tensor::from_slice(device, v, &[n]).unwrap();
            norm::layer_norm(stream, &mut t.clone(), &t, Some(&vector(&w)), Some(&vector(&b)), 1e-5).unwrap();
            check_rows(&t.to_vec().unwrap(), &x, n, Some(&widen(&w)), Some(&widen(&b)), 2.0);
        }
    });
}

fn check_held<T: Float>() {
    on_every_device(|device, stream| {
        for (n, rows) in HELD {
            let x = values::<T>(rows * n, 2.0);
            // Aligned rows as they are; others neither at an aligned address nor at such a distance.
            let place = if n.is_multiple_of(8) { Place::DENSE } else { Place { offset: 3, gap: 6 } };
            let (input, out) = (Rows::new(device, &x, rows, n, place), Rows::<T>::poisoned(device, rows, n, place));
            let (w, b) = (noise_of::<T>(n, 5), noise_of::<T>(n, 6));
            let vector = |v: &[T]| Tensor::from_slice(device, v, &[n]).unwrap();
            let (dw, db) = (vector(&w), vector(&b));
            norm::layer_norm(stream, &mut out.view(), &input.view(), Some(&dw), Some(&db), 1e-5).unwrap();
            check_rows(&out.take(), &x, n, Some(&widen(&w)), Some(&widen(&b)), 2.0);
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

#[test]
fn widths_that_peers_get_wrong() {
    fn check<T: Float>(device: &Device, stream: &Stream) {
        for n in WIDTHS {
            let (x, w, b) = (values::<T>(2 * n, 2.0), noise_of::<T>(n, 5), noise_of::<T>(n, 6));
            let t = Tensor::from_slice(device, &x, &[2, n]).unwrap();
            let (dw, db) = (vector(device, &w, 0), vector(device, &b, 0));
            norm::layer_norm(stream, &mut t.clone(), &t, Some(&dw), Some(&db), 1e-5).unwrap();
            check_rows(&t.to_vec().unwrap(), &x, n, Some(&widen(&w)), Some(&widen(&b)), 2.0);
        }
    }
    on_every_device(|device, stream| {
        check::<f32>(device, stream);
        check::<bf16>(device, stream);
    });
}

/// Everything in whole pieces but for where the weights, or the biases, begin.
#[test]
fn weights_and_biases_that_begin_off_a_piece() {
    on_every_device(|device, stream| {
        for n in [256, 768, 4096, 8200] {
            let (x, w, b) = (values::<bf16>(n, 2.0), noise_of::<bf16>(n, 5), noise_of::<bf16>(n, 6));
            for [at_w, at_b] in [[1, 0], [0, 1]] {
                let t = Tensor::from_slice(device, &x, &[1, n]).unwrap();
                let (dw, db) = (vector(device, &w, at_w), vector(device, &b, at_b));
                norm::layer_norm(stream, &mut t.clone(), &t, Some(&dw), Some(&db), 1e-5).unwrap();
                check_rows(&t.to_vec().unwrap(), &x, n, Some(&widen(&w)), Some(&widen(&b)), 2.0);
            }
        }
    });
}

/// Rows more than 2^31 elements apart: the same bits as in a small tensor.
#[test]
fn rows_far_apart() {
    FAR.on_every_device(10, |device, stream, rows| {
        for n in [256, 769] {
            let x = values::<bf16>(rows * n, 2.0);
            let near = Tensor::from_slice(device, &x, &[rows, n]).unwrap();
            let (far_x, far_out) = (FAR.rows(device, &x, n), FAR.memory::<bf16>(device, rows, n));
            norm::layer_norm(stream, &mut near.clone(), &near, None, None, 1e-5).unwrap();
            norm::layer_norm(stream, &mut FAR.view(&far_out, n), &FAR.view(&far_x, n), None, None, 1e-5).unwrap();
            assert_eq!(FAR.read(&far_out, n), near.to_vec().unwrap());
        }
    });
}

/// A row far from zero: the variance must not cancel.
#[test]
fn far_from_zero() {
    on_every_device(|device, stream| {
        let x: Vec<f32> = (0..256).map(|i| 4096.0 + (i % 2) as f32).collect();
        let dx = Tensor::from_slice(device, &x, &[1, 256]).unwrap();
        let mut out = Tensor::<f32>::uninit(device, &[1, 256]).unwrap();
        norm::layer_norm(stream, &mut out, &dx, None, None, 0.0).unwrap();
        for (i, v) in out.to_vec().unwrap().into_iter().enumerate() {
            assert!((v - if i % 2 == 0 { -1.0 } else { 1.0 }).abs() < 1e-5, "element {i}: {v}");
        }
    });
}

/// Rows all of whose elements are the same are nothing but zeroes, as long as their sum is exact: the mean is not off by a rounding of a reciprocal, which a small `eps` would magnify.
#[test]
fn the_same_everywhere() {
    fn check<T: Float>(device: &Device, stream: &Stream) {
        for (n, value) in [
            (1, 60000.0),
            (3, 1000.0),
            (7, 60000.0),
            (7, 1000.0),
            (46, 49.0),
            (769, 1000.0),
            (3584, 3.0),
            (5125, 1024.0),
            (40000, 1.0),
        ] {
            let x = Tensor::from_slice(device, &vec![T::from_f32(value); 2 * n], &[2, n]).unwrap();
            let mut out = Tensor::<T>::uninit(device, &[2, n]).unwrap();
            norm::layer_norm(stream, &mut out, &x, None, None, 1e-5).unwrap();
            assert!(out.to_vec().unwrap().iter().all(|v| v.to_f32() == 0.0), "{n} times {value} in {}", T::DTYPE);
        }
    }
    on_every_device(|device, stream| {
        check::<f32>(device, stream);
        check::<f16>(device, stream);
        check::<bf16>(device, stream);
    });
}

#[test]
fn not_a_number_zeros_and_nothing() {
    on_every_device(|device, stream| {
        let mut x = vec![1.0f32; 3 * 40];
        x[7] = f32::NAN;
        x[47] = f32::INFINITY;
        let dx = Tensor::from_slice(device, &x, &[3, 40]).unwrap();
        let mut out = Tensor::<f32>::uninit(device, &[3, 40]).unwrap();
        norm::layer_norm(stream, &mut out, &dx, None, None, 1e-5).unwrap();
        let out = out.to_vec().unwrap();
        assert!(out[..80].iter().all(|v| v.is_nan()) && out[80..].iter().all(|v| *v == 0.0));
        for shape in [[0, 8], [8, 0]] {
            let t = Tensor::<f16>::uninit(device, &shape).unwrap();
            norm::layer_norm(stream, &mut t.clone(), &t, None, None, 1e-5).unwrap();
        }
    });
}

#[test]
fn captures_and_repeats_bit_for_bit() {
    on_every_device(|device, stream| {
        device.preload(&["norm"]).unwrap();
        let mut x = Tensor::<f16>::uninit(device, &[5, 776]).unwrap();
        let mut out = Tensor::<f16>::uninit(device, &[5, 776]).unwrap();
        let graph = Graph::capture(stream, |s| norm::layer_norm(s, &mut out, &x, None, None, 1e-5)).unwrap();
        let mut run = |centre| {
            stream.fill_bytes(&mut out, 0xff).unwrap();
            stream.synchronize().unwrap();
            x.copy_from_slice(&values::<f16>(5 * 776, centre)).unwrap();
            graph.launch(stream).unwrap();
            all_bytes(&out.to_vec().unwrap())
        };
        let (first, second, again) = (run(0.0), run(3.0), run(0.0));
        assert!(first == again && first != second);
    });
}

#[test]
fn refuses_what_it_cannot_do() {
    let device = Device::simt();
    let stream = Stream::new(&device).unwrap();
    let tensor = |shape: &[usize]| Tensor::<f32>::zeros(&device, shape).unwrap();
    let (x, mut out, w) = (tensor(&[4, 32]), tensor(&[4, 32]), tensor(&[32]));
    let e = norm::layer_norm(&stream, &mut tensor(&[4, 16]), &x, None, None, 0.0).unwrap_err();
    assert!(matches!(e, Error::Shape { arg: "out", .. }));
    let e = norm::layer_norm(&stream, &mut out, &x, Some(&tensor(&[1, 32])), None, 0.0).unwrap_err();
    assert!(matches!(e, Error::Shape { arg: "weight", .. }));
    let e = norm::layer_norm(&stream, &mut out, &x, Some(&w), Some(&tensor(&[33])), 0.0).unwrap_err();
    assert!(matches!(e, Error::Shape { arg: "bias", .. }));
    let e = norm::layer_norm(&stream, &mut out, &x, None, None, f32::NAN).unwrap_err();
    assert!(matches!(e, Error::Value { arg: "eps", .. }));
    let row = out.narrow(0, 0, 1).unwrap().reshape(&[32]).unwrap();
    let e = norm::layer_norm(&stream, &mut out, &x, None, Some(&row), 0.0).unwrap_err();
    assert!(matches!(e, Error::Overlap { first: "out", second: "bias", .. }));
    let columns = x.as_strided(&[4, 32], &[1, 4], 0).unwrap();
    let e = norm::layer_norm(&stream, &mut out, &columns, None, None, 0.0).unwrap_err();
    assert!(matches!(e, Error::Stride { arg: "x", .. }));
}

/// The entry for many rows, which takes over where a property test does not get to, gives the same bits as the other; so do those for rows that
/// are held where others of their variant are read again.
#[test]
fn other_entries_are_the_same_bits() {
    on_every_device(|device, stream| {
        for (rows, n) in [(5, 46), (2, 769), (2, 2056), (2, 4096), (1, 16392), (1, 40000)] {
            let (x, w, b) = (values::<bf16>(rows * n, 2.0), noise_of::<bf16>(n, 5), noise_of::<bf16>(n, 6));
            let x = Tensor::from_slice(device, &x, &[rows, n]).unwrap();
            let [w, b] = [w, b].map(|v| Tensor::from_slice(device, &v, &[n]).unwrap());
            let mut want = Tensor::<bf16>::zeros(device, &[rows, n]).unwrap();
            norm::layer_norm(stream, &mut want, &x, Some(&w), Some(&b), 1e-5).unwrap();
            let variant = layer_norm::variant(DType::Bf16, n as u32, n.is_multiple_of(8));
            let entry = match variant {
                Variant::X4 => layer_norm::many_entry(DType::Bf16),
                other => layer_norm::entry(DType::Bf16, other),
            };
            let geometry = match Held::new(DType::Bf16, variant, n as u32) {
                Some(held) => layer_norm::held_geometry(DType::Bf16, held, rows as u32, n as u32),
                None => layer_norm::geometry(DType::Bf16, variant, rows as u32, n as u32),
            };
            assert!(geometry.block[1] == 1 || variant == Variant::Any);
            assert_eq!(launched(stream, entry, geometry, &x, Some([&w, &b])), all_bytes(&want.to_vec().unwrap()));
        }
    });
}

/// The bytes of the results of an entry, of dense rows, with weights and biases or without.
fn launched(
    stream: &Stream,
    entry: Option<Entry<layer_norm::Args>>,
    geometry: Geometry,
    x: &Tensor<bf16>,
    with: Option<[&Tensor<bf16>; 2]>,
) -> Vec<u8> {
    let (rows, n) = (x.shape()[0], x.shape()[1]);
    let mut out = Tensor::<bf16>::zeros(x.device(), &[rows, n]).unwrap();
    let [weight, bias] = with.map_or([std::ptr::null(); 2], |with| with.map(|vector| vector.as_ptr().cast()));
    let args = layer_norm::Args {
        x: x.as_ptr().cast(),
        weight,
        bias,
        out: out.as_mut_ptr().cast(),
        rows: rows as u32,
        n: n as u32,
        x_stride: n,
        out_stride: n,
        eps: 1e-5,
    };
    // SAFETY: the tensors are as large as the arguments say, and live on.
    unsafe { stream.launch(&entry.unwrap(), &geometry, &args) }.unwrap();
    stream.synchronize().unwrap();
    all_bytes(&out.to_vec().unwrap())
}

/// Blocks that take rows in turns, each of them further from a multiple of 16 bytes than the one before, from one row a block to nine, the last of them fewer: the bits of rows that are held,
/// in rows without a number, too, after which a stage of the ring holds numbers again.
#[test]
fn rows_in_turns_are_the_same_bits() {
    if skipped_under_synccheck() {
        return;
    }
    on_every_device(|device, stream| {
        if skipped_without_hopper(device) {
            return;
        }
        for (rows, n, blocks) in [(9usize, 769usize, 1), (9, 1537, 2), (7, 5125, 2), (3, 8191, 3)] {
            let geometry = layer_norm::held_geometry(DType::Bf16, Held::AnyX4, rows as u32, n as u32);
            let turns = any_ring_geometry(DType::Bf16, n as u32, false, blocks).unwrap();
            let mut x = values::<bf16>(rows * n, 2.0);
            (x[5], x[n + 7], x[2 * n - 1]) = (bf16::NAN, bf16::INFINITY, bf16::NEG_INFINITY);
            let x = Tensor::from_slice(device, &x, &[rows, n]).unwrap();
            let [w, b] = [5, 6].map(|seed| vector(device, &noise_of::<bf16>(n, seed), 0));
            for with in [Some([&w, &b]), None] {
                let want = launched(stream, layer_norm::held_entry(DType::Bf16, Held::AnyX4), geometry, &x, with);
                let got = launched(stream, layer_norm::any_ring_entry(DType::Bf16), turns, &x, with);
                assert!(got == want, "{n}");
            }
        }
    });
}

/// A row more than there are at once in blocks of their own, from which on those of 16 bits are taken in turns: rows at any place, replaced and not.
fn check_in_turns<T: Float>() {
    if skipped_under_synccheck() {
        return;
    }
    on_every_device(|device, stream| {
        let [dense, .., apart] = Place::ALL;
        let off = Place { offset: 1, gap: 0 };
        for (n, from, to) in [(1537, dense, dense), (2049, apart, off), (1801, off, apart), (2048, off, dense)] {
            let threads = any_ring_geometry(T::DTYPE, n as u32, false, 1).unwrap().block[0] - any_ring::MOVERS;
            assert!(threads > 64);
            let rows = (any_ring::THREADS / threads * device.properties().multiprocessors) as usize + 1;
            let x = values::<T>(rows * n, 2.0);
            let (w, b) = (noise_of::<T>(n, 5), noise_of::<T>(n, 6));
            let (dw, db) = (vector(device, &w, 0), vector(device, &b, 1));
            let (dx, out) = (Rows::new(device, &x, rows, n, from), Rows::<T>::poisoned(device, rows, n, to));
            norm::layer_norm(stream, &mut out.view(), &dx.view(), Some(&dw), Some(&db), 1e-5).unwrap();
            check_rows(&out.take(), &x, n, Some(&widen(&w)), Some(&widen(&b)), 2.0);
            norm::layer_norm(stream, &mut dx.view(), &dx.view(), None, None, 1e-5).unwrap();
            check_rows(&dx.take(), &x, n, None, None, 2.0);
        }
    });
}

#[test]
fn rows_in_turns_match_the_reference() {
    check_in_turns::<f32>();
    check_in_turns::<f16>();
    check_in_turns::<bf16>();
}

/// Clusters of blocks for a row each, of which the last may have nothing to do: the bits of rows of one block, in rows without a number, too.
#[test]
fn rows_in_clusters_are_the_same_bits() {
    on_every_device(|device, stream| {
        let widths = [2056usize, 4096, 7168, 8192, 8200, 12288, 16384];
        for n in widths.into_iter().filter(|_| !skipped_without_hopper(device)) {
            let (rows, variant) = (3, layer_norm::variant(DType::Bf16, n as u32, true));
            let mut x = values::<bf16>(rows * n, 2.0);
            (x[n + 5], x[3 * n - 1]) = (bf16::NAN, bf16::INFINITY);
            let (x, w) =
                (Tensor::from_slice(device, &x, &[rows, n]).unwrap(), vector(device, &noise_of::<bf16>(n, 5), 0));
            let b = vector(device, &noise_of::<bf16>(n, 6), 0);
            let usual = layer_norm::geometry(DType::Bf16, variant, rows as u32, n as u32);
            let clusters = layer_norm::cluster_geometry(DType::Bf16, variant, rows as u32, n as u32).unwrap();
            let run = |entry, geometry, with: bool| launched(stream, entry, geometry, &x, with.then_some([&w, &b]));
            for with in [true, false] {
                let want = run(layer_norm::entry(DType::Bf16, variant), usual, with);
                assert!(run(layer_norm::cluster_entry(DType::Bf16), clusters, with) == want, "{n}");
            }
        }
        for (variant, n) in [(Variant::X2, 1024), (Variant::Any, 8191), (Variant::Loop, 16392)] {
            assert!(layer_norm::cluster_geometry(DType::Bf16, variant, 1, n).is_none());
        }
        assert!(layer_norm::cluster_geometry(DType::Bf16, Variant::X4, u32::MAX / 4, 8192).is_none());
    });
}

/// What decides how rows are launched: few long rows in clusters, more in blocks of their own, to the same bits.
#[test]
fn few_rows_are_the_same_bits_as_many() {
    fn check<T: Float>(device: &Device, stream: &Stream, n: usize) {
        let few = values::<T>(3 * n, 2.0);
        let mut many = few.clone();
        many.resize(80 * n, T::from_f32(1.0));
        let (w, b) = (vector(device, &noise_of::<T>(n, 5), 0), vector(device, &noise_of::<T>(n, 6), 0));
        let run = |x: &[T]| {
            let x = Tensor::from_slice(device, x, &[x.len() / n, n]).unwrap();
            norm::layer_norm(stream, &mut x.clone(), &x, Some(&w), Some(&b), 1e-5).unwrap();
            all_bytes(&x.to_vec().unwrap())
        };
        let got = run(&few);
        assert!(run(&many)[..got.len()] == got, "{} {n}", T::DTYPE);
    }
    on_every_device(|device, stream| {
        check::<bf16>(device, stream, 16384);
        check::<f16>(device, stream, 12288);
        check::<f32>(device, stream, 8192);
    });
}

/// Halves of a row far from each other: the warps' means are far from the row's. An infinity anywhere, and the row is no number.
#[test]
fn parts_far_from_each_other() {
    on_every_device(|device, stream| {
        let n = 4096;
        let mut x: Vec<f32> =
            (0..2 * n).map(|i| (if i % n < n / 2 { 100.0 } else { -100.0 }) + (i % 3) as f32).collect();
        x[2 * n - 1] = f32::INFINITY;
        let dx = Tensor::from_slice(device, &x, &[2, n]).unwrap();
        let mut out = Tensor::<f32>::uninit(device, &[2, n]).unwrap();
        norm::layer_norm(stream, &mut out, &dx, None, None, 0.0).unwrap();
        let (got, want) = (out.to_vec().unwrap(), reference::layer_norm(&widen(&x[..n]), None, None, 0.0));
        assert!(got[..n].iter().zip(want).all(|(got, want)| (*got as f64 - want).abs() < 1e-6));
        assert!(got[n..].iter().all(|v| v.is_nan()));
    });
}

/// A number so large that the squares are beyond f32, and in some kernels the sum of distances, too: zeros in all of them.
#[test]
fn squares_beyond_f32() {
    on_every_device(|device, stream| {
        for n in [256, 768, 2048, 4096, 8192, 16384, 40_000] {
            for (offset, pitch) in [(0, n), (1, n + 1)] {
                let mut x = vec![0.5f32; offset + 2 * pitch];
                x[offset] = 3e38;
                x[offset + pitch + n / 3] = -1e38;
                let all = Tensor::from_slice(device, &x, &[x.len()]).unwrap();
                let x = all.as_strided(&[2, n], &[pitch, 1], offset).unwrap();
                let mut out = Tensor::<f32>::uninit(device, &[2, n]).unwrap();
                norm::layer_norm(stream, &mut out, &x, None, None, 1e-5).unwrap();
                assert!(out.to_vec().unwrap().iter().all(|&v| v == 0.0), "{n}, from {offset}");
            }
        }
    });
}

#[test]
fn entries_have_the_names_of_what_they_do() {
    for dtype in [DType::F32, DType::F16, DType::Bf16] {
        assert_eq!(layer_norm::many_entry(dtype).unwrap().name, format!("layer_norm_x4_many_{dtype}"));
        let cluster = layer_norm::cluster_entry(dtype).unwrap();
        assert_eq!(cluster.name, format!("layer_norm_cluster_x4_{dtype}"));
        let in_turns = layer_norm::any_ring_entry(dtype);
        assert_eq!(in_turns.is_some(), dtype != DType::F32);
        if let Some(in_turns) = in_turns {
            assert_eq!(in_turns.name, format!("layer_norm_any_ring_{dtype}"));
            assert!(any_ring_geometry(dtype, 8192, false, 1).unwrap().block[0] <= in_turns.max_threads);
        }
        let n = (32 << 10) / dtype.size() as u32;
        assert!(layer_norm::cluster_geometry(dtype, Variant::X4, 1, n).unwrap().block[0] <= cluster.max_threads);
        for (held, name) in [(Held::AnyX4, "any_x4"), (Held::X8, "x8")] {
            assert_eq!(layer_norm::held_entry(dtype, held).unwrap().name, format!("layer_norm_{name}_{dtype}"));
        }
        for (v, name) in [(Variant::X2, "x2"), (Variant::X4, "x4"), (Variant::Loop, "loop"), (Variant::Any, "any")] {
            assert_eq!(layer_norm::entry(dtype, v).unwrap().name, format!("layer_norm_{name}_{dtype}"));
        }
    }
}
