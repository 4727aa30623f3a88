//! Checks that safe operations (layer L2) make before they launch anything: of this crate, and of kernels of yours.
//!
//! A [`Call`] is made first. Its checks of shapes and numbers need only the tensors; [`read`](Call::read) and [`write`](Call::write)
//! give the addresses for the kernel's arguments, after they have seen that a tensor lives on the stream's device, that its memory is there
//! still if it was [borrowed](crate::borrow), and that a graph which is being captured keeps it. When all tensors are named,
//! [`check_overlap`](Call::check_overlap) compares them. The call must live until the launch is made: meanwhile no capture of the
//! stream begins, and no [scope](crate::borrow::scope) of borrowed memory ends: it waits, for ever if the call outlives it.
//!
//! ```
//! use warploom::check::Call;
//! use warploom::{Device, Result, Stream, Tensor};
//!
//! /// The addresses for a kernel that adds up the rows of `x`, `[.., n]`, to `out`, `[rows]`.
//! fn sum(stream: &Stream, out: &mut Tensor<f32>, x: &Tensor<f32>) -> Result<()> {
//!     let mut call = Call::new("sum", stream);
//!     let rows = call.rows("x", x)?;
//!     call.same_shape("out", out.shape(), &[rows.rows])?;
//!     call.contiguous("out", out)?;
//!     let (_x, _out) = (call.read("x", x)?, call.write("out", out)?);
//!     call.check_overlap()
//! }
//!
//! let device = Device::simt();
//! let x = Tensor::<f32>::zeros(&device, &[3, 4])?;
//! let error = sum(&Stream::new(&device)?, &mut Tensor::zeros(&device, &[4])?, &x).unwrap_err();
//! assert_eq!(error.to_string(), "sum: `out` must have shape [3], but has [4]");
//! # Ok::<(), warploom::Error>(())
//! ```

use crate::borrow::Hold;
use crate::device::{Geometry, Stream, Using};
use crate::error::{Error, Result};
use crate::tensor::{MAX_DIMS, Tensor};
use cuda_std::{DType, Element};
use std::ffi::c_void;
use std::fmt::Display;

/// The most tensors of one operation.
const MAX_TENSORS: usize = 24;

/// The product of sizes, or the largest number if that is larger: no tensor is so long, no device has so much memory, so
/// whatever compares it or allocates refuses it.
pub(crate) const fn product(sizes: &[usize]) -> usize {
    let (mut product, mut i) = (1usize, 0);
    while i < sizes.len() {
        // Nothing is no less nothing beside sizes that are absurd.
        if sizes[i] == 0 {
            return 0;
        }
        product = product.saturating_mul(sizes[i]);
        i += 1;
    }
    product
}

/// The smaller of two sizes.
pub(crate) const fn least(a: usize, b: usize) -> usize {
    if a < b { a } else { b }
}

/// The larger of two sizes.
pub(crate) const fn most(a: usize, b: usize) -> usize {
    if a > b { a } else { b }
}

/// Where the next part of a workspace starts, aligned to 256 bytes, after one of `bytes` at `at`; or the largest number, as
/// [`product`].
pub(crate) const fn after(at: usize, bytes: usize) -> usize {
    match at.saturating_add(bytes).checked_next_multiple_of(256) {
        Some(next) => next,
        None => usize::MAX,
    }
}

/// One call of a safe operation: collects its tensors, checks their devices, and finds overlaps.
pub struct Call<'a> {
    op: &'static str,
    stream: &'a Stream,
    used: [Option<Use>; MAX_TENSORS],
    len: usize,
    /// Keep borrowed memory usable until the call is over.
    holds: Vec<Hold>,
    _using: Using<'a>,
}

#[derive(Clone, Copy)]
struct Use {
    arg: &'static str,
    start: usize,
    end: usize,
    /// Extents above 1 and their strides in bytes; the others are `(1, 0)`.
    dims: [(usize, usize); MAX_DIMS],
    /// Bytes of an element.
    size: usize,
    written: bool,
}

