use crate::far::FAR;
use crate::rows::{Place, Rows, WIDTHS, all_bytes, assert_rounded};
use cuda_std::Float;
use proptest::prelude::*;
use proptest::sample::select;
use warploom::activation::{self, Plain, plain};
use warploom::reference::activation as reference;
use warploom::{DType, Device, Error, Graph, Result, Stream, Tensor, bf16, f16};
use warploom_tests::{noise, on_every_device, property, widen};

type Function<T> = fn(&Stream, &mut Tensor<T>, &Tensor<T>) -> Result<()>;

/// Each function with its definition and its error in units in the last place, in f32.
fn functions<T: Float>() -> [(Function<T>, Plain, f64); 7] {
    [
        (activation::silu, Plain::Silu, 4.0),
        (activation::gelu, Plain::Gelu, 8.0),
        (activation::gelu_tanh, Plain::GeluTanh, 4.0),
        (activation::gelu_new, Plain::GeluTanh, 4.0),
        (activation::gelu_fast, Plain::GeluTanh, 4.0),
        (activation::gelu_quick, Plain::GeluQuick, 4.0),
        (activation::relu2, Plain::Relu2, 1.0),
    ]
}

/// What the documentation of the module states.
fn check_values<T: Float>(got: &[T], x: &[T], function: Plain, ulps: f64) {
    let want = reference::plain(function, &widen(x));
    if T::DTYPE == DType::F32 {
        for ((got, want), x) in got.iter().zip(want).zip(widen(x)) {
            // The exponential magnifies the rounding of an argument that is a product.
            let argument = match function {
                Plain::GeluTanh => 1.6 * x * (1.0 + 0.045 * x * x),
                Plain::GeluQuick => 1.702 * x,
                _ => 0.0,
            };
            let relative = (ulps + 2.0 * argument.abs().min(110.0)) * 2f64.powi(-23);
            // The exponential itself may be subnormal.
            assert_rounded(&[*got], &[want], relative, x.abs().clamp(1.0, 110.0) * 2f64.powi(-149));
        }
    } else {
        // A sigmoid below 2^-126 is flushed, which is multiplied by an x of at most 88.
        assert_rounded(got, &want, 2f64.powi(-15), 2f64.powi(-119));
    }
}

