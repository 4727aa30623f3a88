//! Where tests run, without the rest of them: CI builds this one with the feature `cuda` to see what is said where there is no GPU.

use warploom::{Tensor, norm};
use warploom_tests::{assert_close, on_every_device};

#[test]
fn a_kernel_runs_on_every_device() {
    on_every_device(|device, stream| {
        let x = Tensor::from_slice(device, &[3f32, -4.0], &[1, 2]).unwrap();
        let mut y = Tensor::zeros(device, &[1, 2]).unwrap();
        norm::rms_norm(stream, &mut y, &x, None, 0.0).unwrap();
        let root = 12.5f64.sqrt();
        assert_close(&y.to_vec().unwrap(), &[3.0 / root, -4.0 / root], 1e-6, 1.0);
    });
}
