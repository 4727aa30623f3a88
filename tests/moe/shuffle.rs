use cuda_std::Element;
use warploom::moe::{GateUp, shuffle_weights};
use warploom::{Device, E4M3, Error, Graph, Stream, Tensor, bf16, f16};
use warploom_tests::{noise_of, on_every_device};

/// Where an element of `[rows, k]` goes in the documented order.
fn place([rows, k]: [usize; 2], step: usize, gate_up: Option<GateUp>, row: usize, column: usize) -> usize {
    let gates = rows / 2;
    let (tile_rows, at) = match gate_up {
        None => (64, row),
        Some(GateUp::GateOnly) => (32, row),
        Some(layout) => {
            let (output, value) = match layout {
                GateUp::Halves => (row % gates, row / gates),
                _ => (row / 2, row % 2),
            };
            (64, output / 8 * 16 + value * 8 + output % 8)
        }
    };
    let tile = at / tile_rows * (k / step) + column / step;
    (tile * tile_rows + at % tile_rows) * step + column % step
}

fn check<T: Element + std::fmt::Debug>(
    d: &Device,
    s: &Stream,
    shape: [usize; 3],
    gate_up: Option<GateUp>,
    of: impl Fn(usize) -> T,
) {
    let [experts, rows, k] = shape;
    let weights: Vec<T> = (0..experts * rows * k).map(of).collect();
    let mut want = weights.clone();
    for e in 0..experts {
        let (from, to) = (&weights[e * rows * k..], &mut want[e * rows * k..]);
        for row in 0..rows {
            for column in 0..k {
                to[place([rows, k], 128 / size_of::<T>(), gate_up, row, column)] = from[row * k + column];
            }
        }
    }
    let mut out = Tensor::<T>::uninit(d, &shape).unwrap();
    s.fill_bytes(&mut out, 0xff).unwrap();
    shuffle_weights(s, &mut out, &Tensor::from_slice(d, &weights, &shape).unwrap(), gate_up).unwrap();
    let bytes = |v: &[T]| v.iter().map(|v| format!("{v:?}")).collect::<Vec<_>>();
    assert_eq!(bytes(&out.to_vec().unwrap()), bytes(&want), "{shape:?} {gate_up:?}");
}

#[test]
fn is_the_documented_order() {
    on_every_device(|d, s| {
        for gate_up in [None, Some(GateUp::Halves), Some(GateUp::Interleaved), Some(GateUp::GateOnly)] {
            check(d, s, [2, 128, 192], gate_up, |i| bf16::from_bits((i * 7 % 30_000) as u16));
            check(d, s, [3, 64, 64], gate_up, |i| f16::from_bits((i * 5 % 30_000) as u16));
            check(d, s, [1, 192, 256], gate_up, |i| E4M3::from_f32_const((i * 7 % 251) as f32 - 125.0));
            check(d, s, [2, 64, 128], gate_up, |i| (i * 11 % 251) as u8 as i8);
        }
        check(d, s, [2, 32, 64], Some(GateUp::GateOnly), |i| bf16::from_bits(i as u16));
        check(d, s, [0, 64, 64], None, |_| bf16::ZERO);
        check(d, s, [2, 0, 64], Some(GateUp::Halves), |_| bf16::ZERO);
    });
}

#[test]
fn captured_and_replayed() {
    on_every_device(|d, s| {
        let shape = [2, 64, 128];
        let mut weights = Tensor::<bf16>::zeros(d, &shape).unwrap();
        let [mut replayed, mut direct] = [0, 1].map(|_| Tensor::<bf16>::zeros(d, &shape).unwrap());
        let gate_up = Some(GateUp::Halves);
        d.preload(&["moe"]).unwrap();
        let graph = Graph::capture(s, |s| shuffle_weights(s, &mut replayed, &weights, gate_up)).unwrap();
        for seed in 5..7 {
            weights.copy_from_slice(&noise_of(2 * 64 * 128, seed)).unwrap();
            graph.launch(s).unwrap();
            shuffle_weights(s, &mut direct, &weights, gate_up).unwrap();
            assert_eq!(replayed.to_vec().unwrap(), direct.to_vec().unwrap());
        }
    });
}

#[test]
fn bad_input() {
    on_every_device(|d, s| {
        let t = |shape: &[usize]| Tensor::<bf16>::zeros(d, shape).unwrap();
        let run = |out: &[usize], weights: &[usize], gate_up| shuffle_weights(s, &mut t(out), &t(weights), gate_up);
        assert!(run(&[2, 64, 64], &[2, 64, 64], None).is_ok());
        for (out, weights, gate_up, arg) in [
            (&[2, 64, 64][..], &[2, 32, 64][..], None, "weights"),
            (&[2, 64, 64], &[2, 64, 96], None, "weights"),
            (&[2, 32, 64], &[2, 32, 64], Some(GateUp::Halves), "weights"),
            (&[2, 48, 64], &[2, 48, 64], Some(GateUp::GateOnly), "weights"),
            (&[64, 64], &[64, 64], None, "weights"),
            (&[1, 64, 64], &[2, 64, 64], None, "out"),
        ] {
            let e = run(out, weights, gate_up);
            assert!(matches!(e, Err(Error::Shape { arg: a, .. }) if a == arg), "{weights:?}: {e:?}");
        }
        let e = shuffle_weights(s, &mut t(&[1, 64, 64]), &t(&[1, 64, 128]).narrow(2, 0, 64).unwrap(), None);
        assert!(matches!(e, Err(Error::Stride { arg: "weights", .. })), "{e:?}");
        let w = t(&[2, 64, 64]);
        let e = shuffle_weights(s, &mut w.clone(), &w, None);
        assert!(matches!(e, Err(Error::Overlap { .. })), "{e:?}");
        let odd = t(&[64 * 64 + 1]).narrow(0, 1, 64 * 64).unwrap().reshape(&[1, 64, 64]).unwrap();
        let e = shuffle_weights(s, &mut t(&[1, 64, 64]), &odd, None);
        assert!(matches!(e, Err(Error::Alignment { arg: "weights", .. })), "{e:?}");
        let wide = Tensor::<f32>::zeros(d, &[1, 64, 64]).unwrap();
        let e = shuffle_weights(s, &mut Tensor::zeros(d, &[1, 64, 64]).unwrap(), &wide, None);
        assert!(matches!(e, Err(Error::DType { .. })), "{e:?}");
    });
}
