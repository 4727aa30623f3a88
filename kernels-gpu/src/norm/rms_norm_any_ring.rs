//! [`rms_norm`](super::rms_norm) and [`rms_norm_quant`](super::rms_norm_quant) for many rows that are not aligned, on Hopper: blocks that stay, and rows that come while others are
//! worked on. [`layer_norm_any_ring`](super::layer_norm_any_ring) has its rows moved here, too.
//!
//! A row whose elements are moved one by one, in a block of its own, takes long from its first load to its last store, and its threads hold registers all the while, so that few rows
//! are under way. Here blocks have one row after another (that of their own number, and from there every so many as there are blocks), and the copy engine moves them, whatever they
//! begin at:
//!
//! * Of each row, the lines of 16 bytes that lie in it are copied into a stage of a ring in shared memory, as far from a multiple of 16 as they are in memory. The few elements before
//!   and behind them ([`Span`]) are moved by lanes. A warp of its own sees to both. So nothing beyond a row is read or written, and rows may be replaced.
//! * Threads take single elements out of the stage, neighbouring lanes neighbouring ones, and zeros behind the row: no condition. Sums with a residual take its place at once. When the
//!   row's sum of squares is known, which is when all threads have their elements, results go where the elements were, as far from a multiple of 16 as they are in memory, and the copy
//!   engine takes them.
//! * A stage is filled again when its results have left it.
//! * Weights are loaded once.
//!
//! Threads and their elements are those of a row that is held (`any_x4`), and everything is added up in the same order: the same bits.

use super::rms_norm::{inverse, inverse_rms, squares_of};
use super::rms_norm_quant::Io;
use super::{MAX_WARPS, Row};
use crate::row::quantise::{self, Quantised};
use crate::row::team::{Op, scratch};
use crate::row::{GROUP, Team, zero};
use core::marker::PhantomData;
use cuda_std::shared::Carver;
use cuda_std::vec::{self, B128};
use cuda_std::{
    Element, Float, Global, GlobalMut, Shared, dependent_launch, float, integer, mbarrier, thread, tma, warp,
};

/// Elements of a piece of a thread, one in each of so many groups of neighbouring threads' elements.
pub(super) const V: usize = 4;
/// Bytes of what the copy engine moves at once.
const LINE: u32 = 16;
/// How far apart the elements of a piece are.
const STEP: usize = GROUP / V;
/// Pieces of a thread.
pub(super) const PIECES: usize = 4;
/// The most threads of a row.
pub const MOST_THREADS: u32 = 512;
/// The most threads of a block.
pub const BLOCK_THREADS: u32 = MOST_THREADS + MOVERS;
/// The most warps of a row.
pub(super) const WARPS: usize = MOST_THREADS as usize / 32;
/// Threads of a block besides those of a row: a warp that moves rows.
pub const MOVERS: u32 = 32;

/// Shared memory of a multiprocessor for the rings of its blocks: there are three of 352 threads with a residual.
const RINGS: u32 = 200 << 10;
/// Rows of a ring: one that is worked on, the next one, and one that has just been asked for, of which lanes bring their elements meanwhile. More of them only queue: three of six took a
/// tenth off 4096 × 5125 with 8-bit results on an H200.
pub(super) const STAGES: u32 = 3;
/// More rows than so many a block are many.
const MANY_ROWS: u32 = 4;
/// Threads of a multiprocessor: 65536 registers, 56 for each.
pub const THREADS: u32 = 1170;
/// The most blocks of a multiprocessor.
const MOST_BLOCKS: u32 = 16;

/// Where the ring begins in shared memory: behind the scratch of reductions and the mbarriers.
const RING_AT: usize = (2 * MAX_WARPS * 4 + STAGES as usize * 8).next_multiple_of(128);

/// Bytes of a stage for each input: all elements of `size` bytes that so many threads have, of which those beyond a row's are zeros, wherever it begins.
const fn row_bytes(threads: u32, size: usize) -> u32 {
    threads * (V * PIECES * size) as u32 + LINE
}

/// Rows of a stage.
const fn inputs(fused_add: bool) -> u32 {
    if fused_add { 2 } else { 1 }
}

/// How many times `part` goes into `all`, between two bounds.
const fn times(all: u32, part: u32, [least, most]: [u32; 2]) -> u32 {
    // A kernel has nobody to tell of a division by zero.
    let times = match all.checked_div(part) {
        Some(times) => times,
        None => least,
    };
    if times < least {
        least
    } else if times > most {
        most
    } else {
        times
    }
}

