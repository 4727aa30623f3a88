use crate::far::FAR;
use crate::rows::{Place, Rows, WIDTHS, all_bytes, assert_rounded};
use cuda_std::Float;
use proptest::prelude::*;
use proptest::sample::select;
use warploom::activation::{self, Gated, gated};
use warploom::reference::activation as reference;
use warploom::{DType, Device, Error, Graph, Result, Stream, Tensor, bf16, f16};
use warploom_tests::{large_gpu, noise, noise_of, on_every_device, property, sanitizing, widen};

const FUNCTIONS: [Gated; 6] = [
    Gated::SiluAndMul,
    Gated::GeluAndMul,
    Gated::GeluTanhAndMul,
    Gated::FatreluAndMul { threshold: 0.25 },
    Gated::SiluAndMulClamp { limit: 1.5 },
    Gated::SwigluOai { alpha: 1.702, limit: 2.0 },
];

fn call<T: Float>(function: Gated, stream: &Stream, out: &mut Tensor<T>, x: &Tensor<T>) -> Result<()> {
    match function {
        Gated::SiluAndMul => activation::silu_and_mul(stream, out, x),
        Gated::GeluAndMul => activation::gelu_and_mul(stream, out, x),
        Gated::GeluTanhAndMul => activation::gelu_tanh_and_mul(stream, out, x),
        Gated::FatreluAndMul { threshold } => activation::fatrelu_and_mul(stream, out, x, threshold),
        Gated::SiluAndMulClamp { limit } => activation::silu_and_mul_clamp(stream, out, x, limit),
        Gated::SwigluOai { alpha, limit } => activation::swiglu_oai(stream, out, x, alpha, limit),
        _ => unreachable!(),
    }
}

/// What the documentation states, and a little more for the product with the value.
fn relative<T: Float>() -> f64 {
    if T::DTYPE == DType::F32 { 2f64.powi(-20) } else { 2f64.powi(-15) }
}

/// Compares what came of rows of `2 d` [values] with what the documentation states for each gate.
#[track_caller]
fn check_values<T: Float>(got: &[T], x: &[T], function: Gated, d: usize) {
    let gates = x.chunks(2 * d.max(1)).flat_map(|row| reference::gated::split(function, &widen(row)).0);
    let want = expected(function, x, d);
    assert_eq!(got.len(), want.len(), "number of elements");
    for ((got, want), gate) in got.iter().zip(want).zip(gates) {
        // Units in the last place, one of them for the product with the value and for `up + 1`, a sum of exact numbers.
        let (units, argument) = match function {
            Gated::FatreluAndMul { .. } => (0.0, 0.0),
            Gated::GeluAndMul => (9.0, 0.0),
            // The exponential magnifies the rounding of an argument that is a product.
            Gated::GeluTanhAndMul => (5.0, 1.6 * gate * (1.0 + 0.045 * gate * gate)),
            Gated::SwigluOai { alpha, limit } => (5.0, alpha as f64 * gate.min(limit as f64)),
            _ => (5.0, 0.0),
        };
        // What the smallest factors are off by, times gates and values of up to 30.
        let (relative, factor) = match T::DTYPE {
            DType::F32 => ((units + 2.0 * argument.abs().min(110.0)) * 2f64.powi(-23), 2f64.powi(-149)),
            _ => (relative::<T>(), 2f64.powi(-126)),
        };
        assert_rounded(&[*got], &[want], relative, 900.0 * factor);
    }
}

/// Numbers of many magnitudes, mostly around one.
fn values<T: Float>(n: usize, seed: u64) -> Vec<T> {
    let scale = [1.0, 4.0, 0.01, 30.0];
    noise(n, seed).iter().enumerate().map(|(i, v)| T::from_f32(v * scale[i % 7 % 4])).collect()
}

fn expected<T: Float>(function: Gated, x: &[T], d: usize) -> Vec<f64> {
    if d == 0 {
        return vec![];
    }
    let row = |row: &[T]| {
        let (gate, up) = reference::gated::split(function, &widen(row));
        reference::gated(function, &gate, &up)
    };
    x.chunks(2 * d).flat_map(row).collect()
}

