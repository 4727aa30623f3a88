//! Expert parallelism: kernels of several GPUs that write to and read from each other's memory.
//!
//! A *rank* is one GPU, or one of several sets of buffers on it. Each has *symmetric* buffers, the same on every rank, and
//! knows the addresses of everybody's ([`slot`]). Every operation is one launch on each rank, whose blocks
//! 1. may have to know that the others have come as far (the *entry*): one block stores a flag in each peer's memory, and every
//!    block waits for the peers' flags in its own;
//! 2. move data, straight to where it belongs;
//! 3. say so (the *exit*): each block stores a flag of its own in each rank's memory, and block 0 waits for the flags of all
//!    blocks of all ranks. Then it counts the operation as done.
//!
//! **Flags** are 64-bit words: the number of the operation (the *epoch*, which each rank counts in its own memory, so that
//! captured launches go on counting) above a signature of what the rank thinks the operation is. Nothing is ever reset, so
//! nothing can be reset too late. A peer may be one operation ahead, hence "this epoch or the next"; it cannot be two ahead, as
//! it needs our exit to get there. Any other epoch is one long ago, as not every operation has all flags: when numbers begin
//! again ([`next_epoch`]), that may well be a larger one.
//!
//! **Memory order.** Data are ordinary stores and loads. A flag is stored with release, read with acquire, both of system scope.
//! Before its exit flag a block meets at a barrier, which orders its threads' stores before the release of the thread that
//! stores the flag; release and acquire order that before what the waiting thread does next, which is to meet its own block at a
//! barrier, or to end the launch, before anybody looks at the data. What an entry flag promises (that the rank reads its
//! buffers no more) was done by earlier launches of its stream. The race detector of the SIMT device follows the same rules
//! across ranks.
//!
//! **Nothing waits for ever.** Each wait ends after a time; the first thing that goes wrong on a rank is kept in its [`fault`]
//! words, and while something is there, operations do nothing. A block that failed says so with its exit flag.

use cuda_std::atomic::{Acquire, Block, Device, Relaxed, Release, System};
use cuda_std::shared::Shared;
use cuda_std::vec::prefetch_l2;
use cuda_std::{Global, GlobalMut, struct_param, thread, unroll};

pub mod all_to_all;
pub mod barrier;
pub mod combine;
pub mod dispatch;
pub mod expert_map;
pub mod layout;

/// The most ranks.
pub const MAX_RANKS: usize = 8;
/// The most blocks of an operation.
pub const MAX_BLOCKS: usize = 256;
/// 64-bit words of a rank's flags: entries by peer, then exits by peer and block.
pub const FLAGS: usize = MAX_RANKS + MAX_RANKS * MAX_BLOCKS;

/// The symmetric buffers, in the order of a rank's row of the table of addresses.
pub mod slot {
    /// [`FLAGS`](super::FLAGS) flags.
    pub const FLAGS: usize = 0;
    /// Tokens that a block of each rank has for each, `[MAX_BLOCKS, MAX_RANKS, MAX_RANKS]` `u64`: the epoch above the count.
    pub const COUNTS: usize = 1;
    /// Rows that were received.
    pub const ROWS: usize = 2;
    /// Their scales.
    pub const SCALES: usize = 3;
    /// Their expert ids.
    pub const IDS: usize = 4;
    /// Their weights.
    pub const WEIGHTS: usize = 5;
    /// Rows to be combined.
    pub const RESULTS: usize = 6;
    /// How many there are.
    pub const COUNT: usize = 7;
}

/// What a rank keeps to itself, as `u32`.
pub mod state {
    /// Operations that are done.
    pub const EPOCH: usize = 0;
    /// Whether every rank is known to be through with what it received.
    pub const CLEAN: usize = 1;
    /// For the ranks that rows go to, how many parts of rows were handed out; 0 between operations.
    pub const DEALT: usize = 32;
    /// How many there are.
    pub const COUNT: usize = DEALT + super::MAX_RANKS;
}