/// Blocks of a multiprocessor, of so many threads a row.
pub const fn blocks(threads: u32, size: usize, fused_add: bool) -> u32 {
    let by_memory = times(RINGS, STAGES * inputs(fused_add) * row_bytes(threads, size), [1, MOST_BLOCKS]);
    times(THREADS, threads + MOVERS, [1, by_memory])
}

/// The stage after another one.
#[inline(always)]
const fn following(stage: u32) -> u32 {
    if stage + 1 == STAGES { 0 } else { stage + 1 }
}

/// Dynamic shared memory of a block, with `threads` for rows of elements of `size` bytes.
pub const fn shared_bytes(threads: u32, size: usize, fused_add: bool) -> usize {
    RING_AT + (STAGES * inputs(fused_add) * row_bytes(threads, size)) as usize
}

/// The columns of a row that fill lines of 16 bytes: `head..tail`.
#[derive(Clone, Copy)]
struct Span {
    head: u32,
    tail: u32,
}

impl Span {
    /// Of `n` elements from an address on, that many bytes behind a multiple of 16.
    #[inline(always)]
    fn new<E>(behind: u32, n: u32) -> Self {
        let size = const { size_of::<E>() as u32 };
        let head = ((16 - behind) % 16 / size).min(n);
        Self { head, tail: n - (n - head) % (16 / size) }
    }

    /// The column that lane `lane` of so many moves, of which the first half has those before the lines, the other those behind. Elements have so many bytes that these are enough.
    #[inline(always)]
    fn edge(self, n: u32, lane: u32, lanes: u32) -> Option<u32> {
        let half = lanes / 2;
        let (column, end) = if lane < half { (lane, self.head) } else { (self.tail + lane - half, n) };
        (column < end).then_some(column)
    }
}

/// How many bytes behind a multiple of 16 an address is.
#[inline(always)]
fn behind<E>(at: *const E) -> u32 {
    at.addr() as u32 % 16
}

/// What scales there are.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Scales {
    None,
    /// One a row.
    Row,
    /// One a group of columns.
    Group,
}

/// What a row gives, from values that are kept until its sum is known.
trait Outcome<T: Float>: Copy {
    /// Elements of results.
    type Element: Element;
    const SCALES: Scales;

    /// What is kept of an element and the weight it is multiplied by.
    fn value(x: f32, w: f32) -> f32;

    /// The scale of values up to `largest`, if there are scales, and the factor that makes results of them; `rms`: the row's.
    fn scale_and_factor(largest: f32, rms: f32) -> (f32, f32);

    /// The results of a piece.
    fn results(factor: f32, values: [f32; V], w: [f32; V]) -> [Self::Element; V];
}

/// Results of the element type.
#[derive(Clone, Copy)]
struct Plain;

impl<T: Float> Outcome<T> for Plain {
    type Element = T;
    const SCALES: Scales = Scales::None;

    #[inline(always)]
    fn value(x: f32, _: f32) -> f32 {
        x
    }

    #[inline(always)]
    fn scale_and_factor(_: f32, rms: f32) -> (f32, f32) {
        (1.0, rms)
    }

    #[inline(always)]
    fn results(rms: f32, mut x: [f32; V], w: [f32; V]) -> [T; V] {
        cuda_std::unroll::<V>(|j| x[j] = x[j] * rms * w[j]);
        vec::from_f32(x)
    }
}

/// 8-bit results with a scale a row, or a group of columns.
#[derive(Clone, Copy)]
struct Scaled<Q, const GROUPED: bool>(PhantomData<Q>);

impl<T: Float, Q: Quantised, const GROUPED: bool> Outcome<T> for Scaled<Q, GROUPED> {
    type Element = Q;
    const SCALES: Scales = if GROUPED { Scales::Group } else { Scales::Row };

    #[inline(always)]
    fn value(x: f32, w: f32) -> f32 {
        x * w
    }

    #[inline(always)]
    fn scale_and_factor(largest: f32, rms: f32) -> (f32, f32) {
        quantise::scale_and_factor::<Q>(largest, rms)
    }

    #[inline(always)]
    fn results(factor: f32, y: [f32; V], _: [f32; V]) -> [Q; V] {
        y.map(|y| Q::one(y * factor))
    }
}