fn check<T: Float>() {
    let widths = prop_oneof![
        4 => select(vec![1usize, 7, 8, 46, 80, 128, 256, 264, 768, 769]),
        1 => select(vec![2056usize, 5125]),
        2 => 1usize..300,
    ];
    let place = || select(Place::ALL.to_vec());
    let strategy = (0usize..5, widths, place(), place(), select(FUNCTIONS.to_vec()));
    property(24, strategy, |device, stream, (rows, d, from, to, function)| {
        let x = values::<T>(rows * 2 * d, 1 + d as u64);
        let input = Rows::new(device, &x, rows, 2 * d, from);
        let out = Rows::<T>::poisoned(device, rows, d, to);
        call(function, stream, &mut out.view(), &input.view()).unwrap();
        check_values(&out.take(), &x, function, d);
        Ok(())
    });
}

#[test]
fn matches_the_reference_in_f32() {
    check::<f32>();
}
#[test]
fn matches_the_reference_in_f16() {
    check::<f16>();
}
#[test]
fn matches_the_reference_in_bf16() {
    check::<bf16>();
}

#[test]
fn widths_that_peers_get_wrong() {
    fn check<T: Float>(device: &Device, stream: &Stream, function: Gated, d: usize) {
        let x = values::<T>(2 * 2 * d, 1);
        let dx = Tensor::from_slice(device, &x, &[2, 2 * d]).unwrap();
        let mut out = Tensor::<T>::uninit(device, &[2, d]).unwrap();
        call(function, stream, &mut out, &dx).unwrap();
        check_values(&out.to_vec().unwrap(), &x, function, d);
    }
    on_every_device(|device, stream| {
        for (i, d) in WIDTHS.into_iter().enumerate() {
            // Every width with gates and values apart, and alternating, and all functions in turn.
            for function in [FUNCTIONS[0], FUNCTIONS[5], FUNCTIONS[1 + i % 4]] {
                check::<bf16>(device, stream, function, d);
            }
            check::<f32>(device, stream, FUNCTIONS[i % 6], d);
        }
    });
}

/// Rows more than 2^31 elements apart: the same bits as in a small tensor.
#[test]
fn rows_far_apart() {
    FAR.on_every_device(10, |device, stream, rows| {
        for (d, function) in [(128, Gated::SiluAndMul), (129, Gated::GeluAndMul), (128, FUNCTIONS[5])] {
            let x = values::<bf16>(rows * 2 * d, 1);
            let near = Tensor::from_slice(device, &x, &[rows, 2 * d]).unwrap();
            let mut near_out = Tensor::<bf16>::uninit(device, &[rows, d]).unwrap();
            let (far_x, far_out) = (FAR.rows(device, &x, 2 * d), FAR.memory::<bf16>(device, rows, d));
            call(function, stream, &mut near_out, &near).unwrap();
            call(function, stream, &mut FAR.view(&far_out, d), &FAR.view(&far_x, 2 * d)).unwrap();
            assert_eq!(all_bytes(&FAR.read(&far_out, d)), all_bytes(&near_out.to_vec().unwrap()));
        }
    });
}

#[test]
fn gates_may_come_last() {
    on_every_device(|device, stream| {
        let (rows, d) = (3, 40);
        let x = values::<bf16>(rows * 2 * d, 5);
        let dx = Tensor::from_slice(device, &x, &[rows, 2 * d]).unwrap();
        let mut out = Tensor::<bf16>::uninit(device, &[rows, d]).unwrap();
        activation::mul_and_silu(stream, &mut out, &dx).unwrap();
        let swapped: Vec<bf16> = x.chunks(2 * d).flat_map(|r| [&r[d..], &r[..d]].concat()).collect();
        let want = expected(Gated::SiluAndMul, &swapped, d);
        assert_rounded(&out.to_vec().unwrap(), &want, relative::<bf16>(), 0.0);
    });
}

