//! How rows are cut for the kernels of [`row`](crate::kernels::row): pieces of 16 bytes where addresses allow it.

use crate::check::Call;
use crate::device::Geometry;
use crate::error::{Error, Result};
use crate::kernels::row::GROUP;
use crate::tensor::Tensor;
use cuda_std::{DType, Entry, KernelArgs};
use std::ffi::c_void;

/// Elements of one piece.
pub(crate) const fn piece(dtype: DType, aligned: bool) -> u32 {
    if aligned { 16 / dtype.size() as u32 } else { 4 }
}

/// Where rows lie: address, distance in elements, bytes of an element. A null address is always aligned.
pub(crate) type Place = (*const c_void, usize, usize);

/// Whether rows of `n` elements of type `dtype`, and others that go with them, can be moved in pieces of 16 bytes.
pub(crate) fn aligned(dtype: DType, n: u32, places: &[Place]) -> bool {
    let v = piece(dtype, true) as usize;
    let fits =
        |&(address, stride, size): &Place| (address as usize | (stride * size)).is_multiple_of((v * size).min(16));
    (n as usize).is_multiple_of(v) && places.iter().all(fits)
}

/// The instance for an element type in a table that lists, from `first` on, f32, f16 and bf16.
pub(crate) const fn instance<A: KernelArgs>(dtype: DType, first: usize) -> Option<Entry<A>> {
    let i = match dtype {
        DType::F32 => 0,
        DType::F16 => 1,
        DType::Bf16 => 2,
        _ => return None,
    };
    Some(A::ENTRIES[first + i])
}

/// The error where [`instance`] has none.
pub(crate) fn no_kernel(op: &'static str, dtype: DType) -> Error {
    Error::Unsupported { op, what: format!("no kernel for {dtype}; there are f32, f16 and bf16") }
}

/// One piece a thread, as [`spread`] has it.
pub(crate) const fn elementwise(rows: u32, n: u32, dtype: DType, aligned: bool, whole_warps: bool) -> Geometry {
    spread(rows, n.div_ceil(piece(dtype, aligned)), aligned, whole_warps)
}

/// A thread for each [`Line`](crate::kernels::row::line::Line) of results: one more of them than aligned rows have pieces.
pub(crate) const fn lines(rows: u32, n: u32, dtype: DType) -> Geometry {
    spread(rows, if n == 0 { 0 } else { n.div_ceil(piece(dtype, true)) + 1 }, false, false)
}

/// A thread for each of `pieces` of a row: blocks of `(pieces, rows)`, a grid of `(pieces, rows, rows)`.
///
/// `whole_warps`: the threads of a warp share a row even if it is short. Few rows are spread over many small blocks;
/// many rows take blocks of 128 to 256 threads, of the size that leaves the fewest threads without a piece.
pub(crate) const fn spread(rows: u32, pieces: u32, aligned: bool, whole_warps: bool) -> Geometry {
    /// Warps that fit on a GPU beside each other without sharing a scheduler.
    const FEW: u64 = 512;
    let (x, y) = if pieces < 32 && aligned && !whole_warps {
        let x = if pieces == 0 { 1 } else { pieces.next_power_of_two() };
        (x, 128 / x)
    } else {
        let warps = pieces.div_ceil(32);
        if warps as u64 * rows as u64 <= FEW {
            // Four warps of a block hide more of what each waits for than two, by 1 to 4 % of the time.
            let threads = match warps {
                0 => 32,
                1..=3 => warps * 32,
                _ => 128,
            };
            (threads, 1)
        } else if warps < 4 {
            (warps * 32, 4 / warps)
        } else {
            let (mut best, mut w) = (8, 8);
            while w >= 4 {
                if warps.div_ceil(w) * w < warps.div_ceil(best) * best {
                    best = w;
                }
                w -= 1;
            }
            (best * 32, 1)
        }
    };
    let (columns, rows) = (pieces.div_ceil(x), rows.div_ceil(y));
    let y_extent = if rows < 65535 { rows } else { 65535 };
    let z_extent = if rows == 0 { 0 } else { rows.div_ceil(y_extent) };
    Geometry::new([columns, y_extent, z_extent], [x, y, 1]).dependent()
}

