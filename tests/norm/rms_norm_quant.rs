use super::{HELD, LONG, widths};
use crate::far::FAR;
use crate::rows::{Place, Rows, WIDTHS, all_bytes, assert_rounded, vector};
use cuda_std::Float;
use proptest::prelude::*;
use proptest::sample::select;
use warploom::norm::{self, Held, RmsNormQuantOptions, Variant, rms_norm, rms_norm_quant as quant};
use warploom::reference::{norm as reference, quantise};
use warploom::{DType, Device, E4M3, Entry, Error, Geometry, Graph, Stream, Tensor, bf16, f16};
use warploom_tests::{noise_of, on_every_device, property, skipped_under_synccheck, skipped_without_hopper, widen};

const GROUP: usize = 128;

/// What a case adds to the plain normalisation.
#[derive(Clone, Copy, Debug)]
struct With {
    weight: bool,
    one_plus: bool,
    residual: bool,
    smooth: bool,
}

fn with() -> impl Strategy<Value = With> {
    (any::<bool>(), any::<bool>(), any::<bool>(), any::<bool>()).prop_map(|(weight, one_plus, residual, smooth)| With {
        weight,
        one_plus,
        residual,
        smooth,
    })
}

/// Input tensors, and the results of each row before they are quantised.
struct Case<T> {
    x: Rows<T>,
    residual: Rows<T>,
    sum: Vec<T>,
    weight: Tensor<T>,
    smooth: Tensor<f32>,
    want: Vec<Vec<f64>>,
    with: With,
}

impl<T: Float> Case<T> {
    fn new(device: &Device, rows: usize, n: usize, place: Place, with: With) -> Self {
        let (x, r, w) = (noise_of::<T>(rows * n, 1), noise_of::<T>(rows * n, 2), noise_of::<T>(n, 3));
        let smooth: Vec<f32> = noise_of::<f32>(n, 4).iter().map(|v| v.abs() + 0.5).collect();
        let weight = with.weight.then(|| widen(&w).iter().map(|w| w + if with.one_plus { 1.0 } else { 0.0 }).collect());
        let weight: Option<Vec<f64>> = weight;
        let (mut want, mut sum) = (vec![], vec![]);
        for (x, r) in x.chunks(n).zip(r.chunks(n)) {
            let (mut y, rounded) = if with.residual {
                reference::fused_add_rms_norm(x, r, weight.as_deref(), 1e-5)
            } else {
                (reference::rms_norm(&widen(x), weight.as_deref(), 1e-5), r.to_vec())
            };
            if with.smooth {
                y.iter_mut().zip(&smooth).for_each(|(y, s)| *y *= *s as f64);
            }
            want.push(y);
            sum.extend(rounded);
        }
        Self {
            x: Rows::new(device, &x, rows, n, place),
            residual: Rows::new(device, &r, rows, n, place),
            sum,
            weight: Tensor::from_slice(device, &w, &[n]).unwrap(),
            smooth: Tensor::from_slice(device, &smooth, &[n]).unwrap(),
            want,
            with,
        }
    }

    /// With so many elements before the weights and before the smoothing factors.
    fn vectors_at(mut self, device: &Device, [weight, smooth]: [usize; 2]) -> Self {
        self.weight = vector(device, &self.weight.to_vec().unwrap(), weight);
        self.smooth = vector(device, &self.smooth.to_vec().unwrap(), smooth);
        self
    }

    fn options(&self) -> RmsNormQuantOptions<'_, T> {
        let options = RmsNormQuantOptions::default();
        let options = match (self.with.weight, self.with.one_plus) {
            (true, true) => options.one_plus_weight(&self.weight),
            (true, false) => options.weight(&self.weight),
            _ => options,
        };
        if self.with.smooth { options.smooth(&self.smooth) } else { options }
    }

    /// The residual became the sum, or stayed.
    #[track_caller]
    fn check_residual(self) {
        assert_eq!(all_bytes(&self.residual.take()), all_bytes(&self.sum));
    }
}

#[track_caller]
fn check_scale(got: f32, values: &[f64], largest: f64) {
    let want = quantise::scale(values, largest);
    assert!((got as f64 / want - 1.0).abs() < 2f64.powi(-17), "scale {got:e}, expected {want:e}");
}

/// `values / scale` in e4m3; a ratio on the edge between two numbers may go either way.
#[track_caller]
fn check_e4m3(got: &[E4M3], values: &[f64], scale: f32) {
    check_scale(scale, values, 448.0);
    let want: Vec<f64> = values.iter().map(|v| (v / scale as f64).clamp(-448.0, 448.0)).collect();
    assert_rounded(got, &want, 2f64.powi(-17), 2f64.powi(-13));
}

#[track_caller]
fn check_i8(got: &[i8], values: &[f64], scale: f32) {
    check_scale(scale, values, 127.0);
    for (i, (g, v)) in got.iter().zip(values).enumerate() {
        let want = v / scale as f64;
        assert!((*g as f64 - want).abs() <= 0.5 + 127.0 * 2f64.powi(-17), "element {i}: {g}, expected {want}");
    }
}

/// All forms of results of some rows, against the reference.
fn check_rows<T: Float>(device: &Device, stream: &Stream, rows: usize, n: usize, [from, to]: [Place; 2], with: With) {
    let case = Case::<T>::new(device, rows, n, from, with);
    let (out, mut residual) = (Rows::<E4M3>::poisoned(device, rows, n, to), case.residual.view());
    let mut scales = Tensor::<f32>::uninit(device, &[rows]).unwrap();
    let options = case.options();
    norm::rms_norm_e4m3_per_token(
        stream,
        &mut out.view(),
        &mut scales,
        case.with.residual.then_some(&mut residual),
        &case.x.view(),
        1e-5,
        &options,
    )
    .unwrap();
    for ((got, want), scale) in out.take().chunks(n).zip(&case.want).zip(scales.to_vec().unwrap()) {
        check_e4m3(got, want, scale);
    }
    case.check_residual();

    let case = Case::<T>::new(device, rows, n, from, with);
    let (out, mut residual) = (Rows::<i8>::poisoned(device, rows, n, to), case.residual.view());
    let options = case.options();
    norm::rms_norm_i8_per_token(
        stream,
        &mut out.view(),
        &mut scales,
        case.with.residual.then_some(&mut residual),
        &case.x.view(),
        1e-5,
        &options,
    )
    .unwrap();
    for ((got, want), scale) in out.take().chunks(n).zip(&case.want).zip(scales.to_vec().unwrap()) {
        check_i8(got, want, scale);
    }
    case.check_residual();

    let case = Case::<T>::new(device, rows, n, from, With { smooth: false, ..with });
    let (out, mut residual) = (Rows::<E4M3>::poisoned(device, rows, n, to), case.residual.view());
    let groups = n.div_ceil(GROUP);
    let strides = if with.smooth { [groups + 1, 1] } else { [1, rows + 1] };
    let all = Tensor::<f32>::zeros(device, &[(groups + 1) * (rows + 1)]).unwrap();
    let mut scales = all.as_strided(&[rows, groups], &strides, 0).unwrap();
    let options = case.options();
    norm::rms_norm_e4m3_per_group(
        stream,
        &mut out.view(),
        &mut scales,
        case.with.residual.then_some(&mut residual),
        &case.x.view(),
        1e-5,
        &options,
    )
    .unwrap();
    let scales = scales.to_vec().unwrap();
    for (r, (got, want)) in out.take().chunks(n).zip(&case.want).enumerate() {
        for (g, (got, want)) in got.chunks(GROUP).zip(want.chunks(GROUP)).enumerate() {
            check_e4m3(got, want, scales[r * groups + g]);
        }
    }
    assert_eq!(all.to_vec().unwrap().iter().filter(|s| **s != 0.0).count(), rows * groups);
    case.check_residual();
}

