//! Rows of elements: how threads share them, what they reduce, how they store 8-bit results.
//!
//! A row of `n` elements is cut into pieces of `V` elements. Threads own whole pieces and keep them in registers as
//! they came, packed, so that a row is read once. Two kinds of instances:
//!
//! * `VEC`: every address and distance is a multiple of 16 bytes, and `n` one of `V`. A piece is 16 bytes of
//!   neighbours, moved by one access; or 8 bytes, where only loads and 8-bit results are asked for.
//! * Otherwise (odd widths, odd strides, a base that is off by one element; entries with `any` in their names) each
//!   element is moved by itself, and the pieces of a group of [`GROUP`] columns interleave: element `j` of the `l`-th of
//!   its `GROUP / V` threads is column `j * GROUP / V + l`. So accesses of neighbouring threads stay next to each other,
//!   and the same threads cover the same group, which is what group scales need. It takes that the threads of a row
//!   are a multiple of `GROUP / V`.
//!
//! * For many rows that are not aligned, where a column has nothing to do with others: [`mod@line`].
//!
//! The host knows all addresses before it launches, so it chooses.

pub mod line;
pub mod quantise;
pub mod team;

pub use quantise::Quantised;
pub use team::Team;

use cuda_std::vec::{B64, B128, LoadHint, Reused, SecondLevel, StoreStreaming, Streaming};
use cuda_std::{DType, Float, Global, GlobalMut, dependent_launch, integer, thread};

/// Elements of a group that shares one scale.
pub const GROUP: usize = 128;

/// Zero, without a conversion.
#[inline(always)]
pub fn zero<T: Float>() -> T {
    unsafe { core::mem::zeroed() }
}

/// One, without a conversion.
#[inline(always)]
fn one<T: Float>() -> T {
    unsafe { core::mem::transmute_copy(&one_word(T::DTYPE)) }
}

/// A word full of ones of an element type.
#[inline(always)]
const fn one_word(dtype: DType) -> u32 {
    match dtype {
        DType::F16 => 0x3c00_3c00,
        DType::Bf16 => 0x3f80_3f80,
        _ => 0x3f80_0000,
    }
}

/// What a 16-byte load brings, or an 8-byte load and zeros, as elements. `T` and `V` make up so much wherever this is run.
#[inline(always)]
pub(crate) unsafe fn elements<T: Float, const V: usize>(words: B128<u32, 4>) -> [T; V] {
    core::mem::transmute_copy(&words)
}

/// The reverse of [`elements`].
#[inline(always)]
pub(crate) unsafe fn words<T: Float, const V: usize>(elements: [T; V]) -> B128<u32, 4> {
    let mut words = [0u32; 4];
    (&raw mut words).cast::<[T; V]>().write(elements);
    B128(words)
}

/// The same elements, kept packed until they are widened again: for registers that live over a barrier.
#[inline(always)]
pub fn packed<T: Float, const V: usize, const VEC: bool>(piece: [T; V]) -> [T; V] {
    if VEC { unsafe { elements(B128(words(piece).0.map(integer::opaque))) } } else { piece }
}

/// A piece of 16 bytes in registers. Elements would take one each where what brings them is behind a branch.
pub type Words = [u32; 4];

/// The elements of a piece, for what follows: afterwards it is words that are kept, as by [`packed`].
#[inline(always)]
pub fn unpacked<T: Float, const V: usize>(words: Words) -> [T; V] {
    unsafe { elements(B128(words.map(integer::opaque))) }
}

/// As [`unpacked`], for the second time, where a thread has so many pieces that twice their registers are too many: ptxas, which sees through
/// [`integer::opaque`], would keep what it widened the first time. It does not know that `zero` is 0.
#[inline(always)]
pub fn unpacked_again<T: Float, const V: usize>(words: Words, zero: u32) -> [T; V] {
    unpacked(if size_of::<T>() < 4 { words.map(|word| word ^ zero) } else { words })
}

