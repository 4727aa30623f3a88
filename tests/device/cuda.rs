//! GPUs: what there is to say where there is none, and what only they do.

use std::sync::Mutex;
use warploom::{Device, Error, Graph, Stream, Tensor, norm};
use warploom_tests::{gpu, sanitizing};

/// Each reason for having no GPU is one sentence that says what to do, and `auto` then runs on the SIMT device.
#[test]
fn no_gpu_is_one_clear_sentence() {
    let error = match Device::cuda(0) {
        Ok(_) => return assert!(Device::cuda_count() > 0),
        Err(error) => error,
    };
    let text = error.to_string();
    assert!(!text.contains('\n'), "{text}");
    match error {
        Error::NoCuda => assert!(text.contains("feature `cuda`"), "{text}"),
        Error::NoDriver(_) => assert!(text.contains("Device::simt()") && text.contains("install"), "{text}"),
        Error::NoDevice { ordinal: 0, found: 0 } => {
            assert!(text.contains("no CUDA device 0") && text.contains("Device::simt()"), "{text}")
        }
        Error::DriverTooOld { .. } => assert!(text.contains("update NVIDIA's driver"), "{text}"),
        Error::TooOldGpu { .. } => assert!(text.contains("8.0") && text.contains("Device::simt()"), "{text}"),
        other => panic!("{other}"),
    }
    assert!(Device::auto().unwrap().is_simt());
    assert!(Device::cuda_current().is_err());
}

#[test]
fn there_is_no_device_beyond_the_last() {
    let Some(_) = gpu() else { return };
    let found = Device::cuda_count();
    assert!(
        matches!(Device::cuda(found), Err(Error::NoDevice { ordinal, found: n }) if ordinal == found && n == found)
    );
    assert!(matches!(Device::cuda(usize::MAX), Err(Error::NoDevice { .. })));
}

/// The primary context is current on a thread that used the device, and a thread that never did has none.
#[test]
fn the_current_context_is_the_device() {
    let Some(device) = gpu() else { return };
    std::thread::spawn(move || {
        assert!(matches!(Device::cuda_current(), Err(Error::Driver { .. })));
        device.synchronize().unwrap();
        assert_eq!(Device::cuda_current().unwrap(), device);
    })
    .join()
    .unwrap();
}

/// Under a sanitizer threads take turns: racecheck loses track of launches that several of them make at once ("failure to track a
/// kernel launch"), and counts that as an error.
#[test]
fn one_device_from_many_threads() {
    let Some(device) = gpu() else { return };
    let turns = Mutex::new(());
    std::thread::scope(|scope| {
        for i in 1..9 {
            let (device, turns) = (&device, &turns);
            scope.spawn(move || {
                let _turn = sanitizing().then(|| turns.lock().unwrap());
                let stream = Stream::new(device).unwrap();
                let x = Tensor::from_slice(device, &[i as f32; 256], &[1, 256]).unwrap();
                for _ in 0..50 {
                    let mut y = Tensor::<f32>::zeros(device, &[1, 256]).unwrap();
                    norm::rms_norm(&stream, &mut y, &x, None, 0.0).unwrap();
                    assert!(y.to_vec().unwrap().iter().all(|&v| (v - 1.0).abs() < 1e-6));
                }
            });
        }
    });
}

/// A failed launch names the kernel and the driver's error, and leaves the device usable.
#[test]
fn errors_of_launches_name_the_kernel() {
    let Some(device) = gpu() else { return };
    let stream = Stream::new(&device).unwrap();
    let x = Tensor::from_slice(&device, &[2.0f32; 32], &[1, 32]).unwrap();
    let mut y = Tensor::<f32>::zeros(&device, &[1, 32]).unwrap();
    let (entry, mut geometry, args) = super::normalise(&x, &mut y);
    geometry.block = [2048, 1, 1];
    // SAFETY: the driver refuses the launch.
    let error = unsafe { stream.launch(&entry, &geometry, &args) }.unwrap_err();
    assert!(matches!(&error, Error::Driver { kernel: Some(name), code: 1.., .. } if *name == entry.name), "{error}");
    assert!(error.to_string().contains("CUDA_ERROR_"), "{error}");

    geometry = geometry.shared_bytes(1 << 20);
    // SAFETY: refused before it gets to the driver.
    let error = unsafe { stream.launch(&entry, &geometry, &args) }.unwrap_err();
    assert!(matches!(&error, Error::Unsupported { op, .. } if *op == entry.name), "{error}");

    norm::rms_norm(&stream, &mut y, &x, None, 0.0).unwrap();
    assert!((y.to_vec().unwrap()[0] - 1.0).abs() < 1e-6);
}

/// More than 48 KiB of shared memory has to be asked for; the backend does.
#[test]
fn large_shared_memory() {
    let Some(device) = gpu() else { return };
    let stream = Stream::new(&device).unwrap();
    let x = Tensor::from_slice(&device, &[3.0f32; 64], &[1, 64]).unwrap();
    let mut y = Tensor::<f32>::zeros(&device, &[1, 64]).unwrap();
    let (entry, geometry, args) = super::normalise(&x, &mut y);
    let most = u32::try_from(device.properties().max_shared_bytes).unwrap();
    for shared in [48 * 1024, 48 * 1024 + 16, most] {
        stream.fill_bytes(&mut y, 0xff).unwrap();
        // SAFETY: the tensors are as large as said and live until the copy below.
        unsafe { stream.launch(&entry, &geometry.shared_bytes(shared), &args) }.unwrap();
        assert!((y.to_vec().unwrap()[63] - 1.0).abs() < 1e-6, "{shared} bytes");
    }
}

/// A raw stream, here the legacy default one.
#[test]
fn streams_of_others() {
    let Some(device) = gpu() else { return };
    // SAFETY: null is the legacy default stream.
    let stream = unsafe { Stream::from_raw(&device, std::ptr::null_mut()) };
    assert!(stream.as_raw().is_null());
    let x = Tensor::from_slice(&device, &[5.0f32; 64], &[1, 64]).unwrap();
    let mut y = Tensor::<f32>::zeros(&device, &[1, 64]).unwrap();
    norm::rms_norm(&stream, &mut y, &x, None, 0.0).unwrap();
    stream.synchronize().unwrap();
    assert!((y.to_vec().unwrap()[0] - 1.0).abs() < 1e-6);
}

/// What a stream had to do when it was dropped comes before what waits for all work, also while another one is captured and the whole context cannot be waited for.
#[test]
fn dropped_streams_are_waited_for() {
    let Some(device) = gpu() else { return };
    let stream = Stream::new(&device).unwrap();
    let x = Tensor::<u8>::zeros(&device, &[1 << 28]).unwrap();
    let mut y = Tensor::<u8>::zeros(&device, &[1 << 28]).unwrap();
    let mut z = Tensor::<u8>::zeros(&device, &[64]).unwrap();
    Graph::capture(&stream, |_| {
        let other = Stream::new(&device)?;
        // Several milliseconds.
        for _ in 0..if sanitizing() { 2 } else { 50 } {
            other.copy(&mut y, &x)?;
        }
        other.fill_bytes(&mut z, 5)?;
        drop(other);
        assert_eq!(z.to_vec()?, [5; 64]);
        Ok(())
    })
    .unwrap();
}
