//! The fused block of experts: `out[t] = Σ w · down(act(gate_up(x[t])))` over the slots of each token.
//!
//! Three launches, four with sorting. The first product with its activation writes `h`, a row of the intermediate width for
//! each pair; the second writes its weighted results, a row of `partial` in f32 (or 16 bits, see [`fused_wgmma`]) for each pair; [`fused_reduce`] adds the rows
//! of a token up in the order of its slots. So nothing is added in an order that timing decides. `h` is rounded to the element
//! type, as it is between two products anywhere else; gate and value stay in f32 until the activation is done, so f16 cannot
//! overflow there.
//!
//! The two products are one kernel for each path ([`fused_fma`], [`fused_stream`], [`fused_tile`]), which takes a block of pairs of one
//! expert and a tile of that expert's outputs. What they have in common is here: arguments, how rows of weights are laid out,
//! and what happens to a finished sum. [`fused_wgmma`], Hopper's, has arguments and an end of its own.
//!
//! [`fused_wgmma`]: super::fused_wgmma
//! [`fused_fma`]: super::fused_fma
//! [`fused_stream`]: super::fused_stream
//! [`fused_tile`]: super::fused_tile
//! [`fused_reduce`]: super::fused_reduce

use super::expert_activation::ExpertActivation;
use super::fused_fma::Fma;
use super::fused_stream::Stream;
use super::fused_tile::Tile;
use super::pairs::Pairs;
use cuda_std::{Float, Global, GlobalMut, bf16, dependent_launch, entries, f16, thread};

/// `layout`: the second product, or a first one without values.
pub const PLAIN: u32 = 0;
/// `layout`: all gates before all values.
pub const HALVES: u32 = 1;
/// `layout`: gates and values alternate, gate first.
pub const INTERLEAVED: u32 = 2;

/// Weights `[experts, rows, k]` and biases `[experts, rows]` of a product.
#[derive(Clone, Copy)]
pub struct Weights<T> {
    weights: Global<T>,
    bias: Global<T>,
    biased: bool,
}

impl<T: Float> Weights<T> {
    #[inline(always)]
    pub(super) fn new(weights: *const T, bias: *const T) -> Self {
        Self { weights: Global::new(weights), bias: Global::new(bias), biased: !bias.is_null() }
    }

    /// One or the other, word by word: a choice between structs would be one between addresses, in local memory.
    #[inline(always)]
    pub(super) fn choose(first: bool, a: Self, b: Self) -> Self {
        Self {
            weights: if first { a.weights } else { b.weights },
            bias: if first { a.bias } else { b.bias },
            biased: if first { a.biased } else { b.biased },
        }
    }

    /// Those of one expert, which has `rows` rows of `k` elements.
    #[inline(always)]
    pub(super) fn expert(self, index: u32, rows: u32, k: u32) -> Expert<T> {
        let row = index as usize * rows as usize;
        Expert { weights: self.weights.offset(row * k as usize), bias: self.bias.offset(row), biased: self.biased }
    }
}

/// One expert's part of [`Weights`].
#[derive(Clone, Copy)]
pub struct Expert<T> {
    /// `[rows, k]`.
    pub weights: Global<T>,
    bias: Global<T>,
    biased: bool,
}

impl<T: Float> Expert<T> {
    #[inline(always)]
    #[track_caller]
    pub(super) unsafe fn bias(self, row: u32) -> f32 {
        if self.biased { self.bias.get(row).to_f32() } else { 0.0 }
    }
}

/// The arguments of a product; see [`Args`].
#[derive(Clone, Copy)]
#[allow(missing_docs)]
pub struct Fused<T> {
    pub h: GlobalMut<T>,
    pub partial: GlobalMut<f32>,
    pub x: Global<T>,
    pub x_row: usize,
    pub routed: Weights<T>,
    pub shared: Weights<T>,
    pub topk_weights: Global<f32>,
    pub pairs: Pairs,
    pub sorted: bool,
    pub sorted_ids: Global<i32>,
    pub expert_ids: Global<i32>,
    /// How many tokens exist, or null; see [`existing_tokens`](super::pairs::existing_tokens).
    pub num_tokens: *const i32,
    pub tokens: u32,
    pub n: u32,
    pub k: u32,
    pub layout: u32,
    pub activation: ExpertActivation,
    pub split_log2: u32,
}

impl<T: Float> Fused<T> {
    /// Whether outputs have a gate and a value.
    #[inline(always)]
    pub fn gated(&self) -> bool {
        self.layout != PLAIN
    }

    /// The row of weights of an output: its gate, or its value if `up`.
    #[inline(always)]
    pub fn weight_row(&self, output: u32, up: bool) -> u32 {
        match self.layout {
            PLAIN => output,
            HALVES => output + if up { self.n } else { 0 },
            _ => 2 * output + up as u32,
        }
    }

