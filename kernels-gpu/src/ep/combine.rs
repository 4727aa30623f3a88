//! Rows back from the ranks of their experts, added up.
//!
//! A token's rows are read from the memory of the ranks that have them, in the order of the ranks, added in f32, and rounded once.
//! Reading needs no buffer and no second pass. Before, all ranks must have written their rows (the entry); after, all must have
//! read them, so that they may be overwritten (the exit).
//!
//! Warps take pieces of a row, as they ask for them ([`Deal`]): with the same share for each, two H200s took 183 to 185 µs instead of 180 to 181
//! for 4096 tokens. What counts is how many bytes are under way, which registers must hold: seven vectors a lane of each of
//! two rows, or four of each of four, and all rows are loaded before any is added. (With four ranks, and one row under way while the one
//! before was added, a combine of 4096 tokens took 490 µs instead of 431 on H200s.) Of more rows, and with biases, the next is under way
//! while the one before is added to sums.

use super::{Deal, Link, Session, Unit, slot, token_count};
use cuda_std::vec::{B128, SecondLevel, Streaming};
use cuda_std::{Global, GlobalMut, bf16, entries, float, struct_param, thread, unroll, warp};

/// What is added up, and how.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Job {
    /// `[tokens, hidden]`, rows `out_stride` apart.
    pub out: *mut bf16,
    /// `[max_tokens, ranks]`, as dispatch wrote it.
    pub places: *const i32,
    /// `[tokens, ranks]`, what a rank's row is multiplied by; or null.
    pub weights: *const f32,
    /// `[tokens, hidden]`, contiguous, added after the rows; or null.
    pub bias: *const bf16,
    /// Another, added after it; or null.
    pub bias2: *const bf16,
    /// How many tokens there are, if not `tokens`; or null.
    pub count: *const u32,
    /// In elements.
    pub out_stride: usize,
    /// At most `max_tokens`.
    pub tokens: u32,
    /// A multiple of 8.
    pub hidden: u32,
}
struct_param!(Job);

type Words<const D: usize> = [[u32; 4]; D];

/// Vectors of a row, `first` and every 32nd after it, before `end`.
#[inline(always)]
#[track_caller]
unsafe fn load<const D: usize, const PEER: bool>(row: Global<bf16>, first: u32, end: u32) -> Words<D> {
    let mut words = [[0; 4]; D];
    unroll::<D>(|j| {
        let i = first + 32 * j as u32;
        if i < end {
            // What peers wrote is not read-only for the life of the launch.
            let B128(v) = if PEER {
                row.get_hinted::<B128<u32, 4>>(i as usize * 8, SecondLevel)
            } else {
                row.get_hinted::<B128<u32, 4>>(i as usize * 8, Streaming)
            };
            unroll::<4>(|w| words[j][w] = v[w]);
        }
    });
    words
}

#[inline(always)]
fn add_vector(sums: &mut [f32; 8], words: [u32; 4], weight: f32) {
    unroll::<4>(|w| {
        let (low, high) = (f32::from_bits(words[w] << 16), f32::from_bits(words[w] & 0xffff_0000));
        sums[2 * w] = float::fma(weight, low, sums[2 * w]);
        sums[2 * w + 1] = float::fma(weight, high, sums[2 * w + 1]);
    });
}

#[inline(always)]
fn add<const FEW: usize>(sums: &mut [[f32; 8]; FEW], words: Words<FEW>, weight: f32) {
    unroll::<FEW>(|j| add_vector(&mut sums[j], words[j], weight));
}

/// The blocks must all be resident; the threads of a block are a multiple of 32.
#[inline(always)]
pub unsafe fn combine(link: Link, job: Job) {
    let Some(session) = Session::begin(link, 0, false) else { return };
    let ok = if link.ranks <= 2 { sum::<2, 7, 3>(&session, &job) } else { sum::<4, 4, 4>(&session, &job) };
    session.finish(ok, true);
}