#[test]
fn more_dimensions_and_nothing_at_all() {
    on_every_device(|device, stream| {
        let x = values::<f16>(2 * 3 * 32, 9);
        let dx = Tensor::from_slice(device, &x, &[2, 3, 32]).unwrap();
        let mut out = Tensor::<f16>::uninit(device, &[2, 3, 16]).unwrap();
        activation::silu_and_mul(stream, &mut out, &dx).unwrap();
        let want = expected(Gated::SiluAndMul, &x, 16);
        assert_rounded(&out.to_vec().unwrap(), &want, relative::<f16>(), 0.0);
        for shape in [[0, 16], [4, 0]] {
            let dx = Tensor::<f16>::uninit(device, &[shape[0], 2 * shape[1]]).unwrap();
            let mut out = Tensor::<f16>::uninit(device, &shape).unwrap();
            activation::silu_and_mul(stream, &mut out, &dx).unwrap();
        }
    });
}

/// Every f16 number as a gate: tails, subnormal numbers, infinities and NaN.
#[test]
fn every_gate() {
    on_every_device(|device, stream| {
        let d = 65536;
        let gates: Vec<f16> = (0..=u16::MAX).map(f16::from_bits).collect();
        let ups = vec![f16::from_f32(1.0); d];
        for function in FUNCTIONS {
            let x: Vec<f16> = if function.is_interleaved() {
                gates.iter().zip(&ups).flat_map(|(g, u)| [*g, *u]).collect()
            } else {
                [&gates[..], &ups].concat()
            };
            let dx = Tensor::from_slice(device, &x, &[1, 2 * d]).unwrap();
            let mut out = Tensor::<f16>::uninit(device, &[1, d]).unwrap();
            call(function, stream, &mut out, &dx).unwrap();
            assert_rounded(&out.to_vec().unwrap(), &expected(function, &x, d), relative::<f16>(), 0.0);
        }
    });
}

#[test]
fn not_a_number_and_infinities_pass_through() {
    on_every_device(|device, stream| {
        let (inf, nan) = (f32::INFINITY, f32::NAN);
        let gates = [nan, 1.0, inf, 1.0, 2.0, -inf, 0.0, nan];
        let ups = [1.0, nan, 2.0, inf, -inf, 1.0, inf, nan];
        for function in FUNCTIONS {
            let x: Vec<f32> = if function.is_interleaved() {
                gates.iter().zip(&ups).flat_map(|(g, u)| [*g, *u]).collect()
            } else {
                [gates, ups].concat()
            };
            let dx = Tensor::from_slice(device, &x, &[1, 16]).unwrap();
            let mut out = Tensor::<f32>::uninit(device, &[1, 8]).unwrap();
            call(function, stream, &mut out, &dx).unwrap();
            assert_rounded(&out.to_vec().unwrap(), &expected(function, &x, 8), relative::<f32>(), 0.0);
        }
    });
}

#[test]
fn captures_and_repeats_bit_for_bit() {
    on_every_device(|device, stream| {
        device.preload(&["activation"]).unwrap();
        let (rows, d) = (5, 264);
        let mut x = Tensor::from_slice(device, &values::<bf16>(rows * 2 * d, 3), &[rows, 2 * d]).unwrap();
        let mut out = Tensor::<bf16>::uninit(device, &[rows, d]).unwrap();
        activation::gelu_and_mul(stream, &mut out, &x).unwrap();
        let first = all_bytes(&out.to_vec().unwrap());
        let graph = Graph::capture(stream, |s| activation::gelu_and_mul(s, &mut out, &x)).unwrap();
        for seed in [3, 4, 3] {
            stream.fill_bytes(&mut out, 0xff).unwrap();
            stream.synchronize().unwrap();
            x.copy_from_slice(&values::<bf16>(rows * 2 * d, seed)).unwrap();
            graph.launch(stream).unwrap();
            assert_eq!(all_bytes(&out.to_vec().unwrap()) == first, seed == 3);
        }
    });
}

