//! The fused block of experts with 8-bit weights: `out[t] = Σ w · down(act(gate_up(x[t])))`.
//!
//! Tokens come and go as f32, f16 or bf16; both products multiply 8-bit numbers, to which rows are quantised on the way:
//!
//! * e4m3 with scales for 128 × 128 blocks of weights, and for each row and 128 columns of activations (DeepSeek-AI, *DeepSeek-V3
//!   Technical Report*, 2024, section 3.3). Sums of 128 products are multiplied with their scales and added up in f32.
//! * int8 with a scale for each row of weights, and a dynamic one for each row of activations, which are multiplied with a smoothing
//!   vector of their expert first (Xiao et al., *SmoothQuant*, 2022).
//!
//! One operation, several kernels; [`FusedQuantPath`] says which, chosen by shape, alignment and device, never by the contents. Every
//! path is deterministic, and a token's result depends on no other token.

use super::fused::{ExpertActivation, GateUp};
use super::sort;
use crate::check::Call;
use crate::device::{Device, Geometry, Stream};
use crate::error::{Error, Result};
use crate::gemm::{Quantised, QuantisedElement};
use crate::kernels::moe::fused_quant_rows as rows_kernel;
use crate::kernels::moe::fused_quant_tile as tile_kernel;
use crate::kernels::moe::fused_quant_wgmma as wgmma_kernel;
use crate::kernels::moe::{fused, fused_reduce};
use crate::kernels::row::GROUP;
use crate::tensor::Tensor;
use cuda_std::tma::{Swizzle, TensorMap, TensorMapDescription};
use cuda_std::{DType, Entry, Float};
use std::ffi::c_void;

const OP: &str = "moe::fused_quant";

/// The kernels of [`fused_quant`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum FusedQuantPath {
    /// By shape, element types and device.
    #[default]
    Auto,
    /// Tiles on the tensor cores of sm_80 and later, 32 pairs of an expert at a time.
    Tile,
    /// Hopper's matrix products and copy engine, e4m3, tokens of f16 or bf16: no sorting, at most 128 pairs, up to 16 of an expert at a time.
    /// At most 1024 experts on the device, any activation but [`ExpertActivation::Gelu`].
    Wgmma16,
    /// [`Wgmma16`](Self::Wgmma16) after sorting, up to 64 pairs at a time, any number in all.
    Wgmma64,
    /// [`Wgmma64`](Self::Wgmma64), up to 144 at a time.
    Wgmma144,
    /// [`Wgmma144`](Self::Wgmma144) with 256 rows of weights at a time instead of 128.
    Wgmma144Wide,
}

impl FusedQuantPath {
    /// Pairs of an expert that are neighbours in the sorted list: the block size of sorting.
    const fn block(self) -> usize {
        match self {
            FusedQuantPath::Auto | FusedQuantPath::Tile => tile_kernel::PAIRS,
            _ => wgmma_kernel::SORT_BLOCK,
        }
    }

    /// Tiles of 64 rows of weights of a warpgroup, pairs at a time, and stages of a path on Hopper.
    const fn wgmma(self) -> Option<(usize, usize, usize)> {
        match self {
            FusedQuantPath::Auto | FusedQuantPath::Tile => None,
            FusedQuantPath::Wgmma16 => Some((1, 16, 11)),
            FusedQuantPath::Wgmma64 => Some((1, 64, 8)),
            FusedQuantPath::Wgmma144 => Some((1, 144, 6)),
            FusedQuantPath::Wgmma144Wide => Some((2, 144, 4)),
        }
    }

    const fn sorts(self) -> bool {
        !matches!(self, FusedQuantPath::Wgmma16)
    }

    /// The path on Hopper that suits so many pairs of so many experts.
    const fn choose(pairs: usize, bins: usize) -> Self {
        if pairs <= 64 {
            FusedQuantPath::Wgmma16
        } else if pairs <= 48 * bins {
            FusedQuantPath::Wgmma64
        } else {
            FusedQuantPath::Wgmma144
        }
    }
}

/// The sizes of a problem.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
#[must_use]
pub struct FusedQuantShape {
    /// Tokens.
    pub tokens: usize,
    /// Experts listed for each.
    pub top_k: usize,
    /// Experts of this device.
    pub experts: usize,
    /// Width of tokens, a multiple of 16.
    pub hidden: usize,
    /// Width between the products, a multiple of 16.
    pub intermediate: usize,
}

impl FusedQuantShape {
    /// These sizes.
    pub const fn new(tokens: usize, top_k: usize, experts: usize, hidden: usize, intermediate: usize) -> Self {
        Self { tokens, top_k, experts, hidden, intermediate }
    }

    /// Pairs of tokens and slots.
    pub const fn pairs(&self) -> usize {
        self.tokens * self.top_k
    }

    /// Bytes of workspace for tokens of an element type, enough for every path and either type of weights.
    pub const fn workspace_bytes(&self, dtype: DType) -> usize {
        let (a, b) = (Workspace::new(self, dtype, 8).bytes, Workspace::new(self, dtype, tile_kernel::PAIRS).bytes);
        if a > b { a } else { b }
    }
}

