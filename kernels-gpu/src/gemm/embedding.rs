//! `out[t] = table[ids[t]]`: the first layer of a language model, and any other choice of rows.
//!
//! A product with one-hot rows, so nothing is rounded: 16 bytes a thread are copied, or an element where rows are not
//! aligned to that. Ids outside of the table give zeros.

use crate::chunk;
use cuda_std::{Element, Global, GlobalMut, bf16, dependent_launch, entries, f16, thread};

/// Bytes that a thread moves.
pub const BYTES: usize = 16;

/// `table`: `[rows, width]`, rows `table_row` elements apart; `ids`: `[n]`; `out`: `[n, width]`, rows `out_row` apart.
/// `N`: elements of a thread, 16 bytes of them. Grid: (ids by block rows, pieces by block columns); block: (pieces, ids).
#[inline(always)]
pub unsafe fn embedding<T: Element, const N: usize>(
    out: *mut T,
    table: *const T,
    ids: *const i32,
    n: u32,
    rows: u32,
    width: u32,
    out_row: usize,
    table_row: usize,
) {
    dependent_launch::begin();
    let size = size_of::<T>();
    let strides = (out_row | table_row) * size;
    let whole = (out as usize as u32 | table as usize as u32 | strides as u32).is_multiple_of(BYTES as u32);
    let (out, table) = (GlobalMut::new(out), Global::new(table));
    let at = (thread::block_idx_y() * thread::block_dim_x() + thread::thread_idx_x()) * N as u32;
    let token = thread::block_idx_x() * thread::block_dim_y() + thread::thread_idx_y();
    if token >= n || at >= width {
        return;
    }
    let id = Global::new(ids).get(token);
    let known = id >= 0 && (id as u32) < rows;
    let (out, row) = (out.offset(token as usize * out_row), if known { id as usize * table_row } else { 0 });
    let zero: T = core::mem::zeroed();
    if whole && at + N as u32 <= width {
        let piece = if known { chunk::load::<T, N>(table, row + at as usize) } else { [zero; N] };
        chunk::store::<T, N>(out, at as usize, piece);
        return;
    }
    let mut i = at;
    while i < at + N as u32 && i < width {
        out.set(i, if known { table.get(row + i as usize) } else { zero });
        i += 1;
    }
}

entries! {
    /// Arguments of every `embedding_*` entry; see [`embedding`].
    pub struct Args<T>(
        out: *mut T, table: *const T, ids: *const i32, n: u32, rows: u32, width: u32, out_row: usize, table_row: usize,
    );
    embedding_f32 { type T = f32; } [256, 8] => embedding::<T, 4>;
    embedding_f16 { type T = f16; } [256, 8] => embedding::<T, 8>;
    embedding_bf16 { type T = bf16; } [256, 8] => embedding::<T, 8>;
}