/// What went wrong first, as `u32`: code, rank, phase, value. Above the code's [`CODE_BITS`](fault::CODE_BITS) the first word has the
/// mark of the operation in which it did.
pub mod fault {
    /// Bits of a code.
    pub const CODE_BITS: u32 = 8;
    /// The mark of what is no operation of several ranks.
    pub const ALONE: u32 = 0;
    /// A wait for `rank` took too long.
    pub const TIME_OUT: u32 = 1;
    /// `rank` is at another operation, or at one of other shapes; `value` is its signature.
    pub const DISAGREE: u32 = 2;
    /// `rank` says that it failed.
    pub const PEER_FAILED: u32 = 3;
    /// An expert of token `value` is not there.
    pub const BAD_ID: u32 = 4;
    /// `rank` would get `value` tokens, and has not the room.
    pub const OVERFLOW: u32 = 5;
    /// How many words there are.
    pub const COUNT: usize = 4;
}

/// Where an operation was.
pub mod phase {
    /// Waiting for peers to come as far.
    pub const ENTRY: u32 = 1;
    /// Waiting for peers to be done.
    pub const EXIT: u32 = 2;
    /// Working by itself.
    pub const WORK: u32 = 3;
}

/// Set in the signature of an exit flag: the block failed.
pub const FAILED: u32 = 1 << 31;

/// What an operation knows of its rank and the others.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Link {
    /// `[ranks, slot::COUNT]` addresses.
    pub peers: *const u64,
    /// `[state::COUNT]`.
    pub state: *mut u32,
    /// `[fault::COUNT]`.
    pub fault: *mut u32,
    /// Nanoseconds that a wait may take.
    pub time_out: u64,
    /// This one.
    pub rank: u32,
    /// All of them, at most [`MAX_RANKS`].
    pub ranks: u32,
    /// What all ranks must agree on, without [`FAILED`].
    pub signature: u32,
    /// Not 0: the peers' buffers are stand-ins in this rank's memory, so that nobody is told anything or waited for.
    pub alone: u32,
}
struct_param!(Link);

impl Link {
    /// A buffer of a rank.
    #[inline(always)]
    pub unsafe fn buffer<T: Copy>(&self, rank: u32, slot: usize) -> GlobalMut<T> {
        let address: u64 = Global::new(self.peers).get(rank as usize * slot::COUNT + slot);
        GlobalMut::new(address as *mut T)
    }

    /// Has what an operation looks at first brought into the second-level cache, before it waits for the kernels before: nothing is read. Not worth it
    /// for operations of few tokens, which leave the cache as it is.
    #[inline(always)]
    pub fn prefetch(&self) {
        let (tid, lines) = (thread::thread_idx_x(), self.ranks * slot::COUNT as u32 / 16 + 1);
        if tid < lines {
            prefetch_l2(self.peers.wrapping_add(16 * tid as usize));
        } else if tid == lines {
            prefetch_l2(self.state);
        } else if tid == lines + 1 {
            prefetch_l2(self.fault);
        }
    }

    /// Whether there is such a rank, and it takes part by itself.
    #[inline(always)]
    pub fn waits_for(&self, peer: u32) -> bool {
        peer < self.ranks && peer != self.rank && self.alone == 0
    }

    /// The rank that gets the `i`-th copy of a row: the next one first, the own last. So ranks that begin at the same time do not all send
    /// to the same one, and stores to the own memory do not wait between those that wait for a link.
    #[inline(always)]
    pub fn turn(&self, i: u32) -> u32 {
        let rank = self.rank + 1 + i;
        if rank < self.ranks { rank } else { rank - self.ranks }
    }

    /// Keeps what went wrong, if it is the first, in the operation with this mark.
    pub unsafe fn fail(&self, mark: u32, code: u32, rank: u32, phase: u32, value: u32) {
        let words = GlobalMut::new(self.fault);
        if words.compare_exchange(0usize, 0, mark << fault::CODE_BITS | code, Device, Relaxed) == 0 {
            words.store(1usize, rank, Device, Relaxed);
            words.store(2usize, phase, Device, Relaxed);
            words.store(3usize, value, Device, Relaxed);
        }
    }
}

