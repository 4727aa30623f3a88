//! Exchange of tensors by DLPack's C ABI, with a producer and a consumer that know nothing but its structs.

use std::ffi::c_void;
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use warploom::dlpack::{
    self, DLDataType, DLDevice, DLManagedTensor, DLManagedTensorVersioned, DLPackVersion, DLTensor,
};
use warploom::{DType, Device, E4M3, E5M2, Element, Error, Graph, Stream, Tensor, bf16, f16, norm};

/// A producer's tensor; counts how often it is deleted.
struct Producer {
    versioned: DLManagedTensorVersioned,
    legacy: DLManagedTensor,
    data: Vec<u64>,
    shape: Vec<i64>,
    strides: Vec<i64>,
    deleted: Arc<AtomicUsize>,
}

unsafe extern "C" fn delete_versioned(managed: *mut DLManagedTensorVersioned) {
    // SAFETY: `manager_ctx` is the producer's box, and this is called once.
    let producer = unsafe { Box::from_raw((*managed).manager_ctx.cast::<Producer>()) };
    assert_eq!(producer.deleted.fetch_add(1, Ordering::SeqCst), 0, "deleted twice");
}

unsafe extern "C" fn delete_legacy(managed: *mut DLManagedTensor) {
    // SAFETY: as above.
    let producer = unsafe { Box::from_raw((*managed).manager_ctx.cast::<Producer>()) };
    assert_eq!(producer.deleted.fetch_add(1, Ordering::SeqCst), 0, "deleted twice");
}

/// What is produced, dense unless `strides` is set.
struct Spec {
    dtype: DLDataType,
    shape: Vec<i64>,
    strides: Option<Vec<i64>>,
    byte_offset: u64,
    device: DLDevice,
    version: DLPackVersion,
    flags: u64,
}

const CPU: DLDevice = DLDevice { device_type: dlpack::CPU, device_id: 0 };

impl Spec {
    fn new(dtype: DType, shape: &[i64]) -> Self {
        Self {
            dtype: dtype.into(),
            shape: shape.into(),
            strides: None,
            byte_offset: 0,
            device: CPU,
            version: dlpack::VERSION,
            flags: 0,
        }
    }

    /// The tensor over a copy of `bytes`.
    fn produce(&self, bytes: &[u8]) -> (*mut Producer, Arc<AtomicUsize>) {
        let mut data = vec![0u64; bytes.len().div_ceil(8)];
        // SAFETY: as many bytes at least.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), data.as_mut_ptr().cast(), bytes.len()) };
        let deleted = Arc::new(AtomicUsize::new(0));
        let tensor = || DLTensor {
            data: null_mut(),
            device: self.device,
            ndim: self.shape.len() as i32,
            dtype: self.dtype,
            shape: null_mut(),
            strides: null_mut(),
            byte_offset: self.byte_offset,
        };
        let producer = Box::into_raw(Box::new(Producer {
            versioned: DLManagedTensorVersioned {
                version: self.version,
                manager_ctx: null_mut(),
                deleter: Some(delete_versioned),
                flags: self.flags,
                dl_tensor: tensor(),
            },
            legacy: DLManagedTensor { dl_tensor: tensor(), manager_ctx: null_mut(), deleter: Some(delete_legacy) },
            data,
            shape: self.shape.clone(),
            strides: self.strides.clone().unwrap_or_default(),
            deleted: deleted.clone(),
        }));
        // SAFETY: just made.
        unsafe {
            let p = &mut *producer;
            for tensor in [&mut p.versioned.dl_tensor, &mut p.legacy.dl_tensor] {
                tensor.data = if bytes.is_empty() { null_mut() } else { p.data.as_mut_ptr().cast() };
                tensor.shape = if self.shape.is_empty() { null_mut() } else { p.shape.as_mut_ptr() };
                tensor.strides = if self.strides.is_some() { p.strides.as_mut_ptr() } else { null_mut() };
            }
            p.versioned.manager_ctx = producer.cast::<c_void>();
            p.legacy.manager_ctx = producer.cast::<c_void>();
        }
        (producer, deleted)
    }

    fn import<T: Element>(&self, device: &Device, bytes: &[u8]) -> (warploom::Result<Tensor<T>>, Arc<AtomicUsize>) {
        let (producer, deleted) = self.produce(bytes);
        // SAFETY: a valid struct, which nobody else has.
        let managed = unsafe { NonNull::new_unchecked(&raw mut (*producer).versioned) };
        // SAFETY: as above.
        (unsafe { dlpack::import(device, managed) }, deleted)
    }

