//! Warpgroup matrix products (`wgmma`), whose operands lie in shared memory behind descriptors.
//!
//! The layouts are those of the PTX ISA, "Asynchronous warpgroup-level matrix instructions". A descriptor gives a
//! start address, two strides and a swizzle. With `line` the bytes of a row of the swizzle pattern (128, 64 or 32),
//! element (row `i` of the M or N dimension, `k`), `b` bytes each, lies at
//!
//! * K-major: `start + (i / 8) stride + (i % 8) line + k b`,
//! * MN-major: `start + (i b / line) leading + (k / 8) stride + (k % 8) line + i b % line`,
//! * K-major without swizzle: `start + (i / 8) stride + (k b / 16) leading + (i % 8) 16 + k b % 16`,
//!
//! and then bits 4.. of the address are exclusive-ored with bits 7.. (3, 2 or 1 of them).
//!
//! Each warp of the warpgroup computes its 16 rows as a collective of its own, when the operation is issued. In
//! hardware that happens at any moment until the wait, so with race checks on the operands are compared at the wait
//! with what they were, and a change is an error.

use crate::block::{Block, current, warp_collective};
use crate::error::{Access, ErrorKind, Loc};
use std::panic::Location;

/// One operand behind a descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Operand {
    /// The descriptor's bits.
    pub descriptor: u64,
    /// Whether the M or N dimension is contiguous rather than K.
    pub mn_major: bool,
}

/// Exclusive-ors the address bits of a swizzle mode: 3 (128 bytes), 2 (64), 1 (32), 0 (none).
pub(crate) fn swizzle(address: usize, mode: u32) -> usize {
    address ^ (address >> 7 & ((1 << mode) - 1)) << 4
}

/// What lies together in shared memory whatever the layout, and what a swizzle moves.
const PIECE: usize = 16;

/// Bytes of a step along K.
const STEP: usize = 32;

impl Operand {
    /// Offset in shared memory of element (`i`, `k`) of `bytes` bytes.
    fn offset(self, i: usize, k: usize, bytes: usize) -> usize {
        let field = |at: u32| ((self.descriptor >> at & 0x3fff) << 4) as usize;
        let (start, leading, stride) = (field(0), field(16), field(32));
        let mode = match self.descriptor >> 62 {
            1 => 3,
            2 => 2,
            3 => 1,
            _ => 0,
        };
        let line = 16 << mode;
        let linear = match (self.mn_major, mode) {
            (false, 0) => i / 8 * stride + k * bytes / 16 * leading + i % 8 * 16 + k * bytes % 16,
            (false, _) => i / 8 * stride + i % 8 * line + k * bytes,
            (true, _) => i * bytes / line * leading + k / 8 * stride + k % 8 * line + i * bytes % line,
        };
        swizzle(start + linear, mode)
    }

    /// Where the pieces of a step are, of rows `first..first + rows`, a multiple of 8: offset in shared memory, `i` and `k` of the piece's first element.
    /// The others follow it along M or N (MN-major) or along K.
    fn pieces(self, first: usize, rows: usize, bytes: usize) -> impl Iterator<Item = (usize, usize, usize)> {
        let (run, depth) = (PIECE / bytes, STEP / bytes);
        let across = if self.mn_major { rows / run } else { depth / run };
        (0..rows * depth / run).map(move |p| {
            let (i, k) = if self.mn_major { (p % across * run, p / across) } else { (p / across, p % across * run) };
            (self.offset(first + i, k, bytes), i, k)
        })
    }
}

/// A product's A: in shared memory, or a lane's four registers of the 64xK fragment.
#[derive(Clone, Copy, Debug)]
pub enum Left {
    /// In shared memory.
    Shared(Operand),
    /// In registers, laid out as for `mma.m16n8k…`, each warp its 16 rows.
    Registers([u32; 4]),
}

