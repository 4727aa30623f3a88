//! Sorting of pairs by expert.

use crate::moe::{SortConvention, SortOptions};

/// What [`sort`] gives: the outputs of [`crate::moe::sort()`], as long as the padded list.
#[derive(Clone, Debug, PartialEq)]
pub struct Sorted {
    /// Pairs by expert, each expert padded.
    pub sorted_ids: Vec<i32>,
    /// The expert of each block.
    pub expert_ids: Vec<i32>,
    /// Weights in the order of `sorted_ids`, 0 for padding.
    pub sorted_weights: Vec<f32>,
    /// Where each pair went, -1 for nowhere.
    pub positions: Vec<i32>,
    /// Where each expert starts.
    pub offsets: Vec<i32>,
    /// Pairs of each expert.
    pub expert_counts: Vec<i32>,
    /// Ids out of range.
    pub invalid: i32,
}

/// Sorts the first `tokens` rows of `topk_ids`, whose tensor has room for `room` of `top_k` ids.
///
/// `local[e]` is the number of routed expert `e` among the `bins` of this device, or -1; masked experts have no number among
/// those that are kept, so `labels[bin]` says what `expert_ids` calls a bin (`None`: gets no block).
#[allow(clippy::too_many_arguments)]
pub fn sort(
    topk_ids: &[i32],
    topk_weights: &[f32],
    tokens: usize,
    room: usize,
    top_k: usize,
    local: &[i32],
    labels: &[Option<i32>],
    options: &SortOptions,
) -> Sorted {
    let shared = options.shared_experts;
    let appended = if options.append_shared { shared } else { 0 };
    let slots = top_k + appended;
    let routed = labels.len() - shared;
    let mut lists = vec![vec![]; labels.len()];
    let mut invalid = 0;
    for token in 0..tokens {
        for slot in 0..slots {
            let id = if slot < top_k { topk_ids[token * top_k + slot] } else { (local.len() + slot - top_k) as i32 };
            let bin = match id {
                -1 => continue,
                id if (0..local.len() as i32).contains(&id) => match local[id as usize] {
                    -1 => continue,
                    bin if (bin as usize) < routed => bin as usize,
                    _ => {
                        invalid += 1;
                        continue;
                    }
                },
                id if id as usize >= local.len() && (id as usize) < local.len() + shared => {
                    routed + id as usize - local.len()
                }
                _ => {
                    invalid += 1;
                    continue;
                }
            };
            lists[bin].push((token, slot));
        }
    }
    let packed = options.convention == SortConvention::Packed;
    let pack = |token: usize, slot: usize| token as i32 | ((slot as u32) as i32 * (1 << 24));
    let sentinel = if packed { pack(tokens, slots) } else { (room * slots) as i32 };
    let mut out = Sorted {
        sorted_ids: vec![],
        expert_ids: vec![],
        sorted_weights: vec![],
        positions: vec![-1; room * slots],
        offsets: vec![],
        expert_counts: lists.iter().map(|l| l.len() as i32).collect(),
        invalid,
    };
    for (list, label) in lists.iter().zip(labels) {
        out.offsets.push(out.sorted_ids.len() as i32);
        for &(token, slot) in list {
            out.positions[token * slots + slot] = out.sorted_ids.len() as i32;
            out.sorted_ids.push(if packed { pack(token, slot) } else { (token * slots + slot) as i32 });
            out.sorted_weights.push(if slot < top_k { topk_weights[token * top_k + slot] } else { 1.0 });
        }
        let Some(label) = *label else { continue };
        let blocks = list.len().div_ceil(options.block_size).max(options.keep_empty as usize);
        let end = *out.offsets.last().expect("just pushed") as usize + blocks * options.block_size;
        out.sorted_ids.resize(end, sentinel);
        out.sorted_weights.resize(end, 0.0);
        out.expert_ids.resize(end / options.block_size, label);
    }
    out.offsets.push(out.sorted_ids.len() as i32);
    out
}
