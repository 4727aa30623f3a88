//! RMS normalisation with 8-bit results and their scales, of `x` or of a sum with a residual.
//!
//! A result is `y` times the reciprocal of its scale (good to a few units in its last place), with
//! `y = x / sqrt(mean(x²) + eps) * weight` in f32, rounded to the nearest number of the format (ties to even). A scale is the
//! largest `|y|` that it covers, at least 10⁻¹⁰, divided by the largest number of the format: 448 for e4m3, 127 for int8. NaN has
//! no say in a scale; it becomes NaN in e4m3 and 0 in int8. `x · weight` is taken first, in f32: where that is beyond f32 the scale is infinite, though `y` may not be; where it reaches
//! beyond 2¹²⁶ results are 0 under a scale that is right. A row whose sum of squares is beyond f32, or that has an infinity, has the least scale and
//! zeros, with NaN where `x · weight` is infinite.
//!
//! Sources of the operations: vLLM's `rms_norm_dynamic_per_token_quant` and its per-block form; Xiao et al.,
//! *SmoothQuant*, 2022, for the smoothing of channels.

use super::rms_norm::{check_eps, check_vector, in_turns, spread_better, spread_instance};
use crate::check::{Call, Rows};
use crate::device::{Geometry, Stream};
use crate::error::Result;
use crate::kernels::norm::{rms_norm_quant as kernel, rms_norm_quant_ring as ring};
use crate::pieces::{self, Held, Variant, Work};
use crate::tensor::Tensor;
use cuda_std::{DType, E4M3, Element, Entry, Float, KernelArgs};
use std::ffi::c_void;

pub use kernel::e4m3_per_group::Args as E4m3PerGroupArgs;
pub use kernel::e4m3_per_token::Args as E4m3PerTokenArgs;
pub use kernel::i8_per_token::Args as I8PerTokenArgs;

/// Instances without a residual come first in the tables.
const fn first(variant: Variant, fused_add: bool) -> usize {
    variant.first() + if fused_add { 12 } else { 0 }
}

/// The entry of [`rms_norm_e4m3_per_token`] for an element type and a [`Variant`], if there is one.
pub const fn e4m3_per_token_entry(dtype: DType, variant: Variant, fused_add: bool) -> Option<Entry<E4m3PerTokenArgs>> {
    pieces::instance(dtype, first(variant, fused_add))
}

/// The entry of [`rms_norm_i8_per_token`] for an element type and a [`Variant`], if there is one.
pub const fn i8_per_token_entry(dtype: DType, variant: Variant, fused_add: bool) -> Option<Entry<I8PerTokenArgs>> {
    pieces::instance(dtype, first(variant, fused_add))
}

/// The entry of [`rms_norm_e4m3_per_group`] for an element type and a [`Variant`], if there is one.
pub const fn e4m3_per_group_entry(dtype: DType, variant: Variant, fused_add: bool) -> Option<Entry<E4m3PerGroupArgs>> {
    pieces::instance(dtype, first(variant, fused_add))
}

/// [`e4m3_per_token_entry`] without a residual for few rows held in two pieces a thread ([`Variant::X2`]).
pub const fn e4m3_per_token_few_entry(dtype: DType) -> Option<Entry<E4m3PerTokenArgs>> {
    pieces::instance(dtype, 24)
}

/// [`i8_per_token_entry`] without a residual for few rows held in two pieces a thread ([`Variant::X2`]).
pub const fn i8_per_token_few_entry(dtype: DType) -> Option<Entry<I8PerTokenArgs>> {
    pieces::instance(dtype, 24)
}

/// [`e4m3_per_token_entry`] without a residual for many rows held in two pieces a thread: half of the threads have four. The results are the same
/// bits.
pub const fn e4m3_per_token_many_entry(dtype: DType) -> Option<Entry<E4m3PerTokenArgs>> {
    pieces::instance(dtype, 27)
}

/// As [`e4m3_per_token_many_entry`], of [`i8_per_token_entry`].
pub const fn i8_per_token_many_entry(dtype: DType) -> Option<Entry<I8PerTokenArgs>> {
    pieces::instance(dtype, 27)
}

/// As [`e4m3_per_token_many_entry`], of [`e4m3_per_group_entry`].
pub const fn e4m3_per_group_many_entry(dtype: DType) -> Option<Entry<E4m3PerGroupArgs>> {
    pieces::instance(dtype, 24)
}

