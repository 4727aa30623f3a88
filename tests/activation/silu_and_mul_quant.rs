use crate::far::FAR;
use crate::rows::{Place, Rows, WIDTHS, all_bytes, assert_rounded};
use cuda_std::Float;
use proptest::prelude::*;
use proptest::sample::select;
use warploom::activation::{self, Gated, silu_and_mul_quant as quant};
use warploom::reference::{activation as reference, quantise};
use warploom::{DType, Device, E4M3, Entry, Error, Geometry, Graph, Result, Stream, Tensor, bf16, f16};
use warploom_tests::{noise_of, on_every_device, property, widen};

const GROUP: usize = 128;

/// The results of each row before they are quantised.
fn rows_of<T: Float>(x: &[T], d: usize) -> Vec<Vec<f64>> {
    let row = |row: &[T]| {
        let (gate, up) = reference::gated::split(Gated::SiluAndMul, &widen(row));
        reference::gated(Gated::SiluAndMul, &gate, &up)
    };
    x.chunks(2 * d).map(row).collect()
}

/// How far results are off before they are quantised, and scales.
fn relative<T: Float>() -> f64 {
    if T::DTYPE == DType::F32 { 2f64.powi(-20) } else { 2f64.powi(-14) }
}

/// `values / scale`, quantised; a ratio on the edge between two numbers may go either way.
#[track_caller]
fn check_quantised<T: Float>(got: &[E4M3], values: &[f64], scale: f32) {
    let want: Vec<f64> = values.iter().map(|v| (v / scale as f64).clamp(-448.0, 448.0)).collect();
    assert_rounded(got, &want, relative::<T>(), 0.0);
}

#[track_caller]
fn check_scale<T: Float>(got: f32, want: f64) {
    assert!((got as f64 / want - 1.0).abs() < relative::<T>(), "scale {got:e}, expected {want:e}");
}

fn widths() -> impl Strategy<Value = usize> {
    prop_oneof![select(vec![1usize, 7, 46, 80, 128, 256, 384, 768, 769, 1024]), 1usize..400]
}

