//! The gate of a mixture of experts: scores every expert for a token, picks the best ones, weighs them.
//!
//! For each row of router logits: `score = f(logit)`; `biased = score + bias`; the experts are cut into groups of
//! neighbours, a group is worth the sum of its two best biased scores, and only the best `topk_group` groups stay; of
//! their experts the `topk` with the best biased scores are chosen, in descending order. Their weights are the scores
//! without the bias. Source: DeepSeek-AI, *DeepSeek-V3 Technical Report*, 2024, section 2.1.2.
//!
//! A warp does a token: nothing is shared between warps and there is no block barrier. The work is bound by
//! instructions, not by bytes, and for few tokens by the length of the chain of dependent instructions.
//!
//! [`gate_fixed`], for numbers of experts and groups known to the compiler and up to [`fixed_topk`] experts a token,
//! keeps everything in registers. A lane has neighbouring experts, so that lanes are in the order of experts:
//!
//! * biased scores become integers that order alike ([`key`]); each lane sorts its own with a network of comparators;
//! * a round takes the best of 32 heads (`redux`), finds the lowest lane that has it (`vote`), and that lane shifts its
//!   sorted list. There is no search within a lane and no memory on this path, about six instructions long;
//! * neither the expert's number nor its score is carried through the network, which would triple it: in the end lane
//!   `r` knows the key and the lane of the `r`-th best, and looks through that lane's experts by shuffles, for all ranks
//!   at once.
//!
//! For 256 experts in 8 groups and 8 experts a token that is some 560 instructions of a warp on sm_90: 150 for scores,
//! 120 for keys, sorting and groups, 110 for the rounds, 50 to find the experts.
//!
//! [`gate_dynamic`] is for everything else. It keeps the keys in shared memory as a matrix of 32 columns, one for each
//! lane. A round finds the best key and its lowest index with two `redux`; then the whole warp looks through the column
//! that lost its best. That takes the same time for any number of experts up to 1024, and picks groups as well.
//!
//! All arithmetic is `f32`: polynomials of fused multiply-adds and a correctly rounded reciprocal, at most 3 units in
//! the last place off (a softmax, whose exponent is rounded, by as many more as a logit is below the largest), and the same for equal logits wherever they stand. Exponentials below 2^-126.5 count as 0 (of the softplus below 2^-126).

use cuda_std::shared::Shared;
use cuda_std::vec::{B32, B64, B128};
use cuda_std::{Float, Global, GlobalMut, convert, dependent_launch, entries, float, thread, unroll, warp};
use half::{bf16, f16};

/// Values of the argument `scoring`: `1 / (1 + e^-x)`.
pub const SIGMOID: u32 = 0;
/// Values of the argument `scoring`: `e^x` divided by its sum over all experts.
pub const SOFTMAX: u32 = 1;
/// Values of the argument `scoring`: `sqrt(ln(1 + e^x))`.
pub const SQRT_SOFTPLUS: u32 = 2;

/// Values of the argument `bias_type`.
pub const BIAS_F32: u32 = 0;
/// Values of the argument `bias_type`.
pub const BIAS_F16: u32 = 1;
/// Values of the argument `bias_type`.
pub const BIAS_BF16: u32 = 2;

/// The most experts a token that the kernels with a fixed number of experts choose: a round of each is unrolled.
pub const fn fixed_topk(experts: u32) -> u32 {
    if experts == 512 { 10 } else { 8 }
}

/// The most experts a token that any kernel chooses.
pub const MAX_TOPK: u32 = 32;
/// The most experts.
pub const MAX_EXPERTS: u32 = 1024;
/// The most threads of a block; a token takes 32.
pub const MAX_THREADS: u32 = 256;

/// Words of shared memory for a matrix of `n` keys: rows of 32 and a gap, so that columns are free of bank conflicts.
const fn matrix_words(n: u32) -> u32 {
    n.div_ceil(32).saturating_mul(ROW)
}

/// Dynamic shared memory of [`gate_dynamic`] for each warp: the keys, and the biases, whose place groups take later.
pub const fn dynamic_shared_bytes(experts: u32) -> u32 {
    matrix_words(experts).saturating_mul(8)
}

/// Distance between rows of a matrix of keys.
const ROW: u32 = 33;

/// Less than any key: not there, chosen already, or in a group that was dropped.
const REMOVED: i32 = i32::MIN;

/// The arguments in one place; see [`Args`].
#[derive(Clone, Copy)]
struct Gate<T> {
    logits: Global<T>,
    bias: *const u8,
    bias_type: u32,
    weights: GlobalMut<f32>,
    ids: GlobalMut<i32>,
    packed: *mut u32,
    expert_map: *const i32,
    token: u32,
    /// The row is padding if its number is not below this,
    valid_rows: i32,
    /// or if this is 0.
    row_mask: u8,
    experts: u32,
    topk: u32,
    shared_experts: u32,
    scoring: u32,
    renormalize: u32,
    routed_scale: f32,
    shared_weight: f32,
}

// ---------------------------------------------------------------------------------------------------------------------
// Scores
// ---------------------------------------------------------------------------------------------------------------------