fn check<T: Float>() {
    let place = || select(Place::ALL.to_vec());
    property(12, (0usize..4, widths(), place(), place(), with()), |device, stream, (rows, n, from, to, with)| {
        check_rows::<T>(device, stream, rows, n, [from, to], with);
        Ok(())
    });
}

fn check_held<T: Float>() {
    on_every_device(|device, stream| {
        for (i, (n, rows)) in HELD.into_iter().enumerate() {
            // Aligned rows as they are; others neither at an aligned address nor at such a distance.
            let place = if n.is_multiple_of(8) { Place::DENSE } else { Place { offset: 3, gap: 6 } };
            for residual in [false, true] {
                // Both ways of every width, by turns: one element type or another has each.
                let smooth = (i + size_of::<T>()).is_multiple_of(2) != residual;
                let with = With { weight: true, one_plus: residual, residual, smooth };
                check_rows::<T>(device, stream, rows, n, [place, place], with);
            }
        }
    });
}

/// Rows that are held where they were read again once.
#[test]
fn held_rows_match_the_reference_in_f32() {
    check_held::<f32>();
}
#[test]
fn held_rows_match_the_reference_in_f16() {
    check_held::<f16>();
}
#[test]
fn held_rows_match_the_reference_in_bf16() {
    check_held::<bf16>();
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
fn rows_of_every_length() {
    on_every_device(|device, stream| {
        for n in LONG.into_iter().chain([65544]) {
            let with = With { weight: true, one_plus: false, residual: true, smooth: false };
            let case = Case::<bf16>::new(device, 1, n, Place::DENSE, with);
            let (out, mut residual) = (Rows::<E4M3>::poisoned(device, 1, n, Place::DENSE), case.residual.view());
            let mut scales = Tensor::<f32>::uninit(device, &[1, n.div_ceil(GROUP)]).unwrap();
            let (x, options) = (case.x.view(), case.options());
            norm::rms_norm_e4m3_per_group(
                stream,
                &mut out.view(),
                &mut scales,
                case.with.residual.then_some(&mut residual),
                &x,
                1e-5,
                &options,
            )
            .unwrap();
            let groups =
                out.take().chunks(GROUP).map(<[E4M3]>::to_vec).zip(scales.to_vec().unwrap()).collect::<Vec<_>>();
            for ((got, scale), want) in groups.iter().zip(case.want[0].chunks(GROUP)) {
                check_e4m3(got, want, *scale);
            }
            case.check_residual();

            let case = Case::<bf16>::new(device, 1, n, Place::DENSE, With { smooth: true, ..with });
            let (out, mut residual) = (Rows::<i8>::poisoned(device, 1, n, Place::DENSE), case.residual.view());
            let mut scales = Tensor::<f32>::uninit(device, &[1]).unwrap();
            let (x, options) = (case.x.view(), case.options());
            norm::rms_norm_i8_per_token(
                stream,
                &mut out.view(),
                &mut scales,
                case.with.residual.then_some(&mut residual),
                &x,
                1e-5,
                &options,
            )
            .unwrap();
            check_i8(&out.take(), &case.want[0], scales.to_vec().unwrap()[0]);
            case.check_residual();
        }
    });
}

/// Each operation on two rows of a width, with all that it may be given.
fn check_each<T: Float>(device: &Device, stream: &Stream, n: usize, residual: bool, at: [usize; 2]) {
    let (rows, with) = (2, With { weight: true, one_plus: false, residual, smooth: true });
    let case = || Case::<T>::new(device, rows, n, Place::DENSE, with).vectors_at(device, at);
    let mut scales = Tensor::<f32>::uninit(device, &[rows]).unwrap();
    let dense = Place::DENSE;

    let (case_e4m3, out) = (case(), Rows::<E4M3>::poisoned(device, rows, n, dense));
    let mut r = case_e4m3.residual.view();
    let (x, options) = (case_e4m3.x.view(), case_e4m3.options());
    let r = residual.then_some(&mut r);
    norm::rms_norm_e4m3_per_token(stream, &mut out.view(), &mut scales, r, &x, 1e-5, &options).unwrap();
    for ((got, want), scale) in out.take().chunks(n).zip(&case_e4m3.want).zip(scales.to_vec().unwrap()) {
        check_e4m3(got, want, scale);
    }
    case_e4m3.check_residual();

    let (case_i8, out) = (case(), Rows::<i8>::poisoned(device, rows, n, dense));
    let mut r = case_i8.residual.view();
    let (x, options) = (case_i8.x.view(), case_i8.options());
    let r = residual.then_some(&mut r);
    norm::rms_norm_i8_per_token(stream, &mut out.view(), &mut scales, r, &x, 1e-5, &options).unwrap();
    for ((got, want), scale) in out.take().chunks(n).zip(&case_i8.want).zip(scales.to_vec().unwrap()) {
        check_i8(got, want, scale);
    }
    case_i8.check_residual();

    let case = Case::<T>::new(device, rows, n, dense, With { smooth: false, ..with }).vectors_at(device, at);
    let (out, groups) = (Rows::<E4M3>::poisoned(device, rows, n, dense), n.div_ceil(GROUP));
    let mut scales = Tensor::<f32>::uninit(device, &[rows, groups]).unwrap();
    let mut r = case.residual.view();
    let (x, options) = (case.x.view(), case.options());
    let r = residual.then_some(&mut r);
    norm::rms_norm_e4m3_per_group(stream, &mut out.view(), &mut scales, r, &x, 1e-5, &options).unwrap();
    let scales = scales.to_vec().unwrap();
    for (r, (got, want)) in out.take().chunks(n).zip(&case.want).enumerate() {
        for (g, (got, want)) in got.chunks(GROUP).zip(want.chunks(GROUP)).enumerate() {
            check_e4m3(got, want, scales[r * groups + g]);
        }
    }
    case.check_residual();
}

#[test]
fn widths_that_peers_get_wrong() {
    on_every_device(|device, stream| {
        for n in WIDTHS {
            check_each::<bf16>(device, stream, n, true, [0; 2]);
            check_each::<f32>(device, stream, n, false, [0; 2]);
        }
    });
}

/// Everything in whole pieces but for where the weights, or the smoothing factors, begin.
#[test]
fn vectors_that_begin_off_a_piece() {
    on_every_device(|device, stream| {
        for n in [256, 768, 4096, 8200] {
            for at in [[1, 0], [0, 1]] {
                check_each::<bf16>(device, stream, n, n == 768, at);
            }
        }
    });
}

/// Rows more than 2^31 elements apart: the same bits as in a small tensor.
#[test]
fn rows_far_apart() {
    FAR.on_every_device(12, |device, stream, rows| {
        for n in [256, 769] {
            let (x, r) = (noise_of::<bf16>(rows * n, 1), noise_of::<bf16>(rows * n, 2));
            let [near_x, mut near_r] = [&x, &r].map(|v| Tensor::from_slice(device, v, &[rows, n]).unwrap());
            let [far_x, far_r] = [&x, &r].map(|v| FAR.rows(device, v, n));
            let far_out = FAR.memory::<E4M3>(device, rows, n);
            let (x, mut r) = (FAR.view(&far_x, n), FAR.view(&far_r, n));
            let options = RmsNormQuantOptions::default();
            let mut scales = [(); 4].map(|()| Tensor::<f32>::uninit(device, &[rows]).unwrap());
            let [a, b, c, d] = &mut scales;

            let mut near_out = Tensor::<E4M3>::uninit(device, &[rows, n]).unwrap();
            norm::rms_norm_e4m3_per_token(stream, &mut near_out, a, Some(&mut near_r), &near_x, 1e-5, &options)
                .unwrap();
            let mut out = FAR.view(&far_out, n);
            norm::rms_norm_e4m3_per_token(stream, &mut out, b, Some(&mut r), &x, 1e-5, &options).unwrap();
            assert_eq!(FAR.read(&far_r, n), near_r.to_vec().unwrap());
            assert_eq!(all_bytes(&FAR.read(&far_out, n)), all_bytes(&near_out.to_vec().unwrap()));

            let mut near_out = near_out.cast::<i8>().unwrap();
            norm::rms_norm_i8_per_token(stream, &mut near_out, c, None, &near_x, 1e-5, &options).unwrap();
            let far_i8 = far_out.cast::<i8>().unwrap();
            norm::rms_norm_i8_per_token(stream, &mut FAR.view(&far_i8, n), d, None, &x, 1e-5, &options).unwrap();
            assert_eq!(FAR.read(&far_i8, n), near_out.to_vec().unwrap());
            let scales = scales.map(|s| s.to_vec().unwrap());
            assert!(scales[0] == scales[1] && scales[2] == scales[3]);

            // The scales of groups, far apart as well.
            let groups = n.div_ceil(GROUP);
            let mut near_scales = Tensor::<f32>::uninit(device, &[rows, groups]).unwrap();
            let mut near_out = near_out.cast::<E4M3>().unwrap();
            norm::rms_norm_e4m3_per_group(stream, &mut near_out, &mut near_scales, None, &near_x, 1e-5, &options)
                .unwrap();
            drop((far_r, r));
            let far_scales = FAR.memory::<f32>(device, if device.is_simt() { rows } else { 1 }, groups * rows);
            let stride = if device.is_simt() { FAR.stride } else { groups };
            let mut scales = far_scales.as_strided(&[rows, groups], &[stride, 1], 0).unwrap();
            let mut out = FAR.view(&far_out, n);
            norm::rms_norm_e4m3_per_group(stream, &mut out, &mut scales, None, &x, 1e-5, &options).unwrap();
            assert_eq!(all_bytes(&FAR.read(&far_out, n)), all_bytes(&near_out.to_vec().unwrap()));
            let near_scales = near_scales.to_vec().unwrap();
            for (i, want) in near_scales.chunks(groups).enumerate() {
                assert_eq!(far_scales.narrow(0, i * stride, groups).unwrap().to_vec().unwrap(), want);
            }
        }
    });
}

#[test]
fn captures_and_repeats_bit_for_bit() {
    on_every_device(|device, stream| {
        device.preload(&["norm"]).unwrap();
        let (rows, n) = (3, 520);
        let mut x = Tensor::<bf16>::uninit(device, &[rows, n]).unwrap();
        let mut r = Tensor::<bf16>::uninit(device, &[rows, n]).unwrap();
        let mut e4m3 = Tensor::<E4M3>::uninit(device, &[rows, n]).unwrap();
        let mut grouped = Tensor::<E4M3>::uninit(device, &[rows, n]).unwrap();
        let mut int8 = Tensor::<i8>::uninit(device, &[rows, n]).unwrap();
        let mut scales = Tensor::<f32>::uninit(device, &[2 * rows]).unwrap();
        let mut group_scales = Tensor::<f32>::uninit(device, &[rows, 5]).unwrap();
        let (mut first, mut second) = (scales.narrow(0, 0, rows).unwrap(), scales.narrow(0, rows, rows).unwrap());
        let options = RmsNormQuantOptions::default();
        let graph = Graph::capture(stream, |s| {
            norm::rms_norm_e4m3_per_token(s, &mut e4m3, &mut first, None, &x, 1e-5, &options)?;
            norm::rms_norm_e4m3_per_group(s, &mut grouped, &mut group_scales, None, &x, 1e-5, &options)?;
            norm::rms_norm_i8_per_token(s, &mut int8, &mut second, Some(&mut r), &x, 1e-5, &options)
        })
        .unwrap();
        let mut run = |seed, replay: bool| {
            stream.fill_bytes(&mut e4m3, 0xff).unwrap();
            stream.fill_bytes(&mut grouped, 0xff).unwrap();
            stream.fill_bytes(&mut int8, 0xff).unwrap();
            stream.fill_bytes(&mut scales, 0xff).unwrap();
            stream.fill_bytes(&mut group_scales, 0xff).unwrap();
            stream.synchronize().unwrap();
            x.copy_from_slice(&noise_of::<bf16>(rows * n, seed)).unwrap();
            r.copy_from_slice(&noise_of::<bf16>(rows * n, seed + 1)).unwrap();
            if replay {
                graph.launch(stream).unwrap();
            } else {
                norm::rms_norm_e4m3_per_token(stream, &mut e4m3, &mut first, None, &x, 1e-5, &options).unwrap();
                norm::rms_norm_e4m3_per_group(stream, &mut grouped, &mut group_scales, None, &x, 1e-5, &options)
                    .unwrap();
                let (out, r) = (&mut int8, Some(&mut r));
                norm::rms_norm_i8_per_token(stream, out, &mut second, r, &x, 1e-5, &options).unwrap();
            }
            [
                all_bytes(&e4m3.to_vec().unwrap()),
                all_bytes(&grouped.to_vec().unwrap()),
                all_bytes(&int8.to_vec().unwrap()),
                all_bytes(&scales.to_vec().unwrap()),
                all_bytes(&group_scales.to_vec().unwrap()),
                all_bytes(&r.to_vec().unwrap()),
            ]
        };
        let (first, second, again, direct) = (run(1, true), run(5, true), run(1, true), run(1, false));
        assert!(first == again && first == direct);
        assert!(first.iter().zip(&second).all(|(a, b)| a != b));
    });
}

#[test]
fn zeros_and_not_a_number() {
    on_every_device(|device, stream| {
        let mut x = vec![0.0f32; 3 * 32];
        x[32..64].fill(2.0);
        x[33] = f32::NAN;
        x[64..].fill(1.0);
        x[70] = f32::INFINITY;
        let dx = Tensor::from_slice(device, &x, &[3, 32]).unwrap();
        let mut out = Tensor::<E4M3>::uninit(device, &[3, 32]).unwrap();
        let mut scales = Tensor::<f32>::uninit(device, &[3]).unwrap();
        let options = RmsNormQuantOptions::default;
        norm::rms_norm_e4m3_per_token(stream, &mut out, &mut scales, None, &dx, 1e-5, &options()).unwrap();
        let (out, scales) = (out.to_vec().unwrap(), scales.to_vec().unwrap());
        assert!(out[..32].iter().all(|v| v.to_f32() == 0.0));
        assert!(out[32..64].iter().all(|v| v.to_f32().is_nan()));
        assert!(out[70].to_f32().is_nan() && out[64].to_f32() == 0.0);
        assert!(scales.iter().all(|s| s.is_finite() && *s > 0.0));
        let mut out = Tensor::<i8>::uninit(device, &[3, 32]).unwrap();
        let mut scales = Tensor::<f32>::uninit(device, &[3]).unwrap();
        norm::rms_norm_i8_per_token(stream, &mut out, &mut scales, None, &dx, 1e-5, &options()).unwrap();
        assert!(out.to_vec().unwrap().iter().all(|v| *v == 0));
    });
}

/// Rows of nothing are as many as one likes, since no memory bounds their number: they are not gone through.
#[test]
fn rows_of_nothing_cost_nothing() {
    on_every_device(|device, stream| {
        let rows = i32::MAX as usize;
        let x = Tensor::<f32>::zeros(device, &[rows, 0]).unwrap();
        let mut out = Tensor::<E4M3>::zeros(device, &[rows, 0]).unwrap();
        let mut scales = Tensor::<f32>::zeros(device, &[rows, 0]).unwrap();
        let options = RmsNormQuantOptions::default();
        norm::rms_norm_e4m3_per_group(stream, &mut out, &mut scales, None, &x, 1e-5, &options).unwrap();
        stream.synchronize().unwrap();
    });
}

/// Groups whose results are below what scales are made for: of a small row, of small weights, and zeros; a row with a NaN has no other results.
#[test]
fn groups_below_the_least_scale() {
    on_every_device(|device, stream| {
        let n = 256;
        let mut x = noise_of::<f32>(3 * n, 1);
        x[..n].iter_mut().for_each(|x| *x *= 1e-14);
        x[2 * n + 3] = f32::NAN;
        let mut w = noise_of::<f32>(n, 2);
        w[..GROUP].iter_mut().for_each(|w| *w *= 1e-12);
        w[5] = 0.0;
        let dx = Tensor::from_slice(device, &x, &[3, n]).unwrap();
        let dw = Tensor::from_slice(device, &w, &[n]).unwrap();
        let options = RmsNormQuantOptions::default().weight(&dw);
        for residual in [false, true] {
            let mut out = Tensor::<E4M3>::uninit(device, &[3, n]).unwrap();
            let mut scales = Tensor::<f32>::uninit(device, &[3, 2]).unwrap();
            let mut zeros = Tensor::<f32>::zeros(device, &[3, n]).unwrap();
            let residual = residual.then_some(&mut zeros);
            norm::rms_norm_e4m3_per_group(stream, &mut out, &mut scales, residual, &dx, 1e-5, &options).unwrap();
            let (out, scales) = (out.to_vec().unwrap(), scales.to_vec().unwrap());
            let weight = widen(&w);
            for r in 0..2 {
                let want = reference::rms_norm(&widen(&x[r * n..][..n]), Some(&weight), 1e-5);
                for g in 0..2 {
                    let at = r * n + g * GROUP;
                    check_e4m3(&out[at..at + GROUP], &want[g * GROUP..][..GROUP], scales[2 * r + g]);
                }
            }
            assert!(out[2 * n..].iter().all(|v| v.to_f32().is_nan()));
        }
    });
}

/// Twice the same bits, and a row alone as among others.
#[test]
fn repeats_bit_for_bit() {
    on_every_device(|device, stream| {
        let x = Tensor::from_slice(device, &noise_of::<f16>(9 * 776, 1), &[9, 776]).unwrap();
        let run = |x: &Tensor<f16>| {
            let mut out = Tensor::<i8>::uninit(device, x.shape()).unwrap();
            let mut scales = Tensor::<f32>::uninit(device, &[x.dim(0)]).unwrap();
            norm::rms_norm_i8_per_token(stream, &mut out, &mut scales, None, x, 1e-5, &RmsNormQuantOptions::default())
                .unwrap();
            (out.to_vec().unwrap(), all_bytes(&scales.to_vec().unwrap()))
        };
        let all = run(&x);
        assert_eq!(run(&x), all);
        assert_eq!(run(&x.narrow(0, 8, 1).unwrap()), (all.0[8 * 776..].to_vec(), all.1[8 * 4..].to_vec()));
    });
}

#[test]
fn refuses_what_it_cannot_do() {
    let device = Device::simt();
    let stream = Stream::new(&device).unwrap();
    let floats = |shape: &[usize]| Tensor::<f32>::zeros(&device, shape).unwrap();
    let x = floats(&[4, 256]);
    let mut out = Tensor::<E4M3>::zeros(&device, &[4, 256]).unwrap();
    let options = RmsNormQuantOptions::<f32>::default;
    let (weight, smooth) = (floats(&[255]), floats(&[256]));

    let mut token = |scales: &mut Tensor<f32>, x: &Tensor<f32>, eps: f32, options: RmsNormQuantOptions<'_, f32>| {
        norm::rms_norm_e4m3_per_token(&stream, &mut out, scales, None, x, eps, &options).unwrap_err()
    };
    let mut scales = floats(&[4]);
    assert!(matches!(token(&mut floats(&[3]), &x, 0.0, options()), Error::Shape { arg: "scales", .. }));
    assert!(matches!(token(&mut scales, &floats(&[4, 255]), 0.0, options()), Error::Shape { arg: "out", .. }));
    assert!(matches!(token(&mut scales, &x, f32::NAN, options()), Error::Value { arg: "eps", .. }));
    assert!(matches!(token(&mut scales, &x, 0.0, options().weight(&weight)), Error::Shape { arg: "weight", .. }));
    assert!(matches!(token(&mut scales, &x, 0.0, options().smooth(&weight)), Error::Shape { arg: "smooth", .. }));
    let mut inside = x.as_strided(&[4], &[1], 0).unwrap();
    assert!(matches!(token(&mut inside, &x, 0.0, options()), Error::Overlap { .. }));

    let mut short = floats(&[4, 255]);
    let e = norm::rms_norm_e4m3_per_token(&stream, &mut out, &mut scales, Some(&mut short), &x, 0.0, &options());
    assert!(matches!(e, Err(Error::Shape { arg: "residual", .. })));

    let mut group = |scales: &mut Tensor<f32>, options: RmsNormQuantOptions<'_, f32>| {
        norm::rms_norm_e4m3_per_group(&stream, &mut out, scales, None, &x, 0.0, &options).unwrap_err()
    };
    assert!(matches!(group(&mut floats(&[4, 1]), options()), Error::Shape { arg: "scales", .. }));
    // What to do instead depends on what the factors have to go into.
    let weight = floats(&[256]);
    for (options, other) in [
        (options(), "or give the factors as `weight`"),
        (options().weight(&weight), "or multiply `weight` with the factors"),
        (options().one_plus_weight(&weight), "or give `(1 + weight) * factors` as `weight` without `one_plus_weight`"),
    ] {
        let e = group(&mut floats(&[4, 2]), options.smooth(&smooth));
        assert!(matches!(&e, Error::Unsupported { what, .. } if what.ends_with(other)), "{e}");
    }
    let mut same = floats(&[8]).as_strided(&[4, 2], &[1, 1], 0).unwrap();
    assert!(matches!(group(&mut same, options()), Error::Stride { arg: "scales", .. }));
}

