//! What happens to logits before they are ranked: allowed tokens, bias, penalties. Written as f32 to the workspace.
//!
//! A block for a chunk of a row counts in shared memory how often each of its tokens is in the row's history, which it
//! reads completely: histories are short compared with vocabularies. Then it adjusts its logits:
//! bias, repetition penalty (Keskar et al., *CTRL*, 2019: positive logits are divided, others multiplied), then frequency
//! and presence penalties (OpenAI's definition). What is not allowed becomes [`BANNED`].

use super::job::PerRow;
use super::row_sum::{CHUNK, THREADS};
use super::weights::BANNED;
use cuda_std::atomic::{Block, Relaxed};
use cuda_std::shared::Carver;
use cuda_std::{Float, Global, GlobalMut, dependent_launch, entries, float, thread};

/// Dynamic shared memory.
pub const SHARED_BYTES: usize = 4 * CHUNK as usize;

/// Marks a token of the prompt; below it is the number of times that it was generated.
const PROMPT: u32 = 1 << 31;

/// Adjustments of all rows. Pointers are null for what is not wanted. Strides count elements from row to row; 0 means
/// that all rows share one.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Adjustments {
    /// Elements from one row of the logits to the next.
    pub stride: u64,
    /// Tokens of a row.
    pub vocab: u32,
    /// Words of a row of `allowed`.
    pub allowed_stride: u32,
    /// Bit `i % 32` of word `i / 32` says whether token `i` is allowed.
    pub allowed: *const u32,
    /// Added to the logits.
    pub bias: *const f32,
    /// Elements of a row of `bias`.
    pub bias_stride: u64,
    /// `[rows, history_stride]`: tokens so far. Those that are no tokens are skipped.
    pub history: *const i32,
    /// Elements of a row of `history`.
    pub history_stride: u64,
    /// `[rows]`: how many there are; at most `history_capacity` are read.
    pub lengths: *const i32,
    /// `[rows]`: how many of them are the prompt's, which only the repetition penalty looks at.
    pub prompt_lengths: *const i32,
    /// Tokens of a history, at most.
    pub history_capacity: u32,
    /// 1 for none; so are values that are not positive and finite.
    pub repetition: PerRow<f32>,
    /// 0 for none; so are values that are not finite.
    pub presence: PerRow<f32>,
    /// 0 for none; so are values that are not finite.
    pub frequency: PerRow<f32>,
    /// `[rows, out_stride]`.
    pub out: *mut f32,
    /// Elements of a row of `out`.
    pub out_stride: u64,
}

// Plain numbers and addresses, laid out alike by host and device.
cuda_std::struct_param!(Adjustments);

/// Grid: `chunks` blocks for each row, rows one after another.
#[inline(always)]
pub unsafe fn adjust<T: Float>(logits: *const T, args: Adjustments, chunks: u32) {
    dependent_launch::begin();
    core::hint::assert_unchecked(chunks != 0);
    let (row, chunk) = (thread::block_idx_x() / chunks, thread::block_idx_x() % chunks);
    let seen = Carver::new().take::<u32>(CHUNK as usize);
    let (tid, first) = (thread::thread_idx_x(), chunk * CHUNK);
    let has_history = !args.history.is_null();
    if has_history {
        let mut i = tid;
        while i < CHUNK {
            seen.set(i, 0);
            i += THREADS;
        }
        thread::sync_threads();
        let history = Global::new(args.history).offset(row as usize * args.history_stride as usize);
        let len = clamp(Global::new(args.lengths).get(row), args.history_capacity);
        let prompt =
            if args.prompt_lengths.is_null() { 0 } else { clamp(Global::new(args.prompt_lengths).get(row), len) };
        let mut i = tid;
        while i < len {
            // Negative tokens become large ones.
            let token = history.get(i) as u32;
            if token < args.vocab && token >= first && token - first < CHUNK {
                let place = token - first;
                if i < prompt {
                    seen.fetch_or(place, PROMPT, Block, Relaxed);
                } else {
                    seen.fetch_add(place, 1, Block, Relaxed);
                }
            }
            i += THREADS;
        }
        thread::sync_threads();
    }
    let repetition = args.repetition.get(row);
    let repetition = if repetition > 0.0 && repetition < f32::INFINITY { repetition } else { 1.0 };
    let finite = |x: f32| if x.is_finite() { x } else { 0.0 };
    let (presence, frequency) = (finite(args.presence.get(row)), finite(args.frequency.get(row)));
    let logits = Global::new(logits).offset(row as usize * args.stride as usize);
    let bias = Global::new(args.bias).offset(row as usize * args.bias_stride as usize);
    let allowed = Global::new(args.allowed).offset(row as usize * args.allowed_stride as usize);
    let out = GlobalMut::new(args.out).offset(row as usize * args.out_stride as usize);
    let mut i = tid;
    while i < CHUNK && first + i < args.vocab {
        let token = first + i;
        let mut x = logits.get(token).to_f32();
        if !args.bias.is_null() {
            x += bias.get(token);
        }
        let seen = if has_history { seen.get(i) } else { 0 };
        if seen != 0 {
            x = if x > 0.0 { x / repetition } else { x * repetition };
            let generated = seen & !PROMPT;
            if generated > 0 {
                // Finite, or infinities of either would be NaN.
                x -= float::min(float::max(float::fma(frequency, generated as f32, presence), -f32::MAX), f32::MAX);
            }
        }
        let banned = !args.allowed.is_null() && allowed.get(token / 32) >> (token % 32) & 1 == 0;
        // The sum may be NaN of any payload; only what is not allowed has that of `BANNED`.
        let x = if x.is_nan() { f32::NEG_INFINITY } else { x };
        out.set(token, if banned { f32::from_bits(BANNED) } else { x });
        i += THREADS;
    }
}

/// A length between 0 and `most`.
#[inline(always)]
fn clamp(len: i32, most: u32) -> u32 {
    let len = if len < 0 { 0 } else { len as u32 };
    if len < most { len } else { most }
}

entries! {
    pub struct Args<T>(logits: *const T, args: Adjustments, chunks: u32);
    sampling_adjust_f32 { type T = f32; } [THREADS] => adjust::<T>;
    sampling_adjust_f16 { type T = half::f16; } [THREADS] => adjust::<T>;
    sampling_adjust_bf16 { type T = half::bf16; } [THREADS] => adjust::<T>;
}