/// What shared memory a product in flight reads, and a checksum of it.
pub(crate) struct InFlight {
    /// Offsets of its pieces.
    pieces: Vec<u32>,
    sum: u64,
    at: Loc,
}

/// Products of one lane that are not waited for.
#[derive(Default)]
pub(crate) struct Groups {
    open: Vec<InFlight>,
    committed: std::collections::VecDeque<Vec<InFlight>>,
}

impl Groups {
    pub(crate) fn clear(&mut self) {
        self.open.clear();
        self.committed.clear();
    }
}

fn checksum(block: &Block, pieces: &[u32]) -> u64 {
    let base = block.shared.base();
    pieces.iter().fold(0xcbf2_9ce4_8422_2325, |sum, &piece| {
        (0..PIECE).step_by(8).fold(sum, |sum, at| {
            // SAFETY: in bounds, as was checked at the issue.
            let word = unsafe { base.add(piece as usize + at).cast::<u64>().read_unaligned() };
            (sum ^ word).wrapping_mul(0x100_0000_01b3).rotate_left(29)
        })
    })
}

/// Types of sums.
pub trait Sum: Copy + Default {
    /// `d[i][j] += a[i][k] b[k][j]`, in ascending `k`, for rows of `n` sums.
    #[doc(hidden)]
    fn add_product(d: &mut [Self], a: &[Self], b: &[Self], n: usize);
}

/// The loops of [`Sum::add_product`].
macro_rules! add_product {
    ($t:ty, |$c:ident, $a:ident, $b:ident| $sum:expr) => {
        impl Sum for $t {
            fn add_product(d: &mut [$t], a: &[$t], b: &[$t], n: usize) {
                for (a, d) in a.chunks_exact(b.len() / n).zip(d.chunks_exact_mut(n)) {
                    for (&$a, b) in a.iter().zip(b.chunks_exact(n)) {
                        for (d, &$b) in d.iter_mut().zip(b) {
                            let $c = *d;
                            *d = $sum;
                        }
                    }
                }
            }
        }
    };
}
add_product!(f32, |c, a, b| c + a * b);
add_product!(i32, |c, a, b| c.wrapping_add(a.wrapping_mul(b)));

/// One lane's part of a product.
struct Io<S> {
    left: Left,
    right: Operand,
    accumulate: bool,
    acc: *mut S,
}

