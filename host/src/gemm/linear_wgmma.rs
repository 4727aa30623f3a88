//! The path of linear layers on Hopper's tensor cores: its tiles, which of them suits a shape, tensor maps and launch.

use crate::device::{Device, Geometry, Stream, Swizzle, TensorMap, TensorMapDescription};
use crate::error::{Error, Result};
use crate::kernels::gemm::linear_fma::Args;
use crate::kernels::gemm::linear_wgmma as kernel;
use cuda_std::{DType, Entry};

const OP: &str = "linear";

/// What the launch of a tile needs to know.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    /// Outputs.
    pub(super) n: u32,
    /// Stages of the ring.
    pub(super) stages: u32,
    /// Blocks of a cluster with tiles below one another, which share weights.
    pub(super) down: u32,
    /// Blocks with tiles beside one another, which share tokens.
    pub(super) across: u32,
    /// Blocks that share K.
    pub(super) split: u32,
    /// Tokens, in units of 128.
    pub(super) waves: u32,
}

impl Shape {
    /// Blocks of a cluster.
    pub(super) const fn blocks(self) -> u32 {
        self.down * self.across * self.split
    }

    /// Clusters that run at the same time. Clusters of four do not fill the processors of a GPU: 30 of them fit on an
    /// H200's 132 multiprocessors.
    pub(super) const fn at_once(self, multiprocessors: u32) -> u32 {
        let clusters = match self.blocks() {
            1 | 2 => multiprocessors / self.blocks(),
            3 => (multiprocessors as u64 * 39 / 132) as u32,
            _ => (multiprocessors as u64 * 10 / 44) as u32,
        };
        if clusters == 0 { 1 } else { clusters }
    }

    /// Clusters' worth of tiles.
    pub(super) const fn tiles(self, m: u32, n: u32) -> u32 {
        let (rows, columns) =
            (m.div_ceil(kernel::ROWS as u32 * self.waves * self.down), n.div_ceil(self.n * self.across));
        rows.saturating_mul(columns)
    }

    /// How to launch it for `[m, n]` results, with so much shared memory.
    pub(super) const fn geometry(self, m: u32, n: u32, multiprocessors: u32, shared: usize) -> Geometry {
        let (tiles, at_once) = (self.tiles(m, n), self.at_once(multiprocessors));
        // Where K is split a cluster has one tile; otherwise blocks take tiles in turn.
        let clusters = if self.split > 1 || tiles < at_once { tiles } else { at_once };
        Geometry::linear(clusters.saturating_mul(self.blocks()), kernel::THREADS as u32)
            .shared_bytes(shared as u32)
            .cluster(self.blocks())
            .dependent()
    }
}