/// The number of the operation after this one: never 0, which flags are before their first operation, nor what comes before it.
#[inline(always)]
pub fn next_epoch(epoch: u32) -> u32 {
    if epoch < u32::MAX - 1 { epoch + 1 } else { 1 }
}

/// Rounds of a wait after which the clock, and the fault of the rank, are looked at again.
const ROUNDS: u32 = 16;

/// One operation, as one block goes through it. All threads of the block call every function.
#[derive(Clone, Copy)]
pub struct Session {
    /// Rank and peers.
    pub link: Link,
    epoch: u32,
    clean: bool,
}

impl Session {
    /// `None` if something went wrong before. What goes wrong in another block of this operation, which may be ahead, is no reason
    /// to let peers wait.
    ///
    /// Block `announcer` tells the peers that this rank has come as far, in an operation that is not `unless_clean`, or after one that was
    /// not [`clean`](Self::clean).
    #[inline(always)]
    #[track_caller]
    pub unsafe fn begin(link: Link, announcer: u32, unless_clean: bool) -> Option<Self> {
        cuda_std::dependent_launch::wait();
        Self::begin_with(link, announcer, unless_clean, || ()).map(|(this, ())| this)
    }

    /// [`begin`](Self::begin), and what a block can do before it knows which operation it is, while that is loaded. A barrier follows.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn begin_with<R>(
        link: Link,
        announcer: u32,
        unless_clean: bool,
        meanwhile: impl FnOnce() -> R,
    ) -> Option<(Self, R)> {
        let (state, tid) = (GlobalMut::new(link.state), thread::thread_idx_x());
        // All loads together: each takes half a microsecond. The last warp announces, as that takes a microsecond, in which the first has
        // other things to do.
        let peer = cuda_std::warp::lane_id();
        let announces =
            thread::block_idx_x() == announcer && tid / 32 == (thread::block_dim_x() - 1) / 32 && link.waits_for(peer);
        let mut flags = GlobalMut::new(core::ptr::null_mut());
        if announces {
            flags = link.buffer::<u64>(peer, slot::FLAGS);
        }
        let (epoch, clean) = (next_epoch(state.get(state::EPOCH)), state.get(state::CLEAN) != 0);
        let this = Self { link, epoch, clean };
        let mut failed = false;
        if tid == 0 {
            let word = GlobalMut::new(link.fault).load(0usize, Device, Relaxed);
            failed = word != 0 && word >> fault::CODE_BITS != this.mark();
        }
        let result = meanwhile();
        if thread::sync_threads_or(failed) {
            return None;
        }
        if announces && !(unless_clean && clean) {
            flags.store(link.rank, this.flag(link.signature), System, Release);
        }
        Some((this, result))
    }

    /// Marks faults of this operation; another has the same only after millions.
    #[inline(always)]
    pub fn mark(&self) -> u32 {
        self.epoch & 0x7f_ffff | 0x80_0000
    }

    /// This operation's number.
    #[inline(always)]
    pub fn epoch(&self) -> u32 {
        self.epoch
    }

    /// [`Link::fail`] in this operation.
    pub unsafe fn fail(&self, code: u32, rank: u32, phase: u32, value: u32) {
        self.link.fail(self.mark(), code, rank, phase, value);
    }

    /// Whether no rank needs what it received any more, as an operation since has shown.
    #[inline(always)]
    pub fn clean(&self) -> bool {
        self.clean
    }

    /// A word that says which operation it is of.
    #[inline(always)]
    pub fn flag(&self, signature: u32) -> u64 {
        (self.epoch as u64) << 32 | signature as u64
    }

    /// Whether a wait takes too long. Looks at the clock in some rounds only, as that takes a good part of the time of looking at a flag.
    #[inline(always)]
    fn is_late(&self, start: &mut u64, round: &mut u32) -> bool {
        let now = if round.is_multiple_of(ROUNDS) { thread::globaltimer() } else { *start };
        *start = if *round == 0 { now } else { *start };
        *round = round.wrapping_add(1).max(1);
        now.wrapping_sub(*start) > self.link.time_out
    }

    /// Says why what was waited for did not come. A peer at another operation may have no such flag to send, but sent one that tells: a barrier has no entry, and who waits for
    /// that does not come to the exit.
    #[inline(always)]
    unsafe fn give_up(&self, peer: u32, phase: u32) {
        let flags = self.link.buffer::<u64>(self.link.rank, slot::FLAGS);
        let (mut code, mut value) = (fault::TIME_OUT, 0);
        let places = [peer as usize, MAX_RANKS + peer as usize * MAX_BLOCKS];
        unroll::<2>(|i| {
            let seen = flags.load(places[i], System, Relaxed);
            let signature = seen as u32;
            if (seen >> 32) as u32 == self.epoch && signature & !FAILED != self.link.signature {
                (code, value) = (fault::DISAGREE, signature);
            }
        });
        self.fail(code, peer, phase, value);
    }

    /// One thread waits for a flag; whether it came.
    #[inline(always)]
    unsafe fn wait(&self, flags: GlobalMut<u64>, i: usize, peer: u32, phase: u32) -> bool {
        let (mut start, mut round) = (0, 0);
        loop {
            let seen = flags.load(i, System, Acquire);
            let (at, signature) = ((seen >> 32) as u32, seen as u32);
            let ahead = at == next_epoch(self.epoch);
            if ahead || at == self.epoch {
                if ahead || signature == self.link.signature {
                    return true;
                }
                let failed = signature == self.link.signature | FAILED;
                let code = if failed { fault::PEER_FAILED } else { fault::DISAGREE };
                self.fail(code, peer, phase, signature);
                return false;
            }
            if self.is_late(&mut start, &mut round) {
                self.give_up(peer, phase);
                return false;
            }
            thread::spin_hint();
        }
    }

    /// Tells all ranks, itself as well, how many of the tokens that the block has counted go to rank `to`. One warp does, for each rank. A
    /// word says which operation it is of, so nothing orders them.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn tell_count(&self, counts: GlobalMut<u64>, to: u32, tokens: u32) {
        let (link, peer) = (&self.link, cuda_std::warp::lane_id());
        if link.waits_for(peer) || peer == link.rank {
            let at = (thread::block_idx_x() as usize * MAX_RANKS + link.rank as usize) * MAX_RANKS + to as usize;
            counts.store(at, self.flag(tokens), System, Relaxed);
        }
    }

    /// Where a lane tells counts in [`tell_count`](Self::tell_count).
    #[inline(always)]
    #[track_caller]
    pub unsafe fn counts_of_peer(link: &Link) -> GlobalMut<u64> {
        let peer = cuda_std::warp::lane_id();
        let mut counts = GlobalMut::new(core::ptr::null_mut());
        if link.waits_for(peer) || peer == link.rank {
            counts = link.buffer::<u64>(peer, slot::COUNTS);
        }
        counts
    }

    /// Whether the thread of that number has something to do in [`wait_counts`](Self::wait_counts).
    #[inline(always)]
    pub fn waits_for_counts(&self, thread: u32) -> bool {
        thread < self.link.ranks * self.link.ranks * thread::grid_dim_x()
    }

    /// Learns what all blocks of all ranks have counted. Adds to `all` (`[MAX_RANKS, MAX_RANKS]`, zeros before a barrier before) how many
    /// tokens each rank has for each; `own`, `[blocks, MAX_RANKS]`, is those of this rank. Waits for the peers' announcements as well.
    /// Whether all came. Visible after the next barrier.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn wait_counts(&self, all: Shared<u32>, own: Shared<u32>) -> bool {
        let (link, tid, threads) = (&self.link, thread::thread_idx_x(), thread::block_dim_x());
        let ranks = link.ranks;
        let mut bad = false;
        if link.waits_for(tid) {
            bad = !self.wait(link.buffer(link.rank, slot::FLAGS), tid as usize, tid, phase::ENTRY);
        }
        let theirs = link.buffer::<u64>(link.rank, slot::COUNTS);
        let mut i = tid;
        while self.waits_for_counts(i) && !bad {
            let row = cuda_std::integer::div(i, ranks);
            let block = cuda_std::integer::div(row, ranks);
            let (to, peer) = (i - row * ranks, row - block * ranks);
            let at = (block as usize * MAX_RANKS + peer as usize) * MAX_RANKS + to as usize;
            let mut count = 0;
            if link.waits_for(peer) || peer == link.rank {
                // The fault is looked at later, as it takes as long as a look at the count.
                let (mut start, mut round) = (thread::globaltimer(), 1u32);
                loop {
                    let seen = theirs.load(at, System, Relaxed);
                    // No peer is further: it needs our exit.
                    if (seen >> 32) as u32 == self.epoch {
                        count = seen as u32;
                        break;
                    }
                    // Who does something else sends no counts, which another thread notices.
                    let mut failed = false;
                    if round.is_multiple_of(ROUNDS) {
                        let word = GlobalMut::new(link.fault).load(0usize, Device, Relaxed);
                        let code = word & const { (1 << fault::CODE_BITS) - 1 };
                        failed = matches!(code, fault::TIME_OUT | fault::DISAGREE | fault::PEER_FAILED);
                    }
                    if failed || self.is_late(&mut start, &mut round) {
                        self.give_up(peer, phase::ENTRY);
                        bad = true;
                        break;
                    }
                    thread::spin_hint();
                }
            } else if block == 0 {
                // What the host brought.
                count = theirs.get(at) as u32;
            }
            all.fetch_add(peer * MAX_RANKS as u32 + to, count, Block, Relaxed);
            if peer == link.rank {
                own.set(block * MAX_RANKS as u32 + to, count);
            }
            i += threads;
        }
        !bad
    }

    /// Waits until all peers have come as far; whether they have.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn wait_entry(&self) -> bool {
        let (link, peer) = (&self.link, thread::thread_idx_x());
        let mut bad = false;
        if link.waits_for(peer) {
            bad = !self.wait(link.buffer(link.rank, slot::FLAGS), peer as usize, peer, phase::ENTRY);
        }
        !thread::sync_threads_or(bad)
    }

    /// Ends the operation: what the block did is done, well or not (`ok`, of each thread). `clean` afterwards means that all
    /// ranks were through with what they had received before.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn finish(self, ok: bool, clean: bool) {
        let (link, tid, block) = (&self.link, thread::thread_idx_x(), thread::block_idx_x());
        // Looked up before the barrier.
        let tells = link.waits_for(tid) || tid == link.rank;
        let mut flags = GlobalMut::new(core::ptr::null_mut());
        if tells {
            flags = link.buffer::<u64>(tid, slot::FLAGS);
        }
        let own = link.buffer::<u64>(link.rank, slot::FLAGS);
        let failed = thread::sync_threads_or(!ok);
        // In its own memory, too: block 0 counts the operation as done after all blocks have seen which it is.
        if tells {
            let flag = self.flag(link.signature | if failed { FAILED } else { 0 });
            let i = MAX_RANKS + link.rank as usize * MAX_BLOCKS + block as usize;
            flags.store(i, flag, System, Release);
        }
        if block != 0 {
            cuda_std::dependent_launch::launch_dependents();
            return;
        }
        let blocks = thread::grid_dim_x();
        let (mut i, mut lost) = (tid, failed);
        while i < link.ranks * blocks {
            let peer = cuda_std::integer::div(i, blocks);
            let at = MAX_RANKS + peer as usize * MAX_BLOCKS + (i - peer * blocks) as usize;
            // Own blocks are waited for whatever happened: some may still have to read which operation it is.
            let waits = if peer == link.rank { true } else { link.waits_for(peer) && !lost };
            if waits && !self.wait(own, at, peer, phase::EXIT) {
                lost = true;
            }
            i += thread::block_dim_x();
        }
        thread::sync_threads();
        cuda_std::dependent_launch::launch_dependents();
        if tid == 0 {
            let state = GlobalMut::new(link.state);
            state.set(state::EPOCH, self.epoch);
            state.set(state::CLEAN, clean as u32);
        }
        if tid < MAX_RANKS as u32 {
            GlobalMut::new(link.state).set(state::DEALT + tid as usize, 0);
        }
    }
}