/// What the softmax of a row needs.
#[derive(Clone, Copy)]
struct Softmax {
    max: f32,
    /// Of the sum; 0 if there is nothing to sum.
    reciprocal: f32,
}

/// `e^y` for `y <= 0`, at most 1 unit in the last place off; 0 below 2^-126.5; NaN stays NaN.
///
/// `y = n ln 2 + r` with `|r| <= ln 2 / 2`. Adding `ROUND` leaves `n + 127` in the low bits, which is the exponent field
/// of 2^n; it is 0 for the lowest `y` let through, and so is that "power". The polynomial is a minimax fit of this
/// project, relative error 2^-28. No branches: they would cost more than all of it.
#[inline(always)]
fn exp_of_negative(y: f32) -> f32 {
    const ROUND: f32 = 12_582_912.0 + 127.0;
    const LN2_HI: f32 = core::f32::consts::LN_2;
    const LN2_LO: f32 = -1.904_654_2e-9;
    let y = float::max_propagate(y, -88.0);
    let t = float::fma(y, core::f32::consts::LOG2_E, ROUND);
    let n = t - ROUND;
    let r = float::fma(n, -LN2_LO, float::fma(n, -LN2_HI, y));
    let mut p = 0.001_381_459_6;
    p = float::fma(p, r, 0.008_368_718);
    p = float::fma(p, r, 0.041_668_39);
    p = float::fma(p, r, 0.166_665_21);
    p = float::fma(p, r, 0.499_999_94);
    p = float::fma(p, r, 1.0);
    p = float::fma(p, r, 1.0);
    p * f32::from_bits(t.to_bits() << 23)
}

/// `1 / d` for `d` neither huge nor tiny: one Newton step makes it correctly rounded but for rare cases, without the
/// branches of the general function.
#[inline(always)]
fn recip(d: f32) -> f32 {
    let r = float::fast::recip(d);
    float::fma(r, float::fma(-d, r, 1.0), r)
}

/// `1 / (1 + e^-x)`, without overflow and without cancellation.
#[inline(always)]
fn sigmoid(x: f32) -> f32 {
    let e = exp_of_negative(-float::abs(x));
    let r = recip(1.0 + e);
    if x < 0.0 { e * r } else { r }
}

/// `sqrt(ln(1 + e^x))`; of infinity the root of the largest number.
///
/// `ln(1 + e^x) = max(x, 0) + ln(1 + e^-|x|)`, and `ln(1 + e) = 2 artanh(e / (2 + e))`, an odd function whose argument
/// is at most 1/3: no cancellation, however small `e` is. Minimax fit of this project, relative error 2^-27.
#[inline(always)]
fn sqrt_softplus(x: f32) -> f32 {
    let e = exp_of_negative(-float::abs(x));
    let z = e * recip(2.0 + e);
    let w = z * z;
    let mut p = 0.280_251_47;
    p = float::fma(p, w, 0.279_990_1);
    p = float::fma(p, w, 0.400_217_06);
    p = float::fma(p, w, 0.666_664_1);
    let log = float::fma(p * w, z, 2.0 * z);
    // A NaN is gone from the first term but not from the second.
    let y = float::min(float::max(x, 0.0), f32::MAX) + log;
    // One Newton step from the reciprocal root. Of what is below the normal numbers the root is 0.
    let y = if y < f32::MIN_POSITIVE { 0.0 } else { y };
    let g = float::min(float::fast::rsqrt(y), f32::MAX);
    let s = y * g;
    float::fma(float::fma(-s, s, y), 0.5 * g, s)
}

impl Softmax {
    /// Before it is divided by the sum. Infinities get the same, as in the limit.
    #[inline(always)]
    fn numerator(self, x: f32) -> f32 {
        let e = exp_of_negative(x - self.max);
        if x == self.max { 1.0 } else { e }
    }
}

impl Softmax {
    /// For a scoring that is none.
    const NONE: Self = Self { max: 0.0, reciprocal: 0.0 };

    /// Of a row whose largest logits each lane knows of those that it has; `sum` adds the [`addend`](Self::addend)s of
    /// those.
    #[inline(always)]
    fn of_row(max: f32, sum: impl FnOnce(Self) -> f32) -> Self {
        let max = warp::reduce_max(max);
        // Without any evidence: every numerator is 0.
        let max = if max == f32::NEG_INFINITY { 0.0 } else { max };
        let this = Self { max, reciprocal: 0.0 };
        let sum = warp::reduce_sum(sum(this));
        Self { max, reciprocal: if sum > 0.0 { float::recip(sum) } else { 0.0 } }
    }

    #[inline(always)]
    fn score(self, x: f32) -> f32 {
        self.numerator(x) * self.reciprocal
    }