/// The results of an entry for dense rows, the bytes of their scales, and those of the residual.
fn tokens_launched(
    stream: &Stream,
    entry: Option<Entry<quant::I8PerTokenArgs>>,
    geometry: Geometry,
    x: &Tensor<bf16>,
    w: &Tensor<bf16>,
    residual: bool,
) -> (Vec<i8>, Vec<u8>, Vec<u8>) {
    let (device, rows, n) = (x.device(), x.shape()[0], x.shape()[1]);
    let mut out = Tensor::<i8>::zeros(device, &[rows, n]).unwrap();
    let mut scales = Tensor::<f32>::zeros(device, &[rows]).unwrap();
    let mut r = Tensor::from_slice(device, &noise_of::<bf16>(rows * n, 3), &[rows, n]).unwrap();
    let args = quant::I8PerTokenArgs {
        x: x.as_ptr().cast(),
        residual: if residual { r.as_mut_ptr().cast() } else { std::ptr::null_mut() },
        weight: w.as_ptr().cast(),
        smooth: std::ptr::null(),
        out: out.as_mut_ptr().cast(),
        scales: scales.as_mut_ptr().cast(),
        rows: rows as u32,
        n: n as u32,
        x_stride: n,
        residual_stride: n,
        out_stride: n,
        weight_offset: 0.0,
        eps: 1e-5,
    };
    // SAFETY: the tensors are as large as the arguments say, and live on.
    unsafe { stream.launch(&entry.unwrap(), &geometry, &args) }.unwrap();
    stream.synchronize().unwrap();
    (out.to_vec().unwrap(), all_bytes(&scales.to_vec().unwrap()), all_bytes(&r.to_vec().unwrap()))
}