/// Where the parts of the workspace are, in bytes.
#[derive(Clone, Copy, Debug)]
struct Workspace {
    /// Quantised tokens, of each pair for int8, and their scales.
    x: usize,
    x_scales: usize,
    h: usize,
    /// `h`, quantised, and its scales.
    q: usize,
    q_scales: usize,
    partial: usize,
    sorted_ids: usize,
    expert_ids: usize,
    totals: usize,
    sort: usize,
    sorted_weights: usize,
    offsets: usize,
    expert_counts: usize,
    /// Elements of `sorted_ids`.
    capacity: usize,
    bytes: usize,
}

impl Workspace {
    const fn new(shape: &FusedQuantShape, dtype: DType, block: usize) -> Self {
        const fn after(at: usize, bytes: usize) -> usize {
            (at + bytes).next_multiple_of(256)
        }
        let (pairs, experts) = (shape.pairs(), shape.experts);
        let capacity = sort::capacity(pairs, experts, block, false);
        let x_scales = after(0, pairs * shape.hidden);
        let h = after(x_scales, pairs * shape.hidden.div_ceil(GROUP) * 4);
        let q = after(h, pairs * shape.intermediate * dtype.size());
        let q_scales = after(q, pairs * shape.intermediate);
        let partial = after(q_scales, pairs * shape.intermediate.div_ceil(GROUP) * 4);
        let sorted_ids = after(partial, pairs * shape.hidden * 4);
        let expert_ids = after(sorted_ids, capacity * 4);
        let totals = after(expert_ids, capacity / block * 4);
        let sort = after(totals, 4);
        let sorted_weights = after(sort, sort::workspace_bytes(pairs, experts));
        let offsets = after(sorted_weights, capacity * 4);
        let expert_counts = after(offsets, (experts + 1) * 4);
        let bytes = after(expert_counts, experts * 4);
        Self {
            x: 0,
            x_scales,
            h,
            q,
            q_scales,
            partial,
            sorted_ids,
            expert_ids,
            totals,
            sort,
            sorted_weights,
            offsets,
            expert_counts,
            capacity,
            bytes,
        }
    }
}

/// The entries of a product on Hopper: the first and the second.
pub const fn wgmma_entries(
    path: FusedQuantPath,
    dtype: DType,
) -> Option<(Entry<wgmma_kernel::Args>, Entry<wgmma_kernel::Args>)> {
    use wgmma_kernel::*;
    Some(match (path, dtype) {
        (FusedQuantPath::Wgmma16, DType::F16) => {
            (moe_fused_quant_wgmma_up_t16_f16::ENTRY, moe_fused_quant_wgmma_down_t16_f16::ENTRY)
        }
        (FusedQuantPath::Wgmma64, DType::F16) => {
            (moe_fused_quant_wgmma_up_t64_f16::ENTRY, moe_fused_quant_wgmma_down_t64_f16::ENTRY)
        }
        (FusedQuantPath::Wgmma144, DType::F16) => {
            (moe_fused_quant_wgmma_up_t144_f16::ENTRY, moe_fused_quant_wgmma_down_t144_f16::ENTRY)
        }
        (FusedQuantPath::Wgmma144Wide, DType::F16) => {
            (moe_fused_quant_wgmma_up_r256_f16::ENTRY, moe_fused_quant_wgmma_down_r256_f16::ENTRY)
        }
        (FusedQuantPath::Wgmma16, DType::Bf16) => {
            (moe_fused_quant_wgmma_up_t16_bf16::ENTRY, moe_fused_quant_wgmma_down_t16_bf16::ENTRY)
        }
        (FusedQuantPath::Wgmma64, DType::Bf16) => {
            (moe_fused_quant_wgmma_up_t64_bf16::ENTRY, moe_fused_quant_wgmma_down_t64_bf16::ENTRY)
        }
        (FusedQuantPath::Wgmma144, DType::Bf16) => {
            (moe_fused_quant_wgmma_up_t144_bf16::ENTRY, moe_fused_quant_wgmma_down_t144_bf16::ENTRY)
        }
        (FusedQuantPath::Wgmma144Wide, DType::Bf16) => {
            (moe_fused_quant_wgmma_up_r256_bf16::ENTRY, moe_fused_quant_wgmma_down_r256_bf16::ENTRY)
        }
        _ => return None,
    })
}

/// How to launch a product on Hopper, with so many experts and multiprocessors.
pub const fn wgmma_geometry(path: FusedQuantPath, experts: usize, multiprocessors: u32) -> Option<Geometry> {
    let Some((tiles, pairs, stages)) = path.wgmma() else {
        return None;
    };
    let bytes = wgmma_kernel::shared_bytes(tiles, pairs, stages, experts);
    Some(Geometry::linear(multiprocessors, wgmma_kernel::THREADS as u32).shared_bytes(bytes as u32).dependent())
}

/// How to launch a product of [`FusedQuantPath::Tile`] of `rows` rows of weights, for so many blocks of pairs.
pub const fn tile_geometry(rows: usize, blocks: usize) -> Geometry {
    let grid = [rows.div_ceil(tile_kernel::ROWS) as u32, blocks as u32, 1];
    Geometry::new(grid, [tile_kernel::THREADS as u32, 1, 1]).shared_bytes(tile_kernel::SHARED_BYTES as u32).dependent()
}

