//! Warpgroup matrix products (`wgmma`, sm_90a): four warps multiply 64 rows of A by up to 256 columns of B, both in
//! shared memory behind [`Descriptor`]s, or A in registers; the sums stay in registers.
//!
//! All 128 threads of a warpgroup (aligned to 128 in a one-dimensional block) take part. A product is asynchronous:
//! its operands must stay as they are, and its accumulators must not be touched, until a [`wait`]. The order is
//!
//! 1. operands are in shared memory (TMA and its mbarrier, or stores, [`tma::fence_async`](crate::tma::fence_async) and
//!    a barrier);
//! 2. [`Accumulator::multiply`], any number of times: each is `wgmma.fence`, some steps along K and
//!    `wgmma.commit_group` in one piece of assembly, so that nothing of LLVM's comes between;
//! 3. `wait::<PENDING>(&mut acc)`, which ties the accumulators to that point of the program.
//!
//! Loops around products are written `loop { …; if last { break } }`: a way around the body would merge other values
//! into the accumulators, and ptxas would then serialise the products.
//!
//! # Layouts
//!
//! Element `4 j + 2 h + c` of a thread's accumulators is row `16 (warp % 4) + lane / 4 + 8 h` and column
//! `8 j + 2 (lane % 4) + c`. A in registers is laid out as in [`mma`](crate::mma), each warp its 16 rows; so rounded to
//! 16 bits the accumulators of one product are, eight by eight, the A of the next.
//!
//! An operand in shared memory is a tile with lines of 128 bytes and the 128-byte swizzle
//! ([`Swizzle::B128`](crate::tma::Swizzle)), as TMA leaves it, beginning at a multiple of 1024 bytes (or of 512 with
//! lines of 64 bytes and so on, see [`Descriptor::with_lines`]).

use crate::shared::SharedAddress;
use crate::tma::Swizzle;
use core::marker::PhantomData;

mod sealed {
    pub trait Sealed {}
}

/// Which dimension of an operand is contiguous: [`K`] or [`Mn`].
pub trait Major: Copy + sealed::Sealed {
    #[doc(hidden)]
    const TRANSPOSED: u32;
}
/// K is contiguous: rows of A, columns of B lie along the lines.
#[derive(Clone, Copy, Debug)]
pub struct K;
/// The M dimension of A or the N dimension of B is contiguous. For 16-bit types only.
#[derive(Clone, Copy, Debug)]
pub struct Mn;
impl sealed::Sealed for K {}
impl sealed::Sealed for Mn {}
impl Major for K {
    const TRANSPOSED: u32 = 0;
}
impl Major for Mn {
    const TRANSPOSED: u32 = 1;
}

/// Where an operand lies in shared memory: `wgmma`'s matrix descriptor.
#[derive(Clone, Copy, Debug)]
pub struct Descriptor<M: Major> {
    /// Start address and leading stride, in units of 16 bytes.
    lo: u32,
    /// Stride and swizzle.
    hi: u32,
    /// What a step along K (32 bytes of it) adds to `lo`.
    step: u32,
    major: PhantomData<M>,
}

/// The bits of the upper word: stride between groups of 8 lines, and the kind of swizzle.
const fn upper(swizzle: Swizzle) -> u32 {
    let kind = match swizzle {
        Swizzle::None => 0,
        Swizzle::B128 => 1,
        Swizzle::B64 => 2,
        Swizzle::B32 => 3,
    };
    kind << 30 | (8 * swizzle.line_bytes() as u32) >> 4
}

impl Descriptor<K> {
    /// A K-major tile with lines of 128 bytes: row (or column of B) `i` is line `i`.
    #[inline(always)]
    pub fn new(tile: impl SharedAddress) -> Self {
        Self::with_lines(tile, Swizzle::B128)
    }

    /// [`new`](Self::new) with the lines of another swizzle: of 64 or 32 bytes.
    #[inline(always)]
    pub fn with_lines(tile: impl SharedAddress, swizzle: Swizzle) -> Self {
        let lo = (tile.shared_address() & 0x3_ffff) >> 4 | 1 << 16;
        Self { lo, hi: upper(swizzle), step: 2, major: PhantomData }
    }
}

