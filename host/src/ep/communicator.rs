//! Ranks and what they share.

use super::fault::{Fault, Phase};
use super::processes::Others;
use crate::device::{Device, Pinned, Stream};
use crate::error::{Error, Result};
use crate::kernels::ep as kernel;
use crate::kernels::ep::{Link, slot};
use crate::tensor::Tensor;
use cuda_std::Element;
use half::bf16;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// What all ranks must have in common; a part of every signature, so that libraries of different protocols do not talk.
pub(super) const PROTOCOL: u32 = 3;
/// Columns of a scale.
pub(super) const GROUP: usize = 128;

/// Sizes that all operations of a communicator have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
#[must_use]
pub struct Config {
    /// Values of a token, a multiple of 8.
    pub hidden: usize,
    /// Experts of a token, 1 to 32.
    pub top_k: usize,
    /// Experts of all ranks together (replicas count each), as many on every rank, at most 32768.
    pub experts: usize,
    /// The most tokens of a rank in a call, at most 65536.
    pub max_tokens: usize,
    /// Rows that a rank can receive; the worst case unless set: `ranks max_tokens`.
    pub capacity: Option<usize>,
    /// How long one wait for other ranks may take.
    pub time_out: Duration,
}

impl Config {
    /// Whether so many ranks, which the argument `of` says, can have these sizes.
    pub(super) fn check(&self, op: &'static str, of: &'static str, ranks: usize) -> Result<()> {
        let value = |ok: bool, arg: &'static str, expected: &str, got: usize| {
            if ok {
                return Ok(());
            }
            Err(Error::Value { op, arg, expected: expected.into(), got: got.to_string() })
        };
        let &Config { hidden, top_k, experts, max_tokens, .. } = self;
        value((1..=kernel::MAX_RANKS).contains(&ranks), of, "1 to 8 of them", ranks)?;
        value(hidden > 0 && hidden.is_multiple_of(8), "config.hidden", "a positive multiple of 8", hidden)?;
        value((1..=32).contains(&top_k), "config.top_k", "1 to 32", top_k)?;
        value(experts > 0 && experts.is_multiple_of(ranks), "config.experts", "a multiple of the ranks", experts)?;
        value(experts <= kernel::layout::MAX_EXPERTS, "config.experts", "at most 32768", experts)?;
        let most = kernel::layout::MAX_TOKENS;
        value((1..=most).contains(&max_tokens), "config.max_tokens", "1 to 65536", max_tokens)?;
        let capacity = self.room(ranks);
        value((1..=ranks * most).contains(&capacity), "config.capacity", "1 to 65536 for each rank", capacity)?;
        value(hidden < 1 << 20, "config.hidden", "less than 2^20", hidden)
    }

    /// Rows that a rank can receive.
    pub(super) fn room(&self, ranks: usize) -> usize {
        self.capacity.unwrap_or(ranks.saturating_mul(self.max_tokens))
    }

    /// With room for the worst case, and a time-out of five seconds.
    pub const fn new(hidden: usize, top_k: usize, experts: usize, max_tokens: usize) -> Self {
        Self { hidden, top_k, experts, max_tokens, capacity: None, time_out: Duration::from_secs(5) }
    }

    /// With room for so many rows.
    pub const fn capacity(mut self, rows: usize) -> Self {
        self.capacity = Some(rows);
        self
    }

    /// With this time-out.
    pub const fn time_out(mut self, time_out: Duration) -> Self {
        self.time_out = time_out;
        self
    }
}

/// Blocks of an operation, and their threads; `None` for what suits.
///
/// All blocks run at the same time as those of the other ranks, for which every rank needs the multiprocessors: other work of the
/// GPU that never ends would let them wait in vain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
#[must_use]
pub struct Blocks {
    /// How many, the same on all ranks: with 1024 threads, as many multiprocessors are busy.
    pub count: Option<u32>,
    /// Threads of each, a multiple of 32.
    pub threads: Option<u32>,
}

