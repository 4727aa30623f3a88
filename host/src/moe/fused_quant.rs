//! The fused block of experts with 8-bit weights: `out[t] = Σ w · down(act(gate_up(x[t])))`.
//!
//! Tokens come and go as f32, f16 or bf16; both products multiply 8-bit numbers, to which rows are quantised on the way, with scales
//!
//! * of blocks, e4m3: of 128 × 128 weights, and of each row and 128 columns of activations (DeepSeek-AI, *DeepSeek-V3 Technical Report*,
//!   2024, section 3.3). Sums of 128 products are multiplied with their scales and added up in f32.
//! * of rows, e4m3 or int8: of each row of weights or each expert, and of each row of activations, dynamic; activations may be
//!   multiplied with a smoothing vector of their expert first (Xiao et al., *SmoothQuant*, 2022).
//!
//! One operation, several kernels; [`FusedQuantPath`] says which, chosen by shape, alignment and device, never by the contents. Every
//! path is deterministic unless [`FusedQuantOptions::unordered`] allows otherwise, and by one path a token's result depends on no other token; `Auto` chooses by their number, too.

use super::block::{self, Block, Description, dense, first_weights};
use super::fused::{
    ExpertActivation, Front, FusedPath, FusedShape, GateUp, KEPT_BYTES, STRIPED_PAIRS, adds_up, check_blocks, given_up,
    launch_number, numbers_rows, once_read, reduce_entry, stripe, striped_bytes, sum_across, sum_geometry, takes_sums,
    weight_map,
};
use super::{shuffle, sort};
use crate::check::{Call, after, most, product};
use crate::device::{Device, Geometry, Stream};
use crate::error::{Error, Result};
use crate::gemm::linear_quant::check_depth;
use crate::gemm::{Quantised, QuantisedElement};
use crate::kernels::moe::fused_quant_few as few_kernel;
use crate::kernels::moe::fused_quant_rows as rows_kernel;
use crate::kernels::moe::fused_quant_rows_wgmma as rows_wgmma_kernel;
use crate::kernels::moe::fused_quant_tile as tile_kernel;
use crate::kernels::moe::fused_quant_wgmma as wgmma_kernel;
use crate::kernels::moe::fused_tile;
use crate::kernels::moe::{fused, fused_reduce, fused_wgmma, items, progress};
use crate::kernels::row::GROUP;
use crate::kernels::scales as kinds;
use crate::tensor::Tensor;
use cuda_std::tma::{Swizzle, TensorMap, TensorMapDescription};
use cuda_std::{DType, Element, Entry, Float};
use std::ffi::c_void;

const OP: &str = "moe::fused_quant";
/// Up to how many pairs, and how many of an expert, [`FusedQuantPath::Wgmma16`] is best on an H200. Its items are of 64 columns and one expert: where
/// `intermediate` is small, those of the second product are short, and there are many. With scales of blocks it sorts more than [`items::DIRECT_PAIRS`].
const fn few(scales: QuantScales, intermediate: usize) -> [[usize; 2]; 2] {
    match (scales, intermediate) {
        (QuantScales::Blocks, 0..384) => [[64, 4]; 2],
        (QuantScales::Blocks, 384..1024) => [[items::DIRECT_PAIRS, 4], [64, 6]],
        (QuantScales::Blocks, _) => [[usize::MAX, 4], [64, 6]],
        (QuantScales::Rows, 0..384) => [[32, 3]; 2],
        (QuantScales::Rows, _) => [[96, 3]; 2],
    }
}

/// From how many pairs of an expert on [`FusedQuantPath::Wgmma256`] is best.
const TALL: usize = 160;
/// The most experts whose tables have room beside its stages.
const TALL_BINS: usize = 900;
/// The same of [`FusedQuantPath::Wgmma160`] with scales of rows.
const ROWS_BINS: usize = 536;
const _: () = {
    let wide = FusedQuantPath::Wgmma160;
    assert!(wide.takes_rows(0, ROWS_BINS) && !wide.takes_rows(0, ROWS_BINS + 1));
    let tall = FusedQuantPath::Wgmma256.wgmma().expect("a path of Hopper's");
    let (up, down) =
        (wgmma_kernel::shared_bytes(tall, true, TALL_BINS), wgmma_kernel::shared_bytes(tall, false, TALL_BINS));
    assert!(up <= fused_wgmma::MAX_SHARED_BYTES && down <= fused_wgmma::MAX_SHARED_BYTES);
};

/// Up to how many bytes of `h` stay in the second-level cache, as far as they have room, until they have been quantised, and are given up then. Measured on an H100: 0.4 to 1.2 % less for
/// the block with 6 to 134 MB, nothing with 235 MB.
const GIVEN_UP_BYTES: usize = 160 << 20;

/// The kernels of [`fused_quant`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum FusedQuantPath {
    /// By shape, element types and device.
    #[default]
    Auto,
    /// Tiles on the tensor cores of sm_80 and later, 32 pairs of an expert at a time.
    Tile32,
    /// [`Tile32`](Self::Tile32), 128 at a time.
    Tile128,
    /// Hopper's matrix products and copy engine, tokens of f16 or bf16: up to 16 pairs of an expert at a time. At most 128 pairs in all, without
    /// sorting; with scales of blocks any number, sorted if they are more. Rows of tokens end before 2^35 elements; with scales of rows pairs times the square of the larger
    /// width stays below 2^46 (128 pairs: a width of 741,376). At most 1024 experts on the device, any activation but [`ExpertActivation::Gelu`].
    Wgmma16,
    /// Up to 64 pairs at a time, any number in all, sorted; otherwise as [`Wgmma16`](Self::Wgmma16).
    Wgmma64,
    /// [`Wgmma64`](Self::Wgmma64), up to 160 at a time with scales of blocks, of rows 176 and at most 536 experts.
    Wgmma160,
    /// [`Wgmma64`](Self::Wgmma64), up to 256 at a time, for scales of blocks. Gates and values in halves: `intermediate` is a multiple of 64. At most 900 experts.
    Wgmma256,
}

/// What scales are of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum QuantScales {
    /// Of 128 × 128 weights, and of each row and 128 columns of activations.
    Blocks,
    /// Of rows of weights or whole experts, and of rows of activations.
    Rows,
}

impl FusedQuantPath {
    /// Pairs of an expert that are neighbours in the sorted list: the block size of sorting.
    pub(super) const fn block(self) -> usize {
        match self {
            FusedQuantPath::Auto => fused_tile::pairs(8),
            _ => match self.pair_tiles() {
                Some(tiles) => fused_tile::pairs(tiles),
                None => wgmma_kernel::SORT_BLOCK,
            },
        }
    }

    /// Tiles of 8 pairs of a warp, of a path for every GPU.
    const fn pair_tiles(self) -> Option<usize> {
        match self {
            FusedQuantPath::Tile32 => Some(2),
            FusedQuantPath::Tile128 => Some(8),
            _ => None,
        }
    }

    /// Tiles of 64 rows of weights of a warpgroup, pairs at a time, lines of a stage, and stages, of a path on Hopper with scales of blocks, unless it is
    /// one for [few](Self::is_few) tokens. As in the table of instances.
    const fn wgmma(self) -> Option<[usize; 4]> {
        match self {
            FusedQuantPath::Wgmma64 => Some([1, 64, 2, 4]),
            FusedQuantPath::Wgmma160 => Some([1, 160, 1, 5]),
            FusedQuantPath::Wgmma256 => Some([1, 256, 1, 4]),
            _ => None,
        }
    }

    /// The path of [16-bit floats](super::fused) whose items and stages a path on Hopper has with scales of rows.
    const fn with_rows(self) -> Option<FusedPath> {
        match self {
            FusedQuantPath::Wgmma16 => Some(FusedPath::Wgmma16),
            FusedQuantPath::Wgmma64 => Some(FusedPath::Wgmma64),
            FusedQuantPath::Wgmma160 => Some(FusedPath::Wgmma176),
            _ => None,
        }
    }

    /// Whether a path on Hopper takes so many pairs of so many experts with scales of rows.
    const fn takes_rows(self, pairs: usize, bins: usize) -> bool {
        match self.with_rows() {
            Some(path) => {
                path.has_room_for(bins, true)
                    && (!matches!(self, FusedQuantPath::Wgmma16) || pairs <= items::DIRECT_PAIRS)
            }
            None => false,
        }
    }

    /// Blocks of a cluster of the first product (`up`) or the second with scales of blocks, which share rows of activations. As in the table of instances.
    const fn share(self, up: bool) -> u32 {
        match self {
            FusedQuantPath::Wgmma160 | FusedQuantPath::Wgmma256 => 2,
            FusedQuantPath::Wgmma64 if up => 2,
            _ => 1,
        }
    }

    /// Whether quantised rows lie in the order of the sorted list; then the first product quantises its results.
    const fn in_order(self, scales: QuantScales) -> bool {
        matches!(scales, QuantScales::Blocks) && self.wgmma().is_some()
    }

    /// Whether the second product starts while the first still runs.
    const fn overlaps(self, scales: QuantScales) -> bool {
        self.in_order(scales) && matches!(self, FusedQuantPath::Wgmma160 | FusedQuantPath::Wgmma256)
    }

    /// Whether the second product can round each slot's result.
    const fn rounds(self, scales: QuantScales) -> bool {
        match self {
            FusedQuantPath::Wgmma64 => matches!(scales, QuantScales::Blocks),
            _ => matches!(self, FusedQuantPath::Wgmma160 | FusedQuantPath::Wgmma256),
        }
    }

    const fn is_wgmma(self) -> bool {
        !matches!(self, FusedQuantPath::Auto | FusedQuantPath::Tile32 | FusedQuantPath::Tile128)
    }

    /// Whether the products quantise rows themselves, which are not to be smoothed.
    const fn is_few(self) -> bool {
        matches!(self, FusedQuantPath::Wgmma16)
    }

    /// Whether so many pairs are sorted.
    const fn sorts(self, pairs: usize) -> bool {
        !matches!(self, FusedQuantPath::Wgmma16) || pairs > items::DIRECT_PAIRS
    }

    /// The path on Hopper that suits so many pairs of so many experts; `tall`: whether [`Wgmma256`](Self::Wgmma256) takes them.
    const fn choose(scales: QuantScales, shape: &FusedShape, tall: bool) -> Self {
        let (pairs, bins) = (shape.pairs(), shape.bins());
        let [a, b] = few(scales, shape.intermediate);
        if suits(a, pairs, bins) || suits(b, pairs, bins) {
            FusedQuantPath::Wgmma16
        } else if pairs <= product(&[48, bins]) {
            FusedQuantPath::Wgmma64
        } else if tall && pairs >= product(&[TALL, bins]) {
            FusedQuantPath::Wgmma256
        } else if matches!(scales, QuantScales::Rows) && !FusedQuantPath::Wgmma160.takes_rows(pairs, bins) {
            FusedQuantPath::Wgmma64
        } else {
            FusedQuantPath::Wgmma160
        }
    }
}