/// Where scales go.
#[derive(Clone, Copy)]
struct ScalePlaces {
    scales: GlobalMut<f32>,
    row_stride: usize,
    group_stride: usize,
}

impl ScalePlaces {
    /// Of launches without scales.
    #[inline(always)]
    fn none() -> Self {
        Self { scales: GlobalMut::new(core::ptr::null_mut()), row_stride: 0, group_stride: 0 }
    }

    /// Where that of a row's group is.
    #[inline(always)]
    fn of(self, row: u32, group: u32) -> GlobalMut<f32> {
        self.scales.offset(row as usize * self.row_stride + group as usize * self.group_stride)
    }
}

/// Rows in memory, so many elements apart.
#[derive(Clone, Copy)]
pub(super) struct Rows<E> {
    pub(super) first: *mut E,
    pub(super) stride: usize,
}

impl<E> Rows<E> {
    /// The address of row `number`.
    #[inline(always)]
    pub(super) fn row(self, number: u32) -> *mut E {
        self.first.wrapping_add(number as usize * self.stride)
    }
}

/// The ring of a block.
#[derive(Clone, Copy)]
pub(super) struct Ring {
    bytes: Shared<u8>,
    /// The address of the mbarriers.
    pub(super) full: u32,
    row_bytes: u32,
    n: u32,
}

impl Ring {
    /// Where the `input`-th row of a stage of rows like that at `at` begins.
    #[inline(always)]
    pub(super) fn place<E, const ADD: bool>(self, stage: u32, input: u32, at: *const E) -> u32 {
        (stage * const { inputs(ADD) } + input) * self.row_bytes + behind(at)
    }

    /// By one thread: asks for the lines of rows.
    #[inline(always)]
    #[track_caller]
    unsafe fn bring<T, const ADD: bool>(self, stage: u32, rows: [*const T; 2]) {
        let full = self.full + 8 * stage;
        let size = const { size_of::<T>() as u32 };
        let spans = rows.map(|at| Span::new::<T>(behind(at), self.n));
        let bytes = |input: usize| (spans[input].tail - spans[input].head) * size;
        mbarrier::arrive_expect_tx(full, if ADD { bytes(0) + bytes(1) } else { bytes(0) });
        cuda_std::unroll::<2>(|input| {
            if (ADD || input == 0) && bytes(input) != 0 {
                let to = self.place::<T, ADD>(stage, input as u32, rows[input]) + spans[input].head * size;
                let from = rows[input].wrapping_add(spans[input].head as usize);
                tma::copy_bulk(self.bytes.address(to), from, bytes(input), full);
            }
        });
    }

    /// What a lane brings of rows beside their lines, and where it goes.
    #[inline(always)]
    #[track_caller]
    unsafe fn edge<T: Float, const ADD: bool>(self, stage: u32, rows: [*const T; 2]) -> Edge<T> {
        let (lane, size) = (warp::lane_id(), const { size_of::<T>() as u32 });
        let (input, lane) = (lane / 16, lane % 16);
        let at = if input == 0 { rows[0] } else { rows[1] };
        if !ADD && input != 0 {
            return Edge::none();
        }
        let place = self.place::<T, ADD>(stage, input, at);
        let mut edge = Edge::none();
        if let Some(column) = Span::new::<T>(behind(at), self.n).edge(self.n, lane, 16) {
            edge = Edge { value: Global::new(at).get(column), to: place + column * size, ..edge };
        }
        let column = self.n + lane;
        if lane < LINE / size && column * size < self.row_bytes - LINE {
            edge.zero_to = place + column * size;
        }
        edge
    }

    /// The elements of a piece that begin at `at`.
    #[inline(always)]
    #[track_caller]
    pub(super) unsafe fn get<E: Float>(self, at: u32) -> [f32; V] {
        let from = self.bytes.offset(at);
        core::array::from_fn(|j| from.get_as::<E>(j * const { STEP * size_of::<E>() }).to_f32())
    }

    /// The reverse of [`get`](Self::get), of elements of which the row has those whose bits are set.
    #[inline(always)]
    #[track_caller]
    pub(super) unsafe fn set<E: Element>(self, at: u32, elements: [E; V], has: u32) {
        let to = self.bytes.offset(at);
        cuda_std::unroll::<V>(|j| {
            if has & (1 << j) != 0 {
                to.set_as(j * const { STEP * size_of::<E>() }, elements[j]);
            }
        });
    }