/// `wgmma.mma_async.sync.aligned.m64nNkK`: `acc = A B (+ acc)`, with `K` of 32 bytes and elements of `E` to a
/// 32-bit word, that is of `4 / E` bytes; `acc` holds this lane's `N / 2` accumulators.
///
/// `widen` turns the low bits of a word into a value. Products are summed in ascending
/// `k`; hardware sums floats in another order with fewer bits, so compare with a tolerance.
#[track_caller]
pub fn wgmma<const E: usize, S: Sum>(
    op: &'static str,
    acc: &mut [S],
    left: Left,
    right: Operand,
    accumulate: bool,
    widen: impl Fn(u32) -> S,
) {
    let at = Location::caller();
    let (n, bytes, k) = (acc.len() * 2, 4 / E, 8 * E);
    let me = current();
    let block = me.block();
    if u64::from(me.linear / 128 + 1) * 128 > block.block_dim.get().count() {
        crate::trap("wgmma in a warpgroup that is not whole");
    }
    let first_row = (me.linear / 32 % 4) as usize * 16;
    let mut io = Io { left, right, accumulate, acc: acc.as_mut_ptr() };
    warp_collective(op, u32::MAX, &mut io, |lanes| {
        let io = lanes.get(0);
        let (right, accumulate) = (io.right, io.accumulate);
        let mut places = vec![];
        // Elements of some rows of an operand, each at `place(i, k)`.
        let mut load = |operand: Operand, first: usize, rows: usize, place: &dyn Fn(usize, usize) -> usize| {
            let mut values = vec![S::default(); rows * k];
            for (offset, i, k) in operand.pieces(first, rows, bytes) {
                let piece = read_piece(offset, at);
                for e in 0..PIECE / bytes {
                    let (i, k) = if operand.mn_major { (i + e, k) } else { (i, k + e) };
                    let mut word = [0; 4];
                    word[..bytes].copy_from_slice(&piece[e * bytes..][..bytes]);
                    values[place(i, k)] = widen(u32::from_le_bytes(word));
                }
                places.push(offset as u32);
            }
            values
        };
        let a = match io.left {
            Left::Shared(left) => load(left, first_row, 16, &|i, k_at| i * k + k_at),
            Left::Registers(_) => {
                let mut a = vec![S::default(); 16 * k];
                for l in 0..32 {
                    let (g, t) = (l as usize / 4, l as usize % 4);
                    let Left::Registers(words) = lanes.get(l).left else {
                        crate::trap_lane(l, at, "wgmma with A in registers of some lanes only")
                    };
                    for (r, word) in words.into_iter().enumerate() {
                        for i in 0..E {
                            a[(g + 8 * (r & 1)) * k + E * t + 4 * E * (r >> 1) + i] = widen(word >> (8 * bytes * i));
                        }
                    }
                }
                a
            }
        };
        let b = load(right, 0, n, &|j, k_at| k_at * n + j);
        let mut d = vec![S::default(); 16 * n];
        let at_lane = |l: u32, e: usize| {
            let (g, t) = (l as usize / 4, l as usize % 4);
            (g + 8 * (e >> 1 & 1)) * n + 8 * (e / 4) + 2 * t + (e & 1)
        };
        if accumulate {
            for l in 0..32 {
                for e in 0..n / 2 {
                    // SAFETY: each lane's accumulators; the lanes wait.
                    d[at_lane(l, e)] = unsafe { *lanes.get(l).acc.add(e) };
                }
            }
        }
        S::add_product(&mut d, &a, &b, n);
        for l in 0..32 {
            for e in 0..n / 2 {
                // SAFETY: as above.
                unsafe { *lanes.get(l).acc.add(e) = d[at_lane(l, e)] };
            }
        }
        let me = current();
        let block = me.block();
        if block.race_on.get() {
            let sum = checksum(block, &places);
            block.asynch.borrow_mut().wgmma(me.linear).open.push(InFlight { pieces: places, sum, at });
        }
    });
}

/// 16 bytes of shared memory, read by the running thread.
fn read_piece(offset: usize, at: Loc) -> [u8; PIECE] {
    let me = current();
    let block = me.block();
    let address = block.shared.base() as usize + offset;
    if let Err(e) = block.check_shared(me.linear, address, PIECE, Access::Read, at) {
        me.fault(e);
    }
    // SAFETY: in bounds of shared memory.
    unsafe { *(address as *const [u8; PIECE]) }
}

/// `wgmma.commit_group`.
pub fn wgmma_commit() {
    let me = current();
    if me.block().race_on.get() {
        let mut state = me.block().asynch.borrow_mut();
        let groups = state.wgmma(me.linear);
        let open = std::mem::take(&mut groups.open);
        groups.committed.push_back(open);
    }
}

/// `wgmma.wait_group`: all but the latest `pending` groups are complete.
#[track_caller]
pub fn wgmma_wait(pending: usize) {
    let me = current();
    let block = me.block();
    if !block.race_on.get() {
        return;
    }
    loop {
        let mut state = block.asynch.borrow_mut();
        let groups = state.wgmma(me.linear);
        if groups.committed.len() <= pending {
            return;
        }
        let group = groups.committed.pop_front().expect("a group");
        drop(state);
        for product in group {
            if checksum(block, &product.pieces) != product.sum {
                let message = "shared memory changed under a wgmma in flight, issued here".to_string();
                me.fault(ErrorKind::Trap { thread: me.tid, message, at: product.at });
            }
        }
    }
}