/// As [`tokens_launched`].
fn groups_launched(
    stream: &Stream,
    entry: Option<Entry<quant::E4m3PerGroupArgs>>,
    geometry: Geometry,
    x: &Tensor<bf16>,
    w: &Tensor<bf16>,
    residual: bool,
) -> [Vec<u8>; 3] {
    let (device, rows, n) = (x.device(), x.shape()[0], x.shape()[1]);
    let groups = n.div_ceil(GROUP);
    let mut out = Tensor::<E4M3>::zeros(device, &[rows, n]).unwrap();
    let mut scales = Tensor::<f32>::zeros(device, &[rows, groups]).unwrap();
    let mut r = Tensor::from_slice(device, &noise_of::<bf16>(rows * n, 3), &[rows, n]).unwrap();
    let args = quant::E4m3PerGroupArgs {
        x: x.as_ptr().cast(),
        residual: if residual { r.as_mut_ptr().cast() } else { std::ptr::null_mut() },
        weight: w.as_ptr().cast(),
        out: out.as_mut_ptr().cast(),
        scales: scales.as_mut_ptr().cast(),
        rows: rows as u32,
        n: n as u32,
        x_stride: n,
        residual_stride: n,
        out_stride: n,
        scale_row_stride: groups,
        scale_group_stride: 1,
        weight_offset: 0.0,
        eps: 1e-5,
    };
    // SAFETY: the tensors are as large as the arguments say, and live on.
    unsafe { stream.launch(&entry.unwrap(), &geometry, &args) }.unwrap();
    stream.synchronize().unwrap();
    [all_bytes(&out.to_vec().unwrap()), all_bytes(&scales.to_vec().unwrap()), all_bytes(&r.to_vec().unwrap())]
}

