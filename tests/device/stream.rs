//! Streams, events and pinned memory.

use warploom::{Device, Error, Event, Pinned, Result, Stream, Tensor, borrow, norm};
use warploom_tests::on_every_device;

#[test]
fn a_stream_knows_its_device() {
    on_every_device(|device, stream| {
        assert_eq!(stream.device(), device);
        assert_eq!(stream.as_raw().is_null(), device.is_simt());
        assert_eq!(stream.clone().as_raw(), stream.as_raw());
        assert!(!stream.is_capturing());
        stream.synchronize().unwrap();
        device.synchronize().unwrap();
    });
}

#[test]
fn copies_and_fills_are_in_order() {
    on_every_device(|device, stream| {
        let x = Tensor::from_slice(device, &(0..1000).collect::<Vec<u32>>(), &[1000]).unwrap();
        let mut y = Tensor::<u32>::uninit(device, &[1000]).unwrap();
        stream.fill_bytes(&mut y, 1).unwrap();
        let (mut head, tail) = (y.narrow(0, 0, 500).unwrap(), x.narrow(0, 500, 500).unwrap());
        stream.copy(&mut head, &tail).unwrap();
        let y = y.to_vec().unwrap();
        assert!(y[..500].iter().copied().eq(500..1000));
        assert!(y[500..].iter().all(|&v| v == 0x0101_0101));
    });
}

#[test]
fn copies_check_their_arguments() {
    on_every_device(|device, stream| {
        let x = Tensor::from_slice(device, &[0u8; 12], &[3, 4]).unwrap();
        let mut y = Tensor::<u8>::zeros(device, &[3, 5]).unwrap();
        let error = stream.copy(&mut y, &x).unwrap_err();
        assert!(matches!(&error, Error::Shape { arg: "src", .. }), "{error}");

        let columns = y.narrow(1, 0, 4).unwrap();
        let error = stream.copy(&mut columns.clone(), &x).unwrap_err();
        assert!(matches!(&error, Error::Stride { arg: "dst", .. }), "{error}");
        let error = stream.fill_bytes(&mut columns.clone(), 0).unwrap_err();
        assert!(matches!(&error, Error::Stride { arg: "dst", .. }), "{error}");

        let (mut upper, lower) = (x.narrow(0, 0, 2).unwrap(), x.narrow(0, 1, 2).unwrap());
        let error = stream.copy(&mut upper, &lower).unwrap_err();
        assert!(matches!(&error, Error::Overlap { first: "dst", second: "src", .. }), "{error}");

        let elsewhere = Tensor::<u8>::zeros(&Device::simt(), &[3, 5]).unwrap();
        let error = stream.copy(&mut y, &elsewhere).unwrap_err();
        assert!(matches!(&error, Error::WrongDevice { arg: "src", .. }), "{error}");
    });
}

#[test]
fn nothing_is_copied_where_there_is_nothing() {
    on_every_device(|device, stream| {
        let x = Tensor::<f32>::uninit(device, &[0]).unwrap();
        let mut y = Tensor::<f32>::zeros(device, &[0]).unwrap();
        assert!(!x.as_ptr().is_null() && x.as_ptr().is_aligned());
        stream.copy(&mut y, &x).unwrap();
        stream.fill_bytes(&mut y, 0xff).unwrap();
        assert!(y.to_vec().unwrap().is_empty());
        assert!(Pinned::<f32>::zeros(device, 0).unwrap().is_empty());
    });
}

