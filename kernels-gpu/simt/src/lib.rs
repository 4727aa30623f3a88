//! A SIMT emulator: runs GPU kernels written in Rust on the CPU.
//!
//! Every GPU thread is a fiber. The fibers of a block share one OS thread and
//! change over only at collectives (barriers, shuffles, votes, ...), so a block
//! needs no locks; blocks run in parallel. Because the scheduler knows what
//! each thread waits for, a collective that can never complete is an error
//! that names the threads and their source lines, not a hang.
//!
//! Kernels do not use this crate directly but through `cuda_std`, whose
//! functions are PTX instructions on the GPU and calls into here elsewhere.
//! Host code uses [`Launch`] and [`Buffer`].

mod asynch;
mod block;
mod dependent;
mod dot;
mod error;
mod fiber;
mod global_race;
mod launch;
mod map;
mod memory;
mod race;
mod tensor;
mod wgmma;

pub use asynch::{
    TensorTile, bulk_commit, bulk_wait, cp_async, cp_async_bulk, cp_async_bulk_tensor, cp_async_bulk_tensor_multicast,
    cp_async_commit, cp_async_mbarrier_arrive, cp_async_wait, mbarrier_arrive, mbarrier_arrive_at, mbarrier_expect_tx,
    mbarrier_init, mbarrier_invalidate, mbarrier_try_wait, store_async, store_bulk, store_bulk_tensor,
};
pub use block::{
    BarrierOp, Lanes, MAX_BARRIERS, MAX_THREADS, WARP_SIZE, block_barrier, block_barrier_arrive, warp_collective,
};
pub use dependent::Queue;
pub use dot::dot;
pub use error::{Access, Dim3, ErrorKind, LaunchError, Loc, Space, StuckThread, ThreadState};
pub use global_race::Peers;
pub use launch::{Checks, Defaults, Launch, MAX_SHARED_BYTES, Order, Region, Registered, for_each, launch};
pub use memory::{Buffer, Lent};
pub use tensor::{ldmatrix, mma, mma_m16n8k16, stmatrix};
pub use wgmma::{Left, Operand, Sum, Widen, wgmma, wgmma_commit, wgmma_wait};

use block::{Block, current};
use global_race::Touch;
use std::panic::Location;
use std::sync::atomic::{AtomicU32, Ordering};

/// Position of the running thread in its block.
#[inline(never)]
pub fn thread_idx() -> Dim3 {
    current().tid
}

/// Position of the running thread's block in the grid.
#[inline(never)]
pub fn block_idx() -> Dim3 {
    current().block().block_idx.get()
}

/// Extent of a block.
#[inline(never)]
pub fn block_dim() -> Dim3 {
    current().block().block_dim.get()
}

/// Extent of the grid.
#[inline(never)]
pub fn grid_dim() -> Dim3 {
    current().block().grid_dim.get()
}

/// Position of the running thread in its warp.
#[inline(never)]
pub fn lane_id() -> u32 {
    current().lane
}

/// The running thread's block in its cluster.
#[inline]
pub fn cluster_rank() -> u32 {
    current().block().rank.get()
}

/// Blocks in a cluster.
#[inline]
pub fn cluster_size() -> u32 {
    current().block().cluster_size()
}

/// The block of this rank in the running thread's cluster.
#[track_caller]
pub(crate) fn peer<'a>(rank: u32) -> &'a Block {
    let block = current().block();
    if rank >= block.cluster_size() {
        trap(format!("block {rank} of a cluster of {} blocks", block.cluster_size()));
    }
    block.peer(rank)
}

/// `barrier.cluster.arrive.release`: counts the running thread.
#[track_caller]
pub fn cluster_arrive() {
    block::cluster_arrive(current(), true);
}

/// `barrier.cluster.arrive.relaxed`: [`cluster_arrive`] that publishes no more than what came before the thread's last fence.
#[track_caller]
pub fn cluster_arrive_relaxed() {
    block::cluster_arrive(current(), false);
}

/// `barrier.cluster.wait`: waits until all threads of the cluster have arrived.
#[track_caller]
pub fn cluster_wait() {
    block::cluster_wait(current(), Location::caller());
}