/// [`e4m3_per_token_entry`] for rows that have a [`narrow_geometry`]. The results are the same bits.
pub const fn e4m3_per_token_narrow_entry(dtype: DType, fused_add: bool) -> Option<Entry<E4m3PerTokenArgs>> {
    pieces::instance(dtype, if fused_add { 33 } else { 30 })
}

/// As [`e4m3_per_token_narrow_entry`], of [`i8_per_token_entry`].
pub const fn i8_per_token_narrow_entry(dtype: DType, fused_add: bool) -> Option<Entry<I8PerTokenArgs>> {
    pieces::instance(dtype, if fused_add { 33 } else { 30 })
}

/// As [`e4m3_per_token_narrow_entry`], of [`e4m3_per_group_entry`].
pub const fn e4m3_per_group_narrow_entry(dtype: DType, fused_add: bool) -> Option<Entry<E4m3PerGroupArgs>> {
    pieces::instance(dtype, if fused_add { 30 } else { 27 })
}

/// [`e4m3_per_token_narrow_entry`] without a residual for rows that have a [`narrow_x3_geometry`]: one warp does what two do. The results are the same
/// bits.
pub const fn e4m3_per_token_narrow_x3_entry(dtype: DType) -> Option<Entry<E4m3PerTokenArgs>> {
    pieces::instance(dtype, 36)
}

/// As [`e4m3_per_token_narrow_x3_entry`], of [`i8_per_token_entry`].
pub const fn i8_per_token_narrow_x3_entry(dtype: DType) -> Option<Entry<I8PerTokenArgs>> {
    pieces::instance(dtype, 36)
}

/// [`e4m3_per_group_narrow_entry`] without a residual for many rows: more of them fit beside each other.
pub const fn e4m3_per_group_narrow_many_entry(dtype: DType) -> Option<Entry<E4m3PerGroupArgs>> {
    pieces::instance(dtype, 33)
}

/// As [`e4m3_per_token_narrow_x3_entry`], of [`e4m3_per_group_entry`].
pub const fn e4m3_per_group_narrow_x3_entry(dtype: DType) -> Option<Entry<E4m3PerGroupArgs>> {
    pieces::instance(dtype, 36)
}

/// How rows of `n` elements are held that have this [`Variant`], if they can be: [`Held::new`], but eight pieces a thread up to 80 KiB only.
pub const fn held(dtype: DType, variant: Variant, n: u32) -> Option<Held> {
    match Held::new(dtype, variant, n) {
        Some(Held::X8) if n.div_ceil(8 * pieces::piece(dtype, true)) > kernel::X8_THREADS => None,
        how => how,
    }
}

/// Where the instances begin.
const fn held_first(how: Held, fused_add: bool) -> usize {
    let first = match how {
        Held::AnyX4 => 39,
        Held::X8 => 45,
    };
    if fused_add { first + 3 } else { first }
}

/// [`e4m3_per_token_entry`] for rows that are [`held`]. The results are the bits of that one, launched as this one.
pub const fn e4m3_per_token_held_entry(dtype: DType, how: Held, fused_add: bool) -> Option<Entry<E4m3PerTokenArgs>> {
    pieces::instance(dtype, held_first(how, fused_add))
}

/// As [`e4m3_per_token_held_entry`], of [`i8_per_token_entry`].
pub const fn i8_per_token_held_entry(dtype: DType, how: Held, fused_add: bool) -> Option<Entry<I8PerTokenArgs>> {
    pieces::instance(dtype, held_first(how, fused_add))
}

/// As [`e4m3_per_token_held_entry`], of [`e4m3_per_group_entry`].
pub const fn e4m3_per_group_held_entry(dtype: DType, how: Held, fused_add: bool) -> Option<Entry<E4m3PerGroupArgs>> {
    pieces::instance(dtype, held_first(how, fused_add))
}

/// How to launch [`e4m3_per_token_held_entry`] and its like for `rows` rows of `n` elements.
pub const fn held_geometry(dtype: DType, how: Held, rows: u32, n: u32) -> Geometry {
    let geometry = how.geometry(dtype, rows, n, true, kernel::SHARED_BYTES);
    // Rows that are not aligned take long: where there are a few for each multiprocessor, none should have one more than its part.
    if matches!(how, Held::AnyX4) { geometry.evenly() } else { geometry }
}

