//! From the experts that a router knows to those that GPUs hold: replicas take turns.

use cuda_std::{Global, GlobalMut, entries, integer, thread};

/// `out`, `ids`: `[pairs]`, where `top_k` in a row belong to a token. Expert `e` has `counts[e]` replicas, in row `e` of
/// `replicas`, `[experts, stride]`. Which one token `t` gets goes by `t + turn`. Negative ids stay; an expert that is not there, or
/// has no replica, becomes `i32::MAX`. Grid: pairs in steps of the block.
#[inline(always)]
pub unsafe fn expert_map(
    out: *mut i32,
    ids: *const i32,
    replicas: *const i32,
    counts: *const i32,
    pairs: u32,
    top_k: u32,
    experts: u32,
    stride: u32,
    turn: u32,
) {
    let i = thread::index_1d();
    if i >= pairs {
        return;
    }
    let id: i32 = Global::new(ids).get(i);
    let mut to = id;
    if id >= 0 {
        to = i32::MAX;
        if (id as u32) < experts {
            let count = Global::new(counts).get(id) as u32;
            if count > 0 && count <= stride {
                let replica = integer::rem(integer::div(i, top_k).wrapping_add(turn), count);
                to = Global::new(replicas).get(id as usize * stride as usize + replica as usize);
            }
        }
    }
    GlobalMut::new(out).set(i, to);
}

entries! {
    /// Arguments of `ep_expert_map`; see [`expert_map`].
    pub struct Args(
        out: *mut i32, ids: *const i32, replicas: *const i32, counts: *const i32, pairs: u32, top_k: u32, experts: u32,
        stride: u32, turn: u32,
    );
    ep_expert_map {} [256] => expert_map;
}