impl Use {
    fn new<T>(arg: &'static str, tensor: &Tensor<T>, written: bool) -> Self {
        let (start, span) = (tensor.as_ptr() as usize, tensor.span());
        let mut dims = [(1, 0); MAX_DIMS];
        for (to, (&n, &s)) in dims.iter_mut().zip(tensor.shape().iter().zip(tensor.strides())) {
            if n > 1 {
                *to = (n, s * size_of::<T>());
            }
        }
        Self { arg, start, end: start + span * size_of::<T>(), dims, size: size_of::<T>(), written }
    }

    /// Whether the two have memory in common. What is empty has none, wherever it lies.
    fn shares(&self, other: &Self) -> bool {
        self.start.max(other.start) < self.end.min(other.end) && !self.interleaves(other)
    }

    /// Bytes from first to last of what lies within a period of so many bytes, if all that is coarser is a multiple of it.
    fn within(&self, period: usize) -> Option<usize> {
        self.dims.iter().try_fold(self.size, |inner, &(n, stride)| match stride {
            _ if stride < period => Some(inner + (n - 1) * stride),
            _ => stride.is_multiple_of(period).then_some(inner),
        })
    }

    /// Whether the two lie in pieces at some distance that never meet, such as the queries and keys of one tensor, or of each of its heads.
    fn interleaves(&self, other: &Self) -> bool {
        let (a, b) = if self.start <= other.start { (self, other) } else { (other, self) };
        a.dims.iter().any(|&(_, period)| {
            if period == 0 {
                return false;
            }
            let (Some(of_a), Some(of_b)) = (a.within(period), b.within(period)) else { return false };
            let apart = (b.start - a.start) % period;
            apart >= of_a && apart + of_b <= period
        })
    }
}

/// The first two of these tensors that have memory in common.
pub(crate) fn in_one_place<'a, T: 'a>(tensors: impl Iterator<Item = &'a Tensor<T>>) -> Option<(usize, usize)> {
    let mut places: Vec<_> = tensors.enumerate().map(|(i, t)| (i, Use::new("", t, true))).collect();
    places.sort_unstable_by_key(|(_, place)| place.start);
    places.iter().enumerate().find_map(|(at, (i, place))| {
        let later = places[at + 1..].iter().take_while(|(_, other)| other.start < place.end);
        later.into_iter().find(|(_, other)| place.shares(other)).map(|&(j, _)| (*i.min(&j), *i.max(&j)))
    })
}

/// Whether two elements of a tensor may have one address, as in a view with a stride of 0.
pub(crate) fn shares_elements<T>(tensor: &Tensor<T>) -> bool {
    if tensor.is_empty() {
        return false;
    }
    // Each dimension, from the finest on, must step over all that the finer ones span. There are few, so no sorting.
    let (shape, strides) = (tensor.shape(), tensor.strides());
    let (mut span, mut done) = (1, 0u32);
    for _ in 0..shape.len() {
        let open = |d: &usize| shape[*d] > 1 && done >> *d & 1 == 0;
        let Some(d) = (0..shape.len()).filter(open).min_by_key(|&d| strides[d]) else {
            break;
        };
        if strides[d] < span {
            return true;
        }
        span += (shape[d] - 1) * strides[d];
        done |= 1 << d;
    }
    false
}

/// A tensor seen as rows: `[.., width]` with neighbours in a row next to each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Rows {
    /// Product of all dimensions but the last.
    pub rows: usize,
    /// Elements of a row.
    pub width: usize,
    /// Distance from row to row, in elements.
    pub stride: usize,
}

impl std::fmt::Debug for Call<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let tensors: Vec<_> = self.used.iter().flatten().map(|u| u.arg).collect();
        f.debug_struct("Call").field("op", &self.op).field("tensors", &tensors).finish_non_exhaustive()
    }
}

impl<'a> Call<'a> {
    /// A call of the operation `op`, whose name errors have, on a stream.
    pub fn new(op: &'static str, stream: &'a Stream) -> Self {
        Self { op, stream, used: [None; MAX_TENSORS], len: 0, holds: Vec::new(), _using: stream.using() }
    }