/// Whether rows of `n` elements that are [`held`] as [`Held::X8`] had better be taken in turns, on Hopper: the results are the same bits.
///
/// From half as many rows as there are multiprocessors on where tokens have scales, since weights are loaded once. Groups, which do not need them twice, gain as soon as held rows come in
/// turns as well: those of a block of up to 416 threads fit a multiprocessor in twos. In long launches of such rows, and of 32-bit elements, the memory is busy either way. Measured on an
/// H200, the least rows of tokens on an H100.
pub const fn better_in_turns(dtype: DType, n: u32, rows: u32, multiprocessors: u32, per_token: bool) -> bool {
    let short = Held::X8.geometry(dtype, 1, n, true, 0).block[0] <= 416;
    let least = if per_token {
        multiprocessors / 2
    } else if short {
        2 * multiprocessors
    } else {
        multiprocessors + 1
    };
    let most = if dtype.size() == 4 || short && !per_token { 8 * multiprocessors } else { u32::MAX };
    least <= rows && rows <= most
}

/// Whether rows that are [`held`] by `threads` threads had better be read twice, by [`e4m3_per_token_entry`] or its like launched as
/// [`held_geometry`] says: the results are the same bits.
///
/// Rows of eight pieces a thread, with a scale a token, that are a few more than fit at once: a multiprocessor holds one of them, or two of up to 320 threads,
/// and the rest would come in turns, where twice as many that are read twice run at once. Measured with bf16 on H100s, which have as many
/// multiprocessors as an H200.
pub const fn better_read_twice(how: Held, threads: u32, rows: u32, fused_add: bool) -> bool {
    const MULTIPROCESSORS: u32 = 132;
    let at_once = if threads <= 320 { 2 * MULTIPROCESSORS } else { MULTIPROCESSORS };
    let most = if fused_add { at_once + at_once / 2 } else { 3 * MULTIPROCESSORS };
    matches!(how, Held::X8) && at_once < rows && rows <= most
}

/// Whether rows of `n` elements, [`held`] as [`Held::X8`], leave registers for their results where blocks take rows in turns.
const fn ring_keeps_results(dtype: DType, n: u32) -> bool {
    dtype.size() == 4 || Held::X8.geometry(dtype, 1, n, true, 0).block[0] <= kernel::RING_THREADS
}

/// Where the entries of such rows begin. Of 32-bit elements there are none that do not keep results.
const fn ring_first(dtype: DType, n: u32, fused_add: bool) -> usize {
    let first = if ring_keeps_results(dtype, n) { 51 } else { 53 };
    if fused_add { first + 5 } else { first }
}

/// [`e4m3_per_token_held_entry`] of [`Held::X8`] for many rows of `n` elements, on Hopper: blocks take rows in turns. The results are the same bits.
pub const fn e4m3_per_token_ring_entry(dtype: DType, n: u32, fused_add: bool) -> Option<Entry<E4m3PerTokenArgs>> {
    pieces::instance(dtype, ring_first(dtype, n, fused_add))
}

/// As [`e4m3_per_token_ring_entry`], of [`i8_per_token_held_entry`].
pub const fn i8_per_token_ring_entry(dtype: DType, n: u32, fused_add: bool) -> Option<Entry<I8PerTokenArgs>> {
    pieces::instance(dtype, ring_first(dtype, n, fused_add))
}

/// As [`e4m3_per_token_ring_entry`], of [`e4m3_per_group_held_entry`].
pub const fn e4m3_per_group_ring_entry(dtype: DType, n: u32, fused_add: bool) -> Option<Entry<E4m3PerGroupArgs>> {
    pieces::instance(dtype, ring_first(dtype, n, fused_add))
}

/// How to launch [`e4m3_per_token_ring_entry`] and its like with so many blocks, one for each multiprocessor at most.
pub const fn ring_geometry(dtype: DType, n: u32, fused_add: bool, blocks: u32) -> Geometry {
    let threads = Held::X8.geometry(dtype, 1, n, true, 0).block[0];
    let shared = ring::shared_bytes(threads, dtype.size(), fused_add, ring_keeps_results(dtype, n));
    Geometry::linear(blocks, threads).shared_bytes(shared as u32).dependent()
}