/// Rows that are held in registers where others of their variant are read twice: the results are the same bits, in rows without a number, too.
#[test]
fn held_rows_are_the_same_bits() {
    on_every_device(|device, stream| {
        for (rows, n) in [(2usize, 46usize), (2, 769), (1, 9001), (2, 16392), (1, 40000)] {
            let variant = Variant::new(DType::Bf16, n as u32, n.is_multiple_of(8));
            let held = quant::held(DType::Bf16, variant, n as u32).unwrap();
            let geometry = quant::held_geometry(DType::Bf16, held, rows as u32, n as u32);
            let (mut x, w) = (noise_of::<bf16>(rows * n, 1), noise_of::<bf16>(n, 2));
            if rows > 1 {
                (x[5], x[n + 7]) = (bf16::NAN, bf16::INFINITY);
            }
            let x = Tensor::from_slice(device, &x, &[rows, n]).unwrap();
            let w = Tensor::from_slice(device, &w, &[n]).unwrap();
            for add in [false, true] {
                let run = |entry| tokens_launched(stream, entry, geometry, &x, &w, add);
                let want = run(quant::i8_per_token_entry(DType::Bf16, variant, add));
                assert_eq!(run(quant::i8_per_token_held_entry(DType::Bf16, held, add)), want);
                let run = |entry| groups_launched(stream, entry, geometry, &x, &w, add);
                let want = run(quant::e4m3_per_group_entry(DType::Bf16, variant, add));
                assert_eq!(run(quant::e4m3_per_group_held_entry(DType::Bf16, held, add)), want);
            }
        }
    });
}

/// Rows that are held unless there are more of them than multiprocessors, which take them in turns (on other GPUs than Hopper a few more are read twice): what a row gives does not
/// depend on how many there are.
#[test]
fn many_long_rows_are_the_same_bits_as_few() {
    on_every_device(|device, stream| {
        let (rows, n) = (133usize, 20488usize);
        let multiprocessors = device.properties().multiprocessors;
        let turns = |rows| quant::better_in_turns(DType::Bf16, n as u32, rows, multiprocessors, true);
        assert!(turns(rows as u32) && !turns(1));
        let held = quant::held(DType::Bf16, Variant::Loop, n as u32).unwrap();
        let threads = quant::held_geometry(DType::Bf16, held, rows as u32, n as u32).block[0];
        assert!([false, true].map(|add| quant::better_read_twice(held, threads, rows as u32, add)) == [true; 2]);
        assert!(!quant::better_read_twice(held, threads, 1, false));
        let x = Tensor::from_slice(device, &noise_of::<bf16>(rows * n, 1), &[rows, n]).unwrap();
        for add in [false, true] {
            let run = |first: usize, count: usize| {
                let x = x.narrow(0, first, count).unwrap();
                let residual = noise_of::<bf16>(rows * n, 2)[first * n..][..count * n].to_vec();
                let mut residual = Tensor::from_slice(device, &residual, &[count, n]).unwrap();
                let mut out = Tensor::<i8>::uninit(device, &[count, n]).unwrap();
                let mut scales = Tensor::<f32>::uninit(device, &[count]).unwrap();
                let options = RmsNormQuantOptions::default();
                let added = add.then_some(&mut residual);
                norm::rms_norm_i8_per_token(stream, &mut out, &mut scales, added, &x, 1e-5, &options).unwrap();
                (out.to_vec().unwrap(), scales.to_vec().unwrap(), residual.to_vec().unwrap())
            };
            let all = run(0, rows);
            let one = run(rows - 1, 1);
            assert_eq!(all.0[(rows - 1) * n..], one.0);
            assert_eq!(all.1[rows - 1..], one.1);
            assert!(all.2[(rows - 1) * n..] == one.2);
        }
    });
}