    fn add<T: Element>(&mut self, arg: &'static str, tensor: &Tensor<T>, written: bool) -> Result<*mut c_void> {
        if tensor.device() != self.stream.device() {
            return Err(Error::WrongDevice {
                op: self.op,
                arg,
                expected: self.stream.device().name(),
                got: tensor.device().name(),
            });
        }
        self.keep(arg, tensor, written)?;
        assert!(self.len < MAX_TENSORS, "{}: more tensors than Call counts on", self.op);
        let place = Use::new(arg, tensor, written);
        self.used[self.len] = Some(place);
        self.len += 1;
        Ok(place.start as *mut c_void)
    }

    /// Keeps a tensor's memory alive until the launch is done, which an operation that knows only addresses needs besides.
    pub(crate) fn keep<T>(&mut self, arg: &'static str, tensor: &Tensor<T>, written: bool) -> Result<()> {
        self.holds.extend(self.stream.hold(self.op, arg, tensor, written)?);
        self.stream.retain(tensor.storage());
        Ok(())
    }

    /// An input; its address.
    ///
    /// # Errors
    /// [`WrongDevice`](Error::WrongDevice); [`Expired`](Error::Expired) and [`WrongStream`](Error::WrongStream) for borrowed memory;
    /// [`Capture`](Error::Capture) if that is taken in a capture which may outlive it.
    ///
    /// # Panics
    /// With more than 24 tensors of one call.
    pub fn read<T: Element>(&mut self, arg: &'static str, tensor: &Tensor<T>) -> Result<*const c_void> {
        Ok(self.add(arg, tensor, false)?.cast_const())
    }

    /// An optional input; null if absent.
    ///
    /// # Errors
    /// As for [`read`](Self::read).
    pub fn read_opt<T: Element>(&mut self, arg: &'static str, tensor: Option<&Tensor<T>>) -> Result<*const c_void> {
        tensor.map_or(Ok(std::ptr::null()), |t| self.read(arg, t))
    }

    /// An output, or an argument changed in place; its address.
    ///
    /// # Errors
    /// As for [`read`](Self::read); [`ReadOnly`](Error::ReadOnly).
    pub fn write<T: Element>(&mut self, arg: &'static str, tensor: &mut Tensor<T>) -> Result<*mut c_void> {
        self.add(arg, tensor, true)
    }

    /// An optional output; null if absent.
    ///
    /// # Errors
    /// As for [`write`](Self::write).
    pub fn write_opt<T: Element>(&mut self, arg: &'static str, tensor: Option<&mut Tensor<T>>) -> Result<*mut c_void> {
        tensor.map_or(Ok(std::ptr::null_mut()), |t| self.write(arg, t))
    }

    /// No output shares memory with any other argument. (Views that take turns in one tensor do not, such as queries and keys of each token, or of each head, if
    /// they have the same stride there and all larger strides are multiples of it; other interleaved views count as sharing.)
    ///
    /// # Errors
    /// [`Overlap`](Error::Overlap), with the names of both.
    pub fn check_overlap(&self) -> Result<()> {
        self.check_overlap_but(&[])
    }

    /// As [`check_overlap`](Self::check_overlap), but these pairs may be the very same memory, of the same strides.
    ///
    /// # Errors
    /// [`Overlap`](Error::Overlap), with the names of both.
    pub fn check_overlap_but(&self, in_place: &[(&str, &str)]) -> Result<()> {
        let used = || self.used.iter().flatten();
        for (i, w) in used().enumerate().filter(|(_, u)| u.written) {
            for (j, o) in used().enumerate() {
                let both = o.written && j < i;
                let same = w.start == o.start && w.size == o.size && w.dims == o.dims;
                let named = |&(a, b): &(&str, &str)| (a == w.arg && b == o.arg) || (b == w.arg && a == o.arg);
                if i != j && !both && w.shares(o) && !(same && in_place.iter().any(named)) {
                    return Err(Error::Overlap { op: self.op, first: w.arg, second: o.arg });
                }
            }
        }
        Ok(())
    }

