//! What the host tells the sampling kernels: parameters by row, outputs, workspace.

use super::weights::{KEY_NEG_INF, Weights, bits_of};
use cuda_std::{Global, GlobalMut, Shared, unroll};

/// A parameter that is the same for all rows, or has a value for each.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct PerRow<T> {
    /// `[rows]`, or null.
    pub each: *const T,
    /// What holds for all rows if `each` is null.
    pub all: T,
}

impl<T: Copy> PerRow<T> {
    /// One value for all rows.
    pub const fn all(all: T) -> Self {
        Self { each: core::ptr::null(), all }
    }

    /// The value of a row.
    #[inline(always)]
    pub unsafe fn get(self, row: u32) -> T {
        if self.each.is_null() { self.all } else { Global::new(self.each).get(row) }
    }
}

/// Bins of a histogram of `radix`.
pub const BINS: u32 = 2048;

/// Elements of a histogram of a row: count and mass of each bin.
pub const HISTOGRAM_WORDS: usize = 2 * BINS as usize;

/// Histograms of a row: one of the leading digit, one of the digit that is being looked at.
pub const HISTOGRAMS: usize = 2;

/// State of a row between blocks and kernels. All zeros between operations: whoever is last resets it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct RowState {
    /// Key of the largest logit.
    pub max_key: u32,
    /// What `radix` is looking for: see there.
    pub goal: u32,
    /// Digit of the key that is being looked at.
    pub digit: u32,
    /// Digits found so far.
    pub prefix: u32,
    /// Sum of all weights, before any filter.
    pub sum: u64,
    /// Position that is searched: a rank or a mass.
    pub position: u64,
    /// Tokens that rank above those with `prefix`.
    pub count_above: u64,
    /// Their mass.
    pub mass_above: u64,
    /// Tokens that top-k and top-p keep.
    pub kept: u64,
    /// Their mass.
    pub kept_mass: u64,
}

/// One call of the operation. Pointers may be null where it says so.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Job {
    /// Elements from one row of the logits to the next.
    pub stride: u64,
    /// Tokens of a row: 1 to 2^31 - 1.
    pub vocab: u32,
    /// Rows that keep up to this many tokens are sampled by `top_k_top_p`, the others by `radix`.
    pub quick_limit: u32,
    /// The most tokens that a row may keep: the vocabulary, unless the host knows better.
    pub max_k: u32,
    /// Entries of a row of the `top_*` outputs, up to [`super::top_k::MAX_K`].
    pub top_n: u32,
    /// Not 0: the logits are what `adjust` wrote, of which [`BANNED`](super::weights::BANNED) is not allowed. In others it is a NaN like any.
    pub adjusted: u32,
    /// Not 0 for `top_k_top_p` where `log_probs` follows, which writes the log-probabilities before the filters and finds the best in the workspace. (So there are no
    /// outputs for them here.)
    pub later: u32,
    /// Not positive or NaN: greedy.
    pub temperature: PerRow<f32>,
    /// Below 1 or above `max_k`: that.
    pub top_k: PerRow<i32>,
    /// 1 or more, or NaN: all. 0 or less: the most probable.
    pub top_p: PerRow<f32>,
    /// 0 or less, or NaN: all. 1 or more: those as probable as the most probable.
    pub min_p: PerRow<f32>,
    /// Of the random numbers.
    pub seed: PerRow<u64>,
    /// Of the random numbers.
    pub offset: PerRow<u64>,
    /// Of the random numbers; `subsequence_step` times the row is added.
    pub subsequence: PerRow<u64>,
    /// 0 or 1.
    pub subsequence_step: u64,
    /// `[rows]`.
    pub tokens: *mut i32,
    /// `[rows]`, or null: log-probability of the token before the filters.
    pub before: *mut f32,
    /// `[rows]`, or null: after the filters.
    pub after: *mut f32,
    /// `[rows, top_n]`, or null if `top_n` is 0.
    pub top_tokens: *mut i32,
    /// `[rows, top_n]`, or null.
    pub top_before: *mut f32,
    /// `[rows, top_n]`, or null.
    pub top_after: *mut f32,
    /// `[rows]`: blocks of the running kernel that are done with the row. Zeros between kernels.
    pub tickets: *mut u32,
    /// `[rows]`.
    pub state: *mut RowState,
    /// `[rows, HISTOGRAMS, HISTOGRAM_WORDS]`.
    pub histograms: *mut u64,
    /// `[rows, top_k::CAPACITY]`: the lists that `split_k` merges.
    pub lists: *mut u64,
    /// `[rows, top_k::MAX_K]`: the best candidates of rows that `radix` samples, or that `log_probs` follows.
    pub best: *mut u64,
    /// `[rows, chunks]`: what `radix` counted in each chunk.
    pub chunk_counts: *mut u32,
}

// Plain numbers and addresses, laid out alike by host and device.
cuda_std::struct_param!(Job);

/// The parameters of a row, as the kernels use them.
#[derive(Clone, Copy)]
pub struct Settings {
    /// Tokens kept: 1, of greedy rows, to the vocabulary.
    pub k: u32,
    /// 1 for greedy rows, of which log-probabilities may be wanted nevertheless.
    pub temperature: f32,
    /// 2^32 times the mass kept; `None` for all.
    pub top_p: Option<u32>,
    /// Smallest weight kept.
    pub least: u64,
}

/// Words of shared memory for [`Job::look_up`].
pub const PARAMETERS: usize = 8;

