//! Operations on cudarc's buffers and streams. Skipped, saying so, where there is no GPU.

use cudarc::driver::{CudaContext, CudaSlice, CudaStream, sys};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use warploom::{Device, Error, Graph, Stream, Tensor, norm};

const ROWS: usize = 64;
const WIDTH: usize = 4096;
const SHAPE: &[usize] = &[ROWS, WIDTH];

/// A context of cudarc's on the first GPU, if there is one, for one test at a time: what one captures as the owner of a stream, a wait of another one's that has just begun would void. cudarc itself panics without
/// a driver.
fn context() -> Option<(Arc<CudaContext>, MutexGuard<'static, ()>)> {
    static ALONE: Mutex<()> = Mutex::new(());
    let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    match Device::cuda(0) {
        Ok(_) => Some((CudaContext::new(0).expect("a context"), alone)),
        Err(e) => {
            eprintln!("GPU tests are skipped: {e}");
            None
        }
    }
}

fn input(n: usize) -> Vec<f32> {
    (0..n).map(|i| ((i * 7919) % 2003) as f32 / 1000.0 - 1.0).collect()
}

fn expected(x: &[f32]) -> Vec<f32> {
    let device = Device::simt();
    let x = Tensor::from_slice(&device, x, SHAPE).unwrap();
    let mut y = Tensor::zeros(&device, SHAPE).unwrap();
    norm::rms_norm(&Stream::new(&device).unwrap(), &mut y, &x, None, 1e-6).unwrap();
    y.to_vec().unwrap()
}

#[track_caller]
fn assert_close(got: &[f32], want: &[f32]) {
    assert_eq!(got.len(), want.len());
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        assert!((g - w).abs() <= 1e-5 * w.abs().max(1.0), "element {i}: {g}, expected {w}");
    }
}

fn normalise(stream: &warploom::cudarc::Stream, y: &mut CudaSlice<f32>, x: &CudaSlice<f32>) -> warploom::Result<()> {
    stream.scope(|s| {
        let x = s.view(x.as_view(), SHAPE)?;
        let mut y = s.view_mut(y.as_view_mut(), SHAPE)?;
        norm::rms_norm(stream, &mut y, &x, None, 1e-6)
    })
}

fn slices(cuda: &Arc<CudaStream>, x: &[f32]) -> (CudaSlice<f32>, CudaSlice<f32>) {
    (cuda.clone_htod(x).unwrap(), cuda.alloc_zeros(x.len()).unwrap())
}

#[test]
fn wrappers_of_one_stream_are_captured_together() {
    let Some((context, _alone)) = context() else { return };
    let cuda = context.new_stream().unwrap();
    let [stream, other] = [0; 2].map(|_| warploom::cudarc::Stream::new(&cuda).unwrap());
    stream.device().preload(&["norm"]).unwrap();
    let x = input(ROWS * WIDTH);
    let y = Tensor::<f32>::zeros(stream.device(), SHAPE).unwrap();
    let graph = Graph::capture(&stream, |_| {
        assert!(other.is_capturing());
        // Dropped before the graph runs.
        let x = Tensor::from_slice(other.device(), &x, SHAPE)?;
        norm::rms_norm(&other, &mut y.clone(), &x, None, 1e-6)
    })
    .unwrap();
    assert!(!stream.is_capturing() && !other.is_capturing());
    let others: Vec<_> = (0..8).map(|_| Tensor::<f32>::zeros(stream.device(), SHAPE).unwrap()).collect();
    graph.launch(&stream).unwrap();
    assert_close(&y.to_vec().unwrap(), &expected(&x));
    drop(others);
}

/// It is a stream of its own on each thread, and clones of ours go to other threads.
#[test]
fn the_per_thread_stream_is_refused() {
    let Some((context, _alone)) = context() else { return };
    let error = warploom::cudarc::Stream::new(&context.per_thread_stream()).map(drop).unwrap_err();
    assert!(matches!(error, Error::Unsupported { .. }), "{error}");
}

#[test]
fn slices_are_lent_without_a_copy() {
    let Some((context, _alone)) = context() else { return };
    let cuda = context.new_stream().unwrap();
    let stream = warploom::cudarc::Stream::new(&cuda).unwrap();
    assert_eq!(*stream.device(), Device::cuda(0).unwrap());
    assert_eq!(stream.as_raw(), cuda.cu_stream().cast());
    let x = input(ROWS * WIDTH);
    let (dx, mut dy) = slices(&cuda, &x);
    normalise(&stream, &mut dy, &dx).unwrap();
    assert_close(&cuda.clone_dtoh(&dy).unwrap(), &expected(&x));

    // Parts of one buffer, at once.
    let mut parts: CudaSlice<f32> = cuda.clone_htod(&[x.clone(), vec![0.0; x.len()]].concat()).unwrap();
    let (from, to) = parts.split_at_mut(x.len());
    stream
        .scope(|s| {
            let mut y = s.view_mut(to, SHAPE)?;
            norm::rms_norm(s.stream(), &mut y, &s.view(from.into_view(), SHAPE)?, None, 1e-6)
        })
        .unwrap();
    assert_close(&cuda.clone_dtoh(&parts).unwrap()[x.len()..], &expected(&x));
}

