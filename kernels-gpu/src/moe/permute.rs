//! Rows of tokens in the order of their experts, and back.
//!
//! Both directions read what [`sort`](super::sort) wrote: `moe_permute` copies the token of each place of the padded list, and
//! zeroes padding; `moe_unpermute` adds up what the places of a token hold, weighted, in the order of its slots.

use cuda_std::vec::{self, B64, B128};
use cuda_std::{Float, Global, GlobalMut, bf16, dependent_launch, entries, f16, float, thread, unroll};

/// Threads of a block.
pub const THREADS: usize = 256;
/// Columns of a thread of `moe_unpermute`.
pub const COLUMNS: usize = 4;

/// A row for each place: `out` is `[capacity]` rows of `row_bytes`, `x` rows of as many, `x_row` bytes apart; all in units
/// of `unit` bytes (16, 4, 2 or 1), to which pointers and distances are aligned. `sorted_ids`: flat pairs, `slots` a token, of
/// `tokens` tokens; anything else is padding. Grid: (places, row in steps of `unit THREADS`); block: [`THREADS`].
#[inline(always)]
pub unsafe fn permute(
    out: *mut u8,
    x: *const u8,
    sorted_ids: *const i32,
    row_bytes: usize,
    x_row: usize,
    tokens: u32,
    slots: u32,
    unit: u32,
) {
    dependent_launch::begin();
    let place = thread::block_idx_x();
    let pair = Global::new(sorted_ids).get(place) as u32;
    let at = (thread::block_idx_y() * THREADS as u32 + thread::thread_idx_x()) as usize * unit as usize;
    if at >= row_bytes {
        return;
    }
    let there = pair < tokens * slots;
    let from = (pair / slots.max(1)) as usize * x_row + at;
    let to = place as usize * row_bytes + at;
    let (out, x) = (GlobalMut::new(out), Global::new(x));
    match unit {
        16 => {
            // Word by word: a choice between structs would go through local memory.
            let mut words = [0u32; 4];
            if there {
                let B128(read) = x.get_as::<B128<u32, 4>>(from);
                unroll::<4>(|i| words[i] = read[i]);
            }
            out.set_as(to, B128(words));
        }
        4 => out.set_as(to, if there { x.get_as(from) } else { 0u32 }),
        2 => out.set_as(to, if there { x.get_as(from) } else { 0u16 }),
        _ => out.set(to, if there { x.get(from) } else { 0 }),
    }
}

/// A token's places added up: `out` `[tokens, n]`, rows `out_row` apart; `y`: `[places, n]`; `positions`: `[tokens, slots]`, -1
/// for none; `weights`: the same or null; `pass`: `[tokens, n]`, rows `pass_row` apart, or null: what tokens without any place
/// get instead of zero. Grid: (tokens, columns in steps of `COLUMNS THREADS`); block: [`THREADS`].
#[inline(always)]
pub unsafe fn unpermute<T: Float>(
    out: *mut T,
    y: *const T,
    positions: *const i32,
    weights: *const f32,
    pass: *const T,
    out_row: usize,
    pass_row: usize,
    places: u32,
    slots: u32,
    n: u32,
) {
    dependent_launch::begin();
    let (weighted, passes) = (!weights.is_null(), !pass.is_null());
    let (out, y, pass) = (GlobalMut::new(out), Global::new(y), Global::new(pass));
    let (positions, weights) = (Global::new(positions), Global::new(weights));
    let token = thread::block_idx_x() as usize;
    let column = (thread::block_idx_y() * THREADS as u32 + thread::thread_idx_x()) * COLUMNS as u32;
    if column >= n {
        return;
    }
    let whole = n.is_multiple_of(COLUMNS as u32) && (y.ptr(0u32) as usize).is_multiple_of(COLUMNS * size_of::<T>());
    let mut sum = [0f32; COLUMNS];
    let mut some = false;
    for slot in 0..slots as usize {
        let place = positions.get(token * slots as usize + slot) as u32;
        if place < places {
            some = true;
            let weight = if weighted { weights.get(token * slots as usize + slot) } else { 1.0 };
            let from = place as usize * n as usize + column as usize;
            let mut v = [T::from_f32(0.0); COLUMNS];
            if whole && size_of::<T>() == 2 {
                B64(v) = y.get_as::<B64<T, COLUMNS>>(from);
            } else if whole {
                B128(v) = y.get_as::<B128<T, COLUMNS>>(from);
            } else {
                for i in 0..COLUMNS {
                    if column + (i as u32) < n {
                        v[i] = y.get(from + i);
                    }
                }
            }
            for i in 0..COLUMNS {
                sum[i] = float::fma(weight, v[i].to_f32(), sum[i]);
            }
        }
    }
    if !some && passes {
        for i in 0..COLUMNS {
            if column + (i as u32) < n {
                sum[i] = pass.get(token * pass_row + column as usize + i).to_f32();
            }
        }
    }
    let values = vec::from_f32::<T, COLUMNS>(sum);
    for i in 0..COLUMNS {
        if column + (i as u32) < n {
            out.set(token * out_row + column as usize + i, values[i]);
        }
    }
}

entries! {
    /// Arguments of `moe_permute`; see [`permute`].
    pub struct Args(
        out: *mut u8, x: *const u8, sorted_ids: *const i32, row_bytes: usize, x_row: usize, tokens: u32, slots: u32,
        unit: u32,
    );
    moe_permute {} [256] => permute;
}
entries! {
    /// Arguments of every `moe_unpermute_*` entry; see [`unpermute`].
    pub struct UnpermuteArgs<T>(
        out: *mut T, y: *const T, positions: *const i32, weights: *const f32, pass: *const T, out_row: usize,
        pass_row: usize, places: u32, slots: u32, n: u32,
    );
    moe_unpermute_f32 { type T = f32; } [256] => unpermute::<T>;
    moe_unpermute_f16 { type T = f16; } [256] => unpermute::<T>;
    moe_unpermute_bf16 { type T = bf16; } [256] => unpermute::<T>;
}