impl Descriptor<K> {
    /// The tile with `stride` bytes from eight lines to the next eight (a multiple of the swizzle's pattern), where tiles
    /// are interleaved.
    #[inline(always)]
    pub fn with_stride(self, stride: u32) -> Self {
        Self { hi: self.hi & !0x3fff | stride >> 4, ..self }
    }
}

impl Descriptor<Mn> {
    /// The tile with `stride` bytes from eight lines to the next eight (a multiple of the swizzle's pattern), where tiles
    /// are interleaved.
    #[inline(always)]
    pub fn with_stride(self, stride: u32) -> Self {
        // A step of K = 16 is two groups of eight lines.
        Self { hi: self.hi & !0x3fff | stride >> 4, step: stride >> 3, ..self }
    }

    /// An MN-major tile with lines of 128 bytes: line `k` holds 64 elements of the M or N dimension, for that `k`; the
    /// next 64 are `leading` bytes further on (a multiple of 16; `128 K` where parts of 64 columns lie one after
    /// another).
    #[inline(always)]
    pub fn new(tile: impl SharedAddress, leading: u32) -> Self {
        Self::with_lines(tile, leading, Swizzle::B128)
    }

    /// [`new`](Self::new) with the lines of another swizzle: of 64 or 32 bytes.
    #[inline(always)]
    pub fn with_lines(tile: impl SharedAddress, leading: u32, swizzle: Swizzle) -> Self {
        let lo = (tile.shared_address() & 0x3_ffff) >> 4 | leading >> 4 << 16;
        // 16 lines are a step of K = 16.
        Self { lo, hi: upper(swizzle), step: swizzle.line_bytes() as u32, major: PhantomData }
    }
}

impl<M: Major> Descriptor<M> {
    /// The tile `bytes` further on, a multiple of 16 (and of the swizzle's pattern, except along K).
    #[inline(always)]
    pub fn offset(self, bytes: u32) -> Self {
        Self { lo: self.lo + (bytes >> 4), ..self }
    }

    /// The tile `steps` steps further along K: 32 bytes in a K-major tile, 16 lines in an MN-major one.
    #[inline(always)]
    pub fn advance(self, steps: u32) -> Self {
        Self { lo: self.lo + steps * self.step, ..self }
    }

    /// The descriptor as the hardware takes it.
    #[inline(always)]
    pub fn bits(self) -> u64 {
        (self.hi as u64) << 32 | self.lo as u64
    }

    #[cfg(not(target_arch = "nvptx64"))]
    fn operand(self) -> simt::Operand {
        simt::Operand { descriptor: self.bits(), mn_major: M::TRANSPOSED == 1 }
    }
}

/// Types of sums: `f32`, and `i32` of products of `i8`.
pub trait Sum: Copy + Default + sealed::Sealed + Emulated {
    /// Rounded to the nearest.
    fn to_f32(self) -> f32;
    /// As a word, for another block.
    fn to_bits(self) -> u32;
    /// The reverse of [`to_bits`](Self::to_bits).
    fn from_bits(word: u32) -> Self;
    /// The sum of two: rounded in `f32`, exact in `i32` (it wraps around).
    fn plus(self, other: Self) -> Self;
}
#[cfg(target_arch = "nvptx64")]
use Copy as Emulated;
/// What the SIMT device adds products up in; nothing on the GPU.
#[cfg(not(target_arch = "nvptx64"))]
use simt::Sum as Emulated;
impl sealed::Sealed for f32 {}
impl Sum for f32 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }
    #[inline(always)]
    fn to_bits(self) -> u32 {
        self.to_bits()
    }
    #[inline(always)]
    fn from_bits(word: u32) -> Self {
        Self::from_bits(word)
    }
    #[inline(always)]
    fn plus(self, other: Self) -> Self {
        self + other
    }
}
impl sealed::Sealed for i32 {}
impl Sum for i32 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self as f32
    }
    #[inline(always)]
    fn to_bits(self) -> u32 {
        self.cast_unsigned()
    }
    #[inline(always)]
    fn from_bits(word: u32) -> Self {
        word.cast_signed()
    }
    #[inline(always)]
    fn plus(self, other: Self) -> Self {
        self.wrapping_add(other)
    }
}

