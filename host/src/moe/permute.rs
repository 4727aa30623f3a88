//! Rows of tokens in the order of their experts, and back.

use super::sort::{self, SortInput, SortOptions, SortOutput};
use crate::check::{Call, least};
use crate::device::{Geometry, Stream};
use crate::error::{Error, Result};
use crate::kernels::moe::permute as kernel;
use crate::tensor::Tensor;
use cuda_std::{DType, Element, Entry, Float};

pub use kernel::{Args, UnpermuteArgs};

/// How to launch `moe_permute` for `places` rows of `row_bytes` bytes, moved in units of `unit`.
pub const fn geometry(places: u32, row_bytes: usize, unit: u32) -> Geometry {
    let across = least(row_bytes.div_ceil(unit as usize * kernel::THREADS), u32::MAX as usize);
    Geometry::new([places, across as u32, 1], [kernel::THREADS as u32, 1, 1]).dependent()
}

/// How to launch `moe_unpermute` for `tokens` rows of `n`, sums of `slots` rows.
pub const fn unpermute_geometry(tokens: u32, slots: u32, n: u32) -> Geometry {
    // Threads with little to do take larger blocks, of which fewer have to be started.
    let threads = if slots > 4 { 128 } else { kernel::THREADS as u32 };
    Geometry::new([tokens, n.div_ceil(kernel::COLUMNS as u32 * threads), 1], [threads, 1, 1]).dependent()
}

/// The entry of `moe_unpermute` for an element type, a number of tokens and of slots, if there is one.
pub const fn unpermute_entry(dtype: DType, tokens: u32, slots: u32) -> Option<Entry<UnpermuteArgs>> {
    // Measured on an H200.
    let few = tokens <= 128 && slots > 4;
    Some(match (dtype, few) {
        (DType::F32, true) => kernel::moe_unpermute_few_f32::ENTRY,
        (DType::F16, true) => kernel::moe_unpermute_few_f16::ENTRY,
        (DType::Bf16, true) => kernel::moe_unpermute_few_bf16::ENTRY,
        (DType::F32, false) => kernel::moe_unpermute_f32::ENTRY,
        (DType::F16, false) => kernel::moe_unpermute_f16::ENTRY,
        (DType::Bf16, false) => kernel::moe_unpermute_bf16::ENTRY,
        _ => return None,
    })
}

/// Launches the copy on raw pointers (layer L1).
///
/// # Errors
/// Those of [`Stream::launch`].
///
/// # Safety
/// The pointers are device memory as [`permute`](kernel::permute()) documents, for `places` places, until the launch is done;
/// `out` overlaps no other argument.
pub unsafe fn launch(stream: &Stream, places: u32, args: &Args) -> Result<()> {
    // SAFETY: forwarded to the caller.
    unsafe { stream.launch(&kernel::moe_permute::ENTRY, &geometry(places, args.row_bytes, args.unit), args) }
}

/// Launches the sum on raw pointers (layer L1).
///
/// # Errors
/// [`Error::Unsupported`] for an element type without an entry, and those of [`Stream::launch`].
///
/// # Safety
/// The pointers are device memory as [`unpermute`](kernel::unpermute()) documents, for `tokens` tokens, until the launch is
/// done; `out` overlaps no other argument.
pub unsafe fn launch_unpermute(stream: &Stream, dtype: DType, tokens: u32, args: &UnpermuteArgs) -> Result<()> {
    let entry = unpermute_entry(dtype, tokens, args.slots).ok_or_else(|| Error::Unsupported {
        op: "moe::unpermute",
        what: format!("no kernel for {dtype}; there are f32, f16 and bf16"),
    })?;
    // SAFETY: forwarded to the caller.
    unsafe { stream.launch(&entry, &unpermute_geometry(tokens, args.slots, args.n), args) }
}

/// Sorts pairs by expert as [`moe::sort`](sort::sort), and copies each pair's row of `x` to its place.
///
/// `x`: `[tokens, n]`, dense in its last dimension; `permuted`: `[capacity, n]`, contiguous, as long as `out.sorted_ids`; padding is
/// zeroed. `options.block_size` is the alignment of each expert's rows (1 for none), in the flat convention. Ask for
/// `out.offsets` (where each expert starts) and `out.positions` (the inverse map, which [`unpermute`] needs).
/// Tokens over an expert's capacity: see [`moe::capacity`](super::capacity()).
///
/// # Errors
/// Those of [`moe::sort`](sort::sort), and for `permuted` and `x` [`Shape`](Error::Shape), [`Stride`](Error::Stride),
/// [`Overlap`](Error::Overlap), [`WrongDevice`](Error::WrongDevice); [`Value`](Error::Value) for the packed convention.
pub fn permute<T: Element>(
    stream: &Stream,
    permuted: &mut Tensor<T>,
    out: &mut SortOutput<'_>,
    x: &Tensor<T>,
    input: &SortInput<'_>,
    options: &SortOptions,
    workspace: &mut Tensor<u8>,
) -> Result<()> {
    let mut call = Call::new("moe::permute", stream);
    let flat = options.convention == sort::SortConvention::Flat;
    call.value(flat, "convention", "Flat", format!("{:?}", options.convention))?;
    let [tokens, n] = *x.shape() else {
        return Err(call.bad_shape("x", x.shape(), "[tokens, n]"));
    };
    let top_k = match *input.topk_ids.shape() {
        [rows, top_k] if rows == tokens => top_k,
        _ => return Err(call.bad_shape("input.topk_ids", input.topk_ids.shape(), format!("[{tokens}, top_k]"))),
    };
    let rows = call.rows("x", x)?;
    let places = out.sorted_ids.len();
    call.same_shape("permuted", permuted.shape(), &[places, n])?;
    call.contiguous("permuted", permuted)?;
    let (row_bytes, x_row) = (n * size_of::<T>(), rows.stride * size_of::<T>());
    let (to, from) = (call.write("permuted", permuted)?, call.read("x", x)?);
    // What sorting writes is read by the copy, and the copy writes after it: none of it may be the rows.
    out.name(&mut call)?;
    input.name(&mut call)?;
    call.write("workspace", workspace)?;
    call.check_overlap()?;
    let fits = |unit: usize| [to as usize, from as usize, row_bytes, x_row].iter().all(|v| v.is_multiple_of(unit));
    let unit = [16, 4, 2].into_iter().find(|&u| fits(u)).unwrap_or(1) as u32;
    let slots = options.slots(top_k);
    let blocks = geometry(0, row_bytes, unit).grid[1];
    call.value(blocks <= 65535, "x", "at most 65535 blocks wide", blocks)?;
    let args = Args {
        out: to.cast(),
        x: from.cast(),
        sorted_ids: out.sorted_ids.as_ptr(),
        row_bytes,
        x_row,
        tokens: call.count("x", tokens)?,
        slots: call.count("input.topk_ids", slots)?,
        unit,
    };
    let places = call.count("out.sorted_ids", places)?;
    sort::sort(stream, out, input, options, workspace)?;
    // SAFETY: shapes, device and overlap were checked above, those of the lists by `sort`.
    unsafe { launch(stream, places, &args) }
}