/// [`e4m3_per_token_held_entry`] of [`Held::AnyX4`] for many rows, on Hopper, launched as [`any_ring_geometry`](super::rms_norm::any_ring_geometry) says: blocks take rows in turns. The
/// results are the same bits.
pub const fn e4m3_per_token_any_ring_entry(dtype: DType, fused_add: bool) -> Option<Entry<E4m3PerTokenArgs>> {
    pieces::instance(dtype, if fused_add { 64 } else { 61 })
}

/// As [`e4m3_per_token_any_ring_entry`], of [`i8_per_token_held_entry`].
pub const fn i8_per_token_any_ring_entry(dtype: DType, fused_add: bool) -> Option<Entry<I8PerTokenArgs>> {
    pieces::instance(dtype, if fused_add { 64 } else { 61 })
}

/// As [`e4m3_per_token_any_ring_entry`], of [`e4m3_per_group_held_entry`].
pub const fn e4m3_per_group_any_ring_entry(dtype: DType, fused_add: bool) -> Option<Entry<E4m3PerGroupArgs>> {
    pieces::instance(dtype, if fused_add { 64 } else { 61 })
}

/// The instance for a few rows of `n` elements, if there is one.
const fn cluster_instance<A: KernelArgs>(dtype: DType, variant: Variant, n: u32, fused_add: bool) -> Option<Entry<A>> {
    match spread_instance(variant, held(dtype, variant, n)) {
        Some(instance) => pieces::instance(dtype, if fused_add { 76 } else { 67 } + instance),
        None => None,
    }
}

/// [`e4m3_per_token_entry`] for a few aligned rows that are held in registers, on Hopper, launched as
/// [`cluster_geometry`](super::rms_norm::cluster_geometry) says: a cluster of blocks for each. The results are the same bits.
pub const fn e4m3_per_token_cluster_entry(
    dtype: DType,
    variant: Variant,
    n: u32,
    fused_add: bool,
) -> Option<Entry<E4m3PerTokenArgs>> {
    cluster_instance(dtype, variant, n, fused_add)
}

/// As [`e4m3_per_token_cluster_entry`], of [`i8_per_token_entry`].
pub const fn i8_per_token_cluster_entry(
    dtype: DType,
    variant: Variant,
    n: u32,
    fused_add: bool,
) -> Option<Entry<I8PerTokenArgs>> {
    cluster_instance(dtype, variant, n, fused_add)
}

/// As [`e4m3_per_token_cluster_entry`], of [`e4m3_per_group_entry`].
pub const fn e4m3_per_group_cluster_entry(
    dtype: DType,
    variant: Variant,
    n: u32,
    fused_add: bool,
) -> Option<Entry<E4m3PerGroupArgs>> {
    cluster_instance(dtype, variant, n, fused_add)
}

/// How to launch the narrow entries, where they serve: rows of up to four warps, in two pieces of 16 bytes a thread ([`Variant::X2`]).
pub const fn narrow_geometry(dtype: DType, rows: u32, n: u32, fused_add: bool) -> Option<Geometry> {
    pieces::narrow(dtype, rows, n, if fused_add { Work::Add } else { Work::Quantise }, kernel::SHARED_BYTES)
}

/// How to launch the entries of one warp a row with three pieces a thread, where they serve: rows that are longer than two pieces of a warp.
pub const fn narrow_x3_geometry(dtype: DType, rows: u32, n: u32) -> Option<Geometry> {
    match n.div_ceil(pieces::piece(dtype, true)) {
        65..=96 => {
            let grid = [rows.div_ceil(4), 1, 1];
            Some(Geometry::new(grid, [32, 4, 1]).shared_bytes(kernel::SHARED_BYTES as u32).dependent().evenly())
        }
        _ => None,
    }
}

/// The least rows of a launch of the entries of one warp with three pieces a thread. Measured on an H200.
pub const LEAST_X3: u32 = 512;

/// The least elements of a launch of [`e4m3_per_group_narrow_many_entry`]. Measured on an H200.
pub const LEAST_NARROW_MANY: u64 = 3 << 19;