/// How to launch the sum over slots.
const fn reduce_geometry(shape: &FusedQuantShape) -> Geometry {
    let columns = fused_reduce::THREADS * fused_reduce::COLUMNS;
    Geometry::new([shape.tokens as u32, shape.hidden.div_ceil(columns) as u32, 1], [fused_reduce::THREADS as u32, 1, 1])
        .dependent()
}

/// How to quantise so many rows of `n` columns to e4m3.
const fn group_geometry(rows: usize, n: usize) -> Geometry {
    let pieces = n.div_ceil(rows_kernel::COLUMNS).next_multiple_of(32);
    let threads = if pieces < rows_kernel::MAX_THREADS { pieces } else { rows_kernel::MAX_THREADS };
    Geometry::new([rows as u32, pieces.div_ceil(threads) as u32, 1], [threads as u32, 1, 1])
}

/// The map of e4m3 weights `[experts, rows, k]` for the copy engine; see
/// [`fused_wgmma`](crate::kernels::moe::fused_wgmma). `n` outputs; `gate_up` for the first product; so many `rows` of weights at a time.
fn weight_map(
    device: &Device,
    base: *const c_void,
    experts: usize,
    n: usize,
    k: usize,
    gate_up: Option<GateUp>,
    rows: usize,
) -> Result<TensorMap> {
    let (experts, n, k) = (experts.max(1) as u64, n as u64, k as u64);
    let (groups, step) = (rows as u32 / 16, wgmma_kernel::STEP as u32);
    // From innermost on: elements of a row, 8 rows, gate and value, groups of 8 outputs, experts.
    let (dims, strides, box_dims) = match gate_up {
        Some(GateUp::Halves) => ([k, 8, 2, n / 8, experts], [k, n * k, 8 * k, 2 * n * k], [step, 8, 2, groups, 1]),
        Some(GateUp::Interleaved) => {
            ([k, 8, 2, n / 8, experts], [2 * k, k, 16 * k, 2 * n * k], [step, 8, 2, groups, 1])
        }
        // The values lie outside of the tensor: zeroes.
        Some(GateUp::GateOnly) => ([k, 8, 1, n / 8, experts], [k, k, 8 * k, n * k], [step, 8, 2, groups, 1]),
        None => ([k, 8, n / 8, 1, experts], [k, 8 * k, n * k, n * k], [step, 8, 2 * groups, 1, 1]),
    };
    device.tensor_map(&TensorMapDescription {
        base: base as u64,
        dtype: DType::U8,
        rank: 5,
        dims,
        strides,
        box_dims,
        swizzle: Swizzle::B128,
    })
}

/// Pointers and scalars of a call, for [`launch`].
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
#[allow(missing_docs)]
pub struct Operands {
    /// `[tokens, hidden]`, rows `out_row` apart.
    pub out: *mut c_void,
    pub out_row: usize,
    /// `[tokens, hidden]`, rows `x_row` apart.
    pub x: *const c_void,
    pub x_row: usize,
    /// `[experts, rows · intermediate, hidden]`, and scales.
    pub w13: *const c_void,
    pub w13_scales: *const f32,
    /// `[experts, hidden, intermediate]`, and scales.
    pub w2: *const c_void,
    pub w2_scales: *const f32,
    /// `[experts, hidden]` and `[experts, intermediate]`, or null; for int8.
    pub smooth13: *const f32,
    pub smooth2: *const f32,
    /// `[tokens, top_k]`.
    pub topk_ids: *const i32,
    pub topk_weights: *const f32,
    /// `[global_experts]` or null.
    pub expert_map: *const i32,
    /// `[1]` or null.
    pub num_tokens: *const i32,
    /// Experts of all devices.
    pub global_experts: usize,
    pub gate_up: GateUp,
    pub activation: ExpertActivation,
}

impl Operands {
    /// Null pointers, for the caller to set, with dense rows and all experts here; what may stay null is optional.
    pub const fn new(shape: &FusedQuantShape) -> Self {
        Self {
            out: std::ptr::null_mut(),
            out_row: shape.hidden,
            x: std::ptr::null(),
            x_row: shape.hidden,
            w13: std::ptr::null(),
            w13_scales: std::ptr::null(),
            w2: std::ptr::null(),
            w2_scales: std::ptr::null(),
            smooth13: std::ptr::null(),
            smooth2: std::ptr::null(),
            topk_ids: std::ptr::null(),
            topk_weights: std::ptr::null(),
            expert_map: std::ptr::null(),
            num_tokens: std::ptr::null(),
            global_experts: shape.experts,
            gate_up: GateUp::Halves,
            activation: ExpertActivation::Silu,
        }
    }
}

/// One call: what its launches have in common.
struct Run<'a> {
    stream: &'a Stream,
    dtype: DType,
    path: FusedQuantPath,
    shape: &'a FusedQuantShape,
    o: &'a Operands,
    at: Workspace,
    workspace: *mut c_void,
}