impl Blocks {
    /// So many blocks.
    pub const fn count(count: u32) -> Self {
        Self { count: Some(count), threads: None }
    }

    /// Of so many threads.
    pub const fn threads(mut self, threads: u32) -> Self {
        self.threads = Some(threads);
        self
    }
}

/// Words of counts.
const COUNTS: usize = kernel::MAX_BLOCKS * kernel::MAX_RANKS * kernel::MAX_RANKS;

/// Words that say which tokens go where.
const fn votes(config: &Config) -> usize {
    config.max_tokens.div_ceil(32) * 2 * kernel::MAX_RANKS
}

/// The symmetric buffers of a rank, and what it keeps to itself.
pub(super) struct Buffers {
    pub(super) flags: Tensor<u64>,
    pub(super) counts: Tensor<u64>,
    pub(super) rows: Tensor<bf16>,
    pub(super) scales: Tensor<f32>,
    pub(super) ids: Tensor<i32>,
    pub(super) weights: Tensor<f32>,
    pub(super) results: Tensor<bf16>,
    pub(super) votes: Tensor<u64>,
    state: Tensor<u32>,
    fault: Tensor<u32>,
}

/// Where buffers come from: allocations of their own, or parts of one that has a name for other processes.
struct Space<'a> {
    device: &'a Device,
    arena: Option<&'a Tensor<u8>>,
    used: usize,
}

impl Space<'_> {
    /// Bytes of a buffer in an arena.
    const fn bytes<T>(len: usize) -> usize {
        (len * size_of::<T>()).next_multiple_of(256)
    }

    fn take<T: Element>(&mut self, shape: &[usize]) -> Result<Tensor<T>> {
        let Some(arena) = self.arena else { return Tensor::zeros(self.device, shape) };
        let bytes = Self::bytes::<T>(shape.iter().product());
        let part = arena.narrow(0, self.used, bytes)?;
        self.used += bytes;
        Ok(part.reinterpret(shape))
    }
}

impl Buffers {
    pub(super) fn new(device: &Device, config: &Config, capacity: usize) -> Result<Self> {
        Self::within(&mut Space { device, arena: None, used: 0 }, config, capacity)
    }

    /// In one allocation, which begins with them.
    pub(super) fn in_arena(arena: &Tensor<u8>, config: &Config, capacity: usize) -> Result<Self> {
        Self::within(&mut Space { device: arena.device(), arena: Some(arena), used: 0 }, config, capacity)
    }

    /// Bytes of an arena.
    pub(super) fn arena_bytes(config: &Config, capacity: usize) -> usize {
        let (k, hidden) = (config.top_k, config.hidden);
        Space::bytes::<u64>(kernel::FLAGS)
            + Space::bytes::<u64>(COUNTS)
            + 2 * Space::bytes::<bf16>(capacity * hidden)
            + Space::bytes::<f32>(capacity * (hidden / GROUP))
            + 2 * Space::bytes::<u32>(capacity * k)
            + Space::bytes::<u64>(votes(config))
            + Space::bytes::<u32>(kernel::state::COUNT)
            + Space::bytes::<u32>(kernel::fault::COUNT)
    }

    fn within(space: &mut Space<'_>, config: &Config, capacity: usize) -> Result<Self> {
        let (k, hidden) = (config.top_k, config.hidden);
        let mut this = Self {
            flags: space.take(&[kernel::FLAGS])?,
            counts: space.take(&[kernel::MAX_BLOCKS * kernel::MAX_RANKS, kernel::MAX_RANKS])?,
            rows: space.take(&[capacity, hidden])?,
            scales: space.take(&[capacity, hidden / GROUP])?,
            ids: space.take(&[capacity, k])?,
            weights: space.take(&[capacity, k])?,
            results: space.take(&[capacity, hidden])?,
            votes: space.take(&[votes(config)])?,
            state: space.take(&[kernel::state::COUNT])?,
            fault: space.take(&[kernel::fault::COUNT])?,
        };
        this.ids.copy_from_slice(&vec![-1; capacity * k])?;
        Ok(this)
    }

