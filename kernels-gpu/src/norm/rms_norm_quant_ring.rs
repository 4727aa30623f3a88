//! [`rms_norm_quant`](super::rms_norm_quant) for many long rows on Hopper: blocks that stay, and rows that come while others are worked on.
//!
//! A row of more than 32 KiB leaves room for one or two blocks a multiprocessor. Where each of them has one row, it loads, waits, reduces, loads weights, computes and
//! stores, and nothing overlaps. Here a multiprocessor has one block, which has one row after another (that of its own number, and from there every so many as there are
//! blocks), and the copy engine brings them into a ring in shared memory.
//!
//! * A stage of the ring is one piece of every thread, of the residual as well if there is one. So a row is [`PIECES`] stages, of which the last may be partly filled.
//! * Threads take their pieces out of the ring as they come. What a row gives but for its factor stays in registers, in f32, until its sum is known (`RESULTS`); of
//!   16-bit rows of more than 64 KiB, which have no registers for that, the row itself, packed, as it came.
//! * One or two stages that have been read ([`part`]) are filled again after a barrier of the block. The last of a row's barriers is that of its reduction, which is there anyhow. So
//!   nobody but threads that compute asks for copies.
//! * Weights are loaded once. Shared memory has them as they are multiplied with, `weight + offset` in f32, or as they came where the row itself is kept: each thread's own, at no other
//!   thread's disposal, in units of 16 bytes that lie side by side for neighbouring threads.
//!
//! The ring is no larger than it need be: with more on its way than the memory needs to be busy, requests queue, and half of the multiprocessors get
//! theirs answered a fifth faster than the others, which are left to work alone at the end.
//!
//! Threads and their pieces are those of a row of eight pieces a thread (`x8`), and everything is added up in the same order: the same bits.

use super::rms_norm::{squares, sum};
use super::rms_norm_quant::{Factors, Io, Scales, row_sums, store_piece};
use super::{MAX_WARPS, Row};
use crate::row::quantise::{self, GroupScales, Quantised};
use crate::row::team::scratch;
use crate::row::{Team, unpacked, unpacked_again, words};
use cuda_std::shared::Carver;
use cuda_std::vec::{self, B128};
use cuda_std::{Float, Global, GlobalMut, Shared, dependent_launch, float, integer, mbarrier, thread, tma};

/// Pieces of 16 bytes of a thread: a row's stages.
pub const PIECES: usize = 8;
/// Stages that are filled again at the same time. Measured on an H200.
const fn part(grouped: bool) -> usize {
    if grouped { 2 } else { 1 }
}

/// Stages of the ring of a block of so many threads. With a residual they are twice as large. Measured on an H200.
pub const fn stages(threads: u32, fused_add: bool) -> u32 {
    match threads {
        _ if fused_add => 6,
        0..=320 => 12,
        321..=416 => 10,
        _ => 8,
    }
}

/// The most stages.
const MOST_STAGES: usize = 12;

/// Where the ring begins in shared memory: behind the scratch of reductions and the mbarriers.
const RING_AT: usize = (2 * MAX_WARPS * 4 + MOST_STAGES * 8).next_multiple_of(128);

/// Units of 16 bytes of the weights of a piece of `v` elements.
const fn units(v: usize, results: bool) -> usize {
    if results { v / 4 } else { 1 }
}

/// Dynamic shared memory of a block of `threads` for elements of `size` bytes. `results`: what is kept is not the row itself.
pub const fn shared_bytes(threads: u32, size: usize, fused_add: bool, results: bool) -> usize {
    let pieces = (stages(threads, fused_add) * inputs(fused_add)) as usize + PIECES * units(16 / size, results);
    RING_AT + pieces * 16 * threads as usize
}

/// A stage of the ring, and the parity of the round.
#[derive(Clone, Copy)]
struct Place {
    stage: u32,
    parity: u32,
}