impl Run<'_> {
    fn part(&self, offset: usize) -> *mut c_void {
        self.workspace.wrapping_byte_add(offset)
    }

    /// Quantises `x`, or `h` (`by_pair`), of `n` columns.
    ///
    /// # Safety
    /// As for [`launch`].
    unsafe fn quantise(&self, weights: DType, by_pair: bool, dependent: bool) -> Result<()> {
        let (o, shape) = (self.o, self.shape);
        let (x, x_row, n, out, scales, smooth) = if by_pair {
            let n = shape.intermediate;
            (self.part(self.at.h).cast_const(), n, n, self.at.q, self.at.q_scales, o.smooth2)
        } else {
            (o.x, o.x_row, shape.hidden, self.at.x, self.at.x_scales, o.smooth13)
        };
        let (out, scales) = (self.part(out), self.part(scales).cast::<f32>());
        let (tokens, top_k) = (shape.tokens as u32, shape.top_k as u32);
        let (experts, local, by_pair) = (o.global_experts as u32, shape.experts as u32, by_pair as u32);
        let (topk_ids, expert_map, num_tokens, n32) = (o.topk_ids, o.expert_map, o.num_tokens, n as u32);
        let rows = if by_pair != 0 { shape.pairs() } else { shape.tokens };
        if weights == DType::I8 {
            use rows_kernel::int8::*;
            let entry = match self.dtype {
                DType::F32 => moe_fused_quant_rows_i8_f32::ENTRY,
                DType::F16 => moe_fused_quant_rows_i8_f16::ENTRY,
                _ => moe_fused_quant_rows_i8_bf16::ENTRY,
            };
            let args = Args {
                x,
                smooth,
                out: out.cast(),
                scales,
                topk_ids,
                expert_map,
                num_tokens,
                tokens,
                top_k,
                experts,
                local,
                n: n32,
                x_row,
                by_pair,
            };
            let mut geometry = Geometry::linear(shape.pairs() as u32, rows_kernel::ROW_THREADS as u32)
                .shared_bytes(rows_kernel::SHARED_BYTES as u32);
            geometry.dependent = dependent;
            // SAFETY: forwarded to the caller.
            return unsafe { self.stream.launch(&entry, &geometry, &args) };
        }
        use rows_kernel::e4m3::*;
        let entry = match self.dtype {
            DType::F32 => moe_fused_quant_rows_e4m3_f32::ENTRY,
            DType::F16 => moe_fused_quant_rows_e4m3_f16::ENTRY,
            _ => moe_fused_quant_rows_e4m3_bf16::ENTRY,
        };
        let args = Args {
            x,
            out: out.cast(),
            scales,
            topk_ids,
            expert_map,
            num_tokens,
            tokens,
            top_k,
            experts,
            local,
            n: n32,
            x_row,
            by_pair,
        };
        let mut geometry = group_geometry(rows, n);
        geometry.dependent = dependent;
        // SAFETY: forwarded to the caller.
        unsafe { self.stream.launch(&entry, &geometry, &args) }
    }

    /// # Safety
    /// As for [`launch`].
    unsafe fn sort(&self) -> Result<()> {
        let (o, shape, at) = (self.o, self.shape, self.at);
        let wgmma = self.path.wgmma().is_some();
        let null = std::ptr::null_mut();
        let args = sort::Args {
            sorted_ids: self.part(at.sorted_ids).cast(),
            expert_ids: self.part(at.expert_ids).cast(),
            totals: self.part(at.totals).cast(),
            sorted_weights: if wgmma { self.part(at.sorted_weights).cast() } else { std::ptr::null_mut() },
            positions: std::ptr::null_mut(),
            offsets: if wgmma { self.part(at.offsets).cast() } else { std::ptr::null_mut() },
            expert_counts: if wgmma { self.part(at.expert_counts).cast() } else { std::ptr::null_mut() },
            invalid: std::ptr::null_mut(),
            zero: null,
            zero_bytes: 0,
            topk_ids: o.topk_ids,
            topk_weights: if wgmma { o.topk_weights } else { std::ptr::null() },
            expert_map: o.expert_map,
            num_tokens: o.num_tokens,
            table: std::ptr::null(),
            tokens: shape.tokens as u32,
            top_k: shape.top_k as u32,
            slots: shape.top_k as u32,
            experts: o.global_experts as u32,
            local: shape.experts as u32,
            shared_experts: 0,
            block: self.path.block() as u32,
            items: 0,
            chunks: 0,
            capacity: at.capacity as u32,
            flags: 0,
        };
        // SAFETY: forwarded to the caller.
        unsafe { sort::launch(self.stream, &args, self.part(at.sort)) }
    }

    /// A product on Hopper.
    ///
    /// # Safety
    /// As for [`launch`].
    unsafe fn wgmma(&self, up: bool) -> Result<()> {
        let (o, shape, at) = (self.o, self.shape, self.at);
        let unsupported = || unsupported(self.path, DType::E4m3, self.dtype);
        let (first, second) = wgmma_entries(self.path, self.dtype).ok_or_else(unsupported)?;
        let device = self.stream.device();
        let geometry = wgmma_geometry(self.path, shape.experts, device.properties().multiprocessors);
        let rows = wgmma_kernel::rows(self.path.wgmma().ok_or_else(unsupported)?.0);
        let (activation, alpha, limit) = o.activation.parts();
        let FusedQuantShape { hidden, intermediate, .. } = *shape;
        let (n, k) = if up { (intermediate, hidden) } else { (hidden, intermediate) };
        let w = if up { o.w13 } else { o.w2 };
        let args = wgmma_kernel::Args {
            h: self.part(at.h),
            partial: self.part(at.partial).cast(),
            x: self.part(if up { at.x } else { at.q }).cast(),
            x_row: k,
            x_scales: self.part(if up { at.x_scales } else { at.q_scales }).cast(),
            x_scale_row: k.div_ceil(GROUP),
            map: weight_map(device, w, shape.experts, n, k, up.then_some(o.gate_up), rows)?,
            w_scales: if up { o.w13_scales } else { o.w2_scales },
            sorted_ids: self.part(at.sorted_ids).cast(),
            sorted_weights: self.part(at.sorted_weights).cast(),
            offsets: self.part(at.offsets).cast(),
            expert_counts: self.part(at.expert_counts).cast(),
            topk_ids: o.topk_ids,
            topk_weights: o.topk_weights,
            expert_map: o.expert_map,
            num_tokens: o.num_tokens,
            tokens: shape.tokens as u32,
            top_k: shape.top_k as u32,
            experts: o.global_experts as u32,
            bins: shape.experts as u32,
            n: n as u32,
            k: k as u32,
            layout: if up { o.gate_up.layout() } else { fused::PLAIN },
            activation,
            alpha,
            limit,
        };
        let entry = if up { first } else { second };
        // SAFETY: forwarded to the caller.
        unsafe { self.stream.launch(&entry, &geometry.ok_or_else(unsupported)?, &args) }
    }

    /// A product of [`FusedQuantPath::Tile`].
    ///
    /// # Safety
    /// As for [`launch`].
    unsafe fn tile(&self, weights: DType, up: bool) -> Result<()> {
        let (o, shape, at) = (self.o, self.shape, self.at);
        let (activation, alpha, limit) = o.activation.parts();
        let FusedQuantShape { hidden, intermediate, .. } = *shape;
        let (n, k) = if up { (intermediate, hidden) } else { (hidden, intermediate) };
        let int8 = weights == DType::I8;
        let out = self.part(if up { at.h } else { at.partial });
        let (x, w) = (self.part(if up { at.x } else { at.q }), if up { o.w13 } else { o.w2 });
        let x_scales = self.part(if up { at.x_scales } else { at.q_scales }).cast::<f32>();
        // Tokens that experts smooth differently have a row for each pair.
        let x_divisor = if up && !int8 { shape.top_k as u32 } else { 1 };
        let geometry = tile_geometry(n * if up { o.gate_up.rows() } else { 1 }, at.capacity / self.path.block());
        macro_rules! launch {
            ($module:ident, $f32:ident, $f16:ident, $bf16:ident, $down:ident, $blocks:expr, $scale_row:expr) => {{
                use tile_kernel::$module::*;
                let entry = match (up, self.dtype) {
                    (false, _) => $down::ENTRY,
                    (true, DType::F32) => $f32::ENTRY,
                    (true, DType::F16) => $f16::ENTRY,
                    (true, _) => $bf16::ENTRY,
                };
                let args = Args {
                    out,
                    x: x.cast(),
                    x_row: k,
                    x_scales,
                    x_scale_row: $scale_row,
                    x_divisor,
                    w: w.cast(),
                    w_scales: if up { o.w13_scales } else { o.w2_scales },
                    sorted_ids: self.part(at.sorted_ids).cast(),
                    expert_ids: self.part(at.expert_ids).cast(),
                    topk_weights: o.topk_weights,
                    pairs: shape.pairs() as u32,
                    n: n as u32,
                    k: k as u32,
                    layout: if up { o.gate_up.layout() } else { fused::PLAIN },
                    activation,
                    alpha,
                    limit,
                    blocks: $blocks,
                };
                // SAFETY: forwarded to the caller.
                unsafe { self.stream.launch(&entry, &geometry, &args) }
            }};
        }
        if int8 {
            launch!(
                int8,
                moe_fused_quant_tile_up_i8_f32,
                moe_fused_quant_tile_up_i8_f16,
                moe_fused_quant_tile_up_i8_bf16,
                moe_fused_quant_tile_down_i8,
                0,
                1
            )
        } else {
            launch!(
                e4m3,
                moe_fused_quant_tile_up_e4m3_f32,
                moe_fused_quant_tile_up_e4m3_f16,
                moe_fused_quant_tile_up_e4m3_bf16,
                moe_fused_quant_tile_down_e4m3,
                1,
                k.div_ceil(GROUP)
            )
        }
    }

    /// # Safety
    /// As for [`launch`].
    unsafe fn reduce(&self) -> Result<()> {
        let (o, shape) = (self.o, self.shape);
        let entry = match self.dtype {
            DType::F32 => fused_reduce::moe_fused_reduce_f32::ENTRY,
            DType::F16 => fused_reduce::moe_fused_reduce_f16::ENTRY,
            _ => fused_reduce::moe_fused_reduce_bf16::ENTRY,
        };
        let args = fused_reduce::Args {
            out: o.out,
            partial: self.part(self.at.partial).cast(),
            topk_ids: o.topk_ids,
            expert_map: o.expert_map,
            num_tokens: o.num_tokens,
            out_row: o.out_row,
            tokens: shape.tokens as u32,
            top_k: shape.top_k as u32,
            slots: shape.top_k as u32,
            experts: o.global_experts as u32,
            local: shape.experts as u32,
            shared_experts: 0,
            n: shape.hidden as u32,
        };
        // SAFETY: forwarded to the caller.
        unsafe { self.stream.launch(&entry, &reduce_geometry(shape), &args) }
    }
}