/// Hands out units of work to the warps of several blocks: one to each by its number, the others as they ask for them.
/// Multiprocessors are not equally fast, so that with the same share for each all would wait for the slowest.
#[derive(Clone, Copy)]
pub struct Deal {
    next: GlobalMut<u32>,
    /// Number of the warp, and how many there are.
    warp: u32,
    warps: u32,
    /// Lane 0's, under way.
    asked: u32,
}

impl Deal {
    /// For a warp of the block that is the `index`-th of `count` that share the units of `class`, one of the ranks.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn new(link: &Link, class: u32, index: u32, count: u32) -> Self {
        let warps = thread::block_dim_x() / 32;
        let next = GlobalMut::new(link.state).offset(state::DEALT + class as usize);
        Self { next, warp: thread::thread_idx_x() / 32 * count + index, warps: warps * count, asked: 0 }
    }

    /// How many warps take part.
    #[inline(always)]
    pub fn warps(&self) -> u32 {
        self.warps
    }

    /// The first unit.
    #[inline(always)]
    pub fn first(&self) -> u32 {
        self.warp
    }

    /// Asks for another, some time before it is [looked at](Self::take). All lanes take part.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn ask(&mut self) {
        if cuda_std::warp::lane_id() == 0 {
            self.asked = self.next.fetch_add(0usize, 1, Device, Relaxed);
        }
    }

    /// The unit that was asked for.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn take(&self) -> u32 {
        self.warps + cuda_std::warp::shfl_idx(self.asked, 0)
    }

    /// The unit that was asked for; another is.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn next(&mut self) -> u32 {
        let unit = self.take();
        self.ask();
        unit
    }
}