macro_rules! tiles {
    ($($(#[$doc:meta])* $Tile:ident = $bf16:ident, $f16:ident: $waves:literal, $n:literal, $stages:literal, $down:literal,
        $across:literal, $split:literal;)*) => {
        /// Tiles of [`LinearPath::Wgmma`](super::LinearPath::Wgmma): 128 tokens, or 256, by so many outputs.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum WgmmaTile {
            $($(#[$doc])* $Tile,)*
        }

        impl WgmmaTile {
            /// All of them.
            pub const ALL: &[Self] = &[$(Self::$Tile),*];

            const fn shape(self) -> Shape {
                let (waves, n, stages, down, across, split) = match self {
                    $(Self::$Tile => ($waves, $n, $stages, $down, $across, $split),)*
                };
                Shape { n, stages, down, across, split, waves }
            }

            /// The entry for an element type, if there is one.
            pub const fn entry(self, dtype: DType) -> Option<Entry<kernel::Args>> {
                let (bf16, f16) = match self {
                    $(Self::$Tile => (kernel::$bf16::ENTRY, kernel::$f16::ENTRY),)*
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
    /// 256 outputs.
    N256 = linear_wgmma_n256_bf16, linear_wgmma_n256_f16: 1, 256, 4, 1, 1, 1;
    /// 256 outputs; two blocks share weights.
    N256Weights2 = linear_wgmma_n256_w2_bf16, linear_wgmma_n256_w2_f16: 1, 256, 4, 2, 1, 1;
    /// 224 outputs.
    N224 = linear_wgmma_n224_bf16, linear_wgmma_n224_f16: 1, 224, 4, 1, 1, 1;
    /// 192 outputs.
    N192 = linear_wgmma_n192_bf16, linear_wgmma_n192_f16: 1, 192, 4, 1, 1, 1;
    /// 192 outputs, K in halves.
    N192Split2 = linear_wgmma_n192_split2_bf16, linear_wgmma_n192_split2_f16: 1, 192, 4, 1, 1, 2;
    /// 176 outputs; consumers take turns with tiles of their own.
    N176Turns = linear_wgmma_turns_n176_bf16, linear_wgmma_turns_n176_f16: 1, 176, 5, 1, 1, 1;
    /// 160 outputs; consumers take turns with tiles of their own.
    N160Turns = linear_wgmma_turns_n160_bf16, linear_wgmma_turns_n160_f16: 1, 160, 5, 1, 1, 1;
    /// 160 outputs, K in halves.
    N160Split2 = linear_wgmma_n160_split2_bf16, linear_wgmma_n160_split2_f16: 1, 160, 4, 1, 1, 2;
    /// 144 outputs; consumers take turns with tiles of their own.
    N144Turns = linear_wgmma_turns_n144_bf16, linear_wgmma_turns_n144_f16: 1, 144, 5, 1, 1, 1;
    /// 256 tokens by 144 outputs, of which a consumer has 128 tokens.
    N144Tokens256 = linear_wgmma_t256_n144_bf16, linear_wgmma_t256_n144_f16: 2, 144, 4, 1, 1, 1;
    /// 144 outputs, K in halves.
    N144Split2 = linear_wgmma_n144_split2_bf16, linear_wgmma_n144_split2_f16: 1, 144, 5, 1, 1, 2;
    /// 144 outputs, K in thirds.
    N144Split3 = linear_wgmma_n144_split3_bf16, linear_wgmma_n144_split3_f16: 1, 144, 5, 1, 1, 3;
    /// 128 outputs.
    N128 = linear_wgmma_n128_bf16, linear_wgmma_n128_f16: 1, 128, 6, 1, 1, 1;
    /// 128 outputs; four blocks share tokens.
    N128Tokens4 = linear_wgmma_n128_x4_bf16, linear_wgmma_n128_x4_f16: 1, 128, 6, 1, 4, 1;
    /// 128 outputs, K in halves.
    N128Split2 = linear_wgmma_n128_split2_bf16, linear_wgmma_n128_split2_f16: 1, 128, 5, 1, 1, 2;
    /// 128 outputs, K in thirds.
    N128Split3 = linear_wgmma_n128_split3_bf16, linear_wgmma_n128_split3_f16: 1, 128, 5, 1, 1, 3;
    /// 96 outputs.
    N96 = linear_wgmma_n96_bf16, linear_wgmma_n96_f16: 1, 96, 6, 1, 1, 1;
    /// 96 outputs, K in halves.
    N96Split2 = linear_wgmma_n96_split2_bf16, linear_wgmma_n96_split2_f16: 1, 96, 6, 1, 1, 2;
    /// 96 outputs, K in thirds.
    N96Split3 = linear_wgmma_n96_split3_bf16, linear_wgmma_n96_split3_f16: 1, 96, 6, 1, 1, 3;
    /// 96 outputs, K in quarters.
    N96Split4 = linear_wgmma_n96_split4_bf16, linear_wgmma_n96_split4_f16: 1, 96, 6, 1, 1, 4;
    /// 64 outputs.
    N64 = linear_wgmma_n64_bf16, linear_wgmma_n64_f16: 1, 64, 8, 1, 1, 1;
    /// 64 outputs, K in halves.
    N64Split2 = linear_wgmma_n64_split2_bf16, linear_wgmma_n64_split2_f16: 1, 64, 8, 1, 1, 2;
    /// 64 outputs, K in quarters.
    N64Split4 = linear_wgmma_n64_split4_bf16, linear_wgmma_n64_split4_f16: 1, 64, 8, 1, 1, 4;
}

/// Nanoseconds of a tile on an H200, fitted to what it took for some 100 to 300 shapes: 4 to 8 % off.
#[derive(Clone, Copy, Debug)]
struct Times {
    /// Of a launch: the first stage's way, an exchange, a store.
    launch: f64,
    /// Of a step, and how much each block that runs at the same time adds.
    step: f64,
    block: f64,
    /// Of a further round.
    round: f64,
}

impl Shape {
    const fn times(self) -> Times {
        let (launch, step, block, round) = match (self.split, self.n) {
            (1, 64) => (1930.0, 177.0, 0.34, 1270.0),
            (1, 96) => (2060.0, 201.0, 0.53, 930.0),
            (1, 128) if self.across > 1 => (3120.0, 270.0, 1.8, 1120.0),
            (1, 128) => (2320.0, 255.0, 0.63, 810.0),
            (1, 144) if self.waves > 1 => (3200.0, 551.0, 1.47, 5530.0),
            (1, 144) => (2900.0, 310.0, 0.44, 950.0),
            (1, 160) => (2330.0, 315.0, 0.76, 470.0),
            (1, 176) => (2350.0, 370.0, 0.65, 370.0),
            (1, 192) => (2310.0, 412.0, 0.64, 1670.0),
            (1, 224) => (2140.0, 493.0, 0.58, 2570.0),
            (1, _) if self.down > 1 => (3150.0, 585.0, 0.5, 2800.0),
            (1, _) => (3050.0, 578.0, 0.47, 4010.0),
            (2, 64) => (2180.0, 155.0, 1.08, 2070.0),
            (2, 96) => (3410.0, 201.0, 0.81, 3510.0),
            (2, 128) => (3720.0, 283.0, 0.5, 3900.0),
            (2, 144) => (4470.0, 293.0, 0.7, 4400.0),
            (2, 160) => (4680.0, 350.0, 0.49, 4490.0),
            (2, _) => (4670.0, 366.0, 1.0, 4610.0),
            (3, 96) => (4000.0, 174.0, 0.96, 2810.0),
            (3, 128) => (4620.0, 257.0, 0.73, 3050.0),
            (3, _) => (4990.0, 298.0, 0.6, 3540.0),
            (_, 64) => (3400.0, 258.0, 0.0, 2990.0),
            _ => (4460.0, 254.0, 0.45, 3510.0),
        };
        Times { launch, step, block, round }
    }
}

impl WgmmaTile {
    /// Into how many parts it divides K. Tiles with as many give the same bits.
    pub const fn split(self) -> u32 {
        self.shape().split
    }

    /// How to launch it for `[m, n]` results on a GPU with so many multiprocessors.
    pub const fn geometry(self, m: u32, n: u32, multiprocessors: u32) -> Geometry {
        let shape = self.shape();
        let tokens = kernel::ROWS * shape.waves as usize;
        let shared = kernel::shared_bytes(tokens, shape.n as usize, shape.stages as usize, shape.split as usize);
        shape.geometry(m, n, multiprocessors, shared)
    }

    /// The tile that should be the fastest for `[m, n]` results of depth `k`: the one with the least [`estimate`](Self::estimate).
    pub fn choose(m: u32, n: u32, k: u32, multiprocessors: u32) -> Self {
        let estimate = |tile: &Self| tile.estimate(m, n, k, multiprocessors);
        let best = Self::ALL.iter().copied().min_by(|a, b| estimate(a).total_cmp(&estimate(b)));
        best.unwrap_or(Self::N256)
    }

    /// Nanoseconds on an H200, roughly: a model of its measured times, whose order is what matters.
    ///
    /// Tiles go in rounds, so that a last round with few of them costs as much as a full one; each step along K takes a time
    /// that depends on the tile and on how many blocks load from the L2 cache, and weights and results pass through memory at 4.4 TB/s at best.
    pub fn estimate(self, m: u32, n: u32, k: u32, multiprocessors: u32) -> f64 {
        /// Bytes of a nanosecond from memory.
        const MEMORY: f64 = 4400.0;
        /// From memory to one multiprocessor, and where its stages are few and large.
        const STREAM: f64 = 37.0;
        const WIDE: f64 = 35.0;
        /// How many times as long steps take where rows of `x` and `w` are multiples of 16 KiB: what blocks read at the same time then meets in few
        /// places of the memory. (Rows that are 128 bytes longer take as long as others.)
        const ALIASED: f64 = 1.05;
        /// Bytes of a nanosecond from the L2 cache, where there is so much to do that power is the limit, or memory.
        const CACHE: f64 = 150_000.0;
        /// A launch for one tile of tokens, which waits for weights, and what parts of K in several rounds add.
        const LAUNCH: f64 = 4000.0;
        const EXCHANGE: f64 = 1000.0;
        let shape = self.shape();
        let times = shape.times();
        let (tiles, at_once) = (shape.tiles(m, n), shape.at_once(multiprocessors));
        let rounds = tiles.div_ceil(at_once) as f64;
        let steps = k.div_ceil(kernel::STEP as u32).div_ceil(shape.split) as f64;
        let blocks = (tiles.min(at_once) * shape.blocks()) as f64;
        let aliased = k > 0 && k.is_multiple_of(8192) && shape.split < 3;
        let step = (times.step + times.block * blocks) * if aliased { ALIASED } else { 1.0 };
        let products = rounds * steps * step + (rounds - 1.0) * times.round;
        let tokens = kernel::ROWS as u32 * shape.waves;
        let lines = tokens as f64 / shape.across as f64 + shape.n as f64 / shape.down as f64;
        let loaded = tiles as f64 * shape.blocks() as f64 * steps * lines * 128.0;
        let cache = loaded / CACHE;
        let (m, n, k) = (m as f64, n as f64, k as f64);
        // Multiprocessors that a cluster's size leaves idle all the time.
        let idle = if rounds > 1.0 { multiprocessors as f64 / (at_once * shape.blocks()) as f64 } else { 1.0 };
        let memory = (n * k + m * k + m * n) * 2.0 / MEMORY * idle;
        // What nobody else reads takes a multiprocessor as long as the stages that are under way come.
        let alone = shape.down == 1 && m <= kernel::ROWS as f64;
        let stream = if shape.n > 224 { WIDE } else { STREAM };
        let memory = if alone { memory.max(rounds * steps * shape.n as f64 * 128.0 / stream) } else { memory };
        if m <= kernel::ROWS as f64 && (shape.split == 1 || rounds > 1.0) {
            return products.max(memory) + cache + LAUNCH + if shape.split > 1 { EXCHANGE } else { 0.0 };
        }
        products.max(memory) + times.launch + if rounds < 3.0 { 0.0 } else { cache }
    }
}

/// Whether a device has the path for an element type.
pub fn supports(device: &Device, dtype: DType) -> bool {
    device.properties().compute_capability == (9, 0) && WgmmaTile::N256.entry(dtype).is_some()
}

/// Whether the copy engine can follow rows of these tensors: each begins at a multiple of 16 bytes, and those of the output
/// end there too. Otherwise the first that does not, and such an address.
///
/// An H200 was seen to write beyond the end of a row of the output that is no multiple of 16 bytes.
pub(super) fn misaligned(args: &Args, size: usize) -> Option<(&'static str, usize)> {
    let check = |arg, address: usize, rows: u32, stride: usize| {
        if !address.is_multiple_of(16) {
            Some((arg, address))
        } else {
            (rows > 1 && (stride == 0 || !(stride * size).is_multiple_of(16))).then_some((arg, address + stride * size))
        }
    };
    check("x", args.x as usize, args.m, args.x_row)
        .or_else(|| check("w", args.w as usize, args.n, args.w_row))
        .or_else(|| check("out", args.y as usize, args.m, args.y_row))
        .or_else(|| {
            let width = args.n as usize * size;
            (!width.is_multiple_of(16)).then_some(("out", args.y as usize + width))
        })
}

/// A map of `[rows, width]` elements in boxes of `[box_rows, box_width]`.
pub(super) fn map(
    device: &Device,
    dtype: DType,
    base: usize,
    [rows, width]: [u32; 2],
    stride: usize,
    [box_rows, box_width]: [usize; 2],
    swizzle: Swizzle,
) -> Result<TensorMap> {
    // The stride of a single row does not matter, but must be one.
    let stride = if rows > 1 { stride * dtype.size() } else { 16 };
    device.tensor_map(&TensorMapDescription {
        base: base as u64,
        dtype,
        rank: 2,
        dims: [width as u64, rows as u64, 1, 1, 1],
        strides: [stride as u64, 0, 0, 0],
        box_dims: [box_width as u32, box_rows as u32, 1, 1, 1],
        swizzle,
    })
}

/// The maps of an operand of `[rows, width]` elements, for tiles of `tile` rows, of which `share` blocks load a part each, and for the last of them, if
/// that has fewer.
pub(super) fn operand(
    device: &Device,
    dtype: DType,
    base: usize,
    [rows, width]: [u32; 2],
    stride: usize,
    [tile, share]: [u32; 2],
    step: usize,
) -> Result<[TensorMap; 2]> {
    let boxes = |of: u32| map(device, dtype, base, [rows, width], stride, [of as usize, step], Swizzle::B128);
    let last = kernel::last_rows(rows, tile);
    if share > 1 || last == tile {
        let map = boxes(tile / share)?;
        return Ok([map, map]);
    }
    let last = boxes(last)?;
    Ok([if rows < tile { last } else { boxes(tile)? }, last])
}

/// Launches a tile on raw pointers (layer L1). Makes the tensor maps on the host; allocates nothing.
///
/// # Errors
/// [`Error::Unsupported`] for an element type without an entry, those of [`Device::tensor_map`] and [`Stream::launch`].
///
/// # Safety
/// As for [`linear::launch`](super::linear::launch); rows begin at multiples of 16 bytes, and `n` elements of the output are
/// one; `k` is not 0.
pub unsafe fn launch(stream: &Stream, dtype: DType, tile: WgmmaTile, args: &Args) -> Result<()> {
    let Args { y, x, w, bias, m, n, k, y_row, x_row, w_row, kind } = *args;
    let entry = tile.entry(dtype).ok_or_else(|| Error::Unsupported {
        op: OP,
        what: format!("the path Wgmma has no kernel for {dtype}; there are f16 and bf16"),
    })?;
    let device = stream.device();
    let Shape { n: width, down, across, split, waves, .. } = tile.shape();
    let tokens = kernel::ROWS as u32 * waves;
    let (chunk, swizzle) =
        (kernel::chunk(width as usize, split as usize), kernel::chunk_swizzle(width as usize, split as usize));
    let [x, x_last] = operand(device, dtype, x as usize, [m, k], x_row, [tokens, across], kernel::STEP)?;
    let [w, w_last] = operand(device, dtype, w as usize, [n, k], w_row, [width, down], kernel::STEP)?;
    let y_box = [kernel::GROUP_ROWS, chunk];
    let args = kernel::Args {
        x,
        x_last,
        w,
        w_last,
        y: map(device, dtype, y as usize, [m, n], y_row, y_box, swizzle)?,
        bias,
        m,
        n,
        k,
        kind,
    };
    // SAFETY: forwarded to the caller.
    unsafe { stream.launch(&entry, &tile.geometry(m, n, device.properties().multiprocessors), &args) }
}