    /// By a warp, after a barrier: takes what is in the `input`-th row of a stage to a row of an output.
    #[inline(always)]
    #[track_caller]
    unsafe fn take<E: Element, const ADD: bool>(self, stage: u32, input: u32, to: *mut E) {
        let (size, lane) = (const { size_of::<E>() as u32 }, warp::lane_id());
        let (from, span) =
            (self.place::<E, ADD>(stage, input, to.cast_const()), Span::new::<E>(behind(to.cast_const()), self.n));
        if let Some(column) = span.edge(self.n, lane, 32) {
            GlobalMut::new(to).set(column, self.bytes.get_as::<E>(from + column * size));
        }
        let bytes = (span.tail - span.head) * size;
        if lane == 0 && bytes != 0 {
            let from = self.bytes.address(from + span.head * size);
            tma::store_bulk(to.wrapping_add(span.head as usize), from, bytes);
        }
    }
}

/// An element on its way into the ring, by a thread.
#[derive(Clone, Copy)]
struct Edge<T> {
    value: T,
    /// [`NOWHERE`](Self::NOWHERE) if there is none.
    to: u32,
    /// A place behind a row, where what was there before may have been longer; [`NOWHERE`](Self::NOWHERE) for most.
    zero_to: u32,
}

impl<T: Float> Edge<T> {
    const NOWHERE: u32 = u32::MAX;

    #[inline(always)]
    fn none() -> Self {
        Self { value: zero(), to: Self::NOWHERE, zero_to: Self::NOWHERE }
    }

    #[inline(always)]
    #[track_caller]
    unsafe fn put(self, ring: Ring) {
        if self.to != Self::NOWHERE {
            ring.bytes.set_as(self.to, self.value);
        }
        if self.zero_to != Self::NOWHERE {
            ring.bytes.set_as(self.zero_to, zero::<T>());
        }
    }

    /// [`put`](Self::put) between the barriers of another row, which is worked on if `works`; `first`: of the first row.
    #[inline(always)]
    #[track_caller]
    unsafe fn put_between(self, ring: Ring, works: bool, first: bool) {
        if works {
            // All threads have their elements of the row.
            thread::sync_threads();
        }
        self.put(ring);
        if first {
            // All threads wait for it.
            thread::sync_threads();
        }
    }
}

/// What a launch works on.
#[derive(Clone, Copy)]
pub(super) struct Tensors<T, E> {
    pub(super) x: Rows<T>,
    pub(super) residual: Rows<T>,
    /// Each row as far from a multiple of 16 bytes as that of the residual.
    pub(super) sum: Rows<T>,
    pub(super) out: Rows<E>,
    pub(super) weight: Global<T>,
    pub(super) weight_offset: f32,
    pub(super) rows: u32,
    pub(super) n: u32,
    pub(super) eps: f32,
}

impl<T: Float, E: Element> Tensors<T, E> {
    /// The inputs of row `number`.
    #[inline(always)]
    pub(super) fn inputs<const ADD: bool>(&self, number: u32) -> [*const T; 2] {
        let residual = if ADD { self.residual.row(number) } else { core::ptr::null_mut() };
        [self.x.row(number).cast_const(), residual.cast_const()]
    }

