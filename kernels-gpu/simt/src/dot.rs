//! Dot products on the CPU, compiled with this crate, whose loops are optimised where the program's are not.

/// Partial sums, which vectorise.
const LANES: usize = 16;

/// `a · b` of two equally long rows, for plain loops in place of kernels: sixteen partial sums, added at the end.
pub fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0f32; LANES];
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    let rest: f32 = a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum();
    for (a, b) in a.iter().zip(b) {
        for i in 0..LANES {
            sums[i] += a[i] * b[i];
        }
    }
    sums.iter().sum::<f32>() + rest
}

#[cfg(test)]
mod tests {
    use super::dot;

    #[test]
    fn every_length() {
        for n in 0..70 {
            let (a, b): (Vec<_>, Vec<_>) = (0..n).map(|i| (i as f32, (n - i) as f32)).unzip();
            let expected: u32 = (0..n).map(|i| i * (n - i)).sum();
            assert_eq!(dot(&a, &b), expected as f32);
        }
    }
}
