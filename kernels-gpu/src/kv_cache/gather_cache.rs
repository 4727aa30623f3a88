//! Gathers the keys and values of sequences from their blocks to contiguous tensors, widening 8-bit ones.
//!
//! The counterpart of [`reshape_and_cache`](super::reshape_and_cache), with the same threads. A token finds its sequence
//! by bisecting the sequences' starts, which fit into the first-level cache: any mixture of lengths keeps all threads
//! busy, and the host needs to know the total only.
//! Many tokens from an x-split cache of 16 bits go by tiles instead ([`gather_cache_tiles`](super::gather_cache_tiles)).

use crate::chunk;
use crate::kv_cache::gather_cache_tiles::gather_cache_tiles;
use crate::kv_cache::layout::{Flat, PageLayout, XSplitKey, XSplitValue, load, split_slot};
use crate::kv_cache::reshape_and_cache::SCALE_PER_HEAD;
use crate::kv_cache::{CacheElement, StoreAs};
use crate::operand;
use cuda_std::{E4M3, E5M2, Global, GlobalMut, bf16, dependent_launch, entries, f16, thread};

/// Where a token of the output is in the cache: block and place in the block.
pub(super) enum Place {
    At(usize, u32),
    /// Behind the last sequence.
    Nowhere,
    /// The tables are wrong.
    Wrong,
}

#[inline(always)]
#[track_caller]
pub(super) unsafe fn find(
    token: u32,
    starts: *const i32,
    tables: *const i32,
    table_stride: usize,
    sequences: u32,
    table_len: u32,
    blocks: usize,
    block_size: u32,
) -> Place {
    let starts = Global::new(starts);
    if token as i64 >= starts.get(sequences) as i64 {
        return Place::Nowhere;
    }
    // The last sequence that starts at or before the token: it is in low .. high.
    let (mut low, mut high) = (0, sequences);
    while high - low > 1 {
        let middle = (low + high) / 2;
        if starts.get(middle) as i64 <= token as i64 {
            low = middle;
        } else {
            high = middle;
        }
    }
    let position = token as i64 - starts.get(low) as i64;
    if position < 0 {
        return Place::Wrong;
    }
    let (entry, at) = split_slot(position as u64, block_size);
    if entry >= table_len as usize {
        return Place::Wrong;
    }
    let block = Global::new(tables).get(low as usize * table_stride + entry);
    if block as i64 as u64 >= blocks as u64 {
        return Place::Wrong;
    }
    Place::At(block as usize, at)
}

/// `key`, `value`: `[tokens, heads, dim]` by strides. Grid and block as for
/// [`reshape_and_cache`](super::reshape_and_cache::reshape_and_cache).
#[inline(always)]
pub unsafe fn gather_cache<
    T: StoreAs<S>,
    S: CacheElement,
    K: PageLayout,
    V: PageLayout,
    const N: usize,
    const TOKENS_FIRST: bool,
