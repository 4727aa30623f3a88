//! Several ranks in one process: what the tests of their operations share.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;
use warploom::ep::{Communicator, Config};
use warploom::{Device, SimtOptions, Stream};

/// Ways to run ranks: what it is, and a device for each. GPUs with the ranks on one, and one rank on each of several.
///
/// Ranks on GPUs wait for each other inside kernels. Whatever makes the driver wait for the GPU meanwhile, such as memory that
/// another test frees, would make them wait in vain. So these setups are only there if `WARPLOOM_TEST_RANKS=1` says that the tests
/// have the GPUs to themselves, one at a time:
/// `WARPLOOM_TEST_RANKS=1 CUDA_DEVICE_MAX_CONNECTIONS=32 WARPLOOM_TEST_DEVICES=cuda cargo test .. ep:: -- --test-threads=1`.
pub fn setups(counts: &[usize]) -> Vec<(String, Vec<Device>)> {
    let which = std::env::var("WARPLOOM_TEST_DEVICES").unwrap_or_default();
    let mut setups = vec![];
    for &n in counts {
        if which != "cuda" {
            for (name, options) in [
                ("in order", SimtOptions::default()),
                ("race detector", SimtOptions::race()),
                ("random order", SimtOptions::random(n as u64)),
            ] {
                setups.push((format!("{n} SIMT ranks, {name}"), Device::simt_peers(n, options)));
            }
        }
        let alone = std::env::var("WARPLOOM_TEST_RANKS").is_ok_and(|v| v == "1");
        let gpu = if which == "simt" { None } else { warploom_tests::gpu() };
        assert!(which != "cuda" || gpu.is_some(), "WARPLOOM_TEST_DEVICES=cuda, but there is no GPU");
        if gpu.is_some() && !alone {
            eprintln!("ranks on GPUs are skipped: WARPLOOM_TEST_RANKS is not 1");
        }
        let gpu = gpu.filter(|_| alone);
        if let Some(gpu) = gpu {
            setups.push((format!("{n} ranks on one GPU"), vec![gpu; n]));
            let all = Device::cuda_count();
            if n > 1 && all > 1 {
                let device = |r: usize| Device::cuda(r % all).expect("a GPU that was counted");
                setups.push((format!("{n} ranks on {} GPUs", n.min(all)), (0..n).map(device).collect()));
            }
        }
    }
    setups
}

/// Where the threads of all ranks wait for each other. A rank that panicked lets the others panic, too.
pub struct Meeting {
    ranks: usize,
    state: Mutex<(usize, u64)>,
    all: Condvar,
    failed: AtomicBool,
}

impl Meeting {
    pub fn wait(&self) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let round = state.1;
        state.0 += 1;
        if state.0 == self.ranks {
            *state = (0, round + 1);
            self.all.notify_all();
        }
        while state.1 == round {
            assert!(!self.failed.load(Ordering::Relaxed), "another rank has failed");
            let (next, time) = self.all.wait_timeout(state, Duration::from_secs(15)).unwrap();
            state = next;
            assert!(!time.timed_out(), "another rank does not come");
        }
    }

    /// Lets all that wait fail.
    fn fail(&self) {
        let _state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        self.failed.store(true, Ordering::Relaxed);
        self.all.notify_all();
    }
}

/// Runs `test` as every rank, each on a thread of its own; what they return, by rank.
pub fn run<R: Send>(
    devices: &[Device],
    config: &Config,
    test: impl Fn(&mut Communicator, &Stream, &Meeting) -> R + Sync,
) -> Vec<R> {
    run_as(Communicator::new(devices, config).expect("ranks"), test)
}

/// Runs `test` as each of these ranks.
pub fn run_as<R: Send>(
    ranks: Vec<Communicator>,
    test: impl Fn(&mut Communicator, &Stream, &Meeting) -> R + Sync,
) -> Vec<R> {
    let meeting =
        Meeting { ranks: ranks.len(), state: Mutex::default(), all: Condvar::new(), failed: AtomicBool::new(false) };
    std::thread::scope(|s| {
        let (test, meeting) = (&test, &meeting);
        let threads: Vec<_> = ranks
            .into_iter()
            .map(|mut rank| {
                s.spawn(move || {
                    let work = || {
                        let stream = Stream::new(rank.device()).expect("a stream");
                        let outcome = test(&mut rank, &stream, meeting);
                        stream.synchronize().expect("all of it ran");
                        // Nobody frees what others still use.
                        meeting.wait();
                        outcome
                    };
                    let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
                    outcome.unwrap_or_else(|panic| {
                        meeting.fail();
                        std::panic::resume_unwind(panic)
                    })
                })
            })
            .collect();
        let outcomes: Vec<_> = threads.into_iter().map(|t| t.join()).collect();
        outcomes.into_iter().map(|o| o.unwrap_or_else(|e| std::panic::resume_unwind(e))).collect()
    })
}

/// Runs `test` on every setup, and names the one that fails.
pub fn on_every_setup(counts: &[usize], test: impl Fn(&[Device])) {
    for (name, devices) in setups(counts) {
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| test(&devices)));
        if let Err(panic) = outcome {
            eprintln!("the failure above happened with {name}");
            std::panic::resume_unwind(panic);
        }
    }
}

/// A small generator of numbers below `n`.
pub struct Dice(pub u64);

impl Dice {
    pub fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        ((self.0 >> 33) % n as u64) as usize
    }

    /// Experts of so many tokens: distinct, some of them none.
    pub fn experts(&mut self, tokens: usize, top_k: usize, experts: usize) -> Vec<i32> {
        let mut ids = vec![];
        for _ in 0..tokens {
            let mut all: Vec<i32> = (0..experts as i32).collect();
            for k in 0..top_k {
                let i = k + self.below(experts - k);
                all.swap(k, i);
                ids.push(if self.below(8) == 0 { -1 } else { all[k] });
            }
        }
        ids
    }
}
