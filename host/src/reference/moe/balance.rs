//! Balance without losses.

/// How often each expert is among `ids`.
pub fn histogram(ids: &[i32], experts: usize) -> Vec<i64> {
    (0..experts).map(|e| ids.iter().filter(|&&id| usize::try_from(id) == Ok(e)).count() as i64).collect()
}

/// `bias + rate · sign(mean load - load)`.
pub fn update_bias(bias: &[f32], loads: &[i64], rate: f32) -> Vec<f32> {
    let total: i128 = loads.iter().map(|&l| i128::from(l)).sum();
    let step = |load: i64| match (i128::from(load) * loads.len() as i128).cmp(&total) {
        std::cmp::Ordering::Less => rate,
        std::cmp::Ordering::Equal => 0.0,
        std::cmp::Ordering::Greater => -rate,
    };
    bias.iter().zip(loads).map(|(b, &l)| b + step(l)).collect()
}