/// The strides of scales: `[rows, groups]`, in any order, no two of them in one place.
pub(crate) fn scale_strides(
    call: &Call<'_>,
    scales: &Tensor<f32>,
    rows: usize,
    width: usize,
) -> Result<(usize, usize)> {
    call.same_shape("scales", scales.shape(), &[rows, width.div_ceil(GROUP)])?;
    call.distinct("scales", scales)?;
    Ok((scales.strides()[0], scales.strides()[1]))
}

/// What a kernel does for a row, as far as it matters for how many rows a block has.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Work {
    /// One input, results of the same type.
    Plain,
    /// One input, 8-bit results.
    Quantise,
    /// A residual, added and replaced.
    Add,
}

/// A launch for `rows` rows of `threads` threads, whole warps, of kernels whose blocks may have several rows. A block starts every 1.2 ns on the
/// whole GPU, so many short rows share them; few had better be spread, but over four blocks rather than eight. Measured on an H200.
pub(crate) const fn sharing(rows: u32, threads: u32, work: Work, shared: usize) -> Geometry {
    let y = match threads {
        32 | 64 if rows <= 8 => rows.div_ceil(4),
        32 if matches!(work, Work::Quantise) || rows <= 16 || rows >= 512 => 4,
        32 | 64 if rows >= 256 => 2,
        96 if rows >= 1024 || rows >= 512 && matches!(work, Work::Quantise) => 2,
        _ => 1,
    };
    let y = if y == 0 { 1 } else { y };
    Geometry::new([rows.div_ceil(y), 1, 1], [threads, y, 1]).shared_bytes(shared as u32).dependent().evenly()
}

/// A launch of the `narrow` instances, where there can be one: rows held in two pieces a thread by one to four warps.
pub(crate) const fn narrow(dtype: DType, rows: u32, n: u32, work: Work, shared: usize) -> Option<Geometry> {
    match n.div_ceil(2 * piece(dtype, true)).next_multiple_of(32) {
        threads @ 32..=128 => Some(sharing(rows, threads, work, shared)),
        _ => None,
    }
}

/// How a kernel holds a row whose elements it needs more than once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Variant {
    /// In registers, two pieces of 16 bytes a thread: rows up to 16 KiB.
    X2,
    /// In registers, four pieces of 16 bytes a thread: rows up to 32 KiB.
    X4,
    /// Read again, for longer rows, unless they are [`Held`].
    Loop,
    /// Read again, element by element: rows whose width, distance or address does not fit pieces of 16 bytes; unless they are [`Held`].
    Any,
}

/// How a kernel holds a row that [`Variant::Loop`] or [`Variant::Any`] reads again, in entries of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Held {
    /// In registers, eight pieces of 16 bytes a thread: rows of [`Variant::Loop`] up to 128 KiB.
    X8,
    /// In registers, sixteen single elements a thread: rows of [`Variant::Any`] up to 16384 elements. They are launched as those.
    AnyX4,
}

impl Held {
    /// How rows of `n` elements are held that have this [`Variant`], if they can be.
    pub const fn new(dtype: DType, variant: Variant, n: u32) -> Option<Self> {
        match variant {
            Variant::Loop if n.div_ceil(piece(dtype, true)) <= 8 * 1024 => Some(Held::X8),
            Variant::Any if n.div_ceil(piece(dtype, false)) <= 4 * 1024 => Some(Held::AnyX4),
            _ => None,
        }
    }

    /// A launch for rows that are held so.
    pub(crate) const fn geometry(self, dtype: DType, rows: u32, n: u32, whole_blocks: bool, shared: usize) -> Geometry {
        match self {
            Held::X8 => {
                let threads = n.div_ceil(8 * piece(dtype, true)).next_multiple_of(32);
                Geometry::new([rows, 1, 1], [threads, 1, 1]).shared_bytes(shared as u32).dependent()
            }
            Held::AnyX4 => Variant::Any.geometry(dtype, rows, n, whole_blocks, shared),
        }
    }
}

