use cuda_std::Float;
use proptest::prelude::*;
use warploom::{Tensor, bf16, f16, norm, reference};
use warploom_tests::{assert_close, noise_of, property, widen};

fn check<T: Float>() {
    property(12, (0usize..5, 1usize..600, any::<bool>()), |device, stream, (rows, n, weighted)| {
        let (x, w) = (noise_of::<T>(rows * n, 1), noise_of::<T>(n, 2));
        let (dx, dw) =
            (Tensor::from_slice(device, &x, &[rows, n]).unwrap(), Tensor::from_slice(device, &w, &[n]).unwrap());
        let mut y = Tensor::<T>::uninit(device, &[rows, n]).unwrap();
        norm::rms_norm(stream, &mut y, &dx, weighted.then_some(&dw), 1e-5).unwrap();
        let y = y.to_vec().unwrap();
        for r in 0..rows {
            let w = widen(&w);
            let want = reference::norm::rms_norm(&widen(&x[r * n..][..n]), weighted.then_some(&w), 1e-5);
            assert_close(&y[r * n..][..n], &want, 1e-6, 40.0);
        }
        Ok(())
    });
}

#[test]
fn matches_the_reference() {
    check::<f32>();
    check::<f16>();
    check::<bf16>();
}