/// Blocks that take long rows in turns, from one row to five a block, the last of them fewer: the bits of rows that are held, of those that keep results and of those that keep the
/// row, in rows without a number, too.
#[test]
fn rows_in_turns_are_the_same_bits() {
    on_every_device(|device, stream| {
        if skipped_without_hopper(device) {
            return;
        }
        for (rows, n, blocks) in [(5usize, 16392usize, 1), (5, 20480, 2), (7, 26632, 3), (2, 32768, 2), (3, 40000, 1)] {
            let held = quant::held(DType::Bf16, Variant::Loop, n as u32).unwrap();
            let usual = quant::held_geometry(DType::Bf16, held, rows as u32, n as u32);
            let turns = |add| quant::ring_geometry(DType::Bf16, n as u32, add, blocks);
            let (mut x, mut w) = (noise_of::<bf16>(rows * n, 1), noise_of::<bf16>(n, 2));
            (x[5], x[n + 7], w[9]) = (bf16::NAN, bf16::INFINITY, bf16::from_f32(-0.0));
            let x = Tensor::from_slice(device, &x, &[rows, n]).unwrap();
            let w = Tensor::from_slice(device, &w, &[n]).unwrap();
            for add in [false, true] {
                let run = |entry, geometry| tokens_launched(stream, entry, geometry, &x, &w, add);
                let want = run(quant::i8_per_token_held_entry(DType::Bf16, held, add), usual);
                assert!(
                    run(quant::i8_per_token_ring_entry(DType::Bf16, n as u32, add), turns(add)) == want,
                    "{n} {add}"
                );
                let run = |entry, geometry| groups_launched(stream, entry, geometry, &x, &w, add);
                let want = run(quant::e4m3_per_group_held_entry(DType::Bf16, held, add), usual);
                let got = run(quant::e4m3_per_group_ring_entry(DType::Bf16, n as u32, add), turns(add));
                assert!(got == want, "{n} {add}");
            }
        }
    });
}

/// Clusters of blocks for a row each, of which the last may have nothing to do: the bits of rows of one block, in rows without a number, too.
#[test]
fn rows_in_clusters_are_the_same_bits() {
    on_every_device(|device, stream| {
        let widths = [1032usize, 7168, 8192, 8200, 16384, 16392, 40000];
        for n in widths.into_iter().filter(|_| !skipped_without_hopper(device)) {
            let (rows, variant) = (3, Variant::new(DType::Bf16, n as u32, true));
            let held = quant::held(DType::Bf16, variant, n as u32);
            let usual = match held {
                Some(how) => quant::held_geometry(DType::Bf16, how, rows as u32, n as u32),
                None => quant::geometry(DType::Bf16, variant, rows as u32, n as u32),
            };
            let clusters = rms_norm::cluster_geometry(DType::Bf16, variant, rows as u32, n as u32).unwrap();
            let (mut x, mut w) = (noise_of::<bf16>(rows * n, 1), noise_of::<bf16>(n, 2));
            (x[n + 5], x[2 * n + 7], w[9]) = (bf16::NAN, bf16::INFINITY, bf16::from_f32(-0.0));
            let x = Tensor::from_slice(device, &x, &[rows, n]).unwrap();
            let w = Tensor::from_slice(device, &w, &[n]).unwrap();
            for add in [false, true] {
                let run = |entry, geometry| tokens_launched(stream, entry, geometry, &x, &w, add);
                let want = match held {
                    Some(how) => run(quant::i8_per_token_held_entry(DType::Bf16, how, add), usual),
                    None => run(quant::i8_per_token_entry(DType::Bf16, variant, add), usual),
                };
                let entry = quant::i8_per_token_cluster_entry(DType::Bf16, variant, n as u32, add);
                assert!(run(entry, clusters) == want, "{n} {add}");
                let run = |entry, geometry| groups_launched(stream, entry, geometry, &x, &w, add);
                let want = match held {
                    Some(how) => run(quant::e4m3_per_group_held_entry(DType::Bf16, how, add), usual),
                    None => run(quant::e4m3_per_group_entry(DType::Bf16, variant, add), usual),
                };
                let entry = quant::e4m3_per_group_cluster_entry(DType::Bf16, variant, n as u32, add);
                assert!(run(entry, clusters) == want, "{n} {add}");
            }
        }
        assert!(quant::i8_per_token_cluster_entry(DType::Bf16, Variant::Loop, 40968, false).is_none());
    });
}

/// The same of rows that are not aligned, each of them further from a multiple of 16 bytes than the one before, and so are their results.
#[test]
fn unaligned_rows_in_turns_are_the_same_bits() {
    if skipped_under_synccheck() {
        return;
    }
    on_every_device(|device, stream| {
        if skipped_without_hopper(device) {
            return;
        }
        for (rows, n, blocks) in [(7usize, 769usize, 1), (9, 1537, 2), (7, 5125, 2), (3, 8191, 3)] {
            let usual = quant::held_geometry(DType::Bf16, Held::AnyX4, rows as u32, n as u32);
            let turns = |add| rms_norm::any_ring_geometry(DType::Bf16, n as u32, add, blocks).unwrap();
            let (mut x, mut w) = (noise_of::<bf16>(rows * n, 1), noise_of::<bf16>(n, 2));
            (x[5], x[n + 7], x[2 * n - 1], w[9]) =
                (bf16::NAN, bf16::INFINITY, bf16::NEG_INFINITY, bf16::from_f32(-0.0));
            let x = Tensor::from_slice(device, &x, &[rows, n]).unwrap();
            let w = Tensor::from_slice(device, &w, &[n]).unwrap();
            for add in [false, true] {
                let run = |entry, geometry| tokens_launched(stream, entry, geometry, &x, &w, add);
                let want = run(quant::i8_per_token_held_entry(DType::Bf16, Held::AnyX4, add), usual);
                assert!(run(quant::i8_per_token_any_ring_entry(DType::Bf16, add), turns(add)) == want, "{n} {add}");
                let run = |entry, geometry| groups_launched(stream, entry, geometry, &x, &w, add);
                let want = run(quant::e4m3_per_group_held_entry(DType::Bf16, Held::AnyX4, add), usual);
                assert!(run(quant::e4m3_per_group_any_ring_entry(DType::Bf16, add), turns(add)) == want, "{n} {add}");
            }
        }
    });
}