    fn import_legacy<T: Element>(
        &self,
        device: &Device,
        bytes: &[u8],
    ) -> (warploom::Result<Tensor<T>>, Arc<AtomicUsize>) {
        let (producer, deleted) = self.produce(bytes);
        // SAFETY: a valid struct, which nobody else has.
        let managed = unsafe { NonNull::new_unchecked(&raw mut (*producer).legacy) };
        // SAFETY: as above.
        (unsafe { dlpack::import_legacy(device, managed) }, deleted)
    }
}

fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_ne_bytes()).collect()
}

#[test]
fn an_imported_tensor_is_used_where_it_is() {
    let device = Device::simt();
    let stream = Stream::new(&device).unwrap();
    let data = bytes(&[3.0, 4.0, 6.0, 8.0]);
    for legacy in [false, true] {
        let spec = Spec::new(DType::F32, &[2, 2]);
        let (x, deleted) = if legacy { spec.import_legacy(&device, &data) } else { spec.import(&device, &data) };
        let mut x: Tensor<f32> = x.unwrap();
        assert_eq!((x.shape(), x.strides()), (&[2, 2][..], &[2, 1][..]));
        let view = x.narrow(0, 1, 1).unwrap();
        let mut y = Tensor::zeros(&device, &[1, 2]).unwrap();
        let graph = Graph::capture(&stream, |s| norm::rms_norm(s, &mut y, &view, None, 0.0)).unwrap();
        x.copy_from_slice(&[0.0, 0.0, 1.0, 1.0]).unwrap();
        drop((x, view));
        graph.launch(&stream).unwrap();
        assert_eq!(y.to_vec().unwrap(), [1.0, 1.0]);
        assert_eq!(deleted.load(Ordering::SeqCst), 0, "the graph still uses it");
        drop(graph);
        assert_eq!(deleted.load(Ordering::SeqCst), 1);
    }
}

#[test]
fn strides_offsets_and_empty_shapes() {
    let device = Device::simt();
    let data = bytes(&(0..24).map(|v| v as f32).collect::<Vec<_>>());
    let import = |spec: Spec| spec.import::<f32>(&device, &data).0;
    let transposed = Spec { strides: Some(vec![1, 4]), byte_offset: 16, ..Spec::new(DType::F32, &[3, 2]) };
    assert_eq!(import(transposed).unwrap().to_vec().unwrap(), [4.0, 8.0, 5.0, 9.0, 6.0, 10.0]);
    // The stride of a single element may be anything.
    let single = Spec { strides: Some(vec![-7, 1]), ..Spec::new(DType::F32, &[1, 3]) };
    assert_eq!(import(single).unwrap().to_vec().unwrap(), [0.0, 1.0, 2.0]);
    let broadcast = Spec { strides: Some(vec![0, 1]), ..Spec::new(DType::F32, &[2, 2]) };
    assert_eq!(import(broadcast).unwrap().to_vec().unwrap(), [0.0, 1.0, 0.0, 1.0]);
    assert_eq!(import(Spec::new(DType::F32, &[])).unwrap().to_vec().unwrap(), [0.0]);
    let (empty, deleted) = Spec::new(DType::F32, &[0, 5]).import::<f32>(&device, &[]);
    assert!(empty.unwrap().to_vec().unwrap().is_empty());
    assert_eq!(deleted.load(Ordering::SeqCst), 1);

    let backwards = Spec { strides: Some(vec![-1]), ..Spec::new(DType::F32, &[3]) };
    assert!(matches!(import(backwards), Err(Error::Unsupported { .. })));
    assert!(matches!(import(Spec { byte_offset: 2, ..Spec::new(DType::F32, &[3]) }), Err(Error::Alignment { .. })));
    assert!(matches!(import(Spec::new(DType::F32, &[-3])), Err(Error::Tensor(_))));
    assert!(matches!(import(Spec::new(DType::F32, &[i64::MAX, 2])), Err(Error::Tensor(_))));
    assert!(matches!(import(Spec::new(DType::F32, &[1; 7])), Err(Error::Tensor(_))));
}

/// Whatever is refused is deleted, once.
#[test]
fn what_is_refused_is_deleted() {
    let device = Device::simt();
    let data = bytes(&[1.0; 4]);
    let refuse = |spec: Spec| {
        let (result, deleted) = spec.import::<f32>(&device, &data);
        let error = result.map(drop).unwrap_err();
        assert_eq!(deleted.load(Ordering::SeqCst), 1, "{error}");
        error
    };
    let spec = || Spec::new(DType::F32, &[4]);
    let error = refuse(Spec { version: DLPackVersion { major: 2, minor: 1 }, ..spec() });
    assert!(matches!(error, Error::DlpackVersion { found: (2, 1), supported: 1 }), "{error}");
    assert_eq!(error.to_string(), "dlpack: version 2.1 came, and only 1.x is known");
    let newer = Spec { version: DLPackVersion { major: 1, minor: 99 }, ..spec() };
    assert!(newer.import::<f32>(&device, &data).0.is_ok());
    let error = refuse(Spec { dtype: DType::I32.into(), ..spec() });
    assert!(matches!(error, Error::DType { got: DType::I32, .. }), "{error}");
    let complex = DLDataType { code: 5, bits: 64, lanes: 1 };
    assert!(matches!(refuse(Spec { dtype: complex, ..spec() }), Error::Unsupported { .. }));
    let vectors = DLDataType { code: 2, bits: 32, lanes: 4 };
    assert!(matches!(refuse(Spec { dtype: vectors, ..spec() }), Error::Unsupported { .. }));
    for device_type in [dlpack::CUDA, dlpack::CUDA_MANAGED, 8] {
        let error = refuse(Spec { device: DLDevice { device_type, device_id: 0 }, ..spec() });
        assert!(matches!(error, Error::WrongDevice { .. }), "{error}");
    }
}