#[test]
fn pinned_memory_goes_up_and_comes_back() {
    on_every_device(|device, stream| {
        let n = 5000;
        let mut up = Pinned::<f32>::zeros(device, n).unwrap();
        let mut down = Pinned::<f32>::zeros(device, n).unwrap();
        assert!(up.iter().all(|&v| v == 0.0));
        up.iter_mut().enumerate().for_each(|(i, v)| *v = i as f32);
        let mut x = Tensor::<f32>::uninit(device, &[n]).unwrap();
        // SAFETY: both live, and are left alone, until the stream is synchronised.
        unsafe {
            stream.upload(&mut x, &up).unwrap();
            stream.download(&mut down, &x).unwrap();
        }
        stream.synchronize().unwrap();
        assert_eq!(*up, *down);

        let mut short = Pinned::<f32>::zeros(device, n - 1).unwrap();
        // SAFETY: refused.
        let error = unsafe { stream.upload(&mut x, &short) }.unwrap_err();
        assert!(matches!(&error, Error::Shape { arg: "src", .. }), "{error}");
        // SAFETY: refused.
        let error = unsafe { stream.download(&mut short, &x) }.unwrap_err();
        assert!(matches!(&error, Error::Shape { arg: "dst", .. }), "{error}");
    });
}

/// Copies that keep a stream of a GPU busy for longer than the host takes to submit and to read what comes after them. The SIMT device is done when a call returns, and
/// has little to copy.
pub struct Busy([Tensor<u8>; 2]);

impl Busy {
    pub fn new(device: &Device) -> Self {
        let bytes = if device.is_simt() { 64 } else { 256 << 20 };
        Self([(); 2].map(|()| Tensor::zeros(device, &[bytes]).unwrap()))
    }

    pub fn submit(&mut self, stream: &Stream) -> Result<()> {
        let [to, from] = &mut self.0;
        (0..4).try_for_each(|_| stream.copy(to, from))
    }
}

#[test]
fn streams_wait_for_events() {
    on_every_device(|device, stream| {
        let other = Stream::new(device).unwrap();
        let event = Event::new(device).unwrap();
        let n = 1 << 16;
        let mut x = Tensor::<u8>::zeros(device, &[n]).unwrap();
        let mut y = Tensor::<u8>::zeros(device, &[n]).unwrap();
        let mut busy = Busy::new(device);
        for round in 1..=3 {
            busy.submit(stream).unwrap();
            stream.fill_bytes(&mut x, round).unwrap();
            stream.record_event(&event).unwrap();
            other.wait_event(&event).unwrap();
            other.copy(&mut y, &x).unwrap();
            other.synchronize().unwrap();
            assert!(y.to_vec().unwrap().iter().all(|&v| v == round));
        }
        // Waiting does not use the event up.
        other.wait_event(&event).unwrap();
        event.synchronize().unwrap();
    });
}

/// Streams mark points in events of their own device, and wait for those of any of its kind.
#[test]
fn events_of_another_device() {
    let [device, other] = [(); 2].map(|()| Device::simt());
    let [stream, elsewhere] = [&device, &other].map(|d| Stream::new(d).unwrap());
    let [event, foreign] = [&device, &other].map(|d| Event::new(d).unwrap());
    let error = stream.record_event(&foreign).unwrap_err();
    assert!(matches!(&error, Error::WrongDevice { op: "record_event", arg: "event", .. }), "{error}");
    assert!(error.to_string().ends_with(&format!("is on {other:?}")), "{error}");
    stream.record_event(&event).unwrap();
    elsewhere.record_event(&foreign).unwrap();
    stream.wait_event(&foreign).unwrap();
    for (late, early) in [(&event, &foreign), (&foreign, &event)] {
        assert!(matches!(late.seconds_since(early), Err(Error::WrongDevice { arg: "earlier", .. })));
    }
}

#[test]
fn events_measure_time() {
    on_every_device(|device, stream| {
        let (start, end) = (Event::new(device).unwrap(), Event::new(device).unwrap());
        assert!(matches!(end.seconds_since(&start), Err(Error::Value { .. })));
        stream.record_event(&start).unwrap();
        assert!(matches!(end.seconds_since(&start), Err(Error::Value { .. })));
        let mut x = Tensor::<u8>::zeros(device, &[1 << 16]).unwrap();
        stream.fill_bytes(&mut x, 1).unwrap();
        stream.record_event(&end).unwrap();
        let seconds = end.seconds_since(&start).unwrap();
        assert!((0.0..60.0).contains(&seconds), "{seconds} s");
        assert!(start.seconds_since(&start).unwrap() == 0.0);
    });
}

