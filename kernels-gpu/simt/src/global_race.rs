//! Race detection for global memory, within one launch or among those of several devices.
//!
//! Shadow memory, shared by all workers, keeps for each 4-byte word that was touched the last write and two readers
//! (the first and the latest since that write). Two accesses conflict if they touch a common byte, one of them writes,
//! and they are not both atomic. Whether a conflict is ordered:
//!
//! * Within a block by what orders shared memory as well: [`RaceState`]'s epochs and clocks.
//! * Between blocks by atomics of device or system scope, barriers of clusters, and arrivals at another block's mbarriers. A block's clock advances whenever one of its threads
//!   releases; who acquires the value learns the clock, and what it stands for, transitively. A relaxed atomic releases
//!   what came before the block's last device fence. Every atomic that reads acquires: a fence may follow, and a wrong
//!   alarm would be worse than a race that is missed. For the same reason a release counts for the whole block.
//!
//! Launches of devices that are [`Peers`] share one shadow memory: blocks are numbered through, a launch begins with what
//! is ordered before the device's previous one and after what the host has waited for, and memory that is allocated anew is forgotten.
//!
//! As few records are kept, a race may be missed. One is invented only between two threads of a block whose order is that of a chain through another block: such a chain says
//! too little of them to be told from a missing barrier.

use crate::error::{Access, Loc};
use crate::launch::Region;
use crate::map::Map;
use crate::race::RaceState;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, Weak};

/// Words of a page of shadow memory.
const PAGE: usize = 256;
const SHARDS: usize = 64;

#[derive(Clone, Copy)]
struct Record {
    at: Loc,
    block: u32,
    /// The block's epoch and the thread's clock, for its own block.
    epoch: u32,
    clock: u32,
    /// The block's clock, for others.
    when: u32,
    thread: u16,
    /// Bytes of the word.
    bytes: u8,
    atomic: bool,
}

#[derive(Clone, Copy, Default)]
struct Cell {
    write: Option<Record>,
    reads: [Option<Record>; 2],
}

pub(crate) type Clocks = Map<u32, u32>;

/// Devices that reach each other's memory while their kernels run side by side: races are looked for across them.
pub struct Peers {
    pub(crate) shadow: GlobalRace,
    next_block: AtomicU32,
    /// For each device, what its launches so far were ordered after, themselves included.
    known: Vec<Mutex<Clocks>>,
    /// What the host has waited for.
    host: Mutex<Clocks>,
}

/// All that are alive.
static PEERS: RwLock<Vec<Weak<Peers>>> = RwLock::new(Vec::new());

impl Peers {
    /// So many devices.
    pub fn new(devices: usize) -> Arc<Self> {
        let known = (0..devices).map(|_| Mutex::default()).collect();
        let this =
            Arc::new(Self { shadow: GlobalRace::new(), next_block: AtomicU32::new(0), known, host: Mutex::default() });
        let mut all = PEERS.write().unwrap_or_else(PoisonError::into_inner);
        all.retain(|p| p.strong_count() > 0);
        all.push(Arc::downgrade(&this));
        this
    }

    /// Forgets all accesses so far: to be called where the host has waited for all of the devices.
    pub fn forget(&self) {
        self.shadow.pages.iter().for_each(|p| lock(p).clear());
        // No access is left that what follows could have to be ordered after.
        lock(&self.shadow.released).clear();
        self.known.iter().chain([&self.host]).for_each(|known| lock(known).clear());
    }

    /// The host has waited for a device: what it launches from now on, on whichever device, comes after what that one did.
    pub fn host_waits(&self, device: usize) {
        join(&mut lock(&self.host), &lock(&self.known[device]));
    }

    /// What one device does from now on comes after what another did.
    pub fn device_waits(&self, device: usize, after: usize) {
        if device != after {
            let after = lock(&self.known[after]).clone();
            join(&mut lock(&self.known[device]), &after);
        }
    }

    /// The number of a launch's first block, and what comes before it.
    pub(crate) fn begin(&self, device: usize, blocks: u32) -> (u32, Clocks) {
        let mut known = lock(&self.known[device]).clone();
        join(&mut known, &lock(&self.host));
        (self.next_block.fetch_add(blocks, Ordering::Relaxed), known)
    }

    /// A block of a launch of the device has ended.
    pub(crate) fn end(&self, device: usize, view: &GlobalView) {
        let mut known = lock(&self.known[device]);
        for (&block, &clock) in view.known.iter().chain([(&view.block, &view.clock)]) {
            let old = known.entry(block).or_default();
            *old = clock.max(*old);
        }
    }
}