/// A row more than blocks take at once, of rows that are not aligned: everything that may be asked for, smoothed ones held as elsewhere.
fn check_unaligned_in_turns<T: Float>() {
    if skipped_under_synccheck() {
        return;
    }
    on_every_device(|device, stream| {
        let [dense, .., apart] = Place::ALL;
        let off = Place { offset: 1, gap: 0 };
        for (n, residual, from, to) in
            [(1537, false, dense, dense), (769, true, apart, off), (1801, false, off, apart), (1160, true, off, dense)]
        {
            let blocks = rms_norm::any_ring_blocks(T::DTYPE, n as u32, residual).unwrap();
            let rows = (blocks * device.properties().multiprocessors) as usize + 1;
            let with = With { weight: n != 1537, one_plus: residual, residual, smooth: n == 1160 };
            check_rows::<T>(device, stream, rows, n, [from, to], with);
        }
    });
}

#[test]
fn unaligned_rows_in_turns_match_the_reference_in_f32() {
    check_unaligned_in_turns::<f32>();
}
#[test]
fn unaligned_rows_in_turns_match_the_reference_in_f16() {
    check_unaligned_in_turns::<f16>();
}
#[test]
fn unaligned_rows_in_turns_match_the_reference_in_bf16() {
    check_unaligned_in_turns::<bf16>();
}

