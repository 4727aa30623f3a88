//! Writes the keys and values of new tokens to their slots in the paged cache.
//!
//! A thread moves one chunk (16 bytes of input) of a key and the same one of the value, for one token and head: both
//! loads are under way before it asks for the slot, and there is no loop. Only the order of the threads differs:
//!
//! * [`Flat`] layouts: neighbouring threads take neighbouring chunks, so both sides are read and written in whole lines.
//! * x-split layouts: the first 16 threads take the same chunk of 16 neighbouring tokens. Tokens of a prompt have
//!   neighbouring slots, so a warp writes 2 x 256 bytes of keys, and of values, whose tokens are 2 bytes apart, whole
//!   32-byte sectors in each of its `N` stores. The loads take whole sectors too. No shared memory and no barrier, and
//!   scattered slots (decoding) cost nothing extra.
//!   Many tokens of 16 bits go by tiles instead ([`reshape_and_cache_tiles`](super::reshape_and_cache_tiles)).

use crate::chunk;
use crate::kv_cache::layout::{Flat, PageLayout, XSplitKey, XSplitValue, split_slot, store};
use crate::kv_cache::reshape_and_cache_tiles::reshape_and_cache_tiles;
use crate::kv_cache::{CacheElement, StoreAs};
use crate::operand;
use cuda_std::{E4M3, E5M2, Global, GlobalMut, bf16, dependent_launch, entries, f16, float, thread};

/// `slots` holds 64-bit numbers rather than 32-bit ones.
pub const SLOTS_I64: u32 = 1;
/// There is a scale for each head rather than one for all.
pub const SCALE_PER_HEAD: u32 = 2;

/// `key`, `value`: `[tokens, heads, dim]` by strides; caches by their layouts' strides. Grid and block: with
/// `TOKENS_FIRST` (tokens, heads, chunks) and (tokens, chunks, heads), else (tokens, heads, chunks) and (chunks, heads,
/// tokens), where chunks are those of `N` elements of a head, rounded up.
#[inline(always)]
pub unsafe fn reshape_and_cache<
    T: StoreAs<S>,
    S: CacheElement,
    K: PageLayout,
    V: PageLayout,
    const N: usize,
    const TOKENS_FIRST: bool,
>(
    key: *const T,
    value: *const T,
    key_cache: *mut S,
    value_cache: *mut S,
    slots: *const u8,
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
    slot_count: usize,
    block_size: u32,
    tokens: u32,
    heads: u32,
    head_dim: u32,
    flags: u32,
) {
    let (tx, ty, tz) = (thread::thread_idx_x(), thread::thread_idx_y(), thread::thread_idx_z());
    let (bx, by, bz) = (thread::block_idx_x(), thread::block_idx_y(), thread::block_idx_z());
    let (nx, ny, nz) = (thread::block_dim_x(), thread::block_dim_y(), thread::block_dim_z());
    let (token, head, part) = if TOKENS_FIRST {
        (bx * nx + tx, by * nz + tz, bz * ny + ty)
    } else {
        (bx * nz + tz, by * ny + ty, bz * nx + tx)
    };
    let [token, head, part] = dependent_launch::begin_with([token, head, part]);
    let parts = head_dim.div_ceil(N as u32);
    if token >= tokens || head >= heads || part >= parts {
        return;
    }
    let row = token as usize;
    let key_row = Global::new(key).offset(row * key_token_stride + head as usize * key_head_stride);
    let value_row = Global::new(value).offset(row * value_token_stride + head as usize * value_head_stride);
    let (key_cache, value_cache) = (GlobalMut::new(key_cache), GlobalMut::new(value_cache));
    let key_layout = K::new(key_page_block_stride, key_page_head_stride, key_page_token_stride, block_size);
    let value_layout = V::new(value_page_block_stride, value_page_head_stride, value_page_token_stride, block_size);
    let (inverse_key_scale, inverse_value_scale) = if const { !T::SCALED } {
        (1.0, 1.0)
    } else {
        let at = if flags & SCALE_PER_HEAD != 0 { head } else { 0 };
        (float::recip(Global::new(key_scale).get(at)), float::recip(Global::new(value_scale).get(at)))
    };

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
        let k: [T; N] = chunk::load(key_row, dim as usize);
        let v: [T; N] = chunk::load(value_row, dim as usize);
        let slot = operand::integer(slots, token, flags & SLOTS_I64 != 0);
        let usable = (slot as u64) < slot_count as u64;
        operand::count(status, !usable && slot != -1 && head == 0 && part == 0);
        if usable {
            let (block, at) = split_slot(slot as u64, block_size);
            let key_page = key_cache.offset(key_layout.page(block, head));
            let value_page = value_cache.offset(value_layout.page(block, head));
            store(key_page, key_layout, at, dim, T::store(k, inverse_key_scale));
            store(value_page, value_layout, at, dim, T::store(v, inverse_value_scale));
        }
    } else {
        let slot = operand::integer(slots, token, flags & SLOTS_I64 != 0);
        let usable = (slot as u64) < slot_count as u64;
        operand::count(status, !usable && slot != -1 && head == 0 && part == 0);
        if !usable {
            return;
        }
        let (block, at) = split_slot(slot as u64, block_size);
        let key_page = key_cache.offset(key_layout.page(block, head));
        let value_page = value_cache.offset(value_layout.page(block, head));
        let mut dim = part;
        while dim < head_dim {
            let [k] = T::store([key_row.get(dim)], inverse_key_scale);
            let [v] = T::store([value_row.get(dim)], inverse_value_scale);
            key_page.set(key_layout.within(at, dim), k);
            value_page.set(value_layout.within(at, dim), v);
            dim += parts;
        }
    }
}