/// Types of the elements of A and B, whose products have sums of type `S`: [`half::bf16`], [`half::f16`], [`E4M3`](crate::E4M3) and
/// [`E5M2`](crate::E5M2) in `f32`, `i8` in `i32` (exact; they wrap around). A step along K is 32 bytes of them.
pub trait Input<S: Sum = f32>: crate::Element + sealed::Sealed {
    #[doc(hidden)]
    const ID: u32;
    #[cfg(not(target_arch = "nvptx64"))]
    #[doc(hidden)]
    const WIDEN: simt::Widen<S>;
}
macro_rules! inputs {
    ($($t:ty = $id:literal, $sum:ty, |$b:ident: [u8; $bytes:literal]| $widen:expr;)*) => { $(
        impl sealed::Sealed for $t {}
        impl Input<$sum> for $t {
            const ID: u32 = $id;
            #[cfg(not(target_arch = "nvptx64"))]
            const WIDEN: simt::Widen<$sum> = |piece| {
                let mut values = [Default::default(); 16];
                for (value, &$b) in values.iter_mut().zip(piece.as_chunks::<$bytes>().0) {
                    *value = $widen;
                }
                values
            };
        }
    )* };
}
inputs! {
    half::bf16 = 0, f32, |b: [u8; 2]| half::bf16::from_le_bytes(b).to_f32();
    half::f16 = 1, f32, |b: [u8; 2]| half::f16::from_le_bytes(b).to_f32();
    crate::E4M3 = 2, f32, |b: [u8; 1]| crate::E4M3(b[0]).to_f32_const();
    crate::E5M2 = 3, f32, |b: [u8; 1]| crate::E5M2(b[0]).to_f32_const();
    i8 = 4, i32, |b: [u8; 1]| b[0] as i8 as i32;
}

/// Registers that products write, whatever their type.
pub trait Registers: Copy + sealed::Sealed {
    /// Ties the accumulators to this point of the program: reads of them cannot move above it. What [`wait`] does for
    /// one accumulator, where several are in use.
    fn pin(&mut self);

    #[doc(hidden)]
    #[track_caller]
    fn wait_group<const PENDING: usize>(&mut self);
}

/// One thread's accumulators of 64xN sums: `[f32; N / 2]`, for N of 8, 16, 24, 32, 48, 64, 72, 80, 96, 104, 112,
/// 128, 136, 144, 152, 160, 168, 176, 192, 208, 224 and 256, and `[i32; N / 2]` for most of them.
pub trait Accumulator<S: Sum = f32>: Registers {
    /// Columns.
    const N: usize;

    /// Zeroes.
    fn zero() -> Self;

    /// `self = A B (+ self if accumulate)` over `STEPS` steps along K (1, 2 or 4), as one group.
    ///
    /// # Safety
    /// The whole warpgroup is here with the same descriptors, which describe readable tiles that stay as they are until
    /// a [`wait`]; nothing but further products touches the accumulators until then.
    #[track_caller]
    unsafe fn multiply<T: Input<S>, const STEPS: usize, A: Major, B: Major>(
        &mut self,
        a: Descriptor<A>,
        b: Descriptor<B>,
        accumulate: bool,
    );

    /// [`multiply`](Self::multiply) with A in registers, four words for each step.
    ///
    /// # Safety
    /// As for [`multiply`](Self::multiply).
    #[track_caller]
    unsafe fn multiply_registers<T: Input<S>, const STEPS: usize, B: Major>(
        &mut self,
        a: [[u32; 4]; STEPS],
        b: Descriptor<B>,
        accumulate: bool,
    );

    /// One step without fence and commit, for groups of other shapes: between [`fence`] and [`commit_group`].
    ///
    /// # Safety
    /// As for [`multiply`](Self::multiply).
    #[track_caller]
    unsafe fn step<T: Input<S>, A: Major, B: Major>(&mut self, a: Descriptor<A>, b: Descriptor<B>, accumulate: bool);
}

/// `wgmma.wait_group`: all but the latest `PENDING` groups are complete, those of `acc` among them.
#[inline(always)]
#[track_caller]
pub fn wait<const PENDING: usize>(acc: &mut impl Registers) {
    acc.wait_group::<PENDING>();
}