/// A row more than two for each multiprocessor: everything that may be asked for, of rows whose results are kept and of rows that are kept themselves.
fn check_in_turns<T: Float>() {
    on_every_device(|device, stream| {
        let rows = 2 * device.properties().multiprocessors as usize + 1;
        let apart = Place { offset: 16, gap: 48 };
        for (bytes, residual, place) in [(33, false, Place::DENSE), (34, true, apart), (68, true, Place::DENSE)] {
            // The last group is narrower.
            let n = (bytes << 10) / size_of::<T>() + 8;
            let with = With { weight: bytes != 68, one_plus: residual, residual, smooth: bytes == 34 };
            check_rows::<T>(device, stream, rows, n, [place; 2], with);
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

/// The residual may be the very input, of which the copy engine brings both before either is replaced.
#[test]
fn rows_in_turns_are_added_to_themselves() {
    on_every_device(|device, stream| {
        let (rows, n) = (device.properties().multiprocessors as usize + 1, 16400);
        let data = noise_of::<bf16>(rows * n, 1);
        let run = |same: bool| {
            let x = Tensor::from_slice(device, &data, &[rows, n]).unwrap();
            let mut residual = if same {
                x.as_strided(&[rows, n], &[n, 1], 0).unwrap()
            } else {
                Tensor::from_slice(device, &data, &[rows, n]).unwrap()
            };
            let mut out = Tensor::<i8>::uninit(device, &[rows, n]).unwrap();
            let mut scales = Tensor::<f32>::uninit(device, &[rows]).unwrap();
            let options = RmsNormQuantOptions::default();
            norm::rms_norm_i8_per_token(stream, &mut out, &mut scales, Some(&mut residual), &x, 1e-5, &options)
                .unwrap();
            (out.to_vec().unwrap(), scales.to_vec().unwrap(), all_bytes(&residual.to_vec().unwrap()))
        };
        assert!(run(true) == run(false));
    });
}

/// What an entry is compiled for: rows of eight pieces a thread have fewer threads here than elsewhere.
#[test]
fn held_rows_fit_their_entries() {
    for dtype in [DType::F32, DType::F16, DType::Bf16] {
        for bytes in [32 << 10, (32 << 10) + 16, 80 << 10, (80 << 10) + 16, 128 << 10] {
            let n = (bytes / dtype.size()) as u32;
            let held = quant::held(dtype, Variant::new(dtype, n, true), n);
            assert_eq!(held, (32 << 10 < bytes && bytes <= 80 << 10).then_some(Held::X8), "{n} {dtype}");
            let Some(held) = held else { continue };
            let [threads, ..] = quant::held_geometry(dtype, held, 1, n).block;
            assert!(threads <= 640 && threads as usize * 8 * 16 >= bytes, "{n} {dtype}");
            for add in [false, true] {
                let turns = quant::ring_geometry(dtype, n, add, 132);
                assert!(turns.block == [threads, 1, 1] && turns.grid == [132, 1, 1], "{n} {dtype}");
                // What a block of a Hopper GPU has.
                assert!(turns.shared_bytes <= 227 << 10, "{n} {dtype}");
                let entry = quant::e4m3_per_token_ring_entry(dtype, n, add).unwrap();
                assert!(threads <= entry.max_threads, "{n} {dtype}");
            }
        }
    }
}

/// The entries for many rows and for narrow ones, which take over where a property test does not get to, give the same bits as the others: with
/// whole pieces a thread and without, where a row has no number, and where the last block has rows to spare.
#[test]
fn many_rows_and_narrow_ones_are_the_same_bits() {
    on_every_device(|device, stream| {
        for n in [512, 680, 1720, 2048] {
            let rows = 3;
            let (mut x, w) = (noise_of::<bf16>(rows * n, 1), noise_of::<bf16>(n, 2));
            (x[5], x[n + 7]) = (bf16::NAN, bf16::INFINITY);
            let x = Tensor::from_slice(device, &x, &[rows, n]).unwrap();
            let w = Tensor::from_slice(device, &w, &[n]).unwrap();
            let usual = quant::geometry(DType::Bf16, Variant::X2, rows as u32, n as u32);
            let narrow = quant::narrow_geometry(DType::Bf16, rows as u32, n as u32, false).unwrap();
            // As for many rows: two of them in a block.
            let twos = |mut geometry: Geometry| {
                (geometry.grid[0], geometry.block[1]) = (2, 2);
                geometry
            };

            let run = |entry, geometry, add| tokens_launched(stream, entry, geometry, &x, &w, add);
            for add in [false, true] {
                let want = run(quant::i8_per_token_entry(DType::Bf16, Variant::X2, add), usual, add);
                for geometry in [narrow, twos(narrow)] {
                    assert_eq!(run(quant::i8_per_token_narrow_entry(DType::Bf16, add), geometry, add), want);
                }
                if let (false, Some(many)) = (add, quant::many_geometry(DType::Bf16, rows as u32, n as u32)) {
                    assert_eq!(run(quant::i8_per_token_many_entry(DType::Bf16), many, add), want);
                }
                if let (false, Some(x3)) = (add, quant::narrow_x3_geometry(DType::Bf16, rows as u32, n as u32)) {
                    assert_eq!(run(quant::i8_per_token_narrow_x3_entry(DType::Bf16), x3, add), want);
                }
            }

            let run = |entry, geometry, add| groups_launched(stream, entry, geometry, &x, &w, add);
            for add in [false, true] {
                let want = run(quant::e4m3_per_group_entry(DType::Bf16, Variant::X2, add), usual, add);
                for geometry in [narrow, twos(narrow)] {
                    assert_eq!(run(quant::e4m3_per_group_narrow_entry(DType::Bf16, add), geometry, add), want);
                }
                if let (false, Some(many)) = (add, quant::many_geometry(DType::Bf16, rows as u32, n as u32)) {
                    assert_eq!(run(quant::e4m3_per_group_many_entry(DType::Bf16), many, add), want);
                }
            }
            let want = run(quant::e4m3_per_group_entry(DType::Bf16, Variant::X2, false), usual, false);
            assert_eq!(run(quant::e4m3_per_group_narrow_many_entry(DType::Bf16), twos(narrow), false), want);
            if let Some(x3) = quant::narrow_x3_geometry(DType::Bf16, rows as u32, n as u32) {
                assert_eq!(run(quant::e4m3_per_group_narrow_x3_entry(DType::Bf16), x3, false), want);
            }
        }
        // 7 warps cannot be halved, 16 KiB are the most, and one warp is too short a block.
        assert!([3584, 8200, 1024].iter().all(|&n| quant::many_geometry(DType::Bf16, 1, n).is_none()));
        assert!(quant::narrow_geometry(DType::Bf16, 1, 2056, false).is_none());
        assert!([512, 776].iter().all(|&n| quant::narrow_x3_geometry(DType::Bf16, 1, n).is_none()));
    });
}

#[test]
fn entries_have_the_names_of_what_they_do() {
    for dtype in [DType::F32, DType::F16, DType::Bf16] {
        let name = |q: &str| format!("rms_norm_{q}_per_token_few_{dtype}");
        assert_eq!(quant::e4m3_per_token_few_entry(dtype).unwrap().name, name("e4m3"));
        assert_eq!(quant::i8_per_token_few_entry(dtype).unwrap().name, name("i8"));
        let name = |q: &str| format!("rms_norm_{q}_many_{dtype}");
        assert_eq!(quant::e4m3_per_token_many_entry(dtype).unwrap().name, name("e4m3_per_token"));
        assert_eq!(quant::i8_per_token_many_entry(dtype).unwrap().name, name("i8_per_token"));
        assert_eq!(quant::e4m3_per_group_many_entry(dtype).unwrap().name, name("e4m3_per_group"));
        let name = |q: &str| format!("rms_norm_{q}_{dtype}");
        assert_eq!(quant::e4m3_per_token_narrow_x3_entry(dtype).unwrap().name, name("e4m3_per_token_narrow_x3"));
        assert_eq!(quant::i8_per_token_narrow_x3_entry(dtype).unwrap().name, name("i8_per_token_narrow_x3"));
        assert_eq!(quant::e4m3_per_group_narrow_many_entry(dtype).unwrap().name, name("e4m3_per_group_narrow_many"));
        assert_eq!(quant::e4m3_per_group_narrow_x3_entry(dtype).unwrap().name, name("e4m3_per_group_narrow_x3"));
        for (add, prefix) in [(false, ""), (true, "fused_add_")] {
            let name = |q: &str| format!("{prefix}rms_norm_{q}_narrow_{dtype}");
            assert_eq!(quant::e4m3_per_token_narrow_entry(dtype, add).unwrap().name, name("e4m3_per_token"));
            assert_eq!(quant::i8_per_token_narrow_entry(dtype, add).unwrap().name, name("i8_per_token"));
            assert_eq!(quant::e4m3_per_group_narrow_entry(dtype, add).unwrap().name, name("e4m3_per_group"));
        }
        for (held, name) in [(Held::AnyX4, "any_x4"), (Held::X8, "x8")] {
            for (add, prefix) in [(false, ""), (true, "fused_add_")] {
                let name = |q: &str| format!("{prefix}rms_norm_{q}_{name}_{dtype}");
                assert_eq!(quant::e4m3_per_token_held_entry(dtype, held, add).unwrap().name, name("e4m3_per_token"));
                assert_eq!(quant::i8_per_token_held_entry(dtype, held, add).unwrap().name, name("i8_per_token"));
                assert_eq!(quant::e4m3_per_group_held_entry(dtype, held, add).unwrap().name, name("e4m3_per_group"));
            }
        }
        for (add, prefix) in [(false, ""), (true, "fused_add_")] {
            let name = |q: &str| format!("{prefix}rms_norm_{q}_any_ring_{dtype}");
            assert_eq!(quant::e4m3_per_token_any_ring_entry(dtype, add).unwrap().name, name("e4m3_per_token"));
            assert_eq!(quant::i8_per_token_any_ring_entry(dtype, add).unwrap().name, name("i8_per_token"));
            assert_eq!(quant::e4m3_per_group_any_ring_entry(dtype, add).unwrap().name, name("e4m3_per_group"));
        }
        for (v, bytes, held) in
            [(Variant::X2, 512, "x2"), (Variant::X4, 32 << 10, "x4"), (Variant::Loop, 64 << 10, "x8")]
        {
            let n = (bytes / dtype.size()) as u32;
            for (add, prefix) in [(false, ""), (true, "fused_add_")] {
                let name = |q: &str| format!("{prefix}rms_norm_{q}_cluster_{held}_{dtype}");
                assert_eq!(quant::e4m3_per_token_cluster_entry(dtype, v, n, add).unwrap().name, name("e4m3_per_token"));
                assert_eq!(quant::i8_per_token_cluster_entry(dtype, v, n, add).unwrap().name, name("i8_per_token"));
                assert_eq!(quant::e4m3_per_group_cluster_entry(dtype, v, n, add).unwrap().name, name("e4m3_per_group"));
            }
        }
        // Up to 64 KiB, and of 32-bit elements, results are kept.
        for (n, name) in [(32768, "ring"), (32776, if dtype == DType::F32 { "ring" } else { "ring_long" })] {
            for (add, prefix) in [(false, ""), (true, "fused_add_")] {
                let name = |q: &str| format!("{prefix}rms_norm_{q}_{name}_{dtype}");
                assert_eq!(quant::e4m3_per_token_ring_entry(dtype, n, add).unwrap().name, name("e4m3_per_token"));
                assert_eq!(quant::i8_per_token_ring_entry(dtype, n, add).unwrap().name, name("i8_per_token"));
                assert_eq!(quant::e4m3_per_group_ring_entry(dtype, n, add).unwrap().name, name("e4m3_per_group"));
            }
        }
        for (v, name) in [(Variant::X2, "x2"), (Variant::X4, "x4"), (Variant::Loop, "loop"), (Variant::Any, "any")] {
            for (add, prefix) in [(false, ""), (true, "fused_add_")] {
                let name = |q: &str| format!("{prefix}rms_norm_{q}_{name}_{dtype}");
                assert_eq!(quant::e4m3_per_token_entry(dtype, v, add).unwrap().name, name("e4m3_per_token"));
                assert_eq!(quant::i8_per_token_entry(dtype, v, add).unwrap().name, name("i8_per_token"));
                assert_eq!(quant::e4m3_per_group_entry(dtype, v, add).unwrap().name, name("e4m3_per_group"));
            }
        }
    }
}