impl Settings {
    /// What [`Job::look_up`] has left, and the random bits.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn looked_up(parameters: Shared<u32>) -> (Self, u32) {
        let [k, temperature, cuts, top_p, low, high, draw] = [0u32, 1, 2, 3, 4, 5, 6].map(|i| parameters.get(i));
        let settings = Self {
            k,
            temperature: f32::from_bits(temperature),
            top_p: if cuts != 0 { Some(top_p) } else { None },
            least: low as u64 | (high as u64) << 32,
        };
        (settings, draw)
    }
}

impl Job {
    /// The parameters of a row.
    #[inline(always)]
    pub unsafe fn settings(&self, row: u32) -> Settings {
        let temperature = self.temperature.get(row);
        let greedy = temperature <= 0.0 || temperature.is_nan();
        let k = self.top_k.get(row);
        let k = if k < 1 || k as u32 > self.max_k { self.max_k } else { k as u32 };
        let p = self.top_p.get(row);
        // In units of 2^-32, rounded up, since what is kept has at least that mass. Only numbers below 2^-9 have places beyond those, so that none of them becomes 2^32.
        let units = p * (1u64 << 32) as f32;
        let whole = units as u32;
        let top_p = if p < 1.0 { Some(whole + ((whole as f32) < units) as u32) } else { None };
        let min_p = self.min_p.get(row);
        let one = 1u64 << bits_of(self.vocab);
        let least = if min_p >= 1.0 { one } else { (min_p * one as f32) as u64 };
        Settings { k: if greedy { 1 } else { k }, temperature: if greedy { 1.0 } else { temperature }, top_p, least }
    }

    /// Leaves the parameters of the row and its random bits in shared memory, where [`Settings::looked_up`] finds them after a barrier. By
    /// one thread that has nothing else to do.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn look_up(&self, row: u32, parameters: Shared<u32>) {
        let settings = self.settings(row);
        let words = [
            settings.k,
            settings.temperature.to_bits(),
            settings.top_p.is_some() as u32,
            settings.top_p.unwrap_or(0),
            settings.least as u32,
            (settings.least >> 32) as u32,
            self.draw(row),
        ];
        unroll::<7>(|i| parameters.set(i as u32, words[i]));
    }

    /// The weights of a row whose largest logit has this key.
    #[inline(always)]
    pub fn weights(&self, settings: &Settings, max_key: u32) -> Weights {
        Weights { max_key, scale: core::f32::consts::LOG2_E / settings.temperature, bits: bits_of(self.vocab) }
    }

    /// The random bits of a row.
    #[inline(always)]
    pub unsafe fn draw(&self, row: u32) -> u32 {
        let subsequence = self.subsequence.get(row).wrapping_add(self.subsequence_step * row as u64);
        super::philox::draw(self.seed.get(row), subsequence, self.offset.get(row))
    }

    /// Whether log-probabilities before the filters are wanted.
    #[inline(always)]
    pub fn wants_before(&self) -> bool {
        !self.before.is_null() || !self.top_before.is_null()
    }

    /// Resets what `row_sum` left, once it has been used.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn reset_sum(&self, row: u32) {
        if self.wants_before() {
            let state = self.state.wrapping_add(row as usize);
            GlobalMut::new(&raw mut (*state).max_key).set(0u32, 0);
            GlobalMut::new(&raw mut (*state).sum).set(0u32, 0);
        }
    }

    /// A row of the logits.
    #[inline(always)]
    pub unsafe fn row<T: super::logit::Logit>(&self, logits: *const T, row: u32) -> super::logit::Row<T> {
        super::logit::Row::new(Global::new(logits).offset(row as usize * self.stride as usize), self.vocab)
    }

    /// Whether this is the last of `blocks` blocks to be done with the row; the same in all threads. What the blocks
    /// wrote before is visible to the last one. `flag` is a word of shared memory.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn last_of_row(&self, row: u32, blocks: u32, flag: Shared<u32>) -> bool {
        use cuda_std::atomic::{AcqRel, Device};
        use cuda_std::thread;
        thread::sync_threads();
        if thread::thread_idx_x() == 0 {
            let tickets = GlobalMut::new(self.tickets);
            let last = tickets.fetch_add(row, 1, Device, AcqRel) + 1 == blocks;
            if last {
                tickets.set(row, 0);
            }
            flag.set(0u32, last as u32);
        }
        thread::sync_threads();
        flag.get(0u32) != 0
    }
}

/// Writes a row's log-probabilities.
pub struct LogProbs {
    /// Of the row.
    pub weights: Weights,
    /// Of the row.
    pub temperature: f32,
    /// Sum of all weights.
    pub sum: u64,
    /// Sum of the weights kept.
    pub kept_mass: u64,
}

impl LogProbs {
    /// Before the filters: `ln softmax(x / temperature)`.
    #[inline(always)]
    pub fn before(&self, key: u32) -> f32 {
        self.of(key, self.sum)
    }

    /// After the filters, of a token that they kept.
    #[inline(always)]
    pub fn after(&self, key: u32) -> f32 {
        self.of(key, self.kept_mass)
    }

    #[inline(always)]
    fn of(&self, key: u32, total: u64) -> f32 {
        if key <= KEY_NEG_INF {
            return f32::NEG_INFINITY;
        }
        let one = (1u64 << self.weights.bits) as f32;
        let half = self.weights.half_distance(key);
        let distance = if key == self.weights.max_key {
            0.0
        } else if half == f32::NEG_INFINITY {
            // Below +inf, however high the temperature.
            half
        } else {
            2.0 * (half / self.temperature)
        };
        distance - cuda_std::float::log2(total as f32 / one) * core::f32::consts::LN_2
    }
}
