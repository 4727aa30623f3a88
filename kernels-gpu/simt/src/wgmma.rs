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
use std::cell::RefCell;
use std::panic::Location;
use std::rc::Rc;

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
pub(crate) const PIECE: usize = 16;

/// Bytes of a step along K.
const STEP: usize = 32;

impl Operand {
    /// Where a step's pieces of rows `first..first + rows`, a multiple of 8, of elements of `bytes` bytes are: calls `f` with the offset in shared
    /// memory, and with `i` and `k` of the piece's first element. The others follow it along M or N (MN-major) or along K.
    #[inline(always)]
    fn pieces(self, first: usize, rows: usize, bytes: usize, mut f: impl FnMut(usize, usize, usize)) {
        let field = |at: u32| ((self.descriptor >> at & 0x3fff) << 4) as usize;
        let (start, leading, stride) = (field(0), field(16), field(32));
        let mode = match self.descriptor >> 62 {
            1 => 3,
            2 => 2,
            3 => 1,
            _ => 0,
        };
        // Bytes of a line of the pattern.
        let (log, line) = (4 + mode, 16 << mode);
        let (run, depth) = (PIECE / bytes, STEP / bytes);
        if self.mn_major {
            for k in 0..depth {
                let row = start + k / 8 * stride + k % 8 * line;
                for i in (0..rows).step_by(run) {
                    let along = (first + i) * bytes;
                    f(swizzle(row + (along >> log) * leading + (along & (line - 1)), mode), i, k);
                }
            }
        } else {
            for i in 0..rows {
                let row = start + (first + i) / 8 * stride + (first + i) % 8 * line;
                for half in 0..2 {
                    let along = if mode == 0 { half * leading } else { half * PIECE };
                    f(swizzle(row + along, mode), i, half * run);
                }
            }
        }
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

/// The values of 16 bytes of elements, in their order; of elements of two bytes the first eight.
pub type Widen<S> = fn(&[u8; PIECE]) -> [S; PIECE];

/// The values of all bytes, by the function that widens elements of one: to look up, which is faster.
type Values<S> = Rc<[S; 256]>;

/// Types of sums.
pub trait Sum: Copy + Default + 'static {
    /// `d[i][j] += a[i][k] b[k][j]`, in ascending `k`, for rows of `n` sums.
    #[doc(hidden)]
    fn add_product(d: &mut [Self], a: &[Self], b: &[Self], n: usize);

    /// [`wgmma`], compiled with this crate and not with every kernel.
    #[doc(hidden)]
    #[track_caller]
    fn multiply(io: &mut Io<Self>);

    /// What bytes are widened to.
    #[doc(hidden)]
    fn values(widen: Widen<Self>) -> Values<Self>;
}

/// All bytes, widened.
fn widen_all<S: Sum>(widen: Widen<S>) -> [S; 256] {
    let mut values = [S::default(); 256];
    for (first, values) in (0..=240).step_by(PIECE).zip(values.chunks_exact_mut(PIECE)) {
        values.copy_from_slice(&widen(&std::array::from_fn(|i| first + i as u8)));
    }
    values
}

/// [`Sum`] by the sum of one product.
macro_rules! sums {
    ($t:ty, |$c:ident, $a:ident, $b:ident| $sum:expr) => {
        impl Sum for $t {
            fn add_product(d: &mut [$t], a: &[$t], b: &[$t], n: usize) {
                #[inline(always)]
                fn each(d: &mut [$t], a: &[$t], b: &[$t], n: usize) {
                    for (a, d) in a.chunks_exact(b.len() / n).zip(d.chunks_exact_mut(n)) {
                        for (&$a, b) in a.iter().zip(b.chunks_exact(n)) {
                            for (d, &$b) in d.iter_mut().zip(b) {
                                let $c = *d;
                                *d = $sum;
                            }
                        }
                    }
                }
                // Eight at a time instead of four: the same operations, none of them fused.
                #[cfg(target_arch = "x86_64")]
                {
                    #[target_feature(enable = "avx2")]
                    fn wide(d: &mut [$t], a: &[$t], b: &[$t], n: usize) {
                        each(d, a, b, n);
                    }
                    if is_x86_feature_detected!("avx2") {
                        // SAFETY: the processor has what it needs.
                        return unsafe { wide(d, a, b, n) };
                    }
                }
                each(d, a, b, n);
            }

            #[track_caller]
            fn multiply(io: &mut Io<$t>) {
                multiply(io);
            }

            fn values(widen: Widen<$t>) -> Values<$t> {
                thread_local! {
                    /// By the functions' addresses: one that had two would be here twice.
                    static KNOWN: RefCell<Vec<(usize, Values<$t>)>> = const { RefCell::new(vec![]) };
                }
                KNOWN.with_borrow_mut(|known| {
                    let address = widen as usize;
                    let found = known.iter().find(|(at, _)| *at == address);
                    found.map(|(_, values)| Rc::clone(values)).unwrap_or_else(|| {
                        let values = Rc::new(widen_all(widen));
                        known.push((address, Rc::clone(&values)));
                        values
                    })
                })
            }
        }
    };
}
sums!(f32, |c, a, b| c + a * b);
sums!(i32, |c, a, b| c.wrapping_add(a.wrapping_mul(b)));

/// One lane's part of a product.
#[doc(hidden)]
pub struct Io<S> {
    op: &'static str,
    left: Left,
    right: Operand,
    accumulate: bool,
    acc: *mut S,
    /// Columns.
    n: usize,
    /// Bytes of an element.
    bytes: usize,
    widen: Widen<S>,
}

/// `wgmma.mma_async.sync.aligned.m64nNkK`: `acc = A B (+ acc)`, with `K` of 32 bytes of elements of `bytes` bytes, 1 or 2, whose values `widen`
/// gives; `acc` holds this lane's `N / 2` accumulators.
///
/// Products are summed in ascending `k`; hardware sums floats in another order with fewer bits, so compare with a tolerance.
#[track_caller]
pub fn wgmma<S: Sum>(
    op: &'static str,
    acc: &mut [S],
    left: Left,
    right: Operand,
    accumulate: bool,
    bytes: usize,
    widen: Widen<S>,
) {
    let (n, acc) = (acc.len() * 2, acc.as_mut_ptr());
    S::multiply(&mut Io { op, left, right, accumulate, acc, n, bytes, widen });
}

/// Element (`i`, `k`) is at `i * strides.0 + k * strides.1`.
struct Matrix<S> {
    values: Vec<S>,
    strides: (usize, usize),
}

impl<S: Sum> Matrix<S> {
    fn zeros(len: usize, strides: (usize, usize)) -> Self {
        Self { values: vec![S::default(); len], strides }
    }