fn check<T: Float>() {
    let place = || select(Place::ALL.to_vec());
    let widths = prop_oneof![select(vec![1usize, 7, 46, 80, 768, 769, 3584]), 1usize..300];
    property(12, (0usize..4, widths, place(), place(), 0usize..7), |device, stream, (rows, d, from, to, which)| {
        let x: Vec<T> = noise(rows * d, 7).iter().map(|v| T::from_f32(v * 4.0)).collect();
        let input = Rows::new(device, &x, rows, d, from);
        let out = Rows::<T>::poisoned(device, rows, d, to);
        let (function, definition, ulps) = functions::<T>()[which];
        function(stream, &mut out.view(), &input.view()).unwrap();
        check_values(&out.take(), &x, definition, ulps);
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
fn widths_that_peers_get_wrong() {
    fn check<T: Float>(device: &Device, stream: &Stream, d: usize, which: usize) {
        let x: Vec<T> = noise(2 * d, 7).iter().map(|v| T::from_f32(v * 4.0)).collect();
        let dx = Tensor::from_slice(device, &x, &[2, d]).unwrap();
        let mut out = Tensor::<T>::uninit(device, &[2, d]).unwrap();
        let (function, definition, ulps) = functions::<T>()[which];
        function(stream, &mut out, &dx).unwrap();
        check_values(&out.to_vec().unwrap(), &x, definition, ulps);
    }
    on_every_device(|device, stream| {
        for (i, d) in WIDTHS.into_iter().enumerate() {
            // All functions in turn.
            check::<bf16>(device, stream, d, i % 7);
            check::<f16>(device, stream, d, (i + 2) % 7);
            check::<f32>(device, stream, d, (i + 4) % 7);
        }
    });
}

/// Rows more than 2^31 elements apart: the same bits as in a small tensor.
#[test]
fn rows_far_apart() {
    FAR.on_every_device(10, |device, stream, rows| {
        for (d, which) in [(256, 0), (257, 5)] {
            let x: Vec<bf16> = noise(rows * d, 7).iter().map(|v| bf16::from_f32(v * 4.0)).collect();
            let near = Tensor::from_slice(device, &x, &[rows, d]).unwrap();
            let mut near_out = Tensor::<bf16>::uninit(device, &[rows, d]).unwrap();
            let (far_x, far_out) = (FAR.rows(device, &x, d), FAR.memory::<bf16>(device, rows, d));
            let (function, ..) = functions::<bf16>()[which];
            function(stream, &mut near_out, &near).unwrap();
            function(stream, &mut FAR.view(&far_out, d), &FAR.view(&far_x, d)).unwrap();
            assert_eq!(all_bytes(&FAR.read(&far_out, d)), all_bytes(&near_out.to_vec().unwrap()));
        }
    });
}

#[test]
fn captures_and_repeats_bit_for_bit() {
    on_every_device(|device, stream| {
        device.preload(&["activation"]).unwrap();
        let (rows, d) = (5, 264);
        let values = |seed| noise(rows * d, seed).into_iter().map(bf16::from_f32).collect::<Vec<_>>();
        let mut x = Tensor::<bf16>::uninit(device, &[rows, d]).unwrap();
        let mut out = Tensor::<bf16>::uninit(device, &[rows, d]).unwrap();
        for (function, ..) in functions::<bf16>() {
            x.copy_from_slice(&values(3)).unwrap();
            function(stream, &mut out, &x).unwrap();
            let first = all_bytes(&out.to_vec().unwrap());
            let graph = Graph::capture(stream, |s| function(s, &mut out, &x)).unwrap();
            for seed in [3, 4, 3] {
                stream.fill_bytes(&mut out, 0xff).unwrap();
                stream.synchronize().unwrap();
                x.copy_from_slice(&values(seed)).unwrap();
                graph.launch(stream).unwrap();
                assert_eq!(all_bytes(&out.to_vec().unwrap()) == first, seed == 3);
            }
        }
    });
}

fn every_value<T: Float>(from_bits: fn(u16) -> T) {
    on_every_device(|device, stream| {
        let x: Vec<T> = (0..=u16::MAX).map(from_bits).collect();
        let dx = Tensor::from_slice(device, &x, &[x.len()]).unwrap();
        let mut out = Tensor::<T>::uninit(device, &[x.len()]).unwrap();
        for (function, definition, ulps) in functions::<T>() {
            function(stream, &mut out, &dx).unwrap();
            check_values(&out.to_vec().unwrap(), &x, definition, ulps);
        }
    });
}

#[test]
fn every_value_in_f16() {
    every_value(f16::from_bits);
}

#[test]
fn every_value_in_bf16() {
    every_value(bf16::from_bits);
}

/// Numbers of every magnitude that f32 has, and of those where the functions bend.
#[test]
fn all_magnitudes_in_f32() {
    on_every_device(|device, stream| {
        let bits = (0..16384u32).map(|i| f32::from_bits(i << 18 | i.wrapping_mul(0x9e37_79b9) >> 14));
        let bends = noise(16384, 3).into_iter().enumerate().map(|(i, v)| v * [1.0, 4.0, 14.0, 104.0][i % 4]);
        let x: Vec<f32> = bits.chain(bends).collect();
        let dx = Tensor::from_slice(device, &x, &[8, x.len() / 8]).unwrap();
        let mut out = Tensor::<f32>::uninit(device, dx.shape()).unwrap();
        for (function, definition, ulps) in functions::<f32>() {
            function(stream, &mut out, &dx).unwrap();
            check_values(&out.to_vec().unwrap(), &x, definition, ulps);
        }
    });
}

#[test]
fn two_runs_give_the_same_bits_and_nothing_is_a_no_op() {
    on_every_device(|device, stream| {
        let x = Tensor::from_slice(device, &noise(1000, 1), &[10, 100]).unwrap();
        let run = || {
            let mut out = Tensor::<f32>::uninit(device, &[10, 100]).unwrap();
            activation::gelu(stream, &mut out, &x).unwrap();
            all_bytes(&out.to_vec().unwrap())
        };
        assert_eq!(run(), run());
        for shape in [[0, 8], [8, 0]] {
            let x = Tensor::<f32>::uninit(device, &shape).unwrap();
            activation::relu2(stream, &mut Tensor::uninit(device, &shape).unwrap(), &x).unwrap();
        }
    });
}

#[test]
fn refuses_what_it_cannot_do() {
    let (device, other) = (Device::simt(), Device::simt());
    let stream = Stream::new(&device).unwrap();
    let x = Tensor::<f32>::zeros(&device, &[4, 8]).unwrap();
    let refused = |out: &mut Tensor<f32>, x: &Tensor<f32>| activation::silu(&stream, out, x).unwrap_err();
    let mut wrong = Tensor::<f32>::zeros(&device, &[8, 4]).unwrap();
    assert!(matches!(refused(&mut wrong, &x), Error::Shape { arg: "x", .. }));
    assert!(matches!(refused(&mut x.clone(), &x), Error::Overlap { first: "out", second: "x", .. }));
    let columns = x.as_strided(&[8, 4], &[1, 8], 0).unwrap();
    assert!(matches!(refused(&mut wrong, &columns), Error::Stride { arg: "x", .. }));
    let mut foreign = Tensor::<f32>::zeros(&other, &[4, 8]).unwrap();
    assert!(matches!(refused(&mut foreign, &x), Error::WrongDevice { arg: "out", .. }));
}

#[test]
fn entries_have_the_names_of_what_they_do() {
    for function in [Plain::Silu, Plain::Gelu, Plain::GeluTanh, Plain::GeluQuick, Plain::Relu2] {
        for dtype in [DType::F32, DType::F16, DType::Bf16] {
            let name = |aligned| plain::entry(dtype, function, aligned).unwrap().name;
            assert_eq!(name(true), format!("{}_{dtype}", function.name()));
            assert_eq!(name(false), format!("{}_any_{dtype}", function.name()));
        }
        assert!(plain::entry(DType::I8, function, true).is_none());
    }
}