#[test]
fn read_only_tensors_are_not_written() {
    let device = Device::simt();
    let stream = Stream::new(&device).unwrap();
    let spec = Spec { flags: dlpack::FLAG_READ_ONLY | dlpack::FLAG_IS_COPIED, ..Spec::new(DType::F32, &[1, 2]) };
    let (x, _) = spec.import::<f32>(&device, &bytes(&[3.0, 4.0]));
    let mut x = x.unwrap();
    let mut y = Tensor::<f32>::zeros(&device, &[1, 2]).unwrap();
    norm::rms_norm(&stream, &mut y, &x, None, 0.0).unwrap();
    let error = norm::rms_norm(&stream, &mut x, &y, None, 0.0).unwrap_err();
    assert!(matches!(error, Error::ReadOnly { op: "rms_norm", arg: "out" }), "{error}");
    // It stays so on the way out.
    let managed = dlpack::export(&x).unwrap();
    // SAFETY: just made; deleted once.
    unsafe {
        assert_eq!(managed.as_ref().flags, dlpack::FLAG_READ_ONLY);
        consume(managed);
    }
}

/// A consumer that is done.
unsafe fn consume(managed: NonNull<DLManagedTensorVersioned>) {
    // SAFETY: promised by the caller.
    unsafe { managed.as_ref().deleter.expect("there is one")(managed.as_ptr()) }
}

