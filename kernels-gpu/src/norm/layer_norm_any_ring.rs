//! [`layer_norm`](super::layer_norm) for many rows that are not aligned, on Hopper: blocks that stay, and rows that the copy engine moves while others are worked on, as
//! [`rms_norm_any_ring`](super::rms_norm_any_ring) has them.
//!
//! A row takes two sums, one after the other, between which its elements are in registers. Weights and biases are there as well, packed: widened they would take twice as many, and those of f32 have no room. Everything is
//! added up in the order of a row that is held (`any_x4`): the same bits.

use super::layer_norm::quotient;
use super::rms_norm::{inverse, inverse_rms};
use super::rms_norm_any_ring::{PIECES, Ring, Rows, STAGES, Tensors, V, WARPS, begin};
use super::{MAX_WARPS, Row};
use crate::row::team::Op;
use crate::row::{Team, Words, unpacked_again, words};
use cuda_std::{Float, Global, Shared, float, integer, mbarrier, thread, tma, vec};

/// By a row's threads: computes.
#[inline(always)]
#[track_caller]
unsafe fn compute<T: Float>(tensors: &Tensors<T, T>, bias: Global<T>, ring: Ring, team: Team, scratch: Shared<f32>) {
    let n = tensors.n;
    let row = Row::<V, PIECES, false>::new(team, n);
    // The thread's first column, how far apart those of its pieces are, and which of its elements the row has.
    let (own, each, mut has) = (row.piece(0).first(), team.size * V as u32, 0);
    cuda_std::unroll::<PIECES>(|i| cuda_std::unroll::<V>(|j| has |= u32::from(row.piece(i).has(j)) << (V * i + j)));
    let mut along: [[Words; 2]; PIECES] = [[[0; 4]; 2]; PIECES];
    cuda_std::unroll::<PIECES>(|i| {
        let (w, b) = (row.piece(i).load_optional(tensors.weight, true), row.piece(i).load_optional(bias, false));
        along[i] = [words(w).0, words(b).0];
    });
    thread::sync_threads();

    let inverse_n = inverse(n);
    let (mut number, mut stage, mut parity) = (thread::block_idx_x(), 0, 0);
    while number < tensors.rows {
        // A zero that ptxas does not know: it would keep places, and what was widened, in registers from row to row.
        let zeros = number >> 31;
        let (first, has) = (integer::opaque(own ^ zeros), integer::opaque(has ^ zeros));
        mbarrier::wait_parity(ring.full + 8 * stage, parity);
        let size = const { size_of::<T>() as u32 };
        let [from, _] = tensors.inputs::<false>(number);
        let from = ring.place::<T, false>(stage, 0, from) + first * size;
        let (mut x, mut total) = ([[0.0; V]; PIECES], 0.0);
        cuda_std::unroll::<PIECES>(|i| {
            x[i] = ring.get::<T>(from + i as u32 * each * size);
            cuda_std::unroll::<V>(|j| total += x[i][j]);
        });
        let total = Op::Sum.over_warp(total);
        let [total] = team.reduce_warps::<1, 1, WARPS>([[total]], [Op::Sum], scratch);
        let mean = quotient(total, n as f32, inverse_n);

        let mut squares = 0.0;
        cuda_std::unroll::<PIECES>(|i| {
            cuda_std::unroll::<V>(|j| {
                let d = if has & (1 << (V * i + j)) != 0 { x[i][j] - mean } else { 0.0 };
                squares = float::fma(d, d, squares);
            });
        });
        let squares = Op::Sum.over_warp(squares);
        let [squares] = team.reduce_warps::<1, 1, WARPS>([[squares]], [Op::Sum], scratch.offset(MAX_WARPS));
        let scale = inverse_rms(squares, inverse_n, tensors.eps);

        // All threads have their elements: the stage is free for what comes of them.
        let first = integer::opaque(first ^ zeros);
        let to = ring.place::<T, false>(stage, 0, tensors.out.row(number).cast_const()) + first * size;
        cuda_std::unroll::<PIECES>(|i| {
            let [w, b]: [[f32; V]; 2] = along[i].map(|words| vec::to_f32(unpacked_again::<T, V>(words, zeros)));
            let mut y = x[i];
            cuda_std::unroll::<V>(|j| y[j] = float::fma((y[j] - mean) * scale, w[j], b[j]));
            ring.set(to + i as u32 * each * size, vec::from_f32::<T, V>(y), has >> (V * i));
        });
        tma::fence_async();
        thread::sync_threads();
        number += thread::grid_dim_x();
        stage += 1;
        if stage == STAGES {
            (stage, parity) = (0, parity ^ 1);
        }
    }
}

/// The rows of a block, one after another.
#[inline(always)]
#[track_caller]
unsafe fn rows_of_block<T: Float>(tensors: Tensors<T, T>, bias: Global<T>) {
    let (ring, team, scratch) = begin::<T, false>(tensors.n);
    if team.rank >= team.size {
        tensors.move_rows::<false, true>(ring);
    } else {
        compute(&tensors, bias, ring, team, scratch);
    }
}

/// As [`layer_norm`](super::layer_norm::layer_norm), for 16-bit rows of any place; launched as [`rms_norm`](super::rms_norm_any_ring::rms_norm) there.
#[inline(always)]
pub unsafe fn layer_norm<T: Float>(
    x: *const T,
    weight: *const T,
    bias: *const T,
    out: *mut T,
    rows: u32,
    n: u32,
    x_stride: usize,
    out_stride: usize,
    eps: f32,
) {
    let x = Rows { first: x.cast_mut(), stride: x_stride };
    let out = Rows { first: out, stride: out_stride };
    let weight = Global::new(weight);
    let tensors = Tensors { x, residual: x, sum: x, out, weight, weight_offset: 0.0, rows, n, eps };
    rows_of_block(tensors, Global::new(bias));
}
