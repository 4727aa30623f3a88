//! Expert capacity: who gets a place, who goes on to the next choice, who is dropped.
//!
//! Choices are served in order: every token's first, in the order of the tokens, then every token's second, and so on, as in
//! GShard (Lepikhin et al. 2020) and Switch Transformers (Fedus et al. 2021). A token gets a place with a choice if it has fewer
//! than it wants and the expert is not full. With as many choices as places wanted, what finds no room is dropped; with more,
//! it goes to the next choice.
//!
//! One block walks through the tokens, as many at a time as it has threads. A lane's place is what the expert had before,
//! plus the warps before its own, plus the equal lanes below (`match_any`); so it does not depend on timing.

use cuda_std::atomic::{Block, Relaxed};
use cuda_std::{Global, GlobalMut, dependent_launch, entries, shared, thread, warp};

/// Threads of the block.
pub const THREADS: usize = 512;
const WARPS: usize = THREADS / 32;

/// Dynamic shared memory for so many experts.
pub const fn shared_bytes(experts: usize) -> usize {
    experts.next_multiple_of(4) * 4 + WARPS * experts.next_multiple_of(8) * 2
}

/// `kept`: `[tokens, choices]`, -1 where a choice was not granted; `loads`: `[experts]` or null: places taken;
/// `topk_ids`: `[tokens, choices]`; `wanted`: places of a token. Grid: 1; block: [`THREADS`]; shared memory: [`shared_bytes`].
#[inline(always)]
pub unsafe fn capacity(
    kept: *mut i32,
    loads: *mut i32,
    topk_ids: *const i32,
    tokens: u32,
    choices: u32,
    wanted: u32,
    experts: u32,
    capacity: u32,
) {
    dependent_launch::begin();
    let (tid, lane) = (thread::thread_idx_x(), warp::lane_id());
    let warp_id = tid / 32;
    let (kept, ids) = (GlobalMut::new(kept), Global::new(topk_ids));
    let mut carver = shared::Carver::new();
    let taken = carver.take::<u32>((experts as usize).next_multiple_of(4));
    let columns = (experts as usize).next_multiple_of(8);
    let counts = carver.take::<u16>(WARPS * columns);
    let mut i = tid;
    while i < experts {
        taken.set(i, 0);
        for w in 0..WARPS {
            counts.set(w * columns + i as usize, 0);
        }
        i += THREADS as u32;
    }
    thread::sync_threads();
    for choice in 0..choices {
        let mut first = 0;
        while first < tokens {
            let token = first + tid;
            let row = token as usize * choices as usize;
            let mut expert = if token < tokens { ids.get(row + choice as usize) as u32 } else { u32::MAX };
            // Before that many choices nobody has enough.
            if expert < experts && choice >= wanted {
                let mut have = 0;
                for earlier in 0..choice {
                    have += (kept.get(row + earlier as usize) >= 0) as u32;
                }
                if have >= wanted {
                    expert = u32::MAX;
                }
            }
            let asks = expert < experts;
            let expert = if asks { expert } else { u32::MAX };
            let peers = warp::warp_match_any_32(warp::FULL, expert);
            let below = (peers & ((1 << lane) - 1)).count_ones();
            if asks && below == 0 {
                counts.set(warp_id as usize * columns + expert as usize, peers.count_ones() as u16);
            }
            thread::sync_threads();
            let mut place = below;
            if asks {
                place += taken.get(expert);
                for w in 0..warp_id {
                    place += counts.get(w as usize * columns + expert as usize) as u32;
                }
            }
            if token < tokens {
                kept.set(row + choice as usize, if asks && place < capacity { expert as i32 } else { -1 });
            }
            thread::sync_threads();
            if asks && below == 0 {
                counts.set(warp_id as usize * columns + expert as usize, 0);
                taken.fetch_add(expert, peers.count_ones(), Block, Relaxed);
            }
            thread::sync_threads();
            first += THREADS as u32;
        }
    }
    if !loads.is_null() {
        let loads = GlobalMut::new(loads);
        let mut i = tid;
        while i < experts {
            loads.set(i, taken.get(i).min(capacity) as i32);
            i += THREADS as u32;
        }
    }
}

entries! {
    /// Arguments of `moe_capacity`; see [`capacity()`].
    pub struct Args(
        kept: *mut i32, loads: *mut i32, topk_ids: *const i32, tokens: u32, choices: u32, wanted: u32, experts: u32,
        capacity: u32,
    );
    moe_capacity {} [512] => super::capacity;
}