/// `mapa`: the address of a place in the shared memory of block `rank`, for [`cluster_access`].
#[track_caller]
pub fn cluster_address(offset: u32, rank: u32) -> u32 {
    let _ = peer(rank);
    rank << 24 | offset
}

/// Checks an access to shared memory of the cluster. Other blocks' memory is not checked for races.
#[track_caller]
pub fn cluster_access(address: u32, bytes: usize, access: Access) -> *mut u8 {
    let at = Location::caller();
    let lane = current();
    let block = peer(address >> 24);
    let offset = (address & 0xff_ffff) as usize;
    let place = block.shared.base().wrapping_add(offset);
    if std::ptr::eq(block, lane.block()) {
        check_shared(place as usize, bytes, bytes, access);
        return place;
    }
    if let Err(e) = block.check_bounds(lane.linear, place as usize, bytes, access, at) {
        lane.fault(e);
    }
    if access != Access::Read && block.race_on.get() {
        block.with_race(|race| race.set_init(offset, bytes));
    }
    place
}

/// Dynamic shared memory of the running thread's block: address and length.
#[inline(never)]
pub fn shared_memory() -> (*mut u8, usize) {
    let shared = &current().block().shared;
    (shared.base(), shared.len())
}

/// Offset of an address from the beginning of the block's shared memory; `u32::MAX`, which no access is allowed at,
/// if it is before it or far beyond.
#[inline(never)]
pub fn shared_offset(address: usize) -> u32 {
    let offset = address.wrapping_sub(shared_memory().0 as usize);
    if offset < 1 << 31 { offset as u32 } else { u32::MAX }
}

/// `bar.warp.sync`: a rendezvous that also orders memory among its lanes.
#[inline(never)]
#[track_caller]
pub fn sync_warp(mask: u32) {
    warp_collective("sync_warp", mask, &mut (), |lanes| {
        let block = current().block();
        if block.race_on.get() {
            let (mut threads, mut n) = ([0; WARP_SIZE as usize], 0);
            for lane in lanes.lanes() {
                threads[n] = lanes.linear(lane);
                n += 1;
            }
            block.with_race(|race| race.warp_barrier(&threads[..n]));
        }
    });
}

/// Lets other threads run: what a spin loop must call in its body.
#[track_caller]
pub fn spin(op: &'static str) {
    current().spin(op, Location::caller());
}

/// To be called by every atomic operation: turns long runs of them into
/// [`spin`]s, so that spinning on an atomic cannot hang the emulator.
#[inline]
#[track_caller]
pub fn poll(op: &'static str) {
    current().poll(op, Location::caller());
}

/// Ends the launch with an error.
#[cold]
#[track_caller]
pub fn trap(message: impl Into<String>) -> ! {
    let lane = current();
    let at = Location::caller();
    lane.fault(ErrorKind::Trap { thread: lane.tid, message: message.into(), at })
}

/// Ends the launch with an error blamed on another lane of the warp and on the
/// call site `at`: for use while a collective completes.
#[cold]
pub fn trap_lane(lane: u32, at: Loc, message: impl Into<String>) -> ! {
    let me = current();
    let thread = me.block().thread((me.linear & !31) + lane);
    me.fault(ErrorKind::Trap { thread, message: message.into(), at })
}

/// What accesses of one place in a kernel have in common.
#[derive(Clone, Copy, Debug)]
pub struct Form {
    /// How many bytes each has.
    pub bytes: usize,
    /// What their addresses are multiples of.
    pub align: usize,
    /// What they do.
    pub access: Access,
    /// Bytes of an element of the memory.
    pub element: usize,
}

impl Form {
    /// Reads or writes of a `V`.
    pub const fn of<V>(write: bool) -> Self {
        let access = if write { Access::Write } else { Access::Read };
        Self { bytes: size_of::<V>(), align: align_of::<V>(), access, element: size_of::<V>() }
    }

    /// Atomic accesses to a `T`.
    pub const fn atomic<T>() -> Self {
        Self { access: Access::Atomic, ..Self::of::<T>(true) }
    }

    /// The same in memory of `T`.
    pub const fn among<T>(self) -> Self {
        Self { element: size_of::<T>(), ..self }
    }
}

