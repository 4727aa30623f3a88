//! Typed tensors in device memory.

use crate::device::{Device, Foreign, Storage};
use crate::error::{Error, Result};
use cuda_std::Element;
use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

/// The address of what has no elements: aligned to whatever an operation asks for.
pub(crate) const EMPTY: usize = 1024;

/// The most dimensions of a tensor.
pub(crate) const MAX_DIMS: usize = 6;

/// Extents or strides.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Dims {
    len: usize,
    values: [usize; MAX_DIMS],
}

impl Dims {
    fn new(values: &[usize]) -> Result<Self> {
        if values.len() > MAX_DIMS {
            return Err(Error::Tensor(format!("{} dimensions, {MAX_DIMS} at most; fold some into one", values.len())));
        }
        let mut this = Self { len: values.len(), values: [0; MAX_DIMS] };
        this.values[..values.len()].copy_from_slice(values);
        Ok(this)
    }

    fn get(&self) -> &[usize] {
        &self.values[..self.len]
    }

    /// Extents and strides of a dense tensor of such elements, and how many it has.
    fn dense<T>(shape: &[usize]) -> Result<(Self, Self, usize)> {
        let dims = Self::new(shape)?;
        let count = count::<T>(shape).ok_or_else(|| too_large(shape))?;
        let mut strides = dims;
        let mut stride = 1;
        for i in (0..dims.len).rev() {
            strides.values[i] = stride;
            stride *= dims.values[i].max(1);
        }
        Ok((dims, strides, if shape.contains(&0) { 0 } else { count }))
    }

    /// Extents and strides as given, and the elements from the first to one past the last.
    fn strided<T>(shape: &[usize], strides: &[usize]) -> Result<(Self, Self, usize)> {
        if shape.len() != strides.len() {
            return Err(Error::Tensor(format!(
                "shape {shape:?} with strides {strides:?}: give one stride a dimension"
            )));
        }
        let (dims, distances) = (Self::new(shape)?, Self::new(strides)?);
        let span = span::<T>(shape, strides).ok_or_else(|| {
            Error::Tensor(format!("shape {shape:?} with strides {strides:?} is larger than any memory"))
        })?;
        Ok((dims, distances, span))
    }
}

/// The error where data do not fit a shape.
pub(crate) fn wrong_number(len: usize, shape: &[usize]) -> Error {
    Error::Tensor(format!("{len} elements for shape {shape:?}; give as many as its extents multiply to"))
}

fn too_large(shape: &[usize]) -> Error {
    Error::Tensor(format!("shape {shape:?} is larger than any memory"))
}

/// Elements from the first to one past the last of a tensor of such elements; `None` if there can be none.
///
/// No product of some of the extents, an extent of 0 counting as 1, may be more bytes than an address space holds, and no
/// distance either. So nothing that is computed of a tensor's extents and strides overflows, whether it is empty or not,
/// dense or a view whose strides are 0, and neither it nor a view of it can be larger than it says.
fn span<T>(shape: &[usize], strides: &[usize]) -> Option<usize> {
    count::<T>(shape)?;
    let last = |n: usize, (&d, &s): (&usize, &usize)| (d.max(1) - 1).checked_mul(s).and_then(|e| n.checked_add(e));
    let span = shape.iter().zip(strides).try_fold(1, last).filter(|&n| n <= most::<T>())?;
    strides.iter().all(|&s| s <= most::<T>()).then_some(())?;
    Some(if shape.contains(&0) { 0 } else { span })
}

/// The product of extents, an extent of 0 counting as 1; `None` for more elements than an address space holds.
fn count<T>(shape: &[usize]) -> Option<usize> {
    shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d.max(1))).filter(|&n| n <= most::<T>())
}

/// The most elements of an address space.
const fn most<T>() -> usize {
    isize::MAX as usize / size_of::<T>()
}