    /// The weights of an expert of this device.
    #[inline(always)]
    pub fn expert(&self, bin: u32) -> Expert<T> {
        let (from, index) =
            if bin < self.pairs.local { (self.routed, bin) } else { (self.shared, bin - self.pairs.local) };
        from.expert(index, if self.gated() { 2 * self.n } else { self.n }, self.k)
    }

    /// Where the operand of a pair starts: in `x` for the first product, in `h` for the second.
    #[inline(always)]
    pub fn operand<const UP: bool>(&self, pair: u32) -> usize {
        if UP { (pair / self.pairs.slots.max(1)) as usize * self.x_row } else { pair as usize * self.k as usize }
    }

    /// Finishes an output of the first product.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn store_up(&self, expert: Expert<T>, pair: u32, output: u32, gate: f32, up: f32) {
        let gate = gate + expert.bias(self.weight_row(output, false));
        let v = if self.gated() {
            self.activation.gated(gate, up + expert.bias(self.weight_row(output, true)))
        } else {
            self.activation.apply(gate)
        };
        self.h.set(pair as usize * self.n as usize + output as usize, T::from_f32(v));
    }

    /// Finishes an output of the second product.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn store_down(&self, expert: Expert<T>, pair: u32, output: u32, sum: f32) {
        let v = (sum + expert.bias(output)) * self.pair_weight(pair);
        self.partial.set(pair as usize * self.n as usize + output as usize, v);
    }

    /// The weight of a pair; 1 for shared experts that the tokens do not list.
    #[inline(always)]
    #[track_caller]
    unsafe fn pair_weight(&self, pair: u32) -> f32 {
        let Pairs { slots, top_k, .. } = self.pairs;
        let (token, slot) = (pair / slots.max(1), pair % slots.max(1));
        if slot < top_k { self.topk_weights.get(token as usize * top_k as usize + slot as usize) } else { 1.0 }
    }

    /// A pair of block `block` of the sorted list, whose blocks have `size` pairs; `None` for padding.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn sorted_pair(&self, block: u32, size: u32, i: u32) -> Option<u32> {
        let pair = self.sorted_ids.get(block as usize * size as usize + i as usize) as u32;
        (pair < self.tokens * self.pairs.slots).then_some(pair)
    }
}

/// A path: how the two products are computed.
pub trait Kernel<T> {
    /// One of them.
    unsafe fn run(a: Fused<T>);
}

/// Any product of any path; see [`Args`].
#[inline(always)]
unsafe fn run<T: Float, K: Kernel<T>>(
    h: *mut T,
    partial: *mut f32,
    x: *const T,
    x_row: usize,
    weights: *const T,
    bias: *const T,
    shared_weights: *const T,
    shared_bias: *const T,
    topk_ids: *const i32,
    topk_weights: *const f32,
    expert_map: *const i32,
    num_tokens: *const i32,
    sorted_ids: *const i32,
    expert_ids: *const i32,
    tokens: u32,
    top_k: u32,
    slots: u32,
    experts: u32,
    local: u32,
    shared_experts: u32,
    n: u32,
    k: u32,
    layout: u32,
    activation: u32,
    alpha: f32,
    limit: f32,
    split_log2: u32,
) {
    K::run(Fused {
        h: GlobalMut::new(h),
        partial: GlobalMut::new(partial),
        x: Global::new(x),
        x_row,
        routed: Weights::new(weights, bias),
        shared: Weights::new(shared_weights, shared_bias),
        topk_weights: Global::new(topk_weights),
        pairs: Pairs {
            topk_ids: Global::new(topk_ids),
            expert_map: Global::new(expert_map),
            mapped: !expert_map.is_null(),
            top_k,
            slots,
            experts,
            local,
            shared: shared_experts,
        },
        sorted: !sorted_ids.is_null(),
        sorted_ids: Global::new(sorted_ids),
        expert_ids: Global::new(expert_ids),
        num_tokens,
        tokens,
        n,
        k,
        layout,
        activation: ExpertActivation { kind: activation, alpha, limit },
        split_log2,
    });
}

/// The tile of outputs of this block, and its block of pairs.
#[inline(always)]
pub fn tile() -> (u32, u32) {
    (thread::block_idx_x(), thread::block_idx_y())
}

/// The end of a block without pairs. Of the second product all wait, for those that come next take its end for that of all launches before it,
/// which is so only if something of it has waited: without any pair nothing else would.
#[inline(always)]
pub(super) fn nothing_to_do<const UP: bool>() {
    if !UP {
        dependent_launch::wait();
    }
}