/// The columns of one piece.
#[derive(Clone, Copy)]
pub struct Piece<const V: usize, const VEC: bool> {
    /// A row has fewer than 2^31 elements.
    first: u32,
    n: u32,
}

impl<const V: usize, const VEC: bool> Piece<V, VEC> {
    /// Distance between the elements of a piece.
    const STEP: usize = if VEC { 1 } else { GROUP / V };

    /// Piece number `index` of a row of `n` elements.
    #[inline(always)]
    pub fn new(index: u32, n: u32) -> Self {
        let lane = index % (GROUP / V) as u32;
        Self { first: if VEC { index * V as u32 } else { (index - lane) * V as u32 + lane }, n }
    }

    /// The first column.
    #[inline(always)]
    pub fn first(self) -> u32 {
        self.first
    }

    /// Whether the row has element `j`.
    #[inline(always)]
    pub fn has(self, j: usize) -> bool {
        let column = self.first + if VEC { 0 } else { (j * Self::STEP) as u32 };
        column < self.n
    }

    /// The elements; `outside` where the row has ended.
    #[inline(always)]
    #[track_caller]
    unsafe fn load_hinted<T: Float>(self, x: Global<T>, outside: T, hint: impl LoadHint) -> [T; V] {
        let mut piece = [outside; V];
        if VEC {
            if self.first < self.n {
                piece = if V * size_of::<T>() == 8 {
                    let B64([a, b]): B64<u32, 2> = x.get_hinted(self.first, hint);
                    elements(B128([a, b, 0, 0]))
                } else {
                    elements(x.get_hinted(self.first, hint))
                };
            }
        } else {
            let x = x.offset(self.first);
            cuda_std::unroll::<V>(|j| {
                if self.has(j) {
                    piece[j] = x.get(j * Self::STEP);
                }
            });
        }
        piece
    }

    /// Elements that are read once and that nobody writes; zeros where the row has ended.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn load<T: Float>(self, x: Global<T>) -> [T; V] {
        self.load_hinted(x, zero(), Streaming)
    }

    /// Elements that the kernel itself may overwrite, in place.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn load_mutable<T: Float>(self, x: Global<T>) -> [T; V] {
        self.load_hinted(x, zero(), SecondLevel)
    }

    /// As [`load_mutable`](Self::load_mutable) of a piece of 16 bytes.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn load_mutable_words<T: Float>(self, x: Global<T>) -> Words {
        let mut words = B128([0; 4]);
        if self.first < self.n {
            words = x.get_hinted(self.first, SecondLevel);
        }
        words.0
    }

    /// Elements that every row reads again.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn load_reused<T: Float>(self, x: Global<T>) -> [T; V] {
        self.load_hinted(x, zero(), Reused)
    }

    /// As [`load_reused`](Self::load_reused); zeros, or ones, if there is no such tensor.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn load_optional<T: Float>(self, x: Global<T>, ones: bool) -> [T; V] {
        if !VEC {
            return if x.ptr(0usize).is_null() { [if ones { one() } else { zero() }; V] } else { self.load_reused(x) };
        }
        // Merged as words: merged as elements, each would take a register.
        let mut words = B128([if ones { one_word(T::DTYPE) } else { 0 }; 4]);
        if !x.ptr(0usize).is_null() && self.first < self.n {
            words = x.get_hinted(self.first, Reused);
        }
        elements(words)
    }

    /// As [`load_optional`](Self::load_optional) of a piece of 16 bytes.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn load_optional_words<T: Float>(self, x: Global<T>, ones: bool) -> Words {
        // Not what the other one calls: tuned kernels would get their registers in another order.
        let mut words = B128([if ones { one_word(T::DTYPE) } else { 0 }; 4]);
        if !x.ptr(0usize).is_null() && self.first < self.n {
            words = x.get_hinted(self.first, Reused);
        }
        words.0
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
                    let B128(part): B128<f32, 4> = x.offset(self.first).get_hinted(j, Reused);
                    [values[j], values[j + 1], values[j + 2], values[j + 3]] = part;
                    j += 4;
                }
            }
        } else {
            let x = x.offset(self.first);
            cuda_std::unroll::<V>(|j| {
                if self.has(j) {
                    values[j] = x.get(j * Self::STEP);
                }
            });
        }
        values
    }

    /// Elements `2 c` and `2 c + 1` of a row of pairs, for each column `c` of the piece.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn load_pairs<T: Float>(self, x: Global<T>) -> ([T; V], [T; V]) {
        let (mut even, mut odd) = ([zero(); V], [zero(); V]);
        if VEC {
            if self.first < self.n {
                let x = x.offset(self.first).offset(self.first);
                let lo: [T; V] = elements(x.get_hinted(0usize, Streaming));
                let hi: [T; V] = elements(x.get_hinted(V, Streaming));
                let mut j = 0;
                while j < V / 2 {
                    (even[j], odd[j]) = (lo[2 * j], lo[2 * j + 1]);
                    (even[V / 2 + j], odd[V / 2 + j]) = (hi[2 * j], hi[2 * j + 1]);
                    j += 1;
                }
            }
        } else {
            let x = x.offset(self.first).offset(self.first);
            cuda_std::unroll::<V>(|j| {
                if self.has(j) {
                    (even[j], odd[j]) = (x.get(2 * j * Self::STEP), x.get(2 * j * Self::STEP + 1));
                }
            });
        }
        (even, odd)
    }

    /// Stores the elements that the row has.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn store<T: Float>(self, y: GlobalMut<T>, piece: [T; V]) {
        self.store_or_keep::<T, false>(y, piece);
    }

    /// As [`store`](Self::store); `KEEP`: the second-level cache keeps it as it does what is read, which is better for what was read from there.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn store_or_keep<T: Float, const KEEP: bool>(self, y: GlobalMut<T>, piece: [T; V]) {
        if VEC {
            if self.first < self.n {
                if KEEP {
                    y.set_as(self.first, words(piece));
                } else {
                    y.set_hinted(self.first, words(piece), StoreStreaming);
                }
            }
        } else {
            let y = y.offset(self.first);
            cuda_std::unroll::<V>(|j| {
                if self.has(j) {
                    y.set(j * Self::STEP, piece[j]);
                }
            });
        }
    }
}