    /// By a warp of its own: brings rows and takes what becomes of them. It passes the block's barriers at instructions of its own, which synccheck takes for a mistake; with the same ones
    /// for all threads, whose registers are short then, a row takes a third more instructions. `TWO_SUMS`: of a row there are two, one after the other.
    #[inline(always)]
    #[track_caller]
    pub(super) unsafe fn move_rows<const ADD: bool, const TWO_SUMS: bool>(&self, ring: Ring) {
        let (first_row, blocks) = (thread::block_idx_x(), thread::grid_dim_x());
        let lane = warp::lane_id();
        // A block of many rows asks for a row while another one's results are computed, which soon have to wait for it; of few rows, when they have left.
        let many = self.rows > MANY_ROWS * blocks;
        // The row that is worked on and the one that is asked for, and their stages. Rows are asked for one after the other from the beginning on: of all that are asked for at once the
        // first would come as late as the last. One text for all of them, since what runs for the first time takes long to fetch.
        let (mut number, mut stage) = (first_row, 0);
        let (mut next, mut next_stage) = (first_row, 0);
        let mut edge = Edge::none();
        // How many rows are asked for before the first one is worked on, and how many of them have been.
        let (lead, mut begun) = (if many { STAGES - 1 } else { STAGES - 2 }, 0);
        loop {
            let works = begun >= lead;
            if works && number >= self.rows {
                break;
            }
            if many {
                edge.put_between(ring, works, begun == 1);
            }
            // The stage has been free since the results of the row before left it, or the row before that one.
            if lane == 0 && many {
                tma::wait_group_read::<0>();
            } else if lane == 0 {
                tma::wait_group_read::<1>();
            }
            // What lanes have taken and put is in the past of what is asked for.
            tma::fence_async();
            warp::sync_warp(warp::FULL);
            edge = Edge::none();
            if next < self.rows {
                let inputs = self.inputs::<ADD>(next);
                if lane == 0 {
                    ring.bring::<T, ADD>(next_stage, inputs);
                }
                edge = ring.edge::<T, ADD>(next_stage, inputs);
            }
            if !many {
                edge.put_between(ring, works, begun == 0);
            }
            if works {
                if TWO_SUMS {
                    thread::sync_threads();
                }
                // What becomes of the row is there.
                thread::sync_threads();
                ring.take::<E, ADD>(stage, 0, self.out.row(number));
                if ADD {
                    ring.take::<T, ADD>(stage, 1, self.sum.row(number));
                }
                if lane == 0 {
                    tma::commit_group();
                }
                number += blocks;
                stage = following(stage);
            }
            next += blocks;
            next_stage = following(next_stage);
            begun += 1;
        }
        if lane == 0 {
            tma::wait_group_read::<0>();
        }
    }

    /// By the others, a row's threads: computes.
    #[inline(always)]
    #[track_caller]
    unsafe fn compute<O: Outcome<T, Element = E>, const ADD: bool>(
        &self,
        ring: Ring,
        team: Team,
        scratch: Shared<f32>,
        scales: ScalePlaces,
    ) {
        let n = self.n;
        let row = Row::<V, PIECES, false>::new(team, n);
        // The thread's first column, how far apart those of its pieces are (a row's threads are whole warps), and which of its elements the row has.
        let (own, each, mut has) = (row.piece(0).first(), team.size * V as u32, 0);
        cuda_std::unroll::<PIECES>(|i| cuda_std::unroll::<V>(|j| has |= u32::from(row.piece(i).has(j)) << (V * i + j)));
        // All of them at once, and as numbers: as elements of pieces, those of one would be put together before the next ones are asked for.
        let mut w = [[1.0; V]; PIECES];
        if !self.weight.ptr(0usize).is_null() {
            cuda_std::unroll::<PIECES>(|i| {
                let weight = self.weight.offset(row.piece(i).first());
                cuda_std::unroll::<V>(|j| {
                    if row.piece(i).has(j) {
                        w[i][j] = weight.get(j * STEP).to_f32() + self.weight_offset;
                    }
                });
            });
        }
        thread::sync_threads();

        let (mut number, mut stage, mut parity) = (thread::block_idx_x(), 0, 0);
        while number < self.rows {
            // A zero that ptxas does not know: it would keep the places of all elements in registers from row to row.
            let zeros = number >> 31;
            let (first, has) = (integer::opaque(own ^ zeros), integer::opaque(has ^ zeros));
            mbarrier::wait_parity(ring.full + 8 * stage, parity);
            let mut values = [[0.0; V]; PIECES];
            let (mut total, mut largest, mut largest_of_groups) = (0.0, 0.0, [0.0; PIECES]);
            let [from, added] = self.inputs::<ADD>(number);
            let size = const { size_of::<T>() as u32 };
            let from = ring.place::<T, ADD>(stage, 0, from) + first * size;
            let added = if ADD { ring.place::<T, ADD>(stage, 1, added) + first * size } else { 0 };
            cuda_std::unroll::<PIECES>(|i| {
                let at = i as u32 * each * size;
                let mut x = ring.get::<T>(from + at);
                if ADD {
                    // To 24 bits and then to 11 at most is the same as at once.
                    let r = ring.get::<T>(added + at);
                    cuda_std::unroll::<V>(|j| x[j] += r[j]);
                    let sums = vec::from_f32::<T, V>(x);
                    // In the place of what nobody else reads.
                    ring.set(added + at, sums, has >> (V * i));
                    x = vec::to_f32(sums);
                }
                total += squares_of(x);
                cuda_std::unroll::<V>(|j| values[i][j] = O::value(x[j], w[i][j]));
                if O::SCALES == Scales::Row {
                    largest = float::max(largest, quantise::amax(values[i]));
                }
                if O::SCALES == Scales::Group {
                    largest_of_groups[i] = quantise::group_amax(values[i]);
                }
            });
            let total = Op::Sum.over_warp(total);
            let [total, largest] = if O::SCALES == Scales::Row {
                let most = Op::Max.over_warp(largest);
                team.reduce_warps::<2, 1, WARPS>([[total], [most]], [Op::Sum, Op::Max], scratch)
            } else {
                let [total] = team.reduce_warps::<1, 1, WARPS>([[total]], [Op::Sum], scratch);
                [total, largest]
            };
            // All threads have their elements: the stage is free for what comes of them.
            let first = integer::opaque(first ^ zeros);
            let rms = inverse_rms(total, inverse(n), self.eps);
            let (scale, factor) = O::scale_and_factor(largest, rms);
            let size = const { size_of::<E>() as u32 };
            let to = ring.place::<E, ADD>(stage, 0, self.out.row(number).cast_const()) + first * size;
            cuda_std::unroll::<PIECES>(|i| {
                let factor =
                    if O::SCALES == Scales::Group { O::scale_and_factor(largest_of_groups[i], rms).1 } else { factor };
                ring.set(to + i as u32 * each * size, O::results(factor, values[i], w[i]), has >> (V * i));
            });
            tma::fence_async();
            thread::sync_threads();
            // Not before: the fence would wait for them.
            if O::SCALES == Scales::Row {
                scales.of(number, 0).set_streaming_if(team.rank == 0, 0usize, scale);
            }
            if O::SCALES == Scales::Group {
                let place = scales.of(number, first / GROUP as u32);
                let step = (each / GROUP as u32) as usize * scales.group_stride;
                cuda_std::unroll::<PIECES>(|i| {
                    let leads = has & (1 << (V * i)) != 0 && warp::lane_id() == 0;
                    place.set_streaming_if(leads, i * step, O::scale_and_factor(largest_of_groups[i], rms).0);
                });
            }
            number += thread::grid_dim_x();
            stage += 1;
            if stage == STAGES {
                (stage, parity) = (0, parity ^ 1);
            }
        }
    }
}