    /// No other argument so far lies in this tensor, which is written through an address that the operation has already.
    pub(crate) fn check_apart<T>(&self, arg: &'static str, tensor: &Tensor<T>) -> Result<()> {
        let place = Use::new(arg, tensor, true);
        match self.used.iter().flatten().find(|other| place.shares(other)) {
            Some(other) => Err(Error::Overlap { op: self.op, first: arg, second: other.arg }),
            None => Ok(()),
        }
    }

    /// A launch for this argument has no more blocks beside each other than a grid takes.
    pub(crate) fn grid(&self, arg: &'static str, geometry: &Geometry) -> Result<()> {
        let most = geometry.grid[1].max(geometry.grid[2]);
        self.value(most <= 65535, arg, "at most 65535 blocks in each dimension of a launch", most)
    }

    /// Neighbours in the last dimension lie next to each other.
    ///
    /// # Errors
    /// [`Stride`](Error::Stride).
    pub fn dense_last<T: Element>(&self, arg: &'static str, tensor: &Tensor<T>) -> Result<()> {
        match (tensor.shape(), tensor.strides()) {
            (&[.., n], &[.., stride]) if n > 1 && stride != 1 => {
                let expected = "dense in its last dimension".into();
                Err(Error::Stride { op: self.op, arg, expected, got: tensor.strides().to_vec() })
            }
            _ => Ok(()),
        }
    }

    /// No two elements of an output have one address: from the finest on, each dimension steps over all that the finer ones span. (Views
    /// whose dimensions mesh otherwise are taken for ones that have.)
    ///
    /// # Errors
    /// [`Stride`](Error::Stride).
    pub fn distinct<T: Element>(&self, arg: &'static str, tensor: &Tensor<T>) -> Result<()> {
        if !shares_elements(tensor) {
            return Ok(());
        }
        let expected = "without elements that share memory".into();
        Err(Error::Stride { op: self.op, arg, expected, got: tensor.strides().to_vec() })
    }

    /// The element type of an argument is one of these.
    ///
    /// # Errors
    /// [`DType`](Error::DType).
    pub fn dtype_among(&self, arg: &'static str, got: DType, expected: &[DType]) -> Result<()> {
        if expected.contains(&got) {
            return Ok(());
        }
        let mut names: Vec<_> = expected.iter().map(|d| d.name()).collect();
        // Types that depend on others may be one.
        names.dedup();
        Err(Error::DType { op: self.op, arg, expected: names.join(" or "), got })
    }

    /// The element type of an argument is f32, f16 or bf16.
    ///
    /// # Errors
    /// [`DType`](Error::DType).
    pub fn float(&self, arg: &'static str, got: DType) -> Result<()> {
        self.dtype_among(arg, got, &[DType::F32, DType::F16, DType::Bf16])
    }

    /// `got` is `expected`, dimension by dimension.
    ///
    /// # Errors
    /// [`Shape`](Error::Shape).
    pub fn same_shape(&self, arg: &'static str, got: &[usize], expected: &[usize]) -> Result<()> {
        if got == expected {
            return Ok(());
        }
        Err(self.bad_shape(arg, got, format!("{expected:?}")))
    }

    /// The error for a tensor of a wrong shape.
    pub fn bad_shape(&self, arg: &'static str, got: &[usize], expected: impl Display) -> Error {
        Error::Shape { op: self.op, arg, expected: expected.to_string(), got: got.to_vec() }
    }

    /// The elements lie one after another in row-major order.
    ///
    /// # Errors
    /// [`Stride`](Error::Stride).
    pub fn contiguous<T: Element>(&self, arg: &'static str, tensor: &Tensor<T>) -> Result<()> {
        if tensor.is_contiguous() {
            return Ok(());
        }
        Err(Error::Stride { op: self.op, arg, expected: "contiguous".into(), got: tensor.strides().to_vec() })
    }

