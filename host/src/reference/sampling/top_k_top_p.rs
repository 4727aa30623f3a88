//! Sampling of one row, by sorting all of it.

/// What changes logits before they are ranked. Absent parts are empty or neutral.
#[derive(Clone, Debug)]
pub struct Adjust<'a> {
    /// Whether a token is allowed; empty for all.
    pub allowed: &'a [bool],
    /// Added to the logits; empty for none.
    pub bias: &'a [f64],
    /// The prompt's tokens.
    pub prompt: &'a [i32],
    /// The tokens generated since.
    pub generated: &'a [i32],
    /// 1 for none.
    pub repetition: f64,
    /// 0 for none.
    pub presence: f64,
    /// 0 for none.
    pub frequency: f64,
}

impl Default for Adjust<'_> {
    fn default() -> Self {
        Self { allowed: &[], bias: &[], prompt: &[], generated: &[], repetition: 1.0, presence: 0.0, frequency: 0.0 }
    }
}

/// The logits to rank: -inf for what is not allowed.
pub fn adjust(logits: &[f64], by: &Adjust<'_>) -> Vec<f64> {
    let count = |tokens: &[i32], i: usize| tokens.iter().filter(|&&t| usize::try_from(t) == Ok(i)).count();
    let adjusted = |(i, &logit): (usize, &f64)| {
        if by.allowed.get(i) == Some(&false) {
            return f64::NEG_INFINITY;
        }
        let mut x = logit + by.bias.get(i).unwrap_or(&0.0);
        let generated = count(by.generated, i);
        if generated + count(by.prompt, i) > 0 {
            x = if x > 0.0 { x / by.repetition } else { x * by.repetition };
        }
        if generated > 0 {
            x -= by.frequency * generated as f64 + by.presence;
        }
        x
    };
    logits.iter().enumerate().map(adjusted).collect()
}

/// Which tokens may be drawn.
#[derive(Clone, Copy, Debug)]
pub struct Filters {
    /// 0 is greedy; +inf makes all weights equal but for those below a logit of +inf, which are 0.
    pub temperature: f64,
    /// The vocabulary, or more, for all.
    pub top_k: usize,
    /// 1 for all.
    pub top_p: f64,
    /// 0 for all.
    pub min_p: f64,
}

impl Default for Filters {
    fn default() -> Self {
        Self { temperature: 1.0, top_k: usize::MAX, top_p: 1.0, min_p: 0.0 }
    }
}

/// A token with its probabilities.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ranked {
    /// Its number.
    pub token: usize,
    /// Softmax of the logits divided by the temperature.
    pub before: f64,
    /// Among those that the filters keep; 0 for the rest.
    pub after: f64,
}

/// All tokens above -inf in order of rank. Those that the filters keep come first, except that equal tokens share nothing
/// but their weight: of equals at a cut the lower tokens are kept.
pub fn rank(logits: &[f64], filters: &Filters) -> Vec<Ranked> {
    let greedy = filters.temperature == 0.0;
    let (temperature, top_k) = if greedy { (1.0, 1) } else { (filters.temperature, filters.top_k) };
    let mut order: Vec<usize> = (0..logits.len()).filter(|&i| logits[i] > f64::NEG_INFINITY).collect();
    order.sort_by(|&a, &b| logits[b].partial_cmp(&logits[a]).expect("no NaN").then(a.cmp(&b)));
    let Some(&best) = order.first() else { return vec![] };
    let weight = |i: usize| match logits[i] - logits[best] {
        _ if logits[i] == logits[best] => 1.0,
        f64::NEG_INFINITY => 0.0,
        distance => (distance / temperature).exp(),
    };
    let sum: f64 = order.iter().map(|&i| weight(i)).sum();

    let mut kept: Vec<f64> = order.iter().take(top_k).map(|&i| weight(i)).take_while(|&w| w >= filters.min_p).collect();
    let target = filters.top_p * kept.iter().sum::<f64>();
    let mut mass = 0.0;
    let enough = kept.iter().position(|w| {
        mass += w;
        mass >= target
    });
    if filters.top_p < 1.0 {
        kept.truncate(enough.map_or(kept.len(), |i| i + 1));
    }
    let mass: f64 = kept.iter().sum();
    let ranked = |(place, &i): (usize, &usize)| Ranked {
        token: i,
        before: weight(i) / sum,
        after: kept.get(place).map_or(0.0, |w| w / mass),
    };
    order.iter().enumerate().map(ranked).collect()
}

/// The token for `u` in [0, 1): the first whose probability with all before it exceeds `u`.
pub fn sample(ranked: &[Ranked], u: f64) -> Option<usize> {
    let mut upto = 0.0;
    let drawn = ranked.iter().find(|r| {
        upto += r.after;
        upto > u
    });
    // Rounding may leave the last sum a little below 1.
    drawn.or(ranked.iter().rfind(|r| r.after > 0.0)).map(|r| r.token)
}