/// The ring of a block whose rows have `n` elements, the threads of a row (the block's but for the last warp), and scratch for two reductions; then the kernel's
/// [beginning](dependent_launch::begin).
#[inline(always)]
#[track_caller]
pub(super) unsafe fn begin<T: Float, const ADD: bool>(n: u32) -> (Ring, Team, Shared<f32>) {
    let team = Team { size: thread::block_dim_x() - MOVERS, rank: thread::thread_idx_x() };
    let size = const { size_of::<T>() };
    let row_bytes = row_bytes(team.size, size);
    let mut carver = Carver::new();
    let scratch = scratch::<2, MAX_WARPS>(&mut carver);
    let bars = carver.take::<u64>(STAGES as usize);
    let rows = const { STAGES * inputs(ADD) };
    let bytes = carver.take_aligned::<u8>((rows * row_bytes) as usize, 128);
    let ring = Ring { bytes, full: bars.address(0u32), row_bytes, n };
    if team.rank == 0 {
        let mut stage = 0;
        while stage < STAGES {
            mbarrier::init(ring.full + 8 * stage, 1);
            stage += 1;
        }
        mbarrier::fence_init();
    }
    // Zeros behind rows.
    let mut row = 0;
    while row < rows {
        let mut at = n * size as u32 / LINE * LINE + team.rank * LINE;
        while at < row_bytes {
            bytes.set_as(row * row_bytes + at, B128([0u32; 4]));
            at += thread::block_dim_x() * LINE;
        }
        row += 1;
    }
    tma::fence_async();
    thread::sync_threads();
    dependent_launch::begin();
    (ring, team, scratch)
}

/// The rows of a block, one after another.
#[inline(always)]
#[track_caller]
unsafe fn rows_of_block<T: Float, O: Outcome<T>, const ADD: bool>(
    tensors: Tensors<T, O::Element>,
    scales: ScalePlaces,
) {
    let (ring, team, scratch) = begin::<T, ADD>(tensors.n);
    if team.rank >= team.size {
        tensors.move_rows::<ADD, false>(ring);
    } else {
        tensors.compute::<O, ADD>(ring, team, scratch, scales);
    }
}

