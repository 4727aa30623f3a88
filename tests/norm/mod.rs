mod layer_norm;
mod qk_norm;
mod rms_norm;
mod rms_norm_quant;

use proptest::prelude::*;
use proptest::sample::select;

/// Widths that peers get wrong, of all ways to hold a row but the longest, and some others.
pub fn widths() -> impl Strategy<Value = usize> {
    prop_oneof![
        4 => select(vec![1usize, 7, 8, 46, 80, 128, 256, 264, 512, 768, 769]),
        1 => select(vec![1600usize, 3584, 5125, 8192]),
        2 => 1usize..600,
    ]
}

/// Widths of all variants, f32 and 16-bit elements considered: two pieces a thread, four, eight, and read twice.
pub const LONG: [usize; 7] = [4096, 8192, 8200, 16384, 16392, 40000, 16391];

/// Widths of rows that are held in ways that [`widths`] seldom or never gets to, and how many rows to take: several of a block and one to spare, one
/// element more or less than the pieces of a block have, and eight pieces a thread.
pub const HELD: [(usize, usize); 9] =
    [(7, 5), (46, 5), (513, 2), (769, 2), (5125, 1), (8191, 1), (8193, 1), (16392, 1), (40000, 1)];
