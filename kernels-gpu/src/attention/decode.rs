//! Attention of a few query tokens a sequence over a paged KV cache (decode), with split KV.
//!
//! # Work
//! A sequence of `len` keys is cut into chunks whose size depends on `len` alone ([`chunk_shift`]), never on the batch
//! or the grid: so a sequence's result does not depend on what it is batched with. An item is (sequence, chunk, head),
//! where a head is a KV head and up to `8 * TILES` of the query rows that share it; heads run fastest, because
//! neighbouring heads are neighbours in memory. The grid is fixed; block `b` takes items `b`, `b + grid`, …, and finds
//! them by a running prefix sum over the lengths, which live on the device. One captured graph serves every step.
//!
//! # The stream of keys
//! Groups of 16 keys go round the warps of a block. Each warp has a ring of `STAGES` groups in shared memory, filled by
//! its own `cp.async`, so that the loop needs no block barrier. The ring runs ahead over the border of items: while an
//! item is being finished (merge of the warps, partial result), the first groups of the next are on their way,
//! and memory never idles. The page numbers of all groups of an item are read at once, a lane for each, and handed out
//! by shuffles. Rows in shared memory are swizzled by 16-byte pieces, so that `ldmatrix` meets no bank twice.
//!
//! # A group
//! Rows are the narrow side of the tensor-core products, in tiles of 8:
//!
//! * `Sᵀ[16 keys, 8 rows] = K[16 keys, D] · Qᵀ[D, 8 rows]`, K from shared memory by `ldmatrix`, Q held in registers;
//! * softmax over keys, online; a thread's columns of `Sᵀ` and of `Oᵀ` are the same rows, so rescaling needs no shuffle;
//! * `Oᵀ[D, 8 rows] += Vᵀ[D, 16 keys] · Pᵀ[16 keys, 8 rows]`, V transposed on the way by `ldmatrix.trans`, P turned
//!   into an operand by `movmatrix`.
//!
//! 8-bit caches become f16 operands in registers, which is exact. `ldmatrix` then moves pairs of elements, so the
//! dimensions of a step come in another order: Q is loaded in the same order ([`q_dim`]), and the rows of `Oᵀ` are taken
//! apart in it ([`o_dim`]). Query rows of bf16 are scaled by a power of two into the range of f16 first.
//!
//! # The x-split layout
//! Keys come in pieces of 16 bytes, a key after the other, and values key by key for each dimension: vLLM's first layout. A piece of K is
//! then what `ldmatrix` takes as it lies, and V is transposed already. Stages hold both as pieces in that order ([`xsplit_v_piece`]), so a group
//! of a page of 16 is copied from neighbouring addresses to neighbouring addresses. 8-bit values come four keys to a word, hence another
//! order of the keys in a group ([`key_of_row`]). Keys that no query token sees, and that share a piece of values with others, are
//! overwritten with zeros when they are there: at the end of a sequence, and where a window begins.
//!
//! # The end of an item
//! The warps merge in shared memory. If the sequence has one chunk the block writes the output, otherwise a partial
//! result (unnormalised O, maximum, sum), and [`combine`], a launch of its own, merges the chunks in their order. It is
//! launched as a dependent of this one, so it starts at once. A ticket that tells the last block of a sequence to merge
//! would save the launch, but needs a fence for each chunk, and a fence that reaches the whole GPU stops the
//! multiprocessor's stream of copies: it cost a quarter of the bandwidth.
//!
//! Sources: FlashDecoding (Dao et al., 2023); paged attention (Kwon et al., 2023).

use super::{fit_factors, soft_capped};
use crate::kv_cache::CacheElement;
use crate::tensor_float::TensorFloat;
use core::f32::consts::{LN_2, LOG2_E};
use cuda_std::vec::{self, B32, B64, B128, SecondLevel};
use cuda_std::{
    DType, E4M3, E5M2, Global, GlobalMut, bf16, convert, cp_async, dependent_launch, entries, f16, float, integer, mma,
    shared, thread, unroll, warp,
};

/// Warps of a block.
pub const WARPS: usize = 4;
/// Threads of a block.
pub const THREADS: usize = 32 * WARPS;
/// Keys of a group, which is a stage of a warp's ring.
const KEYS: usize = 16;
/// Groups of an item that one warp can have: each half of the lanes holds a page number for each of them.
const MAX_GROUPS: usize = 16;

/// The largest chunk, as a power of two.
pub const MAX_CHUNK_SHIFT: u32 = (MAX_GROUPS * KEYS * WARPS).ilog2();

/// An element of a cache as the tensor cores take it.
pub trait CacheOperand: CacheElement {
    /// What it is multiplied as.
    type Operand: TensorFloat;
    /// Four 8-bit elements as two registers of operands. Those of 16 bits are operands as they are.
    fn operands(word: u32) -> [u32; 2];
}

macro_rules! operands {
    ($($t:ty as $operand:ty = |$w:ident| $widen:expr;)*) => { $(
        impl CacheOperand for $t {
            type Operand = $operand;
            #[inline(always)]
            fn operands($w: u32) -> [u32; 2] {
                $widen
            }
        }
    )* };
}
operands! {
    bf16 as bf16 = |w| [w; 2];
    f16 as f16 = |w| [w; 2];
    E4M3 as f16 = |w| convert::e4m3x4_to_f16x2(w);
    // The upper half of an f16.
    E5M2 as f16 = |w| [integer::permute(w, 0, 0x1404), integer::permute(w, 0, 0x3424)];
    i8 as f16 = |w| convert::i8x4_to_f16x2(w);
}

/// Bytes of a stage: [`KEYS`] rows of K, then of V.
const fn stage_bytes(head_dim: usize, element: usize) -> usize {
    2 * KEYS * head_dim * element
}

/// Floats from row to row of O in shared memory: the padding keeps the rows that a warp stores at once in other banks.
const fn merge_row(head_dim: usize) -> usize {
    head_dim + 4
}

/// Groups of a warp's ring: enough bytes on their way that memory is never waited for. More would only queue up, and what
/// else is loaded would wait at the end of the queue. Heads of 256 elements of 16 bits have instances of one group as well, since many
/// GPUs have no memory for two.
pub const fn stages(head_dim: usize, element: usize) -> usize {
    if head_dim * element >= 256 { 2 } else { 4 }
}

/// Blocks that share a multiprocessor.
pub const fn blocks(head_dim: usize, element: usize) -> u32 {
    if head_dim * element > 256 { 1 } else { 2 }
}

/// Dynamic shared memory of a block of the kernel for heads of up to `head_dim` elements of `element` bytes,
/// for `rows` query rows, with rings of `stages` groups.
pub const fn shared_bytes(head_dim: usize, element: usize, rows: usize, stages: usize) -> usize {
    let rings = stages * stage_bytes(head_dim, element);
    WARPS * (rings + rows * (merge_row(head_dim) + 2) * 4)
}

/// The chunk of a sequence of `len` keys, as a power of two: small enough that one long sequence fills the GPU, large enough
/// that partial results and the ends of items cost little. `hint` overrides it if not 0.
#[inline(always)]
pub const fn chunk_shift(len: u32, hint: u32) -> u32 {
    if hint != 0 {
        hint
    } else if len <= EDGES[0] {
        8
    } else if len <= EDGES[1] {
        9
    } else {
        10
    }
}

/// The longest sequences of the two smaller chunks.
pub(super) const EDGES: [u32; 2] = [2048, 16384];

/// Chunks of a sequence of `len` keys; an empty one has one, which writes zeros.
#[inline(always)]
pub const fn chunks(len: u32, hint: u32) -> u32 {
    let shift = chunk_shift(len, hint);
    let chunks = len.div_ceil(1 << shift);
    if chunks == 0 { 1 } else { chunks }
}

/// The most chunks of any sequence of at most `max_len` keys.
pub const fn max_chunks(max_len: u32, hint: u32) -> u32 {
    let mut most = chunks(max_len, hint);
    let mut i = 0;
    while i < EDGES.len() {
        let edge = if EDGES[i] < max_len { EDGES[i] } else { max_len };
        if chunks(edge, hint) > most {
            most = chunks(edge, hint);
        }
        i += 1;
    }
    most
}

/// Floats of a partial result of `rows` rows of heads of up to `head_dim` elements: O, then maximum and sum of each row.
pub const fn partial_floats(head_dim: usize, rows: usize) -> usize {
    (rows * (head_dim + 2)).next_multiple_of(4)
}

/// The dimension that element `i` of register `half` of Q's operand of step `step` holds, in lanes of `t = lane % 4`.
pub(super) const fn q_dim(element: usize, step: usize, half: usize, t: usize) -> usize {
    16 * step + if element == 2 { 8 * half + 2 * t } else { 4 * t + 2 * half }
}