fn unsupported(path: FusedQuantPath, weights: DType, dtype: DType) -> Error {
    let most = wgmma_kernel::MAX_BINS;
    let what = format!(
        "the path {path:?} has no kernel for weights of {weights} and tokens of {dtype}, or for these sizes: `Wgmma..` takes e4m3 and 16-bit \
         floats on Hopper, at most {most} experts and an activation other than `Gelu`, `Wgmma16` at most {} pairs",
        crate::kernels::moe::items::DIRECT_PAIRS
    );
    Error::Unsupported { op: OP, what }
}

/// Launches on raw pointers (layer L1) for tokens of `dtype` and weights of `weights`: sorting unless the path does without, two products,
/// before each of which rows are quantised, and the sum over slots. `path` is not [`FusedQuantPath::Auto`].
///
/// # Errors
/// [`Error::Unsupported`] for a path without kernels for these types, and those of [`Stream::launch`].
///
/// # Safety
/// The pointers are device memory of the documented sizes until the launches are done, `x`, weights and `workspace` and every row of theirs
/// aligned to 16 bytes; `workspace` has [`FusedQuantShape::workspace_bytes`]. No output overlaps another argument. `hidden` and
/// `intermediate` are multiples of 16, nothing is 0, and what the path asks of activation and sizes is met.
pub unsafe fn launch(
    stream: &Stream,
    dtype: DType,
    weights: DType,
    path: FusedQuantPath,
    shape: &FusedQuantShape,
    o: &Operands,
    workspace: *mut c_void,
) -> Result<()> {
    let at = Workspace::new(shape, dtype, path.block());
    let run = Run { stream, dtype, path, shape, o, at, workspace };
    // Whatever follows the first launch may start early: each waits where it has to. Not so the first, which must not overtake what the
    // caller launched before.
    // SAFETY: forwarded to the caller.
    unsafe {
        if path.sorts() {
            run.sort()?;
        }
        run.quantise(weights, false, path.sorts())?;
        for up in [true, false] {
            if path.wgmma().is_some() {
                run.wgmma(up)?;
            } else {
                run.tile(weights, up)?;
            }
            if up {
                run.quantise(weights, true, true)?;
            }
        }
        run.reduce()
    }
}