/// [`wait`] for what operands are read by only: sums are not to be touched yet.
#[inline(always)]
#[track_caller]
pub fn wait_operands<const PENDING: usize>() {
    #[cfg(target_arch = "nvptx64")]
    // SAFETY: waits.
    unsafe {
        sync_ptx!("wgmma.wait_group.sync.aligned {n};", n = const PENDING, options(nostack, preserves_flags))
    };
    #[cfg(not(target_arch = "nvptx64"))]
    simt::wgmma_wait(PENDING);
}

/// `wgmma.fence`: before the first [`Accumulator::step`], and whenever registers were written by other means.
#[inline(always)]
pub fn fence() {
    #[cfg(target_arch = "nvptx64")]
    // SAFETY: a fence of the whole warpgroup.
    unsafe {
        sync_ptx!("wgmma.fence.sync.aligned;", options(nostack, preserves_flags))
    };
}

/// `wgmma.commit_group`: ends a group of steps.
#[inline(always)]
pub fn commit_group() {
    #[cfg(target_arch = "nvptx64")]
    // SAFETY: concerns the warpgroup's products only.
    unsafe {
        sync_ptx!("wgmma.commit_group.sync.aligned;", options(nostack, preserves_flags))
    };
    #[cfg(not(target_arch = "nvptx64"))]
    simt::wgmma_commit();
}

/// Gives registers back, so that other warpgroups of the block can [`increase_registers`]: `setmaxnreg.dec`. `N` is a
/// multiple of 8 from 24 to 256. The kernel needs launch bounds.
#[inline(always)]
pub fn decrease_registers<const N: u32>() {
    const { assert!(N.is_multiple_of(8) && N >= 24 && N <= 256) };
    #[cfg(target_arch = "nvptx64")]
    // SAFETY: ptxas keeps to the limit.
    unsafe {
        sync_ptx!("setmaxnreg.dec.sync.aligned.u32 {n};", n = const N, options(nostack, preserves_flags))
    };
}

/// Takes registers that others gave back, waiting for them if need be: `setmaxnreg.inc`.
#[inline(always)]
pub fn increase_registers<const N: u32>() {
    const { assert!(N.is_multiple_of(8) && N >= 24 && N <= 256) };
    #[cfg(target_arch = "nvptx64")]
    // SAFETY: as above.
    unsafe {
        sync_ptx!("setmaxnreg.inc.sync.aligned.u32 {n};", n = const N, options(nostack, preserves_flags))
    };
}

/// The parts of the assembly text of a group. Accumulators are the operands by number.
#[cfg(target_arch = "nvptx64")]
macro_rules! text {
    (list ($i0:literal $($i:literal)*)) => { concat!("{{{", $i0, "}" $(, ", {", $i, "}")*, "}}") };
    // A of a step, if it is in registers.
    (words 0) => { "{{{a0}, {a1}, {a2}, {a3}}}" };
    (words 1) => { "{{{a4}, {a5}, {a6}, {a7}}}" };
    (words 2) => { "{{{a8}, {a9}, {a10}, {a11}}}" };
    (words 3) => { "{{{a12}, {a13}, {a14}, {a15}}}" };
    // The first step overwrites the accumulators or adds to them, the others add.
    (predicate 0) => { "%p" };
    (predicate $s:literal) => { "%q" };
    (advance 0 $step:literal) => { "" };
    (advance $s:literal $step:literal) => { $step };
    (types 0) => { "k16.f32.bf16.bf16" };
    (types 1) => { "k16.f32.f16.f16" };
    (types 2) => { "k32.f32.e4m3.e4m3" };
    (types 3) => { "k32.f32.e5m2.e5m2" };
    (types 4) => { "k32.s32.s8.s8" };
    // The signs of A and B, which integers do not choose.
    (signs 4) => { "" };
    (signs $type:literal) => { ", 1, 1" };
    // Whether operands are transposed; 8-bit types have no choice.
    (transpose shared 0) => { ", {ta}, {tb}" };
    (transpose shared 1) => { ", {ta}, {tb}" };
    (transpose registers 0) => { ", {tb}" };
    (transpose registers 1) => { ", {tb}" };
    (transpose $a:ident $type:literal) => { "" };
}