/// The dimension of rows `g` (`half` 0) and `g + 8` (1) of tile `step` of Oᵀ.
pub(super) const fn o_dim(element: usize, step: usize, half: usize, g: usize) -> usize {
    16 * step + if element == 2 { 8 * half + g } else { 2 * g + half }
}

/// The key that row `row` of a group's scores is of: over x-split caches of 8 bits those that a word of values has in their order.
const fn key_of_row(row: u32, by_fours: bool) -> u32 {
    if by_fours { row % 8 / 2 * 4 + row / 8 * 2 + row % 2 } else { row }
}

/// Where the piece of a dimension and of eight keys (`half` 0: the first, 1: the others) of 16-bit values lies in a stage of the x-split
/// layout: those of a dimension side by side, as they come, in such an order that eight dimensions of one half meet in no bank.
const fn xsplit_v_piece(d: u32, half: u32) -> u32 {
    2 * d + (half ^ (d / 4 % 2))
}

/// Which 16-byte piece of a row of `pieces` of them lies where piece 0 would: to be combined by exclusive or.
const fn swizzle(pieces: usize, row: usize) -> usize {
    if pieces >= 8 { row % 8 } else { row / 2 % 4 }
}

/// Where a work item lies.
#[derive(Clone, Copy)]
pub(super) struct Item {
    pub(super) sequence: u32,
    pub(super) len: u32,
    pub(super) chunk: u32,
    /// Its number among the chunks that the sliding window leaves.
    pub(super) part: u32,
    /// Whether it is the sequence's only item.
    pub(super) whole: bool,
    pub(super) head: u32,
}

/// Maps ascending item numbers to items, by a running prefix sum over the sequences: each lane holds one of 32. Without
/// `ROOM` for it, what takes a register is computed again.
pub(super) struct Cursor<const ROOM: bool> {
    /// First of the 32 sequences.
    base: u32,
    /// Items before `base`.
    before: u32,
    /// Keys of this lane's sequence, and of its one of the next 32: a load that nobody waits for.
    len: u32,
    next_len: u32,
    /// Items of the 32 sequences up to this lane's last one.
    sum: u32,
    /// [`Lengths::visible_chunks`] of this lane's sequence.
    visible: (u32, u32),
}

/// The first key that any query token of a sequence sees.
#[inline(always)]
pub(super) fn first_visible(len: u32, q_len: u32, window: u32) -> u32 {
    // The first query token sees furthest back: keys from `len - q_len + 1 - window` on.
    if window == 0 { 0 } else { (len + 1).saturating_sub(q_len + window) }
}

/// What a [`Cursor`] needs to know about the launch.
#[derive(Clone, Copy)]
pub(super) struct Lengths {
    pub(super) lens: Global<i32>,
    pub(super) max_len: u32,
    pub(super) batch: u32,
    pub(super) q_len: u32,
    pub(super) heads: u32,
    pub(super) window: u32,
    pub(super) hint: u32,
}

impl Lengths {
    /// The keys of a sequence; 0 beyond the last.
    #[inline(always)]
    pub(super) unsafe fn get(self, sequence: u32) -> u32 {
        if sequence < self.batch { self.lens.get(sequence).max(0) as u32 } else { 0 }
    }

    /// Of a sequence of `len` keys: the first chunk that the sliding window leaves, and how many it leaves.
    #[inline(always)]
    pub(super) fn visible_chunks(self, len: u32) -> (u32, u32) {
        let first = first_visible(len, self.q_len, self.window) >> chunk_shift(len, self.hint);
        (first, chunks(len, self.hint) - first)
    }
}

impl<const ROOM: bool> Cursor<ROOM> {
    #[inline(always)]
    pub(super) unsafe fn new(lengths: Lengths) -> Self {
        let lane = warp::lane_id();
        let (len, next_len) = (lengths.get(lane), lengths.get(32 + lane));
        let mut cursor = Self { base: 0, before: 0, len, next_len, sum: 0, visible: (0, 0) };
        cursor.count(lengths);
        cursor
    }

    /// Counts the items of the 32 sequences.
    #[inline(always)]
    unsafe fn count(&mut self, lengths: Lengths) {
        self.len = self.len.min(lengths.max_len);
        self.visible = lengths.visible_chunks(self.len);
        self.sum = if self.base + warp::lane_id() < lengths.batch { self.visible.1 * lengths.heads } else { 0 };
        unroll::<5>(|i| {
            let (below, ok) = warp::warp_shuffle_up(warp::FULL, self.sum, 1 << i, 32);
            self.sum += if ok { below } else { 0 };
        });
    }

    /// The item of number `index`, which is not below that of the call before; `None` beyond the last. For whole warps.
    #[inline(always)]
    pub(super) unsafe fn find(&mut self, lengths: Lengths, index: u32) -> Option<Item> {
        while self.base < lengths.batch {
            let found = warp::warp_vote_ballot(warp::FULL, index < self.before + self.sum);
            if found != 0 {
                let owner = found.trailing_zeros();
                let heads = lengths.heads;
                core::hint::assert_unchecked(heads != 0);
                let len = warp::shfl_idx(self.len, owner);
                let (first_chunk, chunks) = if ROOM {
                    (warp::shfl_idx(self.visible.0, owner), warp::shfl_idx(self.visible.1, owner))
                } else {
                    lengths.visible_chunks(len)
                };
                let within = index - (self.before + warp::shfl_idx(self.sum, owner) - chunks * heads);
                return Some(Item {
                    sequence: self.base + owner,
                    len,
                    chunk: first_chunk + within / heads,
                    part: within / heads,
                    whole: chunks == 1,
                    head: within % heads,
                });
            }
            self.before += warp::shfl_idx(self.sum, 31);
            self.base += 32;
            self.len = self.next_len;
            self.next_len = lengths.get(self.base + 32 + warp::lane_id());
            self.count(lengths);
        }
        None
    }
}

/// Waits until at most `in_ring - 1` of the latest groups of copies are under way: the oldest has landed.
#[inline(always)]
fn wait_for_oldest<const STAGES: usize>(in_ring: u32) {
    if in_ring as usize >= STAGES {
        match STAGES {
            1 => cp_async::wait_group::<0>(),
            2 => cp_async::wait_group::<1>(),
            3 => cp_async::wait_group::<2>(),
            _ => cp_async::wait_group::<3>(),
        }
    } else if in_ring >= 2 {
        cp_async::wait_group::<1>();
    } else {
        cp_async::wait_group::<0>();
    }
}

/// Attention of `q_len` query tokens a sequence over its paged keys and values.
///
/// * `q`: `[batch, q_len, q_heads, head_dim]` with strides `q_token`, `q_head`; `out` likewise with `out_token`, `out_head`.
/// * `q`'s vectors start at multiples of 4 bytes, `out`'s at multiples of 8, and `head_dim` is a multiple of 8.
/// * `k`, `v`: pages of `1 << page_shift` tokens, at least 8; a token's vector is dense, starts at a multiple of 16 bytes
///   and has a multiple of 16 bytes. `k_scales`, `v_scales`: null, or `[kv_heads]` if `scale_per_head` is 1, or `[1]`.
///   `XSPLIT`: a page of a head is `[pieces, page, 16 bytes]` of keys and `[head_dim, page]` of values, with `k_slot` elements from piece to
///   piece and `v_slot` from dimension to dimension, multiples of 16 bytes all; a page has at least 16 bytes of a dimension.
/// * `block_table`: `[batch, max_pages]`; `lens`: `[batch]`, keys of each sequence, the query tokens'
///   among them; more than `max_pages` hold count as what they hold.
/// * `lse`: `[batch, q_len, q_heads]` or null; `alibi`, `sinks`: `[q_heads]` or null.
/// * `partial`: workspace of [`partial_floats`] for each of `partial_chunks` chunks of each head of each sequence, aligned
///   to 16 bytes. Sequences of more than one chunk leave their results there for [`combine`].
/// * `window`: keys that a query token sees, 0 for all, at most 2^31 - 1; `soft_cap`: 0 for none; `hint`: for [`chunk_shift`].
///
/// `D` is `head_dim` rounded up to an instance; each KV head is served as `ceil(rows / (8 * TILES))` heads. `ROOM`: whether
/// there are registers for Q of the next item. `STAGES` changes no result.
/// Block: [`THREADS`]; any grid; shared memory: [`shared_bytes`].
#[inline(always)]
pub unsafe fn decode<
    T: TensorFloat,
    C: CacheOperand,
    const D: usize,
    const TILES: usize,
    const STAGES: usize,
    const ROOM: bool,
    const XSPLIT: bool,
