//! Weights of experts into the order in which kernels read them, once: experts x rows x columns.

use warploom::moe::{GateUp, shuffle_weights};
use warploom::{E4M3, Float, Tensor, bf16};
use warploom_benches::{Cost, Harness, noise};

pub fn benches(harness: &mut Harness) {
    let shapes = harness.pick(&[(8, 4096, 14336), (128, 2048, 768), (32, 7168, 2048)][..], &[(4, 128, 128)]);
    for &(experts, hidden, inter) in shapes {
        case::<bf16>(harness, [experts, 2 * inter, hidden], Some(GateUp::Halves));
        case::<bf16>(harness, [experts, hidden, inter], None);
        case::<E4M3>(harness, [experts, 2 * inter, hidden], Some(GateUp::Halves));
        case::<E4M3>(harness, [experts, hidden, inter], None);
    }
}

fn case<T: Float>(harness: &mut Harness, shape: [usize; 3], gate_up: Option<GateUp>) {
    let bytes = shape.iter().product::<usize>() * size_of::<T>();
    let [experts, rows, k] = shape;
    let of = if gate_up.is_some() { "w13" } else { "w2" };
    let name = format!("moe/shuffle_weights/{}/{of}/{experts}x{rows}x{k}", T::DTYPE);
    harness.case(&name, Cost::bytes(bytes, bytes), |device, stream, set| {
        let weights = noise::<T>(device, stream, &shape, set)?;
        let mut out = Tensor::<T>::uninit(device, &shape)?;
        Ok(move |s: &_| shuffle_weights(s, &mut out, &weights, gate_up))
    });
}
