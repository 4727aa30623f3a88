//! Checks that safe operations make before they launch anything.

use crate::device::Stream;
use crate::error::{Error, Result};
use crate::tensor::Tensor;
use cuda_std::Element;
use std::ffi::c_void;
use std::fmt::Display;

/// The most tensors of one operation.
const MAX_TENSORS: usize = 24;

/// One call of a safe operation: collects its tensors, checks their devices, and finds overlaps.
pub(crate) struct Call<'a> {
    op: &'static str,
    stream: &'a Stream,
    used: [Option<Use>; MAX_TENSORS],
    len: usize,
}

#[derive(Clone, Copy)]
struct Use {
    arg: &'static str,
    start: usize,
    end: usize,
    written: bool,
}

/// A tensor seen as rows: `[.., width]` with neighbours in a row next to each other.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rows {
    /// Product of all dimensions but the last.
    pub(crate) rows: usize,
    pub(crate) width: usize,
    /// Distance from row to row, in elements.
    pub(crate) stride: usize,
}

impl<'a> Call<'a> {
    pub(crate) fn new(op: &'static str, stream: &'a Stream) -> Self {
        Self { op, stream, used: [None; MAX_TENSORS], len: 0 }
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
        self.stream.retain(tensor.storage());
        let start = tensor.as_ptr() as usize;
        assert!(self.len < MAX_TENSORS, "{}: more tensors than Call counts on", self.op);
        self.used[self.len] = Some(Use { arg, start, end: start + tensor.span() * size_of::<T>(), written });
        self.len += 1;
        Ok(start as *mut c_void)
    }

    /// An input; its address.
    pub(crate) fn read<T: Element>(&mut self, arg: &'static str, tensor: &Tensor<T>) -> Result<*const c_void> {
        Ok(self.add(arg, tensor, false)?.cast_const())
    }

    /// An optional input; null if absent.
    pub(crate) fn read_opt<T: Element>(
        &mut self,
        arg: &'static str,
        tensor: Option<&Tensor<T>>,
    ) -> Result<*const c_void> {
        tensor.map_or(Ok(std::ptr::null()), |t| self.read(arg, t))
    }

    /// An output, or an argument changed in place; its address.
    pub(crate) fn write<T: Element>(&mut self, arg: &'static str, tensor: &mut Tensor<T>) -> Result<*mut c_void> {
        self.add(arg, tensor, true)
    }

    /// An optional output; null if absent.
    pub(crate) fn write_opt<T: Element>(
        &mut self,
        arg: &'static str,
        tensor: Option<&mut Tensor<T>>,
    ) -> Result<*mut c_void> {
        tensor.map_or(Ok(std::ptr::null_mut()), |t| self.write(arg, t))
    }

    /// No output shares memory with any other argument. (Interleaved views of one tensor count as sharing.)
    pub(crate) fn check_overlap(&self) -> Result<()> {
        self.check_overlap_but(&[])
    }

    /// As [`check_overlap`](Self::check_overlap), but these pairs may be the very same memory.
    pub(crate) fn check_overlap_but(&self, in_place: &[(&str, &str)]) -> Result<()> {
        let used = || self.used.iter().flatten();
        for (i, w) in used().enumerate().filter(|(_, u)| u.written) {
            for (j, o) in used().enumerate() {
                let both = o.written && j < i;
                let shares = w.start < o.end && o.start < w.end;
                let same = w.start == o.start && w.end == o.end;
                let named = |&(a, b): &(&str, &str)| (a == w.arg && b == o.arg) || (b == w.arg && a == o.arg);
                if i != j && !both && shares && !(same && in_place.iter().any(named)) {
                    return Err(Error::Overlap { op: self.op, first: w.arg, second: o.arg });
                }
            }
        }
        Ok(())
    }

    /// `got` is `expected`, dimension by dimension.
    pub(crate) fn same_shape(&self, arg: &'static str, got: &[usize], expected: &[usize]) -> Result<()> {
        if got == expected {
            return Ok(());
        }
        Err(self.bad_shape(arg, got, format!("{expected:?}")))
    }

    /// The error for a tensor of a wrong shape.
    pub(crate) fn bad_shape(&self, arg: &'static str, got: &[usize], expected: impl Display) -> Error {
        Error::Shape { op: self.op, arg, expected: expected.to_string(), got: got.to_vec() }
    }

    pub(crate) fn contiguous<T: Element>(&self, arg: &'static str, tensor: &Tensor<T>) -> Result<()> {
        if tensor.is_contiguous() {
            return Ok(());
        }
        Err(Error::Stride { op: self.op, arg, expected: "contiguous".into(), got: tensor.strides().to_vec() })
    }

    /// The tensor as rows: at least one dimension, the last one dense, and one distance from row to row.
    pub(crate) fn rows<T: Element>(&self, arg: &'static str, tensor: &Tensor<T>) -> Result<Rows> {
        let (shape, strides) = (tensor.shape(), tensor.strides());
        let Some((&width, outer)) = shape.split_last() else {
            return Err(self.bad_shape(arg, shape, "[.., width]"));
        };
        let rows = outer.iter().product();
        let bad = |expected: &str| Error::Stride { op: self.op, arg, expected: expected.into(), got: strides.to_vec() };
        if width > 1 && strides[shape.len() - 1] != 1 {
            return Err(bad("dense in its last dimension"));
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
    pub(crate) fn value(&self, ok: bool, arg: &'static str, expected: impl Display, got: impl Display) -> Result<()> {
        if ok {
            return Ok(());
        }
        Err(Error::Value { op: self.op, arg, expected: expected.to_string(), got: got.to_string() })
    }

    /// A count that the kernel takes as `u32`.
    pub(crate) fn count(&self, arg: &'static str, n: usize) -> Result<u32> {
        u32::try_from(n).ok().filter(|&n| n <= i32::MAX as u32).ok_or_else(|| Error::Value {
            op: self.op,
            arg,
            expected: "at most 2^31 - 1".into(),
            got: n.to_string(),
        })
    }
}