/// A registered buffer, as accesses of one kernel's thread need it.
#[derive(Clone, Copy, Debug)]
pub struct Window {
    /// All of it.
    pub region: Region,
    /// As many bytes from its beginning on may be accessed without a call of [`global_access`]: none if every access is to be reported.
    pub unreported: usize,
}

/// The registered buffer around `address`.
#[inline(never)]
pub fn window_of(address: usize) -> Window {
    let block = current().block();
    let region = block.region_of(address);
    Window { region, unreported: if block.slow_accesses() { 0 } else { region.hi - region.lo } }
}

/// A part of the running thread's block's shared memory.
#[derive(Clone, Copy, Debug)]
pub struct Part {
    /// Its first byte.
    pub base: *mut u8,
    /// Whether every access is to be reported by [`shared_access`].
    pub report: bool,
}

/// `bytes` of shared memory from byte `offset` on, which the launch must provide.
#[inline(never)]
#[track_caller]
pub fn shared_part(offset: usize, bytes: usize) -> Part {
    let block = current().block();
    let (end, have) = (offset + bytes, block.shared.len());
    if end > have {
        trap(format!("kernel uses {end} bytes of shared memory, the launch provides {have}"));
    }
    Part { base: block.shared.base().wrapping_add(offset), report: block.slow_accesses() }
}

/// An access to element `i` of a part of shared memory with `len` elements, at this `address`: checks its bounds and
/// its alignment, may be preempted, and is checked for races.
#[cold]
#[track_caller]
pub fn shared_access(address: usize, len: usize, i: usize, form: &Form) {
    let fits = i
        .checked_mul(form.element)
        .and_then(|o| o.checked_add(form.bytes))
        .is_some_and(|end| end <= len * form.element);
    if !fits {
        shared_out_of_bounds(len, i, form);
    }
    check_shared(address, form.bytes, form.align, form.access);
}

/// Reports an access out of bounds of a part of shared memory, though perhaps not of all of it.
#[cold]
#[track_caller]
pub fn shared_out_of_bounds(len: usize, i: usize, form: &Form) -> ! {
    let Form { bytes, access, element, .. } = *form;
    let i = i as isize;
    trap(format!("shared {access} of {bytes} bytes at element {i} of a part of {len} elements of {element} bytes"))
}

/// Checks an access to shared memory.
#[track_caller]
pub fn check_shared(address: usize, bytes: usize, align: usize, access: Access) {
    let at = Location::caller();
    let lane = current();
    lane.maybe_preempt();
    if !address.is_multiple_of(align) {
        lane.fault(ErrorKind::Misaligned { thread: lane.tid, space: Space::Shared, address, align, at });
    }
    if let Err(e) = lane.block().check_shared(lane.linear, address, bytes, access, at) {
        lane.fault(e);
    }
}

/// What an atomic access does, and how it orders others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AtomicOrder {
    /// It reads.
    pub reads: bool,
    /// It writes.
    pub writes: bool,
    /// Earlier accesses of the thread come before it.
    pub release: bool,
    /// Only among the threads of the block.
    pub block: bool,
}

/// To be called before every atomic operation, which the caller then does with the host's atomics: checks bounds,
/// alignment and races, and lets others run now and then.
#[inline]
#[track_caller]
pub fn atomic_access(op: &'static str, address: usize, bytes: usize, order: AtomicOrder) {
    poll(op);
    let shared = is_shared(address);
    let mut region = Region::ANY;
    if shared {
        check_shared(address, bytes, bytes, Access::Atomic);
    } else {
        check_alignment(address, bytes);
        region = current().block().region_of(address);
        if address < region.lo || address.saturating_add(bytes) > region.hi {
            out_of_bounds(region, address, bytes, Access::Atomic);
        }
        current().maybe_preempt();
    }
    let lane = current();
    let block = lane.block();
    if block.race_on.get() {
        if !shared {
            let touch = Touch { thread: lane.linear, writes: order.writes, atomic: true, at: Location::caller() };
            if let Err(e) = block.check_global_race(touch, region.lo, address, bytes) {
                lane.fault(e);
            }
        }
        let beyond = !shared && !order.block;
        block.synchronise(lane.linear, address, beyond, order.reads, order.writes, order.release);
    }
}