/// See [`few`].
const fn suits([most, each]: [usize; 2], pairs: usize, bins: usize) -> bool {
    pairs <= most && pairs <= product(&[each, bins])
}

impl FusedShape {
    /// Bytes of workspace of [`fused_quant`] for tokens of an element type, enough for every path, any weights and fewer tokens; the
    /// largest number for sizes that none takes.
    pub const fn quant_workspace_bytes(&self, dtype: DType) -> usize {
        let (hopper, portable) = (wgmma_kernel::SORT_BLOCK, FusedQuantPath::Tile128.block());
        most(Workspace::new(self, dtype, hopper).bytes, Workspace::new(self, dtype, portable).bytes)
    }
}

/// Where the parts of the workspace are, in bytes.
#[derive(Clone, Copy, Debug)]
struct Workspace {
    /// Quantised tokens and their scales.
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
    positions: usize,
    offsets: usize,
    expert_counts: usize,
    /// Words that say how far the first product has come.
    progress: usize,
    /// What is left of each stripe of the second one.
    left: usize,
    /// Elements of `sorted_ids`.
    capacity: usize,
    /// From group to group of scales in the order of the sorted list.
    scale_group: usize,
    bytes: usize,
}

impl Workspace {
    const fn new(shape: &FusedShape, dtype: DType, block: usize) -> Self {
        let (pairs, bins) = (shape.pairs(), shape.bins());
        let capacity = sort::capacity(pairs, bins, block, false);
        // Rows are those of pairs, or of places of the sorted list of the paths on Hopper.
        let rows = if block == wgmma_kernel::SORT_BLOCK && capacity > pairs { capacity } else { pairs };
        let scale_group = match rows.saturating_add(wgmma_kernel::BEYOND).checked_next_multiple_of(4) {
            Some(group) => group,
            None => usize::MAX,
        };
        let x = Front::BYTES;
        let x_scales = after(x, product(&[rows, shape.hidden]));
        let h = after(x_scales, product(&[scale_group, shape.hidden.div_ceil(GROUP), 4]));
        let q = after(h, product(&[rows, shape.intermediate, dtype.size()]));
        let q_scales = after(q, product(&[rows, shape.intermediate]));
        let partial = after(q_scales, product(&[scale_group, shape.intermediate.div_ceil(GROUP), 4]));
        let sorted_ids = after(partial, product(&[pairs, shape.hidden, 4]));
        let expert_ids = after(sorted_ids, product(&[capacity, 4]));
        let totals = after(expert_ids, product(&[capacity / block, 4]));
        let sort = after(totals, 4);
        let sorted_weights = after(sort, sort::workspace_bytes(pairs, bins));
        let positions = after(sorted_weights, product(&[capacity, 4]));
        let offsets = after(positions, product(&[pairs, 4]));
        let expert_counts = after(offsets, product(&[bins.saturating_add(1), 4]));
        let progress = after(expert_counts, product(&[bins, 4]));
        let left = after(progress, progress::WORDS * 4);
        let bytes = after(left, progress::MAX_STRIPES * 4);
        Self {
            x,
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
            positions,
            offsets,
            expert_counts,
            progress,
            left,
            capacity,
            scale_group,
            bytes,
        }
    }
}

/// The entries of the products on Hopper with scales of blocks for weights and tokens of these types: the first and the second.
pub const fn wgmma_entries(
    path: FusedQuantPath,
    weights: DType,
    scales: QuantScales,
    dtype: DType,
) -> Option<(Entry<wgmma_kernel::Args>, Entry<wgmma_kernel::Args>)> {
    use wgmma_kernel::*;
    macro_rules! entries {
        ($bf16:ident, $f16:ident, $down:ident) => {
            match dtype {
                DType::Bf16 => ($bf16::ENTRY, $down::ENTRY),
                DType::F16 => ($f16::ENTRY, $down::ENTRY),
                _ => return None,
            }
        };
    }
    Some(match (path, weights, scales) {
        (FusedQuantPath::Wgmma64, DType::E4m3, QuantScales::Blocks) => entries!(
            moe_fused_quant_wgmma_up_t64_blocks_e4m3_bf16,
            moe_fused_quant_wgmma_up_t64_blocks_e4m3_f16,
            moe_fused_quant_wgmma_down_t64_blocks_e4m3
        ),
        (FusedQuantPath::Wgmma160, DType::E4m3, QuantScales::Blocks) => entries!(
            moe_fused_quant_wgmma_up_t160_blocks_e4m3_bf16,
            moe_fused_quant_wgmma_up_t160_blocks_e4m3_f16,
            moe_fused_quant_wgmma_down_t160_blocks_e4m3
        ),
        (FusedQuantPath::Wgmma256, DType::E4m3, QuantScales::Blocks) => entries!(
            moe_fused_quant_wgmma_up_t256_blocks_e4m3_bf16,
            moe_fused_quant_wgmma_up_t256_blocks_e4m3_f16,
            moe_fused_quant_wgmma_down_t256_blocks_e4m3
        ),
        _ => return None,
    })
}

/// The entries of those second products that round each slot's result and keep or add it; see [`FusedQuantOptions::rounded_slots`]. Where the path has none that adds the first again.
pub const fn rounded_entries(
    path: FusedQuantPath,
    weights: DType,
    scales: QuantScales,
    dtype: DType,
) -> Option<[Entry<wgmma_kernel::Args>; 2]> {
    use wgmma_kernel::*;
    macro_rules! entries {
        ($bf16:ident, $f16:ident, $added_bf16:ident, $added_f16:ident) => {
            match dtype {
                DType::Bf16 => [$bf16::ENTRY, $added_bf16::ENTRY],
                DType::F16 => [$f16::ENTRY, $added_f16::ENTRY],
                _ => return None,
            }
        };
    }
    Some(match (path, weights, scales) {
        (FusedQuantPath::Wgmma64, DType::E4m3, QuantScales::Blocks) => entries!(
            moe_fused_quant_wgmma_down_rounded_t64_blocks_e4m3_bf16,
            moe_fused_quant_wgmma_down_rounded_t64_blocks_e4m3_f16,
            moe_fused_quant_wgmma_down_rounded_t64_blocks_e4m3_bf16,
            moe_fused_quant_wgmma_down_rounded_t64_blocks_e4m3_f16
        ),
        (FusedQuantPath::Wgmma160, DType::E4m3, QuantScales::Blocks) => entries!(
            moe_fused_quant_wgmma_down_rounded_t160_blocks_e4m3_bf16,
            moe_fused_quant_wgmma_down_rounded_t160_blocks_e4m3_f16,
            moe_fused_quant_wgmma_down_added_t160_blocks_e4m3_bf16,
            moe_fused_quant_wgmma_down_added_t160_blocks_e4m3_f16
        ),
        (FusedQuantPath::Wgmma256, DType::E4m3, QuantScales::Blocks) => entries!(
            moe_fused_quant_wgmma_down_rounded_t256_blocks_e4m3_bf16,
            moe_fused_quant_wgmma_down_rounded_t256_blocks_e4m3_f16,
            moe_fused_quant_wgmma_down_added_t256_blocks_e4m3_bf16,
            moe_fused_quant_wgmma_down_added_t256_blocks_e4m3_f16
        ),
        _ => return None,
    })
}

/// The entries of the products on Hopper with scales of rows for weights and tokens of these types, in clusters of so many blocks: the first, the second,
/// and the second that rounds each slot's result and keeps or adds it, or where the path has none the second again.
pub const fn rows_wgmma_entries(
    path: FusedQuantPath,
    weights: DType,
    dtype: DType,
    cluster: usize,
) -> Option<[Entry<rows_wgmma_kernel::Args>; 4]> {
    use rows_wgmma_kernel::*;
    macro_rules! entries {
        ($bf16:ident, $f16:ident, $down:ident) => {
            entries!($bf16, $f16, $down, $down, $down, $down, $down)
        };
        ($bf16:ident, $f16:ident, $down:ident, $rounded_bf16:ident, $rounded_f16:ident, $added_bf16:ident, $added_f16:ident) => {
            match dtype {
                DType::Bf16 => [$bf16::ENTRY, $down::ENTRY, $rounded_bf16::ENTRY, $added_bf16::ENTRY],
                DType::F16 => [$f16::ENTRY, $down::ENTRY, $rounded_f16::ENTRY, $added_f16::ENTRY],
                _ => return None,
            }
        };
    }
    Some(match (path, weights, cluster) {
        (FusedQuantPath::Wgmma16, DType::E4m3, _) => entries!(
            moe_fused_quant_rows_wgmma_up_t16_e4m3_bf16,
            moe_fused_quant_rows_wgmma_up_t16_e4m3_f16,
            moe_fused_quant_rows_wgmma_down_t16_e4m3
        ),
        (FusedQuantPath::Wgmma16, DType::I8, _) => entries!(
            moe_fused_quant_rows_wgmma_up_t16_i8_bf16,
            moe_fused_quant_rows_wgmma_up_t16_i8_f16,
            moe_fused_quant_rows_wgmma_down_t16_i8
        ),
        (FusedQuantPath::Wgmma64, DType::E4m3, _) => entries!(
            moe_fused_quant_rows_wgmma_up_t64_e4m3_bf16,
            moe_fused_quant_rows_wgmma_up_t64_e4m3_f16,
            moe_fused_quant_rows_wgmma_down_t64_e4m3
        ),
        (FusedQuantPath::Wgmma64, DType::I8, _) => entries!(
            moe_fused_quant_rows_wgmma_up_t64_i8_bf16,
            moe_fused_quant_rows_wgmma_up_t64_i8_f16,
            moe_fused_quant_rows_wgmma_down_t64_i8
        ),
        (FusedQuantPath::Wgmma160, DType::E4m3, 1) => entries!(
            moe_fused_quant_rows_wgmma_up_t176_e4m3_bf16,
            moe_fused_quant_rows_wgmma_up_t176_e4m3_f16,
            moe_fused_quant_rows_wgmma_down_t176_e4m3,
            moe_fused_quant_rows_wgmma_down_rounded_t176_e4m3_bf16,
            moe_fused_quant_rows_wgmma_down_rounded_t176_e4m3_f16,
            moe_fused_quant_rows_wgmma_down_added_t176_e4m3_bf16,
            moe_fused_quant_rows_wgmma_down_added_t176_e4m3_f16
        ),
        (FusedQuantPath::Wgmma160, DType::I8, 1) => entries!(
            moe_fused_quant_rows_wgmma_up_t176_i8_bf16,
            moe_fused_quant_rows_wgmma_up_t176_i8_f16,
            moe_fused_quant_rows_wgmma_down_t176_i8,
            moe_fused_quant_rows_wgmma_down_rounded_t176_i8_bf16,
            moe_fused_quant_rows_wgmma_down_rounded_t176_i8_f16,
            moe_fused_quant_rows_wgmma_down_added_t176_i8_bf16,
            moe_fused_quant_rows_wgmma_down_added_t176_i8_f16
        ),
        (FusedQuantPath::Wgmma160, DType::E4m3, 2) => entries!(
            moe_fused_quant_rows_wgmma_up_t176_two_e4m3_bf16,
            moe_fused_quant_rows_wgmma_up_t176_two_e4m3_f16,
            moe_fused_quant_rows_wgmma_down_t176_two_e4m3,
            moe_fused_quant_rows_wgmma_down_rounded_t176_two_e4m3_bf16,
            moe_fused_quant_rows_wgmma_down_rounded_t176_two_e4m3_f16,
            moe_fused_quant_rows_wgmma_down_added_t176_two_e4m3_bf16,
            moe_fused_quant_rows_wgmma_down_added_t176_two_e4m3_f16
        ),
        _ => return None,
    })
}

