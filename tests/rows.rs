//! Rows at any place and distance in a larger tensor, and comparisons of rounded results.

use cuda_std::{Element, Float};
use warploom::{Device, Tensor};
use warploom_tests::epsilon;

/// Where rows lie in a larger tensor.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    /// Elements before the first row.
    pub offset: usize,
    /// Elements between rows.
    pub gap: usize,
}

impl Place {
    pub const DENSE: Self = Self { offset: 0, gap: 0 };
    /// Dense, aligned with gaps, off by one, at an odd distance, and both.
    pub const ALL: [Self; 5] = [
        Self::DENSE,
        Self { offset: 16, gap: 48 },
        Self { offset: 1, gap: 0 },
        Self { offset: 0, gap: 1 },
        Self { offset: 3, gap: 5 },
    ];

    fn len(self, rows: usize, n: usize) -> usize {
        self.offset + rows * (n + self.gap)
    }
}

/// Rows of `n` elements inside of a tensor whose other elements are `0xff` bytes.
pub struct Rows<T> {
    all: Tensor<T>,
    place: Place,
    n: usize,
}

impl<T: Element> Rows<T> {
    pub fn new(device: &Device, data: &[T], rows: usize, n: usize, place: Place) -> Self {
        assert_eq!(data.len(), rows * n);
        let mut all = poison(place.len(rows, n));
        for r in 0..rows {
            all[place.offset + r * (n + place.gap)..][..n].copy_from_slice(&data[r * n..][..n]);
        }
        Self { all: Tensor::from_slice(device, &all, &[all.len()]).unwrap(), place, n }
    }

    pub fn poisoned(device: &Device, rows: usize, n: usize, place: Place) -> Self {
        Self::new(device, &poison(rows * n), rows, n, place)
    }

    /// The rows as `[rows, n]`.
    pub fn view(&self) -> Tensor<T> {
        let stride = self.n + self.place.gap;
        let rows = (self.all.len() - self.place.offset) / stride.max(1);
        self.all.as_strided(&[rows, self.n], &[stride, 1], self.place.offset).unwrap()
    }

    /// The rows' elements, once nothing else in the tensor has changed.
    #[track_caller]
    pub fn take(self) -> Vec<T> {
        let all = self.all.to_vec().unwrap();
        let mut rows = vec![];
        for (i, v) in all.into_iter().enumerate() {
            let column = i.checked_sub(self.place.offset).map(|i| i % (self.n + self.place.gap));
            if column.is_some_and(|c| c < self.n) {
                rows.push(v);
            } else {
                assert!(bytes(&v).iter().all(|b| *b == 0xff), "element {i} outside of the rows was written");
            }
        }
        rows
    }
}

/// Widths of hidden states, and of heads, that peers get wrong.
pub const WIDTHS: [usize; 9] = [1, 7, 46, 80, 768, 769, 3584, 5125, 8192];

/// A vector from element `offset` of a larger tensor on, whose other elements are `0xff` bytes. From 1 on it begins where no piece of 16 bytes does.
pub fn vector<T: Element>(device: &Device, data: &[T], offset: usize) -> Tensor<T> {
    let mut all = poison(offset + data.len());
    all[offset..].copy_from_slice(data);
    Tensor::from_slice(device, &all, &[all.len()]).unwrap().narrow(0, offset, data.len()).unwrap()
}

/// Elements of `0xff` bytes.
fn poison<T: Element>(n: usize) -> Vec<T> {
    let mut data: Vec<T> = Vec::with_capacity(n);
    // SAFETY: the capacity is there, and every pattern is a value of an element type.
    unsafe {
        std::ptr::write_bytes(data.as_mut_ptr(), 0xff, n);
        data.set_len(n);
    }
    data
}

/// The bytes of an element.
pub fn bytes<T: Element>(v: &T) -> Vec<u8> {
    // SAFETY: elements are plain bits without padding.
    unsafe { std::slice::from_raw_parts(std::ptr::from_ref(v).cast::<u8>(), size_of::<T>()) }.to_vec()
}

/// The bytes of elements: what two runs must agree on.
pub fn all_bytes<T: Element>(v: &[T]) -> Vec<u8> {
    v.iter().flat_map(bytes).collect()
}

/// Asserts that each of `got` is `want` rounded to `T`, after arithmetic with a relative error of `relative` and an
/// absolute one of `absolute`. NaN matches NaN only, and infinities what rounds to them.
#[track_caller]
pub fn assert_rounded<T: Float>(got: &[T], want: &[f64], relative: f64, absolute: f64) {
    assert_eq!(got.len(), want.len(), "number of elements");
    let smallest = match T::DTYPE {
        warploom::DType::F16 => 2f64.powi(-25),
        warploom::DType::E4m3 => 2f64.powi(-10),
        warploom::DType::F32 => 2f64.powi(-150),
        _ => 0.0,
    };
    for (i, (g, &w)) in got.iter().zip(want).enumerate() {
        let g = g.to_f32() as f64;
        if w.is_nan() {
            assert!(g.is_nan(), "element {i}: {g}, expected NaN");
            continue;
        }
        let bound = (epsilon::<T>() + relative) * w.abs() + absolute + smallest;
        let rounded = T::from_f32(w as f32).to_f32() as f64;
        assert!(g == rounded || (g - w).abs() <= bound, "element {i}: {g}, expected {w} within {bound:e}");
    }
}
