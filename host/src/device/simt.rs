//! The SIMT device: kernels on the CPU.

use super::{Geometry, Properties};
use crate::error::{Error, Result};
use cuda_std::{Arch, Entry, KernelArgs};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// How long a block may do nothing but poll, beyond what it was said that it may.
const STUCK: Duration = Duration::from_secs(10);

/// How a SIMT device runs kernels, and what it looks for.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
#[must_use]
pub struct SimtOptions {
    /// In order (fast, reproducible) or random (by a seed).
    pub order: simt::Order,
    /// Whether to look for races and for reads of shared memory that nothing wrote.
    pub race: bool,
    /// Whether blocks may run in parallel.
    pub parallel: bool,
    /// Whether matrix products run as plain loops on the CPU where their path is left open ([`Auto`](crate::gemm::LinearPath::Auto)): far faster than a kernel in the emulator, and not checked by it.
    pub host_products: bool,
    /// How many multiprocessors the device says that it has, at least 1: grids, and sizes from which on other kernels are chosen, follow it.
    pub multiprocessors: u32,
    /// Whether the device is one of compute capability 8.6, whose blocks have 99 KiB of shared memory: kernels are chosen as they are for most GPUs, and those
    /// that only Hopper has are refused. Otherwise it is of 9.0, and has all of them.
    pub portable: bool,
}

impl Default for SimtOptions {
    /// From the environment: `SIMT_SEED=n` for random order, `SIMT_RACE=1`, `SIMT_SERIAL=1`. Otherwise in order,
    /// in parallel, without the race detector.
    fn default() -> Self {
        let env = simt::Defaults::from_env();
        Self { order: env.order, race: env.race, parallel: env.parallel, ..Self::in_order() }
    }
}

impl SimtOptions {
    /// In order, in parallel, without the race detector, on four multiprocessors.
    fn in_order() -> Self {
        let order = simt::Order::InOrder;
        Self { order, race: false, parallel: true, host_products: false, multiprocessors: 4, portable: false }
    }

    /// In order, with the race detector.
    pub fn race() -> Self {
        Self { race: true, ..Self::in_order() }
    }

    /// In random order with preemption at memory accesses; within a block the same order for the same `seed`, and if blocks do not run in parallel that of all threads.
    pub fn random(seed: u64) -> Self {
        Self { order: simt::Order::Random { seed, preempt: true }, ..Self::in_order() }
    }

    /// With matrix products as plain loops on the CPU, or not.
    pub fn host_products(mut self, on: bool) -> Self {
        self.host_products = on;
        self
    }

    /// With `n` multiprocessors instead of four; at least one.
    pub fn multiprocessors(mut self, n: u32) -> Self {
        self.multiprocessors = n.max(1);
        self
    }

    /// As a device of compute capability 8.6, or not.
    pub fn portable(mut self, on: bool) -> Self {
        self.portable = on;
        self
    }
}

pub(crate) struct SimtDevice {
    options: SimtOptions,
    id: u64,
    /// Held by whatever touches the device's memory, so that host threads that share tensors never race.
    memory: Mutex<()>,
    /// The devices whose kernels it shares memory with, and its number among them.
    peers: Option<(Arc<simt::Peers>, usize)>,
    /// What was launched last, on whichever stream: kernels run in the order in which they are launched.
    queue: simt::Queue,
    /// Milliseconds for which kernels that wait for peers may do nothing else before they give up by themselves.
    patience: AtomicU64,
}

