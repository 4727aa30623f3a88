//! Tensors over memory of others, on the SIMT device.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use warploom::{Device, Error, Graph, SimtOptions, Stream, Tensor, borrow, norm};

fn streams() -> Vec<Stream> {
    [SimtOptions::default(), SimtOptions::race(), SimtOptions::random(3)]
        .map(|o| Stream::new(&Device::simt_with(o)).unwrap())
        .into()
}

fn expected(x: &[f32], width: usize) -> Vec<f32> {
    x.chunks(width)
        .flat_map(|row| {
            let scale = (row.iter().map(|v| v * v).sum::<f32>() / width as f32).sqrt().recip();
            row.iter().map(move |v| v * scale)
        })
        .collect()
}

#[track_caller]
fn assert_close(got: &[f32], want: &[f32]) {
    assert_eq!(got.len(), want.len());
    assert!(got.iter().zip(want).all(|(g, w)| (g - w).abs() < 1e-5), "{got:?}, expected {want:?}");
}

#[test]
fn host_slices_are_lent_without_a_copy() {
    for stream in streams() {
        let x: Vec<f32> = (1..=3 * 40).map(|v| v as f32).collect();
        let mut y = vec![0.0; x.len()];
        borrow::scope(&stream, |s| {
            let x = s.slice(&x, &[3, 40])?;
            let mut y = s.slice_mut(&mut y, &[3, 40])?;
            norm::rms_norm(&stream, &mut y, &x, None, 0.0)
        })
        .unwrap();
        assert_close(&y, &expected(&x, 40));

        // Two parts of one vector, one of them by its address and with strides.
        let (from, to) = y.split_at_mut(60);
        borrow::scope(&stream, |s| {
            // SAFETY: borrowed for longer than the scope.
            let rows = unsafe { s.raw(from.as_ptr(), &[2, 20], Some(&[40, 1])) }?;
            let mut out = s.slice_mut(&mut to[..40], &[2, 20])?;
            norm::rms_norm(&stream, &mut out, &rows, None, 0.0)
        })
        .unwrap();
        let rows = [&from[..20], &from[40..60]].concat();
        assert_close(&to[..40], &expected(&rows, 20));
    }
}

/// A tensor may outlive its scope, but nothing can be done with its memory then.
#[test]
fn what_escapes_has_expired() {
    let stream = Stream::new(&Device::simt()).unwrap();
    let x = vec![1.0f32; 8];
    let mut y = vec![2.0f32; 8];
    let (x_out, mut y_out) =
        borrow::scope(&stream, |s| Ok::<_, Error>((s.slice(&x, &[8])?, s.slice_mut(&mut y, &[8])?))).unwrap();
    let mut own = Tensor::<f32>::zeros(stream.device(), &[8]).unwrap();
    let expired = |e: Error| assert!(matches!(e, Error::Expired { .. }), "{e}");
    expired(norm::rms_norm(&stream, &mut own, &x_out, None, 0.0).unwrap_err());
    expired(stream.copy(&mut y_out, &own).unwrap_err());
    expired(x_out.narrow(0, 1, 2).unwrap().to_vec().unwrap_err());
    expired(y_out.copy_from_slice(&[0.0; 8]).unwrap_err());
    assert_eq!(y, [2.0; 8]);
    // A scope that panics ends as well.
    let mut kept = None;
    let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        borrow::scope(&stream, |s| {
            kept = Some(s.slice(&x, &[8]).unwrap());
            panic!("as asked");
        })
    }));
    assert!(panic.is_err());
    expired(kept.unwrap().to_vec().unwrap_err());
}

#[test]
fn misuse_is_refused() {
    let stream = Stream::new(&Device::simt()).unwrap();
    let (x, mut y) = (vec![1.0f32; 8], vec![0.0f32; 8]);
    borrow::scope(&stream, |s| {
        assert!(matches!(s.slice(&x, &[9]), Err(Error::Tensor(_))));
        assert!(matches!(s.slice(&x, &[usize::MAX, 2]), Err(Error::Tensor(_))));
        let x = s.slice(&x, &[8]).unwrap();
        let y = s.slice_mut(&mut y, &[8]).unwrap();
        let error = norm::rms_norm(&stream, &mut x.clone(), &y, None, 0.0).unwrap_err();
        assert_eq!(error.to_string(), "rms_norm: `out` is written, but its memory is read-only");
        assert!(matches!(x.clone().copy_from_slice(&[0.0; 8]), Err(Error::ReadOnly { .. })));
        let error =
            Graph::capture(&stream, |s| norm::rms_norm(s, &mut y.clone(), &x, None, 0.0)).map(drop).unwrap_err();
        assert!(matches!(error, Error::Capture(_)), "{error}");
        let other = Device::simt();
        let error = norm::rms_norm(&Stream::new(&other).unwrap(), &mut y.clone(), &x, None, 0.0).unwrap_err();
        assert!(matches!(error, Error::WrongDevice { .. }), "{error}");
        // SAFETY: refused before anything is read.
        unsafe {
            assert!(matches!(s.raw(std::ptr::null::<f32>(), &[1], None), Err(Error::Tensor(_))));
            let odd = y.as_ptr().cast::<u8>().wrapping_add(1).cast::<f32>();
            assert!(matches!(s.raw(odd, &[1], None), Err(Error::Alignment { expected: 4, .. })));
            assert!(matches!(s.raw(y.as_ptr(), &[2, 2], Some(&[2])), Err(Error::Tensor(_))));
            assert!(matches!(s.raw(y.as_ptr(), &[2, 2], Some(&[usize::MAX, 1])), Err(Error::Tensor(_))));
            assert!(s.raw(std::ptr::null::<f32>(), &[0, 4], None).unwrap().to_vec().unwrap().is_empty());
        }
    });
}