    pub(super) fn addresses(&self) -> [u64; slot::COUNT] {
        let mut row = [0; slot::COUNT];
        row[slot::FLAGS] = self.flags.as_ptr() as u64;
        row[slot::COUNTS] = self.counts.as_ptr() as u64;
        row[slot::ROWS] = self.rows.as_ptr() as u64;
        row[slot::SCALES] = self.scales.as_ptr() as u64;
        row[slot::IDS] = self.ids.as_ptr() as u64;
        row[slot::WEIGHTS] = self.weights.as_ptr() as u64;
        row[slot::RESULTS] = self.results.as_ptr() as u64;
        row
    }

    /// Forgets all operations.
    pub(super) fn reset(&mut self) -> Result<()> {
        self.flags.copy_from_slice(&[0; kernel::FLAGS])?;
        self.counts.copy_from_slice(&vec![0; COUNTS])?;
        self.votes.copy_from_slice(&vec![0; self.votes.len()])?;
        self.state.copy_from_slice(&[0; kernel::state::COUNT])?;
        self.fault.copy_from_slice(&[0; kernel::fault::COUNT])
    }
}

/// What the communicators of one group share.
pub(super) struct Group {
    pub(super) config: Config,
    pub(super) capacity: usize,
    pub(super) ranks: usize,
    /// Of the ranks of this process, as the buffers are.
    pub(super) devices: Vec<Device>,
    pub(super) buffers: Vec<Mutex<Buffers>>,
    /// Present if the other ranks are in other processes.
    pub(super) others: Option<Others>,
    meeting: Mutex<Meeting>,
    arrived: Condvar,
}

#[derive(Default)]
struct Meeting {
    round: u64,
    here: Vec<bool>,
    /// What each rank brought, now and in the round before.
    words: [Vec<u32>; 2],
}

impl Group {
    pub(super) fn new(config: &Config, ranks: usize, devices: Vec<Device>, buffers: Vec<Buffers>) -> Self {
        Self {
            config: *config,
            capacity: config.room(ranks),
            ranks,
            devices,
            buffers: buffers.into_iter().map(Mutex::new).collect(),
            others: None,
            meeting: Mutex::new(Meeting {
                round: 0,
                here: vec![false; ranks],
                words: [vec![0; ranks], vec![0; ranks]],
            }),
            arrived: Condvar::new(),
        }
    }

    /// Waits for all ranks on the host, to recover.
    fn meet(&self, rank: usize, time_out: Duration) -> Result<()> {
        if let Some(others) = &self.others {
            return others.meet("ep::Communicator::recover");
        }
        let missing = |peer| Error::Ep(Fault::TimeOut { rank, peer, phase: Phase::Recovery });
        self.bring(rank, 0, time_out).map(drop).map_err(missing)
    }

    /// Waits for all ranks on the host, each of which brings a word; all of them.
    #[cfg(feature = "nccl")]
    pub(super) fn exchange(&self, rank: usize, word: u32) -> Result<Vec<u32>, usize> {
        self.bring(rank, word, self.config.time_out)
    }

