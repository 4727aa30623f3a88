//! DLPack on every device, with a producer and a consumer that know nothing of the library but the C structs: their memory
//! comes from the driver itself on a GPU, from the host's allocator on the SIMT device.

use std::ffi::c_void;
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use warploom::dlpack::{self, DLDevice, DLManagedTensorVersioned, DLTensor};
use warploom::{DType, Device, Error, Graph, Tensor, norm};
use warploom_tests::on_every_device;

/// The driver, as any other library calls it.
#[cfg(feature = "cuda")]
mod driver {
    use std::ffi::c_void;

    unsafe extern "C" {
        fn cuMemAlloc_v2(address: *mut u64, bytes: usize) -> i32;
        fn cuMemFree_v2(address: u64) -> i32;
        fn cuMemcpyHtoD_v2(to: u64, from: *const c_void, bytes: usize) -> i32;
        fn cuMemcpyDtoH_v2(to: *mut c_void, from: u64, bytes: usize) -> i32;
    }

    pub(super) fn allocate(bytes: usize) -> u64 {
        let mut address = 0;
        // SAFETY: the address is written; the device's context is current.
        assert_eq!(unsafe { cuMemAlloc_v2(&mut address, bytes) }, 0);
        address
    }
    pub(super) fn free(address: u64) {
        // SAFETY: `allocate` gave it, once.
        assert_eq!(unsafe { cuMemFree_v2(address) }, 0);
    }
    pub(super) fn write(to: u64, from: &[f32]) {
        // SAFETY: the caller's memory is as large.
        assert_eq!(unsafe { cuMemcpyHtoD_v2(to, from.as_ptr().cast(), size_of_val(from)) }, 0);
    }
    pub(super) fn read(to: &mut [f32], from: u64) {
        // SAFETY: the caller's memory is as large.
        assert_eq!(unsafe { cuMemcpyDtoH_v2(to.as_mut_ptr().cast(), from, size_of_val(to)) }, 0);
    }
}

/// Memory that the library did not allocate.
enum Memory {
    Host(Box<[f32]>),
    #[cfg(feature = "cuda")]
    Gpu(u64),
}

impl Memory {
    fn new(device: &Device, values: &[f32]) -> Self {
        // Makes the device's context current as well.
        device.synchronize().unwrap();
        match device.cuda_ordinal() {
            None => Self::Host(values.into()),
            #[cfg(feature = "cuda")]
            Some(_) => {
                let address = driver::allocate(size_of_val(values));
                driver::write(address, values);
                Self::Gpu(address)
            }
            #[cfg(not(feature = "cuda"))]
            Some(_) => unreachable!("a GPU without the feature"),
        }
    }

    fn address(&mut self) -> *mut c_void {
        match self {
            Self::Host(values) => values.as_mut_ptr().cast(),
            #[cfg(feature = "cuda")]
            Self::Gpu(address) => *address as *mut c_void,
        }
    }
}

#[cfg(feature = "cuda")]
impl Drop for Memory {
    fn drop(&mut self) {
        if let Self::Gpu(address) = self {
            driver::free(*address);
        }
    }
}

/// What a consumer reads at an address that a struct named.
fn look(device: &Device, at: *const c_void, count: usize) -> Vec<f32> {
    device.synchronize().unwrap();
    let mut values = vec![0f32; count];
    match device.cuda_ordinal() {
        // SAFETY: the struct that named it says that there are so many.
        None => unsafe { std::ptr::copy_nonoverlapping(at.cast(), values.as_mut_ptr(), count) },
        #[cfg(feature = "cuda")]
        Some(_) => driver::read(&mut values, at as u64),
        #[cfg(not(feature = "cuda"))]
        Some(_) => unreachable!("a GPU without the feature"),
    }
    values
}