impl Variant {
    /// The variant for rows of `n` elements. `aligned`: all addresses and distances of rows are multiples of 16 bytes
    /// (of 8-bit results: of as many elements as 16 bytes of input hold), and so is the length of a row.
    pub const fn new(dtype: DType, n: u32, aligned: bool) -> Self {
        if !aligned {
            return Variant::Any;
        }
        match n.div_ceil(piece(dtype, true)) {
            0..=1024 => Variant::X2,
            1025..=2048 => Variant::X4,
            _ => Variant::Loop,
        }
    }

    /// Threads and rows of a block. `whole_blocks`: a block has only one row, and at least a warp for it.
    pub(crate) const fn block(self, dtype: DType, n: u32, whole_blocks: bool) -> (u32, u32) {
        let pieces = n.div_ceil(piece(dtype, !matches!(self, Variant::Any)));
        let threads = match self {
            Variant::X2 => pieces.div_ceil(2),
            Variant::X4 | Variant::Any => pieces.div_ceil(4),
            Variant::Loop => 1024,
        };
        if threads > 32 || whole_blocks {
            let threads = threads.next_multiple_of(32);
            (
                if threads > 1024 {
                    1024
                } else if threads < 32 {
                    32
                } else {
                    threads
                },
                1,
            )
        } else {
            // Unaligned rows need whole warps.
            let lanes = if threads == 0 { 1 } else { threads.next_power_of_two() };
            let lanes = if matches!(self, Variant::Any) { 32 } else { lanes };
            (lanes, 128 / lanes)
        }
    }

    /// The first of its instances in a table that lists the variants in order, three element types each.
    pub(crate) const fn first(self) -> usize {
        3 * self as usize
    }

    /// A launch of blocks of [`block`](Self::block).
    pub(crate) const fn geometry(self, dtype: DType, rows: u32, n: u32, whole_blocks: bool, shared: usize) -> Geometry {
        let (x, y) = self.block(dtype, n, whole_blocks);
        Geometry::new([rows.div_ceil(y), 1, 1], [x, y, 1]).shared_bytes(shared as u32).dependent()
    }
}