    /// Waits for all ranks of this process; the first that is missing if some are.
    fn bring(&self, rank: usize, word: u32, time_out: Duration) -> Result<Vec<u32>, usize> {
        // A time that no clock shows is none.
        let until = Instant::now().checked_add(time_out);
        let mut meeting = self.meeting.lock().unwrap_or_else(PoisonError::into_inner);
        let round = meeting.round;
        // Nobody is two rounds ahead, so that what was brought stays until all have it.
        let words = round as usize % 2;
        meeting.here[rank] = true;
        meeting.words[words][rank] = word;
        if meeting.here.iter().all(|&h| h) {
            meeting.here.fill(false);
            meeting.round += 1;
            self.arrived.notify_all();
            return Ok(meeting.words[words].clone());
        }
        while meeting.round == round {
            let left = until.map_or(Duration::MAX, |until| until.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                meeting.here[rank] = false;
                return Err(meeting.here.iter().enumerate().position(|(r, &h)| r != rank && !h).unwrap_or(rank));
            }
            meeting = self.arrived.wait_timeout(meeting, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        Ok(meeting.words[words].clone())
    }
}

impl Drop for Group {
    /// Kernels of one GPU may still use the memory of another.
    fn drop(&mut self) {
        self.devices.iter().for_each(|d| drop(d.synchronize()));
        if let Some(others) = &mut self.others {
            others.part();
        }
    }
}

/// One of several ranks that exchange tokens: a GPU, or a part of one.
///
/// [`new`](Self::new) makes all ranks of a process; each goes to a thread of its own. Every operation must be called by all
/// ranks, in the same order, with the same options. Operations are stream-ordered like any other: they return when they are
/// launched, and can be captured in graphs. What goes wrong on the way is told by [`check`](Self::check).
///
/// What a rank receives lies in buffers of the communicator, and is good until its next operation. Operations of a rank follow one
/// another: they go to one stream, or to streams that wait for each other.
///
/// ```
/// use warploom::ep::{Communicator, Config, DispatchOptions, CombineOptions};
/// use warploom::{Device, SimtOptions, Stream, Tensor, bf16};
/// // Two ranks with two experts each; a token has one expert.
/// let devices = Device::simt_peers(2, SimtOptions::default());
/// let ranks = Communicator::new(&devices, &Config::new(8, 1, 4, 2))?;
/// std::thread::scope(|s| {
///     for mut rank in ranks {
///         s.spawn(move || -> warploom::Result<()> {
///             let stream = Stream::new(rank.device())?;
///             let x = Tensor::from_slice(rank.device(), &[bf16::from_f32(rank.rank() as f32 + 1.0); 16], &[2, 8])?;
///             let experts = Tensor::from_slice(rank.device(), &[0, 3], &[2, 1])?;
///             let mut routing = rank.routing()?;
///             let received = rank.dispatch(&stream, &mut routing, &x, &experts, None, &DispatchOptions::default())?;
///             rank.check(&stream)?;
///             assert_eq!(received.offsets.to_vec()?, [0, 1, 2]); // a token of each rank
///             assert_eq!(received.topk_ids.to_vec()?[..2], [rank.rank() as i32; 2]);
///             // The experts would work here; these do nothing.
///             let results = received.rows.bf16().expect("rows in bf16").clone();
///             let mut out = Tensor::zeros(rank.device(), &[2, 8])?;
///             rank.combine(&stream, &mut out, &routing, Some(&results), &CombineOptions::default())?;
///             rank.check(&stream)?;
///             assert_eq!(out.to_vec()?, x.to_vec()?);
///             Ok(())
///         });
///     }
/// });
/// # Ok::<(), warploom::Error>(())
/// ```
pub struct Communicator {
    pub(super) group: Arc<Group>,
    rank: usize,
    /// Which of the group's buffers are its own.
    own: usize,
    /// Ranks on the device that has most: blocks are the same on all.
    sharing: u32,
    /// How often [`recover`](Self::recover) was called.
    recoveries: u64,
    /// Whether an operation could not be launched since then, so that this rank is one behind the others.
    behind: AtomicBool,
    device: Device,
    /// `[ranks, slot::COUNT]`
    table: Tensor<u64>,
    fault_words: Mutex<Pinned<u32>>,
    /// Present if ranks exchange rows over NCCL.
    #[cfg(feature = "nccl")]
    pub(super) nccl: Option<Arc<super::nccl::Nccl>>,
}

impl std::fmt::Debug for Communicator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "rank {} of {} on {}", self.rank, self.ranks(), self.device.name())
    }
}