impl Place {
    /// On to the next of so many stages.
    #[inline(always)]
    fn advance(&mut self, stages: u32) {
        self.stage += 1;
        if self.stage == stages {
            self.stage = 0;
            self.parity ^= 1;
        }
    }
}

/// What the copy engine is asked for.
#[derive(Clone, Copy)]
struct Copies<T> {
    x: *const T,
    residual: *const T,
    x_stride: usize,
    residual_stride: usize,
    n: u32,
    /// Elements of a piece of all threads.
    each: u32,
    /// Address of the mbarriers.
    full: u32,
    /// Address of the ring.
    ring: u32,
}

impl<T> Copies<T> {
    /// Asks for a piece of all threads of a row.
    #[inline(always)]
    #[track_caller]
    unsafe fn bring<const ADD: bool>(self, row: u32, piece: u32, stage: u32) {
        let size = const { size_of::<T>() as u32 };
        let first = piece * self.each;
        let bytes = (self.n - first).min(self.each) * size;
        let (full, inputs) = (self.full + 8 * stage, const { inputs(ADD) });
        let to = self.ring + stage * inputs * self.each * size;
        let from = |at: *const T, stride: usize| at.wrapping_add(row as usize * stride + first as usize);
        mbarrier::arrive_expect_tx(full, inputs * bytes);
        tma::copy_bulk(to, from(self.x, self.x_stride), bytes, full);
        if ADD {
            tma::copy_bulk(to + self.each * size, from(self.residual, self.residual_stride), bytes, full);
        }
    }
}

/// Pieces of a thread in a stage.
const fn inputs(fused_add: bool) -> u32 {
    if fused_add { 2 } else { 1 }
}

/// The weights of the calling thread, in shared memory.
#[derive(Clone, Copy)]
struct Weights<T, const V: usize, const RESULTS: bool> {
    words: Shared<u32>,
    factors: Factors<T>,
}

impl<T: Float, const V: usize, const RESULTS: bool> Weights<T, V, RESULTS> {
    /// Where unit `u` of piece `i` of the calling thread is.
    #[inline(always)]
    fn at(self, team: Team, i: usize, u: usize) -> u32 {
        ((i * const { units(V, RESULTS) } + u) as u32 * team.size + team.rank) * 4
    }

    /// Loads them, from another piece on in each block: all at once would ask the same few places of the second-level cache.
    #[inline(always)]
    #[track_caller]
    unsafe fn load(self, row: Row<V, PIECES, true>) {
        let turned = |i: usize| (i + thread::block_idx_x() as usize) % PIECES;
        let mut w = [[0; 4]; PIECES];
        cuda_std::unroll::<PIECES>(|i| w[i] = row.piece(turned(i)).load_optional_words(self.factors.weight, true));
        cuda_std::unroll::<PIECES>(|i| {
            if RESULTS {
                let w = vec::to_f32(unpacked::<T, V>(w[i])).map(|w| w + self.factors.weight_offset);
                let mut j = 0;
                while j < V {
                    self.words.set_as(self.at(row.team, turned(i), j / 4), B128([w[j], w[j + 1], w[j + 2], w[j + 3]]));
                    j += 4;
                }
            } else {
                self.words.set_as(self.at(row.team, turned(i), 0), B128(w[i]));
            }
        });
    }

    /// `x * (w + offset)` of piece `i`.
    #[inline(always)]
    #[track_caller]
    unsafe fn weighted(self, team: Team, i: usize, x: [T; V]) -> [f32; V] {
        if !RESULTS {
            let B128(w) = self.words.get_as(self.at(team, i, 0));
            return self.factors.weighted(x, unpacked(w));
        }
        let mut y = vec::to_f32(x);
        let mut j = 0;
        while j < V {
            let B128(w): B128<f32, 4> = self.words.get_as(self.at(team, i, j / 4));
            cuda_std::unroll::<4>(|l| y[j + l] *= w[l]);
            j += 4;
        }
        y
    }
}