entries! {
    /// Arguments of both products of every path.
    pub struct Args<T>(
        /// `[tokens * slots, intermediate]`: written by the first product, read by the second.
        h: *mut T,
        /// `[tokens * slots, hidden]`: written by the second product.
        partial: *mut f32,
        /// `[tokens, hidden]`, rows `x_row` apart.
        x: *const T, x_row: usize,
        /// `[local, rows, k]`: rows of the outputs for [`PLAIN`] layout, otherwise twice as many.
        weights: *const T,
        /// `[local, rows]` or null.
        bias: *const T,
        /// `[shared_experts, rows, k]`.
        shared_weights: *const T,
        /// `[shared_experts, rows]` or null.
        shared_bias: *const T,
        /// `[tokens, top_k]`; as `topk_weights`.
        topk_ids: *const i32, topk_weights: *const f32,
        /// `[experts]` or null: see [`Pairs`].
        expert_map: *const i32,
        /// `[1]` or null.
        num_tokens: *const i32,
        /// From [`sort`](super::sort), in blocks of the path's size; null for the streaming path without sorting.
        sorted_ids: *const i32, expert_ids: *const i32,
        tokens: u32, top_k: u32, slots: u32, experts: u32, local: u32, shared_experts: u32,
        /// Outputs: the intermediate width for the first product, the hidden one for the second.
        n: u32,
        /// Inner dimension: the other one.
        k: u32,
        /// [`PLAIN`], [`HALVES`] or [`INTERLEAVED`].
        layout: u32,
        /// See [`ExpertActivation`].
        activation: u32, alpha: f32, limit: f32,
        /// The streaming path's split of `k` among warps.
        split_log2: u32,
    );
    moe_fused_fma_up_f32 { type T = f32; } [256, 2] => run::<T, Fma<true>>;
    moe_fused_fma_up_f16 { type T = f16; } [256, 2] => run::<T, Fma<true>>;
    moe_fused_fma_up_bf16 { type T = bf16; } [256, 2] => run::<T, Fma<true>>;
    moe_fused_fma_down_f32 { type T = f32; } [256, 2] => run::<T, Fma<false>>;
    moe_fused_fma_down_f16 { type T = f16; } [256, 2] => run::<T, Fma<false>>;
    moe_fused_fma_down_bf16 { type T = bf16; } [256, 2] => run::<T, Fma<false>>;
    moe_fused_stream_up_t8_f16 { type T = f16; } [256, 3] => run::<T, Stream<true, 1, 4>>;
    moe_fused_stream_up_t8_bf16 { type T = bf16; } [256, 3] => run::<T, Stream<true, 1, 4>>;
    moe_fused_stream_up_t16_f16 { type T = f16; } [256, 2] => run::<T, Stream<true, 2, 4>>;
    moe_fused_stream_up_t16_bf16 { type T = bf16; } [256, 2] => run::<T, Stream<true, 2, 4>>;
    moe_fused_stream_down_t8_f16 { type T = f16; } [256, 3] => run::<T, Stream<false, 1, 4>>;
    moe_fused_stream_down_t8_bf16 { type T = bf16; } [256, 3] => run::<T, Stream<false, 1, 4>>;
    moe_fused_stream_down_t16_f16 { type T = f16; } [256, 2] => run::<T, Stream<false, 2, 4>>;
    moe_fused_stream_down_t16_bf16 { type T = bf16; } [256, 2] => run::<T, Stream<false, 2, 4>>;
    moe_fused_tile_up_t32_f16 { type T = f16; } [256, 2] => run::<T, Tile<true, 2, 4>>;
    moe_fused_tile_up_t32_bf16 { type T = bf16; } [256, 2] => run::<T, Tile<true, 2, 4>>;
    moe_fused_tile_up_t64_f16 { type T = f16; } [256, 2] => run::<T, Tile<true, 4, 4>>;
    moe_fused_tile_up_t64_bf16 { type T = bf16; } [256, 2] => run::<T, Tile<true, 4, 4>>;
    moe_fused_tile_up_t128_f16 { type T = f16; } [256, 1] => run::<T, Tile<true, 8, 3>>;
    moe_fused_tile_up_t128_bf16 { type T = bf16; } [256, 1] => run::<T, Tile<true, 8, 3>>;
    moe_fused_tile_down_t32_f16 { type T = f16; } [256, 2] => run::<T, Tile<false, 2, 4>>;
    moe_fused_tile_down_t32_bf16 { type T = bf16; } [256, 2] => run::<T, Tile<false, 2, 4>>;
    moe_fused_tile_down_t64_f16 { type T = f16; } [256, 2] => run::<T, Tile<false, 4, 4>>;
    moe_fused_tile_down_t64_bf16 { type T = bf16; } [256, 2] => run::<T, Tile<false, 4, 4>>;
    moe_fused_tile_down_t128_f16 { type T = f16; } [256, 1] => run::<T, Tile<false, 8, 3>>;
    moe_fused_tile_down_t128_bf16 { type T = bf16; } [256, 1] => run::<T, Tile<false, 8, 3>>;
}