impl Communicator {
    /// The ranks of a group, one for each device. A GPU may be there several times: its ranks then share it, with a share of its
    /// multiprocessors each. SIMT devices are made by one call of [`Device::simt_peers`], and are there once.
    ///
    /// # Errors
    /// [`Error::Value`] for a size that does not work, [`Error::Unsupported`] for devices that cannot reach each other's memory,
    /// [`Error::WrongDevice`] for GPUs together with SIMT devices, [`Error::OutOfMemory`], [`Error::Driver`].
    pub fn new(devices: &[Device], config: &Config) -> Result<Vec<Self>> {
        Self::build(devices, config, true)
    }

    /// `peers`: they use each other's memory.
    pub(super) fn build(devices: &[Device], config: &Config, peers: bool) -> Result<Vec<Self>> {
        const OP: &str = "ep::Communicator::new";
        config.check(OP, "devices", devices.len())?;
        for (i, a) in devices.iter().enumerate() {
            for (j, b) in devices.iter().enumerate() {
                if i != j && a.is_simt() && a == b {
                    let what = "a SIMT device is one rank only; Device::simt_peers makes several".into();
                    return Err(Error::Unsupported { op: OP, what });
                }
                if i != j && a.is_simt() && b.is_simt() && !a.runs_beside(b) {
                    let (a, b) = (a.name(), b.name());
                    let what = format!("{a} cannot reach the memory of {b}; Device::simt_peers makes devices that can");
                    return Err(Error::Unsupported { op: OP, what });
                }
                if a.is_simt() != b.is_simt() {
                    return Err(Error::WrongDevice { op: OP, arg: "devices", expected: a.name(), got: b.name() });
                }
                if peers {
                    a.enable_peer_access(b)?;
                }
            }
            a.preload(&["ep"])?;
        }
        let capacity = config.room(devices.len());
        let buffers = devices.iter().map(|d| Buffers::new(d, config, capacity)).collect::<Result<Vec<_>>>()?;
        let table: Vec<u64> = buffers.iter().flat_map(Buffers::addresses).collect();
        let group = Arc::new(Group::new(config, devices.len(), devices.to_vec(), buffers));
        let on = |device: &Device| devices.iter().filter(|d| *d == device).count() as u32;
        let sharing = devices.iter().map(on).max().unwrap_or(1);
        let rank = |(rank, device): (usize, &Device)| Self::member(&group, [rank, rank], sharing, device, &table);
        devices.iter().enumerate().map(rank).collect()
    }

    /// A rank, whose buffers are the group's `own`-th, with all ranks' addresses.
    pub(super) fn member(
        group: &Arc<Group>,
        [rank, own]: [usize; 2],
        sharing: u32,
        device: &Device,
        table: &[u64],
    ) -> Result<Self> {
        device.be_patient(group.config.time_out);
        Ok(Self {
            group: group.clone(),
            rank,
            own,
            sharing,
            recoveries: 0,
            behind: AtomicBool::new(false),
            device: device.clone(),
            table: Tensor::from_slice(device, table, &[group.ranks, slot::COUNT])?,
            fault_words: Mutex::new(Pinned::zeros(device, kernel::fault::COUNT)?),
            #[cfg(feature = "nccl")]
            nccl: None,
        })
    }

    /// This one's number.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// How many there are.
    pub fn ranks(&self) -> usize {
        self.group.ranks
    }

    /// Where this one is.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The sizes that all have.
    pub fn config(&self) -> &Config {
        &self.group.config
    }

    /// Rows that a rank can receive.
    pub fn capacity(&self) -> usize {
        self.group.capacity
    }

    /// Experts of a rank.
    pub fn local_experts(&self) -> usize {
        self.group.config.experts / self.ranks()
    }