#[test]
fn refuses_what_it_cannot_do() {
    let (device, other) = (Device::simt(), Device::simt());
    let stream = Stream::new(&device).unwrap();
    let tensor = |shape: &[usize]| Tensor::<f32>::zeros(&device, shape).unwrap();
    let x = tensor(&[4, 32]);

    let refused = |out: &mut Tensor<f32>, x: &Tensor<f32>| activation::silu_and_mul(&stream, out, x).unwrap_err();
    assert!(matches!(refused(&mut tensor(&[4, 15]), &x), Error::Shape { arg: "x", .. }));
    assert!(matches!(refused(&mut tensor(&[3, 16]), &x), Error::Shape { arg: "x", .. }));
    assert!(matches!(refused(&mut tensor(&[4, 1, 16]), &x), Error::Shape { arg: "x", .. }));
    assert!(matches!(refused(&mut tensor(&[]), &x), Error::Shape { arg: "out", .. }));
    let columns = tensor(&[32, 4]).as_strided(&[4, 32], &[1, 4], 0).unwrap();
    assert!(matches!(refused(&mut tensor(&[4, 16]), &columns), Error::Stride { arg: "x", .. }));
    let folded = tensor(&[64]).as_strided(&[4, 16], &[8, 1], 0).unwrap();
    assert!(matches!(refused(&mut folded.clone(), &x), Error::Stride { arg: "out", .. }));
    let mut inside = x.narrow(1, 8, 16).unwrap();
    assert!(matches!(refused(&mut inside, &x), Error::Overlap { first: "out", second: "x", .. }));
    let foreign = Tensor::<f32>::zeros(&other, &[4, 32]).unwrap();
    assert!(matches!(refused(&mut tensor(&[4, 16]), &foreign), Error::WrongDevice { arg: "x", .. }));

    let mut out = tensor(&[4, 16]);
    let value = |r: Result<()>, name: &str| assert!(matches!(r, Err(Error::Value { arg, .. }) if arg == name));
    value(activation::fatrelu_and_mul(&stream, &mut out, &x, f32::NAN), "threshold");
    value(activation::silu_and_mul_clamp(&stream, &mut out, &x, -1.0), "limit");
    value(activation::silu_and_mul_clamp(&stream, &mut out, &x, f32::NAN), "limit");
    value(activation::swiglu_oai(&stream, &mut out, &x, f32::INFINITY, 7.0), "alpha");
    activation::fatrelu_and_mul(&stream, &mut out, &x, f32::NEG_INFINITY).unwrap();

    // There is no kernel for 8-bit inputs.
    let narrow = Tensor::<warploom::E4M3>::zeros(&device, &[4, 32]).unwrap();
    let mut out = Tensor::<warploom::E4M3>::zeros(&device, &[4, 16]).unwrap();
    let e = activation::silu_and_mul(&stream, &mut out, &narrow);
    assert!(matches!(e, Err(Error::DType { arg: "x", .. })), "{e:?}");
}

#[test]
fn entries_have_the_names_of_what_they_do() {
    for function in FUNCTIONS {
        for dtype in [DType::F32, DType::F16, DType::Bf16] {
            let name = |aligned| gated::entry(dtype, function, aligned).unwrap().name;
            assert_eq!(name(true), format!("{}_{dtype}", function.name()));
            assert_eq!(name(false), format!("{}_any_{dtype}", function.name()));
        }
        assert!(gated::entry(DType::E4m3, function, true).is_none());
        for dtype in [DType::F16, DType::Bf16] {
            assert_eq!(gated::lines_entry(dtype, function).unwrap().name, format!("{}_lines_{dtype}", function.name()));
        }
        assert!(gated::lines_entry(DType::F32, function).is_none());
    }
}

