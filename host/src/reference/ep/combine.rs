/// The rows of a rank's tokens, added up in the order of the ranks: `[tokens, hidden]`.
///
/// `results`: each rank's rows of `hidden`; `places`: `[tokens, ranks]`, -1 for none; `weights`: the same, or none for ones;
/// `biases`: `[tokens, hidden]` each.
pub fn combine(
    results: &[Vec<f64>],
    places: &[i32],
    weights: Option<&[f64]>,
    biases: &[&[f64]],
    hidden: usize,
) -> Vec<f64> {
    let ranks = results.len();
    let mut out = Vec::with_capacity(places.len() / ranks * hidden);
    for (token, places) in places.chunks(ranks).enumerate() {
        for column in 0..hidden {
            let mut sum = 0.0;
            for (rank, &place) in places.iter().enumerate().filter(|(_, p)| **p >= 0) {
                let weight = weights.map_or(1.0, |w| w[token * ranks + rank]);
                sum += weight * results[rank][place as usize * hidden + column];
            }
            out.push(biases.iter().fold(sum, |sum, b| sum + b[token * hidden + column]));
        }
    }
    out
}