/// The entries of the products of [`FusedQuantPath::Wgmma16`] without smoothing, which quantise rows themselves, for weights and tokens of these types, with
/// a sorted list (scales of blocks) or without: the first and the second.
pub const fn few_entries(
    weights: DType,
    scales: QuantScales,
    dtype: DType,
    sorted: bool,
) -> Option<(Entry<few_kernel::Args>, Entry<few_kernel::Args>)> {
    use few_kernel::*;
    macro_rules! entries {
        ($up_bf16:ident, $down_bf16:ident, $up_f16:ident, $down_f16:ident) => {
            match dtype {
                DType::Bf16 => ($up_bf16::ENTRY, $down_bf16::ENTRY),
                DType::F16 => ($up_f16::ENTRY, $down_f16::ENTRY),
                _ => return None,
            }
        };
    }
    Some(match (weights, scales, sorted) {
        (DType::E4m3, QuantScales::Blocks, false) => entries!(
            moe_fused_quant_few_up_bf16,
            moe_fused_quant_few_down_bf16,
            moe_fused_quant_few_up_f16,
            moe_fused_quant_few_down_f16
        ),
        (DType::E4m3, QuantScales::Blocks, true) => entries!(
            moe_fused_quant_few_up_sorted_bf16,
            moe_fused_quant_few_down_sorted_bf16,
            moe_fused_quant_few_up_sorted_f16,
            moe_fused_quant_few_down_sorted_f16
        ),
        (DType::E4m3, QuantScales::Rows, false) => entries!(
            moe_fused_quant_few_up_rows_e4m3_bf16,
            moe_fused_quant_few_down_rows_e4m3_bf16,
            moe_fused_quant_few_up_rows_e4m3_f16,
            moe_fused_quant_few_down_rows_e4m3_f16
        ),
        (DType::I8, QuantScales::Rows, false) => entries!(
            moe_fused_quant_few_up_rows_i8_bf16,
            moe_fused_quant_few_down_rows_i8_bf16,
            moe_fused_quant_few_up_rows_i8_f16,
            moe_fused_quant_few_down_rows_i8_f16
        ),
        _ => return None,
    })
}

/// How to launch those, with so many experts and multiprocessors.
pub const fn few_geometry(scales: QuantScales, experts: usize, multiprocessors: u32) -> Geometry {
    let bytes = few_kernel::shared_bytes(few_kernel::LINES, few_kernel::STAGES, kind(scales), experts);
    Geometry::linear(multiprocessors, few_kernel::THREADS as u32).shared_bytes(bytes as u32).dependent()
}

/// Their number for the kernels.
const fn kind(scales: QuantScales) -> u32 {
    match scales {
        QuantScales::Blocks => kinds::BLOCKS,
        QuantScales::Rows => kinds::ROWS,
    }
}

/// How to launch the first product on Hopper (`up`) or the second with scales of blocks, with so many experts and multiprocessors: as many blocks of both.
pub const fn wgmma_geometry(path: FusedQuantPath, up: bool, experts: usize, multiprocessors: u32) -> Option<Geometry> {
    let Some(tile) = path.wgmma() else {
        return None;
    };
    let bytes = wgmma_kernel::shared_bytes(tile, up, experts);
    let most = path.share(true);
    let blocks = if multiprocessors < most { most } else { multiprocessors / most * most };
    let geometry = Geometry::linear(blocks, wgmma_kernel::THREADS as u32).shared_bytes(bytes as u32);
    Some(geometry.cluster(path.share(up)).dependent())
}

/// How to launch both products on Hopper with scales of rows on so many multiprocessors, and the blocks of a cluster: 1 or 2.
pub const fn rows_wgmma_geometry(
    path: FusedQuantPath,
    weights: DType,
    shape: &FusedShape,
    multiprocessors: u32,
) -> Option<(Geometry, usize)> {
    let Some(path) = path.with_rows() else {
        return None;
    };
    let cluster = if matches!(weights, DType::I8) { 1 } else { path.cluster(shape, multiprocessors) };
    Some((path.wgmma_geometry(cluster, shape.bins(), true, multiprocessors).dependent(), cluster))
}

/// How to launch a product of [`FusedQuantPath::Tile32`] or [`FusedQuantPath::Tile128`] of `rows` rows of weights, for so many blocks of pairs.
pub const fn tile_geometry(path: FusedQuantPath, rows: usize, blocks: usize) -> Option<Geometry> {
    let Some(pair_tiles) = path.pair_tiles() else {
        return None;
    };
    let grid = product(&[rows.div_ceil(tile_kernel::ROWS), blocks]) as u32;
    let geometry = Geometry::linear(grid, tile_kernel::THREADS as u32);
    Some(geometry.shared_bytes(tile_kernel::shared_bytes(pair_tiles) as u32).dependent())
}

/// How to quantise so many rows of `n` columns, with a scale for each 128 columns or for each row.
pub const fn rows_geometry(rows: usize, n: usize, scales: QuantScales) -> Geometry {
    if matches!(scales, QuantScales::Rows) {
        let (threads, each) = (rows_kernel::row_threads(n) as u32, rows_kernel::block_rows(n));
        return Geometry::new([rows.div_ceil(each) as u32, 1, 1], [threads, each as u32, 1])
            .shared_bytes(rows_kernel::SHARED_BYTES as u32);
    }
    let groups = rows * n.div_ceil(GROUP);
    Geometry::linear(groups.div_ceil(rows_kernel::GROUPS) as u32, rows_kernel::GROUP_THREADS as u32)
}

/// The entry that quantises rows; `smooths`: after a multiplication with a vector of their expert.
pub const fn rows_entry(
    weights: DType,
    scales: QuantScales,
    smooths: bool,
    dtype: DType,
) -> Option<Entry<rows_kernel::Args>> {
    use rows_kernel::*;
    macro_rules! entry {
        ($f32:ident, $f16:ident, $bf16:ident) => {
            match dtype {
                DType::F32 => $f32::ENTRY,
                DType::F16 => $f16::ENTRY,
                DType::Bf16 => $bf16::ENTRY,
                _ => return None,
            }
        };
    }
    Some(match (weights, scales, smooths) {
        (DType::E4m3, QuantScales::Blocks, false) => {
            entry!(moe_fused_quant_groups_e4m3_f32, moe_fused_quant_groups_e4m3_f16, moe_fused_quant_groups_e4m3_bf16)
        }
        (DType::E4m3, QuantScales::Rows, false) => {
            entry!(moe_fused_quant_rows_e4m3_f32, moe_fused_quant_rows_e4m3_f16, moe_fused_quant_rows_e4m3_bf16)
        }
        (DType::I8, QuantScales::Rows, false) => {
            entry!(moe_fused_quant_rows_i8_f32, moe_fused_quant_rows_i8_f16, moe_fused_quant_rows_i8_bf16)
        }
        (DType::E4m3, QuantScales::Rows, true) => entry!(
            moe_fused_quant_rows_smooth_e4m3_f32,
            moe_fused_quant_rows_smooth_e4m3_f16,
            moe_fused_quant_rows_smooth_e4m3_bf16
        ),
        (DType::I8, QuantScales::Rows, true) => entry!(
            moe_fused_quant_rows_smooth_i8_f32,
            moe_fused_quant_rows_smooth_i8_f16,
            moe_fused_quant_rows_smooth_i8_bf16
        ),
        _ => return None,
    })
}

/// The map of quantised rows `[rows, k]` in the order of the sorted list.
fn row_map(device: &Device, base: *const c_void, rows: usize, k: usize, pairs: usize) -> Result<TensorMap> {
    device.tensor_map(&TensorMapDescription {
        base: base as u64,
        dtype: DType::U8,
        rank: 2,
        dims: [k as u64, rows as u64, 1, 1, 1],
        strides: [k as u64, 0, 0, 0],
        box_dims: [wgmma_kernel::STEP as u32, wgmma_kernel::box_rows(pairs) as u32, 1, 1, 1],
        swizzle: Swizzle::B128,
    })
}

/// Weights of experts: pointers, for [`launch`]. Biases and smoothing vectors may be null.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Experts {
    /// Values of the first product's weights: `[experts, rows · intermediate, hidden]`.
    pub w13: *const c_void,
    /// Their scales, of the kind that [`Operands::scales`] says.
    pub w13_scales: *const f32,
    /// Values of the second product's weights: `[experts, hidden, intermediate]`.
    pub w2: *const c_void,
    /// Their scales, of the same kind.
    pub w2_scales: *const f32,
    /// Bias of the first product, `[experts, rows · intermediate]`, or null.
    pub bias13: *const f32,
    /// Bias of the second product, `[experts, hidden]`, or null.
    pub bias2: *const f32,
    /// Smoothing of the first product's input, `[experts, hidden]`, with scales of rows; or null.
    pub smooth13: *const f32,
    /// Smoothing of the second product's input, `[experts, intermediate]`, with scales of rows; or null.
    pub smooth2: *const f32,
}

impl Experts {
    /// None.
    pub const NONE: Self = Self {
        w13: std::ptr::null(),
        w13_scales: std::ptr::null(),
        w2: std::ptr::null(),
        w2_scales: std::ptr::null(),
        bias13: std::ptr::null(),
        bias2: std::ptr::null(),
        smooth13: std::ptr::null(),
        smooth2: std::ptr::null(),
    };
}