/// Three streams of cudarc's that know of each other's work only by its events, and slices that are freed while they are
/// used. Repeated, so that a missing wait shows.
#[test]
fn events_order_the_work_of_streams() {
    let Some((context, _alone)) = context() else { return };
    let streams = [(); 3].map(|()| context.new_stream().unwrap());
    let [one, two, three] = &streams;
    let [on_two, on_three] = [two, three].map(|s| warploom::cudarc::Stream::new(s).unwrap());
    let base = input(ROWS * WIDTH);
    let want = expected(&base);
    let twice = expected(&want);
    for i in 0..100 {
        let mut x: CudaSlice<f32> = one.alloc_zeros(base.len()).unwrap();
        one.memcpy_htod(&base, &mut x).unwrap();
        let mut y: CudaSlice<f32> = one.alloc_zeros(base.len()).unwrap();
        let mut z: CudaSlice<f32> = one.alloc_zeros(base.len()).unwrap();
        normalise(&on_two, &mut y, &x).unwrap();
        if i % 2 == 0 {
            drop(x);
        } else {
            // Waits for what reads it.
            one.memset_zeros(&mut x).unwrap();
        }
        normalise(&on_three, &mut z, &y).unwrap();
        drop(y);
        assert_close(&one.clone_dtoh(&z).unwrap(), &twice);
    }
    context.check_err().unwrap();
}

#[test]
fn a_graph_of_cudarcs_replays_operations() {
    let Some((context, _alone)) = context() else { return };
    // SAFETY: everything here is done on one stream.
    unsafe { context.disable_event_tracking() };
    let cuda = context.new_stream().unwrap();
    let stream = warploom::cudarc::Stream::new(&cuda).unwrap();
    stream.device().preload(&["norm"]).unwrap();
    let x = input(ROWS * WIDTH);
    let (mut dx, mut dy) = slices(&cuda, &x);
    cuda.synchronize().unwrap();
    cuda.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
    normalise(&stream, &mut dy, &dx).unwrap();
    let graph = cuda.end_capture(sys::CUgraphInstantiate_flags_enum(0)).unwrap().expect("something was captured");
    assert!(cuda.clone_dtoh(&dy).unwrap().iter().all(|&v| v == 0.0), "nothing has run yet");
    for scale in [1.0f32, -3.0] {
        let x: Vec<f32> = x.iter().enumerate().map(|(i, v)| v * scale + (i % 3) as f32).collect();
        cuda.memcpy_htod(&x, &mut dx).unwrap();
        graph.launch().unwrap();
        assert_close(&cuda.clone_dtoh(&dy).unwrap(), &expected(&x));
    }
}

/// While somebody captures a stream, in any mode, other threads make, read and drop tensors, and the capture goes on. What keeps memory of somebody else alive is dropped after a wait that
/// leaves nothing out, which is one after the capture.
#[test]
fn captures_of_others_go_on() {
    struct Owner(Arc<AtomicBool>);
    impl Drop for Owner {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Release);
        }
    }
    let Some((context, _alone)) = context() else { return };
    // SAFETY: everything here is done on one stream, or is waited for.
    unsafe { context.disable_event_tracking() };
    let cuda = context.new_stream().unwrap();
    let stream = warploom::cudarc::Stream::new(&cuda).unwrap();
    let device = stream.device().clone();
    device.preload(&["norm"]).unwrap();
    let x = input(ROWS * WIDTH);
    let (dx, mut dy) = slices(&cuda, &x);
    cuda.synchronize().unwrap();
    for mode in [
        sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL,
        sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
        sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED,
    ] {
        cuda.memset_zeros(&mut dy).unwrap();
        cuda.begin_capture(mode).unwrap();
        normalise(&stream, &mut dy, &dx).unwrap();
        let dropped = Arc::new(AtomicBool::new(false));
        let kept = std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                let mut t = Tensor::from_slice(&device, &x, SHAPE).unwrap();
                assert_eq!(t.to_vec().unwrap(), x);
                let other = Stream::new(&device).unwrap();
                other.fill_bytes(&mut t, 0).unwrap();
                other.synchronize().unwrap();
                device.synchronize().unwrap();
                let owner = Owner(dropped.clone());
                // SAFETY: the memory lives longer than the tensor.
                drop(unsafe { Tensor::from_raw(&device, t.as_mut_ptr(), SHAPE, None, owner) }.unwrap());
                !dropped.load(Ordering::Acquire)
            });
            thread.join().unwrap()
        });
        let graph = cuda.end_capture(sys::CUgraphInstantiate_flags_enum(0)).unwrap().expect("something was captured");
        assert!(kept, "dropped before the stream could be waited for");
        device.synchronize().unwrap();
        assert!(dropped.load(Ordering::Acquire));
        graph.launch().unwrap();
        assert_close(&cuda.clone_dtoh(&dy).unwrap(), &expected(&x));
    }
}

