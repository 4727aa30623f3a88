//! Weights of experts in the order in which Hopper's kernels of the fused block read them.
//!
//! A stage of those kernels takes 64 rows or more of weights and 128 bytes of each, or a few times that. In a plain matrix these are
//! pieces of 128 bytes a row apart. Here what is read together lies together: *tiles* of 64 rows by 128 bytes (8 KiB), row after row;
//! a tile's neighbour along K follows it; the tiles of all of K are a *strip*; strips follow one another, those of an expert and then
//! those of the next. No element is added or left out, so a matrix takes as much memory as before.
//!
//! Rows of gates and values ([`HALVES`], [`INTERLEAVED`]) are dealt out as the products want them: of every 16 rows of a tile 8 are gates
//! and 8 the values that belong to them. Where there are gates only a tile has 32 rows: the copy engine makes up the rest of
//! 64 with zeroes.

use super::fused::{HALVES, INTERLEAVED};
use cuda_std::vec::B128;
use cuda_std::{Global, GlobalMut, dependent_launch, entries, thread};

/// Threads of a block.
pub const THREADS: usize = 256;
/// Bytes of a row in a tile.
pub const LINE: usize = 128;

/// `out` and `weights`: experts of `rows` rows of `lines` times [`LINE`] bytes, aligned to 16 bytes. `order`: [`HALVES`],
/// [`INTERLEAVED`] or [`PLAIN`](super::fused::PLAIN); `tile_rows`: 64, or 32 for gates only; divides `rows`. Grid: tiles; block:
/// [`THREADS`].
#[inline(always)]
pub unsafe fn shuffle(out: *mut u8, weights: *const u8, rows: u32, lines: u32, order: u32, tile_rows: u32) {
    dependent_launch::begin();
    let (out, weights) = (GlobalMut::new(out), Global::new(weights));
    let tile = thread::block_idx_x();
    // Not zero, or there would be no tiles.
    let (lines, strips) = (lines.max(1), (rows / tile_rows.max(1)).max(1));
    let (strip, line) = (tile / lines, tile % lines);
    let (expert, strip) = (strip / strips, strip % strips);
    let pieces = const { LINE as u32 / 16 };
    let mut piece = thread::thread_idx_x();
    while piece < tile_rows * pieces {
        let (r, at) = (piece / pieces, piece % pieces * 16);
        // The 8 gates of 16 rows, then their values.
        let (output, value) = (strip * (tile_rows / 2) + r / 16 * 8 + r % 8, r / 8 % 2);
        let row = match order {
            HALVES => value * (rows / 2) + output,
            INTERLEAVED => 2 * output + value,
            _ => strip * tile_rows + r,
        };
        let from = ((expert as usize * rows as usize + row as usize) * lines as usize + line as usize) * LINE;
        let to = (tile as usize * tile_rows as usize + r as usize) * LINE;
        out.set_as(to + at as usize, weights.get_as::<B128<u32, 4>>(from + at as usize));
        piece += THREADS as u32;
    }
}

/// Where a box of rows of weights starts in the map of shuffled ones: from element `k` of the row `row` on, which counts rows as the
/// products do: those of gates and values together, zeroes included (`UP`: the first product, of `n` outputs). The second product's
/// strips are a dimension of their own, so that what a box has beyond an expert's is zeroes, as with plain weights: the largest of its results is looked for among all rows of a box.
#[inline(always)]
pub fn coordinates<const UP: bool>(tile_rows: u32, k: u32, n: u32, row: u32, expert: i32) -> [i32; 5] {
    let (along, strip) = ((k * tile_rows) as i32, (row / 64) as i32);
    if UP { [along, 0, 0, 0, expert * (n / 32) as i32 + strip] } else { [along, 0, strip, expert, 0] }
}

entries! {
    /// Arguments of `moe_shuffle`; see [`shuffle`].
    pub struct Args(out: *mut u8, weights: *const u8, rows: u32, lines: u32, order: u32, tile_rows: u32);
    moe_shuffle {} [256] => shuffle;
}