    /// A step's rows from `first` on of an operand in shared memory, read by the running thread; the offsets of its pieces go to `places`.
    fn load(&mut self, io: &Io<S>, operand: Operand, first: usize, rows: usize, places: &mut Vec<u32>, at: Loc) {
        let me = current();
        let block = me.block();
        let (base, run) = (block.shared.base() as usize, PIECE / io.bytes);
        // From element to element of a piece.
        let step = if operand.mn_major { self.strides.0 } else { self.strides.1 };
        let known = (io.bytes == 1).then(|| S::values(io.widen));
        operand.pieces(first, rows, io.bytes, |offset, i, k| {
            let address = base + offset;
            if let Err(e) = block.check_shared(me.linear, address, PIECE, Access::Read, at) {
                me.fault(e);
            }
            // SAFETY: in bounds of shared memory.
            let piece = unsafe { &*(address as *const [u8; PIECE]) };
            let first = i * self.strides.0 + k * self.strides.1;
            let to = self.values[first..].iter_mut().step_by(step);
            match &known {
                Some(values) => to.zip(piece).for_each(|(to, &byte)| *to = values[byte as usize]),
                None => to.zip(&(io.widen)(piece)[..run]).for_each(|(to, value)| *to = *value),
            }
            places.push(offset as u32);
        });
    }
}

#[track_caller]
fn multiply<S: Sum>(io: &mut Io<S>) {
    let at = Location::caller();
    let me = current();
    let block = me.block();
    if u64::from(me.linear / 128 + 1) * 128 > block.block_dim.get().count() {
        crate::trap("wgmma in a warpgroup that is not whole");
    }
    let first_row = (me.linear / 32 % 4) as usize * 16;
    warp_collective(io.op, u32::MAX, io, |lanes| {
        let io = lanes.get(0);
        let (n, k, each) = (io.n, STEP / io.bytes, 4 / io.bytes);
        let mut places = Vec::with_capacity((16 + n) * STEP / PIECE);
        let mut a = Matrix::zeros(16 * k, (k, 1));
        match io.left {
            Left::Shared(left) => a.load(io, left, first_row, 16, &mut places, at),
            Left::Registers(_) => {
                for l in 0..32 {
                    let (g, t) = (l as usize / 4, l as usize % 4);
                    let Left::Registers(words) = lanes.get(l).left else {
                        crate::trap_lane(l, at, "wgmma with A in registers of some lanes only")
                    };
                    let mut piece = [0; PIECE];
                    for (bytes, word) in piece.chunks_exact_mut(4).zip(words) {
                        bytes.copy_from_slice(&word.to_le_bytes());
                    }
                    let piece = (io.widen)(&piece);
                    for r in 0..4 {
                        let first = (g + 8 * (r & 1)) * k + each * t + 4 * each * (r >> 1);
                        a.values[first..first + each].copy_from_slice(&piece[r * each..][..each]);
                    }
                }
            }
        }
        let mut b = Matrix::zeros(k * n, (1, n));
        b.load(io, io.right, 0, n, &mut places, at);
        let mut d = vec![S::default(); 16 * n];
        let at_lane = |l: u32, e: usize| {
            let (g, t) = (l as usize / 4, l as usize % 4);
            (g + 8 * (e >> 1 & 1)) * n + 8 * (e / 4) + 2 * t + (e & 1)
        };
        if io.accumulate {
            for l in 0..32 {
                for e in 0..n / 2 {
                    // SAFETY: each lane's accumulators; the lanes wait.
                    d[at_lane(l, e)] = unsafe { *lanes.get(l).acc.add(e) };
                }
            }
        }
        S::add_product(&mut d, &a.values, &b.values, n);
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
