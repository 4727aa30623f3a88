//! Pairs of tokens and slots, and the expert that each goes to.
//!
//! Pair `token · slots + slot` is what one token asks of one expert. The first `top_k` slots of a token come from its
//! row of `topk_ids`; shared experts may follow, one slot each, without being listed there. Experts are renumbered for the
//! device at hand: its routed experts come first, then the shared ones. These numbers are called bins.

use cuda_std::{Global, unroll};

/// Bin of a pair whose expert lives elsewhere, or that has none.
pub const NOWHERE: u32 = u32::MAX;
/// Bin of a pair whose id is out of range.
pub const INVALID: u32 = u32::MAX - 1;

/// How pairs find their experts.
#[derive(Clone, Copy)]
pub struct Pairs {
    /// `[tokens, top_k]`.
    pub topk_ids: Global<i32>,
    /// For each expert its bin, or -1 if it lives elsewhere; used if `mapped`.
    pub expert_map: Global<i32>,
    /// Whether `expert_map` is there.
    pub mapped: bool,
    /// Listed slots of a token.
    pub top_k: u32,
    /// Slots of a token: `top_k`, and one for each appended shared expert.
    pub slots: u32,
    /// Routed experts, over all devices.
    pub experts: u32,
    /// Routed experts of this device.
    pub local: u32,
    /// Shared experts, whose ids follow those of the routed ones.
    pub shared: u32,
}

impl Pairs {
    /// The bin of a pair, [`NOWHERE`] or [`INVALID`].
    #[inline(always)]
    #[track_caller]
    pub unsafe fn bin(self, pair: u32) -> u32 {
        self.bin_of_id(self.id(pair))
    }

    /// The id of a pair's expert, whatever it is; appended shared experts have those after the routed ones'.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn id(self, pair: u32) -> i32 {
        if self.slots == self.top_k {
            return self.topk_ids.get(pair);
        }
        // Not zero, or there would be no pairs.
        let slots = self.slots.max(1);
        let (token, slot) = (pair / slots, pair % slots);
        if slot >= self.top_k {
            return (self.experts + (slot - self.top_k)) as i32;
        }
        self.topk_ids.get(token as usize * self.top_k as usize + slot as usize)
    }

    /// The weight of a pair; 1 for an appended shared expert. `topk_weights`: `[tokens, top_k]`.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn weight(self, pair: u32, topk_weights: Global<f32>) -> f32 {
        if self.slots == self.top_k {
            return topk_weights.get(pair);
        }
        // Not zero, or there would be no pairs.
        let slots = self.slots.max(1);
        let (token, slot) = (pair / slots, pair % slots);
        if slot < self.top_k { topk_weights.get(token as usize * self.top_k as usize + slot as usize) } else { 1.0 }
    }

    /// [`id`](Self::id) and [`weight`](Self::weight) of pairs `first`, `first + 32` and so on, all asked for at once; -1 and 0 from `count` on, which is at
    /// most 255.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn ids_and_weights<const N: usize>(
        self,
        first: u32,
        count: u32,
        topk_weights: Global<f32>,
    ) -> ([i32; N], [f32; N]) {
        let (mut ids, mut weights) = ([-1; N], [0.0; N]);
        // One division for all: `pair / slots` is `pair * each >> 16`, as long as `pair * slots` fits there.
        let whole = self.slots == self.top_k;
        let each = if whole { 0 } else { 0xffff / self.slots.max(1) + 1 };
        unroll::<N>(|i| {
            let pair = first + 32 * i as u32;
            let (mut at, mut listed) = (pair, pair < count);
            if !whole && listed {
                let token = (pair * each) >> 16;
                let slot = pair - token * self.slots;
                (at, listed) = (token * self.top_k + slot, slot < self.top_k);
                (ids[i], weights[i]) = (self.experts.wrapping_add(slot.wrapping_sub(self.top_k)) as i32, 1.0);
            }
            if listed {
                (ids[i], weights[i]) = (self.topk_ids.get(at), topk_weights.get(at));
            }
        });
        (ids, weights)
    }

    /// [`bin`](Self::bin) of a token's slot.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn bin_of(self, token: u32, slot: u32) -> u32 {
        if slot >= self.top_k {
            return self.local + (slot - self.top_k);
        }
        self.bin_of_id(self.topk_ids.get(token as usize * self.top_k as usize + slot as usize))
    }

    /// Whether a token's slots `first`, `first + 1` and so on have a bin; all ids are asked for at once.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn are_there<const N: usize>(self, token: u32, first: u32) -> [bool; N] {
        let (mut ids, mut there) = ([-1; N], [false; N]);
        unroll::<N>(|i| {
            let slot = first + i as u32;
            if slot < self.top_k {
                ids[i] = self.topk_ids.get(token as usize * self.top_k as usize + slot as usize);
            }
        });
        let bins = self.bins_of_ids(ids);
        unroll::<N>(|i| {
            let slot = first + i as u32;
            there[i] = if slot < self.top_k { bins[i] < INVALID } else { slot < self.slots };
        });
        there
    }

    /// The bin of an expert.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn bin_of_id(self, id: i32) -> u32 {
        let [bin] = self.bins_of_ids([id]);
        bin
    }

    /// The bins of experts; those with places in `expert_map` are asked for at once.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn bins_of_ids<const N: usize>(self, ids: [i32; N]) -> [u32; N] {
        let mut bins = [NOWHERE; N];
        if self.mapped {
            unroll::<N>(|i| {
                if (ids[i] as u32) < self.experts {
                    bins[i] = self.expert_map.get(ids[i]) as u32;
                }
            });
        }
        unroll::<N>(|i| {
            let id = ids[i] as u32;
            bins[i] = if id >= self.experts {
                let shared = id - self.experts;
                if id == u32::MAX {
                    NOWHERE
                } else if shared < self.shared {
                    self.local + shared
                } else {
                    INVALID
                }
            } else if !self.mapped {
                id
            } else if bins[i] < self.local || bins[i] == NOWHERE {
                bins[i]
            } else {
                INVALID
            };
        });
        bins
    }
}

/// The tokens that exist: `num_tokens`, if it is not null, counts them on the device.
#[inline(always)]
pub unsafe fn existing_tokens(tokens: u32, num_tokens: *const i32) -> u32 {
    if num_tokens.is_null() { tokens } else { (Global::new(num_tokens).get(0u32).max(0) as u32).min(tokens) }
}
