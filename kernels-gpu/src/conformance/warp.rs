//! Shuffles, votes, matches, reductions and scans.

use super::Words;
use cuda_std::warp::{self, FULL};
use cuda_std::{bf16, entries, f16, thread};

/// Threads of the block: two warps.
pub const THREADS: usize = 64;
/// Words of a thread.
pub const WORDS: usize = 44;

/// `out`: `[THREADS, WORDS]`. Grid: 1; block: `THREADS`.
#[inline(always)]
pub unsafe fn conformance(out: *mut u32) {
    let (t, lane) = (thread::thread_idx_x(), warp::lane_id());
    let mut words = Words::new(out, WORDS);
    words.put(lane | warp::warp_id() << 8);

    // Shuffles, including the rules of segments.
    let found = |(value, there): (u32, bool)| value << 1 | there as u32;
    words.put(found(warp::warp_shuffle_idx(FULL, t, 40, 8)));
    words.put(found(warp::warp_shuffle_idx(FULL, t, lane * 3, 32)));
    words.put(found(warp::warp_shuffle_up(FULL, t, 3, 16)));
    words.put(found(warp::warp_shuffle_down(FULL, t, 3, 16)));
    words.put(found(warp::warp_shuffle_xor(FULL, t, 5, 32)));
    words.put(found(warp::warp_shuffle_xor(FULL, t, 20, 8)));
    words.put(warp::shfl_up(t, 4) << 16 | warp::shfl_down(t, 9));

    // Every type that can be exchanged.
    words.put_u64(warp::shfl_xor((t as u64) << 32 | 7, 1));
    words.put_u64(warp::shfl_xor(-(t as i64) << 20, 2) as u64);
    words.put_u64(warp::shfl_xor(t as f64 * 0.1, 4).to_bits());
    words.put_f32(warp::shfl_idx(lane as f32 + 0.5, 9));
    words.put(warp::shfl_idx(-(t as i32), 30) as u32);
    words.put(warp::shfl_xor(lane % 3 == 0, 1) as u32);
    words.put(warp::shfl_xor(bf16::from_bits(t as u16 * 7), 8).to_bits() as u32);
    words.put(warp::shfl_xor(f16::from_bits(t as u16 * 9), 16).to_bits() as u32);

    // Votes and matches.
    words.put(warp::warp_vote_ballot(FULL, lane % 3 == 0));
    words.put(warp::warp_vote_all(FULL, lane < 32) as u32 | (warp::warp_vote_all(FULL, lane < 31) as u32) << 1);
    words.put(warp::warp_vote_any(FULL, lane == 32) as u32 | (warp::warp_vote_any(FULL, lane == 31) as u32) << 1);
    words.put(warp::warp_match_any_32(FULL, lane % 5));
    words.put(warp::warp_match_any_64(FULL, ((lane % 4) as u64) << 32 | (lane % 3) as u64));
    words.put(warp::warp_match_all_32(FULL, t / 32) as u32 | (warp::warp_match_all_32(FULL, t / 8) as u32) << 1);
    words.put(warp::warp_vote_ballot(FULL, warp::elect_one()).count_ones());

    // Reductions by instruction.
    words.put(warp::warp_reduce_add_u32(FULL, t));
    words.put(warp::warp_reduce_add_i32(FULL, 10 - t as i32) as u32);
    words.put(warp::warp_reduce_min_u32(FULL, t ^ 21));
    words.put(warp::warp_reduce_max_u32(FULL, t ^ 21));
    words.put(warp::warp_reduce_min_i32(FULL, 10 - t as i32) as u32);
    words.put(warp::warp_reduce_max_i32(FULL, 10 - t as i32) as u32);
    words.put(warp::warp_reduce_and(FULL, !(1 << (lane / 2))));
    words.put(warp::warp_reduce_or(FULL, 1 << (lane / 2)));
    words.put(warp::warp_reduce_xor(FULL, t * t));

    // Reductions by shuffles: sums of floats in one order on every device.
    words.put_f32(warp::reduce_sum(lane as f32 * 0.1));
    words.put_f32(warp::reduce_max(if lane == 7 { f32::NAN } else { -(lane as f32) }));
    words.put_f32(warp::reduce_min(lane as f32 * 0.3 - 2.0));
    words.put_f32(warp::reduce_segments::<8, f32>(lane as f32 * 0.1, |a, b| a + b));
    words.put(warp::reduce_strided::<4, 8, u32>(t, |a, b| a + b));
    words.put_f32(warp::scan(lane as f32 * 0.1, |a, b| a + b));
    words.put(warp::scan(t, |a, b| a + b));

    // In divergent halves.
    words.put(if lane < 20 { warp::warp_reduce_add_u32(0xf_ffff, t) } else { warp::warp_reduce_xor(0xfff0_0000, t) });
    warp::sync_warp(FULL);
    words.put(warp::reduce(t ^ 21, u32::max));
    words.done();
}

entries! {
    pub struct Args(out: *mut u32);
    conformance_warp {} [64] => conformance;
}