#[test]
fn a_tensor_may_be_dropped_while_it_is_used() {
    on_every_device(|device, stream| {
        let x = Tensor::from_slice(device, &[1.0f32; 4096], &[64, 64]).unwrap();
        let mut kept = Tensor::<f32>::zeros(device, &[64, 64]).unwrap();
        for _ in 0..20 {
            let mut y = Tensor::<f32>::uninit(device, &[64, 64]).unwrap();
            norm::rms_norm(stream, &mut y, &x, None, 0.0).unwrap();
            stream.copy(&mut kept, &y).unwrap();
            drop(y);
        }
        assert!(kept.to_vec().unwrap().iter().all(|&v| (v - 1.0).abs() < 1e-6));
    });
}

/// A block larger than the kernel was built for is an error that names the kernel.
#[test]
fn too_large_a_block() {
    let device = Device::simt();
    let stream = Stream::new(&device).unwrap();
    let x = Tensor::from_slice(&device, &[2.0f32; 32], &[1, 32]).unwrap();
    let mut y = Tensor::<f32>::zeros(&device, &[1, 32]).unwrap();
    let (entry, mut geometry, args) = super::normalise(&x, &mut y);
    geometry.block = [2048, 1, 1];
    // SAFETY: refused before any thread runs.
    let error = unsafe { stream.launch(&entry, &geometry, &args) }.unwrap_err();
    assert!(matches!(error, Error::Launch(_)), "{error}");
    assert!(error.to_string().contains(entry.name), "{error}");
    // SAFETY: nothing is launched.
    unsafe { stream.launch(&entry, &warploom::Geometry::new([0, 1, 1], geometry.block), &args) }.unwrap();
}

/// Operations on a SIMT device by threads of a rayon pool, and by others at the same time: a thread that waits for a launch's blocks must not begin another job, which would want the device that it
/// holds, nor may a launch wait for threads that wait for it.
#[test]
fn jobs_of_a_thread_pool() {
    const JOBS: usize = 60;
    let device = Device::simt();
    let (done, all) = std::sync::mpsc::channel();
    let job = move |device: &Device| {
        let stream = Stream::new(device).unwrap();
        let x = Tensor::from_slice(device, &[1f32; 64 * 64], &[64, 64]).unwrap();
        let mut y = Tensor::<f32>::zeros(device, &[64, 64]).unwrap();
        warploom::norm::rms_norm(&stream, &mut y, &x, None, 0.0).unwrap();
        assert!(y.to_vec().unwrap().iter().all(|v| (v - 1.0).abs() < 1e-6));
    };
    let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap();
    for i in 0..JOBS {
        let (device, done) = (device.clone(), done.clone());
        let work = move || {
            job(&device);
            done.send(()).unwrap();
        };
        if i % 10 == 0 {
            std::thread::spawn(work);
        } else {
            pool.spawn(work);
        }
    }
    for i in 0..JOBS {
        let patience = std::time::Duration::from_secs(120);
        assert!(all.recv_timeout(patience).is_ok(), "{i} of {JOBS} jobs ended");
    }
}

/// What is lent to a stream is for no other, although the SIMT device's have done their work when a call returns.
#[test]
fn borrowed_memory_is_for_one_stream() {
    let device = Device::simt();
    let [stream, other] = [(); 2].map(|()| Stream::new(&device).unwrap());
    let mut data = [0u8; 32];
    borrow::scope(&stream, |scope| {
        let mut tensor = scope.slice_mut(&mut data, &[32]).unwrap();
        stream.clone().fill_bytes(&mut tensor, 1).unwrap();
        let e = other.fill_bytes(&mut tensor, 2);
        assert!(matches!(e, Err(Error::WrongStream { .. })), "{e:?}");
    });
    assert_eq!(data, [1; 32]);
}