/// A group in one piece: fence, steps, commit. `%x` and `%y` are the low words of the descriptors.
#[cfg(target_arch = "nvptx64")]
macro_rules! group {
    // Both operands in shared memory.
    (shared ($acc:ident $a:ident $b:ident $d:ident $A:ident $B:ident) $n:literal $type:tt [$($s:tt)*] $list:tt
        [$($i:literal)*]) => {
        sync_ptx!(
            concat!(
                "{{ .reg .pred %p, %q; .reg .b32 %x, %y; .reg .b64 %a, %b; // {ta}{tb}{sa}{sb}\n\t",
                "setp.ne.b32 %p, {d}, 0; setp.eq.b32 %q, 0, 0; mov.b32 %x, {al}; mov.b32 %y, {bl};\n\t",
                "wgmma.fence.sync.aligned;\n\t",
                $(
                    text!(advance $s "add.u32 %x, %x, {sa}; add.u32 %y, %y, {sb}; "),
                    "mov.b64 %a, {{%x, {ah}}}; mov.b64 %b, {{%y, {bh}}};\n\t",
                    "wgmma.mma_async.sync.aligned.m64n", $n, text!(types $type), " ", text!(list $list), ", %a, %b, ",
                    text!(predicate $s), text!(signs $type), text!(transpose shared $type), ";\n\t",
                )*
                "wgmma.commit_group.sync.aligned; }}"
            ),
            $(inout(reg32) $acc[$i],)*
            al = in(reg32) $a.lo, ah = in(reg32) $a.hi, sa = in(reg32) $a.step,
            bl = in(reg32) $b.lo, bh = in(reg32) $b.hi, sb = in(reg32) $b.step,
            d = in(reg32) $d as u32, ta = const $A::TRANSPOSED, tb = const $B::TRANSPOSED,
            options(nostack, preserves_flags)
        )
    };
    // A in registers: four words a step.
    (registers ($acc:ident $a:ident $b:ident $d:ident $B:ident) $n:literal $type:tt [$($s:tt)*] $list:tt
        [$($i:literal)*] ($($word:ident $step:literal $w:literal),*)) => {
        sync_ptx!(
            concat!(
                "{{ .reg .pred %p, %q; .reg .b32 %y; .reg .b64 %b; // {tb}{sb}\n\t",
                "setp.ne.b32 %p, {d}, 0; setp.eq.b32 %q, 0, 0; mov.b32 %y, {bl};\n\t",
                "wgmma.fence.sync.aligned;\n\t",
                $(
                    text!(advance $s "add.u32 %y, %y, {sb}; "), "mov.b64 %b, {{%y, {bh}}};\n\t",
                    "wgmma.mma_async.sync.aligned.m64n", $n, text!(types $type), " ", text!(list $list), ", ",
                    text!(words $s), ", %b, ", text!(predicate $s), text!(signs $type),
                    text!(transpose registers $type), ";\n\t",
                )*
                "wgmma.commit_group.sync.aligned; }}"
            ),
            $(inout(reg32) $acc[$i],)*
            $($word = in(reg32) $a[$step][$w],)*
            bl = in(reg32) $b.lo, bh = in(reg32) $b.hi, sb = in(reg32) $b.step,
            d = in(reg32) $d as u32, tb = const $B::TRANSPOSED,
            options(nostack, preserves_flags)
        )
    };
    // One step, both operands in shared memory, neither fence nor commit.
    (step ($acc:ident $a:ident $b:ident $d:ident $A:ident $B:ident) $n:literal $type:tt $list:tt [$($i:literal)*]) => {
        sync_ptx!(
            concat!(
                "{{ .reg .pred %p; .reg .b64 %a, %b; // {ta}{tb}\n\t",
                "setp.ne.b32 %p, {d}, 0; mov.b64 %a, {{{al}, {ah}}}; mov.b64 %b, {{{bl}, {bh}}};\n\t",
                "wgmma.mma_async.sync.aligned.m64n", $n, text!(types $type), " ", text!(list $list),
                ", %a, %b, %p", text!(signs $type), text!(transpose shared $type), "; }}"
            ),
            $(inout(reg32) $acc[$i],)*
            al = in(reg32) $a.lo, ah = in(reg32) $a.hi, bl = in(reg32) $b.lo, bh = in(reg32) $b.hi,
            d = in(reg32) $d as u32, ta = const $A::TRANSPOSED, tb = const $B::TRANSPOSED,
            options(nostack, preserves_flags)
        )
    };
}