    /// The tensor as rows: at least one dimension, the last one dense, and one distance from row to row.
    ///
    /// # Errors
    /// [`Shape`](Error::Shape) for a tensor without dimensions, [`Stride`](Error::Stride).
    pub fn rows<T: Element>(&self, arg: &'static str, tensor: &Tensor<T>) -> Result<Rows> {
        let (shape, strides) = (tensor.shape(), tensor.strides());
        let Some((&width, outer)) = shape.split_last() else {
            return Err(self.bad_shape(arg, shape, "[.., width]"));
        };
        let rows = outer.iter().product();
        let bad = |expected: &str| Error::Stride { op: self.op, arg, expected: expected.into(), got: strides.to_vec() };
        if width > 1 && strides[shape.len() - 1] != 1 {
            return Err(bad("dense in its last dimension"));
        }
        if rows == 0 {
            // No distance between any two.
            return Ok(Rows { rows, width, stride: width });
        }
        // Dimensions of extent 1 have no say in the distance between rows.
        let mut stride = None;
        let mut expected = 0;
        for (&n, &s) in outer.iter().zip(strides).rev().filter(|(n, _)| **n != 1) {
            match stride {
                None => {
                    stride = Some(s);
                    expected = s * n;
                }
                Some(_) if s == expected => expected *= n,
                Some(_) => return Err(bad("rows at one distance from each other")),
            }
        }
        let stride = stride.unwrap_or(width);
        if rows > 1 && stride < width {
            return Err(bad("rows that do not overlap"));
        }
        Ok(Rows { rows, width, stride })
    }

    /// `ok`, or the error that names the argument.
    ///
    /// # Errors
    /// [`Value`](Error::Value).
    pub fn value(&self, ok: bool, arg: &'static str, expected: impl Display, got: impl Display) -> Result<()> {
        if ok {
            return Ok(());
        }
        Err(Error::Value { op: self.op, arg, expected: expected.to_string(), got: got.to_string() })
    }

    /// A count that the kernel takes as `u32`.
    ///
    /// # Errors
    /// [`Value`](Error::Value) beyond 2³¹ - 1.
    pub fn count(&self, arg: &'static str, n: usize) -> Result<u32> {
        u32::try_from(n).ok().filter(|&n| n <= i32::MAX as u32).ok_or_else(|| Error::Value {
            op: self.op,
            arg,
            expected: "at most 2^31 - 1".into(),
            got: n.to_string(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_empty_shares_nothing() {
        let device = crate::Device::simt();
        let stream = Stream::new(&device).unwrap();
        let x = Tensor::<f32>::zeros(&device, &[8]).unwrap();
        let mut none = x.narrow(0, 4, 2).unwrap().narrow(0, 0, 0).unwrap();
        let mut call = Call::new("operation", &stream);
        call.read("x", &x).unwrap();
        call.write("out", &mut none).unwrap();
        call.check_overlap().unwrap();
        call.write("more", &mut x.narrow(0, 4, 2).unwrap()).unwrap();
        assert!(matches!(call.check_overlap(), Err(Error::Overlap { first: "more", second: "x", .. })));
    }

    #[test]
    fn in_place_is_the_same_layout() {
        let device = crate::Device::simt();
        let stream = Stream::new(&device).unwrap();
        let all = Tensor::<f32>::zeros(&device, &[16]).unwrap();
        let x = all.as_strided(&[4, 4], &[4, 1], 0).unwrap();
        for (strides, same) in [([4, 1], true), ([1, 4], false)] {
            let mut call = Call::new("operation", &stream);
            call.read("x", &x).unwrap();
            call.write("out", &mut all.as_strided(&[4, 4], &strides, 0).unwrap()).unwrap();
            assert!(call.check_overlap().is_err());
            assert_eq!(call.check_overlap_but(&[("x", "out")]).is_ok(), same);
        }
    }

    #[test]
    fn sizes_stay_at_the_largest_number() {
        assert_eq!((product(&[]), product(&[3, 4, 5]), product(&[1 << 32, 1 << 31])), (1, 60, 1 << 63));
        assert_eq!((product(&[1 << 32, 1 << 32]), product(&[usize::MAX, usize::MAX, 0])), (usize::MAX, 0));
        assert_eq!((after(0, 0), after(0, 1), after(256, 256), after(512, 300)), (0, 256, 512, 1024));
        assert_eq!((after(256, usize::MAX), after(usize::MAX, 0)), (usize::MAX, usize::MAX));
        assert_eq!(after(0, usize::MAX - 255), usize::MAX - 255);
    }
}