/// Where scales of rows of weights are: from expert to expert and from row to row.
pub type ScaleStrides = (usize, usize);

/// Pointers and scalars of a call, for [`launch`].
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Operands {
    /// Receives the result: `[tokens, hidden]`, rows `out_row` apart.
    pub out: *mut c_void,
    /// From row to row of `out`, in elements.
    pub out_row: usize,
    /// The tokens: `[tokens, hidden]`, rows `x_row` apart.
    pub x: *const c_void,
    /// From row to row of `x`, in elements.
    pub x_row: usize,
    /// Routed experts of this device.
    pub routed: Experts,
    /// Shared experts; [`Experts::NONE`] if there are none.
    pub shared: Experts,
    /// What the scales of all weights are of.
    pub scales: QuantScales,
    /// Where scales of rows of `w13` are, of both kinds of experts.
    pub w13_strides: ScaleStrides,
    /// Where scales of rows of `w2` are, of both kinds of experts.
    pub w2_strides: ScaleStrides,
    /// Experts of each token: `[tokens, top_k]`.
    pub topk_ids: *const i32,
    /// Their weights: `[tokens, top_k]`.
    pub topk_weights: *const f32,
    /// Places of all experts on this device or -1, `[global_experts]`; null if all are here.
    pub expert_map: *const i32,
    /// How many tokens there are, `[1]`; null for all.
    pub num_tokens: *const i32,
    /// Routed experts of all devices.
    pub global_experts: usize,
    /// What the rows of `w13` are.
    pub gate_up: GateUp,
    /// What happens between the products.
    pub activation: ExpertActivation,
    /// Whether results may be added up in any order; see [`FusedQuantOptions::unordered`].
    pub unordered: bool,
    /// Whether results of slots may be rounded; see [`FusedQuantOptions::rounded_slots`].
    pub rounded_slots: bool,
    /// Whether the weights are [shuffled](shuffle::shuffle_weights); not for [`FusedQuantPath::Tile32`] and [`FusedQuantPath::Tile128`].
    pub shuffled: bool,
}

impl Operands {
    /// Null pointers, for the caller to set, with dense rows and all experts here; what may stay null is optional.
    pub const fn new(shape: &FusedShape, scales: QuantScales) -> Self {
        Self {
            out: std::ptr::null_mut(),
            out_row: shape.hidden,
            x: std::ptr::null(),
            x_row: shape.hidden,
            routed: Experts::NONE,
            shared: Experts::NONE,
            scales,
            w13_strides: (0, 0),
            w2_strides: (0, 0),
            topk_ids: std::ptr::null(),
            topk_weights: std::ptr::null(),
            expert_map: std::ptr::null(),
            num_tokens: std::ptr::null(),
            global_experts: shape.experts,
            gate_up: GateUp::Halves,
            activation: ExpertActivation::Silu,
            unordered: false,
            rounded_slots: false,
            shuffled: false,
        }
    }
}

/// One call: what its launches have in common.
struct Run<'a> {
    stream: &'a Stream,
    dtype: DType,
    weights: DType,
    path: FusedQuantPath,
    shape: &'a FusedShape,
    o: &'a Operands,
    at: Workspace,
    workspace: *mut c_void,
}

