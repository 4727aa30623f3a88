use super::layout;

/// A row that a rank receives.
#[derive(Clone, Debug, PartialEq)]
pub struct Arrived {
    /// Where it lies.
    pub row: usize,
    /// Whose token it is.
    pub source: usize,
    /// Which.
    pub token: usize,
    /// Its experts as this rank numbers them; -1 for those of others.
    pub ids: Vec<i32>,
}

/// What every rank receives, and where the tokens of every rank lie: for each rank its rows, and for each rank
/// `[tokens, ranks]` rows (-1 for none).
///
/// `ids`: the experts of each rank's tokens, `[tokens, top_k]`. With `slots`, token `t` of rank `s` becomes row `s slots + t`;
/// without, rows have no gaps.
pub fn dispatch(
    ids: &[Vec<i32>],
    top_k: usize,
    per_rank: usize,
    slots: Option<usize>,
) -> (Vec<Vec<Arrived>>, Vec<Vec<i32>>) {
    let ranks = ids.len();
    let mut received = vec![Vec::new(); ranks];
    let mut places = vec![Vec::new(); ranks];
    let mut next = vec![0; ranks];
    for (source, ids) in ids.iter().enumerate() {
        let routes = layout(ids, top_k, per_rank, ranks);
        for (token, there) in routes.in_rank.chunks(ranks).enumerate() {
            for rank in 0..ranks {
                if there[rank] == 0 {
                    places[source].push(-1);
                    continue;
                }
                let row = slots.map_or(next[rank], |slots| source * slots + token);
                next[rank] += 1;
                places[source].push(row as i32);
                let local = |&id: &i32| {
                    if id >= 0 && id as usize / per_rank == rank { id - (rank * per_rank) as i32 } else { -1 }
                };
                let ids = ids[token * top_k..][..top_k].iter().map(local).collect();
                received[rank].push(Arrived { row, source, token, ids });
            }
        }
    }
    (received, places)
}
