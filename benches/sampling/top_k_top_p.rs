//! Sampling from logits of normal distribution: the batches and vocabularies of the peers' table, then variants.

use warploom::sampling::{LogProbs, SamplingAlgorithm, SamplingOptions, SamplingWorkspace, top_k_top_p};
use warploom::{Device, Float, Result, Stream, Tensor, bf16};
use warploom_benches::{Cost, Harness, tiled};

pub fn benches(harness: &mut Harness) {
    let top_p = SamplingOptions::default().top_p(0.9).seed(1);
    let batches = harness.pick(&[1, 8, 16, 32, 64, 128, 256][..], &[1]);
    for vocab in harness.pick(&[128_256, 256_000][..], &[128_256]).iter().copied() {
        for &rows in batches {
            for k in [20, 50] {
                case::<bf16>(harness, &format!("k{k}/p0.9"), rows, vocab, None, &top_p.top_k(k));
            }
        }
    }
    for &rows in harness.pick(&[1, 8, 64, 256][..], &[1]) {
        let k20 = top_p.top_k(20);
        let vocab = 128_256;
        let radix = top_p.algorithm(SamplingAlgorithm::Radix);
        case::<bf16>(harness, "all/p0.9", rows, vocab, None, &top_p);
        case::<bf16>(harness, "all/p0.9/radix", rows, vocab, None, &radix);
        case::<f32>(harness, "all/p0.9", rows, vocab, None, &top_p);
        case::<f32>(harness, "all/p0.9/radix", rows, vocab, None, &radix);
        case::<bf16>(harness, "k1000/p0.9", rows, vocab, None, &top_p.top_k(1000));
        case::<f32>(harness, "k1000/p0.9", rows, vocab, None, &top_p.top_k(1000));
        case::<bf16>(harness, "greedy", rows, vocab, None, &SamplingOptions::default().greedy());
        case::<bf16>(harness, "k20/p0.9/batched", rows, vocab, None, &k20.algorithm(SamplingAlgorithm::Batched));
        for splits in harness.pick(&[2, 4, 8, 16][..], &[4]) {
            let name = format!("k20/p0.9/split_k{splits}");
            case::<bf16>(
                harness,
                &name,
                rows,
                vocab,
                None,
                &k20.algorithm(SamplingAlgorithm::SplitK { splits: *splits }),
            );
        }
        case::<bf16>(harness, "k20/p0.9/radix", rows, vocab, None, &k20.algorithm(SamplingAlgorithm::Radix));
        case::<bf16>(harness, "k20/p0.9/log_probs", rows, vocab, Some(0), &k20);
        case::<bf16>(harness, "k20/p0.9/top20_log_probs", rows, vocab, Some(20), &k20);
        case::<bf16>(harness, "all/p0.9/log_probs", rows, vocab, Some(0), &top_p);
        case::<bf16>(harness, "all/p0.9/top20_log_probs", rows, vocab, Some(20), &top_p);
        case::<f32>(harness, "all/p0.9/top20_log_probs", rows, vocab, Some(20), &top_p);
        case::<bf16>(harness, MIXED, rows, vocab, None, &top_p);
        case::<bf16>(harness, &format!("{MIXED}/top20_log_probs"), rows, vocab, Some(20), &top_p);
    }
    clusters(harness);
}

/// Batches between those above, and a larger vocabulary, by clusters and without.
fn clusters(harness: &mut Harness) {
    let top_p = SamplingOptions::default().top_p(0.9).seed(1);
    let radix = top_p.algorithm(SamplingAlgorithm::Radix);
    for &rows in harness.pick(&[12, 16, 24, 32, 48][..], &[]) {
        case::<bf16>(harness, "all/p0.9", rows, 128_256, None, &top_p);
        case::<f32>(harness, "all/p0.9", rows, 128_256, None, &top_p);
    }
    for &rows in harness.pick(&[1, 16, 64][..], &[]) {
        case::<bf16>(harness, "all/p0.9", rows, 256_000, None, &top_p);
        case::<f32>(harness, "all/p0.9", rows, 256_000, None, &top_p);
        case::<f32>(harness, "all/p0.9/radix", rows, 256_000, None, &radix);
    }
}

/// Every other row keeps 20 tokens, the others all of them, before top-p: as in batches of several users.
const MIXED: &str = "k20_or_all/p0.9";

/// `top_n`: with log-probabilities, of the token and of so many others.
fn case<T: Float>(
    harness: &mut Harness,
    name: &str,
    rows: usize,
    vocab: usize,
    top_n: Option<usize>,
    options: &SamplingOptions<'static>,
) {
    let cost = Cost::bytes(rows * vocab * size_of::<T>(), rows * 4);
    harness.case(&format!("sampling/top_k_top_p/{}/{name}/{rows}x{vocab}", T::DTYPE), cost, |device, stream, set| {
        let logits = normal::<T>(device, stream, rows, vocab, set)?;
        let mut workspace = SamplingWorkspace::new(device, rows, vocab)?;
        let mut tokens = Tensor::<i32>::uninit(device, &[rows])?;
        let mut log_probs = match top_n {
            Some(n) => LogProbs::new(device, rows, n)?,
            None => LogProbs::none(),
        };
        let by_row: Vec<i32> = (0..rows).map(|row| if row % 2 == 0 { 20 } else { 0 }).collect();
        let by_row = if name.starts_with(MIXED) { Some(Tensor::from_slice(device, &by_row, &[rows])?) } else { None };
        let options = *options;
        Ok(move |s: &Stream| {
            let options = by_row.as_ref().map_or(options, |k| options.top_k(k));
            top_k_top_p(s, &mut tokens, Some(&mut log_probs), &logits, &options, &mut workspace)
        })
    });
}

/// Logits of standard deviation 3: the sums of twelve uniform numbers, repeated with a period prime to every vocabulary.
fn normal<T: Float>(device: &Device, stream: &Stream, rows: usize, vocab: usize, set: usize) -> Result<Tensor<T>> {
    let mut state = (set as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut uniform = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u64 << 24) as f32
    };
    let values: Vec<T> =
        (0..262_147).map(|_| T::from_f32(3.0 * ((0..12).map(|_| uniform()).sum::<f32>() - 6.0))).collect();
    tiled(device, stream, &values, &[rows, vocab])
}
