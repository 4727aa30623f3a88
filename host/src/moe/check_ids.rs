//! Whether ids of experts are ids of experts: for debugging, since operations skip those that are not.

use crate::check::Call;
use crate::device::Stream;
use crate::error::{Error, Result};
use crate::tensor::Tensor;

/// Waits for `topk_ids` and looks at each: -1 (no expert) and numbers below `experts` are right, all else is an error that names the first of them.
///
/// The operations of this module never reach out of bounds for any id: what is out of range counts nowhere and contributes nothing, without a word.
/// This says so instead. `topk_ids`: `[tokens, top_k]`, contiguous; `num_tokens`: `[1]`, how many of the tokens there are, if not all.
/// [`FusedOptions::checked`](super::FusedOptions::checked) and [`FusedQuantOptions::checked`](super::FusedQuantOptions::checked) call it before they launch
/// anything, [`SortOptions::checked`](super::SortOptions::checked) counts on the device.
///
/// # Errors
/// [`Value`](Error::Value) for `topk_ids`; [`Shape`](Error::Shape), [`Stride`](Error::Stride), [`WrongDevice`](Error::WrongDevice);
/// [`Capture`](Error::Capture) while the stream is captured: there is nothing to look at yet.
///
/// ```
/// use warploom::{Device, Stream, Tensor, moe};
/// let device = Device::simt();
/// let stream = Stream::new(&device)?;
/// let ids = Tensor::from_slice(&device, &[0, -1, 7, 8], &[2, 2])?;
/// assert!(moe::check_ids(&stream, &ids, 9, None).is_ok());
/// let error = moe::check_ids(&stream, &ids, 8, None).unwrap_err().to_string();
/// assert!(error.contains("8 for token 1 in slot 1"), "{error}");
/// # Ok::<(), warploom::Error>(())
/// ```
pub fn check_ids(
    stream: &Stream,
    topk_ids: &Tensor<i32>,
    experts: usize,
    num_tokens: Option<&Tensor<i32>>,
) -> Result<()> {
    check("moe::check_ids", stream, topk_ids, experts, num_tokens)
}

/// Waits for a map of experts and looks at each: -1 (not here) and numbers below `local` are right.
pub(super) fn check_map(op: &'static str, stream: &Stream, map: &Tensor<i32>, local: usize) -> Result<()> {
    let mut call = Call::new(op, stream);
    call.read("expert_map", map)?;
    stream.synchronize()?;
    let map = map.to_vec()?;
    let wrong = |&(_, &id): &(usize, &i32)| id != -1 && usize::try_from(id).map_or(true, |id| id >= local);
    match map.iter().enumerate().find(wrong) {
        Some((expert, id)) => {
            let expected = format!("-1, or the place of one of {local} experts");
            call.value(false, "expert_map", expected, format!("{id} for expert {expert}"))
        }
        None => Ok(()),
    }
}

/// [`check_ids`] for the operation `op`.
pub(super) fn check(
    op: &'static str,
    stream: &Stream,
    topk_ids: &Tensor<i32>,
    experts: usize,
    num_tokens: Option<&Tensor<i32>>,
) -> Result<()> {
    let mut call = Call::new(op, stream);
    let [tokens, top_k] = *topk_ids.shape() else {
        return Err(call.bad_shape("topk_ids", topk_ids.shape(), "[tokens, top_k]"));
    };
    call.contiguous("topk_ids", topk_ids)?;
    call.read("topk_ids", topk_ids)?;
    if let Some(n) = num_tokens {
        call.same_shape("num_tokens", n.shape(), &[1])?;
        call.read("num_tokens", n)?;
    }
    if stream.is_capturing() {
        return Err(Error::Capture(format!(
            "{op}: ids are looked at on the host now, and a graph has none yet; check them outside of captures"
        )));
    }
    stream.synchronize()?;
    let tokens = match num_tokens {
        Some(n) => tokens.min(usize::try_from(n.to_vec()?[0]).unwrap_or(0)),
        None => tokens,
    };
    let ids = topk_ids.to_vec()?;
    let wrong = |&(_, &id): &(usize, &i32)| id != -1 && usize::try_from(id).map_or(true, |id| id >= experts);
    let mut found = ids[..tokens * top_k].iter().enumerate().filter(wrong);
    let Some((at, id)) = found.next() else {
        return Ok(());
    };
    let more = match found.count() {
        0 => String::new(),
        others => format!(" and {others} more"),
    };
    let got = format!("{id} for token {} in slot {}{more}", at / top_k, at % top_k);
    call.value(false, "topk_ids", format!("-1, or an expert below {experts}"), got)
}