/// Room for so many elements on the host.
pub(crate) fn host_memory<T>(len: usize) -> Result<Vec<T>> {
    let mut memory = Vec::new();
    memory
        .try_reserve_exact(len)
        .map_err(|_| Error::OutOfMemory { device: "the host".into(), bytes: len.saturating_mul(size_of::<T>()) })?;
    Ok(memory)
}

/// So many elements of zero bytes on the host.
pub(crate) fn host_zeros<T: Element>(len: usize) -> Result<Vec<T>> {
    let mut memory = host_memory(len)?;
    // SAFETY: zero bytes are a value of every element type.
    memory.resize(len, unsafe { std::mem::zeroed() });
    Ok(memory)
}

/// A typed, strided view of device memory.
///
/// Clones and views share memory, which lives as long as any of them (and as any captured graph that uses it).
/// Strides count elements; the last dimension's is 1 unless a view made it otherwise.
#[derive(Clone)]
pub struct Tensor<T> {
    storage: Arc<Storage>,
    /// In elements.
    offset: usize,
    shape: Dims,
    strides: Dims,
    element: PhantomData<T>,
}

impl<T: Element> Tensor<T> {
    /// Device memory for `shape`, with whatever is in it: any bytes are elements. On the SIMT device `0xff` bytes, a NaN
    /// in every floating-point format.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::Tensor`] for a shape of too many dimensions or bytes.
    pub fn uninit(device: &Device, shape: &[usize]) -> Result<Self> {
        let (shape, strides, span) = Dims::dense::<T>(shape)?;
        let storage = Storage::new(device, span * size_of::<T>())?;
        Ok(Self { storage, offset: 0, shape, strides, element: PhantomData })
    }

    /// A tensor of zero bytes, which are zeros in every element type.
    ///
    /// # Errors
    /// As for [`uninit`](Self::uninit).
    pub fn zeros(device: &Device, shape: &[usize]) -> Result<Self> {
        let this = Self::uninit(device, shape)?;
        this.storage.clear()?;
        Ok(this)
    }

    /// A copy of `data`.
    ///
    /// # Errors
    /// [`Error::Tensor`] if `data` has not as many elements as `shape`, and as for [`uninit`](Self::uninit).
    pub fn from_slice(device: &Device, data: &[T], shape: &[usize]) -> Result<Self> {
        let mut this = Self::uninit(device, shape)?;
        this.copy_from_slice(data)?;
        Ok(this)
    }

    /// A tensor over memory that this crate did not allocate, which `owner` keeps alive: it is dropped with the last of the
    /// tensor's clones and views, when all work of the device is done. Nothing is copied. Without `strides`, which count
    /// elements, the tensor is dense.
    ///
    /// Memory that is only borrowed is lent by a [`borrow::scope`](crate::borrow::scope) instead.
    ///
    /// # Errors
    /// [`Error::Alignment`]; [`Error::Tensor`] for a null pointer, too many dimensions, or strides that do not fit the shape.
    /// Then `owner` is dropped at once.
    ///
    /// # Safety
    /// The elements are memory of `device`, for the SIMT device initialised host memory, until `owner` is dropped. Who else
    /// uses them meanwhile orders that with the work of this crate's streams.
    pub unsafe fn from_raw(
        device: &Device,
        data: *mut T,
        shape: &[usize],
        strides: Option<&[usize]>,
        owner: impl Send + Sync + 'static,
    ) -> Result<Self> {
        Self::over(("Tensor::from_raw", "data"), data, shape, strides, |address, bytes| {
            let owner: Box<dyn Send + Sync> = Box::new(owner);
            let foreign = Foreign { address, bytes, read_only: false, owner: Some(owner), lease: None };
            // SAFETY: promised by the caller.
            unsafe { Storage::foreign(device, foreign) }
        })
    }