entries! {
    /// See [`reshape_and_cache`]. `slots` holds `i32`, or `i64` with [`SLOTS_I64`]; scales are `[1]`, or `[heads]` with
    /// [`SCALE_PER_HEAD`], and not read where the cache has the inputs' type; `status`, counted up, may be null.
    pub struct Args<T, S>(
        key: *const T,
        value: *const T,
        key_cache: *mut S,
        value_cache: *mut S,
        slots: *const u8,
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
        slot_count: usize,
        block_size: u32,
        tokens: u32,
        heads: u32,
        head_dim: u32,
        flags: u32
    );
    reshape_and_cache_flat_f32_f32 { type T = f32; type S = f32; } [512]
        => reshape_and_cache::<T, S, Flat, Flat, 4, false>;
    reshape_and_cache_flat_f32_e4m3 { type T = f32; type S = E4M3; } [512]
        => reshape_and_cache::<T, S, Flat, Flat, 4, false>;
    reshape_and_cache_flat_f32_e5m2 { type T = f32; type S = E5M2; } [512]
        => reshape_and_cache::<T, S, Flat, Flat, 4, false>;
    reshape_and_cache_flat_f32_i8 { type T = f32; type S = i8; } [512]
        => reshape_and_cache::<T, S, Flat, Flat, 4, false>;
    reshape_and_cache_flat_f16_f16 { type T = f16; type S = f16; } [512]
        => reshape_and_cache::<T, S, Flat, Flat, 8, false>;
    reshape_and_cache_flat_f16_e4m3 { type T = f16; type S = E4M3; } [512]
        => reshape_and_cache::<T, S, Flat, Flat, 8, false>;
    reshape_and_cache_flat_f16_e5m2 { type T = f16; type S = E5M2; } [512]
        => reshape_and_cache::<T, S, Flat, Flat, 8, false>;
    reshape_and_cache_flat_f16_i8 { type T = f16; type S = i8; } [512]
        => reshape_and_cache::<T, S, Flat, Flat, 8, false>;
    reshape_and_cache_flat_bf16_bf16 { type T = bf16; type S = bf16; } [512]
        => reshape_and_cache::<T, S, Flat, Flat, 8, false>;
    reshape_and_cache_flat_bf16_e4m3 { type T = bf16; type S = E4M3; } [512]
        => reshape_and_cache::<T, S, Flat, Flat, 8, false>;
    reshape_and_cache_flat_bf16_e5m2 { type T = bf16; type S = E5M2; } [512]
        => reshape_and_cache::<T, S, Flat, Flat, 8, false>;
    reshape_and_cache_flat_bf16_i8 { type T = bf16; type S = i8; } [512]
        => reshape_and_cache::<T, S, Flat, Flat, 8, false>;
    reshape_and_cache_xsplit_f32_f32 { type T = f32; type S = f32; } [512]
        => reshape_and_cache::<T, S, XSplitKey<4>, XSplitValue, 4, true>;
    reshape_and_cache_xsplit_f32_e4m3 { type T = f32; type S = E4M3; } [512]
        => reshape_and_cache::<T, S, XSplitKey<16>, XSplitValue, 4, true>;
    reshape_and_cache_xsplit_f32_e5m2 { type T = f32; type S = E5M2; } [512]
        => reshape_and_cache::<T, S, XSplitKey<16>, XSplitValue, 4, true>;
    reshape_and_cache_xsplit_f32_i8 { type T = f32; type S = i8; } [512]
        => reshape_and_cache::<T, S, XSplitKey<16>, XSplitValue, 4, true>;
    reshape_and_cache_xsplit_f16_f16 { type T = f16; type S = f16; } [512]
        => reshape_and_cache::<T, S, XSplitKey<8>, XSplitValue, 8, true>;
    reshape_and_cache_xsplit_f16_e4m3 { type T = f16; type S = E4M3; } [512]
        => reshape_and_cache::<T, S, XSplitKey<16>, XSplitValue, 8, true>;
    reshape_and_cache_xsplit_f16_e5m2 { type T = f16; type S = E5M2; } [512]
        => reshape_and_cache::<T, S, XSplitKey<16>, XSplitValue, 8, true>;
    reshape_and_cache_xsplit_f16_i8 { type T = f16; type S = i8; } [512]
        => reshape_and_cache::<T, S, XSplitKey<16>, XSplitValue, 8, true>;
    reshape_and_cache_xsplit_bf16_bf16 { type T = bf16; type S = bf16; } [512]
        => reshape_and_cache::<T, S, XSplitKey<8>, XSplitValue, 8, true>;
    reshape_and_cache_xsplit_bf16_e4m3 { type T = bf16; type S = E4M3; } [512]
        => reshape_and_cache::<T, S, XSplitKey<16>, XSplitValue, 8, true>;
    reshape_and_cache_xsplit_bf16_e5m2 { type T = bf16; type S = E5M2; } [512]
        => reshape_and_cache::<T, S, XSplitKey<16>, XSplitValue, 8, true>;
    reshape_and_cache_xsplit_bf16_i8 { type T = bf16; type S = i8; } [512]
        => reshape_and_cache::<T, S, XSplitKey<16>, XSplitValue, 8, true>;
    reshape_and_cache_xsplit_f16_f16_tiles { type T = f16; type S = f16; } [32, 32]
        => reshape_and_cache_tiles::<T>;
    reshape_and_cache_xsplit_bf16_bf16_tiles { type T = bf16; type S = bf16; } [32, 32]
        => reshape_and_cache_tiles::<T>;
}