/// To be called after an atomic operation that read: what was released to its location until then, by another OS thread
/// perhaps between [`atomic_access`] and the operation, is ordered before what follows.
#[inline]
pub fn atomic_seen(address: usize, order: AtomicOrder) {
    let lane = current();
    let block = lane.block();
    if block.race_on.get() && order.reads && !is_shared(address) && !order.block {
        block.synchronise(lane.linear, address, true, true, false, false);
    }
}

/// Whether an address is in the running thread's block's shared memory.
fn is_shared(address: usize) -> bool {
    let (base, len) = shared_memory();
    (base as usize..base as usize + len).contains(&address)
}

/// `atom.add.f32`, to be called after [`atomic_access`]: returns what was there. In global memory subnormal summands and sums become
/// zeros of the same sign, as on a GPU; in shared memory they stay.
///
/// # Safety
/// The word is valid and aligned, and others access it atomically only.
pub unsafe fn add_f32(ptr: *mut f32, value: f32) -> f32 {
    let shared = is_shared(ptr as usize);
    let flush = |x: f32| if x.is_subnormal() && !shared { 0f32.copysign(x) } else { x };
    // SAFETY: forwarded to the caller.
    let word = unsafe { AtomicU32::from_ptr(ptr.cast()) };
    let add = |bits| Some(flush(flush(f32::from_bits(bits)) + flush(value)).to_bits());
    let (Ok(old) | Err(old)) = word.fetch_update(Ordering::SeqCst, Ordering::SeqCst, add);
    f32::from_bits(old)
}

/// An access to global memory in the buffer `region`: checks its bounds and its alignment, may be preempted, and is
/// checked for races.
#[cold]
#[track_caller]
pub fn global_access(region: Region, address: usize, form: &Form) {
    let Form { bytes, align, access, .. } = *form;
    if address < region.lo || address > region.hi.wrapping_sub(bytes) || region.hi == 0 {
        out_of_bounds(region, address, bytes, access);
    }
    if !address.is_multiple_of(align) {
        misaligned(address, align);
    }
    let lane = current();
    lane.maybe_preempt();
    if lane.block().race_on.get() {
        let touch =
            Touch { thread: lane.linear, writes: access != Access::Read, atomic: false, at: Location::caller() };
        if let Err(e) = lane.block().check_global_race(touch, region.lo, address, bytes) {
            lane.fault(e);
        }
    }
}

/// `griddepcontrol.wait`: what was launched before has ended.
pub fn dependent_wait() {
    let lane = current();
    if lane.block().race_on.get() {
        lane.block().with_race(|race| race.dependent_wait(lane.linear));
    }
}

/// `griddepcontrol.launch_dependents`: as far as this block goes, the next launch may begin.
pub fn launch_dependents() {
    let lane = current();
    if lane.block().race_on.get() {
        lane.block().with_race(|race| race.launch_dependents(lane.linear));
    }
}

/// A memory fence of the running thread, of wider scope than the block or not.
#[inline]
pub fn fence(beyond_block: bool) {
    std::sync::atomic::fence(Ordering::SeqCst);
    let lane = current();
    if lane.block().race_on.get() {
        lane.block().fence(lane.linear, beyond_block);
    }
}

/// Checks that an address in global memory is a multiple of `align`.
#[inline]
#[track_caller]
pub fn check_alignment(address: usize, align: usize) {
    if !address.is_multiple_of(align) {
        misaligned(address, align);
    }
}

/// Reports an access outside `region`.
#[cold]
#[track_caller]
fn out_of_bounds(region: Region, address: usize, bytes: usize, access: Access) -> ! {
    let lane = current();
    lane.fault(ErrorKind::OutOfBounds {
        thread: lane.tid,
        space: Space::Global,
        access,
        offset: address as i64 - region.lo as i64,
        bytes,
        len: region.hi - region.lo,
        at: Location::caller(),
    })
}

/// Reports an access that is not aligned to its type.
#[cold]
#[track_caller]
fn misaligned(address: usize, align: usize) -> ! {
    let lane = current();
    let at = Location::caller();
    lane.fault(ErrorKind::Misaligned { thread: lane.tid, space: Space::Global, address, align, at })
}