/// The entries for many results wherever they lie, which take over where a property test does not get to: the bits of the others, and nothing around
/// them, for rows of inputs and of results that begin anywhere in a line, and for rows that are shorter than one.
fn lines_are_the_same_bits<T: Float>() {
    on_every_device(|device, stream| {
        for (i, d) in [1usize, 5, 7, 8, 9, 15, 16, 17, 23, 46, 264, 769].into_iter().enumerate() {
            let (rows, function) = (9usize, FUNCTIONS[i % FUNCTIONS.len()]);
            // Distances that take rows through all places in a line, and a first row that is not at its beginning.
            for (in_stride, out_stride, start) in [(2 * d, d, 0), (2 * d + 1, d + 3, 1 + i % 7), (2 * d + 6, d | 1, 5)]
            {
                let x = values::<T>(start + rows * in_stride, 1 + i as u64);
                let x = Tensor::from_slice(device, &x, &[x.len()]).unwrap();
                let [alpha, limit] = function.params().into();
                let run = |entry: Option<cuda_std::Entry<gated::Args>>, geometry| {
                    let len = start + (rows - 1) * out_stride + d;
                    let mut out = Tensor::from_slice(device, &vec![T::from_f32(77.0); len], &[len]).unwrap();
                    // SAFETY: places within the tensors.
                    let (gate, out_ptr) = unsafe { (x.as_ptr().add(start), out.as_mut_ptr().add(start)) };
                    let args = gated::Args {
                        gate: gate.cast(),
                        up: gate.wrapping_add(d).cast(),
                        out: out_ptr.cast(),
                        rows: rows as u32,
                        d: d as u32,
                        in_stride,
                        out_stride,
                        alpha,
                        limit,
                    };
                    // SAFETY: the tensors are as large as the arguments say, and live on.
                    unsafe { stream.launch(&entry.unwrap(), &geometry, &args) }.unwrap();
                    stream.synchronize().unwrap();
                    all_bytes(&out.to_vec().unwrap())
                };
                let (r, n) = (rows as u32, d as u32);
                let want = run(gated::entry(T::DTYPE, function, false), gated::geometry(T::DTYPE, false, r, n));
                let got = run(gated::lines_entry(T::DTYPE, function), gated::lines_geometry(T::DTYPE, r, n));
                assert!(got == want, "{} {d} {in_stride} {out_stride} {start}", function.name());
            }
        }
    });
}

#[test]
fn lines_are_the_same_bits_bf16() {
    lines_are_the_same_bits::<bf16>();
}

#[test]
fn lines_are_the_same_bits_f16() {
    lines_are_the_same_bits::<f16>();
}

/// Without rows, and without columns, there is nothing to launch for.
#[test]
fn lines_of_nothing() {
    for (rows, d) in [(0, 769), (5, 0), (0, 0)] {
        assert!(gated::lines_geometry(DType::Bf16, rows, d).grid.contains(&0), "{rows} {d}");
    }
}

/// More than 2^31 elements, of which the last row is looked at. Under a sanitizer rows are few and lie far apart, and all of them hold
/// something.
/// Which launches have entries that count columns in 32 bits with a sign: none that has more, nor twice as many gates and values in turns.
#[test]
fn lines_of_no_more_columns_than_they_count() {
    let oai = Gated::SwigluOai { alpha: 1.702, limit: 7.0 };
    for (function, most) in [(Gated::SiluAndMul, i32::MAX as u32), (oai, (1 << 30) - 1)] {
        assert!(gated::suits_lines(function, 1, most));
        assert!(!gated::suits_lines(function, 1, most + 1) && !gated::suits_lines(function, 1, u32::MAX));
        assert!(!gated::suits_lines(function, 1, (gated::LEAST_LINES - 1) as u32));
    }
}

#[test]
fn large_tensors_on_a_gpu() {
    let Some((device, _turn)) = large_gpu(7) else { return };
    let stream = Stream::new(&device).unwrap();
    for d in [16384usize, 16383] {
        let (rows, stride) = if sanitizing() { (3, 1 << 30) } else { (66_000, 2 * d) };
        let x = Tensor::<bf16>::uninit(&device, &[(rows - 1) * stride + 2 * d]).unwrap();
        let x = x.as_strided(&[rows, 2 * d], &[stride, 1], 0).unwrap();
        let mut out = Tensor::<bf16>::uninit(&device, &[rows, d]).unwrap();
        let data = noise_of::<bf16>(2 * d, 1);
        for row in if sanitizing() { 0 } else { rows - 1 }..rows {
            x.narrow(0, row, 1).unwrap().copy_from_slice(&data).unwrap();
        }
        activation::silu_and_mul(&stream, &mut out, &x).unwrap();
        let last = out.narrow(0, rows - 1, 1).unwrap().to_vec().unwrap();
        assert_rounded(&last, &expected(Gated::SiluAndMul, &data, d), relative::<bf16>(), 0.0);
    }
}
