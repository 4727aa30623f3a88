//! Expert capacity.

/// `topk_ids` (`[tokens, choices]`) with -1 for what is not granted.
pub fn capacity(topk_ids: &[i32], choices: usize, experts: usize, wanted: usize, capacity: usize) -> Vec<i32> {
    let mut kept = vec![-1; topk_ids.len()];
    let mut loads = vec![0; experts];
    for choice in 0..choices {
        for (ids, kept) in topk_ids.chunks(choices).zip(kept.chunks_mut(choices)) {
            let has = kept.iter().filter(|&&e| e >= 0).count();
            let Ok(expert) = usize::try_from(ids[choice]) else { continue };
            if expert < experts && has < wanted && loads[expert] < capacity {
                loads[expert] += 1;
                kept[choice] = expert as i32;
            }
        }
    }
    kept
}
