//! Rows of elements: how threads share them, what they reduce, how they store 8-bit results.
//!
//! A row of `n` elements is cut into pieces of `V` elements, 16 bytes of input each. Threads own whole pieces and keep
//! them in registers as they came, packed, so that a row is read once. Where every address and distance allows it
//! (`VEC`) a piece is `V` neighbours, moved by one 16-byte access. Otherwise (odd widths, odd strides, a base that is
//! off by one element) each element is moved by itself, and the pieces of `lanes` neighbouring threads interleave:
//! element `j` of the `l`-th is number `j * lanes + l` of their common columns. So accesses of neighbouring threads
//! stay next to each other, and the same threads still cover the same columns together, which is what group scales
//! need.
//!
//! Which of the two it is depends on the launch, not on the row, so it is a branch that all threads take alike, over
//! two instances of the body.

pub mod quantise;
pub mod team;

pub use quantise::Quantised;
pub use team::Team;

use cuda_std::vec::{B128, LoadHint, Reused, SecondLevel, StoreStreaming, Streaming};
use cuda_std::{Float, Global, GlobalMut};

/// Elements of a group that shares one scale.
pub const GROUP: usize = 128;

/// Where `address` and `stride` (in elements) miss the alignment of a piece of `V` elements, as bits: the low four of
/// the result are zero if they do not. A piece of 8-bit elements is narrower than 16 bytes and needs that much less.
#[inline(always)]
pub fn misalignment<T, const V: usize>(address: *const T, stride: usize) -> usize {
    (address as usize | stride * size_of::<T>()) * (16 / (V * size_of::<T>()))
}

/// The columns of one piece.
#[derive(Clone, Copy)]
pub struct Piece<const V: usize, const VEC: bool> {
    first: usize,
    step: usize,
    n: usize,
}

impl<const V: usize, const VEC: bool> Piece<V, VEC> {
    /// Piece number `index` of a row of `n` elements; `lanes` pieces interleave, a power of two.
    #[inline(always)]
    pub fn new(index: usize, lanes: usize, n: usize) -> Self {
        if VEC {
            Self { first: index * V, step: 1, n }
        } else {
            let lane = index & (lanes - 1);
            Self { first: (index - lane) * V + lane, step: lanes, n }
        }
    }

    /// Column of element `j`.
    #[inline(always)]
    fn column(self, j: usize) -> usize {
        self.first + j * self.step
    }

    /// Whether the row has element `j`.
    #[inline(always)]
    pub fn has(self, j: usize) -> bool {
        if VEC { self.first < self.n } else { self.column(j) < self.n }
    }

    /// The elements; `outside` where the row has ended.
    #[inline(always)]
    #[track_caller]
    unsafe fn load_hinted<T: Float>(self, x: Global<T>, outside: T, hint: impl LoadHint) -> B128<T, V> {
        let mut piece = B128([outside; V]);
        if VEC {
            if self.first < self.n {
                piece = x.get_hinted(self.first, hint);
            }
        } else {
            cuda_std::unroll::<V>(|j| {
                if self.column(j) < self.n {
                    piece.0[j] = x.get(self.column(j));
                }
            });
        }
        piece
    }

    /// Elements that are read once and that nobody writes; zeros where the row has ended.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn load<T: Float>(self, x: Global<T>) -> B128<T, V> {
        self.load_hinted(x, T::from_f32(0.0), Streaming)
    }

    /// Elements that the kernel itself may overwrite, in place.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn load_mutable<T: Float>(self, x: Global<T>) -> B128<T, V> {
        self.load_hinted(x, T::from_f32(0.0), SecondLevel)
    }

    /// Elements that every row reads again.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn load_reused<T: Float>(self, x: Global<T>) -> B128<T, V> {
        self.load_hinted(x, T::from_f32(0.0), Reused)
    }

    /// As [`load_reused`](Self::load_reused); all `absent` if there is no such tensor.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn load_optional<T: Float>(self, x: Global<T>, absent: f32) -> B128<T, V> {
        if x.ptr(0usize).is_null() { B128([T::from_f32(absent); V]) } else { self.load_reused(x) }
    }

    /// `f32` values that every row reads again, for the columns of the piece; ones if there is no such tensor.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn load_factors(self, x: Global<f32>) -> [f32; V] {
        let mut values = [1.0; V];
        if x.ptr(0usize).is_null() {
            return values;
        }
        if VEC {
            if self.first < self.n {
                let mut j = 0;
                while j < V {
                    let B128(part): B128<f32, 4> = x.get_hinted(self.first + j, Reused);
                    [values[j], values[j + 1], values[j + 2], values[j + 3]] = part;
                    j += 4;
                }
            }
        } else {
            cuda_std::unroll::<V>(|j| {
                if self.column(j) < self.n {
                    values[j] = x.get(self.column(j));
                }
            });
        }
        values
    }

    /// Elements `2 c` and `2 c + 1` of a row of pairs, for each column `c` of the piece.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn load_pairs<T: Float>(self, x: Global<T>) -> (B128<T, V>, B128<T, V>) {
        let zero = T::from_f32(0.0);
        let (mut even, mut odd) = (B128([zero; V]), B128([zero; V]));
        if VEC {
            if self.first < self.n {
                let B128(lo): B128<T, V> = x.get_hinted(2 * self.first, Streaming);
                let B128(hi): B128<T, V> = x.get_hinted(2 * self.first + V, Streaming);
                let mut j = 0;
                while j < V / 2 {
                    (even.0[j], odd.0[j]) = (lo[2 * j], lo[2 * j + 1]);
                    (even.0[V / 2 + j], odd.0[V / 2 + j]) = (hi[2 * j], hi[2 * j + 1]);
                    j += 1;
                }
            }
        } else {
            cuda_std::unroll::<V>(|j| {
                let c = self.column(j);
                if c < self.n {
                    (even.0[j], odd.0[j]) = (x.get(2 * c), x.get(2 * c + 1));
                }
            });
        }
        (even, odd)
    }

    /// Stores the elements that the row has.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn store<T: Float>(self, y: GlobalMut<T>, piece: B128<T, V>) {
        if VEC {
            if self.first < self.n {
                y.set_hinted(self.first, piece, StoreStreaming);
            }
        } else {
            cuda_std::unroll::<V>(|j| {
                if self.column(j) < self.n {
                    y.set(self.column(j), piece.0[j]);
                }
            });
        }
    }
}