impl Run<'_> {
    fn part(&self, offset: usize) -> *mut c_void {
        self.workspace.wrapping_byte_add(offset)
    }

    fn unsupported(&self) -> Error {
        unsupported(self.path, self.weights, self.dtype)
    }

    /// Whether tokens are quantised for each expert they go to.
    fn smooths_tokens(&self) -> bool {
        !self.o.routed.smooth13.is_null() || !self.o.shared.smooth13.is_null()
    }

    /// Whether anything is multiplied with a smoothing vector before it is quantised.
    fn smooths(&self) -> bool {
        self.smooths_tokens() || !self.o.routed.smooth2.is_null() || !self.o.shared.smooth2.is_null()
    }

    /// From row to row and from group to group of scales of quantised rows, `n` columns wide.
    fn scale_strides(&self, n: usize) -> (usize, usize) {
        match self.o.scales {
            QuantScales::Rows => (1, 0),
            QuantScales::Blocks if self.path.in_order(self.o.scales) => (1, self.at.scale_group),
            QuantScales::Blocks => (n.div_ceil(GROUP), 1),
        }
    }

    /// Quantises `x`, or `h` (`by_pair`).
    ///
    /// # Safety
    /// As for [`launch`].
    unsafe fn quantise(&self, by_pair: bool) -> Result<()> {
        let (o, shape, at) = (self.o, self.shape, self.at);
        let (x, x_row, n, out, scales, smooth) = if by_pair {
            let n = shape.intermediate;
            (self.part(at.h).cast_const(), n, n, at.q, at.q_scales, [o.routed.smooth2, o.shared.smooth2])
        } else {
            (o.x, o.x_row, shape.hidden, at.x, at.x_scales, [o.routed.smooth13, o.shared.smooth13])
        };
        let (from, rows) = if by_pair {
            (rows_kernel::PAIRS, shape.pairs())
        } else if self.smooths_tokens() {
            (rows_kernel::TOKENS_OF_PAIRS, shape.pairs())
        } else if o.scales == QuantScales::Rows && self.path.sorts(shape.pairs()) {
            // Sorting has nothing to do with them, and it starts when all before it is done.
            (rows_kernel::TOKENS_BESIDE, shape.tokens)
        } else {
            (rows_kernel::TOKENS, shape.tokens)
        };
        let (scale_row, scale_group) = self.scale_strides(n);
        let args = rows_kernel::Args {
            x,
            out: self.part(out).cast(),
            scales: self.part(scales).cast(),
            scale_row,
            scale_group,
            smooth: smooth[0],
            shared_smooth: smooth[1],
            positions: if self.path.in_order(o.scales) { self.part(at.positions).cast() } else { std::ptr::null() },
            topk_ids: o.topk_ids,
            expert_map: o.expert_map,
            num_tokens: o.num_tokens,
            tokens: shape.tokens as u32,
            top_k: shape.top_k as u32,
            slots: shape.slots() as u32,
            experts: o.global_experts as u32,
            local: shape.experts as u32,
            shared: shape.shared_experts as u32,
            n: n as u32,
            x_row,
            from,
            dead: (by_pair && self.gives_up()) as u32,
        };
        let smooths = smooth.iter().any(|vector| !vector.is_null());
        let entry = rows_entry(self.weights, o.scales, smooths, self.dtype).ok_or_else(|| self.unsupported())?;
        let geometry = rows_geometry(rows, n, o.scales).dependent();
        // SAFETY: forwarded to the caller.
        unsafe { self.stream.launch(&entry, &geometry, &args) }
    }

    /// # Safety
    /// As for [`launch`].
    unsafe fn sort(&self) -> Result<()> {
        let (o, shape, at) = (self.o, self.shape, self.at);
        let (wgmma, in_order) = (self.path.is_wgmma(), self.path.in_order(o.scales));
        let null = std::ptr::null_mut();
        let args = sort::Args {
            sorted_ids: self.part(at.sorted_ids).cast(),
            expert_ids: self.part(at.expert_ids).cast(),
            totals: self.part(at.totals).cast(),
            sorted_weights: self.part(at.sorted_weights).cast(),
            positions: if in_order { self.part(at.positions).cast() } else { std::ptr::null_mut() },
            offsets: if wgmma { self.part(at.offsets).cast() } else { std::ptr::null_mut() },
            expert_counts: if wgmma { self.part(at.expert_counts).cast() } else { std::ptr::null_mut() },
            invalid: std::ptr::null_mut(),
            zero: if self.adds() { self.results().cast() } else { null },
            zero_bytes: if self.adds() { product(&[shape.tokens, shape.hidden, self.dtype.size()]) } else { 0 },
            topk_ids: o.topk_ids,
            topk_weights: o.topk_weights,
            expert_map: o.expert_map,
            num_tokens: o.num_tokens,
            table: std::ptr::null(),
            tokens: shape.tokens as u32,
            top_k: shape.top_k as u32,
            slots: shape.slots() as u32,
            experts: o.global_experts as u32,
            local: shape.experts as u32,
            shared_experts: shape.shared_experts as u32,
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
        let device = self.stream.device();
        let multiprocessors = device.properties().multiprocessors;
        let (activation, alpha, limit) = o.activation.parts();
        let FusedShape { hidden, intermediate, .. } = *shape;
        let (n, k) = if up { (intermediate, hidden) } else { (hidden, intermediate) };
        let gate_up = up.then_some(o.gate_up);
        let of = |e: &Experts| if up { (e.w13, e.w13_scales, e.bias13) } else { (e.w2, e.w2_scales, e.bias2) };
        let ((w, w_scales, bias), (shared_w, shared_w_scales, shared_bias)) = (of(&o.routed), of(&o.shared));
        let (scale_expert, scale_row) = if up { o.w13_strides } else { o.w2_strides };
        let maps = |rows: usize| {
            let of = |base, experts| weight_map(device, base, DType::U8, [experts, n, k], gate_up, rows, o.shuffled);
            let map = of(w, shape.experts)?;
            let shared = if shape.shared_experts == 0 { map } else { of(shared_w, shape.shared_experts)? };
            Ok::<_, Error>((map, shared))
        };
        let x = self.part(if up { at.x } else { at.q });
        let rounded = self.rounds();
        // What both kinds of kernels take: of items of so many `rows` of weights, whose maps are `maps`.
        macro_rules! args {
            ($kernel:ident, $rows:ident, $maps:ident, $($name:ident: $value:expr),*) => {
                $kernel::Args {
                    $($name: $value,)*
                    partial: self.results().cast(),
                    x_scales: self.part(if up { at.x_scales } else { at.q_scales }).cast(),
                    map: $maps.0,
                    shared_map: $maps.1,
                    w_scales,
                    shared_w_scales,
                    bias,
                    shared_bias,
                    sorted_ids: self.part(at.sorted_ids).cast(),
                    sorted_weights: self.part(at.sorted_weights).cast(),
                    offsets: self.part(at.offsets).cast(),
                    expert_counts: self.part(at.expert_counts).cast(),
                    topk_ids: o.topk_ids,
                    topk_weights: o.topk_weights,
                    expert_map: o.expert_map,
                    tokens: shape.tokens as u32,
                    top_k: shape.top_k as u32,
                    slots: shape.slots() as u32,
                    experts: o.global_experts as u32,
                    local: shape.experts as u32,
                    bins: shape.bins() as u32,
                    n: n as u32,
                    k: k as u32,
                    layout: if up { o.gate_up.layout() } else { fused::PLAIN },
                    shuffled: if o.shuffled { shuffle::tile_rows(gate_up) as u32 } else { 0 },
                    activation,
                    alpha,
                    limit,
                    kept: if up { self.gives_up() } else { self.keeps() } as u32,
                    words: self.part(Front::DRAWS).cast(),
                    launch: launch_number(),
                    left: self.left(),
                    stripe: self.stripe().0.div_ceil($rows) as u32,
                }
            };
        }
        if o.scales == QuantScales::Rows {
            let (Some((geometry, cluster)), Some(path)) =
                (rows_wgmma_geometry(self.path, self.weights, shape, multiprocessors), self.path.with_rows())
            else {
                return Err(self.unsupported());
            };
            let entries = rows_wgmma_entries(self.path, self.weights, self.dtype, cluster);
            let [first, second, rounding, adding] = entries.ok_or_else(|| self.unsupported())?;
            let rows = path.wgmma_tile()[0];
            // Each block of a cluster brings a part.
            let maps = maps(rows / cluster)?;
            let args = args!(
                rows_wgmma_kernel,
                rows,
                maps,
                h: self.part(at.h),
                x: x.cast(),
                x_row: k,
                x_divisor: if up && !self.smooths_tokens() { shape.slots() as u32 } else { 1 },
                w_scale_expert: scale_expert as u32,
                w_scale_row: scale_row as u32,
                num_tokens: o.num_tokens
            );
            let entry = if up {
                first
            } else if self.adds() {
                adding
            } else if rounded {
                rounding
            } else {
                second
            };
            // SAFETY: forwarded to the caller.
            return unsafe { self.stream.launch(&entry, &geometry, &args) };
        }
        let entries = wgmma_entries(self.path, self.weights, o.scales, self.dtype);
        let rounding = rounded_entries(self.path, self.weights, o.scales, self.dtype).filter(|_| rounded);
        let geometry = wgmma_geometry(self.path, up, shape.bins(), multiprocessors);
        let (Some((first, second)), Some(geometry), Some([tiles, pairs, ..])) = (entries, geometry, self.path.wgmma())
        else {
            return Err(self.unsupported());
        };
        let rows = wgmma_kernel::rows(tiles);
        let maps = maps(rows)?;
        let args = args!(
            wgmma_kernel,
            rows,
            maps,
            h: self.part(at.q),
            h_scales: self.part(at.q_scales).cast(),
            x_map: row_map(device, x, at.capacity, k, pairs)?,
            x_scale_group: at.scale_group,
            progress: if self.overlaps() { self.part(at.progress).cast() } else { std::ptr::null_mut() }
        );
        let entry = match rounding {
            _ if up => first,
            Some([_, adding]) if self.adds() => adding,
            Some([rounding, _]) => rounding,
            None => second,
        };
        // SAFETY: forwarded to the caller.
        unsafe { self.stream.launch(&entry, &geometry, &args) }
    }

    /// Both products for few tokens, which quantise rows themselves.
    ///
    /// # Safety
    /// As for [`launch`].
    unsafe fn few(&self) -> Result<()> {
        let (o, shape, at, rows) = (self.o, self.shape, self.at, few_kernel::TILE_ROWS);
        let entries = few_entries(self.weights, o.scales, self.dtype, self.path.sorts(shape.pairs()));
        let (first, second) = entries.ok_or_else(|| self.unsupported())?;
        let device = self.stream.device();
        let geometry = few_geometry(o.scales, shape.bins(), device.properties().multiprocessors);
        let (activation, alpha, limit) = o.activation.parts();
        let FusedShape { experts, shared_experts, hidden, intermediate, .. } = *shape;
        let maps = |routed, shared, n, k, gate_up: Option<GateUp>| -> Result<[TensorMap; 2]> {
            let map = weight_map(device, routed, DType::U8, [experts, n, k], gate_up, rows, o.shuffled)?;
            let shared = match shared_experts {
                0 => map,
                experts => weight_map(device, shared, DType::U8, [experts, n, k], gate_up, rows, o.shuffled)?,
            };
            Ok([map, shared])
        };
        let [map13, shared_map13] = maps(o.routed.w13, o.shared.w13, intermediate, hidden, Some(o.gate_up))?;
        let [map2, shared_map2] = maps(o.routed.w2, o.shared.w2, hidden, intermediate, None)?;
        let shuffled = |gate_up| if o.shuffled { shuffle::tile_rows(gate_up) as u32 } else { 0 };
        let args = few_kernel::Args {
            h: self.part(at.h),
            partial: self.part(at.partial).cast(),
            x: o.x,
            x_row: o.x_row,
            x_divisor: shape.slots() as u32,
            map: map13,
            shared_map: shared_map13,
            w_scales: o.routed.w13_scales,
            shared_w_scales: o.shared.w13_scales,
            bias: o.routed.bias13,
            shared_bias: o.shared.bias13,
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
            slots: shape.slots() as u32,
            experts: o.global_experts as u32,
            local: experts as u32,
            bins: shape.bins() as u32,
            n: intermediate as u32,
            k: hidden as u32,
            layout: o.gate_up.layout(),
            shuffled: shuffled(Some(o.gate_up)),
            activation,
            alpha,
            limit,
            kept: self.keeps() as u32,
            words: self.part(Front::DRAWS).cast(),
            launch: launch_number(),
            w_scale_expert: o.w13_strides.0 as u32,
            w_scale_row: o.w13_strides.1 as u32,
            // A number for 32 columns of `h`, which is not stored quantised.
            maxima: self.part(at.q).cast(),
        };
        let next = few_kernel::Args {
            x: self.part(at.h),
            x_row: intermediate,
            x_divisor: 1,
            map: map2,
            shared_map: shared_map2,
            w_scales: o.routed.w2_scales,
            shared_w_scales: o.shared.w2_scales,
            bias: o.routed.bias2,
            shared_bias: o.shared.bias2,
            n: hidden as u32,
            k: intermediate as u32,
            layout: fused::PLAIN,
            shuffled: shuffled(None),
            w_scale_expert: o.w2_strides.0 as u32,
            w_scale_row: o.w2_strides.1 as u32,
            ..args
        };
        // SAFETY: forwarded to the caller.
        unsafe {
            self.stream.launch(&first, &geometry, &args)?;
            self.stream.launch(&second, &geometry, &next)
        }
    }

    /// A product of [`FusedQuantPath::Tile32`] or [`FusedQuantPath::Tile128`].
    ///
    /// # Safety
    /// As for [`launch`].
    unsafe fn tile(&self, up: bool) -> Result<()> {
        let (o, shape, at) = (self.o, self.shape, self.at);
        let (activation, alpha, limit) = o.activation.parts();
        let FusedShape { hidden, intermediate, .. } = *shape;
        let (n, k) = if up { (intermediate, hidden) } else { (hidden, intermediate) };
        let out = self.part(if up { at.h } else { at.partial });
        let of = |e: &Experts| if up { (e.w13, e.w13_scales, e.bias13) } else { (e.w2, e.w2_scales, e.bias2) };
        let ((w, w_scales, bias), (shared_w, shared_w_scales, shared_bias)) = (of(&o.routed), of(&o.shared));
        let (scale_expert, scale_row) = if up { o.w13_strides } else { o.w2_strides };
        let rows = n * if up { o.gate_up.rows() } else { 1 };
        let Some(geometry) = tile_geometry(self.path, rows, at.capacity / self.path.block()) else {
            return Err(unsupported(self.path, self.weights, self.dtype));
        };
        let wide = self.path == FusedQuantPath::Tile128;
        macro_rules! launch {
            ($module:ident, $($few:ident, $many:ident);*) => {{
                use tile_kernel::$module::*;
                // For tokens of f32, f16 and bf16, and the second product.
                let entries = [$(if wide { $many::ENTRY } else { $few::ENTRY }),*];
                let entry = entries[match (up, self.dtype) {
                    (false, _) => 3,
                    (true, DType::F32) => 0,
                    (true, DType::F16) => 1,
                    (true, _) => 2,
                }];
                let args = Args {
                    out,
                    x: self.part(if up { at.x } else { at.q }).cast(),
                    x_row: k,
                    x_scales: self.part(if up { at.x_scales } else { at.q_scales }).cast(),
                    x_scale_row: self.scale_strides(k).0,
                    x_divisor: if up && !self.smooths_tokens() { shape.slots() as u32 } else { 1 },
                    w: w.cast(),
                    shared_w: shared_w.cast(),
                    w_scales,
                    shared_w_scales,
                    w_scale_expert: scale_expert,
                    w_scale_row: scale_row,
                    bias,
                    shared_bias,
                    local: shape.experts as u32,
                    sorted_ids: self.part(at.sorted_ids).cast(),
                    sorted_weights: self.part(at.sorted_weights).cast(),
                    expert_ids: self.part(at.expert_ids).cast(),
                    pairs: shape.pairs() as u32,
                    n: n as u32,
                    k: k as u32,
                    layout: if up { o.gate_up.layout() } else { fused::PLAIN },
                    activation,
                    alpha,
                    limit,
                    blocks: (o.scales == QuantScales::Blocks) as u32,
                };
                // SAFETY: forwarded to the caller.
                unsafe { self.stream.launch(&entry, &geometry, &args) }
            }};
        }
        if self.weights == DType::I8 {
            launch!(
                int8,
                moe_fused_quant_tile32_up_i8_f32, moe_fused_quant_tile128_up_i8_f32;
                moe_fused_quant_tile32_up_i8_f16, moe_fused_quant_tile128_up_i8_f16;
                moe_fused_quant_tile32_up_i8_bf16, moe_fused_quant_tile128_up_i8_bf16;
                moe_fused_quant_tile32_down_i8, moe_fused_quant_tile128_down_i8
            )
        } else {
            launch!(
                e4m3,
                moe_fused_quant_tile32_up_e4m3_f32, moe_fused_quant_tile128_up_e4m3_f32;
                moe_fused_quant_tile32_up_e4m3_f16, moe_fused_quant_tile128_up_e4m3_f16;
                moe_fused_quant_tile32_up_e4m3_bf16, moe_fused_quant_tile128_up_e4m3_bf16;
                moe_fused_quant_tile32_down_e4m3, moe_fused_quant_tile128_down_e4m3
            )
        }
    }

    /// Whether the second product rounds each slot's result: it may, and the path has one that does.
    fn rounds(&self) -> bool {
        self.o.rounded_slots && self.path.rounds(self.o.scales)
    }

    /// Whether it adds what it has rounded up in any order: it may, and that pays, 4096 tokens of DeepSeek-V3 replayed on and on, too (e4m3 with scales of blocks and of rows 0.7 and 5 % less on an H200). Only
    /// kernels for many pairs do.
    fn adds(&self) -> bool {
        let multiprocessors = self.stream.device().properties().multiprocessors;
        let wide = matches!(self.path, FusedQuantPath::Wgmma160 | FusedQuantPath::Wgmma256);
        self.o.unordered && self.rounds() && wide && adds_up(self.shape, self.dtype, multiprocessors)
    }

    /// Whether sums come to be in `out`.
    fn adds_at_once(&self) -> bool {
        self.adds() && takes_sums(self.o.out, self.o.out_row, self.shape.hidden, self.o.num_tokens)
    }

    /// Where the second product leaves its results.
    fn results(&self) -> *mut c_void {
        if self.adds_at_once() { self.o.out } else { self.part(self.at.partial) }
    }

    /// Bytes between the second product and the sum.
    fn partial_bytes(&self) -> usize {
        product(&[self.shape.pairs(), self.shape.hidden, if self.rounds() { self.dtype.size() } else { 4 }])
    }

    /// Columns of a stripe of the second product, and whether the sum begins with the first while the next ones are computed. Measured on an H200 as for 16 bits: with 17 MB and more to add up, up
    /// to 6144 pairs. 2048 columns are better in two stripes than in four.
    fn stripe(&self) -> (usize, bool) {
        let hidden = self.shape.hidden;
        let multiprocessors = self.stream.device().properties().multiprocessors;
        let bytes = self.partial_bytes();
        // With scales of rows from two and a half times as many on: fewer stay in the second-level cache.
        let bytes = if self.o.scales == QuantScales::Rows { bytes / 5 * 2 } else { bytes };
        let striped = matches!(self.path, FusedQuantPath::Wgmma64);
        if striped && striped_bytes(bytes, multiprocessors) && self.shape.pairs() <= STRIPED_PAIRS {
            (stripe(hidden) * if hidden < 4096 { 2 } else { 1 }, true)
        } else {
            (hidden, false)
        }
    }

    /// Whether the second product starts while the first still runs. With few pairs that gains 0.2 % where blocks have many items each and the sum begins early, too; with 5 items of the first
    /// product for each multiprocessor the words cost more than that.
    fn overlaps(&self) -> bool {
        let (shape, multiprocessors) = (self.shape, self.stream.device().properties().multiprocessors);
        let experts = shape.pairs().min(shape.bins());
        // Of both blocks of a cluster.
        let items = product(&[experts, shape.intermediate.div_ceil(wgmma_kernel::TILE_ROWS)]);
        let many = items >= product(&[16, multiprocessors as usize]);
        self.path.overlaps(self.o.scales) || many && self.stripe().1
    }

    /// What is left of each stripe, if the sum begins early.
    fn left(&self) -> *mut u32 {
        if self.stripe().1 { self.part(self.at.left).cast() } else { std::ptr::null_mut() }
    }

    /// Whether they may stay in the second-level cache: all of them, or a stripe at a time.
    fn keeps(&self) -> bool {
        matches!(self.path, FusedQuantPath::Wgmma16 | FusedQuantPath::Wgmma64) && self.partial_bytes() <= KEPT_BYTES
            || self.stripe().1
            || self.adds_at_once()
    }

    /// Whether `h` stays in the second-level cache until it has been quantised, by a launch of its own, which gives it up: whole lines that its threads keep.
    fn gives_up(&self) -> bool {
        let row = product(&[self.shape.intermediate, self.dtype.size()]);
        self.o.scales == QuantScales::Rows
            && self.path.is_wgmma()
            && self.dtype.size() == 2
            && rows_kernel::keeps(self.shape.intermediate)
            && (self.part(self.at.h) as usize | row).is_multiple_of(fused_reduce::LINE)
            && product(&[self.shape.pairs(), row]) <= GIVEN_UP_BYTES
    }

    /// Quantised rows of `h` that the sum gives up in the second-level cache, which both products have done with: so many bytes for each token, whole lines. Measured on an H200: 0.3 to 1.6 % less for the block
    /// after sorting, up to 0.6 % more before (`Wgmma16`).
    fn dead_bytes(&self) -> usize {
        let row = (self.at.q_scales - self.at.q) / self.shape.tokens.max(1) / fused_reduce::LINE * fused_reduce::LINE;
        let dead = matches!(self.path, FusedQuantPath::Wgmma64);
        if dead && given_up(self.part(self.at.q), self.shape.tokens, row) { row } else { 0 }
    }

    /// # Safety
    /// As for [`launch`].
    unsafe fn reduce(&self) -> Result<()> {
        let (o, shape) = (self.o, self.shape);
        if self.adds_at_once() {
            // Who waits for the second product waits for all before it.
            return Ok(());
        }
        let rounded = self.rounds();
        let (stripe, early) = self.stripe();
        let (entry, threads, columns) = if rounded {
            let entry = match self.dtype {
                DType::F16 => fused_reduce::moe_fused_reduce_rounded_f16::ENTRY,
                _ => fused_reduce::moe_fused_reduce_rounded_bf16::ENTRY,
            };
            (entry, fused_reduce::ROUNDED_THREADS, fused_reduce::ROUNDED_COLUMNS)
        } else {
            reduce_entry(self.dtype, shape.slots())
        };
        let geometry = sum_geometry(shape, threads, columns, early);
        let bytes = self.partial_bytes();
        // Of sums a row for each token, as if there were one expert, which all go to.
        let (top_k, slots) = if self.adds() { (0, 1) } else { (shape.top_k, shape.slots()) };
        let summed = if self.adds() { product(&[shape.tokens, shape.hidden, self.dtype.size()]) } else { bytes };
        let args = fused_reduce::Args {
            out: o.out,
            partial: self.part(self.at.partial).cast(),
            topk_ids: o.topk_ids,
            expert_map: o.expert_map,
            num_tokens: o.num_tokens,
            out_row: o.out_row,
            tokens: shape.tokens as u32,
            top_k: top_k as u32,
            slots: slots as u32,
            experts: o.global_experts as u32,
            local: shape.experts as u32,
            shared_experts: shape.shared_experts as u32,
            n: shape.hidden as u32,
            discard: once_read(self.keeps(), self.part(self.at.partial), summed, bytes / shape.pairs().max(1)),
            across: sum_across(threads, columns, early),
            left: self.left(),
            stripe: stripe as u32,
            dead: self.part(self.at.q).cast(),
            dead_bytes: self.dead_bytes() as u32,
        };
        // It reads how many tokens there are before it waits: where nothing was launched before, nobody has waited for that.
        let geometry = if shape.pairs() == 0 { geometry } else { geometry.dependent() };
        // SAFETY: forwarded to the caller.
        unsafe { self.stream.launch(&entry, &geometry, &args) }
    }
}