    /// A tensor in the storage that `storage` makes of an address and a number of bytes. `(op, arg)`: whose argument the address is.
    pub(crate) fn over(
        (op, arg): (&'static str, &'static str),
        data: *mut T,
        shape: &[usize],
        strides: Option<&[usize]>,
        storage: impl FnOnce(*mut u8, usize) -> Arc<Storage>,
    ) -> Result<Self> {
        let (dims, strides, span) = match strides {
            None => Dims::dense::<T>(shape)?,
            Some(strides) => Dims::strided::<T>(shape, strides)?,
        };
        let bytes = span * size_of::<T>();
        // What has no elements needs no address of its own.
        let data = if bytes == 0 { std::ptr::without_provenance_mut(EMPTY) } else { data };
        if data.is_null() {
            return Err(Error::Tensor(format!(
                "a null pointer for shape {shape:?}; only what has no elements needs no memory"
            )));
        }
        if !data.is_aligned() {
            let (expected, address) = (align_of::<T>(), data as usize);
            return Err(Error::Alignment { op, arg, expected, address });
        }
        Ok(Self { storage: storage(data.cast(), bytes), offset: 0, shape: dims, strides, element: PhantomData })
    }

    /// The same elements, sharing memory, of which no operation takes a clone or a view as an output.
    pub(crate) fn read_only(&self) -> Result<Self> {
        let whose = ("Tensor::read_only", "self");
        Self::over(whose, self.as_ptr().cast_mut(), self.shape(), Some(self.strides()), |address, bytes| {
            let (owner, lease) = (Box::new(self.storage.clone()), self.storage.lease().cloned());
            let foreign = Foreign { address, bytes, read_only: true, owner: Some(owner), lease };
            // SAFETY: in the memory of the storage that owns it, for as long as that may be used.
            unsafe { Storage::foreign(self.device(), foreign) }
        })
    }

    /// The same bytes as elements of another type of the same size, sharing memory: `u8` as an 8-bit float, say.
    ///
    /// # Errors
    /// [`Error::Tensor`] if the sizes differ.
    pub fn cast<U: Element>(&self) -> Result<Tensor<U>> {
        if size_of::<U>() != size_of::<T>() {
            return Err(Error::Tensor(format!("{} elements as {}; give a type of the same size", T::DTYPE, U::DTYPE)));
        }
        let Self { storage, offset, shape, strides, .. } = self.shallow();
        Ok(Tensor { storage, offset, shape, strides, element: PhantomData })
    }

    /// Overwrites a contiguous tensor from the host; returns when done. Work submitted before that still uses the
    /// tensor must have been waited for.
    ///
    /// # Errors
    /// [`Error::Tensor`] if the numbers of elements differ or the tensor is not contiguous; [`Error::ReadOnly`], and [`Error::Expired`] for memory whose
    /// [scope](crate::borrow::scope) is over.
    pub fn copy_from_slice(&mut self, data: &[T]) -> Result<()> {
        if data.len() != self.len() {
            return Err(wrong_number(data.len(), self.shape()));
        }
        if !self.is_contiguous() {
            return Err(Error::Tensor(format!(
                "copy into strides {:?}; copy into a contiguous tensor",
                self.strides()
            )));
        }
        // SAFETY: elements are plain bits without padding.
        let bytes = unsafe { std::slice::from_raw_parts(data.as_ptr().cast::<u8>(), size_of_val(data)) };
        self.storage.write(self.offset * size_of::<T>(), bytes)
    }