>(
    out: *mut T,
    lse: *mut f32,
    q: *const T,
    k: *const C,
    v: *const C,
    block_table: *const i32,
    lens: *const i32,
    alibi: *const f32,
    sinks: *const f32,
    k_scales: *const f32,
    v_scales: *const f32,
    partial: *mut f32,
    scale_per_head: u32,
    batch: u32,
    q_len: u32,
    q_heads: u32,
    kv_heads: u32,
    head_dim: u32,
    page_shift: u32,
    max_pages: u32,
    pages: u32,
    partial_chunks: u32,
    hint: u32,
    q_token: usize,
    q_head: usize,
    out_token: usize,
    out_head: usize,
    k_page: usize,
    k_slot: usize,
    k_head: usize,
    v_page: usize,
    v_slot: usize,
    v_head: usize,
    scale: f32,
    soft_cap: f32,
    window: u32,
) {
    let element = const { size_of::<C>() };
    let row_bytes = const { D * size_of::<C>() };
    let pieces = const { D * size_of::<C>() / 16 };
    let rows_at_once = const { 32 / (D * size_of::<C>() / 16) };
    let stage_bytes = const { stage_bytes(D, size_of::<C>()) };
    let block_rows = const { 8 * TILES as u32 };
    let chains = const { if TILES == 1 { 2 } else { 1 } };
    let by_fours = const { XSPLIT && size_of::<C>() == 1 };
    // What the rows of Oᵀ are, and of a copy of V: its keys.
    let o_order = const { if XSPLIT { 2 } else { size_of::<C>() } };
    let v_keys = const { 16 / size_of::<C>() as u32 };
    // Whether Q must be converted to be multiplied.
    let converts = const { !matches!((T::DTYPE, C::DTYPE), (DType::Bf16, DType::Bf16) | (DType::F16, _)) };

    core::hint::assert_unchecked(kv_heads != 0 && head_dim != 0);
    let group = q_heads / kv_heads;
    core::hint::assert_unchecked(group != 0);
    let all_rows = group * q_len;
    let row_blocks = all_rows.div_ceil(block_rows);
    core::hint::assert_unchecked(row_blocks != 0);
    let slot_rows = all_rows.min(block_rows);
    let heads = kv_heads * row_blocks;

    let (q, lens, table) = (Global::new(q), Global::new(lens), Global::new(block_table));
    let (k, v) = (Global::new(k), Global::new(v));
    let (has_alibi, has_sinks, has_lse) = (!alibi.is_null(), !sinks.is_null(), !lse.is_null());
    let (has_k_scale, has_v_scale) = (!k_scales.is_null(), !v_scales.is_null());
    let (alibi, sinks) = (Global::new(alibi), Global::new(sinks));
    let (k_scales, v_scales) = (Global::new(k_scales), Global::new(v_scales));
    let (out, lse) = (GlobalMut::new(out), GlobalMut::new(lse));
    let partial = GlobalMut::new(partial);

    let (tid, lane) = (thread::thread_idx_x(), warp::lane_id());
    let warp_id = warp::shfl_idx(tid / 32, 0);
    let (g, t) = (lane / 4, lane % 4);

    let mut carver = shared::Carver::new();
    let rings = carver.take_aligned::<u8>(WARPS * STAGES * stage_bytes, 1024);
    let merge_row = const { merge_row(D) } as u32;
    let merge = carver.take::<f32>(WARPS * slot_rows as usize * merge_row as usize);
    let stats = carver.take::<f32>(WARPS * slot_rows as usize * 2);
    let ring = rings.address(warp_id as usize * (STAGES * stage_bytes));
    let ring_end = ring + (STAGES * stage_bytes) as u32;

    // Copies: lanes cover `rows_at_once` rows of 16-byte pieces.
    let (piece, row_of_lane) = (lane % pieces as u32, lane / pieces as u32);
    let in_head = piece * 16 < head_dim * element as u32;
    let piece_at = if in_head { piece as usize * (16 / element) } else { 0 };
    let copy_to = row_of_lane * row_bytes as u32;
    let copy_piece = piece ^ swizzle(pieces, row_of_lane as usize) as u32;
    let slot_mask = (1u32 << page_shift) - 1;

    // Operands: where this lane's rows of K and V lie in a stage, and the piece of step 0.
    let k_row = lane % 16;
    let k_piece = (lane / 16) ^ swizzle(pieces, k_row as usize) as u32;
    let (v_row, v_piece) = if element == 2 { (lane % 8 + lane / 16 * 8, lane / 8 % 2) } else { (lane % 16, lane / 16) };
    let v_piece = v_piece ^ swizzle(pieces, v_row as usize) as u32;
    let (k_from, v_from) = (k_row * row_bytes as u32, (v_row + KEYS as u32) * row_bytes as u32);
    // Of step `s`: the exclusive or changes three bits only, so four sums serve all steps.
    let operand_at =
        |from: u32, piece: u32, s: usize| from + (piece ^ (2 * (s % 4) as u32)) * 16 + (s / 4 * 128) as u32;
    // x-split: pieces of all keys, or of 16 or 32 dimensions, lie beside one another.
    let k_operand = |s: usize| {
        if XSPLIT { lane * 16 + (s * 2 * KEYS * 16) as u32 } else { operand_at(k_from, k_piece, s) }
    };
    let v_operand = |s: usize| {
        let piece = if element == 2 { xsplit_v_piece(lane % 16, lane / 16) } else { lane };
        (KEYS * row_bytes) as u32 + piece * 16 + (s * 2 * KEYS * 16) as u32
    };

    // From here on `combine` may be launched; it waits for this one to end.
    dependent_launch::begin();
    if tid == 0 {
        // What is needed soon: the first access to a page of memory takes long.
        vec::prefetch_l2(table.ptr(0usize));
        vec::prefetch_l2(q.ptr(0usize));
        vec::prefetch_l2(k.ptr(0usize));
        vec::prefetch_l2(v.ptr(0usize));
        vec::prefetch_l2(partial.ptr(0usize));
        vec::prefetch_l2(out.ptr(0usize));
    }
    let max_len = max_pages << page_shift;
    let lengths = Lengths { lens, max_len, batch, q_len, heads, window, hint };
    let mut cursor = Cursor::<ROOM>::new(lengths);
    let mut index = thread::block_idx_x();

    // Items come into view one after another, so that no load is waited for: first the next one's page numbers are read,
    // then its Q and its keys, then it is computed.
    let nothing = Item { sequence: 0, len: 0, chunk: 0, part: 0, whole: true, head: 0 };
    // The first key of an item that somebody sees, and this warp's groups. The first group starts at the multiple of 16 keys before it.
    let group_start = |first: u32| first & !(KEYS as u32 - 1);
    let extent = |item: Item| {
        let shift = chunk_shift(item.len, hint);
        let first = (item.chunk << shift).max(first_visible(item.len, q_len, window));
        let start = group_start(first);
        let groups = ((item.chunk + 1) << shift).min(item.len).saturating_sub(start).div_ceil(KEYS as u32);
        (first, (groups + (WARPS as u32 - 1) - warp_id) / WARPS as u32)
    };
    // Page numbers of an item: of the first 8 keys of this warp's groups in the lower lanes, of the others in the upper ones.
    // A page has 8 keys or more. Keys that are not seen have no page.
    let page_numbers = |item: Item| {
        let (first, own) = extent(item);
        let group = lane % MAX_GROUPS as u32;
        let key = group_start(first) + (group * WARPS as u32 + warp_id) * KEYS as u32 + lane / 16 * 8;
        let wanted = group < own && key < item.len && key + 8 > first_visible(item.len, q_len, window);
        let table = table.offset(item.sequence as usize * max_pages as usize);
        if wanted { table.get(key >> page_shift) as u32 } else { u32::MAX }
    };
    // Q of an item as the B operand, whatever lies beyond the rows or the head included.
    let load_q = |item: Item, qf: &mut [[[u32; 2]; 16]; TILES]| {
        let kv_head = item.head / row_blocks;
        let first_row = (item.head - kv_head * row_blocks) * block_rows;
        let q_base = item.sequence as usize * q_len as usize * q_token;
        unroll::<TILES>(|tile| {
            let r = first_row + tile as u32 * 8 + g;
            let inside = if r < all_rows { r } else { first_row };
            let token = inside / group;
            let head = kv_head * group + (inside - token * group);
            let at = q_base + token as usize * q_token + head as usize * q_head;
            for s in 0..D / 16 {
                unroll::<2>(|half| {
                    let d = q_dim(element, s, half, t as usize);
                    let B32([word]) = q.get_as::<B32<u32, 1>>(at + if d < head_dim as usize { d } else { 0 });
                    qf[tile][s][half] = word;
                });
            }
        });
    };

    // The item after the one that copies are issued for.
    let (mut coming, mut coming_pages, mut has_coming) = (nothing, u32::MAX, false);
    if let Some(first) = cursor.find(lengths, index) {
        (coming, coming_pages, has_coming) = (first, page_numbers(first), true);
    }
    // The item that copies are issued for: the computed one or the next.
    let mut ahead = nothing;
    let (mut ahead_first, mut ahead_own, mut ahead_issued, mut ahead_pages) = (0u32, 0u32, 0u32, u32::MAX);
    let (mut ahead_k, mut ahead_v) = (0usize, 0usize);
    let mut is_ahead = false;
    let mut q_ahead = [[[0u32; 2]; 16]; TILES];
    // Groups in the ring, and where the next goes in and out.
    let (mut in_ring, mut slot_in, mut slot_out) = (0u32, ring, ring);

    // The item that is computed; none at first.
    let mut item = nothing;
    let (mut start, mut own, mut item_pages) = (0u32, 0u32, u32::MAX);
    let mut valid = false;
    let mut qf = [[[0u32; 2]; 16]; TILES];
    let mut factor = [[0f32; 2]; TILES];
    let mut k_scale = 1f32;
    let mut limits = [[0u32; 2]; TILES];

    loop {
        let mut o = [[[0f32; 4]; TILES]; 16];
        let mut m = [[f32::NEG_INFINITY; 2]; TILES];
        let mut l = [[0f32; 2]; TILES];
        let kv_head = item.head / row_blocks;
        let first_row = (item.head - kv_head * row_blocks) * block_rows;
        let slope = |tile: usize, c: usize| {
            let r = first_row + tile as u32 * 8 + 2 * t + c as u32;
            if has_alibi && r < all_rows { alibi.get(kv_head * group + r % group) * LOG2_E } else { 0.0 }
        };

        let mut i = 0;
        loop {
            // Fill the ring, into the next item if need be, but no further.
            while in_ring < STAGES as u32 {
                if ahead_issued == ahead_own {
                    if is_ahead || !has_coming {
                        break;
                    }
                    is_ahead = true;
                    (ahead, ahead_pages, ahead_issued) = (coming, coming_pages, 0);
                    (ahead_first, ahead_own) = extent(ahead);
                    let kv_head = ahead.head / row_blocks;
                    ahead_k = kv_head as usize * k_head + if XSPLIT { 0 } else { piece_at };
                    ahead_v = kv_head as usize * v_head + if XSPLIT { 0 } else { piece_at };
                    if ROOM {
                        load_q(ahead, &mut q_ahead);
                    }
                    index += thread::grid_dim_x();
                    has_coming = false;
                    if let Some(next) = cursor.find(lengths, index) {
                        (coming, coming_pages, has_coming) = (next, page_numbers(next), true);
                    }
                }
                if ahead_issued < ahead_own {
                    let key = group_start(ahead_first) + (ahead_issued * WARPS as u32 + warp_id) * KEYS as u32;
                    if XSPLIT {
                        // Computed anew for each group: kept, it would cost more registers than there are.
                        let lane = integer::opaque(lane);
                        let page_of = |half: u32| warp::shfl_idx(ahead_pages, ahead_issued + 16 * half);
                        // A wrong number must not become a wrong address: it counts as unseen.
                        let place = |number: u32| if number < pages { number as usize } else { 0 };

                        // Pieces of one key, two apart.
                        let (own_key, piece) = (key_of_row(lane % KEYS as u32, by_fours), lane / KEYS as u32);
                        let page = page_of(own_key / 8);
                        let there = (key + own_key).wrapping_sub(ahead_first) < ahead.len - ahead_first;
                        let bytes = if page < pages && there { 16 } else { 0 };
                        let slot = ((key + own_key) & slot_mask) as usize;
                        let in_page = piece as usize * k_slot + slot * const { 16 / size_of::<C>() };
                        let (mut from, to) = (place(page) * k_page + ahead_k + in_page, slot_in + lane * 16);
                        for step in 0..pieces / 2 {
                            let in_head = (piece + 2 * step as u32) * 16 < head_dim * element as u32;
                            let bytes = if in_head { bytes } else { 0 };
                            cp_async::copy_16_zfill(to + 512 * step as u32, k.ptr(from), bytes);
                            from += 2 * k_slot;
                        }

                        // Some keys of dimensions that are `dims` apart. Of a page with half a group that nobody sees one half has the
                        // number.
                        let (half, dim, dims) = if element == 2 { (lane % 2, lane / 2, 16u32) } else { (0, lane, 32) };
                        let page = if by_fours { page_of(0).min(page_of(1)) } else { page_of(half) };
                        let bytes = if page < pages { 16 } else { 0 };
                        let in_page = dim as usize * v_slot + ((key + 8 * half) & slot_mask) as usize;
                        let mut from = place(page) * v_page + ahead_v + in_page;
                        let to_piece = if element == 2 { xsplit_v_piece(dim, half) } else { dim };
                        let to = slot_in + const { KEYS * D * size_of::<C>() } as u32 + to_piece * 16;
                        for step in 0..pieces / 2 {
                            let bytes = if dim + dims * (step as u32) < head_dim { bytes } else { 0 };
                            cp_async::copy_16_zfill(to + 512 * step as u32, v.ptr(from), bytes);
                            from += dims as usize * v_slot;
                        }
                    } else {
                        // Keys before the first that somebody sees and behind the last may hold anything, and NaN times 0 is NaN. The
                        // former wrap around.
                        let (row, rows) = ((key + row_of_lane).wrapping_sub(ahead_first), ahead.len - ahead_first);
                        // Where each half's row of this lane starts; a wrong page reads nothing.
                        let mut readable = [false; 2];
                        let (mut k_at, mut v_at) = ([0usize; 2], [0usize; 2]);
                        unroll::<2>(|h| {
                            let page = warp::shfl_idx(ahead_pages, ahead_issued + 16 * h as u32);
                            // A wrong number must not become a wrong address: it counts as unseen.
                            readable[h] = page < pages && in_head;
                            let page = if page < pages { page as usize } else { 0 };
                            let slot = ((key + 8 * h as u32) & slot_mask) as usize + row_of_lane as usize;
                            k_at[h] = page * k_page + slot * k_slot + ahead_k;
                            v_at[h] = page * v_page + slot * v_slot + ahead_v;
                        });
                        let (mut k_from, mut v_from) = (0, 0);
                        for step in 0..KEYS / rows_at_once {
                            let h = step * rows_at_once / 8;
                            (k_from, v_from) = if (step * rows_at_once).is_multiple_of(8) {
                                (k_at[h], v_at[h])
                            } else {
                                (k_from + rows_at_once * k_slot, v_from + rows_at_once * v_slot)
                            };
                            let readable = readable[h] && row.wrapping_add((step * rows_at_once) as u32) < rows;
                            let bytes = if readable { 16 } else { 0 };
                            let to = slot_in
                                + copy_to
                                + (step * rows_at_once * row_bytes) as u32
                                + (copy_piece ^ swizzle(pieces, step * rows_at_once) as u32) * 16;
                            cp_async::copy_16_zfill(to, k.ptr(k_from), bytes);
                            cp_async::copy_16_zfill(to + (KEYS * row_bytes) as u32, v.ptr(v_from), bytes);
                        }
                    }
                    cp_async::commit_group();
                    ahead_issued += 1;
                    in_ring += 1;
                    slot_in += stage_bytes as u32;
                    slot_in = if slot_in == ring_end { ring } else { slot_in };
                }
            }
            if i == own {
                break;
            }
            wait_for_oldest::<STAGES>(in_ring);
            warp::sync_warp(warp::FULL);
            let first_key = start + (i * WARPS as u32 + warp_id) * KEYS as u32;
            // Values before the first key that somebody sees and behind the last, which their copies have brought.
            if XSPLIT && ((window != 0 && i == 0 && warp_id == 0) || first_key + KEYS as u32 > item.len) {
                let (first, _) = extent(item);
                let (before, there) = (first.saturating_sub(first_key), item.len.saturating_sub(first_key));
                let mut piece = lane;
                while piece < const { D as u32 * size_of::<C>() as u32 } {
                    let at = rings
                        .offset((slot_out - rings.address(0u32) + (KEYS * row_bytes) as u32 + piece * 16) as usize);
                    let half = if element == 2 { (piece % 2) ^ (piece / 8 % 2) } else { 0 };
                    let bits =
                        |keys: u32| keys.saturating_sub(8 * half).min(v_keys) * const { 8 * size_of::<C>() as u32 };
                    keep_bits(at, bits(before), bits(there));
                    piece += 32;
                }
                warp::sync_warp(warp::FULL);
            }

            // One tile has two chains of products, so that one does not wait for the other.
            let mut s = [[[0f32; 4]; 2]; TILES];
            if element == 2 {
                for step in 0..D / 16 {
                    let a = mma::ldmatrix_x4(slot_out + k_operand(step));
                    unroll::<TILES>(|tile| {
                        s[tile][step % chains] = <C::Operand>::mma(a, qf[tile][step], s[tile][step % chains])
                    });
                }
            } else {
                for step in 0..D / 32 {
                    let w = mma::ldmatrix_x4(slot_out + k_operand(step));
                    unroll::<2>(|half| {
                        let (low, high) = (C::operands(w[2 * half]), C::operands(w[2 * half + 1]));
                        let a = [low[0], high[0], low[1], high[1]];
                        unroll::<TILES>(|tile| {
                            let chain = half % chains;
                            s[tile][chain] = <C::Operand>::mma(a, qf[tile][2 * step + half], s[tile][chain])
                        });
                    });
                }
            }

            let page_there = [warp::shfl_idx(item_pages, i) < pages, warp::shfl_idx(item_pages, i + 16) < pages];
            // Whether every row sees all keys of the group, and nothing bends the scores.
            let clear = page_there[0]
                && page_there[1]
                && first_key + KEYS as u32 + q_len <= item.len + 1
                && (window == 0 || first_key + window >= item.len)
                && !has_alibi
                && soft_cap == 0.0;
            let mut p = [[0u32; 2]; TILES];
            unroll::<TILES>(|tile| {
                let mut x = [0f32; 4];
                unroll::<4>(|e| {
                    let sum = if chains == 1 { s[tile][0][e] } else { s[tile][0][e] + s[tile][1][e] };
                    x[e] = sum * if converts { factor[tile][e % 2] } else { scale * k_scale };
                });
                if clear {
                    unroll::<4>(|e| x[e] *= LOG2_E);
                } else {
                    unroll::<4>(|e| {
                        let (c, row) = (e % 2, g + 8 * (e as u32 / 2));
                        let key = first_key + if by_fours { key_of_row(row, true) } else { row };
                        // By fours both halves are of one page, and of half a group that nobody sees no key is seen below.
                        let page_there = if by_fours { page_there[0] || page_there[1] } else { page_there[e / 2] };
                        let score = soft_capped(x[e], soft_cap);
                        let position = limits[tile][c];
                        let seen = page_there && key < position && (window == 0 || key + window >= position);
                        // The slope is read again each time: it is seldom used and would cost registers.
                        let distance = (key as i32 + 1 - position as i32) as f32;
                        let bias = if has_alibi { slope(tile, c) * distance } else { 0.0 };
                        x[e] = if seen { score * LOG2_E + bias } else { f32::NEG_INFINITY };
                    });
                }
                let mut rescale = [0f32; 2];
                unroll::<2>(|c| {
                    let mut top = float::max(x[c], x[c + 2]);
                    unroll::<3>(|i| top = float::max(top, warp::shfl_xor(top, 4 << i)));
                    let new = float::max(m[tile][c], top);
                    // Nothing seen yet: any finite reference will do.
                    let reference = if new == f32::NEG_INFINITY { 0.0 } else { new };
                    rescale[c] = float::fast::exp2(m[tile][c] - reference);
                    m[tile][c] = new;
                    x[c] = float::fast::exp2(x[c] - reference);
                    x[c + 2] = float::fast::exp2(x[c + 2] - reference);
                    l[tile][c] = float::fma(l[tile][c], rescale[c], x[c] + x[c + 2]);
                });
                p[tile] = [
                    mma::movmatrix_trans(pack::<C::Operand>(x[0], x[1])),
                    mma::movmatrix_trans(pack::<C::Operand>(x[2], x[3])),
                ];
                // Maxima settle soon.
                if warp::warp_vote_any(warp::FULL, rescale[0] != 1.0 || rescale[1] != 1.0) {
                    for step in 0..D / 16 {
                        unroll::<4>(|e| o[step][tile][e] *= rescale[e % 2]);
                    }
                }
            });
            if element == 2 {
                for step in 0..D / 16 {
                    let a = if XSPLIT {
                        mma::ldmatrix_x4(slot_out + v_operand(step))
                    } else {
                        mma::ldmatrix_x4_trans(slot_out + operand_at(v_from, v_piece, step))
                    };
                    unroll::<TILES>(|tile| o[step][tile] = <C::Operand>::mma(a, p[tile], o[step][tile]));
                }
            } else {
                for step in 0..D / 32 {
                    let w = if XSPLIT {
                        mma::ldmatrix_x4(slot_out + v_operand(step))
                    } else {
                        mma::ldmatrix_x4_trans(slot_out + operand_at(v_from, v_piece, step))
                    };
                    unroll::<2>(|half| {
                        let a = if XSPLIT {
                            // Four keys of a dimension in each word.
                            let (low, high) = (C::operands(w[2 * half]), C::operands(w[2 * half + 1]));
                            [low[0], high[0], low[1], high[1]]
                        } else {
                            // Two keys of two dimensions in each word, brought together by dimension.
                            let pairs = |w: u32| C::operands(integer::permute(w, 0, 0x3120));
                            let (low, high) = (pairs(w[2 * half]), pairs(w[2 * half + 1]));
                            [low[0], low[1], high[0], high[1]]
                        };
                        unroll::<TILES>(|tile| {
                            let step = 2 * step + half;
                            o[step][tile] = <C::Operand>::mma(a, p[tile], o[step][tile])
                        });
                    });
                }
            }
            // The next copies overwrite what this group has read.
            warp::sync_warp(warp::FULL);
            in_ring -= 1;
            slot_out += stage_bytes as u32;
            slot_out = if slot_out == ring_end { ring } else { slot_out };
            i += 1;
        }

        // The warps merge in shared memory.
        if valid {
            let rows = (all_rows - first_row).min(block_rows);
            // Places computed here, not kept since the beginning, where there are too few registers for that.
            let t = if by_fours { integer::opaque(t) } else { t };
            unroll::<TILES>(|tile| {
                unroll::<2>(|c| {
                    unroll::<3>(|i| l[tile][c] += warp::shfl_xor(l[tile][c], 4 << i));
                    let r = tile as u32 * 8 + 2 * t + c as u32;
                    if r < rows {
                        let at = warp_id * slot_rows + r;
                        if g == 0 {
                            stats.set(2 * at, m[tile][c]);
                            stats.set(2 * at + 1, l[tile][c]);
                        }
                        for step in 0..D / 16 {
                            unroll::<2>(|half| {
                                let d = o_dim(o_order, step, half, g as usize);
                                merge.set((at * merge_row) as usize + d, o[step][tile][c + 2 * half]);
                            });
                        }
                    }
                });
            });
            thread::sync_threads();

            let finisher = Finisher { out, lse, sinks, has_lse, has_sinks, q_len, q_heads, group, out_token, out_head };
            let v_scale = if has_v_scale { v_scales.get(kv_head * scale_per_head) } else { 1.0 };
            let quads = const { D as u32 / 4 };
            let mut e = tid;
            while e < rows * quads {
                let (r, d) = (e / quads, e % quads * 4);
                if d < head_dim {
                    let at = |w: u32| w * slot_rows + r;
                    let mut top = f32::NEG_INFINITY;
                    for w in 0..WARPS as u32 {
                        top = float::max(top, stats.get(2 * at(w)));
                    }
                    let reference = if top == f32::NEG_INFINITY { 0.0 } else { top };
                    let (mut sum, mut value) = (0.0, [0f32; 4]);
                    for w in 0..WARPS as u32 {
                        let weight = float::fast::exp2(stats.get(2 * at(w)) - reference);
                        sum = float::fma(weight, stats.get(2 * at(w) + 1), sum);
                        let B128(part) = merge.get_as::<B128<f32, 4>>(at(w) * merge_row + d);
                        unroll::<4>(|j| value[j] = float::fma(weight, part[j], value[j]));
                    }
                    unroll::<4>(|j| value[j] *= v_scale);
                    if item.whole {
                        finisher.finish(item.sequence, kv_head, first_row + r, d, top, sum, value);
                    } else {
                        let slot_floats = partial_floats(head_dim as usize, slot_rows as usize);
                        let pair = item.sequence as usize * heads as usize + item.head as usize;
                        let part = pair * partial_chunks as usize + item.part as usize;
                        let slot = partial.offset(part * slot_floats);
                        slot.set_as(r * head_dim + d, B128::<f32, 4>(value));
                        if d == 0 {
                            slot.set_as(slot_rows * head_dim + 2 * r, B64::<f32, 2>([top, sum]));
                        }
                    }
                }
                e += THREADS as u32;
            }
            // The next item's results overwrite what this merge has read.
            thread::sync_threads();
        }

        if !is_ahead {
            break;
        }
        // On to the next item.
        (item, start, own, item_pages) = (ahead, group_start(ahead_first), ahead_own, ahead_pages);
        (is_ahead, valid) = (false, true);

        let kv_head = item.head / row_blocks;
        let first_row = (item.head - kv_head * row_blocks) * block_rows;
        k_scale = if has_k_scale { k_scales.get(kv_head * scale_per_head) } else { 1.0 };
        if ROOM {
            unroll::<TILES>(|tile| {
                for s in 0..D / 16 {
                    unroll::<2>(|half| qf[tile][s][half] = q_ahead[tile][s][half]);
                }
            });
        } else {
            load_q(item, &mut qf);
        }
        unroll::<TILES>(|tile| {
            let r = first_row + tile as u32 * 8 + g;
            for s in 0..D / 16 {
                unroll::<2>(|half| {
                    let d = q_dim(element, s, half, t as usize) as u32;
                    qf[tile][s][half] = if r < all_rows && d < head_dim { qf[tile][s][half] } else { 0 };
                });
            }
            let undo = if converts { fit_operand::<T, C, D>(&mut qf[tile]) } else { 1.0 };
            unroll::<2>(|c| {
                let r = first_row + tile as u32 * 8 + 2 * t + c as u32;
                let undo = if converts { warp::shfl_idx(undo, (2 * t + c as u32) * 4) } else { 1.0 };
                factor[tile][c] = scale * k_scale * undo;
                // How many keys the row sees.
                limits[tile][c] = if r < all_rows { (item.len + r / group + 1).saturating_sub(q_len) } else { 0 };
            });
        });
    }
}