/// [`group`] for the type and the number of steps that are asked for.
#[cfg(target_arch = "nvptx64")]
macro_rules! choose {
    (i32 step $T:ident $vars:tt $n:literal $list:tt $i:tt) => { group!(step $vars $n 4 $list $i) };
    (i32 $kind:ident $T:ident $STEPS:ident $vars:tt $n:literal $list:tt $i:tt) => {
        choose!(@steps $STEPS, $kind $vars $n 4 $list $i)
    };
    (f32 shared $T:ident $STEPS:ident $vars:tt $n:literal $list:tt $i:tt) => {
        choose!(@types $T, $STEPS, shared $vars $n $list $i)
    };
    (f32 registers $T:ident $STEPS:ident $vars:tt $n:literal $list:tt $i:tt) => {
        choose!(@types $T, $STEPS, registers $vars $n $list $i)
    };
    (f32 step $T:ident $vars:tt $n:literal $list:tt $i:tt) => {
        match $T::ID {
            0 => group!(step $vars $n 0 $list $i),
            1 => group!(step $vars $n 1 $list $i),
            2 => group!(step $vars $n 2 $list $i),
            _ => group!(step $vars $n 3 $list $i),
        }
    };
    (@types $T:ident, $STEPS:ident, $kind:ident $vars:tt $n:literal $list:tt $i:tt) => {
        match $T::ID {
            0 => choose!(@steps $STEPS, $kind $vars $n 0 $list $i),
            1 => choose!(@steps $STEPS, $kind $vars $n 1 $list $i),
            2 => choose!(@steps $STEPS, $kind $vars $n 2 $list $i),
            _ => choose!(@steps $STEPS, $kind $vars $n 3 $list $i),
        }
    };
    (@steps $STEPS:ident, shared $vars:tt $n:literal $type:tt $list:tt $i:tt) => {
        match $STEPS {
            1 => group!(shared $vars $n $type [0] $list $i),
            2 => group!(shared $vars $n $type [0 1] $list $i),
            _ => group!(shared $vars $n $type [0 1 2 3] $list $i),
        }
    };
    (@steps $STEPS:ident, registers $vars:tt $n:literal $type:tt $list:tt $i:tt) => {
        match $STEPS {
            1 => group!(registers $vars $n $type [0] $list $i (a0 0 0, a1 0 1, a2 0 2, a3 0 3)),
            2 => group!(registers $vars $n $type [0 1] $list $i
                (a0 0 0, a1 0 1, a2 0 2, a3 0 3, a4 1 0, a5 1 1, a6 1 2, a7 1 3)),
            _ => group!(registers $vars $n $type [0 1 2 3] $list $i
                (a0 0 0, a1 0 1, a2 0 2, a3 0 3, a4 1 0, a5 1 1, a6 1 2, a7 1 3,
                 a8 2 0, a9 2 1, a10 2 2, a11 2 3, a12 3 0, a13 3 1, a14 3 2, a15 3 3)),
        }
    };
}

/// What holds for every product.
const fn check<S: Sum, T: Input<S>, const STEPS: usize, A: Major, B: Major>() {
    assert!(STEPS == 1 || STEPS == 2 || STEPS == 4, "1, 2 or 4 steps");
    assert!(T::ID < 2 || A::TRANSPOSED + B::TRANSPOSED == 0, "8-bit operands are K-major");
}

/// The SIMT device's step: 32 bytes along K.
#[cfg(not(target_arch = "nvptx64"))]
#[track_caller]
fn simt_step<S: Sum, T: Input<S>>(acc: &mut [S], a: simt::Left, b: simt::Operand, accumulate: bool) {
    simt::wgmma::<S>("wgmma", acc, a, b, accumulate, size_of::<T>(), T::WIDEN);
}