/// Forgets accesses to memory that is given out anew.
pub(crate) fn forget(region: Region) {
    for peers in PEERS.read().unwrap_or_else(PoisonError::into_inner).iter().filter_map(Weak::upgrade) {
        peers.shadow.forget(region);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn join(known: &mut Clocks, released: &Clocks) {
    for (&block, &clock) in released {
        let known = known.entry(block).or_default();
        *known = clock.max(*known);
    }
}

/// The words of some bytes, and which bytes of each.
fn pieces(address: usize, bytes: usize) -> impl Iterator<Item = (usize, u8)> {
    (address / 4..(address + bytes).div_ceil(4)).map(move |word| {
        let (from, to) = (address.max(word * 4), (address + bytes).min(word * 4 + 4));
        (word, (((1u32 << (to - from)) - 1) << (from % 4)) as u8)
    })
}

/// What the blocks of one launch share.
pub(crate) struct GlobalRace {
    pages: [Mutex<Map<usize, Box<[Cell; PAGE]>>>; SHARDS],
    /// What has been released to each atomic location, by block.
    released: Mutex<Map<usize, Clocks>>,
}

/// What one block knows of the others.
#[derive(Default)]
pub(crate) struct GlobalView {
    block: u32,
    clock: u32,
    /// What was before the last fence of device scope.
    fenced: u32,
    known: Clocks,
    /// Its clock as arrivals at the cluster's barrier have published it in this phase.
    arrived: u32,
    /// What the last phase has brought, until a thread has waited for its end.
    coming: Clocks,
    /// What it knows of blocks of earlier launches that may still be running, the last launch first.
    earlier: Vec<Clocks>,
}

impl GlobalView {
    pub(crate) fn reset(&mut self, block: u32, known: Clocks) {
        *self = Self { block, clock: 1, known, ..Self::default() };
    }

    /// What the block knows of the `i`-th earlier launch.
    pub(crate) fn of_earlier(&mut self, i: usize) -> &mut Clocks {
        if self.earlier.len() <= i {
            self.earlier.resize_with(i + 1, Clocks::default);
        }
        &mut self.earlier[i]
    }

    /// [`of_earlier`](Self::of_earlier), if it knows anything.
    pub(crate) fn with_earlier(&self, i: usize) -> Option<&Clocks> {
        self.earlier.get(i)
    }

    /// The clock up to which a thread publishes what the block has done: all of it by a `release`, otherwise what came before the last
    /// fence of device scope.
    fn publish(&mut self, release: bool) -> u32 {
        let up_to = if release { self.clock } else { self.fenced };
        self.clock += release as u32;
        up_to
    }

    /// Adds what the block has done up to then, if anything, and what it knows.
    fn tell(&self, up_to: u32, released: &mut Clocks) {
        if up_to > 0 {
            join(released, &self.known);
            let own = released.entry(self.block).or_default();
            *own = up_to.max(*own);
        }
    }

    /// Adds what the block has done and knows to what others of its cluster will know.
    pub(crate) fn release(&mut self, released: &mut Clocks) {
        let up_to = self.publish(true);
        self.tell(up_to, released);
    }

    /// A thread arrives at the cluster's barrier.
    pub(crate) fn cluster_arrive(&mut self, release: bool) {
        self.arrived = self.publish(release).max(self.arrived);
    }

    /// All have arrived: adds what those of this block have published.
    pub(crate) fn end_cluster_phase(&mut self, released: &mut Clocks) {
        let up_to = std::mem::take(&mut self.arrived);
        self.tell(up_to, released);
    }

    /// What all blocks of the cluster have published, for threads that wait for it.
    pub(crate) fn bring(&mut self, released: &Clocks) {
        self.coming.clone_from(released);
    }

    /// A thread has waited at the cluster's barrier.
    pub(crate) fn cluster_wait(&mut self) {
        let coming = std::mem::take(&mut self.coming);
        self.learn(&coming);
    }

    /// What others of its cluster have released comes before what the block does now.
    pub(crate) fn learn(&mut self, released: &Clocks) {
        join(&mut self.known, released);
    }

    /// A fence of device or system scope.
    pub(crate) fn fence(&mut self) {
        self.fenced = self.clock;
        self.clock += 1;
    }
}

/// An access that conflicts with an earlier one.
pub(crate) struct Conflict {
    pub(crate) address: usize,
    pub(crate) block: u32,
    pub(crate) thread: u32,
    pub(crate) access: Access,
    pub(crate) at: Loc,
}

/// What a thread does to memory.
#[derive(Clone, Copy)]
pub(crate) struct Touch {
    pub(crate) thread: u32,
    pub(crate) writes: bool,
    pub(crate) atomic: bool,
    pub(crate) at: Loc,
}

impl GlobalRace {
    pub(crate) fn new() -> Self {
        Self { pages: std::array::from_fn(|_| Mutex::default()), released: Mutex::default() }
    }

    /// An atomic operation of device or system scope at `address`.
    pub(crate) fn synchronise(&self, view: &mut GlobalView, address: usize, reads: bool, writes: bool, release: bool) {
        let mut all = lock(&self.released);
        let released = all.entry(address).or_default();
        if reads {
            join(&mut view.known, released);
        }
        if writes {
            let up_to = view.publish(release);
            view.tell(up_to, released);
        }
    }

    /// Adds what was released to `address` to what somebody knows.
    pub(crate) fn released_to(&self, known: &mut Clocks, address: usize) {
        if let Some(released) = lock(&self.released).get(&address) {
            join(known, released);
        }
    }

    /// The access here that one of another launch, which knows `known` of the blocks here, conflicts with.
    pub(crate) fn conflict(
        &self,
        known: Option<&Clocks>,
        touch: Touch,
        address: usize,
        bytes: usize,
    ) -> Option<Conflict> {
        let ordered = |r: &Record| known.and_then(|k| k.get(&r.block)).is_some_and(|&known| known >= r.when);
        pieces(address, bytes).find_map(|(word, bytes)| {
            let pages = lock(&self.pages[word / PAGE % SHARDS]);
            let cell = pages.get(&(word / PAGE))?[word % PAGE];
            let reads = if touch.writes { cell.reads } else { [None; 2] };
            [(cell.write, Access::Write), (reads[0], Access::Read), (reads[1], Access::Read)]
                .into_iter()
                .find_map(|(r, access)| r?.conflict(touch, word * 4, bytes, access, ordered))
        })
    }

    /// Forgets all accesses to these addresses.
    fn forget(&self, region: Region) {
        for page in region.lo / 4 / PAGE..=region.hi / 4 / PAGE {
            if let Some(cells) = lock(&self.pages[page % SHARDS]).get_mut(&page) {
                let words = (page * PAGE..(page + 1) * PAGE).zip(cells.iter_mut());
                words
                    .filter(|(w, _)| (region.lo..region.hi).contains(&(w * 4)))
                    .for_each(|(_, c)| *c = Cell::default());
            }
        }
        lock(&self.released).retain(|address, _| !(region.lo..region.hi).contains(address));
    }

    /// Records an access of `bytes` bytes.
    pub(crate) fn access(
        &self,
        race: &RaceState,
        view: &GlobalView,
        touch: Touch,
        address: usize,
        bytes: usize,
    ) -> Result<(), Conflict> {
        let mut at = address;
        while at < address + bytes {
            let page = at / 4 / PAGE;
            let end = (address + bytes).min((page + 1) * PAGE * 4);
            let mut shard = lock(&self.pages[page % SHARDS]);
            let cells = shard.entry(page).or_insert_with(new_page);
            while at < end {
                let word = at / 4;
                let stop = end.min(word * 4 + 4);
                let mask = (((1u32 << (stop - at)) - 1) << (at % 4)) as u8;
                cells[word % PAGE].touch(race, view, touch, word * 4, mask)?;
                at = stop;
            }
        }
        Ok(())
    }
}

/// Made on the heap: a GPU thread's stack is short, and without optimisation an array is made there first.
fn new_page() -> Box<[Cell; PAGE]> {
    match vec![Cell::default(); PAGE].into_boxed_slice().try_into() {
        Ok(page) => page,
        Err(_) => unreachable!("it is as long as it is"),
    }
}

impl Record {
    /// This access, of kind `access` unless atomic, to the word at `address` if one to `bytes` of it conflicts, and nothing orders the two.
    #[inline]
    fn conflict(
        self,
        touch: Touch,
        address: usize,
        bytes: u8,
        access: Access,
        ordered: impl Fn(&Self) -> bool,
    ) -> Option<Conflict> {
        let conflicts = self.bytes & bytes != 0 && !(self.atomic && touch.atomic) && !ordered(&self);
        conflicts.then(|| Conflict {
            address: address + (self.bytes & bytes).trailing_zeros() as usize,
            block: self.block,
            thread: self.thread as u32,
            access: if self.atomic { Access::Atomic } else { access },
            at: self.at,
        })
    }
}

impl Cell {
    fn touch(
        &mut self,
        race: &RaceState,
        view: &GlobalView,
        touch: Touch,
        address: usize,
        bytes: u8,
    ) -> Result<(), Conflict> {
        let ordered = |r: &Record| {
            if r.block == view.block {
                race.ordered(touch.thread, r.thread as u32, r.epoch, r.clock)
            } else {
                view.known.get(&r.block).is_some_and(|&known| known >= r.when)
            }
        };
        let check = |r: &Option<Record>, access: Access| {
            r.and_then(|r| r.conflict(touch, address, bytes, access, ordered)).map_or(Ok(()), Err)
        };
        check(&self.write, Access::Write)?;
        let (epoch, clock) = race.now(touch.thread);
        let record = Some(Record {
            at: touch.at,
            block: view.block,
            epoch,
            clock,
            when: view.clock,
            thread: touch.thread as u16,
            bytes,
            atomic: touch.atomic,
        });
        if touch.writes {
            check(&self.reads[0], Access::Read)?;
            check(&self.reads[1], Access::Read)?;
            self.write = record;
            self.reads = [None; 2];
        } else {
            let mine = |r: &Option<Record>| {
                r.is_none_or(|r| r.bytes & !bytes == 0 && (r.atomic == touch.atomic) && ordered(&r))
            };
            let slot = usize::from(!mine(&self.reads[0]));
            self.reads[slot] = record;
        }
        Ok(())
    }
}