/// Options of [`fused_quant`].
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
#[must_use]
pub struct FusedQuantOptions<'a> {
    /// What happens between the products.
    pub activation: ExpertActivation,
    /// What the rows of `w13` are.
    pub gate_up: GateUp,
    /// `[experts, H]`, for int8: what tokens are multiplied with before they are quantised for an expert (reciprocals of SmoothQuant's
    /// factors).
    pub smooth13: Option<&'a Tensor<f32>>,
    /// `[experts, I]`, for int8: the same for the second product.
    pub smooth2: Option<&'a Tensor<f32>>,
    /// `[all experts]`: the place in `w13` and `w2` of each expert that `topk_ids` may name, or -1 if it lives on another
    /// device. Without it they are all here.
    pub expert_map: Option<&'a Tensor<i32>>,
    /// `[1]`: how many tokens there are, if fewer than `x` has rows; rows of `out` beyond are left alone.
    pub num_tokens: Option<&'a Tensor<i32>>,
    /// Which kernels.
    pub path: FusedQuantPath,
}

impl<'a> FusedQuantOptions<'a> {
    /// With this activation.
    pub const fn activation(mut self, activation: ExpertActivation) -> Self {
        self.activation = activation;
        self
    }

    /// With this layout of `w13`.
    pub const fn gate_up(mut self, gate_up: GateUp) -> Self {
        self.gate_up = gate_up;
        self
    }

    /// With these smoothing vectors of both products.
    pub const fn smooth(mut self, smooth13: Option<&'a Tensor<f32>>, smooth2: Option<&'a Tensor<f32>>) -> Self {
        self.smooth13 = smooth13;
        self.smooth2 = smooth2;
        self
    }

    /// With some experts elsewhere.
    pub const fn expert_map(mut self, map: &'a Tensor<i32>) -> Self {
        self.expert_map = Some(map);
        self
    }

    /// With a token count in device memory.
    pub const fn num_tokens(mut self, num_tokens: &'a Tensor<i32>) -> Self {
        self.num_tokens = Some(num_tokens);
        self
    }

    /// With these kernels.
    pub const fn path(mut self, path: FusedQuantPath) -> Self {
        self.path = path;
        self
    }
}

