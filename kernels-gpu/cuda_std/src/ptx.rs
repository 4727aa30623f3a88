//! LLVM's NVPTX intrinsics for everything that threads do together.
//!
//! Not inline assembly: rustc does not mark `asm!` as `convergent`, so LLVM may
//! move or duplicate it across branches, which breaks `.aligned` instructions.
//! These intrinsics are declared convergent by LLVM itself, and they take
//! immediates and predicates, so the code is better too.

/// A convergent instruction without cost: stops LLVM from duplicating its basic block. The PTX builder drops it.
#[allow(dead_code, reason = "unused on sm_80 as long as nothing there needs it")]
#[inline(always)]
pub(crate) fn convergence_anchor() {
    // SAFETY: reads the active mask.
    unsafe { activemask() };
}

unsafe extern "unadjusted" {
    /// With a NaN if there is one. Rust's own intrinsic is a sequence of comparisons on this target.
    #[link_name = "llvm.maximum.f32"]
    pub(crate) fn maximum(a: f32, b: f32) -> f32;

    #[link_name = "llvm.nvvm.read.ptx.sreg.laneid"]
    pub(crate) fn lane_id() -> u32;
    #[link_name = "llvm.nvvm.activemask"]
    pub(crate) fn activemask() -> u32;
    #[link_name = "llvm.nvvm.barrier.cta.red.popc.aligned.all"]
    pub(crate) fn barrier_popc(id: u32, pred: bool) -> u32;
    #[link_name = "llvm.nvvm.barrier.cta.red.and.aligned.all"]
    pub(crate) fn barrier_and(id: u32, pred: bool) -> bool;
    #[link_name = "llvm.nvvm.barrier.cta.red.and.aligned.count"]
    pub(crate) fn barrier_and_named(id: u32, threads: u32, pred: bool) -> bool;
    #[link_name = "llvm.nvvm.barrier.cta.red.or.aligned.all"]
    pub(crate) fn barrier_or(id: u32, pred: bool) -> bool;
    #[link_name = "llvm.nvvm.barrier.cta.sync.aligned.count"]
    pub(crate) fn barrier_sync(id: u32, threads: u32);
    #[link_name = "llvm.nvvm.barrier.cta.arrive.aligned.count"]
    pub(crate) fn barrier_arrive(id: u32, threads: u32);

    #[link_name = "llvm.nvvm.bar.warp.sync"]
    pub(crate) fn warp_sync(mask: u32);
    #[link_name = "llvm.nvvm.shfl.sync.idx.i32"]
    pub(crate) fn warp_shuffle_idx(mask: u32, word: u32, lane: u32, control: u32) -> u32;
    #[link_name = "llvm.nvvm.shfl.sync.up.i32"]
    pub(crate) fn warp_shuffle_up(mask: u32, word: u32, delta: u32, control: u32) -> u32;
    #[link_name = "llvm.nvvm.shfl.sync.down.i32"]
    pub(crate) fn warp_shuffle_down(mask: u32, word: u32, delta: u32, control: u32) -> u32;
    #[link_name = "llvm.nvvm.shfl.sync.bfly.i32"]
    pub(crate) fn warp_shuffle_xor(mask: u32, word: u32, lane_mask: u32, control: u32) -> u32;
    #[link_name = "llvm.nvvm.vote.ballot.sync"]
    pub(crate) fn ballot(mask: u32, pred: bool) -> u32;
    #[link_name = "llvm.nvvm.match.any.sync.i32"]
    pub(crate) fn match_any(mask: u32, word: u32) -> u32;

    #[link_name = "llvm.nvvm.redux.sync.add"]
    pub(crate) fn warp_reduce_add_u32(word: u32, mask: u32) -> u32;
    #[link_name = "llvm.nvvm.redux.sync.add"]
    pub(crate) fn warp_reduce_add_i32(word: i32, mask: u32) -> i32;
    #[link_name = "llvm.nvvm.redux.sync.umin"]
    pub(crate) fn warp_reduce_min_u32(word: u32, mask: u32) -> u32;
    #[link_name = "llvm.nvvm.redux.sync.umax"]
    pub(crate) fn warp_reduce_max_u32(word: u32, mask: u32) -> u32;
    #[link_name = "llvm.nvvm.redux.sync.min"]
    pub(crate) fn warp_reduce_min_i32(word: i32, mask: u32) -> i32;
    #[link_name = "llvm.nvvm.redux.sync.max"]
    pub(crate) fn warp_reduce_max_i32(word: i32, mask: u32) -> i32;
    #[link_name = "llvm.nvvm.redux.sync.and"]
    pub(crate) fn warp_reduce_and(word: u32, mask: u32) -> u32;
    #[link_name = "llvm.nvvm.redux.sync.or"]
    pub(crate) fn warp_reduce_or(word: u32, mask: u32) -> u32;
    #[link_name = "llvm.nvvm.redux.sync.xor"]
    pub(crate) fn warp_reduce_xor(word: u32, mask: u32) -> u32;
}