    /// `[capacity, hidden]`: where [`combine`](Self::combine) takes rows from. Writing results here saves a copy. They may be
    /// written from when a dispatch is done until the next combine, and again after that.
    pub fn results(&self) -> Tensor<bf16> {
        self.own(|b| b.results.clone())
    }

    /// Waits for the stream and says what went wrong between the ranks, if anything did since the last recovery.
    ///
    /// # Errors
    /// [`Error::Ep`], [`Error::WrongDevice`], [`Error::Capture`] in a capture, which nobody waits for, [`Error::Driver`].
    pub fn check(&self, stream: &Stream) -> Result<()> {
        self.on_own_device("ep::check", stream)?;
        // In a capture this is an error, before a copy to this rank's memory is part of a graph that may outlive it.
        let _using = stream.using();
        stream.synchronize()?;
        let mut words = self.fault_words.lock().unwrap_or_else(PoisonError::into_inner);
        let fault = self.own(|b| b.fault.clone());
        // SAFETY: the copy is waited for, with the lock held.
        unsafe { stream.download(&mut *words, &fault)? };
        stream.synchronize()?;
        match Fault::decode(self.rank, &words, self.group.capacity) {
            None => self.is_abreast(),
            Some(fault) => Err(Error::Ep(fault)),
        }
    }

    /// Makes the ranks usable again after an error: all of them call this, and wait for each other on the host, somewhat longer
    /// than work that fails may take. Operations count from the beginning again.
    ///
    /// # Errors
    /// [`Error::Ep`] if a rank does not call, [`Error::Exchange`] between processes, [`Error::Driver`].
    pub fn recover(&mut self) -> Result<()> {
        let time_out = self.group.config.time_out.saturating_mul(4).saturating_add(Duration::from_secs(1));
        self.device.synchronize()?;
        self.group.meet(self.rank, time_out)?;
        self.own(Buffers::reset)?;
        self.recoveries += 1;
        *self.behind.get_mut() = false;
        self.device.forget_races();
        self.group.meet(self.rank, time_out)
    }