/// The rows of a block, one after another. `scales`: those of a row.
#[inline(always)]
#[track_caller]
unsafe fn rows_of_block<
    T: Float,
    Q: Quantised,
    S: Scales,
    const ADD: bool,
    const V: usize,
    const RESULTS: bool,
    const SMOOTH: bool,
>(
    io: Io<T, Q>,
    factors: Factors<T>,
    scales: impl Fn(usize) -> S,
    rows: u32,
    n: u32,
    eps: f32,
) {
    let team = Team::current();
    let (first_row, blocks) = (thread::block_idx_x(), thread::grid_dim_x());
    let (each, stages) = (team.size * V as u32, stages(team.size, ADD));
    let part = const { part(S::GROUPED) };
    let mut carver = Carver::new();
    let _ = scratch::<2, MAX_WARPS>(&mut carver);
    let bars = carver.take::<u64>(MOST_STAGES);
    let ring = carver.take_aligned::<T>((stages * const { inputs(ADD) } * each) as usize, 128);
    let weights = Weights::<T, V, RESULTS> {
        words: carver.take::<u32>(const { PIECES * units(V, RESULTS) * 4 } * team.size as usize),
        factors,
    };
    let full = bars.address(0u32);
    if team.rank == 0 {
        let mut stage = 0;
        while stage < stages {
            mbarrier::init(full + 8 * stage, 1);
            stage += 1;
        }
        mbarrier::fence_init();
    }
    thread::sync_threads();
    dependent_launch::begin();

    let copies = Copies {
        x: io.x,
        residual: io.residual.cast_const(),
        x_stride: io.x_stride,
        residual_stride: io.residual_stride,
        n,
        each,
        full,
        ring: ring.address(0u32),
    };
    // What the block reads `ahead` stages after the first of row number `row`.
    let bring = |row: u32, ahead: u32, stage: u32| {
        let row = row + ahead / const { PIECES as u32 } * blocks;
        if row < rows {
            copies.bring::<ADD>(row, ahead % const { PIECES as u32 }, stage);
        }
    };
    if team.rank.is_multiple_of(32) {
        let mut stage = team.rank / 32;
        while stage < stages {
            bring(first_row, stage, stage);
            stage += team.size / 32;
        }
    }
    weights.load(Row::new(team, n));

    let mut place = Place { stage: 0, parity: 0 };
    let mut number = first_row;
    while number < rows {
        // Zero, which ptxas does not know: it would keep the places of all pieces in registers from row to row.
        let zero = number >> 31;
        let row = Row::<V, PIECES, true>::new(Team { rank: integer::opaque(team.rank ^ zero), ..team }, n);
        let residual = GlobalMut::new(io.residual).offset(number as usize * io.residual_stride);
        // Piece `i` of the results, but for the row's factor.
        let results = |row: Row<V, PIECES, true>, i: usize, x: [T; V]| {
            let y = weights.weighted(row.team, i, x);
            if SMOOTH { factors.smoothed(row.piece(i), y) } else { y }
        };
        // Before piece `i`, the stages of those before, from `read` on.
        let refill = |read: Place, i: usize| {
            let (rank, warp) = (row.team.rank, row.team.rank / 32);
            if rank < 32 * part as u32 && rank.is_multiple_of(32) {
                let stage = read.stage + warp;
                bring(number, (i - part) as u32 + warp + stages, if stage < stages { stage } else { stage - stages });
            }
        };

        // Either the row as it came, or results and the largest of their groups.
        let mut x = [[0u32; 4]; PIECES];
        let (mut y, mut groups) = ([[0f32; V]; PIECES], [0f32; PIECES]);
        let (mut total, mut largest) = (0.0, 0.0);
        let mut read = place;
        cuda_std::unroll::<PIECES>(|i| {
            mbarrier::wait_parity(full + 8 * place.stage, place.parity);
            let (mut own, mut other) = ([0; 4], [0; 4]);
            // All threads have all pieces but the last.
            if i + 1 < PIECES || row.piece(i).has(0) {
                let at = place.stage * const { inputs(ADD) } * each + team.rank * V as u32;
                B128(own) = ring.get_as(at);
                if ADD {
                    B128(other) = ring.get_as(at + each);
                }
            }
            if ADD {
                let added = sum(unpacked::<T, V>(own), unpacked(other));
                row.piece(i).store(residual, added);
                own = words(added).0;
            }
            let values = unpacked::<T, V>(own);
            total += squares(values);
            if RESULTS {
                y[i] = results(row, i, values);
                if S::GROUPED {
                    groups[i] = quantise::group_amax(y[i]);
                } else {
                    largest = float::max(largest, quantise::amax(y[i]));
                }
            } else {
                x[i] = own;
                if !S::GROUPED {
                    largest = float::max(largest, quantise::amax(results(row, i, values)));
                }
            }
            place.advance(stages);
            if (i + 1).is_multiple_of(part) && i + 1 < PIECES {
                tma::fence_async();
                thread::sync_threads();
                refill(read, i + 1);
                read = place;
            }
        });
        tma::fence_async();
        let (rms, largest) = row_sums::<S, V, PIECES, true>(row, total, largest, n, eps);
        refill(read, PIECES);

        let (scale, row_factor) = quantise::scale_and_factor::<Q>(largest, rms);
        // No earlier, since registers are few until here.
        let at = integer::opaque(number) as usize;
        let (out, scales) = (GlobalMut::new(io.out).offset(at * io.out_stride), scales(at));
        scales.store_row_if(team.rank == 0, scale);
        let row = row.anew(1);
        cuda_std::unroll::<PIECES>(|i| {
            if !RESULTS {
                let y = results(row, i, unpacked_again(x[i], zero));
                store_piece::<Q, S, V, PIECES, true>(row, i, y, out, scales, n, rms, row_factor);
            } else if S::GROUPED {
                let (scale, factor) = quantise::scale_and_factor::<Q>(groups[i], rms);
                scales.store_group::<V>(row.index(i), n, scale);
                row.piece(i).store_quantised_at_once(out, y[i], factor);
            } else {
                row.piece(i).store_quantised_at_once(out, y[i], row_factor);
            }
        });
        number += blocks;
    }
}