/// `out[t] = Σ w · down(act(gate_up(x[t])))` over the slots of token `t`, with 8-bit weights.
///
/// `x` and `out`: `[tokens, H]`, each dense in its last dimension, rows of `x` at multiples of 16 bytes; `w13`: `[experts, 2 I, H]`
/// ([`GateUp`]); `w2`: `[experts, H, I]`; `topk_ids` and `topk_weights`: `[tokens, top_k]`; all but `x` and `out` contiguous. `H` and `I` are
/// multiples of 16. Scales:
///
/// | weights | `w13.scales` | `w2.scales` | activations |
/// | --- | --- | --- | --- |
/// | e4m3 | `[experts, ceil(2 I / 128), ceil(H / 128)]` | `[experts, ceil(H / 128), ceil(I / 128)]` | of each row and 128 columns, dynamic |
/// | int8 | `[experts, 2 I]` | `[experts, H]` | of each row, dynamic, after smoothing |
///
/// Ids of -1, of experts that live elsewhere and out of range contribute nothing. `workspace` has [`FusedQuantShape::workspace_bytes`]; what is
/// in it does not matter. Sums are in f32; the row between the products is rounded to `T` after the activation, then quantised; results are
/// weighted and added over the slots in their order in f32, with one rounding at the end. Tokens: f32, f16, bf16.
///
/// # Errors
/// [`Shape`](Error::Shape), [`Stride`](Error::Stride), [`Value`](Error::Value), [`Alignment`](Error::Alignment),
/// [`Overlap`](Error::Overlap), [`WrongDevice`](Error::WrongDevice), [`DType`](Error::DType);
/// [`Unsupported`](Error::Unsupported) if `options.path` asks for kernels that do not take these tensors, and for smoothing of e4m3.
#[allow(clippy::too_many_arguments)]
pub fn fused_quant<T: Float, Q: QuantisedElement>(
    stream: &Stream,
    out: &mut Tensor<T>,
    x: &Tensor<T>,
    w13: Quantised<'_, Q>,
    w2: Quantised<'_, Q>,
    topk_ids: &Tensor<i32>,
    topk_weights: &Tensor<f32>,
    options: &FusedQuantOptions<'_>,
    workspace: &mut Tensor<u8>,
) -> Result<()> {
    let mut call = Call::new(OP, stream);
    call.dtype_among("x", T::DTYPE, &[DType::F32, DType::F16, DType::Bf16])?;
    let [tokens, hidden] = *x.shape() else {
        return Err(call.bad_shape("x", x.shape(), "[tokens, hidden]"));
    };
    let [experts, _, intermediate] = *w2.values.shape() else {
        return Err(call.bad_shape("w2", w2.values.shape(), "[experts, hidden, intermediate]"));
    };
    let [_, top_k] = *topk_ids.shape() else {
        return Err(call.bad_shape("topk_ids", topk_ids.shape(), "[tokens, top_k]"));
    };
    let int8 = Q::DTYPE == DType::I8;
    let rows = options.gate_up.rows() * intermediate;
    let shape = FusedQuantShape::new(tokens, top_k, experts, hidden, intermediate);
    call.same_shape("out", out.shape(), &[tokens, hidden])?;
    call.same_shape("topk_ids", topk_ids.shape(), &[tokens, top_k])?;
    call.same_shape("topk_weights", topk_weights.shape(), &[tokens, top_k])?;
    call.same_shape("w13", w13.values.shape(), &[experts, rows, hidden])?;
    for (arg, w, n, k) in [("w13.scales", w13, rows, hidden), ("w2.scales", w2, hidden, intermediate)] {
        if int8 {
            call.same_shape(arg, w.scales.shape(), &[experts, n])?;
        } else {
            call.same_shape(arg, w.scales.shape(), &[experts, n.div_ceil(GROUP), k.div_ceil(GROUP)])?;
        }
        call.contiguous(arg, w.scales)?;
    }
    call.same_shape("w2", w2.values.shape(), &[experts, hidden, intermediate])?;
    call.contiguous("w13", w13.values)?;
    call.contiguous("w2", w2.values)?;
    let smooth = [("smooth13", options.smooth13, hidden), ("smooth2", options.smooth2, intermediate)];
    for (arg, smooth, width) in smooth {
        if let Some(smooth) = smooth {
            if !int8 {
                return Err(Error::Unsupported { op: OP, what: "no smoothing with weights of e4m3".into() });
            }
            call.same_shape(arg, smooth.shape(), &[experts, width])?;
            call.contiguous(arg, smooth)?;
        }
    }
    let (xs, outs) = (call.rows("x", x)?, call.rows("out", out)?);
    call.contiguous("topk_ids", topk_ids)?;
    call.contiguous("topk_weights", topk_weights)?;
    let global_experts = match options.expert_map {
        Some(map) => {
            let [n] = *map.shape() else {
                return Err(call.bad_shape("expert_map", map.shape(), "[all experts]"));
            };
            call.contiguous("expert_map", map)?;
            n
        }
        None => experts,
    };
    if let Some(n) = options.num_tokens {
        call.same_shape("num_tokens", n.shape(), &[1])?;
    }
    for (arg, n) in [("w2", experts), ("expert_map", global_experts)] {
        call.value(n <= sort::MAX_EXPERTS, arg, format!("at most {} experts", sort::MAX_EXPERTS), n)?;
    }
    for (arg, width) in [("x", hidden), ("w2", intermediate)] {
        call.value(width.is_multiple_of(16), arg, "a width that is a multiple of 16", width)?;
    }
    if let ExpertActivation::SwigluOai { alpha, limit } = options.activation {
        call.value(!alpha.is_nan(), "activation", "an alpha that is a number", alpha)?;
        call.value(limit >= 0.0, "activation", "a limit that is not negative", limit)?;
    }
    // The kernels count pairs, rows and columns in 32 bits.
    call.count("topk_ids", tokens.saturating_mul(top_k))?;
    call.count("w13", rows)?;
    call.count("x", hidden)?;
    let operands = Operands {
        out: call.write("out", out)?,
        out_row: outs.stride,
        x: call.read("x", x)?,
        x_row: xs.stride,
        w13: call.read("w13", w13.values)?,
        w13_scales: call.read("w13.scales", w13.scales)?.cast(),
        w2: call.read("w2", w2.values)?,
        w2_scales: call.read("w2.scales", w2.scales)?.cast(),
        smooth13: call.read_opt("smooth13", options.smooth13)?.cast(),
        smooth2: call.read_opt("smooth2", options.smooth2)?.cast(),
        topk_ids: call.read("topk_ids", topk_ids)?.cast(),
        topk_weights: call.read("topk_weights", topk_weights)?.cast(),
        expert_map: call.read_opt("expert_map", options.expert_map)?.cast(),
        num_tokens: call.read_opt("num_tokens", options.num_tokens)?.cast(),
        global_experts,
        gate_up: options.gate_up,
        activation: options.activation,
    };
    let needed = shape.workspace_bytes(T::DTYPE);
    call.contiguous("workspace", workspace)?;
    call.value(workspace.len() >= needed, "workspace", format!("at least {needed} bytes"), workspace.len())?;
    let workspace = call.write("workspace", workspace)?;
    call.check_overlap()?;
    for (arg, address) in [
        ("workspace", workspace as usize),
        ("x", operands.x as usize),
        ("x", if tokens > 1 { operands.x as usize + xs.stride * T::DTYPE.size() } else { 0 }),
        ("w13", operands.w13 as usize),
        ("w2", operands.w2 as usize),
    ] {
        if !address.is_multiple_of(16) {
            return Err(Error::Alignment { op: OP, arg, expected: 16, address });
        }
    }
    if tokens == 0 || hidden == 0 {
        return Ok(());
    }
    let path = resolve(stream.device(), Q::DTYPE, T::DTYPE, &shape, options)?;
    // Nothing to multiply: the sum over slots alone, of nothing.
    let block = path.block();
    let blocks = sort::capacity(shape.pairs(), experts, block, false) / block;
    call.value(
        path.wgmma().is_some() || blocks <= 65535,
        "topk_ids",
        format!("at most 65535 blocks of {block} pairs"),
        blocks,
    )?;
    if shape.pairs() == 0 || experts == 0 || intermediate == 0 {
        return stream_zeros(stream, &shape, T::DTYPE, &operands, workspace);
    }
    // SAFETY: shapes, device, overlap, and the path's alignment were checked above.
    unsafe { launch(stream, T::DTYPE, Q::DTYPE, path, &shape, &operands, workspace) }
}