fn unsupported(path: FusedQuantPath, weights: DType, dtype: DType) -> Error {
    let most = wgmma_kernel::MAX_BINS;
    let what = format!(
        "the path {path:?} has no kernel for weights of {weights} and tokens of {dtype}, or for these sizes: `Wgmma..` takes tokens of 16-bit \
         floats on Hopper, at most {most} experts and an activation other than `Gelu`, `Wgmma16` rows of tokens that end before 2^35 elements, with scales of rows `Wgmma16` at most {} pairs and `Wgmma160` at most {ROWS_BINS} experts, `Wgmma256` scales of blocks, at most \
         {TALL_BINS} experts and, of gates and values in halves, multiples of 64; shuffled weights need such a \
         path and widths of multiples of 128",
        items::DIRECT_PAIRS
    );
    Error::Unsupported { op: OP, what }
}

/// The path that [`launch`] and [`fused_quant`](fn@fused_quant) take on a device for tokens of `dtype` and weights of `weights`: never [`FusedQuantPath::Auto`].
///
/// That is one of `Wgmma..` for f16 and bf16 on Hopper, any activation but [`ExpertActivation::Gelu`] and no more experts than they take; anything else is [`FusedQuantPath::Tile32`] or, from 48 pairs an expert on, [`FusedQuantPath::Tile128`].
///
/// # Errors
/// [`Error::Unsupported`] if `path` names one that does not take these, and [`Error::Value`] for more pairs than it can number.
pub fn path_of(
    device: &Device,
    dtype: DType,
    weights: DType,
    path: FusedQuantPath,
    shape: &FusedShape,
    o: &Operands,
) -> Result<FusedQuantPath> {
    let wgmma = dtype != DType::F32
        && device.properties().compute_capability == (9, 0)
        && shape.bins() <= wgmma_kernel::MAX_BINS
        && o.activation != ExpertActivation::Gelu;
    // Kernels for scales of rows keep where rows start in units of 16 bytes, in 32 bits.
    let widest = shape.hidden.max(shape.intermediate);
    let wgmma = wgmma && (o.scales == QuantScales::Blocks || product(&[shape.pairs(), widest]) < 1 << 36);
    // Of a tile's 64 values all have one scale.
    let tall = wgmma
        && o.scales == QuantScales::Blocks
        && shape.bins() <= TALL_BINS
        && (o.gate_up != GateUp::Halves || shape.intermediate.is_multiple_of(64));
    // The products for few tokens read rows of `x` and of `h` themselves, which the others have quantised before.
    let few = wgmma && numbers_rows(shape, o.x_row);
    // For scales of rows they find the row of 256 elements by a reciprocal (`RowScales::find`), which is exact so far.
    let pieces = widest.div_ceil(256);
    let few = few && (o.scales == QuantScales::Blocks || product(&[shape.pairs(), pieces, pieces]) < 1 << 30);
    let takes = wgmma && shuffle::takes(weights, shape.hidden, shape.intermediate);
    let refused = |path| Err(unsupported(path, weights, dtype));
    let path = match path {
        path if o.shuffled && !(takes && path.pair_tiles().is_none()) => refused(path),
        FusedQuantPath::Auto if wgmma => match FusedQuantPath::choose(o.scales, shape, tall) {
            path if path.is_few() && !few => Ok(FusedQuantPath::Wgmma64),
            path => Ok(path),
        },
        FusedQuantPath::Auto if shape.pairs() < product(&[48, shape.bins()]) => Ok(FusedQuantPath::Tile32),
        FusedQuantPath::Auto => Ok(FusedQuantPath::Tile128),
        FusedQuantPath::Tile32 | FusedQuantPath::Tile128 => Ok(path),
        path if path.is_few() && !few => refused(path),
        FusedQuantPath::Wgmma256 if !tall => refused(path),
        path if !wgmma => refused(path),
        path if o.scales == QuantScales::Rows && !path.takes_rows(shape.pairs(), shape.bins()) => refused(path),
        path => Ok(path),
    }?;
    let block = path.block();
    let blocks = sort::capacity(shape.pairs(), shape.bins(), block, false) / block;
    // Tiles of the path that has most of them: 32 outputs of the first product, 64 of the second.
    let (up, down) =
        (shape.intermediate.div_ceil(wgmma_kernel::TILE_ROWS), shape.hidden.div_ceil(wgmma_kernel::TILE_ROWS));
    let tiles = up.saturating_mul(4).max(down.saturating_mul(2)).max(1);
    // Grids are limited, and what is drawn in all: grids have tiles of 128 rows.
    let most = if path.is_wgmma() { items::MAX_DRAWN / tiles } else { (i32::MAX as usize / tiles).min(65535) };
    check_blocks(OP, blocks, most, block)?;
    Ok(path)
}