/// The calling thread's part of a launch with one piece a thread: blocks of `(pieces, rows)`, a grid of `(pieces, rows, rows)`.
pub struct Mine<const V: usize, const VEC: bool> {
    /// To be accessed from the addresses of [`begin`](Self::begin) on.
    pub piece: Piece<V, VEC>,
    /// The piece's number in the row.
    pub index: u32,
    /// The row's length; 0 where there is no such row.
    pub n: u32,
}

impl<const V: usize, const VEC: bool> Mine<V, VEC> {
    /// The beginning of a kernel for `rows` rows of `n` elements. `addresses` are those that the thread accesses its piece at, from the number
    /// of the row, the column, and the piece's number; they are computed while the kernels before still run.
    #[inline(always)]
    pub fn begin<const P: usize>(
        rows: u32,
        n: u32,
        addresses: impl Fn(usize, usize, u32) -> [*const u8; P],
    ) -> (Self, [*const u8; P]) {
        let row = (thread::block_idx_z() * thread::grid_dim_y() + thread::block_idx_y()) * thread::block_dim_y()
            + thread::thread_idx_y();
        let index = thread::block_idx_x() * thread::block_dim_x() + thread::thread_idx_x();
        let n = if row < rows { n } else { 0 };
        if VEC {
            let own = if index * (V as u32) < n { V as u32 } else { 0 };
            let at = addresses(row as usize, index as usize * V, index);
            let (at, [index, n, own]) = dependent_launch::begin_at(at, [index, n, own]);
            (Self { piece: Piece::new(0, own), index, n }, at)
        } else {
            // Single elements are accessed at addresses that the compiler knows to be global.
            let [row, index, n] = dependent_launch::begin_with([row, index, n]);
            (Self { piece: Piece::new(index, n), index, n }, addresses(row as usize, 0, index))
        }
    }
}
