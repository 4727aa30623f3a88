//! How candle's storages become warploom's tensors and back.
//!
//! An [`Operation`] says what it computes on lent tensors, generically; [`apply`] lends the storages of candle's tensors to it for
//! the time of the call, and new ones for the outputs; [`apply_to`] those of tensors that it writes to. Bounds of layouts are checked by warploom, so nothing here is unsafe but the
//! allocation of outputs on a GPU.

use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, DType, Error, Layout, Result, Shape, Storage, StorageRef, Tensor as Candle, bail};
use std::any::Any;
use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::{Mutex, OnceLock, PoisonError};
use warploom::kv_cache::{CacheElement, StoreAs};
use warploom::{Device, Element, Float, SimtOptions, Stream, Tensor, bf16, borrow, f16};

/// An element type of the kernels.
pub(crate) trait Kernel: Float + CacheElement + StoreAs<Self> {}
impl Kernel for f32 {}
impl Kernel for f16 {}
impl Kernel for bf16 {}

/// Computes outputs from inputs; the first input's element type is the kernel's.
pub(crate) trait Operation {
    const NAME: &'static str;

    /// Whether it writes every element of its new outputs, whatever the inputs are. If not, they are zeros before, as on the CPU.
    #[cfg(feature = "cuda")]
    const WRITES_ALL: bool = true;

    /// Inputs that `CustomOp`s have no argument for. They follow those that have one.
    fn extra(&self) -> Vec<&Candle> {
        vec![]
    }

    /// Type and shape of each output that is a new tensor.
    fn outputs(&self, inputs: &[&Layout], dtype: DType) -> Result<Vec<(DType, Shape)>>;

    /// Submits the work. Tensors that are written to follow the new outputs.
    fn run<T: Kernel>(&self, stream: &Stream, outputs: &mut [Lent], inputs: &[Lent]) -> Result<()>;
}

/// A storage that is lent to a [`Tensor`] of some type.
pub(crate) struct Lent {
    name: &'static str,
    dtype: DType,
    tensor: Box<dyn Any>,
}

impl Lent {
    /// The tensor, if it is of type `T`.
    pub(crate) fn get<T: Element>(&self) -> Result<&Tensor<T>> {
        self.tensor.downcast_ref().ok_or_else(|| self.wrong(T::DTYPE.name()))
    }

    /// An output.
    pub(crate) fn get_mut<T: Element>(&mut self) -> Result<&mut Tensor<T>> {
        let error = self.wrong(T::DTYPE.name());
        self.tensor.downcast_mut().ok_or(error)
    }

    /// Indices, of type `u32` or `i32`.
    pub(crate) fn indices(&self) -> Result<Tensor<i32>> {
        match self.tensor.downcast_ref::<Tensor<u32>>() {
            Some(tensor) => tensor.cast().map_err(Error::wrap),
            None => self.tensor.downcast_ref::<Tensor<i32>>().cloned().ok_or_else(|| self.wrong("u32 or i32")),
        }
    }

    fn wrong(&self, expected: &str) -> Error {
        Error::Msg(format!("{}: a tensor must be {expected}, but is {:?}", self.name, self.dtype)).bt()
    }
}

/// Two outputs at once.
pub(crate) fn pair(outputs: &mut [Lent]) -> Result<(&mut Lent, &mut Lent)> {
    match outputs {
        [a, b] => Ok((a, b)),
        _ => bail!("{} outputs, of which there should be two", outputs.len()),
    }
}

/// The device of candle's CPU tensors.
fn simt() -> Result<Stream> {
    static DEVICE: OnceLock<Device> = OnceLock::new();
    let device = DEVICE.get_or_init(|| Device::simt_with(SimtOptions::default().host_products(true)));
    Stream::new(device).map_err(Error::wrap)
}

fn dispatch<O: Operation>(op: &O, dtype: DType, stream: &Stream, outputs: &mut [Lent], inputs: &[Lent]) -> Result<()> {
    match dtype {
        DType::F32 => op.run::<f32>(stream, outputs, inputs),
        DType::F16 => op.run::<f16>(stream, outputs, inputs),
        DType::BF16 => op.run::<bf16>(stream, outputs, inputs),
        other => bail!("{}: the first tensor must be f32, f16 or bf16, but is {other:?}", O::NAME),
    }
}