impl SimtDevice {
    pub(super) fn new(options: SimtOptions) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self {
            options,
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            memory: Mutex::new(()),
            peers: None,
            queue: simt::Queue::new(),
            patience: AtomicU64::new(0),
        }
    }

    /// One of several that reach each other's memory.
    pub(super) fn peer(options: SimtOptions, peers: Arc<simt::Peers>, number: usize) -> Self {
        Self { peers: Some((peers, number)), ..Self::new(options) }
    }

    /// Whether the other was made together with this one.
    pub(super) fn is_peer(&self, other: &Self) -> bool {
        match (&self.peers, &other.peers) {
            (Some((a, _)), Some((b, _))) => Arc::ptr_eq(a, b),
            _ => false,
        }
    }

    /// The host has waited for all peers: what they did before races with nothing that follows.
    pub(super) fn forget_races(&self) {
        if let Some((peers, _)) = &self.peers {
            peers.forget();
        }
    }

    /// Kernels of this device may wait for their peers for so long before they say so themselves.
    pub(super) fn be_patient(&self, time: Duration) {
        let time = u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        self.patience.fetch_max(time, Ordering::Relaxed);
    }

    pub(super) fn options(&self) -> SimtOptions {
        self.options
    }

    pub(super) fn name(&self) -> String {
        format!("SIMT {}", self.id)
    }

    /// Runs `f`, for the host, while nobody else touches the device's memory.
    pub(super) fn exclusive<R>(&self, f: impl FnOnce() -> R) -> R {
        self.alone(|| {
            self.host_waits();
            f()
        })
    }

    /// The host has given out memory: whatever is launched next may follow any kernel.
    pub(super) fn forget_launches(&self) {
        self.queue.forget();
    }

    /// The host has waited, so whatever is launched next may follow any kernel, and follows all of this device's.
    pub(super) fn host_waits(&self) {
        self.queue.forget();
        if let Some((peers, number)) = &self.peers {
            peers.host_waits(*number);
        }
    }

    /// What is launched next here follows all that the other device did.
    pub(super) fn waits_for(&self, other: &Self) {
        if let (Some((peers, number)), Some((_, after)), true) = (&self.peers, &other.peers, self.is_peer(other)) {
            peers.device_waits(*number, *after);
        }
    }

    /// As [`exclusive`](Self::exclusive), for work that is submitted to a stream.
    pub(super) fn in_stream<R>(&self, f: impl FnOnce() -> R) -> R {
        self.alone(|| {
            self.queue.done();
            f()
        })
    }

    fn alone<R>(&self, f: impl FnOnce() -> R) -> R {
        let _guard = self.memory.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        f()
    }

    /// Whose kernels it runs.
    pub(super) fn arch(&self) -> Arch {
        if self.options.portable { Arch::Sm80 } else { Arch::Sm90a }
    }

    /// Refuses what needs more.
    pub(super) fn needs(&self, arch: Arch, what: impl FnOnce() -> String) -> Result<()> {
        if arch > self.arch() {
            return Err(super::too_old(self.name(), self.properties().compute_capability, what(), arch));
        }
        Ok(())
    }

    pub(super) fn properties(&self) -> Properties {
        let (compute_capability, max_shared_bytes) =
            if self.options.portable { ((8, 6), super::SHARED_BYTES_8_6) } else { ((9, 0), simt::MAX_SHARED_BYTES) };
        Properties {
            compute_capability,
            multiprocessors: self.options.multiprocessors.max(1),
            max_shared_bytes,
            memory_bytes: 0,
        }
    }

    /// # Safety
    /// As for [`Stream::launch`](super::Stream::launch).
    pub(super) unsafe fn launch<A: KernelArgs>(&self, entry: &Entry<A>, geometry: &Geometry, args: &A) -> Result<()> {
        self.needs(entry.arch, || format!("kernel {}", entry.name))?;
        let max_shared_bytes = self.properties().max_shared_bytes;
        if geometry.shared_bytes as usize > max_shared_bytes {
            return Err(super::too_much_shared(entry.name, geometry.shared_bytes, &self.name(), max_shared_bytes));
        }
        let dim = |d: [u32; 3]| simt::Dim3::new(d[0], d[1], d[2]);
        let launch = simt::Launch::new(entry.name)
            .grid(dim(geometry.grid))
            .block(dim(geometry.block))
            .max_threads(entry.max_threads)
            .cluster(geometry.cluster)
            .together(geometry.resident)
            .shared_bytes(geometry.shared_bytes as usize)
            .after(&self.queue, geometry.dependent)
            .order(self.options.order)
            .race(self.options.race)
            .parallel(self.options.parallel);
        let launch = match &self.peers {
            Some((peers, number)) => {
                let patience = Duration::from_millis(self.patience.load(Ordering::Relaxed));
                launch.peers(peers, *number).spin_limit(patience.saturating_add(STUCK))
            }
            None => launch,
        };
        let call = entry.on_simt().ok_or(Error::NoSimt)?;
        // SAFETY: forwarded to the caller.
        self.alone(|| unsafe { launch.run(|| call(args)) })?;
        Ok(())
    }
}