    /// The numerator in the sum, to which NaN adds nothing: the larger of NaN and 0 is 0.
    #[inline(always)]
    fn addend(self, x: f32) -> f32 {
        float::max(self.numerator(x), 0.0)
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Keys
// ---------------------------------------------------------------------------------------------------------------------

/// An integer that orders as the number does; NaN as -inf. There is no -0 here: scores are sums with +0.
#[inline(always)]
fn key(x: f32) -> i32 {
    // The larger of NaN and -inf is -inf.
    flip(float::max(x, f32::NEG_INFINITY).to_bits() as i32)
}

/// The number of a key; NaN for [`REMOVED`].
#[inline(always)]
fn number(key: i32) -> f32 {
    f32::from_bits(flip(key) as u32)
}

/// Two's complement from sign and magnitude, and back.
#[inline(always)]
fn flip(bits: i32) -> i32 {
    bits ^ (bits >> 31 & i32::MAX)
}

/// The two best of four, of which each pair is in order.
#[inline(always)]
fn best_two((a0, a1): (i32, i32), (b0, b1): (i32, i32)) -> (i32, i32) {
    (a0.max(b0), a0.min(b0).max(a1.max(b1)))
}

// ---------------------------------------------------------------------------------------------------------------------
// Experts in registers
// ---------------------------------------------------------------------------------------------------------------------

/// `V` neighbours from element `at` on as they lie in memory, in the widest accesses that divide them. Elements of two
/// bytes fill the first half.
///
/// They are [taken apart](element) later: whatever uses a loaded value makes the warp wait for it, and the loads that
/// follow should be on their way before.
#[inline(always)]
unsafe fn load<T: Float, const V: usize>(from: Global<T>, at: usize) -> [u32; V] {
    let words = V * size_of::<T>() / 4;
    let per_word = 4 / size_of::<T>();
    let mut out = [0; V];
    macro_rules! accesses {
        ($Vector:ident, $n:literal) => {{
            let mut i = 0;
            while i < words {
                let $Vector(part) = from.get_as::<$Vector<u32, $n>>(at + i * per_word);
                let mut j = 0;
                while j < $n {
                    out[i + j] = part[j];
                    j += 1;
                }
                i += $n;
            }
        }};
    }
    match words % 4 {
        0 => accesses!(B128, 4),
        2 => accesses!(B64, 2),
        _ => accesses!(B32, 1),
    }
    out
}

/// Element `i` of what [`load`] returned.
#[inline(always)]
fn element<T: Float, const V: usize>(words: &[u32; V], i: usize) -> f32 {
    // SAFETY: a word, or half of one, has the size of the element, and all bits are values.
    let element: T = unsafe {
        match size_of::<T>() {
            4 => core::mem::transmute_copy(&words[i]),
            _ => core::mem::transmute_copy(&((words[i / 2] >> (i % 2 * 16)) as u16)),
        }
    };
    element.to_f32()
}

/// Loads the biases of a lane as numbers.
#[inline(always)]
unsafe fn load_bias<const V: usize>(bias: *const u8, bias_type: u32, at: usize) -> [f32; V] {
    #[inline(always)]
    unsafe fn load_as<B: Float, const V: usize>(bias: *const u8, at: usize) -> [f32; V] {
        let words = load::<B, V>(Global::new(bias.cast()), at);
        core::array::from_fn(|i| element::<B, V>(&words, i))
    }
    match (bias.is_null(), bias_type) {
        (true, _) => [0.0; V],
        (_, BIAS_F32) => load_as::<f32, V>(bias, at),
        (_, BIAS_F16) => load_as::<f16, V>(bias, at),
        _ => load_as::<bf16, V>(bias, at),
    }
}

/// The alignment that [`load`] needs, in bytes, for `experts` of `element` bytes.
pub const fn fixed_alignment(experts: u32, element: u32) -> u32 {
    let bytes = experts / 32 * element;
    let power = bytes & bytes.wrapping_neg();
    if power > 16 { 16 } else { power }
}

/// Comparators that sort `V` numbers: Batcher's odd-even merge sort, *Sorting networks and their applications*, 1968.
struct Network<const V: usize>;

impl<const V: usize> Network<V> {
    const PAIRS: ([(usize, usize); 64], usize) = {
        let mut pairs = [(0, 0); 64];
        let mut n = 0;
        let mut p = 1;
        while p < V {
            let mut k = p;
            while k >= 1 {
                let mut j = k % p;
                while j + k < V {
                    let mut i = 0;
                    while i < k && i + j + k < V {
                        if (i + j) / (2 * p) == (i + j + k) / (2 * p) {
                            pairs[n] = (i + j, i + j + k);
                            n += 1;
                        }
                        i += 1;
                    }
                    j += 2 * k;
                }
                k /= 2;
            }
            p *= 2;
        }
        (pairs, n)
    };

    /// The largest first.
    #[inline(always)]
    fn sort(keys: &mut [i32; V]) {
        let mut c = 0;
        while c < Self::PAIRS.1 {
            let (i, j) = Self::PAIRS.0[c];
            (keys[i], keys[j]) = (keys[i].max(keys[j]), keys[i].min(keys[j]));
            c += 1;
        }
    }
}

/// Whether the lane's group is among the `topk_group` best of `GROUPS`, given the two best keys of each lane.
#[inline(always)]
fn in_best_group<const GROUPS: u32>(best: (i32, i32), topk_group: u32, lane: u32) -> bool {
    let lanes = 32 / GROUPS;
    let mut best = best;
    let mut step = 1;
    while step < lanes {
        let other = (warp::shfl_xor(best.0, step), warp::shfl_xor(best.1, step));
        best = best_two(best, other);
        step *= 2;
    }
    let mine = key(number(best.0) + number(best.1));
    // The lanes of a group share the work of comparing it with all groups.
    let (group, member) = (lane / lanes, lane % lanes);
    let mut better = 0;
    let mut first = 0;
    while first < GROUPS {
        let rival = first + member;
        let theirs = warp::shfl_idx(mine, rival % GROUPS * lanes);
        let wins = rival < GROUPS && (theirs > mine || (theirs == mine && rival < group));
        let wins = warp::warp_vote_ballot(warp::FULL, wins) >> (group * lanes);
        better += (wins & ((1u64 << lanes) - 1) as u32).count_ones();
        first += lanes;
    }
    better < topk_group
}

/// `32 * V` experts in `GROUPS` groups, a power of two; `topk` is at most [`fixed_topk`], logits and bias are aligned to
/// [`fixed_alignment`].
#[inline(always)]
unsafe fn gate_fixed<T: Float, const V: usize, const GROUPS: u32>(gate: Gate<T>, topk_group: u32) {
    let lane = warp::lane_id();
    let at = lane as usize * V;
    let words = load::<T, V>(gate.logits, at);
    let bias = load_bias::<V>(gate.bias, gate.bias_type, at);
    let x: [f32; V] = core::array::from_fn(|i| element::<T, V>(&words, i));

    let scores: [f32; V] = match gate.scoring {
        SIGMOID => core::array::from_fn(|i| sigmoid(x[i])),
        SOFTMAX => {
            let max = x.into_iter().fold(f32::NEG_INFINITY, float::max);
            let softmax = Softmax::of_row(max, |s| x.into_iter().map(|x| s.addend(x)).sum());
            core::array::from_fn(|i| softmax.score(x[i]))
        }
        _ => core::array::from_fn(|i| sqrt_softplus(x[i])),
    };
    let keys: [i32; V] = core::array::from_fn(|i| key(scores[i] + bias[i]));

    let mut sorted = keys;
    Network::sort(&mut sorted);
    // A lane whose head is gone never wins, so that nothing else has to go.
    if GROUPS > 1 && topk_group < GROUPS && !in_best_group::<GROUPS>((sorted[0], sorted[1]), topk_group, lane) {
        sorted[0] = REMOVED;
    }

    // Lane r learns the key and the lane of the r-th best.
    let (mut my_key, mut my_lanes) = (REMOVED, 0);
    let below = (1u32 << lane) - 1;
    let rounds = const { fixed_topk(32 * V as u32) };
    unroll::<16>(|r| {
        let r = r as u32;
        if r < rounds && r < gate.topk {
            let best = warp::warp_reduce_max_i32(warp::FULL, sorted[0]);
            let has = sorted[0] == best;
            let equal = warp::warp_vote_ballot(warp::FULL, has);
            if lane == r {
                (my_key, my_lanes) = (best, equal);
            }
            let wins = has && equal & below == 0;
            // What lies deeper than the rounds to come needs no place.
            let depth = (rounds - 1 - r) as usize;
            let mut i = 0;
            while i < V && i < depth {
                let next = if i + 1 < V { sorted[i + 1] } else { REMOVED };
                sorted[i] = if wins { next } else { sorted[i] };
                i += 1;
            }
        }
    });

    // Where that lane has that key, the first place if there are several.
    let my_lane = lowest(my_lanes);
    let (mut place, mut weight) = (0, 0.0);
    unroll::<V>(|i| {
        let i = V - 1 - i;
        let score = warp::shfl_idx(scores[i], my_lane);
        if warp::shfl_idx(keys[i], my_lane) == my_key {
            (place, weight) = (i as u32, score);
        }
    });
    // Equal keys of one lane follow each other in rank: those after the first have their places behind.
    let (previous_key, previous_lane) = (warp::shfl_up(my_key, 1), warp::shfl_up(my_lane, 1));
    let again = lane > 0 && lane < gate.topk && previous_key == my_key && previous_lane == my_lane;
    let again = warp::warp_vote_ballot(warp::FULL, again);
    if again != 0 {
        let mut skip = (again << (31 - lane)).leading_ones();
        unroll::<V>(|i| {
            let score = warp::shfl_idx(scores[i], my_lane);
            let equal = warp::shfl_idx(keys[i], my_lane) == my_key;
            if equal && skip == 0 {
                (place, weight) = (i as u32, score);
            }
            // Wraps around once it is found, never to be 0 again.
            skip = skip.wrapping_sub(equal as u32);
        });
    }
    let expert = my_lane * V as u32 + place;
    if rounds <= 8 {
        finish::<T, 8>(gate, lane, expert, weight);
    } else {
        finish::<T, 16>(gate, lane, expert, weight);
    }
}

/// The number of the lowest bit that is set; 32 if none is.
#[inline(always)]
fn lowest(mask: u32) -> u32 {
    (mask.wrapping_sub(1) & !mask).count_ones()
}

// ---------------------------------------------------------------------------------------------------------------------
// Experts in shared memory
// ---------------------------------------------------------------------------------------------------------------------

/// A matrix of keys in shared memory, key `i` at row `i / 32`, column `i % 32`. Lane `l` knows the best of column `l`.
struct Matrix {
    keys: Shared<i32>,
    n: u32,
    best: i32,
    /// The lowest index of it.
    index: u32,
}

#[inline(always)]
fn place(i: u32) -> u32 {
    i + i / 32
}

impl Matrix {
    /// Key `k` at index `i` of the lane's own column, in ascending order of `i`.
    #[inline(always)]
    fn consider(&mut self, i: u32, k: i32) {
        if k > self.best {
            (self.best, self.index) = (k, i);
        }
    }

    /// Takes the best key out, and returns its index, the lowest among equals. The whole warp takes part.
    ///
    /// A key is only ever read and removed here by the lane with the number of its row.
    #[inline(always)]
    unsafe fn take_best(&mut self, lane: u32) -> u32 {
        let best = warp::warp_reduce_max_i32(warp::FULL, self.best);
        let index = warp::warp_reduce_min_u32(warp::FULL, if self.best == best { self.index } else { u32::MAX });
        let (row, column) = (index / 32, index % 32);
        let mut rest = REMOVED;
        if lane * 32 + column < self.n {
            rest = self.keys.get(lane * ROW + column);
        }
        if lane == row {
            rest = REMOVED;
            self.keys.set(place(index), REMOVED);
        }
        let best = warp::warp_reduce_max_i32(warp::FULL, rest);
        let row = lowest(warp::warp_vote_ballot(warp::FULL, rest == best));
        if lane == column {
            (self.best, self.index) = (best, row * 32 + column);
        }
        index
    }
}

/// The best `topk_group` of `groups` groups of the experts: their keys in the result are [`REMOVED`].
#[inline(always)]
unsafe fn best_groups(experts: Shared<i32>, result: Shared<i32>, size: u32, groups: u32, topk_group: u32, lane: u32) {
    // A power of two of lanes for each group, as many as fit; one for each of more than 32 groups.
    let lanes = if groups <= 32 { 32 / groups.next_power_of_two() } else { 1 };
    let member = lane & (lanes - 1);
    let at_once = 32 / lanes;
    let mut first = 0;
    while first < groups {
        let group = first + lane / lanes;
        let mut best = (REMOVED, REMOVED);
        if group < groups {
            let mut i = member;
            while i < size {
                best = best_two(best, (experts.get(place(group * size + i)), REMOVED));
                i += lanes;
            }
        }
        let mut step = 1;
        while step < lanes {
            let other = (warp::shfl_xor(best.0, step), warp::shfl_xor(best.1, step));
            best = best_two(best, other);
            step *= 2;
        }
        let worth = if size == 1 { number(best.0) } else { number(best.0) + number(best.1) };
        if member == 0 && group < groups {
            result.set(place(group), key(worth));
        }
        first += at_once;
    }
    warp::sync_warp(warp::FULL);

    let mut matrix = Matrix { keys: result, n: groups, best: REMOVED, index: lane };
    let mut i = lane;
    while i < groups {
        matrix.consider(i, result.get(place(i)));
        i += 32;
    }
    warp::sync_warp(warp::FULL);
    for _ in 0..topk_group {
        matrix.take_best(lane);
    }
    warp::sync_warp(warp::FULL);
}

/// The experts of a lane: those from `first` on, `step` apart, that are below `end`; so many at most.
#[derive(Clone, Copy)]
struct Own {
    first: u32,
    step: u32,
    most: u32,
    end: u32,
}

impl Own {
    /// `32 * row + lane`.
    #[inline(always)]
    fn column(experts: u32, lane: u32) -> Self {
        Self { first: lane, step: 32, most: experts.div_ceil(32), end: experts }
    }

    /// Neighbours, as in [`gate_fixed`].
    #[inline(always)]
    fn neighbours(experts: u32, lane: u32) -> Self {
        let most = experts.div_ceil(32);
        Self { first: lane * most, step: 1, most, end: (lane * most + most).min(experts) }
    }
}

/// For each of the lane's experts: `store(expert, compute(load(expert)))`. `N` at a time are unrolled,
/// all loads first and then the arithmetic, without a branch between them: beyond the last expert it is done on `none`.
#[inline(always)]
unsafe fn for_own<const N: usize, V: Copy, W: Copy>(
    own: Own,
    none: V,
    load: impl Fn(u32) -> V,
    compute: impl Fn(V) -> W,
    mut store: impl FnMut(u32, W),
) {
    let (mut first, mut done) = (own.first, 0);
    // As often in all lanes.
    while done < own.most {
        let mut loaded = [none; N];
        unroll::<N>(|i| {
            let e = first + own.step * i as u32;
            if e < own.end {
                loaded[i] = load(e);
            }
        });
        let computed: [W; N] = core::array::from_fn(|i| compute(loaded[i]));
        unroll::<N>(|i| {
            let e = first + own.step * i as u32;
            if e < own.end {
                store(e, computed[i]);
            }
        });
        first += own.step * N as u32;
        done += N as u32;
    }
}

/// Any number of experts up to [`MAX_EXPERTS`], any number of groups that divides it, any alignment, `topk` up to
/// [`MAX_TOPK`]. Dynamic shared memory: [`dynamic_shared_bytes`] for each warp of the block.
#[inline(always)]
unsafe fn gate_dynamic<T: Float>(gate: Gate<T>, groups: u32, topk_group: u32) {
    let (lane, warp_id) = (warp::lane_id(), thread::thread_idx_x() / 32);
    let experts = gate.experts;
    let words = matrix_words(experts);
    let base = (warp_id * dynamic_shared_bytes(experts)) as usize;
    let keys = Shared::<i32>::at(base, words as usize);
    let second = base + 4 * words as usize;

    // Everything from global memory first. A lane reads back what it wrote itself, but for the sum of a softmax.
    let own = Own::column(experts, lane);
    let biases = Shared::<f32>::at(second, words as usize);
    let mut max = f32::NEG_INFINITY;
    let store = |e: u32, (x, bias): (f32, f32)| {
        max = float::max(max, x);
        keys.set(place(e), x.to_bits() as i32);
        biases.set(place(e), bias);
    };
    #[inline(always)]
    unsafe fn load_both<T: Float, B: Float>(gate: Gate<T>, own: Own, store: impl FnMut(u32, (f32, f32))) {
        let bias = Global::new(gate.bias.cast::<B>());
        let load = |e: u32| (gate.logits.get(e), bias.get(e));
        let none = (T::from_f32(0.0), B::from_f32(0.0));
        for_own::<8, _, _>(own, none, load, |(x, b)| (x.to_f32(), b.to_f32()), store);
    }
    match (gate.bias.is_null(), gate.bias_type) {
        (true, _) => {
            let none = T::from_f32(0.0);
            for_own::<8, _, _>(own, none, |e| gate.logits.get(e), |x| (x.to_f32(), 0.0), store);
        }
        (_, BIAS_F32) => load_both::<T, f32>(gate, own, store),
        (_, BIAS_F16) => load_both::<T, f16>(gate, own, store),
        _ => load_both::<T, bf16>(gate, own, store),
    }

    let logit = |e: u32| f32::from_bits(keys.get(place(e)) as u32);
    let both = |e: u32| (logit(e), biases.get(place(e)));
    let mut matrix = Matrix { keys, n: experts, best: REMOVED, index: lane };
    let store = |e: u32, k: i32| {
        keys.set(place(e), k);
        matrix.consider(e, k);
    };
    let mut softmax = Softmax::NONE;
    match gate.scoring {
        SIGMOID => for_own::<4, _, _>(own, (0.0, 0.0), both, |(x, b)| key(sigmoid(x) + b), store),
        SOFTMAX => {
            warp::sync_warp(warp::FULL);
            softmax = Softmax::of_row(max, |s| {
                let mut sum = 0.0;
                // In the order of `gate_fixed`, which takes a row where it is aligned.
                let neighbours = Own::neighbours(experts, lane);
                for_own::<4, _, _>(neighbours, 0.0, logit, |x| s.addend(x), |_, e| sum += e);
                sum
            });
            // The reduction is behind all reads of what others replace now.
            warp::sync_warp(warp::FULL);
            let compute = |(x, b)| key(softmax.score(x) + b);
            for_own::<4, _, _>(own, (0.0, 0.0), both, compute, store);
        }
        _ => for_own::<4, _, _>(own, (0.0, 0.0), both, |(x, b)| key(sqrt_softplus(x) + b), store),
    }
    warp::sync_warp(warp::FULL);

    if groups > 1 && topk_group < groups {
        core::hint::assert_unchecked(groups != 0);
        let size = experts / groups;
        core::hint::assert_unchecked(size != 0);
        let worths = Shared::<i32>::at(second, matrix_words(groups) as usize);
        best_groups(keys, worths, size, groups, topk_group, lane);
        matrix.best = REMOVED;
        let load = |e: u32| (keys.get(place(e)), worths.get(place(e / size)) == REMOVED);
        let compute = |(k, stays)| if stays { k } else { REMOVED };
        for_own::<4, _, _>(own, (REMOVED, false), load, compute, |e, k| {
            keys.set(place(e), k);
            matrix.consider(e, k);
        });
        warp::sync_warp(warp::FULL);
    }

    let mut id = 0;
    for r in 0..gate.topk {
        let chosen = matrix.take_best(lane);
        if lane == r {
            id = chosen;
        }
    }
    let mut weight = 0.0;
    if lane < gate.topk {
        let x = gate.logits.get(id).to_f32();
        weight = match gate.scoring {
            SIGMOID => sigmoid(x),
            SOFTMAX => softmax.score(x),
            _ => sqrt_softplus(x),
        };
    }
    finish::<T, MAX_TOPK>(gate, lane, id, weight);
}

// ---------------------------------------------------------------------------------------------------------------------
// Results
// ---------------------------------------------------------------------------------------------------------------------

/// Writes what was chosen: lane `r < topk` has the expert of rank `r` and its score; `topk` is at most `WIDTH`.
#[inline(always)]
unsafe fn finish<T: Float, const WIDTH: u32>(gate: Gate<T>, lane: u32, expert: u32, score: f32) {
    let Gate { topk, shared_experts, .. } = gate;
    let live = (gate.token as i32) < gate.valid_rows && gate.row_mask != 0;
    let routed = lane < topk;
    // The larger of NaN and 0 is 0.
    let mut weight = if routed { float::max(score, 0.0) } else { 0.0 };
    if gate.renormalize != 0 {
        let sum = warp::reduce_segments::<WIDTH, f32>(weight, |a, b| a + b);
        weight = if sum > 0.0 { weight / sum } else { 0.0 };
    }
    weight *= gate.routed_scale;

    let row = gate.token as usize * (topk + shared_experts) as usize;
    if routed {
        write(gate, row + lane as usize, expert, weight, live);
    }
    let mut i = lane;
    while i < shared_experts {
        write(gate, row + (topk + i) as usize, gate.experts + i, gate.shared_weight, live);
        i += 32;
    }
}

#[inline(always)]
unsafe fn write<T: Float>(gate: Gate<T>, at: usize, expert: u32, weight: f32, live: bool) {
    let mut id = expert as i32;
    if !gate.expert_map.is_null() {
        id = Global::new(gate.expert_map).get(expert);
    }
    let (id, weight) = if live { (id, weight) } else { (-1, 0.0) };
    gate.weights.set(at, weight);
    gate.ids.set(at, id);
    if !gate.packed.is_null() {
        let word = (id as u32) << 16 | convert::f32_to_bf16(weight).to_bits() as u32;
        GlobalMut::new(gate.packed).set(at, word);
    }
}

/// An algorithm, for a token and its warp.
trait Select {
    /// For one token.
    unsafe fn run<T: Float>(gate: Gate<T>, groups: u32, topk_group: u32);
}

/// [`gate_fixed`] for `32 * V` experts.
struct Fixed<const V: usize, const GROUPS: u32>;

/// [`gate_dynamic`].
struct Dynamic;

impl<const V: usize, const GROUPS: u32> Select for Fixed<V, GROUPS> {
    #[inline(always)]
    unsafe fn run<T: Float>(gate: Gate<T>, _groups: u32, topk_group: u32) {
        gate_fixed::<T, V, GROUPS>(gate, topk_group);
    }
}

impl Select for Dynamic {
    #[inline(always)]
    unsafe fn run<T: Float>(gate: Gate<T>, groups: u32, topk_group: u32) {
        gate_dynamic::<T>(gate, groups, topk_group);
    }
}

/// A warp for each token; see [`Args`] for the arguments.
#[inline(always)]
unsafe fn gate<T: Float, S: Select>(
    logits: *const T,
    row_stride: u64,
    bias: *const u8,
    bias_type: u32,
    weights: *mut f32,
    ids: *mut i32,
    packed: *mut u32,
    valid_rows: *const i32,
    row_mask: *const u8,
    expert_map: *const i32,
    tokens: u32,
    experts: u32,
    groups: u32,
    topk_group: u32,
    topk: u32,
    shared_experts: u32,
    scoring: u32,
    renormalize: u32,
    routed_scale: f32,
    shared_weight: f32,
) {
    dependent_launch::begin();
    let token = thread::block_idx_x() * (thread::block_dim_x() / 32) + thread::thread_idx_x() / 32;
    if token >= tokens {
        return;
    }
    // Loaded first and used last: a padded row is computed as any other.
    let valid_rows = if valid_rows.is_null() { i32::MAX } else { Global::new(valid_rows).get(0u32) };
    let row_mask = if row_mask.is_null() { 1 } else { Global::new(row_mask).get(token) };
    let gate = Gate {
        logits: Global::new(logits).offset(token as usize * row_stride as usize),
        bias,
        bias_type,
        weights: GlobalMut::new(weights),
        ids: GlobalMut::new(ids),
        packed,
        expert_map,
        token,
        valid_rows,
        row_mask,
        experts,
        topk,
        shared_experts,
        scoring,
        renormalize,
        routed_scale,
        shared_weight,
    };
    S::run(gate, groups, topk_group);
}

entries! {
    /// A block has a multiple of 32 threads, 32 for each token.
    pub struct Args<T>(
        /// `[tokens, experts]`, rows `row_stride` elements from each other.
        logits: *const T,
        row_stride: u64,
        /// `[experts]` of the type that `bias_type` names, or null.
        bias: *const u8,
        bias_type: u32,
        /// `[tokens, topk + shared_experts]`.
        weights: *mut f32,
        /// `[tokens, topk + shared_experts]`.
        ids: *mut i32,
        /// `[tokens, topk + shared_experts]`: id in the upper half, weight as bf16 in the lower; or null.
        packed: *mut u32,
        /// `[1]`: rows from this one on are padding; or null.
        valid_rows: *const i32,
        /// `[tokens]`: rows with 0 are padding; or null.
        row_mask: *const u8,
        /// `[experts + shared_experts]`: what is written for an expert; or null.
        expert_map: *const i32,
        tokens: u32,
        experts: u32,
        groups: u32,
        topk_group: u32,
        topk: u32,
        shared_experts: u32,
        /// [`SIGMOID`], [`SOFTMAX`] or [`SQRT_SOFTPLUS`].
        scoring: u32,
        /// Whether weights are divided by their sum.
        renormalize: u32,
        /// What the weights of routed experts are multiplied by.
        routed_scale: f32,
        /// The weight of shared experts.
        shared_weight: f32
    );
    gate_256_experts_8_groups_f32 { type T = f32; type S = Fixed<8, 8>; } [MAX_THREADS] => gate::<T, S>;
    gate_256_experts_1_groups_f32 { type T = f32; type S = Fixed<8, 1>; } [MAX_THREADS] => gate::<T, S>;
    gate_128_experts_4_groups_f32 { type T = f32; type S = Fixed<4, 4>; } [MAX_THREADS] => gate::<T, S>;
    gate_128_experts_8_groups_f32 { type T = f32; type S = Fixed<4, 8>; } [MAX_THREADS] => gate::<T, S>;
    gate_128_experts_1_groups_f32 { type T = f32; type S = Fixed<4, 1>; } [MAX_THREADS] => gate::<T, S>;
    gate_384_experts_1_groups_f32 { type T = f32; type S = Fixed<12, 1>; } [MAX_THREADS] => gate::<T, S>;
    gate_512_experts_1_groups_f32 { type T = f32; type S = Fixed<16, 1>; } [MAX_THREADS] => gate::<T, S>;
    gate_64_experts_8_groups_f32 { type T = f32; type S = Fixed<2, 8>; } [MAX_THREADS] => gate::<T, S>;
    gate_64_experts_1_groups_f32 { type T = f32; type S = Fixed<2, 1>; } [MAX_THREADS] => gate::<T, S>;
    gate_dynamic_f32 { type T = f32; type S = Dynamic; } [MAX_THREADS] => gate::<T, S>;
    gate_256_experts_8_groups_f16 { type T = f16; type S = Fixed<8, 8>; } [MAX_THREADS] => gate::<T, S>;
    gate_256_experts_1_groups_f16 { type T = f16; type S = Fixed<8, 1>; } [MAX_THREADS] => gate::<T, S>;
    gate_128_experts_4_groups_f16 { type T = f16; type S = Fixed<4, 4>; } [MAX_THREADS] => gate::<T, S>;
    gate_128_experts_8_groups_f16 { type T = f16; type S = Fixed<4, 8>; } [MAX_THREADS] => gate::<T, S>;
    gate_128_experts_1_groups_f16 { type T = f16; type S = Fixed<4, 1>; } [MAX_THREADS] => gate::<T, S>;
    gate_384_experts_1_groups_f16 { type T = f16; type S = Fixed<12, 1>; } [MAX_THREADS] => gate::<T, S>;
    gate_512_experts_1_groups_f16 { type T = f16; type S = Fixed<16, 1>; } [MAX_THREADS] => gate::<T, S>;
    gate_64_experts_8_groups_f16 { type T = f16; type S = Fixed<2, 8>; } [MAX_THREADS] => gate::<T, S>;
    gate_64_experts_1_groups_f16 { type T = f16; type S = Fixed<2, 1>; } [MAX_THREADS] => gate::<T, S>;
    gate_dynamic_f16 { type T = f16; type S = Dynamic; } [MAX_THREADS] => gate::<T, S>;
    gate_256_experts_8_groups_bf16 { type T = bf16; type S = Fixed<8, 8>; } [MAX_THREADS] => gate::<T, S>;
    gate_256_experts_1_groups_bf16 { type T = bf16; type S = Fixed<8, 1>; } [MAX_THREADS] => gate::<T, S>;
    gate_128_experts_4_groups_bf16 { type T = bf16; type S = Fixed<4, 4>; } [MAX_THREADS] => gate::<T, S>;
    gate_128_experts_8_groups_bf16 { type T = bf16; type S = Fixed<4, 8>; } [MAX_THREADS] => gate::<T, S>;
    gate_128_experts_1_groups_bf16 { type T = bf16; type S = Fixed<4, 1>; } [MAX_THREADS] => gate::<T, S>;
    gate_384_experts_1_groups_bf16 { type T = bf16; type S = Fixed<12, 1>; } [MAX_THREADS] => gate::<T, S>;
    gate_512_experts_1_groups_bf16 { type T = bf16; type S = Fixed<16, 1>; } [MAX_THREADS] => gate::<T, S>;
    gate_64_experts_8_groups_bf16 { type T = bf16; type S = Fixed<2, 8>; } [MAX_THREADS] => gate::<T, S>;
    gate_64_experts_1_groups_bf16 { type T = bf16; type S = Fixed<2, 1>; } [MAX_THREADS] => gate::<T, S>;
    gate_dynamic_bf16 { type T = bf16; type S = Dynamic; } [MAX_THREADS] => gate::<T, S>;
}