/// Makes all but bits `first .. end` of a piece of 16 bytes zero.
#[inline(always)]
unsafe fn keep_bits(piece: shared::Shared<u8>, first: u32, end: u32) {
    let B128(words) = piece.get_as::<B128<u32, 4>>(0u32);
    // The lower bits of a word.
    let below = |bits: u32| if bits >= 32 { u32::MAX } else { (1 << bits) - 1 };
    let mut kept = [0u32; 4];
    unroll::<4>(|w| {
        let of_word = |bits: u32| below(bits.saturating_sub(32 * w as u32));
        kept[w] = words[w] & of_word(end) & !of_word(first);
    });
    piece.set_as(0u32, B128(kept));
}

/// Turns a row of Q into the cache's operands, scaled by the power of two that brings its largest element to 2^13 .. 2^14;
/// scores are to be multiplied by what is returned.
#[inline(always)]
pub(super) fn fit_operand<T: TensorFloat, C: CacheOperand, const D: usize>(q: &mut [[u32; 2]; 16]) -> f32 {
    let mut top = 0f32;
    for s in 0..D / 16 {
        unroll::<2>(|half| {
            let [a, b] = unpack::<T>(q[s][half]);
            top = float::max(top, float::max(float::abs(a), float::abs(b)));
        });
    }
    unroll::<2>(|i| top = float::max(top, warp::shfl_xor(top, 1 << i)));
    let (up, down) = fit_factors(top.to_bits());
    for s in 0..D / 16 {
        unroll::<2>(|half| {
            let [a, b] = unpack::<T>(q[s][half]);
            q[s][half] = pack::<C::Operand>(a * up, b * up);
        });
    }
    down
}