    /// Something of this rank's buffers.
    pub(super) fn own<R>(&self, f: impl FnOnce(&mut Buffers) -> R) -> R {
        f(&mut self.group.buffers[self.own].lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Launches an operation that the other ranks launch, too. If that fails, this rank would take what they say of the next one for
    /// what they say of this one, so nothing more is launched until all recover.
    pub(super) fn together(&self, launch: impl FnOnce() -> Result<()>) -> Result<()> {
        self.is_abreast()?;
        launch().inspect_err(|_| self.behind.store(true, Ordering::Relaxed))
    }

    /// Every operation was launched.
    fn is_abreast(&self) -> Result<()> {
        if self.behind.load(Ordering::Relaxed) {
            return Err(Error::Ep(Fault::Behind { rank: self.rank }));
        }
        Ok(())
    }

    /// What kernels get to know, for an operation that all ranks describe by the same numbers.
    pub(super) fn link(&self, stream: &Stream, operation: &[u32]) -> Link {
        for buffers in &self.group.buffers {
            let b = buffers.lock().unwrap_or_else(PoisonError::into_inner);
            let symmetric = [b.flags.storage(), b.counts.storage(), b.rows.storage(), b.scales.storage()];
            let more = [b.ids.storage(), b.weights.storage(), b.results.storage()];
            let own = [b.votes.storage(), b.state.storage(), b.fault.storage()];
            symmetric.into_iter().chain(more).chain(own).for_each(|s| stream.retain(s));
        }
        self.group.others.iter().flat_map(Others::memory).for_each(|s| stream.retain(s));
        stream.retain(self.table.storage());
        let (table, alone) = (&self.table, 0);
        #[cfg(feature = "nccl")]
        let (table, alone) = self.nccl.as_ref().map_or((table, alone), |n| (n.table(), 1));
        let (state, fault) = self.own(|b| (b.state.as_mut_ptr(), b.fault.as_mut_ptr()));
        Link {
            peers: table.as_ptr(),
            state,
            fault,
            time_out: self.group.config.time_out.as_nanos().min(u64::MAX as u128 / 2) as u64,
            rank: self.rank as u32,
            ranks: self.ranks() as u32,
            signature: signature(&self.group.config, self.ranks(), operation),
            alone,
        }
    }

    /// The most ranks on one GPU.
    pub(super) fn sharing(&self) -> u32 {
        self.sharing
    }

    pub(super) fn recoveries(&self) -> u64 {
        self.recoveries
    }

    /// Blocks and threads, if they can all be resident: of a kernel made for so many threads, with so much shared memory.
    pub(super) fn blocks(
        &self,
        op: &'static str,
        blocks: Blocks,
        default: [u32; 2],
        max_threads: u32,
        shared_bytes: impl Fn(u32) -> u32,
    ) -> Result<[u32; 2]> {
        // On the SIMT device a few, but as different from each other as on a GPU.
        let [count, threads] = if self.device.is_simt() { [1 + default[0].div_ceil(64), 64] } else { default };
        let threads = blocks.threads.unwrap_or(threads);
        let value = |ok: bool, arg: &'static str, expected: String, got: u32| {
            if ok { Ok(()) } else { Err(Error::Value { op, arg, expected, got: got.to_string() }) }
        };
        let right = threads.is_multiple_of(32) && (32..=max_threads).contains(&threads);
        value(right, "blocks.threads", format!("a multiple of 32, at most {max_threads}"), threads)?;
        // A multiprocessor has registers for as many threads as the kernel was made for, if no more. Of shared memory the driver
        // takes a kilobyte for each block, and each multiprocessor has that much more than a block may have.
        let properties = self.device.properties();
        let each = (properties.max_shared_bytes + 1024) / (shared_bytes(threads) as usize + 1024);
        let room = if self.device.is_simt() {
            kernel::MAX_BLOCKS as u32
        } else {
            properties.multiprocessors / self.sharing * (max_threads / threads).min(each as u32)
        };
        let most = room.min(kernel::MAX_BLOCKS as u32);
        if most == 0 {
            let (needed, there) = (shared_bytes(threads), properties.max_shared_bytes);
            let what = format!(
                "a block of {threads} threads takes {needed} bytes of shared memory for `config.max_tokens`, and this device has {there}: fewer tokens, or fewer threads"
            );
            return Err(Error::Unsupported { op, what });
        }
        let count = blocks.count.unwrap_or(count.min(most));
        value((1..=most).contains(&count), "blocks.count", format!("1 to {most}"), count)?;
        Ok([count, threads])
    }
}

/// A number for all that ranks must agree on, without the highest bit.
fn signature(config: &Config, ranks: usize, operation: &[u32]) -> u32 {
    let common = [PROTOCOL, config.hidden as u32, config.top_k as u32, config.experts as u32, config.max_tokens as u32];
    // FNV-1a, by words.
    let words = common.iter().chain([ranks as u32].iter()).chain(operation).copied().collect::<Vec<_>>();
    words.iter().fold(0x811c_9dc5u32, |hash, w| (hash ^ w).wrapping_mul(0x0100_0193).rotate_left(5)) & !kernel::FAILED
}

// They launch kernels.
#[cfg(all(test, feature = "simt"))]
mod tests {
    use super::*;
    use crate::ep::{Arrangement, Blocks, CombineOptions, DispatchOptions};
    use crate::{SimtOptions, Stream};