/// How to launch the entries for many, where it can be done: the threads of a row of [`geometry`] must be an even number of warps, four or more.
pub const fn many_geometry(dtype: DType, rows: u32, n: u32) -> Option<Geometry> {
    let mut geometry = geometry(dtype, Variant::X2, rows, n);
    let threads = geometry.block[0];
    if n.div_ceil(pieces::piece(dtype, true)) > 1024 || !threads.is_multiple_of(64) || threads == 64 {
        return None;
    }
    geometry.block[0] = threads / 2;
    Some(geometry)
}

/// The least elements of a launch of the entries for many: of narrow rows, and of others. Measured on an H200.
pub const LEAST_MANY: [u64; 2] = [1 << 22, 11 << 18];

/// Up to so many elements the entries for few are as fast as the others or faster. Measured on an H200.
pub const MOST_FEW: u64 = 3 << 20;

/// How to launch any of the others for `rows` rows of `n` elements.
pub const fn geometry(dtype: DType, variant: Variant, rows: u32, n: u32) -> Geometry {
    let geometry = variant.geometry(dtype, rows, n, true, kernel::SHARED_BYTES);
    if matches!(variant, Variant::X2) { geometry.evenly() } else { geometry }
}

/// Rows without a residual, held in two pieces a thread: `usual` is how all of them can be launched, `narrow` how narrow ones are.
struct Alone {
    dtype: DType,
    rows: u32,
    n: u32,
    usual: Geometry,
    narrow: Option<Geometry>,
}

impl Alone {
    /// How to launch the entries of one warp with three pieces a thread, if that serves better than others.
    fn x3(&self) -> Option<Geometry> {
        narrow_x3_geometry(self.dtype, self.rows, self.n).filter(|_| self.rows >= LEAST_X3)
    }

    /// The entry that serves better than others where a row has a scale, if one does.
    fn tokens<A>(
        &self,
        x3: impl Fn(DType) -> Option<Entry<A>>,
        few: impl Fn(DType) -> Option<Entry<A>>,
    ) -> Option<(Option<Entry<A>>, Geometry)> {
        match (self.x3(), self.narrow) {
            (Some(geometry), _) => Some((x3(self.dtype), geometry)),
            (None, None) if self.rows as u64 * self.n as u64 <= MOST_FEW => Some((few(self.dtype), self.usual)),
            _ => None,
        }
    }

    /// As [`tokens`](Self::tokens), where a group has a scale.
    fn groups<A>(
        &self,
        x3: impl Fn(DType) -> Option<Entry<A>>,
        narrow_many: impl Fn(DType) -> Option<Entry<A>>,
    ) -> Option<(Option<Entry<A>>, Geometry)> {
        let many = self.rows as u64 * self.n as u64 >= LEAST_NARROW_MANY;
        match (self.x3(), self.narrow) {
            (Some(geometry), _) => Some((x3(self.dtype), geometry)),
            (None, Some(narrow)) if many => Some((narrow_many(self.dtype), narrow)),
            _ => None,
        }
    }
}