/// Where results go.
#[derive(Clone, Copy)]
pub(super) struct Finisher<T> {
    pub(super) out: GlobalMut<T>,
    pub(super) lse: GlobalMut<f32>,
    pub(super) sinks: Global<f32>,
    pub(super) has_lse: bool,
    pub(super) has_sinks: bool,
    pub(super) q_len: u32,
    pub(super) q_heads: u32,
    pub(super) group: u32,
    pub(super) out_token: usize,
    pub(super) out_head: usize,
}

impl<T: TensorFloat> Finisher<T> {
    /// Of row `r` of a KV head, whose sum of weights relative to 2^`top` is `sum`: what its sums of values are to be multiplied
    /// with, and where its output begins. Writes the row's log-sum-exp if `first`.
    #[inline(always)]
    pub(super) unsafe fn row(
        self,
        sequence: u32,
        kv_head: u32,
        r: u32,
        top: f32,
        sum: f32,
        first: bool,
    ) -> (f32, GlobalMut<T>) {
        core::hint::assert_unchecked(self.group != 0);
        let token = if self.q_len == 1 { 0 } else { r / self.group };
        let head = kv_head * self.group + (r - token * self.group);
        let (mut reference, mut shrink, mut total) = (if top == f32::NEG_INFINITY { 0.0 } else { top }, 1.0, sum);
        if self.has_sinks {
            let sink = self.sinks.get(head) * LOG2_E;
            let total_top = float::max(top, sink);
            reference = if total_top == f32::NEG_INFINITY { 0.0 } else { total_top };
            shrink = float::fast::exp2(top - reference);
            total = sum * shrink + float::fast::exp2(sink - reference);
        }
        let query = sequence as usize * self.q_len as usize + token as usize;
        if self.has_lse && first {
            let value = if total == 0.0 { f32::NEG_INFINITY } else { (reference + float::log2(total)) * LN_2 };
            self.lse.set(query * self.q_heads as usize + head as usize, value);
        }
        let weight = if total == 0.0 { 0.0 } else { float::fast::div(shrink, total) };
        (weight, self.out.offset(query * self.out_token + head as usize * self.out_head))
    }