/// What a consumer sees, and that the memory lives until it is done.
#[test]
fn an_exported_tensor_says_what_it_is() {
    let device = Device::simt();
    let deleted = Arc::new(AtomicUsize::new(0));
    struct Owner(Arc<AtomicUsize>, #[allow(dead_code)] Vec<f32>);
    impl Drop for Owner {
        fn drop(&mut self) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }
    let mut memory: Vec<f32> = (0..12).map(|v| v as f32).collect();
    let data = memory.as_mut_ptr();
    // SAFETY: the owner keeps the vector's memory.
    let whole = unsafe { Tensor::from_raw(&device, data, &[3, 4], None, Owner(deleted.clone(), memory)) }.unwrap();
    let part = whole.narrow(1, 1, 2).unwrap();
    let managed = dlpack::export(&part).unwrap();
    drop((whole, part));
    // SAFETY: alive until it is consumed.
    unsafe {
        let m = managed.as_ref();
        let t = &m.dl_tensor;
        assert_eq!((m.version, m.flags, t.device, t.byte_offset), (dlpack::VERSION, 0, CPU, 0));
        // The first version with codes of 8-bit floats.
        assert_eq!(m.version, DLPackVersion { major: 1, minor: 1 });
        assert_eq!(t.dtype, DLDataType { code: 2, bits: 32, lanes: 1 });
        let (shape, strides) = (std::slice::from_raw_parts(t.shape, 2), std::slice::from_raw_parts(t.strides, 2));
        assert_eq!((t.ndim, shape, strides), (2, &[3, 2][..], &[4, 1][..]));
        let at = |i: usize, j: usize| *t.data.cast::<f32>().add(i * strides[0] as usize + j * strides[1] as usize);
        assert_eq!([at(0, 0), at(0, 1), at(2, 1)], [1.0, 2.0, 10.0]);
        t.data.cast::<f32>().write(7.0);
        assert_eq!(deleted.load(Ordering::SeqCst), 0);
        consume(managed);
    }
    assert_eq!(deleted.load(Ordering::SeqCst), 1);
}

#[test]
fn every_element_type_goes_out_and_in() {
    fn round_trip<T: Element>() {
        let device = Device::simt();
        let x = Tensor::<T>::zeros(&device, &[2, 3]).unwrap();
        let managed = dlpack::export(&x).unwrap();
        // SAFETY: just exported.
        let y: Tensor<T> = unsafe { dlpack::import(&device, managed) }.unwrap();
        assert_eq!((y.as_ptr(), y.shape(), y.strides()), (x.as_ptr(), x.shape(), x.strides()));
    }
    round_trip::<f32>();
    round_trip::<f16>();
    round_trip::<bf16>();
    round_trip::<E4M3>();
    round_trip::<E5M2>();
    round_trip::<u8>();
    round_trip::<i8>();
    round_trip::<i32>();
    round_trip::<u32>();
    round_trip::<i64>();
    round_trip::<u64>();
    // A mask of booleans is one of bytes.
    let mask = Spec { dtype: DLDataType { code: 6, bits: 8, lanes: 1 }, ..Spec::new(DType::U8, &[3]) };
    assert_eq!(mask.import::<u8>(&Device::simt(), &[1, 0, 1]).0.unwrap().to_vec().unwrap(), [1, 0, 1]);
}

#[test]
fn borrowed_tensors_stay() {
    let stream = Stream::new(&Device::simt()).unwrap();
    let x = [1.0f32; 4];
    warploom::borrow::scope(&stream, |s| {
        let x = s.slice(&x, &[4]).unwrap();
        assert!(matches!(dlpack::export(&x), Err(Error::Unsupported { .. })));
    });
}

/// On a GPU, where there is one: out, in, and used, with nothing copied.
#[test]
fn tensors_of_a_gpu() {
    let device = match Device::cuda(0) {
        Ok(device) => device,
        Err(e) => return eprintln!("GPU tests are skipped: {e}"),
    };
    let stream = Stream::new(&device).unwrap();
    let x = Tensor::from_slice(&device, &[3.0f32, 4.0], &[1, 2]).unwrap();
    let managed = dlpack::export(&x).unwrap();
    // SAFETY: just exported.
    let place = unsafe { managed.as_ref().dl_tensor.device };
    assert_eq!(place, DLDevice { device_type: dlpack::CUDA, device_id: 0 });
    let address = x.as_ptr();
    drop(x);
    // SAFETY: just exported.
    let y: Tensor<f32> = unsafe { dlpack::import(&device, managed) }.unwrap();
    assert_eq!(y.as_ptr(), address);
    let mut z = Tensor::zeros(&device, &[1, 2]).unwrap();
    norm::rms_norm(&stream, &mut z, &y, None, 0.0).unwrap();
    assert_eq!(z.to_vec().unwrap().iter().map(|v| v * v).sum::<f32>().round(), 2.0);
    let host = Spec::new(DType::F32, &[1]).import::<f32>(&device, &bytes(&[1.0])).0;
    assert!(matches!(host, Err(Error::WrongDevice { .. })));
}

/// The layouts of `dlpack.h` 1.0, for 64-bit targets.
#[test]
fn structs_are_laid_out_as_in_c() {
    use std::mem::offset_of;
    assert_eq!(size_of::<DLTensor>(), 48);
    assert_eq!([offset_of!(DLTensor, device), offset_of!(DLTensor, ndim), offset_of!(DLTensor, dtype)], [8, 16, 20]);
    let offsets = [offset_of!(DLTensor, shape), offset_of!(DLTensor, strides), offset_of!(DLTensor, byte_offset)];
    assert_eq!(offsets, [24, 32, 40]);
    assert_eq!(size_of::<DLManagedTensorVersioned>(), 80);
    assert_eq!(offset_of!(DLManagedTensorVersioned, manager_ctx), 8);
    assert_eq!(offset_of!(DLManagedTensorVersioned, deleter), 16);
    assert_eq!(offset_of!(DLManagedTensorVersioned, flags), 24);
    assert_eq!(offset_of!(DLManagedTensorVersioned, dl_tensor), 32);
    assert_eq!(size_of::<DLManagedTensor>(), 64);
    assert_eq!([offset_of!(DLManagedTensor, manager_ctx), offset_of!(DLManagedTensor, deleter)], [48, 56]);
}

/// `DLDataTypeCode` of every element type.
#[test]
fn codes_of_element_types() {
    let codes = [
        (DType::F32, 2, 32),
        (DType::F16, 2, 16),
        (DType::Bf16, 4, 16),
        (DType::E4m3, 10, 8),
        (DType::E5m2, 12, 8),
        (DType::I8, 0, 8),
        (DType::I32, 0, 32),
        (DType::I64, 0, 64),
        (DType::U8, 1, 8),
        (DType::U32, 1, 32),
        (DType::U64, 1, 64),
    ];
    for (dtype, code, bits) in codes {
        assert_eq!(DLDataType::from(dtype), DLDataType { code, bits, lanes: 1 });
        assert_eq!(DLDataType { code, bits, lanes: 1 }.dtype(), Some(dtype));
    }
    for (code, bits) in [(2, 64), (7, 8), (11, 8), (17, 4), (0, 16)] {
        assert_eq!(DLDataType { code, bits, lanes: 1 }.dtype(), None);
    }
}