macro_rules! accumulators {
    ($sum:tt: $($n:literal $half:literal [$($i:literal)*];)*) => { $(
        impl sealed::Sealed for [$sum; $half] {}
        impl Accumulator<$sum> for [$sum; $half] {
            const N: usize = $n;

            #[inline(always)]
            fn zero() -> Self {
                [Default::default(); $half]
            }

            #[cfg_attr(target_arch = "nvptx64", inline(always))]
            #[track_caller]
            unsafe fn multiply<T: Input<$sum>, const STEPS: usize, A: Major, B: Major>(
                &mut self,
                a: Descriptor<A>,
                b: Descriptor<B>,
                accumulate: bool,
            ) {
                const { check::<$sum, T, STEPS, A, B>() };
                #[cfg(target_arch = "nvptx64")]
                // SAFETY: forwarded to the caller.
                unsafe {
                    choose!($sum shared T STEPS (self a b accumulate A B) $n ($($i)*) [$($i)*])
                };
                #[cfg(not(target_arch = "nvptx64"))]
                {
                    for s in 0..STEPS as u32 {
                        let left = simt::Left::Shared(a.advance(s).operand());
                        simt_step::<$sum, T>(self, left, b.advance(s).operand(), accumulate || s > 0);
                    }
                    commit_group();
                }
            }

            #[cfg_attr(target_arch = "nvptx64", inline(always))]
            #[track_caller]
            unsafe fn multiply_registers<T: Input<$sum>, const STEPS: usize, B: Major>(
                &mut self,
                a: [[u32; 4]; STEPS],
                b: Descriptor<B>,
                accumulate: bool,
            ) {
                const { check::<$sum, T, STEPS, K, B>() };
                #[cfg(target_arch = "nvptx64")]
                // SAFETY: forwarded to the caller.
                unsafe {
                    choose!($sum registers T STEPS (self a b accumulate B) $n ($($i)*) [$($i)*])
                };
                #[cfg(not(target_arch = "nvptx64"))]
                {
                    for s in 0..STEPS {
                        let b = b.advance(s as u32).operand();
                        simt_step::<$sum, T>(self, simt::Left::Registers(a[s]), b, accumulate || s > 0);
                    }
                    commit_group();
                }
            }

            #[cfg_attr(target_arch = "nvptx64", inline(always))]
            #[track_caller]
            unsafe fn step<T: Input<$sum>, A: Major, B: Major>(
                &mut self,
                a: Descriptor<A>,
                b: Descriptor<B>,
                accumulate: bool,
            ) {
                const { check::<$sum, T, 1, A, B>() };
                #[cfg(target_arch = "nvptx64")]
                // SAFETY: forwarded to the caller.
                unsafe {
                    choose!($sum step T (self a b accumulate A B) $n ($($i)*) [$($i)*])
                };
                #[cfg(not(target_arch = "nvptx64"))]
                simt_step::<$sum, T>(self, simt::Left::Shared(a.operand()), b.operand(), accumulate);
            }
        }
        impl Registers for [$sum; $half] {
            #[inline(always)]
            fn pin(&mut self) {
                #[cfg(target_arch = "nvptx64")]
                // SAFETY: a comment.
                unsafe {
                    sync_ptx!(concat!("//", $("{", $i, "}"),*), $(inout(reg32) self[$i],)*
                        options(nostack, preserves_flags))
                };
            }

            #[inline(always)]
            #[track_caller]
            fn wait_group<const PENDING: usize>(&mut self) {
                #[cfg(target_arch = "nvptx64")]
                // SAFETY: waits.
                unsafe {
                    sync_ptx!(concat!("wgmma.wait_group.sync.aligned {n}; //", $("{", $i, "}"),*),
                        $(inout(reg32) self[$i],)* n = const PENDING, options(nostack, preserves_flags))
                };
                #[cfg(not(target_arch = "nvptx64"))]
                simt::wgmma_wait(PENDING);
            }
        }
    )* };
}
accumulators! { f32:
    8 4 [0 1 2 3];
    16 8 [0 1 2 3 4 5 6 7];
    24 12 [0 1 2 3 4 5 6 7 8 9 10 11];
    32 16 [0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15];
    48 24 [0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23];
    64 32 [0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31];
    72 36 [
        0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35
    ];
    80 40 [
        0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36 37
        38 39
    ];
    96 48 [
        0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36
        37 38 39 40 41 42 43 44 45 46 47
    ];
    104 52 [
        0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36 37
        38 39 40 41 42 43 44 45 46 47 48 49 50 51
    ];
    112 56 [
        0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36 37
        38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55
    ];
    128 64 [
        0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36
        37 38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63
    ];
    136 68 [
        0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36 37
        38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63 64 65 66 67
    ];
    144 72 [
        0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36
        37 38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63 64 65 66 67 68 69 70
        71
    ];
    152 76 [
        0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36 37
        38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63 64 65 66 67 68 69 70 71 72
        73 74 75
    ];
    160 80 [
        0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36 37
        38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63 64 65 66 67 68 69 70 71 72
        73 74 75 76 77 78 79
    ];
    168 84 [
        0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36
        37 38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63 64 65 66 67 68 69
        70 71 72 73 74 75 76 77 78 79 80 81 82 83
    ];
    176 88 [
        0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36 37
        38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63 64 65 66 67 68 69 70 71 72
        73 74 75 76 77 78 79 80 81 82 83 84 85 86 87
    ];
    192 96 [
        0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36
        37 38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63 64 65 66 67 68 69
        70 71 72 73 74 75 76 77 78 79 80 81 82 83 84 85 86 87 88 89 90 91 92 93 94 95
    ];
    208 104 [
        0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36 37
        38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63 64 65 66 67 68 69 70 71 72
        73 74 75 76 77 78 79 80 81 82 83 84 85 86 87 88 89 90 91 92 93 94 95 96 97 98 99 100 101 102 103
    ];
    224 112 [
        0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36 37 38 39
        40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63 64 65 66 67 68 69 70 71 72 73 74 75
        76 77 78 79 80 81 82 83 84 85 86 87 88 89 90 91 92 93 94 95 96 97 98 99 100 101 102 103 104 105 106 107 108
        109 110 111
    ];
    256 128 [
        0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36
        37 38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63 64 65 66 67 68 69
        70 71 72 73 74 75 76 77 78 79 80 81 82 83 84 85 86 87 88 89 90 91 92 93 94 95 96 97 98 99 100 101
        102 103 104 105 106 107 108 109 110 111 112 113 114 115 116 117 118 119 120 121 122 123 124 125 126
        127
    ];
}
accumulators! { i32:
    8 4 [0 1 2 3];
    16 8 [0 1 2 3 4 5 6 7];
    24 12 [0 1 2 3 4 5 6 7 8 9 10 11];
    32 16 [0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15];
    48 24 [0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23];
    64 32 [0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31];
    80 40 [
        0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32
        33 34 35 36 37 38 39
    ];
    96 48 [
        0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36
        37 38 39 40 41 42 43 44 45 46 47
    ];
    112 56 [
        0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36 37
        38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55
    ];
    128 64 [
        0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36
        37 38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63
    ];
    144 72 [
        0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36
        37 38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63 64 65 66 67 68 69 70
        71
    ];
    160 80 [
        0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36 37
        38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63 64 65 66 67 68 69 70 71 72
        73 74 75 76 77 78 79
    ];
    176 88 [
        0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36 37
        38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63 64 65 66 67 68 69 70 71 72
        73 74 75 76 77 78 79 80 81 82 83 84 85 86 87
    ];
    192 96 [
        0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36
        37 38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63 64 65 66 67 68 69
        70 71 72 73 74 75 76 77 78 79 80 81 82 83 84 85 86 87 88 89 90 91 92 93 94 95
    ];
    224 112 [
        0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36 37 38 39
        40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63 64 65 66 67 68 69 70 71 72 73 74 75
        76 77 78 79 80 81 82 83 84 85 86 87 88 89 90 91 92 93 94 95 96 97 98 99 100 101 102 103 104 105 106 107 108
        109 110 111
    ];
    256 128 [
        0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36
        37 38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63 64 65 66 67 68 69
        70 71 72 73 74 75 76 77 78 79 80 81 82 83 84 85 86 87 88 89 90 91 92 93 94 95 96 97 98 99 100 101
        102 103 104 105 106 107 108 109 110 111 112 113 114 115 116 117 118 119 120 121 122 123 124 125 126
        127
    ];
}
