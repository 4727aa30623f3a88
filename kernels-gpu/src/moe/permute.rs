//! Rows of tokens in the order of their experts, and back.
//!
//! Both directions read what [`sort`](super::sort) wrote: `moe_permute` copies the token of each place of the padded list, and
//! zeroes padding; `moe_unpermute` adds up what the places of a token hold, weighted, in the order of its slots.

use cuda_std::vec::{self, B64, B128};
use cuda_std::{Float, Global, GlobalMut, bf16, dependent_launch, entries, f16, float, thread, unroll};

/// The most threads of a block.
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

/// Adds the rows of all slots of a token to `sum`, in order; whether there were any. Loads of `B` slots are asked for together: places, then
/// weights, then rows. More at once take less time and more registers: 8 for few tokens, which leave a GPU half empty.
#[inline(always)]
#[track_caller]
unsafe fn add_slots<T: Float, const B: usize>(
    sum: &mut [f32; COLUMNS],
    y: Global<T>,
    positions: Global<i32>,
    weights: Option<Global<f32>>,
    places: u32,
    slots: u32,
    n: u32,
    column: u32,
) -> bool {
    let whole = n.is_multiple_of(COLUMNS as u32) && (y.ptr(0u32) as usize).is_multiple_of(COLUMNS * size_of::<T>());
    let from = |place: u32| place as usize * n as usize + column as usize;
    let mut some = false;
    let mut first = 0;
    while first < slots {
        let (mut place, mut weight) = ([u32::MAX; B], [1.0; B]);
        unroll::<B>(|i| {
            if first + (i as u32) < slots {
                place[i] = positions.get(first + i as u32) as u32;
            }
        });
        if let Some(weights) = weights {
            unroll::<B>(|i| {
                if first + (i as u32) < slots {
                    weight[i] = weights.get(first + i as u32);
                }
            });
        }
        let mut v = [[T::from_f32(0.0); COLUMNS]; B];
        // One question for all: between loads under different ones, each would wait for the one before.
        if whole && size_of::<T>() == 2 {
            unroll::<B>(|i| {
                if place[i] < places {
                    B64(v[i]) = y.get_as::<B64<T, COLUMNS>>(from(place[i]));
                }
            });
        } else if whole {
            unroll::<B>(|i| {
                if place[i] < places {
                    B128(v[i]) = y.get_as::<B128<T, COLUMNS>>(from(place[i]));
                }
            });
        } else {
            unroll::<B>(|i| {
                unroll::<COLUMNS>(|j| {
                    if place[i] < places && column + (j as u32) < n {
                        v[i][j] = y.get(from(place[i]) + j);
                    }
                });
            });
        }
        unroll::<B>(|i| {
            if place[i] < places {
                some = true;
                unroll::<COLUMNS>(|j| sum[j] = float::fma(weight[i], v[i][j].to_f32(), sum[j]));
            }
        });
        first += B as u32;
    }
    some
}

/// A token's places added up: `out` `[tokens, n]`, rows `out_row` apart; `y`: `[places, n]`; `positions`: `[tokens, slots]`, -1
/// for none; `weights`: the same or null; `pass`: `[tokens, n]`, rows `pass_row` apart, or null: what tokens without any place
/// get instead of zero. Grid: (tokens, columns in steps of [`COLUMNS`] times the threads of a block).
#[inline(always)]
pub unsafe fn unpermute<T: Float, const B: usize>(
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
    let column = (thread::block_idx_y() * thread::block_dim_x() + thread::thread_idx_x()) * COLUMNS as u32;
    let [token, column] = dependent_launch::begin_with([thread::block_idx_x(), column]);
    let token = token as usize;
    if column >= n {
        return;
    }
    let (out, y) = (GlobalMut::new(out), Global::new(y));
    let positions = Global::new(positions).offset(token * slots as usize);
    let weights = (!weights.is_null()).then(|| Global::new(weights).offset(token * slots as usize));
    let mut sum = [0f32; COLUMNS];
    let some = add_slots::<T, B>(&mut sum, y, positions, weights, places, slots, n, column);
    if !some && !pass.is_null() {
        let pass = Global::new(pass).offset(token * pass_row + column as usize);
        unroll::<COLUMNS>(|i| {
            if column + (i as u32) < n {
                sum[i] = pass.get(i).to_f32();
            }
        });
    }
    let values = vec::from_f32::<T, COLUMNS>(sum);
    let to = out.offset(token * out_row + column as usize);
    let aligned = (out.ptr(0u32) as usize).is_multiple_of(COLUMNS * size_of::<T>());
    let whole = aligned && (n as usize | out_row).is_multiple_of(COLUMNS);
    if whole && size_of::<T>() == 2 {
        to.set_as(0u32, B64(values));
    } else if whole {
        to.set_as(0u32, B128(values));
    } else {
        unroll::<COLUMNS>(|i| {
            if column + (i as u32) < n {
                to.set(i, values[i]);
            }
        });
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
    moe_unpermute_f32 { type T = f32; } [256] => unpermute::<T, 4>;
    moe_unpermute_f16 { type T = f16; } [256] => unpermute::<T, 4>;
    moe_unpermute_bf16 { type T = bf16; } [256] => unpermute::<T, 4>;
    moe_unpermute_few_f32 { type T = f32; } [256] => unpermute::<T, 8>;
    moe_unpermute_few_f16 { type T = f16; } [256] => unpermute::<T, 8>;
    moe_unpermute_few_bf16 { type T = bf16; } [256] => unpermute::<T, 8>;
}