#[test]
fn misuse_is_refused() {
    let Some((context, _alone)) = context() else { return };
    let cuda = context.new_stream().unwrap();
    let other = warploom::cudarc::Stream::new(&context.new_stream().unwrap()).unwrap();
    let stream = warploom::cudarc::Stream::new(&cuda).unwrap();
    let (x, mut y) = slices(&cuda, &input(ROWS * WIDTH));
    let escaped = stream.scope(|s| {
        assert!(matches!(s.view(x.as_view(), &[ROWS, WIDTH + 1]), Err(Error::Tensor(_))));
        let x = s.view(x.as_view(), SHAPE).unwrap();
        let mut y = s.view_mut(y.as_view_mut(), SHAPE).unwrap();
        let error = norm::rms_norm(&other, &mut y, &x, None, 0.0).unwrap_err();
        assert!(matches!(error, Error::WrongStream { op: "rms_norm", .. }), "{error}");
        let error = norm::rms_norm(&stream, &mut x.clone(), &y, None, 0.0).unwrap_err();
        assert!(matches!(error, Error::ReadOnly { op: "rms_norm", arg: "out" }), "{error}");
        let error = Graph::capture(&stream, |s| norm::rms_norm(s, &mut y, &x, None, 0.0)).map(drop).unwrap_err();
        assert!(matches!(error, Error::Capture(_)), "{error}");
        assert!(matches!(s.slice(&[1.0f32], &[1]), Err(Error::Unsupported { .. })));
        (x, y)
    });
    let (x_out, mut y_out) = escaped;
    let error = norm::rms_norm(&stream, &mut y_out, &x_out, None, 0.0).unwrap_err();
    assert!(matches!(error, Error::Expired { op: "rms_norm", .. }), "{error}");
    assert!(matches!(y_out.to_vec(), Err(Error::Expired { .. })));

    // cudarc's events and its captures do not go together.
    cuda.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
    let error = normalise(&stream, &mut y, &x).unwrap_err();
    let _ = cuda.end_capture(sys::CUgraphInstantiate_flags_enum(0));
    assert!(matches!(error, Error::Capture(_)), "{error}");
    normalise(&stream, &mut y, &x).unwrap();
    cuda.synchronize().unwrap();
}

/// A context that is not the primary one is the same device whenever it is asked for, so that who waits for all work knows of what is being captured.
#[test]
fn a_context_of_its_own_is_one_device() {
    let Some((_, _alone)) = context() else { return };
    type Create = unsafe extern "C" fn(*mut sys::CUcontext, u32, sys::CUdevice) -> sys::CUresult;
    let mut raw = std::ptr::null_mut();
    // SAFETY: the driver has this function with this signature, which cudarc leaves out from CUDA 13 on. The context becomes current.
    unsafe {
        let driver = libloading::Library::new("libcuda.so.1").unwrap();
        driver.get::<Create>(b"cuCtxCreate_v2").unwrap()(&raw mut raw, 0, 0).result().unwrap();
    }
    {
        assert!(matches!(Device::cuda_current(), Err(Error::Unsupported { .. })));
        // SAFETY: the context is destroyed below, after all that is made here.
        let [device, again] = [(); 2].map(|()| unsafe { Device::cuda_current_context() }.unwrap());
        assert!(device == again && device != Device::cuda(0).unwrap());
        let stream = Stream::new(&device).unwrap();
        let x = input(ROWS * WIDTH);
        let (dx, mut y) =
            (Tensor::from_slice(&device, &x, SHAPE).unwrap(), Tensor::<f32>::zeros(&again, SHAPE).unwrap());
        norm::rms_norm(&stream, &mut y, &dx, None, 1e-6).unwrap();
        let graph = Graph::capture(&stream, |s| {
            norm::rms_norm(s, &mut y, &dx, None, 1e-6)?;
            again.synchronize()
        })
        .unwrap();
        stream.fill_bytes(&mut y, 0xff).unwrap();
        graph.launch(&stream).unwrap();
        assert_close(&y.to_vec().unwrap(), &expected(&x));
    }
    // SAFETY: all that was made in it is gone.
    unsafe { sys::cuCtxDestroy_v2(raw) }.result().unwrap();
}