fn lent<T: Element>(name: &'static str, dtype: DType, tensor: warploom::Result<Tensor<T>>) -> Result<Lent> {
    Ok(Lent { name, dtype, tensor: Box::new(tensor.map_err(Error::wrap)?) })
}

/// The elements of a flat tensor that a layout describes, after its start.
fn laid_out<T: Element>(flat: warploom::Result<Tensor<T>>, layout: &Layout) -> warploom::Result<Tensor<T>> {
    flat?.as_strided(layout.dims(), layout.stride(), 0)
}

/// The parts of a storage that layouts describe.
fn parts<T: Element>(
    name: &'static str,
    dtype: DType,
    whole: warploom::Result<Tensor<T>>,
    layouts: &[&Layout],
) -> Result<Vec<Lent>> {
    let whole = whole.map_err(Error::wrap)?;
    let part = |l: &&Layout| lent(name, dtype, whole.as_strided(l.dims(), l.stride(), l.start_offset()));
    layouts.iter().map(part).collect()
}

/// The number of an output's elements. An input may be expanded beyond any memory, and so what it says of outputs.
fn elements(name: &'static str, dtype: DType, shape: &Shape) -> Result<usize> {
    let bytes = shape.dims().iter().try_fold(dtype.size_in_bytes(), |n, &d| n.checked_mul(d));
    match bytes.map(isize::try_from) {
        Some(Ok(_)) => Ok(shape.elem_count()),
        _ => bail!("{name}: an output of shape {:?} is larger than any memory", shape.dims()),
    }
}

/// Runs an operation on storages of the CPU, some of which, `into`, it writes to where layouts say.
fn on_cpu<O: Operation>(
    op: &O,
    into: Vec<(&mut CpuStorage, Vec<&Layout>)>,
    inputs: &[(&CpuStorage, &Layout)],
) -> Result<Vec<(CpuStorage, Shape)>> {
    use candle_core::backend::BackendStorage as _;

    fn view<'env, T: Element>(
        scope: &borrow::Scope<'env>,
        data: &'env [T],
        layout: &Layout,
    ) -> warploom::Result<Tensor<T>> {
        let data = data.get(layout.start_offset()..).unwrap_or_default();
        laid_out(scope.slice(data, &[data.len()]), layout)
    }
    /// Room for an output, whose shape may be that of an expanded tensor: more than there is memory.
    fn zeros<T: Copy>(op: &str, zero: T, n: usize) -> Result<Vec<T>> {
        let mut zeros = Vec::new();
        if zeros.try_reserve_exact(n).is_err() {
            bail!("{op}: no memory for {n} elements of an output");
        }
        zeros.resize(n, zero);
        Ok(zeros)
    }
    let stream = simt()?;
    let dtype = inputs.first().map_or(DType::F32, |(s, _)| s.dtype());
    let layouts: Vec<_> = inputs.iter().map(|(_, layout)| *layout).collect();
    let mut outputs = vec![];
    for (dtype, shape) in op.outputs(&layouts, dtype)? {
        let n = elements(O::NAME, dtype, &shape)?;
        let storage = match dtype {
            DType::U32 => CpuStorage::U32(zeros(O::NAME, 0, n)?),
            DType::F32 => CpuStorage::F32(zeros(O::NAME, 0.0, n)?),
            DType::F16 => CpuStorage::F16(zeros(O::NAME, f16::ZERO, n)?),
            DType::BF16 => CpuStorage::BF16(zeros(O::NAME, bf16::ZERO, n)?),
            other => bail!("{}: {other:?} is not supported", O::NAME),
        };
        outputs.push((storage, shape));
    }
    borrow::scope(&stream, |scope| {
        fn lend_input<'env>(
            name: &'static str,
            scope: &borrow::Scope<'env>,
            storage: &'env CpuStorage,
            layout: &Layout,
        ) -> Result<Lent> {
            let dtype = storage.dtype();
            match storage {
                CpuStorage::U8(v) => lent(name, dtype, view(scope, v, layout)),
                CpuStorage::U32(v) => lent(name, dtype, view(scope, v, layout)),
                CpuStorage::I32(v) => lent(name, dtype, view(scope, v, layout)),
                CpuStorage::I64(v) => lent(name, dtype, view(scope, v, layout)),
                CpuStorage::F32(v) => lent(name, dtype, view(scope, v, layout)),
                CpuStorage::F16(v) => lent(name, dtype, view(scope, v, layout)),
                CpuStorage::BF16(v) => lent(name, dtype, view(scope, v, layout)),
                _ => bail!("{name}: {dtype:?} is not supported"),
            }
        }
        let inputs = inputs.iter().map(|(s, l)| lend_input(O::NAME, scope, s, l)).collect::<Result<Vec<_>>>()?;
        fn lend_output<'env>(
            name: &'static str,
            scope: &borrow::Scope<'env>,
            storage: &'env mut CpuStorage,
            layouts: &[&Layout],
        ) -> Result<Vec<Lent>> {
            let dtype = storage.dtype();
            fn whole<'env, T: Element>(scope: &borrow::Scope<'env>, v: &'env mut [T]) -> warploom::Result<Tensor<T>> {
                let len = v.len();
                scope.slice_mut(v, &[len])
            }
            match storage {
                CpuStorage::U32(v) => parts(name, dtype, whole(scope, v), layouts),
                CpuStorage::F32(v) => parts(name, dtype, whole(scope, v), layouts),
                CpuStorage::F16(v) => parts(name, dtype, whole(scope, v), layouts),
                CpuStorage::BF16(v) => parts(name, dtype, whole(scope, v), layouts),
                _ => bail!("{name}: {dtype:?} is not supported"),
            }
        }
        let mut lent = vec![];
        for (storage, shape) in &mut outputs {
            lent.extend(lend_output(O::NAME, scope, storage, &[&Layout::contiguous(shape.clone())])?);
        }
        for (storage, layouts) in into {
            lent.extend(lend_output(O::NAME, scope, storage, &layouts)?);
        }
        dispatch(op, dtype, &stream, &mut lent, &inputs)
    })?;
    Ok(outputs)
}

