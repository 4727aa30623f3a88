//! What operations run on: devices, streams, events, graphs, tensors, errors.

mod cuda;
mod dlpack;
mod extents;
mod graph;
mod stream;
mod tensor;

use warploom::device::{Swizzle, TensorMapDescription};
use warploom::norm::{Variant, rms_norm};
use warploom::{DType, Entry, Geometry};
use warploom::{Device, Error, SimtOptions, Stream, Tensor};
use warploom_tests::{gpu, is_hopper, on_every_device};

/// A kernel to launch by hand: normalises the row `x`.
fn normalise(x: &Tensor<f32>, out: &mut Tensor<f32>) -> (Entry<rms_norm::Args>, Geometry, rms_norm::Args) {
    let n = x.len() as u32;
    let args = rms_norm::Args {
        x: x.as_ptr().cast(),
        weight: std::ptr::null(),
        out: out.as_mut_ptr().cast(),
        rows: 1,
        n,
        x_stride: x.len(),
        out_stride: x.len(),
        weight_offset: 0.0,
        eps: 0.0,
    };
    let entry = rms_norm::entry(DType::F32, Variant::Any).expect("an entry");
    (entry, rms_norm::geometry(DType::F32, Variant::Any, 1, n), args)
}

#[test]
fn names_of_devices() {
    assert!(Device::from_name("simt").unwrap().is_simt());
    assert!(Device::from_name("auto").is_ok());
    let unknown = Device::from_name("tpu").unwrap_err();
    assert!(matches!(unknown, Error::Value { arg: "name", .. }), "{unknown}");
    assert!(unknown.to_string().contains("`tpu`"), "{unknown}");
    on_every_device(|device, _| {
        let name = device.name();
        assert!(if device.is_simt() { name.starts_with("SIMT ") } else { name.starts_with("cuda:0 (") }, "{name}");
        assert_eq!(format!("{device:?}"), name);
        assert_eq!(device.cuda_ordinal(), if device.is_simt() { None } else { Some(0) });
    });
}

#[test]
fn properties_are_of_a_gpu_that_can_run_the_kernels() {
    on_every_device(|device, _| {
        let properties = device.properties();
        assert!(properties.compute_capability >= (8, 0));
        assert!(properties.multiprocessors > 0);
        assert!(properties.max_shared_bytes >= 48 * 1024);
        match device.memory_info().unwrap() {
            None => assert!(device.is_simt()),
            Some(memory) => {
                assert!(memory.free <= memory.total);
                assert!(memory.total <= properties.memory_bytes);
            }
        }
    });
}

#[test]
fn simt_devices_have_as_many_multiprocessors_as_they_are_told() {
    let of = |options| Device::simt_with(options).properties().multiprocessors;
    assert_eq!(of(SimtOptions::default()), 4);
    assert_eq!([0, 1, 132].map(|n| of(SimtOptions::race().multiprocessors(n))), [1, 1, 132]);
}

#[test]
fn simt_devices_have_memory_of_their_own() {
    let (a, b) = (Device::simt(), Device::simt());
    assert_eq!(a, a.clone());
    assert_ne!(a, b);
    assert!(gpu().is_none_or(|gpu| gpu != a));

    let stream = Stream::new(&a).unwrap();
    let here = Tensor::from_slice(&a, &[1.0f32, 2.0], &[1, 2]).unwrap();
    let mut there = Tensor::<f32>::zeros(&b, &[1, 2]).unwrap();
    let error = warploom::norm::rms_norm(&stream, &mut there, &here, None, 0.0).unwrap_err();
    assert!(matches!(&error, Error::WrongDevice { arg: "out", .. }), "{error}");
    assert!(error.to_string().contains(&b.name()), "{error}");
}

#[test]
fn preload_takes_families_and_kernels() {
    on_every_device(|device, _| {
        device.preload(&[]).unwrap();
        device.preload(&["norm", "norm"]).unwrap();
        device.preload(&["rms_norm_any_bf16", "kv_cache"]).unwrap();
        let error = device.preload(&["norm", "norms"]).unwrap_err();
        assert!(matches!(&error, Error::Value { arg: "names", .. }), "{error}");
        assert!(error.to_string().contains("`norms`"), "{error}");
    });
}

#[test]
fn peer_access() {
    on_every_device(|device, _| {
        device.enable_peer_access(device).unwrap();
        device.enable_peer_access(&device.clone()).unwrap();
        if !device.is_simt() {
            let error = device.enable_peer_access(&Device::simt()).unwrap_err();
            assert!(matches!(error, Error::WrongDevice { arg: "peer", .. }), "{error}");
        }
    });
    Device::simt().enable_peer_access(&Device::simt_with(SimtOptions::race())).unwrap();
    if Device::cuda_count() > 1 {
        let (a, b) = (Device::cuda(0).unwrap(), Device::cuda(1).unwrap());
        assert_ne!(a, b);
        match a.enable_peer_access(&b) {
            Ok(()) => a.enable_peer_access(&b).unwrap(),
            Err(error) => assert!(matches!(error, Error::Unsupported { .. }), "{error}"),
        }
    }
}

#[test]
fn tensor_maps() {
    on_every_device(|device, _| {
        let x = Tensor::<f32>::zeros(device, &[64, 128]).unwrap();
        let mut description = TensorMapDescription {
            base: x.as_ptr() as u64,
            dtype: DType::F32,
            rank: 2,
            dims: [128, 64, 0, 0, 0],
            strides: [512, 0, 0, 0],
            box_dims: [32, 8, 0, 0, 0],
            swizzle: Swizzle::B128,
        };
        let hopper = is_hopper(device);
        match device.tensor_map(&description) {
            Ok(map) => assert!(hopper && map.0.iter().any(|&word| word != 0)),
            Err(error) => assert!(!hopper && matches!(error, Error::TooOldGpu { .. }), "{error}"),
        }
        description.box_dims[0] = 64;
        let error = device.tensor_map(&description).unwrap_err();
        assert!(matches!(&error, Error::Value { arg: "description", .. }), "{error}");
        assert!(error.to_string().contains("swizzle"), "{error}");
    });
}