    /// The elements in row-major order, after all work on the device is done.
    ///
    /// # Errors
    /// [`Error::Driver`] if that work failed; [`Error::OutOfMemory`] if the host has no room for so many, as of a view whose
    /// strides are 0; [`Error::Expired`] for memory whose [scope](crate::borrow::scope) is over.
    pub fn to_vec(&self) -> Result<Vec<T>> {
        let span = self.span();
        let mut flat = host_zeros::<T>(span)?;
        // SAFETY: elements are plain bits without padding, and every pattern is a value.
        let bytes = unsafe { std::slice::from_raw_parts_mut(flat.as_mut_ptr().cast::<u8>(), span * size_of::<T>()) };
        self.storage.read(self.offset * size_of::<T>(), bytes)?;
        if self.is_contiguous() {
            return Ok(flat);
        }
        let mut out = host_memory(self.len())?;
        let mut index = [0; MAX_DIMS];
        for _ in 0..self.len() {
            out.push(flat[(0..self.shape.len).map(|d| index[d] * self.strides.values[d]).sum::<usize>()]);
            for d in (0..self.shape.len).rev() {
                index[d] += 1;
                if index[d] < self.shape.values[d] {
                    break;
                }
                index[d] = 0;
            }
        }
        Ok(out)
    }
}

impl<T> Tensor<T> {
    /// Extent of each dimension.
    pub fn shape(&self) -> &[usize] {
        self.shape.get()
    }

    /// Extent of dimension `d`, 1 beyond the last.
    pub fn dim(&self, d: usize) -> usize {
        self.shape().get(d).copied().unwrap_or(1)
    }