/// A piece of a row.
#[derive(Clone, Copy)]
pub struct Unit {
    /// The row.
    pub row: u32,
    /// The piece of it.
    pub piece: u32,
}

impl Unit {
    /// The `unit`-th of all, of which a row has `pieces`; not 0.
    #[inline(always)]
    pub unsafe fn new(unit: u32, pieces: u32) -> Self {
        let row = cuda_std::integer::div(unit, pieces);
        Self { row, piece: unit - row * pieces }
    }
}

/// The number of valid tokens: `count` if it is there, and at most `tokens`.
#[inline(always)]
pub unsafe fn token_count(count: *const u32, tokens: u32) -> u32 {
    if count.is_null() {
        return tokens;
    }
    let n: u32 = Global::new(count).get(0usize);
    if n < tokens { n } else { tokens }
}

/// Goes through the pieces of rows: from one that is `step` further to the next, without dividing again.
#[derive(Clone, Copy)]
pub struct Walk {
    /// The row.
    pub row: u32,
    /// The piece of it.
    pub piece: u32,
    pieces: u32,
    rows: u32,
    rest: u32,
}

impl Walk {
    /// Begins with piece `first` of all, of which a row has `pieces`; not 0.
    #[inline(always)]
    pub unsafe fn new(first: u32, step: u32, pieces: u32) -> Self {
        let row = cuda_std::integer::div(first, pieces);
        let rows = cuda_std::integer::div(step, pieces);
        Self { row, piece: first - row * pieces, pieces, rows, rest: step - rows * pieces }
    }

    /// The next piece.
    #[inline(always)]
    pub fn advance(&mut self) {
        self.row += self.rows;
        self.piece += self.rest;
        if self.piece >= self.pieces {
            self.piece -= self.pieces;
            self.row += 1;
        }
    }
}