/// [`on_cpu`] for storages of a GPU.
#[cfg(feature = "cuda")]
fn on_cuda<O: Operation>(
    op: &O,
    into: Vec<(&mut candle_core::CudaStorage, Vec<&Layout>)>,
    inputs: &[(&candle_core::CudaStorage, &Layout)],
) -> Result<Vec<(candle_core::CudaStorage, Shape)>> {
    use candle_core::backend::BackendStorage as _;
    use candle_core::cuda_backend::CudaStorageSlice;
    use candle_core::cuda_backend::cudarc::driver::{CudaSlice, DeviceRepr, ValidAsZeroBits};
    use candle_core::{CudaDevice, CudaStorage};
    use warploom::cudarc::Scope;

    fn view<'env, T: Element>(
        scope: &Scope<'env>,
        data: &'env CudaSlice<T>,
        layout: &Layout,
    ) -> warploom::Result<Tensor<T>> {
        let data = data.slice(layout.start_offset().min(data.len())..);
        let len = data.len();
        laid_out(scope.view(data, &[len]), layout)
    }
    let Some((first, _)) = inputs.first() else { bail!("{}: no inputs", O::NAME) };
    let (device, dtype) = (first.device.clone(), first.dtype());
    let stream = warploom::cudarc::Stream::new(&device.cuda_stream()).map_err(Error::wrap)?;
    let layouts: Vec<_> = inputs.iter().map(|(_, layout)| *layout).collect();
    let mut outputs = vec![];
    for (dtype, shape) in op.outputs(&layouts, dtype)? {
        let n = elements(O::NAME, dtype, &shape)?;
        fn room<O: Operation, T: DeviceRepr + ValidAsZeroBits>(device: &CudaDevice, n: usize) -> Result<CudaSlice<T>> {
            if O::WRITES_ALL {
                // SAFETY: any bytes are elements, and the operation writes all of them.
                unsafe { device.alloc(n) }
            } else {
                device.alloc_zeros(n)
            }
        }
        let slice = match dtype {
            DType::U32 => CudaStorageSlice::U32(room::<O, _>(&device, n)?),
            DType::F32 => CudaStorageSlice::F32(room::<O, _>(&device, n)?),
            DType::F16 => CudaStorageSlice::F16(room::<O, _>(&device, n)?),
            DType::BF16 => CudaStorageSlice::BF16(room::<O, _>(&device, n)?),
            other => bail!("{}: {other:?} is not supported", O::NAME),
        };
        outputs.push((CudaStorage { slice, device: device.clone() }, shape));
    }
    stream.scope(|scope| {
        fn lend_input<'env>(
            name: &'static str,
            scope: &Scope<'env>,
            storage: &'env CudaStorage,
            layout: &Layout,
        ) -> Result<Lent> {
            let dtype = storage.dtype();
            match &storage.slice {
                CudaStorageSlice::U8(v) => lent(name, dtype, view(scope, v, layout)),
                CudaStorageSlice::U32(v) => lent(name, dtype, view(scope, v, layout)),
                CudaStorageSlice::I32(v) => lent(name, dtype, view(scope, v, layout)),
                CudaStorageSlice::I64(v) => lent(name, dtype, view(scope, v, layout)),
                CudaStorageSlice::F32(v) => lent(name, dtype, view(scope, v, layout)),
                CudaStorageSlice::F16(v) => lent(name, dtype, view(scope, v, layout)),
                CudaStorageSlice::BF16(v) => lent(name, dtype, view(scope, v, layout)),
                _ => bail!("{name}: {dtype:?} is not supported"),
            }
        }
        let inputs = inputs.iter().map(|(s, l)| lend_input(O::NAME, scope, s, l)).collect::<Result<Vec<_>>>()?;
        fn lend_output<'env>(
            name: &'static str,
            scope: &Scope<'env>,
            storage: &'env mut CudaStorage,
            layouts: &[&Layout],
        ) -> Result<Vec<Lent>> {
            let dtype = storage.dtype();
            fn whole<'env, T: Element>(scope: &Scope<'env>, v: &'env mut CudaSlice<T>) -> warploom::Result<Tensor<T>> {
                let len = v.len();
                scope.view_mut(v.as_view_mut(), &[len])
            }
            match &mut storage.slice {
                CudaStorageSlice::U32(v) => parts(name, dtype, whole(scope, v), layouts),
                CudaStorageSlice::F32(v) => parts(name, dtype, whole(scope, v), layouts),
                CudaStorageSlice::F16(v) => parts(name, dtype, whole(scope, v), layouts),
                CudaStorageSlice::BF16(v) => parts(name, dtype, whole(scope, v), layouts),
                _ => bail!("{name}: {dtype:?} is not supported"),
            }
        }
        let mut lent = vec![];
        for (storage, shape) in &mut outputs {
            lent.extend(lend_output(O::NAME, scope, storage, &[&Layout::contiguous(shape.clone())])?);
        }
        for (storage, layouts) in into {
            lent.extend(lend_output(O::NAME, scope, storage, &layouts)?);
        }
        dispatch(op, dtype, &stream, &mut lent, &inputs)
    })?;
    Ok(outputs)
}