macro_rules! launches {
    ($($(#[$m:meta])* $name:ident, $Args:ident, $entry:ident, $many:ident, $narrow:ident, $held:ident, $ring:ident, $any_ring:ident, $cluster:ident, $per_token:literal, $own:expr, $op:literal, |$args:ident| $smooth:expr;)*) => { $(
        $(#[$m])*
        ///
        /// `x` and `out` are `[rows, n]` with the distances in `args`; `residual` is `[rows, n]`, added to `x` and
        /// replaced by the sum, or null; `weight` is `[n]`, or null for ones, and then `weight_offset` is 0.
        ///
        /// # Errors
        /// [`Error::Unsupported`](crate::Error::Unsupported) for an element type without an entry, and those of
        /// [`Stream::launch`].
        ///
        /// # Safety
        /// The pointers are device memory of those sizes, aligned to their element type, until the launch is done;
        /// `out`, `scales` and `residual` overlap no other, but `residual` may be the very `x`.
        pub unsafe fn $name(stream: &Stream, dtype: DType, $args: &$Args) -> Result<()> {
            let (size, rows) = (dtype.size(), $args.rows);
            let smooth: *const f32 = $smooth;
            let places = [
                ($args.x, $args.x_stride, size),
                ($args.residual.cast_const(), $args.residual_stride, size),
                ($args.weight, 0, size),
                (smooth.cast(), 0, size_of::<f32>()),
                ($args.out.cast_const().cast(), $args.out_stride, 1),
            ];
            let variant = Variant::new(dtype, $args.n, pieces::aligned(dtype, $args.n, &places));
            let (usual, alone) = (geometry(dtype, variant, rows, $args.n), $args.residual.is_null());
            let narrow = narrow_geometry(dtype, rows, $args.n, !alone);
            let is_many = rows as u64 * $args.n as u64 >= LEAST_MANY[usize::from(narrow.is_none())];
            let many = if is_many { many_geometry(dtype, rows, $args.n) } else { None };
            let own = $own(&Alone { dtype, rows, n: $args.n, usual, narrow });
            let spread = $cluster(dtype, variant, $args.n, !alone)
                .and_then(|_| spread_better(stream.device(), dtype, variant, rows, $args.n, !alone));
            let (entry, geometry): (Option<Entry<$Args>>, _) = match (many, own, narrow) {
                _ if let Some(spread) = spread => ($cluster(dtype, variant, $args.n, !alone), spread),
                _ if let Some(how) = held(dtype, variant, $args.n) => {
                    let geometry = held_geometry(dtype, how, rows, $args.n);
                    let properties = stream.device().properties();
                    let multiprocessors = properties.multiprocessors;
                    if smooth.is_null()
                        && let Some(turns) = in_turns(stream.device(), dtype, how, rows, $args.n, !alone)
                    {
                        ($any_ring(dtype, !alone), turns)
                    } else if how == Held::X8
                        && properties.compute_capability == (9, 0)
                        && better_in_turns(dtype, $args.n, rows, multiprocessors, $per_token)
                    {
                        let blocks = rows.min(multiprocessors);
                        ($ring(dtype, $args.n, !alone), ring_geometry(dtype, $args.n, !alone, blocks))
                    } else if $per_token && better_read_twice(how, geometry.block[0], rows, !alone) {
                        ($entry(dtype, variant, !alone), geometry)
                    } else {
                        ($held(dtype, how, !alone), geometry)
                    }
                }
                _ if variant != Variant::X2 => ($entry(dtype, variant, !alone), usual),
                (Some(many), ..) if alone => ($many(dtype), many),
                (_, Some(own), _) if alone => own,
                (.., Some(narrow)) => ($narrow(dtype, !alone), narrow),
                _ => ($entry(dtype, variant, !alone), usual),
            };
            // SAFETY: forwarded to the caller; the entry fits the alignment.
            unsafe { pieces::launch(stream, $op, dtype, entry, &geometry, $args) }
        }
    )* };
}
launches! {
    /// Launches [`rms_norm_e4m3_per_token`] on raw pointers (layer L1). `scales` is `[rows]`; `smooth` is `[n]` or null.
    launch_e4m3_per_token, E4m3PerTokenArgs, e4m3_per_token_entry, e4m3_per_token_many_entry, e4m3_per_token_narrow_entry,
        e4m3_per_token_held_entry, e4m3_per_token_ring_entry, e4m3_per_token_any_ring_entry, e4m3_per_token_cluster_entry, true, |rows: &Alone| rows.tokens(e4m3_per_token_narrow_x3_entry, e4m3_per_token_few_entry),
        "rms_norm_e4m3_per_token", |args| args.smooth;
    /// Launches [`rms_norm_i8_per_token`] on raw pointers (layer L1). `scales` is `[rows]`; `smooth` is `[n]` or null.
    launch_i8_per_token, I8PerTokenArgs, i8_per_token_entry, i8_per_token_many_entry, i8_per_token_narrow_entry,
        i8_per_token_held_entry, i8_per_token_ring_entry, i8_per_token_any_ring_entry, i8_per_token_cluster_entry, true, |rows: &Alone| rows.tokens(i8_per_token_narrow_x3_entry, i8_per_token_few_entry),
        "rms_norm_i8_per_token", |args| args.smooth;
    /// Launches [`rms_norm_e4m3_per_group`] on raw pointers (layer L1). `scales` is `[rows, ceil(n / 128)]` with the
    /// distances in `args`.
    launch_e4m3_per_group, E4m3PerGroupArgs, e4m3_per_group_entry, e4m3_per_group_many_entry, e4m3_per_group_narrow_entry,
        e4m3_per_group_held_entry, e4m3_per_group_ring_entry, e4m3_per_group_any_ring_entry, e4m3_per_group_cluster_entry, false, |rows: &Alone| rows.groups(e4m3_per_group_narrow_x3_entry, e4m3_per_group_narrow_many_entry),
        "rms_norm_e4m3_per_group", |_args| std::ptr::null();
}

/// What may be added to a quantised normalisation.
#[derive(Debug)]
#[non_exhaustive]
#[must_use]
pub struct RmsNormQuantOptions<'a, T: Element> {
    /// `[n]`; ones if absent.
    pub weight: Option<&'a Tensor<T>>,
    /// Whether the factor is `1 + weight`, as Gemma has it.
    pub one_plus_weight: bool,
    /// `[n]`: results are multiplied by it before they are quantised (pass reciprocals of SmoothQuant's factors). Per
    /// token only.
    pub smooth: Option<&'a Tensor<f32>>,
}

impl<T: Element> Clone for RmsNormQuantOptions<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T: Element> Copy for RmsNormQuantOptions<'_, T> {}

impl<T: Element> Default for RmsNormQuantOptions<'_, T> {
    fn default() -> Self {
        Self { weight: None, one_plus_weight: false, smooth: None }
    }
}