/// Launches on raw pointers (layer L1) for tokens of `dtype` and weights of `weights`, by the path that [`path_of`] gives: sorting unless it does without, two products,
/// before each of which rows are quantised unless a product does that itself, and the sum over slots.
///
/// # Errors
/// Those of [`path_of`], [`Error::Unsupported`] for a path without kernels for these types, and those of [`Stream::launch`].
///
/// # Safety
/// The pointers are device memory of the documented sizes until the launches are done, `x`, weights and `workspace` and every row of theirs
/// aligned to 16 bytes; `workspace` has [`FusedShape::quant_workspace_bytes`]. No output overlaps another argument. `hidden` and
/// `intermediate` are multiples of 16, and nothing is 0 (but perhaps the number of shared experts). Of int8 both are below 2^17, or sums in 32 bits wrap around.
pub unsafe fn launch(
    stream: &Stream,
    dtype: DType,
    weights: DType,
    path: FusedQuantPath,
    shape: &FusedShape,
    o: &Operands,
    workspace: *mut c_void,
) -> Result<()> {
    let path = path_of(stream.device(), dtype, weights, path, shape, o)?;
    let at = Workspace::new(shape, dtype, path.block());
    let run = Run { stream, dtype, weights, path, shape, o, at, workspace };
    // Whatever follows one of these launches may start early: each waits where it has to, the first at once.
    // SAFETY: forwarded to the caller.
    unsafe {
        if path.sorts(shape.pairs()) {
            run.sort()?;
        }
        if path.is_few() && !run.smooths() {
            run.few()?;
            return run.reduce();
        }
        run.quantise(false)?;
        for up in [true, false] {
            if path.is_wgmma() {
                run.wgmma(up)?;
            } else {
                run.tile(up)?;
            }
            if up && !path.in_order(o.scales) {
                run.quantise(true)?;
            }
        }
        run.reduce()
    }
}

/// Weights of shared experts with their companions.
#[derive(Debug)]
#[non_exhaustive]
#[must_use]
pub struct SharedQuantExperts<'a, Q: Element> {
    /// `[shared, rows · I, H]`, laid out as `w13`; scales as its.
    pub w13: Quantised<'a, Q>,
    /// `[shared, H, I]`; scales as those of `w2`.
    pub w2: Quantised<'a, Q>,
    /// `[shared, rows · I]`.
    pub bias13: Option<&'a Tensor<f32>>,
    /// `[shared, H]`.
    pub bias2: Option<&'a Tensor<f32>>,
    /// `[shared, H]`.
    pub smooth13: Option<&'a Tensor<f32>>,
    /// `[shared, I]`.
    pub smooth2: Option<&'a Tensor<f32>>,
}

impl<Q: Element> Clone for SharedQuantExperts<'_, Q> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<Q: Element> Copy for SharedQuantExperts<'_, Q> {}

impl<'a, Q: Element> SharedQuantExperts<'a, Q> {
    /// Without biases and smoothing.
    pub const fn new(w13: Quantised<'a, Q>, w2: Quantised<'a, Q>) -> Self {
        Self { w13, w2, bias13: None, bias2: None, smooth13: None, smooth2: None }
    }

    /// With these biases.
    pub const fn biases(mut self, bias13: Option<&'a Tensor<f32>>, bias2: Option<&'a Tensor<f32>>) -> Self {
        (self.bias13, self.bias2) = (bias13, bias2);
        self
    }

    /// With these smoothing vectors.
    pub const fn smooth(mut self, smooth13: Option<&'a Tensor<f32>>, smooth2: Option<&'a Tensor<f32>>) -> Self {
        (self.smooth13, self.smooth2) = (smooth13, smooth2);
        self
    }
}

/// Options of [`fused_quant`].
#[derive(Debug)]
#[non_exhaustive]
#[must_use]
pub struct FusedQuantOptions<'a, Q: Element> {
    /// What happens between the products.
    pub activation: ExpertActivation,
    /// What the rows of `w13` are.
    pub gate_up: GateUp,
    /// `[experts, rows · I]`: added to finished sums.
    pub bias13: Option<&'a Tensor<f32>>,
    /// `[experts, H]`.
    pub bias2: Option<&'a Tensor<f32>>,
    /// `[experts, H]`, with scales of rows: what tokens are multiplied with before they are quantised for an expert (reciprocals of
    /// SmoothQuant's factors).
    pub smooth13: Option<&'a Tensor<f32>>,
    /// `[experts, I]`, with scales of rows: the same for the second product.
    pub smooth2: Option<&'a Tensor<f32>>,
    /// Experts that take every token, with weight 1. They have the width of the others; a wider one is several of them.
    pub shared: Option<SharedQuantExperts<'a, Q>>,
    /// Whether `topk_ids` lists the shared experts, with ids after those of the routed ones, and `topk_weights` their weights. Otherwise every token
    /// has them, and what lists one all the same has it besides.
    pub shared_listed: bool,
    /// `[all experts]`: the place in `w13` and `w2` of each expert that `topk_ids` may name, or -1 if it lives on another
    /// device. Without it they are all here.
    pub expert_map: Option<&'a Tensor<i32>>,
    /// `[1]`: how many tokens there are, if fewer than `x` has rows; rows of `out` beyond are left alone.
    pub num_tokens: Option<&'a Tensor<i32>>,
    /// Allows results to be added up in the order in which they come, where `rounded_slots` allows them to be rounded; without effect otherwise.
    pub unordered: bool,
    /// Allows the weighted result of each slot to be rounded to `T` before those of a token are added up, in f32 and in their order as without: half as
    /// much lies between the second product and the sum. Results are as reproducible as without. `Wgmma160`, `Wgmma256` and, with scales of blocks, `Wgmma64` make use of it.
    ///
    /// With `unordered` as well, `Wgmma160` and `Wgmma256` add rounded results up in `T`, where a token has more than two and there are 124 KiB of them for each multiprocessor and more (16 MB on an H200): there is no sum then, each addition rounds, and the last bits may differ from run to run.
    /// Others are added up in order.
    pub rounded_slots: bool,
    /// Whether values of `w13` and `w2`, those of shared experts too, come from [`shuffle_weights`](super::shuffle_weights()): for the `Wgmma` paths,
    /// one of which [`FusedQuantPath::Auto`] then is; widths are multiples of 128.
    pub shuffled: bool,
    /// Waits for `topk_ids` before anything is launched, and reports ids out of range as an error ([`check_ids`](super::check_ids())), and entries of `expert_map`: for debugging. Cannot be captured.
    pub checked: bool,
    /// Which kernels.
    pub path: FusedQuantPath,
}

impl<Q: Element> Clone for FusedQuantOptions<'_, Q> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<Q: Element> Copy for FusedQuantOptions<'_, Q> {}

impl<Q: Element> Default for FusedQuantOptions<'_, Q> {
    fn default() -> Self {
        Self {
            activation: ExpertActivation::default(),
            gate_up: GateUp::default(),
            bias13: None,
            bias2: None,
            smooth13: None,
            smooth2: None,
            shared: None,
            shared_listed: false,
            expert_map: None,
            num_tokens: None,
            unordered: false,
            rounded_slots: false,
            shuffled: false,
            checked: false,
            path: FusedQuantPath::Auto,
        }
    }
}

impl<'a, Q: Element> FusedQuantOptions<'a, Q> {
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

    /// With biases of the first and second product.
    pub const fn biases(mut self, bias13: Option<&'a Tensor<f32>>, bias2: Option<&'a Tensor<f32>>) -> Self {
        self.bias13 = bias13;
        self.bias2 = bias2;
        self
    }

    /// With these smoothing vectors of both products.
    pub const fn smooth(mut self, smooth13: Option<&'a Tensor<f32>>, smooth2: Option<&'a Tensor<f32>>) -> Self {
        self.smooth13 = smooth13;
        self.smooth2 = smooth2;
        self
    }

    /// With shared experts.
    pub const fn shared_experts(mut self, shared: SharedQuantExperts<'a, Q>) -> Self {
        self.shared = Some(shared);
        self
    }

