//! The path of 8-bit linear layers on Hopper's tensor cores: its tiles, which of them suits a shape, and the launch.

use super::linear_wgmma::{Shape, map, operand};
use crate::device::{Device, Geometry, Stream};
use crate::error::{Error, Result};
use crate::kernels::gemm::linear_quant_blocks;
use crate::kernels::gemm::linear_quant_tile::Args;
use crate::kernels::gemm::linear_quant_wgmma as kernel;
use crate::kernels::gemm::linear_wgmma as body;
use cuda_std::{DType, Entry};

const OP: &str = "linear_quant";

macro_rules! tiles {
    ($($(#[$doc:meta])* $Tile:ident: $waves:literal, $n:literal, $down:literal, $split:literal,
        rows $($rows:literal = $rows_bf16:ident, $rows_f16:ident, $i8_bf16:ident, $i8_f16:ident)?,
        blocks $($blocks:literal = $blocks_bf16:ident, $blocks_f16:ident)?;)*) => {
        /// Tiles of [`LinearQuantPath::Wgmma`](super::LinearQuantPath::Wgmma): 128 tokens, or as many as the name says, by so many outputs.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum LinearQuantTile {
            $($(#[$doc])* $Tile,)*
        }

        impl LinearQuantTile {
            /// All of them.
            pub const ALL: &[Self] = &[$(Self::$Tile),*];

            /// What a launch needs to know, if there are kernels for these scales.
            const fn shape(self, blocks: bool) -> Option<Shape> {
                let (waves, n, down, split, stages) = match (self, blocks) {
                    $($((Self::$Tile, false) => ($waves, $n, $down, $split, $rows),)?)*
                    $($((Self::$Tile, true) => ($waves, $n, $down, $split, $blocks),)?)*
                    #[allow(unreachable_patterns)]
                    _ => return None,
                };
                Some(Shape { n, stages, down, across: 1, split, waves })
            }

            /// The entry for operands and results of these types and these scales, if there is one.
            pub const fn entry(self, operands: DType, dtype: DType, blocks: bool) -> Option<Entry<kernel::Args>> {
                let (bf16, f16) = match (self, operands, blocks) {
                    $($((Self::$Tile, DType::E4m3, false) => (kernel::$rows_bf16::ENTRY, kernel::$rows_f16::ENTRY),)?)*
                    $($((Self::$Tile, DType::I8, false) => (kernel::$i8_bf16::ENTRY, kernel::$i8_f16::ENTRY),)?)*
                    $($((Self::$Tile, DType::E4m3, true) => (kernel::$blocks_bf16::ENTRY, kernel::$blocks_f16::ENTRY),)?)*
                    #[allow(unreachable_patterns)]
                    _ => return None,
                };
                match dtype {
                    DType::Bf16 => Some(bf16),
                    DType::F16 => Some(f16),
                    _ => None,
                }
            }
        }
    };
}
tiles! {
    /// 256 outputs; scales of rows.
    N256: 1, 256, 1, 1, rows 4 = linear_quant_wgmma_rows_n256_bf16, linear_quant_wgmma_rows_n256_f16,
        linear_quant_wgmma_i8_n256_bf16, linear_quant_wgmma_i8_n256_f16, blocks;
    /// 256 outputs; two blocks share weights; scales of rows.
    N256Weights2: 1, 256, 2, 1, rows 4 = linear_quant_wgmma_rows_n256_w2_bf16, linear_quant_wgmma_rows_n256_w2_f16,
        linear_quant_wgmma_i8_n256_w2_bf16, linear_quant_wgmma_i8_n256_w2_f16, blocks;
    /// 192 outputs.
    N192: 1, 192, 1, 1, rows 4 = linear_quant_wgmma_rows_n192_bf16, linear_quant_wgmma_rows_n192_f16,
        linear_quant_wgmma_i8_n192_bf16, linear_quant_wgmma_i8_n192_f16,
        blocks 4 = linear_quant_wgmma_blocks_n192_bf16, linear_quant_wgmma_blocks_n192_f16;
    /// 256 tokens by 128 outputs; scales of blocks.
    N128Tokens256: 2, 128, 1, 1, rows, blocks 4 = linear_quant_wgmma_blocks_n128_t256_bf16, linear_quant_wgmma_blocks_n128_t256_f16;
    /// 128 outputs.
    N128: 1, 128, 1, 1, rows 6 = linear_quant_wgmma_rows_n128_bf16, linear_quant_wgmma_rows_n128_f16,
        linear_quant_wgmma_i8_n128_bf16, linear_quant_wgmma_i8_n128_f16,
        blocks 6 = linear_quant_wgmma_blocks_n128_bf16, linear_quant_wgmma_blocks_n128_f16;
    /// 128 outputs, K in halves.
    N128Split2: 1, 128, 1, 2, rows 5 = linear_quant_wgmma_rows_n128_split2_bf16, linear_quant_wgmma_rows_n128_split2_f16,
        linear_quant_wgmma_i8_n128_split2_bf16, linear_quant_wgmma_i8_n128_split2_f16,
        blocks 5 = linear_quant_wgmma_blocks_n128_split2_bf16, linear_quant_wgmma_blocks_n128_split2_f16;
    /// 96 outputs; scales of rows.
    N96: 1, 96, 1, 1, rows 6 = linear_quant_wgmma_rows_n96_bf16, linear_quant_wgmma_rows_n96_f16,
        linear_quant_wgmma_i8_n96_bf16, linear_quant_wgmma_i8_n96_f16, blocks;
    /// 64 outputs.
    N64: 1, 64, 1, 1, rows 8 = linear_quant_wgmma_rows_n64_bf16, linear_quant_wgmma_rows_n64_f16,
        linear_quant_wgmma_i8_n64_bf16, linear_quant_wgmma_i8_n64_f16,
        blocks 8 = linear_quant_wgmma_blocks_n64_bf16, linear_quant_wgmma_blocks_n64_f16;
    /// 64 outputs, K in halves.
    N64Split2: 1, 64, 1, 2, rows 8 = linear_quant_wgmma_rows_n64_split2_bf16, linear_quant_wgmma_rows_n64_split2_f16,
        linear_quant_wgmma_i8_n64_split2_bf16, linear_quant_wgmma_i8_n64_split2_f16,
        blocks 8 = linear_quant_wgmma_blocks_n64_split2_bf16, linear_quant_wgmma_blocks_n64_split2_f16;
    /// 64 outputs, K in quarters.
    N64Split4: 1, 64, 1, 4, rows 8 = linear_quant_wgmma_rows_n64_split4_bf16, linear_quant_wgmma_rows_n64_split4_f16,
        linear_quant_wgmma_i8_n64_split4_bf16, linear_quant_wgmma_i8_n64_split4_f16,
        blocks 8 = linear_quant_wgmma_blocks_n64_split4_bf16, linear_quant_wgmma_blocks_n64_split4_f16;
}

impl LinearQuantTile {
    /// How to launch it for `[m, n]` results on a GPU with so many multiprocessors.
    pub const fn geometry(self, m: u32, n: u32, blocks: bool, multiprocessors: u32) -> Option<Geometry> {
        let Some(shape) = self.shape(blocks) else {
            return None;
        };
        let bytes = shared_bytes(shape, blocks);
        Some(shape.geometry(m, n, multiprocessors, bytes))
    }

    /// The tile that should be the fastest for `[m, n]` results of depth `k`.
    pub fn choose(m: u32, n: u32, k: u32, blocks: bool, multiprocessors: u32) -> Self {
        let estimate = |tile: &Self| {
            let steps = k.div_ceil(kernel::STEP as u32);
            tile.shape(blocks).map_or(f64::INFINITY, |s| estimate(s, m, n, steps, blocks, multiprocessors))
        };
        let best = Self::ALL.iter().copied().min_by(|a, b| estimate(a).total_cmp(&estimate(b)));
        best.unwrap_or(Self::N128)
    }
}

/// Dynamic shared memory of a tile.
const fn shared_bytes(shape: Shape, blocks: bool) -> usize {
    let Shape { n, stages, split, waves, .. } = shape;
    let (n, stages, split) = (n as usize, stages as usize, split as usize);
    if blocks {
        linear_quant_blocks::shared_bytes(n, waves as usize, stages, split)
    } else {
        body::shared_bytes(body::ROWS, n, stages, split)
    }
}

/// Nanoseconds on an H200, roughly: a model of its measured times, whose order is what matters; as
/// [`WgmmaTile::estimate`](super::WgmmaTile::estimate).
fn estimate(shape: Shape, m: u32, n: u32, steps: u32, blocks: bool, multiprocessors: u32) -> f64 {
    /// Bytes of a nanosecond, from memory and from the L2 cache.
    const MEMORY: f64 = 4000.0;
    const CACHE: f64 = 45_000.0;
    /// From memory to one multiprocessor.
    const STREAM: f64 = 40.0;
    /// A launch, from its first load to its last store; what a cluster adds.
    const LAUNCH: f64 = 3000.0;
    const CLUSTER: f64 = 100.0;
    /// What a column of a tile takes to store.
    const COLUMN: f64 = 12.0;
    let (tiles, at_once) = (shape.tiles(m, n), shape.at_once(multiprocessors));
    let rounds = tiles.div_ceil(at_once) as f64;
    let steps = steps.div_ceil(shape.split) as f64;
    let step = match (shape.n, shape.waves, blocks) {
        (64, ..) => 200.0,
        (96, _, false) => 210.0,
        (128, _, false) => 300.0,
        (192, _, false) => 445.0,
        (_, _, false) => 570.0,
        (128, 1, true) => 340.0,
        (128, _, true) => 700.0,
        (_, _, true) => 520.0,
    };
    let products = rounds * (steps * step + COLUMN * (shape.n * shape.waves) as f64);
    let (m, n, k) = (m as f64, n as f64, steps * shape.split as f64 * 128.0);
    let idle = if rounds > 1.0 { multiprocessors as f64 / (at_once as f64 * shape.blocks() as f64) } else { 1.0 };
    let memory = (n * k + m * k + m * n * 2.0) / MEMORY * idle;
    // What nobody else reads takes a multiprocessor as long as the stages that are under way come.
    let alone = shape.down == 1 && m <= body::ROWS as f64;
    let memory = if alone { memory.max(rounds * steps * shape.n as f64 * 128.0 / STREAM) } else { memory };
    let lines = (body::ROWS as u32 * shape.waves) as f64 + shape.n as f64 / shape.down as f64;
    let cache = tiles as f64 * shape.blocks() as f64 * steps * lines * 128.0 / CACHE;
    let exchange = if shape.split == 1 { 0.0 } else { 900.0 };
    let cluster = if shape.blocks() > 1 { CLUSTER } else { 0.0 };
    products.max(memory) + cache + LAUNCH + cluster + exchange
}

/// Whether a device has the path, for operands and results of these types and these scales.
pub fn supports(device: &Device, operands: DType, dtype: DType, blocks: bool) -> bool {
    device.properties().compute_capability == (9, 0) && LinearQuantTile::N128.entry(operands, dtype, blocks).is_some()
}

/// Whether the copy engine can follow rows of these tensors: each begins at a multiple of 16 bytes, and those of the output, whose
/// elements have `size` bytes, end there too. Otherwise the first that does not, and such an address.
pub(super) fn misaligned(args: &Args, size: usize) -> Option<(&'static str, usize)> {
    let check = |arg, address: usize, rows: u32, stride: usize| {
        if !address.is_multiple_of(16) {
            Some((arg, address))
        } else {
            (rows > 1 && (stride == 0 || !stride.is_multiple_of(16))).then_some((arg, address + stride))
        }
    };
    let width = args.n as usize * size;
    check("x", args.x as usize, args.m, args.x_row)
        .or_else(|| check("w", args.w as usize, args.n, args.w_row))
        .or_else(|| check("out", args.y as usize, args.m, args.y_row * size))
        .or_else(|| (!width.is_multiple_of(16)).then_some(("out", args.y as usize + width)))
}

/// Launches a tile on raw pointers (layer L1). Makes the tensor maps on the host; allocates nothing.
///
/// # Errors
/// [`Error::Unsupported`] for element types or scales without an entry, those of [`Device::tensor_map`] and [`Stream::launch`].
///
/// # Safety
/// As for [`linear_quant::launch`](super::linear_quant::launch); rows begin at multiples of 16 bytes, and those of the output end there;
/// `k` is not 0.
pub unsafe fn launch(stream: &Stream, operands: DType, dtype: DType, tile: LinearQuantTile, args: &Args) -> Result<()> {
    let blocks = args.blocks != 0;
    let (Some(entry), Some(shape)) = (tile.entry(operands, dtype, blocks), tile.shape(blocks)) else {
        let scales = if blocks { "blocks" } else { "rows" };
        let what = format!("no kernel of the tile {tile:?} for {operands}, results of {dtype} and scales of {scales}");
        return Err(Error::Unsupported { op: OP, what });
    };
    let (device, multiprocessors) = (stream.device(), stream.device().properties().multiprocessors);
    let (n, split) = (shape.n as usize, shape.split as usize);
    let bytes = shared_bytes(shape, blocks);
    let (m, all) = (args.m, args.n);
    let (x, w, y) = (args.x as usize, args.w as usize, args.y as usize);
    let rows = body::ROWS as u32 * shape.waves;
    let [x, x_last] = operand(device, DType::U8, x, [m, args.k], args.x_row, [rows, 1], kernel::STEP)?;
    let [w, w_last] = operand(device, DType::U8, w, [all, args.k], args.w_row, [shape.n, shape.down], kernel::STEP)?;
    let y_box = [body::GROUP_ROWS, body::chunk(n, split)];
    let launched = kernel::Args {
        x,
        x_last,
        w,
        w_last,
        y: map(device, dtype, y, [m, all], args.y_row, y_box, body::chunk_swizzle(n, split))?,
        bias: args.bias,
        x_scales: args.x_scales,
        x_scale_row: args.x_scale_row,
        x_scale_group: args.x_scale_group,
        w_scales: args.w_scales,
        w_scale_row: args.w_scale_row,
        w_scale_group: args.w_scale_group,
        m,
        n: all,
        k: args.k,
        kind: args.kind,
    };
    // SAFETY: forwarded to the caller.
    unsafe { stream.launch(&entry, &shape.geometry(m, all, multiprocessors, bytes), &launched) }
}