/// Threads that use a tensor while its scope ends either use it in time or are refused.
#[test]
fn the_end_of_a_scope_waits_for_launches() {
    let stream = Stream::new(&Device::simt()).unwrap();
    let refused = AtomicUsize::new(0);
    for _ in 0..20 {
        let x = vec![1.0f32; 64];
        std::thread::scope(|threads| {
            borrow::scope(&stream, |s| {
                let x = s.slice(&x, &[1, 64]).unwrap();
                for _ in 0..3 {
                    let (x, stream, refused) = (x.clone(), stream.clone(), &refused);
                    threads.spawn(move || {
                        let mut y = Tensor::<f32>::zeros(stream.device(), &[1, 64]).unwrap();
                        loop {
                            match norm::rms_norm(&stream, &mut y, &x, None, 0.0) {
                                Ok(()) => assert!(y.to_vec().unwrap().iter().all(|v| (v - 1.0).abs() < 1e-6)),
                                Err(Error::Expired { .. }) => break refused.fetch_add(1, Ordering::Relaxed),
                                Err(e) => panic!("{e}"),
                            }
                        }
                    });
                }
                std::thread::yield_now();
            });
        });
    }
    assert_eq!(refused.into_inner(), 60);
}

#[test]
fn an_owner_goes_with_the_last_use() {
    struct Owner(Arc<AtomicUsize>, #[allow(dead_code)] Vec<f32>);
    impl Drop for Owner {
        fn drop(&mut self) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }
    let stream = Stream::new(&Device::simt()).unwrap();
    let dropped = Arc::new(AtomicUsize::new(0));
    let count = || dropped.load(Ordering::Relaxed);
    let mut memory = vec![3.0f32, 4.0, 5.0, 12.0];
    let data = memory.as_mut_ptr();
    let owner = Owner(dropped.clone(), memory);
    // SAFETY: the owner keeps the vector's memory.
    let x = unsafe { Tensor::from_raw(stream.device(), data, &[2, 2], None, owner) }.unwrap();
    let second = x.narrow(0, 1, 1).unwrap();
    let mut y = Tensor::zeros(stream.device(), &[1, 2]).unwrap();
    let graph = Graph::capture(&stream, |s| norm::rms_norm(s, &mut y, &second, None, 0.0)).unwrap();
    drop((x, second));
    assert_eq!(count(), 0, "the graph still uses it");
    graph.launch(&stream).unwrap();
    assert_close(&y.to_vec().unwrap(), &expected(&[5.0, 12.0], 2));
    drop(graph);
    assert_eq!(count(), 1);
    // SAFETY: refused before anything is read.
    let error = unsafe {
        Tensor::<f32>::from_raw(stream.device(), std::ptr::null_mut(), &[1], None, Owner(dropped.clone(), vec![]))
    };
    assert!(matches!(error, Err(Error::Tensor(_))));
    assert_eq!(count(), 2);
}

/// The SIMT device checks the bounds of what it was lent.
#[test]
fn accesses_beyond_what_was_lent_are_faults() {
    let stream = Stream::new(&Device::simt()).unwrap();
    let memory = vec![1.0f32; 64];
    let mut y = Tensor::<f32>::zeros(stream.device(), &[1, 64]).unwrap();
    borrow::scope(&stream, |s| {
        let x = s.slice(&memory[..32], &[1, 32]).unwrap();
        let args = norm::rms_norm::Args {
            x: x.as_ptr().cast(),
            weight: std::ptr::null(),
            out: y.as_mut_ptr().cast(),
            rows: 1,
            n: 64,
            x_stride: 64,
            out_stride: 64,
            weight_offset: 0.0,
            eps: 0.0,
        };
        // SAFETY: the memory is there; the device knows only half of it.
        let error = unsafe { norm::rms_norm::launch(&stream, warploom::DType::F32, &args) }.unwrap_err();
        assert!(matches!(error, Error::Launch(_)), "{error}");
    });
}

#[test]
fn casts_keep_the_bytes() {
    let device = Device::simt();
    let bytes = Tensor::from_slice(&device, &[0x38u8, 0xb8, 0x00, 0x7e], &[2, 2]).unwrap();
    let floats = bytes.cast::<warploom::E4M3>().unwrap();
    assert_eq!((floats.shape(), floats.as_ptr().cast::<u8>()), (&[2, 2][..], bytes.as_ptr()));
    assert_eq!(floats.to_vec().unwrap().iter().map(|v| v.0).collect::<Vec<_>>(), [0x38, 0xb8, 0x00, 0x7e]);
    assert!(matches!(bytes.cast::<f32>(), Err(Error::Tensor(_))));
}