    /// Writes dimensions `d ..` of row `r` of a KV head: sums of values and of weights, relative to 2^`top`.
    #[inline(always)]
    pub(super) unsafe fn finish(
        self,
        sequence: u32,
        kv_head: u32,
        r: u32,
        d: u32,
        top: f32,
        sum: f32,
        value: [f32; 4],
    ) {
        let (weight, to) = self.row(sequence, kv_head, r, top, sum, d == 0);
        to.set_as(d, B64::<T, 4>::from_f32(value.map(|v| v * weight)));
    }
}

/// Results of some chunks of a row, added in their order: the sum of weights relative to 2^`top`.
#[derive(Clone, Copy)]
pub(super) struct Total {
    pub(super) top: f32,
    pub(super) sum: f32,
}

impl Total {
    /// Adds the next chunk's. Returns what sums of values are to be multiplied with: those so far and the chunk's.
    #[inline(always)]
    pub(super) fn add(&mut self, top: f32, sum: f32) -> (f32, f32) {
        let new = float::max(self.top, top);
        // Nothing seen yet: any finite reference will do.
        let reference = if new == f32::NEG_INFINITY { 0.0 } else { new };
        let (old, chunk) = (float::fast::exp2(self.top - reference), float::fast::exp2(top - reference));
        self.sum = float::fma(self.sum, old, sum * chunk);
        self.top = new;
        (old, chunk)
    }
}

/// What some chunks left of four dimensions of a row: maximum and sum of the row, and the sums of values.
type Parts<const BATCH: usize> = ([[f32; 2]; BATCH], [[f32; 4]; BATCH]);

/// Fetches chunks `chunk ..`; beyond the last it is the last.
#[inline(always)]
unsafe fn fetch_chunks<const BATCH: usize>(
    slots: Global<f32>,
    slot_floats: usize,
    (chunk, chunks): (u32, u32),
    (stats_at, value_at): (u32, u32),
) -> Parts<BATCH> {
    let (mut stats, mut values) = ([[0f32; 2]; BATCH], [[0f32; 4]; BATCH]);
    unroll::<BATCH>(|j| {
        let slot = slots.offset((chunk + j as u32).min(chunks - 1) as usize * slot_floats);
        B64(stats[j]) = slot.get_hinted::<B64<f32, 2>>(stats_at, SecondLevel);
        B128(values[j]) = slot.get_hinted::<B128<f32, 4>>(value_at, SecondLevel);
    });
    (stats, values)
}