fn place(device: &Device) -> DLDevice {
    match device.cuda_ordinal() {
        Some(ordinal) => DLDevice { device_type: dlpack::CUDA, device_id: ordinal as i32 },
        None => DLDevice { device_type: dlpack::CPU, device_id: 0 },
    }
}

/// A producer's tensor, `[rows, width]` with its rows `stride` apart, `offset` elements into its memory.
struct Produced {
    managed: DLManagedTensorVersioned,
    shape: [i64; 2],
    strides: [i64; 2],
    deleted: Arc<AtomicUsize>,
    _memory: Memory,
}

unsafe extern "C" fn delete(managed: *mut DLManagedTensorVersioned) {
    // SAFETY: `manager_ctx` is the producer's box, and this is called once.
    let produced = unsafe { Box::from_raw((*managed).manager_ctx.cast::<Produced>()) };
    assert_eq!(produced.deleted.fetch_add(1, Ordering::SeqCst), 0, "deleted twice");
}

fn produce(
    on: DLDevice,
    mut memory: Memory,
    [rows, width, stride, offset]: [usize; 4],
) -> (NonNull<DLManagedTensorVersioned>, Arc<AtomicUsize>) {
    let deleted = Arc::new(AtomicUsize::new(0));
    let dl_tensor = DLTensor {
        data: memory.address(),
        device: on,
        ndim: 2,
        dtype: DType::F32.into(),
        shape: null_mut(),
        strides: null_mut(),
        byte_offset: 4 * offset as u64,
    };
    let (version, deleter) = (dlpack::VERSION, Some(delete as unsafe extern "C" fn(_)));
    let managed = DLManagedTensorVersioned { version, manager_ctx: null_mut(), deleter, flags: 0, dl_tensor };
    let (shape, strides) = ([rows as i64, width as i64], [stride as i64, 1]);
    let boxed = Box::new(Produced { managed, shape, strides, deleted: deleted.clone(), _memory: memory });
    let produced = Box::into_raw(boxed);
    // SAFETY: just made, and where it stays.
    unsafe {
        (*produced).managed.manager_ctx = produced.cast();
        (*produced).managed.dl_tensor.shape = (*produced).shape.as_mut_ptr();
        (*produced).managed.dl_tensor.strides = (*produced).strides.as_mut_ptr();
        (NonNull::new_unchecked(&raw mut (*produced).managed), deleted)
    }
}

#[test]
fn a_producers_memory_is_worked_on_where_it_is() {
    on_every_device(|device, stream| {
        // Rows of 4 of which 2 are the tensor's, behind one element that is not.
        let mut memory = Memory::new(device, &[9.0, 3.0, 3.0, 9.0, 9.0, 4.0, -4.0, 9.0, 9.0]);
        let first = memory.address();
        let (managed, deleted) = produce(place(device), memory, [2, 2, 4, 1]);
        // SAFETY: a valid struct that nobody else has.
        let x: Tensor<f32> = unsafe { dlpack::import(device, managed) }.unwrap();
        assert_eq!((x.as_ptr() as usize, x.strides()), (first as usize + 4, &[4, 1][..]));
        assert_eq!(x.to_vec().unwrap(), [3.0, 3.0, 4.0, -4.0]);

        // Read, in a graph that outlives the tensor; then written, in place.
        let mut y = Tensor::zeros(device, &[2, 2]).unwrap();
        let graph = Graph::capture(stream, |s| norm::rms_norm(s, &mut y, &x, None, 0.0)).unwrap();
        let (mut sum, mut twice) = (x.clone(), Tensor::from_slice(device, &[1.0f32; 4], &[2, 2]).unwrap());
        norm::fused_add_rms_norm(stream, &mut twice, &mut sum, None, 0.0).unwrap();
        stream.synchronize().unwrap();
        let expected = [9.0, 4.0, 4.0, 9.0, 9.0, 5.0, -3.0, 9.0, 9.0];
        assert_eq!(look(device, first, 9), expected);
        drop((x, sum));
        graph.launch(stream).unwrap();
        let got = y.to_vec().unwrap();
        assert!((got[0] - 1.0).abs() < 1e-6 && (got[2] - 5.0 / 17f32.sqrt()).abs() < 1e-6, "{got:?}");
        assert_eq!(deleted.load(Ordering::SeqCst), 0, "the graph still reads it");
        drop(graph);
        assert_eq!(deleted.load(Ordering::SeqCst), 1);
    });
}