    #[test]
    fn who_is_behind_launches_nothing() {
        let ranks =
            Communicator::new(&Device::simt_peers(2, SimtOptions::default()), &Config::new(64, 1, 4, 6)).unwrap();
        let behind =
            |result: Result<()>, own| assert!(matches!(result, Err(Error::Ep(Fault::Behind { rank })) if rank == own));
        std::thread::scope(|s| {
            for mut rank in ranks {
                s.spawn(move || {
                    let stream = Stream::new(rank.device()).unwrap();
                    let (d, r) = (rank.device().clone(), rank.rank());
                    let (mut routing, x) = (rank.routing().unwrap(), Tensor::<bf16>::zeros(&d, &[2, 64]).unwrap());
                    let (ids, mut out) =
                        (Tensor::<i32>::zeros(&d, &[2, 1]).unwrap(), Tensor::zeros(&d, &[2, 64]).unwrap());
                    rank.barrier(&stream).unwrap();
                    assert!(rank.together(|| Err(Error::NoSimt)).is_err());
                    behind(rank.barrier(&stream), r);
                    let options = DispatchOptions::default();
                    behind(rank.dispatch(&stream, &mut routing, &x, &ids, None, &options).map(drop), r);
                    behind(rank.check(&stream), r);
                    rank.recover().unwrap();
                    let received = rank.dispatch(&stream, &mut routing, &x, &ids, None, &options).unwrap();
                    let options = CombineOptions::default();
                    rank.combine(&stream, &mut out, &routing, received.rows.bf16(), &options).unwrap();
                    rank.check(&stream).unwrap();
                    assert!(rank.together(|| Err(Error::NoSimt)).is_err());
                    behind(rank.combine(&stream, &mut out, &routing, None, &options), r);
                });
            }
        });
    }

    /// Flags and counts that only some operations have may be from long ago when they are looked at: half the range of epochs, or when
    /// these begin again. Rank 1 is late, so that whoever takes what is there for what is awaited gets something else.
    #[test]
    fn long_ago_is_not_now() {
        for (i, start) in [1 << 31, (1 << 31) + 7, u32::MAX - 4, u32::MAX - 3].into_iter().enumerate() {
            let options = [SimtOptions::default(), SimtOptions::random(i as u64)][i % 2];
            let devices = Device::simt_peers(2, options);
            let config = Config::new(64, 1, 4, 6).time_out(Duration::from_secs(20));
            let ranks = Communicator::new(&devices, &config).unwrap();
            std::thread::scope(|s| {
                for mut rank in ranks {
                    s.spawn(move || {
                        let (d, r) = (rank.device().clone(), rank.rank());
                        let mut state = [0; kernel::state::COUNT];
                        state[kernel::state::EPOCH] = start;
                        rank.own(|b| b.state.copy_from_slice(&state)).unwrap();
                        let stream = Stream::new(&d).unwrap();
                        let ids = Tensor::from_slice(&d, &[0, 3, 1, 2, 3], &[5, 1]).unwrap();
                        let mut routing = rank.routing().unwrap();
                        for round in 0..4 {
                            let values: Vec<bf16> =
                                (0..5 * 64).map(|v| bf16::from_f32((v % 50 + 60 * r + round) as f32)).collect();
                            let x = Tensor::from_slice(&d, &values, &[5, 64]).unwrap();
                            let mut out = Tensor::zeros(&d, &[5, 64]).unwrap();
                            std::thread::sleep(Duration::from_millis(30 * r as u64));
                            let blocks = Blocks::count(1 + round as u32).threads(32);
                            let slots = if round % 2 == 0 { Arrangement::Compact } else { Arrangement::Slots };
                            let options = DispatchOptions::default().arrangement(slots).blocks(blocks);
                            let received = rank.dispatch(&stream, &mut routing, &x, &ids, None, &options).unwrap();
                            std::thread::sleep(Duration::from_millis(30 * r as u64));
                            let options = CombineOptions::default().blocks(blocks);
                            rank.combine(&stream, &mut out, &routing, received.rows.bf16(), &options).unwrap();
                            rank.check(&stream).unwrap();
                            assert_eq!(out.to_vec().unwrap(), values, "from epoch {start}, round {round}");
                        }
                    });
                }
            });
        }
    }
}