/// Launches the instance of a kernel.
///
/// # Safety
/// As for [`Stream::launch`](crate::Stream::launch).
pub(crate) unsafe fn launch<A: KernelArgs>(
    stream: &crate::Stream,
    op: &'static str,
    dtype: DType,
    entry: Option<Entry<A>>,
    geometry: &Geometry,
    args: &A,
) -> Result<()> {
    let entry = entry.ok_or_else(|| no_kernel(op, dtype))?;
    // SAFETY: forwarded to the caller.
    unsafe { stream.launch(&entry, geometry, args) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WIDTHS: [u32; 26] = [
        1, 7, 8, 46, 80, 128, 512, 513, 769, 1024, 3584, 4096, 5125, 8191, 8192, 8193, 11008, 14336, 16384, 16385,
        16392, 32768, 40_000, 65_536, 65_544, 100_000,
    ];
    const DTYPES: [DType; 3] = [DType::F32, DType::F16, DType::Bf16];

    #[test]
    fn elementwise_launches_cover_every_piece_within_the_limits() {
        for (dtype, n, rows) in DTYPES.into_iter().flat_map(|d| {
            WIDTHS.into_iter().flat_map(move |n| [1, 3, 16, 256, 4096, 70_000, i32::MAX as u32].map(|r| (d, n, r)))
        }) {
            for (aligned, whole_warps) in [(true, false), (true, true), (false, false)] {
                let Geometry { grid, block, .. } = elementwise(rows, n, dtype, aligned, whole_warps);
                let what = format!("{rows} rows of {n} {dtype}: {grid:?} x {block:?}");
                assert!(grid[1] <= 65535 && grid[2] <= 65535 && block[0] * block[1] <= 256, "{what}");
                assert!(grid[0] * block[0] * piece(dtype, aligned) >= n, "{what}");
                let covered = grid[1] as u64 * grid[2] as u64 * block[1] as u64;
                assert!(covered >= rows as u64 && covered < 2 * rows as u64 + 65536 * 128, "{what}");
                assert!(covered <= u32::MAX as u64, "{what}");
                // The threads of a group of columns share a warp.
                assert!((aligned && !whole_warps) || block[0].is_multiple_of(32), "{what}");
            }
        }
    }

    /// What is read again: aligned rows beyond 128 KiB, and others beyond 16384 elements.
    #[test]
    fn rows_are_held_where_they_fit() {
        for (dtype, n) in DTYPES.into_iter().flat_map(|d| WIDTHS.map(|n| (d, n))) {
            let held = |aligned| Held::new(dtype, Variant::new(dtype, n, aligned), n);
            let bytes = n as usize * dtype.size();
            assert_eq!(held(true), (32 << 10 < bytes && bytes <= 128 << 10).then_some(Held::X8), "{n} {dtype}");
            assert_eq!(held(false), (n <= 16384).then_some(Held::AnyX4), "{n} {dtype}");
        }
    }

    #[test]
    fn teams_are_what_kernels_demand() {
        for (dtype, n) in DTYPES.into_iter().flat_map(|d| WIDTHS.map(|n| (d, n))) {
            for (aligned, whole_blocks) in [(true, false), (true, true), (false, false), (false, true)] {
                let variant = Variant::new(dtype, n, aligned);
                let (x, y) = variant.block(dtype, n, whole_blocks);
                let what = format!("{n} {dtype}, {variant:?}: ({x}, {y})");
                let (held, most) = match variant {
                    Variant::X2 => (2, 512),
                    Variant::X4 => (4, 512),
                    Variant::Loop | Variant::Any => (u32::MAX / 1024, 1024),
                };
                assert!(x * held >= n.div_ceil(piece(dtype, aligned)) && x * y <= most, "{what}");
                assert!((x * y).is_multiple_of(32) && (x > 32 || x.is_power_of_two()), "{what}");
                assert!((x <= 32 || (x.is_multiple_of(32) && y == 1)) && (aligned || x >= 32), "{what}");
                assert!(!whole_blocks || (x >= 32 && y == 1), "{what}");
                let Some(held) = Held::new(dtype, variant, n) else { continue };
                let Geometry { grid, block: [x, y, z], .. } = held.geometry(dtype, 5, n, whole_blocks, 0);
                let what = format!("{n} {dtype}, {held:?}: {grid:?} x ({x}, {y})");
                let pieces = if held == Held::X8 { 8 } else { 4 };
                assert!(x * pieces >= n.div_ceil(piece(dtype, aligned)) && x * y <= 1024 && z == 1, "{what}");
                // Of rows of one warp each there may be several, and a last block may have some to spare.
                assert!(x.is_multiple_of(32) && (x == 32 || y == 1) && (y == 1 || !whole_blocks), "{what}");
                assert!(grid[0] * y >= 5 && (grid[0] - 1) * y < 5, "{what}");
            }
            let works = [Work::Plain, Work::Quantise, Work::Add];
            for (rows, work) in [1, 5, 16, 255, 256, 1000, 100_000].into_iter().flat_map(|r| works.map(|w| (r, w))) {
                let Some(Geometry { grid, block: [x, y, z], .. }) = narrow(dtype, rows, n, work, 0) else {
                    assert!(n.div_ceil(2 * piece(dtype, true)) > 128);
                    continue;
                };
                let what = format!("{rows} rows of {n} {dtype}: {grid:?} x ({x}, {y})");
                assert!(z == 1 && x.is_multiple_of(32) && x <= 128 && x * y <= 192, "{what}");
                assert!(x * 2 * piece(dtype, true) >= n && grid[0] * y >= rows && (grid[0] - 1) * y < rows, "{what}");
            }
        }
    }
}