#[test]
fn a_consumer_reads_our_memory_and_ends_it() {
    on_every_device(|device, stream| {
        let x = Tensor::from_slice(device, &[0.0f32, 3.0, 4.0, 0.0, 6.0, 8.0], &[2, 3]).unwrap();
        let mut y = Tensor::zeros(device, &[2, 3]).unwrap();
        norm::rms_norm(stream, &mut y, &x.narrow(1, 0, 3).unwrap(), None, 0.0).unwrap();
        stream.synchronize().unwrap();
        let (part, address) = (x.narrow(1, 1, 2).unwrap(), x.as_ptr() as usize);
        let managed = dlpack::export(&part).unwrap();
        drop((x, part));
        // SAFETY: alive until its deleter is called, which is once.
        unsafe {
            let t = &managed.as_ref().dl_tensor;
            assert_eq!((t.device, t.ndim, t.dtype), (place(device), 2, DType::F32.into()));
            assert_eq!(t.data as usize + t.byte_offset as usize, address + 4);
            let (shape, strides) = (std::slice::from_raw_parts(t.shape, 2), std::slice::from_raw_parts(t.strides, 2));
            assert_eq!((shape, strides), (&[2, 2][..], &[3, 1][..]));
            assert_eq!(look(device, t.data, 5), [3.0, 4.0, 0.0, 6.0, 8.0]);
            managed.as_ref().deleter.expect("there is one")(managed.as_ptr());
        }
    });
}

/// A consumer of what has no elements gets no address, and what comes from one without an address is as good as any other.
#[test]
fn nothing_has_no_address() {
    on_every_device(|device, stream| {
        let x = Tensor::<f32>::zeros(device, &[3, 5]).unwrap();
        for empty in [Tensor::zeros(device, &[0, 5]).unwrap(), x.narrow(1, 1, 3).unwrap().narrow(0, 2, 0).unwrap()] {
            assert!((empty.as_ptr() as usize).is_multiple_of(1024));
            let managed = dlpack::export(&empty).unwrap();
            // SAFETY: just exported, and nobody else has it.
            let again = unsafe {
                assert!(managed.as_ref().dl_tensor.data.is_null());
                dlpack::import::<f32>(device, managed).unwrap()
            };
            assert_eq!((again.shape(), again.to_vec().unwrap()), (empty.shape(), vec![]));
            assert!((again.as_ptr() as usize).is_multiple_of(1024));
            let mut out = again.clone();
            norm::rms_norm(stream, &mut out, &again, None, 0.0).unwrap();
        }
    });
}

/// What is another device's is refused, and deleted.
#[test]
fn memory_of_another_device_is_refused() {
    on_every_device(|device, _| {
        let own = place(device);
        let other = DLDevice { device_type: if device.is_simt() { dlpack::CUDA } else { dlpack::CPU }, device_id: 0 };
        let far = DLDevice { device_id: 17, ..own };
        for wrong in if device.is_simt() { vec![other] } else { vec![other, far] } {
            let (managed, deleted) = produce(wrong, Memory::new(device, &[1.0; 4]), [2, 2, 2, 0]);
            // SAFETY: a valid struct that nobody else has.
            let error = unsafe { dlpack::import::<f32>(device, managed) }.map(drop).unwrap_err();
            assert!(matches!(error, Error::WrongDevice { .. }), "{error}");
            assert_eq!(deleted.load(Ordering::SeqCst), 1);
        }
    });
}