/// Adds the partial results of all chunks in their order: four dimensions of a row, whose maximum and sum, and whose dimensions,
/// lie there in each. `BATCH` of them are fetched at a time, if `AHEAD` while those before are added; neither changes the result.
#[inline(always)]
pub(super) unsafe fn add_chunks<const BATCH: usize, const AHEAD: bool>(
    slots: Global<f32>,
    slot_floats: usize,
    chunks: u32,
    at: (u32, u32),
) -> (Total, [f32; 4]) {
    let mut total = Total { top: f32::NEG_INFINITY, sum: 0.0 };
    let (mut value, mut chunk) = ([0f32; 4], 0);
    let mut coming = if AHEAD {
        fetch_chunks::<BATCH>(slots, slot_floats, (0, chunks), at)
    } else {
        ([[0.0; 2]; BATCH], [[0.0; 4]; BATCH])
    };
    while chunk < chunks {
        let next = chunk + BATCH as u32;
        let (stats, values) =
            if AHEAD { coming } else { fetch_chunks::<BATCH>(slots, slot_floats, (chunk, chunks), at) };
        if AHEAD && next < chunks {
            coming = fetch_chunks::<BATCH>(slots, slot_floats, (next, chunks), at);
        }
        unroll::<BATCH>(|j| {
            if chunk + (j as u32) < chunks {
                let (old, new) = total.add(stats[j][0], stats[j][1]);
                unroll::<4>(|i| value[i] = float::fma(value[i], old, values[j][i] * new));
            }
        });
        chunk = next;
    }
    (total, value)
}

/// Threads of a block of [`combine`].
pub const COMBINE_THREADS: usize = 128;

/// Merges the partial results that [`decode`] leaves of sequences of more than one chunk, in the order of the chunks.
///
/// Arguments as there; `slot_rows` are the rows of a partial result: the smaller of `q_heads / kv_heads * q_len` and of the
/// rows of a block. A block for each head of each sequence, heads running fastest as there; block: [`COMBINE_THREADS`], four dimensions of a
/// row each, [`add_chunks`] of `BATCH`.
#[inline(always)]
pub unsafe fn combine<T: TensorFloat, const BATCH: usize>(
    out: *mut T,
    lse: *mut f32,
    lens: *const i32,
    sinks: *const f32,
    partial: *const f32,
    q_len: u32,
    q_heads: u32,
    kv_heads: u32,
    slot_rows: u32,
    head_dim: u32,
    page_shift: u32,
    max_pages: u32,
    partial_chunks: u32,
    hint: u32,
    window: u32,
    out_token: usize,
    out_head: usize,
) {
    core::hint::assert_unchecked(kv_heads != 0);
    core::hint::assert_unchecked(slot_rows != 0);
    let group = q_heads / kv_heads;
    core::hint::assert_unchecked(group != 0);
    let row_blocks = (group * q_len).div_ceil(slot_rows);
    core::hint::assert_unchecked(row_blocks != 0);
    let heads = kv_heads * row_blocks;
    core::hint::assert_unchecked(heads != 0);
    let (sequence, head) = (thread::block_idx_x() / heads, thread::block_idx_x() % heads);
    let kv_head = head / row_blocks;
    let first_row = (head - kv_head * row_blocks) * slot_rows;
    let rows = (group * q_len - first_row).min(slot_rows);
    let (has_lse, has_sinks) = (!lse.is_null(), !sinks.is_null());
    let (out, lse, sinks) = (GlobalMut::new(out), GlobalMut::new(lse), Global::new(sinks));
    let finisher = Finisher { out, lse, sinks, has_lse, has_sinks, q_len, q_heads, group, out_token, out_head };

    let len = (Global::new(lens).get(sequence).max(0) as u32).min(max_pages << page_shift);
    let chunks = chunks(len, hint) - (first_visible(len, q_len, window) >> chunk_shift(len, hint));
    let slot_floats = partial_floats(head_dim as usize, slot_rows as usize);
    let pair = sequence as usize * heads as usize + head as usize;
    let slots = Global::new(partial).offset(pair * partial_chunks as usize * slot_floats);
    // The partial results are there from here on. Also blocks without work wait: what follows this launch relies on the
    // end of the one before.
    dependent_launch::wait();
    if chunks == 1 {
        return;
    }
    let quads = head_dim / 4;
    core::hint::assert_unchecked(quads != 0);
    let mut e = thread::thread_idx_x();
    while e < rows * quads {
        let (r, d) = (e / quads, e % quads * 4);
        let at = (slot_rows * head_dim + 2 * r, r * head_dim + d);
        let (Total { top, sum }, value) = add_chunks::<BATCH, false>(slots, slot_floats, chunks, at);
        finisher.finish(sequence, kv_head, first_row + r, d, top, sum, value);
        e += COMBINE_THREADS as u32;
    }
}

/// Two values as an operand register.
#[inline(always)]
pub(super) fn pack<T: TensorFloat>(low: f32, high: f32) -> u32 {
    if const { matches!(T::DTYPE, DType::Bf16) } {
        convert::pack_bf16x2(low, high)
    } else {
        convert::pack_f16x2(low, high)
    }
}

/// Two elements of a word.
#[inline(always)]
pub(super) fn unpack<T: TensorFloat>(word: u32) -> [f32; 2] {
    if const { matches!(T::DTYPE, DType::Bf16) } { convert::unpack_bf16x2(word) } else { convert::unpack_f16x2(word) }
}