    /// Distance between neighbours in each dimension, in elements.
    pub fn strides(&self) -> &[usize] {
        self.strides.get()
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.shape().iter().product()
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The device whose memory this is.
    pub fn device(&self) -> &Device {
        self.storage.device()
    }

    /// Address of the first element; if there is none, one that is aligned to whatever an operation asks for, and no memory.
    pub fn as_ptr(&self) -> *const T {
        if self.is_empty() {
            return std::ptr::without_provenance(EMPTY);
        }
        self.storage.address().cast::<T>().wrapping_add(self.offset)
    }

    /// As [`as_ptr`](Self::as_ptr), to write through.
    pub fn as_mut_ptr(&mut self) -> *mut T {
        self.as_ptr().cast_mut()
    }

    pub(crate) fn storage(&self) -> &Arc<Storage> {
        &self.storage
    }

    /// Elements from the first to one past the last.
    pub(crate) fn span(&self) -> usize {
        span::<T>(self.shape(), self.strides()).expect("checked when it was made")
    }

    /// Whether the elements lie one after another in row-major order.
    pub fn is_contiguous(&self) -> bool {
        let mut expected = 1;
        for (&n, &s) in self.shape().iter().zip(self.strides()).rev() {
            if n != 1 && s != expected {
                return self.is_empty();
            }
            expected *= n;
        }
        true
    }

    /// Elements `start .. start + len` of dimension `dim`, sharing memory.
    ///
    /// # Errors
    /// [`Error::Tensor`] if there is no such dimension or range.
    pub fn narrow(&self, dim: usize, start: usize, len: usize) -> Result<Self> {
        let extent = *self.shape().get(dim).ok_or_else(|| {
            Error::Tensor(format!("no dimension {dim} in shape {:?}; they count from 0", self.shape()))
        })?;
        if start.checked_add(len).is_none_or(|end| end > extent) {
            return Err(Error::Tensor(format!(
                "{len} elements from {start} on, of {extent} in dimension {dim}; end no later than it does"
            )));
        }
        let mut this = self.shallow();
        this.shape.values[dim] = len;
        // An empty view may start anywhere; keep its address inside.
        this.offset += if this.is_empty() { 0 } else { start * self.strides.values[dim] };
        Ok(this)
    }

    /// The same elements in the same order in another shape, sharing memory: heads of columns of a fused tensor, say, as in
    /// `qkv.narrow(1, 0, heads * size)?.reshape(&[tokens, heads, size])`.
    ///
    /// # Errors
    /// [`Error::Tensor`] if the number of elements differs, or no strides give that order: dimensions that lie apart cannot
    /// become one.
    pub fn reshape(&self, shape: &[usize]) -> Result<Self> {
        let (dims, dense, len) = Dims::dense::<T>(shape)?;
        let strides = if len == 0 { Some(dense) } else { self.strides_of(&dims) };
        let Some(strides) = strides.filter(|_| len == self.len()) else {
            let (own, strides) = (self.shape(), self.strides());
            return Err(Error::Tensor(format!(
                "{own:?} with strides {strides:?} as {shape:?}; keep the number of elements, and join no dimensions that lie apart"
            )));
        };
        let mut this = self.shallow();
        this.shape = dims;
        this.strides = strides;
        Ok(this)
    }

    /// Strides with which another shape has this tensor's elements in their order, if both have equally many, and at least
    /// one.
    fn strides_of(&self, shape: &Dims) -> Option<Dims> {
        let (mut strides, extents) = (*shape, shape.get());
        // As in a dense tensor: what an extent of 1 has.
        let behind = |strides: &Dims, d: usize| {
            if d + 1 < extents.len() { strides.values[d + 1] * extents[d + 1] } else { 1 }
        };
        // The dimensions of `shape` from here on have their strides.
        let mut open = extents.len();
        // From the last dimension on, those whose elements are evenly spaced are one run, which some dimensions share out.
        let (mut run, mut step) = (1, 1);
        let own: Vec<_> = self.shape().iter().zip(self.strides()).filter(|d| *d.0 != 1).collect();
        for (i, &(&extent, &stride)) in own.iter().enumerate().rev() {
            if run == 1 {
                step = stride;
            }
            run *= extent;
            if i > 0 && *own[i - 1].1 == run * step {
                continue;
            }
            let mut left = run;
            while left > 1 && open > 0 && left.is_multiple_of(extents[open - 1]) {
                open -= 1;
                strides.values[open] = if extents[open] == 1 { behind(&strides, open) } else { run / left * step };
                left /= extents[open];
            }
            if left > 1 {
                return None;
            }
            run = 1;
        }
        while open > 0 {
            open -= 1;
            strides.values[open] = behind(&strides, open);
        }
        Some(strides)
    }

    /// A view with any shape and strides, in elements from this tensor's first on, sharing memory.
    ///
    /// # Errors
    /// [`Error::Tensor`] if it would leave the tensor's memory.
    pub fn as_strided(&self, shape: &[usize], strides: &[usize], offset: usize) -> Result<Self> {
        let (dims, distances, span) = Dims::strided::<T>(shape, strides)?;
        let empty = span == 0;
        if !empty && span.checked_add(offset).is_none_or(|end| end > self.span()) {
            return Err(Error::Tensor(format!(
                "view {shape:?}, strides {strides:?}, offset {offset} of {} elements; stay within them",
                self.span()
            )));
        }
        let mut this = self.shallow();
        this.shape = dims;
        this.strides = distances;
        // An empty view may start anywhere; keep its address inside.
        this.offset += if empty { 0 } else { offset };
        Ok(this)
    }

    /// The same bytes from the first on as elements of another type, contiguous, no more than there are.
    pub(crate) fn reinterpret<U: Element>(&self, shape: &[usize]) -> Tensor<U> {
        let (shape, strides, len) = Dims::dense::<U>(shape).expect("no larger than the tensor");
        let (bytes, start) = (len * size_of::<U>(), self.offset * size_of::<T>());
        assert!(self.is_contiguous() && bytes <= self.len() * size_of::<T>() && start.is_multiple_of(size_of::<U>()));
        let storage = self.storage.clone();
        Tensor { storage, offset: start / size_of::<U>(), shape, strides, element: PhantomData }
    }

    fn shallow(&self) -> Self {
        Self {
            storage: self.storage.clone(),
            offset: self.offset,
            shape: self.shape,
            strides: self.strides,
            element: PhantomData,
        }
    }
}

impl<T: Element> fmt::Debug for Tensor<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tensor<{}>{:?} on {}", T::DTYPE, self.shape(), self.device().name())
    }
}