fn check<T: Float>() {
    let place = || select(Place::ALL.to_vec());
    property(16, (0usize..4, widths(), place(), place(), 0usize..2), |device, stream, (rows, d, from, to, order)| {
        let x = noise_of::<T>(rows * 2 * d, d as u64);
        let (input, want) = (Rows::new(device, &x, rows, 2 * d, from), rows_of(&x, d));
        let out = Rows::<E4M3>::poisoned(device, rows, d, to);

        let scale = Tensor::from_slice(device, &[0.001f32], &[1]).unwrap();
        activation::silu_and_mul_e4m3_per_tensor(stream, &mut out.view(), &input.view(), &scale).unwrap();
        out.take().chunks(d).zip(&want).for_each(|(got, want)| check_quantised::<T>(got, want, 0.001));

        let out = Rows::<E4M3>::poisoned(device, rows, d, to);
        let mut scales = Tensor::<f32>::uninit(device, &[rows]).unwrap();
        activation::silu_and_mul_e4m3_per_token(stream, &mut out.view(), &mut scales, &input.view()).unwrap();
        let scales = scales.to_vec().unwrap();
        for ((got, want), scale) in out.take().chunks(d).zip(&want).zip(scales) {
            check_scale::<T>(scale, quantise::scale(want, 448.0));
            check_quantised::<T>(got, want, scale);
        }

        let (out, groups) = (Rows::<E4M3>::poisoned(device, rows, d, to), d.div_ceil(GROUP));
        // Row- and column-major, the latter with padding.
        let strides = [[groups, 1], [1, rows + 3]][order];
        let all = Tensor::<f32>::zeros(device, &[(groups + 1) * (rows + 4)]).unwrap();
        let mut scales = all.as_strided(&[rows, groups], &strides, 0).unwrap();
        activation::silu_and_mul_e4m3_per_group(stream, &mut out.view(), &mut scales, &input.view()).unwrap();
        let scales = scales.to_vec().unwrap();
        for (r, (got, want)) in out.take().chunks(d).zip(&want).enumerate() {
            for (g, (got, want)) in got.chunks(GROUP).zip(want.chunks(GROUP)).enumerate() {
                check_scale::<T>(scales[r * groups + g], quantise::scale(want, 448.0));
                check_quantised::<T>(got, want, scales[r * groups + g]);
            }
        }
        assert_eq!(all.to_vec().unwrap().iter().filter(|s| **s != 0.0).count(), rows * groups);
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

/// Results and scales of each operation, of which groups' scales are `[rows, groups]`.
struct Outputs {
    per_tensor: Tensor<E4M3>,
    per_token: Tensor<E4M3>,
    per_group: Tensor<E4M3>,
    given: Tensor<f32>,
    scales: Tensor<f32>,
    group_scales: Tensor<f32>,
}

impl Outputs {
    fn new(device: &Device, rows: usize, d: usize) -> Self {
        let out = || Tensor::<E4M3>::uninit(device, &[rows, d]).unwrap();
        Self {
            per_tensor: out(),
            per_token: out(),
            per_group: out(),
            given: Tensor::from_slice(device, &[0.003f32], &[1]).unwrap(),
            scales: Tensor::uninit(device, &[rows]).unwrap(),
            group_scales: Tensor::uninit(device, &[rows, d.div_ceil(GROUP)]).unwrap(),
        }
    }

    fn run<T: Float>(&mut self, stream: &Stream, x: &Tensor<T>) -> Result<()> {
        activation::silu_and_mul_e4m3_per_tensor(stream, &mut self.per_tensor, x, &self.given)?;
        activation::silu_and_mul_e4m3_per_token(stream, &mut self.per_token, &mut self.scales, x)?;
        activation::silu_and_mul_e4m3_per_group(stream, &mut self.per_group, &mut self.group_scales, x)
    }

    /// Poisons what is computed.
    fn poison(&mut self, stream: &Stream) {
        for out in [&mut self.per_tensor, &mut self.per_token, &mut self.per_group] {
            stream.fill_bytes(out, 0xff).unwrap();
        }
        stream.fill_bytes(&mut self.scales, 0xff).unwrap();
        stream.fill_bytes(&mut self.group_scales, 0xff).unwrap();
        stream.synchronize().unwrap();
    }

    fn bytes(&self) -> [Vec<u8>; 5] {
        [
            all_bytes(&self.per_tensor.to_vec().unwrap()),
            all_bytes(&self.per_token.to_vec().unwrap()),
            all_bytes(&self.per_group.to_vec().unwrap()),
            all_bytes(&self.scales.to_vec().unwrap()),
            all_bytes(&self.group_scales.to_vec().unwrap()),
        ]
    }
}

#[test]
fn widths_that_peers_get_wrong() {
    fn check<T: Float>(device: &Device, stream: &Stream, d: usize) {
        let (rows, groups) = (2, d.div_ceil(GROUP));
        let x = noise_of::<T>(rows * 2 * d, 3);
        let (dx, mut out) = (Tensor::from_slice(device, &x, &[rows, 2 * d]).unwrap(), Outputs::new(device, rows, d));
        out.run(stream, &dx).unwrap();
        let (given, token, group) =
            (out.per_tensor.to_vec().unwrap(), out.per_token.to_vec().unwrap(), out.per_group.to_vec().unwrap());
        let (scales, group_scales) = (out.scales.to_vec().unwrap(), out.group_scales.to_vec().unwrap());
        for (r, want) in rows_of(&x, d).iter().enumerate() {
            let row = r * d..(r + 1) * d;
            check_quantised::<T>(&given[row.clone()], want, 0.003);
            check_scale::<T>(scales[r], quantise::scale(want, 448.0));
            check_quantised::<T>(&token[row.clone()], want, scales[r]);
            for (g, (got, want)) in group[row].chunks(GROUP).zip(want.chunks(GROUP)).enumerate() {
                check_scale::<T>(group_scales[r * groups + g], quantise::scale(want, 448.0));
                check_quantised::<T>(got, want, group_scales[r * groups + g]);
            }
        }
    }
    on_every_device(|device, stream| {
        for d in WIDTHS {
            check::<bf16>(device, stream, d);
            check::<f32>(device, stream, d);
        }
    });
}

/// Rows more than 2^31 elements apart: the same bits as in a small tensor.
#[test]
fn rows_far_apart() {
    FAR.on_every_device(12, |device, stream, rows| {
        for d in [256, 257] {
            let x = noise_of::<bf16>(rows * 2 * d, 1);
            let (near, far_x) = (Tensor::from_slice(device, &x, &[rows, 2 * d]).unwrap(), FAR.rows(device, &x, 2 * d));
            let mut near_out = Outputs::new(device, rows, d);
            near_out.run(stream, &near).unwrap();
            let memory = [(); 3].map(|()| FAR.memory::<E4M3>(device, rows, d));
            let [per_tensor, per_token, per_group] = [0, 1, 2].map(|i| FAR.view(&memory[i], d));
            let mut far_out = Outputs { per_tensor, per_token, per_group, ..Outputs::new(device, rows, d) };
            far_out.run(stream, &FAR.view(&far_x, 2 * d)).unwrap();
            let [a, b, c] = memory.map(|m| all_bytes(&FAR.read(&m, d)));
            let scales =
                [&far_out.scales.to_vec().unwrap(), &far_out.group_scales.to_vec().unwrap()].map(|s| all_bytes(s));
            let [d, e] = scales;
            assert!([a, b, c, d, e] == near_out.bytes());
        }
    });
}

#[test]
fn captures_and_repeats_bit_for_bit() {
    on_every_device(|device, stream| {
        device.preload(&["activation"]).unwrap();
        let (rows, d) = (3, 264);
        let mut x = Tensor::<bf16>::uninit(device, &[rows, 2 * d]).unwrap();
        let (mut captured, mut direct) = (Outputs::new(device, rows, d), Outputs::new(device, rows, d));
        let graph = Graph::capture(stream, |s| captured.run(s, &x)).unwrap();
        let mut run = |seed| {
            captured.poison(stream);
            x.copy_from_slice(&noise_of::<bf16>(rows * 2 * d, seed)).unwrap();
            graph.launch(stream).unwrap();
            direct.run(stream, &x).unwrap();
            assert!(captured.bytes() == direct.bytes());
            captured.bytes()
        };
        let (first, second, again) = (run(1), run(5), run(1));
        assert!(first == again && first.iter().zip(&second).all(|(a, b)| a != b));
    });
}

/// Each way that a row is held: one piece a thread, two, four, and computed twice; few rows by clusters, and the same bits in
/// many rows without, of which several may share a block.
#[test]
fn rows_of_every_length() {
    on_every_device(|device, stream| {
        let lengths = [(8usize, 3), (2056, 2), (4096, 1), (4104, 2), (8200, 2), (16392, 1), (16393, 1), (32776, 1)];
        // One by one, held and not; and beyond 32 KiB, held by up to 1024 threads, and computed twice.
        let others = [(7, 3), (46, 3), (513, 2), (769, 2), (5125, 1), (8191, 1), (8193, 1), (40000, 1)];
        for (d, rows) in lengths.into_iter().chain(others) {
            let x = noise_of::<bf16>(rows * 2 * d, 3);
            let run = |x: &[bf16]| {
                let rows = x.len() / 2 / d;
                let x = Tensor::from_slice(device, x, &[rows, 2 * d]).unwrap();
                let mut out = Tensor::<E4M3>::uninit(device, &[rows, d]).unwrap();
                let mut scales = Tensor::<f32>::uninit(device, &[rows]).unwrap();
                activation::silu_and_mul_e4m3_per_token(stream, &mut out, &mut scales, &x).unwrap();
                (out.to_vec().unwrap(), scales.to_vec().unwrap())
            };
            let (out, scales) = run(&x);
            for ((got, want), scale) in out.chunks(d).zip(rows_of(&x, d)).zip(&scales) {
                check_scale::<bf16>(*scale, quantise::scale(&want, 448.0));
                check_quantised::<bf16>(got, &want, *scale);
            }
            if rows > 1 {
                let (many, many_scales) = run(&x.repeat(33));
                assert_eq!(many_scales, scales.repeat(33));
                assert!(many.chunks(rows * d).all(|part| all_bytes(part) == all_bytes(&out)), "{d}");
            }
        }
    });
}

/// The reciprocal of a magnitude beyond 2^126 is no normal number: each kind of scale, each way that rows are held.
#[test]
fn the_largest_results() {
    on_every_device(|device, stream| {
        for (rows, d) in [(1usize, 8usize), (1, 46), (3, 384), (2, 4096), (70, 512), (1, 16392), (300, 128)] {
            let mut x = noise_of::<bf16>(rows * 2 * d, 5);
            // A gate of 3e38, and a value of 1 or less: results near the end of the numbers, beside ordinary ones.
            x.chunks_mut(2 * d).for_each(|row| (row[d / 2], row[d + d / 2]) = (bf16::from_f32(3e38), bf16::ONE));
            let want = rows_of(&x, d);
            let x = Tensor::from_slice(device, &x, &[rows, 2 * d]).unwrap();
            let mut out = Tensor::<E4M3>::uninit(device, &[rows, d]).unwrap();
            let mut scales = Tensor::<f32>::uninit(device, &[rows]).unwrap();
            activation::silu_and_mul_e4m3_per_token(stream, &mut out, &mut scales, &x).unwrap();
            let (got, scales) = (out.to_vec().unwrap(), scales.to_vec().unwrap());
            for ((got, want), scale) in got.chunks(d).zip(&want).zip(scales) {
                check_scale::<bf16>(scale, quantise::scale(want, 448.0));
                check_quantised::<bf16>(got, want, scale);
                assert_eq!(got[d / 2].to_f32(), 448.0);
            }
            let groups = d.div_ceil(GROUP);
            let mut scales = Tensor::<f32>::uninit(device, &[rows, groups]).unwrap();
            activation::silu_and_mul_e4m3_per_group(stream, &mut out, &mut scales, &x).unwrap();
            let (got, scales) = (out.to_vec().unwrap(), scales.to_vec().unwrap());
            for (r, (got, want)) in got.chunks(d).zip(&want).enumerate() {
                assert_eq!(got[d / 2].to_f32(), 448.0);
                for (g, (got, want)) in got.chunks(GROUP).zip(want.chunks(GROUP)).enumerate() {
                    check_scale::<bf16>(scales[r * groups + g], quantise::scale(want, 448.0));
                    check_quantised::<bf16>(got, want, scales[r * groups + g]);
                }
            }
        }
    });
}

/// Rows that are held where they were computed twice once, in each element type, which decides how many pieces they are; and the entries that compute them
/// twice give the same bits.
fn check_held<T: Float>() {
    on_every_device(|device, stream| {
        // The last: beyond 32 KiB.
        let long = if T::DTYPE == DType::F32 { 16376 } else { 16392 };
        for (d, rows) in [(46usize, 3usize), (769, 2), (8191, 1), (long, 1)] {
            let data = noise_of::<T>(rows * 2 * d, 6);
            let x = Tensor::from_slice(device, &data, &[rows, 2 * d]).unwrap();
            let run = |entry: Option<Entry<quant::TokenArgs>>, geometry: Geometry| {
                let mut out = Tensor::<E4M3>::zeros(device, &[rows, d]).unwrap();
                let mut scales = Tensor::<f32>::zeros(device, &[rows]).unwrap();
                let gate = x.as_ptr();
                let args = quant::TokenArgs {
                    gate: gate.cast(),
                    up: gate.wrapping_add(d).cast(),
                    out: out.as_mut_ptr().cast(),
                    scales: scales.as_mut_ptr().cast(),
                    rows: rows as u32,
                    d: d as u32,
                    in_stride: 2 * d,
                    out_stride: d,
                };
                // SAFETY: the tensors are as large as the arguments say, and live on.
                unsafe { stream.launch(&entry.unwrap(), &geometry, &args) }.unwrap();
                stream.synchronize().unwrap();
                (out.to_vec().unwrap(), scales.to_vec().unwrap())
            };
            let (dtype, r, n) = (T::DTYPE, rows as u32, d as u32);
            let variant = quant::Variant::new(dtype, n, d.is_multiple_of(8));
            let (held, geometry) = match variant {
                quant::Variant::Any => {
                    (quant::per_token_any_x4_entry(dtype), quant::per_token_any_x4_geometry(dtype, r, n).unwrap())
                }
                _ => (
                    quant::per_token_entry(dtype, quant::Variant::X4),
                    quant::per_token_long_geometry(dtype, r, n).unwrap(),
                ),
            };
            let (out, scales) = run(held, geometry);
            for ((got, want), scale) in out.chunks(d).zip(rows_of(&data, d)).zip(&scales) {
                check_scale::<T>(*scale, quantise::scale(&want, 448.0));
                check_quantised::<T>(got, &want, *scale);
            }
            let (twice, twice_scales) = run(quant::per_token_entry(dtype, variant), geometry);
            assert!(all_bytes(&twice) == all_bytes(&out) && twice_scales == scales, "{d}");
        }
    });
    assert!(quant::per_token_long_geometry(T::DTYPE, 1, 40000).is_none());
    assert_eq!(quant::per_token_any_x4_geometry(T::DTYPE, 1, 8193).is_none(), T::DTYPE == DType::F32);
    assert!(quant::per_token_any_x4_geometry(T::DTYPE, 1, 16385).is_none());
}

#[test]
fn held_rows_are_the_same_bits() {
    check_held::<f32>();
    check_held::<f16>();
    check_held::<bf16>();
}

/// Few rows take pieces of half the size: the same bits, in rows with and without a narrower last group, and with a given scale.
#[test]
fn groups_of_many_rows_and_of_few() {
    on_every_device(|device, stream| {
        for (d, rows) in [(8192usize, 1), (8200, 1)] {
            let x = noise_of::<bf16>(rows * 2 * d, 4);
            let run = |times: usize| {
                let (rows, x) = (rows * times, x.repeat(times));
                let x = Tensor::from_slice(device, &x, &[rows, 2 * d]).unwrap();
                let mut out = Tensor::<E4M3>::uninit(device, &[rows, d]).unwrap();
                let mut scales = Tensor::<f32>::uninit(device, &[rows, d.div_ceil(GROUP)]).unwrap();
                activation::silu_and_mul_e4m3_per_group(stream, &mut out, &mut scales, &x).unwrap();
                let grouped = (all_bytes(&out.to_vec().unwrap()), scales.to_vec().unwrap());
                let scale = Tensor::from_slice(device, &[0.003f32], &[1]).unwrap();
                activation::silu_and_mul_e4m3_per_tensor(stream, &mut out, &x, &scale).unwrap();
                (grouped, all_bytes(&out.to_vec().unwrap()))
            };
            let (((few, few_scales), of_few), ((many, many_scales), of_many)) = (run(1), run(129));
            assert!(of_many == of_few.repeat(129), "{d}");
            assert!(many == few.repeat(129) && many_scales == few_scales.repeat(129), "{d}");
            let want = &rows_of(&x, d)[0];
            for (g, want) in want.chunks(GROUP).enumerate() {
                check_scale::<bf16>(few_scales[g], quantise::scale(want, 448.0));
            }
        }
    });
}

/// No columns need no block, and a grid has no more than 2^31 - 1 of them.
#[test]
fn clusters_that_a_launch_has_no_room_for() {
    let geometry = |rows, d| quant::per_token_cluster_geometry(DType::Bf16, rows, d);
    assert!(geometry(1, 0).is_none() && geometry(1, 8192).is_some());
    assert!(geometry((1 << 28) - 1, 8192).is_some() && geometry(1 << 28, 8192).is_none());
}

/// The entries of groups, which take over from each other where a property test does not get to, give the same bits.
#[test]
fn groups_by_each_entry() {
    on_every_device(|device, stream| {
        let (dtype, rows) = (DType::Bf16, 3usize);
        for d in [264usize, 1024] {
            let x = Tensor::from_slice(device, &noise_of::<bf16>(rows * 2 * d, 5), &[rows, 2 * d]).unwrap();
            let groups = d.div_ceil(GROUP);
            let run = |entry: Option<Entry<quant::GroupArgs>>, geometry: Geometry| {
                let mut out = Tensor::<E4M3>::zeros(device, &[rows, d]).unwrap();
                let mut scales = Tensor::<f32>::zeros(device, &[rows, groups]).unwrap();
                let gate = x.as_ptr();
                let args = quant::GroupArgs {
                    gate: gate.cast(),
                    up: gate.wrapping_add(d).cast(),
                    out: out.as_mut_ptr().cast(),
                    scales: scales.as_mut_ptr().cast(),
                    rows: rows as u32,
                    d: d as u32,
                    in_stride: 2 * d,
                    out_stride: d,
                    scale_row_stride: groups,
                    scale_group_stride: 1,
                };
                // SAFETY: the tensors are as large as the arguments say, and live on.
                unsafe { stream.launch(&entry.unwrap(), &geometry, &args) }.unwrap();
                stream.synchronize().unwrap();
                (all_bytes(&out.to_vec().unwrap()), all_bytes(&scales.to_vec().unwrap()))
            };
            let (rows, d) = (rows as u32, d as u32);
            let pairs = run(quant::per_group_entry(dtype, true), quant::per_group_geometry(dtype, true, rows, d));
            assert!(run(quant::per_group_one_entry(dtype), quant::geometry(dtype, true, rows, d)) == pairs, "{d}");
            assert!(run(quant::per_group_few_entry(dtype), quant::few_geometry(rows, d).unwrap()) == pairs, "{d}");
        }
        // A thousand rows take longer to start than to run.
        assert!(quant::few_geometry(1000, 1024).is_none() && quant::few_geometry(100, 128).is_some());
    });
}

#[test]
fn zeros_not_a_number_infinities_and_saturation() {
    on_every_device(|device, stream| {
        let d = 16;
        let row = |gate: [f32; 2], up: f32| {
            let mut row = vec![0.0f32; 2 * d];
            row[..2].copy_from_slice(&gate);
            row[d..].fill(up);
            row
        };
        let x =
            [row([0.0, 0.0], 1.0), row([f32::NAN, 8.0], 1.0), row([f32::INFINITY, 8.0], 1.0), row([1e-20, 0.0], 1.0)]
                .concat();
        let dx = Tensor::from_slice(device, &x, &[4, 2 * d]).unwrap();
        let mut out = Tensor::<E4M3>::uninit(device, &[4, d]).unwrap();
        let mut scales = Tensor::<f32>::uninit(device, &[4]).unwrap();
        activation::silu_and_mul_e4m3_per_token(stream, &mut out, &mut scales, &dx).unwrap();
        let by_row = (scales.to_vec().unwrap(), out.to_vec().unwrap());
        let mut scales = Tensor::<f32>::uninit(device, &[4, 1]).unwrap();
        activation::silu_and_mul_e4m3_per_group(stream, &mut out, &mut scales, &dx).unwrap();
        assert_eq!(
            (scales.to_vec().unwrap(), all_bytes(&out.to_vec().unwrap())),
            (by_row.0.clone(), all_bytes(&by_row.1))
        );
        let (scales, out) = by_row;
        let out: Vec<f32> = out.iter().map(|v| v.to_f32()).collect();
        let least = quantise::EPSILON / 448.0;
        assert!(out[..d].iter().all(|v| *v == 0.0));
        check_scale::<f32>(scales[0], least);
        assert!(out[d].is_nan() && out[d + 1] == 448.0 && out[d + 2] == 0.0);
        check_scale::<f32>(scales[1], 8.0 / (1.0 + (-8f64).exp()) / 448.0);
        assert!(out[2 * d].is_nan() && out[2 * d + 1] == 0.0 && scales[2] == f32::INFINITY);
        assert!(out[3 * d..].iter().all(|v| *v == 0.0));
        check_scale::<f32>(scales[3], least);

        let scale = Tensor::from_slice(device, &[0.001f32], &[1]).unwrap();
        let mut out = Tensor::<E4M3>::uninit(device, &[4, d]).unwrap();
        activation::silu_and_mul_e4m3_per_tensor(stream, &mut out, &dx, &scale).unwrap();
        let out = out.to_vec().unwrap();
        assert!(out[d].to_f32().is_nan() && out[d + 1].to_f32() == 448.0 && out[2 * d].to_f32() == 448.0);
    });
}

#[test]
fn refuses_what_it_cannot_do() {
    let device = Device::simt();
    let stream = Stream::new(&device).unwrap();
    let x = Tensor::<f32>::zeros(&device, &[4, 512]).unwrap();
    let mut out = Tensor::<E4M3>::zeros(&device, &[4, 256]).unwrap();
    let floats = |shape: &[usize]| Tensor::<f32>::zeros(&device, shape).unwrap();

    let e = activation::silu_and_mul_e4m3_per_tensor(&stream, &mut out, &x, &floats(&[2])).unwrap_err();
    assert!(matches!(e, Error::Shape { arg: "scale", .. }));
    let e = activation::silu_and_mul_e4m3_per_token(&stream, &mut out, &mut floats(&[4, 1]), &x).unwrap_err();
    assert!(matches!(e, Error::Shape { arg: "scales", .. }));
    let mut spread = floats(&[8]).as_strided(&[4], &[2], 0).unwrap();
    let e = activation::silu_and_mul_e4m3_per_token(&stream, &mut out, &mut spread, &x).unwrap_err();
    assert!(matches!(e, Error::Stride { arg: "scales", .. }));
    let e = activation::silu_and_mul_e4m3_per_group(&stream, &mut out, &mut floats(&[4, 3]), &x).unwrap_err();
    assert!(matches!(e, Error::Shape { arg: "scales", .. }));
    let mut same = floats(&[8]).as_strided(&[4, 2], &[0, 1], 0).unwrap();
    let e = activation::silu_and_mul_e4m3_per_group(&stream, &mut out, &mut same, &x).unwrap_err();
    assert!(matches!(e, Error::Stride { arg: "scales", .. }));
    let mut inside = x.as_strided(&[4, 2], &[2, 1], 0).unwrap();
    let e = activation::silu_and_mul_e4m3_per_group(&stream, &mut out, &mut inside, &x).unwrap_err();
    assert!(matches!(e, Error::Overlap { .. }));
    let mut narrow = Tensor::<E4M3>::zeros(&device, &[4, 255]).unwrap();
    let e = activation::silu_and_mul_e4m3_per_token(&stream, &mut narrow, &mut floats(&[4]), &x).unwrap_err();
    assert!(matches!(e, Error::Shape { arg: "x", .. }));
}

#[test]
fn entries_have_the_names_of_what_they_do() {
    use quant::Variant::{Any, Loop, X2, X4};
    for dtype in [DType::F32, DType::F16, DType::Bf16] {
        let name = format!("silu_and_mul_e4m3_per_tensor_{dtype}");
        assert_eq!(quant::per_tensor_entry(dtype, true).unwrap().name, name);
        let name = format!("silu_and_mul_e4m3_per_group_{dtype}");
        assert_eq!(quant::per_group_entry(dtype, true).unwrap().name, name);
        let name = format!("silu_and_mul_e4m3_per_group_one_{dtype}");
        assert!(quant::per_group_one_entry(dtype).is_none_or(|entry| entry.name == name));
        let name = format!("silu_and_mul_e4m3_per_group_any_{dtype}");
        assert_eq!(quant::per_group_entry(dtype, false).unwrap().name, name);
        let name = format!("silu_and_mul_e4m3_per_token_cluster_{dtype}");
        assert_eq!(quant::per_token_cluster_entry(dtype).unwrap().name, name);
        let name = format!("silu_and_mul_e4m3_per_token_short_{dtype}");
        assert_eq!(quant::per_token_short_entry(dtype).unwrap().name, name);
        let name = format!("silu_and_mul_e4m3_per_token_narrow_{dtype}");
        assert_eq!(quant::per_token_narrow_entry(dtype).unwrap().name, name);
        let name = format!("silu_and_mul_e4m3_per_token_wide_{dtype}");
        assert_eq!(quant::per_token_wide_entry(dtype).unwrap().name, name);
        let name = format!("silu_and_mul_e4m3_per_token_any_x4_{dtype}");
        assert_eq!(quant::per_token_any_x4_entry(dtype).unwrap().name, name);
        for (variant, v) in [(X2, "x2"), (X4, "x4"), (Loop, "loop"), (Any, "any")] {
            let name = format!("silu_and_mul_e4m3_per_token_{v}_{dtype}");
            assert_eq!(quant::per_token_entry(dtype, variant).unwrap().name, name);
        }
    }
}