impl<'a, T: Element> RmsNormQuantOptions<'a, T> {
    /// With this weight.
    pub fn weight(mut self, weight: &'a Tensor<T>) -> Self {
        self.weight = Some(weight);
        self
    }

    /// With the factor `1 + weight`.
    pub fn one_plus_weight(mut self, weight: &'a Tensor<T>) -> Self {
        self.one_plus_weight = true;
        self.weight(weight)
    }

    /// With this factor for each column.
    pub fn smooth(mut self, smooth: &'a Tensor<f32>) -> Self {
        self.smooth = Some(smooth);
        self
    }
}

/// Pointers and distances that the operations have in common.
struct Checked {
    x: *const c_void,
    residual: *mut c_void,
    weight: *const c_void,
    smooth: *const f32,
    out: *mut c_void,
    from: Rows,
    residual_stride: usize,
    out_stride: usize,
    weight_offset: f32,
    rows: u32,
    n: u32,
}

fn check<T: Float, Q: Element>(
    call: &mut Call<'_>,
    out: &mut Tensor<Q>,
    residual: Option<&mut Tensor<T>>,
    x: &Tensor<T>,
    eps: f32,
    options: &RmsNormQuantOptions<'_, T>,
) -> Result<Checked> {
    let (to, from) = (call.rows("out", out)?, call.rows("x", x)?);
    call.same_shape("out", out.shape(), x.shape())?;
    check_vector(call, "weight", options.weight, from.width)?;
    check_vector(call, "smooth", options.smooth, from.width)?;
    check_eps(call, eps)?;
    let mut residual_stride = 0;
    if let Some(residual) = &residual {
        call.same_shape("residual", residual.shape(), x.shape())?;
        residual_stride = call.rows("residual", residual)?.stride;
    }
    Ok(Checked {
        x: call.read("x", x)?,
        residual: call.write_opt("residual", residual)?,
        weight: call.read_opt("weight", options.weight)?,
        smooth: call.read_opt("smooth", options.smooth)?.cast(),
        out: call.write("out", out)?,
        from,
        residual_stride,
        out_stride: to.stride,
        weight_offset: if options.one_plus_weight && options.weight.is_some() { 1.0 } else { 0.0 },
        rows: call.count("x", from.rows)?,
        n: call.count("x", from.width)?,
    })
}