/// Which storage a tensor is of.
fn storage_of(tensor: &Candle) -> usize {
    std::ptr::from_ref(&*tensor.storage_and_layout().0).addr()
}

/// Tensors that are read. Each storage is locked once, however many tensors are parts of it, and in the order of addresses, as those that are written to:
/// otherwise two threads could wait for each other.
struct Reads<'a> {
    tensors: Vec<(usize, &'a Candle)>,
    held: BTreeMap<usize, StorageRef<'a>>,
}

impl<'a> Reads<'a> {
    /// Locks nothing yet.
    fn new(tensors: impl Iterator<Item = &'a Candle>) -> Self {
        Self { tensors: tensors.map(|t| (storage_of(t), t)).collect(), held: BTreeMap::new() }
    }

    /// All are locked.
    fn locked(tensors: impl Iterator<Item = &'a Candle>) -> Self {
        let mut reads = Self::new(tensors);
        reads.lock(usize::MAX);
        reads
    }

    /// Locks storages below an address.
    fn lock(&mut self, below: usize) {
        let wanted: BTreeMap<_, _> = self.tensors.iter().copied().filter(|(at, _)| *at < below).collect();
        for (at, tensor) in wanted {
            self.held.entry(at).or_insert_with(|| tensor.storage_and_layout().0);
        }
    }

    /// Once all are locked.
    fn storages(&self) -> impl Iterator<Item = (&Storage, &Layout)> {
        self.tensors.iter().filter_map(|(at, tensor)| Some((&**self.held.get(at)?, tensor.layout())))
    }
}

