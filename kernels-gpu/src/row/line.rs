//! Lines of results: 16 bytes that begin at a multiple of 16, wherever a row of them does, for kernels in which a column has nothing to do with others.
//!
//! A thread has the columns of a line of results, which it stores at once. What it computes them from lies in two lines of 16 bytes of another row, of which the
//! neighbouring lane has the second as its first: they are loaded as they are, and the columns cut out of them by selects and funnel shifts. At the
//! ends of rows elements go one by one.
//!
//! That is 60 instructions a piece more than a row takes that is aligned, and a third of the accesses that single elements take.

use super::{Words, elements, words, zero};
use cuda_std::vec::B128;
use cuda_std::{Float, Global, GlobalMut, integer, unroll};

/// `a` or `b`, both of which are in registers.
#[inline(always)]
fn either(first: bool, a: u32, b: u32) -> u32 {
    if first { a } else { b }
}

/// 16 bytes from byte `shift` of `low`, which `high` follows; `shift` is less than 16.
#[inline(always)]
fn cut(low: Words, high: Words, shift: u32) -> Words {
    let ([a, b, c, d], [e, f, g, h]) = (low, high);
    // Whole words first. One by one: an array under a condition would be one in memory.
    let (one, two) = (shift & 4 != 0, shift & 8 != 0);
    let (a, b, c) = (either(two, c, a), either(two, d, b), either(two, e, c));
    let (d, e, f) = (either(two, f, d), either(two, g, e), either(two, h, f));
    let (a, b, c) = (either(one, b, a), either(one, c, b), either(one, d, c));
    let (d, e) = (either(one, e, d), either(one, f, e));
    let bits = 8 * shift;
    [(a, b), (b, c), (c, d), (d, e)].map(|(low, high)| integer::funnel_shift_right(low, high, bits))
}

/// Two lines that some columns lie in, and at which byte.
#[derive(Clone, Copy)]
struct Lines {
    low: Words,
    high: Words,
    shift: u32,
}

impl Lines {
    /// Of zeros.
    const NONE: Self = Self { low: [0; 4], high: [0; 4], shift: 0 };

    #[inline(always)]
    unsafe fn elements<T: Float, const V: usize>(self) -> [T; V] {
        elements(B128(cut(self.low, self.high, self.shift)))
    }
}

/// `V` columns of a row of `n` elements, 16 bytes of them. They may begin before the row, or end behind it.
#[derive(Clone, Copy)]
pub struct Line<const V: usize> {
    /// What is before the row is more than it has.
    first: u32,
    n: u32,
}

impl<const V: usize> Line<V> {
    /// Those of line number `index` of a row of `n` results at `y`; there may be one line more than such a row has pieces.
    #[inline(always)]
    pub fn new<T: Float>(index: u32, n: u32, y: GlobalMut<T>) -> Self {
        const { assert!(V * size_of::<T>() == 16) };
        let before = y.ptr(0usize).addr() as u32 % 16 / const { size_of::<T>() as u32 };
        Self { first: (index * V as u32).wrapping_sub(before), n }
    }

    /// The number of column `j`.
    #[inline(always)]
    fn column(self, j: usize) -> u32 {
        self.first.wrapping_add(j as u32)
    }

    /// Whether the row has column `j`.
    #[inline(always)]
    fn has(self, j: usize) -> bool {
        self.column(j) < self.n
    }

    /// Whether the row has so many columns from the first on.
    #[inline(always)]
    fn has_all(self, columns: usize) -> bool {
        self.first < self.n && self.n - self.first >= columns as u32
    }

    /// Whether the lines that these columns lie in end within the row, wherever it begins.
    #[inline(always)]
    fn inner(self) -> bool {
        self.has_all(const { 2 * V })
    }

    /// The lines of a row that these columns lie in, if they are [`inner`](Self::inner) ones. Elements before them may be others' results.
    #[inline(always)]
    #[track_caller]
    unsafe fn lines<T: Float>(self, x: Global<T>) -> Lines {
        let mut lines = Lines::NONE;
        if self.inner() {
            let shift = x.ptr(self.first).addr() as u32 % 16;
            let at = x.offset(self.first as i32 - (shift / const { size_of::<T>() as u32 }) as i32);
            let (B128(low), B128(high)) = (at.get_line(0usize, shift, 16 - shift), at.get_line(V, 0, shift));
            lines = Lines { low, high, shift };
        }
        lines
    }

    /// The elements of some rows, all of them on their way before any is waited for; zeros outside of the rows.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn load<T: Float, const M: usize>(self, x: [Global<T>; M]) -> [[T; V]; M] {
        let mut lines = [Lines::NONE; M];
        unroll::<M>(|m| lines[m] = self.lines(x[m]));
        if !self.inner() {
            let mut pieces = [[zero::<T>(); V]; M];
            unroll::<V>(|j| {
                if self.has(j) {
                    unroll::<M>(|m| pieces[m][j] = x[m].get(self.column(j)));
                }
            });
            unroll::<M>(|m| lines[m] = Lines { low: words(pieces[m]).0, ..Lines::NONE });
        }
        let mut pieces = [[zero::<T>(); V]; M];
        unroll::<M>(|m| pieces[m] = lines[m].elements());
        pieces
    }

    /// Elements `2 c` and `2 c + 1` of a row of pairs, for each column `c`.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn load_pairs<T: Float>(self, x: Global<T>) -> [[T; V]; 2] {
        let low = Self { first: self.first.wrapping_mul(2), n: 2 * self.n };
        let high = Self { first: low.column(V), ..low };
        let ([low], [high]) = (low.load([x]), high.load([x]));
        let mut pairs = [[zero(); V]; 2];
        unroll::<2>(|odd| {
            let mut j = 0;
            while j < V / 2 {
                (pairs[odd][j], pairs[odd][V / 2 + j]) = (low[2 * j + odd], high[2 * j + odd]);
                j += 1;
            }
        });
        pairs
    }

    /// Stores the results that the row has.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn store<T: Float>(self, y: GlobalMut<T>, results: [T; V]) {
        if self.has_all(V) {
            y.set_as(self.first, words(results));
        } else {
            unroll::<V>(|j| {
                if self.has(j) {
                    y.set(self.column(j), results[j]);
                }
            });
        }
    }
}