/// As [`per_token`](super::rms_norm_quant::per_token) for aligned rows of more than 32 KiB. Block: the threads of a row with [`PIECES`] pieces each; grid: any; shared
/// memory: [`shared_bytes`].
#[inline(always)]
pub unsafe fn per_token<T: Float, Q: Quantised, const ADD: bool, const V: usize, const RESULTS: bool>(
    x: *const T,
    residual: *mut T,
    weight: *const T,
    smooth: *const f32,
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
    let factors = Factors { weight: Global::new(weight), weight_offset, smooth: Global::new(smooth) };
    let scales = |row: usize| GlobalMut::new(scales).offset(row);
    // One branch for all pieces of all rows.
    if factors.smooths() {
        rows_of_block::<T, Q, _, ADD, V, RESULTS, true>(io, factors, scales, rows, n, eps);
    } else {
        rows_of_block::<T, Q, _, ADD, V, RESULTS, false>(io, factors, scales, rows, n, eps);
    }
}

/// As [`per_token`]; `scales`: `[rows, groups]`, strides in elements.
#[inline(always)]
pub unsafe fn per_group<T: Float, Q: Quantised, const ADD: bool, const V: usize, const RESULTS: bool>(
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
    let factors = Factors { weight: Global::new(weight), weight_offset, smooth: Global::new(core::ptr::null()) };
    let scales = |row: usize| GroupScales {
        scales: GlobalMut::new(scales).offset(row * scale_row_stride),
        stride: scale_group_stride,
    };
    rows_of_block::<T, Q, _, ADD, V, RESULTS, false>(io, factors, scales, rows, n, eps);
}