>(
    key: *mut T,
    value: *mut T,
    key_cache: *const S,
    value_cache: *const S,
    block_tables: *const i32,
    starts: *const i32,
    key_scale: *const f32,
    value_scale: *const f32,
    status: *mut u32,
    key_token_stride: usize,
    key_head_stride: usize,
    value_token_stride: usize,
    value_head_stride: usize,
    key_page_block_stride: usize,
    key_page_head_stride: usize,
    key_page_token_stride: usize,
    value_page_block_stride: usize,
    value_page_head_stride: usize,
    value_page_token_stride: usize,
    table_stride: usize,
    blocks: usize,
    block_size: u32,
    sequences: u32,
    table_len: u32,
    tokens: u32,
    heads: u32,
    head_dim: u32,
    flags: u32,
) {
    dependent_launch::begin();
    let (tx, ty, tz) = (thread::thread_idx_x(), thread::thread_idx_y(), thread::thread_idx_z());
    let (bx, by, bz) = (thread::block_idx_x(), thread::block_idx_y(), thread::block_idx_z());
    let (nx, ny, nz) = (thread::block_dim_x(), thread::block_dim_y(), thread::block_dim_z());
    let (token, head, part) = if TOKENS_FIRST {
        (bx * nx + tx, by * nz + tz, bz * ny + ty)
    } else {
        (bx * nz + tz, by * ny + ty, bz * nx + tx)
    };
    let parts = head_dim.div_ceil(N as u32);
    if token >= tokens || head >= heads || part >= parts {
        return;
    }
    let (key_scale, value_scale) = if const { !T::SCALED } {
        (1.0, 1.0)
    } else {
        let at = if flags & SCALE_PER_HEAD != 0 { head } else { 0 };
        (Global::new(key_scale).get(at), Global::new(value_scale).get(at))
    };
    let (block, at) = match find(token, starts, block_tables, table_stride, sequences, table_len, blocks, block_size) {
        Place::At(block, at) => (block, at),
        Place::Nowhere => return,
        Place::Wrong => {
            operand::count(status, head == 0 && part == 0);
            return;
        }
    };

    let row = token as usize;
    let key_row = GlobalMut::new(key).offset(row * key_token_stride + head as usize * key_head_stride);
    let value_row = GlobalMut::new(value).offset(row * value_token_stride + head as usize * value_head_stride);
    let (key_cache, value_cache) = (Global::new(key_cache), Global::new(value_cache));
    let key_layout = K::new(key_page_block_stride, key_page_head_stride, key_page_token_stride, block_size);
    let value_layout = V::new(value_page_block_stride, value_page_head_stride, value_page_token_stride, block_size);
    let key_page = key_cache.offset(key_layout.page(block, head));
    let value_page = value_cache.offset(value_layout.page(block, head));

    let rows = key_token_stride | key_head_stride | value_token_stride | value_head_stride;
    // Single elements of a run are aligned anyway.
    let key_pages = key_page_block_stride | key_page_head_stride | key_page_token_stride;
    let value_pages = value_page_block_stride | value_page_head_stride | value_page_token_stride;
    let whole = head_dim.is_multiple_of(N as u32)
        && chunk::aligned::<T, N>(key as usize | value as usize, rows)
        && (K::RUN < N || chunk::aligned::<S, N>(key_cache.ptr(0u32) as usize, key_pages))
        && (V::RUN < N || chunk::aligned::<S, N>(value_cache.ptr(0u32) as usize, value_pages));

    if whole {
        let dim = part * N as u32;
        let k: [S; N] = load(key_page, key_layout, at, dim);
        let v: [S; N] = load(value_page, value_layout, at, dim);
        chunk::store(key_row, dim as usize, T::restore(k, key_scale));
        chunk::store(value_row, dim as usize, T::restore(v, value_scale));
    } else {
        let mut dim = part;
        while dim < head_dim {
            let [k] = T::restore([key_page.get(key_layout.within(at, dim))], key_scale);
            let [v] = T::restore([value_page.get(value_layout.within(at, dim))], value_scale);
            key_row.set(dim, k);
            value_row.set(dim, v);
            dim += parts;
        }
    }
}