/// Runs an operation on tensors, the operation's extra ones last.
pub(crate) fn apply<O: Operation>(op: &O, inputs: &[&Candle]) -> Result<Vec<Candle>> {
    let reads = Reads::locked(inputs.iter().copied().chain(op.extra()));
    let finished = |storage, shape| Candle::from_storage(storage, shape, BackpropOp::none(), false);
    match reads.storages().next() {
        Some((Storage::Cpu(_), _)) => {
            let inputs = cpu_storages::<O>(reads.storages())?;
            let outputs = on_cpu(op, vec![], &inputs)?;
            Ok(outputs.into_iter().map(|(s, shape)| finished(Storage::Cpu(s), shape)).collect())
        }
        #[cfg(feature = "cuda")]
        Some((Storage::Cuda(_), _)) => {
            let inputs = cuda_storages::<O>(reads.storages())?;
            let outputs = on_cuda(op, vec![], &inputs)?;
            Ok(outputs.into_iter().map(|(s, shape)| finished(Storage::Cuda(s), shape)).collect())
        }
        _ => bail!("{}: {}", O::NAME, UNSUPPORTED),
    }
}

/// A storage that is written to.
enum Written<'a> {
    Cpu(&'a mut CpuStorage),
    #[cfg(feature = "cuda")]
    Cuda(&'a mut candle_core::CudaStorage),
}

/// Calls a function with the storage of a tensor, which is locked meanwhile.
struct Write<F>(&'static str, Cell<Option<F>>);

impl<F: FnOnce(Written<'_>) -> Result<()>> Write<F> {
    fn to(tensor: &Candle, name: &'static str, f: F) -> Result<()> {
        tensor.inplace_op1(&Self(name, Cell::new(Some(f))))
    }

    fn call(&self, storage: Written<'_>) -> Result<()> {
        self.1.take().map_or(Ok(()), |f| f(storage))
    }
}

impl<F: FnOnce(Written<'_>) -> Result<()>> candle_core::InplaceOp1 for Write<F> {
    fn name(&self) -> &'static str {
        self.0
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, _: &Layout) -> Result<()> {
        self.call(Written::Cpu(storage))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, storage: &mut candle_core::CudaStorage, _: &Layout) -> Result<()> {
        self.call(Written::Cuda(storage))
    }
}

/// Runs an operation that writes into two tensors, which may be parts of one, and that are no inputs.
pub(crate) fn apply_to<O: Operation>(op: &O, into: [&Candle; 2], inputs: &[&Candle]) -> Result<()> {
    let [a, b] = into.map(storage_of);
    let mut reads = Reads::new(inputs.iter().copied().chain(op.extra()));
    if reads.tensors.iter().any(|(at, _)| [a, b].contains(at)) {
        bail!("{}: a tensor that is written to must not share its storage with one that is read", O::NAME);
    }
    let run = |into: Vec<(Written<'_>, Vec<&Layout>)>, reads: &mut Reads<'_>| {
        reads.lock(usize::MAX);
        let mut cpu = vec![];
        #[cfg(feature = "cuda")]
        let mut cuda = vec![];
        let n = into.len();
        for (storage, layouts) in into {
            match storage {
                Written::Cpu(storage) => cpu.push((storage, layouts)),
                #[cfg(feature = "cuda")]
                Written::Cuda(storage) => cuda.push((storage, layouts)),
            }
        }
        #[cfg(feature = "cuda")]
        if cuda.len() == n {
            return on_cuda(op, cuda, &cuda_storages::<O>(reads.storages())?).map(drop);
        }
        if cpu.len() < n {
            bail!("{}: {}", O::NAME, UNSUPPORTED);
        }
        on_cpu(op, cpu, &cpu_storages::<O>(reads.storages())?).map(drop)
    };
    let [first, second] = into;
    let layouts = into.map(Candle::layout);
    let swapped = a > b;
    let (outer, inner) = if swapped { (second, first) } else { (first, second) };
    reads.lock(a.min(b));
    Write::to(outer, O::NAME, |outer| {
        reads.lock(a.max(b));
        if a == b {
            return run(vec![(outer, layouts.to_vec())], &mut reads);
        }
        Write::to(inner, O::NAME, |inner| {
            let (first, second) = if swapped { (inner, outer) } else { (outer, inner) };
            run(vec![(first, vec![layouts[0]]), (second, vec![layouts[1]])], &mut reads)
        })
    })
}

/// The single output of [`apply`].
pub(crate) fn apply_one<O: Operation>(op: &O, inputs: &[&Candle]) -> Result<Candle> {
    apply(op, inputs)?.pop().ok_or_else(|| Error::Msg(format!("{}: no output", O::NAME)))
}

const UNSUPPORTED: &str = if cfg!(feature = "cuda") {
    "all tensors must be on one device, a CPU or CUDA device"
} else {
    "all tensors must be on the CPU; the feature `cuda` of warploom-candle is for GPUs"
};

fn cpu_storages<'a, O: Operation>(
    all: impl Iterator<Item = (&'a Storage, &'a Layout)>,
) -> Result<Vec<(&'a CpuStorage, &'a Layout)>> {
    all.map(|(storage, layout)| match storage {
        Storage::Cpu(storage) => Ok((storage, layout)),
        _ => bail!("{}: {}", O::NAME, UNSUPPORTED),
    })
    .collect()
}

#[cfg(feature = "cuda")]
fn cuda_storages<'a, O: Operation>(
    all: impl Iterator<Item = (&'a Storage, &'a Layout)>,
) -> Result<Vec<(&'a candle_core::CudaStorage, &'a Layout)>> {
    all.map(|(storage, layout)| match storage {
        Storage::Cuda(storage) => Ok((storage, layout)),
        _ => bail!("{}: {}", O::NAME, UNSUPPORTED),
    })
    .collect()
}