macro_rules! per_token {
    ($($(#[$m:meta])* $name:ident, $Q:ident, $Args:ident, $launch:ident;)*) => { $(
        $(#[$m])*
        ///
        /// `x` and `out` are `[.., n]` of the same shape, the rows of each at one distance from each other; `scales` is
        /// `[rows]`, dense, where `rows` is the product of all dimensions of `x` but the last. A `residual`, of the shape
        /// of `x`, is added to `x` first; the sum, rounded to the element type, replaces it and is normalised.
        ///
        /// # Errors
        /// [`DType`](crate::Error::DType) for 8-bit inputs, [`Shape`](crate::Error::Shape), [`Stride`](crate::Error::Stride), [`Overlap`](crate::Error::Overlap),
        /// [`WrongDevice`](crate::Error::WrongDevice); [`Value`](crate::Error::Value) for an `eps` that is negative,
        /// infinite or NaN, and for more than 2^31 - 1 rows or columns.
        pub fn $name<T: Float>(
            stream: &Stream,
            out: &mut Tensor<$Q>,
            scales: &mut Tensor<f32>,
            residual: Option<&mut Tensor<T>>,
            x: &Tensor<T>,
            eps: f32,
            options: &RmsNormQuantOptions<'_, T>,
        ) -> Result<()> {
            let mut call = Call::new(stringify!($name), stream);
            call.float("x", T::DTYPE)?;
            let c = check(&mut call, out, residual, x, eps, options)?;
            call.same_shape("scales", scales.shape(), &[c.from.rows])?;
            call.contiguous("scales", scales)?;
            let args = $Args {
                x: c.x,
                residual: c.residual,
                weight: c.weight,
                smooth: c.smooth,
                out: c.out.cast(),
                scales: call.write("scales", scales)?.cast(),
                rows: c.rows,
                n: c.n,
                x_stride: c.from.stride,
                residual_stride: c.residual_stride,
                out_stride: c.out_stride,
                weight_offset: c.weight_offset,
                eps,
            };
            call.check_overlap_but(&[("residual", "x")])?;
            // SAFETY: shapes, device and overlap were checked above, and tensors are aligned to their elements.
            unsafe { $launch(stream, T::DTYPE, &args) }
        }
    )* };
}
per_token! {
    /// RMS normalisation with e4m3 results and a scale for each row.
    rms_norm_e4m3_per_token, E4M3, E4m3PerTokenArgs, launch_e4m3_per_token;
    /// RMS normalisation with int8 results and a scale for each row.
    rms_norm_i8_per_token, i8, I8PerTokenArgs, launch_i8_per_token;
}

/// RMS normalisation with e4m3 results and a scale for each row and each group of 128 columns.
///
/// `x` and `out` are `[.., n]` of the same shape, the rows of each at one distance from each other; `scales` is
/// `[rows, ceil(n / 128)]`, with any strides. The last group may be narrower. A `residual` is as for
/// [`rms_norm_e4m3_per_token`].
///
/// # Errors
/// As for [`rms_norm_e4m3_per_token`]; [`Unsupported`](crate::Error::Unsupported) for `smooth`.
pub fn rms_norm_e4m3_per_group<T: Float>(
    stream: &Stream,
    out: &mut Tensor<E4M3>,
    scales: &mut Tensor<f32>,
    residual: Option<&mut Tensor<T>>,
    x: &Tensor<T>,
    eps: f32,
    options: &RmsNormQuantOptions<'_, T>,
) -> Result<()> {
    const OP: &str = "rms_norm_e4m3_per_group";
    if options.smooth.is_some() {
        let other = match options.weight {
            None => "give the factors as `weight`",
            Some(_) if options.one_plus_weight => "give `(1 + weight) * factors` as `weight` without `one_plus_weight`",
            Some(_) => "multiply `weight` with the factors",
        };
        let what = format!("no smoothing with scales of groups: take scales of tokens, or {other}");
        return Err(crate::Error::Unsupported { op: OP, what });
    }
    let mut call = Call::new(OP, stream);
    call.float("x", T::DTYPE)?;
    let c = check(&mut call, out, residual, x, eps, options)?;
    let (scale_row_stride, scale_group_stride) = pieces::scale_strides(&call, scales, c.from.rows, c.from.width)?;
    let args = E4m3PerGroupArgs {
        x: c.x,
        residual: c.residual,
        weight: c.weight,
        out: c.out.cast(),
        scales: call.write("scales", scales)?.cast(),
        rows: c.rows,
        n: c.n,
        x_stride: c.from.stride,
        residual_stride: c.residual_stride,
        out_stride: c.out_stride,
        scale_row_stride,
        scale_group_stride,
        weight_offset: c.weight_offset,
        eps,
    };
    call.check_overlap_but(&[("residual", "x")])?;
    // Rows of nothing have no scales either, so there is no memory that bounds their number.
    if args.n == 0 {
        return Ok(());
    }
    // SAFETY: shapes, device and overlap were checked above, and tensors are aligned to their elements.
    unsafe { launch_e4m3_per_group(stream, T::DTYPE, &args) }
}