/// As [`rms_norm`](super::rms_norm::rms_norm), for rows of any place. Block: the threads of a row that is held, at most [`MOST_THREADS`], and
/// [`MOVERS`]; grid: any; shared memory: [`shared_bytes`].
#[inline(always)]
pub unsafe fn rms_norm<T: Float>(
    x: *const T,
    weight: *const T,
    out: *mut T,
    rows: u32,
    n: u32,
    x_stride: usize,
    out_stride: usize,
    weight_offset: f32,
    eps: f32,
) {
    let x = Rows { first: x.cast_mut(), stride: x_stride };
    let out = Rows { first: out, stride: out_stride };
    let tensors = Tensors { x, residual: x, sum: x, out, weight: Global::new(weight), weight_offset, rows, n, eps };
    rows_of_block::<T, Plain, false>(tensors, ScalePlaces::none());
}

/// As [`rms_norm`], of `x + residual`, which goes to `residual_out`: the rows of both lie as far from multiples of 16 bytes. Outputs may be inputs.
#[inline(always)]
pub unsafe fn fused_add_rms_norm<T: Float>(
    x: *const T,
    residual: *const T,
    weight: *const T,
    out: *mut T,
    residual_out: *mut T,
    rows: u32,
    n: u32,
    x_stride: usize,
    residual_stride: usize,
    out_stride: usize,
    residual_out_stride: usize,
    weight_offset: f32,
    eps: f32,
) {
    let tensors = Tensors {
        x: Rows { first: x.cast_mut(), stride: x_stride },
        residual: Rows { first: residual.cast_mut(), stride: residual_stride },
        sum: Rows { first: residual_out, stride: residual_out_stride },
        out: Rows { first: out, stride: out_stride },
        weight: Global::new(weight),
        weight_offset,
        rows,
        n,
        eps,
    };
    rows_of_block::<T, Plain, true>(tensors, ScalePlaces::none());
}

/// What launches with 8-bit results work on.
#[inline(always)]
fn quantised<T: Float, Q: Quantised>(io: Io<T, Q>, rows: u32, n: u32, weight_offset: f32, eps: f32) -> Tensors<T, Q> {
    let residual = Rows { first: io.residual, stride: io.residual_stride };
    Tensors {
        x: Rows { first: io.x.cast_mut(), stride: io.x_stride },
        residual,
        sum: residual,
        out: Rows { first: io.out, stride: io.out_stride },
        weight: Global::new(io.weight),
        weight_offset,
        rows,
        n,
        eps,
    }
}

/// As [`rms_norm_quant::per_token`](super::rms_norm_quant::per_token) without `smooth`, launched as [`rms_norm`].
#[inline(always)]
pub unsafe fn per_token<T: Float, Q: Quantised, const ADD: bool>(
    x: *const T,
    residual: *mut T,
    weight: *const T,
    _smooth: *const f32,
    out: *mut Q,
    scales: *mut f32,
    rows: u32,
    n: u32,
    x_stride: usize,
    residual_stride: usize,
    out_stride: usize,
    weight_offset: f32,
    eps: f32,
) {
    let io = Io { x, residual, weight, out, x_stride, residual_stride, out_stride };
    let scales = ScalePlaces { scales: GlobalMut::new(scales), row_stride: 1, group_stride: 0 };
    rows_of_block::<T, Scaled<Q, false>, ADD>(quantised(io, rows, n, weight_offset, eps), scales);
}

/// As [`per_token`]; `scales`: `[rows, groups]`, strides in elements.
#[inline(always)]
pub unsafe fn per_group<T: Float, Q: Quantised, const ADD: bool>(
    x: *const T,
    residual: *mut T,
    weight: *const T,
    out: *mut Q,
    scales: *mut f32,
    rows: u32,
    n: u32,
    x_stride: usize,
    residual_stride: usize,
    out_stride: usize,
    scale_row_stride: usize,
    scale_group_stride: usize,
    weight_offset: f32,
    eps: f32,
) {
    let io = Io { x, residual, weight, out, x_stride, residual_stride, out_stride };
    let scales =
        ScalePlaces { scales: GlobalMut::new(scales), row_stride: scale_row_stride, group_stride: scale_group_stride };
    rows_of_block::<T, Scaled<Q, true>, ADD>(quantised(io, rows, n, weight_offset, eps), scales);
}