/// `out[t] = Σ weight · y[position]` over the slots of token `t`, in their order: the way back from [`permute`].
///
/// `y`: `[capacity, n]`, contiguous; `positions`: `[tokens, slots]` (-1, and whatever else is no row of `y`, counts as zero);
/// `topk_weights`: the same, ones if `None`; `out`: `[tokens, n]`. A token without any position gets its row of `pass_through`
/// `[tokens, n]`, or zeros without it: overflow of an expert's capacity. Sums are in f32, with one rounding at the end.
///
/// # Errors
/// [`Shape`](Error::Shape), [`Stride`](Error::Stride), [`Overlap`](Error::Overlap), [`WrongDevice`](Error::WrongDevice),
/// [`Unsupported`](Error::Unsupported) for element types other than f32, f16 and bf16.
///
/// ```
/// use warploom::{Device, Stream, Tensor, moe};
/// let device = Device::simt();
/// let stream = Stream::new(&device)?;
/// let y = Tensor::from_slice(&device, &[1.0f32, 2.0, 10.0], &[3, 1])?;
/// let positions = Tensor::from_slice(&device, &[2, 0, -1, -1], &[2, 2])?;
/// let weights = Tensor::from_slice(&device, &[0.5f32, 0.25, 1.0, 1.0], &[2, 2])?;
/// let x = Tensor::from_slice(&device, &[7.0f32, 8.0], &[2, 1])?;
/// let mut out = Tensor::zeros(&device, &[2, 1])?;
/// moe::unpermute(&stream, &mut out, &y, &positions, Some(&weights), Some(&x))?;
/// assert_eq!(out.to_vec()?, [5.25, 8.0]);
/// # Ok::<(), warploom::Error>(())
/// ```
pub fn unpermute<T: Float>(
    stream: &Stream,
    out: &mut Tensor<T>,
    y: &Tensor<T>,
    positions: &Tensor<i32>,
    topk_weights: Option<&Tensor<f32>>,
    pass_through: Option<&Tensor<T>>,
) -> Result<()> {
    let mut call = Call::new("moe::unpermute", stream);
    let [places, n] = *y.shape() else {
        return Err(call.bad_shape("y", y.shape(), "[capacity, n]"));
    };
    let [tokens, slots] = *positions.shape() else {
        return Err(call.bad_shape("positions", positions.shape(), "[tokens, slots]"));
    };
    call.same_shape("out", out.shape(), &[tokens, n])?;
    call.contiguous("y", y)?;
    call.contiguous("positions", positions)?;
    if let Some(w) = topk_weights {
        call.same_shape("topk_weights", w.shape(), &[tokens, slots])?;
        call.contiguous("topk_weights", w)?;
    }
    let mut pass_row = 0;
    if let Some(pass) = pass_through {
        call.same_shape("pass_through", pass.shape(), &[tokens, n])?;
        pass_row = call.rows("pass_through", pass)?.stride;
    }
    let args = UnpermuteArgs {
        out_row: call.rows("out", out)?.stride,
        pass_row,
        out: call.write("out", out)?,
        y: call.read("y", y)?,
        positions: call.read("positions", positions)?.cast(),
        weights: call.read_opt("topk_weights", topk_weights)?.cast(),
        pass: call.read_opt("pass_through", pass_through)?,
        places: call.count("y", places)?,
        slots: call.count("positions", slots)?,
        n: call.count("y", n)?,
    };
    call.check_overlap()?;
    let tokens = call.count("positions", tokens)?;
    let blocks = unpermute_geometry(0, args.slots, args.n).grid[1];
    call.value(blocks <= 65535, "y", "at most 65535 blocks wide", blocks)?;
    // SAFETY: shapes, device and overlap were checked above.
    unsafe { launch_unpermute(stream, T::DTYPE, tokens, &args) }
}