    /// Whether `topk_ids` lists the shared experts.
    pub const fn shared_listed(mut self, listed: bool) -> Self {
        self.shared_listed = listed;
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

    /// With results added up in any order, or not.
    pub const fn unordered(mut self, unordered: bool) -> Self {
        self.unordered = unordered;
        self
    }

    /// With each slot's result rounded, or not.
    pub const fn rounded_slots(mut self, rounded_slots: bool) -> Self {
        self.rounded_slots = rounded_slots;
        self
    }

    /// With shuffled weights, or not.
    pub const fn shuffled(mut self, shuffled: bool) -> Self {
        self.shuffled = shuffled;
        self
    }

    /// Whether ids out of range are an error.
    pub const fn checked(mut self, checked: bool) -> Self {
        self.checked = checked;
        self
    }

    /// With these kernels.
    pub const fn path(mut self, path: FusedQuantPath) -> Self {
        self.path = path;
        self
    }
}

/// Checks the scales of `[experts, n, k]` weights, which `first` decides the kind of; returns their strides if they are of rows.
fn scale_strides(
    call: &Call<'_>,
    arg: &'static str,
    scales: &Tensor<f32>,
    kind: QuantScales,
    [experts, n, k]: [usize; 3],
) -> Result<ScaleStrides> {
    call.contiguous(arg, scales)?;
    match kind {
        QuantScales::Blocks => {
            call.same_shape(arg, scales.shape(), &[experts, n.div_ceil(GROUP), k.div_ceil(GROUP)])?;
            Ok((0, 0))
        }
        QuantScales::Rows if *scales.shape() == [experts] => Ok((1, 0)),
        QuantScales::Rows if *scales.shape() == [experts, n] => Ok((n, 1)),
        QuantScales::Rows => Err(call.bad_shape(arg, scales.shape(), format!("[{experts}, {n}] or [{experts}]"))),
    }
}

/// `out[t] = Σ w · down(act(gate_up(x[t])))` over the slots of token `t`, with 8-bit weights.
///
/// `x` and `out`: `[tokens, H]`, each dense in its last dimension, rows of `x` at multiples of 16 bytes; `w13`: `[experts, rows · I, H]`
/// ([`GateUp`]); `w2`: `[experts, H, I]`; `topk_ids` and `topk_weights`: `[tokens, top_k]`; all but `x` and `out` contiguous. `H` and `I` are
/// multiples of 16. Scales are of one of these kinds throughout, those of shared experts laid out as those of the others:
///
/// | scales | weights | `w13.scales` | `w2.scales` | activations |
/// | --- | --- | --- | --- | --- |
/// | of blocks | e4m3 | `[experts, ceil(rows · I / 128), ceil(H / 128)]` | `[experts, ceil(H / 128), ceil(I / 128)]` | of each row and 128 columns, dynamic |
/// | of rows | e4m3, int8 | `[experts, rows · I]` or `[experts]` | `[experts, H]` or `[experts]` | of each row, dynamic, after smoothing |
///
/// Ids of -1, of experts that live elsewhere and out of range contribute nothing. `workspace` has [`FusedShape::quant_workspace_bytes`]; what is
/// in it does not matter, and it serves one stream at a time: another one waits for an event first. Sums are in f32, or of int8 exact, as
/// widths are below 2^17 there; biases are added to them, in f32. The row between the products is rounded to `T`
/// after the activation, then quantised; results are weighted and added over the slots in their order in f32, with one rounding at
/// the end (and one of each slot's, with `options.rounded_slots`). Tokens: f32, f16, bf16.
///
/// # Errors
/// [`Shape`](Error::Shape), [`Stride`](Error::Stride), [`Value`](Error::Value), [`Alignment`](Error::Alignment),
/// [`Overlap`](Error::Overlap), [`WrongDevice`](Error::WrongDevice), [`DType`](Error::DType);
/// with `options.checked` [`Value`](Error::Value) for `topk_ids` if an id is out of range, and [`Capture`](Error::Capture) while the stream is captured;
/// [`Unsupported`](Error::Unsupported) if `options.path` asks for kernels that do not take these tensors, for smoothing with scales of blocks,
/// and for int8 with those.
#[allow(clippy::too_many_arguments)]
pub fn fused_quant<T: Float, Q: QuantisedElement>(
    stream: &Stream,
    out: &mut Tensor<T>,
    x: &Tensor<T>,
    w13: Quantised<'_, Q>,
    w2: Quantised<'_, Q>,
    topk_ids: &Tensor<i32>,
    topk_weights: &Tensor<f32>,
    options: &FusedQuantOptions<'_, Q>,
    workspace: &mut Tensor<u8>,
) -> Result<()> {
    let mut call = Call::new(OP, stream);
    let shared = options.shared;
    let description = Description {
        x,
        topk_ids,
        topk_weights,
        w2: w2.values.shape(),
        shared_w2: shared.map(|s| s.w2.values.shape()),
        shared_listed: options.shared_listed,
        gate_up: options.gate_up,
        activation: options.activation,
        expert_map: options.expert_map,
        num_tokens: options.num_tokens,
        checked: options.checked,
    };
    let block = description.check(&call, out)?;
    let Block { shape, rows, global_experts, x: xs, out: outs } = block;
    let FusedShape { tokens, experts, hidden, intermediate, shared_experts, .. } = shape;
    let scales = if w13.scales.shape().len() == 3 { QuantScales::Blocks } else { QuantScales::Rows };
    let (first, second) = ([experts, rows, hidden], [experts, hidden, intermediate]);
    first_weights(&call, "w13", w13.values, first, options.gate_up)?;
    dense(&call, "w2", Some(w2.values), &second)?;
    let w13_strides = scale_strides(&call, "w13.scales", w13.scales, scales, first)?;
    let w2_strides = scale_strides(&call, "w2.scales", w2.scales, scales, second)?;
    dense(&call, "bias13", options.bias13, &[experts, rows])?;
    dense(&call, "bias2", options.bias2, &[experts, hidden])?;
    dense(&call, "smooth13", options.smooth13, &[experts, hidden])?;
    dense(&call, "smooth2", options.smooth2, &[experts, intermediate])?;
    let mut smooths = options.smooth13.is_some() || options.smooth2.is_some();
    if let Some(s) = shared {
        let (first, second) = ([shared_experts, rows, hidden], [shared_experts, hidden, intermediate]);
        first_weights(&call, "shared.w13", s.w13.values, first, options.gate_up)?;
        dense(&call, "shared.w2", Some(s.w2.values), &second)?;
        // Laid out as those of the routed experts.
        let of_one = |scales: &Tensor<f32>| scales.shape().iter().skip(1).copied().collect::<Vec<_>>();
        call.same_shape("shared.w13.scales", &of_one(s.w13.scales), &of_one(w13.scales))?;
        call.same_shape("shared.w2.scales", &of_one(s.w2.scales), &of_one(w2.scales))?;
        scale_strides(&call, "shared.w13.scales", s.w13.scales, scales, first)?;
        scale_strides(&call, "shared.w2.scales", s.w2.scales, scales, second)?;
        dense(&call, "shared.bias13", s.bias13, &[shared_experts, rows])?;
        dense(&call, "shared.bias2", s.bias2, &[shared_experts, hidden])?;
        dense(&call, "shared.smooth13", s.smooth13, &[shared_experts, hidden])?;
        dense(&call, "shared.smooth2", s.smooth2, &[shared_experts, intermediate])?;
        smooths |= s.smooth13.is_some() || s.smooth2.is_some();
    }
    if scales == QuantScales::Blocks && (smooths || Q::DTYPE == DType::I8) {
        let smoothed = if smooths { ", and there are smoothing vectors" } else { "" };
        let what = format!(
            "with scales of blocks, weights are e4m3 and nothing is smoothed; here they are {}{smoothed}",
            Q::DTYPE
        );
        return Err(Error::Unsupported { op: OP, what });
    }
    for (arg, width) in [("x", hidden), ("w2", intermediate)] {
        call.value(width.is_multiple_of(16), arg, "a width that is a multiple of 16", width)?;
        check_depth(&call, Q::DTYPE, arg, width)?;
    }
    let shared_operands = match shared {
        Some(s) => Experts {
            w13: call.read("shared.w13", s.w13.values)?,
            w13_scales: call.read("shared.w13.scales", s.w13.scales)?.cast(),
            w2: call.read("shared.w2", s.w2.values)?,
            w2_scales: call.read("shared.w2.scales", s.w2.scales)?.cast(),
            bias13: call.read_opt("shared.bias13", s.bias13)?.cast(),
            bias2: call.read_opt("shared.bias2", s.bias2)?.cast(),
            smooth13: call.read_opt("shared.smooth13", s.smooth13)?.cast(),
            smooth2: call.read_opt("shared.smooth2", s.smooth2)?.cast(),
        },
        None => Experts::NONE,
    };
    let operands = Operands {
        out: call.write("out", out)?,
        out_row: outs.stride,
        x: call.read("x", x)?,
        x_row: xs.stride,
        routed: Experts {
            w13: call.read("w13", w13.values)?,
            w13_scales: call.read("w13.scales", w13.scales)?.cast(),
            w2: call.read("w2", w2.values)?,
            w2_scales: call.read("w2.scales", w2.scales)?.cast(),
            bias13: call.read_opt("bias13", options.bias13)?.cast(),
            bias2: call.read_opt("bias2", options.bias2)?.cast(),
            smooth13: call.read_opt("smooth13", options.smooth13)?.cast(),
            smooth2: call.read_opt("smooth2", options.smooth2)?.cast(),
        },
        shared: shared_operands,
        scales,
        w13_strides,
        w2_strides,
        topk_ids: call.read("topk_ids", topk_ids)?.cast(),
        topk_weights: call.read("topk_weights", topk_weights)?.cast(),
        expert_map: call.read_opt("expert_map", options.expert_map)?.cast(),
        num_tokens: call.read_opt("num_tokens", options.num_tokens)?.cast(),
        global_experts,
        gate_up: options.gate_up,
        activation: options.activation,
        unordered: options.unordered,
        rounded_slots: options.rounded_slots,
        shuffled: options.shuffled,
    };
    let workspace = block::workspace(&mut call, OP, workspace, shape.quant_workspace_bytes(T::DTYPE))?;
    for (arg, address) in [
        ("x", operands.x as usize),
        ("x", if tokens > 1 { operands.x as usize + xs.stride * T::DTYPE.size() } else { 0 }),
        ("w13", operands.routed.w13 as usize),
        ("w2", operands.routed.w2 as usize),
        ("shared.w13", operands.shared.w13 as usize),
        ("shared.w2", operands.shared.w2 as usize),
    ] {
        if !address.is_multiple_of(16) {
            return Err(Error::Alignment { op: OP, arg, expected: 16, address });
        }
    }
    description.check_ids(OP, stream, &block)?;
    if tokens == 0 || hidden == 0 {
        return Ok(());
    }
    let path = path_of(stream.device(), T::DTYPE, Q::DTYPE, options.path, &shape, &operands)?;
    // Nothing to multiply: the sum over slots alone, of nothing.
    if shape.pairs() == 0 || shape.bins() == 0 || intermediate == 0 {
        let biased = options.bias2.is_some() || shared.is_some_and(|s| s.bias2.is_some());
        call.value(intermediate > 0 || !biased, "w2", "wider than nothing, to add `bias2` to", intermediate)?;
        return stream_zeros(stream, &shape, Q::DTYPE, T::DTYPE, &operands, workspace);
    }
    // SAFETY: shapes, device, overlap, and the path's alignment were checked above.
    unsafe { launch(stream, T::DTYPE, Q::DTYPE, path, &shape, &operands, workspace) }
}

/// The result where nothing contributes: tokens without slots.
fn stream_zeros(
    stream: &Stream,
    shape: &FusedShape,
    weights: DType,
    dtype: DType,
    o: &Operands,
    workspace: *mut c_void,
) -> Result<()> {
    let none = FusedShape { top_k: 0, shared_experts: 0, ..*shape };
    let at = Workspace::new(&none, dtype, FusedQuantPath::Tile32.block());
    let run = Run { stream, dtype, weights, path: FusedQuantPath::Tile32, shape: &none, o, at, workspace };
    // SAFETY: without slots only `out` is written, which was checked.
    unsafe { run.reduce() }
}