/// [`on_cpu`] for a `CustomOp`: one output, and the extra inputs besides.
pub(crate) fn custom_cpu<O: Operation>(op: &O, inputs: &[(&CpuStorage, &Layout)]) -> Result<(CpuStorage, Shape)> {
    let held = Reads::locked(op.extra().into_iter());
    let extra = cpu_storages::<O>(held.storages())?;
    let inputs: Vec<_> = inputs.iter().copied().chain(extra).collect();
    on_cpu(op, vec![], &inputs)?.pop().ok_or_else(|| Error::Msg(format!("{}: no output", O::NAME)))
}

/// [`on_cuda`] for a `CustomOp`.
#[cfg(feature = "cuda")]
pub(crate) fn custom_cuda<O: Operation>(
    op: &O,
    inputs: &[(&candle_core::CudaStorage, &Layout)],
) -> Result<(candle_core::CudaStorage, Shape)> {
    let held = Reads::locked(op.extra().into_iter());
    let extra = cuda_storages::<O>(held.storages())?;
    let inputs: Vec<_> = inputs.iter().copied().chain(extra).collect();
    on_cuda(op, vec![], &inputs)?.pop().ok_or_else(|| Error::Msg(format!("{}: no output", O::NAME)))
}

/// Implements one of candle's `CustomOp` traits by an [`Operation`] of one output.
macro_rules! custom_op {
    ($op:ty: $custom:ident($($s:ident $l:ident),*)) => {
        impl candle_core::$custom for $op {
            fn name(&self) -> &'static str {
                <Self as $crate::lend::Operation>::NAME
            }

            fn cpu_fwd(
                &self,
                $($s: &candle_core::CpuStorage, $l: &candle_core::Layout),*
            ) -> candle_core::Result<(candle_core::CpuStorage, candle_core::Shape)> {
                $crate::lend::custom_cpu(self, &[$(($s, $l)),*])
            }

            #[cfg(feature = "cuda")]
            fn cuda_fwd(
                &self,
                $($s: &candle_core::CudaStorage, $l: &candle_core::Layout),*
            ) -> candle_core::Result<(candle_core::CudaStorage, candle_core::Shape)> {
                $crate::lend::custom_cuda(self, &[$(($s, $l)),*])
            }
        }
    };
}
pub(crate) use custom_op;

/// A workspace that is kept from call to call: for one stream, as large as was needed so far.
pub(crate) struct Kept<W>(Mutex<Option<(Device, usize, W)>>);

impl<W> Default for Kept<W> {
    fn default() -> Self {
        Self(Mutex::new(None))
    }
}

impl<W> Kept<W> {
    /// Runs `f` with a workspace for `stream` that `fits`, made if there is none.
    pub(crate) fn with<R>(
        &self,
        stream: &Stream,
        fits: impl FnOnce(&W) -> bool,
        make: impl FnOnce() -> warploom::Result<W>,
        f: impl FnOnce(&mut W) -> warploom::Result<R>,
    ) -> Result<R> {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let raw = stream.as_raw() as usize;
        if !kept.as_ref().is_some_and(|(device, at, w)| device == stream.device() && *at == raw && fits(w)) {
            *kept = None;
            *kept = Some((stream.device().clone(), raw, make().map_err(Error::wrap)?));
        }
        let (.., workspace) = kept.as_mut().expect("just made");
        f(workspace).map_err(Error::wrap)
    }
}

impl<W> std::fmt::Debug for Kept<W> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Kept")
    }
}