entries! {
    /// Arguments of every `decode_*` entry; see [`decode`].
    pub struct Args<T, C>(
        out: *mut T, lse: *mut f32, q: *const T, k: *const C, v: *const C, block_table: *const i32, lens: *const i32,
        alibi: *const f32, sinks: *const f32, k_scales: *const f32, v_scales: *const f32, partial: *mut f32,
        scale_per_head: u32, batch: u32, q_len: u32, q_heads: u32, kv_heads: u32, head_dim: u32,
        page_shift: u32, max_pages: u32, pages: u32, partial_chunks: u32, hint: u32, q_token: usize, q_head: usize,
        out_token: usize, out_head: usize, k_page: usize, k_slot: usize, k_head: usize, v_page: usize, v_slot: usize,
        v_head: usize, scale: f32, soft_cap: f32, window: u32,
    );
    decode_d64_r8_bf16 { type T = bf16; type C = bf16; } [128, blocks(64, 2)] => decode::<T, C, 64, 1, { stages(64, 2) }, true, false>;
    decode_d128_r8_bf16 { type T = bf16; type C = bf16; } [128, blocks(128, 2)] => decode::<T, C, 128, 1, { stages(128, 2) }, true, false>;
    decode_d128_r16_bf16 { type T = bf16; type C = bf16; } [128, blocks(128, 2)] => decode::<T, C, 128, 2, { stages(128, 2) }, false, false>;
    decode_d256_r8_bf16 { type T = bf16; type C = bf16; } [128, blocks(256, 2)] => decode::<T, C, 256, 1, { stages(256, 2) }, false, false>;
    decode_d256_r8_s1_bf16 { type T = bf16; type C = bf16; } [128, blocks(256, 2)] => decode::<T, C, 256, 1, 1, false, false>;
    decode_d128_r8_bf16_e4m3 { type T = bf16; type C = E4M3; } [128, blocks(128, 1)] => decode::<T, C, 128, 1, { stages(128, 1) }, true, false>;
    decode_d128_r16_bf16_e4m3 { type T = bf16; type C = E4M3; } [128, blocks(128, 1)] => decode::<T, C, 128, 2, { stages(128, 1) }, false, false>;
    decode_d256_r8_bf16_e4m3 { type T = bf16; type C = E4M3; } [128, blocks(256, 1)] => decode::<T, C, 256, 1, { stages(256, 1) }, false, false>;
    decode_d128_r8_bf16_e5m2 { type T = bf16; type C = E5M2; } [128, blocks(128, 1)] => decode::<T, C, 128, 1, { stages(128, 1) }, true, false>;
    decode_d128_r16_bf16_e5m2 { type T = bf16; type C = E5M2; } [128, blocks(128, 1)] => decode::<T, C, 128, 2, { stages(128, 1) }, false, false>;
    decode_d256_r8_bf16_e5m2 { type T = bf16; type C = E5M2; } [128, blocks(256, 1)] => decode::<T, C, 256, 1, { stages(256, 1) }, false, false>;
    decode_d128_r8_bf16_i8 { type T = bf16; type C = i8; } [128, blocks(128, 1)] => decode::<T, C, 128, 1, { stages(128, 1) }, true, false>;
    decode_d128_r16_bf16_i8 { type T = bf16; type C = i8; } [128, blocks(128, 1)] => decode::<T, C, 128, 2, { stages(128, 1) }, false, false>;
    decode_d256_r8_bf16_i8 { type T = bf16; type C = i8; } [128, blocks(256, 1)] => decode::<T, C, 256, 1, { stages(256, 1) }, false, false>;
    decode_d64_r8_f16 { type T = f16; type C = f16; } [128, blocks(64, 2)] => decode::<T, C, 64, 1, { stages(64, 2) }, true, false>;
    decode_d128_r8_f16 { type T = f16; type C = f16; } [128, blocks(128, 2)] => decode::<T, C, 128, 1, { stages(128, 2) }, true, false>;
    decode_d128_r16_f16 { type T = f16; type C = f16; } [128, blocks(128, 2)] => decode::<T, C, 128, 2, { stages(128, 2) }, false, false>;
    decode_d256_r8_f16 { type T = f16; type C = f16; } [128, blocks(256, 2)] => decode::<T, C, 256, 1, { stages(256, 2) }, false, false>;
    decode_d256_r8_s1_f16 { type T = f16; type C = f16; } [128, blocks(256, 2)] => decode::<T, C, 256, 1, 1, false, false>;
    decode_d128_r8_f16_e4m3 { type T = f16; type C = E4M3; } [128, blocks(128, 1)] => decode::<T, C, 128, 1, { stages(128, 1) }, true, false>;
    decode_d128_r16_f16_e4m3 { type T = f16; type C = E4M3; } [128, blocks(128, 1)] => decode::<T, C, 128, 2, { stages(128, 1) }, false, false>;
    decode_d256_r8_f16_e4m3 { type T = f16; type C = E4M3; } [128, blocks(256, 1)] => decode::<T, C, 256, 1, { stages(256, 1) }, false, false>;
    decode_d128_r8_f16_e5m2 { type T = f16; type C = E5M2; } [128, blocks(128, 1)] => decode::<T, C, 128, 1, { stages(128, 1) }, true, false>;
    decode_d128_r16_f16_e5m2 { type T = f16; type C = E5M2; } [128, blocks(128, 1)] => decode::<T, C, 128, 2, { stages(128, 1) }, false, false>;
    decode_d256_r8_f16_e5m2 { type T = f16; type C = E5M2; } [128, blocks(256, 1)] => decode::<T, C, 256, 1, { stages(256, 1) }, false, false>;
    decode_d128_r8_f16_i8 { type T = f16; type C = i8; } [128, blocks(128, 1)] => decode::<T, C, 128, 1, { stages(128, 1) }, true, false>;
    decode_d128_r16_f16_i8 { type T = f16; type C = i8; } [128, blocks(128, 1)] => decode::<T, C, 128, 2, { stages(128, 1) }, false, false>;
    decode_d256_r8_f16_i8 { type T = f16; type C = i8; } [128, blocks(256, 1)] => decode::<T, C, 256, 1, { stages(256, 1) }, false, false>;
    decode_d64_r8_x_bf16 { type T = bf16; type C = bf16; } [128, blocks(64, 2)] => decode::<T, C, 64, 1, { stages(64, 2) }, true, true>;
    decode_d128_r8_x_bf16 { type T = bf16; type C = bf16; } [128, blocks(128, 2)] => decode::<T, C, 128, 1, { stages(128, 2) }, true, true>;
    decode_d128_r16_x_bf16 { type T = bf16; type C = bf16; } [128, blocks(128, 2)] => decode::<T, C, 128, 2, { stages(128, 2) }, false, true>;
    decode_d256_r8_x_bf16 { type T = bf16; type C = bf16; } [128, blocks(256, 2)] => decode::<T, C, 256, 1, { stages(256, 2) }, false, true>;
    decode_d256_r8_s1_x_bf16 { type T = bf16; type C = bf16; } [128, blocks(256, 2)] => decode::<T, C, 256, 1, 1, false, true>;
    decode_d128_r8_x_bf16_e4m3 { type T = bf16; type C = E4M3; } [128, blocks(128, 1)] => decode::<T, C, 128, 1, { stages(128, 1) }, true, true>;
    decode_d128_r16_x_bf16_e4m3 { type T = bf16; type C = E4M3; } [128, blocks(128, 1)] => decode::<T, C, 128, 2, { stages(128, 1) }, false, true>;
    decode_d256_r8_x_bf16_e4m3 { type T = bf16; type C = E4M3; } [128, blocks(256, 1)] => decode::<T, C, 256, 1, { stages(256, 1) }, false, true>;
    decode_d128_r8_x_bf16_e5m2 { type T = bf16; type C = E5M2; } [128, blocks(128, 1)] => decode::<T, C, 128, 1, { stages(128, 1) }, true, true>;
    decode_d128_r16_x_bf16_e5m2 { type T = bf16; type C = E5M2; } [128, blocks(128, 1)] => decode::<T, C, 128, 2, { stages(128, 1) }, false, true>;
    decode_d256_r8_x_bf16_e5m2 { type T = bf16; type C = E5M2; } [128, blocks(256, 1)] => decode::<T, C, 256, 1, { stages(256, 1) }, false, true>;
    decode_d128_r8_x_bf16_i8 { type T = bf16; type C = i8; } [128, blocks(128, 1)] => decode::<T, C, 128, 1, { stages(128, 1) }, true, true>;
    decode_d128_r16_x_bf16_i8 { type T = bf16; type C = i8; } [128, blocks(128, 1)] => decode::<T, C, 128, 2, { stages(128, 1) }, false, true>;
    decode_d256_r8_x_bf16_i8 { type T = bf16; type C = i8; } [128, blocks(256, 1)] => decode::<T, C, 256, 1, { stages(256, 1) }, false, true>;
    decode_d64_r8_x_f16 { type T = f16; type C = f16; } [128, blocks(64, 2)] => decode::<T, C, 64, 1, { stages(64, 2) }, true, true>;
    decode_d128_r8_x_f16 { type T = f16; type C = f16; } [128, blocks(128, 2)] => decode::<T, C, 128, 1, { stages(128, 2) }, true, true>;
    decode_d128_r16_x_f16 { type T = f16; type C = f16; } [128, blocks(128, 2)] => decode::<T, C, 128, 2, { stages(128, 2) }, false, true>;
    decode_d256_r8_x_f16 { type T = f16; type C = f16; } [128, blocks(256, 2)] => decode::<T, C, 256, 1, { stages(256, 2) }, false, true>;
    decode_d256_r8_s1_x_f16 { type T = f16; type C = f16; } [128, blocks(256, 2)] => decode::<T, C, 256, 1, 1, false, true>;
    decode_d128_r8_x_f16_e4m3 { type T = f16; type C = E4M3; } [128, blocks(128, 1)] => decode::<T, C, 128, 1, { stages(128, 1) }, true, true>;
    decode_d128_r16_x_f16_e4m3 { type T = f16; type C = E4M3; } [128, blocks(128, 1)] => decode::<T, C, 128, 2, { stages(128, 1) }, false, true>;
    decode_d256_r8_x_f16_e4m3 { type T = f16; type C = E4M3; } [128, blocks(256, 1)] => decode::<T, C, 256, 1, { stages(256, 1) }, false, true>;
    decode_d128_r8_x_f16_e5m2 { type T = f16; type C = E5M2; } [128, blocks(128, 1)] => decode::<T, C, 128, 1, { stages(128, 1) }, true, true>;
    decode_d128_r16_x_f16_e5m2 { type T = f16; type C = E5M2; } [128, blocks(128, 1)] => decode::<T, C, 128, 2, { stages(128, 1) }, false, true>;
    decode_d256_r8_x_f16_e5m2 { type T = f16; type C = E5M2; } [128, blocks(256, 1)] => decode::<T, C, 256, 1, { stages(256, 1) }, false, true>;
    decode_d128_r8_x_f16_i8 { type T = f16; type C = i8; } [128, blocks(128, 1)] => decode::<T, C, 128, 1, { stages(128, 1) }, true, true>;
    decode_d128_r16_x_f16_i8 { type T = f16; type C = i8; } [128, blocks(128, 1)] => decode::<T, C, 128, 2, { stages(128, 1) }, false, true>;
    decode_d256_r8_x_f16_i8 { type T = f16; type C = i8; } [128, blocks(256, 1)] => decode::<T, C, 256, 1, { stages(256, 1) }, false, true>;
}

entries! {
    /// Arguments of every `combine_*` entry; see [`combine`].
    pub struct CombineArgs<T>(
        out: *mut T, lse: *mut f32, lens: *const i32, sinks: *const f32, partial: *const f32, q_len: u32, q_heads: u32,
        kv_heads: u32, slot_rows: u32, head_dim: u32, page_shift: u32, max_pages: u32, partial_chunks: u32, hint: u32,
        window: u32, out_token: usize, out_head: usize,
    );
    combine_bf16 { type T = bf16; } [COMBINE_THREADS] => combine::<T, 4>;
    combine_f16 { type T = f16; } [COMBINE_THREADS] => combine::<T, 4>;
    combine_long_bf16 { type T = bf16; } [COMBINE_THREADS] => combine::<T, 16>;
    combine_long_f16 { type T = f16; } [COMBINE_THREADS] => combine::<T, 16>;
}
