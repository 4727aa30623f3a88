/// Where a rank's tokens go.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Layout {
    /// For each token and rank the number of earlier tokens that go there too, or -1 if the token does not.
    pub places: Vec<i32>,
    /// Tokens by rank.
    pub per_rank: Vec<u32>,
    /// Tokens by expert.
    pub per_expert: Vec<u32>,
    /// For each token and rank, whether it goes there.
    pub in_rank: Vec<u8>,
}

/// `ids`: `[tokens, top_k]`, experts of all ranks, `per_rank` on each; negative for none.
pub fn layout(ids: &[i32], top_k: usize, per_rank: usize, ranks: usize) -> Layout {
    let mut out = Layout { per_rank: vec![0; ranks], per_expert: vec![0; ranks * per_rank], ..Layout::default() };
    for token in ids.chunks(top_k) {
        for rank in 0..ranks {
            let there = token.iter().any(|&id| id >= 0 && id as usize / per_rank == rank);
            out.in_rank.push(there as u8);
            out.places.push(if there { out.per_rank[rank] as i32 } else { -1 });
            out.per_rank[rank] += there as u32;
        }
        for expert in 0..ranks * per_rank {
            out.per_expert[expert] += token.contains(&(expert as i32)) as u32;
        }
    }
    out
}