entries! {
    /// See [`gather_cache`]. `block_tables`: `[sequences, table_len]`, `table_stride` apart; `starts`:
    /// `[sequences + 1]`, ascending; scales as for [`reshape_and_cache`](super::reshape_and_cache); `status`, counted
    /// up for tokens without a block, may be null.
    pub struct Args<T, S>(
        key: *mut T,
        value: *mut T,
        key_cache: *const S,
        value_cache: *const S,
        block_tables: *const i32,
        starts: *const i32,
        key_scale: *const f32,
        value_scale: *const f32,
        status: *mut u32,
        key_token_stride: usize,
        key_head_stride: usize,
        value_token_stride: usize,
        value_head_stride: usize,
        key_page_block_stride: usize,
        key_page_head_stride: usize,
        key_page_token_stride: usize,
        value_page_block_stride: usize,
        value_page_head_stride: usize,
        value_page_token_stride: usize,
        table_stride: usize,
        blocks: usize,
        block_size: u32,
        sequences: u32,
        table_len: u32,
        tokens: u32,
        heads: u32,
        head_dim: u32,
        flags: u32
    );
    gather_cache_flat_f32_f32 { type T = f32; type S = f32; } [512]
        => gather_cache::<T, S, Flat, Flat, 4, false>;
    gather_cache_flat_f32_e4m3 { type T = f32; type S = E4M3; } [512]
        => gather_cache::<T, S, Flat, Flat, 4, false>;
    gather_cache_flat_f32_e5m2 { type T = f32; type S = E5M2; } [512]
        => gather_cache::<T, S, Flat, Flat, 4, false>;
    gather_cache_flat_f32_i8 { type T = f32; type S = i8; } [512]
        => gather_cache::<T, S, Flat, Flat, 4, false>;
    gather_cache_flat_f16_f16 { type T = f16; type S = f16; } [512]
        => gather_cache::<T, S, Flat, Flat, 8, false>;
    gather_cache_flat_f16_e4m3 { type T = f16; type S = E4M3; } [512]
        => gather_cache::<T, S, Flat, Flat, 8, false>;
    gather_cache_flat_f16_e5m2 { type T = f16; type S = E5M2; } [512]
        => gather_cache::<T, S, Flat, Flat, 8, false>;
    gather_cache_flat_f16_i8 { type T = f16; type S = i8; } [512]
        => gather_cache::<T, S, Flat, Flat, 8, false>;
    gather_cache_flat_bf16_bf16 { type T = bf16; type S = bf16; } [512]
        => gather_cache::<T, S, Flat, Flat, 8, false>;
    gather_cache_flat_bf16_e4m3 { type T = bf16; type S = E4M3; } [512]
        => gather_cache::<T, S, Flat, Flat, 8, false>;
    gather_cache_flat_bf16_e5m2 { type T = bf16; type S = E5M2; } [512]
        => gather_cache::<T, S, Flat, Flat, 8, false>;
    gather_cache_flat_bf16_i8 { type T = bf16; type S = i8; } [512]
        => gather_cache::<T, S, Flat, Flat, 8, false>;
    gather_cache_xsplit_f32_f32 { type T = f32; type S = f32; } [512]
        => gather_cache::<T, S, XSplitKey<4>, XSplitValue, 4, true>;
    gather_cache_xsplit_f32_e4m3 { type T = f32; type S = E4M3; } [512]
        => gather_cache::<T, S, XSplitKey<16>, XSplitValue, 4, true>;
    gather_cache_xsplit_f32_e5m2 { type T = f32; type S = E5M2; } [512]
        => gather_cache::<T, S, XSplitKey<16>, XSplitValue, 4, true>;
    gather_cache_xsplit_f32_i8 { type T = f32; type S = i8; } [512]
        => gather_cache::<T, S, XSplitKey<16>, XSplitValue, 4, true>;
    gather_cache_xsplit_f16_f16 { type T = f16; type S = f16; } [512]
        => gather_cache::<T, S, XSplitKey<8>, XSplitValue, 8, true>;
    gather_cache_xsplit_f16_e4m3 { type T = f16; type S = E4M3; } [512]
        => gather_cache::<T, S, XSplitKey<16>, XSplitValue, 8, true>;
    gather_cache_xsplit_f16_e5m2 { type T = f16; type S = E5M2; } [512]
        => gather_cache::<T, S, XSplitKey<16>, XSplitValue, 8, true>;
    gather_cache_xsplit_f16_i8 { type T = f16; type S = i8; } [512]
        => gather_cache::<T, S, XSplitKey<16>, XSplitValue, 8, true>;
    gather_cache_xsplit_bf16_bf16 { type T = bf16; type S = bf16; } [512]
        => gather_cache::<T, S, XSplitKey<8>, XSplitValue, 8, true>;
    gather_cache_xsplit_bf16_e4m3 { type T = bf16; type S = E4M3; } [512]
        => gather_cache::<T, S, XSplitKey<16>, XSplitValue, 8, true>;
    gather_cache_xsplit_bf16_e5m2 { type T = bf16; type S = E5M2; } [512]
        => gather_cache::<T, S, XSplitKey<16>, XSplitValue, 8, true>;
    gather_cache_xsplit_bf16_i8 { type T = bf16; type S = i8; } [512]
        => gather_cache::<T, S, XSplitKey<16>, XSplitValue, 8, true>;
    gather_cache_xsplit_f16_f16_tiles { type T = f16; type S = f16; } [32, 32]
        => gather_cache_tiles::<T>;
    gather_cache_xsplit_bf16_bf16_tiles { type T = bf16; type S = bf16; } [32, 32]
        => gather_cache_tiles::<T>;
}
