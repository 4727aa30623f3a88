//! Kernels that call every function of `cuda_std` with results that do not depend on the device: the SIMT device and a
//! GPU must write the same words. A file for each topic; those that need Hopper say so.
//!
//! Every thread writes a fixed number of words to `out`, one thread after another. Functions whose results may differ
//! in the last bits (approximations, sums of a tensor core in the order of its own) get arguments for which they are
//! exact, or contribute whether they are within their documented error.

pub mod atomic;
pub mod cluster;
pub mod convert;
pub mod float;
pub mod hopper;
pub mod integer;
pub mod memory;
pub mod tensor_core;
pub mod thread;
pub mod warp;
pub mod warpgroup;

use cuda_std::{GlobalMut, thread::index_1d};

/// Where a thread's results go.
pub struct Words {
    out: GlobalMut<u32>,
    next: u32,
    end: u32,
}

impl Words {
    /// `count` words of each thread of a one-dimensional grid.
    #[inline(always)]
    pub fn new(out: *mut u32, count: usize) -> Self {
        Self::of(index_1d(), out, count)
    }

    /// `count` words of each thread; the caller numbers the threads.
    #[inline(always)]
    pub fn of(thread: u32, out: *mut u32, count: usize) -> Self {
        let next = thread * count as u32;
        Self { out: GlobalMut::new(out), next, end: next + count as u32 }
    }

    /// The next word.
    #[inline(always)]
    pub unsafe fn put(&mut self, word: u32) {
        self.out.set(self.next, word);
        self.next += 1;
    }

    /// The bits of an `f32`.
    #[inline(always)]
    pub unsafe fn put_f32(&mut self, value: f32) {
        self.put(value.to_bits());
    }

    /// Several words.
    #[inline(always)]
    pub unsafe fn put_all<const N: usize>(&mut self, words: [u32; N]) {
        let mut i = 0;
        while i < N {
            self.put(words[i]);
            i += 1;
        }
    }

    /// The bits of several `f32`, with one NaN for all.
    #[inline(always)]
    pub unsafe fn put_all_f32<const N: usize>(&mut self, values: [f32; N]) {
        let mut i = 0;
        while i < N {
            self.put(if values[i].is_nan() { 0x7fc0_0000 } else { values[i].to_bits() });
            i += 1;
        }
    }

    /// Two words.
    #[inline(always)]
    pub unsafe fn put_u64(&mut self, value: u64) {
        self.put(value as u32);
        self.put((value >> 32) as u32);
    }

    /// All words must have been written.
    #[inline(always)]
    pub fn done(self) {
        debug_assert_eq!(self.next, self.end, "words of a thread");
    }
}