/// `ROWS`: how many of a token are under way together, with `DEPTH` vectors of each for a lane. `FEW`: vectors, if sums stay in registers,
/// too.
#[inline(always)]
#[track_caller]
unsafe fn sum<const ROWS: usize, const DEPTH: usize, const FEW: usize>(session: &Session, job: &Job) -> bool {
    let link = &session.link;
    let tokens = token_count(job.count, job.tokens);
    let (lane, ranks) = (warp::lane_id(), link.ranks as usize);
    let count = job.hidden / 8;
    let piece = 32 * DEPTH as u32;
    let pieces = count.div_ceil(piece);
    let (places, weights) = (Global::new(job.places), Global::new(job.weights));
    let out = GlobalMut::new(job.out);
    let biased = !job.bias.is_null() || !job.bias2.is_null();
    let mut deal = Deal::new(link, link.rank, thread::block_idx_x(), thread::grid_dim_x());
    let mut walk = Unit::new(deal.first(), pieces);
    // Lane `r`'s, of the token of a piece. The first, and the table, are under way while the rank waits for the others, whom it has
    // told that it is here: that would wait for loads.
    let look_up = |walk: Unit| {
        let (mut place, mut weight) = (-1, 1.0);
        if lane < link.ranks && walk.row < tokens {
            let at = walk.row as usize * ranks + lane as usize;
            place = places.get(at);
            if !job.weights.is_null() {
                weight = weights.get(at);
            }
        }
        (place, weight)
    };
    let mut base = 0;
    if lane < link.ranks {
        base = link.buffer::<bf16>(lane, slot::RESULTS).ptr(0usize) as u64;
    }
    let mut next = look_up(walk);
    deal.ask();
    if !session.wait_entry() {
        return false;
    }
    let mut after = Unit::new(deal.next(), pieces);
    while walk.row < tokens {
        let (token, begin) = (walk.row, walk.piece * piece);
        let end = count.min(begin + piece);
        let (place, weight) = next;
        walk = after;
        next = look_up(walk);
        after = Unit::new(deal.next(), pieces);
        let there = warp::warp_vote_ballot(warp::FULL, place >= 0);
        let row = |d: u32| {
            let place = warp::shfl_idx(place, d);
            let rows = Global::new(warp::shfl_idx(base, d) as *const bf16);
            rows.offset(place as usize * job.hidden as usize)
        };
        let to = out.offset(token as usize * job.out_stride);
        if there.count_ones() <= ROWS as u32 && !biased {
            // All rows are under way before any is looked at, and sums live for a moment only.
            let (mut words, mut factors, mut rest) = ([[[0; 4]; DEPTH]; ROWS], [0.0; ROWS], there);
            unroll::<ROWS>(|r| {
                if rest != 0 {
                    let d = rest.trailing_zeros();
                    words[r] = load::<DEPTH, true>(row(d), begin + lane, end);
                    factors[r] = warp::shfl_idx(weight, d);
                    rest &= rest - 1;
                }
            });
            unroll::<DEPTH>(|j| {
                let i = begin + lane + 32 * j as u32;
                if i < end {
                    let mut sums = [0.0; 8];
                    // Rows that are not there are zeros, times zero.
                    unroll::<ROWS>(|r| add_vector(&mut sums, words[r][j], factors[r]));
                    to.set_hinted(i as usize * 8, B128::<bf16, 8>::from_f32(sums), Streaming);
                }
            });
        } else {
            let mut first = begin + lane;
            while first - lane < end {
                let mut sums = [[0.0; 8]; FEW];
                let mut pending = [[0; 4]; FEW];
                let mut factor = 0.0;
                for d in 0..link.ranks {
                    let w = warp::shfl_idx(weight, d);
                    if there >> d & 1 != 0 {
                        let next = load::<FEW, true>(row(d), first, end);
                        // Nothing is pending before the first: zeros, times zero.
                        add(&mut sums, pending, factor);
                        pending = next;
                        factor = w;
                    }
                }
                add(&mut sums, pending, factor);
                let shift = token as usize * job.hidden as usize;
                if !job.bias.is_null() {
                    let bias = Global::new(job.bias).offset(shift);
                    add(&mut sums, load::<FEW, false>(bias, first, end), 1.0);
                }
                if !job.bias2.is_null() {
                    let bias = Global::new(job.bias2).offset(shift);
                    add(&mut sums, load::<FEW, false>(bias, first, end), 1.0);
                }
                unroll::<FEW>(|j| {
                    let i = first + 32 * j as u32;
                    if i < end {
                        to.set_hinted(i as usize * 8, B128::<bf16, 8>::from_f32(sums[j]), Streaming);
                    }
                });
                first += 32 * FEW as u32;
            }
        }
    }
    true
}

entries! {
    /// Arguments of `ep_combine`; see [`combine`].
    pub struct Args(link: Link, job: Job);
    ep_combine_bf16 {} [512] => combine;
}