/// The result where nothing contributes: tokens without slots.
fn stream_zeros(
    stream: &Stream,
    shape: &FusedQuantShape,
    dtype: DType,
    o: &Operands,
    workspace: *mut c_void,
) -> Result<()> {
    let none = FusedQuantShape { top_k: 0, ..*shape };
    let at = Workspace::new(&none, dtype, tile_kernel::PAIRS);
    let run = Run { stream, dtype, path: FusedQuantPath::Tile, shape: &none, o, at, workspace };
    // SAFETY: without slots only `out` is written, which was checked.
    unsafe { run.reduce() }
}

/// The path for these types and sizes.
fn resolve(
    device: &Device,
    weights: DType,
    dtype: DType,
    shape: &FusedQuantShape,
    options: &FusedQuantOptions<'_>,
) -> Result<FusedQuantPath> {
    let wgmma = weights == DType::E4m3
        && dtype != DType::F32
        && device.properties().compute_capability == (9, 0)
        && shape.experts <= wgmma_kernel::MAX_BINS
        && options.activation != ExpertActivation::Gelu;
    let direct = shape.pairs() <= crate::kernels::moe::items::DIRECT_PAIRS;
    match options.path {
        FusedQuantPath::Auto if wgmma => Ok(FusedQuantPath::choose(shape.pairs(), shape.experts)),
        FusedQuantPath::Auto | FusedQuantPath::Tile => Ok(FusedQuantPath::Tile),
        path if !wgmma || (path == FusedQuantPath::Wgmma16 && !direct) => Err(unsupported(path, weights, dtype)),
        path => Ok(path),
    }
}
